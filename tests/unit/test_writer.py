from __future__ import annotations

import dataclasses
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparklog import errors, limits
from sparklog.broker.log.appends import Append, AppendResult, PendingAppend
from sparklog.broker.log.flush import WriterLimits
from sparklog.broker.log.flush_pace import (
    QUICK_FLUSH_SECONDS,
    SLOW_FLUSH_PAUSE_SECONDS,
    SLOW_FLUSH_SECONDS,
)
from sparklog.broker.log.free_space import FREE_SPACE_SECONDS
from sparklog.broker.log.put_budget import PutBudget
from sparklog.broker.log.writer import QUICK_FLUSH_BYTES
from sparklog.clock import ManualClock, SystemClock
from sparklog.formats import flight_messages
from sparklog.formats.record import CREATE_TIME, TIMESTAMP, conform_payload
from sparklog.storage import wal
from sparklog.storage.objects import (
    Fault,
    Faults,
    MemoryStore,
    NoFaults,
    ScriptedFaults,
    Store,
    SyncFailed,
)
from sparklog.storage.objects.faults import Operation
from sparklog.storage.snapshot import BatchKind
from tests.support.brokers import Rig, RigOptions, paths, payload, rows_of_root
from tests.support.landing import OURS, Landing
from tests.support.waiting import wait_until

pytestmark = pytest.mark.rig(topics={"t": 2})

UNAVAILABLE = errors.StorageUnavailable(operation="put", path="?", reason="down")


def rig_with(store: Store, clock: ManualClock, **bounds: float) -> Rig:
    """A broker whose writer has these limits, with topic t of two partitions."""
    options = RigOptions(writer=WriterLimits(**bounds))  # type: ignore[arg-type]
    found = Rig(store, clock, options=options)
    found.create("t", 2)
    return found


def faulty(rig: Rig, faults: Faults) -> None:
    """Makes the writer's own puts fail from now on."""
    assert isinstance(rig.store, MemoryStore)
    rig.append_to(rig.store.view(faults))


def failing(error: BaseException, **where: object) -> Faults:
    """Faults that fail the next put of a log object with `error`."""
    return ScriptedFaults(Fault(operation="put_new", error=error, **where))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------ group commit


def test_queued_appends_share_one_put(rig: Rig, store: MemoryStore) -> None:
    """Queued appends of any topic-partitions become one object, in the order of the queue."""
    before = len(paths(store, OURS))
    pending_appends = [rig.submit([f"{number}"], partition=number % 2) for number in range(6)]
    results = [rig.broker.wait(pending)[0] for pending in reversed(pending_appends)]
    assert [each.base_offset for each in reversed(results)] == [0, 0, 1, 1, 2, 2]
    assert len(paths(store, OURS)) == before + 1
    assert rig.read(partition=0) == [(0, b"0"), (1, b"2"), (2, b"4")]


def test_an_ack_follows_the_put(rig: Rig) -> None:
    """No effect of a flush is visible before its object exists."""
    seen: list[int] = []

    class Looking(NoFaults):
        def after(self, operation: Operation, path: str, /) -> None:
            if operation == "put_new":
                seen.append(rig.end())

    faulty(rig, Looking())
    rig.append(["a", "b"])
    assert seen == [0]
    assert rig.end() == 2


@pytest.mark.parametrize(
    ("bounds", "objects"),
    [({"flush_max_entries": 2}, 3), ({"flush_max_bytes": 1}, 6), ({}, 1)],
    ids=str,
)
def test_a_flush_is_bounded(
    store: MemoryStore, clock: ManualClock, bounds: dict[str, float], objects: int
) -> None:
    """An object has a bounded number of entries and bytes, but at least one append."""
    rig = rig_with(store, clock, **bounds)
    before = len(paths(store, OURS))
    pending_appends = [rig.submit([f"{number}"]) for number in range(6)]
    assert [rig.broker.wait(each)[0].base_offset for each in pending_appends] == list(range(6))
    assert len(paths(store, OURS)) == before + objects


def test_a_lingering_writer_waits_for_company(store: MemoryStore, clock: ManualClock) -> None:
    """A flush begins when the linger time is over."""
    rig = rig_with(store, clock, linger_seconds=0.25)
    began = clock.monotonic()
    rig.append(["a"])
    assert clock.monotonic() == began + 0.25


# ------------------------------------------------------------------------------ budget


def with_budget(store: Store, clock: ManualClock, **bounds: int) -> Rig:
    """A broker whose flushes wait for up to 250 ms, with topic t."""
    options = RigOptions(
        writer=WriterLimits(**bounds),
        budget=PutBudget(20.0, longest_wait_seconds=0.25),
    )
    found = Rig(store, clock, options=options)
    found.create("t", 2)
    return found


def test_a_flush_waits_for_the_budget(store: MemoryStore, clock: ManualClock) -> None:
    """Promise: the first record of an idle broker is put at once, and those of a busy one wait."""
    rig = with_budget(store, clock)
    waits: list[float] = []
    for _ in range(60):
        began = clock.monotonic()
        rig.append(["a"])
        waits.append(clock.monotonic() - began)
    assert waits[0] == 0.0
    assert 0.1 < waits[-1] < 0.25
    assert max(after - before for before, after in itertools.pairwise(waits)) < 0.03
    clock.advance(60.0)
    began = clock.monotonic()
    rig.append(["a"])
    assert clock.monotonic() == began


def test_a_full_flush_does_not_wait(store: MemoryStore, clock: ManualClock) -> None:
    """Promise: the budget delays no record that would not share its object with a later one."""
    rig = with_budget(store, clock, flush_max_entries=4)
    for _ in range(60):
        rig.append(["a"])
    began = clock.monotonic()
    pending_appends = [rig.submit(["a"]) for _ in range(4)]
    for each in pending_appends:
        rig.broker.wait(each)
    assert clock.monotonic() == began


def test_a_writer_that_closes_does_not_wait(store: MemoryStore, clock: ManualClock) -> None:
    """A stop waits for no budget."""
    rig = with_budget(store, clock)
    for _ in range(60):
        rig.append(["a"])
    rig.submit(["a"])
    began = clock.monotonic()
    rig.writer.close(errors.BrokerClosing(broker=1))
    assert clock.monotonic() == began


# ------------------------------------------------------------------------------ event loops


class SlowPuts(NoFaults):
    """Puts that take `seconds` of the rig's clock."""

    def __init__(self, clock: ManualClock, seconds: float) -> None:
        self._clock = clock
        self.seconds = seconds

    def after(self, operation: Operation, path: str, /) -> None:
        if operation == "put_new":
            self._clock.advance(self.seconds)


def is_flushed_by_a_loop(rig: Rig, rows: Sequence[str] = ("a",)) -> bool:
    """Returns whether a loop makes such an append durable; its thread does so afterwards."""
    pending = rig.submit(rows)
    rig.broker.flush_if_quick()
    is_done = pending.done
    rig.broker.wait(pending)
    return is_done


def test_a_loop_leads_small_flushes_to_a_fast_disk(rig: Rig, clock: ManualClock) -> None:
    """It leads while flushes take little on average, and leaves the first one to a thread."""
    puts = SlowPuts(clock, QUICK_FLUSH_SECONDS / 2)
    faulty(rig, puts)
    assert [is_flushed_by_a_loop(rig) for _ in range(3)] == [False, True, True]
    puts.seconds = QUICK_FLUSH_SECONDS * 2
    turns = [is_flushed_by_a_loop(rig) for _ in range(16)]
    assert not turns[-1]
    assert turns == sorted(turns, reverse=True)
    puts.seconds = 0.0
    assert [is_flushed_by_a_loop(rig) for _ in range(16)][-1]


