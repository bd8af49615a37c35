"""The gRPC server: its listening sockets, and the thread that reads from all connections.

A single thread reads, so a flood of small frames takes at most one thread's CPU time. The TLS
handshakes take another. Four times a second the first one checks all connections and calls, and
ends those that have sent nothing for too long, whose clients have not read for too long, or whose
deadline has passed.

Idle connections and calls make room for others: if there are too many connections, a new one
replaces one without a call, from the address that has the most connections, and if too many calls
have sent no message yet, the oldest of these ends.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Final

import structlog

from sparklog import limits
from sparklog.broker.acceptors import Acceptor
from sparklog.broker.flight.grpc import http2
from sparklog.broker.flight.grpc.call import Call, Method
from sparklog.broker.flight.grpc.connection import GrpcConnection
from sparklog.broker.flight.grpc.message_memory import MessageMemory
from sparklog.broker.flight.grpc.status import (
    CANCELLED,
    INTERNAL,
    OK,
    UNAUTHENTICATED,
    UNAVAILABLE,
    GrpcError,
    PeerGone,
)
from sparklog.broker.flight.grpc.threads import CallThreads
from sparklog.broker.peers import network_of
from sparklog.broker.tls.engine import NO_TLS, TlsFailed
from sparklog.broker.tls.handshakes import Handshakes
from sparklog.clock import Clock, SystemClock

CONNECTIONS = 2_000
CONNECTIONS_PER_ADDRESS = 1_000
CONNECTION_IDLE_SECONDS = 600.0  # without a call
UNSERVED_CALLS = 256  # of all clients, that have sent no message yet
_ARRIVING_BYTES = 128 * limits.MIB  # of large messages that are arriving
PREFACE_SECONDS = 10.0  # for the first bytes of a connection, or of a call

UNADMITTED = 512  # connections whose clients are not admitted yet
UNADMITTED_SECONDS = 10.0  # for the first call that is admitted
UNADMITTED_SERVED = 64  # calls of clients that are not admitted, which threads serve at a time
UNADMITTED_SERVED_PER_NETWORK = 8
_UNADMITTED_READ_BYTES: Final = 16 * limits.KIB  # at once

_log = structlog.get_logger("sparklog.flight")

_READ_BYTES: Final = 256 * limits.KIB
_HANDSHAKE_BYTES: Final = 32 * limits.KIB  # read at once before a TLS handshake is complete
_READS_PER_TURN: Final = 4
_ACCEPTED_PER_TURN: Final = 64
_REFUSED_SECONDS: Final = 0.01
_SAY_SECONDS: Final = 1.0
_TICK_SECONDS: Final = 0.25
_CLOSE_SECONDS: Final = 9.0
"""The time for calls to end after their connections are closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerBounds:
    """The limits of a server's memory, connections, calls and waiting times."""

    arriving_bytes: int = _ARRIVING_BYTES
    connections: int = CONNECTIONS
    connections_per_address: int = CONNECTIONS_PER_ADDRESS
    connection_calls: int = limits.FLIGHT_CONNECTION_CALLS
    unserved_calls: int = UNSERVED_CALLS
    calls: int = limits.FLIGHT_STREAMS + limits.FLIGHT_WAITING_ACTIONS
    patience_seconds: float = limits.FLIGHT_IDLE_SHORT_SECONDS
    """The time for a message that holds memory others are waiting for, plus 1 s per MiB."""
    stall_seconds: float = limits.FLIGHT_IDLE_SECONDS
    """The time for a client to read a message."""
    connection_idle_seconds: float = CONNECTION_IDLE_SECONDS
    preface_seconds: float = PREFACE_SECONDS
    """The time for the first bytes of a connection, and for the first message of a call."""
    unadmitted: int = UNADMITTED
    """The connections whose clients are not admitted."""
    unadmitted_seconds: float = UNADMITTED_SECONDS
    """The time for a client to log in, or to send a call with a token."""


