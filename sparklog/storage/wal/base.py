"""Values and interface of the write-ahead log, regardless of how it is stored.

The flushes of an epoch are numbered from 0, without holes up to the last acked one. A *fence* ends
the epoch for every broker and reader: flushes after it do not count. `Wal` is the interface;
`wal.of` returns its implementation for a kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Protocol, runtime_checkable

import crc32c
import pyarrow as pa

from sparklog import errors
from sparklog.storage.objects import Store
from sparklog.storage.snapshot import Bounds, Entry, EntryKind, Located, WalPosition
from sparklog.storage.wal.payloads import Payload, offsets_of

FOLDER: Final = "wal"
CHECKPOINT: Final = "checkpoint-"
SEGMENT: Final = ".seg"
NOTHING_KNOWN: Final[Mapping[int, WalObject]] = MappingProxyType({})
_NAMED: Final = re.compile(r"(\d+)/(\d{10})/((?:checkpoint-)?\d{20}|\d{8,}\.seg)")


@dataclass(frozen=True, slots=True, kw_only=True)
class WalObject:
    """The entries that one flush made durable."""

    at: WalPosition
    written_us: int
    located: tuple[Located, ...]
    held_bytes: int = field(default=0, compare=False)
    """The cost of retaining the flush; 0 if another process has written it.

    On a file system, this is its bytes. An object counts as 128 KiB at least, because a restart
    reads each of those that are still needed with a request.
    """

    @property
    def is_fence(self) -> bool:
        return any(each.entry.kind is EntryKind.FENCE for each in self.located)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A broker's state as of `sequence`. Of the flushes up to it, only `needed` still count."""

    sequence: int
    needed: tuple[int, ...]
    state: bytes
    bounds: Mapping[str, Sequence[Bounds]] | None = None
    """Bounds of each partition by topic id, as of `sequence`; None if written by an old release."""


class Appender(Protocol):
    """Appends the flushes of one epoch in order.

    `append`, `checkpoint` and `close` must each be called by only one caller at a time;
    `checkpoint`, `tend` and the read-only methods may run concurrently with `append`.
    """

    @property
    def next_sequence(self) -> int:
        """The sequence of the next flush."""
        ...

    def append(self, entries: Sequence[tuple[Entry, Payload]]) -> WalObject:
        """Writes the next flush, and returns it with its byte ranges once it is durable.

        Raises `BrokerFenced` if the epoch has ended; `StorageFull` and `StorageUnavailable` if the
        flush certainly does not count, so that another may be attempted; `SyncFailed`, after which
        nothing may be attempted; `OutcomeUnknown` only if `stopping` ends the retries before the
        outcome is known.
        """
        ...

    def read(self, sequence: int) -> WalObject:
        """Returns the index of a flush that a checkpoint may still need.

        Raises `ObjectMissing` and `CorruptObject`.
        """
        ...

    def checkpoint(
        self,
        sequence: int,
        needed: Sequence[int],
        state: bytes,
        bounds: Mapping[str, Sequence[Bounds]] | None = None,
    ) -> None:
        """Puts a checkpoint: of the flushes up to `sequence`, only `needed` still count.

        `bounds`: the bounds of each partition, by topic id. Raises `BrokerFenced` if another
        process has written this checkpoint.
        """
        ...

    def checkpoint_is_due(self, after: int, *, objects: int) -> bool:
        """Returns whether enough follows the checkpoint of sequence `after` for the next to be due.

        `objects`: the number of flushes that is enough, if each is an object.
        """
        ...

    def carried_up_to(self, checkpoint: int, *, objects: int) -> int:
        """Returns the last sequence old enough, at a checkpoint, for its entries to be carried.

        `objects`: as in `checkpoint_is_due`. Negative if there is none.
        """
        ...

    def trim(self, checkpoint: Checkpoint) -> None:
        """Deletes what `checkpoint` makes unnecessary, including older checkpoints.

        `checkpoint` must be one that this appender has put, not older than that of an earlier call.
        Raises the store's errors; the next call then deletes the rest.
        """
        ...

    def tend(self) -> None:
        """Prepares space for the next flushes, and checks that the epoch's files are in place.

        Raises `SyncFailed` and the store's errors.
        """
        ...

    def close(self) -> None:
        """Releases the appender's resources. Nothing is appended afterwards."""
        ...


class PlannedFlush(Protocol):
    """A flush that has been assigned a sequence, and is written concurrently with others."""

    def write(self, *, gives_up: Callable[[], bool]) -> WalObject:
        """Writes the flush, and returns it once it is durable. It counts only if all before it do.

        Raises what `Appender.append` raises, but `StorageFull` and `StorageUnavailable` only if
        `gives_up` returns true after such an error. Otherwise it retries: flushes planned later
        need this one.
        """
        ...


@runtime_checkable
class PlanningAppender(Protocol):
    """An appender whose flushes may be written concurrently."""

    def plan(self, entries: Sequence[tuple[Entry, Payload]]) -> PlannedFlush:
        """Assigns a flush the next sequence, without writing it. One caller at a time."""
        ...

    def take_back(self, planned: PlannedFlush) -> None:
        """Frees the sequence of the flush planned last, which is certain not to count.

        Must not run concurrently with `plan`.
        """
        ...


