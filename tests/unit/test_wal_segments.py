from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import msgspec
import pytest

from sparklog import errors
from sparklog.clock import ManualClock
from sparklog.storage import wal
from sparklog.storage.objects import (
    Fault,
    LocalStore,
    MemoryStore,
    NoFaults,
    ObjectMissing,
    ScriptedFaults,
    Store,
    SyncFailed,
)
from sparklog.storage.objects.faults import Operation
from sparklog.storage.objects.files import BLOCK_BYTES, Access, files_of
from sparklog.storage.snapshot import Entry, EntryKind, WalKind
from sparklog.storage.wal.base import read_payload, segment_path
from sparklog.storage.wal.objects import ObjectWal
from sparklog.storage.wal.segment_appender import SEGMENT_ALLOCATED_BYTES
from sparklog.storage.wal.segments import SegmentWal
from tests.support.brokers import flip, paths, payload

FOLDER = "wal/1/0000000001"
FIRST = segment_path(1, 1, 0)


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    """A local root in memory, with files that grow."""
    return MemoryStore(clock, is_local=True, has_files=True)


def log_of(store: Store, clock: ManualClock, segment_bytes: int = 1 << 20) -> SegmentWal:
    """The segments of a root."""
    files = files_of(store)
    assert files is not None
    return SegmentWal(store, files, clock, segment_bytes=segment_bytes)


def records(*values: str, base: int = 0) -> tuple[Entry, wal.Payload]:
    """An entry with these records, and its bytes."""
    entry = Entry(kind=EntryKind.RECORDS, topic_id="t", base_offset=base, count=len(values))
    return entry, wal.encode_payload(payload(values))


def large(mib: int) -> tuple[Entry, wal.Payload]:
    """An entry that is written in parts."""
    return records("x" * (mib << 20))


def sequences(found: Sequence[wal.WalObject]) -> list[int]:
    """The sequences of these flushes, without the fence."""
    return [each.at.sequence for each in found if not each.is_fence]


def values_of(store: Store, found: Sequence[wal.WalObject]) -> list[str]:
    """The records of these flushes."""
    return [
        value.decode()
        for each in found
        for located in each.located
        if located.entry.kind is EntryKind.RECORDS
        for value in wal.decode_payload(located.entry, read_payload(store, located))
        .column("value")
        .to_pylist()
    ]


def append_raw(store: Store, data: bytes, path: str = FIRST) -> None:
    """Appends bytes as another process does."""
    files = files_of(store)
    assert files is not None
    files.open(path, Access.FENCE).append([memoryview(data)])


# ------------------------------------------------------------------------------ hard links


def test_a_fence_in_a_copy_by_hard_links_spares_the_original(
    tmp_path: Path, clock: ManualClock
) -> None:
    """The copy's segments become files of its own, and the original's broker appends on."""
    (tmp_path / "root").mkdir()
    log = log_of(LocalStore(tmp_path / "root"), clock)
    ours = log.appender(1, 1)
    for value in ("a", "b"):
        ours.append([records(value)])
    shutil.copytree(tmp_path / "root", tmp_path / "copy", copy_function=os.link)
    store = LocalStore(tmp_path / "copy")
    follower = log_of(store, clock).follower(1, 1)
    first = follower.poll()
    assert values_of(store, first) == ["a", "b"]
    (fence,) = follower.fence()
    assert fence.is_fence
    ours.append([records("c")])
    assert [each.at.sequence for each in log.follower(1, 1).poll()] == [0, 1, 2]
    assert values_of(store, log_of(store, clock).follower(1, 1).poll()[:-1]) == ["a", "b"]
    ours.close()


def test_a_fence_counts_in_an_original_that_has_a_copy(tmp_path: Path, clock: ManualClock) -> None:
    """A backup by hard links gives the segment a second name, and its broker is still fenced."""
    (tmp_path / "root").mkdir()
    log = log_of(LocalStore(tmp_path / "root"), clock)
    ours = log.appender(1, 1)
    ours.append([records("a")])
    shutil.copytree(tmp_path / "root", tmp_path / "copy", copy_function=os.link)
    assert log.follower(1, 1).fence()[-1].is_fence
    with pytest.raises(errors.BrokerFenced):
        ours.append([records("b")])
    ours.close()


# ------------------------------------------------------------------------------ both kinds


@pytest.fixture(params=["objects", "segments", "local segments"])
def any_log(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Store, wal.Wal]:
    """The write-ahead logs of a root, of each kind."""
    clock = ManualClock()
    if request.param == "local segments":
        local = LocalStore(tmp_path)
        return local, wal.of(local, clock, WalKind.SEGMENTS)
    found = MemoryStore(clock, is_local=True, has_files=True)
    return found, wal.of(found, clock, WalKind(request.param))


