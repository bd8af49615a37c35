"""Measurements with many topics. Each is bounded in time, whatever the broker does."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from benchmarks.processes import cpu_seconds, rss_bytes
from benchmarks.progress import doing
from sparklog.bench.broker import BrokerProcess, FreshRoot
from sparklog.bench.report import BenchOptions, Measurement, Times
from sparklog.storage.table import delta_log

_SECONDS = 30.0
_WARM_SECONDS = 3.0

_PUBLISH_SECONDS = 90.0
_CREATE_SECONDS = 120.0
_IDLE_TOPICS = 2_000
_MIB = 2**20


# ------------------------------------------------------------------------------ the broker


@contextmanager
def _broker(options: BenchOptions) -> Iterator[BrokerProcess]:
    with (
        FreshRoot(options.folder) as root,
        BrokerProcess(root, kafka="127.0.0.1:0") as broker,
    ):
        yield broker


def create_topics(broker: BrokerProcess, names: Sequence[str], partitions: int) -> float:
    """Creates topics with one request, and returns the seconds it took."""
    admin = AdminClient({"bootstrap.servers": broker.kafka_address})
    admin.list_topics(timeout=10)
    new = [NewTopic(name, partitions, 1) for name in names]
    began = time.perf_counter()
    created = admin.create_topics(
        new, operation_timeout=_CREATE_SECONDS, request_timeout=_CREATE_SECONDS
    )
    for each in created.values():
        each.result()
    return time.perf_counter() - began


class _Usage:
    """CPU time and peak memory of the broker's processes, from construction on."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._broker = broker
        self._began, self._used = time.perf_counter(), self._seconds()
        self.rss_bytes = rss_bytes(broker.pid)

    def _seconds(self) -> float:
        return sum(cpu_seconds(self._broker.pid).values())

    def look(self) -> None:
        self.rss_bytes = max(self.rss_bytes, rss_bytes(self._broker.pid))

    def cores(self) -> float:
        """Returns the CPU use of all its processes, in cores."""
        return (self._seconds() - self._used) / (time.perf_counter() - self._began)


# ------------------------------------------------------------------------------ busy topics


def busy_100(options: BenchOptions) -> Iterator[Measurement]:
    """100 topics of 10 records/s each."""
    yield from _busy(options, topics=100, rate=10.0, ack_ms=15.0, lag_seconds=2.0)


def busy_400(options: BenchOptions) -> Iterator[Measurement]:
    """400 topics of 10 records/s each."""
    yield from _busy(options, topics=400, rate=10.0, ack_ms=25.0, lag_seconds=5.0)


def busy_1000(options: BenchOptions) -> Iterator[Measurement]:
    """1,000 topics of 1 record/s each."""
    yield from _busy(options, topics=1_000, rate=1.0, ack_ms=15.0, lag_seconds=5.0)


def _busy(
    options: BenchOptions, *, topics: int, rate: float, ack_ms: float, lag_seconds: float
) -> Iterator[Measurement]:
    what = f"{topics} topics × 4 partitions, each {rate:g} records/s"
    names = [f"wide-{number}" for number in range(topics)]
    yield from _loaded(
        options, what, names, 4, rate=topics * rate, ack_ms=ack_ms, lag_seconds=lag_seconds
    )


def partitions(options: BenchOptions) -> Iterator[Measurement]:
    """One topic of 1,000 and one of 5,000 partitions, at 1,000 records/s in total."""
    for count, lag_seconds in ((1_000, 3.0), (5_000, 10.0)):
        what = f"one topic of {count} partitions, 1,000 records/s over all"
        yield from _loaded(
            options, what, ["wide-0"], count, rate=1_000.0, ack_ms=None, lag_seconds=lag_seconds
        )


