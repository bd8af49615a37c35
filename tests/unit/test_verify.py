"""`sparklog.storage.verify`: checks of stored records that were tampered with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import deltalake
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sparklog
from sparklog import limits
from sparklog.clock import Clock, ManualClock, SystemClock
from sparklog.formats.flight_messages import AlterTopic
from sparklog.jobs.verify import _Verification
from sparklog.storage.follow import RootFollower
from sparklog.storage.metadata.liveness import Heartbeat, write_heartbeat
from sparklog.storage.objects import LocalStore, MemoryStore, Store
from sparklog.storage.snapshot import GapCause, Gaps, TableSnapshot, WalPosition
from sparklog.storage.table.topic_table import TopicTable
from sparklog.storage.verify import SliceReport, check_slice
from sparklog.storage.wal.base import object_path
from tests.support.brokers import Rig, flip
from tests.unit.test_kept_offsets import keep, mirror


def check(
    store: Store, clock: Clock, topic: str = "t", *, explained: int = 0, reads_all: bool = False
) -> list[SliceReport]:
    """Checks all slices of a topic of one partition."""
    follower = RootFollower(store, clock=clock)
    snapshot = follower.refresh([topic])[topic]
    ends = follower.ends(snapshot)
    slices = follower.plan(topic, snapshot, 0, snapshot.starts[0], ends[0])
    return [
        check_slice(store, piece, end=snapshot.ends[0], explained=explained, reads_all=reads_all)
        for piece in slices
    ]


def _snapshot(rig: Rig, topic: str) -> TableSnapshot:
    """Returns the table as its broker has it."""
    return rig.led_partitions.topic(topic).table.refresh()


def check_table(root: Path, *, reads_all: bool = False) -> list[SliceReport]:
    """Checks a topic of a local root."""
    return check(LocalStore(str(root)), SystemClock(), reads_all=reads_all)


def faults(reports: list[SliceReport]) -> str:
    """The faults that were found, joined."""
    return "; ".join(fault.what for each in reports for fault in each.faults)


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    """A root with ten records of topic t in two files."""
    with sparklog.connect(tmp_path) as log:
        log.create_topic("t", partitions=1)
        for half in range(2):
            with log.producer() as producer:
                for number in range(5):
                    producer.send("t", b"value %d" % number, key=b"%d" % half)
            log.flush_to_table("t")
    return tmp_path


def files(root: Path) -> list[Path]:
    """The data files of topic t, in the order of their offsets."""
    found = (root / "topics" / "t").glob("partition=0/*.parquet")
    return sorted(
        found, key=lambda path: pq.read_table(path, partitioning=None)["offset"][0].as_py()
    )


def edit(root: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Changes the files that the table's log adds, and their statistics."""
    for commit in (root / "topics" / "t" / "_delta_log").glob("*.json"):
        actions = [json.loads(line) for line in commit.read_text().splitlines()]
        for action in actions:
            if "add" in action:
                stats = json.loads(action["add"]["stats"])
                change(action["add"], stats)
                action["add"]["stats"] = json.dumps(stats)
        commit.write_text("\n".join(map(json.dumps, actions)) + "\n")


# ------------------------------------------------------------------------------ the table


def test_a_sound_table_has_no_faults(root: Path) -> None:
    """All offsets are there, once."""
    reports = check_table(root, reads_all=True)
    assert not faults(reports)
    assert [(each.first, each.last, each.rows, each.missing) for each in reports] == [
        (0, 4, 5, 0),
        (5, 9, 5, 0),
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _, stats: stats.update(numRecords=6), "rows"),
        (lambda _, stats: stats["maxValues"].update(offset=9), "but the log says"),
        (
            lambda _, stats: stats["maxValues"].update(timestamp="2020-01-01T00:00:00Z"),
            "timestamps",
        ),
        (lambda add, _: add.update(size=add["size"] - 1), "bytes long, but the table's log says"),
    ],
)
def test_a_log_that_says_something_else(
    root: Path, change: Callable[[dict[str, Any], dict[str, Any]], None], words: str
) -> None:
    """Readers skip files by its statistics."""
    edit(root, change)
    assert words in faults(check_table(root))


def test_a_damaged_file_is_named(root: Path) -> None:
    """Keys and values are read if asked; one that is gone may be one that was compacted."""
    path = files(root)[0]
    whole = path.read_bytes()
    at = whole.index(b"value 3") if b"value 3" in whole else len(whole) // 4
    path.write_bytes(whole[:at] + bytes(8) + whole[at + 8 :])
    assert path.name in faults(check_table(root, reads_all=True))
    path.unlink()
    assert [path.name in each.gone for each in check_table(root)] == [True, False]


