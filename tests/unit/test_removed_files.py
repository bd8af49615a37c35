"""Retention of removed files for readers of older versions: their age and their number."""

from __future__ import annotations

import pytest

from sparklog import limits
from sparklog.clock import ManualClock
from sparklog.settings import JanitorSettings
from sparklog.storage.maintenance import sweeping as maintenance
from sparklog.storage.objects import MemoryStore
from sparklog.storage.table import delta_log, removed_files
from sparklog.storage.table.changes import TableChange
from sparklog.storage.table.delta_log import Remove
from sparklog.storage.table.removed_files import (
    REMOVED_AT,
    REMOVED_FILE_BYTES,
    REMOVED_FILES,
    RemovedFileRetention,
    fair_number,
)
from sparklog.storage.table.topic_table import TopicTable
from tests.support.brokers import Rig
from tests.support.tables import create, publish_rows
from tests.unit.test_maintenance import data_files, merged

GRACE, DAY = 600.0, 86_400.0
NOW_MS = 1_700_000_000_000


def removed(*ages: float, size: int = 1_000) -> dict[str, Remove]:
    """Files that were removed so many seconds ago, and are named after it."""
    return {
        f"{age:g}": Remove(
            path=f"{age:g}",
            deletion_timestamp=NOW_MS - round(age * 1e3),
            data_change=False,
            size=size,
        )
        for age in ages
    }


def expired(
    found: dict[str, Remove],
    retention: RemovedFileRetention,
    *,
    own: float | None = None,
    table_bytes: int = 0,
) -> list[str]:
    """The paths of the files that go; `own` is the table's property."""
    return removed_files.expired(
        found,
        retention,
        now_ms=NOW_MS,
        grace_seconds=GRACE,
        property_seconds=own,
        table_bytes=table_bytes,
    )


def test_files_stay_for_their_age() -> None:
    """Within the age and the grace, whichever is longer; the table's own age replaces ours."""
    found = removed(GRACE - 1, GRACE + 1, DAY - 1, DAY + 1)
    assert expired(found, RemovedFileRetention(0.0)) == [f"{DAY + 1:g}", f"{DAY - 1:g}", "601"]
    assert expired(found, RemovedFileRetention(DAY)) == [f"{DAY + 1:g}"]
    assert expired(found, RemovedFileRetention(DAY), own=0.0) == [
        f"{DAY + 1:g}",
        f"{DAY - 1:g}",
        "601",
    ]
    assert expired(found, RemovedFileRetention(0.0), own=2 * DAY) == []


