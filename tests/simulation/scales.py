"""Checks the memory of decoding: batches that are small compressed and large decoded.

Rules:

- No batch decodes to more than its entry in the log's index says, because all bounds go by that.
- Small batches may be decoded together, up to a bound; a large one is decoded alone and in its
  turn, with memory granted for it.
- Grants never exceed the limit, except for one that alone needs more than the limit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

import pyarrow as pa

from sparklog import limits
from sparklog.broker.decode_memory import DecodeMemory
from sparklog.broker.log import run_writer
from sparklog.formats import record_batch
from sparklog.formats.record_batch import CheckedBatch
from sparklog.storage import wal
from sparklog.storage.snapshot import Entry
from sparklog.storage.wal import payloads
from tests.simulation.history import ensure
from tests.simulation.scheduler import Task

if TYPE_CHECKING:
    from tests.simulation.world import World

LIMITS = {
    "sparklog.limits.LARGE_BYTES": 4_000,
    "sparklog.limits.READ_RUN_BYTES": 8_000,
    "sparklog.limits.DECODE_BYTES": 80_000,
    "sparklog.broker.log.run_writer.PUBLISH_TOGETHER_BYTES": 4_000,
}
MAX_BATCH_BYTES = 40_000
"""Largest decoded size of one batch that the broker is configured to accept."""


@contextlib.contextmanager
def installed(world: World) -> Iterator[None]:
    """Everything that brokers decode is weighed."""
    hold, decode, check = DecodeMemory.hold, wal.decode_kafka, record_batch.check
    grants: dict[Task, list[int]] = {}
    holders: dict[int, list[int]] = {}

    def granted() -> int | None:
        """To the task that runs; None where it is not a broker's."""
        task = world.scheduler.current
        if task is None or not world.is_broker(task.process):
            return None
        return sum(grants.get(task, ()))

    @contextlib.contextmanager
    def hold_noted(room: DecodeMemory, size_bytes: int) -> Iterator[None]:
        with hold(room, size_bytes):
            task = world.scheduler.current
            assert task is not None
            held = holders.setdefault(id(room), [])
            held.append(size_bytes)
            grants.setdefault(task, []).append(size_bytes)
            limit = room._limit_bytes
            ensure(len(held) == 1 or sum(held) <= limit, f"{held} bytes are held of {limit}")
            try:
                yield
            finally:
                held.remove(size_bytes)
                grants[task].remove(size_bytes)

    def decode_weighed(entries: Sequence[Entry], batches: Sequence[Any]) -> pa.RecordBatch:
        found, turn = decode(entries, batches), granted()
        if turn is not None:
            told = sum(each.memory_bytes for each in entries)
            most = run_writer.PUBLISH_TOGETHER_BYTES
            ensure(found.nbytes <= told, f"{entries} decode to {found.nbytes} bytes")
            ensure(len(entries) == 1 or told <= most, f"{told} bytes are decoded together")
            is_large = found.nbytes > limits.READ_RUN_BYTES
            what = f"{found.nbytes} bytes are decoded, with {turn} held"
            ensure(not is_large or found.nbytes <= turn, what)
        return found

    def check_weighed(data: Any, *, limit_bytes: int) -> CheckedBatch:
        found, turn = check(data, limit_bytes=limit_bytes), granted()
        is_large = found.decoded_bytes > limits.LARGE_BYTES
        what = f"{found.decoded_bytes} bytes are checked, with {turn} held"
        ensure(turn is None or not is_large or found.decoded_bytes <= turn, what)
        return found

    with (
        mock.patch.object(DecodeMemory, "hold", hold_noted),
        mock.patch.object(wal, "decode_kafka", decode_weighed),
        mock.patch.object(payloads, "decode_kafka", decode_weighed),
        mock.patch.object(record_batch, "check", check_weighed),
    ):
        yield
