"""Logs of other brokers, as read by their successors.

While a successor reads a log, no broker serves the partitions that it takes over. So it caches the
parts that can no longer change: the individual flushes of a log that is still being written, and
the whole of a log that the metadata marks as fenced, whose broker can neither write nor leave an
epoch.

The newest checkpoint of a log that is still being written is looked up each time: it determines
which flushes count, and contains the states of partitions that the log's broker may have received
since.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from sparklog.clock import Clock
from sparklog.storage import wal
from sparklog.storage.metadata.model import Epoch
from sparklog.storage.objects import Store

HISTORY_ENTRIES = 100_000  # of other brokers' logs, cached so that each is read only once

History: TypeAlias = tuple[wal.Checkpoint | None, Sequence[wal.WalObject]]
"""The newest checkpoint of an epoch, and every flush that still counts."""


class Histories:
    """Reads logs, and caches the parts that may be needed again. One caller at a time.

    Caches at most `HISTORY_ENTRIES` entries. A log that would exceed them is read again.
    """

    def __init__(self, store: Store, *, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._fenced: dict[tuple[int, int], History] = {}
        self._ahead: dict[tuple[int, int], dict[int, wal.WalObject]] = {}
        """Flushes of epochs that may still be written, by sequence."""

    def fence(self, epoch: Epoch) -> History:
        """Ends an epoch and returns its log. Raises what `wal.Follower.fence` raises."""
        follower = self._follower(epoch)
        return self._keep(epoch, follower, follower.fence())

    def seal(self, epoch: Epoch) -> None:
        """Ends an epoch, caching its flushes for `read`. Raises what `wal.Follower.fence` raises.

        `read` checks for a newer checkpoint: until the metadata marks the epoch as fenced, its
        broker can put one, and leave the epochs whose states are in that checkpoint.
        """
        self._keep_ahead(epoch, self._follower(epoch).fence())

    def read(self, epoch: Epoch) -> History:
        """Returns the log of an epoch. Raises what `wal.Follower.fence` raises.

        A live leader keeps writing it: flushes that are put during the read may be missing.
        """
        if epoch.id in self._fenced:
            return self._fenced[epoch.id]
        follower = self._follower(epoch)
        if epoch.fenced:
            objects = follower.poll(relist=True)  # up to the fence, which another broker has put
            return self._keep(epoch, follower, [*objects, *follower.fence()])
        # One poll reads past the checkpoint with which the leader handed over its partitions. More
        # would follow a busy leader for as long as it writes.
        objects = follower.poll(relist=True)
        return follower.checkpoint, objects

    def is_fenced(self, epoch: Epoch) -> bool:
        """Returns whether a fence ends the log. Raises what `read` raises."""
        _, objects = self.read(epoch)
        return any(each.is_fence for each in objects)

    def _keep(
        self, epoch: Epoch, follower: wal.Follower, objects: Sequence[wal.WalObject]
    ) -> History:
        found: History = follower.checkpoint, objects
        self._ahead.pop(epoch.id, None)
        if self._has_room(objects):
            self._fenced[epoch.id] = found
        return found

    def read_ahead(self, epoch: Epoch) -> None:
        """Reads a log that is likely to be needed soon. Raises what `read` raises."""
        _, objects = self.read(epoch)
        if not epoch.fenced:
            self._keep_ahead(epoch, objects)

    def _keep_ahead(self, epoch: Epoch, objects: Sequence[wal.WalObject]) -> None:
        self._ahead.pop(epoch.id, None)
        if self._has_room(objects):
            self._ahead[epoch.id] = {each.at.sequence: each for each in objects}

    def retain(self, epochs: Collection[tuple[int, int]]) -> None:
        """Forgets all other epochs."""
        self._ahead = {key: each for key, each in self._ahead.items() if key in epochs}
        self._fenced = {key: each for key, each in self._fenced.items() if key in epochs}

    def _has_room(self, objects: Sequence[wal.WalObject]) -> bool:
        """Returns whether there is room to cache these as well."""
        ahead = (each.values() for each in self._ahead.values())
        fenced = (each for _, each in self._fenced.values())
        flushes = itertools.chain(objects, *ahead, *fenced)
        return sum(len(each.located) for each in flushes) <= HISTORY_ENTRIES

    def _follower(self, epoch: Epoch) -> wal.Follower:
        known: Mapping[int, wal.WalObject] = self._ahead.get(epoch.id, {})
        return wal.of(self._store, self._clock, epoch.log).follower(*epoch.id, known=known)
