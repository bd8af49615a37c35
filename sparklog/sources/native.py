"""Topics as DataFrames whose published records Spark reads with Delta's own scan.

Published records are read through Delta's scan, with column pruning and filter pushdown; the others
through `format("sparklog")`. Both are bounded by the same offsets, so each record is read once, and
every evaluation returns the same rows, however much the table has grown since.
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
from sparklog.sources.batch import planner_of, range_of, typed_columns
from sparklog.sources.offsets import Position
from sparklog.sources.options import TYPED, LogLocation, SourceOptions, parse
from sparklog.sources.planner import Planner, patiently
from sparklog.sources.scan import ddl
from sparklog.spark_compat import STREAMS_HAVE_LIMITS
from sparklog.storage.objects import open_store
from sparklog.storage.snapshot import Slice
from sparklog.storage.table.names import table_folder

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter
    from pyspark.sql.types import StructField

_OF_LOG: Final = ("root", "path", "failondataloss")
"""Options of every read, in addition to `storage.*`."""

_OF_RECORDS: Final = (
    *("columns", "includeheaders", "valueformat"),
    *("minpartitions", "maxrecordsperpartition"),
)
"""Options of a read of records, apart from its range."""

_NO_DELTA: Final = (
    "[DATA_SOURCE_NOT_FOUND]",  # without Delta's jars
    "[DELTA_CONFIGURE_SPARK_SESSION_WITH_EXTENSION_AND_CATALOG]",
)
"""Error conditions that Spark reports if a session cannot read a Delta table."""

_FEW_PARTITIONS: Final = 64
"""Up to this number, a chain of comparisons is faster in Spark than a lookup."""


def dataframe(
    spark: SparkSession, root: str | None, topic: str | Iterable[str], **options: object
) -> DataFrame:
    """Returns the current records of the given topics, with the columns of `format("sparklog")`.

    Args:
        spark: a session with Delta that can open the root's URI on its own.
        root: a folder or URI; None: `SPARKLOG_ROOT`.
        topic: a name, or several.
        options: of a batch read through `format("sparklog")`, such as `startingOffsets`,
            `endingTimestamp`, `includeHeaders`, `columns`. Also `sparkRoot`: the root's URI for
            Spark's own readers, if it differs, such as `s3a://bucket/log`; by default
            `SPARKLOG_SPARK_ROOT` if the root is `SPARKLOG_ROOT`, otherwise the root.

    The call fixes start and end. Call again after a topic is deleted and recreated: Delta's scan
    identifies the table by its path only. Nor does the scan report a loss: records that are deleted
    after the call are missing.

    Raises what `format("sparklog")` raises, and `BadRequest` if the session has no Delta.
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

    It is `foreachBatch` with the records read as in `dataframe`, in no particular order. Call the
    writer's `option`, `trigger` and `start`.

    Args:
        spark: a session with Delta that can open the root's URI on its own.
        root: a folder or URI; None: `SPARKLOG_ROOT`.
        topic: a name, or several.
        function: called with the micro-batch and its number; called again with the same ones if
            Spark has not recorded that it returned.
        options: of a stream through `format("sparklog")`, such as `startingOffsets`,
            `maxOffsetsPerTrigger`, `columns`, and `sparkRoot` as in `dataframe`.

    A micro-batch is read at the version of the table that it was planned with. So it contains its
    records even if retention or compaction changes the table meanwhile, as long as the files of
    that version exist; once they are removed, the query ends with an error.

    Raises what `format("sparklog")` raises. The query ends with `BadRequest` if the session has no
    Delta.
    """
    frames = _frames(root, topic, options)
    frames.options.check_stream(has_limits=STREAMS_HAVE_LIMITS)
    of_stream = {
        name: value for name, value in frames.given.items() if name.lower() not in _OF_RECORDS
    }
    source = spark.readStream.format("sparklog").options(**of_stream).option("rows", "ranges")
    return source.load().writeStream.foreachBatch(_MicroBatches(frames, function))


class _MicroBatches:
    """Function for `foreachBatch` that passes the records of its ranges to another function."""

    def __init__(self, frames: _Frames, function: Callable[[DataFrame, int], None]) -> None:
        self._frames = frames
        self._function = function
        self._planner: Planner | None = None  # created on first use: Spark Connect pickles this

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
            reason = "name the topics with the argument `topic`"
            raise errors.BadOption(option=name, value=value, reason=reason)
    given["subscribe"] = ",".join(names)
    parsed = parse(given)
    if parsed.location.root is None:
        raise errors.BadOption(
            option="root", value=root, reason="Delta's scan needs the root, not a broker"
        )
    if parsed.value_format not in ("binary", TYPED):
        reason = "use Spark's own from_json(CAST(value AS STRING), …) here, or valueFormat = typed"
        raise errors.BadOption(option="valueFormat", value=parsed.value_format, reason=reason)
    uri = _spark_uri(spark_root, parsed.location)
    typed = typed_columns(parsed) if parsed.is_typed else None
    return _Frames(given=given, options=parsed, root_uri=uri, columns=ddl(parsed, typed))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _spark_uri(spark_root: str | None, location: LogLocation) -> str:
    """Returns the URI of the root for Spark's own readers, which decode no percent escapes.

    Raises `BadOption` if Spark uses a different URI for the store, and none is given.
    """
    if spark_root is None and location.root == os.environ.get(ROOT_VARIABLE):
        spark_root = os.environ.get(SPARK_ROOT_VARIABLE)
    if spark_root:
        return spark_root.rstrip("/")
    assert location.root is not None
    if location.root.startswith("az://"):
        reason = "Spark does not read az://; pass the root as abfss://container@account…"
        raise errors.BadOption(option="sparkRoot", value=None, reason=reason)
    uri = open_store(location.root, dict(location.storage)).uri
    return unquote(uri) if uri.startswith("file://") else uri


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frames:
    """Builds DataFrames of ranges of topics."""

    given: Mapping[str, str] = field(repr=False)
    options: SourceOptions
    root_uri: str
    """In the notation of Spark's own readers."""
    columns: str
    """As DDL."""

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
            versions: of the tables to read; None: the current ones when they are read.

        Raises `BadRequest` if the session has no Delta, and `BadOption` for a root that Spark
        cannot open.
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
            return spark.createDataFrame([], self.columns)
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
            # A Py4JJavaError if PySpark does not know the class, so its text is checked.
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
                    f"Spark cannot open {without_credentials(self.root_uri)}; pass the root in"
                    " Spark's notation, such as s3a://…"
                )
                raise errors.BadOption(option="sparkRoot", value=None, reason=reason) from error
            raise
        nullable = f.when(f.col("offset").isNotNull(), f.lit(name))  # as in the source
        rows = table.where(inside).withColumn("topic", nullable)
        if not self.options.is_typed:
            return rows.select(*self.options.columns)
        wanted = spark.createDataFrame([], self.columns).schema
        # An older version of the table may lack a typed column that was added since.
        return rows.select(
            *(f.col(each.name) if each.name in rows.columns else _null(each) for each in wanted)
        )

    def _tail(
        self,
        spark: SparkSession,
        start: Mapping[str, Mapping[int, int]],
        end: Mapping[str, Mapping[int, int]],
    ) -> DataFrame:
        """Returns the records that are not yet published, read through the source."""
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


def _null(field: StructField) -> Column:
    from pyspark.sql import functions as f

    return f.lit(None).cast(field.dataType).alias(field.name)


def _inside(start: Mapping[int, int], end: Mapping[int, int]) -> Column:
    """Returns the filter for rows in their partition's range; the outermost bounds skip files.

    It excludes partitions without a range, and other engines' rows beyond an end.
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
