"""The groups that a broker coordinates: one lock, the records being stored, and the deadlines.

Work under the lock is short. Replies produced under it are set once it is released, because callers
may call again immediately.
"""

from __future__ import annotations

import contextlib
import heapq
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from sparklog import limits
from sparklog.broker.broker import Append, Broker, PendingAppend
from sparklog.broker.groups.committed_offsets import TopicPartition, flatten
from sparklog.broker.groups.descriptions import subscribed_topics
from sparklog.broker.groups.entries import GroupEntry, OffsetsSnapshot
from sparklog.broker.groups.failures import logged_error
from sparklog.broker.groups.group import Group
from sparklog.broker.groups.members import MemberMemory
from sparklog.broker.groups.messages import GroupError, GroupResult
from sparklog.broker.groups.offsets_topic import OffsetsTopic
from sparklog.clock import Clock
from sparklog.formats.consumer_offsets import GroupKey, GroupRecord, Key, OffsetKey, Value
from sparklog.settings import GroupSettings

GROUPS_MEMBERS_BYTES = 64 * limits.MIB  # of all groups' members: subscriptions, assignments, names

_T = TypeVar("_T")
_DUE_KEPT: Final = 1_000
"""The number of outdated times that the heap may contain beyond one per scheduled group."""
_ENDED: Final = object()

Settle: TypeAlias = Callable[[GroupError | None], Iterator[None] | None]
"""Continues under the lock once records are durable, or have failed with an error.

Long work is returned as an iterator, each step of which runs under the lock.
"""
Records: TypeAlias = Mapping[Key, Value | None]


@dataclass(frozen=True, slots=True)
class Storing:
    """Records being stored, or the error that prevents it, and the continuation."""

    pending: PendingAppend | None
    error: GroupError | None
    settle: Settle


