"""The Spark source without Spark: options, positions, plans, tasks, and what a task reads."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import BinaryType, StringType, StructType

from sparklog import errors, limits
from sparklog.clock import ManualClock, SystemClock
from sparklog.sources import datasource, offsets, tasks
from sparklog.sources.offsets import Position, TopicOffsets
from sparklog.sources.options import COLUMNS, EARLIEST, LATEST, parse
from sparklog.sources.planner import Planner
from sparklog.sources.reader import Scan
from sparklog.storage.objects import open_store
from sparklog.storage.snapshot import Slice, Source, TableFile
from tests.support.roots import HandmadeRoot, payload

_names = itertools.count()

SCHEMA = pa.schema(
    [
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
    ]
)

Row = tuple[bytes, str, int, int]


@dataclass
class World:
    """A root in memory with one topic of two partitions, and every value that went in."""

    uri: str = field(default_factory=lambda: f"memory://source-{next(_names)}")
    values: dict[int, list[bytes]] = field(default_factory=lambda: {0: [], 1: []})

    def __post_init__(self) -> None:
        self.root = HandmadeRoot(open_store(self.uri), clock=SystemClock())
        self.root.create_topic("t")

    def append(self, *sizes: int) -> None:
        """One object of the log, with so many records for each partition."""
        batches = []
        for partition, size in enumerate(sizes):
            known = self.values[partition]
            values = [b"%d/%d" % (partition, len(known) + number) for number in range(size)]
            known += values
            if values:
                batches.append(("t", partition, payload(values)))
        if batches:
            self.root.append(*batches)

    def planner(self, *topics: str, fail: bool = True) -> Planner:
        store = open_store(self.uri)
        planner = Planner(store, topics or ["t"], fail_on_data_loss=fail, clock=ManualClock())
        planner.refresh()
        return planner

    def read(self, slices: Sequence[Slice], *, fail: bool = True) -> list[Row]:
        """The rows of one task, after a journey to an executor."""
        scan = Scan(root=self.uri, storage={}, schema=SCHEMA, fail_on_data_loss=fail)
        found: list[Row] = []
        for batch in scan.batches(tasks.decode(tasks.encode(slices))):
            assert batch.schema.equals(SCHEMA)
            found += zip(*(column.to_pylist() for column in batch.columns), strict=True)
        return found

    def rows(self, partition: int, first: int, end: int) -> list[Row]:
        """What should be read."""
        values = self.values[partition]
        return [(values[offset], "t", partition, offset) for offset in range(first, end)]


def position(topic_id: str, *at: int) -> Position:
    """Those offsets of topic `t`, from partition 0 on."""
    return {"t": TopicOffsets(topic_id, at)}


# ------------------------------------------------------------------------------ plans

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 7), st.integers(0, 7)),
        st.tuples(st.just("publish")),
        st.tuples(st.just("trim")),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(
    steps=STEPS, later=STEPS, cuts=st.lists(st.integers(0, 60), max_size=4), cores=st.integers(1, 3)
)
def test_any_split_of_a_range_gives_the_same_rows(
    steps: list[tuple[Any, ...]], later: list[tuple[Any, ...]], cuts: list[int], cores: int
) -> None:
    """From table, log or both, cut anywhere, each offset comes once and in order, even if table
    and log move on between plan and read."""
    world = World()

    def take(step: tuple[Any, ...]) -> None:
        if step[0] == "append":
            world.append(*step[1:])
        elif step[0] == "publish":
            world.root.publish("t")
        else:
            world.root.trim()

    for step in steps:
        take(step)
    planner = world.planner()
    ends = planner.latest()["t"].offsets
    planned = []
    for partition, end in enumerate(ends):
        assert end == len(world.values[partition])
        bounds = [0, *sorted(cut for cut in cuts if cut < end), end]
        for first, last in itertools.pairwise(bounds):
            start = position(world.root.topic_id("t"), *_pair(partition, first, ends))
            upto = position(world.root.topic_id("t"), *_pair(partition, last, ends))
            planned.append((partition, first, last, planner.slices(start, upto)))
    for step in later:
        take(step)
    for partition, first, last, slices in planned:
        read = [row for task in tasks.pack(slices, cores=cores) for row in world.read(task)]
        assert read == world.rows(partition, first, last)


def _pair(partition: int, offset: int, otherwise: Sequence[int]) -> list[int]:
    """The offset in its partition; the other partition where it always is."""
    return [offset if number == partition else at for number, at in enumerate(otherwise)]


def test_many_small_entries_are_read_as_one_batch() -> None:
    """A hundred entries of one record are one task, and one batch of a hundred rows."""
    world = World()
    for _ in range(100):
        world.append(1)
    slices = world.planner().slices({}, world.planner().latest())
    assert len(slices) == 100
    (task,) = tasks.pack(slices, cores=8)
    scan = Scan(root=world.uri, storage={}, schema=SCHEMA, fail_on_data_loss=True)
    assert [batch.num_rows for batch in scan.batches(task)] == [100]


def test_a_large_entry_comes_in_batches_that_spark_can_hold() -> None:
    """What was sent as one batch of many rows is read in batches of `SCAN_BATCH_ROWS` at most."""
    world = World()
    world.append(limits.SCAN_BATCH_ROWS + 7)
    scan = Scan(root=world.uri, storage={}, schema=SCHEMA, fail_on_data_loss=True)
    slices = world.planner().slices({}, world.planner().latest())
    assert [batch.num_rows for batch in scan.batches(slices)] == [limits.SCAN_BATCH_ROWS, 7]


# ------------------------------------------------------------------------------ losses


@pytest.fixture(name="trimmed")
def _trimmed() -> World:
    """Ten records in each partition, the first five of partition 0 gone by retention."""
    world = World()
    for _ in range(2):
        world.append(5, 5)
        world.root.publish("t")
    world.root.move_start("t", 0, 5)
    return world


def test_what_fell_below_the_log_start_is_a_loss(trimmed: World) -> None:
    """The error names partition and offsets, from a stream's position and from a plan alike."""
    start = position(trimmed.root.topic_id("t"), 3, 3)
    with pytest.raises(errors.DataLoss, match="t-0: offsets 3 to 5 are gone") as raised:
        trimmed.planner().reconcile(start)
    assert raised.value.partition == 0
    with pytest.raises(errors.DataLoss, match="failOnDataLoss"):
        trimmed.planner().slices(start, trimmed.planner().latest())


