"""The budget of puts in a run: what brokers put stays within it, and each topic has its turn.

Budgets are drawn from a random stream of their own: most runs have none. In a run with one

- a broker's puts to its log, to its tables and to both stay within their rate in any time, but for
  a burst (`Bounds`). Exempt are requested topics, one with a shorter interval of its own, a broker
  that stops, and upkeep;
- in calm times, a partition whose records wait is published within `Bounds.turn_seconds`, and one
  of a topic with a shorter interval within `Bounds.prompt_seconds`, whatever the budget says;
- in calm times, an append is durable within `Bounds.ack_seconds`;
- no flush is full, and no topic reaches `publisher.publish_bytes`: both would be exempt.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sparklog import limits
from sparklog.broker.assembly import FLUSHES_AT_ONCE_REMOTE
from sparklog.broker.log import put_budget
from sparklog.formats.topic_config import PUBLISH_INTERVAL
from sparklog.storage import wal
from tests.simulation.history import Place, ensure

if TYPE_CHECKING:
    from sparklog.storage.metadata.model import TopicMetadata
    from tests.simulation.scheduler import Process
    from tests.simulation.world import World

NO_BUDGET: Final = 0.0
_BUDGETS: Final = [*[NO_BUDGET] * 5, 1.0, 3.0, 20.0, 200.0]
OWN_INTERVALS_MS: Final = ["", "", "0", "2000"]
"""Intervals that the last topic may have of its own, shorter and longer than any broker's."""
PUBLISH_BYTES: Final = 1_000_000
"""More unpublished bytes of a topic, and bytes of a file, than any run has."""
FLUSH_ENTRIES: Final = 4_096
"""More entries than any flush has."""
MOST_PARTITIONS: Final = 5
"""The most that an administrator gives a topic."""
ROUNDS: Final = 2
"""The number of turns that each topic must have in calm times."""
RECORDS_AFTER_PAUSE: Final = 12
"""In each partition, one after another."""

_PUBLISHERS: Final = frozenset({"sparklog-publisher", "sparklog-publish", "sparklog-files"})
"""Threads that put files and commits of records; others that put into tables are upkeep."""
_LINGER_SECONDS: Final = 0.25
_SAVED_SECONDS: Final = 1.0
"""The time for which tables may make up for puts that were not made."""
_FLUSHES_MORE: Final = 5
"""The most flushes, in any time, above the log's share: those after a pause wait less."""
_TURN_SECONDS: Final = 10.0
"""The time for publishing all topics: some hundred steps of each task, and retries."""
_FLUSH_SECONDS: Final = 1.0
"""The time for a flush: some steps of each task."""
_LOOK_SECONDS: Final = 0.1


