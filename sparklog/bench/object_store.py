"""The cost of an object store: each request takes 20 ms more, and each request is counted."""

from __future__ import annotations

import time

from sparklog.bench.report import BenchOptions, Measurement, Times
from sparklog.broker.agent import Agent
from sparklog.client.connection import Connection
from sparklog.client.log import Log
from sparklog.clock import SystemClock
from sparklog.settings import BrokerSettings, FlightSettings, KafkaSettings
from sparklog.storage.objects import DelayedStore, MemoryStore

_DELAY_SECONDS = 0.02
_TOPICS = 20
_RECORDS_PER_SECOND = 1_000


def objectstore(options: BenchOptions) -> list[Measurement]:
    """Acks, and requests an hour, over a store in memory that takes 20 ms a request."""
    store = DelayedStore(MemoryStore(SystemClock()), _DELAY_SECONDS)
    settings = BrokerSettings(
        root=store.uri, flight=FlightSettings(listen="127.0.0.1:0"), kafka=KafkaSettings(listen="")
    )
    with Agent(settings, store=store) as agent, Log(Connection(lambda: agent.address)) as log:
        topics = [f"topic-{number:02d}" for number in range(_TOPICS)]
        for topic in topics:
            log.create_topic(topic, partitions=1)
        times = Times()
        with log.producer(linger_ms=0) as producer:
            end = time.perf_counter() + options.seconds
            while (began := time.perf_counter()) < end:
                producer.send(topics[0], bytes(100)).result()
                times.add(time.perf_counter() - began)
        before, began = sum(store.requests.values()), time.perf_counter()
        with log.producer() as producer:
            for count in range(int(options.seconds * _RECORDS_PER_SECOND)):
                due = began + count / _RECORDS_PER_SECOND
                time.sleep(max(due - time.perf_counter(), 0))
                producer.send(topics[count % _TOPICS], bytes(100))
        seconds = time.perf_counter() - began
        hourly = (sum(store.requests.values()) - before) / seconds * 3600
        kinds = ", ".join(f"{name} {count:,}" for name, count in store.requests.most_common(5))
    return [
        Measurement(
            name="object store with 20 ms injected per request: ack",
            value=str(times),
            target="p50 ≤ 60 ms",
            met=times.ms(50) <= 60,
        ),
        Measurement(
            name="the same: requests per hour at 1,000 records/s over 20 topics",
            value=f"{hourly:,.0f}",
            target="printed",
            detail=f"in all: {kinds}",
        ),
    ]
