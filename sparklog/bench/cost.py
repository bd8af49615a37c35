"""The bill of brokers on an object store: each request takes 20 ms, and is counted and priced.

The measure runs the documented cases, or one with the user's own rates.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from sparklog import bill_words
from sparklog.bench.progress import awaited, slept
from sparklog.bench.report import BenchOptions, Measurement, Workload
from sparklog.bench.workload import DELAY_SECONDS, Brokers, Sent, SpillingStore, brokers
from sparklog.broker.metrics.bill import bill_between
from sparklog.clock import SystemClock
from sparklog.formats.store_bill import StoreBill
from sparklog.limits import GIB
from sparklog.storage.objects import MemoryStore, Purpose, Usage, total
from sparklog.storage.table import delta_log

_WARM_SECONDS: Final = 3.0
_COST_SECONDS: Final = 6  # times that of other measures: a table may be published twice a minute
_LARGE_SECONDS: Final = 18  # the same for large rates: until files are merged
_LARGE_BYTES_PER_SECOND: Final = 1e6
"""The rate from which the price of a byte matters too."""
_COPIES: Final = 4
"""Bytes in the store for each byte sent: the log, files, merged files, and some to spare."""
_KEPT_UP: Final = 0.98
"""The share of the rate that a client has to reach, for a case to count as run at that rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Bounds of a case; None: none."""

    dollars: float | None = None
    ack_p50_ms: float | None = None
    ack_p99_ms: float | None = None
    lag_p99_seconds: float | None = None
    puts_per_gb: float | None = None
    amplification: float | None = None


_ONE_TOPIC: Final = Workload(topics=1)
_CASES: Final = (
    (_ONE_TOPIC, Targets(dollars=30, ack_p50_ms=60, lag_p99_seconds=15)),
    (
        Workload(topics=100),
        Targets(dollars=300, ack_p50_ms=150, ack_p99_ms=350, lag_p99_seconds=60),
    ),
    (
        Workload(topics=20, records_per_second=2_500, record_bytes=1_000),
        Targets(
            dollars=500, ack_p99_ms=500, lag_p99_seconds=15, puts_per_gb=150, amplification=2.5
        ),
    ),
)
_SHARED: Final = Workload(topics=1, brokers=3)
_SHARED_RATIO: Final = 1.5
"""The bill that three brokers may have, as a multiple of that of one."""


def cost(options: BenchOptions) -> Iterator[Measurement]:
    """Yields dollars per month, ack times and table lag: of one workload, or of known cases."""
    if options.workload is not None:
        yield from _Case(options, options.workload, Targets()).figures()
        return
    yield _idle(options)
    dollars: dict[Workload, float] = {}
    for workload, targets in _CASES:
        case = _Case(options, workload, targets)
        yield from case.figures()
        dollars[workload] = case.dollars
    most = _SHARED_RATIO * dollars[_ONE_TOPIC]
    yield from _Case(options, _SHARED, Targets(dollars=most, lag_p99_seconds=15)).figures()


def _idle(options: BenchOptions) -> Measurement:
    what, store = "a broker without topics", MemoryStore(SystemClock())
    with brokers(store, DELAY_SECONDS, options.settings) as running:
        slept("starting", _WARM_SECONDS)
        before, began = running.usages(), time.perf_counter()
        slept(what, options.seconds * _COST_SECONDS)
        return _priced(what, _bill(running, before, began), 5)


class _Case:
    """A workload, and its figures."""

    def __init__(self, options: BenchOptions, workload: Workload, targets: Targets) -> None:
        self._options = options
        self._workload = workload
        self._targets = targets
        self._is_large = workload.bytes_per_second >= _LARGE_BYTES_PER_SECOND
        self._seconds = options.seconds * (_LARGE_SECONDS if self._is_large else _COST_SECONDS)
        self.dollars = 0.0
        """The bill per month, once it is known."""

    def figures(self) -> Iterator[Measurement]:
        """Runs the workload, unless the disk has no space for it."""
        workload, folder = self._workload, self._options.folder
        store = MemoryStore(SystemClock())
        if self._is_large:
            store = SpillingStore(SystemClock(), folder)
            needed = workload.bytes_per_second * self._seconds * _COPIES
            free = shutil.disk_usage(folder).free
            if free < needed:
                reason = f"needs {needed / GIB:.0f} GiB, and {folder} has {free / GIB:.0f}"
                yield Measurement(name=str(workload), value="skipped", detail=reason)
                return
        settings = self._options.settings
        with brokers(store, DELAY_SECONDS, settings, count=workload.brokers) as running:
            yield from self._run(running)

    def _run(self, running: Brokers) -> Iterator[Measurement]:
        workload, targets = self._workload, self._targets
        topics = [f"topic-{number:02d}" for number in range(workload.topics)]
        for name in topics:
            running.log.create_topic(name, partitions=workload.partitions)
        awaited("warming up", _WARM_SECONDS, running.send(topics, _WARM_SECONDS, workload))
        before, began, since_us = running.usages(), time.perf_counter(), time.time_ns() // 1_000
        sending = running.send(topics, self._seconds, workload)
        sent = awaited(str(workload), self._seconds, sending)
        bill = _bill(running, before, began)
        used = total(running.usages().values()).since(total(before.values()))
        self.dollars = bill.total.dollars_per_month
        yield _priced(str(workload), bill, targets.dollars)
        yield self._acks(sent)
        running.log.flush_to_table()
        lags = [each for name in topics for each in _lags(running.inner, name, since_us)]
        yield self._lag(lags)
        if self._is_large:
            produced = sent.records * workload.record_bytes
            yield _bounded(
                "the same: puts per GB of records, with upkeep",
                used.puts / (produced / 1e9),
                "{:,.0f}",
                targets.puts_per_gb,
            )
            yield _bounded(
                "the same: bytes written per byte of records",
                used.written_bytes / produced,
                "{:.1f}",
                targets.amplification,
            )

    def _acks(self, sent: Sent) -> Measurement:
        bounds = {50: self._targets.ack_p50_ms, 99: self._targets.ack_p99_ms}
        given = {percentile: most for percentile, most in bounds.items() if most is not None}
        rate = sent.records / sent.seconds / self._workload.topics
        is_behind = rate < _KEPT_UP * self._workload.records_per_second
        return Measurement(
            name="the same: ack",
            value=str(sent.acks),
            target=", ".join(f"p{each} ≤ {most:g} ms" for each, most in given.items()),
            met=all(sent.acks.ms(each) <= most for each, most in given.items()) if given else None,
            detail=f"only {rate:,.0f} records/s were sent to each topic" if is_behind else "",
        )

    def _lag(self, seconds: list[float]) -> Measurement:
        p50, p99, worst = np.percentile(seconds, [50, 99, 100]) if seconds else np.zeros(3)
        most = self._targets.lag_p99_seconds
        return Measurement(
            name="the same: table lag, of the oldest record of each file",
            value=f"p50 {p50:.1f}, p99 {p99:.1f}, max {worst:.1f} s",
            target="" if most is None else f"p99 ≤ {most:g} s",
            met=None if most is None else bool(p99 <= most),
        )


def _bill(running: Brokers, before: Mapping[Purpose, Usage], began: float) -> StoreBill:
    """Returns the bill of the requests since a moment, given as in `time.perf_counter`."""
    prices = running.settings.prices.of(running.inner.uri)
    return bill_between(before, running.usages(), time.perf_counter() - began, prices)


def _priced(what: str, bill: StoreBill, most_dollars: float | None) -> Measurement:
    found = _bounded(
        f"{what}: requests, per month",
        bill.total.dollars_per_month,
        "{:,.0f} dollars",
        most_dollars,
    )
    shares = bill_words.purposes(bill)
    detail = bill_words.requests(bill) + (f"; dollars: {shares}" if shares else "")
    return replace(found, detail=detail)


def _bounded(name: str, value: float, shown: str, most: float | None) -> Measurement:
    """Returns a figure that should not exceed `most`; `shown`: the format of both."""
    return Measurement(
        name=name,
        value=shown.format(value),
        target="" if most is None else f"≤ {shown.format(most)}",
        met=None if most is None else value <= most,
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