def test_what_was_appended_is_read(any_log: tuple[Store, wal.Wal]) -> None:
    """A follower returns each flush once, in order, with its records."""
    store, log = any_log
    ours, theirs = log.appender(1, 1), log.follower(1, 1)
    assert theirs.poll() == []
    for number in range(3):
        written = ours.append([records(f"a{number}", base=number), records("b")])
        (found,) = theirs.poll()
        assert found == written
        assert values_of(store, [found]) == [f"a{number}", "b"]
        assert ours.read(number) == written
    assert theirs.poll(relist=True) == []
    assert values_of(store, log.follower(1, 1).poll()) == ["a0", "b", "a1", "b", "a2", "b"]
    ours.close()


def test_large_flushes_are_read(any_log: tuple[Store, wal.Wal]) -> None:
    """Flushes of any size stand between small ones."""
    store, log = any_log
    ours = log.appender(1, 1)
    for entry in (records("a"), large(9), records("b"), large(1), records("c")):
        ours.append([entry])
    found = log.follower(1, 1).poll()
    assert [value[:1] for value in values_of(store, found)] == ["a", "x", "b", "x", "c"]


@pytest.mark.parametrize("ends", [False, True], ids=["poll", "fence"])
def test_known_flushes_are_not_read_again(any_log: tuple[Store, wal.Wal], ends: bool) -> None:
    """A reader takes what another one has read; the newest checkpoint says what counts."""
    _, log = any_log
    ours = log.appender(1, 1)
    for number in range(4):
        ours.append([records(f"{number}", base=number)])
    known = {each.at.sequence: each for each in log.follower(1, 1).poll()[:3]}
    ours.checkpoint(2, [0, 1], b"state")
    ours.append([records("4", base=4)])
    reader = log.follower(1, 1, known=known)
    found = reader.fence() if ends else reader.poll()
    assert sequences(found) == [0, 1, 3, 4]
    assert found[0] is known[0]
    assert found[1] is known[1]
    assert reader.checkpoint is not None
    assert reader.checkpoint.state == b"state"
    ours.close()


def test_a_fence_ends_the_epoch(any_log: tuple[Store, wal.Wal]) -> None:
    """After a fence no append succeeds, and every reader has the same flushes."""
    store, log = any_log
    ours = log.appender(1, 1)
    ours.append([records("a")])
    fencer = log.follower(1, 1)
    found = fencer.fence()
    assert fencer.fenced
    assert values_of(store, found) == ["a"]
    for _ in range(2):
        with pytest.raises(errors.BrokerFenced):
            ours.append([records("late")])
    for each in (log.follower(1, 1).fence(), log.follower(1, 1).poll()):
        assert each == found
    assert fencer.fence() == []


def test_an_epoch_without_flushes_is_fenced(any_log: tuple[Store, wal.Wal]) -> None:
    """A broker that was overtaken before its first flush cannot begin."""
    _, log = any_log
    ours = log.appender(1, 1)
    assert sequences(log.follower(1, 1).fence()) == []
    with pytest.raises(errors.BrokerFenced):
        ours.append([records("late")])


def test_a_checkpoint_shortens_the_log(any_log: tuple[Store, wal.Wal]) -> None:
    """A follower has the checkpoint's state, the flushes it needs, and all after it."""
    store, log = any_log
    ours = log.appender(1, 1)
    for number in range(4):
        ours.append([records(str(number), base=number)])
    ours.checkpoint(2, [1], b"state")
    follower = log.follower(1, 1)
    assert values_of(store, follower.poll()) == ["1", "3"]
    assert follower.checkpoint is not None
    assert (follower.checkpoint.sequence, follower.checkpoint.state) == (2, b"state")
    ours.append([records("4", base=4)])
    ours.checkpoint(4, [4], b"newer")
    newest = wal.Checkpoint(sequence=4, needed=(4,), state=b"")
    ours.trim(newest)
    assert values_of(store, log.follower(1, 1).fence()) == ["4"]


def test_closed_epochs_of_every_kind_are_removed(any_log: tuple[Store, wal.Wal]) -> None:
    """At most a fence of objects remains of a closed epoch; open ones stay as they are."""
    store, log = any_log
    for epoch in (1, 2):
        ours = log.appender(1, epoch)
        for number in range(3):
            ours.append([records("v", base=number)])
        ours.checkpoint(1, [], b"")
        log.follower(1, epoch).fence()
    before = len(paths(store, "wal/1/0000000002"))
    store.delete(log.retired(lambda: {(1, 2)}))
    left = paths(store, "wal/1/0000000001")
    assert left == ([f"{3:020d}"] if isinstance(log, ObjectWal) else [])
    assert len(paths(store, "wal/1/0000000002")) == before


# ------------------------------------------------------------------------------ where appends land


