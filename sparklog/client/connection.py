"""A client's connections to brokers: one channel per address, retries, and errors.

A broken channel is dropped. The next call asks `resolve` again for the address of the live broker,
which may be one that has taken over, or an embedded one that `resolve` starts. All failures are
errors from `sparklog.errors`; no Flight or gRPC error leaves this module.

gRPC does not survive a fork while a channel is open: a child that used it would hang, so its calls
raise an error instead. A child whose parent had no open channel opens its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, Self

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from sparklog import errors, limits
from sparklog.client.credentials import ClientCredentials
from sparklog.client.flight_client import failure_of, open_client
from sparklog.client.probing import first_that_answers, probe
from sparklog.clock import Clock, SystemClock, ThreadClock
from sparklog.formats import flight_messages, group_messages
from sparklog.formats.topic_names import unknown_topic
from sparklog.listeners import TLS_SCHEME
from sparklog.security.credentials import Credentials, TokenSource

BACKOFF_FIRST_SECONDS = 0.02
RECONNECT_MAX_SECONDS = 0.2  # while a broker is down; an attempt costs very little
RECONNECT_ATTEMPTS = 200  # about 30 s; a broker that is down for longer is retried less often
_RETRY_LOG_SECONDS = 10.0  # between two log lines of a client about the same retries

_TOKEN_REFUSED: Final = "the broker has refused the client's token"
Resolve = Callable[[], "str | Channel"]

_HARMLESS: Final = frozenset(
    {
        "cluster",
        "cluster.balance",
        "cluster.describe",
        "figures",
        "groups.describe",
        "groups.find",
        "groups.list",
        "groups.offsets",
        "offsets.for_times",
        "offsets.lag",
        "producers.new",
        "root.prove",
        "status",
        "topics.describe",
        "topics.list",
        "topics.schemas",
    }
)
"""Actions without a visible effect: retried freely, and `BrokerUnavailable` without a response."""

_ONCE: Final = frozenset(
    {"groups.delete", "topics.create", "topics.add_partitions", "topics.delete"}
)
"""Actions that fail when repeated, so an error after a lost answer proves nothing."""


_COORDINATORS: Final = 10_000
"""A connection remembers the coordinators of this many groups."""
_ADDRESSES_SECONDS: Final = 1.0
"""The age at which brokers' addresses are fetched again along with a topic's leaders."""


class Backoff:
    """Growing waits between attempts, with jitter so that many clients do not retry in step."""

    def __init__(self, *, jitter: Callable[[], float] = random.random) -> None:
        self._jitter = jitter
        self._attempts = 0

    def next_seconds(self, error: errors.SparklogError) -> float:
        """Returns the wait after `error`; short at first while a broker is down."""
        full = BACKOFF_FIRST_SECONDS * 2.0 ** min(self._attempts, 32)
        is_quick = is_of_the_broker(error) and self._attempts < RECONNECT_ATTEMPTS
        self._attempts += 1
        most = RECONNECT_MAX_SECONDS if is_quick else limits.BACKOFF_MAX_SECONDS
        return min(full, most) * (0.5 + 0.5 * self._jitter())

    def reset(self) -> None:
        self._attempts = 0


class RetryLog:
    """Limits how often failures are logged: there may be several per second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._logged_at = -_RETRY_LOG_SECONDS

    def is_due(self) -> bool:
        """Returns True at most once per `_RETRY_LOG_SECONDS`."""
        now = self._clock.monotonic()
        if now - self._logged_at < _RETRY_LOG_SECONDS:
            return False
        self._logged_at = now
        return True


