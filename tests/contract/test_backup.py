"""Backup and restore, by the steps of docs/operations.md, under a producer and a consumer group."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import pytest

import sparklog
from tests.support import fences
from tests.support.standing import Standing
from tests.support.waiting import wait_until

_PAGE = fences.ROOT / "docs" / "operations.md"
_PARTITIONS = 2
_GROUP = "readers"


class Traffic:
    """A producer and a consumer group at a broker, until they are stopped or it stops."""

    def __init__(self, address: str) -> None:
        self.acked: dict[tuple[int, int], bytes] = {}
        """The values of acked records by (partition, offset)."""
        self.committed: dict[int, int] = {}
        """The offsets of the group that the broker has confirmed, by partition."""
        self._stops = {work: threading.Event() for work in (self._produce, self._consume)}
        self._is_cut_off = False
        self._address = address
        self._threads = [
            threading.Thread(target=self._until_stopped, args=(each,)) for each in self._stops
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for stops in self._stops.values():
            stops.set()
        for thread in self._threads:
            thread.join()

    def leave_the_producer(self) -> None:
        """Ends the consumer; the producer continues until the broker stops."""
        self._stops[self._consume].set()
        self._threads[1].join()
        self._is_cut_off = True

    def _until_stopped(self, work: Callable[[sparklog.Log], None]) -> None:
        try:
            with sparklog.connect(self._address) as log:
                work(log)
        except sparklog.SparklogError:
            if not self._is_cut_off:
                raise

    def _produce(self, log: sparklog.Log) -> None:
        with log.producer(delivery_timeout_seconds=2.0) as producer:
            number = 0
            while not self._stops[self._produce].is_set():
                value = str(number).encode()
                sent = producer.send("orders", value, partition=number % _PARTITIONS).result(10)
                self.acked[sent.partition, sent.offset] = value
                number += 1

    def _consume(self, log: sparklog.Log) -> None:
        with log.consumer(
            "orders", group=_GROUP, auto_commit=False, session_timeout_seconds=6.0
        ) as consumer:
            positions: dict[int, int] = {}
            while not self._stops[self._consume].is_set():
                for record in consumer.poll(0.1):
                    positions[record.partition] = record.offset + 1
                if positions:
                    consumer.commit({("orders", each): to for each, to in positions.items()})
                    self.committed.update(positions)

    def await_progress(self) -> None:
        """Waits until both have come further in each partition."""
        records, committed = len(self.acked), dict(self.committed)
        wait_until(
            lambda: (
                len(self.acked) >= records + 100
                and all(
                    self.committed.get(each, 0) > committed.get(each, 0)
                    for each in range(_PARTITIONS)
                )
            ),
            "records were acked, and offsets committed",
        )


@contextmanager
def broker(root: Path) -> Iterator[Standing]:
    """A broker on the root until the end of the block."""
    started = Standing(root)
    try:
        started.await_start()
        yield started
    finally:
        started.end(signal.SIGTERM)


def steps() -> tuple[fences.Fence, fences.Fence]:
    """The blocks of the page that back up and restore."""
    text = _PAGE.read_text(encoding="utf-8")
    first, last = (
        text[: text.index(heading)].count("\n") for heading in ("## Backup and", "## Disk full")
    )
    backup, restore = (each for each in fences.fences(_PAGE) if first < each.line < last)
    return backup, restore


def check(root: Path, acked: dict[tuple[int, int], bytes], committed: dict[int, int]) -> None:
    """Starts a broker on the root: it has these records and committed offsets, and serves."""
    with broker(root) as restored, sparklog.connect(restored.flight) as log:
        found = {
            (row["partition"], row["offset"]): row["value"]
            for row in log.read("orders").select(["partition", "offset", "value"]).to_pylist()
        }
        assert {place: found.get(place) for place in acked} == acked
        offsets = log.group_offsets(_GROUP)
        for partition, offset in committed.items():
            assert offset <= offsets["orders", partition], partition
            assert (partition, offsets["orders", partition] - 1) in found
        with Traffic(restored.flight) as again:
            again.await_progress()
        assert found.keys().isdisjoint(again.acked)


@pytest.mark.slow
def test_stopped_log_is_restored_from_its_copy(tmp_path: Path) -> None:
    """No record that was acked before the backup is missing after the restore, and no commit."""
    backup, restore = steps()
    page = fences.Page(tmp_path)
    root = tmp_path / "data"
    with broker(root) as first:
        with sparklog.connect(first.flight) as log:
            log.create_topic("orders", _PARTITIONS)
        with Traffic(first.flight) as before:
            before.await_progress()
            with pytest.raises(AssertionError):  # the page refuses to copy a log that is served
                page.run(backup)
            assert not (tmp_path / "backup").exists()
            before.leave_the_producer()
            first.end(signal.SIGTERM)
    page.run(backup)
    with broker(root) as second, Traffic(second.flight) as after:
        after.await_progress()
    shutil.rmtree(root / "topics" / "orders")  # the damage to be mended
    page.run(restore)
    check(root, before.acked, before.committed)


@pytest.mark.slow
def test_atomic_snapshot_of_a_running_log_is_restored(tmp_path: Path) -> None:
    """A snapshot that is taken while a producer writes has all records that were acked by then."""
    _, restore = steps()
    root = tmp_path / "data"
    with broker(root) as first:
        with sparklog.connect(first.flight) as log:
            log.create_topic("orders", _PARTITIONS)
        with Traffic(first.flight) as traffic:
            traffic.await_progress()
            acked, committed = dict(traffic.acked), dict(traffic.committed)
            # While its only writer is frozen, a copy of the files is an atomic snapshot.
            first.send(signal.SIGSTOP)
            shutil.copytree(root, tmp_path / "backup")
            first.send(signal.SIGCONT)
            traffic.await_progress()
    fences.Page(tmp_path).run(restore)
    check(root, acked, committed)
