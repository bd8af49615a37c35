"""Metrics of a cluster: those of each of several brokers, and their sums."""

from __future__ import annotations

import dataclasses
import json
import socket
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

import sparklog
from sparklog import errors, limits
from sparklog.broker.agent import Agent
from sparklog.broker.metrics.collection import Collector
from sparklog.broker.metrics.elsewhere import LAG_ASK_SECONDS
from sparklog.broker.metrics.exposition import Exposition
from sparklog.broker.metrics.overview import BrokerOverview
from sparklog.broker.position_lag import LAG_READ_SECONDS, LagAnswers
from sparklog.cli import app
from sparklog.client.connection import ask
from sparklog.formats.flight_messages import GroupPosition, GroupPositions
from sparklog.storage.metadata.identity import Ask
from tests.contract.test_members import Members, members, until
from tests.support.metrics import Values, parsed
from tests.support.standing import standing

CONTROLLER = "kafka_controller_kafkacontroller"


@pytest.fixture(name="cluster")
def _cluster() -> Iterator[Members]:
    """Three members; topic t has two partitions at each, and u one."""
    with capture_logs(), members(1, 2, 3) as found:
        with sparklog.connect(found.addresses) as log:
            log.create_topic("t", 6)
            log.create_topic("u", 3)
        for agent in found.agents.values():
            found.wait_for_topic(agent, "u")
        yield found


@pytest.fixture(name="patient")
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaders and readers of ages get the time they need, on a busy machine too."""
    for name in ("metrics.elsewhere.LAG_ASK", "metrics.collection.LAG", "position_lag.LAG_READ"):
        monkeypatch.setattr(f"sparklog.broker.{name}_SECONDS", 30.0)


def metrics(agent: Agent, ask: Ask = ask) -> Values:
    """The metrics of a member that can ask the others."""
    assert agent._sources is not None
    collector = Collector(dataclasses.replace(agent._sources, ask=ask))
    return parsed(b"".join(Exposition(collector).text()).decode())


def at(values: Values, name: str, **labels: object) -> dict[int, float]:
    """The samples of a family with these labels, by partition."""
    wanted = {(label, str(value)) for label, value in labels.items()}
    return {
        int(dict(found).get("partition", -1)): value
        for (known, found), value in values.items()
        if known == name and wanted <= found
    }


def commit(cluster: Members, group: str, offsets: Mapping[int, int]) -> None:
    """Writes four records to each partition of t, and commits offsets of an empty group."""
    with sparklog.connect(cluster.addresses) as log:
        with log.producer() as producer:
            for number in range(24):
                producer.send("t", b"%d" % number, partition=number % 6)
            producer.flush(30.0)
        log.commit_group_offsets(
            group, {("t", number): offset for number, offset in offsets.items()}
        )


def coordinator(cluster: Members, group: str) -> Agent:
    """The member that has the committed offsets of a group."""
    (found,) = (
        agent
        for agent in cluster.agents.values()
        if at(metrics(agent), "kafka_consumergroup_members", consumergroup=group)
    )
    return found


def test_the_controller_tells_of_the_cluster(cluster: Members) -> None:
    """Sums over all brokers are those of the cluster, as with Kafka's."""
    every = {broker: metrics(agent) for broker, agent in cluster.agents.items()}
    found = {
        name: {broker: at(values, f"{CONTROLLER}_{name}")[-1] for broker, values in every.items()}
        for name in ("activecontrollercount", "activebrokercount", "globaltopiccount")
    }
    controller, topics = cluster.metadata.controller, len(cluster.metadata.topics)
    for name, value in zip(found, (1, 3, topics), strict=True):
        assert found[name] == {broker: value * (broker == controller) for broker in every}, name
    partitions = sum(each.partition_count for each in cluster.metadata.topics.values())
    total = sum(at(values, f"{CONTROLLER}_globalpartitioncount")[-1] for values in every.values())
    led = sum(
        at(values, "kafka_server_replicamanager_leadercount")[-1] for values in every.values()
    )
    assert total == led == partitions
    assert all(at(values, "kafka_brokers")[-1] == 3 for values in every.values())
    assert sum(at(v, "kafka_topic_partitions", topic="t")[-1] for v in every.values()) == 6


