"""A program of Kafka Streams, unmodified, with a broker of ours: no transactions, the rest goes.

Streams comes from Maven's repositories by Spark's Ivy; where it cannot be got, the tests say so.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import confluent_kafka
import deltalake
import pytest
from confluent_kafka import admin as confluent_admin

import sparklog
from sparklog.broker.agent import Agent
from sparklog.settings import GroupSettings
from tests.support.jvms import Program, class_path, running
from tests.support.kafkas import broker
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.soak(mode="clients"), pytest.mark.timeout(300)]

GROUPS: Final = GroupSettings(initial_rebalance_delay_ms=200, min_session_timeout_ms=1_000)
WORD_COUNT: Final = str(Path(__file__).parent / "java" / "WordCount.java")
APPLICATION: Final = "app"
REPARTITION: Final = f"{APPLICATION}-words-repartition"
CHANGELOGS: Final = {
    "altogether": f"{APPLICATION}-altogether-changelog",
    "each-minute": f"{APPLICATION}-each-minute-changelog",
}
PARTITIONS: Final = (0, 1)
MINUTE_MS: Final = 60_000
REFUSED: Final = {
    "processing.guarantee=exactly_once_v2": "this broker has no transactions",
    "group.protocol=streams": "The cluster does not support the STREAMS group protocol",
}
"""By setting: the reason that the program hears."""

Line = tuple[int, str]
"""Its time and its words."""


@pytest.fixture(name="agent")
def _agent(tmp_path: Path) -> Iterator[Agent]:
    """With the topics that a program reads and writes; those in between it creates itself."""
    with broker(tmp_path / "root", groups=GROUPS) as agent:
        with sparklog.connect(agent.address) as log:
            for topic in ("lines", "counts", "minutes"):
                log.create_topic(topic, partitions=len(PARTITIONS))
        yield agent


@contextmanager
def counting(agent: Agent, state: Path, *settings: str) -> Iterator[Program]:
    """The program at work."""
    path = class_path("kafka-streams")
    arguments = (agent.kafka_address, APPLICATION, str(state), *settings)
    with running(path, WORD_COUNT, *arguments) as program:
        yield program


def written(count: int) -> list[Line]:
    """Lines of three minutes that are just over."""
    start = (int(time.time() * 1_000) // MINUTE_MS - 10) * MINUTE_MS
    return [
        (start + number % 3 * MINUTE_MS + number % 1_000, f"a b{number % 7} c{number % 11} a")
        for number in range(count)
    ]


def send(address: str, lines: Sequence[Line]) -> None:
    """Writes the lines, in turns to the two partitions."""
    failed: list[Any] = []
    producer = confluent_kafka.Producer({"bootstrap.servers": address})
    for number, (at_ms, text) in enumerate(lines):
        producer.produce(
            "lines",
            text.encode(),
            partition=number % 2,
            timestamp=at_ms,
            on_delivery=lambda error, _: failed.append(error) if error else None,
        )
    assert producer.flush(30.0) == 0
    assert not failed


def expected(lines: Sequence[Line]) -> dict[str, dict[str, int]]:
    """Returns the expected counts of these lines, by topic and key."""
    words = [(word, at_ms) for at_ms, text in lines for word in text.split(" ")]
    each_minute = [f"{word}@{at_ms - at_ms % MINUTE_MS}" for word, at_ms in words]
    return {"counts": Counter(word for word, _ in words), "minutes": Counter(each_minute)}


class Following:
    """Reads the two topics of results by librdkafka, and keeps the last value of each key."""

    def __init__(self, address: str) -> None:
        self.found: dict[str, dict[str, int]] = {"counts": {}, "minutes": {}}
        self._consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": address, "group.id": "none", "enable.auto.commit": False}
        )
        self._consumer.assign(
            [
                confluent_kafka.TopicPartition(topic, number, 0)
                for topic in self.found
                for number in PARTITIONS
            ]
        )

    def has_found(self, counted: dict[str, dict[str, int]]) -> bool:
        for message in self._consumer.consume(1_000, 0.1):
            assert message.error() is None, message.error()
            topic, key, value = message.topic(), message.key(), message.value()
            assert topic is not None
            assert key is not None
            assert value is not None
            self.found[topic][key.decode()] = int(value)
        return self.found == counted

    def close(self) -> None:
        self._consumer.close()


@contextmanager
def following(address: str) -> Iterator[Following]:
    """The two topics of results, read from their beginning."""
    results = Following(address)
    try:
        yield results
    finally:
        results.close()


def rows(root: Path, topic: str) -> list[dict[str, Any]]:
    """Returns the rows of a topic as deltalake reads them, each partition in offset order."""
    table = deltalake.DeltaTable(str(root / "topics" / topic)).to_pyarrow_table()
    return table.sort_by([("partition", "ascending"), ("offset", "ascending")]).to_pylist()


def last_values(root: Path, topic: str) -> dict[bytes, bytes]:
    """By key, in the topic's Delta table."""
    return {row["key"]: row["value"] for row in rows(root, topic)}


