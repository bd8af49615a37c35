"""The coordinator of consumer groups: their members, and the offsets that they have committed.

A `Group` decides, and the topic `__consumer_offsets` remembers; the coordinator connects the two. A
request whose effect must outlive this broker is answered once its record is durable, and a restart
finds it as it was acked. Committed offsets count from then on, for readers too.

Listeners call from any thread. A request that has to wait returns a future; to cancel it withdraws
the request from its group. One thread calls `tick` in a loop: it waits for the records that are
being stored, in their order, and handles deadlines.

Offsets expire by Kafka's rule (KIP-211): all of a group that has had no members for the retention;
of a group that subscribes, those of topics that no member subscribes to, once they are so old; and
of a group that never had members, each that is so old.
"""

from __future__ import annotations

import contextlib
import heapq
import queue
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
import structlog

from sparklog import errors, limits
from sparklog.broker.backoff import ENDS_THE_BROKER, FailureLog, RetrySchedule
from sparklog.broker.broker import Append, Broker, PendingAppend
from sparklog.broker.counts import Budget
from sparklog.broker.groups.committed_offsets import (
    NO_OFFSETS,
    CommittedOffsets,
    OffsetsByTopic,
    TopicPartition,
    flatten,
    get_offset,
    select,
)
from sparklog.broker.groups.descriptions import subscribed_topics
from sparklog.broker.groups.failures import logged_error
from sparklog.broker.groups.group import Group
from sparklog.broker.groups.members import MemberMemory
from sparklog.broker.groups.messages import (
    Description,
    GroupError,
    GroupResult,
    GroupState,
    JoinReply,
    JoinRequest,
    Leaver,
    LeaveReply,
    SyncReply,
    SyncRequest,
)
from sparklog.broker.groups.offsets_topic import OffsetsTopic
from sparklog.clock import Clock
from sparklog.formats import consumer_offsets
from sparklog.formats.consumer_offsets import (
    CommittedOffset,
    GroupKey,
    GroupRecord,
    Key,
    OffsetKey,
    Value,
    decode_group,
    decode_offset,
)
from sparklog.settings import GroupSettings

GROUPS_MEMBERS_BYTES = 64 * limits.MIB  # of all groups' members: subscriptions, assignments, names
OFFSETS_RETENTION_CHECK_SECONDS = 600.0
OFFSET_METADATA_LENGTH = 4_096  # in characters of UTF-16, as Kafka's offset.metadata.max.bytes
_GROUPS_STEP = 256  # groups that are visited at a time under the lock

_log = structlog.get_logger("sparklog.groups")
_T = TypeVar("_T")
_LOAD_AGAIN_SECONDS: Final = 0.5
"""The pause before a partition is read again that could not be read."""
_SWEEP_STEP_MS: Final = 50
"""The longest time for which a sweep keeps `tick` from records that are being stored."""
_ATTEMPTS: Final = 10
"""To delete offsets of a group that changes while its tombstones are encoded."""
_REMOVE_GONE_MS: Final = 1_000
_DUE_KEPT: Final = 1_000
"""Times of groups that are gone, which wait in the heap beside as many as there are groups."""
"""The least time between two searches for members that are gone."""
_SWEEP_MS: Final = round(OFFSETS_RETENTION_CHECK_SECONDS * 1e3)

