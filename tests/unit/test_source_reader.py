"""The readers that Spark talks to, without Spark."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
)
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from sparklog import errors, limits
from sparklog.clock import ManualClock
from sparklog.sources import datasource, offsets, ranges
from sparklog.sources.offsets import Position
from sparklog.sources.options import LogLocation, parse
from sparklog.sources.planner import Planner
from sparklog.sources.scan import scan
from sparklog.sources.selection import Selection
from sparklog.sources.stream import (
    POLL_BLOCKS_SECONDS,
    STREAM_LOOK_SECONDS,
    STREAM_WAIT_MAX_SECONDS,
    STREAM_WAIT_MIN_SECONDS,
    EarlierStreamReader,
    StreamReader,
)
from sparklog.sources.views import RootView
from sparklog.storage.objects import open_store
from tests.support.roots import payload
from tests.support.worlds import WatchedClock, World, position

LATE = {"startingOffsetsByTimestampStrategy": "latest"}
GIVEN = {"root": "memory://x", "subscribe": "a"}
AT_START = {"t": {"0": 0, "1": 0}}


def stream_of(world: World, clock: ManualClock, **changes: str) -> StreamReader:
    """A stream from the beginning of the world's topic, which looks as often as it is asked."""
    given = {"root": world.uri, "subscribe": "t", "startingOffsets": "earliest"}
    return StreamReader(parse(given | {"pollInterval": "0ms"} | changes), world.scan(), clock)


def where(position: dict[str, Any]) -> dict[str, Any]:
    """The offsets of a position, which has another text as the end of the first batch."""
    return {topic: each["offsets"] for topic, each in position.items()}


def test_executors_find_a_root_that_was_named_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative root is resolved where the query is planned; a broker's address stays."""
    monkeypatch.chdir(tmp_path)
    wanted = StructType().add("value", BinaryType())
    by_root, by_broker = {"root": "here"}, {"bootstrap": "host:8815"}
    found = [scan(parse({"subscribe": "a"} | each), wanted) for each in (by_root, by_broker)]
    assert [each.location for each in found] == [
        LogLocation(root=(tmp_path / "here").as_uri()),
        LogLocation(bootstrap="host:8815"),
    ]


def test_an_idle_stream_waits_longer_and_longer() -> None:
    """Each answer waits a part of the time since the last record, and looks meanwhile."""
    world, clock = World(), WatchedClock()
    stream = stream_of(world, clock)
    start = stream.initialOffset()
    waits = []
    for _ in range(50):
        began = clock.monotonic()
        assert where(stream.latestOffset(start, ReadAllAvailable())) == AT_START
        waits.append(clock.monotonic() - began)
        clock.advance(0.1)
    assert waits == pytest.approx(sorted(waits))
    assert waits[0] == pytest.approx(STREAM_WAIT_MIN_SECONDS)
    assert waits[-1] == pytest.approx(STREAM_WAIT_MAX_SECONDS)
    assert max(clock.slept_seconds) == STREAM_LOOK_SECONDS


def test_a_stream_looks_no_oftener_than_it_was_told() -> None:
    """With a poll interval, each look waits until it is due; the next look sees new records."""
    world, clock = World(), WatchedClock()
    stream = stream_of(world, clock, pollInterval="500ms")
    start = stream.initialOffset()
    assert where(stream.latestOffset(start, ReadAllAvailable())) == AT_START
    for _ in range(5):
        clock.advance(0.1)
        assert where(stream.latestOffset(start, ReadAllAvailable())) == AT_START
    assert clock.slept_seconds == pytest.approx([0.4] * 5)
    world.append(1)
    clock.advance(0.6)
    assert where(stream.latestOffset(start, ReadAllAvailable())) != AT_START
    assert len(clock.slept_seconds) == 5


