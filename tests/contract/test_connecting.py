"""`connect`: what a program gets that knows a root, and what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import msgspec
import pytest

import sparklog
from sparklog import connecting, errors, limits, status
from sparklog.broker.agent import Agent
from sparklog.client import connection
from sparklog.clock import SystemClock
from sparklog.cluster import RootView
from sparklog.connecting import EMBEDDED_BROKER_ID
from sparklog.options import storage_options
from sparklog.settings import BrokerSettings, FlightSettings, KafkaSettings
from sparklog.storage.metadata import identity
from sparklog.storage.metadata.liveness import (
    Heartbeat,
    LeaderWatch,
    Sighting,
    read_heartbeat,
    write_heartbeat,
)
from sparklog.storage.metadata.model import BrokerRegistration, ClusterMetadata
from sparklog.storage.metadata.processes import Process, this_process
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import LocalStore
from tests.support.waiting import wait_until

_AHEAD_US = 3_600_000_000
"""By so much the clocks of other brokers are wrong."""

_FORGETFUL = """
import sys, sparklog
log = sparklog.connect(sys.argv[1])
log.create_topic("orders", partitions=3)
producer = log.producer()
for partition in range(3):
    producer.send("orders", b"tea", partition=partition).result()
"""


_FORKING = """
import os, sys, sparklog
log = sparklog.connect(sys.argv[1])
log.create_topic("orders", partitions=1)
producer = log.producer()
producer.send("orders", b"tea").result()
child = os.fork()
if child == 0:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert producer.send("orders", b"milk").result().offset == 1
print(log.read("orders").num_rows)
"""


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the developer's environment variables."""
    for name in list(os.environ):
        if name.startswith("SPARKLOG_"):
            monkeypatch.delenv(name)


def made_root(folder: Path) -> Path:
    """A root without a live broker."""
    sparklog.connect(folder).close()
    return folder


ELSEWHERE = Process(host="elsewhere", pid=1, machine="another boot", started="1")


@contextlib.contextmanager
def leading(root: Path, flight: str, process: Process, *, seconds: float = 60.0) -> Iterator[None]:
    """Some process says that it leads `root` at that address, for so long or until the end."""
    store, clock = LocalStore(str(root)), SystemClock()
    known = BrokerRegistration(epoch=1, flight=flight, started_us=clock.now_us(), process=process)

    def lead(metadata: ClusterMetadata) -> ClusterMetadata:
        brokers = {**metadata.brokers, 5: known}
        return msgspec.structs.replace(metadata, brokers=brokers, controller=5)

    MetadataStore(store, clock=clock).change(lead)
    ended = threading.Event()
    began = clock.monotonic()

    def beat() -> None:
        while clock.monotonic() - began < seconds:
            write_heartbeat(
                store,
                Heartbeat(
                    broker=5,
                    epoch=1,
                    flight=flight,
                    at_us=clock.now_us() + _AHEAD_US,
                    monotonic_seconds=clock.monotonic(),
                    process=process,
                ),
            )
            if ended.wait(0.1):
                break

    beating = threading.Thread(target=beat)
    beating.start()
    yield
    ended.set()
    beating.join()


def run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Runs Python to its end, which is what these tests are about."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, timeout=60, check=False)


