"""The Spark source and consumer groups: start from a group's offsets, and commits to a group."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable

import sparklog
from sparklog import errors, limits
from sparklog.client.log import Log
from sparklog.formats import consumer_offsets, group_messages
from sparklog.settings import GroupSettings
from sparklog.sources import groups, stream, views
from sparklog.sources.groups import GroupReporter, Progress, sender
from sparklog.sources.offsets import Position
from sparklog.sources.options import LogLocation, parse
from sparklog.sources.planner import Planner
from sparklog.sources.reader import read_slices, view_of
from sparklog.sources.selection import Selection
from sparklog.sources.sql_functions import group_lag
from sparklog.sources.starting_offsets import EARLIEST, LATEST, OfGroup
from sparklog.sources.stream import GROUP_REPORT_LAST_SECONDS, EarlierStreamReader, StreamReader
from sparklog.storage.metadata.liveness import read_heartbeats
from sparklog.storage.objects import LocalStore, ObjectMissing
from sparklog.storage.reading.read import read_slice
from tests.support.kafkas import broker
from tests.support.roots import payload
from tests.support.waiting import wait_until
from tests.support.worlds import WatchedClock, World, position

LONG_SECONDS = 3600.0
SHORT_SECONDS = 0.05
PATIENCE_SECONDS = 30.0


def start_of(planner: Planner, otherwise: int | None = EARLIEST, group: str = "g") -> Any:
    """Returns the start offsets of a query in `t`, by partition."""
    found = planner.resolve(
        "startingOffsets", OfGroup(group, otherwise), otherwise=LATEST, late_is_latest=False
    )
    return found["t"].offsets


# ------------------------------------------------------------------------------ where a group is

STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["g", "h", "gg"]),
            st.dictionaries(st.integers(0, 1), st.none() | st.integers(0, 9), min_size=1),
        ),
        st.just("publish"),
        st.just("trim"),
    ),
    max_size=12,
)


@settings(max_examples=60)
@given(steps=STEPS)
def test_the_last_word_of_a_group_counts(steps: list[Any]) -> None:
    """The last commit counts, in table or log; deleted ones and other groups' do not."""
    world = World()
    world.append(9, 9)
    stands: dict[str, dict[int, int]] = {}
    for step in steps:
        if step == "trim":
            world.root.trim()
        elif step == "publish":
            world.publish_groups()
        else:
            group, offsets = step
            world.commit(group, offsets)
            known = stands.setdefault(group, {})
            for number, offset in offsets.items():
                known.pop(number, None)
                if offset is not None:
                    known[number] = offset
    for group in ("g", "h", "gg"):
        if stands.get(group):
            expected = {0: 0, 1: 0} | stands[group]
            assert start_of(world.planner(), group=group) == expected
        else:
            with pytest.raises(
                errors.BadOption, match=f"group.id = '{group}': the consumer group does not exist"
            ):
                start_of(world.planner(), group=group)


def test_only_the_partition_of_the_group_is_read() -> None:
    """Records in other partitions, such as a tombstone of the key, do not count."""
    world = World()
    world.append(5, 5)
    world.commit("g", {0: 2})
    other = (consumer_offsets.partition_of("g", limits.OFFSETS_PARTITIONS) + 1) % 8
    key = consumer_offsets.encode_key(consumer_offsets.OffsetKey("g", "t", 0))
    world.root.append((consumer_offsets.TOPIC, other, payload([None], key=[key])))
    assert start_of(world.planner()) == {0: 2, 1: 0}


def test_the_lag_of_a_group_counts_existing_records() -> None:
    """From the log start on, of partitions of this topic; a new topic has other offsets."""
    world = World()
    for _ in range(2):
        world.append(5, 5)
        world.root.publish("t")
    world.root.move_start("t", 0, 5)
    world.commit("g", {0: 2, 1: 7})
    world.append(1)
    location = LogLocation(root=world.uri)
    assert list(group_lag(location, "g")) == [("t", 0, 2, 11, 6), ("t", 1, 7, 10, 3)]
    for group in ("h", "", None):  # SQL's NULL
        with pytest.raises(errors.BadOption, match=r"does not exist.*`sparklog groups list`"):
            list(group_lag(location, group))
    world.root.delete_topic("t")
    assert list(group_lag(location, "g")) == []
    world.root.create_topic("t")
    assert list(group_lag(location, "g")) == []


