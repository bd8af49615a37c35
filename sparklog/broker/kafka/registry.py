"""Registration of the requests that the Kafka listener serves, and what their handlers may use.

Each request has a module in `apis`, whose handler is registered by `serves`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from kio.schema.index import schema_name_map

from sparklog.broker.broker import AppendResult, Broker, PendingAppend
from sparklog.broker.counts import ListenerCounts
from sparklog.broker.groups.committed_offsets import TopicPartition
from sparklog.broker.groups.coordinator import Coordinator
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.scheduler import LoopScheduler
from sparklog.broker.kafka.sessions import FetchSessions

_T = TypeVar("_T")

Reply: TypeAlias = Fields | None
"""The fields of a response; None if the client wants no response (acks=0)."""


Outcome: TypeAlias = list[AppendResult] | Exception
"""The results of a pending append's batches, or the reason why they were not appended."""


class WorkerPool(Enum):
    """The thread pools for work that waits for storage or takes long to compute.

    Each kind of work has threads of its own, so that one kind does not delay another. Work that
    waits for a client's decision runs in none of them.
    """

    CONTROL = "control"
    """Quick lookups and small changes that other clients depend on."""
    CHANGE = "change"
    """Changes of topics and their tables, which run one after another anyway."""
    CHECK = "check"
    """Checks of large record batches."""
    READ = "read"
    """Reads of records that are not in memory."""
    SEEK = "seek"
    """Searches for offsets by timestamp, which read tables."""
    PROOF = "proof"
    """Looks at the metadata that prove that the broker leads; replies wait for them together."""
    LARGE_REQUEST = "large-request"
    """Requests of many items, which are parsed one at a time."""


class HandlerContext(Protocol):
    """The parts of the listener that a handler may use, all in the listener's event loop."""

    broker: Broker
    groups: Coordinator
    sessions: FetchSessions
    counts: ListenerCounts
    host: str
    port: int
    """The address that Metadata and FindCoordinator return to clients."""
    writer_queue_lock: asyncio.Lock
    """Held by the request that waits for space in the writer's queue; others queue behind it."""
    large_reply_lock: asyncio.Lock
    """Held by the connection that encodes a large reply: one is encoded at a time."""
    scheduler: LoopScheduler
    producer_id_lock: asyncio.Lock
    """Held by the request that waits for a block of producer ids; others wait for its result."""

    def log_closed(self, peer: str, reason: str) -> None:
        """Logs why a connection is closed. Of many in a second, most are only counted."""

    def log_refused(self, client: str, reason: str) -> None:
        """Logs why a client is refused, which then closes its connection; as `log_closed`."""

    async def run_blocking(self, pool: WorkerPool, call: Callable[..., _T], *values: Any) -> _T:
        """Returns the result of `call(*values)`, run in a thread of that pool."""

    def when_durable(
        self, pending_appends: Sequence[PendingAppend]
    ) -> asyncio.Future[list[Outcome]]:
        """Returns a future of all their outcomes. Each append is waited for, even if it is not."""

    async def wait_for_append(
        self, seen: Mapping[TopicPartition, int], lacking_bytes: int, timeout_seconds: float
    ) -> bool:
        """Waits until the partitions have grown by `lacking_bytes` together, or for the timeout.

        Returns False at once if too many partitions are being waited for already.

        Args:
            seen: `PartitionStatus.appended_bytes` of each partition, from which growth is counted.
        """

    async def wait_for_leaders(self, timeout_seconds: float) -> None:
        """Waits until this broker serves other partitions than now, or knows other leaders."""

    async def wait_fetch_turn(self) -> bool:
        """Waits for the turn of a fetch that finds few records. Returns whether it had to wait.

        `wait_for_append` waits for such a turn too, before it returns for records that have come.
        """


Handler: TypeAlias = Callable[[HandlerContext, Request], Awaitable[Reply | Awaitable[Reply]]]
"""Handles one request. The requests of a connection are handled one after another. If a handler
returns an awaitable, the connection reads its next request while it waits, and handles it if that
request's API `is_pipelined`. Responses are sent in the order of the requests either way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedApi:
    """An API key that is served, its versions, and the properties that connections need to know."""

    key: int
    name: str
    min_version: int
    max_version: int
    handler: Handler
    is_pipelined: bool
    """True if it is handled before earlier requests of its connection are answered."""
    keeps_frame: bool
    """True if most of its bytes are kept until it is answered, because they are records."""
    needs_proof: bool
    """True if its reply may lack what another broker knows, and so needs a proof of leadership."""
    is_repeatable: bool
    """True if it is handled again once the metadata has changed: a repetition changes nothing."""
    follows: bool
    """True if the broker catches up with the metadata before it handles the request."""
    is_blind: bool
    """True if it is served by a broker without sight of the metadata too."""
    may_wait: bool
    """True if it may wait for other clients. It is dropped when its client leaves. An awaitable
    that it returns keeps nothing of the request."""


APIS: Final[dict[int, ServedApi]] = {}


def serves(
    key: int,
    name: str,
    *,
    max_version: int,
    is_pipelined: bool = False,
    keeps_frame: bool = False,
    needs_proof: bool = False,
    is_repeatable: bool = False,
    follows: bool = False,
    is_blind: bool = False,
    may_wait: bool = False,
) -> Callable[[Handler], Handler]:
    """Registers a handler for an API key.

    Args:
        name: the API's name in kio.
        max_version: the newest version in Kafka 4.1; kio may have fewer.
    """
    versions: Sequence[int] = sorted(schema_name_map[name])

    def register(handler: Handler) -> Handler:
        APIS[key] = ServedApi(
            key=key,
            name=name,
            min_version=versions[0],
            max_version=min(versions[-1], max_version),
            handler=handler,
            is_pipelined=is_pipelined,
            keeps_frame=keeps_frame,
            needs_proof=needs_proof,
            is_repeatable=is_repeatable,
            follows=follows,
            is_blind=is_blind,
            may_wait=may_wait,
        )
        return handler

    return register
