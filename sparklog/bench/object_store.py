"""The cost of an object store: each request is delayed by 20 ms, counted, and priced.

The store is in memory, so the broker runs in this process. The client that sends at a fixed rate
runs in another, so that the two do not compete for the GIL.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Final, Literal

import numpy as np

from sparklog.bench.report import BenchOptions, Measurement, Times
from sparklog.broker.agent import Agent
from sparklog.client.connection import Connection
from sparklog.client.log import Log
from sparklog.clock import SystemClock
from sparklog.settings import (
    BrokerSettings,
    FlightSettings,
    KafkaSettings,
    LogSettings,
    RequestSettings,
)
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
_COST_SECONDS = 6  # times the time of other measures: a table may be published twice a minute
_PUT_DOLLARS = 0.005 / 1_000
_READ_DOLLARS = 0.000_4 / 1_000
"""Prices of S3 Standard in us-east-1, November 2026. A listing costs as much as a put."""
_PUTS: Final = ("put", "put_new", "list_after", "folders", "walk")
_FREE: Final = ("delete",)
_HOURS_PER_MONTH: Final = 730


def objectstore(options: BenchOptions) -> list[Measurement]:
    """Ack times and requests per hour of the profile "fast", at 20 ms per request."""
    store = DelayedStore(MemoryStore(SystemClock()), _DELAY_SECONDS)
    with _broker(store, "fast") as broker:
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
            name="object store with 20 ms injected per request, profile fast: ack",
            value=str(times),
            target="p50 ≤ 60 ms",
            met=times.ms(50) <= 60,
        ),
        requests.measured("the same: requests per hour at 1,000 records/s over 20 topics"),
    ]


def objectstore_wide(options: BenchOptions) -> list[Measurement]:
    """Startup with many topics, and the requests of their broker."""
    return list(_many_idle_topics(options))


def cost(options: BenchOptions) -> list[Measurement]:
    """Dollars per month of a broker without topics and with busy ones; acks and table lag."""
    return list(_costs(options))


def _costs(options: BenchOptions) -> Iterator[Measurement]:
    inner = MemoryStore(SystemClock())
    store = DelayedStore(inner, _DELAY_SECONDS)
    seconds = options.seconds * _COST_SECONDS
    with _broker(store) as broker:
        time.sleep(_WARM_SECONDS)
        requests = _Requests(store)
        time.sleep(seconds)
        yield requests.priced("a broker without topics", most_dollars=5)
        topics = [f"topic-{number:02d}" for number in range(_BUSY_TOPICS)]
        known = 0
        for names, most_dollars, ack_p50_ms, lag_p99 in (
            (topics[:1], 30, 60, 15),
            (topics, 300, 150, 60),
        ):
            for name in names[known:]:
                broker.log.create_topic(name, partitions=_PARTITIONS)
            known = len(names)
            what = f"{len(names)} × {_PARTITIONS} partitions, {_BUSY_RECORDS_PER_SECOND} records/s"
            rate = len(names) * _BUSY_RECORDS_PER_SECOND
            broker.send(names, _WARM_SECONDS, rate)
            requests, since_us = _Requests(store), time.time_ns() // 1_000
            acks = broker.send(names, seconds, rate)
            yield requests.priced(what, most_dollars=most_dollars)
            yield Measurement(
                name="the same: ack",
                value=str(acks),
                target=f"p50 ≤ {ack_p50_ms} ms",
                met=acks.ms(50) <= ack_p50_ms,
            )
            broker.log.flush_to_table()
            lags = np.array([each for name in names for each in _lags(inner, name, since_us)])
            p50, p99 = np.percentile(lags, [50, 99])
            yield Measurement(
                name="the same: table lag, of the oldest record of each file",
                value=f"p50 {p50:.1f}, p99 {p99:.1f}, max {lags.max():.1f} s",
                target=f"p99 ≤ {lag_p99} s",
                met=bool(p99 <= lag_p99),
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

    def send(self, topics: Sequence[str], seconds: float, records_per_second: float) -> Times:
        """Sends 100-byte records at a fixed rate, to each topic in turn; returns ack times."""
        return self.sender.submit(_send, self.address, topics, seconds, records_per_second).result()


@contextmanager
def _broker(store: Store, profile: Literal["thrifty", "fast"] = "thrifty") -> Iterator[_Broker]:
    settings = BrokerSettings(
        root=store.uri,
        flight=FlightSettings(listen="127.0.0.1:0"),
        kafka=KafkaSettings(listen=""),
        requests=RequestSettings(profile=profile),
        log=LogSettings(level="error"),
    )
    with (
        Agent(settings, store=store) as agent,
        Log(Connection(lambda: agent.address)) as log,
        ProcessPoolExecutor(1, get_context("spawn")) as sender,
    ):
        yield _Broker(log=log, address=agent.address, sender=sender)


def _send(address: str, topics: Sequence[str], seconds: float, records_per_second: float) -> Times:
    times = Times()

    def acked(sent: float, _: object) -> None:
        times.add(time.perf_counter() - sent)

    began = time.perf_counter()
    with Log(Connection(lambda: address)) as log, log.producer() as producer:
        for count in range(int(seconds * records_per_second)):
            due = began + count / records_per_second
            time.sleep(max(due - time.perf_counter(), 0))
            future = producer.send(topics[count % len(topics)], bytes(100))
            future.add_done_callback(functools.partial(acked, time.perf_counter()))
    return times


class _Requests:
    """Counts the requests to a store from now on."""

    def __init__(self, store: DelayedStore) -> None:
        self._store = store
        self._before = store.requests.copy()
        self._began = time.perf_counter()

    def priced(self, name: str, *, most_dollars: float) -> Measurement:
        """Returns the requests so far in dollars per month."""
        found, hours = self._so_far()
        puts = sum(found[kind] for kind in _PUTS)
        reads = found.total() - puts - sum(found[kind] for kind in _FREE)
        dollars = (puts * _PUT_DOLLARS + reads * _READ_DOLLARS) / hours * _HOURS_PER_MONTH
        return Measurement(
            name=f"{name}: requests, per month",
            value=f"{dollars:,.0f} dollars ({puts / hours / 3600:.2f} puts/s)",
            target=f"≤ {most_dollars} dollars",
            met=dollars <= most_dollars,
            detail=_kinds(found, hours),
        )

    def measured(self, name: str) -> Measurement:
        """Returns the requests so far, per hour and by kind."""
        found, hours = self._so_far()
        return Measurement(
            name=name,
            value=f"{found.total() / hours:,.0f}",
            target="printed",
            detail=_kinds(found, hours),
        )

    def _so_far(self) -> tuple[Counter[str], float]:
        hours = (time.perf_counter() - self._began) / 3600
        return self._store.requests - self._before, hours


def _kinds(requests: Counter[str], hours: float) -> str:
    """Returns the requests per hour of the most frequent kinds."""
    return ", ".join(f"{kind} {count / hours:,.0f}" for kind, count in requests.most_common(5))


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
