"""The limits of the Kafka listener: requests that wait for memory, and requests that do not."""

from __future__ import annotations

import asyncio
import datetime as dt
import gc
import itertools
import random
import socket
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from kio.schema.errors import ErrorCode

import sparklog
from sparklog import limits
from sparklog.broker.kafka.apis import delete_records
from sparklog.broker.kafka.apis.metadata import CREATED_TOPICS
from sparklog.broker.kafka.listener import READ_THREADS
from sparklog.broker.kafka.registry import WorkerPool
from sparklog.broker.kafka.socket_stream import READ_BYTES
from sparklog.broker.leader_metadata import LeaderMetadata
from sparklog.broker.log.preparing import KAFKA_QUICK_BYTES, KAFKA_QUICK_RECORDS_BYTES
from sparklog.formats import record_batch
from sparklog.settings import KafkaSettings, PublisherSettings, TopicSettings, WriterSettings
from tests.support import kafkarequests
from tests.support.batches import split
from tests.support.kafkas import SECONDS, Frames, broker, frames
from tests.support.waiting import wait_until

UNPUBLISHED = PublisherSettings(interval_seconds=600, publish_bytes=1 << 30, unpublished_bytes=1)
"""The queue holds one batch until it is published."""
VALUES = [bytes(1_000)] * 10
FETCH = 1


def find_coordinator(client: Frames) -> ErrorCode:
    """Returns the error code of the coordinator of group g."""
    answer = client.ask(10, 4, {"key_type": 0, "coordinator_keys": ["g"]})
    code: ErrorCode = answer.coordinators[0].error_code
    return code


def commit(client: Frames) -> ErrorCode:
    """Commits an offset of group g, which has no members."""
    fields = kafkarequests.commit_fields("g", "t", 0, 1)
    code: ErrorCode = client.ask(8, 8, fields).topics[0].partitions[0].error_code
    return code


def test_producers_that_wait_for_the_queue_delay_no_other_requests(tmp_path: Path) -> None:
    """More producers wait than there are threads, and they continue when the queue has space."""
    with broker(tmp_path / "root", publisher=UNPUBLISHED) as agent, frames(agent) as client:
        kafkarequests.create(client, "t")
        assert find_coordinator(client) == ErrorCode.none
        batch = kafkarequests.batch(VALUES)
        assert kafkarequests.produce(client, "t", 0, batch).base_offset == 0
        waiting = 2 * READ_THREADS
        with ThreadPoolExecutor(waiting) as pool:

            def produce() -> Any:
                with frames(agent) as producer:
                    return kafkarequests.produce(producer, "t", 0, batch)

            answers = [pool.submit(produce) for _ in range(waiting)]
            time.sleep(0.2)
            began = time.monotonic()
            assert find_coordinator(client) == ErrorCode.none
            assert commit(client) == ErrorCode.none
            assert time.monotonic() - began < 20.0
            assert not any(each.done() for each in answers)
            with sparklog.connect(agent.address) as log:

                def published() -> bool:
                    log.flush_to_table()
                    return all(each.done() for each in answers)

                wait_until(published, "all have found room")
            found = sorted(each.result().base_offset for each in answers)
        assert found == [len(VALUES) * (1 + number) for number in range(waiting)]


def test_a_request_may_fill_the_queue_again_and_again(tmp_path: Path) -> None:
    """Each of its batches finds space after the one before it was written."""
    small = WriterSettings(queue_bytes=1)
    with broker(tmp_path / "root", writer=small) as agent, frames(agent) as client:
        kafkarequests.create(client, "t", 4)
        batch = kafkarequests.batch(VALUES)
        fields = kafkarequests.produce_fields("t", 0, batch)
        partitions = [{"index": each, "records": batch} for each in range(4)]
        fields["topic_data"][0]["partition_data"] = partitions
        (topic,) = client.ask(kafkarequests.PRODUCE, 9, fields).responses
        assert [each.error_code for each in topic.partition_responses] == [ErrorCode.none] * 4


