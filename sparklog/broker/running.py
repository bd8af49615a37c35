"""A broker as its own process: its signals, its line on standard output, and its supervisor.

A broker that its cluster declared dead while it was suspended rejoins on its own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from types import FrameType
from typing import Final

import structlog

from sparklog import errors, pandas_import
from sparklog.broker.access_control import AskWithCredentials
from sparklog.broker.agent import Agent
from sparklog.broker.heap import HeapTrimmer
from sparklog.broker.logging import LogFile, configure
from sparklog.broker.supervisor import stop_signals, when_supervisor_stops
from sparklog.listeners import parse
from sparklog.settings import BrokerSettings
from sparklog.storage.metadata.model import BrokerKind

GC_FULL_EVERY = 100  # collections of younger objects; Python's default is 10

_log = structlog.get_logger("sparklog.broker")
_RETURN_SECONDS: Final = (1.0, 3.0)
"""The bounds of the pause before a fenced broker rejoins its cluster."""


def run_broker(
    settings: BrokerSettings,
    *,
    take_over: bool = False,
    allow_non_empty: bool = False,
    stops_with: Collection[int] | None = None,
    ask: AskWithCredentials | None = None,
) -> None:
    """Runs a broker as this process: prints a line once it serves, stops on SIGTERM or SIGINT.

    A hangup (SIGHUP), as from a closed terminal, also stops it, unless it is ignored.

    Raises what `Agent.start` and `Agent.wait` raise.

    Args:
        settings: the broker's settings.
        take_over: as for `Agent`.
        allow_non_empty: as for `Agent`.
        stops_with: the other brokers of its supervisor, which stop with it; None: no supervisor.
        ask: as for `Agent`.
    """
    is_supervised = stops_with is not None
    log_file = configure(settings.log, broker_id=settings.id if is_supervised else None)
    pandas_import.block()
    # A broker that exits when idle was started on demand, and gives way to any other.
    kind = BrokerKind.DETACHED if settings.liveness.idle_exit_seconds else BrokerKind.STANDING
    signals = _Signals(stops_with or ())
    try:
        signals.interrupt_start()
        if is_supervised:
            when_supervisor_stops(signals.stop_with_supervisor)
        returns = False
        while True:
            agent = Agent(
                settings,
                kind=kind,
                take_over=take_over,
                allow_non_empty=allow_non_empty,
                ask=ask,
            )
            try:
                _run(agent, log_file, signals, is_supervised=is_supervised)
            except (errors.BrokerFenced, errors.Retriable) as error:
                signals.interrupt_start()
                if isinstance(error, errors.BrokerFenced):
                    returns = not signals.is_stopping and agent.may_return()
                if signals.is_stopping or not returns:
                    raise
                seconds = random.uniform(*_RETURN_SECONDS)
                _log.warning("joining again", reason=str(error), in_seconds=round(seconds, 1))
                time.sleep(seconds)
                take_over = False  # else two brokers that replace each other would do so forever
            else:
                return
    except _StoppedEarly as reason:
        _log.info("stopped before it served", reason=str(reason), root=settings.root)
    finally:
        signals.ignore()


def _run(agent: Agent, log_file: LogFile | None, signals: _Signals, *, is_supervised: bool) -> None:
    """Runs an agent until it stops. Raises the error that stopped it."""
    settings = agent.settings
    try:
        agent.start()
        signals.stop(agent)
    except (
        _StoppedEarly
    ) as reason:  # starts can be slow, and the next broker waits for the stopped mark
        agent.stop(reason=str(reason))
        raise
    if log_file is not None:
        log_file.take_stderr()
    kafka = f", Kafka at {agent.kafka_address}" if agent.kafka_address else ""
    metrics = "".join(f", metrics at {each.url}" for each in parse(agent.metrics_address))
    served = f"sparklog broker {settings.id} serves {settings.root}{kafka}{metrics}"
    _freeze_objects()
    with contextlib.suppress(*([BrokenPipeError] if is_supervised else [])):
        sys.stdout.write(f"{served}, Flight at {agent.address}\n")
        sys.stdout.flush()
    heap = HeapTrimmer.of_glibc()
    while not agent.wait(1.0):  # a wait without a timeout would block signal handling
        if heap is not None:
            heap.tick(time.monotonic())


class _StoppedEarly(BaseException):
    """Raised by a signal that arrives while the broker starts."""


class _Signals:
    """SIGTERM, SIGINT and SIGHUP: they interrupt a start, and stop a serving broker."""

    def __init__(self, stops_with: Collection[int]) -> None:
        """`stops_with`: brokers that receive no partitions if the supervisor stops all."""
        self._stops_with = stops_with
        self._numbers = stop_signals()
        self._all_stop = threading.Event()
        self._main_thread = threading.get_ident()
        self._interrupted: str | None = None
        """The reason for a signal that arrived during a start."""
        self.is_stopping = False
        """True once a signal has stopped a broker."""

    def interrupt_start(self) -> None:
        """Makes signals raise `_StoppedEarly` in the main thread from now on."""
        self._handle(self._interrupt)

    def stop(self, agent: Agent) -> None:
        """Makes signals stop `agent` gracefully from now on.

        Raises `_StoppedEarly` if one arrived during the start: an exception that a signal raises in
        a callback from C, such as a compiler's, is printed and lost.
        """
        self._handle(functools.partial(self._stop, agent))
        if self._interrupted is not None:
            raise _StoppedEarly(self._interrupted)

    def ignore(self) -> None:
        """Ignores signals from now on: the process is ending, and first reports the reason."""
        self._handle(signal.SIG_IGN)

    def stop_with_supervisor(self) -> None:
        """Acts like a signal, together with the other brokers of the supervisor."""
        self._all_stop.set()
        signal.pthread_kill(self._main_thread, signal.SIGTERM)

    def _interrupt(self, received: int, _frame: object) -> None:
        self.ignore()
        self._interrupted = self._reason(received)
        raise _StoppedEarly(self._interrupted)

    def _stop(self, agent: Agent, received: int, _frame: object) -> None:
        self.is_stopping = True
        leaving = self._stops_with if self._all_stop.is_set() else ()
        agent.stop_soon(self._reason(received), leaving=leaving)

    def _reason(self, received: int) -> str:
        return "its supervisor stops" if self._all_stop.is_set() else signal.Signals(received).name

    def _handle(self, how: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
        for each in self._numbers:
            signal.signal(each, how)


def _freeze_objects() -> None:
    """Exempts existing objects, most of which belong to modules, from garbage collection.

    The collector would spend a tenth of a second on half a million objects that live as long as the
    process, and delay an ack by that. Later objects are rarely in old cycles, so full collections
    run less often. The collector was off until now.
    """
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], GC_FULL_EVERY)
    gc.enable()
