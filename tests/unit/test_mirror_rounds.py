"""Rounds of a mirror, group offsets and the cutover, with a source and a target in memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import PySparkException

from sparklog import errors
from sparklog.client.offsets import OffsetAndMetadata, TopicPartition
from sparklog.clock import ManualClock
from sparklog.jobs.mirroring.cutover import Cutover, Patience
from sparklog.jobs.mirroring.groups import GroupOffsets
from sparklog.jobs.mirroring.plan import (
    Bounds,
    Range,
    Ranges,
    Selection,
    SourceTopic,
    TargetTopic,
)
from sparklog.jobs.mirroring.rounds import Mirror, Round, Settings
from sparklog.jobs.mirroring.sides import Group, KafkaSource

SETTINGS = Settings(selection=Selection(topics=re.compile(".*")), patience_seconds=20.0)
PATIENCE = Patience(quiet_seconds=2.0, wait_seconds=60.0)


class Source:
    """Topics with the log start and end of each partition, and consumer groups."""

    cluster = "kafka:c"

    def __init__(self) -> None:
        self.found: dict[str, SourceTopic] = {}
        self.config: dict[str, dict[str, str]] = {}
        self.members: dict[str, bool] = {}
        self.offsets: dict[str, dict[TopicPartition, OffsetAndMetadata]] = {}
        self.open: dict[TopicPartition, int] = {}
        self.failures: list[Exception] = []

    def put(
        self,
        topic: str,
        *partitions: tuple[int, int],
        topic_id: str = "id",
        leaderless: Sequence[int] = (),
    ) -> None:
        bounds = {number: Bounds(*each) for number, each in enumerate(partitions)}
        self.found[topic] = SourceTopic(
            topic=topic,
            topic_id=topic_id,
            partitions={n: each for n, each in bounds.items() if n not in leaderless},
            leaderless=leaderless,
        )

    def commit(self, group: str, offsets: Mapping[TopicPartition, int], *, members: bool) -> None:
        self.members[group] = members
        self.offsets[group] = {
            place: OffsetAndMetadata(offset, "m") for place, offset in offsets.items()
        }

    def names(self) -> list[str]:
        if self.failures:
            raise self.failures.pop(0)
        return list(self.found)

    def topics(self, names: Iterable[str]) -> dict[str, SourceTopic]:
        return {name: self.found[name] for name in names if name in self.found}

    def configs(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        return {name: self.config.get(name, {}) for name in names}

    def high_watermarks(self, topics: Iterable[SourceTopic]) -> dict[TopicPartition, int]:
        return dict(self.open)

    def groups(self) -> list[Group]:
        return [Group(group=name, has_members=has) for name, has in self.members.items()]

    def group_offsets(self, group: str) -> dict[TopicPartition, OffsetAndMetadata]:
        return self.offsets[group]

    def frame(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a test copies without Spark")

    def fault(self, *_: Any) -> errors.BadValue | None:
        return None


class TargetLog:
    """The calls of a `Log` that a mirror makes."""

    def __init__(self) -> None:
        self.found: dict[str, TargetTopic] = {}
        self.offsets: dict[str, dict[TopicPartition, OffsetAndMetadata]] = {}
        self.refusals: dict[str, Exception] = {}
        self.active: set[str] = set()
        self.deleted: dict[str, dict[int, int]] = {}

    def create_topic(self, topic: str, partitions: int, config: Mapping[str, str]) -> None:
        if topic in self.refusals:
            raise self.refusals[topic]
        given = dict(config)
        self.found[topic] = TargetTopic(
            topic=topic,
            origin=given.pop("mirror.source"),
            config=given,
            partitions=dict.fromkeys(range(partitions), Bounds(0, 0)),
        )

    def add_partitions(self, topic: str, partitions: int) -> None:
        found = self.found[topic]
        more = dict.fromkeys(range(partitions), Bounds(0, 0)) | dict(found.partitions)
        self.found[topic] = replace(found, partitions=more)

    def alter(self, topic: str, config: Mapping[str, str | None]) -> None:
        changes = dict(config)
        found = self.found[topic]
        origin = changes.pop("mirror.source", found.origin)
        merged = {k: v for k, v in {**found.config, **changes}.items() if v is not None}
        self.found[topic] = replace(found, origin=origin, config=merged)

    def delete_records(self, topic: str, offsets: Mapping[int, int]) -> None:
        if topic in self.refusals:
            raise self.refusals[topic]
        self.deleted.setdefault(topic, {}).update(offsets)
        found = self.found[topic]
        starts = {n: each._replace(start=offsets.get(n, 0)) for n, each in found.partitions.items()}
        self.found[topic] = replace(found, partitions=starts)

    def commit_group_offsets(
        self, group: str, offsets: Mapping[TopicPartition, OffsetAndMetadata]
    ) -> None:
        if group in self.active:
            raise errors.GroupRefused(group=group, error="NON_EMPTY_GROUP", hint="")
        if any(len(each.metadata) > 9 for each in offsets.values()):
            raise errors.GroupRefused(group=group, error="OFFSET_METADATA_TOO_LARGE", hint="")
        self.offsets.setdefault(group, {}).update(offsets)


class Target:
    """The side that is written."""

    def __init__(self) -> None:
        self.log: Any = TargetLog()

        self.firsts: dict[TopicPartition, int] = {}

    def topics(self, names: Iterable[str]) -> dict[str, TargetTopic]:
        return {name: self.log.found[name] for name in names if name in self.log.found}

    def group_offsets(self, group: str) -> dict[TopicPartition, OffsetAndMetadata]:
        found: dict[TopicPartition, OffsetAndMetadata] = self.log.offsets.get(group, {})
        return found

    def first_offsets(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        return {n: self.firsts.get((topic, n), self.end(topic, n)) for n in partitions}

    def end(self, topic: str, partition: int = 0) -> int:
        found: TargetTopic = self.log.found[topic]
        return found.partitions[partition].end


class Copier:
    """Moves the target's ends as a write does; `before` may fail in its place.

    `sizes`: bytes of a record, by topic.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.before: Callable[[Ranges], None] = lambda _: None
        self.writes: list[Ranges] = []
        self.sizes: dict[str, int] = {}

    def copy(self, parts: Ranges, names: Mapping[str, str]) -> Round:
        self.before(parts)
        self.writes.append(parts)
        for topic, each in parts.items():
            found = self._target.log.found[names[topic]]
            bounds = dict(found.partitions)
            for number, r in each.items():
                if bounds[number].end != r.first:
                    raise refusal("OffsetsDoNotContinue")
                bounds[number] = bounds[number]._replace(end=r.until)
                if r.start < r.until:
                    self._target.firsts.setdefault((names[topic], number), r.start)
            self._target.log.found[names[topic]] = replace(found, partitions=bounds)
        counts = {t: sum(r.until - r.start for r in each.values()) for t, each in parts.items()}
        sizes = {topic: float(n * self.sizes.get(topic, 1)) for topic, n in counts.items()}
        return Round(sum(counts.values()), sizes)


