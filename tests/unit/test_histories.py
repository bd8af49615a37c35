from __future__ import annotations

import pytest

from sparklog import errors
from sparklog.broker.log.histories import Histories, History
from sparklog.clock import ManualClock
from sparklog.storage import wal
from sparklog.storage.metadata.model import Epoch
from sparklog.storage.objects import MemoryStore
from sparklog.storage.snapshot import Entry, EntryKind, WalKind
from tests.support.brokers import payload


@pytest.fixture(params=list(WalKind))
def epoch(request: pytest.FixtureRequest) -> Epoch:
    """The first epoch of broker 1, which is being written, in each kind of storage."""
    return Epoch(1, 1, request.param)


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    """A local root in memory, with files that grow."""
    return MemoryStore(clock, is_local=True, has_files=True)


@pytest.fixture
def ours(store: MemoryStore, clock: ManualClock, epoch: Epoch) -> wal.Appender:
    """The appender of the epoch's broker."""
    return wal.of(store, clock, epoch.log).appender(1, 1)


@pytest.fixture
def histories(store: MemoryStore, clock: ManualClock) -> Histories:
    """The reader of another broker."""
    return Histories(store, clock=clock)


def append(ours: wal.Appender, count: int = 1) -> None:
    """Appends flushes of one record each."""
    for _ in range(count):
        base = ours.next_sequence
        entry = Entry(kind=EntryKind.RECORDS, topic_id="t", base_offset=base, count=1)
        ours.append([(entry, wal.encode_payload(payload([f"{base}"])))])


def fenced(epoch: Epoch) -> Epoch:
    """The epoch, as the metadata has it once it has a fence."""
    return Epoch(epoch.broker, epoch.epoch, epoch.log, fenced=True)


def sequences(history: History) -> list[int]:
    """The sequences of the flushes, without the fence."""
    return [each.at.sequence for each in history[1] if not each.is_fence]


def test_a_log_that_was_read_ahead_is_continued(
    histories: Histories, epoch: Epoch, ours: wal.Appender
) -> None:
    """Later flushes and the newest checkpoint are found, and no flush is read twice."""
    append(ours, 3)
    ours.checkpoint(2, [0, 1, 2], b"old")
    histories.read_ahead(epoch)
    _, before = histories.read(epoch)
    append(ours, 2)
    ours.checkpoint(4, [1, 3], b"new")
    append(ours)
    checkpoint, objects = histories.read(epoch)
    assert [each.at.sequence for each in objects] == [1, 3, 5]
    assert objects[0] is before[1]
    assert checkpoint is not None
    assert checkpoint.state == b"new"


def test_a_sealed_log_is_kept_without_its_checkpoint(
    histories: Histories, epoch: Epoch, ours: wal.Appender
) -> None:
    """Its broker may still put one until the metadata has the epoch as fenced."""
    append(ours, 3)
    histories.read_ahead(epoch)
    append(ours)
    histories.seal(epoch)
    with pytest.raises(errors.Fenced):
        append(ours)
    ours.checkpoint(2, [1], b"new")
    found = histories.read(fenced(epoch))
    assert found[0] is not None
    assert found[0].state == b"new"
    assert sequences(found) == [1, 3]
    assert found[1][-1].is_fence


def test_a_fenced_log_is_read_once(histories: Histories, epoch: Epoch, ours: wal.Appender) -> None:
    """It cannot change any more."""
    append(ours, 2)
    histories.read_ahead(epoch)
    found = histories.fence(epoch)
    assert sequences(found) == [0, 1]
    assert histories.read(fenced(epoch)) is found


def test_other_epochs_are_forgotten(histories: Histories, epoch: Epoch, ours: wal.Appender) -> None:
    """A log that no partition needs any more takes no memory."""
    append(ours, 2)
    ours.checkpoint(1, [0, 1], b"")
    histories.read_ahead(epoch)
    ahead = histories.read(epoch)[1][0]
    histories.retain({epoch.id})
    assert histories.read(epoch)[1][0] is ahead
    histories.retain({(1, 2)})
    assert histories.read(epoch)[1][0] is not ahead
    found = histories.fence(epoch)
    histories.retain(())
    again = histories.read(fenced(epoch))
    assert again is not found
    assert sequences(again) == sequences(found)


def test_a_long_log_is_read_again(
    histories: Histories, epoch: Epoch, ours: wal.Appender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log of many entries is not kept in memory."""
    append(ours, 3)
    ours.checkpoint(2, [0, 1, 2], b"")
    monkeypatch.setattr("sparklog.broker.log.histories.HISTORY_ENTRIES", 2)
    histories.read_ahead(epoch)
    assert histories.read(epoch)[1][0] is not histories.read(epoch)[1][0]
    monkeypatch.setattr("sparklog.broker.log.histories.HISTORY_ENTRIES", 3)
    histories.read_ahead(epoch)
    assert histories.read(epoch)[1][0] is histories.read(epoch)[1][0]
    found = histories.fence(epoch)  # it has a fourth entry, the fence
    assert histories.read(fenced(epoch)) is not found
    monkeypatch.setattr("sparklog.broker.log.histories.HISTORY_ENTRIES", 4)
    found = histories.read(fenced(epoch))
    assert histories.read(fenced(epoch)) is found


def test_a_long_log_displaces_no_other(
    histories: Histories,
    store: MemoryStore,
    clock: ManualClock,
    epoch: Epoch,
    ours: wal.Appender,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The logs that were read before it are kept."""
    append(ours, 2)
    ours.checkpoint(1, [0, 1], b"")
    histories.read_ahead(epoch)
    long = Epoch(2, 1, epoch.log)
    append(wal.of(store, clock, epoch.log).appender(2, 1), 3)
    monkeypatch.setattr("sparklog.broker.log.histories.HISTORY_ENTRIES", 4)
    histories.read_ahead(long)
    found = histories.fence(long)
    assert histories.read(fenced(long)) is not found
    assert histories.read(epoch)[1][0] is histories.read(epoch)[1][0]
