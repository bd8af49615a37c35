"""Consumer groups over `__consumer_offsets`: acked commits survive any failure of brokers."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sparklog import errors, limits
from sparklog.broker.flight import group_calls
from sparklog.broker.groups.committed_offsets import TopicPartition
from sparklog.broker.groups.coordinator import Commit, Coordinator, Errors
from sparklog.broker.groups.messages import (
    Description,
    GroupError,
    GroupState,
    JoinReply,
    JoinRequest,
    Leaver,
    MemberProtocol,
    SyncRequest,
)
from sparklog.clock import ManualClock
from sparklog.formats import consumer_offsets, flight_messages
from sparklog.settings import GroupSettings
from sparklog.storage.objects import Fault, MemoryStore, ScriptedFaults
from tests.support.brokers import Rig

pytestmark = pytest.mark.rig(topics={"t": 2})

_T = TypeVar("_T")
SESSION_MS = 10_000
DAY_SECONDS = 24 * 3600.0
LONGEST = 2**15 - 1
"""Bytes of a name or id."""
FULL = errors.QueueFull(queue="the writer's queue", bytes=1, setting="x")
SETTINGS = GroupSettings(initial_rebalance_delay_ms=0, offsets_retention_minutes=24 * 60)


@dataclass
class Room:
    """A broker of one epoch with its coordinator; nothing happens unless it is asked for."""

    rig: Rig
    groups: Coordinator

    @classmethod
    def on(cls, rig: Rig, **settings: int) -> Room:
        chosen = GroupSettings(**settings) if settings else SETTINGS
        groups = Coordinator(rig.core, settings=chosen, clock=rig.clock)
        groups.open()
        groups.tick(0)
        return cls(rig, groups)

    def successor(self) -> Room:
        """As after `kill -9`."""
        return Room.on(self.rig.successor())

    def settle(self) -> None:
        """Makes everything pending durable, and runs the work that is due."""
        for _ in range(20):
            self.groups.tick(0)

    def take(self, future: Future[_T]) -> _T:
        self.settle()
        return future.result(timeout=0)

    def commit(self, offset: int, place: TopicPartition = ("t", 0), **who: Any) -> Errors:
        """Commits an offset of group g, and waits for the ack."""
        return self.take(self.groups.commit("g", {place: Commit(offset=offset)}, **who))

    def offsets(self, group: str = "g") -> dict[TopicPartition, int]:
        found = self.groups.committed(group)
        assert not isinstance(found, GroupError)
        return {place: value.offset for place, value in found.items()}

    def join(
        self, group: str = "g", *, topics: Iterable[str] = ("t",), **given: Any
    ) -> Future[JoinReply]:
        usual = {
            "client_id": "c",
            "client_host": "/h",
            "session_timeout_ms": SESSION_MS,
            "protocol_type": "consumer",
            "protocols": (MemberProtocol("range", subscription(*topics)),),
            "member_id_required": False,
        }
        return self.groups.join(group, JoinRequest(**{**usual, **given}))

    def member(self, **wanted: Any) -> tuple[str, int]:
        """(id, generation) of a member that has joined alone and synced."""
        reply = self.take(self.join(**wanted))
        assert reply.error is None
        request = SyncRequest(
            member_id=reply.member_id,
            generation=reply.generation,
            assignments={reply.member_id: b"all"},
        )
        assert self.take(self.groups.sync("g", request)).assignment == b"all"
        return reply.member_id, reply.generation

    def describe(self, group: str = "g") -> Description:
        found = self.groups.describe(group)
        assert not isinstance(found, GroupError)
        return found

    def heartbeat(self, member: tuple[str, int]) -> GroupError | None:
        return self.groups.heartbeat(
            "g", member_id=member[0], instance_id=None, generation=member[1]
        )

    def names(self) -> list[str]:
        found = self.groups.groups()
        assert not isinstance(found, GroupError)
        return [each.group_id for each in found]

    @contextmanager
    def refusing(self, failure: Exception, how: str = "submit") -> Iterator[None]:
        """No record of a group gets any further than this."""

        def refuse(*_: object) -> None:
            raise failure

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.groups._topic, how, refuse)
            yield


def subscription(*topics: str) -> bytes:
    """As a consumer of Kafka's writes it, version 0."""
    names = b"".join(len(each).to_bytes(2, "big") + each.encode() for each in topics)
    return b"\0\0" + len(topics).to_bytes(4, "big") + names + b"\xff\xff\xff\xff"


