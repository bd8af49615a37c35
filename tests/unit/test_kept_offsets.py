"""Writes that keep the offsets of their rows: every reader returns exactly these offsets."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog import errors, limits
from sparklog.broker.log.kafka_readers import KafkaReader
from sparklog.broker.log.record_times import RecordTimes
from sparklog.clock import ManualClock
from sparklog.formats import flight_messages
from sparklog.formats.config_rules import Edit
from sparklog.formats.record import LOG_APPEND_TIME, OFFSET
from sparklog.formats.topic_names import MIRROR_SOURCE
from sparklog.sinks.kept_offsets import covering, parse_ranges
from sparklog.sources import tasks as spark_tasks
from sparklog.sources.options import LogLocation
from sparklog.sources.planner import Planner
from sparklog.sources.reader import read_slices
from sparklog.sources.selection import Selection
from sparklog.sources.tasks import TASKS_MOST
from sparklog.sources.views import RootView
from sparklog.storage import wal
from sparklog.storage.objects import MemoryStore, Store, open_store
from sparklog.storage.snapshot import (
    BatchKind,
    Encoding,
    Entry,
    EntryKind,
    Located,
    ReadSource,
    Slice,
    TableSnapshot,
    WalPosition,
)
from sparklog.storage.staging import manifest
from sparklog.storage.staging.manifest import Section, StagingWriter
from sparklog.storage.table.changes import Decide
from tests.support.batches import Record, built, read, split
from tests.support.brokers import Rig, RigOptions, Row, payload, rows_of, rows_of_root
from tests.support.brokers import rows_of_table as in_table

HUGE = 2**62
SOURCE = "kafka cluster c, topic t"
_names = itertools.count()


def mirror(rig: Rig, topic: str = "m", partitions: int = 1, **config: str) -> None:
    """Creates a topic that is a mirror."""
    rig.create(topic, partitions, mirror_source=SOURCE, **config)


def kept(offsets: Sequence[int], **columns: Sequence[object]) -> pa.RecordBatch:
    """Rows with these offsets, and values that name them."""
    rows = payload([b"%d" % offset for offset in offsets], **columns)
    return rows.append_column(OFFSET, pa.array(offsets, OFFSET.type))


def rows_at(offsets: Sequence[int]) -> list[Row]:
    """Returns the offsets and values of `kept`."""
    return [(offset, b"%d" % offset) for offset in offsets]


def staged(
    store: Store, rig: Rig, tasks: Sequence[pa.RecordBatch], topic: str = "m", **bounds: int
) -> list[Section]:
    """Stages the rows of each task, all of partition 0."""
    found: list[Section] = []
    for rows in tasks:
        writer = StagingWriter(store, query="q", batch=1, clock=rig.clock, **bounds)
        writer.add(topic, 0, rows)
        found += writer.finish()
    return found


def commit(
    rig: Rig, sections: Sequence[Section], *, query: str = "", kind: BatchKind = BatchKind.UNNAMED
) -> flight_messages.AppendStagedReply:
    """Commits the sections as one batch, of another query each time unless it is named."""
    query = query or f"q{next(_names)}"
    moved = [
        each if not each.rows else msgspec.structs.replace(each, path=_moved(rig, each, query))
        for each in sections
    ]
    decided = manifest.Manifest(query=query, batch=1, sections=tuple(moved), kind=kind)
    path = manifest.write(rig.store, decided, rig.clock).path
    return rig.broker.staged.append(flight_messages.AppendStaged(manifest=path))


def _moved(rig: Rig, section: Section, query: str) -> str:
    path = section.path.replace("/q/", f"/{query}/")
    rig.store.put(path, bytes(rig.store.get(section.path)))
    return path


def keep(
    rig: Rig, offsets: Sequence[int], first: int, end: int, *, topic: str = "m", **columns: object
) -> flight_messages.AppendStagedReply:
    """Writes rows with these offsets, which cover `first` to `end`."""
    tasks = [kept(offsets, **columns)] if offsets else []  # type: ignore[arg-type]
    sections = covering(staged(rig.store, rig, tasks, topic), {topic: {0: (first, end)}})
    return commit(rig, sections)


def fetched(rig: Rig, first: int, topic: str = "m") -> list[Row]:
    """The rows that a Kafka consumer gets from `first` to the end."""
    reader = KafkaReader(rig.broker._reader, rig.led_partitions, rig.hot, clock=rig.clock)
    found: list[Row] = []
    at, end = first, rig.end(topic)
    while at < end:
        answer = reader.fetch(topic, 0, at, limit_bytes=1_000)
        assert answer is not None
        assert answer.pieces
        assert answer.end > at
        for batch in split(answer.pieces):
            found += [(offset, each.value) for offset, each in read(batch) if offset >= at]
        at = answer.end
    return found


class Source:
    """Reads topic m as Spark's source does."""

    def __init__(self, store: MemoryStore) -> None:
        view = RootView(store, clock=ManualClock())
        self.place = LogLocation(root=store.uri)
        self.planner = Planner(view, Selection(topics=("m",)), fail_on_data_loss=True)
        self.planner.refresh()
        self.topic_id = self.planner.latest()["m"].id

    def read(self, first: int, end: int) -> list[Row]:
        """The rows of a range."""
        slices = self.planner.range("m", self.topic_id, 0, first, end)
        columns = ["offset", "value"]
        found: list[Row] = []
        for _, batch in read_slices(self.place, slices, columns=columns, fail_on_data_loss=True):
            rows = batch.select(columns).to_pydict()
            found += zip(rows["offset"], rows["value"], strict=True)
        return found