def test_a_loop_does_not_lead_after_a_slow_flush(rig: Rig, clock: ManualClock) -> None:
    """A single flush beyond `SLOW_FLUSH_SECONDS` keeps it away for a while, and no longer."""
    puts = SlowPuts(clock, 0.0)
    faulty(rig, puts)
    rig.append(["a"])
    puts.seconds = SLOW_FLUSH_SECONDS * 2
    assert is_flushed_by_a_loop(rig)
    puts.seconds = 0.0
    assert not is_flushed_by_a_loop(rig)
    clock.advance(SLOW_FLUSH_PAUSE_SECONDS)
    assert is_flushed_by_a_loop(rig)


def test_a_loop_leads_no_large_flush(rig: Rig) -> None:
    """Bytes take their time on any disk."""
    rig.append(["a"])
    assert not is_flushed_by_a_loop(rig, ["a" * QUICK_FLUSH_BYTES])


def test_a_loop_does_not_linger(store: MemoryStore, clock: ManualClock) -> None:
    """A writer that waits for company does so in a thread."""
    rig = rig_with(store, clock, linger_seconds=0.25)
    rig.append(["a"])
    assert not is_flushed_by_a_loop(rig)


def test_a_loop_does_not_join_the_flush_of_a_thread(rig: Rig) -> None:
    """While a thread flushes, the loop leaves new appends to it."""
    rig.append(["a"])
    seen: list[bool] = []

    class Looking(NoFaults):
        def after(self, operation: Operation, path: str, /) -> None:
            if operation == "put_new" and not seen:
                late = rig.submit(["late"])
                rig.broker.flush_if_quick()
                seen.append(late.done)

    faulty(rig, Looking())
    rig.append(["b"])
    assert seen == [False]
    assert [value for _, value in rig.read()] == [b"a", b"b"]
    rig.append(["c"])
    assert [value for _, value in rig.read()] == [b"a", b"b", b"late", b"c"]


def test_a_refused_flush_of_a_loop_answers(rig: Rig) -> None:
    """It raises nothing; the appends have the error."""
    rig.append(["a"])
    faulty(rig, failing(UNAVAILABLE))
    pending = rig.submit(["b"])
    rig.broker.flush_if_quick()
    with pytest.raises(errors.StorageUnavailable):
        rig.broker.wait(pending)


# ------------------------------------------------------------------------------ refusals


def test_a_failed_flush_leaves_no_trace(rig: Rig) -> None:
    """After a refusal by the store, the appends may be sent again, and are written once."""
    faulty(rig, failing(UNAVAILABLE))
    stamped = {"producer_sequence": (5, 0, 0)}
    pending_appends = [rig.submit(["a"], **stamped), rig.submit(["b"], partition=1)]  # type: ignore[arg-type]
    for pending in pending_appends:
        with pytest.raises(errors.StorageUnavailable):
            rig.broker.wait(pending)
    assert (rig.end(partition=0), rig.end(partition=1)) == (0, 0)
    assert not rig.append(["a"], **stamped).duplicate
    assert rig.append(["b"], partition=1).base_offset == 0
    assert rig.read() == [(0, b"a")]


def test_a_poisoned_append_is_refused_alone(rig: Rig) -> None:
    """The refusal of one append does not affect the others in its flush."""
    first = rig.submit(["a"], producer_sequence=(1, 0, 0))
    poisoned = rig.submit(["gap"], producer_sequence=(1, 0, 5))
    third = rig.submit(["b"], producer_sequence=(1, 0, 1))
    assert rig.broker.wait(third)[0].base_offset == 1
    with pytest.raises(errors.OutOfOrderSequence):
        rig.broker.wait(poisoned)
    assert rig.broker.wait(first)[0].base_offset == 0
    assert rig.read() == [(0, b"a"), (1, b"b")]


def misplaced(append: Append) -> Append:
    """The append, for a partition that does not exist."""
    return dataclasses.replace(append, partition=7)


def test_appends_submitted_together_are_written_or_refused_together(rig: Rig) -> None:
    """If one of them is refused, none is written, and the next append gets their offsets."""
    appends = rig.stage([(0, ["a"]), (1, ["b"])], batch=1)
    (bad,) = rig.stage([(0, ["x"])], batch=2)
    refused = rig.writer.submit([*appends, misplaced(bad)])
    behind = rig.submit(["next"])
    with pytest.raises(errors.UnknownPartition):
        rig.writer.wait(refused)
    assert rig.broker.wait(behind)[0].base_offset == 0
    assert (rig.end(partition=0), rig.end(partition=1)) == (1, 0)


def test_an_unknown_partition_is_named(rig: Rig) -> None:
    """An append to a partition that the topic does not have is refused before it is queued."""
    for partition in (-1, 2):
        with pytest.raises(errors.UnknownPartition) as refused:
            rig.submit(["a"], partition=partition)
        assert (refused.value.topic, refused.value.last) == ("t", 1)


def test_a_topic_that_is_deleted_meanwhile_is_named(rig: Rig) -> None:
    """Appends that were queued for a topic when it was deleted are refused with its name."""
    pending = rig.submit(["a"])
    rig.broker.topics.delete("t")
    with pytest.raises(errors.UnknownTopic) as refused:
        rig.broker.wait(pending)
    assert refused.value.topic == "t"


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        (payload([]), errors.BadRequest),
        (pa.record_batch({"key": pa.array([b"k"])}), errors.WrongSchema),
        (payload([b"x" * 11]), errors.RecordTooLarge),
        (payload([b"x" * 4], key=[b"x" * 7]), errors.RecordTooLarge),
        (payload([b"x"], headers=[[{"key": "k" * 5, "value": b"x" * 5}]]), errors.RecordTooLarge),
        (payload([b"x" * 10] * 10), errors.BatchTooLarge),
    ],
    ids=["empty", "wrong schema", "value", "key and value", "headers", "batch"],
)
def test_a_batch_that_cannot_be_taken(
    store: MemoryStore, clock: ManualClock, batch: pa.RecordBatch, error: type[Exception]
) -> None:
    """The batch is refused by name before it is queued, and nothing is written."""
    rig = rig_with(store, clock, max_record_bytes=10, max_batch_bytes=100)
    before = paths(store, OURS)
    with pytest.raises(error) as refused:
        rig.broker.append("t", 0, batch)
    if error in (errors.RecordTooLarge, errors.BatchTooLarge):
        assert refused.value.bytes > refused.value.limit_bytes  # type: ignore[attr-defined]
    assert paths(store, OURS) == before
    assert rig.append(["x" * 10]).base_offset == 0


@pytest.mark.parametrize(
    ("batch", "keyless"),
    [
        (payload(["a", "b"]), 2),
        (payload(["a", "b", "c"], key=[b"k", None, b""]), 1),
        (payload([None], key=[None]), 1),
    ],
)
def test_a_compacted_topic_wants_keys(rig: Rig, batch: pa.RecordBatch, keyless: int) -> None:
    """A record without a key is refused with its whole batch, naming the topic and the rule."""
    rig.create("c", 2, cleanup_policy="compact")
    with pytest.raises(errors.KeylessRecord, match=r"'c'.*cleanup\.policy=compact") as refused:
        rig.broker.append("c", 1, batch)
    assert (refused.value.partition, refused.value.count) == (1, keyless)
    assert rig.append(["a", None], topic="c", partition=1, key=[b"k", b""]).base_offset == 0
    rig.broker.topics.alter(flight_messages.AlterTopic(topic="c", config={"cleanup.policy": None}))
    assert rig.broker.wait(rig.broker.append("c", 1, batch))[0].base_offset == 2


