"""Locks that check their order. Acks wait for the lock of the led partitions.

So no thread may hold it while acquiring the lock of a topic's table, which is held during a put.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

from sparklog.broker.log import led_partitions
from sparklog.storage.table import topic_table

_held = threading.local()


class _Lock:
    """A reentrant lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def acquire(self) -> bool:
        return self._lock.acquire()

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class AckLock(_Lock):
    """A lock that acks wait for."""

    def acquire(self) -> bool:
        acquired = super().acquire()
        _held.depth = getattr(_held, "depth", 0) + 1
        return acquired

    def release(self) -> None:
        _held.depth -= 1
        super().release()


class StoreLock(_Lock):
    """A lock that is held during requests to a store."""

    def acquire(self) -> bool:
        assert not getattr(_held, "depth", 0), "taken under a lock that acks wait for"
        return super().acquire()


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Makes led partitions and topic tables check the order if created in this block."""

    def threading_with(lock: type[_Lock]) -> SimpleNamespace:
        return SimpleNamespace(**{**vars(threading), "RLock": lock})

    with (
        mock.patch.object(led_partitions, "threading", threading_with(AckLock)),
        mock.patch.object(topic_table, "threading", threading_with(StoreLock)),
    ):
        yield
