"""Hostile Flight clients: each attacks for some seconds, and others continue.

As in `test_hostile`, a bystander uses the Kafka listener; another one uses Flight.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from sparklog import errors, limits
from sparklog.broker.flight import protocol
from sparklog.broker.flight.grpc import http2
from sparklog.formats import flight_messages
from tests.support.brokers import payload
from tests.support.flights import BrokerClient, Stream
from tests.support.hostile import Siege

MIB = 1 << 20
STREAMS = 16
LOADED, LOADED_BYTES = "loaded", 64 * MIB
SECONDS = 30.0
SCHEMA = payload(["a"]).schema
SERVICE = "/arrow.flight.protocol.FlightService/"
FAILED = (pa.ArrowException, OSError, errors.SparklogError)

Attack = Callable[[str], Iterable[None] | None]


@pytest.fixture(name="siege", scope="module")
def _siege(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    with _loaded(tmp_path_factory, {"SPARKLOG_FLIGHT_MAX_STREAMS": str(STREAMS)}) as siege:
        yield siege


@contextlib.contextmanager
def _loaded(
    tmp_path_factory: pytest.TempPathFactory, settings: Mapping[str, str]
) -> Iterator[Siege]:
    root: Path = tmp_path_factory.mktemp("hostile") / "root"
    with Siege(root, settings) as siege:
        with BrokerClient(siege.flight_address) as door:
            door.create(LOADED)
            batch = payload([bytes(MIB)] * 16)
            with Stream(door, LOADED, batch.schema) as stream:
                for _ in range(LOADED_BYTES // (16 * MIB)):
                    stream.append(batch, flight_messages.AppendHeader(partition=0))
        yield siege


def zeros(size_bytes: int) -> pa.RecordBatch:
    """A value of so many zeros, which take no memory here."""
    ends = pa.py_buffer(np.array([0, size_bytes], np.int32))
    data = pa.py_buffer(np.zeros(size_bytes, np.uint8))
    return pa.record_batch([pa.Array.from_buffers(pa.binary(), 1, [None, ends, data])], ["value"])


def sends_huge_messages(address: str) -> None:
    """A gigabyte as one batch, and as one action."""
    batch = zeros(1_200 * MIB)
    with (
        BrokerClient(address) as door,
        pytest.raises(FAILED),
        Stream(door, LOADED, SCHEMA) as stream,
    ):
        stream.append(batch, flight_messages.AppendHeader(partition=0))
    body = batch["value"].buffers()[2]
    with BrokerClient(address) as door, pytest.raises(FAILED):
        list(door.flight.do_action(flight.Action("cluster", body)))


def sends_compressed_bodies(address: str) -> None:
    """A gigabyte of zeros that Arrow has compressed to some kilobytes, and the same as actions."""
    compressed = pa.ipc.IpcWriteOptions(compression="zstd")
    options = flight.FlightCallOptions(write_options=compressed)
    descriptor = flight.FlightDescriptor.for_command(
        flight_messages.encode(flight_messages.AppendStream(topic=LOADED))
    )
    batch = zeros(1_000 * MIB)
    for _ in range(3):
        with BrokerClient(address) as door:
            writer, reader = door.flight.do_put(descriptor, SCHEMA, options)
            writer.write_with_metadata(
                batch, flight_messages.encode(flight_messages.AppendHeader(partition=0))
            )
            assert reader.read() is None
            with pytest.raises(flight.FlightServerError, match="is compressed"):
                writer.close()


def compresses_messages(address: str) -> None:
    """Megabytes that gRPC has compressed to some kilobytes, in several calls at a time."""
    action = protocol.bytes_field(1, b"cluster") + protocol.bytes_field(2, bytes(300 * MIB))
    channel = grpc.insecure_channel(
        address, [("grpc.max_send_message_length", -1)], grpc.Compression.Gzip
    )
    with channel:
        calls = [channel.unary_stream(SERVICE + "DoAction")(action) for _ in range(3)]
        for call in calls:
            with pytest.raises(grpc.RpcError) as refused:
                list(call)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


class Unfinished:
    """A connection whose streams send all that they may of large messages, but never the end."""

    def __init__(self, address: str, streams: int, size_bytes: int) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), 5.0)
        self._windows: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._rest = b""
        self._head = struct.pack(">BI", 0, size_bytes)
        path = http2.head_block([(":path", f"{SERVICE}DoPut".encode())], with_status=False)
        grpc_type = http2.head_block([("content-type", b"application/grpc")], with_status=False)
        # `:method: POST` and `:scheme: http` are entries 3 and 6 of the static table.
        block = b"\x83\x86" + path + grpc_type
        out = http2.PREFACE + http2.settings([])
        for number in range(1, 2 * streams, 2):
            out += http2.frame(http2.HEADERS, http2.END_HEADERS, number, block)
            self._windows[number] = http2.WINDOW_BYTES
            self._left[number] = size_bytes + 4  # of head and message, without the last byte
        self._socket.sendall(out)

    def run(self, seconds: float) -> None:
        """Sends until the time is over, or the broker ends the connection."""
        began = set[int]()
        end = time.monotonic() + seconds
        self._socket.settimeout(0.01)
        while time.monotonic() < end:
            for number in list(self._windows):
                self._send(number, began)
            with contextlib.suppress(TimeoutError):
                data = self._socket.recv(65_536)
                if not data:
                    return
                self._receive(self._rest + data)

    def _send(self, number: int, began: set[int]) -> None:
        size = min(self._windows[number], self._left[number], http2.FRAME_BYTES - 5)
        if size <= 0:
            return
        data = bytes(size)
        if number not in began:
            began.add(number)
            data = self._head + data[:-5]
        self._windows[number] -= len(data)
        self._left[number] -= len(data)
        self._socket.settimeout(5.0)
        self._socket.sendall(http2.frame(http2.DATA, 0, number, data))
        self._socket.settimeout(0.01)

    def _receive(self, data: bytes) -> None:
        while len(data) >= http2.HEADER_BYTES:
            size, kind, _, number = http2.read_header(data, 0)
            if len(data) < http2.HEADER_BYTES + size:
                break
            body = data[http2.HEADER_BYTES : http2.HEADER_BYTES + size]
            if kind == http2.WINDOW_UPDATE and number in self._windows:
                self._windows[number] += int.from_bytes(body, "big")
            elif kind in (http2.HEADERS, http2.RST_STREAM):
                self._windows.pop(number, None)
            data = data[http2.HEADER_BYTES + size :]
        self._rest = data

    def close(self) -> None:
        self._socket.close()


def never_ends_messages(address: str) -> None:
    """Batches of 60 MiB, of which the last byte never comes, in sixteen streams at a time."""
    with contextlib.ExitStack() as opened, ThreadPoolExecutor(4) as pool:
        clients = [Unfinished(address, 4, 60 * MIB) for _ in range(4)]
        for each in clients:
            opened.callback(each.close)
        with contextlib.suppress(OSError):
            list(pool.map(lambda client: client.run(3.0), clients))


def sends_frames_of_nothing(address: str) -> None:
    """Pings and settings without an end, of which no answer is read."""
    _flood(address, http2.frame(http2.PING, 0, 0, bytes(8)) + http2.settings([]))


def renews_windows(address: str) -> None:
    """Windows that grow by a byte, without an end."""
    _flood(address, http2.window_update(0, 1))


def _flood(address: str, frames: bytes) -> None:
    host, _, port = address.rpartition(":")
    flood = frames * 1_000
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1) as peer:
            peer.sendall(http2.PREFACE + http2.settings([]))
            while time.monotonic() < end:
                peer.sendall(flood)


def _opened(address: str) -> socket.socket:
    """A connection of a client that breaks no rule of HTTP/2."""
    host, _, port = address.rpartition(":")
    peer = socket.create_connection((host, int(port)), 5.0)
    peer.sendall(http2.PREFACE + http2.settings([(http2.INITIAL_WINDOW_SIZE, 0)]))
    return peer


def _call(number: int, method: str) -> bytes:
    path = http2.head_block([(":path", f"{SERVICE}{method}".encode())], with_status=False)
    kind = http2.head_block([("content-type", b"application/grpc")], with_status=False)
    return http2.frame(http2.HEADERS, http2.END_HEADERS, number, b"\x83\x86" + path + kind)


def _await_answer(peer: socket.socket) -> None:
    """Returns when the broker has answered a ping, and so has read all that was sent before."""
    peer.settimeout(SECONDS)
    peer.sendall(http2.frame(http2.PING, 0, 0, b"all read"))
    found = b""
    while b"all read" not in found and (data := peer.recv(65_536)):
        found = found[-8:] + data


def _message(data: bytes) -> bytes:
    """As gRPC frames it."""
    return struct.pack(">BI", 0, len(data)) + data


def sends_messages_of_nothing(address: str) -> Iterator[None]:
    """Empty messages up to the window of each of 400 streams: 26 MB, which are not read."""
    place = flight_messages.TailPosition(topic=LOADED, partition=0, offset=LOADED_BYTES // MIB)
    command = flight_messages.encode(flight_messages.TailRequest(positions=[place]))
    descriptor = b"\x08\x02" + protocol.bytes_field(2, command)  # of the type "command"
    first = http2.frame(http2.DATA, 0, 1, _message(protocol.bytes_field(1, descriptor)))
    rest = http2.frame(http2.DATA, 0, 1, _message(b"") * 3_000) * 4
    with contextlib.ExitStack() as opened:
        peers = [opened.enter_context(_opened(address)) for _ in range(20)]
        for peer in peers:
            for number in range(1, 40, 2):
                data = (first + rest).replace(b"\0\0\0\1", struct.pack(">I", number))
                with contextlib.suppress(OSError):
                    peer.sendall(_call(number, "DoExchange") + data)
        for peer in peers:
            with contextlib.suppress(OSError):
                _await_answer(peer)
        yield


def names_one_value_often(address: str) -> None:
    """A dictionary that makes a megabyte of each of many rows."""
    indices = pa.array(np.zeros(100_000, np.int32))
    column = pa.DictionaryArray.from_arrays(indices, pa.array([bytes(MIB)]))
    batch = pa.record_batch([column], ["value"])
    with BrokerClient(address) as door, Stream(door, LOADED, batch.schema) as stream:
        for _ in range(5):
            with pytest.raises(errors.BatchTooLarge):
                stream.append(batch, flight_messages.AppendHeader(partition=0))


def never_reads(address: str) -> Iterator[None]:
    """All streams that there may be, of which nothing is read."""
    ticket = flight_messages.ReadTicket(topic=LOADED, partition=0, start=0, end=LOADED_BYTES // MIB)
    with contextlib.ExitStack() as doors:
        for _ in range(STREAMS):
            door = doors.enter_context(BrokerClient(address))
            door.flight.do_get(flight.Ticket(flight_messages.encode(ticket)))
        yield


@pytest.mark.xdist_group("hostile-flight")
@pytest.mark.parametrize(
    "attack",
    [
        sends_huge_messages,
        sends_compressed_bodies,
        compresses_messages,
        never_ends_messages,
        names_one_value_often,
        never_reads,
        sends_frames_of_nothing,
        renews_windows,
    ],
    ids=lambda attack: attack.__name__,
)
def test_others_go_on_beside(attack: Attack, siege: Siege) -> None:
    """A Kafka client is answered in time, an action of Flight likewise, and memory is bounded."""
    siege.withstand(lambda _: attack(siege.flight_address), name=attack.__name__)
    with BrokerClient(siege.flight_address) as door:
        assert door.describe(LOADED).topic == LOADED


@pytest.mark.xdist_group("hostile-flight")
def test_messages_of_nothing_take_little(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Streams without a reader, of the default number: they took 2.9 GB, and a ping 3.8 s."""
    with _loaded(tmp_path_factory, {}) as siege:
        siege.withstand(
            lambda _: sends_messages_of_nothing(siege.flight_address), 100 * MIB, name="nothing"
        )


