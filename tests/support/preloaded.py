"""Starts Python programs by forking a process that has already imported everything.

A broker spends most of its start on imports, and tests start hundreds of brokers. `start` asks a
server, one per pytest worker, to fork. The child then runs the module as `python -m` does, in a
process with its own pid and the requested environment, folder and standard files, and can be killed
like any other. Only imports differ, so tests of a program's very start and end use `subprocess`. So
does `start` for a program with another PYTHONPATH, whose `sitecustomize` would run too late, and on
systems other than Linux.

Third-party programs such as Spark start Python through `launch.py`, and so do forked programs.
Spark's processes come from a separate server, which has imported pyspark and pandas.

Protocol: one connection per program. The client sends `Request` as JSON with three open files; the
server replies with the pid, and later with the exit status, each on a line.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Protocol

from tests.support import launch

MODULES: Final = {
    "brokers": (
        "sparklog.broker.flight.listener",
        "sparklog.broker.groups.coordinator",
        "sparklog.broker.kafka.apis",
        "sparklog.broker.kafka.listener",
        "sparklog.broker.metrics.server",
        "sparklog.broker.running",
        "sparklog.broker.supervisor",
        "sparklog.cli",
        "sparklog.client.log",
        "sparklog.formats.record_batch",
        "uvloop",
    ),
    "spark": (
        "pandas",
        "pyspark.sql.pandas.serializers",
        "pyspark.sql.worker.commit_data_source_write",
        "pyspark.sql.worker.create_data_source",
        "pyspark.sql.worker.plan_data_source_read",
        "pyspark.sql.worker.write_into_data_source",
        "pyspark.sql.streaming.python_streaming_source_runner",
        "pyspark.worker",
        "sparklog.client.log",
        "sparklog.connecting",
        "sparklog.sinks.datasink",
        "sparklog.sources.batch",
        "sparklog.sources.datasource",
        "sparklog.sources.stream",
    ),
}
"""Modules that each server imports."""
_ADDRESS: Final = "PRELOADED"
"""Environment variable with the address of the server for `launch.py`."""
NONE: Final = {_ADDRESS: ""}
"""The environment with which a `launcher` starts an ordinary Python."""
_CAN_FORK: Final = sys.platform == "linux"
_ROOT: Final = Path(__file__).parents[2]
_READ_BYTES: Final = 1 << 20

_File = int | IO[Any] | None


class Process(Protocol):
    """A program that a test has started: the part of `subprocess.Popen` that tests use."""

    @property
    def pid(self) -> int: ...
    @property
    def stdin(self) -> IO[bytes] | None: ...
    @property
    def stdout(self) -> IO[bytes] | None: ...
    @property
    def stderr(self) -> IO[bytes] | None: ...
    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def communicate(self, *, timeout: float | None = None) -> tuple[bytes, bytes]: ...
    def send_signal(self, number: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def start(
    words: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: _File = subprocess.DEVNULL,
    stdout: _File = None,
    stderr: _File = None,
) -> Process:
    """Starts a module as `python -m` does, or code as `python -c` does.

    Args:
        words: the module and its arguments; or `-c`, the code and its arguments.
        env: the whole environment; by default that of this process.
        stdin, stdout, stderr: `subprocess.PIPE`, `subprocess.DEVNULL`, an open file, or None for
            the file of this process.
    """
    given = os.environ if env is None else env
    if _CAN_FORK and given.get("PYTHONPATH") == os.environ.get("PYTHONPATH"):
        return _Forked(words, env=env, cwd=cwd, files=(stdin, stdout, stderr))
    command = [sys.executable, *([] if words[0] == "-c" else ["-m"]), *words]
    return subprocess.Popen(command, env=env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr)


def run(
    words: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = 60.0
) -> subprocess.CompletedProcess[bytes]:
    """Runs a module or code to its end, and captures its output. See `start`."""
    process = start(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = process.communicate(timeout=timeout)
    assert process.returncode is not None
    return subprocess.CompletedProcess([*words], process.returncode, output, errors)


def launcher(program: Path, words: str = "") -> str:
    """Writes a program that runs Python by `launch.py`, with these words as its first arguments.

    It needs `variables` in its environment.
    """
    new = program.with_name(f"{program.name}-{os.getpid()}")
    python = f"{sys.executable} -IS {launch.__file__}" if _CAN_FORK else sys.executable
    new.write_text(f'#!/bin/sh\nexec {python} {words} "$@"\n')
    new.chmod(0o755)
    new.rename(program)  # another pytest worker may be running it
    return str(program)


def variables(kind: str) -> dict[str, str]:
    """Returns the environment with which a `launcher` finds the server with these modules."""
    return {_ADDRESS: server(kind)} if _CAN_FORK else {}


# ------------------------------------------------------------------------------ the client


class _Forked:
    """A program that the server has forked."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str] | None,
        cwd: Path | None,
        files: Sequence[_File],
    ) -> None:
        self.returncode: int | None = None
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(server("brokers"))
        with contextlib.ExitStack() as closing:
            opened = [_opened(number, each, closing) for number, each in enumerate(files)]
            self.stdin, self.stdout, self.stderr = (ours for ours, _ in opened)
            theirs = [file for _, file in opened]
            launch.request(
                self._connection,
                theirs,
                words=[*words],
                cwd=str(cwd or Path.cwd()),
                environment={**(os.environ if env is None else env), **variables("brokers")},
            )
            self.pid = int(_line(self._connection))

    def poll(self) -> int | None:
        """Returns the exit code, or the negative signal, or None while the program runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code, or the negative signal. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(int(_line(self._connection)))
            self._connection.close()
        return self.returncode

    def communicate(self, *, timeout: float | None = None) -> tuple[bytes, bytes]:
        """Closes the input, waits for the end, and returns the output of the pipes.

        Raises `subprocess.TimeoutExpired`.
        """
        if self.stdin:
            self.stdin.close()
        with ThreadPoolExecutor(2) as pool:
            reading = [pool.submit(_read_all, pipe) for pipe in (self.stdout, self.stderr)]
            if futures.wait(reading, timeout).not_done:
                self.kill()
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        self.wait(timeout)
        output, errors = (each.result() for each in reading)
        return output, errors

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the program has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _opened(
    number: int, given: _File, closing: contextlib.ExitStack
) -> tuple[IO[bytes] | None, int]:
    """Returns our end of the pipe, if it is one, and the program's file."""
    if given == subprocess.PIPE:
        reading, writing = os.pipe()
        ours, theirs = (writing, reading) if number == 0 else (reading, writing)
        closing.callback(os.close, theirs)
        return os.fdopen(ours, "wb" if number == 0 else "rb"), theirs
    if given == subprocess.DEVNULL:
        nothing = os.open(os.devnull, os.O_RDWR)
        closing.callback(os.close, nothing)
        return None, nothing
    if given is None or isinstance(given, int):
        return None, number if given is None else given
    return None, given.fileno()