def test_a_new_log_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A new log is one line, so that a misspelt path is noticed; one that exists is none."""
    caplog.set_level(logging.INFO, "sparklog")
    for _ in range(2):
        with sparklog.connect(tmp_path / "misspelt"):
            pass
    (line,) = [each for each in caplog.messages if "created a new" in each]
    assert str(tmp_path / "misspelt") in line
    assert [each.levelname for each in caplog.records if each.getMessage() == line] == ["INFO"]


def test_a_program_that_closes_nothing_ends_and_leaves_its_records_in_the_table(
    tmp_path: Path,
) -> None:
    """The embedded broker stops in good order at exit, when no more threads can be started."""
    done = run("-c", _FORGETFUL, str(tmp_path))
    assert (done.returncode, done.stdout) == (0, b""), done.stderr
    with sparklog.connect(tmp_path) as log:
        topic = log.describe("orders")
        assert [(each.end, each.published) for each in topic.partitions] == [(1, 1)] * 3


def test_a_visitor_that_closes_nothing_ends_well(tmp_path: Path) -> None:
    """A program with an address, a producer and no `close` delivers what it sent, and exits 0."""
    program = (
        "import sys, sparklog\n"
        "log = sparklog.connect(sys.argv[1])\n"
        "producer = log.producer(linger_ms=1)\n"
        "for number in range(100):\n"
        "    producer.send('t', b'%d' % number)\n"
    )
    with sparklog.connect(tmp_path) as log:
        log.create_topic("t", partitions=1)
        address = log.cluster().brokers[0].address
        for _ in range(2):
            done = run("-c", program, address)
            assert (done.returncode, done.stderr) == (0, b"")
        assert log.read("t").num_rows == 200


@pytest.mark.parametrize("detached", [False, True])
def test_a_project_of_somebody_becomes_no_root(tmp_path: Path, detached: bool) -> None:
    """A folder with other files is refused with a list of them, and stays as it was."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "main.py").write_text("print()")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(errors.RootNotEmpty, match=r"it holds notes\.txt, src\. Use an empty"):
        sparklog.connect(tmp_path, detached=detached)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["notes.txt", "src"]
    with sparklog.connect(tmp_path / "log") as log:
        assert log.topics() == []


@pytest.mark.parametrize("detached", [False, True])
def test_a_file_becomes_no_root(tmp_path: Path, detached: bool) -> None:
    """A file that is given as root is named as that, at once."""
    file = tmp_path / "orders.jsonl"
    file.write_text("{}")
    with pytest.raises(errors.NotARoot, match=r"orders\.jsonl is a file"):
        sparklog.connect(file, detached=detached)


def test_no_target_is_refused_by_name() -> None:
    """Without root, address or variable, the error says which variables there are."""
    with pytest.raises(errors.BadOption, match="SPARKLOG_ROOT"):
        sparklog.connect()


def test_two_logs_of_one_process_share_a_broker(tmp_path: Path) -> None:
    """The second `connect` to a root joins the broker that the first one started."""
    with sparklog.connect(tmp_path) as first, sparklog.connect(tmp_path) as second:
        first.create_topic("orders", partitions=2)
        assert second.topics() == ["orders"]
        assert first.cluster() == second.cluster()


def test_a_forked_child_leaves_the_broker_to_its_parent(tmp_path: Path) -> None:
    """A child that ends before its parent neither stops the embedded broker, nor hangs."""
    done = run("-c", _FORKING, str(tmp_path))
    assert (done.returncode, done.stdout) == (0, b"2\n"), done.stderr


# ------------------------------------------------------------------------------ whose broker


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_program_that_names_a_copy_changes_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_elsewhere: bool
) -> None:
    """A copy has the ids and heartbeats of its original, and gets a broker of its own.

    A program on another machine cannot compare folders, so the broker has to leave a proof.
    """
    monkeypatch.setenv("SPARKLOG_LIVENESS_DEAD_AFTER_SECONDS", "2")
    if is_elsewhere:
        monkeypatch.setattr(identity, "place_of", lambda _: "")
    with sparklog.connect(tmp_path / "root") as original:
        original.create_topic("t")
        shutil.copytree(tmp_path / "root", tmp_path / "copy")
        with sparklog.connect(tmp_path / "root") as same:
            assert same.connection.address == original.connection.address
        with sparklog.connect(tmp_path / "copy") as copy:
            assert copy.connection.address != original.connection.address
            copy.delete_topic("t")
            assert copy.topics() == []
        assert original.topics() == ["t"]
        with original.producer() as producer:
            assert producer.send("t", b"tea").result().offset == 0


