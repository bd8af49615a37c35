"""Publish loop: publishes each topic when it is due, independently of failures in other topics.

Any error in a topic's table, files or records holds back that topic: its name and the reason are
logged, and it is retried at increasing intervals. Only the end of the broker's epoch, or a disk
that has failed to flush, ends the broker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future

import structlog

from sparklog import errors, limits
from sparklog.broker.backoff import ENDS_THE_BROKER, RetrySchedule
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.publish_order import Candidate, PublishOrder
from sparklog.broker.log.publish_queue import PublishBounds, Waiting
from sparklog.broker.log.publisher import Publisher
from sparklog.broker.log.put_budget import PutBudget
from sparklog.broker.log.topic import Topic
from sparklog.clock import Clock
from sparklog.storage.objects import PutUnresolved

_PUBLISH_TOPICS_TOGETHER = 64  # the maximum published together
_PUBLISH_SHARE_PROCESS = 0.5  # of the time, for a separate process, which shares only the disk
_TICK_SECONDS = 0.02
_IDLE_SECONDS = 0.1
"""Between checks while no record is waiting, or a tenth of the publish interval if that is less."""

_log = structlog.get_logger("sparklog.broker")


def publish_pause_seconds(waiting: int, interval_seconds: float) -> float:
    """Returns the time until the next check for topics to publish; `waiting`: objects to put."""
    idle_seconds = min(interval_seconds / 10, _IDLE_SECONDS)
    return _TICK_SECONDS if waiting else max(idle_seconds, _TICK_SECONDS)


class PublishPace:
    """The interval at which topics are published.

    The configured one while publishing takes a small share of the time. With many busy topics or
    partitions it is stretched, up to a bound: files are then fewer and larger, and producers get
    more CPU time. Where puts are billed, a topic that is due waits until the budget has puts.
    """

    def __init__(
        self, interval_seconds: float, clock: Clock, budget: PutBudget | None = None
    ) -> None:
        self.usual_seconds = interval_seconds
        """The interval before it is stretched."""
        self._clock = clock
        self._budget = budget
        self._seconds_per_object = 0.0

    def note(self, objects: int, seconds: float) -> None:
        """Records how long it took to put this many files and commits together."""
        share = min(objects / limits.PUBLISH_PARTITIONS_TOGETHER, 1.0)
        self._seconds_per_object += (seconds / objects - self._seconds_per_object) * share / 2

    def interval_seconds(self, waiting: int, share: float) -> float:
        """Returns the interval while this many files and commits are waiting.

        `share`: the share of the time that publishing may take before the interval is stretched.
        """
        return max(self.least_seconds(waiting, share), self.usual_seconds)

    def least_seconds(self, objects: int, share: float) -> float:
        """Returns the least time between two publications of so many files and commits."""
        wanted = objects * self._seconds_per_object / share
        return min(wanted, self.usual_seconds * limits.PUBLISH_STRETCH)

    def expected_seconds(self, waiting: int, share: float) -> float:
        """Returns the interval that the budget, too, allows: that of a topic that is never due."""
        interval_seconds = self.interval_seconds(waiting, share)
        if self._budget is None:
            return interval_seconds
        budgeted_seconds = self._budget.publish_seconds(waiting, self._clock.monotonic())
        return max(interval_seconds, budgeted_seconds)

    def objects_now(self) -> float:
        """Returns how many files and commits may be put now; infinity without a budget."""
        if self._budget is None:
            return math.inf
        return self._budget.puts_for_tables(self._clock.monotonic())

    def note_objects(self, objects: int) -> None:
        """Counts files and commits that are about to be put."""
        if self._budget is not None:
            self._budget.note_published(objects)


class PublishLoop:
    """Publishes the topics that are due. One caller at a time.

    Topics with few records are published together. A topic with many, or one that has failed, is
    published alongside them, so that it delays no other.
    """

    def __init__(
        self,
        publisher: Publisher,
        led_partitions: LedPartitions,
        *,
        pace: PublishPace,
        publish_bytes: int = limits.PUBLISH_BYTES,
        unpublished_bytes: int = limits.UNPUBLISHED_BYTES,
        check_leadership: Callable[[], None],
        on_published: Callable[[], None],
        clock: Clock,
        retry_seconds: float,
        workers: Executor | None = None,
        share: float = limits.PUBLISH_SHARE,
    ) -> None:
        """`publish_bytes`: of a topic are published before the interval of `pace` is over.

        `unpublished_bytes`: of all topics, at which writes are refused. `check_leadership` raises
        `BrokerFenced` if a newer broker has taken over. `on_published` is called after every
        commit. `workers` publish the topics with many records; without them the caller does.
        `share` is that of `PublishPace` without a publishing process.
        """
        self._publisher = publisher
        self._led_partitions = led_partitions
        self._on_published = on_published
        self._check_leadership = check_leadership
        self._clock = clock
        self._workers = workers
        self._backoff = RetrySchedule(clock, first_seconds=retry_seconds)
        self._pace = pace
        self._order = PublishOrder()
        self._share = share
        self.interval_seconds = 0.0
        """The present time between two publications of a busy topic; 0 before the first tick."""
        self._beside: dict[str, Future[None]] = {}
        """Topics that are being published alongside the others, by topic id."""
        self._failure: BaseException | None = None
        led_partitions.backlog.set_bounds(
            PublishBounds(
                usual_seconds=pace.usual_seconds,
                publish_bytes=publish_bytes,
                unpublished_bytes=unpublished_bytes,
            )
        )

    def tick(self) -> None:
        """Makes one commit for every topic that is due. Raises `BrokerFenced` and `SyncFailed`."""
        self._publisher.warm_up()
        waiting = self._led_partitions.backlog.waiting_objects
        share = _PUBLISH_SHARE_PROCESS if self._publisher.has_process else self._share
        self.interval_seconds = self._pace.expected_seconds(waiting, share)
        self._publish_all(self._due(self._pace.interval_seconds(waiting, share), share))

    def longest_seconds(self, topic: Topic) -> float:
        """Returns the time within which records are in the topic's table, while all is well.

        Turns by worth may double the present interval; see `publish_order`.
        """
        usual_seconds, own_seconds = self._pace.usual_seconds, self.own_interval_seconds(topic)
        if own_seconds is not None and own_seconds < usual_seconds:
            return own_seconds
        slept_seconds = 0.0 if own_seconds is None else own_seconds - usual_seconds
        return slept_seconds + 2 * self.interval_seconds

    def own_interval_seconds(self, topic: Topic) -> float | None:
        """Returns a topic's own interval; None if it has that of the broker."""
        found = topic.publish_interval_seconds(self._pace.usual_seconds)
        return found if found != self._pace.usual_seconds else None

    def _due(self, interval_seconds: float, share: float) -> Sequence[Topic]:
        """Returns the topics to publish now, with a budget only those that it has puts for.

        Topics that were requested, or have many records, are published at once, and those with a
        shorter interval of their own at that interval. They take no puts from the others, which a
        client that requests one topic again and again could otherwise stop.
        """
        left = self._pace.objects_now()
        due = self._led_partitions.backlog.due(
            interval_seconds=interval_seconds,
            has_turns=left > 0,  # nearly never while many topics wait: they are not looked at
        )
        prompt = [each for each in due.prompt if not self._is_occupied(each.topic)]
        objects = sum(_objects(each.topic) for each in prompt)
        least_seconds = self._pace.least_seconds(objects, share)
        found = due.urgent
        found += [each.topic for each in prompt if each.seconds >= least_seconds]
        if left == math.inf:
            return [*found, *(each.topic for each in due.turns)]
        turns = [each for each in due.turns if not self._is_occupied(each.topic)]
        return [*found, *self._chosen(turns, left)]

    def _chosen(self, turns: Sequence[Waiting], left: float) -> Iterator[Topic]:
        """Chooses topics until the budget is used up, and counts their puts."""
        candidates = [
            Candidate(
                puts=_objects_of_round(topic),
                bytes=topic.unpublished_bytes + topic.staged_bytes,
                seconds=seconds,
            )
            for topic, seconds in turns
        ]
        for index in self._order.choose(candidates, left):
            self._pace.note_objects(candidates[index].puts)
            yield turns[index].topic

    def _is_occupied(self, topic: Topic) -> bool:
        """Returns whether a topic is being published, or has failed and waits for its next try."""
        return topic.topic_id in self._beside or self._backoff.is_waiting(topic.topic_id)

    def publish_everything(self, deadline: float) -> None:
        """Publishes all topics until only failing ones, if any, are left, or until the deadline.

        `deadline` is in monotonic seconds. Raises `BrokerFenced` and `SyncFailed`.
        """
        failed: set[str] = set()
        while self._clock.monotonic() < deadline:
            self.wait()
            left = [
                topic
                for topic in self._led_partitions.backlog.waiting()
                if topic.waiting and topic.topic_id not in failed
            ]
            if not left:
                return
            for topic in left:
                self._backoff.succeeded(topic.topic_id)
            self._publish_all(left)
            self.wait()
            failed |= {topic.topic_id for topic in left if topic.held_back is not None}

    def wait(self) -> None:
        """Waits for the topics published alongside the others. Raises their error, if fatal."""
        for each in list(self._beside.values()):
            each.result()
        self._forget_ended()
        if self._failure is not None:
            raise self._failure

    def _publish_all(self, topics: Sequence[Topic]) -> None:
        if self._failure is not None:
            raise self._failure
        self._forget_ended()
        light: list[Topic] = []
        for topic in topics:
            if self._is_occupied(topic):
                continue
            size = topic.unpublished_bytes + topic.staged_bytes
            turns = -(-len(topic.waiting_partitions) // limits.PUBLISH_PARTITIONS_TOGETHER)
            if size > limits.PUBLISH_LIGHT_BYTES * turns or topic.held_back is not None:
                self._publish_beside(topic)
            else:
                light.append(topic)
        for some in _together(light):
            self._publish_together(some)

    def _publish_together(self, topics: Sequence[Topic]) -> None:
        objects = sum(map(_objects, topics))
        began = self._clock.monotonic()
        outcomes = self._publisher.publish_together(topics)
        self._pace.note(objects, self._clock.monotonic() - began)
        for topic, error in zip(topics, outcomes, strict=True):
            if isinstance(error, PutUnresolved):
                self._pace.note_objects(_partitions(topic))  # its files are put again
                self._publish_beside(topic)
            else:
                self._conclude(topic, error)
        self._on_published()

    def _publish_beside(self, topic: Topic) -> None:
        if self._workers is None:
            self.publish(topic)
            return

        try:
            self._beside[topic.topic_id] = self._workers.submit(self._run_beside, topic)
        except RuntimeError:  # the interpreter is shutting down, and starts no more threads
            self.publish(topic)

    def _run_beside(self, topic: Topic) -> None:
        try:
            self.publish(topic)
        except ENDS_THE_BROKER as error:
            self._failure = error

    def _forget_ended(self) -> None:
        for topic_id in [key for key, each in self._beside.items() if each.done()]:
            del self._beside[topic_id]

    def publish(self, topic: Topic) -> bool:
        """Makes one commit. Returns False if it failed and should be retried later."""
        error: Exception | None = None
        try:
            self._publisher.publish(topic)
        except ENDS_THE_BROKER:
            raise
        except Exception as found:
            error = found
        is_published = self._conclude(topic, error)
        if is_published:
            self._on_published()
        return is_published

    def _conclude(self, topic: Topic, error: Exception | None) -> bool:
        """Records the outcome of a topic's turn, and returns whether it succeeded."""
        try:
            if error is not None:
                self._explain(topic, error)
        except ENDS_THE_BROKER:
            raise
        except Exception as explained:
            reason = str(explained) or repr(explained)
            if topic.held_back != reason:
                _log.error("cannot publish", topic=topic.name, reason=reason)
            self._led_partitions.backlog.hold_back(topic, reason)
            self._backoff.failed(topic.topic_id)
            self._backoff.retain({each.topic_id for each in self._led_partitions.backlog.waiting()})
            return False
        if not self._publisher.is_writing(topic):  # otherwise nothing has been committed
            self._backoff.succeeded(topic.topic_id)
        if topic.held_back is not None:
            _log.info("the topic is published again", topic=topic.name)
            self._led_partitions.backlog.hold_back(topic, None)
        return True

    def _explain(self, topic: Topic, error: Exception) -> None:
        """Raises the error, or the one that it implies for the topic or this broker."""
        if not isinstance(error, errors.PublisherFenced):
            raise error
        # A newer broker is in the metadata before it writes a table. If there is none, another
        # engine has moved the table's `txn`, and new records would be lost below it.
        self._check_leadership()
        reason = (
            f"partition {error.partition} ends at {error.found} in the table, and at"
            f" {error.end} in the log: another engine has moved its txn"
        )
        moved = errors.ForeignTable(topic=topic.name, reason=reason)
        partition = topic.partitions.get(error.partition)
        if partition is None:
            return  # another broker leads it now, and writes the table
        self._led_partitions.backlog.block(topic, partition, moved, end=error.end)
        raise moved from error


def _together(topics: Sequence[Topic]) -> Iterator[list[Topic]]:
    """Divides topics into groups to publish together, with a bounded number of partitions each."""
    some: list[Topic] = []
    count = 0
    for topic in topics:
        count += _partitions(topic)
        if some and (
            len(some) == _PUBLISH_TOPICS_TOGETHER or count > limits.PUBLISH_PARTITIONS_TOGETHER
        ):
            yield some
            some, count = [], _partitions(topic)
        some.append(topic)
    if some:
        yield some


def _objects(topic: Topic) -> int:
    """Returns the number of files and commits that the topic's next commit puts."""
    return 1 + _partitions(topic)


def _objects_of_round(topic: Topic) -> int:
    """Returns the number of files and commits until all waiting partitions have had their turn."""
    files = len(topic.waiting_partitions)
    return files + max(-(-files // limits.PUBLISH_PARTITIONS_TOGETHER), 1)


def _partitions(topic: Topic) -> int:
    """Returns the number of partitions that the topic's next commit adds files to."""
    return min(len(topic.waiting_partitions), limits.PUBLISH_PARTITIONS_TOGETHER)
