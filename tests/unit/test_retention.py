"""Retention and deletion: what leaves, what stays, and where the log starts then."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog import errors
from sparklog.clock import ManualClock
from sparklog.storage.maintenance import file_compaction, retention
from sparklog.storage.maintenance import sweeping as maintenance
from sparklog.storage.maintenance.retention import (
    DELETE_ATTEMPTS,
    RetentionCut,
    RetentionPolicy,
    choose,
    policy_of,
)
from sparklog.storage.objects import (
    Fault,
    MemoryStore,
    PutUnresolved,
    ScriptedFaults,
    SyncFailed,
)
from sparklog.storage.objects.faults import Moment
from sparklog.storage.snapshot import TableFile, TableSnapshot
from sparklog.storage.table import delta_log
from sparklog.storage.table.changes import TableChange, delete_change, describe_change
from sparklog.storage.table.names import data_path, maintenance_app_id
from sparklog.storage.table.topic_table import TopicTable
from tests.support.brokers import paths, rows_of_table
from tests.support.tables import TOPIC_ID, create, publish_rows

NOW_US = 1_700_000_000_000_000
SECOND_US = 1_000_000

# ------------------------------------------------------------------------------ what leaves


@st.composite
def partitions(draw: st.DrawFn) -> TableSnapshot:
    """One partition: files with gaps between them, or overlaps, of any size and time."""
    files, at, end = [], draw(st.integers(0, 20)), 0
    start = draw(st.integers(0, at))
    for number in range(draw(st.integers(0, 8))):
        last = at + draw(st.integers(0, 9))
        end = max(end, last + 1)
        files.append(
            TableFile(
                path=f"{number}",
                partition=0,
                size_bytes=draw(st.integers(1, 50)),
                rows=None,
                first=at,
                last=last,
                max_timestamp_us=draw(
                    st.sampled_from([None, -1_000, 0])
                    | st.integers(NOW_US - 20 * SECOND_US, NOW_US + SECOND_US)
                ),
                modified_us=NOW_US - draw(st.integers(0, 20)) * SECOND_US,
            )
        )
        at = max(at, last + draw(st.sampled_from([1, 1, 1, 4, 0, -3])))
    keys = st.fixed_dictionaries(
        {},
        optional={
            "retention.ms": st.integers(-1, 20_000).map(str),
            "retention.bytes": st.integers(-1, 300).map(str),
            "cleanup.policy": st.sampled_from(["delete", "compact", "compact,delete"]),
        },
    )
    return TableSnapshot(
        version=1,
        topic_id="id",
        partitions=1,
        config=draw(keys),
        starts=(start + draw(st.integers(0, 30)) if draw(st.booleans()) else start,),
        ends=(end + draw(st.integers(0, 3)),),
        files=(tuple(sorted(files, key=lambda file: (file.first, file.last, file.path))),),
    )


def newest_us(file: TableFile) -> int:
    """Age counts from the time of the newest record."""
    found = file.max_timestamp_us
    return file.modified_us if found is None or found <= 0 else found


@given(partitions())
def test_what_leaves_is_the_oldest_and_nothing_else(snapshot: TableSnapshot) -> None:
    """The log start rises over whole files, all of them due; what stays is not due, or newer."""
    (files,), (start,), (end,) = snapshot.files, snapshot.starts, snapshot.ends
    cuts = choose(snapshot, now_us=NOW_US)
    cut = cuts[0] if cuts else RetentionCut(partition=0, files=(), start=start)
    left = [file for file in files if file not in cut.files]
    policy = policy_of(snapshot.config)
    # In order, without a hole, and never back.
    assert cut.start >= start
    assert all(file.last is not None and file.last < max(cut.start, 1) for file in cut.files)
    assert all(
        file.first is not None and (file.first >= cut.start or file.first < start) for file in left
    )
    assert left or cut.start in (start, max(start, end))
    # Each that left was due, by one of the rules, and the next in line is not.
    kept_since_us = NOW_US - policy.retention_ms * 1_000
    groups = overlapping(files)
    for number, group in enumerate(groups):
        rest_bytes = sum(file.size_bytes for each in groups[number + 1 :] for file in each)
        is_below = all((file.last or 0) < start for file in group)
        is_old = policy.retention_ms >= 0 and max(map(newest_us, group)) < kept_since_us
        is_newest = number == len(groups) - 1
        is_too_much = 0 <= policy.retention_bytes <= rest_bytes and not is_newest
        is_due = is_below or is_old or is_too_much
        assert is_due == (group[0] in cut.files)
        if not is_due:
            break


def overlapping(files: Sequence[TableFile]) -> list[list[TableFile]]:
    """Files that can only leave together."""
    groups: list[list[TableFile]] = []
    for file in files:
        if groups and (file.first or 0) <= max(each.last or 0 for each in groups[-1]):
            groups[-1].append(file)
        else:
            groups.append([file])
    return groups


def snapshot_of(*files: dict[str, Any], start: int = 0, **config: str) -> TableSnapshot:
    """Files of ten offsets and 100 bytes each, ten seconds apart, the last just now."""
    count = len(files)
    named = {key.replace("_", "."): value for key, value in config.items()}
    found = tuple(
        dataclasses.replace(
            TableFile(
                path=str(number),
                partition=0,
                size_bytes=100,
                rows=10,
                first=10 * number,
                last=10 * number + 9,
                max_timestamp_us=NOW_US - 10 * (count - 1 - number) * SECOND_US,
            ),
            **changed,
        )
        for number, changed in enumerate(files)
    )
    return TableSnapshot(
        version=1,
        topic_id="id",
        partitions=1,
        config=named,
        ends=(10 * count,),
        starts=(start,),
        files=(found,),
    )


def chosen(snapshot: TableSnapshot, *, after_seconds: int = 0) -> tuple[list[str], int]:
    """(paths of the files that leave, the log start then)."""
    cuts = choose(snapshot, now_us=NOW_US + after_seconds * SECOND_US)
    if not cuts:
        return [], snapshot.starts[0]
    (cut,) = cuts
    return [file.path for file in cut.files], cut.start


FOUR: tuple[dict[str, Any], ...] = ({}, {}, {}, {})


def test_by_time() -> None:
    """Files whose newest record is older than `retention.ms` leave; all of them, if all are."""
    snapshot = snapshot_of(*FOUR, retention_ms="15000")
    assert chosen(snapshot) == (["0", "1"], 20)
    assert chosen(snapshot, after_seconds=5) == (["0", "1"], 20)
    assert chosen(snapshot, after_seconds=6) == (["0", "1", "2"], 30)
    assert chosen(snapshot, after_seconds=15) == (["0", "1", "2"], 30)
    assert chosen(snapshot, after_seconds=16) == (["0", "1", "2", "3"], 40)


def test_records_without_a_time_are_as_old_as_their_file() -> None:
    """Kafka's -1 ms is not a time: such records leave when their file was written too long ago."""
    none = {"max_timestamp_us": -1_000, "modified_us": NOW_US}
    mixed = {"min_timestamp_us": -1_000, "max_timestamp_us": NOW_US, "modified_us": 0}
    snapshot = snapshot_of(none, mixed, retention_ms="15000")
    assert chosen(snapshot) == ([], 0)
    assert chosen(snapshot, after_seconds=15) == ([], 0)
    assert chosen(snapshot, after_seconds=16) == (["0", "1"], 20)


