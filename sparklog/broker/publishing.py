"""Waits until the tables contain all acked records."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

from sparklog import errors
from sparklog.broker.log.parts import LogParts
from sparklog.broker.log.topic import Topic
from sparklog.clock import Clock
from sparklog.formats.flight_messages import PublishNow

Goal: TypeAlias = tuple[Topic, Mapping[int, int]]
"""A topic, and the offset below which each of its partitions must be published."""

_POLL_SECONDS = 0.005


class PublishWaiter:
    """Requests that topics be published next, and waits for it."""

    def __init__(
        self,
        log: LogParts,
        *,
        clock: Clock,
        check_open: Callable[[], None],
        members: Callable[[], Collection[int]],
    ) -> None:
        """`check_open` raises `BrokerClosing` once the broker closes; `members`: those up."""
        self._members = members
        self._led_partitions = log.led_partitions
        self._publisher = log.publisher
        self._clock = clock
        self._check_open = check_open
        self.publish_now: Callable[[], None] = lambda: None
        """Has the publishing thread begin immediately; set by the owner of that thread."""

    def publish(self, request: PublishNow) -> None:
        """Waits until the tables contain all records of our partitions acked before the call.

        Raises `UnknownTopic`, `MetadataChanged` if a partition is just moving or its leader is
        being replaced, and what `wait` raises.
        """
        topics = self._led_partitions.topics()
        if request.topics is not None:
            topics = [self._led_partitions.topic(name) for name in request.topics]
        up = set(self._members())
        for topic in topics:
            self._check_leaders(topic, up)
        goals = [
            (topic, {each.number: each.end for each in topic.partitions.values()})
            for topic in topics
        ]
        self.wait(goals, request.timeout_seconds)

    def _check_leaders(self, topic: Topic, up: set[int]) -> None:
        """Raises `MetadataChanged` if no broker would publish a partition now."""
        own, leaders = self._led_partitions.broker, topic.leaders
        led = {number for number, leader in enumerate(leaders) if leader == own}
        if not (up.issuperset(leaders) and led <= topic.partitions.keys()):
            raise errors.MetadataChanged

    def wait(self, goals: Sequence[Goal], timeout_seconds: float) -> None:
        """Waits until every goal is reached.

        Raises `TimedOut`, `BrokerClosing`, and `MetadataChanged` if a partition has a new leader.
        """
        deadline = self._clock.monotonic() + timeout_seconds
        while behind := self.behind(goals):
            if self._clock.monotonic() > deadline:
                raise publish_timed_out(behind, timeout_seconds)
            self._clock.sleep(_POLL_SECONDS)

    def behind(self, goals: Sequence[Goal]) -> list[Topic]:
        """Returns the topics whose goal is not reached, and requests that they be published next.

        Raises `BrokerClosing`.
        """
        self._check_open()
        behind = [topic for topic, ends in goals if not self._is_reached(topic, ends)]
        for topic in behind:
            self._led_partitions.backlog.request(topic)
        if behind:
            self.publish_now()
        return behind

    def _is_reached(self, topic: Topic, ends: Mapping[int, int]) -> bool:
        if self._led_partitions.by_id(topic.topic_id) is not topic:
            return True  # it was deleted
        partitions = topic.partitions
        if not ends.keys() <= partitions.keys():
            raise errors.MetadataChanged  # the new leader publishes the rest
        return all(partitions[number].published >= end for number, end in ends.items())


def publish_timed_out(behind: Sequence[Topic], timeout_seconds: float) -> errors.TimedOut:
    """Returns the error for topics not published in time, with the reasons they are held back."""
    reasons = [f"; {each.name}: {each.held_back}" for each in behind if each.held_back]
    return errors.TimedOut(what="publishing" + "".join(reasons), timeout_seconds=timeout_seconds)
