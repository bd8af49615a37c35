"""Native clients over TLS, at real brokers.

Promises: clients that trust the CA work as without TLS; every mistake is named by an error of the
client and a line in the broker's log; programs with access to the root find the CA there; each
client gets the addresses of the listener that it has connected to.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pyarrow.flight as flight
import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

import sparklog
from sparklog import errors, status
from sparklog.broker.agent import Agent
from sparklog.cli import app
from sparklog.client.connection import ask
from sparklog.clock import SystemClock
from sparklog.doctor import CheckState, check_certificates
from sparklog.formats.flight_messages import Empty
from sparklog.listeners import Listener
from sparklog.security.credentials import VARIABLES, Security
from sparklog.settings import (
    BrokerSettings,
    FlightSettings,
    KafkaSettings,
    TlsSettings,
)
from tests.support.certificates import Authority
from tests.support.waiting import wait_until

LARGE = bytes(range(256)) * 20_000  # many records of TLS, and more than a window


def settings(root: Path, files: tuple[str, str], **more: Any) -> BrokerSettings:
    """Those of a broker with a plaintext listener and one with TLS."""
    return BrokerSettings(
        root=str(root),
        flight=FlightSettings(listen="OUT=SSL://127.0.0.1:0,LOCAL=PLAINTEXT://127.0.0.1:0"),
        kafka=KafkaSettings(listen="SSL://127.0.0.1:0"),
        tls=TlsSettings(certificate=files[0], key=files[1], **more),
    )


@pytest.fixture(name="agent", scope="module")
def _agent(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Agent]:
    with Agent(settings(tmp_path_factory.mktemp("root"), authority.sign("broker"))) as found:
        yield found


def plain_of(agent: Agent) -> str:
    """The address of the listener without TLS."""
    (found,) = (each for each in agent.listeners.flight_advertised if not each.has_tls)
    return found.client_address


def test_clients_work_as_without_tls(agent: Agent, authority: Authority) -> None:
    """Records of all sizes, as a stream, a group, a table and one by one."""
    assert agent.address.startswith("tls://127.0.0.1:")
    with sparklog.connect(agent.address, security=Security(ca=authority.path)) as log:
        log.create_topic("sizes", partitions=1)
        with log.producer() as producer:
            sent = [b"", b"small", LARGE, *[b"%d" % number for number in range(1_000)]]
            futures = [producer.send("sizes", value) for value in sent]
            assert [each.result().offset for each in futures] == [*range(len(sent))]
        with log.consumer("sizes", group="readers", follow=False) as consumer:
            assert [each.value for each in consumer] == sent
        assert log.read("sizes").num_rows == len(sent)


def test_each_client_gets_the_addresses_of_its_listener(
    agent: Agent, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cluster, a client over TLS would otherwise be sent to a port without."""
    monkeypatch.setenv(VARIABLES["ca"], authority.path)
    for address in (agent.address, plain_of(agent)):
        cluster = ask(address, "cluster", Empty(), timeout_seconds=10)
        assert [each.address for each in cluster.brokers] == [address]


def logged(agent: Agent, address: str, **more: Any) -> tuple[errors.SparklogError, str]:
    """The error of a client that connects there, and what the broker logs."""
    with capture_logs() as logs:
        agent.listeners.flight._server._logged_at = -1e9  # type: ignore[union-attr]
        with pytest.raises(errors.SparklogError) as raised:
            sparklog.connect(address, security=Security(**more))
        wait_until(lambda: any("peer" in line for line in logs), "a line in the log")
    return raised.value, next(line["reason"] for line in logs if "peer" in line)


def test_mistakes_are_named_on_both_sides(
    agent: Agent, authority: Authority, tmp_path: Path
) -> None:
    """Also where one side uses TLS, and the other does not."""
    other = Authority(tmp_path, "other")
    error, reason = logged(agent, agent.address, ca=other.path)
    assert isinstance(error, errors.BrokerNotTrusted)
    assert "name the file of its CA" in str(error)
    assert reason == "the client does not trust the broker's certificate: it needs the CA"

    error, reason = logged(agent, agent.address.removeprefix("tls://"))
    assert isinstance(error, errors.WrongPort)
    assert f"this port uses TLS: connect to {agent.address}" in str(error)
    assert reason == "the client does not use TLS"

    plain = plain_of(agent)
    error, reason = logged(agent, f"tls://{plain}", ca=authority.path)
    assert isinstance(error, errors.WrongPort)
    assert f"connect to {plain} without tls://" in str(error)
    assert reason == "it uses TLS, and this port does not"

    with pytest.raises(errors.WrongPort, match="it is the Kafka port; Flight is at tls://"):
        sparklog.connect(f"tls://{agent.kafka_address}", security=Security(ca=authority.path))
    with pytest.raises(errors.BadOption, match="the file cannot be read"):
        sparklog.connect(agent.address, security=Security(ca=str(tmp_path / "none.pem")))


def test_clients_of_others_without_tls_hear_the_reason(agent: Agent) -> None:
    """gRPC's clients in the debug text of their error, a browser as a page."""
    address = agent.address.removeprefix("tls://")
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary("/arrow.flight.protocol.FlightService/ListActions")
        with pytest.raises(grpc.RpcError) as raised:
            call(b"", timeout=10)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), 10) as peer:
        peer.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = peer.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 400")
    assert agent.address.encode() in answer