def test_queued_batches_of_acks_0_become_durable_while_the_rest_waits(tmp_path: Path) -> None:
    """They become durable although no other client writes."""
    bounds = {"writer": WriterSettings(queue_bytes=1), "publisher": UNPUBLISHED}
    with broker(tmp_path / "root", **bounds) as agent, frames(agent) as client:
        kafkarequests.create(client, "t", 2)
        batch = kafkarequests.batch(VALUES)
        fields = kafkarequests.produce_fields("t", 0, batch) | {"acks": 0}
        partitions = [{"index": each, "records": batch} for each in range(2)]
        fields["topic_data"][0]["partition_data"] = partitions
        client._socket.sendall(Frames.frame(kafkarequests.PRODUCE, 9, 1, fields))
        with sparklog.connect(agent.address) as log:
            wait_until(lambda: log.describe("t").partitions[0].end > 0, "the first is durable")
            log.flush_to_table("t")
            wait_until(lambda: log.describe("t").partitions[1].end > 0, "the second found room")


@pytest.mark.parametrize("codec", [each for each in record_batch.Codec if each])
def test_the_loop_takes_little_out_of_compression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: record_batch.Codec
) -> None:
    """However small a batch is that holds much."""
    checked: dict[str, int] = {}
    check = record_batch.check

    def check_here(data: bytes, **bounds: int) -> record_batch.CheckedBatch:
        found = check(data, **bounds)
        checked[threading.current_thread().name] = len(found.records)
        return found

    monkeypatch.setattr(record_batch, "check", check_here)
    batch = kafkarequests.batch([bytes(KAFKA_QUICK_RECORDS_BYTES)], codec)
    assert len(batch) <= KAFKA_QUICK_BYTES
    with broker(tmp_path / "root") as agent, frames(agent) as client:
        kafkarequests.create(client, "t")
        assert kafkarequests.produce(client, "t", 0, batch).error_code == ErrorCode.none
        assert "sparklog-kafka" not in checked
        assert max(checked.values()) > KAFKA_QUICK_RECORDS_BYTES
        small = kafkarequests.batch([bytes(1_000)], codec)
        assert kafkarequests.produce(client, "t", 0, small).error_code == ErrorCode.none
        assert checked["sparklog-kafka"] > 1_000


# ------------------------------------------------------------------------------ waiting


def fetch_fields(offset: int, *, min_bytes: int = 1, wait_ms: int = 0) -> dict[str, Any]:
    """Fetch of partition 0 of topic t, in a version without sessions."""
    partition = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 50 << 20}
    return {
        "replica_id": -1,
        "max_wait": dt.timedelta(milliseconds=wait_ms),
        "min_bytes": min_bytes,
        "max_bytes": 50 << 20,
        "isolation_level": 0,
        "topics": [{"topic": "t", "partitions": [partition]}],
    }


