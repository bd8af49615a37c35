"""Hostile clients of a listener with logins, beside a client of another listener of the broker.

Promise: a client that has not logged in has little to spend, and neither floods of frames nor
guessed passwords delay other clients, or keep a user at another address from logging in.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pytest

from sparklog.broker.kafka.sasl_logins import FRAME_BYTES
from sparklog.broker.kafka.slots import SLOTS
from sparklog.storage.objects import LocalStore
from tests.support.hostile import KAFKA_BYTES, Address, Siege
from tests.support.kafkas import Frames
from tests.support.users import PASSWORD, add_alice

SECONDS: Final = 2.0
"""The duration of a flood."""
ADDRESSES: Final = 8
LOGIN_SECONDS: Final = 5.0
"""For a login beside an attack, on a machine that runs other tests too."""
HANDSHAKE, VERSIONS, AUTHENTICATE = 17, 18, 36
PLAIN: Final = Frames.frame(HANDSHAKE, 1, 1, {"mechanism": "PLAIN"})


def token(password: str) -> bytes:
    """A request that tries a password of alice."""
    return Frames.frame(AUTHENTICATE, 2, 2, {"auth_bytes": f"\0alice\0{password}".encode()})


class Target:
    """The listener that is attacked."""

    def __init__(self, address: Address) -> None:
        self.address = address

    @contextlib.contextmanager
    def connected(self, source: int) -> Iterator[socket.socket]:
        """A connection from one of loopback's addresses."""
        with socket.socket() as link:
            link.settimeout(30.0)
            link.bind((f"127.0.0.{source}", 0))
            link.connect(self.address)
            yield link

    def check_login(self) -> None:
        """Logs in from an address that attacks nothing, in time."""
        began = time.monotonic()
        with self.connected(200) as link:
            link.sendall(PLAIN + token(PASSWORD))
            sizes = []
            for _ in range(2):
                size = int.from_bytes(link.recv(4, socket.MSG_WAITALL), "big")
                sizes.append(link.recv(size, socket.MSG_WAITALL))
            assert sizes[1][5:7] == b"\0\0", "the login has failed"
        assert time.monotonic() - began < LOGIN_SECONDS

    def flood(self, attack: Callable[[socket.socket], None]) -> None:
        """Repeats an attack from eight addresses, and checks a login meanwhile."""
        until = time.monotonic() + SECONDS

        def repeat(number: int) -> int:
            for count in itertools.count():
                if time.monotonic() > until:
                    return count
                with contextlib.suppress(OSError), self.connected(10 + number) as link:
                    attack(link)
            raise AssertionError

        with ThreadPoolExecutor(ADDRESSES) as pool:
            flooding = pool.map(repeat, range(ADDRESSES))
            self.check_login()
            assert all(flooding)


Hostile = Callable[[Target], Iterator[None] | None]


def asks_for_versions(target: Target) -> None:
    """A buffer full of small requests at a time, each of which has an answer."""
    request = Frames.frame(VERSIONS, 0, 1, {})
    frames = (request[:6] + b"\0\x63" + request[8:]) * (FRAME_BYTES // len(request))

    def attack(link: socket.socket) -> None:
        link.sendall(frames)
        while link.recv(65_536):
            pass

    target.flood(attack)


def guesses_passwords(target: Target) -> None:
    """Each guess costs the broker PBKDF2; those who guess do not wait for the answer."""
    guesses = itertools.count()

    def attack(link: socket.socket) -> None:
        link.sendall(PLAIN + token(f"guess-{next(guesses)}"))
        link.recv(64)

    target.flood(attack)


def sends_garbage(target: Target) -> None:
    """Requests and versions that do not exist, lengths that are wrong, and long names."""
    bodies = [
        b"",
        b"\0\x12\xff\xff" + bytes(8),
        b"\0\x24\x7f\xff" + bytes(8),
        b"\xff" * 100,
        PLAIN[4:] + b"\0" * 1_000,
        PLAIN[4:14] + b"\x7f\xff" + b"n" * 30_000,
    ]
    frames = [len(each).to_bytes(4, "big") + each for each in bodies]
    frames += [b"\x7f\xff\xff\xff", (FRAME_BYTES + 1).to_bytes(4, "big"), b"\0\0"]
    long_name = b"\0" + b"a" * (FRAME_BYTES - 100) + b"\0x"
    frames.append(PLAIN + Frames.frame(AUTHENTICATE, 2, 2, {"auth_bytes": long_name}))
    turns = itertools.cycle(frames)

    def attack(link: socket.socket) -> None:
        link.sendall(next(turns))
        link.shutdown(socket.SHUT_WR)
        while link.recv(4_096):
            pass

    target.flood(attack)


def connects_and_waits(target: Target) -> Iterator[None]:
    """More silent connections than may wait, half of them with half a frame.

    An address that has logged in before is admitted at once: slots are kept for it, and a waiting
    connection of another address makes room.
    """
    with contextlib.ExitStack() as opened:
        for number in range(2 * SLOTS):
            link = opened.enter_context(target.connected(10 + number % ADDRESSES))
            with contextlib.suppress(OSError):  # beyond those that may wait
                link.sendall(PLAIN[: 10 * (number % 2)])
        target.check_login()
        yield


@pytest.fixture(name="attacked", scope="module")
def _attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Siege, Target]]:
    """A broker with two listeners; the well-behaved client uses the one without logins."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address: Address = ("127.0.0.1", probe.getsockname()[1])
    root = tmp_path_factory.mktemp("hostile-logins") / "root"
    add_alice(LocalStore(str(root)))
    with Siege(root, beside=f"SASL_PLAINTEXT://127.0.0.1:{address[1]}") as siege:
        target = Target(address)
        target.check_login()
        yield siege, target


CASES: Final = (asks_for_versions, guesses_passwords, sends_garbage, connects_and_waits)


@pytest.mark.xdist_group("hostile-logins")
@pytest.mark.parametrize("attack", CASES, ids=lambda each: each.__name__)
def test_another_client_continues(attack: Hostile, attacked: tuple[Siege, Target]) -> None:
    """Memory and the work before a login are bounded."""
    siege, target = attacked
    siege.withstand(lambda _: attack(target), KAFKA_BYTES, name=attack.__name__)
