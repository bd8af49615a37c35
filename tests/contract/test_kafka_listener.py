"""The Kafka listener frame by frame: fetch sessions, and clients that misbehave."""

from __future__ import annotations

import dataclasses
import datetime as dt
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import confluent_kafka
import pytest
from kio.index import load_request_schema
from kio.schema.errors import ErrorCode

import sparklog
from sparklog import errors, limits
from sparklog.broker.agent import Agent
from sparklog.broker.assembly import FLUSHES_AT_ONCE_REMOTE
from sparklog.broker.broker import PartitionStatus
from sparklog.broker.groups.coordinator import Coordinator
from sparklog.broker.groups.messages import GroupError
from sparklog.broker.kafka import connection
from sparklog.broker.kafka.apis import offset_fetch
from sparklog.broker.kafka.registry import APIS, WorkerPool
from sparklog.clock import SystemClock
from sparklog.settings import (
    BrokerSettings,
    FlightSettings,
    KafkaSettings,
    LogSettings,
    RequestSettings,
    WriterSettings,
)
from sparklog.storage.objects import DelayedStore, MemoryStore, NoFaults
from sparklog.storage.objects.faults import Operation
from tests.support.batches import Record, built
from tests.support.brokers import rows_of_root
from tests.support.kafkamessages import Plain
from tests.support.kafkarequests import (
    AT_MS,
    batch,
    commit_fields,
    create_fields,
    fetch_fields,
    produce,
    produce_fields,
)
from tests.support.kafkas import Frames, broker, frames
from tests.support.landing import OURS, Landing
from tests.support.waiting import wait_until

FETCH = 1
VERSION = 12
SECONDS = 30.0
REFUSED = ErrorCode.unsupported_version


@pytest.fixture(name="agent")
def _agent(tmp_path: Path) -> Iterator[Agent]:
    with broker(tmp_path / "root") as agent:
        yield agent


@pytest.fixture(name="log")
def _log(agent: Agent) -> Iterator[sparklog.Log]:
    with sparklog.connect(agent.address) as log:
        log.create_topic("t", partitions=3)
        yield log


# ------------------------------------------------------------------------------ fetching


def fetch(
    client: Frames,
    session: tuple[int, int],
    offsets: dict[int, int],
    forgotten: list[int] | None = None,
    wait_ms: int = 0,
    min_bytes: int = 1,
) -> tuple[Any, dict[int, tuple[Any, int, int]]]:
    """(the answer, by partition: error, high watermark, bytes of records)."""
    answer = client.ask(
        FETCH,
        VERSION,
        {
            "max_wait": dt.timedelta(milliseconds=wait_ms),
            "min_bytes": min_bytes,
            "isolation_level": 0,
            "replica_id": -1,
            "session_id": session[0],
            "session_epoch": session[1],
            "topics": [
                {
                    "topic": "t",
                    "partitions": [
                        {
                            "partition": number,
                            "fetch_offset": offset,
                            "partition_max_bytes": 1 << 20,
                        }
                        for number, offset in offsets.items()
                    ],
                }
            ]
            if offsets
            else [],
            "forgotten_topics_data": [{"topic": "t", "partitions": forgotten}] if forgotten else [],
            "rack_id": "",
        },
    )
    found = {
        each.partition_index: (each.error_code, each.high_watermark, len(each.records or b""))
        for topic in answer.responses
        for each in topic.partitions
    }
    return answer, found


def test_a_session_returns_only_changes(agent: Agent, log: sparklog.Log) -> None:
    """It returns records, a new high watermark or an error, and nothing of forgotten partitions."""
    with frames(agent) as client, log.producer() as producer:
        answer, found = fetch(client, (0, 0), {0: 0, 1: 0, 2: 0})
        number = answer.session_id
        assert number > 0
        assert set(found) == {0, 1, 2}
        assert fetch(client, (number, 1), {})[1] == {}
        producer.send("t", b"v", partition=1).result(SECONDS)
        (told,) = fetch(client, (number, 2), {}, wait_ms=5_000)[1].items()
        assert told[0] == 1
        assert told[1][:2] == (ErrorCode.none, 1)
        assert told[1][2] > 0
        # The consumer continues in 1, forgets 0, and requests 2, which does not exist.
        assert fetch(client, (number, 3), {1: 1, 2: 9}, [0])[1] == {
            2: (ErrorCode.offset_out_of_range, -1, 0)
        }
        producer.send("t", b"v", partition=0).result(SECONDS)
        assert set(fetch(client, (number, 4), {2: 0})[1]) == set()


