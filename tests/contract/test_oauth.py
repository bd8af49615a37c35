"""Clients that log in with OAuth tokens, at a real broker, and log in again before those expire."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Final

import aiokafka
import aiokafka.abc
import aiokafka.errors
import confluent_kafka
import kafka
import kafka.errors
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from kafka.net.sasl.oauth import AbstractTokenProvider
from structlog.testing import capture_logs

import sparklog
from sparklog import errors
from sparklog.broker import login_failures
from sparklog.broker.agent import Agent
from sparklog.broker.kafka import reauthentication
from sparklog.formats import flight_messages
from sparklog.security import user_token
from sparklog.settings import (
    BrokerSettings,
    FlightSettings,
    KafkaSettings,
    OAuthSettings,
    TlsSettings,
)
from sparklog.sources.brokers import task_credentials_for
from sparklog.sources.options import LogLocation
from sparklog.storage.objects import open_store
from tests.support import kafkalogins, kafkarequests
from tests.support.certificates import Authority
from tests.support.issuer import SECRET, Issuer, send, token_endpoint, web_server
from tests.support.kafkas import Frames, close_leavings
from tests.support.secured import see
from tests.support.users import PASSWORD, add_alice
from tests.support.waiting import wait_until

SECONDS: Final = 30.0
HANDSHAKE, METADATA, AUTHENTICATE = 17, 3, 36
OAUTHBEARER: Final = "OAUTHBEARER"


@pytest.fixture(autouse=True)
def _leavings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Failed logins are answered at once; and kafka-python leaves sockets behind."""
    monkeypatch.setattr(login_failures, "FAILURE_SECONDS", (0.0, 0.0))
    yield
    close_leavings()


@pytest.fixture(name="issuer", scope="module")
def _issuer() -> Issuer:
    return Issuer()


@pytest.fixture(name="agent", scope="module")
def _agent(
    tmp_path_factory: pytest.TempPathFactory, authority: Authority, issuer: Issuer
) -> Iterator[Agent]:
    """A broker whose root has no users: its clients have tokens."""
    certificate, key = authority.sign("broker")
    jwks = tmp_path_factory.mktemp("issuer") / "jwks.json"
    jwks.write_bytes(issuer.jwks())
    settings = BrokerSettings(
        root=str(tmp_path_factory.mktemp("root")),
        flight=FlightSettings(listen="SASL_SSL://127.0.0.1:0"),
        kafka=KafkaSettings(listen="SASL_SSL://127.0.0.1:0,LOCAL=SASL_PLAINTEXT://127.0.0.1:0"),
        tls=TlsSettings(certificate=certificate, key=key),
        oauth=OAuthSettings(**issuer.settings(str(jwks))),
    )
    with Agent(settings) as found:
        yield found


# ------------------------------------------------------------------------------ clients


class KafkaPythonToken(AbstractTokenProvider):  # type: ignore[misc, unused-ignore]
    """The token of a client of kafka-python."""

    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token

    def token(self) -> str:
        return self._token()


class AioToken(aiokafka.abc.AbstractTokenProvider):  # type: ignore[misc, unused-ignore]
    """The token of a client of aiokafka."""

    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token

    async def token(self) -> str:
        return self._token()


def login_of(client: Any, token: Callable[[], str]) -> dict[str, Any]:
    """Returns the settings of a client that logs in with tokens from a function."""
    if client is kafkalogins.confluent:
        oauth_cb = {"oauth_cb": lambda _: (token(), time.time() + 60)}
        return {"sasl.mechanism": OAUTHBEARER, **oauth_cb}
    provider = KafkaPythonToken if client is kafkalogins.kafka_python else AioToken
    return {"sasl_mechanism": OAUTHBEARER, "sasl_oauth_token_provider": provider(token)}