class Retry:
    """Deadline and waits of a call with retries."""

    def __init__(self, clock: Clock, timeout_seconds: float, backoff: Backoff) -> None:
        self._clock = clock
        self._timeout_seconds = timeout_seconds
        self._backoff = backoff
        self.reset()

    def reset(self) -> None:
        """Restarts the timeout, after progress."""
        self._deadline = self._clock.monotonic() + self._timeout_seconds
        self._backoff.reset()

    @property
    def left_seconds(self) -> float:
        return max(self._deadline - self._clock.monotonic(), 0.001)

    def wait_or_raise(self, error: errors.SparklogError) -> None:
        """Waits before the next attempt; raises `error` if that cannot help or is too late."""
        wait_seconds = self._backoff.next_seconds(error)
        if not may_pass(error) or wait_seconds >= self.left_seconds:
            raise error
        self._clock.sleep(wait_seconds)


# ------------------------------------------------------------------------------ one channel


def ask(
    address: str,
    action: str,
    request: msgspec.Struct,
    *,
    timeout_seconds: float,
    is_probed: bool = True,
    credentials: Credentials | None = None,
) -> Any:
    """Returns the reply from the broker at a Flight address, from a single attempt.

    `is_probed`: first check that a broker answers there, for up to `PROBE_TIMEOUT_SECONDS` more, so
    that the error names the cause. `credentials`: None: those of the environment.

    Raises `BrokerUnavailable`, `WrongPort`, and any error that the broker returns.
    """
    if is_probed:
        with Connection.to(address, credentials=credentials) as connection:
            return connection.channel().action(action, request, timeout_seconds=timeout_seconds)
    channel = Channel(address, credentials)
    try:
        return channel.action(action, request, timeout_seconds=timeout_seconds)
    finally:
        channel.close()


class Channel:
    """Flight client for one broker, for `flight_messages`. Thread-safe, as Flight's client is."""

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        """Opens the channel, without waiting for a connection.

        Raises `BadOption` if a file of the credentials cannot be read, and what logging in raises.

        Args:
            address: `host:port`, or `tls://host:port`.
            credentials: None: those of the environment.
        """
        self.address = address
        self._credentials = credentials = credentials or ClientCredentials()
        token = credentials.token_source(address)
        self._has_token = token is not None
        middleware = [_TokenSender(token)] if token is not None else []
        tls = credentials.tls() if address.startswith(TLS_SCHEME) else None
        self._flight = open_client(address, tls, middleware=middleware)

    def action(self, name: str, request: msgspec.Struct, *, timeout_seconds: float) -> Any:
        """Returns the reply to one attempt."""
        _, reply_type = flight_messages.ACTIONS[name]
        options = flight.FlightCallOptions(timeout=timeout_seconds)
        action = flight.Action(name, flight_messages.encode(request))
        try:
            results = list(self._flight.do_action(action, options))
        except (pa.ArrowException, OSError) as error:
            raise self.failure_of(error) from error
        if not results:  # another program's Flight server
            reason = f"it does not support {name!r}"
            raise errors.WrongPort(address=self.address, reason=reason)
        return flight_messages.decode(reply_type, results[0].body)

    def append(self, topic: str, schema: pa.Schema) -> tuple[Any, Any]:
        """Returns writer and reader of a new batch stream; `failure_of` converts their errors."""
        return self._flight.do_put(_command(flight_messages.AppendStream(topic=topic)), schema)

    def read(self, ticket: flight_messages.ReadTicket) -> Any:
        """Returns a reader of row batches; `failure_of` converts its errors."""
        return self._flight.do_get(flight.Ticket(flight_messages.encode(ticket)))

    def tail(self, request: flight_messages.TailRequest) -> tuple[Any, Any]:
        """Returns a writer, used only to end the stream, and a reader of row batches."""
        return self._flight.do_exchange(_command(request))

    def failure_of(self, error: BaseException) -> errors.SparklogError:
        """Converts an error of a call, as the function of this name does.

        If the broker has refused the token, or none was sent, and a new one can be had, the result
        is `BrokerUnavailable`: the caller then opens a new channel, which sends it. May log in.
        """
        failure = failure_of(error, self.address)
        is_anonymous = isinstance(failure, errors.NotAuthorized) and not self._has_token
        if not (is_anonymous or isinstance(failure, errors.NotAuthenticated)):
            return failure
        try:
            if self._credentials.new_token_source(self.address) is None:
                return failure
        except errors.SparklogError as refusal:
            return refusal
        return errors.BrokerUnavailable(
            address=self.address, reason=f"{_TOKEN_REFUSED}, and a new one is sent: {failure}"
        )

    def close(self) -> None:
        self._flight.close()


