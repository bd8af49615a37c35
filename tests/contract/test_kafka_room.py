"""The Kafka door at a broker with little room: who waits, and what its loop does not do."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

import sparklog
from sparklog import limits, recordbatch
from sparklog.broker.writer import Writer
from sparklog.settings import PublisherSettings, WriterSettings
from tests.support import kafkarequests
from tests.support.kafkas import Frames, broker, frames
from tests.support.waiting import wait_until

UNPUBLISHED = PublisherSettings(interval_seconds=600, publish_bytes=1 << 30, unpublished_bytes=1)
"""One batch, and then none until somebody has it published."""
VALUES = [bytes(1_000)] * 10


def find_coordinator(client: Frames) -> ErrorCode:
    """Of group g."""
    answer = client.ask(10, 4, {"key_type": 0, "coordinator_keys": ["g"]})
    code: ErrorCode = answer.coordinators[0].error_code
    return code


def commit(client: Frames) -> ErrorCode:
    """Of an offset of group g, which has no members."""
    fields = kafkarequests.commit_fields("g", "t", 0, 1)
    code: ErrorCode = client.ask(8, 8, fields).topics[0].partitions[0].error_code
    return code


def test_producers_that_wait_for_room_hold_up_nobody_else(tmp_path: Path) -> None:
    """More of them than there are threads; and they go on once there is room."""
    with broker(tmp_path / "root", publisher=UNPUBLISHED) as agent, frames(agent) as client:
        kafkarequests.create(client, "t")
        assert find_coordinator(client) == ErrorCode.none
        batch = kafkarequests.batch(VALUES)
        assert kafkarequests.produce(client, "t", 0, batch).base_offset == 0
        waiting = 2 * limits.KAFKA_READ_THREADS
        with ThreadPoolExecutor(waiting) as pool:

            def produce() -> Any:
                with frames(agent) as producer:
                    return kafkarequests.produce(producer, "t", 0, batch)

            answers = [pool.submit(produce) for _ in range(waiting)]
            time.sleep(0.2)
            began = time.monotonic()
            assert find_coordinator(client) == ErrorCode.none
            assert commit(client) == ErrorCode.none
            assert time.monotonic() - began < 5.0
            assert not any(each.done() for each in answers)
            with sparklog.connect(agent.address) as log:

                def published() -> bool:
                    log.flush_to_table()
                    return all(each.done() for each in answers)

                wait_until(published, "all have found room")
            found = sorted(each.result().base_offset for each in answers)
        assert found == [len(VALUES) * (1 + number) for number in range(waiting)]


def test_the_loop_leads_no_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where one request fills the queue all by itself, again and again, either."""
    leaders = set()
    flush = Writer.flush

    def flush_here(writer: Writer) -> int:
        leaders.add(threading.current_thread().name)
        return flush(writer)

    monkeypatch.setattr(Writer, "flush", flush_here)
    small = WriterSettings(queue_bytes=1)
    with broker(tmp_path / "root", writer=small) as agent, frames(agent) as client:
        kafkarequests.create(client, "t", 4)
        batch = kafkarequests.batch(VALUES)
        leaders.clear()
        fields = kafkarequests.produce_fields("t", 0, batch)
        partitions = [{"index": each, "records": batch} for each in range(4)]
        fields["topic_data"][0]["partition_data"] = partitions
        (topic,) = client.ask(kafkarequests.PRODUCE, 9, fields).responses
        assert [each.error_code for each in topic.partition_responses] == [ErrorCode.none] * 4
        assert "sparklog-kafka-acks" in leaders
        assert "sparklog-kafka" not in leaders


def test_what_is_queued_becomes_durable_while_the_rest_finds_no_room(tmp_path: Path) -> None:
    """Of a request that wants no answer, where nobody else writes."""
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


@pytest.mark.parametrize("codec", [each for each in recordbatch.Codec if each])
def test_the_loop_takes_little_out_of_compression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: recordbatch.Codec
) -> None:
    """However small a batch is that holds much."""
    checked: dict[str, int] = {}
    check = recordbatch.check

    def check_here(data: bytes, **bounds: int) -> recordbatch.Checked:
        found = check(data, **bounds)
        checked[threading.current_thread().name] = len(found.records)
        return found

    monkeypatch.setattr(recordbatch, "check", check_here)
    batch = kafkarequests.batch([bytes(limits.KAFKA_QUICK_RECORDS_BYTES)], codec)
    assert len(batch) <= limits.KAFKA_QUICK_BYTES
    with broker(tmp_path / "root") as agent, frames(agent) as client:
        kafkarequests.create(client, "t")
        assert kafkarequests.produce(client, "t", 0, batch).error_code == ErrorCode.none
        assert "sparklog-kafka" not in checked
        assert max(checked.values()) > limits.KAFKA_QUICK_RECORDS_BYTES
        small = kafkarequests.batch([bytes(1_000)], codec)
        assert kafkarequests.produce(client, "t", 0, small).error_code == ErrorCode.none
        assert checked["sparklog-kafka"] > 1_000
