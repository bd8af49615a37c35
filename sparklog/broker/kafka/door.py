"""The Kafka door: one thread, one event loop, every connection.

The loop never waits for storage: what does runs in threads, of one pool for each kind of work, so
that those who wait in one hold up nobody in another. A produce request is only queued here; one
thread waits for the writer and tells the loop what has become durable. Who waits for the log to
grow is called by the writer itself.
"""

from __future__ import annotations

import asyncio
import queue
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

import structlog
import uvloop

from sparklog import errors
from sparklog.broker.coordinator import Coordinator, TopicPartition
from sparklog.broker.core import Core, Ticket
from sparklog.broker.kafka.connection import Connection
from sparklog.broker.kafka.link import Link
from sparklog.broker.kafka.memory import Memory
from sparklog.broker.kafka.registry import Outcome, Work
from sparklog.broker.kafka.sessions import Sessions
from sparklog.broker.kafka.turns import Turns
from sparklog.limits import (
    KAFKA_CHANGE_THREADS,
    KAFKA_CHECK_THREADS,
    KAFKA_CONNECTIONS,
    KAFKA_CONNECTIONS_PER_ADDRESS,
    KAFKA_CONTROL_THREADS,
    KAFKA_OTHER_FILES,
    KAFKA_READ_THREADS,
)

