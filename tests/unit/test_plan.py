from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog import errors, limits
from sparklog.storage.reading.plan import (
    high_watermark,
    join_tail,
    latest_timestamp_us,
    plan,
    slices,
)
from sparklog.storage.snapshot import (
    Entry,
    EntryKind,
    Located,
    ReadSource,
    Slice,
    TableFile,
    TableSnapshot,
    WalPosition,
)


def located(base: int, count: int, *, sequence: int = 0, carried: bool = False) -> Located:
    """An entry of the only partition."""
    entry = Entry(
        kind=EntryKind.RECORDS,
        base_offset=base,
        count=count,
        max_timestamp_us=base + count - 1,
        carried=carried,
    )
    return Located(entry, WalPosition(1, 1, sequence), 0)


def table_file(first: int | None, last: int | None, name: str = "f") -> TableFile:
    """A data file of the only partition, its times like its offsets."""
    return TableFile(
        path=f"{name}-{first}-{last}",
        partition=0,
        size_bytes=1,
        rows=None,
        first=first,
        last=last,
        max_timestamp_us=last,
    )


def table(*files: TableFile, end: int, start: int = 0) -> TableSnapshot:
    """A table with those files in its only partition, in the order that a snapshot has."""
    ordered = sorted(files, key=lambda file: -1 if file.first is None else file.first)
    return TableSnapshot(
        version=0,
        topic_id="id",
        partitions=1,
        ends=(end,),
        starts=(start,),
        files=(tuple(ordered),),
    )


def planned(
    snapshot: TableSnapshot, tail: tuple[Located, ...], start: int, end: int, partition: int = 0
) -> list[Slice]:
    """A plan of the topic t."""
    return plan(topic="t", snapshot=snapshot, tail=tail, partition=partition, start=start, end=end)


def shape(pieces: list[Slice]) -> list[tuple[int, int, str]]:
    """Returns the topic-independent part of a plan."""
    return [(piece.first, piece.end, piece.source.value) for piece in pieces]


# ------------------------------------------------------------------------------ the tail

counts = st.lists(st.integers(1, 5), max_size=8)


@given(counts, st.randoms(use_true_random=False), st.integers(0, 20))
def test_a_tail_continues_the_table(counts: list[int], chance: object, published: int) -> None:
    """Entries in any order, some of them twice, are joined from the table's end to the last one."""
    run, base = [], 0
    for sequence, count in enumerate(counts):
        run.append(located(base, count, sequence=sequence))
        base += count
    carried = [
        located(each.entry.base_offset, each.entry.count, sequence=100, carried=True)
        for each in run[::2]
    ]
    mixed = [*run, *carried]
    chance.shuffle(mixed)  # type: ignore[attr-defined]
    tail = join_tail(published, mixed)
    kept = [each for each in run if each.entry.end > published]
    if published > base:
        kept = []
    assert [each.entry.base_offset for each in tail] == [each.entry.base_offset for each in kept]
    assert all(
        each.entry.carried
        for each in tail
        if each.entry.base_offset in {other.entry.base_offset for other in carried}
    )


def test_what_does_not_connect_is_left_out() -> None:
    """Behind a hole nothing counts yet."""
    entries = [located(0, 2), located(3, 2)]
    assert join_tail(0, entries) == (entries[0],)
    assert join_tail(3, entries) == (entries[1],)
    assert join_tail(2, entries) == ()


def test_an_entry_that_is_half_published_counts() -> None:
    """If the table ends within an entry, the rest of the entry continues the table."""
    entries = (located(0, 4), located(4, 1))
    assert join_tail(2, entries) == entries
    snapshot = table(table_file(0, 1), end=2)
    assert shape(planned(snapshot, entries, 0, 5)) == [
        (0, 2, "files"),
        (2, 4, "wal"),
        (4, 5, "wal"),
    ]
    assert shape(planned(snapshot, entries, 0, 1)) == [(0, 1, "files")]


def test_a_carried_copy_outlives_the_entry() -> None:
    """The last carried copy of an entry is read."""
    old, copy, newer = (
        located(0, 2, sequence=9),
        located(0, 2, sequence=3, carried=True),
        located(0, 2, sequence=5, carried=True),
    )
    assert join_tail(0, [copy, old]) == (copy,)
    assert join_tail(0, [newer, copy, old]) == (newer,)


# ------------------------------------------------------------------------------ slices


@st.composite
def logs(draw: st.DrawFn) -> tuple[TableSnapshot, tuple[Located, ...], set[int]]:
    """A table with gaps, its tail, and the offsets that have a record."""
    offsets: set[int] = set()
    files: list[TableFile] = []
    at = draw(st.integers(0, 3))
    for number in range(draw(st.integers(0, 4))):
        count = draw(st.integers(1, 4))
        inside = draw(st.sets(st.integers(at, at + count - 1), min_size=1))
        with_statistics = draw(st.integers(0, 5)) > 0
        first, last = (min(inside), max(inside)) if with_statistics else (None, None)
        files.append(table_file(first, last, f"{number}:{sorted(inside)}"))
        offsets |= inside
        at += count + draw(st.integers(0, 2))
    for number in range(draw(st.integers(0, 2)) if files else 0):
        # Another engine wrote files of overlapping offsets.
        first = draw(st.integers(0, at - 1))
        files.append(table_file(first, draw(st.integers(first, at - 1)), f"wide {number}:[]"))
    published = at
    tail = []
    for _ in range(draw(st.integers(0, 3))):
        count = draw(st.integers(1, 3))
        tail.append(located(at, count))
        offsets |= set(range(at, at + count))
        at += count
    start = draw(st.integers(0, published))
    return table(*files, end=published, start=start), tuple(tail), offsets


