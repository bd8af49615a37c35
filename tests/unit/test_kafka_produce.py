"""Produce requests at a full writer queue: each queued batch becomes durable."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from sparklog.broker.broker import Broker, PendingAppend
from sparklog.broker.counts import ListenerCounts
from sparklog.broker.kafka import messages, scheduler
from sparklog.broker.kafka.apis import produce
from sparklog.broker.kafka.registry import Outcome
from sparklog.broker.kafka.scheduler import LoopScheduler
from sparklog.broker.log.flush import WriterLimits
from sparklog.clock import ManualClock, SystemClock
from sparklog.storage.objects import MemoryStore
from tests.support.batches import Record, built
from tests.support.brokers import Rig, RigOptions
from tests.support.kafkarequests import AT_MS, PRODUCE, produce_fields
from tests.support.kafkas import Frames

BATCH = built([Record(AT_MS, None, b"v")])


class Context:
    """The parts of `HandlerContext` that Produce uses, without a socket or threads."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.counts = ListenerCounts({})
        self.writer_queue_lock = asyncio.Lock()
        self.scheduler = LoopScheduler(SystemClock())
        self.pending: list[PendingAppend] = []
        """The appends to make durable, which happens after `may_flush` is set."""
        self.may_flush = asyncio.Event()

    def when_durable(
        self, pending_appends: Sequence[PendingAppend]
    ) -> asyncio.Future[list[Outcome]]:
        self.pending += [each for each in pending_appends if each not in self.pending]
        return asyncio.ensure_future(self._outcomes(list(pending_appends)))

    async def _outcomes(self, pending_appends: Sequence[PendingAppend]) -> list[Outcome]:
        await self.may_flush.wait()
        return [self.broker.wait(each) for each in pending_appends]


def rig(*, seconds: float, queue_bytes: int = 1) -> Rig:
    """A broker whose queue has room for one append, or more, with topic t of two partitions."""
    clock = ManualClock()
    bounds = WriterLimits(queue_bytes=queue_bytes)
    options = RigOptions(writer=bounds, submit_timeout_seconds=seconds)
    found = Rig(MemoryStore(clock), clock, options=options)
    found.create("t", 2)
    return found


def request(*partitions: int, acks: int = -1) -> messages.Request:
    """A batch for each of them."""
    data = [{"index": each, "records": BATCH} for each in partitions]
    fields = produce_fields("t", 0, None) | {"acks": acks}
    fields["topic_data"] = [{"name": "t", "partition_data": data}]
    return messages.read_request(Frames.frame(PRODUCE, 9, 1, fields)[4:])


async def handled(context: Any, asked: messages.Request) -> Any:
    """Handles a request until the connection may handle its next one."""
    return await produce._handle(context, asked)


async def settled() -> None:
    """Lets all tasks run until they wait."""
    for _ in range(5):
        await asyncio.sleep(0)


def codes(answer: Any) -> list[ErrorCode]:
    """Returns the error codes of the partitions, in the order of the request."""
    ((found,),) = ([each["partition_responses"]] for each in answer["responses"])
    return [each["error_code"] for each in found]


def test_queued_batches_become_durable_while_the_rest_waits() -> None:
    """The queued batches may be the ones that fill the queue; then the rest fits."""

    async def work() -> None:
        context = Context(rig(seconds=30).broker)
        handling = asyncio.create_task(handled(context, request(0, 1)))
        await settled()
        assert len(context.pending) == 1
        assert not handling.done()
        context.may_flush.set()
        assert codes(await (await handling)) == [ErrorCode.none, ErrorCode.none]

    asyncio.run(work())


@pytest.mark.parametrize("acks", [-1, 0])
def test_a_cancelled_request_leaves_nothing_behind(acks: int) -> None:
    """Its queued batches become durable, and the next request gets the queue."""

    async def work() -> None:
        context = Context(rig(seconds=30).broker)
        handling = asyncio.create_task(handled(context, request(0, 1, acks=acks)))
        await settled()
        behind = asyncio.create_task(handled(context, request(1)))
        await settled()
        handling.cancel()
        await asyncio.wait([handling])
        (first,) = context.pending
        context.may_flush.set()
        assert codes(await (await behind)) == [ErrorCode.none]
        assert first.done

    asyncio.run(work())


def test_requests_wait_for_the_queue_in_their_order() -> None:
    """A busy producer does not overtake a request that waits."""

    async def work() -> None:
        context = Context(rig(seconds=30).broker)
        first = await handled(context, request(0))
        waiting = asyncio.create_task(handled(context, request(1)))
        await settled()
        context.broker.wait(context.pending[0])
        late = asyncio.create_task(handled(context, request(0)))
        await settled()
        second = await waiting
        assert len(context.pending) == 2
        assert not late.done()
        context.may_flush.set()
        for answer in (first, second, await late):
            assert codes(await answer) == [ErrorCode.none]

    asyncio.run(work())


def test_a_request_of_many_batches_is_checked_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The event loop runs in between, however long the checks take."""
    monkeypatch.setattr(scheduler, "TURN_SECONDS", 0.0)

    async def work() -> None:
        context = Context(rig(seconds=0).broker)
        context.may_flush.set()
        handling = asyncio.create_task(handled(context, request(*[0] * 10)))
        rounds = 0
        while not handling.done():
            await asyncio.sleep(0)
            rounds += 1
        assert rounds >= 10
        await (await handling)

    asyncio.run(work())


def test_a_batch_that_waits_too_long_is_refused_alone() -> None:
    """The other batches of its request are acked."""

    async def work() -> None:
        context = Context(rig(seconds=0.02).broker)
        answer = await handled(context, request(0, 1))
        context.may_flush.set()
        assert codes(await answer) == [ErrorCode.none, ErrorCode.request_timed_out]

    asyncio.run(work())


@pytest.mark.parametrize(
    ("partitions", "is_plain"), [((0, 1), True), ((0, 2), False), ((0,) * 8, False)]
)
def test_small_replies_without_errors_are_written_without_kio(
    partitions: tuple[int, ...], is_plain: bool
) -> None:
    """A reply with an error, or of more than a few items, is kio's."""

    async def work() -> None:
        context = Context(rig(seconds=0, queue_bytes=1 << 20).broker)
        context.may_flush.set()
        answer = await (await handled(context, request(*partitions)))
        assert isinstance(answer, messages.PlainProduceReply) is is_plain
        assert len(codes(answer)) == len(partitions)

    asyncio.run(work())
