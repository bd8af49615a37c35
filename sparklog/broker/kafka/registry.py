"""Registration of the requests that the Kafka listener serves, and their handlers' context.

Each request has a module in `apis`, which registers its handler with `serves`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from kio.schema.index import schema_name_map

from sparklog.broker.audit import Audit
from sparklog.broker.authentication import Identity
from sparklog.broker.broker import AppendResult, Broker, PendingAppend
from sparklog.broker.counts import ListenerCounts
from sparklog.broker.groups.committed_offsets import TopicPartition
from sparklog.broker.groups.coordinator import Coordinator
from sparklog.broker.kafka.access import Access
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.scheduler import LoopScheduler
from sparklog.broker.kafka.sessions import FetchSessions
from sparklog.broker.kafka.throttle import Throttle
from sparklog.broker.security_admin import SecurityAdmin
from sparklog.listeners import Listener

_T = TypeVar("_T")

Reply: TypeAlias = Fields | None
"""The fields of a response; None if the client wants no response (acks=0)."""


Outcome: TypeAlias = list[AppendResult] | Exception
"""The results of a pending append's batches, or the reason they were not appended."""


class WorkerPool(Enum):
    """The thread pools for work that waits for storage or takes a long time to compute.

    Each kind of work has its own threads, so that one kind does not delay another. Work that
    waits for a client's decision runs in none of them.
    """

    CONTROL = "control"
    """Quick lookups and small changes that other clients depend on."""
    CHANGE = "change"
    """Changes to topics and their tables, which run sequentially anyway."""
    CHECK = "check"
    """Checks of large record batches."""
    READ = "read"
    """Reads of records that are not in memory."""
    SEEK = "seek"
    """Searches for offsets by timestamp, which read tables."""
    PROOF = "proof"
    """Reads of the metadata that prove leadership; waiting replies share one."""
    LOOK = "look"
    """Looks at the security state before a refusal is answered; waiting replies share one."""
    PASSWORDS = "passwords"
    """Checks of passwords, which take milliseconds each."""
    TOKENS = "tokens"
    """Checks of OAuth tokens, which take a tenth of that."""
    LARGE_REQUEST = "large-request"
    """Requests with many items, which are parsed one at a time."""


class HandlerContext(Protocol):
    """The parts of the listener that a handler may use, only in the listener's event loop."""

    broker: Broker
    groups: Coordinator
    sessions: FetchSessions
    counts: ListenerCounts

    @property
    def listeners(self) -> Sequence[Listener]:
        """All listeners of this broker; `Request.listener` is that of the client."""
        ...

    writer_queue_lock: asyncio.Lock
    """Held by the request that waits for space in the writer's queue; others queue behind it."""
    large_reply_lock: asyncio.Lock
    """Held by the connection that encodes a large reply: one is encoded at a time."""
    scheduler: LoopScheduler
    producer_id_lock: asyncio.Lock
    """Held by the request that waits for a block of producer ids; others wait for its result."""

    security_admin: SecurityAdmin | None
    """None if there are no ACLs at all."""
    audit: Audit | None
    """Notes administrative requests; None if there is none."""

    def access_of(self, identity: Identity | None, host: str) -> Access:
        """Returns what a client may do, by its user and its address."""

    def throttle_of(self, user: str) -> Throttle:
        """Returns the throttle of a new connection of a user."""

    def log_closed(self, peer: str, reason: str) -> None:
        """Logs why a connection is closed. If there are many per second, most are only counted."""

    def log_refused(self, client: str, reason: str) -> None:
        """Logs why a client is refused; it then disconnects. Rate-limited like `log_closed`."""

    async def run_blocking(self, pool: WorkerPool, call: Callable[..., _T], *values: Any) -> _T:
        """Returns the result of `call(*values)`, run in a thread of that pool."""

    def when_durable(
        self, pending_appends: Sequence[PendingAppend]
    ) -> asyncio.Future[list[Outcome]]:
        """Returns a future for all outcomes. Appends are waited for even if the future is not."""

    async def wait_for_append(
        self, seen: Mapping[TopicPartition, int], lacking_bytes: int, timeout_seconds: float
    ) -> bool:
        """Waits until the partitions have together grown by `lacking_bytes`, or the timeout.

        Returns False immediately if too many partitions are already being watched.

        Args:
            seen: `PartitionStatus.appended_bytes` of each partition, from which growth is measured.
        """

    async def wait_for_leaders(self, timeout_seconds: float) -> None:
        """Waits until the partitions that this broker serves, or the known leaders, change."""

    async def wait_fetch_turn(self) -> bool:
        """Waits for the turn of a fetch that finds few records. Returns whether it had to wait.

        When records have arrived, `wait_for_append` also waits for such a turn before it returns.
        """


Handler: TypeAlias = Callable[[HandlerContext, Request], Awaitable[Reply | Awaitable[Reply]]]
"""Handles one request. The requests on a connection are handled one at a time. If a handler
returns an awaitable, the connection reads its next request meanwhile, and handles it if its API
`is_pipelined`. Either way, responses are sent in the order of the requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedApi:
    """A supported API key, its versions, and the properties that connections need."""

    key: int
    name: str
    min_version: int
    max_version: int
    handler: Handler
    is_pipelined: bool
    """True if a request is handled before earlier ones of its connection are answered."""
    keeps_frame: bool
    """True if most of a request's bytes are retained until it is answered: they are records."""
    needs_proof: bool
    """True if a reply may lack what another broker knows, and so needs a proof of leadership."""
    is_repeatable: bool
    """True if a request changes nothing, and so is handled again if the metadata has changed."""
    follows: bool
    """True if the broker catches up with the metadata before it handles the request."""
    is_blind: bool
    """True if a broker without sight of the metadata serves it too."""
    needs_no_acls: bool
    """True if it is served while ACLs are enforced and cannot be read: members stay in groups."""
    may_wait: bool
    """True if a request may wait for other clients. It is dropped when its client leaves. An
    awaitable that its handler returns retains no part of the request."""


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
    needs_no_acls: bool = False,
    may_wait: bool = False,
) -> Callable[[Handler], Handler]:
    """Registers a handler for an API key.

    Args:
        name: the API's name in kio.
        max_version: the newest version in Kafka 4.1; kio may support fewer.
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
            needs_no_acls=needs_no_acls,
            may_wait=may_wait,
        )
        return handler

    return register
