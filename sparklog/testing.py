"""A broker for tests: real listeners and a real log, on a store in memory that fails on demand.

    import pytest
    import sparklog.testing

    @pytest.fixture(scope="module")
    def broker():
        with sparklog.testing.broker() as broker:
            yield broker

    @pytest.fixture
    def log(broker):
        with broker.connect() as log:
            yield log

    def test_orders_survive_a_failing_store(broker, log):
        log.create_topic("orders", if_absent=True)
        broker.fail_next("put", path="wal/")
        with log.producer() as producer:
            producer.send("orders", b"tea").result()
        assert broker.pending_faults == 0

The broker runs in the test's process and listens on free ports of 127.0.0.1. It differs from
`sparklog broker` only in its store: an acked record survives `stop`, `crash` and `restart`, but is
lost with the process. The tables are in memory too, so `log.read` can read them, but Delta Lake and
Spark cannot. Unlike on an object store, a flush does not wait for more records, so a test receives
each ack in about a millisecond; the setting `writer.linger_ms` makes it wait.

Requests to the store fail on demand, and so do those of Flight clients: here a record is durable,
but its ack is lost with the connection, so the client resends it.

        broker.fail_next("append", path="orders/", answer_only=True)
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, Self, TypeAlias

import msgspec
import structlog

from sparklog import connecting, errors
from sparklog.broker.agent import Agent
from sparklog.broker.flight.grpc.status import PeerGone
from sparklog.broker.flight.hooks import Request
from sparklog.broker.log.producer_state import ProducerSequence, Refusals
from sparklog.broker.logging import configure
from sparklog.client import arguments
from sparklog.client.log import Log
from sparklog.clock import SystemClock
from sparklog.formats.flight_messages import AppendHeader
from sparklog.settings import load_settings
from sparklog.storage.metadata.model import BrokerKind
from sparklog.storage.objects import MemoryStore, NoFaults, PutUnresolved
from sparklog.storage.objects.faults import Operation as StoreOperation

__all__ = ["Broker", "ConnectionCut", "Operation", "Request", "broker"]

Operation = Literal["put", "get", "list", "delete", "append", "read", "action"]
"""Kinds of requests: from the broker to its object store (put, get, list, delete), and from Flight
clients to the broker (append: one batch; read: one batch sent to a client; action: any other)."""

Hook: TypeAlias = Callable[[Request], None]

_ANY_PORT: Final = "127.0.0.1:0"
_OF_STORE: Final[Mapping[StoreOperation, Operation]] = {
    "put": "put",
    "put_new": "put",
    "get": "get",
    "get_range": "get",
    "open": "get",
    "stat": "get",
    "list_after": "list",
    "folders": "list",
    "walk": "list",
    "delete": "delete",
}
_OF_CLIENTS: Final[Mapping[str, Operation]] = {"append": "append", "read": "read", "tail": "read"}
_OPERATIONS: Final = (*dict.fromkeys(_OF_STORE.values()), "append", "read", "action")
_WITH_ANSWER: Final = ("put", "append", "action")
"""Operations with an effect, whose answer alone can be lost."""
_numbers = itertools.count(1)

_log = logging.getLogger(__name__)


class ConnectionCut(Exception):
    """Raised in `on_request` or `on_answer`: all client connections break."""


@contextlib.contextmanager
def broker(
    *, kafka: bool = False, settings: Mapping[str, str | int | float | bool] | None = None
) -> Iterator[Broker]:
    """Starts a broker on an empty store, and stops it at the end of the `with` statement.

    Args:
        kafka: also listen for Kafka clients, at `kafka_address`. Needs the extra
            `sparklog[broker]`.
        settings: settings of the broker by dotted name, as in `conf/broker.toml`, such as
            `{"topics.default_partitions": 4}`. The environment is not read.

    Raises:
        errors.UnknownOption, errors.BadOption: a setting is unknown or invalid.
        errors.NotInstalled: packages of the Kafka listener are missing.
    """
    arguments.flag("kafka", kafka)
    given = {} if settings is None else arguments.mapping("settings", settings, "{name: value}")
    started = Broker(kafka=kafka, settings=given)
    started.restart()
    try:
        yield started
    finally:
        started.close()


class Broker:
    """A broker in this process, its store, and the faults of both. Thread-safe.

    `sparklog.testing.broker` starts it.
    """

    def __init__(self, *, kafka: bool, settings: Mapping[str, str | int | float | bool]) -> None:
        self._lock = threading.Lock()
        self._agent: Agent | None = None
        self._logs: list[Log] = []
        self._faults = _Faults()
        name = f"sparklog-testing-{next(_numbers)}"
        self._store = MemoryStore(SystemClock(), name=name).view(self._faults)
        self._settings = load_settings(
            None,
            {},
            {"root": self._store.uri, **settings},
            defaults={
                "flight.listen": _ANY_PORT,
                "kafka.listen": _ANY_PORT if kafka else "",
                "log.level": "error",
                "requests.profile": "fast",  # requests to memory are free
                "writer.linger_ms": 0,  # a put in memory is too cheap to wait for more records
            },
        )
        self.address = ""
        """`host:port` of the Flight listener; the same after a restart."""
        self.kafka_address = ""
        """`host:port` of the Kafka listener; empty without one."""
        self.on_request: Hook | None = None
        """Called with each request from a Flight client before it takes effect, on the thread that
        serves it. It may inspect the request, wait, raise one of sparklog's errors, which rejects
        the request, or raise `ConnectionCut`."""
        self.on_answer: Hook | None = None
        """Called after an append or action has taken effect, before its answer. It may inspect the
        request, wait, or raise `ConnectionCut`, which loses only the answer."""

    @property
    def is_running(self) -> bool:
        """True between a start and a stop, unless the broker has ended on its own."""
        agent = self._agent
        return agent is not None and agent.failure is None

    def connect(self) -> Log:
        """Opens a log at the broker's address; it is closed with the broker, if not before."""
        log = connecting.connect(self.address)
        self._logs.append(log)
        return log

    # -------------------------------------------------------------------------- faults

    def fail_next(
        self,
        operation: Operation,
        *,
        path: str = "",
        count: int = 1,
        error: Exception | None = None,
        answer_only: bool = False,
    ) -> None:
        """Makes the next requests to the store, or from Flight clients, fail.

        Args:
            operation: "put", "get", "list" or "delete" to the store; "append", "read" or "action"
                from clients.
            path: only requests whose path has this prefix. To the store, the path of the object or
                folder: "wal/" for acks, "topics/orders/" for the table of a topic, "meta/" for
                topics and brokers. From clients, topic and partition, "orders/0", or the name of
                the action, "topics.create".
            count: how many of them fail.
            error: the error to raise. By default the store raises `StorageUnavailable`, after which
                the broker retries, and client connections break.
            answer_only: the request takes effect, and only its answer is lost. For "append",
                "action" and "put", after which the broker reads to find out the outcome.

        Raises `BadOption` for an unknown operation, or `answer_only` for one without an effect.
        """
        _check_operation(operation)
        if arguments.flag("answer_only", answer_only) and operation not in _WITH_ANSWER:
            reason = f"only the answer to one of {', '.join(_WITH_ANSWER)} can be lost"
            raise errors.BadOption(option="answer_only", value=True, reason=reason)

        def fail(name: str, found: str) -> None:
            if error is not None:
                raise error
            if name not in _OF_STORE:
                raise ConnectionCut
            reason = "a fault of the test"
            if answer_only:
                raise PutUnresolved(found, reason)
            raise errors.StorageUnavailable(operation=name, path=found, reason=reason)

        self._add(operation, path, count, fail, is_after=answer_only)

    def delay_next(
        self, operation: Operation, seconds: float, *, path: str = "", count: int = 1
    ) -> None:
        """Makes the next requests wait before they take effect.

        `operation`, `path` and `count` are those of `fail_next`. Raises `BadOption`.
        """
        _check_operation(operation)
        seconds = arguments.number("seconds", seconds, least=0)
        self._add(operation, path, count, lambda *_: time.sleep(seconds), is_after=False)

    def clear_faults(self) -> None:
        """Removes the faults that no request has hit yet."""
        self._faults.clear()

    @property
    def pending_faults(self) -> int:
        """The number of failures and delays that no request has hit yet."""
        return self._faults.pending

    def _add(
        self,
        operation: Operation,
        path: str,
        count: int,
        act: Callable[[str, str], None],
        *,
        is_after: bool,
    ) -> None:
        if not isinstance(path, str):
            raise errors.BadOption(option="path", value=repr(path), reason="expected a str")
        self._faults.add(
            _Fault(
                operation=operation,
                prefix=path,
                act=act,
                is_after=is_after,
                left=arguments.whole("count", count, least=1),
            )
        )

    def cut_connections(self) -> None:
        """Breaks all client connections, including Kafka's. They may reconnect."""
        agent = self._agent  # without the lock: `stop` holds it until all requests have ended
        if agent is not None:
            agent.listeners.cut_connections()

    # -------------------------------------------------------------------------- running

    def stop(self) -> None:
        """Shuts the broker down cleanly: clients receive no response until `restart`.

        All records are published first, unless the store fails.
        """
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is not None:
                agent.stop("the test stops it")

    def crash(self) -> None:
        """Ends the broker like `kill -9`: pending requests get no response, nothing more
        is published, and its heartbeat does not say that it has stopped.

        `restart` recovers from the write-ahead log.
        """
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is not None:
                agent.crash()

    def restart(self) -> None:
        """Stops the broker if it is running, and restarts it on the same store and addresses."""
        self.stop()
        with self._lock:
            if not structlog.is_configured():
                configure(self._settings.log)
            agent = Agent(
                self._settings,
                store=self._store,
                kind=BrokerKind.STANDING,
                take_over=True,
                hooks=_Hooks(self, self._faults),
            )
            agent.start()
            self._agent = agent
            self.address, self.kafka_address = agent.address, agent.kafka_address
            # The next one listens on the same ports.
            replace = msgspec.structs.replace
            flight = replace(self._settings.flight, listen=self.address)
            kafka = replace(self._settings.kafka, listen=self.kafka_address)
            self._settings = replace(self._settings, flight=flight, kafka=kafka)

    def close(self) -> None:
        """Removes all faults, closes the logs of `connect`, and stops the broker."""
        self.clear_faults()
        for log in self._logs:
            try:
                log.close()
            except errors.SparklogError as error:  # for example, from a producer without an ack
                _log.warning("a log did not close cleanly: %s", error)
        self._logs.clear()
        self.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"at {self.address}" if self.is_running else "stopped"
        return f"<sparklog.testing.Broker {state}>"