def shared_store() -> MemoryStore:
    """An empty root that a location names."""
    store = open_store(f"memory://kept-{next(_names)}")
    assert isinstance(store, MemoryStore)
    return store


# ------------------------------------------------------------------------------ the format


@settings(max_examples=60, deadline=None)
@given(
    offsets=st.lists(st.integers(0, HUGE), min_size=1, max_size=20, unique=True).map(sorted),
    timestamp_type=st.integers(0, 1),
)
def test_a_payload_with_gaps_comes_back(offsets: list[int], timestamp_type: int) -> None:
    """Rows and offsets, and the times of the source, also where the broker sets those of others."""
    rows = kept(offsets, timestamp=[7] * len(offsets))
    is_dense = offsets[-1] - offsets[0] + 1 == len(offsets)
    encoded = wal.encode_payload(rows.drop_columns(["offset"]) if is_dense else rows)
    entry = Entry(
        kind=EntryKind.RECORDS,
        base_offset=offsets[0],
        count=offsets[-1] + 1 - offsets[0],
        kept_rows=len(offsets),
        timestamp_type=timestamp_type,
    )
    entry = msgspec.msgpack.decode(msgspec.msgpack.encode(entry), type=Entry)
    found = wal.decode_payload(entry, pa.py_buffer(b"".join(map(bytes, encoded.pieces))))
    assert found["value"].to_pylist() == rows["value"].to_pylist()
    assert found["timestamp"].null_count == 0
    if not is_dense:
        assert found["offset"].to_pylist() == offsets


def test_entries_of_earlier_releases_have_a_row_for_each_offset() -> None:
    """An index line that ends before `kept_rows` is an ordinary append."""
    entry = Entry(kind=EntryKind.RECORDS, topic_id="t", base_offset=5, count=3, decoded_bytes=9)
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(entry))
    assert fields[-2:] == [9, -1]
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(fields[:-1]), type=Entry)
    assert (old, old.rows) == (entry, 3)
    data = b"".join(map(bytes, wal.encode_payload(payload(["a", "b", "c"])).pieces))
    assert wal.decode_payload(old, pa.py_buffer(data)).num_rows == 3


def test_an_entry_without_rows_has_no_bytes() -> None:
    """It covers offsets, takes no memory for them, and no request to be read."""
    entry = Entry(kind=EntryKind.RECORDS, base_offset=5, count=HUGE, kept_rows=0)
    store = MemoryStore(ManualClock())
    data = wal.read_payload(store, Located(entry, WalPosition(1, 1, 1), 0))
    assert wal.decode_payload(entry, data).num_rows == 0
    assert (entry.end, entry.memory_bytes) == (5 + HUGE, 0)


@pytest.mark.parametrize(
    ("offsets", "changes"),
    [
        ([5, 7, 9], {"base_offset": 5, "count": 4}),
        ([5, 7, 9], {"base_offset": 6, "count": 4}),
        ([5, 9, 7], {"base_offset": 5, "count": 5}),
        ([5, 5, 9], {"base_offset": 5, "count": 5}),
        ([5, 7, 9], {"base_offset": 5, "count": 5, "kept_rows": 2}),
        ([5, 7, 9], {"base_offset": 5, "count": 2}),
        ([5, 7, 9], {"base_offset": 5, "count": 3, "kept_rows": -1}),
        ([-(2**63), 0, 2**63 - 1], {"base_offset": 0, "count": 5}),
    ],
)
def test_offsets_that_are_not_as_described_are_corrupt(
    offsets: list[int], changes: Mapping[str, int]
) -> None:
    """Outside the entry, not rising, of other rows, or where an ordinary append has none."""
    data = pa.py_buffer(b"".join(map(bytes, wal.encode_payload(kept(offsets)).pieces)))
    entry = Entry(kind=EntryKind.STAGED, **{"kept_rows": 3, **changes})  # type: ignore[arg-type]
    with pytest.raises(errors.CorruptObject):
        wal.decode_payload(entry, data)


