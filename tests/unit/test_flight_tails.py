"""The tails of the Flight listener: tails that wait for memory do not delay others."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final, cast

import pyarrow as pa
import pytest

from sparklog import limits
from sparklog.broker.broker import ReadBatch, Tail
from sparklog.broker.decode_memory import DecodeMemory
from sparklog.broker.flight.streams import OpenStream
from sparklog.broker.flight.tails import (
    TAIL_READERS,
    TAIL_SECONDS,
    TAIL_STEP_BYTES,
    ServedTail,
    Tails,
)
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.partition import Partition
from sparklog.broker.log.topic import Topic
from sparklog.clock import ManualClock
from tests.support.tables import no_table
from tests.support.waiting import wait_until

SECONDS: Final = 20.0
LARGE_BYTES: Final = 2 * limits.FLIGHT_FREE_ROWS_BYTES
MANY: Final = 2 * TAIL_READERS
MANY_DEAD: Final = sys.getrecursionlimit() // 2


class Client:
    """The call of a client that reads everything at once, or only when a test lets it."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.is_dead = False
        self.reads = True

    def write_soon(self, parts: list[Any]) -> bool:
        self.sent.append(b"".join(bytes(each) for each in parts))
        return self.reads


class Bed:
    """Tails of partitions that are not in memory: each has batches of the given bytes."""

    def __init__(self, memory_bytes: int) -> None:
        self.clock = ManualClock()
        self.memory = DecodeMemory(memory_bytes)
        self.tails = Tails(self.memory, clock=self.clock)
        self.table = LedPartitions(1)
        self.topic = Topic("t", "id", {}, no_table())
        self.table.add_topic(self.topic)
        self.sizes: list[int] = []
        self.is_quick = False
        """True if the partitions are in memory."""
        self.ended: list[Client] = []
        self.reading = 0
        """Reads of which the rest is kept."""

    def add(
        self, size_bytes: int, client: Client | None = None, batches: int = 1
    ) -> tuple[Client, ServedTail]:
        number = len(self.topic.partitions)
        partition = Partition(number, leader_epoch=0, start=0, published=0)
        partition.end = batches
        self.topic.partitions[number] = partition
        self.sizes.append(size_bytes)
        client = client or Client()
        served = ServedTail(
            call=cast("Any", client),
            stream=OpenStream(self.clock, "peer", sends=False, cut=lambda: None),
            shape=(None, None),
            idle=(),
            idle_seconds=3600.0,
            finish=lambda _: self.ended.append(client),
        )
        served.tail = Tail(
            self.table,
            [(self.topic, partition)],
            [0],
            self._next_batches,
            lambda: self.tails.wake(served),
        )
        served.ending = contextlib.ExitStack()
        served.ending.callback(served.tail.close)
        self.tails.add(served)
        return client, served

    def _next_batches(
        self, topic: Topic, partition: Partition, start: int, end: int
    ) -> tuple[Iterator[ReadBatch], bool]:
        return self._batches(topic, partition, start, end), self.is_quick

    def _batches(
        self, topic: Topic, partition: Partition, start: int, end: int
    ) -> Iterator[ReadBatch]:
        value = bytes([partition.number % 256]) * self.sizes[partition.number]
        self.reading += 1
        try:
            for offset in range(start, end):
                yield ReadBatch(
                    topic=topic.name,
                    partition=partition.number,
                    first=offset,
                    end=offset + 1,
                    high_watermark=end,
                    rows=pa.RecordBatch.from_pydict({"value": [value]}),
                )
        finally:
            self.reading -= 1


