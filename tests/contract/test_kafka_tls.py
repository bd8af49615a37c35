"""Kafka clients over TLS: those of others, at a real listener.

Promises: clients that trust the CA are served as without TLS; every mistake of a client is named in
the broker's log, and in the client's own error as far as it can be; a certificate that is replaced
disturbs no client.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import aiokafka
import confluent_kafka
import kafka
import pytest
from structlog.testing import capture_logs

from sparklog import errors, kafka_port, status
from sparklog.broker.agent import Agent
from sparklog.broker.kafka import admission
from sparklog.clock import SystemClock
from sparklog.doctor import CheckState, check_broker
from sparklog.listeners import Listener
from sparklog.settings import BrokerSettings, FlightSettings, KafkaSettings, TlsSettings
from sparklog.storage.objects import open_store
from tests.support.certificates import Authority
from tests.support.kafkas import close_leavings
from tests.support.waiting import wait_until

SECONDS: Final = 30.0
LARGE: Final = bytes(range(256)) * 3_600  # larger than what the engine takes in a step
Client = Callable[[str, Authority], None]


@pytest.fixture(autouse=True)
def _leavings() -> Iterator[None]:
    """Otherwise another test of this process has to collect what kafka-python leaves."""
    yield
    close_leavings()


def settings(
    root: Path, files: tuple[str, str], *, protocol: str = "SSL", **more: Any
) -> BrokerSettings:
    """Those of a broker whose Kafka listener has this certificate and key."""
    return BrokerSettings(
        root=str(root),
        flight=FlightSettings(listen="127.0.0.1:0"),
        kafka=KafkaSettings(listen=f"{protocol}://127.0.0.1:0"),
        tls=TlsSettings(certificate=files[0], key=files[1], **more),
    )


@pytest.fixture(name="agent", scope="module")
def _agent(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Agent]:
    """A broker whose Kafka listener uses TLS."""
    with Agent(settings(tmp_path_factory.mktemp("root"), authority.sign("broker"))) as found:
        yield found


def answers(agent: Agent, protocol: str) -> bool:
    """Returns whether the broker answers by that protocol."""
    listener = Listener("any", protocol, agent.kafka_address)
    return kafka_port.answers(listener, timeout_seconds=SECONDS)


# ------------------------------------------------------------------------------ clients


def librdkafka(authority: Authority, **more: str) -> dict[str, str]:
    """The settings of librdkafka; `more` with `_` for dots."""
    given = {name.replace("_", "."): value for name, value in more.items()}
    return {"security.protocol": "SSL", "ssl.ca.location": authority.path} | given


def through_confluent(address: str, authority: Authority, **more: str) -> None:
    """Produces and consumes with confluent-kafka."""
    client: dict[str, Any] = {"bootstrap.servers": address, **librdkafka(authority, **more)}
    producer = confluent_kafka.Producer(client)
    for value in (b"small", LARGE):
        producer.produce("confluent", value, partition=0)
    assert producer.flush(SECONDS) == 0
    consumer = confluent_kafka.Consumer(
        client | {"group.id": "confluent", "auto.offset.reset": "earliest"}
    )
    consumer.subscribe(["confluent"])
    found = [message.value() for message in consumer.consume(2, SECONDS) if message.error() is None]
    consumer.close()
    assert found == [b"small", LARGE]


def through_kafka_python(address: str, authority: Authority) -> None:
    """Produces and consumes with kafka-python."""
    client: dict[str, Any] = {
        "bootstrap_servers": address,
        "security_protocol": "SSL",
        "ssl_cafile": authority.path,
    }
    producer = kafka.KafkaProducer(**client)
    for value in (b"small", LARGE):
        producer.send("python", value, partition=0).get(SECONDS)
    producer.close()
    consumer = kafka.KafkaConsumer(
        "python", **client, auto_offset_reset="earliest", consumer_timeout_ms=int(SECONDS * 1e3)
    )
    found = [next(consumer).value for _ in range(2)]
    consumer.close()
    assert found == [b"small", LARGE]


def through_aiokafka(address: str, authority: Authority) -> None:
    """Produces and consumes with aiokafka."""

    async def run() -> list[bytes]:
        client: dict[str, Any] = {
            "bootstrap_servers": address,
            "security_protocol": "SSL",
            "ssl_context": ssl.create_default_context(cafile=authority.path),
        }
        async with aiokafka.AIOKafkaProducer(**client) as producer:
            for value in (b"small", LARGE):
                await producer.send_and_wait("aio", value, partition=0)
        consumer = aiokafka.AIOKafkaConsumer("aio", **client, auto_offset_reset="earliest")
        async with consumer, asyncio.timeout(SECONDS):
            return [(await consumer.getone()).value for _ in range(2)]

    assert asyncio.run(run()) == [b"small", LARGE]


@pytest.mark.parametrize("client", [through_confluent, through_kafka_python, through_aiokafka])
def test_clients_are_served(agent: Agent, authority: Authority, client: Client) -> None:
    """Records of 5 bytes and of 900 KB, both ways."""
    client(agent.kafka_address, authority)


# ------------------------------------------------------------------------------ mistakes


def failure_of(client: dict[str, str], address: str) -> str:
    """Returns the error of librdkafka in a program that cannot connect."""
    told: list[str] = []
    admin = confluent_kafka.Producer(
        {
            "bootstrap.servers": address,
            "error_cb": lambda error: told.append(str(error)),
            "socket.connection.setup.timeout.ms": 5_000,
            **client,
        }
    )
    wait_until(lambda: admin.poll(0.1) >= 0 and bool(told), "the client reports an error")
    return told[0]


def test_a_client_that_does_not_trust_the_ca(
    agent: Agent, authority: Authority, tmp_path: Path
) -> None:
    """Both sides name the certificate."""
    with capture_logs() as lines:
        told = failure_of(librdkafka(Authority(tmp_path, "another")), agent.kafka_address)
        wait_until(lambda: any("CA" in each.get("reason", "") for each in lines), "no log line")
    assert "certificate" in told


def test_a_client_without_tls(agent: Agent) -> None:
    """The broker's log names the client's setting; the client learns that it was disconnected."""
    with capture_logs() as lines:
        failure_of({"security.protocol": "PLAINTEXT"}, agent.kafka_address)
        wait_until(
            lambda: any("security.protocol=SSL" in each.get("reason", "") for each in lines),
            "no log line",
        )


def test_a_client_with_tls_at_a_listener_without(tmp_path: Path, authority: Authority) -> None:
    """The other way round."""
    plain = settings(tmp_path, ("", ""), protocol="PLAINTEXT")
    with capture_logs() as lines, Agent(plain) as agent:
        told = failure_of(librdkafka(authority), agent.kafka_address)
        wait_until(
            lambda: any("security.protocol=PLAINTEXT" in each.get("reason", "") for each in lines),
            "no log line",
        )
    assert "SSL" in told


def test_certificates_of_clients_are_required(tmp_path: Path, authority: Authority) -> None:
    """A client with one is served; without one, or with one of another CA, it learns why."""
    (tmp_path / "other").mkdir()
    needing = settings(
        tmp_path / "root", authority.sign("mtls"), ca=authority.path, client_auth="required"
    )
    own = authority.sign("alice", is_client=True)
    other = Authority(tmp_path / "other").sign("mallory", is_client=True)
    with capture_logs() as lines, Agent(needing) as agent:
        through_confluent(
            agent.kafka_address,
            authority,
            ssl_certificate_location=own[0],
            ssl_key_location=own[1],
        )
        told = failure_of(librdkafka(authority), agent.kafka_address)
        assert "certificate required" in told
        wait_until(lambda: any("no certificate" in e.get("reason", "") for e in lines), "no line")
        told = failure_of(
            librdkafka(authority, ssl_certificate_location=other[0], ssl_key_location=other[1]),
            agent.kafka_address,
        )
        assert "ssl" in told.lower()
        assert answers(agent, "SSL")


def test_files_that_are_wrong_keep_a_broker_from_starting(
    tmp_path: Path, authority: Authority
) -> None:
    """Before it takes over the root."""
    certificate, key = authority.sign("one")
    wrong = settings(tmp_path, (certificate, key), key_password_file=str(tmp_path / "none"))
    with pytest.raises(errors.BadOption, match="cannot be read"):
        Agent(wrong)
    assert not any(tmp_path.iterdir())


# ------------------------------------------------------------------------------ operation


def test_a_silent_client_is_closed(
    agent: Agent, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection without a handshake does not stay, and others are served beside it."""
    monkeypatch.setattr(admission, "ADMISSION_SECONDS", 0.5)
    counts = agent.listeners.kafka
    assert counts is not None
    before = counts.counts.authentications_failed

    async def knock() -> bytes:
        host, _, port = agent.kafka_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"\x16\x03\x01")
        found = await asyncio.wait_for(reader.read(), SECONDS)
        writer.close()
        return found

    assert asyncio.run(knock()) == b""
    assert counts.counts.authentications_failed == before + 1
    assert answers(agent, "SSL")


