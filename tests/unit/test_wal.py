from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog import errors, limits
from sparklog.clock import ManualClock
from sparklog.formats.record import LOG_APPEND_TIME, TIMESTAMP
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
from sparklog.storage.objects.base import CLAIM_ATTEMPTS
from sparklog.storage.objects.faults import Moment, Operation
from sparklog.storage.snapshot import (
    COMPRESSION_EXPECTED,
    BatchId,
    Encoding,
    Entry,
    EntryKind,
    Located,
    StagedRef,
    WalPosition,
)
from sparklog.storage.wal import objects, payloads
from sparklog.storage.wal.base import object_path
from tests.support.brokers import flip, paths, payload

FOLDER = "wal/1/0000000001"
Written = Sequence[tuple[Entry, wal.Payload]]


@pytest.fixture(params=[1, 8], ids=["in turn", "in parallel"])
def store(request: pytest.FixtureRequest, clock: ManualClock) -> MemoryStore:
    """A store whose objects are read one after another, or several at once."""
    found = MemoryStore(clock)
    found.requests_at_once = request.param
    return found


def path_of(sequence: int) -> str:
    """The path of that object of the only epoch."""
    return object_path(WalPosition(1, 1, sequence))


def appender(store: MemoryStore, clock: ManualClock) -> objects.ObjectAppender:
    """An appender of the only epoch, at its beginning."""
    return objects.ObjectAppender(store, broker=1, epoch=1, clock=clock)


def records(*values: str, base: int = 0, partition: int = 0) -> tuple[Entry, wal.Payload]:
    """An entry with these records, and its bytes."""
    entry = Entry(
        kind=EntryKind.RECORDS,
        topic_id="t",
        partition=partition,
        base_offset=base,
        count=len(values),
    )
    return entry, wal.encode_payload(payload(values))


def follower(store: MemoryStore, clock: ManualClock | None = None) -> objects.ObjectFollower:
    """A new reader of the only epoch."""
    return objects.ObjectFollower(store, 1, 1, clock=clock or ManualClock())


def sequences(found: Sequence[wal.WalObject]) -> list[int]:
    """The sequences of these objects."""
    return [each.at.sequence for each in found]


def failing(operation: Operation, error: BaseException, **where: object) -> Faults:
    """One fault below the WAL's folder."""
    return ScriptedFaults(Fault(operation=operation, error=error, prefix=FOLDER, **where))  # type: ignore[arg-type]


UNRESOLVED = PutUnresolved("?", "no answer")
UNAVAILABLE = errors.StorageUnavailable(operation="put", path="?", reason="down")

# ------------------------------------------------------------------------------ format

values = st.lists(st.none() | st.binary(max_size=20), min_size=1, max_size=5)


@given(values, st.booleans())
def test_a_payload_comes_back_as_it_was(given_values: list[bytes | None], with_keys: bool) -> None:
    """An encoded payload decodes to the same columns and rows."""
    batch = payload(given_values, **({"key": given_values} if with_keys else {}))
    encoded = wal.encode_payload(batch)
    data = pa.py_buffer(b"".join(memoryview(piece) for piece in encoded.pieces))
    entry = Entry(kind=EntryKind.RECORDS, count=batch.num_rows)
    assert data.size == encoded.length
    assert wal.decode_payload(entry, data).equals(batch)


