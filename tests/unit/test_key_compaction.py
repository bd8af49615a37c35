"""Key compaction: which records go and when, and that no deleted key ever comes back."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparklog import errors, limits
from sparklog.clock import Clock, ManualClock
from sparklog.formats import flight_messages, topic_config
from sparklog.formats.record import FILE_SCHEMA, rows
from sparklog.settings import JanitorSettings
from sparklog.storage.follow import RootFollower
from sparklog.storage.maintenance import file_compaction, key_compaction, newest_records
from sparklog.storage.maintenance.key_compaction import CompactionPolicy, choose, compact, policy_of
from sparklog.storage.objects import LocalStore, MemoryStore, Store
from sparklog.storage.objects.faults import Operation
from sparklog.storage.reading.read import first_since, read_slice
from sparklog.storage.snapshot import TableFile
from sparklog.storage.table import data_file
from sparklog.storage.table.changes import (
    TableChange,
    create_change,
    delete_change,
    describe_change,
)
from sparklog.storage.table.names import (
    compacted_app_id,
    data_path,
    end_app_id,
    maintenance_app_id,
    tombstones_app_id,
)
from sparklog.storage.table.topic_table import TopicTable
from tests.support import tables
from tests.support.brokers import (
    Rig,
    RigOptions,
    plan_of_table,
    rows_of,
    rows_of_root,
    rows_of_table,
)
from tests.support.tables import TOPIC_ID

DAY_SECONDS = limits.DELETE_RETENTION_MS / 1_000
COMPACT = {"cleanup.policy": "compact"}

Sent = tuple[str | None, str | None]
"""Key and value."""
Row = tuple[int, str | None, str | None]
"""Offset, key and value."""

# ------------------------------------------------------------------------------ small tables


@pytest.fixture
def table(store: MemoryStore, clock: ManualClock) -> TopicTable:
    """A compacted topic of one empty partition."""
    return make(store, clock)


def make(store: Store, clock: Clock, partitions: int = 1, **config: str) -> TopicTable:
    """A compacted topic; underscores in keys of `config` stand for dots."""
    named = COMPACT | {key.replace("_", "."): value for key, value in config.items()}
    table = TopicTable(store, "t", clock=clock)
    table.commit(lambda _: create_change(TOPIC_ID, partitions, named))
    return table


def text(value: bytes | None) -> str | None:
    """Returns the records that were sent as text."""
    return None if value is None else value.decode()


def batch_of(sent: Sequence[Sent], first: int, *, at_us: int, partition: int = 0) -> pa.RecordBatch:
    """Rows of those keys and values."""
    given = pa.record_batch(
        {
            "key": pa.array([key and key.encode() for key, _ in sent], pa.binary()),
            "value": pa.array(
                [None if value is None else value.encode() for _, value in sent], pa.binary()
            ),
        }
    )
    return rows(given, partition=partition, base_offset=first, timestamp_us=at_us, timestamp_type=0)


def add(table: TopicTable, *sent: Sent, partition: int = 0, at_us: int | None = None) -> TableFile:
    """Publishes the records as one file; their time is now unless another is given."""
    first = table.refresh().ends[partition]
    file = data_file.write_file(
        table.store,
        topic=table.topic,
        topic_id=TOPIC_ID,
        partition=partition,
        batches=[
            batch_of(
                sent,
                first,
                at_us=table.clock.now_us() if at_us is None else at_us,
                partition=partition,
            )
        ],
        clock=table.clock,
    )
    txns = {end_app_id(TOPIC_ID, partition): first + len(sent)}
    table.commit(lambda _: TableChange(adds=(file,), txns=txns))
    return file


def add_texts(table: TopicTable, *files: str) -> None:
    """A file for each word list: `a1` sends a = 1, `a-` deletes a, `?1` sends 1 without a key."""
    for words in files:
        add(
            table,
            *(
                (None if word[0] == "?" else word[0], None if word[1:] == "-" else word[1:])
                for word in words.split()
            ),
        )


def words_of(table: TopicTable) -> str:
    """The table's rows in the same spelling, each after its offset; files apart by a bar."""
    found = []
    for file in table.refresh().files[0]:
        read = pq.read_table(table.store.get(data_path("t", file))).to_pydict()
        found.append(
            " ".join(
                f"{offset}{text(key) or '?'}{text(value) or '-'}"
                for offset, key, value in zip(
                    read["offset"],
                    read.get("key", [None] * len(read["offset"])),  # null in all rows
                    read["value"],
                    strict=True,
                )
            )
        )
    return " | ".join(found)


def left_in(table: TopicTable) -> list[str]:
    """Returns the same words in offset order, in any files."""
    words = words_of(table).replace(" |", "").split()
    return sorted(words, key=lambda word: int(re.match(r"\d+", word)[0]))  # type: ignore[index]


def compact_all(table: TopicTable) -> list[int | None]:
    """Runs every pass that is due. Returns the number of removed records."""
    table.refresh()
    return [compact(table, each) for each in choose(table, everything=True)]


def data_files(table: TopicTable) -> set[str]:
    """Returns the files in the table's folder alongside the log."""
    return {
        stat.name for stat in table.store.walk(table.folder) if not stat.name.startswith("_delta")
    }


def mark(table: TopicTable, app_id: str) -> int | None:
    """The `txn`'s version."""
    txn = table.txn(app_id)
    return txn.version if txn else None


