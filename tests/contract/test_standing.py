"""Standing brokers as real processes: two on one root, restarts, and programs that come between."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import pytest

import sparklog
from sparklog import errors
from tests.support import preloaded
from tests.support.ports import quiet_address
from tests.support.standing import Standing, standing
from tests.support.waiting import wait_until

SECONDS = 30.0


def test_the_same_command_twice_is_refused(tmp_path: Path) -> None:
    """The second one ends with the process, host, address and age of the first, which continues."""
    with standing(tmp_path) as first:
        code, told = Standing(tmp_path).await_end()
        assert code == 1
        assert f"pid {first.pid} on host {socket.gethostname()}" in told
        assert f"Flight at {first.flight}" in told
        assert re.search(r"started \d+ s ago", told)
        assert "--take-over" in told
        assert "Traceback" not in told
        with sparklog.connect(first.flight) as log:
            log.create_topic("t")
        assert first.is_running


def test_a_folder_of_another_program_is_taken_only_on_purpose(tmp_path: Path) -> None:
    """The broker refuses it and names its content; `--allow-non-empty` is needed once."""
    (tmp_path / "notes.txt").write_text("mine")
    code, told = Standing(tmp_path).await_end()
    assert code == 1
    assert "it holds notes.txt" in told
    assert "--allow-non-empty" in told
    assert "Traceback" not in told
    assert [each.name for each in tmp_path.iterdir()] == ["notes.txt"]
    with standing(tmp_path, "--allow-non-empty"):
        pass
    with standing(tmp_path):
        pass


def test_a_replaced_broker_logs_its_replacement(tmp_path: Path) -> None:
    """`--take-over` replaces a live broker, whose last log line names the new one."""
    with standing(tmp_path) as first, standing(tmp_path, "--take-over") as second:
        code, told = first.await_end()
        assert code == 1
        assert "was replaced by broker 0 (standing, epoch 2)" in told
        assert f"pid {second.pid} on host {socket.gethostname()}, Flight at {second.flight}" in told
        assert "Traceback" not in told


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_broker_starts_again_at_once(tmp_path: Path, how: signal.Signals) -> None:
    """On the machine of the ended broker, the new one does not wait to see whether it is alive."""
    spent = []
    for _ in range(3):
        broker = Standing(tmp_path)
        began = time.monotonic()
        broker.await_start()
        spent.append(time.monotonic() - began)
        broker.end(how)
    assert min(spent[1:]) < spent[0] + 1.0


_SLOW_START = """
import sys, time
from pathlib import Path
from sparklog.broker.log import recovery
from sparklog.cli import main

_, root, recovers = sys.argv

def recover(*_, **__):
    Path(recovers).touch()
    time.sleep(60)

