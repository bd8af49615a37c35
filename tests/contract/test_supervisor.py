"""`sparklog broker --processes`: several real brokers, which are killed, stopped and orphaned."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

import sparklog
from sparklog.clock import SystemClock
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import LocalStore
from tests.support.brokers import rows_of_table
from tests.support.processes import arguments, children_of, is_running
from tests.support.waiting import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")

PARTITIONS = 6
GAVE = "gave partitions to other brokers"
SERVES = re.compile(r"sparklog broker (\d+) serves .*Kafka at ([^\s,]+), Flight at (\S+)")


_WITH_HANGUPS = """
import os, signal, sys

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Supervised:
    """A supervisor of brokers on a root, at free ports, and what it writes."""

    def __init__(self, root: Path, processes: int, *options: str) -> None:
        self.root = root
        command = [sys.executable, "-c", _WITH_HANGUPS]
        command += ["-m", "sparklog", "broker", "--root", str(root)]
        command += ["--processes", str(processes), "--id", "1"]
        command += ["--flight", "127.0.0.1:0", "--kafka", "127.0.0.1:0", *options]
        environment = {n: v for n, v in os.environ.items() if not n.startswith("SPARKLOG_")}
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.kafka: dict[int, str] = {}
        self.flight: dict[int, str] = {}
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._told: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(self._process.stdout, self._lines.put)),
            threading.Thread(target=self._read, args=(self._process.stderr, self._told.append)),
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(pipe: Any, keep: Any) -> None:
        with pipe:
            for line in pipe:
                keep(line.rstrip("\n"))

    def await_line(self) -> str:
        """The next line of its standard output."""
        line = self._lines.get(timeout=PATIENCE_SECONDS)
        if found := SERVES.match(line):
            self.kafka[int(found[1])], self.flight[int(found[1])] = found[2], found[3]
        return line

    def await_all(self) -> list[str]:
        """Returns the lines up to the one that says that all brokers serve."""
        lines = [self.await_line()]
        while "with all its brokers" not in lines[-1]:
            lines.append(self.await_line())
        return lines

    def pids(self) -> dict[int, int]:
        """The processes of its brokers, by broker id."""
        found = {}
        for pid in children_of(self._process.pid):
            words = arguments(pid)
            if "--id" in words:  # it may have been forked and not be a program yet
                found[int(words[words.index("--id") + 1])] = pid
        return found

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def await_end(self) -> tuple[int, str]:
        """Returns its exit code, and what it and its brokers have written to standard error."""
        code = self._process.wait(PATIENCE_SECONDS)
        for reader in self._readers:
            reader.join(PATIENCE_SECONDS)  # the pipes close with the last broker
            assert not reader.is_alive(), "a process was left behind"
        return code, "\n".join(self._told)

    def kill_all(self) -> None:
        """Ends what a failed test has left."""
        if self._process.poll() is None:
            for pid in [*self.pids().values(), self._process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()


@contextlib.contextmanager
def supervised(root: Path, processes: int, *options: str) -> Iterator[Supervised]:
    """Runs a supervisor, which the test has to stop."""
    found = Supervised(root, processes, *options)
    try:
        yield found
    finally:
        found.kill_all()


def leaders(root: Path) -> tuple[int, ...]:
    """The leaders of the topic's partitions."""
    return MetadataStore(LocalStore(root), clock=SystemClock()).reload().topics["t"].leaders


class Records:
    """A Kafka producer that writes numbers to all partitions, and which of them were acked."""

    def __init__(self, bootstrap: str) -> None:
        self._producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "linger.ms": 1,
                "log_level": 0,  # it retries addresses of brokers that have ended
            }
        )
        self._sent = 0
        self.acked: list[tuple[int, int, bytes]] = []
        """The partition, offset and value of each."""
        self.failed: list[str] = []

    def send(self, count: int) -> None:
        for number in range(self._sent, self._sent + count):
            self._producer.produce(
                "t", b"%d" % number, partition=number % PARTITIONS, on_delivery=self._delivered
            )
            self._producer.poll(0.0)
        self._sent += count

    def _delivered(self, error: Any, message: Any) -> None:
        if error is not None:
            self.failed.append(str(error))
        else:
            self.acked.append((message.partition(), message.offset(), message.value()))

    def await_acks(self) -> None:
        assert self._producer.flush(PATIENCE_SECONDS) == 0, "records wait for their acks"
        assert (self.failed, len(self.acked)) == ([], self._sent)