@pytest.mark.parametrize(
    "client", [kafkalogins.confluent, kafkalogins.kafka_python, kafkalogins.aio]
)
def test_clients_log_in(agent: Agent, authority: Authority, issuer: Issuer, client: Any) -> None:
    """Each client is served with a token, and refused with one of another audience.

    The broker's log names the cause, and not the token.
    """
    topic = f"of-{client.__name__}"
    client(agent, authority, topic, login_of(client, lambda: issuer.token("app")))
    wrong = issuer.token("app", aud="other")
    with capture_logs() as lines, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # clients leave sockets behind
        with pytest.raises(PermissionError) as refused:
            client(agent, authority, topic, login_of(client, lambda: wrong))
        is_told = "it is for another audience" in str(refused.value)
        assert is_told or client is not kafkalogins.confluent  # the others do not show it
        del refused
        close_leavings()
    reasons = [line.get("reason", "") for line in lines]
    assert any("the token is refused: it is for another audience" in each for each in reasons)
    assert wrong not in repr(lines)


def test_librdkafka_gets_tokens_from_their_issuer(
    agent: Agent, authority: Authority, issuer: Issuer
) -> None:
    """It needs the properties of docs/security/oauth.md, and no function of the program."""
    with token_endpoint(issuer, seconds=60) as url:
        login = {
            "sasl.mechanism": OAUTHBEARER,
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.token.endpoint.url": url,
            "sasl.oauthbearer.client.id": "app",
            "sasl.oauthbearer.client.secret": SECRET,
            "sasl.oauthbearer.scope": "kafka",
        }
        kafkalogins.confluent(agent, authority, "of-an-issuer", login)


# ------------------------------------------------------------------------------ Flight


def test_other_flight_clients_send_a_token(
    agent: Agent, authority: Authority, issuer: Issuer
) -> None:
    """As the header `authorization` of each call; the cause of a refusal is in the error."""
    roots = Path(authority.path).read_bytes()

    def topics(token: str) -> Any:
        headers = [(b"authorization", f"Bearer {token}".encode())]
        options = flight.FlightCallOptions(headers=headers)
        (reply,) = client.do_action(flight.Action("topics.list", b"{}"), options)
        return flight_messages.decode(flight_messages.TopicNames, reply.body).topics

    with flight.FlightClient(f"grpc+{agent.address}", tls_root_certs=roots) as client:
        token = issuer.token("app")
        for _ in range(2):
            assert isinstance(topics(token), list)
        for wrong, cause in (
            (issuer.token("app", seconds=-1), "it has expired"),
            (issuer.token("app", iss="x"), "its issuer is not accepted"),
            (Issuer().token("app"), "its signature is not valid"),
            ("abc", "it is not a signed JWT"),
        ):
            with pytest.raises(pa.ArrowException, match=cause):
                topics(wrong)


def test_native_clients_continue_with_the_next_token(
    agent: Agent, authority: Authority, issuer: Issuer, tmp_path: Path
) -> None:
    """A consumer's stream ends with its token, and it reads on with the one that is in the file."""
    file = tmp_path / "token"
    file.write_text(issuer.token("app", seconds=60))
    security = sparklog.Security(ca=authority.path, token_file=str(file))
    with sparklog.connect(agent.address, security=security) as log:
        log.create_topic("native", partitions=1)
        with log.producer() as producer:
            producer.send("native", b"0").result(timeout=SECONDS)
        file.write_text(issuer.token("app", seconds=3))
        with sparklog.connect(agent.address, security=security) as other:
            consumer = other.consumer("native", start="earliest")
            records = iter(consumer)
            assert next(records).value == b"0"
            assert agent.listeners.flight is not None
            gate = agent.listeners.flight._gate
            assert gate is not None
            (stream,) = gate._streams
            assert stream.ends_at <= time.time() + 3
            file.write_text(issuer.token("app", seconds=600))
            wait_until(lambda: stream not in gate._streams, "the stream stays open")
            with log.producer() as producer:
                producer.send("native", b"1").result(timeout=SECONDS)
            assert next(records).value == b"1"
            consumer.close()