def refusal(name: str) -> PySparkException:
    """An error as Spark reports one of a sink's commit."""
    return PySparkException(f"[DATA_SOURCE_ERROR] sparklog.errors.{name}: no")


class Here:
    """Both sides and a mirror between them, on a clock that only it moves."""

    def __init__(self, settings: Settings = SETTINGS) -> None:
        self.source = Source()
        self.target = Target()
        self.copier = Copier(self.target)
        self.clock = ManualClock()
        self.groups = GroupOffsets(self.source, self.target, re.compile(".*"))  # type: ignore[arg-type]
        self.mirror = self.new(settings)

    def new(self, settings: Settings = SETTINGS) -> Mirror:
        return Mirror(
            self.copier,
            self.source,
            self.target,  # type: ignore[arg-type]
            settings,
            groups=self.groups,
            clock=self.clock,
        )

    def cutover(self) -> Cutover:
        mirror = self.new(replace(SETTINGS, cuts_over=True))
        return Cutover(
            mirror,
            self.source,
            self.target,  # type: ignore[arg-type]
            self.groups,
            PATIENCE,
            self.clock,
        )


@pytest.fixture(name="here")
def _here() -> Here:
    return Here()


# ------------------------------------------------------------------------------ runs


def test_a_run_copies_what_the_source_has(here: Here) -> None:
    """Topics are created as mirrors with their configuration; a second run copies nothing."""
    here.source.put("a", (0, 5), (3, 9))
    here.source.config["a"] = {"retention.ms": "1000", "unknown": "1"}
    here.mirror.once()
    found = here.target.log.found["a"]
    assert found.origin == "kafka:c/id/a"
    assert found.config == {"retention.ms": "1000"}
    assert [each.end for each in found.partitions.values()] == [5, 9]
    assert here.mirror.copied.records == 11
    assert here.target.log.deleted == {"a": {1: 3}}
    here.new().once()
    assert len(here.copier.writes) == 1


