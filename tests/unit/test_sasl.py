"""Logins by SASL, frame by frame: the states of a login, and what each mechanism accepts."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import struct
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker import login_failures
from sparklog.broker.audit import Audit, ListenerAudit
from sparklog.broker.authentication import Authentication, Identity
from sparklog.broker.jwks import JwksSource
from sparklog.broker.kafka.sasl import LoginRefused, SaslServer
from sparklog.broker.kafka.sasl_logins import SaslLogins
from sparklog.broker.kafka.socket_stream import SocketStream
from sparklog.broker.oauth import TokenVerifier
from sparklog.broker.refused_work import RefusedWork, Work
from sparklog.broker.security_watch import SecurityWatch
from sparklog.clock import ManualClock
from sparklog.listeners import SASL_SSL, Listener
from sparklog.security import users
from sparklog.security.jwt import Jwks, JwtRules
from sparklog.security.login_method import LoginMethod
from sparklog.security.oauth_bearer import CLIENT_FAILED, OAUTHBEARER
from sparklog.security.scram import MECHANISMS, Mechanism, ScramClient, ScramError
from sparklog.storage.objects import MemoryStore
from tests.support.issuer import AUDIENCE, ISSUER, Issuer
from tests.support.kafkas import Frames
from tests.support.users import PASSWORD, change_users

CREDENTIALS = users.credentials_of(PASSWORD)
STALE_SECONDS = 5.0
ALL = (*MECHANISMS, OAUTHBEARER)
RULES = JwtRules(issuer=ISSUER, audiences=frozenset({AUDIENCE}))
VERSION_FIELDS = {"client_software_name": "x", "client_software_version": "1"}
HANDSHAKE, VERSIONS, AUTHENTICATE, METADATA = 17, 18, 36, 3


class World:
    """A root with the user alice, and a broker that knows its users."""

    def __init__(self) -> None:
        self.clock = ManualClock(int(time.time() * 1e6))
        self.store = MemoryStore(self.clock)
        self.change(users.added("alice", CREDENTIALS), create=True)
        self.refused = RefusedWork(self.clock)
        self.watch = SecurityWatch(
            self.store,
            clock=self.clock,
            follow_seconds=0.1,
            stale_seconds=STALE_SECONDS,
            refused=self.refused,
        )
        self.watch.open()
        self.issuer = Issuer()
        self.source = mock.Mock(spec=JwksSource)
        self.source.keys.return_value = Jwks(self.issuer.jwks())
        verifier = TokenVerifier(RULES, self.source, clock=self.clock, refused=self.refused)
        self.authentication = Authentication(self.watch, verifier)
        self.checks = 0

    def change(self, what: users.Change, *, create: bool = False) -> None:
        change_users(self.store, what, create=create)

    def server(
        self,
        *mechanisms: str,
        before: Identity | None = None,
        session_max_seconds: float = math.inf,
    ) -> SaslServer:
        async def check_password(user: str, password: str) -> Identity | None:
            self.checks += 1
            return self.authentication.log_in(user, password)

        async def check_token(token: str) -> Identity:
            self.checks += 1
            return self.authentication.log_in_by_token(token)

        return SaslServer(
            self.authentication,
            mechanisms or ALL,
            protocol="SASL_SSL",
            check_password=check_password,
            check_token=check_token,
            clock=self.clock,
            session_max_seconds=session_max_seconds,
            before=before,
        )


@pytest.fixture(scope="module")
def shared() -> World:
    """A world that a test does not change."""
    return World()


@pytest.fixture
def world() -> World:
    """A root with one user, and what a broker knows of it."""
    return World()


def send(server: SaslServer, key: int, version: int, fields: dict[str, Any]) -> Any:
    """Returns the reply to a request, as kio's message."""
    frame = Frames.frame(key, version, 1, fields)[4:]
    reply = b"".join(asyncio.run(server.answer(frame)))
    return Frames.reply(key, version, reply[4:])


def handshake(server: SaslServer, mechanism: str, version: int = 1) -> Any:
    """Chooses a mechanism, and returns the reply."""
    return send(server, HANDSHAKE, version, {"mechanism": mechanism})


