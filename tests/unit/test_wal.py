from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog import errors, limits
from sparklog.clock import ManualClock
from sparklog.record import LOG_APPEND_TIME, TIMESTAMP
from sparklog.storage import wal
from sparklog.storage.objects import (
    Fault,
    Faults,
    MemoryStore,
    NoFaults,
    ObjectMissing,
    PutUnresolved,
    ScriptedFaults,
    SyncFailed,
)
from sparklog.storage.objects.memory import Operation
from sparklog.storage.snapshot import (
    BatchId,
    Encoding,
    Entry,
    Kind,
    Located,
    StagedRef,
    WalPosition,
)
from tests.support.brokers import flip, paths, payload

FOLDER = "wal/1/0000000001"
Written = Sequence[tuple[Entry, wal.Payload]]


@pytest.fixture
def clock() -> ManualClock:
    """A clock that stands still."""
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    """An empty root."""
    return MemoryStore(clock)


def path_of(sequence: int) -> str:
    """Where that object of the only epoch stands."""
    return wal.object_path(WalPosition(1, 1, sequence))


def appender(store: MemoryStore, clock: ManualClock) -> wal.Appender:
    """The only epoch's, at its beginning."""
    return wal.Appender(store, broker=1, epoch=1, clock=clock)


def records(*values: str, base: int = 0, partition: int = 0) -> tuple[Entry, wal.Payload]:
    """An entry of that many records, and its bytes."""
    entry = Entry(
        kind=Kind.RECORDS,
        topic_id="t",
        partition=partition,
        base_offset=base,
        count=len(values),
    )
    return entry, wal.encode_payload(payload(values))


def follower(store: MemoryStore) -> wal.Follower:
    """A new reader of the only epoch."""
    return wal.Follower(store, 1, 1)


def sequences(objects: Sequence[wal.WalObject]) -> list[int]:
    """Which objects they are."""
    return [each.at.sequence for each in objects]


def failing(operation: Operation, error: BaseException, **where: object) -> Faults:
    """One fault below the WAL's folder."""
    return ScriptedFaults(Fault(operation=operation, error=error, prefix=FOLDER, **where))  # type: ignore[arg-type]


UNRESOLVED = PutUnresolved("?", "no answer")
UNAVAILABLE = errors.StorageUnavailable(operation="put", path="?", reason="down")

# ------------------------------------------------------------------------------ what is written

values = st.lists(st.none() | st.binary(max_size=20), min_size=1, max_size=5)


@given(values, st.booleans())
def test_a_payload_comes_back_as_it_was(given_values: list[bytes | None], with_keys: bool) -> None:
    """What is encoded decodes to the same columns and rows."""
    batch = payload(given_values, **({"key": given_values} if with_keys else {}))
    encoded = wal.encode_payload(batch)
    data = pa.py_buffer(b"".join(memoryview(piece) for piece in encoded.pieces))
    entry = Entry(kind=Kind.RECORDS, count=batch.num_rows)
    assert data.size == encoded.length
    assert wal.decode_payload(entry, data).equals(batch)


int64s = st.integers(-(2**63), 2**63 - 1)
entries = st.builds(
    Entry,
    kind=st.sampled_from(Kind),
    topic_id=st.text(max_size=5),
    partition=st.integers(0, 2**31 - 1),
    base_offset=st.integers(0, 2**63 - 1),
    count=st.integers(0, 2**31 - 1),
    min_timestamp_us=int64s,
    max_timestamp_us=int64s,
    arrival_us=int64s,
    timestamp_type=st.integers(0, 1),
    leader_epoch=st.integers(0, 2**31 - 1),
    producer_id=st.integers(-1, 2**63 - 1),
    producer_epoch=st.integers(-1, 2**31 - 1),
    base_sequence=st.integers(-1, 2**31 - 1),
    transactional=st.booleans(),
    batch_id=st.none() | st.builds(BatchId, st.text(max_size=3), st.integers(0, 2**63 - 1)),
    encoding=st.sampled_from(Encoding),
    staged=st.none()
    | st.builds(
        StagedRef, st.text(max_size=3), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)
    ),
    carried=st.booleans(),
    decoded_bytes=st.integers(0, 2**31),
)


