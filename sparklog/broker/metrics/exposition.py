"""The metrics in Prometheus's text format.

prometheus-client writes the families of the process and of the broker as a whole. It takes 4.4 µs
per sample, so the families with a series per topic, partition or group are written here, in
portions.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

import prometheus_client
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector as PrometheusCollector
from prometheus_client.registry import CollectorRegistry

from sparklog.broker.counts import Distribution, TopicCounts
from sparklog.broker.metrics.collection import (
    Collector,
    GroupOffset,
    Sources,
    Sums,
    TopicState,
    age_seconds,
)
from sparklog.broker.metrics.families import FAMILIES
from sparklog.broker.quotas import Quotas
from sparklog.broker.refused_work import Work
from sparklog.security.quota import QuotaKey
from sparklog.version import VERSION

_PARTITIONS_AT_ONCE = 64  # of one topic, whose lines are written in succession

_SHOWN_RATES: Final = 100
"""Rates of clients with quotas: each has two labels that clients choose."""
CONTENT_TYPE: Final = prometheus_client.CONTENT_TYPE_LATEST

_Sample: TypeAlias = tuple[Mapping[str, str], float]
_QUANTILES: Final = {
    0.5: "0.50",
    0.75: "0.75",
    0.95: "0.95",
    0.98: "0.98",
    0.99: "0.99",
    0.999: "0.999",
}
"""The quantiles of the JMX exporter, as Strimzi's rules spell them."""
_TIMES: Final = range(7, 26)
"""Powers of two that bound the buckets of durations in µs: 128 µs to 34 s."""
_SIZES: Final = range(8, 28, 2)
"""Powers of two that bound the buckets of sizes in bytes: 256 B to 64 MiB."""

_SUMS: Final[Mapping[str, Callable[[TopicCounts], int]]] = {
    f"kafka_server_brokertopicmetrics_{name}_total": value_of
    for name, value_of in {
        "messagesin": lambda c: c.records_in,
        "bytesin": lambda c: c.bytes_in,
        "bytesout": lambda c: c.bytes_out,
        "totalproducerequests": lambda c: c.batches_in + c.failed_produces,
        "failedproducerequests": lambda c: c.failed_produces,
        "totalfetchrequests": lambda c: c.fetches,
        "failedfetchrequests": lambda c: c.failed_fetches,
    }.items()
}
"""Families with a series per topic, and one for the sum of all topics."""


def _of_counts(value_of: Callable[[TopicCounts], int]) -> Callable[[TopicState, int], float]:
    return lambda topic, _: value_of(topic.counts)


_OF_TOPICS: Final[Mapping[str, Callable[[TopicState, int], float]]] = {
    **{name: _of_counts(value_of) for name, value_of in _SUMS.items()},
    "kafka_topic_partitions": lambda t, _: len(t.ends),
    "sparklog_publish_lag_records": lambda t, _: t.lag_records,
    "sparklog_publish_lag_seconds": lambda t, now_us: age_seconds(t.oldest_us, now_us),
    "sparklog_topic_held_back": lambda t, _: int(t.held_back),
    "sparklog_topic_deletions_refused": lambda t, _: int(t.deletions_refused),
    "sparklog_table_files": lambda t, _: t.table.files,
    "sparklog_table_small_files": lambda t, _: t.table.small_files,
    "sparklog_table_bytes": lambda t, _: t.table.bytes,
    "sparklog_compaction_debt_bytes": lambda t, _: t.table.debt_bytes,
    "sparklog_table_misfit_rows": lambda t, _: t.table.misfits,
    "sparklog_table_waiting_rows": lambda t, _: t.table.waiting_rows,
    "sparklog_table_unfilled_rows": lambda t, _: t.table.unfilled_rows,
}
"""The value of a topic at a time, in µs since the Unix epoch."""

_TOPIC_INTERVAL: Final = "sparklog_topic_publish_interval_seconds"
"""Only of topics that have one."""

_OF_PARTITIONS: Final[Mapping[str, Callable[[TopicState], Sequence[int]]]] = {
    "kafka_topic_partition_current_offset": lambda t: t.ends,
    "kafka_topic_partition_oldest_offset": lambda t: t.starts,
    "kafka_log_log_logstartoffset": lambda t: t.starts,
    "kafka_log_log_logendoffset": lambda t: t.ends,
    "kafka_log_log_size": lambda t: t.sizes,
    "kafka_log_log_numlogsegments": lambda t: t.table.files_of,
}