def authenticate(server: SaslServer, token: bytes, version: int = 2) -> bytes:
    """Sends a token, and returns the server's. Raises `LoginRefused`."""
    reply = send(server, AUTHENTICATE, version, {"auth_bytes": token})
    assert reply.error_code == ErrorCode.none
    found: bytes = reply.auth_bytes
    return found


def raw(server: SaslServer, token: bytes) -> bytes:
    """Sends a token without a request around it, and returns the server's."""
    reply = b"".join(asyncio.run(server.answer(token)))
    assert int.from_bytes(reply[:4], "big") == len(reply) - 4
    return reply[4:]


def scram(
    server: SaslServer, mechanism: str, user: str, password: str, send: Any = authenticate
) -> ScramClient:
    """Logs in by SCRAM, and checks that the server knows the password too."""
    client = ScramClient(Mechanism(mechanism), user, password)
    client.check(send(server, client.final(send(server, client.first()))))
    return client


# ------------------------------------------------------------------------------ logins


@pytest.mark.parametrize("mechanism", list(Mechanism))
@pytest.mark.parametrize("version", [0, 1])
def test_scram(world: World, mechanism: str, version: int) -> None:
    """Promise: both hash functions, with tokens in requests and, as of old, without."""
    server = world.server()
    assert handshake(server, mechanism, version).mechanisms == ALL
    scram(server, mechanism, "alice", PASSWORD, send=(raw, authenticate)[version])
    assert server.identity is not None
    assert server.identity.principal == "User:alice"


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("acting", ["", "alice"])
def test_plain(world: World, version: int, acting: str) -> None:
    """Promise: the name that the client acts for may be left out, or be its own."""
    server = world.server()
    handshake(server, "PLAIN", version)
    token = f"{acting}\0alice\0{PASSWORD}".encode()
    assert (raw, authenticate)[version](server, token) == b""
    assert server.identity is not None


def test_a_password_that_was_right_is_checked_once(world: World) -> None:
    """Promise: PBKDF2 is not run again, until the user has another password, or is another one."""

    def log_in(password: str) -> None:
        server = world.server()
        handshake(server, "PLAIN")
        authenticate(server, f"\0alice\0{password}".encode())

    log_in(PASSWORD)
    log_in(PASSWORD)
    assert world.checks == 1
    world.change(users.with_credentials("alice", users.credentials_of("new")))
    world.watch.refresh()
    with pytest.raises(LoginRefused):
        log_in(PASSWORD)
    log_in("new")
    assert world.checks == 3
    world.change(users.disabled("alice", True))
    world.watch.refresh()
    with pytest.raises(LoginRefused):
        log_in("new")


# ------------------------------------------------------------------------------ refusals


def refusal(server: SaslServer, token: bytes) -> LoginRefused:
    """Returns the refusal of a token, after checking the reply that goes with it."""
    with pytest.raises(LoginRefused) as refused:
        authenticate(server, token)
    reply = Frames.reply(AUTHENTICATE, 2, b"".join(refused.value.reply)[4:])
    assert reply.error_code == ErrorCode.sasl_authentication_failed
    assert reply.error_message == "Authentication failed: Invalid username or password"
    assert server.identity is None
    return refused.value


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(
    ("user", "password"), [("alice", "wrong"), ("nobody", PASSWORD), ("ALICE", PASSWORD)]
)
def test_wrong_passwords(world: World, mechanism: str, user: str, password: str) -> None:
    """Promise: an unknown user and a wrong password differ neither in the answer nor before it."""
    server = world.server()
    handshake(server, mechanism)
    if mechanism == "PLAIN":
        refused = refusal(server, f"\0{user}\0{password}".encode())
    else:
        client = ScramClient(Mechanism(mechanism), user, password)
        first = authenticate(server, client.first())
        refused = refusal(server, client.final(first))
    assert refused.user == user
    assert "wrong, or the user does not exist" in str(refused)