def test_tasks_get_tokens_that_end_with_the_one_of_the_driver(
    tmp_path: Path, authority: Authority, issuer: Issuer
) -> None:
    """They only read, and once the root has a key: with its first user or ACL."""
    certificate, key = authority.sign("broker")
    jwks, file, root = (tmp_path / name for name in ("jwks", "token", "root"))
    jwks.write_bytes(issuer.jwks())
    file.write_text(issuer.token("app", seconds=600))
    settings = BrokerSettings(
        root=str(root),
        flight=FlightSettings(listen="SASL_SSL://127.0.0.1:0"),
        kafka=KafkaSettings(listen=""),
        tls=TlsSettings(certificate=certificate, key=key),
        oauth=OAuthSettings(**issuer.settings(str(jwks))),
    )
    with Agent(settings) as agent:
        security = sparklog.Security(ca=authority.path, token_file=str(file))
        location = LogLocation(bootstrap=agent.address, security=security)
        with pytest.raises(errors.NotAuthenticated, match="the root has no key to sign tokens"):
            task_credentials_for(location, ["t"])
        add_alice(open_store(str(root), {}))
        see(agent)
        found = task_credentials_for(location, ["t"])
        assert found is not None
        key_of_root = agent._access.watch.state.root_key
        claims = user_token.USER_TOKENS.verify(key_of_root, found.authorization)
        assert claims.is_for_tasks
        assert (claims.user, claims.topics) == ("app", ("t",))
        assert 500 < claims.expires_at - time.time() <= 600


# ------------------------------------------------------------------------------ again


def test_a_client_logs_in_again_while_it_produces(
    agent: Agent, authority: Authority, issuer: Issuer
) -> None:
    """librdkafka does so on its open connection before its token expires, and no record fails."""
    assert agent.listeners.kafka is not None
    counts = agent.listeners.kafka.counts
    before = counts.reauthentications
    failures: list[Any] = []

    def token(_: str) -> tuple[str, float]:
        return issuer.token("app", seconds=5), time.time() + 5

    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": agent.kafka_address,
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": authority.path,
            "sasl.mechanism": OAUTHBEARER,
            "oauth_cb": token,
            "error_cb": failures.append,
            "log_level": 0,
        }
    )
    sent = 0

    def is_again() -> bool:
        nonlocal sent
        producer.produce("again", b"x", partition=0, on_delivery=lambda error, _: check(error))
        sent += 1
        producer.poll(0)
        return counts.reauthentications > before

    def check(error: Any) -> None:
        if error is not None:
            failures.append(error)

    wait_until(is_again, "no re-authentication")
    for _ in range(20):
        is_again()
    assert producer.flush(SECONDS) == 0
    assert not failures
    assert counts.reauthentications_failed == 0


def test_a_client_without_reauthentication_reconnects(
    agent: Agent, authority: Authority, issuer: Issuer
) -> None:
    """aiokafka is cut when its token expires, and continues with the next one without a loss."""
    assert agent.listeners.kafka is not None
    counts = agent.listeners.kafka.counts

    async def run() -> int:
        login = login_of(kafkalogins.aio, lambda: issuer.token("app", seconds=4))
        client = kafkalogins.aio_client(agent, authority, login)
        producer = aiokafka.AIOKafkaProducer(**client, retry_backoff_ms=20)
        await producer.start()
        before, sent = counts.authentications, 0
        async with asyncio.timeout(SECONDS):
            while counts.authentications < before + 2:
                await producer.send_and_wait("reconnects", b"x", partition=0)
                sent += 1
                await asyncio.sleep(0.02)
        await producer.stop()
        return sent

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        sent = asyncio.run(run())
    client = kafka.KafkaConsumer(
        "reconnects",
        bootstrap_servers=agent.kafka_address,
        security_protocol="SASL_SSL",
        ssl_cafile=authority.path,
        sasl_mechanism=OAUTHBEARER,
        sasl_oauth_token_provider=KafkaPythonToken(lambda: issuer.token("app")),
    )
    ends = client.end_offsets([kafka.TopicPartition("reconnects", 0)])
    assert [*ends.values()] >= [sent]
    client.close()


class Session(Frames):
    """A connection that has logged in with a token, frame by frame."""

    def __init__(self, agent: Agent, token: str) -> None:
        super().__init__(agent.listeners.kafka_open[-1].address)
        self.lifetime = self.log_in(token).session_lifetime.total_seconds()

    def log_in(self, token: str, mechanism: str = OAUTHBEARER) -> Any:
        """Logs in, at first or again; returns the last reply."""
        assert not self.ask(HANDSHAKE, 1, {"mechanism": mechanism}).error_code.value
        message = f"n,,\x01auth=Bearer {token}\x01\x01".encode()
        return self.ask(AUTHENTICATE, 2, {"auth_bytes": message})

    def is_served(self) -> bool:
        """Returns whether the broker still answers requests of the connection."""
        try:
            return bool(self.ask(METADATA, 1, {"topics": ()}).brokers)
        except (AssertionError, OSError):
            return False

    def is_closed(self) -> bool:
        """Waits until the broker closes the connection."""
        with contextlib.suppress(ConnectionResetError):
            return self._socket.recv(1) == b""
        return True


