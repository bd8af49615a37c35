"""Classic consumer groups: who is in a group, in which generation, with which assignment.

The rules are those of Kafka's brokers (`ClassicGroup`, and `classicGroup…` of
`GroupMetadataManager`), with static members (KIP-345), member ids given before joining (KIP-394),
reasons (KIP-800) and leaders that skip the assignment (KIP-814). Eager and cooperative clients
differ only in what their subscriptions say, which nobody reads here.

A `Group` is a state machine over a time that its caller brings: milliseconds of one monotonic
clock. Events come one at a time; each returns an `Outcome`. Its replies may be sent at once. Its
record must be made durable, and then be told to `stored` or `store_failed`, records of one group in
their order: whoever needs it to be durable is answered there. A join, sync or leave carries a
token of the caller's, never used before, and is answered once, unless the caller cancels it. A
waiter that is overtaken (its member asked again, or left) is answered too, where Kafka forgets it.

A member whose connection closed while it waited still counts as joined, and has its session timeout
to come back; Kafka, which does not see that, gives it the whole rebalance.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import ClassVar, Final, TypeAlias

import msgspec

from sparklog.consumeroffsets import MAX_STRING_BYTES, GroupRecord, MemberRecord
from sparklog.limits import NEW_MEMBER_JOIN_TIMEOUT_MS
from sparklog.settings import GroupSettings

__all__ = [
    "Description",
    "Group",
    "GroupError",
    "GroupRecord",
    "GroupSettings",
    "GroupState",
    "JoinReply",
    "JoinRequest",
    "JoinedMember",
    "LeaveReply",
    "Leaver",
    "LeaverReply",
    "MemberRecord",
    "Outcome",
    "Protocol",
    "Reply",
    "SyncReply",
    "SyncRequest",
    "Token",
]

Token: TypeAlias = Hashable

NO_GENERATION: Final = -1
_GONE: Final = object()
"""Stands for the token of a waiter that nobody listens to any more."""


class GroupError(enum.Enum):
    """Kafka's names; a door knows their numbers."""

    COORDINATOR_LOAD_IN_PROGRESS = enum.auto()
    COORDINATOR_NOT_AVAILABLE = enum.auto()
    FENCED_INSTANCE_ID = enum.auto()
    GROUP_ID_NOT_FOUND = enum.auto()
    GROUP_MAX_SIZE_REACHED = enum.auto()
    GROUP_SUBSCRIBED_TO_TOPIC = enum.auto()
    ILLEGAL_GENERATION = enum.auto()
    INCONSISTENT_GROUP_PROTOCOL = enum.auto()
    INVALID_GROUP_ID = enum.auto()
    INVALID_REQUEST = enum.auto()
    INVALID_SESSION_TIMEOUT = enum.auto()
    MEMBER_ID_REQUIRED = enum.auto()
    NON_EMPTY_GROUP = enum.auto()
    NOT_COORDINATOR = enum.auto()
    OFFSET_METADATA_TOO_LARGE = enum.auto()
    REBALANCE_IN_PROGRESS = enum.auto()
    UNKNOWN_MEMBER_ID = enum.auto()
    UNKNOWN_SERVER_ERROR = enum.auto()
    UNKNOWN_TOPIC_OR_PARTITION = enum.auto()


class GroupState(enum.Enum):
    """The values are Kafka's, for people and DescribeGroups."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


_BEFORE: Final = {
    GroupState.EMPTY: {GroupState.PREPARING},
    GroupState.PREPARING: {GroupState.EMPTY, GroupState.COMPLETING, GroupState.STABLE},
    GroupState.COMPLETING: {GroupState.PREPARING},
    GroupState.STABLE: {GroupState.COMPLETING},
    GroupState.DEAD: set(GroupState),
}


class Protocol(msgspec.Struct, frozen=True):
    """A way of assigning that a member offers, with its subscription in that way's terms."""

    name: str
    metadata: bytes


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """JoinGroup. Protocols come in the order of preference."""

    member_id: str = ""
    instance_id: str | None = None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int = -1
    """As long as the session's unless positive: version 0 has none."""
    protocol_type: str
    protocols: tuple[Protocol, ...]
    member_id_required: bool = True
    """The client understands MEMBER_ID_REQUIRED: version 4 on."""
    skips_assignment: bool = True
    """The client understands `skip_assignment`: version 9 on."""
    reason: str | None = None

    @property
    def patience_ms(self) -> int:
        return (
            self.rebalance_timeout_ms if self.rebalance_timeout_ms > 0 else self.session_timeout_ms
        )


class JoinedMember(msgspec.Struct, frozen=True, kw_only=True):
    member_id: str
    instance_id: str | None
    metadata: bytes


