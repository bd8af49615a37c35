"""The memory of all group members is bounded, and leaving members free theirs."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from sparklog import limits
from sparklog.broker.groups import coordinator as coordinating
from sparklog.broker.groups.checks import GROUP_MEMBER_BYTES
from sparklog.broker.groups.expiry import OFFSETS_RETENTION_CHECK_SECONDS
from sparklog.broker.groups.members import GROUP_GONE_SECONDS, RESERVED_BYTES
from sparklog.broker.groups.messages import (
    GroupError,
    GroupState,
    JoinReply,
    Leaver,
    MemberProtocol,
    SyncRequest,
)
from sparklog.clock import ManualClock
from sparklog.settings import GroupSettings
from sparklog.storage.objects import MemoryStore
from tests.support.brokers import Rig
from tests.unit.test_coordinator import GroupRig, subscription

KIB = 1_024
MEMBER_BYTES = 100 * KIB
MEMORY_BYTES = 1_000 * KIB


@pytest.fixture(name="groups")
def _groups(monkeypatch: pytest.MonkeyPatch) -> GroupRig:
    """Groups whose members may take a megabyte together."""
    monkeypatch.setattr("sparklog.broker.groups.known_groups.GROUPS_MEMBERS_BYTES", MEMORY_BYTES)
    clock = ManualClock()
    rig = Rig(MemoryStore(clock), clock)
    rig.create("t", 1)
    return GroupRig.on(rig)


def join(
    groups: GroupRig, group: str, *, size: int = MEMBER_BYTES, **given: Any
) -> Future[JoinReply]:
    """With a subscription of so many bytes."""
    metadata = subscription("t") + bytes(size)
    return groups.join(group, protocols=(MemberProtocol("range", metadata),), **given)


def _advance(groups: GroupRig, seconds: float) -> None:
    assert isinstance(groups.rig.clock, ManualClock)
    groups.rig.clock.advance(seconds)


def fill(groups: GroupRig, **given: Any) -> list[JoinReply]:
    """Members of groups of their own, until no memory is left."""
    found: list[JoinReply] = []
    while True:
        reply = groups.take(join(groups, f"filled-{len(found)}", **given))
        if reply.error is not None:
            assert reply.error is GroupError.COORDINATOR_NOT_AVAILABLE
            return found
        found.append(reply)
        assert len(found) * MEMBER_BYTES <= MEMORY_BYTES


def _held_bytes(groups: GroupRig) -> int:
    return groups.coordinator._known.memory.held_bytes


def test_a_member_beyond_the_memory_is_refused_for_now(groups: GroupRig) -> None:
    """The refused member joins once another has left; the current members continue."""
    members = fill(groups)
    assert len(members) == 9
    joined = members[0]
    synced = groups.take(
        groups.coordinator.sync(
            "filled-0",
            SyncRequest(
                member_id=joined.member_id,
                generation=joined.generation,
                assignments={joined.member_id: b"all"},
            ),
        )
    )
    assert synced.assignment == b"all"
    again = groups.take(join(groups, "filled-0", member_id=joined.member_id))
    assert again.error is None
    groups.take(groups.coordinator.leave("filled-1", [Leaver(member_id=members[1].member_id)]))
    assert groups.take(join(groups, "late")).error is None


def test_a_member_is_refused_that_is_too_large_alone(groups: GroupRig) -> None:
    """A member that alone exceeds the limit is refused, whatever is free."""
    reply = groups.take(join(groups, "g", size=GROUP_MEMBER_BYTES))
    assert reply.error is GroupError.INVALID_REQUEST
    assert _held_bytes(groups) == 0


def test_assignments_need_memory_too(groups: GroupRig) -> None:
    """A leader whose assignments exceed the free memory gets a retriable error."""
    fill(groups)
    reply = groups.take(groups.join("filled-0", member_id="nobody"))
    assert reply.error is GroupError.UNKNOWN_MEMBER_ID
    before_bytes = _held_bytes(groups)
    leader = groups.coordinator._known.by_id["filled-0"].group.leader
    assert leader is not None
    request = SyncRequest(member_id=leader, generation=1, assignments={leader: bytes(MEMORY_BYTES)})
    synced = groups.take(groups.coordinator.sync("filled-0", request))
    assert synced.error is GroupError.COORDINATOR_NOT_AVAILABLE
    assert _held_bytes(groups) == before_bytes


@pytest.mark.parametrize("in_one_group", [True, False])
def test_ids_that_nobody_joins_with_keep_no_member_out(
    groups: GroupRig, monkeypatch: pytest.MonkeyPatch, in_one_group: bool
) -> None:
    """The oldest ids of all groups are forgotten, with groups that have nothing else.

    A member that has got its id while thousands of others are asked for joins all the same.
    """
    monkeypatch.setattr(limits, "GROUPS_RESERVED_BYTES", 100 * RESERVED_BYTES)
    monkeypatch.setattr("sparklog.broker.groups.known_groups._DUE_KEPT", 10)
    groups.member()
    session_ms = GroupSettings().max_session_timeout_ms

    def ask(group: str) -> str:
        asked = join(groups, group, size=1, member_id_required=True, session_timeout_ms=session_ms)
        reply = groups.take(asked)
        assert reply.error is GroupError.MEMBER_ID_REQUIRED
        return reply.member_id

    for number in range(1_000):
        ask("g2" if in_one_group else f"g{number}")
    coordinator = groups.coordinator
    assert len(coordinator._known.by_id) <= 102
    assert len(coordinator._known._due) <= 2 * 102 + 10
    mine = ask("mine")
    for number in range(50):
        ask("g2" if in_one_group else f"g{number}")
    assert groups.take(join(groups, "mine", size=1, member_id=mine)).error is None
    _advance(groups, session_ms / 1e3 + 1)
    groups.settle()
    assert _held_bytes(groups) == coordinator._known.memory.reserved_bytes == 0
    assert set(coordinator._known.by_id) <= {"g", "mine"}


def test_a_client_that_is_gone_frees_memory(groups: GroupRig) -> None:
    """A silent member whose connection is closed, after ten seconds; not one that is heard of."""
    gone = False
    session_ms = GroupSettings().max_session_timeout_ms
    members = fill(groups, session_timeout_ms=session_ms, is_gone=lambda: gone)
    gone = True
    assert groups.take(join(groups, "late")).error is GroupError.COORDINATOR_NOT_AVAILABLE
    _advance(groups, GROUP_GONE_SECONDS + 1)
    alive = members[3]
    error = groups.coordinator.heartbeat(
        "filled-3", member_id=alive.member_id, instance_id=None, generation=alive.generation
    )
    assert error is None
    assert groups.take(join(groups, "late")).error is GroupError.COORDINATOR_NOT_AVAILABLE
    groups.settle()
    assert groups.take(join(groups, "late")).error is None
    assert groups.describe("filled-3").state is not GroupState.EMPTY
    assert len([name for name in groups.names() if groups.describe(name).members]) == 2


def test_a_client_that_is_there_frees_no_memory(groups: GroupRig) -> None:
    """However silent it is, within its session."""
    members = fill(groups, session_timeout_ms=GroupSettings().max_session_timeout_ms)
    for _ in range(5):
        _advance(groups, GROUP_GONE_SECONDS + 1)
        assert groups.take(join(groups, "late")).error is GroupError.COORDINATOR_NOT_AVAILABLE
        groups.settle()
    assert len([name for name in groups.names() if groups.describe(name).members]) == len(members)


def test_a_restart_counts_what_is_recorded(groups: GroupRig) -> None:
    """Subscriptions and assignments, and they are given back when their groups are over."""
    groups.member(protocols=(MemberProtocol("range", subscription("t") + bytes(MEMBER_BYTES)),))
    later = groups.successor()
    assert MEMBER_BYTES < _held_bytes(later) < 2 * MEMBER_BYTES
    _advance(later, 3600)
    later.settle()
    assert _held_bytes(later) == 0


def test_offsets_expire_behind_a_group_that_cannot_be_looked_through(
    groups: GroupRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One group's surprise is its own."""
    for group in ("a", "b", "c"):
        groups.take(groups.coordinator.commit(group, {("t", 0): coordinating.Commit(offset=1)}))
    looked_at = []
    sweep = groups.coordinator._expiry._sweep

    def surprised(entry: Any) -> None:
        looked_at.append(entry.group.group_id)
        if entry.group.group_id != "a":
            raise AssertionError("a surprise")
        sweep(entry)

    monkeypatch.setattr(groups.coordinator._expiry, "_sweep", surprised)
    _advance(groups, OFFSETS_RETENTION_CHECK_SECONDS + 1)
    groups.coordinator.tick(0)
    assert sorted(looked_at) == ["a", "b", "c"]
