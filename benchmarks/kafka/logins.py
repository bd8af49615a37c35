"""The cost of logins: of one, and of a thousand clients that connect at the same moment."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import multiprocessing
import ssl
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple

from benchmarks.kafka.sides import KafkaSetup, measure
from benchmarks.processes import cpu_seconds
from benchmarks.progress import doing
from benchmarks.secured import add_user, trial_files
from sparklog.bench.broker import BrokerProcess, FreshRoot
from sparklog.bench.report import Measurement, Times

if TYPE_CHECKING:
    from threading import Event

_LOGINS: Final = 1_000
_PASSWORD: Final = "a long password"
_USER: Final = "alice"
_PING_SECONDS: Final = 0.005
_PAUSE_SECONDS: Final = 1.0
_MECHANISM: Final = "SCRAM-SHA-256"
_HANDSHAKE, _VERSIONS, _AUTHENTICATE = 17, 18, 36


class _Streams(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, api: int, body: bytes, version: int = 0) -> bytes:
        """Returns the body of the response to a request."""
        request = struct.pack(">hhih", api, version, 1, -1) + body
        self.writer.write(struct.pack(">i", len(request)) + request)
        size = struct.unpack(">i", await self.reader.readexactly(4))[0]
        return (await self.reader.readexactly(size))[4:]


class _Client:
    """Logs in as a client that keeps the salted password, as most do for their next connections."""

    def __init__(self, address: str, ca: str) -> None:
        """`ca`: the file of the CA; empty without TLS."""
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self.address, self.ca = address, ca
        self._context: ssl.SSLContext | None = None
        self._salted: dict[bytes, bytes] = {}

    async def connect(self) -> _Streams:
        """Returns a connection that has logged in."""
        if self.ca and self._context is None:
            self._context = ssl.create_default_context(cafile=self.ca)
        found = _Streams(*await asyncio.open_connection(self._host, self._port, ssl=self._context))
        mechanism = _MECHANISM.encode()
        await found.ask(_HANDSHAKE, struct.pack(">h", len(mechanism)) + mechanism, version=1)
        bare = f"n={_USER},r=0123456789abcdef"
        first = await self._token(found, f"n,,{bare}".encode())
        parts = dict(each.split("=", 1) for each in first.decode().split(","))
        salted = self._salt(base64.b64decode(parts["s"]), int(parts["i"]))
        unproven = f"c=biws,r={parts['r']}"
        signed = f"{bare},{first.decode()},{unproven}".encode()
        key = hmac.digest(salted, b"Client Key", "sha256")
        signature = hmac.digest(hashlib.sha256(key).digest(), signed, "sha256")
        proof = bytes(a ^ b for a, b in zip(key, signature, strict=True))
        await self._token(found, f"{unproven},p={base64.b64encode(proof).decode()}".encode())
        return found

    @staticmethod
    async def _token(streams: _Streams, token: bytes) -> bytes:
        reply = await streams.ask(_AUTHENTICATE, struct.pack(">i", len(token)) + token)
        code, message = struct.unpack_from(">hh", reply)
        assert code == 0, reply
        at = 4 + max(message, 0)
        size = struct.unpack_from(">i", reply, at)[0]
        return reply[at + 4 : at + 4 + size]

    def _salt(self, salt: bytes, iterations: int) -> bytes:
        if salt not in self._salted:
            password = _PASSWORD.encode()
            self._salted[salt] = hashlib.pbkdf2_hmac("sha256", password, salt, iterations)
        return self._salted[salt]


@measure
def logins(setup: KafkaSetup) -> Iterator[Measurement]:
    """Measures logins by SCRAM, one after another and all at the same moment."""
    with FreshRoot(setup.folder) as folder:
        files = trial_files(folder)
        root = folder / "root"
        add_user(root, _USER, _PASSWORD)
        limits = {"SPARKLOG_KAFKA_MAX_CONNECTIONS_PER_ADDRESS": str(2 * _LOGINS)}
        for protocol, ca, settings in (
            ("SASL_PLAINTEXT", "", limits),
            ("SASL_SSL", files.ca, limits | files.settings),
        ):
            process = BrokerProcess(root, settings, kafka=f"{protocol}://127.0.0.1:0")
            process.start()
            client = _Client(process.kafka_address, ca)
            try:
                with doing(f"logins over {protocol}"):
                    yield from asyncio.run(_measured(client, process.pid, protocol))
            finally:
                process.stop()


async def _measured(client: _Client, pid: int, protocol: str) -> list[Measurement]:
    await _close(await client.connect())
    before, took = cpu_seconds(pid)[pid], Times()
    for _ in range(_LOGINS):
        began = time.perf_counter()
        found = await client.connect()
        took.add(time.perf_counter() - began)
        await _close(found)
    each_ms = (cpu_seconds(pid)[pid] - before) / _LOGINS * 1e3
    one = Measurement(
        name=f"login by {_MECHANISM} over {protocol}: processor time of the broker",
        value=f"{each_ms:.2f} ms",
        target="≤ 10 ms",
        met=each_ms <= 10,
        detail=f"one after another, at the client: {took}",
    )
    loop, context = asyncio.get_running_loop(), multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(1, context) as other:
        is_over = manager.Event()
        pinging = loop.run_in_executor(other, _ping, client.address, client.ca, is_over)
        await asyncio.sleep(_PAUSE_SECONDS)
        began = time.perf_counter()
        connections = await asyncio.gather(*(client.connect() for _ in range(_LOGINS)))
        seconds = time.perf_counter() - began
        is_over.set()
        times = await pinging
    waits = Times([wait for at, wait in times if at >= began])
    for each in connections:
        await _close(each)
    return [
        one,
        Measurement(
            name=f"{_LOGINS} clients that log in at the same moment over {protocol}",
            value=f"{seconds:.2f} s",
            target="≤ 3 s",
            met=seconds <= 3,
            detail="the clients' half is computed on the same cores",
        ),
        Measurement(
            name=f"another client meanwhile over {protocol}, p99",
            value=f"{waits.ms(99):.1f} ms",
            target="≤ 20 ms",
            met=waits.ms(99) <= 20,
            detail=f"{waits}; in a process beside those of the broker and the clients",
        ),
    ]


def _ping(address: str, ca: str, is_over: Event) -> list[tuple[float, float]]:
    """Sends small requests over one connection; returns (time, seconds until the answer)."""

    async def run() -> list[tuple[float, float]]:
        found, times = await _Client(address, ca).connect(), []
        while not is_over.is_set():
            began = time.perf_counter()
            await found.ask(_VERSIONS, b"")
            times.append((began, time.perf_counter() - began))
            await asyncio.sleep(_PING_SECONDS)
        await _close(found)
        return times

    return asyncio.run(run())


async def _close(streams: _Streams) -> None:
    streams.writer.close()
    await streams.writer.wait_closed()
