"""The test suites of Kafka's clients, with a real Kafka and with a broker of ours.

A test that passes with Kafka passes here. Each suite is got from where its project publishes it.
Tests of what Kafka has and a broker of ours has not yet (transactions, security, quotas, the groups
of KIP-848) are left out.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from benchmarks import jars
from benchmarks.kafka_process import KafkaCluster, KafkaProcess, Node
from sparklog.settings import GroupSettings, KafkaSettings, TopicSettings
from tests.support.kafkas import broker
from tests.support.killing import BrokerProcess
from tests.support.ports import quiet_address, quiet_port
from tests.support.suites import (
    SUITES,
    GoSuite,
    PythonSuite,
    Results,
    Suite,
    cloned,
    got,
    proxied,
    proxy_address,
    python_with,
    ran,
)

pytestmark = [pytest.mark.soak(mode="suites"), pytest.mark.timeout(0)]

KAFKA_PYTHON: Final = "3.0.11"
AIOKAFKA: Final = "0.14.0"
FRANZ_GO: Final = "v1.22.2"
KAFKA_GO: Final = "v0.4.51"
KAFKAJS: Final = "2.2.4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A client's suite."""

    make: Callable[[Path], Suite]
    at_least: int
    """Tests that pass with Kafka: fewer mean that the suite has not run."""
    partitions: int = 1
    """The number of partitions of topics that are created without one."""
    broker_id: int = 0
    port: int = 0
    """The broker's, where the tests have it written down; 0: any."""
    auto_create: bool = True
    different: Mapping[str, str] = field(default_factory=dict)
    """Tests that pass only with Kafka, each with the reason."""


def _kafka_python(folder: Path) -> Suite:
    sources = cloned(folder, "dpkp/kafka-python", KAFKA_PYTHON)
    packages = ("pytest", "pytest-mock", "pytest-timeout", "lz4", "python-snappy", "zstandard")
    return PythonSuite(
        python_with(folder, *packages, "crc32c"),
        sources,
        [
            *(f"test/integration/test_{part}_integration.py" for part in ("admin", "consumer")),
            "test/integration/test_producer_integration.py",
            "--deselect=test/integration/test_admin_integration.py::test_create_describe_delete_acls",
        ],
        leave_out="transactional",
        variables={
            "PYTHONPATH": str(sources),
            "KAFKA_VERSION": jars.KAFKA_VERSION,
            "KAFKA_URI": "kafka://{address}",
            "KAFKA_ROOT": str(sources),  # must be there, and is not used
        },
    )


def _aiokafka(folder: Path) -> Suite:
    sources = cloned(folder, "aio-libs/aiokafka", f"v{AIOKAFKA}")
    shutil.move(sources / "tests", folder)  # alongside the sources, which have no compiled parts
    (folder / "tests" / "ssl_cert").mkdir()
    programs = folder / "bin"
    programs.mkdir()
    (programs / "ktutil").write_text("#!/bin/sh\n")
    (programs / "ktutil").chmod(0o755)
    packages = ("pytest", "pytest-asyncio", "pytest-mock", "pytest-timeout", "cramjam")
    return PythonSuite(
        python_with(folder, *packages, f"aiokafka=={AIOKAFKA}"),
        folder,
        [
            *("tests", "--ignore=tests/test_sasl.py", "--no-pull", "-W", "ignore"),
            f"--docker-image=kafka:2.13_{jars.KAFKA_VERSION}",
        ],
        # The last one is a test of the assignor alone, whose names have random numbers in them.
        leave_out="ssl or sasl or acl or transactional or wait_for_pid_on_failure"
        " or random_subscriptions",
        variables={
            "BROKER": "{address}",
            "PYTHONPATH": str(SUITES),
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        },
    )


def _kgo(folder: Path) -> Suite:
    return GoSuite(
        folder,
        f"github.com/twmb/franz-go@{FRANZ_GO}",
        package="pkg/kgo",
        leave_out="Txn|Transaction|Scram|SCRAM|848|Share",
        variables={
            "KGO_SEEDS": "{address}",
            "KGO_TEST_RF": "1",
            "KGO_TEST_RECORDS": "50000",
            "KGO_TEST_MAX_TOPIC_PARTS": "7",
        },
    )


def _kafka_go(folder: Path) -> Suite:
    # The last two do not end well with Kafka 4.1 either.
    return GoSuite(
        folder,
        f"github.com/segmentio/kafka-go@{KAFKA_GO}",
        leave_out="Txn|Transaction|SASL|Scram|ACL|Quota|TestDialerResolver|TestReaderConsumerGroup",
        variables={"KAFKA_VERSION": jars.KAFKA_VERSION, "KAFKA_SKIP_NETTEST": "1"},
    )


class _KafkaJs:
    """Parts of a program of ours: the project's own tests need its whole build."""

    def __init__(self, folder: Path) -> None:
        self._node, npm = shutil.which("node"), shutil.which("npm")
        if self._node is None or npm is None:
            pytest.skip("Node.js is not installed")
        (folder / "package.json").write_text('{"private": true}')
        got([npm, "install", f"kafkajs@{KAFKAJS}"], folder, "kafkajs")
        self._program = Path(shutil.copy(SUITES / "kafkajs.mjs", folder))

    def run(self, address: str, only: Collection[str] = ()) -> Results:
        command = [str(self._node), str(self._program), address, *only]
        done = ran(command, self._program.parent)
        assert done.returncode == 0, done.stderr
        lines = [line.partition(" ") for line in done.stdout.splitlines()]
        return {name.partition(":")[0]: verdict == "PASS" for verdict, _, name in lines}


