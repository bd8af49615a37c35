"""How a client reaches brokers: one channel per address, and what to do when one breaks.

A channel that broke is dropped, never mended: the next call asks `resolve` again where the living
broker is, so a session may open an embedded one, or find the one that took over. What a call means
by "failed" is said by `sparklog.errors` alone; no Flight or gRPC error leaves this module.

gRPC does not survive a fork while a channel is open: a child that used it would hang. So a child of
such a process is refused by name; one whose parent had nothing open starts anew.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, Self

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from sparklog import errors, limits, wire
from sparklog.clock import Clock, SystemClock

Resolve = Callable[[], str]

_HARMLESS: Final = frozenset(
    {
        "cluster",
        "groups.describe",
        "groups.list",
        "groups.offsets",
        "offsets.for_times",
        "producers.new",
        "status",
        "topics.describe",
        "topics.list",
    }
)
"""Actions whose effect nobody sees: asked again at will, and just unavailable if unanswered."""

_ONCE: Final = frozenset(
    {"groups.delete", "topics.create", "topics.add_partitions", "topics.delete"}
)
"""Actions that refuse their own repetition, so a refusal after a lost answer proves nothing."""

_OPTIONS: Final = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A frozen peer, or a cable pulled out, breaks the channel instead of blocking for ever.
    ("grpc.keepalive_time_ms", round(limits.KEEPALIVE_SECONDS * 1000)),
    ("grpc.keepalive_timeout_ms", round(limits.KEEPALIVE_TIMEOUT_SECONDS * 1000)),
    ("grpc.http2.ping_timeout_ms", round(limits.KEEPALIVE_TIMEOUT_SECONDS * 1000)),
    # Two connections to one address share a socket otherwise, and break together.
    ("grpc.use_local_subchannel_pool", 1),
]

# RFC 9113, 3.4: a client's preface and its empty SETTINGS frame; a server's begins with SETTINGS.
_HTTP2_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_FRAME_HEADER_BYTES: Final = 9
_SETTINGS_FRAME: Final = 4
_WRONG_PORT: Final = wire.WRONG_PORT.encode()
_HINT_BYTES: Final = 300
"""More than the rest of that line has."""


class Backoff:
    """Growing waits between attempts; random, so that many clients do not come back in step."""

    def __init__(self, *, jitter: Callable[[], float] = random.random) -> None:
        self._jitter = jitter
        self._attempts = 0

    def next_seconds(self) -> float:
        full = limits.BACKOFF_FIRST_SECONDS * 2.0**self._attempts
        if full < limits.BACKOFF_MAX_SECONDS:
            self._attempts += 1
        return min(full, limits.BACKOFF_MAX_SECONDS) * (0.5 + 0.5 * self._jitter())

    def reset(self) -> None:
        self._attempts = 0


class Retry:
    """Until when, and with what waits, something is tried again."""

    def __init__(self, clock: Clock, timeout_seconds: float, backoff: Backoff) -> None:
        self._clock = clock
        self._timeout_seconds = timeout_seconds
        self._backoff = backoff
        self.reset()

    def reset(self) -> None:
        """There was progress: the time begins anew."""
        self._deadline = self._clock.monotonic() + self._timeout_seconds
        self._backoff.reset()

    @property
    def left_seconds(self) -> float:
        return max(self._deadline - self._clock.monotonic(), 0.001)

    def wait_or_raise(self, error: errors.SparklogError) -> None:
        """Waits a little; raises `error` if trying again cannot help, or not in time."""
        wait_seconds = self._backoff.next_seconds()
        if not may_pass(error) or wait_seconds >= self.left_seconds:
            raise error
        self._clock.sleep(wait_seconds)


# ------------------------------------------------------------------------------ one channel


class Channel:
    """A Flight client of one broker that says what `wire` says. Thread-safe, as Flight's is."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._flight = flight.FlightClient(f"grpc://{address}", generic_options=_OPTIONS)

    def action(self, name: str, request: msgspec.Struct, *, timeout_seconds: float) -> Any:
        """The reply of one attempt."""
        _, reply_type = wire.ACTIONS[name]
        options = flight.FlightCallOptions(timeout=timeout_seconds)
        action = flight.Action(name, wire.encode(request))
        try:
            results = list(self._flight.do_action(action, options))
        except (pa.ArrowException, OSError) as error:
            raise failure_of(error, self.address) from error
        return wire.decode(reply_type, results[0].body)

    def append(self, topic: str, schema: pa.Schema) -> tuple[Any, Any]:
        """Writer and reader of a new stream of batches; their errors are for `failure_of`."""
        return self._flight.do_put(_command(wire.AppendStream(topic=topic)), schema)

    def read(self, ticket: wire.ReadTicket) -> Any:
        """Reader of row batches; its errors are for `failure_of`."""
        return self._flight.do_get(flight.Ticket(wire.encode(ticket)))

    def tail(self, request: wire.TailRequest) -> tuple[Any, Any]:
        """Writer, which only ends the stream, and reader of row batches."""
        return self._flight.do_exchange(_command(request))

    def close(self) -> None:
        self._flight.close()


