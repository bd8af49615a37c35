"""Appender of an epoch in segments. `segments` defines the protocol."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

import msgspec
import pyarrow as pa

from sparklog import errors, limits
from sparklog.storage.objects import ObjectMissing, SyncFailed
from sparklog.storage.objects.base import pieces as views_of
from sparklog.storage.objects.files import BLOCK_BYTES, Access
from sparklog.storage.snapshot import Bounds, Entry, Located, WalPosition
from sparklog.storage.wal import frames
from sparklog.storage.wal.base import Checkpoint, WalObject, checkpoint_path, folder
from sparklog.storage.wal.indexed import frame as indexed
from sparklog.storage.wal.payloads import Payload, joined
from sparklog.storage.wal.segment_files import (
    BEGINNING,
    CHECKPOINT_MAGIC,
    FULL,
    CheckpointIndex,
    EpochFiles,
    Needed,
    Place,
    Segment,
    claimed,
)

SEGMENT_ALLOCATED_BYTES = 4 * limits.MIB  # reserved at a time beyond the end of the log

_ATTEMPTS: Final = 8
"""Attempts at appending a frame; each may land behind junk of other processes."""

_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """The place of one of our flushes."""

    ordinal: int
    offset: int
    after: Place
    total_bytes: int
    """Bytes of all frames up to this one."""


class SegmentAppender:
    """Implements `Appender`."""

    def __init__(
        self, epoch: EpochFiles, *, stopping: Callable[[], bool], segment_bytes: int
    ) -> None:
        self._epoch = epoch
        self._stopping = stopping
        self._segment_bytes = segment_bytes
        self.next_sequence = 0
        self._segment: Segment | None = None
        self._end = 0
        """The size of the segment, unless another process has appended."""
        self._place = BEGINNING
        """The place after our newest frame."""
        self._total_bytes = 0
        self._nonce = int.from_bytes(os.urandom(8), "little")
        self._failure: BaseException | None = None
        """Set once, after which nothing is appended."""
        self._lock = threading.Lock()
        """Guards what `tend` prepares for `append`."""
        self._allocated_end = 0
        self._created = -1
        """The ordinal of the newest segment that we have created."""
        self._next: Segment | None = None
        self._written: dict[int, _Written] = {}
        """By sequence: the flushes since the newest checkpoint, and those that it needs."""
        self._first_sequences: dict[int, int] = {}
        """By ordinal, of the segments that exist: the sequence of the first frame."""
        self._checkpoints: dict[int, tuple[int, frozenset[int]]] = {}
        """By sequence, of the checkpoints that exist, or whose put has failed: the ordinal at which
        reading continues, and the ordinals that are needed."""

    # -------------------------------------------------------------------------- appending

    def append(self, entries: Sequence[tuple[Entry, Payload]]) -> WalObject:
        if self._failure is not None:
            raise self._failure
        try:
            return self._append(entries)
        except (errors.BrokerFenced, SyncFailed) as error:
            self._failure = error
            raise

    def _append(self, entries: Sequence[tuple[Entry, Payload]]) -> WalObject:
        with_ranges, payloads, start = joined(entries)
        written_us = self._epoch.clock.now_us()
        index = frames.encode_index(written_us, with_ranges)
        length = frames.frame_bytes(len(index), start)
        segment = self._segment or self._open_first()
        is_last = frames.round_up(self._end) + length >= self._segment_bytes
        following = self._prepare_next(segment) if is_last else None
        assert (following is not None) is is_last
        offset = self._write(segment, index, payloads, length, start, is_last)

        sequence = self.next_sequence
        at = WalPosition(self._epoch.broker, self._epoch.epoch, sequence)
        origin = offset + frames.HEADER_BYTES + len(index)
        found = WalObject(
            at=at,
            written_us=written_us,
            located=tuple(Located(each, at, origin, segment.ordinal) for each in with_ranges),
            held_bytes=length,
        )
        self._place = (
            Place(segment.ordinal, offset + length, offset)
            if following is None
            else Place(following.ordinal, frames.FIRST, frames.NONE)
        )
        self._total_bytes += length
        self._written[sequence] = _Written(
            ordinal=segment.ordinal,
            offset=offset,
            after=self._place,
            total_bytes=self._total_bytes,
        )
        self._first_sequences.setdefault(segment.ordinal, sequence)
        self.next_sequence += 1
        self._end = offset + length
        if following is not None:
            self._use(following)
        return found

    def _open_first(self) -> Segment:
        """Creates the first segment. Raises `BrokerFenced` if another process has."""
        segment = self._create(0)
        self._use(segment)
        return segment

    def _create(self, ordinal: int) -> Segment:
        """Creates a segment, durable and empty, unless an earlier call has."""
        if self._created < ordinal:
            if not self._epoch.create(ordinal, lambda _salt: b"", stopping=self._stopping):
                self._raise_fenced()
            self._created = ordinal
        try:
            return self._epoch.open(ordinal, Access.WRITE)
        except ObjectMissing:
            self._raise_fenced()  # a successor has closed the epoch and removed its files

    def _use(self, segment: Segment) -> None:
        with self._lock:
            if self._segment is not None:
                self._segment.file.close()
            self._segment = segment
            self._end = self._allocated_end = frames.FIRST
            self._next = None

    def _prepare_next(self, segment: Segment) -> Segment | None:
        """Returns the segment after `segment`, which is durable; None if it is already in use."""
        with self._lock:
            if self._segment is segment and self._next is None:
                self._next = self._create(segment.ordinal + 1)
            return self._next

    def _write(
        self,
        segment: Segment,
        index: bytes,
        payloads: Sequence[bytes | pa.Buffer],
        length: int,
        payload_bytes: int,
        is_last: bool,
    ) -> int:
        """Appends a frame, retrying until it lands where it says. Returns its offset."""
        for _ in range(_ATTEMPTS):
            offset = frames.round_up(self._end)
            self._reserve(segment, offset + length)
            self._nonce = (self._nonce + 1) % 2**64
            sequence, nonce = self.next_sequence, self._nonce
            head = frames.encode_head(
                index,
                salt=segment.salt,
                offset=offset,
                sequence=sequence,
                previous=self._place.previous,
                length=length,
                nonce=nonce,
                is_last=is_last,
            )
            unused = length - len(head) - payload_bytes
            tail = frames.encode_tail(unused_bytes=unused, sequence=sequence, nonce=nonce)
            views = views_of([frames.filler(self._end), head, *payloads, tail])
            if self._is_written(segment, views, offset + length - self._end):
                return offset
        raise errors.StorageUnavailable(
            operation="append", path=segment.path, reason="other processes keep appending to it"
        )

    def _is_written(self, segment: Segment, views: list[memoryview], total: int) -> bool:
        """Appends bytes durably. Returns False if they landed elsewhere, where they do not count.

        Raises `BrokerFenced` if a fence precedes them, `StorageFull` if they were cut short,
        `SyncFailed`, and the store's errors.
        """
        is_large = total >= limits.DIRECT_WRITE_BYTES and self._end % BLOCK_BYTES == 0
        parts = _parts(views, limits.DIRECT_BUFFER_BYTES) if is_large else [(views, total)]
        expected = self._end
        for part, part_bytes in parts:
            try:
                append = segment.file.append_part if is_large else segment.file.append
                written_bytes, end = append(part)
            except OSError as error:
                size = segment.file.size_bytes()
                if size == self._end:
                    raise self._epoch.refusal("append", segment.path, error) from error
                if size != expected or error.errno not in FULL:
                    raise SyncFailed(segment.path, f"append: {error}") from error
                written_bytes, end = 0, expected
            if written_bytes == part_bytes and end == expected + part_bytes:
                expected = end
                continue
            self._look(segment)
            if written_bytes < part_bytes:
                raise self._epoch.full()
            return False
        if is_large and not segment.file.sync():
            raise SyncFailed(segment.path, "this process cannot flush its bytes")
        return True

    def _look(self, segment: Segment) -> None:
        """Finds the end of the file, past bytes that do not count.

        Raises `BrokerFenced` if a fence, or a frame of another process, is among them.
        """
        window = segment.window()
        event = segment.event(window, self._place, self.next_sequence)
        if not isinstance(event, frames.Nothing):
            self._raise_fenced()
        self._end = window.size

    def _reserve(self, segment: Segment, end: int) -> None:
        """Allocates space up to `end`. Raises `StorageFull`, in which case nothing is written."""
        if end <= self._allocated_end:
            return
        step = SEGMENT_ALLOCATED_BYTES
        with self._lock:
            try:
                self._allocate(segment, -(-end // step) * step)
            except OSError:  # there may be less space than that, but enough
                try:
                    self._allocate(segment, end)
                except OSError as error:
                    raise self._epoch.refusal("allocate", segment.path, error) from error

    def _allocate(self, segment: Segment, end: int) -> None:
        segment.file.allocate(end)
        self._allocated_end = end

    def _raise_fenced(self) -> NoReturn:
        raise errors.BrokerFenced(broker=self._epoch.broker, epoch=self._epoch.epoch)

    # -------------------------------------------------------------------------- maintenance

    def tend(self) -> None:
        with self._lock:
            segment, end = self._segment, self._end
        if segment is None or self._failure is not None:
            return
        if self._epoch.files.identity(segment.path) != segment.file.identity:
            with self._lock:
                if segment is not self._segment:
                    return
            reason = "its file was moved or removed while this broker was appending to it"
            raise SyncFailed(segment.path, reason)
        # The caller's next steps may relieve a full disk; until then the appends report it.
        with contextlib.suppress(errors.Retriable, errors.RootNotWritable, OSError):
            if end >= self._segment_bytes // 2:
                self._prepare_next(segment)
            step = SEGMENT_ALLOCATED_BYTES
            with self._lock:
                is_short = self._allocated_end - end < step // 2 and end < self._segment_bytes
                if is_short and segment is self._segment:
                    self._allocate(segment, self._allocated_end + step)

    def read(self, sequence: int) -> WalObject:
        found = self._written.get(sequence)
        if found is None:
            raise ObjectMissing(f"{folder(self._epoch.broker, self._epoch.epoch)}, {sequence}")
        (flush,) = self._epoch.read([Needed(sequence, found.ordinal, found.offset)])
        return flush

    def checkpoint(
        self,
        sequence: int,
        needed: Sequence[int],
        state: bytes,
        bounds: Mapping[str, Sequence[Bounds]] | None = None,
    ) -> None:
        assert sequence < self.next_sequence, "a checkpoint covers durable flushes only"
        by_topic = None if bounds is None else {key: tuple(each) for key, each in bounds.items()}
        place = self._written[sequence].after
        places = tuple(
            Needed(each, self._written[each].ordinal, self._written[each].offset) for each in needed
        )
        index = CheckpointIndex(os.urandom(8), sequence, place, places, state, by_topic)
        epoch = self._epoch
        path = checkpoint_path(epoch.broker, epoch.epoch, sequence)
        self._checkpoints[sequence] = place.ordinal, frozenset(each.ordinal for each in places)
        data = indexed(CHECKPOINT_MAGIC, _encoder.encode(index))
        if not claimed(epoch.store, epoch.clock, path, data, self._stopping):
            self._raise_fenced()
        kept = {*needed, sequence}
        for each in [each for each in list(self._written) if each < sequence]:
            if each not in kept:
                del self._written[each]

    def checkpoint_is_due(self, after: int, *, objects: int) -> bool:
        del objects  # any number of flushes share a file
        before = self._written[after].total_bytes if after >= 0 else 0
        return self._total_bytes - before >= self._segment_bytes

    def carried_up_to(self, checkpoint: int, *, objects: int) -> int:
        del objects
        found = self._written.get(checkpoint)
        if found is None:
            return -1
        is_last = found.after.ordinal > found.ordinal
        return checkpoint if is_last else self._first_sequences[found.ordinal] - 1

    def trim(self, checkpoint: Checkpoint) -> None:
        place, needed = self._checkpoints[checkpoint.sequence]
        segments = [
            each for each in list(self._first_sequences) if each < place and each not in needed
        ]
        checkpoints = [each for each in self._checkpoints if each < checkpoint.sequence]
        epoch = self._epoch
        epoch.store.delete(
            [epoch.path(each) for each in segments]
            + [checkpoint_path(epoch.broker, epoch.epoch, each) for each in checkpoints]
        )
        # Only now, because a failed deletion is retried.
        for each in segments:
            del self._first_sequences[each]
        for each in checkpoints:
            del self._checkpoints[each]

    def close(self) -> None:
        with self._lock:
            self._failure = self._failure or errors.BrokerClosing(broker=self._epoch.broker)
            for each in (self._segment, self._next):
                if each is not None:
                    each.file.close()


def _parts(views: list[memoryview], part_bytes: int) -> Iterator[tuple[list[memoryview], int]]:
    """Splits views into runs of `part_bytes`; the last may be shorter."""
    part: list[memoryview] = []
    room = part_bytes
    for view in views:
        rest = view
        while len(rest):
            piece = rest[:room]
            part.append(piece)
            room -= len(piece)
            rest = rest[len(piece) :]
            if not room:
                yield part, part_bytes
                part, room = [], part_bytes
    if part:
        yield part, part_bytes - room
