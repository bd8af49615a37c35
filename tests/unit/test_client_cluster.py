"""Clients of a cluster whose brokers die, move and come back elsewhere."""

from __future__ import annotations

import queue
import time
from typing import Any

import pyarrow as pa
import pytest

from sparklog import errors, limits
from sparklog.client.connection import Connection
from sparklog.client.consumer.consumer import Consumer
from sparklog.client.consumer.reading import read_range
from sparklog.client.log import Log
from sparklog.client.offsets import describe, everywhere
from sparklog.clock import ManualClock
from sparklog.formats import flight_messages
from tests.support.fakecluster import FakeCluster
from tests.support.waiting import wait_until

ONE, TWO, THREE = "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"
FAILOVER_SECONDS = 1.5


@pytest.fixture(name="cluster")
def _cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """Three brokers, of which the first two lead a partition of t each."""
    cluster = FakeCluster(monkeypatch, {ONE: 1, TWO: 2, THREE: 3})
    cluster.leaders = [1, 2]
    return cluster


def leaders(info: flight_messages.TopicInfo) -> list[int]:
    """The leader of each partition."""
    return [each.leader for each in info.partitions]


def test_known_brokers_replace_those_that_were_given(cluster: FakeCluster) -> None:
    """The only address that was given may be that of a dead broker, while others are known."""
    with cluster.connect(ONE) as connection:
        describe(connection, "t")
        cluster.dead.add(1)
        cluster.leaders[0] = 3
        assert leaders(describe(connection, "t")) == [3, 2]