def test_junk_of_others_is_skipped(store: MemoryStore, clock: ManualClock) -> None:
    """A frame that landed behind junk is written again at the next block, and counts once."""
    log = log_of(store, clock)
    ours, reader = log.appender(1, 1), log.follower(1, 1)
    for number, junk in enumerate((b"x" * 100, b"y" * BLOCK_BYTES, b"z" * (BLOCK_BYTES + 1))):
        ours.append([records(f"a{number}")])
        append_raw(store, junk)
        written = ours.append([records(f"b{number}")])
        assert written.at.sequence == 2 * number + 1
        assert written.located[0].origin > BLOCK_BYTES
        assert values_of(store, reader.poll()) == [f"a{number}", f"b{number}"]
    assert sequences(log.follower(1, 1).fence()) == list(range(6))


def test_a_frame_copied_elsewhere_does_not_count(store: MemoryStore, clock: ManualClock) -> None:
    """A frame counts at the offset that it states only, and only in its own segment."""
    log = log_of(store, clock)
    ours, other = log.appender(1, 1), log.appender(1, 2)
    ours.append([records("a")])
    frame = bytes(store.get(FIRST))[BLOCK_BYTES:]
    append_raw(store, frame)
    other.append([records("b")])
    append_raw(store, bytes(store.get(segment_path(1, 2, 0)))[BLOCK_BYTES:])
    assert values_of(store, log.follower(1, 1).poll()) == ["a"]
    ours.append([records("c")])
    assert values_of(store, log.follower(1, 1).poll()) == ["a", "c"]


def test_a_fence_between_two_parts_ends_the_epoch(store: MemoryStore, clock: ManualClock) -> None:
    """A large flush whose parts are torn apart by a fence is refused, and no reader returns it."""
    log = log_of(store, clock, 64 << 20)
    found: list[wal.WalObject] = []

    class Fencing(NoFaults):
        parts = 0

        def between(self, operation: Operation, _path: str) -> None:
            if operation == "append":
                self.parts += 1
                if self.parts == 3:
                    found.extend(log.follower(1, 1).fence())

    ours = log_of(store.view(Fencing()), clock, 64 << 20).appender(1, 1)
    ours.append([records("a")])
    with pytest.raises(errors.BrokerFenced):
        ours.append([large(10)])
    assert values_of(store, found) == ["a"]
    assert values_of(store, log.follower(1, 1).poll()) == ["a"]


