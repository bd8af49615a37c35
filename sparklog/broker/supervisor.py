"""Runs several brokers on one machine: starts them, watches them, and ends with them.

- Each broker is a child process that reads its settings from its standard input, a pipe that stays
  open. End of file means that all brokers of the supervisor must stop. It also occurs, on every
  system, when the supervisor is killed, so no broker is left behind.
- In such a stop the brokers hand over no partitions to each other: those would move again and
  again, and would all end up with the broker that stops last. Brokers that the supervisor did not
  start receive them, as in any other stop. A broker that is stopped on its own hands its partitions
  over to all others.
- A broker that ends after it has served is restarted: immediately at first, then after growing
  pauses. All brokers stop if one of them fails before it has ever served, because it would fail
  again.
- Children write to the supervisor's standard error directly, so no line waits for the supervisor.
  They run in their own sessions: a Ctrl-C reaches only the supervisor, which stops them.

The supervisor imports nothing large, and has no part in what the brokers do.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

import msgspec
import structlog

from sparklog import errors, limits
from sparklog.broker.logging import configure
from sparklog.broker.shares import settings_of_each
from sparklog.clock import Clock, SystemClock
from sparklog.settings import BrokerSettings

PROCESS_STOP_SECONDS = 2 * (limits.DRAIN_SECONDS + limits.STOP_SECONDS)  # before they are killed
PROCESS_RETRY_SECONDS = 0.5  # before restarting a process that keeps ending; doubles
PROCESS_RETRY_MAX_SECONDS = 10.0
PROCESS_STEADY_SECONDS = 60.0  # of serving, after which earlier ends no longer count

_log = structlog.get_logger("sparklog.supervisor")
_WAIT_SECONDS: Final = 1.0
"""The longest wait for an event: an unbounded one would block signal handling."""
_BY_SIGNAL: Final = 128
"""Added to the number of the signal that ended a process, as in shells' exit codes."""


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a child's standard input: the broker to run."""

    settings: BrokerSettings
    stops_with: frozenset[int]
    """The ids of the other brokers of the supervisor."""
    take_over: bool = False
    allow_non_empty: bool = False


_decode: Final = msgspec.json.Decoder(Assignment).decode


# ------------------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True, kw_only=True)
class Serves:
    """A broker has begun to serve, and has written this line."""

    broker: int
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A broker's process has ended, with an exit code as in `subprocess`."""

    broker: int
    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """The supervisor received a signal."""

    reason: str
    may_kill: bool = True
    """False for a hangup, which may arrive twice, from the terminal and from the shell."""


Event: TypeAlias = Serves | Ended | StopRequested


# ------------------------------------------------------------------------------ decisions


class Child(Protocol):
    """A process that runs a broker."""

    def stop(self) -> None:
        """Makes it shut down cleanly. Never blocks."""
        ...

    def kill(self) -> None:
        """Kills it immediately, whatever it is doing."""
        ...


@dataclass(slots=True, kw_only=True)
class _Member:
    """One broker: its process, if running, and its history."""

    child: Child | None = None
    serves_since: float | None = None
    """None if its current process does not serve yet."""
    has_served: bool = False
    failures: int = 0
    """Consecutive ends, each soon after a start."""
    starts_at: float = field(default=-float("inf"))
    """When its next process is due, in monotonic seconds."""


