"""The backlog: durable entries not yet in the tables, or whose files are not yet confirmed.

An entry is *unpublished* until its rows are committed to the table, then *unconfirmed* until the
data file has been seen again; until then the WAL retains its object. Entries of a *blocked*
partition that do not connect to the table are *stranded*.

A topic waits for a turn of the publisher while it has unpublished entries or a blocked partition,
or is held back. `publish_queue` decides when it is due.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from sparklog import errors
from sparklog.broker.log.checkpoint_changes import CheckpointChanges
from sparklog.broker.log.needed_objects import NeededObjects
from sparklog.broker.log.partition import Partition, base_of, end_of, payload_bytes
from sparklog.broker.log.partition_state import LED, PartitionEvent
from sparklog.broker.log.publish_queue import Due, PublishBounds, PublishQueue
from sparklog.broker.log.topic import Topic
from sparklog.clock import Clock
from sparklog.storage.reading.plan import join_head, join_tail
from sparklog.storage.snapshot import BatchId, Entry, Located
from sparklog.storage.wal import WalObject

_OVERHEAD_BYTES = 640
"""Memory of a waiting entry in addition to its records, measured on 300,000 entries."""


class Head(NamedTuple):
    """The head of a partition's backlog."""

    partition: Partition
    published: int
    entries: Sequence[Located]


