"""Consumer groups of Kafka's clients, unmodified, with a broker of ours."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import deltalake
import kafka
import pytest
from aiokafka import AIOKafkaConsumer
from confluent_kafka import ConsumerGroupState, ConsumerGroupTopicPartitions
from confluent_kafka.admin import AdminClient

import sparklog
from sparklog.broker.agent import Agent
from sparklog.formats import consumer_offsets
from sparklog.settings import GroupSettings
from tests.support.kafkas import broker
from tests.support.waiting import wait_until

SECONDS = 30.0
PARTITIONS = 4
EACH = 25
COUNT = PARTITIONS * EACH
SESSION_MS = 20_000
"""On a busy machine, a member that misses its heartbeats for less is still one. Otherwise another
member would read its records again."""
SHORT_SESSION_MS = 1_500


GROUPS = GroupSettings(initial_rebalance_delay_ms=100, min_session_timeout_ms=500)


@pytest.fixture(name="agent")
def _agent(tmp_path: Path) -> Iterator[Agent]:
    with broker(tmp_path / "root", groups=GROUPS) as agent:
        fill(agent)
        yield agent


def fill(agent: Agent) -> None:
    """Adds 25 records to each of the four partitions of t, the value of each its place."""
    with sparklog.connect(agent.address) as log:
        info = log.create_topic("t", partitions=PARTITIONS, if_absent=True)
        with log.producer() as producer:
            for at in range(EACH):
                for each in info.partitions:
                    place = f"{each.partition}-{each.end + at}".encode()
                    producer.send("t", place, partition=each.partition)


def everything(times: int = 1) -> list[bytes]:
    """Returns the records of t after this many fillings."""
    return sorted(b"%d-%d" % (p, n) for p in range(PARTITIONS) for n in range(EACH * times))


# ------------------------------------------------------------------------------ one consumer


def read_confluent(address: str, count: int) -> list[bytes]:
    """Reads this many records as a member of g, and commits at the end."""
    consumer = confluent(address)
    found = take(consumer, count)
    consumer.commit(asynchronous=False)
    consumer.close()
    return found


def read_kafka_python(address: str, count: int) -> list[bytes]:
    """Reads as a member of g with kafka-python."""
    consumer = kafka.KafkaConsumer(
        "t",
        bootstrap_servers=address,
        group_id="g",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        max_poll_records=10,
    )
    found: list[bytes] = []
    deadline = time.monotonic() + SECONDS
    while len(found) < count and time.monotonic() < deadline:
        most = min(10, count - len(found))
        for batch in consumer.poll(200, max_records=most).values():
            found += [each.value for each in batch]
    consumer.commit()
    consumer.close()
    return found


def read_aiokafka(address: str, count: int) -> list[bytes]:
    """Reads as a member of g with aiokafka."""

    async def read() -> list[bytes]:
        found: list[bytes] = []
        consumer = AIOKafkaConsumer(
            "t",
            bootstrap_servers=address,
            group_id="g",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )
        async with consumer:
            deadline = time.monotonic() + SECONDS
            while len(found) < count and time.monotonic() < deadline:
                most = count - len(found)
                for batch in (await consumer.getmany(timeout_ms=200, max_records=most)).values():
                    found += [each.value for each in batch if each.value is not None]
            await consumer.commit()
        return found

    return asyncio.run(read())


def confluent(address: str, **options: Any) -> confluent_kafka.Consumer:
    """A member of g that has subscribed to t; underscores in the names stand for dots."""
    given = {
        "bootstrap.servers": address,
        "group.id": "g",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "session.timeout.ms": SESSION_MS,
        "heartbeat.interval.ms": 200,
        **{name.replace("_", "."): value for name, value in options.items()},
    }
    consumer = confluent_kafka.Consumer(given)
    consumer.subscribe(["t"])
    return consumer


def take(consumer: confluent_kafka.Consumer, count: int) -> list[bytes]:
    """The values of so many records."""
    found: list[bytes] = []
    deadline = time.monotonic() + SECONDS
    while len(found) < count and time.monotonic() < deadline:
        for each in consumer.consume(count - len(found), 0.2):
            assert each.error() is None, each.error()
            value = each.value()
            assert value is not None
            found.append(value)
    return found


Read = Callable[[str, int], list[bytes]]
READERS = [read_confluent, read_kafka_python, read_aiokafka]


@pytest.mark.parametrize("read", READERS)
def test_a_group_goes_on_where_it_was(tmp_path: Path, read: Read) -> None:
    """In a new process of the consumer, and after a restart of the broker, each record once."""
    root = tmp_path / "root"
    with broker(root, groups=GROUPS) as agent:
        fill(agent)
        found = read(agent.kafka_address, 37)
        found += read(agent.kafka_address, COUNT - 37)
        assert sorted(found) == everything()
    with broker(root, groups=GROUPS) as agent:
        fill(agent)
        found += read(agent.kafka_address, COUNT)
        assert sorted(found) == everything(2)
    rows = deltalake.DeltaTable(str(root / "topics" / consumer_offsets.TOPIC)).to_pyarrow_table()
    committed = consumer_offsets.committed(rows).to_pylist()
    assert [(each["group"], each["topic"], each["offset"]) for each in committed] == [
        ("g", "t", 2 * EACH)
    ] * PARTITIONS


def test_clients_of_all_kinds_go_on_for_each_other(address: str) -> None:
    """One after the other as members of the same group."""
    shares = [30, 30, 40]
    found = [read(address, share) for read, share in zip(READERS, shares, strict=True)]
    assert sorted(itertools.chain.from_iterable(found)) == everything()


def test_commits_come_by_themselves(address: str) -> None:
    """And with the end of a consumer at the latest."""
    consumer = kafka.KafkaConsumer(
        "t",
        bootstrap_servers=address,
        group_id="g",
        auto_offset_reset="earliest",
        consumer_timeout_ms=2_000,
    )
    assert sum(1 for _ in consumer) == COUNT
    consumer.close()
    other = confluent(address, enable_auto_commit=True)
    found: list[object] = []

    def is_assigned() -> bool:
        found.extend(other.consume(1, 0.2))
        return len(other.assignment()) == PARTITIONS

    wait_until(is_assigned, "it may read some")
    assert found + other.consume(1, 1.0) == []
    other.close()


# ------------------------------------------------------------------------------ several


def spread(*consumers: confluent_kafka.Consumer) -> list[int]:
    """Returns the number of partitions of each member, once all agree."""
    deadline = time.monotonic() + SECONDS
    shares: list[int] = []
    while time.monotonic() < deadline:
        for each in consumers:
            each.poll(0.1)
        shares = [len(each.assignment()) for each in consumers]
        if sum(shares) == PARTITIONS and min(shares) == PARTITIONS // len(consumers):
            break
    return sorted(shares)


@pytest.mark.parametrize("strategy", ["range", "roundrobin", "cooperative-sticky"])
def test_members_share_the_partitions(address: str, strategy: str) -> None:
    """As they come and go, eager and cooperative."""
    first = confluent(address, partition_assignment_strategy=strategy)
    assert spread(first) == [4]
    second = confluent(address, partition_assignment_strategy=strategy)
    assert spread(first, second) == [2, 2]
    third, fourth = (confluent(address, partition_assignment_strategy=strategy) for _ in range(2))
    assert spread(first, second, third, fourth) == [1, 1, 1, 1]
    for each in (first, third):
        each.close()
    assert spread(second, fourth) == [2, 2]
    for each in (second, fourth):
        each.close()


def test_a_member_that_is_silent_is_replaced(address: str) -> None:
    """A member that never polls again loses its partitions without leaving the group."""
    short = {"max_poll_interval_ms": SHORT_SESSION_MS, "session_timeout_ms": SHORT_SESSION_MS}
    lost = confluent(address, **short)
    read = take(lost, 60)
    lost.commit(asynchronous=False)
    other = confluent(address)
    began = time.monotonic()
    found = take(other, COUNT - 60)
    assert time.monotonic() - began < SECONDS
    assert sorted(read + found) == everything()
    # librdkafka 2.16 may wait forever if it hears of its loss in `close`.
    while lost.assignment():
        lost.poll(0.1)
    other.close()
    lost.close()


def test_a_static_member_comes_back_to_its_partitions(address: str) -> None:
    """Within its session no rebalance begins; its old process is fenced."""
    other = confluent(address, group_instance_id="two")
    first = confluent(address, group_instance_id="one")
    assert spread(first, other) == [2, 2]
    before = {(each.topic, each.partition) for each in first.assignment()}
    first.close()  # a static member does not leave
    again = confluent(address, group_instance_id="one")
    assert spread(again, other) == [2, 2]
    assert {(each.topic, each.partition) for each in again.assignment()} == before
    again.close()
    other.close()


def test_records_are_read_once_while_members_come_and_go(address: str) -> None:
    """With commits before each rebalance, no record is read twice."""
    found: Counter[bytes] = Counter()
    members: list[confluent_kafka.Consumer] = []

    def revoked(consumer: confluent_kafka.Consumer, _: object) -> None:
        try:
            consumer.commit(asynchronous=False)
        except confluent_kafka.KafkaException as error:
            # A member that has read nothing since it joined has nothing to commit.
            if error.args[0].code() != confluent_kafka.KafkaError._NO_OFFSET:
                raise

    def read(seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and found.total() < COUNT:
            for member in members:
                for each in member.consume(3, 0.02):
                    value = each.value()
                    assert each.error() is None
                    assert value is not None
                    found[value] += 1

    for _ in range(3):
        member = confluent(address)
        member.subscribe(["t"], on_revoke=revoked)
        members.append(member)
        read(0.4)
    read(SECONDS)
    assert sorted(found.elements()) == everything()
    for member in members:
        member.close()


# ------------------------------------------------------------------------------ administration


def places_of(future: Any) -> list[confluent_kafka.TopicPartition]:
    """Returns the partitions of an answer of librdkafka."""
    return list(future.result().topic_partitions)


def test_groups_can_be_looked_at_and_changed(address: str) -> None:
    """By librdkafka's admin client: list, describe, offsets, reset, delete."""
    admin = AdminClient({"bootstrap.servers": address})
    consumer = confluent(address, client_id="me")
    assert len(take(consumer, 10)) == 10
    consumer.commit(asynchronous=False)
    (listed,) = admin.list_consumer_groups().result().valid
    assert (listed.group_id, listed.state) == ("g", ConsumerGroupState.STABLE)
    described = admin.describe_consumer_groups(["g"])["g"].result()
    (member,) = described.members
    assert (member.client_id, member.host) == ("me", "/127.0.0.1")
    assert len(member.assignment.topic_partitions) == PARTITIONS
    assert described.partition_assignor == "range"

    place = confluent_kafka.TopicPartition("t", 2, 5)
    change = [ConsumerGroupTopicPartitions("g", [place])]
    with pytest.raises(confluent_kafka.KafkaException):
        admin.delete_consumer_groups(["g"])["g"].result()
    (refused,) = places_of(admin.alter_consumer_group_offsets(change)["g"])
    assert refused.error is not None
    consumer.close()
    (changed,) = places_of(admin.alter_consumer_group_offsets(change)["g"])
    assert changed.error is None
    wanted = [ConsumerGroupTopicPartitions("g", [confluent_kafka.TopicPartition("t", 2)])]
    (found,) = places_of(admin.list_consumer_group_offsets(wanted)["g"])
    assert found.offset == 5
    admin.delete_consumer_groups(["g"])["g"].result()
    assert admin.list_consumer_groups().result().valid == []
