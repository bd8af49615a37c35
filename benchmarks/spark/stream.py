"""The latency of records from a producer to a micro-batch, and the cost of an idle query.

Sender and reader are this process, so they share a clock. Kafka's producer is the Java client,
called through Spark's gateway, which adds a millisecond to its side.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import numpy as np

from benchmarks.compare import sooner
from benchmarks.processes import Usage
from benchmarks.progress import doing
from benchmarks.spark.setup import SparkSetup, needs_spark, start
from sparklog.bench.report import BenchOptions, Measurement, Times
from sparklog.bench.writing import VALUE_BYTES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

_PER_SECOND: Final = 100
_MEASURED: Final = 3.0
"""The measured part, in multiples of a timed measure's seconds, which are the warm-up."""
_IDLE_SETTLE_SECONDS: Final = 5.0
_PATIENCE_SECONDS: Final = 60.0
_PROBE: Final = -1
_STAMP = struct.Struct("<qq")
_TOPIC: Final = "stream"
_IDLE_TOPIC: Final = "idle"


@needs_spark
def stream(options: BenchOptions) -> Iterator[Measurement]:
    """Latency of streaming queries with the default trigger, and the cost of an idle one."""
    with start(options) as here:
        yield from here.report_missing()
        here.create_topic(_TOPIC)
        yield from _end_to_end(here, options.seconds)
        here.create_topic(_IDLE_TOPIC)
        yield _idle(here, options.seconds)


# ------------------------------------------------------------------------------ end to end


def _end_to_end(here: SparkSetup, seconds: float) -> Iterator[Measurement]:
    delta = kafka = None
    with here.ours.log.producer(linger_ms=0) as producer:

        def send(value: bytes) -> None:
            producer.send(_TOPIC, value)

        with doing("end to end through sparklog"):
            ours = _latencies(here, here.ours.stream(_TOPIC, "latest"), send, seconds)
        if here.has_delta:
            with doing("end to end through the topic's table, by Delta's own source"):
                delta = _latencies(here, here.ours.delta_stream(_TOPIC), send, seconds)
    client = here.kafka
    if client is not None:
        with doing("end to end through Kafka"):
            kafka = _latencies(
                here,
                client.stream(_TOPIC, "latest"),
                lambda value: client.send(_TOPIC, value),
                seconds,
            )
    name = f"end to end, {_PER_SECOND} records/s, sent until collected in foreachBatch"
    yield sooner(name, ours, kafka, most={50: 0.9, 99: 0.8}, than="Kafka")
    yield sooner("the same", ours, delta, most={50: 0.3}, than="plain Delta streaming")


def _latencies(
    here: SparkSetup, frame: DataFrame, send: Callable[[bytes], object], seconds: float
) -> Times:
    """Latencies of the records after the warm-up. Raises RuntimeError if one is missing."""
    arrivals = Arrivals()
    query = (
        frame.writeStream.foreachBatch(arrivals.collect)
        .option("checkpointLocation", here.checkpoint())
        .start()
    )
    warm = int(seconds * _PER_SECOND)
    total = warm + int(seconds * _MEASURED * _PER_SECOND)
    with _stopped(query):
        _await_first(arrivals, send)
        began = time.perf_counter()
        for number in range(total):
            time.sleep(max(began + number / _PER_SECOND - time.perf_counter(), 0))
            send(stamped(number))
        arrivals.await_all(range(total))
    return Times([arrivals.seconds[number] for number in range(warm, total)])


def _await_first(arrivals: Arrivals, send: Callable[[bytes], object]) -> None:
    """Sends probes until one arrives: a query just started may begin after the first ones."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not arrivals.seconds:
        if time.monotonic() > deadline:
            raise RuntimeError("a streaming query received none of the records sent")
        send(stamped(_PROBE))
        time.sleep(0.2)


@contextmanager
def _stopped(query: StreamingQuery) -> Iterator[None]:
    """Stops the query at the end. Raises the error that ended it, rather than later ones."""
    try:
        yield
    except RuntimeError:
        _check_runs(query)
        raise
    else:
        _check_runs(query)
    finally:
        query.stop()


def _check_runs(query: StreamingQuery) -> None:
    failed = query.exception()
    if failed is not None:
        raise failed


_PADDING = np.random.default_rng(0).bytes(VALUE_BYTES - _STAMP.size)


def stamped(number: int) -> bytes:
    """Returns a value that contains its number and the time it was sent."""
    return _STAMP.pack(number, time.perf_counter_ns()) + _PADDING


class Arrivals:
    """The latency of each record, in seconds by its number, until its batch is collected."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}

    def collect(self, batch: DataFrame, _batch_id: int) -> None:
        """The `foreachBatch` function. Raises RuntimeError for a duplicate record."""
        rows = batch.collect()
        now = time.perf_counter_ns()
        for row in rows:
            number, sent = _STAMP.unpack_from(row.value)
            if number in self.seconds and number != _PROBE:
                raise RuntimeError(f"record {number} arrived twice")
            self.seconds[number] = (now - sent) / 1e9

    def await_all(self, numbers: range) -> None:
        """Waits for these records. Raises RuntimeError if some do not arrive."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self.seconds.keys() >= set(numbers):
            if time.monotonic() > deadline:
                lost = len(set(numbers) - self.seconds.keys())
                raise RuntimeError(f"{lost:,} of {len(numbers):,} records never arrived")
            time.sleep(0.05)


# ------------------------------------------------------------------------------ idle


def _idle(here: SparkSetup, seconds: float) -> Measurement:
    """CPU use of Spark's JVM and its Python processes, without a query and with an idle one."""
    with doing("an idle session"):
        alone = Usage.over(here.spark, seconds)
    with doing("an idle query on sparklog"):
        ours = _idle_usage(here, here.ours.stream(_IDLE_TOPIC, "latest"), seconds)
    detail = f"its JVM {_percent(ours.jvm - alone.jvm)}"
    if here.kafka is not None:
        with doing("an idle query on Kafka"):
            kafka = _idle_usage(here, here.kafka.stream(_IDLE_TOPIC, "latest"), seconds)
        detail += f", Kafka's JVM {_percent(kafka.jvm - alone.jvm)}"
    added = ours.python - alone.python
    return Measurement(
        name="idle streaming query, default trigger: its Python processes",
        value=f"{_percent(added)} of a core",
        target="< 2 %",
        met=added < 0.02,
        detail=f"{detail}; an idle session's {_percent(alone.jvm)}",
    )


def _idle_usage(here: SparkSetup, frame: DataFrame, seconds: float) -> Usage:
    sink = frame.writeStream.format("noop").option("checkpointLocation", here.checkpoint())
    with _stopped(sink.start()):
        time.sleep(_IDLE_SETTLE_SECONDS)
        return Usage.over(here.spark, seconds)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
