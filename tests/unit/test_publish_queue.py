"""The queue of topics that wait to be published: when each is due, and what ends its sleep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sparklog import limits
from sparklog.broker.log import publish_queue
from sparklog.broker.log.partition import Partition
from sparklog.broker.log.publish_queue import PublishBounds, PublishQueue
from sparklog.broker.log.topic import Topic
from sparklog.formats.topic_config import PUBLISH_INTERVAL
from sparklog.storage.snapshot import WalPosition
from tests.support.tables import no_table

USUAL_SECONDS: Final = 10.0
HELD_BYTES: Final = 1_000
PUBLISH_BYTES: Final = 500
UNPUBLISHED_BYTES: Final = 2_400
SECONDS: Final = st.floats(0.0, 30.0)
TABLE: Final = no_table()


def topic_of(name: str, interval_ms: int | None = None) -> Topic:
    """A topic with that interval, without entries."""
    config = {} if interval_ms is None else {PUBLISH_INTERVAL: str(interval_ms)}
    return Topic(name, name, config, TABLE)


class Queue(RuleBasedStateMachine):
    """Any sequence of events: entries, turns, flushes, configurations, failures."""

    @initialize(limit=st.integers(1, 40))
    def start(self, limit: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(limits, "PUBLISH_HELD_LOG_BYTES", HELD_BYTES)
        self.patch.setattr(publish_queue, "ASLEEP_ENTRIES", limit)
        self.limit = limit
        self.queue = PublishQueue()
        self.now, self.log_bytes, self.sequence = 1_000.0, 0, 0
        self.queue.set_bounds(
            PublishBounds(
                usual_seconds=USUAL_SECONDS,
                publish_bytes=PUBLISH_BYTES,
                unpublished_bytes=UNPUBLISHED_BYTES,
            ),
            self.now,
        )
        intervals = (None, None, 0, 2_000, 10_000, 60_000, 3_600_000)
        self.topics = [topic_of(str(at), each) for at, each in enumerate(intervals)]
        self.begun: dict[str, tuple[float, int]] = {}
        """When each wait began: the time, and the bytes of the log."""
        self.changed: dict[str, float] = {}
        """When a topic was last moved to the usual place."""

    def teardown(self) -> None:
        self.patch.undo()

    def note(self, topic: Topic) -> None:
        self.begun[topic.topic_id] = self.now, self.log_bytes

    @rule(at=st.integers(0, 6), number=st.integers(0, 3), size=st.integers(1, 200))
    def append(self, at: int, number: int, size: int) -> None:
        topic = self.topics[at]
        if number not in topic.waiting_partitions:
            partition = Partition(number, leader_epoch=0, start=0, published=0)
            topic.waiting_partitions[number] = partition
            self.queue.note_partition(topic, 1)
        topic.waiting += 1
        topic.unpublished_bytes += size
        self.queue.note_bytes(topic, 1, size)
        if topic not in self.queue:
            self.queue.begin(topic, self.now)
            self.note(topic)

    @rule(size=st.integers(1, 400))
    def flush(self, size: int) -> None:
        self.sequence += 1
        self.log_bytes += size
        self.queue.note_flush(WalPosition(1, 1, self.sequence), size)

    @rule(at=st.integers(0, 6), everything=st.booleans())
    def publish(self, at: int, everything: bool) -> None:
        topic = self.topics[at]
        if topic not in self.queue:
            return
        self.queue.begin_turn(topic, self.now, restarts_wait=True)
        self.note(topic)
        self.changed.pop(topic.topic_id, None)
        if everything and topic.waiting:
            for _ in range(len(topic.waiting_partitions)):
                topic.waiting_partitions.popitem()
                self.queue.note_partition(topic, -1)
            count, size = topic.waiting, topic.unpublished_bytes
            topic.waiting = topic.unpublished_bytes = 0
            self.queue.note_bytes(topic, -count, -size)
            topic.held_back = None
            self.queue.end(topic)
            del self.begun[topic.topic_id]

    @rule(at=st.integers(0, 6), interval_ms=st.sampled_from([-1, 0, 2_000, 60_000, 86_400_000]))
    def alter(self, at: int, interval_ms: int) -> None:
        topic = self.topics[at]
        topic.config = {PUBLISH_INTERVAL: str(interval_ms)}
        self.queue.reconsider(topic, self.now)
        self.changed[topic.topic_id] = self.now

    @rule(at=st.integers(0, 6))
    def fail(self, at: int) -> None:
        topic = self.topics[at]
        if topic in self.queue:
            topic.held_back = "403"
            self.queue.reconsider(topic, self.now)
            self.changed[topic.topic_id] = self.now

    @rule(at=st.integers(0, 6))
    def inherit(self, at: int) -> None:
        if self.topics[at] in self.queue:
            self.queue.inherit(self.topics[at])

    @rule(seconds=SECONDS)
    def wait(self, seconds: float) -> None:
        self.now += seconds
        due = self.queue.due(self.now, interval_seconds=USUAL_SECONDS)
        found = [*due.urgent, *(each.topic for each in (*due.prompt, *due.turns))]
        assert len({each.topic_id for each in found}) == len(found)
        assert all(each in self.queue for each in found)
        self.check_slept(found)
        assert self.queue.asleep_entries <= self.limit
        assert self.queue.asleep_bytes <= UNPUBLISHED_BYTES / 4

    def check_slept(self, found: Sequence[Topic]) -> None:
        """No topic waits for longer than it may, nor holds more of the log asleep."""
        for topic_id, (since, log_bytes) in self.begun.items():
            topic = self.topics[int(topic_id)]
            own = topic.publish_interval_seconds(USUAL_SECONDS)
            # A configuration that changes, or a failure, begins the usual interval again.
            moved = self.changed.get(topic_id, -math.inf)
            latest = max(since + own, moved + max(USUAL_SECONDS, 0.0))
            if self.now >= latest + self.late_seconds(topic):
                assert topic in found, (topic_id, own, self.now - since)
            if topic.unpublished_bytes >= PUBLISH_BYTES:
                assert topic in found
            if topic.is_asleep:
                assert self.log_bytes - log_bytes < HELD_BYTES
                assert topic.held_back is None

    def late_seconds(self, topic: Topic) -> float:
        """A topic wakes at the first look after the time, and looks are up to 30 seconds apart."""
        own = topic.publish_interval_seconds(USUAL_SECONDS)
        return 30.0 + USUAL_SECONDS if own > USUAL_SECONDS else 0.0

    @invariant()
    def counts_are_right(self) -> None:
        if not hasattr(self, "queue"):
            return
        waiting = [each for each in self.topics if each in self.queue]
        asleep = [each for each in waiting if each.is_asleep]
        awake = [each for each in waiting if not each.is_asleep]
        assert self.queue.topics() == sorted(waiting, key=self.queue.topics().index)
        assert self.queue.has_long_waits >= bool(asleep)
        assert self.queue.asleep_entries == sum(each.waiting for each in asleep)
        assert self.queue.asleep_bytes == sum(each.unpublished_bytes for each in asleep)
        assert self.queue.objects == sum(1 + len(each.waiting_partitions) for each in awake)


Queue.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestQueue = Queue.TestCase


def queue_of(*topics: Topic, usual_seconds: float = USUAL_SECONDS) -> PublishQueue:
    """A queue in which these topics begin to wait at the time 0."""
    queue = PublishQueue()
    queue.set_bounds(PublishBounds(usual_seconds=usual_seconds), 0.0)
    for topic in topics:
        topic.waiting = 1
        queue.begin(topic, 0.0)
    return queue


def turns(queue: PublishQueue, now: float, interval_seconds: float = USUAL_SECONDS) -> list[str]:
    """The topics whose turn has come."""
    due = queue.due(now, interval_seconds=interval_seconds)
    return [each.topic.name for each in due.turns]


def test_a_topic_waits_exactly_for_its_interval() -> None:
    """Promise: a longer one ends when it says, if the queue is looked at; so does a shorter one."""
    hour, usual, second = topic_of("h", 3_600_000), topic_of("u"), topic_of("s", 1_000)
    queue = queue_of(hour, usual, second)
    times: dict[str, float] = {}
    for tenth in range(36_100):
        due = queue.due(tenth / 10, interval_seconds=USUAL_SECONDS)
        for each in (*due.prompt, *due.turns):
            times.setdefault(each.topic.name, tenth / 10)
    assert times == {"s": 1.0, "u": 10.0, "h": 3_600.0}


def test_a_stretched_interval_adds_to_a_longer_one() -> None:
    """A broker that is busy stretches the last part of the wait, as for the other topics."""
    queue = queue_of(topic_of("h", 3_600_000))
    assert turns(queue, 3_590.0, 40.0) == []
    assert turns(queue, 3_629.9, 40.0) == []
    assert turns(queue, 3_630.0, 40.0) == ["h"]


def test_topics_are_woken_until_half_of_the_bound_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next records then do not wake one topic at a time."""
    monkeypatch.setattr(publish_queue, "ASLEEP_ENTRIES", 100)
    topics = [topic_of(str(number), 3_600_000) for number in range(4)]
    queue = queue_of(*topics)
    for topic in topics:
        topic.waiting += 29
        queue.note_bytes(topic, 29, 0)
    queue.due(1.0, interval_seconds=USUAL_SECONDS)
    assert [each.is_asleep for each in topics].count(True) == 1


