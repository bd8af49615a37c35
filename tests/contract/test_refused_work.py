"""Each state in which a broker refuses work, from its beginning to its end.

The page `docs/operations.md` lists the states. Each is in the log when it begins and when it ends,
in `sparklog status` with exit code 3, in a metric, and in an alert.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from structlog.testing import capture_logs
from typer.testing import CliRunner

import sparklog
from sparklog import errors
from sparklog.broker.agent import Agent
from sparklog.broker.failover.heartbeats import Heartbeats
from sparklog.broker.metrics.collection import Collector
from sparklog.broker.metrics.exposition import Exposition
from sparklog.broker.refused_work import Work
from sparklog.cli import app
from sparklog.clock import SystemClock
from sparklog.doctor import CheckState, check_broker
from sparklog.formats.flight_messages import AppendHeader
from sparklog.settings import (
    BrokerSettings,
    FlightSettings,
    JanitorSettings,
    KafkaSettings,
    LivenessSettings,
    PublisherSettings,
    WriterSettings,
)
from sparklog.storage.objects import LocalStore, MemoryStore, NoFaults
from sparklog.storage.objects.faults import Operation
from sparklog.terminal.commands import ExitCode
from tests.support.brokers import payload
from tests.support.flights import BrokerClient, Stream
from tests.support.users import add_alice
from tests.support.waiting import wait_until

VALUES = payload(["a"]).schema
DOCS = Path(__file__).parents[2] / "docs"


class Faults(NoFaults):
    """Refuses puts, or all operations, below a prefix while it has one."""

    def __init__(self) -> None:
        self.prefix: str | None = None
        self.operations = "put"
        self.error: Exception = errors.RootNotWritable(root="memory://x", reason="read-only")

    def before(self, operation: Operation, path: str) -> None:
        is_meant = operation.startswith(self.operations)
        if self.prefix is not None and is_meant and path.startswith(self.prefix):
            raise self.error


class FullStore(MemoryStore):
    """A store whose free space a test sets."""

    free: int | None = None

    def free_bytes(self) -> int | None:
        return self.free


class World:
    """A broker, and everything that shows its state."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sparklog.broker.refused_work.REFUSED_SECONDS", 60.0)
        self.faults = Faults()
        self.store = FullStore(SystemClock(), faults=self.faults)
        add_alice(self.store)
        self.agent = Agent(
            BrokerSettings(
                root="memory://x",
                flight=FlightSettings(listen="127.0.0.1:0", max_streams=2),
                kafka=KafkaSettings(
                    listen="127.0.0.1:0,SASL_PLAINTEXT://127.0.0.1:0",
                    max_connections=1,
                    max_connections_per_address=1,
                ),
                liveness=LivenessSettings(heartbeat_seconds=0.05, dead_after_seconds=60.0),
                publisher=PublisherSettings(interval_seconds=0.05),
                janitor=JanitorSettings(enabled=False),
                writer=WriterSettings(free_space_reserve_bytes=1_000),
            ),
            store=self.store,
        )

    def states(self) -> dict[str, str]:
        """The work that is refused now, with the reasons."""
        broker = self.agent.parts.broker
        assert broker is not None
        return {each.work: each.reason for each in broker.status().refused}

    def metrics(self) -> str:
        """The figures in the text format of Prometheus."""
        assert self.agent._sources is not None
        return b"".join(Exposition(Collector(self.agent._sources)).text()).decode()

    def status(self) -> tuple[int, str]:
        """Exit code and output of `sparklog status`."""
        found = CliRunner().invoke(app, ["status", "--bootstrap", self.agent.address])
        return found.exit_code, found.stdout


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A broker with topic t, short bounds, and a store that a test makes fail."""
    found = World(monkeypatch)
    with found.agent, BrokerClient(found.agent.address) as client:
        client.create("t")
        yield found


def append(world: World) -> None:
    """Appends one record, which may be refused."""
    with BrokerClient(world.agent.address) as client, Stream(client, "t", VALUES) as stream:
        stream.append(payload(["a"]), AppendHeader(partition=0))


@contextlib.contextmanager
def full(world: World) -> Iterator[None]:
    """A disk on which only the reserve is left, without a write."""
    world.store.free = 10
    yield
    world.store.free = None


@contextlib.contextmanager
def read_only(world: World) -> Iterator[None]:
    """A root that became read-only, for the log and the heartbeats."""
    world.faults.prefix = ""
    with pytest.raises(errors.StorageUnavailable):
        append(world)
    yield
    world.faults.prefix = None


@contextlib.contextmanager
def without_inodes(world: World) -> Iterator[None]:
    """A disk with space and without inodes."""
    world.faults.error = errors.StorageFull(
        root="memory://x", missing="inode", free_bytes=10**9, reserve_bytes=0
    )
    world.faults.prefix = ""
    with pytest.raises(errors.StorageFull):
        append(world)
    yield
    world.faults.prefix = None


@contextlib.contextmanager
def without_heartbeats(world: World) -> Iterator[None]:
    """A folder of heartbeats without rights, or a disk without inodes."""
    world.faults.prefix = "heartbeats/"
    yield
    world.faults.prefix = None


@contextlib.contextmanager
def many_connections(world: World) -> Iterator[None]:
    """More Kafka connections than are allowed."""
    host, port = world.agent.kafka_address.split(":")
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection((host, int(port))))
        yield


@contextlib.contextmanager
def unread_users(world: World) -> Iterator[None]:
    """A store that refuses security/ alone; records are acked meanwhile."""
    world.agent._access.watch._stale_seconds = 0.3
    world.faults.prefix, world.faults.operations = "security/", ""
    yield
    append(world)
    world.faults.prefix, world.faults.operations = None, "put"


@contextlib.contextmanager
def many_streams(world: World) -> Iterator[None]:
    """More streams of native clients than are allowed."""
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(BrokerClient(world.agent.address))
        streams = [stack.enter_context(Stream(client, "t", VALUES)) for _ in range(2)]
        for each in streams:
            each.append(payload(["a"]), AppendHeader(partition=0))
        with pytest.raises(errors.TooManyStreams):
            append(world)
        yield


STATES: list[tuple[Work, Callable[[World], Any], str]] = [
    (Work.WRITES, full, "No space is left"),
    (Work.WRITES, read_only, "read-only"),
    (Work.WRITES, without_inodes, "No inode is left"),
    (Work.HEARTBEATS, without_heartbeats, "read-only"),
    (Work.CONNECTIONS, many_connections, "kafka.max_connections"),
    (Work.LOGINS, unread_users, "security/ in the root was last read"),
    (Work.STREAMS, many_streams, "flight.max_streams"),
]


@pytest.mark.parametrize(
    ("work", "begin", "reason"), STATES, ids=[begin.__name__ for _, begin, _ in STATES]
)
def test_a_state_is_visible_from_its_beginning_to_its_end(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    work: Work,
    begin: Callable[[World], Any],
    reason: str,
) -> None:
    """It has a line in the log and in the status, an exit code and a metric, and so has its end."""
    metric = f'sparklog_work_refused{{work="{work}"}}'
    assert world.status()[0] == ExitCode.OK
    with capture_logs() as logged:
        with begin(world):
            wait_until(lambda: work in world.states(), f"{work} are refused")
            assert reason in world.states()[work]
            assert f"{metric} 1" in world.metrics()
            code, shown = world.status()
            assert code == ExitCode.UNHEALTHY
            assert f"{work}: " in shown
        monkeypatch.setattr("sparklog.broker.refused_work.REFUSED_SECONDS", 0.0)
        wait_until(lambda: not world.states(), f"{work} are accepted")
        assert f"{metric} 0" in world.metrics()
        assert world.status()[0] == ExitCode.OK
        append(world)
    lines = [each["event"] for each in logged if each["event"].startswith(f"{work} are")]
    assert lines[0] == f"{work} are refused"
    assert lines[-1] == f"{work} are accepted again"
    assert len(lines) % 2 == 0


def test_heartbeats_that_fail_for_long_still_say_why(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status names the missing resource also once nothing was written for a while."""
    monkeypatch.setattr(Heartbeats, "is_writing", False)
    with without_inodes(world):
        wait_until(
            lambda: "No inode is left" in world.states()[Work.HEARTBEATS], "the store's reason"
        )
        assert "heartbeats: none could be written, and nothing else either: " in world.status()[1]
    wait_until(lambda: world.states()[Work.HEARTBEATS].endswith("either"), "no reason any more")