PROJECTS: Final[Mapping[str, Project]] = {
    "kafka-python": Project(make=_kafka_python, at_least=50, partitions=4),
    "aiokafka": Project(
        make=_aiokafka,
        at_least=740,
        partitions=2,
        different={
            "test_consumer_compressed_returns_older_msgs": "a reply begins at the offset that is"
            " asked for, where Kafka's begins with the batch that has it",
        },
    ),
    "franz-go's kgo": Project(make=_kgo, at_least=120),
    "kafka-go": Project(make=_kafka_go, at_least=100, port=9092),
    "kafkajs": Project(make=_KafkaJs, at_least=10, auto_create=False),
}


@pytest.fixture(name="theirs", params=list(PROJECTS), scope="module")
def _theirs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Project, Suite, Results]:
    """A project, its suite, and what that finds with Kafka."""
    found = jars.find()
    if not found.broker:
        pytest.skip("; ".join(found.missing))
    project = PROJECTS[request.param]
    folder = tmp_path_factory.mktemp("suite")
    suite = project.make(folder)
    settings = {
        "num.partitions": str(project.partitions),
        "auto.create.topics.enable": str(project.auto_create).lower(),
        "group.initial.rebalance.delay.ms": "100",
        "group.min.session.timeout.ms": "1000",
        "offsets.topic.num.partitions": "8",
    }
    node = Node(project.broker_id, project.port or quiet_port(), quiet_port())
    with KafkaProcess(found.broker, folder / "kafka", settings, node=node) as kafka:
        with_kafka = suite.run(kafka.address)
    return project, suite, with_kafka


def test_what_passes_with_kafka_passes_here(
    theirs: tuple[Project, Suite, Results], tmp_path: Path
) -> None:
    """Suites for any broker."""
    project, suite, with_kafka = theirs
    groups = GroupSettings(initial_rebalance_delay_ms=100, min_session_timeout_ms=1_000)
    topics = TopicSettings(auto_create=project.auto_create, default_partitions=project.partitions)
    kafka = KafkaSettings(listen=f"127.0.0.1:{project.port}")
    given = {"id": project.broker_id, "kafka": kafka, "groups": groups, "topics": topics}
    with broker(tmp_path / "root", **given) as agent:
        check_suite(project, suite, with_kafka, agent.kafka_address)


def check_suite(project: Project, suite: Suite, with_kafka: Results, address: str) -> None:
    """A test that fails is run once more, as some of their tests wait for too short."""
    wanted = {name for name, passed in with_kafka.items() if passed} - project.different.keys()
    assert len(wanted) >= project.at_least, with_kafka

    def failed(only: Collection[str] = ()) -> set[str]:
        results = suite.run(address, only)
        return {name for name in only or wanted if not results.get(name, False)}

    first = failed()
    assert not (first and failed(first)), sorted(first)


# ------------------------------------------------------------------------------ clusters

SARAMA: Final = "v1.61.1"
NUMBERS: Final = (1, 2, 3, 4, 5)
OF_SARAMA: Final = Project(
    make=lambda folder: GoSuite(
        folder,
        f"github.com/IBM/sarama@{SARAMA}",
        tags="functional",
        only="^Test(Func|Consumer|Version|Interceptors|AsyncProducerRemote|ReadOnly)",
        # The last one stops a broker with Docker Compose, and otherwise ends the whole program.
        leave_out="Txn|Transactions|ProducerId3|ReadOnlyAndAll|Quotas|Java|UpdateFeatures"
        "|FetchFollowerFailover",
        variables={"TOXIPROXY_ADDR": "{address}", "KAFKA_VERSION": jars.KAFKA_VERSION},
    ),
    at_least=40,
    different={
        "TestFuncAdminAlterPartitionReassignments": "a partition has one replica",
        "TestFuncAdminIncrementalAlterConfigs": "a broker reads its settings when it starts",
    },
)


def test_what_passes_with_a_cluster_of_kafkas_passes_with_ours(tmp_path: Path) -> None:
    """sarama's functional tests: five brokers, to which connections break."""
    found = jars.find()
    if not found.broker:
        pytest.skip("; ".join(found.missing))
    suite = OF_SARAMA.make(tmp_path)
    advertised = {number: proxy_address(number) for number in NUMBERS}
    settings = {"group.initial.rebalance.delay.ms": "0"}
    with KafkaCluster(
        found.broker, tmp_path / "kafka", settings, count=len(NUMBERS), advertised=advertised
    ) as kafka:
        addresses = {number: each.address for number, each in kafka.brokers.items()}
        with proxied(tmp_path, addresses) as url:
            with_kafka = suite.run(url)
    with cluster_of_ours(tmp_path, advertised) as addresses, proxied(tmp_path, addresses) as url:
        check_suite(OF_SARAMA, suite, with_kafka, url)


@contextmanager
def cluster_of_ours(folder: Path, advertised: Mapping[int, str]) -> Iterator[dict[int, str]]:
    """Brokers that say that they are at other addresses; their own by number."""
    brokers = {
        number: BrokerProcess(
            folder / "root",
            {
                "SPARKLOG_KAFKA_ADVERTISED": address,
                "SPARKLOG_TOPICS_AUTO_CREATE": "false",
                "SPARKLOG_GROUPS_INITIAL_REBALANCE_DELAY_MS": "0",
            },
            kafka=quiet_address(),
            broker=number,
        )
        for number, address in advertised.items()
    }
    try:
        for each in brokers.values():
            each.start()
        yield {number: each.kafka_address for number, each in brokers.items()}
    finally:
        for each in brokers.values():
            if each.is_running:
                each.stop()