def test_first_answers_differ_in_nothing_but_the_salt(world: World) -> None:
    """Promise: they do not show whether a user exists; the salt of one that does not stays."""

    def first(user: str) -> dict[bytes, bytes]:
        server = world.server()
        handshake(server, "SCRAM-SHA-256")
        answer = authenticate(server, ScramClient(Mechanism.SHA_256, user, "x").first())
        return {each[:1]: each[2:] for each in answer.split(b",")}

    known, unknown = first("alice"), first("nobody")
    assert known.keys() == unknown.keys() == {b"r", b"s", b"i"}
    assert known[b"i"] == unknown[b"i"]
    assert len(known[b"s"]) == len(unknown[b"s"])
    assert first("nobody")[b"s"] == unknown[b"s"] != first("anybody")[b"s"]


def test_a_user_that_is_disabled_and_enabled_between_two_looks(world: World) -> None:
    """Promise: its connections end, though a broker sees only the result."""
    server = world.server()
    handshake(server, "SCRAM-SHA-256")
    scram(server, "SCRAM-SHA-256", "alice", PASSWORD)
    assert server.identity is not None
    for is_disabled in (True, False):
        world.change(users.disabled("alice", is_disabled))
    assert world.authentication.is_current(server.identity)
    world.watch.refresh()
    assert not world.authentication.is_current(server.identity)


def test_a_long_start_does_not_refuse_logins(world: World) -> None:
    """Promise: a broker that has waited for its predecessor looks again before it serves."""
    world.clock.advance(2 * STALE_SECONDS)
    loops = mock.Mock()
    world.watch.follow(loops)
    world.authentication.check_fresh()
    loops.start.assert_called_once()


def test_a_disabled_user_looks_like_a_wrong_password(world: World) -> None:
    """Promise: with the salt that it had, so that its answer does not change."""

    def salt() -> bytes:
        server = world.server()
        handshake(server, "SCRAM-SHA-256")
        client = ScramClient(Mechanism.SHA_256, "alice", PASSWORD)
        first = authenticate(server, client.first())
        if server.identity is None and is_disabled:
            refusal(server, client.final(first))
        return base64.b64decode(dict(each.split(b"=", 1) for each in first.split(b","))[b"s"])

    is_disabled = False
    before = salt()
    world.change(users.disabled("alice", True))
    world.watch.refresh()
    is_disabled = True
    assert salt() == before


@pytest.mark.parametrize(
    "changes",
    [
        [users.removed("alice")],
        [users.disabled("alice", True)],
        [users.with_credentials("alice", users.credentials_of("new"))],
        [users.removed("alice"), users.added("alice", users.credentials_of("other"))],
    ],
    ids=["removed", "disabled", "changed", "another"],
)
def test_a_user_that_changes_during_its_login(
    world: World, changes: Sequence[users.Change]
) -> None:
    """Promise: an old password does not become the identity of the next user."""
    server = world.server()
    handshake(server, "SCRAM-SHA-256")
    client = ScramClient(Mechanism.SHA_256, "alice", PASSWORD)
    first = authenticate(server, client.first())
    for each in changes:
        world.change(each)
    world.watch.refresh()
    refusal(server, client.final(first))


@pytest.mark.parametrize(
    "token",
    [
        b"",
        b"\xff",
        b"n,,n=alice",
        b"p=tls-unique,,n=alice,r=abc",
        b"y,,n=alice,r=abc",
        b"n,a=bob,n=alice,r=abc",
        b"n,,n=al=ice,r=abc",
        b"n,,n=alice,r=" + b"a" * 5_000,
        b"n,,n=" + b"a" * 256 + b",r=abc",
    ],
)
def test_malformed_tokens_of_scram(world: World, token: bytes) -> None:
    """Promise: channel binding, acting for others and malformed names are refused (RFC 5802)."""
    server = world.server()
    handshake(server, "SCRAM-SHA-256")
    refusal(server, token)