def test_a_young_record_keeps_all_after_it() -> None:
    """Records leave in order: what lies behind one that stays, stays."""
    future = {"max_timestamp_us": NOW_US + 3_600 * SECOND_US}
    snapshot = snapshot_of({}, future, {}, {}, retention_ms="1000")
    assert chosen(snapshot, after_seconds=600) == (["0"], 10)


def test_by_size() -> None:
    """The oldest leave as long as `retention.bytes` remain; the newest file always does."""
    expected = {"450": 0, "400": 0, "301": 0, "300": 1, "299": 1, "100": 3, "50": 3, "0": 3}
    for retention_bytes, count in expected.items():
        found = chosen(snapshot_of(*FOUR, retention_bytes=retention_bytes))
        assert found == ([str(number) for number in range(count)], 10 * count)


def test_by_both() -> None:
    """Whichever says more."""
    assert chosen(snapshot_of(*FOUR, retention_ms="25000", retention_bytes="200"))[1] == 20
    assert chosen(snapshot_of(*FOUR, retention_ms="5000", retention_bytes="200"))[1] == 30


def test_nothing_was_said() -> None:
    """Without bounds, or with a policy that is not to delete, everything stays."""
    eternity = 10**9
    assert chosen(snapshot_of(*FOUR), after_seconds=eternity) == ([], 0)
    unbounded = snapshot_of(*FOUR, retention_ms="-1", retention_bytes="-1")
    assert chosen(unbounded, after_seconds=eternity) == ([], 0)
    compacted = snapshot_of(*FOUR, retention_ms="1", cleanup_policy="compact")
    assert chosen(compacted, after_seconds=eternity) == ([], 0)
    nothing = snapshot_of(*FOUR, retention_ms="1", retention_bytes="1", cleanup_policy="")
    assert policy_of(nothing.config) == RetentionPolicy()
    both = snapshot_of(*FOUR, retention_ms="1", cleanup_policy="compact,delete")
    assert chosen(both, after_seconds=eternity)[1] == 40
    assert policy_of({"retention.ms": "-1"}) == RetentionPolicy()


