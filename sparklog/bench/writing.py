"""Ack rates of records: one at a time, bulk, sustained, and from a plain Python loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from sparklog.bench.broker import BrokerProcess, FreshRoot
from sparklog.bench.report import BenchOptions, Measurement, Times
from sparklog.client.log import Log
from sparklog.limits import MIB
from sparklog.storage.objects import open_store

VALUE_BYTES = 100
BATCH_ROWS = 10_000
STREAMS = 4
_AHEAD_BATCHES = 8


def values(rows: int, *, seed: int = 0) -> pa.Array:
    """Values of `VALUE_BYTES` random bytes, which barely compress."""
    data = np.random.default_rng(seed).bytes(rows * VALUE_BYTES)
    ends = np.arange(rows + 1, dtype=np.int32) * VALUE_BYTES
    return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(ends), pa.py_buffer(data)])


def disk(options: BenchOptions) -> list[Measurement]:
    """Measures a durable write on the disk itself, without the log."""
    figures = []
    with FreshRoot(options.folder) as root:
        store = open_store(str(root))
        for size, count in ((1_000, 500), (4_000_000, 100)):
            data = np.random.default_rng(0).bytes(size)
            times = Times()
            for number in range(count):
                began = time.perf_counter()
                store.put_new(f"disk/{size}-{number}", data)
                times.add(time.perf_counter() - began)
            rate = size / times.ms(50) / 1e3
            figures.append(
                Measurement(
                    name=f"the disk itself: one new durable object of {size / 1e3:,.0f} kB",
                    value=str(times),
                    detail=f"{rate:,.0f} MB/s" if size > MIB else "",
                )
            )
    return figures


def latency(options: BenchOptions) -> list[Measurement]:
    """Single records, each sent once the one before it is acked."""
    with FreshRoot(options.folder) as root, BrokerProcess(root) as broker, broker.connect() as log:
        log.create_topic("latency", partitions=4)
        times = Times()
        value = bytes(VALUE_BYTES)
        with log.producer(linger_ms=0) as producer:
            for _ in range(200):
                producer.send("latency", value).result()
            end = time.perf_counter() + options.seconds
            while (began := time.perf_counter()) < end:
                producer.send("latency", value).result()
                times.add(time.perf_counter() - began)
    met = times.ms(50) <= 0.8 and times.ms(99) <= 3.0
    return [
        Measurement(
            name="one record, sent and acked in turn",
            value=str(times),
            target="p50 ≤ 0.8 ms, p99 ≤ 3 ms",
            met=met,
            detail=f"{len(times.seconds):,} records",
        )
    ]


def _stream(log: Log, topic: str, until: Callable[[int], bool]) -> int:
    """Sends batches from this thread, several in flight, until `until(rows)` is true."""
    batch = pa.record_batch({"value": values(BATCH_ROWS)})
    rows = 0
    with log.producer(linger_ms=0) as producer:
        waiting: list[object] = []
        while not until(rows):
            waiting.append(producer.send_table(topic, batch))
            rows += BATCH_ROWS
            if len(waiting) > _AHEAD_BATCHES:
                waiting.pop(0).result()  # type: ignore[attr-defined]
        for each in waiting:
            each.result()  # type: ignore[attr-defined]
    return rows


def in_streams(log: Log, topic: str, until: Callable[[int], bool]) -> tuple[int, float]:
    """(rows acked, seconds) of `STREAMS` threads with a producer each."""
    acked = [0] * STREAMS

    def work(index: int) -> None:
        acked[index] = _stream(log, topic, until)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(STREAMS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(acked), time.perf_counter() - began


def burst(options: BenchOptions) -> list[Measurement]:
    """Four streams of 10,000-row batches: rows acked per second in a burst."""
    share = options.rows // STREAMS
    with FreshRoot(options.folder) as root, BrokerProcess(root) as broker, broker.connect() as log:
        log.create_topic("burst", partitions=4)
        rows, seconds = in_streams(log, "burst", lambda sent: sent >= share)
    rate = rows / seconds
    return [
        Measurement(
            name=f"4 streams, batches of 10,000: acked in a burst of {rows / 1e6:.0f} M rows",
            value=f"{rate / 1e6:.2f} M rows/s",
            target="3.5 M rows/s",
            met=rate >= 3.5e6,
            detail=f"{rate * VALUE_BYTES / 1e6:.0f} MB/s",
        )
    ]


def sustained(options: BenchOptions) -> list[Measurement]:
    """Measures bulk sends for 6 × `seconds`, until every record is in the table."""
    length = options.seconds * 6
    with FreshRoot(options.folder) as root, BrokerProcess(root) as broker, broker.connect() as log:
        log.create_topic("sustained", partitions=4)
        end = time.perf_counter() + length
        rows, acked_seconds = in_streams(log, "sustained", lambda _: time.perf_counter() >= end)
        began = time.perf_counter()
        log.flush_to_table()
        seconds = acked_seconds + time.perf_counter() - began
    rate = rows / seconds
    return [
        Measurement(
            name=f"the same, sustained for {length:.0f} s, all in the table at the end",
            value=f"{rate / 1e6:.2f} M rows/s",
            target="2 M rows/s",
            met=rate >= 2e6,
            detail=f"acked at {rows / acked_seconds / 1e6:.2f} M rows/s",
        )
    ]


def send(options: BenchOptions) -> list[Measurement]:
    """`producer.send`, one record per call, from one Python thread."""
    value = bytes(VALUE_BYTES)
    with FreshRoot(options.folder) as root, BrokerProcess(root) as broker, broker.connect() as log:
        log.create_topic("send", partitions=4)
        with log.producer() as producer:
            for _ in range(50_000):
                producer.send("send", value)
            producer.flush()
            count = 0
            began = time.perf_counter()
            end = began + options.seconds
            while time.perf_counter() < end:
                for _ in range(1_000):
                    future = producer.send("send", value)
                count += 1_000
            producer.flush()
            seconds = time.perf_counter() - began
            assert future.result().offset >= 0
    rate = count / seconds
    return [
        Measurement(
            name="record-at-a-time `producer.send` from one Python thread",
            value=f"{rate / 1e3:.0f} k records/s acked",
            target="250 k records/s",
            met=rate >= 250e3,
        )
    ]
