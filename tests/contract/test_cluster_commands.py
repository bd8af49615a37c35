"""The commands of a cluster's operator, against members that run."""

from __future__ import annotations

import json
import os
import signal
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

import sparklog
from sparklog import cluster as clusters
from sparklog import doctor, errors, limits
from sparklog import status as statuses
from sparklog.broker.agent import Agent
from sparklog.cli import app
from sparklog.client.connection import Channel
from sparklog.clock import SystemClock
from sparklog.cluster import RootView, ask, drain
from sparklog.doctor import CheckState
from sparklog.formats.flight_messages import NO_ACTION, BrokerStatus, DrainBroker, Empty, LogLevel
from sparklog.security.credentials import Credentials
from sparklog.storage.metadata.cluster_file import read_cluster
from sparklog.storage.metadata.liveness import Phase
from sparklog.storage.metadata.model import BrokerKind
from sparklog.storage.metadata.overview import BrokerState
from sparklog.storage.metadata.placement import MOVES_AT_ONCE
from sparklog.storage.metadata.store import META_SNAPSHOT_EVERY, MetadataStore
from sparklog.storage.objects.memory import named_store
from sparklog.terminal.commands import ExitCode
from tests.contract.test_members import Members, settings, until, values, write
from tests.support.standing import standing


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the variables that name a log from the environment."""
    for name in list(os.environ):
        if name.startswith("SPARKLOG_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    """Keeps the log lines of members out of what commands print."""
    with capture_logs():
        yield


class Cluster(Members):
    """Members of a root in memory that commands can name."""

    def __init__(self) -> None:
        super().__init__()
        self.root = f"memory://{uuid.uuid4()}"
        self.store = named_store(self.root.removeprefix("memory://"))

    @property
    def targets(self) -> list[tuple[str, str]]:
        """The options that name the cluster: by its root, and by each broker."""
        addresses = [("--bootstrap", agent.address) for agent in self.agents.values()]
        return [("--root", self.root), *addresses]

    def describe(self, *target: str) -> tuple[int, dict[str, Any]]:
        """The exit code of `cluster describe`, and what it prints as JSON."""
        result = run("cluster", "describe", "--json", *(target or ("--root", self.root)))
        return result.exit_code, json.loads(result.stdout)

    def states(self, *target: str) -> dict[int, str]:
        return {each["broker"]: each["state"] for each in self.describe(*target)[1]["brokers"]}

    def loads(self) -> dict[int, int]:
        """The number of partitions that each broker leads."""
        found: Counter[int] = Counter()
        for topic in self.metadata.topics.values():
            found.update(topic.leaders)
        return dict(found)

    def create(self, topic: str, partitions: int) -> None:
        """Creates a topic that every member serves."""
        with sparklog.connect(next(iter(self.agents.values())).address) as log:
            log.create_topic(topic, partitions)
        for agent in self.agents.values():
            self.wait_for_topic(agent, topic)


@pytest.fixture(name="cluster")
def _cluster() -> Iterator[Cluster]:
    """A root without a member; those that are started stop at the end."""
    found = Cluster()
    try:
        yield found
    finally:
        for agent in found.agents.values():
            agent.stop()


@pytest.fixture(name="three")
def _three(cluster: Cluster) -> Cluster:
    """Three members that know each other."""
    for broker in (1, 2, 3):
        cluster.start(broker)
    for agent in cluster.agents.values():
        cluster.wait_for_members(agent)
    return cluster


def run(*arguments: str) -> Result:
    """The command line in this process; whatever is not an exit code is raised."""
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


# ------------------------------------------------------------------------------ status


def status(*target: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the report of `sparklog status`."""
    result = run("status", "--json", *target)
    return result.exit_code, json.loads(result.stdout)