# ------------------------------------------------------------------------------ configuration


@pytest.mark.parametrize(
    ("config", "policy"),
    [
        ({}, None),
        ({"cleanup.policy": "delete", "delete.retention.ms": "1"}, None),
        (COMPACT, CompactionPolicy()),
        (
            COMPACT
            | {
                "min.cleanable.dirty.ratio": "0.01",
                "min.compaction.lag.ms": "7",
                "delete.retention.ms": "0",
            },
            CompactionPolicy(
                min_cleanable_dirty_ratio=0.01, min_compaction_lag_ms=7, delete_retention_ms=0
            ),
        ),
    ],
)
def test_a_topic_says_how_it_is_compacted(
    config: dict[str, str], policy: CompactionPolicy | None
) -> None:
    """Policies use Kafka's keys, with Kafka's defaults."""
    assert topic_config.check(config) == config
    assert policy_of(config) == policy


def test_defaults_are_what_is_told() -> None:
    """The defaults match the list of topic configurations."""
    told = {name: key.default for name, key in topic_config.KEYS.items()}
    assert policy_of(told) is None
    assert policy_of(told | COMPACT) == policy_of(COMPACT)


def test_a_number_that_is_none_is_named() -> None:
    """A table's own properties may have been damaged."""
    with pytest.raises(errors.BadOption, match=r"delete\.retention\.ms"):
        policy_of(COMPACT | {"delete.retention.ms": "soon"})


# ------------------------------------------------------------------------------ which records go


@pytest.mark.parametrize(
    ("files", "left"),
    [
        (["a1 b1 a2"], "1b1 2a2"),
        (["a1", "b1", "a2"], "1b1 2a2"),
        (["a1 b1", "a2 c1", "b2 c2"], "2a2 4b2 5c2"),
        (["a1", "a2", "a3", "a4"], "3a4"),
        (["a1 b1 c1"], "0a1 1b1 2c1"),
        (["a1 ?1 a2 ?2"], "1?1 2a2 3?2"),
        (["?-", "?-"], "0?- 1?-"),
        (["a1 b1", "a-"], "1b1 2a-"),
        (["a1", "a-", "a2"], "2a2"),
        (["a-", "a-"], "1a-"),
        (["a1 c1", "b1 c2", "a2"], "2b1 3c2 4a2"),
    ],
)
def test_the_last_record_of_a_key_stays(table: TopicTable, files: list[str], left: str) -> None:
    """Offsets stay too, records without a key stay, and a second pass finds nothing to do."""
    add_texts(table, *files)
    end, sent = table.snapshot.ends, sum(len(words.split()) for words in files)
    (removed,) = compact_all(table)
    assert " ".join(left_in(table)) == left
    assert removed == sent - len(left.split())
    assert table.snapshot.ends == end
    assert mark(table, compacted_app_id(TOPIC_ID, 0)) == end[0]
    assert compact_all(table) == []


def test_an_empty_key_is_a_key(table: TopicTable) -> None:
    """A key of no bytes is another than no key, and than one of zeros."""
    add(table, ("", "1"), (None, "1"), ("\0", "1"), ("", "2"), ("\0\0", "1"), ("\0", "2"))
    compact_all(table)
    read = pq.read_table(table.store.get(data_path("t", table.snapshot.files[0][0])))
    assert read["offset"].to_pylist() == [1, 3, 4, 5]


def test_partitions_are_apart(store: MemoryStore, clock: ManualClock) -> None:
    """A key of one partition says nothing about the same in another."""
    table = make(store, clock, 2)
    for partition in (0, 1):
        add(table, ("a", "1"), ("b", "1"), partition=partition)
    add(table, ("a", "2"), partition=1)
    assert compact_all(table) == [0, 1]
    assert [sum(file.rows or 0 for file in files) for files in table.snapshot.files] == [2, 2]


def test_a_topic_that_is_not_compacted_is_left_alone(
    store: MemoryStore, clock: ManualClock
) -> None:
    """`delete`, which is the default, removes nothing by key."""
    table = make(store, clock, cleanup_policy="delete")
    add_texts(table, "a1", "a2")
    assert compact_all(table) == []
    assert key_compaction.borders(table, table.snapshot) == (0,)


def test_an_append_only_table_keeps_superseded_records(table: TopicTable) -> None:
    """No pass is due while the property is set; then the same records go."""
    add_texts(table, "a1", "a2")
    append_only(table)
    assert choose(table, everything=True) == []
    table.commit(lambda _: TableChange(properties={"delta.appendOnly": None}))
    assert compact_all(table) == [1]


# ------------------------------------------------------------------------------ when


def test_enough_must_be_dirty(table: TopicTable) -> None:
    """New records wait until they exceed the ratio in enough files, or are old enough."""

    def chosen(**how: int) -> int:
        return len(choose(table, **how))  # type: ignore[arg-type]

    add_texts(table, "a1 b1 c1", "a1 b1 c2")
    assert chosen() == 0
    assert chosen(compact_files=2) == 1
    assert chosen(target_bytes=100) == 1
    assert chosen(settled_before_us=table.clock.now_us() + 1_000) == 1
    compact_all(table)
    assert chosen(compact_files=1) == 0
    size = table.snapshot.files[0][0].size_bytes
    # As many bytes as are clean; then one more, which is more than half.
    small = dataclasses.replace(tables.table_file(table.clock, 0, 6, 7), size_bytes=size)
    txns = {end_app_id(TOPIC_ID, 0): 8}
    table.commit(lambda _: TableChange(adds=(small,), txns=txns))
    assert chosen(compact_files=1) == 0
    more = dataclasses.replace(tables.table_file(table.clock, 0, 8, 9), size_bytes=1)
    table.commit(lambda _: TableChange(adds=(more,), txns={end_app_id(TOPIC_ID, 0): 10}))
    assert chosen(compact_files=2) == 1
    assert chosen(compact_files=3) == 0


