"""ACLs that are enforced: at every broker, at both listeners, and in copies of a root."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from typer.testing import CliRunner

import sparklog
from sparklog import errors
from sparklog.broker.agent import Agent
from sparklog.broker.refused_work import Work
from sparklog.cli import app
from sparklog.security.acl import Acl, Operation, ResourceType
from sparklog.security.state import Mode
from sparklog.settings import FlightSettings
from sparklog.storage.objects import open_store
from tests.support.acls import acl, set_acls
from tests.support.batches import Record, built
from tests.support.kafkas import Frames, broker, frames
from tests.support.secured import see
from tests.support.users import add_alice
from tests.support.waiting import wait_until

PRODUCE, FETCH, LIST_OFFSETS, DELETE_TOPICS = 0, 1, 2, 20
IN_FORCE_SECONDS = 1.0
READ = acl(ResourceType.TOPIC, "t", Operation.READ)
ALL = [
    acl(ResourceType.TOPIC, "*", Operation.ALL),
    acl(ResourceType.CLUSTER, "kafka-cluster", Operation.ALL),
]


def enforce(root: Path, *acls: Acl, mode: Mode = Mode.ENFORCE) -> None:
    """Replaces the ACLs of a root."""
    set_acls(open_store(str(root), {}), acls, mode=mode)


def cli(*arguments: str) -> tuple[int, str]:
    """Runs a command, and returns its exit code and its output."""
    found = CliRunner().invoke(app, [*arguments])
    return found.exit_code, found.output


def fetch_fields(wait_seconds: float = 0.0) -> dict[str, Any]:
    """Returns a Fetch of partition 0 of t from its start, which waits for a second record."""
    partition = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1_000_000}
    return {
        "replica_id": -1,
        "max_wait": timedelta(seconds=wait_seconds),
        "min_bytes": 1_000 if wait_seconds else 1,
        "max_bytes": 1_000_000,
        "isolation_level": 0,
        "session_id": 0,
        "session_epoch": -1,
        "topics": [{"topic": "t", "partitions": [partition]}],
        "forgotten_topics_data": (),
        "rack_id": "",
    }


def produce_fields() -> dict[str, Any]:
    """Returns a Produce of one record for partition 0 of t."""
    partition = {"index": 0, "records": built([Record(0, None, b"1")])}
    return {
        "transactional_id": None,
        "acks": -1,
        "timeout": timedelta(seconds=5),
        "topic_data": [{"name": "t", "partition_data": [partition]}],
    }


def code_of_fetch(client: Frames, wait_seconds: float = 0.0) -> ErrorCode:
    """Returns the code of the partition in the reply to a Fetch."""
    found = client.ask(FETCH, 11, fetch_fields(wait_seconds))
    (partition,) = found.responses[0].partitions
    assert bool(partition.records) == (partition.error_code is ErrorCode.none)
    return ErrorCode(partition.error_code)


@contextlib.contextmanager
def members(root: Path, count: int) -> Iterator[list[Agent]]:
    """Yields members of one cluster, with topic t and a record in it."""
    with contextlib.ExitStack() as stack:
        agents = [stack.enter_context(broker(root, id=number)) for number in range(1, count + 1)]
        with sparklog.connect(agents[0].address) as log:
            log.create_topic("t", 1)
            with log.producer() as producer:
                producer.send("t", b"0")
        yield agents


def test_a_change_is_in_force_at_every_broker(tmp_path: Path) -> None:
    """Promise: within a second of the clock of each broker, at connections that are open.

    The bound is ten seconds here, as other tests share the machine; the looks are 0.1 s apart.
    """
    describe = acl(ResourceType.TOPIC, "t", Operation.DESCRIBE)
    with members(tmp_path, 3) as agents, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(frames(each)) for each in agents]

        def codes() -> set[ErrorCode]:
            partition = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": -1}
            topic = {"name": "t", "partitions": [partition]}
            fields = {"replica_id": -1, "isolation_level": 0, "topics": [topic]}
            found = [each.ask(LIST_OFFSETS, 4, fields) for each in clients]
            return {ErrorCode(each.topics[0].partitions[0].error_code) for each in found}

        def in_force(*change: Acl, expected: set[ErrorCode]) -> None:
            enforce(tmp_path, *change)
            wait_until(
                lambda: codes() == expected,
                "the change is in force",
                patience_seconds=10 * IN_FORCE_SECONDS,
            )

        refused = {ErrorCode.topic_authorization_failed}
        in_force(expected=refused)
        in_force(describe, expected={ErrorCode.none, ErrorCode.not_leader_or_follower})
        in_force(expected=refused)


def test_a_right_that_is_lost_while_a_fetch_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: the records that arrive afterwards are not sent to it."""
    with members(tmp_path, 1) as (agent,), frames(agent) as client:
        enforce(tmp_path, READ, *ALL)
        see(agent)
        assert code_of_fetch(client) is ErrorCode.none
        with ThreadPoolExecutor(1) as pool, sparklog.connect(str(tmp_path)) as log:
            kafka = agent.listeners.kafka
            assert kafka is not None
            wait, waits = kafka.wait_for_append, threading.Event()

            def noted(*values: Any) -> Any:
                waits.set()
                return wait(*values)

            monkeypatch.setattr(kafka, "wait_for_append", noted)
            waiting = pool.submit(code_of_fetch, client, 30.0)
            assert waits.wait(30)
            enforce(tmp_path)
            see(agent)
            with log.producer() as producer:
                producer.send("t", bytes(2_000))
            assert waiting.result(timeout=30) is ErrorCode.topic_authorization_failed
            assert agent.parts.broker.partitions.status("t", 0).end == 2


