"""A broker's metrics in one message, for `sparklog top`."""

from __future__ import annotations

import heapq
import threading
import time

from sparklog import limits
from sparklog.broker.metrics.collection import (
    Collector,
    GroupOffset,
    Sources,
    TopicState,
    age_seconds,
)
from sparklog.formats import flight_messages
from sparklog.storage.objects import total

_FIGURES_KEPT_SECONDS = 0.5  # between two collections for `sparklog top`, at least


class BrokerOverview:
    """Collects the metrics for clients, which share recent ones. Thread-safe."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._collector = Collector(sources)
        self._lock = threading.Lock()
        self._kept: tuple[float, flight_messages.BrokerFigures] | None = None

    def figures(self) -> flight_messages.BrokerFigures:
        """Returns the current metrics."""
        with self._lock:
            if self._kept is None or self._kept[0] <= time.monotonic():
                began = time.monotonic()
                found = self._collect()
                now = time.monotonic()
                kept_seconds = max(_FIGURES_KEPT_SECONDS, 10 * (now - began))
                self._kept = now + kept_seconds, found
            return self._kept[1]

    def _collect(self) -> flight_messages.BrokerFigures:
        sources = self._sources
        kafka, upkeep = sources.kafka, sources.upkeep
        now_us = sources.clock.now_us()
        states, sums = self._collector.topics()
        topics = heapq.nlargest(
            limits.FIGURES_TOPICS,
            (_topic(each, now_us) for each in states),
            key=lambda each: each.records_in,
        )
        flushes = sources.flushes.times_us
        p50, p99 = self._collector.recent("flush", flushes, [0.5, 0.99])
        delay = 0.0
        if kafka is not None:
            (delay,) = self._collector.recent("loop", kafka.counts.loop_delay_us, [0.99])
        return flight_messages.BrokerFigures(
            at_us=now_us,
            broker=sources.broker.cluster().brokers[0],
            uptime_seconds=round(sources.broker.uptime_seconds, 3),
            topic_count=sums.topics,
            partition_count=sums.partitions,
            records_in=sums.counts.records_in,
            bytes_in=sums.counts.bytes_in,
            bytes_out=sums.counts.bytes_out,
            flushes=flushes.count,
            flush_p50_seconds=p50 / 1e6,
            flush_p99_seconds=p99 / 1e6,
            loop_delay_p99_seconds=delay / 1e6,
            connections=kafka.connection_count if kafka is not None else 0,
            streams=sources.flight.stream_count,
            unpublished_bytes=sources.led_partitions.backlog.unpublished_bytes,
            amplification=upkeep.amplification,
            store_requests=total(sources.usages().values()).requests,
            bill=sources.bill.at_present() if sources.bill is not None else None,
            memory=[
                flight_messages.MemoryBudget(
                    budget=each.name, held_bytes=each.held_bytes, limit_bytes=each.limit_bytes
                )
                for each in sources.budgets()
            ],
            topics=topics,
            groups=self._groups(),
        )

    def _groups(self) -> list[flight_messages.GroupLag]:
        lags: dict[str, int] = {}
        ages: dict[str, float] = {}
        unread: list[tuple[str, GroupOffset]] = []
        partial: set[str] = set()
        found = []
        for description, offsets in self._collector.groups():
            group = description.group_id
            for each in offsets:
                lags[group] = lags.get(group, 0) + (each.lag or 0)
                if each.lag is None:
                    partial.add(group)
                if each.lag_seconds is None:
                    unread.append((group, each))
                else:
                    ages[group] = max(ages.get(group, 0.0), each.lag_seconds)
            found.append((group, description.state.value, len(description.members)))
        self._collector.read_ages([each for _, each in unread])
        for group, each in unread:
            if each.lag_seconds is not None:
                ages[group] = max(ages.get(group, 0.0), each.lag_seconds)
        found.sort(key=lambda each: -lags.get(each[0], 0))
        return [
            flight_messages.GroupLag(
                group=group,
                state=state,
                members=members,
                lag=lags.get(group, 0),
                lag_seconds=ages.get(group),
                is_whole=group not in partial,
            )
            for group, state, members in found[: limits.FIGURES_GROUPS]
        ]


def _topic(state: TopicState, now_us: int) -> flight_messages.TopicFigures:
    return flight_messages.TopicFigures(
        topic=state.name,
        partitions=len(state.ends),
        records_in=state.counts.records_in,
        bytes_in=state.counts.bytes_in,
        bytes_out=state.counts.bytes_out,
        lag_records=state.lag_records,
        lag_seconds=age_seconds(state.oldest_us, now_us),
        files=state.table.files,
        small_files=state.table.small_files,
        table_bytes=state.table.bytes,
        held_back=state.held_back,
    )