def draw(chance: random.Random) -> float:
    """Returns the puts per second of a run on an object store; `NO_BUDGET` in many."""
    return chance.choice(_BUDGETS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds that follow from a budget: of puts in any time, and of waits (ADR 64)."""

    puts_per_second: float
    interval_seconds: float
    """The interval of publishing."""
    topics: int
    turn: int
    """The most puts of a topic's turn: a commit, and a file of each partition."""

    @property
    def prompt_seconds(self) -> float:
        """The longest wait of records whose topic takes no turns: the interval, stretched."""
        return self.interval_seconds * limits.PUBLISH_STRETCH + _TURN_SECONDS

    @property
    def turn_seconds(self) -> float:
        """The longest wait of records for the turn of their topic, once that is due.

        Each of the others may have waited longer. While they have their turns, and the topic its
        own, as many puts go by worth, and those of one turn more. The budget may have a debt of a
        turn. Tables have at least their share of it.
        """
        puts = 2 * self.topics * self.turn + 2 * self.turn
        tables_per_second = self.puts_per_second * put_budget.TABLES_SHARE
        return self.prompt_seconds + puts / tables_per_second

    @property
    def ack_seconds(self) -> float:
        """The longest wait of an append: for the flush that was just too early, and for its own.

        No flush is full, so the next one has all appends that wait.
        """
        log_per_second = self.puts_per_second * put_budget.LOG_SHARE
        return max(_LINGER_SECONDS, 1 / log_per_second) + 2 * _FLUSH_SECONDS

    @property
    def pause_seconds(self) -> float:
        """A pause after which tables would exceed their allowance, if unused puts were saved."""
        return 2 * self.allowance("tables").most / self._rate

    @property
    def _rate(self) -> float:
        return self.puts_per_second * (1 - put_budget.UPKEEP_SHARE)

    def allowance(self, kind: str) -> Allowance:
        """Returns what a broker may put to its "log", to its "tables" or to "both" together."""
        # Flushes under way are put late, and an epoch is opened with a put.
        log_puts = _FLUSHES_MORE + FLUSHES_AT_ONCE_REMOTE + 1
        if kind == "log":
            return Allowance(self.puts_per_second * put_budget.LOG_SHARE, log_puts)
        # Those saved, the debt of a turn, and one turn of each topic, put late.
        table_puts = self._rate * _SAVED_SECONDS + (1 + self.topics) * self.turn
        # Tables may put as much as the log leaves.
        return Allowance(self._rate, table_puts + (log_puts if kind == "both" else 0))


class Allowance:
    """Puts at a rate, and a burst of so many: in any `t` seconds at most rate · t + burst."""

    def __init__(self, per_second: float, most: float) -> None:
        self._per_second = per_second
        self.most = most
        self._level = 0.0
        self._at = 0.0

    def note(self, now: float) -> bool:
        """Counts a put, and returns whether it is within the allowance."""
        self._level = max(self._level - self._per_second * (now - self._at), 0.0) + 1
        self._at = now
        return self._level <= self.most


class PutWatch:
    """Watches the puts and the waits of all brokers of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._allowed: dict[tuple[str, str], Allowance] = {}
        """By name of the broker's process, and kind of put."""
        self._requested: dict[tuple[str, str], int] = {}
        """Puts that a broker may make for a requested topic, by names of process and topic."""
        self._calm_since = float("inf")
        self._looked_at = 0.0
        self.wrong: list[str] = []
        """Puts beyond the budget; the code that puts would hide an exception."""
        profile = world.profile
        most = max(MOST_PARTITIONS if profile.administrators else 0, *profile.partitions, 2)
        self.bounds = Bounds(
            puts_per_second=profile.puts_per_second,
            interval_seconds=profile.pace.settings.publisher.interval_seconds,
            topics=len(world.read_names),
            turn=1 + most,
        )
        if profile.puts_per_second:
            world.disk.watchers.append(self._note_put)

    def note_request(self, process: Process, topic: str) -> None:
        """Notes that a topic is requested: its next turn waits for no budget.

        A turn may be under way.
        """
        self._requested[process.name, topic] = 2 * self.bounds.turn

    def _note_put(self, path: str) -> None:
        task = self._world.scheduler.current
        if task is None or not self._world.is_broker(task.process):
            return
        broker = self._world.broker_of(task.process)
        if broker.is_leaving:
            return
        folder, _, name = path.rpartition("/")
        leadership = broker.leadership
        if path.startswith("topics/") and task.name in _PUBLISHERS:
            topic = path.split("/")[1]
            key = task.process.name, topic
            if self._requested.get(key):
                self._requested[key] -= 1
            elif self._world.profile.own_interval_ms != "0" or topic != self._world.own_topic:
                self._count(task.process, "tables", path)
        elif leadership is not None:
            is_flush = name.isdigit()
            if is_flush and folder == wal.folder(leadership.broker, leadership.epoch):
                self._count(task.process, "log", path)

    def _count(self, process: Process, kind: str, path: str) -> None:
        now = self._world.scheduler.now
        for each in (kind, "both"):
            key = process.name, each
            if key not in self._allowed:
                self._allowed[key] = self.bounds.allowance(each)
            if not self._allowed[key].note(now):
                what = f"{self.bounds.puts_per_second} puts per second"
                self.wrong.append(f"{process} exceeds {what} ({each}) with {path} at {now}")

    # -------------------------------------------------------------------------- waits

    def begin_calm(self, since: float) -> None:
        """From this moment on, no fault has an effect."""
        self._calm_since = since

    def check_ack(self, place: Place, submitted_at: float) -> None:
        """Checks how long an append has waited that has just become durable."""
        if self.bounds.puts_per_second and submitted_at >= self._calm_since:
            seconds = self._world.scheduler.now - submitted_at
            ensure(
                seconds <= self.bounds.ack_seconds, f"an ack of {place} took {seconds} s: too long"
            )

    def goals(self) -> list[tuple[float, dict[Place, int]]]:
        """Returns the ends that tables must reach so that each partition has had its turn.

        By the seconds in which they must, the fewest first.
        """
        acked, known = self._world.history.acked, self._world.metadata().topics
        found: dict[float, dict[Place, int]] = defaultdict(dict)
        for name, topic_id, table in self._world.topics():
            seconds = self._seconds(known[name])
            for partition, end in enumerate(table.ends):
                if acked.get((topic_id, partition), 0) > end:
                    found[seconds][topic_id, partition] = end + 1
        return sorted(found.items())

    def _seconds(self, topic: TopicMetadata) -> float:
        own_ms = topic.config.get(PUBLISH_INTERVAL, "")
        if own_ms == "0":
            return self.bounds.prompt_seconds
        return self.bounds.turn_seconds + int(own_ms or 0) / 1e3

    def are_reached(self, goals: dict[Place, int]) -> bool:
        """Removes the goals that are reached, or of deleted topics; returns whether none is left.

        Looks at the tables ten times a second.
        """
        now = self._world.scheduler.now
        if goals and now >= self._looked_at + _LOOK_SECONDS:
            self._looked_at = now
            ends = {topic_id: table.ends for _, topic_id, table in self._world.topics()}
            for topic_id, partition in list(goals):
                known = ends.get(topic_id)
                if known is None or known[partition] >= goals[topic_id, partition]:
                    del goals[topic_id, partition]
        return not goals
