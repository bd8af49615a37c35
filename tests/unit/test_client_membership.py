"""A membership against a coordinator with prepared answers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from kafka.protocol.consumer.metadata import ConsumerProtocolSubscription

from sparklog import errors, limits
from sparklog.client.connection import Backoff, Connection
from sparklog.client.consumer.assignors import (
    decode_assignment,
    decode_member,
    encode_assignment,
)
from sparklog.client.consumer.fetcher import Fetcher, FetchPosition
from sparklog.client.consumer.group_fetcher import GroupFetcher
from sparklog.client.consumer.membership import GroupOptions, Membership, Step, Topics
from sparklog.client.offsets import OffsetAndMetadata
from sparklog.clock import ManualClock
from sparklog.formats import flight_messages, group_messages

SECONDS = 20.0
"""Longer than anything here takes: a test that waits so long has failed."""
HEARTBEAT_SECONDS = 3.0
FAR_SECONDS = 3600.0
BUSY = errors.GroupBusy(group="g", error="REBALANCE_IN_PROGRESS")
GONE = errors.BrokerUnavailable(address="a:1", reason="the connection broke")

Answer = msgspec.Struct | Exception | Callable[[Any], msgspec.Struct]


def fenced(error: str) -> errors.MemberFenced:
    """Returns the error with Kafka's name of the reason."""
    return errors.MemberFenced(group="g", member_id="m", error=error)


class Coordinator:
    """Fake connection with the answers that a test prepares, or those of a healthy group.

    Topic `t` has two partitions; of t-1 the offset 5 is committed.
    """

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.changed = threading.Condition()
        """Notified of each call, and when the membership calls for its consumer."""
        self.asked: list[tuple[str, Any]] = []
        self.partitions = 2
        self._next: dict[str, list[Answer]] = {}
        self._usual: dict[str, Answer] = {
            "groups.join": self._join,
            "groups.sync": lambda asked: group_messages.SyncedGroup(
                assignment=asked.assignments.get("m") or encode_assignment([("t", 1)])
            ),
            "groups.heartbeat": group_messages.GroupHeartbeatReply(),
            "groups.offsets": group_messages.GroupOffsets(
                offsets=[group_messages.GroupOffset(topic="t", partition=1, offset=5)]
            ),
            "topics.describe": lambda asked: flight_messages.TopicInfo(
                topic=asked.topic,
                topic_id="id",
                partitions=[
                    flight_messages.PartitionInfo(partition=n) for n in range(self.partitions)
                ],
            ),
        }
        self.generation = 1

    def _join(self, asked: group_messages.JoinGroup) -> group_messages.JoinedGroup:
        if not asked.member_id:
            return group_messages.JoinedGroup(member_id="m")
        return group_messages.JoinedGroup(
            member_id=asked.member_id, generation=self.generation, protocol="range", leader="other"
        )

    def say(self, name: str, *answers: Answer) -> None:
        """Gives these answers to the next calls of this name."""
        self._next.setdefault(name, []).extend(answers)

    def always(self, name: str, answer: Answer) -> None:
        self._usual[name] = answer

    def calls(self, name: str) -> list[Any]:
        """Returns the requests of this name."""
        return [request for each, request in list(self.asked) if each == name]

    def notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def until(self, holds: Callable[[], object]) -> None:
        """Waits for the membership's thread."""
        with self.changed:
            assert self.changed.wait_for(holds, SECONDS)

    def beat(self, count: int) -> None:
        """Lets time pass for so many heartbeats, and waits for each."""
        for _ in range(count):
            wanted = len(self.calls("groups.heartbeat")) + 1
            self.clock.advance(HEARTBEAT_SECONDS)
            self.until(partial(self._has_beaten, wanted))

    def _has_beaten(self, count: int) -> bool:
        return len(self.calls("groups.heartbeat")) >= count

    # -------------------------------------------------------------------------- a Connection

    def attempt(self, name: str, request: Any, *, timeout_seconds: float = 0.0) -> Any:
        self.asked.append((name, request))
        self.notify()
        waiting = self._next.get(name)
        answer = waiting.pop(0) if waiting else self._usual.get(name, flight_messages.Empty())
        if isinstance(answer, Exception):
            raise answer
        return answer(request) if callable(answer) else answer

    action = attempt

    def learn_leaders(self, _topic: flight_messages.TopicInfo) -> None:
        pass

    def backoff(self) -> Backoff:
        return NoBackoff()