def test_what_comes_while_a_stream_waits_is_given_at_once() -> None:
    """The wait ends with another look."""
    world = World()
    clock = WatchedClock(lambda: world.append(3))
    stream = stream_of(world, clock)
    start = stream.initialOffset()
    end = stream.latestOffset(start, ReadAllAvailable())
    assert end["t"]["offsets"] == {"0": 3, "1": 0}
    assert where(stream.reportLatestOffset() or {}) == where(end)


def test_a_stream_takes_no_more_than_its_limit() -> None:
    """The default limit is the option's, and each trigger goes so far on."""
    world, clock = World(), WatchedClock()
    world.append(6, 2)
    stream = stream_of(world, clock, maxOffsetsPerTrigger="4")
    assert stream.getDefaultReadLimit() == ReadMaxRows(4)
    at = stream.latestOffset(stream.initialOffset(), ReadMaxRows(4))
    assert at["t"]["offsets"] == {"0": 3, "1": 1}
    assert stream.latestOffset(at, ReadAllAvailable())["t"]["offsets"] == {"0": 6, "1": 2}


def test_a_stream_takes_about_as_many_bytes_as_allowed() -> None:
    """Beside a limit of records, also with AvailableNow; a trigger that runs once has no limit."""
    world, clock = World(), WatchedClock()
    world.append(60, 40)
    stream = stream_of(world, clock, maxBytesPerTrigger="600")
    limit = stream.getDefaultReadLimit()
    assert limit == ReadMaxBytes(600)
    start = stream.initialOffset()
    by_bytes = stream.latestOffset(start, limit)["t"]["offsets"]
    assert 0 < by_bytes["1"] < by_bytes["0"] < 60
    both = stream_of(world, clock, maxBytesPerTrigger="600", maxOffsetsPerTrigger="10")
    assert both.latestOffset(both.initialOffset(), limit)["t"]["offsets"] == {"0": 6, "1": 4}
    both = stream_of(world, clock, maxBytesPerTrigger="600", maxOffsetsPerTrigger="90")
    assert both.latestOffset(both.initialOffset(), limit)["t"]["offsets"] == by_bytes
    assert where(stream.latestOffset(start, ReadAllAvailable())) == {"t": {"0": 60, "1": 40}}
    stream.prepareForTriggerAvailableNow()
    at, batches = start, 0
    while (end := stream.latestOffset(at, limit)) != at:
        at, batches = end, batches + 1
    assert where(at) == {"t": {"0": 60, "1": 40}}
    assert batches > 2


def test_progress_has_the_time_of_the_first_unread_record() -> None:
    """In the log, and in the table, where times are taken to rise evenly; none if all is read."""
    world, clock = World(), WatchedClock()
    times = [datetime.fromtimestamp(second, UTC) for second in (100, 110)]
    world.root.append(("t", 0, payload([b"v"] * 2, timestamp=times)))
    topic_id = world.root.topic_id("t")
    for expected_ms in (100_000, 105_000):  # the bounds of an entry are not those of one record
        stream = stream_of(world, clock, maxOffsetsPerTrigger="1")
        at = stream.latestOffset(stream.initialOffset(), ReadMaxRows(1))
        latest = offsets.encode(position(topic_id, 2, 0))
        unread = {"unreadSince": {"0": expected_ms}}
        assert stream.reportLatestOffset() == {"t": latest["t"] | unread}
        stream.latestOffset(at, ReadMaxRows(1))
        assert stream.reportLatestOffset() == latest
        world.root.publish("t")


def test_progress_leaves_out_records_that_are_deleted_meanwhile() -> None:
    """A view that has moved on beyond the planner's last refresh does not end the query."""
    world = World()
    world.append(4, 4)
    world.root.publish("t")
    clock = ManualClock()
    view = RootView(open_store(world.uri), clock=clock)
    planner = Planner(view, Selection(topics=("t",)), fail_on_data_loss=True)
    planner.refresh()
    unread = position(world.root.topic_id("t"), 1, 1)
    assert {*planner.unread_since(unread)["t"]} == {0, 1}
    world.root.move_start("t", 0, 3)
    clock.advance(60)  # an object store's table of which nothing is new is not read before
    view.refresh(list, from_scratch=False)
    assert {*planner.unread_since(unread)["t"]} == {1}


