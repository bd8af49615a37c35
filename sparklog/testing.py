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

The broker runs in the process of the test and listens on free ports of 127.0.0.1. It differs from
`sparklog broker` only in its store: an acked record survives `stop` and `restart`, and is lost with
the process. The tables are in memory too, so `log.read` reads them, but not Delta Lake or Spark.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, Self

import msgspec
import structlog

from sparklog import client, connecting, errors
from sparklog.broker.agent import Agent
from sparklog.broker.logging import configure
from sparklog.client import arguments
from sparklog.clock import SystemClock
from sparklog.settings import load_settings
from sparklog.storage.metadata import BrokerKind
from sparklog.storage.objects import MemoryStore, NoFaults, PutUnresolved
from sparklog.storage.objects.memory import Operation as StoreOperation

__all__ = ["Broker", "Operation", "broker"]

Operation = Literal["put", "get", "list", "delete"]
"""Requests to the object store, by kind."""

_ANY_PORT: Final = "127.0.0.1:0"
_KINDS: Final[Mapping[str, frozenset[StoreOperation]]] = {
    "put": frozenset({"put", "put_new"}),
    "get": frozenset({"get", "get_range", "open", "stat"}),
    "list": frozenset({"list_after", "folders", "walk"}),
    "delete": frozenset({"delete"}),
}
_numbers = itertools.count(1)

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def broker(
    *, kafka: bool = False, settings: Mapping[str, str | int | float | bool] | None = None
) -> Iterator[Broker]:
    """Starts a broker on an empty store, and stops it at the end of the `with` statement.

    Args:
        kafka: listen for Kafka clients too, at `kafka_address`. Needs the extra `sparklog[broker]`.
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
    """A broker in this process, its store, and the faults of that store. Thread-safe.

    `sparklog.testing.broker` starts it.
    """

    def __init__(self, *, kafka: bool, settings: Mapping[str, str | int | float | bool]) -> None:
        self._lock = threading.Lock()
        self._agent: Agent | None = None
        self._logs: list[client.Log] = []
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
            },
        )
        self.address = ""
        """`host:port` of the Flight listener; the same after a restart."""
        self.kafka_address = ""
        """`host:port` of the Kafka listener; empty without one."""

    @property
    def is_running(self) -> bool:
        """True between a start and a stop, unless the broker has ended by itself."""
        agent = self._agent
        return agent is not None and agent.failure is None

    def connect(self) -> client.Log:
        """Opens a log at the broker's address; it is closed with the broker at the latest."""
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
        """Makes the next requests to the store fail.

        Args:
            operation: "put", "get", "list" or "delete".
            path: only requests for objects or folders whose path begins so: "wal/" for acks,
                "topics/orders/" for the table of a topic, "meta/" for topics and brokers.
            count: how many of them fail.
            error: the error; `StorageUnavailable` by default, after which the broker tries again.
            answer_only: the request has its effect, and only its answer is lost. For "put", whose
                outcome the broker then finds out by reading.

        Raises `BadOption` for an unknown operation or `answer_only` of another than "put".
        """
        _check_operation(operation)
        if arguments.flag("answer_only", answer_only) and operation != "put":
            raise errors.BadOption(
                option="answer_only", value=True, reason="only the answer to a put can be lost"
            )

        def fail(name: StoreOperation, found: str) -> None:
            if error is not None:
                raise error
            reason = "a fault of the test"
            if answer_only:
                raise PutUnresolved(found, reason)
            raise errors.StorageUnavailable(operation=name, path=found, reason=reason)

        self._add(operation, path, count, fail, is_after=answer_only)

    def delay_next(
        self, operation: Operation, seconds: float, *, path: str = "", count: int = 1
    ) -> None:
        """Makes the next requests to the store wait before they have an effect.

        `operation`, `path` and `count` are those of `fail_next`. Raises `BadOption`.
        """
        _check_operation(operation)
        seconds = arguments.number("seconds", seconds, least=0)
        self._add(operation, path, count, lambda *_: time.sleep(seconds), is_after=False)

    def clear_faults(self) -> None:
        """Removes the faults that no request has met yet."""
        self._faults.clear()

    @property
    def pending_faults(self) -> int:
        """The number of failures and delays that no request has met yet."""
        return self._faults.pending

    def _add(
        self,
        operation: str,
        path: str,
        count: int,
        act: Callable[[StoreOperation, str], None],
        *,
        is_after: bool,
    ) -> None:
        if not isinstance(path, str):
            raise errors.BadOption(option="path", value=repr(path), reason="expected a str")
        self._faults.add(
            _Fault(
                operations=_KINDS[operation],
                prefix=path,
                act=act,
                is_after=is_after,
                left=arguments.whole("count", count, least=1),
            )
        )

    # -------------------------------------------------------------------------- running

    def stop(self) -> None:
        """Stops the broker in good order: clients get no answer until `restart`.

        All records are published first, unless the store fails.
        """
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is not None:
                agent.stop("the test stops it")

    def restart(self) -> None:
        """Stops the broker if it runs, and starts it again on its store and at its addresses."""
        self.stop()
        with self._lock:
            if not structlog.is_configured():
                configure(self._settings.log)
            agent = Agent(
                self._settings, store=self._store, kind=BrokerKind.STANDING, take_over=True
            )
            agent.start()
            self._agent = agent
            self.address, self.kafka_address = agent.address, agent.kafka_address
            # The next one listens at the same ports.
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
            except errors.SparklogError as error:  # for example of a producer without an ack
                _log.warning("a log did not close in good order: %s", error)
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
    if operation not in _KINDS:
        reason = f"expected one of {', '.join(map(repr, _KINDS))}"
        raise errors.BadOption(option="operation", value=repr(operation), reason=reason)


# ------------------------------------------------------------------------------ faults of the store


@dataclass(slots=True, kw_only=True)
class _Fault:
    operations: frozenset[StoreOperation]
    prefix: str
    act: Callable[[StoreOperation, str], None]
    is_after: bool
    left: int


class _Faults(NoFaults):
    """Faults in the order in which they were added; a request meets the first that fits."""

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
        self._meet(operation, path, is_after=False)

    def after(self, operation: StoreOperation, path: str, /) -> None:
        self._meet(operation, path, is_after=True)

    def _meet(self, operation: StoreOperation, path: str, *, is_after: bool) -> None:
        with self._lock:
            fault = next(
                (
                    each
                    for each in self._faults
                    if each.is_after is is_after
                    and operation in each.operations
                    and path.startswith(each.prefix)
                ),
                None,
            )
            if fault is None:
                return
            fault.left -= 1
            if not fault.left:
                self._faults.remove(fault)
        fault.act(operation, path)