class NoBackoff(Backoff):
    """Tries again at once."""

    def next_seconds(self, error: errors.SparklogError) -> float:
        return 0.0


@pytest.fixture(name="coordinator")
def _coordinator() -> Coordinator:
    return Coordinator()


@pytest.fixture(name="make")
def _make(coordinator: Coordinator) -> Iterator[Callable[..., Membership]]:
    made: list[Membership] = []

    def make(**options: Any) -> Membership:
        known: dict[str, Any] = {
            "group": "g",
            "heartbeat_seconds": HEARTBEAT_SECONDS,
            "metadata_age_seconds": FAR_SECONDS,
            "max_poll_interval_seconds": FAR_SECONDS,
            "auto_commit_seconds": FAR_SECONDS,
        }
        connection = cast("Connection", coordinator)
        given_options = GroupOptions(**(known | options))
        membership = Membership(connection, given_options, Topics("t"), coordinator.notify)
        made.append(membership)
        return membership

    yield make
    for each in made:
        each.close()


def joined(membership: Membership) -> Membership:
    """Lets the membership join, and takes its assignment over."""
    while (step := membership.next_step()) is not Step.NOTHING:
        match step:
            case Step.GIVE_UP:
                membership.join()
            case Step.WAIT:
                assert membership.wait(None)
            case Step.TAKE_OVER:
                membership.took_over()
            case _:
                raise AssertionError(step)
    return membership


Make = Callable[..., Membership]


# ------------------------------------------------------------------------------ joining


def test_joining(coordinator: Coordinator, make: Make) -> None:
    """A new member asks for its id first, joins with it, and gets its assignment."""
    membership = make()
    assert membership.next_step() is Step.GIVE_UP
    membership.join()
    assert membership.wait(None)
    assert membership.next_step() is Step.TAKE_OVER
    assert membership.assigned.partitions == [("t", 1)]
    assert membership.assigned.committed == {("t", 1): 5}
    first, second = coordinator.calls("groups.join")
    assert (first.member_id, first.member_id_required, second.member_id) == ("", True, "m")
    assert [each.name for each in second.protocols] == ["range", "roundrobin"]
    assert (second.session_timeout_ms, second.rebalance_timeout_ms) == (45_000, 3_600_000)
    (sync,) = coordinator.calls("groups.sync")
    assert (sync.member_id, sync.generation, sync.assignments) == ("m", 1, {})


@pytest.mark.parametrize("failure", [GONE, BUSY, fenced("ILLEGAL_GENERATION")])
@pytest.mark.parametrize("where", ["groups.sync", "groups.offsets"])
def test_joining_again(
    coordinator: Coordinator, make: Make, where: str, failure: Exception
) -> None:
    """After a failure that may pass, it joins once more as the same member."""
    coordinator.say(where, failure)
    joined(make())
    assert [each.member_id for each in coordinator.calls("groups.join")] == ["", "m", "m"]


def test_joining_after_the_answer_was_lost(coordinator: Coordinator, make: Make) -> None:
    """A join without an answer is repeated with the id that the member knows."""
    coordinator.say("groups.join", group_messages.JoinedGroup(member_id="m"), GONE)
    joined(make())
    assert [each.member_id for each in coordinator.calls("groups.join")] == ["", "m", "m"]


def test_joining_when_nobody_knows_it_any_more(coordinator: Coordinator, make: Make) -> None:
    """A member forgets an id that the group does not know."""
    coordinator.say("groups.sync", fenced("UNKNOWN_MEMBER_ID"))
    joined(make())
    assert [each.member_id for each in coordinator.calls("groups.join")] == ["", "m", "", "m"]


def test_refusal(coordinator: Coordinator, make: Make) -> None:
    """A refusal is raised once; the next poll tries again."""
    coordinator.say("groups.join", errors.GroupRefused(group="g", error="X", hint=""))
    membership = make()
    membership.join()
    assert membership.wait(None)
    with pytest.raises(errors.GroupRefused):
        membership.next_step()
    joined(membership)


