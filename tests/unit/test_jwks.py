"""The keys of the OAuth issuer: how they are fetched, and what an issuer's host can do."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from unittest import mock

import pytest
from structlog.testing import capture_logs

from sparklog import errors
from sparklog.broker import jwks, oauth
from sparklog.broker.jwks import JwksSource, fetch
from sparklog.broker.oauth import TokenVerifier
from sparklog.broker.refused_work import RefusedWork, Work
from sparklog.clock import ManualClock
from sparklog.security import jwt
from sparklog.security.jwt import JWKS_BYTES_MAX, JwtRejected, JwtRules, UnknownKey
from tests.support.certificates import Authority
from tests.support.issuer import AUDIENCE, ISSUER, Issuer, send, web_server

RULES = JwtRules(issuer=ISSUER, audiences=frozenset({AUDIENCE}))


class Host:
    """The web server of an issuer."""

    def __init__(self) -> None:
        self.issuer = Issuer()
        self.fetches = 0
        self.status = 200
        self.paths: list[str] = []
        self.blocked: threading.Event | None = None

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        self.fetches += 1
        self.paths.append(handler.path)
        if self.blocked is not None:
            self.blocked.wait(10)
        send(handler, self.issuer.jwks(), self.status, location="/elsewhere")


@pytest.fixture(name="host")
def _host() -> Host:
    return Host()


@pytest.fixture(name="url")
def _url(host: Host) -> Iterator[str]:
    with web_server(host.respond) as url:
        yield f"{url}/keys?v=1"


class World:
    """A verifier whose clock a test moves."""

    def __init__(self, location: str) -> None:
        self.clock = ManualClock(int(time.time() * 1e6))
        self.refused = RefusedWork(self.clock)
        self.source = JwksSource(location, clock=self.clock)
        self.verifier = TokenVerifier(RULES, self.source, clock=self.clock, refused=self.refused)

    def name(self, token: str) -> str:
        return self.verifier.verify(token).name


def test_tokens_of_an_issuer(host: Host, url: str) -> None:
    """The keys are fetched once, from the address in the settings, and verify its tokens."""
    world = World(url)
    world.verifier.open()
    assert world.name(host.issuer.token("bob")) == "bob"
    with pytest.raises(JwtRejected):
        world.name(Issuer().token("bob"))
    assert host.paths == ["/keys?v=1"]


def test_a_rotated_key_is_fetched_when_a_token_names_it(host: Host, url: str) -> None:
    """Unknown keys cause one fetch a minute, however many tokens name one."""
    world = World(url)
    world.verifier.open()
    host.issuer.rotate()
    token = host.issuer.token()
    with pytest.raises(UnknownKey):
        world.name(token)
    world.verifier.newer_keys().result(10)
    assert world.name(token) == "alice"
    for _ in range(100):
        world.verifier.newer_keys().result(0)
    assert host.fetches == 2
    world.clock.advance(jwks.UNKNOWN_KEY_SECONDS)
    world.verifier.newer_keys().result(10)
    assert host.fetches == 3


def test_all_wait_for_one_fetch(host: Host, url: str) -> None:
    """Clients with a new key that come during a fetch wait for its end, not for a minute."""
    world = World(url)
    world.verifier.open()
    host.blocked = threading.Event()
    first = world.verifier.newer_keys()
    assert world.verifier.newer_keys() is first
    assert not first.done()
    assert not first.cancel(), "the others would wait in vain"
    host.blocked.set()
    first.result(10)


def test_keys_of_an_issuer_that_is_away_are_used_for_a_day(host: Host, url: str) -> None:
    """Then tokens are refused, as a state of the broker, until the issuer is back."""
    world = World(url)
    world.verifier.open()
    token = host.issuer.token(seconds=1e6)
    host.status = 503
    world.clock.advance(jwks.KEPT_SECONDS - 1)
    with pytest.raises(errors.TokenKeysNotRead, match="the server answers 503"):
        world.source.refresh()
    assert world.name(token) == "alice"
    assert world.source.pause_seconds < 60
    world.clock.advance(1)
    for verify in (world.verifier.verify, world.verifier.remembered):
        with pytest.raises(errors.TokenKeysNotRead, match="the server answers 503"):
            verify(token)
    assert Work.LOGINS in world.refused.states()
    host.status = 200
    world.source.refresh()
    assert world.name(token) == "alice"
    assert world.source.pause_seconds == jwks.FETCHED_EVERY_SECONDS


def test_a_broker_starts_without_an_issuer(host: Host, url: str) -> None:
    """It refuses tokens until the keys can be fetched, and says so."""
    host.status = 500
    world = World(url)
    with capture_logs() as lines:
        world.verifier.open()
    assert "the server answers 500" in str(lines)
    world.verifier.note_if_refused()
    assert "the server answers 500" in world.refused.states()[Work.LOGINS]


def test_a_file_is_read_at_the_start_and_when_it_changes(tmp_path: Path) -> None:
    """A broker does not start with a bad file, and keeps its keys if the file becomes bad."""
    path, issuer = tmp_path / "jwks.json", Issuer()
    world = World(str(path))
    for content in (None, b"{}"):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(errors.BadOption, match=r"oauth\.jwks"):
            world.verifier.open()
    path.write_bytes(issuer.jwks())
    world.verifier.open()
    assert world.source.pause_seconds == 1.0
    token = issuer.token()
    assert world.name(token) == "alice"
    path.write_bytes(b"{")
    with pytest.raises(errors.TokenKeysNotRead, match="not a JSON object"):
        world.source.refresh()
    assert world.name(token) == "alice"
    path.write_bytes(Issuer().jwks())
    world.source.refresh()
    with pytest.raises(JwtRejected):
        world.name(token)


# ------------------------------------------------------------------------------ memory


def test_a_token_is_verified_once(host: Host, url: str) -> None:
    """Until it expires, or the keys change; and refused tokens are not remembered."""
    world = World(url)
    world.verifier.open()
    token, other = host.issuer.token(), host.issuer.token(aud="x")
    with mock.patch.object(jwt, "verify", wraps=jwt.verify) as verify:
        for _ in range(3):
            assert world.name(token) == "alice"
            with pytest.raises(JwtRejected):
                world.name(other)
        assert verify.call_count == 1 + 3
        assert world.verifier.remembered(other) is None
        host.issuer.rotate()
        world.source.refresh()
        assert world.verifier.remembered(token) is None
        assert world.name(token) == "alice"
        assert verify.call_count == 5
        world.clock.advance(61)
        assert world.verifier.remembered(token) is None
        with pytest.raises(JwtRejected, match="expired"):
            world.name(token)


def test_memory_for_tokens_is_bounded(
    host: Host, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token that was used longest ago is forgotten first."""
    monkeypatch.setattr(oauth, "TOKENS_REMEMBERED", 2)
    world = World(url)
    world.verifier.open()
    a, b, c = (host.issuer.token(name) for name in "abc")
    for token in (a, b, a, c):
        world.name(token)
    assert [world.verifier.remembered(each) is not None for each in (a, b, c)] == [1, 0, 1]


