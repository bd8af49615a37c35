"""The Spark source without Spark: positions, plans, tasks, and what a task reads."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog import errors, limits
from sparklog.clock import ManualClock
from sparklog.sources import offsets, reader, tasks
from sparklog.sources.offsets import Position, TopicOffsets
from sparklog.sources.planner import Planner
from sparklog.sources.selection import Selection
from sparklog.sources.starting_offsets import EARLIEST, LATEST, AtTime, FromEnd, Pinned
from sparklog.sources.tasks import TASK_MIN_BYTES
from sparklog.sources.views import RootView
from sparklog.storage.objects import open_store
from sparklog.storage.snapshot import (
    Entry,
    EntryKind,
    Located,
    ReadSource,
    RowGroup,
    Slice,
    StagedRef,
    TableFile,
    WalPosition,
)
from tests.support.roots import payload
from tests.support.worlds import World, position

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
    ends = list(planner.latest()["t"].offsets.values())
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
        packed = tasks.pack(slices, parallelism=cores, row_groups=planner.row_groups)
        read = [row for task in packed for row in world.read(task)]
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
    (task,) = tasks.pack(slices, parallelism=8, row_groups=dense)
    scan = world.scan()
    assert [batch.num_rows for batch in scan.batches(tasks.Task((*task,)))] == [100]


def test_large_entries_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows may be large: one read is bounded by bytes too."""
    world = World()
    for _ in range(10):
        world.append(1)
    slices = world.planner().slices({}, world.planner().latest())
    entry = slices[0].entry
    assert entry is not None
    monkeypatch.setattr(limits, "READ_RUN_BYTES", 3 * entry.entry.memory_bytes)
    (task,) = tasks.pack(slices, parallelism=8, row_groups=dense)
    assert [batch.num_rows for batch in world.scan().batches(tasks.Task((*task,)))] == [3, 3, 3, 1]


def test_a_large_entry_comes_in_batches_that_spark_can_hold() -> None:
    """A batch of many rows is read in batches of at most `SCAN_BATCH_ROWS`."""
    world = World()
    world.append(limits.SCAN_BATCH_ROWS + 7)
    scan = world.scan()
    slices = world.planner().slices({}, world.planner().latest())
    assert [batch.num_rows for batch in scan.batches(tasks.Task((*slices,)))] == [
        limits.SCAN_BATCH_ROWS,
        7,
    ]


# ------------------------------------------------------------------------------ losses


@pytest.mark.parametrize("fail", [True, False])
def test_ranges_are_checked_as_of_one_refresh(fail: bool) -> None:
    """A range that the first view holds is checked again where a later one needs a refresh."""
    world = World()
    world.append(5, 5)
    planner = world.planner(fail=fail)
    world.append(0, 1)
    world.root.publish("t")
    world.root.move_start("t", 0, 3)
    topic_id = world.root.topic_id("t")
    ranges = [("t", topic_id, 0, 0, 5), ("t", topic_id, 1, 0, 6)]
    if fail:
        with pytest.raises(errors.DataLoss, match="Offsets 0 to 3 of t-0"):
            planner.left(ranges)
    else:
        found = [(each.partition, each.first, each.end) for each in planner.left(ranges)]
        assert found == [(0, 3, 5), (1, 0, 6)]


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
    with pytest.raises(errors.DataLoss, match="Offsets 3 to 5 of t-0 no longer exist") as raised:
        trimmed.planner().reconcile(start)
    assert raised.value.partition == 0
    with pytest.raises(errors.DataLoss, match="failOnDataLoss"):
        trimmed.planner().slices(start, trimmed.planner().latest())


def test_an_allowed_loss_is_logged_once(trimmed: World, caplog: pytest.LogCaptureFixture) -> None:
    """With failOnDataLoss=false the query continues with the remaining records, and logs a
    warning.
    """
    planner = trimmed.planner(fail=False)
    start = position(trimmed.root.topic_id("t"), 3, 3)
    with caplog.at_level(logging.WARNING, "sparklog.sources"):
        assert planner.reconcile(start)["t"].offsets == {0: 5, 1: 3}
        slices = planner.slices(start, planner.latest())
    assert trimmed.read(slices) == trimmed.rows(0, 5, 10) + trimmed.rows(1, 3, 10)
    assert len(caplog.records) == 1


