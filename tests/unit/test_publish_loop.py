"""Failures of one topic hold it back by name; the other topics are published."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pyarrow as pa
import pytest

from sparklog import errors
from sparklog.broker.backoff import RetrySchedule
from sparklog.broker.log.publish_loop import PublishLoop
from sparklog.broker.log.takeover import check_leadership
from sparklog.clock import ManualClock
from sparklog.settings import PublisherSettings
from sparklog.storage.objects import MemoryStore, NoFaults, PutUnresolved, SyncFailed
from sparklog.storage.objects.memory import Operation
from sparklog.storage.table import TableChange, TopicTable, end_app_id
from tests.support.brokers import Rig, rows_of_table

pytestmark = pytest.mark.rig(topics={"t": 2, "u": 1})

INTERVAL = PublisherSettings(interval_seconds=1.0)


class FailingPuts(NoFaults):
    """While it has an error, no object of topic t can be put."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.attempts = 0

    def before(self, operation: Operation, path: str) -> None:
        if operation == "put_new" and path.startswith("topics/t/") and self.error is not None:
            self.attempts += 1
            raise self.error


def publishing(rig: Rig, wake: Callable[[], None] = lambda: None) -> PublishLoop:
    """A publish loop as the agent builds it."""
    return PublishLoop(
        rig.publisher,
        rig.partition_table,
        settings=INTERVAL,
        check_leadership=lambda: check_leadership(rig.meta.reload(), rig.leadership),
        on_published=wake,
        clock=rig.clock,
        retry_seconds=1.0,
    )