def ends(address: str, topic: str) -> list[tuple[int, int]]:
    """The first and the next offset of each partition, by librdkafka."""
    consumer = confluent_kafka.Consumer({"bootstrap.servers": address, "group.id": "none"})
    try:
        places = [confluent_kafka.TopicPartition(topic, number) for number in PARTITIONS]
        found = [consumer.get_watermark_offsets(place, 10.0) for place in places]
        return [(low, high) for low, high in found]
    finally:
        consumer.close()


def test_words_are_counted(agent: Agent, tmp_path: Path) -> None:
    """Exact counts, also after the state is deleted and comes back out of the changelogs."""
    address, root, state = agent.kafka_address, tmp_path / "root", tmp_path / "state"
    lines = written(900)
    before = lines[:600]
    admin = confluent_admin.AdminClient({"bootstrap.servers": address})
    with following(address) as results, sparklog.connect(agent.address) as log:
        with counting(agent, state) as program:
            send(address, before)
            program.wait_for("running")
            wait_until(lambda: results.has_found(expected(before)), "the first lines were counted")
            wait_until(lambda: shares(admin) == [[2, 2]], "two threads had a half each")
            program.end_of_input()
            assert program.wait() == 0, program.output

        _check_topics(log)
        kept = {store: log.read(topic).num_rows for store, topic in CHANGELOGS.items()}
        shutil.rmtree(state)
        with counting(agent, state) as program:
            program.wait_for("running")
            for store, keys in (("altogether", "counts"), ("each-minute", "minutes")):
                assert len(expected(before)[keys]) <= restored(program, store) <= kept[store]
            send(address, lines[600:])
            wait_until(lambda: results.has_found(expected(lines)), "all lines were counted")
            _check_purged(address, root, 4 * len(lines))
            program.end_of_input()
            assert program.wait() == 0, program.output

    counted = expected(lines)
    _check_tables(root, counted)
    _check_committed(admin, address)


def restored(program: Program, store: str) -> int:
    """Returns how many records of a changelog the program has read."""
    told = [line.split() for line in program.lines if line.startswith(f"restored {store} ")]
    assert sorted(int(partition) for _, _, partition, _ in told) == list(PARTITIONS)
    return sum(int(count) for _, _, _, count in told)


def shares(admin: Any) -> list[list[int]]:
    """Returns the number of tasks of each thread of each instance.

    Empty until Streams' own assignor has assigned all of them.
    """
    group = admin.describe_consumer_groups([APPLICATION])[APPLICATION].result()
    given = []
    found: dict[str, list[int]] = {}
    for member in group.members:
        tasks = [(place.topic, place.partition) for place in member.assignment.topic_partitions]
        given += tasks
        instance, _, _ = member.client_id.partition("-StreamThread-")
        found.setdefault(instance, []).append(len(tasks))
    every = [(topic, number) for topic in (REPARTITION, "lines") for number in PARTITIONS]
    if group.partition_assignor != "stream" or sorted(given) != every:
        return []
    return list(found.values())