def test_an_empty_topic_becomes_a_mirror(here: Here) -> None:
    """A topic that was created before, with too few partitions, gets the others."""
    here.source.put("a", (0, 5), (0, 1))
    here.target.log.create_topic("a", 1, {"mirror.source": None})
    here.mirror.once()
    assert here.target.log.found["a"].origin == "kafka:c/id/a"
    assert here.target.end("a", 1) == 1


def test_a_run_ends_at_the_ends_that_it_has_found(here: Here) -> None:
    """Records that come meanwhile are those of the next run."""
    here.source.put("a", (0, 5))
    here.copier.before = lambda _: here.source.put("a", (0, 8))
    here.mirror.once()
    assert here.target.end("a") == 5


def test_a_selection_without_topics_is_an_error(here: Here) -> None:
    """A misspelt expression is not taken for work that is done."""
    with pytest.raises(errors.BadOption, match="no topic of the source matches"):
        here.mirror.once()


def test_rounds_are_bounded() -> None:
    """The ranges of a round cover no more offsets than asked for."""
    here = Here(replace(SETTINGS, round_records=4))
    here.source.put("a", (0, 9))
    here.mirror.once()
    ends = [each["a"][0].until for each in here.copier.writes]
    assert ends == [4, 8, 9]


def test_rounds_are_bounded_in_bytes() -> None:
    """By the sizes of the last write of each topic; the first write, and one after a failure, is
    small.
    """
    here = Here(replace(SETTINGS, round_bytes=4 * 2**20))
    here.source.put("a", (0, 100_000))
    here.copier.sizes["a"] = 2**10
    failures = [PySparkException("out of memory")]

    def fail(parts: Ranges) -> None:
        if len(here.copier.writes) == 3 and failures:
            raise failures.pop()

    here.copier.before = fail
    here.mirror.once()
    counts = [r.until - r.first for each in here.copier.writes for r in each["a"].values()]
    assert counts[:6] == [4, 4096, 4096, 4, 4096, 4096]
    assert here.target.end("a") == 100_000


def test_a_topic_with_large_records_leaves_the_others_their_share() -> None:
    """Each gets half of the bytes, whatever the size of its records."""
    here = Here(replace(SETTINGS, round_bytes=4 * 2**20))
    here.source.put("a", (0, 100_000))
    here.source.put("b", (0, 1_000))
    here.copier.sizes = {"a": 2**6, "b": 2**20}
    here.mirror.once()
    counts = {topic: r.until - r.first for topic, (r,) in _second(here).items()}
    assert counts == {"a": 2**15, "b": 2}


def _second(here: Here) -> dict[str, tuple[Any, ...]]:
    """The ranges of the second write, by topic."""
    return {topic: tuple(each.values()) for topic, each in here.copier.writes[1].items()}


