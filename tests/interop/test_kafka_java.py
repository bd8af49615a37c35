"""Kafka's own tools and Java clients, unmodified, with a broker of ours.

They come from Maven's repositories by Spark's Ivy; where they cannot be got, the tests say so.
"""

from __future__ import annotations

import base64
import json
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

import sparklog
from benchmarks import jars
from sparklog.broker.agent import Agent
from sparklog.broker.logging import configure
from sparklog.security.quota import QuotaEntity, QuotaKey
from sparklog.security.scram import Mechanism, is_password
from sparklog.settings import (
    GroupSettings,
    KafkaSettings,
    LogSettings,
    OAuthSettings,
    TlsSettings,
)
from sparklog.storage.objects import open_store
from tests.support.acls import set_acls
from tests.support.certificates import Authority
from tests.support.issuer import SECRET, Issuer, token_endpoint
from tests.support.jvms import class_path, command, running
from tests.support.kafkas import broker, forget_producers
from tests.support.logs import logging_restored
from tests.support.users import PASSWORD, add_alice
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.soak(mode="clients"), pytest.mark.timeout(600)]

GROUPS: Final = GroupSettings(initial_rebalance_delay_ms=200, min_session_timeout_ms=1_000)
TOOLS: Final = "org.apache.kafka.tools"
COOPERATIVE: Final = "org.apache.kafka.clients.consumer.CooperativeStickyAssignor"
GROUP_COMMAND: Final = "consumer.group.ConsumerGroupCommand"
PROGRAMS: Final = Path(__file__).parent / "java"
PATIENCE_SECONDS: Final = 240.0


