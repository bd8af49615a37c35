"""When the broker gives freed memory back, and that the system gets it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

from sparklog.broker.heap import IDLE_HEAP_BYTES, IDLE_HEAP_SECONDS, HeapTrimmer
from sparklog.broker.running import GC_FULL_EVERY, _freeze_objects


class Heap:
    """A heap whose size the test sets, with a count of its trims."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self.trims = 0
        self.trimmer = HeapTrimmer(lambda: self.used_bytes, self._trim)

    def _trim(self) -> None:
        self.trims += 1

    def tick(self, now: float, used_bytes: int) -> int:
        self.used_bytes = used_bytes
        self.trimmer.tick(now)
        return self.trims


def test_the_heap_is_trimmed_once_after_a_burst() -> None:
    """And again only after another."""
    heap = Heap()
    assert heap.tick(0.0, IDLE_HEAP_BYTES) == 0
    assert heap.tick(1.0, 0) == 0, "it may be used again at once"
    assert heap.tick(1.0 + IDLE_HEAP_SECONDS, 0) == 1
    for later in range(2, 10):
        assert heap.tick(later * IDLE_HEAP_SECONDS, 0) == 1, "nothing was used since"
    heap.tick(200.0, IDLE_HEAP_BYTES)
    heap.tick(201.0, 0)
    assert heap.tick(201.0 + IDLE_HEAP_SECONDS, 0) == 2


def test_the_heap_is_not_trimmed_while_it_is_used() -> None:
    """Nor for the little that would come back."""
    heap = Heap()
    for second in range(100):
        used_bytes = IDLE_HEAP_BYTES if second % IDLE_HEAP_SECONDS == 0 else 0
        assert heap.tick(second, used_bytes) == 0
    heap = Heap()
    for second in range(100):
        assert heap.tick(second, IDLE_HEAP_BYTES - 1 if second == 0 else 0) == 0


_PROGRAM = """
import time
from pathlib import Path
from sparklog.broker.heap import HeapTrimmer

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4 >> 10

trimmer = HeapTrimmer.of_glibc()
first = resident_mib()
buffers = [b"x" * 100_000 for _ in range(3_000)]
above = b"x" * 100_000  # what lies highest stays, and so does all below it
trimmer.tick(0.0)
full = resident_mib()
del buffers
trimmer.tick(1.0)
freed = resident_mib()
trimmer.tick(60.0)
print(first, full, freed, resident_mib())
"""


@pytest.mark.skipif(HeapTrimmer.of_glibc() is None, reason="the C library is not glibc")
def test_the_system_gets_the_memory_of_a_burst() -> None:
    """As it is resident memory that an operator sees."""
    found = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        check=True,
        capture_output=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"},
    )
    first, full, freed, trimmed = map(int, found.stdout.split())
    assert full - first > 250
    assert freed - first > 250, "glibc gives it back by itself: the trimmer is not needed"
    assert trimmed - first < 50


def test_old_objects_are_looked_through_seldom() -> None:
    """The objects of a broker that has started are exempt; later ones are visited less often."""
    before = gc.get_threshold()
    try:
        _freeze_objects()
        assert gc.get_freeze_count()
        assert gc.get_threshold() == (*before[:2], GC_FULL_EVERY)
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