def test_all_members_are_in_the_status(three: Cluster) -> None:
    """Unpublished bytes are summed, and a topic that one of them cannot publish is named.

    `sparklog top` shows one of them, and names the others.
    """
    three.create("t", 6)
    three.wait_for_topic(three.agents[3], "t")
    for agent in three.agents.values():
        agent.parts.led_partitions.backlog.unpublished_bytes = 100
    code, found = status("--root", three.root)
    assert (code, found["state"], found["brokers"]) == (ExitCode.OK, "served", 3)
    assert found["broker"]["broker"] == three.metadata.controller
    assert (found["topics"], found["partitions"], found["unpublished_bytes"]) == (1, 6, 300)
    topics = [three.agents[broker].parts.led_partitions.topic("t") for broker in (2, 3)]
    for topic in topics:
        topic.held_back = "the disk is full"
    code, found = status("--root", three.root)
    held_back = [{"topic": "t", "reason": "the disk is full"}]  # once, not for each leader
    assert (code, found["held_back"]) == (ExitCode.UNHEALTHY, held_back)
    picture = " ".join(run("top", "--once", "--root", three.root).stdout.split())
    assert "3 of 3 brokers answer" in picture
    for topic in topics:
        topic.partitions = {}  # others lead them now
    assert status("--root", three.root)[0] == ExitCode.OK


def test_a_member_that_is_alive_and_silent(three: Cluster) -> None:
    """It is named with the reason, and the exit code says that something is wrong."""
    flight = three.agents[2].listeners.flight
    assert flight is not None
    flight.close()
    code, found = status("--root", three.root)
    assert (code, found["state"], found["brokers"]) == (ExitCode.UNHEALTHY, "served", 2)
    assert found["reason"].startswith("broker 2: ")
    assert ", but not by broker 2: " in run("status", "--root", three.root).stdout
    (served, silent) = doctor.check_broker(three.store, SystemClock())
    assert (served.state, silent.state) == (CheckState.OK, CheckState.WARN)