def test_a_batch_of_too_many_records_is_refused(rig: Rig) -> None:
    """Records without any bytes count towards the limit of a batch."""
    many = pa.record_batch({"value": pa.nulls(limits.MAX_BATCH_ROWS + 1, pa.binary())})
    with pytest.raises(errors.BadRequest):
        rig.broker.append("t", 0, many)


@pytest.mark.parametrize("producer_sequence", [(1, -1, 0), (1, 0, -1)])
def test_a_negative_producer_sequence_is_refused(
    rig: Rig, producer_sequence: tuple[int, int, int]
) -> None:
    """Producer epochs and sequences below zero are refused."""
    with pytest.raises(errors.BadRequest):
        rig.submit(["a"], producer_sequence=producer_sequence)


def broken_offsets() -> pa.RecordBatch:
    """A string column with an offset a gigabyte behind its buffer."""
    offsets = pa.py_buffer(np.array([0, 2**30, 8], np.int32))
    return pa.record_batch(
        {"value": pa.Array.from_buffers(pa.binary(), 2, [None, offsets, pa.py_buffer(b"x" * 8)])}
    )


def broken_dictionary() -> pa.RecordBatch:
    """A dictionary column with an index beyond its dictionary."""
    indices = pa.array([7], pa.int32())
    return pa.record_batch(
        {"value": pa.DictionaryArray.from_arrays(indices, pa.array([b"x"]), safe=False)}
    )


def broken_list() -> pa.RecordBatch:
    """A headers column with list offsets beyond its values."""
    child = pa.array([{"key": "k", "value": b"v"}])
    offsets = pa.py_buffer(np.array([0, 2**16, 1], np.int32))
    headers = pa.Array.from_buffers(pa.list_(child.type), 2, [None, offsets], children=[child])
    return pa.record_batch({"value": pa.array([b"x", b"y"]), "headers": headers})


def broken_text() -> pa.RecordBatch:
    """A header key that claims to be UTF-8 and is not."""
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    keys = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]
    )
    child = pa.StructArray.from_arrays([keys, pa.array([b"v"])], fields=list(kind.value_type))
    headers = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), child)
    return pa.record_batch({"value": pa.array([b"x"]), "headers": headers})


@pytest.mark.parametrize(
    "make", [broken_offsets, broken_dictionary, broken_list, broken_text], ids=lambda f: f.__name__
)
def test_buffers_that_point_nowhere_are_refused(
    rig: Rig, make: Callable[[], pa.RecordBatch]
) -> None:
    """A batch that would be read outside its memory is refused as a wrong schema."""
    with pytest.raises(errors.WrongSchema):
        rig.broker.append("t", 0, make())


LARGE = b"x" * (1 << 20)
"""A value that is sent once, and that every row refers to."""


def shared_by_dictionary(count: int) -> pa.Array:
    """Values that share one dictionary entry; the first row is null."""
    indices = pa.array([None] + [0] * (count - 1), pa.uint16())
    return pa.DictionaryArray.from_arrays(indices, pa.array([LARGE]))


def shared_by_views(count: int) -> pa.Array:
    """Values that are views of the same bytes."""
    one = pa.array([LARGE], pa.binary_view())
    _, view, data = one.buffers()
    views = pa.py_buffer(view.to_pybytes()[:16] * count)
    return pa.Array.from_buffers(pa.binary_view(), count, [None, views, data])


def shared_by_headers(count: int) -> pa.Array:
    """One header per record, all with the same value."""
    keys = pa.array(["k"] * count)
    child = pa.StructArray.from_arrays([keys, shared_by_views(count)], names=["key", "value"])
    return pa.ListArray.from_arrays(pa.array(range(count + 1), pa.int32()), child)


@pytest.mark.parametrize(
    "make",
    [shared_by_dictionary, shared_by_views, shared_by_headers],
    ids=lambda f: f.__name__,
)
def test_values_that_rows_share_are_counted_for_each(
    rig: Rig, make: Callable[[int], pa.Array]
) -> None:
    """A megabyte that a thousand rows share counts as a gigabyte, and is refused."""
    pool = pa.default_memory_pool()

    def batch(count: int) -> pa.RecordBatch:
        column = make(count)
        if pa.types.is_list(column.type):
            return pa.record_batch({"value": pa.array([b"v"] * count), "headers": column})
        return pa.record_batch({"value": column})

    before = pool.max_memory()
    with pytest.raises(errors.BatchTooLarge) as refused:
        rig.broker.append("t", 0, batch(1_000))
    assert refused.value.bytes >= 999 * len(LARGE)
    assert pool.max_memory() - before < 64 << 20
    rig.broker.wait(rig.broker.append("t", 0, batch(2)))
    assert rig.end() == 2


def test_a_dictionary_that_cannot_be_decoded_is_a_wrong_schema(rig: Rig) -> None:
    """A dictionary of string views, which Arrow cannot decode, is refused as a wrong schema."""
    views = pa.DictionaryArray.from_arrays(pa.array([0]), pa.array([b"x"], pa.binary_view()))
    with pytest.raises(errors.WrongSchema, match="dictionary"):
        rig.broker.append("t", 0, pa.record_batch({"value": views}))


def test_runs_are_no_column_of_a_record(rig: Rig) -> None:
    """Run-end encoded columns are refused by name, also in a header."""
    runs = pa.RunEndEncodedArray.from_arrays([2], pa.array([b"x"]))
    child = pa.StructArray.from_arrays([pa.array(["k", "l"]), runs], names=["key", "value"])
    headers = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), child)
    for columns in ({"value": runs}, {"value": pa.array([b"v"] * 2), "headers": headers}):
        with pytest.raises(errors.WrongSchema, match="run_end_encoded"):
            rig.broker.append("t", 0, pa.record_batch(columns))


def test_memory_holds_no_more_than_the_batch(rig: Rig) -> None:
    """A small slice of a large message does not keep the message in the hot tail."""
    whole = payload([b"v", b"x" * 5_000_000])
    message = whole.serialize()
    part = pa.ipc.read_record_batch(message, whole.schema).slice(0, 1)
    rig.broker.wait(rig.broker.append("t", 0, part))
    (batch,) = rig.hot.run(rig.led_partitions.topic("t").topic_id, 0, 0, rows=1, limit_bytes=1)
    (buffer,) = (each for each in batch.payload.column("value").buffers()[2:])
    while buffer.parent is not None:
        buffer = buffer.parent
    assert buffer.size < 2_000
    assert rig.read() == [(0, b"v")]


def test_the_size_limit_of_a_record_is_reported(store: MemoryStore, clock: ManualClock) -> None:
    """The writer exposes the limit that clients learn with the topic."""
    rig = rig_with(store, clock, max_record_bytes=10)
    assert rig.broker.topics.describe("t").max_record_bytes == 10


# ------------------------------------------------------------------------------ timestamps


def test_a_record_without_a_time_gets_its_arrivals(rig: Rig, clock: ManualClock) -> None:
    """Only records without a timestamp get the broker's time of the append."""
    result = rig.append(["a", "b"], timestamp=[5, None])
    assert result.arrival_us == clock.now_us()
    (batch,) = rig.broker.read("t", 0, 0, 2)
    assert batch.rows.column("timestamp").view(pa.int64()).to_pylist() == [5, clock.now_us()]
    assert batch.rows.column("timestampType").to_pylist() == [0, 0]