def test_an_entry_of_before_its_size_was_kept_is_read() -> None:
    """Its size in memory is then estimated: as it lies there, or from how records compress."""
    entry = Entry(kind=Kind.RECORDS, count=1, length=1_000)
    old = msgspec.msgpack.encode(msgspec.msgpack.decode(msgspec.msgpack.encode(entry))[:-1])
    found = msgspec.msgpack.decode(old, type=Entry)
    assert found == entry
    assert found.memory_bytes == 1_000 + limits.ROW_BYTES
    packed = msgspec.structs.replace(found, encoding=Encoding.KAFKA)
    assert packed.memory_bytes == 1_000 * limits.COMPRESSION_EXPECTED + limits.ROW_BYTES
    staged = msgspec.structs.replace(found, staged=StagedRef("f", 0, 5_000, 0))
    assert staged.memory_bytes == 5_000 + limits.ROW_BYTES
    known = msgspec.structs.replace(packed, decoded_bytes=7_000)
    assert known.memory_bytes == 7_000 + limits.ROW_BYTES


@given(st.lists(entries, max_size=4))
def test_an_object_tells_all_of_its_entries(given_entries: list[Entry]) -> None:
    """Index and byte ranges of an object are read back as they were written."""
    clock = ManualClock()
    store = MemoryStore(clock)
    data = wal.encode_payload(payload(["some value"]))
    written = appender(store, clock).append([(entry, data) for entry in given_entries])
    found = wal.read_object(store, WalPosition(1, 1, 0))
    assert found == written
    for located, entry in zip(found.located, given_entries, strict=True):
        placed = located.entry
        assert (placed.kind, placed.base_offset, placed.end) == (
            entry.kind,
            entry.base_offset,
            entry.base_offset + entry.count,
        )
        if entry.staged is None:
            assert wal.read_payload(store, located).size == data.length


def complaints(store: MemoryStore) -> list[errors.CorruptObject]:
    """What is wrong with the first object and its entries."""
    try:
        found = wal.read_object(store, WalPosition(1, 1, 0))
    except errors.CorruptObject as error:
        return [error]
    errors_found = []
    for located in found.located:
        try:
            wal.read_payload(store, located)
        except errors.CorruptObject as error:
            errors_found.append(error)
    return errors_found


def test_any_damaged_byte_is_found(store: MemoryStore, clock: ManualClock) -> None:
    """Whichever byte changes, the object or the entry is refused by name."""
    appender(store, clock).append([records("a", "b"), records("c", base=2)])
    sound = wal.read_object(store, WalPosition(1, 1, 0))
    index_end = sound.located[0].origin
    for position in range(store.stat(path_of(0)).size_bytes):
        flip(store, path_of(0), position)
        (error,) = complaints(store)
        assert error.path == path_of(0)
        # Where the index is sound, it is told which offsets are not.
        assert ("offsets" in error.check) is (position >= index_end)
        flip(store, path_of(0), position)
    assert wal.read_object(store, WalPosition(1, 1, 0)) == sound


def test_any_missing_end_is_found(store: MemoryStore, clock: ManualClock) -> None:
    """However short an object is cut, it is refused by name."""
    appender(store, clock).append([records("a", "b")])
    whole = bytes(store.get(path_of(0)))
    for size in range(len(whole)):
        store.put(path_of(0), whole[:size])
        assert [error.path for error in complaints(store)] == [path_of(0)]


def test_an_object_in_a_wrong_place_is_refused(store: MemoryStore, clock: ManualClock) -> None:
    """An object that was copied to another sequence does not count there."""
    appender(store, clock).append([records("a")])
    store.put(path_of(1), store.get(path_of(0)))
    with pytest.raises(errors.CorruptObject) as refused:
        wal.read_object(store, WalPosition(1, 1, 1))
    assert path_of(0) in refused.value.check


def test_an_index_of_any_size_is_read(store: MemoryStore, clock: ManualClock) -> None:
    """An index that is longer than the first read is fetched whole."""
    given_entries = [records("v", base=offset) for offset in range(2_000)]
    appender(store, clock).append(given_entries)
    found = wal.read_object(store, WalPosition(1, 1, 0))
    assert [each.entry.base_offset for each in found.located] == list(range(2_000))