def test_a_right_that_is_lost_in_the_middle_of_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: a request that changes many topics stops where the right ends."""
    with members(tmp_path, 1) as (agent,), frames(agent) as client:
        with sparklog.connect(agent.address) as log:
            log.create_topic("u", 1)
        enforce(tmp_path, *ALL)
        see(agent)
        topics = agent.parts.broker.topics
        delete = topics.delete

        def delete_and_lose(name: str, *, client: str) -> None:
            delete(name, client=client)
            enforce(tmp_path)
            see(agent)

        monkeypatch.setattr(topics, "delete", delete_and_lose)
        wanted = [{"name": each, "topic_id": None} for each in ("t", "u")]
        found = client.ask(DELETE_TOPICS, 6, {"topics": wanted, "timeout": timedelta(seconds=30)})
        codes = {each.name: ErrorCode(each.error_code) for each in found.responses}
        assert codes == {"t": ErrorCode.none, "u": ErrorCode.topic_authorization_failed}
        assert topics.names() == ["u"]


def test_a_command_says_where_a_change_is_not_in_force(tmp_path: Path) -> None:
    """Promise: `security enforce` names the brokers that do not follow, and exits with 3."""
    with members(tmp_path, 1) as (agent,):
        enforce(tmp_path, READ, mode=Mode.OBSERVE)
        see(agent)
        policy = ("--super-user", "User:admin", "--yes", "--root", str(tmp_path))
        assert cli("security", "enforce", *policy)[0] == 0
        agent.parts.broker.security_version = lambda: 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sparklog.cli.security._IN_FORCE_SECONDS", 0.0)
            code, shown = cli("security", "observe", "--yes", "--root", str(tmp_path))
        assert code == 3
        assert "not in force at broker 1: it goes by version 1" in shown


def test_flight_is_for_programs_with_access_to_the_root(tmp_path: Path) -> None:
    """Promise: by the root all works as before, also among members; by the address nothing does.

    A client of the address that was connected before is cut.
    """
    with members(tmp_path, 2) as agents, contextlib.ExitStack() as stack:
        before = stack.enter_context(sparklog.connect(agents[0].address))
        consumer = stack.enter_context(before.consumer(["t"], start="earliest"))
        assert [each.value for each in consumer.poll(timeout=10)] == [b"0"]
        enforce(tmp_path)
        for each in agents:
            see(each)
        with pytest.raises(errors.NotAuthenticated):
            before.topics()
        with pytest.raises(errors.NotAuthenticated):
            sparklog.connect(agents[1].address).topics()
        with sparklog.connect(str(tmp_path)) as log:
            log.create_topic("u", 2)
            with log.producer() as producer:
                for _ in range(10):
                    producer.send("u", b"1")
            with log.consumer(["u"], start="earliest") as reader:
                found: list[Any] = []
                wait_until(
                    lambda: len(found.__iadd__(reader.poll(timeout=0.1))) == 10, "records of u"
                )
        for command in (
            ["cluster", "balance"],
            ["cluster", "describe"],
            ["status"],
            ["topics", "list"],
        ):
            assert cli(*command, "--root", str(tmp_path))[0] == 0, command
        code, shown = cli("topics", "list", "--bootstrap", agents[0].address)
        assert code != 0
        assert "ACLs are enforced" in shown


def test_a_program_with_access_to_the_root_gets_new_tokens(tmp_path: Path) -> None:
    """Promise: nothing that changes the token ends a log that was opened by the root.

    Neither the first enforcement, nor a restart of the broker at its address, nor new keys.
    """
    with members(tmp_path, 1) as (agent,):
        address = agent.address
    flight = FlightSettings(listen=address)
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(contextlib.ExitStack())
        agent = running.enter_context(broker(tmp_path, flight=flight))
        log = stack.enter_context(sparklog.connect(str(tmp_path)))
        producer = stack.enter_context(log.producer())
        producer.send("t", b"1").result(timeout=10)

        def works() -> None:
            assert log.topics() == ["t"]
            producer.send("t", b"1").result(timeout=30)

        enforce(tmp_path)
        see(agent)
        works()
        running.close()
        agent = running.enter_context(broker(tmp_path, flight=flight))
        works()
        assert cli("security", "rekey", "--yes", "--root", str(tmp_path))[0] == 0
        see(agent)
        works()


def test_a_broker_that_cannot_read_the_acls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: it refuses all requests, shows so wherever refused work is shown, and recovers."""
    with members(tmp_path, 1) as (agent,), frames(agent) as client:
        enforce(tmp_path, READ)
        see(agent)
        assert code_of_fetch(client) is ErrorCode.none
        monkeypatch.setattr(agent._access.watch, "_stale_seconds", 0.3)
        shutil.move(tmp_path / "security", tmp_path.parent / "elsewhere")
        refused = agent.parts.broker.refused
        wait_until(lambda: Work.REQUESTS in refused.states(), "no such state")
        with pytest.raises(AssertionError, match="the listener has closed the connection"):
            code_of_fetch(client)
        with frames(agent) as producer, pytest.raises(AssertionError, match="has closed"):
            producer.ask(PRODUCE, 9, produce_fields())
        assert agent.parts.broker.partitions.status("t", 0).end == 1
        assert 'work_refused{work="requests"} 1' in metrics(agent)
        shutil.move(tmp_path.parent / "elsewhere", tmp_path / "security")
        wait_until(lambda: Work.REQUESTS not in refused.states(), "it does not end")
        code, shown = cli("status", "--root", str(tmp_path))
        assert (code, "requests" in shown) == (0, False)
        with frames(agent) as again:
            assert code_of_fetch(again) is ErrorCode.none