def test_a_file_that_tells_nothing_is_in_the_way() -> None:
    """Without statistics it may hold any offset, so nothing leaves; without times it is as old as
    it was written."""
    unknown = {"first": None, "last": None}
    assert chosen(snapshot_of(unknown, *FOUR, retention_ms="0"), after_seconds=9) == ([], 0)
    timeless = {"max_timestamp_us": None, "modified_us": NOW_US}
    assert chosen(snapshot_of({}, timeless, {}, retention_ms="0"), after_seconds=1)[1] == 30
    assert chosen(snapshot_of({}, timeless, {}, retention_ms="1000"), after_seconds=1)[1] == 10


def test_files_that_overlap_leave_together() -> None:
    """Another engine may have dealt the rows to them in any way."""
    wide = {"last": 25}
    snapshot = snapshot_of({}, wide, {}, {}, retention_ms="5000")
    assert chosen(snapshot) == (["0", "1", "2"], 30)
    assert chosen(snapshot_of({}, wide, {}, {}, retention_ms="15000")) == (["0"], 10)
    meeting = snapshot_of({}, {"last": 20}, {}, {}, retention_ms="15000")
    assert chosen(meeting) == (["0"], 10)


def test_what_lies_below_the_start_leaves_under_any_policy() -> None:
    """A file that another engine restored is removed again."""
    snapshot = snapshot_of(*FOUR, start=20, cleanup_policy="compact")
    assert chosen(snapshot) == (["0", "1"], 20)
    assert chosen(snapshot_of(*FOUR, start=25)) == (["0", "1"], 25)


def test_a_file_spans_a_part_of_what_is_kept() -> None:
    """A large file is cut early enough that its oldest record does not stay much too long."""
    assert retention.span_us({"retention.ms": "60000"}) == 6_000_000
    assert retention.span_us({"retention.ms": "-1"}) is None
    assert retention.span_us({"retention.ms": "60000", "cleanup.policy": "compact"}) is None


def test_a_number_that_is_none() -> None:
    """A value that was written past the checks is named, and nothing is removed."""
    with pytest.raises(errors.BadOption, match=r"retention\.ms"):
        chosen(snapshot_of(*FOUR, retention_ms="7 days"))


# ------------------------------------------------------------------------------ in a table