def test_what_is_dirty_is_known_after_a_restart(table: TopicTable) -> None:
    """The table itself says it, also from its checkpoint."""
    add_texts(table, "a1 a2")
    compact_all(table)
    table.checkpoint()
    again = TopicTable(table.store, "t", clock=table.clock)
    assert compact_all(again) == []
    assert key_compaction.borders(again, again.snapshot) == (2,)


def test_young_records_wait(store: MemoryStore, clock: ManualClock) -> None:
    """Nothing younger than the lag goes, nor anything because of it."""
    table = make(store, clock, min_compaction_lag_ms="60000")
    add_texts(table, "a1", "a2")
    clock.advance(59)
    assert compact_all(table) == []
    clock.advance(2)
    add_texts(table, "a3", "b1", "b2")
    assert compact_all(table) == [1]
    assert words_of(table) == "1a2 | 2a3 | 3b1 | 4b2"
    assert key_compaction.borders(table, table.snapshot) == (2,)
    clock.advance(61)
    assert compact_all(table) == [2]
    assert words_of(table) == "2a3 | 4b2"


def test_no_record_waits_for_ever(store: MemoryStore, clock: ManualClock) -> None:
    """After the longest lag a little dirt is enough, once for each such time."""
    table = make(store, clock, max_compaction_lag_ms="60000")
    add_texts(table, "a1 b1 c1 d1")
    compact_all(table)
    for _ in range(2):
        clock.advance(30)
        add_texts(table, "a2")
        clock.advance(59)
        assert choose(table) == []
        clock.advance(1)
        (each,) = choose(table)
        assert compact(table, each) == 1
        assert choose(table) == []


def test_records_without_a_time_are_as_young_as_their_file(
    store: MemoryStore, clock: ManualClock
) -> None:
    """Kafka's -1 ms is not a time: such records wait for both lags from when they were written."""
    table = make(store, clock, min_compaction_lag_ms="60000", min_cleanable_dirty_ratio="0")
    add(table, ("a", "1"), ("a", "2"), at_us=-1_000)
    clock.advance(59)
    assert compact_all(table) == []
    clock.advance(2)
    assert compact_all(table) == [1]
    other = make(MemoryStore(clock), clock, max_compaction_lag_ms="60000")
    add(other, ("a", "1"), at_us=-1_000)
    clock.advance(59)
    assert choose(other) == []
    clock.advance(1)
    assert len(choose(other)) == 1


def test_merges_do_not_reach_over_what_is_dirty(table: TopicTable) -> None:
    """Clean and dirty records stay in separate files, so that the ratio is known."""
    add_texts(table, "a1 b1", "c1 d1")
    compact_all(table)
    add_texts(table, "e1", "f1")
    borders = key_compaction.borders(table, table.snapshot)
    groups = file_compaction.choose(table.snapshot, everything=True, borders=borders)
    assert [[file.first for file in group.files] for group in groups] == [[0, 2], [4, 5]]
    for group in groups:
        assert file_compaction.compact(table, [group])
    assert words_of(table) == "0a1 1b1 2c1 3d1 | 4e1 5f1"
    (each,) = choose(table, everything=True)
    assert compact(table, each) == 0


def test_what_another_engine_merged_counts_as_dirty(table: TopicTable) -> None:
    """A file that reaches over the border is gone through again."""
    add_texts(table, "a1 b1")
    compact_all(table)
    add_texts(table, "a2")
    (group,) = file_compaction.choose(table.snapshot, everything=True)
    file_compaction.compact(table, [group])
    assert compact_all(table) == [1]
    assert words_of(table) == "1b1 2a2"


# ------------------------------------------------------------------------------ tombstones


def test_a_tombstone_waits(table: TopicTable, clock: ManualClock) -> None:
    """It goes when it has been alone for as long as it must, and then all of its key has gone."""
    add_texts(table, "a1", "a- b1")
    assert compact_all(table) == [1]
    assert words_of(table) == "1a- 2b1"
    clock.advance(DAY_SECONDS - 1)
    assert compact_all(table) == []
    clock.advance(2)
    assert choose(table) == choose(table, everything=True)  # no dirt is needed for it
    assert compact_all(table) == [1]
    assert words_of(table) == "2b1"
    assert table.snapshot.ends == (3,)
    clock.advance(10 * DAY_SECONDS)
    assert compact_all(table) == []


def test_a_tombstones_own_age_does_not_count(table: TopicTable, clock: ManualClock) -> None:
    """An old one whose older records were there until just now waits as long as a new one."""
    add_texts(table, "a1", "a-")
    clock.advance(3 * DAY_SECONDS)
    assert compact_all(table) == [1]
    assert words_of(table) == "1a-"
    add_texts(table, "b1")
    clock.advance(DAY_SECONDS / 2)
    assert compact_all(table) == [0]
    assert words_of(table) == "1a- | 2b1"


