"""Consumer groups over `__consumer_offsets`: acked commits survive any failure of brokers."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from structlog.testing import capture_logs

from sparklog import errors
from sparklog.broker.flight import group_calls
from sparklog.broker.groups.committed_offsets import TopicPartition
from sparklog.broker.groups.coordinator import (
    OFFSET_METADATA_LENGTH,
    Commit,
    Coordinator,
    Errors,
)
from sparklog.broker.groups.expiry import OFFSETS_RETENTION_CHECK_SECONDS
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
from sparklog.formats import consumer_offsets, flight_messages, group_messages
from sparklog.formats.consumer_offsets import Key
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
class GroupRig:
    """A broker of one epoch with its coordinator; nothing happens unless it is asked for."""

    rig: Rig
    coordinator: Coordinator

    @classmethod
    def on(cls, rig: Rig, **settings: int) -> GroupRig:
        chosen = GroupSettings(**settings) if settings else SETTINGS
        coordinator = Coordinator(rig.broker, settings=chosen, clock=rig.clock)
        coordinator.open()
        coordinator.tick(0)
        return cls(rig, coordinator)

    def successor(self) -> GroupRig:
        """As after `kill -9`."""
        return GroupRig.on(self.rig.successor())

    def settle(self) -> None:
        """Makes everything pending durable, and runs the work that is due."""
        for _ in range(20):
            self.coordinator.tick(0)

    def take(self, future: Future[_T]) -> _T:
        self.settle()
        return future.result(timeout=0)

    def commit(self, offset: int, place: TopicPartition = ("t", 0), **who: Any) -> Errors:
        """Commits an offset of group g, and waits for the ack."""
        return self.take(self.coordinator.commit("g", {place: Commit(offset=offset)}, **who))

    def offsets(self, group: str = "g") -> dict[TopicPartition, int]:
        found = self.coordinator.committed(group)
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
        return self.coordinator.join(group, JoinRequest(**{**usual, **given}))

    def member(self, **wanted: Any) -> tuple[str, int]:
        """(id, generation) of a member that has joined alone and synced."""
        reply = self.take(self.join(**wanted))
        assert reply.error is None
        request = SyncRequest(
            member_id=reply.member_id,
            generation=reply.generation,
            assignments={reply.member_id: b"all"},
        )
        assert self.take(self.coordinator.sync("g", request)).assignment == b"all"
        return reply.member_id, reply.generation

    def describe(self, group: str = "g") -> Description:
        found = self.coordinator.describe(group)
        assert not isinstance(found, GroupError)
        return found

    def heartbeat(self, member: tuple[str, int]) -> GroupError | None:
        return self.coordinator.heartbeat(
            "g", member_id=member[0], instance_id=None, generation=member[1]
        )

    def names(self) -> list[str]:
        found = self.coordinator.groups()
        assert not isinstance(found, GroupError)
        return [each.group_id for each in found]

    @contextmanager
    def refusing(self, failure: Exception, how: str = "submit") -> Iterator[None]:
        """No record of a group gets any further than this."""

        def refuse(*_: object) -> None:
            raise failure

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.coordinator._topic, how, refuse)
            yield


def subscription(*topics: str) -> bytes:
    """As a consumer of Kafka's writes it, version 0."""
    names = b"".join(len(each).to_bytes(2, "big") + each.encode() for each in topics)
    return b"\0\0" + len(topics).to_bytes(4, "big") + names + b"\xff\xff\xff\xff"


def who(member: tuple[str, int]) -> dict[str, Any]:
    """Returns the identity that a member sends with a commit."""
    return {"member_id": member[0], "generation": member[1]}


@pytest.fixture(name="groups")
def _groups(rig: Rig) -> GroupRig:
    return GroupRig.on(rig)


# ------------------------------------------------------------------------------ offsets


def test_an_offset_counts_once_it_is_durable(groups: GroupRig) -> None:
    """Neither the ack nor the offset comes before."""
    waiting = groups.coordinator.commit("g", {("t", 0): Commit(offset=7)})
    assert not waiting.done()
    assert groups.offsets() == {}
    assert groups.take(waiting) == {("t", 0): None}
    assert groups.offsets() == {("t", 0): 7}