def test_log_append_time_is_the_brokers(rig: Rig, store: MemoryStore, clock: ManualClock) -> None:
    """In a topic with LogAppendTime each record, staged or not, has the time of its append."""
    rig.create("l", 1, message_timestamp_type="LogAppendTime")
    result = rig.append(["a"], topic="l", timestamp=[5])
    assert (result.timestamp_type, result.arrival_us) == (1, clock.now_us())
    rig.append_staged([(0, ["b"])], batch=1, topic="l")
    rig.publish()
    for reader in (rig, rig.successor()):
        (batch, *rest) = reader.broker.read("l", 0, 0, 2)
        rows = pa.Table.from_batches([batch.rows, *[each.rows for each in rest]])
        assert (
            rows.column("timestamp").to_pylist()
            == pa.array([clock.now_us()] * 2, TIMESTAMP).to_pylist()
        )
        assert rows.column("timestampType").to_pylist() == [1, 1]


# ------------------------------------------------------------------------------ duplicates


def test_a_retry_in_the_same_flush_waits_for_the_first(rig: Rig) -> None:
    """A batch that is sent again while in flight is written once, and both acks have its offset."""
    pending_appends = [rig.submit(["a", "b"], producer_sequence=(1, 0, 0)) for _ in range(3)]
    results = [rig.broker.wait(pending)[0] for pending in pending_appends]
    assert [each.base_offset for each in results] == [0, 0, 0]
    assert [each.duplicate for each in results] == [False, True, True]
    assert rig.end() == 2


def test_a_retry_of_a_flush_that_fails_fails(rig: Rig) -> None:
    """A retry is not acked as a duplicate of a batch whose flush failed."""
    faulty(rig, failing(UNAVAILABLE))
    pending_appends = [rig.submit(["a"], producer_sequence=(1, 0, 0)) for _ in range(2)]
    for pending in pending_appends:
        with pytest.raises(errors.StorageUnavailable):
            rig.broker.wait(pending)
    assert rig.end() == 0


def test_a_retry_after_the_ack_writes_nothing(rig: Rig, store: MemoryStore) -> None:
    """A duplicate is acked with its first offset and time, without another object."""
    first = rig.append(["a"], producer_sequence=(1, 0, 0))
    before = paths(store, OURS)
    assert isinstance(rig.clock, ManualClock)
    rig.clock.advance(5)
    again = rig.append(["a"], producer_sequence=(1, 0, 0))
    assert (again.base_offset, again.arrival_us, again.duplicate) == (0, first.arrival_us, True)
    assert paths(store, OURS) == before


def test_a_refused_first_batch_keeps_the_second_back(rig: Rig) -> None:
    """The second of two first batches is refused if the first was."""
    faulty(rig, failing(UNAVAILABLE))
    with pytest.raises(errors.StorageUnavailable):
        rig.append(["a"], producer_sequence=(1, 0, 0))
    with pytest.raises(errors.OutOfOrderSequence):
        rig.append(["b"], producer_sequence=(1, 0, 1))
    rig.append(["a"], producer_sequence=(1, 0, 0))
    rig.append(["b"], producer_sequence=(1, 0, 1))
    assert rig.read() == [(0, b"a"), (1, b"b")]


def test_producer_sequences_are_per_partition(rig: Rig) -> None:
    """A batch with the same sequence in another partition is not a duplicate."""
    assert not rig.append(["a"], producer_sequence=(1, 0, 0)).duplicate
    assert not rig.append(["a"], producer_sequence=(1, 0, 0), partition=1).duplicate


def test_a_spark_batch_is_appended_once(rig: Rig) -> None:
    """A Spark batch that is appended again, in the same flush or later, is skipped as a whole."""
    sections = [(0, ["a"]), (0, ["b", "c"]), (1, ["d"])]
    first, retry = (rig.writer.submit(rig.stage(sections, batch=1)) for _ in range(2))
    result = [(each.base_offset, each.duplicate) for each in rig.writer.wait(retry)]
    assert result == [(0, True), (0, True), (0, True)]
    assert [each.base_offset for each in rig.writer.wait(first)] == [0, 1, 0]
    assert all(each.duplicate for each in rig.append_staged(sections, batch=1))
    assert not any(each.duplicate for each in rig.append_staged(sections, batch=2))
    assert [value for _, value in rig.read()] == [b"a", b"b", b"c"] * 2


def test_a_spark_batch_is_not_extended(rig: Rig) -> None:
    """A repeated commit with other partitions is refused with the batch that is already there."""
    rig.append_staged([(0, ["a"])], batch=1)
    with pytest.raises(errors.BadRequest, match="two drivers write batches of one query"):
        rig.append_staged([(1, ["b"])], batch=1)
    assert rig.append_staged([(1, ["b"])], batch=2)[0].base_offset == 0


def test_the_whole_of_a_batch_waits_for_a_part_of_it(rig: Rig) -> None:
    """The attempt that wrote the part began while others led partitions; the next one continues."""
    (part,) = rig.stage([(0, ["a"])], batch=1)
    part = dataclasses.replace(part, batch_kind=BatchKind.NUMBERED_PART)
    whole = rig.stage([(0, ["a"]), (1, ["b"])], batch=1)
    first, second = rig.writer.submit([part]), rig.writer.submit(whole[1:])
    with pytest.raises(errors.MetadataChanged):
        rig.writer.wait(second)
    assert rig.writer.wait(first)[0].base_offset == 0
    with pytest.raises(errors.MetadataChanged):
        rig.writer.wait(rig.writer.submit(whole[1:]))
    rest = dataclasses.replace(whole[1], batch_kind=BatchKind.NUMBERED_PART)
    assert rig.writer.wait(rig.writer.submit([rest]))[0].base_offset == 0


def test_a_refused_spark_batch_is_no_duplicate(rig: Rig) -> None:
    """A retry behind a refused append in the same flush is not a duplicate of it."""
    good = rig.stage([(0, ["a"])], batch=1)
    (bad,) = rig.stage([(0, ["x"])], batch=9)
    refused = rig.writer.submit([*good, misplaced(bad)])
    retry = rig.writer.submit(good)
    with pytest.raises(errors.UnknownPartition):
        rig.writer.wait(refused)
    (result,) = rig.writer.wait(retry)
    assert (result.base_offset, result.duplicate) == (0, False)


# ------------------------------------------------------------------------------ bounds