@pytest.mark.parametrize(("seconds", "most"), [(0.0, 70), (2.0, 10)])
def test_an_idle_mirror_looks_seldom(here: Here, seconds: float, most: int) -> None:
    """About once a second, and less often if a look takes long; records make it look at once."""
    here.source.put("a", (0, 5))
    here.mirror.once()
    looks: list[float] = []
    names = here.source.names

    def counted() -> list[str]:
        here.clock.advance(seconds)
        looks.append(here.clock.monotonic())
        if looks[-1] - looks[0] > 60:
            raise KeyboardInterrupt
        return names()

    here.source.names = counted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        here.mirror.follow()
    assert most / 2 < len(looks) <= most
    del looks[:]
    here.source.put("a", (0, 9))
    with pytest.raises(KeyboardInterrupt):
        here.mirror.follow()
    assert looks[1] - looks[0] == seconds
    assert here.target.end("a") == 9


def test_a_partition_gets_the_log_start_of_its_source(here: Here) -> None:
    """Also if the run that copied its first records was killed before that, and once only."""
    here.source.put("a", (4, 9), (0, 9), (6, 9), (5, 9), (3, 9))
    here.target.log.create_topic("a", 5, {"mirror.source": "kafka:c/id/a"})
    bounds = dict.fromkeys(range(5), Bounds(0, 9))
    here.target.log.found["a"] = replace(here.target.log.found["a"], partitions=bounds)
    here.target.firsts = {("a", 0): 4, ("a", 1): 0, ("a", 2): 5, ("a", 3): 0}
    here.mirror.once()
    assert here.target.log.deleted == {"a": {0: 4, 2: 5, 4: 3}}
    here.target.log.deleted.clear()
    here.mirror.once()
    assert here.target.log.deleted == {}


def test_a_log_start_that_cannot_be_set_holds_up_no_records(here: Here) -> None:
    """A compacted topic has none; a table that cannot be written waits for the next run."""
    here.source.put("a", (3, 5))
    here.source.put("b", (3, 5))
    here.source.config["b"] = {"cleanup.policy": "compact"}
    here.copier.before = lambda _: here.target.log.refusals.update(
        a=errors.TimedOut(what="publishing", timeout_seconds=1), b=AssertionError("b")
    )
    here.mirror.once()
    assert here.mirror.faults == {}
    here.target.log.refusals.clear()
    here.new().once()
    assert here.target.log.deleted == {"a": {0: 3}}


def test_following_finds_new_topics_and_partitions(here: Here) -> None:
    """It copies them in the next round."""
    here.source.put("a", (0, 5))
    steps = [
        lambda: here.source.put("b", (0, 2)),
        lambda: here.source.put("a", (0, 5), (0, 3)),
    ]

    def sleep(seconds: float) -> None:
        here.clock.advance(seconds)
        if not steps:
            raise KeyboardInterrupt
        steps.pop(0)()

    here.clock.sleep = sleep  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        here.mirror.follow()
    assert (here.target.end("a", 1), here.target.end("b")) == (3, 2)


def test_a_changed_configuration_follows(here: Here) -> None:
    """It is compared from time to time; given values take precedence over the source's."""
    here.source.put("a", (0, 5))
    here.source.config["a"] = {"retention.ms": "1000"}
    here.mirror.once()
    here.source.config["a"] = {"retention.bytes": "7"}
    here.mirror.once()
    assert here.target.log.found["a"].config == {"retention.ms": "1000"}
    here.clock.advance(10.0)
    here.mirror.once()
    assert here.target.log.found["a"].config == {"retention.bytes": "7"}
    here.new(replace(SETTINGS, config={"retention.bytes": "-1"})).once()
    assert here.target.log.found["a"].config == {"retention.bytes": "-1"}


# ------------------------------------------------------------------------------ faults