def test_the_oldest_go_where_they_are_too_many_or_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Never those within their grace; the table's own age lifts the bounds of one table."""
    found = removed(1.0, 700.0, 800.0, 900.0)
    assert expired(found, RemovedFileRetention(DAY, files=2)) == ["900", "800"]
    assert expired(found, RemovedFileRetention(DAY, files=0)) == ["900", "800", "700"]
    monkeypatch.setattr("sparklog.storage.table.removed_files.REMOVED_FILES_OF_TABLE", 3)
    assert expired(found, RemovedFileRetention(DAY)) == ["900"]
    assert expired(found, RemovedFileRetention(DAY), own=DAY) == []
    assert expired(found, RemovedFileRetention(DAY, files=2), own=DAY) == ["900", "800"]
    monkeypatch.undo()
    large = removed(1.0, 700.0, 800.0, 900.0, size=REMOVED_FILE_BYTES // 2)
    assert expired(large, RemovedFileRetention(DAY)) == ["900", "800"]
    assert expired(large, RemovedFileRetention(DAY), table_bytes=6 * REMOVED_FILE_BYTES) == ["900"]
    assert expired(large, RemovedFileRetention(DAY), own=DAY) == []


def test_a_tombstone_with_a_later_date_has_its_age_by_its_tag() -> None:
    """That date keeps the file from a VACUUM of another engine, and not here; undated ones stay."""
    ((path, remove),) = removed(DAY + 1).items()
    later = Remove(
        path=path,
        deletion_timestamp=NOW_MS + 1,
        data_change=False,
        tags={REMOVED_AT: str(remove.deletion_timestamp)},
    )
    undated = Remove(path="x", data_change=False)
    assert expired({path: later, "x": undated}, RemovedFileRetention(DAY)) == [path]


@pytest.mark.parametrize(
    ("counts", "number"),
    [
        ([], REMOVED_FILES),
        ([REMOVED_FILES], REMOVED_FILES),
        ([9_000] * 11, REMOVED_FILES),
        ([9_000] * 12, REMOVED_FILES // 12),
        ([0] * 1_000 + [9_000] * 20, REMOVED_FILES // 20),
        ([1_000] * 50 + [9_000] * 20, REMOVED_FILES // 40),
        ([5_000] * 1_000, REMOVED_FILES // 1_000),
    ],
)
def test_the_tables_of_a_broker_share_a_number(counts: list[int], number: int) -> None:
    """All that stay fit in it, and tables with few leave room to those with many."""
    assert fair_number(counts) == number
    assert sum(min(count, number) for count in counts) <= REMOVED_FILES


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("interval 1 week", 7 * DAY),
        ("interval 7 days", 7 * DAY),
        ("7 DAYS", 7 * DAY),
        ("interval 1 day 12 hours", 1.5 * DAY),
        ("interval 0 hours", 0.0),
        ("interval 1 month", None),
        ("a week", None),
        ("", None),
        (None, None),
    ],
)
def test_durations_of_table_properties(text: str | None, seconds: float | None) -> None:
    """As Spark writes intervals; one that Delta refuses counts as not set."""
    assert removed_files.interval_seconds(text) == seconds


def kept(store: MemoryStore, clock: ManualClock) -> TopicTable:
    """A topic of one empty partition, whose removed files stay for a day."""
    table = TopicTable(store, "t", clock=clock, retention=RemovedFileRetention(DAY))
    create(table, 1)
    return table


def test_replaced_files_stay_for_a_day(store: MemoryStore, clock: ManualClock) -> None:
    """Also over a restart, by the checkpoint; where space is short, for their grace only."""
    table = kept(store, clock)
    found = merged(table)
    clock.advance(DAY - 1)
    publish_rows(table, 0, 10)
    table.checkpoint()
    again = TopicTable(store, "t", clock=clock, retention=RemovedFileRetention(DAY))
    assert maintenance.sweep_replaced(again) == 0
    assert maintenance.sweep_orphans(again) == 0
    clock.advance(2)
    assert maintenance.sweep_replaced(again) == 2
    assert found.path in data_files(table)
    other = merged(again)
    clock.advance(GRACE + 1)
    assert maintenance.sweep_replaced(again) == 0
    assert maintenance.sweep_replaced(again, is_retained=False) == 4
    assert data_files(table) == {other.path}


def test_no_file_is_forgotten_within_its_grace(
    store: MemoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are: a forgotten file that is old is an orphan, which goes at once."""
    monkeypatch.setattr("sparklog.storage.table.removed_files.REMOVED_FILES_OF_TABLE", 0)
    table = kept(store, clock)
    publish_rows(table, 0, 10)
    clock.advance(2 * limits.ORPHAN_GRACE_SECONDS)
    merged(table)
    table.checkpoint()
    assert maintenance.sweep_replaced(table) == maintenance.sweep_orphans(table) == 0
    assert len(data_files(table)) == 4
    clock.advance(GRACE + 1)
    table.checkpoint()
    assert maintenance.sweep_replaced(table) + maintenance.sweep_orphans(table) > 0


def test_the_properties_of_a_table_decide(store: MemoryStore, clock: ManualClock) -> None:
    """`delta.deletedFileRetentionDuration`, and `delta.logRetentionDuration` for its versions."""
    table = TopicTable(store, "t", clock=clock)
    create(table, 1)
    both = {
        "delta.deletedFileRetentionDuration": "interval 2 days",
        "delta.logRetentionDuration": "interval 2 days",
    }
    table.commit(lambda _: TableChange(properties=both))
    merged(table)
    table.checkpoint()
    publish_rows(table, 0, 10)
    table.checkpoint()
    clock.advance(2 * DAY - 1)
    assert maintenance.sweep_replaced(table) == 0
    assert maintenance.clean_log(table, kept_versions=1) == 0
    clock.advance(2)
    assert maintenance.sweep_replaced(table) == 2
    publish_rows(table, 0, 10)
    table.checkpoint()
    assert maintenance.clean_log(table) > 0


@pytest.mark.rig(topics={"t": 1}, hot_bytes=0, janitor=JanitorSettings())
def test_a_stream_of_another_engine_may_pause_for_twenty_minutes(
    rig: Rig, clock: ManualClock
) -> None:
    """A topic that is published about every second keeps commits, and the files that they added.

    With 1,000 versions and ten minutes, the earlier ones were gone. 4 seconds.
    """
    first = rig.led_partitions.topic("t").table.snapshot.version + 1
    for number in range(1_010):
        rig.append([f"{number}"])
        rig.publish()
        clock.advance(1.2)
        if number % 25 == 0:
            rig.janitor.tick()
    table = TopicTable(rig.store, "t", clock=clock)
    assert len(table.refresh().files[0]) < 100  # they were merged
    seen = 0
    for version in range(first, table.snapshot.version + 1):
        data = rig.store.get(f"{table.log_folder}/{version:020d}.json")
        for add in delta_log.decode_commit(data, "").adds:
            if add.data_change:
                rig.store.stat(f"{table.folder}/{add.path}")
                seen += 1
    assert seen == 1_010
