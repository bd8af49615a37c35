"""Classic consumer groups: members, generations and assignments.

The rules are those of Kafka's brokers (`ClassicGroup`, and `classicGroup…` of
`GroupMetadataManager`), with static members (KIP-345), member ids issued before joining (KIP-394),
reasons (KIP-800) and leaders that skip the assignment (KIP-814). Eager and cooperative clients
differ only in their subscriptions, which a group does not interpret.

A `Group` is a state machine; its caller passes the time, in milliseconds of one monotonic clock.
Events arrive one at a time, and each returns a `GroupResult`. Its replies can be sent immediately.
Its record must be made durable; then the caller calls `stored` or `store_failed`, in the order of
the group's records, which returns the replies that had to wait. A join, sync or leave carries a
token that the caller has never used before, and receives one reply, unless the caller cancels it. A
request that is superseded, because its member asks again or leaves, is answered too; Kafka forgets
it.

A member whose connection closes while it waits still counts as joined, and has its session timeout
to return; Kafka does not notice this, and gives it the whole rebalance.

The memory of members is counted in a `MemberMemory`, which groups share. If it is short, clients
are asked to retry, and members whose connections are closed are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import ClassVar, Final

import msgspec

from sparklog.broker.groups import checks, descriptions
from sparklog.broker.groups.group_data import GroupData
from sparklog.broker.groups.members import CANCELLED, Member, MemberMemory, new_member_id
from sparklog.broker.groups.messages import (
    Description,
    GroupError,
    GroupResult,
    GroupState,
    JoinReply,
    JoinRequest,
    Leaver,
    LeaveReply,
    LeaverReply,
    Reply,
    SyncReply,
    SyncRequest,
    Token,
)
from sparklog.formats.consumer_offsets import GroupRecord
from sparklog.settings import GroupSettings

_PREVIOUS: Final = {
    GroupState.EMPTY: {GroupState.PREPARING},
    GroupState.PREPARING: {GroupState.EMPTY, GroupState.COMPLETING, GroupState.STABLE},
    GroupState.COMPLETING: {GroupState.PREPARING},
    GroupState.STABLE: {GroupState.COMPLETING},
    GroupState.DEAD: set(GroupState),
}
"""The states from which each state can be reached."""


class _Store(msgspec.Struct, kw_only=True, eq=False):
    """A record being stored, and the continuation once it is durable or has failed."""

    record: GroupRecord
    settle: Callable[[GroupError | None, int], None] | None = None
    leave: tuple[Token, LeaveReply] | None = None


class Group(GroupData):
    """One group, empty at first."""

    checks_itself: ClassVar[bool] = False
    """True to check the invariants after each event, which visits all members: for tests."""

    def __init__(
        self,
        group_id: str,
        *,
        settings: GroupSettings,
        new_uuid: Callable[[], str],
        memory: MemberMemory | None = None,
    ) -> None:
        super().__init__(group_id, memory)
        self._settings = settings
        self._new_uuid = new_uuid
        self._unsynced: dict[str, None] = {}
        """Ids of members that have joined this generation but have not synced yet."""
        self._join_deadline_ms: int | None = None
        self._sync_deadline_ms: int | None = None
        self._initial_until_ms: int | None = None
        """When a rebalance that began with an empty group stops waiting for more members."""
        self._new_member_came = False
        self._assigning: GroupRecord | None = None
        """This generation's assignment while it is being stored."""
        self._stores: list[_Store] = []
        self._waiting: dict[Token, Member | _Store] = {}
        """The member or record that each token waits for."""
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
        memory: MemberMemory | None = None,
    ) -> Group:
        """Returns the group as it was last recorded; sessions restart.

        A group that is larger than `settings` now allow begins with a rebalance.
        """
        group = cls(group_id, settings=settings, new_uuid=new_uuid, memory=memory)
        group.generation = record.generation
        group.protocol_type = record.protocol_type
        if record.members:
            group.state = GroupState.STABLE
            group.protocol, group.members.leader = record.protocol, record.leader
            for member in descriptions.members_of(record):
                group.members.renew(member, now_ms)
                group.members.add(member)
            if len(group.members) > settings.max_size:
                group._prepare(now_ms)
        group._result()
        return group

    # -------------------------------------------------------------------------- requests

    def join(self, token: Token, request: JoinRequest, now_ms: int) -> GroupResult:
        """Handles JoinGroup; the reply is sent when the next generation begins."""
        assert token is not None
        known_id = request.member_id
        if not known_id and request.instance_id is not None:
            # Kafka refuses the new process of a static member if the group is full.
            known_id = self.members.holder(request.instance_id) or ""
        error = checks.join_error(self, self._settings, request, known_id)
        if error is GroupError.GROUP_MAX_SIZE_REACHED:
            self._reply(token, JoinReply(error=error, member_id=""))
            self.members.release(known_id)
            if known_id in self.members:
                self._remove(self.members[known_id])
            self._complete_join_if_all_joined(now_ms)
        elif error is not None:
            self._reply(token, JoinReply(error=error, member_id=request.member_id))
        elif not request.member_id:
            self._join_as_new(token, request, known_id, now_ms)
        elif request.member_id in self.members.reserved and request.instance_id is None:
            self._add(token, request, request.member_id, now_ms)
        else:
            self._rejoin(token, request, now_ms)
        return self._result()

    def sync(self, token: Token, request: SyncRequest, now_ms: int) -> GroupResult:
        """Handles SyncGroup; the reply is sent when the leader's assignment is durable."""
        assert token is not None
        error = checks.sync_error(self, request)
        if error is not None:
            self._reply(token, SyncReply(error=error))
            return self._result()
        member = self.members[request.member_id]
        self.members.renew(member, now_ms)
        self._unsynced.pop(member.member_id, None)
        if not self._unsynced:
            self._sync_deadline_ms = None
        if self.state is GroupState.STABLE:
            self._reply(token, descriptions.sync_reply(self, member))
            return self._result()
        self._answer(member, sync=SyncReply(error=GroupError.REBALANCE_IN_PROGRESS))
        member.syncing = token
        self._waiting[token] = member
        # A generation has one assignment: a leader that asks again waits for the first.
        if member.member_id == self.leader and self._assigning is None:
            record = descriptions.to_record(self, request.assignments)
            self._assigning = record
            self._persist(record, partial(self._settle_assignment, record))
        return self._result()

    def heartbeat(
        self, *, member_id: str, instance_id: str | None, generation: int, now_ms: int
    ) -> GroupError | None:
        """Handles Heartbeat; returns None if the member may continue."""
        error = checks.member_error(self, member_id, instance_id, generation)
        if error is not None:
            return error
        self.members.renew(self.members[member_id], now_ms)
        rebalancing = self.state is GroupState.PREPARING
        return GroupError.REBALANCE_IN_PROGRESS if rebalancing else None

    def leave(self, token: Token, leavers: Iterable[Leaver], now_ms: int) -> GroupResult:
        """Handles LeaveGroup; if the group becomes empty, the reply waits until that is durable."""
        error = checks.group_error(self)
        if error is not None:
            self._reply(token, LeaveReply(error=error))
            return self._result()
        count = len(self.members)
        reply = LeaveReply(members=tuple(map(self._leave, leavers)))
        # Kafka also rebalances when an id that has not joined yet is released.
        if len(self.members) < count and self.state is not GroupState.PREPARING:
            self._prepare(now_ms)
        else:
            self._complete_join_if_all_joined(now_ms)
        if self._record is None:
            self._reply(token, reply)
        else:
            self._stores[-1].leave = (token, reply)
            self._waiting[token] = self._stores[-1]
        return self._result()

    def check_commit(
        self,
        *,
        member_id: str,
        instance_id: str | None,
        generation: int,
        now_ms: int,
        transactional: bool = False,
    ) -> GroupError | None:
        """Checks whether offsets may be committed; a member's commit counts as a heartbeat."""
        error = checks.commit_error(
            self,
            member_id=member_id,
            instance_id=instance_id,
            generation=generation,
            transactional=transactional,
        )
        if error is None and not transactional and member_id in self.members:
            self.members.renew(self.members[member_id], now_ms)
        return error

    def check_delete(self) -> GroupError | None:
        """Checks whether the group may be deleted; the caller stores that and calls `unload`."""
        return checks.delete_error(self)

    @property
    def is_deserted(self) -> bool:
        """True if the group has no member, and no client has an id to join it with."""
        return self.state is GroupState.EMPTY and not self.members.reserved

    def continue_from(self, deleted: Group) -> None:
        """Continues from the group of this name whose deletion has failed.

        Does nothing if this group has begun a generation of its own.
        """
        if self.generation == 0:
            self.generation = deleted.generation
            if self.state is GroupState.EMPTY:
                self.protocol_type = deleted.protocol_type

    def describe(self, *, with_members: bool = True) -> Description:
        """Returns the description for DescribeGroups and ListGroups."""
        return descriptions.describe(self, with_members=with_members)

    # -------------------------------------------------------------------------- other events

    def next_deadline_ms(self) -> int | None:
        """Returns when to call `expire` if no event arrives first; it may find nothing to do."""
        deadlines = (self.members.earliest_ms, self._join_deadline_ms, self._sync_deadline_ms)
        return min((each for each in deadlines if each is not None), default=None)

    def expire(self, now_ms: int, *, is_short: bool = False) -> GroupResult:
        """Ends sessions, ids and phases that have expired.

        Args:
            now_ms: the current time.
            is_short: True if memory is short: members whose connection is closed are removed too.
        """
        for member in list(self.members):
            expires_ms = member.expires_ms  # the removal of others may have changed it
            is_over = expires_ms is not None and expires_ms <= now_ms
            if is_over or (is_short and member.is_gone(now_ms)):
                self._remove(member)
                self._rebalance(now_ms)
        reserved = self.members.reserved.items()
        for member_id in [each for each, due_ms in reserved if due_ms <= now_ms]:
            self.members.release(member_id)
            self._complete_join_if_all_joined(now_ms)
        if self._join_deadline_ms is not None and self._join_deadline_ms <= now_ms:
            self._end_join_phase(now_ms)
        if self._sync_deadline_ms is not None and self._sync_deadline_ms <= now_ms:
            for member_id in list(self._unsynced):
                self._remove(self.members[member_id])
            self._prepare(now_ms)
        self.members.find_earliest()
        return self._result()

    def forget(self, member_id: str, now_ms: int) -> GroupResult:
        """Withdraws an id that was handed out and has not joined yet."""
        self.members.release(member_id)
        self._complete_join_if_all_joined(now_ms)
        return self._result()

    def stored(self, record: GroupRecord, now_ms: int) -> GroupResult:
        """Continues after a result's record has become durable."""
        return self._settle(record, None, now_ms)

    def store_failed(self, record: GroupRecord, error: GroupError, now_ms: int) -> GroupResult:
        """Continues after a result's record was not stored; waiting requests receive `error`."""
        return self._settle(record, error, now_ms)

    def cancel(self, token: Token, now_ms: int) -> None:
        """Drops the reply to `token`, if it is still due."""
        waiter = self._waiting.pop(token, None)
        if isinstance(waiter, _Store):
            waiter.leave = None
        elif waiter is not None:
            if waiter.joining == token:
                waiter.joining = CANCELLED
            else:
                waiter.syncing = CANCELLED
            waiter.heard_ms = now_ms
            self.members.expire_at(waiter, now_ms + waiter.request.session_timeout_ms)

    def unload(self) -> GroupResult:
        """Ends a group that was deleted or has another coordinator; rejects waiting requests."""
        error = GroupError.NOT_COORDINATOR
        for member in self.members:
            refusal = JoinReply(error=error, member_id=member.member_id)
            self._answer(member, join=refusal, sync=SyncReply(error=error))
        for store in self._stores:
            if store.leave is not None:
                self._reply(store.leave[0], LeaveReply(error=error))
        self._stores.clear()
        self._unsynced.clear()
        self.members.clear()
        self._join_deadline_ms = self._sync_deadline_ms = None
        self._assigning = None
        self._move(GroupState.DEAD)
        return self._result()

    # -------------------------------------------------------------------------- members

    def _join_as_new(
        self, token: Token, request: JoinRequest, replaced_id: str, now_ms: int
    ) -> None:
        name = request.client_id if request.instance_id is None else request.instance_id
        member_id = new_member_id(name, self._new_uuid())
        assert member_id not in self.members
        if replaced_id:
            self._replace(token, request, self.members[replaced_id], member_id, now_ms)
        elif request.instance_id is None and request.member_id_required:
            self.members.reserve(member_id, now_ms + request.session_timeout_ms)
            required = JoinReply(error=GroupError.MEMBER_ID_REQUIRED, member_id=member_id)
            self._reply(token, required)
        else:
            self._add(token, request, member_id, now_ms)

    def _add(self, token: Token, request: JoinRequest, member_id: str, now_ms: int) -> None:
        self.members.release(member_id)
        self.protocol_type = request.protocol_type  # it differs only if the group is empty
        member = Member(
            member_id=member_id,
            instance_id=request.instance_id,
            request=request,
            is_new=True,
        )
        self._await_join(member, token)
        self.members.renew(member, now_ms)
        self.members.add(member)
        self._new_member_came = True
        self._rebalance(now_ms)

    def _rejoin(self, token: Token, request: JoinRequest, now_ms: int) -> None:
        error = checks.identity_error(self, request.member_id, request.instance_id)
        if error is not None:
            self._reply(token, JoinReply(error=error, member_id=request.member_id))
            return
        member = self.members[request.member_id]
        # A leader knows more than its subscription says, for instance about new partitions.
        forced = self.state is GroupState.STABLE and member.member_id == self.leader
        if (
            self.state is not GroupState.PREPARING
            and member.request.protocols == request.protocols
            and not forced
        ):
            # The first reply may be lost, and this request may use a new connection.
            member.request = msgspec.structs.replace(member.request, is_gone=request.is_gone)
            self._reply(token, descriptions.join_reply(self, member))
            return
        superseded = GroupError.REBALANCE_IN_PROGRESS
        self._answer(member, join=JoinReply(error=superseded, member_id=member.member_id))
        self.members.subscribe(member, request)
        self._await_join(member, token)
        if member.is_new:
            self.members.renew(member, now_ms)
        self._rebalance(now_ms)

    def _replace(
        self, token: Token, request: JoinRequest, old: Member, member_id: str, now_ms: int
    ) -> None:
        """Hands a static member's place to its new process, and fences the old one (KIP-345)."""
        fenced = GroupError.FENCED_INSTANCE_ID
        refusal = JoinReply(error=fenced, member_id=old.member_id)
        self._answer(old, join=refusal, sync=SyncReply(error=fenced))
        leader = self.leader
        member = Member(
            member_id=member_id,
            instance_id=old.instance_id,
            request=request,
            assignment=old.assignment,
        )
        self._await_join(member, token)
        self.members.renew(member, now_ms)
        self._swap(old, member)
        if self.state is GroupState.STABLE and self.members.vote() == self.protocol:
            assignments = {each.member_id: each.assignment for each in self.members}
            settle = partial(
                self._settle_replacement, old, member, request.skips_assignment, leader
            )
            self._persist(descriptions.to_record(self, assignments), settle)
        else:
            # An assignment that the leader is computing would give partitions to the old id.
            self._rebalance(now_ms)

    def _swap(self, old: Member, new: Member) -> None:
        self.members.replace(old, new)
        if old.member_id in self._unsynced:
            del self._unsynced[old.member_id]
            self._unsynced[new.member_id] = None

    def _leave(self, leaver: Leaver) -> LeaverReply:
        member_id, error = leaver.member_id, None
        if not member_id and leaver.instance_id is not None:
            member_id = self.members.holder(leaver.instance_id) or ""
        if not self.members.release(member_id):
            error = checks.identity_error(self, member_id, leaver.instance_id)
            if error is None:
                self._remove(self.members[member_id])
        return LeaverReply(member_id=leaver.member_id, instance_id=leaver.instance_id, error=error)

    def _remove(self, member: Member) -> None:
        unknown = GroupError.UNKNOWN_MEMBER_ID
        refusal = JoinReply(error=unknown, member_id="")
        self._answer(member, join=refusal, sync=SyncReply(error=unknown))
        self._unsynced.pop(member.member_id, None)
        self.members.remove(member)

    def _await_join(self, member: Member, token: Token) -> None:
        assert member.joining is None
        member.joining = token
        self._waiting[token] = member
        self.members.joining_count += 1

    # -------------------------------------------------------------------------- rebalance

    def _rebalance(self, now_ms: int) -> None:
        """Begins a rebalance, or continues the current one."""
        if self.state is GroupState.PREPARING:
            self._complete_join_if_all_joined(now_ms)
        else:
            self._prepare(now_ms)

    def _prepare(self, now_ms: int) -> None:
        """Requires all members to rejoin."""
        if self.state is GroupState.COMPLETING:
            self._drop_assignment(GroupError.REBALANCE_IN_PROGRESS, now_ms)
        self._sync_deadline_ms = None
        self._unsynced.clear()
        initial = self.state is GroupState.EMPTY
        self._move(GroupState.PREPARING)
        patience_ms = self.members.patience_ms()
        delay_ms = self._settings.initial_rebalance_delay_ms
        if not initial:
            self._join_deadline_ms = now_ms + patience_ms
            self._complete_join_if_all_joined(now_ms)
        elif delay_ms == 0:
            self._complete_join(now_ms)
        else:
            self._new_member_came = False
            self._initial_until_ms = now_ms + patience_ms
            self._join_deadline_ms = now_ms + delay_ms

    def _complete_join_if_all_joined(self, now_ms: int) -> None:
        if self.state is not GroupState.PREPARING or self._initial_until_ms is not None:
            return
        if self.members.joining_count == len(self.members) and not self.members.reserved:
            self._complete_join(now_ms)

    def _end_join_phase(self, now_ms: int) -> None:
        """Completes the join, or extends an initial rebalance while new members arrive.

        It is extended for as long as the members' patience allows.
        """
        until_ms = self._initial_until_ms
        if until_ms is not None and now_ms < until_ms and self._new_member_came:
            self._new_member_came = False
            delay_ms = self._settings.initial_rebalance_delay_ms
            self._join_deadline_ms = min(now_ms + delay_ms, until_ms)
        else:
            self._complete_join(now_ms)

    def _complete_join(self, now_ms: int) -> None:
        """Begins the next generation; it includes static members that have not rejoined."""
        assert self.state is GroupState.PREPARING
        for member in list(self.members):
            if member.joining is None and member.instance_id is None:
                self._remove(member)
        if self.leader is not None and self.members[self.leader].joining is None:
            joined = (each.member_id for each in self.members if each.joining is not None)
            elected = next(joined, None)
            if elected is None:
                # Only static members are left and none has joined: their sessions decide.
                self._join_deadline_ms = now_ms + self.members.patience_ms()
                return
            self.members.leader = elected
        self._join_deadline_ms = None
        self._initial_until_ms = None
        self.generation += 1
        if not self.members:
            self.protocol = None
            self._move(GroupState.EMPTY)
            self._persist(descriptions.to_record(self, {}), None)
            return
        self.protocol = self.members.vote()
        self._move(GroupState.COMPLETING)
        self._sync_deadline_ms = now_ms + self.members.patience_ms()
        self._unsynced = dict.fromkeys(self.members.ids())
        for member in self.members:
            self._answer(member, join=descriptions.join_reply(self, member))
            member.is_new = False
            self.members.renew(member, now_ms)

    def _drop_assignment(self, error: GroupError, now_ms: int) -> None:
        self._assigning = None
        for member in self.members:
            self.members.assign(member, b"")
            if member.syncing is not None:
                self._answer(member, sync=SyncReply(error=error))
                self.members.renew(member, now_ms)

    def _move(self, state: GroupState) -> None:
        assert self.state in _PREVIOUS[state], f"{self.group_id}: {self.state} before {state}"
        self.state = state

    # -------------------------------------------------------------------------- durability

    def _persist(
        self, record: GroupRecord, settle: Callable[[GroupError | None, int], None] | None
    ) -> None:
        assert self._record is None
        self._record = record
        self._stores.append(_Store(record=record, settle=settle))

    def _settle(self, record: GroupRecord, error: GroupError | None, now_ms: int) -> GroupResult:
        if self.state is GroupState.DEAD:
            return GroupResult()
        store = self._stores.pop(0)
        assert store.record is record, "records are settled in order"
        if store.settle is not None:
            store.settle(error, now_ms)
        if store.leave is not None:
            token, reply = store.leave
            self._reply(token, reply if error is None else LeaveReply(error=error))
        return self._result()

    def _settle_assignment(
        self, record: GroupRecord, error: GroupError | None, now_ms: int
    ) -> None:
        if self._assigning is not record:
            return  # a rebalance has begun since
        if error is not None:
            self._drop_assignment(error, now_ms)
            self._prepare(now_ms)
            return
        assert record.generation == self.generation
        assert len(record.members) == len(self.members)
        self._assigning = None
        self._move(GroupState.STABLE)
        for each in record.members:
            member = self.members[each.member_id]
            self.members.assign(member, each.assignment)
            if member.syncing is not None:
                self._answer(member, sync=descriptions.sync_reply(self, member))
                self.members.renew(member, now_ms)

    def _settle_replacement(
        self,
        old: Member,
        member: Member,
        skips_assignment: bool,
        leader: str | None,
        error: GroupError | None,
        now_ms: int,
    ) -> None:
        if self.state is not GroupState.STABLE or self.members.get(member.member_id) is not member:
            return  # it has left, or takes part in a rebalance that has since begun
        reply = descriptions.join_reply(self, member)
        if error is not None:
            self._swap(member, old)
            self.members.renew(old, now_ms)
            reply = msgspec.structs.replace(reply, error=error, member_id="")
        if error is None and skips_assignment:
            is_leader = member.member_id == self.leader
            reply = msgspec.structs.replace(reply, skip_assignment=is_leader)
        else:
            # Without KIP-814, a leader receives the old leader's id, so that it assigns nothing.
            reply = msgspec.structs.replace(reply, leader=leader or "", members=())
        self._answer(member, join=reply)
        self.members.renew(member, now_ms)

    # -------------------------------------------------------------------------- replies

    def _reply(self, token: Token, reply: Reply) -> None:
        self._waiting.pop(token, None)
        self._replies.append((token, reply))

    def _answer(
        self, member: Member, *, join: JoinReply | None = None, sync: SyncReply | None = None
    ) -> None:
        """Replies to a member's waiting requests."""
        if join is not None and member.joining is not None:
            if member.joining is not CANCELLED:
                self._reply(member.joining, join)
            member.joining = None
            self.members.joining_count -= 1
        if sync is not None and member.syncing is not None:
            if member.syncing is not CANCELLED:
                self._reply(member.syncing, sync)
            member.syncing = None

    def _result(self) -> GroupResult:
        """Returns the replies and the record of the event that ends here."""
        if self.checks_itself:
            self._check()
        result = GroupResult(replies=tuple(self._replies), record=self._record)
        self._replies.clear()
        self._record = None
        return result

    def _check(self) -> None:
        """Asserts the invariants that hold between two events."""
        members = self.members
        members.check()
        due = [each for member in members for each in (member.joining, member.syncing)]
        due += [each.leave[0] for each in self._stores if each.leave is not None]
        assert self._waiting.keys() == {each for each in due if each not in (None, CANCELLED)}
        preparing, completing = GroupState.PREPARING, GroupState.COMPLETING
        assert (self.state is preparing) == (self._join_deadline_ms is not None)
        assert self._assigning is None or self.state is completing
        assert self.state is completing or all(each.syncing is None for each in members)
        if self.state is completing or self.state is GroupState.STABLE:
            assert members
            assert self.protocol is not None
            assert all(each.offers(self.protocol) for each in members)
            assert all(each in members for each in self._unsynced)
            assert (self._sync_deadline_ms is not None) == bool(self._unsynced)
        else:
            assert self._sync_deadline_ms is None
            assert not self._unsynced
            assert self.state is preparing or not members
