"""Identity of a process, so that another process on the same machine can check whether it runs.

A pid is valid only inside one pid namespace of one boot of one machine, and is reused later. A
process is therefore identified by all of these and its start time. On a machine that does not
report them, a process cannot be checked. That is not an error: its heartbeat decides instead.
"""

from __future__ import annotations

import enum
import functools
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

_COMMAND_SECONDS: Final = 5.0
_DEAD_STATES: Final = frozenset("ZXx")
"""States of /proc/<pid>/stat. A zombie has ended; its parent has not read its exit status yet."""


class Process(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One process. Equal values mean the same process; an empty field is unknown."""

    host: str = ""
    pid: int = 0
    machine: str = ""
    """One boot of one kernel, and the namespaces in which `pid` and monotonic times are valid."""
    started: str = ""
    """Start time in units of that machine; distinguishes processes that shared a pid."""


class Fate(enum.Enum):
    """State of a process, as far as this process can check it."""

    RUNS = enum.auto()
    GONE = enum.auto()
    UNKNOWN = enum.auto()


def this_process() -> Process:
    """Returns the calling process; a forked child differs from its parent."""
    return _own(os.getpid())


@functools.lru_cache(maxsize=1)
def _own(pid: int) -> Process:
    return Process(
        host=socket.gethostname(), pid=pid, machine=machine(), started=_started(pid) or ""
    )


def is_of_this_machine(process: Process) -> bool:
    """Returns whether pid and monotonic times of `process` are valid on this machine.

    Compares host names too: virtual machines resumed from the same snapshot share a boot id.
    """
    here = machine()
    return bool(here) and process.machine == here and process.host == socket.gethostname()


def fate_of(process: Process) -> Fate:
    """Returns whether `process` is still running; unknown for a process on another machine."""
    if not process.pid or not is_of_this_machine(process):
        return Fate.UNKNOWN
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return Fate.GONE
    except PermissionError:
        pass  # the process exists, but belongs to another user
    started = _started(process.pid)
    if started is None or not process.started:
        return Fate.UNKNOWN
    return Fate.RUNS if started == process.started else Fate.GONE


@functools.cache
def machine() -> str:
    """Returns the boot and the namespaces; empty if the boot has no id."""
    boot = _boot()
    if not boot:
        return ""
    namespaces = []
    for kind in ("pid", "time"):
        try:
            namespaces.append(str(Path(f"/proc/self/ns/{kind}").readlink()))
        except OSError:
            continue  # the kernel has no such namespaces
    return " ".join([boot, *namespaces])


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        if sys.platform != "darwin":
            return ""
    return _output("sysctl", "-n", "kern.bootsessionuuid")


@functools.lru_cache(maxsize=64)
def _started_by_ps(pid: int, *, second: int) -> str | None:
    """Like `_started`, at most once a second: a member checks the others many times a second."""
    del second
    return _output("ps", "-o", "lstart=", "-p", str(pid)) or None


def _started(pid: int) -> str | None:
    """Returns the start time of the process; "" if it has ended; None if unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        # /proc hides other users' processes, or does not exist.
        return _started_by_ps(pid, second=int(time.monotonic()))
    # The second field, the command in parentheses, may contain blanks and parentheses.
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in _DEAD_STATES else fields[19]


def _output(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return " ".join(done.stdout.split())
