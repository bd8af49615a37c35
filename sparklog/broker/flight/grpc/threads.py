"""The threads that serve calls, one per call. Up to 32 idle ones are kept for later calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

from sparklog.broker.flight.grpc.call import Call

_IDLE_THREADS: Final = 32


class CallThreads:
    """A pool that starts a thread for a call if none is idle. Its threads are daemons."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work: SimpleQueue[Call | None] = SimpleQueue()
        self._idle = 0
        self._is_over = False

    def run(self, serve: Callable[[Call], None], call: Call) -> None:
        """Serves a call in a thread. Raises RuntimeError if the system cannot start one."""
        with self._lock:
            if self._idle:
                self._idle -= 1
                self._work.put(call)
                return
        first = [call]  # a thread keeps its arguments until it ends
        args = (serve, first)
        threading.Thread(target=self._run, args=args, name="sparklog-call", daemon=True).start()

    def close(self) -> None:
        """Ends idle threads immediately, and the others after their calls."""
        with self._lock:
            self._is_over = True
            for _ in range(self._idle):
                self._work.put(None)
            self._idle = 0

    def _run(self, serve: Callable[[Call], None], first: list[Call]) -> None:
        call: Call | None = first.pop()
        while call is not None:
            serve(call)
            call = None  # otherwise its memory is kept until the next call
            with self._lock:
                if self._is_over or self._idle >= _IDLE_THREADS:
                    return
                self._idle += 1
            call = self._work.get()