def test_a_topic_with_a_fault_holds_up_no_other(here: Here) -> None:
    """The others are copied, and the fault has a reason."""
    here.source.put("a", (0, 5))
    here.source.put("b", (0, 5))
    here.mirror.once()
    here.source.put("a", (0, 7), topic_id="new")
    here.source.put("b", (0, 7))
    here.mirror.once()
    assert (here.target.end("a"), here.target.end("b")) == (5, 7)
    assert "deleted and created again" in here.mirror.faults["a"]
    assert here.mirror.faults.keys() == {"a"}


def test_a_topic_that_cannot_be_created_holds_up_no_other(here: Here) -> None:
    """Nor does one whose name is refused, or taken."""
    here.source.put("a", (0, 5))
    here.source.put("b", (0, 5))
    here.source.put("c", (0, 5))
    here.source.put("d", (0, 5))
    here.target.log.refusals["a"] = errors.BadPartitionCount(topic="a", requested=1, reason="no")
    renames = [(re.compile("c"), "c c"), (re.compile("d"), "b")]
    selection = Selection(topics=re.compile(".*"), renames=renames)
    mirror = here.new(replace(SETTINGS, selection=selection))
    mirror.once()
    assert here.target.end("b") == 5
    assert mirror.faults.keys() == {"a", "c", "d"}
    assert "'c c' is invalid" in mirror.faults["c"]
    assert "'b' would both be 'b'" in mirror.faults["d"]


def test_a_topic_that_another_mirror_creates_is_no_fault(here: Here) -> None:
    """The next look finds it."""
    here.source.put("a", (0, 5))
    create = here.target.log.create_topic

    def race(topic: str, partitions: int, config: Mapping[str, str]) -> None:
        create(topic, partitions, config)
        raise errors.TopicExists(topic=topic)

    here.target.log.create_topic = race
    here.mirror.once()
    assert here.target.end("a") == 5


def test_a_topic_that_is_deleted_meanwhile_is_named(here: Here) -> None:
    """The run ends, with the reason."""
    here.source.put("a", (0, 5))
    here.source.put("b", (0, 5))
    here.copier.before = lambda _: here.source.found.pop("a", None)  # type: ignore[assignment]
    here.target.log.create_topic("a", 1, {"mirror.source": None})
    mirror = here.new(replace(SETTINGS, round_records=4))
    mirror.once()
    assert mirror.faults == {"a": "it was deleted at the source"}
    assert here.target.end("b") == 5


def test_following_ends_if_no_topic_is_left(here: Here) -> None:
    """Otherwise it would wait without an end."""
    here.source.put("a", (0, 5))
    here.target.log.create_topic("a", 1, {"mirror.source": "another"})
    here.mirror.follow()
    assert here.mirror.faults.keys() == {"a"}


def test_a_side_that_is_down_is_asked_again(here: Here) -> None:
    """With longer and longer waits, until the patience is over."""
    down = errors.BrokerUnavailable(address="h:1", reason="refused")
    here.source.put("a", (0, 5))
    here.source.failures = [down] * 3
    began = here.clock.monotonic()
    here.mirror.once()
    assert here.target.end("a") == 5
    assert here.clock.monotonic() - began == 1 + 2 + 4
    here.source.failures = [down] * 9
    with pytest.raises(errors.BrokerUnavailable):
        here.mirror.once()
    assert here.source.failures


def test_a_write_that_fails_is_repeated_by_topic(here: Here) -> None:
    """The topic whose write fails waits; the other is copied, and the failure is not a fault."""
    failures = 3

    def fail(parts: Ranges) -> None:
        nonlocal failures
        if "a" in parts and failures:
            failures -= 1
            raise PySparkException("the store is slow")

    here.copier.before = fail
    here.source.put("a", (0, 5))
    here.source.put("b", (0, 5))
    here.mirror.once()
    assert [set(each) for each in here.copier.writes] == [{"b"}, {"a"}]
    assert (here.target.end("a"), here.target.end("b")) == (5, 5)
    assert here.mirror.faults == {}
    here.source.put("a", (0, 7))
    here.source.put("b", (0, 7))
    here.mirror.once()
    assert set(here.copier.writes[-1]) == {"a", "b"}


