"""A client that behaves, in a process of its own: the worst that it meets is what others do to it.

Run as a program with `HOST PORT`; reads frames as one line of JSON, then answers each line on its
standard input with what it has met since the line before. Standard library only, so that it starts
at once and takes little of the processor.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable

PAUSE_SECONDS = 0.01
GIVE_UP_SECONDS = 30.0


class Meter:
    """The longest of some spans of time. Thread-safe enough: one writes, one reads and resets."""

    def __init__(self) -> None:
        self.count = 0
        self._worst = 0.0
        self._since: float | None = None

    def measure(self, what: Callable[[], object]) -> None:
        self._since = time.monotonic()
        what()
        began, self._since = self._since, None
        self._worst = max(self._worst, time.monotonic() - began)
        self.count += 1

    def taken(self) -> tuple[int, float]:
        """(how many, the longest), one that has not ended yet included; begins again."""
        since, now = self._since, time.monotonic()
        running = now - since if since is not None else 0.0
        found = self.count, max(self._worst, running)
        self.count, self._worst = 0, 0.0
        return found


class Link:
    """One connection that asks the same again and again."""

    def __init__(self, host: str, port: int, frame: bytes, code_at: int | None = None) -> None:
        self._socket = socket.create_connection((host, port), GIVE_UP_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._frame = frame
        self._code_at = code_at

    def ask(self) -> None:
        self._socket.sendall(self._frame)
        answer = self._read(int.from_bytes(self._read(4), "big"))
        if self._code_at is not None:
            code = int.from_bytes(answer[self._code_at : self._code_at + 2], "big")
            if code:
                raise RuntimeError(f"error code {code}")

    def _read(self, size: int) -> bytes:
        parts = b""
        while len(parts) < size:
            part = self._socket.recv(size - len(parts))
            if not part:
                raise ConnectionError("the broker has closed the connection of a bystander")
            parts += part
        return parts


def main() -> None:
    """Runs until standard input ends."""
    host, port = sys.argv[1], int(sys.argv[2])
    given = json.loads(sys.stdin.readline())
    pings = Link(host, port, bytes.fromhex(given["ping"]), given["ping_code_at"])
    sends = Link(host, port, bytes.fromhex(given["send"]), given["send_code_at"])
    large = Link(host, port, bytes.fromhex(given["large_send"]), given["send_code_at"])
    meters = {each: Meter() for each in ("ping", "send", "large_send", "sleep")}
    works: dict[str, Callable[[], object]] = {
        "ping": pings.ask,
        "send": sends.ask,
        "large_send": large.ask,
        "sleep": lambda: time.sleep(PAUSE_SECONDS),
    }
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
        for name, meter in meters.items():
            found[f"{name}s"], found[f"{name}_seconds"] = meter.taken()
        sys.stdout.write(json.dumps({**found, "failures": failures}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