def test_what_is_lost_between_plan_and_read_is_a_loss_too() -> None:
    """A task whose file is lost raises, or continues with the remaining records."""
    world = World()
    for _ in range(2):
        world.append(5)
        world.root.publish("t")
    slices = world.planner().slices({}, world.planner().latest())
    world.root.move_start("t", 0, 5)
    with pytest.raises(errors.DataLoss, match="Offsets 0 to 5 of t-0"):
        world.read(slices)
    assert world.read(slices, fail=False) == world.rows(0, 5, 10)


def test_a_file_that_stays_away_is_named() -> None:
    """A task that finds a file gone plans again, but not forever if the table still names it."""
    world = World()
    world.append(5, 5)
    world.root.publish("t")
    slices = world.planner().slices({}, world.planner().latest())
    store = open_store(world.uri)
    (lost,) = [stat.name for stat in store.walk("topics/t") if stat.name.startswith("partition=1")]
    store.delete([f"topics/t/{lost}"])
    with pytest.raises(errors.MissingObject, match=f"{lost}.* named by each of 5 plans"):
        world.read(slices)


def test_a_planner_that_saw_less_looks_again_before_it_believes_a_loss() -> None:
    """A position beyond the last snapshot may be of newer records, or of a new topic."""
    world = World()
    beginning = position(world.root.topic_id("t"), 0, 0)
    behind = [world.planner(pattern="t|u") for _ in range(3)]
    world.append(4, 2)
    world.root.create_topic("u", 1)
    at = world.planner(pattern="t|u").latest()
    assert behind[0].reconcile(at) == at
    assert world.read(behind[1].slices(beginning, at)) == world.rows(0, 0, 4) + world.rows(1, 0, 2)
    assert behind[2].range("t", world.root.topic_id("t"), 0, 4, 4) == []


def test_an_end_that_went_back_is_a_loss() -> None:
    """A position beyond the end, as after restoring a root, is not passed over in silence."""
    world = World()
    world.append(4)
    beyond = position(world.root.topic_id("t"), 9, 0)
    with pytest.raises(errors.DataLoss, match="4 to 9 of t-0 no longer exist: the log ends before"):
        world.planner().reconcile(beyond)
    assert world.planner(fail=False).reconcile(beyond)["t"].offsets == {0: 4, 1: 0}


def test_a_created_again_topic_is_another_topic() -> None:
    """Offsets of the old id are never read as those of the new one."""
    world = World()
    world.append(4)
    before = world.planner().latest()
    world.root.delete_topic("t")
    new_id = world.root.create_topic("t")
    world.values = {0: [], 1: []}
    world.append(6)
    with pytest.raises(errors.TopicGone, match="'t' was deleted and created again"):
        world.planner().reconcile(before)
    planner = world.planner(fail=False)
    assert planner.reconcile(before) == position(new_id, 0, 0)
    assert world.read(planner.slices(before, planner.latest())) == world.rows(0, 0, 6)
    # A batch that was planned before, and is run again, has nothing left.
    assert planner.slices({}, before) == []
    with pytest.raises(errors.TopicGone):
        world.planner().slices({}, before)


def test_a_deleted_topic_is_a_loss(caplog: pytest.LogCaptureFixture) -> None:
    """It ends the query by name; if losses are allowed, the other topics continue, with one
    warning.
    """
    world = World()
    world.root.create_topic("u")
    failing, going_on = world.planner("t", "u"), world.planner("t", "u", fail=False)
    before = failing.latest()
    world.append(3)
    world.root.delete_topic("u")
    failing.refresh()
    with pytest.raises(
        errors.TopicGone, match=r"'u' was deleted. The query had read it up to .* .0: 0"
    ):
        failing.reconcile(before)
    going_on.refresh()
    with caplog.at_level(logging.WARNING, "sparklog.sources"):
        assert going_on.reconcile(before) == position(world.root.topic_id("t"), 0, 0)
    assert [each.message.count("'u' was deleted") for each in caplog.records] == [1]
    assert going_on.latest() == position(world.root.topic_id("t"), 3, 0)
    with pytest.raises(errors.UnknownTopic, match="'u'"):  # a query that was never there
        failing.resolve("startingOffsets", None, otherwise=LATEST, late_is_latest=False)
    with pytest.raises(errors.UnknownTopic, match="'u'"):  # one that never read it
        failing.reconcile(position(world.root.topic_id("t"), 0, 0))


