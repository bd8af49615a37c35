"""The job `mirror` from a real Kafka: bulk copying, lag while following, and a cutover."""

from __future__ import annotations

import contextlib
import re
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import confluent_kafka
import numpy as np

from benchmarks.compare import faster
from benchmarks.mirror_maker import copy_rate
from benchmarks.progress import doing
from benchmarks.spark.setup import SparkSetup, needs_spark, start
from benchmarks.spark.sides import PARTITIONS
from sparklog.bench.report import BenchOptions, Measurement, Times
from sparklog.bench.writing import VALUE_BYTES
from sparklog.clock import Clock, SystemClock
from sparklog.jobs.mirroring.cutover import Cutover, Patience
from sparklog.jobs.mirroring.groups import GroupOffsets
from sparklog.jobs.mirroring.plan import Selection
from sparklog.jobs.mirroring.rounds import Mirror, Settings, SparkCopier
from sparklog.jobs.mirroring.sides import KafkaSource, Target

_BULK: Final = "mirror-bulk"
_MIRROR_MAKER: Final = {
    "default settings": {},
    "batch.size=1000000": {"ours.producer.batch.size": "1000000"},
}
_ROWS: Final = 10_000_000
_RUNS: Final = 3
_LAG_PER_SECOND: Final = 1_000
_LAG_MOST_SECONDS: Final = 1.5
_CUTOVER_PER_SECOND: Final = 10_000
_CUTOVER_MOST_SECONDS: Final = 5.0
_QUIET_SECONDS: Final = 2.0
_SETTLE_SECONDS: Final = 10.0
_PATIENCE_SECONDS: Final = 120.0
_GROUP: Final = "cutover"
_STAMP: Final = struct.Struct("<qd")
_PADDING: Final = np.random.default_rng(0).bytes(VALUE_BYTES - _STAMP.size)


@needs_spark
def mirror(options: BenchOptions) -> Iterator[Measurement]:
    """The measures, in one session; the last one, of MirrorMaker 2, has no target."""
    with start(options) as here:
        yield from here.report_missing()
        if here.kafka is None:
            return
        yield _bulk(here, min(_ROWS, options.rows))
        yield _lag(here, options.seconds)
        yield from _cutover(here, options.seconds)
        yield from _mirror_maker(here, min(_ROWS, options.rows))


@contextmanager
def _mirror(
    here: SparkSetup, topic: str, name: str, clock: Clock | None = None
) -> Iterator[tuple[Mirror, KafkaSource, Target]]:
    """Yields a mirror of a topic under a name, with its source and target."""
    assert here.kafka is not None
    source = KafkaSource(here.spark, here.kafka.address, {})
    target = Target(str(here.folder / "root"))
    selection = Selection(topics=re.compile(topic), renames=[(re.compile(topic), name)])
    copier = SparkCopier(here.spark, source, target)
    try:
        yield (
            Mirror(copier, source, target, Settings(selection=selection), clock=clock),
            source,
            target,
        )
    finally:
        target.close()
        source.close()


class _Stopped(Exception):
    """The measure is complete."""


class _Clock(SystemClock):
    """A clock whose `sleep` raises `_Stopped` once `is_over` is set."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def sleep(self, seconds: float) -> None:
        if self.is_over.wait(seconds):
            raise _Stopped


# ------------------------------------------------------------------------------ bulk


def _bulk(here: SparkSetup, rows: int) -> Measurement:
    """Copies into a new topic, alternating with Spark's scan; the last run of each counts."""
    assert here.kafka is not None
    topic = _BULK
    here.kafka.create_topic(topic)
    with doing("filling a topic of Kafka"):
        frame = here.spark.range(rows).selectExpr(
            "cast(id as string) as key",
            f"substr(concat(sha2(cast(id as string), 512), 'padding'), 1, {VALUE_BYTES}) as value",
            "array(named_struct('key', 'trace', 'value', cast(hex(id) as binary))) as headers",
        )
        here.kafka.write(frame, topic)
    scan = here.kafka.read(topic, includeHeaders="true")
    ours = theirs = 0.0
    for run in range(_RUNS):
        with doing(f"Spark's scan, run {run + 1} of {_RUNS}"):
            theirs = _timed(lambda: scan.write.format("noop").mode("overwrite").save())
        with (
            doing(f"mirror, run {run + 1} of {_RUNS}"),
            _mirror(here, topic, f"bulk-{run}") as (
                job,
                *_,
            ),
        ):
            ours = _timed(job.once)
        if job.copied.records != rows:
            raise RuntimeError(f"{job.copied.records} of {rows} records were copied")
        here.ours.wait_until_quiet(f"bulk-{run}")
    return faster(
        f"mirror of {rows / 1e6:g} M records with keys and headers, {PARTITIONS} partitions",
        rows,
        ours,
        theirs,
        least=0.8,
        than="Spark's Kafka scan into noop",
    )


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _mirror_maker(here: SparkSetup, rows: int) -> Iterator[Measurement]:
    """Copies the topic of `_bulk` again, with MirrorMaker; its rate has no target."""
    assert here.kafka is not None
    for said, settings in _MIRROR_MAKER.items():
        name = f"MirrorMaker 2, the same {rows / 1e6:g} M records into sparklog, {said}"
        with doing(name):
            try:
                rate = copy_rate(here.folder, here.kafka.address, _BULK, rows, settings)
                value = f"{rate / 1e6:.2f} M rows/s"
            except RuntimeError as error:
                value = str(error)
        yield Measurement(name=name, value=value)


# ------------------------------------------------------------------------------ lag