def test_a_proof_of_another_exchange(world: World) -> None:
    """Promise: a nonce or a proof that was heard before is worth nothing."""
    server = world.server()
    handshake(server, "SCRAM-SHA-256")
    client = ScramClient(Mechanism.SHA_256, "alice", PASSWORD)
    heard = client.final(authenticate(server, client.first()))
    client.check(authenticate(server, heard))
    replayed = world.server()
    handshake(replayed, "SCRAM-SHA-256")
    authenticate(replayed, client.first())
    assert "nonce" in str(refusal(replayed, heard))


def test_a_server_that_does_not_know_the_password(world: World) -> None:
    """Promise: a client notices it, as one that has taken the port of a dead broker."""
    other = World()
    other.change(users.with_credentials("alice", users.credentials_of("guess")))
    other.watch.refresh()
    server = other.server()
    handshake(server, "SCRAM-SHA-256")
    client = ScramClient(Mechanism.SHA_256, "alice", PASSWORD)
    with pytest.raises(LoginRefused):
        authenticate(server, client.final(authenticate(server, client.first())))
    with pytest.raises(ScramError):
        client.check(b"v=" + base64.b64encode(bytes(32)))
    del world


@pytest.mark.parametrize(
    "token",
    [
        b"",
        b"alice",
        b"\0alice",
        f"\0alice\0{PASSWORD}\0".encode(),
        f"bob\0alice\0{PASSWORD}".encode(),
        b"\0alice\0",
        b"\0alice\0\xff",
        b"\0alice\0" + b"p" * 5_000,
        b"\0\0password",
        b"\0" + b"a" * 256 + b"\0password",
    ],
)
def test_malformed_tokens_of_plain(world: World, token: bytes) -> None:
    """Promise: refused as guesses, before PBKDF2."""
    server = world.server()
    handshake(server, "PLAIN")
    refused = refusal(server, token)
    assert refused.is_guess
    assert len(refused.user) < 256
    assert world.checks == 0


def test_an_unknown_mechanism(world: World) -> None:
    """Promise: the client gets the listener's, and the broker's log has its wish."""
    server = world.server("SCRAM-SHA-512")
    with pytest.raises(LoginRefused, match="'PLAIN'; the listener has SCRAM-SHA-512") as refused:
        handshake(server, "PLAIN")
    reply = Frames.reply(HANDSHAKE, 1, b"".join(refused.value.reply)[4:])
    assert reply.error_code == ErrorCode.unsupported_sasl_mechanism
    assert reply.mechanisms == ("SCRAM-SHA-512",)


# ------------------------------------------------------------------------------ tokens


def bearer(token: str, *, acting: str = "", extensions: str = "") -> bytes:
    """The message of a client with a token (RFC 7628)."""
    begin = f"n,{f'a={acting}' if acting else ''},"
    return f"{begin}\x01auth=Bearer {token}{extensions}\x01\x01".encode()


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("acting", ["", "app"])
def test_a_token(world: World, version: int, acting: str) -> None:
    """Its subject is the principal, also without a user of that name; the session ends with it."""
    server = world.server()
    handshake(server, OAUTHBEARER, version)
    message = bearer(world.issuer.token("app"), acting=acting, extensions="\x01cluster=lkc-1")
    assert (raw, authenticate)[version](server, message) == b""
    assert server.identity is not None
    assert (server.identity.principal, server.identity.method) == ("User:app", LoginMethod.OAUTH)
    assert server.identity.mechanism == OAUTHBEARER
    left_seconds = server.identity.ends_at - world.clock.now_us() / 1e6
    assert 50 < left_seconds <= 61


def refused_token(server: SaslServer, message: bytes, then: bytes = CLIENT_FAILED) -> LoginRefused:
    """Returns the refusal of a token, which follows the client's answer to the error."""
    handshake(server, OAUTHBEARER)
    error = authenticate(server, message)
    with pytest.raises(LoginRefused) as refused:
        authenticate(server, then)
    reply = Frames.reply(AUTHENTICATE, 2, b"".join(refused.value.reply)[4:])
    assert reply.error_code == ErrorCode.sasl_authentication_failed
    assert reply.error_message == error.decode()
    assert json.loads(error)["status"] == "invalid_token"
    assert refused.value.is_guess
    assert server.identity is None
    return refused.value


