"""The threads of a broker, each of which repeats one kind of work until the broker stops.

An error that ends a thread ends the broker. Work that fails otherwise is retried at growing
intervals, and logged when the reason changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from sparklog import errors
from sparklog.broker.backoff import ENDS_THE_BROKER, FailureLog, RetrySchedule
from sparklog.clock import Clock

RETRY_SECONDS = 1.0

_log = structlog.get_logger("sparklog.broker")


class Loops:
    """Threads that run until `stopping` is set."""

    def __init__(
        self,
        clock: Clock,
        stopping: threading.Event,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`on_failure`: called in a thread that ends with an error."""
        self._clock = clock
        self._stopping = stopping
        self._on_failure = on_failure
        self._threads: list[threading.Thread] = []

    def start(self, name: str, loop: Callable[[], None]) -> None:
        """Runs a loop in its own thread."""
        thread = threading.Thread(target=self._run, args=(loop,), name=f"sparklog-{name}")
        thread.daemon = True
        thread.start()
        self._threads.append(thread)

    def join(self) -> None:
        """Waits until all threads have ended, except the calling one."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as error:
            self._on_failure(error)

    def repeat(
        self,
        what: str,
        seconds: float | Callable[[], float],
        work: Callable[[], None],
        *,
        wake: threading.Event | None = None,
    ) -> None:
        """Repeats `work`, even after errors, except those that end the broker.

        `wake`: set when the next repetition is due before `seconds` have passed.
        """
        backoff, failures = RetrySchedule(self._clock, first_seconds=RETRY_SECONDS), FailureLog()
        due = wake or self._stopping
        while True:
            due.wait(seconds() if callable(seconds) else seconds)
            if self._stopping.is_set():
                return
            if wake is not None:
                wake.clear()
            if backoff.is_waiting(what):
                continue
            try:
                work()
            except ENDS_THE_BROKER:
                raise
            except (errors.Retriable, errors.OutcomeUnknown) as error:
                if failures.is_new(what, str(error)):
                    _log.warning(f"{what} waits", reason=str(error))
            except Exception as error:
                reason = str(error) or repr(error)
                if failures.is_new(what, reason):
                    _log.error(f"{what} failed", reason=reason)
                backoff.failed(what)
            else:
                backoff.succeeded(what)
                if failures.recovered(what):
                    _log.info(f"{what} works again")