def test_a_write_that_keeps_failing_becomes_a_fault(here: Here) -> None:
    """After the patience; the run ends with its reason."""

    def fail(parts: Ranges) -> None:
        raise PySparkException("the store is gone")

    here.copier.before = fail
    here.source.put("a", (0, 5))
    here.mirror.once()
    assert here.mirror.faults == {"a": "the store is gone"}
    assert 20 <= here.clock.monotonic() <= 60


def test_a_refusal_is_final_if_the_target_did_not_move(here: Here) -> None:
    """No patience helps against it."""
    began = here.clock.monotonic()

    def refuse(parts: Ranges) -> None:
        raise refusal("KeylessRecord")

    here.copier.before = refuse
    here.source.put("a", (0, 5))
    here.mirror.once()
    assert here.mirror.faults.keys() == {"a"}
    assert here.clock.monotonic() - began < 5


def test_a_record_that_cannot_be_written_is_named(here: Here) -> None:
    """It is a fault of its topic, and the others are copied."""
    here.source.put("a", (0, 5))
    here.source.put("b", (0, 3))

    def refuse(parts: Ranges) -> None:
        if "a" in parts:
            raise errors.BadValue(topic="a", partition=0, offset=2, reason="it is late")

    here.copier.before = refuse
    here.mirror.once()
    assert (here.target.end("a"), here.target.end("b")) == (0, 3)
    assert "a-0, offset 2: it is late" in here.mirror.faults["a"]