class JoinReply(msgspec.Struct, frozen=True, kw_only=True):
    """`members` is for the leader alone."""

    error: GroupError | None = None
    member_id: str
    generation: int = NO_GENERATION
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = ""
    members: tuple[JoinedMember, ...] = ()
    skip_assignment: bool = False


class SyncRequest(msgspec.Struct, frozen=True, kw_only=True):
    """SyncGroup; `assignments` by member id, heard from the leader alone."""

    member_id: str
    instance_id: str | None = None
    generation: int
    protocol_type: str | None = None
    protocol: str | None = None
    assignments: Mapping[str, bytes] = msgspec.field(default_factory=dict)


class SyncReply(msgspec.Struct, frozen=True, kw_only=True):
    error: GroupError | None = None
    protocol_type: str | None = None
    protocol: str | None = None
    assignment: bytes = b""


class Leaver(msgspec.Struct, frozen=True, kw_only=True):
    """Who shall leave: a member by its id, or without one whoever holds the instance id."""

    member_id: str = ""
    instance_id: str | None = None
    reason: str | None = None


class LeaverReply(msgspec.Struct, frozen=True, kw_only=True):
    member_id: str
    instance_id: str | None
    error: GroupError | None = None


class LeaveReply(msgspec.Struct, frozen=True, kw_only=True):
    """One member of `members` for each leaver; up to version 2 its error is the whole reply's."""

    error: GroupError | None = None
    members: tuple[LeaverReply, ...] = ()


Reply: TypeAlias = JoinReply | SyncReply | LeaveReply


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    replies: tuple[tuple[Token, Reply], ...] = ()
    record: GroupRecord | None = None


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """DescribeGroups; protocol and subscriptions are told of a stable group alone."""

    group_id: str
    state: GroupState
    generation: int
    protocol_type: str
    protocol: str
    members: tuple[MemberRecord, ...]


class _Member(msgspec.Struct, kw_only=True, eq=False):
    member_id: str
    instance_id: str | None
    request: JoinRequest
    """The last that it joined with."""
    deadline_ms: int = 0
    assignment: bytes = b""
    is_new: bool = False
    """Has not been in a generation yet."""
    joining: Token | None = None
    syncing: Token | None = None

    @property
    def expires_ms(self) -> int | None:
        """None while we owe it an answer; a new member may have gone without our knowing."""
        owed = (self.joining is not None and self.joining is not _GONE) or (
            self.syncing is not None and self.syncing is not _GONE
        )
        return None if owed and not self.is_new else self.deadline_ms

    def offers(self, name: str) -> bool:
        return any(each.name == name for each in self.request.protocols)

    def metadata(self, name: str) -> bytes:
        return next(each.metadata for each in self.request.protocols if each.name == name)


class _Store(msgspec.Struct, kw_only=True, eq=False):
    """A record that is on its way, and what follows when it has arrived or failed."""

    record: GroupRecord
    settle: Callable[[GroupError | None, int], None] | None = None
    leave: tuple[Token, LeaveReply] | None = None