def test_a_certificate_for_another_host_is_refused(tmp_path: Path, authority: Authority) -> None:
    """The error names the host, and the broker has warned when it started."""
    files = authority.sign("elsewhere", hosts=("broker.example.org",))
    with capture_logs() as logs, Agent(settings(tmp_path, files)) as agent:
        with pytest.raises(errors.BrokerNotTrusted, match="connect by a name that it has"):
            sparklog.connect(agent.address, security=Security(ca=authority.path))
        report = status.of_address(plain_of(agent))
        checks = [*check_certificates(report, SystemClock())]
    warned = [each["listener"] for each in logs if "lacks the host" in each["event"]]
    assert warned == ["OUT=SSL://127.0.0.1:0", "SSL://127.0.0.1:0"]
    assert [each.state for each in checks] == [CheckState.FAIL] * 2  # Flight and Kafka


def test_certificates_of_clients(tmp_path: Path, authority: Authority) -> None:
    """A broker that requires one refuses others, and says so to the client."""
    files = authority.sign("broker")
    own = authority.sign("client", is_client=True)
    demanding = settings(tmp_path, files, ca=authority.path, client_auth="required")
    with Agent(demanding) as agent:
        error, reason = logged(agent, agent.address, ca=authority.path)
        assert isinstance(error, errors.BrokerNotTrusted)
        assert "certificate required" in str(error)
        assert reason == "the client has no certificate, and the listener requires one"
        security = Security(ca=authority.path, certificate=own[0], key=own[1])
        with sparklog.connect(agent.address, security=security) as log:
            assert log.topics() == []


def test_programs_with_access_to_the_root_find_the_ca_there(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Notebooks, commands and the members of a cluster need no setting of their own."""
    for variable in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    root = tmp_path / "root"
    run = CliRunner()
    refused = run.invoke(app, ["security", "set-ca", authority.sign("x")[1], "--root", str(root)])
    assert refused.exit_code
    assert "it contains no valid certificate" in refused.stderr
    found = run.invoke(app, ["security", "set-ca", authority.path, "--root", str(root)])
    assert found.exit_code == 0, found.stderr
    files = authority.sign("broker")
    agents = [
        Agent(
            BrokerSettings(
                root=str(root),
                id=number,
                flight=FlightSettings(listen="SSL://127.0.0.1:0"),
                kafka=KafkaSettings(listen=""),
                tls=TlsSettings(certificate=files[0], key=files[1]),
            ),
            ask=ask,
        )
        for number in (1, 2)
    ]
    for agent in agents:
        agent.start()
    try:
        with sparklog.connect(root) as log:
            log.create_topic("orders", partitions=4)
            with log.producer() as producer:
                for number in range(40):
                    producer.send("orders", b"%d" % number, partition=number % 4)
            with log.consumer("orders", group="readers", follow=False) as consumer:
                assert len([*consumer]) == 40
        described = run.invoke(app, ["cluster", "describe", "--root", str(root)])
        assert described.exit_code == 0
        assert described.stdout.count("tls://") == 2
        drained = run.invoke(app, ["broker", "drain", "--id", "2", "--root", str(root)])
        assert drained.exit_code == 0, drained.stderr
    finally:
        for agent in agents:
            agent.stop("test")


def test_new_certificates_are_for_new_connections(tmp_path: Path, authority: Authority) -> None:
    """A stream that is open continues with the old one."""
    old, new = authority.sign("old", days=20), authority.sign("new", days=40)
    shown = [tmp_path / "broker.pem", tmp_path / "broker.key"]
    for at, source in zip(shown, old, strict=True):
        at.write_bytes(Path(source).read_bytes())
    with Agent(settings(tmp_path / "root", (str(shown[0]), str(shown[1])))) as agent:
        security = Security(ca=authority.path)

        def served() -> str:
            host, _, port = agent.address.removeprefix("tls://").partition(":")
            return ssl.get_server_certificate((host, int(port)))

        with sparklog.connect(agent.address, security=security) as log:
            log.create_topic("orders", partitions=1)
            producer = log.producer()
            producer.send("orders", b"coffee").result(timeout=10)
            consumer = log.consumer("orders", start="earliest")
            assert next(iter(consumer)).value == b"coffee"
            streams = agent.listeners.flight
            assert streams is not None
            opened = streams.calls
            assert served() == Path(old[0]).read_text()
            for at, source in zip(shown[::-1], new[::-1], strict=True):
                at.write_bytes(Path(source).read_bytes())
            wait_until(lambda: served() == Path(new[0]).read_text(), "the new certificate")
            producer.send("orders", b"tea").result(timeout=10)
            assert next(iter(consumer)).value == b"tea"
            assert streams.calls == opened, "a stream was opened again"
            producer.close()
            consumer.close()


def test_flight_clients_of_others(agent: Agent, authority: Authority) -> None:
    """Arrow's own client lists the actions over TLS."""
    client = flight.FlightClient(
        f"grpc+{agent.address}", tls_root_certs=Path(authority.path).read_bytes()
    )
    assert "topics.create" in {each.type for each in client.list_actions()}
    client.close()


def test_listeners_are_named_in_the_status(agent: Agent) -> None:
    """With their protocols and advertised addresses."""
    report = status.of_address(plain_of(agent))
    assert report.broker is not None
    out, local = agent.listeners.flight_advertised
    assert report.broker.flight_listeners == f"{out},{local}"
    assert out == Listener("OUT", "SSL", agent.address.removeprefix("tls://"))