def test_sessions_end_and_errors_are_kafkas(agent: Agent, log: sparklog.Log) -> None:
    """A wrong epoch, a session that there is not, and one that was ended."""
    assert log.topics() == ["t"]
    with frames(agent) as client:
        number = fetch(client, (0, 0), {0: 0})[0].session_id
        wrong, _ = fetch(client, (number, 7), {})
        assert wrong.error_code == ErrorCode.invalid_fetch_session_epoch
        unknown, _ = fetch(client, (number + 1, 1), {})
        assert unknown.error_code == ErrorCode.fetch_session_id_not_found
        with frames(agent) as other:  # a session is not of a connection
            assert fetch(other, (number, 1), {})[0].session_id == number
        last, found = fetch(client, (number, -1), {0: 0})
        assert (last.session_id, set(found)) == (0, {0})
        gone, _ = fetch(client, (number, 2), {})
        assert gone.error_code == ErrorCode.fetch_session_id_not_found


def test_a_session_may_name_more_partitions_while_there_is_room(
    agent: Agent, log: sparklog.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those are answered at once; one too many ends the session, and the client begins again."""
    assert log.topics() == ["t"]
    kafka = agent.listeners.kafka
    assert kafka is not None
    with frames(agent) as client:
        answer, found = fetch(client, (0, 0), {0: 0})
        number = answer.session_id
        assert set(found) == {0}
        assert set(fetch(client, (number, 1), {1: 0})[1]) == {1}
        named = sum(len(each.partitions) for each in kafka.sessions._sessions.values())
        monkeypatch.setattr("sparklog.broker.kafka.sessions.FETCH_SESSION_PARTITIONS", named)
        assert fetch(client, (number, 2), {1: 0})[0].error_code == ErrorCode.none
        full, _ = fetch(client, (number, 3), {2: 0})
        assert full.error_code == ErrorCode.fetch_session_id_not_found
        gone, _ = fetch(client, (number, 4), {})
        assert gone.error_code == ErrorCode.fetch_session_id_not_found
        assert fetch(client, (0, 0), {0: 0, 1: 0})[0].session_id > 0
        one_too_many = fetch(client, (0, 0), dict.fromkeys(range(named + 1), 0))[0]
        assert one_too_many.session_id == 0


def test_a_partition_that_returned_records_comes_last(agent: Agent, log: sparklog.Log) -> None:
    """A busy partition does not starve the others where replies are small."""
    with log.producer() as producer:
        for number in range(3):
            producer.send("t", b"x" * 100, partition=number)
    with frames(agent) as client:
        body: dict[str, Any] = {
            "max_wait": dt.timedelta(0),
            "min_bytes": 1,
            "max_bytes": 1,
            "isolation_level": 0,
            "replica_id": -1,
            "session_id": 0,
            "session_epoch": 0,
            "topics": [
                {
                    "topic": "t",
                    "partitions": [
                        {"partition": n, "fetch_offset": 0, "partition_max_bytes": 1 << 20}
                        for n in range(3)
                    ],
                }
            ],
            "forgotten_topics_data": [],
            "rack_id": "",
        }
        answer = client.ask(FETCH, VERSION, body)
        body |= {"session_id": answer.session_id, "topics": []}
        served = []
        for epoch in range(1, 4):
            answer = client.ask(FETCH, VERSION, body | {"session_epoch": epoch})
            served += [p.partition_index for topic in answer.responses for p in topic.partitions]
    assert sorted(served) == [0, 1, 2]


@pytest.mark.parametrize("min_bytes", [1 << 20, 100 << 20])
def test_a_reply_that_is_full_goes_out(agent: Agent, log: sparklog.Log, min_bytes: int) -> None:
    """However many bytes were wanted: no more of them could come."""
    with log.producer() as producer:
        for _ in range(8):
            producer.send("t", b"x" * 300_000, partition=0)
    with frames(agent) as client:
        began = time.monotonic()
        _, found = fetch(client, (0, -1), {0: 0}, wait_ms=20_000, min_bytes=min_bytes)
        assert found[0][2] > 300_000
        assert time.monotonic() - began < 10


def test_a_waiting_fetch_is_not_woken_by_other_partitions(
    agent: Agent, log: sparklog.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each flush would cost as much as there are consumers."""
    broker = agent.parts.broker
    assert broker is not None
    looks: list[int] = []
    place = broker.partitions.status

    def counted(topic: str, partition: int) -> PartitionStatus:
        looks.append(partition)
        return place(topic, partition)

    monkeypatch.setattr(broker.partitions, "status", counted)
    with ThreadPoolExecutor(1) as pool, log.producer() as producer, frames(agent) as client:
        waiting = pool.submit(fetch, client, (0, -1), {0: 0}, None, 20_000)
        wait_until(lambda: 0 in looks, "the consumer waits")
        for _ in range(50):
            producer.send("t", b"x", partition=1).result(SECONDS)
        assert not waiting.done()
        assert looks.count(0) <= 3, "once, and again where it was woken before it slept"
        producer.send("t", b"x", partition=0).result(SECONDS)
        _, found = waiting.result(SECONDS)
        assert found[0][1] == 1


# ------------------------------------------------------------------------------ order


def test_offsets_are_read_as_they_were_committed_before(agent: Agent, log: sparklog.Log) -> None:
    """On one connection, without waiting for an answer; as Kafka handles one after another."""

    def commit(offset: int) -> tuple[int, int, dict[str, Any]]:
        return 8, 8, commit_fields("g", "t", 0, offset)

    read = {"group_id": "g", "topics": [{"name": "t", "partition_indexes": [0]}]}
    with frames(agent) as client:
        client.ask(10, 4, {"key_type": 0, "coordinator_keys": ["g"]})
        for offset in range(20):
            *_, answer = client.ask_all([commit(0), commit(offset), (9, 5, read)])
            assert answer.topics[0].partitions[0].committed_offset == offset


# ------------------------------------------------------------------------------ group offsets


def offset_fetch_fields(version: int, group: str, topics: dict[str, list[int]] | None) -> Any:
    """`topics` None asks for all that the group has committed."""
    wanted = (
        None
        if topics is None
        else [{"name": name, "partition_indexes": numbers} for name, numbers in topics.items()]
    )
    if version < 8:
        return {"group_id": group, "topics": wanted}
    return {"groups": [{"group_id": group, "topics": wanted}]}


def fetched_offsets(
    client: Frames, version: int, group: str, topics: dict[str, list[int]] | None
) -> tuple[ErrorCode | None, dict[tuple[str, int], tuple[int, ErrorCode]]]:
    """The group's error (None where the version has none) and each (offset, error)."""
    answer = client.ask(9, version, offset_fetch_fields(version, group, topics))
    found = answer.groups[0] if version >= 8 else answer
    return getattr(found, "error_code", None), {
        (topic.name, each.partition_index): (each.committed_offset, each.error_code)
        for topic in found.topics
        for each in topic.partitions
    }


@pytest.mark.parametrize("version", range(1, 10))
def test_the_offsets_of_a_group_are_fetched(agent: Agent, log: sparklog.Log, version: int) -> None:
    """Requested partitions without a committed offset have -1; null requests all offsets."""
    log.create_topic("u")
    fine, none = ErrorCode.none, (-1, ErrorCode.none)
    code = fine if version >= 2 else None
    with frames(agent) as client:
        client.ask(10, 4, {"key_type": 0, "coordinator_keys": ["g", "empty"]})
        for topic, partition, offset in (("t", 0, 7), ("t", 2, 9), ("u", 0, 3)):
            client.ask(8, 8, commit_fields("g", topic, partition, offset))
        assert fetched_offsets(client, version, "g", {"t": [0, 1], "gone": [5]}) == (
            code,
            {("t", 0): (7, fine), ("t", 1): none, ("gone", 5): none},
        )
        assert fetched_offsets(client, version, "empty", {"t": [0]}) == (code, {("t", 0): none})
        if version >= 2:
            everything = {("t", 0): (7, fine), ("t", 2): (9, fine), ("u", 0): (3, fine)}
            assert fetched_offsets(client, version, "g", None) == (fine, everything)
            assert fetched_offsets(client, version, "empty", None) == (fine, {})


@pytest.mark.parametrize(
    ("version", "topics"), [(1, {"t": [0]}), (2, {"t": [0]}), (7, None), (8, {"t": [0]}), (9, None)]
)
def test_errors_of_offset_fetch_fit_the_version(
    agent: Agent,
    monkeypatch: pytest.MonkeyPatch,
    version: int,
    topics: dict[str, list[int]] | None,
) -> None:
    """The group has the error since version 2, and each partition before."""
    monkeypatch.setattr(
        Coordinator, "committed", lambda *_: GroupError.COORDINATOR_LOAD_IN_PROGRESS
    )
    with frames(agent) as client:
        found = fetched_offsets(client, version, "g", topics)
    refused = ErrorCode.coordinator_load_in_progress
    assert found == ((refused, {}) if version >= 2 else (None, {("t", 0): (-1, refused)}))


def test_all_offsets_of_a_group_with_many_are_fetched(
    agent: Agent, log: sparklog.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are looked up in a thread, and take a turn; nothing is different for the client."""
    for module in (limits, offset_fetch):
        monkeypatch.setattr(module, "GROUP_OFFSETS_STEP", 1)
    committed, threads = Coordinator.committed, set()

    def noted(*args: Any) -> Any:
        threads.add(threading.current_thread().name)
        return committed(*args)

    monkeypatch.setattr(Coordinator, "committed", noted)
    with frames(agent) as client:
        client.ask(10, 4, {"key_type": 0, "coordinator_keys": ["g"]})
        for partition in range(3):
            client.ask(8, 8, commit_fields("g", "t", partition, partition))
        expected = {("t", each): (each, ErrorCode.none) for each in range(3)}
        for version in (7, 9):
            for topics in (None, {"t": [0, 1, 2]}):
                assert fetched_offsets(client, version, "g", topics)[1] == expected
    assert threads
    assert all(
        each.startswith(f"sparklog-kafka-{WorkerPool.LARGE_REQUEST.value}") for each in threads
    ), threads


# ------------------------------------------------------------------------------ bad clients


def list_offsets(
    client: Frames, version: int, *asked: tuple[int, int], leader_epoch: int = -1
) -> list[tuple[ErrorCode, int, int]]:
    """(error, time, offset) of each (partition, time) of topic t."""
    partitions = [
        {"partition_index": number, "current_leader_epoch": leader_epoch, "timestamp": at}
        for number, at in asked
    ]
    fields = {
        "replica_id": -1,
        "isolation_level": 0,
        "topics": [{"name": "t", "partitions": partitions}],
        "timeout": dt.timedelta(seconds=SECONDS),
    }
    (topic,) = client.ask(2, version, fields).topics
    return [(each.error_code, each.timestamp, each.offset) for each in topic.partitions]


@pytest.mark.parametrize("version", [1, 6, 10])
def test_offsets_are_found_by_time(agent: Agent, log: sparklog.Log, version: int) -> None:
    """The first record that is not older; what else a time may stand for, each version knows."""
    assert log.topics() == ["t"]
    none = ErrorCode.none
    times = [AT_MS + 1, AT_MS + 3, AT_MS + 5]
    with frames(agent) as client:
        produce(client, "t", 0, built([Record(at, None, b"v") for at in times], 0))
        for _ in range(2):  # in memory, and in the table
            for asked, found in (
                (0, (none, times[0], 0)),
                (AT_MS + 1, (none, times[0], 0)),
                (AT_MS + 2, (none, times[1], 1)),
                (AT_MS + 5, (none, times[2], 2)),
                (AT_MS + 6, (none, -1, -1)),
                (-1, (none, -1, 3)),
                (-2, (none, -1, 0)),
                (-3, (none, times[2], 2) if version >= 7 else (REFUSED, -1, -1)),
                (-4, (none, -1, 0) if version >= 8 else (REFUSED, -1, -1)),
                (-5, (none, -1, -1) if version >= 9 else (REFUSED, -1, -1)),
                (-6, (REFUSED, -1, -1)),
            ):
                assert list_offsets(client, version, (0, asked)) == [found], asked
            log.flush_to_table("t")
        (unknown,) = list_offsets(client, version, (9, -1))
        assert unknown[0] == ErrorCode.unknown_topic_or_partition
        twice = list_offsets(client, version, (0, -1), (1, -1), (0, -2))
        assert twice == [(ErrorCode.invalid_request, -1, -1), (none, -1, 0)]
        if version >= 4:
            (newer,) = list_offsets(client, version, (0, -1), leader_epoch=99)
            assert newer[0] == ErrorCode.unknown_leader_epoch


def test_our_client_at_the_kafka_port_learns_the_right_port(agent: Agent) -> None:
    """A Flight client at the Kafka port gets an error with the Flight address."""
    with pytest.raises(errors.WrongPort, match=f"Flight is at {agent.address}: connect there"):
        sparklog.connect(agent.kafka_address).topics()


def test_a_client_that_never_reads_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three clients request megabytes and read nothing; memory is short, and others continue."""
    monkeypatch.setattr("sparklog.broker.kafka.connection.STALLED_SECONDS", 60)
    monkeypatch.setattr("sparklog.broker.kafka.connection.STALLED_SHORT_SECONDS", 1)
    monkeypatch.setattr("sparklog.broker.kafka.apis.fetch.FETCH_BYTES", 8 << 20)
    kafka = KafkaSettings(listen="127.0.0.1:0", request_max_bytes=1 << 20, memory_bytes=16 << 20)
    with broker(tmp_path / "root", kafka=kafka) as agent:
        with sparklog.connect(agent.address) as log:
            log.create_topic("t", partitions=1)
            with log.producer() as producer:
                for _ in range(64):
                    producer.send("t", b"x" * (1 << 18))
        served, door = agent.parts.broker, agent.listeners.kafka
        assert served is not None
        assert door is not None
        fetches = mock.Mock(side_effect=served.fetch_kafka)
        monkeypatch.setattr(served, "fetch_kafka", fetches)
        silent = [_asks_and_never_reads(agent) for _ in range(3)]
        wait_until(lambda: door._memory.is_short, "no more memory is given")
        assert fetches.call_count <= 4, "nothing is read for a reply that has no room"
        began = time.monotonic()
        with frames(agent) as client:
            found = fetch(client, (0, -1), {0: 0})[1]
            assert found[0][2] > 1 << 18
        assert time.monotonic() - began < SECONDS
        wait_until(lambda: not door._connections, "those that never read were dropped")
        for each in silent:
            each.close()


def _asks_and_never_reads(agent: Agent) -> socket.socket:
    """Twenty fetches of all that there is, pipelined."""
    host, _, port = agent.kafka_address.rpartition(":")
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    found.connect((host, int(port)))
    request = Frames.frame(
        FETCH,
        4,
        1,
        {
            "replica_id": -1,
            "max_wait": dt.timedelta(0),
            "min_bytes": 1,
            "max_bytes": 50 << 20,
            "isolation_level": 0,
            "topics": [
                {
                    "topic": "t",
                    "partitions": [
                        {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 50 << 20}
                    ],
                }
            ],
        },
    )
    found.sendall(request * 20)
    return found


def test_a_connection_on_which_nothing_happens_ends(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kafka ends it, after its connections.max.idle.ms; one that asks now and then stays."""
    monkeypatch.setattr("sparklog.broker.kafka.connection.IDLE_SECONDS", 2)
    with frames(agent) as busy:
        host, _, port = agent.kafka_address.rpartition(":")
        with socket.create_connection((host, int(port)), SECONDS) as idle:
            idle.settimeout(0.2)
            deadline = time.monotonic() + SECONDS
            while time.monotonic() < deadline:
                busy.ask(18, 0, {})
                try:
                    assert idle.recv(1) == b""
                    break
                except TimeoutError:
                    continue
                except ConnectionResetError:
                    break
            else:
                pytest.fail("the connection did not end")
        busy.ask(18, 0, {})


@pytest.mark.parametrize("size", [-1, -(2**31), 2**31 - 1, KafkaSettings().request_max_bytes + 1])
def test_a_frame_that_lies_about_its_size_ends_its_connection(agent: Agent, size: int) -> None:
    """At once, before anything is read of it."""
    host, _, port = agent.kafka_address.rpartition(":")
    with socket.create_connection((host, int(port)), SECONDS) as liar:
        liar.sendall(size.to_bytes(4, "big", signed=True))
        assert liar.recv(1) == b""


@pytest.mark.parametrize("size", [1_000, 10 << 20])
def test_a_request_that_does_not_come_ends_its_connection(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """It has taken room from others."""
    monkeypatch.setattr("sparklog.broker.kafka.connection.STALLED_SECONDS", 0.2)
    monkeypatch.setattr("sparklog.broker.kafka.connection.SLOWEST_BYTES_PER_SECOND", 1 << 30)
    host, _, port = agent.kafka_address.rpartition(":")
    with socket.create_connection((host, int(port)), SECONDS) as slow:
        slow.sendall(size.to_bytes(4, "big") + b"x" * 100)
        assert slow.recv(1) == b""


# ------------------------------------------------------------------------------ names


def test_names_that_no_record_can_hold_are_refused(agent: Agent, log: sparklog.Log) -> None:
    """Compact strings may be longer; the groups of other clients continue."""
    long = "x" * 40_000
    span = dt.timedelta(seconds=10)
    join = {
        "group_id": "g",
        "session_timeout": span,
        "rebalance_timeout": span,
        "member_id": "",
        "group_instance_id": None,
        "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": b""}],
        "reason": None,
    }

    def committed(group: str) -> ErrorCode:
        (topic,) = client.ask(8, 8, commit_fields(group, "t", 0, 1)).topics
        return topic.partitions[0].error_code

    with frames(agent) as client:
        client.ask(10, 4, {"key_type": 0, "coordinator_keys": ["g"]})
        refused = client.ask(11, 9, {**join, "group_id": long})
        assert refused.error_code is ErrorCode.invalid_group_id
        for given in ({"group_instance_id": long}, {"protocol_type": long}):
            refused = client.ask(11, 9, {**join, **given})
            assert refused.error_code is ErrorCode.invalid_request
        assert committed(long) is ErrorCode.invalid_group_id
        assert committed("g") is ErrorCode.none
    assert agent.failure is None


def test_the_listener_may_use_ipv6(tmp_path: Path) -> None:
    """The address that clients get is an IPv6 address too."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    kafka = KafkaSettings(listen="[::1]:0")
    with broker(tmp_path / "root", kafka=kafka) as agent, frames(agent) as client:
        assert agent.kafka_address.startswith("[::1]:")
        (node,) = client.ask(3, 1, {"topics": []}).brokers
        assert (node.host, f"[::1]:{node.port}") == ("::1", agent.kafka_address)


# ------------------------------------------------------------------------------ producer ids


def test_many_producers_begin_at_once(tmp_path: Path) -> None:
    """A thousand ids on a store that takes 20 ms a request cost two versions of the metadata."""
    store = DelayedStore(MemoryStore(SystemClock()), 0.02)
    settings = BrokerSettings(
        root=store.uri,
        id=1,
        flight=FlightSettings(listen="127.0.0.1:0"),
        kafka=KafkaSettings(listen="127.0.0.1:0"),
        log=LogSettings(level="error"),
    )

    def begin(client: Frames) -> list[int]:
        wanted = {"transactional_id": None, "transaction_timeout": dt.timedelta(seconds=1)}
        answers = client.ask_all([(22, 4, wanted)] * 20)
        assert {each.error_code for each in answers} == {ErrorCode.none}
        return [each.producer_id for each in answers]

    with Agent(settings, store=store) as agent, ExitStack() as ending:
        clients = [ending.enter_context(frames(agent)) for _ in range(50)]
        before = agent._meta.current.version
        with ThreadPoolExecutor(50) as pool:
            found = [each for ids in pool.map(begin, clients) for each in ids]
        assert len(set(found)) == 1_000
        assert agent._meta.current.version - before <= 2


# ------------------------------------------------------------------------------ object stores


def test_requests_share_several_puts() -> None:
    """On an object store a connection's requests are in several puts; replies are in order."""
    landing, count = Landing(), 6
    landing.allow(0)
    store = MemoryStore(SystemClock()).view(landing)
    settings = BrokerSettings(
        root=store.uri,
        id=1,
        flight=FlightSettings(listen="127.0.0.1:0"),
        kafka=KafkaSettings(listen="127.0.0.1:0"),
        writer=WriterSettings(flush_max_bytes=limits.KIB),
        log=LogSettings(level="error"),
    )
    wanted = [(0, 9, produce_fields("t", 0, batch([bytes(limits.KIB)])))] * count
    with ExitStack() as ending:
        agent = ending.enter_context(Agent(settings, store=store))
        ending.callback(landing.allow_all)
        client = ending.enter_context(frames(agent))
        client.ask(19, 5, create_fields("t"))
        pool = ending.enter_context(ThreadPoolExecutor(1))
        replies = pool.submit(client.ask_all, wanted)
        first = range(1, 1 + FLUSHES_AT_ONCE_REMOTE)
        landing.wait_for(0, *first)
        for sequence in reversed(first):
            landing.allow(sequence)
        landing.allow_all()
        found = [each.responses[0].partition_responses[0] for each in replies.result(SECONDS)]
    assert [each.error_code for each in found] == [ErrorCode.none] * count
    assert [each.base_offset for each in found] == list(range(count))


class Unsteady(NoFaults):
    """While it is on, puts of the log take a different time each, and every third is refused."""

    def __init__(self) -> None:
        self.is_on = False
        self.most_at_once = 0
        self._chance = random.Random(1)
        self._count = self._under_way = 0
        self._lock = threading.Lock()

    def before(self, operation: Operation, path: str, /) -> None:
        if not self.is_on or operation != "put_new" or not path.startswith(OURS):
            return
        with self._lock:
            self._count += 1
            is_refused = not self._count % 3
            self._under_way += 1
            self.most_at_once = max(self.most_at_once, self._under_way)
            seconds = self._chance.choice([0.01, 0.05, 0.1])
        time.sleep(seconds)
        with self._lock:
            self._under_way -= 1
        if is_refused:
            raise errors.StorageUnavailable(operation="put", path=path, reason="injected")


def test_an_unsteady_store_reorders_nothing() -> None:
    """Beside slow and refused puts, idempotent producers' records are acked once, in order."""
    faults, clock, each, producers = Unsteady(), SystemClock(), 40, 4
    plain = MemoryStore(clock)
    settings = BrokerSettings(
        root=plain.uri,
        id=1,
        flight=FlightSettings(listen="127.0.0.1:0"),
        kafka=KafkaSettings(listen="127.0.0.1:0"),
        requests=RequestSettings(profile="fast"),  # several puts at once
        log=LogSettings(level="error"),
    )
    acked: list[tuple[int, int, bytes]] = []

    def note(error: Any, message: Any) -> None:
        assert error is None
        acked.append((message.partition(), message.offset(), message.value()))

    def produce_all(number: int) -> None:
        given = {"bootstrap.servers": agent.kafka_address, "batch.num.messages": 4, "linger.ms": 0}
        producer = confluent_kafka.Producer({**given, "enable.idempotence": True})
        for count in range(each):
            producer.produce("t", b"%d:%d" % (number, count), partition=number % 2, callback=note)
        assert producer.flush(SECONDS) == 0

    with Agent(settings, store=plain.view(faults)) as agent:
        with frames(agent) as client:
            client.ask(19, 5, create_fields("t", 2))
        faults.is_on = True
        with ThreadPoolExecutor(producers) as pool:
            list(pool.map(produce_all, range(producers)))
        faults.is_on = False
        stored = {number: rows_of_root(plain, clock, partition=number) for number in range(2)}
    assert faults.most_at_once > 1
    for partition, rows in stored.items():
        assert rows == sorted((offset, value) for at, offset, value in acked if at == partition)
        assert [offset for offset, _ in rows] == list(range(each * producers // 2))
        for number in range(partition, producers, 2):
            values = [value for _, value in rows if value and value.startswith(b"%d:" % number)]
            assert values == [b"%d:%d" % (number, count) for count in range(each)]


# ------------------------------------------------------------------------------ as Kafka answers


def test_naming_internal_topics_makes_none_of_the_wrong_kind(
    agent: Agent, log: sparklog.Log
) -> None:
    """Metadata, which creates topics, makes `__consumer_offsets` as it must be."""
    names = ["__consumer_offsets", "__transaction_state", "mine"]
    wanted = {
        "topics": [{"topic_id": None, "name": name} for name in names],
        "allow_auto_topic_creation": True,
        "include_topic_authorized_operations": False,
    }
    with frames(agent) as client:
        found = {each.name: each for each in client.ask(3, 12, wanted).topics}
        offsets, transactions, mine = (found[name] for name in names)
        assert (offsets.error_code, offsets.is_internal) == (ErrorCode.none, True)
        assert len(offsets.partitions) == limits.OFFSETS_PARTITIONS
        assert transactions.error_code == ErrorCode.unknown_topic_or_partition
        assert (mine.error_code, mine.is_internal) == (ErrorCode.none, False)
        answer = client.ask(19, 7, create_fields("__transaction_state"))
        assert answer.topics[0].error_code == ErrorCode.invalid_topic_exception
    assert log.describe("__consumer_offsets").config == {"cleanup.policy": "compact"}


def test_a_fetch_of_zstd_is_answered_in_each_version(agent: Agent) -> None:
    """A client may read zstd and speak an old version of Fetch: Kafka 4.1 does not guess either."""
    configs = [{"name": "compression.type", "value": "zstd"}]
    with frames(agent) as client:
        client.ask(19, 7, create_fields("z", configs=configs))
        produce(client, "z", 0, batch([b"v"]))
        for version in (4, 9, 10):
            fields = {**fetch_fields("z", 0, 0), "forgotten_topics_data": ()}
            reply = client.ask(FETCH, version, fields)
            ((found,),) = (each.partitions for each in reply.responses)
            assert found.error_code == ErrorCode.none
            assert len(found.records) > 0


@pytest.mark.parametrize(
    "plain",
    [
        Plain(),
        Plain(number=1, nulls=True),
        Plain(number=1, items=1, text="x" * (2**15 - 1)),
    ],
    ids=["nothing", "nulls", "long names"],
)
def test_requests_that_nobody_means_are_answered(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, plain: Plain
) -> None:
    """Each request in each version gets an answer, as from Kafka, and its connection continues.

    Consumers that close send a Fetch without partitions, for example. An error that names what the
    client has sent is shortened, because the strings of older versions have 32,767 bytes at most.
    """
    failures: list[object] = []
    log = mock.Mock(exception=lambda *_given: failures.append(sys.exc_info()[1]))
    monkeypatch.setattr(connection, "_log", log)
    for api in APIS.values():
        for version in range(api.min_version, api.max_version + 1):
            body = plain.message(load_request_schema(api.key, version))
            if hasattr(body, "acks"):
                body = dataclasses.replace(body, acks=1)  # 0 has no answer
            with frames(agent) as client:
                try:
                    client.ask(api.key, version, body)
                except AssertionError:
                    failures.append((api.name, version, "is not answered"))
    assert not failures


def test_an_unknown_version_of_api_versions_is_told_the_known_ones(agent: Agent) -> None:
    """The reply is one of version 0, and lists nothing else, as Kafka's (KIP-511)."""
    host, port = agent.kafka_address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), SECONDS) as client:
        client.sendall(struct.pack(">ihhihb", 11, 18, 99, 7, -1, 0))
        with client.makefile("rb") as answer:
            size, number, code, count = struct.unpack(">iihi", answer.read(14))
            listed = struct.unpack(">hhh", answer.read(6))
    assert (size, number, code, count) == (16, 7, REFUSED, 1)
    assert listed == (18, 0, APIS[18].max_version)


def test_a_deleted_topic_is_not_created_by_the_next_mention(agent: Agent) -> None:
    """Clients that have used it ask for it once more; those that need it ask again."""
    wanted = {
        "topics": [{"name": "gone", "topic_id": None}],
        "allow_auto_topic_creation": True,
        "include_topic_authorized_operations": False,
    }
    deletion = {"topics": [{"name": "gone", "topic_id": None}], "timeout": dt.timedelta(seconds=5)}

    def mention(client: Frames) -> ErrorCode:
        (found,) = client.ask(3, 12, wanted).topics
        code: ErrorCode = found.error_code
        return code

    with frames(agent) as client:
        assert mention(client) == ErrorCode.none
        (deleted,) = client.ask(20, 6, deletion).responses
        assert deleted.error_code == ErrorCode.none
        assert mention(client) == ErrorCode.unknown_topic_or_partition
        wait_until(lambda: mention(client) == ErrorCode.none, "it is created again")


def test_a_transaction_is_refused_with_a_code_that_ends_the_client(agent: Agent) -> None:
    """librdkafka repeats any other one until its time is over."""
    wanted = {"key_type": 1, "coordinator_keys": ["tx"]}
    with frames(agent) as client:
        (found,) = client.ask(10, 4, wanted).coordinators
    assert found.error_code == ErrorCode.cluster_authorization_failed
    assert "no transactions" in found.error_message


def test_groups_without_a_name_have_no_offsets_to_delete(agent: Agent) -> None:
    """Kafka's own answer."""
    topics = [{"name": "t", "partitions": [{"partition_index": 0}]}]
    with frames(agent) as client:
        found = client.ask(47, 0, {"group_id": "", "topics": topics})
    assert found.error_code == ErrorCode.invalid_group_id


@pytest.mark.parametrize(
    ("kind", "keys"), [(16, {"interval.ms", "match", "metrics"}), (32, {"share.isolation.level"})]
)
def test_groups_and_metrics_have_a_configuration(agent: Agent, kind: int, keys: set[str]) -> None:
    """That of Kafka's defaults, for any name but an empty one."""
    with frames(agent) as client:
        for name, expected in (("any", ErrorCode.none), ("", ErrorCode.invalid_request)):
            resource = {"resource_type": kind, "resource_name": name, "configuration_keys": None}
            wanted = {
                "resources": [resource],
                "include_synonyms": True,
                "include_documentation": True,
            }
            (found,) = client.ask(32, 4, wanted).results
            assert found.error_code == expected
            assert {each.name for each in found.configs} >= (keys if name else set())


def test_a_sync_names_its_protocol(agent: Agent) -> None:
    """From version 5 on both must be there; before there are none."""
    wanted = {
        "group_id": "g",
        "generation_id": 1,
        "member_id": "m",
        "group_instance_id": None,
        "protocol_type": "consumer",
        "protocol_name": "range",
        "assignments": (),
    }
    with frames(agent) as client:
        client.ask(10, 4, {"key_type": 0, "coordinator_keys": ["g"]})
        for missing in ("protocol_type", "protocol_name"):
            answer = client.ask(14, 5, {**wanted, missing: None})
            assert answer.error_code == ErrorCode.inconsistent_group_protocol
        for version in (4, 5):
            answer = client.ask(14, version, wanted)
            assert answer.error_code == ErrorCode.unknown_member_id


def test_a_lone_consumer_reads_at_once(agent: Agent, log: sparklog.Log) -> None:
    """It waits for no other members: 0.3 s pass from its subscription to the record."""
    log.create_topic("one", partitions=1)  # librdkafka waits 0.5 s at one that is empty
    with log.producer() as producer:
        producer.send("one", b"v").result(SECONDS)
    fastest = SECONDS
    for number in range(5):
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": agent.kafka_address,
                "group.id": f"g{number}",
                "auto.offset.reset": "earliest",
            }
        )
        consumer.list_topics("one", SECONDS)
        began = time.monotonic()
        consumer.subscribe(["one"])
        message = consumer.poll(SECONDS)
        fastest = min(fastest, time.monotonic() - began)
        assert message is not None
        assert message.value() == b"v"
        consumer.close()
    assert fastest < 0.3


def test_a_produce_without_zstd_is_refused(agent: Agent, log: sparklog.Log) -> None:
    """A batch in zstd needs version 7 of Produce, as in Kafka."""
    fields = produce_fields("t", 0, batch([b"v"], codec=4))
    codes = []
    with frames(agent) as client:
        for version in (6, 7):
            ((found,),) = (
                each.partition_responses for each in client.ask(0, version, fields).responses
            )
            codes.append(found.error_code)
    assert codes == [ErrorCode.unsupported_compression_type, ErrorCode.none]