def test_an_allowed_loss_is_logged_once(trimmed: World, caplog: pytest.LogCaptureFixture) -> None:
    """With failOnDataLoss=false the query goes on from what is left, and the log says so."""
    planner = trimmed.planner(fail=False)
    start = position(trimmed.root.topic_id("t"), 3, 3)
    with caplog.at_level(logging.WARNING, "sparklog.sources"):
        assert planner.reconcile(start)["t"].offsets == (5, 3)
        slices = planner.slices(start, planner.latest())
    assert trimmed.read(slices) == trimmed.rows(0, 5, 10) + trimmed.rows(1, 3, 10)
    assert len(caplog.records) == 1


def test_what_is_lost_between_plan_and_read_is_a_loss_too() -> None:
    """A task whose file is gone for good raises, or goes on with what is left."""
    world = World()
    for _ in range(2):
        world.append(5)
        world.root.publish("t")
    slices = world.planner().slices({}, world.planner().latest())
    world.root.move_start("t", 0, 5)
    with pytest.raises(errors.DataLoss, match="t-0: offsets 0 to 5"):
        world.read(slices)
    assert world.read(slices, fail=False) == world.rows(0, 5, 10)


def test_an_end_that_went_back_is_a_loss() -> None:
    """A position beyond the end, as after restoring a root, is not passed over in silence."""
    world = World()
    world.append(4)
    beyond = position(world.root.topic_id("t"), 9, 0)
    with pytest.raises(errors.DataLoss, match="t-0: offsets 4 to 9 are gone: the log ends before"):
        world.planner().reconcile(beyond)
    assert world.planner(fail=False).reconcile(beyond)["t"].offsets == (4, 0)


