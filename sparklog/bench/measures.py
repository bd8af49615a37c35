"""The measures by name, and their run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from sparklog.bench import keeping, objectstore, scan, writing
from sparklog.bench.report import Figure, Options

Measure = Callable[[Options], list[Figure]]

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
    "scan": scan.scan,
    "compaction": keeping.flights,
}
"""By name, in the order in which they run."""


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
