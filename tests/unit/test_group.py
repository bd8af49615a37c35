from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import TypeAlias

import msgspec
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sparklog.broker.groups.group import Group
from sparklog.broker.groups.messages import (
    GroupError,
    GroupResult,
    GroupState,
    JoinReply,
    JoinRequest,
    Leaver,
    LeaveReply,
    MemberProtocol,
    Reply,
    SyncReply,
    SyncRequest,
)
from sparklog.formats.consumer_offsets import GroupRecord
from sparklog.settings import GroupSettings

SESSION_MS = 10_000
REBALANCE_MS = 60_000
DELAY_MS = 3_000

RANGE = (MemberProtocol("range", b"t"),)
COOPERATIVE = (MemberProtocol("cooperative-sticky", b"t"), MemberProtocol("range", b"t"))


class GroupDriver:
    """A group with its coordinator: a clock, a store, and everybody's answers."""

    def __init__(
        self, *, group_id: str = "g", keeps: bool = True, checked: bool = True, **settings: int
    ) -> None:
        self.settings = GroupSettings(**{"initial_rebalance_delay_ms": 3_000, **settings})
        self.now_ms = 1_000
        self.keeps = keeps
        """True if records become durable at once."""
        self.durable: list[GroupRecord] = []
        self.storing: list[GroupRecord] = []
        self.answers: dict[int, Reply] = {}
        self.waiting: set[int] = set()
        self._uuids = count(1)
        self._tokens = count(1)
        self.group = Group(group_id, settings=self.settings, new_uuid=self.uuid)
        assert self.group.checks_itself is checked

    def uuid(self) -> str:
        return str(next(self._uuids))

    def take(self, outcome: GroupResult) -> None:
        for token, reply in outcome.replies:
            assert isinstance(token, int)
            self.waiting.remove(token)
            self.answers[token] = reply
        if outcome.record is not None:
            self.storing.append(outcome.record)
            if self.keeps:
                self.store()

    def store(self) -> None:
        record = self.storing.pop(0)
        self.durable.append(record)
        self.take(self.group.stored(record, self.now_ms))

    def fail(self, error: GroupError = GroupError.COORDINATOR_NOT_AVAILABLE) -> None:
        self.take(self.group.store_failed(self.storing.pop(0), error, self.now_ms))

    def token(self) -> int:
        token = next(self._tokens)
        self.waiting.add(token)
        return token

    def pass_time(self, span_ms: int) -> None:
        until_ms = self.now_ms + span_ms
        while (due_ms := self.group.next_deadline_ms()) is not None and due_ms <= until_ms:
            self.now_ms = max(due_ms, self.now_ms)
            self.take(self.group.expire(self.now_ms))
        self.now_ms = until_ms

    def join(
        self,
        member_id: str = "",
        instance_id: str | None = None,
        *,
        protocols: tuple[MemberProtocol, ...] = RANGE,
        protocol_type: str = "consumer",
        session_ms: int = SESSION_MS,
        rebalance_ms: int = REBALANCE_MS,
        required: bool = False,
        skips: bool = True,
    ) -> int:
        request = JoinRequest(
            member_id=member_id,
            instance_id=instance_id,
            client_id="c",
            client_host="/10.0.0.1",
            session_timeout_ms=session_ms,
            rebalance_timeout_ms=rebalance_ms,
            protocol_type=protocol_type,
            protocols=protocols,
            member_id_required=required,
            skips_assignment=skips,
            reason="a test",
        )
        token = self.token()
        self.take(self.group.join(token, request, self.now_ms))
        return token

    def sync(
        self,
        member_id: str,
        assignments: Mapping[str, bytes] | None = None,
        *,
        instance_id: str | None = None,
        generation: int | None = None,
        protocol_type: str | None = "consumer",
        protocol: str | None = None,
    ) -> int:
        request = SyncRequest(
            member_id=member_id,
            instance_id=instance_id,
            generation=self.group.generation if generation is None else generation,
            protocol_type=protocol_type,
            protocol=protocol,
            assignments=assignments or {},
        )
        token = self.token()
        self.take(self.group.sync(token, request, self.now_ms))
        return token

    def leave(self, *leavers: Leaver) -> int:
        token = self.token()
        self.take(self.group.leave(token, leavers, self.now_ms))
        return token

    def heartbeat(
        self, member_id: str, instance_id: str | None = None, generation: int | None = None
    ) -> GroupError | None:
        return self.group.heartbeat(
            member_id=member_id,
            instance_id=instance_id,
            generation=self.group.generation if generation is None else generation,
            now_ms=self.now_ms,
        )

    def commit(
        self,
        member_id: str = "",
        generation: int = -1,
        instance_id: str | None = None,
        *,
        transactional: bool = False,
    ) -> GroupError | None:
        return self.group.check_commit(
            member_id=member_id,
            instance_id=instance_id,
            generation=generation,
            now_ms=self.now_ms,
            transactional=transactional,
        )

    def joined(self, token: int) -> JoinReply:
        reply = self.answers[token]
        assert isinstance(reply, JoinReply)
        return reply

    def synced(self, token: int) -> SyncReply:
        reply = self.answers[token]
        assert isinstance(reply, SyncReply)
        return reply

    def left(self, token: int) -> LeaveReply:
        reply = self.answers[token]
        assert isinstance(reply, LeaveReply)
        return reply

    def members(self) -> set[str]:
        return {each.member_id for each in self.group.describe().members}

    def assignments(self) -> dict[str, bytes]:
        return {each.member_id: each.assignment for each in self.group.describe().members}


# ------------------------------------------------------------------------------ states


def completing(
    driver: GroupDriver, instances: Iterable[str | None] = (None, None, "s")
) -> list[str]:
    """The members' ids, the leader's first, in a generation that lacks its assignment."""
    tokens = [driver.join(instance_id=each) for each in instances]
    driver.pass_time(2 * driver.settings.initial_rebalance_delay_ms)
    assert driver.group.state is GroupState.COMPLETING
    replies = [driver.joined(each) for each in tokens]
    assert {each.leader for each in replies} == {replies[0].member_id}
    return [each.member_id for each in replies]


def stable(driver: GroupDriver, instances: Iterable[str | None] = (None, None, "s")) -> list[str]:
    """The members' ids; each is assigned its own id."""
    ids = completing(driver, instances)
    sync_all(driver, ids)
    assert driver.group.state is GroupState.STABLE
    return ids


def sync_all(driver: GroupDriver, ids: list[str]) -> list[int]:
    """Everybody syncs, the leader last."""
    leader = driver.group.leader
    assert leader in ids
    tokens = [driver.sync(each) for each in ids if each != leader]
    return [*tokens, driver.sync(leader, {each: each.encode() for each in ids})]


State: TypeAlias = Callable[[GroupDriver], None]


def empty(driver: GroupDriver) -> None:
    """Returns a group that never had a member."""


def deserted(driver: GroupDriver) -> None:
    """Everybody has left; the ids are c-1, c-2 and s-3, the generation is 2."""
    ids = stable(driver)
    driver.leave(*(Leaver(member_id=each) for each in ids))
    assert driver.group.state is GroupState.EMPTY


def initial(driver: GroupDriver) -> None:
    """c-1, c-2 and s-3 join an empty group."""
    for each in (None, None, "s"):
        driver.join(instance_id=each)


def syncing(driver: GroupDriver) -> None:
    """c-1 leads c-2 and s-3 in a generation that lacks its assignment."""
    completing(driver)


def settled(driver: GroupDriver) -> None:
    """c-1 leads c-2 and s-3, and everybody has synced."""
    stable(driver)


def preparing(driver: GroupDriver) -> None:
    """The leader c-1 has joined again; the others have not."""
    stable(driver)
    driver.join("c-1")
    assert driver.group.state is GroupState.PREPARING


def pending(driver: GroupDriver) -> None:
    """Stable, and c-4 was given an id that it has not joined with."""
    stable(driver)
    reply = driver.joined(driver.join(required=True))
    assert (reply.error, reply.member_id) == (GroupError.MEMBER_ID_REQUIRED, "c-4")


def dead(driver: GroupDriver) -> None:
    """Another coordinator has taken over."""
    stable(driver)
    driver.take(driver.group.unload())


def full(driver: GroupDriver) -> None:
    """Stable with three members, of three."""
    driver.settings = GroupSettings(max_size=3, initial_rebalance_delay_ms=3_000)
    driver.group = Group("g", settings=driver.settings, new_uuid=driver.uuid)
    stable(driver)


def nameless(driver: GroupDriver) -> None:
    """Clients of old may commit without a group id; nothing else is possible."""
    driver.group = Group("", settings=driver.settings, new_uuid=driver.uuid)


WAITS = "waits"
Answer: TypeAlias = GroupError | str | None
Event: TypeAlias = Callable[[GroupDriver], Answer]