def test_a_fetch_of_many_bytes_reads_them_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New bytes are counted, and all records are read when there are enough."""
    with broker(tmp_path / "root") as agent, frames(agent) as client, frames(agent) as other:
        served = agent.parts.broker
        assert served is not None
        fetches = mock.Mock(side_effect=served.fetch_kafka)
        monkeypatch.setattr(served, "fetch_kafka", fetches)
        kafkarequests.create(client, "t")
        batch = kafkarequests.batch([bytes(1_000)])
        kafkarequests.produce(client, "t", 0, batch)
        with ThreadPoolExecutor(1) as pool:
            wanted = fetch_fields(0, min_bytes=50 * len(batch), wait_ms=20_000)
            waiting = pool.submit(other.ask, FETCH, 4, wanted)
            time.sleep(0.2)
            for number in range(2, 51):
                assert not waiting.done(), number
                kafkarequests.produce(client, "t", 0, batch)
            answer = waiting.result(5.0)
        (topic,) = answer.responses
        assert len(topic.partitions[0].records) == 50 * len(batch)
        assert fetches.call_count == 1, "when there are enough"


def test_requests_of_disconnected_clients_end(tmp_path: Path) -> None:
    """They end whatever they have requested, and however long they would have waited."""
    with broker(tmp_path / "root") as agent, frames(agent) as client:
        kafkarequests.create(client, "t")
        kafkarequests.produce(client, "t", 0, kafkarequests.batch(VALUES))
        door = agent.listeners.kafka
        assert door is not None
        wanted = fetch_fields(0, min_bytes=1 << 20, wait_ms=600_000)
        for _ in range(20):
            with frames(agent) as leaver:
                leaver._socket.sendall(Frames.frame(FETCH, 4, 1, wanted))
        wait_until(lambda: len(door._connections) == 1, "their connections have ended")
        assert door._memory.held_bytes == 0


def test_deletions_that_wait_hold_no_thread_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than there are threads, of a topic whose table is torn."""
    monkeypatch.setattr(delete_records, "KAFKA_WAIT_SECONDS", 3.0)
    with broker(tmp_path / "root") as agent, frames(agent) as client:
        kafkarequests.create(client, "t")
        kafkarequests.create(client, "u")
        assert find_coordinator(client) == ErrorCode.none
        log = tmp_path / "root" / "topics" / "t" / "_delta_log"
        (log / f"{1:020}.json").touch()
        for topic in ("t", "u"):
            kafkarequests.produce(client, topic, 0, kafkarequests.batch(VALUES))

        def delete(topic: str) -> ErrorCode:
            with frames(agent) as deleter:
                fields = {
                    "topics": [
                        {"name": topic, "partitions": [{"partition_index": 0, "offset": -1}]}
                    ],
                    "timeout": dt.timedelta(minutes=10),
                }
                (found,) = deleter.ask(21, 2, fields).topics
                code: ErrorCode = found.partitions[0].error_code
                return code

        with ThreadPoolExecutor(24) as pool:
            waiting = [pool.submit(delete, "t") for _ in range(24)]
            time.sleep(0.3)
            assert find_coordinator(client) == ErrorCode.none
            assert commit(client) == ErrorCode.none
            assert not all(each.done() for each in waiting)
            assert {each.result() for each in waiting} == {ErrorCode.request_timed_out}
        assert delete("u") == ErrorCode.none


# ------------------------------------------------------------------------------ room


def test_a_batch_larger_than_all_the_room_is_given_in_turn(tmp_path: Path) -> None:
    """To each that wants it; and afterwards everything is there for others."""
    kafka = KafkaSettings(listen="127.0.0.1:0", request_max_bytes=14 << 20, memory_bytes=16 << 20)
    with broker(tmp_path / "root", kafka=kafka) as agent, frames(agent) as client:
        kafkarequests.create(client, "t")
        batch = kafkarequests.batch([bytes(12 << 20)])
        assert not kafkarequests.produce(client, "t", 0, batch).error_code
        door = agent.listeners.kafka
        assert door is not None

        def sizes() -> list[int]:
            with frames(agent) as reader:
                answers = reader.ask_all([(FETCH, 4, fetch_fields(0))] * 2)
                return [len(each.responses[0].partitions[0].records) for each in answers]

        with ThreadPoolExecutor(4) as pool:
            found = [pool.submit(sizes) for _ in range(4)]
            assert [each.result(20.0) for each in found] == [[len(batch)] * 2] * 4
        wait_until(lambda: door._memory.held_bytes == 0, "all has been given back")


