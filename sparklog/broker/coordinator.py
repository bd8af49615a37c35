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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
import structlog

from sparklog import consumeroffsets, errors, limits
from sparklog.broker.core import Core, Ticket
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
_SWEEP_MS: Final = round(limits.OFFSETS_RETENTION_CHECK_SECONDS * 1e3)

TopicPartition: TypeAlias = tuple[str, int]
"""A topic's name and a partition's number."""
Errors: TypeAlias = dict[TopicPartition, GroupError | None]
_Settle: TypeAlias = Callable[[GroupError | None], None]
"""What follows when records are durable, or with an error when they will not be; under the lock."""


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """What a group says of one partition: the next offset that it wants."""

    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    topic_id: str = ""
    """Given: the offset is one of that topic, whatever has its name now."""


@dataclass(slots=True)
class _Entry:
    """A group with what it has committed."""

    group: Group
    offsets: dict[TopicPartition, CommittedOffset] = field(default_factory=dict)
    committing: Counter[TopicPartition] = field(default_factory=Counter)
    """Offsets whose records are under way."""
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
        with self._locked():
            entry = self._entry(group_id)
            error = self._entrance(group_id)
            if error is None and group_id not in self._groups and generation >= 0:
                error = GroupError.GROUP_ID_NOT_FOUND
            if error is None:
                error = entry.group.check_commit(
                    member_id=member_id,
                    instance_id=instance_id,
                    generation=generation,
                    now_ms=self._now_ms(),
                )
            if error is not None:
                self._answer(answer, _each(offsets, error))
                return answer
            found: Errors = {}
            values: dict[TopicPartition, CommittedOffset] = {}
            for place, commit in offsets.items():
                value = self._value(place, commit)
                if isinstance(value, GroupError):
                    found[place] = value
                else:
                    values[place] = value
            if not values:
                self._answer(answer, found)
                return answer
            self._groups[group_id] = entry
            entry.committing.update(values.keys())

            def settle(failed: GroupError | None) -> None:
                entry.committing.subtract(values.keys())
                entry.committing += Counter()  # without those that have come to nothing
                if failed is None:  # though it is being deleted, which may fail
                    entry.offsets.update(values)
                self._answer(answer, found | _each(values, failed))

            records: dict[Key, Value | None] = {
                OffsetKey(group_id, *place): value for place, value in values.items()
            }
            self._store(group_id, records, settle)
        return answer

    def _value(self, place: TopicPartition, commit: Commit) -> CommittedOffset | GroupError:
        if len(commit.metadata.encode()) > limits.OFFSET_METADATA_BYTES:
            return GroupError.OFFSET_METADATA_TOO_LARGE
        topic_id = self._topic_id(place)
        if topic_id is None or commit.topic_id not in ("", topic_id):
            return GroupError.UNKNOWN_TOPIC_OR_PARTITION
        return CommittedOffset(
            offset=commit.offset,
            leader_epoch=commit.leader_epoch,
            metadata=commit.metadata,
            commit_ms=self._wall_ms(),
            topic_id=topic_id,
        )

    def committed(self, group_id: str) -> dict[TopicPartition, CommittedOffset] | GroupError:
        """OffsetFetch: all that the group has committed of topics that are still the same."""
        with self._lock:
            if self._refusal is not None:
                return self._refusal
            entry = self._entry(group_id)
            offsets = dict(entry.offsets)
        return {place: value for place, value in offsets.items() if self._is_alive(place, value)}

    def _is_alive(self, place: TopicPartition, value: CommittedOffset) -> bool:
        """Whether the offset is one of the topic that has its name now."""
        topic_id = self._topic_id(place)
        return topic_id is not None and value.topic_id in ("", topic_id)

    def _topic_id(self, place: TopicPartition) -> str | None:
        try:
            self._core.place(*place)
            return self._core.id_of(place[0])
        except errors.Invalid:
            return None

    def forget(self, group_id: str, places: Iterable[TopicPartition]) -> Future[Errors]:
        """OffsetDelete: of topics that no member subscribes to."""
        answer: Future[Errors] = Future()
        wanted = list(places)
        with self._locked():
            entry = self._found(group_id)
            if isinstance(entry, GroupError):
                self._answer(answer, _each(wanted, entry))
                return answer
            subscribed = _subscribed(entry.group)
            if subscribed is None:
                self._answer(answer, _each(wanted, GroupError.NON_EMPTY_GROUP))
                return answer
            found: Errors = {
                place: GroupError.GROUP_SUBSCRIBED_TO_TOPIC if place[0] in subscribed else None
                for place in wanted
            }
            free = [place for place, refusal in found.items() if refusal is None]
            self._erase(
                entry,
                free,
                lambda failed: self._answer(answer, found | _each(free, failed)),
            )
        return answer

    def _erase(
        self,
        entry: _Entry,
        places: Iterable[TopicPartition],
        then: _Settle,
        *,
        with_group: bool = False,
    ) -> None:
        """Takes offsets out, those under way too, and with the last of them perhaps the group."""
        group_id = entry.group.group_id
        gone = [each for each in places if each in entry.offsets or each in entry.committing]
        tombstones: dict[Key, None] = {OffsetKey(group_id, *each): None for each in gone}
        if with_group:
            tombstones[GroupKey(group_id)] = None
        if not tombstones:
            then(None)
            return

        def settle(failed: GroupError | None) -> None:
            if failed is None:
                for each in gone:
                    entry.offsets.pop(each, None)
            then(failed)

        self._store(group_id, tombstones, settle)

    # -------------------------------------------------------------------------- administration

    def groups(self) -> list[Description] | GroupError:
        """ListGroups."""
        with self._lock:
            if self._refusal is not None:
                return self._refusal
            return [each.group.describe() for each in self._groups.values()]

    def describe(self, group_id: str) -> Description | GroupError:
        """DescribeGroups."""
        with self._lock:
            entry = self._found(group_id)
            return entry if isinstance(entry, GroupError) else entry.group.describe()

    def delete(self, group_id: str) -> Future[GroupError | None]:
        """DeleteGroups: a group without members, and all that it has committed."""
        answer: Future[GroupError | None] = Future()
        with self._locked():
            entry = self._found(group_id)
            if isinstance(entry, GroupError):
                self._answer(answer, entry)
            elif (error := entry.group.check_delete()) is not None:
                self._answer(answer, error)
            else:
                self._delete(entry, lambda failed: self._answer(answer, failed))
        return answer

    def _delete(self, entry: _Entry, then: _Settle) -> None:
        """The group is gone for everybody at once, and back should that not become durable."""
        del self._groups[entry.group.group_id]

        def settle(failed: GroupError | None) -> None:
            if failed is not None:
                self._bring_back(entry)
            then(failed)

        places = entry.offsets.keys() | entry.committing.keys()
        self._erase(entry, places, settle, with_group=True)
        self._follow(entry, entry.group.unload())

    def _bring_back(self, deleted: _Entry) -> None:
        """What has happened since then to a group of that name stands."""
        group_id = deleted.group.group_id
        back = self._groups.setdefault(group_id, self._new(group_id))
        back.group.succeed(deleted.group)
        back.offsets = deleted.offsets | back.offsets
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
        left_seconds = max((next_ms - self._now_ms()) / 1e3, 0.0)
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
            item.settle(error)

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
                for entry in list(self._groups.values()):
                    self._sweep(entry)

    def _sweep(self, entry: _Entry) -> None:
        """Takes out what has expired or is of a topic that is gone, and the group when it is over.

        Which offsets expire: the module's docstring.
        """
        oldest_ms = self._wall_ms() - self._settings.offsets_retention_minutes * 60_000
        group, subscribed = entry.group, _subscribed(entry.group)
        is_empty = group.state is GroupState.EMPTY
        left_ms = entry.changed_ms if is_empty and group.protocol_type is not None else -1
        expired = [
            place
            for place, value in entry.offsets.items()
            if place not in entry.committing
            and (
                not self._is_alive(place, value)
                or (
                    subscribed is not None
                    and place[0] not in subscribed
                    and max(value.commit_ms, left_ms) <= oldest_ms
                )
            )
        ]
        is_over = group.is_deserted and not entry.committing
        if is_over and len(expired) == len(entry.offsets):
            self._delete(entry, _ignore)
        elif expired:
            self._erase(entry, expired, _ignore)

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
                groups[key.group].offsets[key.topic, key.partition] = decode_offset(value)
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

    def _store(self, group_id: str, records: Mapping[Key, Value | None], settle: _Settle) -> None:
        """`settle` comes in the order of the calls, whether this succeeds or not: raises nothing,
        as who calls has begun to count on that.
        """
        try:
            item = _UnderWay(self._topic.append(group_id, records), None, settle)
        except Exception as failure:
            if isinstance(failure, errors.SparklogError | OSError):
                _log.warning("a group's record is refused", group=group_id, reason=str(failure))
            else:
                _log.exception("a group's record cannot be written", group=group_id)
            item = _UnderWay(None, _of(failure), settle)
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