def answer(driver: GroupDriver, token: int) -> Answer:
    """The error, or None for a good answer, or that there is none yet."""
    return WAITS if token in driver.waiting else driver.answers[token].error


def join(
    member_id: str = "",
    instance_id: str | None = None,
    *,
    protocols: tuple[MemberProtocol, ...] = RANGE,
    protocol_type: str = "consumer",
    session_ms: int = SESSION_MS,
    required: bool = False,
) -> Event:
    """Returns a join."""
    return lambda driver: answer(
        driver,
        driver.join(
            member_id,
            instance_id,
            protocols=protocols,
            protocol_type=protocol_type,
            session_ms=session_ms,
            required=required,
        ),
    )


def sync(
    member_id: str,
    instance_id: str | None = None,
    *,
    behind: int = 0,
    protocol_type: str | None = "consumer",
    protocol: str | None = "range",
) -> Event:
    """Returns a sync in the group's generation, or in an earlier one."""
    return lambda driver: answer(
        driver,
        driver.sync(
            member_id,
            instance_id=instance_id,
            generation=driver.group.generation - behind,
            protocol_type=protocol_type,
            protocol=protocol,
        ),
    )


def heartbeat(member_id: str, instance_id: str | None = None, *, behind: int = 0) -> Event:
    """Returns a heartbeat."""
    return lambda driver: driver.heartbeat(member_id, instance_id, driver.group.generation - behind)


def leave(member_id: str = "", instance_id: str | None = None) -> Event:
    """One leaves; the answer is its own."""

    def event(driver: GroupDriver) -> Answer:
        reply = driver.left(driver.leave(Leaver(member_id=member_id, instance_id=instance_id)))
        return reply.error or reply.members[0].error

    return event


def commit(
    member_id: str = "",
    instance_id: str | None = None,
    *,
    behind: int | None = None,
    transactional: bool = False,
) -> Event:
    """Returns a commit, without a generation unless `behind` names one."""
    return lambda driver: driver.commit(
        member_id,
        -1 if behind is None else driver.group.generation - behind,
        instance_id,
        transactional=transactional,
    )


def delete(driver: GroupDriver) -> Answer:
    """An administrator wants the group to go."""
    return driver.group.check_delete()


UNKNOWN = GroupError.UNKNOWN_MEMBER_ID
ILLEGAL = GroupError.ILLEGAL_GENERATION
REBALANCING = GroupError.REBALANCE_IN_PROGRESS
FENCED = GroupError.FENCED_INSTANCE_ID
INCONSISTENT = GroupError.INCONSISTENT_GROUP_PROTOCOL
UNAVAILABLE = GroupError.COORDINATOR_NOT_AVAILABLE
NAMELESS = GroupError.INVALID_GROUP_ID
TIMEOUT = GroupError.INVALID_SESSION_TIMEOUT
FULL = GroupError.GROUP_MAX_SIZE_REACHED
OTHER = (MemberProtocol("range", b"other"),)
BAD = (MemberProtocol("bad", b""),)

ANSWERS: list[tuple[State, Event, Answer, GroupState]] = [
    # JoinGroup
    (nameless, join(), NAMELESS, GroupState.EMPTY),
    (empty, join(session_ms=5_999), TIMEOUT, GroupState.EMPTY),
    (empty, join(session_ms=1_800_001), TIMEOUT, GroupState.EMPTY),
    (empty, join(session_ms=6_000), WAITS, GroupState.PREPARING),
    (empty, join(session_ms=1_800_000), WAITS, GroupState.PREPARING),
    (empty, join(protocols=()), INCONSISTENT, GroupState.EMPTY),
    (empty, join(protocol_type=""), INCONSISTENT, GroupState.EMPTY),
    (empty, join("c-1"), UNKNOWN, GroupState.EMPTY),
    (empty, join("s-1", "s"), UNKNOWN, GroupState.EMPTY),
    (empty, join(required=True), GroupError.MEMBER_ID_REQUIRED, GroupState.EMPTY),
    (empty, join(instance_id="s", required=True), WAITS, GroupState.PREPARING),
    (deserted, join("c-1"), UNKNOWN, GroupState.EMPTY),
    (deserted, join(), WAITS, GroupState.PREPARING),
    (deserted, join(protocol_type="connect"), WAITS, GroupState.PREPARING),
    (initial, join(), WAITS, GroupState.PREPARING),
    (initial, join(protocol_type="connect"), INCONSISTENT, GroupState.PREPARING),
    (initial, join("c-1"), WAITS, GroupState.PREPARING),
    (syncing, join("c-1"), None, GroupState.COMPLETING),
    (syncing, join("c-2"), None, GroupState.COMPLETING),
    (syncing, join("c-2", protocols=OTHER), WAITS, GroupState.PREPARING),
    (syncing, join(), WAITS, GroupState.PREPARING),
    (syncing, join("", "s"), WAITS, GroupState.PREPARING),
    (settled, join(), WAITS, GroupState.PREPARING),
    (settled, join(protocols=BAD), INCONSISTENT, GroupState.STABLE),
    (settled, join(protocols=()), INCONSISTENT, GroupState.STABLE),
    (settled, join("c-2", protocols=BAD), INCONSISTENT, GroupState.STABLE),
    (settled, join(protocol_type="connect"), INCONSISTENT, GroupState.STABLE),
    (settled, join(required=True), GroupError.MEMBER_ID_REQUIRED, GroupState.STABLE),
    (settled, join("c-1"), WAITS, GroupState.PREPARING),
    (settled, join("c-2"), None, GroupState.STABLE),
    (settled, join("c-2", protocols=OTHER), WAITS, GroupState.PREPARING),
    (settled, join("c-9"), UNKNOWN, GroupState.STABLE),
    (settled, join("s-3", "s"), None, GroupState.STABLE),
    (settled, join("s-2", "s"), FENCED, GroupState.STABLE),
    (settled, join("c-2", "s"), FENCED, GroupState.STABLE),
    (settled, join("c-2", "other"), UNKNOWN, GroupState.STABLE),
    (settled, join("", "s"), None, GroupState.STABLE),
    (settled, join("", "other"), WAITS, GroupState.PREPARING),
    (preparing, join(), WAITS, GroupState.PREPARING),
    (preparing, join("c-2"), WAITS, GroupState.PREPARING),
    (preparing, join("c-1"), WAITS, GroupState.PREPARING),
    (preparing, join("", "s"), WAITS, GroupState.PREPARING),
    (pending, join("c-4"), WAITS, GroupState.PREPARING),
    (pending, join("c-4", "s"), FENCED, GroupState.STABLE),
    (pending, join("c-4", "other"), UNKNOWN, GroupState.STABLE),
    (full, join(), FULL, GroupState.STABLE),
    (full, join(required=True), FULL, GroupState.STABLE),
    (full, join("", "other"), FULL, GroupState.STABLE),
    (full, join("c-2"), None, GroupState.STABLE),
    (full, join("", "s"), None, GroupState.STABLE),
    (full, join("c-1"), WAITS, GroupState.PREPARING),
    (dead, join(), UNAVAILABLE, GroupState.DEAD),
    (dead, join("c-1"), UNAVAILABLE, GroupState.DEAD),
    # SyncGroup
    (nameless, sync("c-1"), NAMELESS, GroupState.EMPTY),
    (empty, sync("c-1"), UNKNOWN, GroupState.EMPTY),
    (initial, sync("c-1"), REBALANCING, GroupState.PREPARING),
    (syncing, sync("c-9"), UNKNOWN, GroupState.COMPLETING),
    (syncing, sync("c-2", behind=1), ILLEGAL, GroupState.COMPLETING),
    (syncing, sync("c-2", behind=-1), ILLEGAL, GroupState.COMPLETING),
    (syncing, sync("c-2", "s"), FENCED, GroupState.COMPLETING),
    (syncing, sync("c-2", "other"), UNKNOWN, GroupState.COMPLETING),
    (syncing, sync("c-2", protocol_type="connect"), INCONSISTENT, GroupState.COMPLETING),
    (syncing, sync("c-2", protocol="roundrobin"), INCONSISTENT, GroupState.COMPLETING),
    (syncing, sync("c-2", protocol_type=None, protocol=None), WAITS, GroupState.COMPLETING),
    (syncing, sync("c-2"), WAITS, GroupState.COMPLETING),
    (syncing, sync("s-3", "s"), WAITS, GroupState.COMPLETING),
    (syncing, sync("c-1"), None, GroupState.STABLE),
    (settled, sync("c-2"), None, GroupState.STABLE),
    (settled, sync("c-2", behind=1), ILLEGAL, GroupState.STABLE),
    (preparing, sync("c-2"), REBALANCING, GroupState.PREPARING),
    (preparing, sync("c-2", behind=1), ILLEGAL, GroupState.PREPARING),
    (pending, sync("c-4"), UNKNOWN, GroupState.STABLE),
    (dead, sync("c-1"), UNAVAILABLE, GroupState.DEAD),
    # Heartbeat
    (nameless, heartbeat("c-1"), NAMELESS, GroupState.EMPTY),
    (empty, heartbeat("c-1"), UNKNOWN, GroupState.EMPTY),
    (deserted, heartbeat("c-1"), UNKNOWN, GroupState.EMPTY),
    (initial, heartbeat("c-1"), REBALANCING, GroupState.PREPARING),
    (syncing, heartbeat("c-2"), None, GroupState.COMPLETING),
    (settled, heartbeat("c-2"), None, GroupState.STABLE),
    (settled, heartbeat("c-2", behind=1), ILLEGAL, GroupState.STABLE),
    (settled, heartbeat("c-9"), UNKNOWN, GroupState.STABLE),
    (settled, heartbeat("s-3", "s"), None, GroupState.STABLE),
    (settled, heartbeat("s-2", "s"), FENCED, GroupState.STABLE),
    (settled, heartbeat("s-2", "s", behind=1), FENCED, GroupState.STABLE),
    (settled, heartbeat("s-3", "other"), UNKNOWN, GroupState.STABLE),
    (preparing, heartbeat("c-2"), REBALANCING, GroupState.PREPARING),
    (pending, heartbeat("c-4"), UNKNOWN, GroupState.STABLE),
    (dead, heartbeat("c-1"), UNAVAILABLE, GroupState.DEAD),
    # LeaveGroup
    (nameless, leave("c-1"), NAMELESS, GroupState.EMPTY),
    (empty, leave("c-1"), UNKNOWN, GroupState.EMPTY),
    (initial, leave("c-1"), None, GroupState.PREPARING),
    (syncing, leave("c-2"), None, GroupState.PREPARING),
    (settled, leave("c-2"), None, GroupState.PREPARING),
    (settled, leave("c-9"), UNKNOWN, GroupState.STABLE),
    (settled, leave(), UNKNOWN, GroupState.STABLE),
    (settled, leave("", "s"), None, GroupState.PREPARING),
    (settled, leave("s-3", "s"), None, GroupState.PREPARING),
    (settled, leave("s-3"), None, GroupState.PREPARING),
    (settled, leave("s-2", "s"), FENCED, GroupState.STABLE),
    (settled, leave("", "other"), UNKNOWN, GroupState.STABLE),
    (preparing, leave("c-2"), None, GroupState.PREPARING),
    (pending, leave("c-4"), None, GroupState.STABLE),
    (dead, leave("c-1"), UNAVAILABLE, GroupState.DEAD),
    # OffsetCommit
    (nameless, commit(), None, GroupState.EMPTY),
    (empty, commit(), None, GroupState.EMPTY),
    (empty, commit("me"), None, GroupState.EMPTY),
    (empty, commit("me", behind=0), UNKNOWN, GroupState.EMPTY),
    (deserted, commit(), None, GroupState.EMPTY),
    (deserted, commit("c-1", behind=0), UNKNOWN, GroupState.EMPTY),
    (settled, commit(), UNKNOWN, GroupState.STABLE),
    (settled, commit(transactional=True), None, GroupState.STABLE),
    (settled, commit("c-2"), ILLEGAL, GroupState.STABLE),
    (settled, commit("c-2", behind=0), None, GroupState.STABLE),
    (settled, commit("c-2", behind=1), ILLEGAL, GroupState.STABLE),
    (settled, commit("c-2", behind=1, transactional=True), ILLEGAL, GroupState.STABLE),
    (settled, commit("c-9", behind=0), UNKNOWN, GroupState.STABLE),
    (settled, commit("", behind=0), UNKNOWN, GroupState.STABLE),
    (settled, commit("s-3", "s", behind=0), None, GroupState.STABLE),
    (settled, commit("s-2", "s", behind=0), FENCED, GroupState.STABLE),
    (settled, commit("", "s"), FENCED, GroupState.STABLE),
    (syncing, commit("c-2", behind=0), REBALANCING, GroupState.COMPLETING),
    (syncing, commit("c-2", behind=0, transactional=True), None, GroupState.COMPLETING),
    (preparing, commit("c-2", behind=0), None, GroupState.PREPARING),
    (preparing, commit(), UNKNOWN, GroupState.PREPARING),
    (dead, commit(), UNAVAILABLE, GroupState.DEAD),
    # DeleteGroups
    (empty, delete, None, GroupState.EMPTY),
    (deserted, delete, None, GroupState.EMPTY),
    (initial, delete, GroupError.NON_EMPTY_GROUP, GroupState.PREPARING),
    (syncing, delete, GroupError.NON_EMPTY_GROUP, GroupState.COMPLETING),
    (settled, delete, GroupError.NON_EMPTY_GROUP, GroupState.STABLE),
    (dead, delete, GroupError.GROUP_ID_NOT_FOUND, GroupState.DEAD),
]


