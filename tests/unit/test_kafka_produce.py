"""Produce requests at a broker that has no room: what is queued of them becomes durable."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from sparklog.broker.core import Core, Ticket
from sparklog.broker.kafka import messages
from sparklog.broker.kafka.apis import produce
from sparklog.broker.kafka.registry import Outcome
from sparklog.broker.kafka.turns import Turns
from sparklog.broker.writer import WriterLimits
from sparklog.clock import ManualClock
from sparklog.storage.objects import MemoryStore
from tests.support.batches import Record, built
from tests.support.brokers import Rig, RigOptions
from tests.support.kafkarequests import AT_MS, PRODUCE, produce_fields
from tests.support.kafkas import Frames

BATCH = built([Record(AT_MS, None, b"v")])


class Door:
    """What the handler asks for, without a socket or threads."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.room = asyncio.Lock()
        self.turns = Turns()
        self.told: list[Ticket] = []
        """What is to be made durable, which happens once it may."""
        self.may_flush = asyncio.Event()

    def durable(self, tickets: Sequence[Ticket]) -> asyncio.Future[list[Outcome]]:
        self.told += [each for each in tickets if each not in self.told]
        return asyncio.ensure_future(self._outcomes(list(tickets)))

    async def _outcomes(self, tickets: Sequence[Ticket]) -> list[Outcome]:
        await self.may_flush.wait()
        return [self.core.wait(each) for each in tickets]


def rig(*, seconds: float) -> Rig:
    """A broker whose queue has room for one append, with topic t of two partitions."""
    clock = ManualClock()
    bounds = WriterLimits(queue_bytes=1)
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


async def handled(door: Any, asked: messages.Request) -> Any:
    """As far as the next request of the connection has to wait."""
    return await produce._handle(door, asked)


async def settled() -> None:
    """Everybody has gone as far as he can."""
    for _ in range(5):
        await asyncio.sleep(0)


def codes(answer: Any) -> list[ErrorCode]:
    """Of the partitions, as they were asked for."""
    ((found,),) = ([each["partition_responses"]] for each in answer["responses"])
    return [each["error_code"] for each in found]


def test_what_is_queued_is_made_durable_while_the_rest_waits_for_room() -> None:
    """It may be what fills the queue; then the rest finds room."""

    async def work() -> None:
        door = Door(rig(seconds=30).core)
        handling = asyncio.create_task(handled(door, request(0, 1)))
        await settled()
        assert len(door.told) == 1
        assert not handling.done()
        door.may_flush.set()
        assert codes(await (await handling)) == [ErrorCode.none, ErrorCode.none]

    asyncio.run(work())


@pytest.mark.parametrize("acks", [-1, 0])
def test_a_request_that_ends_amid_its_wait_for_room_leaves_nothing_behind(acks: int) -> None:
    """What is queued of it is made durable, and the next has its turn."""

    async def work() -> None:
        door = Door(rig(seconds=30).core)
        handling = asyncio.create_task(handled(door, request(0, 1, acks=acks)))
        await settled()
        behind = asyncio.create_task(handled(door, request(1)))
        await settled()
        handling.cancel()
        await asyncio.wait([handling])
        (first,) = door.told
        door.may_flush.set()
        assert codes(await (await behind)) == [ErrorCode.none]
        assert first.done

    asyncio.run(work())


def test_who_waits_for_room_comes_before_who_comes_later() -> None:
    """Or busy producers would leave nothing to the others."""

    async def work() -> None:
        door = Door(rig(seconds=30).core)
        first = await handled(door, request(0))
        waiting = asyncio.create_task(handled(door, request(1)))
        await settled()
        door.core.wait(door.told[0])
        late = asyncio.create_task(handled(door, request(0)))
        await settled()
        assert len(door.told) == 1
        second = await waiting
        assert len(door.told) == 2
        assert not late.done()
        door.may_flush.set()
        for answer in (first, second, await late):
            assert codes(await answer) == [ErrorCode.none]

    asyncio.run(work())


def test_a_request_of_many_batches_lets_others_have_their_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long it takes to check them all."""
    monkeypatch.setattr(produce, "_TURN_SECONDS", 0.0)

    async def work() -> None:
        door = Door(rig(seconds=0).core)
        door.may_flush.set()
        handling = asyncio.create_task(handled(door, request(*[0] * 10)))
        turns = 0
        while not handling.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 10
        await (await handling)

    asyncio.run(work())


def test_what_finds_no_room_in_time_is_refused_alone() -> None:
    """What is queued of the same request is acked."""

    async def work() -> None:
        door = Door(rig(seconds=0.02).core)
        answer = await handled(door, request(0, 1))
        door.may_flush.set()
        assert codes(await answer) == [ErrorCode.none, ErrorCode.request_timed_out]

    asyncio.run(work())
