"""Fetch requests of many partitions whose records are in storage only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from sparklog import errors, limits
from sparklog.broker.broker import Fetched
from sparklog.broker.kafka.apis import fetch
from sparklog.broker.kafka.registry import HandlerContext, WorkerPool

SIZE = 100
PARTITIONS = 150


class Broker:
    """Partitions with records in storage, which are in memory once they were read."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.corrupt = -1

    def fetch_kafka(
        self, _name: str, number: int, offset: int, *, only_memory: bool = False, **_: Any
    ) -> Fetched | None:
        if number in self.read:
            return Fetched([bytes(SIZE)], offset + 1)
        if only_memory:
            return None
        if number == self.corrupt:
            raise errors.CorruptObject(path="x", check="a test")
        self.read.append(number)
        return Fetched([bytes(SIZE)], offset + 1)


class Context:
    """The parts of `HandlerContext` that reading ahead uses."""

    def __init__(self) -> None:
        self.broker = Broker()
        self.calls = 0

    async def run_blocking(self, pool: WorkerPool, call: Callable[..., Any]) -> Any:
        assert pool is WorkerPool.READ
        self.calls += 1
        return await asyncio.to_thread(call)


def read_ahead(context: Context, limit_bytes: int, *, every: int = 1) -> list[int]:
    """Reads for each partition in turn; returns those that are not in memory in their turn."""
    partitions = [
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
    missed = []

    async def work() -> None:
        ahead = fetch._ReadAhead(cast("HandlerContext", context), partitions)
        for index, each in enumerate(partitions):
            await ahead.read(index, limit_bytes)
            if each.end and context.broker.fetch_kafka("t", index, 0, only_memory=True) is None:
                missed.append(index)

    asyncio.run(work())
    return missed


@pytest.mark.parametrize("every", [1, 3])
def test_a_thread_reads_many_partitions(every: int) -> None:
    """Partitions without records take no part, and the few threads take the others in turns."""
    context = Context()
    assert read_ahead(context, 1 << 20, every=every) == []
    assert sorted(context.broker.read) == list(range(0, PARTITIONS, every))
    rounds = -(-PARTITIONS // limits.KAFKA_READ_AHEAD_PARTITIONS)
    assert context.calls == rounds * limits.KAFKA_READ_TOGETHER


def test_no_more_is_read_ahead_than_a_response_takes() -> None:
    """Each thread ends once there is enough; the next partition begins another round."""
    context = Context()
    assert read_ahead(context, 10 * SIZE) == []
    assert sorted(context.broker.read) == list(range(PARTITIONS))
    most = 10 + limits.KAFKA_READ_TOGETHER - 1
    assert context.calls >= PARTITIONS // most * limits.KAFKA_READ_TOGETHER


def test_a_damaged_partition_does_not_end_the_others() -> None:
    """Its error is that of its own turn."""
    context = Context()
    context.broker.corrupt = 70
    assert read_ahead(context, 1 << 20) == [70]
