"""Write-ahead log in objects: one object per flush, with entries of any partitions.

An object starts with its index, followed by the payloads. The index (msgpack) describes each entry,
so that one entry can be fetched by its byte range. These rules make the log safe:

- Object N is created only if it is absent. Once a put of N has been issued, only the same bytes may
  be retried at N until it is known which object is there.
- A *fence* ends the epoch for every broker and reader: objects after it do not count.
- Objects are deleted only once a checkpoint of a later sequence exists that does not need them. A
  fence is never deleted, nor the newest object of an epoch without a fence. So a process that finds
  neither N nor a checkpoint at or after N knows that N was never acked.

A WAL checkpoint has two layers: its index (`_CheckpointIndex`) names the objects that are still
needed and the bounds of each partition; its state is opaque here, and is encoded by
`broker.log.led_partitions.StateEncoder`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import pyarrow as pa

from sparklog import errors, limits
from sparklog.clock import Clock
from sparklog.storage.objects import (
    ObjectMissing,
    Purpose,
    Store,
    backoff_seconds,
    claim,
    counted,
    in_parallel,
)
from sparklog.storage.snapshot import Bounds, Entry, EntryKind, Located, WalPosition
from sparklog.storage.wal.base import (
    CHECKPOINT,
    NOTHING_KNOWN,
    Checkpoint,
    PlannedFlush,
    WalObject,
    checkpoint_path,
    folder,
    object_path,
    retired,
)
from sparklog.storage.wal.indexed import frame, read_index
from sparklog.storage.wal.payloads import Payload, joined

_FLUSHES_AT_ONCE_MAX = 8  # maximum number of objects from a fence on, by a broker on any release

_HELD_BYTES: Final = 128 * limits.KIB  # see `WalObject.held_bytes`
_MAGIC: Final = b"SLWAL001"


class _Index(msgspec.Struct, frozen=True, array_like=True):
    flush_id: bytes
    broker: int
    epoch: int
    sequence: int
    written_us: int
    entries: tuple[Entry, ...]


class _CheckpointIndex(msgspec.Struct, frozen=True, array_like=True):
    flush_id: bytes
    sequence: int
    needed: tuple[int, ...]
    state: bytes
    bounds: dict[str, tuple[Bounds, ...]] | None = None


_encoder = msgspec.msgpack.Encoder()
_index_decoder = msgspec.msgpack.Decoder(_Index)
_checkpoint_decoder = msgspec.msgpack.Decoder(_CheckpointIndex)


class ObjectWal:
    """Implements `Wal`: one object per flush."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def appender(
        self, broker: int, epoch: int, *, stopping: Callable[[], bool] = lambda: False
    ) -> ObjectAppender:
        return ObjectAppender(
            self._store, broker=broker, epoch=epoch, clock=self._clock, stopping=stopping
        )

    def follower(
        self, broker: int, epoch: int, *, known: Mapping[int, WalObject] = NOTHING_KNOWN
    ) -> ObjectFollower:
        return ObjectFollower(self._store, broker, epoch, clock=self._clock, known=known)

    def retired(self, open_epochs: Callable[[], Container[tuple[int, int]]]) -> list[str]:
        return retired(self._store, open_epochs, self._fence_of)

    def _fence_of(self, broker: int, epoch: int, names: Sequence[str]) -> Sequence[str]:
        """Finds the fence of a closed epoch. Its broker may have put objects beyond it."""
        last = names[-_FLUSHES_AT_ONCE_MAX:]
        if len(names) > 1:
            for name in reversed(last):
                with contextlib.suppress(ObjectMissing, errors.Corrupt):
                    at = WalPosition(broker, epoch, int(name))
                    if read_object(self._store, at).is_fence:
                        return (name,)
        return last


def read_object(store: Store, at: WalPosition) -> WalObject:
    """Reads the index of the object at `at`. Raises `ObjectMissing`, `CorruptObject`."""
    path = object_path(at)
    raw, origin = read_index(store, path, _MAGIC)
    try:
        index = _index_decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise errors.CorruptObject(path=path, check=f"its index is unreadable: {error}") from error
    found = WalPosition(index.broker, index.epoch, index.sequence)
    if found != at:
        raise errors.CorruptObject(path=path, check=f"it says that it is {object_path(found)}")
    return WalObject(
        at=at,
        written_us=index.written_us,
        located=tuple(Located(entry, at, origin) for entry in index.entries),
    )


