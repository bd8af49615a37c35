from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparklog import errors, limits
from sparklog.broker.log.janitor import (
    COMPACT_SETTLED_SECONDS,
    RETENTION_EVERY_SECONDS,
    SETTLE_EVERY_SECONDS,
    SWEEP_EVERY_SECONDS,
    TEMPORARY_KEPT_SECONDS,
    UPKEEP_RETRY_MAX_SECONDS,
    UPKEEP_RETRY_SECONDS,
    UPKEEP_SECONDS,
)
from sparklog.broker.log.spark_batches import BATCHES_REMEMBERED, SINGLE_MEMORY_SECONDS
from sparklog.clock import ManualClock
from sparklog.doctor import CheckState, check_log
from sparklog.formats import flight_messages
from sparklog.settings import JanitorSettings
from sparklog.storage.maintenance import key_compaction, retention
from sparklog.storage.maintenance import sweeping as maintenance
from sparklog.storage.objects import (
    Fault,
    Faults,
    LocalStore,
    MemoryStore,
    NoFaults,
    PutUnresolved,
    ScriptedFaults,
    SyncFailed,
)
from sparklog.storage.objects.faults import Operation
from sparklog.storage.snapshot import BatchKind, TableFile, WalKind
from sparklog.storage.staging import manifest
from sparklog.storage.table import data_file
from sparklog.storage.table.changes import TableChange
from sparklog.storage.table.names import data_path
from sparklog.storage.table.topic_table import TopicTable
from sparklog.storage.wal import choice
from tests.support import engines
from tests.support.brokers import Rig, RigOptions, paths, payload, rows_of_table

Logged = Callable[[], list[tuple[str, str | None]]]
GRACES = JanitorSettings(
    compact_files=3,
    removed_file_grace_seconds=60.0,
    removed_file_kept_seconds=0.0,
    orphan_grace_seconds=120.0,
    staging_abandoned_seconds=1_000.0,
    table_checkpoint_every=5,
)
pytestmark = pytest.mark.rig(topics={"t": 1, "u": 1}, hot_bytes=0, janitor=GRACES)
SWEEP = SWEEP_EVERY_SECONDS + 1


def files(rig: Rig, topic: str = "t") -> int:
    """The number of data files in the store, committed or not."""
    found = paths(rig.store, f"topics/{topic}")
    return len([name for name in found if name.startswith("partition=")])


def fill(rig: Rig, count: int, topic: str = "t") -> None:
    """Appends records and publishes each in a file of its own."""
    for number in range(count):
        rig.append([f"{number}"], topic=topic)
        rig.publish()


def faulty(rig: Rig, *script: Fault) -> None:
    """Makes the janitor's own requests fail."""
    assert isinstance(rig.store, MemoryStore)
    faults: Faults = ScriptedFaults(*script)
    rig.maintain_on(rig.store.view(faults))


def test_small_files_are_merged(rig: Rig, clock: ManualClock, logged: Logged) -> None:
    """Neighbours become one file, replaced files go after their grace, the records remain."""
    fill(rig, 3)
    rig.janitor.tick()
    (file,) = TopicTable(rig.store, "t", clock=clock).refresh().files[0]
    assert (file.first, file.last, files(rig)) == (0, 2, 4)
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert files(rig) == 1
    assert rig.read() == rows_of_table(rig.store, clock) == [(0, b"0"), (1, b"1"), (2, b"2")]
    assert logged() == []


def test_a_compacted_topic_keeps_the_last_of_each_key(
    rig: Rig, clock: ManualClock, logged: Logged
) -> None:
    """Superseded records are removed when enough are dirty; other topics are not touched."""
    rig.create("c", cleanup_policy="compact")
    for number in range(3):
        for topic in ("t", "c"):
            rig.append([f"{number}"], topic=topic, key=[b"k"])
        rig.publish()
        rig.janitor.tick()
    assert rows_of_table(rig.store, clock, "t") == [(0, b"0"), (1, b"1"), (2, b"2")]
    assert rows_of_table(rig.store, clock, "c") == rig.read("c") == [(2, b"2")]
    for number in range(6):
        rig.append([f"{number}"], topic="c", key=[b"%d" % number])
        rig.publish()
    for _ in range(3):
        rig.janitor.tick()
    assert [value for _, value in rows_of_table(rig.store, clock, "c")] == [
        b"2",
        *b"0 1 2 3 4 5".split(),
    ]
    found = TopicTable(rig.store, "c", clock=clock).refresh()
    assert len(found.files[0]) < 4
    assert found.ends == (9,)
    assert logged() == []


def test_records_beyond_retention_ms_are_removed(
    rig: Rig, clock: ManualClock, logged: Logged
) -> None:
    """`retention.ms` moves the log start, also for records in memory; files go after a grace."""
    rig.create("r", retention_ms="600000")
    for _ in range(3):
        fill(rig, 1, "r")
        clock.advance(300.0)
        rig.janitor.tick()
    partition = rig.led_partitions.topic("r").partition(0)
    assert (partition.start, partition.end, files(rig, "r")) == (1, 3, 3)
    assert rig.read("r", start=1) == rows_of_table(rig.store, clock, "r") == [(1, b"0"), (2, b"0")]
    with pytest.raises(errors.OffsetOutOfRange):
        rig.read("r")
    rig.append(["3"], topic="r")
    clock.advance(SWEEP)
    rig.janitor.tick()
    # Retention removes even the newest published record; unpublished records are not considered.
    assert (partition.start, partition.published, partition.end) == (3, 3, 4)
    assert rig.read("r", start=3) == [(3, b"3")]
    assert files(rig, "r") == 2
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert not [name for name in paths(rig.store, "topics/r") if name.startswith("partition=")]
    successor = rig.successor()
    assert successor.broker.partitions.status("r", 0).start == 3
    assert successor.read("r", start=3) == [(3, b"3")]
    assert logged() == []