def test_a_tombstone_waits_from_the_first_pass_that_sees_it(
    table: TopicTable, clock: ManualClock
) -> None:
    """One that lies where an earlier pass has ended does not go with those below."""
    add_texts(table, "a1", "a- z1")
    assert compact_all(table) == [1]
    add_texts(table, "c- z2")
    clock.advance(DAY_SECONDS + 1)
    assert compact_all(table) == [2]
    assert words_of(table) == "3c- 4z2"
    clock.advance(DAY_SECONDS + 1)
    assert compact_all(table) == [1]
    assert words_of(table) == "4z2"


def test_passes_do_not_keep_a_tombstone(table: TopicTable, clock: ManualClock) -> None:
    """However often the partition is passed, a tombstone waits twice as long as it must at most."""
    add_texts(table, "z1", "z-")
    compact_all(table)
    for number in range(48):
        if number == 1:
            add_texts(table, "y1", "y-")
        add_texts(table, f"b{number}")
        compact_all(table)
        assert ("z-" in words_of(table)) is (number < 24)
        assert ("y-" in words_of(table)) is (number > 0)
        clock.advance(DAY_SECONDS / 24 + 1)
    add_texts(table, "b48")
    compact_all(table)
    assert "y" not in words_of(table)


def test_a_tombstone_with_an_older_record_stays(table: TopicTable, clock: ManualClock) -> None:
    """Also where the older one has come back, as another engine's restore brings it."""
    old = add(table, ("a", "1"), ("b", "1"))
    add_texts(table, "a- z1")
    compact_all(table)
    clock.advance(DAY_SECONDS + 1)
    (file, tombstone) = table.snapshot.files[0]
    restored = dataclasses.replace(old, modified_us=clock.now_us())
    table.commit(lambda _: TableChange(adds=(restored,), removes=(file,)))
    assert tombstone.first == 2
    assert compact_all(table) == [1]
    assert words_of(table) == "1b1 | 2a- 3z1"
    clock.advance(DAY_SECONDS + 1)
    assert compact_all(table) == [1]
    assert words_of(table) == "1b1 | 3z1"


def test_the_last_record_of_a_partition_stays(table: TopicTable, clock: ManualClock) -> None:
    """A log ends in a record, also if that is a tombstone; it goes once there is a later one."""
    add_texts(table, "a1", "a-")
    for _ in range(3):
        clock.advance(2 * DAY_SECONDS)
        compact_all(table)
        assert words_of(table) == "1a-"
    assert choose(table, everything=True) == []  # a quiet topic is not read each day
    add_texts(table, "b1")
    compact_all(table)
    clock.advance(DAY_SECONDS + 1)
    assert compact_all(table) == [1]
    assert words_of(table) == "2b1"


def test_without_tombstones_nobody_looks_for_them(table: TopicTable, clock: ManualClock) -> None:
    """A quiet topic is not read again and again."""
    add_texts(table, "a1 a2")
    compact_all(table)
    assert table.txn(tombstones_app_id(TOPIC_ID, 0)) is None
    add_texts(table, "a- z1")
    compact_all(table)
    assert mark(table, tombstones_app_id(TOPIC_ID, 0)) == 4
    clock.advance(DAY_SECONDS)
    compact_all(table)
    for _ in range(3):
        clock.advance(2 * DAY_SECONDS)
        assert choose(table, everything=True) == []


# ------------------------------------------------------------------------------ the commit


def test_rows_that_go_are_a_change_of_data(table: TopicTable) -> None:
    """The removed files are, as the protocol wants it; the added one, all of it known, is not."""
    add_texts(table, "a1 b1", "a2")
    version = table.snapshot.version
    compact_all(table)
    lines = table.store.get(f"{table.log_folder}/{version + 1:020d}.json").to_pybytes().splitlines()
    actions = [msgspec.json.decode(line) for line in lines]
    removes = [action["remove"] for action in actions if "remove" in action]
    adds = [action["add"] for action in actions if "add" in action]
    assert [each["dataChange"] for each in removes] == [True]
    assert [each["dataChange"] for each in adds] == [False]
    assert mark(table, maintenance_app_id(TOPIC_ID)) == version + 1
    assert actions[0]["commitInfo"]["isBlindAppend"] is False


def test_a_pass_goes_on_beside_the_publisher(table: TopicTable) -> None:
    """Records that are published during a pass are dirty afterwards."""
    add_texts(table, "a1 b1", "a2")
    (each,) = choose(table, everything=True)
    slow = TopicTable(table.store, "t", clock=table.clock)
    slow.refresh()
    add_texts(table, "b2")
    assert compact(slow, each) == 1
    assert words_of(table) == "1b1 | 2a2 | 3b2"
    assert compact_all(table) == [1]


def merge_all(table: TopicTable) -> None:
    """One file instead of all."""
    (group,) = file_compaction.choose(table.snapshot, everything=True)
    assert file_compaction.compact(table, [group])


def end_it(table: TopicTable) -> None:
    """The topic is deleted."""
    table.commit(delete_change)


def make_anew(table: TopicTable) -> None:
    """The topic is deleted, and another made."""
    table.commit(delete_change)
    table.commit(lambda _: create_change("other", 1, COMPACT))


def append_only(table: TopicTable) -> None:
    """Sets the property, as another engine does."""
    table.commit(lambda _: TableChange(properties={"delta.appendOnly": "true"}))


