"""A broker as a whole process: its signals, its line on standard output, and its supervisor.

A broker that its cluster has found dead while it was suspended joins again by itself.
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
from sparklog.broker.agent import Agent
from sparklog.broker.heap import HeapTrimmer
from sparklog.broker.logging import LogFile, configure
from sparklog.broker.supervisor import stop_signals, when_supervisor_stops
from sparklog.settings import BrokerSettings
from sparklog.storage.metadata.identity import Ask
from sparklog.storage.metadata.model import BrokerKind

GC_FULL_EVERY = 100  # garbage collections of young objects; Python's default is 10

_log = structlog.get_logger("sparklog.broker")
_RETURN_SECONDS: Final = (1.0, 3.0)
"""The bounds of the pause before a broker that was fenced joins its cluster again."""


def run_broker(
    settings: BrokerSettings,
    *,
    take_over: bool = False,
    allow_non_empty: bool = False,
    stops_with: Collection[int] | None = None,
    ask: Ask | None = None,
) -> None:
    """Runs a broker as the whole process: prints a line once it serves, stops on SIGTERM or SIGINT.

    A hangup (SIGHUP), as of a closed terminal, stops it likewise, unless it is ignored.

    Raises what `Agent.start` and `Agent.wait` raise.

    Args:
        settings: the broker's settings.
        take_over: as for `Agent`.
        allow_non_empty: as for `Agent`.
        stops_with: the other brokers of its supervisor, which stop with it; None: it has none.
        ask: as for `Agent`.
    """
    is_supervised = stops_with is not None
    log_file = configure(settings.log, broker_id=settings.id if is_supervised else None)
    pandas_import.block()
    # A broker that leaves when it is idle was started on demand, and gives way to any other.
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
    """Runs an agent until it ends. Raises what ended it."""
    settings = agent.settings
    try:
        agent.start()
        signals.stop(agent)
    except _StoppedEarly as reason:  # a start may take long, and the next broker waits for the mark
        agent.stop(reason=str(reason))
        raise
    if log_file is not None:
        log_file.take_stderr()
    kafka = f", Kafka at {agent.kafka_address}" if agent.kafka_address else ""
    metrics = f", metrics at http://{agent.metrics_address}/" if agent.metrics_address else ""
    served = f"sparklog broker {settings.id} serves {settings.root}{kafka}{metrics}"
    _freeze_objects()
    with contextlib.suppress(*([BrokenPipeError] if is_supervised else [])):
        sys.stdout.write(f"{served}, Flight at {agent.address}\n")
        sys.stdout.flush()
    heap = HeapTrimmer.of_glibc()
    while not agent.wait(1.0):  # a wait without a timeout would block the handling of signals
        if heap is not None:
            heap.tick(time.monotonic())


class _StoppedEarly(BaseException):
    """Raised by a signal that arrives while the broker starts."""


class _Signals:
    """SIGTERM, SIGINT and SIGHUP: they interrupt a start, and stop a broker that serves."""

    def __init__(self, stops_with: Collection[int]) -> None:
        """`stops_with`: brokers that get no partitions where the supervisor stops all."""
        self._stops_with = stops_with
        self._numbers = stop_signals()
        self._all_stop = threading.Event()
        self._main_thread = threading.get_ident()
        self._interrupted: str | None = None
        """Reason of a signal that came during a start."""
        self.is_stopping = False
        """True once a signal has stopped a broker."""

    def interrupt_start(self) -> None:
        """From now on, a signal raises `_StoppedEarly` in the main thread."""
        self._handle(self._interrupt)

    def stop(self, agent: Agent) -> None:
        """From now on, a signal stops `agent` in good order.

        Raises `_StoppedEarly` if one came during the start: an exception that a signal raises in a
        callback from C, such as those of a compiler, is printed and lost.
        """
        self._handle(functools.partial(self._stop, agent))
        if self._interrupted is not None:
            raise _StoppedEarly(self._interrupted)

    def ignore(self) -> None:
        """From now on, a signal does nothing: the process ends, and first says why."""
        self._handle(signal.SIG_IGN)

    def stop_with_supervisor(self) -> None:
        """Acts as a signal does, together with the other brokers of the supervisor."""
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
    """Exempts the present objects, most of them of modules, from garbage collection.

    The collector would visit half a million objects that live as long as the process, for a tenth
    of a second, and delay an ack by it. Of later objects it finds hardly any in old cycles, so it
    visits all of them less often. It was off until now.
    """
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], GC_FULL_EVERY)
    gc.enable()
