"""The broker's figures: exact values after a known workload, and their text format."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from unittest import mock

import pytest

from sparklog import errors
from sparklog.broker.counts import Budget, ListenerCounts, UpkeepCounts
from sparklog.broker.groups.coordinator import Commit, Coordinator
from sparklog.broker.log.publish_process import PublishProcess
from sparklog.broker.log.schema_keeper import SchemaKeeper
from sparklog.broker.metrics.bill import RecentBill
from sparklog.broker.metrics.collection import LINES_AT_ONCE, Collector, FlushCounts, Pacer, Sources
from sparklog.broker.metrics.exposition import Exposition
from sparklog.broker.metrics.families import FAMILIES
from sparklog.broker.metrics.overview import BrokerOverview
from sparklog.broker.quotas import Quotas
from sparklog.broker.schema_registry import SchemaRegistry
from sparklog.clock import ManualClock
from sparklog.listeners import Listener
from sparklog.prices import prices_of
from sparklog.security.quota import QuotaEntity, QuotaKey, QuotaTable
from sparklog.settings import GroupSettings, RegistrySettings
from sparklog.storage.objects import (
    DelayedStore,
    Fault,
    LocalStore,
    MemoryStore,
    Purpose,
    ScriptedFaults,
    usages,
)
from sparklog.storage.schema_texts import SchemaTexts
from tests.support.acls import watch_of, without_acls
from tests.support.brokers import START_US, Rig, publishing
from tests.support.metrics import Values, parsed
from tests.support.waiting import time_with

ROOT: Final = Path(__file__).parents[2]


class Kafka:
    """A Kafka listener's figures."""

    listeners = (Listener("PLAINTEXT", "PLAINTEXT", "127.0.0.1:9092"),)
    connection_count = 3
    pending_count = 1

    def __init__(self) -> None:
        self.counts = ListenerCounts({0: "Produce", 1: "Fetch"})


class Expiring:
    """A certificate whose files were replaced by others that are not valid."""

    expires_at = 1_900_000_000.0
    failure = "not PEM"


class Flight:
    """A Flight listener's figures."""

    stream_count = 2


