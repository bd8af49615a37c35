"""The write-ahead log: one object per flush, entries for any number of partitions in it.

An object is `magic, index length, CRC32C of the index, index, payloads`; the index (msgpack) tells
all about each entry, so that one entry can be fetched by its byte range. An epoch's objects are
numbered from 0 without holes as far as anything was acked. The rules that everything rests on:

- Object N is created only if absent. Once a put of N was issued, only the same bytes are tried
  again at N, until it is known what stands there.
- A *fence* ends the epoch for everybody: nothing looks past it.
- Objects are removed only after a checkpoint of a later or equal sequence stands that does not need
  them; the newest object of an epoch without a fence, and a fence, never go. So whoever finds N
  absent, and no checkpoint at or after N, knows that nobody ever got an ack for N.
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
from sparklog.record import LOG_APPEND_TIME, PAYLOAD_SCHEMA
from sparklog.storage.objects import ObjectMissing, Store, claim
from sparklog.storage.snapshot import Bounds, Encoding, Entry, Kind, Located, WalPosition

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
    """An entry's bytes, in pieces, with their sum."""

    pieces: tuple[bytes | pa.Buffer, ...]
    length: int
    crc32c: int


EMPTY = Payload((), 0, 0)
_TYPES = {field.name: field.type for field in PAYLOAD_SCHEMA}
_schema_messages: dict[tuple[str, ...], bytes] = {}


def encode_payload(batch: pa.RecordBatch) -> Payload:
    """`batch`, a conforming payload, as an Arrow IPC stream of one batch."""
    names = tuple(batch.schema.names)
    head = _schema_messages.get(names)
    if head is None:
        head = _schema_messages[names] = batch.schema.serialize().to_pybytes()
    body = batch.serialize()
    crc = crc32c.crc32c(_END_OF_STREAM, crc32c.crc32c(body, crc32c.crc32c(head)))
    return Payload((head, body, _END_OF_STREAM), len(head) + body.size + len(_END_OF_STREAM), crc)


def decode_body(schema: pa.Schema, payload: Payload) -> pa.RecordBatch:
    """The batch of `schema` that `encode_payload` has encoded, in the payload's memory only."""
    _, body, _ = payload.pieces
    return pa.ipc.read_record_batch(body, schema)


def decode_payload(entry: Entry, data: pa.Buffer) -> pa.RecordBatch:
    """The records of an entry, without copying: a payload, whose own times count if they shall.

    Raises `CorruptObject` for what is no such batch.
    """
    if entry.encoding is Encoding.KAFKA:
        return decode_kafka([entry], [data])
    try:
        batch = pa.ipc.open_stream(data).read_next_batch()
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise _not_as_described(entry, f"not an Arrow stream: {error}") from error
    if batch.num_rows != entry.count:
        raise _not_as_described(entry, f"{batch.num_rows} rows instead of {entry.count}")
    names = batch.schema.names
    if len(set(names)) != len(names) or any(
        _TYPES.get(field.name) != field.type for field in batch.schema
    ):
        raise _not_as_described(entry, f"its columns are {batch.schema.to_string()}")
    if entry.timestamp_type == LOG_APPEND_TIME and "timestamp" in names:
        batch = batch.drop_columns(["timestamp"])  # a staged file keeps what was written
    return batch


def encode_kafka(batch: bytes | bytearray) -> Payload:
    """A record batch of Kafka's, kept as it is; the offset in it is not its place, `entry` is."""
    return Payload((batch,), len(batch), crc32c.crc32c(batch))