def test_a_refresh_that_fails_leaves_the_view_as_it_was() -> None:
    """A topic that is deleted meanwhile is missing only from the next view."""
    world = World()
    world.append(4)
    view = RootView(open_store(world.uri), clock=ManualClock())
    view.refresh(list, from_scratch=False)

    def choose(existing: Iterable[str]) -> list[str]:
        chosen.append([*existing])
        if len(chosen) > 1:
            raise errors.TimedOut(what="the store", timeout_seconds=1)
        return []

    for from_scratch in (False, True):
        chosen: list[list[str]] = []
        with pytest.raises(errors.TimedOut):
            view.refresh(choose, from_scratch=from_scratch)
        assert [piece.end for piece in view.slices("t", 0, 0, 4)] == [4]


def test_a_stream_waits_for_enough_records() -> None:
    """minOffsetsPerTrigger holds back fewer records, except at first, until maxTriggerDelay."""
    world, clock = World(), WatchedClock()
    world.append(1)
    stream = stream_of(world, clock, minOffsetsPerTrigger="3", maxTriggerDelay="1m")
    limit = stream.getDefaultReadLimit()
    assert limit == ReadMinRows(3)
    at = stream.latestOffset(stream.initialOffset(), limit)
    assert at["t"]["offsets"] == {"0": 1, "1": 0}  # as in Spark's Kafka source
    world.append(1, 1)
    assert stream.latestOffset(at, limit) == at
    world.append(1)
    at = stream.latestOffset(at, limit)
    assert at["t"]["offsets"] == {"0": 3, "1": 1}
    world.append(1)
    assert stream.latestOffset(at, limit) == at
    assert stream.latestOffset(at, ReadAllAvailable()) != at  # as a trigger asks that runs once
    clock.advance(60)
    assert stream.latestOffset(at, limit) != at


def test_available_now_takes_what_is_less_than_enough() -> None:
    """Records would stay unread forever otherwise."""
    world, clock = World(), WatchedClock()
    world.append(3)
    stream = stream_of(world, clock, minOffsetsPerTrigger="2", maxOffsetsPerTrigger="2")
    stream.prepareForTriggerAvailableNow()
    at = stream.latestOffset(stream.initialOffset(), ReadMaxRows(2))
    at = stream.latestOffset(at, ReadMaxRows(2))
    assert at["t"]["offsets"] == {"0": 3, "1": 0}


def test_available_now_ends_where_it_was_called() -> None:
    """Later records are left for the next run, and the end is reported without a wait."""
    world, clock = World(), WatchedClock()
    world.append(3)
    stream = stream_of(world, clock)
    stream.prepareForTriggerAvailableNow()
    world.append(3)
    world.root.add_partitions("t", 3)
    world.root.append(("t", 2, payload([b"late"])))
    end = stream.latestOffset(stream.initialOffset(), ReadAllAvailable())
    assert end["t"]["offsets"] == {"0": 3, "1": 0, "2": 0}
    assert stream.latestOffset(end, ReadAllAvailable()) == end
    assert not clock.slept_seconds


def test_what_waits_is_read_without_another_look() -> None:
    """A stream that catches up in steps is not held up by the poll interval."""
    world, clock = World(), WatchedClock()
    world.append(6)
    stream = stream_of(world, clock, pollInterval="500ms", maxOffsetsPerTrigger="2")
    at = stream.initialOffset()
    for _ in range(3):
        at = stream.latestOffset(at, ReadMaxRows(2))
    assert at["t"]["offsets"]["0"] == 6
    assert not clock.slept_seconds


