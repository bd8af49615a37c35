"""The Kafka door: one thread, one event loop, every connection.

- Requests of a connection are handled in order, and answered in order.
- The loop never waits for storage: what does runs in threads. A produce request is only queued
  here; one thread waits for the writer and tells the loop what has become durable.
- A connection costs no more than a frame and its answers: a frame that says it is larger than
  `request_max_bytes` ends it, and one that does not read its answers is not read on.
"""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import structlog
import uvloop

from sparklog import errors
from sparklog.broker.coordinator import Coordinator
from sparklog.broker.core import Core, Ticket
from sparklog.broker.kafka import apis, messages
from sparklog.broker.kafka.registry import APIS, Outcome, Reply
from sparklog.limits import KAFKA_PIPELINED, KAFKA_THREADS

_log = structlog.get_logger("sparklog.kafka")
_T = TypeVar("_T")
_LENGTH_BYTES: Final = 4
_TICK_SECONDS: Final = 0.5
_Answer: TypeAlias = tuple[int, int, int, Reply | Awaitable[Reply]]
"""(API key, version, correlation id, answer)."""


class _Appends(NamedTuple):
    """Of one request."""

    tickets: Sequence[Ticket]
    found: asyncio.Future[list[Outcome]]


class KafkaDoor:
    """Serves `core` at `listen` (`host:port`; port 0 takes a free one) once it is started."""

    def __init__(
        self,
        core: Core,
        groups: Coordinator,
        listen: str,
        *,
        advertised: str = "",
        request_max_bytes: int,
    ) -> None:
        self.core = core
        self.groups = groups
        self._listen = listen
        self._advertised = advertised
        self._request_max_bytes = request_max_bytes
        self._loop = uvloop.new_event_loop()
        self._pool = ThreadPoolExecutor(KAFKA_THREADS, thread_name_prefix="sparklog-kafka")
        self._tickets: queue.SimpleQueue[_Appends | None] = queue.SimpleQueue()
        self._waiting: set[asyncio.Future[None]] = set()
        self._is_awaited = threading.Event()
        """Set while somebody waits for growth."""
        self._connections: set[asyncio.Task[None]] = set()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self.host, self.port = "", 0

    @property
    def address(self) -> str:
        """`host:port` that clients are told."""
        return f"{self.host}:{self.port}"

    # -------------------------------------------------------------------------- starting

    def start(self) -> None:
        """Raises `BadOption` where the address is taken."""
        host, _, port = self._listen.rpartition(":")
        try:
            listener = socket.create_server((host.strip("[]"), int(port)), backlog=1_024)
        except OSError as error:
            reason = f"{error}; name another address, or '' for no Kafka door"
            raise errors.BadOption(
                option="kafka.listen", value=self._listen, reason=reason
            ) from error
        advertised_host, _, advertised_port = self._advertised.rpartition(":")
        self.host = advertised_host or host
        self.port = int(advertised_port or listener.getsockname()[1])
        for name, run in (
            ("kafka", lambda: self._serve(listener)),
            ("kafka-acks", self._watch_tickets),
            ("kafka-growth", self._watch_growth),
        ):
            thread = threading.Thread(target=run, name=f"sparklog-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _serve(self, listener: socket.socket) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._connected, sock=listener, limit=1 << 20)
        )
        self._loop.run_forever()
        server.close()
        for task in self._connections:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._connections, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def close(self) -> None:
        """Returns when nobody is served any more."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._tickets.put(None)
        self._is_awaited.set()
        if self._threads:
            self._loop.call_soon_threadsafe(self._loop.stop)
        for thread in self._threads:
            thread.join()
        self._pool.shutdown()

    # -------------------------------------------------------------------------- what handlers use

    async def blocking(self, call: Callable[..., _T], *values: Any) -> _T:
        """What `call` returns, run in another thread."""
        return await self._loop.run_in_executor(self._pool, call, *values)

    def durable(self, tickets: Sequence[Ticket]) -> asyncio.Future[list[Outcome]]:
        """What has become of each, once that is known of all."""
        found: asyncio.Future[list[Outcome]] = self._loop.create_future()
        self._tickets.put(_Appends(tickets, found))
        return found

    @property
    def growth(self) -> int:
        """How far the log is."""
        return self.core.growth

    async def grown(self, seen: int, timeout_seconds: float) -> None:
        """Returns when the log is not where it was seen, or the time is over."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiting.add(waiter)
        self._is_awaited.set()
        try:
            if self.growth == seen:
                await asyncio.wait_for(waiter, timeout_seconds)
        except TimeoutError:
            pass
        finally:
            self._waiting.discard(waiter)

    # -------------------------------------------------------------------------- watching

    def _watch_tickets(self) -> None:
        """Leads the flushes, and tells the loop how appends have ended.

        What one flush has ended is told at once: each hand-over costs both threads a start.
        """
        ended: list[tuple[asyncio.Future[list[Outcome]], list[Outcome]]] = []
        while True:
            if ended and self._tickets.empty():
                self._tell(_settle, ended)
                ended = []
            appends = self._tickets.get()
            if appends is None:
                break
            if ended and not all(each.done for each in appends.tickets):
                self._tell(_settle, ended)
                ended = []
            ended.append((appends.found, [self._outcome(each) for each in appends.tickets]))
        self._tell(_settle, ended)

    def _outcome(self, ticket: Ticket) -> Outcome:
        try:
            return self.core.wait(ticket)
        except Exception as error:
            return error

    def _watch_growth(self) -> None:
        """Wakes who waits, and rests while nobody does: every flush would wake it for nothing."""
        seen = self.growth
        while not self._closing.is_set():
            self._is_awaited.wait()
            seen = self.core.wait_for_growth(seen, _TICK_SECONDS)
            self._tell(self._wake)

    def _wake(self) -> None:
        if not self._waiting:
            self._is_awaited.clear()
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    def _tell(self, call: Callable[..., object], *values: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *values)
        except RuntimeError:  # the loop is closed
            if not self._closing.is_set():
                raise

    # -------------------------------------------------------------------------- a connection

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        answers: asyncio.Queue[_Answer] = asyncio.Queue(KAFKA_PIPELINED)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._receive(reader, _host_of(writer), answers))
                both.create_task(self._send(answers, writer))
        except* (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has left
        except* asyncio.CancelledError:
            pass  # the door closes
        except* errors.Invalid as group:
            peer = str(writer.get_extra_info("peername"))
            _log.warning("a connection is closed", peer=peer, reason=str(group.exceptions[0]))
        except* Exception:
            _log.exception("a connection is closed")
        finally:
            writer.close()
            self._connections.discard(task)
            while not answers.empty():
                _drop(answers.get_nowait())

    async def _receive(
        self, reader: asyncio.StreamReader, host: str, answers: asyncio.Queue[_Answer]
    ) -> None:
        while True:
            length = await reader.readexactly(_LENGTH_BYTES)
            size = int.from_bytes(length, "big", signed=True)
            if not 0 <= size <= self._request_max_bytes:
                reason = f"a request of {size} bytes; {self._request_max_bytes} are the most"
                raise errors.BadRequest(reason=reason)
            frame = await reader.readexactly(size)
            await answers.put(await self._handled(frame, host))

    async def _handled(self, frame: bytes, host: str) -> _Answer:
        api_key, version, correlation_id = messages.read_start(frame)
        api = APIS.get(api_key)
        if api is None:
            raise errors.BadRequest(reason=f"API key {api_key} is not served")
        if not api.first <= version <= api.last:
            if api_key != messages.API_VERSIONS:
                raise errors.BadRequest(reason=f"{api.name} is not served in version {version}")
            return (
                api_key,
                0,
                correlation_id,
                apis.api_versions.answer(messages.UNSUPPORTED_VERSION),
            )
        request = messages.read_request(frame, host)
        return api_key, version, correlation_id, await api.handle(self, request)

    async def _send(self, answers: asyncio.Queue[_Answer], writer: asyncio.StreamWriter) -> None:
        while True:
            api_key, version, correlation_id, answer = await answers.get()
            fields = await answer if isinstance(answer, Awaitable) else answer
            if fields is not None:
                writer.write(messages.write_reply(api_key, version, correlation_id, fields))
                await writer.drain()


def _host_of(writer: asyncio.StreamWriter) -> str:
    """The client's, as Kafka shows it."""
    peer = writer.get_extra_info("peername")
    return f"/{peer[0]}" if peer else ""


def _drop(item: _Answer) -> None:
    """An answer that nobody waits for any more."""
    answer = item[-1]
    if asyncio.iscoroutine(answer):
        answer.close()


def _settle(ended: Sequence[tuple[asyncio.Future[list[Outcome]], list[Outcome]]]) -> None:
    for found, outcomes in ended:
        if not found.done():
            found.set_result(outcomes)