def keep_all(table: TopicTable) -> None:
    """The topic is not compacted any more."""
    table.commit(lambda before: describe_change(before, 1, {"cleanup.policy": "delete"}))


def bring_back(table: TopicTable) -> None:
    """Another engine adds a file of the past."""
    file = dataclasses.replace(tables.table_file(table.clock, 0, 1, 1))
    table.commit(lambda _: TableChange(adds=(file,)))


@pytest.mark.parametrize(
    "meanwhile", [merge_all, compact_all, end_it, make_anew, append_only, keep_all, bring_back]
)
def test_a_pass_yields(table: TopicTable, meanwhile: object) -> None:
    """A pass yields to a commit that changes its files, and leaves nothing behind."""
    add_texts(table, "a1 b1", "a2", "b2")
    (each,) = choose(table, everything=True)
    late = TopicTable(table.store, "t", clock=table.clock)
    late.refresh()
    meanwhile(table)  # type: ignore[operator]
    files, version = data_files(table), table.refresh().version
    assert compact(late, each) is None
    assert (data_files(table), table.refresh().version) == (files, version)


def test_swept_input_gives_the_pass_up(table: TopicTable) -> None:
    """Files that were replaced and swept while it waited are not an error; an active one is."""
    add_texts(table, "a1 b1", "a2")
    (each,) = choose(table, everything=True)
    compact_all(table)
    table.store.delete(data_path("t", file) for file in each.files)
    assert compact(table, each) is None
    add_texts(table, "a3")
    (again,) = choose(table, everything=True)
    table.store.delete(data_path("t", file) for file in again.files)
    with pytest.raises(errors.MissingObject):
        compact(table, again)


def test_a_pass_that_is_to_stop_stops(table: TopicTable) -> None:
    """Wherever it is, with nothing changed and nothing left behind."""
    add_texts(table, "a1 b1", "a2", "b2")
    files, stopped = data_files(table), 0
    for patience in range(100):
        (each,) = choose(table, everything=True)
        answers = iter([False] * patience)
        if compact(table, each, should_stop=lambda: next(answers, True)) is not None:  # noqa: B023
            break
        stopped += 1
        assert data_files(table) == files
    assert stopped > 5
    assert left_in(table) == ["2a2", "3b2"]


@pytest.mark.parametrize(("files", "commits"), [(1, 5), (2, 3), (100, 1)])
def test_a_large_partition_takes_several_commits(
    table: TopicTable, monkeypatch: pytest.MonkeyPatch, files: int, commits: int
) -> None:
    """Each leaves the table right; only the last says how far the pass went."""
    add_texts(table, *[f"a1 b1 {other}1" for other in "uvwxyz"])
    before, size = table.snapshot.version, table.snapshot.files[0][0].size_bytes
    monkeypatch.setattr(
        "sparklog.storage.maintenance.key_compaction.COMPACT_STEP_BYTES", size * files - size // 2
    )
    (each,) = choose(table, everything=True)
    seen: list[tuple[int, int | None]] = []

    def look() -> bool:
        after = TopicTable(table.store, "t", clock=table.clock)
        after.refresh()
        assert replayed(after) == dict.fromkeys("abuvwxyz", "1")
        seen.append((after.snapshot.version - before, mark(after, compacted_app_id(TOPIC_ID, 0))))
        return False

    assert compact(table, dataclasses.replace(each, target_bytes=1), should_stop=look) == 10
    assert left_in(table) == ["2u1", "5v1", "8w1", "11x1", "14y1", "15a1", "16b1", "17z1"]
    assert table.snapshot.version == before + commits
    assert {number for number, _ in seen} == set(range(commits))
    assert {marked for _, marked in seen} == {None}
    assert compact_all(table) == []


def test_large_files_that_lose_nothing_stay(table: TopicTable) -> None:
    """Only files that lose rows are rewritten, with small files between them."""
    add_texts(table, "a1", "x1", "b1", "y1", "b2 a2")
    (each,) = choose(table, everything=True)
    kept = {table.snapshot.files[0][number].path for number in (1, 3, 4)}
    small = table.snapshot.files[0][0].size_bytes
    assert compact(table, dataclasses.replace(each, target_bytes=small)) == 2
    assert {file.path for file in table.snapshot.files[0]} == kept
    assert words_of(table) == "1x1 | 3y1 | 4b2 5a2"


# ------------------------------------------------------------------------------ odd files


