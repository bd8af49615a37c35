"""Topics as DataFrames whose published records Spark reads with Delta's own scan.

Published records come through Delta's scan, with column pruning and filter pushdown; the others
come through `format("sparklog")`. Both are cut at the same offsets, so each record comes once, and
every evaluation has the same rows, however far the table has grown since.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from sparklog import errors
from sparklog.clock import SystemClock
from sparklog.options import ROOT_VARIABLE, SPARK_ROOT_VARIABLE, without_credentials
from sparklog.sources import ranges, starting_offsets, tasks
from sparklog.sources.batch import planner_of, range_of
from sparklog.sources.offsets import Position
from sparklog.sources.options import LogLocation, SourceOptions, parse
from sparklog.sources.planner import Planner, patiently
from sparklog.sources.scan import ddl
from sparklog.spark_compat import STREAMS_HAVE_LIMITS
from sparklog.storage.objects import open_store
from sparklog.storage.snapshot import Slice
from sparklog.storage.table.names import table_folder

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_OF_LOG: Final = ("root", "path", "failondataloss")
"""Options of every read, besides `storage.*`."""

_OF_RECORDS: Final = (
    *("columns", "includeheaders", "valueformat"),
    *("minpartitions", "maxrecordsperpartition"),
)
"""Options of a read of records, besides its range."""

_NO_DELTA: Final = (
    "[DATA_SOURCE_NOT_FOUND]",  # without its jars
    "[DELTA_CONFIGURE_SPARK_SESSION_WITH_EXTENSION_AND_CATALOG]",
)
"""Conditions of Spark's errors where a session cannot read a Delta table."""

_FEW_PARTITIONS: Final = 64
"""Up to this number, comparing one after another is faster in Spark than a lookup."""


def dataframe(
    spark: SparkSession, root: str | None, topic: str | Iterable[str], **options: object
) -> DataFrame:
    """Returns the current records of topics, in the columns of `format("sparklog")`.

    Args:
        spark: a session with Delta, which can open the root's URI by itself.
        root: a folder or URI; None: `SPARKLOG_ROOT`.
        topic: a name, or several.
        options: of a batch read through `format("sparklog")`, such as `startingOffsets`,
            `endingTimestamp`, `includeHeaders`, `columns`. And `sparkRoot`: the root's URI for
            Spark's own readers, where it differs, such as `s3a://bucket/log`; by default
            `SPARKLOG_SPARK_ROOT`, if the root is that of `SPARKLOG_ROOT`, and otherwise the root.

    Start and end are fixed by the call. After a topic is deleted and created again, call it again:
    Delta's scan knows the table by its path only. It does not report a loss either: records that
    are deleted after the call are missing.

    Raises what `format("sparklog")` raises, and `BadRequest` where the session has no Delta.
    """
    frames = _frames(root, topic, options)
    frames.options.check_batch()
    planner = planner_of(frames.options)
    planner.refresh()
    start, end = range_of(planner, frames.options)
    if not end:
        raise errors.UnknownTopic(topic=", ".join(frames.options.selection.topics))
    return frames.between(spark, start, end, planner.published())


def foreach_dataframe(
    spark: SparkSession,
    root: str | None,
    topic: str | Iterable[str],
    function: Callable[[DataFrame, int], None],
    **options: object,
) -> DataStreamWriter:
    """Returns the writer of a stream that calls a function with each micro-batch.

    It is `foreachBatch` with the records as in `dataframe`, and in no order. Call the writer's
    `option`, `trigger` and `start`.

    Args:
        spark: a session with Delta, which can open the root's URI by itself.
        root: a folder or URI; None: `SPARKLOG_ROOT`.
        topic: a name, or several.
        function: called with the micro-batch and its number; again with the same ones if Spark
            does not know that it returned.
        options: of a stream through `format("sparklog")`, such as `startingOffsets`,
            `maxOffsetsPerTrigger`, `columns`, and `sparkRoot` as in `dataframe`.

    A micro-batch is read at the version of the table that it was planned with, so that it has its
    records even if retention or a compaction changes the table meanwhile, as long as the files of
    that version exist. The query ends with an error if they do not.

    Raises what `format("sparklog")` raises. The query ends with `BadRequest` where the session has
    no Delta.
    """
    frames = _frames(root, topic, options)
    frames.options.check_stream(has_limits=STREAMS_HAVE_LIMITS)
    of_stream = {
        name: value for name, value in frames.given.items() if name.lower() not in _OF_RECORDS
    }
    source = spark.readStream.format("sparklog").options(**of_stream).option("rows", "ranges")
    return source.load().writeStream.foreachBatch(_MicroBatches(frames, function))