class KnownGroups:
    """The groups, by id. Methods whose docstring does not name `locked` acquire the lock."""

    def __init__(
        self,
        broker: Broker,
        topic: OffsetsTopic,
        *,
        settings: GroupSettings,
        clock: Clock,
        new_uuid: Callable[[], str],
    ) -> None:
        self.topic = topic
        self.settings = settings
        self._broker = broker
        self._clock = clock
        self._new_uuid = new_uuid
        self._lock = threading.Lock()
        self.memory = MemberMemory(GROUPS_MEMBERS_BYTES)
        self.by_id: dict[str, GroupEntry] = {}
        """Changed only under the lock."""
        self._due: list[tuple[int, str]] = []
        """A heap of (ms, group): when a group's deadlines have to be checked."""
        self._due_of: dict[str, int] = {}
        """The earliest of these times for each group."""
        # Not a SimpleQueue: its `get` with a timeout never returns if a signal interrupts it after
        # the deadline, as in a process that was suspended (CPython 3.11).
        self._storing: queue.Queue[Storing | None] = queue.Queue()
        """None wakes the thread that waits for it."""
        self._answers: list[tuple[Future[Any], Any]] = []

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock, and sets the answers produced under it once it is released."""
        with self._lock:
            try:
                yield
            finally:
                answers, self._answers = self._answers, []
        for answer, value in answers:
            with contextlib.suppress(InvalidStateError):  # it was cancelled
                answer.set_result(value)

    def answer(self, answer: Future[_T], value: _T) -> None:
        """Sets a reply once the lock is released. Requires `locked`."""
        self._answers.append((answer, value))

    # -------------------------------------------------------------------------- groups, locked

    def get_or_new(self, group_id: str) -> GroupEntry:
        """Returns the group, or a new one that is not in `by_id` yet. Requires `locked`."""
        return self.by_id.get(group_id) or self.new(group_id)

    def new(self, group_id: str) -> GroupEntry:
        """Returns a new group without members."""
        return GroupEntry(
            Group(group_id, settings=self.settings, new_uuid=self._new_uuid, memory=self.memory)
        )

    def restored(self, group_id: str, record: GroupRecord, changed_ms: int) -> GroupEntry:
        """Returns a group as it was recorded. Requires `locked`: its members use memory."""
        group = Group.restore(
            group_id,
            record,
            self.now_ms(),
            settings=self.settings,
            new_uuid=self._new_uuid,
            memory=self.memory,
        )
        return GroupEntry(group, changed_ms=changed_ms)

    def apply(self, entry: GroupEntry, result: GroupResult) -> None:
        """Sends replies, stores the record and schedules the deadline. Requires `locked`."""
        for token, reply in result.replies:
            assert isinstance(token, Future)
            self.answer(token, reply)
        if result.record is not None:
            self._store(entry, result.record)
        self.schedule(entry)

    def drop_nothing(self, entry: GroupEntry) -> None:
        """Drops a group if none of it is left, before the next sweep. Requires `locked`."""
        if entry.is_nothing:
            group_id = entry.group.group_id
            del self.by_id[group_id]
            self._due_of.pop(group_id, None)

    def forget_ids(self) -> None:
        """Forgets the oldest ids handed out, if there are too many. Requires `locked`."""
        while (oldest := self.memory.excess()) is not None:
            group_id, member_id = oldest
            entry = self.by_id[group_id]
            self.apply(entry, entry.group.forget(member_id, self.now_ms()))
            self.drop_nothing(entry)
        if len(self._due) > 2 * len(self._due_of) + _DUE_KEPT:
            self._due = sorted((due_ms, group_id) for group_id, due_ms in self._due_of.items())

    # -------------------------------------------------------------------------- deadlines, locked

    def schedule(self, entry: GroupEntry) -> None:
        """Has a group's next deadline handled. Requires `locked`."""
        group_id, due_ms = entry.group.group_id, entry.group.next_deadline_ms()
        if due_ms is None or due_ms >= self._due_of.get(group_id, due_ms + 1):
            return
        self._due_of[group_id] = due_ms
        heapq.heappush(self._due, (due_ms, group_id))
        if self._due[0] == (due_ms, group_id):
            self.wake()

    def next_due_ms(self) -> int | None:
        """Returns when the next deadline has to be checked. Requires `locked`."""
        return self._due[0][0] if self._due else None

    def expire_due(self, now_ms: int) -> None:
        """Handles the deadlines up to now. Requires `locked`."""
        while self._due and self._due[0][0] <= now_ms:
            due_ms, group_id = heapq.heappop(self._due)
            entry = self.by_id.get(group_id)
            if self._due_of.get(group_id) == due_ms:
                del self._due_of[group_id]
                if entry is not None:
                    self.apply(entry, entry.group.expire(now_ms))
                    self.drop_nothing(entry)

    # -------------------------------------------------------------------------- records

    def prepare(self, group_id: str, records: Records) -> Append | GroupError:
        """Returns the encoded records, or the error if they cannot be encoded; needs no lock."""
        try:
            return self.topic.prepare(group_id, records)
        except Exception as failure:
            return logged_error(failure, group_id=group_id)

    def submit(self, prepared: Append | GroupError, settle: Settle) -> None:
        """Queues records. Requires `locked`.

        The `settle` callbacks are called in the order of submission, even after a failure. Raises
        nothing: callers have already changed their state.
        """
        if isinstance(prepared, GroupError):
            item = Storing(None, prepared, settle)
        else:
            try:
                item = Storing(self.topic.submit(prepared), None, settle)
            except Exception as failure:
                item = Storing(None, logged_error(failure), settle)
        self._storing.put(item)

    def _store(self, entry: GroupEntry, record: GroupRecord) -> None:
        group, changed_ms = entry.group, self.wall_ms()

        def settle(error: GroupError | None) -> None:
            now_ms = self.now_ms()
            if error is None:
                entry.changed_ms = changed_ms
                self.apply(entry, group.stored(record, now_ms))
            else:
                self.apply(entry, group.store_failed(record, error, now_ms))

        records: Records = {GroupKey(group.group_id): (record, changed_ms)}
        self.submit(self.prepare(group.group_id, records), settle)

    def wake(self) -> None:
        """Ends the wait in `settle_next`."""
        self._storing.put(None)

    def wake_if_idle(self) -> None:
        """Ends the wait in `settle_next`, unless it has work."""
        if self._storing.empty():
            self.wake()

    def settle_next(self, timeout_seconds: float) -> None:
        """Waits for the oldest of the records being stored, and runs its continuation."""
        try:
            item = self._storing.get(timeout=timeout_seconds)
        except queue.Empty:
            return
        if item is not None:
            self._settle(item)

    def settle_all(self) -> None:
        """Waits for all records being stored, and runs their continuations."""
        while not self._storing.empty():
            item = self._storing.get()
            if item is not None:
                self._settle(item)

    def _settle(self, item: Storing) -> None:
        error = item.error
        if item.pending is not None:
            try:
                self._broker.wait(item.pending)
            except Exception as failure:
                error = logged_error(failure)
        with self.locked():
            steps = item.settle(error)
        while steps is not None:
            with self.locked():
                if next(steps, _ENDED) is _ENDED:
                    return

    # -------------------------------------------------------------------------- deletion

    def is_unchanged(self, snapshot: OffsetsSnapshot) -> bool:
        """Returns whether a group is unchanged since the snapshot. Requires `locked`."""
        entry = snapshot.entry
        known = self.by_id.get(entry.group.group_id)
        return known is entry and entry.changes == snapshot.changes

    def erase(
        self,
        snapshot: OffsetsSnapshot,
        partitions: list[TopicPartition],
        subscribed: frozenset[str] | None,
        settled: Settle,
    ) -> bool:
        """Removes offsets, including those being stored.

        Returns false, with no effect, if the group has changed since the snapshot.
        """
        entry = snapshot.entry
        group_id = entry.group.group_id
        tombstones: Records = {OffsetKey(group_id, *each): None for each in partitions}
        prepared = self.prepare(group_id, tombstones) if partitions else None
        with self.locked():
            if not self.is_unchanged(snapshot):
                return False
            if subscribed_topics(entry.group) != subscribed:
                return False
            if prepared is None:
                settled(None)
            else:
                entry.changes += 1
                self.submit(prepared, _dropping(entry, partitions, settled))
        return True

    def delete(
        self, snapshot: OffsetsSnapshot, settled: Settle, *, if_deserted: bool = False
    ) -> bool:
        """Deletes a group; returns false, with no effect, if it has changed since the snapshot.

        The group is gone for all clients immediately, and comes back if the deletion does not
        become durable. Do not call this under the lock: there may be many tombstones.
        """
        entry = snapshot.entry
        group_id = entry.group.group_id
        partitions = snapshot.partitions()
        tombstones: Records = {
            **{OffsetKey(group_id, *each): None for each in partitions},
            GroupKey(group_id): None,
        }
        prepared = self.prepare(group_id, tombstones)

        def deleted(failed: GroupError | None) -> None:
            if failed is not None:
                self._bring_back(entry)
            settled(failed)

        with self.locked():
            if not self.is_unchanged(snapshot):
                return False
            if entry.group.check_delete() is not None:
                return False
            if if_deserted and not entry.group.is_deserted:
                return False
            del self.by_id[group_id]
            entry.changes += 1
            self.submit(prepared, _dropping(entry, partitions, deleted))
            self.apply(entry, entry.group.unload())
        return True

    def _bring_back(self, deleted: GroupEntry) -> None:
        """Restores a group whose deletion failed; changes to its successor take precedence."""
        group_id = deleted.group.group_id
        entry = self.by_id.setdefault(group_id, self.new(group_id))
        entry.group.continue_from(deleted.group)
        for topic_partition, value in flatten(deleted.offsets.snapshot()):
            if entry.offsets.get(topic_partition) is None:
                entry.offsets.put(topic_partition, value)
        entry.changes += 1
        entry.changed_ms = max(deleted.changed_ms, entry.changed_ms)

    # -------------------------------------------------------------------------- time

    def now_ms(self) -> int:
        """Returns the monotonic time in ms."""
        return round(self._clock.monotonic() * 1e3)

    def wall_ms(self) -> int:
        """Returns ms since the Unix epoch."""
        return self._clock.now_us() // 1_000


def _dropping(entry: GroupEntry, erased: list[TopicPartition], settled: Settle) -> Settle:
    """Returns the continuation that drops offsets step by step."""

    def settle(failed: GroupError | None) -> Iterator[None]:
        for first in range(0, len(erased) if failed is None else 0, limits.GROUP_OFFSETS_STEP):
            for each in erased[first : first + limits.GROUP_OFFSETS_STEP]:
                entry.offsets.drop(each)
            yield
        entry.changes += 1
        settled(failed)

    return settle
