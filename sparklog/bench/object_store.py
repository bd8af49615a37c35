"""The cost of an object store: each request is delayed by 20 ms, and counted.

The store is in memory, so the broker runs in this process. The client that sends at a fixed rate
runs in another, so that the two do not compete for the GIL.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np

from sparklog.bench.report import BenchOptions, Measurement, Times
from sparklog.broker.agent import Agent
from sparklog.client.connection import Connection
from sparklog.client.log import Log
from sparklog.clock import SystemClock
from sparklog.settings import BrokerSettings, FlightSettings, KafkaSettings, LogSettings
from sparklog.storage.objects import DelayedStore, MemoryStore, Store
from sparklog.storage.table import delta_log

_DELAY_SECONDS = 0.02
_TOPICS = 20
_RECORDS_PER_SECOND = 1_000
_BUSY_TOPICS = 100
_BUSY_RECORDS_PER_SECOND = 10
_IDLE_TOPICS = 2_000
_PARTITIONS = 4
_WARM_SECONDS = 3.0


def objectstore(options: BenchOptions) -> list[Measurement]:
    """Ack times and requests per hour, over an in-memory store that takes 20 ms per request."""
    store = DelayedStore(MemoryStore(SystemClock()), _DELAY_SECONDS)
    with _broker(store) as broker:
        log = broker.log
        topics = [f"topic-{number:02d}" for number in range(_TOPICS)]
        for topic in topics:
            log.create_topic(topic, partitions=1)
        times = Times()
        with log.producer(linger_ms=0) as producer:
            end = time.perf_counter() + options.seconds
            while (began := time.perf_counter()) < end:
                producer.send(topics[0], bytes(100)).result()
                times.add(time.perf_counter() - began)
        broker.send(topics, _WARM_SECONDS, _RECORDS_PER_SECOND)
        requests = _Requests(store)
        broker.send(topics, options.seconds, _RECORDS_PER_SECOND)
    return [
        Measurement(
            name="object store with 20 ms injected per request: ack",
            value=str(times),
            target="p50 ≤ 60 ms",
            met=times.ms(50) <= 60,
        ),
        requests.measured("the same: requests per hour at 1,000 records/s over 20 topics"),
    ]


def objectstore_wide(options: BenchOptions) -> list[Measurement]:
    """Requests of an idle broker and of busy topics, table lag, and startup with many topics."""
    return [*_idle_and_busy(options), *_many_idle_topics(options)]


def _idle_and_busy(options: BenchOptions) -> Iterator[Measurement]:
    inner = MemoryStore(SystemClock())
    store = DelayedStore(inner, _DELAY_SECONDS)
    with _broker(store) as broker:
        log = broker.log
        time.sleep(_WARM_SECONDS)
        requests = _Requests(store)
        time.sleep(options.seconds)
        yield requests.measured("a broker without topics: requests per hour")
        topics = [f"topic-{number:02d}" for number in range(_BUSY_TOPICS)]
        log.create_topic(topics[0], partitions=_PARTITIONS)
        broker.send(topics[:1], _WARM_SECONDS, _BUSY_RECORDS_PER_SECOND)
        requests = _Requests(store)
        broker.send(topics[:1], options.seconds, _BUSY_RECORDS_PER_SECOND)
        yield requests.measured("one topic × 4 partitions, 10 records/s: requests per hour")
        for topic in topics[1:]:
            log.create_topic(topic, partitions=_PARTITIONS)
        rate = _BUSY_TOPICS * _BUSY_RECORDS_PER_SECOND
        broker.send(topics, _WARM_SECONDS, rate)
        requests, since_us = _Requests(store), time.time_ns() // 1_000
        broker.send(topics, options.seconds, rate)
        yield requests.measured("100 topics × 4 partitions, 10 records/s each: requests per hour")
        log.flush_to_table()
        lags = np.array([each for topic in topics for each in _lags(inner, topic, since_us)])
        p50, p99 = np.percentile(lags, [50, 99])
        yield Measurement(
            name="the same: table lag, of the oldest record of each file",
            value=f"p50 {p50:.2f}, p99 {p99:.2f}, max {lags.max():.2f} s",
            target="p99 ≤ 3 s",
            met=bool(p99 <= 3.0),
        )


def _many_idle_topics(options: BenchOptions) -> Iterator[Measurement]:
    inner = MemoryStore(SystemClock())
    with _broker(inner) as broker:
        for number in range(_IDLE_TOPICS):
            broker.log.create_topic(f"topic-{number:04d}", partitions=_PARTITIONS)
    store = DelayedStore(inner, _DELAY_SECONDS)
    began, used = time.perf_counter(), time.process_time()
    with _broker(store):
        seconds, used = time.perf_counter() - began, time.process_time() - used
        yield Measurement(
            name="2,000 idle topics × 4 partitions: start",
            value=f"{seconds:.1f} s",
            target="≤ 30 s",
            met=seconds <= 30,
            detail=f"{used:.1f} s of processor, {store.most_at_once} requests at once",
        )
        time.sleep(_WARM_SECONDS)
        requests = _Requests(store)
        time.sleep(options.seconds)
        yield requests.measured("the same: requests per hour")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Broker:
    """A broker in this process, and its clients."""

    log: Log
    address: str
    sender: Executor
    """Runs calls in another process, which starts with the first call."""

    def send(self, topics: Sequence[str], seconds: float, records_per_second: float) -> None:
        """Sends 100-byte records at a fixed rate, to each topic in turn."""
        self.sender.submit(_send, self.address, topics, seconds, records_per_second).result()


@contextmanager
def _broker(store: Store) -> Iterator[_Broker]:
    settings = BrokerSettings(
        root=store.uri,
        flight=FlightSettings(listen="127.0.0.1:0"),
        kafka=KafkaSettings(listen=""),
        log=LogSettings(level="error"),
    )
    with (
        Agent(settings, store=store) as agent,
        Log(Connection(lambda: agent.address)) as log,
        ProcessPoolExecutor(1, get_context("spawn")) as sender,
    ):
        yield _Broker(log=log, address=agent.address, sender=sender)


def _send(address: str, topics: Sequence[str], seconds: float, records_per_second: float) -> None:
    began = time.perf_counter()
    with Log(Connection(lambda: address)) as log, log.producer() as producer:
        for count in range(int(seconds * records_per_second)):
            due = began + count / records_per_second
            time.sleep(max(due - time.perf_counter(), 0))
            producer.send(topics[count % len(topics)], bytes(100))


class _Requests:
    """Counts the requests to a store from now on."""

    def __init__(self, store: DelayedStore) -> None:
        self._store = store
        self._before = store.requests.copy()
        self._began = time.perf_counter()

    def measured(self, name: str) -> Measurement:
        """Returns the requests so far, per hour and by kind."""
        found = self._store.requests - self._before
        hours = (time.perf_counter() - self._began) / 3600
        kinds = ", ".join(f"{kind} {count / hours:,.0f}" for kind, count in found.most_common(5))
        return Measurement(
            name=name, value=f"{found.total() / hours:,.0f}", target="printed", detail=kinds
        )


def _lags(store: MemoryStore, topic: str, since_us: int) -> Iterator[float]:
    """Yields how long the oldest record of each file waited for its commit, in seconds."""
    folder = f"topics/{topic}/{delta_log.LOG_FOLDER}"
    for stat in store.list_after(folder):
        if stat.modified_us < since_us or not stat.name.endswith(".json"):
            continue
        path = f"{folder}/{stat.name}"
        for add in delta_log.decode_commit(store.get(path), path).adds:
            oldest_us = delta_log.file_of(add).min_timestamp_us
            if add.data_change and oldest_us is not None:
                yield (stat.modified_us - oldest_us) / 1e6
