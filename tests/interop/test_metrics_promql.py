"""Dashboards and alert rules find data in the broker's metrics, by Prometheus's own engine.

The expressions for Kafka are those of Strimzi's dashboards and rules for Kafka and kafka_exporter,
of every panel that can apply: there are no JVM, no containers and no KRaft quorum to look at.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import confluent_kafka
import pytest
import yaml

from sparklog.broker.agent import Agent
from sparklog.broker.metrics.collection import Collector, Pacer
from sparklog.broker.metrics.exposition import Exposition
from sparklog.broker.metrics.families import FAMILIES
from sparklog.formats import flight_messages
from sparklog.settings import load_settings
from tests.support import golang
from tests.support.certificates import Authority
from tests.support.registry import registry

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.xdist_group("promql")]
OPERATIONS: Final = Path(__file__).parents[2] / "docs" / "operations"
TARGET: Final = {
    "job": "sparklog",
    "instance": "broker:9404",
    "namespace": "kafka",
    "strimzi_io_cluster": "log",
    "strimzi_io_name": "log-kafka",
    "kubernetes_pod_name": "log-kafka-0",
    "container": "kafka",
}
"""The labels that Prometheus gives the target, with those of Strimzi's pod monitor."""
CLUSTER: Final = 'namespace="kafka",strimzi_io_cluster="log"'
BROKER: Final = f'{CLUSTER},kubernetes_pod_name=~"log-(kafka-0)"'
TOPICS: Final = f'{BROKER},topic=~"(t|u)",topic!=""'
EXPORTER: Final = 'topic=~"(t|u)", namespace=~"kafka"'
BY_POD: Final = "by (kubernetes_pod_name)"
_SUMS: Final = (
    "kafka_controller_kafkacontroller_activecontrollercount",
    "kafka_controller_kafkacontroller_offlinepartitionscount",
    "kafka_server_replicamanager_partitioncount",
    "kafka_server_replicamanager_underreplicatedpartitions",
    "kafka_cluster_partition_atminisr",
    "kafka_cluster_partition_underminisr",
)
_RATES: Final = ("bytesin", "bytesout", "messagesin", "totalproducerequests",
                 "failedproducerequests", "totalfetchrequests", "failedfetchrequests")  # fmt: skip
_EXPORTED: Final = (
    "kafka_topic_partitions",
    "kafka_topic_partition_replicas",
    "kafka_topic_partition_in_sync_replica",
    "kafka_topic_partition_under_replicated_partition",
    "kafka_cluster_partition_atminisr",
    "kafka_cluster_partition_underminisr",
)
STRIMZI: Final = (
    f"count(kafka_server_replicamanager_leadercount{{{CLUSTER}}})",
    *(f"sum({name}{{{CLUSTER}}})" for name in _SUMS),
    f"sum(irate(kafka_controller_controllerstats_uncleanleaderelections_total{{{CLUSTER}}}[5m]))",
    f'sum(process_open_fds{{{BROKER},container="kafka"}}) {BY_POD}',
    *(
        f"sum(irate(kafka_server_brokertopicmetrics_{name}_total{{{TOPICS}}}[5m]))"
        for name in _RATES
    ),
    f"sum(kafka_network_socketserver_networkprocessoravgidle_percent{{{BROKER}}}*100) {BY_POD}",
    (
        "sum(kafka_server_kafkarequesthandlerpool_requesthandleravgidle_percent"
        f"{{{BROKER}}}*100) {BY_POD}"
    ),
    f"sum(irate(kafka_server_kafkaserver_linux_disk_write_bytes{{{BROKER}}}[5m])) {BY_POD}",
    f"sum(irate(kafka_server_kafkaserver_linux_disk_read_bytes{{{BROKER}}}[5m])) {BY_POD}",
    (
        f"sum(kafka_server_socket_server_metrics_connection_count{{{BROKER}}})"
        " by (kubernetes_pod_name, listener)"
    ),
    f'kafka_log_log_size{{{BROKER},topic=~"(t|u)",partition=~"(0|1)"}}',
    # The variables of the dashboards.
    f"kafka_cluster_partition_replicascount{{{BROKER}}}",
    'kafka_broker_info{namespace="kafka"}',
    # kafka_exporter's dashboard.
    f"count(kafka_topic_partitions{{{EXPORTER}}})",
    *(f"sum({name}{{{EXPORTER}}})" for name in _EXPORTED),
    f"sum(kafka_topic_partition_leader_is_preferred{{{EXPORTER}}} < bool 1)",
    f"sum(rate(kafka_topic_partition_current_offset{{{EXPORTER}}}[5m])) by (topic)",
    (
        f'sum(delta(kafka_consumergroup_current_offset{{consumergroup=~"g",{EXPORTER}}}[5m])/300)'
        " by (consumergroup, topic)"
    ),
    f'sum(kafka_consumergroup_lag{{consumergroup=~"g",{EXPORTER}}}) by (consumergroup, topic)',
    (
        f'sum(kafka_consumergroup_current_offset{{consumergroup=~"g",{EXPORTER}}})'
        " by (consumergroup,partition,topic)"
    ),
    f"sum(kafka_topic_partition_oldest_offset{{{EXPORTER}}}) by (partition,topic)",
    # The alert rules, without their thresholds.
    "kafka_server_replicamanager_underreplicatedpartitions",
    "sum(kafka_controller_kafkacontroller_activecontrollercount) by (strimzi_io_name, namespace)",
    "sum(kafka_controller_kafkacontroller_offlinepartitionscount) by (namespace, pod)",
    "kafka_server_replicamanager_underminisrpartitioncount",
    "kafka_log_logmanager_offlinelogdirectorycount",
    "kafka_topic_partition_under_replicated_partition",
    "kafka_consumergroup_lag",
    "changes(kafka_topic_partition_current_offset[10m])",
)


