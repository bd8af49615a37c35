"""The quotas of native clients, which share those of the Kafka clients of the same user.

A call that exceeds its quota is served, and then its thread waits before it reads or sends more. A
tail, which has no thread of its own, sends nothing meanwhile. At most half of all streams may wait.
A new call of the same client waits before it is served, so that a client that ends a call which
waits, or one that may not wait, gains nothing.
Programs that can read the root's keys have no quotas: they could read the root itself.
"""

from __future__ import annotations

import threading
from typing import Final

from sparklog import errors
from sparklog.broker.broker import Broker
from sparklog.broker.flight.caller import Caller
from sparklog.broker.flight.grpc.call import Call
from sparklog.broker.flight.grpc.status import PeerGone
from sparklog.broker.quotas import Quotas
from sparklog.clock import ThreadClock
from sparklog.formats.flight_messages import AddPartitions, CreateTopic, TopicName

CLIENT_ID: Final = "sparklog"
"""The client id of all native clients."""
_CLIENT_CHECK_SECONDS: Final = 0.5
"""The interval at which a call that waits checks that its client is still connected."""


class Throttles:
    """Counts what the clients of one Flight listener do. Thread-safe."""

    def __init__(self, quotas: Quotas, *, most: int, clock: ThreadClock) -> None:
        """`most`: the number of calls that may wait."""
        self._quotas = quotas
        self._most = most
        self._clock = clock
        self._changed = threading.Condition()
        self._is_closed = False
        self._generation = 0
        """Rises when quotas change, which ends all throttles."""
        self.waiting = 0
        """The number of calls that wait."""
        quotas.on_change.append(self._end_all)

    @property
    def has_quotas(self) -> bool:
        """True if there are quotas of any client."""
        return self._quotas.table is not None

    def close(self) -> None:
        """Ends all throttles."""
        self._is_closed = True
        self._end_all()

    def _end_all(self) -> None:
        with self._changed:
            self._generation += 1
            self._changed.notify_all()

    # -------------------------------------------------------------------------- calls

    def append(self, call: Call, caller: Caller, size_bytes: int) -> None:
        """Counts an append, and waits. Raises what `_wait` raises.

        `size_bytes`: 0 to wait for earlier calls only.
        """
        if not caller.is_root:
            self._wait(call, self._quotas.produced(caller.user, CLIENT_ID, size_bytes))

    def send(self, call: Call, caller: Caller, size_bytes: int) -> None:
        """Counts records that were sent, and waits, as `append` does."""
        self._wait(call, self.sent_ms(caller, size_bytes))

    def sent_ms(self, caller: Caller, size_bytes: int) -> int:
        """Counts records that were sent, and returns the throttle in ms."""
        if caller.is_root:
            return 0
        return self._quotas.consumed(caller.user, CLIENT_ID, size_bytes)

    def count_mutations(self, broker: Broker, caller: Caller, request: object) -> None:
        """Counts the partitions that an action is about to create or delete.

        Raises `MutationQuotaExceeded`, and errors that the action would raise.
        """
        if caller.is_root or not isinstance(request, CreateTopic | AddPartitions | TopicName):
            return
        self._quotas.mutated(
            caller.user, CLIENT_ID, _partitions_of(broker, request), is_strict=True
        )

    def _wait(self, call: Call, throttle_ms: int) -> None:
        """Waits until a throttle is over.

        Raises `TooManyStreams` if half of all streams wait, and `PeerGone`.
        """
        if not throttle_ms:
            return
        deadline = self._clock.monotonic() + throttle_ms / 1e3
        with self._changed:
            if self.waiting >= self._most:
                raise errors.TooManyStreams(
                    what="throttled streams", open=self.waiting, setting="flight.max_streams"
                )
            generation = self._generation
            self.waiting += 1
            try:
                while self._generation == generation and not self._is_closed:
                    now = self._clock.monotonic()
                    if now >= deadline:
                        return
                    if call.is_dead:
                        raise PeerGone
                    self._clock.wait_until(
                        self._changed, min(deadline, now + _CLIENT_CHECK_SECONDS)
                    )
            finally:
                self.waiting -= 1


MUTATIONS: Final = frozenset({"topics.create", "topics.add_partitions", "topics.delete"})
"""The actions that `Throttles.count_mutations` counts."""


def _partitions_of(broker: Broker, request: CreateTopic | AddPartitions | TopicName) -> int:
    """Returns how many partitions an action creates or deletes."""
    if isinstance(request, CreateTopic):
        if request.if_absent and broker.topics.exists(request.topic):
            return 0
        return broker.topics.check_new(request)[0]
    known = len(broker.partitions.statuses(request.topic))
    return request.partitions - known if isinstance(request, AddPartitions) else known