def test_a_token_that_is_refused(world: World) -> None:
    """The client gets the cause in Kafka's form, and the log the details in addition."""
    token = world.issuer.token(aud="other")
    refused = refused_token(world.server(), bearer(token))
    assert json.loads(refused.text)["error_description"] == "it is for another audience"
    assert str(refused) == "the token is refused: it is for another audience: 'other'"
    world.clock.advance(120)
    world.watch.refresh()
    refused = refused_token(world.server(), bearer(world.issuer.token()))
    assert json.loads(refused.text)["error_description"] == "it has expired"


def test_a_login_has_one_token(world: World) -> None:
    """After a refusal even a valid token is refused: a connection costs a bounded time."""
    right = bearer(world.issuer.token())
    refused_token(world.server(), bearer(world.issuer.token(iss="x")), right)
    assert world.checks == 1


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_token_that_is_refused_is_noted_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch, is_answered: bool
) -> None:
    """Promise: the audit has one line for it, whether or not its client sends the last frame."""
    monkeypatch.setattr(login_failures, "FAILURE_SECONDS", (0.0, 0.0))
    tokens = [bearer(Issuer().token("app")), *([CLIENT_FAILED] if is_answered else [])]
    received = bytearray(Frames.frame(HANDSHAKE, 1, 1, {"mechanism": OAUTHBEARER}))
    for token in tokens:
        received += Frames.frame(AUTHENTICATE, 2, 2, {"auth_bytes": token})
    audit = mock.Mock(spec=Audit)

    async def log_in() -> None:
        is_silent = asyncio.Event()

        async def read(size: int) -> bytes:
            if not received:
                is_silent.set()
                await asyncio.Event().wait()
            part = bytes(received[:size])
            del received[:size]
            return part

        logins = SaslLogins(
            Listener("OUT", SASL_SSL, ""),
            world.authentication,
            ALL,
            delays=login_failures.FailureDelays(world.clock),
            run_blocking=mock.AsyncMock(side_effect=lambda _pool, call, token: call(token)),
            clock=world.clock,
            flight_address=str,
            audit=ListenerAudit(audit, "OUT"),
        )
        stream = mock.Mock(spec=SocketStream, read=read, peer="10.0.0.1")
        task = asyncio.create_task(logins.log_in(stream))
        await is_silent.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(log_in())
    (noted,) = audit.login_failed.call_args_list
    assert noted.kwargs["reason"].startswith("the token is refused: its signature is not valid")
    audit.logged_in.assert_not_called()


def test_a_token_with_the_name_of_a_user(world: World) -> None:
    """An issuer names a user only if the user lists the method; no reason is sent to the client."""
    token = world.issuer.token("alice")

    def reason() -> str:
        refused = refused_token(world.server(), bearer(token))
        assert json.loads(refused.text)["error_description"] == "its client is not permitted"
        return str(refused)

    assert "user 'alice' does not log in by oauth" in reason()
    world.change(users.with_methods("alice", [LoginMethod.OAUTH]))
    world.watch.refresh()
    server = world.server()
    handshake(server, OAUTHBEARER)
    authenticate(server, bearer(token))
    assert server.identity is not None
    assert server.identity.id
    world.change(users.disabled("alice", True))
    world.watch.refresh()
    assert not world.authentication.is_current(server.identity)
    assert "disabled" in reason()


@pytest.mark.parametrize("name", ["*", "__root", "ANONYMOUS", "a\nb", "x" * 256])
def test_a_token_with_a_name_that_no_user_can_have(world: World, name: str) -> None:
    """It is refused, as a wildcard or a line break would be taken for something else."""
    refused = refused_token(world.server(), bearer(world.issuer.token(name)))
    assert "cannot be used" in str(refused)


def test_a_principal_that_becomes_a_user(world: World) -> None:
    """The sessions of a principal end when a user of its name is added."""
    server = world.server()
    handshake(server, OAUTHBEARER)
    authenticate(server, bearer(world.issuer.token("app")))
    assert server.identity is not None
    world.change(users.added("app", CREDENTIALS))
    world.watch.refresh()
    assert not world.authentication.is_current(server.identity)