def test_a_timestamp_that_spark_cannot_read_is_found_by_kafka(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The JVM's error does not say of which record it is."""
    found = {("a", 0): 7, ("a", 1): -1, ("b", 0): 40}

    def listed(_: KafkaSource, places: Iterable[TopicPartition], spec: str) -> Any:
        assert spec == "since 9223372036854776"
        return {
            each: SimpleNamespace(offset=lambda at=found[each]: at, timestamp=lambda: 10**18)
            for each in places
        }

    monkeypatch.setattr(KafkaSource, "_listed", listed)
    source = object.__new__(KafkaSource)
    spec = SimpleNamespace(forTimestamp=lambda ms: f"since {ms}")
    admin = SimpleNamespace(OffsetSpec=spec)
    source._kafka = SimpleNamespace(clients=SimpleNamespace(admin=admin))
    part = Range(first=0, until=10, start=0)
    error = PySparkException("java.lang.ArithmeticException: long overflow")
    named = source.fault(error, {"b": {0: part}, "a": {0: part, 1: part}})
    assert "a-0, offset 7: its timestamp is 1000000000000000000 ms" in str(named)
    assert source.fault(error, {"b": {0: part}}) is None
    assert source.fault(PySparkException("another"), {"a": {0: part}}) is None


def test_a_partition_without_a_leader_holds_up_no_other(
    here: Here, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run copies the others, waits, and copies up to the end that the partition has then."""
    here.source.put("a", (0, 5), (0, 7), leaderless=[1])
    here.source.put("b", (0, 3))

    names, back_at = here.source.names, here.clock.monotonic() + 5.0

    def look() -> list[str]:
        if here.clock.monotonic() >= back_at:
            here.source.put("a", (0, 5), (0, 9))
        return names()

    monkeypatch.setattr(here.source, "names", look)
    here.mirror.once()
    assert [here.target.end("a", n) for n in (0, 1)] == [5, 9]
    assert here.target.end("b") == 3
    assert not here.mirror.faults
    said = capsys.readouterr().err
    assert said.count("a: partition 1 has no leader at the source, the others are copied") == 1
    assert said.count("a: partition 1 has a leader again") == 1


def test_a_run_does_not_wait_for_a_leader_forever(here: Here) -> None:
    """It names the partition when the patience is over, and everything else is copied."""
    here.source.put("a", (0, 5), (0, 7), (0, 7), leaderless=[1, 2])
    here.source.put("b", (0, 3))
    here.mirror.once()
    assert (here.target.end("a"), here.target.end("b")) == (5, 3)
    assert here.mirror.faults == {"a": "partitions 1, 2 have no leader at the source"}
    here.source.put("a", (0, 5), (0, 7), (0, 7))
    after = here.new()
    after.once()
    assert [here.target.end("a", n) for n in (1, 2)] == [7, 7]


def test_a_partition_that_loses_its_leader_when_it_is_copied_ends_no_run(here: Here) -> None:
    """All that the run has to copy of it is here."""
    here.source.put("a", (0, 5), (0, 7))

    def lose(_: Ranges) -> None:
        here.source.put("a", (0, 5), (0, 7), leaderless=[1])

    here.copier.before = lose
    here.mirror.once()
    assert [here.target.end("a", n) for n in (0, 1)] == [5, 7]
    assert not here.mirror.faults


def test_a_cutover_waits_for_a_leader(here: Here) -> None:
    """No mirror ends while it is not known what a partition has."""
    here.source.put("a", (0, 5), (0, 7), leaderless=[1])
    with pytest.raises(errors.BadRequest, match="no cutover: a: partition 1 has no leader"):
        here.cutover().run()
    assert here.target.log.found["a"].origin is not None


class _Admin:
    """Kafka's admin client, as far as topics are described: partition 1 has no leader."""

    def describeTopics(self, _: list[str]) -> Any:  # noqa: N802
        partitions = [
            SimpleNamespace(partition=lambda n=n: n, leader=lambda n=n: None if n == 1 else "node")
            for n in range(3)
        ]
        topic = SimpleNamespace(
            partitions=lambda: partitions, topicId=lambda: SimpleNamespace(toString=lambda: "id")
        )
        return SimpleNamespace(topicNameValues=lambda: {"a": SimpleNamespace(get=lambda: topic)})


def test_kafka_is_not_asked_for_offsets_of_a_partition_without_a_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its client would wait for a leader, and then fail for all partitions."""
    asked: list[list[TopicPartition]] = []

    def offsets(_: KafkaSource, places: Iterable[TopicPartition], *__: Any, **___: Any) -> Any:
        asked.append(list(places))
        return dict.fromkeys(asked[-1], 4)

    monkeypatch.setattr(KafkaSource, "_offsets", offsets)
    source = object.__new__(KafkaSource)
    source._admin = _Admin()
    found = source.topics(["a"])["a"]
    assert asked == [[("a", 0), ("a", 2)]] * 2
    assert (sorted(found.partitions), found.leaderless, found.count) == ([0, 2], [1], 3)


def test_a_second_mirror_is_no_fault(here: Here) -> None:
    """A write that no longer continues the target is planned again."""
    here.source.put("a", (0, 5))
    other = Copier(here.target)

    def overtake(parts: Ranges) -> None:
        here.copier.before = lambda _: None
        other.copy({"a": {0: parts["a"][0]._replace(until=3)}}, {"a": "a"})

    here.copier.before = overtake
    here.mirror.once()
    assert here.mirror.faults == {}
    assert here.target.end("a") == 5


# ------------------------------------------------------------------------------ groups


def test_offsets_of_groups_are_copied(here: Here) -> None:
    """As they are, for mirrored topics, up to the target's end."""
    here.source.put("a", (0, 5), (0, 5))
    here.source.commit("g", {("a", 0): 3, ("a", 1): 9, ("other", 0): 1}, members=True)
    here.source.commit("none", {("other", 0): 1}, members=False)
    here.mirror.once()
    assert here.target.log.offsets == {"g": {("a", 0): OffsetAndMetadata(3, "m")}}
    assert here.mirror.groups.ahead == ["g"]
    here.source.offsets["g"] = {("a", 0): OffsetAndMetadata(3, "n")}
    here.mirror.once()
    assert here.target.log.offsets == {"g": {("a", 0): OffsetAndMetadata(3, "n")}}


def test_a_group_with_members_in_the_target_keeps_its_offsets(here: Here) -> None:
    """The outcome names it."""
    here.source.put("a", (0, 5))
    here.source.commit("g", {("a", 0): 3}, members=False)
    here.target.log.active = {"g"}
    here.mirror.once()
    assert here.target.log.offsets == {}
    assert here.mirror.groups.refused == {"g": "has members here"}


def test_a_group_that_is_refused_holds_up_no_other(here: Here) -> None:
    """The outcome has the reason."""
    here.source.put("a", (0, 5))
    here.source.offsets["f"] = {("a", 0): OffsetAndMetadata(3, "far too long")}
    here.source.members["f"] = False
    here.source.commit("g", {("a", 0): 3}, members=False)
    here.mirror.once()
    assert here.target.log.offsets.keys() == {"g"}
    assert "OFFSET_METADATA_TOO_LARGE" in here.mirror.groups.refused["f"]


# ------------------------------------------------------------------------------ cutover


def test_a_cutover_ends_the_mirror(here: Here) -> None:
    """It copies the last records and the groups' offsets, once producers and consumers stopped."""
    here.source.put("a", (0, 5))
    here.source.commit("g", {("a", 0): 3}, members=True)
    began = here.clock.monotonic()
    events: dict[float, Callable[[], None]] = {
        1.0: lambda: here.source.put("a", (0, 9)),
        6.0: lambda: here.source.commit("g", {("a", 0): 9}, members=False),
    }

    def sleep(seconds: float) -> None:
        here.clock.advance(seconds)
        for at in sorted(each for each in events if each <= here.clock.monotonic() - began):
            events.pop(at)()

    here.clock.sleep = sleep  # type: ignore[method-assign]
    assert here.cutover().run() == ["a"]
    assert here.target.log.found["a"].origin is None
    assert here.target.end("a") == 9
    assert here.target.log.offsets == {"g": {("a", 0): OffsetAndMetadata(9, "m")}}
    assert here.clock.monotonic() - began < 7.0
    assert here.cutover().run() == ["a"]  # again


def test_a_cutover_waits_for_an_open_transaction(here: Here) -> None:
    """Its records may still come; the mirror has not ended when patience is over."""
    here.source.put("a", (0, 5))
    here.source.open = {("a", 0): 6}
    with pytest.raises(errors.TimedOut, match="transaction is open in a-0"):
        here.cutover().run()
    assert here.target.log.found["a"].origin is not None


def test_a_cutover_of_a_topic_with_a_fault_is_refused(here: Here) -> None:
    """No mirror has ended then."""
    here.source.put("a", (0, 5))
    here.source.put("b", (0, 5))
    here.target.log.create_topic("a", 1, {"mirror.source": "another"})
    with pytest.raises(errors.BadRequest, match="a: topic 'a' of the target is the mirror"):
        here.cutover().run()
    assert here.target.log.found["b"].origin is not None


def test_a_cutover_that_was_stopped_is_run_again(here: Here) -> None:
    """Topics whose mirror has ended are left as they are, with their later records."""
    here.source.put("a", (0, 5))
    here.source.put("b", (0, 5))
    here.mirror.once()
    here.target.log.alter("a", {"mirror.source": None})
    found = here.target.log.found["a"]
    here.target.log.found["a"] = replace(found, partitions={0: Bounds(0, 8)})
    here.source.commit("g", {("a", 0): 5}, members=False)
    here.target.log.active = {"g"}
    assert here.cutover().run() == ["a", "b"]
    assert here.target.log.found["b"].origin is None


def test_records_after_a_cutover_are_named(here: Here) -> None:
    """A producer that was not stopped writes to the source; the error has the offsets."""
    here.source.put("a", (0, 5))
    alter = here.target.log.alter

    def late(topic: str, config: Mapping[str, str | None]) -> None:
        alter(topic, config)
        here.source.put("a", (0, 7))

    here.target.log.alter = late
    with pytest.raises(errors.BadRequest, match="a-0 from 5 up to 7"):
        here.cutover().run()
