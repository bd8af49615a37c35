"""Hostile clients of a listener with TLS, beside a client of another listener of the same broker.

Promise: a handshake is the most expensive thing that a client can ask for before it has said who it
is, and neither a flood of them nor anything that is sent in their place delays other clients.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pytest

from tests.support import kafkarequests
from tests.support.certificates import Authority
from tests.support.hostile import CONNECTIONS, KAFKA_BYTES, Address, Siege
from tests.support.kafkas import Frames

SECONDS: Final = 2.0
"""The duration of a flood."""
CROWD: Final = 100
MIB: Final = 1 << 20
LOADED: Final = "loaded"
PING: Final = Frames.frame(18, 0, 1, {})
Hostile = Callable[["Target"], Iterator[None] | None]


class Target:
    """The listener that is attacked."""

    def __init__(self, address: Address, authority: Authority) -> None:
        self.address = address
        self.context = ssl.create_default_context(cafile=authority.path)

    @contextlib.contextmanager
    def plain(self, source: int = 0) -> Iterator[socket.socket]:
        """A connection without a handshake, from one of loopback's addresses."""
        with socket.socket() as link:
            link.settimeout(30.0)
            link.bind((f"127.0.0.{source or 1}", 0))
            link.connect(self.address)
            yield link

    @contextlib.contextmanager
    def encrypted(self, source: int = 0) -> Iterator[ssl.SSLSocket]:
        """A connection after its handshake."""
        with (
            self.plain(source) as link,
            self.context.wrap_socket(link, server_hostname="localhost") as found,
        ):
            yield found

    def hello(self) -> bytes:
        """The first bytes of a handshake."""
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = self.context.wrap_bio(incoming, outgoing, server_hostname="localhost")
        with contextlib.suppress(ssl.SSLWantReadError):
            tls.do_handshake()
        return outgoing.read()

    def ping(self, source: int = 0) -> float:
        """Connects, asks and reads the answer. Returns the seconds that it took."""
        began = time.monotonic()
        with self.encrypted(source) as link:
            link.sendall(PING)
            assert link.recv(8)
        return time.monotonic() - began


def shakes_hands_and_leaves(target: Target) -> None:
    """Eight threads connect, shake hands and leave as fast as they can."""
    until = time.monotonic() + SECONDS

    def flood(_: int) -> int:
        for count in itertools.count():
            if time.monotonic() > until:
                return count
            with contextlib.suppress(OSError), target.encrypted(source=7):
                pass
        raise AssertionError

    with ThreadPoolExecutor(8) as pool:
        flooding = pool.map(flood, range(8))
        assert target.ping(source=8) < SECONDS  # of another address, in its turn
        assert sum(flooding) > CROWD


def greets_and_waits(target: Target) -> Iterator[None]:
    """A crowd begins handshakes and does not complete them."""
    with contextlib.ExitStack() as opened:
        for _ in range(CROWD):
            opened.enter_context(target.plain(source=7)).sendall(target.hello())
        yield
        target.ping(source=8)


def sends_garbage(target: Target) -> None:
    """In place of a handshake, in the middle of one, and after it."""
    hello = target.hello()
    for number in range(CROWD):
        with contextlib.suppress(OSError):
            with target.plain() as link:
                for sent in (hello[: number % len(hello)], b"\x16\x03\x03\x40\x00" + bytes(16_384)):
                    link.sendall(sent)
                link.recv(4_096)
            with target.encrypted() as found:
                raw = socket.socket(fileno=socket.dup(found.fileno()))
                with raw:
                    raw.sendall(b"\x17\x03\x03\x40\x00" + bytes(16_384))
                    raw.recv(4_096)


def sends_a_byte_at_a_time(target: Target) -> None:
    """Handshakes and requests, each byte of a request in a record of its own."""
    hello = target.hello()
    for _ in range(5):
        with target.plain() as link:
            for at in range(len(hello)):
                link.sendall(hello[at : at + 1])
            assert link.recv(4_096)
    with target.encrypted() as found:
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        frame = Frames.frame(
            0, 3, 1, kafkarequests.produce_fields(LOADED, 0, kafkarequests.batch([bytes(9_000)]))
        )
        for at in range(len(frame)):
            found.sendall(frame[at : at + 1])
        assert found.recv(4)


def never_reads(target: Target) -> Iterator[None]:
    """Asks for megabytes twenty times over thirty connections, and reads nothing."""
    frame = Frames.frame(1, 4, 1, kafkarequests.fetch_fields(LOADED, 0, 0, 50 * MIB))
    with contextlib.ExitStack() as opened:
        for _ in range(30):
            link = opened.enter_context(target.encrypted())
            link.sendall(frame * 20)
        yield
        assert link.recv_into(bytearray(4)) == 4
        assert sum(len(link.recv(MIB)) for _ in range(200)) > MIB  # there was much to read


def floods_with_connections(target: Target) -> Iterator[None]:
    """More connections than there may be, from eight addresses, each with half a handshake."""
    hello = target.hello()
    with contextlib.ExitStack() as opened:
        for number in range(CONNECTIONS + CROWD):
            link = opened.enter_context(target.plain(source=10 + number % 8))
            with contextlib.suppress(OSError):
                link.sendall(hello[: len(hello) // 2])
        yield


@pytest.fixture(name="attacked", scope="module")
def _attacked(
    tmp_path_factory: pytest.TempPathFactory, authority: Authority
) -> Iterator[tuple[Siege, Target]]:
    """A broker with two listeners; the well-behaved client uses the one without TLS."""
    certificate, key = authority.sign("broker")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address: Address = ("127.0.0.1", probe.getsockname()[1])
    settings = {"SPARKLOG_TLS_CERTIFICATE": certificate, "SPARKLOG_TLS_KEY": key}
    root = tmp_path_factory.mktemp("hostile-tls") / "root"
    with Siege(root, settings, beside=f"SSL://127.0.0.1:{address[1]}") as siege:
        with siege.frames() as client:
            kafkarequests.create(client, LOADED)
            megabyte = kafkarequests.batch([bytes(MIB - 1_000)])
            for _ in range(16):
                assert not kafkarequests.produce(client, LOADED, 0, megabyte).error_code
        yield siege, Target(address, authority)


CASES: Final = (
    shakes_hands_and_leaves,
    greets_and_waits,
    sends_garbage,
    sends_a_byte_at_a_time,
    never_reads,
    floods_with_connections,
)


@pytest.mark.xdist_group("hostile-tls")
@pytest.mark.parametrize("attack", CASES, ids=lambda each: each.__name__)
def test_another_client_continues(attack: Hostile, attacked: tuple[Siege, Target]) -> None:
    """Memory and the work before a request is answered are bounded."""
    siege, target = attacked
    siege.withstand(lambda _: attack(target), KAFKA_BYTES, name=attack.__name__)


@pytest.mark.soak(mode="limits")
@pytest.mark.parametrize("attack", CASES, ids=lambda each: each.__name__)
def test_a_bystander_is_hardly_disturbed_by(
    attack: Hostile, attacked: tuple[Siege, Target]
) -> None:
    """The waits of the well-behaved client, on a quiet machine."""
    siege, target = attacked
    siege.withstand(lambda _: attack(target), KAFKA_BYTES, name=attack.__name__, is_timed=True)
