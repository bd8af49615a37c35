"""Records at a steady rate to some topics, and brokers on a store that counts their requests.

The store is in memory, so the brokers run in this process. The client that sends runs in another,
so that the two do not compete for the GIL.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import structlog

from sparklog.bench.report import Times, Workload
from sparklog.broker.agent import Agent
from sparklog.client.connection import Connection, ask
from sparklog.client.log import Log
from sparklog.clock import Clock
from sparklog.limits import KIB, MIB
from sparklog.settings import BrokerSettings, load_settings
from sparklog.storage.objects import (
    DelayedStore,
    MemoryStore,
    Payload,
    Purpose,
    Usage,
    total,
    usages,
)
from sparklog.storage.objects.base import pieces
from sparklog.storage.objects.memory_files import MemoryObject

DELAY_SECONDS: Final = 0.02
"""The time of a request in measures of an object store."""
_POOL_BYTES: Final = 32 * MIB
_STEP: Final = 1_000_003
"""Values begin this far apart in a pool of random bytes, so that they do not compress."""
_ACKS_PER_SECOND: Final = 2_000
"""At higher rates, the acks of some of the records are timed."""
_TICK_SECONDS: Final = 0.005
_SPILLED_BYTES: Final = 64 * KIB


class SpillingStore(MemoryStore):
    """A store in memory whose larger objects are in files without a name, which need none of it."""

    def __init__(self, clock: Clock, folder: Path) -> None:
        """`folder`: of the files."""
        super().__init__(clock)
        self._folder = folder

    def _new_object(self, data: Payload) -> MemoryObject:
        views = pieces(data)
        if sum(map(len, views)) < _SPILLED_BYTES:
            return super()._new_object(data)
        with tempfile.NamedTemporaryFile(dir=self._folder) as file:
            file.writelines(views)
            file.flush()
            with pa.memory_map(file.name) as mapped:
                content = mapped.read_buffer()
        return MemoryObject(content, self._clock.now_us())


@dataclass(frozen=True, slots=True, kw_only=True)
class Brokers:
    """Brokers in this process that share a root, and their client."""

    log: Log
    inner: MemoryStore
    """The store without delays."""
    stores: Sequence[DelayedStore]
    """That of each broker, which counts its requests."""
    settings: BrokerSettings
    address: str
    sender: Executor
    """Runs calls in another process, which starts with the first call."""

    def usages(self) -> dict[Purpose, Usage]:
        """Returns the requests of all brokers so far."""
        found = [usages(store) for store in self.stores]
        return {
            purpose: total(each[purpose] for each in found if purpose in each)
            for purpose in Purpose
        }

    def send(self, topics: Sequence[str], seconds: float, of: Workload) -> Future[Sent]:
        """Begins to send records at a fixed rate to each topic in turn."""
        return self.sender.submit(_send, self.address, topics, seconds, of)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Records that were sent, and the time until their acks."""

    records: int
    seconds: float
    acks: Times


@contextmanager
def brokers(
    inner: MemoryStore,
    delay_seconds: float,
    overrides: Mapping[str, Any] | None = None,
    *,
    count: int = 1,
) -> Iterator[Brokers]:
    """Starts brokers; each request to `inner` takes `delay_seconds`.

    `overrides`: settings by dotted name, as on a command line.
    """
    given = {
        "root": inner.uri,
        "flight.listen": "127.0.0.1:0",
        "kafka.listen": "",
        **(overrides or {}),
    }
    stores = [DelayedStore(inner, delay_seconds) for _ in range(count)]
    with ExitStack() as stack:
        stack.enter_context(_only_errors())
        agents = [
            stack.enter_context(
                Agent(load_settings(None, {}, given | {"id": number}), store=store, ask=ask)
            )
            for number, store in enumerate(stores)
        ]
        address = agents[0].address
        yield Brokers(
            log=stack.enter_context(Log(Connection(lambda: address))),
            inner=inner,
            stores=stores,
            settings=agents[0].settings,
            address=address,
            sender=stack.enter_context(ProcessPoolExecutor(1, get_context("spawn"))),
        )


@contextmanager
def _only_errors() -> Iterator[None]:
    """Keeps the brokers in this process from writing log lines between the figures."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    try:
        yield
    finally:
        structlog.configure(**before)


def _send(address: str, topics: Sequence[str], seconds: float, of: Workload) -> Sent:
    times = Times()

    def acked(sent: float, _: object) -> None:
        times.add(time.perf_counter() - sent)

    rate = len(topics) * of.records_per_second
    timed = max(round(rate / _ACKS_PER_SECOND), 1)
    random = os.urandom(_POOL_BYTES)
    last = _POOL_BYTES - of.record_bytes
    count, began = 0, time.perf_counter()
    with Log(Connection(lambda: address)) as log, log.producer() as producer:
        while (elapsed := time.perf_counter() - began) < seconds:
            while count < elapsed * rate:
                start = count * _STEP % last
                value = random[start : start + of.record_bytes]
                future = producer.send(topics[count % len(topics)], value)
                if not count % timed:
                    future.add_done_callback(functools.partial(acked, time.perf_counter()))
                count += 1
            next_due = began + count / rate
            time.sleep(max(next_due - time.perf_counter(), _TICK_SECONDS if timed > 1 else 0.0))
    return Sent(records=count, seconds=time.perf_counter() - began, acks=times)
