"""Processes as another process of the same machine can check them.

A pid means something only inside one pid namespace of one boot of one machine, and is given to
another process later. So a process is named by all of these and by the time of its start. Where
this machine says too little about itself, a process cannot be checked at all, which is not an
error: its heartbeat decides then.
"""

from __future__ import annotations

import enum
import functools
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec

_COMMAND_SECONDS: Final = 5.0
_DEAD_STATES: Final = frozenset("ZXx")
"""Of /proc/<pid>/stat: a zombie has ended, and waits for its parent to read how."""


class Process(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One process. Equal values mean the same process; empty fields mean that nobody knows."""

    host: str = ""
    pid: int = 0
    machine: str = ""
    """One boot of one kernel, and the namespaces in which `pid` and monotonic times are valid."""
    started: str = ""
    """When it started, in the units of that machine: tells it from a later one of the same pid."""


class Fate(enum.Enum):
    """The state of a process, as far as it can be checked from here."""

    RUNS = enum.auto()
    GONE = enum.auto()
    UNKNOWN = enum.auto()


def this_process() -> Process:
    """The process that asks; a forked child is another one than its parent."""
    return _own(os.getpid())


@functools.lru_cache(maxsize=1)
def _own(pid: int) -> Process:
    return Process(
        host=socket.gethostname(), pid=pid, machine=_machine(), started=_started(pid) or ""
    )


def is_of_this_machine(process: Process) -> bool:
    """Whether pid and monotonic times of `process` mean the same here.

    The host's name is compared too: virtual machines that were resumed from one snapshot share the
    id of their boot.
    """
    here = _machine()
    return bool(here) and process.machine == here and process.host == socket.gethostname()


def fate_of(process: Process) -> Fate:
    """Whether `process` still runs; unknown where it is another machine's."""
    if not process.pid or not is_of_this_machine(process):
        return Fate.UNKNOWN
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return Fate.GONE
    except PermissionError:
        pass  # another user's process, so there is one
    started = _started(process.pid)
    if started is None or not process.started:
        return Fate.UNKNOWN
    return Fate.RUNS if started == process.started else Fate.GONE


@functools.cache
def _machine() -> str:
    """Empty where the boot cannot be told from another."""
    boot = _boot()
    if not boot:
        return ""
    namespaces = []
    for kind in ("pid", "time"):
        try:
            namespaces.append(str(Path(f"/proc/self/ns/{kind}").readlink()))
        except OSError:
            continue  # a kernel without such namespaces
    return " ".join([boot, *namespaces])


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        if sys.platform != "darwin":
            return ""
    return _output("sysctl", "-n", "kern.bootsessionuuid")


def _started(pid: int) -> str | None:
    """When the process started; "" for one that has ended; None where nobody says."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        # A /proc that hides other users' processes, or none at all.
        return _output("ps", "-o", "lstart=", "-p", str(pid)) or None
    # The second field, the command in parentheses, may hold blanks and parentheses itself.
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