def who(member: tuple[str, int]) -> dict[str, Any]:
    """Returns the identity that a member sends with a commit."""
    return {"member_id": member[0], "generation": member[1]}


@pytest.fixture(name="room")
def _room(rig: Rig) -> Room:
    return Room.on(rig)


# ------------------------------------------------------------------------------ offsets


def test_an_offset_counts_once_it_is_durable(room: Room) -> None:
    """Neither the ack nor the offset comes before."""
    waiting = room.groups.commit("g", {("t", 0): Commit(offset=7)})
    assert not waiting.done()
    assert room.offsets() == {}
    assert room.take(waiting) == {("t", 0): None}
    assert room.offsets() == {("t", 0): 7}


def test_a_successor_finds_what_was_acked(room: Room, clock: ManualClock) -> None:
    """With leader epoch, metadata and the time of the commit."""
    everything = Commit(offset=7, leader_epoch=3, metadata="näher")
    room.take(room.groups.commit("g", {("t", 1): everything}))
    room.commit(9)
    before = room.groups.committed("g")
    clock.advance(5.0)
    after = room.successor().groups.committed("g")
    assert before == after
    assert isinstance(after, dict)
    assert after["t", 1] == consumer_offsets.CommittedOffset(
        offset=7,
        leader_epoch=3,
        metadata="näher",
        commit_ms=(clock.now_us() - 5_000_000) // 1_000,
        topic_id=room.rig.core.id_of("t"),
    )


def test_the_table_tells_the_same(room: Room) -> None:
    """Once it is published: `__consumer_offsets` is a topic like any other."""
    room.commit(7)
    room.commit(8)
    number = room.groups._topic.partition_of("g")
    places = room.rig.core.partition_statuses(consumer_offsets.TOPIC)
    assert [place.end for place in places] == [2 if n == number else 0 for n in range(8)]
    (batch,) = room.rig.core.read(consumer_offsets.TOPIC, number, 0, 2)
    (found,) = consumer_offsets.committed(batch.rows).to_pylist()
    assert (found["group"], found["offset"]) == ("g", 8)
    info = room.rig.core.topics.describe(consumer_offsets.TOPIC)
    assert info.config == {"cleanup.policy": "compact"}


@pytest.mark.parametrize(
    ("group", "number"),
    [("g", 7), ("group-ä", 6), ("", 0), ("polygenelubricants", 0), ("\N{ROCKET} rockets", 6)],
)
def test_a_group_has_the_partition_that_kafka_gives_it(room: Room, group: str, number: int) -> None:
    """`Utils.abs(group.hashCode()) % 8`, as Java computes it; the fourth hash has no absolute."""
    assert room.groups._topic.partition_of(group) == number


def test_what_is_refused_has_no_effect(room: Room) -> None:
    """Each partition has its own answer, and the others stand."""
    long = "x" * (limits.OFFSET_METADATA_LENGTH + 1)
    found = room.take(
        room.groups.commit(
            "g",
            {
                ("t", 0): Commit(offset=1),
                ("t", 9): Commit(offset=1),
                ("nobody", 0): Commit(offset=1),
                ("t", 1): Commit(offset=1, metadata=long),
            },
        )
    )
    assert found == {
        ("t", 0): None,
        ("t", 9): GroupError.UNKNOWN_TOPIC_OR_PARTITION,
        ("nobody", 0): GroupError.UNKNOWN_TOPIC_OR_PARTITION,
        ("t", 1): GroupError.OFFSET_METADATA_TOO_LARGE,
    }
    assert room.offsets() == {("t", 0): 1}