class _TokenSender(flight.ClientMiddlewareFactory):
    """Adds a token to each call."""

    def __init__(self, token: TokenSource) -> None:
        super().__init__()
        self._token = token

    def start_call(self, _info: Any) -> flight.ClientMiddleware:
        return _TokenHeader(self._token())


class _TokenHeader(flight.ClientMiddleware):
    """Adds a token to one call."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token

    def sending_headers(self) -> dict[str, str]:
        return {"authorization": self._token}


def _command(message: msgspec.Struct) -> Any:
    return flight.FlightDescriptor.for_command(flight_messages.encode(message))


# ------------------------------------------------------------------------------ all channels


class Connection:
    """Channels to a cluster's brokers, opened when needed. Thread-safe.

    Args:
        resolve: returns `host:port` of a live broker, or a channel that needs none; called on first
            use and after a channel breaks. Its `SparklogError` reaches the caller, a `Retriable`
            one once retries time out; any other exception becomes the cause of a `SparklogError`.
        clock: for intervals and waits between attempts.
        timeout_seconds: how long an action is retried, unless the call sets a timeout.
        credentials: for the brokers; None: those of the environment.
        jitter: returns random numbers from 0 to 1 for the waits.
    """

    def __init__(
        self,
        resolve: Resolve,
        *,
        clock: ThreadClock | None = None,
        timeout_seconds: float = limits.ACTION_TIMEOUT_SECONDS,
        credentials: Credentials | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._credentials = credentials or ClientCredentials()
        self.clock: ThreadClock = clock or SystemClock()
        self._resolve = resolve
        self._timeout_seconds = timeout_seconds
        self._jitter = jitter
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._channels: dict[str, Channel] = {}
        self._home: str | None = None
        self._answered: set[str] = set()
        """Addresses at which a broker has answered."""
        self._given: frozenset[str] = frozenset()
        """Addresses that a caller has chosen; all others were learned from brokers or a root."""
        self._brokers: dict[int, str] = {}
        self._learned_at = -math.inf
        """When their addresses were learned, in monotonic seconds."""
        self._is_cluster = False
        """True once multiple brokers were known; then each is used at its advertised address."""
        self._coordinators: dict[str, int] = {}
        """The broker that coordinates a group, if it is not the one in use."""
        self._closed = False
        _connections.add(self)

    @classmethod
    def to(cls, address: str, **options: Any) -> Connection:
        """Returns a connection to the broker at a fixed address.

        Several addresses, `host:port,host:port`, are tried in this order on first use and after a
        channel breaks; the first that answers is used. If none answers, the error names them all.
        """
        addresses = address.split(",")
        if len(addresses) == 1:
            connection = cls(lambda: address, **options)
        else:
            connection = cls(
                lambda: first_that_answers(
                    addresses, connection._answered, connection._credentials
                ),
                **options,
            )
        connection._given = frozenset(addresses)
        return connection

    @property
    def address(self) -> str:
        """`host:port` of the broker in use, which is found first if necessary."""
        return self.channel().address

    def backoff(self) -> Backoff:
        return Backoff(jitter=self._jitter)

    def retry(self, timeout_seconds: float | None = None) -> Retry:
        seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        return Retry(self.clock, seconds, self.backoff())

    def channel(self, broker: int = -1) -> Channel:
        """Returns a channel to a broker; if it is -1 or the only one, to that of `resolve`.

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
        if self._is_unknown(broker):
            cluster = self.attempt(
                "cluster", flight_messages.Empty(), timeout_seconds=limits.PROBE_TIMEOUT_SECONDS
            )
            self._set_brokers(cluster)
            if self._is_unknown(broker):
                reason = "it is down; another broker takes over its partitions"
                raise errors.BrokerUnavailable(address=f"broker {broker}", reason=reason)
        # Finding and probing an address takes time; calls on open channels do not wait for it.
        with self._opening:
            return self._open_channel(broker) or self._new_channel(broker)

    def broke(self, channel: Channel) -> None:
        """Drops a failed channel; it closes when the last call on it has ended."""
        with self._lock:
            if self._channels.get(channel.address) is channel:
                self._forget(channel.address)

    def action(
        self,
        name: str,
        request: msgspec.Struct | None = None,
        *,
        timeout_seconds: float | None = None,
        broker: int = -1,
    ) -> Any:
        """Performs an action of `flight_messages.ACTIONS`, and returns its reply struct.

        `Retriable` failures are retried, except `TimedOut`, which has used up its time. Requests
        about a group go to the broker that coordinates it.

        Args:
            name: one of `flight_messages.ACTIONS`.
            request: its request struct; None: `flight_messages.Empty`.
            timeout_seconds: for all attempts together.
            broker: the id of the broker to ask, if it is up; -1: the one in use.

        Raises:
            errors.Invalid: rejected; it had no effect. `UnknownTopic` names the most similar topic.
            errors.NotLeader: another broker leads a partition of the request.
            errors.Retriable: no attempt succeeded in time, and none had an effect.
            errors.OutcomeUnknown: an answer was lost, and the action may have taken effect.
        """
        retry = self.retry(timeout_seconds)
        lost: errors.SparklogError | None = None
        while True:
            channel = None
            try:
                asked = self._coordinator_for(name, request) if broker < 0 else broker
                channel = self.channel(asked)
                return channel.action(
                    name, request or flight_messages.Empty(), timeout_seconds=retry.left_seconds
                )
            except errors.SparklogError as error:
                if isinstance(error, errors.NotCoordinator):
                    self._find_coordinator(request, retry.left_seconds)
                if channel is not None and _may_be_better(error):
                    self.broke(channel)
                    if _may_have_arrived(error):
                        lost = error
                try:
                    if isinstance(error, errors.TimedOut | errors.NotLeader):
                        raise error  # the timeout is used up, or another broker has to be asked
                    retry.wait_or_raise(error)
                except errors.SparklogError:
                    if lost is None or not _is_in_doubt(name, error):
                        if channel is not None and isinstance(error, errors.UnknownTopic):
                            error = _with_nearest_topic(error, channel, retry.left_seconds)
                            raise error from error.__cause__
                        raise
                    raise errors.OutcomeUnknown(
                        what=name, reason=f"{lost}; at last: {error}"
                    ) from error

    def attempt(
        self, name: str, request: msgspec.Struct, *, timeout_seconds: float, broker: int = -1
    ) -> Any:
        """Performs an action once, for callers with retries of their own.

        Raises the failure; after `BrokerUnavailable` the action may have taken effect.

        `broker`: the id of the broker to ask; -1: the one that coordinates the group of `request`,
        or the one in use.
        """
        channel = self.channel(self._coordinator_for(name, request) if broker < 0 else broker)
        try:
            return channel.action(name, request, timeout_seconds=timeout_seconds)
        except errors.SparklogError as error:
            if isinstance(error, errors.NotCoordinator):  # the caller's next attempt finds it
                self._find_coordinator(request, timeout_seconds)
            if _may_be_better(error):
                self.broke(channel)
            raise

    def may_have_moved(self, failure: errors.SparklogError) -> bool:
        """Returns whether a partition may have a different leader from the one that failed."""
        is_down = self._is_cluster and is_of_the_broker(failure)
        return is_down or isinstance(failure, errors.NotLeader)

    def brokers(self) -> list[int]:
        """Returns the ids of the brokers that are up, and learns their addresses."""
        return self._set_brokers(self.action("cluster"))

    def _set_brokers(self, cluster: flight_messages.ClusterInfo) -> list[int]:
        with self._lock:
            self._brokers = {each.broker: each.address for each in cluster.brokers}
            self._learned_at = self.clock.monotonic()
            self._is_cluster |= len(self._brokers) > 1
            # The groups of a broker that is down move to another coordinator.
            self._coordinators = {
                group: broker
                for group, broker in self._coordinators.items()
                if broker in self._brokers
            }
            return list(self._brokers)

    def _is_unknown(self, broker: int) -> bool:
        """Returns whether a broker's address has to be fetched first."""
        with self._lock:
            return self._is_cluster and broker >= 0 and broker not in self._brokers

    def _coordinator_for(self, name: str, request: msgspec.Struct | None) -> int:
        group = getattr(request, "group", "") if name.startswith("groups.") else ""
        with self._lock:
            return self._coordinators.get(group, -1)

    def _find_coordinator(self, request: msgspec.Struct | None, timeout_seconds: float) -> None:
        """Finds and remembers the broker that coordinates the group of a request, if possible."""
        name = group_messages.GroupName(group=getattr(request, "group", ""))
        with self._lock:
            self._coordinators.pop(name.group, None)
        with contextlib.suppress(errors.SparklogError):  # the caller retries
            channel = self.channel()
            found: group_messages.GroupCoordinator = channel.action(
                "groups.find", name, timeout_seconds=timeout_seconds
            )
            cluster: flight_messages.ClusterInfo = channel.action(
                "cluster", flight_messages.Empty(), timeout_seconds=timeout_seconds
            )
            self._set_brokers(cluster)
            with self._lock:
                if len(self._coordinators) >= _COORDINATORS:
                    self._coordinators.clear()
                self._coordinators[name.group] = found.broker

    def learn_leaders(self, topic: flight_messages.TopicInfo) -> None:
        """Fetches the brokers' addresses, unless those of the leaders of `topic` are up to date.

        Older ones may be wrong: a broker of a cluster may have restarted at a different address,
        and the only broker may have been joined by others, which can help once it is down.
        """
        leaders = {each.leader for each in topic.partitions if each.leader >= 0}
        with self._lock:
            age_seconds = self.clock.monotonic() - self._learned_at
            is_new = age_seconds < (
                _ADDRESSES_SECONDS if self._is_cluster else limits.METADATA_AGE_SECONDS
            )
            if leaders <= self._brokers.keys() and is_new:
                return
        self.brokers()

    def check_open(self) -> None:
        """Raises `BadRequest` after `close`, for work that makes its first call later."""
        with self._lock:
            self._check_open()

    def close(self) -> None:
        """Refuses further calls; open streams continue until their owners end them."""
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

    def _check_open(self) -> None:
        if self._closed:
            raise errors.BadRequest(reason="this connection is closed")

    def _open_channel(self, broker: int) -> Channel | None:
        with self._lock:
            self._check_open()
            address = self._address_of(broker)
            return None if address is None else self._channels.get(address)

    def _new_channel(self, broker: int) -> Channel:
        with self._lock:
            address = self._address_of(broker)
        if address is None:
            if self._is_unknown(broker):  # it was forgotten since
                raise errors.BrokerUnavailable(address=f"broker {broker}", reason="it is down")
            home = self._find_home()
        else:
            self._check_answers(address, is_learned=self._is_cluster and broker >= 0)
            home = address
        channel = Channel(home, self._credentials) if isinstance(home, str) else home
        with self._lock:
            if address is None:
                self._home = channel.address
            self._channels[channel.address] = channel
        return channel

    def _check_answers(self, address: str, *, is_learned: bool = False) -> None:
        """Raises `BrokerUnavailable`, and `WrongPort` for an address that a caller has chosen."""
        try:
            probe(address, limits.PROBE_TIMEOUT_SECONDS, self._answered, self._credentials)
        except errors.SparklogError as error:
            with self._lock:
                self._forget(address)
            if isinstance(error, errors.WrongPort) and (is_learned or address not in self._given):
                # The broker is stopping, or has died and another program has taken its port.
                reason = "it is stopping, or another program now listens there"
                raise errors.BrokerUnavailable(address=address, reason=reason) from error
            raise

    def _find_home(self) -> str | Channel:
        """Returns the result of `resolve`, or else another broker that was known to be up."""
        try:
            home = self._ask()
            if isinstance(home, str):
                self._check_answers(home)
            return home
        except (errors.Retriable, errors.WrongPort):  # another program may listen there now
            with self._lock:
                others = list(self._brokers.values()) if self._is_cluster else []
            for other in others:
                with contextlib.suppress(errors.SparklogError):
                    self._check_answers(other)
                    return other
            raise

    def _ask(self) -> str | Channel:
        # It may open files and start a broker; callers expect only a `SparklogError`.
        try:
            return self._resolve()
        except errors.SparklogError:
            raise
        except Exception as error:
            raise errors.UnexpectedError(reason=f"no broker was found: {error!r}") from error

    def _address_of(self, broker: int) -> str | None:
        # The only broker is used at the given address. The one that it advertises may be for other
        # clients, for example inside a container's network.
        if not self._is_cluster or broker < 0:
            return self._home
        return self._brokers.get(broker)

    def _forget(self, address: str) -> None:
        self._channels.pop(address, None)
        if self._home == address:
            self._home = None
        # The broker at that address may have moved.
        self._brokers = {key: each for key, each in self._brokers.items() if each != address}
        self._coordinators = {}

    def _after_fork(self) -> Iterator[Channel]:
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._credentials.after_fork()
        yield from self._channels.values()
        self._channels = {}
        self._home = None