ODD_PAYLOADS: dict[str, pa.RecordBatch] = {
    "more rows": payload(["a", "b"]),
    "fewer rows": payload([]),
    "another type": pa.record_batch({"value": pa.array(["a"])}),
    "another column": pa.record_batch({"value": pa.array([b"a"]), "topic": pa.array([b"t"])}),
    "a column twice": pa.RecordBatch.from_arrays(
        [pa.array([b"a"]), pa.array([b"a"])], ["value", "value"]
    ),
}


@pytest.mark.parametrize("what", ODD_PAYLOADS)
def test_a_batch_that_is_not_as_described_is_corrupt(what: str) -> None:
    """Sound bytes that hold another batch than the index says are refused, with the offsets."""
    batch = ODD_PAYLOADS[what]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    entry = Entry(kind=Kind.STAGED, base_offset=7, count=1, staged=StagedRef("s/x", 0, 1, 0))
    with pytest.raises(errors.CorruptObject) as refused:
        wal.decode_payload(entry, sink.getvalue())
    assert refused.value.path == "s/x"
    assert "offsets 7 to 8" in refused.value.check


def test_bytes_that_are_no_batch_are_corrupt() -> None:
    """What is no Arrow stream, or of an encoding that nobody knows, is refused."""
    for data in (b"", b"no arrow", wal._END_OF_STREAM):
        with pytest.raises(errors.CorruptObject):
            wal.decode_payload(Entry(kind=Kind.RECORDS, count=1), pa.py_buffer(data))
    with pytest.raises(errors.CorruptObject):
        wal.decode_payload(Entry(kind=Kind.RECORDS, encoding=Encoding.KAFKA), pa.py_buffer(b""))


def test_the_brokers_time_hides_the_writers() -> None:
    """Of an entry whose time is that of its append, no row brings a time of its own."""
    batch = payload(["a"], timestamp=[5])
    data = pa.py_buffer(b"".join(memoryview(each) for each in wal.encode_payload(batch).pieces))
    kept = wal.decode_payload(Entry(kind=Kind.STAGED, count=1), data)
    assert kept.column("timestamp").type == TIMESTAMP
    entry = Entry(kind=Kind.STAGED, count=1, timestamp_type=LOG_APPEND_TIME)
    assert wal.decode_payload(entry, data).schema.names == ["value"]


# ------------------------------------------------------------------------------ appending


def test_sequences_rise_by_one(store: MemoryStore, clock: ManualClock) -> None:
    """Objects are numbered from 0 without a hole."""
    log = appender(store, clock)
    assert [log.append([records("a")]).at.sequence for _ in range(3)] == [0, 1, 2]
    assert paths(store, FOLDER) == [f"{number:020d}" for number in range(3)]


def test_what_stands_is_not_replaced(store: MemoryStore, clock: ManualClock) -> None:
    """Where another object stands at the next sequence, the appender is fenced, and leaves it."""
    appender(store, clock).append([records("theirs")])
    before = bytes(store.get(path_of(0)))
    with pytest.raises(errors.BrokerFenced) as fenced:
        appender(store, clock).append([records("ours")])
    assert (fenced.value.broker, fenced.value.epoch) == (1, 1)
    assert bytes(store.get(path_of(0))) == before


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_ambiguous_put_is_resolved(store: MemoryStore, clock: ManualClock, moment: str) -> None:
    """A put without an answer is acked once it stands, whether or not the first try landed."""
    faulty = store.view(failing("put_new", UNRESOLVED, moment=moment))
    log = appender(faulty, clock)
    written = log.append([records("a")])
    assert wal.read_object(store, written.at) == written
    assert log.append([records("b", base=1)]).at.sequence == 1


def test_a_refused_put_leaves_the_sequence_free(store: MemoryStore, clock: ManualClock) -> None:
    """After a put that surely had no effect another object may take the place."""
    log = appender(store.view(failing("put_new", UNAVAILABLE)), clock)
    with pytest.raises(errors.StorageUnavailable):
        log.append([records("refused")])
    assert log.append([records("taken")]).at.sequence == 0