def test_who_may_commit(room: Room) -> None:
    """Members in their generation; without members, anybody without one."""
    missing = room.commit(1, member_id="m", generation=3)
    assert missing == {("t", 0): GroupError.GROUP_ID_NOT_FOUND}
    assert room.names() == []
    member = room.member()
    assert room.commit(1) == {("t", 0): GroupError.UNKNOWN_MEMBER_ID}
    stale = (member[0], member[1] - 1)
    assert room.commit(1, **who(stale)) == {("t", 0): GroupError.ILLEGAL_GENERATION}
    assert room.commit(1, **who(member)) == {("t", 0): None}
    assert room.offsets() == {("t", 0): 1}


def test_a_topic_created_anew_has_no_offsets(room: Room) -> None:
    """Neither before nor after a restart, nor once others are committed."""
    room.commit(7)
    room.rig.core.topics.delete("t")
    assert room.offsets() == {}
    room.rig.create("t", partitions=2)
    assert room.offsets() == {}
    room = room.successor()
    assert room.offsets() == {}
    room.commit(1, ("t", 1))
    assert room.offsets() == {("t", 1): 1}


def test_a_commit_may_name_the_topic_that_it_means(room: Room) -> None:
    """A commit for a deleted topic does not count for a new one of that name."""
    topic_id = room.rig.core.id_of("t")
    named = {("t", 0): Commit(offset=7, topic_id=topic_id)}
    assert room.take(room.groups.commit("g", named)) == {("t", 0): None}
    room.rig.core.topics.delete("t")
    room.rig.create("t", partitions=2)
    refused = {("t", 0): GroupError.UNKNOWN_TOPIC_OR_PARTITION}
    assert room.take(room.groups.commit("g", named)) == refused
    assert room.offsets() == {}


def test_a_record_that_does_not_become_durable_changes_nothing(
    clock: ManualClock,
) -> None:
    """A commit fails if the store refuses its flush; the next commit succeeds."""
    room = _with_a_fault(clock)
    room.commit(1)
    assert room.commit(2) == {("t", 0): GroupError.COORDINATOR_NOT_AVAILABLE}
    assert room.offsets() == {("t", 0): 1}
    assert room.commit(3) == {("t", 0): None}
    assert room.offsets() == {("t", 0): 3}


def _with_a_fault(clock: ManualClock) -> Room:
    """The second flush of a group's records is refused; the first object opens the epoch."""
    error = errors.StorageUnavailable(operation="put", path="wal", reason="down")
    fault = Fault(operation="put_new", error=error, count=3, prefix="wal/")
    rig = Rig(MemoryStore(clock, faults=ScriptedFaults(fault)), clock)
    rig.create("t")
    return Room.on(rig)


def test_nobody_else_writes_or_deletes_the_topic(room: Room) -> None:
    """As in Kafka."""
    with pytest.raises(errors.InternalTopic):
        room.rig.append(["x"], topic=consumer_offsets.TOPIC)
    with pytest.raises(errors.InternalTopic):
        room.rig.core.prepare_kafka(consumer_offsets.TOPIC, 0, b"")
    with pytest.raises(errors.InternalTopic):
        room.rig.core.topics.delete(consumer_offsets.TOPIC)
    more = flight_messages.AddPartitions(topic=consumer_offsets.TOPIC, partitions=50)
    with pytest.raises(errors.InternalTopic):
        room.rig.core.topics.add_partitions(more)


# ------------------------------------------------------------------------------ members


def test_members_go_on_with_a_successor(room: Room) -> None:
    """With their ids, generation and assignments, which `kill -9` does not undo."""
    member = room.member()
    later = room.successor()
    assert later.heartbeat(member) is None
    assert later.describe() == room.describe()
    assert later.commit(5, **who(member)) == {("t", 0): None}


def test_members_that_are_silent_go(room: Room, clock: ManualClock) -> None:
    """One session after their last word."""
    member = room.member()
    clock.advance(SESSION_MS / 2e3)
    room.settle()
    assert room.heartbeat(member) is None
    clock.advance(SESSION_MS / 1e3 - 0.001)
    room.settle()
    assert room.describe().state is GroupState.STABLE
    clock.advance(0.002)
    room.settle()
    assert room.describe().state is GroupState.EMPTY
    assert room.heartbeat(member) is GroupError.UNKNOWN_MEMBER_ID
    assert room.successor().describe().members == ()