def test_a_topic_that_matched_a_pattern_is_missed_too() -> None:
    """Topics that match are picked up as they appear, and one that goes is a loss."""
    world = World()
    planner = world.planner(pattern="t|u.*")
    world.root.create_topic("u1", 1)
    world.root.create_topic("v", 1)
    world.root.append(("u1", 0, payload([b"new"])))
    planner.refresh()
    at = planner.reconcile(position(world.root.topic_id("t"), 0, 0))
    assert {name: each.offsets for name, each in at.items()} == {"t": {0: 0, 1: 0}, "u1": {0: 0}}
    assert planner.latest()["u1"].offsets == {0: 1}
    world.root.delete_topic("u1")
    planner.refresh()
    with pytest.raises(errors.TopicGone, match="'u1' was deleted"):
        planner.reconcile(at)


def test_what_is_new_and_has_lost_its_beginning_is_a_loss() -> None:
    """A new topic begins at 0 for a query; records that retention removed are reported as lost."""
    world = World()
    planner = world.planner(pattern="t|u")
    world.root.create_topic("u", 1)
    for _ in range(2):
        world.root.append(("u", 0, payload([b"v"] * 5)))
        world.root.publish("u")
    world.root.move_start("u", 0, 5)
    at = position(world.root.topic_id("t"), 0, 0)
    planner.refresh()
    with pytest.raises(errors.DataLoss, match="Offsets 0 to 5 of u-0 no longer exist"):
        planner.reconcile(at)
    going_on = world.planner(pattern="t|u", fail=False)
    assert going_on.reconcile(at)["u"].offsets == {0: 5}


def test_a_topic_that_is_not_selected_any_more_is_told() -> None:
    """Its planned records are still read; then it is a loss, as in Spark's Kafka source."""
    world = World()
    world.root.create_topic("u", 1)
    world.root.append(("u", 0, payload([b"v"])))
    before, at = world.planner("t", "u").earliest(), world.planner("t", "u").latest()
    planner = world.planner("t")
    assert world.read(planner.slices(before, at)) == [(b"v", "u", 0, 0)]
    assert planner.latest().keys() == {"t"}
    with pytest.raises(errors.TopicGone, match="'u' is no longer selected"):
        planner.reconcile(at)
    assert world.planner("t", fail=False).reconcile(at).keys() == {"t"}


def test_a_partition_that_is_not_assigned_any_more_is_told() -> None:
    """As a topic is, with its number."""
    world = World()
    at = world.planner().latest()
    view = RootView(open_store(world.uri), clock=ManualClock())
    selection = Selection(topics=("t",), assigned={"t": (1,)})
    planner = Planner(view, selection, fail_on_data_loss=True)
    planner.refresh()
    with pytest.raises(errors.TopicGone, match=r"'t' is no longer read in partitions \[0\]"):
        planner.reconcile(at)


def test_a_misspelt_topic_is_corrected() -> None:
    """Before anything is read, an unknown topic is an error with the most similar one there is."""
    world = World()
    world.root.create_topic("orders")
    world.commit("g", {0: 0})  # the brokers' own topic is never proposed
    for topic, ends in (("ordres", r"Did you mean 'orders'\?$"), ("__consumer_offset", r"name\.$")):
        view = RootView(open_store(world.uri), clock=ManualClock())
        planner = Planner(view, Selection(topics=(topic,)), fail_on_data_loss=True)
        with pytest.raises(errors.UnknownTopic, match=ends):
            planner.check_names()
        with pytest.raises(errors.UnknownTopic, match=ends):
            planner.check_topics()