@pytest.mark.parametrize(("state", "event", "expected", "then"), ANSWERS)
def test_answers(state: State, event: Event, expected: Answer, then: GroupState) -> None:
    """In each state, each request is answered as Kafka answers it, and leads where Kafka goes."""
    driver = GroupDriver()
    state(driver)
    assert event(driver) == expected
    assert driver.group.state is then


# ------------------------------------------------------------------------------ generations


def test_ids_are_told_first() -> None:
    """A dynamic member that understands it gets its id, and joins with it (KIP-394)."""
    driver = GroupDriver()
    first = driver.joined(driver.join(required=True))
    assert first == JoinReply(error=GroupError.MEMBER_ID_REQUIRED, member_id="c-1")
    token = driver.join("c-1", required=True)
    driver.pass_time(DELAY_MS)
    assert driver.joined(token).member_id == "c-1"


def test_an_id_that_nobody_joins_with_is_forgotten() -> None:
    """It holds up a rebalance for the session timeout that was asked for, and is unknown then."""
    driver = GroupDriver()
    leader, follower = stable(driver, (None, None))
    driver.join(required=True)
    tokens = [driver.join(leader), driver.join(follower)]
    assert driver.waiting == set(tokens)
    driver.pass_time(SESSION_MS - 1)
    assert driver.waiting == set(tokens)
    driver.pass_time(1)
    assert not driver.waiting
    assert driver.joined(driver.join("c-3")).error is UNKNOWN


def test_the_leader_alone_sees_the_members() -> None:
    """Everybody learns generation, protocol and leader; the leader also who is in, with what."""
    driver = GroupDriver()
    tokens = [
        driver.join(protocols=(MemberProtocol("range", b"one"),)),
        driver.join(instance_id="s", protocols=(MemberProtocol("range", b"two"),)),
    ]
    driver.pass_time(2 * DELAY_MS)
    leader, follower = (driver.joined(each) for each in tokens)
    assert (leader.generation, leader.protocol_type, leader.protocol) == (1, "consumer", "range")
    assert leader.leader == follower.leader == leader.member_id == "c-1"
    seen = [(each.member_id, each.instance_id, each.metadata) for each in leader.members]
    assert seen == [("c-1", None, b"one"), ("s-2", "s", b"two")]
    assert follower == msgspec.structs.replace(leader, member_id="s-2", members=())


def test_the_initial_rebalance_waits_for_more() -> None:
    """It waits on as long as new members come, but never beyond the rebalance timeout."""
    driver = GroupDriver()
    tokens = [driver.join(rebalance_ms=7_000)]
    driver.pass_time(DELAY_MS - 1)
    tokens.append(driver.join(rebalance_ms=7_000))
    driver.pass_time(DELAY_MS)
    tokens.append(driver.join(rebalance_ms=7_000))
    driver.pass_time(1_000)
    assert driver.waiting == set(tokens)
    driver.pass_time(1)
    assert not driver.waiting
    assert {driver.joined(each).generation for each in tokens} == {1}


def test_an_empty_group_may_change_its_protocol_type() -> None:
    """The type is that of the members, and there are none."""
    driver = GroupDriver()
    deserted(driver)
    token = driver.join(protocol_type="connect")
    driver.pass_time(DELAY_MS)
    assert driver.joined(token).protocol_type == "connect"


def test_without_a_rebalance_timeout_it_is_the_session_s() -> None:
    """JoinGroup had none in its first version."""
    driver = GroupDriver(keeps=False)
    token = driver.join(rebalance_ms=-1)
    driver.pass_time(DELAY_MS)
    driver.sync(driver.joined(token).member_id)
    (member,) = driver.storing[0].members
    assert (member.rebalance_timeout_ms, member.session_timeout_ms) == (SESSION_MS, SESSION_MS)


def test_without_a_delay_the_first_member_leads_at_once() -> None:
    """With `group.initial.rebalance.delay.ms` of 0, the first member does not wait for others."""
    driver = GroupDriver(initial_rebalance_delay_ms=0)
    assert driver.joined(driver.join()).leader == "c-1"
    driver.sync("c-1")
    assert driver.group.state is GroupState.STABLE