def test_the_last_that_leaves_leaves_an_empty_group(room: Room) -> None:
    """Its offsets stay."""
    member = room.member()
    room.commit(5, **who(member))
    reply = room.take(room.groups.leave("g", [Leaver(member_id=member[0])]))
    assert reply.error is None
    assert room.describe().state is GroupState.EMPTY
    assert room.successor().offsets() == {("t", 0): 5}


def test_who_hangs_up_leaves_the_waiting_room(room: Room, clock: ManualClock) -> None:
    """A second member waits for the first, and its connection ends: it is not waited for long."""
    first = room.member()
    waiting = room.join()
    room.settle()
    assert room.heartbeat(first) is GroupError.REBALANCE_IN_PROGRESS
    assert not waiting.done()
    waiting.cancel()
    for _ in range(2):
        clock.advance(SESSION_MS / 1e3 + 1)
        room.settle()
    assert room.describe().state is GroupState.EMPTY


def test_requests_to_groups_that_there_are_not(room: Room) -> None:
    """Each has Kafka's answer, and creates none."""
    assert room.heartbeat(("m", 1)) is GroupError.UNKNOWN_MEMBER_ID
    sync = room.groups.sync("g", SyncRequest(member_id="m", generation=1))
    assert room.take(sync).error is GroupError.UNKNOWN_MEMBER_ID
    leave = room.groups.leave("g", [Leaver(member_id="m")])
    assert room.take(leave).members[0].error is GroupError.UNKNOWN_MEMBER_ID
    assert room.take(room.join(member_id="m")).error is GroupError.UNKNOWN_MEMBER_ID
    assert room.groups.describe("g") is GroupError.GROUP_ID_NOT_FOUND
    assert room.names() == []


# ------------------------------------------------------------------------------ names


