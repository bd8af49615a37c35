from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparklog import errors, limits, wire
from sparklog.broker import janitor as janitors
from sparklog.clock import ManualClock
from sparklog.settings import JanitorSettings
from sparklog.storage import manifest
from sparklog.storage.objects import (
    Fault,
    Faults,
    LocalStore,
    MemoryStore,
    PutUnresolved,
    ScriptedFaults,
    SyncFailed,
)
from sparklog.storage.snapshot import TableFile
from sparklog.storage.table import Change, Table, data_path
from tests.support import engines
from tests.support.brokers import Rig, RigOptions, paths, payload, rows_of_table

GRACES = JanitorSettings(
    compact_files=3,
    removed_file_grace_seconds=60.0,
    orphan_grace_seconds=120.0,
    staging_abandoned_seconds=1_000.0,
    table_checkpoint_every=5,
)
SWEEP = limits.SWEEP_EVERY_SECONDS + 1


@pytest.fixture
def clock() -> ManualClock:
    """A clock that stands still."""
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    """An empty root."""
    return MemoryStore(clock)


@pytest.fixture
def rig(store: MemoryStore, clock: ManualClock) -> Rig:
    """A broker with topics t and u."""
    found = Rig(store, clock, options=RigOptions(hot_bytes=0, janitor=GRACES))
    found.create("t")
    found.create("u")
    return found


def files(rig: Rig, topic: str = "t") -> int:
    """Data files that stand, named or not."""
    return len([name for name in paths(rig.store, f"topics/{topic}") if name.endswith(".parquet")])


def fill(rig: Rig, count: int, topic: str = "t") -> None:
    """So many records, each in a file of its own."""
    for number in range(count):
        rig.append([f"{number}"], topic=topic)
        rig.publish()


def faulty(rig: Rig, *script: Fault) -> None:
    """The janitor's own requests fail so."""
    assert isinstance(rig.store, MemoryStore)
    faults: Faults = ScriptedFaults(*script)
    rig.janitor._store = rig.store.view(faults)


class Complaints:
    """Takes the place of the log, and keeps the events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, object]] = []

    def warning(self, event: str, **facts: object) -> None:
        self.events.append((event, facts.get("topic")))


@pytest.fixture(autouse=True)
def complaints(monkeypatch: pytest.MonkeyPatch) -> Complaints:
    """What the janitor says."""
    found = Complaints()
    monkeypatch.setattr(janitors, "_log", found)
    return found


def test_small_files_are_merged(rig: Rig, clock: ManualClock, complaints: Complaints) -> None:
    """Neighbours become one file, the replaced ones go after their grace, the records stay."""
    fill(rig, 3)
    rig.janitor.tick()
    (file,) = Table(rig.store, "t", clock=clock).refresh().files[0]
    assert (file.first, file.last, files(rig)) == (0, 2, 4)
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert files(rig) == 1
    assert rig.read() == rows_of_table(rig.store, clock) == [(0, b"0"), (1, b"1"), (2, b"2")]
    assert complaints.events == []


def test_a_compacted_topic_keeps_the_last_of_each_key(
    rig: Rig, clock: ManualClock, complaints: Complaints
) -> None:
    """When enough is dirty; merging goes on, and another topic's records are left alone."""
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
    found = Table(rig.store, "c", clock=clock).refresh()
    assert len(found.files[0]) < 4
    assert found.ends == (9,)
    assert complaints.events == []


def test_what_is_too_old_goes(rig: Rig, clock: ManualClock, complaints: Complaints) -> None:
    """By `retention.ms`, though it be in memory; the log starts later, and files go in time."""
    rig.create("r", retention_ms="600000")
    for _ in range(3):
        fill(rig, 1, "r")
        clock.advance(300.0)
        rig.janitor.tick()
    partition = rig.ledger.topic("r").partition(0)
    assert (partition.start, partition.end, files(rig, "r")) == (1, 3, 3)
    assert rig.read("r", start=1) == rows_of_table(rig.store, clock, "r") == [(1, b"0"), (2, b"0")]
    with pytest.raises(errors.OffsetOutOfRange):
        rig.read("r")
    rig.append(["3"], topic="r")
    clock.advance(SWEEP)
    rig.janitor.tick()
    # The newest that is published too; what is not published yet is not looked at.
    assert (partition.start, partition.published, partition.end) == (3, 3, 4)
    assert rig.read("r", start=3) == [(3, b"3")]
    assert files(rig, "r") == 2
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert not [name for name in paths(rig.store, "topics/r") if name.startswith("partition=")]
    successor = rig.successor()
    assert successor.core.place("r", 0).start == 3
    assert successor.read("r", start=3) == [(3, b"3")]
    assert complaints.events == []