int64s = st.integers(-(2**63), 2**63 - 1)
entries = st.builds(
    Entry,
    kind=st.sampled_from(EntryKind),
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
    """The memory of such an entry is estimated from its length, or from typical compression."""
    entry = Entry(kind=EntryKind.RECORDS, count=1, length=1_000)
    old = msgspec.msgpack.encode(msgspec.msgpack.decode(msgspec.msgpack.encode(entry))[:-1])
    found = msgspec.msgpack.decode(old, type=Entry)
    assert found == entry
    assert found.memory_bytes == 1_000 + limits.ROW_BYTES
    packed = msgspec.structs.replace(found, encoding=Encoding.KAFKA)
    assert packed.memory_bytes == 1_000 * COMPRESSION_EXPECTED + limits.ROW_BYTES
    staged = msgspec.structs.replace(found, staged=StagedRef("f", 0, 5_000, 0))
    assert staged.memory_bytes == 5_000 + limits.ROW_BYTES
    known = msgspec.structs.replace(packed, decoded_bytes=7_000)
    assert known.memory_bytes == 7_000 + limits.ROW_BYTES


@given(st.lists(entries, max_size=4))
def test_an_object_describes_all_of_its_entries(given_entries: list[Entry]) -> None:
    """Index and byte ranges of an object are read back as they were written."""
    clock = ManualClock()
    store = MemoryStore(clock)
    data = wal.encode_payload(payload(["some value"]))
    written = appender(store, clock).append([(entry, data) for entry in given_entries])
    found = objects.read_object(store, WalPosition(1, 1, 0))
    assert found == written
    for located, entry in zip(found.located, given_entries, strict=True):
        read = located.entry
        assert (read.kind, read.base_offset, read.end) == (
            entry.kind,
            entry.base_offset,
            entry.base_offset + entry.count,
        )
        if entry.staged is None:
            assert wal.read_payload(store, located).size == data.length


def corruptions(store: MemoryStore) -> list[errors.CorruptObject]:
    """The errors of reading the first object and its entries."""
    try:
        found = objects.read_object(store, WalPosition(1, 1, 0))
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
    sound = objects.read_object(store, WalPosition(1, 1, 0))
    index_end = sound.located[0].origin
    for position in range(store.stat(path_of(0)).size_bytes):
        flip(store, path_of(0), position)
        (error,) = corruptions(store)
        assert error.path == path_of(0)
        # If the index is intact, the error names the offsets that are not.
        assert ("offsets" in error.check) is (position >= index_end)
        flip(store, path_of(0), position)
    assert objects.read_object(store, WalPosition(1, 1, 0)) == sound


def test_any_missing_end_is_found(store: MemoryStore, clock: ManualClock) -> None:
    """However short an object is cut, it is refused by name."""
    appender(store, clock).append([records("a", "b")])
    whole = bytes(store.get(path_of(0)))
    for size in range(len(whole)):
        store.put(path_of(0), whole[:size])
        assert [error.path for error in corruptions(store)] == [path_of(0)]


def test_an_object_in_a_wrong_place_is_refused(store: MemoryStore, clock: ManualClock) -> None:
    """An object that was copied to another sequence does not count there."""
    appender(store, clock).append([records("a")])
    store.put(path_of(1), store.get(path_of(0)))
    with pytest.raises(errors.CorruptObject) as refused:
        objects.read_object(store, WalPosition(1, 1, 1))
    assert path_of(0) in refused.value.check


def test_an_index_of_any_size_is_read(store: MemoryStore, clock: ManualClock) -> None:
    """An index that is longer than the first read is fetched whole."""
    given_entries = [records("v", base=offset) for offset in range(2_000)]
    appender(store, clock).append(given_entries)
    found = objects.read_object(store, WalPosition(1, 1, 0))
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
    """Intact bytes of another batch than the index describes are refused, with the offsets."""
    batch = ODD_PAYLOADS[what]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    entry = Entry(kind=EntryKind.STAGED, base_offset=7, count=1, staged=StagedRef("s/x", 0, 1, 0))
    with pytest.raises(errors.CorruptObject) as refused:
        wal.decode_payload(entry, sink.getvalue())
    assert refused.value.path == "s/x"
    assert "offsets 7 to 8" in refused.value.check


def test_bytes_that_are_no_batch_are_corrupt() -> None:
    """Bytes that are not an Arrow stream, or have an unknown encoding, are refused."""
    for data in (b"", b"no arrow", payloads._END_OF_STREAM):
        with pytest.raises(errors.CorruptObject):
            wal.decode_payload(Entry(kind=EntryKind.RECORDS, count=1), pa.py_buffer(data))
    with pytest.raises(errors.CorruptObject):
        wal.decode_payload(
            Entry(kind=EntryKind.RECORDS, encoding=Encoding.KAFKA), pa.py_buffer(b"")
        )


def test_the_brokers_time_hides_the_writers() -> None:
    """The rows of an entry with LogAppendTime have no timestamps of their own."""
    batch = payload(["a"], timestamp=[5])
    data = pa.py_buffer(b"".join(memoryview(each) for each in wal.encode_payload(batch).pieces))
    kept = wal.decode_payload(Entry(kind=EntryKind.STAGED, count=1), data)
    assert kept.column("timestamp").type == TIMESTAMP
    entry = Entry(kind=EntryKind.STAGED, count=1, timestamp_type=LOG_APPEND_TIME)
    assert wal.decode_payload(entry, data).schema.names == ["value"]


# ------------------------------------------------------------------------------ appending


def test_sequences_rise_by_one(store: MemoryStore, clock: ManualClock) -> None:
    """Objects are numbered from 0 without a hole."""
    log = appender(store, clock)
    assert [log.append([records("a")]).at.sequence for _ in range(3)] == [0, 1, 2]
    assert paths(store, FOLDER) == [f"{number:020d}" for number in range(3)]


def test_known_objects_are_not_read_again(store: MemoryStore, clock: ManualClock) -> None:
    """A follower continues after them, as if it had read them."""
    log = appender(store, clock)
    known = {number: log.append([records("a", base=number)]) for number in range(3)}
    log.append([records("b", base=3)])
    for number in known:
        store.delete([path_of(number)])
    reader = objects.ObjectFollower(store, 1, 1, clock=clock, known=known)
    assert sequences(reader.poll()) == [0, 1, 2, 3]


def test_an_existing_object_is_not_replaced(store: MemoryStore, clock: ManualClock) -> None:
    """An appender that finds another object at its next sequence is fenced, and leaves it."""
    appender(store, clock).append([records("theirs")])
    before = bytes(store.get(path_of(0)))
    with pytest.raises(errors.BrokerFenced) as fenced:
        appender(store, clock).append([records("ours")])
    assert (fenced.value.broker, fenced.value.epoch) == (1, 1)
    assert bytes(store.get(path_of(0))) == before


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_ambiguous_put_is_resolved(store: MemoryStore, clock: ManualClock, moment: str) -> None:
    """A put without an answer is acked once the object is there, whichever try landed."""
    faulty = store.view(failing("put_new", UNRESOLVED, moment=moment))
    log = appender(faulty, clock)
    written = log.append([records("a")])
    assert objects.read_object(store, written.at) == written
    assert log.append([records("b", base=1)]).at.sequence == 1


def test_a_refused_put_leaves_the_sequence_free(store: MemoryStore, clock: ManualClock) -> None:
    """After a put that surely had no effect, another object may take the sequence."""
    log = appender(store.view(failing("put_new", UNAVAILABLE)), clock)
    with pytest.raises(errors.StorageUnavailable):
        log.append([records("refused")])
    assert log.append([records("taken")]).at.sequence == 0


class Silent(NoFaults):
    """Answers no put."""

    def before(self, operation: Operation, path: str, /) -> None:
        if operation == "put_new":
            raise PutUnresolved(path, "no answer")


def test_a_refused_put_that_is_needed_is_repeated(store: MemoryStore, clock: ManualClock) -> None:
    """The first pauses are short, because a store may refuse some puts; none exceeds a bound."""
    times: list[float] = []
    tries = 1_100

    class Refusing(NoFaults):
        def before(self, operation: Operation, path: str) -> None:
            times.append(clock.monotonic())
            if len(times) <= tries:
                raise errors.StorageUnavailable(operation=operation, path=path, reason="busy")

    planned = appender(store.view(Refusing()), clock).plan([records("a")])
    planned.write(gives_up=lambda: False)
    pauses = [round(after - before, 3) for before, after in itertools.pairwise(times)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6] + [2.0] * (tries - 5)


@pytest.mark.parametrize(
    "refusal",
    [
        errors.StorageUnavailable(operation="put", path="?", reason="refused"),
        errors.StorageFull(root="", free_bytes=0, reserve_bytes=0),
        errors.RootNotWritable(root="", reason="403"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_refusal_after_a_long_silence_proves_nothing_about_earlier_tries(
    store: MemoryStore, clock: ManualClock, refusal: Exception
) -> None:
    """The first put may have landed, however many tries ago, so its outcome is awaited."""

    class Outage(NoFaults):
        """The first put lands without an answer; the others are lost, and the last is refused."""

        def __init__(self) -> None:
            self.puts = 0

        def before(self, operation: Operation, path: str) -> None:
            if operation == "get" and self.puts <= CLAIM_ATTEMPTS + 1:
                raise errors.StorageUnavailable(operation="get", path=path, reason="down")
            if operation == "put_new":
                self.puts += 1
                if self.puts == CLAIM_ATTEMPTS + 1:
                    raise refusal
                if 1 < self.puts <= CLAIM_ATTEMPTS:
                    raise UNRESOLVED

        def after(self, operation: Operation, path: str) -> None:
            if operation == "put_new" and self.puts == 1:
                raise UNRESOLVED

    log = objects.ObjectAppender(store.view(Outage()), broker=1, epoch=1, clock=clock)
    written = log.append([(Entry(kind=EntryKind.OPEN), wal.EMPTY)])
    assert objects.read_object(store, written.at).located == written.located
    assert log.next_sequence == 1


def test_an_outcome_is_unknown_only_when_stopping(store: MemoryStore, clock: ManualClock) -> None:
    """An appender repeats its put until `stopping` returns True."""
    asked = 0

    def stopping() -> bool:
        nonlocal asked
        asked += 1
        return asked == 3

    log = objects.ObjectAppender(
        store.view(Silent()), broker=1, epoch=1, clock=clock, stopping=stopping
    )
    with pytest.raises(errors.OutcomeUnknown):
        log.append([records("a")])
    assert asked == 3
    assert log.next_sequence == 0


# ------------------------------------------------------------------------------ following


def test_a_follower_returns_each_object_once(store: MemoryStore, clock: ManualClock) -> None:
    """New objects come in order, with or without a listing, and none comes twice."""
    log, reader = appender(store, clock), follower(store)
    assert reader.poll() == []
    log.append([records("a")])
    log.append([records("b", base=1)])
    assert sequences(reader.poll()) == [0, 1]
    assert sequences(reader.poll(relist=True)) == []
    log.append([records("c", base=2)])
    assert sequences(reader.poll(relist=True)) == [2]


class FailAt(NoFaults):
    """Fails the n-th operation."""

    def __init__(self, number: int) -> None:
        self.left = number

    def before(self, operation: Operation, path: str, /) -> None:
        self.left -= 1
        if self.left == 0:
            raise UNAVAILABLE


@pytest.mark.parametrize("relist", [True, False])
def test_a_failed_poll_loses_nothing(
    store: MemoryStore, clock: ManualClock, *, relist: bool
) -> None:
    """If any request of a poll fails, the next poll returns the objects of both."""
    log = appender(store, clock)
    for base in range(4):
        log.append([records("v", base=base)])
    log.checkpoint(2, [1], b"")
    log.append([records("v", base=4)])
    log.append([(Entry(kind=EntryKind.FENCE), wal.EMPTY)])
    number = 1
    while True:
        faults = FailAt(number)
        reader = follower(store.view(faults))
        given_sequences: list[int] = []
        failed = False
        while not reader.fenced or not given_sequences:
            try:
                given_sequences += sequences(reader.poll(relist=relist))
            except errors.StorageUnavailable:
                failed = True
        given_sequences += sequences(reader.poll())
        assert given_sequences == [1, 3, 4, 5]
        if not failed:
            break
        number += 1
    assert number == 10


def test_objects_before_a_corrupt_one_are_returned(store: MemoryStore, clock: ManualClock) -> None:
    """A follower returns the objects before a corrupt one, then raises until it is repaired."""
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
    """A follower reads only the older objects that the checkpoint needs, and has its state."""
    log, reader = appender(store, clock), follower(store)
    for base in range(4):
        log.append([records("v", base=base)])
    log.checkpoint(0, [0], b"old")
    log.checkpoint(2, [1], b"state")
    assert sequences(reader.poll()) == [1, 3]
    assert reader.checkpoint == wal.Checkpoint(sequence=2, needed=(1,), state=b"state")


def test_a_follower_that_fell_behind_jumps(store: MemoryStore, clock: ManualClock) -> None:
    """After objects were trimmed unseen, a listing finds the remaining ones."""
    log, reader = appender(store, clock), follower(store)
    log.append([records("v")])
    assert sequences(reader.poll()) == [0]
    for base in range(1, 5):
        log.append([records("v", base=base)])
    log.checkpoint(3, [2], b"")
    checkpoint = objects.newest_checkpoint(store, 1, 1)
    assert checkpoint is not None
    log.trim(checkpoint)
    assert reader.poll() == []
    assert sequences(reader.poll(relist=True)) == [2, 4]


def test_an_object_that_is_needed_and_missing_is_named(
    store: MemoryStore, clock: ManualClock
) -> None:
    """An object that a checkpoint needs must exist."""
    log = appender(store, clock)
    for base in range(2):
        log.append([records("v", base=base)])
    log.checkpoint(1, [0], b"")
    store.delete([path_of(0)])
    with pytest.raises(errors.MissingObject) as missing:
        follower(store).poll()
    assert missing.value.path == path_of(0)


def test_returned_objects_survive_a_power_cut(store: MemoryStore, clock: ManualClock) -> None:
    """A follower returns only durable objects, even if their writer died during the put."""
    dead = SyncFailed("?", "died between link and flush")
    log = appender(store.view(failing("put_new", dead, moment="between")), clock)
    with pytest.raises(SyncFailed):
        log.append([records("a")])
    assert sequences(follower(store).poll()) == [0]
    store.lose_unsynced(lambda _: True)
    assert sequences(follower(store).poll()) == [0]


# ------------------------------------------------------------------------------ fencing


class AtStep(NoFaults):
    """Runs an action once, at the n-th moment of a put."""

    def __init__(self, number: int, *, ambiguous: bool) -> None:
        self.left = number
        self.ambiguous = ambiguous
        self.do: Callable[[], None] = lambda: None

    def _step(self, operation: Operation) -> None:
        if operation in ("put_new", "get", "sync_folder"):
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
    """Fences the only epoch, and stores the objects that were read."""
    read += follower(store, clock).fence()


@pytest.mark.parametrize("ambiguous", [False, True])
def test_a_fence_at_any_moment_of_an_append(ambiguous: bool) -> None:
    """Whenever the fence is put, an append is acked if and only if the fencer read it."""
    seen = set()
    for step in range(1, 12):
        clock = ManualClock()
        store = MemoryStore(clock)
        faults = AtStep(step, ambiguous=ambiguous)
        log = appender(store.view(faults), clock)
        appender(store, clock).append([(Entry(kind=EntryKind.OPEN), wal.EMPTY)])
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
    """Appends as the old broker at the n-th moment of the fencer."""

    def __init__(self, number: int, log: objects.ObjectAppender) -> None:
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
    """All appends that were acked while the fence was under way are among the objects read."""
    seen = set()
    for step in range(1, 25):
        clock = ManualClock()
        store = MemoryStore(clock)
        log = appender(store, clock)
        log.append([(Entry(kind=EntryKind.OPEN), wal.EMPTY)])
        faults = AppendingAt(step, log)
        read = follower(store.view(faults), clock).fence()
        assert sequences(read[:-1]) == [0, *faults.acked]
        assert read[-1].is_fence
        seen.add(len(faults.acked))
    assert seen == {0, 2}


def test_nothing_counts_beyond_a_missing_or_damaged_object(
    store: MemoryStore, clock: ManualClock
) -> None:
    """A reader stops at the first object that it cannot read, whatever is beyond it."""
    log = appender(store, clock)
    for number in range(12):
        log.append([records(f"{number}")])
    for gone in range(12):
        data = store.get(path_of(gone))
        store.delete([path_of(gone)])
        reader = follower(store, clock)
        assert sequences(reader.poll()) == list(range(gone))
        assert sequences(reader.poll()) == []
        store.put(path_of(gone), b"damaged and long enough")
        with pytest.raises(errors.CorruptObject, match=path_of(gone)):
            reader.poll()
        store.put(path_of(gone), data)
        assert sequences(reader.poll()) == list(range(gone, 12))


def test_damage_beyond_a_fence_is_irrelevant(store: MemoryStore, clock: ManualClock) -> None:
    """An object that a fenced broker has left cannot stop a reader."""
    log = appender(store, clock)
    for number in range(5):
        log.append([records(f"{number}")])
    follower(store, clock).fence()
    store.put(path_of(6), b"damaged and long enough")
    reader = follower(store, clock)
    assert sequences(reader.poll()) == list(range(6))
    assert reader.fenced


def test_a_fence_ends_the_epoch_for_readers(store: MemoryStore, clock: ManualClock) -> None:
    """Objects after a fence do not count, whichever broker put them."""
    log = appender(store, clock)
    log.append([records("a")])
    follower(store, clock).fence()
    log.next_sequence = 2
    log.append([records("beyond", base=1)])
    reader = follower(store)
    assert sequences(reader.poll()) == [0, 1]
    assert reader.fenced
    assert reader.poll(relist=True) == []


def test_fencing_twice_is_fencing_once(store: MemoryStore, clock: ManualClock) -> None:
    """A second fencer finds the first one's fence, and adds none."""
    appender(store, clock).append([records("a")])
    first = follower(store, clock).fence()
    assert follower(store, clock).fence() == first
    assert len(paths(store, FOLDER)) == 2


class TrimmedMeanwhile(NoFaults):
    """Appends and trims as the old broker just before the fence is put."""

    def __init__(self, store: MemoryStore, log: objects.ObjectAppender) -> None:
        self.store = store
        self.log = log
        self.done = False

    def before(self, operation: Operation, path: str, /) -> None:
        if operation == "put_new" and not self.done:
            self.done = True
            for base in range(1, 4):
                self.log.append([records("v", base=base)])
            self.log.checkpoint(2, [2], b"")
            checkpoint = objects.newest_checkpoint(self.store, 1, 1)
            assert checkpoint is not None
            self.log.trim(checkpoint)


def test_a_fence_in_the_trimmed_past_is_void(store: MemoryStore, clock: ManualClock) -> None:
    """A fence at a trimmed sequence fences no broker; the fencer continues to the end."""
    log = appender(store, clock)
    log.append([records("v")])
    faulty = store.view(TrimmedMeanwhile(store, log))
    read = follower(faulty, clock).fence()
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


def checkpoint_of(sequence: int, *needed: int) -> wal.Checkpoint:
    """A checkpoint as `trim` takes it."""
    return wal.Checkpoint(sequence=sequence, needed=needed, state=b"")


def left(store: MemoryStore) -> list[str]:
    """The names in the folder of the epoch, without the zeros before the sequences."""
    return [re.sub("(?<![0-9])0+(?=[0-9])", "", name) for name in paths(store, FOLDER)]


def test_only_unneeded_objects_are_removed(store: MemoryStore, clock: ManualClock) -> None:
    """Needed objects, that of the checkpoint, and all beyond it remain; one checkpoint does."""
    log = appender(store, clock)
    for base in range(6):
        log.append([records("v", base=base)])
    log.checkpoint(1, [], b"")
    log.checkpoint(3, [0, 2], b"")
    log.trim(checkpoint_of(3, 0, 2))
    assert left(store) == ["0", "2", "3", "4", "5", "checkpoint-3"]
    log.checkpoint(5, [2], b"")
    log.trim(checkpoint_of(5, 2))
    assert left(store) == ["2", "5", "checkpoint-5"]


def test_the_newest_object_stays(store: MemoryStore, clock: ManualClock) -> None:
    """The newest object remains although it is not needed: it shows where the log continues."""
    log = appender(store, clock)
    log.append([records("v")])
    log.checkpoint(0, [], b"")
    log.trim(checkpoint_of(0))
    assert left(store) == ["0", "checkpoint-0"]


def test_a_deletion_that_failed_is_made_again(store: MemoryStore, clock: ManualClock) -> None:
    """The next trim deletes the same again, also if it has nothing else to do."""
    down = errors.StorageUnavailable(operation="delete", path="?", reason="down")
    faulty = store.view(ScriptedFaults(Fault(operation="delete", error=down)))
    log = appender(faulty, clock)
    for base in range(3):
        log.append([records("v", base=base)])
        log.checkpoint(base, [0], b"")
    with pytest.raises(errors.StorageUnavailable):
        log.trim(checkpoint_of(2, 0))
    assert left(store) == ["0", "1", "2", *(f"checkpoint-{number}" for number in range(3))]
    log.trim(checkpoint_of(2, 0))
    assert left(store) == ["0", "2", "checkpoint-2"]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_checkpoint_whose_put_failed_is_removed(
    store: MemoryStore, clock: ManualClock, moment: Moment
) -> None:
    """A checkpoint that exists although its put failed is deleted like others."""
    folder, lost = f"{FOLDER}/checkpoint", ValueError("no answer that is known")
    fault = Fault(operation="put_new", prefix=folder, moment=moment, error=lost)
    log = appender(store.view(ScriptedFaults(fault)), clock)
    log.append([records("v")])
    with pytest.raises(ValueError, match="no answer"):
        log.checkpoint(0, [], b"")
    log.append([records("v", base=1)])
    log.checkpoint(1, [], b"")
    log.trim(checkpoint_of(1))
    assert left(store) == ["1", "checkpoint-1"]


@given(st.lists(st.tuples(st.integers(1, 3), st.sets(st.integers(0, 30)), st.booleans())))
def test_trimming_leaves_what_a_listing_would(
    rounds: list[tuple[int, set[int], bool]],
) -> None:
    """After each trim, of the objects before the checkpoint exactly the needed ones exist.

    An entry is needed from its append on, until it is published.
    """
    clock = ManualClock()
    store = MemoryStore(clock)
    fails = [False]

    class Failing(NoFaults):
        def before(self, operation: Operation, path: str, /) -> None:
            if operation == "delete" and fails[0]:
                raise errors.StorageUnavailable(operation="delete", path=path, reason="down")

    log = appender(store.view(Failing()), clock)
    needed: set[int] = set()
    for appends, published, fails[0] in rounds:
        for _ in range(appends):
            needed.add(log.append([records("v", base=log.next_sequence)]).at.sequence)
        needed -= published
        newest = log.next_sequence - 1
        log.checkpoint(newest, sorted(needed), b"")
        try:
            log.trim(checkpoint_of(newest, *sorted(needed)))
        except errors.StorageUnavailable:
            continue
        expected = sorted(needed | {newest})
        assert left(store) == [*map(str, expected), f"checkpoint-{newest}"]
        assert set(log._needed) == needed - {newest}
        assert log._checkpoints == {newest}


def test_a_checkpoint_covers_durable_objects_only(store: MemoryStore, clock: ManualClock) -> None:
    """A checkpoint cannot cover an object that does not exist yet."""
    with pytest.raises(AssertionError):
        appender(store, clock).checkpoint(0, [], b"")


def test_a_damaged_checkpoint_is_named(store: MemoryStore, clock: ManualClock) -> None:
    """A damaged checkpoint is an error that names it."""
    log = appender(store, clock)
    log.append([records("v")])
    log.checkpoint(0, [], b"state")
    flip(store, f"{FOLDER}/checkpoint-{0:020d}", -1)
    with pytest.raises(errors.CorruptObject) as corrupt:
        follower(store).poll()
    assert "checkpoint" in corrupt.value.path


def test_a_closed_epoch_keeps_its_fence_only(store: MemoryStore, clock: ManualClock) -> None:
    """Only the fences of closed epochs remain; open epochs and foreign files are not touched."""
    for epoch in (1, 2, 3):
        log = objects.ObjectAppender(store, broker=7, epoch=epoch, clock=clock)
        for base in range(3):
            log.append([records("v", base=base)])
        log.checkpoint(1, [], b"")
        if epoch != 3:
            objects.ObjectFollower(store, 7, epoch, clock=clock).fence()
    store.put("wal/readme", b"")
    store.put("wal/7/notes/x", b"")
    store.delete(objects.ObjectWal(store, clock).retired(lambda: {(7, 2), (7, 3)}))
    left = paths(store, "wal")
    assert [name for name in left if name.startswith("7/0000000001")] == [f"7/0000000001/{3:020d}"]
    assert objects.ObjectFollower(store, 7, 1, clock=clock).poll() == []
    assert len([name for name in left if name.startswith("7/0000000002")]) == 5
    assert len([name for name in left if name.startswith("7/0000000003")]) == 4
    assert {"readme", "7/notes/x"} <= set(left)


def test_a_sleeping_broker_finds_the_fence_of_a_closed_epoch(
    store: MemoryStore, clock: ManualClock
) -> None:
    """However long a broker was suspended, its next put meets the fence."""
    log = appender(store, clock)
    log.append([records("v")])
    follower(store, clock).fence()
    store.delete(objects.ObjectWal(store, clock).retired(set))
    with pytest.raises(errors.BrokerFenced):
        log.append([records("late", base=1)])


def test_a_trimmed_object_is_missing(store: MemoryStore, clock: ManualClock) -> None:
    """Reading an entry of a trimmed object raises `ObjectMissing`."""
    written = appender(store, clock).append([records("v")])
    store.delete([path_of(0)])
    with pytest.raises(ObjectMissing):
        wal.read_payload(store, written.located[0])
    lost = Located(written.located[0].entry, WalPosition(1, 1, 9), 0)
    with pytest.raises(ObjectMissing):
        wal.read_payload(store, lost)