class Blocked(NoFaults):
    """Blocks puts of log objects until they are released."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go = threading.Event()

    def before(self, operation: Operation, path: str, /) -> None:
        if operation == "put_new":
            self.entered.set()
            assert self.go.wait(30)


def test_a_topic_may_be_deleted_while_its_records_are_flushed(
    store: MemoryStore, clock: ManualClock
) -> None:
    """The records of other topics in the same flush are acked."""
    rig = rig_with(store, clock)
    rig.create("u")
    blocked = Blocked()
    faulty(rig, blocked)
    with ThreadPoolExecutor(2) as pool:
        leading = pool.submit(rig.append, ["a"])
        assert blocked.entered.wait(30)
        gone, stays = rig.submit(["b"]), rig.submit(["x"], topic="u")
        blocked.entered.clear()
        blocked.go.set()
        leading.result(30)
        blocked.go.clear()
        flushing = pool.submit(rig.broker.wait, stays)
        assert blocked.entered.wait(30)
        rig.led_partitions.remove_topic(rig.led_partitions.topic("t"))
        blocked.go.set()
        assert flushing.result(30)[0].base_offset == 0
        rig.broker.wait(gone)
    assert rig.append(["y"], topic="u").base_offset == 1


def test_a_full_queue_refuses(store: MemoryStore, clock: ManualClock) -> None:
    """While a flush is under way and the queue is full, appends get a retriable `QueueFull`."""
    rig = rig_with(store, clock, queue_bytes=1)
    blocked = Blocked()
    faulty(rig, blocked)
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(rig.append, ["a"])
        assert blocked.entered.wait(30)
        queued = rig.submit(["b"])
        with pytest.raises(errors.QueueFull) as full:
            rig.submit(["c"])
        assert full.value.setting == "writer.queue_bytes"
        blocked.go.set()
        assert leading.result().base_offset == 0
    assert rig.broker.wait(queued)[0].base_offset == 1
    assert rig.append(["c"]).base_offset == 2


def test_a_caller_that_finds_the_queue_full_leads(store: MemoryStore, clock: ManualClock) -> None:
    """A caller that waits for space leads a flush if no other does; one may fill the queue."""
    options = RigOptions(writer=WriterLimits(queue_bytes=1), submit_timeout_seconds=30)
    rig = Rig(store, clock, options=options)
    rig.create("t", 2)
    pending_appends = [rig.submit([f"{number}"]) for number in range(20)]
    assert [rig.broker.wait(each)[0].base_offset for each in pending_appends] == list(range(20))


def test_a_caller_without_a_timeout_does_no_io(store: MemoryStore, clock: ManualClock) -> None:
    """It is refused at once, although no thread leads a flush, and the queue is unchanged."""
    rig = rig_with(store, clock, queue_bytes=1)
    before = len(paths(store, OURS))
    queued = rig.submit(["a"])
    with pytest.raises(errors.QueueFull):
        rig.submit(["b"])
    assert len(paths(store, OURS)) == before
    assert not queued.done
    assert rig.broker.wait(queued)[0].base_offset == 0


@pytest.mark.parametrize("bound", ["queue_bytes", "unpublished_bytes"])
def test_an_unbounded_append_is_queued(store: MemoryStore, clock: ManualClock, bound: str) -> None:
    """It is queued while others are refused: the queue is full, or publishing is behind."""
    rig = rig_with(store, clock, **{bound: 1})
    first = rig.submit(["a"])
    if bound == "unpublished_bytes":
        rig.broker.wait(first)
    append = rig.writer.preparer.prepare(rig.led_partitions.topic("t"), 1, payload(["b"]), None)
    with pytest.raises(errors.QueueFull):
        rig.writer.submit([append])
    pending = rig.writer.submit([append], is_bounded=False)
    assert rig.broker.wait(pending)[0].base_offset == 0


def test_too_much_that_is_not_published_refuses(store: MemoryStore, clock: ManualClock) -> None:
    """If too much is unpublished, appends are refused until the publisher has caught up."""
    rig = rig_with(store, clock, unpublished_bytes=1)
    rig.append(["a"])
    with pytest.raises(errors.QueueFull) as full:
        rig.submit(["b"])
    assert full.value.setting == "publisher.unpublished_bytes"
    rig.publish()
    assert rig.append(["b"]).base_offset == 1


@pytest.mark.parametrize("is_published", [True, False])
def test_a_caller_waits_asleep_for_space(store: MemoryStore, is_published: bool) -> None:
    """A waiting caller is woken when the publisher frees space, and refused at its timeout."""
    options = RigOptions(
        writer=WriterLimits(unpublished_bytes=1),
        submit_timeout_seconds=30.0 if is_published else 0.3,
    )
    rig = Rig(store, SystemClock(), options=options)
    rig.create("t", 2)
    rig.append(["a"])

    def wait() -> int:
        began = time.thread_time()
        try:
            pending = rig.submit(["b"])
        finally:
            assert time.thread_time() - began < 0.1
        return rig.broker.wait(pending)[0].base_offset

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        time.sleep(0.1)
        assert not waiting.done()
        if is_published:
            rig.publish()
            rig.writer.notify_published()
            assert waiting.result(30.0) == 1
        else:
            with pytest.raises(errors.QueueFull):
                waiting.result(30.0)


def test_a_large_staged_batch_holds_no_producer_back(
    store: MemoryStore, clock: ManualClock
) -> None:
    """Staged bytes have a bound of their own: a huge batch refuses only the next staged one."""
    rig = rig_with(store, clock, unpublished_bytes=100_000, staged_bytes=150_000)
    large = [(partition, ["x" * 100_000]) for partition in (0, 1)]
    rig.append_staged(large, batch=1)
    assert (
        rig.led_partitions.backlog.staged_bytes
        == rig.led_partitions.topic("t").staged_bytes
        > 200_000
    )
    assert rig.led_partitions.backlog.unpublished_bytes < 10_000
    assert rig.append(["a"]).base_offset == 1
    with pytest.raises(errors.QueueFull) as full:
        rig.append_staged(large, batch=2)
    assert full.value.setting == "publisher.staged_bytes"
    successor = rig.successor()
    assert successor.led_partitions.backlog.staged_bytes == rig.led_partitions.backlog.staged_bytes
    successor.publish()
    assert (
        successor.led_partitions.backlog.staged_bytes,
        successor.led_partitions.backlog.unpublished_bytes,
    ) == (0, 0)
    assert not any(each.duplicate for each in successor.append_staged(large, batch=2))


@pytest.mark.parametrize(
    ("bound", "error"),
    [
        ("queue_bytes", errors.QueueFull),
        ("unpublished_bytes", errors.QueueFull),
        ("staged_bytes", errors.QueueFull),
        ("topic_held_bytes", errors.TopicHeldBack),
        ("topic_held_staged_bytes", errors.TopicHeldBack),
    ],
)
def test_a_bound_may_be_reached(clock: ManualClock, bound: str, error: type[Exception]) -> None:
    """Waiting bytes may reach the bound exactly; one byte more, and the next append is refused."""

    def waiting_bytes(rig: Rig) -> int:
        """The bytes after one batch; no thread leads a flush for appends that are only queued."""
        topic = rig.led_partitions.topic("t")
        topic.held_back = "its table is torn"
        if "staged" in bound:
            rig.append_staged([(0, ["a"])], batch=1)
            return topic.staged_bytes
        pending = rig.submit(["a"])
        if bound == "queue_bytes":
            return pending.bytes
        rig.broker.wait(pending)
        return topic.unpublished_bytes

    def one_more(rig: Rig) -> None:
        if "staged" in bound:
            rig.append_staged([(0, ["b"])], batch=2)
        else:
            rig.append(["b"])

    size = waiting_bytes(rig_with(MemoryStore(clock), clock))
    full = rig_with(MemoryStore(clock), clock, **{bound: size})
    assert waiting_bytes(full) == size
    one_more(full)
    more_than_full = rig_with(MemoryStore(clock), clock, **{bound: size - 1})
    waiting_bytes(more_than_full)
    with pytest.raises(error):
        one_more(more_than_full)


def test_a_batch_may_be_as_large_as_the_bound(clock: ManualClock) -> None:
    """The columns together may reach the limit; a byte more is refused."""
    batch = payload(["abc", None, "d"], key=[b"k", b"", None])
    exact = rig_with(MemoryStore(clock), clock, max_batch_bytes=batch.nbytes)
    assert exact.broker.wait(exact.broker.append("t", 0, batch))[0].count == 3
    less = rig_with(MemoryStore(clock), clock, max_batch_bytes=batch.nbytes - 1)
    with pytest.raises(errors.BatchTooLarge) as refused:
        less.broker.append("t", 0, batch)
    assert (refused.value.bytes, refused.value.limit_bytes) == (batch.nbytes, batch.nbytes - 1)


def test_a_held_back_topic_refuses_staged_batches_by_their_own_bound(
    store: MemoryStore, clock: ManualClock
) -> None:
    """A large staged batch of a held back topic refuses no producer, and the reverse."""
    rig = rig_with(store, clock, topic_held_bytes=100_000, topic_held_staged_bytes=100_000)
    rig.led_partitions.topic("t").held_back = "its table is torn"
    rig.append_staged([(0, ["x" * 200_000])], batch=1)
    rig.append(["a"])
    with pytest.raises(errors.TopicHeldBack):
        rig.append_staged([(0, ["b"])], batch=2)


def test_space_that_is_freed_in_time_is_used(store: MemoryStore, clock: ManualClock) -> None:
    """A caller that waits for space continues when the publisher has freed some."""
    rig = rig_with(store, clock, unpublished_bytes=1)
    rig.append(["a"])
    append = rig.writer.preparer.prepare(rig.led_partitions.topic("t"), 0, payload(["b"]), None)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rig.writer.submit, [append], timeout_seconds=30)
        rig.publish()
        rig.writer.notify_published()
        pending = waiting.result()
    assert rig.writer.wait(pending)[0].base_offset == 1


def test_a_held_back_topic_refuses_alone(store: MemoryStore, clock: ManualClock) -> None:
    """A topic whose table cannot be written accepts a bounded number of bytes, then refuses."""
    rig = rig_with(store, clock, topic_held_bytes=1)
    rig.create("u")
    topic = rig.led_partitions.topic("t")
    topic.held_back = "its table is torn"
    rig.append(["a"])
    with pytest.raises(errors.TopicHeldBack) as refused:
        rig.append(["b"])
    assert (refused.value.topic, refused.value.reason) == ("t", "its table is torn")
    rig.append(["c"], topic="u")
    rig.publish()
    assert rig.append(["b"]).base_offset == 1


class SmallDisk(MemoryStore):
    """A disk whose free space the test sets."""

    free: int | None = None

    def free_bytes(self) -> int | None:
        return self.free


def test_a_full_disk_refuses_records_only(clock: ManualClock) -> None:
    """Below the reserve, appends are refused retriably, publishing continues, and frees space."""
    disk = SmallDisk(clock)
    rig = rig_with(disk, clock, free_space_reserve_bytes=1_000)
    rig.append(["a"])
    disk.free = 999
    with pytest.raises(errors.StorageFull) as full:
        rig.append(["b"])
    assert (full.value.free_bytes, full.value.reserve_bytes) == (999, 1_000)
    rig.publish()
    rig.trim()
    rig.janitor.tick()
    assert rig.writer.failure is None
    disk.free = 1_000
    assert rig.append(["b"]).base_offset == 1


def test_free_space_is_seldom_looked_at_while_there_is_much(clock: ManualClock) -> None:
    """From twice the reserve on, one look counts for a moment; below, each flush looks."""
    disk = SmallDisk(clock)
    rig = rig_with(disk, clock, free_space_reserve_bytes=1_000)
    disk.free = 2_000
    rig.append(["a"])
    disk.free = 999
    rig.append(["b"])
    clock.advance(2 * FREE_SPACE_SECONDS)
    with pytest.raises(errors.StorageFull):
        rig.append(["c"])
    disk.free = 1_999
    rig.append(["c"])
    disk.free = 999
    with pytest.raises(errors.StorageFull):
        rig.append(["d"])


# ------------------------------------------------------------------------------ the end of a writer


def test_a_failed_sync_ends_the_writer(rig: Rig) -> None:
    """After a failed sync it is unknown if the object is durable, and the writer ends."""
    faulty(rig, failing(SyncFailed("?", "EIO"), moment="between"))
    behind = rig.submit(["a"])
    pending = rig.submit(["b"])
    for each in (behind, pending):
        with pytest.raises(errors.OutcomeUnknown):
            rig.broker.wait(each)
    assert isinstance(rig.writer.failure, SyncFailed)
    with pytest.raises(errors.StorageUnavailable, match="EIO"):
        rig.submit(["c"])  # it surely had no effect


def test_a_failed_free_space_request_does_not_end_the_writer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing request for the free space fails one flush, and is repeated for the next."""

    def free_bytes() -> int:
        raise UNAVAILABLE

    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "free_bytes", free_bytes)
        with pytest.raises(errors.StorageUnavailable):
            rig.append(["a"])
    assert rig.append(["b"]).base_offset == 0


