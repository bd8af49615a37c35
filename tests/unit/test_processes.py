from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from sparklog.storage.metadata import processes
from sparklog.storage.metadata.processes import (
    Fate,
    Process,
    fate_of,
    is_of_this_machine,
    this_process,
)


@pytest.fixture(autouse=True)
def forgets_this_machine() -> Iterator[None]:
    """Forgets cached facts about a machine that a test has made up."""
    yield
    processes.machine.cache_clear()
    processes._own.cache_clear()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """Another process of this machine."""
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    ) as process:
        yield process
        process.kill()


def named(child: subprocess.Popen[bytes]) -> Process:
    """The child, with the identity that it would report for itself."""
    started = processes._started(child.pid)
    assert started
    return msgspec.structs.replace(this_process(), pid=child.pid, started=started)


def test_a_process_runs_until_it_is_killed(child: subprocess.Popen[bytes]) -> None:
    """A killed process is gone at once, even before its parent has read its exit status."""
    process = named(child)
    assert fate_of(process) is Fate.RUNS
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    assert fate_of(process) is Fate.GONE
    child.wait()
    assert fate_of(process) is Fate.GONE


def test_a_reused_pid_is_another_process(child: subprocess.Popen[bytes]) -> None:
    """A process with the same pid and another start time is another process."""
    earlier = msgspec.structs.replace(named(child), started="1")
    assert fate_of(earlier) is Fate.GONE


@pytest.mark.parametrize(
    "changed",
    [
        {"host": "elsewhere"},
        {"machine": "another boot"},
        {"machine": ""},
        {"pid": 0},
        {"started": ""},
    ],
    ids=str,
)
def test_processes_elsewhere_are_not_judged(
    child: subprocess.Popen[bytes], changed: dict[str, object]
) -> None:
    """A pid of another host or boot cannot be checked, nor an incomplete identity."""
    process = msgspec.convert(msgspec.to_builtins(named(child)) | changed, Process)
    assert fate_of(process) is Fate.UNKNOWN


def test_another_pid_namespace_is_another_machine(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers of one host share its boot id, and not their pids."""
    process = named(child)
    child.kill()
    child.wait()
    assert fate_of(process) is Fate.GONE
    real = Path.readlink

    def elsewhere(path: Path) -> Path:
        return Path("pid:[1]") if str(path) == "/proc/self/ns/pid" else real(path)

    monkeypatch.setattr(Path, "readlink", elsewhere)
    processes.machine.cache_clear()
    assert not is_of_this_machine(process)
    assert fate_of(process) is Fate.UNKNOWN


def test_a_machine_without_proc_asks_ps(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If /proc does not show a process, `ps` returns its start time, the same at each call."""
    real = Path.read_text

    def hidden(path: Path, *args: str) -> str:
        if str(path).endswith("/stat"):
            raise FileNotFoundError(path)
        return real(path, *args)

    monkeypatch.setattr(Path, "read_text", hidden)
    process = named(child)
    assert fate_of(process) is Fate.RUNS
    assert fate_of(msgspec.structs.replace(process, started="Mon Jan 1")) is Fate.GONE
    child.kill()
    child.wait()
    assert fate_of(process) is Fate.GONE


def test_a_forked_child_is_another_process() -> None:
    """A forked child does not reuse its parent's cached identity."""
    parent = this_process()
    assert parent.pid == os.getpid()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, msgspec.json.encode(this_process()))
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        process = msgspec.json.decode(answer.read(), type=Process)
    assert process.pid == child
    assert process.machine == parent.machine
