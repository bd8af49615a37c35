"""The port for metrics with TLS and logins: Prometheus, probes, and hostile clients."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparklog import errors
from sparklog.broker import login_failures
from sparklog.broker.agent import Agent
from sparklog.listeners import Listener, parse
from sparklog.security import users
from sparklog.security.acl import CLUSTER_NAME, Operation, ResourceType
from sparklog.security.state import Mode
from sparklog.settings import (
    FlightSettings,
    KafkaSettings,
    MetricsSettings,
    SecuritySettings,
    TlsSettings,
    load_settings,
)
from sparklog.storage.objects import LocalStore
from tests.support.acls import acl
from tests.support.certificates import Authority
from tests.support.kafkas import broker
from tests.support.secured import follow_acls, see
from tests.support.users import PASSWORD, add_alice, change_users

SECONDS = 10.0
ALLOWED = acl(ResourceType.CLUSTER, CLUSTER_NAME, Operation.DESCRIBE, principal="User:alice")


@pytest.fixture(autouse=True)
def _quick_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has failed logins answered soon."""
    monkeypatch.setattr(login_failures, "FAILURE_SECONDS", (0.01, 0.02))


@contextlib.contextmanager
def serving(
    folder: Path, authority: Authority, protocol: str = "SASL_SSL", **tls: str
) -> Iterator[Agent]:
    """Yields a broker with user alice and an audit; its other listeners have neither TLS nor
    logins.
    """
    add_alice(LocalStore(folder / "root"))
    certificate, key = (
        shutil.copy(each, folder / Path(each).name) for each in authority.sign("broker")
    )
    with broker(
        folder / "root",
        kafka=KafkaSettings(listen=""),
        flight=FlightSettings(listen="127.0.0.1:0"),
        metrics=MetricsSettings(listen=f"{protocol}://127.0.0.1:0"),
        security=SecuritySettings(audit_file=str(folder / "audit.json")),
        tls=TlsSettings(certificate=str(certificate), key=str(key), **tls),  # type: ignore[arg-type]
    ) as agent:
        yield agent


def listener_of(agent: Agent) -> Listener:
    """Returns the listener of the port for metrics."""
    (found,) = parse(agent.metrics_address)
    return found


def get(
    agent: Agent,
    path: str = "/metrics",
    *,
    ca: str = "",
    user: str = "",
    password: str = PASSWORD,
    header: str = "",
    client: tuple[str, str] | None = None,
) -> tuple[int, str]:
    """Returns the status and the body of a response."""
    address = listener_of(agent).address
    connection = http.client.HTTPConnection(address, timeout=SECONDS)
    if ca:
        context = ssl.create_default_context(cafile=ca)
        context.set_alpn_protocols(["h2", "http/1.1"])  # as Prometheus does
        if client is not None:
            context.load_cert_chain(*client)
        connection = http.client.HTTPSConnection(address, timeout=SECONDS, context=context)
    if user:
        header = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
    with contextlib.closing(connection):
        connection.connect()
        if ca:
            assert isinstance(connection.sock, ssl.SSLSocket)
            assert connection.sock.selected_alpn_protocol() == "http/1.1"
        connection.request("GET", path, headers={"authorization": header} if header else {})
        response = connection.getresponse()
        if response.status == 401:
            assert response.headers["www-authenticate"].startswith("Basic ")
        return response.status, response.read().decode()


def test_scrapes_log_in_over_https(tmp_path: Path, authority: Authority) -> None:
    """Promise: `/metrics` asks for a user, and probes for none; the password may be remembered.

    The audit has one line for a program that scrapes again and again.
    """
    with serving(tmp_path, authority) as agent:
        assert listener_of(agent).url.startswith("https://127.0.0.1:")
        ca = authority.path
        for path in ("/healthz", "/readyz", "/"):
            assert get(agent, path, ca=ca)[0] == 200
        assert get(agent, ca=ca)[0] == 401
        assert get(agent, ca=ca, header="Bearer x")[0] == 401
        assert get(agent, ca=ca, header="Basic !")[0] == 401
        assert get(agent, ca=ca, user="alice", password="wrong")[0] == 401
        assert get(agent, ca=ca, user="bob")[0] == 401
        for _ in range(3):
            status, text = get(agent, ca=ca, user="alice")
            assert status == 200
            assert "sparklog_build_info" in text
        assert get(agent, ca=ca, user="alice", password="wrong")[0] == 401
        change_users(LocalStore(tmp_path / "root"), users.disabled("alice", True))
        see(agent)
        assert get(agent, ca=ca, user="alice")[0] == 401
    lines = [json.loads(each) for each in (tmp_path / "audit.json").read_text().splitlines()]
    logins = [each for each in lines if each["event"] == "login"]
    assert [each.get("count") for each in logins if each["outcome"] == "success"] == [None, 2]
    failed = [each.get("principal") for each in logins if each["outcome"] == "failure"]
    assert {*failed} == {None, "User:alice", "User:bob"}


def test_metrics_need_describe_on_the_cluster(tmp_path: Path, authority: Authority) -> None:
    """Promise: while ACLs are enforced; observed, the refusal is only noted. Without a login there
    are no rights to look at.
    """
    with serving(tmp_path, authority, "SASL_PLAINTEXT") as agent:
        follow_acls(agent)
        status, text = get(agent, user="alice")
        assert status == 403
        assert "DESCRIBE" in text
        assert get(agent, "/readyz")[0] == 200
        follow_acls(agent, ALLOWED)
        assert get(agent, user="alice")[0] == 200
        follow_acls(agent, mode=Mode.OBSERVE)
        denied = agent._access.authorization.denied
        assert get(agent, user="alice")[0] == 200
        assert agent._access.authorization.denied == denied + 1