def test_a_client_that_stops_near_the_end_of_a_request_is_dropped(tmp_path: Path) -> None:
    """However much of it was received, other requests get the memory within seconds."""
    kafka = KafkaSettings(listen="127.0.0.1:0", request_max_bytes=100 << 20, memory_bytes=128 << 20)
    with broker(tmp_path / "root", kafka=kafka) as agent, frames(agent) as client:
        kafkarequests.create(client, "t")
        door = agent.listeners.kafka
        assert door is not None
        with frames(agent) as large, frames(agent) as other:
            for stalled, size in ((large, 90 << 20), (other, 1 << 20)):
                stalled._socket.sendall(size.to_bytes(4, "big"))
                stalled._socket.sendall(bytes(size - 1))
            wait_until(lambda: len(door._connections) == 3, "both are there")
            began = time.monotonic()
            batch = kafkarequests.batch([bytes(100_000)])
            assert not kafkarequests.produce(client, "t", 0, batch).error_code
            assert time.monotonic() - began < 20.0


def test_small_replies_do_not_wait_for_a_large_one(tmp_path: Path) -> None:
    """One large reply is made at a time, and it may wait for memory; others go out meanwhile."""
    with broker(tmp_path / "root") as agent, frames(agent) as client, frames(agent) as other:
        kafkarequests.create(client, "t")
        assert find_coordinator(client) == ErrorCode.none
        door = agent.listeners.kafka
        assert door is not None
        asyncio.run_coroutine_threadsafe(door.large_reply_lock.acquire(), door._loop).result(5.0)
        names = [f"g{number}" for number in range(1_500)]
        with ThreadPoolExecutor(1) as pool:
            wanted = {"key_type": 0, "coordinator_keys": names}
            large = pool.submit(other.ask, 10, 4, wanted)
            for _ in range(20):
                assert find_coordinator(client) == ErrorCode.none
            assert not large.done()
            door._loop.call_soon_threadsafe(door.large_reply_lock.release)
            assert len(large.result(10.0).coordinators) == len(names)