class _MicroBatches:
    """Function for `foreachBatch` that calls another one with the records of the ranges it gets."""

    def __init__(self, frames: _Frames, function: Callable[[DataFrame, int], None]) -> None:
        self._frames = frames
        self._function = function
        self._planner: Planner | None = None  # made on first use: Spark Connect pickles this object

    def __call__(self, batch: DataFrame, number: int) -> None:
        if self._planner is None:
            self._planner = planner_of(self._frames.options)
        planner, rows = self._planner, batch.collect()

        def left() -> list[Slice]:
            planner.refresh()
            return planner.left(rows)

        start, end = ranges.positions(tasks.ranges(patiently(left, SystemClock())))
        frame = self._frames.between(
            batch.sparkSession, start, end, planner.published(), versions=planner.versions()
        )
        self._function(frame, number)


def _frames(root: str | None, topic: str | Iterable[str], options: Mapping[str, object]) -> _Frames:
    names = [topic] if isinstance(topic, str) else list(topic)
    given = {name: _text(value) for name, value in options.items()}
    spark_root = next((given.pop(name) for name in options if name.lower() == "sparkroot"), None)
    if root is not None:
        given["root"] = str(root)
    for name, value in given.items():
        if name.lower() == "subscribe":
            reason = "name the topics by the argument `topic`"
            raise errors.BadOption(option=name, value=value, reason=reason)
    given["subscribe"] = ",".join(names)
    parsed = parse(given)
    if parsed.location.root is None:
        raise errors.BadOption(
            option="root", value=root, reason="Delta's scan needs the root, not a broker"
        )
    if parsed.value_format != "binary":
        reason = "use Spark's own from_json(CAST(value AS STRING), …) here"
        raise errors.BadOption(option="valueFormat", value=parsed.value_format, reason=reason)
    uri = _spark_uri(spark_root, parsed.location)
    return _Frames(given=given, options=parsed, root_uri=uri)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _spark_uri(spark_root: str | None, location: LogLocation) -> str:
    """Returns the URI of the root for Spark's own readers, which decode no percent escapes.

    Raises `BadOption` if Spark has another notation for the store, and none is given.
    """
    if spark_root is None and location.root == os.environ.get(ROOT_VARIABLE):
        spark_root = os.environ.get(SPARK_ROOT_VARIABLE)
    if spark_root:
        return spark_root.rstrip("/")
    assert location.root is not None
    if location.root.startswith("az://"):
        reason = "Spark does not read az://; give the root as abfss://container@account…"
        raise errors.BadOption(option="sparkRoot", value=None, reason=reason)
    uri = open_store(location.root, dict(location.storage)).uri
    return unquote(uri) if uri.startswith("file://") else uri


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frames:
    """Frames of ranges of topics."""

    given: Mapping[str, str] = field(repr=False)
    options: SourceOptions
    root_uri: str
    """As Spark's own readers spell it."""

    def between(
        self,
        spark: SparkSession,
        start: Position,
        end: Position,
        published: Position,
        versions: Mapping[str, int] | None = None,
    ) -> DataFrame:
        """Returns the records from `start` to `end`, of the partitions that these name.

        Args:
            published: ends of the tables.
            versions: of the tables, to be read at these; None: as they are when they are read.

        Raises `BadRequest` where the session has no Delta, and `BadOption` for a root that Spark
        does not open.
        """
        frames = []
        tail_start, tail_end = {}, {}
        for name in sorted(end):
            first, last, table = start[name].offsets, end[name].offsets, published[name].offsets
            cut = {each: max(first[each], min(table[each], last[each])) for each in last}
            if cut != first:
                version = None if versions is None else versions[name]
                frames.append(self._published(spark, name, _inside(first, cut), version))
            if cut != last:
                tail_start[name], tail_end[name] = cut, last
        if tail_end:
            frames.append(self._tail(spark, tail_start, tail_end))
        if not frames:
            return spark.createDataFrame([], ddl(self.options))
        return reduce(lambda one, other: one.unionAll(other), frames)

    def _published(
        self, spark: SparkSession, name: str, inside: Column, version: int | None
    ) -> DataFrame:
        """Returns Delta's scan."""
        from pyspark.sql import functions as f

        reader = spark.read.format("delta")
        if version is not None:
            reader = reader.option("versionAsOf", version)
        try:
            table = reader.load(f"{self.root_uri}/{table_folder(name)}")
        except Exception as error:
            # A Py4JJavaError where PySpark does not know the class, so the text decides.
            if any(each in str(error) for each in _NO_DELTA):
                reason = (
                    "The session has no Delta. Build it with delta.configure_spark_with_delta_pip"
                    " and the settings"
                    " spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension and"
                    " spark.sql.catalog.spark_catalog="
                    "org.apache.spark.sql.delta.catalog.DeltaCatalog,"
                    ' or read through format("sparklog").'
                )
                raise errors.BadRequest(reason=reason) from error
            if "No FileSystem for scheme" in str(error):
                reason = (
                    f"Spark cannot open {without_credentials(self.root_uri)}; give the root in"
                    " Spark's notation, such as s3a://…"
                )
                raise errors.BadOption(option="sparkRoot", value=None, reason=reason) from error
            raise
        nullable = f.when(f.col("offset").isNotNull(), f.lit(name))  # as the source has it
        return table.where(inside).withColumn("topic", nullable).select(*self.options.columns)

    def _tail(
        self,
        spark: SparkSession,
        start: Mapping[str, Mapping[int, int]],
        end: Mapping[str, Mapping[int, int]],
    ) -> DataFrame:
        """Returns the records that are not published yet, through the source."""
        numbers = {name: list(offsets) for name, offsets in end.items()}
        where = {
            "assign": starting_offsets.encode_partitions(numbers),
            "startingOffsets": starting_offsets.encode(start),
            "endingOffsets": starting_offsets.encode(end),
        }
        kept = {
            name: value
            for name, value in self.given.items()
            if name.lower().startswith("storage.") or name.lower() in (*_OF_LOG, *_OF_RECORDS)
        }
        return spark.read.format("sparklog").options(**kept, **where).load()


def _inside(start: Mapping[int, int], end: Mapping[int, int]) -> Column:
    """Returns whether a row is in its partition's range; the outermost bounds skip files.

    A partition without a range has no rows here, and nor have rows of other engines beyond an end.
    """
    from pyspark.sql import functions as f

    offset, partition = f.col("offset"), f.col("partition")

    def of_partition(bounds_of: Mapping[int, int]) -> Column:
        if len(bounds_of) <= _FEW_PARTITIONS:
            cases = [(partition == number, _long(bounds_of[number])) for number in bounds_of]
            return reduce(lambda found, case: found.when(*case), cases[1:], f.when(*cases[0]))
        numbers = range(max(bounds_of) + 1)
        lookup = f.array(*(_long(bounds_of.get(number, 0)) for number in numbers))
        return f.try_element_at(lookup, partition + 1)

    inside = (offset < max(end.values())) & (offset < of_partition(end))
    if any(start.values()):
        inside &= (offset >= min(start.values())) & (offset >= of_partition(start))
    return inside


def _long(value: int) -> Column:
    from pyspark.sql import functions as f

    return f.lit(value).cast("long")