recovery.recover = recover
sys.argv = ["sparklog", "broker", "--root", root, "--flight", "127.0.0.1:0", "--kafka", ""]
main()
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_broker_that_is_stopped_while_it_starts_ends_cleanly(
    tmp_path: Path, how: signal.Signals
) -> None:
    """It ends at once, without an error, and other brokers do not take it for crashed."""
    root, recovers = tmp_path / "root", tmp_path / "recovers"
    starting = preloaded.start(
        ["-c", _SLOW_START, str(root), str(recovers)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        wait_until(recovers.exists, "it recovers")
        starting.send_signal(how)
        served, told = starting.communicate(timeout=SECONDS)
    finally:
        starting.kill()
    assert (starting.returncode, served) == (0, b"")
    assert b"Traceback" not in told
    assert how.name.encode() in told
    status = preloaded.run(["sparklog", "status", "--root", str(root)])
    assert b"stopped" in status.stdout
    assert b"died" not in status.stdout


def test_a_broker_whose_terminal_is_closed_stops_in_order(tmp_path: Path) -> None:
    """It publishes and ends with 0, although it can write no line any more; no recovery follows."""
    ours, theirs = os.openpty()
    broker = subprocess.Popen(
        [sys.executable, "-c", _ON_A_TERMINAL, str(tmp_path)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        served = b""
        while b"Flight at" not in served:
            served += os.read(ours, 4096)
        os.close(ours)
        assert broker.wait(SECONDS) == 0
    finally:
        broker.kill()
        broker.wait()
    status = preloaded.run(["sparklog", "status", "--root", str(tmp_path)])
    assert b"shut down cleanly" in status.stdout


_ON_A_TERMINAL = """
import fcntl, signal, sys, termios
from sparklog.cli import main

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.argv = ["sparklog", "broker", "--root", sys.argv[1], "--flight", "127.0.0.1:0", "--kafka", ""]
main()
"""


def test_a_broker_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    """A hangup that the process ignores from its start does nothing, and SIGTERM stops it."""
    broker = subprocess.Popen(
        [sys.executable, "-c", _UNDER_NOHUP, str(tmp_path)], stdout=subprocess.PIPE
    )
    try:
        assert broker.stdout is not None
        assert b"serves" in broker.stdout.readline()
        broker.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            broker.wait(0.3)
        broker.send_signal(signal.SIGTERM)
        assert broker.wait(SECONDS) == 0
    finally:
        broker.kill()
        broker.communicate()


_UNDER_NOHUP = """
import signal, sys
from sparklog.cli import main

signal.signal(signal.SIGHUP, signal.SIG_IGN)
sys.argv = ["sparklog", "broker", "--root", sys.argv[1], "--flight", "127.0.0.1:0", "--kafka", ""]
main()
"""


UNSHARE = ("unshare", "--uts", "--pid", "--fork", "--mount-proc")


def may_unshare() -> bool:
    """Returns whether this user may start processes in new namespaces, like containers."""
    try:
        return subprocess.run([*UNSHARE, "true"], check=False, capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not may_unshare(), reason="no namespaces for this user")
def test_a_broker_in_a_container_is_watched(tmp_path: Path) -> None:
    """Pids of another pid namespace are not checked; its heartbeats prevent a takeover."""
    listen = quiet_address()
    run = f"hostname other; exec {sys.executable} -m sparklog broker --root {tmp_path}"
    command = [*UNSHARE, "--kill-child", "sh", "-c", f"{run} --flight {listen} --kafka ''"]
    environment = {n: v for n, v in os.environ.items() if not n.startswith("SPARKLOG_")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as container:
        try:
            assert container.stdout is not None
            assert b"serves" in container.stdout.readline()
            code, told = Standing(tmp_path).await_end()
            assert code == 1
            assert "waiting to see" in told
            assert "pid 1 on host other" in told
            with pytest.raises(errors.BadOption, match="SPARKLOG_FLIGHT_ADVERTISED=other:8815"):
                sparklog.connect(tmp_path)
        finally:
            container.kill()  # and with it what it has started
        container.wait()
        began = time.monotonic()
        with standing(tmp_path):
            assert 4.0 < time.monotonic() - began < 12.0


# ------------------------------------------------------------------------------ programs between

NOTEBOOK = """
import json, sys, threading, time, sparklog
log = sparklog.connect(sys.argv[1], detached="detached" in sys.argv)
log.create_topic("t", partitions=2, if_absent=True)
ended = threading.Event()
sent, read, shared = [], [], []

def produce():
    producer, number = log.producer(linger_ms=1), 0
    while not ended.is_set():
        futures = []
        for _ in range(5):
            sent.append(number)
            futures.append(producer.send("t", value=b"%d" % number, partition=number % 2))
            number += 1
        for future in futures:
            future.result(30)
        time.sleep(0.005)
    producer.close()

def consume(into, **options):
    with log.consumer("t", start="earliest", **options) as consumer:
        while not ended.is_set() or len(set(into)) < len(sent):
            for record in consumer.poll(0.2):
                into.append(int(record.value))

threads = [
    threading.Thread(target=produce),
    threading.Thread(target=consume, args=(read,)),
    threading.Thread(target=consume, args=(shared,), kwargs={"group": "g"}),
]
for thread in threads:
    thread.start()
print("ready", flush=True)
for line in sys.stdin:
    if line.strip() == "end":
        break
    print(len(sent), log.connection.address, flush=True)
ended.set()
for thread in threads:
    thread.join(40)
print(json.dumps([len(sent), read, shared, log.connection.address]), flush=True)
log.close()
"""


class Notebook:
    """A program that holds a root open, produces to it and consumes from it."""

    def __init__(self, root: Path, *arguments: str) -> None:
        environment = {n: v for n, v in os.environ.items() if not n.startswith("SPARKLOG_")}
        self._process = preloaded.start(
            ["-c", NOTEBOOK, str(root), *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode().strip()
        assert line, self._process.poll()
        return line

    def ask(self, what: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n".encode())
        self._process.stdin.flush()
        return self.read()

    def state(self) -> tuple[int, str]:
        """Returns how many records it has sent, and which broker it uses."""
        count, address = self.ask("state").split()
        return int(count), address

    def go_on(self, more: int = 50) -> str:
        """The address that it uses after it has sent so many more."""
        goal = self.state()[0] + more
        wait_until(lambda: self.state()[0] >= goal, "the program continues")
        return self.state()[1]

    def await_broker(self, address: str) -> None:
        """Returns when it uses the broker at `address`."""
        wait_until(lambda: self.state()[1] == address, f"it uses the broker at {address}")

    def __enter__(self) -> Self:
        assert self.read() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired, ValueError):
            self._process.communicate(timeout=SECONDS)
        self._process.kill()


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        (signal.SIGTERM, "embedded"),
        (signal.SIGKILL, "embedded"),
        (signal.SIGKILL, "detached"),
    ],
    ids=["stopped", "killed", "killed-detached"],
)
def test_a_standing_broker_comes_and_goes_while_a_program_is_open(
    tmp_path: Path, how: signal.Signals, kind: str
) -> None:
    """It takes over from the program's own broker, and back; no record is lost or doubled."""
    with Notebook(tmp_path, kind) as notebook:
        embedded = notebook.go_on()
        for _ in range(2):
            broker = Standing(tmp_path)
            broker.await_start()
            notebook.await_broker(broker.flight)
            assert notebook.go_on() == broker.flight
            broker.end(how)
            assert notebook.go_on() not in (embedded, broker.flight)
        count, read, shared, _ = json.loads(notebook.ask("end"))
    for partition in range(2):
        assert [n for n in read if n % 2 == partition] == list(range(partition, count, 2))
    assert set(shared) == set(range(count))
    with sparklog.connect(tmp_path) as log:
        assert log.status().broker.kind == kind
        rows = log.read("t")
        values = [int(value) for value in rows.column("value").to_pylist()]
        assert sorted(values) == list(range(count))


def test_the_ports_of_an_embedded_broker_go_to_the_standing_one_and_back(
    tmp_path: Path,
) -> None:
    """A notebook and `sparklog broker` with the same Kafka address take turns at it."""
    kafka = quiet_address()
    with sparklog.connect(tmp_path, kafka=kafka) as log:
        log.create_topic("t")
        assert log.status().broker.kind == "embedded"
        for _ in range(2):
            with standing(tmp_path, kafka=kafka) as broker:
                wait_until(lambda: log.status().broker.kind == "standing", "it is a client")
                assert log.topics() == ["t"]
                found = log.status().broker
                assert (found.pid, found.kafka) == (broker.pid, kafka)
            found = log.status().broker
            assert (found.kind, found.pid, found.kafka) == ("embedded", os.getpid(), kafka)


def test_a_program_continues_without_ports_that_others_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An embedded broker that comes back serves its program even without its old ports."""
    flight, kafka = quiet_address(), quiet_address()
    monkeypatch.setenv("SPARKLOG_FLIGHT_LISTEN", flight)
    with sparklog.connect(tmp_path, kafka=kafka) as log, contextlib.ExitStack() as taken:
        log.create_topic("t")
        with standing(tmp_path):
            wait_until(lambda: log.status().broker.kind == "standing", "it is a client")
            for address in (flight, kafka):
                host, _, port = address.rpartition(":")
                taken.enter_context(socket.create_server((host, int(port))))
        found = log.status().broker
        assert (found.kind, found.kafka) == ("embedded", "")
        assert found.address != flight
        assert log.topics() == ["t"]