Errors: TypeAlias = dict[TopicPartition, GroupError | None]
"""The error of each partition, or None."""
_Settle: TypeAlias = Callable[[GroupError | None], Iterator[None] | None]
"""Continues under the lock once records are durable, or have failed with an error.

Work that takes long is returned as an iterator, whose steps are each taken under the lock.
"""
_Records: TypeAlias = Mapping[Key, Value | None]


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """A commit of one partition: the next offset that the group will read."""

    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    topic_id: str = ""
    """If given, the offset belongs to that topic, and to no other of the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFigures:
    """A group at one moment."""

    description: Description
    offsets: OffsetsByTopic


@dataclass(slots=True)
class _Entry:
    """A group with the offsets that it has committed."""

    group: Group
    offsets: CommittedOffsets = field(default_factory=CommittedOffsets)
    committing: dict[object, Mapping[TopicPartition, CommittedOffset]] = field(default_factory=dict)
    """The offsets of each commit whose records are being stored."""
    changes: int = 0
    """A number that rises whenever the offsets may have changed."""
    changed_ms: int = -1
    """When the group was last recorded, in ms since the Unix epoch."""

    @property
    def is_nothing(self) -> bool:
        """True if the group was never used: it has no member, id, record or offset."""
        return (
            self.group.is_deserted
            and self.group.generation == 0
            and self.changed_ms < 0
            and not self.changes
            and not self.committing
            and not self.offsets
        )


@dataclass(frozen=True, slots=True)
class _Storing:
    """Records that are being stored, or the error why not, and the continuation."""

    pending: PendingAppend | None
    error: GroupError | None
    settle: _Settle


class Coordinator:
    """Coordinates all groups over `broker`'s topics."""

    def __init__(
        self,
        broker: Broker,
        *,
        settings: GroupSettings,
        clock: Clock,
        new_uuid: Callable[[], str] = lambda: str(uuid.uuid4()),
    ) -> None:
        self._broker = broker
        self._topic = OffsetsTopic(broker)
        self._settings = settings
        self._clock = clock
        self._new_uuid = new_uuid
        self._lock = threading.Lock()
        self._memory = MemberMemory(GROUPS_MEMBERS_BYTES)
        self._is_short = False
        """A request found too little memory, so members that are gone have to be removed."""
        self._remove_gone_ms = self._now_ms()
        """The earliest time of the next search for such members."""
        self._groups: dict[str, _Entry] = {}
        self._refusal: GroupError | None = GroupError.COORDINATOR_LOAD_IN_PROGRESS
        """The reply to all requests before the groups are read, and after the end."""
        self._loaded: dict[int, int] = {}
        """The partitions of `__consumer_offsets` whose groups are read, and in which leader epoch.
        """
        self._due: list[tuple[int, str]] = []
        """A heap of (ms, group): when a group's deadlines have to be checked."""
        self._due_of: dict[str, int] = {}
        """The earliest of these times for each group."""
        self._sweep_ms = self._now_ms() + _SWEEP_MS
        self._to_sweep: list[_Entry] = []
        """Groups whose offsets this sweep has not visited yet."""
        # Not a SimpleQueue: its `get` with a timeout never returns if a signal interrupts it after
        # the deadline, as in a process that was suspended (CPython 3.11).
        self._storing: queue.Queue[_Storing | None] = queue.Queue()
        """None wakes the thread that waits for it."""
        self._retries = RetrySchedule(clock, first_seconds=_LOAD_AGAIN_SECONDS)
        self._failures = FailureLog()
        """Failures to read a partition, so that each is logged once."""
        self._answers: list[tuple[Future[Any], Any]] = []
        """Set once the lock is released, because callers may call again at once."""

    def open(self) -> None:
        """Creates `__consumer_offsets` if it is missing; call it before a group is used.

        May wait for storage. Raises what `TopicAdmin.create` raises.
        """
        self._topic.ensure()
        with self._lock:  # a client need not wait until partitions without records are read
            if self._refusal is None and self._topic.led() != self._loaded:
                self._loaded |= self._topic.empty()

    # -------------------------------------------------------------------------- members

    def join(self, group_id: str, request: JoinRequest) -> Future[JoinReply]:
        """Handles JoinGroup."""
        return self._handle(
            group_id,
            lambda error: JoinReply(error=error, member_id=request.member_id),
            lambda group, token, now_ms: group.join(token, request, now_ms),
            names=_recorded_names(request),
            more_bytes=request.subscribed_bytes,
        )

    def sync(self, group_id: str, request: SyncRequest) -> Future[SyncReply]:
        """Handles SyncGroup."""
        return self._handle(
            group_id,
            lambda error: SyncReply(error=error),
            lambda group, token, now_ms: group.sync(token, request, now_ms),
            more_bytes=sum(map(len, request.assignments.values())),
        )

    def leave(self, group_id: str, leavers: Iterable[Leaver]) -> Future[LeaveReply]:
        """Handles LeaveGroup."""
        return self._handle(
            group_id,
            lambda error: LeaveReply(error=error),
            lambda group, token, now_ms: group.leave(token, leavers, now_ms),
        )

    def heartbeat(
        self, group_id: str, *, member_id: str, instance_id: str | None, generation: int
    ) -> GroupError | None:
        """Handles Heartbeat; returns None if the member may continue."""
        with self._lock:
            return self._refused(group_id) or self._entry(group_id).group.heartbeat(
                member_id=member_id,
                instance_id=instance_id,
                generation=generation,
                now_ms=self._now_ms(),
            )

    def _handle(
        self,
        group_id: str,
        refuse: Callable[[GroupError], _T],
        event: Callable[[Group, Future[_T], int], GroupResult],
        names: Iterable[str | None] = (),
        more_bytes: int = 0,
    ) -> Future[_T]:
        """Has the group handle a request, after which members may take `more_bytes`."""
        answer: Future[_T] = Future()
        with self._locked():
            error = self._refused(group_id, names)
            if error is not None:
                self._answer(answer, refuse(error))
            else:
                entry = self._entry(group_id)
                if not self._is_short and not self._memory.has(more_bytes):
                    self._is_short = True
                    self._storing.put(None)
                result = event(entry.group, answer, self._now_ms())
                if entry.group.next_deadline_ms() is not None:
                    self._groups[group_id] = entry
                self._apply(entry, result)
                self._forget_ids()
        answer.add_done_callback(lambda done: self._withdraw_cancelled(group_id, done))
        return answer

    def _forget_ids(self) -> None:
        """Forgets the oldest ids that were given out, if there are too many."""
        while (oldest := self._memory.excess()) is not None:
            group_id, member_id = oldest
            entry = self._groups[group_id]
            self._apply(entry, entry.group.forget(member_id, self._now_ms()))
            self._drop_nothing(entry)
        if len(self._due) > 2 * len(self._due_of) + _DUE_KEPT:
            self._due = sorted((due_ms, group_id) for group_id, due_ms in self._due_of.items())

    def _drop_nothing(self, entry: _Entry) -> None:
        """Drops a group if it is nothing any more, without waiting for the next sweep."""
        if entry.is_nothing:
            group_id = entry.group.group_id
            del self._groups[group_id]
            self._due_of.pop(group_id, None)

    def _refused(self, group_id: str, names: Iterable[str | None] = ()) -> GroupError | None:
        """Returns why a request is refused before its group handles it, or None.

        `names`: those that the group would record. It refuses others, which it does not know.
        """
        refusal = self._refused_here(group_id)
        if refusal is not None:
            return refusal
        if not consumer_offsets.fits(group_id):
            return GroupError.INVALID_GROUP_ID
        return None if all(map(consumer_offsets.fits, names)) else GroupError.INVALID_REQUEST

    def _refused_here(self, group_id: str) -> GroupError | None:
        """Returns why this broker does not coordinate the group now, or None."""
        if self._refusal is not None:
            return self._refusal
        partition = self._topic.find_partition(group_id)
        if partition is None:
            # Another broker has just created the topic, and this one will soon see it. Clients
            # wait for that, while they would repeat any other error at once.
            is_shared = len(self._broker.members()) > 1
            return GroupError.COORDINATOR_LOAD_IN_PROGRESS if is_shared else None
        leader_epoch = self._topic.led().get(partition)
        if leader_epoch is None:
            return GroupError.NOT_COORDINATOR
        if self._loaded.get(partition) == leader_epoch:
            return None
        if self._storing.empty():
            self._storing.put(None)  # the next tick reads it
        return GroupError.COORDINATOR_LOAD_IN_PROGRESS

    def coordinator_of(self, group_id: str) -> int:
        """Returns the id of the broker that coordinates the group; it may be down."""
        return self._topic.leader_of(group_id)

    def _withdraw_cancelled(self, group_id: str, answer: Future[Any]) -> None:
        if answer.cancelled():
            with self._lock:
                entry = self._groups.get(group_id)
                if entry is not None:
                    entry.group.cancel(answer, self._now_ms())
                    self._schedule(entry)

    # -------------------------------------------------------------------------- offsets

    def commit(
        self,
        group_id: str,
        offsets: Mapping[TopicPartition, Commit],
        *,
        member_id: str = "",
        instance_id: str | None = None,
        generation: int = -1,
    ) -> Future[Errors]:
        """Handles OffsetCommit; the result has an error or None for each partition.

        Partitions that do not exist are refused. A commit without a generation is for a group
        without members, from a client that assigns its partitions itself.
        """
        answer: Future[Errors] = Future()

        def refused() -> GroupError | None:
            error = self._refused(group_id)
            if error is None and group_id not in self._groups and generation >= 0:
                error = GroupError.GROUP_ID_NOT_FOUND
            return error or self._entry(group_id).group.check_commit(
                member_id=member_id,
                instance_id=instance_id,
                generation=generation,
                now_ms=self._now_ms(),
            )

        with self._lock:
            error = refused()
        if error is not None:
            answer.set_result(_same_error(offsets, error))
            return answer
        # Work that takes long for many offsets needs no lock; the group may change meanwhile.
        refusals, values = self._checked(offsets)
        if not values:
            answer.set_result(refusals)
            return answer
        records: _Records = {OffsetKey(group_id, *each): value for each, value in values.items()}
        prepared = self._prepare(group_id, records)
        committed = {**refusals, **_same_error(values, None)}
        with self._locked():
            error = refused()
            if error is not None:
                self._answer(answer, _same_error(offsets, error))
                return answer
            entry = self._groups.setdefault(group_id, self._entry(group_id))
            entry.committing[answer] = values
            entry.changes += 1

            def settle(failed: GroupError | None) -> Iterator[None]:
                if failed is None:  # also while the group is being deleted, which may fail
                    remaining = iter(values.items())
                    while portion := list(islice(remaining, limits.GROUP_OFFSETS_STEP)):
                        for topic_partition, value in portion:
                            entry.offsets.put(topic_partition, value)
                        yield
                del entry.committing[answer]
                entry.changes += 1
                self._answer(
                    answer, committed if failed is None else refusals | _same_error(values, failed)
                )

            self._submit(prepared, settle)
        return answer

    def _checked(
        self, offsets: Mapping[TopicPartition, Commit]
    ) -> tuple[Errors, dict[TopicPartition, CommittedOffset]]:
        """Returns the partitions that are refused, and the offsets of the others to record."""
        refusals: Errors = {}
        values: dict[TopicPartition, CommittedOffset] = {}
        topics = _TopicLookup(self._broker)
        commit_ms = self._wall_ms()
        for topic_partition, commit in offsets.items():
            topic_id = topics.id_of(topic_partition)
            if _java_length(commit.metadata) > OFFSET_METADATA_LENGTH:
                refusals[topic_partition] = GroupError.OFFSET_METADATA_TOO_LARGE
            elif topic_id is None or commit.topic_id not in ("", topic_id):
                refusals[topic_partition] = GroupError.UNKNOWN_TOPIC_OR_PARTITION
            else:
                values[topic_partition] = CommittedOffset(
                    offset=commit.offset,
                    leader_epoch=commit.leader_epoch,
                    metadata=commit.metadata,
                    commit_ms=commit_ms,
                    topic_id=topic_id,
                )
        return refusals, values

    def committed(
        self, group_id: str, partitions: Sequence[TopicPartition] | None = None
    ) -> dict[TopicPartition, CommittedOffset] | GroupError:
        """Handles OffsetFetch: returns the offsets of topics that have not been replaced.

        Args:
            group_id: the group.
            partitions: the partitions to return; None: all.
        """
        found: dict[TopicPartition, CommittedOffset]
        with self._lock:
            refusal = self._refused_here(group_id)
            if refusal is not None:
                return refusal
            offsets = self._entry(group_id).offsets
            few = partitions is not None and len(partitions) <= limits.GROUP_OFFSETS_STEP
            snapshot = NO_OFFSETS if few else offsets.snapshot()
            found = select(offsets.get, partitions) if few and partitions is not None else {}
        if not few and partitions is not None:
            found = select(partial(get_offset, snapshot), partitions)
        elif not few:
            found = dict(flatten(snapshot))
        topics = _TopicLookup(self._broker)
        return {each: value for each, value in found.items() if topics.has(each, value)}

    def has_many_offsets(self, group_id: str) -> bool:
        """Returns true if it takes long to fetch all offsets of the group."""
        with self._lock:
            entry = self._groups.get(group_id)
            return entry is not None and len(entry.offsets) > limits.GROUP_OFFSETS_STEP

    def delete_offsets(self, group_id: str, partitions: Iterable[TopicPartition]) -> Future[Errors]:
        """Handles OffsetDelete, for topics that no member subscribes to."""
        answer: Future[Errors] = Future()
        wanted = list(partitions)
        if not group_id:
            answer.set_result(_same_error(wanted, GroupError.INVALID_GROUP_ID))
            return answer
        for _ in range(_ATTEMPTS):
            with self._locked():
                entry = self._existing(group_id)
                if isinstance(entry, GroupError):
                    self._answer(answer, _same_error(wanted, entry))
                    return answer
                subscribed = subscribed_topics(entry.group)
                if subscribed is None:
                    self._answer(answer, _same_error(wanted, GroupError.NON_EMPTY_GROUP))
                    return answer
                snapshot = _OffsetsSnapshot(entry)
            refusals: Errors = {
                each: GroupError.GROUP_SUBSCRIBED_TO_TOPIC if each[0] in subscribed else None
                for each in wanted
            }
            free = [each for each, refusal in refusals.items() if refusal is None]
            settled = partial(self._offsets_deleted, answer, refusals, free)
            if self._erase(snapshot, filter(snapshot.has, free), subscribed, settled):
                return answer
        answer.set_result(_same_error(wanted, GroupError.COORDINATOR_NOT_AVAILABLE))
        return answer

    def _offsets_deleted(
        self,
        answer: Future[Errors],
        refusals: Errors,
        free: Sequence[TopicPartition],
        failed: GroupError | None,
    ) -> None:
        self._answer(answer, refusals | _same_error(free, failed))

    def _erase(
        self,
        snapshot: _OffsetsSnapshot,
        partitions: Iterable[TopicPartition],
        subscribed: frozenset[str] | None,
        settled: _Settle,
    ) -> bool:
        """Removes offsets, also those being stored.

        Returns false, with no effect, if the group changed since the snapshot.
        """
        entry, erased = snapshot.entry, list(partitions)
        group_id = entry.group.group_id
        tombstones: _Records = {OffsetKey(group_id, *each): None for each in erased}
        prepared = self._prepare(group_id, tombstones) if erased else None
        with self._locked():
            if not self._is_unchanged(snapshot):
                return False
            if subscribed_topics(entry.group) != subscribed:
                return False
            if prepared is None:
                settled(None)
            else:
                entry.changes += 1
                self._submit(prepared, self._dropping(entry, erased, settled))
        return True

    def _dropping(
        self, entry: _Entry, erased: Sequence[TopicPartition], settled: _Settle
    ) -> _Settle:
        def settle(failed: GroupError | None) -> Iterator[None]:
            for first in range(0, len(erased) if failed is None else 0, limits.GROUP_OFFSETS_STEP):
                for each in erased[first : first + limits.GROUP_OFFSETS_STEP]:
                    entry.offsets.drop(each)
                yield
            entry.changes += 1
            settled(failed)

        return settle

    # -------------------------------------------------------------------------- administration

    def groups(self) -> list[Description] | GroupError:
        """Handles ListGroups: returns all groups, without their members."""
        found: list[Description] = []
        with self._lock:
            if self._refusal is not None:
                return self._refusal
            if self._due_to_load(self._topic.led()):
                return GroupError.COORDINATOR_LOAD_IN_PROGRESS
            entries = list(self._groups.values())
        for first in range(0, len(entries), _GROUPS_STEP):
            with self._lock:
                found += [
                    each.group.describe(with_members=False)
                    for each in entries[first : first + _GROUPS_STEP]
                    if each.group.state is not GroupState.DEAD
                ]
        return found

    def figures(self) -> Iterator[GroupFigures]:
        """Yields the state, the members and the committed offsets of each group.

        None before the groups are read. Holds the lock for one group at a time.
        """
        with self._lock:
            entries = [] if self._refusal is not None else list(self._groups.values())
        for entry in entries:
            with self._lock:
                description, offsets = entry.group.describe(), entry.offsets.snapshot()
            if description.state is not GroupState.DEAD:
                yield GroupFigures(description=description, offsets=offsets)

    def budgets(self) -> list[Budget]:
        """Returns the memory of the groups' members, and of the ids that were given out."""
        memory = self._memory
        return [
            Budget("group_members", memory.held_bytes, memory.limit_bytes),
            Budget("group_ids", memory.reserved_bytes, limits.GROUPS_RESERVED_BYTES),
        ]

    def describe(self, group_id: str) -> Description | GroupError:
        """Handles DescribeGroups."""
        with self._lock:
            entry = self._existing(group_id)
            return entry if isinstance(entry, GroupError) else entry.group.describe()

    def delete(self, group_id: str) -> Future[GroupError | None]:
        """Handles DeleteGroups: deletes a group without members, and its offsets."""
        answer: Future[GroupError | None] = Future()
        for _ in range(_ATTEMPTS):
            with self._locked():
                entry = self._existing(group_id)
                error = entry if isinstance(entry, GroupError) else entry.group.check_delete()
                if error is not None or isinstance(entry, GroupError):
                    self._answer(answer, error)
                    return answer
                snapshot = _OffsetsSnapshot(entry)
            if self._delete(snapshot, lambda failed: self._answer(answer, failed)):
                return answer
        answer.set_result(GroupError.COORDINATOR_NOT_AVAILABLE)
        return answer

    def _delete(
        self, snapshot: _OffsetsSnapshot, settled: _Settle, *, if_deserted: bool = False
    ) -> bool:
        """Deletes a group; returns false, with no effect, if it changed since the snapshot.

        The group is gone for all clients at once, and back if that does not become durable. Do not
        call it under the lock: there may be many tombstones.
        """
        entry = snapshot.entry
        group_id = entry.group.group_id
        partitions = snapshot.partitions()
        tombstones: _Records = {
            **{OffsetKey(group_id, *each): None for each in partitions},
            GroupKey(group_id): None,
        }
        prepared = self._prepare(group_id, tombstones)

        def deleted(failed: GroupError | None) -> None:
            if failed is not None:
                self._bring_back(entry)
            settled(failed)

        with self._locked():
            if not self._is_unchanged(snapshot):
                return False
            if entry.group.check_delete() is not None:
                return False
            if if_deserted and not entry.group.is_deserted:
                return False
            del self._groups[group_id]
            entry.changes += 1
            self._submit(prepared, self._dropping(entry, partitions, deleted))
            self._apply(entry, entry.group.unload())
        return True

    def _is_unchanged(self, snapshot: _OffsetsSnapshot) -> bool:
        entry = snapshot.entry
        known = self._groups.get(entry.group.group_id)
        return known is entry and entry.changes == snapshot.changes

    def _bring_back(self, deleted: _Entry) -> None:
        """Restores a group whose deletion failed; changes of its successor take precedence."""
        group_id = deleted.group.group_id
        entry = self._groups.setdefault(group_id, self._new(group_id))
        entry.group.continue_from(deleted.group)
        for topic_partition, value in flatten(deleted.offsets.snapshot()):
            if entry.offsets.get(topic_partition) is None:
                entry.offsets.put(topic_partition, value)
        entry.changes += 1
        entry.changed_ms = max(deleted.changed_ms, entry.changed_ms)

    # -------------------------------------------------------------------------- time

    def tick(self, timeout_seconds: float) -> None:
        """Does the next work that is due, for which it waits at most `timeout_seconds`."""
        with self._lock:
            refusal = self._refusal
            next_ms = min(self._due[0][0], self._sweep_ms) if self._due else self._sweep_ms
        is_new = refusal is GroupError.COORDINATOR_LOAD_IN_PROGRESS
        led = self._topic.led() if refusal is None or is_new else self._loaded
        self._unload([n for n, epoch in self._loaded.items() if led.get(n) != epoch])
        is_behind = self._load_next(led)
        if is_new:
            while is_behind:
                is_behind = self._load_next(led)
            with self._lock:
                self._refusal = None
        is_busy = is_behind or self._to_sweep
        left_seconds = max((next_ms - self._now_ms()) / 1e3, 0.0) if not is_busy else 0.0
        try:
            item = self._storing.get(timeout=min(left_seconds, timeout_seconds))
        except queue.Empty:
            item = None
        if item is not None:
            self._settle(item)
        self._expire()

    def wake(self) -> None:
        """Ends the waiting of `tick`."""
        self._storing.put(None)

    def close(self) -> None:
        """Answers all waiting requests: this broker is no longer the coordinator."""
        with self._locked():
            self._refusal = GroupError.NOT_COORDINATOR
            for entry in self._groups.values():
                self._apply(entry, entry.group.unload())
            self._groups.clear()
        while not self._storing.empty():
            item = self._storing.get()
            if item is not None:
                self._settle(item)

    def _settle(self, item: _Storing) -> None:
        error = item.error
        if item.pending is not None:
            try:
                self._broker.wait(item.pending)
            except Exception as failure:
                error = logged_error(failure)
        with self._locked():
            steps = item.settle(error)
        while steps is not None:
            with self._locked():
                if next(steps, _ENDED) is _ENDED:
                    return

    def _expire(self) -> None:
        now_ms = self._now_ms()
        with self._locked():
            while self._due and self._due[0][0] <= now_ms:
                due_ms, group_id = heapq.heappop(self._due)
                entry = self._groups.get(group_id)
                if self._due_of.get(group_id) == due_ms:
                    del self._due_of[group_id]
                    if entry is not None:
                        self._apply(entry, entry.group.expire(now_ms))
                        self._drop_nothing(entry)
            if self._sweep_ms <= now_ms:
                self._sweep_ms = now_ms + _SWEEP_MS
                self._to_sweep = list(self._groups.values())
        if self._is_short and self._remove_gone_ms <= now_ms:
            self._remove_gone(now_ms)
        until_ms = now_ms + _SWEEP_STEP_MS  # after that, requests that wait for records are first
        while self._to_sweep and self._now_ms() < until_ms:
            entry = self._to_sweep.pop()
            try:
                self._sweep(entry)
            except ENDS_THE_BROKER:
                raise
            except Exception:  # the offsets of other groups expire all the same
                _log.exception("cannot sweep a group", group=entry.group.group_id)

    def _remove_gone(self, now_ms: int) -> None:
        """Removes members whose connection is closed, without waiting for their return."""
        with self._lock:
            self._is_short, self._remove_gone_ms = False, now_ms + _REMOVE_GONE_MS
            entries = list(self._groups.items())
            before_bytes = self._memory.held_bytes
        for group_id, entry in entries:
            with self._locked():
                if self._groups.get(group_id) is entry:
                    self._apply(entry, entry.group.expire(now_ms, is_short=True))
        _log.warning(
            "memory for members of groups is short",
            held_bytes=self._memory.held_bytes,
            limit_bytes=self._memory.limit_bytes,
            freed_bytes=before_bytes - self._memory.held_bytes,
        )

    def _sweep(self, entry: _Entry) -> None:
        """Removes offsets that have expired or whose topic is gone, and a group that is over.

        The module's docstring names the rule. The offsets are judged by a snapshot, because there
        may be many; where the group changes meanwhile, they remain until the next sweep.
        """
        oldest_ms = self._wall_ms() - self._settings.offsets_retention_minutes * 60_000
        with self._lock:
            snapshot = _OffsetsSnapshot(entry)
            group, subscribed = entry.group, subscribed_topics(entry.group)
            is_empty = group.state is GroupState.EMPTY
            left_ms = entry.changed_ms if is_empty and group.protocol_type is not None else -1
            is_over = group.is_deserted and not entry.committing
        topics = _TopicLookup(self._broker)
        committing: set[TopicPartition] = set().union(*snapshot.committing)
        count = 0
        expired: list[TopicPartition] = []
        for topic_partition, value in flatten(snapshot.offsets):
            count += 1
            if topic_partition not in committing and (
                not topics.has(topic_partition, value)
                or (
                    subscribed is not None
                    and topic_partition[0] not in subscribed
                    and max(value.commit_ms, left_ms) <= oldest_ms
                )
            ):
                expired.append(topic_partition)
        if is_over and len(expired) == count:
            self._delete(snapshot, _ignore, if_deserted=True)
        elif expired:
            self._erase(snapshot, expired, subscribed, _ignore)

    # -------------------------------------------------------------------------- loading

    def _unload(self, partitions: Collection[int]) -> None:
        """Forgets the groups of partitions that another broker has got, perhaps only for a time."""
        if not partitions:
            return
        with self._locked():
            for number in partitions:
                del self._loaded[number]
            for group_id, entry in list(self._groups.items()):
                if self._topic.find_partition(group_id) not in self._loaded:
                    self._apply(entry, entry.group.unload())
                    del self._groups[group_id]

    def _load_next(self, led: Mapping[int, int]) -> bool:
        """Reads one of the partitions that are led and not loaded; returns whether more are due.

        One after another, and each by itself: a partition that cannot be read, or takes long, does
        not hold up the groups of the others for longer than its own reading.
        """
        due = self._due_to_load(led)
        if due:
            self._load(due[0], led[due[0]])
        return len(due) > 1

    def _due_to_load(self, led: Mapping[int, int]) -> list[int]:
        """Returns the partitions that are led and not loaded, without those that were not read."""
        missing = [number for number in led if number not in self._loaded]
        return [number for number in missing if not self._retries.is_waiting(str(number))]

    def _load(self, number: int, leader_epoch: int) -> None:
        """Reads the groups that other brokers recorded in a partition of `__consumer_offsets`."""
        try:
            groups = self._restore(dict(self._topic.read(number)))
        except ENDS_THE_BROKER:
            raise
        except Exception as error:  # records of other programs may be of any kind
            self._retries.failed(str(number))
            reason = str(error) or repr(error)
            if self._failures.is_new(str(number), reason):
                _log.error("cannot read groups", partition=number, reason=reason)
            return
        self._retries.succeeded(str(number))
        self._failures.recovered(str(number))
        with self._locked():
            if number in self._loaded:  # it had no records, so that it is in use already
                for entry in groups.values():
                    entry.group.unload()
                return
            self._groups |= groups
            for entry in groups.values():
                self._schedule(entry)
            self._loaded[number] = leader_epoch

    def _restore(self, records: Mapping[Key, bytes]) -> dict[str, _Entry]:
        # All are decoded before the first member takes memory.
        known = {
            key: decode_group(data) for key, data in records.items() if isinstance(key, GroupKey)
        }
        offsets = {
            key: decode_offset(data) for key, data in records.items() if isinstance(key, OffsetKey)
        }
        groups: dict[str, _Entry] = {}
        now_ms = self._now_ms()
        for of_group, (record, changed_ms) in known.items():
            with self._lock:  # members take memory that those of other groups take too
                group = Group.restore(
                    of_group.group,
                    record,
                    now_ms,
                    settings=self._settings,
                    new_uuid=self._new_uuid,
                    memory=self._memory,
                )
            groups[of_group.group] = _Entry(group, changed_ms=changed_ms)
        for key, offset in offsets.items():
            if key.group not in groups:
                groups[key.group] = self._new(key.group)
            groups[key.group].offsets.put((key.topic, key.partition), offset)
        return groups

    # -------------------------------------------------------------------------- under the lock

    def _existing(self, group_id: str) -> _Entry | GroupError:
        refusal = self._refused_here(group_id)
        if refusal is not None:
            return refusal
        return self._groups.get(group_id, GroupError.GROUP_ID_NOT_FOUND)

    def _entry(self, group_id: str) -> _Entry:
        """Returns the group, or a new one that is not in `_groups` yet."""
        return self._groups.get(group_id) or self._new(group_id)

    def _new(self, group_id: str) -> _Entry:
        return _Entry(
            Group(group_id, settings=self._settings, new_uuid=self._new_uuid, memory=self._memory)
        )

    def _apply(self, entry: _Entry, result: GroupResult) -> None:
        """Sends the replies of a group's result, stores its record and schedules its deadline."""
        for token, reply in result.replies:
            assert isinstance(token, Future)
            self._answer(token, reply)
        if result.record is not None:
            self._store(entry, result.record)
        self._schedule(entry)

    def _store(self, entry: _Entry, record: GroupRecord) -> None:
        group, changed_ms = entry.group, self._wall_ms()

        def settle(error: GroupError | None) -> None:
            now_ms = self._now_ms()
            if error is None:
                entry.changed_ms = changed_ms
                self._apply(entry, group.stored(record, now_ms))
            else:
                self._apply(entry, group.store_failed(record, error, now_ms))

        records: _Records = {GroupKey(group.group_id): (record, changed_ms)}
        self._submit(self._prepare(group.group_id, records), settle)

    def _prepare(self, group_id: str, records: _Records) -> Append | GroupError:
        """Returns the encoded records, or why they cannot be encoded; needs no lock."""
        try:
            return self._topic.prepare(group_id, records)
        except Exception as failure:
            return logged_error(failure, group_id=group_id)

    def _submit(self, prepared: Append | GroupError, settle: _Settle) -> None:
        """Queues records; `settle` is called in the order of the calls, also after a failure.

        Raises nothing: callers have already changed their state.
        """
        if isinstance(prepared, GroupError):
            item = _Storing(None, prepared, settle)
        else:
            try:
                item = _Storing(self._topic.submit(prepared), None, settle)
            except Exception as failure:
                item = _Storing(None, logged_error(failure), settle)
        self._storing.put(item)

    def _schedule(self, entry: _Entry) -> None:
        """Has a group's next deadline handled by `tick`."""
        group_id, due_ms = entry.group.group_id, entry.group.next_deadline_ms()
        if due_ms is None or due_ms >= self._due_of.get(group_id, due_ms + 1):
            return
        self._due_of[group_id] = due_ms
        heapq.heappush(self._due, (due_ms, group_id))
        if self._due[0] == (due_ms, group_id):
            self._storing.put(None)

    def _answer(self, answer: Future[_T], value: _T) -> None:
        self._answers.append((answer, value))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock, and sets the answers given under it once it is released."""
        with self._lock:
            try:
                yield
            finally:
                answers, self._answers = self._answers, []
        for answer, value in answers:
            with contextlib.suppress(InvalidStateError):  # it was cancelled
                answer.set_result(value)

    def _now_ms(self) -> int:
        return round(self._clock.monotonic() * 1e3)

    def _wall_ms(self) -> int:
        return self._clock.now_us() // 1_000


class _OffsetsSnapshot:
    """The offsets of a group at one moment; create it under the lock."""

    __slots__ = ("changes", "committing", "entry", "offsets")

    def __init__(self, entry: _Entry) -> None:
        self.entry = entry
        self.changes = entry.changes
        self.offsets = entry.offsets.snapshot()
        self.committing = tuple(entry.committing.values())

    def has(self, partition: TopicPartition) -> bool:
        """Returns true if there is an offset, or one that is being stored."""
        return get_offset(self.offsets, partition) is not None or any(
            partition in each for each in self.committing
        )

    def partitions(self) -> list[TopicPartition]:
        """Returns all partitions that have an offset, or one that is being stored."""
        found = dict.fromkeys(each for each, _ in flatten(self.offsets))
        for each in self.committing:
            found.update(dict.fromkeys(each))
        return list(found)


class _TopicLookup:
    """Ids of topics, each looked up once while many offsets are judged."""

    __slots__ = ("_broker", "_known")

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._known: dict[str, tuple[str, int] | None] = {}

    def id_of(self, partition: TopicPartition) -> str | None:
        """Returns the id of the topic, or None if it does not have that partition."""
        topic, number = partition
        if topic not in self._known:
            try:
                self._known[topic] = self._broker.id_of(topic), self._broker.partition_count(topic)
            except errors.Invalid:
                self._known[topic] = None
        known = self._known[topic]
        return known[0] if known is not None and 0 <= number < known[1] else None

    def has(self, partition: TopicPartition, value: CommittedOffset) -> bool:
        """Returns true if the offset belongs to the topic that has its name now."""
        topic_id = self.id_of(partition)
        return topic_id is not None and value.topic_id in ("", topic_id)


_ENDED: Final = object()


def _java_length(text: str) -> int:
    """Returns the length as Kafka counts it, in UTF-16 code units."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


def _same_error(partitions: Iterable[TopicPartition], error: GroupError | None) -> Errors:
    return dict.fromkeys(partitions, error)


def _ignore(_error: GroupError | None) -> None:
    """Ignores a failure, where the next sweep tries again."""


def _recorded_names(request: JoinRequest) -> list[str | None]:
    """Returns the names in a request that a group would record."""
    return [
        request.member_id,
        request.instance_id,
        request.client_id,
        request.client_host,
        request.protocol_type,
        *(each.name for each in request.protocols),
    ]