def _check_topics(log: sparklog.Log) -> None:
    """Streams' topics have its configuration."""
    configs = {topic: log.describe(topic).config for topic in (REPARTITION, *CHANGELOGS.values())}
    created = {"message.timestamp.type": "CreateTime"}
    assert configs == {
        REPARTITION: {
            **created,
            "cleanup.policy": "delete",
            "retention.ms": "-1",
            "segment.bytes": str(50 << 20),
        },
        CHANGELOGS["altogether"]: {**created, "cleanup.policy": "compact"},
        # A minute, an hour of grace, and Streams' one day more.
        CHANGELOGS["each-minute"]: {
            **created,
            "cleanup.policy": "compact,delete",
            "retention.ms": str((1 + 60 + 24 * 60) * MINUTE_MS),
        },
    }


def _check_purged(address: str, root: Path, count: int) -> None:
    """The repartition topic keeps none of the records that went through it."""

    def purged() -> bool:
        return all(low == high for low, high in ends(address, REPARTITION))

    wait_until(purged, "the counted records are purged")
    assert sum(high for _, high in ends(address, REPARTITION)) == count
    assert rows(root, REPARTITION) == []


def _check_tables(root: Path, counted: dict[str, dict[str, int]]) -> None:
    """The Delta tables end as the topics do, those of the changelogs too."""

    def published(topic: str, wanted: dict[bytes, bytes]) -> bool:
        return last_values(root, topic) == wanted

    for topic, values in counted.items():
        wanted = {key.encode(): b"%d" % value for key, value in values.items()}
        wait_until(partial(published, topic, wanted), f"{topic} was in its table")
    longs = {key.encode(): value.to_bytes(8, "big") for key, value in counted["counts"].items()}
    wait_until(partial(published, CHANGELOGS["altogether"], longs), "so was its changelog")
    # The key of a window: the word, its start in milliseconds, and a number that is 0.
    windows = {
        word.encode() + int(start).to_bytes(8, "big") + bytes(4): value.to_bytes(8, "big")
        for key, value in counted["minutes"].items()
        for word, _, start in (key.partition("@"),)
    }
    wait_until(partial(published, CHANGELOGS["each-minute"], windows), "so was the other")


def _check_committed(admin: Any, address: str) -> None:
    """All that was read is committed."""
    asked = confluent_kafka.ConsumerGroupTopicPartitions(APPLICATION)
    found = admin.list_consumer_group_offsets([asked])[APPLICATION].result().topic_partitions
    assert {(place.topic, place.partition): place.offset for place in found} == {
        (topic, number): high
        for topic in ("lines", REPARTITION)
        for number, (_, high) in enumerate(ends(address, topic))
    }


def test_instances_share_the_work(agent: Agent, tmp_path: Path) -> None:
    """Two instances hold copies of each other's state; when one ends, the other continues."""
    address = agent.kafka_address
    lines = written(900)
    admin = confluent_admin.AdminClient({"bootstrap.servers": address})
    copies = "num.standby.replicas=1"

    def halves() -> list[int]:
        return [sum(of_threads) for of_threads in shares(admin)]

    with (
        following(address) as results,
        counting(agent, tmp_path / "staying", copies) as staying,
    ):
        with counting(agent, tmp_path / "leaving", copies) as leaving:
            send(address, lines[:300])
            wait_until(lambda: halves() == [2, 2], "each had a half")
            send(address, lines[300:600])
            wait_until(lambda: results.has_found(expected(lines[:600])), "they had counted")
            leaving.end_of_input()
            assert leaving.wait() == 0, leaving.output
        send(address, lines[600:])
        wait_until(lambda: halves() == [4], "the one that stays had everything")
        wait_until(lambda: results.has_found(expected(lines)), "they had counted all")
        staying.end_of_input()
        assert staying.wait() == 0, staying.output


@pytest.mark.parametrize(("setting", "reason"), sorted(REFUSED.items()))
def test_what_is_missing_is_refused(
    agent: Agent, tmp_path: Path, setting: str, reason: str
) -> None:
    """Soon, with the reason, and before anything is counted."""
    send(agent.kafka_address, written(10))
    with counting(agent, tmp_path / "state", setting) as program:
        assert program.wait() == 1, program.output
        failed = [line for line in program.lines if line.startswith("failed: ")]
        assert failed
        assert all(reason in line for line in failed), failed
    assert ends(agent.kafka_address, "counts") == [(0, 0), (0, 0)]