def test_an_append_only_table_is_published_and_merged(
    rig: Rig, clock: ManualClock, logged: Logged
) -> None:
    """Its records stay, which one line says, and another one says when they go again."""
    rig.create("r", retention_ms="600000")
    rig.create("c", cleanup_policy="compact")

    def set_append_only(value: str | None) -> None:
        for topic in ("r", "c", "t"):
            engine = TopicTable(rig.store, topic, clock=clock)
            engine.commit(lambda _: TableChange(properties={"delta.appendOnly": value}))

    set_append_only("true")
    for number in range(6):
        for topic in ("r", "c", "t"):
            rig.append([f"{number}"], topic=topic, key=[b"k"])
        rig.publish()
    clock.advance(1_000.0 + SWEEP)
    for _ in range(3):
        rig.janitor.tick()
    every = [(number, b"%d" % number) for number in range(6)]
    for topic in ("r", "c", "t"):
        assert rig.read(topic) == rows_of_table(rig.store, clock, topic) == every
        assert len(rig.led_partitions.topic(topic).table.refresh().files[0]) < 6
    assert sorted(logged()) == [("deletions are refused", "c"), ("deletions are refused", "r")]
    assert {each.topic for each in rig.broker.status().kept_records} == {"c", "r"}
    set_append_only(None)
    clock.advance(COMPACT_SETTLED_SECONDS + SWEEP)
    for _ in range(2):
        rig.janitor.tick()
    assert rig.led_partitions.topic("r").partition(0).start == 6
    assert rows_of_table(rig.store, clock, "c") == [(5, b"5")]
    over = [line for line in logged() if line[0] == "deletions are accepted again"]
    assert sorted(topic or "" for _, topic in over) == ["c", "r"]
    assert rig.broker.status().kept_records == []


def test_a_log_start_that_clients_have_seen_survives_a_power_cut(clock: ManualClock) -> None:
    """A start that a dead process moved is made durable before the janitor reports it."""
    store = MemoryStore(clock, is_local=True)
    rig = Rig(store, clock, options=RigOptions(hot_bytes=0, janitor=GRACES))
    topic = rig.create("t")
    fill(rig, 2)
    died = SyncFailed("?", "the process dies between link and fsync")
    fault = Fault(operation="put_new", error=died, moment="between", prefix="topics/t/_delta_log")
    table = TopicTable(store.view(ScriptedFaults(fault)), "t", clock=clock)
    with pytest.raises(SyncFailed):
        retention.delete_records(table, topic.topic_id, {0: 1})
    rig.janitor.tick()
    assert rig.broker.partitions.status("t", 0).start == 1
    store.lose_unsynced(lambda _: True)
    assert rig.successor().broker.partitions.status("t", 0).start == 1


def test_records_beyond_retention_bytes_are_removed(rig: Rig, clock: ManualClock) -> None:
    """`retention.bytes` is applied at intervals, also in a topic that is altered."""
    rig.create("r", retention_bytes="1")
    fill(rig, 2, "r")
    rig.janitor.tick()
    assert rows_of_table(rig.store, clock, "r") == [(1, b"1")]
    fill(rig, 1, "r")
    rig.janitor.tick()
    assert rig.broker.partitions.status("r", 0).start == 1
    clock.advance(RETENTION_EVERY_SECONDS)
    rig.janitor.tick()
    assert rig.broker.partitions.status("r", 0).start == 2
    fill(rig, 2)
    rig.broker.topics.alter(flight_messages.AlterTopic(topic="t", config={"retention.bytes": "1"}))
    clock.advance(RETENTION_EVERY_SECONDS)
    rig.janitor.tick()
    assert rows_of_table(rig.store, clock, "t") == [(1, b"1")]
    assert rig.broker.partitions.status("u", 0).start == 0


def test_a_compacted_topic_keeps_its_records(rig: Rig, clock: ManualClock) -> None:
    """Retention applies only if the policy has `delete` as well; then both rules hold."""
    for topic, policy in (("c", "compact"), ("d", "compact,delete")):
        rig.create(topic, cleanup_policy=policy, retention_ms="60000")
        for key in (b"a", b"b", b"a"):
            rig.append(["x"], topic=topic, key=[key])
            rig.publish()
    rig.janitor.tick()
    for topic in ("c", "d"):
        assert [offset for offset, _ in rows_of_table(rig.store, clock, topic)] == [1, 2]
    clock.advance(61.0)
    rig.janitor.tick()
    assert [offset for offset, _ in rows_of_table(rig.store, clock, "c")] == [1, 2]
    assert rows_of_table(rig.store, clock, "d") == []
    assert rig.broker.partitions.status("d", 0).start == 3


def test_little_that_is_dirty_is_compacted_when_it_is_old(rig: Rig, clock: ManualClock) -> None:
    """Without new records, a few dirty ones are compacted in time, and tombstones removed."""
    rig.create("c", cleanup_policy="compact", delete_retention_ms="7200000")
    rig.append(["a", None, "z"], topic="c", key=[b"k", b"k", b"z"])
    rig.publish()
    rig.janitor.tick()
    assert len(rows_of_table(rig.store, clock, "c")) == 3
    clock.advance(COMPACT_SETTLED_SECONDS + 1)
    rig.janitor.tick()
    assert rows_of_table(rig.store, clock, "c") == [(1, None), (2, b"z")]
    clock.advance(3_600)
    rig.janitor.tick()
    assert rows_of_table(rig.store, clock, "c") == [(1, None), (2, b"z")]
    clock.advance(3_600)
    rig.janitor.tick()
    assert rows_of_table(rig.store, clock, "c") == rig.read("c") == [(2, b"z")]
    assert rig.append(["c"], topic="c", key=[b"k"]).base_offset == 3


