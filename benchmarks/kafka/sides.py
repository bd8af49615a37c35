"""The two brokers compared: ours and a real Kafka."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeVar

from benchmarks import jars
from benchmarks.kafka_process import KafkaProcess
from benchmarks.progress import doing
from sparklog.bench.broker import BrokerProcess, FreshRoot
from sparklog.bench.report import BenchOptions, Measurement

_T = TypeVar("_T")
PARTITIONS: Final = 4
_TURNS: Final = 2
_HOT_TAIL_BYTES: Final = 1 << 30
"""Large enough that recent records stay in memory; Kafka has the page cache."""


class Side(Protocol):
    """A running broker."""

    name: str

    @property
    def address(self) -> str:
        """Bootstrap address for Kafka's clients."""

    @property
    def pid(self) -> int: ...

    def restart(self) -> None:
        """Shuts it down cleanly and starts it again on the same data."""


class Ours:
    name = "sparklog"

    def __init__(self, folder: Path) -> None:
        settings = {"SPARKLOG_HOT_TAIL_BYTES": str(_HOT_TAIL_BYTES)}
        self._process = BrokerProcess(folder / "root", settings, kafka="127.0.0.1:0")

    def start(self) -> None:
        self._process.start()

    @property
    def address(self) -> str:
        return self._process.kafka_address

    @property
    def flight_address(self) -> str:
        return self._process.address

    @property
    def pid(self) -> int:
        return self._process.pid

    def restart(self) -> None:
        self.stop()
        self.start()

    def stop(self) -> None:
        self._process.stop()


class Theirs:
    name = "Kafka"

    def __init__(self, folder: Path) -> None:
        self._process = KafkaProcess(jars.find().broker, folder / "kafka")

    def start(self) -> None:
        self._process.start()

    @property
    def address(self) -> str:
        return self._process.address

    @property
    def pid(self) -> int:
        return self._process.pid

    def restart(self) -> None:
        self._process.restart()

    def stop(self) -> None:
        self._process.stop()


@dataclass(slots=True, kw_only=True)
class KafkaSetup:
    """A folder on the disk, and both sides if Kafka is available."""

    folder: Path
    options: BenchOptions

    @property
    def sides(self) -> list[type[Ours | Theirs]]:
        return [Ours, Theirs] if jars.find().broker else [Ours]

    def best(self, what: str, work: Callable[[Side], float]) -> dict[str, float]:
        """Each side's best figure over its turns, by name; each turn uses a fresh broker."""
        found: dict[str, list[float]] = {}
        for turn in range(_TURNS):
            for kind in self.sides:
                with (
                    doing(f"{what}, {kind.name}, turn {turn + 1} of {_TURNS}"),
                    self.one(kind) as side,
                ):
                    found.setdefault(kind.name, []).append(work(side))
        return {name: max(figures) for name, figures in found.items()}

    def each(self, what: str, work: Callable[[Side], _T]) -> dict[str, _T]:
        """Returns the result of `work` for each side, in one turn."""
        found = {}
        for kind in self.sides:
            with doing(f"{what}, {kind.name}"), self.one(kind) as side:
                found[kind.name] = work(side)
        return found

    @contextmanager
    def one(self, kind: type[Ours | Theirs]) -> Iterator[Side]:
        """Yields a side started on a fresh folder."""
        with FreshRoot(self.folder) as folder, ExitStack() as ending:
            side = kind(folder)
            side.start()
            ending.callback(side.stop)
            yield side


def more(
    name: str, found: dict[str, float], *, least: float, unit: str = "M records/s", per: float = 1e6
) -> Measurement:
    """Returns our figure as a multiple of Kafka's; without Kafka, the figure alone."""
    ours, theirs = found[Ours.name], found.get(Theirs.name)
    target = f"≥ {least:g} × Kafka"
    rate = f"{ours / per:.2f} {unit}"
    if theirs is None:
        return Measurement(name=name, value=rate, target=target, detail="no Kafka to compare")
    return Measurement(
        name=name,
        value=f"{ours / theirs:.2f} ×",
        target=target,
        met=ours >= least * theirs,
        detail=f"{rate}, Kafka {theirs / per:.2f}",
    )


def measure(
    work: Callable[[KafkaSetup], Iterator[Measurement]],
) -> Callable[[BenchOptions], Iterator[Measurement]]:
    """Returns a measure that creates its setup, and reports missing dependencies and failures."""

    @functools.wraps(work)
    def measured(options: BenchOptions) -> Iterator[Measurement]:
        setup = KafkaSetup(folder=options.folder, options=options)
        if not jars.find().broker:
            yield Measurement(name=f"kafka: {'; '.join(jars.find().missing)}", value="not compared")
        try:
            yield from work(setup)
        except (ModuleNotFoundError, RuntimeError) as error:
            name = work.__name__
            yield Measurement(name=f"kafka-{name}: {error}", value="not measured")

    return measured