def create_topic(bootstrap: str) -> None:
    """Creates the topic through Kafka."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    (created,) = admin.create_topics([NewTopic("t", PARTITIONS)]).values()
    created.result(PATIENCE_SECONDS)


def log_lines(told: str) -> list[dict[str, Any]]:
    """The log lines in a text of standard error."""
    return [json.loads(line) for line in told.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_three_brokers_serve_one_root(tmp_path: Path) -> None:
    """A killed one comes back, acked records stay, and a stop ends all and moves nothing."""
    with supervised(tmp_path, 3) as found:
        lines = found.await_all()
        assert sorted(found.kafka) == [1, 2, 3]
        assert lines[3:] == [f"sparklog serves {tmp_path} with all its brokers: 1, 2, 3"]
        bootstrap = ",".join(found.kafka.values())
        create_topic(bootstrap)
        assert Counter(leaders(tmp_path)) == {1: 2, 2: 2, 3: 2}
        records = Records(bootstrap)
        records.send(600)
        records.await_acks()

        before = found.pids()
        records.send(600)
        os.kill(before[2], signal.SIGKILL)
        records.send(600)
        records.await_acks()
        restarted = found.await_all()
        assert [bool(SERVES.match(line)) for line in restarted] == [True, False]
        assert SERVES.match(restarted[0])[1] == "2"  # type: ignore[index]
        after = found.pids()
        assert after.keys() == before.keys()
        assert [each for each in after if after[each] != before[each]] == [2]
        with sparklog.connect(found.flight[2]) as log:
            assert log.topics() == ["t"]

        records.send(600)
        records.await_acks()
        found.send(signal.SIGTERM)
        code, told = found.await_end()
        assert code == 0, told
        assert "Traceback" not in told
        written = log_lines(told)
        assert {each.get("broker_id") for each in written} == {None, 1, 2, 3}
        events = [each["event"] for each in written]
        assert GAVE not in events[events.index("stopping all brokers") :]
        assert events.count("stopped") == 3
    store, clock = LocalStore(tmp_path), SystemClock()
    rows = {
        (partition, offset, value)
        for partition in range(PARTITIONS)
        for offset, value in rows_of_table(store, clock, "t", partition)
    }
    assert sorted(records.acked) == sorted(rows)
    assert len({value for _, _, value in rows}) == 2400


@pytest.mark.slow
def test_a_broker_that_is_stopped_by_itself_gives_its_partitions_away(tmp_path: Path) -> None:
    """SIGTERM to one of the processes restarts that broker, and the other leads meanwhile."""
    with supervised(tmp_path, 2) as found:
        found.await_all()
        create_topic(found.kafka[1])
        assert Counter(leaders(tmp_path)) == {1: 3, 2: 3}
        os.kill(found.pids()[2], signal.SIGTERM)
        assert SERVES.match(found.await_line())
        found.send(signal.SIGINT)
        code, told = found.await_end()
    assert code == 0, told
    gave = [each for each in log_lines(told) if each["event"] == GAVE]
    assert (gave[0]["broker_id"], gave[0]["partitions"], gave[0]["to"]) == (2, 3, [1])
    (again,) = [each for each in log_lines(told) if "will be restarted" in each["event"]]
    assert (again["broker_id"], again["exit_code"], again["after_seconds"]) == (2, 0, 0.0)


@pytest.mark.slow
def test_brokers_notice_that_their_supervisor_was_killed(tmp_path: Path) -> None:
    """They publish everything and end, whether they serve already or start; none is left behind."""
    with supervised(tmp_path, 2) as found:
        found.await_all()
        create_topic(found.kafka[1])
        records = Records(found.kafka[1])
        records.send(60)
        records.await_acks()
        pids = found.pids().values()
        found.send(signal.SIGKILL)
        code, told = found.await_end()
        assert code == -signal.SIGKILL
        # They close their files, for which the line above waits, a moment before they end.
        wait_until(lambda: not any(map(is_running, pids)), "no broker is left behind")
        events = Counter(each["event"] for each in log_lines(told))
        assert (events["stopped"], events[GAVE]) == (2, 0)
        assert "Traceback" not in told
    rows = [rows_of_table(LocalStore(tmp_path), SystemClock(), "t", n) for n in range(PARTITIONS)]
    assert sum(map(len, rows)) == 60

    with supervised(tmp_path, 2) as found:
        wait_until(lambda: len(found.pids()) == 2, "the brokers are started")
        pids = found.pids().values()
        found.send(signal.SIGKILL)
        found.await_end()
        wait_until(lambda: not any(map(is_running, pids)), "no broker is left behind")


@pytest.mark.slow
def test_a_second_signal_kills_a_broker_that_hangs(tmp_path: Path) -> None:
    """The first signal, a hangup, stops the other broker cleanly, and waits for the hanging one.

    The exit code is not 0.
    """
    with supervised(tmp_path, 2) as found:
        found.await_all()
        pids = found.pids()
        os.kill(pids[2], signal.SIGSTOP)
        found.send(signal.SIGHUP)
        wait_until(lambda: not is_running(pids[1]), "the other broker has stopped")
        assert is_running(pids[2])
        found.send(signal.SIGTERM)
        code, told = found.await_end()
    assert code == 128 + signal.SIGKILL
    (unclean,) = [each for each in log_lines(told) if "did not stop cleanly" in each["event"]]
    assert (unclean["broker_id"], unclean["exit_code"]) == (2, -signal.SIGKILL)


@pytest.mark.slow
def test_a_broker_that_cannot_start_ends_the_others(tmp_path: Path) -> None:
    """The supervisor exits with its code; its message and its id are on standard error."""
    (tmp_path / "notes.txt").write_text("mine")
    with supervised(tmp_path, 2) as found:
        code, told = found.await_end()
    assert code == 1
    assert "it holds notes.txt" in told
    assert "Traceback" not in told
    ends = [each for each in log_lines(told) if "before it served" in each["event"]]
    assert ends[0]["broker_id"] in (1, 2)
    assert ends[0]["exit_code"] == 1
    assert [each.name for each in tmp_path.iterdir()] == ["notes.txt"]


def test_settings_are_checked_before_a_broker_starts(tmp_path: Path) -> None:
    """A wrong setting is one line and exit code 1."""
    with supervised(tmp_path / "root", 2, "--kafka", "127.0.0.1:65535") as found:
        code, told = found.await_end()
    assert code == 1
    assert told.startswith("sparklog: Invalid option kafka.listen = '127.0.0.1:65535'")
    assert len(told.splitlines()) == 1
    assert not (tmp_path / "root").exists()


def test_only_a_supervisor_starts_a_supervised_broker(tmp_path: Path) -> None:
    """Without settings on standard input, the hidden option is an error and not a traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "sparklog", "broker", "--supervised", "--root", str(tmp_path)],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "no supervisor has started this process" in done.stderr
    assert len(done.stderr.splitlines()) == 1