def test_a_long_poll_interval_holds_no_query_up() -> None:
    """An answer comes after a second at most, so that a query can be stopped."""
    world, clock = World(), WatchedClock()
    stream = stream_of(world, clock, pollInterval="10m")
    start = stream.initialOffset()
    stream.latestOffset(start, ReadAllAvailable())
    world.append(1)
    assert where(stream.latestOffset(start, ReadAllAvailable())) == AT_START
    assert clock.slept_seconds == [POLL_BLOCKS_SECONDS]
    clock.advance(600)
    assert where(stream.latestOffset(start, ReadAllAvailable())) != AT_START


def fail(self: Planner, *, from_scratch: bool = False) -> None:
    """Instead of a refresh."""
    raise errors.StorageUnavailable(operation="get", path="x", reason="it rains")


def test_a_store_that_does_not_answer_ends_no_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """`latestOffset` retries for long, then reports no new records, and recovers."""
    world, clock = World(), WatchedClock()
    stream = stream_of(world, clock)
    start = stream.initialOffset()
    stream.latestOffset(start, ReadAllAvailable())
    world.append(1)
    clock.slept_seconds.clear()
    refresh = Planner.refresh
    monkeypatch.setattr(Planner, "refresh", fail)
    assert where(stream.latestOffset(start, ReadAllAvailable())) == AT_START
    assert sum(clock.slept_seconds) >= limits.SPARK_PATIENCE_SECONDS
    monkeypatch.setattr(Planner, "refresh", refresh)
    assert where(stream.latestOffset(start, ReadAllAvailable())) != AT_START


def test_available_now_does_not_end_for_a_store_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That nothing is left to read would not be true; the query fails, and can be run again."""
    world, clock = World(), WatchedClock()
    world.append(3)
    stream = stream_of(world, clock)
    start = stream.initialOffset()
    stream.prepareForTriggerAvailableNow()
    monkeypatch.setattr(Planner, "_holds", lambda *_: False)  # so it must look again
    monkeypatch.setattr(Planner, "refresh", fail)
    with pytest.raises(errors.StorageUnavailable):
        stream.latestOffset(start, ReadAllAvailable())


def test_the_first_batch_is_read_once_however_often_its_end_comes() -> None:
    """Its end says where it begins. Later batches begin there, also those of a resting source."""
    world, clock = World(), WatchedClock()
    world.append(2, 1)
    stream = stream_of(world, clock, startingOffsets="latest")
    start = stream.initialOffset()
    stream.latestOffset(start, ReadAllAvailable())
    world.append(3)
    world.root.add_partitions("t", 3)
    end = stream.latestOffset(start, ReadAllAvailable())
    world.append(1)
    again = stream_of(world, clock, startingOffsets="latest")  # as after a restart
    for reader, begin in ((stream, start), (again, again.initialOffset())):
        (partition,) = reader.partitions(begin, end)
        found = [each for batch in reader.read(partition) for each in batch["offset"].to_pylist()]
        assert found == [2, 3, 4]
    assert again.partitions(end, end) == []  # another source of the query has something new
    (partition,) = again.partitions(end, again.latestOffset(end, ReadAllAvailable()))
    assert [batch["offset"].to_pylist() for batch in again.read(partition)] == [[5]]


def test_a_partition_of_a_stream_is_one_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition stays in one ordered task at any size, unless the user asks for more tasks."""
    monkeypatch.setattr("sparklog.sources.tasks.TASK_MIN_BYTES", 1)
    world, clock = World(), WatchedClock()
    for _ in range(9):
        world.append(3, 2)
    stream = stream_of(world, clock)
    start = stream.initialOffset()
    end = stream.latestOffset(start, ReadAllAvailable())
    found = []
    for each in stream.partitions(start, end):
        rows = [batch.select(["partition", "offset"]).to_pylist() for batch in stream.read(each)]
        found.append([(row["partition"], row["offset"]) for batch in rows for row in batch])
    assert sorted(found) == [[(0, at) for at in range(27)], [(1, at) for at in range(18)]]
    assert len(stream_of(world, clock, minPartitions="6").partitions(start, end)) > 2