def test_a_topic_that_goes_between_plan_and_read_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that gets this error from a broker raises it, or continues without the topic."""
    world = World()
    world.append(3)
    slices = world.planner().slices({}, world.planner().latest())

    def gone(*_: object) -> Any:
        raise errors.UnknownTopic(topic="t")

    monkeypatch.setattr(reader, "_batches", gone)
    world.root.delete_topic("t")
    with pytest.raises(errors.TopicGone, match="'t' was deleted"):
        world.read(slices)
    assert world.read(slices, fail=False) == []


def test_a_partition_that_came_later_begins_at_its_start() -> None:
    """Partitions are picked up while a query runs."""
    world = World()
    world.append(3, 1)
    before = world.planner().latest()
    world.root.add_partitions("t", 3)
    world.root.append(("t", 2, payload([b"new"])))
    planner = world.planner()
    assert planner.reconcile(before)["t"].offsets == {0: 3, 1: 1, 2: 0}
    assert world.read(planner.slices(before, planner.latest())) == [(b"new", "t", 2, 0)]


# ------------------------------------------------------------------------------ bounds


def test_bounds_are_resolved_against_what_there_is(trimmed: World) -> None:
    """earliest, latest, -2, -1 and offsets become positions."""
    planner = trimmed.planner()
    topic_id = trimmed.root.topic_id("t")
    assert planner.resolve(
        "startingOffsets", None, otherwise=EARLIEST, late_is_latest=False
    ) == position(topic_id, 5, 0)
    assert planner.resolve("o", None, otherwise=LATEST, late_is_latest=False) == position(
        topic_id, 10, 10
    )
    asked = {"t": {0: -2, 1: 7}}
    assert planner.resolve("o", asked, otherwise=LATEST, late_is_latest=False) == position(
        topic_id, 5, 7
    )
    assert planner.resolve(
        "o", {"t": {0: -1, 1: 0}}, otherwise=LATEST, late_is_latest=False
    ) == position(topic_id, 10, 0)


def test_a_bound_may_count_from_the_end(trimmed: World) -> None:
    """Each partition has its own end; one with fewer offsets is taken from its log start."""
    planner = trimmed.planner()
    for count, expected in ((3, (7, 7)), (6, (5, 4)), (10**18, (5, 0))):
        found = planner.resolve("o", FromEnd(count), otherwise=LATEST, late_is_latest=False)
        assert found == position(trimmed.root.topic_id("t"), *expected)


@pytest.mark.parametrize("asked", [{0: 1}, {0: 5, 1: 1, 2: 1}])
def test_bounds_name_every_partition(trimmed: World, asked: dict[int, int]) -> None:
    """A partition that is left out, or that there is not, is refused."""
    with pytest.raises(
        errors.BadOption, match=r"name exactly the partitions that are read: .'t': .0, 1"
    ):
        trimmed.planner().resolve(
            "startingOffsets", {"t": asked}, otherwise=LATEST, late_is_latest=False
        )


def test_pinned_bounds_are_of_one_topic(trimmed: World) -> None:
    """Offsets with the id of a topic that is gone are not those of the one that there is now."""
    for topic_id in (trimmed.root.topic_id("t"), "gone"):
        asked = Pinned({"t": topic_id}, {"t": {0: 6, 1: 2}})
        planner = trimmed.planner(fail=False)
        if topic_id == "gone":
            with pytest.raises(errors.TopicChanged):
                planner.resolve("o", asked, otherwise=LATEST, late_is_latest=False)
        else:
            found = planner.resolve("o", asked, otherwise=LATEST, late_is_latest=False)
            assert found == position(topic_id, 6, 2)


@pytest.mark.parametrize("offset", [4, 11])
def test_bounds_outside_the_log_are_a_loss(trimmed: World, offset: int) -> None:
    """An offset outside of the log is reported with the valid range, or moved into it."""
    asked = {"t": {0: offset, 1: 0}}
    with pytest.raises(errors.OffsetOutOfRange, match="outside the range 5 to 10"):
        trimmed.planner().resolve("startingOffsets", asked, otherwise=LATEST, late_is_latest=False)
    moved = trimmed.planner(fail=False).resolve(
        "startingOffsets", asked, otherwise=LATEST, late_is_latest=False
    )
    assert moved["t"].offsets[0] == (5 if offset == 4 else 10)


@pytest.mark.parametrize("step", ["append", "publish", "both"])
def test_a_time_means_the_first_record_that_is_not_older(step: str) -> None:
    """By offset, as in Kafka, wherever the record lies: timestamps need not rise."""
    world = World()
    times = [datetime.fromtimestamp(second, UTC) for second in (10, 30, 20, 40)]
    for time in times:
        world.root.append(("t", 0, payload([b"v"], timestamp=[time])))
        if step == "publish" or (step == "both" and time == times[1]):
            world.root.publish("t")
    world.root.append(("t", 1, payload([b"v"], timestamp=[times[0]])))
    planner = world.planner()

    def start(second: int, *, late_is_latest: bool = True) -> Mapping[int, int]:
        bound = AtTime(second * 1_000_000)
        found = planner.resolve("o", bound, otherwise=LATEST, late_is_latest=late_is_latest)
        return found["t"].offsets

    assert [start(second)[0] for second in (0, 10, 11, 20, 30, 31, 40, 41)] == [
        0, 0, 1, 1, 1, 3, 3, 4,
    ]  # fmt: skip
    assert start(40) == {0: 3, 1: 1}
    with pytest.raises(errors.BadOption, match=r"startingTimestamp = .* of t-1 is that late"):
        start(40, late_is_latest=False)
    each = {"t": {0: AtTime(0), 1: AtTime(40_000_000)}}
    with pytest.raises(errors.BadOption, match=r"startingOffsetsByTimestamp = .* of t-1 is that"):
        planner.resolve("startingOffsets", each, otherwise=LATEST, late_is_latest=False)


# ------------------------------------------------------------------------------ bytes


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, most=st.integers(1, 3_000))
def test_a_limit_of_bytes_is_kept_and_every_record_is_reached(
    steps: list[tuple[Any, ...]], most: int
) -> None:
    """Only partitions that take a single record may exceed it, so that none starves."""
    world = World()
    for step in steps:
        if step[0] == "append":
            world.append(*step[1:])
        elif step[0] == "publish":
            world.root.publish("t")
    planner = world.planner()
    at, end = planner.earliest(), planner.latest()
    assert planner.within_bytes(at, end, int(sum(_stored_bytes(planner, at, end))) + 1) == end
    while at != end:
        upto = planner.within_bytes(at, end, most)
        sizes = _stored_bytes(planner, at, upto)
        taken_bytes = 0.0
        for number, target in end["t"].offsets.items():
            first, last = at["t"].offsets[number], upto["t"].offsets[number]
            assert min(first + 1, target) <= last <= target
            taken_bytes += sizes[number] if last - first > 1 else 0
        assert taken_bytes <= most
        at = upto


def _stored_bytes(planner: Planner, start: Position, end: Position) -> list[float]:
    """The bytes of each partition."""
    slices = planner.slices(start, end)
    return [
        sum(tasks.stored_bytes(each) for each in slices if each.partition == number)
        for number in range(2)
    ]


def test_records_of_the_log_count_as_stored() -> None:
    """An entry counts by its part that is read, and a staged one by its file."""
    each = entry_slice(10, 20)
    assert tasks.stored_bytes(each) == 1_000
    assert tasks.stored_bytes(msgspec.structs.replace(each, first=15)) == 500
    assert each.entry is not None
    staged = StagedRef(path="f", start=0, length=300, crc32c=0)
    entry = msgspec.structs.replace(each.entry.entry, staged=staged, length=1)
    located = dataclasses.replace(each.entry, entry=entry)
    assert tasks.stored_bytes(msgspec.structs.replace(each, entry=located)) == 300
    assert tasks.stored_bytes(msgspec.structs.replace(file_slice(0, 10), end=5)) == 500


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
    """Each partition gets its part to within one, and one at least, if it has any."""
    start = {
        t: TopicOffsets("id", {p: at for p, (at, _) in enumerate(each)})
        for t, each in spans.items()
    }
    end = {
        t: TopicOffsets("id", {p: at + n for p, (at, n) in enumerate(each)})
        for t, each in spans.items()
    }
    shared = offsets.share(start, end, most)
    waiting = {(t, p): n for t, each in spans.items() for p, (_, n) in enumerate(each)}
    given = {(t, p): shared[t].offsets[p] - start[t].offsets[p] for t, p in waiting}
    total = sum(waiting.values())
    assert sum(given.values()) < min(most, total) + len(waiting)
    for place, count in waiting.items():
        assert min(count, 1) <= given[place] <= count
        if total > most:
            assert abs(given[place] - count * most / total) < 1
        else:
            assert given[place] == count


@given(TOPICS)
def test_a_position_survives_the_checkpoint(spans: dict[str, list[tuple[int, int]]]) -> None:
    """Encoded and decoded it is the same, and equal positions are equal texts."""
    known = {
        t: TopicOffsets("id", {p: at for p, (at, _) in enumerate(each)})
        for t, each in spans.items()
    }
    stored = offsets.encode(known)
    assert offsets.decode(stored) == known
    backwards = dict(reversed(known.items()))
    assert str(offsets.encode(backwards)) == str(stored)


@pytest.mark.parametrize(
    "stored",
    [
        {"t": {"0": 23}},
        {"t": {"id": "x", "offsets": [1, 2]}},
        {"offset": 4},
    ],
)
def test_another_source_s_checkpoint_is_refused(stored: dict[str, Any]) -> None:
    """A position that is not ours is never guessed at."""
    with pytest.raises(errors.BadRequest, match="checkpoint was written by another source"):
        offsets.decode(stored)


def test_the_end_of_a_first_batch_holds_its_start() -> None:
    """A new or recreated topic is read from its log start."""
    start = {"t": TopicOffsets("id", {0: 5, 1: 0}), "u": TopicOffsets("old", {0: 3})}
    end = {
        "t": TopicOffsets("id", {0: 9, 1: 2}),
        "u": TopicOffsets("new", {0: 4}),
        "v": TopicOffsets("v", {0: 1}),
    }
    stored = json.loads(json.dumps(offsets.encode_first(start, end)))
    assert offsets.decode(stored) == end
    assert offsets.start_within(stored) == {
        "t": start["t"],
        "u": TopicOffsets("new", {}),
        "v": TopicOffsets("v", {}),
    }
    assert offsets.start_within(offsets.encode(end)) is None
    assert offsets.start_within({}) == {}


# ------------------------------------------------------------------------------ tasks


def file_slice(
    first: int, end: int, bytes_per_row: int = 100, *, partition: int = 0, every: int = 1
) -> Slice:
    """A whole file of rows with those offsets, or of every so many of them."""
    file = TableFile(
        path=f"partition={partition}/{first}.parquet",
        partition=partition,
        size_bytes=(end - first) // every * bytes_per_row,
        rows=(end - first) // every,
        first=first,
        last=end - 1,
    )
    return Slice(
        topic="t",
        topic_id="id",
        partition=partition,
        first=first,
        end=end,
        source=ReadSource.FILES,
        files=(file,),
    )


def dense(slices: Sequence[Slice]) -> list[list[RowGroup]]:
    """The row groups of files of ours that lack no offset."""
    return [
        [
            RowGroup(
                first=at,
                last=min(at + limits.ROW_GROUP_ROWS, each.end) - 1,
                rows=min(limits.ROW_GROUP_ROWS, each.end - at),
            )
            for at in range(each.first, each.end, limits.ROW_GROUP_ROWS)
        ]
        for each in slices
    ]


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
    dealt = [
        each
        for task in tasks.pack(slices, parallelism=cores, row_groups=dense, least=least)
        for each in task
    ]
    assert [each.first for each in dealt] == [0, *(each.end for each in dealt[:-1])]
    assert dealt[-1].end == bounds[-1]
    assert all(each.first < each.end for each in dealt)


def test_a_large_scan_keeps_every_core_busy() -> None:
    """A big file is cut at its row groups to tasks of like size, two for each core at least."""
    dealt = tasks.pack([file_slice(0, 10_000_000)], parallelism=4, row_groups=dense)
    assert len(dealt) >= 8
    sizes = [sum(each.end - each.first for each in task) for task in dealt]
    assert max(sizes) < 1.5 * min(sizes)
    assert all(each.first % limits.ROW_GROUP_ROWS == 0 for task in dealt for each in task)


def test_a_small_scan_is_one_task() -> None:
    """A short scan is not worth a second worker."""
    slices = [file_slice(at, at + 100) for at in range(0, 1_000, 100)]
    assert len(tasks.pack(slices, parallelism=8, row_groups=dense)) == 1
    assert tasks.pack([], parallelism=8, row_groups=dense) == []


@given(st.data(), st.integers(1, 100_000), st.sampled_from([None, 7]))
def test_no_task_has_more_records_than_allowed(
    data: st.DataObject, most: int, least: int | None
) -> None:
    """maxRecordsPerPartition is exact, and no offset is lost or read twice by it."""
    # Up to 1,000 tasks: more of them take time, and are cut no differently.
    rows = data.draw(st.lists(st.integers(1, min(200_000, 200 * most)), min_size=1, max_size=5))
    bounds = [0, *itertools.accumulate(rows)]
    slices = [file_slice(first, end) for first, end in itertools.pairwise(bounds)]
    dealt = tasks.pack(slices, parallelism=2, row_groups=dense, least=least, most_records=most)
    assert all(sum(each.end - each.first for each in task) <= most for task in dealt)
    flat = [(each.first, each.end) for task in dealt for each in task]
    assert flat[0][0] == 0
    assert flat[-1][1] == bounds[-1]
    assert all(before[1] == after[0] for before, after in itertools.pairwise(flat))


def test_the_user_may_ask_for_more_tasks() -> None:
    """minPartitions goes beyond what the driver's cores say, as far as slices can be cut."""
    slices = [file_slice(at, at + 100) for at in range(0, 1_000, 100)]
    assert len(tasks.pack(slices, parallelism=1, row_groups=dense, least=5)) == 5
    two = [file_slice(at, at + 1_000_000) for at in (0, 1_000_000)]
    dealt = tasks.pack(two, parallelism=1, row_groups=dense, least=4)
    assert [len(task) for task in dealt] == [1, 1, 1, 1]