_CONSTANT_OF_PARTITIONS: Final[Mapping[str, int]] = {
    "kafka_topic_partition_replicas": 1,
    "kafka_topic_partition_in_sync_replica": 1,
    "kafka_topic_partition_leader_is_preferred": 1,
    "kafka_topic_partition_under_replicated_partition": 0,
    "kafka_cluster_partition_replicascount": 1,
    "kafka_cluster_partition_insyncreplicascount": 1,
    "kafka_cluster_partition_underreplicated": 0,
    "kafka_cluster_partition_underminisr": 0,
    "kafka_cluster_partition_atminisr": 0,
    "kafka_cluster_partition_laststableoffsetlag": 0,
}

_LEADER: Final = "kafka_topic_partition_leader"
_MEMBERS: Final = "kafka_consumergroup_members"
_OFFSET: Final = "kafka_consumergroup_current_offset"
_LAG: Final = "kafka_consumergroup_lag"
_LAG_SECONDS: Final = "kafka_consumergroup_group_lag_seconds"
_MAX_LAG_SECONDS: Final = "kafka_consumergroup_group_max_lag_seconds"
_OF_GROUPS: Final = (
    _MEMBERS, _OFFSET, f"{_OFFSET}_sum", _LAG, f"{_LAG}_sum", _LAG_SECONDS, _MAX_LAG_SECONDS,
)  # fmt: skip