class _Sender(threading.Thread):
    """Sends numbered and timestamped records to Kafka at a fixed rate."""

    def __init__(self, address: str, topic: str, per_second: int) -> None:
        super().__init__(daemon=True)
        self._producer = confluent_kafka.Producer({"bootstrap.servers": address, "linger.ms": 5})
        self._topic = topic
        self._per_second = per_second
        self._is_over = threading.Event()
        self.sent = 0
        self.stopped_at = 0.0

    def run(self) -> None:
        began = time.perf_counter()
        while not self._is_over.wait(0.005):
            due = int((time.perf_counter() - began) * self._per_second)
            for number in range(self.sent, due):
                value = _STAMP.pack(number, time.perf_counter()) + _PADDING
                self._producer.produce(self._topic, value, partition=number % PARTITIONS)
            self.sent = due
            self._producer.poll(0)
        self._producer.flush()

    def stop(self) -> None:
        """Returns once all records are acked."""
        self._is_over.set()
        self.join()
        self.stopped_at = time.perf_counter()


def _lag(here: SparkSetup, seconds: float) -> Measurement:
    """Time from a producer's call until a consumer of the mirror receives the record."""
    assert here.kafka is not None
    topic = "mirror-lag"
    here.kafka.create_topic(topic)
    lags = Times()
    sender = _Sender(here.kafka.address, topic, _LAG_PER_SECOND)
    clock = _Clock()

    def watch() -> None:
        sender.start()
        with here.ours.log.consumer("lag") as consumer:
            warm = time.perf_counter() + seconds
            end = warm + 3 * seconds
            while time.perf_counter() < end:
                for record in consumer.poll(0.1):
                    now = time.perf_counter()
                    if now >= warm:
                        lags.add(now - _STAMP.unpack_from(record.value or b"")[1])
        sender.stop()
        clock.is_over.set()

    with doing("lag of a mirror"), _mirror(here, topic, "lag", clock) as (job, *_):
        job.once()
        watching = _Work(watch)
        watching.start()
        with contextlib.suppress(_Stopped):
            job.follow()
        watching.finish()
    return Measurement(
        name=f"lag of a mirror that follows {_LAG_PER_SECOND:,} records/s",
        value=f"p50 {lags.ms(50):.0f}, p99 {lags.ms(99):.0f} ms",
        target=f"p50 ≤ {_LAG_MOST_SECONDS:g} s",
        met=lags.ms(50) <= _LAG_MOST_SECONDS * 1e3,
        detail=f"{len(lags.seconds):,} records",
    )


# ------------------------------------------------------------------------------ cutover


def _cutover(here: SparkSetup, seconds: float) -> Iterator[Measurement]:
    """Moves producers and a group from Kafka to the mirror while records arrive."""
    assert here.kafka is not None
    topic, address = "mirror-cutover", here.kafka.address
    here.kafka.create_topic(topic)
    sender = _Sender(address, topic, _CUTOVER_PER_SECOND)
    seen: Counter[int] = Counter()
    with doing("cutover of a mirror"), _mirror(here, topic, topic) as (job, source, target):
        sender.start()
        time.sleep(seconds)
        groups = GroupOffsets(source, target, re.compile(_GROUP))
        waits = Patience(quiet_seconds=_QUIET_SECONDS, wait_seconds=_PATIENCE_SECONDS)
        reader = _Work(lambda: _read_kafka(address, topic, sender, seen))
        reader.start()
        job.once()
        stopping = threading.Timer(_SETTLE_SECONDS, sender.stop)
        stopping.start()
        Cutover(job, source, target, groups, waits).run()
        reader.finish()
        with here.ours.log.producer(linger_ms=0) as producer:
            producer.send(topic, _STAMP.pack(sender.sent, 0.0), partition=0).result()
            pause = time.perf_counter() - sender.stopped_at
            total = sender.sent + _CUTOVER_PER_SECOND
            for number in range(sender.sent + 1, total):
                producer.send(topic, _STAMP.pack(number, 0.0), partition=number % PARTITIONS)
    with here.ours.log.consumer(topic, group=_GROUP, follow=False) as consumer:
        seen.update(_STAMP.unpack_from(record.value or b"")[0] for record in consumer)
    yield Measurement(
        name=f"cutover at {_CUTOVER_PER_SECOND:,} records/s: from the last record in Kafka to the"
        " first ack here",
        value=f"{pause:.1f} s",
        target=f"≤ {_CUTOVER_MOST_SECONDS:g} s",
        met=pause <= _CUTOVER_MOST_SECONDS,
        detail=f"of them {_QUIET_SECONDS:g} s that the source must be quiet",
    )
    skipped = sum(number not in seen for number in range(total))
    repeated = sum(count - 1 for count in seen.values())
    yield Measurement(
        name="the same: records that the group has skipped and repeated",
        value=f"{skipped} and {repeated}",
        target="0 and 0",
        met=skipped == repeated == 0,
        detail=f"of {total:,}",
    )


class _Work(threading.Thread):
    """Work in a thread, whose error is raised by `finish`."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        self.join()
        if self._error is not None:
            raise self._error


def _read_kafka(address: str, topic: str, sender: _Sender, seen: Counter[int]) -> None:
    """Reads in the group until the sender has stopped and all is read, then commits."""
    settings = {"bootstrap.servers": address, "group.id": _GROUP, "enable.auto.commit": False}
    consumer = confluent_kafka.Consumer({**settings, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    while sender.is_alive() or len(seen) < sender.sent:
        for message in consumer.consume(10_000, 0.1):
            seen[_STAMP.unpack_from(message.value() or b"")[0]] += 1
    consumer.commit(asynchronous=False)
    consumer.close()