def test_brokers_that_join_later_are_learned(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of the only broker hears of others before it needs them."""
    cluster.at, cluster.leaders = {ONE: 1}, [1, 1]
    clock = ManualClock()
    with Connection.to(ONE, clock=clock) as connection:
        connection.learn_leaders(describe(connection, "t"))
        cluster.at = {ONE: 1, TWO: 2}
        connection.learn_leaders(describe(connection, "t"))
        assert cluster.asked.count((1, "cluster")) == 1
        clock.advance(limits.METADATA_AGE_SECONDS)
        connection.learn_leaders(describe(connection, "t"))
        cluster.dead.add(1)
        cluster.leaders = [2, 2]
        assert leaders(describe(connection, "t")) == [2, 2]


def test_another_program_at_the_only_address_that_was_given(cluster: FakeCluster) -> None:
    """Other brokers are known, and one of them serves."""
    with cluster.connect(ONE) as connection:
        describe(connection, "t")
        cluster.dead.add(1)
        cluster.others.add(ONE)
        cluster.leaders = [3, 2]
        connection.broke(connection.channel())
        assert leaders(describe(connection, "t")) == [3, 2]


def test_brokers_that_have_exchanged_their_addresses(cluster: FakeCluster) -> None:
    """A broker that leads nothing of what its id should is not asked forever."""
    with cluster.connect(THREE) as connection:
        describe(connection, "t")
        cluster.at = {ONE: 2, TWO: 1, THREE: 3}
        assert leaders(describe(connection, "t")) == [1, 2]


def test_another_program_at_the_port_of_a_dead_broker(cluster: FakeCluster) -> None:
    """That is not an error of the address that the user gave: the broker has moved, or is down."""
    with cluster.connect(ONE) as connection:
        describe(connection, "t")
        cluster.others.add(TWO)
        connection.broke(connection.channel(2))
        with pytest.raises(errors.BrokerUnavailable, match="another program"):
            connection._check_answers(TWO, is_learned=True)
        cluster.others.add(ONE)
        connection.broke(connection.channel(1))
    with cluster.connect(ONE) as connection, pytest.raises(errors.WrongPort):
        connection.channel()


def test_offsets_of_a_partition_whose_leader_dies(cluster: FakeCluster) -> None:
    """The next leader is asked once there is one, and not the dead one until time is over."""
    died_at: list[float] = []

    def answer(broker: int, name: str, request: Any) -> Any:
        assert name == "offsets.for_times"
        if died_at and time.monotonic() - died_at[0] > FAILOVER_SECONDS:
            cluster.leaders[1] = 3
        for number in request.timestamps_us:
            if broker != cluster.leaders[number]:
                if not died_at:
                    died_at.append(time.monotonic())
                    cluster.dead.add(2)
                raise errors.NotLeader(topic="t", partition=number, leader=2)
        return flight_messages.Offsets(offsets=dict.fromkeys(request.timestamps_us, 5))

    def describe_after_failover(asked: int) -> flight_messages.TopicInfo:
        if died_at and time.monotonic() - died_at[0] > FAILOVER_SECONDS:
            cluster.leaders[1] = 3
        return topic(asked)

    topic, cluster.topic = cluster.topic, describe_after_failover  # type: ignore[method-assign]
    cluster.answer = answer
    began = time.monotonic()
    with Log(cluster.connect(f"{ONE},{THREE}", timeout_seconds=20.0)) as log:
        assert log.offsets_for_times("t", "2020-01-01T00:00Z") == {0: 5, 1: 5}
    assert time.monotonic() - began < FAILOVER_SECONDS + 5.0


def test_a_leader_that_is_busy_is_asked_again(cluster: FakeCluster) -> None:
    """As the broker in use is; a refusal that stays reaches the caller."""
    busy = [1, 2]

    def answer(broker: int, _name: str, request: Any) -> Any:
        for number in request.timestamps_us:
            if broker != cluster.leaders[number]:
                raise errors.NotLeader(topic="t", partition=number, leader=cluster.leaders[number])
        if broker == 2 and busy:
            busy.pop()
            raise errors.StorageUnavailable(operation="get", path="wal", reason="busy")
        if broker == 1 and not busy:
            raise errors.BadRequest(reason="no")
        return flight_messages.Offsets(offsets=dict.fromkeys(request.timestamps_us, 5))

    cluster.answer = answer
    with Log(cluster.connect(ONE)) as log:
        with pytest.raises(errors.BadRequest):
            log.offsets_for_times("t", "2020-01-01T00:00Z")
        assert not busy


def test_a_timeout_of_a_leader_is_the_callers(cluster: FakeCluster) -> None:
    """The leader has waited for as long as it was asked to."""

    def answer(broker: int, _name: str, _request: Any) -> Any:
        if broker == 2:
            raise errors.TimedOut(what="a flush", timeout_seconds=1)
        return broker

    cluster.answer = answer
    with cluster.connect(ONE) as connection, pytest.raises(errors.TimedOut):
        everywhere(connection, "publish.now", flight_messages.Empty())
    assert cluster.asked.count((2, "publish.now")) == 1


def test_an_action_everywhere_asks_a_busy_broker_again(cluster: FakeCluster) -> None:
    """One that is starting knows its groups a moment later."""
    busy = [2]

    def answer(broker: int, _name: str, _request: Any) -> int:
        if broker in busy:
            busy.remove(broker)
            raise errors.GroupBusy(group="", error="COORDINATOR_LOAD_IN_PROGRESS")
        return broker

    cluster.answer = answer
    with cluster.connect(ONE) as connection:
        assert everywhere(connection, "groups.list", flight_messages.Empty()) == [1, 2, 3]


def test_an_action_everywhere_leaves_out_a_broker_that_dies(cluster: FakeCluster) -> None:
    """The others have answered, and are not asked again."""

    def answer(broker: int, _name: str, _request: Any) -> int:
        if broker == 2:
            cluster.dead.add(2)
            raise errors.BrokerUnavailable(address=TWO, reason="reset")
        return broker

    cluster.answer = answer
    with cluster.connect(f"{ONE},{THREE}") as connection:
        assert everywhere(connection, "groups.list", flight_messages.Empty()) == [1, 3]
    assert cluster.asked.count((1, "groups.list")) == 1


def test_a_range_of_a_topic_that_is_created_again(cluster: FakeCluster) -> None:
    """A reader that looks for the new leader does not continue in another topic."""

    class Reader:
        """Reads half of the range, and breaks."""

        def __init__(self) -> None:
            self._chunks = iter(range(2))

        def read_chunk(self) -> Any:
            if next(self._chunks):
                cluster.topic_id, cluster.leaders = "new", [1, 1]
                cluster.dead.add(2)
                raise errors.BrokerUnavailable(address=TWO, reason="reset")
            rows = pa.RecordBatch.from_pylist([{"offset": n} for n in range(50)])
            return Chunk(rows)

        def cancel(self) -> None:
            pass

    cluster.read = lambda _broker, _ticket: Reader()
    with cluster.connect(f"{ONE},{TWO}") as connection:
        info = describe(connection, "t")
        batches = read_range(connection, info, 1, start=0, end=100, columns=["offset"])
        assert next(batches).num_rows == 50
        with pytest.raises(errors.TopicChanged):
            next(batches)


class Chunk:
    """A chunk as Flight returns it."""

    def __init__(self, data: pa.RecordBatch) -> None:
        self.data = data


@pytest.mark.parametrize("after", [[1], [1, 1]], ids=["fewer partitions", "as many"])
def test_a_consumer_of_a_topic_that_is_created_again(
    cluster: FakeCluster, after: list[int]
) -> None:
    """It raises; a consumer that waits forever would look as if there were no records."""
    streams: list[Any] = []

    class Stream:
        """A stream without records, which may break."""

        def __init__(self) -> None:
            self.events: queue.Queue[Exception] = queue.Queue()

        def read_chunk(self) -> Any:
            raise self.events.get()

        def cancel(self) -> None:
            self.events.put(StopIteration())

        def close(self) -> None:
            pass

    def tail(_broker: int, request: Any) -> Any:
        for each in request.positions:
            if each.topic_id != cluster.topic_id:
                raise errors.TopicChanged(topic="t", expected=each.topic_id, found="new")
        streams.append(Stream())
        return streams[-1], streams[-1]

    cluster.tail = tail
    with Consumer(cluster.connect(f"{ONE},{TWO}"), "t", start="earliest") as consumer:
        wait_until(lambda: len(streams) == 2, "both leaders are followed")
        cluster.topic_id, cluster.leaders = "new", after
        for each in streams:
            each.events.put(errors.BrokerUnavailable(address=ONE, reason="reset"))
        with pytest.raises(errors.TopicChanged):
            consumer.poll(timeout=20.0)