class Silent(NoFaults):
    """No put is ever answered."""

    def before(self, operation: Operation, path: str, /) -> None:
        if operation == "put_new":
            raise PutUnresolved(path, "no answer")


@pytest.mark.parametrize(
    "refusal",
    [
        errors.StorageUnavailable(operation="put", path="?", reason="refused"),
        errors.StorageFull(root="", free_bytes=0, reserve_bytes=0),
        errors.RootNotWritable(root="", reason="403"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_refusal_after_a_long_silence_tells_nothing_of_earlier_tries(
    store: MemoryStore, clock: ManualClock, refusal: Exception
) -> None:
    """The first put may have landed, however many tries ago, and so its outcome is awaited."""

    class Outage(NoFaults):
        """The first put lands and gets no answer; the rest gets none, and in the end is refused."""

        def __init__(self) -> None:
            self.puts = 0

        def before(self, operation: Operation, path: str) -> None:
            if operation == "get" and self.puts <= limits.CLAIM_ATTEMPTS + 1:
                raise errors.StorageUnavailable(operation="get", path=path, reason="down")
            if operation == "put_new":
                self.puts += 1
                if self.puts == limits.CLAIM_ATTEMPTS + 1:
                    raise refusal
                if 1 < self.puts <= limits.CLAIM_ATTEMPTS:
                    raise UNRESOLVED

        def after(self, operation: Operation, path: str) -> None:
            if operation == "put_new" and self.puts == 1:
                raise UNRESOLVED

    log = wal.Appender(store.view(Outage()), broker=1, epoch=1, clock=clock)
    written = log.append([(Entry(kind=Kind.OPEN), wal.EMPTY)])
    assert wal.read_object(store, written.at).located == written.located
    assert log.next_sequence == 1


def test_an_outcome_is_unknown_only_when_stopping(store: MemoryStore, clock: ManualClock) -> None:
    """An appender asks again and again until it is told to stop."""
    asked = 0

    def stopping() -> bool:
        nonlocal asked
        asked += 1
        return asked == 3

    log = wal.Appender(store.view(Silent()), broker=1, epoch=1, clock=clock, stopping=stopping)
    with pytest.raises(errors.OutcomeUnknown):
        log.append([records("a")])
    assert asked == 3
    assert log.next_sequence == 0


# ------------------------------------------------------------------------------ following


def test_a_follower_gives_each_object_once(store: MemoryStore, clock: ManualClock) -> None:
    """New objects come in order, listed again or not, and none comes twice."""
    log, reader = appender(store, clock), follower(store)
    assert reader.poll() == []
    log.append([records("a")])
    log.append([records("b", base=1)])
    assert sequences(reader.poll()) == [0, 1]
    assert sequences(reader.poll(relist=True)) == []
    log.append([records("c", base=2)])
    assert sequences(reader.poll(relist=True)) == [2]


class FailAt(NoFaults):
    """The n-th operation fails."""

    def __init__(self, number: int) -> None:
        self.left = number

    def before(self, operation: Operation, path: str, /) -> None:
        self.left -= 1
        if self.left == 0:
            raise UNAVAILABLE


def test_a_failed_poll_loses_nothing(store: MemoryStore, clock: ManualClock) -> None:
    """Whichever request of a poll fails, the next poll gives what this one did not."""
    log = appender(store, clock)
    for base in range(4):
        log.append([records("v", base=base)])
    log.checkpoint(2, [1], b"")
    log.append([records("v", base=4)])
    log.append([(Entry(kind=Kind.FENCE), wal.EMPTY)])
    number = 1
    while True:
        faults = FailAt(number)
        reader = follower(store.view(faults))
        given_sequences: list[int] = []
        failed = False
        while not reader.fenced or not given_sequences:
            try:
                given_sequences += sequences(reader.poll(relist=True))
            except errors.StorageUnavailable:
                failed = True
        given_sequences += sequences(reader.poll())
        assert given_sequences == [1, 3, 4, 5]
        if not failed:
            break
        number += 1
    assert number == 10


def test_what_precedes_a_corrupt_object_is_given(store: MemoryStore, clock: ManualClock) -> None:
    """A follower serves up to the corrupt object, then names it, and goes on when it is mended."""
    log, reader = appender(store, clock), follower(store)
    for base in range(3):
        log.append([records("v", base=base)])
    flip(store, path_of(1), 20)
    assert sequences(reader.poll()) == [0]
    for _ in range(2):
        with pytest.raises(errors.CorruptObject) as corrupt:
            reader.poll()
        assert corrupt.value.path == path_of(1)
    flip(store, path_of(1), 20)
    assert sequences(reader.poll()) == [1, 2]


def test_a_follower_begins_at_the_newest_checkpoint(store: MemoryStore, clock: ManualClock) -> None:
    """Of what is older it reads only what the checkpoint needs, and it has its state."""
    log, reader = appender(store, clock), follower(store)
    for base in range(4):
        log.append([records("v", base=base)])
    log.checkpoint(0, [0], b"old")
    log.checkpoint(2, [1], b"state")
    assert sequences(reader.poll()) == [1, 3]
    assert reader.checkpoint == wal.Checkpoint(sequence=2, needed=(1,), state=b"state")


def test_a_follower_that_fell_behind_jumps(store: MemoryStore, clock: ManualClock) -> None:
    """After objects were trimmed unseen, listing again finds what is left of them and beyond."""
    log, reader = appender(store, clock), follower(store)
    log.append([records("v")])
    assert sequences(reader.poll()) == [0]
    for base in range(1, 5):
        log.append([records("v", base=base)])
    log.checkpoint(3, [2], b"")
    checkpoint = wal.newest_checkpoint(store, 1, 1)
    assert checkpoint is not None
    store.delete(wal.removable(store, 1, 1, checkpoint))
    assert reader.poll() == []
    assert sequences(reader.poll(relist=True)) == [2, 4]


def test_an_object_that_is_needed_and_missing_is_named(
    store: MemoryStore, clock: ManualClock
) -> None:
    """What a checkpoint needs must be there."""
    log = appender(store, clock)
    for base in range(2):
        log.append([records("v", base=base)])
    log.checkpoint(1, [0], b"")
    store.delete([path_of(0)])
    with pytest.raises(errors.MissingObject) as missing:
        follower(store).poll()
    assert missing.value.path == path_of(0)


def test_what_was_read_outlives_a_power_cut(store: MemoryStore, clock: ManualClock) -> None:
    """A follower gives nothing that could vanish afterwards, even if its writer died in the put."""
    dead = SyncFailed("?", "died between link and flush")
    log = appender(store.view(failing("put_new", dead, moment="between")), clock)
    with pytest.raises(SyncFailed):
        log.append([records("a")])
    assert sequences(follower(store).poll()) == [0]
    store.lose_unsynced(lambda _: True)
    assert sequences(follower(store).poll()) == [0]


# ------------------------------------------------------------------------------ fencing


class AtStep(NoFaults):
    """Does something once, when the n-th moment of putting comes."""

    def __init__(self, number: int, *, ambiguous: bool) -> None:
        self.left = number
        self.ambiguous = ambiguous
        self.do: Callable[[], None] = lambda: None

    def _step(self, operation: Operation) -> None:
        if operation in ("put_new", "get", "settle"):
            self.left -= 1
            if self.left == 0:
                self.do()

    def before(self, operation: Operation, path: str, /) -> None:
        self._step(operation)

    def between(self, operation: Operation, path: str, /) -> None:
        self._step(operation)

    def after(self, operation: Operation, path: str, /) -> None:
        self._step(operation)
        if operation == "put_new" and self.ambiguous:
            raise PutUnresolved(path, "no answer")


def fence_into(read: list[wal.WalObject], store: MemoryStore, clock: ManualClock) -> None:
    """Fences the only epoch, and keeps what was read."""
    read += wal.fence(store, follower(store), clock=clock)


@pytest.mark.parametrize("ambiguous", [False, True])
def test_a_fence_at_any_moment_of_an_append(ambiguous: bool) -> None:
    """Wherever the fence falls, an append is acked if and only if whoever fenced has read it."""
    seen = set()
    for step in range(1, 12):
        clock = ManualClock()
        store = MemoryStore(clock)
        faults = AtStep(step, ambiguous=ambiguous)
        log = appender(store.view(faults), clock)
        appender(store, clock).append([(Entry(kind=Kind.OPEN), wal.EMPTY)])
        log.next_sequence = 1
        read: list[wal.WalObject] = []
        fence = functools.partial(fence_into, read, store, clock)
        faults.do = fence
        try:
            log.append([records("a")])
            acked = True
        except errors.BrokerFenced:
            acked = False
        if not read:
            fence()
        assert read[-1].is_fence
        assert (1 in sequences(read[:-1])) is acked
        seen.add(acked)
        with pytest.raises(errors.BrokerFenced):
            log.append([records("b")])
    assert seen == {False, True}


class AppendingAt(NoFaults):
    """The old broker appends when the fencer's n-th moment comes."""

    def __init__(self, number: int, log: wal.Appender) -> None:
        self.left = number
        self.log = log
        self.acked: list[int] = []

    def _step(self) -> None:
        self.left -= 1
        if self.left == 0:
            for base in range(2):
                try:
                    self.acked.append(self.log.append([records("v", base=base)]).at.sequence)
                except errors.BrokerFenced:
                    return

    def before(self, operation: Operation, path: str, /) -> None:
        self._step()

    def between(self, operation: Operation, path: str, /) -> None:
        self._step()

    def after(self, operation: Operation, path: str, /) -> None:
        self._step()


def test_an_append_at_any_moment_of_a_fence() -> None:
    """Whatever was acked while the fence was on its way is in what the fencer has read."""
    seen = set()
    for step in range(1, 25):
        clock = ManualClock()
        store = MemoryStore(clock)
        log = appender(store, clock)
        log.append([(Entry(kind=Kind.OPEN), wal.EMPTY)])
        faults = AppendingAt(step, log)
        read = wal.fence(store.view(faults), wal.Follower(store.view(faults), 1, 1), clock=clock)
        assert sequences(read[:-1]) == [0, *faults.acked]
        assert read[-1].is_fence
        seen.add(len(faults.acked))
    assert seen == {0, 2}


def test_a_fence_ends_the_epoch_for_readers(store: MemoryStore, clock: ManualClock) -> None:
    """Nothing after a fence counts, whoever put it there."""
    log = appender(store, clock)
    log.append([records("a")])
    wal.fence(store, follower(store), clock=clock)
    log.next_sequence = 2
    log.append([records("beyond", base=1)])
    reader = follower(store)
    assert sequences(reader.poll()) == [0, 1]
    assert reader.fenced
    assert reader.poll(relist=True) == []


def test_fencing_twice_is_fencing_once(store: MemoryStore, clock: ManualClock) -> None:
    """A second fencer finds the first one's fence, and adds none."""
    appender(store, clock).append([records("a")])
    first = wal.fence(store, follower(store), clock=clock)
    assert wal.fence(store, follower(store), clock=clock) == first
    assert len(paths(store, FOLDER)) == 2


class TrimmedMeanwhile(NoFaults):
    """Just before the fence is put, the old broker goes on, and trims behind itself."""

    def __init__(self, store: MemoryStore, log: wal.Appender) -> None:
        self.store = store
        self.log = log
        self.done = False

    def before(self, operation: Operation, path: str, /) -> None:
        if operation == "put_new" and not self.done:
            self.done = True
            for base in range(1, 4):
                self.log.append([records("v", base=base)])
            self.log.checkpoint(2, [2], b"")
            checkpoint = wal.newest_checkpoint(self.store, 1, 1)
            assert checkpoint is not None
            self.store.delete(wal.removable(self.store, 1, 1, checkpoint))


def test_a_fence_in_the_trimmed_past_is_void(store: MemoryStore, clock: ManualClock) -> None:
    """A fence where a trimmed object once stood fences nobody; the fencer goes on to the end."""
    log = appender(store, clock)
    log.append([records("v")])
    faulty = store.view(TrimmedMeanwhile(store, log))
    read = wal.fence(faulty, wal.Follower(faulty, 1, 1), clock=clock)
    assert sequences(read) == [0, 2, 3, 4]
    assert [each.is_fence for each in read] == [False, False, False, True]
    assert path_of(1) in [f"{FOLDER}/{name}" for name in paths(store, FOLDER)]
    reader = follower(store)
    assert sequences(reader.poll()) == [2, 3, 4]
    assert reader.fenced
    slow = follower(store)
    slow._started, slow.next_sequence = True, 1
    assert sequences(slow.poll()) == [2, 3, 4]


# ------------------------------------------------------------------------------ trimming


def test_only_what_is_not_needed_goes(store: MemoryStore, clock: ManualClock) -> None:
    """Needed objects, the newest one, and all beyond the checkpoint stay; older checkpoints go."""
    log = appender(store, clock)
    for base in range(6):
        log.append([records("v", base=base)])
    log.checkpoint(1, [], b"")
    log.checkpoint(3, [0, 2], b"")
    checkpoint = wal.newest_checkpoint(store, 1, 1)
    assert checkpoint is not None
    assert sorted(wal.removable(store, 1, 1, checkpoint)) == [
        path_of(1),
        path_of(3),
        f"{FOLDER}/checkpoint-{1:020d}",
    ]


def test_the_newest_object_stays(store: MemoryStore, clock: ManualClock) -> None:
    """Even if nobody needs it: it shows whoever comes where the log goes on."""
    log = appender(store, clock)
    log.append([records("v")])
    log.checkpoint(0, [], b"")
    checkpoint = wal.newest_checkpoint(store, 1, 1)
    assert checkpoint is not None
    assert wal.removable(store, 1, 1, checkpoint) == []


def test_a_checkpoint_speaks_of_what_is_durable(store: MemoryStore, clock: ManualClock) -> None:
    """Nothing can be said of an object that is not there yet."""
    with pytest.raises(AssertionError):
        appender(store, clock).checkpoint(0, [], b"")


def test_a_damaged_checkpoint_is_named(store: MemoryStore, clock: ManualClock) -> None:
    """A follower does not guess what a checkpoint said."""
    log = appender(store, clock)
    log.append([records("v")])
    log.checkpoint(0, [], b"state")
    flip(store, f"{FOLDER}/checkpoint-{0:020d}", -1)
    with pytest.raises(errors.CorruptObject) as corrupt:
        follower(store).poll()
    assert "checkpoint" in corrupt.value.path


def test_a_closed_epoch_keeps_its_fence_only(store: MemoryStore, clock: ManualClock) -> None:
    """Of closed epochs all goes but their fences; open ones, and strangers, are left alone."""
    for epoch in (1, 2, 3):
        log = wal.Appender(store, broker=7, epoch=epoch, clock=clock)
        for base in range(3):
            log.append([records("v", base=base)])
        log.checkpoint(1, [], b"")
        if epoch != 3:
            wal.fence(store, wal.Follower(store, 7, epoch), clock=clock)
    store.put("wal/readme", b"")
    store.put("wal/7/notes/x", b"")
    store.delete(wal.retired(store, lambda: {(7, 2), (7, 3)}))
    left = paths(store, "wal")
    assert [name for name in left if name.startswith("7/0000000001")] == [f"7/0000000001/{3:020d}"]
    assert wal.Follower(store, 7, 1).poll() == []
    assert len([name for name in left if name.startswith("7/0000000002")]) == 5
    assert len([name for name in left if name.startswith("7/0000000003")]) == 4
    assert {"readme", "7/notes/x"} <= set(left)


def test_a_sleeping_broker_finds_the_fence_of_a_closed_epoch(
    store: MemoryStore, clock: ManualClock
) -> None:
    """However long it slept, its next put meets the fence."""
    log = appender(store, clock)
    log.append([records("v")])
    wal.fence(store, follower(store), clock=clock)
    store.delete(wal.retired(store, set))
    with pytest.raises(errors.BrokerFenced):
        log.append([records("late", base=1)])


def test_what_is_gone_is_missing(store: MemoryStore, clock: ManualClock) -> None:
    """Reading an entry whose object was trimmed says so, and no more."""
    written = appender(store, clock).append([records("v")])
    store.delete([path_of(0)])
    with pytest.raises(ObjectMissing):
        wal.read_payload(store, written.located[0])
    lost = Located(written.located[0].entry, WalPosition(1, 1, 9), 0)
    with pytest.raises(ObjectMissing):
        wal.read_payload(store, lost)