def test_a_successor_finds_what_was_acked(groups: GroupRig, clock: ManualClock) -> None:
    """With leader epoch, metadata and the time of the commit."""
    everything = Commit(offset=7, leader_epoch=3, metadata="näher")
    groups.take(groups.coordinator.commit("g", {("t", 1): everything}))
    groups.commit(9)
    before = groups.coordinator.committed("g")
    clock.advance(5.0)
    after = groups.successor().coordinator.committed("g")
    assert before == after
    assert isinstance(after, dict)
    assert after["t", 1] == consumer_offsets.CommittedOffset(
        offset=7,
        leader_epoch=3,
        metadata="näher",
        commit_ms=(clock.now_us() - 5_000_000) // 1_000,
        topic_id=groups.rig.broker.partitions.id_of("t"),
    )


def test_the_table_tells_the_same(groups: GroupRig) -> None:
    """Once it is published: `__consumer_offsets` is a topic like any other."""
    groups.commit(7)
    groups.commit(8)
    number = groups.coordinator._topic.partition_of("g")
    places = groups.rig.broker.partitions.statuses(consumer_offsets.TOPIC)
    assert [place.end for place in places] == [2 if n == number else 0 for n in range(8)]
    (batch,) = groups.rig.broker.read(consumer_offsets.TOPIC, number, 0, 2)
    (found,) = consumer_offsets.committed(batch.rows).to_pylist()
    assert (found["group"], found["offset"]) == ("g", 8)
    info = groups.rig.broker.topics.describe(consumer_offsets.TOPIC)
    assert info.config == {"cleanup.policy": "compact"}


@pytest.mark.parametrize(
    ("group", "number"),
    [("g", 7), ("group-ä", 6), ("", 0), ("polygenelubricants", 0), ("\N{ROCKET} rockets", 6)],
)
def test_a_group_has_the_partition_that_kafka_gives_it(
    groups: GroupRig, group: str, number: int
) -> None:
    """`Utils.abs(group.hashCode()) % 8`, as Java computes it; the fourth hash has no absolute."""
    assert groups.coordinator._topic.partition_of(group) == number