def test_a_copy_that_is_kept_in_step_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeats never end, so a broker of its own would fight with the synchronization."""
    monkeypatch.setattr(limits, "DEAD_AFTER_SECONDS", 2.0)
    monkeypatch.setenv("SPARKLOG_LIVENESS_DEAD_AFTER_SECONDS", "2")
    with sparklog.connect(tmp_path / "root") as original:
        shutil.copytree(tmp_path / "root", tmp_path / "copy")
        store, copy = LocalStore(str(tmp_path / "root")), LocalStore(str(tmp_path / "copy"))
        look, path = LeaderWatch.poll, f"heartbeats/{EMBEDDED_BROKER_ID}.json"

        def poll(watch: LeaderWatch, metadata: ClusterMetadata | None = None) -> Sighting | None:
            copy.put(path, store.get(path), durable=False)
            return look(watch, metadata)

        monkeypatch.setattr(LeaderWatch, "poll", poll)
        with pytest.raises(errors.RootIsCopy, match="is a copy of") as refused:
            sparklog.connect(tmp_path / "copy")
        assert refused.value.served == store.uri
        assert refused.value.address == original.connection.address


def test_a_standing_broker_whose_heartbeats_end_keeps_its_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk or a frozen file system stops heartbeats, and the broker still answers."""
    settings = BrokerSettings(
        root=str(tmp_path),
        flight=FlightSettings(listen="127.0.0.1:0"),
        kafka=KafkaSettings(listen=""),
    )
    with Agent(settings, ask=connection.ask) as standing:
        store, refused = LocalStore(str(tmp_path)), threading.Event()

        def refuse(**_: bool) -> None:
            refused.set()
            raise errors.StorageFull(root=store.uri, free_bytes=0, reserve_bytes=1)

        monkeypatch.setattr(standing._heartbeats, "write", refuse)
        assert refused.wait(10.0)
        last = read_heartbeat(store, settings.id)
        assert last is not None
        old = msgspec.structs.replace(last, monotonic_seconds=last.monotonic_seconds - 60.0)
        write_heartbeat(store, old)
        with sparklog.connect(tmp_path) as log:
            assert log.connection.address == standing.address
            assert log.topics() == []
        found = status.of_root(store, SystemClock(), waits=lambda _leader, _seconds: None)
        assert found.state is status.LeaderStatus.SERVED
        view = RootView(store, SystemClock(), waits=lambda _leaders, _seconds: None)
        assert [each.state for each in view.describe().brokers] == ["up"]
        monkeypatch.undo()


def test_the_status_of_a_copy_is_not_that_of_its_original(tmp_path: Path) -> None:
    """No broker of the copy is up, and the command that drains a broker finds none to stop."""
    with sparklog.connect(tmp_path / "root"):
        shutil.copytree(tmp_path / "root", tmp_path / "copy")
        copy = LocalStore(str(tmp_path / "copy"))
        view = RootView(copy, SystemClock(), waits=lambda _leaders, _seconds: None)
        assert [each.state for each in view.describe().brokers] == ["dead"]
        found = status.of_root(copy, SystemClock(), waits=lambda _leader, _seconds: None)
        assert found.state is status.LeaderStatus.SILENT
        assert "of which this root is a copy" in found.reason


def test_the_broker_of_another_root_is_refused(tmp_path: Path) -> None:
    """An address that leads to another cluster's broker is an error that names both clusters."""
    root = made_root(tmp_path / "prod")
    with sparklog.connect(tmp_path / "dev") as other:
        address = other.connection.address
        with (
            leading(root, address, this_process()),
            pytest.raises(errors.WrongCluster) as caught,
        ):
            sparklog.connect(root)
        assert caught.value.found == other.cluster().cluster_id
        assert caught.value.root == LocalStore(str(root)).uri
        assert caught.value.served == other.cluster().root


@pytest.mark.parametrize("address", ["127.0.0.1:8815", "localhost:1", "[::1]:1", "0.0.0.0:8815"])
def test_the_loopback_of_another_host_is_not_dialled(tmp_path: Path, address: str) -> None:
    """A broker that others cannot reach is named at once, with what to set so that they can."""
    root = made_root(tmp_path)
    began = time.monotonic()
    with leading(root, address, ELSEWHERE), pytest.raises(errors.BadOption) as caught:
        sparklog.connect(root)
    assert time.monotonic() - began < limits.ACTION_TIMEOUT_SECONDS
    assert (caught.value.option, caught.value.value) == ("flight.advertised", address)
    assert "'elsewhere'" in caught.value.reason
    assert "SPARKLOG_FLIGHT_ADVERTISED=elsewhere:8815" in caught.value.reason


