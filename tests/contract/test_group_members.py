"""Consumers that share a group, against a whole broker: assignments and start offsets."""

from __future__ import annotations

import gc
import logging
import re
import subprocess
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import sparklog
from sparklog import errors
from sparklog.broker.agent import Agent
from sparklog.client.connection import Connection
from sparklog.client.consumer.assignors import decode_assignment
from sparklog.client.consumer.consumer import Consumer, Record
from sparklog.client.log import Log
from sparklog.client.offsets import OffsetAndMetadata
from sparklog.formats import group_messages
from sparklog.settings import (
    BrokerSettings,
    FlightSettings,
    GroupSettings,
    KafkaSettings,
    LivenessSettings,
    LogSettings,
    PublisherSettings,
)
from tests.support import preloaded
from tests.support.forks import said_in_child

SECONDS = 30.0
"""Far more than anything here takes."""
PARTITIONS = 4
NEVER = 3600.0


def agent_of(root: object) -> Agent:
    """A broker to which a quarter of a second is a long time."""
    return Agent(
        BrokerSettings(
            root=str(root),
            id=1,
            flight=FlightSettings(listen="127.0.0.1:0"),
            kafka=KafkaSettings(listen=""),
            publisher=PublisherSettings(interval_seconds=0.1),
            liveness=LivenessSettings(heartbeat_seconds=0.05, dead_after_seconds=5.0),
            groups=GroupSettings(initial_rebalance_delay_ms=0, min_session_timeout_ms=100),
            log=LogSettings(level="error"),
        )
    )


@pytest.fixture(name="agent")
def _agent() -> Iterator[Agent]:
    with agent_of(f"memory://{uuid.uuid4().hex}") as agent:
        yield agent


@pytest.fixture(name="log")
def _log(agent: Agent) -> Iterator[Log]:
    """With a topic `t` of four partitions, which are empty."""
    with sparklog.connect(agent.address) as log:
        log.create_topic("t", PARTITIONS)
        yield log


def member(log: Log, topics: Any = "t", **options: Any) -> Consumer:
    """A member of group g that hears of everything soon, and commits only before it gives up."""
    known: dict[str, Any] = {
        "group": "g",
        "heartbeat_seconds": 0.05,
        "auto_commit_seconds": NEVER,
        "max_poll_interval_seconds": SECONDS,
    }
    return log.consumer(topics, **(known | options))


def fill(log: Log, rows: int, *, topic: str = "t", partitions: int = PARTITIONS) -> None:
    """Adds so many records to each partition, the value of each its place."""
    ends = {each.partition: each.end for each in log.describe(topic).partitions}
    with log.producer() as producer:
        for number in range(rows):
            for partition in range(partitions):
                place = f"{topic}-{partition}-{ends[partition] + number}".encode()
                producer.send(topic, place, partition=partition)


def places(rows: int, *, topic: str = "t", partitions: int = PARTITIONS) -> list[bytes]:
    """The values of so many records in each partition."""
    return sorted(f"{topic}-{p}-{n}".encode() for p in range(partitions) for n in range(rows))


class Crew:
    """Members that are polled in turn, and what they got."""

    def __init__(self, *members: Consumer) -> None:
        self.members = members
        self.records: list[Record] = []

    def until(self, holds: Callable[[], object]) -> None:
        """Polls until something holds."""
        deadline = time.monotonic() + SECONDS
        while not holds():
            assert time.monotonic() < deadline, f"{[each.assignment for each in self.members]}"
            for each in self.members:
                self.records += each.poll(0.01)

    def read(self, count: int) -> list[bytes]:
        """At least so many records in all; their values, sorted."""
        self.until(lambda: len(self.records) >= count)
        return self.values

    def share(self, partitions: int = PARTITIONS) -> None:
        """Until each of them has its part of the partitions."""

        def is_shared() -> bool:
            parts = [each.assignment for each in self.members]
            found = [place for part in parts for place in part]
            return all(parts) and len(found) == len(set(found)) == partitions

        self.until(is_shared)

    @property
    def values(self) -> list[bytes]:
        """Sorted."""
        return sorted(each.value for each in self.records)