def _check_operation(operation: str) -> None:
    if operation not in _OPERATIONS:
        reason = f"expected one of {', '.join(map(repr, _OPERATIONS))}"
        raise errors.BadOption(option="operation", value=repr(operation), reason=reason)


# ------------------------------------------------------------------------------ faults


@dataclass(slots=True, kw_only=True)
class _Fault:
    operation: Operation
    prefix: str
    act: Callable[[str, str], None]
    is_after: bool
    left: int


class _Faults(NoFaults):
    """Faults in the order in which they were added; a request hits the first that matches."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[_Fault] = []

    def add(self, fault: _Fault) -> None:
        with self._lock:
            self._faults.append(fault)

    def clear(self) -> None:
        with self._lock:
            self._faults.clear()

    @property
    def pending(self) -> int:
        with self._lock:
            return sum(each.left for each in self._faults)

    def before(self, operation: StoreOperation, path: str, /) -> None:
        self.meet(operation, _OF_STORE.get(operation), path, is_after=False)

    def after(self, operation: StoreOperation, path: str, /) -> None:
        self.meet(operation, _OF_STORE.get(operation), path, is_after=True)

    def meet(self, name: str, operation: Operation | None, path: str, *, is_after: bool) -> None:
        """Triggers the first fault that matches the request."""
        with self._lock:
            fault = next(
                (
                    each
                    for each in self._faults
                    if each.is_after is is_after
                    and each.operation == operation
                    and path.startswith(each.prefix)
                ),
                None,
            )
            if fault is None:
                return
            fault.left -= 1
            if not fault.left:
                self._faults.remove(fault)
        fault.act(name, path)


class _Hooks:
    """Passes client requests to the test's hooks, and then to the faults.

    After a rejected batch, later ones from its producer are rejected too, as in the broker:
    otherwise a producer that the broker does not know yet would begin with one of them.
    """

    def __init__(self, broker: Broker, faults: _Faults) -> None:
        self._broker = broker
        self._faults = faults
        self._lock = threading.Lock()
        self._refusals = Refusals()

    def before(self, request: Request, /) -> None:
        header = request.message
        if not isinstance(header, AppendHeader):
            self._meet(request, self._broker.on_request, is_after=False)
            return
        sequence = ProducerSequence(header.producer_id, header.producer_epoch, header.base_sequence)
        batch = request.topic, request.partition, sequence, time.monotonic()
        with self._lock:
            self._refusals.check(*batch, topic=request.topic)
        try:
            self._meet(request, self._broker.on_request, is_after=False)
        except errors.Retriable:
            with self._lock:
                self._refusals.record(*batch)
            raise

    def after(self, request: Request, /) -> None:
        self._meet(request, self._broker.on_answer, is_after=True)

    def _meet(self, request: Request, hook: Hook | None, *, is_after: bool) -> None:
        operation = _OF_CLIENTS.get(request.name, "action")
        is_action = operation == "action"
        path = request.name if is_action else f"{request.topic}/{request.partition}"
        try:
            if hook is not None:
                hook(request)
            self._faults.meet(request.name, operation, path, is_after=is_after)
        except ConnectionCut:
            self._broker.cut_connections()
            raise PeerGone from None


def __dir__() -> list[str]:
    return sorted(__all__)
