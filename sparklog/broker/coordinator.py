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
    decode_group,
    decode_offset,
    encode_group,
    encode_offset,
)
from sparklog.settings import GroupSettings

_log = structlog.get_logger("sparklog.groups")
_T = TypeVar("_T")
_CONSUMERS: Final = "consumer"
"""The protocol type of groups whose members subscribe to topics."""
_SWEEP_MS: Final = round(limits.OFFSETS_RETENTION_CHECK_SECONDS * 1e3)

TopicPartition: TypeAlias = tuple[str, int]
Errors: TypeAlias = dict[TopicPartition, GroupError | None]


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """What a group says of one partition: the next offset that it wants."""

    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    topic_id: str = ""
    """Given: the offset is one of that topic, whatever has its name now."""


@dataclass(slots=True)
class _Known:
    """A group with what it has committed."""

    group: Group
    offsets: dict[TopicPartition, CommittedOffset] = field(default_factory=dict)
    committing: Counter[TopicPartition] = field(default_factory=Counter)
    """Offsets whose records are under way."""
    changed_ms: int = -1
    """When it was last recorded, in ms since the Unix epoch."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """Records on their way, or why they are not, and what follows; called under the lock."""

    ticket: Ticket | None
    error: GroupError | None
    settle: Callable[[GroupError | None], None]


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
        self._groups: dict[str, _Known] = {}
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
            if self._refusal is not None:
                return self._refusal
            return self._known(group_id).group.heartbeat(
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
    ) -> Future[_T]:
        answer: Future[_T] = Future()
        with self._locked():
            if self._refusal is not None:
                self._answer(answer, refused(self._refusal))
            else:
                known = self._known(group_id)
                outcome = event(known.group, answer, self._now_ms())
                if known.group.next_deadline_ms() is not None:
                    self._groups[group_id] = known
                self._follow(known, outcome)
        answer.add_done_callback(lambda done: self._left(group_id, done))
        return answer

    def _left(self, group_id: str, answer: Future[Any]) -> None:
        if answer.cancelled():
            with self._lock:
                known = self._groups.get(group_id)
                if known is not None:
                    known.group.cancel(answer, self._now_ms())
                    self._look_when_due(known)

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
            known = self._known(group_id)
            error = self._refusal
            if error is None and group_id not in self._groups and generation >= 0:
                error = GroupError.GROUP_ID_NOT_FOUND
            if error is None:
                error = known.group.check_commit(
                    member_id=member_id,
                    instance_id=instance_id,
                    generation=generation,
                    now_ms=self._now_ms(),
                )
            if error is not None:
                whole: Errors = dict.fromkeys(offsets, error)
                self._answer(answer, whole)
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
            self._groups[group_id] = known
            known.committing.update(values.keys())

            def settle(failed: GroupError | None) -> None:
                known.committing.subtract(values.keys())
                known.committing += Counter()  # without those that have come to nothing
                if failed is None and known.group.state is not GroupState.DEAD:
                    known.offsets.update(values)
                self._answer(answer, {**found, **dict.fromkeys(values, failed)})

            records: dict[Key, bytes | None] = {
                OffsetKey(group_id, *place): encode_offset(value) for place, value in values.items()
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
            known = self._known(group_id)
            offsets = dict(known.offsets)
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
            known = self._groups.get(group_id)
            error, subscribed = self._refusal, None
            if error is None and known is None:
                error = GroupError.GROUP_ID_NOT_FOUND
            if error is None and known is not None:
                subscribed = _subscribed(known.group)
                error = GroupError.NON_EMPTY_GROUP if subscribed is None else None
            if error is not None or known is None or subscribed is None:
                whole: Errors = dict.fromkeys(wanted, error)
                self._answer(answer, whole)
                return answer
            found: Errors = {
                place: GroupError.GROUP_SUBSCRIBED_TO_TOPIC if place[0] in subscribed else None
                for place in wanted
            }
            gone = [place for place, refusal in found.items() if refusal is None]

            def settled(failed: GroupError | None) -> None:
                self._answer(answer, {**found, **dict.fromkeys(gone, failed)})

            self._remove(known, gone, settled)
        return answer

    def _remove(
        self,
        known: _Known,
        places: Iterable[TopicPartition],
        settled: Callable[[GroupError | None], None],
        *,
        with_group: bool = False,
    ) -> None:
        """Takes offsets out, those under way too, and with the last of them perhaps the group."""
        group_id = known.group.group_id
        gone = [each for each in places if each in known.offsets or each in known.committing]
        records: dict[Key, bytes | None] = {OffsetKey(group_id, *each): None for each in gone}
        if with_group:
            records[GroupKey(group_id)] = None

        def settle(failed: GroupError | None) -> None:
            if failed is None:
                for each in gone:
                    known.offsets.pop(each, None)
            settled(failed)

        if records:
            self._store(group_id, records, settle)
        else:
            settled(None)

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
            if self._refusal is not None:
                return self._refusal
            known = self._groups.get(group_id)
            return known.group.describe() if known is not None else GroupError.GROUP_ID_NOT_FOUND

    def delete(self, group_id: str) -> Future[GroupError | None]:
        """DeleteGroups: a group without members, and all that it has committed."""
        answer: Future[GroupError | None] = Future()
        with self._locked():
            known = self._groups.get(group_id)
            error = self._refusal
            if error is None:
                error = known.group.check_delete() if known else GroupError.GROUP_ID_NOT_FOUND
            if error is not None or known is None:
                self._answer(answer, error)
            else:
                self._delete(known, lambda failed: self._answer(answer, failed))
        return answer

    def _delete(self, known: _Known, settled: Callable[[GroupError | None], None]) -> None:
        """The group is gone for everybody at once, and back should that not become durable."""
        group_id = known.group.group_id
        del self._groups[group_id]

        def settle(failed: GroupError | None) -> None:
            if failed is not None:
                back = self._groups.setdefault(group_id, self._new(group_id))
                back.offsets = known.offsets | back.offsets
            settled(failed)

        places = known.offsets.keys() | known.committing.keys()
        self._remove(known, places, settle, with_group=True)
        self._follow(known, known.group.unload())

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
            for known in self._groups.values():
                self._follow(known, known.group.unload())
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
                known = self._groups.get(group_id)
                if self._looks.get(group_id) == due_ms:
                    del self._looks[group_id]
                    if known is not None:
                        self._follow(known, known.group.expire(now_ms))
            if self._sweep_ms <= now_ms:
                self._sweep_ms = now_ms + _SWEEP_MS
                for known in list(self._groups.values()):
                    self._sweep(known)

    def _sweep(self, known: _Known) -> None:
        """Takes out what has expired or is of a topic that is gone, and the group when it is over.

        Which offsets expire: the module's docstring.
        """
        oldest_ms = self._wall_ms() - self._settings.offsets_retention_minutes * 60_000
        group, subscribed = known.group, _subscribed(known.group)
        is_empty = group.state is GroupState.EMPTY
        left_ms = known.changed_ms if is_empty and group.protocol_type is not None else -1
        expired = [
            place
            for place, value in known.offsets.items()
            if place not in known.committing
            and (
                not self._is_alive(place, value)
                or (
                    subscribed is not None
                    and place[0] not in subscribed
                    and max(value.commit_ms, left_ms) <= oldest_ms
                )
            )
        ]
        has_nobody = is_empty and group.next_deadline_ms() is None and not known.committing
        if has_nobody and len(expired) == len(known.offsets):
            self._delete(known, _ignore)
        elif expired:
            self._remove(known, expired, _ignore)

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
            for known in groups.values():
                self._look_when_due(known)
        return True

    def _restored(self, stands: Mapping[Key, bytes]) -> dict[str, _Known]:
        groups: dict[str, _Known] = {}
        now_ms = self._now_ms()
        for key, value in stands.items():
            if isinstance(key, GroupKey):
                record, changed_ms = decode_group(value)
                group = Group.restore(
                    key.group, record, now_ms, settings=self._settings, new_uuid=self._new_uuid
                )
                groups[key.group] = _Known(group, changed_ms=changed_ms)
        for key, value in stands.items():
            if isinstance(key, OffsetKey):
                if key.group not in groups:
                    groups[key.group] = self._new(key.group)
                groups[key.group].offsets[key.topic, key.partition] = decode_offset(value)
        return groups

    # -------------------------------------------------------------------------- under the lock

    def _known(self, group_id: str) -> _Known:
        """The group; a new one is not known yet."""
        return self._groups.get(group_id) or self._new(group_id)

    def _new(self, group_id: str) -> _Known:
        return _Known(Group(group_id, settings=self._settings, new_uuid=self._new_uuid))

    def _follow(self, known: _Known, outcome: Outcome) -> None:
        """Does what the group has decided."""
        for token, reply in outcome.replies:
            assert isinstance(token, Future)
            self._answer(token, reply)
        if outcome.record is not None:
            self._record(known, outcome.record)
        self._look_when_due(known)

    def _record(self, known: _Known, record: GroupRecord) -> None:
        group, changed_ms = known.group, self._wall_ms()

        def settle(error: GroupError | None) -> None:
            now_ms = self._now_ms()
            if error is None:
                known.changed_ms = changed_ms
                self._follow(known, group.stored(record, now_ms))
            else:
                self._follow(known, group.store_failed(record, error, now_ms))

        values: dict[Key, bytes | None] = {
            GroupKey(group.group_id): encode_group(record, changed_ms)
        }
        self._store(group.group_id, values, settle)

    def _store(
        self,
        group_id: str,
        values: Mapping[Key, bytes | None],
        settle: Callable[[GroupError | None], None],
    ) -> None:
        """`settle` comes in the order of the calls, whether this succeeds or not."""
        try:
            item = _UnderWay(self._topic.append(group_id, values), None, settle)
        except (errors.SparklogError, OSError) as error:
            _log.warning("a group's record is refused", group=group_id, reason=str(error))
            item = _UnderWay(None, _of(error), settle)
        self._under_way.put(item)

    def _look_when_due(self, known: _Known) -> None:
        group_id, due_ms = known.group.group_id, known.group.next_deadline_ms()
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


def _ignore(_error: GroupError | None) -> None:
    """For what is tried again in any case."""


def _of(failure: Exception) -> GroupError:
    """What who waits for a record is told that did not become durable."""
    if isinstance(failure, errors.Fenced | errors.BrokerClosing):
        return GroupError.NOT_COORDINATOR
    if isinstance(failure, errors.RecordTooLarge | errors.BatchTooLarge):
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
