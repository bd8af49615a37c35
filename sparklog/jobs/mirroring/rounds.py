"""Rounds of a mirror: inspect both sides, create missing topics, copy the next offsets.

Rules:

- A round is one atomic write by Spark. The target accepts it only if it begins at the target's
  current ends. So a repeated round, or one of a second mirror, neither duplicates nor skips
  records.
- Topics are written together. After a failure they are written one at a time until each has
  succeeded, so that a failing topic does not block the others; its retries back off.
- An error is retried until the patience is exhausted. A rejection is final if the target's ends did
  not move between two of them.
- A source partition without a leader does not block the others. Rounds skip it until it has one; a
  run without --follow waits for it until the patience is exhausted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeVar

from sparklog import errors, limits
from sparklog.client.offsets import TopicPartition
from sparklog.clock import Clock, SystemClock
from sparklog.display import counted
from sparklog.formats.topic_config import value_of
from sparklog.formats.topic_names import MIRROR_SOURCE
from sparklog.jobs.mirroring.groups import GroupOffsets, GroupsCopied
from sparklog.jobs.mirroring.plan import (
    Goal,
    Pair,
    Range,
    Ranges,
    Selection,
    config_changes,
    goal_of,
    is_reached,
    leaderless,
    named,
    ranges,
    split_config,
    with_ends_of,
)
from sparklog.jobs.mirroring.sides import Source, Target
from sparklog.jobs.running import echo, sentence, setting, spark_error_kinds

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

_FIRST_DELAY_SECONDS: Final = 1.0
_LAST_DELAY_SECONDS: Final = 30.0
_IDLE_SECONDS: Final = 0.1
_LAST_IDLE_SECONDS: Final = 1.0
_LOOK_SHARE: Final = 3
"""With nothing to copy, a wait is at least this many times as long as the last inspection."""
_SMALL_BYTES: Final = 6 * limits.KIB
"""10,000 such records, as many as a Spark batch for Python contains, fit in its limit of 64 MiB."""
_FEW_HEADERS: Final = 4
_NOT_SMALL: Final = "a record is not small"
_BATCH_BYTES: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
_ALL_BYTES: Final = str(2**31 - 1)
_TOLD_TOPICS: Final = 32
"""Maximum number of topics per write whose bytes are counted separately; more share an average."""
_REPORT_SECONDS: Final = 5.0
_PERIOD_SECONDS: Final = 10.0
"""Time between two comparisons of configurations, and of group offsets."""
_TASK_RECORDS: Final = 250_000
"""A round with more records per partition than this has more tasks than partitions."""
_ERROR_OF_OURS: Final = re.compile(r"sparklog\.errors\.(\w+)")
_DOWN: Final = (errors.Retriable, errors.OutcomeUnknown, OSError)

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of a mirror."""

    selection: Selection
    config: Mapping[str, str] = field(default_factory=dict)
    """Values for all mirrored topics, which override those of the source."""
    round_records: int = 2_000_000
    round_bytes: int = limits.GIB
    patience_seconds: float = 300.0
    skips_deleted: bool = False
    cuts_over: bool = False
    """Topics that have already been cut over are not faults."""


@dataclass(slots=True, kw_only=True)
class _Trouble:
    """A topic whose last write failed."""

    since: float
    """Monotonic time of the first failure in a row."""
    retry_at: float
    delay_seconds: float = _FIRST_DELAY_SECONDS
    refused_at: Mapping[int, int] | None = None
    """Positions at which the target rejected it."""


@dataclass(slots=True)
class Copied:
    """The figures of a run."""

    records: int = 0
    rounds: int = 0


class Round(NamedTuple):
    """A write: its records, and their bytes by source topic."""

    records: int
    sizes: Mapping[str, float]


class Copier(Protocol):
    """Copies the records of ranges."""

    def copy(self, parts: Ranges, names: Mapping[str, str]) -> Round:
        """Copies the records; `names`: the topics' names in the target."""
        ...


