"""The test suites of Kafka's clients, with a real Kafka and with a broker of ours.

A test that passes with Kafka passes here. Each suite is got from where its project publishes it.
Tests of what Kafka has and a broker of ours has not yet (transactions, the groups of KIP-848) are
left out, and so are those of Kerberos, which neither has here. For tests of TLS, logins and ACLs,
both brokers have a listener for each protocol, users, and an authorizer.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from benchmarks import jars
from benchmarks.kafka_process import KafkaCluster, KafkaProcess, Node
from sparklog.listeners import PLAINTEXT, PROTOCOLS
from sparklog.settings import GroupSettings, KafkaSettings, TlsSettings, TopicSettings
from tests.support.certificates import Authority
from tests.support.everyprotocol import (
    add_users,
    enforce_acls,
    named,
    settings_of_kafka,
    tls_settings,
)
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
USERS: Final = {"alice": "alice-secret", "test": "test"}
"""The passwords of the users that kafka-python's and aiokafka's tests have written down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A client's suite."""

    make: Callable[[Path], Suite]
    """Given a folder, which has `ca.pem`, `client.pem` and `client.key`."""
    at_least: int
    """Tests that pass with Kafka: fewer mean that the suite has not run."""
    partitions: int = 1
    """The number of partitions of topics that are created without one."""
    broker_id: int = 0
    port: int = 0
    """The broker's, where the tests have it written down; 0: any."""
    auto_create: bool = True
    has_every_protocol: bool = False
    """True if its "address" is all listeners of a broker, one for each protocol."""
    different: Mapping[str, str] = field(default_factory=dict)
    """Tests that pass only with Kafka, each with the reason."""


def _kafka_python(folder: Path) -> Suite:
    sources = cloned(folder, "dpkp/kafka-python", KAFKA_PYTHON)
    shutil.copy(folder / "ca.pem", folder / "ca-cert")
    packages = ("pytest", "pytest-mock", "pytest-timeout", "lz4", "python-snappy", "zstandard")
    return PythonSuite(
        python_with(folder, *packages, "crc32c"),
        sources,
        [
            *("-p", "kafka_python_brokers"),
            "test/integration",
        ],
        leave_out="transactional",
        variables={
            "PYTHONPATH": f"{sources}{os.pathsep}{SUITES}",
            "KAFKA_VERSION": jars.KAFKA_VERSION,
            "KAFKA_ROOT": str(sources),  # must be there, and is not used
            "LISTENERS": "{address}",
            "CERTIFICATES": str(folder),
        },
    )


def _aiokafka(folder: Path) -> Suite:
    sources = cloned(folder, "aio-libs/aiokafka", f"v{AIOKAFKA}")
    shutil.move(sources / "tests", folder)  # alongside the sources, which have no compiled parts
    certificates = folder / "tests" / "ssl_cert"
    certificates.mkdir()
    for name, copy in {"ca.pem": "ca.crt", "client.pem": "client.crt"}.items():
        shutil.copy(folder / name, certificates / copy)
    shutil.copy(folder / "client.key", certificates)
    programs = folder / "bin"
    programs.mkdir()
    (programs / "ktutil").write_text("#!/bin/sh\n")
    (programs / "ktutil").chmod(0o755)
    packages = ("pytest", "pytest-asyncio", "pytest-mock", "pytest-timeout", "cramjam")
    return PythonSuite(
        python_with(folder, *packages, f"aiokafka=={AIOKAFKA}", f"kafka-python=={KAFKA_PYTHON}"),
        folder,
        [
            *("tests", "--no-pull", "-W", "ignore", "-o", "asyncio_mode=auto"),
            f"--docker-image=kafka:2.13_{jars.KAFKA_VERSION}",
        ],
        # The last one is a test of the assignor alone, whose names have random numbers in them.
        leave_out="gssapi or transactional or deny_transaction or txnid or wait_for_pid_on_failure"
        " or random_subscriptions",
        variables={
            "LISTENERS": "{address}",
            "PYTHONPATH": str(SUITES),
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        },
    )


