"""A membership against a coordinator that says what a test wants it to say."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec
import pytest
from kafka.protocol.consumer.metadata import ConsumerProtocolSubscription

from sparklog import errors, wire
from sparklog.client.assign import decode_assignment, encode_assignment
from sparklog.client.connection import Backoff, Connection
from sparklog.client.membership import GroupOptions, Membership, Step, Topics

SECONDS = 20.0
FAR_SECONDS = 3600.0
BUSY = errors.GroupBusy(group="g", error="REBALANCE_IN_PROGRESS")
GONE = errors.BrokerUnavailable(address="a:1", reason="the connection broke")

Answer = msgspec.Struct | Exception | Callable[[Any], msgspec.Struct]


def fenced(error: str) -> errors.MemberFenced:
    """By Kafka's name of the reason."""
    return errors.MemberFenced(group="g", member_id="m", error=error)


class Coordinator:
    """Stands for a connection; answers as it was told to, else as all goes well.

    Topic `t` has two partitions; of t-1 the offset 5 is committed.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.partitions = 2
        self._next: dict[str, list[Answer]] = {}
        self._usual: dict[str, Answer] = {
            "groups.join": self._join,
            "groups.sync": lambda asked: wire.SyncedGroup(
                assignment=asked.assignments.get("m") or encode_assignment([("t", 1)])
            ),
            "groups.heartbeat": wire.GroupState(),
            "groups.offsets": wire.GroupOffsets(
                offsets=[wire.GroupOffset(topic="t", partition=1, offset=5)]
            ),
            "topics.describe": lambda asked: wire.TopicInfo(
                topic=asked.topic,
                topic_id="id",
                partitions=[wire.PartitionInfo(partition=n) for n in range(self.partitions)],
            ),
        }
        self.generation = 1

    def _join(self, asked: wire.JoinGroup) -> wire.JoinedGroup:
        if not asked.member_id:
            return wire.JoinedGroup(member_id="m")
        return wire.JoinedGroup(
            member_id=asked.member_id, generation=self.generation, protocol="range", leader="other"
        )

    def say(self, name: str, *answers: Answer) -> None:
        """To the next calls of this name."""
        self._next.setdefault(name, []).extend(answers)

    def always(self, name: str, answer: Answer) -> None:
        self._usual[name] = answer

    def calls(self, name: str) -> list[Any]:
        """What was asked by this name."""
        return [request for each, request in list(self.asked) if each == name]

    # -------------------------------------------------------------------------- a Connection

    def attempt(self, name: str, request: Any, *, timeout_seconds: float = 0.0) -> Any:
        self.asked.append((name, request))
        waiting = self._next.get(name)
        answer = waiting.pop(0) if waiting else self._usual.get(name, wire.Empty())
        if isinstance(answer, Exception):
            raise answer
        return answer(request) if callable(answer) else answer

    action = attempt

    def learn_leaders(self, _topic: wire.TopicInfo) -> None:
        pass

    def backoff(self) -> Backoff:
        return Backoff(jitter=lambda: 0.0)


@pytest.fixture(name="coordinator")
def _coordinator() -> Coordinator:
    return Coordinator()


@pytest.fixture(name="make")
def _make(coordinator: Coordinator) -> Iterator[Callable[..., Membership]]:
    made: list[Membership] = []

    def make(**options: Any) -> Membership:
        known: dict[str, Any] = {
            "group": "g",
            "heartbeat_seconds": 0.01,
            "auto_commit_seconds": FAR_SECONDS,
        }
        connection = cast("Connection", coordinator)
        given_options = GroupOptions(**(known | options))
        membership = Membership(connection, given_options, Topics("t"), lambda: None)
        made.append(membership)
        return membership

    yield make
    for each in made:
        each.close()


def until(holds: Callable[[], object]) -> None:
    """Waits for what the membership's thread does."""
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def joined(membership: Membership) -> Membership:
    """After a generation has begun, and was taken over."""
    while (step := membership.next_step()) is not Step.NOTHING:
        match step:
            case Step.GIVE_UP:
                membership.join()
            case Step.WAIT:
                assert membership.wait(time.monotonic() + SECONDS)
            case Step.TAKE_OVER:
                membership.took_over()
            case _:
                raise AssertionError(step)
    return membership


Make = Callable[..., Membership]


# ------------------------------------------------------------------------------ joining


