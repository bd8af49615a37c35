"""The thread that performs TLS handshakes, for each client address in turn.

A step of a handshake takes up to several milliseconds of processor time, depending on the server's
key: too long for an event loop. A client that opens a thousand connections delays a client at
another address by one step, not by a thousand.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple


class _Step(NamedTuple):
    call: Callable[[bytes], bool]
    received: bytes
    done: Future[bool]


class Handshakes:
    """One thread, which starts with the first handshake."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[_Step]] = OrderedDict()
        """Steps by the client's address; the address whose turn it is comes first."""
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(self, peer: str, call: Callable[[bytes], bool], received: bytes) -> Future[bool]:
        """Returns the result of `call(received)`, which one thread calls in the peer's turn.

        A connection must have at most one step at a time, so that the limits of connections bound
        what waits here.
        """
        done: Future[bool] = Future()
        with self._changed:
            if self._is_closed:
                done.cancel()
                return done
            self._waiting.setdefault(peer, deque()).append(_Step(call, received, done))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="sparklog-handshakes", daemon=True
                )
                self._thread.start()
            self._changed.notify()
        return done

    def close(self) -> None:
        """Cancels the waiting steps, and returns when the thread has ended."""
        with self._changed:
            self._is_closed = True
            waiting = [step for steps in self._waiting.values() for step in steps]
            self._waiting.clear()
            self._changed.notify()
        for step in waiting:
            step.done.cancel()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (step := self._next()) is not None:
            if not step.done.set_running_or_notify_cancel():
                continue  # its connection was closed
            try:
                result = step.call(step.received)
            except BaseException as error:
                step.done.set_exception(error)
            else:
                step.done.set_result(result)

    def _next(self) -> _Step | None:
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return None
            peer, steps = self._waiting.popitem(last=False)
            step = steps.popleft()
            if steps:
                self._waiting[peer] = steps  # behind the others
            return step
