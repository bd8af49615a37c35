"""The quotas of the root, applied to the clients of one broker, as each broker of Kafka does.

A quota limits what a client may do in a second at each broker. It is judged once for each request,
whether or not ACLs are evaluated. A request beyond it is served, and the client is throttled: the
reply names the time, and the listener reads nothing more from the client until it is over. A fetch
beyond its quota gets no records.

Differences from Kafka: bytes are judged by a token bucket, which allows the same ten seconds of the
quota at once, but no more than the quota afterwards, however large the requests are; a fetch gets
the tokens that are left, and at least one batch while there are any, so that a consumer of large
batches can continue; the first produce request of a connection is read when the throttle of its
user and client id is over, so that a client does not evade it by a new connection; a client without
a client id has the default quota of client ids; a throttle ends when quotas change, and the
debt of a client by its old quota is forgiven.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from sparklog import errors
from sparklog.broker.peers import network_of
from sparklog.broker.quota_rates import ByteRate, Rate, Rates, TokenBucket
from sparklog.broker.security_watch import SecurityWatch
from sparklog.clock import Clock
from sparklog.security.quota import Limit, QuotaKey, QuotaTable

RATES = 10_000  # of client ids and of addresses, each
RATES_OF_USER = 1_000  # of client ids of one user; further ones share a rate
THROTTLE_MAX_MS = 600_000  # Kafka's connections.max.idle.ms: it would close the connection then
CONNECTION_THROTTLE_MAX_MS = 10_000  # for which a connection waits; later ones are closed

_Group = tuple[QuotaKey, str | None]
"""The key of a quota, and the user; None: clients of every user."""


class ClientRate(NamedTuple):
    """A rate that a quota limits, for the metrics."""

    key: QuotaKey
    user: str | None
    client_id: str | None
    per_second: float


class Quotas:
    """Counts what clients do, and returns for how long they are throttled. Thread-safe."""

    def __init__(self, watch: SecurityWatch, *, clock: Clock) -> None:
        self._watch = watch
        self._clock = clock
        self._lock = threading.Lock()
        self._bytes: Rates[_Group, ByteRate] = Rates(
            ByteRate, most=RATES, most_of_group=RATES_OF_USER
        )
        self._mutations: Rates[_Group, TokenBucket] = Rates(
            TokenBucket, most=RATES, most_of_group=RATES_OF_USER
        )
        self._connections: Rates[_Group, Rate] = Rates(
            Rate, most=RATES, most_of_group=RATES, evicts=True
        )
        self.throttles: Counter[QuotaKey] = Counter()
        """The number of times that a client was throttled."""
        self.throttled_ms: Counter[QuotaKey] = Counter()
        """For how long, all clients together."""
        self._version = 0
        """Rises with each change of the quotas."""
        self._seen = watch.state.quotas
        self.table: QuotaTable | None = None
        """None if there are no quotas at all."""
        self.on_change: list[Callable[[], None]] = []
        """Called after the quotas have changed, in the thread that has noticed it."""
        self._set_table()
        watch.on_change.append(self._follow)

    def _follow(self) -> None:
        quotas = self._watch.state.quotas
        if quotas is self._seen or quotas == self._seen:
            return
        self._seen = quotas
        self._set_table()
        for each in self.on_change:
            each()

    def _set_table(self) -> None:
        self._version += 1
        self.table = QuotaTable(self._seen) if self._seen else None

    def _now_ms(self) -> int:
        return int(self._clock.monotonic() * 1e3)

    def _limit(self, key: QuotaKey, user: str, client_id: str) -> Limit | None:
        table = self.table
        return table.of_client(key, user, client_id) if table is not None else None

    # -------------------------------------------------------------------------- bytes

    def produced(self, user: str, client_id: str, size_bytes: int) -> int:
        """Counts a request, and returns the milliseconds for which its client is throttled."""
        return self._count_bytes(QuotaKey.PRODUCER_BYTE_RATE, user, client_id, size_bytes)

    def producer_debt_ms(self, user: str, client_id: str) -> int:
        """Returns for how long a client that produces is throttled because of earlier requests."""
        key = QuotaKey.PRODUCER_BYTE_RATE
        limit = self._limit(key, user, client_id)
        if limit is None:
            return 0
        now_ms = self._now_ms()
        with self._lock:
            rate = self._rate_of(key, limit, now_ms)
            return min(rate.bucket.throttle_ms(limit.value, now_ms), THROTTLE_MAX_MS)

    def consumed(self, user: str, client_id: str, size_bytes: int) -> int:
        """Counts records that are sent to a client in any case, as `produced` counts a request."""
        return self._count_bytes(QuotaKey.CONSUMER_BYTE_RATE, user, client_id, size_bytes)

    def _count_bytes(self, key: QuotaKey, user: str, client_id: str, size_bytes: int) -> int:
        limit = self._limit(key, user, client_id)
        if limit is None:
            return 0
        now_ms = self._now_ms()
        with self._lock:
            rate = self._rate_of(key, limit, now_ms)
            rate.add(size_bytes, limit.value, now_ms)
            return self._noted(key, rate.bucket.throttle_ms(limit.value, now_ms))

    def _rate_of(self, key: QuotaKey, limit: Limit, now_ms: int) -> ByteRate:
        rate = self._bytes.of((key, limit.user), limit.client_id, now_ms)
        rate.bucket.follow(self._version, limit.value)
        return rate

    def fetch_allowance(self, user: str, client_id: str, most_bytes: int) -> tuple[int, int]:
        """Returns how many bytes a fetch may get, 1 to `most_bytes`, and the throttle in ms.

        A client that is throttled may get none. Otherwise a fetch gets at least one batch, which
        may be larger than the bytes that are left.
        """
        key = QuotaKey.CONSUMER_BYTE_RATE
        limit = self._limit(key, user, client_id)
        if limit is None:
            return most_bytes, 0
        now_ms = self._now_ms()
        with self._lock:
            rate = self._rate_of(key, limit, now_ms)
            throttle_ms = self._noted(key, rate.bucket.throttle_ms(limit.value, now_ms))
            left_bytes = int(rate.bucket.tokens(limit.value, now_ms))
            return max(min(most_bytes, left_bytes), 1), throttle_ms

    def fetched(self, user: str, client_id: str, size_bytes: int) -> tuple[bool, int]:
        """Counts the records of a fetch. Returns whether they may be sent, and the throttle in ms.

        They may not if other fetches have exceeded the quota meanwhile; then they do not count.
        """
        key = QuotaKey.CONSUMER_BYTE_RATE
        limit = self._limit(key, user, client_id)
        if limit is None or not size_bytes:
            return True, 0
        now_ms = self._now_ms()
        with self._lock:
            rate = self._rate_of(key, limit, now_ms)
            may_be_sent = not rate.bucket.throttle_ms(limit.value, now_ms)
            rate.add(size_bytes, limit.value, now_ms)
            throttle_ms = self._noted(key, rate.bucket.throttle_ms(limit.value, now_ms))
            if not may_be_sent:
                rate.add(-size_bytes, limit.value, now_ms)
            return may_be_sent, throttle_ms

    # -------------------------------------------------------------------------- mutations

    def mutated(self, user: str, client_id: str, partitions: int, *, is_strict: bool) -> int:
        """Counts partitions that are about to be created or deleted, and returns the throttle in
        ms (KIP-599).

        Raises `MutationQuotaExceeded` if nothing may be changed now. Not `is_strict`: it may, as
        for clients that do not know that error.
        """
        key = QuotaKey.CONTROLLER_MUTATION_RATE
        limit = self._limit(key, user, client_id)
        if limit is None:
            return 0
        # A request for fewer partitions than there are fails later; it must not refill the bucket.
        partitions = max(partitions, 0)
        now_ms = self._now_ms()
        with self._lock:
            bucket = self._mutations.of((key, limit.user), limit.client_id, now_ms)
            bucket.follow(self._version, limit.value)
            if is_strict:
                throttle_ms = self._noted(key, bucket.throttle_ms(limit.value, now_ms))
                if throttle_ms:
                    raise errors.MutationQuotaExceeded(throttle_ms=throttle_ms)
            bucket.take(partitions, limit.value, now_ms)
            return 0 if is_strict else self._noted(key, bucket.throttle_ms(limit.value, now_ms))

    # -------------------------------------------------------------------------- connections

    def connected(self, address: str) -> int | None:
        """Counts a connection. Returns for how many ms it has to wait; None: it is closed.

        A connection that is closed is not counted.
        """
        table = self.table
        found = table.of_address(address) if table is not None else None
        if found is None:
            return 0
        key = QuotaKey.CONNECTION_CREATION_RATE
        limit, is_own = found
        now_ms = self._now_ms()
        with self._lock:
            name = address if is_own else network_of(address)
            rate = self._connections.of((key, None), name, now_ms)
            rate.add(1, now_ms)
            throttle_ms = self._noted(key, rate.throttle_ms(limit, now_ms))
            if throttle_ms <= CONNECTION_THROTTLE_MAX_MS:
                return throttle_ms
            rate.add(-1, now_ms)
            return None

    # -------------------------------------------------------------------------- metrics

    def _noted(self, key: QuotaKey, throttle_ms: int) -> int:
        if not throttle_ms:
            return 0
        throttle_ms = min(throttle_ms, THROTTLE_MAX_MS)
        self.throttles[key] += 1
        self.throttled_ms[key] += throttle_ms
        return throttle_ms

    def byte_rates(self, most: int) -> list[ClientRate]:
        """Returns the rates of clients with quotas that were counted last; at most so many."""
        now_ms = self._now_ms()
        with self._lock:
            found = [
                ClientRate(key, user, client_id, rate.rate.per_second(now_ms))
                for (key, user), client_id, rate in self._bytes.newest(most)
            ]
        return found[:most]