def _loaded(
    options: BenchOptions,
    what: str,
    names: Sequence[str],
    count: int,
    *,
    rate: float,
    ack_ms: float | None,
    lag_seconds: float,
) -> Iterator[Measurement]:
    with doing(what), _broker(options) as broker:
        create_topics(broker, ["probe"], 4)
        create_topics(broker, names, count)
        usage = _Usage(broker)
        load = start_load(
            broker.kafka_address,
            f"--topics={len(names)}",
            f"--partitions={count}",
            f"--rate={rate}",
            f"--seconds={_SECONDS + _WARM_SECONDS}",
        )
        time.sleep(_WARM_SECONDS)
        probe = start_load(broker.kafka_address, f"--seconds={_SECONDS - 2}")
        deadline = time.monotonic() + 3 * _SECONDS
        while load.poll() is None and time.monotonic() < deadline:
            usage.look()
            time.sleep(0.2)
        cores = usage.cores()
        sent, acks = result_of(load), result_of(probe)
        log = broker.connect()
        try:
            log.flush_to_table(timeout_seconds=_PUBLISH_SECONDS)
        except Exception as error:
            yield Measurement(name=what, value=f"not all is in the tables: {error}", met=False)
        log.close()
        found = np.concatenate([lags(broker.root, name) for name in names])
        usage.look()
    times = Times(acks["seconds"])
    if ack_ms is not None:
        yield Measurement(
            name=f"{what}: acks of a probe",
            value=str(times),
            target=f"p99 ≤ {ack_ms:g} ms",
            met=times.ms(99) <= ack_ms,
        )
    p50, p99 = np.percentile(found, [50, 99])
    yield Measurement(
        name=f"{what}: oldest record of a file, sent until committed",
        value=f"p50 {p50:.2f}, p99 {p99:.2f}, max {found.max():.2f} s",
        target=f"p99 ≤ {lag_seconds:g} s",
        met=bool(p99 <= lag_seconds),
        detail=f"{len(found)} files, {sent['acked']} records, {sent['refused']} refused",
    )
    yield Measurement(
        name="the same: broker",
        value=f"{cores:.2f} cores, {usage.rss_bytes / _MIB:.0f} MiB",
        detail=(
            f"{sent['waiting']} records waited in the producer at the end,"
            f" for {sent['late_seconds']:.1f} s"
        ),
    )


def start_load(address: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Starts `benchmarks.wide.load` with these arguments."""
    command = [sys.executable, "-m", "benchmarks.wide.load", address, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def result_of(process: subprocess.Popen[bytes]) -> Any:
    """Waits for a load or a probe to end, and returns the result it printed."""
    out, _ = process.communicate(timeout=4 * _SECONDS)
    return json.loads(out)


def lags(root: Path, topic: str) -> Any:
    """Returns for each file how long its oldest record waited for the commit, in seconds."""
    found = []
    for path in (root / "topics" / topic / "_delta_log").glob("*.json"):
        committed_us = path.stat().st_mtime_ns / 1e3
        actions = delta_log.decode_commit(path.read_bytes(), str(path))
        for add in actions.adds:
            oldest_us = delta_log.file_of(add).min_timestamp_us
            if add.data_change and oldest_us is not None:
                found.append((committed_us - oldest_us) / 1e6)
    return np.array(found)


# ------------------------------------------------------------------------------ idle topics


def create(options: BenchOptions) -> Iterator[Measurement]:
    """Creates 1,000 topics with one request, and 1,000 one at a time with the native client."""
    with doing("1,000 topics"), _broker(options) as broker:
        seconds = create_topics(broker, [f"a-{number}" for number in range(1_000)], 4)
        yield _most("creating 1,000 topics by one request", seconds, 4.0)
        log = broker.connect()
        began = time.perf_counter()
        for number in range(1_000):
            log.create_topic(f"b-{number}", partitions=4)
        yield _most("the next 1,000, one by one", time.perf_counter() - began, 4.0)
        log.close()


def idle(options: BenchOptions) -> Iterator[Measurement]:
    """Measures a start with 2,000 topics, and their cost while idle."""
    with doing(f"{_IDLE_TOPICS} topics"), _broker(options) as broker:
        create_topics(broker, [f"a-{number}" for number in range(_IDLE_TOPICS // 2)], 4)
        create_topics(broker, [f"b-{number}" for number in range(_IDLE_TOPICS // 2)], 4)
        broker.stop()
        began = time.perf_counter()
        broker.start()
        seconds = time.perf_counter() - began
        what = f"{_IDLE_TOPICS:,} idle topics × 4 partitions: start, with its process"
        yield _most(what, seconds, 5.0)
        time.sleep(_WARM_SECONDS)
        usage = _Usage(broker)
        time.sleep(max(options.seconds, 2 * _WARM_SECONDS))
        cores = usage.cores()
        yield Measurement(
            name="the same: processor",
            value=f"{100 * cores:.1f} % of a core, {usage.rss_bytes / _MIB:.0f} MiB",
            target="≤ 5 %",
            met=cores <= 0.05,
        )


def _most(name: str, seconds: float, most: float) -> Measurement:
    return Measurement(
        name=name, value=f"{seconds:.2f} s", target=f"≤ {most:g} s", met=seconds <= most
    )
