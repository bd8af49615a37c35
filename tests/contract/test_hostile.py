"""Clients that do not behave: each does its worst for some seconds, and a bystander goes on.

A case is one line of `CASES`. It is run against a broker in a process of its own, beside a client
that pings and sends all the time; that one's worst ping, its worst ack and the broker's memory are
bounded (`tests.support.hostile`).
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import kafkarequests
from tests.support.hostile import ATTEMPTS, Address, Attack, Siege

MIB = 1 << 20
LOADED, LOADED_BYTES = "loaded", 64 * MIB
HUGE, HUGE_BYTES = "huge", 40 * MIB
HELD = "held"
FETCH, METADATA, OFFSET_FETCH, DESCRIBE_GROUPS, DESCRIBE_CONFIGS = 1, 3, 9, 15, 32
DELETE_RECORDS = 21
HOLD_SECONDS = 3.0
NOBODY = "127.0.0.{}"
"""Loopback has many addresses; a flood comes from others than the bystander's."""


# ------------------------------------------------------------------------------ means


@contextlib.contextmanager
def links(
    address: Address, count: int, *, receive_bytes: int = 0, source: str = ""
) -> Iterator[list[socket.socket]]:
    """So many connections, some of which the broker may refuse or end."""
    found: list[socket.socket] = []
    try:
        for _ in range(count):
            link = socket.socket()
            if receive_bytes:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            link.settimeout(10.0)
            found.append(link)
            with contextlib.suppress(ConnectionError):
                if source:
                    link.bind((source, 0))
                link.connect(address)
        yield found
    finally:
        for link in found:
            link.close()


def send(link: socket.socket, data: bytes) -> None:
    """As much as the broker takes without being waited for."""
    link.setblocking(False)
    with contextlib.suppress(BlockingIOError, ConnectionError):
        sent = 0
        while sent < len(data):
            sent += link.send(data[sent : sent + MIB])


def answered(link: socket.socket) -> int:
    """Reads one answer; its size, or 0 where the broker has ended the connection."""
    link.settimeout(30.0)
    try:
        start = b""
        while len(start) < 4:
            part = link.recv(4 - len(start))
            if not part:
                return 0
            start += part
        size = left = int.from_bytes(start, "big")
        while left:
            part = link.recv(min(left, MIB))
            if not part:
                return 0
            left -= len(part)
    except ConnectionError:
        return 0
    return size


def ask(address: Address, frame: bytes, count: int = 1, connections: int = 1) -> list[int]:
    """Sizes of the answers to a request that some connections send `count` times each."""
    with links(address, connections) as found, ThreadPoolExecutor(connections) as pool:

        def each(link: socket.socket) -> list[int]:
            sizes = []
            for _ in range(count):
                link.settimeout(30.0)
                with contextlib.suppress(ConnectionError):
                    link.sendall(frame)
                sizes.append(answered(link))
            return sizes

        return [size for sizes in pool.map(each, found) for size in sizes]


# ------------------------------------------------------------------------------ cases


def lies_about_lengths(address: Address) -> None:
    """Frames of less than nothing, of more than is taken, and arrays of four billion items."""
    lies = [struct.pack(">i", size) for size in (-1, -(2**31), 2**31 - 1, 101 * MIB)]
    body = struct.pack(">hhih", METADATA, 1, 1, -1) + struct.pack(">I", 2**31 - 1)
    lies.append(struct.pack(">i", len(body)) + body)
    for _ in range(20):
        with links(address, len(lies)) as found:
            for link, lie in zip(found, lies, strict=True):
                send(link, lie)
            assert [answered(link) for link in found] == [0] * len(lies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of hostile client; `attack` ends by itself."""

    attack: Attack

    @property
    def name(self) -> str:
        return getattr(self.attack, "__name__", "?")


CASES: Sequence[Case] = [Case(attack=attack) for attack in (lies_about_lengths,)]


# ------------------------------------------------------------------------------ the broker


def prepare(siege: Siege, root: Path) -> None:
    """The topics that the cases read: one with much, one with a huge batch, one that is held."""
    with siege.frames() as client:
        for topic in (LOADED, HUGE, HELD):
            kafkarequests.create(client, topic)
        megabyte = kafkarequests.batch([bytes(MIB - 1_000)])
        for _ in range(LOADED_BYTES // MIB):
            assert not kafkarequests.produce(client, LOADED, 0, megabyte).error_code
        huge = kafkarequests.batch([bytes(10 * MIB)] * (HUGE_BYTES // (10 * MIB)))
        found = kafkarequests.produce(client, HUGE, 0, huge)
        assert not found.error_code, found.error_message
        log = root / "topics" / HELD / "_delta_log"
        last = max(int(each.stem) for each in log.glob("*.json"))
        (log / f"{last + 1:020}.json").touch()  # as another engine leaves it in a power cut
        assert not kafkarequests.produce(client, HELD, 0, kafkarequests.batch([b"x"])).error_code
        assert (
            not client.ask(10, 4, {"key_type": 0, "coordinator_keys": ["g"]})
            .coordinators[0]
            .error_code
        )


@pytest.fixture(name="siege", scope="module")
def _siege(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    root = tmp_path_factory.mktemp("hostile") / "root"
    with Siege(root) as siege:
        prepare(siege, root)
        yield siege


@pytest.mark.xdist_group("hostile")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bystander_goes_on_beside(case: Case, siege: Siege) -> None:
    """It is answered within 0.25 s, its sends are acked within 1 s, and memory is bounded."""
    for attempt in range(1, ATTEMPTS + 1):
        met = siege.bear(case.attack)
        if met.is_within or met.failures or attempt == ATTEMPTS:
            break
    print(case.name, met)  # noqa: T201 - the numbers, for those who ask with -s
    assert met.is_within, met
    assert met.pings, met
    assert met.sends, met
