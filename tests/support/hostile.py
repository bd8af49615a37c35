"""Misbehaving clients against a broker in a separate process, alongside a well-behaved one.

`Siege` starts the broker and the bystander; `Siege.bear(case)` runs one case and reports what the
bystander experienced and how large the broker's memory grew. A case is a function of the broker's
address: it ends on its own within seconds, and closes everything that it has opened. It yields
while it holds its resources, until the bystander has been served.

While other tests run, the length of the bystander's waits says little. So they are bounded by the
CPU time that the broker uses during them: the work it does for others before it responds.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from sparklog import limits
from sparklog.broker.groups.known_groups import GROUPS_MEMBERS_BYTES
from sparklog.broker.log.kafka_readers import AHEAD_BYTES
from tests.support import bystander, kafkarequests
from tests.support.kafkas import Frames
from tests.support.killing import BrokerProcess
from tests.support.processes import resident_bytes
from tests.support.waiting import wait_until

WAIT_SECONDS: Final = {"ping": 0.25, "send": 1.0, "large_send": 1.0, "fetch": 0.5}
"""Limits for the bystander's waits on a quiet machine."""
LARGE_BYTES: Final = 40_000
"""Size of a send beyond the free allowance, which needs a memory grant as most producers' do."""
SPARE_BYTES: Final = 300 << 20
ATTEMPTS: Final = 3
"""A busy machine may exceed a time limit, but not three times."""
CHANCE: Final = 4
"""Nor does it exceed a limit by more than this factor."""
PROCESSORS: Final = 2
"""CPU seconds of the broker allowed per second of a wait: its threads run concurrently.

Without bounds in the broker, the cases took eight times `WAIT_SECONDS` and more.
"""
SMALL_FETCH_BYTES: Final = 128 << 10
"""Larger replies share a memory budget with those to clients that do not read."""

KAFKA_BYTES: Final = 128 << 20
HOT_BYTES: Final = 128 << 20
QUEUE_BYTES: Final = 64 << 20
WRITTEN_BYTES: Final = HOT_BYTES + QUEUE_BYTES + limits.PUBLISH_MAX_BYTES
"""Bytes of written records that may stay in memory, the last of them decoded for publishing."""
READ_BYTES: Final = AHEAD_BYTES
"""Bytes of old records that may stay in memory, encoded ahead for sequential readers."""
BOUND_BYTES: Final = KAFKA_BYTES + WRITTEN_BYTES + READ_BYTES + GROUPS_MEMBERS_BYTES
"""Bytes that the broker may use for requests and replies."""
TOPICS_BYTES: Final = 96 << 20
"""The memory of the topics that the cases create: about 10,000 partitions of 9 kB."""
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
_REPLIES: Final = 3
"""Replies of each kind before an attack ends; the first may have been requested before it began."""
_MORE_REPLIES: Final = 60
"""Replies on a quiet machine, where they take about two seconds."""
_LOOK_SECONDS: Final = 0.02