def test_files_with_the_same_offsets(root: Path) -> None:
    """Each file is sound, but an offset is in both."""
    first, second = files(root)
    table = pa.concat_tables([pq.read_table(each, partitioning=None) for each in (first, second)])
    pq.write_table(table, first, compression="none")

    def change(add: dict[str, Any], stats: dict[str, Any]) -> None:
        if Path(add["path"]).name == first.name:
            add["size"] = first.stat().st_size
            stats.update(numRecords=10)
            stats["maxValues"]["offset"] = 9

    edit(root, change)
    (report,) = check_table(root)
    assert "5 offsets occur twice, the first is 5" in faults([report])


# ------------------------------------------------------------------------------ the log


def test_entries_of_the_log(rig: Rig, store: MemoryStore) -> None:
    """An entry with a changed byte is a fault; the others are read."""
    for text in ("a", "b", "c"):
        rig.append([text])
    assert [each.rows for each in check(store, rig.clock)] == [1, 1, 1]
    located = rig.led_partitions.topic("t").partition(0).unpublished[1]
    flip(store, object_path(located.at), -10)
    reports = check(store, rig.clock)
    assert [bool(each.faults) for each in reports] == [False, True, False]
    assert "t-0, offsets 1 to 1, in the write-ahead log" in faults(reports)


def test_a_mirror_has_gaps(rig: Rig, store: MemoryStore) -> None:
    """An entry whose rows keep their offsets is not a fault, in the log and in the table."""
    mirror(rig)
    keep(rig, [3, 4, 9], 0, 12)
    expected = [(3, 9, 3, 4)]
    for _ in range(2):
        reports = check(store, rig.clock, "m", reads_all=True)
        assert not faults(reports)
        found = [(each.first, each.last, each.rows, each.missing) for each in reports if each.rows]
        assert found == expected
        rig.publish()


# ------------------------------------------------------------------------------ gaps


@pytest.mark.parametrize(("explained", "lost"), [(0, 7), (3, 4), (5, 2), (12, 0)])
def test_gaps_are_faults_unless_they_are_explained(root: Path, explained: int, lost: int) -> None:
    """Those below the offset that explains them are none, and all are counted."""
    later = check_table(root)[1:]
    job = _Verification(LocalStore(str(root)), SystemClock(), allow_gaps=False)
    assert job.check_gaps("t", 0, (0, 12), later, explained=explained) == 7
    assert [each.found.split(",")[0] for each in job.findings] == [
        f"t-0: {lost} offsets have no record" for _ in range(bool(lost))
    ]


@pytest.mark.parametrize(
    ("allowed", "config", "gaps", "explained"),
    [
        (False, {}, {}, 0),
        (True, {}, {}, limits.OFFSET_MAX),
        (False, {"cleanup.policy": "delete,compact"}, {}, limits.OFFSET_MAX),
        (False, {"mirror.source": "kafka"}, {}, limits.OFFSET_MAX),
        (False, {}, {(1, GapCause.ENGINE): 9}, 0),
        (False, {}, {(0, GapCause.ENGINE): 9, (0, GapCause.SOURCE): 20}, 20),
    ],
)
def test_what_explains_gaps(
    store: MemoryStore,
    clock: Clock,
    allowed: bool,
    config: dict[str, str],
    gaps: Gaps,
    explained: int,
) -> None:
    """A compacted topic and a mirror may have some anywhere, any other where its table notes it."""
    Rig(store, clock)
    job = _Verification(store, clock, allow_gaps=allowed)
    snapshot = TableSnapshot(version=1, topic_id="", partitions=1, config=config, gaps=gaps)
    assert job._explained(snapshot, 0) == explained


def test_gaps_outlast_the_configuration(rig: Rig, store: MemoryStore) -> None:
    """A mirror that was cut over has the gaps of its source; a later one is a loss."""
    mirror(rig)
    keep(rig, [3, 4, 9], 0, 12)
    rig.publish()
    rig.broker.topics.alter(AlterTopic(topic="m", config={"mirror.source": None}))
    rig.append(["a"], topic="m")
    rig.publish()
    assert dict(_snapshot(rig, "m").gaps) == {(0, GapCause.SOURCE): 12}
    reports = check(store, rig.clock, "m", explained=12)
    assert [(each.missing, each.explained) for each in reports if each.rows > 1] == [(0, 4)]