def test_fault_of_ours(coordinator: Coordinator, make: Make) -> None:
    """A fault in the membership's thread is raised by the call that waits."""
    coordinator.say("groups.join", ZeroDivisionError())
    membership = make()
    membership.join()
    assert membership.wait(None)
    with pytest.raises(errors.SparklogError, match="ZeroDivisionError"):
        membership.next_step()
    joined(membership)
    coordinator.say("groups.heartbeat", ZeroDivisionError())
    coordinator.clock.advance(HEARTBEAT_SECONDS)
    coordinator.until(lambda: membership.calls)
    assert membership.next_step() is Step.GIVE_UP
    membership.join()
    with pytest.raises(errors.SparklogError, match="ZeroDivisionError"):
        membership.next_step()
    joined(membership)


# ------------------------------------------------------------------------------ leading


def test_leader_assigns(coordinator: Coordinator, make: Make) -> None:
    """The leader assigns partitions to every member, Kafka's members too."""
    theirs = ConsumerProtocolSubscription(
        version=3, topics=["t", "gone"], user_data=None, owned_partitions=[]
    ).encode()
    coordinator.say(
        "groups.join",
        group_messages.JoinedGroup(
            member_id="m",
            generation=4,
            protocol="roundrobin",
            leader="m",
            members=[
                group_messages.GroupMember(member_id="m", metadata=theirs),
                group_messages.GroupMember(member_id="k", instance_id="static", metadata=theirs),
            ],
        ),
    )

    def describe(asked: flight_messages.TopicName) -> flight_messages.TopicInfo:
        if asked.topic == "gone":
            raise errors.UnknownTopic(topic="gone")
        partitions = [flight_messages.PartitionInfo(partition=number) for number in range(3)]
        return flight_messages.TopicInfo(topic="t", topic_id="id", partitions=partitions)

    coordinator.always("topics.describe", describe)
    joined(make())
    (sync,) = coordinator.calls("groups.sync")
    found = {key: decode_assignment(value) for key, value in sync.assignments.items()}
    assert found == {"k": [("t", 0), ("t", 2)], "m": [("t", 1)]}


@pytest.mark.parametrize("leader", ["m", ""])
def test_leader_watches_the_topics(coordinator: Coordinator, make: Make, leader: str) -> None:
    """The leader calls for a new generation when partitions are added; also one that came back.

    A leader that came back gets the members, and keeps the assignment (KIP-814).
    """
    metadata = ConsumerProtocolSubscription(version=0, topics=["t"], user_data=b"").encode()
    coordinator.say(
        "groups.join",
        group_messages.JoinedGroup(
            member_id="m",
            generation=4,
            protocol="range",
            leader=leader,
            members=[group_messages.GroupMember(member_id="m", metadata=metadata)],
        ),
    )
    membership = joined(make(metadata_age_seconds=HEARTBEAT_SECONDS))
    (sync,) = coordinator.calls("groups.sync")
    assert bool(sync.assignments) == bool(leader)
    coordinator.beat(3)
    assert membership.next_step() is Step.NOTHING
    coordinator.partitions = 3
    coordinator.clock.advance(HEARTBEAT_SECONDS)
    coordinator.until(lambda: membership.calls)
    assert membership.next_step() is Step.GIVE_UP


def test_others_do_not_watch(coordinator: Coordinator, make: Make) -> None:
    """A member that does not lead does not look at the partitions."""
    membership = joined(make(metadata_age_seconds=HEARTBEAT_SECONDS))
    described = len(coordinator.calls("topics.describe"))
    coordinator.partitions = 3
    coordinator.beat(3)
    assert not membership.calls
    assert len(coordinator.calls("topics.describe")) == described


# ------------------------------------------------------------------------------ staying


def test_rebalance(coordinator: Coordinator, make: Make) -> None:
    """A member sends heartbeats in a rebalance until it joins."""
    membership = joined(make())
    coordinator.always("groups.heartbeat", group_messages.GroupHeartbeatReply(rebalancing=True))
    coordinator.clock.advance(HEARTBEAT_SECONDS)
    coordinator.until(lambda: membership.calls)
    coordinator.beat(2)
    assert membership.next_step() is Step.GIVE_UP
    assert not membership.is_lost
    coordinator.always("groups.heartbeat", group_messages.GroupHeartbeatReply())
    coordinator.generation = 2
    joined(membership)
    assert coordinator.calls("groups.join")[-1].member_id == "m"
    coordinator.beat(1)
    assert coordinator.calls("groups.heartbeat")[-1].generation == 2


