"""CPU time and memory of the processes of a Spark session, from /proc."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The shares of one core that Spark's JVM and all of its child processes use."""

    jvm: float
    python: float

    @classmethod
    def over(cls, spark: SparkSession, seconds: float) -> Self:
        """Measures the usage; the session must be idle otherwise."""
        jvm = _pid(spark)
        before, began = cpu_seconds(jvm), time.perf_counter()
        time.sleep(seconds)
        after, length = cpu_seconds(jvm), time.perf_counter() - began
        used = {pid: after[pid] - before.get(pid, 0.0) for pid in after}
        return cls(jvm=used.pop(jvm) / length, python=sum(used.values()) / length)


def _pid(spark: SparkSession) -> int:
    """Returns the process id of the session's JVM."""
    jvm: Any = spark._jvm
    return int(jvm.java.lang.ProcessHandle.current().pid())


def rss_bytes(pid: int) -> int:
    """Returns the resident memory of `pid` and its living descendants."""
    pages = 0
    for each in cpu_seconds(pid):
        with contextlib.suppress(OSError):  # it has exited
            pages += int(Path(f"/proc/{each}/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> Mapping[int, float]:
    """Returns the CPU time of `pid` and its living descendants, by process id."""
    parents, seconds = {}, {}
    for each in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, can contain any characters.
            fields = each.read_text("utf-8", "replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has exited
        number = int(each.parent.name)
        parents[number] = int(fields[1])
        seconds[number] = (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
    family = {pid}
    while more := {each for each, of in parents.items() if of in family} - family:
        family |= more
    return {each: seconds[each] for each in family}
