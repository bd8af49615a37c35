"""The publishing process of a real broker is killed and suspended, and ends with its broker."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import sparklog
from sparklog.broker.log import publish_process
from sparklog.broker.log.publish_process import STDERR_BYTES, WorkerProcess
from sparklog.broker.log.publish_worker import Answer, PutAll, WorkerLost, encode
from sparklog.client.producer.producer import RecordFuture
from sparklog.clock import SystemClock
from sparklog.storage.objects import LocalStore
from tests.support.brokers import rows_of_table
from tests.support.processes import arguments, children_of, is_running
from tests.support.standing import Standing, standing
from tests.support.waiting import wait_until

TOPICS = [f"t{number}" for number in range(90)]
"""Each has a file and a commit at a time, more than `WANTED_OBJECTS` together."""
_MODULE = "sparklog.broker.log.publish_worker"

pytestmark = pytest.mark.slow


def process_of(broker: int) -> int | None:
    """Returns the pid of the broker's publishing process; None if it has none."""
    return next((each for each in children_of(broker) if _MODULE in arguments(each)), None)


def await_process(broker: Standing, *, other_than: int | None = None) -> int:
    """Returns the pid of the publishing process, once there is one.

    There may be none for a while: a broker on a slow machine replaces one that answers too late.
    """
    found: int | None = None

    def is_started() -> bool:
        nonlocal found
        found = process_of(broker.pid)
        return found not in (None, other_than)

    wait_until(is_started, "a process is started")
    assert found is not None
    return found


class Load:
    """A producer that sends records to all topics in turn, over a connection that others share."""

    def __init__(self, log: sparklog.Log) -> None:
        self.log = log
        self.futures: dict[str, list[RecordFuture]] = {name: [] for name in TOPICS}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def _send(self) -> None:
        with self.log.producer(linger_ms=1) as producer:
            while not self._ended.wait(0.2):
                for name, futures in self.futures.items():
                    value = b"%d" % len(futures)
                    futures.append(producer.send(name, value=value, partition=0))
            producer.flush(60.0)

    def end(self) -> None:
        self._ended.set()
        self._thread.join(90.0)


@contextlib.contextmanager
def busy(broker: Standing) -> Iterator[Load]:
    """All topics get records, and a publishing process writes them."""
    with sparklog.connect(broker.flight) as log:
        for name in TOPICS:
            log.create_topic(name, partitions=1)
        load = Load(log)
        try:
            await_process(broker)
            yield load
        finally:
            load.end()


def check(root: Path, load: Load) -> None:
    """Each table has each acked record once, in order."""
    store, clock = LocalStore(root), SystemClock()
    for name, futures in load.futures.items():
        rows = rows_of_table(store, clock, name)
        assert rows == [(number, b"%d" % number) for number in range(len(futures))]
        assert [each.result(0.0).offset for each in futures] == list(range(len(futures)))


def kill_process(broker: Standing, log: sparklog.Log) -> None:
    """Kills the publishing process; returns once acked records are published, and another runs."""
    killed = await_process(broker)
    os.kill(killed, signal.SIGKILL)
    log.flush_to_table(timeout_seconds=60.0)
    await_process(broker, other_than=killed)


def test_a_killed_process_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """The broker publishes by itself, and starts another process; both end with the broker."""
    with standing(tmp_path) as broker:
        with busy(broker) as load:
            for _ in range(2):
                kill_process(broker, load.log)
            load.log.flush_to_table(timeout_seconds=60.0)
        last = await_process(broker)
        broker.end(signal.SIGTERM)
        assert not is_running(last)
    check(tmp_path, load)


@pytest.mark.soak(mode="limits")  # it waits for a minute
def test_a_suspended_process_is_replaced(tmp_path: Path) -> None:
    """The broker waits for it for a bounded time, and acks meanwhile."""
    with standing(tmp_path) as broker:
        with busy(broker) as load:
            suspended = await_process(broker)
            os.kill(suspended, signal.SIGSTOP)
            wait_until(lambda: not is_running(suspended), "it is killed")
            load.log.flush_to_table(timeout_seconds=60.0)
        broker.end(signal.SIGTERM)
    check(tmp_path, load)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def test_the_process_ends_with_its_broker(tmp_path: Path, how: signal.Signals) -> None:
    """It outlives a broker that is killed by what it is doing at most."""
    with standing(tmp_path) as broker:
        with busy(broker) as load:
            load.end()
            process = await_process(broker)
        broker.end(how)
        wait_until(lambda: not is_running(process), "it has ended")


@contextlib.contextmanager
def worker(root: Path) -> Iterator[WorkerProcess]:
    """A process that takes requests."""
    found = WorkerProcess(root.as_uri())
    try:
        wait_until(found.is_ready, "it is ready")
        yield found
    finally:
        found.end()


def test_modules_in_the_working_directory_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker may be started in any folder; the process has the modules of the broker."""
    (tmp_path / "msgspec.py").write_text("raise ValueError")
    monkeypatch.chdir(tmp_path)
    with worker(tmp_path / "root") as process:
        assert process.ask(PutAll([("topics/t/a", b"b")])).outcomes == [None]
    assert (tmp_path / "root/topics/t/a").read_bytes() == b"b"


def test_signals_of_a_terminal_do_not_reach_the_process(tmp_path: Path) -> None:
    """They go to the broker's process group. It decides when the process ends, which may start."""
    process = WorkerProcess(tmp_path.as_uri())
    try:
        assert os.getpgid(process.pid) != os.getpgid(0)
    finally:
        process.end()


def test_a_process_of_another_version_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release may be installed while a broker runs: its messages or files may be others."""
    monkeypatch.setattr(publish_process, "VERSION", "0.0.1")
    with (
        capture_logs() as logged,
        pytest.raises(WorkerLost, match="has ended"),
        worker(tmp_path),
    ):
        pass
    (line,) = logged
    assert "was installed while 0.0.1 ran: restart the broker" in line["text"]


def test_the_traceback_of_a_process_is_in_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The broker's standard error may be a log file, which another one replaces meanwhile."""
    with capture_logs() as logged, worker(tmp_path) as process:
        process._connection.sendall(encode(Answer()))
        with pytest.raises(WorkerLost):
            process.ask(PutAll([]))
    (line,) = logged
    assert line["event"] == "the publishing process wrote to stderr"
    assert line["pid"] == process.pid
    assert line["text"].startswith("Traceback (most recent call last):")
    assert "ValidationError" in line["text"]
    assert capfd.readouterr().err == ""


def test_a_process_that_writes_much_is_not_held_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for the broker to read; the log has the last of it."""
    loud = tmp_path / "loud"
    loud.mkdir()
    (loud / "sitecustomize.py").write_text(
        "import os\nfor number in range(100_000):\n"
        "    try: os.write(2, b'%d\\n' % number)\n"
        "    except BlockingIOError: pass\n"
    )
    monkeypatch.syspath_prepend(loud)
    with capture_logs() as logged, worker(tmp_path / "root") as process:
        assert process.ask(PutAll([("topics/t/a", b"b")])).outcomes == [None]
    (line,) = logged
    assert len(line["text"]) <= STDERR_BYTES