def test_partitions_without_a_commit_begin_where_the_option_says(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At the start, at the end, or nowhere; one warning names them."""
    world = World()
    world.append(3, 4)
    world.commit("g", {0: 1})
    with caplog.at_level(logging.WARNING, "sparklog.sources"):
        assert start_of(world.planner(), EARLIEST) == {0: 1, 1: 0}
        assert start_of(world.planner(), LATEST) == {0: 1, 1: 4}
    assert [record.getMessage() for record in caplog.records] == [
        f"group 'g' has no committed offset for t-1: starting at the {where} of the log"
        " (groupOffsetReset)"
        for where in ("start", "end")
    ]
    with pytest.raises(
        errors.BadOption, match="'error': group 'g' has no committed offset for t-1"
    ):
        start_of(world.planner(), None)


def test_a_topic_created_again_is_never_read_under_an_old_offset() -> None:
    """Its id is another, so that what the group has committed is of no partition of it."""
    world = World()
    world.append(5, 5)
    world.commit("g", {0: 3, 1: 3})
    old_id = world.root.topic_id("t")
    world.root.delete_topic("t")
    world.root.create_topic("t")
    world.values = {0: [], 1: []}
    world.append(9, 9)
    assert start_of(world.planner()) == {0: 0, 1: 0}
    assert start_of(world.planner(), LATEST) == {0: 9, 1: 9}
    world.commit("g", {0: 4})
    world.commit("g", {1: 8}, topic_id=old_id)
    assert start_of(world.planner()) == {0: 4, 1: 0}


@pytest.mark.parametrize("with_others", [False, True])
def test_a_group_that_does_not_exist_is_told_by_name(with_others: bool) -> None:
    """The error names the group, whether or not other groups have commits."""
    world = World()
    if with_others:
        world.commit("h", {0: 0})
    with pytest.raises(
        errors.BadOption, match=r"group.id = 'g': the consumer group does not exist"
    ):
        start_of(world.planner())


def test_a_group_that_has_only_read_other_topics_exists() -> None:
    """It has committed nothing of this one."""
    world = World()
    world.append(2, 2)
    key = consumer_offsets.encode_key(consumer_offsets.GroupKey("g"))
    world.commit("h", {0: 1})
    number = consumer_offsets.partition_of("g", limits.OFFSETS_PARTITIONS)
    world.root.append((consumer_offsets.TOPIC, number, payload([b"a group"], key=[key])))
    assert start_of(world.planner()) == {0: 0, 1: 0}


def test_committed_offsets_that_are_gone_are_a_loss(caplog: pytest.LogCaptureFixture) -> None:
    """Below the log start or beyond the end: an error by name, or the remaining records."""
    world = World()
    for _ in range(2):
        world.append(5, 5)
        world.root.publish("t")
    world.root.move_start("t", 0, 5)
    world.commit("g", {0: 3, 1: 3})
    world.commit("h", {0: 7, 1: 12})
    with pytest.raises(
        errors.DataLoss, match="3 to 5 of t-0 no longer exist: the log now starts later"
    ):
        start_of(world.planner())
    with pytest.raises(errors.DataLoss, match="10 to 12 of t-1 no longer exist: the log ends"):
        start_of(world.planner(), group="h")
    with caplog.at_level(logging.WARNING, "sparklog.sources"):
        assert start_of(world.planner(fail=False)) == {0: 5, 1: 3}
        assert start_of(world.planner(fail=False), group="h") == {0: 7, 1: 10}
    assert len(caplog.records) == 2


def test_a_group_may_be_ahead_of_the_last_look() -> None:
    """Offsets that the group has read since the snapshot are not a loss."""
    world = World()
    world.append(2)
    planner = world.planner()
    world.append(3)
    world.commit("g", {0: 5, 1: 0})
    assert start_of(planner) == {0: 5, 1: 0}


def test_offsets_that_move_while_they_are_read_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file or object that is gone was compacted or trimmed: the same is planned again."""
    world = World()
    world.append(5, 5)
    world.commit("g", {0: 1, 1: 1})
    planner = world.planner()
    failures = iter([True, True, False])

    def fail_twice(*given: Any, **options: Any) -> Any:
        if next(failures):
            world.publish_groups()
            world.root.trim()
            raise ObjectMissing("trimmed")
        return read_slice(*given, **options)

    monkeypatch.setattr(views, "read_slice", fail_twice)
    assert start_of(planner) == {0: 1, 1: 1}

    def fail(*_: Any, **__: Any) -> Any:
        raise ObjectMissing("gone")

    monkeypatch.setattr(views, "read_slice", fail)
    with pytest.raises(errors.MissingObject, match="gone"):
        start_of(planner)


# ------------------------------------------------------------------------------ commits to a group


class Group:
    """Takes commits, fails as configured, or waits."""

    def __init__(self) -> None:
        self.commits: list[dict[int, int]] = []
        self.failures: list[Exception] = []
        self.attempts = 0
        self.began = threading.Semaphore(0)
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def send(self, progress: Progress) -> None:
        self.attempts += 1
        self.began.release()
        assert self.may_go_on.wait(PATIENCE_SECONDS)
        if self.failures:
            raise self.failures.pop(0)
        self.commits.append({number: offset for (_, number), (_, offset) in progress.items()})

    def reporter(self, **seconds: float) -> GroupReporter:
        given = {"interval_seconds": 0.0, "retry_seconds": LONG_SECONDS} | seconds
        return GroupReporter("g", self.send, **given)


@pytest.fixture(name="group")
def _group() -> Iterator[Group]:
    group = Group()
    yield group
    group.may_go_on.set()


def at(*offsets: int) -> Position:
    """These offsets of `t`, from partition 0 on."""
    return position("0", *offsets)


def test_the_newest_position_is_committed_one_commit_at_a_time(group: Group) -> None:
    """Positions overtaken during a commit are left out, and no caller waits for them."""
    reporter = group.reporter()
    group.may_go_on.clear()
    reporter.report(at(1, 0))
    assert group.began.acquire(timeout=PATIENCE_SECONDS)
    for offset in range(2, 50):
        reporter.report(at(offset, 0))
    assert group.attempts == 1
    group.may_go_on.set()
    reporter.close(PATIENCE_SECONDS)
    assert group.commits == [{0: 1, 1: 0}, {0: 49}]


def test_what_has_not_changed_is_committed_again_in_time(group: Group) -> None:
    """Unchanged offsets are committed again before they expire; otherwise only changes are."""
    reporter = group.reporter()
    for each in (at(1, 5), at(1, 5), at(2, 5)):
        reporter.report(each)
        reporter.flush(PATIENCE_SECONDS)
    reporter.close(PATIENCE_SECONDS)
    assert group.commits == [{0: 1, 1: 5}, {0: 2}]
    group.commits.clear()
    reporter = group.reporter(again_seconds=0.0)
    for each in (at(1, 5), at(1, 5), at(2, 5)):
        reporter.report(each)
        reporter.flush(PATIENCE_SECONDS)
    reporter.close(PATIENCE_SECONDS)
    assert group.commits == [{0: 1, 1: 5}, {0: 1, 1: 5}, {0: 2, 1: 5}]


def test_commits_keep_their_distance_unless_it_is_the_last(group: Group) -> None:
    """The first goes at once, the next only after a while, and `flush` waits for no interval."""
    reporter = group.reporter(interval_seconds=LONG_SECONDS)
    reporter.report(at(1, 1))
    wait_until(lambda: group.commits == [{0: 1, 1: 1}], "the first was committed")
    reporter.report(at(2, 1))
    time.sleep(SHORT_SECONDS)
    assert group.attempts == 1
    reporter.flush(PATIENCE_SECONDS)
    assert group.commits == [{0: 1, 1: 1}, {0: 2}]
    reporter.close(PATIENCE_SECONDS)


def test_a_failure_is_told_once_and_tried_again(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    """Each kind of failure, until a commit succeeds; nothing is raised."""
    gone = errors.BrokerUnavailable(address="x", reason="no broker is alive")
    group.failures = [gone, gone, OSError("odd"), gone]
    with caplog.at_level(logging.WARNING, "sparklog.sources"):
        reporter = group.reporter(retry_seconds=0.0)
        reporter.report(at(3, 3))
        wait_until(lambda: group.commits == [{0: 3, 1: 3}], "it was tried often enough")
        group.failures = [gone]
        reporter.report(at(4, 3))
        wait_until(lambda: group.commits[1:] == [{0: 4}], "the next was tried again")
        reporter.close(PATIENCE_SECONDS)
    told = [record.getMessage() for record in caplog.records]
    assert ["no broker" in each for each in told] == [True, False, True]
    assert all("'g'" in each and "the query continues" in each for each in told)


def test_a_group_with_members_is_told_what_to_do(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning names the group, and what may be done."""
    group.failures = [errors.MemberFenced(group="g", member_id="", error="UNKNOWN_MEMBER_ID")] * 3
    reporter = group.reporter()
    with caplog.at_level(logging.WARNING, "sparklog.sources"):
        for offset in range(3):
            reporter.report(at(offset, 0))
            reporter.flush(PATIENCE_SECONDS)
    reporter.close(PATIENCE_SECONDS)
    (told,) = caplog.messages
    assert "group 'g': the group has members (stop them, or set commitToGroup to" in told
    assert group.commits == [{0: 2, 1: 0}]


def test_the_end_of_a_query_waits_for_no_broker_for_long(group: Group) -> None:
    """`flush` ends with a failure, or when its time is over."""
    group.failures = [OSError("odd")]
    reporter = group.reporter()
    reporter.flush(PATIENCE_SECONDS)  # nothing was committed
    reporter.report(at(1, 0))
    began = time.monotonic()
    reporter.flush(LONG_SECONDS)
    assert group.failures == []
    group.may_go_on.clear()
    reporter.report(at(2, 0))
    reporter.close(SHORT_SECONDS)
    assert time.monotonic() - began < PATIENCE_SECONDS
    reporter.report(at(3, 0))
    reporter.flush(LONG_SECONDS)  # it is closed


# ------------------------------------------------------------------------------ commits of a stream


@pytest.fixture(name="told")
def _told(monkeypatch: pytest.MonkeyPatch, group: Group) -> Group:
    """Instead of a broker."""
    monkeypatch.setattr(stream, "sender", lambda *_: group.send)
    return group


def stream_of(
    world: World, kind: type[StreamReader] = StreamReader, /, **changes: str
) -> StreamReader:
    """Returns a stream from the beginning of the world's topic that commits to group `g`."""
    given = {"root": world.uri, "subscribe": "t", "startingOffsets": "earliest"}
    options = parse(given | {"pollInterval": "0ms", "commitToGroup": "g"} | changes)
    return kind(options, world.scan(), WatchedClock())


def test_a_stream_tells_where_it_starts_from(told: Group) -> None:
    """The start of the next batch is committed, so an idle query has no lag."""
    world = World()
    world.append(3, 2)
    reader = stream_of(world)
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    wait_until(lambda: told.commits == [{0: 0, 1: 0}], "the start was committed")
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    reader.stop()
    assert told.commits == [{0: 0, 1: 0}, {0: 3, 1: 2}]


def test_available_now_ends_with_its_last_commit(told: Group) -> None:
    """Spark ends the planner once it hears that nothing is left; by then it is committed."""
    world = World()
    world.append(3, 2)
    reader = stream_of(world)
    reader.prepareForTriggerAvailableNow()
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    assert told.commits[-1].items() <= {0: 3, 1: 2}.items()
    assert told.commits[-1][0] == 3
    reader.stop()


def test_a_query_waits_for_its_last_commits_so_long_in_all(told: Group) -> None:
    """The wait is bounded in total, although Spark may ask several times."""
    world, clock = World(), WatchedClock()
    world.append(3, 2)
    given = {"root": world.uri, "subscribe": "t", "commitToGroup": "g"}
    reader = StreamReader(parse(given), world.scan(), clock)
    reader.prepareForTriggerAvailableNow()
    start = reader.initialOffset()
    asked: list[float] = []

    def flush(self: GroupReporter, timeout_seconds: float) -> None:
        asked.append(timeout_seconds)
        clock.advance(timeout_seconds / 2)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(GroupReporter, "flush", flush)
        for _ in range(20):
            end = reader.latestOffset(start, ReadAllAvailable())
            assert end["t"]["offsets"] == {"0": 3, "1": 2}
    assert asked[0] == GROUP_REPORT_LAST_SECONDS
    assert sum(each / 2 for each in asked) <= GROUP_REPORT_LAST_SECONDS
    reader.stop()


def test_a_stream_of_an_earlier_spark_tells_what_was_committed(told: Group) -> None:
    """Asking for the log end before a batch is read commits nothing."""
    world = World()
    world.append(3, 2)
    reader = stream_of(world, EarlierStreamReader)
    assert isinstance(reader, EarlierStreamReader)
    start = reader.initialOffset()
    end = reader.latestOffset()
    world.append(1)
    assert reader.latestOffset() != end
    assert told.attempts == 0
    reader.partitions(start, end)
    reader.commit(end)
    reader.stop()
    assert told.commits == [{0: 3, 1: 2}]


def test_a_stream_without_the_option_tells_nobody(told: Group) -> None:
    """Without the option no call of Spark commits anything."""
    world = World()
    world.append(3)
    options = parse({"root": world.uri, "subscribe": "t", "startingOffsets": "earliest"})
    reader = StreamReader(options, world.scan(), WatchedClock())
    reader.commit(reader.latestOffset(reader.initialOffset(), ReadAllAvailable()))
    reader.stop()
    assert told.attempts == 0


def test_the_first_position_of_a_stream_stays() -> None:
    """Spark may ask twice for the end of the first batch while the group moves on."""
    world = World()
    world.append(5, 5)
    world.commit("g", {0: 1, 1: 1})
    reader = stream_of(world, **{"startingOffsets": "group", "group.id": "g"})
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    world.commit("g", {0: 2, 1: 2})
    assert reader.latestOffset(reader.initialOffset(), ReadAllAvailable()) == end
    assert end["t"]["from"] == {"0": 1, "1": 1}


def test_a_stream_that_begins_anew_finds_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that does not answer at first is waited for."""
    world = World()
    world.append(5, 5)
    world.commit("g", {0: 1, 1: 1})
    reader = stream_of(world, **{"startingOffsets": "group", "group.id": "g"})
    committed, failures = views.RootView.committed, iter([True, True, False])

    def fail_twice(self: views.RootView, group: str) -> Any:
        if next(failures):
            raise errors.StorageUnavailable(operation="get", path="x", reason="it rains")
        return committed(self, group)

    monkeypatch.setattr(views.RootView, "committed", fail_twice)
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    assert end["t"]["from"] == {"0": 1, "1": 1}


# ------------------------------------------------------------------------------ with a broker


@pytest.fixture(name="log")
def _log(tmp_path: Path) -> Iterator[Log]:
    quick = GroupSettings(initial_rebalance_delay_ms=0)
    with broker(tmp_path, groups=quick) as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t", partitions=2)
        with log.producer() as producer:
            for number in range(10):
                producer.send("t", b"v", partition=number % 2)
        yield log


@pytest.fixture(name="by_root")
def _by_root(tmp_path: Path) -> Iterator[LogLocation]:
    yield LogLocation(root=str(tmp_path))
    groups._connection.cache_clear()


def test_root_and_broker_say_the_same_of_a_group(log: Log, by_root: LogLocation) -> None:
    """Both find committed offsets at once, and none for a recreated topic."""
    by_broker = LogLocation(bootstrap=log.connection.address)

    def both(group: str = "g") -> Any:
        found = []
        for place in (by_root, by_broker):
            view = view_of(place)
            selection = Selection(topics=("t",))
            planner = Planner(view, selection, fail_on_data_loss=True)
            planner.refresh()
            try:
                found.append(start_of(planner, group=group))
            except errors.BadOption as error:
                found.append(str(error))
        assert found[0] == found[1]
        return found[0]

    assert "group.id = 'g': the consumer group does not exist" in both()
    log.commit_group_offsets("g", {("t", 0): 3, ("t", 1): 4})
    assert both() == {0: 3, 1: 4}
    log.flush_to_table()
    log.commit_group_offsets("g", {("t", 1): 5})
    assert both() == {0: 3, 1: 5}
    assert "group.id = 'h': the consumer group does not exist" in both("h")
    log.delete_topic("t")
    log.create_topic("t", partitions=2)
    log.commit_group_offsets("g", {("t", 1): 0})
    assert both() == {0: 0, 1: 0}


def test_root_and_broker_give_the_same_rows(log: Log, by_root: LogLocation) -> None:
    """A slice of a partition has the same offsets from both."""
    for place in (by_root, LogLocation(bootstrap=log.connection.address)):
        planner = Planner(view_of(place), Selection(topics=("t",)), fail_on_data_loss=True)
        planner.refresh()
        (topic,) = planner.latest().values()
        assert topic.offsets == {0: 5, 1: 5}
        slices = planner.range("t", topic.id, 1, 2, 4)
        rows = read_slices(place, slices, columns=["offset", "value"], fail_on_data_loss=True)
        found = [row for _, batch in rows for row in batch.select(["offset", "value"]).to_pylist()]
        assert found == [{"offset": 2, "value": b"v"}, {"offset": 3, "value": b"v"}]


@pytest.mark.parametrize("named_by", ["root", "address"])
def test_progress_is_committed_for_all_to_see(
    log: Log, by_root: LogLocation, named_by: str
) -> None:
    """By the root's live broker, or by the one that is named."""
    place = by_root if named_by == "root" else LogLocation(bootstrap=log.connection.address)
    topic_id = log.describe("t").topic_id
    sender(place, "g")({("t", 0): (topic_id, 3), ("t", 1): (topic_id, 5)})
    assert log.group_offsets("g") == {("t", 0): 3, ("t", 1): 5}


def test_progress_in_a_topic_that_is_gone_is_not_committed(log: Log, by_root: LogLocation) -> None:
    """Nor in one that has its name now; the other topics' is."""
    old_id = log.describe("t").topic_id
    other_id = log.create_topic("u", partitions=1).topic_id
    log.delete_topic("t")
    log.create_topic("t", partitions=2)
    progress = {("t", 0): (old_id, 3), ("u", 0): (other_id, 0), ("gone", 0): (old_id, 1)}
    sender(by_root, "g")(progress)
    assert log.group_offsets("g") == {("u", 0): 0}
    sender(by_root, "h")({("t", 0): (old_id, 3)})
    with pytest.raises(errors.GroupRefused, match="no such group"):
        log.describe_group("h")


def test_a_group_with_members_refuses(log: Log, by_root: LogLocation) -> None:
    """Its members' offsets are not overwritten."""
    info = log.describe("t")
    join = group_messages.JoinGroup(
        group="g",
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        protocol_type="consumer",
        protocols=[group_messages.GroupProtocol(name="range")],
    )
    joined: group_messages.JoinedGroup = log.connection.action("groups.join", join)
    with pytest.raises(errors.MemberFenced):
        sender(by_root, "g")({("t", 0): (info.topic_id, 3)})
    log.connection.action(
        "groups.leave", group_messages.LeaveGroup(group="g", member_id=joined.member_id)
    )
    sender(by_root, "g")({("t", 0): (info.topic_id, 3)})
    assert log.group_offsets("g") == {("t", 0): 3}


def test_no_broker_is_started_for_a_report(tmp_path: Path, by_root: LogLocation) -> None:
    """Without a broker the commit fails, and it succeeds as soon as one runs."""
    with sparklog.connect(tmp_path) as log:
        topic_id = log.create_topic("t", partitions=1).topic_id
    send = sender(by_root, "g")
    with pytest.raises(errors.BrokerUnavailable, match="no broker is alive"):
        send({("t", 0): (topic_id, 0)})
    assert all(each.stopped for each in read_heartbeats(LocalStore(tmp_path)).values())
    with sparklog.connect(tmp_path) as log:
        send({("t", 0): (topic_id, 0)})
        assert log.group_offsets("g") == {("t", 0): 0}