def until(holds: Callable[[], object]) -> None:
    """Waits for what happens by itself."""
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# ------------------------------------------------------------------------------ sharing


@pytest.mark.parametrize("assignors", [("range",), ("roundrobin", "range")])
def test_two_members_share(log: Log, assignors: tuple[str, ...]) -> None:
    """Two members split the partitions, and each record is read by one of them, once."""
    fill(log, 10)
    with member(log, assignors=assignors) as first, member(log, assignors=assignors) as second:
        alone = Crew(first)
        assert alone.read(40) == places(10)
        assert len(first.assignment) == PARTITIONS
        both = Crew(first, second)
        both.share()
        assert {len(first.assignment), len(second.assignment)} == {2}
        fill(log, 10)
        assert sorted(alone.values + both.read(40)) == places(20)
        info = log.describe_group("g")
        assert (info.state, info.protocol, len(info.members)) == ("Stable", assignors[0], 2)
        assert sorted(decode_assignment(info.members[0].assignment)) in (
            first.assignment,
            second.assignment,
        )


def test_who_leaves_hands_on(log: Log) -> None:
    """Records that a member has read and committed by closing are not read again."""
    fill(log, 10)
    first, second = member(log), member(log)
    both = Crew(first, second)
    both.share()
    both.read(40)
    second.close()
    rest = Crew(first)
    rest.until(lambda: len(first.assignment) == PARTITIONS)
    fill(log, 1)
    rest.read(4)
    assert sorted(both.values + rest.values) == places(11)
    first.close()
    assert log.describe_group("g").members == []
    assert log.group_offsets("g") == {("t", number): 11 for number in range(PARTITIONS)}


def test_what_was_read_ahead_is_given_up(log: Log) -> None:
    """No record of a revoked partition is delivered, even if it was already fetched."""
    fill(log, 10)
    with member(log, max_poll_rows=1) as first, member(log) as second:
        alone = Crew(first)
        alone.read(1)
        both = Crew(first, second)
        both.share()
        both.until(lambda: len(alone.records) + len(both.records) >= 40)
        assert sorted(alone.values + both.values) == places(10)


def test_callbacks(log: Log) -> None:
    """Partitions are revoked by a callback before another member gets them, and can be committed
    there.
    """
    fill(log, 10)
    told: list[tuple[str, list[tuple[str, int]], int]] = []

    def revoked(partitions: list[tuple[str, int]]) -> None:
        first.commit({partitions[0]: 7})
        told.append(("revoked", partitions, len(second.assignment)))

    first = member(
        log,
        auto_commit=False,
        on_assign=lambda partitions: told.append(("assigned", partitions, 0)),
        on_revoke=revoked,
    )
    second = member(log, auto_commit=False)
    with first, second:
        alone = Crew(first)
        alone.read(1)
        everything = [("t", number) for number in range(PARTITIONS)]
        assert told == [("assigned", everything, 0)]
        both = Crew(first, second)
        both.share()
        assert told == [
            ("assigned", everything, 0),
            ("revoked", everything, 0),
            ("assigned", first.assignment, 0),
        ]
        assert log.group_offsets("g") == {("t", 0): 7}
        assert [each.offset for each in both.records if each.partition == 0][:1] in ([], [7])
        both.until(lambda: {each.partition for each in both.records} == set(range(PARTITIONS)))
        assert min(each.offset for each in both.records if each.partition == 0) == 7