def test_a_stream_of_ranges_has_a_row_for_each_partition() -> None:
    """Its offsets in table and log, in one task, which reads nothing; no row without records."""
    world = World()
    world.append(4, 3)
    world.root.publish("t")
    world.append(2)
    columns: dict[str, DataType] = {"topic": StringType(), "id": StringType()}
    columns |= {"partition": IntegerType(), "first": LongType(), "end": LongType()}
    wanted = StructType([StructField(name, kind) for name, kind in columns.items()])
    options = parse({"root": world.uri, "subscribe": "t", "rows": "ranges"})
    stream = StreamReader(options, ranges.scan(wanted), ManualClock())
    topic_id = world.root.topic_id("t")

    def rows(start: Position, end: Position) -> list[dict[str, Any]]:
        (task,) = stream.partitions(offsets.encode(start), offsets.encode(end))
        (batch,) = stream.read(task)
        assert batch.schema.names == wanted.names
        return batch.to_pylist()

    start, end = position(topic_id, 1, 3), position(topic_id, 6, 3)
    mine = {"topic": "t", "id": topic_id}
    assert rows(start, end) == [mine | {"partition": 0, "first": 1, "end": 6}]
    both = [
        mine | {"partition": 0, "first": 0, "end": 6},
        mine | {"partition": 1, "first": 0, "end": 3},
    ]
    assert rows({}, end) == both
    assert rows(end, end) == []


def test_a_plan_waits_for_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """`partitions` is asked once, so it tries again until the store answers."""
    world, clock = World(), WatchedClock()
    world.append(1)
    stream = stream_of(world, clock)
    start = stream.initialOffset()
    end = stream.latestOffset(start, ReadAllAvailable())
    again = stream_of(world, clock)  # as after a restart
    refresh, failures = Planner.refresh, iter([True, True, False])

    def fail_twice(self: Planner, *, from_scratch: bool = False) -> None:
        if next(failures):
            raise errors.StorageUnavailable(operation="get", path="x", reason="it rains")
        refresh(self, from_scratch=from_scratch)

    monkeypatch.setattr(Planner, "refresh", fail_twice)
    (partition,) = again.partitions(start, end)
    assert sum(batch.num_rows for batch in again.read(partition)) == 1
    assert len(clock.slept_seconds) == 2


def test_a_stream_with_wrong_options_says_so_itself() -> None:
    """Nothing is raised while Spark would hide it; the first question gets the refusal."""
    reader = datasource.stream_reader(GIVEN | {"endingOffsets": "latest"}, StructType())
    with pytest.raises(errors.BadOption, match="availableNow"):
        reader.getDefaultReadLimit()


def test_a_table_with_a_list_of_columns_is_refused_when_it_is_read() -> None:
    """Its readers get no options: the refusal names the view, although the root is also missing."""
    wanted = StructType().add("offset", "long")
    with pytest.raises(errors.BadRequest, match="use CREATE TEMPORARY VIEW name USING"):
        datasource.batch_reader({}, wanted)
    with pytest.raises(errors.BadRequest, match="use CREATE TEMPORARY VIEW name USING"):
        datasource.stream_reader({}, wanted).initialOffset()


def test_a_schema_of_the_user_s_must_be_one_of_rows() -> None:
    """Columns may be left out and put in another order; other names and types are refused."""
    world = World()
    options = {"root": world.uri, "subscribe": "t"}
    datasource.batch_reader(options, StructType().add("offset", "long").add("key", BinaryType()))
    with pytest.raises(errors.BadOption, match="schema = 'key string'"):
        datasource.batch_reader(options, StructType().add("key", StringType()))
    with pytest.raises(errors.BadOption, match="schema = 'id int'"):
        datasource.batch_reader(options, StructType().add("id", "integer"))