class Supervisor:
    """Decides when brokers start and stop. Driven by one thread, with events and ticks."""

    def __init__(
        self,
        brokers: Sequence[int],
        start: Callable[[int, bool], Child],
        *,
        clock: Clock,
        tell: Callable[[str], None],
        root: str,
    ) -> None:
        """Creates a supervisor that has started nothing; `tick` starts the brokers.

        Args:
            brokers: their ids.
            start: starts the process of a broker; true if the broker has never served. Its events
                are passed to `handle`. May raise `OSError`.
            clock: its monotonic time decides when a broker is restarted.
            tell: prints a line for people.
            root: the root, as shown in those lines.
        """
        self._members = {broker: _Member() for broker in brokers}
        self._start = start
        self._clock = clock
        self._tell = tell
        self._root = root
        self._is_stopping = False
        self._kills_at = float("inf")
        """When brokers that have not stopped are killed, in monotonic seconds."""
        self._signals = 0
        self._failed_with = 0
        """The first failure's exit code, which the supervisor returns; 0: none failed."""

    @property
    def exit_code(self) -> int | None:
        """The code to exit with; None while brokers run."""
        if self._is_stopping and all(each.child is None for each in self._members.values()):
            return self._failed_with
        return None

    def pause_seconds(self) -> float:
        """Returns the time for which `tick` has nothing to do."""
        if self._is_stopping:
            return _WAIT_SECONDS
        due = [each.starts_at for each in self._members.values() if each.child is None]
        left_seconds = min(due, default=float("inf")) - self._clock.monotonic()
        return min(max(left_seconds, 0.0), _WAIT_SECONDS)

    def tick(self) -> None:
        """Starts the brokers that are due, or kills those that take too long to stop."""
        if self._kills_at <= self._clock.monotonic():
            self._kills_at = float("inf")
            self._kill("they take too long")
        for broker, member in self._members.items():
            is_due = member.child is None and member.starts_at <= self._clock.monotonic()
            if is_due and not self._is_stopping:
                try:
                    member.child = self._start(broker, not member.has_served)
                except OSError as error:
                    _log.error("cannot start a process", broker_id=broker, reason=str(error))
                    self._end(broker, member, 1)

    def handle(self, event: Event) -> None:
        """Reacts to an event."""
        match event:
            case Serves(broker=broker, line=line):
                self._serves(self._members[broker], line)
            case Ended(broker=broker, code=code):
                self._end(broker, self._members[broker], code)
            case StopRequested(reason=reason, may_kill=may_kill):
                self._stop_or_kill(reason, may_kill=may_kill)

    def _serves(self, member: _Member, line: str) -> None:
        member.serves_since = self._clock.monotonic()
        member.has_served = True
        self._tell(line)
        if all(each.serves_since is not None for each in self._members.values()):
            ids = ", ".join(map(str, self._members))
            self._tell(f"sparklog serves {self._root} with all its brokers: {ids}")

    def _end(self, broker: int, member: _Member, code: int) -> None:
        served_since, member.serves_since, member.child = member.serves_since, None, None
        if self._is_stopping:
            if code:
                _log.error("a broker did not stop cleanly", broker_id=broker, exit_code=code)
                self._fail(code)
        elif code and not member.has_served:
            _log.error(
                "all brokers stop, because one ended before it served; its error is on standard"
                " error",
                broker_id=broker,
                exit_code=code,
            )
            self._fail(code)
            self._stop()
        else:
            now = self._clock.monotonic()
            if served_since is not None and now - served_since >= PROCESS_STEADY_SECONDS:
                member.failures = 0
            pause_seconds = 0.0
            if member.failures:
                doubled = PROCESS_RETRY_SECONDS * 2.0 ** min(member.failures - 1, 32)
                pause_seconds = min(doubled, PROCESS_RETRY_MAX_SECONDS)
            member.failures += 1
            member.starts_at = now + pause_seconds
            _log.warning(
                "a broker ended and will be restarted",
                broker_id=broker,
                exit_code=code,
                after_seconds=pause_seconds,
            )

    def _fail(self, code: int) -> None:
        self._failed_with = self._failed_with or (code if code > 0 else _BY_SIGNAL - code)

    def _stop_or_kill(self, reason: str, *, may_kill: bool) -> None:
        self._signals += 1
        if self._signals > 1 and may_kill:
            self._kill(reason)
        elif self._is_stopping:
            left = [broker for broker, each in self._members.items() if each.child is not None]
            _log.warning("already stopping; another signal kills the brokers", brokers=left)
        else:
            _log.info("stopping all brokers", reason=reason, root=self._root)
            self._stop()

    def _kill(self, reason: str) -> None:
        _log.warning("killing the brokers that have not stopped yet", reason=reason)
        for member in self._members.values():
            if member.child is not None:
                member.child.kill()

    def _stop(self) -> None:
        self._is_stopping = True
        self._kills_at = self._clock.monotonic() + PROCESS_STOP_SECONDS
        for member in self._members.values():
            if member.child is not None:
                member.child.stop()