def test_what_is_too_much_goes(rig: Rig, clock: ManualClock) -> None:
    """By `retention.bytes`, now and then, and in a topic that is altered too."""
    rig.create("r", retention_bytes="1")
    fill(rig, 2, "r")
    rig.janitor.tick()
    assert rows_of_table(rig.store, clock, "r") == [(1, b"1")]
    fill(rig, 1, "r")
    rig.janitor.tick()
    assert rig.core.place("r", 0).start == 1
    clock.advance(limits.RETENTION_EVERY_SECONDS)
    rig.janitor.tick()
    assert rig.core.place("r", 0).start == 2
    fill(rig, 2)
    rig.core.alter(wire.AlterTopic(topic="t", config={"retention.bytes": "1"}))
    clock.advance(limits.RETENTION_EVERY_SECONDS)
    rig.janitor.tick()
    assert rows_of_table(rig.store, clock, "t") == [(1, b"1")]
    assert rig.core.place("u", 0).start == 0


def test_a_compacted_topic_keeps_its_records(rig: Rig, clock: ManualClock) -> None:
    """Unless its policy names `delete` as well: then both rules hold."""
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
    assert rig.core.place("d", 0).start == 3


def test_little_that_is_dirty_is_compacted_when_it_is_old(rig: Rig, clock: ManualClock) -> None:
    """Where nothing more comes, a few records are worth a pass as well; tombstones go in time."""
    rig.create("c", cleanup_policy="compact", delete_retention_ms="7200000")
    rig.append(["a", "b", None], topic="c", key=[b"k"] * 3)
    rig.publish()
    rig.janitor.tick()
    assert len(rows_of_table(rig.store, clock, "c")) == 3
    clock.advance(limits.COMPACT_SETTLED_SECONDS + 1)
    rig.janitor.tick()
    assert rows_of_table(rig.store, clock, "c") == [(2, None)]
    clock.advance(3_600)
    rig.janitor.tick()
    assert rows_of_table(rig.store, clock, "c") == [(2, None)]
    clock.advance(3_600)
    rig.janitor.tick()
    assert rows_of_table(rig.store, clock, "c") == rig.read("c") == []
    assert rig.append(["c"], topic="c", key=[b"k"]).base_offset == 3


def test_keys_that_cannot_be_compacted_stop_no_upkeep(
    rig: Rig, clock: ManualClock, complaints: Complaints
) -> None:
    """A damaged file is named, now and then, and the topic has its checkpoints meanwhile."""
    rig.create("c", cleanup_policy="compact")
    for number in range(5):
        rig.append([f"{number}"], topic="c", key=[b"k"])
        rig.publish()
    (file, *_) = Table(rig.store, "c", clock=clock).refresh().files[0]
    rig.store.put(data_path("c", file), b"PAR1")
    for _ in range(2):
        rig.janitor.tick()
    assert complaints.events[0] == ("upkeep failed", "c")
    assert len(complaints.events) <= 2
    assert any(name.endswith("checkpoint.parquet") for name in paths(rig.store, "topics/c"))


def test_few_files_are_left_alone(rig: Rig, clock: ManualClock) -> None:
    """Below the number that is worth a merge nothing is written."""
    fill(rig, 2)
    before = paths(rig.store, "topics")
    rig.janitor.tick()
    assert paths(rig.store, "topics") == before


def test_a_checkpoint_comes_after_so_many_commits(rig: Rig) -> None:
    """Readers of the table need not replay all of its commits."""
    fill(rig, 5)
    rig.janitor.tick()
    assert any(name.endswith("checkpoint.parquet") for name in paths(rig.store, "topics/t"))
    assert not any(name.endswith("checkpoint.parquet") for name in paths(rig.store, "topics/u"))


