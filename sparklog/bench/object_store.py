"""Acks and starts on an object store, where each request takes 20 ms, and their requests."""

from __future__ import annotations

import time
from collections.abc import Iterator

from sparklog.bench.report import BenchOptions, Measurement, Times, Workload
from sparklog.bench.workload import DELAY_SECONDS, Brokers, brokers
from sparklog.clock import SystemClock
from sparklog.storage.objects import MemoryStore, total

_IDLE_TOPICS = 2_000
_WARM_SECONDS = 3.0
_WORKLOAD = Workload(topics=20, partitions=1, records_per_second=50)


def objectstore(options: BenchOptions) -> list[Measurement]:
    """Ack times and requests per hour of the profile "fast", at 20 ms per request."""
    store = MemoryStore(SystemClock())
    with brokers(store, DELAY_SECONDS, {"requests.profile": "fast"}) as running:
        topics = [f"topic-{number:02d}" for number in range(_WORKLOAD.topics)]
        for topic in topics:
            running.log.create_topic(topic, partitions=_WORKLOAD.partitions)
        times = Times()
        with running.log.producer(linger_ms=0) as producer:
            end = time.perf_counter() + options.seconds
            while (began := time.perf_counter()) < end:
                producer.send(topics[0], bytes(100)).result()
                times.add(time.perf_counter() - began)
        running.send(topics, _WARM_SECONDS, _WORKLOAD).result()
        requests = _Requests(running)
        running.send(topics, options.seconds, _WORKLOAD).result()
        return [
            Measurement(
                name="object store with 20 ms injected per request, profile fast: ack",
                value=str(times),
                target="p50 ≤ 60 ms",
                met=times.ms(50) <= 60,
            ),
            requests.measured("the same: requests per hour at 1,000 records/s over 20 topics"),
        ]


def objectstore_wide(options: BenchOptions) -> Iterator[Measurement]:
    """Startup with many topics, and the requests of their broker."""
    store = MemoryStore(SystemClock())
    with brokers(store, 0.0) as running:
        for number in range(_IDLE_TOPICS):
            running.log.create_topic(f"topic-{number:04d}", partitions=4)
    began, used = time.perf_counter(), time.process_time()
    with brokers(store, DELAY_SECONDS) as running:
        seconds, used = time.perf_counter() - began, time.process_time() - used
        yield Measurement(
            name="2,000 idle topics × 4 partitions: start",
            value=f"{seconds:.1f} s",
            target="≤ 30 s",
            met=seconds <= 30,
            detail=f"{used:.1f} s of processor, {running.stores[0].most_at_once} requests at once",
        )
        time.sleep(_WARM_SECONDS)
        requests = _Requests(running)
        time.sleep(options.seconds)
        yield requests.measured("the same: requests per hour")


class _Requests:
    """Counts the requests of brokers from now on."""

    def __init__(self, running: Brokers) -> None:
        self._running = running
        self._before = total(running.usages().values())
        self._began = time.perf_counter()

    def measured(self, name: str) -> Measurement:
        """Returns the requests so far, per hour and by kind."""
        found = total(self._running.usages().values()).since(self._before).requests
        hours = (time.perf_counter() - self._began) / 3600
        return Measurement(
            name=name,
            value=f"{found.total() / hours:,.0f}",
            target="printed",
            detail=", ".join(
                f"{kind} {count / hours:,.0f}" for kind, count in found.most_common(5)
            ),
        )