# ------------------------------------------------------------------------------ processes


class BrokerProcess:
    """`sparklog broker` as a child of this process."""

    def __init__(self, assignment: Assignment, report: Callable[[Event], None]) -> None:
        """Starts the process; `report` is called from another thread. Raises `OSError`."""
        self._broker = assignment.settings.id
        self._report = report
        # The root and the id are for people who read a list of processes.
        command = [sys.executable, "-P", "-m", "sparklog", "broker", "--supervised"]
        command += ["--root", assignment.settings.root, "--id", str(self._broker)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Modules come from the same places as ours, not from the working directory (`-P`).
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._input = self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has already ended
            self._input.write(msgspec.json.encode(assignment) + b"\n")
            self._input.flush()
        threading.Thread(target=self._follow, name="sparklog-child", daemon=True).start()

    def stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._input.close()

    def kill(self) -> None:
        self._process.kill()

    def _follow(self) -> None:
        """Reports the lines that it writes, and its end."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                text = line.decode("utf-8", "replace").rstrip("\n")
                self._report(Serves(broker=self._broker, line=text))
        code = self._process.wait()
        self.stop()  # closes our end of the pipe
        self._report(Ended(broker=self._broker, code=code))


def supervise(
    settings: BrokerSettings,
    processes: int,
    *,
    take_over: bool = False,
    allow_non_empty: bool = False,
) -> int:
    """Runs brokers until SIGTERM, SIGINT or SIGHUP, and returns the exit code.

    Prints a line when a broker begins to serve, and one when all do. A second signal kills them,
    unless it is a hangup.

    Args:
        settings: of the first broker, with bounds for all of them together.
        processes: the number of brokers.
        take_over: as for `Agent`, at the first start of each.
        allow_non_empty: likewise.

    Raises:
        errors.BadOption: the settings cannot be divided among that many, or the log file cannot be
            written.
    """
    each = {one.id: one for one in settings_of_each(settings, processes)}
    configure(settings.log)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def start(broker: int, is_first: bool) -> Child:
        return BrokerProcess(
            Assignment(
                settings=each[broker],
                stops_with=frozenset(each.keys() - {broker}),
                # Not at a restart: two brokers would replace each other forever.
                take_over=take_over and is_first,
                allow_non_empty=allow_non_empty and is_first,
            ),
            events.put,
        )

    def on_signal(received: int, _frame: object) -> None:
        reason = signal.Signals(received).name
        events.put(StopRequested(reason=reason, may_kill=received != signal.SIGHUP))

    supervisor = Supervisor(list(each), start, clock=SystemClock(), tell=_print, root=settings.root)
    for number in stop_signals():
        signal.signal(number, on_signal)
    while supervisor.exit_code is None:
        supervisor.tick()
        with contextlib.suppress(queue.Empty):
            supervisor.handle(events.get(timeout=supervisor.pause_seconds()))
    return supervisor.exit_code


def stop_signals() -> list[signal.Signals]:
    """Returns the signals that stop brokers gracefully.

    A hangup, as from a closed terminal, is one of them unless the process ignores it: `nohup` makes
    it ignored so that a broker outlives its terminal.
    """
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # the brokers serve even if nothing reads this any longer
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


# ------------------------------------------------------------------------------ the child's side


def read_assignment() -> Assignment:
    """Returns the assignment that the supervisor has written to this process's standard input.

    Raises `BadOption` if there is none, for example because the supervisor was just killed.
    """
    with open(0, "rb", buffering=0, closefd=False) as pipe:  # reads nothing beyond the line
        line = pipe.readline()
    try:
        return _decode(line)
    except msgspec.MsgspecError as error:
        reason = f"no supervisor has started this process ({error}); use --processes"
        raise errors.BadOption(option="--supervised", value=True, reason=reason) from error


def when_supervisor_stops(call: Callable[[], None]) -> None:
    """Calls `call`, on another thread, once the supervisor stops all brokers or has ended."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        call()

    threading.Thread(target=wait, name="sparklog-supervisor", daemon=True).start()