def test_what_is_refused_has_no_effect(groups: GroupRig) -> None:
    """Each partition has its own answer, and the others stand."""
    long = "x" * (OFFSET_METADATA_LENGTH + 1)
    found = groups.take(
        groups.coordinator.commit(
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
    assert groups.offsets() == {("t", 0): 1}


def test_who_may_commit(groups: GroupRig) -> None:
    """Members in their generation; without members, anybody without one."""
    missing = groups.commit(1, member_id="m", generation=3)
    assert missing == {("t", 0): GroupError.GROUP_ID_NOT_FOUND}
    assert groups.names() == []
    member = groups.member()
    assert groups.commit(1) == {("t", 0): GroupError.UNKNOWN_MEMBER_ID}
    stale = (member[0], member[1] - 1)
    assert groups.commit(1, **who(stale)) == {("t", 0): GroupError.ILLEGAL_GENERATION}
    assert groups.commit(1, **who(member)) == {("t", 0): None}
    assert groups.offsets() == {("t", 0): 1}


def test_a_topic_created_anew_has_no_offsets(groups: GroupRig) -> None:
    """Neither before nor after a restart, nor once others are committed."""
    groups.commit(7)
    groups.rig.broker.topics.delete("t")
    assert groups.offsets() == {}
    groups.rig.create("t", partitions=2)
    assert groups.offsets() == {}
    groups = groups.successor()
    assert groups.offsets() == {}
    groups.commit(1, ("t", 1))
    assert groups.offsets() == {("t", 1): 1}


def test_a_commit_may_name_the_topic_that_it_means(groups: GroupRig) -> None:
    """A commit for a deleted topic does not count for a new one of that name."""
    topic_id = groups.rig.broker.partitions.id_of("t")
    named = {("t", 0): Commit(offset=7, topic_id=topic_id)}
    assert groups.take(groups.coordinator.commit("g", named)) == {("t", 0): None}
    groups.rig.broker.topics.delete("t")
    groups.rig.create("t", partitions=2)
    refused = {("t", 0): GroupError.UNKNOWN_TOPIC_OR_PARTITION}
    assert groups.take(groups.coordinator.commit("g", named)) == refused
    assert groups.offsets() == {}


def test_a_record_that_does_not_become_durable_changes_nothing(
    clock: ManualClock,
) -> None:
    """A commit fails if the store refuses its flush; the next commit succeeds."""
    groups = _with_a_fault(clock)
    groups.commit(1)
    assert groups.commit(2) == {("t", 0): GroupError.COORDINATOR_NOT_AVAILABLE}
    assert groups.offsets() == {("t", 0): 1}
    assert groups.commit(3) == {("t", 0): None}
    assert groups.offsets() == {("t", 0): 3}


def _with_a_fault(clock: ManualClock) -> GroupRig:
    """The second flush of a group's records is refused; the first object opens the epoch."""
    error = errors.StorageUnavailable(operation="put", path="wal", reason="down")
    fault = Fault(operation="put_new", error=error, count=3, prefix="wal/")
    rig = Rig(MemoryStore(clock, faults=ScriptedFaults(fault)), clock)
    rig.create("t")
    return GroupRig.on(rig)


def test_nobody_else_writes_or_deletes_the_topic(groups: GroupRig) -> None:
    """As in Kafka."""
    with pytest.raises(errors.InternalTopic):
        groups.rig.append(["x"], topic=consumer_offsets.TOPIC)
    with pytest.raises(errors.InternalTopic):
        groups.rig.broker.prepare_kafka(consumer_offsets.TOPIC, 0, b"")
    with pytest.raises(errors.InternalTopic):
        groups.rig.broker.topics.delete(consumer_offsets.TOPIC)
    more = flight_messages.AddPartitions(topic=consumer_offsets.TOPIC, partitions=50)
    with pytest.raises(errors.InternalTopic):
        groups.rig.broker.topics.add_partitions(more)


# ------------------------------------------------------------------------------ members


def test_members_go_on_with_a_successor(groups: GroupRig) -> None:
    """With their ids, generation and assignments, which `kill -9` does not undo."""
    member = groups.member()
    later = groups.successor()
    assert later.heartbeat(member) is None
    assert later.describe() == groups.describe()
    assert later.commit(5, **who(member)) == {("t", 0): None}


def test_members_that_are_silent_go(groups: GroupRig, clock: ManualClock) -> None:
    """One session after their last word."""
    member = groups.member()
    clock.advance(SESSION_MS / 2e3)
    groups.settle()
    assert groups.heartbeat(member) is None
    clock.advance(SESSION_MS / 1e3 - 0.001)
    groups.settle()
    assert groups.describe().state is GroupState.STABLE
    clock.advance(0.002)
    groups.settle()
    assert groups.describe().state is GroupState.EMPTY
    assert groups.heartbeat(member) is GroupError.UNKNOWN_MEMBER_ID
    assert groups.successor().describe().members == ()


def test_the_last_that_leaves_leaves_an_empty_group(groups: GroupRig) -> None:
    """Its offsets stay."""
    member = groups.member()
    groups.commit(5, **who(member))
    reply = groups.take(groups.coordinator.leave("g", [Leaver(member_id=member[0])]))
    assert reply.error is None
    assert groups.describe().state is GroupState.EMPTY
    assert groups.successor().offsets() == {("t", 0): 5}


def test_a_client_that_hangs_up_waits_no_longer(groups: GroupRig, clock: ManualClock) -> None:
    """A second member waits for the first, and its connection ends: it is not waited for long."""
    first = groups.member()
    waiting = groups.join()
    groups.settle()
    assert groups.heartbeat(first) is GroupError.REBALANCE_IN_PROGRESS
    assert not waiting.done()
    waiting.cancel()
    for _ in range(2):
        clock.advance(SESSION_MS / 1e3 + 1)
        groups.settle()
    assert groups.describe().state is GroupState.EMPTY


def test_requests_to_groups_that_there_are_not(groups: GroupRig) -> None:
    """Each has Kafka's answer, and creates none."""
    assert groups.heartbeat(("m", 1)) is GroupError.UNKNOWN_MEMBER_ID
    sync = groups.coordinator.sync("g", SyncRequest(member_id="m", generation=1))
    assert groups.take(sync).error is GroupError.UNKNOWN_MEMBER_ID
    leave = groups.coordinator.leave("g", [Leaver(member_id="m")])
    assert groups.take(leave).members[0].error is GroupError.UNKNOWN_MEMBER_ID
    assert groups.take(groups.join(member_id="m")).error is GroupError.UNKNOWN_MEMBER_ID
    assert groups.coordinator.describe("g") is GroupError.GROUP_ID_NOT_FOUND
    assert groups.names() == []


# ------------------------------------------------------------------------------ names


def test_no_group_has_a_name_that_no_record_can_hold(groups: GroupRig) -> None:
    """Requests with a too long group name are refused; the longest possible name is accepted."""
    long = "ä" * (LONGEST // 2 + 1)
    refused = GroupError.INVALID_GROUP_ID
    assert groups.take(groups.join(long)).error is refused
    sync = SyncRequest(member_id="m", generation=1)
    assert groups.take(groups.coordinator.sync(long, sync)).error is refused
    assert groups.take(groups.coordinator.leave(long, [Leaver(member_id="m")])).error is refused
    assert (
        groups.coordinator.heartbeat(long, member_id="m", instance_id=None, generation=1) is refused
    )
    offsets = {("t", 0): Commit(offset=1)}
    assert groups.take(groups.coordinator.commit(long, offsets)) == {("t", 0): refused}
    assert groups.offsets(long) == {}
    assert groups.names() == []
    longest = "g" * LONGEST
    assert groups.take(groups.coordinator.commit(longest, offsets)) == {("t", 0): None}
    assert groups.successor().offsets(longest) == {("t", 0): 1}


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
def test_nobody_joins_with_names_that_no_record_can_hold(
    groups: GroupRig, given: dict[str, Any]
) -> None:
    """The group does not hear of it."""
    assert groups.take(groups.join(**given)).error is GroupError.INVALID_REQUEST
    assert groups.names() == []


def test_no_offset_is_of_a_topic_whose_name_no_record_can_hold(groups: GroupRig) -> None:
    """There is none."""
    refused = {(LONG, 0): GroupError.UNKNOWN_TOPIC_OR_PARTITION}
    assert groups.commit(1, (LONG, 0)) == refused
    assert groups.take(groups.coordinator.delete_offsets("g", [(LONG, 0)])) == {
        (LONG, 0): GroupError.GROUP_ID_NOT_FOUND
    }


def test_refusals_fit_into_an_answer(groups: GroupRig) -> None:
    """Errors of the Flight listener name their subject, within the size of an answer."""
    actions = group_calls.actions(groups.coordinator)
    partition = group_messages.GroupOffset(topic=LONG, partition=0, offset=1)
    long = group_messages.CommitOffsets(group=LONG, offsets=[partition])
    for request in (long, msgspec.structs.replace(long, group="g")):
        waiting = actions["groups.commit"](request)
        assert isinstance(waiting, Future)
        with pytest.raises(errors.GroupRefused, match=r"x{100}…") as refused:
            groups.take(waiting)
        assert len(str(refused.value)) < 500
    heartbeat = group_messages.GroupHeartbeat(group="g", member_id=LONG, generation=1)
    with pytest.raises(errors.MemberFenced) as fenced:
        actions["groups.heartbeat"](heartbeat)
    assert len(str(fenced.value)) < 500


@pytest.mark.parametrize("given", ["client_id", "instance_id"])
def test_a_member_id_is_cut_where_no_record_could_hold_it(groups: GroupRig, given: str) -> None:
    """The id is cut between two characters, and stays unique by its end."""
    member_id, _ = groups.member(**{given: "ä" * (LONGEST // 2)})
    assert LONGEST - 1 <= len(member_id.encode()) <= LONGEST
    assert member_id.startswith("ää")
    (found,) = groups.successor().describe().members
    assert found.member_id == member_id


@pytest.mark.parametrize("how", ["prepare", "submit"])
@pytest.mark.parametrize("failure", [struct.error("too long"), AssertionError()])
def test_a_record_that_cannot_be_written_harms_nobody(
    groups: GroupRig, failure: Exception, how: str
) -> None:
    """A waiting caller gets the error, and the next commit succeeds."""
    with groups.refusing(failure, how):
        assert groups.commit(1) == {("t", 0): GroupError.UNKNOWN_SERVER_ERROR}
    assert groups.offsets() == {}
    assert groups.commit(2) == {("t", 0): None}
    joined = groups.take(groups.join())
    request = SyncRequest(member_id=joined.member_id, generation=joined.generation)
    with groups.refusing(failure, how):
        synced = groups.take(groups.coordinator.sync("g", request))
    assert synced.error is GroupError.UNKNOWN_SERVER_ERROR
    member = groups.member(member_id=joined.member_id)
    assert groups.commit(3, **who(member)) == {("t", 0): None}
    assert groups.successor().offsets() == {("t", 0): 3}


# ------------------------------------------------------------------------------ the end of groups


def test_a_group_is_deleted_with_all_it_has_committed(groups: GroupRig) -> None:
    """A deletion includes commits that were pending at the time."""
    assert groups.take(groups.coordinator.delete("g")) is GroupError.GROUP_ID_NOT_FOUND
    member = groups.member()
    groups.commit(5, **who(member))
    assert groups.take(groups.coordinator.delete("g")) is GroupError.NON_EMPTY_GROUP
    groups.take(groups.coordinator.leave("g", [Leaver(member_id=member[0])]))
    under_way = groups.coordinator.commit("g", {("t", 1): Commit(offset=3)})
    assert groups.take(groups.coordinator.delete("g")) is None
    assert under_way.result(timeout=0) == {("t", 1): None}
    for each in (groups, groups.successor()):
        assert each.names() == []
        assert each.offsets() == {}


@pytest.mark.parametrize("how", ["submit", "prepare"])
def test_a_group_that_moves_meanwhile_is_no_reason_to_worry(groups: GroupRig, how: str) -> None:
    """Each stop of a broker of a cluster has such commits; members look for the coordinator."""
    moved = errors.NotLeader(topic=consumer_offsets.TOPIC, partition=0, leader=2)
    with groups.refusing(moved, how), capture_logs() as lines:
        assert groups.commit(5) == {("t", 0): GroupError.NOT_COORDINATOR}
    assert [line["log_level"] for line in lines] == ["info"]


def test_a_deletion_that_fails_leaves_the_offsets(clock: ManualClock) -> None:
    """They are acked."""
    groups = _with_a_fault(clock)
    groups.commit(5)
    assert groups.take(groups.coordinator.delete("g")) is GroupError.COORDINATOR_NOT_AVAILABLE
    assert groups.offsets() == {("t", 0): 5}


def test_a_deletion_that_fails_takes_no_commit_back(groups: GroupRig) -> None:
    """It was under way when the deletion began, and is acked before that has failed."""
    groups.commit(5)
    under_way = groups.coordinator.commit("g", {("t", 0): Commit(offset=10)})
    with groups.refusing(FULL):
        deleted = groups.coordinator.delete("g")
    assert groups.take(under_way) == {("t", 0): None}
    assert groups.take(deleted) is GroupError.COORDINATOR_NOT_AVAILABLE
    for each in (groups, groups.successor()):
        assert each.offsets() == {("t", 0): 10}


def _deserted(groups: GroupRig) -> Description:
    """A member has committed 5 and left; the group is in generation 2."""
    member = groups.member()
    groups.commit(5, **who(member))
    groups.take(groups.coordinator.leave("g", [Leaver(member_id=member[0])]))
    found = groups.describe()
    assert (found.state, found.generation) == (GroupState.EMPTY, 2)
    return found


def test_a_deletion_that_fails_leaves_the_group_as_it_was(
    groups: GroupRig, clock: ManualClock
) -> None:
    """Its offsets still expire counted from when its last member left."""
    member = groups.member()
    groups.commit(5, **who(member))
    clock.advance(SESSION_MS / 1e3 + 1)
    groups.settle()
    before = groups.describe()
    assert (before.generation, before.protocol_type) == (2, "consumer")
    with groups.refusing(FULL):
        groups.take(groups.coordinator.delete("g"))
    assert groups.describe() == before
    clock.advance(DAY_SECONDS - 5.0)
    groups.settle()
    assert groups.offsets() == {("t", 0): 5}
    clock.advance(3600.0)
    groups.settle()
    assert groups.offsets() == {}


def test_who_comes_while_a_deletion_fails_goes_on(groups: GroupRig) -> None:
    """With what it has committed itself; its generation is its own."""
    _deserted(groups)
    groups.commit(6, ("t", 1))
    with groups.refusing(FULL):
        deleted = groups.coordinator.delete("g")
        joined = groups.join()
    request = SyncRequest(member_id=joined.result(timeout=0).member_id, generation=1)
    synced = groups.coordinator.sync("g", request)
    late = groups.coordinator.delete("g")
    assert late.result(timeout=0) is GroupError.NON_EMPTY_GROUP
    assert groups.take(deleted) is GroupError.COORDINATOR_NOT_AVAILABLE
    assert groups.take(synced).error is None
    member = (request.member_id, 1)
    assert groups.commit(7, **who(member)) == {("t", 0): None}
    for each in (groups, groups.successor()):
        assert each.heartbeat(member) is None
        assert each.offsets() == {("t", 0): 7, ("t", 1): 6}


def test_a_group_used_while_its_deletion_fails_counts_on(groups: GroupRig) -> None:
    """As no generation has begun meanwhile, the next one is not one of before."""
    before = _deserted(groups)
    with groups.refusing(FULL):
        deleted = groups.coordinator.delete("g")
    committed = groups.coordinator.commit("g", {("t", 1): Commit(offset=6)})
    assert groups.take(deleted) is GroupError.COORDINATOR_NOT_AVAILABLE
    assert groups.take(committed) == {("t", 1): None}
    assert groups.describe() == before
    assert groups.offsets() == {("t", 0): 5, ("t", 1): 6}
    assert groups.member()[1] == before.generation + 1


def test_offsets_of_topics_that_nobody_wants_can_be_forgotten(groups: GroupRig) -> None:
    """Offsets of a subscribed topic are kept, because a member would commit them again."""
    groups.rig.create("u")
    member = groups.member()
    groups.commit(5, **who(member))
    groups.commit(6, ("u", 0), **who(member))
    found = groups.take(groups.coordinator.delete_offsets("g", [("t", 0), ("u", 0)]))
    assert found == {("t", 0): GroupError.GROUP_SUBSCRIBED_TO_TOPIC, ("u", 0): None}
    for each in (groups, groups.successor()):
        assert each.offsets() == {("t", 0): 5}


def test_offsets_expire_after_the_last_member_has_left(
    groups: GroupRig, clock: ManualClock
) -> None:
    """In a stable group no offset of a subscribed topic expires."""
    groups.rig.create("u")
    member = groups.member()
    groups.commit(5, **who(member))
    groups.commit(6, ("u", 0), **who(member))
    for _ in range(30):
        clock.advance(DAY_SECONDS / 24)
        _keep(groups, member, clock)
    assert groups.offsets() == {("t", 0): 5}
    groups.take(groups.coordinator.leave("g", [Leaver(member_id=member[0])]))
    clock.advance(DAY_SECONDS - 60)
    groups.settle()
    assert groups.offsets() == {("t", 0): 5}
    clock.advance(OFFSETS_RETENTION_CHECK_SECONDS + 60)
    groups.settle()
    for each in (groups, groups.successor()):
        assert each.names() == []
        assert each.offsets() == {}


def _keep(groups: GroupRig, member: tuple[str, int], clock: ManualClock) -> None:
    """The clock has gone on for longer than a session; the member says that it lives first."""
    assert groups.heartbeat(member) is None
    groups.settle()


def test_offsets_without_members_expire_one_by_one(groups: GroupRig, clock: ManualClock) -> None:
    """By the time of each commit."""
    groups.commit(5)
    clock.advance(DAY_SECONDS / 2)
    groups.commit(6, ("t", 1))
    clock.advance(DAY_SECONDS / 2 + OFFSETS_RETENTION_CHECK_SECONDS)
    groups.settle()
    assert groups.offsets() == {("t", 1): 6}
    clock.advance(DAY_SECONDS)
    groups.settle()
    assert groups.names() == []


def test_after_the_end_everybody_is_sent_away(groups: GroupRig) -> None:
    """Waiting and new callers are refused after the close."""
    first = groups.member()
    waiting = groups.join()
    under_way = groups.coordinator.commit("g", {("t", 0): Commit(offset=3)}, **who(first))
    groups.coordinator.close()
    assert waiting.result(timeout=0).error is GroupError.NOT_COORDINATOR
    assert under_way.result(timeout=0) == {("t", 0): None}
    assert groups.heartbeat(first) is GroupError.NOT_COORDINATOR
    assert groups.coordinator.committed("g") is GroupError.NOT_COORDINATOR


def test_until_the_groups_are_read_everybody_has_to_wait(groups: GroupRig) -> None:
    """Every request is refused as retriable while the groups are loaded."""
    fresh = Coordinator(groups.rig.broker, settings=SETTINGS, clock=groups.rig.clock)
    loading = GroupError.COORDINATOR_LOAD_IN_PROGRESS
    assert fresh.committed("g") is loading
    assert fresh.groups() is loading
    assert fresh.describe("g") is loading
    assert fresh.heartbeat("g", member_id="m", instance_id=None, generation=1) is loading
    assert fresh.delete("g").result(timeout=0) is loading
    assert fresh.commit("g", {("t", 0): Commit(offset=1)}).result(timeout=0) == {("t", 0): loading}
    assert fresh.delete_offsets("g", [("t", 0)]).result(timeout=0) == {("t", 0): loading}


def test_waiting_for_groups_that_are_read_costs_one_place(groups: GroupRig) -> None:
    """Clients that ask again meanwhile do not hold up what waits for other groups."""
    fresh = Coordinator(groups.rig.broker, settings=SETTINGS, clock=groups.rig.clock)
    while fresh._loading.refusal is not None:
        fresh.tick(0.0)
    fresh._loading._loaded.clear()
    for _ in range(1_000):
        assert fresh.committed("g") is GroupError.COORDINATOR_LOAD_IN_PROGRESS
    assert fresh._known._storing.qsize() == 1
    assert fresh.groups() is GroupError.COORDINATOR_LOAD_IN_PROGRESS
    while fresh.committed("g") is GroupError.COORDINATOR_LOAD_IN_PROGRESS:
        fresh.tick(0.0)
    assert isinstance(fresh.groups(), list)


def test_groups_that_cannot_be_understood_hold_up_no_others(
    groups: GroupRig, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program may have written anything into one partition."""
    groups.commit(5)
    fresh = Coordinator(groups.rig.broker, settings=SETTINGS, clock=clock)
    bad = groups.coordinator._topic.partition_of("g")
    restore = fresh._loading._restore

    def fail(records: Mapping[Key, bytes]) -> Any:
        assert not records
        return restore(records)

    monkeypatch.setattr(fresh._loading, "_restore", fail)
    while fresh._loading.refusal is not None:
        fresh.tick(0.0)
    assert fresh.committed("g") is GroupError.COORDINATOR_LOAD_IN_PROGRESS
    other = next(f"g{n}" for n in range(99) if fresh._topic.partition_of(f"g{n}") != bad)
    assert fresh.committed(other) == {}
    assert isinstance(fresh.groups(), list)
    monkeypatch.undo()
    clock.advance(60.0)
    fresh.tick(0.0)
    assert fresh.committed("g") != {}


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
        self.groups = GroupRig.on(self.rig)
        self.acked: dict[tuple[str, int], int | None] = {}
        self.waiting: list[tuple[tuple[str, int], int | None, Future[Any]]] = []
        self.next = 1

    def found(self, key: tuple[str, int]) -> int | None:
        return self.groups.offsets(key[0]).get(("t", key[1]))

    @rule(group=GROUPS, number=NUMBERS)
    def commit(self, group: str, number: int) -> None:
        self.next += 1
        future = self.groups.coordinator.commit(group, {("t", number): Commit(offset=self.next)})
        self.waiting.append(((group, number), self.next, future))

    @rule(group=GROUPS, number=NUMBERS)
    def forget(self, group: str, number: int) -> None:
        future = self.groups.coordinator.delete_offsets(group, [("t", number)])
        if not future.done():
            self.waiting.append(((group, number), None, future))

    @rule()
    def settle(self) -> None:
        self.groups.settle()
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
        self.groups = GroupRig.on(self.rig)
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


def test_many_offsets_keep_nobody_from_the_lock(groups: GroupRig) -> None:
    """To commit, fetch, sweep and delete 40,000 offsets of a group takes it in small steps."""
    lock = TimedLock()
    groups.coordinator._known._lock = lock  # type: ignore[assignment]
    places = []
    for name in "abcd":
        groups.rig.create(name, 10_000)
        places += [(name, number) for number in range(10_000)]
    committed = groups.take(
        groups.coordinator.commit("g", {place: Commit(offset=7, metadata="m") for place in places})
    )
    assert committed == dict.fromkeys(places)
    for wanted in (None, places, places[:3]):
        found = groups.coordinator.committed("g", wanted)
        assert not isinstance(found, GroupError)
        assert found.keys() == set(places if wanted is None else wanted)
    groups.rig.broker.topics.delete("d")
    assert isinstance(groups.rig.clock, ManualClock)
    groups.rig.clock.advance(OFFSETS_RETENTION_CHECK_SECONDS)
    groups.settle()
    assert len(groups.offsets()) == 30_000
    assert set(groups.take(groups.coordinator.delete_offsets("g", places[:9_999])).values()) == {
        None
    }
    assert len(groups.offsets()) == 20_001
    assert groups.take(groups.coordinator.delete("g")) is None
    groups.settle()
    assert groups.coordinator.committed("g") == {}
    assert lock.longest_seconds < 0.02


def test_a_snapshot_of_offsets_stays_as_it_is(groups: GroupRig) -> None:
    """A snapshot has no later commit, and keeps offsets that are deleted later."""
    groups.rig.create("u", 2)
    groups.commit(1)
    entry = groups.coordinator._known.by_id["g"]
    before = entry.offsets.snapshot()
    groups.commit(2)
    groups.commit(3, ("u", 1))
    assert {topic: list(each) for topic, each in before.items()} == {"t": [0]}
    assert before["t"][0].offset == 1
    after = entry.offsets.snapshot()
    groups.take(groups.coordinator.delete_offsets("g", [("t", 0), ("t", 1)]))
    assert after["t"][0].offset == 2
    assert groups.offsets() == {("u", 1): 3}


def test_a_group_that_changes_while_it_is_deleted_stays(
    groups: GroupRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tombstones are encoded without the lock; commits made meanwhile are not lost."""
    groups.commit(1)
    prepare, commits = groups.coordinator._topic.prepare, [2]

    def meanwhile(group: str, records: Any) -> Any:
        prepared = prepare(group, records)
        if commits:
            groups.coordinator._topic.prepare = prepare  # type: ignore[method-assign]
            groups.commit(commits.pop(), ("t", 1))
            groups.coordinator._topic.prepare = meanwhile  # type: ignore[method-assign]
        return prepared

    monkeypatch.setattr(groups.coordinator._topic, "prepare", meanwhile)
    assert groups.take(groups.coordinator.delete_offsets("g", [("t", 0)])) == {("t", 0): None}
    assert groups.offsets() == {("t", 1): 2}
    commits.append(3)
    assert groups.take(groups.coordinator.delete("g")) is None
    assert groups.offsets() == {}
    assert groups.successor().offsets() == {}


@pytest.mark.parametrize(
    ("metadata", "fits"),
    [("ä" * 4_096, True), ("x" * 4_097, False), ("😀" * 2_048, True), ("😀" * 2_049, False)],
)
def test_metadata_is_counted_as_kafka_counts_it(
    groups: GroupRig, metadata: str, fits: bool
) -> None:
    """In characters of UTF-16, not in bytes."""
    place = ("t", 0)
    found = groups.take(
        groups.coordinator.commit("g", {place: Commit(offset=1, metadata=metadata)})
    )
    assert found == {place: None if fits else GroupError.OFFSET_METADATA_TOO_LARGE}
    if fits:
        back = groups.successor().coordinator.committed("g")
        assert not isinstance(back, GroupError)
        assert back[place].metadata == metadata