def test_keys_that_cannot_be_compacted_stop_no_maintenance(
    rig: Rig, clock: ManualClock, logged: Logged
) -> None:
    """A damaged file is logged at intervals, and the topic has its checkpoints meanwhile."""
    rig.create("c", cleanup_policy="compact")
    for number in range(5):
        rig.append([f"{number}"], topic="c", key=[b"k"])
        rig.publish()
    (file, *_) = TopicTable(rig.store, "c", clock=clock).refresh().files[0]
    rig.store.put(data_path("c", file), b"PAR1")
    for _ in range(2):
        rig.janitor.tick()
    assert logged()[0] == ("maintenance failed", "c")
    assert len(logged()) <= 2
    assert any(name.endswith("checkpoint.parquet") for name in paths(rig.store, "topics/c"))


def test_few_files_are_left_alone(rig: Rig, clock: ManualClock) -> None:
    """Below the number of files that is worth a merge, nothing is written."""
    fill(rig, 2)
    before = paths(rig.store, "topics")
    rig.janitor.tick()
    assert paths(rig.store, "topics") == before


def test_a_checkpoint_comes_after_so_many_commits(rig: Rig) -> None:
    """A checkpoint spares readers of the table the replay of all commits."""
    fill(rig, 5)
    rig.janitor.tick()
    assert any(name.endswith("checkpoint.parquet") for name in paths(rig.store, "topics/t"))
    assert not any(name.endswith("checkpoint.parquet") for name in paths(rig.store, "topics/u"))


@pytest.mark.parametrize("freed", ["retention", "replaced files"])
def test_a_disk_that_is_too_full_for_a_checkpoint_is_freed(
    rig: Rig, clock: ManualClock, freed: str
) -> None:
    """Work that frees space does not wait for a checkpoint of the Delta log, which needs space."""
    rig.create("r", retention_ms="600000" if freed == "retention" else "-1")
    for _ in range(3):
        fill(rig, 1, "r")
    rig.janitor.tick()
    before = files(rig, "r")
    fill(rig, 4, "r")
    clock.advance(1_000.0)
    assert isinstance(rig.store, MemoryStore)
    rig.maintain_on(rig.store.view(NoCheckpoints()))
    for _ in range(2):
        rig.janitor.tick()
        clock.advance(1_000.0)
    assert files(rig, "r") < before + 4
    assert not any(name.endswith("checkpoint.parquet") for name in paths(rig.store, "topics/r"))


class NoCheckpoints(NoFaults):
    """A disk with space for small files only."""

    def before(self, operation: Operation, path: str) -> None:
        if operation.startswith("put") and "checkpoint" in path:
            raise errors.StorageFull(root="memory://", free_bytes=10_000, reserve_bytes=0)


def test_failing_maintenance_of_a_topic_affects_no_other(
    rig: Rig, clock: ManualClock, logged: Logged
) -> None:
    """A topic whose maintenance fails is logged and left alone for a while; others continue."""
    fill(rig, 3)
    fill(rig, 3, "u")
    torn = f"topics/t/_delta_log/{4:020d}.json"
    rig.store.put(torn, b'{"add"')
    rig.janitor.tick()
    assert (files(rig), files(rig, "u")) == (3, 4)
    assert logged() == [("maintenance failed", "t")]
    rig.store.delete([torn])
    rig.janitor.tick()
    assert files(rig) == 3
    clock.advance(UPKEEP_RETRY_SECONDS)
    rig.janitor.tick()
    assert files(rig) == 4