def test_topics_of_a_predecessor_come_first_and_in_turns() -> None:
    """They are due whatever their interval, and not urgent: they do not exceed a budget."""
    hour, usual = topic_of("h", 3_600_000), topic_of("u")
    queue = queue_of(usual, hour)
    queue.inherit(hour)
    due = queue.due(0.0, interval_seconds=USUAL_SECONDS)
    assert (due.urgent, due.prompt) == ([], [])
    assert turns(queue, 10.0) == ["h", "u"]
    queue.begin_turn(hour, 10.0, restarts_wait=True)
    assert turns(queue, 20.0) == ["u"]


def test_a_topic_is_urgent_as_long_as_it_has_many_bytes() -> None:
    """From `publish_bytes` on, until commits have left less."""
    hour = topic_of("h", 3_600_000)
    queue = queue_of(hour)
    urgent = []
    for change in (limits.PUBLISH_BYTES - 1, 1, -1):
        hour.unpublished_bytes += change
        queue.note_bytes(hour, 0, change)
        urgent.append(queue.due(1.0, interval_seconds=USUAL_SECONDS).urgent == [hour])
    assert urgent == [False, True, False]


def test_the_topics_with_most_are_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: the others sleep on, so one topic with many records ends no other's interval."""
    monkeypatch.setattr(publish_queue, "ASLEEP_ENTRIES", 100)
    small, large = topic_of("small", 3_600_000), topic_of("large", 3_600_000)
    queue = queue_of(small, large)
    for _ in range(99):
        large.waiting += 1
        large.unpublished_bytes += 700
        queue.note_bytes(large, 1, 700)
    queue.due(1.0, interval_seconds=USUAL_SECONDS)
    assert (small.is_asleep, large.is_asleep) == (True, False)
    assert turns(queue, 10.9) == []
    assert turns(queue, 11.0) == ["large"]


