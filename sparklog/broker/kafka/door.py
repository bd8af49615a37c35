"""The Kafka door: one thread, one event loop, every connection.

The loop never waits for storage: what does runs in threads. A produce request is only queued here;
one thread waits for the writer and tells the loop what has become durable. Another tells it when
the log has grown, while somebody waits for that.
"""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, TypeVar

import uvloop

from sparklog import errors
from sparklog.broker.coordinator import Coordinator, TopicPartition
from sparklog.broker.core import Core, Ticket
from sparklog.broker.kafka.connection import Connection
from sparklog.broker.kafka.memory import Budget
from sparklog.broker.kafka.registry import Outcome
from sparklog.broker.kafka.sessions import Sessions
from sparklog.limits import KAFKA_READ_BYTES, KAFKA_THREADS

_T = TypeVar("_T")
_TICK_SECONDS: Final = 0.5


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
        memory_bytes: int,
    ) -> None:
        self.core = core
        self.groups = groups
        self._listen = listen
        self._advertised = advertised
        self._request_max_bytes = request_max_bytes
        self._loop = uvloop.new_event_loop()
        self._pool = ThreadPoolExecutor(KAFKA_THREADS, thread_name_prefix="sparklog-kafka")
        self._tickets: queue.SimpleQueue[_Appends | None] = queue.SimpleQueue()
        self._waiting: dict[TopicPartition, set[asyncio.Future[None]]] = {}
        """For growth, by what they wait for."""
        self._is_awaited = threading.Event()
        """Set while somebody waits for growth."""
        self._memory = Budget(memory_bytes)
        self.sessions = Sessions()
        self.room = asyncio.Lock()
        self._connections: dict[asyncio.Task[None], Connection] = {}
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self.host, self.port = "", 0

    @property
    def address(self) -> str:
        """`host:port` that clients are told."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    # -------------------------------------------------------------------------- starting

    def start(self) -> None:
        """Raises `BadOption` where the address is taken."""
        host, _, port = self._listen.rpartition(":")
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            place = host.strip("[]"), int(port)
            listener = socket.create_server(place, family=family, backlog=1_024)
        except OSError as error:
            reason = f"{error}; name another address, or '' for no Kafka door"
            raise errors.BadOption(
                option="kafka.listen", value=self._listen, reason=reason
            ) from error
        advertised_host, _, advertised_port = self._advertised.rpartition(":")
        self.host = (advertised_host or host).strip("[]")
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
            asyncio.start_server(self._connected, sock=listener, limit=KAFKA_READ_BYTES)
        )
        watching = self._loop.create_task(self._watch_connections())
        self._loop.run_forever()
        server.close()
        tasks = [watching, *self._connections]
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
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

    async def grown(
        self, seen: int, partitions: Collection[TopicPartition], timeout_seconds: float
    ) -> None:
        """Returns when one of them may have grown since the log was seen there, or it is time."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        awaited = set(partitions)
        for each in awaited:
            self._waiting.setdefault(each, set()).add(waiter)
        self._is_awaited.set()
        try:
            if self.growth == seen:
                await asyncio.wait_for(waiter, timeout_seconds)
        except TimeoutError:
            pass
        finally:
            for each in awaited:
                waiting = self._waiting[each]
                waiting.discard(waiter)
                if not waiting:
                    del self._waiting[each]

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
            seen, grown = self.core.wait_for_growth(seen, _TICK_SECONDS)
            self._tell(self._wake, grown)

    def _wake(self, grown: Collection[TopicPartition] | None) -> None:
        if not self._waiting:
            self._is_awaited.clear()
        for each in list(self._waiting) if grown is None else grown:
            for waiter in self._waiting.get(each, ()):
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
        connection = Connection(
            self, reader, writer, self._memory, request_max_bytes=self._request_max_bytes
        )
        self._connections[task] = connection
        try:
            await connection.serve()
        finally:
            del self._connections[task]

    async def _watch_connections(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for connection in self._connections.values():
                connection.look()


def _settle(ended: Sequence[tuple[asyncio.Future[list[Outcome]], list[Outcome]]]) -> None:
    for found, outcomes in ended:
        if not found.done():
            found.set_result(outcomes)