@dataclass(slots=True)
class Bench:
    """A broker whose figures are collected on demand."""

    rig: Rig
    clock: ManualClock
    groups: Coordinator
    kafka: Kafka
    sources: Sources

    def values(self) -> Values:
        """Returns all samples."""
        collector = Collector(self.sources, pacer=Pacer(0.0))
        return parsed(b"".join(Exposition(collector).text()).decode())

    def publish(self) -> None:
        """Publishes all records."""
        self.rig.publish()

    def commit(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """Commits offsets of a group without members."""
        answer = self.groups.commit(
            group, {(topic, number): Commit(offset=offset) for number, offset in offsets.items()}
        )
        while not answer.done():
            self.groups.tick(0.0)
        assert set(answer.result().values()) == {None}


@pytest.fixture
def bench() -> Bench:
    """A broker with topic t of two partitions, on a store that counts requests."""
    clock = ManualClock(START_US)
    rig = Rig(DelayedStore(MemoryStore(clock), 0.0, clock), clock)
    groups = Coordinator(rig.broker, settings=GroupSettings(), clock=clock)
    groups.open()
    groups.tick(0.0)
    kafka, upkeep = Kafka(), UpkeepCounts()
    rig.publisher.counts = upkeep
    sources = Sources(
        broker=rig.broker,
        led_partitions=rig.led_partitions,
        publisher=rig.publisher,
        publishing=publishing(rig),
        groups=groups,
        flushes=FlushCounts(),
        upkeep=upkeep,
        budgets=lambda: [*rig.broker.budgets(), Budget("other", 5, 7)],
        store=rig.store,
        kafka=kafka,
        flight=Flight(),
        authorization=without_acls(rig.store, clock),
        cluster_id=rig.leadership.cluster.cluster_id,
        epoch=rig.leadership.epoch,
        small_file_bytes=1 << 20,
        compact_files=2,
        clock=clock,
        certificate=Expiring(),
        quotas=Quotas(watch_of(rig.store, clock), clock=clock),
        schemas=SchemaKeeper(
            SchemaRegistry(RegistrySettings(url="http://127.0.0.1:1")),
            SchemaTexts(rig.store),
            rig.led_partitions,
            clock=clock,
        ),
        bill=RecentBill(
            functools.partial(usages, rig.store),
            prices_of("s3://bucket"),
            clock=clock,
            warn_dollars_per_month=300.0,
        ),
    )
    rig.create("t", 2)
    return Bench(rig, clock, groups, kafka, sources)


def at(name: str, **labels: object) -> tuple[str, frozenset[tuple[str, str]]]:
    """The key of a sample."""
    return name, frozenset((label, str(value)) for label, value in labels.items())


def test_traffic_of_topics(bench: Bench) -> None:
    """Records, bytes and requests, by topic and in all; deleted topics remain in the sums."""
    prefix = "kafka_server_brokertopicmetrics"
    before = bench.values()[at(f"{prefix}_messagesin_total")]
    bench.rig.append(["a", "b", "c"], partition=0)
    bench.rig.append(["d"], partition=1)
    bench.rig.create("u", 1, max_message_bytes="10")
    bench.rig.append(["e"], topic="u")
    with pytest.raises(errors.MessageTooLarge):
        bench.rig.append(["e" * 100], topic="u")
    assert bench.rig.read("t", 0) == [(0, b"a"), (1, b"b"), (2, b"c")]
    found = bench.values()
    assert found[at(f"{prefix}_messagesin_total", topic="t")] == 4
    assert found[at(f"{prefix}_messagesin_total", topic="u")] == 1
    assert found[at(f"{prefix}_messagesin_total")] == before + 5
    assert found[at(f"{prefix}_totalproducerequests_total", topic="t")] == 2
    assert found[at(f"{prefix}_totalproducerequests_total", topic="u")] == 2
    assert found[at(f"{prefix}_failedproducerequests_total", topic="u")] == 1
    assert found[at(f"{prefix}_failedproducerequests_total", topic="t")] == 0
    assert found[at(f"{prefix}_totalfetchrequests_total", topic="t")] == 1
    appended = sum(
        each.growth.appended_bytes
        for each in bench.rig.led_partitions.topic("t").partitions.values()
    )
    assert found[at(f"{prefix}_bytesin_total", topic="t")] == appended
    assert found[at(f"{prefix}_bytesout_total", topic="t")] > 0
    bench.rig.broker.topics.delete("u")
    after = bench.values()
    assert after[at(f"{prefix}_messagesin_total")] == before + 5
    assert at(f"{prefix}_messagesin_total", topic="u") not in after


def test_a_refused_flush_is_a_failed_request(bench: Bench) -> None:
    """Each batch in it counts as refused."""
    pending = [bench.rig.submit(["a"], partition=number) for number in (0, 1)]
    bench.rig.led_partitions.topic("t").in_doubt = "a test"
    for each in pending:
        with pytest.raises(errors.TopicHeldBack):
            bench.rig.broker.wait(each)
    found = bench.values()
    prefix = "kafka_server_brokertopicmetrics"
    assert found[at(f"{prefix}_failedproducerequests_total", topic="t")] == 2
    assert found[at(f"{prefix}_totalproducerequests_total", topic="t")] == 2
    assert found[at("kafka_controller_kafkacontroller_offlinepartitionscount")] == 2
    assert found[at("sparklog_topic_held_back", topic="t")] == 1
    assert found[at("sparklog_topics_held_back")] == 1


def test_offsets_of_partitions(bench: Bench) -> None:
    """Start and end offsets, under the names of both exporters."""
    bench.rig.append(["a", "b", "c"], partition=1)
    found = bench.values()
    for name, of_first, of_second in (
        ("kafka_topic_partition_current_offset", 0, 3),
        ("kafka_log_log_logendoffset", 0, 3),
        ("kafka_topic_partition_oldest_offset", 0, 0),
        ("kafka_log_log_logstartoffset", 0, 0),
        ("kafka_topic_partition_leader", 1, 1),
        ("kafka_topic_partition_replicas", 1, 1),
        ("kafka_topic_partition_under_replicated_partition", 0, 0),
        ("kafka_cluster_partition_replicascount", 1, 1),
    ):
        assert found[at(name, topic="t", partition=0)] == of_first, name
        assert found[at(name, topic="t", partition=1)] == of_second, name
    assert found[at("kafka_topic_partitions", topic="t")] == 2


def test_lag_of_tables(bench: Bench) -> None:
    """Records, bytes and time until they are published, and the files that then hold them."""
    idle = bench.values()
    assert idle[at("sparklog_publish_lag_records", topic="t")] == 0
    assert idle[at("sparklog_publish_lag_seconds", topic="t")] == 0
    bench.rig.append(["a", "b"], partition=0)
    bench.clock.advance(2.5)
    bench.rig.append(["c"], partition=1)
    bench.clock.advance(1.0)
    late = bench.values()
    assert late[at("sparklog_publish_lag_records", topic="t")] == 3
    assert late[at("sparklog_publish_lag_seconds", topic="t")] == 3.5
    assert late[at("sparklog_wal_oldest_unpublished_seconds")] == 3.5
    assert late[at("sparklog_wal_objects")] == 2
    assert (
        late[at("sparklog_wal_unpublished_bytes")]
        == bench.rig.led_partitions.backlog.unpublished_bytes
    )
    assert late[at("kafka_log_log_size", topic="t", partition=0)] > 0
    bench.publish()
    done = bench.values()
    files = bench.rig.led_partitions.topic("t").table.snapshot.files
    size = sum(file.size_bytes for of_partition in files for file in of_partition)
    assert done[at("sparklog_publish_lag_records", topic="t")] == 0
    assert done[at("sparklog_wal_objects")] == 0
    assert done[at("sparklog_table_files", topic="t")] == 2
    assert done[at("sparklog_table_small_files", topic="t")] == 2
    assert done[at("sparklog_compaction_debt_bytes", topic="t")] == 0
    assert done[at("sparklog_table_bytes", topic="t")] == size
    assert done[at("sparklog_publish_bytes_total")] == size
    assert done[at("sparklog_publish_files_total")] == 2
    assert done[at("sparklog_publish_commits_total")] == 1
    assert done[at("kafka_log_log_size", topic="t", partition=1)] == files[1][0].size_bytes
    assert done[at("kafka_log_log_numlogsegments", topic="t", partition=1)] == 1


def test_intervals_of_topics(bench: Bench) -> None:
    """Only of those that have one: a shorter one, or a longer one with the broker's last part."""
    name = "sparklog_topic_publish_interval_seconds"
    bench.rig.create("second", 1, publish_interval_ms="500")
    bench.rig.create("hour", 1, publish_interval_ms="3600000")
    bench.rig.create("usual", 1, publish_interval_ms="1000")
    bench.sources.publishing.tick()
    found = bench.values()
    own = {topic: found.get(at(name, topic=topic)) for topic in ("t", "usual", "second", "hour")}
    assert own == {"t": None, "usual": None, "second": 0.5, "hour": 3_601.0}


def test_debt_and_amplification_of_compaction(bench: Bench) -> None:
    """Debt is the bytes of enough small files; a merge pays it and amplifies the writing."""
    for _ in range(2):
        bench.rig.append(["a"], partition=0)
        bench.publish()
    topic = bench.rig.led_partitions.topic("t")
    size = sum(file.size_bytes for file in topic.table.snapshot.files[0])
    found = bench.values()
    assert found[at("sparklog_compaction_debt_bytes", topic="t")] == size
    assert found[at("sparklog_write_amplification")] == 1.0
    bench.sources.upkeep.merged_bytes += size
    bench.sources.upkeep.merged_files += 1
    found = bench.values()
    assert found[at("sparklog_write_amplification")] == 2.0
    assert found[at("sparklog_compaction_bytes_total")] == size


def test_compaction_by_key_amplifies_writing(bench: Bench) -> None:
    """Its files count as those of other compactions do, also where a client asks for it."""
    bench.rig.create("c", 1, cleanup_policy="compact")
    for value in ("a", "b"):
        bench.rig.append([value, value], topic="c", key=[b"k", value.encode()])
        bench.publish()
    upkeep = bench.sources.upkeep
    published_bytes = upkeep.published_bytes
    bench.rig.broker.topics.compact("c")
    (file,) = bench.rig.led_partitions.topic("c").table.snapshot.files[0]
    assert upkeep.merged_files >= 1
    assert upkeep.merged_bytes >= file.size_bytes
    found = bench.values()
    assert found[at("sparklog_compaction_bytes_total")] == upkeep.merged_bytes
    amplification = 1 + upkeep.merged_bytes / published_bytes
    assert found[at("sparklog_write_amplification")] == pytest.approx(amplification)


def test_bytes_of_the_write_ahead_log(bench: Bench, tmp_path: Path) -> None:
    """The files of all epochs of a local root count; an object store is not asked."""
    assert at("sparklog_wal_bytes") not in bench.values()
    store = LocalStore(tmp_path)
    bench.sources = dataclasses.replace(bench.sources, store=store)
    assert bench.values()[at("sparklog_wal_bytes")] == 0
    store.put_new("wal/0/0000000001/00000000.seg", bytes(8_192))
    store.put_new("wal/0/0000000002/00000000000000000000", bytes(100))
    store.put_new("topics/t/x.parquet", bytes(1_000))
    assert bench.values()[at("sparklog_wal_bytes")] == 8_292


def test_a_log_that_cannot_be_listed_has_no_size(bench: Bench) -> None:
    """The other figures are still there."""
    refused = errors.StorageUnavailable(operation="list", path="wal", reason="a test")
    fault = Fault(operation="walk", error=refused)
    store = MemoryStore(bench.clock, is_local=True).view(ScriptedFaults(fault))
    bench.sources = dataclasses.replace(bench.sources, store=store)
    found = bench.values()
    assert at("sparklog_wal_bytes") not in found
    assert at("sparklog_wal_objects") in found


def test_lag_of_groups(bench: Bench) -> None:
    """Offsets and lag, by partition and topic; a topic that was replaced does not count."""
    bench.rig.append(["a", "b", "c"], partition=0)
    bench.rig.append(["d"], partition=1)
    bench.commit('a "group"', "t", {0: 1, 1: 1})
    found = bench.values()
    here = {"consumergroup": 'a "group"', "topic": "t"}
    assert found[at("kafka_consumergroup_current_offset", **here, partition=0)] == 1
    assert found[at("kafka_consumergroup_lag", **here, partition=0)] == 2
    assert found[at("kafka_consumergroup_lag", **here, partition=1)] == 0
    assert found[at("kafka_consumergroup_lag_sum", **here)] == 2
    assert found[at("kafka_consumergroup_current_offset_sum", **here)] == 2
    assert found[at("kafka_consumergroup_members", consumergroup='a "group"')] == 0
    prefix = "kafka_coordinator_group_groupmetadatamanager"
    assert found[at(f"{prefix}_numgroups")] == 1
    assert found[at(f"{prefix}_numgroupsempty")] == 1
    assert found[at(f"{prefix}_numoffsets")] == 2
    bench.rig.broker.topics.delete("t")
    bench.rig.create("t", 2)
    assert at("kafka_consumergroup_lag_sum", **here) not in bench.values()


def lag_seconds(bench: Bench, partition: int) -> float:
    """Returns the lag of group g in topic t."""
    found = [
        value
        for (name, labels), value in bench.values().items()
        if name == "kafka_consumergroup_group_lag_seconds"
        and {("group", "g"), ("partition", str(partition))} <= labels
    ]
    (value,) = found
    return value


@pytest.mark.parametrize("published", [False, True], ids=["in the log", "in the table"])
def test_lag_in_seconds_is_exact(bench: Bench, published: bool) -> None:
    """It is the age of the first unread record, wherever the record is; 0 at the end."""
    stamps = [START_US - 5_000_001, START_US - 4_000_000, START_US + 10_000_000]
    bench.rig.append(["a", "b", "c"], timestamp=stamps)
    if published:
        bench.publish()
    bench.clock.advance(1.0)
    ages = {}
    for offset in range(4):
        bench.commit("g", "t", {0: offset})
        ages[offset] = lag_seconds(bench, 0)
    assert ages == {0: 6.000001, 1: 5.0, 2: 0.0, 3: 0.0}


def test_lag_in_seconds_begins_at_the_log_start(bench: Bench) -> None:
    """Records that were deleted cannot be read any more."""
    bench.rig.append(["a"], timestamp=[START_US - 9_000_000])
    bench.rig.append(["b"], timestamp=[START_US - 2_000_000])
    bench.commit("g", "t", {0: 0})
    bench.publish()
    assert lag_seconds(bench, 0) == 9.0
    partition = bench.rig.led_partitions.topic("t").partition(0)
    partition.start = 1
    assert lag_seconds(bench, 0) == 2.0


def test_ages_that_take_too_long_are_left_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are counted, and no guess takes their place."""
    stamps = [START_US - 5_000_000, START_US - 4_000_000]
    bench.rig.append(["a", "b"], timestamp=stamps)
    bench.commit("g", "t", {0: 1})
    monkeypatch.setattr("sparklog.broker.metrics.collection.LAG_SECONDS", 0.0)
    found = bench.values()
    assert found[at("sparklog_lag_seconds_unresolved")] == 1
    assert not [name for name, _ in found if name == "kafka_consumergroup_group_lag_seconds"]


def test_requests_of_kafka_clients(bench: Bench) -> None:
    """Numbers, errors and times, as the JMX exporter names them."""
    counts = bench.kafka.counts
    for _ in range(3):
        counts.answered(0, 9, 0.005)
    counts.answered(1, 13, 0.1)
    counts.errors[0, "invalid_record"] += 2
    counts.loop_delay_us.add(200)
    found = bench.values()
    prefix = "kafka_network_requestmetrics"
    assert found[at(f"{prefix}_requests_total", request="Produce", version=9)] == 3
    assert found[at(f"{prefix}_errors_total", request="Produce", error="INVALID_RECORD")] == 2
    assert found[at(f"{prefix}_totaltimems_count", request="Produce")] == 3
    assert found[at(f"{prefix}_totaltimems_sum", request="Produce")] == 15.0
    median = found[at(f"{prefix}_totaltimems", request="Produce", quantile="0.50")]
    assert median == pytest.approx(5.0, rel=1 / 16)
    for name in ("Fetch", "FetchConsumer"):
        assert found[at(f"{prefix}_totaltimems_count", request=name)] == 1
    delay = "sparklog_event_loop_delay_seconds"
    assert found[at(f"{delay}_bucket", loop="kafka", le="0.000128")] == 0
    assert found[at(f"{delay}_bucket", loop="kafka", le="0.000256")] == 1
    assert found[at(f"{delay}_bucket", loop="kafka", le="+Inf")] == 1
    assert found[at(f"{delay}_count", loop="kafka")] == 1
    connections = {"listener": "KAFKA", "networkProcessor": "0"}
    name = "kafka_server_socket_server_metrics_connection_count"
    assert found[at(name, **connections)] == 3
    assert found[at("sparklog_certificate_expiry_timestamp_seconds")] == 1_900_000_000
    assert found[at("sparklog_certificate_load_failed")] == 1


def test_requests_to_the_store_and_memory(bench: Bench) -> None:
    """Each kind of request for each purpose, and each budget with its bound."""
    store = bench.rig.store
    assert isinstance(store, DelayedStore)
    bench.rig.append_to(store.counted_as(Purpose.LOG))
    bench.rig.append(["a"])
    found = bench.values()
    requests = functools.partial(at, "sparklog_store_requests_total")
    assert found[requests(kind="put_new", purpose="log")] == 1
    assert found[at("sparklog_store_written_bytes_total", purpose="log")] > 50
    process = PublishProcess(bench.rig.hot, mock.Mock(), clock=bench.rig.clock)
    process.requests.update(put_new=3, delete=1)
    bench.rig.publisher.process = process
    found = bench.values()
    assert found[requests(kind="put_new", purpose="tables")] == 3
    assert found[requests(kind="delete", purpose="tables")] == 1
    assert found[at("sparklog_memory_held_bytes", budget="other")] == 5
    assert found[at("sparklog_memory_limit_bytes", budget="other")] == 7
    held = found[at("sparklog_memory_held_bytes", budget="hot_tail")]
    assert held == bench.rig.hot.bytes > 0


def throttle(bench: Bench) -> None:
    """Has alice exceed a quota."""
    quotas = bench.sources.quotas
    assert quotas is not None
    quotas.table = QuotaTable({QuotaEntity(user=None): {QuotaKey.PRODUCER_BYTE_RATE: 10.0}})
    assert quotas.produced("alice", "etl", 150) == 5_000


def test_quotas(bench: Bench) -> None:
    """The rates and throttles of clients are shown by Kafka's names of the quota, user and id."""
    throttle(bench)
    found = bench.values()
    labels = {"resource": "Produce", "user": "alice", "clientId": ""}
    assert found[at("kafka_server_quota_byte_rate", **labels)] == 15
    for name, value in (("throttles", 1), ("throttle_seconds", 5)):
        of_bytes = at(f"sparklog_quota_{name}_total", quota="producer_byte_rate")
        assert found[of_bytes] == value


def test_every_family_is_exposed_once_with_its_type(bench: Bench) -> None:
    """No family is missing, unknown, or of another type than the list of families says."""
    bench.kafka.counts.answered(0, 9, 0.005)
    bench.kafka.counts.errors[0, "invalid_record"] += 1
    bench.rig.append(["a"])
    bench.commit("g", "t", {0: 1})
    text = b"".join(Exposition(Collector(bench.sources)).text()).decode()
    types = [line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE")]
    found = {name: kind for name, kind in types if not name.startswith("process_")}
    assert len(types) == len({name for name, _ in types})
    assert found == {name: family.kind for name, family in FAMILIES.items()}


def test_overview_has_the_same_figures(bench: Bench) -> None:
    """The message for `sparklog top`."""
    bench.rig.append(["a", "b"])
    bench.commit("g", "t", {0: 1})
    bench.clock.advance(1.5)
    found = BrokerOverview(bench.sources).figures()
    (topic,) = [each for each in found.topics if each.topic == "t"]
    assert (topic.partitions, topic.records_in, topic.lag_records) == (2, 2, 2)
    assert topic.lag_seconds == 1.5
    (group,) = found.groups
    assert (group.group, group.state, group.lag, group.lag_seconds) == ("g", "Empty", 1, 1.5)
    assert found.partition_count == sum(each.partitions for each in found.topics)
    assert found.records_in >= 2
    assert found.broker.broker == bench.rig.broker.broker_id
    assert {each.budget for each in found.memory} >= {"hot_tail", "other"}


def test_a_pacer_pauses_after_enough_values() -> None:
    """And not before."""
    pauses: list[float] = []
    pacer = Pacer(0.25)
    patched: Callable[[float], None] = pauses.append
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparklog.broker.metrics.collection.time", time_with(sleep=patched))
        for _ in range(LINES_AT_ONCE - 1):
            pacer.spend(1)
        assert pauses == []
        pacer.spend(1)
        assert pauses == [0.25]


def test_every_figure_is_documented_once() -> None:
    """The page has a line with type and meaning for each family, and for no other."""
    page = (ROOT / "docs" / "operations" / "metrics.md").read_text("utf-8")
    row = r"^\| `((?:kafka|sparklog)_\w+)` \| (\w+) \| ([^|]*) \| ([^|]+) \|$"
    rows = re.findall(row, page, re.MULTILINE)
    assert len(rows) == len({name for name, *_ in rows})
    assert {name: kind for name, kind, *_ in rows} == {
        name: family.kind for name, family in FAMILIES.items()
    }
    for name, _, _, meaning in rows:
        assert len(meaning) > 8, name


def test_documented_labels_are_those_of_the_figures(bench: Bench) -> None:
    """Each label in the page is in the text, and no other."""
    bench.kafka.counts.answered(0, 9, 0.005)
    bench.kafka.counts.errors[0, "invalid_record"] += 1
    bench.rig.append(["a"])
    bench.rig.create("hour", 1, publish_interval_ms="3600000")
    bench.commit("g", "t", {0: 1})
    throttle(bench)
    page = (ROOT / "docs" / "operations" / "metrics.md").read_text("utf-8")
    documented = {
        name: set(labels.partition(";")[0].replace(" ", "").split(",")) - {""}
        for name, labels in re.findall(r"^\| `(\w+_\w+)` \| \w+ \| ([^|]*) \|", page, re.MULTILINE)
    }
    found: dict[str, set[str]] = {}
    for name, labels in bench.values():
        bare = re.sub("_(bucket|count|sum)$", "", name)
        known = name if name in FAMILIES else bare
        if not name.startswith("process_"):
            found.setdefault(known, set()).update({label for label, _ in labels} - {"le"})
    for name in ("sparklog_store_free_bytes", "sparklog_wal_bytes"):
        found.setdefault(name, set())  # unknown of a store in memory
    assert found == documented
