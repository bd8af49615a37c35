"""Failures of one topic hold it back by name; the other topics are published."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from sparklog import errors, limits
from sparklog.broker.backoff import RetrySchedule
from sparklog.broker.log.publish_loop import PublishPace, publish_pause_seconds
from sparklog.clock import ManualClock
from sparklog.storage.maintenance import retention
from sparklog.storage.objects import MemoryStore, NoFaults, PutUnresolved, SyncFailed
from sparklog.storage.objects.faults import Operation
from sparklog.storage.table.changes import TableChange
from sparklog.storage.table.names import end_app_id
from sparklog.storage.table.topic_table import TopicTable
from tests.support.brokers import Rig, due, publishing, rows_of_table

pytestmark = pytest.mark.rig(topics={"t": 2, "u": 1})


class FailingPuts(NoFaults):
    """While it has an error, no object of topic t can be put."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.attempts = 0

    def before(self, operation: Operation, path: str) -> None:
        if operation == "put_new" and path.startswith("topics/t/") and self.error is not None:
            self.attempts += 1
            raise self.error


class FailingGets(NoFaults):
    """While it has an error, the table of topic t cannot be read."""

    def __init__(self) -> None:
        self.error: Exception | None = errors.RootNotWritable(root="s3://b", reason="403")
        self.attempts = 0

    def before(self, operation: Operation, path: str) -> None:
        if path.startswith("topics/t/") and self.error is not None:
            self.attempts += 1
            raise self.error


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
    rig.publish_to(store.view(faults))
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
    reason = rig.led_partitions.topic("t").held_back
    assert reason is not None
    assert type(error).__name__ in repr(error)
    assert str(error) in reason or "put of" in reason
    # Of both files together, and then of one by itself if there was no answer.
    tries = 2 + 8 if isinstance(error, PutUnresolved) else 2
    assert 5 * tries <= faults.attempts <= 7 * tries
    assert rig.append(["c"]).base_offset == 1
    faults.error = None
    clock.advance(10.0)
    loop.tick()
    assert rig.led_partitions.topic("t").held_back is None
    assert rows_of_table(store, clock) == [(0, b"a"), (1, b"c")]
    assert rows_of_table(store, clock, partition=1) == [(0, b"b")]


def test_a_topic_that_is_held_back_at_the_start_is_looked_at_again(
    rig: Rig, store: MemoryStore, clock: ManualClock
) -> None:
    """Also if it gets no record: its table could not be read for a moment, and is not tried often.

    A topic of which others lead all partitions does not concern this broker.
    """
    faults = FailingGets()
    topics = [rig.led_partitions.topic(name) for name in ("t", "u")]
    topics[0].table.store = topics[0].table.log_reader.store = store.view(faults)
    loop = publishing(rig)
    for topic in topics:
        rig.led_partitions.backlog.hold_back(topic, "403")
    rig.led_partitions.resignations.begin(topics[1], 0)
    assert rig.led_partitions.resignations.complete(topics[1], 0)
    assert topics[1].held_back is None
    assert rig.led_partitions.backlog.waiting() == [topics[0]]
    for _ in range(100):
        loop.tick()
        clock.advance(0.1)
    assert 1 < faults.attempts < 10
    assert topics[0].refusal == str(faults.error)
    faults.error = None
    clock.advance(60.0)
    loop.tick()
    assert [each.refusal for each in topics] == [None, None]
    assert not rig.led_partitions.backlog.waiting()


def test_a_topic_is_not_published_again_with_an_old_log_start(
    rig: Rig, store: MemoryStore, clock: ManualClock
) -> None:
    """Its table could not be read at the takeover, and no record is waiting.

    Until the janitor looked at the table, a reader saw offsets that a predecessor had deleted.
    """
    rig.append(["a", "b"])
    rig.publish()
    topic = rig.led_partitions.topic("t")
    retention.delete_records(TopicTable(store, "t", clock=clock), topic.topic_id, {0: 1})
    rig.led_partitions.backlog.hold_back(topic, "503")
    clock.advance(10.0)
    publishing(rig).tick()
    assert (topic.held_back, topic.partitions[0].start) == (None, 1)


def test_a_failed_flush_is_not_one_topics_affair(rig: Rig, store: MemoryStore) -> None:
    """A disk that fails to flush ends the broker."""
    rig.publish_to(store.view(FailingPuts(SyncFailed("?", "EIO"))))
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
    topic = rig.led_partitions.topic("t")
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
    topic = rig.led_partitions.topic("t")
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
    topic = rig.led_partitions.topic("t")
    moved = TopicTable(store, "t", clock=clock)
    moved.commit(lambda _: TableChange(txns={end_app_id(topic.topic_id, 0): 9}))
    clock.advance(2.0)

    def check() -> None:
        rig.append(["b"])

    publishing(rig, check=check).tick()
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


