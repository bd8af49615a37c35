"""The coordinator of consumer groups: their members, and the offsets that they have committed.

A `Group` decides, and the topic `__consumer_offsets` stores; the coordinator connects the two. A
request whose effect must outlive this broker is answered once its record is durable, and a restart
restores the acked state. Committed offsets take effect from then on, for readers too.

Listeners call from any thread. A request that has to wait returns a future; cancelling it withdraws
the request from its group. One thread calls `tick` in a loop: it waits for the records being
stored, in order (`known_groups`), reads the groups of partitions that this broker now leads
(`loading`), and handles deadlines and retention (`expiry`).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
import structlog

from sparklog import limits
from sparklog.broker.broker import Broker
from sparklog.broker.counts import Budget
from sparklog.broker.groups.committed_offsets import (
    NO_OFFSETS,
    OffsetsByTopic,
    TopicPartition,
    flatten,
    get_offset,
    select,
)
from sparklog.broker.groups.descriptions import subscribed_topics
from sparklog.broker.groups.entries import GroupEntry, OffsetsSnapshot, TopicLookup
from sparklog.broker.groups.expiry import Expiry
from sparklog.broker.groups.group import Group
from sparklog.broker.groups.known_groups import KnownGroups, Records
from sparklog.broker.groups.loading import Loading
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
    OffsetKey,
)
from sparklog.settings import GroupSettings

OFFSET_METADATA_LENGTH = 4_096  # in UTF-16 code units, like Kafka's offset.metadata.max.bytes
_GROUPS_STEP = 256  # groups that are visited at a time under the lock

_log = structlog.get_logger("sparklog.groups")
_T = TypeVar("_T")
_ATTEMPTS: Final = 10
"""Attempts to delete offsets of a group that changes while its tombstones are encoded."""
Errors: TypeAlias = dict[TopicPartition, GroupError | None]
"""The error for each partition, or None."""


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """A commit of one partition: the next offset that the group will read."""

    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    topic_id: str = ""
    """If given, the offset belongs to this topic, and not to another of the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFigures:
    """The state of a group at one moment."""

    description: Description
    offsets: OffsetsByTopic


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
        self._known = KnownGroups(
            broker, self._topic, settings=settings, clock=clock, new_uuid=new_uuid
        )
        self._loading = Loading(self._known, broker, clock=clock)
        self._expiry = Expiry(self._known, broker)

    def open(self) -> None:
        """Creates `__consumer_offsets` if it is missing; call it before a group is used.

        May wait for storage. Raises what `TopicAdmin.create` raises.
        """
        self._loading.open()

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
        with self._known.locked():
            return self._refused(group_id) or self._known.get_or_new(group_id).group.heartbeat(
                member_id=member_id,
                instance_id=instance_id,
                generation=generation,
                now_ms=self._known.now_ms(),
            )

    def _handle(
        self,
        group_id: str,
        refuse: Callable[[GroupError], _T],
        event: Callable[[Group, Future[_T], int], GroupResult],
        names: Iterable[str | None] = (),
        more_bytes: int = 0,
    ) -> Future[_T]:
        """Has the group handle a request, after which members may use `more_bytes` more."""
        answer: Future[_T] = Future()
        known = self._known
        with known.locked():
            error = self._refused(group_id, names)
            if error is not None:
                known.answer(answer, refuse(error))
            else:
                entry = known.get_or_new(group_id)
                self._expiry.note_memory(more_bytes)
                result = event(entry.group, answer, known.now_ms())
                if entry.group.next_deadline_ms() is not None:
                    known.by_id[group_id] = entry
                known.apply(entry, result)
                known.forget_ids()
        answer.add_done_callback(lambda done: self._withdraw_cancelled(group_id, done))
        return answer

    def _refused(self, group_id: str, names: Iterable[str | None] = ()) -> GroupError | None:
        """Returns the reason a request is rejected before its group handles it, or None.

        `names`: those that the group would record. It rejects other names itself, as unknown.
        """
        refusal = self._loading.refused_here(group_id)
        if refusal is not None:
            return refusal
        if not consumer_offsets.fits(group_id):
            return GroupError.INVALID_GROUP_ID
        return None if all(map(consumer_offsets.fits, names)) else GroupError.INVALID_REQUEST

    def coordinator_of(self, group_id: str) -> int:
        """Returns the id of the broker that coordinates the group; it may be down."""
        return self._topic.leader_of(group_id)

    def _withdraw_cancelled(self, group_id: str, answer: Future[Any]) -> None:
        if answer.cancelled():
            with self._known.locked():
                entry = self._known.by_id.get(group_id)
                if entry is not None:
                    entry.group.cancel(answer, self._known.now_ms())
                    self._known.schedule(entry)

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

        Nonexistent partitions are rejected. A commit without a generation is for a group without
        members, from a client that assigns its partitions itself.
        """
        answer: Future[Errors] = Future()

        def refused() -> GroupError | None:
            error = self._refused(group_id)
            if error is None and group_id not in self._known.by_id and generation >= 0:
                error = GroupError.GROUP_ID_NOT_FOUND
            return error or self._known.get_or_new(group_id).group.check_commit(
                member_id=member_id,
                instance_id=instance_id,
                generation=generation,
                now_ms=self._known.now_ms(),
            )

        with self._known.locked():
            error = refused()
        if error is not None:
            answer.set_result(_same_error(offsets, error))
            return answer
        # Slow work on many offsets needs no lock; the group may change meanwhile.
        refusals, values = self._checked(offsets)
        if not values:
            answer.set_result(refusals)
            return answer
        records: Records = {OffsetKey(group_id, *each): value for each, value in values.items()}
        prepared = self._known.prepare(group_id, records)
        committed = {**refusals, **_same_error(values, None)}
        with self._known.locked():
            error = refused()
            if error is not None:
                self._known.answer(answer, _same_error(offsets, error))
                return answer
            entry = self._known.by_id.setdefault(group_id, self._known.get_or_new(group_id))
            entry.committing[answer] = values
            entry.changes += 1

            def settle(failed: GroupError | None) -> Iterator[None]:
                if failed is None:  # even while the group is being deleted, which may fail
                    remaining = iter(values.items())
                    while portion := list(islice(remaining, limits.GROUP_OFFSETS_STEP)):
                        for topic_partition, value in portion:
                            entry.offsets.put(topic_partition, value)
                        yield
                del entry.committing[answer]
                entry.changes += 1
                self._known.answer(
                    answer, committed if failed is None else refusals | _same_error(values, failed)
                )

            self._known.submit(prepared, settle)
        return answer

    def _checked(
        self, offsets: Mapping[TopicPartition, Commit]
    ) -> tuple[Errors, dict[TopicPartition, CommittedOffset]]:
        """Returns the partitions that are rejected, and the offsets of the others to record."""
        refusals: Errors = {}
        values: dict[TopicPartition, CommittedOffset] = {}
        topics = TopicLookup(self._broker)
        commit_ms = self._known.wall_ms()
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
            partitions: the partitions to return; None for all.
        """
        found: dict[TopicPartition, CommittedOffset]
        with self._known.locked():
            refusal = self._loading.refused_here(group_id)
            if refusal is not None:
                return refusal
            offsets = self._known.get_or_new(group_id).offsets
            few = partitions is not None and len(partitions) <= limits.GROUP_OFFSETS_STEP
            snapshot = NO_OFFSETS if few else offsets.snapshot()
            found = select(offsets.get, partitions) if few and partitions is not None else {}
        if not few and partitions is not None:
            found = select(partial(get_offset, snapshot), partitions)
        elif not few:
            found = dict(flatten(snapshot))
        topics = TopicLookup(self._broker)
        return {each: value for each, value in found.items() if topics.has(each, value)}

    def has_many_offsets(self, group_id: str) -> bool:
        """Returns true if fetching all offsets of the group takes a long time."""
        with self._known.locked():
            entry = self._known.by_id.get(group_id)
            return entry is not None and len(entry.offsets) > limits.GROUP_OFFSETS_STEP

    def delete_offsets(self, group_id: str, partitions: Iterable[TopicPartition]) -> Future[Errors]:
        """Handles OffsetDelete, for topics that no member subscribes to."""
        answer: Future[Errors] = Future()
        wanted = list(partitions)
        if not group_id:
            answer.set_result(_same_error(wanted, GroupError.INVALID_GROUP_ID))
            return answer
        for _ in range(_ATTEMPTS):
            with self._known.locked():
                entry = self._existing(group_id)
                if isinstance(entry, GroupError):
                    self._known.answer(answer, _same_error(wanted, entry))
                    return answer
                subscribed = subscribed_topics(entry.group)
                if subscribed is None:
                    self._known.answer(answer, _same_error(wanted, GroupError.NON_EMPTY_GROUP))
                    return answer
                snapshot = OffsetsSnapshot(entry)
            refusals: Errors = {
                each: GroupError.GROUP_SUBSCRIBED_TO_TOPIC if each[0] in subscribed else None
                for each in wanted
            }
            free = [each for each, refusal in refusals.items() if refusal is None]
            settled = partial(self._offsets_deleted, answer, refusals, free)
            if self._known.erase(snapshot, [*filter(snapshot.has, free)], subscribed, settled):
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
        self._known.answer(answer, refusals | _same_error(free, failed))

    # -------------------------------------------------------------------------- administration

    def groups(self) -> list[Description] | GroupError:
        """Handles ListGroups: returns all groups, without their members."""
        found: list[Description] = []
        with self._known.locked():
            if self._loading.refusal is not None:
                return self._loading.refusal
            if self._loading.is_behind():
                return GroupError.COORDINATOR_LOAD_IN_PROGRESS
            entries = list(self._known.by_id.values())
        for first in range(0, len(entries), _GROUPS_STEP):
            with self._known.locked():
                found += [
                    each.group.describe(with_members=False)
                    for each in entries[first : first + _GROUPS_STEP]
                    if each.group.state is not GroupState.DEAD
                ]
        return found

    def figures(self) -> Iterator[GroupFigures]:
        """Yields the state, the members and the committed offsets of each group.

        Yields nothing before the groups have been read. Holds the lock for one group at a time.
        """
        with self._known.locked():
            entries = [] if self._loading.refusal is not None else list(self._known.by_id.values())
        for entry in entries:
            with self._known.locked():
                description, offsets = entry.group.describe(), entry.offsets.snapshot()
            if description.state is not GroupState.DEAD:
                yield GroupFigures(description=description, offsets=offsets)

    def budgets(self) -> list[Budget]:
        """Returns the memory of the groups' members, and of the ids handed out."""
        memory = self._known.memory
        return [
            Budget("group_members", memory.held_bytes, memory.limit_bytes),
            Budget("group_ids", memory.reserved_bytes, limits.GROUPS_RESERVED_BYTES),
        ]

    def describe(self, group_id: str) -> Description | GroupError:
        """Handles DescribeGroups."""
        with self._known.locked():
            entry = self._existing(group_id)
            return entry if isinstance(entry, GroupError) else entry.group.describe()

    def delete(self, group_id: str) -> Future[GroupError | None]:
        """Handles DeleteGroups: deletes a group without members, and its offsets."""
        answer: Future[GroupError | None] = Future()
        for _ in range(_ATTEMPTS):
            with self._known.locked():
                entry = self._existing(group_id)
                error = entry if isinstance(entry, GroupError) else entry.group.check_delete()
                if error is not None or isinstance(entry, GroupError):
                    self._known.answer(answer, error)
                    return answer
                snapshot = OffsetsSnapshot(entry)
            if self._known.delete(snapshot, lambda failed: self._known.answer(answer, failed)):
                return answer
        answer.set_result(GroupError.COORDINATOR_NOT_AVAILABLE)
        return answer

    # -------------------------------------------------------------------------- time

    def tick(self, timeout_seconds: float) -> None:
        """Does the next due work, waiting for it for at most `timeout_seconds`."""
        is_behind = self._loading.tick()
        left_seconds = 0.0 if is_behind else self._expiry.wait_seconds()
        self._known.settle_next(min(left_seconds, timeout_seconds))
        self._expiry.tick()

    def wake(self) -> None:
        """Ends the wait in `tick`."""
        self._known.wake()

    def close(self) -> None:
        """Answers all waiting requests: this broker is no longer the coordinator."""
        known = self._known
        with known.locked():
            self._loading.refusal = GroupError.NOT_COORDINATOR
            for entry in known.by_id.values():
                known.apply(entry, entry.group.unload())
            known.by_id.clear()
        known.settle_all()

    def _existing(self, group_id: str) -> GroupEntry | GroupError:
        refusal = self._loading.refused_here(group_id)
        if refusal is not None:
            return refusal
        return self._known.by_id.get(group_id, GroupError.GROUP_ID_NOT_FOUND)


def _java_length(text: str) -> int:
    """Returns the length as Kafka counts it, in UTF-16 code units."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


def _same_error(partitions: Iterable[TopicPartition], error: GroupError | None) -> Errors:
    return dict.fromkeys(partitions, error)


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