def failure_of(error: BaseException, address: str) -> errors.SparklogError:
    """What Flight raised, as the peer meant it.

    A Flight error that carries an `ErrorReply` is that error; a transport that broke is
    `BrokerUnavailable`; gRPC without Flight behind it is `WrongPort`; all else is a fault of the
    peer, reported as it is.
    """
    if isinstance(error, errors.SparklogError):
        return error
    reply = getattr(error, "extra_info", None)
    if reply:
        try:
            return wire.decode(wire.ErrorReply, reply).exception()
        except errors.BadRequest:
            pass
    reason = str(error).partition(". gRPC client debug context")[0]
    reason = reason.rpartition("error, with message: ")[2].strip()
    if isinstance(error, NotImplementedError):
        return errors.WrongPort(address=address, reason=f"it speaks gRPC but refuses: {reason}")
    unavailable = (
        flight.FlightUnavailableError,
        flight.FlightTimedOutError,
        flight.FlightCancelledError,
    )
    if isinstance(error, unavailable):
        return errors.BrokerUnavailable(address=address, reason=reason)
    return errors.SparklogError(reason=f"the broker at {address} failed: {reason}")


def _command(message: msgspec.Struct) -> Any:
    return flight.FlightDescriptor.for_command(wire.encode(message))


def _probe(address: str, timeout_seconds: float) -> None:
    """Raises `BrokerUnavailable` or `WrongPort` at once, where gRPC would wait and not say why."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise errors.BadOption(option="address", value=address, reason="expected host:port")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_seconds) as peer:
            peer.sendall(_HTTP2_PREFACE)
            answer = _receive(peer, _FRAME_HEADER_BYTES)
            if answer == _WRONG_PORT[:_FRAME_HEADER_BYTES]:
                answer += _receive(peer, _HINT_BYTES)
    except TimeoutError as error:
        reason = f"silent for {timeout_seconds} s; it hangs, or this is not its Flight port"
        raise errors.BrokerUnavailable(address=address, reason=reason) from error
    except OSError as error:
        reason = _unreached(error, host)
        raise errors.BrokerUnavailable(address=address, reason=reason) from error
    if len(answer) == _FRAME_HEADER_BYTES and answer[3] == _SETTINGS_FRAME:
        return
    if answer.startswith(_WRONG_PORT):
        flight = answer.removeprefix(_WRONG_PORT).decode(errors="replace").strip()
        reason = f"it is the Kafka port; Flight is at {flight}: connect there"
    elif answer.startswith(b"HTTP/1"):
        reason = "it speaks HTTP/1; is this the console's port?"
    else:
        reason = "it is open but does not answer as gRPC does; is this the Kafka port?"
    raise errors.WrongPort(address=address, reason=reason)


def _unreached(error: OSError, host: str) -> str:
    """What is wrong with an address, and what to do about it."""
    reason = error.strerror or str(error)
    if isinstance(error, socket.gaierror):
        return f"the host {host!r} is not known here ({reason}); check its spelling"
    if isinstance(error, ConnectionRefusedError):
        return f"{reason}; start a broker there, or correct the address"
    return reason


def _receive(peer: socket.socket, count: int) -> bytes:
    """Up to `count` bytes: fewer where the peer closed, or broke off. Raises `TimeoutError`."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while len(received) < count and (piece := peer.recv(count - len(received))):
            received += piece
    return received