@pytest.mark.parametrize("message", [b"", b"\x01", b"n,,\x01\x01", b"\xff" * 30_000])
def test_malformed_messages_with_tokens(world: World, message: bytes) -> None:
    """They are refused without a look at a token, with Kafka's text."""
    server = world.server()
    handshake(server, OAUTHBEARER)
    with pytest.raises(LoginRefused) as refused:
        authenticate(server, message)
    reply = Frames.reply(AUTHENTICATE, 2, b"".join(refused.value.reply)[4:])
    assert "invalid credentials with SASL mechanism OAUTHBEARER" in reply.error_message
    assert world.checks == 0


def test_a_token_of_another_client(world: World) -> None:
    """A client that asks to act as another one is refused."""
    server = world.server()
    handshake(server, OAUTHBEARER)
    with pytest.raises(LoginRefused, match="asks to act as another one"):
        authenticate(server, bearer(world.issuer.token("app"), acting="admin"))
    assert server.identity is None


def test_keys_that_cannot_be_read(world: World) -> None:
    """Tokens are refused by the end of the connection, so that clients try again."""
    world.source.keys.side_effect = errors.TokenKeysNotRead(reason="gone")
    server = world.server()
    handshake(server, OAUTHBEARER)
    with pytest.raises(errors.TokenKeysNotRead):
        authenticate(server, bearer(world.issuer.token()))
    assert Work.LOGINS in world.refused.states()
    server = world.server()
    handshake(server, "SCRAM-SHA-256")
    scram(server, "SCRAM-SHA-256", "alice", PASSWORD)


def test_salts_after_the_first_user(world: World) -> None:
    """A broker with tokens starts on a root without users; later it draws the salts of the root."""
    store = MemoryStore(world.clock)
    watch = SecurityWatch(
        store,
        clock=world.clock,
        follow_seconds=0.1,
        stale_seconds=STALE_SECONDS,
        refused=world.refused,
    )
    watch.open()
    authentication = Authentication(watch, mock.Mock())
    before = authentication.credential(Mechanism.SHA_256, "nobody").verifier.salt
    watch.state = world.watch.state
    after = authentication.credential(Mechanism.SHA_256, "nobody").verifier.salt
    of_others = world.authentication.credential(Mechanism.SHA_256, "nobody").verifier.salt
    assert before != after == of_others


# ------------------------------------------------------------------------------ again


def lifetime_ms(server: SaslServer, token: bytes, version: int = 2) -> int:
    """Returns the lifetime of a session as the client gets it."""
    reply = send(server, AUTHENTICATE, version, {"auth_bytes": token})
    return round(reply.session_lifetime.total_seconds() * 1e3)


@pytest.mark.parametrize(
    ("max_seconds", "expected_ms"), [(math.inf, 0), (30, 30_000), (0.0001, 1), (1e12, 10**12)]
)
def test_the_lifetime_of_a_session(world: World, max_seconds: float, expected_ms: int) -> None:
    """It is that of the settings; 0 means that the client need not log in again (KIP-368)."""
    server = world.server(session_max_seconds=max_seconds)
    handshake(server, "PLAIN")
    assert lifetime_ms(server, f"\0alice\0{PASSWORD}".encode()) == expected_ms


@pytest.mark.parametrize(("max_seconds", "most_ms"), [(math.inf, 61_000), (30, 30_000)])
def test_the_lifetime_of_a_session_with_a_token(
    world: World, max_seconds: float, most_ms: int
) -> None:
    """It ends with the token, or before."""
    server = world.server(session_max_seconds=max_seconds)
    handshake(server, OAUTHBEARER)
    found = lifetime_ms(server, bearer(world.issuer.token("app")))
    assert most_ms - 10_000 < found <= most_ms


def test_old_clients_are_told_no_lifetime(world: World) -> None:
    """SaslAuthenticate of version 0 has no place for it."""
    server = world.server(session_max_seconds=30)
    handshake(server, "PLAIN")
    token = f"\0alice\0{PASSWORD}".encode()
    reply = send(server, AUTHENTICATE, 0, {"auth_bytes": token})
    assert not hasattr(reply, "session_lifetime")