def test_a_group_that_everybody_left_in_the_beginning_is_empty() -> None:
    """The initial delay runs on without members, and ends in an empty generation."""
    driver = GroupDriver()
    token = driver.join()
    assert driver.left(driver.leave(Leaver(member_id="c-1"))).members[0].error is None
    assert driver.joined(token) == JoinReply(error=UNKNOWN, member_id="")
    driver.pass_time(DELAY_MS)
    assert (driver.group.state, driver.group.generation) == (GroupState.EMPTY, 1)


VOTES: list[tuple[list[str], str]] = [
    (["a b", "a b", "b a"], "a"),
    (["a b", "b a", "b a"], "b"),
    (["a b", "b c"], "b"),
    (["a c", "b c a", "a c b"], "a"),
    (["b a", "a b"], "a"),  # a tie
    (["a b", "b a"], "a"),
]


@pytest.mark.parametrize(("wishes", "elected"), VOTES)
def test_most_votes_win(wishes: list[str], elected: str) -> None:
    """Each member votes for the first of its protocols that all members have."""
    driver = GroupDriver()
    tokens = [
        driver.join(protocols=tuple(MemberProtocol(name, b"") for name in each.split()))
        for each in wishes
    ]
    driver.pass_time(2 * DELAY_MS)
    assert {driver.joined(each).protocol for each in tokens} == {elected}


def test_followers_wait_for_the_leader() -> None:
    """Followers that synced before the leader are answered with it, later ones at once."""
    driver = GroupDriver(keeps=False)
    leader, early, late = completing(driver, (None, None, None))
    first = driver.sync(early)
    assert first in driver.waiting
    second = driver.sync(leader, {leader: b"L", early: b"E", late: b"T", "stranger": b"S"})
    assert {first, second} <= driver.waiting
    driver.store()
    assert driver.synced(first) == SyncReply(
        protocol_type="consumer", protocol="range", assignment=b"E"
    )
    assert driver.synced(second).assignment == b"L"
    assert driver.synced(driver.sync(late)).assignment == b"T"
    (record,) = driver.durable
    assert (record.generation, record.protocol_type, record.protocol) == (1, "consumer", "range")
    assert record.leader == leader
    assert {each.member_id: each.assignment for each in record.members} == {
        leader: b"L",
        early: b"E",
        late: b"T",
    }
    assert {each.client_host for each in record.members} == {"/10.0.0.1"}


def test_waiting_for_the_leader_does_not_cost_the_session() -> None:
    """A waiting member needs no heartbeats, and has a whole session after the answer."""
    driver = GroupDriver()
    leader, follower = completing(driver, (None, None))
    token = driver.sync(follower)
    for _ in range(5):
        driver.pass_time(5_000)
        assert driver.heartbeat(leader) is None
    driver.sync(leader, {})
    assert driver.synced(token).error is None
    driver.pass_time(SESSION_MS - 1)
    assert driver.heartbeat(follower) is None


def test_a_follower_assigns_nothing() -> None:
    """A follower's assignments are ignored; a member without an assignment gets an empty one."""
    driver = GroupDriver()
    leader, follower = completing(driver, (None, None))
    token = driver.sync(follower, {follower: b"mine"})
    driver.sync(leader, {leader: b"all"})
    assert driver.synced(token).assignment == b""


def test_a_leader_that_asks_again_does_not_assign_twice() -> None:
    """While its assignment is being stored, a second one is not heard, and the first is given."""
    driver = GroupDriver(keeps=False)
    (leader,) = completing(driver, (None,))
    first = driver.sync(leader, {leader: b"one"})
    second = driver.sync(leader, {leader: b"two"})
    assert driver.synced(first).error is REBALANCING
    assert len(driver.storing) == 1
    driver.store()
    assert driver.synced(second).assignment == b"one"


def test_a_failed_store_makes_everybody_join_again() -> None:
    """An assignment that is not durable is not used, and neither is the previous one."""
    driver = GroupDriver()
    leader, follower = stable(driver, (None, None))
    driver.keeps = False
    driver.join(leader)
    driver.join(follower)
    assert driver.assignments() == {leader: leader.encode(), follower: follower.encode()}
    tokens = [driver.sync(follower), driver.sync(leader, {follower: b"F"})]
    driver.fail(GroupError.NOT_COORDINATOR)
    assert {driver.synced(each).error for each in tokens} == {GroupError.NOT_COORDINATOR}
    assert driver.group.state is GroupState.PREPARING
    assert set(driver.assignments().values()) == {b""}


@pytest.mark.parametrize("succeeds", [True, False])
def test_a_store_that_a_rebalance_overtook_changes_nothing(succeeds: bool) -> None:
    """Members that waited for the store were already sent to the rebalance."""
    driver = GroupDriver(keeps=False)
    leader, follower = completing(driver, (None, None))
    token = driver.sync(leader, {follower: b"F"})
    newcomer = driver.join()
    assert driver.synced(token).error is REBALANCING
    driver.store() if succeeds else driver.fail()
    assert driver.group.state is GroupState.PREPARING
    assert driver.waiting == {newcomer}
    assert set(driver.assignments().values()) == {b""}


def test_the_last_one_leaves_durably() -> None:
    """The empty generation is stored before the leave is answered."""
    driver = GroupDriver()
    (leader,) = stable(driver, (None,))
    driver.keeps = False
    token = driver.leave(Leaver(member_id=leader))
    assert token in driver.waiting
    driver.store()
    assert driver.left(token).members[0].error is None
    record = driver.durable[-1]
    assert (record.generation, record.leader, record.protocol, record.members) == (
        2,
        None,
        None,
        (),
    )


def test_a_leave_that_is_not_durable_is_refused() -> None:
    """The group is empty all the same: a coordinator that restarts waits for the sessions."""
    driver = GroupDriver()
    (leader,) = stable(driver, (None,))
    driver.keeps = False
    token = driver.leave(Leaver(member_id=leader))
    driver.fail()
    assert driver.left(token) == LeaveReply(error=UNAVAILABLE)
    assert driver.group.state is GroupState.EMPTY


def test_several_leave_at_once() -> None:
    """Each leaver is answered for itself, and one rebalance follows."""
    driver = GroupDriver()
    leader, follower, static = stable(driver)
    driver.join(required=True)
    token = driver.leave(
        Leaver(member_id=leader, reason="shutdown"),
        Leaver(member_id="nobody"),
        Leaver(instance_id="s"),
        Leaver(member_id="c-4"),
        Leaver(member_id=leader),
        Leaver(member_id=follower, instance_id="other"),
    )
    told = [(each.member_id, each.error) for each in driver.left(token).members]
    assert told == [
        (leader, None),
        ("nobody", UNKNOWN),
        ("", None),
        ("c-4", None),
        (leader, UNKNOWN),
        (follower, UNKNOWN),
    ]
    assert driver.members() == {follower}
    assert driver.group.leader == follower
    assert driver.joined(driver.join(follower)).generation == 2
    assert static not in driver.members()


def test_who_leaves_while_it_waits_is_answered() -> None:
    """A join or sync of a member that leaves ends with UNKNOWN_MEMBER_ID."""
    driver = GroupDriver()
    leader, follower = completing(driver, (None, None))
    synced = driver.sync(follower)
    driver.leave(Leaver(member_id=follower))
    assert driver.synced(synced).error is UNKNOWN
    assert driver.group.state is GroupState.PREPARING
    assert driver.joined(driver.join(leader)).members[0].member_id == leader


def test_who_asks_twice_is_answered_twice() -> None:
    """The older of two joins of a member ends with REBALANCE_IN_PROGRESS."""
    driver = GroupDriver()
    leader, _ = stable(driver, (None, None))
    first, second = driver.join(leader), driver.join(leader)
    assert driver.joined(first) == JoinReply(error=REBALANCING, member_id=leader)
    assert second in driver.waiting


# ------------------------------------------------------------------------------ timeouts


def test_a_silent_member_is_gone_after_its_session() -> None:
    """Heartbeats and commits keep a member; without them the others rebalance."""
    driver = GroupDriver()
    leader, follower, committer = stable(driver, (None, None, None))
    for _ in range(3):
        driver.pass_time(SESSION_MS - 1)
        assert driver.heartbeat(leader) is None
        assert driver.commit(committer, driver.group.generation) is None
        if follower in driver.members():
            assert driver.heartbeat(follower) is None
    driver.pass_time(SESSION_MS - 1)
    assert driver.heartbeat(leader) is None
    assert driver.commit(committer, driver.group.generation) is None
    driver.pass_time(1)
    assert driver.members() == {leader, committer}
    assert driver.heartbeat(leader) is REBALANCING


def test_everybody_silent_leaves_an_empty_group() -> None:
    """When all sessions have ended there is one empty generation, durably."""
    driver = GroupDriver()
    stable(driver)
    driver.pass_time(SESSION_MS)
    assert (driver.group.state, driver.group.generation) == (GroupState.EMPTY, 2)
    assert driver.durable[-1].members == ()
    assert driver.group.next_deadline_ms() is None


