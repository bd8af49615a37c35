"""The measures of `python -m benchmarks` by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from benchmarks.json_values import json_values
from benchmarks.kafka import measures as kafka
from benchmarks.spark import age, bulk, stream
from sparklog.bench.command import Measure

MEASURES: Final[Mapping[str, Measure]] = {
    "kafka-produce": kafka.produce,
    "kafka-consume": kafka.consume,
    "kafka-python": kafka.python,
    "kafka-single": kafka.single,
    "kafka-idle": kafka.idle,
    "kafka-rebalance": kafka.rebalance,
    "spark-bulk": bulk.bulk,
    "spark-stream": stream.stream,
    "spark-age": age.age,
    "json-values": json_values,
}
"""In the order in which they run."""