def decode_kafka(
    entries: Sequence[Entry], batches: Sequence[bytes | bytearray | pa.Buffer]
) -> pa.RecordBatch:
    """The records of entries in Kafka's encoding that follow one another, as one payload.

    Entries with the time of their append come one at a time: their records bring none. Raises
    `CorruptObject` where one of them is no such batch, or they are too large together, and
    `NotInstalled` where an installation lacks what decodes them.
    """
    try:
        from sparklog import recordbatch  # its loops cost a reader of anything else too much
    except ModuleNotFoundError as error:
        raise errors.NotInstalled(
            what="decoding records that Kafka clients wrote",
            missing=error.name or str(error),
            hint="pip install 'sparklog[spark]', or 'sparklog[broker]' for a broker",
        ) from error

    try:
        payload = recordbatch.decode(*batches)
    except (errors.Invalid, errors.DamagedBatch) as error:
        raise _not_as_described(entries[0], str(error)) from error
    count = sum(entry.count for entry in entries)
    if payload.num_rows != count:
        raise _not_as_described(entries[0], f"{payload.num_rows} rows instead of {count}")
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
    """What one flush made durable."""

    at: WalPosition
    written_us: int
    located: tuple[Located, ...]

    @property
    def is_fence(self) -> bool:
        return any(each.entry.kind is Kind.FENCE for each in self.located)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A broker's state as of `sequence`; of the objects up to there, only `needed` still count."""

    sequence: int
    needed: tuple[int, ...]
    state: bytes
    bounds: Mapping[str, Sequence[Bounds]] | None = None
    """Of each partition, by topic id, as of `sequence`; None: an earlier release did not tell."""


def folder(broker: int, epoch: int) -> str:
    """Where the objects of one epoch stand."""
    return f"{_FOLDER}/{broker}/{epoch:010d}"


def object_path(at: WalPosition) -> str:
    """Where the object stands; names sort as sequences do."""
    return f"{folder(at.broker, at.epoch)}/{at.sequence:020d}"


def _frame(index: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, len(index), crc32c.crc32c(index)) + index


def _unframe(path: str, data: pa.Buffer) -> tuple[bytes | None, int]:
    """(index, its end); the index is None where `data` is too short to hold it."""
    if data.size < _HEADER.size:
        raise errors.CorruptObject(path=path, check=f"{data.size} bytes are no WAL object")
    magic, length, crc = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise errors.CorruptObject(path=path, check=f"begins with {magic!r}, not {_MAGIC!r}")
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
            raise errors.CorruptObject(path=path, check="shorter than its index")
    return index, end


def read_object(store: Store, at: WalPosition) -> WalObject:
    """The index of the object at `at`. Raises `ObjectMissing`, `CorruptObject`."""
    path = object_path(at)
    raw, origin = _read_index(store, path)
    try:
        index = _index_decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise errors.CorruptObject(path=path, check=f"unreadable index: {error}") from error
    found = WalPosition(index.broker, index.epoch, index.sequence)
    if found != at:
        raise errors.CorruptObject(path=path, check=f"says that it is {object_path(found)}")
    return WalObject(
        at=at,
        written_us=index.written_us,
        located=tuple(Located(entry, at, origin) for entry in index.entries),
    )


def read_payload(store: Store, located: Located) -> pa.Buffer:
    """The bytes of one entry, checked. Raises `ObjectMissing`, `CorruptObject` naming the entry."""
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
    """Puts the objects of one epoch, one after another. Not thread-safe: one flush at a time."""

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
        """Durable when it returns; entries come back with their byte ranges.

        Raises `BrokerFenced` when something else stands at the next sequence; `StorageFull` and
        `StorageUnavailable` when surely nothing was written, and then another object may be
        tried; `OutcomeUnknown` only when told to stop before the outcome could be learnt.
        """
        at = WalPosition(self._broker, self._epoch, self.next_sequence)
        placed: list[Entry] = []
        pieces: list[bytes | pa.Buffer] = []
        start = 0
        for entry, payload in entries:
            placed.append(
                msgspec.structs.replace(
                    entry, start=start, length=payload.length, crc32c=payload.crc32c
                )
            )
            pieces.extend(payload.pieces)
            start += payload.length
        written_us = self._clock.now_us()
        index = _Index(os.urandom(8), at.broker, at.epoch, at.sequence, written_us, tuple(placed))
        head = _frame(_encoder.encode(index))
        self._claim(object_path(at), [head, *pieces])
        self.next_sequence += 1
        return WalObject(
            at=at,
            written_us=written_us,
            located=tuple(Located(entry, at, len(head)) for entry in placed),
        )

    def checkpoint(
        self,
        sequence: int,
        needed: Sequence[int],
        state: bytes,
        bounds: Mapping[str, Sequence[Bounds]] | None = None,
    ) -> None:
        """Records that of the objects up to `sequence` only `needed` still count.

        `bounds`: of each partition, by topic id.

        Raises `BrokerFenced` where another process has written this checkpoint.
        """
        assert sequence < self.next_sequence, "a checkpoint speaks of what is durable"
        told = None if bounds is None else {key: tuple(each) for key, each in bounds.items()}
        index = _CheckpointIndex(os.urandom(8), sequence, tuple(needed), state, told)
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
                doubtful = True  # a refusal from here on tells nothing of the tries before
        if not ours:
            raise errors.BrokerFenced(broker=self._broker, epoch=self._epoch)


