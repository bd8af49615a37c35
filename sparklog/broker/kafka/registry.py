"""What the door serves: a handler for each API key, and what handlers may ask of their door."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from kio.schema.index import schema_name_map

from sparklog.broker.coordinator import Coordinator, TopicPartition
from sparklog.broker.core import Appended, Core, Ticket
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.sessions import Sessions

_T = TypeVar("_T")

Reply: TypeAlias = Fields | None
"""None: no answer is wanted."""


Outcome: TypeAlias = list[Appended] | Exception
"""Where the batches of a ticket stand, or why they do not."""


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

    async def blocking(self, call: Callable[..., _T], *values: Any) -> _T:
        """What `call` returns, run in another thread: for whatever waits for storage."""

    def durable(self, tickets: Sequence[Ticket]) -> asyncio.Future[list[Outcome]]:
        """What has become of each, once that is known of all."""

    @property
    def growth(self) -> int:
        """How far the log is; another number each time that some partition grows."""

    async def grown(
        self, seen: int, partitions: Collection[TopicPartition], timeout_seconds: float
    ) -> None:
        """Returns when one of them may have grown since the log was seen there, or it is time."""


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


APIS: Final[dict[int, Api]] = {}


def serves(
    key: int, name: str, *, last: int, overlaps: bool = False
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
        )
        return handle

    return register