@contextlib.contextmanager
def session(agent: Agent, token: str) -> Iterator[Session]:
    """A client that has logged in."""
    with contextlib.closing(Session(agent, token)) as found:
        yield found


def test_a_session_is_prolonged(agent: Agent, issuer: Issuer) -> None:
    """After a login on the open connection, the session ends with the new token."""
    with session(agent, issuer.token("app", seconds=10)) as client:
        assert 0 < client.lifetime <= 10
        assert client.log_in(issuer.token("app", seconds=60)).session_lifetime.total_seconds() > 50
        connection = _connection(agent, "app")
        assert connection.identity.ends_at > time.time() + 50
        assert client.is_served()


def _connection(agent: Agent, name: str) -> Any:
    listener = agent.listeners.kafka
    assert listener is not None
    found: list[Any] = []

    def is_alone() -> bool:
        connections = [*listener._connections.values()]
        found[:] = [each for each in connections if each.identity and each.identity.name == name]
        return len(found) == 1

    wait_until(is_alone, "the connections of earlier tests are closed")
    return found[0]


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_session_ends_with_its_token(agent: Agent, issuer: Issuer, is_idle: bool) -> None:
    """An idle connection is cut, and a request after the end is not served."""
    token = issuer.token("app", seconds=2)
    with session(agent, token) as client, capture_logs() as lines:
        if is_idle:
            assert client.is_closed()
        else:
            wait_until(lambda: not client.is_served(), "a request is refused")
    assert any("has expired" in str(line) or "has ended" in str(line) for line in lines)


def test_requests_that_were_sent_before_the_end(agent: Agent, issuer: Issuer) -> None:
    """They are not served after it, though the broker had received them before."""
    with session(agent, issuer.token("app", seconds=60)) as client:
        connection = _connection(agent, "app")
        expired = connection.identity._replace(ends_at=time.time() - 1)
        connection._session._identity = expired  # not `identity`, by which the listener would cut
        assert not client.is_served()


