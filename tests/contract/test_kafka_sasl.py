"""Kafka clients that log in: those of others, at a real listener with SASL_SSL.

Promises: the clients of others log in with each mechanism; a wrong password is named in the
client's error and in the broker's log; users that are removed or disabled lose their connections
within a second, at every broker; a client that has not logged in can do nothing, and keeps no other
out.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from structlog.testing import capture_logs

from sparklog import errors, kafka_port
from sparklog.broker import login_failures
from sparklog.broker.agent import Agent
from sparklog.broker.authentication import Identity
from sparklog.broker.kafka import admission, sasl_logins
from sparklog.broker.refused_work import Work
from sparklog.listeners import Listener
from sparklog.security import users
from sparklog.security.scram import MECHANISMS
from sparklog.settings import BrokerSettings, FlightSettings, KafkaSettings, TlsSettings
from sparklog.storage.objects import LocalStore, open_store
from tests.support import kafkalogins
from tests.support.certificates import Authority
from tests.support.kafkas import Frames, close_leavings
from tests.support.users import PASSWORD, change_users
from tests.support.waiting import wait_until

SECONDS: Final = 30.0
IN_FORCE_SECONDS: Final = 1.0
"""The promise for an idle machine. Tests wait longer, as they share theirs."""
TOKEN: Final = f"\0alice\0{PASSWORD}".encode()
HANDSHAKE, VERSIONS, METADATA, AUTHENTICATE = 17, 18, 3, 36


def change(root: str, what: users.Change) -> None:
    """Changes the users of a root as the command does."""
    change_users(open_store(root, {}), what)


def settings(root: Path, authority: Authority, **more: Any) -> BrokerSettings:
    """Those of a broker with a listener for users over TLS, and one on this machine."""
    certificate, key = authority.sign("broker")
    kafka_settings: dict[str, Any] = {
        "listen": "SASL_SSL://127.0.0.1:0,LOCAL=SASL_PLAINTEXT://127.0.0.1:0"
    }
    return BrokerSettings(
        root=str(root),
        flight=FlightSettings(listen="127.0.0.1:0"),
        kafka=KafkaSettings(**kafka_settings | more.pop("kafka", {})),
        tls=TlsSettings(certificate=certificate, key=key),
        **more,
    )


@pytest.fixture(autouse=True)
def _leavings() -> Iterator[None]:
    """Otherwise another test of this process has to collect what kafka-python leaves."""
    yield
    close_leavings()


@pytest.fixture(name="agent", scope="module")
def _agent(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Agent]:
    """A broker with the user alice."""
    root = tmp_path_factory.mktemp("root")
    change(str(root), users.added("alice", users.credentials_of(PASSWORD)))
    with Agent(settings(root, authority)) as found:
        yield found


@pytest.fixture(name="fast", autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed logins are answered at once: tests do not wait for the clock."""
    monkeypatch.setattr(login_failures, "FAILURE_SECONDS", (0.0, 0.0))


def local(agent: Agent) -> str:
    """The address of the listener without TLS."""
    return agent.listeners.kafka_open[1].address


# ------------------------------------------------------------------------------ clients


def confluent(agent: Agent, authority: Authority, mechanism: str, password: str) -> None:
    """confluent-kafka as alice."""
    login = {"sasl.mechanism": mechanism, "sasl.username": "alice", "sasl.password": password}
    kafkalogins.confluent(agent, authority, f"confluent-{mechanism}", login)


def _plain(mechanism: str, password: str) -> dict[str, str]:
    return {
        "sasl_mechanism": mechanism,
        "sasl_plain_username": "alice",
        "sasl_plain_password": password,
    }


def kafka_python(agent: Agent, authority: Authority, mechanism: str, password: str) -> None:
    """kafka-python as alice."""
    patience_ms = 30_000 if password == PASSWORD else 500
    kafkalogins.kafka_python(
        agent,
        authority,
        f"python-{mechanism}",
        _plain(mechanism, password),
        patience_ms=patience_ms,
    )


