"""Programs that are forked from a warm process behave as those that start by themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import preloaded

_TELL = "import os, sys; print(os.getpid(), os.getcwd(), os.environ['A'], sys.argv[1:])"


def test_a_program_has_what_it_was_given(tmp_path: Path) -> None:
    """Pid, folder, environment, arguments and standard files are its own."""
    process = preloaded.start(
        ["-c", _TELL, "x"], cwd=tmp_path, env={**os.environ, "A": "b"}, stdout=subprocess.PIPE
    )
    output, errors = process.communicate(timeout=60.0)
    assert output.decode().split() == [str(process.pid), str(tmp_path), "b", "['x']"]
    assert (process.returncode, errors) == (0, b"")
    assert process.pid != os.getpid()


@pytest.mark.parametrize(
    ("code", "status"),
    [("pass", 0), ("raise SystemExit(3)", 3), ("import sys; sys.exit('no')", 1), ("1 / 0", 1)],
)
def test_an_exit_code_is_told(code: str, status: int) -> None:
    """As of any Python, with the traceback on standard error."""
    done = preloaded.run(["-c", code])
    assert done.returncode == status
    assert (b"ZeroDivisionError" in done.stderr) is (code == "1 / 0")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_ends_a_program(number: signal.Signals) -> None:
    """Its exit code is that of a process that a signal has ended."""
    code = "import sys; print('ready', flush=True); sys.stdin.read()"
    process = preloaded.start(["-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(number)
    process.communicate(timeout=60.0)
    assert process.returncode == -number


def test_a_module_runs_as_the_main_one() -> None:
    """`sparklog version` is the command line of the package."""
    assert preloaded.run(["sparklog", "version"]).stdout.startswith(b"sparklog ")


_PARENT = """
import os, signal, subprocess, sys
child = [sys.executable, "-P", "-m", "tests.support.sleeping"]
with subprocess.Popen(child, stdout=subprocess.PIPE, text=True) as started:
    pid, parent = map(int, started.stdout.readline().split())
    os.kill(pid, signal.SIGKILL)
print(pid == started.pid, parent == os.getppid(), started.wait())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="programs are forked on Linux")
def test_a_program_that_a_program_starts_is_forked_too() -> None:
    """The server has forked both, and the first one sees which signal has ended the second."""
    done = preloaded.run(["-c", _PARENT])
    assert done.stdout.split() == [b"False", b"True", b"-9"], done.stderr


def test_a_program_with_more_files_starts_by_itself(tmp_path: Path) -> None:
    """Only the three standard files would reach the server."""
    launcher = preloaded.launcher(tmp_path / "python", "-m tests.support.sleeping")
    environment = {**os.environ, **preloaded.variables("brokers")}
    with (tmp_path / "file").open("w") as file:
        program = subprocess.Popen(
            [launcher], pass_fds=[file.fileno()], env=environment, stdout=subprocess.PIPE
        )
    with program:
        assert program.stdout is not None
        pid, parent = map(int, program.stdout.readline().split())
        program.kill()
    assert (pid, parent) == (program.pid, os.getpid())