def test_gaps_without_offsets_are_corrupt() -> None:
    """A payload of fewer rows than offsets has to say which ones it has."""
    rows = payload(["a", "b"])
    empty = rows.append_column(OFFSET, pa.array([None, 3], OFFSET.type))
    for each in (rows, empty):
        data = pa.py_buffer(b"".join(map(bytes, wal.encode_payload(each).pieces)))
        with pytest.raises(errors.CorruptObject, match="no offsets"):
            wal.decode_payload(Entry(kind=EntryKind.STAGED, count=9, kept_rows=2), data)


# ------------------------------------------------------------------------------ every reader


@dataclass
class Step:
    """A write that begins at the end of the partition, and what happens after it."""

    gaps: list[int]
    """Before each row."""
    trailing: int
    then: str
    sections: int = field(default=3)


STEPS = st.lists(
    st.builds(
        Step,
        gaps=st.lists(st.sampled_from([0, 0, 0, 1, 5, 2**31 + 3, 2**40]), max_size=6),
        trailing=st.sampled_from([0, 0, 1, 4, 2**33]),
        then=st.sampled_from(["", "publish", "restart", "take over", "trim"]),
        sections=st.integers(1, 4),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(steps=STEPS, compacts=st.booleans())
def test_every_reader_returns_the_same_offsets(steps: list[Step], compacts: bool) -> None:
    """At any range, from log and table, after restarts and takeovers, and merged files."""
    clock, store = ManualClock(), shared_store()
    rig = Rig(store, clock, options=RigOptions(hot_bytes=0))
    mirror(rig)
    offsets: list[int] = []
    end = 0
    for step in steps:
        first, at, new = end, end, []
        for gap in step.gaps:
            at += gap
            new.append(at)
            at += 1
        end = at + step.trailing
        if end == first:
            continue
        tasks = [kept(new)] if new else []
        sections = staged(store, rig, tasks, section_rows=step.sections)
        commit(rig, covering(sections[::-1], {"m": {0: (first, end)}}))
        offsets += new
        match step.then:
            case "publish":
                rig.publish()
            case "trim":
                rig.publish()
                rig.trim()
            case "restart":
                rig = rig.successor()
            case "take over":
                clock.advance(10)
                rig = rig.successor(broker=rig.leadership.broker + 1)
    if compacts:
        rig.publish()
        rig.broker.topics.compact("m")
    assert rig.end("m") == end
    expected = rows_at(offsets)
    assert rows_of_root(store, clock, "m") == expected
    source = Source(store)
    places = sorted({0, end, *(offset + by for offset in offsets for by in (0, 1))})
    for first in places:
        wanted = [row for row in expected if row[0] >= first]
        assert fetched(rig, first) == wanted
        assert rows_of(rig.broker.read("m", 0, first, end)) == wanted
    for first, last in zip(places, places[3:], strict=False):
        wanted = [row for row in expected if first <= row[0] < last]
        assert rows_of(rig.broker.read("m", 0, first, last)) == wanted
        assert source.read(first, last) == wanted
    rig.publish()
    assert in_table(store, clock, "m") == expected
    assert rig.led_partitions.topic("m").table.refresh().ends == (end,)


def test_a_huge_gap_takes_a_consumer_one_fetch(rig: Rig) -> None:
    """A batch has int32 deltas, so the gap is not in a batch, and the position is after it."""
    mirror(rig)
    keep(rig, [3, HUGE - 1], 0, HUGE + 2**40)
    for _ in range(2):
        reader = KafkaReader(rig.broker._reader, rig.led_partitions, rig.hot, clock=rig.clock)
        answer = reader.fetch("m", 0, 0, limit_bytes=1 << 20)
        assert answer is not None
        assert answer.end == rig.end("m") == HUGE + 2**40
        assert [offset for each in split(answer.pieces) for offset, _ in read(each)] == [
            3,
            HUGE - 1,
        ]
        rig.publish()


def test_offsets_without_rows_move_the_table(rig: Rig, store: MemoryStore) -> None:
    """A commit without files moves the end of the table, and the log may then be trimmed."""
    mirror(rig)
    keep(rig, [], 0, 100)
    assert fetched(rig, 0) == []
    rig.publish()
    rig.trim()
    assert rig.led_partitions.topic("m").table.refresh().ends == (100,)
    assert not any(rig.led_partitions.topic("m").table.refresh().files)
    rig = rig.successor()
    assert rig.end("m") == 100
    keep(rig, [107], 100, 110)
    keep(rig, [], 110, 120)
    rig.publish()
    assert rows_of_root(store, rig.clock, "m") == in_table(store, rig.clock, "m") == rows_at([107])
    assert rig.read("m") == rows_at([107])


@pytest.mark.parametrize("publishes", [False, True])
def test_a_follower_passes_gaps_as_they_come(rig: Rig, *, publishes: bool) -> None:
    """It is notified of offsets without rows, which move its position."""
    mirror(rig)
    notified: list[int] = []
    position = flight_messages.TailPosition(topic="m", partition=0, offset=0)
    tail = rig.broker.tail([position], notify=lambda: notified.append(1))
    assert tail.next() is None
    found: list[tuple[int, list[Row]]] = []
    for offsets, end in (([], 10), ([12, 15], 20), ([], HUGE)):
        keep(rig, offsets, rig.end("m"), end)
        assert notified
        notified.clear()
        if publishes:
            rig.publish()
        while (batch := tail.next()) is not None:
            found.append((batch.end, rows_of([batch])))
    assert [rows for _, rows in found if rows] == [rows_at([12, 15])]
    assert [end for end, _ in found] == [10, 16, 20, HUGE]


def test_a_gap_has_no_time(rig: Rig) -> None:
    """The first record at a gap is the next one, whose time is not the time of the write."""
    mirror(rig)
    keep(rig, [], 0, 10)
    keep(rig, [12, 15], 10, 20, timestamp=[7_000, 9_000])
    topic = rig.led_partitions.topic("m")
    times = RecordTimes(rig.broker._reader, rig.led_partitions)
    for offset, at_us in ((0, 7_000), (12, 7_000), (13, 9_000), (16, None)):
        key = "m", topic.topic_id, 0, offset
        assert times.known_us(key) is None
        assert times.read_us(key) == at_us
    asked = flight_messages.OffsetsForTimes(topic="m", timestamps_us={0: 8_000})
    assert rig.broker._reader.offsets_for_times(asked).offsets == {0: 15}


def test_a_mirror_keeps_the_times_of_its_source(rig: Rig) -> None:
    """With LogAppendTime they are the times of the source's broker; old times are not an error."""
    mirror(rig, message_timestamp_type="LogAppendTime", message_timestamp_before_max_ms="1000")
    keep(rig, [0, 1], 0, 2, timestamp=[7_000, 9_000])
    keep(rig, [3, 5], 2, 6, timestamp=[11_000, 13_000])
    for _ in range(2):
        (*batches,) = rig.broker.read("m", 0, 0, 6)
        rows = pa.Table.from_batches([each.rows for each in batches])
        times = rows["timestamp"].cast(pa.int64()).to_pylist()
        assert times == [7_000, 9_000, 11_000, 13_000]
        assert set(rows["timestampType"].to_pylist()) == {LOG_APPEND_TIME}
        rig.publish()


@pytest.mark.parametrize("is_tight", [True, False])
def test_a_lost_file_with_gaps_is_written_again(
    rig: Rig, store: MemoryStore, is_tight: bool
) -> None:
    """A published file that is missing before it was confirmed has its rows in the log.

    A section may cover offsets before its first row and after its last.
    """
    mirror(rig)
    if is_tight:
        keep(rig, [3, 5], 0, 9)
        keep(rig, [9, 10, 17], 9, 20)
    else:
        sections = staged(store, rig, [kept([3, 5]), kept([9, 10, 17])])
        ranges = (0, 9), (9, 20)
        commit(
            rig,
            [
                msgspec.structs.replace(section, offsets=each)
                for section, each in zip(sections, ranges, strict=True)
            ],
        )
    rig.publish()
    topic = rig.led_partitions.topic("m")
    (file,) = topic.table.refresh().files[0]
    store.delete([f"topics/m/{file.path}"])
    rig.confirmer.confirm()
    rig.confirmer.confirm()
    assert in_table(store, rig.clock, "m") == rows_at([3, 5, 9, 10, 17])


# ------------------------------------------------------------------------------ who writes


def test_a_mirror_takes_no_other_records(rig: Rig) -> None:
    """Neither from a client of Flight or Kafka, nor staged; the error says whose mirror it is."""
    mirror(rig)
    keep(rig, [1], 0, 3)
    kafka = rig.writer.preparer.prepare_kafka(
        rig.led_partitions.topic("m"), 0, built([Record(1_700_000_000_000, None, b"v")])
    )
    assert kafka.encoding is Encoding.KAFKA
    ordinary = staged(rig.store, rig, [payload(["v"])])
    writes: list[Callable[[], object]] = [
        lambda: rig.append(["v"], topic="m"),
        lambda: rig.broker.wait(rig.writer.submit([kafka])),
        lambda: commit(rig, ordinary),
    ]
    for write in writes:
        with pytest.raises(errors.TopicIsMirror, match=SOURCE) as refused:
            write()
        assert "removing the topic's configuration mirror.source" in str(refused.value)
    assert rig.end("m") == 3
    alter = flight_messages.AlterTopic(topic="m", config={MIRROR_SOURCE: None})
    rig.broker.topics.alter(alter)
    rig.append(["v"], topic="m")
    assert rig.read("m") == [(1, b"1"), (3, b"v")]
    with pytest.raises(errors.NotAMirror):
        keep(rig, [4], 4, 5)


def test_records_follow_the_last_offset_of_a_mirror(rig: Rig, store: MemoryStore) -> None:
    """A mirror that has ended is a topic like any other, so its offsets leave room in an int64."""
    mirror(rig)
    last = limits.OFFSET_MAX - 1
    keep(rig, [last], 0, limits.OFFSET_MAX)
    rig.broker.topics.alter(flight_messages.AlterTopic(topic="m", config={MIRROR_SOURCE: None}))
    rig.append(["v", "w"], topic="m")
    expected = [*rows_at([last]), (last + 1, b"v"), (last + 2, b"w")]
    assert fetched(rig, last) == rig.read("m", start=last) == expected
    rig.publish()
    assert in_table(store, rig.clock, "m") == rows_of_root(store, rig.clock, "m") == expected


def test_only_a_mirror_takes_offsets(rig: Rig) -> None:
    """In any other topic the broker assigns them."""
    with pytest.raises(errors.NotAMirror, match="'t' is not a mirror"):
        keep(rig, [0], 0, 1, topic="t")
    assert rig.end() == 0


@pytest.mark.parametrize("first", [0, 4, 6, 100])
def test_a_write_begins_where_its_partition_ends(rig: Rig, first: int) -> None:
    """Nothing is written twice, and no gap hides records that are missing."""
    mirror(rig)
    keep(rig, [1, 3], 0, 5)
    with pytest.raises(errors.OffsetsDoNotContinue) as refused:
        keep(rig, [], first, 200)
    assert (refused.value.first, refused.value.end) == (first, 5)
    assert rig.end("m") == 5


def test_a_refused_partition_refuses_the_whole_write(rig: Rig) -> None:
    """The write is one batch: nothing of it is appended to the other partitions."""
    mirror(rig, partitions=2)
    ranges = {"m": {0: (0, 5), 1: (1, 5)}}
    with pytest.raises(errors.OffsetsDoNotContinue):
        commit(rig, covering(staged(rig.store, rig, [kept([2])]), ranges))
    assert (rig.end("m", 0), rig.end("m", 1)) == (0, 0)


@pytest.mark.parametrize("kind", BatchKind)
def test_a_commit_of_unknown_outcome_is_repeated(rig: Rig, kind: BatchKind) -> None:
    """It is known by its name, or it does not continue the partition: never written twice."""
    mirror(rig)
    sections = covering(staged(rig.store, rig, [kept([1, 3])]), {"m": {0: (0, 9)}})
    first = commit(rig, sections, query="w", kind=kind)
    assert first.ranges == {"m": {0: (0, 9)}}
    for each in (rig, rig.successor()):
        again = commit(each, sections, query="w", kind=kind)
        assert (again.ranges, again.skipped) == (first.ranges, True)
        with pytest.raises(errors.OffsetsDoNotContinue):
            commit(each, sections, kind=kind)
    assert each.read("m") == rows_at([1, 3])


def test_a_topic_with_records_becomes_no_mirror(rig: Rig) -> None:
    """Its records may differ from its source's; an empty one may, and any mirror may end."""
    rig.create("u")
    edits = [(Edit.SET, MIRROR_SOURCE, SOURCE)]
    rig.broker.topics.config_changes.edit("u", edits, only_checks=False)
    assert rig.led_partitions.topic("u").mirror_source == SOURCE
    keep(rig, [0], 0, 1, topic="u")
    other = [(Edit.SET, MIRROR_SOURCE, "another")]
    for topic, change in (("u", other), ("t", edits)):
        rig.append(["v"], topic="t")
        with pytest.raises(errors.BadOption, match="only an empty topic becomes a mirror"):
            rig.broker.topics.config_changes.edit(topic, change, only_checks=True)
    rig.broker.topics.config_changes.edit("u", edits, only_checks=False)
    rig.broker.topics.config_changes.edit("u", [(Edit.SET, MIRROR_SOURCE, "")], only_checks=False)
    assert rig.led_partitions.topic("u").mirror_source is None


def test_no_record_arrives_while_a_topic_becomes_a_mirror(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mirror would continue after it, and have another record than its source."""
    topic = rig.led_partitions.topic("t")
    commit_table = topic.table.commit

    def commit_late(decide: Decide) -> TableSnapshot:
        with pytest.raises(errors.TopicIsMirror):
            rig.append(["v"])
        return commit_table(decide)

    monkeypatch.setattr(topic.table, "commit", commit_late)
    alter = flight_messages.AlterTopic(topic="t", config={MIRROR_SOURCE: SOURCE})
    rig.broker.topics.alter(alter)
    keep(rig, [0], 0, 1, topic="t")
    assert rig.read("t") == rows_at([0])


def test_a_record_under_way_prevents_a_mirror(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was judged before the configuration, and is durable after it."""
    append, submit = rig.appender.append, rig.writer.submit
    is_under_way, waits = threading.Event(), threading.Event()

    def append_slowly(*args: Any, **options: Any) -> Any:
        is_under_way.set()
        assert waits.wait(30.0)
        return append(*args, **options)

    def submit_noted(*args: Any, **options: Any) -> Any:
        pending = submit(*args, **options)
        waits.set()
        return pending

    monkeypatch.setattr(rig.appender, "append", append_slowly)
    alter = flight_messages.AlterTopic(topic="t", config={MIRROR_SOURCE: SOURCE})
    with ThreadPoolExecutor(1) as threads:
        written = threads.submit(rig.append, ["v"])
        assert is_under_way.wait(30.0)
        monkeypatch.setattr(rig.writer, "submit", submit_noted)
        try:
            with pytest.raises(errors.BadOption, match="has had records"):
                rig.broker.topics.alter(alter)
        finally:
            waits.set()
        written.result(30.0)
    assert rig.led_partitions.topic("t").mirror_source is None
    rig.append(["w"])
    assert rig.read("t") == [(0, b"v"), (1, b"w")]


def test_an_internal_topic_becomes_no_mirror(rig: Rig) -> None:
    """The broker itself writes to it."""
    rig.broker.topics.ensure_offsets_topic()
    with pytest.raises(errors.InternalTopic):
        rig.broker.topics.config_changes.edit(
            "__consumer_offsets", [(Edit.SET, MIRROR_SOURCE, SOURCE)], only_checks=False
        )


# ------------------------------------------------------------------------------ staging


def test_sections_come_in_any_order(rig: Rig) -> None:
    """The driver sorts them, and sections without rows cover the gaps between them."""
    mirror(rig)
    tasks = [kept([40, 41]), kept([3, 5]), kept([20]), kept([6, 7])]
    sections = covering(staged(rig.store, rig, tasks), {"m": {0: (0, 50)}})
    assert [(each.offsets, each.rows) for each in sections] == [
        ((0, 3), 0),
        ((3, 6), 2),
        ((6, 8), 2),
        ((8, 20), 0),
        ((20, 21), 1),
        ((21, 40), 0),
        ((40, 42), 2),
        ((42, 50), 0),
    ]
    commit(rig, sections)
    assert rig.read("m") == rows_at([3, 5, 6, 7, 20, 40, 41])


def test_rows_of_a_task_that_fall_back_begin_a_section(rig: Rig) -> None:
    """A task may have two parts of a partition, the later one first."""
    writer = StagingWriter(rig.store, query="q", batch=1, clock=rig.clock)
    for offsets in ([7, 8], [9], [2, 3]):
        writer.add("m", 0, kept(offsets))
    assert [each.offsets for each in writer.finish()] == [(7, 10), (2, 4)]


@pytest.mark.parametrize(
    ("tasks", "ranges", "message"),
    [
        ([[3, 5], [5, 6]], {0: (0, 9)}, "two tasks have rows of m-0 between offsets 5 and 5"),
        ([[3, 9], [5, 6]], {0: (0, 10)}, "two tasks have rows of m-0 between offsets 5 and 9"),
        ([[3, 5]], {0: (4, 9)}, "offsets 3 to 5, but offsetRanges covers 4 to 8"),
        ([[3, 9]], {0: (0, 9)}, "offsets 3 to 9, but offsetRanges covers 0 to 8"),
        ([[3]], {1: (0, 9)}, "rows of m-0, which offsetRanges does not name"),
        ([[3]], {0: (3, 3)}, "offsets 3 to 3, but offsetRanges covers"),
    ],
)
def test_rows_outside_the_ranges_are_refused(
    rig: Rig, tasks: list[list[int]], ranges: dict[int, tuple[int, int]], message: str
) -> None:
    """By the driver, before it decides anything."""
    sections = staged(rig.store, rig, [kept(each) for each in tasks])
    with pytest.raises(errors.BadRequest, match=message):
        covering(sections, {"m": ranges})


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 5, "offsets": (0, 4)},
        {"offsets": (4, 4)},
        {"offsets": (4, 2)},
        {"offsets": (0, limits.OFFSET_MAX + 1)},
        {"offsets": (0, 2**63)},
        {"rows": 0},
        {"rows": 0, "offsets": (0, 9)},
        {"rows": 0, "length": 0, "path": "", "offsets": None},
        {"length": 0, "offsets": (0, 9)},
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    rig: Rig, changes: dict[str, object]
) -> None:
    """Rows without offsets or bytes, and bytes without rows: nothing of it is appended."""
    mirror(rig)
    (section,) = staged(rig.store, rig, [kept([0, 1, 3])])
    broken = msgspec.structs.replace(section, **changes)
    path = f"staging/q/1/{manifest.NAME}"
    found = manifest.Manifest(query="q", batch=1, sections=(broken,))
    rig.store.put(path, msgspec.json.encode(found))
    with pytest.raises(errors.BadRequest):
        rig.broker.staged.append(flight_messages.AppendStaged(manifest=path))
    assert rig.end("m") == 0


def test_a_section_that_is_not_as_described_stops_its_partition_only(rig: Rig) -> None:
    """Publisher and readers name the file; other partitions and topics are not affected."""
    mirror(rig, partitions=2)
    (section,) = staged(rig.store, rig, [kept([0, 7, 3])])  # not as a task would stage it
    lying = msgspec.structs.replace(section, offsets=(0, 8))
    commit(rig, [lying])
    commit(rig, [Section(topic="m", partition=1, rows=0, offsets=(0, 5))])
    rig.append(["v"])
    with pytest.raises(errors.CorruptObject, match="do not rise"):
        rig.read("m")
    with pytest.raises(errors.CorruptObject, match="do not rise"):
        rig.publisher.publish(rig.led_partitions.topic("m"))
    assert rig.led_partitions.topic("m").table.refresh().ends == (0, 5)
    rig.publisher.publish(rig.led_partitions.topic("t"))
    assert in_table(rig.store, rig.clock) == [(0, b"v")]


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "[]",
        '{"m": 3}',
        '{"m": {"0": [3]}}',
        '{"m": {"0": [3, 2]}}',
        '{"m": {"0": [-1, 2]}}',
        '{"m": {"-1": [0, 2]}}',
        '{"m": {"0": [0, 9223372036854775807]}}',
        '{"other": {"0": [0, 2]}}',
    ],
)
def test_ranges_that_are_none_are_refused(value: str | None) -> None:
    """The error names the option."""
    with pytest.raises(errors.BadOption, match="offsetRanges"):
        parse_ranges(value, "m")