def add_foreign(table: TopicTable, batch: pa.RecordBatch, **told: int | None) -> TableFile:
    """A file as another engine might have written it, with those statistics."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_batches([batch]).select(FILE_SCHEMA.names), sink)
    offsets = batch.column("offset").to_pylist()
    file = tables.table_file(table.clock, 0, min(offsets), max(offsets))
    size, count = sink.tell(), len(offsets)
    file = dataclasses.replace(file, size_bytes=size, rows=count)
    file = dataclasses.replace(file, **told)  # type: ignore[arg-type]
    table.store.put_new(data_path("t", file), sink.getvalue())
    end = max(table.snapshot.ends[0], max(offsets) + 1)
    table.commit(lambda _: TableChange(adds=(file,), txns={end_app_id(TOPIC_ID, 0): end}))
    return file


@pytest.mark.parametrize(
    "told", [{}, {"first": None, "last": None, "rows": None}], ids=["told", "untold"]
)
def test_files_in_any_order(table: TopicTable, told: dict[str, int | None]) -> None:
    """Files that overlap, are out of order or tell nothing are compacted like the others."""
    add_texts(table, "a1 b1")
    whole = batch_of([("a", "2"), ("c", "1"), ("b", "2"), ("c", "2"), ("a", "3")], 2, at_us=7)
    shuffled = whole.take(pa.array([4, 0, 2]))
    add_foreign(table, shuffled, **told)
    add_foreign(table, whole.take(pa.array([3, 1])), **told)
    (removed,) = compact_all(table)
    assert removed == 4
    assert left_in(table) == ["4b2", "5c2", "6a3"]
    if told:
        assert compact_all(table) == []


def test_nothing_beyond_the_end_takes_part(store: MemoryStore, clock: ManualClock) -> None:
    """Also where a file that reaches over the end of the pass holds it."""
    table = make(store, clock, min_compaction_lag_ms="60000")
    old = batch_of([("a", "1"), ("b", "1"), ("b", "2"), ("a", "2")], 0, at_us=clock.now_us())
    add_foreign(table, old.take(pa.array([0, 3])))
    add_foreign(table, old.take(pa.array([1, 2])))
    clock.advance(61)
    (whole,) = choose(table, everything=True)
    assert whole.end == 4
    file = dataclasses.replace(table.snapshot.files[0][1], max_timestamp_us=clock.now_us())
    other = dataclasses.replace(file, path=f"partition=0/{TOPIC_ID}-1-2-{9:016x}.parquet")
    table.store.put_new(data_path("t", other), table.store.get(data_path("t", file)))
    table.commit(lambda before: TableChange(adds=(other,), removes=(before.files[0][1],)))
    assert compact_all(table) == [0]
    assert key_compaction.borders(table, table.snapshot) == (1,)
    clock.advance(61)
    assert compact_all(table) == [2]
    assert left_in(table) == ["2b2", "3a2"]


def test_a_young_record_takes_no_part_where_its_file_tells_nothing(
    store: MemoryStore, clock: ManualClock
) -> None:
    """Nor does it supersede anything, if it is the first after the last pass."""
    table = make(store, clock, min_compaction_lag_ms="60000")
    add_texts(table, "a1 b1")
    clock.advance(61)
    compact_all(table)
    young = batch_of([("a", "2")], 2, at_us=clock.now_us())
    now_us = clock.now_us()
    add_foreign(table, young, first=None, last=None, rows=None, max_timestamp_us=now_us)
    compact_all(table)
    assert left_in(table) == ["0a1", "1b1", "2a2"]
    clock.advance(61)
    compact_all(table)
    assert left_in(table) == ["1b1", "2a2"]


def test_a_damaged_file_is_named(table: TopicTable) -> None:
    """A pass copies nothing that it cannot read, and leaves no file behind."""
    file = add(table, *((f"{number % 50}", "x" * 50) for number in range(5_000)))
    path = data_path("t", file)
    data = bytearray(table.store.get(path).to_pybytes())
    data[len(data) // 2] ^= 1
    table.store.put(path, bytes(data))
    with pytest.raises(errors.CorruptObject) as found:
        compact_all(table)
    assert found.value.path == path
    assert data_files(table) == {file.path}


# ------------------------------------------------------------------------------ many keys


@pytest.mark.parametrize("seed", range(3))
def test_keys_are_compared_in_parts(
    table: TopicTable, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """However little memory there is, the outcome is the same."""
    lengths = (1, 3, 8, 9, 16, 33, 60)
    keys = [f"{number:0{lengths[number % 7]}}"[-60:] for number in range(700)]
    sent = [(keys[(number * (seed + 3)) % 700], f"{number}") for number in range(2_000)]
    for start in range(0, 2_000, 500):
        add(table, *sent[start : start + 500])
    monkeypatch.setattr("sparklog.storage.maintenance.newest_records.COMPACT_KEYS_BYTES", 10_000)
    monkeypatch.setattr("sparklog.storage.maintenance.newest_records.COMPACT_KEYS_ROWS", 16)
    monkeypatch.setattr(limits, "ROW_GROUP_ROWS", 64)
    compact_all(table)
    expected = dict(sent)
    assert len(left_in(table)) == len(expected)
    read = pa.concat_tables(
        pq.read_table(table.store.get(data_path("t", file))) for file in table.snapshot.files[0]
    ).to_pydict()
    pairs = zip(read["key"], read["value"], strict=True)
    assert {text(key): text(value) for key, value in pairs} == expected


@given(st.lists(st.binary(max_size=70), max_size=40), st.integers(0, 3))
def test_equal_keys_have_equal_hashes(keys: list[bytes], skip: int) -> None:
    """Wherever in a buffer they lie, and whatever lies alongside them."""
    array = pa.array([b"before", *keys, b"x", *reversed(keys)], pa.binary()).slice(skip)
    hashes = newest_records.hashes_of(array).tolist()
    found = array.to_pylist()
    assert len({(key, value) for key, value in zip(found, hashes, strict=True)}) == len(set(found))


def test_hashes_differ() -> None:
    """Keys that differ at either end come into different parts."""
    for form in ("{:08}", "{:016}-the-same-suffix-of-a-good-length-for-all", "x" * 40 + "{}"):
        keys = pa.array([form.format(number).encode() for number in range(20_000)], pa.binary())
        hashes = newest_records.hashes_of(keys)
        assert len(set(hashes.tolist())) == 20_000
        parts = [int(each) >> 56 for each in hashes.tolist()]
        assert max(parts.count(part) for part in range(256)) < 160


# ------------------------------------------------------------------------------ readers


def test_readers_pass_over_the_gaps(store: MemoryStore, clock: ManualClock) -> None:
    """Wherever a range begins or ends; and a time leads to the first record that is there."""
    rig = Rig(store, clock, options=RigOptions(hot_bytes=0))
    rig.create(cleanup_policy="compact", delete_retention_ms="0")
    began_us = clock.now_us()
    for key, value in ((b"a", "0"), (b"b", "1"), (b"a", "2"), (b"c", "3"), (b"c", None)):
        rig.append([value], key=[key])
        rig.publish()
        clock.advance(1)
    for _ in range(2):
        rig.broker.topics.compact("t")
    left = [(1, b"1"), (2, b"2"), (4, None)]
    for start, end in itertools.combinations_with_replacement(range(rig.end() + 1), 2):
        batches = list(rig.broker.read("t", 0, start, end))
        assert rows_of(batches) == [row for row in left if start <= row[0] < end]
        assert (batches[-1].end if batches else end) == end
    assert rows_of_root(store, clock) == rows_of_table(store, clock) == left
    table = TopicTable(store, "t", clock=clock)
    for second, offset in enumerate((1, 1, 2, 4, 4, -1)):
        at_us = began_us + second * 1_000_000
        request = flight_messages.OffsetsForTimes(topic="t", timestamps_us={0: at_us})
        assert rig.broker.offsets_for_times(request).offsets == {0: offset}
        pieces = plan_of_table("t", table.refresh(), 0)
        assert first_since(store, pieces, at_us) == (None if offset < 0 else offset)
    successor = rig.successor(hot_bytes=0)
    assert successor.append(["5"], key=[b"a"]).base_offset == 5
    assert successor.read() == [*left, (5, b"5")]


# ------------------------------------------------------------------------------ crashes


class Crash(BaseException):
    """The process is gone."""


class CrashAt:
    """The `number`-th moment of any operation is the last."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.is_over = False

    def _pass(self) -> None:
        self._left -= 1
        if self._left < 0:
            self.is_over = True
            raise Crash

    def before(self, _operation: Operation, _path: str, /) -> None:
        self._pass()

    def between(self, _operation: Operation, _path: str, /) -> None:
        self._pass()

    def after(self, _operation: Operation, _path: str, /) -> None:
        self._pass()


