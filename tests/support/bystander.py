"""A well-behaved client in its own process that measures the worst delays caused by others.

Run as a program with `HOST PORT PID`, where the PID is the broker's. It reads frames as one line of
JSON, then answers each line on its standard input with its measurements since the previous line.
Each wait is measured twice: in wall-clock time, and in CPU time that the broker used, which does
not depend on other load on the machine. Standard library only, so that it starts quickly and uses
little CPU.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

PAUSE_SECONDS = 0.03
GIVE_UP_SECONDS = 30.0
NOTED_SECONDS = 0.02
"""Shorter spans of time are not recorded individually."""

Span = tuple[float, float]


class Sleeper:
    """Measures when the machine delays this process: its own short sleeps take too long.

    During such a delay, and only then, waits are not the broker's fault.
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._wakes = time.monotonic()

    def sleep(self) -> None:
        self._wakes = time.monotonic() + PAUSE_SECONDS
        time.sleep(PAUSE_SECONDS)
        now = time.monotonic()
        if now - self._wakes > NOTED_SECONDS:
            self._spans.append((self._wakes, now))

    def taken(self) -> list[Span]:
        """Returns the spans since the last call."""
        found, self._spans = self._spans, []
        now = time.monotonic()
        return [*found, (self._wakes, now)] if now > self._wakes else found


class Processor:
    """Measures the CPU time of a process."""

    _TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")

    def seconds(self) -> float:
        """Returns the time to a hundredth of a second; 0 if the process has ended."""
        try:
            # The name, in parentheses, may contain spaces.
            fields = self._stat.read_text("utf-8", "replace").rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / self._TICKS_PER_SECOND


class Meter:
    """The longest of several waits. Thread-safe enough for one writer and one resetting reader."""

    def __init__(self, processor: Processor) -> None:
        self.count = 0
        self._processor = processor
        self._worst = self._worst_cpu = 0.0
        self._spans: list[Span] = []
        self._since: tuple[float, float] | None = None

    def measure(self, what: Callable[[], object]) -> None:
        self._since = time.monotonic(), self._processor.seconds()
        what()
        (began, cpu_began), self._since = self._since, None
        self._note(began, time.monotonic(), self._processor.seconds() - cpu_began)
        self.count += 1

    def _note(self, began: float, ended: float, cpu: float) -> None:
        self._worst_cpu = max(self._worst_cpu, cpu)
        if ended - began > NOTED_SECONDS:
            self._spans.append((began, ended))
        else:
            self._worst = max(self._worst, ended - began)

    def taken(self, kept: Sequence[Span]) -> tuple[int, float, float]:
        """Returns (count, longest wait, most CPU time) and starts over.

        A wait still in progress is included. Spans in which the machine `kept` this process
        waiting are excluded from the longest wait.
        """
        since, now = self._since, time.monotonic()
        spans, self._spans = self._spans, []
        cpu = self._worst_cpu
        if since is not None:
            spans.append((since[0], now))
            cpu = max(cpu, self._processor.seconds() - since[1])
        found = self.count, max((_net(each, kept) for each in spans), default=0.0)
        worst, self._worst, self._worst_cpu, self.count = self._worst, 0.0, 0.0, 0
        return found[0], max(found[1], worst), cpu


def _net(span: Span, kept: Sequence[Span]) -> float:
    began, ended = span
    within = sum(max(min(ended, until) - max(began, since), 0.0) for since, until in kept)
    return ended - began - within


class Link:
    """A connection that repeats one request."""

    def __init__(self, host: str, port: int, frame: bytes, code_at: int | None = None) -> None:
        self._socket = socket.create_connection((host, port), GIVE_UP_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._frame = frame
        self._code_at = code_at

    def ask(self) -> bytes:
        """Returns the response, without its length."""
        self._socket.sendall(self._frame)
        answer = self._read(int.from_bytes(self._read(4), "big"))
        if self._code_at is not None:
            code = int.from_bytes(answer[self._code_at : self._code_at + 2], "big")
            if code:
                raise RuntimeError(f"error code {code}")
        return answer

    def _read(self, size: int) -> bytes:
        parts = b""
        while len(parts) < size:
            part = self._socket.recv(size - len(parts))
            if not part:
                raise ConnectionError("the broker has closed the connection of a bystander")
            parts += part
        return parts


class Reader(Link):
    """A consumer of the newest acked records. Its frame is a Fetch below version 5."""

    _OFFSET_AT = -12
    """In the frame, which ends with the offset and the partition's maximum bytes."""
    _SIZE_AT = 2 + 8 + 8 + 4
    """After error code, high watermark, last stable offset and the empty aborted transactions."""

    def __init__(self, host: str, port: int, frame: bytes, code_at: int) -> None:
        super().__init__(host, port, frame, code_at)
        self._size_at = code_at + self._SIZE_AT
        self.offset: int | None = None

    def fetch(self) -> None:
        """Fetches the last acked record. Raises RuntimeError if it is missing."""
        if self.offset is None:
            return  # nothing acked yet
        offset = self.offset.to_bytes(8, "big")
        self._frame = self._frame[: self._OFFSET_AT] + offset + self._frame[self._OFFSET_AT + 8 :]
        answer = self.ask()
        if int.from_bytes(answer[self._size_at : self._size_at + 4], "big", signed=True) <= 0:
            raise RuntimeError(f"no record at offset {self.offset}, which was acked")


def main() -> None:
    """Runs until standard input ends."""
    host, port, processor = sys.argv[1], int(sys.argv[2]), Processor(int(sys.argv[3]))
    given = json.loads(sys.stdin.readline())
    pings = Link(host, port, bytes.fromhex(given["ping"]), given["ping_code_at"])
    sends = Link(host, port, bytes.fromhex(given["send"]), given["send_code_at"])
    large = Link(host, port, bytes.fromhex(given["large_send"]), given["send_code_at"])
    reader = Reader(host, port, bytes.fromhex(given["fetch"]), given["fetch_code_at"])
    offset_at = given["send_code_at"] + 2
    sleeper = Sleeper()

    def send() -> None:
        reader.offset = int.from_bytes(sends.ask()[offset_at : offset_at + 8], "big")

    works: dict[str, Callable[[], object]] = {
        "ping": pings.ask,
        "send": send,
        "large_send": large.ask,
        "fetch": reader.fetch,
        "sleep": sleeper.sleep,
    }
    meters = {each: Meter(processor) for each in works}
    failures: dict[str, str] = {}

    def repeat(name: str) -> None:
        try:
            while True:
                meters[name].measure(works[name])
                time.sleep(PAUSE_SECONDS)
        except Exception as error:
            failures[name] = repr(error)

    for name in works:
        threading.Thread(target=repeat, args=(name,), daemon=True).start()
    for _ in sys.stdin:
        found: dict[str, object] = {}
        kept = sleeper.taken()
        for name, meter in meters.items():
            is_machine = name == "sleep"
            count, seconds, cpu_seconds = meter.taken(() if is_machine else kept)
            found[name] = {"count": count, "seconds": seconds, "cpu_seconds": cpu_seconds}
        sys.stdout.write(json.dumps({**found, "failures": failures}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
