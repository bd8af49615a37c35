"""TLS of the port for metrics: a handshake, and then HTTP by another protocol.

asyncio's own TLS servers bound neither the number of handshakes nor a handshake whose certificate
changes. Here each connection begins with the context of its moment, and counts from its start.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

from sparklog.broker.metrics.http_connections import (
    METRICS_CONNECTION_SECONDS,
    METRICS_CONNECTIONS,
)


class TlsConnection(asyncio.Protocol):
    """One connection until its handshake has ended."""

    def __init__(
        self,
        make_http: Callable[[], asyncio.Protocol],
        context: Callable[[], ssl.SSLContext],
        open_handshakes: set[TlsConnection],
    ) -> None:
        """Creates the protocol of a connection.

        Args:
            make_http: makes the protocol that continues after the handshake.
            context: returns the context for a new connection.
            open_handshakes: those of all connections.
        """
        self._make_http = make_http
        self._context = context
        self._open_handshakes = open_handshakes
        self._early = b""
        """Bytes that have arrived with the end of the handshake."""
        self._is_lost = False
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self._open_handshakes) >= METRICS_CONNECTIONS:
            transport.abort()
            return
        # asyncio sets it only for sockets that were created with a protocol number. Without it, the
        # response would wait 40 ms for the client's ack of a handshake message.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.pause_reading()  # until asyncio's TLS reads
        self._open_handshakes.add(self)
        self._task = asyncio.get_running_loop().create_task(self._start(transport))

    def data_received(self, data: bytes) -> None:
        self._early += data

    def connection_lost(self, _exc: Exception | None) -> None:
        self._is_lost = True

    async def _start(self, transport: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        tls = None
        with contextlib.suppress(OSError):  # among them, errors of TLS and the timeout
            tls = await loop.start_tls(
                transport,
                self,
                self._context(),
                server_side=True,
                ssl_handshake_timeout=METRICS_CONNECTION_SECONDS,
            )
        self._open_handshakes.discard(self)
        if tls is None or self._is_lost:
            transport.abort()
            return
        http = self._make_http()
        tls.set_protocol(http)
        http.connection_made(tls)
        if self._early:
            http.data_received(self._early)