def read(pieces: list[Slice]) -> list[int]:
    """The offsets that a reader gets, if each file holds what its name says."""
    found = []
    for piece in pieces:
        inside: list[int] = []
        if piece.entry is not None:
            inside = list(range(piece.entry.entry.base_offset, piece.entry.entry.end))
        for file in piece.files:
            names = file.path.partition(":")[2].partition("]")[0].strip("[")
            inside += [int(name) for name in names.split(",") if name]
        found += sorted(offset for offset in inside if piece.first <= offset < piece.end)
    return found


@given(logs(), st.data())
def test_a_plan_finds_every_record_once(
    log: tuple[TableSnapshot, tuple[Located, ...], set[int]], data: st.DataObject
) -> None:
    """The slices of a range follow one another and hold exactly its records, in order."""
    snapshot, tail, offsets = log
    low, high = snapshot.starts[0], high_watermark(snapshot, 0, tail)
    start = data.draw(st.integers(low, high))
    end = data.draw(st.integers(start, high))
    pieces = planned(snapshot, tail, start, end)
    bounds = [bound for piece in pieces for bound in (piece.first, piece.end)]
    assert bounds == sorted(bounds)
    assert all(start <= piece.first < piece.end <= end for piece in pieces)
    assert read(pieces) == sorted(offset for offset in offsets if start <= offset < end)
    for piece in pieces:
        assert (piece.topic, piece.topic_id, piece.partition) == ("t", "id", 0)
        assert (piece.entry is None) is (piece.source is ReadSource.FILES)
    if start < end:
        # As much of the tail as holds offsets of the range is enough.
        part = [e for e in tail if e.entry.end > start and e.entry.base_offset < end]
        assert planned(snapshot, tuple(part), start, end) == pieces


@pytest.mark.parametrize("start", [0, 505, 1_000, 1_050, 1_099])
def test_a_slice_is_made_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, start: int) -> None:
    """A reader of the first slice of a long log does not pay for the others."""
    snapshot = table(*(table_file(at, at + 9) for at in range(0, 1_000, 10)), end=1_000)
    tail = tuple(located(1_000 + number, 1) for number in range(100))
    made = []

    def counting(**what: Any) -> Slice:
        made.append(what["first"])
        return Slice(**what)

    monkeypatch.setattr("sparklog.storage.reading.plan.Slice", counting)
    found = slices(topic="t", snapshot=snapshot, tail=tail, partition=0, start=start, end=1_100)
    assert made == []
    assert next(found).first == start
    assert made == [start]


def test_a_file_that_reaches_far_is_read_with_all_that_it_overlaps() -> None:
    """Another engine's file counts wherever its offsets may be, however long before it begins."""
    files = [table_file(at, at + 9) for at in range(0, 100, 10)]
    wide = table_file(5, 74, "wide")
    snapshot = table(wide, *files, end=100)
    first, *others = planned(snapshot, (), 62, 90)
    assert (first.first, first.end, first.files) == (62, 80, (wide, files[6], files[7]))
    assert [(piece.first, piece.end, piece.files) for piece in others] == [(80, 90, (files[8],))]
    unknown = table_file(None, None)
    (whole,) = planned(table(unknown, *files, end=100), (), 62, 90)
    assert (whole.first, whole.end, whole.files) == (62, 90, (unknown, *files[6:9]))


@pytest.mark.parametrize(("start", "end"), [(4, 6), (5, 13), (-1, 6), (13, 13)])
def test_a_range_that_does_not_exist_is_named(start: int, end: int) -> None:
    """Below the log start and beyond the end there is no silence, but an error with the range."""
    snapshot, tail = table(end=10, start=5), (located(10, 2),)
    with pytest.raises(errors.OffsetOutOfRange) as refused:
        planned(snapshot, tail, start, end)
    assert refused.value.offset == (end if 5 <= start <= 12 else start)
    assert (refused.value.start, refused.value.end) == (5, 12)


def test_what_is_no_place_is_named() -> None:
    """An unknown partition, and a table without a topic, are refused."""
    for partition in (-1, 1):
        with pytest.raises(errors.UnknownPartition) as refused:
            planned(table(end=0), (), 0, 0, partition)
        assert (refused.value.partition, refused.value.last) == (partition, 0)
    with pytest.raises(errors.UnknownTopic):
        planned(TableSnapshot(version=3, topic_id=None), (), 0, 0)


def test_an_empty_range_needs_nothing() -> None:
    """Between equal offsets there is no slice, at the very end as well."""
    for offset in (5, 7, 12):
        assert planned(table(end=10, start=5), (located(10, 2),), offset, offset) == []


def test_the_latest_time_of_a_slice() -> None:
    """It is that of the entry or of the newest file; unknown is the far future."""
    snapshot = table(table_file(0, 4), table_file(3, 9), end=10)
    tail = (located(10, 2),)
    assert [latest_timestamp_us(piece) for piece in planned(snapshot, tail, 0, 12)] == [9, 11]
    unknown = table(table_file(None, None), end=10)
    (piece,) = planned(unknown, (), 0, 10)
    assert latest_timestamp_us(piece) == limits.TIMESTAMP_MAX_US