# ------------------------------------------------------------------------------ hostile hosts


def test_redirects_are_not_followed(host: Host, url: str) -> None:
    """The host of an issuer cannot make the broker send a request anywhere else."""
    for status in (301, 302, 303, 307, 308):
        host.status = status
        with pytest.raises(ValueError, match=f"answers {status}; redirects are not followed"):
            fetch(url)
    assert set(host.paths) == {"/keys?v=1"}


@pytest.mark.parametrize("is_announced", [True, False])
def test_large_responses(is_announced: bool) -> None:
    """No more than a JWKS may have is read."""
    sent = threading.Event()

    def respond(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        if is_announced:
            handler.send_header("Content-Length", str(10**12))
        handler.end_headers()
        with contextlib.suppress(OSError):
            while True:
                handler.wfile.write(b" " * 65_536)
        sent.set()
        handler.close_connection = True

    with web_server(respond) as url:
        assert len(fetch(url)) == JWKS_BYTES_MAX + 1
        with pytest.raises(errors.TokenKeysNotRead, match="more than 262,144 bytes"):
            World(url).source.refresh()
        assert sent.wait(10)


def drip(connection: socket.socket, is_over: threading.Event) -> None:
    """Sends a response that does not end, a byte at a time."""
    with contextlib.suppress(OSError):
        connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
        while not is_over.wait(0.01):
            connection.sendall(b"y")


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_slow_responses(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch ends in time even if the server sends a byte now and then, or no TLS."""
    monkeypatch.setattr(jwks, "FETCH_SECONDS", 0.2)
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    drip(connection, is_over) if scheme == "http" else connection.recv(1 << 20)
                    connection.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(TimeoutError):
            fetch(f"{scheme}://127.0.0.1:{server.getsockname()[1]}/")
        is_over.set()
        thread.join(10)
        assert not thread.is_alive()


def test_the_host_of_an_issuer_proves_who_it_is(tmp_path: Path) -> None:
    """Its certificate has to be for its name, and signed by one of the CAs in `oauth.ca`."""
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.sign("host", hosts=("localhost",)))
    with socket.create_server(("127.0.0.1", 0)) as plain:

        def serve() -> None:
            for _ in range(3):
                connection, _ = plain.accept()
                with (
                    contextlib.suppress(OSError),
                    context.wrap_socket(connection, server_side=True) as found,
                ):
                    found.recv(10_000)
                    found.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

        thread = threading.Thread(target=serve)
        thread.start()
        port = plain.getsockname()[1]
        assert fetch(f"https://localhost:{port}/", ca=authority.path) == b"{}"
        for name, ca in (("localhost", other.path), ("127.0.0.1", authority.path)):
            with pytest.raises(ssl.SSLCertVerificationError):
                fetch(f"https://{name}:{port}/", ca=ca)
        thread.join()