def test_a_slice_weighs_as_much_as_its_part_of_a_file() -> None:
    """Few heavy records make several tasks; two slices of one file are not as much as two files."""
    heavy = [file_slice(at, at + 1, TASK_MIN_BYTES) for at in range(6)]
    assert len(tasks.pack(heavy, parallelism=4, row_groups=dense)) == 6
    file = file_slice(0, 2, TASK_MIN_BYTES * 3 // 4)
    halves = [msgspec.structs.replace(file, end=1), msgspec.structs.replace(file, first=1)]
    assert len(tasks.pack(halves, parallelism=4, row_groups=dense)) == 1


def entry_slice(first: int, end: int, partition: int = 0) -> Slice:
    """A small entry of the log."""
    entry = Entry(
        kind=EntryKind.RECORDS, base_offset=first, count=end - first, length=100 * (end - first)
    )
    located = Located(entry, WalPosition(0, 1, first), 0)
    return Slice(
        topic="t",
        topic_id="id",
        partition=partition,
        first=first,
        end=end,
        source=ReadSource.WAL,
        entry=located,
    )


def offsets_of(dealt: Sequence[Sequence[Slice]]) -> list[list[tuple[int, int, int]]]:
    """(partition, first, end) of what each task reads."""
    return [[(each.partition, each.first, each.end) for each in task] for task in dealt]


@given(
    st.lists(st.integers(1, 3_000_000), min_size=1, max_size=9),
    st.lists(st.integers(1, 9), min_size=1, max_size=9),
    st.integers(1, 8),
    st.data(),
)
def test_a_partition_of_a_micro_batch_is_one_task(
    sizes: list[int], files: list[int], cores: int, data: st.DataObject
) -> None:
    """However large it is, and in order, unless the user asks for more tasks than partitions."""
    slices = []
    for partition, (size, count) in enumerate(zip(sizes, files, strict=False)):
        slices += [
            file_slice(number * size, (number + 1) * size, partition=partition)
            for number in range(count)
        ]
        slices.append(entry_slice(count * size, count * size + 3, partition))
    partitions = len({each.partition for each in slices})
    least = data.draw(st.none() | st.integers(1, partitions))
    dealt = tasks.pack_in_order(slices, parallelism=cores, row_groups=dense, least=least)
    assert all(dealt)
    assert (least or 1) <= len(dealt) <= partitions
    for partition in range(partitions):
        (mine,) = [
            [each for each in task if each.partition == partition]
            for task in dealt
            if any(each.partition == partition for each in task)
        ]
        assert mine == [each for each in slices if each.partition == partition]


def test_partitions_of_a_micro_batch_are_cut_where_the_user_asks_for_it() -> None:
    """minPartitions beyond the partitions, or maxRecordsPerPartition; not a few small entries."""
    large = [file_slice(0, 5_000_000, partition=number) for number in range(2)]
    assert offsets_of(tasks.pack_in_order(large, parallelism=8, row_groups=dense)) == [
        [(0, 0, 5_000_000)],
        [(1, 0, 5_000_000)],
    ]
    cut = tasks.pack_in_order(large, parallelism=8, row_groups=dense, least=6)
    assert len(cut) >= 6
    limited = tasks.pack_in_order(large, parallelism=8, row_groups=dense, most_records=2_000_000)
    assert max(sum(end - first for _, first, end in task) for task in offsets_of(limited)) <= 2e6
    small = [entry_slice(0, 10, partition=number) for number in range(64)]
    assert len(tasks.pack_in_order(small, parallelism=8, row_groups=dense)) == 1


def test_tasks_are_sized_by_rows_and_not_by_offsets() -> None:
    """After log compaction a span of offsets holds few rows: that is one small task."""
    compacted = [file_slice(0, 100_000_000, every=1_000_000)]
    assert len(tasks.pack(compacted, parallelism=8, row_groups=dense)) == 1
    assert len(tasks.pack(compacted, parallelism=8, row_groups=dense, most_records=100)) == 1
    beside = [*compacted, file_slice(100_000_000, 104_000_000)]
    dealt = tasks.pack(beside, parallelism=2, row_groups=dense)
    assert [len(task) for task in dealt] == [2, 1, 1, 1]  # the first row is not a quarter of all
    rows = [sum(each.end - max(each.first, 100_000_000) for each in task) for task in dealt]
    assert max(rows[1:]) < 1.5 * min(rows[1:])


def _groups_of_25(first: int) -> list[tuple[int, int, int]]:
    """Returns first offset, last offset and rows of the groups that remain of 400 offsets."""
    return [(at, min(at + 24, 399), min(25, 400 - at)) for at in range(first, 400, 25)]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        # In order: cut between groups, into shares of like many rows.
        ([(0, 99, 100), (100, 199, 100), (200, 299, 100), (300, 399, 100)], [100, 200, 300]),
        # Whole runs out of order.
        ([(300, 399, 100), (100, 199, 100), (200, 299, 100), (0, 99, 100)], [100, 200, 300]),
        # All over the file: nothing may be cut.
        ([(0, 399, 100), (1, 390, 100), (2, 395, 100), (3, 398, 100)], []),
        # Two halves, each in no order.
        ([(0, 199, 100), (200, 399, 100), (1, 150, 100), (201, 360, 100)], [200]),
        # Most rows at the end.
        ([(0, 9, 10), (10, 19, 10), (20, 399, 380)], [20]),
        # A group that begins at the end of the slice is not read; one that reaches into it is.
        ([*_groups_of_25(0), (400, 999, 600)], [50, 100, 150, 200, 250, 300, 350]),
        ([(-600, 0, 601), *_groups_of_25(1)], [1, 26, 151, 276]),
        ([], []),
    ],
)
def test_a_file_is_cut_where_no_row_group_has_both_sides(
    groups: list[tuple[int, int, int]], expected: list[int]
) -> None:
    """No row is decoded twice, whatever the order of a foreign file."""
    file = file_slice(0, 400, bytes_per_row=10_000_000)

    def told(slices: Sequence[Slice]) -> list[list[RowGroup]]:
        assert slices == [file]
        return [[RowGroup(first=first, last=last, rows=rows) for first, last, rows in groups]]

    dealt = tasks.pack([file], parallelism=2, row_groups=told, least=4)
    found = [each for task in offsets_of(dealt) for each in task]
    bounds = [0, *expected, 400]
    assert found == [(0, first, end) for first, end in itertools.pairwise(bounds)]