def test_ranges_are_parsed() -> None:
    """They may be of any topics, if each row names its own."""
    given = f'{{"a": {{"0": [0, {limits.OFFSET_MAX}], "1": [5, 5]}}, "b": {{}}}}'
    assert parse_ranges(given, None) == {"a": {0: (0, limits.OFFSET_MAX), 1: (5, 5)}, "b": {}}


# ------------------------------------------------------------------------------ other parts


def test_a_compacted_mirror_keeps_the_last_of_each_key(rig: Rig, store: MemoryStore) -> None:
    """Gaps of the source and those of compaction are alike. Records without a key stay.

    A source has such records from the time before it was compacted.
    """
    mirror(rig, cleanup_policy="compact")
    keep(rig, [3, 5, 8], 0, 9, key=[b"a", b"b", b"a"])
    keep(rig, [11, 20], 9, 30, key=[b"a", b"c"])
    keep(rig, [31, 35], 30, 40)
    rig.publish()
    rig.broker.topics.compact("m")
    assert in_table(store, rig.clock, "m") == rig.read("m") == rows_at([5, 11, 20, 31, 35])
    assert fetched(rig, 0) == rows_at([5, 11, 20, 31, 35])


@pytest.mark.parametrize("first", [0, 2, 4, 7, 12, 20])
def test_records_of_a_mirror_are_deleted_up_to_any_offset(rig: Rig, first: int) -> None:
    """The log start may be in a gap, as that of the source."""
    mirror(rig)
    keep(rig, [3, 5, 11], 0, 20)
    request = flight_messages.DeleteRecords(topic="m", offsets={0: first}, timeout_seconds=1.0)
    assert rig.broker.deletion.delete(request).starts == {0: first}
    wanted = rows_at([each for each in (3, 5, 11) if each >= first])
    assert rig.read("m", start=first) == wanted
    assert rows_of_root(rig.store, rig.clock, "m") == wanted