def test_no_group_has_a_name_that_no_record_can_hold(room: Room) -> None:
    """Requests with a too long group name are refused; the longest possible name is accepted."""
    long = "ä" * (LONGEST // 2 + 1)
    refused = GroupError.INVALID_GROUP_ID
    assert room.take(room.join(long)).error is refused
    sync = SyncRequest(member_id="m", generation=1)
    assert room.take(room.groups.sync(long, sync)).error is refused
    assert room.take(room.groups.leave(long, [Leaver(member_id="m")])).error is refused
    assert room.groups.heartbeat(long, member_id="m", instance_id=None, generation=1) is refused
    offsets = {("t", 0): Commit(offset=1)}
    assert room.take(room.groups.commit(long, offsets)) == {("t", 0): refused}
    assert room.offsets(long) == {}
    assert room.names() == []
    longest = "g" * LONGEST
    assert room.take(room.groups.commit(longest, offsets)) == {("t", 0): None}
    assert room.successor().offsets(longest) == {("t", 0): 1}


LONG = "x" * (LONGEST + 1)


@pytest.mark.parametrize(
    "given",
    [
        {"member_id": LONG},
        {"instance_id": LONG},
        {"client_id": LONG},
        {"client_host": LONG},
        {"protocol_type": LONG},
        {"protocols": (MemberProtocol("range", b""), MemberProtocol(LONG, b""))},
    ],
    ids=lambda given: next(iter(given)),
)
def test_nobody_joins_with_names_that_no_record_can_hold(room: Room, given: dict[str, Any]) -> None:
    """The group does not hear of it."""
    assert room.take(room.join(**given)).error is GroupError.INVALID_REQUEST
    assert room.names() == []


def test_no_offset_is_of_a_topic_whose_name_no_record_can_hold(room: Room) -> None:
    """There is none."""
    refused = {(LONG, 0): GroupError.UNKNOWN_TOPIC_OR_PARTITION}
    assert room.commit(1, (LONG, 0)) == refused
    assert room.take(room.groups.delete_offsets("g", [(LONG, 0)])) == {
        (LONG, 0): GroupError.GROUP_ID_NOT_FOUND
    }


def test_refusals_fit_into_an_answer(room: Room) -> None:
    """Errors of the Flight listener name their subject, within the size of an answer."""
    actions = group_calls.actions(room.groups)
    partition = flight_messages.GroupOffset(topic=LONG, partition=0, offset=1)
    long = flight_messages.CommitOffsets(group=LONG, offsets=[partition])
    for request in (long, msgspec.structs.replace(long, group="g")):
        waiting = actions["groups.commit"](request)
        assert isinstance(waiting, Future)
        with pytest.raises(errors.GroupRefused, match=r"x{100}…") as refused:
            room.take(waiting)
        assert len(str(refused.value)) < 500
    heartbeat = flight_messages.GroupHeartbeat(group="g", member_id=LONG, generation=1)
    with pytest.raises(errors.MemberFenced) as fenced:
        actions["groups.heartbeat"](heartbeat)
    assert len(str(fenced.value)) < 500


@pytest.mark.parametrize("given", ["client_id", "instance_id"])
def test_a_member_id_is_cut_where_no_record_could_hold_it(room: Room, given: str) -> None:
    """The id is cut between two characters, and stays unique by its end."""
    member_id, _ = room.member(**{given: "ä" * (LONGEST // 2)})
    assert LONGEST - 1 <= len(member_id.encode()) <= LONGEST
    assert member_id.startswith("ää")
    (found,) = room.successor().describe().members
    assert found.member_id == member_id


@pytest.mark.parametrize("how", ["prepare", "submit"])
@pytest.mark.parametrize("failure", [struct.error("too long"), AssertionError()])
def test_a_record_that_cannot_be_written_harms_nobody(
    room: Room, failure: Exception, how: str
) -> None:
    """A waiting caller gets the error, and the next commit succeeds."""
    with room.refusing(failure, how):
        assert room.commit(1) == {("t", 0): GroupError.UNKNOWN_SERVER_ERROR}
    assert room.offsets() == {}
    assert room.commit(2) == {("t", 0): None}
    joined = room.take(room.join())
    request = SyncRequest(member_id=joined.member_id, generation=joined.generation)
    with room.refusing(failure, how):
        synced = room.take(room.groups.sync("g", request))
    assert synced.error is GroupError.UNKNOWN_SERVER_ERROR
    member = room.member(member_id=joined.member_id)
    assert room.commit(3, **who(member)) == {("t", 0): None}
    assert room.successor().offsets() == {("t", 0): 3}


# ------------------------------------------------------------------------------ the end of groups


def test_a_group_is_deleted_with_all_it_has_committed(room: Room) -> None:
    """A deletion includes commits that were pending at the time."""
    assert room.take(room.groups.delete("g")) is GroupError.GROUP_ID_NOT_FOUND
    member = room.member()
    room.commit(5, **who(member))
    assert room.take(room.groups.delete("g")) is GroupError.NON_EMPTY_GROUP
    room.take(room.groups.leave("g", [Leaver(member_id=member[0])]))
    under_way = room.groups.commit("g", {("t", 1): Commit(offset=3)})
    assert room.take(room.groups.delete("g")) is None
    assert under_way.result(timeout=0) == {("t", 1): None}
    for each in (room, room.successor()):
        assert each.names() == []
        assert each.offsets() == {}


def test_a_deletion_that_fails_leaves_the_offsets(clock: ManualClock) -> None:
    """They are acked."""
    room = _with_a_fault(clock)
    room.commit(5)
    assert room.take(room.groups.delete("g")) is GroupError.COORDINATOR_NOT_AVAILABLE
    assert room.offsets() == {("t", 0): 5}


def test_a_deletion_that_fails_takes_no_commit_back(room: Room) -> None:
    """It was under way when the deletion began, and is acked before that has failed."""
    room.commit(5)
    under_way = room.groups.commit("g", {("t", 0): Commit(offset=10)})
    with room.refusing(FULL):
        deleted = room.groups.delete("g")
    assert room.take(under_way) == {("t", 0): None}
    assert room.take(deleted) is GroupError.COORDINATOR_NOT_AVAILABLE
    for each in (room, room.successor()):
        assert each.offsets() == {("t", 0): 10}


def _deserted(room: Room) -> Description:
    """A member has committed 5 and left; the group is in generation 2."""
    member = room.member()
    room.commit(5, **who(member))
    room.take(room.groups.leave("g", [Leaver(member_id=member[0])]))
    found = room.describe()
    assert (found.state, found.generation) == (GroupState.EMPTY, 2)
    return found


def test_a_deletion_that_fails_leaves_the_group_as_it_was(room: Room, clock: ManualClock) -> None:
    """Its offsets still expire counted from when its last member left."""
    member = room.member()
    room.commit(5, **who(member))
    clock.advance(SESSION_MS / 1e3 + 1)
    room.settle()
    before = room.describe()
    assert (before.generation, before.protocol_type) == (2, "consumer")
    with room.refusing(FULL):
        room.take(room.groups.delete("g"))
    assert room.describe() == before
    clock.advance(DAY_SECONDS - 5.0)
    room.settle()
    assert room.offsets() == {("t", 0): 5}
    clock.advance(3600.0)
    room.settle()
    assert room.offsets() == {}


def test_who_comes_while_a_deletion_fails_goes_on(room: Room) -> None:
    """With what it has committed itself; its generation is its own."""
    _deserted(room)
    room.commit(6, ("t", 1))
    with room.refusing(FULL):
        deleted = room.groups.delete("g")
        joined = room.join()
    request = SyncRequest(member_id=joined.result(timeout=0).member_id, generation=1)
    synced = room.groups.sync("g", request)
    late = room.groups.delete("g")
    assert late.result(timeout=0) is GroupError.NON_EMPTY_GROUP
    assert room.take(deleted) is GroupError.COORDINATOR_NOT_AVAILABLE
    assert room.take(synced).error is None
    member = (request.member_id, 1)
    assert room.commit(7, **who(member)) == {("t", 0): None}
    for each in (room, room.successor()):
        assert each.heartbeat(member) is None
        assert each.offsets() == {("t", 0): 7, ("t", 1): 6}


def test_a_group_used_while_its_deletion_fails_counts_on(room: Room) -> None:
    """As no generation has begun meanwhile, the next one is not one of before."""
    before = _deserted(room)
    with room.refusing(FULL):
        deleted = room.groups.delete("g")
    committed = room.groups.commit("g", {("t", 1): Commit(offset=6)})
    assert room.take(deleted) is GroupError.COORDINATOR_NOT_AVAILABLE
    assert room.take(committed) == {("t", 1): None}
    assert room.describe() == before
    assert room.offsets() == {("t", 0): 5, ("t", 1): 6}
    assert room.member()[1] == before.generation + 1


def test_offsets_of_topics_that_nobody_wants_can_be_forgotten(room: Room) -> None:
    """Offsets of a subscribed topic are kept, because a member would commit them again."""
    room.rig.create("u")
    member = room.member()
    room.commit(5, **who(member))
    room.commit(6, ("u", 0), **who(member))
    found = room.take(room.groups.delete_offsets("g", [("t", 0), ("u", 0)]))
    assert found == {("t", 0): GroupError.GROUP_SUBSCRIBED_TO_TOPIC, ("u", 0): None}
    for each in (room, room.successor()):
        assert each.offsets() == {("t", 0): 5}


def test_offsets_expire_after_the_last_member_has_left(room: Room, clock: ManualClock) -> None:
    """In a stable group no offset of a subscribed topic expires."""
    room.rig.create("u")
    member = room.member()
    room.commit(5, **who(member))
    room.commit(6, ("u", 0), **who(member))
    for _ in range(30):
        clock.advance(DAY_SECONDS / 24)
        _keep(room, member, clock)
    assert room.offsets() == {("t", 0): 5}
    room.take(room.groups.leave("g", [Leaver(member_id=member[0])]))
    clock.advance(DAY_SECONDS - 60)
    room.settle()
    assert room.offsets() == {("t", 0): 5}
    clock.advance(limits.OFFSETS_RETENTION_CHECK_SECONDS + 60)
    room.settle()
    for each in (room, room.successor()):
        assert each.names() == []
        assert each.offsets() == {}


def _keep(room: Room, member: tuple[str, int], clock: ManualClock) -> None:
    """The clock has gone on for longer than a session; the member says that it lives first."""
    assert room.heartbeat(member) is None
    room.settle()


def test_offsets_without_members_expire_one_by_one(room: Room, clock: ManualClock) -> None:
    """By the time of each commit."""
    room.commit(5)
    clock.advance(DAY_SECONDS / 2)
    room.commit(6, ("t", 1))
    clock.advance(DAY_SECONDS / 2 + limits.OFFSETS_RETENTION_CHECK_SECONDS)
    room.settle()
    assert room.offsets() == {("t", 1): 6}
    clock.advance(DAY_SECONDS)
    room.settle()
    assert room.names() == []


def test_after_the_end_everybody_is_sent_away(room: Room) -> None:
    """Waiting and new callers are refused after the close."""
    first = room.member()
    waiting = room.join()
    under_way = room.groups.commit("g", {("t", 0): Commit(offset=3)}, **who(first))
    room.groups.close()
    assert waiting.result(timeout=0).error is GroupError.NOT_COORDINATOR
    assert under_way.result(timeout=0) == {("t", 0): None}
    assert room.heartbeat(first) is GroupError.NOT_COORDINATOR
    assert room.groups.committed("g") is GroupError.NOT_COORDINATOR


def test_until_the_groups_are_read_everybody_has_to_wait(room: Room) -> None:
    """Every request is refused as retriable while the groups are loaded."""
    fresh = Coordinator(room.rig.core, settings=SETTINGS, clock=room.rig.clock)
    loading = GroupError.COORDINATOR_LOAD_IN_PROGRESS
    assert fresh.committed("g") is loading
    assert fresh.groups() is loading
    assert fresh.describe("g") is loading
    assert fresh.heartbeat("g", member_id="m", instance_id=None, generation=1) is loading
    assert fresh.delete("g").result(timeout=0) is loading
    assert fresh.commit("g", {("t", 0): Commit(offset=1)}).result(timeout=0) == {("t", 0): loading}
    assert fresh.delete_offsets("g", [("t", 0)]).result(timeout=0) == {("t", 0): loading}


# ------------------------------------------------------------------------------ any history

GROUPS = st.sampled_from("ab")
NUMBERS = st.integers(0, 1)


class AnyHistory(RuleBasedStateMachine):
    """After any commits, deletions, publishes and kills, the last acked commit or a newer one is
    found.
    """

    def __init__(self) -> None:
        super().__init__()
        clock = ManualClock()
        self.rig = Rig(MemoryStore(clock), clock)
        self.rig.create("t", partitions=2)
        self.room = Room.on(self.rig)
        self.acked: dict[tuple[str, int], int | None] = {}
        self.waiting: list[tuple[tuple[str, int], int | None, Future[Any]]] = []
        self.next = 1

    def found(self, key: tuple[str, int]) -> int | None:
        return self.room.offsets(key[0]).get(("t", key[1]))

    @rule(group=GROUPS, number=NUMBERS)
    def commit(self, group: str, number: int) -> None:
        self.next += 1
        future = self.room.groups.commit(group, {("t", number): Commit(offset=self.next)})
        self.waiting.append(((group, number), self.next, future))

    @rule(group=GROUPS, number=NUMBERS)
    def forget(self, group: str, number: int) -> None:
        future = self.room.groups.delete_offsets(group, [("t", number)])
        if not future.done():
            self.waiting.append(((group, number), None, future))

    @rule()
    def settle(self) -> None:
        self.room.settle()
        for key, offset, future in self.waiting:
            assert future.result(timeout=0) == {("t", key[1]): None}
            self.acked[key] = offset
        self.waiting.clear()

    @rule()
    def publish(self) -> None:
        self.settle()
        self.rig.publish()

    @rule()
    def kill(self) -> None:
        self.rig = self.rig.successor()
        self.room = Room.on(self.rig)
        for key, *_ in self.waiting:
            possible = [other for named, other, _ in self.waiting if named == key]
            assert self.found(key) in [self.acked.get(key), *possible]
        for key, *_ in self.waiting:
            self.acked[key] = self.found(key)
        self.waiting.clear()

    @invariant()
    def what_was_acked_stands(self) -> None:
        """As long as nothing newer is under way."""
        for key, offset in self.acked.items():
            if all(named != key for named, *_ in self.waiting):
                assert self.found(key) == offset


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


# ------------------------------------------------------------------------------ many offsets


class TimedLock:
    """A lock that notes for how long it was held at most."""

    def __init__(self) -> None:
        self.longest_seconds = 0.0
        self._lock = threading.Lock()
        self._since = 0.0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._since = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.longest_seconds = max(self.longest_seconds, time.thread_time() - self._since)
        self._lock.release()


def test_many_offsets_keep_nobody_from_the_lock(room: Room) -> None:
    """To commit, fetch, sweep and delete 40,000 offsets of a group takes it in small steps."""
    lock = TimedLock()
    room.groups._lock = lock  # type: ignore[assignment]
    places = []
    for name in "abcd":
        room.rig.create(name, 10_000)
        places += [(name, number) for number in range(10_000)]
    committed = room.take(
        room.groups.commit("g", {place: Commit(offset=7, metadata="m") for place in places})
    )
    assert committed == dict.fromkeys(places)
    for wanted in (None, places, places[:3]):
        found = room.groups.committed("g", wanted)
        assert not isinstance(found, GroupError)
        assert found.keys() == set(places if wanted is None else wanted)
    room.rig.core.topics.delete("d")
    assert isinstance(room.rig.clock, ManualClock)
    room.rig.clock.advance(limits.OFFSETS_RETENTION_CHECK_SECONDS)
    room.settle()
    assert len(room.offsets()) == 30_000
    assert set(room.take(room.groups.delete_offsets("g", places[:9_999])).values()) == {None}
    assert len(room.offsets()) == 20_001
    assert room.take(room.groups.delete("g")) is None
    room.settle()
    assert room.groups.committed("g") == {}
    assert lock.longest_seconds < 0.02


def test_a_snapshot_of_offsets_stays_as_it_is(room: Room) -> None:
    """A snapshot has no later commit, and keeps offsets that are deleted later."""
    room.rig.create("u", 2)
    room.commit(1)
    entry = room.groups._groups["g"]
    before = entry.offsets.snapshot()
    room.commit(2)
    room.commit(3, ("u", 1))
    assert {topic: list(each) for topic, each in before.items()} == {"t": [0]}
    assert before["t"][0].offset == 1
    after = entry.offsets.snapshot()
    room.take(room.groups.delete_offsets("g", [("t", 0), ("t", 1)]))
    assert after["t"][0].offset == 2
    assert room.offsets() == {("u", 1): 3}


def test_a_group_that_changes_while_it_is_deleted_stays(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tombstones are encoded without the lock; commits made meanwhile are not lost."""
    room.commit(1)
    prepare, commits = room.groups._topic.prepare, [2]

    def meanwhile(group: str, records: Any) -> Any:
        prepared = prepare(group, records)
        if commits:
            room.groups._topic.prepare = prepare  # type: ignore[method-assign]
            room.commit(commits.pop(), ("t", 1))
            room.groups._topic.prepare = meanwhile  # type: ignore[method-assign]
        return prepared

    monkeypatch.setattr(room.groups._topic, "prepare", meanwhile)
    assert room.take(room.groups.delete_offsets("g", [("t", 0)])) == {("t", 0): None}
    assert room.offsets() == {("t", 1): 2}
    commits.append(3)
    assert room.take(room.groups.delete("g")) is None
    assert room.offsets() == {}
    assert room.successor().offsets() == {}


@pytest.mark.parametrize(
    ("metadata", "fits"),
    [("ä" * 4_096, True), ("x" * 4_097, False), ("😀" * 2_048, True), ("😀" * 2_049, False)],
)
def test_metadata_is_counted_as_kafka_counts_it(room: Room, metadata: str, fits: bool) -> None:
    """In characters of UTF-16, not in bytes."""
    place = ("t", 0)
    found = room.take(room.groups.commit("g", {place: Commit(offset=1, metadata=metadata)}))
    assert found == {place: None if fits else GroupError.OFFSET_METADATA_TOO_LARGE}
    if fits:
        back = room.successor().groups.committed("g")
        assert not isinstance(back, GroupError)
        assert back[place].metadata == metadata