_T = TypeVar("_T")
_LOOK_SECONDS: Final = 1.0
"""How often connections are looked at, and how often while memory is short."""
_LOOK_SHORT_SECONDS: Final = 0.25
_LOGGED_CLOSED: Final = 8
"""So many connections that are closed for a reason are named each time."""
_THREADS: Final[Mapping[Work, int]] = {
    Work.CONTROL: KAFKA_CONTROL_THREADS,
    Work.CHANGE: KAFKA_CHANGE_THREADS,
    Work.CHECK: KAFKA_CHECK_THREADS,
    Work.READ: KAFKA_READ_THREADS,
    Work.ASIDE: 1,
}
_log = structlog.get_logger("sparklog.kafka")


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
        max_connections: int = KAFKA_CONNECTIONS,
        max_connections_per_address: int = KAFKA_CONNECTIONS_PER_ADDRESS,
    ) -> None:
        self.core = core
        self.groups = groups
        self._listen = listen
        self._advertised = advertised
        self._request_max_bytes = request_max_bytes
        self._loop = uvloop.new_event_loop()
        self._pools = {
            work: ThreadPoolExecutor(count, thread_name_prefix=f"sparklog-kafka-{work}")
            for work, count in _THREADS.items()
        }
        self._tickets: queue.SimpleQueue[_Appends | None] = queue.SimpleQueue()
        self._memory = Memory(memory_bytes, request_max_bytes=request_max_bytes)
        self._max_connections = max_connections
        self._max_connections_per_address = max_connections_per_address
        self._addresses: Counter[str] = Counter()
        """How many connections each has."""
        self._refused = 0
        """Connections, since that was logged."""
        self._closed = 0
        self.sessions = Sessions()
        self.room = asyncio.Lock()
        self.large = asyncio.Lock()
        self.turns = Turns()
        self.ids = asyncio.Lock()
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
        self._max_connections = _within_open_files(self._max_connections)
        for name, run in (
            ("kafka", lambda: self._serve(listener)),
            ("kafka-acks", self._watch_tickets),
        ):
            thread = threading.Thread(target=run, name=f"sparklog-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _serve(self, listener: socket.socket) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            self._loop.create_server(lambda: Link(self._opened), sock=listener)
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
        if self._threads:
            self._loop.call_soon_threadsafe(self._loop.stop)
        for thread in self._threads:
            thread.join()
        for pool in self._pools.values():
            pool.shutdown()

    # -------------------------------------------------------------------------- what handlers use

    def say_closed(self, peer: str, reason: str) -> None:
        """Logs why a connection is closed; of many at a time only how many more there were."""
        self._closed += 1
        if self._closed <= _LOGGED_CLOSED:
            _log.warning("a connection is closed", peer=peer, reason=reason)

    async def blocking(self, work: Work, call: Callable[..., _T], *values: Any) -> _T:
        """What `call` returns, run in a thread for that kind of work."""
        return await self._loop.run_in_executor(self._pools[work], call, *values)

    def durable(self, tickets: Sequence[Ticket]) -> asyncio.Future[list[Outcome]]:
        """What has become of each, once that is known of all."""
        found: asyncio.Future[list[Outcome]] = self._loop.create_future()
        self._tickets.put(_Appends(tickets, found))
        return found

    async def grown(
        self, seen: Mapping[TopicPartition, int], lacking_bytes: int, timeout_seconds: float
    ) -> None:
        """Returns when they have grown by so many bytes since they were seen, or it is time.

        Also where a topic is not there any more. Nobody is woken before.
        """
        waiter: asyncio.Future[None] = self._loop.create_future()
        try:
            watch = self.core.watch_growth(
                seen, lacking_bytes, lambda: self._tell(_settle_one, waiter)
            )
        except errors.Invalid:
            return
        try:
            async with asyncio.timeout(timeout_seconds):
                await waiter
        except TimeoutError:
            pass
        finally:
            self.core.stop_watching(watch)

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

    def _tell(self, call: Callable[..., object], *values: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *values)
        except RuntimeError:  # the loop is closed
            if not self._closing.is_set():
                raise

    # -------------------------------------------------------------------------- a connection

    def _opened(self, link: Link) -> None:
        """Refuses connections beyond the bounds, as Kafka does: they end at once."""
        peer = link.peer
        if (
            len(self._connections) >= self._max_connections
            or self._addresses[peer] >= self._max_connections_per_address
        ):
            self._refused += 1
            link.transport.abort()
            return
        connection = Connection(self, link, self._memory, request_max_bytes=self._request_max_bytes)
        self._addresses[peer] += 1
        task = self._loop.create_task(connection.serve())
        self._connections[task] = connection
        task.add_done_callback(lambda task: self._ended(task, peer))

    def _ended(self, task: asyncio.Task[None], peer: str) -> None:
        del self._connections[task]
        self._addresses[peer] -= 1
        if not self._addresses[peer]:
            del self._addresses[peer]

    async def _watch_connections(self) -> None:
        looked_at = 0.0
        while True:
            await asyncio.sleep(_LOOK_SHORT_SECONDS)
            now = time.monotonic()
            if now - looked_at < _LOOK_SECONDS and not self._memory.is_short:
                continue
            looked_at = now
            for connection in tuple(self._connections.values()):
                connection.look()
            if self._refused:
                _log.warning(
                    "connections are refused: there are too many",
                    refused=self._refused,
                    connections=len(self._connections),
                    max_connections=self._max_connections,
                    max_connections_per_address=self._max_connections_per_address,
                )
                self._refused = 0
            if self._closed > _LOGGED_CLOSED:
                more = self._closed - _LOGGED_CLOSED
                _log.warning("more connections are closed", connections=more)
            self._closed = 0


def _within_open_files(wanted: int) -> int:
    """As many connections as leave the log and the tables their files, raising the limit first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + KAFKA_OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(raised, soft), hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    found = max(soft - KAFKA_OTHER_FILES, soft // 2)
    _log.warning(
        "fewer connections are taken: the process may open too few files",
        max_connections=wanted,
        taken=found,
        open_files=soft,
    )
    return found


def _settle_one(found: asyncio.Future[None]) -> None:
    if not found.done():
        found.set_result(None)


def _settle(ended: Sequence[tuple[asyncio.Future[list[Outcome]], list[Outcome]]]) -> None:
    for found, outcomes in ended:
        if not found.done():
            found.set_result(outcomes)
