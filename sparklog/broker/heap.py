"""Returns memory to the operating system that the broker has freed and glibc retains.

glibc retains memory freed below a buffer that is still in use, for later allocations. After a burst
of large records that can be hundreds of MiB, which no other program can use and which count
towards the broker's memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Self

from sparklog import limits

IDLE_HEAP_BYTES = 64 * limits.MIB  # of freed memory; this much or more is returned
IDLE_HEAP_SECONDS = 10.0  # for which it must be unused first


class _Mallinfo2(ctypes.Structure):
    """`struct mallinfo2` of malloc.h, since glibc 2.33."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


class HeapTrimmer:
    """Trims the heap once its use has stayed well below an earlier peak; call `tick` often.

    A trim takes about 0.3 ms per MiB, and the next use of the memory takes as long again. So it
    waits until `IDLE_HEAP_BYTES` or more have been unused for `IDLE_HEAP_SECONDS`. The bytes that
    glibc counts as free are not a usable measure: they include those already returned.
    """

    def __init__(self, used_bytes: Callable[[], int], trim: Callable[[], None]) -> None:
        """Creates a trimmer.

        Args:
            used_bytes: returns the bytes of the heap in use.
            trim: returns the other bytes to the system.
        """
        self._used_bytes = used_bytes
        self._trim = trim
        self._peak_bytes = 0
        self._idle_since: float | None = None

    @classmethod
    def of_glibc(cls) -> Self | None:
        """Returns a trimmer of glibc's heap; None with another C library."""
        libc = ctypes.CDLL(None)
        info, trim = getattr(libc, "mallinfo2", None), getattr(libc, "malloc_trim", None)
        if info is None or trim is None:
            return None
        info.restype = _Mallinfo2
        return cls(lambda: int(info().uordblks), lambda: trim(ctypes.c_size_t(0)))

    def tick(self, now: float) -> None:
        """Trims if it is due; `now` is in seconds of a monotonic clock."""
        used_bytes = self._used_bytes()
        self._peak_bytes = max(self._peak_bytes, used_bytes)
        if self._peak_bytes - used_bytes < IDLE_HEAP_BYTES:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since >= IDLE_HEAP_SECONDS:
            self._trim()
            self._peak_bytes, self._idle_since = used_bytes, None