Address = tuple[str, int]
Attack = Callable[[Address], Iterable[None] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """A bystander's waits of one kind during one case."""

    count: int
    seconds: float
    """The longest, without the time that the machine itself delayed the bystander."""
    cpu_seconds: float
    """The most CPU time that the broker used during one of them."""

    def and_then(self, count: int, seconds: float, cpu_seconds: float) -> Waits:
        """Returns these combined with later ones."""
        return Waits(
            count=self.count + count,
            seconds=max(self.seconds, seconds),
            cpu_seconds=max(self.cpu_seconds, cpu_seconds),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """The worst that a bystander experienced during one case."""

    waits: Mapping[str, Waits]
    sleep_seconds: float
    """Time that the machine itself delayed the bystander."""
    failures: Mapping[str, str]
    memory_bytes: int
    """Peak growth of the broker's resident memory over its idle size."""
    grown_bytes: int
    """Peak growth of the broker's memory since before the case."""
    room_bytes: int
    """Allowed growth of the broker's memory, without the spare bytes."""

    def is_sound(self) -> bool:
        """Returns true if everything was answered, within the broker's CPU and memory limits."""
        return (
            not self.failures
            and all(
                waits.count and waits.cpu_seconds <= PROCESSORS * WAIT_SECONDS[name]
                for name, waits in self.waits.items()
            )
            and self.memory_bytes <= BOUND_BYTES + TOPICS_BYTES + SPARE_BYTES
            and self.grown_bytes <= self.room_bytes + SPARE_BYTES
        )

    def is_in_time(self, factor: float = 1) -> bool:
        """Returns true if no wait exceeded a quiet machine's limit times the factor."""
        return all(
            waits.seconds <= factor * WAIT_SECONDS[name] for name, waits in self.waits.items()
        )


class _Served:
    """All that a bystander reports during one case."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self.waits = {each: Waits(count=0, seconds=0.0, cpu_seconds=0.0) for each in WAIT_SECONDS}
        self.sleep_seconds = 0.0
        self.failures: dict[str, str] = {}
        self._ask = ask

    def wait_for_more(self, replies: int) -> None:
        """Waits until the bystander has this many more replies of each kind, or has failed."""
        enough = {name: waits.count + replies for name, waits in self.waits.items()}

        def is_served() -> bool:
            met = self._ask()
            self.waits = {name: before.and_then(**met[name]) for name, before in self.waits.items()}
            self.sleep_seconds = max(self.sleep_seconds, met["sleep"]["seconds"])
            self.failures |= met["failures"]
            return bool(self.failures) or all(
                waits.count >= enough[name] for name, waits in self.waits.items()
            )

        wait_until(is_served, "the bystander is served")


class Siege:
    """A broker and a bystander that hostile clients attack."""

    def __init__(
        self, root: Path, settings: Mapping[str, str] | None = None, *, beside: str = ""
    ) -> None:
        """`beside`: another listener of the broker, which the bystander does not use."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.address: Address = ("127.0.0.1", probe.getsockname()[1])
        kafka = f"127.0.0.1:{self.address[1]}"
        listen = f"{kafka},{beside}" if beside else kafka
        self._broker = BrokerProcess(root, {**SETTINGS, **(settings or {})}, kafka=listen)
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
            # After the correlation id: the code of a ping; for others, one topic and one partition.
            place_bytes = 4 + 2 + len(_TOPIC) + 4 + 4
            codes = {
                "ping_code_at": 4,
                "send_code_at": 4 + place_bytes,
                "fetch_code_at": 4 + 4 + place_bytes,  # and the throttle time
            }
            command = [sys.executable, bystander.__file__, *map(str, self.address), str(self._pid)]
            self._bystander = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            fetch_fields = kafkarequests.fetch_fields(_TOPIC, 0, 0, SMALL_FETCH_BYTES)
            fetch = Frames.frame(1, 4, 1, fetch_fields)
            frames = {"ping": ping, "send": send, "large_send": large_send, "fetch": fetch}
            self._tell(json.dumps({name: each.hex() for name, each in frames.items()} | codes))
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
        """Address of the Flight listener."""
        return self._broker.address

    @contextlib.contextmanager
    def frames(self) -> Iterator[Frames]:
        """Yields a well-behaved connection."""
        found = Frames("{}:{}".format(*self.address))
        try:
            yield found
        finally:
            found.close()

    def withstand(
        self, attack: Attack, room_bytes: int = BOUND_BYTES, *, name: str, is_timed: bool = False
    ) -> None:
        """Runs an attack. Raises AssertionError if a request failed or a limit was exceeded.

        Args:
            room_bytes: memory that the attack may take up, by the broker's settings.
            name: of the attack, printed with its numbers (shown with `-s`).
            is_timed: limits wall-clock time as well, for a machine that does nothing else.
        """
        for _ in range(ATTEMPTS):
            met = self.bear(attack, room_bytes, replies=_MORE_REPLIES if is_timed else _REPLIES)
            print(name, met)  # noqa: T201
            assert met.is_sound(), met
            if not is_timed or met.is_in_time() or not met.is_in_time(CHANCE):
                break
        assert not is_timed or met.is_in_time(), met

    def bear(
        self, attack: Attack, room_bytes: int = BOUND_BYTES, *, replies: int = _REPLIES
    ) -> Met:
        """Runs the attack. Returns what the bystander met during it, and nothing from before.

        Args:
            replies: of each kind that the bystander receives while an attack holds its resources.
        """
        self._met()
        served = _Served(self._met)
        done = threading.Event()
        before_bytes = self.memory_bytes()
        largest = [before_bytes]

        def watch() -> None:
            while not done.wait(_LOOK_SECONDS):
                largest[0] = max(largest[0], self.memory_bytes())

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            for _ in attack(self.address) or ():
                served.wait_for_more(replies)
            # An attack that ends immediately leaves no time to serve the bystander.
            served.wait_for_more(_REPLIES)
        finally:
            done.set()
            watching.join()
        return Met(
            waits=served.waits,
            sleep_seconds=max(served.sleep_seconds - bystander.PAUSE_SECONDS, 0.0),
            failures=served.failures,
            memory_bytes=largest[0] - self._idle_bytes,
            grown_bytes=largest[0] - before_bytes,
            room_bytes=room_bytes,
        )

    def memory_bytes(self) -> int:
        """The broker's current resident memory."""
        return resident_bytes(self._pid)

    def cpu_seconds(self) -> float:
        """Returns the broker's CPU time, to a hundredth of a second."""
        return bystander.Processor(self._pid).seconds()

    @property
    def _pid(self) -> int:
        process = self._broker._process
        assert process is not None
        return process.pid

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