# ------------------------------------------------------------------------------ all channels


class Connection:
    """Channels to a cluster's brokers, opened when needed. Thread-safe.

    Args:
        resolve: gives `host:port` of a living broker; asked at first use, and again after a break.
            What it raises reaches the caller, `Retriable` after the time for retries, and what is
            none of our errors as the cause of a `SparklogError`.
        clock: for intervals and waits between attempts.
        timeout_seconds: how long an action is tried again, unless the call says otherwise.
        jitter: random numbers from 0 to 1 for the waits.
    """

    def __init__(
        self,
        resolve: Resolve,
        *,
        clock: Clock | None = None,
        timeout_seconds: float = limits.ACTION_TIMEOUT_SECONDS,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        self._resolve = resolve
        self._timeout_seconds = timeout_seconds
        self._jitter = jitter
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._channels: dict[str, Channel] = {}
        self._home: str | None = None
        self._brokers: dict[int, str] = {}
        self._closed = False
        _connections.add(self)

    @classmethod
    def to(cls, address: str, **options: Any) -> Connection:
        """To the broker at `address`, `host:port`, for ever."""
        return cls(lambda: address, **options)

    @property
    def address(self) -> str:
        """`host:port` of the broker in use; asks for one where there is none."""
        return self.channel().address

    def backoff(self) -> Backoff:
        return Backoff(jitter=self._jitter)

    def retry(self, timeout_seconds: float | None = None) -> Retry:
        seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        return Retry(self.clock, seconds, self.backoff())

    def channel(self, broker: int = -1) -> Channel:
        """To that broker, or to whichever `resolve` names where it is unknown (-1) or the only one.

        Raises `BrokerUnavailable`, `WrongPort`, and what `resolve` raises.
        """
        if _forked:
            raise errors.BadRequest(
                reason="this process was forked from one with an open connection, and gRPC cannot"
                " be used in it: start it with 'spawn', or close the connection before the fork"
            )
        channel = self._open_channel(broker)
        if channel is not None:
            return channel
        # Finding and trying an address takes time; nobody who has a channel waits for that.
        with self._opening:
            return self._open_channel(broker) or self._new_channel(broker)

    def broke(self, channel: Channel) -> None:
        """Drops a channel that failed; others may still be in calls on it, so it ends by itself."""
        with self._lock:
            if self._channels.get(channel.address) is channel:
                self._forget(channel.address)

    def action(
        self,
        name: str,
        request: msgspec.Struct | None = None,
        *,
        timeout_seconds: float | None = None,
    ) -> Any:
        """The reply struct that `wire.ACTIONS` names.

        `Retriable` failures are tried again, but for `TimedOut`, which has taken its time already.

        Args:
            name: one of `wire.ACTIONS`.
            request: its request struct; may be left out where it is `wire.Empty`.
            timeout_seconds: for all attempts together.

        Raises:
            errors.Invalid: refused; it had no effect.
            errors.Retriable: no attempt succeeded in time, and none had an effect.
            errors.OutcomeUnknown: an answer was lost, and the action may have taken effect.
        """
        retry = self.retry(timeout_seconds)
        lost: errors.SparklogError | None = None
        while True:
            channel = None
            try:
                channel = self.channel()
                return channel.action(
                    name, request or wire.Empty(), timeout_seconds=retry.left_seconds
                )
            except errors.SparklogError as error:
                if channel is not None and is_of_the_broker(error):
                    self.broke(channel)
                    if _may_have_arrived(error):
                        lost = error
                try:
                    if isinstance(error, errors.TimedOut):
                        raise error  # the broker has tried for as long as it was told to
                    retry.wait_or_raise(error)
                except errors.SparklogError:
                    if lost is None or not _is_in_doubt(name, error):
                        raise
                    raise errors.OutcomeUnknown(
                        what=name, reason=f"{lost}; at last: {error}"
                    ) from error

    def attempt(self, name: str, request: msgspec.Struct, *, timeout_seconds: float) -> Any:
        """As `action`, but tried once: for who knows better when to try again.

        Raises whatever it failed with; `BrokerUnavailable` may mean that it had its effect.
        """
        channel = self.channel()
        try:
            return channel.action(name, request, timeout_seconds=timeout_seconds)
        except errors.SparklogError as error:
            if is_of_the_broker(error):
                self.broke(channel)
            raise

    def learn_leaders(self, topic: wire.TopicInfo) -> None:
        """Asks where the brokers are, if one that leads a partition of `topic` is not known."""
        leaders = {each.leader for each in topic.partitions if each.leader >= 0}
        with self._lock:
            known = self._brokers.keys()
            if leaders <= known:
                return
        cluster: wire.ClusterInfo = self.action("cluster")
        with self._lock:
            self._brokers = {each.broker: each.address for each in cluster.brokers}

    def close(self) -> None:
        """Opens no more channels, and calls nobody; streams go on until their owners end them."""
        with self._lock:
            self._closed = True
            channels = list(self._channels.values())
            self._channels.clear()
        for channel in channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_channel(self, broker: int) -> Channel | None:
        with self._lock:
            if self._closed:
                raise errors.BadRequest(reason="this connection is closed")
            address = self._address_of(broker)
            return None if address is None else self._channels.get(address)

    def _new_channel(self, broker: int) -> Channel:
        with self._lock:
            address = self._address_of(broker)
        if address is None:
            address = self._home = self._ask()
        try:
            _probe(address, limits.PROBE_TIMEOUT_SECONDS)
        except errors.SparklogError:
            with self._lock:
                self._forget(address)
            raise
        channel = Channel(address)
        with self._lock:
            self._channels[address] = channel
        return channel

    def _ask(self) -> str:
        # It may open files and start a broker, and those who wait here know our errors alone.
        try:
            return self._resolve()
        except errors.SparklogError:
            raise
        except Exception as error:
            raise errors.SparklogError(reason=f"no broker was found: {error!r}") from error

    def _address_of(self, broker: int) -> str | None:
        # The only broker is reached at the address that was given: the one that it tells may be
        # meant for others, behind a container's or a cloud's network.
        alone = len(self._brokers) <= 1
        return self._home if alone else self._brokers.get(broker, self._home)

    def _forget(self, address: str) -> None:
        self._channels.pop(address, None)
        if self._home == address:
            self._home = None
        # Whoever led from there may lead from elsewhere now.
        self._brokers = {}

    def _after_fork(self) -> Iterator[Channel]:
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        yield from self._channels.values()
        self._channels = {}
        self._home = None


def may_pass(failure: errors.SparklogError) -> bool:
    """Whether the same request may succeed later."""
    return isinstance(failure, errors.Retriable | errors.BrokerFenced)


def is_of_the_broker(failure: errors.SparklogError) -> bool:
    """Whether asking another broker, or this one over a new channel, may help."""
    return isinstance(
        failure, errors.BrokerUnavailable | errors.BrokerClosing | errors.BrokerFenced
    )


def _is_in_doubt(name: str, last: errors.SparklogError) -> bool:
    """Whether an action of which an answer was lost may have taken effect, though it failed now."""
    return name in _ONCE if isinstance(last, errors.Invalid) else name not in _HARMLESS


def _may_have_arrived(failure: errors.SparklogError) -> bool:
    # Who says that it is closing answered, and did nothing; who was never reached did neither.
    unreached = "failed to connect" in str(failure)
    return isinstance(failure, errors.BrokerUnavailable) and not unreached


# ------------------------------------------------------------------------------ forks

_connections: weakref.WeakSet[Connection] = weakref.WeakSet()
_forked = False
_abandoned: list[Channel] = []
"""A parent's channels in its child: kept, because destroying one would wait for its threads."""


def _after_fork_in_child() -> None:
    global _forked
    for connection in list(_connections):
        _abandoned.extend(connection._after_fork())
    _forked = bool(_abandoned)


os.register_at_fork(after_in_child=_after_fork_in_child)