def crash_scene(clock: ManualClock) -> MemoryStore:
    """A partition with records to go, a tombstone to go, and one to stay."""
    store = MemoryStore(clock)
    table = make(store, clock)
    add_texts(table, "a1 b1", "a-", "c1")
    compact_all(table)
    clock.advance(DAY_SECONDS + 1)
    add_texts(table, "b2", "c- d1", "d2")
    return store


@pytest.mark.parametrize("loses", [True, False], ids=["power cut", "kill"])
@pytest.mark.parametrize("step_bytes", [1, limits.GIB], ids=["steps", "one"])
def test_a_crash_anywhere(monkeypatch: pytest.MonkeyPatch, step_bytes: int, *, loses: bool) -> None:
    """Wherever a pass is cut short the table holds what it should, and the next pass ends it."""
    monkeypatch.setattr(
        "sparklog.storage.maintenance.key_compaction.COMPACT_STEP_BYTES", step_bytes
    )
    clock = tables.manual_clock()
    scene = crash_scene(clock)
    for number in range(1_000):
        store = MemoryStore(clock)
        store._objects = {path: copy.copy(each) for path, each in scene._objects.items()}
        faults = CrashAt(number)
        victim = TopicTable(store.view(faults), "t", clock=clock)
        try:
            victim.refresh()
            for each in choose(victim, everything=True):
                compact(victim, dataclasses.replace(each, target_bytes=1_000))
        except Crash:
            pass
        if loses:
            store.lose_unsynced(lambda _: True)
        after = TopicTable(store, "t", clock=clock)
        assert set(left_in(after)) >= {"4b2", "5c-", "7d2"}
        assert replayed(after) == {"b": "2", "d": "2"}
        compact_all(after)
        assert left_in(after) == ["4b2", "5c-", "7d2"]
        if not faults.is_over:
            break
    assert number > 20


def replayed(table: TopicTable) -> dict[str | None, str | None]:
    """Returns the state of a reader that applies all records of the table in order."""
    store, snapshot = table.store, table.refresh()
    found: list[Row] = []
    for piece in plan_of_table("t", snapshot, 0):
        for batch in read_slice(store, piece, columns=["offset", "key", "value"]):
            found += rows_in(batch)
    return applied(found)


def rows_in(batch: pa.RecordBatch | pa.Table) -> list[Row]:
    """Offsets, keys and values."""
    columns = batch.select(["offset", "key", "value"]).to_pydict()
    return [
        (offset, text(key), text(value))
        for offset, key, value in zip(*columns.values(), strict=True)
    ]


def applied(
    found: Iterable[Row], to: dict[str | None, str | None] | None = None
) -> dict[str | None, str | None]:
    """The dict that the records make of another."""
    values = {} if to is None else to
    for _, key, value in found:
        if value is None:
            values.pop(key, None)
        else:
            values[key] = value
    return values