class Exposition:
    """Collects the metrics and writes them. One caller at a time."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._registry = CollectorRegistry()
        prometheus_client.ProcessCollector(registry=self._registry)

    def text(self) -> list[bytes]:
        """Returns the current metrics, in portions."""
        began = time.monotonic()
        sums, of_topics = self._topic_families()
        groups, of_groups = self._group_families()
        found = [prometheus_client.generate_latest(self._registry)]
        for name, lines in itertools.chain(of_topics.items(), of_groups.items()):
            family = FAMILIES[name]
            head = f"# HELP {name} {family.about}\n# TYPE {name} {family.kind}\n"
            found.append((head + "".join(lines)).encode())
            self._collector.pacer.spend(1 + len(lines))
        broker = _BrokerMetrics(self._collector, sums, groups)
        broker.add("sparklog_scrape_seconds", [({}, time.monotonic() - began)])
        found.append(prometheus_client.generate_latest(broker))
        return found

    def _topic_families(self) -> tuple[Sums, dict[str, list[str]]]:
        """Returns the sums of all topics, and the lines of each family."""
        lines: dict[str, list[str]] = {
            name: []
            for name in (
                *_OF_TOPICS,
                _TOPIC_INTERVAL,
                *_OF_PARTITIONS,
                *_CONSTANT_OF_PARTITIONS,
                _LEADER,
            )
        }
        topics, sums = self._collector.topics()
        leader = self._collector.sources.broker.broker_id
        constants = [*_CONSTANT_OF_PARTITIONS.items(), (_LEADER, leader)]
        now_us = self._collector.sources.clock.now_us()
        for topic in topics:
            for name, value_of in _OF_TOPICS.items():
                lines[name].append(f'{name}{{topic="{topic.name}"}} {value_of(topic, now_us)}\n')
            if (seconds := topic.longest_publish_seconds) is not None:
                lines[_TOPIC_INTERVAL].append(
                    f'{_TOPIC_INTERVAL}{{topic="{topic.name}"}} {seconds}\n'
                )
            # A portion of partitions at a time, because other threads wait meanwhile.
            for first in range(0, len(topic.ends), _PARTITIONS_AT_ONCE):
                span = slice(first, first + _PARTITIONS_AT_ONCE)
                labels = topic.labels[span]
                for name, values_of in _OF_PARTITIONS.items():
                    values = values_of(topic)[span]
                    lines[name].append(
                        "".join([f"{name}{at} {n}\n" for at, n in zip(labels, values, strict=True)])
                    )
                for name, value in constants:
                    lines[name].append("".join([f"{name}{at} {value}\n" for at in labels]))
                self._collector.pacer.spend(len(lines) * len(labels))
        for name, of_all in _SUMS.items():  # as in Kafka, a sum is a series without a topic
            lines[name].append(f"{name} {of_all(sums.counts)}\n")
        return sums, lines

    def _group_families(self) -> tuple[_Groups, dict[str, list[str]]]:
        """Returns the sums of all groups, and the lines of each family."""
        lines: dict[str, list[str]] = {name: [] for name in _OF_GROUPS}
        sums = _Groups()
        cluster_id = self._collector.sources.cluster_id
        ages: dict[str, float] = {}
        unread: list[tuple[str, GroupOffset]] = []

        def add_age(group: str, each: GroupOffset) -> None:
            seconds = each.lag_seconds
            if seconds is None:
                return
            host, member, client = map(_escaped, each.member)
            lines[_LAG_SECONDS].append(
                f'{_LAG_SECONDS}{{cluster_name="{cluster_id}",group="{group}",'
                f'topic="{each.topic}",partition="{each.partition}",member_host="{host}",'
                f'consumer_id="{member}",client_id="{client}"}} {seconds}\n'
            )
            ages[group] = max(ages.get(group, 0.0), seconds)

        for description, offsets in self._collector.groups():
            sums.states[description.state.value] += 1
            group = _escaped(description.group_id)
            lines[_MEMBERS].append(
                f'{_MEMBERS}{{consumergroup="{group}"}} {len(description.members)}\n'
            )
            totals: dict[str, tuple[int, int | None]] = {}
            for each in offsets:
                sums.offsets += 1
                at = f'consumergroup="{group}",topic="{each.topic}",partition="{each.partition}"'
                lines[_OFFSET].append(f"{_OFFSET}{{{at}}} {each.offset}\n")
                if each.lag is not None:
                    lines[_LAG].append(f"{_LAG}{{{at}}} {each.lag}\n")
                offset, lag = totals.get(each.topic, (0, 0))
                # A sum that lacks a partition would look like a small lag.
                total = None if lag is None or each.lag is None else lag + each.lag
                totals[each.topic] = offset + each.offset, total
                if each.lag_seconds is None:
                    unread.append((group, each))
                else:
                    add_age(group, each)
            for topic, (offset, lag) in totals.items():
                at = f'{{consumergroup="{group}",topic="{topic}"}}'
                lines[f"{_OFFSET}_sum"].append(f"{_OFFSET}_sum{at} {offset}\n")
                if lag is not None:
                    lines[f"{_LAG}_sum"].append(f"{_LAG}_sum{at} {lag}\n")
        sums.unread = self._collector.read_ages([each for _, each in unread])
        for group, each in unread:
            add_age(group, each)
        for group, seconds in ages.items():
            at = f'{{cluster_name="{cluster_id}",group="{group}"}}'
            lines[_MAX_LAG_SECONDS].append(f"{_MAX_LAG_SECONDS}{at} {seconds}\n")
        return sums, lines


@dataclass(slots=True)
class _Groups:
    """The sums of all groups."""

    states: Counter[str] = field(default_factory=Counter)
    offsets: int = 0
    unread: int = 0


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


# ------------------------------------------------------------------------------ the broker


class _BrokerMetrics(PrometheusCollector):
    """The families of the broker as a whole, for prometheus-client."""

    def __init__(self, collector: Collector, sums: Sums, groups: _Groups) -> None:
        self._metrics: dict[str, Metric] = {}
        for name, samples in _broker_samples(collector, sums, groups):
            self.add(name, samples)
        for histogram in _histograms(collector):
            self._add_histogram(*histogram)
        self._add_times(collector)

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics.values()

    def add(self, name: str, samples: Iterable[_Sample], suffix: str = "") -> None:
        """Adds samples of a family."""
        family = FAMILIES[name]
        metric = self._metrics.get(name)
        if metric is None:
            bare = name.removesuffix("_total") if family.kind == "counter" else name
            metric = self._metrics[name] = Metric(bare, family.about, family.kind)
        for labels, value in samples:
            metric.add_sample(name + suffix, dict(labels), value)

    def _add_histogram(
        self,
        name: str,
        labels: Mapping[str, str],
        distribution: Distribution,
        scale: float,
        powers: Iterable[int],
    ) -> None:
        # The count is raised last, so it may lag behind: no bucket may exceed it.
        count, total = distribution.count, distribution.total
        buckets = [
            (
                {**labels, "le": repr((1 << power) * scale)},
                float(min(distribution.below(power), count)),
            )
            for power in powers
        ]
        self.add(name, [*buckets, ({**labels, "le": "+Inf"}, count)], "_bucket")
        self.add(name, [(labels, count)], "_count")
        self.add(name, [(labels, total * scale)], "_sum")

    def _add_times(self, collector: Collector) -> None:
        kafka = collector.sources.kafka
        if kafka is None:
            return
        for key, counts in sorted(kafka.counts.apis.copy().items()):
            values = collector.recent(("api", key), counts.times_us, list(_QUANTILES))
            name = kafka.counts.names[key]
            for request in (name, "FetchConsumer") if name == "Fetch" else (name,):
                self.add(
                    "kafka_network_requestmetrics_totaltimems",
                    [
                        ({"request": request, "quantile": shown}, value / 1e3)
                        for shown, value in zip(_QUANTILES.values(), values, strict=True)
                    ],
                )
                labels = {"request": request}
                count = counts.times_us.count
                self.add("kafka_network_requestmetrics_totaltimems", [(labels, count)], "_count")
                total = counts.times_us.total / 1e3
                self.add("kafka_network_requestmetrics_totaltimems", [(labels, total)], "_sum")


def _histograms(
    collector: Collector,
) -> Iterator[tuple[str, Mapping[str, str], Distribution, float, Iterable[int]]]:
    flushes, kafka = collector.sources.flushes, collector.sources.kafka
    yield "sparklog_wal_flush_seconds", {}, flushes.times_us, 1e-6, _TIMES
    yield "sparklog_wal_flush_bytes", {}, flushes.sizes_bytes, 1.0, _SIZES
    if kafka is not None:
        delay = kafka.counts.loop_delay_us
        yield "sparklog_event_loop_delay_seconds", {"loop": "kafka"}, delay, 1e-6, _TIMES


def _broker_samples(
    collector: Collector, sums: Sums, groups: _Groups
) -> Iterator[tuple[str, Sequence[_Sample]]]:
    yield from _cluster_samples(collector, sums)
    yield from _group_samples(groups)
    yield from _log_samples(collector, sums)
    yield from _listener_samples(collector)


def _cluster_samples(collector: Collector, sums: Sums) -> Iterator[tuple[str, Sequence[_Sample]]]:
    sources, partitions, offline = collector.sources, sums.partitions, sums.offline
    cluster = collector.cluster()
    # As in Kafka, the controller reports the metrics of the whole cluster, the others zeros.
    of_all = int(cluster.is_controller)
    replicas, controller = "kafka_server_replicamanager", "kafka_controller_kafkacontroller"
    broker = sources.broker
    info = broker.cluster().brokers[0]
    kafka = sources.kafka.listeners if sources.kafka is not None else ()
    address = kafka[0].address if kafka else info.address
    plain = {
        f"{replicas}_leadercount": partitions,
        f"{replicas}_partitioncount": partitions,
        f"{replicas}_underreplicatedpartitions": 0,
        f"{replicas}_underminisrpartitioncount": 0,
        f"{replicas}_atminisrpartitioncount": 0,
        f"{replicas}_offlinereplicacount": offline + sums.stuck,
        f"{replicas}_reassigningpartitions": 0,
        f"{replicas}_isrshrinks_total": 0,
        f"{replicas}_isrexpands_total": 0,
        f"{controller}_activecontrollercount": of_all,
        f"{controller}_activebrokercount": cluster.brokers * of_all,
        f"{controller}_fencedbrokercount": 0,
        f"{controller}_offlinepartitionscount": (
            offline + sums.stuck + cluster.leaderless * of_all
        ),
        f"{controller}_globaltopiccount": cluster.topics * of_all,
        f"{controller}_globalpartitioncount": cluster.partitions * of_all,
        f"{controller}_preferredreplicaimbalancecount": 0,
        "kafka_controller_controllerstats_uncleanleaderelections_total": 0,
        "kafka_server_kafkaserver_brokerstate": 3,
        "kafka_log_logmanager_offlinelogdirectorycount": int(broker.failure is not None),
        "kafka_brokers": cluster.brokers,
        "sparklog_partitions_blocked": offline,
        "sparklog_topics_held_back": sums.held_back,
        "sparklog_uptime_seconds": broker.uptime_seconds,
        **_disk_bytes(),
    }
    for name, value in plain.items():
        yield name, [({}, value)]
    refused = broker.refused.states()
    yield "sparklog_work_refused", [({"work": each}, int(each in refused)) for each in Work]
    yield "kafka_broker_info", [({"id": str(broker.broker_id), "address": address}, 1)]
    labels = {"version": VERSION, "broker": str(broker.broker_id), "epoch": str(sources.epoch)}
    yield "sparklog_build_info", [(labels, 1)]


def _disk_bytes() -> dict[str, float]:
    """Returns the bytes that the process moved to and from disks, if Linux reports them."""
    try:
        lines = Path("/proc/self/io").read_text("ascii").splitlines()
    except OSError:
        return {}
    found = dict(line.split(": ") for line in lines)
    name = "kafka_server_kafkaserver_linux_disk"
    return {f"{name}_{way}_bytes": float(found[f"{way}_bytes"]) for way in ("read", "write")}


def _group_samples(groups: _Groups) -> Iterator[tuple[str, Sequence[_Sample]]]:
    prefix = "kafka_coordinator_group_groupmetadatamanager"
    yield f"{prefix}_numgroups", [({}, groups.states.total())]
    for state in ("Empty", "PreparingRebalance", "CompletingRebalance", "Stable", "Dead"):
        yield f"{prefix}_numgroups{state.lower()}", [({}, groups.states[state])]
    yield f"{prefix}_numoffsets", [({}, groups.offsets)]
    yield "sparklog_lag_seconds_unresolved", [({}, groups.unread)]


def _log_samples(collector: Collector, sums: Sums) -> Iterator[tuple[str, Sequence[_Sample]]]:
    sources = collector.sources
    led, upkeep = sources.led_partitions, sources.upkeep
    oldest = led.backlog.objects.oldest_unpublished(sources.broker.broker_id, sources.epoch, 1)
    newest = led.applied_sequence
    waited_seconds = age_seconds(sums.oldest_us, sources.clock.now_us())
    yield "sparklog_wal_unpublished_bytes", [({}, led.backlog.unpublished_bytes)]
    yield "sparklog_wal_oldest_unpublished_seconds", [({}, waited_seconds)]
    yield "sparklog_wal_objects", [({}, newest - oldest[0] + 1 if oldest else 0)]
    wal_bytes = collector.wal_bytes()
    yield "sparklog_wal_bytes", [] if wal_bytes is None else [({}, wal_bytes)]
    yield "sparklog_publish_interval_seconds", [({}, sources.publishing.interval_seconds)]
    yield "sparklog_publish_commits_total", [({}, upkeep.commits)]
    yield "sparklog_publish_files_total", [({}, upkeep.published_files)]
    yield "sparklog_publish_bytes_total", [({}, upkeep.published_bytes)]
    process = sources.publisher.process
    prefix = "sparklog_publish_process"
    yield f"{prefix}_cpu_seconds_total", [({}, process.cpu_seconds if process else 0.0)]
    yield f"{prefix}_resident_bytes", [({}, process.resident_bytes if process else 0)]
    yield f"{prefix}_starts_total", [({}, process.starts if process else 0)]
    yield "sparklog_compaction_files_total", [({}, upkeep.merged_files)]
    yield "sparklog_compaction_bytes_total", [({}, upkeep.merged_bytes)]
    yield "sparklog_write_amplification", [({}, upkeep.amplification)]
    yield from _registry_samples(sources)
    yield from _store_samples(sources)
    free_bytes = sources.broker.free_bytes()
    yield "sparklog_store_free_bytes", [] if free_bytes is None else [({}, free_bytes)]
    budgets = list(sources.budgets())
    yield (
        "sparklog_memory_held_bytes",
        [({"budget": each.name}, each.held_bytes) for each in budgets],
    )
    yield (
        "sparklog_memory_limit_bytes",
        [({"budget": each.name}, each.limit_bytes) for each in budgets],
    )


def _registry_samples(sources: Sources) -> Iterator[tuple[str, Sequence[_Sample]]]:
    values: dict[str, float] = {}
    if sources.schemas is not None:
        state = sources.schemas.state()
        values = {
            "up": int(state.down_since_us is None),
            "conflicts": len(state.conflicts),
            "requests_total": state.requests,
            "failures_total": state.failures,
        }
    for name in ("up", "conflicts", "requests_total", "failures_total"):
        yield f"sparklog_registry_{name}", [({}, values[name])] if values else []


def _store_samples(sources: Sources) -> Iterator[tuple[str, Sequence[_Sample]]]:
    usages = sources.usages()
    yield (
        "sparklog_store_requests_total",
        [
            ({"kind": kind, "purpose": purpose.value}, count)
            for purpose, usage in usages.items()
            for kind, count in usage.requests.items()
        ],
    )
    remote = {} if sources.store.is_local else usages  # a local root counts no bytes
    written = [({"purpose": key.value}, each.written_bytes) for key, each in remote.items()]
    read = [({"purpose": key.value}, each.read_bytes) for key, each in remote.items()]
    rates = sources.bill.at_present().rates if sources.bill is not None else []
    yield "sparklog_store_written_bytes_total", written
    yield "sparklog_store_read_bytes_total", read
    yield (
        "sparklog_store_dollars_per_month",
        [({"purpose": each.purpose}, each.dollars_per_month) for each in rates],
    )


_RESOURCES: Final = {
    QuotaKey.PRODUCER_BYTE_RATE: "Produce",
    QuotaKey.CONSUMER_BYTE_RATE: "Fetch",
}
"""The names of Kafka's metrics of byte rates."""


