"""Logs in segments on this machine's own file system, where the kernel orders the appends."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from sparklog import errors
from sparklog.clock import SystemClock
from sparklog.storage import wal
from sparklog.storage.objects import LocalStore
from sparklog.storage.objects.files import files_of
from sparklog.storage.snapshot import Entry, EntryKind
from sparklog.storage.wal.base import read_payload
from sparklog.storage.wal.segments import SegmentWal
from tests.support.brokers import payload

ROUNDS = 30


def log_of(store: LocalStore, segment_bytes: int) -> SegmentWal:
    """The logs of a root, in segments of this size."""
    files = files_of(store)
    assert files is not None
    return SegmentWal(store, files, SystemClock(), segment_bytes=segment_bytes)


@pytest.mark.parametrize(
    ("segment_bytes", "value_bytes"),
    [(1 << 20, 10), (40_000, 5_000), (64 << 20, 5 << 20)],
    ids=["small", "segments", "parts"],
)
def test_fences_race_with_appends(tmp_path: Path, segment_bytes: int, value_bytes: int) -> None:
    """Two fencers and a writer at the same time: exactly the acked flushes are read, by all."""
    cut_short = 0
    for epoch in range(1, ROUNDS if value_bytes < 1 << 20 else ROUNDS // 5):
        acked: list[str] = []
        ours = log_of(LocalStore(tmp_path), segment_bytes).appender(1, epoch)
        begun = threading.Event()

        def write(
            ours: wal.Appender = ours, acked: list[str] = acked, begun: threading.Event = begun
        ) -> None:
            for number in range(400):
                value = str(number).ljust(value_bytes, "x")
                entry = Entry(kind=EntryKind.RECORDS, count=1, base_offset=number)
                try:
                    ours.append([(entry, wal.encode_payload(payload([value])))])
                except errors.BrokerFenced:
                    return
                acked.append(value)
                begun.set()

        views: list[list[str]] = []

        def fence(epoch: int = epoch, views: list[list[str]] = views) -> None:
            store = LocalStore(tmp_path)
            found = log_of(store, segment_bytes).follower(1, epoch).fence()
            views.append(values_of(store, found))

        threads = [threading.Thread(target=each) for each in (write, fence, fence)]
        threads[0].start()
        begun.wait(30)
        for each in threads[1:]:
            each.start()
        for each in threads:
            each.join()
        assert views == [acked, acked]
        cut_short += len(acked) < 400
        ours.close()
    assert cut_short


def values_of(store: LocalStore, found: list[wal.WalObject]) -> list[str]:
    """The records of these flushes."""
    return [
        wal.decode_payload(located.entry, read_payload(store, located))
        .column("value")[0]
        .as_py()
        .decode()
        for each in found
        for located in each.located
        if located.entry.kind is EntryKind.RECORDS
    ]