class SparkCopier:
    """Copies records in one write by Spark.

    Spark measures a batch for Python after each row, which takes a fifth of the write's time. This
    is disabled while all records are small, and a record that is not small fails the write. The
    write is then repeated with measuring enabled, as are later ones of its topics.
    """

    def __init__(self, spark: SparkSession, source: Source, target: Target) -> None:
        self._spark = spark
        self._source = source
        self._target = target
        self._large: set[str] = set()
        """Topics that have had a record that is not small."""

    def copy(self, parts: Ranges, names: Mapping[str, str]) -> Round:
        if self._large.isdisjoint(parts):
            try:
                with setting(self._spark, _BATCH_BYTES, _ALL_BYTES):
                    return self._copy(parts, names, are_small=True)
            except spark_error_kinds() as error:
                if _NOT_SMALL not in str(error):
                    raise self._source.fault(error, parts) or error from None
                self._large |= parts.keys()
        try:
            return self._copy(parts, names, are_small=False)
        except spark_error_kinds() as error:
            raise self._source.fault(error, parts) or error from None

    def _copy(self, parts: Ranges, names: Mapping[str, str], *, are_small: bool) -> Round:
        from pyspark.sql import Observation
        from pyspark.sql import functions as f

        offsets = {topic: sum(map(_offsets, each.values())) for topic, each in parts.items()}
        total = sum(offsets.values())
        size = _size()
        records = self._source.frame(self._spark, parts, tasks=total // _TASK_RECORDS)
        if are_small:
            has_few = f.coalesce(f.size("headers"), f.lit(0)) <= _FEW_HEADERS
            is_small = has_few & (size <= _SMALL_BYTES)
            value = f.when(is_small, f.col("value")).otherwise(f.raise_error(f.lit(_NOT_SMALL)))
            records = records.withColumn("value", value)
        told = sorted(parts) if 1 < len(parts) <= _TOLD_TOPICS else []
        sums = [f.sum(f.when(f.col("topic") == topic, size)) for topic in told]
        named = [each.alias(str(number)) for number, each in enumerate(sums)]
        count, whole = f.count(f.lit(1)).alias("count"), f.sum(size).alias("bytes")
        counted = Observation()
        self._target.write(records.observe(counted, count, whole, *named), parts, names)
        found = counted.get
        if told:
            sizes = {topic: float(found[str(number)] or 0) for number, topic in enumerate(told)}
        else:
            average = (found["bytes"] or 0) / max(total, 1)
            sizes = {topic: average * count for topic, count in offsets.items()}
        return Round(int(found["count"]), sizes)


def _offsets(part: Range) -> int:
    return part.until - part.start


def _size() -> Column:
    """Returns the bytes of a record's key, value and headers; an estimate if headers are many.

    Spark has no fast way to sum a whole array.
    """
    from pyspark.sql import functions as f

    def length(column: Column) -> Column:
        return f.coalesce(f.octet_length(column), f.lit(0)).cast("bigint")

    first = [f.get("headers", f.lit(index)) for index in range(_FEW_HEADERS)]
    headers = [length(each[name]) for each in first for name in ("key", "value")]
    share = f.greatest(f.coalesce(f.size("headers"), f.lit(0)) / _FEW_HEADERS, f.lit(1.0))
    return length(f.col("key")) + length(f.col("value")) + sum(headers[1:], headers[0]) * share


class Mirror:
    """A source and a target, and the topics that cannot be mirrored, with reasons."""

    def __init__(
        self,
        copier: Copier,
        source: Source,
        target: Target,
        settings: Settings,
        *,
        groups: GroupOffsets | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._copier = copier
        self._source = source
        self._target = target
        self._settings = settings
        self._groups = groups
        self._clock = clock or SystemClock()
        self._troubles: dict[str, _Trouble] = {}
        self._refused: dict[str, str] = {}
        self._unnamed: dict[str, str] = {}
        """Faults in the topics' names, as of the last inspection."""
        self._sizes: dict[str, float] = {}
        """Bytes per offset in the last write, by source topic."""
        self._look_seconds = 0.0
        self._idle_seconds = _IDLE_SECONDS
        self._leaderless: dict[str, Sequence[int]] = {}
        """Partitions without a leader as of the last inspection, by source topic."""
        self._started: set[tuple[str, int]] = set()
        """Target partitions whose log start has been checked."""
        self._configured_at: float | None = None
        self._grouped_at: float | None = None
        self._reported_at = self._clock.monotonic()
        self._reported = 0
        self.copied = Copied()
        self.groups = GroupsCopied()
        """The last outcome for groups."""
        self.faults: dict[str, str] = {}
        self.cut_over: list[str] = []
        """Target names of topics that were already cut over."""

    # ------------------------------------------------------------------------ looking

    def pairs(self) -> list[Pair]:
        """Returns the state of each selected topic."""
        names, self._unnamed = self._settings.selection.names(self._source.names())
        targets = self._target.topics(names.values())  # first: its ends must not be newer
        sources = self._source.topics(names)
        return [
            Pair(
                source=sources[topic],
                cluster=self._source.cluster,
                name=name,
                target=targets.get(name),
            )
            for topic, name in names.items()
            if topic in sources
        ]

    def look(self) -> list[Pair]:
        """Returns the state of each topic that can be mirrored; updates `faults`."""
        pairs = self.pairs()
        if self._settings.cuts_over:
            self.cut_over = [pair.name for pair in pairs if pair.was_cut_over]
            pairs = [pair for pair in pairs if not pair.was_cut_over]
        found = {**self._unnamed, **self._refused}
        for pair in pairs:
            reason = pair.fault(skips_deleted=self._settings.skips_deleted)
            if reason is not None:
                found[pair.topic] = reason
        for topic, reason in found.items():
            if self.faults.get(topic) != reason:
                echo(f"{topic}: not mirrored: {reason}")
        self.faults = found
        self._report_leaderless(pairs)
        return [pair for pair in pairs if pair.topic not in found]

    def _report_leaderless(self, pairs: Sequence[Pair]) -> None:
        """Reports partitions when they lose their leader, and when they have one again."""
        found = {pair.topic: pair.source.leaderless for pair in pairs if pair.source.leaderless}
        for topic in sorted(found.keys() | self._leaderless.keys()):
            now, before = (each.get(topic, ()) for each in (found, self._leaderless))
            if lost := sorted({*now} - {*before}):
                echo(f"{topic}: {named(lost)} no leader at the source, the others are copied")
            if back := sorted({*before} - {*now}):
                echo(f"{topic}: {named(back)} a leader again")
        self._leaderless = found

    def patiently(self, step: Callable[[], _Result]) -> _Result:
        """Retries a step while a side does not answer. Raises the error once patience runs out."""
        since: float | None = None
        delay = _FIRST_DELAY_SECONDS
        while True:
            try:
                return step()
            except _DOWN as error:
                now = self._clock.monotonic()
                since = now if since is None else since
                if now - since >= self._settings.patience_seconds:
                    raise
                echo(f"{error} Retrying in {delay:g} s.")
                self._clock.sleep(delay)
                delay = min(2 * delay, _LAST_DELAY_SECONDS)

    # ------------------------------------------------------------------------ runs

    def once(self, goal: Goal | None = None) -> None:
        """Copies all that the source has at the first inspection, or everything up to `goal`.

        Raises `BadOption` if no topic is selected.
        """
        since: float | None = None
        unknown: set[TopicPartition] = set()
        while True:
            pairs = self.patiently(self.prepared)
            if goal is None:
                self._check_any(pairs)
                goal = goal_of(pairs)
            wanted = [pair for pair in pairs if pair.topic in goal]
            self._miss(goal, wanted)
            goal = with_ends_of(goal, wanted, unknown)
            unknown |= {(pair.topic, n) for pair in wanted for n in pair.source.leaderless}
            if is_reached(wanted, goal):
                missing = leaderless(wanted, goal)
                if not missing:
                    self._copy_groups(pairs)
                    return
                now = self._clock.monotonic()
                since = now if since is None else since
                if now - since >= self._settings.patience_seconds:
                    for topic, numbers in missing.items():
                        self._refuse(topic, f"{named(numbers)} no leader at the source")
            else:
                since = None  # all partitions have a leader again
            self._copy(wanted, goal)

    def follow(self) -> None:
        """Copies until it is stopped. Returns if no topic is left that can be mirrored."""
        has_told = False
        while True:
            pairs = self.patiently(self.prepared)
            if not pairs and self.faults:
                return
            if not (pairs or has_told):
                echo("no topic of the source matches; waiting for one")
                has_told = True
            self._copy(pairs, None)
            if self._is_due(self._grouped_at):
                self._grouped_at = self._clock.monotonic()
                self._copy_groups(pairs)

    def _is_due(self, last: float | None) -> bool:
        """Returns whether a periodic task, which does not depend on records, is due."""
        return last is None or self._clock.monotonic() >= last + _PERIOD_SECONDS

    def _copy_groups(self, pairs: Sequence[Pair]) -> None:
        groups = self._groups
        if groups is not None:
            self.groups = self.patiently(lambda: groups.copy(pairs))

    def _check_any(self, pairs: Sequence[Pair]) -> None:
        if not (pairs or self.faults or self.cut_over):
            pattern = self._settings.selection.topics.pattern
            reason = "no topic of the source matches"
            raise errors.BadOption(option="--topics", value=pattern, reason=reason)

    def _miss(self, goal: Goal, pairs: Sequence[Pair]) -> None:
        """Rejects goal topics that no longer exist."""
        for topic in goal.keys() - {pair.topic for pair in pairs} - self.faults.keys():
            self._refuse(topic, "it was deleted at the source")

    def _refuse(self, topic: str, reason: str) -> None:
        self._refused[topic] = self.faults[topic] = reason
        echo(f"{topic}: not mirrored: {reason}")

    def _copy(self, pairs: Sequence[Pair], goal: Goal | None) -> None:
        """Copies one round; if there is nothing to copy, waits longer each time."""
        now = self._clock.monotonic()
        due = [
            pair
            for pair in pairs
            if pair.topic not in self._troubles or self._troubles[pair.topic].retry_at <= now
        ]
        parts = ranges(
            due,
            self._settings.round_records,
            goal,
            most_bytes=self._settings.round_bytes,
            sizes=self._sizes,
        )
        if parts:
            self._idle_seconds = _IDLE_SECONDS
        else:
            self._clock.sleep(max(self._idle_seconds, _LOOK_SHARE * self._look_seconds))
            self._idle_seconds = min(2 * self._idle_seconds, _LAST_IDLE_SECONDS)
        sound = {topic: each for topic, each in parts.items() if topic not in self._troubles}
        for some in (sound, *({t: each} for t, each in parts.items() if t in self._troubles)):
            if some:
                self._write(some, {pair.topic: pair for pair in due})
        self._report(pairs)

    # ------------------------------------------------------------------------ topics

    def prepared(self) -> list[Pair]:
        """Inspects both sides, and again after creating any missing topics and partitions.

        Configurations are compared only periodically, because nothing depends on them immediately.
        """
        began = self._clock.monotonic()
        pairs = self.look()
        self._look_seconds = self._clock.monotonic() - began
        missing = [pair for pair in pairs if self._is_missing(pair)]
        if missing or self._is_due(self._configured_at):
            self._configured_at = self._clock.monotonic()
            self._configure(pairs)
        if missing:
            pairs = self.look()
        for pair in pairs:
            self._start_log(pair)
        return pairs

    @staticmethod
    def _is_missing(pair: Pair) -> bool:
        found = pair.target
        return found is None or found.origin is None or len(found.partitions) < pair.source.count

    def config_of(self, own: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
        """Returns the configuration of a mirrored topic, and the source's keys that it lacks."""
        taken, left = split_config(own)
        return {**taken, **self._settings.config}, left

    def configs(self, pairs: Iterable[Pair]) -> dict[str, dict[str, str]]:
        """Returns the topic-level configurations at the source, of topics that exist."""
        return self._source.configs(pair.topic for pair in pairs)

    def _configure(self, pairs: Sequence[Pair]) -> None:
        configs = self.configs(pairs)
        for pair in pairs:
            own = configs.get(pair.topic)
            if own is None:
                continue  # it has been deleted since
            try:
                self._configure_one(pair, own)
            except (errors.TopicExists, errors.UnknownTopic):
                continue  # created or deleted since, as the next inspection will find
            except errors.Invalid as error:
                self._refuse(pair.topic, str(error))

    def _configure_one(self, pair: Pair, own: Mapping[str, str]) -> None:
        wanted, left = self.config_of(own)
        count = pair.source.count
        found = pair.target
        if found is None:
            origin = {MIRROR_SOURCE: pair.origin}
            self._target.log.create_topic(pair.name, count, {**wanted, **origin})
            without = f", without {', '.join(left)}" if left else ""
            echo(f"{pair.topic}: created {pair.name} with {counted(count, 'partition')}{without}")
            return
        if len(found.partitions) < count:
            self._target.log.add_partitions(pair.name, count)
            echo(f"{pair.topic}: {pair.name} has {counted(count, 'partition')} now")
        changes = config_changes(found.config, wanted)
        if found.origin is None:
            changes[MIRROR_SOURCE] = pair.origin
        if changes:
            self._target.log.alter(pair.name, changes)

    def _start_log(self, pair: Pair) -> None:
        """Sets the log start of new partitions to that of the source, if they begin with a gap.

        This follows the records, because a log start cannot be beyond a partition's end. A run that
        is killed between the two leaves it to the next one, which checks each partition once.
        """
        found = pair.target
        if found is None or "delete" not in value_of(found.config, "cleanup.policy").split(","):
            return  # the first offsets of a topic that is only compacted stay a gap
        places = {
            number: bounds.start
            for number, bounds in pair.source.partitions.items()
            if (pair.name, number) not in self._started
            and number in found.partitions
            and found.partitions[number].start == 0 < min(bounds.start, pair.position(number))
        }
        if not places:
            return
        self._started |= {(pair.name, number) for number in places}
        try:
            firsts = self._target.first_offsets(pair.name, places)
            starts = {n: min(first, places[n]) for n, first in firsts.items() if first}
            if starts:
                self._target.log.delete_records(pair.name, starts)
        except errors.Invalid:
            return  # deleted or reconfigured since
        except _DOWN as error:
            echo(f"{pair.topic}: {error} The next run sets the log start of {pair.name}.")

    # ------------------------------------------------------------------------ writing

    def _write(self, parts: Ranges, pairs: Mapping[str, Pair]) -> None:
        """Copies the ranges, or records the failure of their topics."""
        failures: tuple[type[Exception], ...] = (*spark_error_kinds(), errors.BadValue, *_DOWN)
        try:
            done = self._copier.copy(parts, {topic: pairs[topic].name for topic in parts})
        except failures as error:
            for topic in parts:
                self._sizes.pop(topic, None)  # the next attempt is small
            self._fail(error, parts)
            return
        for topic, each in parts.items():
            self._troubles.pop(topic, None)
            if count := sum(map(_offsets, each.values())):
                self._sizes[topic] = done.sizes[topic] / count
        self.copied.rounds += 1
        self.copied.records += done.records

    def _fail(self, error: Exception, parts: Ranges) -> None:
        now = self._clock.monotonic()
        if len(parts) > 1:
            echo(f"{sentence(error)} Topics are written one at a time.")
            for topic in parts:
                self._troubles[topic] = _Trouble(since=now, retry_at=now)
            return
        ((topic, each),) = parts.items()
        trouble = self._troubles.setdefault(topic, _Trouble(since=now, retry_at=now))
        positions = {number: r.first for number, r in each.items()}
        is_final = is_refusal(error) and trouble.refused_at == positions
        if is_final or now - trouble.since >= self._settings.patience_seconds:
            del self._troubles[topic]
            self._refuse(topic, sentence(error))
            return
        trouble.refused_at = positions if is_refusal(error) else None
        trouble.retry_at = now + trouble.delay_seconds
        echo(f"{topic}: {sentence(error)} Retrying in {trouble.delay_seconds:g} s.")
        trouble.delay_seconds = min(2 * trouble.delay_seconds, _LAST_DELAY_SECONDS)

    def _report(self, pairs: Sequence[Pair]) -> None:
        now = self._clock.monotonic()
        seconds = now - self._reported_at
        if seconds < _REPORT_SECONDS:
            return
        rate = (self.copied.records - self._reported) / seconds
        lag = sum(pair.lag for pair in pairs)
        if not (rate or lag):
            return
        echo(f"{counted(self.copied.records, 'record')}, {rate:,.0f} records/s, lag was {lag:,}")
        self._reported_at, self._reported = now, self.copied.records


def is_refusal(error: Exception) -> bool:
    """Returns whether an error means that the write was rejected, and would be again."""
    if isinstance(error, errors.Invalid):
        return True
    kinds = [getattr(errors, name, None) for name in _ERROR_OF_OURS.findall(str(error))]
    return any(isinstance(each, type) and issubclass(each, errors.Invalid) for each in kinds)