def test_a_change_of_time_amid_an_append_leaves_it_whole(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An append keeps the timestamp type that it began with, in its entry and in its rows."""

    def meanwhile(batch: pa.RecordBatch, **bound: int) -> pa.RecordBatch:
        request = flight_messages.AlterTopic(
            topic="t", config={"message.timestamp.type": "LogAppendTime"}
        )
        rig.broker.topics.alter(request)
        return conform_payload(batch, **bound)

    monkeypatch.setattr("sparklog.broker.log.preparing.conform_payload", meanwhile)
    times = pa.array([1_000_000], TIMESTAMP)
    batch = pa.record_batch({"timestamp": times, "value": pa.array([b"a"], pa.binary())})
    (append,) = rig.broker.append("t", 0, batch).appends
    assert isinstance(append, Append)
    assert append.timestamp_type == CREATE_TIME
    assert isinstance(append.hot_records, pa.RecordBatch)
    assert append.hot_records.schema.names == ["timestamp", "value"]


def test_a_fenced_writer_ends(rig: Rig) -> None:
    """A flush that a successor's fence refused has no effect, and the writer ends."""
    rig.append(["a"])
    successor = rig.successor()
    for _ in range(2):
        with pytest.raises(errors.BrokerFenced):
            rig.append(["b"])
    assert isinstance(rig.writer.failure, errors.BrokerFenced)
    assert successor.append(["c"]).base_offset == 1
    assert rows_of_root(rig.store, rig.clock) == [(0, b"a"), (1, b"c")]


def test_failing_answers_every_caller(rig: Rig) -> None:
    """Every caller that has queued, or waits for space, gets an answer."""
    pending_appends = [rig.submit(["a"]) for _ in range(3)]
    rig.writer.fail(errors.BrokerClosing(broker=1))
    rig.writer.fail(errors.BrokerFenced(broker=1, epoch=1))
    for pending in pending_appends:
        with pytest.raises(errors.BrokerClosing):
            rig.broker.wait(pending)
    with pytest.raises(errors.BrokerClosing):
        rig.submit(["b"])


def test_closing_writes_queued_appends(rig: Rig) -> None:
    """A writer that closes refuses new appends, and writes the queued ones."""
    pending_appends = [rig.submit([f"{number}"]) for number in range(3)]
    rig.writer.close(errors.BrokerClosing(broker=1))
    with pytest.raises(errors.BrokerClosing):
        rig.submit(["late"])
    assert rig.end() == 3
    assert [rig.broker.wait(each)[0].base_offset for each in pending_appends] == [0, 1, 2]


def test_closing_waits_for_the_flush_under_way(rig: Rig) -> None:
    """Closing returns only after the last flush has ended, so the last records can be published."""
    blocked = Blocked()
    faulty(rig, blocked)
    with ThreadPoolExecutor(2) as pool:
        leading = pool.submit(rig.append, ["a"])
        assert blocked.entered.wait(30)
        rig.submit(["b"])
        closing = pool.submit(rig.writer.close, errors.BrokerClosing(broker=1))
        assert not closing.done()
        blocked.go.set()
        closing.result(timeout=30)
        assert leading.result().base_offset == 0
    assert rig.end() == 2


# ------------------------------------------------------------------------------ concurrency


class Slow(NoFaults):
    """Delays some puts, so that queues form, and refuses some."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def before(self, operation: Operation, path: str, /) -> None:
        if operation == "put_new":
            drawn = self.chance.random()
            if drawn < 0.02:
                raise UNAVAILABLE
            if drawn < 0.3:
                time.sleep(0.000_5)


def test_no_thread_misses_its_ack() -> None:
    """Eight threads with thousands of tiny appends get all their answers, each record once."""
    clock = SystemClock()
    store = MemoryStore(clock)
    options = RigOptions(writer=WriterLimits(flush_max_entries=5, queue_bytes=2_000))
    rig = Rig(store, clock, options=options)
    rig.create("t", 2)
    faulty(rig, Slow(random.Random(5)))
    threads, each_thread = 8, 400

    def work(thread: int) -> list[tuple[int, int, str]]:
        chance = random.Random(thread)
        done = []
        waiting: list[tuple[str, PendingAppend]] = []

        def settle() -> None:
            value, pending = waiting.pop(0)
            while True:
                try:
                    (result,) = rig.writer.wait(pending)
                    break
                except errors.StorageUnavailable:
                    pending = submit(value)
            done.append((thread % 2, result.base_offset, value))

        def submit(value: str) -> PendingAppend:
            append = rig.writer.preparer.prepare(
                rig.led_partitions.topic("t"), thread % 2, payload([value]), None
            )
            return rig.writer.submit([append], timeout_seconds=30)

        for number in range(each_thread):
            value = f"{thread}:{number}"
            waiting.append((value, submit(value)))
            while waiting and chance.random() < 0.6:
                settle()
        while waiting:
            settle()
        return done

    with ThreadPoolExecutor(threads) as pool:
        found = [each for part in pool.map(work, range(threads)) for each in part]
    assert len({value for _, _, value in found}) == threads * each_thread
    for partition in (0, 1):
        acked = sorted((offset, value.encode()) for p, offset, value in found if p == partition)
        assert acked == rig.read(partition=partition)
        assert [offset for offset, _ in acked] == list(range(len(acked)))


def test_a_result_has_the_offsets_of_an_append(rig: Rig) -> None:
    """An ack has the first offset, the count, and the timestamp type."""
    assert rig.append(["a", "b"]) == AppendResult(
        base_offset=0, count=2, arrival_us=rig.clock.now_us(), timestamp_type=0
    )


# ------------------------------------------------------------------------------ several flushes


class Flushes:
    """A broker with several flushes of one append under way, each in a thread of its own."""

    def __init__(self, store: MemoryStore, clock: ManualClock) -> None:
        self.rig = rig_with(
            store, clock, flush_max_entries=1, flushes_at_once=4, flush_interval_seconds=0.0
        )
        self.landing = Landing()
        self.pending: list[PendingAppend] = []
        """Appends of `begin`."""
        faulty(self.rig, self.landing)
        self.pool = ThreadPoolExecutor(12)

    def begin(self, *values: str, puts: bool = True, **where: Any) -> list[Future[AppendResult]]:
        """Submits an append for each value, and waits until the flush of each was begun."""
        landing, found = self.landing, []
        for value in values:
            count = len(landing.arrived) + puts
            pending = self.rig.submit([value], **where)
            self.pending.append(pending)
            found.append(self.pool.submit(self._wait, pending))
            landing.wait_for_count(count)
        return found

    def _wait(self, pending: PendingAppend) -> AppendResult:
        return self.rig.broker.wait(pending)[0]


@pytest.fixture
def flushes(store: MemoryStore, clock: ManualClock) -> Iterator[Flushes]:
    """A broker whose puts of the log land when a test says so."""
    found = Flushes(store, clock)
    yield found
    found.landing.allow_all()
    found.pool.shutdown()


def test_threads_lead_flushes_for_a_caller_that_waits_for_one(flushes: Flushes) -> None:
    """Later appends are on their way while the only thread that waits does so for the first."""
    writer = flushes.rig.writer
    leading = [flushes.pool.submit(writer.lead_flushes) for _ in range(writer.leaders)]
    pending = [flushes.rig.submit([value]) for value in "abcde"]
    flushes.landing.wait_for(1, 2, 3, 4)
    first = flushes.pool.submit(flushes.rig.broker.wait, pending[0])
    for sequence in (4, 3, 2):
        flushes.landing.allow(sequence)
    time.sleep(0.002)
    assert not any(each.done for each in pending)
    flushes.landing.allow(1)
    flushes.landing.allow(5)
    assert first.result(10)[0].base_offset == 0
    assert [flushes.rig.broker.wait(each)[0].base_offset for each in pending] == [0, 1, 2, 3, 4]
    writer.close(errors.BrokerClosing(broker=1))
    for each in leading:
        each.result(10)


def test_a_caller_leads_no_flush_behind_its_own(flushes: Flushes) -> None:
    """A thread whose append is under way does not begin a flush that ends later."""
    (first,) = flushes.begin("a")
    pending = flushes.rig.submit(["b"])
    flushes.landing.wait_for(1)
    again = flushes.pool.submit(flushes.rig.broker.wait, flushes.pending[0])
    time.sleep(0.005)
    flushes.landing.wait_for(1)
    flushes.landing.allow(1)
    assert again.result(10) == [first.result(10)]
    flushes.landing.allow(2)
    assert flushes.rig.broker.wait(pending)[0].base_offset == 1


@pytest.mark.parametrize("is_closed", [True, False])
def test_leading_ends_with_the_writer(flushes: Flushes, *, is_closed: bool) -> None:
    """The threads that lead flushes return when the writer is closed, or fails."""
    writer = flushes.rig.writer
    leading = [flushes.pool.submit(writer.lead_flushes) for _ in range(writer.leaders)]
    ended = errors.BrokerClosing(broker=1)
    (writer.close if is_closed else writer.fail)(ended)
    for each in leading:
        each.result(10)


def test_leading_ends_after_the_last_flush(flushes: Flushes) -> None:
    """All threads that lead flushes return when the writer is closed with appends in its queue."""
    writer = flushes.rig.writer
    begun = flushes.begin("a", "b", "c", "d")
    last = flushes.rig.submit(["e"])
    leading = [flushes.pool.submit(writer.lead_flushes) for _ in range(writer.leaders)]
    closing = flushes.pool.submit(writer.close, errors.BrokerClosing(broker=1))
    time.sleep(0.005)
    flushes.landing.allow_all()
    for each in (closing, *leading):
        each.result(10)
    assert [each.result(10).base_offset for each in begun] == [0, 1, 2, 3]
    assert flushes.rig.broker.wait(last)[0].base_offset == 4


@pytest.mark.parametrize("order", list(itertools.permutations([1, 2, 3])), ids=str)
def test_flushes_are_acked_in_order(flushes: Flushes, order: Sequence[int]) -> None:
    """Flushes under way together are acked when all before them are durable."""
    found = flushes.begin("a", "b", "c")
    flushes.landing.wait_for(1, 2, 3)
    landed: set[int] = set()
    for sequence in order:
        flushes.landing.allow(sequence)
        landed.add(sequence)
        prefix = next(number for number in range(4) if number + 1 not in landed)
        for number in range(prefix):
            assert found[number].result(10).base_offset == number
        time.sleep(0.002)
        assert [each.done() for each in found] == [number < prefix for number in range(3)]
        assert flushes.rig.end() == prefix
    assert rows_of_root(flushes.rig.store, flushes.rig.clock) == [(0, b"a"), (1, b"b"), (2, b"c")]


def test_flushes_under_way_are_bounded(flushes: Flushes) -> None:
    """No more flushes are begun than the setting allows; others wait in the queue."""
    found = flushes.begin("a", "b", "c", "d")
    pending = flushes.rig.submit(["e"])
    last = flushes.pool.submit(flushes.rig.broker.wait, pending)
    time.sleep(0.005)
    flushes.landing.wait_for(1, 2, 3, 4)
    for sequence in range(1, 6):
        flushes.landing.allow(sequence)
    assert [each.result(10).base_offset for each in found] == [0, 1, 2, 3]
    assert last.result(10)[0].base_offset == 4


@pytest.mark.parametrize("lands", [True, False])
def test_a_fence_refuses_all_flushes_after_it(flushes: Flushes, *, lands: bool) -> None:
    """A flush whose object is beyond a fence is refused, although its own put succeeded."""
    found = flushes.begin("a", "b", "c")
    store = flushes.rig.store
    if lands:
        flushes.landing.allow(3)
        while f"{3:020d}" not in paths(store, OURS):
            time.sleep(0.001)
    flushes.landing.allow(1)
    assert found[0].result(10).base_offset == 0
    wal.of(store, flushes.rig.clock).follower(1, 1).fence()
    flushes.landing.allow(2)
    flushes.landing.allow(3)
    for each in found[1:]:
        with pytest.raises(errors.BrokerFenced):
            each.result(10)
    assert rows_of_root(store, flushes.rig.clock) == [(0, b"a")]
    successor = flushes.rig.successor()
    assert successor.read() == [(0, b"a")]
    assert successor.append(["d"]).base_offset == 1


def test_a_fence_is_kept_beneath_what_its_broker_put_beyond_it(flushes: Flushes) -> None:
    """The last objects of a closed epoch go, and its fence stays."""
    flushes.begin("a", "b", "c")
    flushes.landing.allow(3)
    store = flushes.rig.store
    while f"{3:020d}" not in paths(store, OURS):
        time.sleep(0.001)
    log = wal.of(store, flushes.rig.clock)
    log.follower(1, 1).fence()
    gone = log.retired(set)
    assert sorted(gone) == [f"{OURS}/{sequence:020d}" for sequence in (0, 3)]


def test_a_refused_flush_is_put_again_if_another_needs_it(flushes: Flushes) -> None:
    """The store refuses the first of two flushes: it is tried until it is durable."""
    found = flushes.begin("a", "b")
    flushes.landing.allow(2)
    flushes.landing.allow(1, UNAVAILABLE)
    with flushes.landing.changed:
        assert flushes.landing.changed.wait_for(lambda: flushes.landing.arrived.count(1) == 2, 10)
    assert not found[0].done()
    flushes.landing.allow(1)
    assert [each.result(10).base_offset for each in found] == [0, 1]
    assert rows_of_root(flushes.rig.store, flushes.rig.clock) == [(0, b"a"), (1, b"b")]


def test_the_last_flush_may_be_refused(flushes: Flushes) -> None:
    """A refused flush that no other needs leaves its sequence and offsets to the next one."""
    first, second = flushes.begin("a", "b")
    flushes.landing.allow(2, UNAVAILABLE)
    with pytest.raises(errors.StorageUnavailable):
        second.result(10)
    flushes.landing.allow(1)
    (third,) = flushes.begin("c")
    flushes.landing.allow(2)
    assert (first.result(10).base_offset, third.result(10).base_offset) == (0, 1)
    assert rows_of_root(flushes.rig.store, flushes.rig.clock) == [(0, b"a"), (1, b"c")]


def test_a_flush_that_gives_up_keeps_later_batches_back_at_once(
    flushes: Flushes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second batch of an unknown producer is refused as soon as the first is not needed."""
    writer = flushes.rig.writer
    gives_up, later = writer._gives_up, list[Future[AppendResult]]()

    def then_append(flush: Any) -> bool:
        given_up = gives_up(flush)
        later.extend(flushes.begin("b", puts=False, producer_sequence=(7, 0, 1)))
        assert isinstance(later[0].exception(10), errors.OutOfOrderSequence)
        return given_up

    monkeypatch.setattr(writer, "_gives_up", then_append)
    (first,) = flushes.begin("a", producer_sequence=(7, 0, 0))
    flushes.landing.allow(1, UNAVAILABLE)
    with pytest.raises(errors.StorageUnavailable):
        first.result(20)
    assert len(later) == 1


def test_a_duplicate_of_a_flush_under_way_waits_for_it(flushes: Flushes) -> None:
    """A retry of a batch under way is acked with its offset, once the batch is durable."""
    (first,) = flushes.begin("a", producer_sequence=(7, 0, 0))
    (again,) = flushes.begin("a", puts=False, producer_sequence=(7, 0, 0))
    (later,) = flushes.begin("b", producer_sequence=(7, 0, 1))
    flushes.landing.wait_for(1, 2)
    flushes.landing.allow(2)
    time.sleep(0.002)
    assert not again.done()
    flushes.landing.allow(1)
    assert [each.result(10).base_offset for each in (first, again, later)] == [0, 0, 1]
    assert again.result().duplicate
    assert rows_of_root(flushes.rig.store, flushes.rig.clock) == [(0, b"a"), (1, b"b")]


@pytest.mark.parametrize("later", [(7, 0, 0), (7, 0, 9)], ids=["duplicate", "refused"])
def test_a_flush_without_an_object_fails_with_the_one_before_it(
    flushes: Flushes, later: tuple[int, int, int]
) -> None:
    """A put that only duplicates and refused appends wait for may be refused, and they with it."""
    (first,) = flushes.begin("a", producer_sequence=(7, 0, 0))
    pending = flushes.rig.submit(["a"], producer_sequence=later)
    again = flushes.pool.submit(flushes.rig.broker.wait, pending)
    wait_until(lambda: flushes.rig.writer._under_way == 2, "the second flush is planned")
    flushes.landing.allow(1, UNAVAILABLE)
    for each in (first, again):
        with pytest.raises(errors.StorageUnavailable):
            each.result(10)
    (third,) = flushes.begin("b", producer_sequence=(7, 0, 0))
    flushes.landing.allow(1)
    assert third.result(10).base_offset == 0
    assert rows_of_root(flushes.rig.store, flushes.rig.clock) == [(0, b"b")]


def test_closing_waits_for_all_flushes(flushes: Flushes) -> None:
    """A writer that is closed has answered all that was under way."""
    found = flushes.begin("a", "b", "c")
    closing = flushes.pool.submit(flushes.rig.writer.close, errors.BrokerClosing(broker=1))
    time.sleep(0.002)
    assert not closing.done()
    for sequence in (3, 2, 1):
        flushes.landing.allow(sequence)
    closing.result(10)
    assert [each.result(10).base_offset for each in found] == [0, 1, 2]