def metrics(agent: Agent) -> str:
    """Returns the metrics of a broker as text."""
    from sparklog.broker.metrics.collection import Collector
    from sparklog.broker.metrics.exposition import Exposition

    assert agent._sources is not None
    return b"".join(Exposition(Collector(agent._sources)).text()).decode()


def test_a_copy_of_a_root_has_none_of_its_powers(tmp_path: Path) -> None:
    """Promise: no broker starts with the keys of the original until the copy gets its own.

    A root that was only moved is the same.
    """
    root, copy, moved = tmp_path / "root", tmp_path / "copy", tmp_path / "moved"
    with members(root, 1):
        add_alice(open_store(str(root), {}))
    enforce(root, READ)
    shutil.copytree(root, copy)
    with pytest.raises(errors.SecurityOfAnotherRoot, match="sparklog security rekey"):
        broker(copy).__enter__()
    assert cli("security", "rekey", "--yes", "--root", str(copy))[0] == 0
    root.rename(moved)
    keys = set()
    for each in (copy, moved):
        with broker(each) as agent, frames(agent) as client:
            assert code_of_fetch(client) is ErrorCode.none
            keys.add(agent._access.watch.state.root_key)
    assert len(keys) == 2


def test_nothing_is_paid_without_acls(tmp_path: Path) -> None:
    """Promise: a root without users and ACLs has no folder for them, and its reads no look."""
    with members(tmp_path, 1) as (agent,), frames(agent) as client:
        assert code_of_fetch(client) is ErrorCode.none
        assert not (tmp_path / "security").exists()
        assert agent._access.watch._security is None
        looks = agent._access.watch.looks
        assert code_of_fetch(client, 0.3) is ErrorCode.none
        assert agent._access.watch.looks - looks <= 1, "one in a second waits for a first user"