class Meanwhile(NoFaults):
    """Runs `act` once, at the given moment."""

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        self._left = number
        self._act = act
        self.done = False

    def _reach(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.done = True
            self._act()

    def before(self, _operation: Operation, _path: str) -> None:
        self._reach()

    def between(self, _operation: Operation, _path: str) -> None:
        self._reach()

    def after(self, _operation: Operation, _path: str) -> None:
        self._reach()


def moments(run: Callable[[int], bool]) -> int:
    """Runs with every number from 1, until the moment is not reached; returns how many."""
    return next(number for number in itertools.count(1) if not run(number)) - 1


@pytest.mark.parametrize("segment_bytes", [1 << 20, 3 * BLOCK_BYTES])
def test_a_fence_at_any_moment_of_appends(segment_bytes: int) -> None:
    """A fencer reads the flushes that were acked, and no reader returns a refused one."""

    def run(number: int) -> bool:
        clock = ManualClock()
        store = MemoryStore(clock, is_local=True, has_files=True)
        found: list[wal.WalObject] = []

        def fence() -> None:
            found.extend(log_of(store, clock, segment_bytes).follower(1, 1).fence())

        meanwhile = Meanwhile(number, fence)
        ours = log_of(store.view(meanwhile), clock, segment_bytes).appender(1, 1)
        acked, refused = [], []
        for value in "abcd":
            try:
                ours.append([records(value)])
                acked.append(value)
            except errors.BrokerFenced:
                refused.append(value)
        if not meanwhile.done:
            fence()
        read = values_of(store, found)
        assert read == acked
        assert values_of(store, log_of(store, clock).follower(1, 1).poll()) == read
        assert acked + refused == list("abcd")
        return meanwhile.done

    assert moments(run) > 10


@pytest.mark.parametrize("segment_bytes", [1 << 20, 2 * BLOCK_BYTES])
def test_appends_at_any_moment_of_a_fence(segment_bytes: int) -> None:
    """Flushes that are acked while the fence is under way are read by the fencer."""

    def run(number: int) -> bool:
        clock = ManualClock()
        store = MemoryStore(clock, is_local=True, has_files=True)
        log = log_of(store, clock, segment_bytes)
        ours = log.appender(1, 1)
        ours.append([records("a")])
        acked = ["a"]

        def append() -> None:
            for value in "bcd":
                try:
                    ours.append([records(value)])
                    acked.append(value)
                except errors.BrokerFenced:
                    return

        meanwhile = Meanwhile(number, append)
        found = log_of(store.view(meanwhile), clock, segment_bytes).follower(1, 1).fence()
        assert values_of(store, found) == acked
        assert values_of(store, log.follower(1, 1).poll()) == acked
        with pytest.raises(errors.BrokerFenced):
            ours.append([records("late")])
        return meanwhile.done

    assert moments(run) > 10


def test_trimming_at_any_moment_of_a_fence() -> None:
    """A fencer finds the log wherever the broker's trimming has moved it meanwhile."""

    def run(number: int) -> bool:
        clock = ManualClock()
        store = MemoryStore(clock, is_local=True, has_files=True)
        log = log_of(store, clock, 2 * BLOCK_BYTES)
        ours = log.appender(1, 1)
        for value in "abc":
            ours.append([records(value)])
        acked = ["a", "b", "c"]

        def trim() -> None:
            try:
                ours.append([records("d")])
            except errors.BrokerFenced:
                return
            acked.append("d")
            ours.checkpoint(3, [], b"")
            ours.trim(wal.Checkpoint(sequence=3, needed=(), state=b""))
            ours.append([records("e")])
            acked.append("e")

        meanwhile = Meanwhile(number, trim)
        follower = log_of(store.view(meanwhile), clock, 2 * BLOCK_BYTES).follower(1, 1)
        read = values_of(store, [each for each in follower.fence() if each.at.sequence > 3])
        assert read == acked[4:]
        with pytest.raises(errors.BrokerFenced):
            ours.append([records("late")])
        return meanwhile.done

    assert moments(run) > 10


# ------------------------------------------------------------------------------ a failing disk


def test_a_full_disk_changes_nothing(store: MemoryStore, clock: ManualClock) -> None:
    """Without space nothing is written, and the next flush has the same sequence."""
    log = log_of(store, clock)
    ours = log.appender(1, 1)
    ours.append([records("a")])
    size = store.stat(FIRST).size_bytes
    full = store.view(ScriptedFaults(_failing(errno.ENOSPC, "before", 2)))
    ours = log_of(full, clock).appender(1, 2)
    ours.append([records("a")])
    with pytest.raises(errors.StorageFull):
        ours.append([records("b")])
    assert ours.append([records("c")]).at.sequence == 1
    assert store.stat(segment_path(1, 2, 0)).size_bytes == size + BLOCK_BYTES
    assert values_of(store, log.follower(1, 2).poll()) == ["a", "c"]


@pytest.mark.parametrize(("number", "missing"), [(errno.ENOSPC, "space"), (errno.EDQUOT, "quota")])
def test_an_append_that_is_refused_names_the_missing_resource(
    store: MemoryStore, clock: ManualClock, number: int, missing: str
) -> None:
    """Space or a quota; an append needs no inode."""
    log_of(store, clock).appender(1, 1).append([records("a")])
    full = store.view(ScriptedFaults(_failing(number, "before", 2)))
    ours = log_of(full, clock).appender(1, 2)
    ours.append([records("a")])
    with pytest.raises(errors.StorageFull, match=f"^No {missing} is left"):
        ours.append([records("b")])


def _failing(number: int, moment: str, count: int) -> Fault:
    error = OSError(number, "injected")
    return Fault(operation="append", error=error, moment=moment, count=count)  # type: ignore[arg-type]


@pytest.mark.parametrize("room_bytes", [1, 100, 511, 4_095, 4_096, 5_000])
def test_a_short_write_does_not_count(
    store: MemoryStore, clock: ManualClock, room_bytes: int
) -> None:
    """A frame that was cut short is refused forever; the next takes its sequence behind it."""
    log = log_of(store, clock)
    ours, reader = log.appender(1, 1), log.follower(1, 1)
    ours.append([records("a")])
    assert store.files is not None
    ours._allocated_end = 1 << 20
    store.files.space_bytes = room_bytes
    with pytest.raises(errors.StorageFull):
        ours.append([records("b" * 6_000)])
    assert values_of(store, reader.poll()) == ["a"]
    store.files.space_bytes = None
    assert ours.append([records("c")]).at.sequence == 1
    assert values_of(store, reader.poll()) == ["c"]
    assert values_of(store, log.follower(1, 1).fence()) == ["a", "c"]


@pytest.mark.parametrize("missing", [1, 7, 8, 16, 17])
@pytest.mark.parametrize("ends_by", ["another", "fence"])
def test_nothing_completes_a_flush_that_was_cut_short(
    store: MemoryStore, clock: ManualClock, missing: int, ends_by: str
) -> None:
    """A refused flush remains without effect, even if only its last zeros are missing."""
    log = log_of(store, clock)
    ours = log.appender(1, 1)
    ours.append([records("a")])
    assert store.files is not None
    store.files.space_bytes = BLOCK_BYTES - missing
    with pytest.raises(errors.StorageFull):
        ours.append([records("b")])
    store.files.space_bytes = None
    expected = ["a"]
    if ends_by == "another":
        ours.append([records("c")])
        ours.append([records("d")])
        expected += ["c", "d"]
    assert values_of(store, log.follower(1, 1).fence()) == expected


def test_a_refused_flush_at_the_end_of_a_segment_is_not_read(
    store: MemoryStore, clock: ManualClock
) -> None:
    """The next segment vouches for the flush that was written in its place, not for the cut one."""
    log = log_of(store, clock, 5 * BLOCK_BYTES)
    ours = log.appender(1, 1)
    ours.append([records("a")])
    assert store.files is not None
    store.files.space_bytes = 2 * BLOCK_BYTES
    with pytest.raises(errors.StorageFull):
        ours.append([records("b" * 9_000)])
    store.files.space_bytes = None
    left = ["c", "d"]

    class Meanwhile(NoFaults):
        def before(self, operation: Operation, path: str) -> None:
            if operation == "open" and path == segment_path(1, 1, 1):
                while left:
                    ours.append([records(left.pop(0))])

    reader = log_of(store.view(Meanwhile()), clock).follower(1, 1)
    assert values_of(store, [*reader.poll(), *reader.poll()]) == ["a", "c", "d"]
    assert not left


def test_a_failed_sync_ends_the_appender(store: MemoryStore, clock: ManualClock) -> None:
    """Nothing is acked after a sync failed, and a fencer reads what the disk has."""
    faulty = store.view(ScriptedFaults(_failing(errno.EIO, "between", 2)))
    ours = log_of(faulty, clock).appender(1, 1)
    ours.append([records("a")])
    for _ in range(2):
        with pytest.raises(SyncFailed):
            ours.append([records("b")])
    log = log_of(store, clock)
    assert values_of(store, log.follower(1, 1).fence()) == ["a"]
    store.lose_unsynced(lambda _: True)
    assert values_of(store, log.follower(1, 1).poll()) == ["a"]


@pytest.mark.parametrize("is_open", [False, True])
def test_a_reader_returns_no_flush_whose_sync_failed(
    store: MemoryStore, clock: ManualClock, *, is_open: bool
) -> None:
    """It is visible, and later syncs succeed, but no fencer will find it."""
    faulty = store.view(ScriptedFaults(_failing(errno.EIO, "between", 2)))
    ours = log_of(faulty, clock).appender(1, 1)
    ours.append([records("a")])
    log = log_of(store, clock)
    reader = log.follower(1, 1)
    assert not is_open or values_of(store, reader.poll()) == ["a"]
    with pytest.raises(SyncFailed):
        ours.append([records("b")])
    if is_open:  # each descriptor that was open reports it
        with pytest.raises(SyncFailed):
            reader.poll()
        reader = log.follower(1, 1)
    assert values_of(store, reader.poll()) == ["a"]
    successor = log.follower(1, 1)
    assert values_of(store, successor.fence()) == ["a"]
    assert [each.is_fence for each in reader.poll()] == [True]


def test_a_reader_whose_sync_fails_ends_the_appender(
    store: MemoryStore, clock: ManualClock
) -> None:
    """Bytes that are appended meanwhile may be lost, and the appender's own sync reports it."""
    failing = Fault(operation="sync", error=OSError(errno.EIO, "injected"))

    class Reading(NoFaults):
        def between(self, operation: Operation, _path: str) -> None:
            if operation == "append":
                reader = log_of(store.view(ScriptedFaults(failing)), clock).follower(1, 1)
                with pytest.raises(SyncFailed):
                    reader.poll()

    ours = log_of(store.view(Reading()), clock).appender(1, 1)
    with pytest.raises(SyncFailed):
        ours.append([records("a")])
    assert sequences(log_of(store, clock).follower(1, 1).fence()) == []


def test_a_failed_sync_of_parts_ends_the_appender(store: MemoryStore, clock: ManualClock) -> None:
    """A large flush is acked only after the sync of all its parts."""
    failing = Fault(operation="sync", error=OSError(errno.EIO, "injected"))
    ours = log_of(store.view(ScriptedFaults(failing)), clock).appender(1, 1)
    with pytest.raises(SyncFailed):
        ours.append([large(2)])
    store.lose_unsynced(lambda _: True)
    assert sequences(log_of(store, clock).follower(1, 1).fence()) == []


def test_what_a_reader_returned_survives_a_power_cut(
    store: MemoryStore, clock: ManualClock
) -> None:
    """A reader makes a frame durable before it returns it, also one that was not acked."""
    read: list[str] = []

    class Reading(NoFaults):
        def between(self, operation: Operation, _path: str) -> None:
            if operation == "append":
                read.extend(values_of(store, log_of(store, clock).follower(1, 1).poll()))
                raise KeyboardInterrupt

    ours = log_of(store.view(Reading()), clock).appender(1, 1)
    with pytest.raises(KeyboardInterrupt):
        ours.append([records("a")])
    assert read == ["a"]
    store.lose_unsynced(lambda _: True)
    assert values_of(store, log_of(store, clock).follower(1, 1).fence()) == ["a"]


@pytest.mark.parametrize("seed", range(20))
def test_any_power_cut_keeps_what_was_acked(seed: int, clock: ManualClock) -> None:
    """Acked flushes remain whatever pages are lost, and the one under way is whole or absent."""
    chance = Random(seed)
    store = MemoryStore(clock, is_local=True, has_files=True)
    faulty = store.view(ScriptedFaults(_dying("between", chance.randint(1, 6))))
    ours = log_of(faulty, clock, 5 * BLOCK_BYTES).appender(1, 1)
    acked: list[str] = []
    try:
        for number in range(8):
            value = str(number) * chance.choice([1, 5_000, 9_000])
            ours.append([records(value)])
            acked.append(value)
    except KeyboardInterrupt:
        pass
    store.lose_unsynced(lambda _: chance.random() < 0.5)
    read = values_of(store, log_of(store, clock).follower(1, 1).fence())
    assert read in (acked, [*acked, value])


def _dying(moment: str, count: int) -> Fault:
    return Fault(operation="append", error=KeyboardInterrupt(), moment=moment, count=count)  # type: ignore[arg-type]


def test_a_reader_that_cannot_sync_waits(store: MemoryStore, clock: ManualClock) -> None:
    """Without a sync the newest flush is held back until the next one, or the heartbeat."""
    ours = log_of(store, clock).appender(1, 1)
    theirs = store.view(NoFaults())
    assert theirs.files is not None
    theirs.files.can_sync = False
    reader = log_of(theirs, clock).follower(1, 1)
    ours.append([records("a")])
    assert reader.poll() == []
    ours.append([records("b")])
    assert values_of(store, reader.poll()) == ["a"]
    for epoch, newest, expected in ((2, 9, []), (1, 0, []), (1, 1, ["b"])):
        beat = {"broker": 1, "epoch": epoch, "newest_sequence": newest}
        store.put("heartbeats/1.json", msgspec.json.encode(beat))
        assert values_of(store, reader.poll()) == expected
    log_of(store, clock).follower(1, 1).fence()
    assert reader.poll() == []
    with pytest.raises(SyncFailed):
        log_of(theirs, clock).follower(1, 1).fence()


def test_a_reader_ends_after_a_failed_sync(store: MemoryStore, clock: ManualClock) -> None:
    """A reader does not return later what it could not make durable."""
    log_of(store, clock).appender(1, 1).append([records("a")])
    failing = Fault(operation="sync", error=OSError(errno.EIO, "injected"))
    reader = log_of(store.view(ScriptedFaults(failing)), clock).follower(1, 1)
    for _ in range(2):
        with pytest.raises(SyncFailed):
            reader.poll()


# ------------------------------------------------------------------------------ damage


def frames_of(store: Store, found: Sequence[wal.WalObject]) -> Iterator[int]:
    """The offset of each frame: the block in which its index begins."""
    for each in found:
        yield each.located[0].origin // BLOCK_BYTES * BLOCK_BYTES


def test_a_damaged_durable_frame_is_named(store: MemoryStore, clock: ManualClock) -> None:
    """Damage to a frame that was durable is never silence."""
    log = log_of(store, clock)
    ours = log.appender(1, 1)
    written = [ours.append([records(value)]) for value in "abc"]
    second = list(frames_of(store, written))[1]
    entry = written[1].located[0]
    for position in (*range(second, second + 110), entry.origin + entry.entry.length - 20):
        flip(store, FIRST, position)
        with pytest.raises(errors.CorruptObject) as refused:
            _read_twice(store, log)
        assert refused.value.path == FIRST
        flip(store, FIRST, position)
    assert values_of(store, log.follower(1, 1).poll()) == ["a", "b", "c"]


def _read_twice(store: Store, log: SegmentWal) -> None:
    reader = log.follower(1, 1)
    values_of(store, reader.poll())
    reader.poll()


def test_a_damaged_last_frame_does_not_count(store: MemoryStore, clock: ManualClock) -> None:
    """The newest frame is taken only if all of its bytes are right."""
    log = log_of(store, clock)
    ours = log.appender(1, 1)
    ours.append([records("a")])
    last = ours.append([records("b" * 5_000)])
    located = last.located[0]
    end = located.origin + located.entry.length
    tail = 3 * BLOCK_BYTES + BLOCK_BYTES
    for position in (*range(2 * BLOCK_BYTES, 2 * BLOCK_BYTES + 100), end - 1, tail - 1, tail - 16):
        flip(store, FIRST, position)
        assert values_of(store, log.follower(1, 1).poll()) == ["a"]
        flip(store, FIRST, position)
    assert sequences(log.follower(1, 1).poll()) == [0, 1]


def test_a_damaged_last_frame_of_a_segment_is_named(store: MemoryStore, clock: ManualClock) -> None:
    """The next segment vouches for the end of the one before it."""
    log = log_of(store, clock, 2 * BLOCK_BYTES)
    ours = log.appender(1, 1)
    located = ours.append([records("a")]).located[0]
    ours.append([records("b")])
    flip(store, FIRST, located.origin + located.entry.length - 20)
    with pytest.raises(errors.CorruptObject) as refused:
        values_of(store, log.follower(1, 1).poll())
    assert refused.value.path == FIRST


def test_a_missing_segment_is_named(store: MemoryStore, clock: ManualClock) -> None:
    """A segment that must follow and is gone is reported; so is a block 0 of another segment."""
    log = log_of(store, clock, 2 * BLOCK_BYTES)
    ours = log.appender(1, 1)
    for value in "abc":
        ours.append([records(value)])
    second = segment_path(1, 1, 1)
    content = bytes(store.get(second))
    for damaged in (None, store.get(FIRST), content[:-BLOCK_BYTES][:100], b"no segment" * 500):
        store.delete([second])
        if damaged is not None:
            store.put_new(second, damaged)
        reader = log.follower(1, 1)
        assert sequences(reader.poll()) == [0]
        with pytest.raises(errors.Corrupt, match=r"00000001\.seg"):
            reader.poll()


# ------------------------------------------------------------------------------ segments


def names(store: Store) -> list[str]:
    """The segments of the only epoch."""
    return [name for name in paths(store, FOLDER) if name.endswith(".seg")]


def test_segments_follow_each_other(store: MemoryStore, clock: ManualClock) -> None:
    """A flush that fills a segment is its last, and the next segment exists before it."""
    log = log_of(store, clock, 4 * BLOCK_BYTES)
    ours, reader = log.appender(1, 1), log.follower(1, 1)
    for number in range(10):
        ours.append([records(str(number))])
        assert values_of(store, reader.poll()) == [str(number)]
    assert len(names(store)) == 4
    assert sequences(log.follower(1, 1).poll()) == list(range(10))
    assert sequences(log.follower(1, 1).fence()) == list(range(10))


def test_a_segment_is_removed_whole(store: MemoryStore, clock: ManualClock) -> None:
    """Only segments below the checkpoint that nothing needs go, and never the current one."""
    log = log_of(store, clock, 3 * BLOCK_BYTES)
    ours, slow = log.appender(1, 1), log.follower(1, 1)
    for number in range(8):
        ours.append([records(str(number))])
    assert slow.poll()
    assert [ours.carried_up_to(number, objects=1) for number in (-1, 0, 1, 2, 7)] == [
        -1, -1, 1, 1, 7,
    ]  # fmt: skip
    assert not ours.checkpoint_is_due(6, objects=1)
    assert ours.checkpoint_is_due(4, objects=1)
    assert ours.checkpoint_is_due(-1, objects=1)
    ours.checkpoint(7, [3], b"")
    ours.checkpoint_is_due(7, objects=1)
    assert names(store) == [f"{number:08d}.seg" for number in range(5)]
    ours.trim(wal.Checkpoint(sequence=7, needed=(3,), state=b""))
    assert names(store) == ["00000001.seg", "00000004.seg"]
    assert ours.carried_up_to(7, objects=1) == 7
    assert ours.read(3).at.sequence == 3
    with pytest.raises(ObjectMissing):
        ours.read(2)
    ours.append([records("8")])
    assert values_of(store, log.follower(1, 1).poll()) == ["3", "8"]
    assert values_of(store, slow.poll()) == ["8"]
    ours.checkpoint(8, [], b"")
    ours.trim(wal.Checkpoint(sequence=8, needed=(), state=b""))
    assert paths(store, FOLDER) == ["00000004.seg", f"checkpoint-{8:020d}"]
    assert (list(ours._first_sequences), list(ours._checkpoints)) == ([4], [8])


def test_a_deletion_of_segments_that_failed_is_made_again(
    store: MemoryStore, clock: ManualClock
) -> None:
    """Segments and checkpoints that could not be deleted are deleted by the next trim."""
    down = errors.StorageUnavailable(operation="delete", path="?", reason="down")
    faulty = store.view(ScriptedFaults(Fault(operation="delete", error=down)))
    ours = log_of(faulty, clock, 2 * BLOCK_BYTES).appender(1, 1)
    for number in range(3):
        ours.append([records(str(number))])
        ours.checkpoint(number, [], b"")
    newest = wal.Checkpoint(sequence=2, needed=(), state=b"")
    with pytest.raises(errors.StorageUnavailable):
        ours.trim(newest)
    assert len(paths(store, FOLDER)) > 3
    ours.trim(newest)
    assert paths(store, FOLDER) == ["00000003.seg", f"checkpoint-{2:020d}"]


def test_a_slow_reader_jumps_to_the_checkpoint(store: MemoryStore, clock: ManualClock) -> None:
    """A reader whose next segment is gone continues after the newest checkpoint."""
    log = log_of(store, clock, 2 * BLOCK_BYTES)
    ours, slow = log.appender(1, 1), log.follower(1, 1)
    ours.append([records("a")])
    assert values_of(store, slow.poll()) == ["a"]
    for number in range(1, 6):
        ours.append([records(str(number))])
    ours.checkpoint(4, [2], b"")
    ours.trim(wal.Checkpoint(sequence=4, needed=(2,), state=b""))
    assert sequences(slow.poll()) == [1, 2, 5]  # it has the file of 1 open


def test_a_file_that_is_no_longer_in_place_stops_the_broker(tmp_path: Path) -> None:
    """A root that is moved away under a living broker is noticed by its upkeep."""
    clock = ManualClock()
    root = tmp_path / "root"
    ours = log_of(LocalStore(root), clock).appender(1, 1)
    ours.tend()
    ours.append([records("a")])
    ours.tend()
    root.rename(tmp_path / "moved")
    with pytest.raises(SyncFailed, match="moved or removed"):
        ours.tend()


def test_upkeep_prepares_the_next_segment(tmp_path: Path) -> None:
    """The next segment and space for it are there before an append needs them."""
    clock, store = ManualClock(), LocalStore(tmp_path)
    ours = log_of(store, clock, 4 * BLOCK_BYTES).appender(1, 1)
    ours.append([records("a")])
    ours.tend()
    assert names(store) == ["00000000.seg", "00000001.seg"]
    assert (tmp_path / FIRST).stat().st_blocks * 512 >= SEGMENT_ALLOCATED_BYTES
    ours.tend()
    for number in range(6):
        ours.append([records(str(number))])
    assert len(names(store)) == 3
    ours.close()


def test_a_full_disk_does_not_stop_upkeep(store: MemoryStore, clock: ManualClock) -> None:
    """Trimming, which frees space, continues although the next segment cannot be prepared."""
    full = errors.StorageFull(root="", free_bytes=0, reserve_bytes=0)
    faults = ScriptedFaults(Fault(operation="put_new", error=full, count=2))
    ours = log_of(store.view(faults), clock, 4 * BLOCK_BYTES).appender(1, 1)
    ours.append([records("a")])
    ours.tend()
    assert names(store) == ["00000000.seg"]
    ours.tend()
    assert names(store) == ["00000000.seg", "00000001.seg"]


def test_a_created_segment_is_remembered(store: MemoryStore, clock: ManualClock) -> None:
    """A segment that was created and could not be opened is used by the next flush."""
    down = errors.StorageUnavailable(operation="open", path="?", reason="down")
    faults = ScriptedFaults(Fault(operation="open", error=down, prefix=FOLDER))
    ours = log_of(store.view(faults), clock).appender(1, 1)
    with pytest.raises(errors.StorageUnavailable):
        ours.append([records("a")])
    assert ours.append([records("b")]).at.sequence == 0


def test_a_void_first_fence_is_passed(store: MemoryStore, clock: ManualClock) -> None:
    """A fencer that recreates a trimmed first segment still ends the epoch where it is."""
    log = log_of(store, clock, 2 * BLOCK_BYTES)
    ours = log.appender(1, 1)
    for number in range(3):
        ours.append([records(str(number))])

    class Trimming(NoFaults):
        done = False

        def before(self, operation: Operation, path: str) -> None:
            if operation == "put_new" and path == FIRST and not self.done:
                self.done = True
                ours.checkpoint(2, [], b"")
                ours.trim(wal.Checkpoint(sequence=2, needed=(), state=b""))

    store.delete([FIRST])  # as if it had been trimmed while the fencer was suspended
    faults = Trimming()
    found = log_of(store.view(faults), clock).follower(1, 1).fence()
    assert faults.done
    assert sequences(found) == []
    with pytest.raises(errors.BrokerFenced):
        ours.append([records("late")])


def test_a_frame_of_another_segment_does_not_count(store: MemoryStore, clock: ManualClock) -> None:
    """After a power cut, lost blocks may have old bytes that fit in all but their salt."""
    ours, others = (log_of(store, clock).appender(broker, 1) for broker in (1, 2))
    for appender in (ours, others):
        appender.append([records("a")])
    ours_end = len(store.get(FIRST))
    others.append([records("not ours")])
    append_raw(store, store.get(segment_path(2, 1, 0))[ours_end:])
    assert values_of(store, log_of(store, clock).follower(1, 1).fence()) == ["a"]