def test_a_member_that_starts_again_meanwhile(
    three: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked at its new address."""
    address, asked = three.agents[2].address, statuses._ask

    def ask_then_start(where: str, credentials: Credentials) -> BrokerStatus:
        if where == address and three.agents[2].address == address:
            three.agents.pop(2).stop()
            three.start(2)
        return asked(where, credentials)

    monkeypatch.setattr(statuses, "_ask", ask_then_start)
    code, found = status("--root", three.root)
    assert three.agents[2].address != address
    assert (code, found["brokers"], found["reason"]) == (ExitCode.OK, 3, "")


def test_the_status_while_members_end(tmp_path: Path) -> None:
    """The log is served as long as any of them lives, whichever is the controller."""
    root = "--root", str(tmp_path)
    with standing(tmp_path, "--id", "1") as first, standing(tmp_path, "--id", "2") as second:
        until(lambda: run("cluster", "describe", *root).stdout.count(" up ") == 2)
        assert status(*root)[1]["broker"]["broker"] == 1
        first.end(signal.SIGKILL)
        code, found = status(*root)
        assert (code, found["state"], found["brokers"]) == (ExitCode.OK, "served", 1)
        assert found["broker"]["broker"] == 2
        second.end(signal.SIGKILL)
        code, found = status(*root)
        assert (code, found["state"], found["brokers"]) == (ExitCode.NO_BROKER, "died", 0)


# ------------------------------------------------------------------------------ describe


def test_members_are_described(three: Cluster) -> None:
    """The root and each broker tell the same of all of them."""
    three.create("t", 6)
    for target in three.targets:
        code, found = three.describe(*target)
        assert code == ExitCode.OK
        assert found["controller"] == three.metadata.controller
        assert found["root"] == three.store.uri
        assert (found["topics"], found["partitions"], found["lost"]) == (1, 6, [])
        for each in found["brokers"]:
            agent = three.agents[each["broker"]]
            assert (each["state"], each["partitions"], each["epoch"]) == ("up", 2, 1)
            assert (each["address"], each["kafka"]) == (agent.address, agent.kafka_address)
            assert each["rack"] == f"rack {each['broker']}"
            assert (each["pid"], each["version"]) == (os.getpid(), sparklog.__version__)
            assert 0 <= each["heartbeat_age_seconds"] < 30
        assert found["leaders"] is None
    words = run("cluster", "describe", "--topics", "--root", three.root).stdout.splitlines()
    controller = f"broker {three.metadata.controller}"
    facts = [
        f"controller     {controller}",
        "feature level  4",
        "topics         1, of 6 partitions",
    ]
    assert words[2:5] == facts
    leaders = "2 by broker 1, 2 by broker 2, 2 by broker 3"
    assert words[-1].split(maxsplit=2) == ["t", "6", leaders]


def test_a_root_without_brokers_is_described(cluster: Cluster) -> None:
    """All members have stopped: they are named, nothing is written, and the exit code is 4."""
    cluster.start(1)
    cluster.create("t", 2)
    cluster.agents.pop(1).stop()
    before = {stat.name: stat for stat in cluster.store.walk("")}
    code, found = cluster.describe()
    assert code == ExitCode.NO_BROKER
    assert [(each["state"], each["partitions"]) for each in found["brokers"]] == [("stopped", 2)]
    assert found["lost_partitions"] == 2
    shown = run("cluster", "describe", "--root", cluster.root)
    assert "no leader      t-1: broker 1 does not serve it" in shown.stdout.splitlines()
    assert {stat.name: stat for stat in cluster.store.walk("")} == before


def test_a_member_that_dies_is_seen_to(three: Cluster) -> None:
    """It is dead for every observer, and all is well once the others lead its partitions."""
    three.create("t", 6)
    three.kill(2)
    until(lambda: three.states()[2] == BrokerState.DEAD)
    until(lambda: three.describe()[0] == ExitCode.OK)
    for target in three.targets:
        code, found = three.describe(*target)
        assert (code, found["lost_partitions"]) == (ExitCode.OK, 0)
        assert {
            each["broker"]: each["partitions"] for each in found["brokers"]
        } == three.loads() | {2: 0}


def test_a_leader_that_does_not_serve_needs_attention(cluster: Cluster) -> None:
    """A member that is starting leads partitions that no client can use: exit code 3."""
    cluster.start(1)
    cluster.create("t", 2)
    cluster.start(2)
    cluster.wait_for_members(cluster.agents[2])
    cluster.agents[1]._phase = Phase.STARTING
    until(lambda: cluster.states()[1] == BrokerState.STARTING)
    code, found = cluster.describe("--bootstrap", cluster.agents[2].address)
    assert (code, found["lost_partitions"]) == (ExitCode.UNHEALTHY, 2)
    assert found["lost"][0] == {"topic": "t", "partition": 0, "leader": 1}


def test_what_is_no_cluster(cluster: Cluster) -> None:
    """A folder without a root, and an address without a broker, are errors of one line."""
    cluster.start(1)
    for target in (("--root", "memory://nothing"), ("--bootstrap", "127.0.0.1:1")):
        result = run("cluster", "describe", *target)
        assert result.exit_code == ExitCode.FAILED
        assert (result.stdout, result.stderr.count("\n")) == ("", 1)
    # A dead address among several does not matter.
    several = f"127.0.0.1:1,{cluster.agents[1].address}"
    assert cluster.describe("--bootstrap", several)[0] == ExitCode.OK


def test_a_broker_of_an_older_release(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not know the commands: the error says so; from the root it is described."""
    address = cluster.start(1).address

    def refuse(_channel: Channel, name: str, *_: object, **__: object) -> None:
        raise errors.BadRequest(reason=f"{NO_ACTION}{name!r}")

    monkeypatch.setattr(Channel, "action", refuse)
    for command in ("describe", "balance", "upgrade"):
        result = run("cluster", command, "--bootstrap", address)
        assert result.exit_code == ExitCode.FAILED
        assert f"broker at {address} runs an older release" in result.stderr
    assert cluster.states() == {1: "up"}


# ------------------------------------------------------------------------------ drain


@pytest.mark.parametrize("by_root", [True, False])
def test_a_member_is_drained(three: Cluster, *, by_root: bool) -> None:
    """The others lead its partitions once the command returns; another drain changes nothing."""
    three.create("t", 6)
    with sparklog.connect(three.addresses) as log:
        write(log, "t", range(60), 6)
        # The drained broker is the one that is asked for the cluster, until it stops.
        agent = three.agents.pop(2)
        target = ("--root", three.root) if by_root else ("--bootstrap", agent.address)
        result = run("broker", "drain", "--id", "2", *target)
        assert result.exit_code == ExitCode.OK, result.stderr
        moved = "broker 2 has stopped; 2 partitions moved: 1 to broker 1, 1 to broker 3\n"
        assert result.stdout == moved
        assert result.stderr.splitlines()[0] == "sparklog: broker 2 leads 2 partitions"
        assert result.stderr.splitlines()[-1] == "sparklog: broker 2 leads 0 partitions"
        assert agent.wait(30.0)
        assert three.loads() == {1: 3, 3: 3}
        assert values(log, "t", 60).total() == 60
    code, found = three.describe()
    assert (code, found["brokers"][1]["state"]) == (ExitCode.OK, "stopped")
    again = run("broker", "drain", "--id", "2", "--root", three.root)
    assert (again.exit_code, again.stdout) == (ExitCode.OK, "broker 2 had already stopped\n")


def test_an_unknown_member_is_not_drained(three: Cluster) -> None:
    """The error names those that there are."""
    result = run("broker", "drain", "--id", "7", "--root", three.root)
    assert result.exit_code == ExitCode.FAILED
    assert "no broker with this id; its brokers are 1, 2, 3" in result.stderr
    assert set(three.states().values()) == {"up"}


@pytest.mark.parametrize("by_root", [True, False])
def test_the_only_member_is_drained_on_demand(cluster: Cluster, *, by_root: bool) -> None:
    """No broker takes its partitions, so the command refuses, unless --alone is given."""
    agent = cluster.start(1)
    cluster.create("t", 2)
    cluster.start(2)
    cluster.wait_for_members(agent)
    cluster.kill(2)
    target = ("--root", cluster.root) if by_root else ("--bootstrap", agent.address)
    until(lambda: cluster.states()[2] == BrokerState.DEAD)
    until(lambda: not cluster.describe()[1]["lost_partitions"])
    refused = run("broker", "drain", "--id", "1", *target)
    assert refused.exit_code == ExitCode.FAILED
    assert "no other broker is up to take its partitions" in refused.stderr
    assert cluster.states()[1] == BrokerState.UP
    result = run("broker", "drain", "--id", "1", "--alone", *target)
    assert result.exit_code == ExitCode.OK, result.stderr
    assert result.stdout == (
        "broker 1 has stopped; 0 partitions moved\n"
        "2 partitions are not served until the next broker starts\n"
    )
    assert cluster.agents.pop(1).wait(30.0)


def test_the_broker_itself_refuses(three: Cluster) -> None:
    """A request that names another broker, epoch or cluster stops nothing, nor does one alone."""
    agent = three.agents[1]
    epoch = three.metadata.brokers[1].epoch
    cluster_id = three.describe()[1]["cluster_id"]
    wrong = [(cluster_id, 2, epoch), (cluster_id, 1, epoch + 1), ("another", 1, epoch)]
    for name, broker, of_epoch in wrong:
        request = DrainBroker(cluster_id=name, broker=broker, epoch=of_epoch, alone=True)
        with pytest.raises(errors.CannotDrain, match="has its address now"):
            ask(agent.address, "broker.drain", request)
    right = DrainBroker(cluster_id=cluster_id, broker=1, epoch=epoch)
    for other in (2, 3):
        three.agents.pop(other).stop()
        until(lambda gone=other: three.states()[gone] == BrokerState.STOPPED)  # type: ignore[misc]
    until(lambda: set(three.loads()) <= {1})
    until(lambda: len(agent.parts.broker.members.up()) == 1)
    with pytest.raises(errors.CannotDrain, match="no other broker"):
        ask(agent.address, "broker.drain", right)
    assert not agent.wait(0.2)


def test_a_broker_of_a_program_is_not_drained() -> None:
    """It ends with its program, which would only start another one."""
    store = named_store(str(uuid.uuid4()))
    agent = Agent(settings(0, join=False), store=store, kind=BrokerKind.EMBEDDED)
    with agent:
        status = ask(agent.address, "status", Empty())
        request = DrainBroker(
            cluster_id=status.cluster_id, broker=0, epoch=status.broker.epoch, alone=True
        )
        with pytest.raises(errors.CannotDrain, match="belongs to a program"):
            ask(agent.address, "broker.drain", request)
        assert not agent.wait(0.2)


def test_the_log_level_of_a_member_is_changed(tmp_path: Path) -> None:
    """The broker that is named changes it, by the root or any address, and logs the client.

    Another broker, an unknown one and an unknown level are refused.
    """
    target = ("--root", str(tmp_path))
    with standing(tmp_path, "--id", "1") as one, standing(tmp_path, "--id", "2") as two:
        assert run("broker", "log-level", "--id", "2", *target).stdout == "broker 2: info\n"
        changed = run("broker", "log-level", "warning", "--id", "2", "--bootstrap", one.flight)
        assert changed.stdout == "broker 2: warning\n"
        assert run("broker", "log-level", "--id", "2", *target).stdout == "broker 2: warning\n"
        assert run("broker", "log-level", "--id", "1", *target).stdout == "broker 1: info\n"
        refused = run("broker", "log-level", "debug", "--id", "9", *target)
        assert "Broker 9 is not running; the ids of running brokers: 1, 2" in refused.stderr
        assert run("broker", "log-level", "loud", "--id", "1", *target).exit_code == 2
        with pytest.raises(errors.BadRequest, match="has the address of broker 1 now"):
            ask(two.flight, "broker.log_level", LogLevel(broker=1, level="debug"))
        _, told = two.end(signal.SIGTERM)
    lines = [json.loads(line) for line in told.splitlines() if "altered the log level" in line]
    assert [(each["before"], each["now"]) for each in lines] == [("info", "warning")]
    assert lines[0]["client"].startswith("127.0.0.1:")
    assert '"level": "info"' not in told.partition("altered the log level")[2].partition("\n")[2]


def test_the_log_level_of_a_program_is_its_own() -> None:
    """A broker of a program that has configured its logging shows no level, and refuses one."""
    store = named_store(str(uuid.uuid4()))
    with Agent(settings(0, join=False), store=store, kind=BrokerKind.EMBEDDED) as agent:
        assert ask(agent.address, "broker.log_level", LogLevel(broker=0)).level == ""
        with pytest.raises(errors.BadRequest, match="configured its logging itself"):
            ask(agent.address, "broker.log_level", LogLevel(broker=0, level="debug"))


def test_a_drain_that_takes_too_long(three: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's error counts the partitions that are left; the broker stops in the end."""
    three.create("t", 6)
    agent = three.agents.pop(2)
    proceed = threading.Event()
    handovers = agent.cluster.handovers
    give_all = handovers.drain

    def slow(deadline: float, *, leaving: Collection[int]) -> None:
        proceed.wait(30.0)
        give_all(deadline, leaving=leaving)

    monkeypatch.setattr(handovers, "drain", slow)
    command = ("broker", "drain", "--id", "2", "--timeout", "0.5", "--root", three.root)
    result = run(*command)
    assert result.exit_code == ExitCode.FAILED
    assert "the drain of broker 2 (partitions left: 2) did not finish" in result.stderr
    assert three.states()[2] == BrokerState.DRAINING
    assert three.describe()[0] == ExitCode.OK  # it serves until its partitions have moved
    with ThreadPoolExecutor(1) as pool:
        # The second command waits for the drain that is under way, which proceeds then.
        again = pool.submit(drain_by_hand, three, lambda _partitions: proceed.set())
        assert again.result(30.0) == {1: 1, 3: 1}
    assert agent.wait(30.0)
    assert three.loads() == {1: 3, 3: 3}


def drain_by_hand(three: Cluster, progress: Callable[[int], object]) -> Mapping[int, int]:
    """Drains member 2, and returns the numbers of partitions that have moved."""
    view = RootView(three.store, SystemClock(), waits=lambda _leaders, _seconds: None)
    return drain(view, SystemClock(), 2, progress=progress).moved


def test_members_are_drained_one_after_another(three: Cluster) -> None:
    """No partition is given to a member that has just stopped; the last one leads all."""
    three.create("t", 12)
    for broker in (1, 2):
        agent = three.agents.pop(broker)
        result = run("broker", "drain", "--id", str(broker), "--root", three.root)
        assert result.exit_code == ExitCode.OK, result.stderr
        assert broker == 1 or "to broker 1" not in result.stdout
        assert agent.wait(30.0)
    assert three.loads() == {3: 12}


def test_a_process_ends_by_a_drain(tmp_path: Path) -> None:
    """It ends with exit code 0, as by SIGTERM, and the other process leads its partitions."""
    root = "--root", str(tmp_path)
    with standing(tmp_path, "--id", "1") as first, standing(tmp_path, "--id", "2") as second:
        until(lambda: run("cluster", "describe", *root).stdout.count(" up ") == 2)
        with sparklog.connect(f"{first.flight},{second.flight}") as log:
            log.create_topic("t", 4)
            write(log, "t", range(20), 4)
            result = run("broker", "drain", "--id", "1", *root)
            assert result.exit_code == ExitCode.OK, result.stderr
            assert "2 partitions moved: 2 to broker 2" in result.stdout
            assert first.await_end()[0] == 0
            assert values(log, "t", 20).total() == 20
        assert run("cluster", "describe", *root).exit_code == ExitCode.OK


def test_options_of_a_broker_before_a_command() -> None:
    """They are refused: they would be lost, and the wrong broker might be stopped."""
    result = run("broker", "--id", "3", "drain", "--id", "4", "--root", "memory://x")
    assert result.exit_code == ExitCode.USAGE
    assert "pass options after 'drain'" in result.stderr


# ------------------------------------------------------------------------------ balance


def lean(cluster: Cluster) -> None:
    """Starts a member alongside one that leads everything."""
    cluster.start(1)
    cluster.create("t", 20)
    cluster.create("u", 20)
    cluster.wait_for_members(cluster.start(2))
    assert cluster.loads() == {1: 40}


@pytest.mark.parametrize("by_root", [True, False])
def test_members_are_levelled(cluster: Cluster, *, by_root: bool) -> None:
    """A dry run says what will move; the command moves it at once, in several passes."""
    lean(cluster)
    target = ("--root", cluster.root) if by_root else ("--bootstrap", cluster.agents[2].address)
    with sparklog.connect(cluster.addresses) as log:
        write(log, "t", range(40), 20)
        planned = run("cluster", "balance", "--dry-run", *target)
        assert planned.exit_code == ExitCode.OK, planned.stderr
        *moves, _, _, first, second, total = planned.stdout.splitlines()
        assert {tuple(each.split()[2:]) for each in moves[1:]} == {("1", "2")}
        assert len(moves[1:]) == 20 > MOVES_AT_ONCE
        assert (first.split(), second.split()) == (["1", "40", "20"], ["2", "0", "20"])
        assert total == "20 partitions would move"
        assert cluster.loads() == {1: 40}

        done = run("cluster", "balance", *target)
        assert done.exit_code == ExitCode.OK, done.stderr
        assert done.stdout.splitlines()[1:] == [first, second, "20 partitions moved"]
        assert cluster.loads() == {1: 20, 2: 20}
        assert [f"sparklog: {n} partitions moved" for n in (16, 20)] == done.stderr.splitlines()
        for topic in cluster.metadata.topics.values():
            assert Counter(topic.leaders) == {1: 10, 2: 10}
        assert values(log, "t", 40).total() == 40

    again = run("cluster", "balance", *target)
    assert again.stdout.splitlines()[-1] == "0 partitions moved"
    assert again.stderr == ""


def test_a_broker_that_leads_alone_is_level(cluster: Cluster) -> None:
    """There is nothing to move, and that is not an error."""
    agent = Agent(settings(0, join=False), store=cluster.store)
    with agent:
        with sparklog.connect(agent.address) as log:
            log.create_topic("t", 4)
        for options in ((), ("--dry-run",)):
            result = run("cluster", "balance", "--root", cluster.root, *options)
            assert result.exit_code == ExitCode.OK, result.stderr
            assert result.stdout.splitlines()[1].split() == ["0", "4", "4"]
    stopped = run("cluster", "balance", "--root", cluster.root)
    assert stopped.exit_code == ExitCode.FAILED
    assert "no broker is up" in stopped.stderr


def test_a_member_that_is_drained_gets_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Levelling a cluster while one member leaves moves nothing to that one."""
    lean(cluster)
    proceed = threading.Event()
    leaver = cluster.agents.pop(2)
    monkeypatch.setattr(
        leaver.cluster.handovers, "drain", lambda _deadline, **_: proceed.wait(30.0)
    )
    leaver.stop_soon("test")
    until(lambda: cluster.states()[2] == BrokerState.DRAINING)
    result = run("cluster", "balance", "--root", cluster.root)
    assert result.exit_code == ExitCode.OK, result.stderr
    assert result.stdout.splitlines()[-1] == "0 partitions moved"
    proceed.set()
    assert leaver.wait(30.0)
    assert cluster.loads() == {1: 40}


def test_partitions_that_do_not_move(cluster: Cluster) -> None:
    """A leader keeps a partition whose end is unknown: the command says so, with exit code 3."""
    lean(cluster)
    table = cluster.agents[1].parts.led_partitions
    for topic in table.topics():
        topic.in_doubt = "a test"
    result = run("cluster", "balance", "--root", cluster.root)
    assert result.exit_code == ExitCode.UNHEALTHY
    assert result.stdout.splitlines()[-1] == "0 partitions moved"
    assert "20 partitions should move: their leaders do not hand them over" in result.stderr
    assert cluster.loads() == {1: 40}
    for topic in table.topics():
        topic.in_doubt = None


def test_a_member_that_does_not_answer(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are levelled without it; in the end, the command fails with the reason."""
    lean(cluster)
    asked, silent = clusters.ask, cluster.agents[2].address

    def lossy(address: str, *arguments: Any, **options: Any) -> Any:
        if address == silent:
            raise errors.BrokerUnavailable(address=address, reason="a test")
        return asked(address, *arguments, **options)

    monkeypatch.setattr(clusters, "ask", lossy)
    result = run("cluster", "balance", "--timeout", "1", "--root", cluster.root)
    assert result.exit_code == ExitCode.FAILED
    assert silent in result.stderr
    assert cluster.loads() == {1: 20, 2: 20}


# ------------------------------------------------------------------------------ upgrade


def test_the_level_rises_once_all_members_know_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member of an older release holds it down, and refuses to start once it has risen."""
    monkeypatch.setattr(limits, "LEVEL", 1)
    cluster.start(1)
    cluster.create("t", 2)
    assert read_cluster(cluster.store).format_version == 3
    monkeypatch.setattr(limits, "LEVEL", 2)
    cluster.wait_for_members(cluster.start(2))
    for target in cluster.targets:
        held = run("cluster", "upgrade", *target)
        assert held.exit_code == ExitCode.OK, held.stderr
        assert held.stdout == "feature level 1: brokers 1 support no higher level\n"
    assert cluster.metadata.level == 1
    assert read_cluster(cluster.store).format_version == 3

    cluster.agents.pop(1).stop()
    cluster.wait_for_members(cluster.start(1))
    assert [each["level"] for each in cluster.describe()[1]["brokers"]] == [2, 2]
    risen = run("cluster", "upgrade", "--root", cluster.root)
    assert risen.stdout == "feature level 2, previously 1\n"
    for target in cluster.targets:
        assert cluster.describe(*target)[1]["level"] == 2
    again = run("cluster", "upgrade", "--root", cluster.root)
    assert again.stdout == "feature level 2: brokers 1, 2 support no higher level\n"

    # The members serve as before, and a later start reads the level from a snapshot as well.
    with sparklog.connect(cluster.addresses) as log:
        write(log, "t", range(20), 2)
        assert values(log, "t", 20).total() == 20
    for _ in range(META_SNAPSHOT_EVERY):
        MetadataStore(cluster.store, clock=SystemClock()).change(lambda metadata: metadata)
    assert cluster.metadata.level == 2
    assert read_cluster(cluster.store).format_version == 4

    for member in (1, 2):
        cluster.agents.pop(member).stop()
    version = cluster.metadata.version
    monkeypatch.setattr(limits, "LEVEL", 1)
    with pytest.raises(errors.FormatTooNew, match="has feature level 2, and this sparklog"):
        Agent(settings(3), store=cluster.store).start()
    monkeypatch.setattr(limits, "LEVEL", 2)
    assert 3 not in cluster.metadata.brokers
    assert cluster.metadata.version == version


def test_a_level_needs_a_broker(cluster: Cluster) -> None:
    """The command starts none: the error says that none is up."""
    cluster.start(1)
    cluster.agents.pop(1).stop()
    result = run("cluster", "upgrade", "--root", cluster.root)
    assert result.exit_code == ExitCode.FAILED
    assert "no broker is up" in result.stderr