def test_one_topics_trouble_is_no_others(
    rig: Rig, clock: ManualClock, complaints: Complaints
) -> None:
    """A topic whose upkeep fails is named and left alone for a while; the others are tended."""
    fill(rig, 3)
    fill(rig, 3, "u")
    torn = f"topics/t/_delta_log/{4:020d}.json"
    rig.store.put(torn, b'{"add"')
    rig.janitor.tick()
    assert (files(rig), files(rig, "u")) == (3, 4)
    assert complaints.events == [("upkeep failed", "t")]
    rig.store.delete([torn])
    rig.janitor.tick()
    assert files(rig) == 3
    clock.advance(limits.UPKEEP_RETRY_SECONDS)
    rig.janitor.tick()
    assert files(rig) == 4


@pytest.mark.parametrize("operation", ["put", "get", "list_after", "put_new", "delete", "walk"])
def test_a_store_that_fails_stops_no_janitor(rig: Rig, clock: ManualClock, operation: str) -> None:
    """Whatever a request of the upkeep meets, it is made up for later."""
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


def test_a_disk_that_fails_is_not_shrugged_off(rig: Rig) -> None:
    """A failed flush is for the broker to stop at."""
    fill(rig, 3)
    faulty(rig, Fault(operation="put_new", error=SyncFailed("?", "EIO"), moment="between"))
    with pytest.raises(SyncFailed):
        rig.janitor.tick()


def test_a_janitor_that_is_told_to_stops(rig: Rig) -> None:
    """Between any two pieces of work it looks whether it is to leave."""
    fill(rig, 3)
    rig.janitor.tick(should_stop=lambda: True)
    assert files(rig) == 3


def test_orphans_go(rig: Rig, clock: ManualClock) -> None:
    """A file that was put and never committed is removed once nobody can commit it any more."""
    fill(rig, 1)
    known = Table(rig.store, "t", clock=clock).refresh()
    orphan = f"topics/t/partition=0/{known.topic_id}-5-9-{7:016x}.parquet"
    rig.store.put(orphan, b"")
    rig.janitor.tick()
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert files(rig) == 1
    assert rig.read() == [(0, b"0")]


def test_an_odd_file_stops_no_janitor(rig: Rig, clock: ManualClock, complaints: Complaints) -> None:
    """A file that nobody can merge is named; its topic has its checkpoints, the others all."""
    fill(rig, 6)
    fill(rig, 3, "u")
    table = Table(rig.store, "t", clock=clock)
    odd = TableFile(
        path="partition=0/odd.parquet", partition=0, size_bytes=9, rows=None, first=None, last=None
    )
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"value": [b"0"]}), sink)
    rig.store.put(data_path("t", odd), sink.getvalue())
    odd = dataclasses.replace(odd, modified_us=clock.now_us())
    table.commit(lambda _: Change(adds=(odd,)))
    clock.advance(limits.UPKEEP_RETRY_SECONDS)
    rig.janitor.tick()
    assert complaints.events == [("upkeep failed", "t")]
    assert any(name.endswith("checkpoint.parquet") for name in paths(rig.store, "topics/t"))
    assert files(rig, "u") == 4