# ------------------------------------------------------------------------------ writing


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedObject:
    """Implements `PlannedFlush`: an object that has not been put yet, or whose put is in flight."""

    written: WalObject
    """The object as it will be."""
    pieces: Sequence[bytes | pa.Buffer]
    put: Callable[[str, Sequence[bytes | pa.Buffer], Callable[[], bool]], None]

    def write(self, *, gives_up: Callable[[], bool]) -> WalObject:
        self.put(object_path(self.written.at), self.pieces, gives_up)
        return self.written


class ObjectAppender:
    """Implements `Appender` and `PlanningAppender`."""

    def __init__(
        self,
        store: Store,
        *,
        broker: int,
        epoch: int,
        clock: Clock,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._broker = broker
        self._epoch = epoch
        self._clock = clock
        self._stopping = stopping
        self.next_sequence = 0
        self._trimmed_to = 0
        """The sequence below which only `_needed` objects remain."""
        self._needed: list[int] = []
        self._checkpoints: set[int] = set()
        """Sequences of the checkpoints that exist, or whose put has failed."""

    def append(self, entries: Sequence[tuple[Entry, Payload]]) -> WalObject:
        """Puts the next object, and returns it with its byte ranges once it is durable.

        Raises `BrokerFenced` if another object is at the next sequence; `StorageFull` and
        `StorageUnavailable` if certainly nothing was written, so that another object may be
        attempted; `OutcomeUnknown` only if `stopping` ends the retries before the outcome is known.
        """
        planned = self.plan(entries)
        try:
            return planned.write(gives_up=lambda: True)
        except BaseException:
            self.take_back(planned)
            raise

    def take_back(self, planned: PlannedFlush) -> None:
        assert isinstance(planned, PlannedObject)
        assert planned.written.at.sequence == self.next_sequence - 1, "a later flush needs it"
        self.next_sequence -= 1

    def plan(self, entries: Sequence[tuple[Entry, Payload]]) -> PlannedObject:
        at = WalPosition(self._broker, self._epoch, self.next_sequence)
        with_ranges, pieces, payload_bytes = joined(entries)
        written_us = self._clock.now_us()
        index = _Index(
            os.urandom(8), at.broker, at.epoch, at.sequence, written_us, tuple(with_ranges)
        )
        head = frame(_MAGIC, _encoder.encode(index))
        written = WalObject(
            at=at,
            written_us=written_us,
            located=tuple(Located(entry, at, len(head)) for entry in with_ranges),
            held_bytes=max(len(head) + payload_bytes, _HELD_BYTES),
        )
        self.next_sequence += 1
        return PlannedObject(written=written, pieces=[head, *pieces], put=self._claim)

    def checkpoint(
        self,
        sequence: int,
        needed: Sequence[int],
        state: bytes,
        bounds: Mapping[str, Sequence[Bounds]] | None = None,
    ) -> None:
        """Puts a checkpoint: of the objects up to `sequence`, only `needed` still count.

        `bounds`: the bounds of each partition, by topic id.

        Raises `BrokerFenced` if another process has written this checkpoint.
        """
        assert sequence < self.next_sequence, "a checkpoint covers durable objects only"
        by_topic = None if bounds is None else {key: tuple(each) for key, each in bounds.items()}
        index = _CheckpointIndex(os.urandom(8), sequence, tuple(needed), state, by_topic)
        path = checkpoint_path(self._broker, self._epoch, sequence)
        self._checkpoints.add(sequence)
        self._claim_in(
            counted(self._store, Purpose.UPKEEP),
            path,
            [frame(_MAGIC, _encoder.encode(index))],
            lambda: True,
        )

    def read(self, sequence: int) -> WalObject:
        return read_object(self._store, WalPosition(self._broker, self._epoch, sequence))

    def checkpoint_is_due(self, after: int, *, objects: int) -> bool:
        return self.next_sequence - 1 - after >= objects

    def carried_up_to(self, checkpoint: int, *, objects: int) -> int:
        return checkpoint - objects

    def trim(self, checkpoint: Checkpoint) -> None:
        # There are no gaps below a checkpoint. The object at its own sequence stays, because it
        # may be the newest.
        objects = [*self._needed, *range(self._trimmed_to, checkpoint.sequence)]
        checkpoints = [each for each in self._checkpoints if each < checkpoint.sequence]
        needed = set(checkpoint.needed)
        counted(self._store, Purpose.UPKEEP).delete(
            [
                object_path(WalPosition(self._broker, self._epoch, each))
                for each in objects
                if each not in needed
            ]
            + [checkpoint_path(self._broker, self._epoch, each) for each in checkpoints]
        )
        # Only now, because a failed deletion is retried.
        self._needed = [each for each in objects if each in needed]
        self._trimmed_to = checkpoint.sequence
        self._checkpoints.difference_update(checkpoints)

    def tend(self) -> None:
        """Does nothing: each put is complete in itself."""

    def close(self) -> None:
        """Does nothing: a put leaves nothing open."""

    def _claim(
        self, path: str, pieces: Sequence[bytes | pa.Buffer], gives_up: Callable[[], bool]
    ) -> None:
        self._claim_in(self._store, path, pieces, gives_up)

    def _claim_in(
        self,
        store: Store,
        path: str,
        pieces: Sequence[bytes | pa.Buffer],
        gives_up: Callable[[], bool],
    ) -> None:
        """Retries a put until it is known whose object is there, or that it had no effect."""
        doubtful = False
        for attempt in itertools.count(1):
            try:
                ours = claim(store, path, pieces, clock=self._clock, doubtful=doubtful)
                break
            except errors.OutcomeUnknown:
                if self._stopping():
                    raise
                doubtful = True  # a later rejection says nothing about the earlier attempts
            except (errors.Retriable, errors.RootNotWritable) as error:
                if gives_up():
                    raise
                if self._stopping():
                    raise errors.OutcomeUnknown(what=f"put of {path}", reason=str(error)) from error
                self._clock.sleep(backoff_seconds(attempt))
        if not ours:
            raise errors.BrokerFenced(broker=self._broker, epoch=self._epoch)


# ------------------------------------------------------------------------------ following


class ObjectFollower:
    """Implements `Follower`.

    `poll` returns each object once. It probes for the next sequence, and lists the folder only if
    asked to (`relist=True`). A reader asks for this after a pause longer than the trim grace,
    because objects may have come and gone unseen.

    Without such a pause a probe suffices, even on a store with stale listings: an object exists for
    at least the trim grace, so an absent one has not been put yet. On an object store a poll reads
    as many objects concurrently as it has found so far. An object counts only after all before it,
    and nothing after a fence or a missing one counts, so the order of the answers is irrelevant.
    """

    def __init__(
        self,
        store: Store,
        broker: int,
        epoch: int,
        *,
        clock: Clock,
        known: Mapping[int, WalObject] = NOTHING_KNOWN,
    ) -> None:
        self._store = store
        self._clock = clock
        self._known = known
        self.broker = broker
        self.epoch = epoch
        self.checkpoint: Checkpoint | None = None
        self.next_sequence = 0
        self.fenced = False
        self._started = False
        self._ready: list[WalObject] = []
        """Objects that have been read but not yet returned, so that a failing poll loses none."""

    def poll(self, *, relist: bool = False) -> list[WalObject]:
        """Returns the objects not returned before.

        Raises `CorruptObject` and `MissingObject` once the objects before the affected one have
        been returned, and the store's errors. The next poll continues from the same sequence.
        """
        if not self.fenced:
            try:
                self._read_next(relist=relist)
            except errors.Corrupt:
                if not self._ready:
                    raise
        if self._ready:
            # An object can be visible before it is durable.
            self._store.sync_folder(folder(self.broker, self.epoch))
        found, self._ready = self._ready, []
        return found

    def fence(self) -> list[WalObject]:
        """Ends the epoch. Returns the objects not returned before.

        The fence is put at the first absent sequence. The old broker needs exactly that sequence
        for its next ack, so one of the two puts fails. The sequence may also be absent because it
        has since been trimmed. Then a checkpoint at or beyond it exists, and the fence is *void*:
        every reader that encounters it continues from that checkpoint, and so does this method. The
        returned objects and the fence are durable: each poll that finds objects syncs the folder,
        and so does a claim.
        """
        entry = Entry(kind=EntryKind.FENCE)
        found: list[WalObject] = []
        while True:
            found += self.poll(relist=True)
            if self.fenced:
                return found
            at = WalPosition(self.broker, self.epoch, self.next_sequence)
            index = _Index(
                os.urandom(8), at.broker, at.epoch, at.sequence, self._clock.now_us(), (entry,)
            )
            data = frame(_MAGIC, _encoder.encode(index))
            claim(self._store, object_path(at), [data], clock=self._clock)

    def _read_next(self, *, relist: bool) -> None:
        if relist or not self._started:
            self._jump_to_checkpoint()
            self._started = True
        count = 0
        while not self.fenced:
            most = min(max(count, 1), self._store.requests_at_once)
            for each in self._read_after(most):
                if isinstance(each, ObjectMissing):
                    return
                if isinstance(each, Exception):
                    raise each
                if each.is_fence and self._jump_to_checkpoint():
                    break  # a void fence: see `fence`
                self.next_sequence = each.at.sequence + 1
                self.fenced = each.is_fence
                self._ready.append(each)
                count += 1
                if self.fenced:
                    break

    def _read_needed(self, at: WalPosition) -> WalObject:
        known = self._known.get(at.sequence)
        return known if known is not None else read_object(self._store, at)

    def _read_after(self, most: int) -> Iterable[WalObject | Exception]:
        """Returns the next object if it is known; else up to `most` objects, starting with it."""
        known = self._known.get(self.next_sequence)
        if known is not None:
            return [known]
        sequences = range(self.next_sequence, self.next_sequence + most)
        return in_parallel(self._store, self._try_read, sequences)

    def _try_read(self, sequence: int) -> WalObject | Exception:
        """Returns an object, or the error that reading it raised: the object may not count."""
        try:
            return read_object(self._store, WalPosition(self.broker, self.epoch, sequence))
        except (errors.SparklogError, ObjectMissing) as error:
            return error

    def _jump_to_checkpoint(self) -> bool:
        """Continues after the newest checkpoint, if it is ahead, and reads the objects it needs.

        Returns whether it was ahead.
        """
        while True:
            newest = newest_checkpoint(self._store, self.broker, self.epoch)
            if newest is None or newest.sequence < self.next_sequence:
                return False
            needed = [
                WalPosition(self.broker, self.epoch, sequence)
                for sequence in newest.needed
                if sequence >= self.next_sequence
            ]
            try:
                found = in_parallel(self._store, self._read_needed, needed)
            except ObjectMissing as missing:
                again = newest_checkpoint(self._store, self.broker, self.epoch)
                if again is None or again.sequence <= newest.sequence:
                    raise errors.MissingObject(
                        path=missing.path, reason=f"checkpoint {newest.sequence} needs it"
                    ) from None
                continue
            self._ready += found
            self.checkpoint = newest
            self.next_sequence = newest.sequence + 1
            return True


def newest_checkpoint(store: Store, broker: int, epoch: int) -> Checkpoint | None:
    """Returns the checkpoint of the highest sequence, or None. Raises `CorruptObject`."""
    while True:
        names = [stat.name for stat in store.list_after(folder(broker, epoch), after=CHECKPOINT)]
        if not names:
            return None
        path = f"{folder(broker, epoch)}/{names[-1]}"
        try:
            raw, _ = read_index(store, path, _MAGIC)
        except ObjectMissing:
            continue  # deleted since, after a newer checkpoint
        try:
            index = _checkpoint_decoder.decode(raw)
        except msgspec.MsgspecError as error:
            raise errors.CorruptObject(path=path, check=f"it is unreadable: {error}") from error
        return Checkpoint(
            sequence=index.sequence, needed=index.needed, state=index.state, bounds=index.bounds
        )
