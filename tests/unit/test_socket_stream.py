"""The bytes of a Kafka connection, plain and over TLS."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import uvloop

from sparklog.broker.kafka.socket_stream import READ_BYTES, SocketStream
from sparklog.broker.tls.contexts import TlsFiles, server_context
from sparklog.broker.tls.engine import STEP_BYTES, TlsEngine, TlsFailed
from tests.support.certificates import Authority

_PATIENCE_SECONDS = 30


@pytest.fixture(name="contexts", scope="module", params=["plain", "TLSv1.2", "TLSv1.3"])
def _contexts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
    """The contexts of the server and of a client; None: without TLS."""
    if request.param == "plain":
        return None
    authority = Authority(tmp_path_factory.mktemp("ca"))
    certificate, key = authority.sign("broker")
    client = ssl.create_default_context(cafile=authority.path)
    version = ssl.TLSVersion.TLSv1_2 if request.param == "TLSv1.2" else ssl.TLSVersion.TLSv1_3
    client.minimum_version = client.maximum_version = version
    return server_context(TlsFiles(certificate=certificate, key=key)), client


async def in_thread(call: Callable[[bytes], bool], data: bytes) -> bool:
    """Runs a step of a handshake as the listener does."""
    return await asyncio.get_running_loop().run_in_executor(None, call, data)


@asynccontextmanager
async def connected(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None,
) -> AsyncIterator[tuple[SocketStream, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A stream at the server, and the client at its other end."""
    opened: asyncio.Queue[SocketStream] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(partial(SocketStream, opened.put_nowait), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = contexts[1] if contexts else None
    name = "localhost" if contexts else None
    connecting = loop.create_task(
        asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname=name)
    )
    stream = await opened.get()
    if contexts:
        await stream.start_tls(TlsEngine(contexts[0], is_server=True), in_thread)
    reader, writer = await connecting
    try:
        yield stream, reader, writer
    finally:
        writer.transport.abort()
        stream.close()
        server.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Runs a test in the loop of the listener."""

    async def bounded() -> None:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            await test()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded())


def pattern(size: int) -> bytes:
    """Returns bytes whose order matters."""
    return (b"%08d" * 16 % tuple(range(16)) * (size // 128 + 1))[:size]


@pytest.mark.parametrize("size", [1, 1_000, READ_BYTES // 2, READ_BYTES + 1, 3_000_000])
def test_reads_are_exact(contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None, size: int) -> None:
    """Small reads, then a large one, and the end, for any sizes in which the client sends."""

    async def test() -> None:
        async with connected(contexts) as (stream, _, writer):
            sent = pattern(size)
            writer.write(sent[:1])
            assert bytes(await stream.read(1)) == sent[:1]
            writer.write(sent + b"tail")
            assert bytes(await stream.read(size)) == sent
            assert bytes(await stream.read(4)) == b"tail"
            writer.write(b"last")
            writer.write_eof() if contexts is None else writer.close()
            assert bytes(await stream.read(4)) == b"last"
            with pytest.raises(ConnectionResetError):
                await stream.read(1)
            assert stream.is_over

    run(test)


def test_what_is_not_read_stays_with_the_client(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None,
) -> None:
    """The broker receives little ahead of `read`; then all of it, in order."""

    async def test() -> None:
        async with connected(contexts) as (stream, _, writer):
            sent = pattern(20_000_000)
            writer.write(sent)
            before = -1
            while stream.read_bytes != before:  # until the sockets' buffers are full
                before = stream.read_bytes
                await asyncio.sleep(0.05)
            assert stream.read_bytes < 300_000
            parts = [
                bytes(await stream.read(min(97_003, len(sent) - at)))
                for at in range(0, len(sent), 97_003)
            ]
            assert b"".join(parts) == sent

    run(test)


def test_writes_wait_for_the_client(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None,
) -> None:
    """A client that does not read holds back the writer, and gets every byte in the end."""

    async def test() -> None:
        async with connected(contexts) as (stream, reader, _):
            chunks = [pattern(size) for size in (1, 70_000, 0, 30_000_000)]
            writing = asyncio.get_running_loop().create_task(stream.write(chunks))
            await asyncio.sleep(0.2)
            assert not writing.done()
            found = await reader.readexactly(sum(map(len, chunks)))
            await writing
            assert found == b"".join(chunks)

    run(test)


def test_a_damaged_record_ends_the_connection(tmp_path: Path) -> None:
    """A reader gets the reason, also if it waits already."""
    authority = Authority(tmp_path)
    certificate, key = authority.sign("broker")
    server = server_context(TlsFiles(certificate=certificate, key=key))
    client = ssl.create_default_context(cafile=authority.path)

    async def test() -> None:
        async with connected((server, client)) as (stream, _, writer):
            reading = asyncio.get_running_loop().create_task(stream.read(4))
            await asyncio.sleep(0)
            descriptor = writer.transport.get_extra_info("socket").fileno()
            os.write(descriptor, b"\x17\x03\x03\x00\x20" + bytes(32))
            with pytest.raises(TlsFailed):
                await reading

    run(test)


def test_requests_right_after_the_handshake_are_read(tmp_path: Path) -> None:
    """A client may send them with the last message of its handshake, more than fits."""
    authority = Authority(tmp_path)
    certificate, key = authority.sign("broker")
    server = server_context(TlsFiles(certificate=certificate, key=key))
    client = TlsEngine(
        ssl.create_default_context(cafile=authority.path), is_server=False, host="localhost"
    )
    sent = pattern(150_000)

    async def test() -> None:
        async with connected(None) as (stream, reader, writer):
            starting = asyncio.get_running_loop().create_task(
                stream.start_tls(TlsEngine(server, is_server=True), in_thread)
            )
            client.handshake()
            writer.write(client.take_outgoing())
            while not client.handshake(await reader.read(9_999)):
                pass
            last = client.take_outgoing()
            writer.write(last + b"".join(client.encrypt([sent])))
            await starting
            found = [await stream.read(1_000) for _ in range(150)]
            assert b"".join(found) == sent

    run(test)


def test_nothing_is_kept_after_the_end(tmp_path: Path) -> None:
    """Promise: a client cannot fill memory with ciphertext that nothing will decrypt."""
    authority = Authority(tmp_path)
    certificate, key = authority.sign("broker")
    server = server_context(TlsFiles(certificate=certificate, key=key))
    client = TlsEngine(
        ssl.create_default_context(cafile=authority.path), is_server=False, host="localhost"
    )

    async def test() -> None:
        async with connected(None) as (stream, reader, writer):
            engine = TlsEngine(server, is_server=True)
            starting = asyncio.get_running_loop().create_task(stream.start_tls(engine, in_thread))
            client.handshake()
            writer.write(client.take_outgoing())
            while not client.handshake(await reader.read(9_999)):
                pass
            writer.write(client.take_outgoing() + client.close())
            await starting
            with pytest.raises(ConnectionResetError):
                await stream.read(1)
            before = stream.read_bytes
            writer.write(b"\x17\x03\x03\x40\x00" * 1_000_000)
            await writer.drain()
            assert stream.read_bytes == before  # nor does it count as progress
            assert len(engine._received) < STEP_BYTES

    run(test)


def test_loops_do_not_share_a_buffer(tmp_path: Path) -> None:
    """Two brokers of one process receive at the same time, each in a thread of its own."""
    authority = Authority(tmp_path)
    certificate, key = authority.sign("broker")
    server = server_context(TlsFiles(certificate=certificate, key=key))
    client = ssl.create_default_context(cafile=authority.path)
    sent = pattern(10_000_000)

    async def transfer() -> None:
        async with connected((server, client)) as (stream, _, writer):
            writer.write(sent)
            parts = [await stream.read(100_000) for _ in range(100)]
            assert b"".join(parts) == sent

    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(run, transfer) for _ in range(2)]:
            each.result()