def run(paths: Sequence[str], *arguments: str, **options: Any) -> str:
    """Returns the output of a program, which must succeed."""
    done = subprocess.run(
        command(paths, *arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(name="agent")
def _agent(tmp_path: Path) -> Iterator[Agent]:
    with broker(tmp_path / "root", groups=GROUPS) as agent:
        yield agent


@pytest.fixture(name="tool")
def _tool(agent: Agent) -> Callable[..., str]:
    """Runs a tool against the broker."""
    paths = class_path()

    def tool(name: str, *arguments: str) -> str:
        address = ("--bootstrap-server", agent.kafka_address)
        return run(paths, f"{TOOLS}.{name}", *address, *arguments)

    return tool


def table(output: str) -> list[list[str]]:
    """The cells of what a tool writes as a table, without its header."""
    rows = [line.split() for line in output.splitlines()]
    first = next(at for at, row in enumerate(rows) if row and row[0] in ("GROUP", "TOPIC"))
    return [row for row in rows[first + 1 :] if row]


# ------------------------------------------------------------------------------ topics


def test_topics_by_their_tool(agent: Agent, tool: Callable[..., str]) -> None:
    """Created, listed, described, widened, configured, cut off at their beginning, deleted."""
    create = ("--create", "--topic", "t", "--partitions", "2", "--config", "retention.ms=100000")
    assert "Created topic t." in tool("TopicCommand", *create)
    assert tool("TopicCommand", *create, "--if-not-exists").strip() == ""
    assert tool("TopicCommand", "--list").split() == ["t"]
    tool("TopicCommand", "--alter", "--topic", "t", "--partitions", "3")
    described = tool("TopicCommand", "--describe", "--topic", "t")
    assert "PartitionCount: 3\tReplicationFactor: 1\tConfigs: retention.ms=100000" in described
    assert described.count("Leader: 1\tReplicas: 1\tIsr: 1") == 3
    with sparklog.connect(agent.address) as log, log.producer() as producer:
        for number in range(9):
            producer.send("t", b"%d" % number, partition=number % 3)
    assert tool("GetOffsetShell", "--topic", "t").split() == ["t:0:3", "t:1:3", "t:2:3"]
    earliest = ("--topic-partitions", "t:1", "--time", "earliest")
    assert tool("GetOffsetShell", *earliest).split() == ["t:1:0"]
    tool("TopicCommand", "--delete", "--topic", "t")
    assert tool("TopicCommand", "--list").strip() == ""


def test_records_are_deleted_by_their_tool(
    agent: Agent, tool: Callable[..., str], tmp_path: Path
) -> None:
    """Up to the offset that is given, for everybody."""
    with sparklog.connect(agent.address) as log:
        log.create_topic("t", partitions=1)
        with log.producer() as producer:
            for number in range(5):
                producer.send("t", b"%d" % number)
        wanted = {"partitions": [{"topic": "t", "partition": 0, "offset": 3}], "version": 1}
        path = tmp_path / "offsets.json"
        path.write_text(json.dumps(wanted), "utf-8")
        output = tool("DeleteRecordsCommand", "--offset-json-file", str(path))
        assert re.search(r"t-0\s+low_watermark: 3", output), output
        assert log.read("t").column("offset").to_pylist() == [3, 4]


def test_partitions_are_placed_by_their_tools(
    agent: Agent, tool: Callable[..., str], tmp_path: Path
) -> None:
    """Reassignments are done at once, no election is needed, and the broker is the quorum."""
    with sparklog.connect(agent.address) as log:
        log.create_topic("t", partitions=2)
    wanted = {"topic": "t", "partition": 1, "replicas": [1], "log_dirs": ["any"]}
    path = tmp_path / "placement.json"
    path.write_text(json.dumps({"partitions": [wanted], "version": 1}), "utf-8")
    reassign = ("reassign.ReassignPartitionsCommand", "--reassignment-json-file", str(path))
    assert "Successfully started partition reassignment for t-1" in tool(*reassign, "--execute")
    assert "Reassignment of partition t-1 is completed." in tool(*reassign, "--verify")
    assert "None of the specified partition reassignments are active." in tool(
        *reassign, "--cancel"
    )
    listed = tool("reassign.ReassignPartitionsCommand", "--list")
    assert "No partition reassignments found." in listed
    elect = ("LeaderElectionCommand", "--election-type", "preferred")
    elected = tool(*elect, "--path-to-json-file", str(path))
    assert "Valid replica already elected for partitions t-1" in elected
    assert tool(*elect, "--all-topic-partitions").strip() == ""
    status = tool("MetadataQuorumCommand", "describe", "--status")
    assert re.search(r"LeaderId:\s+1\n", status), status
    assert re.search(rf'"id": 1, "endpoints": \["PLAINTEXT://{agent.kafka_address}"\]', status)


def test_configurations_by_their_tool(agent: Agent) -> None:
    """A topic's configuration is set, described and reset; a broker's is described, and its log
    level altered.
    """
    paths = jars.find().broker
    if not paths:
        pytest.skip("; ".join(jars.find().missing))

    def tool(*arguments: str) -> str:
        address = ("--bootstrap-server", agent.kafka_address)
        return run(paths, "kafka.admin.ConfigCommand", *address, *arguments)

    with sparklog.connect(agent.address) as log:
        log.create_topic("t", partitions=1)
        of_topic = ("--entity-type", "topics", "--entity-name", "t")
        config = "retention.ms=5000,cleanup.policy=[compact,delete]"
        assert "Completed updating" in tool("--alter", *of_topic, "--add-config", config)
        assert log.describe("t").config == {
            "retention.ms": "5000",
            "cleanup.policy": "compact,delete",
        }
        assert "retention.ms=5000" in tool("--describe", *of_topic)
        tool("--alter", *of_topic, "--delete-config", "retention.ms")
        assert log.describe("t").config == {"cleanup.policy": "compact,delete"}
    told = tool("--describe", "--all", "--entity-type", "brokers", "--entity-name", "1")
    assert "writer.linger_ms" in told
    with logging_restored():
        configure(LogSettings(level="error"))
        of_loggers = ("--entity-type", "broker-loggers", "--entity-name", "1")
        assert "root=ERROR" in tool("--describe", *of_loggers)
        assert "Completed updating" in tool("--alter", *of_loggers, "--add-config", "root=WARN")
        assert "root=WARN" in tool("--describe", *of_loggers)


# ------------------------------------------------------------------------------ groups


def test_groups_by_their_tool(agent: Agent, tool: Callable[..., str]) -> None:
    """Written and read by the performance tools; listed, described, set back, and deleted."""
    paths = class_path()
    with sparklog.connect(agent.address) as log:
        log.create_topic("t", partitions=2)
    sent = run(
        paths,
        *(f"{TOOLS}.ProducerPerformance", "--topic", "t", "--num-records", "2000"),
        *("--record-size", "100", "--throughput", "-1"),
        *("--producer-props", f"bootstrap.servers={agent.kafka_address}", "compression.type=lz4"),
    )
    assert "2000 records sent" in sent
    read = ("--topic", "t", "--messages", "2000", "--group", "g", "--timeout", "60000")
    assert ", 2000, " in tool("ConsumerPerformance", *read)

    def groups(*arguments: str) -> str:
        return tool(GROUP_COMMAND, *arguments)

    def described() -> dict[int, tuple[str, str]]:
        """By partition: (committed offset, lag)."""
        rows = table(groups("--describe", "--group", "g"))
        return {int(row[2]): (row[3], row[5]) for row in rows}

    assert groups("--list").split() == ["g"]
    assert table(groups("--list", "--state")) == [["g", "Empty"]]
    before = described()
    assert sum(int(offset) for offset, _ in before.values()) == 2_000
    assert [lag for _, lag in before.values()] == ["0", "0"]
    earliest = ("--reset-offsets", "--group", "g", "--topic", "t", "--to-earliest")
    assert sorted(table(groups(*earliest, "--dry-run"))) == [
        ["g", "t", "0", "0"],
        ["g", "t", "1", "0"],
    ]
    assert described() == before
    reset = ("--reset-offsets", "--group", "g", "--topic", "t:1", "--to-offset", "3", "--execute")
    assert table(groups(*reset)) == [["g", "t", "1", "3"]]
    assert described() == {0: before[0], 1: ("3", str(int(before[1][0]) - 3))}
    assert "Successful" in groups("--delete-offsets", "--group", "g", "--topic", "t:0")
    assert described().keys() == {1}
    assert "successful" in groups("--delete", "--group", "g")
    assert groups("--list").strip() == ""


def test_a_producer_that_was_forgotten_goes_on(agent: Agent) -> None:
    """After a quiet day, after its records were deleted, and in a topic that was created again."""
    sender = str(PROGRAMS / "Sender.java")
    with (
        running(class_path(), sender, agent.kafka_address) as program,
        sparklog.connect(agent.address) as log,
    ):

        def send(value: str, offset: int) -> None:
            program.tell(f"t {value}")
            program.wait_for(f"value {value} at {offset}")

        log.create_topic("t", partitions=2)
        for offset, value in enumerate("abc"):
            send(value, offset)
        forget_producers(agent)
        send("d", 3)
        send("e", 4)
        log.delete_records("t", {0: 5})
        send("f", 5)
        log.delete_records("t", {0: 6})
        forget_producers(agent)
        send("g", 6)
        send("h", 7)
        log.delete_topic("t")
        log.create_topic("t", partitions=2)
        send("i", 0)
        send("j", 1)
        program.end_of_input()
        assert program.wait() == 0
        assert log.read("t").column("value").to_pylist() == [b"i", b"j"]


def test_kafka_reads_what_is_committed(agent: Agent, tool: Callable[..., str]) -> None:
    """Its formatters read the records of `__consumer_offsets` as those of a broker of its own."""
    with sparklog.connect(agent.address) as log:
        topic_id = log.create_topic("t", partitions=1).topic_id
        with log.producer() as producer:
            for number in range(5):
                producer.send("t", b"%d" % number)
    read = ("--topic", "t", "--messages", "5", "--group", "g", "--timeout", "60000")
    tool("ConsumerPerformance", *read)

    def formatted(kind: str) -> list[Any]:
        output = tool(
            "consumer.ConsoleConsumer",
            *("--topic", "__consumer_offsets", "--from-beginning", "--timeout-ms", "5000"),
            *("--formatter", f"{TOOLS}.consumer.{kind}MessageFormatter"),
        )
        decoder, found, at = json.JSONDecoder(), [], output.find("{")
        while at >= 0:
            value, end = decoder.raw_decode(output, at)
            found.append(value)
            at = output.find("{", end)
        return found

    committed = formatted("Offsets")
    assert {json.dumps(each["key"]["data"], sort_keys=True) for each in committed} == {
        json.dumps({"group": "g", "partition": 0, "topic": "t"})
    }
    assert {each["value"]["version"] for each in committed} == {4}
    last = committed[-1]["value"]["data"]
    assert (last["offset"], last["metadata"]) == (5, "")
    assert bytes.fromhex(topic_id) in _of_kafka_id(last["topicId"])
    of_all = formatted("GroupMetadata")  # those who look are groups too
    records = [each for each in of_all if each["key"]["data"]["group"] == "g"]
    members = [each["value"]["data"]["members"] for each in records if each["value"]]
    assert [len(each) for each in members][:1] == [1]
    assert members[-1] == []  # it has left


def _of_kafka_id(text: str) -> bytes:
    """A UUID as Kafka writes it."""
    return base64.urlsafe_b64decode(text + "==")


# ------------------------------------------------------------------------------ at length


class Verifiable:
    """`VerifiableProducer` or `VerifiableConsumer`: a process that reports its work in JSON."""

    def __init__(self, tool: str, *arguments: str) -> None:
        self.told: list[dict[str, Any]] = []
        self._process = subprocess.Popen(
            command(class_path(), f"{TOOLS}.{tool}", *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self.told.append(json.loads(line))

    def of(self, name: str) -> list[dict[str, Any]]:
        """Returns all its events of that name."""
        return [each for each in list(self.told) if each["name"] == name]

    @property
    def revoked(self) -> list[set[int]]:
        """Returns the partitions that were taken from it, each time that some were."""
        found = (each["partitions"] for each in self.of("partitions_revoked"))
        return [{place["partition"] for place in places} for places in found if places]

    @property
    def partitions(self) -> set[int]:
        """Returns the partitions that it was assigned and has not lost."""
        held: set[int] = set()
        for each in list(self.told):
            numbers = {place["partition"] for place in each.get("partitions", ())}
            if each["name"] == "partitions_assigned":
                assert held.isdisjoint(numbers), "a partition was given that it had"
                held |= numbers
            elif each["name"] == "partitions_revoked":
                held -= numbers
        return held

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self._process.poll() is None:
            self._process.send_signal(how)
        self._process.wait(PATIENCE_SECONDS)
        self._thread.join(PATIENCE_SECONDS)
        assert self._process.stdout is not None
        self._process.stdout.close()


def test_verifiable_clients_lose_nothing(agent: Agent) -> None:
    """Two consumers of a group, one of which is killed while a producer writes."""
    with sparklog.connect(agent.address) as log:
        log.create_topic("t", partitions=4)
    count = 20_000
    address = ("--bootstrap-server", agent.kafka_address, "--topic", "t")
    group = ("--group-id", "g", "--session-timeout", "6000")

    def consumer() -> Verifiable:
        return Verifiable("VerifiableConsumer", *address, *group, "--reset-policy", "earliest")

    with ExitStack() as ending:
        first, second = consumer(), consumer()
        ending.callback(first.end)
        ending.callback(second.end)
        wait_until(
            lambda: len(first.partitions) == len(second.partitions) == 2, "both had their share"
        )
        most = ("--max-messages", str(count), "--throughput", "2000", "--acks", "-1")
        producer = Verifiable("VerifiableProducer", *address, *most)
        ending.callback(producer.end)
        wait_until(lambda: len(producer.of("producer_send_success")) > count / 4, "some was sent")
        first.end(signal.SIGKILL)
        wait_until(lambda: len(second.partitions) == 4, "the other one had everything")
        wait_until(lambda: bool(producer.of("shutdown_complete")), "everything was sent")
        sent = producer.of("producer_send_success")
        assert len(sent) == count
        assert producer.of("producer_send_error") == []
        ends = {
            number: 1 + max(each["offset"] for each in sent if each["partition"] == number)
            for number in range(4)
        }
        assert sum(ends.values()) == count

        def committed() -> dict[int, int]:
            found: dict[int, int] = {}
            for each in second.of("offsets_committed"):
                assert each["success"], each
                for place in each["offsets"]:
                    number, offset = place["partition"], place["offset"]
                    assert offset >= found.get(number, 0), "a commit went back"
                    found[number] = offset
            return found

        wait_until(lambda: committed() == ends, "everything was committed")
        read = [
            (place["partition"], offset)
            for member in (first, second)
            for each in member.of("records_consumed")
            for place in each["partitions"]
            for offset in range(place["minOffset"], place["maxOffset"] + 1)
        ]
        assert set(read) == {(number, offset) for number in ends for offset in range(ends[number])}


class Native:
    """Our own consumer in a thread, with what its group has given to it and taken from it."""

    def __init__(self, log: sparklog.Log) -> None:
        self.partitions: set[int] = set()
        self.revoked: list[set[int]] = []
        self._log = log
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._log.consumer(
            "t",
            group="g",
            assignors=["cooperative-sticky"],
            heartbeat_seconds=0.1,
            on_assign=self._assigned,
            on_revoke=self._revoked,
            on_lost=self._revoked,
        ) as consumer:
            while not self._over.is_set():
                consumer.poll(0.1)

    def _assigned(self, partitions: Iterable[tuple[str, int]]) -> None:
        added = {number for _, number in partitions}
        assert self.partitions.isdisjoint(added), "a partition was given that it had"
        self.partitions |= added

    def _revoked(self, partitions: Iterable[tuple[str, int]]) -> None:
        taken = {number for _, number in partitions}
        self.partitions -= taken
        self.revoked.append(taken)

    def end(self) -> None:
        self._over.set()
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("java_leads", [True, False], ids=["java-leads", "native-leads"])
def test_cooperative_members_of_both_kinds_keep_what_stays(agent: Agent, java_leads: bool) -> None:
    """Whichever leads, a joining member takes only its share, and a leaving one only adds."""

    def java() -> Verifiable:
        member = Verifiable(
            "VerifiableConsumer",
            *("--bootstrap-server", agent.kafka_address, "--topic", "t", "--group-id", "g"),
            *("--session-timeout", "6000", "--assignment-strategy", COOPERATIVE),
        )
        ending.callback(member.end)
        return member

    def native() -> Native:
        member = Native(log)
        ending.callback(member.end)
        return member

    def await_shares(*members: Verifiable | Native) -> None:
        share = 6 // len(members)
        wait_until(
            lambda: (
                all(len(each.partitions) == share for each in members)
                and set().union(*(each.partitions for each in members)) == {*range(6)}
            ),
            f"each of {len(members)} members had its share",
        )

    with ExitStack() as ending:
        log = ending.enter_context(sparklog.connect(agent.address))
        log.create_topic("t", partitions=6)
        first = java() if java_leads else native()
        await_shares(first)
        second = native() if java_leads else java()
        await_shares(first, second)
        assert log.describe_group("g").protocol == "cooperative-sticky"
        assert [len(each) for each in first.revoked] == [3]
        assert second.revoked == []
        third = native()
        await_shares(first, second, third)
        assert [len(each) for each in first.revoked] == [3, 1]
        assert [len(each) for each in second.revoked] == [1]
        kept = set(second.partitions), set(third.partitions)
        first.end()
        await_shares(second, third)
        assert kept[0] < second.partitions
        assert kept[1] < third.partitions
        assert [len(each) for each in second.revoked] == [1]
        assert third.revoked == []


def test_a_program_with_javas_clients(agent: Agent) -> None:
    """Each codec, keys, headers, nulls, times; read from everywhere; groups of every kind."""
    with sparklog.connect(agent.address) as log:
        log.create_topic("t", partitions=2)
    program = str(PROGRAMS / "Clients.java")
    assert run(class_path(), program, agent.kafka_address, "t").splitlines()[-1] == "done"


# ------------------------------------------------------------------------------ TLS


def test_java_clients_over_tls(tmp_path: Path) -> None:
    """Promise: Java clients are served with the properties in docs/security.md.

    A client without the CA reports the certificate, and the broker's log names the remedy.
    """
    authority = Authority(tmp_path)
    certificate, key = authority.sign("broker")
    tls = TlsSettings(certificate=certificate, key=key, ca=authority.path, client_auth="required")
    own = "".join(Path(each).read_text() for each in authority.sign("java", is_client=True)[::-1])
    (tmp_path / "own.pem").write_text(own)
    properties = {
        "security.protocol": "SSL",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": authority.path,
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(tmp_path / "own.pem"),
    }
    paths = class_path()

    def config(**changed: str | None) -> str:
        path = tmp_path / "client.properties"
        given = {**properties, **changed}
        path.write_text("".join(f"{name}={value}\n" for name, value in given.items() if value))
        return str(path)

    kafka = KafkaSettings(listen="SSL://127.0.0.1:0")
    with broker(tmp_path / "root", kafka=kafka, tls=tls, groups=GROUPS) as agent:
        address = ("--bootstrap-server", agent.kafka_address)
        create = (*address, "--command-config", config(), "--create", "--topic", "t")
        assert "Created topic t." in run(paths, f"{TOOLS}.TopicCommand", *create)
        load = ("--topic", "t", "--num-records", "20000", "--record-size", "100")
        run(
            paths,
            f"{TOOLS}.ProducerPerformance",
            *(*load, "--throughput", "-1", "--producer.config", config()),
            *("--producer-props", f"bootstrap.servers={agent.kafka_address}"),
        )
        read = run(
            paths,
            f"{TOOLS}.ConsumerPerformance",
            *(*address, "--topic", "t", "--messages", "20000", "--timeout", "60000"),
            *("--consumer.config", config(), "--group", "g"),
        )
        assert read.splitlines()[-1].split(",")[4].strip() == "20000"
        refused = subprocess.run(
            command(
                paths,
                f"{TOOLS}.TopicCommand",
                *(*address, "--list", "--command-config"),
                config(**dict.fromkeys(("ssl.truststore.type", "ssl.truststore.location"))),
            ),
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert refused.returncode != 0
        assert "SSL handshake failed" in refused.stdout + refused.stderr


@pytest.mark.parametrize(
    ("mechanism", "module"),
    [("SCRAM-SHA-512", "scram.ScramLoginModule"), ("PLAIN", "plain.PlainLoginModule")],
)
def test_java_clients_log_in(tmp_path: Path, mechanism: str, module: str) -> None:
    """Promise: Java clients log in with the properties in docs/security.md.

    A wrong password is the cause of their error.
    """
    authority = Authority(tmp_path)
    certificate, key = authority.sign("broker")
    root = tmp_path / "root"
    add_alice(open_store(str(root), {}))
    paths = class_path()

    def config(password: str) -> str:
        path = tmp_path / "client.properties"
        login = f'username="alice" password="{password}"'
        path.write_text(
            f"""security.protocol=SASL_SSL
ssl.truststore.type=PEM
ssl.truststore.location={authority.path}
sasl.mechanism={mechanism}
sasl.jaas.config=org.apache.kafka.common.security.{module} required {login};
"""
        )
        return str(path)

    kafka = KafkaSettings(listen="SASL_SSL://127.0.0.1:0")
    tls = TlsSettings(certificate=certificate, key=key)
    with broker(root, kafka=kafka, tls=tls, groups=GROUPS) as agent:
        address = ("--bootstrap-server", agent.kafka_address)
        create = (*address, "--command-config", config(PASSWORD), "--create", "--topic", "t")
        assert "Created topic t." in run(paths, f"{TOOLS}.TopicCommand", *create)
        refused = subprocess.run(
            command(
                paths,
                f"{TOOLS}.TopicCommand",
                *(*address, "--list", "--command-config", config("wrong")),
            ),
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert refused.returncode != 0
        assert "SaslAuthenticationException" in refused.stdout + refused.stderr


def test_kafka_tools_for_acls_users_and_quotas(tmp_path: Path) -> None:
    """Promise: kafka-acls.sh and kafka-configs.sh work unmodified, as a super user."""
    if not jars.find().broker:
        pytest.skip("; ".join(jars.find().missing))
    root, paths = tmp_path / "root", class_path()
    store = open_store(str(root), {})
    add_alice(store)
    set_acls(store, super_users=["User:alice"])
    config = tmp_path / "client.properties"
    login = f'username="alice" password="{PASSWORD}"'
    config.write_text(
        f"""security.protocol=SASL_PLAINTEXT
sasl.mechanism=PLAIN
sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required {login};
"""
    )
    kafka = KafkaSettings(listen="SASL_PLAINTEXT://127.0.0.1:0", sasl_mechanisms="PLAIN")
    with broker(root, kafka=kafka) as agent:
        tool = ("--bootstrap-server", agent.kafka_address, "--command-config", str(config))

        def acls(*arguments: str) -> str:
            return run(paths, f"{TOOLS}.AclCommand", *tool, *arguments)

        rights = ("--allow-principal", "User:bob", "--topic", "orders")
        assert "Adding ACLs for resource" in acls("--add", *rights, "--producer")
        listed = acls("--list", "--topic", "orders")
        for operation in ("WRITE", "DESCRIBE", "CREATE"):
            entry = f"principal=User:bob, host=*, operation={operation}, permissionType=ALLOW"
            assert entry in listed
        acls("--remove", *rights, "--producer", "--force")
        assert "User:bob" not in acls("--list")

        def configs(*arguments: str) -> str:
            kind = ("--entity-type", "users")
            return run(jars.find().broker, "kafka.admin.ConfigCommand", *tool, *kind, *arguments)

        user = ("--entity-name", "bob")
        credential = "SCRAM-SHA-256=[iterations=8192,password=bobs-secret]"
        configs("--alter", *user, "--add-config", credential)
        assert "SCRAM-SHA-256=iterations=8192" in configs("--describe", *user)
        state = agent._access.watch.state
        verifier = state.users["bob"].credentials[Mechanism.SHA_256]
        assert is_password(Mechanism.SHA_256, verifier, "bobs-secret")
        configs("--alter", *user, "--delete-config", "SCRAM-SHA-256")
        assert "bob" not in configs("--describe")
        configs("--alter", *user, "--add-config", "producer_byte_rate=1024,consumer_byte_rate=2048")
        assert "producer_byte_rate=1024.0" in configs("--describe", *user)
        configs("--alter", "--entity-default", "--add-config", "controller_mutation_rate=1.5")
        assert "controller_mutation_rate=1.5" in configs("--describe", "--entity-default")
        quotas = agent._access.watch.state.quotas
        assert quotas[QuotaEntity(user="bob")] == {
            QuotaKey.PRODUCER_BYTE_RATE: 1_024,
            QuotaKey.CONSUMER_BYTE_RATE: 2_048,
        }
        assert quotas[QuotaEntity(user=None)] == {QuotaKey.CONTROLLER_MUTATION_RATE: 1.5}
        configs("--alter", *user, "--delete-config", "producer_byte_rate,consumer_byte_rate")
        assert "bob" not in configs("--describe")


def test_java_clients_with_oauth(tmp_path: Path) -> None:
    """Promise: a producer gets its tokens from their issuer, and logs in again on its connections
    before they expire; a consumer reads one from a file; and a wrong one has its cause in the
    error.
    """
    authority, issuer, paths = Authority(tmp_path), Issuer(), class_path()
    certificate, key = authority.sign("broker")
    jwks, token = tmp_path / "jwks.json", tmp_path / "token"
    jwks.write_bytes(issuer.jwks())
    token.write_text(issuer.token("app", seconds=600, scope="kafka"))

    def config(url: str) -> str:
        path = tmp_path / f"{url.partition(':')[0]}.properties"
        module = "org.apache.kafka.common.security.oauthbearer"
        path.write_text(
            f"""security.protocol=SASL_SSL
ssl.truststore.type=PEM
ssl.truststore.location={authority.path}
sasl.mechanism=OAUTHBEARER
sasl.login.callback.handler.class={module}.OAuthBearerLoginCallbackHandler
sasl.oauthbearer.token.endpoint.url={url}
sasl.oauthbearer.client.credentials.client.id=app
sasl.oauthbearer.client.credentials.client.secret={SECRET}
sasl.jaas.config={module}.OAuthBearerLoginModule required;
"""
        )
        return str(path)

    def java(tool: str, url: str, *arguments: str) -> list[str]:
        allowed = "-Dorg.apache.kafka.sasl.oauthbearer.allowed"
        flags = (f"{allowed}.urls={url}", f"{allowed}.files={url.removeprefix('file://')}")
        return command(paths, *flags, f"{TOOLS}.{tool}", *arguments)

    settings = {
        "kafka": KafkaSettings(listen="SASL_SSL://127.0.0.1:0"),
        "tls": TlsSettings(certificate=certificate, key=key),
        "oauth": OAuthSettings(**issuer.settings(str(jwks))),
        "groups": GROUPS,
    }
    with (
        broker(tmp_path / "root", **settings) as agent,
        token_endpoint(issuer, seconds=6) as url,
        ExitStack() as stack,
    ):
        produce = java("ConsoleProducer", url, "--bootstrap-server", agent.kafka_address)
        produce += ["--topic", "t", "--producer.config", config(url)]
        producer = stack.enter_context(subprocess.Popen(produce, stdin=subprocess.PIPE))
        stack.callback(producer.kill)
        assert agent.listeners.kafka is not None
        counts, sent = agent.listeners.kafka.counts, 0

        def is_again() -> bool:
            nonlocal sent
            assert producer.stdin is not None
            producer.stdin.write(f"{sent}\n".encode())
            producer.stdin.flush()
            sent += 1
            return counts.reauthentications >= 2

        wait_until(is_again, "no re-authentication", look_seconds=0.2)
        assert producer.stdin is not None
        producer.stdin.close()
        assert producer.wait(PATIENCE_SECONDS) == 0
        assert not counts.reauthentications_failed

        of_file = f"file://{token}"
        consume = java(
            "consumer.ConsoleConsumer", of_file, "--bootstrap-server", agent.kafka_address
        )
        consume += ["--topic", "t", "--from-beginning", "--consumer.config", config(of_file)]
        found = subprocess.run(
            [*consume, "--max-messages", str(sent)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert found.returncode == 0, found.stderr
        assert sorted(map(int, found.stdout.split())) == [*range(sent)]

        token.write_text(issuer.token("app", aud="other", scope="kafka"))
        refused = subprocess.run(
            [*consume, "--max-messages", "1"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert "it is for another audience" in refused.stdout + refused.stderr