# ------------------------------------------------------------------------------ many topics


def test_topics_are_published_together(rig: Rig, store: MemoryStore, clock: ManualClock) -> None:
    """One topic's failure is its own, and the files of all exist before the first commit."""
    names = [f"v{number}" for number in range(4)]
    for name in names:
        rig.create(name, 2)
        rig.append([name], topic=name)
        rig.append([name], topic=name, partition=1)
    order: list[str] = []

    class Recorded(NoFaults):
        def before(self, operation: Operation, path: str) -> None:
            if operation == "put_new":
                order.append("commit" if "_delta_log" in path else "file")
                if path.startswith("topics/v1/"):
                    raise errors.StorageUnavailable(operation="put", path=path, reason="down")

    rig.publish_to(store.view(Recorded()))
    topics = [rig.led_partitions.topic(name) for name in names]
    outcomes = rig.publisher.publish_together(topics)
    assert [type(each) for each in outcomes] == [
        type(None),
        errors.StorageUnavailable,
        type(None),
        type(None),
    ]
    assert order == ["file"] * 8 + ["commit"] * 3
    for name in names:
        expected = [] if name == "v1" else [(0, name.encode())]
        assert rows_of_table(store, clock, name) == expected


class Workers(ThreadPoolExecutor):
    """A pool that names what it runs."""

    def __init__(self) -> None:
        super().__init__(1)
        self.names: list[str] = []

    def submit(self, work: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.names.append(args[0].name)
        return super().submit(work, *args, **kwargs)


def test_a_topic_with_much_is_published_beside_the_others(
    rig: Rig, store: MemoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow topic of many bytes delays no other, and is published only once at a time."""
    monkeypatch.setattr(limits, "PUBLISH_LIGHT_BYTES", 2_000)
    gate = threading.Event()

    class Gate(NoFaults):
        def before(self, operation: Operation, path: str) -> None:
            if operation == "put_new" and path.startswith("topics/t/"):
                assert gate.wait(30)

    rig.publish_to(store.view(Gate()))
    with Workers() as workers:
        loop = publishing(rig, workers=workers)
        rig.append(["x" * 4_000])
        for number in range(3):
            rig.append([str(number)], topic="u")
            clock.advance(1.01)
            loop.tick()
            assert len(rows_of_table(store, clock, "u")) == number + 1
        assert rows_of_table(store, clock) == []
        gate.set()
        loop.wait()
        assert workers.names == ["t"]
    assert len(rows_of_table(store, clock)) == 1


def test_a_request_is_kept_until_the_topic_is_begun_after_it(
    rig: Rig, store: MemoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic that is requested while it is published is published again, without an interval."""
    monkeypatch.setattr(limits, "PUBLISH_LIGHT_BYTES", 0)
    begun, gate = threading.Event(), threading.Event()

    class Gate(NoFaults):
        def before(self, operation: Operation, path: str) -> None:
            if operation == "put_new" and path.startswith("topics/t/"):
                begun.set()
                assert gate.wait(30)

    rig.publish_to(store.view(Gate()))
    topic = rig.led_partitions.topic("t")
    with Workers() as workers:
        loop = publishing(rig, workers=workers)
        rig.append(["a"])
        clock.advance(1.01)
        loop.tick()
        assert begun.wait(30)
        rig.append(["b"])
        rig.led_partitions.backlog.request(topic)
        loop.tick()
        gate.set()
        loop.wait()
        assert rows_of_table(store, clock) == [(0, b"a")]
        loop.tick()
        loop.wait()
        assert rows_of_table(store, clock) == [(0, b"a"), (1, b"b")]
        rig.append(["c"])
        loop.tick()
        assert workers.names == ["t", "t"]


def test_a_request_for_a_topic_without_new_records_ends(
    rig: Rig, store: MemoryStore, clock: ManualClock
) -> None:
    """Records that come later wait for the interval, as others do."""
    loop = publishing(rig)
    rig.led_partitions.backlog.request(rig.led_partitions.topic("t"))
    loop.tick()
    rig.append(["a"])
    loop.tick()
    assert rows_of_table(store, clock) == []


def test_a_disk_that_fails_beside_the_others_ends_the_broker(
    rig: Rig, store: MemoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next tick raises the failure of a topic that is published alongside the others."""
    monkeypatch.setattr(limits, "PUBLISH_LIGHT_BYTES", 0)
    rig.publish_to(store.view(FailingPuts(SyncFailed("topics/t", "EIO"))))
    with Workers() as workers:
        loop = publishing(rig, workers=workers)
        rig.append(["a"])
        clock.advance(1.01)
        loop.tick()
        with pytest.raises(SyncFailed):
            loop.wait()
        with pytest.raises(SyncFailed):
            loop.tick()


def test_everything_is_published_before_a_stop(rig: Rig, store: MemoryStore) -> None:
    """A stop publishes without waiting for an interval; a topic that fails affects no other."""
    faults = FailingPuts(errors.StorageUnavailable(operation="put", path="?", reason="down"))
    rig.publish_to(store.view(faults))
    rig.append(["a"])
    rig.append(["b"], topic="u")
    publishing(rig).publish_everything(rig.clock.monotonic() + 30.0)
    assert rows_of_table(store, rig.clock) == []
    assert rows_of_table(store, rig.clock, "u") == [(0, b"b")]


def test_the_interval_stretches_with_the_work() -> None:
    """A few files keep the interval; many stretch it until publishing has its share, to a bound."""
    pace = PublishPace(1.0, ManualClock())
    for _ in range(50):
        pace.note(1_000, 1_000 * 0.002)
    assert pace.interval_seconds(1, 0.25) == 1.0
    assert pace.interval_seconds(100, 0.25) == 1.0
    assert pace.interval_seconds(250, 0.25) == pytest.approx(250 * 0.002 / 0.25)
    assert pace.interval_seconds(10_000, 0.25) == limits.PUBLISH_STRETCH
    assert pace.interval_seconds(1_000, 1.0) == pytest.approx(1_000 * 0.002)
    for _ in range(50):
        pace.note(1_000, 1_000 * 0.0001)
    assert pace.interval_seconds(1_000, 0.25) == 1.0


def test_the_work_of_a_topic_is_that_of_its_partitions(rig: Rig, clock: ManualClock) -> None:
    """One topic of many partitions stretches the interval as many topics do."""
    table = rig.led_partitions
    assert table.backlog.waiting_objects == 0
    rig.create("wide", 20)
    for number in range(20):
        rig.append(["a"], topic="wide", partition=number)
    rig.append(["a"])
    assert table.backlog.waiting_objects == 1 + 20 + 1 + 1
    loop = publishing(rig)
    for _ in range(50):
        loop._pace.note(1_000, 1_000 * 0.1 * limits.PUBLISH_SHARE)
    clock.advance(2.2)
    loop.tick()
    assert table.backlog.waiting_objects == 23
    clock.advance(0.2)
    loop.tick()
    assert table.backlog.waiting_objects == 0
    rig.append(["b"], topic="wide")
    assert table.backlog.waiting_objects == 2
    table.remove_topic(table.topic("wide"))
    assert table.backlog.waiting_objects == 0


# ------------------------------------------------------------------------------ many partitions


class Commits(NoFaults):
    """Records which topics are committed, in their order, and which partitions get files."""

    def __init__(self) -> None:
        self.topics: list[str] = []
        self.partitions: list[int] = []

    def before(self, operation: Operation, path: str) -> None:
        if operation == "put_new" and "_delta_log" in path:
            self.topics.append(path.split("/")[1])
        elif operation == "put_new" and path.startswith("topics/wide/"):
            self.partitions.append(int(path.split("/")[2].removeprefix("partition=")))


@pytest.fixture(name="commits")
def _commits(rig: Rig, store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> Commits:
    """The commits of a rig with a topic of 5 partitions, of which 2 have a turn together."""
    monkeypatch.setattr(limits, "PUBLISH_PARTITIONS_TOGETHER", 2)
    rig.create("wide", 5)
    commits = Commits()
    rig.publish_to(store.view(commits))
    return commits


def fill_wide(rig: Rig) -> None:
    """Each partition of the wide topic gets a record."""
    for number in range(5):
        rig.append(["a"], topic="wide", partition=number)


def test_a_topic_of_many_partitions_takes_turns(
    rig: Rig, commits: Commits, clock: ManualClock
) -> None:
    """It holds up no other topic, and the partitions that wait longest come first."""
    loop = publishing(rig)
    fill_wide(rig)
    clock.advance(1.01)
    loop.tick()
    rig.append(["b"], topic="wide", partition=1)
    rig.append(["u"], topic="u")
    rig.led_partitions.backlog.request(rig.led_partitions.topic("u"))
    loop.tick()
    loop.tick()
    assert commits.topics[0] == commits.topics[-1] == "wide"
    assert sorted(commits.topics) == ["u", "wide", "wide", "wide"]
    assert commits.partitions == [0, 1, 2, 3, 1, 4]


def test_a_round_of_turns_ends(rig: Rig, commits: Commits, clock: ManualClock) -> None:
    """Records that come during a round wait for the next interval, which began with the round."""
    loop = publishing(rig)
    fill_wide(rig)
    clock.advance(1.01)
    for _ in range(3):
        loop.tick()
        clock.advance(0.1)
        fill_wide(rig)
    done = len(commits.partitions)
    assert done == 6
    loop.tick()
    assert len(commits.partitions) == done
    clock.advance(0.71)
    loop.tick()
    assert len(commits.partitions) == done + 2


def test_partitions_take_turns_under_constant_load(
    rig: Rig, store: MemoryStore, commits: Commits, clock: ManualClock
) -> None:
    """A partition that gets records while it is published waits behind the others."""

    class Busy(NoFaults):
        def before(self, operation: Operation, path: str) -> None:
            commits.before(operation, path)
            if operation == "put_new" and path.startswith("topics/wide/partition="):
                rig.append(["b"], topic="wide", partition=commits.partitions[-1])

    rig.publish_to(store.view(Busy()))
    loop = publishing(rig)
    fill_wide(rig)
    clock.advance(1.01)
    for _ in range(10):
        loop.tick()
        clock.advance(0.5)
    for first in range(0, 16, 2):  # three turns suffice for all
        assert set(commits.partitions[first : first + 6]) == set(range(5))


def test_a_spark_batch_is_not_divided_into_turns(
    rig: Rig, store: MemoryStore, commits: Commits, clock: ManualClock
) -> None:
    """One commit has all of it, however many partitions it is in."""
    rig.append_staged([(number, ["a"]) for number in range(5)], batch=0, topic="wide")
    clock.advance(1.01)
    publishing(rig).tick()
    assert commits.topics == ["wide"]
    for number in range(5):
        assert rows_of_table(store, clock, "wide", number) == [(0, b"a")]


def test_a_topic_of_many_partitions_is_light_by_its_turns(
    rig: Rig, commits: Commits, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn costs what one of another topic may cost, so it is published with the others."""
    fill_wide(rig)
    size = rig.led_partitions.topic("wide").unpublished_bytes
    loop = publishing(rig, workers=None)
    beside: list[str] = []
    monkeypatch.setattr(loop, "_publish_beside", lambda topic: beside.append(topic.name))
    monkeypatch.setattr(limits, "PUBLISH_LIGHT_BYTES", size // 3 - 1)
    clock.advance(1.01)
    loop.tick()
    assert (beside, commits.topics) == (["wide"], [])
    monkeypatch.setattr(limits, "PUBLISH_LIGHT_BYTES", size // 3 + 1)
    loop.tick()
    assert (beside, commits.topics) == (["wide"], ["wide"])


def test_topics_of_some_partitions_are_published_together_up_to_a_number(
    rig: Rig, commits: Commits, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of files that are made durable together is bounded, as for one wide topic."""
    monkeypatch.setattr(limits, "PUBLISH_PARTITIONS_TOGETHER", 6)
    fill_wide(rig)
    rig.append(["u"], topic="u")
    rig.append(["t"])
    clock.advance(1.01)
    together: list[list[str]] = []
    publish = rig.publisher.publish_together

    def noted(topics: Any) -> Any:
        together.append([each.name for each in topics])
        return publish(topics)

    monkeypatch.setattr(rig.publisher, "publish_together", noted)
    publishing(rig).tick()
    assert together == [["wide", "u"], ["t"]]
    assert len(commits.topics) == 3


def test_only_topics_that_may_be_due_are_looked_at(rig: Rig, clock: ManualClock) -> None:
    """A topic's wait begins with its oldest record, and again when it is published."""
    table, backlog = rig.led_partitions, rig.led_partitions.backlog
    rig.append(["a"])
    clock.advance(0.6)
    rig.append(["b"], topic="u")
    clock.advance(0.5)
    assert [each.name for each in due(backlog, 1.0)] == ["t"]
    backlog.begin_turn(table.topic("t"), restarts_wait=True)
    clock.advance(0.6)
    rig.append(["c"])
    assert [each.name for each in due(backlog, 1.0)] == ["u"]
    clock.advance(0.5)
    names = [each.name for each in due(backlog, 1.0)]
    assert names == ["u", "t"]


@pytest.mark.parametrize(
    ("waiting", "interval_seconds", "seconds"),
    [(1, 1.0, 0.02), (0, 1.0, 0.1), (0, 0.5, 0.05), (0, 0.05, 0.02), (0, 600.0, 0.1)],
)
def test_an_idle_publisher_looks_less_often(
    waiting: int, interval_seconds: float, seconds: float
) -> None:
    """While no record waits, it looks ten times per interval, every 0.02 to 0.1 s."""
    assert publish_pause_seconds(waiting, interval_seconds) == pytest.approx(seconds)
