"""HTTP connections of the port for metrics, bounded in number and time."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

METRICS_CONNECTIONS = 32  # open at a time; further ones are closed immediately
METRICS_CONNECTION_SECONDS = 15.0  # from connecting until the response is read


class BoundedConnection(H11Protocol):
    """One of a bounded number of connections, each of bounded duration."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= METRICS_CONNECTIONS:
            transport.abort()
            return
        super().connection_made(transport)
        self._deadline = self.loop.call_later(METRICS_CONNECTION_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self.connections:
            self._deadline.cancel()
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self in self.connections:
            super().data_received(data)

    def eof_received(self) -> Any:
        return super().eof_received() if self in self.connections else None