def _read_all(pipe: IO[bytes] | None) -> bytes:
    if pipe is None or pipe.closed:
        return b""
    with pipe:
        return pipe.read()


def _line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(1)  # the next line is for another call
        if not part:
            raise ConnectionError("the server of preloaded programs has ended")
        line += part
    return line


@functools.cache
def server(kind: str) -> str:
    """Starts the server of this process with these modules, and returns its address."""
    folder = tempfile.TemporaryDirectory(prefix="preloaded-")
    address = f"{folder.name}/socket"
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, address, kind],
        cwd=_ROOT,
        stdin=subprocess.PIPE,  # it exits at the end of this
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline(), "the server of preloaded programs did not start"

    def end() -> None:
        process.kill()
        process.communicate()
        folder.cleanup()

    atexit.register(end)
    return address


# ------------------------------------------------------------------------------ the server


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A program to run: its module and arguments, its folder and its environment."""

    words: Sequence[str]
    cwd: str
    environment: Mapping[str, str]
    is_tied: bool = False
    """Kills the program when the client ends."""


class _Server:
    """Forks a child for each connection."""

    def __init__(self, address: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(address)
        self._listening.listen(64)
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(sys.stdin, selectors.EVENT_READ)

    def run(self) -> Request | None:
        """Serves until standard input ends. Returns the request in each child."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is sys.stdin:
                    return None
                if key.fileobj is self._listening:
                    if (request := self._accept()) is not None:
                        return request
                elif isinstance(key.fileobj, socket.socket):
                    self._kill(key.fileobj, key.data)
                else:
                    self._end(key.fileobj, *key.data)

    def _accept(self) -> Request | None:
        """Returns the request in the child, None in the server."""
        connection, _ = self._listening.accept()
        data, files, _, _ = socket.recv_fds(connection, _READ_BYTES, len(launch.STANDARD_FILES))
        while data and len(data) < 4 + int.from_bytes(data[:4], "big"):
            data += connection.recv(_READ_BYTES)
        if not data:
            return None  # the client has failed
        request = Request(**json.loads(data[4:]))
        pid = os.fork()
        if not pid:
            self._become(files)
            return request
        for file in files:
            os.close(file)
        connection.sendall(b"%d\n" % pid)
        ended = os.pidfd_open(pid)
        self._selector.register(ended, selectors.EVENT_READ, (pid, connection))
        if request.is_tied:
            self._selector.register(connection, selectors.EVENT_READ, pid)
        return None

    def _kill(self, connection: socket.socket, pid: int) -> None:
        """Kills the program of a client that has ended."""
        self._selector.unregister(connection)
        os.kill(pid, signal.SIGKILL)

    def _end(self, ended: Any, pid: int, connection: socket.socket) -> None:
        """Reports the exit status of a program to its client."""
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(ended)
        os.close(ended)
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection)
        with contextlib.suppress(OSError), connection:
            connection.sendall(b"%d\n" % status)

    def _become(self, files: Sequence[int]) -> None:
        """Closes all files in a child except its standard files."""
        self._selector.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.closerange(len(launch.STANDARD_FILES), os.sysconf("SC_OPEN_MAX"))


def _run(request: Request, python: str) -> None:
    """Does in a child what `python -m` and `python -c` do in a new process.

    Args:
        python: the program with which the child starts others.
    """
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.executable = python
    more = request.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [request.cwd, *(each for each in more if each and each not in sys.path)]
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, closefd=False, buffering=buffering)  # noqa: SIM115
        for number, mode, buffering in ((0, "r", -1), (1, "w", -1), (2, "w", 1))
    )
    name, *words = request.words
    if name == "-c":
        sys.argv = [name, *words[1:]]
        # Keeps it alive until the interpreter exits, like a program's globals.
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[0], "<string>", "exec"), vars(module))
    else:
        sys.argv = [name, *words]
        sys.modules.pop(name, None)  # it may already have been imported
        runpy.run_module(name, run_name="__main__", alter_sys=True)


def main(address: str, kind: str) -> None:
    """Runs the server. In a child, its loop returns a request, which is run here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    for module in MODULES[kind]:
        importlib.import_module(module)
    if kind == "brokers":
        from sparklog.formats import record_batch

        record_batch.compile_loops()
    gc.collect()
    gc.freeze()  # children do not copy the pages of these objects
    python = launcher(Path(address).with_name("python"))
    server = _Server(address)
    print("ready", flush=True)  # noqa: T201
    request = server.run()
    if request is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        _run(request, python)


if __name__ == "__main__":
    main(*sys.argv[1:])
