"""Format and protocol of the write-ahead log: one object per flush, with entries of any partitions.

An object is `magic, index length, CRC32C of the index, index, payloads`. The index (msgpack)
describes each entry, so that one entry can be fetched by its byte range. The objects of an epoch
are numbered from 0, without holes as far as anything was acked. These rules make the log safe:

- Object N is created only if it is absent. After a put of N was issued, only the same bytes are
  tried again at N, until it is known which object is there.
- A *fence* ends the epoch for every broker and reader: objects after it do not count.
- Objects are deleted only after a checkpoint of the same or a later sequence exists that does not
  need them. A fence is never deleted, nor the newest object of an epoch without a fence. So a
  process that finds N absent, and no checkpoint at or after N, knows that N was never acked.

A WAL checkpoint has two layers: its index (`_CheckpointIndex`) names the objects that are still
needed and the bounds of each partition; its state is opaque here, and is encoded by
`broker.log.partitions.StateEncoder`.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

import crc32c
import msgspec
import pyarrow as pa

from sparklog import errors
from sparklog.clock import Clock
from sparklog.formats.record import LOG_APPEND_TIME, PAYLOAD_SCHEMA
from sparklog.storage.objects import ObjectMissing, Store, claim
from sparklog.storage.snapshot import Bounds, Encoding, Entry, EntryKind, Located, WalPosition

_MAGIC = b"SLWAL001"
_HEADER = struct.Struct("<8sII")
_FOLDER = "wal"
_CHECKPOINT = "checkpoint-"
_NAMED = re.compile(r"(\d+)/(\d{10})/((?:checkpoint-)?\d{20})")
_FIRST_READ_BYTES = 16 * 1024
_END_OF_STREAM = struct.pack("<II", 0xFFFFFFFF, 0)


# ------------------------------------------------------------------------------ payloads


@dataclass(frozen=True, slots=True)
class Payload:
    """An entry's bytes, in pieces, with their length and checksum."""

    pieces: tuple[bytes | pa.Buffer, ...]
    length: int
    crc32c: int


EMPTY = Payload((), 0, 0)
_TYPES = {field.name: field.type for field in PAYLOAD_SCHEMA}
_schema_messages: dict[tuple[str, ...], bytes] = {}


def encode_payload(batch: pa.RecordBatch) -> Payload:
    """Encodes `batch`, a conforming payload, as an Arrow IPC stream of one batch."""
    names = tuple(batch.schema.names)
    head = _schema_messages.get(names)
    if head is None:
        head = _schema_messages[names] = batch.schema.serialize().to_pybytes()
    body = batch.serialize()
    crc = crc32c.crc32c(_END_OF_STREAM, crc32c.crc32c(body, crc32c.crc32c(head)))
    return Payload((head, body, _END_OF_STREAM), len(head) + body.size + len(_END_OF_STREAM), crc)


def decode_body(schema: pa.Schema, payload: Payload) -> pa.RecordBatch:
    """Decodes the batch of `schema` that `encode_payload` encoded, without a copy."""
    _, body, _ = payload.pieces
    return pa.ipc.read_record_batch(body, schema)


def decode_payload(entry: Entry, data: pa.Buffer) -> pa.RecordBatch:
    """Decodes the records of an entry as a payload, without a copy.

    Drops the producer's timestamps if the entry has LogAppendTime. Raises `CorruptObject` if
    `data` is not the batch that the entry describes.
    """
    if entry.encoding is Encoding.KAFKA:
        return decode_kafka([entry], [data])
    try:
        batch = pa.ipc.open_stream(data).read_next_batch()
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise _not_as_described(entry, f"it is no Arrow stream: {error}") from error
    if batch.num_rows != entry.count:
        raise _not_as_described(entry, f"it has {batch.num_rows} rows instead of {entry.count}")
    names = batch.schema.names
    if len(set(names)) != len(names) or any(
        _TYPES.get(field.name) != field.type for field in batch.schema
    ):
        raise _not_as_described(entry, f"its columns are {batch.schema.to_string()}")
    if entry.timestamp_type == LOG_APPEND_TIME and "timestamp" in names:
        batch = batch.drop_columns(["timestamp"])  # staged files keep the original timestamps
    return batch


def encode_kafka(batch: bytes | bytearray) -> Payload:
    """Keeps a Kafka record batch as it is. Its offsets do not count; those of the entry do."""
    return Payload((batch,), len(batch), crc32c.crc32c(batch))


