"""The quotas of the client of one Kafka connection, and the time for which it is throttled.

A reply names its throttle time and is sent at once (KIP-219). Afterwards the connection reads no
further request until the time is over: it holds no memory meanwhile, and does not count as idle.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from typing import Final

from sparklog import errors
from sparklog.broker.kafka.times import NO_TIME, duration
from sparklog.broker.quotas import Quotas


class Throttle:
    """Counts the requests of one connection. Used in the listener's event loop."""

    __slots__ = ("_ended", "_quotas", "_until", "_user", "has_produced")

    def __init__(self, quotas: Quotas | None, user: str = "") -> None:
        """`quotas`: None if clients have none."""
        self._quotas = quotas
        self._user = user
        self._until = 0.0
        """The end of the throttle, in seconds of the event loop's clock; 0 if there is none."""
        self._ended: asyncio.Future[None] | None = None
        self.has_produced = False
        """True once a Produce request of this connection was counted, or is about to be."""

    @property
    def has_quotas(self) -> bool:
        """True if there are quotas of any client: then the other methods have something to do."""
        return self._quotas is not None and self._quotas.table is not None

    # -------------------------------------------------------------------------- requests

    def begin_as_others(self, client_id: str) -> None:
        """Throttles the client like its other connections, before its first Produce request."""
        self.has_produced = True
        if self._quotas is not None:
            self.begin(self._quotas.producer_debt_ms(self._user, client_id))

    def produced(self, client_id: str, size_bytes: int) -> dt.timedelta:
        """Counts a Produce request, and returns the throttle time for its reply."""
        if self._quotas is None:
            return NO_TIME
        self.has_produced = True
        return self.begin(self._quotas.produced(self._user, client_id, size_bytes))

    def fetch_allowance(self, client_id: str, most_bytes: int) -> tuple[int, dt.timedelta]:
        """Returns how many bytes a Fetch may get, and, if it may get none, its throttle time."""
        if self._quotas is None:
            return most_bytes, NO_TIME
        size, throttle_ms = self._quotas.fetch_allowance(self._user, client_id, most_bytes)
        return size, self.begin(throttle_ms)

    def fetched(self, client_id: str, size_bytes: int) -> tuple[bool, dt.timedelta]:
        """Counts the records of a Fetch; returns whether they may be sent, and the throttle."""
        if self._quotas is None:
            return True, NO_TIME
        may_be_sent, throttle_ms = self._quotas.fetched(self._user, client_id, size_bytes)
        return may_be_sent, self.begin(throttle_ms)

    def mutated(self, client_id: str, partitions: int, *, is_strict: bool) -> int:
        """Counts partitions that are created or deleted, and returns the throttle in ms.

        Raises `MutationQuotaExceeded`; see `Quotas.mutated`.
        """
        if self._quotas is None:
            return 0
        return self._quotas.mutated(self._user, client_id, partitions, is_strict=is_strict)

    # -------------------------------------------------------------------------- the time

    def begin(self, throttle_ms: int) -> dt.timedelta:
        """Throttles the client after the current request, and returns the time for its reply."""
        if not throttle_ms:
            return NO_TIME
        until = asyncio.get_running_loop().time() + throttle_ms / 1e3
        self._until = max(self._until, until)
        return duration(throttle_ms)

    @property
    def is_on(self) -> bool:
        """True while the client is throttled."""
        return bool(self._until)

    async def wait(self) -> None:
        """Waits until the throttle is over."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        timer = loop.call_at(self._until, self.end)
        try:
            await self._ended
        finally:
            timer.cancel()
            self._until, self._ended = 0.0, None

    def end(self) -> None:
        """Ends the throttle, if there is one."""
        self._until = 0.0
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


UNTHROTTLED: Final = Throttle(None)
"""The throttle of requests that did not arrive over a connection."""


class Mutations:
    """The partitions that one request creates or deletes (KIP-599)."""

    def __init__(self, throttle: Throttle, client_id: str, *, is_strict: bool) -> None:
        """`is_strict`: the client knows the error THROTTLING_QUOTA_EXCEEDED."""
        self._throttle = throttle
        self._client_id = client_id
        self._is_strict = is_strict
        self._throttle_ms = 0

    @property
    def has_quotas(self) -> bool:
        """True if there are quotas of any client."""
        return self._throttle.has_quotas

    def check(self, partitions: int) -> None:
        """Counts partitions. Raises `MutationQuotaExceeded`."""
        try:
            self._note(
                self._throttle.mutated(self._client_id, partitions, is_strict=self._is_strict)
            )
        except errors.MutationQuotaExceeded as error:
            self._note(error.facts["throttle_ms"])
            raise

    def _note(self, throttle_ms: int) -> None:
        self._throttle_ms = max(self._throttle_ms, throttle_ms)

    def end(self) -> dt.timedelta:
        """Throttles the client, if the quota is exceeded, and returns the time for the reply."""
        return self._throttle.begin(self._throttle_ms)
