"""The two brokers that are compared: ours, and a real Kafka."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeVar

from sparklog.bench import jars
from sparklog.bench.broker import BrokerProcess, FreshRoot
from sparklog.bench.kafkaprocess import KafkaProcess
from sparklog.bench.progress import doing
from sparklog.bench.report import Figure, Options

_T = TypeVar("_T")
PARTITIONS: Final = 4
_TURNS: Final = 2
_HOT_TAIL_BYTES: Final = 1 << 30
"""So that what is read hot is hot; Kafka has the page cache."""


class Side(Protocol):
    """A broker that serves."""

    name: str

    @property
    def address(self) -> str:
        """Where Kafka's clients find it."""

    @property
    def pid(self) -> int: ...

    def restart(self) -> None:
        """Stops it in good order and starts it again, on the same data."""


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
class Bed:
    """What a measure needs: a folder on the disk, and both sides where Kafka can be got."""

    folder: Path
    options: Options

    @property
    def sides(self) -> list[type[Ours | Theirs]]:
        return [Ours, Theirs] if jars.find().broker else [Ours]

    def best(self, what: str, work: Callable[[Side], float]) -> dict[str, float]:
        """The higher figure of each side's turns, by its name; each turn is a fresh broker's."""
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
        """What `work` finds of each side, in one turn."""
        found = {}
        for kind in self.sides:
            with doing(f"{what}, {kind.name}"), self.one(kind) as side:
                found[kind.name] = work(side)
        return found

    @contextmanager
    def one(self, kind: type[Ours | Theirs]) -> Iterator[Side]:
        """A side on a fresh folder."""
        with FreshRoot(self.folder) as folder, ExitStack() as ending:
            side = kind(folder)
            side.start()
            ending.callback(side.stop)
            yield side


def more(
    name: str, found: dict[str, float], *, least: float, unit: str = "M records/s", per: float = 1e6
) -> Figure:
    """How many times Kafka's figure ours is; without Kafka, what it is."""
    ours, theirs = found[Ours.name], found.get(Theirs.name)
    target = f"≥ {least:g} × Kafka"
    told = f"{ours / per:.2f} {unit}"
    if theirs is None:
        return Figure(name=name, value=told, target=target, detail="no Kafka to compare")
    return Figure(
        name=name,
        value=f"{ours / theirs:.2f} ×",
        target=target,
        met=ours >= least * theirs,
        detail=f"{told}, Kafka {theirs / per:.2f}",
    )


def measure(
    work: Callable[[Bed], Iterator[Figure]],
) -> Callable[[Options], Iterator[Figure]]:
    """A measure on a bed of its own; where something is not to be had, a line that says so."""

    @functools.wraps(work)
    def measured(options: Options) -> Iterator[Figure]:
        bed = Bed(folder=options.folder, options=options)
        if not jars.find().broker:
            yield Figure(name=f"kafka: {'; '.join(jars.find().missing)}", value="not compared")
        try:
            yield from work(bed)
        except (ModuleNotFoundError, RuntimeError) as error:
            name = work.__name__
            yield Figure(name=f"kafka-{name}: {error}", value="not measured")

    return measured