def logged_in(world: World, name: str = "app") -> Identity:
    """A client that has logged in with a token."""
    server = world.server()
    handshake(server, OAUTHBEARER)
    authenticate(server, bearer(world.issuer.token(name)))
    assert server.identity is not None
    return server.identity


def test_a_client_logs_in_again(world: World) -> None:
    """A client that does so by the same mechanism gets a session that ends later."""
    before = logged_in(world)
    server = world.server(before=before)
    handshake(server, OAUTHBEARER)
    authenticate(server, bearer(world.issuer.token("app", seconds=90)))
    assert server.identity is not None
    assert server.identity.ends_at > before.ends_at + 20


def test_another_client_within_a_session(world: World) -> None:
    """A connection stays that of the client that has logged in first."""
    server = world.server(before=logged_in(world))
    handshake(server, OAUTHBEARER)
    with pytest.raises(LoginRefused, match="User:bob logs in on a connection of User:app") as found:
        authenticate(server, bearer(world.issuer.token("bob")))
    reply = Frames.reply(AUTHENTICATE, 2, b"".join(found.value.reply)[4:])
    assert reply.error_code == ErrorCode.sasl_authentication_failed
    assert "Cannot change principals" in reply.error_message
    assert server.identity is None


def test_another_user_of_the_same_name_within_a_session(world: World) -> None:
    """It is another client: a user that was removed and added again."""
    server = world.server()
    handshake(server, "SCRAM-SHA-256")
    scram(server, "SCRAM-SHA-256", "alice", PASSWORD)
    before = server.identity
    for change in (users.removed("alice"), users.added("alice", CREDENTIALS)):
        world.change(change)
    world.watch.refresh()
    server = world.server(before=before)
    handshake(server, "SCRAM-SHA-256")
    with pytest.raises(LoginRefused, match="logs in on a connection of"):
        scram(server, "SCRAM-SHA-256", "alice", PASSWORD)


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("frame", ["versions", "handshake", "token", "metadata"])
def test_another_mechanism_within_a_session(world: World, version: int, frame: str) -> None:
    """The handshake is answered, and the connection ends with the next frame, as in Kafka."""
    server = world.server(before=logged_in(world))
    assert handshake(server, "PLAIN", version).error_code == ErrorCode.none
    with pytest.raises(LoginRefused, match="again with PLAIN, and first did with OAUTH") as found:
        send(server, *FRAMES[frame])
    assert not found.value.reply
    assert server.identity is None


# ------------------------------------------------------------------------------ states


def begin(_server: SaslServer) -> None:
    """A connection that has sent nothing."""


def asked(server: SaslServer) -> None:
    """One that has asked for versions."""
    reply = send(server, VERSIONS, 3, VERSION_FIELDS)
    assert AUTHENTICATE in {each.api_key for each in reply.api_keys}


def in_requests(server: SaslServer) -> None:
    """One that has chosen a mechanism."""
    handshake(server, "SCRAM-SHA-256")


FRAMES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "versions": (VERSIONS, 2, {}),
    "handshake": (HANDSHAKE, 1, {"mechanism": "PLAIN"}),
    "token": (AUTHENTICATE, 2, {"auth_bytes": f"\0alice\0{PASSWORD}".encode()}),
    "metadata": (METADATA, 1, {"topics": None}),
}


@pytest.mark.parametrize(
    ("state", "accepted"),
    [(begin, {"versions", "handshake"}), (asked, {"handshake"}), (in_requests, {"token"})],
)
@pytest.mark.parametrize("frame", FRAMES)
def test_the_table_of_states(world: World, state: Any, accepted: set[str], frame: str) -> None:
    """Promise: the table at the head of `sasl.py`. A refused request has no effect."""
    server = world.server()
    state(server)
    key, version, fields = FRAMES[frame]
    if frame in accepted and frame != "token":
        assert send(server, key, version, fields).error_code == ErrorCode.none
        return
    with pytest.raises(LoginRefused) as refused:
        send(server, key, version, fields)
    is_token = frame in accepted  # not one of SCRAM
    is_answered = is_token or (state is in_requests and frame in ("versions", "handshake"))
    assert bool(refused.value.reply) == is_answered
    assert is_token or "before it has logged in" in str(refused.value)
    assert server.identity is None