def _quota_samples(quotas: Quotas) -> Iterator[tuple[str, Sequence[_Sample]]]:
    yield (
        "kafka_server_quota_byte_rate",
        [
            (
                {
                    "resource": _RESOURCES[each.key],
                    "user": each.user or "",
                    "clientId": each.client_id or "",
                },
                each.per_second,
            )
            for each in quotas.byte_rates(_SHOWN_RATES)
        ],
    )
    for name, counts, per in (
        ("sparklog_quota_throttles_total", quotas.throttles, 1),
        ("sparklog_quota_throttle_seconds_total", quotas.throttled_ms, 1e3),
    ):
        yield name, [({"quota": key.value}, counts[key] / per) for key in QuotaKey]


def _listener_samples(collector: Collector) -> Iterator[tuple[str, Sequence[_Sample]]]:
    sources = collector.sources
    yield "sparklog_flight_streams", [({}, sources.flight.stream_count)]
    authorizer = "kafka_server_authorizer_metrics"
    yield f"{authorizer}_acls_total_count", [({}, sources.authorization.acl_count)]
    yield f"{authorizer}_authorization_denied_total", [({}, sources.authorization.denied)]
    audit = sources.authorization.audit
    yield "sparklog_audit_lines_total", [({}, audit.lines.written if audit else 0)]
    yield "sparklog_audit_lines_dropped_total", [({}, audit.lines.dropped if audit else 0)]
    if (quotas := sources.quotas) is not None:
        yield from _quota_samples(quotas)
    if (certificate := sources.certificate) is not None:
        yield "sparklog_certificate_expiry_timestamp_seconds", [({}, certificate.expires_at)]
        yield "sparklog_certificate_load_failed", [({}, int(bool(certificate.failure)))]
    kafka = sources.kafka
    if kafka is None:
        return
    counts = kafka.counts
    listener = {"listener": "KAFKA", "networkProcessor": "0"}
    socket = "kafka_server_socket_server_metrics"
    yield f"{socket}_connection_count", [(listener, kafka.connection_count)]
    yield "sparklog_kafka_unadmitted_connections", [({}, kafka.pending_count)]
    yield f"{socket}_connection_creation_total", [(listener, counts.connections_opened)]
    yield f"{socket}_successful_authentication_total", [(listener, counts.authentications)]
    yield f"{socket}_failed_authentication_total", [(listener, counts.authentications_failed)]
    again, failed = counts.reauthentications, counts.reauthentications_failed
    yield f"{socket}_successful_reauthentication_total", [(listener, again)]
    yield f"{socket}_failed_reauthentication_total", [(listener, failed)]
    idle: list[_Sample] = [({}, counts.idle_share)]
    yield "kafka_network_socketserver_networkprocessoravgidle_percent", idle
    yield "kafka_server_kafkarequesthandlerpool_requesthandleravgidle_percent", idle
    yield (
        "kafka_network_requestmetrics_requests_total",
        [
            ({"request": counts.names[key], "version": str(version)}, number)
            for key, of_api in sorted(counts.apis.copy().items())
            for version, number in sorted(of_api.versions.copy().items())
        ],
    )
    yield (
        "kafka_network_requestmetrics_errors_total",
        [
            ({"request": counts.names[key], "error": error.upper()}, number)
            for (key, error), number in sorted(counts.errors.copy().items())
        ],
    )