def decode_kafka(
    entries: Sequence[Entry], batches: Sequence[bytes | bytearray | pa.Buffer]
) -> pa.RecordBatch:
    """Decodes consecutive entries in Kafka's encoding to one payload.

    Entries with LogAppendTime must come one at a time, because their records have no timestamps.
    Raises `CorruptObject` if one is not the batch that its entry describes, or if they are too
    large together, and `NotInstalled` if a package for decoding is missing.
    """
    try:
        from sparklog.formats import (
            record_batch,  # imported late: its compiled loops are slow to load
        )
    except ModuleNotFoundError as error:
        raise errors.NotInstalled(
            what="decoding records that Kafka clients wrote",
            missing=error.name or str(error),
            hint="pip install 'sparklog[spark]', or 'sparklog[broker]' for a broker",
        ) from error

    try:
        payload = record_batch.decode(*batches)
    except (errors.Invalid, errors.DamagedBatch) as error:
        raise _not_as_described(entries[0], str(error)) from error
    count = sum(entry.count for entry in entries)
    if payload.num_rows != count:
        raise _not_as_described(entries[0], f"it has {payload.num_rows} rows instead of {count}")
    return payload


def _not_as_described(entry: Entry, check: str) -> errors.CorruptObject:
    where = entry.staged.path if entry.staged is not None else "a log entry"
    return errors.CorruptObject(path=where, check=f"{_offsets(entry)}: {check}")


def _offsets(entry: Entry) -> str:
    return f"offsets {entry.base_offset} to {entry.end} of partition {entry.partition}"


# ------------------------------------------------------------------------------ objects


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WalObject:
    """The entries that one flush made durable."""

    at: WalPosition
    written_us: int
    located: tuple[Located, ...]

    @property
    def is_fence(self) -> bool:
        return any(each.entry.kind is EntryKind.FENCE for each in self.located)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A broker's state as of `sequence`. Of the objects up to it, only `needed` still count."""

    sequence: int
    needed: tuple[int, ...]
    state: bytes
    bounds: Mapping[str, Sequence[Bounds]] | None = None
    """Bounds of each partition by topic id, as of `sequence`; None if an old release wrote it."""


def folder(broker: int, epoch: int) -> str:
    """Returns the folder of an epoch's objects."""
    return f"{_FOLDER}/{broker}/{epoch:010d}"


def object_path(at: WalPosition) -> str:
    """Returns the path of an object; names sort like sequences."""
    return f"{folder(at.broker, at.epoch)}/{at.sequence:020d}"


def _frame(index: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, len(index), crc32c.crc32c(index)) + index


def _unframe(path: str, data: pa.Buffer) -> tuple[bytes | None, int]:
    """Returns (index, its end); the index is None if `data` is too short to contain it."""
    if data.size < _HEADER.size:
        raise errors.CorruptObject(path=path, check=f"{data.size} bytes are too few for an object")
    magic, length, crc = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise errors.CorruptObject(path=path, check=f"it begins with {magic!r}, not {_MAGIC!r}")
    end = _HEADER.size + length
    if data.size < end:
        return None, end
    index = data.slice(_HEADER.size, length).to_pybytes()
    if crc32c.crc32c(index) != crc:
        raise errors.CorruptObject(path=path, check="the CRC32C of its index is wrong")
    return index, end


def _read_index(store: Store, path: str) -> tuple[bytes, int]:
    data = store.get_range(path, 0, _FIRST_READ_BYTES)
    index, end = _unframe(path, data)
    if index is None:
        index, end = _unframe(path, store.get_range(path, 0, end))
        if index is None:
            raise errors.CorruptObject(path=path, check="it is shorter than its index")
    return index, end


def read_object(store: Store, at: WalPosition) -> WalObject:
    """Reads the index of the object at `at`. Raises `ObjectMissing`, `CorruptObject`."""
    path = object_path(at)
    raw, origin = _read_index(store, path)
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


def read_payload(store: Store, located: Located) -> pa.Buffer:
    """Reads and checks the bytes of one entry. Raises `ObjectMissing`, `CorruptObject`."""
    entry, path = located.entry, object_path(located.at)
    if entry.staged is not None:
        ref = entry.staged
        path, first, length, crc = ref.path, ref.start, ref.length, ref.crc32c
    else:
        first, length, crc = located.origin + entry.start, entry.length, entry.crc32c
    data = store.get_range(path, first, length)
    if data.size != length or crc32c.crc32c(data) != crc:
        raise errors.CorruptObject(
            path=path,
            check=f"the CRC32C of bytes {first} to {first + length} is wrong: {_offsets(entry)}",
        )
    return data


