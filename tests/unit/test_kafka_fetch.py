"""Fetch requests: of many partitions whose records are in storage only, and of few records."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sparklog import errors, limits
from sparklog.broker.broker import Fetched
from sparklog.broker.kafka.access import OPEN
from sparklog.broker.kafka.apis import fetch
from sparklog.broker.kafka.apis.fetch import READ_AHEAD_PARTITIONS, READ_TOGETHER
from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.registry import HandlerContext, WorkerPool
from sparklog.broker.kafka.scheduler import LoopScheduler
from sparklog.clock import SystemClock

SIZE = 100
PARTITIONS = 150


class Broker:
    """Partitions with records in storage, which are in memory once they were read."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.together: list[int] = []
        """Partitions that a thread was asked to read together with others."""
        self.corrupt = -1
        self.looks: list[int] = []
        """The limits of reads from memory, in bytes."""

    def fetch_kafka(
        self,
        _name: str,
        number: int,
        offset: int,
        *,
        limit_bytes: int,
        only_memory: bool = False,
        **_: Any,
    ) -> Fetched | None:
        if only_memory:
            self.looks.append(limit_bytes)
        if number in self.read:
            return Fetched([bytes(SIZE)], offset + 1)
        if only_memory:
            return None
        if number == self.corrupt:
            raise errors.CorruptObject(path="x", check="a test")
        self.read.append(number)
        return Fetched([bytes(SIZE)], offset + 1)

    def read_kafka_together(self, places: list[tuple[str, int, int]]) -> None:
        self.together += [number for _, number, _ in places]
        if self.corrupt in self.together:
            raise errors.CorruptObject(path="x", check="a test")


class Context:
    """The parts of `HandlerContext` that reading ahead uses."""

    def __init__(self) -> None:
        self.broker = Broker()
        self.scheduler = LoopScheduler(SystemClock())
        self.calls = 0

    async def run_blocking(self, pool: WorkerPool, call: Callable[..., Any]) -> Any:
        assert pool is WorkerPool.READ
        self.calls += 1
        return await asyncio.to_thread(call)


def partitions_of(*, every: int = 1) -> list[fetch._FetchPartition]:
    """Partitions of which each third, for example, has a record."""
    return [
        fetch._FetchPartition(
            topic={},
            identity="t",
            name="t",
            number=number,
            offset=0,
            end=1 if number % every == 0 else 0,
            limit_bytes=1_000,
            leader_epoch=-1,
        )
        for number in range(PARTITIONS)
    ]


def read_ahead(context: Context, limit_bytes: int, *, every: int = 1) -> list[int]:
    """Reads for each partition in turn; returns those that are not in memory in their turn."""
    partitions = partitions_of(every=every)
    missed = []

    async def work() -> None:
        deadline = time.monotonic() + 60.0
        ahead = fetch._ReadAhead(cast("HandlerContext", context), partitions, deadline)
        for index, each in enumerate(partitions):
            await ahead.read(index, limit_bytes)
            if each.end and index not in context.broker.read:
                missed.append(index)

    asyncio.run(work())
    return missed