def _kgo(folder: Path) -> Suite:
    return GoSuite(
        folder,
        f"github.com/twmb/franz-go@{FRANZ_GO}",
        package="pkg/kgo",
        leave_out="Txn|Transaction|848|Share",
        variables={
            "KGO_SEEDS": "{PLAINTEXT}",
            "KGO_TEST_SCRAM_SEEDS": "{SASL_PLAINTEXT}",
            "KGO_TEST_SCRAM": f"alice:{USERS['alice']}",
            "KGO_TEST_RF": "1",
            "KGO_TEST_RECORDS": "50000",
            "KGO_TEST_MAX_TOPIC_PARTS": "7",
        },
    )


def _kafka_go(folder: Path) -> Suite:
    # Its test of SASL needs a listener on another port that is written down, and the last two do
    # not end well with Kafka 4.1 either.
    return GoSuite(
        folder,
        f"github.com/segmentio/kafka-go@{KAFKA_GO}",
        leave_out="Txn|Transaction|SASL|TestDialerResolver|TestReaderConsumerGroup",
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
    "kafka-python": Project(make=_kafka_python, at_least=62, partitions=4, has_every_protocol=True),
    "aiokafka": Project(
        make=_aiokafka,
        at_least=835,
        partitions=2,
        has_every_protocol=True,
        different={
            "test_consumer_compressed_returns_older_msgs": "a reply begins at the offset that is"
            " asked for, where Kafka's begins with the batch that has it",
        },
    ),
    "franz-go's kgo": Project(make=_kgo, at_least=120, has_every_protocol=True),
    "kafka-go": Project(
        make=_kafka_go,
        at_least=100,
        port=9092,
        has_every_protocol=True,
        different=dict.fromkeys(
            ("TestAlterUserScramCredentials", "TestDescribeUserScramCredentials"),
            "a salted password of a wrong length is refused, as no login could match it",
        ),
    ),
    "kafkajs": Project(make=_KafkaJs, at_least=10, auto_create=False),
}


@pytest.fixture(name="theirs", params=list(PROJECTS), scope="module")
def _theirs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Project, TlsSettings, Suite, Results]:
    """A project, a broker's certificate, its suite, and what that finds with Kafka."""
    found = jars.find()
    if not found.broker:
        pytest.skip("; ".join(found.missing))
    project = PROJECTS[request.param]
    folder = tmp_path_factory.mktemp("suite")
    authority = Authority(folder)
    authority.sign("client", is_client=True)
    tls = tls_settings(authority)
    suite = project.make(folder)
    settings = {
        "num.partitions": str(project.partitions),
        "auto.create.topics.enable": str(project.auto_create).lower(),
        "group.initial.rebalance.delay.ms": "100",
        "group.min.session.timeout.ms": "1000",
        "offsets.topic.num.partitions": "8",
    }
    node = Node(project.broker_id, project.port or quiet_port(), quiet_port())
    if project.has_every_protocol:
        settings |= settings_of_kafka(node, tls, USERS)
    with KafkaProcess(found.broker, folder / "kafka", settings, node=node) as kafka:
        if project.has_every_protocol:
            add_users(kafka.address, USERS)
        with_kafka = suite.run(settings.get("advertised.listeners", kafka.address))
    return project, tls, suite, with_kafka


def test_what_passes_with_kafka_passes_here(
    theirs: tuple[Project, TlsSettings, Suite, Results], tmp_path: Path
) -> None:
    """Suites for any broker."""
    project, tls, suite, with_kafka = theirs
    listen = f"127.0.0.1:{project.port}"
    given: dict[str, Any] = {
        "id": project.broker_id,
        "groups": GroupSettings(initial_rebalance_delay_ms=100, min_session_timeout_ms=1_000),
        "topics": TopicSettings(
            auto_create=project.auto_create, default_partitions=project.partitions
        ),
    }
    if project.has_every_protocol:
        enforce_acls(tmp_path / "root")
        ports = {PLAINTEXT: project.port}
        listen = ",".join(f"{each}://127.0.0.1:{ports.get(each, 0)}" for each in PROTOCOLS)
        given["tls"] = tls
    with broker(tmp_path / "root", kafka=KafkaSettings(listen=listen), **given) as agent:
        address = agent.kafka_address
        if project.has_every_protocol:
            add_users(address, USERS)
            address = named(agent.listeners.kafka_open)
        check_suite(project, suite, with_kafka, address)


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
        leave_out="Txn|Transactions|ProducerId3|ReadOnlyAndAll|Java|UpdateFeatures"
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