@pytest.fixture
def table(store: MemoryStore, clock: ManualClock) -> TopicTable:
    """Topic t of two partitions, the first with five files of ten records."""
    found = TopicTable(store, "t", clock=clock)
    create(found, 2)
    for _ in range(5):
        publish_rows(found, 0, 10)
    publish_rows(found, 1, 10)
    return found


def configure(table: TopicTable, **config: str) -> None:
    """The topic's configuration from now on."""
    named = {key.replace("_", "."): value for key, value in config.items()}
    table.commit(lambda before: describe_change(before, before.partitions, named))


def offsets(table: TopicTable, partition: int = 0) -> list[int]:
    """Returns the rows that readers find."""
    return [offset for offset, _ in rows_of_table(table.store, table.clock, "t", partition)]


def offsets_for_others(table: TopicTable, partition: int = 0) -> list[int]:
    """Returns the rows found by an engine that ignores log starts."""
    snapshot = TopicTable(table.store, "t", clock=table.clock).refresh()
    found: list[int] = []
    for file in snapshot.files[partition]:
        read = pq.read_table(table.store.open(data_path("t", file)), columns=["offset"])
        found += read["offset"].to_pylist()
    return sorted(found)


def last_actions(table: TopicTable) -> delta_log.Actions:
    """Returns the actions of the newest commit."""
    path = f"{table.log_folder}/{delta_log.commit_name(table.refresh().version)}"
    return delta_log.decode_commit(table.store.get(path), path)


def test_retention_moves_the_start(table: TopicTable, clock: ManualClock) -> None:
    """One commit removes the files of all partitions and says where they start."""
    configure(table, retention_bytes="1")
    version = table.snapshot.version
    assert retention.retain(table) == 4
    found = table.refresh()
    assert (found.version, found.starts, found.ends) == (version + 1, (40, 0), (50, 10))
    assert offsets(table) == list(range(40, 50))
    assert offsets(table, 1) == list(range(10))
    actions = last_actions(table)
    assert {txn.app_id: txn.version for txn in actions.txns} == {
        f"sparklog/{TOPIC_ID}/0/start": 40,
        maintenance_app_id(TOPIC_ID): version + 1,
    }
    assert len(actions.removes) == 4
    assert all(remove.data_change for remove in actions.removes)
    assert retention.retain(table) == 0
    assert table.snapshot.version == version + 1
    clock.advance(table.removed_file_grace_seconds + 1)
    assert maintenance.sweep_replaced(table) == 4
    assert len([name for name in paths(table.store, "topics/t") if name.endswith("parquet")]) == 2


def test_retention_of_everything(table: TopicTable, clock: ManualClock) -> None:
    """A table without files starts and ends at its end, and continues there."""
    configure(table, retention_ms="1000")
    clock.advance(10.0)
    assert retention.retain(table) == 6
    found = table.refresh()
    assert found.starts == found.ends == (50, 10)
    assert offsets(table) == []
    publish_rows(table, 0, 5)
    assert offsets(table) == list(range(50, 55))


def test_retention_takes_what_it_meets(table: TopicTable) -> None:
    """After losing a race, retention chooses again from the newest snapshot."""
    configure(table, retention_bytes="1")
    other = TopicTable(table.store, "t", clock=table.clock)
    other.refresh()
    (group,) = file_compaction.choose(other.snapshot, compact_files=5)
    assert file_compaction.compact(other, [group])
    assert retention.retain(table) == 0
    assert offsets(table) == list(range(50))


# ------------------------------------------------------------------------------ deletion