def test_status_asks_over_tls(agent: Agent) -> None:
    """`sparklog status` finds the listener; a probe without TLS does not."""
    store = open_store(agent.settings.root)
    report = status.requiring_kafka(
        status.of_root(store, SystemClock(), waits=lambda _leader, _seconds: None)
    )
    assert report.unmet == ""
    assert [each.kafka_listeners for each in report.answered] == [f"SSL://{agent.kafka_address}"]
    assert not answers(agent, "PLAINTEXT")


def test_a_certificate_is_replaced_under_connections(tmp_path: Path, authority: Authority) -> None:
    """A connected client continues, and the next one gets the new certificate."""
    paths = tmp_path / "c.pem", tmp_path / "c.key"

    def copy(name: str) -> bytes:
        for source, target in zip(authority.sign(name), paths, strict=True):
            target.write_bytes(Path(source).read_bytes())
        return paths[0].read_bytes()

    def served(address: str) -> str:
        host, _, port = address.rpartition(":")
        return ssl.get_server_certificate((host, int(port)), ca_certs=authority.path)

    first = copy("first")
    with Agent(settings(tmp_path / "root", (str(paths[0]), str(paths[1])))) as agent:
        client = librdkafka(authority) | {"bootstrap.servers": agent.kafka_address}
        producer = confluent_kafka.Producer(client)
        producer.produce("t", b"before")
        assert producer.flush(SECONDS) == 0
        assert served(agent.kafka_address).encode() == first
        counts = agent.listeners.kafka
        assert counts is not None
        second = copy("second")
        wait_until(
            lambda: served(agent.kafka_address).encode() == second, "the old certificate stays"
        )
        opened = counts.counts.connections_opened
        producer.produce("t", b"after")
        assert producer.flush(SECONDS) == 0
        assert counts.counts.connections_opened == opened  # over the connection of before


@pytest.mark.parametrize(
    ("days", "hosts", "state", "found"),
    [
        (90, ("127.0.0.1",), CheckState.OK, "expires on"),
        (5, ("127.0.0.1",), CheckState.WARN, "expires on"),
        (-1, ("127.0.0.1",), CheckState.FAIL, "has expired"),
        (90, ("k1",), CheckState.FAIL, "is not for 127.0.0.1"),
    ],
)
def test_the_doctor_looks_at_certificates(
    tmp_path: Path,
    authority: Authority,
    days: float,
    hosts: tuple[str, ...],
    state: CheckState,
    found: str,
) -> None:
    """As the listener presents them, so that a file that is not loaded does not count."""
    files = authority.sign("checked", days=days, hosts=hosts)
    with Agent(settings(tmp_path, files)) as agent:
        (line,) = (
            each
            for each in check_broker(open_store(agent.settings.root), SystemClock())
            if each.check == "certificate"
        )
    assert (line.state, found in line.found) == (state, True)
