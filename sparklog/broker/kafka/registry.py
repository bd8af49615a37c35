"""What the door serves: a handler for each API key, and what handlers may ask of their door."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from kio.schema.index import schema_name_map

from sparklog.broker.coordinator import Coordinator, TopicPartition
from sparklog.broker.core import Appended, Core, Ticket
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.sessions import Sessions
from sparklog.broker.kafka.turns import Turns

_T = TypeVar("_T")

Reply: TypeAlias = Fields | None
"""None: no answer is wanted."""


Outcome: TypeAlias = list[Appended] | Exception
"""Where the batches of a ticket stand, or why they do not."""


class Work(Enum):
    """Kinds of work that wait for storage or compute, each with threads of its own.

    None of it waits for something that a client decides.
    """

    CONTROL = "control"
    """Quick looks and small changes that other clients depend on."""
    CHANGE = "change"
    """Changes of topics and their tables, which take their turn one after another anyhow."""
    CHECK = "check"
    """Batches that take long to check."""
    READ = "read"
    """Old records."""
    ASIDE = "aside"
    """Requests of many items, which are taken apart one at a time."""


class Door(Protocol):
    """What a handler may ask for. All of it belongs to the door's loop."""

    core: Core
    groups: Coordinator
    sessions: Sessions
    host: str
    port: int
    """Where clients are told to come."""
    room: asyncio.Lock
    """Held by the request that waits for room in the log; the others wait for it, in turn."""
    large: asyncio.Lock
    """Held by the connection that makes a large reply: one is made at a time."""
    turns: Turns
    ids: asyncio.Lock
    """Held by the request that waits for producer ids; the others wait for it."""

    def say_closed(self, peer: str, reason: str) -> None:
        """Logs why a connection is closed; of many at a time only how many more there were."""

    async def blocking(self, work: Work, call: Callable[..., _T], *values: Any) -> _T:
        """What `call` returns, run in a thread for that kind of work."""

    def durable(self, tickets: Sequence[Ticket]) -> asyncio.Future[list[Outcome]]:
        """What has become of each, once that is known of all."""

    async def grown(
        self, seen: Mapping[TopicPartition, int], lacking_bytes: int, timeout_seconds: float
    ) -> None:
        """Returns when they have grown by so many bytes since they were seen, or it is time.

        `seen`: `Place.grown_bytes` of each.
        """


Handler: TypeAlias = Callable[[Door, Request], Awaitable[Reply | Awaitable[Reply]]]
"""Requests of a connection are handled one after another. Where the answer is an awaitable, the
next request is handled while it is awaited, if that `overlaps`; answers go out in order all the
same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """A request that is served, in these versions."""

    key: int
    name: str
    first: int
    last: int
    handle: Handler
    overlaps: bool
    """Whether it is handled before the earlier requests of its connection are answered."""
    keeps_bytes: bool
    """Whether most of its bytes are kept until it is answered, because they are records."""
    waits: bool
    """Whether it may wait for others; it does not once its client has left. What it answers later
    keeps nothing of the request."""


APIS: Final[dict[int, Api]] = {}


def serves(
    key: int,
    name: str,
    *,
    last: int,
    overlaps: bool = False,
    keeps_bytes: bool = False,
    waits: bool = False,
) -> Callable[[Handler], Handler]:
    """Registers a handler for all versions that kio knows, up to `last`, Kafka 4.1's newest."""
    versions: Sequence[int] = sorted(schema_name_map[name])

    def register(handle: Handler) -> Handler:
        APIS[key] = Api(
            key=key,
            name=name,
            first=versions[0],
            last=min(versions[-1], last),
            handle=handle,
            overlaps=overlaps,
            keeps_bytes=keeps_bytes,
            waits=waits,
        )
        return handle

    return register
