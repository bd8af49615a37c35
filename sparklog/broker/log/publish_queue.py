"""The queue of topics that wait to be published, and which of them are due.

A topic waits at one of four places:

- *usual*: it is due after the broker's interval. These topics are in the order in which they began
  to wait, so finding those that are due touches no other.
- *prompt*: it has a shorter interval of its own.
- *asleep*: it has a longer one, and moves to the usual place shortly before its end. It is woken
  earlier if the log since it began to wait exceeds a bound, because the log is retained from there
  on, or if the topics that sleep have too much together: memory, and entries that a restart reads.
- *inherited*: a predecessor left its entries. They may have waited for any time, so it is due.

In addition, a topic is urgent if a caller has requested it, or has many unpublished bytes.

Pure, with the time as an argument, and without a lock: that of the `LedPartitions` guards it.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from sparklog import limits
from sparklog.broker.log.topic import Topic
from sparklog.storage.snapshot import WalPosition

ASLEEP_ENTRIES: Final = 65_536
"""The entries of all topics that sleep: 64 MiB of memory, and up to three seconds of a restart."""
_ASLEEP_SHARE: Final = 0.25
"""The share of `unpublished_bytes` that they may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishBounds:
    """Bounds at which topics no longer wait."""

    usual_seconds: float = limits.PUBLISH_INTERVAL_SECONDS
    """The interval of topics without one of their own."""
    publish_bytes: int = limits.PUBLISH_BYTES
    """Unpublished bytes of a topic at which it is published at once."""
    unpublished_bytes: int = limits.UNPUBLISHED_BYTES
    """Unpublished bytes of all topics at which writes are refused."""


class Waiting(NamedTuple):
    """A topic that is due."""

    topic: Topic
    seconds: float
    """The time for which it has waited."""


class Due(NamedTuple):
    """The topics that are due, each in one of the lists only."""

    urgent: list[Topic]
    prompt: list[Waiting]
    """Those with a shorter interval of their own."""
    turns: list[Waiting]
    """The others, those that have waited longest first."""


class _Place(enum.Enum):
    USUAL = enum.auto()
    PROMPT = enum.auto()
    ASLEEP = enum.auto()
    INHERITED = enum.auto()


@dataclass(slots=True, kw_only=True)
class _Wait:
    """The wait of one topic for its turn."""

    topic: Topic
    place: _Place
    since: float
    """When it began, in monotonic seconds."""
    log_bytes: int
    """`PublishQueue.log_bytes` when it began."""
    after: WalPosition | None
    """The newest flush of our log when it began; None before the first one."""


