"""Hooks into the requests from Flight clients, with which tests observe, delay and break them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec
import pyarrow as pa


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A client's request."""

    name: str
    """`append` for one batch, `read` or `tail` for one batch to be sent, or the name of an action,
    such as `topics.create`."""
    topic: str = ""
    """Empty for an action that names no topic."""
    partition: int = -1
    """-1 for an action."""
    rows: pa.RecordBatch | None = None
    """The batch to be appended or sent; None for an action."""
    message: msgspec.Struct
    """The client's message, one of `sparklog.formats.flight_messages`, which may change between
    versions."""


class RequestHooks(Protocol):
    """Called in the threads that serve the requests. `PeerGone` ends the call without a reply."""

    def before(self, request: Request, /) -> None:
        """Runs before the request takes effect. A `SparklogError` rejects the request."""
        ...

    def after(self, request: Request, /) -> None:
        """Runs after an append or action has taken effect, before its response is sent."""
        ...
