"""The free space of the root: below a reserve, appends are rejected."""

from __future__ import annotations

from sparklog import errors
from sparklog.clock import Clock
from sparklog.storage.objects import Store

FREE_SPACE_SECONDS = 0.1  # between two checks while at least twice the reserve is free


class FreeSpace:
    """Checks the free space against the reserve."""

    def __init__(self, store: Store, clock: Clock, *, reserve_bytes: int) -> None:
        self._store = store
        self._clock = clock
        self._reserve_bytes = reserve_bytes
        self._enough_until = -float("inf")
        """Until when the last check that found ample space is valid, in monotonic seconds."""

    def check(self) -> int | None:
        """Returns the free space; None if unknown. May be called at any time.

        Raises `StorageFull` below the reserve: appends are then rejected.
        """
        free, reserve = self._store.free_bytes(), self._reserve_bytes
        if free is not None and free < reserve:
            raise errors.StorageFull(root=self._store.uri, free_bytes=free, reserve_bytes=reserve)
        return free

    def check_lately(self) -> None:
        """Raises `StorageFull` below the reserve.

        While at least twice the reserve is free, a check remains valid for `FREE_SPACE_SECONDS`: no
        disk can write another reserve's worth in that time.
        """
        now = self._clock.monotonic()
        if now < self._enough_until:
            return
        free = self.check()
        if free is not None and free >= 2 * self._reserve_bytes:
            self._enough_until = now + FREE_SPACE_SECONDS