def test_cooperative_members(log: Log) -> None:
    """Cooperative members keep the partitions that do not move, with their positions."""
    fill(log, 10)
    seen: list[tuple[str, int]] = []
    options: dict[str, Any] = {
        "auto_commit": False,
        "assignors": ["cooperative-sticky"],
        "on_assign": lambda partitions: seen.append(("assigned", len(partitions))),
        "on_revoke": lambda partitions: seen.append(("revoked", len(partitions))),
    }
    with member(log, **options) as first:
        alone = Crew(first)
        assert alone.read(40) == places(10)
        kept_from = dict.fromkeys(first.assignment, 10)
        with member(log, assignors=["cooperative-sticky"]) as second:
            both = Crew(first, second)
            both.share()
            both.until(lambda: len(seen) >= 4)
            assert log.describe_group("g").protocol == "cooperative-sticky"
            assert seen[:4] == [("assigned", 4), ("revoked", 2), ("assigned", 0), ("assigned", 0)]
            assert {first.position(*each) for each in first.assignment} == {10}
            moved = sorted(set(kept_from) - set(first.assignment))
            assert second.assignment == moved
            fill(log, 1)
            # Nothing was committed, so only those that moved are read from the beginning.
            both.until(lambda: len(both.records) >= 24)
            read_by_first = [
                each for each in both.records if (each.topic, each.partition) not in moved
            ]
            assert [each.offset for each in read_by_first] == [10, 10]
        rest = Crew(first)
        rest.until(lambda: len(first.assignment) == PARTITIONS)
        assert ("revoked", 4) not in seen
        assert first.statistics().rebalances >= 4


def test_change_to_cooperation(log: Log) -> None:
    """A group changes from eager to cooperative members one by one, and reads each record once."""
    both_kinds, cooperative = ["cooperative-sticky", "range"], ["cooperative-sticky"]
    fill(log, 10)
    with member(log, assignors=["range"]) as eager, member(log, assignors=both_kinds) as first:
        crew = Crew(eager, first)
        crew.share()
        assert log.describe_group("g").protocol == "range"
        eager.close()
        with member(log, assignors=cooperative) as second:
            later = Crew(first, second)
            later.share()
            assert log.describe_group("g").protocol == "cooperative-sticky"
            later.until(lambda: len(crew.records) + len(later.records) >= 40)
            assert sorted(crew.values + later.values) == places(10)


def test_on_lost(log: Log) -> None:
    """A member that its group has removed hears of lost partitions, not of revoked ones."""
    fill(log, 1)
    seen: list[str] = []
    with member(
        log,
        heartbeat_seconds=5.0,
        on_lost=lambda partitions: seen.append(f"lost {len(partitions)}"),
        on_revoke=lambda partitions: seen.append(f"revoked {len(partitions)}"),
    ) as consumer:
        crew = Crew(consumer)
        crew.read(4)
        (found,) = log.describe_group("g").members
        leave = group_messages.LeaveGroup(group="g", member_id=found.member_id)
        log.connection.action("groups.leave", leave)
        with pytest.raises(errors.MemberFenced):
            consumer.commit()
        crew.read(8)
        assert seen == ["lost 4"]
    assert seen == ["lost 4", "revoked 4"]


def test_commit_metadata(log: Log) -> None:
    """A text is committed alongside an offset, and read back; one that is too long is refused."""
    fill(log, 5)
    with member(log, auto_commit=False) as consumer:
        Crew(consumer).read(1)
        consumer.commit(
            {("t", 0): OffsetAndMetadata(3, "Zürich"), ("t", 1): (2, "pair"), ("t", 2): 1}
        )
        assert consumer.committed() == {("t", 0): 3, ("t", 1): 2, ("t", 2): 1}
        assert consumer.committed_metadata() == {
            ("t", 0): OffsetAndMetadata(3, "Zürich"),
            ("t", 1): OffsetAndMetadata(2, "pair"),
            ("t", 2): OffsetAndMetadata(1),
        }
        with pytest.raises(errors.GroupRefused, match="OFFSET_METADATA_TOO_LARGE"):
            consumer.commit({("t", 0): (4, "x" * 5_000)})
        with pytest.raises(errors.BadOption, match="offset of t-0"):
            consumer.commit({("t", 0): (4, b"x")})  # type: ignore[dict-item]


def test_callback_that_fails(log: Log) -> None:
    """An error of a callback is raised by the poll, and the group continues."""

    def fail(_partitions: object) -> None:
        raise ZeroDivisionError

    with member(log, on_revoke=fail) as first, member(log) as second:
        Crew(first).until(lambda: first.assignment)
        with pytest.raises(ZeroDivisionError):
            Crew(first, second).share()
        first._group._on_revoke = None  # type: ignore[union-attr]
        Crew(first, second).share()


