"""Copies records of one topic to another: all, or a range of offsets or of times.

    spark-submit jobs/replay.py --root s3://bucket/log --from orders --to orders-test \\
        --start 2026-01-02T00:00Z --end 2026-01-03T00:00Z --speed 10 --times shift

Without a speed the range is written in one atomic step. With one it is split into windows by the
records' times. Each is written once, when it is due, under a number; after a stop, the next run
continues with the window after the last one that was written. A checkpoint in the target's root
records the offsets of the range, as the first run resolved them, and those of each window before it
is written. So later runs depend neither on later changes to the log, nor on its times.
"""

from __future__ import annotations

import enum
import hashlib
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Final

import typer

import sparklog
from sparklog.display import counted
from sparklog.jobs.ranges import EARLIEST, LATEST, Range, Source, range_of
from sparklog.jobs.running import echo, progress, run, spark_session
from sparklog.jobs.targets import (
    DryRunOption,
    PartitionsOption,
    Target,
    TargetTopicOption,
    check_run_name,
    last_line,
    root_for_spark,
)
from sparklog.jobs.windows import Checkpoint, Window
from sparklog.terminal.options import RootOption, root_metadata

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparklog.client.log import Log

_WINDOW_SECONDS: Final = 2.0
"""Wall-clock time between two windows. A write takes a few tenths of a second."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_KEPT: Final = "kept"
_BY_KEY: Final = "by key"
_NOTHING: Final = "{}: nothing to write, this run's records are in the topic"
_INTO_ITSELF: Final = "a topic cannot be replayed into itself: pass a different --to"


class Times(enum.StrEnum):
    """Timestamps of the new records."""

    KEEP = "keep"
    SHIFT = "shift"
    NOW = "now"


# ------------------------------------------------------------------------------ the job


SourceTopicOption = Annotated[
    str, typer.Option("--from", metavar="TOPIC", help="The topic to read.", show_default=False)
]

ToRootOption = Annotated[
    str | None,
    typer.Option(
        metavar="URI",
        help="The root of the topic to write to. Default: the same.",
        show_default=False,
    ),
]

StartOption = Annotated[
    str,
    typer.Option(
        metavar="POINT",
        help="The first record: earliest, a time in ISO 8601, or offsets of all partitions as"
        ' JSON: \'{"0": 17, "1": 4}\'.',
    ),
]

EndOption = Annotated[
    str,
    typer.Option(
        metavar="POINT", help="The end, which is exclusive: latest, or a point as for --start."
    ),
]

SpeedOption = Annotated[
    float | None,
    typer.Option(
        metavar="FACTOR",
        min=0.001,
        help="Write the records at this multiple of their original pace, according to their"
        " timestamps. Default: all at once.",
        show_default=False,
    ),
]

TimesOption = Annotated[
    Times,
    typer.Option(
        metavar="keep|shift|now",
        help="The new records' times. keep: the original ones; shift: moved to the time of the"
        " replay; now: the time of arrival.",
    ),
]

OnceAsOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Name the run: records of a run with this name are written once. Default: a name"
        " derived from these options.",
        show_default=False,
    ),
]


def replay(
    source_topic: SourceTopicOption,
    to: TargetTopicOption,
    root: RootOption = None,
    to_root: ToRootOption = None,
    partitions: PartitionsOption = None,
    start: StartOption = EARLIEST,
    end: EndOption = LATEST,
    speed: SpeedOption = None,
    times: TimesOption = Times.KEEP,
    once_as: OnceAsOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Copies records of a topic to another topic.

    Keys, values and headers are kept; so are partitions, if both topics have equally many. The same
    command continues a run that was stopped, and writes nothing more if the run is complete.

    Example: spark-submit jobs/replay.py --from orders --to orders-test --speed 10
    """
    source_root = root_for_spark(root)
    check_run_name(once_as)
    target = Target(root=to_root or source_root, topic=to, partitions=partitions)
    if to == source_topic and target.root == source_root:  # before a broker is started
        raise typer.BadParameter(_INTO_ITSELF)
    root_metadata(source_root)  # a misspelt path does not become a root
    with sparklog.connect(source_root, detached=True) as log:
        info = log.describe(source_topic)
        if target.is_topic(log, info):
            raise typer.BadParameter(_INTO_ITSELF)
        source = Source(root=source_root, topic=source_topic, topic_id=info.topic_id)
        found = target.find()
        options = (info.topic_id, start, end, speed, times)
        name = once_as or hashlib.sha256(repr(options).encode()).hexdigest()[:32]
        is_at_once = speed is None and found is not None and not dry_run
        if is_at_once and target.has(name):  # its points may no longer resolve
            typer.echo(_NOTHING.format(to))
            return
        job = {
            "source": f"{source_topic} {info.topic_id}",
            "start": start,
            "end": end,
            "speed": str(speed),
            "times": str(times),
        }
        noted = None
        if speed is not None and found is not None:
            noted = _checkpoint(target, name).check(job)
        if noted is not None and noted.starts is not None and noted.ends is not None:
            whole = Range(starts=noted.starts, ends=noted.ends)
            keeps_partitions = noted.job.get("partitions") == _KEPT
        else:
            whole = range_of(log, info, start, end)
            keeps_partitions = (found or partitions) == len(info.partitions)
        job["partitions"] = _KEPT if keeps_partitions else _BY_KEY
        echo(f"from {source_topic}, at most {counted(whole.count, 'record')}")
        how = "the same partitions" if keeps_partitions else "partitions by key"
        echo(f"to   {to}{'' if found is not None else ', to be created'}, {how}, times: {times}")
        if dry_run:
            typer.echo(f"{to}: nothing was written, because of --dry-run")
            return
        if found is None:
            target.create()
        spark = spark_session(f"replay {source_topic}", with_delta=False)
        replaying = _Replay(spark, source, target, name, times, keeps_partitions=keeps_partitions)
        began = time.perf_counter()
        count: int | None
        if speed is None:
            count = replaying.write_at_once(whole)
        else:
            kept = _checkpoint(target, name)
            kept.open(job, start=start, starts=whole.starts, ends=whole.ends)
            count = replaying.write_paced(log, kept, whole, speed)
    if count is None:
        typer.echo(_NOTHING.format(to))
    else:
        typer.echo(last_line(to, count, time.perf_counter() - began))