def test_a_created_again_topic_is_another_topic() -> None:
    """Offsets of the old id are never read as those of the new one."""
    world = World()
    world.append(4)
    before = world.planner().latest()
    world.root.delete_topic("t")
    new_id = world.root.create_topic("t")
    world.values = {0: [], 1: []}
    world.append(6)
    with pytest.raises(errors.TopicChanged, match="'t' was deleted and created again"):
        world.planner().reconcile(before)
    planner = world.planner(fail=False)
    assert planner.reconcile(before) == position(new_id, 0, 0)
    assert world.read(planner.slices(before, planner.latest())) == world.rows(0, 0, 6)
    # A batch that was planned before, and is run again, has nothing left.
    assert planner.slices({}, before) == []
    with pytest.raises(errors.TopicChanged):
        world.planner().slices({}, before)


def test_a_deleted_topic_is_a_loss() -> None:
    """It ends the query by name; where losses are allowed the other topics go on."""
    world = World()
    world.root.create_topic("u")
    failing, going_on = world.planner("t", "u"), world.planner("t", "u", fail=False)
    world.append(3)
    world.root.delete_topic("u")
    with pytest.raises(errors.UnknownTopic, match="'u'"):
        failing.refresh()
    going_on.refresh()
    assert going_on.latest() == position(world.root.topic_id("t"), 3, 0)


def test_a_partition_that_came_later_begins_at_its_start() -> None:
    """Partitions are picked up while a query runs."""
    world = World()
    world.append(3, 1)
    before = world.planner().latest()
    world.root.add_partitions("t", 3)
    world.root.append(("t", 2, payload([b"new"])))
    planner = world.planner()
    assert planner.reconcile(before)["t"].offsets == (3, 1, 0)
    assert world.read(planner.slices(before, planner.latest())) == [(b"new", "t", 2, 0)]


# ------------------------------------------------------------------------------ bounds


def test_bounds_are_resolved_against_what_there_is(trimmed: World) -> None:
    """earliest, latest, -2, -1 and offsets become positions."""
    planner = trimmed.planner()
    topic_id = trimmed.root.topic_id("t")
    assert planner.resolve("startingOffsets", None, otherwise=EARLIEST) == position(topic_id, 5, 0)
    assert planner.resolve("o", None, otherwise=LATEST) == position(topic_id, 10, 10)
    asked = {"t": {0: -2, 1: 7}}
    assert planner.resolve("o", asked, otherwise=LATEST) == position(topic_id, 5, 7)
    assert planner.resolve("o", {"t": {0: -1, 1: 0}}, otherwise=LATEST) == position(topic_id, 10, 0)


@pytest.mark.parametrize("asked", [{0: 1}, {0: 5, 1: 1, 2: 1}])
def test_bounds_name_every_partition(trimmed: World, asked: dict[int, int]) -> None:
    """A partition that is left out, or that there is not, is refused."""
    with pytest.raises(errors.BadOption, match="t has partitions 0 to 1"):
        trimmed.planner().resolve("startingOffsets", {"t": asked}, otherwise=LATEST)


@pytest.mark.parametrize("offset", [4, 11])
def test_bounds_outside_the_log_are_a_loss(trimmed: World, offset: int) -> None:
    """An offset that is not there is told, with what is; or moved to it."""
    asked = {"t": {0: offset, 1: 0}}
    with pytest.raises(errors.OffsetOutOfRange, match="outside the range 5 to 10"):
        trimmed.planner().resolve("startingOffsets", asked, otherwise=LATEST)
    moved = trimmed.planner(fail=False).resolve("startingOffsets", asked, otherwise=LATEST)
    assert moved["t"].offsets[0] == (5 if offset == 4 else 10)


# ------------------------------------------------------------------------------ positions

TOPICS = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=5),
    min_size=1,
)


@given(TOPICS, st.integers(1, 300))
def test_a_limit_is_shared_by_what_waits(
    spans: dict[str, list[tuple[int, int]]], most: int
) -> None:
    """As many as are allowed, exactly, and each partition its part of them to within one."""
    start = {t: TopicOffsets("id", tuple(at for at, _ in each)) for t, each in spans.items()}
    end = {t: TopicOffsets("id", tuple(at + n for at, n in each)) for t, each in spans.items()}
    shared = offsets.share(start, end, most)
    waiting = {(t, p): n for t, each in spans.items() for p, (_, n) in enumerate(each)}
    given = {(t, p): shared[t].offsets[p] - start[t].offsets[p] for t, p in waiting}
    total = sum(waiting.values())
    assert sum(given.values()) == min(total, most)
    for place, count in waiting.items():
        assert 0 <= given[place] <= count
        if total > most:
            assert abs(given[place] - count * most / total) < 1