@pytest.mark.parametrize(
    ("options", "column", "kind"),
    [
        ({}, "_corrupt", BinaryType()),
        ({"valueFormat": "string"}, "value", StructType().add("id", "long")),
        ({"valueFormat": "string"}, "value", BinaryType()),
        ({"valueFormat": "json", "valueSchema": "id INT"}, "value", StringType()),
        ({"valueFormat": "string", "badValues": "column"}, "_corrupt", BinaryType()),
    ],
)
def test_a_schema_of_the_user_s_must_be_what_values_become(
    options: dict[str, str], column: str, kind: DataType
) -> None:
    """Nothing is left for a task to stumble over."""
    given = {"root": World().uri, "subscribe": "t"} | options
    with pytest.raises(errors.BadOption, match="schema"):
        datasource.batch_reader(given, StructType().add(column, kind))


def test_a_batch_that_ends_before_it_starts_is_refused() -> None:
    """A range that is upside down in one partition names it."""
    world = World()
    world.append(4)
    options = {
        "root": world.uri,
        "subscribe": "t",
        "startingOffsets": '{"t": {"0": 3, "1": 0}}',
        "endingOffsets": '{"t": {"0": 2, "1": 0}}',
    }
    reader = datasource.batch_reader(options, StructType().add("offset", "long"))
    with pytest.raises(errors.BadOption, match="before the start of t-0, offset 3"):
        reader.partitions()
    options["endingOffsets"] = '{"t": {"0": 3, "1": 0}}'
    assert datasource.batch_reader(options, StructType().add("offset", "long")).partitions() == []


def test_an_earlier_spark_is_told_of_a_loss_by_the_plan() -> None:
    """Also by the first one after a restart, before anybody has asked where the log ends."""
    world = World()
    for _ in range(2):
        world.append(5, 5)
        world.root.publish("t")
    world.root.move_start("t", 0, 5)
    end = offsets.encode(world.planner().latest())

    def planned(*start: int) -> list[Any]:
        options = parse({"root": world.uri, "subscribe": "t"})
        reader = EarlierStreamReader(options, world.scan(), ManualClock())
        return list(
            reader.partitions(offsets.encode(position(world.root.topic_id("t"), *start)), end)
        )

    with pytest.raises(errors.DataLoss, match="Offsets 0 to 5 of t-0"):
        planned(0, 0)
    assert planned(5, 0)


# ------------------------------------------------------------------------------ the first batch


def rows_between(world: World, start: dict[str, Any], end: dict[str, Any], **changes: str) -> Any:
    """The places that a micro-batch reads, in a process that Spark has just started."""
    reader = stream_of(world, WatchedClock(), **changes)
    tasks_of_batch = reader.partitions(start, end)
    batches = [batch for task in tasks_of_batch for batch in reader.read(task)]
    return sorted(
        place
        for batch in batches
        for place in zip(
            batch.column("partition").to_pylist(), batch.column("offset").to_pylist(), strict=True
        )
    )


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({"startingOffsets": "latest"}, (5, 5)),
        ({"startingOffsets": '{"t": {"0": -1, "1": 2}}'}, (5, 2)),
        ({"startingOffsets": "group", "group.id": "g"}, (1, 4)),
        ({"startingTimestamp": "99999999999999"} | LATE, (5, 5)),
        ({"startingOffsets": "earliest"}, (0, 0)),
    ],
)
def test_a_first_batch_that_is_repeated_begins_where_it_began(
    options: dict[str, str], start: tuple[int, int]
) -> None:
    """After a failure or a restart the option would name another start."""
    world = World()
    world.append(5, 5)
    world.commit("g", {0: 1, 1: 4})
    reader = stream_of(world, WatchedClock(), **options)
    began = reader.initialOffset()
    reader.latestOffset(began, ReadAllAvailable())
    world.append(3, 2)
    end = reader.latestOffset(began, ReadAllAvailable())
    assert (end["t"]["offsets"], end["t"]["from"]) == (
        {"0": 8, "1": 7},
        {str(number): offset for number, offset in enumerate(start)},
    )

    world.append(4, 4)
    world.commit("g", {0: 12, 1: 11})
    again = stream_of(world, WatchedClock(), **options).initialOffset()
    expected = [(0, offset) for offset in range(start[0], 8)]
    expected += [(1, offset) for offset in range(start[1], 7)]
    assert rows_between(world, again, end, **options) == expected
    # The next batch begins at the end of the first, and no text but a new position makes one.
    reader = stream_of(world, WatchedClock(), **options)
    after = reader.latestOffset(end, ReadAllAvailable())
    assert rows_between(world, end, after) == [
        *((0, offset) for offset in range(8, 12)),
        *((1, offset) for offset in range(7, 11)),
    ]
    assert reader.latestOffset(after, ReadAllAvailable()) == after