class PublishQueue:
    """Topics that wait for a turn of the publisher."""

    def __init__(self) -> None:
        self._bounds = PublishBounds()
        self._waits: dict[str, _Wait] = {}
        """By topic id, in the order in which the waits began; likewise the next two."""
        self._usual: dict[str, _Wait] = {}
        self._inherited: dict[str, _Wait] = {}
        self._prompt = _Alarms()
        """At the times at which topics are due; of those asleep, at which they wake."""
        self._asleep = _Alarms()
        self._held = _Alarms()
        """Topics asleep, at the `log_bytes` at which they are woken."""
        self._slept: set[str] = set()
        """Topics that have slept in their present wait."""
        self._full: dict[str, Topic] = {}
        """Topics that have reached `publish_bytes` during their wait."""
        self._requested: dict[str, None] = {}
        """Topics requested since their last turn began, in the order of the requests."""
        self._blocked: dict[str, Topic] = {}
        """Topics with a blocked partition, whose table may have been repaired."""
        self.log_bytes = 0
        """Bytes of our log, ever appended; see `WalObject.held_bytes`."""
        self._newest: WalPosition | None = None
        self.objects = 0
        """Objects to put for the topics that do not sleep: commits, and files of partitions."""
        self.asleep_entries = 0
        self.asleep_bytes = 0
        """Unpublished bytes of the topics that sleep."""

    def __contains__(self, topic: Topic) -> bool:
        return topic.topic_id in self._waits

    @property
    def has_long_waits(self) -> bool:
        """True while a topic sleeps, or has slept and waits for its turn."""
        return bool(self._slept)

    def topics(self) -> list[Topic]:
        """Returns all topics that wait, in the order in which their waits began."""
        return [each.topic for each in self._waits.values()]

    def set_bounds(self, bounds: PublishBounds, now: float) -> None:
        """Changes the bounds, also for topics that wait already."""
        self._bounds = bounds
        for topic in self.topics():
            self.reconsider(topic, now)
            self.note_bytes(topic, 0, 0)

    # -------------------------------------------------------------------------- waiting

    def begin(self, topic: Topic, now: float) -> None:
        """Begins the wait of a topic that does not wait yet."""
        wait = _Wait(
            topic=topic,
            place=_Place.USUAL,
            since=now,
            log_bytes=self.log_bytes,
            after=self._newest,
        )
        self._waits[topic.topic_id] = wait
        self._enter(wait, self._place_of(topic))

    def end(self, topic: Topic) -> None:
        """Ends the wait of a topic, if it waits."""
        wait = self._waits.pop(topic.topic_id, None)
        if wait is not None:
            self._leave(wait)
            self._full.pop(topic.topic_id, None)
            self._slept.discard(topic.topic_id)

    def begin_turn(self, topic: Topic, now: float, *, restarts_wait: bool) -> None:
        """Clears the request for a topic that is being published.

        `restarts_wait`: its wait for its next turn begins now.
        """
        self._requested.pop(topic.topic_id, None)
        if restarts_wait and topic in self:
            self.end(topic)
            self.begin(topic, now)

    def inherit(self, topic: Topic) -> None:
        """Makes a topic due that has entries of a predecessor; it waits already."""
        self._move(self._waits[topic.topic_id], _Place.INHERITED)

    def wake(self, topic: Topic, now: float) -> None:
        """Makes a topic that sleeps wait for the broker's interval, from now on."""
        wait = self._waits.get(topic.topic_id)
        if wait is not None and wait.place is _Place.ASLEEP:
            wait.since = now
            self._move(wait, _Place.USUAL)

    def wake_if_older(self, topic: Topic, oldest: Iterable[WalPosition], now: float) -> None:
        """Wakes a topic that sleeps if one of its entries is from before its wait.

        `oldest`: of each partition, the flush with its oldest unpublished entry.
        """
        if topic.is_asleep:
            after = self._waits[topic.topic_id].after
            if any(not _follows(each, after) for each in oldest):
                self.wake(topic, now)

    def reconsider(self, topic: Topic, now: float) -> None:
        """Moves a topic that waits after its configuration has changed, or it was held back."""
        wait = self._waits.get(topic.topic_id)
        if wait is None or wait.place is _Place.INHERITED:
            return
        place = self._place_of(topic)
        if place is _Place.USUAL and wait.place is not _Place.USUAL:
            wait.since = now  # the usual place is in the order of these
        self._move(wait, place)

    def _interval_seconds(self, topic: Topic) -> float:
        return topic.publish_interval_seconds(self._bounds.usual_seconds)

    def _place_of(self, topic: Topic) -> _Place:
        own, usual = self._interval_seconds(topic), self._bounds.usual_seconds
        if own == usual or topic.held_back is not None:  # retries have a schedule of their own
            return _Place.USUAL
        return _Place.PROMPT if own < usual else _Place.ASLEEP

    def _move(self, wait: _Wait, place: _Place) -> None:
        is_same = place is wait.place
        if is_same and place in (_Place.USUAL, _Place.INHERITED):
            return
        self._leave(wait)
        self._enter(wait, place)

    def _enter(self, wait: _Wait, place: _Place) -> None:
        topic = wait.topic
        wait.place = place
        match place:
            case _Place.USUAL:
                self._usual[topic.topic_id] = wait
            case _Place.INHERITED:
                self._inherited[topic.topic_id] = wait
            case _Place.PROMPT:
                self._prompt.set(topic.topic_id, wait.since + self._interval_seconds(topic))
            case _Place.ASLEEP:
                self._slept.add(topic.topic_id)
                slept_seconds = self._interval_seconds(topic) - self._bounds.usual_seconds
                self._asleep.set(topic.topic_id, wait.since + slept_seconds)
                self._held.set(topic.topic_id, wait.log_bytes + limits.PUBLISH_HELD_LOG_BYTES)
        topic.is_asleep = place is _Place.ASLEEP
        self._count(topic, 1)

    def _leave(self, wait: _Wait) -> None:
        topic = wait.topic
        self._count(topic, -1)
        topic.is_asleep = False
        for place in (self._usual, self._inherited):
            place.pop(topic.topic_id, None)
        for alarms in (self._prompt, self._asleep, self._held):
            alarms.clear(topic.topic_id)

    def _count(self, topic: Topic, sign: int) -> None:
        if topic.is_asleep:
            self.asleep_entries += sign * topic.waiting
            self.asleep_bytes += sign * (topic.unpublished_bytes + topic.staged_bytes)
        else:
            self.objects += sign * (1 + len(topic.waiting_partitions))

    # -------------------------------------------------------------------------- notes

    def note_flush(self, at: WalPosition, held_bytes: int) -> None:
        """Counts a flush of our log."""
        self._newest = at
        self.log_bytes += held_bytes

    def note_partition(self, topic: Topic, sign: int) -> None:
        """Counts a partition that gets its first unpublished entry (1), or has no more (-1)."""
        if not topic.is_asleep and topic in self:
            self.objects += sign

    def note_bytes(self, topic: Topic, entries: int, size: int) -> None:
        """Counts new or published entries of a topic, which includes them already."""
        if topic.is_asleep:
            self.asleep_entries += entries
            self.asleep_bytes += size
        if topic.unpublished_bytes + topic.staged_bytes >= self._bounds.publish_bytes:
            self._full[topic.topic_id] = topic

    def note_blocked(self, topic: Topic, is_blocked: bool) -> None:
        """Makes a topic always due while it has a blocked partition."""
        if is_blocked:
            self._blocked[topic.topic_id] = topic
        else:
            self._blocked.pop(topic.topic_id, None)

    def is_blocked(self, topic: Topic) -> bool:
        """Returns whether a partition of the topic is blocked."""
        return topic.topic_id in self._blocked

    def request(self, topic: Topic) -> None:
        """Makes the topic urgent until its next turn begins."""
        self._requested[topic.topic_id] = None

    def forget(self, topic: Topic) -> None:
        """Drops a deleted topic, which gets no further turn."""
        self.end(topic)
        for of_topic in (self._blocked, self._requested, self._full):
            of_topic.pop(topic.topic_id, None)

    # -------------------------------------------------------------------------- due topics

    def due(self, now: float, *, interval_seconds: float, has_turns: bool = True) -> Due:
        """Returns the topics that are due.

        `interval_seconds`: the broker's interval, which may be stretched. Without `has_turns`,
        topics whose turn has come are left out, and not looked at.
        """
        self._wake_all(now)
        urgent = dict(self._blocked)
        for topic_id in self._requested:
            if topic_id in self._waits:
                urgent[topic_id] = self._waits[topic_id].topic
        self._requested = {each: None for each in self._requested if each in urgent}
        least = self._bounds.publish_bytes
        self._full = {
            topic_id: topic
            for topic_id, topic in self._full.items()
            if topic_id in self._waits and topic.unpublished_bytes + topic.staged_bytes >= least
        }
        urgent |= self._full
        prompt = [
            Waiting(wait.topic, now - wait.since)
            for wait in map(self._waits.__getitem__, self._prompt.up_to(now))
            if wait.topic.topic_id not in urgent
        ]
        turns = self._turns(now - interval_seconds, now, urgent.keys()) if has_turns else []
        return Due(list(urgent.values()), prompt, turns)

    def _turns(self, since: float, now: float, urgent: Iterable[str]) -> list[Waiting]:
        turns = [
            Waiting(wait.topic, now - wait.since)
            for topic_id, wait in self._inherited.items()
            if topic_id not in urgent
        ]
        for topic_id, wait in self._usual.items():
            if wait.since > since:
                break
            if topic_id not in urgent:
                turns.append(Waiting(wait.topic, now - wait.since))
        return turns

    def _wake_all(self, now: float) -> None:
        """Wakes the topics that have slept long enough, and those with most if it is too much."""
        for topic_id in [*self._asleep.up_to(now), *self._held.up_to(self.log_bytes)]:
            self.wake(self._waits[topic_id].topic, now)
        most_bytes = self._bounds.unpublished_bytes * _ASLEEP_SHARE
        if self.asleep_entries <= ASLEEP_ENTRIES and self.asleep_bytes <= most_bytes:
            return
        asleep = [self._waits[each].topic for each in self._asleep.up_to(math.inf)]
        for topic in sorted(asleep, key=lambda each: -each.unpublished_bytes - each.staged_bytes):
            self.wake(topic, now)
            if self.asleep_entries <= ASLEEP_ENTRIES / 2 and self.asleep_bytes <= most_bytes / 2:
                return


def _follows(at: WalPosition, after: WalPosition | None) -> bool:
    """Returns whether a flush is in the same log as `after`, and later."""
    if after is None or (at.broker, at.epoch) != (after.broker, after.epoch):
        return False
    return at.sequence > after.sequence


class _Alarms:
    """Topics by the value at which each is looked at."""

    def __init__(self) -> None:
        self._sorted: list[tuple[float, str]] = []
        self._at: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._at)

    def set(self, topic_id: str, at: float) -> None:
        """Adds a topic that is not here."""
        self._at[topic_id] = at
        insort(self._sorted, (at, topic_id))

    def clear(self, topic_id: str) -> None:
        """Removes a topic, if it is here."""
        at = self._at.pop(topic_id, None)
        if at is not None:
            del self._sorted[bisect_left(self._sorted, (at, topic_id))]

    def up_to(self, at: float) -> list[str]:
        """Returns the topics whose value has been reached, lowest first."""
        end = bisect_right(self._sorted, at, key=lambda each: each[0])
        return [topic_id for _, topic_id in self._sorted[:end]]