@given(TOPICS)
def test_a_position_survives_the_checkpoint(spans: dict[str, list[tuple[int, int]]]) -> None:
    """Encoded and decoded it is the same, and equal positions are equal texts."""
    known = {t: TopicOffsets("id", tuple(at for at, _ in each)) for t, each in spans.items()}
    stored = offsets.encode(known)
    assert offsets.decode(stored) == known
    backwards = dict(reversed(known.items()))
    assert str(offsets.encode(backwards)) == str(stored)


@pytest.mark.parametrize(
    "stored",
    [
        {"t": {"0": 23}},
        {"t": {"id": "x", "offsets": {"0": 1, "2": 1}}},
        {"t": {"id": "x", "offsets": [1, 2]}},
        {"offset": 4},
    ],
)
def test_another_source_s_checkpoint_is_refused(stored: dict[str, Any]) -> None:
    """A position that is not ours is never guessed at."""
    with pytest.raises(errors.BadRequest, match="checkpoint is not of this source"):
        offsets.decode(stored)


# ------------------------------------------------------------------------------ tasks


def file_slice(first: int, end: int, bytes_per_row: int = 100) -> Slice:
    """A whole file of rows with those offsets."""
    file = TableFile(
        path=f"partition=0/{first}.parquet",
        partition=0,
        size_bytes=(end - first) * bytes_per_row,
        rows=end - first,
        first=first,
        last=end - 1,
    )
    return Slice(
        topic="t",
        topic_id="id",
        partition=0,
        first=first,
        end=end,
        source=Source.FILES,
        files=(file,),
    )


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 3_000_000), min_size=1, max_size=20),
    st.integers(1, 8),
    st.none() | st.integers(1, 40),
)
def test_tasks_hold_every_offset_once(rows: list[int], cores: int, least: int | None) -> None:
    """However slices are cut and dealt out, their offsets follow one another as before."""
    bounds = [0, *itertools.accumulate(rows)]
    slices = [file_slice(first, end) for first, end in itertools.pairwise(bounds)]
    dealt = [each for task in tasks.pack(slices, cores=cores, least=least) for each in task]
    assert [each.first for each in dealt] == [0, *(each.end for each in dealt[:-1])]
    assert dealt[-1].end == bounds[-1]
    assert all(each.first < each.end for each in dealt)


def test_a_large_scan_keeps_every_core_busy() -> None:
    """A big file is cut at its row groups to tasks of like size, two for each core at least."""
    dealt = tasks.pack([file_slice(0, 10_000_000)], cores=4)
    assert len(dealt) >= 8
    sizes = [sum(each.end - each.first for each in task) for task in dealt]
    assert max(sizes) < 1.5 * min(sizes)
    assert all(each.first % limits.ROW_GROUP_ROWS == 0 for task in dealt for each in task)


def test_a_small_scan_is_one_task() -> None:
    """What is read in a moment is not worth a second worker."""
    slices = [file_slice(at, at + 100) for at in range(0, 1_000, 100)]
    assert len(tasks.pack(slices, cores=8)) == 1
    assert tasks.pack([], cores=8) == []


def test_the_user_may_ask_for_more_tasks() -> None:
    """minPartitions goes beyond what the driver's cores say, as far as slices can be cut."""
    slices = [file_slice(at, at + 100) for at in range(0, 1_000, 100)]
    assert len(tasks.pack(slices, cores=1, least=5)) == 5


# ------------------------------------------------------------------------------ options

GIVEN = {"root": "memory://x", "subscribe": "b, a"}


def test_options_have_the_defaults_of_kafka_s_source() -> None:
    """Two topics in order, losses end the query, and all columns but headers."""
    options = parse(GIVEN)
    assert options.topics == ("a", "b")
    assert options.fail_on_data_loss
    assert options.starting is options.ending is options.max_offsets_per_trigger is None
    assert options.columns == COLUMNS[:-1]
    assert parse({**GIVEN, "includeheaders": "TRUE"}).columns == COLUMNS