def _checkpoint(target: Target, name: str) -> Checkpoint:
    """Returns the checkpoint of a paced run, which belongs to the current topic."""
    digest = hashlib.sha256(target.name_of(name).encode()).hexdigest()[:32]
    advice = "Give this run a different name with --once-as."
    return Checkpoint(f"{target.root.rstrip('/')}/jobs/replay/{digest}", advice)


class _Replay:
    """One run."""

    def __init__(
        self,
        spark: SparkSession,
        source: Source,
        target: Target,
        name: str,
        times: Times,
        *,
        keeps_partitions: bool,
    ) -> None:
        self._spark = spark
        self._source = source
        self._target = target
        self._name = name
        self._times = times
        self._keeps_partitions = keeps_partitions

    def write_at_once(self, whole: Range) -> int:
        """Writes all records in one write, and returns their number.

        Requires that no run of this name has written any.
        """
        bounds = self._time_bounds(whole) if self._times is Times.SHIFT else None
        first = bounds[1] if bounds is not None else _EPOCH  # the last record's time becomes now
        with progress(self._spark, f"replay {self._source.topic}"):
            name = self._target.name_of(self._name)
            return self._write(whole, first, 1.0, idempotencyKey=name)

    def write_paced(self, log: Log, kept: Checkpoint, whole: Range, speed: float) -> int | None:
        """Writes one window at a time, and returns the number of records that this run has written.

        Windows are numbered from 1970 on. They are ranges of offsets: a record that is older than
        those before it is in their window. Returns None if all were already written. Raises
        `TopicChanged` if one of the topics is re-created meanwhile, and `DataLoss` if records are
        gone.
        """
        length = timedelta(seconds=_WINDOW_SECONDS * speed)
        newest = self._target.newest(self._name)
        plan, is_done = kept.last()
        if plan is not None and not is_done and newest is not None and newest >= plan.number:
            kept.finish(plan.number)
            is_done = True
        rest = whole if plan is None else whole.between(plan.ends, whole.ends)
        if plan is None and newest is not None:  # a release without checkpoints began the run
            at = _EPOCH + (newest + 1) * length
            rest = whole.between(log.offsets_for_times(self._source.topic, at), whole.ends)
        waiting = [plan] if plan is not None and not is_done else []
        for part in (*(each.part for each in waiting), rest):
            self._check_exists(log, part)
        bounds = self._time_bounds(rest) if rest.count else None
        if not waiting and bounds is None:
            return None
        name = self._target.name_of(self._name)
        began, count = time.monotonic(), 0
        for each in waiting:
            count += self._write_window(kept, each, name, speed)
        if bounds is None:
            return count
        first, last = ((each - _EPOCH) // length for each in bounds)
        if plan is not None:
            first = plan.number + 1
        elif newest is not None:
            first = newest + 1
        last = max(first, last)
        echo(f"     at this pace it takes {(last - first) * _WINDOW_SECONDS:,.0f} seconds")
        starts = rest.starts
        for number in range(first, last + 1):
            ends = rest.ends
            if number < last:
                until = _EPOCH + (number + 1) * length
                ends = log.offsets_for_times(self._source.topic, until)
            part = rest.between(starts, ends)
            self._check_exists(log, part)  # offsets and times may be those of a new topic
            if part.count:
                late = time.monotonic() - began - (number - first) * _WINDOW_SECONDS
                time.sleep(max(-late, 0.0))
                self._target.check(name, self._name)
                count += self._write_window(kept, kept.plan(number, part), name, speed, late)
            starts = part.ends
        self._target.check(name, self._name)
        return count

    def _write_window(
        self, kept: Checkpoint, plan: Window, name: str, speed: float, late_seconds: float = 0.0
    ) -> int:
        at = _EPOCH + plan.number * timedelta(seconds=_WINDOW_SECONDS * speed)
        written = self._write(plan.part, at, speed, txnAppId=name, txnVersion=str(plan.number))
        kept.finish(plan.number)
        behind = f", {late_seconds:.1f} s late" if late_seconds > _WINDOW_SECONDS else ""
        echo(f"{at:%Y-%m-%d %H:%M:%S}: {counted(written, 'record')}{behind}")
        return written

    def _check_exists(self, log: Log, part: Range) -> None:
        """Raises `DataLoss` if records of the part are gone, or `TopicChanged`."""
        part.check_exists(self._source.describe(log), "a new --once-as")

    def _time_bounds(self, part: Range) -> tuple[datetime, datetime] | None:
        """Returns the minimum and maximum timestamps of the records; None if there are none."""
        from pyspark.sql import functions as f

        found = (
            self._source.frame(self._spark, part, columns="timestamp")
            .select(f.unix_micros("timestamp").alias("us"))
            .agg(f.min("us"), f.max("us"))
            .first()
        )
        if found is None or found[0] is None:
            return None
        first, last = (_EPOCH + timedelta(microseconds=us) for us in found)
        return first, last

    def _write(self, part: Range, first: datetime, speed: float, **once: str) -> int:
        from pyspark.sql import Observation
        from pyspark.sql import functions as f

        rows = self._source.frame(self._spark, part, includeHeaders="true")
        if self._times is Times.SHIFT:
            age = (
                f.unix_micros("timestamp") - (first - _EPOCH) // timedelta(microseconds=1)
            ) / speed
            now = (datetime.now(UTC) - _EPOCH) // timedelta(microseconds=1)
            shifted = f.timestamp_micros(f.round(age).cast("bigint") + now)
            rows = rows.withColumn("timestamp", shifted)
        columns = ["key", "value", "headers"]
        columns += ["timestamp"] if self._times is not Times.NOW else []
        columns += ["partition"] if self._keeps_partitions else []
        observed = Observation()
        records = rows.select(columns).observe(observed, f.count(f.lit(1)).alias("count"))
        self._target.writer(records, **once).save()
        return int(observed.get["count"])


def main() -> None:
    """The program."""
    run(replay, "replay")


if __name__ == "__main__":
    main()