class Backlog:
    """Waiting entries of all partitions that this broker leads or has just handed over."""

    def __init__(
        self,
        lock: threading.RLock,
        changes: CheckpointChanges,
        find: Callable[[str], Topic | None],
        *,
        clock: Clock,
    ) -> None:
        """`lock`: the lock of the `LedPartitions`; `find`: returns a topic by its id."""
        self._lock = lock
        self._changes = changes
        self._find = find
        self._clock = clock
        self.objects = NeededObjects(lock, find)
        """The objects of the log that the entries need."""
        self._queue = PublishQueue()
        self._unconfirmed: dict[str, Topic] = {}
        """Topics with published but unconfirmed entries, by id."""
        self._commits: dict[str, int] = {}
        """The number of our commits since the last `take_commits`, by topic id."""
        self.unconfirmed_count = 0
        """The number of published but unconfirmed entries."""
        self.unpublished_bytes = 0
        """Memory of unpublished entries and their records, excluding staged records.

        Staged records are in separate files and use none of the memory that producers share.
        """
        self.staged_bytes = 0
        """Bytes of unpublished staged records."""
        self.written_bytes = 0
        """Bytes of all records ever appended; its rate shows how busy the broker is."""

    # -------------------------------------------------------------------------- turns

    def waiting(self) -> list[Topic]:
        """Returns topics that are held back, or have unpublished entries or blocked partitions."""
        with self._lock:
            return self._queue.topics()

    @property
    def waiting_objects(self) -> int:
        """The number of objects to put: a commit per topic, a file per partition.

        Without those of topics that sleep; see `PublishQueue`.
        """
        return self._queue.objects

    @property
    def has_long_waits(self) -> bool:
        """True while a topic waits for an interval of its own that is longer than the broker's."""
        return self._queue.has_long_waits

    @property
    def log_bytes(self) -> int:
        """Bytes of our log, ever appended; see `WalObject.held_bytes`."""
        return self._queue.log_bytes

    def set_bounds(self, bounds: PublishBounds) -> None:
        """Changes the bounds on the waiting of topics."""
        with self._lock:
            self._queue.set_bounds(bounds, self._clock.monotonic())

    def request(self, topic: Topic) -> None:
        """Makes the topic due until its next turn begins, because a caller is waiting for it."""
        with self._lock:
            self._queue.request(topic)

    def request_all(self) -> bool:
        """Requests all topics with entries that can be published; returns whether there are any.

        For a broker that is about to stop: a large batch takes longer than a stop may, and the next
        broker would have to start it over.
        """
        requested = [each for each in self.waiting() if each.waiting and not each.held_back]
        for topic in requested:
            self.request(topic)
        return bool(requested)

    def due(self, *, interval_seconds: float, has_turns: bool = True) -> Due:
        """Returns the topics to publish; see `PublishQueue.due`."""
        with self._lock:
            now = self._clock.monotonic()
            return self._queue.due(now, interval_seconds=interval_seconds, has_turns=has_turns)

    def begin_turn(self, topic: Topic, *, restarts_wait: bool) -> None:
        """Clears the request for the topic, whose current entries are being published.

        `restarts_wait`: the topic's wait for its next turn begins now.
        """
        with self._lock:
            now = self._clock.monotonic()
            self._queue.begin_turn(topic, now, restarts_wait=restarts_wait)

    def reconsider(self, topic: Topic) -> None:
        """Applies a changed configuration to the topic's wait, if it waits. Requires the lock."""
        self._queue.reconsider(topic, self._clock.monotonic())

    def note_flush(self, written: WalObject) -> None:
        """Counts a flush of our log. Requires the lock."""
        self._queue.note_flush(written.at, written.held_bytes)

    def hold_back(self, topic: Topic, reason: str | None) -> None:
        """Records why the topic's table cannot be written, or None once it can be.

        Until then the topic gets turns even if it has nothing to publish.
        """
        with self._lock:
            topic.held_back = reason
            if self._find(topic.topic_id) is topic:
                self.update_waiting(topic)
                if reason is not None:
                    self.reconsider(topic)

    def take_commits(self) -> dict[str, int]:
        """Returns the number of our commits to each topic's table since the last call, by id."""
        with self._lock:
            found, self._commits = self._commits, {}
            return found

    # -------------------------------------------------------------------------- entries

    def restore_tail(self, topic: Topic, partition: Partition, tail: Iterable[Located]) -> None:
        """Adds the entries that recovery found beyond the table of `partition`."""
        with self._lock:
            for each in tail:
                partition.end = partition.inherited_end = each.entry.end
                self.add(topic, partition, each)
                entry = each.entry
                if entry.batch_id is not None:
                    topic.spark_batches.record(entry.batch_id, entry.batch_kind, entry.arrival_us)
            if topic in self._queue:
                self._queue.inherit(topic)

    def advance_published(self, topic: Topic, moved: Iterable[tuple[Partition, int]]) -> None:
        """Records that the table of `topic` contains everything below these partition ends."""
        with self._lock:
            if topic.is_removed:
                return
            self._commits[topic.topic_id] = self._commits.get(topic.topic_id, 0) + 1
            for partition, end in moved:
                is_led = topic.partitions.get(partition.number) is partition
                if partition.blocked is not None or not is_led:
                    continue
                partition.published = max(partition.published, end)
                count = bisect_right(partition.unpublished, end, key=end_of)
                done = partition.unpublished[:count]
                del partition.unpublished[:count]
                if done:
                    self._end_wait(topic, partition)
                    if partition.unpublished:  # it waits again, behind the others
                        self._begin_wait(topic, partition)
                partition.drop_published_batches(end)
                self.add_unconfirmed(topic, partition, done)
                self._release_unpublished(topic, done)
            self.update_waiting(topic)
            # A commit is bounded: the rest of its entries does not wait as long again.
            oldest = (each.unpublished[0].at for each in topic.waiting_partitions.values())
            self._queue.wake_if_older(topic, oldest, self._clock.monotonic())

    def advance_confirmed(self, topic: Topic, ends: Mapping[int, int]) -> None:
        """Records that the data files below these partition ends have been seen.

        Their WAL objects can be removed.
        """
        with self._lock:
            for number, end in ends.items():
                partition = topic.partitions.get(number)
                if partition is None:
                    continue  # since handed over to another broker
                count = bisect_right(partition.unconfirmed, end, key=end_of)
                self._release_unconfirmed(partition.unconfirmed[:count])
                del partition.unconfirmed[:count]
                self._count_unconfirmed(topic, -count)
                self._changes.note_bounds(topic, partition)

    def unconfirmed(self) -> list[Topic]:
        """Returns the topics with published but unconfirmed entries."""
        with self._lock:
            return list(self._unconfirmed.values())

    def unpublished(self) -> list[Located]:
        """Returns all unpublished entries."""
        with self._lock:
            return [
                each
                for topic in self._queue.topics()
                for partition in topic.partitions.values()
                for each in partition.unpublished
            ]

    # -------------------------------------------------------------------------- reading

    def view(
        self, partition: Partition, start: int, end: int
    ) -> tuple[list[Located], int, errors.SparklogError | None]:
        """Returns unpublished entries in [`start`, `end`), the published end, and `blocked`."""
        with self._lock:
            return partition.unpublished_in(start, end), partition.published, partition.blocked

    def unpublished_in(self, partition: Partition, start: int, end: int) -> list[Located]:
        """Returns the unpublished entries with an offset in [`start`, `end`)."""
        with self._lock:
            return partition.unpublished_in(start, end)

    def below(self, partition: Partition, end: int) -> tuple[Located, ...]:
        """Returns the unpublished entries that end at or before `end`."""
        with self._lock:
            return partition.unpublished_below(end)

    def oldest_of(self, partition: Partition, count: int) -> tuple[int, tuple[Located, ...]]:
        """Returns the published end, and the first `count` unpublished entries."""
        with self._lock:
            return partition.published, tuple(partition.unpublished[:count])

    def heads(
        self,
        topic: Topic,
        blocked: Sequence[Partition],
        *,
        most_partitions: int | None,
        most_entries: int,
    ) -> tuple[list[Head], list[dict[BatchId, tuple[int, int]]]]:
        """Returns the heads of a topic's backlog, for the partitions that can be published.

        All are read at the same moment, so a batch appears in each of its partitions. Also returns
        the unpublished batches of these and of the `blocked` partitions.

        Args:
            topic: the topic.
            blocked: its partitions that cannot be published.
            most_partitions: the maximum number of partitions, those that have waited longest;
                ignored if a Spark batch may span more of them; None: all.
            most_entries: the maximum per partition, because a backlog can be long.
        """
        with self._lock:
            chosen = [each for each in topic.waiting_partitions.values() if not each.blocked]
            if not any(each.unpublished_batches for each in chosen):
                chosen = chosen[:most_partitions]
            chosen.sort(key=lambda each: each.number)
            heads = [Head(each, each.published, each.unpublished[:most_entries]) for each in chosen]
            return heads, [dict(each.unpublished_batches) for each in (*chosen, *blocked)]

    def unconfirmed_ranges(
        self, topic: Topic, ends: Mapping[int, int]
    ) -> dict[int, tuple[int, int]]:
        """Returns (first offset, end) of unconfirmed entries below these partition ends."""
        with self._lock:
            return {
                each.number: (each.unconfirmed[0].entry.base_offset, end)
                for each in topic.partitions.values()
                if each.unconfirmed
                and each.unconfirmed[0].entry.base_offset < (end := ends.get(each.number, 0))
            }

    def unconfirmed_in(self, partition: Partition, start: int, end: int) -> list[Located]:
        """Returns the unconfirmed entries with an offset in [`start`, `end`)."""
        with self._lock:
            return [
                each
                for each in partition.unconfirmed
                if each.entry.end > start and each.entry.base_offset < end
            ]

    def oldest_arrival_us(self, partitions: Iterable[Partition]) -> int | None:
        """Returns when the partitions' oldest unpublished entry arrived; None if there is none.

        In µs since the Unix epoch.
        """
        with self._lock:
            heads = [each.unpublished[0].entry for each in partitions if each.unpublished]
        return min((entry.arrival_us for entry in heads), default=None)

    def bytes_of(self, topic: Topic) -> dict[int, int]:
        """Returns each partition's bytes of unpublished records, by number."""
        with self._lock:
            return {
                number: sum(payload_bytes(waiting.entry) for waiting in each.unpublished)
                for number, each in topic.partitions.items()
            }

    # -------------------------------------------------------------------------- blocked partitions

    def block(
        self,
        topic: Topic,
        partition: Partition,
        reason: errors.SparklogError,
        *,
        end: int,
        stranded: Iterable[Located] = (),
        is_end_known: bool = True,
    ) -> None:
        """Stops appends to the partition, and publishing it, until `reconnect` succeeds.

        Does nothing if the partition has since moved to another broker, or was deleted. `end`: the
        end of the known records; more may exist if `is_end_known` is False.
        """
        with self._lock:
            if partition.state not in LED or topic.is_removed:
                return
            partition.blocked = reason
            partition.move(PartitionEvent.DISCONNECTED)
            if end > partition.end:
                partition.end = partition.inherited_end = end
            partition.is_end_known = is_end_known
            for each in stranded:
                partition.stranded.append(each)
                partition.note_batch(each.entry)
                self.objects.of_unconfirmed.add(each)
            self._queue.note_blocked(topic, True)
            self._changes.note_bounds(topic, partition)
            self.update_waiting(topic)

    def reconnect(self, topic: Topic, partition: Partition, end: int) -> bool:
        """Unblocks the partition if its entries continue a table that ends at `end`.

        Returns whether they do.
        """
        with self._lock:
            if topic.is_removed:
                return False
            entries = [*partition.unpublished, *partition.stranded]
            tail = join_tail(end, entries)
            reached = tail[-1].entry.end if tail else end
            if reached < partition.end or (reached > partition.end and partition.is_end_known):
                return False
            # These entries have since been published, but their files have not been seen.
            self.add_unconfirmed(topic, partition, join_head(partition.published, end, entries))
            self._release_unpublished(topic, partition.unpublished)
            self._release_unconfirmed(partition.stranded)
            partition.unpublished, partition.stranded = [], []
            self._end_wait(topic, partition)
            partition.unpublished_batches.clear()
            partition.published, partition.end = end, reached
            partition.blocked, partition.is_end_known = None, True
            partition.move(PartitionEvent.RECONNECTED)
            for each in tail:
                self.add(topic, partition, each)
            self._queue.note_blocked(topic, topic.has_blocked)
            self.update_waiting(topic)
            partition.growth.notify_followers()
            return True

    # -------------------------------------------------------------------------- for the partitions

    def add(self, topic: Topic, partition: Partition, located: Located) -> None:
        """Adds an entry at the end of its partition's backlog. Requires the lock."""
        if not partition.unpublished:
            self._begin_wait(topic, partition)
        partition.unpublished.append(located)
        self._changes.note_bounds(topic, partition)
        self.objects.of_unpublished.add(located)
        partition.note_batch(located.entry)
        topic.waiting += 1
        self.written_bytes += payload_bytes(located.entry)
        self._count_bytes(topic, located.entry, 1)
        if topic not in self._queue:
            self._queue.begin(topic, self._clock.monotonic())

    def add_unconfirmed(
        self, topic: Topic, partition: Partition, entries: Iterable[Located]
    ) -> None:
        """Adds entries, in order, whose rows are in the table. Requires the lock."""
        self._changes.note_bounds(topic, partition)
        for each in entries:
            partition.unconfirmed.append(each)
            self.objects.of_unconfirmed.add(each)
            self._count_unconfirmed(topic, 1)

    def replace_with_copy(self, partition: Partition, copy: Located) -> None:
        """Replaces an entry with its carried copy, unless it has already been published."""
        waiting, base = partition.unpublished, copy.entry.base_offset
        index = bisect_left(waiting, base, key=base_of)
        if index < len(waiting) and waiting[index].entry.base_offset == base:
            self.objects.of_unpublished.remove(waiting[index])
            self.objects.of_unpublished.add(copy)
            waiting[index] = copy

    def update_waiting(self, topic: Topic) -> None:
        """Begins or ends the topic's wait after one of the reasons for it has changed."""
        is_idle = not topic.waiting and not self._queue.is_blocked(topic)
        if is_idle and topic.held_back is None:
            self._queue.end(topic)
        elif topic not in self._queue:
            self._queue.begin(topic, self._clock.monotonic())

    def leave(self, topic: Topic, partition: Partition) -> None:
        """Stops publishing a partition whose next leader needs its entries in our log."""
        self._end_wait(topic, partition)
        self._release_unpublished(topic, partition.unpublished)
        for each in partition.unpublished:
            self.objects.of_unconfirmed.add(each)
        self._count_unconfirmed(topic, -len(partition.unconfirmed))
        if not topic.partitions:
            topic.held_back = None  # left to the other leaders, if it is still not writable
        self.update_waiting(topic)

    def rejoin(self, topic: Topic, partition: Partition) -> None:
        """Resumes publishing a partition whose handover failed."""
        unpublished, partition.unpublished = partition.unpublished, []
        for each in unpublished:
            self.objects.of_unconfirmed.remove(each)
            self.add(topic, partition, each)
        self._queue.wake(topic, self._clock.monotonic())  # they have waited before
        self._count_unconfirmed(topic, len(partition.unconfirmed))

    def release(self, partition: Partition) -> None:
        """Releases the entries of a handed-over partition, whose leader no longer needs them."""
        self._release_unconfirmed([*partition.unconfirmed, *partition.unpublished])

    def forget_topic(self, topic: Topic) -> None:
        """Drops the entries of a deleted topic, which gets no further turn."""
        topic.is_removed = True
        self._queue.forget(topic)
        self._unconfirmed.pop(topic.topic_id, None)
        self._commits.pop(topic.topic_id, None)
        topic.waiting_partitions.clear()
        topic.unconfirmed = 0
        for partition in topic.partitions.values():
            self._release_unpublished(topic, partition.unpublished)
            self._release_unconfirmed(partition.unconfirmed)
            self.unconfirmed_count -= len(partition.unconfirmed)
            self._release_unconfirmed(partition.stranded)
            for entries in (partition.unpublished, partition.unconfirmed, partition.stranded):
                entries.clear()

    # -------------------------------------------------------------------------- counts

    def _begin_wait(self, topic: Topic, partition: Partition) -> None:
        topic.waiting_partitions[partition.number] = partition
        self._queue.note_partition(topic, 1)

    def _end_wait(self, topic: Topic, partition: Partition) -> None:
        if topic.waiting_partitions.pop(partition.number, None) is not None:
            self._queue.note_partition(topic, -1)

    def _release_unpublished(self, topic: Topic, done: Sequence[Located]) -> None:
        topic.waiting -= len(done)
        for each in done:
            self.objects.of_unpublished.remove(each)
            self._count_bytes(topic, each.entry, -1)

    def _release_unconfirmed(self, done: Iterable[Located]) -> None:
        for each in done:
            self.objects.of_unconfirmed.remove(each)

    def _count_unconfirmed(self, topic: Topic, more: int) -> None:
        self.unconfirmed_count += more
        topic.unconfirmed += more
        if topic.unconfirmed:
            self._unconfirmed[topic.topic_id] = topic
        else:
            self._unconfirmed.pop(topic.topic_id, None)

    def _count_bytes(self, topic: Topic, entry: Entry, sign: int) -> None:
        staged = 0 if entry.staged is None else entry.staged.length
        size = _OVERHEAD_BYTES + (entry.length if entry.staged is None else 0)
        for each in (topic, self):
            each.unpublished_bytes += sign * size
            each.staged_bytes += sign * staged
        self._queue.note_bytes(topic, sign, sign * (size + staged))