@pytest.mark.parametrize(
    ("error", "next_id"), [("UNKNOWN_MEMBER_ID", ""), ("ILLEGAL_GENERATION", "m")]
)
def test_fenced(coordinator: Coordinator, make: Make, error: str, next_id: str) -> None:
    """A member that the group has removed can commit nothing, and joins again."""
    membership = joined(make())
    coordinator.say("groups.heartbeat", fenced(error))
    coordinator.clock.advance(HEARTBEAT_SECONDS)
    coordinator.until(lambda: membership.calls)
    assert membership.next_step() is Step.GIVE_UP
    assert membership.is_lost
    with pytest.raises(errors.MemberFenced):
        membership.commit({("t", 1): 6})
    assert coordinator.calls("groups.commit") == []
    before = len(coordinator.calls("groups.join"))
    joined(membership)
    assert coordinator.calls("groups.join")[before].member_id == next_id


def test_replaced(coordinator: Coordinator, make: Make) -> None:
    """A static member that was replaced gives up for good: joining would replace the other."""
    membership = joined(make(instance_id="i"))
    coordinator.say("groups.heartbeat", fenced("FENCED_INSTANCE_ID"))
    coordinator.clock.advance(HEARTBEAT_SECONDS)
    coordinator.until(lambda: membership.calls)
    before = len(coordinator.calls("groups.join"))
    assert membership.next_step() is Step.GIVE_UP
    membership.join()
    for _ in range(2):
        with pytest.raises(errors.MemberFenced, match="FENCED_INSTANCE_ID"):
            membership.next_step()
    assert len(coordinator.calls("groups.join")) == before


def test_heartbeats_that_fail(coordinator: Coordinator, make: Make) -> None:
    """A member keeps its partitions while a broker does not answer its heartbeats."""
    membership = joined(make())
    coordinator.say("groups.heartbeat", GONE, GONE, GONE)
    coordinator.beat(5)
    assert not membership.calls


# ------------------------------------------------------------------------------ cooperation

COOPERATIVE = ("cooperative-sticky",)


def cooperating(coordinator: Coordinator, make: Make) -> Membership:
    """Returns a cooperative member that owns t-1."""
    membership = make(assignors=COOPERATIVE)
    membership.join()
    assert membership.wait(None)
    assert membership.next_step() is Step.TAKE_OVER
    membership.took_over()
    assert membership.next_step() is Step.NOTHING
    coordinator.always("groups.heartbeat", group_messages.GroupHeartbeatReply(rebalancing=True))
    coordinator.beat(1)
    coordinator.until(lambda: membership.calls)
    return membership


def test_joining_with_owned_partitions(coordinator: Coordinator, make: Make) -> None:
    """A cooperative member joins again with its partitions, and reads them meanwhile."""
    membership = cooperating(coordinator, make)
    may_go_on = threading.Event()

    def slowly(asked: group_messages.JoinGroup) -> group_messages.JoinedGroup:
        assert may_go_on.wait(SECONDS)
        return group_messages.JoinedGroup(
            member_id="m", generation=2, protocol=COOPERATIVE[0], leader="other"
        )

    coordinator.say("groups.join", slowly)
    assert membership.next_step() is Step.JOIN
    membership.join([("t", 1)])
    assert membership.next_step() is Step.NOTHING
    membership.commit({("t", 1): 9})
    may_go_on.set()
    coordinator.until(lambda: membership.calls)
    assert membership.next_step() is Step.TAKE_OVER
    joins = coordinator.calls("groups.join")
    subscriptions = [decode_member("m", None, each.protocols[0].metadata) for each in joins]
    assert [(each.owned, each.generation) for each in subscriptions] == [
        ((), -1),
        ((), -1),
        ((("t", 1),), 1),
    ]


@pytest.mark.parametrize("where", ["groups.join", "groups.sync"])
def test_removed_while_it_joins(coordinator: Coordinator, make: Make, where: str) -> None:
    """A cooperative member that was removed while it joins has lost its partitions."""
    membership = cooperating(coordinator, make)
    coordinator.say(where, fenced("UNKNOWN_MEMBER_ID"))
    assert membership.next_step() is Step.JOIN
    membership.join([("t", 1)])
    coordinator.until(lambda: membership.is_lost)
    assert membership.next_step() is Step.GIVE_UP
    membership.join()
    assert membership.wait(None)
    last = coordinator.calls("groups.join")[-1]
    found = decode_member("m", None, last.protocols[0].metadata)
    assert (found.owned, found.generation) == ((), -1)