def test_on_assign_may_seek(log: Log) -> None:
    """An assigned partition can be sought in at once."""
    fill(log, 10)

    def to_five(partitions: list[tuple[str, int]]) -> None:
        for topic, partition in partitions:
            consumer.seek(topic, partition, 5)

    with member(log, on_assign=to_five) as consumer:
        crew = Crew(consumer)
        crew.read(20)
        assert {each.offset for each in crew.records} == set(range(5, 10))


def test_slow_member_stays(log: Log) -> None:
    """A member is heard of while its user takes more time than the session lasts."""
    session_seconds = 1.5  # longer than a busy machine stops any process
    with member(log, session_timeout_seconds=session_seconds) as first:
        Crew(first).until(lambda: first.assignment)
        generation = log.describe_group("g").generation
        deadline = time.monotonic() + 1.3 * session_seconds
        until(lambda: time.monotonic() > deadline)
        info = log.describe_group("g")
        assert (info.generation, len(info.members)) == (generation, 1)


def test_member_that_is_not_polled(log: Log) -> None:
    """A member that does not poll in time loses its partitions, and joins again when it polls."""
    fill(log, 10)
    lost: list[int] = []
    patient = member(
        log, max_poll_interval_seconds=0.4, on_revoke=lambda given: lost.append(len(given))
    )
    with patient, member(log) as other:
        both = Crew(patient, other)
        both.share()
        both.read(40)
        rest = Crew(other)
        rest.until(lambda: len(other.assignment) == PARTITIONS)
        with pytest.raises(errors.MemberFenced):
            patient.commit()
        both.share()
        assert 2 in lost


def test_a_batch_is_committed_by_the_next_poll(log: Log) -> None:
    """Records that were handed out are not committed before the next are asked for."""
    fill(log, 10, partitions=1)
    with member(log, auto_commit_seconds=0.02, max_poll_rows=3) as consumer:
        crew = Crew(consumer)
        crew.read(3)
        group = consumer._group
        assert group is not None
        until(lambda: group.membership.calls)  # a commit is due
        assert log.group_offsets("g").get(("t", 0), 0) == 0
        crew.read(6)
        until(lambda: log.group_offsets("g").get(("t", 0)) == 3)
        assert consumer.committed()["t", 0] == 3
    assert log.group_offsets("g")["t", 0] == 6


@pytest.mark.parametrize("way", ["poll", "iterate", "batches"])
def test_what_was_not_dealt_with(log: Log, way: str) -> None:
    """After an error during processing, the last delivered records are delivered again."""
    fill(log, 5, partitions=1)

    def work() -> None:
        with member(log, max_poll_rows=2) as consumer:
            match way:
                case "poll":
                    crew = Crew(consumer)
                    crew.read(4)
                case "iterate":
                    for _ in range(3):
                        next(consumer)
                case _:
                    next(consumer)
                    next(consumer)
                    next(iter(consumer.batches()))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert log.group_offsets("g")["t", 0] == 2
    with member(log) as consumer:
        assert [next(consumer).offset for _ in range(3)] == [2, 3, 4]
    assert log.group_offsets("g")["t", 0] == 5


def test_explicit_commits(log: Log) -> None:
    """`commit` is durable when it returns, for delivered records and for named offsets."""
    fill(log, 10, partitions=1)
    with member(log, auto_commit=False, max_poll_rows=4) as consumer:
        with pytest.raises(errors.BadRequest, match="poll first"):
            consumer.commit({("t", 0): 1})
        Crew(consumer).read(4)
        consumer.commit()
        assert log.group_offsets("g")["t", 0] == 4
        consumer.commit({("t", 0): 2})
        assert consumer.committed()["t", 0] == 2
        with pytest.raises(errors.GroupRefused, match="there is no nope-0"):
            consumer.commit({("nope", 0): 2})
    with member(log) as consumer:
        assert next(consumer).offset == 2