@pytest.mark.parametrize("offsets", [[7, 9], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]])
def test_a_query_by_pattern_finds_a_mirror_that_starts_late(
    rig: Rig, store: MemoryStore, offsets: list[int]
) -> None:
    """It reads the mirror from its log start. Records that were there and are gone are a loss."""
    view = RootView(store, clock=rig.clock)
    planner = Planner(view, Selection(pattern="m.*"), fail_on_data_loss=True)
    planner.refresh()
    mirror(rig)
    keep(rig, offsets, 0, 12)
    request = flight_messages.DeleteRecords(topic="m", offsets={0: 7}, timeout_seconds=1.0)
    rig.broker.deletion.delete(request)
    planner.refresh()
    end = planner.latest()
    if offsets[0] == 0:
        with pytest.raises(errors.DataLoss, match="Offsets 0 to 7 of m-0"):
            planner.reconcile({})
        with pytest.raises(errors.DataLoss, match="Offsets 0 to 7 of m-0"):
            planner.slices({}, end)
        return
    assert planner.reconcile({})["m"].offsets == {0: 7}
    pieces = planner.slices({}, end)  # as of a batch, whose start does not have the topic
    assert [(each.first, each.end) for each in pieces] == [(7, 10)]


def test_a_task_has_as_many_rows_as_an_entry_has() -> None:
    """A limit of rows per task makes one task of an entry with few rows and many offsets."""
    entry = Entry(kind=EntryKind.STAGED, count=HUGE, kept_rows=3)
    piece = Slice(
        topic="m",
        topic_id="i",
        partition=0,
        first=0,
        end=HUGE,
        source=ReadSource.WAL,
        entry=Located(entry, WalPosition(1, 1, 1), 0),
    )
    packed = spark_tasks.pack_in_order(
        [piece], parallelism=2, row_groups=lambda _: [], most_records=100
    )
    assert packed == [[piece]]


