"""The gRPC server beneath the Flight listener: what it answers, and what it lets in."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog import limits
from sparklog.broker.acceptors import Acceptor
from sparklog.broker.flight.grpc import http2, idle_frames
from sparklog.broker.flight.grpc.admission import UNADMITTED_BYTES, UNADMITTED_CALLS
from sparklog.broker.flight.grpc.call import (
    FREE_BYTES,
    UNADMITTED_MESSAGE_BYTES,
    Call,
    Method,
)
from sparklog.broker.flight.grpc.server import (
    CONNECTION_IDLE_SECONDS,
    PREFACE_SECONDS,
    UNADMITTED_SERVED_PER_NETWORK,
    Server,
    ServerBounds,
)
from sparklog.broker.flight.grpc.status import (
    DEADLINE_EXCEEDED,
    INTERNAL,
    INVALID_ARGUMENT,
    OK,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    UNIMPLEMENTED,
    GrpcError,
    PeerGone,
)
from sparklog.broker.tls.contexts import ServerTls, TlsFiles
from sparklog.clock import Clock, ManualClock
from sparklog.listeners import parse
from tests.support.certificates import Authority

ECHO, COUNT, FAIL, HANG, DEAF = (
    "/test.Test/Echo",
    "/test.Test/Count",
    "/test.Test/Fail",
    "/test.Test/Hang",
    "/test.Test/Deaf",
)
MESSAGE_BYTES = 6 * limits.MIB


def echo(call: Call) -> None:
    """Each message back."""
    while (message := call.read()) is not None:
        call.write([bytes(message.data)])


def count(call: Call) -> None:
    """The bytes of all messages, at their end."""
    total = 0
    while (message := call.read()) is not None:
        total += len(message.data)
        del message
    call.write([str(total).encode()])


def fail(_call: Call) -> None:
    """With something that needs to be encoded."""
    raise GrpcError(INVALID_ARGUMENT, "100 % bäd\n", [("why-bin", b"\x00\xff"), ("w", b"x")])


def method(serve: Callable[[Call], None]) -> Method:
    """Takes messages of up to `MESSAGE_BYTES`."""
    return Method(
        serve=serve,
        message_bytes=MESSAGE_BYTES,
        too_large=lambda size, limit: GrpcError(RESOURCE_EXHAUSTED, f"{size} > {limit}"),
    )


class Listener:
    """A server of the methods above, with a clock that a test may move."""

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        authority: Authority | None = None,
        protocol: str = "PLAINTEXT",
        **bounds: float,
    ) -> None:
        """`authority`: signs the certificate of a server with TLS."""
        self.ca = Path(authority.path).read_bytes() if authority is not None else None
        self.hanging = threading.Event()
        self.gone = threading.Event()
        self.checks = 0
        """The number of checks of all connections and calls."""
        methods = {ECHO: echo, COUNT: count, FAIL: fail, HANG: self.hang, DEAF: self.deaf}
        listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{listening.getsockname()[1]}"
        tls = None
        if authority is not None:
            certificate, key = authority.sign("broker")
            protocol, tls = "SSL", ServerTls(TlsFiles(certificate=certificate, key=key))
        named = parse(f"{protocol}://{self.address}")[0]
        self.server = Server(
            [Acceptor(listener=named, listening=listening, tls=tls)],
            {path: method(serve) for path, serve in methods.items()},
            ServerBounds(**bounds),  # type: ignore[arg-type]
            tick=self.tick,
            recognises=lambda call: bool(call.authorization) or protocol != "SASL_PLAINTEXT",
            clock=clock,
        )
        self.server.start()

    def tick(self) -> None:
        """Counts a check."""
        self.checks += 1

    def hang(self, call: Call) -> None:
        """Until its client has gone."""
        self.hanging.set()
        try:
            while call.read() is not None:
                pass
            while not call.is_dead:
                time.sleep(0.01)
        except PeerGone:
            pass
        self.gone.set()

    def deaf(self, call: Call) -> None:
        """Writes what no window lets go."""
        call.read()
        try:
            call.write([bytes(limits.MIB)])
        except PeerGone:
            self.gone.set()

    @property
    def held_bytes(self) -> int:
        return self.server.message_memory._held_bytes


@pytest.fixture(scope="module")
def listener() -> Iterator[Listener]:
    """One server for all tests here that leave it as it was."""
    found = Listener()
    yield found
    until(lambda: found.held_bytes == 0)
    assert found.server.close(0.1)


@pytest.fixture(scope="module", params=["plain", "tls"])
def either(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Listener]:
    """A server without TLS, and one with."""
    is_plain = request.param == "plain"
    found = Listener(authority=None if is_plain else Authority(tmp_path_factory.mktemp("ca")))
    yield found
    until(lambda: found.held_bytes == 0)
    assert found.server.close(0.1)


class TimedListener(Listener):
    """A server whose time passes only in `pass_time`."""

    def __init__(self, protocol: str = "PLAINTEXT", **bounds: float) -> None:
        self.clock = ManualClock()
        super().__init__(self.clock, authority=None, protocol=protocol, **bounds)

    def pass_time(self, seconds: float) -> None:
        """Returns after the server has checked its calls at the new time."""
        checks = self.checks
        self.clock.advance(max(seconds, 0.25))
        until(lambda: self.checks > checks)

    @property
    def calls(self) -> list[Call]:
        """The open calls of all connections."""
        return [call for each in [*self.server._connections] for call in [*each.calls.values()]]


def until(is_true: Callable[[], bool]) -> None:
    """Waits for it."""
    deadline = time.monotonic() + 20.0
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def channel(listener: Listener, **options: int) -> Iterator[grpc.Channel]:
    """Opens a channel of gRPC's own client."""
    named = [(f"grpc.{name}", value) for name, value in options.items()]
    found = [*named, ("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    found.append(("grpc.use_local_subchannel_pool", 1))
    if listener.ca is None:
        opening = grpc.insecure_channel(listener.address, found)
    else:
        trust = grpc.ssl_channel_credentials(listener.ca)
        opening = grpc.secure_channel(listener.address, trust, found)
    with opening as opened:
        yield opened


# ------------------------------------------------------------------------------ gRPC's own client


@pytest.mark.parametrize("lookahead", [0, 4 * limits.MIB])
def test_messages_of_all_sizes_come_back(either: Listener, lookahead: int) -> None:
    """Around every bound of windows, frames and steps, many on their way at a time."""
    free = FREE_BYTES
    edges = [0, 1, 16_379, 16_384, free - 6, free - 5, free - 4, free, 2 * free, 4 * limits.MIB + 7]
    sizes = [*edges, MESSAGE_BYTES, *edges[::-1], *[40_000] * 20, *[3] * 200]
    chance = random.Random(7)
    chance.shuffle(sizes)
    options = {"http2.lookahead_bytes": lookahead} if lookahead else {}
    with channel(either, **options) as opened:
        messages = [chance.randbytes(size) for size in sizes]
        assert list(opened.stream_stream(ECHO)(iter(messages), timeout=60)) == messages


def test_calls_of_one_connection_do_not_wait_for_each_other(either: Listener) -> None:
    """A call whose response is not read does not delay the others."""
    with channel(either) as opened:
        unread = opened.stream_stream(ECHO)(iter([bytes(MESSAGE_BYTES)] * 3))
        for _ in range(3):
            assert list(opened.stream_stream(ECHO)(iter([b"a"]), timeout=10)) == [b"a"]
        unread.cancel()


def test_a_failure_crosses_the_wire(either: Listener) -> None:
    """With code, message and trailers."""
    with channel(either) as opened:
        for path, code in ((FAIL, "INVALID_ARGUMENT"), ("/test.Test/No", "UNIMPLEMENTED")):
            call = opened.stream_stream(path)(iter([b"a"]), timeout=10)
            with pytest.raises(grpc.RpcError):
                list(call)
            assert call.code().name == code
            if path == FAIL:
                assert call.details() == "100 % bäd\n"
                assert dict(call.trailing_metadata()) == {"why-bin": b"\x00\xff", "w": "x"}


def test_a_message_too_large_or_compressed_ends_its_call(either: Listener) -> None:
    """The call ends before the message is sent, and other calls of the connection continue."""
    with channel(either) as opened:
        for message, compression, code in (
            (bytes(MESSAGE_BYTES + 1), None, grpc.StatusCode.RESOURCE_EXHAUSTED),
            (bytes(10_000), grpc.Compression.Gzip, grpc.StatusCode.UNIMPLEMENTED),
            (bytes(10_000), grpc.Compression.Deflate, grpc.StatusCode.UNIMPLEMENTED),
        ):
            call = opened.stream_stream(COUNT)(iter([message]), compression=compression, timeout=10)
            with pytest.raises(grpc.RpcError):
                list(call)
            assert call.code() is code
        assert list(opened.stream_stream(COUNT)(iter([b"abc"]), timeout=10)) == [b"3"]


def test_a_client_that_goes_is_seen(either: Listener) -> None:
    """A call that was cancelled ends, and so does one whose connection has broken."""
    for _ in range(2):
        either.hanging.clear()
        either.gone.clear()
        with channel(either) as opened:
            call = opened.stream_stream(HANG)(iter([b"a"]))
            assert either.hanging.wait(10)
            call.cancel()
        assert either.gone.wait(10)


def test_memory_for_messages_is_shared() -> None:
    """More clients than fit into memory are served in turn, and all memory is released."""
    listener = Listener(arriving_bytes=8 * limits.MIB)
    largest = 0
    over = threading.Event()

    def watch() -> None:
        nonlocal largest
        while not over.wait(0.001):
            largest = max(largest, listener.held_bytes)

    def send(number: int) -> None:
        size = 5 * limits.MIB + number
        with channel(listener) as opened:
            found = list(opened.stream_stream(COUNT)(iter([bytes(size)] * 5), timeout=60))
            assert found == [str(5 * size).encode()]

    watching = threading.Thread(target=watch)
    watching.start()
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(send, range(12)))
    over.set()
    watching.join()
    assert 5 * limits.MIB <= largest <= 8 * limits.MIB + MESSAGE_BYTES
    until(lambda: listener.held_bytes == 0)
    assert listener.server.close(0.1)


# ------------------------------------------------------------------------------ by the byte


POST = b"\x83\x86"
"""`:method: POST` and `:scheme: http`, of HPACK's static table."""


def headers(
    number: int,
    path: str = COUNT,
    flags: int = 0,
    kind: bytes = b"application/grpc",
    **more: bytes | str,
) -> bytes:
    """Opens a stream; underscores in keys of `more` stand for hyphens."""
    named = {"path": path, "content_type": kind, **more}
    found = [
        (name.replace("_", "-"), value if isinstance(value, bytes) else value.encode())
        for name, value in named.items()
    ]
    block = POST + http2.head_block([(":path", found[0][1]), *found[1:]], with_status=False)
    return http2.frame(http2.HEADERS, http2.END_HEADERS | flags, number, block)


def request(*found: tuple[str, str]) -> bytes:
    """Opens stream 1 and ends it, with exactly these headers."""
    block = http2.head_block([(k, v.encode()) for k, v in found], with_status=False)
    return http2.frame(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, 1, block)


def trailers(number: int, flags: int = http2.END_STREAM, *found: tuple[str, bytes]) -> bytes:
    """Ends a request."""
    block = http2.head_block(found or [("checksum", b"1")], with_status=False)
    return http2.frame(http2.HEADERS, http2.END_HEADERS | flags, number, block)


def message(data: bytes) -> bytes:
    """As gRPC frames it."""
    return struct.pack(">BI", 0, len(data)) + data


def data(number: int, payload: bytes, flags: int = 0) -> bytes:
    """A frame of it."""
    return http2.frame(http2.DATA, flags, number, payload)


class Peer:
    """A connection, by the byte."""

    def __init__(
        self,
        listener: Listener,
        *,
        start: bytes = http2.PREFACE + http2.settings([]),
        host: str = "127.0.0.1",
    ) -> None:
        _, _, port = listener.address.partition(":")
        self._socket = socket.create_connection(
            ("127.0.0.1", int(port)), 10.0, source_address=(host, 0)
        )
        # As gRPC's own clients do: otherwise a small frame waits 40 ms for the ack of the last one.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.decoder = hpack.Decoder()
        self.sent(start)

    def sent(self, data: bytes) -> Peer:
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(data)
        return self

    def frame(self) -> tuple[int, int, int, bytes]:
        """Type, flags, stream and payload of the next one; type -1: the connection has ended."""
        head = self._exactly(http2.HEADER_BYTES)
        if head is None:
            return -1, 0, 0, b""
        size, kind, flags, stream = http2.read_header(head, 0)
        return kind, flags, stream, self._exactly(size) or b""

    def until(self, wanted: int) -> tuple[int, int, int, bytes]:
        """The next frame of that type, or the end."""
        while (found := self.frame())[0] not in (wanted, -1):
            pass
        return found

    def status(self) -> int:
        """That the next call ends with; -1: the connection has ended."""
        while (found := self.until(http2.HEADERS))[0] == http2.HEADERS:
            named = self.decoded(found[3])
            if b"grpc-status" in named:
                return int(named[b"grpc-status"])
        return -1

    def decoded(self, block: bytes) -> dict[bytes, bytes]:
        """Headers of an answer."""
        return dict(self.decoder.decode(block, raw=True))

    def code(self) -> int:
        """That the connection ends with."""
        return int.from_bytes(self.until(http2.GOAWAY)[3][4:8], "big")

    def _exactly(self, size: int) -> bytes | None:
        found = b""
        with contextlib.suppress(ConnectionError):
            while len(found) < size and (piece := self._socket.recv(size - len(found))):
                found += piece
        return found if len(found) == size else None

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def peer(listener: Listener) -> Iterator[Peer]:
    """Which has said hello."""
    with contextlib.closing(Peer(listener)) as found:
        yield found


def conversation() -> bytes:
    """A call with all that frames may have."""
    block = POST + http2.head_block(
        [(":path", COUNT.encode()), ("content-type", b"application/grpc")], with_status=False
    )
    padded = b"\x03" + b"\x00\x00\x00\x00\x10" + block[:5] + bytes(3)
    flags = http2.PADDED | http2.WITH_PRIORITY
    half = message(b"half")
    return b"".join(
        (
            http2.frame(http2.HEADERS, flags, 1, padded),
            http2.frame(http2.CONTINUATION, 0, 1, block[5:9]),
            http2.frame(http2.CONTINUATION, http2.END_HEADERS, 1, block[9:]),
            http2.frame(http2.PRIORITY, 0, 1, bytes(5)),
            http2.frame(0x77, 0xFF, 1, b"unknown"),
            http2.frame(http2.PING, 0, 0, b"12345678"),
            data(1, b"\x04" + half[:2] + bytes(4), http2.PADDED),
            data(1, b""),
            data(1, half[2:6]),
            data(1, b"\x00", http2.PADDED),
            data(1, half[6:] + message(b"") + message(b"whole")),
            data(1, b"\x02\x00\x00", http2.END_STREAM | http2.PADDED),
        )
    )


@pytest.mark.parametrize("step", [1, 7, 1_000])
def test_frames_in_pieces(peer: Peer, step: int) -> None:
    """However a conversation is cut, it is the same."""
    whole = conversation()
    for at in range(0, len(whole), step):
        peer.sent(whole[at : at + step])
        if step < 1_000:
            time.sleep(0.001)
    assert peer.until(http2.PING)[1:] == (http2.ACK, 0, b"12345678")
    assert peer.until(http2.DATA)[3] == message(b"9")
    assert peer.status() == OK


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (http2.frame(http2.PING, 0, 0, b"1"), http2.FRAME_SIZE_ERROR),
        (http2.frame(http2.SETTINGS, 0, 0, b"1"), http2.FRAME_SIZE_ERROR),
        (http2.settings([(http2.INITIAL_WINDOW_SIZE, 2**31)]), http2.FLOW_CONTROL_ERROR),
        (http2.settings([(http2.MAX_FRAME_SIZE, 1)]), http2.PROTOCOL_ERROR),
        (http2.window_update(0, http2.MAX_WINDOW), http2.FLOW_CONTROL_ERROR),
        (http2.frame(http2.WINDOW_UPDATE, 0, 0, b"1"), http2.FRAME_SIZE_ERROR),
        (http2.header(http2.HEADERS, 0, 1, 20_000), http2.FRAME_SIZE_ERROR),
        (http2.header(http2.DATA, 0, 1, 1 << 23), http2.FRAME_SIZE_ERROR),
        (http2.frame(http2.CONTINUATION, 0, 1, b""), http2.PROTOCOL_ERROR),
        (http2.frame(http2.HEADERS, 0, 1, b"") + data(1, b""), http2.PROTOCOL_ERROR),
        (http2.frame(http2.HEADERS, http2.END_HEADERS, 1, b"\xff\xff"), http2.COMPRESSION_ERROR),
        (http2.frame(http2.HEADERS, http2.PADDED, 1, b"\x09"), http2.PROTOCOL_ERROR),
        (http2.frame(http2.HEADERS, http2.PADDED, 1, b""), http2.FRAME_SIZE_ERROR),
        (headers(3) + headers(1), http2.PROTOCOL_ERROR),
        (headers(2), http2.PROTOCOL_ERROR),
        (data(1, b""), http2.PROTOCOL_ERROR),
        (headers(1) + data(1, b"\x09", http2.PADDED), http2.PROTOCOL_ERROR),
        (headers(1, flags=http2.END_STREAM, path=HANG) + data(1, b"a"), http2.STREAM_CLOSED),
        (headers(1, flags=http2.END_STREAM, path=HANG) + trailers(1), http2.STREAM_CLOSED),
        (headers(1, path=HANG) + http2.reset(1, http2.CANCEL) + data(1, b"a"), http2.STREAM_CLOSED),
        (headers(1, path=HANG) + http2.reset(1, http2.CANCEL) + trailers(1), http2.STREAM_CLOSED),
        (http2.reset(1, http2.CANCEL), http2.PROTOCOL_ERROR),
        (http2.reset(0, http2.CANCEL), http2.PROTOCOL_ERROR),
        (headers(1) + http2.reset(2, http2.CANCEL), http2.PROTOCOL_ERROR),
        (headers(1) + http2.frame(http2.RST_STREAM, 0, 1, b"123"), http2.FRAME_SIZE_ERROR),
        (http2.window_update(1, 1), http2.PROTOCOL_ERROR),
        (http2.window_update(0, 0), http2.PROTOCOL_ERROR),
        (http2.settings([(http2.ENABLE_PUSH, 2)]), http2.PROTOCOL_ERROR),
        (http2.frame(http2.SETTINGS, http2.ACK, 0, bytes(6)), http2.FRAME_SIZE_ERROR),
        (http2.frame(http2.SETTINGS, 0, 1, b""), http2.PROTOCOL_ERROR),
        (http2.frame(http2.PING, 0, 1, bytes(8)), http2.PROTOCOL_ERROR),
        (http2.frame(http2.GOAWAY, 0, 1, bytes(8)), http2.PROTOCOL_ERROR),
        (http2.frame(http2.GOAWAY, 0, 0, bytes(7)), http2.FRAME_SIZE_ERROR),
        (http2.frame(http2.PRIORITY, 0, 0, bytes(5)), http2.PROTOCOL_ERROR),
        (http2.frame(http2.PRIORITY, 0, 1, bytes(4)), http2.FRAME_SIZE_ERROR),
        (headers(0), http2.PROTOCOL_ERROR),
        (headers(1) + http2.frame(http2.PUSH_PROMISE, 4, 1, bytes(4)), http2.PROTOCOL_ERROR),
        (http2.frame(http2.PING, 0, 0, bytes(8)) * 3_000, http2.ENHANCE_YOUR_CALM),
        (http2.settings([]) * 3_000, http2.ENHANCE_YOUR_CALM),
        (http2.window_update(0, 1) * 3_000, http2.ENHANCE_YOUR_CALM),
        (headers(1) + http2.window_update(1, 1) * 3_000, http2.ENHANCE_YOUR_CALM),
        (headers(1) + data(1, b"") * 3_000, http2.ENHANCE_YOUR_CALM),
        (
            http2.frame(http2.HEADERS, 0, 1, bytes(16_000))
            + http2.frame(http2.CONTINUATION, 0, 1, bytes(16_000)),
            http2.ENHANCE_YOUR_CALM,
        ),
    ],
)
def test_breaking_the_protocol_ends_the_connection(peer: Peer, sent: bytes, code: int) -> None:
    """The GOAWAY frame has the right code, and other connections continue."""
    assert peer.sent(sent).code() == code
    assert peer.until(-1)[0] == -1


