"""The cost of metrics: scrapes of many partitions, and Kafka requests during them."""

from __future__ import annotations

import itertools
import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from sparklog.bench.broker import BrokerProcess, FreshRoot, free_address
from sparklog.bench.report import BenchOptions, Measurement, Times

_TOPICS: Final = 400
_PARTITIONS: Final = 20
_PING_SECONDS: Final = 0.002
_SCRAPE_SECONDS: Final = 2.0
"""The time between two scrapes: longer than the broker reuses metrics for another scrape."""
_API_VERSIONS: Final = 18

_SCRAPER: Final = """
import http.client, json, sys, time
address, until = sys.argv[1], time.monotonic() + float(sys.argv[2])
found = []
while time.monotonic() < until:
    began = time.perf_counter()
    connection = http.client.HTTPConnection(address)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read()
    found.append((time.perf_counter() - began, len(text), text.count(b"\\n")))
    connection.close()
    time.sleep(float(sys.argv[3]))
print(json.dumps(found))
"""


def scrape(options: BenchOptions) -> Iterator[Measurement]:
    """Scrapes of 8,000 partitions, and how long a Kafka client waits during them."""
    metrics = free_address()
    settings = {"SPARKLOG_METRICS_LISTEN": metrics}
    with (
        FreshRoot(options.folder) as root,
        BrokerProcess(root, settings, kafka="127.0.0.1:0") as broker,
    ):
        with broker.connect() as log, ThreadPoolExecutor(16) as pool:
            names = [f"topic-{number:04d}" for number in range(_TOPICS)]
            list(pool.map(lambda name: log.create_topic(name, partitions=_PARTITIONS), names))
            for name in names[:10]:
                with log.producer() as producer:
                    producer.send(name, value=b"v")
        time.sleep(3)
        alone = _pings(broker.kafka_address, options.seconds)
        command = [sys.executable, "-c", _SCRAPER, metrics]
        command += [str(options.seconds), str(_SCRAPE_SECONDS)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as scraper:
            beside = _pings(broker.kafka_address, options.seconds)
            assert scraper.stdout is not None
            found = json.loads(scraper.stdout.read())
    times = Times([seconds for seconds, _, _ in found])
    _, size, lines = found[-1]
    yield Measurement(
        name=f"scrape of {_TOPICS * _PARTITIONS:,} partitions",
        value=f"p50 {times.ms(50):.0f}, max {times.ms(100):.0f} ms",
        target="≤ 200 ms",
        met=times.ms(50) <= 200,
        detail=f"{size / 1e6:.1f} MB, {lines:,} lines",
    )
    yield Measurement(
        name="answers of the Kafka listener while it is scraped every 2 s",
        value=str(beside),
        target="max ≤ 10 ms more",
        met=beside.ms(100) <= alone.ms(100) + 10,
        detail=f"without: {alone}",
    )


def _pings(address: str, seconds: float) -> Times:
    """Times ApiVersions requests, which the listener's event loop answers on its own."""
    host, _, port = address.rpartition(":")
    times = Times()
    with socket.create_connection((host, int(port)), 30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        until = time.perf_counter() + seconds
        for number in itertools.count():
            frame = struct.pack(">hhih", _API_VERSIONS, 0, number, -1)
            began = time.perf_counter()
            connection.sendall(struct.pack(">i", len(frame)) + frame)
            (left,) = struct.unpack(">i", _exactly(connection, 4))
            _exactly(connection, left)
            times.add(time.perf_counter() - began)
            if time.perf_counter() > until:
                return times
            time.sleep(_PING_SECONDS)
    raise AssertionError


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        data = connection.recv(size - len(found))
        if not data:
            raise ConnectionError("the broker closed the connection")
        found += data
    return found
