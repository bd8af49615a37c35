"""Observations by a log's clients: columns of int64, for any number of operations.

Times are microseconds of one monotonic clock. A value is a number: its producer in the upper bits,
the producer's sequence number in the lower ones. Each thread has its own `Rows` for each table, so
recording a history needs no lock.
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
"""Definitively rejected: it must never be read."""
UNKNOWN: Final = 2
"""No answer: it may or may not be in the log."""
NO_OFFSET: Final = -1
NO_GROUP: Final = -1
NOT_SENT: Final = -1
"""As a value: this run did not send the record."""


def value_of(producer: int, sequence: int) -> int:
    """The value of a producer's record number `sequence`."""
    return producer << SEQUENCE_BITS | sequence


class Rows:
    """Rows of one table, recorded as they occur."""

    def __init__(self, table: type[HistoryTable]) -> None:
        self._table = table
        self._width = len(fields(table))  # type: ignore[arg-type]
        self._cells = array("q")

    def add(self, *row: int) -> None:
        """Adds a row, its values in the order of the table's columns."""
        self._cells.extend(row)

    def __len__(self) -> int:
        return len(self._cells) // self._width

    def columns(self) -> Any:
        """Returns the rows as a table."""
        cells = np.frombuffer(self._cells, np.int64).reshape(-1, self._width)
        return self._table(*(np.ascontiguousarray(cells[:, at]) for at in range(self._width)))


class HistoryTable:
    """Columns of the same length."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Sends(HistoryTable):
    """Records that producers sent, each producer's in order."""

    value: Column
    partition: Column
    """The partition that it was sent to."""
    status: Column
    acked_partition: Column
    """The partition that the ack names."""
    offset: Column
    """The offset that the ack names; `NO_OFFSET` if none."""
    started_us: Column
    ended_us: Column


@dataclass(frozen=True, slots=True)
class Reads(HistoryTable):
    """Records that consumers received, each consumer's in order."""

    consumer: Column
    session: Column
    """Unique number of the span from one assignment or seek of a partition to the next."""
    poll: Column
    """Number of the consumer's poll that returned it."""
    partition: Column
    offset: Column
    value: Column
    intact: Column
    """1: key, value, header and time are as sent."""
    at_us: Column


@dataclass(frozen=True, slots=True)
class Commits(HistoryTable):
    """Offsets that group members committed."""

    group: Column
    partition: Column
    offset: Column
    status: Column
    started_us: Column
    ended_us: Column


@dataclass(frozen=True, slots=True)
class Fetches(HistoryTable):
    """Committed offsets that group members fetched; `NO_OFFSET` if there was none."""

    group: Column
    partition: Column
    offset: Column
    started_us: Column
    ended_us: Column


@dataclass(frozen=True, slots=True)
class Ends(HistoryTable):
    """Log start and end offsets that clients received."""

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
    """`NO_GROUP`: it reads without a group."""
    is_final: Column
    """1: it began once the last send had completed, and read everything."""


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
    """Observations by one thread."""

    def __init__(self) -> None:
        self.sends = Rows(Sends)
        self.reads = Rows(Reads)
        self.commits = Rows(Commits)
        self.fetches = Rows(Fetches)
        self.ends = Rows(Ends)
        self.consumers = Rows(Consumers)


def joined(recorders: Iterable[Recorder]) -> History:
    """Joins the observations from all threads."""
    several = list(recorders)
    return History(**{name: _stacked(name, table, several) for name, table in TABLES.items()})


def _stacked(name: str, table: type[HistoryTable], recorders: list[Recorder]) -> Any:
    parts = [getattr(each, name).columns() for each in recorders]
    columns = [
        np.concatenate([getattr(part, column.name) for part in parts] or [np.empty(0, np.int64)])
        for column in fields(table)  # type: ignore[arg-type]
    ]
    return table(*columns)


# ------------------------------------------------------------------------------ stored in a file


def save(history: History, file: Path) -> None:
    """Writes one file, which `load` and `numpy.load` can read."""
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