def test_offsets_by_time_hold_up_no_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ask, of a table that is slow to say."""
    may_go_on = threading.Event()
    with broker(tmp_path / "root") as agent, frames(agent) as client, ExitStack() as opened:
        kafkarequests.create(client, "t")
        door = agent.listeners.kafka
        assert door is not None
        slow = door.broker.offsets_for_times

        def offsets_for_times(*values: Any) -> Any:
            may_go_on.wait(30.0)
            return slow(*values)

        monkeypatch.setattr(door.broker, "offsets_for_times", offsets_for_times)
        wanted = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": 5}
        topics = [{"name": "t", "partitions": [wanted]}]
        fields = {"replica_id": -1, "isolation_level": 0, "topics": topics}
        askers = [opened.enter_context(frames(agent)) for _ in range(READ_THREADS + 4)]
        pool = opened.enter_context(ThreadPoolExecutor(len(askers)))
        answers = [pool.submit(asker.ask, 2, 6, fields) for asker in askers]
        try:
            time.sleep(0.3)
            read = asyncio.run_coroutine_threadsafe(
                door.run_blocking(WorkerPool.READ, int), door._loop
            )
            assert read.result(5.0) == 0
            assert not any(each.done() for each in answers)
        finally:
            may_go_on.set()
        for each in answers:
            assert each.result(10.0).topics[0].partitions[0].error_code == ErrorCode.none


def test_clients_that_do_not_read_hold_up_no_reads(tmp_path: Path) -> None:
    """However many have asked for megabytes that must be encoded, all reading threads are free."""
    values = [random.Random(each).randbytes(limits.MIB // 8) for each in range(16)]
    with broker(tmp_path / "root") as agent, frames(agent) as client, ExitStack() as opened:
        kafkarequests.create(client, "t", 4)
        with sparklog.connect(agent.address) as log, log.producer() as producer:
            for partition, value in itertools.product(range(4), values):
                producer.send("t", value, partition=partition)
        fields = fetch_fields(0)
        (wanted,) = fields["topics"][0]["partitions"]
        fields["topics"][0]["partitions"] = [wanted | {"partition": each} for each in range(4)]
        door = agent.listeners.kafka
        assert door is not None
        slow = [opened.enter_context(frames(agent)) for _ in range(2 * READ_THREADS)]
        for each in slow:
            each._socket.sendall(Frames.frame(FETCH, 4, 1, fields) * 4)
        unread_bytes = len(slow) * limits.MIB
        wait_until(lambda: door.memory.held_bytes > unread_bytes, "their replies are in memory")
        together = threading.Barrier(READ_THREADS)
        reads = [
            asyncio.run_coroutine_threadsafe(
                door.run_blocking(WorkerPool.READ, together.wait, 20.0), door._loop
            )
            for _ in range(READ_THREADS)
        ]
        assert sorted(each.result(30.0) for each in reads) == list(range(len(reads)))


def test_many_small_batches_are_read_in_portions(tmp_path: Path) -> None:
    """All that fits in, in order, and without an object for each that waits to be sent."""
    with broker(tmp_path / "root") as agent, frames(agent) as client:
        kafkarequests.create(client, "t")
        batch = kafkarequests.batch([b"x"])
        fields = kafkarequests.produce_fields("t", 0, batch)
        for _ in range(60):
            client.ask_all([(kafkarequests.PRODUCE, 9, fields)] * 20)
        (topic,) = client.ask(FETCH, 4, fetch_fields(100)).responses
        found = split([topic.partitions[0].records])
        assert [int.from_bytes(each[:8], "big") for each in found] == list(range(100, 1_200))


def test_connections_beyond_the_bounds_are_closed_at_once(tmp_path: Path) -> None:
    """The bounds hold per address and for all, and open connections continue."""
    kafka = KafkaSettings(listen="127.0.0.1:0", max_connections=3, max_connections_per_address=2)
    with broker(tmp_path / "root", kafka=kafka) as agent:
        host, _, port = agent.kafka_address.rpartition(":")
        ping = Frames.frame(18, 0, 1, {})

        def opened(source: str) -> socket.socket | None:
            stream = socket.create_connection((host, int(port)), 5.0, source_address=(source, 0))
            try:
                stream.sendall(ping)
                if stream.recv(1):
                    return stream
            except ConnectionError:
                pass
            stream.close()
            return None

        links = [opened("127.0.0.1"), opened("127.0.0.1")]
        assert opened("127.0.0.1") is None
        links.append(opened("127.0.0.2"))
        assert opened("127.0.0.3") is None
        for stream in links:
            assert stream is not None
            stream.sendall(ping)
            assert stream.recv(1)
        assert links[0] is not None
        links[0].close()

        def comes_in() -> bool:
            links.append(opened("127.0.0.3"))
            return links[-1] is not None

        wait_until(comes_in, "there is a place")
        for stream in links:
            if stream is not None:
                stream.close()


# ------------------------------------------------------------------------------ many names


def test_repeated_items_are_answered_once(tmp_path: Path) -> None:
    """Otherwise a small request would cause a large reply."""
    with broker(tmp_path / "root") as agent, frames(agent) as client:
        kafkarequests.create(client, "t")
        assert find_coordinator(client) == ErrorCode.none
        resource = {"resource_type": 2, "resource_name": "t", "configuration_keys": None}
        about = {"include_synonyms": True, "include_documentation": True}
        found = client.ask(32, 4, {"resources": [resource] * 3_000, **about})
        assert len(found.results) == 1
        found = client.ask(15, 5, {"groups": ["g"] * 50, "include_authorized_operations": False})
        assert len(found.groups) == 1
        topics = [{"name": "t", "partition_indexes": [0, 1, 0, 0]}]
        group = {"group_id": "g", "member_id": None, "member_epoch": -1, "topics": topics}
        found = client.ask(9, 9, {"groups": [group] * 9, "require_stable": False})
        assert len(found.groups) == 1
        assert [each.partition_index for each in found.groups[0].topics[0].partitions] == [0, 1]


def test_one_request_creates_few_topics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client asks again for the others, and then some more are created."""
    # A request that meets changed metadata is handled again, and creates more.
    monkeypatch.setattr(LeaderMetadata, "is_proven", lambda *_: True)
    wanted = [f"made-{number:02}" for number in range(CREATED_TOPICS + 5)]
    fields = {
        "topics": [{"topic_id": None, "name": name} for name in wanted],
        "allow_auto_topic_creation": True,
        "include_topic_authorized_operations": False,
    }
    settings = TopicSettings(auto_create=True)
    with broker(tmp_path / "root", topics=settings) as agent, frames(agent) as client:
        codes = [each.error_code for each in client.ask(3, 12, fields).topics]
        made = CREATED_TOPICS
        assert codes == [ErrorCode.none] * made + [ErrorCode.leader_not_available] * 5
        codes = [each.error_code for each in client.ask(3, 12, fields).topics]
        assert codes == [ErrorCode.none] * (made + 5)


