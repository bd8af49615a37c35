"""`sparklog.testing`: a broker whose store fails on demand, and that stops and starts again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import confluent_kafka
import pytest

import sparklog
from sparklog import errors, limits, testing

SECONDS = 30.0


@pytest.fixture(name="broker")
def _broker() -> Iterator[testing.Broker]:
    with testing.broker() as broker:
        yield broker


@pytest.fixture(name="log")
def _log(broker: testing.Broker) -> sparklog.Log:
    log = broker.connect()
    log.create_topic("t", partitions=1)
    return log


def send(log: sparklog.Log, value: bytes) -> int:
    """Sends a record, and returns its offset once it is durable."""
    with log.producer() as producer:
        return producer.send("t", value).result(SECONDS).offset


def values(log: sparklog.Log) -> list[bytes]:
    """All values of the topic."""
    found: list[bytes] = log.read("t")["value"].to_pylist()
    return found


def test_records_survive_a_restart(broker: testing.Broker, log: sparklog.Log) -> None:
    """A restarted broker has its records and its address, and clients go to it again."""
    address = broker.address
    assert send(log, b"a") == 0
    broker.stop()
    assert not broker.is_running
    with pytest.raises(errors.BrokerUnavailable):
        sparklog.connect(address)
    broker.restart()
    assert (broker.is_running, broker.address) == (True, address)
    assert send(log, b"b") == 1
    broker.restart()
    assert values(log) == [b"a", b"b"]
    log.flush_to_table()
    assert log.describe("t").partitions[0].published == 2


@pytest.mark.parametrize(("answer_only", "count"), [(False, 2), (True, 1)])
def test_failing_puts_are_tried_again(
    broker: testing.Broker, log: sparklog.Log, answer_only: bool, count: int
) -> None:
    """A put that fails, or whose answer is lost, costs no record and doubles none."""
    broker.fail_next("put", path="wal/", count=count, answer_only=answer_only)
    assert send(log, b"a") == 0
    assert broker.pending_faults == 0
    assert values(log) == [b"a"]


def test_an_error_that_does_not_pass(
    broker: testing.Broker, log: sparklog.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that keeps failing refuses a change of the metadata, which is possible afterwards."""
    monkeypatch.setattr(limits, "ACTION_TIMEOUT_SECONDS", 1.0)
    with broker.connect() as other:
        broker.fail_next("put", path="meta/", count=1_000_000)
        other.connection._timeout_seconds = 1.0
        with pytest.raises(errors.Retriable, match="a fault of the test"):
            other.create_topic("u")
    assert 0 < broker.pending_faults < 1_000_000
    broker.clear_faults()
    assert broker.pending_faults == 0
    log.create_topic("u")
    assert log.topics() == ["t", "u"]


def test_own_errors(broker: testing.Broker, log: sparklog.Log) -> None:
    """An error of the test's choice is raised by the store: here a full one."""
    full = errors.StorageFull(root="memory", free_bytes=0, reserve_bytes=1)
    broker.fail_next("put", path="wal/", error=full)
    assert send(log, b"a") == 0
    assert broker.pending_faults == 0


def test_delays(broker: testing.Broker, log: sparklog.Log) -> None:
    """An ack waits for a slow put."""
    broker.delay_next("put", 0.5, path="wal/")
    began = time.monotonic()
    send(log, b"a")
    assert 0.5 <= time.monotonic() - began < SECONDS


@pytest.mark.parametrize(
    ("call", "given", "option"),
    [
        ("fail_next", {"operation": "write"}, "operation"),
        ("fail_next", {"operation": "get", "answer_only": True}, "answer_only"),
        ("fail_next", {"operation": "put", "count": 0}, "count"),
        ("fail_next", {"operation": "put", "path": None}, "path"),
        ("delay_next", {"operation": "put", "seconds": -1}, "seconds"),
        ("delay_next", {"operation": None, "seconds": 1}, "operation"),
    ],
)
def test_wrong_faults(
    broker: testing.Broker, call: str, given: dict[str, Any], option: str
) -> None:
    """A fault that cannot happen is refused."""
    with pytest.raises(errors.BadOption) as raised:
        getattr(broker, call)(**given)
    assert raised.value.facts["option"] == option
    assert broker.pending_faults == 0


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings are given by dotted name, and not taken from the environment."""
    monkeypatch.setenv("SPARKLOG_TOPICS_DEFAULT_PARTITIONS", "7")
    with (
        testing.broker(settings={"topics.default_partitions": 3}) as broker,
        broker.connect() as log,
    ):
        assert len(log.create_topic("t").partitions) == 3
    with testing.broker() as broker:
        assert len(broker.connect().create_topic("t").partitions) != 7
    with (
        pytest.raises(errors.UnknownOption),
        testing.broker(settings={"topics.default_partition": 3}),
    ):
        pass


def test_kafka_clients() -> None:
    """With `kafka`, Kafka's clients are served, before and after a restart."""
    with testing.broker(kafka=True) as broker:
        broker.connect().create_topic("t", partitions=1)
        for number in range(2):
            producer = confluent_kafka.Producer({"bootstrap.servers": broker.kafka_address})
            producer.produce("t", b"%d" % number)
            assert producer.flush(SECONDS) == 0
            broker.restart()
        assert values(broker.connect()) == [b"0", b"1"]


def test_brokers_are_apart(broker: testing.Broker, log: sparklog.Log) -> None:
    """Two brokers of one process share nothing."""
    with testing.broker() as other:
        assert other.address != broker.address
        assert other.connect().topics() == []
        assert repr(other) == f"<sparklog.testing.Broker at {other.address}>"
    assert repr(other) == "<sparklog.testing.Broker stopped>"
    assert log.topics() == ["t"]