@pytest.mark.parametrize("every", [1, 3])
def test_a_thread_reads_many_partitions(every: int) -> None:
    """Partitions without records take no part, and the few threads take the others in turns."""
    context = Context()
    assert read_ahead(context, 1 << 20, every=every) == []
    assert sorted(context.broker.read) == list(range(0, PARTITIONS, every))
    assert sorted(context.broker.together) == list(range(0, PARTITIONS, every))
    rounds = -(-PARTITIONS // READ_AHEAD_PARTITIONS)
    assert context.calls == rounds * READ_TOGETHER


def test_no_more_is_read_ahead_than_a_response_takes() -> None:
    """Each thread ends once there is enough; the next partition begins another round."""
    context = Context()
    assert read_ahead(context, 10 * SIZE) == []
    assert sorted(context.broker.read) == list(range(PARTITIONS))
    most = 10 + READ_TOGETHER - 1
    assert context.calls >= PARTITIONS // most * READ_TOGETHER


def test_a_look_at_partitions_in_memory_is_short() -> None:
    """The loop of all clients looks at many of them in one turn, so it takes one batch of each."""
    context = Context()
    context.broker.read = list(range(PARTITIONS))
    assert read_ahead(context, 1 << 20) == []
    assert context.calls == 0
    assert context.broker.looks == [1] * PARTITIONS


def test_a_damaged_partition_does_not_end_the_others() -> None:
    """Its error is that of its own turn."""
    context = Context()
    context.broker.corrupt = 70
    assert read_ahead(context, 1 << 20) == [70]


class SlowBroker(Broker):
    """A storage that takes some time for each partition."""

    def fetch_kafka(self, *place: Any, only_memory: bool = False, **limits: Any) -> Fetched | None:
        if not only_memory:
            time.sleep(0.01)
        return super().fetch_kafka(*place, only_memory=only_memory, **limits)


def test_a_slow_storage_does_not_keep_a_response_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the partitions that were read in time, at least one; later requests get the others."""
    context = Context()
    context.broker = SlowBroker()
    left = partitions_of()
    counts = []
    for seconds in (0.0, 0.1, 60.0):
        monkeypatch.setattr(fetch, "READ_SECONDS", seconds)
        size, is_full = asyncio.run(fetch._read(cast("HandlerContext", context), left, 1 << 20))
        found = [each for each in left if each.chunks]
        counts.append(len(found))
        left = [each for each in left if not each.chunks]
        assert size == len(found) * SIZE
        assert is_full == bool(left)
    assert counts[0] == 1
    assert 1 < counts[1] < PARTITIONS - 1
    assert not left


def read_late(context: Context, monkeypatch: pytest.MonkeyPatch) -> list[fetch._FetchPartition]:
    """Reads partitions when no time is left, and returns them all."""
    monkeypatch.setattr(fetch, "READ_SECONDS", 0.0)
    partitions = partitions_of()
    _, is_full = asyncio.run(fetch._read(cast("HandlerContext", context), partitions, 1 << 20))
    assert is_full
    return partitions


def test_a_late_response_has_what_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partitions that were read ahead need no other request."""
    context = Context()
    context.broker.read = list(range(1, PARTITIONS, 2))
    found = [each.number for each in read_late(context, monkeypatch) if each.chunks]
    assert found == [0, *range(1, PARTITIONS, 2)]


def test_partitions_that_fail_slowly_do_not_keep_a_response_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A storage that does not answer takes its time for each of them."""
    context = Context()
    monkeypatch.setattr(Broker, "fetch_kafka", _fails_in_storage)
    failed = [each.number for each in read_late(context, monkeypatch) if each.code]
    assert failed == [0]


def _fails_in_storage(_broker: Broker, *_: Any, only_memory: bool = False, **__: Any) -> None:
    if not only_memory:
        raise errors.StorageUnavailable(operation="get", path="x", reason="a test")


# ------------------------------------------------------------------------------ turns


class Tailed(Broker):
    """One partition, with as many bytes of records as a test says."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        self.size_bytes = size_bytes
        self.end = 1
        self.read = [0]
        self.partitions = self

    def check_leader_epoch(self, *_: Any) -> None:
        pass

    def status(self, _name: str, _number: int) -> Any:
        return SimpleNamespace(start=0, end=self.end, appended_bytes=0)

    def bytes_from(self, *_: Any) -> int:
        return self.size_bytes


class Turns:
    """The parts of `HandlerContext` that a fetch of one partition uses."""

    def __init__(self, size_bytes: int, *, has_to_wait: bool) -> None:
        self.broker = Tailed(size_bytes)
        self.scheduler = LoopScheduler(SystemClock())
        self.turns = 0
        self._has_to_wait = has_to_wait

    async def wait_fetch_turn(self) -> bool:
        self.turns += 1
        self.broker.end += self._has_to_wait
        return self._has_to_wait


class NoBounds:
    """The memory of a request that has all it wants."""

    async def take_records(self, size: int) -> None:
        pass

    def release_records(self, left_bytes: int = 0) -> None:
        pass


def collected(context: Turns) -> fetch._FetchPartition:
    """Fetches the partition from its beginning."""
    partition = fetch._FetchPartition(
        topic={}, identity="t", number=0, offset=0, limit_bytes=1 << 20, leader_epoch=-1
    )
    body = SimpleNamespace(min_bytes=1, max_bytes=1 << 20, max_wait=timedelta(seconds=60))
    request = cast(
        "Request", SimpleNamespace(version=11, body=body, memory=NoBounds(), access=OPEN)
    )
    asyncio.run(
        fetch._collect(cast("HandlerContext", context), [partition], request, fetch.FETCH_BYTES)
    )
    return partition


@pytest.mark.parametrize("has_to_wait", [True, False])
def test_a_fetch_of_few_records_waits_for_its_turn(has_to_wait: bool) -> None:
    """It returns also the records that came meanwhile."""
    context = Turns(limits.KAFKA_SHORT_RECORDS_BYTES, has_to_wait=has_to_wait)
    partition = collected(context)
    count = 1 + has_to_wait
    assert (context.turns, partition.end, partition.size) == (1, count, count * SIZE)


def test_a_fetch_of_many_records_does_not_wait_for_a_turn() -> None:
    """A consumer that reads a backlog is not slowed down."""
    context = Turns(limits.KAFKA_SHORT_RECORDS_BYTES + 1, has_to_wait=True)
    assert collected(context).size == SIZE
    assert context.turns == 0