def test_joining(coordinator: Coordinator, make: Make) -> None:
    """A new member asks for its id first, joins with it, and has what the leader gave it."""
    membership = make()
    assert membership.next_step() is Step.GIVE_UP
    membership.join()
    assert membership.wait(time.monotonic() + SECONDS)
    assert membership.next_step() is Step.TAKE_OVER
    assert membership.assigned.partitions == [("t", 1)]
    assert membership.assigned.committed == {("t", 1): 5}
    first, second = coordinator.calls("groups.join")
    assert (first.member_id, first.member_id_required, second.member_id) == ("", True, "m")
    assert [each.name for each in second.protocols] == ["range", "roundrobin"]
    assert (second.session_timeout_ms, second.rebalance_timeout_ms) == (45_000, 300_000)
    (sync,) = coordinator.calls("groups.sync")
    assert (sync.member_id, sync.generation, sync.assignments) == ("m", 1, {})


@pytest.mark.parametrize("failure", [GONE, BUSY, fenced("ILLEGAL_GENERATION")])
@pytest.mark.parametrize("where", ["groups.sync", "groups.offsets"])
def test_joining_again(
    coordinator: Coordinator, make: Make, where: str, failure: Exception
) -> None:
    """Whatever goes wrong on the way and may pass, it joins once more as the same member."""
    coordinator.say(where, failure)
    joined(make())
    assert [each.member_id for each in coordinator.calls("groups.join")] == ["", "m", "m"]


def test_joining_after_the_answer_was_lost(coordinator: Coordinator, make: Make) -> None:
    """A join whose answer was lost is repeated with the id that the member knows."""
    coordinator.say("groups.join", wire.JoinedGroup(member_id="m"), GONE)
    joined(make())
    assert [each.member_id for each in coordinator.calls("groups.join")] == ["", "m", "m"]


def test_joining_when_nobody_knows_it_any_more(coordinator: Coordinator, make: Make) -> None:
    """An id that the group does not know is forgotten."""
    coordinator.say("groups.sync", fenced("UNKNOWN_MEMBER_ID"))
    joined(make())
    assert [each.member_id for each in coordinator.calls("groups.join")] == ["", "m", "", "m"]


def test_refusal(coordinator: Coordinator, make: Make) -> None:
    """What is refused is raised once, and tried again by the next poll."""
    coordinator.say("groups.join", errors.GroupRefused(group="g", error="X", hint=""))
    membership = make()
    membership.join()
    assert membership.wait(time.monotonic() + SECONDS)
    with pytest.raises(errors.GroupRefused):
        membership.next_step()
    joined(membership)


def test_fault_of_ours(coordinator: Coordinator, make: Make) -> None:
    """Whatever goes wrong in the membership's thread is raised where somebody waits."""
    coordinator.say("groups.join", ZeroDivisionError())
    membership = make()
    membership.join()
    assert membership.wait(time.monotonic() + SECONDS)
    with pytest.raises(errors.SparklogError, match="ZeroDivisionError"):
        membership.next_step()
    joined(membership)
    coordinator.say("groups.heartbeat", ZeroDivisionError())
    until(lambda: membership.calls)
    assert membership.next_step() is Step.GIVE_UP
    membership.join()
    with pytest.raises(errors.SparklogError, match="ZeroDivisionError"):
        membership.next_step()
    joined(membership)


# ------------------------------------------------------------------------------ leading


def test_leader_assigns(coordinator: Coordinator, make: Make) -> None:
    """The leader gives every member its part, Kafka's members too."""
    theirs = ConsumerProtocolSubscription(
        version=3, topics=["t", "gone"], user_data=None, owned_partitions=[]
    ).encode()
    coordinator.say(
        "groups.join",
        wire.JoinedGroup(
            member_id="m",
            generation=4,
            protocol="roundrobin",
            leader="m",
            members=[
                wire.GroupMember(member_id="m", metadata=theirs),
                wire.GroupMember(member_id="k", instance_id="static", metadata=theirs),
            ],
        ),
    )

    def describe(asked: wire.TopicName) -> wire.TopicInfo:
        if asked.topic == "gone":
            raise errors.UnknownTopic(topic="gone")
        partitions = [wire.PartitionInfo(partition=number) for number in range(3)]
        return wire.TopicInfo(topic="t", topic_id="id", partitions=partitions)

    coordinator.always("topics.describe", describe)
    joined(make())
    (sync,) = coordinator.calls("groups.sync")
    found = {key: decode_assignment(value) for key, value in sync.assignments.items()}
    assert found == {"k": [("t", 0), ("t", 2)], "m": [("t", 1)]}