def _with_nearest_topic(
    error: errors.UnknownTopic, channel: Channel, left_seconds: float
) -> errors.UnknownTopic:
    """Returns the error with the name of the most similar topic, if the broker lists one."""
    timeout_seconds = min(left_seconds, limits.PROBE_TIMEOUT_SECONDS)
    try:
        listed: flight_messages.TopicNames = channel.action(
            "topics.list", flight_messages.Empty(), timeout_seconds=timeout_seconds
        )
    except errors.SparklogError:
        return error
    return unknown_topic(error.topic, listed.topics).with_traceback(error.__traceback__)


def may_pass(failure: errors.SparklogError) -> bool:
    """Returns True if the same request may succeed later."""
    return isinstance(failure, errors.Retriable | errors.BrokerFenced)


def is_of_the_broker(failure: errors.SparklogError) -> bool:
    """Returns True if another broker, or a new channel to this one, may help."""
    return isinstance(
        failure, errors.BrokerUnavailable | errors.BrokerClosing | errors.BrokerFenced
    )


def _may_be_better(failure: errors.SparklogError) -> bool:
    """Returns True if the next call should ask for the live broker again."""
    return is_of_the_broker(failure) or isinstance(failure, errors.RootReadOnly)


def _is_in_doubt(name: str, last: errors.SparklogError) -> bool:
    """Returns True if an action with a lost answer may have taken effect, even if it now fails."""
    return name in _ONCE if isinstance(last, errors.Invalid) else name not in _HARMLESS


def _may_have_arrived(failure: errors.SparklogError) -> bool:
    # A broker that answers that it is closing has done nothing, nor has one that was not reached.
    unreached = any(each in str(failure) for each in ("failed to connect", _TOKEN_REFUSED))
    return isinstance(failure, errors.BrokerUnavailable) and not unreached


# ------------------------------------------------------------------------------ forks

_connections: weakref.WeakSet[Connection] = weakref.WeakSet()
_forked = False
_abandoned: list[Channel] = []
"""The parent's channels: kept, because destroying one waits for threads that this process lacks."""


def _after_fork_in_child() -> None:
    global _forked
    for connection in list(_connections):
        _abandoned.extend(connection._after_fork())
    _forked = bool(_abandoned)


os.register_at_fork(after_in_child=_after_fork_in_child)