# ------------------------------------------------------------------------------ writing


class Appender:
    """Puts the objects of one epoch in order. Not thread-safe: one flush at a time."""

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

    def append(self, entries: Sequence[tuple[Entry, Payload]]) -> WalObject:
        """Puts the next object. It is durable when this returns, with the entries' byte ranges.

        Raises `BrokerFenced` if another object is at the next sequence; `StorageFull` and
        `StorageUnavailable` if surely nothing was written, so that another object may be tried;
        `OutcomeUnknown` only if `stopping` ends the tries before the outcome is known.
        """
        at = WalPosition(self._broker, self._epoch, self.next_sequence)
        with_ranges: list[Entry] = []
        pieces: list[bytes | pa.Buffer] = []
        start = 0
        for entry, payload in entries:
            with_ranges.append(
                msgspec.structs.replace(
                    entry, start=start, length=payload.length, crc32c=payload.crc32c
                )
            )
            pieces.extend(payload.pieces)
            start += payload.length
        written_us = self._clock.now_us()
        index = _Index(
            os.urandom(8), at.broker, at.epoch, at.sequence, written_us, tuple(with_ranges)
        )
        head = _frame(_encoder.encode(index))
        self._claim(object_path(at), [head, *pieces])
        self.next_sequence += 1
        return WalObject(
            at=at,
            written_us=written_us,
            located=tuple(Located(entry, at, len(head)) for entry in with_ranges),
        )

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
        path = f"{folder(self._broker, self._epoch)}/{_CHECKPOINT}{sequence:020d}"
        self._claim(path, [_frame(_encoder.encode(index))])

    def _claim(self, path: str, pieces: list[bytes | pa.Buffer]) -> None:
        doubtful = False
        while True:
            try:
                ours = claim(self._store, path, pieces, clock=self._clock, doubtful=doubtful)
                break
            except errors.OutcomeUnknown:
                if self._stopping():
                    raise
                doubtful = True  # a later refusal says nothing about the earlier tries
        if not ours:
            raise errors.BrokerFenced(broker=self._broker, epoch=self._epoch)


# ------------------------------------------------------------------------------ following