class Server:
    """Serves `methods` from `start` to `close`.

    Args:
        acceptors: listening sockets, which the server takes over.
        methods: by path, `/package.Service/Method`. A call is served once its first message, or the
            end of its stream, has been received.
        tick: called four times a second.
        recognises: returns whether a call that has begun has a valid token, if it needs one; called
            in the reading thread. Others may send small messages only, over few connections.
        without_token: returns the error for a call without a token, where one is needed.
        clock: None: the machine's own.
    """

    def __init__(
        self,
        acceptors: Sequence[Acceptor],
        methods: Mapping[str, Method],
        bounds: ServerBounds | None = None,
        *,
        tick: Callable[[], None] = lambda: None,
        recognises: Callable[[Call], bool] = lambda _: True,
        without_token: Callable[[], GrpcError] = lambda: GrpcError(UNAUTHENTICATED, "no token"),
        clock: Clock | None = None,
    ) -> None:
        self.recognises = recognises
        self.without_token = without_token
        self._served_unadmitted: dict[Call, str] = {}
        """Calls that threads serve of clients that are not admitted, oldest first: the network."""
        self.clock = clock or SystemClock()
        self.bounds = bounds or ServerBounds()
        self.methods = {path.encode(): method for path, method in methods.items()}
        self.message_memory = MessageMemory(self.bounds.arriving_bytes)
        self._tick = tick
        self._acceptors = acceptors
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._scheduled: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._connections: set[GrpcConnection] = set()
        self._addresses: Counter[str] = Counter()
        """The number of connections by client host."""
        self._handshakes = Handshakes()
        self._shaking: set[GrpcConnection] = set()
        """Connections with a step of their handshake in the other thread; nothing is read from
        them meanwhile."""
        self._unserved: OrderedDict[Call, None] = OrderedDict()
        """Calls that have sent no message yet, the oldest first."""
        self._calls = 0
        self._served = 0
        self._lock = threading.Lock()
        self._no_calls = threading.Condition(self._lock)
        self._threads = CallThreads()
        self._ending = False
        self._scratch = memoryview(bytearray(_READ_BYTES))
        self._plaintext = memoryview(bytearray(_READ_BYTES if self._has_tls else 0))
        self._thread = threading.Thread(target=self._run, name="sparklog-flight", daemon=True)
        self._next_check = self.clock.monotonic() + _TICK_SECONDS
        self._logged_at = -_SAY_SECONDS
        self._left_out = 0

    @property
    def _has_tls(self) -> bool:
        return any(each.tls is not None for each in self._acceptors)

    def start(self) -> None:
        listening = [each.listening for each in self._acceptors]
        for each in (*listening, self._wake_in, self._wake_out):
            each.setblocking(False)
        for acceptor in self._acceptors:
            self._selector.register(acceptor.listening, selectors.EVENT_READ, acceptor)
        self._selector.register(self._wake_in, selectors.EVENT_READ, None)
        self._thread.start()

    def close(self, patience_seconds: float) -> bool:
        """Ends all calls; after `patience_seconds`, cuts their connections.

        Returns True if all calls have ended.
        """
        self._schedule(self._stop_accepting)
        with self._lock:
            self._no_calls.wait_for(lambda: not self._served, patience_seconds)
        self._schedule(self._close_all)
        self._thread.join()
        self._handshakes.close()
        with self._lock:
            is_over = self._no_calls.wait_for(lambda: not self._served, _CLOSE_SECONDS)
        self._threads.close()
        return is_over

    def cut_connections(self) -> None:
        """Closes all connections without notice, and returns when that is done."""
        is_done = threading.Event()
        self._schedule(self._close_all)
        self._schedule(is_done.set)
        while self._thread.is_alive() and not is_done.wait(_TICK_SECONDS):
            pass

    # ---------------------------------------------------------------------- for connections

    def serve(self, call: Call) -> None:
        """Starts to serve a call in a thread, unless it is already served."""
        if call.is_served or call.is_dead:
            return
        crowded = None if call.is_admitted else self._room_for_unadmitted(call)
        if crowded is not None and crowded is not call:
            crowded.cancel()
        with self._lock:
            self._unserved.pop(call, None)
            is_refused = self._served >= self.bounds.calls or crowded is call
            if not is_refused:
                if not call.is_admitted:
                    self._served_unadmitted[call] = network_of(call.connection.host)
                call.is_served = True
                self._served += 1
                call.connection.served += 1
        if is_refused:
            call.connection.refuse(call)
            return
        try:
            self._threads.run(self._serve, call)
        except RuntimeError:  # the system cannot start a thread
            self._call_served(call)
            call.connection.end(call, UNAVAILABLE, "no thread is free", [])

    def admitted(self, call: Call) -> None:
        """Notes that the client of a served call was admitted."""
        with self._lock:
            self._served_unadmitted.pop(call, None)

    def _room_for_unadmitted(self, call: Call) -> Call | None:
        """Returns a call that has to end before this one is served, or this one if none may.

        It is the oldest of the same network, or of the one that has the most.
        """
        network = network_of(call.connection.host)
        with self._lock:
            served = Counter(self._served_unadmitted.values())
            if served[network] >= UNADMITTED_SERVED_PER_NETWORK:
                crowded = network
            elif served.total() >= UNADMITTED_SERVED:
                ((crowded, _),) = served.most_common(1)
            else:
                return None
            waiting = [each for each, at in self._served_unadmitted.items() if at == crowded]
            # One that was cancelled keeps its thread for a moment.
            return next((each for each in waiting if not each.is_dead), call)

    def _serve(self, call: Call) -> None:
        self._end_after(call, call.serve, may_detach=True)

    def finish(self, call: Call, work: Callable[[], None]) -> None:
        """Ends a detached call after `work`, with the status of its exception or OK."""
        self._end_after(call, work, may_detach=False)

    def _end_after(self, call: Call, work: Callable[[], None], *, may_detach: bool) -> None:
        connection = call.connection
        is_over = True
        try:
            work()
            is_over = not (may_detach and call.is_detached)
            if is_over:
                connection.end(call, OK, "", call.trailers)
        except PeerGone:
            connection.end(call, CANCELLED, "", [])
        except GrpcError as status:
            connection.end(call, status.code, str(status), status.trailers)
        except BaseException as error:
            _log.error("call failed", exc_info=error)
            connection.end(call, INTERNAL, repr(error), [])
        finally:
            if is_over:
                call.release_message()
                self._call_served(call)

    def _call_served(self, call: Call) -> None:
        with self._lock:
            self._served -= 1
            self._served_unadmitted.pop(call, None)
            call.connection.served -= 1
            if not self._served:
                self._no_calls.notify_all()

    def admit_call(self, call: Call) -> bool:
        """Counts a new call. Returns False if there are too many.

        A call that its client has reset counts towards its connection until its thread has ended.
        """
        connection, bounds = call.connection, self.bounds
        with self._lock:
            is_full = self._calls >= bounds.calls + bounds.unserved_calls
            open_calls = max(len(connection.calls), connection.served)
            if is_full or self._ending or open_calls >= bounds.connection_calls:
                return False
            self._calls += 1
            self._unserved[call] = None
            return True

    def end_excess(self) -> None:
        """Ends the oldest calls that have sent no message, if there are too many."""
        while True:
            with self._lock:
                if len(self._unserved) <= self.bounds.unserved_calls:
                    return
                oldest, _ = self._unserved.popitem(last=False)
            self.log_limited("a call that sends nothing makes room for others", peer=oldest.peer)
            oldest.cancel()

    def closed(self, call: Call, freed_bytes: int) -> None:
        """Records that a call has ended, and releases its memory."""
        with self._lock:
            self._calls -= 1
            self._unserved.pop(call, None)
        self.message_memory.release(freed_bytes, call)

    def write_later(self, connection: GrpcConnection) -> None:
        self._schedule(self._watch, connection)

    def close_later(self, connection: GrpcConnection) -> None:
        self._schedule(self._close, connection)

    def _schedule(self, work: Callable[..., None], *args: Any) -> None:
        self._scheduled.append((work, args))
        with contextlib.suppress(OSError):
            self._wake_out.send(b"x")

    # ---------------------------------------------------------------------- the reading thread

    def _run(self) -> None:
        is_over = False
        while not is_over:
            try:
                is_over = self._turn()
            except Exception as error:  # no error here may end the broker
                _log.error("cannot serve the Flight listener's connections", exc_info=error)
                time.sleep(_REFUSED_SECONDS)
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    def _turn(self) -> bool:
        """Processes the next events. Returns True after the last ones."""
        for key, events in self._selector.select(
            max(self._next_check - self.clock.monotonic(), 0.0)
        ):
            connection = key.data
            if connection is None:
                self._empty_wakes()
                continue
            if isinstance(connection, Acceptor):
                self._accept(connection)
                continue
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
            if events & selectors.EVENT_READ:
                self._read(connection)
        while self._scheduled:
            work, args = self._scheduled.popleft()
            work(*args)
        now = self.clock.monotonic()
        if now >= self._next_check:
            self._next_check = now + _TICK_SECONDS
            self._check_connections()
        return self._ending and not self._connections

    def _empty_wakes(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_in.recv(4_096)

    def _accept(self, acceptor: Acceptor) -> None:
        for _ in range(_ACCEPTED_PER_TURN):
            try:
                sock, address = acceptor.listening.accept()
            except BlockingIOError:
                return
            except OSError:  # the client has left, or no file descriptor is free
                time.sleep(_REFUSED_SECONDS)
                return
            host = address[0].partition("%")[0].removeprefix("::ffff:")
            if acceptor.listener.has_sasl:
                self._close_oldest_unadmitted()
            if self._has_room(host):
                self._welcome(acceptor, sock, host, address[1])
            else:
                self._turn_away(sock)

    def _welcome(self, acceptor: Acceptor, sock: socket.socket, host: str, port: int) -> None:
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            listener, tls = acceptor.listener, None
            if acceptor.tls is not None:
                tls = acceptor.tls.engine(names_clients=not listener.has_sasl)
            connection = GrpcConnection(self, sock, host, port, listener=listener, tls=tls)
            self._selector.register(sock, selectors.EVENT_READ, connection)
        except OSError:
            sock.close()
            return
        self._connections.add(connection)
        self._addresses[host] += 1

    def _has_room(self, host: str) -> bool:
        """Returns whether a connection from that host may begin; closes idle ones if necessary.

        It closes up to as many as a turn may accept, so that not every new connection needs a
        search.
        """
        bounds = self.bounds
        if self._addresses[host] >= bounds.connections_per_address:
            crowded = host
        elif len(self._connections) >= bounds.connections:
            ((crowded, _),) = self._addresses.most_common(1)
        else:
            return True
        idle = [each for each in self._connections if each.host == crowded and not each.calls]
        idle.sort(key=lambda each: each.idle_since)
        for each in idle[: max(min(_ACCEPTED_PER_TURN, len(idle) // 2), 1)]:
            each.go_away(http2.NO_ERROR, "too many connections: idle ones are closed")
            self._close(each)
        self.log_limited(
            "too many connections: idle ones make room, or a new one is closed",
            host=crowded,
            connections=len(self._connections),
            limit=bounds.connections,
            limit_per_address=bounds.connections_per_address,
        )
        return bool(idle)

    def _close_oldest_unadmitted(self) -> None:
        """Closes the oldest connection without a login, if there are too many of them.

        It is one of the host with the most, so that no host can keep others out.
        """
        if len(self._connections) < self.bounds.unadmitted:
            return
        unadmitted = [each for each in self._connections if not each.admission.is_admitted]
        if len(unadmitted) < self.bounds.unadmitted:
            return
        ((crowded, _),) = Counter(network_of(each.host) for each in unadmitted).most_common(1)
        oldest = min(
            (each for each in unadmitted if network_of(each.host) == crowded),
            key=lambda each: each.began,
        )
        self._close_unadmitted(oldest, "too many connections without a login: the oldest is closed")

    def _close_unadmitted(self, connection: GrpcConnection, reason: str) -> None:
        connection.go_away(http2.ENHANCE_YOUR_CALM, reason)
        self._close_refused(connection, reason)

    def _turn_away(self, sock: socket.socket) -> None:
        """Closes a connection for which there is no room, sending the reason."""
        reason = "the broker has too many connections; try again later"
        with contextlib.suppress(OSError):
            sock.setblocking(False)
            sock.send(http2.settings([]) + http2.goaway(0, http2.ENHANCE_YOUR_CALM, reason))
            sock.shutdown(socket.SHUT_WR)
        sock.close()

    def log_limited(self, event: str, **facts: object) -> None:
        """Logs a warning, at most one per second, because clients can cause them."""
        now = self.clock.monotonic()
        if now - self._logged_at > _SAY_SECONDS:
            if self._left_out:
                facts["lines_left_out"] = self._left_out
            self._logged_at, self._left_out = now, 0
            _log.warning(event, **facts)
        else:
            self._left_out += 1

    def _read(self, connection: GrpcConnection) -> None:
        if connection.is_closed:
            return
        try:
            for _ in range(_READS_PER_TURN):
                most = _READ_BYTES
                if connection.transport.is_shaking_hands:
                    most = _HANDSHAKE_BYTES
                elif not connection.admission.is_admitted:
                    most = _UNADMITTED_READ_BYTES
                size = connection.transport.socket.recv_into(self._scratch, most)
                if not size:
                    self._close(connection)
                    return
                if connection.transport.is_shaking_hands:
                    self._shake_hands(connection, bytes(self._scratch[:size]))
                    return
                self._receive(connection, self._scratch[:size])
                if size < most or not connection.admission.is_admitted:
                    return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._close(connection)

    def _receive(self, connection: GrpcConnection, data: memoryview) -> None:
        """Processes received bytes, and closes a connection whose client violates a protocol."""
        try:
            if connection.transport.is_encrypted:
                connection.receive_encrypted(data, self._plaintext)
                if connection.transport.has_ended:
                    self._close(connection)
            else:
                connection.receive(data)
        except TlsFailed as error:
            self._close_refused(connection, str(error))
        except http2.ProtocolError as error:
            why = "breaks HTTP/2" if connection.is_http2 else "is not a Flight client"
            self.log_limited(
                f"a connection is closed: its client {why}",
                peer=connection.peer,
                reason=str(error),
            )
            connection.go_away(error.code, str(error))
            self._close(connection)
        except Exception as error:  # no error here may end the others
            _log.error("cannot read from a connection", peer=connection.peer, exc_info=error)
            self._close(connection)

    def _shake_hands(self, connection: GrpcConnection, data: bytes) -> None:
        """Starts the next step of a TLS handshake in the other thread."""
        self._selector.unregister(connection.transport.socket)
        self._shaking.add(connection)
        step = self._handshakes.submit(connection.host, connection.transport.shake_hands, data)
        connection.transport.handshake = step
        step.add_done_callback(lambda done: self._schedule(self._end_step, connection, done))

    def _end_step(self, connection: GrpcConnection, step: Future[bool]) -> None:
        if connection.is_closed:
            return
        connection.transport.handshake = None
        self._shaking.discard(connection)
        self._selector.register(connection.transport.socket, selectors.EVENT_READ, connection)
        if connection.transport.wants_write:
            self._watch(connection)
        try:
            is_complete = step.result()
        except CancelledError:  # the server is closing
            self._close(connection)
            return
        except TlsFailed as error:
            if str(error) == NO_TLS:
                connection.refuse_without_tls()
            else:
                connection.answer_handshake(is_complete=False)  # the alert
            self._close_refused(connection, str(error))
            return
        except Exception as error:  # no error here may end the others
            _log.error("cannot shake hands", peer=connection.peer, exc_info=error)
            self._close(connection)
            return
        connection.answer_handshake(is_complete=is_complete)
        if is_complete:
            self._receive(connection, memoryview(b""))  # arrived during the last step

    def _close_refused(self, connection: GrpcConnection, reason: str) -> None:
        self.log_limited("a connection is closed", peer=connection.peer, reason=reason)
        self._close(connection)

    def _flush(self, connection: GrpcConnection) -> None:
        if connection.is_closed:
            return
        try:
            if connection.flush():
                self._selector.modify(connection.transport.socket, selectors.EVENT_READ, connection)
        except OSError:
            self._close(connection)

    def _watch(self, connection: GrpcConnection) -> None:
        if not connection.is_closed and connection not in self._shaking:
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(connection.transport.socket, both, connection)

    def _close(self, connection: GrpcConnection) -> None:
        if connection.is_closed:
            return
        if connection in self._shaking:
            self._shaking.discard(connection)
        else:
            self._selector.unregister(connection.transport.socket)
        self._connections.discard(connection)
        self._addresses[connection.host] -= 1
        if not self._addresses[connection.host]:
            del self._addresses[connection.host]
        connection.close()

    def _check_connections(self) -> None:
        now = self.clock.monotonic()
        is_short = self.message_memory.is_short
        unadmitted_seconds = self.bounds.unadmitted_seconds
        for connection in list(self._connections):
            if not connection.is_http2 and now - connection.began > self.bounds.preface_seconds:
                self._close(connection)
            elif (
                not connection.admission.is_admitted and now - connection.began > unadmitted_seconds
            ):
                self._close_unadmitted(connection, f"no login within {unadmitted_seconds:g} s")
            elif connection.calls:
                self._check_calls(connection, now, is_short=is_short)
            elif now - connection.idle_since > self.bounds.connection_idle_seconds:
                connection.go_away(http2.NO_ERROR, "idle")
                self._close(connection)
        try:
            self._tick()
        except Exception as error:  # no error here may end the broker
            _log.error("cannot check the open streams", exc_info=error)

    def _check_calls(self, connection: GrpcConnection, now: float, *, is_short: bool) -> None:
        for call in list(connection.calls.values()):
            if call.deadline is not None and now >= call.deadline:
                call.expire()
                continue
            seconds = now - call.began - call.size / limits.MIB
            is_late = not call.is_served and seconds > self.bounds.preface_seconds
            if is_late or (is_short and call.granted and seconds > self.bounds.patience_seconds):
                self.log_limited("a message arrives too slowly: its call is ended", peer=call.peer)
                call.cancel()
            if (stalled_since := call.stalled_since) is not None:
                is_needed = is_short and call.held_bytes > 0
                bound = self.bounds.patience_seconds if is_needed else self.bounds.stall_seconds
                if now - stalled_since > bound:
                    self.log_limited("a client does not read: its call is ended", peer=call.peer)
                    call.cancel()

    def _stop_accepting(self) -> None:
        if self._ending:
            return
        self._ending = True
        for acceptor in self._acceptors:
            self._selector.unregister(acceptor.listening)
            acceptor.listening.close()
        for connection in self._connections:
            connection.go_away(http2.NO_ERROR)

    def _close_all(self) -> None:
        for connection in list(self._connections):
            self._close(connection)
