"""Ports for brokers that need the same address again after a restart.

The system assigns a port from its own range to every client and every listener on port 0, so the
port of a broker that is down may be taken when it restarts; a client can even connect to itself
there. These ports are below that range.
"""

from __future__ import annotations

import fcntl
import random
import socket
import tempfile
from pathlib import Path
from typing import Final

_RANGE: Final = range(20_000, 30_000)
_FOLDER: Final = Path(tempfile.gettempdir()) / "sparklog-test-ports"

_kept: list[object] = []
"""Open files whose locks keep the ports of this process from other test processes."""


def quiet_port() -> int:
    """Returns a free port that neither the system nor another test process assigns."""
    _FOLDER.mkdir(exist_ok=True)
    chance = random.SystemRandom()
    while True:
        port = chance.choice(_RANGE)
        lock = (_FOLDER / str(port)).open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.create_server(("127.0.0.1", port)):
                pass
        except OSError:
            lock.close()
            continue
        _kept.append(lock)
        return port


def quiet_address() -> str:
    """Returns a `quiet_port` on this machine's loopback address."""
    return f"127.0.0.1:{quiet_port()}"
