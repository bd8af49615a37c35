"""The measures by name, and their run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from sparklog.bench import keeping, objectstore, writing
from sparklog.bench.kafka import measures as kafka
from sparklog.bench.report import Figure, Options
from sparklog.bench.spark import age, bulk, stream

Measure = Callable[[Options], Iterable[Figure]]
"""Its figures, as soon as each one is known."""

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
    "objectstore": objectstore.objectstore,
    "compaction": keeping.flights,
    "kafka-produce": kafka.produce,
    "kafka-consume": kafka.consume,
    "kafka-python": kafka.python,
    "kafka-single": kafka.single,
    "kafka-idle": kafka.idle,
    "kafka-rebalance": kafka.rebalance,
    "spark-bulk": bulk.bulk,
    "spark-stream": stream.stream,
    "spark-age": age.age,
}
"""By name, in the order in which they run."""


def named(name: str) -> list[str]:
    """The measures that a name means: itself, or all of its group, as `kafka` and `spark` are.

    Raises KeyError for a name that is none.
    """
    found = [each for each in MEASURES if each == name or each.startswith(f"{name}-")]
    if not found:
        raise KeyError(name)
    return found


def run(
    names: list[str], options: Options, *, on_figure: Callable[[Figure], None] = lambda _: None
) -> list[Figure]:
    """The figures of the measures named, or of all where none is.

    Raises KeyError for a name that is none of `MEASURES`.
    """
    figures = []
    for name in names or list(MEASURES):
        for figure in MEASURES[name](options):
            on_figure(figure)
            figures.append(figure)
    return figures