class Group:
    """One group, empty at first."""

    checks_itself: ClassVar[bool] = False
    """Whether the invariant is checked after each event: in tests, as it looks at all members."""

    def __init__(
        self, group_id: str, *, settings: GroupSettings, new_uuid: Callable[[], str]
    ) -> None:
        self.group_id = group_id
        self.state = GroupState.EMPTY
        self.generation = 0
        self.protocol_type: str | None = None
        self.protocol: str | None = None
        self.leader: str | None = None
        self._settings = settings
        self._new_uuid = new_uuid
        self._members: dict[str, _Member] = {}
        self._instances: dict[str, str] = {}
        """Member ids of static members."""
        self._pending: dict[str, int] = {}
        """Ids that were given out and have not joined yet, with their deadlines."""
        self._unsynced: dict[str, None] = {}
        """Ids of members that were answered their join of this generation, and did not sync."""
        self._joining = 0
        """How many members wait for the next generation."""
        self._offers: Counter[str] = Counter()
        """How many members offer a protocol."""
        self._earliest_ms: int | None = None
        """No member and no id expires before: looking for the exact time is left to `expire`."""
        self._join_deadline_ms: int | None = None
        self._sync_deadline_ms: int | None = None
        self._initial_until_ms: int | None = None
        """How long a rebalance that began with an empty group may wait for more members."""
        self._new_member_came = False
        self._assigning: GroupRecord | None = None
        """This generation's assignment, on its way."""
        self._stores: list[_Store] = []
        self._waiting: dict[Token, _Member | _Store] = {}
        """What the caller waits for, by its token."""
        self._replies: list[tuple[Token, Reply]] = []
        self._record: GroupRecord | None = None

    @classmethod
    def restore(
        cls,
        group_id: str,
        record: GroupRecord,
        now_ms: int,
        *,
        settings: GroupSettings,
        new_uuid: Callable[[], str],
    ) -> Group:
        """The group as it was recorded last; sessions start anew.

        A group that has grown too large meanwhile, by its settings, begins with a rebalance.
        """
        group = cls(group_id, settings=settings, new_uuid=new_uuid)
        group.generation = record.generation
        group.protocol_type = record.protocol_type
        if record.members:
            assert record.protocol is not None
            group.state = GroupState.STABLE
            group.protocol, group.leader = record.protocol, record.leader
            for each in record.members:
                request = JoinRequest(
                    client_id=each.client_id,
                    client_host=each.client_host,
                    session_timeout_ms=each.session_timeout_ms,
                    rebalance_timeout_ms=each.rebalance_timeout_ms,
                    protocol_type=record.protocol_type or "",
                    protocols=(Protocol(record.protocol, each.subscription),),
                )
                member = _Member(
                    member_id=each.member_id,
                    instance_id=each.instance_id,
                    request=request,
                    assignment=each.assignment,
                )
                group._renew(member, now_ms)
                group._seat(member)
            if len(group._members) > settings.max_size:
                group._prepare(now_ms)
        group._take()
        return group

    # -------------------------------------------------------------------------- requests

    def join(self, token: Token, request: JoinRequest, now_ms: int) -> Outcome:
        """JoinGroup; waits until the next generation begins."""
        assert token is not None
        known_id = request.member_id
        if not known_id and request.instance_id is not None:
            # Kafka refuses the new process of a static member when the group is full.
            known_id = self._instances.get(request.instance_id, "")
        error = self._join_error(request, known_id)
        if error is GroupError.GROUP_MAX_SIZE_REACHED:
            self._reply(token, JoinReply(error=error, member_id=""))
            self._pending.pop(known_id, None)
            if known_id in self._members:
                self._remove(self._members[known_id])
            self._complete_join_if_all_came(now_ms)
        elif error is not None:
            self._reply(token, JoinReply(error=error, member_id=request.member_id))
        elif not request.member_id:
            self._join_as_new(token, request, known_id, now_ms)
        elif request.member_id in self._pending and request.instance_id is None:
            self._add(token, request, request.member_id, now_ms)
        else:
            self._rejoin(token, request, now_ms)
        return self._take()

    def sync(self, token: Token, request: SyncRequest, now_ms: int) -> Outcome:
        """SyncGroup; waits until the leader's assignment is durable."""
        assert token is not None
        error = self._sync_error(request)
        if error is not None:
            self._reply(token, SyncReply(error=error))
            return self._take()
        member = self._members[request.member_id]
        self._renew(member, now_ms)
        self._unsynced.pop(member.member_id, None)
        if not self._unsynced:
            self._sync_deadline_ms = None
        if self.state is GroupState.STABLE:
            self._reply(token, self._synced(member))
            return self._take()
        self._answer(member, sync=SyncReply(error=GroupError.REBALANCE_IN_PROGRESS))
        member.syncing = token
        self._waiting[token] = member
        # One assignment for each generation: a leader that asks again waits for the first.
        if member.member_id == self.leader and self._assigning is None:
            record = self._describe(request.assignments)
            self._assigning = record
            self._persist(record, partial(self._settle_assignment, record))
        return self._take()

    def heartbeat(
        self, *, member_id: str, instance_id: str | None, generation: int, now_ms: int
    ) -> GroupError | None:
        error = self._member_error(member_id, instance_id, generation)
        if error is not None:
            return error
        self._renew(self._members[member_id], now_ms)
        rebalancing = self.state is GroupState.PREPARING
        return GroupError.REBALANCE_IN_PROGRESS if rebalancing else None

    def leave(self, token: Token, leavers: Iterable[Leaver], now_ms: int) -> Outcome:
        """LeaveGroup; waits, if the group becomes empty, until that is durable."""
        error = self._group_error()
        if error is not None:
            self._reply(token, LeaveReply(error=error))
            return self._take()
        members = len(self._members)
        reply = LeaveReply(members=tuple(map(self._leave, leavers)))
        # Kafka rebalances also when an id leaves that has not joined yet.
        if len(self._members) < members and self.state is not GroupState.PREPARING:
            self._prepare(now_ms)
        else:
            self._complete_join_if_all_came(now_ms)
        if self._record is None:
            self._reply(token, reply)
        else:
            self._stores[-1].leave = (token, reply)
            self._waiting[token] = self._stores[-1]
        return self._take()

    def check_commit(
        self,
        *,
        member_id: str,
        instance_id: str | None,
        generation: int,
        now_ms: int,
        transactional: bool = False,
    ) -> GroupError | None:
        """Whether offsets may be committed; a commit counts as a heartbeat.

        An empty group takes them from anybody without a generation: a consumer that assigns itself,
        or an administrator. Transactions may leave out who they are at any time, and a rebalance
        does not stop them (KIP-447).
        """
        if self.state is GroupState.DEAD:
            return GroupError.COORDINATOR_NOT_AVAILABLE
        if generation < 0 and self.state is GroupState.EMPTY:
            return None
        if generation < 0 and not member_id and instance_id is None:
            return None if transactional else GroupError.UNKNOWN_MEMBER_ID
        error = self._who_error(member_id, instance_id)
        if error is not None:
            return error
        if generation != self.generation:
            return GroupError.ILLEGAL_GENERATION
        if not transactional:
            if self.state is GroupState.COMPLETING:
                return GroupError.REBALANCE_IN_PROGRESS
            self._renew(self._members[member_id], now_ms)
        return None

    def check_delete(self) -> GroupError | None:
        """Whether the group may be deleted; who does it stores that, and unloads the group."""
        if self.state is GroupState.DEAD:
            return GroupError.GROUP_ID_NOT_FOUND
        return None if self.state is GroupState.EMPTY else GroupError.NON_EMPTY_GROUP

    @property
    def is_deserted(self) -> bool:
        """Nobody is in the group, or was told an id to join it with."""
        return self.state is GroupState.EMPTY and not self._pending

    def succeed(self, deleted: Group) -> None:
        """Goes on from the group of this name whose deletion has failed, where it is not too late:
        a generation of its own may have begun meanwhile.
        """
        if self.generation == 0:
            self.generation = deleted.generation
            if self.state is GroupState.EMPTY:
                self.protocol_type = deleted.protocol_type

    def describe(self, *, with_members: bool = True) -> Description:
        stable = self.state is GroupState.STABLE
        return Description(
            group_id=self.group_id,
            state=self.state,
            generation=self.generation,
            protocol_type=self.protocol_type or "",
            protocol=(self.protocol or "") if stable else "",
            members=tuple(
                self._describe_member(each, self.protocol if stable else None, each.assignment)
                for each in (self._members.values() if with_members else ())
            ),
        )

    # -------------------------------------------------------------------------- other events

    def next_deadline_ms(self) -> int | None:
        """When to call `expire`, unless an event comes before; it may have nothing to do then."""
        deadlines = (self._earliest_ms, self._join_deadline_ms, self._sync_deadline_ms)
        return min((each for each in deadlines if each is not None), default=None)

    def expire(self, now_ms: int) -> Outcome:
        """Does what is due; nothing, if called too early."""
        for member in list(self._members.values()):
            expires_ms = member.expires_ms  # as it is after those before were removed
            if expires_ms is not None and expires_ms <= now_ms:
                self._remove(member)
                self._rebalance(now_ms)
        for member_id in [each for each, due_ms in self._pending.items() if due_ms <= now_ms]:
            del self._pending[member_id]
            self._complete_join_if_all_came(now_ms)
        if self._join_deadline_ms is not None and self._join_deadline_ms <= now_ms:
            self._end_join_phase(now_ms)
        if self._sync_deadline_ms is not None and self._sync_deadline_ms <= now_ms:
            for member_id in list(self._unsynced):
                self._remove(self._members[member_id])
            self._prepare(now_ms)
        self._earliest_ms = min(self._expiries_ms(), default=None)
        return self._take()

    def _expiries_ms(self) -> list[int]:
        expiries = (each.expires_ms for each in self._members.values())
        return [*(each for each in expiries if each is not None), *self._pending.values()]

    def _noted(self, expires_ms: int) -> int:
        """The time, which `next_deadline_ms` will not miss."""
        if self._earliest_ms is None or expires_ms < self._earliest_ms:
            self._earliest_ms = expires_ms
        return expires_ms

    def stored(self, record: GroupRecord, now_ms: int) -> Outcome:
        """The outcome's record is durable."""
        return self._settle(record, None, now_ms)

    def store_failed(self, record: GroupRecord, error: GroupError, now_ms: int) -> Outcome:
        """The outcome's record is not durable, which `error` tells those who waited for it."""
        return self._settle(record, error, now_ms)

    def cancel(self, token: Token, now_ms: int) -> None:
        """Nobody listens for the answer to `token`, if it still waits."""
        waiter = self._waiting.pop(token, None)
        if isinstance(waiter, _Store):
            waiter.leave = None
        elif waiter is not None:
            if waiter.joining == token:
                waiter.joining = _GONE
            else:
                waiter.syncing = _GONE
            waiter.deadline_ms = self._noted(now_ms + waiter.request.session_timeout_ms)

    def unload(self) -> Outcome:
        """The group was deleted, or has another coordinator: everybody who waits is told so."""
        error = GroupError.NOT_COORDINATOR
        for member in self._members.values():
            refusal = JoinReply(error=error, member_id=member.member_id)
            self._answer(member, join=refusal, sync=SyncReply(error=error))
        for store in self._stores:
            if store.leave is not None:
                self._reply(store.leave[0], LeaveReply(error=error))
        by_id = (self._members, self._instances, self._pending, self._unsynced)
        for each in (self._stores, *by_id, self._offers):
            each.clear()
        self._join_deadline_ms = self._sync_deadline_ms = self._earliest_ms = None
        self._assigning = self.leader = None
        self._move(GroupState.DEAD)
        return self._take()

    # -------------------------------------------------------------------------- judging

    def _group_error(self) -> GroupError | None:
        if not self.group_id:
            return GroupError.INVALID_GROUP_ID  # but commits without a group id are as old as Kafka
        return GroupError.COORDINATOR_NOT_AVAILABLE if self.state is GroupState.DEAD else None

    def _who_error(self, member_id: str, instance_id: str | None) -> GroupError | None:
        if instance_id is not None:
            holder = self._instances.get(instance_id)
            if holder is not None and holder != member_id:
                return GroupError.FENCED_INSTANCE_ID
            if holder is None:
                return GroupError.UNKNOWN_MEMBER_ID
        return None if member_id in self._members else GroupError.UNKNOWN_MEMBER_ID

    def _member_error(
        self, member_id: str, instance_id: str | None, generation: int
    ) -> GroupError | None:
        error = self._group_error() or self._who_error(member_id, instance_id)
        if error is None and generation != self.generation:
            return GroupError.ILLEGAL_GENERATION
        return error

    def _join_error(self, request: JoinRequest, known_id: str) -> GroupError | None:
        if not self.group_id:
            return GroupError.INVALID_GROUP_ID
        settings, session_ms = self._settings, request.session_timeout_ms
        if not settings.min_session_timeout_ms <= session_ms <= settings.max_session_timeout_ms:
            return GroupError.INVALID_SESSION_TIMEOUT
        if self.state is GroupState.DEAD:
            return GroupError.COORDINATOR_NOT_AVAILABLE
        if not self._has_room(self._members.get(known_id)):
            return GroupError.GROUP_MAX_SIZE_REACHED
        if not self._suits(request):
            return GroupError.INCONSISTENT_GROUP_PROTOCOL
        return None

    def _has_room(self, known: _Member | None) -> bool:
        """While members join, who comes first stays: the group may have been larger."""
        if self.state is GroupState.EMPTY:
            return True
        if self.state is GroupState.PREPARING:
            return self._joining < self._settings.max_size or (
                known is not None and known.joining is not None
            )
        return known is not None or len(self._members) < self._settings.max_size

    def _suits(self, request: JoinRequest) -> bool:
        """Whether the members could agree, in the group's protocol type, with this one."""
        if self.state is GroupState.EMPTY:
            return bool(request.protocol_type and request.protocols)
        return request.protocol_type == self.protocol_type and any(
            self._offers[each.name] == len(self._members) for each in request.protocols
        )

    def _sync_error(self, request: SyncRequest) -> GroupError | None:
        error = self._member_error(request.member_id, request.instance_id, request.generation)
        if error is not None:
            return error
        for asked, ours in (
            (request.protocol_type, self.protocol_type),
            (request.protocol, self.protocol),
        ):
            if asked is not None and ours is not None and asked != ours:
                return GroupError.INCONSISTENT_GROUP_PROTOCOL
        preparing = self.state is GroupState.PREPARING
        return GroupError.REBALANCE_IN_PROGRESS if preparing else None

    # -------------------------------------------------------------------------- members

    def _join_as_new(
        self, token: Token, request: JoinRequest, replaced_id: str, now_ms: int
    ) -> None:
        name = request.client_id if request.instance_id is None else request.instance_id
        member_id = _member_id(name, self._new_uuid())
        assert member_id not in self._members
        if replaced_id:
            self._replace(token, request, self._members[replaced_id], member_id, now_ms)
        elif request.instance_id is None and request.member_id_required:
            self._pending[member_id] = self._noted(now_ms + request.session_timeout_ms)
            required = JoinReply(error=GroupError.MEMBER_ID_REQUIRED, member_id=member_id)
            self._reply(token, required)
        else:
            self._add(token, request, member_id, now_ms)

    def _add(self, token: Token, request: JoinRequest, member_id: str, now_ms: int) -> None:
        self._pending.pop(member_id, None)
        self.protocol_type = request.protocol_type  # another only if nobody is here
        member = _Member(
            member_id=member_id,
            instance_id=request.instance_id,
            request=request,
            is_new=True,
        )
        self._await_join(member, token)
        self._renew(member, now_ms)
        self._seat(member)
        self._new_member_came = True
        self._rebalance(now_ms)

    def _seat(self, member: _Member) -> None:
        self._members[member.member_id] = member
        self._count_offers(member, 1)
        if member.instance_id is not None:
            assert member.instance_id not in self._instances
            self._instances[member.instance_id] = member.member_id
        if self.leader is None:
            self.leader = member.member_id

    def _rejoin(self, token: Token, request: JoinRequest, now_ms: int) -> None:
        error = self._who_error(request.member_id, request.instance_id)
        if error is not None:
            self._reply(token, JoinReply(error=error, member_id=request.member_id))
            return
        member = self._members[request.member_id]
        # A leader knows more than its subscription says: of new partitions, for instance.
        forced = self.state is GroupState.STABLE and member.member_id == self.leader
        if (
            self.state is not GroupState.PREPARING
            and member.request.protocols == request.protocols
            and not forced
        ):
            self._reply(token, self._joined(member))  # it may not have got the first answer
            return
        overtaken = GroupError.REBALANCE_IN_PROGRESS
        self._answer(member, join=JoinReply(error=overtaken, member_id=member.member_id))
        self._count_offers(member, -1)
        member.request = request
        self._count_offers(member, 1)
        self._await_join(member, token)
        if member.is_new:
            self._renew(member, now_ms)
        self._rebalance(now_ms)

    def _replace(
        self, token: Token, request: JoinRequest, old: _Member, member_id: str, now_ms: int
    ) -> None:
        """A static member's new process takes its place, and the old one is fenced (KIP-345)."""
        fenced = GroupError.FENCED_INSTANCE_ID
        refusal = JoinReply(error=fenced, member_id=old.member_id)
        self._answer(old, join=refusal, sync=SyncReply(error=fenced))
        leader = self.leader
        member = _Member(
            member_id=member_id,
            instance_id=old.instance_id,
            request=request,
            assignment=old.assignment,
        )
        self._await_join(member, token)
        self._renew(member, now_ms)
        self._swap(old, member)
        if self.state is GroupState.STABLE and self._vote() == self.protocol:
            record = self._describe({k: each.assignment for k, each in self._members.items()})
            settle = partial(
                self._settle_replacement, old, member, request.skips_assignment, leader
            )
            self._persist(record, settle)
        else:
            # Of an assignment that is being made, the leader would give a part to the old id.
            self._rebalance(now_ms)

    def _swap(self, old: _Member, new: _Member) -> None:
        assert old.instance_id is not None
        assert old.instance_id == new.instance_id
        del self._members[old.member_id]
        self._members[new.member_id] = new
        if old.member_id in self._unsynced:
            del self._unsynced[old.member_id]
            self._unsynced[new.member_id] = None
        self._count_offers(old, -1)
        self._count_offers(new, 1)
        self._instances[old.instance_id] = new.member_id
        if self.leader == old.member_id:
            self.leader = new.member_id

    def _leave(self, leaver: Leaver) -> LeaverReply:
        member_id, error = leaver.member_id, None
        if not member_id and leaver.instance_id is not None:
            member_id = self._instances.get(leaver.instance_id, "")
        if self._pending.pop(member_id, None) is None:
            error = self._who_error(member_id, leaver.instance_id)
            if error is None:
                self._remove(self._members[member_id])
        return LeaverReply(member_id=leaver.member_id, instance_id=leaver.instance_id, error=error)

    def _remove(self, member: _Member) -> None:
        unknown = GroupError.UNKNOWN_MEMBER_ID
        refusal = JoinReply(error=unknown, member_id="")
        self._answer(member, join=refusal, sync=SyncReply(error=unknown))
        del self._members[member.member_id]
        self._unsynced.pop(member.member_id, None)
        self._count_offers(member, -1)
        if member.instance_id is not None:
            del self._instances[member.instance_id]
        if member.member_id == self.leader:
            self.leader = next(iter(self._members), None)

    def _renew(self, member: _Member, now_ms: int) -> None:
        member.deadline_ms = self._noted(
            now_ms
            + (NEW_MEMBER_JOIN_TIMEOUT_MS if member.is_new else member.request.session_timeout_ms)
        )

    def _await_join(self, member: _Member, token: Token) -> None:
        assert member.joining is None
        member.joining = token
        self._waiting[token] = member
        self._joining += 1

    def _count_offers(self, member: _Member, step: int) -> None:
        for name in {each.name for each in member.request.protocols}:
            self._offers[name] += step
            if not self._offers[name]:
                del self._offers[name]

    # -------------------------------------------------------------------------- rebalance

    def _rebalance(self, now_ms: int) -> None:
        """Begins one, or goes on with the one that is under way."""
        if self.state is GroupState.PREPARING:
            self._complete_join_if_all_came(now_ms)
        else:
            self._prepare(now_ms)

    def _prepare(self, now_ms: int) -> None:
        """Everybody has to join again."""
        if self.state is GroupState.COMPLETING:
            self._drop_assignment(GroupError.REBALANCE_IN_PROGRESS, now_ms)
        self._sync_deadline_ms = None
        self._unsynced.clear()
        initial = self.state is GroupState.EMPTY
        self._move(GroupState.PREPARING)
        patience_ms, delay_ms = self._patience_ms(), self._settings.initial_rebalance_delay_ms
        if not initial:
            self._join_deadline_ms = now_ms + patience_ms
            self._complete_join_if_all_came(now_ms)
        elif delay_ms == 0:
            self._complete_join(now_ms)
        else:
            self._new_member_came = False
            self._initial_until_ms = now_ms + patience_ms
            self._join_deadline_ms = now_ms + delay_ms

    def _patience_ms(self) -> int:
        return max((each.request.patience_ms for each in self._members.values()), default=0)

    def _complete_join_if_all_came(self, now_ms: int) -> None:
        if self.state is not GroupState.PREPARING or self._initial_until_ms is not None:
            return
        if self._joining == len(self._members) and not self._pending:
            self._complete_join(now_ms)

    def _end_join_phase(self, now_ms: int) -> None:
        """As long as new members come, an initial rebalance waits on, within their patience."""
        until_ms = self._initial_until_ms
        if until_ms is not None and now_ms < until_ms and self._new_member_came:
            self._new_member_came = False
            delay_ms = self._settings.initial_rebalance_delay_ms
            self._join_deadline_ms = min(now_ms + delay_ms, until_ms)
        else:
            self._complete_join(now_ms)

    def _complete_join(self, now_ms: int) -> None:
        """Begins the next generation; static members are in it even if they did not come."""
        assert self.state is GroupState.PREPARING
        for member in list(self._members.values()):
            if member.joining is None and member.instance_id is None:
                self._remove(member)
        if self.leader is not None and self._members[self.leader].joining is None:
            joined = (k for k, each in self._members.items() if each.joining is not None)
            elected = next(joined, None)
            if elected is None:
                # Static members alone, and none came: their sessions decide.
                self._join_deadline_ms = now_ms + self._patience_ms()
                return
            self.leader = elected
        self._join_deadline_ms = None
        self._initial_until_ms = None
        self.generation += 1
        if not self._members:
            self.protocol = None
            self._move(GroupState.EMPTY)
            self._persist(self._describe({}), None)
            return
        self.protocol = self._vote()
        self._move(GroupState.COMPLETING)
        self._sync_deadline_ms = now_ms + self._patience_ms()
        self._unsynced = dict.fromkeys(self._members)
        for member in self._members.values():
            self._answer(member, join=self._joined(member))
            member.is_new = False
            self._renew(member, now_ms)

    def _vote(self) -> str:
        """Each member votes for the first of its protocols that all have; most votes win."""
        common = {name for name, count in self._offers.items() if count == len(self._members)}
        votes = Counter(
            next(each.name for each in member.request.protocols if each.name in common)
            for member in self._members.values()
        )
        return min(common, key=lambda name: (-votes[name], name))

    def _drop_assignment(self, error: GroupError, now_ms: int) -> None:
        self._assigning = None
        for member in self._members.values():
            member.assignment = b""
            if member.syncing is not None:
                self._answer(member, sync=SyncReply(error=error))
                self._renew(member, now_ms)

    def _move(self, state: GroupState) -> None:
        assert self.state in _BEFORE[state], f"{self.group_id}: {self.state} before {state}"
        self.state = state

    # -------------------------------------------------------------------------- durability

    def _persist(
        self, record: GroupRecord, settle: Callable[[GroupError | None, int], None] | None
    ) -> None:
        assert self._record is None
        self._record = record
        self._stores.append(_Store(record=record, settle=settle))

    def _settle(self, record: GroupRecord, error: GroupError | None, now_ms: int) -> Outcome:
        if self.state is GroupState.DEAD:
            return Outcome()
        store = self._stores.pop(0)
        assert store.record is record, "records are settled in their order"
        if store.settle is not None:
            store.settle(error, now_ms)
        if store.leave is not None:
            token, reply = store.leave
            self._reply(token, reply if error is None else LeaveReply(error=error))
        return self._take()

    def _settle_assignment(
        self, record: GroupRecord, error: GroupError | None, now_ms: int
    ) -> None:
        if self._assigning is not record:
            return  # a rebalance has begun meanwhile
        if error is not None:
            self._drop_assignment(error, now_ms)
            self._prepare(now_ms)
            return
        assert record.generation == self.generation
        assert len(record.members) == len(self._members)
        self._assigning = None
        self._move(GroupState.STABLE)
        for each in record.members:
            member = self._members[each.member_id]
            member.assignment = each.assignment
            if member.syncing is not None:
                self._answer(member, sync=self._synced(member))
                self._renew(member, now_ms)

    def _settle_replacement(
        self,
        old: _Member,
        member: _Member,
        skips_assignment: bool,
        leader: str | None,
        error: GroupError | None,
        now_ms: int,
    ) -> None:
        if self.state is not GroupState.STABLE or self._members.get(member.member_id) is not member:
            return  # it is part of the rebalance that has begun meanwhile, or it is gone
        reply = self._joined(member)
        if error is not None:
            self._swap(member, old)
            self._renew(old, now_ms)
            reply = msgspec.structs.replace(reply, error=error, member_id="")
        if error is None and skips_assignment:
            is_leader = member.member_id == self.leader
            reply = msgspec.structs.replace(reply, skip_assignment=is_leader)
        else:
            # A leader that does not know of KIP-814 is told of the old one, lest it assigns.
            reply = msgspec.structs.replace(reply, leader=leader or "", members=())
        self._answer(member, join=reply)
        self._renew(member, now_ms)

    # -------------------------------------------------------------------------- answers

    def _reply(self, token: Token, reply: Reply) -> None:
        self._waiting.pop(token, None)
        self._replies.append((token, reply))

    def _answer(
        self, member: _Member, *, join: JoinReply | None = None, sync: SyncReply | None = None
    ) -> None:
        """Answers what the member waits for, if it does."""
        if join is not None and member.joining is not None:
            if member.joining is not _GONE:
                self._reply(member.joining, join)
            member.joining = None
            self._joining -= 1
        if sync is not None and member.syncing is not None:
            if member.syncing is not _GONE:
                self._reply(member.syncing, sync)
            member.syncing = None

    def _joined(self, member: _Member) -> JoinReply:
        assert self.protocol is not None
        leads = member.member_id == self.leader
        return JoinReply(
            member_id=member.member_id,
            generation=self.generation,
            protocol_type=self.protocol_type,
            protocol=self.protocol,
            leader=self.leader or "",
            members=tuple(
                JoinedMember(
                    member_id=each.member_id,
                    instance_id=each.instance_id,
                    metadata=each.metadata(self.protocol),
                )
                for each in (self._members.values() if leads else ())
            ),
        )

    def _synced(self, member: _Member) -> SyncReply:
        return SyncReply(
            protocol_type=self.protocol_type,
            protocol=self.protocol,
            assignment=member.assignment,
        )

    def _describe(self, assignments: Mapping[str, bytes]) -> GroupRecord:
        return GroupRecord(
            generation=self.generation,
            protocol_type=self.protocol_type,
            protocol=self.protocol,
            leader=self.leader,
            members=tuple(
                self._describe_member(each, self.protocol, assignments.get(each.member_id, b""))
                for each in self._members.values()
            ),
        )

    def _describe_member(
        self, member: _Member, protocol: str | None, assignment: bytes
    ) -> MemberRecord:
        return MemberRecord(
            member_id=member.member_id,
            instance_id=member.instance_id,
            client_id=member.request.client_id,
            client_host=member.request.client_host,
            rebalance_timeout_ms=member.request.patience_ms,
            session_timeout_ms=member.request.session_timeout_ms,
            subscription=b"" if protocol is None else member.metadata(protocol),
            assignment=assignment,
        )

    def _take(self) -> Outcome:
        if self.checks_itself:
            self._check()
        outcome = Outcome(replies=tuple(self._replies), record=self._record)
        self._replies.clear()
        self._record = None
        return outcome

    def _check(self) -> None:
        """What holds between any two events."""
        members = self._members.values()
        assert (self.leader is None) == (not members)
        assert self.leader is None or self.leader in self._members
        assert self._instances == {
            each.instance_id: each.member_id for each in members if each.instance_id is not None
        }
        assert not self._pending.keys() & self._members.keys()
        assert self._joining == sum(each.joining is not None for each in members)
        assert self._offers == Counter(
            name for each in members for name in {each.name for each in each.request.protocols}
        )
        expiries_ms = self._expiries_ms()
        assert not expiries_ms or (
            self._earliest_ms is not None and self._earliest_ms <= min(expiries_ms)
        )
        owed = [each for member in members for each in (member.joining, member.syncing)]
        owed += [each.leave[0] for each in self._stores if each.leave is not None]
        assert self._waiting.keys() == {each for each in owed if each not in (None, _GONE)}
        preparing, completing = GroupState.PREPARING, GroupState.COMPLETING
        assert (self.state is preparing) == (self._join_deadline_ms is not None)
        assert self._assigning is None or self.state is completing
        assert self.state is completing or all(each.syncing is None for each in members)
        if self.state is completing or self.state is GroupState.STABLE:
            assert members
            assert self.protocol is not None
            assert all(each.offers(self.protocol) for each in members)
            assert self._unsynced.keys() <= self._members.keys()
            assert (self._sync_deadline_ms is not None) == bool(self._unsynced)
        else:
            assert self._sync_deadline_ms is None
            assert not self._unsynced
            assert self.state is preparing or not members


def _member_id(name: str, unique: str) -> str:
    """Cut where no record could hold it."""
    room = MAX_STRING_BYTES - len(f"-{unique}".encode())
    return f"{name.encode()[:room].decode(errors='ignore')}-{unique}"
