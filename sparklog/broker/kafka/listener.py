"""The Kafka listener: all connections in one thread with one event loop.

The loop never waits for storage. Work that does runs in thread pools, one per kind of work, so that
one kind does not delay another. The loop queues Produce requests with the writer; a second thread
waits for the flushes and passes their outcomes to the loop. Requests that wait for new records are
woken by the writer's thread.
"""

from __future__ import annotations

import asyncio
import math
import queue
import resource
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import structlog
import uvloop

from sparklog import errors
from sparklog.broker.acceptors import Acceptor
from sparklog.broker.audit import ListenerAudit
from sparklog.broker.authentication import Authentication, Identity, identity_of
from sparklog.broker.authorization import Authorization
from sparklog.broker.broker import Broker, GrowthWatch, PendingAppend
from sparklog.broker.counts import ListenerCounts
from sparklog.broker.groups.committed_offsets import TopicPartition
from sparklog.broker.groups.coordinator import Coordinator
from sparklog.broker.kafka.access import Access
from sparklog.broker.kafka.admission import Admission, AdmissionRefused
from sparklog.broker.kafka.connection import KafkaConnection
from sparklog.broker.kafka.memory import ListenerMemory
from sparklog.broker.kafka.registry import APIS, Outcome, WorkerPool
from sparklog.broker.kafka.sasl_logins import SaslLogins
from sparklog.broker.kafka.scheduler import LoopScheduler
from sparklog.broker.kafka.sessions import FetchSessions
from sparklog.broker.kafka.slots import Turn, make_room
from sparklog.broker.kafka.socket_stream import SocketStream
from sparklog.broker.kafka.throttle import Throttle
from sparklog.broker.login_failures import FailureDelays
from sparklog.broker.peers import network_of
from sparklog.broker.quotas import Quotas
from sparklog.broker.refused_work import Work
from sparklog.broker.security_admin import SecurityAdmin
from sparklog.broker.tls.handshakes import Handshakes
from sparklog.clock import Clock, SystemClock, unix_seconds
from sparklog.limits import (
    KAFKA_LITTLE_ITEMS,
    LISTEN_BACKLOG,
)
from sparklog.listeners import Listener
from sparklog.security.login_method import LoginMethod
from sparklog.security.x500 import CertificatePrincipal
from sparklog.settings import KafkaSettings

_OTHER_FILES = 1_024  # that the process can open in addition to connections
_CONTROL_THREADS = 4  # threads of each pool; a wait in one pool does not block another
_CHANGE_THREADS = 2
_CHECK_THREADS = 2
READ_THREADS = 8
_SEEK_THREADS = 2
_PASSWORD_THREADS = 2
WOKEN_FETCHES = 8  # the maximum number woken in one turn of the event loop
WAKE_SECONDS = 0.0002  # from one such fetch to the next: about twice the time that one takes
_WATCHED_PARTITIONS = 50_000  # of all waiting fetches, except those of few partitions

_T = TypeVar("_T")
_CHECK_SECONDS: Final = 1.0
_CHECK_SHORT_SECONDS: Final = 0.25
"""The intervals between checks of all connections: normally, and while memory is short."""
_WAKE_PAUSE_SECONDS: Final = 0.001
"""Between two turns that wake fetches: the resolution of the loop's timers."""
_MEASURE_SECONDS: Final = 0.1
_MEASURE_WEIGHT: Final = 0.02
"""The weight of the newest interval in the idle share: an average of about five seconds."""
_LOGGED_CLOSED: Final = 8
"""The number of closed connections that are logged individually between two checks."""
_THREADS: Final[Mapping[WorkerPool, int]] = {
    WorkerPool.CONTROL: _CONTROL_THREADS,
    WorkerPool.CHANGE: _CHANGE_THREADS,
    WorkerPool.CHECK: _CHECK_THREADS,
    WorkerPool.READ: READ_THREADS,
    WorkerPool.SEEK: _SEEK_THREADS,
    WorkerPool.PROOF: 1,
    WorkerPool.LOOK: 1,
    WorkerPool.PASSWORDS: _PASSWORD_THREADS,
    WorkerPool.TOKENS: 1,
    WorkerPool.LARGE_REQUEST: 1,
}
_SESSION_LIMITS: Final[Mapping[LoginMethod | None, str]] = {
    None: "session",
    LoginMethod.CERTIFICATE: "certificate",
    LoginMethod.OAUTH: "token",
}
"""The name of the limit of a session, by the method of its login; for the log."""
_log = structlog.get_logger("sparklog.kafka")