@pytest.mark.xdist_group("hostile-flight")
def test_streams_that_do_nothing_make_room(siege: Siege) -> None:
    """Streams beyond the bound are refused, actions are answered, and idle ones end in seconds."""
    address = siege.flight_address
    with contextlib.ExitStack() as opened:
        idle = []
        for _ in range(STREAMS):
            door = opened.enter_context(BrokerClient(address))
            descriptor = flight.FlightDescriptor.for_command(
                flight_messages.encode(flight_messages.AppendStream(topic=LOADED))
            )
            writer, _ = door.flight.do_put(descriptor, SCHEMA)
            idle.append(writer)
        bystander = opened.enter_context(BrokerClient(address))
        time.sleep(1.0)
        with pytest.raises(errors.TooManyStreams):
            bystander.append(["a"], topic=LOADED)
        began = time.monotonic()
        while True:
            assert bystander.describe(LOADED).topic == LOADED
            with contextlib.suppress(errors.TooManyStreams):
                assert bystander.append(["a"], topic=LOADED).error is None
                break
            assert time.monotonic() - began < SECONDS
            time.sleep(0.2)
        assert time.monotonic() - began < limits.FLIGHT_IDLE_SHORT_SECONDS + 5.0
        for writer in idle:
            with contextlib.suppress(pa.ArrowException, OSError):
                writer.close()