@pytest.mark.parametrize("leader", ["m", ""])
def test_leader_watches_the_topics(coordinator: Coordinator, make: Make, leader: str) -> None:
    """The leader calls for a new generation when partitions are added; also one that came back.

    Who came back is told the members, and that the assignment stands (KIP-814).
    """
    metadata = ConsumerProtocolSubscription(version=0, topics=["t"], user_data=b"").encode()
    coordinator.say(
        "groups.join",
        wire.JoinedGroup(
            member_id="m",
            generation=4,
            protocol="range",
            leader=leader,
            members=[wire.GroupMember(member_id="m", metadata=metadata)],
        ),
    )
    membership = joined(make(metadata_age_seconds=0.01))
    (sync,) = coordinator.calls("groups.sync")
    assert bool(sync.assignments) == bool(leader)
    beats = len(coordinator.calls("groups.heartbeat"))
    until(lambda: len(coordinator.calls("groups.heartbeat")) > beats + 3)
    assert membership.next_step() is Step.NOTHING
    coordinator.partitions = 3
    until(lambda: membership.calls)
    assert membership.next_step() is Step.GIVE_UP


def test_others_do_not_watch(coordinator: Coordinator, make: Make) -> None:
    """Who does not lead leaves that to the leader."""
    membership = joined(make(metadata_age_seconds=0.01))
    described = len(coordinator.calls("topics.describe"))
    coordinator.partitions = 3
    beats = len(coordinator.calls("groups.heartbeat"))
    until(lambda: len(coordinator.calls("groups.heartbeat")) > beats + 3)
    assert not membership.calls
    assert len(coordinator.calls("topics.describe")) == described


# ------------------------------------------------------------------------------ staying


def test_rebalance(coordinator: Coordinator, make: Make) -> None:
    """When the group calls for a rebalance, the member goes on beating until it joins."""
    membership = joined(make())
    coordinator.always("groups.heartbeat", wire.GroupState(rebalancing=True))
    until(lambda: membership.calls)
    beats = len(coordinator.calls("groups.heartbeat"))
    until(lambda: len(coordinator.calls("groups.heartbeat")) > beats + 2)
    assert membership.next_step() is Step.GIVE_UP
    assert not membership.is_lost
    coordinator.always("groups.heartbeat", wire.GroupState())
    coordinator.generation = 2
    joined(membership)
    assert coordinator.calls("groups.join")[-1].member_id == "m"
    until(lambda: coordinator.calls("groups.heartbeat")[-1].generation == 2)


@pytest.mark.parametrize(
    ("error", "next_id"), [("UNKNOWN_MEMBER_ID", ""), ("ILLEGAL_GENERATION", "m")]
)
def test_fenced(coordinator: Coordinator, make: Make, error: str, next_id: str) -> None:
    """A member that the group has gone on without can commit no more, and joins anew."""
    membership = joined(make())
    coordinator.say("groups.heartbeat", fenced(error))
    until(lambda: membership.calls)
    assert membership.next_step() is Step.GIVE_UP
    assert membership.is_lost
    with pytest.raises(errors.MemberFenced):
        membership.commit({("t", 1): 6})
    assert coordinator.calls("groups.commit") == []
    before = len(coordinator.calls("groups.join"))
    joined(membership)
    assert coordinator.calls("groups.join")[before].member_id == next_id


def test_replaced(coordinator: Coordinator, make: Make) -> None:
    """A static member whose place was taken gives up for good: it would push the other out."""
    membership = joined(make(instance_id="i"))
    coordinator.say("groups.heartbeat", fenced("FENCED_INSTANCE_ID"))
    until(lambda: membership.calls)
    before = len(coordinator.calls("groups.join"))
    assert membership.next_step() is Step.GIVE_UP
    membership.join()
    for _ in range(2):
        with pytest.raises(errors.MemberFenced, match="FENCED_INSTANCE_ID"):
            membership.next_step()
    assert len(coordinator.calls("groups.join")) == before


def test_heartbeats_that_fail(coordinator: Coordinator, make: Make) -> None:
    """A broker that does not answer for a while is no reason to give anything up."""
    membership = joined(make())
    coordinator.say("groups.heartbeat", GONE, GONE, GONE)
    beats = len(coordinator.calls("groups.heartbeat"))
    until(lambda: len(coordinator.calls("groups.heartbeat")) > beats + 5)
    assert not membership.calls


# ------------------------------------------------------------------------------ commits


def test_commits_in_the_background(coordinator: Coordinator, make: Make) -> None:
    """What is handed over is committed, by whom and of which generation, and remembered."""
    membership = joined(make(auto_commit_seconds=0.02))
    assert membership.committed == {("t", 1): 5}
    until(lambda: membership.calls)
    assert membership.next_step() is Step.COMMIT
    membership.commit_soon({("t", 1): 9})
    assert membership.wait_for_commit(time.monotonic() + SECONDS)
    assert membership.committed == {("t", 1): 9}
    (commit,) = coordinator.calls("groups.commit")
    assert (commit.member_id, commit.generation) == ("m", 1)
    assert [(each.topic, each.partition, each.offset) for each in commit.offsets] == [("t", 1, 9)]