class _RequestAppends(NamedTuple):
    """The pending appends of one request, and the future of their outcomes."""

    pending_appends: Sequence[PendingAppend]
    outcomes: asyncio.Future[list[Outcome]]


class KafkaListener:
    """Serves `broker` to Kafka clients from `start` to `close`.

    Args:
        acceptors: one for each listener; their sockets are closed with it.
        settings: the bounds on requests, memory and connections.
        authentication: the users; None if no listener asks for a login.
        authorization: the ACLs, and the audit; None if everything is allowed to everybody.
        security_admin: changes them, and the quotas.
        quotas: of the clients; None if they have none.
        login_delays: those of failed logins; None: the listener has its own.
        clock: None for the system clock.
    """

    def __init__(
        self,
        broker: Broker,
        groups: Coordinator,
        acceptors: Sequence[Acceptor],
        *,
        settings: KafkaSettings,
        authentication: Authentication | None = None,
        authorization: Authorization | None = None,
        security_admin: SecurityAdmin | None = None,
        quotas: Quotas | None = None,
        login_delays: FailureDelays | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.broker = broker
        self.groups = groups
        self._acceptors = acceptors
        self._request_max_bytes = settings.request_max_bytes
        self._clock = clock or SystemClock()
        self._loop = uvloop.new_event_loop()
        self._pools = {
            pool: ThreadPoolExecutor(count, thread_name_prefix=f"sparklog-kafka-{pool.value}")
            for pool, count in _THREADS.items()
        }
        self._pending_appends: queue.SimpleQueue[_RequestAppends | None] = queue.SimpleQueue()
        self._queued_in_turn: list[_RequestAppends] = []
        """Requests from this turn of the loop, which `_end_turn` handles."""
        self._memory = ListenerMemory(
            settings.memory_bytes, request_max_bytes=settings.request_max_bytes
        )
        self._max_connections = _limit_to_open_files(settings.max_connections)
        self._max_connections_per_address = settings.max_connections_per_address
        self._handshakes = Handshakes()
        self._authentication = authentication
        self._authorization = authorization
        self.security_admin = security_admin
        self._session_max_seconds = settings.connections_max_reauth_ms / 1e3 or math.inf
        self._watch = authorization.watch if authorization is not None else None
        self.audit = authorization.audit if authorization is not None else None
        self._quotas = quotas
        delays = login_delays or FailureDelays(self._clock)
        self._admissions = {each.listener.name: self._admission(each, delays) for each in acceptors}
        """By the name of the listener; None if it has neither TLS nor logins."""
        self._slots = [each.slots for each in self._admissions.values() if each is not None]
        self._addresses: Counter[str] = Counter()
        """The number of connections per client address."""
        self._delayed = 0
        """Connections that wait because of the quota of their address."""
        self._closed = 0
        """Connections that were closed or refused for a reason since the last check."""
        self.sessions = FetchSessions(self._clock)
        self.counts = ListenerCounts({key: _metric_name(api.name) for key, api in APIS.items()})
        self.writer_queue_lock = asyncio.Lock()
        self.large_reply_lock = asyncio.Lock()
        self.scheduler = LoopScheduler(self._clock)
        self.producer_id_lock = asyncio.Lock()
        self._woken: deque[asyncio.Future[None]] = deque()
        """Fetches of few records that wait for their turns, in order."""
        self._is_waking = False
        """True if `_wake` is scheduled."""
        self._next_wake = 0.0
        """The earliest time at which the next fetch may be woken."""
        self._new_leaders: asyncio.Future[None] = self._loop.create_future()
        """Done when partitions have moved; replaced by the next request that waits for that."""
        self._watched = 0
        """Watched partitions, not counting those of requests with few partitions."""
        self._stopping: set[asyncio.Task[None]] = set()
        """Tasks that stop watching many partitions."""
        self._connections: dict[asyncio.Task[None], KafkaConnection] = {}
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def listeners(self) -> Sequence[Listener]:
        return [each.listener for each in self._acceptors]

    def _admission(self, acceptor: Acceptor, delays: FailureDelays) -> Admission | None:
        listener = acceptor.listener
        if not (listener.has_tls or listener.has_sasl):
            return None
        authentication = self._authentication if listener.has_sasl else None
        if listener.has_sasl and (authentication is None or not acceptor.mechanisms):
            raise ValueError(f"the listener {listener} would have no logins")
        if listener.has_tls and acceptor.tls is None:
            raise ValueError(f"the listener {listener} would have no TLS")

        def flight_address() -> str:
            return self.broker.cluster().brokers[0].address

        audit, logins = ListenerAudit(self.audit, listener.name), None
        if authentication is not None:
            logins = SaslLogins(
                listener,
                authentication,
                acceptor.mechanisms,
                delays=delays,
                run_blocking=self.run_blocking,
                clock=self._clock,
                session_max_seconds=self._session_max_seconds,
                flight_address=flight_address,
                audit=audit,
            )
        return Admission(
            listener,
            connections=self._max_connections,
            tls=acceptor.tls,
            logins=logins,
            handshakes=self._handshakes,
            identify=self._identify if not listener.has_sasl and self._watch is not None else None,
            flight_address=flight_address,
            audit=audit,
        )

    # -------------------------------------------------------------------------- starting

    def start(self) -> None:
        """Starts the threads of the listener."""
        self.broker.partitions.watch_leaders(self._note_leaders)
        if self._watch is not None:
            self._watch.on_change.append(partial(self._call_in_loop, self._cut_ended_sessions))
        if self._quotas is not None:
            self._quotas.on_change.append(partial(self._call_in_loop, self._end_throttles))
        for name, run in (
            ("kafka", self._serve),
            ("kafka-acks", self._watch_pending),
        ):
            thread = threading.Thread(target=run, name=f"sparklog-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        servers = [
            self._loop.run_until_complete(self._listen(acceptor)) for acceptor in self._acceptors
        ]
        watching = self._loop.create_task(self._watch_connections())
        measuring = self._loop.create_task(self._measure_loop())
        self._loop.run_forever()
        for server in servers:
            server.close()
        # Connections accepted just before have no task yet, and would keep the loop open.
        self._loop.run_until_complete(_two_turns())
        tasks = [watching, measuring, *self._connections, *self._stopping]
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _listen(self, acceptor: Acceptor) -> Coroutine[Any, Any, asyncio.AbstractServer]:
        return self._loop.create_server(
            lambda: SocketStream(partial(self._opened, acceptor)),
            sock=acceptor.listening,
            backlog=LISTEN_BACKLOG,
        )

    def close(self) -> None:
        """Closes all connections, and returns when all threads have ended."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._pending_appends.put(None)
        if self._threads:
            self._loop.call_soon_threadsafe(self._loop.stop)
        else:
            self._loop.close()
        for thread in self._threads:
            thread.join()
        self._handshakes.close()
        for pool in self._pools.values():
            pool.shutdown()

    def cut_connections(self) -> None:
        """Aborts all connections without notice, but accepts new ones."""
        self._loop.call_soon_threadsafe(self._cut_connections)

    def _cut_connections(self) -> None:
        for connection in self._connections.values():
            connection.cut()

    # -------------------------------------------------------------------------- for handlers

    def access_of(self, identity: Identity | None, host: str) -> Access:
        authorization = self._authorization
        if authorization is None:
            return Access(None)

        async def look(looks: int) -> None:
            await self.run_blocking(WorkerPool.LOOK, authorization.watch.refresh_after, looks)

        return Access(
            authorization,
            identity=identity,
            host=host,
            look=look,
            steps=self.scheduler.iterate,
        )

    def throttle_of(self, user: str) -> Throttle:
        return Throttle(self._quotas, user)

    def _end_throttles(self) -> None:
        """Judges throttled clients by their next request, as their quotas may have changed."""
        for connection in self._connections.values():
            connection.throttle.end()

    def log_closed(self, peer: str, reason: str) -> None:
        self._log_rarely("a connection is closed", peer=peer, reason=reason)

    def log_refused(self, client: str, reason: str) -> None:
        self._log_rarely("a client is refused", client=client, reason=reason)

    def _log_rarely(self, event: str, **facts: str) -> None:
        self._closed += 1
        if self._closed <= _LOGGED_CLOSED:
            _log.warning(event, **facts)

    async def run_blocking(self, pool: WorkerPool, call: Callable[..., _T], *values: Any) -> _T:
        return await self._loop.run_in_executor(self._pools[pool], call, *values)

    def when_durable(
        self, pending_appends: Sequence[PendingAppend]
    ) -> asyncio.Future[list[Outcome]]:
        outcomes: asyncio.Future[list[Outcome]] = self._loop.create_future()
        if not self._queued_in_turn:
            self._loop.call_soon(self._end_turn)
        self._queued_in_turn.append(_RequestAppends(pending_appends, outcomes))
        return outcomes

    def _end_turn(self) -> None:
        """Flushes the appends that connections have queued, or leaves that to the other thread."""
        requests, self._queued_in_turn = self._queued_in_turn, []
        self.broker.flush_if_quick()
        for each in requests:
            if all(pending.done for pending in each.pending_appends):
                outcomes = [self._outcome(pending) for pending in each.pending_appends]
                _set_outcomes([(each.outcomes, outcomes)])
            else:
                self._pending_appends.put(each)

    async def wait_for_leaders(self, timeout_seconds: float) -> None:
        if self._new_leaders.done():
            self._new_leaders = self._loop.create_future()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._new_leaders), timeout_seconds)

    def _note_leaders(self) -> None:
        """Wakes the requests that wait for partitions to move; called from any thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(lambda: _set_done(self._new_leaders))

    async def wait_for_append(
        self, seen: Mapping[TopicPartition, int], lacking_bytes: int, timeout_seconds: float
    ) -> bool:
        """See `HandlerContext`. Also returns when a topic is deleted or a partition has moved."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        is_small = len(seen) <= KAFKA_LITTLE_ITEMS
        if not is_small:
            await self.scheduler.wait_turn()
            if self._watched + len(seen) > _WATCHED_PARTITIONS:
                return False
        try:
            watch = self.broker.watch_growth(seen, lacking_bytes, lambda: self._wake_later(waiter))
        except (errors.Invalid, errors.NotLeader):
            return True
        self._watched += 0 if is_small else len(seen)
        timer = self._loop.call_later(timeout_seconds, _set_done, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            if is_small:
                self.broker.stop_watching(watch)
            else:  # in turns: many clients may leave, or reach their timeout, at the same time
                stopping = self._loop.create_task(self._stop_watching(watch, len(seen)))
                self._stopping.add(stopping)
                stopping.add_done_callback(self._stopping.discard)
        return True

    def _wake_later(self, waiter: asyncio.Future[None]) -> None:
        """Wakes a fetch in one of the loop's next turns. May be called from any thread."""
        self._woken.append(waiter)
        if not self._is_waking:
            self._is_waking = True
            self._call_in_loop(self._wake)

    def _wake(self) -> None:
        """Wakes the next few fetches, and the others in later turns of the loop.

        Hundreds of consumers may wait for one record. Their replies take only a share of the loop's
        time, so that producers' requests do not wait behind them: the more consumers there are, the
        less often each has its turn, and the more records it receives per reply.
        """
        self._is_waking = False  # first, so that no fetch is added without a wake
        now = self._clock.monotonic()
        while self._woken and self._takes_turn(now):
            _set_done(self._woken.popleft())
        if self._woken and not self._is_waking:
            self._is_waking = True
            self._loop.call_later(_WAKE_PAUSE_SECONDS, self._wake)

    def _takes_turn(self, now: float) -> bool:
        """Takes the next fetch turn if it is due."""
        spare_seconds = (WOKEN_FETCHES - 1) * WAKE_SECONDS
        self._next_wake = max(self._next_wake, now - spare_seconds)
        if self._next_wake > now:
            return False
        self._next_wake += WAKE_SECONDS
        return True

    async def wait_fetch_turn(self) -> bool:
        if not self._woken and self._takes_turn(self._clock.monotonic()):
            return False
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._wake_later(waiter)
        await waiter
        return True

    async def _stop_watching(self, watch: GrowthWatch, partitions: int) -> None:
        await self.scheduler.wait_turn()
        self.broker.stop_watching(watch)
        self._watched -= partitions

    # -------------------------------------------------------------------------- watching

    def _watch_pending(self) -> None:
        """Leads the flushes, and passes the outcomes of appends to the loop.

        The outcomes of one flush are passed in one call, because each call wakes both threads.
        """
        settled: list[tuple[asyncio.Future[list[Outcome]], list[Outcome]]] = []
        while True:
            if settled and self._pending_appends.empty():
                self._call_in_loop(_set_outcomes, settled)
                settled = []
            appends = self._pending_appends.get()
            if appends is None:
                break
            if settled and not all(each.done for each in appends.pending_appends):
                self._call_in_loop(_set_outcomes, settled)
                settled = []
            outcomes = [self._outcome(each) for each in appends.pending_appends]
            settled.append((appends.outcomes, outcomes))
        self._call_in_loop(_set_outcomes, settled)

    def _outcome(self, pending: PendingAppend) -> Outcome:
        try:
            return self.broker.wait(pending)
        except Exception as error:
            return error

    def _call_in_loop(self, call: Callable[..., object], *values: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *values)
        except RuntimeError:  # the loop is closed
            if not self._closing.is_set():
                raise

    # -------------------------------------------------------------------------- connections

    def _opened(self, acceptor: Acceptor, stream: SocketStream) -> None:
        """Starts serving a connection, or closes it if there are too many, as Kafka does."""
        peer = network_of(stream.peer)
        if (
            len(self._connections) >= self._max_connections
            or self._addresses[peer] >= self._max_connections_per_address
        ):
            self.broker.refused.note(
                Work.CONNECTIONS,
                f"there are {len(self._connections)}, {self._addresses[peer]} of them from {peer}:"
                " raise kafka.max_connections or kafka.max_connections_per_address, or close some",
            )
            stream.transport.abort()
            return
        wait_ms = self._quotas.connected(stream.peer) if self._quotas is not None else 0
        if wait_ms is None or (wait_ms and self._delayed >= self._max_connections // 2):
            self.log_closed(peer, "it opens more connections than its quota allows")
            stream.transport.abort()
            return
        admission = self._admissions[acceptor.listener.name]
        connection = KafkaConnection(
            self,
            stream,
            self._memory,
            listener=acceptor.listener,
            request_max_bytes=self._request_max_bytes,
            clock=self._clock,
            logins=admission.logins if admission is not None else None,
        )
        self._addresses[peer] += 1
        self.counts.connections_opened += 1
        if wait_ms:
            turn = None
            serving = self._serve_delayed(stream, connection, acceptor, wait_ms / 1e3)
        else:
            turn = self._take_turn(acceptor, peer)
            serving = self._serve_connection(stream, connection, acceptor, turn)
        task = self._loop.create_task(serving)
        self._connections[task] = connection
        task.add_done_callback(lambda task: self._ended(task, peer, turn))

    def _take_turn(self, acceptor: Acceptor, peer: str) -> Turn | None:
        """Returns the turn of a connection to be admitted; None if its listener admits all."""
        admission = self._admissions[acceptor.listener.name]
        if admission is None:
            return None
        turn = admission.slots.take(peer)
        self._bound_waiting()
        return turn

    async def _serve_delayed(
        self,
        stream: SocketStream,
        connection: KafkaConnection,
        acceptor: Acceptor,
        wait_seconds: float,
    ) -> None:
        """Serves a connection beyond the quota of its address, once that allows it."""
        is_over: asyncio.Future[None] = self._loop.create_future()
        stream.left = partial(_set_done, is_over)
        timer = self._loop.call_later(wait_seconds, _set_done, is_over)
        self._delayed += 1
        try:
            await is_over
        finally:
            self._delayed -= 1
            timer.cancel()
            stream.left = None
        turn = self._take_turn(acceptor, network_of(stream.peer))
        try:
            await self._serve_connection(stream, connection, acceptor, turn)
        finally:
            if turn is not None:
                turn.end()

    async def _serve_connection(
        self,
        stream: SocketStream,
        connection: KafkaConnection,
        acceptor: Acceptor,
        turn: Turn | None,
    ) -> None:
        """Serves a connection until it ends, after its admission if the listener has one."""
        admission = self._admissions[acceptor.listener.name]
        if admission is None or turn is None:
            await connection.serve()
            return
        try:
            identity = await admission.admit(stream, turn)
            self._check_identity(acceptor.listener, identity)
        except AdmissionRefused as error:
            self.counts.authentications_failed += 1
            self.log_closed(stream.peer, str(error))
        except ConnectionError:
            pass  # the client has left
        except Exception as error:
            self.counts.authentications_failed += 1
            self.log_closed(stream.peer, f"unexpected: {error!r}")
        else:  # no turn of the loop since the check: a change from now on cuts the connection
            self.counts.authentications += 1
            await connection.serve(identity)
        finally:
            stream.close()

    def _bound_waiting(self) -> None:
        """Closes waiting connections, so that they are at most half of all; new ones included."""
        most = self._max_connections // 2
        while (waiting := sum(each.waiting for each in self._slots)) > most:
            self.broker.refused.note(
                Work.CONNECTIONS,
                f"{waiting} wait to log in or to complete a TLS handshake: raise"
                " kafka.max_connections, or find out what opens them",
            )
            make_room(self._slots)

    def _identify(self, principal: CertificatePrincipal) -> Identity:
        """Returns the client that a certificate names. Raises ValueError and `SecurityNotRead`."""
        assert self._watch is not None
        self._watch.check_fresh()
        return identity_of(
            self._watch.state, principal.name, LoginMethod.CERTIFICATE, ends_at=principal.ends_at
        )

    def _check_identity(self, listener: Listener, identity: Identity | None) -> None:
        """Raises `AdmissionRefused` unless the client that has logged in is still admitted."""
        if identity is None:
            if listener.has_sasl:
                raise AdmissionRefused("it has not logged in")
        elif reason := self._end_of(identity):
            raise AdmissionRefused(reason)

    def _cut_ended_sessions(self) -> None:
        """Cuts the connections of clients that are no longer admitted."""
        for connection in tuple(self._connections.values()):
            if connection.identity is not None and (reason := self._end_of(connection.identity)):
                connection.cut(reason)

    def _end_of(self, identity: Identity) -> str:
        """Returns why the sessions of a client end; empty while they do not."""
        if self._watch is not None and not identity.is_current(self._watch.state):
            return f"{identity.principal} was removed or disabled"
        if identity.ends_at <= unix_seconds(self._clock):
            return f"the {_SESSION_LIMITS[identity.method]} of {identity.principal} has expired"
        return ""

    def _ended(self, task: asyncio.Task[None], peer: str, turn: Turn | None) -> None:
        if turn is not None:
            turn.end()
        del self._connections[task]
        self._addresses[peer] -= 1
        if not self._addresses[peer]:
            del self._addresses[peer]

    async def _measure_loop(self) -> None:
        """Measures how late the loop's timers are, and how much CPU its thread uses."""
        counts = self.counts
        at, cpu = time.monotonic(), time.thread_time()
        while True:
            await asyncio.sleep(_MEASURE_SECONDS)
            now, cpu_now = time.monotonic(), time.thread_time()
            counts.loop_delay_us.add(int((now - at - _MEASURE_SECONDS) * 1e6))
            busy = (cpu_now - cpu) / max(now - at, 1e-9)
            counts.idle_share += _MEASURE_WEIGHT * (1.0 - min(busy, 1.0) - counts.idle_share)
            at, cpu = now, cpu_now

    @property
    def pending_count(self) -> int:
        """The number of open connections that are not admitted yet."""
        return sum(each.taken + each.waiting for each in self._slots)

    @property
    def connection_count(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    @property
    def memory(self) -> ListenerMemory:
        """The memory of requests and replies."""
        return self._memory

    async def _watch_connections(self) -> None:
        before, passed_seconds = self._clock.monotonic(), 0.0
        while True:
            await asyncio.sleep(_CHECK_SHORT_SECONDS)
            now = self._clock.monotonic()
            passed_seconds += min(now - before, _CHECK_SHORT_SECONDS)
            before = now
            if passed_seconds < _CHECK_SECONDS and not self._memory.is_short:
                continue
            now_seconds = unix_seconds(self._clock)
            for connection in tuple(self._connections.values()):
                connection.check_progress(passed_seconds)
                identity = connection.identity
                if identity is not None and identity.ends_at <= now_seconds:
                    connection.cut(self._end_of(identity))
            passed_seconds = 0.0
            if self._closed > _LOGGED_CLOSED:
                more = self._closed - _LOGGED_CLOSED
                _log.warning("more connections are closed", connections=more)
            self._closed = 0


def _limit_to_open_files(connections: int) -> int:
    """Returns the number of connections that leaves the log and the tables enough open files.

    First raises the process's limit on open files, if it is too low for `connections`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(raised, soft), hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return connections
    allowed = max(soft - _OTHER_FILES, soft // 2)
    _log.warning(
        "fewer connections are accepted: the limit on open files is too low",
        max_connections=connections,
        accepted=allowed,
        open_files=soft,
    )
    return allowed


def _metric_name(name: str) -> str:
    """Returns an API's name as Kafka's metrics spell it: `list_offsets` is ListOffsets."""
    return "".join(part.capitalize() for part in name.split("_"))


async def _two_turns() -> None:
    """Lets due callbacks run, and those that they schedule."""
    for _ in range(2):
        await asyncio.sleep(0)


def _set_done(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _set_outcomes(settled: Sequence[tuple[asyncio.Future[list[Outcome]], list[Outcome]]]) -> None:
    for future, outcomes in settled:
        if not future.done():
            future.set_result(outcomes)
