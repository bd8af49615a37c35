"""The coordinator of consumer groups: their members, and the offsets that they have committed.

A `Group` decides; the topic `__consumer_offsets` remembers; here the two are joined. Whatever must
outlive this broker is answered once its record is durable, and a restart finds it as it was acked.
What a group has committed counts from then on, for readers too.

Doors call from any thread. What has to wait comes as a future, and whoever cancels one leaves its
group's waiting room. One thread calls `tick` over and over: it waits for the records that are under
way, in their order, and does what falls due.

Which offsets expire is Kafka's rule (KIP-211): all of a group that has had no members for the
retention; of a group that subscribes, those of topics that no member wants, once they are so old;
and of one that never had members, each that is so old.
"""

from __future__ import annotations

import contextlib
import heapq
import queue
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
import structlog

from sparklog import consumeroffsets, errors, limits
from sparklog.broker.core import Append, Core, Ticket
from sparklog.broker.groups import (
    Description,
    Group,
    GroupError,
    GroupState,
    JoinReply,
    JoinRequest,
    Leaver,
    LeaveReply,
    Outcome,
    SyncReply,
    SyncRequest,
)
from sparklog.broker.offsets import OffsetsTopic
from sparklog.clock import Clock
from sparklog.consumeroffsets import (
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

_log = structlog.get_logger("sparklog.groups")
_T = TypeVar("_T")
_CONSUMERS: Final = "consumer"
"""The protocol type of groups whose members subscribe to topics."""
_SWEEP_STEP_MS: Final = 50
_ATTEMPTS: Final = 10
"""To erase offsets of a group that changes while its tombstones are encoded."""
_SWEEP_MS: Final = round(limits.OFFSETS_RETENTION_CHECK_SECONDS * 1e3)

TopicPartition: TypeAlias = tuple[str, int]
"""A topic's name and a partition's number."""
Errors: TypeAlias = dict[TopicPartition, GroupError | None]
_Settle: TypeAlias = Callable[[GroupError | None], Iterator[None] | None]
"""What follows when records are durable, or with an error when they will not be; under the lock.

What takes long gives an iterator, each step of which is taken under the lock.
"""
_Records: TypeAlias = Mapping[Key, Value | None]
_ByTopic: TypeAlias = Mapping[str, Mapping[int, CommittedOffset]]


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """What a group says of one partition: the next offset that it wants."""

    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    topic_id: str = ""
    """Given: the offset is one of that topic, whatever has its name now."""


class _Offsets:
    """What a group has committed, by topic and partition.

    A topic's part that a snapshot holds is copied before it changes, so that a snapshot costs a
    reference for each topic, however many partitions there are.
    """

    __slots__ = ("_own", "_topics")

    def __init__(self) -> None:
        self._topics: dict[str, dict[int, CommittedOffset]] = {}
        self._own: set[str] = set()
        """Topics whose part no snapshot holds."""

    def get(self, place: TopicPartition) -> CommittedOffset | None:
        return self._topics.get(place[0], _NOTHING).get(place[1])

    def put(self, place: TopicPartition, value: CommittedOffset) -> None:
        self._writable(place[0])[place[1]] = value

    def drop(self, place: TopicPartition) -> None:
        """Removes one, if it is there."""
        topic, partition = place
        if self.get(place) is not None:
            of_topic = self._writable(topic)
            del of_topic[partition]
            if not of_topic:
                del self._topics[topic]
                self._own.discard(topic)

    def _writable(self, topic: str) -> dict[int, CommittedOffset]:
        if topic not in self._own:
            self._own.add(topic)
            self._topics[topic] = dict(self._topics.get(topic, _NOTHING))
        return self._topics[topic]

    def snapshot(self) -> _ByTopic:
        """All of it, as it is now and will stay."""
        self._own.clear()
        return dict(self._topics)

    def __len__(self) -> int:
        return sum(map(len, self._topics.values()))


_NOTHING: Final[Mapping[int, CommittedOffset]] = {}


@dataclass(slots=True)
class _Entry:
    """A group with what it has committed."""

    group: Group
    offsets: _Offsets = field(default_factory=_Offsets)
    committing: dict[object, Mapping[TopicPartition, CommittedOffset]] = field(default_factory=dict)
    """Offsets whose records are under way, of each commit."""
    changes: int = 0
    """Another number each time that its offsets may have changed."""
    changed_ms: int = -1
    """When it was last recorded, in ms since the Unix epoch."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """Records on their way, or why they are not, and what follows."""

    ticket: Ticket | None
    error: GroupError | None
    settle: _Settle


class Coordinator:
    """Coordinates all groups over `core`'s topics."""

    def __init__(
        self,
        core: Core,
        *,
        settings: GroupSettings,
        clock: Clock,
        new_uuid: Callable[[], str] = lambda: str(uuid.uuid4()),
    ) -> None:
        self._core = core
        self._topic = OffsetsTopic(core)
        self._settings = settings
        self._clock = clock
        self._new_uuid = new_uuid
        self._lock = threading.Lock()
        self._groups: dict[str, _Entry] = {}
        self._refusal: GroupError | None = GroupError.COORDINATOR_LOAD_IN_PROGRESS
        """What everybody is answered before the groups are read, and after the end."""
        self._due: list[tuple[int, str]] = []
        """A heap of (ms, group): when to look whether something is due."""
        self._looks: dict[str, int] = {}
        """Of each group, the earliest of these."""
        self._sweep_ms = self._now_ms() + _SWEEP_MS
        self._to_sweep: list[_Entry] = []
        """Groups whose offsets are still to be looked through."""
        self._under_way: queue.SimpleQueue[_UnderWay | None] = queue.SimpleQueue()
        """None wakes the thread that waits for it."""
        self._answers: list[tuple[Future[Any], Any]] = []
        """Given once the lock is released: who is answered may call again at once."""

    def open(self) -> None:
        """Creates `__consumer_offsets` where it is missing; to be called before a group is used.

        May wait for storage. Raises what `Core.create_topic` raises.
        """
        self._topic.ensure()

    # -------------------------------------------------------------------------- members

    def join(self, group_id: str, request: JoinRequest) -> Future[JoinReply]:
        """JoinGroup."""
        return self._event(
            group_id,
            lambda error: JoinReply(error=error, member_id=request.member_id),
            lambda group, token, now_ms: group.join(token, request, now_ms),
            names=_names(request),
        )

    def sync(self, group_id: str, request: SyncRequest) -> Future[SyncReply]:
        """SyncGroup."""
        return self._event(
            group_id,
            lambda error: SyncReply(error=error),
            lambda group, token, now_ms: group.sync(token, request, now_ms),
        )

    def leave(self, group_id: str, leavers: Iterable[Leaver]) -> Future[LeaveReply]:
        """LeaveGroup."""
        return self._event(
            group_id,
            lambda error: LeaveReply(error=error),
            lambda group, token, now_ms: group.leave(token, leavers, now_ms),
        )

    def heartbeat(
        self, group_id: str, *, member_id: str, instance_id: str | None, generation: int
    ) -> GroupError | None:
        """Heartbeat; None: the member goes on."""
        with self._lock:
            return self._entrance(group_id) or self._entry(group_id).group.heartbeat(
                member_id=member_id,
                instance_id=instance_id,
                generation=generation,
                now_ms=self._now_ms(),
            )

    def _event(
        self,
        group_id: str,
        refused: Callable[[GroupError], _T],
        event: Callable[[Group, Future[_T], int], Outcome],
        names: Iterable[str | None] = (),
    ) -> Future[_T]:
        answer: Future[_T] = Future()
        with self._locked():
            error = self._entrance(group_id, names)
            if error is not None:
                self._answer(answer, refused(error))
            else:
                entry = self._entry(group_id)
                outcome = event(entry.group, answer, self._now_ms())
                if entry.group.next_deadline_ms() is not None:
                    self._groups[group_id] = entry
                self._follow(entry, outcome)
        answer.add_done_callback(lambda done: self._left(group_id, done))
        return answer

    def _entrance(self, group_id: str, names: Iterable[str | None] = ()) -> GroupError | None:
        """Why a request is refused before its group hears of it.

        `names`: what the group would record. Others it does not know, and says so itself.
        """
        if self._refusal is not None:
            return self._refusal
        if not consumeroffsets.fits(group_id):
            return GroupError.INVALID_GROUP_ID
        return None if all(map(consumeroffsets.fits, names)) else GroupError.INVALID_REQUEST

    def _left(self, group_id: str, answer: Future[Any]) -> None:
        if answer.cancelled():
            with self._lock:
                entry = self._groups.get(group_id)
                if entry is not None:
                    entry.group.cancel(answer, self._now_ms())
                    self._look_when_due(entry)

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
        """OffsetCommit. Each partition's own error, or None; whether the topic is there is checked.

        Without a generation: for a group that has no members, by whoever assigns its partitions
        itself.
        """
        answer: Future[Errors] = Future()

        def refusal() -> GroupError | None:
            error = self._entrance(group_id)
            if error is None and group_id not in self._groups and generation >= 0:
                error = GroupError.GROUP_ID_NOT_FOUND
            return error or self._entry(group_id).group.check_commit(
                member_id=member_id,
                instance_id=instance_id,
                generation=generation,
                now_ms=self._now_ms(),
            )

        with self._lock:
            error = refusal()
        if error is not None:
            answer.set_result(_each(offsets, error))
            return answer
        # What takes long for many offsets is done without the lock; the group may change meanwhile.
        found, values = self._judged(offsets)
        if not values:
            answer.set_result(found)
            return answer
        records: _Records = {OffsetKey(group_id, *place): each for place, each in values.items()}
        prepared = self._prepared(group_id, records)
        done = {**found, **_each(values, None)}
        with self._locked():
            error = refusal()
            if error is not None:
                self._answer(answer, _each(offsets, error))
                return answer
            entry = self._groups.setdefault(group_id, self._entry(group_id))
            entry.committing[answer] = values
            entry.changes += 1

            def settle(failed: GroupError | None) -> Iterator[None]:
                if failed is None:  # though it is being deleted, which may fail
                    left = iter(values.items())
                    while portion := list(islice(left, limits.GROUP_OFFSETS_STEP)):
                        for place, value in portion:
                            entry.offsets.put(place, value)
                        yield
                del entry.committing[answer]
                entry.changes += 1
                self._answer(answer, done if failed is None else found | _each(values, failed))

            self._submit(prepared, settle)
        return answer

    def _judged(
        self, offsets: Mapping[TopicPartition, Commit]
    ) -> tuple[Errors, dict[TopicPartition, CommittedOffset]]:
        """(what is refused, the others as they are recorded)."""
        found: Errors = {}
        values: dict[TopicPartition, CommittedOffset] = {}
        topics = _Topics(self._core)
        commit_ms = self._wall_ms()
        for place, commit in offsets.items():
            topic_id = topics.id_of(place)
            if _java_length(commit.metadata) > limits.OFFSET_METADATA_LENGTH:
                found[place] = GroupError.OFFSET_METADATA_TOO_LARGE
            elif topic_id is None or commit.topic_id not in ("", topic_id):
                found[place] = GroupError.UNKNOWN_TOPIC_OR_PARTITION
            else:
                values[place] = CommittedOffset(
                    offset=commit.offset,
                    leader_epoch=commit.leader_epoch,
                    metadata=commit.metadata,
                    commit_ms=commit_ms,
                    topic_id=topic_id,
                )
        return found, values

    def committed(
        self, group_id: str, places: Sequence[TopicPartition] | None = None
    ) -> dict[TopicPartition, CommittedOffset] | GroupError:
        """OffsetFetch: what the group has committed of topics that are still the same.

        Args:
            places: the partitions that are looked for; None: all.
        """
        found: dict[TopicPartition, CommittedOffset]
        with self._lock:
            if self._refusal is not None:
                return self._refusal
            offsets = self._entry(group_id).offsets
            few = places is not None and len(places) <= limits.GROUP_OFFSETS_STEP
            snapshot = _NO_TOPICS if few else offsets.snapshot()
            found = _looked_up(offsets.get, places) if few and places is not None else {}
        if not few and places is not None:
            found = _looked_up(lambda it: snapshot.get(it[0], _NOTHING).get(it[1]), places)
        elif not few:
            found = dict(_flat(snapshot))
        topics = _Topics(self._core)
        return {place: value for place, value in found.items() if topics.has(place, value)}

    def has_many_offsets(self, group_id: str) -> bool:
        """Whether it takes long to fetch all offsets of the group."""
        with self._lock:
            entry = self._groups.get(group_id)
            return entry is not None and len(entry.offsets) > limits.GROUP_OFFSETS_STEP

    def forget(self, group_id: str, places: Iterable[TopicPartition]) -> Future[Errors]:
        """OffsetDelete: of topics that no member subscribes to."""
        answer: Future[Errors] = Future()
        wanted = list(places)
        for _ in range(_ATTEMPTS):
            with self._locked():
                entry = self._found(group_id)
                if isinstance(entry, GroupError):
                    self._answer(answer, _each(wanted, entry))
                    return answer
                subscribed = _subscribed(entry.group)
                if subscribed is None:
                    self._answer(answer, _each(wanted, GroupError.NON_EMPTY_GROUP))
                    return answer
                leaving = _Leaving(entry)
            found: Errors = {
                place: GroupError.GROUP_SUBSCRIBED_TO_TOPIC if place[0] in subscribed else None
                for place in wanted
            }
            free = [place for place, refusal in found.items() if refusal is None]
            settled = partial(self._forgotten, answer, found, free)
            if self._erase(leaving, filter(leaving.has, free), subscribed, settled):
                return answer
        answer.set_result(_each(wanted, GroupError.COORDINATOR_NOT_AVAILABLE))
        return answer

    def _forgotten(
        self,
        answer: Future[Errors],
        found: Errors,
        free: Sequence[TopicPartition],
        failed: GroupError | None,
    ) -> None:
        self._answer(answer, found | _each(free, failed))

    def _erase(
        self,
        leaving: _Leaving,
        places: Iterable[TopicPartition],
        subscribed: frozenset[str] | None,
        then: _Settle,
    ) -> bool:
        """Takes offsets out, those under way too; False where the group has changed since then."""
        entry, gone = leaving.entry, list(places)
        group_id = entry.group.group_id
        tombstones: _Records = {OffsetKey(group_id, *each): None for each in gone}
        prepared = self._prepared(group_id, tombstones) if gone else None
        with self._locked():
            known = self._groups.get(group_id)
            if known is not entry or entry.changes != leaving.changes:
                return False
            if _subscribed(entry.group) != subscribed:
                return False
            if prepared is None:
                then(None)
            else:
                entry.changes += 1
                self._submit(prepared, self._erasing(entry, gone, then))
        return True

    def _erasing(self, entry: _Entry, gone: Sequence[TopicPartition], then: _Settle) -> _Settle:
        def settle(failed: GroupError | None) -> Iterator[None]:
            for first in range(0, len(gone) if failed is None else 0, limits.GROUP_OFFSETS_STEP):
                for each in gone[first : first + limits.GROUP_OFFSETS_STEP]:
                    entry.offsets.drop(each)
                yield
            entry.changes += 1
            then(failed)

        return settle

    # -------------------------------------------------------------------------- administration

    def groups(self) -> list[Description] | GroupError:
        """ListGroups: all of them, without their members."""
        found: list[Description] = []
        with self._lock:
            if self._refusal is not None:
                return self._refusal
            entries = list(self._groups.values())
        for first in range(0, len(entries), limits.GROUPS_STEP):
            with self._lock:
                found += [
                    each.group.describe(with_members=False)
                    for each in entries[first : first + limits.GROUPS_STEP]
                    if each.group.state is not GroupState.DEAD
                ]
        return found

    def describe(self, group_id: str) -> Description | GroupError:
        """DescribeGroups."""
        with self._lock:
            entry = self._found(group_id)
            return entry if isinstance(entry, GroupError) else entry.group.describe()

    def delete(self, group_id: str) -> Future[GroupError | None]:
        """DeleteGroups: a group without members, and all that it has committed."""
        answer: Future[GroupError | None] = Future()
        for _ in range(_ATTEMPTS):
            with self._locked():
                entry = self._found(group_id)
                error = entry if isinstance(entry, GroupError) else entry.group.check_delete()
                if error is not None or isinstance(entry, GroupError):
                    self._answer(answer, error)
                    return answer
                leaving = _Leaving(entry)
            if self._delete(leaving, lambda failed: self._answer(answer, failed)):
                return answer
        answer.set_result(GroupError.COORDINATOR_NOT_AVAILABLE)
        return answer

    def _delete(self, leaving: _Leaving, then: _Settle, *, if_deserted: bool = False) -> bool:
        """Deletes a group; False where it has changed since then, and nothing was done.

        The group is gone for everybody at once, and back should that not become durable. Not to be
        called under the lock: its tombstones may be many.
        """
        entry = leaving.entry
        group_id = entry.group.group_id
        places = leaving.places()
        tombstones: _Records = {
            **{OffsetKey(group_id, *each): None for each in places},
            GroupKey(group_id): None,
        }
        prepared = self._prepared(group_id, tombstones)

        def deleted(failed: GroupError | None) -> None:
            if failed is not None:
                self._bring_back(entry)
            then(failed)

        with self._locked():
            known = self._groups.get(group_id)
            if known is not entry or entry.changes != leaving.changes:
                return False
            if entry.group.check_delete() is not None:
                return False
            if if_deserted and not entry.group.is_deserted:
                return False
            del self._groups[group_id]
            entry.changes += 1
            self._submit(prepared, self._erasing(entry, places, deleted))
            self._follow(entry, entry.group.unload())
        return True

    def _bring_back(self, deleted: _Entry) -> None:
        """What has happened since then to a group of that name stands."""
        group_id = deleted.group.group_id
        back = self._groups.setdefault(group_id, self._new(group_id))
        back.group.succeed(deleted.group)
        for place, value in _flat(deleted.offsets.snapshot()):
            if back.offsets.get(place) is None:
                back.offsets.put(place, value)
        back.changes += 1
        back.changed_ms = max(deleted.changed_ms, back.changed_ms)

    # -------------------------------------------------------------------------- time

    def tick(self, timeout_seconds: float) -> None:
        """Does what is to be done next; waits for that at most so long."""
        with self._lock:
            refusal = self._refusal
            next_ms = min(self._due[0][0], self._sweep_ms) if self._due else self._sweep_ms
        if refusal is GroupError.COORDINATOR_LOAD_IN_PROGRESS and not self._load():
            self._clock.sleep(timeout_seconds)
            return
        left_seconds = max((next_ms - self._now_ms()) / 1e3, 0.0) if not self._to_sweep else 0.0
        try:
            item = self._under_way.get(timeout=min(left_seconds, timeout_seconds))
        except queue.Empty:
            item = None
        if item is not None:
            self._settle(item)
        self._expire()

    def close(self) -> None:
        """Tells everybody who waits that this broker coordinates nothing any more."""
        with self._locked():
            self._refusal = GroupError.NOT_COORDINATOR
            for entry in self._groups.values():
                self._follow(entry, entry.group.unload())
            self._groups.clear()
        while not self._under_way.empty():
            item = self._under_way.get()
            if item is not None:
                self._settle(item)

    def _settle(self, item: _UnderWay) -> None:
        error = item.error
        if item.ticket is not None:
            try:
                self._core.wait(item.ticket)
            except Exception as failure:
                error = _of(failure)
                _log.warning("a group's record is not durable", reason=str(failure))
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
                if self._looks.get(group_id) == due_ms:
                    del self._looks[group_id]
                    if entry is not None:
                        self._follow(entry, entry.group.expire(now_ms))
            if self._sweep_ms <= now_ms:
                self._sweep_ms = now_ms + _SWEEP_MS
                self._to_sweep = list(self._groups.values())
        until_ms = now_ms + _SWEEP_STEP_MS  # then those come first who wait for records
        while self._to_sweep and self._now_ms() < until_ms:
            self._sweep(self._to_sweep.pop())

    def _sweep(self, entry: _Entry) -> None:
        """Takes out what has expired or is of a topic that is gone, and the group when it is over.

        Which offsets expire: the module's docstring. What is looked at is a snapshot, as there may
        be many; where the group has changed meanwhile, the next time will do as well.
        """
        oldest_ms = self._wall_ms() - self._settings.offsets_retention_minutes * 60_000
        with self._lock:
            leaving = _Leaving(entry)
            group, subscribed = entry.group, _subscribed(entry.group)
            is_empty = group.state is GroupState.EMPTY
            left_ms = entry.changed_ms if is_empty and group.protocol_type is not None else -1
            is_over = group.is_deserted and not entry.committing
        topics = _Topics(self._core)
        committing: set[TopicPartition] = set().union(*leaving.committing)
        count = 0
        expired: list[TopicPartition] = []
        for place, value in _flat(leaving.offsets):
            count += 1
            if place not in committing and (
                not topics.has(place, value)
                or (
                    subscribed is not None
                    and place[0] not in subscribed
                    and max(value.commit_ms, left_ms) <= oldest_ms
                )
            ):
                expired.append(place)
        if is_over and len(expired) == count:
            self._delete(leaving, _ignore, if_deserted=True)
        elif expired:
            self._erase(leaving, expired, subscribed, _ignore)

    # -------------------------------------------------------------------------- loading

    def _load(self) -> bool:
        """Finds what predecessors have left; False: not yet."""
        try:
            groups = self._restored(dict(self._topic.read()))
        except (errors.SparklogError, OSError) as error:
            _log.error("cannot read the groups", reason=str(error))
            return False
        with self._locked():
            self._groups, self._refusal = groups, None
            for entry in groups.values():
                self._look_when_due(entry)
        return True

    def _restored(self, stands: Mapping[Key, bytes]) -> dict[str, _Entry]:
        groups: dict[str, _Entry] = {}
        now_ms = self._now_ms()
        for key, value in stands.items():
            if isinstance(key, GroupKey):
                record, changed_ms = decode_group(value)
                group = Group.restore(
                    key.group, record, now_ms, settings=self._settings, new_uuid=self._new_uuid
                )
                groups[key.group] = _Entry(group, changed_ms=changed_ms)
        for key, value in stands.items():
            if isinstance(key, OffsetKey):
                if key.group not in groups:
                    groups[key.group] = self._new(key.group)
                groups[key.group].offsets.put((key.topic, key.partition), decode_offset(value))
        return groups

    # -------------------------------------------------------------------------- under the lock

    def _found(self, group_id: str) -> _Entry | GroupError:
        """The group, if there is one."""
        if self._refusal is not None:
            return self._refusal
        return self._groups.get(group_id, GroupError.GROUP_ID_NOT_FOUND)

    def _entry(self, group_id: str) -> _Entry:
        """The group, or a new one, which counts once it is in `_groups`."""
        return self._groups.get(group_id) or self._new(group_id)

    def _new(self, group_id: str) -> _Entry:
        return _Entry(Group(group_id, settings=self._settings, new_uuid=self._new_uuid))

    def _follow(self, entry: _Entry, outcome: Outcome) -> None:
        """Does what the group has decided."""
        for token, reply in outcome.replies:
            assert isinstance(token, Future)
            self._answer(token, reply)
        if outcome.record is not None:
            self._record(entry, outcome.record)
        self._look_when_due(entry)

    def _record(self, entry: _Entry, record: GroupRecord) -> None:
        group, changed_ms = entry.group, self._wall_ms()

        def settle(error: GroupError | None) -> None:
            now_ms = self._now_ms()
            if error is None:
                entry.changed_ms = changed_ms
                self._follow(entry, group.stored(record, now_ms))
            else:
                self._follow(entry, group.store_failed(record, error, now_ms))

        self._store(group.group_id, {GroupKey(group.group_id): (record, changed_ms)}, settle)

    def _store(self, group_id: str, records: _Records, settle: _Settle) -> None:
        self._submit(self._prepared(group_id, records), settle)

    def _prepared(self, group_id: str, records: _Records) -> Append | GroupError:
        """The records, encoded, or why they cannot be; needs no lock."""
        try:
            return self._topic.prepare(group_id, records)
        except Exception as failure:
            return _refused(group_id, failure)

    def _submit(self, prepared: Append | GroupError, settle: _Settle) -> None:
        """`settle` comes in the order of the calls, whether this succeeds or not: raises nothing,
        as who calls has begun to count on that.
        """
        if isinstance(prepared, GroupError):
            item = _UnderWay(None, prepared, settle)
        else:
            try:
                item = _UnderWay(self._topic.submit(prepared), None, settle)
            except Exception as failure:
                item = _UnderWay(None, _refused("", failure), settle)
        self._under_way.put(item)

    def _look_when_due(self, entry: _Entry) -> None:
        group_id, due_ms = entry.group.group_id, entry.group.next_deadline_ms()
        if due_ms is None or due_ms >= self._looks.get(group_id, due_ms + 1):
            return
        self._looks[group_id] = due_ms
        heapq.heappush(self._due, (due_ms, group_id))
        if self._due[0] == (due_ms, group_id):
            self._under_way.put(None)

    def _answer(self, answer: Future[_T], value: _T) -> None:
        self._answers.append((answer, value))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The lock, and after it the answers that were given under it."""
        with self._lock:
            try:
                yield
            finally:
                answers, self._answers = self._answers, []
        for answer, value in answers:
            with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
                answer.set_result(value)

    def _now_ms(self) -> int:
        return round(self._clock.monotonic() * 1e3)

    def _wall_ms(self) -> int:
        return self._clock.now_us() // 1_000


class _Leaving:
    """A group's offsets as they were when it was looked at, under the lock."""

    __slots__ = ("changes", "committing", "entry", "offsets")

    def __init__(self, entry: _Entry) -> None:
        self.entry = entry
        self.changes = entry.changes
        self.offsets = entry.offsets.snapshot()
        self.committing = tuple(entry.committing.values())

    def has(self, place: TopicPartition) -> bool:
        """Whether there is an offset, or will be when its record is durable."""
        return place[1] in self.offsets.get(place[0], _NOTHING) or any(
            place in each for each in self.committing
        )

    def places(self) -> list[TopicPartition]:
        """All that have an offset, or one whose record is under way."""
        found = dict.fromkeys(place for place, _ in _flat(self.offsets))
        for each in self.committing:
            found.update(dict.fromkeys(each))
        return list(found)


class _Topics:
    """Topics as they are while many offsets are judged: each is looked at once."""

    __slots__ = ("_core", "_known")

    def __init__(self, core: Core) -> None:
        self._core = core
        self._known: dict[str, tuple[str, int] | None] = {}

    def id_of(self, place: TopicPartition) -> str | None:
        """The id of the topic, if it has that partition."""
        topic, partition = place
        if topic not in self._known:
            try:
                self._known[topic] = self._core.id_of(topic), self._core.partition_count(topic)
            except errors.Invalid:
                self._known[topic] = None
        known = self._known[topic]
        return known[0] if known is not None and 0 <= partition < known[1] else None

    def has(self, place: TopicPartition, value: CommittedOffset) -> bool:
        """Whether the offset is one of the topic that has its name now."""
        topic_id = self.id_of(place)
        return topic_id is not None and value.topic_id in ("", topic_id)


_NO_TOPICS: Final[_ByTopic] = {}
_ENDED: Final = object()


def _looked_up(
    get: Callable[[TopicPartition], CommittedOffset | None], places: Iterable[TopicPartition]
) -> dict[TopicPartition, CommittedOffset]:
    found = ((place, get(place)) for place in places)
    return {place: value for place, value in found if value is not None}


def _flat(offsets: _ByTopic) -> Iterator[tuple[TopicPartition, CommittedOffset]]:
    for topic, of_topic in offsets.items():
        for partition, value in of_topic.items():
            yield (topic, partition), value


def _java_length(text: str) -> int:
    """Characters as Kafka counts them, in UTF-16."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


def _refused(group_id: str, failure: Exception) -> GroupError:
    if isinstance(failure, errors.SparklogError | OSError):
        _log.warning("a group's record is refused", group=group_id, reason=str(failure))
    else:
        _log.error("a group's record cannot be written", group=group_id, exc_info=failure)
    return _of(failure)


def _each(places: Iterable[TopicPartition], error: GroupError | None) -> Errors:
    return dict.fromkeys(places, error)


def _ignore(_error: GroupError | None) -> None:
    """For what is tried again in any case."""


def _names(request: JoinRequest) -> list[str | None]:
    """What a group would record of it."""
    return [
        request.member_id,
        request.instance_id,
        request.client_id,
        request.client_host,
        request.protocol_type,
        *(each.name for each in request.protocols),
    ]


def _of(failure: Exception) -> GroupError:
    """What who waits for a record is told that did not become durable."""
    if isinstance(failure, errors.Fenced | errors.BrokerClosing):
        return GroupError.NOT_COORDINATOR
    too_large = isinstance(failure, errors.RecordTooLarge | errors.BatchTooLarge)
    if too_large or not isinstance(failure, errors.SparklogError | OSError):
        return GroupError.UNKNOWN_SERVER_ERROR
    return GroupError.COORDINATOR_NOT_AVAILABLE


def _subscribed(group: Group) -> frozenset[str] | None:
    """Topics that some member wants; None where that cannot be told: of none it may be said then
    that nobody wants it.
    """
    if group.state is GroupState.EMPTY:
        return frozenset()
    described = group.describe()
    if described.protocol_type != _CONSUMERS or described.state is not GroupState.STABLE:
        return None
    try:
        return frozenset(
            topic
            for member in described.members
            for topic in consumeroffsets.subscribed_topics(member.subscription)
        )
    except errors.CorruptRecord:
        return None
