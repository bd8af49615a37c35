"""The commands of a cluster's operator, against members that run."""

from __future__ import annotations

import json
import os
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import sparklog
from sparklog.cli import app
from sparklog.cli.shared import ExitCode
from sparklog.storage.liveness import Phase
from sparklog.storage.objects.memory import named_store
from sparklog.storage.overview import BrokerState
from tests.contract.test_members import Members, until


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the variables that name a log from the environment."""
    for name in list(os.environ):
        if name.startswith("SPARKLOG_"):
            monkeypatch.delenv(name)


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
    """The command line in this process; whatever is no exit code is raised."""
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


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
            assert 0 <= each["heartbeat_age_seconds"] < 2
        assert found["leaders"] is None
    words = run("cluster", "describe", "--topics", "--root", three.root).stdout.splitlines()
    controller = f"broker {three.metadata.controller}"
    assert [f"controller   {controller}", "topics       1, of 6 partitions"] == words[2:4]
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
    assert "no leader    t-1: broker 1 does not serve it" in shown.stdout.splitlines()
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