def test_a_lost_merge_is_undone_before_the_log_forgets_it(
    rig: Rig, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Delta log that names the replaced files is cleaned only after a look at the new file."""
    shortest = {"kept_seconds": 0.0, "kept_versions": 1, "needed_seconds": 0.0}
    monkeypatch.setattr(maintenance.clean_log, "__kwdefaults__", shortest)
    fill(rig, 3)
    rig.janitor.tick()
    (merged,) = TopicTable(rig.store, "t", clock=clock).refresh().files[0]
    rig.store.delete([f"topics/t/{merged.path}"])
    fill(rig, 6)
    for _ in range(2):
        rig.janitor.tick()
        clock.advance(UPKEEP_RETRY_SECONDS)
    assert rows_of_table(rig.store, clock) == [
        (offset, str(number).encode()) for offset, number in enumerate([0, 1, 2, *range(6)])
    ]


def test_repeated_failures_of_maintenance_are_logged_once(
    rig: Rig, clock: ManualClock, logged: Logged
) -> None:
    """Attempts become rare, and the log has a line per changed reason, and one at the end."""
    fill(rig, 3)
    torn = f"topics/t/_delta_log/{4:020d}.json"
    rig.store.put(torn, b'{"add"')
    attempts: list[str] = []

    class Attempts(NoFaults):
        def before(self, operation: Operation, path: str) -> None:
            if operation == "get" and path == torn:
                attempts.append(path)

    assert isinstance(rig.store, MemoryStore)
    rig.maintain_on(rig.store.view(Attempts()))
    for _ in range(360):  # an hour
        rig.janitor.tick()
        clock.advance(10.0)
    assert 3 * 5 < len(attempts) < 3 * 15  # by each of three tasks
    assert logged() == [("maintenance failed", "t")]
    rig.store.put(torn, b"")
    clock.advance(UPKEEP_RETRY_MAX_SECONDS)
    rig.janitor.tick()
    assert logged()[1:] == [("maintenance failed", "t")]
    rig.store.delete([torn])
    clock.advance(UPKEEP_RETRY_MAX_SECONDS)
    rig.janitor.tick()
    assert logged()[2:] == [("maintenance works again", "t")]


@pytest.mark.parametrize("operation", ["put", "get", "list_after", "put_new", "delete", "walk"])
def test_a_store_that_fails_stops_no_janitor(rig: Rig, clock: ManualClock, operation: str) -> None:
    """A request that fails, at any step of the maintenance, is repeated later."""
    down = errors.StorageUnavailable(operation=operation, path="?", reason="down")
    error = PutUnresolved("?", "no answer") if operation == "put" else down
    fill(rig, 6)
    script = [
        Fault(operation=operation, error=error, count=count, prefix="topics")  # type: ignore[arg-type]
        for count in (1, 2, 4, 8)
    ]
    faulty(rig, *script)
    for _ in range(12):
        rig.janitor.tick()
        clock.advance(SWEEP)
    assert files(rig) <= 2
    assert rows_of_table(rig.store, clock) == [(n, b"%d" % n) for n in range(6)]


def test_a_failed_flush_is_raised(rig: Rig) -> None:
    """A failed flush is raised, so that the broker stops."""
    fill(rig, 3)
    faulty(rig, Fault(operation="put_new", error=SyncFailed("?", "EIO"), moment="between"))
    with pytest.raises(SyncFailed):
        rig.janitor.tick()


def test_a_janitor_stops_on_request(rig: Rig) -> None:
    """The janitor checks between any two steps whether it should stop."""
    fill(rig, 3)
    rig.janitor.tick(should_stop=lambda: True)
    assert files(rig) == 3


def test_orphans_are_removed(rig: Rig, clock: ManualClock) -> None:
    """A file that was put and never committed is removed once no commit can add it."""
    fill(rig, 1)
    known = TopicTable(rig.store, "t", clock=clock).refresh()
    orphan = f"topics/t/partition=0/{known.topic_id}-5-9-{7:016x}.parquet"
    rig.store.put(orphan, b"")
    rig.janitor.tick()
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert files(rig) == 1
    assert rig.read() == [(0, b"0")]


def test_an_unreadable_file_stops_no_janitor(rig: Rig, clock: ManualClock, logged: Logged) -> None:
    """A file that cannot be merged is logged; its topic and the others are maintained."""
    fill(rig, 6)
    fill(rig, 3, "u")
    table = TopicTable(rig.store, "t", clock=clock)
    odd = TableFile(
        path="partition=0/odd.parquet", partition=0, size_bytes=9, rows=None, first=None, last=None
    )
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"value": [b"0"]}), sink)
    rig.store.put(data_path("t", odd), sink.getvalue())
    odd = dataclasses.replace(odd, modified_us=clock.now_us())
    table.commit(lambda _: TableChange(adds=(odd,)))
    clock.advance(UPKEEP_RETRY_SECONDS)
    rig.janitor.tick()
    assert logged() == [("maintenance failed", "t")]
    assert any(name.endswith("checkpoint.parquet") for name in paths(rig.store, "topics/t"))
    assert files(rig, "u") == 4


def test_files_of_crashed_puts_are_removed(tmp_path: Path) -> None:
    """A hidden file that has not been written for long is removed; a younger one remains."""
    clock = ManualClock(now_us=time.time_ns() // 1_000)
    rig = Rig(LocalStore(tmp_path), clock, options=RigOptions(janitor=GRACES))
    rig.create("t")
    rig.append(["a"])
    rig.publish()
    for name, age_seconds in (("old", TEMPORARY_KEPT_SECONDS), ("young", 0.0)):
        for folder in ("meta", "wal", "topics/t/partition=0"):
            path = tmp_path / folder / f".tmp-{name}"
            path.write_bytes(b"half")
            left_s = clock.now_us() / 1e6 - age_seconds
            os.utime(path, (left_s, left_s))
    clock.advance(SWEEP)
    rig.janitor.tick()
    left = [path.name for path in tmp_path.rglob(".tmp-*")]
    assert left == [".tmp-young"] * 3
    assert rig.read() == [(0, b"a")]


def test_the_files_of_killed_probes_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that a killed start has left changes nothing, and is removed when it is old."""
    clock, store = ManualClock(now_us=time.time_ns() // 1_000), LocalStore(tmp_path)
    rig = Rig(store, clock, options=RigOptions(janitor=GRACES))
    rig.create("t")
    rig.append(["a"])
    monkeypatch.setattr(choice, "file_system", lambda _root: "ext4")
    with monkeypatch.context() as killed:
        killed.setattr(LocalStore, "delete", lambda *_: None)
        for _ in range(2):
            assert choice.choose(store, "auto", clock=clock).kind is WalKind.SEGMENTS
    old, *young = (tmp_path / "wal").glob("probe-*")
    assert len(young) == 3  # a start tries put-if-absent, and then appends
    left_s = clock.now_us() / 1e6 - TEMPORARY_KEPT_SECONDS
    os.utime(old, (left_s, left_s))
    successor = rig.successor()
    assert successor.read() == [(0, b"a")]
    assert check_log(store, "doctor/0").state is CheckState.OK
    clock.advance(SWEEP)
    successor.janitor.tick()
    assert [*(tmp_path / "wal").glob("probe-*")] == young


# ------------------------------------------------------------------------------ staged files


def stage(
    rig: Rig,
    *,
    topic: str = "t",
    partition: int = 0,
    batch: int = 1,
    sections: int = 1,
    kind: BatchKind = BatchKind.NUMBERED,
) -> str:
    """Stages a batch with its manifest, and returns the manifest's path."""
    writer = manifest.StagingWriter(rig.store, query="q", batch=batch, clock=rig.clock)
    for number in range(sections):
        columns = {"key": [b"k"]} if number % 2 else {}
        writer.add(topic, partition, payload([f"{batch}:{number}"], **columns))
    found = manifest.Manifest(query="q", batch=batch, sections=tuple(writer.finish()), kind=kind)
    return manifest.write(rig.store, found, rig.clock).path


def append_staged(rig: Rig, path: str) -> None:
    """Appends the batch."""
    rig.broker.staged.append(flight_messages.AppendStaged(manifest=path))


def test_a_staged_batch_is_removed_once_it_is_published(rig: Rig, clock: ManualClock) -> None:
    """Until all records are published, the files remain: when new, and after the append."""
    path = stage(rig, sections=3)
    for step in (None, lambda: append_staged(rig, path)):
        if step is not None:
            step()
        clock.advance(SWEEP)
        rig.janitor.tick()
        assert "q/1/manifest.json" in paths(rig.store, "staging")
        assert len(paths(rig.store, "staging")) == 2
    rig.publish()
    rig.confirmer.confirm()
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert paths(rig.store, "staging") == []
    assert rig.read() == [(0, b"1:0"), (1, b"1:1"), (2, b"1:2")]


def test_a_batch_stays_until_its_rows_were_seen_in_the_table(rig: Rig, clock: ManualClock) -> None:
    """Another engine may delete a data file before its commit; the staged rows restore it."""
    append_staged(rig, stage(rig))
    rig.publish()
    clock.advance(SWEEP)
    rig.janitor.tick()
    (file,) = TopicTable(rig.store, "t", clock=clock).refresh().files[0]
    rig.store.delete([data_path("t", file)])
    rig.confirmer.confirm()
    assert rows_of_table(rig.store, clock) == [(0, b"1:0")]
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert len(paths(rig.store, "staging")) == 2, "the file that was written again was not seen"
    rig.confirmer.confirm()
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert paths(rig.store, "staging") == []


def test_a_batch_that_is_unreadable_in_part_stays(store: MemoryStore, clock: ManualClock) -> None:
    """All files of a batch remain until all its sections are in the table."""
    options = RigOptions(hot_bytes=0, janitor=GRACES)
    rig = Rig(store, clock, options=options)
    rig.create("t")
    append_staged(rig, stage(rig, sections=3))
    name = next(name for name in paths(store, "staging") if name.endswith(".arrow"))
    whole = bytes(store.get(f"staging/{name}"))
    # The last section is damaged.
    store.put(f"staging/{name}", whole[:-30] + bytes(30))
    with pytest.raises(errors.CorruptObject):
        rig.publish()
    rig.confirmer.confirm()
    assert rows_of_table(store, clock) == []
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert len(paths(store, "staging")) == 2
    store.put(f"staging/{name}", whole)
    rig.publish()
    rig.confirmer.confirm()
    assert rows_of_table(store, clock) == [(0, b"1:0"), (1, b"1:1"), (2, b"1:2")]
    for broker in (rig, rig.successor()):
        clock.advance(SWEEP)
        broker.janitor.tick()
    assert paths(store, "staging") == []


def test_a_batch_stays_while_the_log_refers_to_it(rig: Rig, clock: ManualClock) -> None:
    """A held back topic publishes a batch after any number of later batches."""
    count = BATCHES_REMEMBERED + 3
    for batch in range(count):
        append_staged(rig, stage(rig, batch=batch))
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert len(paths(rig.store, "staging")) == 2 * count
    successor = rig.successor()
    clock.advance(SWEEP)
    successor.janitor.tick()
    assert len(paths(rig.store, "staging")) == 2 * count
    successor.publish()
    successor.confirmer.confirm()
    assert rows_of_table(rig.store, clock) == [(n, b"%d:0" % n) for n in range(count)]
    clock.advance(SWEEP)
    successor.janitor.tick()
    assert paths(rig.store, "staging") == []


def test_a_batch_of_two_topics_stays_until_both_have_it(rig: Rig, clock: ManualClock) -> None:
    """One topic may be published or deleted while the rows of the other are still needed."""
    for batch in range(BATCHES_REMEMBERED + 3):
        writer = manifest.StagingWriter(rig.store, query="q", batch=batch, clock=clock)
        for topic in ("t", "u"):
            writer.add(topic, 0, payload([f"{batch}"]))
        found = manifest.Manifest(query="q", batch=batch, sections=tuple(writer.finish()))
        append_staged(rig, manifest.write(rig.store, found, clock).path)
    before = paths(rig.store, "staging")
    while rig.led_partitions.topic("t").partition(0).unpublished:
        rig.publisher.publish(rig.led_partitions.topic("t"))
    rig.confirmer.confirm()
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert paths(rig.store, "staging") == before
    rig.broker.topics.delete("t")
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert paths(rig.store, "staging") == before
    rig.publish()
    rig.confirmer.confirm()
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert paths(rig.store, "staging") == []


def test_a_staged_batch_of_a_deleted_topic_is_removed(rig: Rig, clock: ManualClock) -> None:
    """The records of a deleted topic are not needed."""
    append_staged(rig, stage(rig))
    rig.broker.topics.delete("t")
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert paths(rig.store, "staging") == []


def test_a_late_file_of_a_deleted_topic_is_removed(rig: Rig, clock: ManualClock) -> None:
    """The store may carry a put out whose caller got no answer, after the topic was swept."""
    rig.append(["a"])
    rig.publish()
    (file,) = (each for each in paths(rig.store, "topics/t") if each.endswith(".parquet"))
    rig.create("gone")
    clock.advance(SWEEP)
    rig.broker.topics.delete("gone")
    rig.janitor.tick()
    late = f"topics/gone/{file}"
    rig.store.put(late, rig.store.get(f"topics/t/{file}"))
    for _ in range(4):
        clock.advance(SWEEP)
        rig.janitor.tick()
    assert file not in paths(rig.store, "topics/gone")


def test_a_successor_knows_that_a_deleted_topic_is_swept(
    rig: Rig, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start looks at the note of its folder, until a topic of that name is there again."""
    rig.create("gone")
    rig.broker.topics.delete("gone")

    def sweep(rig: Rig) -> int:
        """The requests of a sweep for the deleted topic."""
        asked: list[str] = []
        with monkeypatch.context() as noted:
            for name in ("get", "stat", "list_after", "walk"):
                of_store = getattr(MemoryStore, name)

                def note(
                    store: MemoryStore, path: str, *rest: Any, of_store: Any = of_store
                ) -> Any:
                    asked.extend([path] if path.startswith("topics/gone") else [])
                    return of_store(store, path, *rest)

                noted.setattr(MemoryStore, name, note)
            clock.advance(SWEEP)
            rig.janitor.tick()
        return len(asked)

    assert sweep(rig) > 5
    assert sweep(rig) == 0
    rig = rig.successor()
    assert sweep(rig) == 3
    assert sweep(rig) == 0
    rig.create("gone")
    rig.append(["a"], topic="gone")
    rig.publish()
    rig = rig.successor()
    rig.broker.topics.delete("gone")
    assert sweep(rig) > 5
    for _ in range(3):
        sweep(rig)
    assert not any(name.endswith(".parquet") for name in paths(rig.store, "topics/gone"))


def new_topic(rig: Rig) -> tuple[str, int]:
    """Lets the successor create a topic. Returns its name and its last partition."""
    rig.create("new")
    return "new", 0


def new_partition(rig: Rig) -> tuple[str, int]:
    """Lets the successor add a partition to a topic."""
    rig.broker.topics.add_partitions(flight_messages.AddPartitions(topic="t", partitions=2))
    return "t", 1


def same_name(rig: Rig) -> tuple[str, int]:
    """Lets the successor create a topic again."""
    rig.broker.topics.delete("t")
    rig.create("t")
    return "t", 0


@pytest.mark.parametrize("change", [new_topic, new_partition, same_name])
def test_a_replaced_broker_takes_nothing_away(
    rig: Rig, clock: ManualClock, change: Callable[[Rig], tuple[str, int]]
) -> None:
    """A suspended broker removes nothing of partitions that only its successor knows."""
    append_staged(rig, stage(rig, batch=7))
    rig.publish()
    rig.confirmer.confirm()
    clock.advance(SWEEP)
    successor = rig.successor(broker=2)
    topic, partition = change(successor)
    append_staged(successor, "staging/q/7/manifest.json")  # as a query does that begins again
    append_staged(successor, stage(successor, topic=topic, partition=partition, batch=8))
    rig.janitor.tick()
    successor.publish()
    successor.confirmer.confirm()
    assert successor.read(topic, partition)[-1][1] == b"8:0"
    clock.advance(SWEEP)
    successor.janitor.tick()
    assert paths(rig.store, "staging") == []


def test_a_skipped_rerun_is_removed(rig: Rig, clock: ManualClock) -> None:
    """A batch that a query stages again, for other partitions, is in the tables already."""
    rig.broker.topics.add_partitions(flight_messages.AddPartitions(topic="t", partitions=2))
    append_staged(rig, stage(rig))
    rig.publish()
    rig.confirmer.confirm()
    clock.advance(SWEEP)
    rig.janitor.tick()
    append_staged(rig, stage(rig, partition=1))
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert paths(rig.store, "staging") == []


def test_a_batch_for_a_partition_that_never_existed_is_removed(
    rig: Rig, clock: ManualClock
) -> None:
    """No broker can append it."""
    stage(rig, partition=1)
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert paths(rig.store, "staging") == []


def test_an_abandoned_batch_is_refused_first(rig: Rig, clock: ManualClock) -> None:
    """Old files without a manifest are removed, and a driver that comes later is refused."""
    writer = manifest.StagingWriter(rig.store, query="q", batch=1, clock=clock)
    writer.add("t", 0, payload(["a"]))
    sections = tuple(writer.finish())
    for _ in range(3):
        clock.advance(SWEEP)
        rig.janitor.tick()
        assert len(paths(rig.store, "staging")) == 1
    for _ in range(3):
        clock.advance(SWEEP)
        rig.janitor.tick()
    assert paths(rig.store, "staging") == ["q/1/manifest.json"]
    late = manifest.Manifest(query="q", batch=1, sections=sections)
    with pytest.raises(errors.BadRequest):
        manifest.write(rig.store, late, clock)


def test_an_abandoned_batch_is_claimed_by_the_next_run(rig: Rig, clock: ManualClock) -> None:
    """A query that resumes after weeks stages its batch again; its earlier drivers are refused."""
    late = []
    for attempt in range(3):
        assert manifest.open_attempt(rig.store, "q", 1, {}) == attempt
        writer = manifest.StagingWriter(rig.store, query="q", batch=1, clock=clock, attempt=attempt)
        writer.add("t", 0, payload([f"run {attempt}"]))
        sections = tuple(writer.finish())
        late.append(manifest.Manifest(query="q", batch=1, sections=sections, attempt=attempt))
        if attempt < 2:
            clock.advance(GRACES.staging_abandoned_seconds + 1)
            for _ in range(2):
                clock.advance(SWEEP)
                rig.janitor.tick()
    assert paths(rig.store, "staging/q/1")[-2:] == ["manifest-1.json", "manifest.json"]
    assert len(paths(rig.store, "staging")) == 3  # and the file of the run that is under way
    for given_up in late[:2]:
        with pytest.raises(errors.BadRequest, match="abandoned"):
            manifest.write(rig.store, given_up, clock)
        with pytest.raises(errors.BadRequest, match="abandoned"):
            append_staged(rig, given_up.path)
    append_staged(rig, manifest.write(rig.store, late[2], clock).path)
    assert rig.read() == [(0, b"run 2")]
    rig.broker.staged.append(
        flight_messages.AppendStaged(manifest=late[0].path)
    )  # what they wanted is in the log
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert len(paths(rig.store, "staging")) == 4
    rig.publish()
    rig.confirmer.confirm()
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert paths(rig.store, "staging") == []
    assert rows_of_table(rig.store, clock) == [(0, b"run 2")]


def test_a_forgotten_write_is_removed(rig: Rig, clock: ManualClock) -> None:
    """A write without a name is removed after a day, whether it was published or not."""
    append_staged(rig, stage(rig, kind=BatchKind.UNNAMED))
    rig.publish()
    stage(rig, batch=2, kind=BatchKind.UNNAMED)
    for _ in range(2):
        rig = rig.successor()
        clock.advance(SINGLE_MEMORY_SECONDS - SWEEP)
        rig.append(["b"])
        rig.trim()
    rig = rig.successor()
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert paths(rig.store, "staging") == []


def test_brokers_that_live_for_seconds_leave_nothing_behind(rig: Rig, clock: ManualClock) -> None:
    """Programs that open their log only for a moment also sweep at intervals."""
    fill(rig, 3)
    append_staged(rig, stage(rig))
    rig.publish()
    rig.trim()
    rig.janitor.tick()
    assert len(paths(rig.store, "topics/t/partition=0")) > 1
    for _ in range(60):
        rig = rig.successor()
        rig.janitor.tick()
        clock.advance(30)
        rig.janitor.tick()
        rig.trim()
    assert paths(rig.store, "staging") == []
    assert len(paths(rig.store, "topics/t/partition=0")) == 1


def test_old_refusals_are_removed_from_the_last(rig: Rig, clock: ManualClock) -> None:
    """An interrupted sweep leaves no refusal that a later sweep would miss."""
    for attempt in range(3):
        manifest.refuse(rig.store, "staging/q/1", clock=clock, attempt=attempt)
    assert manifest.open_attempt(rig.store, "q", 1, {}) == 3
    clock.advance(limits.BATCH_MEMORY_SECONDS + 1)
    refused = errors.StorageUnavailable(operation="delete", path="staging", reason="a fault")
    faulty(rig, Fault(operation="delete", error=refused, count=3, prefix="staging"))
    left = []
    for _ in range(2):
        clock.advance(SWEEP)
        rig.janitor.tick()
        left.append(paths(rig.store, "staging"))
        assert manifest.open_attempt(rig.store, "q", 1, {}) == len(left[-1])
    assert left == [["q/1/manifest.json"], []]


def test_a_batch_with_a_manifest_is_never_abandoned(rig: Rig, clock: ManualClock) -> None:
    """A batch with a manifest remains, however late its driver comes."""
    path = stage(rig)
    for _ in range(20):
        clock.advance(SWEEP)
        rig.janitor.tick()
    append_staged(rig, path)
    assert rig.read() == [(0, b"1:0")]


def test_a_damaged_batch_does_not_stop_the_sweep(
    rig: Rig, clock: ManualClock, logged: Logged
) -> None:
    """An unreadable file below the staging folder is logged, and the other batches are swept."""
    rig.store.put("staging/a/1/manifest.json", b"torn")
    rig.store.put("staging/a/notes/x", b"")
    append_staged(rig, stage(rig))
    rig.publish()
    rig.confirmer.confirm()
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert paths(rig.store, "staging") == ["a/1/manifest.json", "a/notes/x"]
    assert [event for event, _ in logged()] == ["cannot sweep staged files"]


def test_unsorted_files_of_another_engine_are_sorted(rig: Rig, clock: ManualClock) -> None:
    """The janitor sorts the files of an OPTIMIZE once, and leaves them alone afterwards."""
    fill(rig, 4)
    table = TopicTable(rig.store, "t", clock=rig.clock)
    table.refresh()
    engines.rewrite(table, table.snapshot.files[0])
    before = rows_of_table(rig.store, rig.clock)
    rig.janitor.tick()
    snapshot = table.refresh()
    (file,) = snapshot.files[0]
    assert file.path.startswith(f"partition=0/{snapshot.topic_id}-0-3-")
    assert rows_of_table(rig.store, rig.clock) == before
    for _ in range(3):
        clock.advance(SETTLE_EVERY_SECONDS + 1)
        rig.janitor.tick()
    assert table.refresh().files[0] == (file,)


def test_all_unsorted_files_are_sorted_in_turn(rig: Rig) -> None:
    """After one partition is sorted, the others are looked at again although they are as before."""
    rig.create("w", 3)
    for partition in range(3):
        for number in range(4):
            rig.append([f"{number}"], topic="w", partition=partition)
            rig.publish()
    table = TopicTable(rig.store, "w", clock=rig.clock)
    for files_of in table.refresh().files:
        engines.rewrite(table, files_of)
    for _ in range(3):
        rig.janitor.tick()
    snapshot = table.refresh()
    for number, (file,) in enumerate(snapshot.files):
        assert file.path.startswith(f"partition={number}/{snapshot.topic_id}-0-3-")


def unsorted(rig: Rig) -> TopicTable:
    """Has another engine rewrite the first partition of topic t."""
    fill(rig, 4)
    table = TopicTable(rig.store, "t", clock=rig.clock)
    engines.rewrite(table, table.refresh().files[0])
    return table


def is_sorted(table: TopicTable) -> bool:
    """Returns whether one sorted file of ours has all rows of that partition."""
    snapshot = table.refresh()
    ours = f"partition=0/{snapshot.topic_id}-0-3-"
    return [file.path.startswith(ours) for file in snapshot.files[0]] == [True]


def test_a_long_sort_is_not_started_over(
    rig: Rig, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: files of another engine are sorted, also if that takes longer than a tick."""
    table = unsorted(rig)
    put_file = data_file.put_file

    def put_slowly(*args: Any, **options: Any) -> TableFile:
        clock.advance(2 * UPKEEP_SECONDS)
        return put_file(*args, **options)

    monkeypatch.setattr(data_file, "put_file", put_slowly)
    rig.janitor.tick()
    assert is_sorted(table)


def test_a_long_sort_delays_no_other_topic(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the files of one topic are sorted, the others are maintained."""
    table = unsorted(rig)
    gate, entered = threading.Event(), threading.Event()
    put_file = data_file.put_file

    def put_late(*args: Any, **options: Any) -> TableFile:
        entered.set()
        assert gate.wait(30)
        return put_file(*args, **options)

    monkeypatch.setattr(data_file, "put_file", put_late)
    with ThreadPoolExecutor(1) as workers:
        monkeypatch.setattr(rig.janitor, "_workers", workers)
        rig.janitor.tick()
        assert entered.wait(30)
        rig.janitor.tick()
        assert not is_sorted(table)
        gate.set()
        rig.janitor.wait()
    assert is_sorted(table)


# ------------------------------------------------------------------------------ many topics


class Looks(NoFaults):
    """Counts the looks at each topic's log."""

    def __init__(self) -> None:
        self.topics: Counter[str] = Counter()

    def before(self, operation: Operation, path: str) -> None:
        if operation == "get" and "/_delta_log/" in path:
            self.topics[path.split("/")[1]] += 1


def many_topics(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Looks:
    """Creates 12 topics, which are looked at in turns of 3, and forgets the first looks."""
    monkeypatch.setattr("sparklog.broker.log.janitor.UPKEEP_TOPICS", 3)
    for number in range(10):
        rig.create(f"u{number}", 1)
    assert isinstance(rig.store, MemoryStore)
    looks = Looks()
    rig.maintain_on(rig.store.view(looks))
    for _ in range(4):
        rig.janitor.tick()
    looks.topics.clear()
    return looks


def test_a_tick_looks_at_some_topics(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of many topics has its turn, and no tick looks at all of them."""
    looks = many_topics(rig, monkeypatch)
    rig.janitor.tick()
    assert len(looks.topics) == 3
    for _ in range(3):
        rig.janitor.tick()
    assert len(looks.topics) == 12


def test_topics_with_commits_are_looked_at_next(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic that was published several times does not wait for its turn."""
    looks = many_topics(rig, monkeypatch)
    for _ in range(max(rig.options.janitor.compact_files // 4, 1)):
        rig.append(["a"], topic="u1")
        rig.publish()
    rig.janitor.tick()
    assert "u1" in looks.topics


def test_a_tick_ends_after_a_while(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, clock: ManualClock
) -> None:
    """Topics that a long tick does not reach are the first of the next one."""
    looks = many_topics(rig, monkeypatch)

    class Slow(Looks):
        def before(self, operation: Operation, path: str) -> None:
            super().before(operation, path)
            clock.advance(UPKEEP_SECONDS)

    slow = Slow()
    assert isinstance(rig.store, MemoryStore)
    for state in rig.janitor._topics.values():
        state.table.store = state.table.log_reader.store = rig.store.view(slow)
    order = []
    for _ in range(12):
        rig.janitor.tick()
        assert len(slow.topics) == 1
        order += list(slow.topics)
        slow.topics.clear()
    assert len(set(order)) == 12
    assert not looks.topics


def test_a_long_compaction_by_key_delays_no_other_topic(
    rig: Rig, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While superseded records of one topic are removed, the others are maintained."""
    rig.create("keyed", 1, **{"cleanup.policy": "compact"})
    gate, entered = threading.Event(), threading.Event()

    def choose(*_: Any, **__: Any) -> list[Any]:
        entered.set()
        assert gate.wait(30)
        return []

    monkeypatch.setattr(key_compaction, "choose", choose)
    with ThreadPoolExecutor(1) as workers:
        monkeypatch.setattr(rig.janitor, "_workers", workers)
        rig.janitor.tick()
        assert entered.wait(30)
        state = rig.janitor._topics[rig.led_partitions.topic("t").topic_id]
        for _ in range(2):
            looked = state.due["retention"]
            clock.advance(RETENTION_EVERY_SECONDS)
            rig.janitor.tick()
            assert state.due["retention"] > looked
        gate.set()
        rig.janitor.wait()