def test_commit_after_the_next_generation_began(coordinator: Coordinator, make: Make) -> None:
    """A commit of the old generation says that the group is busy; the member is not lost."""
    membership = cooperating(coordinator, make)
    may_go_on = threading.Event()

    def slowly(_asked: object) -> group_messages.SyncedGroup:
        assert may_go_on.wait(SECONDS)
        return group_messages.SyncedGroup(assignment=encode_assignment([("t", 1)]))

    coordinator.say("groups.sync", slowly)
    coordinator.say("groups.commit", fenced("ILLEGAL_GENERATION"))
    membership.join([("t", 1)])
    with pytest.raises(errors.GroupBusy):
        membership.commit({("t", 1): 9})
    assert not membership.is_lost
    may_go_on.set()
    coordinator.until(lambda: membership.calls)


def closing_while_it_joins(
    coordinator: Coordinator, make: Make, may_go_on: threading.Event
) -> threading.Thread:
    """Begins to close a consumer of `t-1` while its generation is over, and the next one begins.

    The next generation begins once `may_go_on` is set.
    """
    membership = cooperating(coordinator, make)
    coordinator.generation = 2

    def slowly(_asked: object) -> group_messages.SyncedGroup:
        assert may_go_on.wait(SECONDS)
        return group_messages.SyncedGroup(assignment=encode_assignment([("t", 1)]))

    coordinator.say("groups.sync", slowly)
    coordinator.say("groups.commit", fenced("ILLEGAL_GENERATION"))
    membership.join([("t", 1)])
    position = FetchPosition(
        topic="t", partition=1, fetched=9, next_offset=9, end=None, high_watermark=9
    )
    group = GroupFetcher(
        cast("Connection", coordinator),
        cast("Fetcher", SimpleNamespace(positions={("t", 1): position})),
        membership,
        start="earliest",
        first_counts={},
        on_assign=None,
        on_revoke=None,
        on_lost=None,
    )
    closing = threading.Thread(target=group.close, kwargs={"is_processed": True})
    closing.start()
    coordinator.until(lambda: coordinator.calls("groups.commit"))
    return closing


def test_closing_while_the_group_rebalances(coordinator: Coordinator, make: Make) -> None:
    """The last commit waits for the generation in which it is not refused."""
    may_go_on = threading.Event()
    closing = closing_while_it_joins(coordinator, make, may_go_on)
    may_go_on.set()
    closing.join(SECONDS)
    commits = coordinator.calls("groups.commit")
    assert [(each.generation, each.offsets[0].offset) for each in commits] == [(1, 9), (2, 9)]
    assert len(coordinator.calls("groups.leave")) == 1