def test_logins_in_quick_succession(
    agent: Agent, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one within a second is an error, and the connection stays, as in Kafka."""
    with session(agent, issuer.token("app")) as client:
        assert not client.log_in(issuer.token("app")).error_code.value
        again = client.ask(HANDSHAKE, 1, {"mechanism": OAUTHBEARER})
        assert again.error_code.value == 34
        assert client.is_served()
        monkeypatch.setattr(reauthentication, "_INTERVAL_SECONDS", 0.0)
        assert not client.log_in(issuer.token("app")).error_code.value


@pytest.mark.parametrize(
    "what", ["another client", "a refused token", "a large frame", "a request"]
)
def test_a_login_that_fails_within_a_session(agent: Agent, issuer: Issuer, what: str) -> None:
    """The connection is closed, and the failure counted."""
    assert agent.listeners.kafka is not None
    counts = agent.listeners.kafka.counts
    before = counts.reauthentications_failed
    with session(agent, issuer.token("app")) as client:
        if what == "another client":
            assert client.log_in(issuer.token("bob")).error_code.value == 58
        elif what == "a refused token":
            assert b"invalid_token" in client.log_in(issuer.token("app", iss="x")).auth_bytes
            failed = client.ask(AUTHENTICATE, 2, {"auth_bytes": b"\x01"})
            assert failed.error_code.value == 58
        else:
            assert not client.ask(HANDSHAKE, 1, {"mechanism": OAUTHBEARER}).error_code.value
            if what == "a request":
                assert not client.is_served()
            else:
                client._socket.sendall((100_000).to_bytes(4, "big") + os.urandom(10))
        client._socket.shutdown(1)
        assert client.is_closed()
    wait_until(lambda: counts.reauthentications_failed == before + 1, "it is not counted")


def test_a_login_that_is_not_completed(
    agent: Agent, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends by itself."""
    monkeypatch.setattr(reauthentication, "REAUTHENTICATION_SECONDS", 0.1)
    with session(agent, issuer.token("app")) as client, capture_logs() as lines:
        assert not client.ask(HANDSHAKE, 1, {"mechanism": OAUTHBEARER}).error_code.value
        assert client.is_closed()
    assert "no re-authentication within 0.1 s" in str(lines)


def test_requests_before_a_login_are_answered_first(agent: Agent, issuer: Issuer) -> None:
    """Requests, a login and more requests in one piece are answered in order."""
    with session(agent, issuer.token("app")) as client:
        kafkarequests.create(client, "pipelined")
        message = f"n,,\x01auth=Bearer {issuer.token('app')}\x01\x01".encode()
        produce = kafkarequests.produce_fields("pipelined", 0, kafkarequests.batch([b"x"]))
        requests: list[tuple[int, int, dict[str, Any]]] = [
            (METADATA, 1, {"topics": ()}),
            (kafkarequests.PRODUCE, 9, produce),
            (HANDSHAKE, 1, {"mechanism": OAUTHBEARER}),
            (AUTHENTICATE, 2, {"auth_bytes": message}),
            (kafkarequests.PRODUCE, 9, produce),
            (METADATA, 1, {"topics": ()}),
        ]
        frames = [
            client.frame(key, version, number, fields)
            for number, (key, version, fields) in enumerate(requests)
        ]
        client._socket.sendall(b"".join(frames))
        for number, (key, version, _) in enumerate(requests):
            reply = client._read(int.from_bytes(client._read(4), "big"))
            found = client.reply(key, version, reply, number)
            assert not getattr(found, "error_code", None)


def test_a_login_waits_for_a_new_key(tmp_path: Path) -> None:
    """A slow issuer delays clients with an unknown key only, and they are served at the end."""
    issuer, may_answer = Issuer(), threading.Event()
    may_answer.set()

    def respond(handler: BaseHTTPRequestHandler) -> None:
        may_answer.wait(SECONDS)
        send(handler, issuer.jwks())

    with contextlib.ExitStack() as stack:
        url = stack.enter_context(web_server(respond))
        settings = BrokerSettings(
            root=str(tmp_path),
            flight=FlightSettings(listen="127.0.0.1:0"),
            kafka=KafkaSettings(listen="SASL_PLAINTEXT://127.0.0.1:0"),
            oauth=OAuthSettings(**issuer.settings(url)),
        )
        agent = stack.enter_context(Agent(settings))
        known = issuer.token("app")
        issuer.rotate()
        may_answer.clear()
        stack.callback(may_answer.set)
        with ThreadPoolExecutor(2) as pool:
            late = [pool.submit(Session, agent, issuer.token("late")) for _ in range(2)]
            for _ in range(3):
                with session(agent, known) as client:
                    assert client.is_served()
            assert not any(each.done() for each in late)
            may_answer.set()
            for each in late:
                with contextlib.closing(each.result(SECONDS)) as client:
                    assert client.is_served()


def test_a_session_of_a_limited_duration(tmp_path: Path) -> None:
    """`connections_max_reauth_ms` ends sessions of users with a password, too."""
    add_alice(open_store(str(tmp_path), {}))
    settings = BrokerSettings(
        root=str(tmp_path),
        flight=FlightSettings(listen="127.0.0.1:0"),
        kafka=KafkaSettings(
            listen="SASL_PLAINTEXT://127.0.0.1:0", connections_max_reauth_ms=60_000
        ),
    )
    with Agent(settings) as agent, contextlib.closing(Frames(agent.kafka_address)) as client:
        token = f"\0alice\0{PASSWORD}".encode()
        for _ in range(2):
            assert not client.ask(HANDSHAKE, 1, {"mechanism": "PLAIN"}).error_code.value
            reply = client.ask(AUTHENTICATE, 2, {"auth_bytes": token})
            assert reply.session_lifetime.total_seconds() == 60
        assert agent.listeners.kafka is not None
        assert agent.listeners.kafka.counts.reauthentications == 1