def test_what_crashed_puts_left_goes(tmp_path: Path) -> None:
    """A hidden file that nobody has written to for long is removed, and a younger one is not."""
    clock = ManualClock(now_us=time.time_ns() // 1_000)
    rig = Rig(LocalStore(tmp_path), clock, options=RigOptions(janitor=GRACES))
    rig.create("t")
    rig.append(["a"])
    rig.publish()
    for name, age_seconds in (("old", limits.TEMPORARY_KEPT_SECONDS), ("young", 0.0)):
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


# ------------------------------------------------------------------------------ staged files


def stage(
    rig: Rig, *, topic: str = "t", partition: int = 0, batch: int = 1, sections: int = 1
) -> str:
    """A batch with its manifest; the manifest's path."""
    writer = manifest.StagingWriter(rig.store, query="q", batch=batch, clock=rig.clock)
    for number in range(sections):
        columns = {"key": [b"k"]} if number % 2 else {}
        writer.add(topic, partition, payload([f"{batch}:{number}"], **columns))
    found = manifest.Manifest(query="q", batch=batch, sections=tuple(writer.finish()))
    return manifest.write(rig.store, found, rig.clock).path


def adopt(rig: Rig, path: str) -> None:
    """Appends the batch."""
    rig.core.adopt(wire.Adopt(manifest=path))


def test_a_batch_goes_once_all_of_it_is_published(rig: Rig, clock: ManualClock) -> None:
    """Before that nobody touches its files: not when it is new, nor when it is adopted."""
    path = stage(rig, sections=3)
    for step in (None, lambda: adopt(rig, path)):
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


def test_a_half_published_batch_stays(store: MemoryStore, clock: ManualClock) -> None:
    """A batch of several sections is not done when the first of them is in the table."""
    options = RigOptions(hot_bytes=0, janitor=GRACES)
    rig = Rig(store, clock, options=options)
    rig.create("t")
    adopt(rig, stage(rig, sections=3))
    name = next(name for name in paths(store, "staging") if name.endswith(".arrow"))
    whole = bytes(store.get(f"staging/{name}"))
    # The last section is damaged, so that the first two are published without it.
    store.put(f"staging/{name}", whole[:-30] + bytes(30))
    with pytest.raises(errors.CorruptObject):
        rig.publish()
    rig.confirmer.confirm()
    assert rows_of_table(store, clock) == [(0, b"1:0"), (1, b"1:1")]
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
    """However many batches came after it: a held-back topic publishes what was staged long ago."""
    count = limits.BATCHES_REMEMBERED + 3
    for batch in range(count):
        adopt(rig, stage(rig, batch=batch))
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
    """One topic's table may be far ahead, or the topic gone: the other's rows are still staged."""
    for batch in range(limits.BATCHES_REMEMBERED + 3):
        writer = manifest.StagingWriter(rig.store, query="q", batch=batch, clock=clock)
        for topic in ("t", "u"):
            writer.add(topic, 0, payload([f"{batch}"]))
        found = manifest.Manifest(query="q", batch=batch, sections=tuple(writer.finish()))
        adopt(rig, manifest.write(rig.store, found, clock).path)
    before = paths(rig.store, "staging")
    while rig.ledger.topic("t").partition(0).unpublished:
        rig.publisher.publish(rig.ledger.topic("t"))
    rig.confirmer.confirm()
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert paths(rig.store, "staging") == before
    rig.core.delete_topic("t")
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert paths(rig.store, "staging") == before
    rig.publish()
    rig.confirmer.confirm()
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert paths(rig.store, "staging") == []


def test_a_batch_of_a_topic_that_is_gone_goes(rig: Rig, clock: ManualClock) -> None:
    """Nobody waits for records of a deleted topic."""
    adopt(rig, stage(rig))
    rig.core.delete_topic("t")
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert paths(rig.store, "staging") == []


def new_topic(rig: Rig) -> tuple[str, int]:
    """The successor makes a topic: its name, and its last partition."""
    rig.create("new")
    return "new", 0


def new_partition(rig: Rig) -> tuple[str, int]:
    """The successor makes a topic wider."""
    rig.core.add_partitions(wire.AddPartitions(topic="t", partitions=2))
    return "t", 1


def same_name(rig: Rig) -> tuple[str, int]:
    """The successor makes a topic anew."""
    rig.core.delete_topic("t")
    rig.create("t")
    return "t", 0


@pytest.mark.parametrize("change", [new_topic, new_partition, same_name])
def test_a_replaced_broker_takes_nothing_away(
    rig: Rig, clock: ManualClock, change: Callable[[Rig], tuple[str, int]]
) -> None:
    """What its successor has acked stays, where a broker slept and does not know of the place."""
    adopt(rig, stage(rig, batch=7))
    rig.publish()
    rig.confirmer.confirm()
    clock.advance(SWEEP)
    successor = rig.successor(broker=2)
    topic, partition = change(successor)
    adopt(successor, "staging/q/7/manifest.json")  # as a query does that begins again
    adopt(successor, stage(successor, topic=topic, partition=partition, batch=8))
    rig.janitor.tick()
    successor.publish()
    successor.confirmer.confirm()
    assert successor.read(topic, partition)[-1][1] == b"8:0"
    clock.advance(SWEEP)
    successor.janitor.tick()
    assert paths(rig.store, "staging") == []


def test_a_rerun_that_was_skipped_goes(rig: Rig, clock: ManualClock) -> None:
    """What a query stages again, for other partitions, is in the tables already."""
    rig.core.add_partitions(wire.AddPartitions(topic="t", partitions=2))
    adopt(rig, stage(rig))
    rig.publish()
    rig.confirmer.confirm()
    clock.advance(SWEEP)
    rig.janitor.tick()
    adopt(rig, stage(rig, partition=1))
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert paths(rig.store, "staging") == []


def test_a_batch_for_a_partition_that_never_was_goes(rig: Rig, clock: ManualClock) -> None:
    """Nobody can adopt it."""
    stage(rig, partition=1)
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert paths(rig.store, "staging") == []


def test_an_abandoned_batch_is_refused_first(rig: Rig, clock: ManualClock) -> None:
    """Files without a manifest go when they are old, and a driver that comes then is refused."""
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
    """A query that resumes after weeks stages its batch again; each driver given up is refused."""
    late = []
    for attempt in range(3):
        assert manifest.open_attempt(rig.store, "q", 1) == attempt
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
        with pytest.raises(errors.BadRequest, match="given up"):
            manifest.write(rig.store, given_up, clock)
        with pytest.raises(errors.BadRequest, match="given up"):
            adopt(rig, given_up.path)
    adopt(rig, manifest.write(rig.store, late[2], clock).path)
    assert rig.read() == [(0, b"run 2")]
    rig.core.adopt(wire.Adopt(manifest=late[0].path))  # what they wanted is in the log
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert len(paths(rig.store, "staging")) == 4
    rig.publish()
    rig.confirmer.confirm()
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert paths(rig.store, "staging") == []
    assert rows_of_table(rig.store, clock) == [(0, b"run 2")]


def test_refusals_go_from_the_last_when_they_are_old(rig: Rig, clock: ManualClock) -> None:
    """A sweep that is cut short leaves no refusal that nobody would find."""
    for attempt in range(3):
        manifest.refuse(rig.store, "staging/q/1", clock=clock, attempt=attempt)
    assert manifest.open_attempt(rig.store, "q", 1) == 3
    clock.advance(limits.BATCH_MEMORY_SECONDS + 1)
    refused = errors.StorageUnavailable(operation="delete", path="staging", reason="a fault")
    faulty(rig, Fault(operation="delete", error=refused, count=3, prefix="staging"))
    left = []
    for _ in range(2):
        clock.advance(SWEEP)
        rig.janitor.tick()
        left.append(paths(rig.store, "staging"))
        assert manifest.open_attempt(rig.store, "q", 1) == len(left[-1])
    assert left == [["q/1/manifest.json"], []]


def test_a_batch_with_a_manifest_is_never_abandoned(rig: Rig, clock: ManualClock) -> None:
    """However late its driver comes, what was decided is still there."""
    path = stage(rig)
    for _ in range(20):
        clock.advance(SWEEP)
        rig.janitor.tick()
    adopt(rig, path)
    assert rig.read() == [(0, b"1:0")]


def test_a_damaged_batch_is_in_nobodys_way(
    rig: Rig, clock: ManualClock, complaints: Complaints
) -> None:
    """What makes no sense below the staging folder is named, and the other batches are swept."""
    rig.store.put("staging/a/1/manifest.json", b"torn")
    rig.store.put("staging/a/notes/x", b"")
    adopt(rig, stage(rig))
    rig.publish()
    rig.confirmer.confirm()
    clock.advance(SWEEP)
    rig.janitor.tick()
    assert paths(rig.store, "staging") == ["a/1/manifest.json", "a/notes/x"]
    assert [event for event, _ in complaints.events] == ["sweeping of staged files failed"]


def test_what_another_engine_left_in_no_order_is_put_in_order(rig: Rig, clock: ManualClock) -> None:
    """Once: the janitor looks at what OPTIMIZE has written, and leaves the next ticks alone."""
    fill(rig, 4)
    table = Table(rig.store, "t", clock=rig.clock)
    table.refresh()
    engines.rewrite(table, table.snapshot.files[0])
    before = rows_of_table(rig.store, rig.clock)
    rig.janitor.tick()
    snapshot = table.refresh()
    (file,) = snapshot.files[0]
    assert file.path.startswith(f"partition=0/{snapshot.topic_id}-0-3-")
    assert rows_of_table(rig.store, rig.clock) == before
    for _ in range(3):
        clock.advance(limits.SETTLE_EVERY_SECONDS + 1)
        rig.janitor.tick()
    assert table.refresh().files[0] == (file,)