@pytest.fixture
def bed() -> Iterator[Bed]:
    """Tails with memory for one large batch at a time."""
    found = Bed(LARGE_BYTES * 3 // 2)
    yield found
    found.tails.close()


def test_steps_are_taken_at_a_limited_rate(bed: Bed) -> None:
    """Many tails leave time to others: a tail has its turn less often, and sends more by it."""
    clients = [bed.add(1)[0] for _ in range(4 * MANY)]
    wait_until(lambda: all(each.sent for each in clients), "all are sent")
    bed.tails.close()
    least_seconds = bed.tails.steps * TAIL_SECONDS - 0.001
    assert bed.clock.monotonic() >= least_seconds > 0


def test_a_long_backlog_does_not_delay_other_tails(bed: Bed) -> None:
    """A client that reads as fast as the broker sends leaves their turns to other tails."""
    bed.is_quick = True
    size_bytes = limits.FLIGHT_FREE_ROWS_BYTES
    batches = 4 * TAIL_STEP_BYTES // size_bytes
    sent: list[Client] = []

    class Fast(Client):
        def write_soon(self, parts: list[Any]) -> bool:
            if not sent:
                bed.add(1, second)
            sent.append(self)
            return super().write_soon(parts)

    first, second = Fast(), Fast()
    bed.add(size_bytes, first, batches)
    wait_until(lambda: len(sent) == batches + 1, "all are sent")
    assert sent.index(second) <= 2 * TAIL_STEP_BYTES // size_bytes


def test_tails_that_wait_for_memory_do_not_delay_others(bed: Bed) -> None:
    """More of them than there are reading threads; each gets its batch once there is memory."""
    with bed.memory.hold(LARGE_BYTES):
        waiting = [bed.add(LARGE_BYTES) for _ in range(MANY)]
        wait_until(lambda: all(served.is_waiting for _, served in waiting), "all wait")
        small, _ = bed.add(1)
        wait_until(lambda: len(small.sent) == 1, "the small batch is sent")
        assert not any(client.sent for client, _ in waiting)
    for number, (client, served) in enumerate(waiting):
        wait_until(lambda each=client: bool(each.sent), "it is sent")  # type: ignore[misc]
        (message,) = client.sent
        assert bytes([number]) * LARGE_BYTES in message
        assert not served.is_waiting
    wait_until(lambda: not bed.memory.held_bytes, "all memory is free")
    assert not bed.memory.is_short


def test_a_message_keeps_its_memory_until_it_is_read(bed: Bed) -> None:
    """The next tail waits until the client has read it."""
    slow = Client()
    slow.reads = False
    _, first = bed.add(LARGE_BYTES, slow)
    wait_until(lambda: bool(slow.sent), "it is sent")
    next_one, served = bed.add(LARGE_BYTES)
    wait_until(lambda: served.is_waiting, "it waits")
    assert not next_one.sent
    bed.tails.progress(first)
    wait_until(lambda: bool(next_one.sent), "the next is sent")
    wait_until(lambda: not bed.memory.held_bytes, "all memory is free")


def test_many_slow_clients_keep_only_their_messages_in_memory(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of later messages, perhaps many more, are read again once the client continues."""
    monkeypatch.setattr("sparklog.broker.flight.tails.TAILS_KEEPING", 0)
    slow = Client()
    slow.reads = False
    _, served = bed.add(1, slow, batches=3)
    for number in range(1, 4):
        wait_until(lambda n=number: (len(slow.sent), bed.reading) == (n, 0), "no more is kept")  # type: ignore[misc]
        bed.tails.progress(served)


def test_a_few_slow_clients_keep_the_rows_of_later_messages(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading them again for each message would take long. A client that has read makes room."""
    monkeypatch.setattr("sparklog.broker.flight.tails.TAILS_KEEPING", 1)
    first, second = Client(), Client()
    first.reads = second.reads = False
    _, served = bed.add(1, first, batches=3)
    wait_until(lambda: (len(first.sent), bed.reading) == (1, 1), "the first one keeps its rows")
    _, other = bed.add(1, second, batches=3)
    wait_until(lambda: (len(second.sent), bed.reading) == (1, 1), "there is no room for another")
    first.reads = True
    bed.tails.progress(served)
    wait_until(lambda: (len(first.sent), bed.reading) == (3, 0), "the first one has read all")
    bed.tails.progress(other)
    wait_until(lambda: (len(second.sent), bed.reading) == (2, 1), "the second one has its room")
    second.reads = True
    bed.tails.progress(other)
    wait_until(lambda: (len(second.sent), bed.reading) == (3, 0), "the second one has read all")


def test_a_tail_that_waits_for_memory_ends_with_its_call(bed: Bed) -> None:
    """It does not wait for the memory first, and keeps none that it gets later."""
    with bed.memory.hold(LARGE_BYTES):
        client, served = bed.add(LARGE_BYTES)
        wait_until(lambda: served.is_waiting, "it waits")
        client.is_dead = True
        bed.tails.progress(served)
        wait_until(lambda: bed.ended == [client], "it has ended")
    assert not client.sent
    wait_until(lambda: not bed.memory.held_bytes, "all memory is free")


def test_many_tails_that_end_while_they_wait_leave_the_memory_to_others(bed: Bed) -> None:
    """A program with hundreds of tails may be killed; each of them is granted memory later."""
    with bed.memory.hold(LARGE_BYTES):
        waiting = [bed.add(LARGE_BYTES) for _ in range(MANY_DEAD)]
        wait_until(lambda: all(served.is_waiting for _, served in waiting), "all wait")
        for client, served in waiting:
            client.is_dead = True
            bed.tails.progress(served)
        wait_until(lambda: len(bed.ended) == MANY_DEAD, "all have ended")
    assert not bed.memory.held_bytes
    assert not bed.memory.is_short
    client, _ = bed.add(LARGE_BYTES)
    wait_until(lambda: bool(client.sent), "a later one is served")


def test_the_end_of_all_tails_waits_for_no_memory(bed: Bed) -> None:
    """Closing ends tails that wait."""
    with bed.memory.hold(LARGE_BYTES):
        _, served = bed.add(LARGE_BYTES)
        wait_until(lambda: served.is_waiting, "it waits")
        closing = threading.Thread(target=bed.tails.close)
        closing.start()
        closing.join(SECONDS)
        assert not closing.is_alive()
    assert not bed.memory.held_bytes
