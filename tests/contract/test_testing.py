"""`sparklog.testing`: a broker that fails on demand, and that stops, crashes and starts again."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import confluent_kafka
import pytest

import sparklog
from sparklog import errors, limits, testing
from sparklog.formats import flight_messages
from tests.support.waiting import wait_until

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
        request = flight_messages.CreateTopic(topic="u", partitions=1)
        with pytest.raises(errors.Retriable, match="a fault of the test"):
            other.connection.attempt("topics.create", request, timeout_seconds=SECONDS)
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


def test_acked_records_survive_a_crash(broker: testing.Broker, log: sparklog.Log) -> None:
    """A crashed broker sends no answer; the next one has all acked records, and others once."""
    address = broker.address
    with log.producer() as producer:
        assert producer.send("t", b"acked").result(SECONDS).offset == 0
        broker.delay_next("put", 0.5, path="wal/")
        pending = producer.send("t", b"pending")
        wait_until(lambda: broker.pending_faults == 0, "the put began")
        broker.crash()
        assert not broker.is_running
        assert not pending.done()
        broker.restart()
        assert broker.address == address
        assert pending.result(SECONDS).offset == 1
    assert values(log) == [b"acked", b"pending"]


@pytest.mark.parametrize(("end", "puts"), [("crash", False), ("stop", True)])
def test_a_crash_leaves_the_store_as_it_was(end: str, puts: bool) -> None:
    """Unlike `stop`, `crash` publishes nothing, and does not mark the broker as stopped."""
    quiet = {
        "janitor.enabled": False,
        "liveness.dead_after_seconds": 240,
        "liveness.heartbeat_seconds": 60,
        "publisher.interval_seconds": 60,
    }
    with testing.broker(settings=quiet) as broker, broker.connect() as log:
        log.create_topic("t")
        send(log, b"a")
        broker.fail_next("put", count=1_000)
        getattr(broker, end)()
        assert (broker.pending_faults < 1_000) == puts


@pytest.mark.parametrize("answer_only", [False, True])
def test_a_connection_that_breaks(
    broker: testing.Broker, log: sparklog.Log, answer_only: bool
) -> None:
    """A batch whose connection breaks, before or after the append, is in the log once."""
    broker.fail_next("append", path="t/0", count=2, answer_only=answer_only)
    broker.fail_next("append", path="u/", count=1)
    assert send(log, b"a") == 0
    assert broker.pending_faults == 1
    assert values(log) == [b"a"]


def test_requests_that_are_refused(broker: testing.Broker, log: sparklog.Log) -> None:
    """A request gets the error of the test's choice; a read breaks and continues."""
    broker.fail_next("append", error=errors.WrongSchema(reason="not this one"))
    with pytest.raises(errors.WrongSchema, match="not this one"):
        send(log, b"a")
    broker.fail_next("action", path="topics.create", error=errors.BadRequest(reason="not now"))
    assert log.topics() == ["t"]
    with pytest.raises(errors.BadRequest, match="not now"):
        log.create_topic("u")
    send(log, b"b")
    broker.fail_next("read", path="t/")
    assert values(log) == [b"b"]
    assert broker.pending_faults == 0


def test_a_refusal_holds_back_later_batches(broker: testing.Broker, log: sparklog.Log) -> None:
    """If the first batch of a producer is refused for now, its next ones do not overtake it."""
    full = errors.QueueFull(queue="q", bytes=1, setting="s")
    for _ in range(20):
        broker.fail_next("append", error=full)
        with log.producer(batch_rows=1, linger_ms=0) as producer:
            futures = [producer.send("t", b"%d" % number) for number in range(10)]
            producer.flush(SECONDS)
        offsets = [future.result().offset for future in futures]
        assert offsets == list(range(offsets[0], offsets[0] + 10))


def test_hooks(broker: testing.Broker, log: sparklog.Log) -> None:
    """Hooks see each request and each answer, and may break the connection."""
    seen: list[tuple[str, str, str, int, int]] = []

    def note(moment: str) -> Callable[[testing.Request], None]:
        def hook(request: testing.Request) -> None:
            rows = -1 if request.rows is None else request.rows.num_rows
            seen.append((moment, request.name, request.topic, request.partition, rows))
            if seen.count(seen[-1]) == 1 and request.name == "append":
                raise testing.ConnectionCut

        return hook

    broker.on_request, broker.on_answer = note("request"), note("answer")
    send(log, b"a")
    assert [each for each in seen if each[1] == "append"] == [
        ("request", "append", "t", 0, 1),
        ("request", "append", "t", 0, 1),
        ("answer", "append", "t", 0, 1),
        ("request", "append", "t", 0, 1),
        ("answer", "append", "t", 0, 1),
    ]
    seen.clear()
    broker.on_answer = None
    assert values(log) == [b"a"]
    assert seen[-1] == ("request", "read", "t", 0, 1)
    assert ("request", "topics.describe", "t", -1, -1) in seen


def test_cut_connections() -> None:
    """Clients of both listeners continue over new connections."""
    with testing.broker(kafka=True) as broker, broker.connect() as log:
        log.create_topic("t", partitions=1)
        admin = socket.create_connection(address_of(broker.kafka_address))
        assert send(log, b"a") == 0
        broker.cut_connections()
        admin.settimeout(SECONDS)
        assert admin.recv(1) == b""
        admin.close()
        assert send(log, b"b") == 1


def address_of(text: str) -> tuple[str, int]:
    """Returns host and port."""
    host, _, port = text.rpartition(":")
    return host, int(port)


@pytest.mark.parametrize(
    ("call", "given", "option"),
    [
        ("fail_next", {"operation": "write"}, "operation"),
        ("fail_next", {"operation": "get", "answer_only": True}, "answer_only"),
        ("fail_next", {"operation": "read", "answer_only": True}, "answer_only"),
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


def test_flushes_do_not_linger() -> None:
    """An ack waits for no other record, unless a test sets the linger: it takes 1 ms, not 11."""

    def linger_seconds(broker: testing.Broker) -> float:
        assert broker._agent is not None
        return broker._agent.parts.writer._bounds.linger_seconds

    with testing.broker() as broker:
        assert linger_seconds(broker) == 0
        broker.restart()
        assert linger_seconds(broker) == 0
    with testing.broker(settings={"writer.linger_ms": 7}) as broker:
        assert linger_seconds(broker) == 0.007


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