def test_options_come_in_any_case() -> None:
    """Spark lowers the names on some ways, so case says nothing."""
    given = {
        "ROOT": "memory://x",
        "Subscribe": "a",
        "startingoffsets": "Earliest",
        "endingOffsets": '{"a": {"0": 23, "1": -1}}',
        "maxoffsetspertrigger": "10",
        "failondataloss": "False",
        "storage.AWS_region": "eu-west-1",
    }
    options = parse(given)
    assert (options.starting, options.ending) == (EARLIEST, {"a": {0: 23, 1: LATEST}})
    assert options.max_offsets_per_trigger == 10
    assert not options.fail_on_data_loss
    assert options.storage == {"aws_region": "eu-west-1"}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"startingofsets": "latest"}, errors.UnknownOption, "did you mean 'startingOffsets'"),
        ({"kafka.bootstrap.servers": "x:1"}, errors.UnknownOption, "it has .*subscribe"),
        ({"subscribe": " , "}, errors.BadOption, "subscribe"),
        ({"subscribe": "a/b"}, errors.BadTopicName, "a/b"),
        ({"path": "/elsewhere"}, errors.BadOption, "root = 'memory://x' says other"),
        ({"startingOffsets": "last"}, errors.BadOption, "expected earliest, latest, or JSON"),
        ({"startingOffsets": '{"a": {"0": 1}}'}, errors.BadOption, "topics of subscribe: b, a"),
        ({"startingOffsets": '{"a": {"0": -3}, "b": {}}'}, errors.BadOption, "-2 .earliest"),
        ({"maxOffsetsPerTrigger": "0"}, errors.BadOption, "from 1 up"),
        ({"maxOffsetsPerTrigger": "1e3"}, errors.BadOption, "from 1 up"),
        ({"failOnDataLoss": "no"}, errors.BadOption, "true or false"),
        ({"columns": "value,ofset"}, errors.BadOption, "columns = 'ofset'"),
        ({"columns": "value", "includeHeaders": "true"}, errors.BadOption, "includeHeaders"),
    ],
)
def test_a_wrong_option_is_refused_by_name(
    changes: dict[str, str], error: type[errors.Invalid], message: str
) -> None:
    """The refusal names the option, and what would be right."""
    with pytest.raises(error, match=message):
        parse(GIVEN | changes)


def test_the_root_may_come_from_path_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`load(path)` and SPARKLOG_ROOT name it as well; without any it is asked for."""
    assert parse({"path": "memory://p", "subscribe": "a"}).root == "memory://p"
    monkeypatch.setenv("SPARKLOG_ROOT", "memory://e")
    assert parse({"subscribe": "a"}).root == "memory://e"
    monkeypatch.delenv("SPARKLOG_ROOT")
    with pytest.raises(errors.BadOption, match="SPARKLOG_ROOT"):
        parse({"subscribe": "a"})


@pytest.mark.parametrize(
    ("changes", "check", "message"),
    [
        ({"maxOffsetsPerTrigger": "5"}, "check_batch", "a batch has no triggers"),
        ({"startingOffsets": "latest"}, "check_batch", "no records"),
        ({"endingOffsets": "earliest"}, "check_batch", "no records"),
        ({"endingOffsets": "latest"}, "check_stream", "availableNow"),
    ],
)
def test_batch_and_stream_refuse_each_other_s_options(
    changes: dict[str, str], check: str, message: str
) -> None:
    """An option that would be ignored is refused."""
    with pytest.raises(errors.BadOption, match=message):
        getattr(parse(GIVEN | changes), check)()


# ------------------------------------------------------------------------------ what Spark asks


@dataclass
class WatchedClock(ManualClock):
    """Counts what is waited, and does something meanwhile."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.meanwhile = meanwhile
        self.slept_seconds: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept_seconds.append(seconds)
        self.advance(seconds)
        self.meanwhile()


def stream_of(world: World, clock: ManualClock, **changes: str) -> datasource.StreamReader:
    """A stream from the beginning of the world's topic."""
    options = parse({"root": world.uri, "subscribe": "t", "startingOffsets": "earliest"} | changes)
    scan = Scan(root=world.uri, storage={}, schema=SCHEMA, fail_on_data_loss=True)
    return datasource.StreamReader(options, scan, clock)