def test_partitions_without_a_leader_are_counted(
    cluster: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the controller, while it cannot give the partitions of a dead broker to others."""
    agent = cluster.agents[cluster.metadata.controller]
    controller = agent.cluster.controller
    other, lost = cluster.agents.keys() - {agent._leadership.broker}
    led = at(metrics(cluster.agents[lost]), "kafka_server_replicamanager_leadercount")[-1]

    def fail(*_: object, **__: object) -> None:
        raise errors.CorruptObject(path="x", check="its checksum is wrong")

    with monkeypatch.context() as patch:
        patch.setattr(controller, "_fail_over", fail)
        cluster.kill(lost)
        until(lambda: bool(controller.dead))
        values = metrics(agent)
        assert at(values, f"{CONTROLLER}_offlinepartitionscount")[-1] == led >= 3
        assert at(values, "kafka_brokers")[-1] == 2
        assert at(values, f"{CONTROLLER}_activebrokercount")[-1] == 2
        values = metrics(cluster.agents[other])
        assert at(values, f"{CONTROLLER}_offlinepartitionscount")[-1] == 0
    until(lambda: at(metrics(agent), f"{CONTROLLER}_offlinepartitionscount")[-1] == 0)
    until(lambda: at(metrics(agent), "kafka_brokers")[-1] == 2)


def test_partitions_that_cannot_be_restored_are_counted(cluster: Members) -> None:
    """By their new leader: they are not blocked here, and no client is served."""
    agent = cluster.agents[3]
    sources, table = agent._sources, agent.parts.led_partitions
    assert sources is not None
    collector, topic = Collector(sources), table.topic("t")
    assert collector._stuck(topic) == 0
    led, topic.partitions = topic.partitions, {}
    table.is_takeover_stuck = True
    assert collector._stuck(topic) == len(led) == 2
    topic.partitions = led


@pytest.mark.usefixtures("patient")
def test_a_group_is_told_by_its_coordinator_alone(cluster: Members) -> None:
    """With its lag in all partitions, whichever broker leads them."""
    offsets = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 0}
    commit(cluster, "g", offsets)
    agent = coordinator(cluster, "g")
    values = metrics(agent)
    group = {"consumergroup": "g", "topic": "t"}
    assert at(values, "kafka_consumergroup_current_offset", **group) == offsets
    lag = {number: 4 - offset for number, offset in offsets.items()}
    assert at(values, "kafka_consumergroup_lag", **group) == lag
    assert at(values, "kafka_consumergroup_lag_sum", **group) == {-1: sum(lag.values())}
    ages = at(values, "kafka_consumergroup_group_lag_seconds", group="g", topic="t")
    assert ages.keys() == offsets.keys()
    assert ages[4] == 0
    assert all(0 < age < 60 for number, age in ages.items() if number != 4)
    assert at(values, "sparklog_lag_seconds_unresolved")[-1] == 0
    assert agent._sources is not None
    (shown,) = BrokerOverview(dataclasses.replace(agent._sources, ask=ask)).figures().groups
    assert (shown.group, shown.lag) == ("g", sum(lag.values()))
    assert shown.lag_seconds == pytest.approx(max(ages.values()), abs=10)


@pytest.mark.usefixtures("patient")
def test_lag_at_a_broker_that_does_not_answer_is_left_out(cluster: Members) -> None:
    """No guess takes its place, and no sum is without it; the committed offsets stay."""
    commit(cluster, "g", dict.fromkeys(range(6), 1))
    agent = coordinator(cluster, "g")
    sources = agent._sources
    assert sources is not None
    (silent, *_) = cluster.agents.keys() - {agent._leadership.broker}

    def ask_some(address: str, action: str, request: msgspec.Struct, **options: Any) -> Any:
        if address == cluster.agents[silent].address:
            raise errors.BrokerUnavailable(address=address, reason="it is silent")
        return ask(address, action, request, **options)

    values = metrics(agent, ask_some)
    group = {"consumergroup": "g", "topic": "t"}
    unknown = {n for n, leader in enumerate(cluster.leaders("t")) if leader == silent}
    assert len(unknown) == 2
    assert at(values, "kafka_consumergroup_lag", **group).keys() == {*range(6)} - unknown
    assert at(values, "kafka_consumergroup_current_offset", **group).keys() == {*range(6)}
    assert at(values, "kafka_consumergroup_lag_sum", **group) == {}
    (shown,) = BrokerOverview(dataclasses.replace(sources, ask=ask_some)).figures().groups
    assert (shown.lag, shown.is_whole) == (12, False)
    assert at(values, "sparklog_lag_seconds_unresolved")[-1] == 2


@pytest.mark.usefixtures("patient")
def test_lag_of_a_group_that_commits_meanwhile(cluster: Members) -> None:
    """It is that of the offsets about which the leaders were asked."""
    commit(cluster, "g", dict.fromkeys(range(6), 1))
    agent = coordinator(cluster, "g")

    def ask_late(address: str, action: str, request: msgspec.Struct, **options: Any) -> Any:
        with sparklog.connect(cluster.addresses) as log:
            log.commit_group_offsets("g", {("t", number): 2 for number in range(6)})
        return ask(address, action, request, **options)

    values = metrics(agent, ask_late)
    group = {"consumergroup": "g", "topic": "t"}
    assert at(values, "kafka_consumergroup_current_offset", **group) == dict.fromkeys(range(6), 1)
    assert at(values, "kafka_consumergroup_lag", **group) == dict.fromkeys(range(6), 3)
    ages = at(values, "kafka_consumergroup_group_lag_seconds", group="g", topic="t")
    assert ages.keys() == {*range(6)}


def test_ages_that_a_leader_reads_for_long_are_left_out(
    cluster: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lag in offsets is there without them."""
    commit(cluster, "g", dict.fromkeys(range(6), 1))
    agent = coordinator(cluster, "g")
    monkeypatch.setattr(LagAnswers, "_made_us", lambda *_: time.sleep(1.0))
    values = metrics(agent)
    found = at(values, "kafka_consumergroup_lag", consumergroup="g", topic="t")
    assert found == dict.fromkeys(range(6), 3)
    ages = at(values, "kafka_consumergroup_group_lag_seconds", group="g", topic="t")
    assert len(ages) == 2
    assert at(values, "sparklog_lag_seconds_unresolved")[-1] == 4


def test_a_leader_that_hangs_is_asked_for_half_a_second(
    cluster: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port that accepts and says nothing, as that of a stopped process."""
    commit(cluster, "g", dict.fromkeys(range(6), 1))
    agent = coordinator(cluster, "g")
    core = agent.parts.broker
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        known = {
            broker: msgspec.structs.replace(each, flight=f"{host}:{port}")
            for broker, each in core.members.up().items()
        }
        monkeypatch.setattr(core.members, "up", lambda: known)
        granted: list[float] = []

        def ask_unprobed(address: str, action: str, request: msgspec.Struct, **options: Any) -> Any:
            granted.append(options["timeout_seconds"])
            return ask(address, action, request, is_probed=False, **options)

        began = time.monotonic()
        values = metrics(agent, ask_unprobed)
        assert time.monotonic() - began < limits.ACTION_TIMEOUT_SECONDS
    assert granted
    assert max(granted) <= LAG_ASK_SECONDS
    found = at(values, "kafka_consumergroup_lag", consumergroup="g", topic="t")
    assert len(found) == 2  # those that it leads itself


def test_a_leader_answers_ends_while_it_reads(
    cluster: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several coordinators ask at the same time; only ages have to be read."""
    commit(cluster, "g", dict.fromkeys(range(6), 1))
    core = cluster.agents[1].parts.broker
    topic = core._led_partitions.topic("t")
    asked = GroupPositions(positions=[GroupPosition(topic.topic_id, n, 1) for n in range(6)])
    led = {number for number in range(6) if cluster.leaders("t")[number] == 1}
    with monkeypatch.context() as patient:
        patient.setattr("sparklog.broker.position_lag.LAG_READ_SECONDS", 30.0)
        whole = core.lags.answer(asked).lags
    assert {number for number, each in enumerate(whole) if each.end == 4} == led
    assert all((each.made_us is not None) == (number in led) for number, each in enumerate(whole))
    assert core.lags._reading.acquire()
    began = time.monotonic()
    short = core.lags.answer(asked).lags
    assert time.monotonic() - began < 50 * LAG_READ_SECONDS
    assert [each.end for each in short] == [each.end for each in whole]
    assert all(each.made_us is None for each in short)
    core.lags._reading.release()


@pytest.mark.usefixtures("patient")
def test_a_leader_that_is_asked_too_much_answers_in_turns(
    cluster: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request has a bounded number of positions."""
    monkeypatch.setattr(limits, "LAG_POSITIONS", 1)
    commit(cluster, "g", dict.fromkeys(range(6), 1))
    values = metrics(coordinator(cluster, "g"))
    found = at(values, "kafka_consumergroup_lag", consumergroup="g", topic="t")
    assert found == dict.fromkeys(range(6), 3)


def test_processes_ask_each_other(tmp_path: Path) -> None:
    """`sparklog broker` does so without further settings."""
    config = tmp_path / "broker.toml"
    config.write_text('[metrics]\nlisten = "127.0.0.1:0"\n')
    root = tmp_path / "root"
    options = "--config", str(config), "--id"
    with standing(root, *options, "1") as first, standing(root, *options, "2") as second:
        describe = ["cluster", "describe", "--root", str(root)]
        until(lambda: CliRunner().invoke(app, describe).stdout.count(" up ") == 2)
        with sparklog.connect(f"{first.flight},{second.flight}") as log:
            log.create_topic("t", 4)
            with log.producer() as producer:
                for number in range(8):
                    producer.send("t", b"x", partition=number % 4)
            log.commit_group_offsets("g", {("t", number): 1 for number in range(4)})
        served = []
        for broker in (first, second):
            status = ["status", "--json", "--bootstrap", broker.flight]
            where = json.loads(CliRunner().invoke(app, status).stdout)["broker"]["metrics"]
            served.append(f"http://{where}/metrics")

        def lags() -> list[dict[int, float]]:
            """The lag that each reports; a busy leader may miss the half second of one scrape."""
            found = []
            for address in served:
                with urllib.request.urlopen(address, timeout=30) as reply:
                    values = parsed(reply.read().decode())
                found.append(at(values, "kafka_consumergroup_lag", consumergroup="g"))
            return sorted(found, key=len)

        until(lambda: lags() == [{}, {0: 1, 1: 1, 2: 1, 3: 1}])
