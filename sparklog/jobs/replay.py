"""Records of one topic become records of another: all, or a range of offsets or of times.

    spark-submit jobs/replay.py --root s3://bucket/log --from orders --to orders-test \\
        --start 2026-01-02T00:00Z --end 2026-01-03T00:00Z --speed 10 --times shift

Without a speed the range is written at once, in one step. With one it is cut into windows of the
records' times. Each is written once, when its turn comes, under a number; a run that is stopped
continues with the window after the last one that was written.
"""

from __future__ import annotations

import enum
import hashlib
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Final

import typer

import sparklog
from sparklog.cli.shared import RootOption, root_metadata
from sparklog.jobs.ranges import EARLIEST, LATEST, Range, Source, range_of
from sparklog.jobs.running import echo, progress, run, spark_session
from sparklog.jobs.targets import PartitionsOption, Target, last_line, root_for_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparklog.client.log import Log

_WINDOW_SECONDS: Final = 2.0
"""The time on the clock between two windows. A write takes some tenths of a second."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Times(enum.StrEnum):
    """Timestamps of the new records."""

    KEEP = "keep"
    SHIFT = "shift"
    NOW = "now"


# ------------------------------------------------------------------------------ the job


def replay(
    source_topic: Annotated[
        str,
        typer.Option("--from", metavar="TOPIC", help="The topic to read.", show_default=False),
    ],
    to: Annotated[
        str, typer.Option(metavar="TOPIC", help="The topic to write to.", show_default=False)
    ],
    root: RootOption = None,
    to_root: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help="The root of the topic to write to. Default: the same.",
            show_default=False,
        ),
    ] = None,
    partitions: PartitionsOption = None,
    start: Annotated[
        str,
        typer.Option(
            metavar="POINT",
            help="The first record: earliest, a time in ISO 8601, or offsets of all partitions as"
            ' JSON: \'{"0": 17, "1": 4}\'.',
        ),
    ] = EARLIEST,
    end: Annotated[
        str,
        typer.Option(
            metavar="POINT", help="The end, before which the last record is; latest, or as above."
        ),
    ] = LATEST,
    speed: Annotated[
        float | None,
        typer.Option(
            metavar="FACTOR",
            min=0.001,
            help="Write the records at this multiple of their original pace, as their timestamps"
            " have it. Default: all at once.",
            show_default=False,
        ),
    ] = None,
    times: Annotated[
        Times,
        typer.Option(
            metavar="keep|shift|now",
            help="The new records' times. keep: the original ones; shift: later by as much as makes"
            " them the time of the replay; now: the time of arrival.",
        ),
    ] = Times.KEEP,
    once_as: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name the run: records of a run of this name are written once. Default: a name"
            " made of these options.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be written, and write nothing.")
    ] = False,
) -> None:
    """Copies records of a topic to another topic.

    Keys, values and headers stay; so do partitions, if both topics have as many. A run that is
    stopped is continued by the same command, and one that is repeated writes nothing more.

    Example: spark-submit jobs/replay.py --from orders --to orders-test --speed 10
    """
    source_root = root_for_spark(root)
    target = Target(root=to_root or source_root, topic=to, partitions=partitions)
    if (source_root, source_topic) == (target.root, target.topic):
        raise typer.BadParameter("a topic is not replayed into itself: give another one as --to")
    root_metadata(source_root)  # a misspelt path does not become a root
    with sparklog.connect(source_root, detached=True) as log:
        info = log.describe(source_topic)
        source = Source(root=source_root, topic=source_topic, topic_id=info.topic_id)
        whole = range_of(log, info, start, end)
        found = target.find()
        options = (info.topic_id, start, end, speed, times)
        name = once_as or hashlib.sha256(repr(options).encode()).hexdigest()[:32]
        keeps_partitions = (found or partitions) == len(info.partitions)
        echo(f"from {source_topic}, at most {whole.count:,} records")
        how = "the same partitions" if keeps_partitions else "partitions by key"
        echo(f"to   {to}{'' if found is not None else ', to be created'}, {how}, times: {times}")
        if dry_run:
            typer.echo(f"{to}: nothing was written, because of --dry-run")
            return
        if found is None:
            target.create()
        spark = spark_session(f"replay {source_topic}", with_delta=False)
        job = _Replay(spark, source, target, name, times, keeps_partitions=keeps_partitions)
        began = time.perf_counter()
        count = job.write_at_once(whole) if speed is None else job.write_paced(log, whole, speed)
    if count is None:
        typer.echo(f"{to}: nothing to write, this run's records are in the topic")
    else:
        typer.echo(last_line(to, count, time.perf_counter() - began))


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

    def write_at_once(self, whole: Range) -> int | None:
        """Returns the number of records; None if they were written before."""
        if self._target.has(self._name):
            return None
        bounds = self._time_bounds(whole) if self._times is Times.SHIFT else None
        first = bounds[1] if bounds is not None else _EPOCH  # the last record's time becomes now
        with progress(self._spark, f"replay {self._source.topic}"):
            name = self._target.name_of(self._name)
            return self._write(whole, first, 1.0, idempotencyKey=name)

    def write_paced(self, log: Log, whole: Range, speed: float) -> int | None:
        """Writes window after window, and returns the number of records that this run has written.

        Windows are numbered from 1970 on, so that a run that continues cuts them the same way. They
        are ranges of offsets: a record that is older than those before it is in their window.
        Raises `TopicChanged` if one of the topics is created again meanwhile.
        """
        bounds = self._time_bounds(whole)
        if bounds is None:
            return None
        length = timedelta(seconds=_WINDOW_SECONDS * speed)
        first, last = ((each - _EPOCH) // length for each in bounds)
        newest = self._target.newest(self._name)
        if newest is not None:
            first = max(first, newest + 1)
        if first > last:
            return None
        echo(f"     at this pace it takes {(last - first) * _WINDOW_SECONDS:,.0f} seconds")
        name = self._target.name_of(self._name)
        began, count = time.monotonic(), 0
        at = _EPOCH + first * length
        starts = whole.starts if newest is None else log.offsets_for_times(self._source.topic, at)
        for number in range(first, last + 1):
            until = _EPOCH + (number + 1) * length
            ends = whole.ends
            if number < last:
                ends = log.offsets_for_times(self._source.topic, until)
            part = whole.between(starts, ends)
            self._source.describe(log)  # these offsets may be of another topic, and its times
            if part.count:
                late = time.monotonic() - began - (number - first) * _WINDOW_SECONDS
                time.sleep(max(-late, 0.0))
                self._target.check(name, self._name)
                written = self._write(part, at, speed, txnAppId=name, txnVersion=str(number))
                count += written
                behind = f", {late:.1f} s late" if late > _WINDOW_SECONDS else ""
                echo(f"{at:%Y-%m-%d %H:%M:%S}: {written:,} records{behind}")
            starts, at = ends, until
        self._target.check(name, self._name)
        return count

    def _time_bounds(self, part: Range) -> tuple[datetime, datetime] | None:
        """Returns the least and the greatest timestamp of the records; None: there are none."""
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
        counted = Observation()
        records = rows.select(columns).observe(counted, f.count(f.lit(1)).alias("count"))
        self._target.writer(records, **once).save()
        return int(counted.get["count"])


def main() -> None:
    """The program."""
    run(replay, "replay")


if __name__ == "__main__":
    main()