@pytest.mark.parametrize("offset", [0, 1, 9, 10, 11, 25, 49, 50])
def test_deleted_records_are_gone_for_everybody(table: TopicTable, offset: int) -> None:
    """Up to the very offset, from the table too, by one commit; the rest is as it was."""
    version = table.snapshot.version
    found = retention.delete_records(table, TOPIC_ID, {0: offset})
    assert found.version == version + (offset > 0)
    assert found.starts == (offset, 0)
    assert offsets(table) == offsets_for_others(table) == list(range(offset, 50))
    assert offsets(table, 1) == list(range(10))
    actions = last_actions(table)
    assert len(actions.removes) == -(-offset // 10) if offset else True
    if offset:
        assert len(actions.adds) == (1 if offset % 10 else 0)
        assert all(remove.data_change for remove in actions.removes)
        assert not any(add.data_change for add in actions.adds)


def test_rows_that_stay_are_what_they_were(table: TopicTable) -> None:
    """Keys, values, headers and times of a rewritten file, and its bounds."""
    before = compaction_rows(table).slice(17)
    retention.delete_records(table, TOPIC_ID, {0: 17})
    assert compaction_rows(table).equals(before)
    (file, *_) = table.snapshot.files[0]
    assert (file.first, file.last, file.rows) == (17, 19, 3)
    times = before["timestamp"].cast(pa.int64()).to_pylist()
    assert (file.min_timestamp_us, file.max_timestamp_us) == (times[0], times[2])


def compaction_rows(table: TopicTable) -> pa.Table:
    """All rows of partition 0."""
    snapshot = table.refresh()
    return pa.Table.from_batches(
        [
            batch
            for file in snapshot.files[0]
            for batch in file_compaction.read_rows(
                table.store, data_path("t", file), file, snapshot.ends[0]
            )
        ]
    ).combine_chunks()


def test_deletion_of_several_partitions(table: TopicTable) -> None:
    """In one commit."""
    version = table.snapshot.version
    found = retention.delete_records(table, TOPIC_ID, {0: 12, 1: 10})
    assert (found.version, found.starts) == (version + 1, (12, 10))
    assert (offsets(table), offsets(table, 1)) == (list(range(12, 50)), [])


def test_deletion_again(table: TopicTable) -> None:
    """A repetition, or a lower offset, changes nothing, not even the table's version."""
    version = retention.delete_records(table, TOPIC_ID, {0: 12}).version
    for offset in (12, 11, 0):
        found = retention.delete_records(table, TOPIC_ID, {0: offset})
        assert (found.version, found.starts) == (version, (12, 0))


def append_only(table: TopicTable, value: str | None) -> None:
    """Sets or unsets the property, as another engine does."""
    other = TopicTable(table.store, "t", clock=table.clock)
    other.commit(lambda _: TableChange(properties={delta_log.APPEND_ONLY: value}))


def test_an_append_only_table_keeps_its_records(table: TopicTable) -> None:
    """Retention waits, a deletion is an error, and the log start stays, until it is unset."""
    configure(table, retention_bytes="1")
    retention.delete_records(table, TOPIC_ID, {0: 12})
    append_only(table, "true")
    version, files = table.refresh().version, data_files(table)
    assert retention.retain(table) == 0
    with pytest.raises(errors.PolicyViolation, match=r"delta\.appendOnly"):
        retention.delete_records(table, TOPIC_ID, {0: 25})
    assert retention.delete_records(table, TOPIC_ID, {0: 12}).starts == (12, 0)
    assert (table.refresh().version, data_files(table)) == (version, files)
    assert offsets(table) == list(range(12, 50))
    append_only(table, None)
    assert retention.delete_records(table, TOPIC_ID, {0: 25}).starts == (25, 0)
    assert retention.retain(table) == 2
    assert offsets(table) == list(range(40, 50))


@pytest.mark.parametrize("straddles", [True, False])
def test_a_deletion_stops_where_the_table_becomes_append_only(
    table: TopicTable, straddles: bool
) -> None:
    """It is refused by name, and leaves no file, where the property comes right before it."""
    files = data_files(table)
    mine = raced(table, lambda other: append_only(other, "true"))
    with pytest.raises(errors.PolicyViolation):
        retention.delete_records(mine, TOPIC_ID, {0: 25 if straddles else 20})
    assert (table.refresh().starts, data_files(table)) == ((0, 0), files)


def test_restored_rows_stay_in_an_append_only_table(table: TopicTable) -> None:
    """Readers of the log skip them, and they go once the property is unset."""
    removed = table.refresh().files[0][0]
    retention.delete_records(table, TOPIC_ID, {0: 10})
    table.commit(lambda _: TableChange(adds=(removed,), restores=True))
    append_only(table, "true")
    table.refresh()
    retention.sweep_below(table)
    assert offsets_for_others(table) == list(range(50))
    assert offsets(table) == list(range(10, 50))
    append_only(table, "false")
    table.refresh()
    retention.sweep_below(table)
    assert offsets_for_others(table) == list(range(10, 50))


@pytest.mark.parametrize(
    ("config", "removes"),
    [
        ({}, False),
        ({"retention.ms": "-1", "retention.bytes": "-1"}, False),
        ({"retention.bytes": "-5"}, False),  # which retention takes for no bound
        ({"retention.ms": "5"}, True),
        ({"retention.bytes": "5", "cleanup.policy": "delete"}, True),
        ({"cleanup.policy": "compact"}, True),
        ({"cleanup.policy": "compact,delete"}, True),
        ({"cleanup.policy": "compact", "retention.ms": "-1"}, True),
    ],
)
def test_what_removes_records_by_itself(config: dict[str, str], removes: bool) -> None:
    """A bound of retention does, and compaction by key."""
    assert retention.removes_records(config) is removes


def test_what_deletion_refuses(table: TopicTable) -> None:
    """An offset beyond the table's end, and a table that is another topic's now; with no effect."""
    version = table.snapshot.version
    with pytest.raises(errors.OffsetOutOfRange):
        retention.delete_records(table, TOPIC_ID, {0: 51})
    with pytest.raises(errors.UnknownTopic):
        retention.delete_records(table, "other", {0: 5})
    assert table.refresh().version == version
    table.commit(delete_change)
    with pytest.raises(errors.UnknownTopic):
        retention.delete_records(table, TOPIC_ID, {0: 5})


def test_deletion_in_a_file_without_statistics(table: TopicTable, store: MemoryStore) -> None:
    """Another engine's file is opened, whatever order its rows are in, and rewritten if need be."""
    files = table.snapshot.files[0][1:3]
    rows = pa.concat_tables([pq.read_table(store.open(data_path("t", file))) for file in files])
    order = list(range(rows.num_rows))[::-1]
    sink = pa.BufferOutputStream()
    pq.write_table(rows.take(pa.array(order)), sink)
    data = sink.getvalue()
    store.put("topics/t/partition=0/part-1.parquet", data)
    merged = TableFile(
        path="partition=0/part-1.parquet",
        partition=0,
        size_bytes=data.size,
        rows=None,
        first=None,
        last=None,
        modified_us=table.clock.now_us(),
    )
    table.commit(lambda _: TableChange(adds=(merged,), removes=files, data_change=False))
    found = retention.delete_records(table, TOPIC_ID, {0: 5})
    assert merged.path in {file.path for file in found.files[0]}
    assert offsets(table) == list(range(5, 50))
    found = retention.delete_records(table, TOPIC_ID, {0: 15})
    assert merged.path not in {file.path for file in found.files[0]}
    assert offsets(table) == offsets_for_others(table) == list(range(15, 50))
    assert retention.delete_records(table, TOPIC_ID, {0: 15}).version == found.version


def raced(table: TopicTable, race: Callable[[TopicTable], object], times: int = 1) -> TopicTable:
    """Returns the same table, where another writer makes `race` just before some commits."""
    races = [race] * times

    class Raced(TopicTable):
        def commit(self, decide: Callable[[TableSnapshot], TableChange | None]) -> TableSnapshot:
            if races:
                other = TopicTable(table.store, "t", clock=table.clock)
                other.refresh()
                races.pop()(other)
            return super().commit(decide)

    return Raced(table.store, "t", clock=table.clock)


def data_files(table: TopicTable) -> list[str]:
    """Data files that stand, named or not."""
    return [name for name in paths(table.store, "topics/t") if name.endswith(".parquet")]


def test_deletion_beside_a_publisher(table: TopicTable) -> None:
    """Records that arrive meanwhile do not change the deletion: the same rewrite is used."""
    files = len(data_files(table))
    racing = raced(table, lambda other: publish_rows(other, 0, 10))
    assert retention.delete_records(racing, TOPIC_ID, {0: 15}).starts == (15, 0)
    assert offsets(table) == offsets_for_others(table) == list(range(15, 60))
    assert len(data_files(table)) == files + 2


def test_deletion_beside_the_end_of_the_topic(
    table: TopicTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic that another thread deletes by the same view of its table is gone, and no more."""
    found = retention._deletion

    def race(*of: Any) -> Any:
        deletion = found(*of)
        monkeypatch.setattr(retention, "_deletion", found)
        table.commit(delete_change)
        return deletion

    monkeypatch.setattr(retention, "_deletion", race)
    with pytest.raises(errors.UnknownTopic):
        retention.delete_records(table, TOPIC_ID, {0: 15})
    assert table.refresh().topic_id is None


def merge(other: TopicTable) -> None:
    """All small files of the first partition become one."""
    for group in file_compaction.choose(other.snapshot, everything=True):
        if group.partition == 0:
            file_compaction.compact(other, [group])


def test_deletion_beside_a_compaction(table: TopicTable) -> None:
    """If the files were merged meanwhile, the merged file is rewritten, and no orphan remains."""
    files = len(data_files(table))
    found = retention.delete_records(raced(table, merge), TOPIC_ID, {0: 15})
    assert found.starts == (15, 0)
    assert offsets(table) == offsets_for_others(table) == list(range(15, 50))
    assert len(found.files[0]) == 1
    assert len(data_files(table)) == files + 2


def test_compaction_beside_a_deletion(table: TopicTable) -> None:
    """A merge of files that are rewritten meanwhile is given up."""
    racing = raced(table, lambda other: retention.delete_records(other, TOPIC_ID, {0: 15}))
    racing.refresh()
    group = file_compaction.choose(racing.snapshot, everything=True)[0]
    assert file_compaction.compact(racing, [group]) == []
    assert offsets(table) == offsets_for_others(table) == list(range(15, 50))


@pytest.mark.parametrize(("mine", "others"), [(12, 25), (38, 31)])
def test_two_deletions(table: TopicTable, mine: int, others: int) -> None:
    """The farther one counts, whichever comes first."""
    racing = raced(table, lambda o: retention.delete_records(o, TOPIC_ID, {0: others}))
    found = retention.delete_records(racing, TOPIC_ID, {0: mine})
    farther = max(mine, others)
    assert found.starts == (farther, 0)
    assert offsets(table) == offsets_for_others(table) == list(range(farther, 50))


def test_a_deletion_that_is_always_late(table: TopicTable) -> None:
    """It says so, has no effect, and leaves nothing behind."""

    def rewrite(other: TopicTable) -> None:
        snapshot = other.refresh()
        (file, *_) = [each for each in snapshot.files[0] if (each.last or 0) >= 15]
        name = f"{other.snapshot.version:016x}"
        data = other.store.get(data_path("t", file))
        path = f"partition=0/{TOPIC_ID}-{file.first}-{file.last}-{name}.parquet"
        other.store.put(f"topics/t/{path}", data)
        copy = dataclasses.replace(file, path=path, modified_us=other.clock.now_us() // 1000 * 1000)
        other.commit(lambda _: TableChange(adds=(copy,), removes=(file,), data_change=False))

    racing = raced(table, rewrite, times=DELETE_ATTEMPTS)
    with pytest.raises(errors.StorageUnavailable, match="other writers have rewritten"):
        retention.delete_records(racing, TOPIC_ID, {0: 15})
    assert offsets(table) == list(range(50))
    assert len(data_files(table)) == 6 + DELETE_ATTEMPTS


def test_a_file_that_is_gone(table: TopicTable, store: MemoryStore) -> None:
    """A missing file that the table names is reported; one below the offset is not missed."""
    first, second, *_ = table.snapshot.files[0]
    store.delete([data_path("t", first), data_path("t", second)])
    with pytest.raises(errors.MissingObject):
        retention.delete_records(table, TOPIC_ID, {0: 15})
    assert table.refresh().starts == (0, 0)
    assert retention.delete_records(table, TOPIC_ID, {0: 20}).starts == (20, 0)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_commit_whose_answer_is_lost(
    table: TopicTable, store: MemoryStore, clock: ManualClock, moment: Moment
) -> None:
    """An unknown outcome is resolved by reading back; a repetition changes nothing."""
    version = table.snapshot.version + 1
    path = f"topics/t/_delta_log/{delta_log.commit_name(version)}"
    lost = Fault(operation="put_new", prefix=path, error=PutUnresolved(path, "gone"), moment=moment)
    faulty = TopicTable(store.view(ScriptedFaults(lost)), "t", clock=clock)
    found = retention.delete_records(faulty, TOPIC_ID, {0: 15})
    assert (found.version, found.starts) == (version, (15, 0))
    assert retention.delete_records(table, TOPIC_ID, {0: 15}).version == version
    assert offsets_for_others(table) == list(range(15, 50))


@pytest.mark.parametrize(
    "refusal",
    [
        errors.StorageUnavailable(operation="stat", path="x", reason="down"),
        errors.RootNotWritable(root="s3://b", reason="403"),
    ],
    ids=lambda error: error.code,
)
@pytest.mark.parametrize("count", range(1, 5))
def test_a_deletion_that_is_refused_anywhere_takes_no_other_row(
    table: TopicTable,
    store: MemoryStore,
    clock: ManualClock,
    refusal: errors.SparklogError,
    count: int,
) -> None:
    """The file with the rows that stay is removed only where no commit can name it."""
    fault = Fault(operation="stat", error=refusal, count=count)
    faulty = TopicTable(store.view(ScriptedFaults(fault)), "t", clock=clock)
    with contextlib.suppress(errors.OutcomeUnknown, type(refusal)):
        retention.delete_records(faulty, TOPIC_ID, {0: 15})
    start = table.refresh().starts[0]
    assert offsets_for_others(table) == list(range(start, 50))


def test_a_start_that_was_moved_is_durable(
    table: TopicTable, store: MemoryStore, clock: ManualClock
) -> None:
    """A log start that another process moved, which died before it was durable, stays moved."""
    dead = SyncFailed("?", "died between link and flush")
    fault = Fault(operation="put_new", prefix=table.log_folder, error=dead, moment="between")
    dying = TopicTable(store.view(ScriptedFaults(fault)), "t", clock=clock)
    with pytest.raises(SyncFailed):
        retention.delete_records(dying, TOPIC_ID, {0: 15})
    late = TopicTable(store, "t", clock=clock)
    assert retention.delete_records(late, TOPIC_ID, {0: 15}).starts == (15, 0)
    store.lose_unsynced(lambda _: True)
    assert TopicTable(store, "t", clock=clock).refresh().starts == (15, 0)


def test_what_was_brought_back_goes_again(table: TopicTable) -> None:
    """After another engine restores an old version, no reader sees the rows, and they are removed
    again.
    """
    before = table.snapshot.files[0]
    retention.delete_records(table, TOPIC_ID, {0: 25})
    now = table.snapshot.files[0]
    removed = [file for file in now if file not in before]
    back = [file for file in before if file not in now]
    table.commit(lambda _: TableChange(adds=tuple(back), removes=tuple(removed), data_change=True))
    assert offsets(table) == list(range(25, 50))
    assert offsets_for_others(table) == list(range(50))
    assert retention.retain(table) == 2
    retention.sweep_below(table)
    assert table.refresh().starts == (25, 0)
    assert offsets(table) == offsets_for_others(table) == list(range(25, 50))
    version = table.snapshot.version
    retention.sweep_below(table)
    assert table.refresh().version == version