@pytest.mark.parametrize(
    "error",
    [
        pa.ArrowInvalid("a record batch"),
        MemoryError("malloc of size 3 GiB failed"),
        errors.RootNotWritable(root="s3://b", reason="403"),
        errors.StorageUnavailable(operation="put", path="?", reason="down"),
        PutUnresolved("?", "no answer"),
        AssertionError("offsets do not rise"),
        OSError(5, "EIO"),
        KeyError("a surprise"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_holds_back_one_topic(
    rig: Rig, store: MemoryStore, clock: ManualClock, error: Exception
) -> None:
    """The topic is named, tried again at growing intervals, and published once it can be."""
    faults = FailingPuts(error)
    rig.publisher._store = store.view(faults)
    woken: list[bool] = []
    loop = publishing(rig, lambda: woken.append(True))
    rig.append(["a"])
    rig.append(["b"], partition=1)
    for number in range(30):
        rig.append([str(number)], topic="u")
        clock.advance(1.01)
        loop.tick()
        assert len(rows_of_table(store, clock, "u")) == number + 1
    assert len(woken) == 30
    reason = rig.partition_table.topic("t").held_back
    assert reason is not None
    assert type(error).__name__ in repr(error)
    assert str(error) in reason or "put of" in reason
    tries = 8 if isinstance(error, PutUnresolved) else 1  # of one claim
    assert 5 * tries <= faults.attempts <= 7 * tries
    assert rig.append(["c"]).base_offset == 1
    faults.error = None
    clock.advance(10.0)
    loop.tick()
    assert rig.partition_table.topic("t").held_back is None
    assert rows_of_table(store, clock) == [(0, b"a"), (1, b"c")]
    assert rows_of_table(store, clock, partition=1) == [(0, b"b")]


def test_a_failed_flush_is_not_one_topics_affair(rig: Rig, store: MemoryStore) -> None:
    """A disk that fails to flush ends the broker."""
    rig.publisher._store = store.view(FailingPuts(SyncFailed("?", "EIO")))
    rig.append(["a"])
    assert isinstance(rig.clock, ManualClock)
    rig.clock.advance(2.0)
    with pytest.raises(SyncFailed):
        publishing(rig).tick()


def test_a_table_ahead_of_us_ends_a_replaced_broker(rig: Rig, clock: ManualClock) -> None:
    """If a newer broker has written unknown records, the metadata names it, and we stop."""
    rig.append(["a"])
    successor = rig.successor()
    successor.append(["b"])
    successor.publish()
    clock.advance(2.0)
    with pytest.raises(errors.BrokerFenced):
        publishing(rig).tick()


def test_a_txn_that_was_moved_blocks_its_partition(
    rig: Rig, store: MemoryStore, clock: ManualClock
) -> None:
    """Records that would lie below the table's end are refused, until its txn is moved back."""
    rig.append(["a"])
    rig.append(["b"], partition=1)
    rig.append(["x"], topic="u")
    topic = rig.partition_table.topic("t")
    before = TopicTable(store, "t", clock=clock)
    before.commit(lambda _: TableChange(txns={end_app_id(topic.topic_id, 0): 9}))
    clock.advance(2.0)
    loop = publishing(rig)
    loop.tick()
    assert topic.held_back is not None
    assert "moved its txn" in topic.held_back
    with pytest.raises(errors.TopicHeldBack, match="moved its txn"):
        rig.append(["c"])
    assert rig.append(["d"], partition=1).base_offset == 1
    assert rig.read() == [(0, b"a")]
    clock.advance(2.0)
    loop.tick()
    assert rows_of_table(store, clock, "u") == [(0, b"x")]
    assert rows_of_table(store, clock, partition=1) == [(0, b"b"), (1, b"d")]
    store.delete([f"topics/t/_delta_log/{1:020d}.json", f"topics/t/_delta_log/{2:020d}.json"])


def test_a_txn_that_was_set_back_holds_its_topic_back(
    rig: Rig, store: MemoryStore, clock: ManualClock
) -> None:
    """Records that no commit can add are not written repeatedly; the reason is reported."""
    rig.append(["a", "b"])
    rig.publish()
    rig.append(["c"])
    topic = rig.partition_table.topic("t")
    lines = bytes(store.get(f"topics/t/_delta_log/{1:020d}.json")).splitlines()
    (add,) = (line for line in lines if line.startswith(b'{"add"'))
    path = msgspec.json.decode(add)["add"]["path"].encode()
    txn = b'\n{"txn":{"appId":"%s","version":%%d}}\n' % end_app_id(topic.topic_id, 0).encode()
    remove = b'{"remove":{"path":"%s","deletionTimestamp":1,"dataChange":true}}' % path
    store.put_new(f"topics/t/_delta_log/{2:020d}.json", remove + txn % 0)
    loop = publishing(rig)
    for _ in range(3):
        clock.advance(20.0)
        loop.tick()
    assert topic.held_back is not None
    assert "ends at 0 in the table, and was published up to 2" in topic.held_back
    store.put_new(f"topics/t/_delta_log/{3:020d}.json", add + txn % 2)
    clock.advance(20.0)
    loop.tick()
    assert topic.held_back is None
    assert rows_of_table(store, clock) == [(0, b"a"), (1, b"b"), (2, b"c")]


def test_a_record_acked_while_its_partition_is_being_blocked_stays(
    rig: Rig, store: MemoryStore, clock: ManualClock
) -> None:
    """A record that comes between the read of the table and the block is in the log, and read."""
    rig.append(["a"])
    topic = rig.partition_table.topic("t")
    moved = TopicTable(store, "t", clock=clock)
    moved.commit(lambda _: TableChange(txns={end_app_id(topic.topic_id, 0): 9}))
    clock.advance(2.0)

    def check() -> None:
        rig.append(["b"])

    PublishLoop(
        rig.publisher,
        rig.partition_table,
        settings=INTERVAL,
        check_leadership=check,
        on_published=lambda: None,
        clock=clock,
        retry_seconds=1.0,
    ).tick()
    assert topic.partition(0).blocked is not None
    assert topic.partition(0).end == 2
    assert rig.read() == [(0, b"a"), (1, b"b")]


def test_attempts_become_rarer_up_to_a_bound(clock: ManualClock) -> None:
    """The wait doubles with every failure in a row, and begins small again after a success."""
    backoff = RetrySchedule(clock, first_seconds=1.0, most_seconds=8.0)
    waits = []
    for _ in range(8):
        backoff.failed("t")
        began = clock.monotonic()
        assert not backoff.is_waiting("u")
        while backoff.is_waiting("t"):
            clock.advance(0.01)
        waits.append(clock.monotonic() - began)
    for wait, expected in zip(waits, (1, 2, 4, 8, 8, 8, 8, 8), strict=True):
        assert 0.75 * expected <= wait <= expected + 0.02
    backoff.succeeded("t")
    backoff.failed("t")
    clock.advance(1.0)
    assert not backoff.is_waiting("t")
    backoff.failed("t")
    backoff.retain({"u"})
    assert not backoff.is_waiting("t")
