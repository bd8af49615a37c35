"""Clients that do not behave, against a broker in a process of its own, beside one that does.

`Siege` starts the broker and the bystander; `Siege.bear(case)` runs one case and says what the
bystander met and how large the broker's memory became. A case is a function of the broker's
address: it ends by itself, within seconds, and closes what it has opened.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from sparklog import limits
from tests.support import bystander, kafkarequests
from tests.support.kafkas import Frames
from tests.support.killing import BrokerProcess

PING_SECONDS: Final = 0.25
ACK_SECONDS: Final = 1.0
LARGE_BYTES: Final = 40_000
"""Of a send that memory is counted for, as most producers' are, and not only what is free."""
LARGE_ACK_SECONDS: Final = 3.0
"""It may wait while two clients that hold memory and stand still are found out."""
SPARE_BYTES: Final = 300 << 20
ATTEMPTS: Final = 3
"""A machine that does other things at the same time may miss a bound of time; not three times."""
CHANCE: Final = 4
"""Nor by more than this factor."""

KAFKA_BYTES: Final = 128 << 20
HOT_BYTES: Final = 128 << 20
QUEUE_BYTES: Final = 64 << 20
BOUND_BYTES: Final = (
    KAFKA_BYTES
    + HOT_BYTES
    + QUEUE_BYTES
    + limits.KAFKA_AHEAD_BYTES  # old records, encoded for those who read on
    + limits.PUBLISH_MAX_BYTES  # what is being published, decoded
)
"""What the broker is bound to spend on what clients send and ask for."""
CONNECTIONS: Final = 600
SETTINGS: Final[Mapping[str, str]] = {
    "SPARKLOG_KAFKA_MAX_CONNECTIONS": str(CONNECTIONS),
    "SPARKLOG_KAFKA_MAX_CONNECTIONS_PER_ADDRESS": str(CONNECTIONS // 2),
    "SPARKLOG_KAFKA_MEMORY_BYTES": str(KAFKA_BYTES),
    "SPARKLOG_WRITER_QUEUE_BYTES": str(QUEUE_BYTES),
    "SPARKLOG_HOT_TAIL_BYTES": str(HOT_BYTES),
    "SPARKLOG_WRITER_TRIM_GRACE_SECONDS": "10",
    "SPARKLOG_PUBLISHER_INTERVAL_SECONDS": "1",
}
_TOPIC: Final = "bystander"
_WARM_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.02

Address = tuple[str, int]
Attack = Callable[[Address], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """The worst that a bystander met beside one case."""

    pings: int
    ping_seconds: float
    sends: int
    send_seconds: float
    large_sends: int
    large_send_seconds: float
    sleep_seconds: float
    """By how much the machine itself kept the bystander from going on."""
    failures: Mapping[str, str]
    memory_bytes: int
    """By how much the broker's resident memory grew, at its largest, from where it was idle."""

    @property
    def is_within(self) -> bool:
        """Whether all bounds were kept."""
        return self._is_within(1)

    @property
    def may_be_chance(self) -> bool:
        """Whether only time was missed, and not by much: so busy a machine may be."""
        return self._is_within(CHANCE)

    def _is_within(self, factor: float) -> bool:
        return (
            not self.failures
            and self.ping_seconds - self.sleep_seconds <= PING_SECONDS * factor
            and self.send_seconds - self.sleep_seconds <= ACK_SECONDS * factor
            and self.large_send_seconds - self.sleep_seconds <= LARGE_ACK_SECONDS * factor
            and self.memory_bytes <= BOUND_BYTES + SPARE_BYTES
        )


class Siege:
    """A broker, a bystander, and what hostile clients do to both."""

    def __init__(self, root: Path, settings: Mapping[str, str] | None = None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.address: Address = ("127.0.0.1", probe.getsockname()[1])
        kafka = f"127.0.0.1:{self.address[1]}"
        self._broker = BrokerProcess(root, {**SETTINGS, **(settings or {})}, kafka=kafka)
        self._bystander: subprocess.Popen[str] | None = None
        self._idle_bytes = 0

    def __enter__(self) -> Self:
        self._broker.start()
        try:
            with self.frames() as client:
                kafkarequests.create(client, _TOPIC)
                ping = Frames.frame(18, 0, 1, {})
                send, large_send = (
                    Frames.frame(0, 3, 1, kafkarequests.produce_fields(_TOPIC, 0, batch))
                    for batch in map(kafkarequests.batch, ([bytes(100)], [bytes(LARGE_BYTES)]))
                )
            # Correlation id, then for a ping its code; for a send one topic and one partition.
            codes = {"ping_code_at": 4, "send_code_at": 4 + 4 + 2 + len(_TOPIC) + 4 + 4}
            command = [sys.executable, bystander.__file__, *map(str, self.address)]
            self._bystander = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            frames = {"ping": ping.hex(), "send": send.hex(), "large_send": large_send.hex()}
            self._tell(json.dumps({**frames, **codes}))
            time.sleep(_WARM_SECONDS)
            self._met()
            self._idle_bytes = self.memory_bytes()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._bystander is not None:
            self._bystander.kill()
            self._bystander.communicate()
        self._broker.stop()

    @property
    def flight_address(self) -> str:
        """Of the Flight listener."""
        return self._broker.address

    @contextlib.contextmanager
    def frames(self) -> Iterator[Frames]:
        """A connection that behaves."""
        found = Frames("{}:{}".format(*self.address))
        try:
            yield found
        finally:
            found.close()

    def withstand(self, attack: Attack) -> Met:
        """What the bystander met at the first attempt within all bounds, or the last there is."""
        for _ in range(ATTEMPTS):
            met = self.bear(attack)
            if met.is_within or not met.may_be_chance:
                break
        return met

    def bear(self, attack: Attack) -> Met:
        """Runs the attack; what the bystander met meanwhile. The bystander starts with nothing."""
        self._met()
        done = threading.Event()
        largest = [self.memory_bytes()]

        def watch() -> None:
            while not done.wait(_LOOK_SECONDS):
                largest[0] = max(largest[0], self.memory_bytes())

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            attack(self.address)
        finally:
            done.set()
            watching.join()
        met = self._met()
        return Met(
            pings=met["pings"],
            ping_seconds=met["ping_seconds"],
            sends=met["sends"],
            send_seconds=met["send_seconds"],
            large_sends=met["large_sends"],
            large_send_seconds=met["large_send_seconds"],
            sleep_seconds=max(met["sleep_seconds"] - bystander.PAUSE_SECONDS, 0.0),
            failures=met["failures"],
            memory_bytes=largest[0] - self._idle_bytes,
        )

    def memory_bytes(self) -> int:
        """The broker's resident memory now."""
        process = self._broker._process
        assert process is not None
        status = Path(f"/proc/{process.pid}/status").read_text()
        (line,) = (each for each in status.splitlines() if each.startswith("VmRSS:"))
        return int(line.split()[1]) << 10

    def _met(self) -> Any:
        self._tell("")
        assert self._bystander is not None
        assert self._bystander.stdout is not None
        return json.loads(self._bystander.stdout.readline())

    def _tell(self, line: str) -> None:
        assert self._bystander is not None
        assert self._bystander.stdin is not None
        self._bystander.stdin.write(line + "\n")
        self._bystander.stdin.flush()