def test_versions_that_the_broker_does_not_have(world: World) -> None:
    """Promise: the client learns those that it has, and asks again."""
    server = world.server()
    frame = Frames.frame(VERSIONS, 4, 1, VERSION_FIELDS)[4:]
    frame = frame[:2] + (99).to_bytes(2, "big") + frame[4:]
    reply = Frames.reply(VERSIONS, 0, b"".join(asyncio.run(server.answer(frame)))[4:])
    assert reply.error_code == ErrorCode.unsupported_version
    asked(server)


def test_versions_are_asked_for_a_few_times(world: World) -> None:
    """Promise: a client cannot keep the event loop busy with them."""
    server = world.server()
    wrong = {**VERSION_FIELDS, "client_software_name": "-"}
    for _ in range(3):
        assert send(server, VERSIONS, 3, wrong).error_code == ErrorCode.invalid_request
    with pytest.raises(LoginRefused, match="4 times"):
        send(server, VERSIONS, 3, wrong)


@pytest.mark.parametrize("version", [-1, 99])
@pytest.mark.parametrize("state", [begin, asked, in_requests])
@pytest.mark.parametrize("key", [HANDSHAKE, VERSIONS, AUTHENTICATE, METADATA, -1])
def test_versions_of_requests_that_do_not_exist(
    world: World, state: Any, key: int, version: int
) -> None:
    """Promise: refused, whatever the numbers at the head of the frame."""
    server = world.server()
    state(server)
    frame = b"".join(each.to_bytes(2, "big", signed=True) for each in (key, version)) + bytes(8)
    if key == VERSIONS and state is begin:
        assert asyncio.run(server.answer(frame))
        return
    with pytest.raises(LoginRefused):
        asyncio.run(server.answer(frame))
    assert server.identity is None


@pytest.mark.parametrize("frame", [b"", b"\0\x11", b"\0\x11\0\1\0\0\0\1\xff"])
def test_frames_that_are_not_requests(world: World, frame: bytes) -> None:
    """Promise: an error that says so, and no login."""
    server = world.server()
    with pytest.raises(errors.BadRequest):
        asyncio.run(server.answer(frame))
    assert server.identity is None


@settings(max_examples=200)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=60),
            st.builds(
                lambda key, version, body: struct.pack(">hhih", key, version, 1, -1) + body,
                st.sampled_from([HANDSHAKE, VERSIONS, AUTHENTICATE, METADATA]),
                st.integers(-2, 5),
                st.binary(max_size=60),
            ),
            st.sampled_from(
                [Frames.frame(key, version, 1, body)[4:] for key, version, body in FRAMES.values()]
            ),
        ),
        max_size=4,
    )
)
def test_any_frames(shared: World, frames: list[bytes]) -> None:
    """Promise: every sequence of frames ends in a reply or a refusal, and only the password in a
    login.
    """
    server = shared.server()
    for frame in frames:
        try:
            asyncio.run(server.answer(frame))
        except (LoginRefused, errors.BadRequest):
            break
        if server.identity is not None:
            assert PASSWORD.encode() in frame
            break


def test_nobody_logs_in_while_the_users_are_not_read(world: World) -> None:
    """Promise: refused after the silence of a dead broker, and accepted again after a look."""
    world.clock.advance(STALE_SECONDS)
    server = world.server()
    handshake(server, "SCRAM-SHA-256")
    with pytest.raises(errors.SecurityNotRead):
        scram(server, "SCRAM-SHA-256", "alice", PASSWORD)
    assert Work.LOGINS in world.refused.states()
    world.watch.refresh()
    server = world.server()
    handshake(server, "SCRAM-SHA-256")
    scram(server, "SCRAM-SHA-256", "alice", PASSWORD)