# ------------------------------------------------------------------------------ questions


def dashboard() -> Iterator[str]:
    """The expressions of our dashboard, and the series that its variables are taken from."""
    found = json.loads((OPERATIONS / "dashboard.json").read_text("utf-8"))
    for variable in found["templating"]["list"]:
        if variable["type"] == "query":
            series = re.fullmatch(r"label_values\((.*), \w+\)", variable["query"]["query"])
            assert series is not None
            yield series[1]
    for panel in found["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


def alerts() -> list[dict[str, Any]]:
    """Our alert rules."""
    found = yaml.safe_load((OPERATIONS / "alerts.yaml").read_text("utf-8"))
    return [rule for group in found["groups"] for rule in group["rules"]]


def watched(rule: dict[str, Any]) -> str:
    """The expression of a rule without its threshold, which nothing exceeds here."""
    expression = re.sub(r" (?:[<>]|==|unless) (?:[\d.e]+|(?:max|group) by .*)$", "", rule["expr"])
    expression = re.sub(r"absent\((.*)\)", r"\1", expression)
    return re.sub(r'error=~"[^"]*"', 'error!=""', expression)


def concrete(expression: str) -> str:
    """The expression with values for Grafana's variables."""
    expression = re.sub(r"\$(job|instance|topic|group)\b", ".*", expression)
    return expression.replace("$__rate_interval", "1m")


def metrics_in(expression: str) -> set[str]:
    """The names of metrics in an expression."""
    return set(re.findall(r"\b(?:kafka|sparklog|process)_\w+", expression))


# ------------------------------------------------------------------------------ answers


OF_A_BUCKET: Final = "sparklog_store_dollars_per_month"
"""The metric that a broker on a local root, as below, does not have."""


class Engine:
    """Prometheus's engine over three scrapes of a broker at work."""

    def __init__(self, program: Path, scrapes: list[dict[str, Any]]) -> None:
        self._program = program
        self._scrapes = scrapes

    def empty(self, expressions: list[str]) -> list[str]:
        """Returns the expressions that find nothing, or are wrong."""
        asked = json.dumps({"scrapes": self._scrapes, "expressions": expressions})
        done = subprocess.run(
            [self._program], input=asked, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        answers = json.loads(done.stdout)
        return [
            f"{expression}: {answer.get('error', 'no series')}"
            for expression, answer in zip(expressions, answers, strict=True)
            if not answer["series"]
        ]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prometheus's engine as a program."""
    return golang.built(tmp_path_factory.mktemp("promql"), "promql")


@pytest.fixture(scope="module")
def engine(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Scrapes of a broker, 15 s apart by their times, with clients in between."""
    root = tmp_path_factory.mktemp("root")
    authority = Authority(tmp_path_factory.mktemp("ca"))
    certificate, key = authority.sign("broker")
    scrapes: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        settings = load_settings(
            None,
            {},
            {"root": str(root), "flight.listen": "127.0.0.1:0", "kafka.listen": "SSL://127.0.0.1:0",
             "metrics.listen": "127.0.0.1:0", "tls.certificate": certificate, "tls.key": key,
             "registry.url": stack.enter_context(registry()).url},
        )  # fmt: skip
        agent = stack.enter_context(Agent(settings))
        broker = agent.parts.broker
        assert broker is not None
        for topic in ("t", "u"):
            broker.topics.create(flight_messages.CreateTopic(topic=topic, partitions=2))
        client = {
            "bootstrap.servers": agent.kafka_address,
            "security.protocol": "SSL",
            "ssl.ca.location": authority.path,
        }
        producer = confluent_kafka.Producer(client)
        consumer = confluent_kafka.Consumer(
            client | {"group.id": "g", "auto.offset.reset": "earliest"}
        )
        consumer.subscribe(["t", "u"])
        sources = agent._sources
        assert sources is not None
        exposition = Exposition(Collector(sources, pacer=Pacer(0.0)))
        for number in range(3):
            for each in range(20):
                producer.produce(("t", "u")[each % 2], f"{each}".encode(), partition=each // 2 % 2)
            producer.flush()
            read = 0
            until = time.monotonic() + 60
            while read < 10 and time.monotonic() < until:
                message = consumer.poll(1.0)
                read += message is not None and message.error() is None
            consumer.commit(asynchronous=False)
            text = b"".join(exposition.text()).decode()
            scrapes.append({"at_ms": 1_000_000 + 15_000 * number, "text": text, "labels": TARGET})
        consumer.close()
    return Engine(program, scrapes)


def test_strimzis_panels_and_rules_find_data(engine: Engine) -> None:
    """Each expression of Strimzi's dashboards and rules that can apply."""
    assert engine.empty(list(STRIMZI)) == []


def test_our_dashboard_finds_data(engine: Engine) -> None:
    """Each expression of our dashboard."""
    expressions = [concrete(each) for each in dashboard() if OF_A_BUCKET not in each]
    assert len(expressions) > 40
    assert engine.empty(expressions) == []


OF_THE_MACHINE: Final = ("SparklogEventLoopDelay", "SparklogSlowFlushes")
"""The rules that may fire where other tests keep the processors and the disk busy."""


def test_our_alerts_find_data(engine: Engine) -> None:
    """Each rule watches something that exists, and none fires while all is well."""
    rules = [each for each in alerts() if OF_A_BUCKET not in each["expr"]]
    assert len(rules) > 10
    assert engine.empty([watched(each) for each in rules]) == []
    quiet = [each["expr"] for each in rules if each["alert"] not in OF_THE_MACHINE]
    assert len(engine.empty(quiet)) == len(quiet)


CLUSTER_RULES: Final = (
    "SparklogPartitionsWithoutLeader", "SparklogNoController", "SparklogBrokerLost",
    "SparklogRootDown",
)  # fmt: skip
Member = tuple[int, int, int, int]
"""A broker's figures: is it the controller, brokers, offline and blocked partitions."""


@pytest.mark.parametrize(
    ("before", "after", "fires"),
    [
        ([(1, 3, 0, 0), (0, 3, 0, 0), (0, 3, 0, 0)], [(1, 3, 0, 0), (0, 3, 0, 0)], set()),
        ([(1, 1, 0, 0)], [(1, 1, 0, 0)], set()),
        ([(1, 2, 0, 0), (0, 2, 0, 0)], [(1, 2, 5, 5), (0, 2, 3, 3)], set()),  # has its own rule
        ([(1, 2, 0, 0)], [(1, 2, 5, 1)], {"SparklogPartitionsWithoutLeader"}),
        ([(1, 2, 0, 0), (0, 2, 0, 0)], [(0, 2, 0, 0)], {"SparklogNoController"}),
        # The second one does not see the metadata any more, and counts as before.
        ([(1, 3, 0, 0), (0, 3, 0, 0)], [(1, 2, 0, 0), (0, 3, 0, 0)], {"SparklogBrokerLost"}),
        ([(1, 1, 0, 0)], [], {"SparklogRootDown"}),
    ],
)
def test_rules_about_a_cluster(
    program: Path, before: list[Member], after: list[Member], fires: set[str]
) -> None:
    """They fire for what they are about, and for nothing else."""
    names = (
        "kafka_controller_kafkacontroller_activecontrollercount", "kafka_brokers",
        "kafka_controller_kafkacontroller_offlinepartitionscount", "sparklog_partitions_blocked",
        "sparklog_build_info",
    )  # fmt: skip
    scrapes = [
        {
            "at_ms": at_ms,
            "text": "".join(
                f"{name} {value}\n" for name, value in zip(names, (*each, 1), strict=True)
            ),
            "labels": {"job": job, "instance": str(number)},
        }
        for at_ms, brokers in ((1_000_000, before), (1_600_000, after))
        for job, members in (("sparklog", brokers), ("another root", [(1, 1, 0, 0)]))
        for number, each in enumerate(members)
    ]
    rules = {rule["alert"]: rule["expr"] for rule in alerts() if rule["alert"] in CLUSTER_RULES}
    engine = Engine(program, scrapes)
    found = {name for name, expression in rules.items() if not engine.empty([expression])}
    assert found == fires


@pytest.mark.parametrize(
    ("lag", "own", "fires"),
    [
        (45, None, False),
        (60, None, True),
        (45, 1, True),
        (3_640, 3_615, False),
        (3_650, 3_615, True),
    ],
)
def test_the_rule_about_tables_goes_by_the_interval_of_the_topic(
    program: Path, lag: int, own: int | None, fires: bool
) -> None:
    """It is 30 seconds above that, or above twice that of the broker, of each topic by itself."""
    lines = [
        "sparklog_publish_interval_seconds 10",
        f'sparklog_publish_lag_seconds{{topic="t"}} {lag}',
        'sparklog_publish_lag_seconds{topic="u"} 0',
        'sparklog_topic_publish_interval_seconds{topic="u"} 0.5',
    ]
    if own is not None:
        lines.append(f'sparklog_topic_publish_interval_seconds{{topic="t"}} {own}')
    text = "".join(f"{line}\n" for line in lines)
    (rule,) = (rule["expr"] for rule in alerts() if rule["alert"] == "SparklogTableLag")
    scrapes = [
        {"at_ms": 1_000_000, "text": text, "labels": {"job": "sparklog", "instance": instance}}
        for instance in ("1", "2")
    ]
    assert (Engine(program, scrapes).empty([rule]) == []) is fires


def test_an_expression_without_data_is_noticed(engine: Engine) -> None:
    """Neither a wrong name, nor a wrong label, nor a wrong expression counts as data."""
    wrong = [
        "kafka_server_brokertopicmetrics_messagesin",
        'kafka_topic_partitions{partition="0"}',
        "sum(rate(kafka_brokers))",
    ]
    assert len(engine.empty(wrong)) == 3


def test_dashboards_name_only_known_families() -> None:
    """Needs no engine: each metric in our dashboard and rules is in the list of families."""
    expressions = [*dashboard(), *(each["expr"] for each in alerts())]
    names = set().union(*map(metrics_in, expressions))
    ours = {name for name in names if not name.startswith("process_")}
    bare = {re.sub("_(bucket|count|sum)$", "", name) for name in ours - FAMILIES.keys()}
    assert bare - FAMILIES.keys() == set()
    for rule in alerts():
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        assert rule["labels"]["severity"] in ("warning", "critical")