class Follower:
    """Reads one epoch of a broker's WAL in order, from its newest checkpoint on.

    `poll` returns each object once. It probes for the next sequence, and lists the folder only if
    asked to (`relist=True`). A reader asks for it after a pause longer than the trim grace, because
    objects may have come and gone unseen.
    """

    def __init__(self, store: Store, broker: int, epoch: int) -> None:
        self._store = store
        self.broker = broker
        self.epoch = epoch
        self.checkpoint: Checkpoint | None = None
        self.next_sequence = 0
        self.fenced = False
        self._started = False
        self._ready: list[WalObject] = []
        """Objects that were read and not returned yet, so that a failing poll loses none."""

    def poll(self, *, relist: bool = False) -> list[WalObject]:
        """Returns the objects that were not returned before.

        Raises `CorruptObject` and `MissingObject` after the objects before it were returned, and
        the errors of the store. The next poll continues from the same sequence.
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

    def _read_next(self, *, relist: bool) -> None:
        if relist or not self._started:
            self._jump_to_checkpoint()
            self._started = True
        while not self.fenced:
            at = WalPosition(self.broker, self.epoch, self.next_sequence)
            try:
                each = read_object(self._store, at)
            except ObjectMissing:
                return
            if each.is_fence and self._jump_to_checkpoint():
                continue  # a void fence: see `fence`
            self.next_sequence = at.sequence + 1
            self.fenced = each.is_fence
            self._ready.append(each)

    def _jump_to_checkpoint(self) -> bool:
        """Continues after the newest checkpoint, if it is ahead, and reads the objects it needs.

        Returns whether it was ahead.
        """
        while True:
            newest = newest_checkpoint(self._store, self.broker, self.epoch)
            if newest is None or newest.sequence < self.next_sequence:
                return False
            found: list[WalObject] = []
            try:
                for sequence in newest.needed:
                    if sequence >= self.next_sequence:
                        at = WalPosition(self.broker, self.epoch, sequence)
                        found.append(read_object(self._store, at))
            except ObjectMissing:
                again = newest_checkpoint(self._store, self.broker, self.epoch)
                if again is None or again.sequence <= newest.sequence:
                    raise errors.MissingObject(
                        path=object_path(at), reason=f"checkpoint {newest.sequence} needs it"
                    ) from None
                continue
            self._ready += found
            self.checkpoint = newest
            self.next_sequence = newest.sequence + 1
            return True


def newest_checkpoint(store: Store, broker: int, epoch: int) -> Checkpoint | None:
    """Returns the checkpoint of the highest sequence, or None. Raises `CorruptObject`."""
    while True:
        names = [stat.name for stat in store.list_after(folder(broker, epoch), after=_CHECKPOINT)]
        if not names:
            return None
        path = f"{folder(broker, epoch)}/{names[-1]}"
        try:
            raw, _ = _read_index(store, path)
        except ObjectMissing:
            continue  # deleted meanwhile, after a newer checkpoint
        try:
            index = _checkpoint_decoder.decode(raw)
        except msgspec.MsgspecError as error:
            raise errors.CorruptObject(path=path, check=f"it is unreadable: {error}") from error
        return Checkpoint(
            sequence=index.sequence, needed=index.needed, state=index.state, bounds=index.bounds
        )


# ------------------------------------------------------------------------------ fencing


def fence(store: Store, follower: Follower, *, clock: Clock) -> list[WalObject]:
    """Ends the epoch that `follower` reads. Returns the objects that it had not returned before.

    The fence goes to the first absent sequence. The old broker needs exactly that sequence for its
    next ack, so one of the two puts fails. The sequence may also be absent because it was trimmed
    meanwhile. Then a checkpoint at or beyond it exists, and the fence is *void*: every reader that
    meets it continues from that checkpoint, and so does this function. The returned objects and the
    fence are durable: each poll that finds objects syncs the folder, and so does a claim.
    """
    entry = Entry(kind=EntryKind.FENCE)
    found: list[WalObject] = []
    while True:
        found += follower.poll(relist=True)
        if follower.fenced:
            return found
        at = WalPosition(follower.broker, follower.epoch, follower.next_sequence)
        index = _Index(os.urandom(8), at.broker, at.epoch, at.sequence, clock.now_us(), (entry,))
        claim(store, object_path(at), [_frame(_encoder.encode(index))], clock=clock)


# ------------------------------------------------------------------------------ trimming


def removable(store: Store, broker: int, epoch: int, checkpoint: Checkpoint) -> list[str]:
    """Returns the paths that `checkpoint` makes unnecessary: older objects and checkpoints.

    The newest object of the epoch always stays: it is a fence, or marks the next sequence.
    """
    needed = set(checkpoint.needed)
    base = folder(broker, epoch)
    objects, checkpoints = _listing(store, broker, epoch)
    return [
        f"{base}/{number:020d}"
        for number in objects[:-1]
        if number <= checkpoint.sequence and number not in needed
    ] + [
        f"{base}/{_CHECKPOINT}{number:020d}"
        for number in checkpoints
        if number < checkpoint.sequence
    ]


def closed_epoch_paths(
    store: Store, open_epochs: Callable[[], Container[tuple[int, int]]]
) -> list[str]:
    """Returns the paths of all closed epochs that may be deleted: everything but their fences.

    `open_epochs` returns the (broker, epoch) of open epochs. It is called after the listing, so
    that it has an epoch that opens meanwhile.
    """
    found: dict[tuple[int, int], list[str]] = {}
    for stat in store.walk(_FOLDER):
        named = _NAMED.fullmatch(stat.name)
        if named is not None:
            found.setdefault((int(named[1]), int(named[2])), []).append(named[3])
    are_open = open_epochs()
    paths = []
    for epoch, names in found.items():
        if epoch not in are_open:
            fence = max(filter(str.isdigit, names), default=None)
            paths += [f"{folder(*epoch)}/{name}" for name in names if name != fence]
    return paths


def _listing(store: Store, broker: int, epoch: int) -> tuple[list[int], list[int]]:
    """Returns the sequences of the objects and of the checkpoints, sorted."""
    names = [stat.name for stat in store.list_after(folder(broker, epoch))]
    return (
        [int(name) for name in names if name.isdigit()],
        [int(name[len(_CHECKPOINT) :]) for name in names if name.startswith(_CHECKPOINT)],
    )