def test_who_does_not_join_again_is_out() -> None:
    """A rebalance ends without dynamic members that did not come in time, heartbeats or not."""
    driver = GroupDriver()
    leader, slow = stable(driver, (None, None))
    token = driver.join(leader)
    for _ in range(REBALANCE_MS // 5_000 - 1):
        driver.pass_time(5_000)
        assert driver.heartbeat(slow) is REBALANCING
        assert token in driver.waiting
    driver.pass_time(5_000)
    assert driver.joined(token).generation == 2
    assert driver.members() == {leader}
    assert driver.joined(driver.join(slow)).error is UNKNOWN


def test_who_does_not_sync_is_out() -> None:
    """A member that joined and never syncs is removed after the rebalance timeout."""
    driver = GroupDriver()
    leader, follower = completing(driver, (None, None))
    driver.sync(leader, {})
    for _ in range(REBALANCE_MS // 5_000 - 1):
        driver.pass_time(5_000)
        assert [driver.heartbeat(each) for each in (leader, follower)] == [None, None]
    driver.pass_time(5_000)
    assert driver.members() == {leader}
    assert driver.heartbeat(leader) is REBALANCING


def test_a_new_member_waits_five_minutes() -> None:
    """A new member may have vanished unnoticed, so a longer rebalance drops it."""
    driver = GroupDriver()
    leader, slow = stable(driver, (None, None))
    token = driver.join(leader, rebalance_ms=900_000, protocols=OTHER)
    newcomer = driver.join(rebalance_ms=900_000)
    for _ in range(300_000 // 5_000):
        assert driver.waiting == {token, newcomer}
        assert driver.heartbeat(slow) is REBALANCING
        driver.pass_time(5_000)
    assert driver.joined(newcomer) == JoinReply(error=UNKNOWN, member_id="")
    assert driver.waiting == {token}


def test_the_leader_may_crash_while_others_join() -> None:
    """The first of those who joined again leads the next generation."""
    driver = GroupDriver()
    leader, *followers = stable(driver, (None, None, None))
    tokens = [driver.join(each, protocols=OTHER) for each in followers]
    assert driver.group.leader == leader
    driver.pass_time(SESSION_MS)
    replies = [driver.joined(each) for each in tokens]
    assert {each.leader for each in replies} == {followers[0]}
    assert {each.member_id for each in replies[0].members} == set(followers)
    sync_all(driver, followers)
    assert driver.assignments() == {each: each.encode() for each in followers}


def test_the_leader_may_crash_before_it_assigns() -> None:
    """The followers that wait for its assignment are sent to join again, under another leader."""
    driver = GroupDriver()
    leader, *followers = completing(driver, (None, None, None))
    tokens = [driver.sync(each) for each in followers]
    driver.pass_time(SESSION_MS)
    assert {driver.synced(each).error for each in tokens} == {REBALANCING}
    assert driver.members() == set(followers)
    tokens = [driver.join(each) for each in followers]
    assert {driver.joined(each).leader for each in tokens} == {followers[0]}
    assert leader not in driver.members()


def test_a_closed_connection_counts_as_joined_for_a_session() -> None:
    """Its member may come back in that time, and is not in the next generation if it does not."""
    driver = GroupDriver()
    leader, follower, slow = stable(driver, (None, None, None))
    lost = driver.join(follower, protocols=OTHER)
    driver.group.cancel(lost, driver.now_ms)
    token = driver.join(leader)
    driver.waiting.remove(lost)
    for _ in range(3):
        driver.pass_time(4_000)
        driver.heartbeat(slow)
    assert driver.members() == {leader, slow}
    driver.leave(Leaver(member_id=slow))
    assert driver.joined(token).members[0].member_id == leader


def test_a_closed_connection_gives_a_session_from_then_on() -> None:
    """However long its member had waited; coming back, it waits as before."""
    driver = GroupDriver()
    leader, slow = stable(driver, (None, None))
    tokens = [driver.join(leader), driver.join()]
    for _ in range(4):
        driver.pass_time(5_000)
        driver.heartbeat(slow)
    for token in tokens:
        driver.group.cancel(token, driver.now_ms)
        driver.waiting.remove(token)
    driver.pass_time(SESSION_MS - 1)
    assert driver.members() == {leader, slow, "c-3"}
    again = driver.join("c-3")
    for _ in range(4):
        driver.heartbeat(slow)
        driver.pass_time(5_000)
        assert again in driver.waiting


def test_a_closed_connection_of_a_syncing_member_ends_with_its_session() -> None:
    """The leader may take as long as it likes to assign, but not for a member that is gone."""
    driver = GroupDriver()
    leader, follower = completing(driver, (None, None))
    token = driver.sync(follower)
    driver.group.cancel(token, driver.now_ms)
    driver.pass_time(SESSION_MS - 1)
    assert driver.heartbeat(leader) is None
    driver.pass_time(1)
    assert driver.members() == {leader}
    assert driver.group.state is GroupState.PREPARING


def test_a_member_comes_back_for_an_answer_that_it_lost() -> None:
    """Joining again with what it said before, it gets the generation that has begun meanwhile."""
    driver = GroupDriver()
    leader, follower = stable(driver, (None, None))
    lost = driver.join(leader)
    driver.group.cancel(lost, driver.now_ms)
    driver.waiting.remove(lost)
    assert driver.joined(driver.join(follower)).generation == 2
    again = driver.joined(driver.join(leader))
    assert (again.generation, len(again.members)) == (2, 2)
    waits = driver.sync(leader, {})
    assert driver.synced(waits).error is None


def test_a_closed_connection_while_it_syncs_or_leaves() -> None:
    """Requests of closed connections are not answered, and the group continues."""
    driver = GroupDriver(keeps=False)
    (leader,) = completing(driver, (None,))
    synced = driver.sync(leader, {leader: b"L"})
    driver.group.cancel(synced, driver.now_ms)
    driver.store()
    assert driver.assignments() == {leader: b"L"}
    gone = driver.leave(Leaver(member_id=leader))
    driver.group.cancel(gone, driver.now_ms)
    driver.group.cancel(99, driver.now_ms)
    driver.store()
    assert driver.waiting == {synced, gone}
    assert driver.group.state is GroupState.EMPTY


# ------------------------------------------------------------------------------ static members


@pytest.mark.parametrize("skips", [True, False])
def test_a_rolling_bounce_of_static_members_rebalances_nothing(skips: bool) -> None:
    """Each new process gets a new id, the old part and generation; the old one is fenced."""
    driver = GroupDriver()
    ids = stable(driver, ("a", "b", "c"))
    before = {each.split("-")[0]: part for each, part in driver.assignments().items()}
    for old in ids:
        name = old.split("-")[0]
        leads = driver.group.leader == old
        reply = driver.joined(driver.join(instance_id=name, skips=skips))
        assert reply.error is None
        assert (reply.generation, driver.group.state) == (1, GroupState.STABLE)
        assert reply.member_id == f"{name}-{int(old.split('-')[1]) + 3}"
        assert reply.skip_assignment == (skips and leads)
        assert len(reply.members) == (3 if skips and leads else 0)
        # KIP-814: an older client that is named leader would assign.
        assert (reply.leader == reply.member_id) == (skips and leads)
        assert (
            driver.synced(driver.sync(reply.member_id, instance_id=name)).assignment == before[name]
        )
        assert driver.heartbeat(old, name) is FENCED
        assert driver.heartbeat(old) is UNKNOWN
        assert driver.heartbeat(reply.member_id, name) is None
    assert {each.split("-")[0]: part for each, part in driver.assignments().items()} == before
    assert {each.member_id for each in driver.durable[-1].members} == driver.members()
    assert {each.assignment for each in driver.durable[-1].members} == set(before.values())


def test_a_static_member_is_away_for_a_while() -> None:
    """Within its session timeout nothing changes; after it, its partitions move to others."""
    driver = GroupDriver()
    leader, static = stable(driver, (None, "s"))
    driver.pass_time(SESSION_MS - 1)
    driver.heartbeat(leader)
    assert static in driver.members()
    driver.pass_time(1)
    assert driver.members() == {leader}
    reply = driver.joined(driver.join(leader))
    assert (reply.generation, len(reply.members)) == (2, 1)


def test_a_fenced_sync_begins_a_rebalance() -> None:
    """The leader may have seen the old id already, and would assign its partitions to no member."""
    driver = GroupDriver()
    leader, static = completing(driver, (None, "s"))
    old = driver.sync(static, instance_id="s")
    new = driver.join(instance_id="s")
    assert driver.synced(old) == SyncReply(error=FENCED)
    assert new in driver.waiting
    assert driver.synced(driver.sync(leader, {static: b"part"})).error is REBALANCING
    assert driver.joined(driver.join(leader)).generation == driver.joined(new).generation == 2


def test_a_fenced_join_names_the_old_id() -> None:
    """In a rebalance the new process takes the place of the one that waits."""
    driver = GroupDriver()
    leader, static = stable(driver, (None, "s"))
    other = driver.join()
    old = driver.join(static, "s")
    new = driver.join(instance_id="s")
    assert driver.joined(old) == JoinReply(error=FENCED, member_id=static)
    assert {other, new} == driver.waiting
    assert driver.joined(driver.join(leader)).generation == 2
    assert driver.joined(new).generation == 2


def test_a_new_process_with_other_protocols_rebalances() -> None:
    """If the vote on the protocol changes, the group must rebalance."""
    driver = GroupDriver()
    tokens = [driver.join(instance_id=each, protocols=COOPERATIVE) for each in ("a", "b")]
    driver.pass_time(2 * DELAY_MS)
    ids = [driver.joined(each).member_id for each in tokens]
    sync_all(driver, ids)
    assert driver.group.describe().protocol == "cooperative-sticky"
    token = driver.join(instance_id="b", protocols=RANGE)
    assert token in driver.waiting
    assert driver.group.state is GroupState.PREPARING
    assert driver.joined(driver.join(ids[0], "a", protocols=COOPERATIVE)).protocol == "range"


def test_a_replacement_that_is_not_durable_is_taken_back() -> None:
    """The old process continues, and the new one has to find the coordinator again."""
    driver = GroupDriver()
    (static,) = stable(driver, ("s",))
    driver.keeps = False
    token = driver.join(instance_id="s", protocols=OTHER)
    assert driver.heartbeat(static, "s") is FENCED
    driver.fail(GroupError.NOT_COORDINATOR)
    reply = driver.joined(token)
    assert (reply.error, reply.member_id) == (GroupError.NOT_COORDINATOR, "")
    assert (reply.generation, reply.leader, reply.members) == (1, static, ())
    assert driver.heartbeat(static, "s") is None
    assert driver.members() == {static}
    assert driver.synced(driver.sync(static)).assignment == static.encode()


@pytest.mark.parametrize("succeeds", [True, False])
def test_a_session_is_whole_after_a_replacement(succeeds: bool) -> None:
    """The old or the new process has all of it, however long the store took."""
    driver = GroupDriver()
    (old,) = stable(driver, ("s",))
    driver.keeps = False
    token = driver.join(instance_id="s")
    driver.pass_time(3 * SESSION_MS)
    driver.store() if succeeds else driver.fail()
    driver.pass_time(SESSION_MS - 1)
    holder = driver.joined(token).member_id if succeeds else old
    assert driver.heartbeat(holder, "s") is None
    driver.pass_time(SESSION_MS)
    assert driver.members() == set()


def test_a_new_process_has_to_sync_if_the_old_one_did_not() -> None:
    """Otherwise it is out when the time to sync is over, as the old one would have been."""
    driver = GroupDriver()
    leader, static = completing(driver, (None, "s"))
    driver.sync(leader, {static: b"part"})
    replaced = driver.joined(driver.join(instance_id="s")).member_id
    for _ in range(REBALANCE_MS // 5_000):
        assert driver.heartbeat(leader) is None
        assert driver.heartbeat(replaced, "s") is None
        driver.pass_time(5_000)
    assert driver.members() == {leader}


@pytest.mark.parametrize("succeeds", [True, False])
def test_a_replacement_that_a_rebalance_overtook_is_part_of_it(succeeds: bool) -> None:
    """The new process has joined already, whatever becomes of the store."""
    driver = GroupDriver()
    leader, _ = stable(driver, (None, "s"))
    driver.keeps = False
    token = driver.join(instance_id="s")
    driver.join()
    driver.store() if succeeds else driver.fail()
    assert token in driver.waiting
    driver.join(leader)
    assert driver.joined(token).generation == 2
    assert driver.members() == {leader, driver.joined(token).member_id, "c-4"}
    assert driver.group.state is GroupState.COMPLETING


@pytest.mark.parametrize("succeeds", [True, False])
def test_a_replacement_of_a_replacement_fences_it(succeeds: bool) -> None:
    """The last of several new processes wins, in any order in which their stores end."""
    driver = GroupDriver()
    stable(driver, ("s",))
    driver.keeps = False
    first = driver.join(instance_id="s")
    second = driver.join(instance_id="s")
    assert driver.joined(first).error is FENCED
    driver.store() if succeeds else driver.fail()
    assert second in driver.waiting
    driver.store()
    assert driver.joined(second).error is None
    assert driver.members() == {driver.joined(second).member_id}


def test_static_members_stay_though_they_do_not_join() -> None:
    """The rebalance timeout removes dynamic members only; a static one has its session."""
    driver = GroupDriver()
    tokens = [
        driver.join(instance_id="a", session_ms=120_000),
        driver.join(instance_id="b", session_ms=120_000),
        driver.join(),
    ]
    driver.pass_time(2 * DELAY_MS)
    leader, static, dynamic = (driver.joined(each).member_id for each in tokens)
    sync_all(driver, [leader, static, dynamic])
    token = driver.join(dynamic, protocols=OTHER)
    driver.pass_time(REBALANCE_MS)
    reply = driver.joined(token)
    assert (reply.leader, len(reply.members)) == (dynamic, 3)
    # And who does not sync either is out.
    driver.sync(dynamic, {})
    for _ in range(REBALANCE_MS // 5_000):
        assert driver.heartbeat(dynamic) is None
        driver.pass_time(5_000)
    assert driver.members() == {dynamic}


def test_static_members_none_of_whom_joins_keep_their_generation() -> None:
    """The rebalance continues until one of them joins or their sessions have ended."""
    driver = GroupDriver()
    tokens = [driver.join(instance_id=each, session_ms=200_000) for each in ("a", "b")]
    tokens.append(driver.join())
    driver.pass_time(2 * DELAY_MS)
    first, second, dynamic = (driver.joined(each).member_id for each in tokens)
    sync_all(driver, [first, second, dynamic])
    driver.leave(Leaver(member_id=dynamic))
    driver.pass_time(REBALANCE_MS + 1)
    assert (driver.group.state, driver.group.generation) == (GroupState.PREPARING, 1)
    token = driver.join(second, "b")
    driver.pass_time(REBALANCE_MS)
    assert (driver.joined(token).generation, driver.joined(token).leader) == (2, second)
    assert driver.members() == {first, second}


# ------------------------------------------------------------------------------ size


def test_members_beyond_the_limit_are_refused() -> None:
    """The first members that join an empty group stay; member ids alone do not count."""
    driver = GroupDriver(max_size=10)
    ids = [driver.joined(driver.join(required=True)).member_id for _ in range(11)]
    tokens = [driver.join(each, required=True) for each in ids]
    assert driver.joined(tokens[-1]) == JoinReply(error=FULL, member_id="")
    driver.pass_time(3 * DELAY_MS)
    assert {driver.joined(each).error for each in tokens[:-1]} == {None}
    assert len(driver.members()) == 10


def test_who_is_refused_is_not_waited_for() -> None:
    """An id that was given out and came too late does not hold up the rebalance of the others."""
    driver = GroupDriver(max_size=2)
    (leader,) = stable(driver, (None,))
    driver.join(required=True)
    newcomer = driver.join()
    token = driver.join(leader)
    assert driver.waiting == {newcomer, token}
    assert driver.joined(driver.join("c-2", required=True)).error is FULL
    assert driver.joined(newcomer).generation == driver.joined(token).generation == 2
    assert driver.joined(driver.join("c-2", required=True)).error is FULL


def test_who_waits_in_a_full_rebalance_may_ask_again() -> None:
    """Its place is its own, also when all places are taken."""
    driver = GroupDriver(max_size=1)
    first, second = driver.join(), driver.join("c-1")
    assert driver.joined(first).error is REBALANCING
    assert second in driver.waiting
    assert driver.joined(driver.join()).error is FULL
    assert driver.members() == {"c-1"}


def test_a_group_that_is_too_large_sends_the_last_ones_away() -> None:
    """A restored group above a lower limit rebalances, and the last members to join are refused."""
    driver = GroupDriver()
    ids = stable(driver, (None,) * 5)
    driver.settings = GroupSettings(max_size=3, initial_rebalance_delay_ms=3_000)
    driver.group = Group.restore(
        "g", driver.durable[-1], driver.now_ms, settings=driver.settings, new_uuid=driver.uuid
    )
    assert driver.group.state is GroupState.PREPARING
    assert driver.heartbeat(ids[4]) is REBALANCING
    tokens = [driver.join(each) for each in ids]
    assert [driver.joined(each).error for each in tokens] == [None, None, None, FULL, FULL]
    assert driver.members() == set(ids[:3])


# ------------------------------------------------------------------------------ restarts


@pytest.mark.parametrize("max_size", [3, 100])
def test_members_go_on_after_a_restart(max_size: int) -> None:
    """A coordinator that takes over restores members, assignments and generation; sessions restart.

    As many members as there may be are not too many.
    """
    driver = GroupDriver(max_size=max_size)
    leader, follower, static = stable(driver)
    described = driver.group.describe()
    driver.pass_time(SESSION_MS - 1)
    driver.group = Group.restore(
        "g", driver.durable[-1], driver.now_ms, settings=driver.settings, new_uuid=driver.uuid
    )
    assert driver.group.describe() == described
    driver.pass_time(SESSION_MS - 1)
    assert [driver.heartbeat(each) for each in (leader, follower)] == [None, None]
    assert driver.heartbeat(static, "s") is None
    assert driver.synced(driver.sync(follower)).assignment == follower.encode()
    assert driver.joined(driver.join(follower)).generation == 1
    assert driver.join(leader) in driver.waiting


def test_an_empty_group_is_restored_with_its_generation() -> None:
    """The next generation is beyond all that were durable."""
    driver = GroupDriver()
    deserted(driver)
    driver.group = Group.restore(
        "g", driver.durable[-1], driver.now_ms, settings=driver.settings, new_uuid=driver.uuid
    )
    assert (driver.group.state, driver.group.generation) == (GroupState.EMPTY, 2)
    assert driver.group.next_deadline_ms() is None
    token = driver.join()
    driver.pass_time(DELAY_MS)
    assert driver.joined(token).generation == 3


@pytest.mark.parametrize("state", [initial, syncing, preparing])
def test_a_coordinator_that_goes_tells_everybody(state: State) -> None:
    """Waiting requests are answered with NOT_COORDINATOR, and no deadline remains."""
    driver = GroupDriver(keeps=False) if state is syncing else GroupDriver()
    state(driver)
    if state is syncing:
        driver.sync("c-2")
        driver.sync("c-1")
    waiting = set(driver.waiting)
    assert waiting
    driver.take(driver.group.unload())
    errors = {answer(driver, each) for each in waiting}
    assert errors == {GroupError.NOT_COORDINATOR}
    assert driver.group.next_deadline_ms() is None
    for record in driver.storing:
        assert driver.group.stored(record, driver.now_ms) == GroupResult()
    assert driver.group.describe().members == ()


def test_a_coordinator_that_goes_answers_a_leave_that_waits() -> None:
    """The leave is not confirmed, because its store may have failed."""
    driver = GroupDriver()
    (leader,) = stable(driver, (None,))
    driver.keeps = False
    token = driver.leave(Leaver(member_id=leader))
    driver.take(driver.group.unload())
    assert driver.left(token).error is GroupError.NOT_COORDINATOR


def test_a_description_tells_subscriptions_of_a_stable_group() -> None:
    """In other states the protocol may change yet."""
    driver = GroupDriver()
    completing(driver, (None,))
    described = driver.group.describe()
    assert (described.protocol_type, described.protocol) == ("consumer", "")
    assert described.members[0].subscription == b""
    driver.sync("c-1", {"c-1": b"part"})
    described = driver.group.describe()
    assert described.protocol == "range"
    (member,) = described.members
    assert (member.subscription, member.assignment) == (b"t", b"part")
    assert (member.client_id, member.client_host) == ("c", "/10.0.0.1")


# ------------------------------------------------------------------------------ more scenarios


def test_a_cooperative_rebalance_in_two_steps() -> None:
    """Partitions that a member revokes in one generation are assigned in the next one (KIP-429)."""
    driver = GroupDriver(initial_rebalance_delay_ms=0)

    def owning(*partitions: int) -> tuple[MemberProtocol, ...]:
        return (MemberProtocol("cooperative-sticky", bytes(partitions)),)

    old = driver.joined(driver.join(protocols=owning())).member_id
    assert driver.synced(driver.sync(old, {old: bytes([0, 1])})).assignment == bytes([0, 1])
    joining = driver.join(protocols=owning())
    assert driver.heartbeat(old) is REBALANCING
    reply = driver.joined(driver.join(old, protocols=owning(0, 1)))
    new = driver.joined(joining).member_id
    assert {each.member_id: each.metadata for each in reply.members} == {
        old: bytes([0, 1]),
        new: b"",
    }
    waits = driver.sync(new)
    assert driver.synced(driver.sync(old, {old: bytes([0])})).assignment == bytes([0])
    assert driver.synced(waits).assignment == b""
    # The old member has revoked 1, and says so by joining again.
    token = driver.join(old, protocols=owning(0))
    assert driver.heartbeat(new) is REBALANCING
    assert driver.joined(driver.join(new, protocols=owning())).generation == 3
    assert driver.joined(token).generation == 3
    driver.sync(old, {old: bytes([0]), new: bytes([1])})
    assert driver.synced(driver.sync(new)).assignment == bytes([1])
    assert driver.assignments() == {old: bytes([0]), new: bytes([1])}


def test_fifty_members_join() -> None:
    """They are one generation under one leader, and one more means the next for all of them."""
    driver = GroupDriver()
    ids = []
    for _ in range(50):
        ids.append(driver.joined(driver.join(required=True)).member_id)
        driver.pass_time(20)
    tokens = [driver.join(each, required=True) for each in ids]
    driver.pass_time(2 * DELAY_MS)
    replies = [driver.joined(each) for each in tokens]
    assert {each.generation for each in replies} == {1}
    assert [len(each.members) for each in replies] == [50] + [0] * 49
    sync_all(driver, ids)
    assert driver.assignments() == {each: each.encode() for each in ids}
    newcomer = driver.join()
    for each in ids:
        assert driver.heartbeat(each) is REBALANCING
        driver.join(each)
    assert not driver.waiting
    assert driver.joined(newcomer).generation == 2
    assert driver.group.state is GroupState.COMPLETING


def test_the_cost_of_a_member_does_not_rise_with_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands start at once, join, and join again for one who comes later."""
    monkeypatch.setattr(Group, "checks_itself", False)
    driver = GroupDriver(checked=False)
    began = time.process_time()
    ids = []
    for _ in range(2_000):
        ids.append(driver.joined(driver.join(required=True, protocols=COOPERATIVE)).member_id)
        driver.group.next_deadline_ms()
    tokens = [driver.join(each, required=True, protocols=COOPERATIVE) for each in ids]
    driver.pass_time(2 * DELAY_MS)
    assert {driver.joined(each).generation for each in tokens} == {1}
    sync_all(driver, ids)
    late = driver.join(protocols=COOPERATIVE)
    for each in ids:
        assert driver.heartbeat(each) is REBALANCING
        driver.join(each, protocols=COOPERATIVE)
    assert driver.joined(late).generation == 2
    assert time.process_time() - began < 2.0


def test_thousands_of_connections_may_close_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving members are found without a scan of all others."""
    monkeypatch.setattr(Group, "checks_itself", False)
    driver = GroupDriver(checked=False)
    tokens = [driver.join(protocols=COOPERATIVE) for _ in range(8_000)]
    began = time.process_time()
    for each in tokens:
        driver.group.cancel(each, driver.now_ms)
    assert time.process_time() - began < 0.2


def test_a_deadline_that_moved_is_not_missed() -> None:
    """It is checked when the former deadline has passed, even if no member was silent."""
    driver = GroupDriver()
    ids = stable(driver, (None, None))
    first_ms = driver.now_ms + SESSION_MS
    assert driver.group.next_deadline_ms() == first_ms
    driver.now_ms += SESSION_MS // 2
    assert [driver.heartbeat(each) for each in ids] == [None, None]
    assert driver.group.expire(first_ms) == GroupResult()
    assert driver.group.next_deadline_ms() == first_ms + SESSION_MS // 2


# ------------------------------------------------------------------------------ whatever happens


class Client(msgspec.Struct):
    """State of a client process."""

    instance_id: str | None
    protocols: tuple[MemberProtocol, ...]
    session_ms: int
    required: bool
    skips: bool
    member_id: str = ""
    generation: int = -1
    leads: bool = False
    others: tuple[str, ...] = ()
    token: int | None = None
    stale: bool = True
    """Has to join before it may sync."""
    synced: bool = False
    silent: bool = False


def identity(member_id: str) -> str:
    """Returns the identity that all processes of a static member share."""
    name = member_id.partition("-")[0]
    return member_id if name == "c" else name


OFFERS = [COOPERATIVE, COOPERATIVE[::-1], RANGE, OTHER, (*BAD, *RANGE), BAD]
FAILURES = [
    GroupError.COORDINATOR_NOT_AVAILABLE,
    GroupError.NOT_COORDINATOR,
    GroupError.UNKNOWN_SERVER_ERROR,
]


class AnyHistory(RuleBasedStateMachine):
    """Clients that do what clients do, in any order, over a store that fails and restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = GroupDriver(keeps=False)
        self.clients: list[Client] = []
        self.asked: dict[int, tuple[Client, int]] = {}
        """Clients waiting for a token, and the generation of their sync."""
        self.agreed: dict[int, tuple[str, str | None, str | None]] = {}
        """Leader, type and protocol of each generation, as its members received them."""
        self.generation = 0

    @initialize(delay_ms=st.sampled_from([0, DELAY_MS]), max_size=st.integers(2, 5))
    def begin(self, delay_ms: int, max_size: int) -> None:
        self.driver = GroupDriver(
            keeps=False, initial_rebalance_delay_ms=delay_ms, max_size=max_size
        )

    # -------------------------------------------------------------------------- clients

    @rule(
        instance_id=st.sampled_from([None, "a", "b"]),
        protocols=st.sampled_from(OFFERS),
        session_ms=st.sampled_from([SESSION_MS, 2 * REBALANCE_MS]),
        required=st.booleans(),
        skips=st.booleans(),
    )
    def starts(
        self,
        instance_id: str | None,
        protocols: tuple[MemberProtocol, ...],
        session_ms: int,
        required: bool,
        skips: bool,
    ) -> None:
        client = Client(instance_id, protocols, session_ms, required, skips)
        self.clients.append(client)
        self._join(client)

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), changes=st.booleans())
    def joins(self, data: st.DataObject, changes: bool) -> None:
        client = self._one(data)
        if changes and client.token is None:
            client.protocols = data.draw(st.sampled_from(OFFERS))
        self._join(client)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def syncs(self, data: st.DataObject) -> None:
        self._sync(self._one(data))

    @precondition(lambda self: self.clients)
    @rule(rounds=st.integers(1, 4), stores=st.booleans())
    def everybody_goes_on(self, rounds: int, stores: bool) -> None:
        """Lets every live client that does not wait send the next request of its protocol."""
        for _ in range(rounds):
            for client in self.clients:
                if not client.silent:
                    if client.stale:
                        self._join(client)
                    elif not client.synced:
                        self._sync(client)
            if stores:
                self._finish_stores()
            self._live(DELAY_MS)

    @rule(span_ms=st.sampled_from([SESSION_MS, REBALANCE_MS, 2 * REBALANCE_MS]))
    def everybody_lives_on(self, span_ms: int) -> None:
        """Time passes, with heartbeats."""
        for _ in range(span_ms // 5_000):
            self._live(5_000)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def heartbeats(self, data: st.DataObject) -> None:
        self._beat(self._one(data))

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def commits(self, data: st.DataObject) -> None:
        client = self._one(data)
        self.driver.commit(client.member_id, client.generation, client.instance_id)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        client = self._one(data)
        self.clients.remove(client)
        self._drain()
        leaver = Leaver(member_id=client.member_id, instance_id=client.instance_id)
        self.asked[self.driver.leave(leaver)] = (client, -1)
        self._drain()

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def loses_its_connection(self, data: st.DataObject) -> None:
        self._disconnect(self._one(data))

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def bounces(self, data: st.DataObject) -> None:
        """A new process knows its instance id, if that."""
        client = self._one(data)
        self._disconnect(client)
        client.member_id = ""
        self._join(client)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def falls_silent(self, data: st.DataObject) -> None:
        self._one(data).silent = True

    # -------------------------------------------------------------------------- the coordinator

    @rule(span_ms=st.sampled_from([1, 500, DELAY_MS, SESSION_MS - 1, SESSION_MS, REBALANCE_MS]))
    def time_passes(self, span_ms: int) -> None:
        self.driver.pass_time(span_ms)
        self._drain()

    @precondition(lambda self: self.driver.storing)
    @rule()
    def stores(self) -> None:
        self.driver.store()
        self._drain()

    @precondition(lambda self: self.driver.storing)
    @rule(error=st.sampled_from(FAILURES))
    def fails_to_store(self, error: GroupError) -> None:
        self.driver.fail(error)
        self._drain()

    @precondition(lambda self: self.driver.durable)
    @rule()
    def restarts(self) -> None:
        """Connections are lost, and records on their way with them."""
        driver = self.driver
        driver.take(driver.group.unload())
        self._drain()
        driver.storing.clear()
        record = driver.durable[-1]
        driver.group = Group.restore(
            "g", record, driver.now_ms, settings=driver.settings, new_uuid=driver.uuid
        )
        self.generation = record.generation
        self.agreed = {k: v for k, v in self.agreed.items() if k <= record.generation}

    # -------------------------------------------------------------------------- what must hold

    @invariant()
    def generations_never_go_back(self) -> None:
        assert self.driver.group.generation >= self.generation
        self.generation = self.driver.group.generation

    @invariant()
    def something_is_due_while_somebody_waits(self) -> None:
        if self.driver.waiting and not self.driver.storing:
            assert self.driver.group.next_deadline_ms() is not None

    def teardown(self) -> None:
        """When everybody is silent, everybody is answered, and gone in the end."""
        self._finish_stores()
        for _ in range(10):
            self.driver.pass_time(REBALANCE_MS)
            self._finish_stores()
        assert not self.driver.waiting
        assert not self.asked
        assert self.driver.members() == set()
        assert self.driver.group.state is GroupState.EMPTY
        assert self.driver.group.next_deadline_ms() is None

    # -------------------------------------------------------------------------- how

    def _one(self, data: st.DataObject) -> Client:
        return self.clients[data.draw(st.integers(0, len(self.clients) - 1))]

    def _disconnect(self, client: Client) -> None:
        if client.token is not None:
            self.driver.group.cancel(client.token, self.driver.now_ms)
            self.driver.waiting.remove(client.token)
            del self.asked[client.token]
            client.token = None

    def _live(self, span_ms: int) -> None:
        for client in self.clients:
            if not client.silent and client.token is None:
                self._beat(client)
        self.driver.pass_time(span_ms)
        self._drain()

    def _beat(self, client: Client) -> None:
        error = self.driver.heartbeat(client.member_id, client.instance_id, client.generation)
        if error is not None:
            client.stale = True
        if error in (UNKNOWN, FENCED):
            client.member_id = ""

    def _join(self, client: Client) -> None:
        if client.token is not None:
            return
        driver = self.driver
        client.token = driver.join(
            client.member_id,
            client.instance_id,
            protocols=client.protocols,
            session_ms=client.session_ms,
            required=client.required,
            skips=client.skips,
        )
        self.asked[client.token] = (client, -1)
        self._drain()

    def _sync(self, client: Client) -> None:
        if client.token is not None or client.stale:
            return
        parts = {
            each: f"{client.generation} {identity(client.member_id)} {identity(each)}".encode()
            for each in client.others
        }
        client.token = self.driver.sync(
            client.member_id,
            # Assignments of other members than the leader are ignored.
            parts if client.leads else {client.member_id: b"claimed"},
            instance_id=client.instance_id,
            generation=client.generation,
            protocol_type=None,
        )
        self.asked[client.token] = (client, client.generation)
        self._drain()

    def _finish_stores(self) -> None:
        while self.driver.storing:
            self.driver.store()
            self._drain()

    def _drain(self) -> None:
        """Every answer is the first to a question that waits: `GroupDriver.take` checks that."""
        for token, reply in list(self.driver.answers.items()):
            client, generation = self.asked.pop(token)
            del self.driver.answers[token]
            if isinstance(reply, LeaveReply):
                continue
            assert client.token == token
            client.token = None
            if isinstance(reply, JoinReply):
                self._was_joined(client, reply)
            elif reply.error is None:
                client.synced = True
                self._was_synced(client, generation, reply)
            else:
                client.stale = True

    def _was_joined(self, client: Client, reply: JoinReply) -> None:
        if reply.error is GroupError.MEMBER_ID_REQUIRED:
            client.member_id = reply.member_id
        elif reply.error is not None:
            if reply.error in (UNKNOWN, FENCED) or not reply.member_id:
                client.member_id = ""
        else:
            client.member_id = reply.member_id
            client.generation = reply.generation
            client.stale = client.synced = False
            client.leads = reply.leader == reply.member_id and not reply.skip_assignment
            client.others = tuple(each.member_id for each in reply.members)
            assert not reply.members or reply.leader == reply.member_id
            told = (identity(reply.leader), reply.protocol_type, reply.protocol)
            assert self.agreed.setdefault(reply.generation, told) == told
            assert any(each.name == reply.protocol for each in client.protocols)

    def _was_synced(self, client: Client, generation: int, reply: SyncReply) -> None:
        durable = self.driver.durable[-1]
        assert durable.generation == generation
        assert reply.assignment in [each.assignment for each in durable.members]
        if reply.assignment:
            leader, _, protocol = self.agreed[generation]
            expected = f"{generation} {leader} {identity(client.member_id)}"
            assert reply.assignment.decode() == expected
            assert reply.protocol == protocol


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = hypothesis_settings(max_examples=150, stateful_step_count=40)
