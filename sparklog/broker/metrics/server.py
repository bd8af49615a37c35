"""The HTTP port with `/metrics`, `/healthz` and `/readyz`, in a thread with its own event loop.

With TLS it is HTTPS. If it asks for a login, only `/metrics` needs one: probes have no password.

It cannot harm the broker: the number and the duration of connections are bounded, each serves one
request, requests are small, and the metrics are collected once for all scrapes that arrive within a
second. If collecting them fails, the response has status 500 and the log has a line.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, cast

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from sparklog import limits
from sparklog.broker.metrics.exposition import CONTENT_TYPE
from sparklog.broker.metrics.http_connections import BoundedConnection
from sparklog.broker.metrics.logins import MetricsLogins
from sparklog.broker.metrics.tls_connections import TlsConnection

_REQUEST_BYTES = 16 * limits.KIB
_KEPT_SECONDS = 1.0  # the minimum time between collections, however often it is scraped

_log = structlog.get_logger("sparklog.metrics")
_SHARE: Final = 0.1
"""The maximum share of time spent collecting metrics, however often they are scraped."""
_CLOSE: Final = {"connection": "close"}
_INDEX: Final = "sparklog: /metrics for Prometheus, /healthz, /readyz\n"


class MetricsServer:
    """Serves metrics from `start` to `close`.

    Args:
        listening: a listening socket, which the server takes ownership of.
        collect: returns the text of the metrics, in portions, or None before there are any; called
            in one thread.
        is_healthy: returns whether the broker works.
        is_ready: returns whether it serves clients.
        context: returns the TLS context for a new connection; None: plain HTTP.
        logins: those of scrapes, which the server closes; None: everybody gets the metrics.
        kept_seconds: how long collected metrics are served to further scrapes.
    """

    def __init__(
        self,
        listening: socket.socket,
        *,
        collect: Callable[[], Sequence[bytes] | None],
        is_healthy: Callable[[], bool],
        is_ready: Callable[[], bool],
        context: Callable[[], ssl.SSLContext] | None = None,
        logins: MetricsLogins | None = None,
        kept_seconds: float = _KEPT_SECONDS,
    ) -> None:
        self._listening = listening
        self._collect = collect
        self._is_healthy = is_healthy
        self._is_ready = is_ready
        self._logins = logins
        self._kept_seconds = kept_seconds
        self._collecting = ThreadPoolExecutor(1, thread_name_prefix="sparklog-metrics-collect")
        self._lock = asyncio.Lock()
        self._kept: tuple[float, Sequence[bytes] | None] = float("-inf"), None
        """The time until which the collected metrics are fresh, and the metrics."""
        self._has_failed = False
        handshakes: set[TlsConnection] = set()

        def with_tls(**given: Any) -> asyncio.Protocol:
            assert context is not None
            return TlsConnection(functools.partial(BoundedConnection, **given), context, handshakes)

        self._server = uvicorn.Server(
            uvicorn.Config(
                Starlette(
                    routes=[
                        Route("/metrics", self._metrics),
                        Route("/healthz", self._healthz),
                        Route("/readyz", self._readyz),
                        Route("/", self._index),
                    ]
                ),
                http=BoundedConnection if context is None else cast(Any, with_tls),
                proxy_headers=False,  # a client could choose its address
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                h11_max_incomplete_event_size=_REQUEST_BYTES,
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(target=self._serve, name="sparklog-metrics", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Ends the connections, and returns when the threads have ended."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join()
        self._collecting.shutdown()
        if self._logins is not None:
            self._logins.close()
        self._listening.close()

    def _serve(self) -> None:
        try:
            asyncio.run(self._server.serve(sockets=[self._listening]))
        except Exception as error:  # the broker continues without metrics
            _log.error("the HTTP port for metrics is closed", reason=str(error) or repr(error))

    # -------------------------------------------------------------------------- responses

    async def _metrics(self, request: Request) -> Response:
        if self._logins is not None:
            host = request.client.host if request.client is not None else ""
            refusal = await self._logins.refusal(request.headers.get("authorization", ""), host)
            if refusal is not None:
                headers = {**refusal.headers, **_CLOSE}
                return PlainTextResponse(f"{refusal.reason}\n", refusal.status, headers)
        try:
            portions = await self._new_figures()
        except Exception as error:
            if not self._has_failed:
                _log.exception("cannot collect the metrics")
            self._has_failed = True
            return PlainTextResponse(f"cannot collect the metrics: {error!r}\n", 500, _CLOSE)
        self._has_failed = False
        if portions is None:
            return PlainTextResponse("the broker is starting\n", 503, _CLOSE)
        size = str(sum(map(len, portions)))
        headers = {"content-type": CONTENT_TYPE, "content-length": size, **_CLOSE}
        return StreamingResponse(_each(portions), headers=headers)

    async def _new_figures(self) -> Sequence[bytes] | None:
        async with self._lock:
            until, portions = self._kept
            if time.monotonic() < until:
                return portions
            began = time.monotonic()
            loop = asyncio.get_running_loop()
            portions = await loop.run_in_executor(self._collecting, self._collect)
            if portions is None:
                return None
            now = time.monotonic()
            kept_seconds = max(self._kept_seconds, (now - began) / _SHARE)
            self._kept = now + kept_seconds, portions
            return portions

    async def _healthz(self, _request: Request) -> Response:
        return _answer(self._is_healthy(), "healthy", "the broker has failed")

    async def _readyz(self, _request: Request) -> Response:
        return _answer(self._is_ready(), "ready", "the broker does not serve")

    async def _index(self, _request: Request) -> Response:
        return PlainTextResponse(_INDEX, headers=_CLOSE)


def _answer(is_good: bool, good: str, bad: str) -> Response:
    return PlainTextResponse(f"{good if is_good else bad}\n", 200 if is_good else 503, _CLOSE)


async def _each(portions: Sequence[bytes]) -> AsyncIterator[bytes]:
    for portion in portions:
        yield portion
