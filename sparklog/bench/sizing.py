"""The memory of an idle broker per partition, connection, stream and group.

Each figure is the growth of the broker's resident memory, divided by the number of things added.
The broker is restarted for each figure, so that none reuses memory freed by the one before.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from sparklog.bench.broker import BrokerProcess, FreshRoot
from sparklog.bench.report import BenchOptions, Measurement
from sparklog.client.log import Log

_TOPICS: Final = 200
_PARTITIONS: Final = 50
_CONNECTIONS: Final = 900
"""Below `kafka.max_connections_per_address`."""
_STREAMS: Final = 200
_GROUPS: Final = 2_000
_GROUP_PARTITIONS: Final = 10
_SETTLED_SECONDS: Final = 3.0
_SETTLED_BYTES: Final = 256 << 10
_MOST_SECONDS: Final = 30.0
_API_VERSIONS: Final = 18
_SETTINGS: Final = {"SPARKLOG_PUBLISHER_PROCESS": "off"}
"""The publishing process has its own memory, which the figures would miss."""


def sizing(options: BenchOptions) -> Iterator[Measurement]:
    """Memory of an idle broker, and disk space of an idle topic."""
    with FreshRoot(options.folder) as root:
        broker = BrokerProcess(root, _SETTINGS, kafka="127.0.0.1:0")
        with broker:
            empty_bytes = _settled_bytes(broker)
        yield Measurement(
            name="a broker without topics: memory", value=f"{empty_bytes / 2**20:.0f} MiB"
        )
        with broker, broker.connect() as log, ThreadPoolExecutor(8) as pool:
            names = [f"topic-{number:04d}" for number in range(_TOPICS)]
            list(pool.map(lambda name: log.create_topic(name, partitions=_PARTITIONS), names))
        yield Measurement(
            name=f"an idle topic of {_PARTITIONS} partitions: disk",
            value=f"{_disk_bytes(root / 'topics') / _TOPICS / 1e3:.0f} kB",
        )
        with broker:
            grown_bytes = _settled_bytes(broker) - empty_bytes
        yield _each("an idle partition", grown_bytes, _TOPICS * _PARTITIONS)
        for measure in (_connections, _streams, _groups):
            with broker:
                yield measure(broker)


def _each(name: str, grown_bytes: int, count: int) -> Measurement:
    return Measurement(
        name=f"{name}: memory",
        value=f"{grown_bytes / count / 1e3:.1f} kB",
        detail=f"{grown_bytes / 2**20:.0f} MiB for {count:,}",
    )


def _connections(broker: BrokerProcess) -> Measurement:
    """Kafka connections that have made a request."""
    host, _, port = broker.kafka_address.rpartition(":")
    body = struct.pack(">hhih", _API_VERSIONS, 0, 1, -1)

    def connect(opened: ExitStack) -> None:
        each = opened.enter_context(socket.create_connection((host, int(port)), 60.0))
        each.sendall(struct.pack(">i", len(body)) + body)
        (size,) = struct.unpack(">i", _received(each, 4))
        _received(each, size)

    with ExitStack() as opened:
        connect(opened)
        before_bytes = _settled_bytes(broker)
        for _ in range(_CONNECTIONS):
            connect(opened)
        grown_bytes = _settled_bytes(broker) - before_bytes
    return _each("an idle connection of Kafka", grown_bytes, _CONNECTIONS)


def _received(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += connection.recv(size - len(data))
    return data


def _streams(broker: BrokerProcess) -> Measurement:
    """Streams of native producers that have sent a record."""

    def produce(log: Log, opened: ExitStack) -> None:
        producer = opened.enter_context(log.producer())
        producer.send("topic-0000", value=b"v").result()

    with broker.connect() as log, ExitStack() as opened:
        produce(log, opened)
        before_bytes = _settled_bytes(broker)
        for _ in range(_STREAMS):
            produce(log, opened)
        grown_bytes = _settled_bytes(broker) - before_bytes
    return _each("an idle stream of a native producer", grown_bytes, _STREAMS)


def _groups(broker: BrokerProcess) -> Measurement:
    """Groups with committed offsets but no members."""
    places = [(f"topic-{number:04d}", 0) for number in range(_GROUP_PARTITIONS)]
    with broker.connect() as log:
        log.commit_group_offsets("first", dict.fromkeys(places, 0))
        before_bytes = _settled_bytes(broker)
        for number in range(_GROUPS):
            log.commit_group_offsets(f"group-{number:04d}", dict.fromkeys(places, 0))
        grown_bytes = _settled_bytes(broker) - before_bytes
    return _each(f"a group with {_GROUP_PARTITIONS} committed offsets", grown_bytes, _GROUPS)


def _settled_bytes(broker: BrokerProcess) -> int:
    """Returns the resident memory once it has hardly changed for some seconds."""
    began = changed = time.monotonic()
    found = broker.rss_bytes()
    while time.monotonic() - changed < _SETTLED_SECONDS:
        if time.monotonic() - began > _MOST_SECONDS:
            break
        time.sleep(0.2)
        now = broker.rss_bytes()
        if abs(now - found) > _SETTLED_BYTES:
            found, changed = now, time.monotonic()
    return broker.rss_bytes()


def _disk_bytes(folder: Path) -> int:
    """Returns the bytes that the files below a folder occupy on disk, in whole blocks."""
    return sum(each.lstat().st_blocks * 512 for each in folder.rglob("*"))