@pytest.mark.parametrize("process", [None, ELSEWHERE], ids=["here", "elsewhere"])
def test_a_heartbeat_that_ends_is_waited_for(
    tmp_path: Path, process: Process | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A broker that died just now is watched until that is known; then the root is taken over."""
    root = made_root(tmp_path)
    with leading(root, "127.0.0.1:1", process or this_process(), seconds=0.3):
        time.sleep(0.4)
        began = time.monotonic()
        with sparklog.connect(root) as log:
            assert log.topics() == []
            assert 4.0 < time.monotonic() - began < 12.0
    if process is not None:
        assert "waiting up to 5 s to see whether broker 5 (standing, epoch 1)" in caplog.text


# ------------------------------------------------------------------------------ started brokers


def test_an_embedded_broker_serves_kafka(tmp_path: Path) -> None:
    """With `kafka` the program's own broker has a Kafka listener, over the same records."""
    with sparklog.connect(tmp_path, kafka="127.0.0.1:0") as log:
        log.create_topic("t", partitions=1)
        (broker,) = log.cluster().brokers
        assert broker.kind == "embedded"
        producer = confluent_kafka.Producer({"bootstrap.servers": broker.kafka})
        producer.produce("t", b"by Kafka")
        assert producer.flush(20) == 0
        assert log.read("t").column("value").to_pylist() == [b"by Kafka"]
        # The current address may be given again, and no other.
        sparklog.connect(tmp_path, kafka=broker.kafka).close()
        with pytest.raises(errors.BadOption, match=f"with Kafka at {broker.kafka}") as refused:
            sparklog.connect(tmp_path, kafka="127.0.0.1:1")
        assert refused.value.option == "kafka"
    with sparklog.connect(tmp_path), pytest.raises(errors.BadOption, match="without Kafka"):
        sparklog.connect(tmp_path, kafka="127.0.0.1:1")


@pytest.mark.parametrize(
    "given",
    [{"kafka": "127.0.0.1:0"}, {"detached": True}, {"storage_options": {"aws_region": "secret"}}],
    ids=str,
)
def test_arguments_for_a_root_are_refused_with_an_address(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    """None of them is ignored, and the error names it, without secrets."""
    with sparklog.connect(tmp_path) as log:
        address = log.connection.address
        with pytest.raises(errors.BadOption, match=f"{address} is a running broker") as refused:
            sparklog.connect(address, **given)
        assert [refused.value.option] == list(given)
        assert "secret" not in str(refused.value)
        sparklog.connect(address, detached=False, storage_options={}).close()


def test_storage_options_are_refused_with_a_folder(tmp_path: Path) -> None:
    """The error names the argument and the options, without their values."""
    with pytest.raises(errors.BadOption, match=r"aws_region.*only buckets have options") as refused:
        sparklog.connect(tmp_path / "new", storage_options={"AWS_REGION": "secret"})
    assert refused.value.option == "storage_options"
    assert "secret" not in str(refused.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kafka", ["9092", "bad", "0.0.0.0:9092"])
def test_a_kafka_address_that_cannot_be_is_refused_by_name(tmp_path: Path, kafka: str) -> None:
    """The error names the argument that was given, not the setting behind it."""
    with pytest.raises(errors.BadOption) as refused:
        sparklog.connect(tmp_path / "new", kafka=kafka)
    assert (refused.value.option, refused.value.value) == ("kafka", kafka)
    assert str(refused.value).startswith(f"Invalid option kafka = '{kafka}': ")


def test_a_kafka_port_that_is_taken_is_named(tmp_path: Path) -> None:
    """The error names the argument, and how another address is given in a program."""
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(errors.BadOption, match=r"another program listens there.*kafka= of") as error,
    ):
        sparklog.connect(tmp_path / "new", kafka=f"127.0.0.1:{taken.getsockname()[1]}")
    assert error.value.option == "kafka"


@pytest.mark.parametrize("detached", [False, True])
def test_a_broker_that_is_started_honours_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, detached: bool
) -> None:
    """Settings of the environment count for embedded and detached brokers, their id excepted."""
    for name, value in {
        "SPARKLOG_ID": "7",
        "SPARKLOG_TOPICS_DEFAULT_PARTITIONS": "3",
        "SPARKLOG_FLIGHT_LISTEN": "0.0.0.0:0",
        "SPARKLOG_SECURITY_ANONYMOUS": "anywhere",
        "SPARKLOG_FLIGHT_ADVERTISED": "127.0.0.1:0",
        "SPARKLOG_KAFKA_LISTEN": "127.0.0.1:0",
        "SPARKLOG_LIVENESS_IDLE_EXIT_SECONDS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with sparklog.connect(tmp_path / "root", detached=detached) as log:
        assert len(log.create_topic("t").partitions) == 3
        (broker,) = log.cluster().brokers
        assert broker.broker == EMBEDDED_BROKER_ID
        assert broker.kind == ("detached" if detached else "embedded")
        assert broker.kafka.startswith("127.0.0.1:")
        assert broker.address.startswith("127.0.0.1:")
        assert not broker.address.endswith(":0")
        time.sleep(0 if detached else 2.5)  # an embedded broker stays, however idle
        assert log.topics() == ["t"]


@pytest.mark.parametrize("detached", [False, True])
def test_a_slip_in_the_environment_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, detached: bool
) -> None:
    """A variable that is not a setting, or has a wrong value, is refused before a root is made."""
    monkeypatch.setenv("SPARKLOG_TOPICS_DEFAULT_PARTITION", "3")
    with pytest.raises(errors.UnknownOption, match="SPARKLOG_TOPICS_DEFAULT_PARTITIONS"):
        sparklog.connect(tmp_path / "root", detached=detached)
    monkeypatch.delenv("SPARKLOG_TOPICS_DEFAULT_PARTITION")
    monkeypatch.setenv("SPARKLOG_WRITER_TRIM_GRACE_SECONDS", "1")
    with pytest.raises(errors.BadOption, match="from 10"):
        sparklog.connect(tmp_path / "root", detached=detached)
    assert not (tmp_path / "root").exists()


def test_a_detached_broker_logs_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The program that starts it and the broker tell its path; start and stop are in it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SPARKLOG_LIVENESS_IDLE_EXIT_SECONDS", "1")
    with sparklog.connect(tmp_path / "root", detached=True) as log:
        (broker,) = log.cluster().brokers
        assert log.status().broker == broker
    path = connecting.log_file(str(tmp_path / "root"))
    assert broker.log == str(path)
    assert path.is_relative_to(tmp_path / "state" / "sparklog")
    assert f"pid {broker.pid}; its log: {path}" in caplog.text

    def lines() -> list[dict[str, object]]:
        return [json.loads(line) for line in path.read_text().splitlines()]

    wait_until(lambda: any(line["event"] == "stopped" for line in lines()), "it stops")
    events = {line["event"]: line for line in lines()}
    assert events["serving"]["flight"] == broker.address
    assert events["serving"]["version"] == sparklog.__version__
    assert "no client for" in str(events["stopped"]["reason"])


@pytest.mark.parametrize("state", ["/proc/nowhere", "not/absolute"])
def test_a_home_that_cannot_be_written_has_no_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """In a hardened container the log of a detached broker is among the temporary files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", state)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = connecting.log_file("s3://bucket/some/log")
    assert path.parent == tmp_path / f"sparklog-{os.getuid()}"
    assert path.name.startswith("s3-bucket-some-log-")
    assert path != connecting.log_file("s3://bucket/some-log")


# ------------------------------------------------------------------------------ targets


def test_an_address_without_a_broker_is_told_at_once() -> None:
    """`connect` to an address asks once whether a broker hears there."""
    with pytest.raises(errors.BrokerUnavailable, match=r"127\.0\.0\.1:1.*start a broker there"):
        sparklog.connect("127.0.0.1:1")
    with pytest.raises(
        errors.BrokerUnavailable, match=r"'no\.invalid' cannot be resolved.*spelling"
    ):
        sparklog.connect("no.invalid:8815")


def test_an_address_is_shown(tmp_path: Path) -> None:
    """The log of an address says which."""
    with sparklog.connect(tmp_path) as log:
        address = log.connection.address
        with sparklog.connect(address) as other:
            assert repr(other) == f"Log({address!r})"


def test_first_address_that_answers_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of several addresses must answer: a list, a string with commas, or the environment."""
    with sparklog.connect(tmp_path) as log:
        log.create_topic("orders")
        address = log.connection.address
        for target in (["127.0.0.1:1", address], f"127.0.0.1:1, {address}"):
            with sparklog.connect(target) as other:
                assert other.topics() == ["orders"]
                assert other.connection.address == address
                assert repr(other) == f"Log('127.0.0.1:1,{address}')"
        monkeypatch.setenv("SPARKLOG_BOOTSTRAP", f"127.0.0.1:1,{address}")
        with sparklog.connect() as other:
            assert other.topics() == ["orders"]


def test_addresses_without_a_broker_are_all_named() -> None:
    """The error names each address with the reason why it does not serve."""
    with pytest.raises(errors.BrokerUnavailable) as raised:
        sparklog.connect(["127.0.0.1:1", "no.invalid:8815"])
    assert raised.value.facts["address"] == "127.0.0.1:1,no.invalid:8815"
    assert re.search(
        r"127\.0\.0\.1:1: .*refused.*; no\.invalid:8815: .*not known", str(raised.value)
    )


@pytest.mark.parametrize("target", [["a:1", "b"], ["a:1", 2], [["a:1"]], ("a:1,b:2",)])
def test_list_of_other_things_than_addresses(target: Any) -> None:
    """A list with anything but addresses is refused as the target."""
    with pytest.raises(errors.BadOption, match=r"target = .*expected host:port"):
        sparklog.connect(target)


@pytest.mark.parametrize(
    "value", ["a:8815,b", "a:8815,", "broker", "broker:", "a:99999", "s3://b/log"]
)
def test_bootstrap_is_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """Anything but addresses is refused by the variable's name, and never becomes a folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPARKLOG_BOOTSTRAP", value)
    with pytest.raises(errors.BadOption) as caught:
        sparklog.connect()
    assert (caught.value.option, caught.value.value) == ("SPARKLOG_BOOTSTRAP", value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", ["a:8815,b:88l5", "a,b", "a:99999", "a:88l5", "::1:8815", "a:"])
def test_an_address_with_a_slip_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """A target that was meant as an address is refused, unless a folder of the name is there."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.BadOption, match="host:port"):
        sparklog.connect(target)
    assert list(tmp_path.iterdir()) == []
    with sparklog.connect(f"./{target}") as log:
        log.create_topic("orders")
    with sparklog.connect(target) as log:
        assert log.topics() == ["orders"]


@pytest.mark.parametrize("target", ["localhost", "127.0.0.1", "::1", "[::1]"])
def test_a_host_without_a_port_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """A host alone is refused with a hint at host:port, and never becomes a folder."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.BadOption, match="Did you mean host:port") as refused:
        sparklog.connect(target)
    assert refused.value.value == target
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------ storage options


def test_storage_options_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Explicit options take precedence over each variable; those of Kubernetes are ignored."""
    monkeypatch.setenv("SPARKLOG_STORAGE_AWS_REGION", "eu")
    monkeypatch.setenv("SPARKLOG_STORAGE_AWS_ENDPOINT", "http://a")
    monkeypatch.setenv("SPARKLOG_STORAGE_SERVICE_HOST", "10.0.0.1")
    given = {"AWS_Endpoint": "http://b"}
    assert storage_options("s3://bucket", given) == {"aws_region": "eu", "aws_endpoint": "http://b"}


@pytest.mark.parametrize("detached", [False, True])
def test_a_folder_has_no_storage_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, detached: bool
) -> None:
    """Variables for a bucket do not matter to a folder."""
    monkeypatch.setenv("SPARKLOG_STORAGE_AWS_REGION", "eu")
    monkeypatch.setattr("sparklog.connecting.DETACHED_IDLE_SECONDS", 1.0)
    with sparklog.connect(tmp_path, detached=detached) as log:
        assert log.topics() == []
