"""The memory of all group members is bounded, and leaving members free theirs."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from sparklog import limits
from sparklog.broker.groups import coordinator as coordinating
from sparklog.broker.groups.messages import (
    GroupError,
    GroupState,
    JoinReply,
    Leaver,
    MemberProtocol,
    SyncRequest,
)
from sparklog.clock import ManualClock
from sparklog.storage.objects import MemoryStore
from tests.support.brokers import Rig
from tests.unit.test_coordinator import Room, subscription

KIB = 1_024
MEMBER_BYTES = 100 * KIB
ROOM_BYTES = 1_000 * KIB


@pytest.fixture(name="room")
def _room(monkeypatch: pytest.MonkeyPatch) -> Room:
    """Groups whose members may take a megabyte together."""
    monkeypatch.setattr(limits, "GROUPS_MEMBERS_BYTES", ROOM_BYTES)
    clock = ManualClock()
    rig = Rig(MemoryStore(clock), clock)
    rig.create("t", 1)
    return Room.on(rig)


def join(room: Room, group: str, *, size: int = MEMBER_BYTES, **given: Any) -> Future[JoinReply]:
    """With a subscription of so many bytes."""
    metadata = subscription("t") + bytes(size)
    return room.join(group, protocols=(MemberProtocol("range", metadata),), **given)


def _advance(room: Room, seconds: float) -> None:
    assert isinstance(room.rig.clock, ManualClock)
    room.rig.clock.advance(seconds)


def fill(room: Room, **given: Any) -> list[JoinReply]:
    """Members of groups of their own, until there is no room."""
    found: list[JoinReply] = []
    while True:
        reply = room.take(join(room, f"filled-{len(found)}", **given))
        if reply.error is not None:
            assert reply.error is GroupError.COORDINATOR_NOT_AVAILABLE
            return found
        found.append(reply)
        assert len(found) * MEMBER_BYTES <= ROOM_BYTES


def _held_bytes(room: Room) -> int:
    return room.groups._memory.held_bytes


def test_who_finds_no_room_is_told_to_come_back(room: Room) -> None:
    """The refused member joins once another has left; the current members continue."""
    members = fill(room)
    assert len(members) == 9
    joined = members[0]
    synced = room.take(
        room.groups.sync(
            "filled-0",
            SyncRequest(
                member_id=joined.member_id,
                generation=joined.generation,
                assignments={joined.member_id: b"all"},
            ),
        )
    )
    assert synced.assignment == b"all"
    again = room.take(join(room, "filled-0", member_id=joined.member_id))
    assert again.error is None
    room.take(room.groups.leave("filled-1", [Leaver(member_id=members[1].member_id)]))
    assert room.take(join(room, "late")).error is None


def test_a_member_is_refused_that_is_too_large_alone(room: Room) -> None:
    """A member that alone exceeds the limit is refused, whatever is free."""
    reply = room.take(join(room, "g", size=limits.GROUP_MEMBER_BYTES))
    assert reply.error is GroupError.INVALID_REQUEST
    assert _held_bytes(room) == 0


def test_assignments_need_room_too(room: Room) -> None:
    """A leader whose assignments exceed the free memory gets a retriable error."""
    fill(room)
    reply = room.take(room.join("filled-0", member_id="nobody"))
    assert reply.error is GroupError.UNKNOWN_MEMBER_ID
    before_bytes = _held_bytes(room)
    leader = room.groups._groups["filled-0"].group.leader
    assert leader is not None
    request = SyncRequest(member_id=leader, generation=1, assignments={leader: bytes(ROOM_BYTES)})
    synced = room.take(room.groups.sync("filled-0", request))
    assert synced.error is GroupError.COORDINATOR_NOT_AVAILABLE
    assert _held_bytes(room) == before_bytes


def test_ids_that_nobody_joins_with_are_counted(room: Room) -> None:
    """A client that asks for ids without end finds no room for more."""
    given = 0
    while True:
        reply = room.take(join(room, "g", size=1, member_id_required=True))
        if reply.error is not GroupError.MEMBER_ID_REQUIRED:
            break
        given += 1
        assert given <= ROOM_BYTES // 1_000
    assert reply.error is GroupError.COORDINATOR_NOT_AVAILABLE
    _advance(room, 31 * 60)
    room.settle()
    assert _held_bytes(room) == 0


def test_who_is_gone_makes_room(room: Room) -> None:
    """A silent member whose connection is closed, after ten seconds; not one that is heard of."""
    gone = False
    session_ms = limits.MAX_SESSION_TIMEOUT_MS
    members = fill(room, session_timeout_ms=session_ms, is_gone=lambda: gone)
    gone = True
    assert room.take(join(room, "late")).error is GroupError.COORDINATOR_NOT_AVAILABLE
    _advance(room, limits.GROUP_GONE_SECONDS + 1)
    alive = members[3]
    error = room.groups.heartbeat(
        "filled-3", member_id=alive.member_id, instance_id=None, generation=alive.generation
    )
    assert error is None
    assert room.take(join(room, "late")).error is GroupError.COORDINATOR_NOT_AVAILABLE
    room.settle()
    assert room.take(join(room, "late")).error is None
    assert room.describe("filled-3").state is not GroupState.EMPTY
    assert len([name for name in room.names() if room.describe(name).members]) == 2


def test_nobody_who_is_there_makes_room(room: Room) -> None:
    """However silent it is, within its session."""
    members = fill(room, session_timeout_ms=limits.MAX_SESSION_TIMEOUT_MS)
    for _ in range(5):
        _advance(room, limits.GROUP_GONE_SECONDS + 1)
        assert room.take(join(room, "late")).error is GroupError.COORDINATOR_NOT_AVAILABLE
        room.settle()
    assert len([name for name in room.names() if room.describe(name).members]) == len(members)


def test_a_restart_counts_what_is_recorded(room: Room) -> None:
    """Subscriptions and assignments, and they are given back when their groups are over."""
    room.member(protocols=(MemberProtocol("range", subscription("t") + bytes(MEMBER_BYTES)),))
    later = room.successor()
    assert MEMBER_BYTES < _held_bytes(later) < 2 * MEMBER_BYTES
    _advance(later, 3600)
    later.settle()
    assert _held_bytes(later) == 0


def test_offsets_expire_behind_a_group_that_cannot_be_looked_through(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One group's surprise is its own."""
    for group in ("a", "b", "c"):
        room.take(room.groups.commit(group, {("t", 0): coordinating.Commit(offset=1)}))
    looked_at = []
    sweep = room.groups._sweep

    def surprised(entry: Any) -> None:
        looked_at.append(entry.group.group_id)
        if entry.group.group_id != "a":
            raise AssertionError("a surprise")
        sweep(entry)

    monkeypatch.setattr(room.groups, "_sweep", surprised)
    _advance(room, limits.OFFSETS_RETENTION_CHECK_SECONDS + 1)
    room.groups.tick(0)
    assert sorted(looked_at) == ["a", "b", "c"]
