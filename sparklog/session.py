"""`connect`: a client of a live broker, or of one that is started for the purpose.

Three ways to reach a log:

- an address, `host:port`: that broker, and none is ever started;
- a root with a live broker: that broker, found by its heartbeat;
- a root without one: an *embedded* broker in this process, on a loopback address. It is registered
  like any other, so a second process on the same root joins it, and takes over when it ends. With
  `detached`, the broker is a process of its own instead, which leaves after some idle time.
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sparklog import errors, limits
from sparklog.client.connection import Connection
from sparklog.client.log import Log
from sparklog.clock import Clock, SystemClock
from sparklog.settings import BrokerSettings, FlightSettings, LivenessSettings, LogSettings
from sparklog.storage.meta import find_live_broker
from sparklog.storage.objects import Store, open_store

if TYPE_CHECKING:
    from sparklog.broker.agent import Agent

ROOT_VARIABLE: Final = "SPARKLOG_ROOT"
BOOTSTRAP_VARIABLE: Final = "SPARKLOG_BOOTSTRAP"

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):\d{1,5}")
_START_SECONDS: Final = 30.0
_START_ATTEMPTS: Final = 3
_LOOK_SECONDS: Final = 0.05
_ANY_PORT: Final = "127.0.0.1:0"


def connect(
    target: str | os.PathLike[str] | None = None,
    *,
    detached: bool = False,
    storage_options: Mapping[str, str] | None = None,
) -> Log:
    """A `Log` on a root (a folder or `s3://`, `gs://`, `az://` URI) or a broker's `host:port`.

    Args:
        target: None: `SPARKLOG_BOOTSTRAP`, or else `SPARKLOG_ROOT`.
        detached: where a broker must be started, start it as its own process.
        storage_options: credentials and the like for an object store.

    Raises:
        errors.BadOption: no target, or one that is neither address nor root.
        errors.RootNotWritable, errors.FormatTooNew, errors.CorruptObject: what is wrong with the
            root, where a broker had to be started.
        errors.BrokerUnavailable, errors.WrongPort: nobody speaks Flight at the address.
    """
    if target is None:
        target = os.environ.get(BOOTSTRAP_VARIABLE) or os.environ.get(ROOT_VARIABLE)
        if not target:
            raise errors.BadOption(
                option="target",
                value=None,
                reason=f"give a root or host:port, or set {ROOT_VARIABLE} or {BOOTSTRAP_VARIABLE}",
            )
    place = os.fspath(target)
    if _ADDRESS.fullmatch(place) and not Path(place).exists():
        return Log(Connection(lambda: place))
    session = _RootSession(place, detached=detached, storage_options=storage_options or {})
    session.resolve()
    log = Log(Connection(session.resolve), root=place, on_close=session.close)
    _open[session] = weakref.ref(log)
    # Last in, first out: Flight closes its server at exit too, and waits for our streams.
    atexit.unregister(_close_all)
    atexit.register(_close_all)
    return log


_open: dict[_RootSession, weakref.ref[Log]] = {}
"""What this process has not closed yet: a notebook rarely does."""


def _close_all() -> None:
    for session, log in list(_open.items()):
        (log() or session).close()


class _RootSession:
    """Finds the broker of a root, or starts one; `resolve` is asked again when a channel breaks."""

    def __init__(
        self,
        root: str,
        *,
        detached: bool,
        storage_options: Mapping[str, str],
        clock: Clock | None = None,
    ) -> None:
        self._store: Store = open_store(root, storage_options)
        self._settings = BrokerSettings(
            root=root,
            id=limits.EMBEDDED_BROKER_ID,
            flight=FlightSettings(listen=_ANY_PORT),
            liveness=LivenessSettings(
                idle_exit_seconds=limits.DETACHED_IDLE_SECONDS if detached else 0.0
            ),
            log=LogSettings(level="warning"),
            storage=storage_options,
        )
        self._detached = detached
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._agent: Agent | None = None

    def resolve(self) -> str:
        """The Flight address of the root's live broker."""
        with self._lock:
            for _ in range(_START_ATTEMPTS):
                address = self._live()
                if address is not None:
                    return address
                try:
                    return self._start_process() if self._detached else self._start_here()
                except errors.BrokerAlive as alive:  # somebody was faster
                    return str(alive.address)
                except errors.BrokerFenced as fenced:  # somebody was as fast, and goes on
                    faster = fenced
            raise faster

    def _live(self) -> str | None:
        found = find_live_broker(
            self._store, clock=self._clock, dead_after_seconds=limits.DEAD_AFTER_SECONDS
        )
        return found[1] if found is not None else None

    def _start_here(self) -> str:
        # Heavy, and not needed where a broker lives.
        import structlog

        from sparklog.broker.agent import Agent
        from sparklog.broker.logging import configure

        if not structlog.is_configured():
            configure(self._settings.log)  # by default it writes between the program's own output
        agent = Agent(self._settings, store=self._store, replaces=False)
        agent.start()
        self._agent = agent
        return agent.address

    def _start_process(self) -> str:
        settings = self._settings
        environment = {
            **os.environ,
            "SPARKLOG_LIVENESS_IDLE_EXIT_SECONDS": str(settings.liveness.idle_exit_seconds),
            "SPARKLOG_LOG_LEVEL": settings.log.level,
            **{f"SPARKLOG_STORAGE_{key.upper()}": value for key, value in settings.storage.items()},
        }
        command = [sys.executable, "-m", "sparklog", "broker", "--root", settings.root]
        command += ["--id", str(settings.id), "--flight", settings.flight.listen]
        # A file, because nobody reads a pipe once we are gone, and the broker may still complain.
        with tempfile.TemporaryFile() as complaints:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
                start_new_session=True,  # outlives us: that is the point
            )
            # Or, if it dies before us, its id would still count as a process.
            threading.Thread(target=process.wait, name="sparklog-reaper", daemon=True).start()
            deadline = self._clock.monotonic() + _START_SECONDS
            while self._clock.monotonic() < deadline:
                address = self._live()
                if address is not None and _answers(address):
                    return address
                # It may also have left because another was faster, who is not ready yet.
                if process.poll() is not None and address is None:
                    complaints.seek(0)
                    complaint = complaints.read().decode(errors="replace").strip()
                    raise errors.BrokerUnavailable(
                        address=settings.root, reason=f"a broker did not start: {complaint}"
                    )
                self._clock.sleep(_LOOK_SECONDS)
            process.terminate()
        raise errors.TimedOut(what="starting a broker", timeout_seconds=_START_SECONDS)

    def close(self) -> None:
        """Stops the embedded broker, if there is one: everything is published first."""
        _open.pop(self, None)
        with self._lock:
            agent, self._agent = self._agent, None
        if agent is not None:
            agent.stop()


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0):
            return True
    except OSError:
        return False
