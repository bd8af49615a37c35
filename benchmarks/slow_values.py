"""Acks of one topic while a broker computes the typed columns of another from values that are slow.

None of the values is decoded by msgspec: each has a NaN, a number where the column is a STRING, and
a text where it is a DOUBLE. So Python decodes them, which holds the interpreter.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from benchmarks.progress import doing
from sparklog.bench.broker import BrokerProcess, FreshRoot
from sparklog.bench.report import BenchOptions, Measurement
from sparklog.client.log import Log

_ROUNDS: Final = 4
_PHASE_SECONDS: Final = 12.0
_BYTES_PER_SECOND: Final = 20e6
_BATCH_ROWS: Final = 1_000
_ACKS_PER_SECOND: Final = 100
_SCHEMA: Final = (
    "customer STRING, amount DOUBLE, ratio DOUBLE, at TIMESTAMP, paid BOOLEAN, city STRING,"
    " items ARRAY<STRUCT<name: STRING, count: BIGINT, price: DOUBLE>>, note STRING"
)
_VALUE: Final = (
    '{"customer": %d, "amount": "n/a", "ratio": NaN, "at": "2026-01-02T03:04:05.123Z",'
    ' "paid": true, "city": "Bern", "items": [{"name": "apples", "count": 3, "price": 1.5},'
    ' {"name": "bread", "count": 1, "price": 4.25}], "note": "%s"}'
)


def slow_values(options: BenchOptions) -> Iterator[Measurement]:
    """Latency of acks and the broker's memory, beside slow values with and without columns."""
    values = [(_VALUE % (number, "x" * 40)).encode() for number in range(_BATCH_ROWS)]
    batch = pa.RecordBatch.from_pydict({"value": pa.array(values, pa.binary())})
    found: dict[str, list[float]] = {"bytes": [], "typed": []}
    memory: dict[str, int] = {}
    with FreshRoot(options.folder) as root, BrokerProcess(root) as broker, broker.connect() as log:
        log.create_topic("acks", 1)
        log.create_topic("bytes", 4)
        log.create_topic("typed", 4, {"value.format": "json", "value.schema": _SCHEMA})
        for run in range(_ROUNDS):
            for topic in found:
                with doing(f"{topic}, run {run + 1}"):
                    load = _Load(log, topic, batch)
                    seconds, most = _acks(log, broker)
                    load.end()
                    log.flush_to_table(timeout_seconds=600)
                if run:  # the first one warms the broker up
                    found[topic] += seconds
                    memory[topic] = max(memory.get(topic, 0), most)
    p99 = {topic: statistics.quantiles(seconds, n=100)[98] for topic, seconds in found.items()}
    ratio = p99["typed"] / p99["bytes"]
    yield Measurement(
        name="acks beside 20 MB/s of slow values, compared with a topic without typed columns",
        value=f"p99 {ratio:.2f} ×",
        target="2 ×",
        met=ratio <= 2,
        detail=", ".join(
            f"{topic}: p50 {statistics.median(found[topic]) * 1e3:.1f} ms,"
            f" p99 {p99[topic] * 1e3:.1f} ms"
            for topic in found
        ),
    )
    more = (memory["typed"] - memory["bytes"]) / 2**20
    yield Measurement(
        name="the broker's memory beside them, compared with a topic without typed columns",
        value=f"{more:+.0f} MiB",
        target="256 MiB more",
        met=more <= 256,
    )


class _Load:
    """Sends batches at a constant rate, in the background."""

    def __init__(self, log: Log, topic: str, batch: pa.RecordBatch) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(log, topic, batch))
        self._thread.start()

    def _run(self, log: Log, topic: str, batch: pa.RecordBatch) -> None:
        pause_seconds = batch.nbytes / _BYTES_PER_SECOND
        due = time.perf_counter()
        with log.producer(linger_ms=0) as producer:
            while not self._ended.is_set():
                producer.send_table(topic, batch)
                due += pause_seconds
                self._ended.wait(max(due - time.perf_counter(), 0))

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def _acks(log: Log, broker: BrokerProcess) -> tuple[list[float], int]:
    """Returns the seconds of each ack, and the most memory of the broker, in bytes."""
    found: list[float] = []
    most = 0
    end = time.perf_counter() + _PHASE_SECONDS
    with log.producer(linger_ms=0) as producer:
        while (began := time.perf_counter()) < end:
            producer.send("acks", b"x").result()
            found.append(time.perf_counter() - began)
            if len(found) % 10 == 0:
                most = max(most, broker.rss_bytes())
            time.sleep(max(1 / _ACKS_PER_SECOND - (time.perf_counter() - began), 0))
    return found, most