# ------------------------------------------------------------------------------ any history

RETENTION_SECONDS = 100.0

keys = st.sampled_from(["a", "b", "c", "d", ""])
values = st.one_of(st.none(), st.sampled_from(["1", "2", "3"]))
steps = st.one_of(
    st.tuples(st.just("append"), st.lists(st.tuples(keys, values), min_size=1, max_size=4)),
    st.tuples(
        st.sampled_from(["publish", "publish", "merge", "keys", "tick", "restart", "optimize"]),
        st.none(),
    ),
    st.tuples(st.just("wait"), st.sampled_from([1.0, 40.0, 70.0, 120.0, 400.0])),
    st.tuples(st.just("read"), st.integers(1, 6)),
    st.tuples(st.just("begin"), st.none()),
)


class History:
    """A broker with a compacted topic, the records sent to it, and a slow reader."""

    def __init__(self, folder: Path, lag_ms: int) -> None:
        self.folder = folder
        self.clock = ManualClock(now_us=time.time_ns() // 1_000_000 * 1_000)
        self.store = LocalStore(folder)
        settings = JanitorSettings(
            compact_files=2,
            removed_file_grace_seconds=50.0,
            removed_file_kept_seconds=0.0,
            orphan_grace_seconds=200.0,
        )
        self.rig = Rig(self.store, self.clock, options=RigOptions(hot_bytes=0, janitor=settings))
        self.rig.create(
            cleanup_policy="compact",
            min_compaction_lag_ms=str(lag_ms),
            min_cleanable_dirty_ratio="0.2",
            delete_retention_ms=str(round(RETENTION_SECONDS * 1_000)),
        )
        self.sent: list[Row] = []
        self.begin(None)

    def append(self, sent: list[Sent]) -> None:
        columns = {"key": [key and key.encode() for key, _ in sent]}
        columns["key"] = [b"" if key == "" else key.encode() for key, _ in sent if key is not None]
        first = self.rig.append([value for _, value in sent], **columns).base_offset
        self.sent += [(first + n, key, value) for n, (key, value) in enumerate(sent)]

    def publish(self, _: None) -> None:
        self.rig.publish()

    def merge(self, _: None) -> None:
        table = self.table()
        for group in file_compaction.choose(table.snapshot, compact_files=2):
            file_compaction.compact(table, [group])

    def keys(self, _: None) -> None:
        self.rig.broker.topics.compact("t")

    def tick(self, _: None) -> None:
        self.rig.janitor.tick()

    def restart(self, _: None) -> None:
        self.rig = self.rig.successor()

    def optimize(self, _: None) -> None:
        DeltaTable(str(self.folder / "topics" / "t")).optimize.compact()

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    # -------------------------------------------------------------------------- the reader

    def begin(self, _: None) -> None:
        self.began_at = self.clock.monotonic()
        self.position = 0
        self.seen: dict[str | None, str | None] = {}

    def read(self, count: int) -> None:
        end = min(self.position + count, self.rig.end())
        for batch in self.rig.broker.read("t", 0, self.position, end):
            applied(rows_in(batch.rows), self.seen)
        self.position = end
        in_time = self.clock.monotonic() - self.began_at < RETENTION_SECONDS
        if in_time and end == self.rig.end():
            assert self.seen == applied(self.sent)

    # -------------------------------------------------------------------------- what must hold

    def table(self) -> TopicTable:
        table = TopicTable(self.store, "t", clock=self.clock)
        table.refresh()
        return table

    def check(self) -> None:
        snapshot = self.table().snapshot
        published = self.sent[: snapshot.ends[0]]
        found: list[Row] = []
        for piece in plan_of_table("t", snapshot, 0):
            for batch in read_slice(self.store, piece):
                found += rows_in(batch)
        assert [row[0] for row in found] == sorted({row[0] for row in found})
        assert set(found) <= set(published)
        assert applied(found) == applied(published)
        last = {key: row for row in published for key in [row[1]]}
        assert {row for row in last.values() if row[2] is not None} <= set(found)
        follower = RootFollower(self.store, clock=self.clock)
        seen = follower.refresh(["t"])["t"]
        whole: list[Row] = []
        for piece in follower.plan("t", seen, 0, 0, follower.ends(seen)[0]):
            for batch in read_slice(self.store, piece):
                whole += rows_in(batch)
        assert whole == found + self.sent[len(published) :]

    def check_others(self) -> None:
        """delta-rs reads the same rows as sparklog."""
        table = self.table()
        theirs = DeltaTable(str(self.folder / "topics" / "t")).to_pyarrow_table()
        ours: list[Row] = []
        for piece in plan_of_table("t", table.snapshot, 0):
            for batch in read_slice(self.store, piece):
                ours += rows_in(batch)
        assert sorted(rows_in(theirs)) == ours


@given(history=st.lists(steps, max_size=30), lag_ms=st.sampled_from([0, 0, 60_000]))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_history_ends_in_the_same_dict(
    tmp_path_factory: pytest.TempPathFactory,
    history: list[tuple[str, object]],
    lag_ms: int,
) -> None:
    """After any sequence of events, the last value of each key is at its offset."""
    found = History(tmp_path_factory.mktemp("root"), lag_ms)
    for name, what in history:
        getattr(found, name)(what)
        found.check()
    found.publish(None)
    found.keys(None)
    found.check()
    found.check_others()