@pytest.mark.parametrize("rows", [None, 3])
def test_tasks_are_not_counted_by_the_offsets_of_a_gap(rows: int | None) -> None:
    """Neither where tasks are limited in rows, nor where a broker's slice has unknown rows."""
    entry = Entry(kind=EntryKind.STAGED, count=HUGE, kept_rows=rows or 0)
    piece = Slice(
        topic="m",
        topic_id="i",
        partition=0,
        first=0,
        end=HUGE,
        source=ReadSource.BROKER if rows is None else ReadSource.WAL,
        entry=None if rows is None else Located(entry, WalPosition(1, 1, 1), 0),
    )
    for most in (None, 2) if rows is None else (2,):
        packed = spark_tasks.pack(
            [piece], parallelism=2, row_groups=lambda _: [()], most_records=most
        )
        assert len(packed) <= 3 * TASKS_MOST
        cut = [each for task in packed for each in task]
        assert (cut[0].first, cut[-1].end) == (0, HUGE)
        assert all(one.end == other.first for one, other in itertools.pairwise(cut))


def test_a_gap_does_not_change_the_tasks_of_other_records() -> None:
    """The limit of rows per task is exact alongside a slice with any number of offsets."""
    entries = [
        Entry(kind=EntryKind.STAGED, count=HUGE, kept_rows=3),
        Entry(kind=EntryKind.RECORDS, base_offset=HUGE, count=1_000_000),
    ]
    pieces = [
        Slice(
            topic="m",
            topic_id="i",
            partition=0,
            first=each.base_offset,
            end=each.end,
            source=ReadSource.WAL,
            entry=Located(each, WalPosition(1, 1, 1), 0),
        )
        for each in entries
    ]
    packed = spark_tasks.pack(pieces, parallelism=2, row_groups=lambda _: [()], most_records=1_000)
    dense = [sum(e.end - e.first for e in task if e.first >= HUGE) for task in packed]
    assert max(dense) <= 1_000
    assert sum(dense) == 1_000_000