def aio(agent: Agent, authority: Authority, mechanism: str, password: str) -> None:
    """aiokafka as alice."""
    kafkalogins.aio(agent, authority, f"aio-{mechanism}", _plain(mechanism, password))


def refusal_of(client: Any, agent: Agent, authority: Authority, mechanism: str) -> str:
    """Returns the error of a client with a wrong password. Keeps nothing of the client."""
    try:
        client(agent, authority, mechanism, "planted-wrong")
    except PermissionError as error:
        return str(error)
    raise AssertionError("it was served")


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("client", [confluent, kafka_python, aio])
def test_clients_log_in(agent: Agent, authority: Authority, client: Any, mechanism: str) -> None:
    """Promise: each client by each mechanism is served, and refused with a wrong password.

    The broker's log names the user and not the password.
    """
    client(agent, authority, mechanism, PASSWORD)
    with capture_logs() as lines, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # clients leave sockets behind
        refusal = refusal_of(client, agent, authority, mechanism)
        close_leavings()
    is_told = "Authentication failed: Invalid username or password" in refusal
    assert is_told or client is not confluent  # the others do not show it
    reasons = [line.get("reason", "") for line in lines]
    assert any("user 'alice': the password is wrong" in each for each in reasons), reasons
    assert "planted-wrong" not in repr(lines)


# ------------------------------------------------------------------------------ changes


class LoggedIn(Frames):
    """A connection that has logged in by PLAIN, as alice."""

    def __init__(self, address: str, password: str = PASSWORD, *, user: str = "alice") -> None:
        super().__init__(address)
        assert not self.ask(HANDSHAKE, 1, {"mechanism": "PLAIN"}).error_code.value
        token = f"\0{user}\0{password}".encode()
        self.code = self.ask(AUTHENTICATE, 2, {"auth_bytes": token}).error_code.value

    def is_served(self) -> bool:
        """Returns whether the broker still answers requests of the connection."""
        try:
            return bool(self.ask(METADATA, 1, {"topics": ()}).brokers)
        except (AssertionError, OSError):
            return False

    def wait_for_end(self) -> None:
        """Waits until the broker has closed the connection."""
        self._socket.settimeout(10 * IN_FORCE_SECONDS)
        with contextlib.suppress(ConnectionResetError):
            assert self._socket.recv(1) == b""


def test_a_change_is_in_force_at_every_broker(tmp_path: Path, authority: Authority) -> None:
    """Promise: within a second, a disabled or removed user has no connections and gets none.

    A changed password cuts nothing, as in Kafka; the old one is worth nothing from then on. A user
    of the same name that is added later is another one.
    """
    root, credentials = str(tmp_path), users.credentials_of(PASSWORD)
    change(root, users.added("alice", credentials))
    with contextlib.ExitStack() as stack:
        agents = [
            stack.enter_context(Agent(settings(tmp_path, authority, id=number)))
            for number in (1, 2, 3)
        ]

        def is_accepted(agent: Agent, password: str) -> bool:
            with contextlib.closing(LoggedIn(local(agent), password)) as found:
                return found.code == 0

        def in_force(password: str, *, accepted: bool) -> None:
            """Waits until every broker accepts, or refuses, the password."""
            wait_until(
                lambda: all(is_accepted(each, password) == accepted for each in agents),
                "the change is not in force",
                patience_seconds=10 * IN_FORCE_SECONDS,
            )

        def connections() -> list[LoggedIn]:
            return [stack.enter_context(contextlib.closing(LoggedIn(local(a)))) for a in agents]

        cut = connections()
        for is_disabled in (True, False):  # faster than a broker looks
            change(root, users.disabled("alice", is_disabled))
        for each in cut:
            each.wait_for_end()
        for away, back in (
            (users.disabled("alice", True), users.disabled("alice", False)),
            (users.removed("alice"), users.added("alice", credentials)),
        ):
            cut = connections()
            change(root, away)
            for each in cut:
                each.wait_for_end()
            in_force(PASSWORD, accepted=False)
            change(root, back)
            in_force(PASSWORD, accepted=True)

        kept = connections()
        change(root, users.with_credentials("alice", users.credentials_of("new")))
        in_force("new", accepted=True)
        in_force(PASSWORD, accepted=False)
        assert all(each.is_served() for each in kept)
        change(root, users.with_credentials("alice", credentials, cut=True))
        for each in kept:
            each.wait_for_end()