def test_metrics_are_served_while_users_cannot_be_read(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: the last known users and ACLs decide, as the metrics show the trouble."""
    with serving(tmp_path, authority, "SASL_PLAINTEXT") as agent:
        follow_acls(agent, ALLOWED)
        monkeypatch.setattr(agent._access.watch, "_stale_seconds", 0.0)
        assert agent._access.watch.is_stale
        status, text = get(agent, user="alice")
        assert status == 200
        assert 'sparklog_work_refused{work="requests"} 1' in text


def test_https_without_a_login_is_open_to_all(tmp_path: Path, authority: Authority) -> None:
    """Promise: TLS alone encrypts; a client that speaks plain HTTP gets no response."""
    with serving(tmp_path, authority, "SSL") as agent:
        assert get(agent, ca=authority.path)[0] == 200
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            get(agent)


def test_certificates_of_clients_can_be_demanded(tmp_path: Path, authority: Authority) -> None:
    """Promise: `tls.client_auth` applies to the whole port, as to the other listeners."""
    required = {"ca": authority.path, "client_auth": "required"}
    with serving(tmp_path, authority, "SSL", **required) as agent:
        with pytest.raises((ssl.SSLError, http.client.HTTPException, ConnectionError)):
            get(agent, "/healthz", ca=authority.path)
        client = authority.sign("scraper", is_client=True)
        assert get(agent, ca=authority.path, client=client)[0] == 200


def test_a_new_certificate_is_used_without_a_restart(tmp_path: Path, authority: Authority) -> None:
    """Promise: new connections get it, also with a CA that the old one was not signed by."""
    (tmp_path / "new").mkdir()
    other = Authority(tmp_path / "new")
    with serving(tmp_path, authority, "SSL") as agent:
        assert get(agent, ca=authority.path)[0] == 200
        for new, name in zip(other.sign("broker"), ("broker.pem", "broker.key"), strict=True):
            shutil.copy(new, tmp_path / name)
        assert agent.listeners.tls is not None
        agent.listeners.tls.refresh()
        assert get(agent, ca=other.path)[0] == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            get(agent, ca=authority.path)


def test_handshakes_are_bounded_in_number_and_time(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: clients that do not complete one are closed, and scrapes work afterwards."""
    module = "sparklog.broker.metrics.tls_connections"
    monkeypatch.setattr(f"{module}.METRICS_CONNECTIONS", 3)
    monkeypatch.setattr(f"{module}.METRICS_CONNECTION_SECONDS", 1.0)
    with serving(tmp_path, authority, "SSL") as agent, contextlib.ExitStack() as stack:
        host, _, port = listener_of(agent).address.rpartition(":")
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)), SECONDS))
            for _ in range(4)
        ]
        began = time.monotonic()
        assert is_closed(silent.pop())
        assert time.monotonic() - began < 1.0
        silent[0].sendall(b"\x16\x03\x01\x40\x00\x01")  # the begin of a handshake, and no more
        assert all(map(is_closed, silent))
        assert get(agent, ca=authority.path)[0] == 200
        with socket.create_connection((host, int(port)), SECONDS) as rubbish:
            rubbish.sendall(b"\x00" * 100_000)
            assert is_closed(rubbish)
        assert get(agent, ca=authority.path)[0] == 200


def is_closed(connection: socket.socket) -> bool:
    """Waits until the other side has closed a connection."""
    try:
        while connection.recv(1_000):
            pass  # an alert
        return True
    except ConnectionResetError:
        return True


def test_guesses_are_delayed(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: a failed login is answered late, and others are served meanwhile."""
    monkeypatch.setattr(login_failures, "FAILURE_SECONDS", (0.1, 0.4))
    with serving(tmp_path, authority, "SASL_PLAINTEXT") as agent:
        assert get(agent, user="alice")[0] == 200
        guess = threading.Thread(
            target=lambda: [get(agent, user="alice", password="wrong") for _ in range(3)]
        )
        began = time.monotonic()
        guess.start()
        assert get(agent, user="alice")[0] == 200
        assert guess.is_alive()
        guess.join()
        assert time.monotonic() - began >= 0.1 + 0.2 + 0.4


@pytest.mark.parametrize(
    ("listen", "more", "reason"),
    [
        ("SASL_PLAINTEXT://0.0.0.0:1", {}, "passwords could be read on the way"),
        ("SSL://127.0.0.1:1", {}, "tls.certificate and tls.key"),
        ("HTTPS://127.0.0.1:1", {}, "one of PLAINTEXT, SSL"),
        ("127.0.0.1:1,127.0.0.1:2", {}, "one address"),
        ("A=PLAINTEXT://127.0.0.1:1", {}, "one address without a name"),
        (
            "SASL_PLAINTEXT://127.0.0.1:1",
            {"kafka.sasl_mechanisms": "SCRAM-SHA-256"},
            "does not have PLAIN",
        ),
    ],
)
def test_settings_are_checked(listen: str, more: dict[str, str], reason: str) -> None:
    """Promise: an address that would protect nothing is refused, and the error names the remedy."""
    with pytest.raises(errors.BadOption, match=r"metrics\.listen") as raised:
        load_settings(None, {}, {"root": "/r", "metrics.listen": listen, **more})
    assert reason in str(raised.value)


def test_a_login_needs_users(tmp_path: Path) -> None:
    """Promise: a broker does not start with a login without users."""
    metrics = MetricsSettings(listen="SASL_PLAINTEXT://127.0.0.1:0")
    with pytest.raises(errors.BadOption, match=r"metrics\.listen.*the root has no users"):
        broker(tmp_path, metrics=metrics).__enter__()
