"""Heartbeats of a broker, and the proof that they carry: which root it serves.

A heartbeat is written at an interval, at each change of the broker's phase, and when a program asks
for a proof (`storage/metadata/identity.py`). Programs that ask concurrently share one heartbeat,
and there is a pause between two such heartbeats, so that many requests cause few puts.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from sparklog import errors
from sparklog.broker.log.takeover import Leadership
from sparklog.broker.refused_work import RefusedWork, Work
from sparklog.clock import NEVER, Clock, Moment
from sparklog.formats.flight_messages import ProveRoot, RootProof
from sparklog.storage.metadata.identity import place_of
from sparklog.storage.metadata.liveness import Heartbeat, write_heartbeat
from sparklog.storage.objects import PutUnresolved, Store

_HEARTBEAT_NONCES = 64  # of programs that ask concurrently which root a broker serves
_PROOF_SECONDS = 1.0  # for which such a program waits for a heartbeat; below PROBE_TIMEOUT_SECONDS
_PROOF_PAUSE_SECONDS = 0.01  # between two heartbeats for such programs
PROOF_PAUSE_REMOTE_SECONDS = 0.25

_BUSY: Final = "another heartbeat is still being written"


class Heartbeats:
    """Writes the heartbeats of one broker in one epoch. Thread-safe."""

    def __init__(
        self,
        store: Store,
        leadership: Leadership,
        *,
        clock: Clock,
        dead_after_seconds: float,
        describe: Callable[[], Heartbeat],
        wrote_at: Callable[[], float],
        check_leadership: Callable[[], object],
        refused: RefusedWork,
    ) -> None:
        """Creates heartbeats without writing one.

        Args:
            store: the root's store.
            leadership: the broker and its epoch.
            clock: the broker's clock.
            dead_after_seconds: a broker that has written nothing for this long cannot write.
            describe: returns the next heartbeat.
            wrote_at: returns the monotonic time of the last flush, which proves just as much.
            check_leadership: raises `BrokerFenced` if a newer broker is known to have taken over.
            refused: notes that the broker can write nothing.
        """
        self._store = store
        self._leadership = leadership
        self._clock = clock
        self._dead_after_seconds = dead_after_seconds
        self._describe = describe
        self._wrote_at = wrote_at
        self._check_leadership = check_leadership
        self._refused = refused
        self._writing = threading.Lock()
        self._has_stopped = False
        self._proving = threading.Lock()
        """Held while a heartbeat is written for programs that wait for their nonces."""
        self._nonces: deque[str] = deque(maxlen=_HEARTBEAT_NONCES)
        self._written: tuple[str, ...] = ()
        """The nonces of the newest heartbeat."""
        self._proved_at = -float("inf")
        self.newest: Moment = NEVER
        """When the put of the newest heartbeat began: others have not seen it any earlier."""
        self.failure: str | None = None
        """Why the last attempt failed; None if it succeeded."""

    @property
    def is_writing(self) -> bool:
        """True if the broker has recently been able to write to its root."""
        wrote_at = max(self.newest.monotonic_seconds, self._wrote_at())
        return self._clock.monotonic() - wrote_at < self._dead_after_seconds

    def note_if_silent(self) -> None:
        """Notes that neither heartbeats nor anything else can be written."""
        if self.is_writing:
            return
        reason = "none could be written, and nothing else either"
        failure = self.failure  # None also while a write hangs
        self._refused.note(Work.HEARTBEATS, f"{reason}: {failure}" if failure else reason)

    def write(self, *, stopped: bool = False) -> None:
        """Writes a heartbeat; none after the one that says `stopped`. Raises the store's errors."""
        with self._writing:
            self._write(stopped=stopped)

    def _write(self, *, stopped: bool = False) -> None:
        if self._has_stopped:
            return  # a late heartbeat would report this broker as alive
        self._has_stopped = stopped
        nonces, began = tuple(self._nonces), Moment.now(self._clock)
        found = msgspec.structs.replace(self._describe(), stopped=stopped, nonces=nonces)
        try:
            write_heartbeat(self._store, found)
        except Exception as error:
            self.failure = str(error) or repr(error)
            raise
        self.failure = None
        self._written = nonces
        self.newest = began

    def prove(self, request: ProveRoot) -> RootProof:
        """Returns the broker's root, with proof unless the client sees the same root."""
        place = place_of(self._store)
        is_same_place = bool(place) and place == request.place
        reason = "" if is_same_place else self._leave(request.nonce)
        return RootProof(
            cluster_id=self._leadership.cluster.cluster_id,
            root=self._store.uri,
            broker=self._leadership.broker,
            epoch=self._leadership.epoch,
            is_same_place=is_same_place,
            is_writing=self.is_writing,
            reason=reason,
        )

    def _leave(self, nonce: str) -> str:
        """Puts the nonce in a heartbeat; returns why that failed, or an empty string."""
        self._nonces.append(nonce)
        if not self._proving.acquire(timeout=_PROOF_SECONDS):
            return _BUSY
        try:
            if nonce in self._written:  # by the thread that held the lock before
                return ""
            pause_seconds = (
                _PROOF_PAUSE_SECONDS if self._store.is_local else PROOF_PAUSE_REMOTE_SECONDS
            )
            left_seconds = self._proved_at + pause_seconds - self._clock.monotonic()
            if left_seconds > 0:
                self._clock.sleep(left_seconds)
            self._proved_at = self._clock.monotonic()
            # A put that hangs, as on a frozen disk, must not hold up the reply to the program.
            if not self._writing.acquire(timeout=_PROOF_SECONDS):
                return _BUSY
            try:
                self._check_leadership()  # a successor with our id uses the same file
                self._write()
            finally:
                self._writing.release()
        except (errors.SparklogError, PutUnresolved) as error:
            return str(error) or repr(error)
        finally:
            self._proving.release()
        return "" if nonce in self._written else "the broker is stopping"