def test_records_sent_before_a_client_left_are_written(tmp_path: Path) -> None:
    """A producer with acks=0 may disconnect as soon as it has sent."""
    with broker(tmp_path / "root") as agent, frames(agent) as client:
        kafkarequests.create(client, "t")
        sizes = [10, 1_000, 100_000, 1_000_000, 10]
        for size in sizes:
            with frames(agent) as leaver:
                fields = kafkarequests.produce_fields("t", 0, kafkarequests.batch([bytes(size)]))
                leaver._socket.sendall(
                    Frames.frame(kafkarequests.PRODUCE, 9, 1, fields | {"acks": 0}) * 3
                )
        with sparklog.connect(agent.address) as log:
            wait_until(
                lambda: log.describe("t").partitions[0].end == 3 * len(sizes), "all is there"
            )


def test_clients_that_come_at_a_time_are_all_accepted(tmp_path: Path) -> None:
    """The system keeps a burst of connections for as long as the event loop is busy."""
    with broker(tmp_path / "root") as agent, ExitStack() as stack:
        assert agent.listeners.kafka is not None
        released = threading.Event()
        agent.listeners.kafka._loop.call_soon_threadsafe(released.wait, SECONDS)
        host, _, port = agent.kafka_address.rpartition(":")
        try:
            for _ in range(300):
                stack.enter_context(socket.create_connection((host, int(port)), 1.0))
        finally:
            released.set()
        with frames(agent) as client:
            assert find_coordinator(client) == ErrorCode.none


def test_connections_that_have_ended_keep_no_bytes(tmp_path: Path) -> None:
    """Read-ahead and unfinished requests are freed at once, before Python collects cycles."""
    with broker(tmp_path / "root") as agent:
        assert agent.listeners.kafka is not None
        listener = agent.listeners.kafka
        host, _, port = agent.kafka_address.rpartition(":")

        def opened(sent: bytes = b"") -> socket.socket:
            client = socket.create_connection((host, int(port)), 30.0)
            client.sendall(sent)
            return client

        def kept_bytes() -> int:
            wait_until(lambda: not listener.connection_count, "the connections do not end")
            return tracemalloc.get_traced_memory()[0]

        opened().close()
        gc.disable()
        tracemalloc.start()
        try:
            before_bytes = kept_bytes()
            clients = [opened() for _ in range(50)]
            wait_until(lambda: listener.connection_count == 50, "the connections are not accepted")
            for each in clients:
                each.close()
            assert kept_bytes() - before_bytes < 25 * READ_BYTES
            large = opened((16 * limits.MIB).to_bytes(4, "big") + bytes(8 * limits.MIB))
            wait_until(lambda: listener.memory.held_bytes >= 4 * limits.MIB, "nothing arrives")
            large.close()
            assert kept_bytes() - before_bytes < 4 * limits.MIB
        finally:
            tracemalloc.stop()
            gc.enable()
