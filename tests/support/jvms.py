"""Kafka programs, each in its own JVM, that are asked to exit."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import pytest

from benchmarks import jars
from benchmarks.kafka_process import java
from tests.support.waiting import wait_until

PATIENCE_SECONDS: Final = 60.0
SHORT_LIVED: Final = (
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    "-XX:+UnlockDiagnosticVMOptions",
    "-XX:-BytecodeVerificationRemote",
)
"""Flags of a JVM that exits before its optimizing compiler and bytecode verification pay off.

Those take half of the CPU time of a short Spark program.
"""


def class_path(artifact: str = "kafka-tools") -> Sequence[str]:
    """Returns the jars of a Kafka artifact, and those of its tools, which include the logger."""
    try:
        found = jars.find_tools(artifact) + jars.find_tools()
    except RuntimeError as error:
        pytest.skip(str(error))
    return tuple(dict.fromkeys(found))


def command(path: Sequence[str], *arguments: str) -> list[str]:
    """Returns the command of a JVM that logs only errors."""
    return [
        *(java(), "-Xmx512m", *SHORT_LIVED, "-Dorg.apache.logging.log4j.level=ERROR"),
        *("-cp", os.pathsep.join(path), *arguments),
    ]


class Program:
    """A running JVM, and the lines that it has written."""

    def __init__(self, path: Sequence[str], arguments: Sequence[str]) -> None:
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            command(path, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, line: str) -> None:
        """Waits until it has written the line; fails if it ends without doing so."""
        wait_until(lambda: line in self.lines or not self._thread.is_alive(), f"it said {line!r}")
        assert line in self.lines, self.output

    def tell(self, line: str) -> None:
        """Writes the line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def end_of_input(self) -> None:
        """Closes its standard input, upon which some programs exit."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Returns its exit code; fails if it does not end."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the program does not end: {self.output}")
        self._thread.join(seconds)
        return code

    def terminate(self) -> int:
        """Asks it to exit. Returns its exit code."""
        self._process.terminate()
        return self.wait()

    def close(self) -> None:
        """Kills it, whatever its state."""
        self._process.kill()
        self._process.wait()
        self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def running(path: Sequence[str], *arguments: str) -> Iterator[Program]:
    """Yields a program with that class path, which is killed at the end of the block."""
    program = Program(path, arguments)
    try:
        yield program
    finally:
        program.close()