# ------------------------------------------------------------------------------ following


class Follower:
    """Reads one epoch of a broker's WAL in order, from its newest checkpoint on.

    `poll` gives each object once. It probes for the next sequence, and lists again only when
    asked to (`relist=True`), which a reader does after a pause longer than the trim's grace:
    objects may then have come and gone unseen.
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
        """Read and not given yet: a poll that fails must not lose what it has read."""

    def poll(self, *, relist: bool = False) -> list[WalObject]:
        """Objects that were not given before.

        Raises `CorruptObject` and `MissingObject` once what precedes it is given; and what the
        store raises. The next poll then goes on from the same place.
        """
        if not self.fenced:
            try:
                self._read_on(relist=relist)
            except errors.Corrupt:
                if not self._ready:
                    raise
        if self._ready:
            # An object is seen a moment before it is sure to outlive a power cut.
            self._store.settle(folder(self.broker, self.epoch))
        found, self._ready = self._ready, []
        return found

    def _read_on(self, *, relist: bool) -> None:
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
        """Whether the newest checkpoint is ahead; then the older objects that it needs are read."""
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
    """The checkpoint of the highest sequence, or None. Raises `CorruptObject`."""
    while True:
        names = [stat.name for stat in store.list_after(folder(broker, epoch), after=_CHECKPOINT)]
        if not names:
            return None
        path = f"{folder(broker, epoch)}/{names[-1]}"
        try:
            raw, _ = _read_index(store, path)
        except ObjectMissing:
            continue  # superseded while we looked
        try:
            index = _checkpoint_decoder.decode(raw)
        except msgspec.MsgspecError as error:
            raise errors.CorruptObject(path=path, check=f"unreadable: {error}") from error
        return Checkpoint(
            sequence=index.sequence, needed=index.needed, state=index.state, bounds=index.bounds
        )


# ------------------------------------------------------------------------------ fencing


def fence(store: Store, follower: Follower, *, clock: Clock) -> list[WalObject]:
    """Ends the epoch that `follower` reads, and gives the objects that it had not given yet.

    The fence goes to the first sequence that is absent. The old broker needs exactly that one for
    its next ack, so one of the two puts fails. A sequence may also be absent because it was
    trimmed while we looked; then a checkpoint at or beyond it stands, and our fence is *void*:
    whoever meets it goes on from that checkpoint, and so do we.
    """
    entry = Entry(kind=Kind.FENCE)
    found: list[WalObject] = []
    store.settle(folder(follower.broker, follower.epoch))
    while True:
        found += follower.poll(relist=True)
        if follower.fenced:
            return found
        at = WalPosition(follower.broker, follower.epoch, follower.next_sequence)
        index = _Index(os.urandom(8), at.broker, at.epoch, at.sequence, clock.now_us(), (entry,))
        claim(store, object_path(at), [_frame(_encoder.encode(index))], clock=clock)


# ------------------------------------------------------------------------------ trimming


def removable(store: Store, broker: int, epoch: int, checkpoint: Checkpoint) -> list[str]:
    """Paths that nobody needs once `checkpoint` stands: older objects and older checkpoints.

    The newest object of the epoch always stays: a fence, or the place of the next put.
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


def retired(store: Store, open_epochs: Callable[[], Container[tuple[int, int]]]) -> list[str]:
    """Paths of all closed epochs that may go: everything but their fences.

    `open_epochs` tells (broker, epoch) of those that are open; it is asked after the listing, so
    that an epoch which opens meanwhile is among them.
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
    """Sequences of the objects and of the checkpoints, rising."""
    names = [stat.name for stat in store.list_after(folder(broker, epoch))]
    return (
        [int(name) for name in names if name.isdigit()],
        [int(name[len(_CHECKPOINT) :]) for name in names if name.startswith(_CHECKPOINT)],
    )