@pytest.mark.parametrize(
    "options",
    [
        {"startingOffsets": '{"t": {"0": 1, "1": 4}}'},
        {"startingOffsets": "group", "group.id": "g"},
        {"startingTimestamp": "1000000"},
    ],
)
def test_a_first_batch_is_repeated_although_its_start_resolves_no_longer(
    options: dict[str, str],
) -> None:
    """A partition is new, the group has expired, no record is that late: the checkpoint counts."""
    world = World()
    world.append(5, 5)
    world.commit("g", {0: 1, 1: 4})
    reader = stream_of(world, WatchedClock(), **options)
    began = reader.initialOffset()
    end = reader.latestOffset(began, ReadAllAvailable())
    begun = rows_between(world, began, end, **options)
    assert begun

    world.root.add_partitions("t", 3)
    world.root.append(("t", 2, payload([b"new"])))
    world.commit("g", {0: None, 1: None})
    if "startingTimestamp" in options:
        options["startingTimestamp"] = "99999999999999"  # a relative time is another one now
    again = stream_of(world, WatchedClock(), **options)
    assert rows_between(world, again.initialOffset(), end, **options) == begun
    after = again.latestOffset(end, ReadAllAvailable())
    assert rows_between(world, end, after, **options) == [(2, 0)]
    new = stream_of(world, WatchedClock(), **options)
    with pytest.raises(errors.BadOption):
        new.latestOffset(new.initialOffset(), ReadAllAvailable())


def test_the_end_of_an_empty_first_batch_is_one_position() -> None:
    """While nothing comes, Spark plans no other batch; an empty batch stays so when repeated."""
    world = World()
    world.append(2, 2)
    reader = stream_of(world, WatchedClock(), startingOffsets="latest")
    began = reader.initialOffset()
    end = reader.latestOffset(began, ReadAllAvailable())
    assert json.dumps(reader.latestOffset(end, ReadAllAvailable())) == json.dumps(end)
    world.append(1, 1)
    again = stream_of(world, WatchedClock(), startingOffsets="latest").initialOffset()
    assert rows_between(world, again, end) == []
    assert rows_between(world, end, end) == []


def test_what_appears_before_the_first_batch_is_read_from_its_start() -> None:
    """Topics and partitions that came after the start was found are new, repeated or not."""
    world = World()
    world.append(2, 2)
    reader = stream_of(world, WatchedClock(), startingOffsets="latest")
    began = reader.initialOffset()
    found = reader._resolved()
    world.root.delete_topic("t")
    world.root.create_topic("t")
    world.values = {0: [], 1: []}
    world.append(3, 1)
    options = {"startingOffsets": "latest", "failOnDataLoss": "false"}
    reader = stream_of(world, WatchedClock(), **options)
    reader._start = found
    end = reader.latestOffset(began, ReadAllAvailable())
    again = stream_of(world, WatchedClock(), **options).initialOffset()
    assert rows_between(world, again, end, **options) == [(0, 0), (0, 1), (0, 2), (1, 0)]