def test_rows_that_another_engine_removes_are_noted(tmp_path: Path) -> None:
    """By the janitor, once, and for good; rows that it rewrites or compacts are all there."""
    rig = Rig(LocalStore(tmp_path), ManualClock())
    rig.create("t", 1)
    for text in "abc":
        rig.append([text, text])
        rig.publish()
    folder = str(tmp_path / "topics/t")
    deltalake.DeltaTable(folder).optimize.compact()
    assert not _snapshot(rig, "t").gaps
    deltalake.DeltaTable(folder).delete("offset = 3")
    rig.append(["d"])
    rig.publish()
    expected = {(0, GapCause.ENGINE): 6}
    assert dict(_snapshot(rig, "t").gaps) == expected
    rig.janitor.tick()
    version = _snapshot(rig, "t").version
    rig.janitor.tick()
    assert _snapshot(rig, "t").version == version
    table = TopicTable(rig.store, "t", clock=rig.clock)
    assert dict(table.refresh().gaps) == expected
    assert not table.unnoted_gaps()


# ------------------------------------------------------------------------------ metadata


def look(store: Store, clock: Clock) -> list[str]:
    """The findings of the metadata."""
    job = _Verification(store, clock, allow_gaps=False)
    job.look(["t"])
    return [each.found for each in job.findings]


def test_a_table_that_is_older_than_the_log(rig: Rig, store: MemoryStore) -> None:
    """Records that were published, and trimmed from the log, are missing between the two."""
    rig.append(["a", "b"])
    rig.publish()
    rig.trim()
    rig.append(["c"])
    assert not look(store, rig.clock)
    newest = max(stat.name for stat in store.list_after("topics/t/_delta_log"))
    store.delete([f"topics/t/_delta_log/{newest}"])
    assert look(store, rig.clock) == ["t-0: offsets 0 to 1 are in neither table nor log"]


def test_a_table_that_is_older_than_a_checkpoint_of_the_log(rig: Rig, store: MemoryStore) -> None:
    """Records that were published and trimmed are missing, although nothing follows them."""
    rig.append(["a", "b"])
    rig.publish()
    rig.trim()
    assert not look(store, rig.clock)
    newest = max(stat.name for stat in store.list_after("topics/t/_delta_log"))
    store.delete([f"topics/t/_delta_log/{newest}"])
    assert look(store, rig.clock) == ["t-0: offsets 0 to 1 are in neither table nor log"]


@pytest.mark.parametrize("is_published", [False, True])
def test_a_log_that_lacks_its_newest_flushes(
    rig: Rig, store: MemoryStore, *, is_published: bool
) -> None:
    """It looks like a shorter one, but for the broker's heartbeat."""
    rig.append(["a"])
    rig.append(["b"])
    if is_published:
        rig.publish()
    heartbeat = Heartbeat(broker=1, epoch=1, flight="", at_us=0, newest_sequence=1)
    write_heartbeat(store, heartbeat)
    assert not look(store, rig.clock)
    store.delete([object_path(WalPosition(1, 1, 1))])
    (found,) = look(store, rig.clock)
    assert found.startswith("flushes 1 to 1 of broker 1, epoch 1, are missing")
    write_heartbeat(store, msgspec.structs.replace(heartbeat, epoch=2))
    assert not look(store, rig.clock)


def test_a_log_start_that_moves_while_files_are_read(root: Path) -> None:
    """Files below it are neither records nor a gap."""
    job = _Verification(LocalStore(str(root)), SystemClock(), allow_gaps=False)
    found = [
        SliceReport(topic="t", partition=0, start=a, end=b, rows=b - a, first=a, last=b - 1)
        for a, b in ((0, 40), (90, 120))
    ]
    assert job.check_gaps("t", 0, (100, 120), found, explained=0) == 0
    assert not job.findings


def test_a_snapshot_that_contradicts_itself(rig: Rig, store: MemoryStore) -> None:
    """A log start after the end, files below it, and a partition too many are named."""
    rig.append(["a", "b"])
    rig.publish()
    job = _Verification(store, rig.clock, allow_gaps=False)
    snapshot = job.look(["t"])["t"]
    wrong = replace(snapshot, starts=(9, 0), ends=(2, 0), files=(*snapshot.files, ()), partitions=2)
    job.check_snapshot("t", wrong)
    assert [each.found for each in job.findings] == [
        "its table has 2 partitions, but the cluster 1",
        "t-0: the log start 9 is after the end 2",
        "t-0: 1 file is below the log start 9",
    ]


def test_a_table_that_cannot_be_read(rig: Rig, store: MemoryStore) -> None:
    """The others are checked all the same."""
    rig.create("u", 1)
    rig.append(["a"])
    rig.publish()
    newest = max(stat.name for stat in store.list_after("topics/t/_delta_log"))
    store.put(f"topics/t/_delta_log/{newest}", b"{")
    job = _Verification(store, rig.clock, allow_gaps=False)
    assert [*job.look(["t", "u"])] == ["u"]
    (finding,) = job.findings
    assert (finding.check, newest in finding.found) == ("t", True)
