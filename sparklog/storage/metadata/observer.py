"""Dead brokers of a cluster, as seen by one of its members. Only a hint, as in `liveness`.

A broker is dead immediately if its last heartbeat says that it stopped, or if its process has ended
on this machine. Otherwise it is dead once its heartbeat has not changed for too long, over several
of our polls, and it does not answer either. Only our own monotonic clock counts. A member that
answers that it cannot write to the root counts as dead: others can serve its partitions.

A slow store, or a pause of our own process, does not mean that others are silent. So a poll that
comes long after the previous one restarts all observations, except those of brokers already dead:
a store outage does not make brokers dead.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from sparklog.clock import Clock
from sparklog.storage.metadata.liveness import Answers, Heartbeat, Leader
from sparklog.storage.metadata.model import ClusterMetadata
from sparklog.storage.objects import Store, in_parallel

_ASKED_AT_ONCE: Final = 32
_LOOKS: Final = 5
"""A silent broker is dead only after this many polls that find the same heartbeat."""
PAUSE: Final = 1 / 3
"""The longest pause between two polls, as a share of the time after which a broker is dead."""


@dataclass(slots=True)
class _Seen:
    """The newest heartbeat of an epoch, and the time of the last sign of life."""

    heartbeat: Heartbeat | None
    since: float
    looks: int = 0
    dead_at: float = 0.0
    """Monotonic time, in seconds, when the broker counts as dead unless a heartbeat is seen."""
    is_dead: bool = False


class Observer:
    """Watches the heartbeats of brokers. One caller at a time."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        dead_after_seconds: float,
        answers: Answers | None = None,
    ) -> None:
        """`dead_after_seconds`: applies unless a broker has registered a longer time for itself.

        `answers`: asks a silent broker; None: silence means death.
        """
        self._store = store
        self._answers = answers
        self._clock = clock
        self._dead_after_seconds = dead_after_seconds
        self._seen: dict[tuple[int, int], _Seen] = {}
        """By broker id and epoch."""
        self._looked_at = -float("inf")

    @property
    def next_death(self) -> float:
        """Monotonic time, in seconds, when the next silent broker counts as dead; else infinite.

        A poll at that time detects it sooner than polls at a fixed interval.
        """
        to_come = (each.dead_at for each in self._seen.values() if each.dead_at > self._looked_at)
        return min(to_come, default=float("inf"))

    @property
    def silent(self) -> Collection[int]:
        """The brokers that will soon count as dead: half of the time until then has passed."""
        now = self._looked_at
        return {
            broker
            for (broker, _), each in self._seen.items()
            if (each.since + each.dead_at) / 2 <= now and not each.is_dead
        }

    def forget(self) -> None:
        """Restarts all observations, because our own view of the store may be at fault."""
        self._seen.clear()

    def dead(self, metadata: ClusterMetadata, brokers: Collection[int]) -> dict[int, int]:
        """Polls these brokers once, and returns the dead ones with the epoch that was judged.

        Raises the store's errors, in which case no broker is judged.
        """
        began = self._clock.monotonic()
        peers = [
            peer
            for peer in in_parallel(
                self._store, lambda each: Leader.of(metadata, self._store, broker=each), brokers
            )
            if peer is not None
        ]
        if began - self._looked_at > self._dead_after_seconds * PAUSE:
            # Those already dead remain dead: a failing failover may take that long.
            self._seen = {key: each for key, each in self._seen.items() if each.is_dead}
        self._looked_at = self._clock.monotonic()
        known, self._seen = self._seen, {}
        # If a later epoch has written the heartbeat, the metadata that we know is stale.
        judged = [peer for peer in peers if not peer.is_replaced]
        silent = [peer for peer in judged if self._is_silent(peer, known, began)]
        self._bury(silent)
        return {peer.broker: peer.epoch for peer in silent if self._of(peer).is_dead}

    def _of(self, peer: Leader) -> _Seen:
        return self._seen[peer.broker, peer.epoch]

    def _bury(self, silent: Collection[Leader]) -> None:
        """Marks silent brokers as dead if they have ended or do not answer."""
        asked = [each for each in silent if not (each.has_ended or self._of(each).is_dead)]
        alive = self._answering(asked) if self._answers is not None and asked else set()
        for each in silent:
            seen = self._of(each)
            seen.is_dead = each.broker not in alive
            if not seen.is_dead:
                seen.since = self._clock.monotonic()  # an answer is a sign of life

    def _answering(self, asked: Collection[Leader]) -> set[int]:
        """Asks brokers concurrently, and returns those that answer."""
        assert self._answers is not None
        with ThreadPoolExecutor(min(len(asked), _ASKED_AT_ONCE)) as pool:
            replies = list(pool.map(self._answers, asked))
        return {each.broker for each, replied in zip(asked, replies, strict=True) if replied}

    def _is_silent(self, peer: Leader, known: dict[tuple[int, int], _Seen], began: float) -> bool:
        seen = known.get((peer.broker, peer.epoch))
        # A heartbeat that cannot be read is not a sign of life.
        if seen is None or peer.heartbeat not in (None, seen.heartbeat):
            seen = _Seen(peer.heartbeat, self._looked_at)
        seen.looks += 1
        self._seen[peer.broker, peer.epoch] = seen
        patience_seconds = max(self._dead_after_seconds, peer.known.dead_after_seconds)
        seen.dead_at = seen.since + patience_seconds
        return peer.has_ended or (seen.looks >= _LOOKS and began > seen.dead_at)