class Follower(Protocol):
    """Reads one epoch of a broker's WAL in order, from its newest checkpoint on."""

    broker: int
    epoch: int
    checkpoint: Checkpoint | None
    """The newest checkpoint that the follower has used."""
    next_sequence: int
    fenced: bool
    """True once the fence has been read: nothing follows."""

    def poll(self, *, relist: bool = False) -> list[WalObject]:
        """Returns the flushes not returned before, each once. They are durable.

        A reader asks for `relist` after a pause longer than the trim grace, because flushes may
        have come and gone unseen. Raises `CorruptObject` and `MissingObject` once the flushes
        before the affected one have been returned, and the store's errors. The next poll continues
        from the same sequence.
        """
        ...

    def fence(self) -> list[WalObject]:
        """Ends the epoch. Returns the flushes not returned before, and the fence.

        All of them are durable. Raises what `poll` and a put raise.
        """
        ...


class Wal(Protocol):
    """The write-ahead logs of a root, in one kind of storage."""

    def appender(
        self, broker: int, epoch: int, *, stopping: Callable[[], bool] = lambda: False
    ) -> Appender:
        """Returns an appender at the beginning of an epoch; nothing is written yet.

        `stopping`: whether the broker is stopping, and must not wait for the outcome of a put.
        """
        ...

    def follower(
        self, broker: int, epoch: int, *, known: Mapping[int, WalObject] = NOTHING_KNOWN
    ) -> Follower:
        """Returns a reader of an epoch of this kind.

        `known`: flushes by sequence that another reader of the epoch has returned, so they need not
        be read again.
        """
        ...

    def retired(self, open_epochs: Callable[[], Container[tuple[int, int]]]) -> list[str]:
        """Returns the paths in closed epochs, of every kind, that may be deleted.

        `open_epochs` returns the (broker, epoch) of open epochs. It is called after the listing, so
        that it includes epochs opened meanwhile.
        """
        ...


def folder(broker: int, epoch: int) -> str:
    """Returns the folder of an epoch."""
    return f"{FOLDER}/{broker}/{epoch:010d}"


def checkpoint_path(broker: int, epoch: int, sequence: int) -> str:
    """Returns the path of a checkpoint; names sort like sequences."""
    return f"{folder(broker, epoch)}/{CHECKPOINT}{sequence:020d}"


def object_path(at: WalPosition) -> str:
    """Returns the path of the object of a flush; names sort like sequences."""
    return f"{folder(at.broker, at.epoch)}/{at.sequence:020d}"


def segment_path(broker: int, epoch: int, ordinal: int) -> str:
    """Returns the path of a segment; names sort like ordinals."""
    return f"{folder(broker, epoch)}/{ordinal:08d}{SEGMENT}"


def payload_place(located: Located) -> tuple[str, int, int]:
    """Returns where the bytes of an entry are: the path, the first byte, and their number."""
    entry = located.entry
    if entry.staged is not None:
        return entry.staged.path, entry.staged.start, entry.staged.length
    at = located.at
    in_segment = located.ordinal >= 0
    path = segment_path(at.broker, at.epoch, located.ordinal) if in_segment else object_path(at)
    return path, located.origin + entry.start, entry.length


def check_payload(located: Located, data: pa.Buffer) -> pa.Buffer:
    """Returns the bytes of an entry. Raises `CorruptObject` if they are not those of the entry."""
    entry = located.entry
    crc = entry.crc32c if entry.staged is None else entry.staged.crc32c
    path, first, length = payload_place(located)
    if data.size != length or crc32c.crc32c(data) != crc:
        raise errors.CorruptObject(
            path=path,
            check=f"the CRC32C of bytes {first} to {first + length} is wrong: {offsets_of(entry)}",
        )
    return data


def read_payload(store: Store, located: Located) -> pa.Buffer:
    """Reads and verifies the bytes of one entry, if it has any.

    Raises `ObjectMissing`, `CorruptObject`.
    """
    path, first, length = payload_place(located)
    if not length:
        return pa.py_buffer(b"")
    return check_payload(located, store.get_range(path, first, length))


def retired(
    store: Store,
    open_epochs: Callable[[], Container[tuple[int, int]]],
    fence_of: Callable[[int, int, Sequence[str]], Container[str]],
) -> list[str]:
    """See `Wal.retired`. The fence of an epoch in objects is kept forever.

    An epoch in segments is removed as a whole. A suspended broker still has the file with the fence
    open, and one that had not started writing checks the metadata after its first flush.

    `fence_of` takes the broker, the epoch and the sorted names, and returns the name of the fence,
    or several candidates.
    """
    found: dict[tuple[int, int], list[str]] = {}
    for stat in store.walk(FOLDER):
        named = _NAMED.fullmatch(stat.name)
        if named is not None:
            found.setdefault((int(named[1]), int(named[2])), []).append(named[3])
    are_open = open_epochs()
    paths = []
    for epoch, names in found.items():
        if epoch not in are_open:
            kept = fence_of(*epoch, sorted(filter(str.isdigit, names)))
            paths += [f"{folder(*epoch)}/{name}" for name in names if name not in kept]
    return paths