def test_member_that_was_pushed_out(log: Log) -> None:
    """The commit of a member that was left behind fails, and the member joins again."""
    fill(log, 10)
    with member(log, auto_commit=False, heartbeat_seconds=5.0) as consumer:
        crew = Crew(consumer)
        crew.read(40)
        (before,) = log.describe_group("g").members
        leave = group_messages.LeaveGroup(group="g", member_id=before.member_id)
        log.connection.action("groups.leave", leave)
        with pytest.raises(errors.MemberFenced):
            consumer.commit()
        crew.read(80)  # nothing was committed
        (after,) = log.describe_group("g").members
        assert after.member_id != before.member_id


# ------------------------------------------------------------------------------ crashes

_PROGRAM = """
import sys, sparklog
log = sparklog.connect(sys.argv[1])
consumer = log.consumer("t", group="g", max_poll_rows=5, session_timeout_seconds=1.0,
                        heartbeat_seconds=0.1, auto_commit=False)
seen = 0
while seen < 20:
    seen += len(consumer.poll(1.0))
consumer.commit()
seen += len(consumer.poll(10.0))
print(seen, flush=True)
sys.stdin.read()
"""


def test_killed_member(agent: Agent, log: Log) -> None:
    """When a member dies, another takes over from the committed offsets after the session
    timeout.
    """
    fill(log, 10)
    process = preloaded.start(
        ["-c", _PROGRAM, agent.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert int(process.stdout.readline()) > 20
    process.kill()
    process.communicate()
    committed = log.group_offsets("g")
    assert sum(committed.values()) == 20
    with member(log, session_timeout_seconds=1.0) as heir:
        crew = Crew(heir)
        assert crew.read(20) == sorted(
            f"t-{partition}-{number}".encode()
            for partition in range(PARTITIONS)
            for number in range(committed["t", partition], 10)
        )
        assert len(log.describe_group("g").members) == 1


def test_broker_that_starts_again(tmp_path: Path) -> None:
    """Members stay in their generation over a restart of the broker; nothing is read twice."""
    assigned: list[object] = []
    with ExitStack() as stack:
        agent = stack.enter_context(agent_of(tmp_path))
        addresses = [agent.address]
        log = stack.enter_context(Log(Connection(lambda: addresses[-1])))
        log.create_topic("t", PARTITIONS)
        fill(log, 10)
        first = stack.enter_context(member(log, on_assign=assigned.append))
        second = stack.enter_context(member(log, on_assign=assigned.append))
        both = Crew(first, second)
        both.share()
        both.read(40)
        before = (log.describe_group("g").generation, len(assigned))
        agent.stop()
        addresses.append(stack.enter_context(agent_of(tmp_path)).address)
        fill(log, 10)
        assert both.read(80) == places(20)
        first.commit()
        second.commit()
        assert log.group_offsets("g") == {("t", number): 20 for number in range(PARTITIONS)}
        assert (log.describe_group("g").generation, len(assigned)) == before


# ------------------------------------------------------------------------------ static members


def test_static_member_that_comes_back(log: Log) -> None:
    """A static member that closes and returns gets its partitions back without a rebalance."""
    fill(log, 10)
    lost: list[object] = []
    with member(log, instance_id="b", on_revoke=lost.append) as other:
        first = member(log, instance_id="a")
        both = Crew(first, other)
        both.share()
        both.read(40)
        lost.clear()
        had = first.assignment
        first.close()
        assert len(log.describe_group("g").members) == 2
        fill(log, 10)
        with member(log, instance_id="a") as again:
            crew = Crew(again, other)
            crew.share()
            assert again.assignment == had
            assert sorted(both.values + crew.read(40)) == places(20)
        assert lost == []


def test_static_member_twice(log: Log) -> None:
    """A second process of a static member replaces the first, which fails for good."""
    with member(log, instance_id="a") as first, member(log, instance_id="a") as second:
        Crew(first).until(lambda: first.assignment)
        Crew(second).until(lambda: second.assignment)
        with pytest.raises(errors.MemberFenced, match="FENCED_INSTANCE_ID"):
            Crew(first).until(lambda: False)
        with pytest.raises(errors.MemberFenced, match="FENCED_INSTANCE_ID"):
            first.poll(1.0)
        assert len(Crew(second).members[0].assignment) == PARTITIONS


# ------------------------------------------------------------------------------ where to begin


def test_latest(log: Log) -> None:
    """Without a commit the group starts at the end, and that position counts from then on."""
    fill(log, 10)
    with member(log, start="latest") as consumer:
        Crew(consumer).until(lambda: consumer.assignment)
    assert log.group_offsets("g") == {("t", number): 10 for number in range(PARTITIONS)}
    fill(log, 1)
    with member(log, start="latest") as consumer:
        crew = Crew(consumer)
        crew.read(4)
        assert {each.offset for each in crew.records} == {10}


def test_points_by_partition(log: Log) -> None:
    """A committed offset takes precedence over any start."""
    fill(log, 10)
    log.commit_group_offsets("g", {("t", 0): 3})
    begun: list[int] = []

    def note(partitions: list[tuple[str, int]]) -> None:
        begun.extend(consumer.position(*place) for place in partitions)

    with member(log, start={"t": {0: 9, 1: 8, 2: "latest"}}, on_assign=note) as consumer:
        Crew(consumer).until(lambda: begun)
    assert begun == [3, 8, 10, 0]


def test_no_start(log: Log) -> None:
    """With `start="none"`, a partition without a commit raises an error that names it."""
    log.commit_group_offsets("g", {("t", number): 0 for number in (0, 1, 3)})
    with (
        member(log, start="error") as consumer,
        pytest.raises(errors.BadOption, match="'g' has committed no offset for t-2"),
    ):
        Crew(consumer).until(lambda: consumer.assignment)


@pytest.mark.parametrize(("start", "expected"), [("earliest", 6), ("latest", 10)])
def test_committed_offset_that_is_gone(
    log: Log, start: str, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    """If retention has passed the committed offset, reading starts at the log start, with a
    warning.
    """
    caplog.set_level(logging.WARNING, "sparklog.client")
    fill(log, 10, partitions=1)
    log.commit_group_offsets("g", {("t", 0): 2})
    log.delete_records("t", {0: 6})
    begun: list[int] = []

    def note(_partitions: object) -> None:
        begun.append(consumer.position("t", 0))

    with member(log, start=start, on_assign=note) as consumer:
        Crew(consumer).until(lambda: begun)
    assert begun == [expected]
    assert "Offset 2 of t-0 is outside the range 6 to 10" in caplog.text
    log.commit_group_offsets("g", {("t", 0): 2})
    with (
        member(log, start="error") as consumer,
        pytest.raises(errors.OffsetOutOfRange),
    ):
        Crew(consumer).until(lambda: consumer.assignment)


def test_position_that_is_gone(log: Log) -> None:
    """A consumer that retention overtakes while it reads continues at the log start."""
    fill(log, 10, partitions=1)
    with member(log) as consumer:
        crew = Crew(consumer)
        crew.until(lambda: consumer.assignment)
        log.delete_records("t", {0: 6})
        consumer.seek("t", 0, 2)
        crew.records.clear()
        crew.read(4)
        assert [each.offset for each in crew.records][:4] == [6, 7, 8, 9]


def test_until_the_end(log: Log) -> None:
    """A consumer that does not follow reads all existing records, commits, and ends."""
    fill(log, 10)
    for expected in (places(10), []):
        with member(log, follow=False) as consumer:
            assert sorted(each.value for each in consumer) == expected
    assert log.group_offsets("g") == {("t", number): 10 for number in range(PARTITIONS)}


# ------------------------------------------------------------------------------ subscriptions


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_new_partitions(log: Log, start: str) -> None:
    """Partitions that are added are shared too, and nothing in them is left out."""
    options = {"metadata_age_seconds": 0.1, "start": start}
    with member(log, **options) as first, member(log, **options) as second:
        crew = Crew(first, second)
        crew.share()
        log.add_partitions("t", 6)
        fill(log, 5, partitions=6)
        crew.share(6)
        assert crew.read(30) == places(5, partitions=6)


def test_pattern(log: Log) -> None:
    """A pattern means all topics that it matches as a whole, also those that come later."""
    log.create_topic("t-a", 1)
    log.create_topic("other-t", 1)
    options = {"metadata_age_seconds": 0.1, "start": "latest"}
    with member(log, re.compile(r"t.*|__.*"), **options) as consumer:
        crew = Crew(consumer)
        crew.until(lambda: {topic for topic, _ in consumer.assignment} == {"t", "t-a"})
        log.create_topic("t-b", 2)
        fill(log, 5, topic="t-b", partitions=2)
        assert crew.read(10) == places(5, topic="t-b", partitions=2)


def test_members_that_want_other_topics(log: Log) -> None:
    """Each member gets partitions of topics that it wants, and no others."""
    log.create_topic("u", 2)
    with member(log, ["t", "u"]) as first, member(log, "u") as second:
        crew = Crew(first, second)
        crew.share(6)
        assert {topic for topic, _ in second.assignment} == {"u"}
        assert len(first.assignment) == PARTITIONS + 1


# ------------------------------------------------------------------------------ refusals, ends


def test_refused(log: Log) -> None:
    """A refusal of the coordinator is raised by each poll, with advice."""
    with member(log, session_timeout_seconds=0.09, heartbeat_seconds=0.01) as consumer:
        for _ in range(2):
            with pytest.raises(errors.GroupRefused, match=r"groups\.min_session_timeout_ms"):
                consumer.poll(SECONDS)


def test_options(log: Log) -> None:
    """Options that make no sense are refused by name."""
    for options, option in (
        ({"group": None, "instance_id": "a"}, "instance_id"),
        ({"group": None, "on_assign": print}, "on_assign"),
        ({"group": ""}, "group"),
        ({"assignors": ("sticky",)}, "assignors"),
        ({"assignors": ()}, "assignors"),
        ({"heartbeat_seconds": 60.0}, "heartbeat_seconds"),
        ({"auto_commit_seconds": 0.0}, "auto_commit_seconds"),
        ({"start": "nowhere"}, "start"),
    ):
        with pytest.raises(errors.BadOption) as refusal:
            member(log, **options)
        assert refusal.value.option == option
    with pytest.raises(errors.BadOption, match="name the group"):
        log.consumer(re.compile("t"))
    with pytest.raises(errors.UnknownTopic):
        member(log, "nope")
    with log.consumer("t") as alone, pytest.raises(errors.BadRequest, match="name the group"):
        alone.commit()


def test_closed(log: Log) -> None:
    """A closed member has left, has no thread, and says that it is closed."""
    consumer = member(log)
    Crew(consumer).until(lambda: consumer.assignment)
    group = consumer._group
    assert group is not None
    thread = group.membership._thread
    consumer.close()
    consumer.close()
    assert thread is not None
    assert not thread.is_alive()
    assert log.describe_group("g").members == []
    with pytest.raises(errors.BadRequest, match="closed"):
        consumer.poll(0)


def test_closed_while_it_joins(log: Log) -> None:
    """A member that closes while it waits for a rebalance wakes, and the others do not wait for
    it.
    """
    with member(log, heartbeat_seconds=0.5) as busy:
        Crew(busy).until(lambda: busy.assignment)
        waiting = member(log)
        assert waiting.poll(0.05) == []  # busy does not poll, so the rebalance does not end
        raised: list[BaseException] = []

        def wait() -> None:
            try:
                waiting.poll()
            except errors.BadRequest as error:
                raised.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        began = time.monotonic()
        waiting.close()
        thread.join(SECONDS)
        assert len(raised) == 1
        assert time.monotonic() - began < 5.0
        until(lambda: len(log.describe_group("g").members) == 1)
        Crew(busy).until(lambda: len(busy.assignment) == PARTITIONS)


def test_closed_before_it_has_an_id(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that closes before the coordinator has named it does not join after that: it would
    wait for the others, and they for it.
    """
    with member(log, heartbeat_seconds=0.5) as busy:
        Crew(busy).until(lambda: busy.assignment)
        asked, closing = threading.Event(), threading.Event()
        attempt = Connection.attempt

        def late(self: Connection, name: str, *arguments: Any, **options: Any) -> Any:
            answer = attempt(self, name, *arguments, **options)
            if name == "groups.join":
                asked.set()
                assert closing.wait(SECONDS)
            return answer

        waiting = member(log)
        with monkeypatch.context() as patched:
            patched.setattr(Connection, "attempt", late)
            assert waiting.poll(0.05) == []
            assert asked.wait(SECONDS)
            assert waiting._group is not None
            membership = waiting._group.membership
            thread = membership._thread
            assert thread is not None
            closes = threading.Thread(target=waiting.close)
            closes.start()
            until(lambda: membership._is_ending)
            closing.set()
            closes.join(SECONDS)
        assert not thread.is_alive()
        until(lambda: len(log.describe_group("g").members) == 1)
        assert log.describe_group("g").state == "Stable"


def test_dropped(log: Log) -> None:
    """A member that is dropped leaves, in its own time."""
    fill(log, 1)
    consumer = member(log)
    gone = weakref.ref(consumer)
    assert next(consumer).offset == 0
    assert len(log.describe_group("g").members) == 1
    del consumer
    gc.collect()
    assert gone() is None
    until(lambda: not log.describe_group("g").members)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked(log: Log) -> None:
    """In a forked child a member is refused, and its end there is no end of the parent's."""
    fill(log, 1)
    with member(log) as consumer:
        crew = Crew(consumer)
        crew.read(4)

        def use() -> None:
            try:
                consumer.poll(SECONDS)
            finally:
                consumer.close()

        assert "belongs to the parent" in said_in_child(use)
        # The same at a moment when there is something to do, for which the child has no thread.
        group = consumer._group
        assert group is not None
        group.membership._must_rejoin = group.membership.calls = True
        assert "belongs to the parent" in said_in_child(use)
        fill(log, 1)
        assert crew.read(8) == places(2)
        assert len(log.describe_group("g").members) == 1


# ------------------------------------------------------------------------------ administration


def test_administration(log: Log) -> None:
    """Groups are listed, set and deleted by name; those with members are left alone."""
    fill(log, 10)
    log.commit_group_offsets("made", {("t", 0): 4, ("t", 1): 5})
    with member(log) as consumer:
        Crew(consumer).read(40)
        assert [(each.group, each.state) for each in log.groups()] == [
            ("g", "Stable"),
            ("made", "Empty"),
        ]
        (each,) = log.describe_group("g").members
        assert each.client_id == "sparklog"
        assert each.client_host == "/127.0.0.1"
        with pytest.raises(errors.GroupRefused, match="NON_EMPTY_GROUP: it has members"):
            log.commit_group_offsets("g", {("t", 0): 1})
        with pytest.raises(errors.GroupRefused, match="NON_EMPTY_GROUP"):
            log.delete_group("g")
        with pytest.raises(errors.GroupRefused, match="SUBSCRIBED"):
            log.forget_group_offsets("g", [("t", 0)])
    with pytest.raises(errors.BadOption, match="offset of t-1 = -1: expected an int of at least 0"):
        log.commit_group_offsets("made", {("t", 0): 1, ("t", 1): -1})
    log.forget_group_offsets("made", [("t", 0)])
    assert log.group_offsets("made") == {("t", 1): 5}
    log.delete_group("made")
    assert [each.group for each in log.groups()] == ["g"]
    assert log.group_offsets("made") == {}
    with pytest.raises(errors.GroupRefused, match="GROUP_ID_NOT_FOUND"):
        log.describe_group("made")


def test_positions_of_a_deleted_topic_are_not_committed(log: Log) -> None:
    """They would hide the first records of the topic that has its name now."""
    fill(log, 5)
    with member(log, start="earliest") as consumer:
        found = 0
        while found < 5 * PARTITIONS:
            found += len(consumer.poll(timeout=SECONDS))
        log.delete_topic("t")
        log.create_topic("t", PARTITIONS)
        fill(log, 9)
        with pytest.raises(errors.GroupRefused):
            consumer.commit()
    assert log.group_offsets("g") == {}
