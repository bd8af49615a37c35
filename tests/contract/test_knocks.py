"""Log lines about clients: of another protocol at the Kafka port, and for whom topics are made."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
)
from structlog.testing import capture_logs

import sparklog
from sparklog import errors
from sparklog.broker import agent as agents
from sparklog.broker.agent import Agent
from sparklog.settings import BrokerSettings, FlightSettings, KafkaSettings
from tests.support.waiting import wait_until

SECONDS = 30.0


def settings(root: Path) -> BrokerSettings:
    """Those of a broker with both listeners."""
    return BrokerSettings(
        root=str(root),
        flight=FlightSettings(listen="127.0.0.1:0"),
        kafka=KafkaSettings(listen="127.0.0.1:0"),
    )


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    """A broker with both listeners."""
    with Agent(settings(tmp_path)) as found:
        yield found


def knock(address: str, sent: bytes) -> bytes:
    """Returns the bytes that a client gets which begins with these."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 10.0) as peer:
        peer.sendall(sent)
        answer = b""
        while piece := peer.recv(1_000):
            answer += piece
    return answer


@pytest.mark.parametrize(
    ("sent", "spoken", "answer"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP", b"this is a Kafka port"),
        (b"DELETE /topics HTTP/1.1\r\n\r\n", "HTTP", b"HTTP/1.1 400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "security.protocol=PLAINTEXT", b""),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "Flight clients connect to", b"Flight is at"),
    ],
    ids=["get", "delete", "tls", "grpc"],
)
def test_other_protocols_at_the_kafka_port(
    agent: Agent, sent: bytes, spoken: str, answer: bytes
) -> None:
    """A client of another protocol is answered in its own where that is possible, and logged."""
    with capture_logs() as lines:
        assert answer in knock(agent.kafka_address, sent)
        wait_until(lambda: any("reason" in line for line in lines), "it is logged")
    (line,) = [each for each in lines if "not a Kafka client" in each.get("reason", "")]
    assert spoken in line["reason"]
    assert line["peer"].startswith("127.0.0.1")


@pytest.mark.parametrize(
    ("sent", "begin", "end"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 400 Bad Request\r\n", b"sparklog.connect().\n"),
        (b"POST / HTTP/1.1\r\n\r\n", b"HTTP/1.1 400 Bad Request\r\n", b"sparklog.connect().\n"),
        (b"\x00\x00\x00\x10\x00\x12\x00\x00", b"", b""),
        (b"\x16\x03\x01\x02", b"", b""),
    ],
    ids=["get", "post", "kafka", "tls"],
)
def test_other_protocols_at_the_flight_port(
    agent: Agent, sent: bytes, begin: bytes, end: bytes
) -> None:
    """Clients of HTTP/1 get a text, those of Kafka and TLS nothing; all are logged."""
    with capture_logs() as lines:
        answer = knock(agent.address, sent)
        assert answer.startswith(begin)
        assert answer.endswith(end)
        assert bool(answer) == bool(begin)
        wait_until(lambda: any("reason" in line for line in lines), "it is logged")
    (line,) = [each for each in lines if "reason" in each]
    assert "not a Flight client" in line["event"]
    assert line["peer"].startswith("127.0.0.1")


def test_an_early_kafka_client_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flight is served while the loops over Kafka's records are loaded; Kafka clients wait."""
    loads, proceed = threading.Event(), threading.Event()

    def load() -> None:
        loads.set()
        assert proceed.wait(SECONDS)

    monkeypatch.setattr(agents, "compile_loops", load)
    agent = Agent(settings(tmp_path))
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(agent.start)
        try:
            assert loads.wait(SECONDS)
            with sparklog.connect(agent.address) as log:
                assert log.topics() == []
            (listener,) = agent.listeners.kafka_advertised
            with socket.create_connection((listener.host, listener.port), SECONDS) as peer:
                peer.sendall(struct.pack(">ihhih", 10, 18, 0, 1, -1))
                assert not select.select([peer], [], [], 0.1)[0]
                proceed.set()
                assert peer.recv(8, socket.MSG_WAITALL)[4:] == b"\0\0\0\1"
        finally:
            proceed.set()
            starting.result(SECONDS)
            agent.stop()


@pytest.mark.parametrize("listener", ["kafka", "flight"])
@pytest.mark.parametrize("how", ["closed", "reset", "half closed"])
def test_a_connection_that_sends_nothing_is_not_logged(
    agent: Agent, listener: str, how: str
) -> None:
    """Health checks of load balancers connect, and close or reset the connection at once."""
    address = agent.kafka_address if listener == "kafka" else agent.address
    host, _, port = address.rpartition(":")
    with capture_logs() as lines:
        for _ in range(5):
            with socket.create_connection((host, int(port)), 10.0) as peer:
                if how == "reset":
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                elif how == "half closed":
                    peer.shutdown(socket.SHUT_WR)
                    assert peer.recv(1) == b""
        knock(address, b"GET / HTTP/1.1\r\n\r\n")  # accepted after them, and logged
        wait_until(lambda: any("HTTP" in each.get("reason", "") for each in lines), "it is logged")
    assert ["HTTP" in each.get("reason", "") for each in lines] == [True]


def test_many_that_knock_at_the_flight_port_fill_no_log(agent: Agent) -> None:
    """There is a line in a second, with the number of those that have none."""
    with capture_logs() as lines:
        deadline = time.monotonic() + 10.0
        while not any("lines_left_out" in line for line in lines):
            knock(agent.address, b"GET / HTTP/1.1\r\n\r\n")
            assert time.monotonic() < deadline
    assert len(lines) < 12


def test_a_client_that_wants_sasl_is_logged(agent: Agent) -> None:
    """Its error names SASL, and the log has the mechanism and the client."""
    failures: list[str] = []
    given: dict[str, Any] = {
        "bootstrap.servers": agent.kafka_address,
        "client.id": "secret",
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": "u",
        "sasl.password": "p",
        "reconnect.backoff.ms": 500,
        "log_level": 0,
        "error_cb": lambda error: failures.append(str(error)),
    }
    client = AdminClient(given)
    with capture_logs() as lines:
        wait_until(lambda: bool(client.poll(0.05) or failures), "the client is refused")
    assert "SASL" in failures[0]
    line = next(each for each in lines if "refused" in each["event"])
    assert line["client"] == "'secret' at 127.0.0.1"
    assert "SASL 'SCRAM-SHA-256'" in line["reason"]
    assert "security.protocol=PLAINTEXT" in line["reason"]


def test_many_wrong_clients_do_not_fill_the_log(agent: Agent) -> None:
    """A few of a hundred clients in a second are logged one by one; the others are counted."""
    with capture_logs() as lines:
        for _ in range(100):
            knock(agent.kafka_address, b"GET / HTTP/1.1\r\n\r\n")
        wait_until(lambda: any("connections" in line for line in lines), "they are counted")
    assert len(lines) < 60


def changes(lines: list[MutableMapping[str, Any]]) -> list[tuple[str, str, dict[str, Any]]]:
    """Returns (event, client, change) of the log lines about topics."""
    left_out = ("event", "log_level", "topic", "client")
    return [
        (each["event"], each["client"], {k: v for k, v in each.items() if k not in left_out})
        for each in lines
        if each.get("topic") == "t" and "client" in each
    ]


def test_changes_by_a_kafka_client_are_logged(agent: Agent) -> None:
    """Each has a line with the client; one that is refused or only checked has none."""
    admin = AdminClient({"bootstrap.servers": agent.kafka_address, "client.id": "ops"})
    resource = ConfigResource(
        ConfigResource.Type.TOPIC,
        "t",
        incremental_configs=[
            ConfigEntry(
                "retention.ms",
                "60000",
                incremental_operation=AlterConfigOpType.SET,
            )
        ],
    )
    with capture_logs() as lines:
        for checks, error in ((True, None), (False, None), (False, "exists")):
            (made,) = admin.create_topics([NewTopic("t", 2)], validate_only=checks).values()
            with pytest.raises(KafkaException, match=error) if error else nullcontext():
                made.result(SECONDS)
        for checks in (True, False):
            (done,) = admin.incremental_alter_configs([resource], validate_only=checks).values()
            done.result(SECONDS)
            (done,) = admin.create_partitions(
                [NewPartitions("t", 3)], validate_only=checks
            ).values()
            done.result(SECONDS)
        (gone,) = admin.delete_topics(["t"]).values()
        gone.result(SECONDS)
    by = "'ops' at 127.0.0.1"
    assert changes(lines) == [
        ("created a topic", by, {"partitions": 2}),
        ("altered a topic", by, {"config": {"retention.ms": "60000"}}),
        ("added partitions to a topic", by, {"before": 2, "partitions": 3}),
        ("deleted a topic", by, {"partitions": 3}),
    ]


def test_changes_by_a_native_client_are_logged(agent: Agent) -> None:
    """Each has a line with the client's address; a topic that existed was not created."""
    with sparklog.connect(agent.address) as log, capture_logs() as lines:
        log.create_topic("t", partitions=2)
        log.create_topic("t", partitions=2, if_absent=True)
        log.alter("t", {"retention.ms": "60000"})
        log.alter("t", {"retention.ms": None})
        log.add_partitions("t", 3)
        log.delete_topic("t")
        with pytest.raises(errors.UnknownTopic):
            log.delete_topic("t")
    found = changes(lines)
    assert [(event, facts) for event, _, facts in found] == [
        ("created a topic", {"partitions": 2}),
        ("altered a topic", {"config": {"retention.ms": "60000"}}),
        ("altered a topic", {"config": {"retention.ms": None}}),
        ("added partitions to a topic", {"before": 2, "partitions": 3}),
        ("deleted a topic", {"partitions": 3}),
    ]
    assert all(client.startswith("127.0.0.1:") for _, client, _ in found)


def test_a_topic_that_a_client_asked_for_is_logged(agent: Agent) -> None:
    """The line says which client, where, and how many partitions; once, and none for its next."""
    given = {"bootstrap.servers": agent.kafka_address, "client.id": "curious"}
    producer = confluent_kafka.Producer(given)
    with capture_logs() as lines:
        for _ in range(2):
            producer.produce("made", b"a")
            assert producer.flush(20) == 0
    (line,) = [each for each in lines if "auto_create" in each["event"]]
    assert (line["topic"], line["partitions"]) == ("made", 4)
    assert line["client"] == "'curious' at 127.0.0.1"