def test_a_user_that_is_removed_while_it_logs_in(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: the last look before a connection is served decides, not the password's check."""
    root, authentication = agent.settings.root, agent._access.authentication
    assert authentication is not None
    change(root, users.added("bob", users.credentials_of(PASSWORD)))
    authentication.watch.refresh()
    log_in = authentication.log_in

    def slow(name: str, password: str) -> Identity | None:
        found = log_in(name, password)
        change(root, users.removed("bob"))
        authentication.watch.refresh()
        return found

    monkeypatch.setattr(authentication, "log_in", slow)
    with contextlib.closing(LoggedIn(local(agent), user="bob")) as found:
        assert not found.is_served()


def test_only_the_address_that_it_listens_on_makes_a_listener_private(tmp_path: Path) -> None:
    """Promise: an advertised address, as of a tunnel, neither adds PLAIN nor removes the login."""
    change(str(tmp_path), users.added("alice", users.credentials_of(PASSWORD)))
    for listen, advertised, mechanisms in (
        ("SASL_PLAINTEXT://127.0.0.1:0", "broker.example.org:9092", ("PLAIN",)),
        ("SASL_PLAINTEXT://0.0.0.0:0", "localhost:9092", ("SCRAM-SHA-256",)),
    ):
        kafka_settings = KafkaSettings(
            listen=listen, advertised=advertised, sasl_mechanisms="PLAIN,SCRAM-SHA-256"
        )
        if mechanisms == ("PLAIN",):
            kafka_settings = msgspec.structs.replace(kafka_settings, sasl_mechanisms="PLAIN")
        given = BrokerSettings(
            root=str(tmp_path), flight=FlightSettings(listen="127.0.0.1:0"), kafka=kafka_settings
        )
        with Agent(given) as agent:
            port = next(iter(agent.listeners._kafka_ports.values())).address.rpartition(":")[2]
            with contextlib.closing(Frames(f"127.0.0.1:{port}")) as client:
                found = client.ask(HANDSHAKE, 1, {"mechanism": "none"}).mechanisms
                assert found == mechanisms
            with (
                contextlib.closing(Frames(f"127.0.0.1:{port}")) as client,
                pytest.raises((AssertionError, OSError)),
            ):
                client.ask(METADATA, 1, {"topics": None})


def test_a_broker_whose_users_cannot_be_read(tmp_path: Path, authority: Authority) -> None:
    """Promise: it does not start without them, and the error has the command for the first one."""
    with pytest.raises(errors.BadOption, match="sparklog users add NAME --root"):
        Agent(settings(tmp_path, authority)).start()
    assert not any(tmp_path.iterdir())
    change(str(tmp_path), users.added("alice", users.credentials_of(PASSWORD)))
    store = LocalStore(str(tmp_path))
    store.delete([f"security/{each.name}" for each in store.walk("security")])
    with pytest.raises(errors.CorruptObject, match="restore it from a backup"):
        Agent(settings(tmp_path, authority)).start()


def test_users_that_are_deleted_under_a_broker(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: no user logs in any more, though there is nothing new to read."""
    change(str(tmp_path), users.added("alice", users.credentials_of(PASSWORD)))
    with Agent(settings(tmp_path, authority)) as agent:
        monkeypatch.setattr(agent._access.watch, "_stale_seconds", 0.3)
        shutil.rmtree(tmp_path / "security")
        wait_until(lambda: Work.LOGINS in agent.parts.broker.refused.states(), "no such state")
        with contextlib.closing(Frames(local(agent))) as client:
            client.ask(HANDSHAKE, 1, {"mechanism": "PLAIN"})
            with pytest.raises((AssertionError, OSError)):
                client.ask(AUTHENTICATE, 2, {"auth_bytes": TOKEN})


# ------------------------------------------------------------------------------ hostile clients


def test_clients_that_do_not_log_in(agent: Agent, authority: Authority) -> None:
    """Promise: the log has what they lack, and they get nothing."""
    with capture_logs() as lines:
        with contextlib.closing(Frames(local(agent))) as stranger:
            assert stranger.ask(VERSIONS, 0, {}).error_code.value == 0
            with pytest.raises((AssertionError, OSError)):
                stranger.ask(METADATA, 1, {"topics": None})
        with contextlib.closing(Frames(local(agent))) as giant:
            giant._socket.sendall((sasl_logins.FRAME_BYTES + 1).to_bytes(4, "big"))
            with pytest.raises((AssertionError, OSError)):
                giant._read(1)
        host, _, port = local(agent).rpartition(":")
        with socket.create_connection((host, int(port)), SECONDS) as browser:
            browser.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert browser.recv(100).startswith(b"HTTP/1.1 400")
        with contextlib.closing(Frames(agent.kafka_address)) as plain:
            plain._socket.sendall(Frames.frame(VERSIONS, 0, 1, {}))
            with contextlib.suppress(OSError):
                assert plain._socket.recv(1) == b""
    reasons = " ".join(str(line.get("reason", "")) for line in lines)
    assert "it sends metadata before it has logged in" in reasons
    assert "security.protocol=SASL_PLAINTEXT and sasl.mechanism=SCRAM-SHA-256" in reasons
    assert f"at most {sasl_logins.FRAME_BYTES} are allowed before a login" in reasons
    assert "it speaks HTTP" in reasons
    assert "it needs security.protocol=SASL_SSL" in reasons
    del authority


def test_silent_clients_keep_nobody_out(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: more idle connections of one address than there are slots delay another address
    not at all, and end by themselves.
    """
    kafka_listener = agent.listeners.kafka
    assert kafka_listener is not None
    of_listener = kafka_listener._admissions["LOCAL"]
    assert of_listener is not None
    slots = of_listener.slots
    failed = kafka_listener.counts.authentications_failed
    monkeypatch.setattr(admission, "ADMISSION_SECONDS", 3600)
    host, _, port = local(agent).rpartition(":")
    with contextlib.ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection((host, int(port)), SECONDS))
            for _ in range(2 * slots.of_address)
        ]
        wait_until(lambda: slots.waiting == slots.of_address, "they are not accepted")
        with socket.create_connection((host, int(port)), SECONDS, ("127.0.0.2", 0)) as other:
            other.sendall(Frames.frame(VERSIONS, 0, 1, {}))
            assert other.recv(4)
        for each in idle:
            each.close()
        wait_until(lambda: (slots.taken, slots.waiting) == (0, 0), "they are still there")
    monkeypatch.setattr(admission, "ADMISSION_SECONDS", 0.2)
    with (
        socket.create_connection((host, int(port)), SECONDS) as slow,
        contextlib.suppress(ConnectionResetError),
    ):
        assert slow.recv(1) == b""
    assert kafka_listener.counts.authentications_failed == failed + 1
    with contextlib.closing(LoggedIn(local(agent))) as found:
        assert found.is_served()


def test_requests_of_a_login_after_it(agent: Agent) -> None:
    """Promise: as in Kafka they are errors, and the connection stays that of its user."""
    with contextlib.closing(LoggedIn(local(agent))) as found:
        assert found.ask(HANDSHAKE, 1, {"mechanism": "PLAIN"}).error_code.value == 34
        again = found.ask(AUTHENTICATE, 2, {"auth_bytes": b"\0bob\0x"})
        assert again.error_code.value == 34
        assert found.is_served()


def test_probes_need_no_user(agent: Agent) -> None:
    """Promise: `status` and load balancers see that the broker serves, on either listener."""
    for protocol, address in (("SASL_SSL", agent.kafka_address), ("SASL_PLAINTEXT", local(agent))):
        listener = Listener("any", protocol, address)
        assert kafka_port.answers(listener, timeout_seconds=SECONDS)