def test_a_client_may_answer_each_response(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's clients may send a ping and renew both windows; more frames end the connection."""
    monkeypatch.setattr(idle_frames, "_IDLE_FRAMES", 100)
    monkeypatch.setattr(idle_frames, "_IDLE_FRAMES_SECONDS", 600.0)
    ping = http2.frame(http2.PING, 0, 0, bytes(8))
    peer.sent(headers(1, path=ECHO))
    for _ in range(200):
        peer.sent(data(1, message(b"")))
        assert peer.until(http2.DATA)[0] == http2.DATA
        peer.sent(ping + http2.window_update(0, 5) + http2.window_update(1, 5))
    for number in range(3, 203, 2):  # and each call may end with a frame without data
        peer.sent(headers(number) + data(number, message(b"a")) + data(number, b"", 1))
        assert peer.status() == OK
    assert peer.sent(ping * 1_000).code() == http2.ENHANCE_YOUR_CALM


def test_a_client_may_answer_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client, or the server, that was slow for seconds loses nothing of what it may send."""
    monkeypatch.setattr(idle_frames, "_IDLE_FRAMES", 100)
    listener = TimedListener()
    with contextlib.closing(Peer(listener)) as peer:
        peer.sent(headers(1, path=ECHO))
        for _ in range(200):
            peer.sent(data(1, message(b"")))
            assert peer.until(http2.DATA)[0] == http2.DATA
        listener.pass_time(5.0)
        peer.sent(http2.window_update(0, 5) * 200 + http2.window_update(1, 5) * 200)
        assert peer.sent(headers(3) + data(3, message(b"a"), http2.END_STREAM)).status() == OK
    assert listener.server.close(0.1)


def test_headers_that_are_too_large_decoded_end_the_connection(peer: Peer) -> None:
    """Few bytes can name the same long header often."""
    long = b"\x40\x01a\x7f\xa1\x1e" + bytes(b"b" * 4_000)  # enters the dynamic table
    block = POST + long + b"\xbe" * 10
    sent = http2.frame(http2.HEADERS, http2.END_HEADERS, 1, block)
    assert peer.sent(sent).code() == http2.ENHANCE_YOUR_CALM


def test_more_than_the_window_ends_the_connection() -> None:
    """A window bounds memory, so no client may exceed it."""
    listener = Listener(arriving_bytes=0)
    head = struct.pack(">BI", 0, limits.MIB)
    with contextlib.closing(Peer(listener)) as peer:
        peer.sent(headers(1) + data(1, head) + headers(3) + data(3, head))
        while (found := peer.until(http2.WINDOW_UPDATE))[2] != 1:
            pass
        assert int.from_bytes(found[3], "big") >= FREE_BYTES
        for _ in range(3):
            peer.sent(data(3, bytes(16_384)))
        peer.sent(data(3, bytes(16_379)) + http2.frame(http2.PING, 0, 0, bytes(8)))
        assert peer.until(http2.PING)[0] == http2.PING
        assert peer.sent(data(3, b"a")).code() == http2.FLOW_CONTROL_ERROR
    until(lambda: listener.held_bytes == 0)
    assert listener.server.close(0.1)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (headers(1, path="/"), UNIMPLEMENTED),
        (headers(1) + data(1, b"\x01\x00\x00\x00\x00"), UNIMPLEMENTED),
        (headers(1) + data(1, b"\x00\xff\xff\xff\xff"), RESOURCE_EXHAUSTED),
        (headers(1) + data(1, b"\x00\x00", http2.END_STREAM), INTERNAL),
        (headers(1) + data(1, b"\x00\x00\x00\x00\x05abc", http2.END_STREAM), INTERNAL),
        (headers(1, flags=http2.END_STREAM), OK),
        (headers(1) + trailers(1), OK),
        (headers(1, kind=b"application/grpc+proto") + trailers(1), OK),
        (headers(1, kind=b"application/grpc;x=y") + trailers(1), OK),
        (headers(1, content_length=b"6") + data(1, message(b"a"), http2.END_STREAM), OK),
        (headers(1, path=ECHO) + data(1, message(b"a"), http2.END_STREAM), OK),
    ],
)
def test_a_malformed_request_ends_its_call(peer: Peer, sent: bytes, status: int) -> None:
    """The connection continues."""
    assert peer.sent(sent).status() == status
    assert peer.sent(headers(3) + data(3, message(b"a"), http2.END_STREAM)).status() == 0


CALL = (
    (":method", "POST"), (":scheme", "http"), (":path", COUNT),
    ("content-type", "application/grpc"), ("te", "trailers"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (request(*CALL, ("Upper", "a")), http2.PROTOCOL_ERROR),
        (request(*CALL, ("a b", "a")), http2.PROTOCOL_ERROR),
        (request(*CALL, ("a:b", "a")), http2.PROTOCOL_ERROR),
        (request(*CALL, ("", "a")), http2.PROTOCOL_ERROR),
        (request(*CALL, ("a", "b\r\nc")), http2.PROTOCOL_ERROR),
        (request(*CALL, ("a", "b\0")), http2.PROTOCOL_ERROR),
        (request(*CALL, ("a", " b")), http2.PROTOCOL_ERROR),
        (request(*CALL, ("a", "b\t")), http2.PROTOCOL_ERROR),
        (request(*CALL, ("connection", "close")), http2.PROTOCOL_ERROR),
        (request(*CALL, ("te", "gzip")), http2.PROTOCOL_ERROR),
        (request(*CALL, (":authority", "a")), http2.PROTOCOL_ERROR),
        (request(CALL[0], *CALL), http2.PROTOCOL_ERROR),
        (request((":status", "200"), *CALL), http2.PROTOCOL_ERROR),
        (request((":unknown", "a"), *CALL), http2.PROTOCOL_ERROR),
        (request(*CALL[1:]), http2.PROTOCOL_ERROR),
        (request(CALL[0], *CALL[2:]), http2.PROTOCOL_ERROR),
        (request(*CALL[:2], *CALL[3:]), http2.PROTOCOL_ERROR),
        (request(*CALL[:2], (":path", ""), *CALL[3:]), http2.PROTOCOL_ERROR),
        (request(*CALL, ("content-length", "1")), http2.PROTOCOL_ERROR),
        (request(*CALL, ("content-length", "-1")), http2.PROTOCOL_ERROR),
        (
            headers(1, content_length=b"7") + data(1, message(b"a"), http2.END_STREAM),
            http2.PROTOCOL_ERROR,
        ),
        (
            headers(1, HANG, content_length=b"5") + data(1, message(b"a")) + trailers(1),
            http2.PROTOCOL_ERROR,
        ),
        (headers(1, path=HANG) + trailers(1, 0), http2.PROTOCOL_ERROR),
        (
            headers(1, path=HANG) + trailers(1, http2.END_STREAM, (":path", b"/")),
            http2.PROTOCOL_ERROR,
        ),
        (headers(1, path=HANG) + http2.window_update(1, 0), http2.PROTOCOL_ERROR),
        (
            headers(1, path=HANG) + http2.window_update(1, http2.MAX_WINDOW),
            http2.FLOW_CONTROL_ERROR,
        ),
    ],
)
def test_breaking_the_protocol_in_a_stream_ends_the_stream(
    peer: Peer, sent: bytes, code: int
) -> None:
    """The RST_STREAM frame has the right code, and the connection continues."""
    assert peer.sent(sent).until(http2.RST_STREAM) == (
        (http2.RST_STREAM, 0, 1, code.to_bytes(4, "big"))
    )
    assert peer.sent(headers(3) + data(3, message(b"a"), http2.END_STREAM)).status() == OK


def test_settings_come_first(listener: Listener) -> None:
    """A client that begins with another frame is none of HTTP/2."""
    with contextlib.closing(Peer(listener, start=http2.PREFACE)) as peer:
        assert peer.sent(headers(1)).code() == http2.PROTOCOL_ERROR


@pytest.mark.parametrize(
    ("sent", "status", "has_text"),
    [
        (request((":method", "GET"), *CALL[1:3]), b"405", True),
        (request((":method", "HEAD"), *CALL[1:3]), b"405", False),
        (request((":method", "CONNECT"), (":authority", "a")), b"405", True),
        (request(*CALL[:3]), b"415", True),
        (headers(1, kind=b"application/grpcx", flags=http2.END_STREAM), b"415", True),
        (headers(1, kind=b"text/html") + data(1, b"abc") + trailers(1), b"415", True),
        (headers(1, kind=b"text/html") + data(1, bytes(16_384)) * 4, b"415", True),
    ],
)
def test_a_request_that_is_not_grpc_is_answered_by_http(
    peer: Peer, sent: bytes, status: bytes, *, has_text: bool
) -> None:
    """With a text for people, as far as windows let it go, whatever the request sends."""
    peer.sent(http2.settings([(http2.INITIAL_WINDOW_SIZE, 10)]) + sent)
    assert peer.decoded(peer.until(http2.HEADERS)[3])[b":status"] == status
    if has_text:
        kind, flags, stream, text = peer.until(http2.DATA)
        assert (kind, flags, stream, len(text)) == (http2.DATA, 0, 1, 10)
        peer.sent(http2.window_update(1, 5))
        text += peer.until(http2.DATA)[3]
        assert len(text) == 15
        peer.sent(http2.settings([(http2.INITIAL_WINDOW_SIZE, 1_000)]))
        text += peer.until(http2.DATA)[3]
        assert b"Arrow Flight" in text
    assert peer.until(http2.DATA)[1:] == (http2.END_STREAM, 1, b"")
    assert peer.sent(headers(3) + data(3, message(b"a"), http2.END_STREAM)).status() == OK


def test_a_request_that_is_not_grpc_ends_soon() -> None:
    """The server ends it after `preface_seconds`, also where its client does not read the text."""
    listener = TimedListener()
    with contextlib.closing(Peer(listener)) as peer:
        peer.sent(http2.settings([(http2.INITIAL_WINDOW_SIZE, 0)]) + headers(1, kind=b"a"))
        peer.sent(headers(3, kind=b"a", flags=http2.END_STREAM))
        until(lambda: listener.server._calls == 2)
        listener.pass_time(PREFACE_SECONDS - 1.0)
        assert listener.server._calls == 2
        listener.pass_time(2.0)
        found = {peer.until(http2.RST_STREAM)[2:] for _ in range(2)}
        assert found == {(stream, http2.CANCEL.to_bytes(4, "big")) for stream in (1, 3)}
    until(lambda: listener.server._calls == 0)
    assert listener.server.close(0.1)


def test_frames_after_a_refusal_are_ignored(peer: Peer) -> None:
    """A client cannot know yet that its call has ended."""
    late = data(1, b"abc") + trailers(1)
    assert peer.sent(headers(1, path="/") + late).status() == UNIMPLEMENTED
    peer.sent(late + http2.reset(1, http2.CANCEL) + http2.window_update(1, 5))
    assert peer.sent(headers(3) + data(3, message(b"a"), http2.END_STREAM)).status() == OK


@pytest.mark.parametrize("size", [0, 100])
def test_a_smaller_table_of_headers_is_heeded(listener: Listener, size: int) -> None:
    """A decoder whose table has shrunk takes no headers that do not begin with its size."""
    with contextlib.closing(Peer(listener)) as peer:
        peer.decoder.max_allowed_table_size = size
        peer.sent(http2.settings([(http2.HEADER_TABLE_SIZE, size)]))
        for number in (1, 3):
            peer.sent(headers(number) + data(number, message(b"a"), http2.END_STREAM))
            assert peer.status() == OK
        assert peer.decoder.header_table_size == 0


# ------------------------------------------------------------------------------ deadlines


@pytest.mark.parametrize("path", [HANG, DEAF])
def test_a_call_ends_at_its_deadline(path: str) -> None:
    """The server ends it whatever its method waits for."""
    listener = TimedListener()
    with contextlib.closing(Peer(listener)) as peer:
        peer.sent(http2.settings([(http2.INITIAL_WINDOW_SIZE, 0)]))
        peer.sent(headers(1, path=path, grpc_timeout=b"30S") + data(1, message(b"a")))
        peer.sent(headers(3, path=HANG, grpc_timeout=b"1H") + data(3, message(b"a")))
        until(lambda: listener.server._served == 2)
        listener.pass_time(29.9)
        assert listener.server._calls == 2
        listener.pass_time(0.25)
        assert peer.status() == DEADLINE_EXCEEDED
        assert listener.gone.wait(10)
        peer.sent(headers(5) + data(5, message(b"a"), http2.END_STREAM))
        peer.sent(http2.settings([(http2.INITIAL_WINDOW_SIZE, 100)]))
        assert peer.status() == OK
        until(lambda: listener.server._calls == 1)
    until(lambda: listener.server._calls == 0)
    assert listener.server.close(0.1)


def test_memory_comes_back_at_a_deadline() -> None:
    """The memory of a large message that is not complete is released."""
    listener = TimedListener()
    with contextlib.closing(Peer(listener)) as peer:
        peer.sent(headers(1, grpc_timeout=b"5S") + data(1, struct.pack(">BI", 0, limits.MIB)))
        until(lambda: listener.held_bytes > 0)
        listener.pass_time(5.0)
        assert peer.status() == DEADLINE_EXCEEDED
        until(lambda: listener.held_bytes == 0)
    assert listener.server.close(0.1)


@pytest.mark.parametrize(
    ("timeout", "status"),
    [
        *((each, OK) for each in (b"1H", b"99999999u", b"99999999H", b"10M", b"20S", b"9999m")),
        *((each, DEADLINE_EXCEEDED) for each in (b"0n", b"0S")),
        *((each, INTERNAL) for each in (b"", b"1", b"S", b"1h", b"123456789S", b"-1S", b"1.5S")),
    ],
)
def test_grpc_timeouts_are_parsed(peer: Peer, timeout: bytes, status: int) -> None:
    """A malformed timeout ends its call, and the connection continues."""
    peer.sent(headers(1, grpc_timeout=timeout) + data(1, message(b"a"), http2.END_STREAM))
    assert peer.status() == status
    assert peer.sent(headers(3) + data(3, message(b"a"), http2.END_STREAM)).status() == OK


def test_larger_windows_hold_from_their_acknowledgement_on(peer: Peer) -> None:
    """A client takes more bytes for an error until it has received the acknowledgement."""
    peer.sent(http2.settings([(http2.INITIAL_WINDOW_SIZE, 10)]) + headers(1, path=ECHO))
    peer.sent(data(1, message(bytes(1_000)), http2.END_STREAM))
    assert len(peer.until(http2.DATA)[3]) == 10
    peer.sent(http2.settings([(http2.INITIAL_WINDOW_SIZE, 2_000)]))
    kind, flags, *_ = peer.frame()
    assert (kind, flags) == (http2.SETTINGS, http2.ACK)
    assert len(peer.until(http2.DATA)[3]) == 995
    assert peer.status() == OK


def test_a_window_is_used_up_at_once() -> None:
    """The call sends as much as a larger window allows, without another update."""
    size = 5 * limits.MIB
    listener = Listener()
    listener.server.methods[b"/test.Test/Large"] = method(lambda call: call.write([bytes(size)]))
    with contextlib.closing(Peer(listener)) as peer:
        peer.sent(
            http2.settings([(http2.INITIAL_WINDOW_SIZE, 10)]) + headers(1, "/test.Test/Large")
        )
        peer.sent(data(1, message(b""), http2.END_STREAM) + http2.window_update(0, 1 << 30))
        assert len(peer.until(http2.DATA)[3]) == 10
        peer.sent(http2.window_update(1, 1 << 30))
        left = size + 5 - 10
        while left:
            left -= len(peer.until(http2.DATA)[3])
        assert peer.status() == OK
    assert listener.server.close(0.1)


def test_small_messages_never_wait_for_a_window(peer: Peer) -> None:
    """One after the other, of sizes that leave little of it, while updates are saved."""
    chance = random.Random(3)
    peer.sent(headers(1, path=ECHO) + http2.window_update(0, 1 << 30))
    peer.sent(http2.window_update(1, 1 << 30))
    window = FREE_BYTES
    for _ in range(300):
        left = message(bytes(chance.choice([10, 20_000, 33_000, 50_000, 65_000])))
        unechoed = len(left)
        while unechoed:
            if size := min(len(left), window, 16_384):
                peer.sent(data(1, left[:size]))
                left, window = left[size:], window - size
                continue
            kind, _, stream, payload = peer.frame()
            assert kind != -1
            if kind == http2.WINDOW_UPDATE and stream == 1:
                window += int.from_bytes(payload, "big")
            elif kind == http2.DATA:
                unechoed -= len(payload)


def test_a_connections_window_is_renewed(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The used bytes are granted again, exactly, before the window is used up."""
    window = 2**18 - 1
    monkeypatch.setattr(http2, "MAX_WINDOW", window)
    with contextlib.closing(Peer(listener)) as peer:
        for number in range(1, 101, 2):
            peer.sent(headers(number, path=COUNT))
            peer.sent(data(number, message(bytes(16_000)), http2.END_STREAM))
            window -= 16_005
            assert window > 0
            while (found := peer.frame())[0] != http2.DATA:
                assert found[0] != -1, number
                kind, _, stream, payload = found
                if (kind, stream) == (http2.WINDOW_UPDATE, 0) and number > 1:
                    window += int.from_bytes(payload, "big")
            assert window <= http2.MAX_WINDOW


# ------------------------------------------------------------------------------ patience


def test_a_connection_or_call_that_says_nothing_ends() -> None:
    """The bound holds for the first message of a call, not for those that follow."""
    listener = TimedListener()
    host, _, port = listener.address.partition(":")
    with socket.create_connection((host, int(port)), 10.0) as silent:
        until(lambda: len(listener.server._connections) == 1)
        listener.pass_time(PREFACE_SECONDS + 1.0)
        assert silent.recv(1_000) == b""
    with contextlib.closing(Peer(listener)) as peer:
        peer.sent(headers(1))
        until(lambda: listener.server._calls == 1)
        listener.pass_time(PREFACE_SECONDS + 1.0)
        assert peer.status() == UNAVAILABLE
        peer.sent(headers(3) + data(3, message(b"a")))
        until(lambda: listener.server._served == 1)
        listener.pass_time(10 * PREFACE_SECONDS)
        assert peer.sent(data(3, message(b"b"), http2.END_STREAM)).status() == OK
    assert listener.server.close(0.1)


def test_a_stalled_message_releases_its_memory() -> None:
    """The server ends its call as soon as another message waits for its memory."""
    listener = TimedListener(arriving_bytes=0, preface_seconds=1e9)
    size = 2 * limits.MIB
    with contextlib.closing(Peer(listener)) as idle, channel(listener) as opened:
        idle.sent(headers(1) + data(1, struct.pack(">BI", 0, size) + bytes(1_000)))
        until(lambda: listener.held_bytes > 0)
        listener.pass_time(600.0)
        assert listener.held_bytes > 0
        call = opened.stream_stream(COUNT)(iter([bytes(size)]), timeout=60)
        until(lambda: listener.server.message_memory.is_short)
        listener.pass_time(0.25)
        assert list(call) == [str(size).encode()]
        assert idle.status() == UNAVAILABLE
    assert listener.server.close(0.1)


def test_an_unread_call_releases_its_memory() -> None:
    """A call whose response is not read keeps its memory only while no message waits for it."""
    listener = TimedListener(arriving_bytes=limits.MIB)
    size = 2 * limits.MIB
    with contextlib.closing(Peer(listener)) as deaf, channel(listener) as opened:
        deaf.sent(http2.settings([(http2.INITIAL_WINDOW_SIZE, 0)]) + headers(1, path=ECHO))
        deaf.sent(data(1, message(b"a") + struct.pack(">BI", 0, size)))
        sent = 0
        while sent < size:
            kind, _, stream, _ = deaf.frame()
            if kind == http2.WINDOW_UPDATE and stream:
                while sent < size:
                    piece = min(16_384, size - sent)
                    deaf.sent(data(1, bytes(piece)))
                    sent += piece
        until(lambda: listener.held_bytes > 0)
        until(lambda: any(each.stalled_since is not None for each in listener.calls))
        listener.pass_time(limits.FLIGHT_IDLE_SHORT_SECONDS + 1.0)
        assert listener.held_bytes > 0
        call = opened.stream_stream(COUNT)(iter([bytes(size)]), timeout=60)
        until(lambda: listener.server.message_memory.is_short)
        listener.pass_time(0.25)
        assert list(call) == [str(size).encode()]
        assert deaf.status() == UNAVAILABLE
    until(lambda: listener.held_bytes == 0)
    assert listener.server.close(0.1)


def test_calls_are_bounded() -> None:
    """A call beyond the bound is refused without effect, also where others were only reset.

    The thread of a call ends after its client has reset it, and takes its place until then.
    """
    listener = Listener(calls=2, connection_calls=4)
    begun = message(b"a")
    may_end = threading.Event()

    def linger(call: Call) -> None:
        call.read()
        assert may_end.wait(20.0)

    listener.server.methods[b"/test.Test/Linger"] = method(linger)
    path = "/test.Test/Linger"
    with contextlib.closing(Peer(listener)) as first, contextlib.closing(Peer(listener)) as other:
        first.sent(headers(1, path) + data(1, begun) + headers(3, path) + data(3, begun))
        until(lambda: listener.server._served == 2)
        first.sent(http2.reset(1, http2.CANCEL) + http2.reset(3, http2.CANCEL))
        for peer, stream in ((first, 5), (other, 1)):
            peer.sent(headers(stream) + data(stream, begun, http2.END_STREAM))
            kind, _, number, payload = peer.until(http2.RST_STREAM)
            assert (kind, number, payload[-1]) == (http2.RST_STREAM, stream, http2.REFUSED_STREAM)
        may_end.set()
        until(lambda: listener.server._served == 0)
        other.sent(headers(3) + data(3, begun, http2.END_STREAM))
        assert other.status() == OK
        more = b"".join(headers(stream, HANG) for stream in range(7, 17, 2))
        assert first.sent(more).until(http2.RST_STREAM)[2] == 15
    assert listener.server.close(0.1)


def test_calls_that_send_nothing_make_room() -> None:
    """The oldest of them end, of any connection; those that have begun continue."""
    listener = Listener(unserved_calls=3)
    with contextlib.closing(Peer(listener)) as idle, contextlib.closing(Peer(listener)) as other:
        idle.sent(headers(1, ECHO) + data(1, message(b"a")) + headers(3) + headers(5) + headers(7))
        until(lambda: len(listener.server._unserved) == 3)
        other.sent(headers(1) + headers(3) + data(3, message(b"a"), http2.END_STREAM))
        assert other.status() == OK
        assert idle.until(http2.RST_STREAM)[2] == 3
        assert idle.until(http2.RST_STREAM)[2] == 5
        idle.sent(data(1, message(b"b"), http2.END_STREAM))
        assert idle.status() == OK
    assert listener.server.close(0.1)


def test_connections_without_calls_make_room() -> None:
    """The longest idle ones of the address that has most connections end first."""
    listener = Listener(connections=4, connections_per_address=3)
    with contextlib.ExitStack() as opened:

        def connected(host: str) -> Peer:
            found = opened.enter_context(contextlib.closing(Peer(listener, host=host)))
            assert found.frame()[0] == http2.SETTINGS
            return found

        busy, idle = connected("127.0.0.1"), connected("127.0.0.1")
        busy.sent(headers(1, HANG) + data(1, message(b"a")))
        until(listener.hanging.is_set)
        connected("127.0.0.1")
        later = connected("127.0.0.1")  # the fourth of its address
        assert idle.until(http2.GOAWAY)[0] == http2.GOAWAY
        elsewhere = connected("127.0.0.2")
        connected("127.0.0.2")  # the fifth of all
        later.sent(headers(1) + data(1, message(b"a"), http2.END_STREAM))
        elsewhere.sent(headers(1) + data(1, message(b"a"), http2.END_STREAM))
        assert elsewhere.status() == OK
        assert len(listener.server._connections) == 4
        busy.sent(http2.reset(1, http2.CANCEL))
        until(listener.gone.is_set)
    assert listener.server.close(0.1)


def test_a_connection_without_room_hears_the_reason() -> None:
    """The last frame asks it to try again."""
    listener = Listener(connections=1)
    with contextlib.closing(Peer(listener)) as busy:
        busy.sent(headers(1, HANG) + data(1, message(b"a")))
        until(listener.hanging.is_set)
        with contextlib.closing(Peer(listener, start=b"")) as refused:
            _, _, _, payload = refused.until(http2.GOAWAY)
            assert payload[7] == http2.ENHANCE_YOUR_CALM
            assert b"try again" in payload
        busy.sent(http2.reset(1, http2.CANCEL))
        until(listener.gone.is_set)
    assert listener.server.close(0.1)


def test_a_closed_connection_is_freed_at_once() -> None:
    """Neither an idle thread keeps it, nor does it wait for the garbage collector."""
    listener = Listener()
    gc.disable()
    try:
        with channel(listener) as client:
            assert list(client.stream_stream(COUNT)(iter([b"x"]), timeout=10)) == [b"1"]
            (found,) = [weakref.ref(each) for each in listener.server._connections]
        until(lambda: found() is None)
    finally:
        gc.enable()
    assert listener.server.close(0.1)


def test_an_idle_connection_ends() -> None:
    """After ten minutes without a call; gRPC's clients then connect again."""
    listener = TimedListener()
    with contextlib.closing(Peer(listener)) as peer:
        peer.sent(headers(1) + data(1, message(b"a"), http2.END_STREAM))
        assert peer.status() == OK
        until(lambda: not listener.calls)
        listener.pass_time(CONNECTION_IDLE_SECONDS - 1.0)
        assert len(listener.server._connections) == 1
        listener.pass_time(2.0)
        assert peer.code() == http2.NO_ERROR
    assert listener.server.close(0.1)


def test_a_message_that_is_only_announced_holds_little() -> None:
    """Half of the memory is granted only as bytes arrive: large messages of others find some."""
    listener = Listener(arriving_bytes=8 * limits.MIB)
    head = struct.pack(">BI", 0, 5 * limits.MIB)
    with contextlib.closing(Peer(listener)) as idle, channel(listener) as opened:
        for stream in range(1, 81, 2):
            idle.sent(headers(stream) + data(stream, head + b"begun"))
        until(lambda: sum(len(each.calls) for each in [*listener.server._connections]) == 40)
        size = 5 * limits.MIB
        call = opened.stream_stream(COUNT)(iter([bytes(size)]), timeout=60)
        assert list(call) == [str(size).encode()]
        assert listener.held_bytes <= 4 * limits.MIB + 40 * FREE_BYTES
    until(lambda: listener.held_bytes == 0)
    assert listener.server.close(0.1)


def test_a_message_is_granted_whole_while_memory_is_ample() -> None:
    """Promise: a batch of a producer takes no round trip for each doubling of its bytes."""
    listener = Listener(arriving_bytes=8 * limits.MIB)
    size = 2 * limits.MIB
    with contextlib.closing(Peer(listener)) as peer:
        peer.sent(headers(1) + data(1, struct.pack(">BI", 0, size) + b"begun"))
        until(lambda: listener.held_bytes == size)
    assert listener.server.close(0.1)


@pytest.mark.parametrize("together", [True, False])
def test_a_call_with_too_many_unread_messages_ends(listener: Listener, *, together: bool) -> None:
    """However small they are; each is an object here, and its reader may never come."""
    empty = [message(b"")] * 600
    frames = [b"".join(empty)] if together else empty
    with contextlib.closing(Peer(listener)) as peer:
        peer.sent(headers(1, DEAF) + b"".join(data(1, each) for each in frames))
        assert peer.status() == RESOURCE_EXHAUSTED
    with contextlib.closing(Peer(listener)) as peer:
        peer.sent(headers(1) + data(1, b"".join(empty[:200]), http2.END_STREAM))
        assert peer.status() == OK


def test_many_settings_are_much_work(peer: Peer) -> None:
    """A frame of thousands counts as many, and ends the connection like a flood of frames."""
    frame = http2.settings([(http2.INITIAL_WINDOW_SIZE, n) for n in range(2_730)])
    for _ in range(20):
        peer.sent(frame)
    assert peer.code() == http2.ENHANCE_YOUR_CALM


def test_a_client_that_is_not_admitted_has_little_room_and_time() -> None:
    """Small messages, and seconds; a client with a token has as much as any."""
    listener = TimedListener(protocol="SASL_PLAINTEXT")
    small, large = bytes(1_000), bytes(UNADMITTED_MESSAGE_BYTES + 1)
    token = [("authorization", "Bearer x")]
    with channel(listener) as stranger, channel(listener) as known:
        assert list(known.stream_stream(COUNT)(iter([large]), metadata=token, timeout=10)) == [
            str(len(large)).encode()
        ]
        assert list(stranger.stream_stream(COUNT)(iter([small]), timeout=10)) == [
            str(len(small)).encode()
        ]
        call = stranger.stream_stream(COUNT)(iter([large]), timeout=10)
        with pytest.raises(grpc.RpcError):
            list(call)
        assert call.code() is grpc.StatusCode.UNAVAILABLE, "its token may be known soon"
        assert len(listener.server._connections) == 2
        listener.pass_time(10.1)
        until(lambda: len(listener.server._connections) == 1)
        assert [each.admission.is_admitted for each in listener.server._connections] == [True]
    assert listener.server.close(0.1)


@pytest.mark.parametrize(
    "sent",
    [
        b"".join(
            headers(1 + 2 * each) + data(1 + 2 * each, message(b"x" * 60_000))
            for each in range(UNADMITTED_BYTES // 60_000 + 1)
        ),
        b"".join(headers(1 + 2 * each) for each in range(UNADMITTED_CALLS + 1)),
        b"".join(headers(1 + 2 * each, "/no") for each in range(UNADMITTED_CALLS + 1)),
    ],
    ids=["bytes", "calls", "unknown methods"],
)
def test_a_client_that_is_not_admitted_may_send_little(sent: bytes) -> None:
    """Beyond that, its connection ends, before it has cost the reading thread much."""
    listener = Listener(protocol="SASL_PLAINTEXT")
    with contextlib.closing(Peer(listener)) as peer:
        assert peer.sent(sent).code() == http2.ENHANCE_YOUR_CALM
    assert listener.server.close(0.1)


def test_calls_of_one_network_that_are_not_admitted_make_room_for_each_other() -> None:
    """They take few threads, and leave room for those of others."""
    listener = Listener(protocol="SASL_PLAINTEXT")
    with contextlib.ExitStack() as stack:
        calls = []
        for _ in range(UNADMITTED_SERVED_PER_NETWORK + 3):
            opened = stack.enter_context(channel(listener))
            calls.append(opened.stream_stream(HANG)(itertools.chain([b"a"], waiting())))
            until(lambda: len(listener.server._served_unadmitted) >= min(len(calls), 8))
        until(lambda: sum(not each.is_active() for each in calls) == 3)
        assert [each.is_active() for each in calls[:4]] == [False] * 3 + [True]
        known = stack.enter_context(channel(listener))
        token = [("authorization", "Bearer x")]
        assert list(known.stream_stream(ECHO)(iter([b"a"]), metadata=token, timeout=10)) == [b"a"]
        for each in calls:
            each.cancel()
    assert listener.server.close(0.1)


def waiting() -> Iterator[bytes]:
    """Yields nothing, for as long as a test runs."""
    threading.Event().wait(20.0)
    yield from ()


def test_closing_ends_open_calls() -> None:
    """They end soon, and new connections are refused."""
    listener = Listener()
    with channel(listener) as opened:
        call = opened.stream_stream(HANG)(iter([b"a"]))
        assert listener.hanging.wait(10)
        began = time.monotonic()
        assert listener.server.close(0.2)
        assert time.monotonic() - began < 5.0
        assert listener.gone.is_set()
        with pytest.raises(grpc.RpcError):
            list(call)
        assert call.code() is grpc.StatusCode.UNAVAILABLE
    host, _, port = listener.address.partition(":")
    with pytest.raises(OSError), socket.create_connection((host, int(port)), 1.0):
        pass


# ------------------------------------------------------------------------------ headers

NAMES = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=20)


@given(st.lists(st.tuples(NAMES, st.binary(max_size=300)), max_size=8), st.booleans())
def test_headers_are_read_by_others(found: list[tuple[str, bytes]], with_status: bool) -> None:
    """By a decoder that is not ours."""
    found = [(name, value) for name, value in found if not name.endswith("-bin")]
    block = http2.head_block(found, with_status=with_status)
    expected = [(name.encode(), value) for name, value in found]
    status = [(b":status", b"200")] if with_status else []
    assert hpack.Decoder().decode(block, raw=True) == [*status, *expected]