@pytest.mark.parametrize("failure", [GONE, BUSY])
def test_commit_that_may_pass(coordinator: Coordinator, make: Make, failure: Exception) -> None:
    """A commit in the background is tried again while that may help."""
    membership = joined(make())
    coordinator.say("groups.commit", failure, failure)
    membership.commit_soon({("t", 1): 9})
    assert membership.wait_for_commit(time.monotonic() + SECONDS)
    assert membership.committed == {("t", 1): 9}
    assert len(coordinator.calls("groups.commit")) == 3


def test_commit_that_is_refused(
    coordinator: Coordinator, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is refused is logged, and counts as not committed."""
    caplog.set_level(logging.WARNING, "sparklog.client")
    membership = joined(make())
    coordinator.say("groups.commit", errors.GroupRefused(group="g", error="X", hint=""))
    membership.commit_soon({("t", 1): 9})
    assert membership.wait_for_commit(time.monotonic() + SECONDS)
    assert membership.committed == {("t", 1): 5}
    assert "a commit of group 'g' failed" in caplog.text


def test_older_commit_never_comes_after_a_newer(coordinator: Coordinator, make: Make) -> None:
    """Who commits himself overtakes what was handed over and is not on its way yet."""
    membership = joined(make())
    is_busy, may_go_on = threading.Event(), threading.Event()

    def slowly(_request: object) -> wire.GroupState:
        is_busy.set()
        assert may_go_on.wait(SECONDS)
        return wire.GroupState()

    coordinator.say("groups.heartbeat", slowly)
    assert is_busy.wait(SECONDS)
    membership.commit_soon({("t", 1): 8})
    membership.commit({("t", 1): 9})
    may_go_on.set()
    assert membership.wait_for_commit(time.monotonic() + SECONDS)
    beats = len(coordinator.calls("groups.heartbeat"))
    until(lambda: len(coordinator.calls("groups.heartbeat")) > beats + 1)
    assert [each.offsets[0].offset for each in coordinator.calls("groups.commit")] == [9]
    assert membership.committed == {("t", 1): 9}


def test_commit_waits_for_the_one_on_its_way(coordinator: Coordinator, make: Make) -> None:
    """A commit in the background that is on its way comes before the consumer's own."""
    membership = joined(make())
    is_on_its_way, may_go_on = threading.Event(), threading.Event()

    def slowly(_request: object) -> wire.Empty:
        is_on_its_way.set()
        assert may_go_on.wait(SECONDS)
        return wire.Empty()

    coordinator.say("groups.commit", slowly)
    membership.commit_soon({("t", 1): 7})
    assert is_on_its_way.wait(SECONDS)
    own = threading.Thread(target=membership.commit, args=({("t", 1): 9},))
    own.start()
    assert len(coordinator.calls("groups.commit")) == 1
    may_go_on.set()
    own.join(SECONDS)
    assert [each.offsets[0].offset for each in coordinator.calls("groups.commit")] == [7, 9]
    assert membership.committed == {("t", 1): 9}


# ------------------------------------------------------------------------------ the end


@pytest.mark.parametrize("instance_id", [None, "i"])
def test_close(coordinator: Coordinator, make: Make, instance_id: str | None) -> None:
    """Who ends leaves, once; a static member stays."""
    membership = joined(make(instance_id=instance_id))
    membership.close()
    membership.close()
    leaves = [each.member_id for each in coordinator.calls("groups.leave")]
    assert leaves == ([] if instance_id else ["m"])
    with pytest.raises(errors.BadRequest, match="closed"):
        membership.next_step()


def test_leaving_that_fails(coordinator: Coordinator, make: Make) -> None:
    """A broker that is not there does not keep anybody from ending."""
    membership = joined(make())
    coordinator.say("groups.leave", GONE)
    membership.close()
    assert len(coordinator.calls("groups.leave")) == 1


def test_not_polled(coordinator: Coordinator, make: Make) -> None:
    """Who is not polled leaves, but not while it is being polled."""
    membership = joined(make(max_poll_interval_seconds=0.05))
    membership.is_polled = True
    membership.polled_at -= 1.0
    beats = len(coordinator.calls("groups.heartbeat"))
    until(lambda: len(coordinator.calls("groups.heartbeat")) > beats + 3)
    assert coordinator.calls("groups.leave") == []
    membership.is_polled = False
    until(lambda: membership.is_lost)
    assert len(coordinator.calls("groups.leave")) == 1