def test_an_append_only_table_is_visible_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    """As a state of its topic, which is published meanwhile; a deletion names the property."""
    metric = 'sparklog_topic_deletions_refused{topic="t"}'
    settings = BrokerSettings(
        root=str(tmp_path),
        flight=FlightSettings(listen="127.0.0.1:0"),
        kafka=KafkaSettings(listen=""),
        publisher=PublisherSettings(interval_seconds=0.05),
        janitor=JanitorSettings(interval_seconds=0.05),
    )
    with capture_logs() as logged, Agent(settings) as agent, sparklog.connect(agent.address) as log:

        def show() -> tuple[int, str]:
            found = CliRunner().invoke(app, ["status", "--bootstrap", agent.address])
            return found.exit_code, found.stdout

        def figures() -> str:
            assert agent._sources is not None
            return b"".join(Exposition(Collector(agent._sources)).text()).decode()

        def events() -> list[str]:
            return [each["event"] for each in logged if each["event"].startswith("deletions are")]

        log.create_topic("t", 1, {"retention.ms": 10**12})
        with log.producer() as producer:
            producer.send("t", b"0")
        log.flush_to_table()
        engine = DeltaTable(str(tmp_path / "topics" / "t"))
        engine.alter.set_table_properties({"delta.appendOnly": "true"})
        wait_until(lambda: events() == ["deletions are refused"], "a line in the log")
        code, shown = show()
        assert code == ExitCode.UNHEALTHY
        assert "deletions of t: its table is append-only (delta.appendOnly = true)" in shown
        assert f"{metric} 1" in figures()
        found = check_broker(LocalStore(tmp_path), SystemClock())
        assert ("deletions refused", CheckState.WARN) in [
            (each.check, each.state) for each in found
        ]
        with log.producer() as producer:
            producer.send("t", b"1")
        log.flush_to_table()
        with pytest.raises(errors.PolicyViolation, match=r"unset it"):
            log.delete_records("t", {0: 1})
        assert log.read("t").num_rows == len(DeltaTable(engine.table_uri).to_pyarrow_table()) == 2
        assert log.describe("t").partitions[0].start == 0
        engine = DeltaTable(engine.table_uri)
        engine.alter.set_table_properties({"delta.appendOnly": "false"})
        wait_until(lambda: len(events()) == 2, "another line in the log")
        assert events()[1] == "deletions are accepted again"
        assert show()[0] == ExitCode.OK
        assert f"{metric} 0" in figures()
        assert log.delete_records("t", {0: 1}) == {0: 1}
    page, alerts = (DOCS / "operations.md", DOCS / "operations" / "alerts.yaml")
    assert all(text in page.read_text() for text in (metric.partition("{")[0], *events()))
    assert f"expr: {metric.partition('{')[0]} > 0" in alerts.read_text()


def test_a_producer_is_told_why_its_records_wait(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The first refusal is a warning, which a program prints, and the record arrives later."""
    with sparklog.connect(world.agent.address) as log, log.producer() as producer:
        world.store.free = 10
        future = producer.send("t", b"x")
        wait_until(lambda: bool(caplog.records), "a warning")
        assert "records to t are sent again: No space is left" in caplog.text
        world.store.free = None
        assert future.result(30.0).offset == 0


def test_every_state_is_documented_and_has_an_alert() -> None:
    """The page for operators lists all of them, and a rule of Prometheus covers the metric."""
    in_its_own_test = {Work.REQUESTS, Work.AUDIT_LINES}  # test_acl_enforcement, test_audit
    assert {work for work, _, _ in STATES} | in_its_own_test == {*Work}
    page = (DOCS / "operations.md").read_text()
    for work in Work:
        assert f'sparklog_work_refused{{work="{work}"}}' in page
        assert f"`{work} are refused`, `{work} are accepted again`" in page
    assert "expr: sparklog_work_refused > 0" in (DOCS / "operations" / "alerts.yaml").read_text()