@pytest.mark.parametrize(
    ("oldest", "sleeps"),
    [
        ([WalPosition(1, 2, 6)], True),
        ([WalPosition(1, 2, 6), WalPosition(1, 2, 5)], False),
        ([WalPosition(1, 1, 9)], False),
        ([WalPosition(3, 2, 9)], False),
        ([], True),
    ],
    ids=["all since", "one before", "another epoch", "another broker", "none"],
)
def test_entries_from_before_the_wait_end_its_sleep(
    oldest: Sequence[WalPosition], sleeps: bool
) -> None:
    """A commit has left them, and they have waited for an interval already."""
    queue, topic = queue_of(), topic_of("h", 3_600_000)
    queue.note_flush(WalPosition(1, 2, 5), 1)
    queue.begin(topic, 0.0)
    queue.wake_if_older(topic, oldest, 1.0)
    assert topic.is_asleep is sleeps
    assert turns(queue, 11.0) == ([] if sleeps else ["h"])


def test_a_topic_that_is_awake_is_not_woken() -> None:
    """Its wait continues, and a topic that does not wait does not begin to."""
    usual, second, idle = topic_of("u"), topic_of("s", 1_000), topic_of("i", 3_600_000)
    queue = queue_of(usual, second)
    for topic in (usual, second, idle):
        queue.wake(topic, 9.0)
    due = queue.due(10.0, interval_seconds=USUAL_SECONDS)
    assert [tuple(each) for each in (*due.prompt, *due.turns)] == [(second, 10.0), (usual, 10.0)]
    assert queue.topics() == [usual, second]


def test_a_configuration_without_effect_on_the_interval_changes_no_wait() -> None:
    """A topic keeps its place, also if it is held back again."""
    first, second = topic_of("u"), topic_of("v")
    queue = queue_of(first)
    queue.begin(second, 5.0)
    first.config = {"retention.ms": "5"}
    queue.reconsider(first, 6.0)
    first.held_back = "403"
    queue.reconsider(first, 7.0)
    assert turns(queue, 10.0) == ["u"]
    assert turns(queue, 15.0) == ["u", "v"]


def test_topics_that_sleep_are_not_looked_at() -> None:
    """Promise: looking at the queue costs the same with any number of topics that sleep."""
    looked_at = 0

    class Looked(Topic):
        def publish_interval_seconds(self, usual_seconds: float) -> float:
            nonlocal looked_at
            looked_at += 1
            return super().publish_interval_seconds(usual_seconds)

    topics = [Looked(str(at), str(at), {PUBLISH_INTERVAL: "3600000"}, TABLE) for at in range(500)]
    queue = queue_of(*topics)
    looked_at = 0
    for second in range(100):
        queue.due(float(second), interval_seconds=USUAL_SECONDS)
    assert looked_at == 0
    assert queue.objects == 0
