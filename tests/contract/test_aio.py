"""The asyncio client against an embedded broker: results, cancellation, errors and closing."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import sparklog
from sparklog import aio, errors
from tests.support.waiting import wait_until

Test = Callable[[aio.Log], Coroutine[Any, Any, None]]

SECONDS = 30.0


def run(root: Path, test: Test) -> None:
    """Runs a test with a log of one topic `t` of two partitions."""

    async def main() -> None:
        async with aio.connect(root) as log:
            await log.create_topic("t", partitions=2)
            await asyncio.wait_for(test(log), SECONDS)

    asyncio.run(main())


async def fill(log: aio.Log, count: int, *, partition: int = 0) -> None:
    """Sends that many records to one partition of `t`."""
    async with log.producer() as producer:
        values = [b"%d" % number for number in range(count)]
        await asyncio.gather(*(producer.send("t", each, partition=partition) for each in values))


def offsets(records: list[sparklog.Record]) -> list[int]:
    """The offsets of records."""
    return [each.offset for each in records]


@pytest.fixture
def has_no_threads() -> Callable[[], bool]:
    """Returns a check that all threads of logs and brokers that the test started have ended."""
    before = set(threading.enumerate())
    return lambda: (
        not any("sparklog" in each.name for each in threading.enumerate() if each not in before)
    )


# ------------------------------------------------------------------------------ records


def test_round_trip(tmp_path: Path) -> None:
    """Records that are sent are iterated over, in their order, until the end."""

    async def test(log: aio.Log) -> None:
        async with log.producer(linger_ms=1) as producer:
            first = await producer.send("t", b"0", key=b"k", partition=1)
            assert (first.topic, first.partition, first.offset) == ("t", 1, 0)
            rest = [producer.send("t", b"%d" % number, partition=1) for number in range(1, 300)]
            found = await asyncio.gather(*rest)
            assert [each.offset for each in found] == list(range(1, 300))
        values = [record.value async for record in log.consumer("t", follow=False)]
        assert values == [b"%d" % number for number in range(300)]

    run(tmp_path, test)


def test_tables(tmp_path: Path) -> None:
    """Tables are sent and read."""

    async def test(log: aio.Log) -> None:
        async with log.producer() as producer:
            ranges = await producer.send_table("t", pa.table({"n": [1, 2]}), as_json=True)
            await producer.flush(SECONDS)
        assert sum(each.rows for each in ranges) == 2
        table = await log.read("t", values="json")
        assert table["value"].to_pylist() == [{"n": 1}, {"n": 2}]

    run(tmp_path, test)


def test_the_loop_is_never_blocked(tmp_path: Path) -> None:
    """While consumers wait for records, other tasks run, and records arrive at once."""

    async def test(log: aio.Log) -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        async with log.consumer("t") as one, log.consumer("t") as two:
            waiting = [asyncio.create_task(each.poll()) for each in (one, two)]
            await asyncio.sleep(0.6)
            assert ticks > 10
            await fill(log, 1)
            for each in waiting:
                assert offsets(await each) == [0]
        ticking.cancel()

    run(tmp_path, test)


def test_poll_returns_in_time(tmp_path: Path) -> None:
    """A poll returns nothing after its timeout, and at most `max_poll_rows` records."""

    async def test(log: aio.Log) -> None:
        async with log.consumer("t", max_poll_rows=2) as consumer:
            began = time.monotonic()
            assert await consumer.poll(0.4) == []
            assert 0.4 <= time.monotonic() - began < 5
            await fill(log, 3)
            polled = [offsets(await consumer.poll(SECONDS)) for _ in range(2)]
            while sum(map(len, polled)) < 3:
                polled.append(offsets(await consumer.poll(SECONDS)))
            assert [offset for each in polled for offset in each] == [0, 1, 2]
            assert max(map(len, polled)) <= 2
            assert await consumer.poll(0) == []

    run(tmp_path, test)


# ------------------------------------------------------------------------------ cancellation


def test_cancelled_polls_lose_nothing(tmp_path: Path) -> None:
    """Records of a poll that was cancelled are returned by the next one, once and in order."""

    async def test(log: aio.Log) -> None:
        async with log.consumer("t", max_poll_rows=7) as consumer:
            filling = asyncio.create_task(fill(log, 500))
            found: list[int] = []
            attempts = 0
            while len(found) < 500:
                attempts += 1
                seconds = 0.001 * (attempts % 4)
                with contextlib.suppress(TimeoutError):
                    found += offsets(await asyncio.wait_for(consumer.poll(), seconds))
            await filling
            assert found == list(range(500))

    run(tmp_path, test)


def test_records_of_a_cancelled_poll_are_not_committed(tmp_path: Path) -> None:
    """A close commits only the records that were returned; a new member gets the others."""

    async def test(log: aio.Log) -> None:
        await fill(log, 5)
        consumer = log.consumer("t", group="g", max_poll_rows=3)
        assert offsets(await consumer.poll(SECONDS)) == [0, 1, 2]
        waiting = asyncio.create_task(consumer.poll(SECONDS))
        await asyncio.sleep(0)  # it is in the thread now
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await consumer.close()
        assert (await log.group_offsets("g"))["t", 0] == 3
        async with log.consumer("t", group="g") as other:
            assert offsets(await other.poll(SECONDS)) == [3, 4]

    run(tmp_path, test)


def test_commit_counts_returned_records(tmp_path: Path) -> None:
    """Within an iteration, `commit` and `position` are after the record that was returned last."""

    async def test(log: aio.Log) -> None:
        await fill(log, 10)
        async with log.consumer("t", group="g", auto_commit=False) as consumer:
            async for record in consumer:
                if record.offset == 4:
                    break
            assert await consumer.position("t", 0) == 5
            await consumer.commit()
            assert (await consumer.committed())["t", 0] == 5
            assert await consumer.assignment() == [("t", 0), ("t", 1)]
            await consumer.commit({("t", 0): 2})
            assert (await log.lag("g")).total == 8

    run(tmp_path, test)


def test_seek_and_pause_within_an_iteration(tmp_path: Path) -> None:
    """Records that were read ahead are dropped by `seek`, and kept for later by `pause`."""

    async def test(log: aio.Log) -> None:
        await fill(log, 10)
        async with log.consumer("t", follow=False) as consumer:
            assert (await anext(consumer)).offset == 0
            await consumer.seek("t", 0, 7)
            assert (await anext(consumer)).offset == 7
            await consumer.pause("t")
            assert await consumer.poll(0.1) == []
            await consumer.resume("t")
            assert offsets([each async for each in consumer]) == [8, 9]
            assert await consumer.end_offsets() == {("t", 0): 10, ("t", 1): 0}
            assert await consumer.beginning_offsets() == {("t", 0): 0, ("t", 1): 0}

    run(tmp_path, test)


def test_cancelled_opening_is_closed(tmp_path: Path, has_no_threads: Callable[[], bool]) -> None:
    """A log whose opening is cancelled leaves no broker behind."""

    async def main() -> None:
        opening = asyncio.create_task(open_log())
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening

    async def open_log() -> aio.Log:
        return await aio.connect(tmp_path)

    asyncio.run(main())
    wait_until(has_no_threads, "the threads of the log end")


# ------------------------------------------------------------------------------ errors, closing


def test_errors_are_raised_where_they_belong(tmp_path: Path) -> None:
    """Refusals reach the caller that was refused, and the objects work on."""

    async def test(log: aio.Log) -> None:
        with pytest.raises(errors.TopicExists):
            await log.create_topic("t")
        consumer = log.consumer("nowhere")
        with pytest.raises(errors.UnknownTopic):
            await consumer.poll(1)
        async with log.producer() as producer:
            with pytest.raises(errors.UnknownTopic):
                await producer.send("nowhere", b"")
            await log.create_topic("orders")
            with pytest.raises(errors.UnknownTopic, match="Did you mean 'orders'"):
                await producer.send("ordres", b"")
            with pytest.raises(errors.WrongSchema):
                await producer.send("t", "text")
            assert (await producer.send("t", b"")).offset == 0
        with pytest.raises(errors.BadRequest, match="closed"):
            await producer.send("t", b"")
        reader = log.consumer("t", value_deserializer=sparklog.json_deserializer, follow=False)
        with pytest.raises(errors.DeserializationFailed) as raised:
            await reader.poll()
        assert isinstance(raised.value.__cause__, msgspec.DecodeError)

    run(tmp_path, test)
    with pytest.raises(errors.BrokerUnavailable):
        asyncio.run(aio.connect("127.0.0.1:1").__aenter__())
    unknown: Any = {"detach": True}
    with pytest.raises(TypeError, match="did you mean 'detached'"):
        aio.connect(tmp_path, **unknown)


@pytest.mark.parametrize("is_iterating", [False, True])
@pytest.mark.parametrize("part", ["key", "value"])
def test_a_record_that_is_not_deserialized(tmp_path: Path, part: str, is_iterating: bool) -> None:
    """An error names such a record, after those before it, until a `seek` passes it."""

    async def test(log: aio.Log) -> None:
        async with log.producer() as producer:
            for data in (b"1", b"2", b"not JSON", b"4"):
                await producer.send("t", data, key=data, partition=1)
        deserializers: Any = {f"{part}_deserializer": sparklog.json_deserializer}
        async with log.consumer("t", follow=False, **deserializers) as consumer:
            found: list[Any] = []

            async def take_all() -> None:
                if is_iterating:
                    async for record in consumer:
                        found.extend([getattr(record, part)])
                while records := await consumer.poll():
                    found.extend(getattr(each, part) for each in records)

            for _ in range(2):
                with pytest.raises(errors.DeserializationFailed) as raised:
                    await take_all()
                assert (found, await consumer.position("t", 1)) == ([1, 2], 2)
            error = raised.value
            assert (error.topic, error.partition, error.offset, error.part) == ("t", 1, 2, part)
            await consumer.seek(error.topic, error.partition, error.offset + 1)
            await take_all()
            assert found == [1, 2, 4]

    run(tmp_path, test)


def test_a_seek_passes_a_record_that_a_cancelled_poll_met(tmp_path: Path) -> None:
    """The error of a cancelled poll belongs to the next poll, and not to a `seek` before it."""

    async def test(log: aio.Log) -> None:
        await fill(log, 2)
        began, may_fail = threading.Event(), threading.Event()

        def refuse_the_first(data: bytes) -> bytes:
            if data == b"0":
                began.set()
                assert may_fail.wait(SECONDS)
                raise ValueError("not this one")
            return data

        async with log.consumer("t", value_deserializer=refuse_the_first) as consumer:
            polling = asyncio.create_task(consumer.poll())
            assert await asyncio.to_thread(began.wait, SECONDS)
            polling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await polling
            may_fail.set()
            assert await consumer.position("t", 0) == 0
            with pytest.raises(errors.DeserializationFailed, match="ValueError: not this one"):
                await consumer.poll()
            await consumer.seek("t", 0, 1)
            assert offsets(await consumer.poll()) == [1]

    run(tmp_path, test)


def test_a_close_ends_a_poll_of_another_task(tmp_path: Path) -> None:
    """A consumer that waits for records is closed within a second, and its poll is refused."""

    async def test(log: aio.Log) -> None:
        consumer = log.consumer("t")
        waiting = asyncio.create_task(consumer.poll())
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await consumer.close()
        await consumer.close()
        assert time.monotonic() - began < 5
        with pytest.raises(errors.BadRequest, match="closed"):
            await waiting
        with pytest.raises(errors.BadRequest, match="closed"):
            await consumer.poll()

    run(tmp_path, test)


def test_a_closed_log_refuses_every_call(tmp_path: Path) -> None:
    """A log that is closed, or is closing, opens no producer and no consumer, as it reads none."""

    async def check_refusals(log: aio.Log) -> None:
        refused = pytest.raises(errors.BadRequest, match="this connection is closed")
        with refused:
            log.producer()
        with refused:
            log.consumer("t")
        for call in (log.topics, lambda: log.read("t")):
            with refused:
                await call()

    async def main() -> None:
        log = await aio.connect(tmp_path)
        closing = asyncio.create_task(log.close())
        await asyncio.sleep(0)
        await check_refusals(log)
        await closing
        await check_refusals(log)

    asyncio.run(main())


def test_a_log_closes_its_producers_and_consumers(
    tmp_path: Path, has_no_threads: Callable[[], bool]
) -> None:
    """Closing the log delivers what its producers hold and ends its threads."""

    async def main() -> None:
        log = await aio.connect(tmp_path)
        assert repr(log) == f"aio.Log({str(tmp_path)!r})"
        await log.create_topic("t")
        producer, consumer = log.producer(linger_ms=60_000), log.consumer("t")
        assert await consumer.poll(0) == []
        sending = asyncio.create_task(producer.send("t", b"last"))
        await asyncio.sleep(0)
        await log.close()
        await log.close()
        assert (await sending).offset == 0

    asyncio.run(main())
    wait_until(has_no_threads, "the threads of the log end")
    with sparklog.connect(tmp_path) as log:
        assert log.read("t")["value"].to_pylist() == [b"last"]


def test_assigned_partitions_and_statistics(tmp_path: Path) -> None:
    """A consumer without a group reads the partitions of `assign`; both clients count."""

    async def main() -> None:
        async with aio.connect(tmp_path) as log:
            await log.create_topic("t", 2)
            async with log.producer() as producer, log.consumer() as consumer:
                for number in range(6):
                    await producer.send("t", b"%d" % number, partition=number % 2)
                assert producer.statistics().records == 6
                await consumer.assign([("t", 1)])
                first = await anext(consumer)
                await consumer.assign([("t", 0), ("t", 1)])
                assert await consumer.position("t", 1) == 1
                rest = [await anext(consumer) for _ in range(5)]
                assert sorted(each.value for each in [first, *rest]) == [
                    b"%d" % number for number in range(6)
                ]
                assert (await consumer.statistics()).lag == 0
            async with log.consumer("t", group="g", auto_commit=False) as member:
                await member.poll(SECONDS)
                await member.commit({("t", 0): sparklog.OffsetAndMetadata(2, "half")})
                assert (await member.committed_metadata())["t", 0].metadata == "half"

    asyncio.run(main())


# ------------------------------------------------------------------------------ completeness


@pytest.mark.parametrize(
    ("wrapped", "wrapper", "without"),
    [
        (sparklog.Log, aio.Log, set()),
        (sparklog.Producer, aio.Producer, set()),
        (sparklog.Consumer, aio.Consumer, {"batches"}),
    ],
)
def test_every_method_has_a_counterpart(wrapped: type, wrapper: type, without: set[str]) -> None:
    """The asyncio classes have the public methods of those they wrap, with their parameters."""
    names = {name for name in dir(wrapped) if not name.startswith("_")} - without
    assert names <= set(dir(wrapper))
    for name in names:
        method = getattr(wrapped, name)
        if callable(method):
            given = list(inspect.signature(method).parameters)
            assert list(inspect.signature(getattr(wrapper, name)).parameters) == given, name
