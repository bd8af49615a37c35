"""The measures of `sparklog bench` by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sparklog.bench import cost, keeping, metadata, object_store, scraping, sizing, writing
from sparklog.bench.command import Measure

MEASURES: Final[Mapping[str, Measure]] = {
    "disk": writing.disk,
    "latency": writing.latency,
    "burst": writing.burst,
    "sustained": writing.sustained,
    "send": writing.send,
    "lag": keeping.lag,
    "age": keeping.age,
    "memory": keeping.memory,
    "restart": keeping.restart,
    "outage": keeping.outage,
    "objectstore": object_store.objectstore,
    "objectstorewide": object_store.objectstore_wide,
    "cost": cost.cost,
    "compaction": keeping.flights,
    "metadata": metadata.large_cluster,
    "scrape": scraping.scrape,
    "sizing": sizing.sizing,
}
"""In the order in which they run."""

COMPARISONS: Final = (
    *("avro", "cluster", "flight", "jobs", "json", "kafka", "mirror", "spark", "typed", "wide"),
)
"""First words of the measures in `benchmarks/`, which compare with other software or require it."""