def test_an_idle_stream_waits_longer_and_longer() -> None:
    """Each answer waits a part of the time since the last record, up to a bound."""
    world, clock = World(), WatchedClock()
    stream = stream_of(world, clock)
    start = stream.initialOffset()
    for _ in range(50):
        assert stream.latestOffset(start, ReadAllAvailable()) == start
        clock.advance(0.1)
    assert clock.slept_seconds == sorted(clock.slept_seconds)
    assert clock.slept_seconds[0] == limits.STREAM_WAIT_MIN_SECONDS
    assert clock.slept_seconds[-1] == limits.STREAM_WAIT_MAX_REMOTE_SECONDS


def test_what_comes_while_a_stream_waits_is_given_at_once() -> None:
    """The wait ends with another look."""
    world = World()
    clock = WatchedClock(lambda: world.append(3))
    stream = stream_of(world, clock)
    start = stream.initialOffset()
    end = stream.latestOffset(start, ReadAllAvailable())
    assert end["t"]["offsets"] == {"0": 3, "1": 0}
    assert stream.reportLatestOffset() == end


def test_a_stream_takes_no_more_than_its_limit() -> None:
    """The default limit is the option's, and each trigger goes so far on."""
    world, clock = World(), WatchedClock()
    world.append(6, 2)
    stream = stream_of(world, clock, maxOffsetsPerTrigger="4")
    assert stream.getDefaultReadLimit() == ReadMaxRows(4)
    at = stream.latestOffset(stream.initialOffset(), ReadMaxRows(4))
    assert at["t"]["offsets"] == {"0": 3, "1": 1}
    assert stream.latestOffset(at, ReadAllAvailable())["t"]["offsets"] == {"0": 6, "1": 2}


def test_available_now_ends_where_it_was_called() -> None:
    """What comes later is left for the next run, and the end is told without a wait."""
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


def test_a_store_that_does_not_answer_ends_no_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """`latestOffset` says that nothing is new, and goes on when the store is back."""
    world, clock = World(), WatchedClock()
    stream = stream_of(world, clock)
    start = stream.initialOffset()
    world.append(1)
    refresh = Planner.refresh

    def fail(self: Planner, *, anew: bool = False) -> None:
        raise errors.StorageUnavailable(operation="get", path="x", reason="it rains")

    monkeypatch.setattr(Planner, "refresh", fail)
    assert stream.latestOffset(start, ReadAllAvailable()) == start
    monkeypatch.setattr(Planner, "refresh", refresh)
    assert stream.latestOffset(start, ReadAllAvailable()) != start


def test_a_plan_waits_for_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """`partitions` is asked once, so it tries again until the store answers."""
    world, clock = World(), WatchedClock()
    world.append(1)
    stream = stream_of(world, clock)
    start = stream.initialOffset()
    end = stream.latestOffset(start, ReadAllAvailable())
    refresh, failures = Planner.refresh, iter([True, True, False])

    def fail_twice(self: Planner, *, anew: bool = False) -> None:
        if next(failures):
            raise errors.StorageUnavailable(operation="get", path="x", reason="it rains")
        refresh(self, anew=anew)

    monkeypatch.setattr(Planner, "refresh", fail_twice)
    (partition,) = stream.partitions(start, end)
    assert sum(batch.num_rows for batch in stream.read(partition)) == 1
    assert len(clock.slept_seconds) == 2


def test_a_stream_with_wrong_options_says_so_itself() -> None:
    """Nothing is raised while Spark would hide it; the first question gets the refusal."""
    reader = datasource.stream_reader(GIVEN | {"endingOffsets": "latest"}, StructType())
    with pytest.raises(errors.BadOption, match="availableNow"):
        reader.getDefaultReadLimit()


def test_a_schema_of_the_user_s_must_be_one_of_rows() -> None:
    """Columns may be left out and put in another order; other names and types are refused."""
    world = World()
    options = {"root": world.uri, "subscribe": "t"}
    datasource.batch_reader(options, StructType().add("offset", "long").add("key", BinaryType()))
    with pytest.raises(errors.BadOption, match="schema = 'key string'"):
        datasource.batch_reader(options, StructType().add("key", StringType()))
    with pytest.raises(errors.BadOption, match="schema = 'id int'"):
        datasource.batch_reader(options, StructType().add("id", "integer"))


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
    reader = datasource.batch_reader(options, datasource.schema(options))
    with pytest.raises(errors.BadOption, match="t-0 would end before it starts, at 3"):
        reader.partitions()