def test_closing_waits_no_longer_than_it_may(
    coordinator: Coordinator, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """A rebalance that does not end delays the consumer's end for a bounded time."""
    caplog.set_level(logging.WARNING, "sparklog.client")
    may_go_on = threading.Event()

    def leave(_asked: object) -> flight_messages.Empty:
        may_go_on.set()
        return flight_messages.Empty()

    coordinator.say("groups.leave", leave)
    closing = closing_while_it_joins(coordinator, make, may_go_on)
    while closing.is_alive():
        coordinator.clock.advance(limits.GROUP_CLOSE_SECONDS)
        closing.join(0.01)
    assert len(coordinator.calls("groups.commit")) == 1
    assert "the last commit of 'g' failed" in caplog.text


# ------------------------------------------------------------------------------ commits


def test_commit_metadata(coordinator: Coordinator, make: Make) -> None:
    """The text of a committed offset goes with it, and comes back with it."""
    membership = joined(make())
    membership.commit({("t", 1): OffsetAndMetadata(9, "half"), ("t", 0): OffsetAndMetadata(2)})
    (commit,) = coordinator.calls("groups.commit")
    assert [(each.offset, each.metadata) for each in commit.offsets] == [(9, "half"), (2, "")]
    assert membership.committed == {("t", 0): 2, ("t", 1): 9}
    coordinator.always("groups.offsets", group_messages.GroupOffsets(offsets=commit.offsets))
    assert membership.fetch_committed()["t", 1] == OffsetAndMetadata(9, "half")


def test_commits_in_the_background(coordinator: Coordinator, make: Make) -> None:
    """Offsets are committed in the background with member id and generation, and remembered."""
    membership = joined(make(auto_commit_seconds=HEARTBEAT_SECONDS))
    assert membership.committed == {("t", 1): 5}
    coordinator.clock.advance(HEARTBEAT_SECONDS)
    coordinator.until(lambda: membership.calls)
    assert membership.next_step() is Step.COMMIT
    membership.commit_soon({("t", 1): 9})
    assert membership.wait_for_commit(None)
    assert membership.committed == {("t", 1): 9}
    (commit,) = coordinator.calls("groups.commit")
    assert (commit.member_id, commit.generation) == ("m", 1)
    assert [(each.topic, each.partition, each.offset) for each in commit.offsets] == [("t", 1, 9)]


@pytest.mark.parametrize("failure", [GONE, BUSY])
def test_commit_that_may_pass(coordinator: Coordinator, make: Make, failure: Exception) -> None:
    """A commit in the background is tried again if that may help."""
    membership = joined(make())
    coordinator.say("groups.commit", failure, failure)
    membership.commit_soon({("t", 1): 9})
    assert membership.wait_for_commit(None)
    assert membership.committed == {("t", 1): 9}
    assert len(coordinator.calls("groups.commit")) == 3


def test_commit_that_is_refused(
    coordinator: Coordinator, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """A refused commit is logged, and counts as not committed."""
    caplog.set_level(logging.WARNING, "sparklog.client")
    membership = joined(make())
    coordinator.say("groups.commit", errors.GroupRefused(group="g", error="X", hint=""))
    membership.commit_soon({("t", 1): 9})
    assert membership.wait_for_commit(None)
    assert membership.committed == {("t", 1): 5}
    assert "a commit of group 'g' failed" in caplog.text


def test_older_commit_never_comes_after_a_newer(coordinator: Coordinator, make: Make) -> None:
    """A commit of the consumer replaces an older one that is not on its way yet."""
    membership = joined(make())
    is_busy, may_go_on = threading.Event(), threading.Event()

    def slowly(_request: object) -> group_messages.GroupHeartbeatReply:
        is_busy.set()
        assert may_go_on.wait(SECONDS)
        return group_messages.GroupHeartbeatReply()

    coordinator.say("groups.heartbeat", slowly)
    coordinator.clock.advance(HEARTBEAT_SECONDS)
    assert is_busy.wait(SECONDS)
    membership.commit_soon({("t", 1): 8})
    membership.commit({("t", 1): 9})
    may_go_on.set()
    assert membership.wait_for_commit(None)
    coordinator.beat(1)
    assert [each.offsets[0].offset for each in coordinator.calls("groups.commit")] == [9]
    assert membership.committed == {("t", 1): 9}


def test_commit_waits_for_the_one_on_its_way(coordinator: Coordinator, make: Make) -> None:
    """A commit in the background that is on its way comes before the consumer's own."""
    membership = joined(make())
    is_on_its_way, may_go_on = threading.Event(), threading.Event()

    def slowly(_request: object) -> flight_messages.Empty:
        is_on_its_way.set()
        assert may_go_on.wait(SECONDS)
        return flight_messages.Empty()

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
    """A member that is closed leaves, once; a static member stays."""
    membership = joined(make(instance_id=instance_id))
    membership.close()
    membership.close()
    leaves = [each.member_id for each in coordinator.calls("groups.leave")]
    assert leaves == ([] if instance_id else ["m"])
    with pytest.raises(errors.BadRequest, match="closed"):
        membership.next_step()


def test_leaving_that_fails(coordinator: Coordinator, make: Make) -> None:
    """A member can be closed while its broker cannot be reached."""
    membership = joined(make())
    coordinator.say("groups.leave", GONE)
    membership.close()
    assert len(coordinator.calls("groups.leave")) == 1


def test_not_polled(coordinator: Coordinator, make: Make) -> None:
    """A consumer that is not polled leaves, but not while a poll waits."""
    membership = joined(make(max_poll_interval_seconds=10 * HEARTBEAT_SECONDS))
    membership.is_polled = True
    coordinator.clock.advance(11 * HEARTBEAT_SECONDS)
    coordinator.beat(3)
    assert coordinator.calls("groups.leave") == []
    membership.is_polled = False
    coordinator.clock.advance(HEARTBEAT_SECONDS)
    coordinator.until(lambda: membership.is_lost)
    assert len(coordinator.calls("groups.leave")) == 1
