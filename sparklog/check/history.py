"""Observations of a log's clients: columns of int64, for any number of operations.

Times are microseconds of one monotonic clock. A value is a number: the producer that sent it in its
upper bits, how many it had sent before in its lower ones. Each thread has a `Rows` of its own for
each table, so nothing is locked while a history is made.
"""

from __future__ import annotations

import io
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sparklog import errors

Column = npt.NDArray[np.int64]

SEQUENCE_BITS: Final = 40
ACKED: Final = 0
FAILED: Final = 1
"""Refused for good: it must never be read."""
UNKNOWN: Final = 2
"""No answer: it may be in the log, or not."""
NO_OFFSET: Final = -1
NO_GROUP: Final = -1
NOT_SENT: Final = -1
"""As a value: the record is none of those that this run sends."""


def value_of(producer: int, sequence: int) -> int:
    """The value of a producer's record number `sequence`."""
    return producer << SEQUENCE_BITS | sequence


class Rows:
    """Rows of one table, as they happen."""

    def __init__(self, table: type[HistoryTable]) -> None:
        self._table = table
        self._width = len(fields(table))  # type: ignore[arg-type]
        self._cells = array("q")

    def add(self, *row: int) -> None:
        """One row, in the order of the table's columns."""
        self._cells.extend(row)

    def __len__(self) -> int:
        return len(self._cells) // self._width

    def columns(self) -> Any:
        """The table."""
        cells = np.frombuffer(self._cells, np.int64).reshape(-1, self._width)
        return self._table(*(np.ascontiguousarray(cells[:, at]) for at in range(self._width)))


class HistoryTable:
    """Columns of the same length."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Sends(HistoryTable):
    """Records that producers sent, each producer's in their order."""

    value: Column
    partition: Column
    """Target partition,"""
    status: Column
    acked_partition: Column
    """and where the broker said that it is,"""
    offset: Column
    """at which offset; `NO_OFFSET`: it did not."""
    started_us: Column
    ended_us: Column


@dataclass(frozen=True, slots=True)
class Reads(HistoryTable):
    """Records that consumers were given, each consumer's in their order."""

    consumer: Column
    session: Column
    """From an assignment or a seek of one partition to the next; a number of its own for each."""
    poll: Column
    """Which call of the consumer gave it."""
    partition: Column
    offset: Column
    value: Column
    intact: Column
    """1: key, value, header and time are as they were sent."""
    at_us: Column


@dataclass(frozen=True, slots=True)
class Commits(HistoryTable):
    """Offsets that members of groups committed."""

    group: Column
    partition: Column
    offset: Column
    status: Column
    started_us: Column
    ended_us: Column


@dataclass(frozen=True, slots=True)
class Fetches(HistoryTable):
    """Committed offsets that members of groups were given; `NO_OFFSET`: there is none."""

    group: Column
    partition: Column
    offset: Column
    started_us: Column
    ended_us: Column


@dataclass(frozen=True, slots=True)
class Ends(HistoryTable):
    """Log start and end offsets that clients were given."""

    partition: Column
    start: Column
    end: Column
    started_us: Column
    ended_us: Column


@dataclass(frozen=True, slots=True)
class Consumers(HistoryTable):
    """One row for each consumer, by its number."""

    consumer: Column
    group: Column
    """`NO_GROUP`: it reads alone."""
    is_final: Column
    """1: it began after the last send was decided, and read everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All tables of a run."""

    sends: Sends
    reads: Reads
    commits: Commits
    fetches: Fetches
    ends: Ends
    consumers: Consumers

    @property
    def operations(self) -> int:
        return sum(len(getattr(self, each.name)) for each in fields(self))

    @property
    def acked(self) -> int:
        return int(np.count_nonzero(self.sends.status == ACKED))


TABLES: Final[dict[str, type[HistoryTable]]] = {
    "sends": Sends,
    "reads": Reads,
    "commits": Commits,
    "fetches": Fetches,
    "ends": Ends,
    "consumers": Consumers,
}


class Recorder:
    """Observations of one thread."""

    def __init__(self) -> None:
        self.sends = Rows(Sends)
        self.reads = Rows(Reads)
        self.commits = Rows(Commits)
        self.fetches = Rows(Fetches)
        self.ends = Rows(Ends)
        self.consumers = Rows(Consumers)


def joined(recorders: Iterable[Recorder]) -> History:
    """Observations of all threads."""
    several = list(recorders)
    return History(**{name: _stacked(name, table, several) for name, table in TABLES.items()})


def _stacked(name: str, table: type[HistoryTable], recorders: list[Recorder]) -> Any:
    parts = [getattr(each, name).columns() for each in recorders]
    columns = [
        np.concatenate([getattr(part, column.name) for part in parts] or [np.empty(0, np.int64)])
        for column in fields(table)  # type: ignore[arg-type]
    ]
    return table(*columns)


# ------------------------------------------------------------------------------ kept in a file


def save(history: History, file: Path) -> None:
    """One file, which `load` and `numpy.load` read."""
    columns = {
        f"{name}.{column.name}": getattr(getattr(history, name), column.name)
        for name, table in TABLES.items()
        for column in fields(table)  # type: ignore[arg-type]
    }
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **columns)
    file.write_bytes(buffer.getvalue())


def load(file: Path) -> History:
    """Raises `BadRequest` for a file that is not a history."""
    try:
        with np.load(file, allow_pickle=False) as columns:
            tables = {
                name: table(*(columns[f"{name}.{each.name}"] for each in fields(table)))  # type: ignore[arg-type]
                for name, table in TABLES.items()
            }
    except (KeyError, ValueError, EOFError) as error:
        raise errors.BadRequest(
            reason=f"{file} is not a history of sparklog check: {error}"
        ) from error
    return History(**tables)  # type: ignore[arg-type]
