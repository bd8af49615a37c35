"""Topics as one DataFrame whose published records Spark reads with Delta's own scan.

Published records come through Delta's scan, with column pruning and filter pushdown; the others
come through `format("sparklog")`. Both are cut at the same offsets, so each record comes once, and
every evaluation has the same rows, however far the table has grown since.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from sparklog import errors
from sparklog.options import ROOT_VARIABLE, SPARK_ROOT_VARIABLE
from sparklog.sources import offsets, starting_offsets
from sparklog.sources.batch import planner_of, range_of
from sparklog.sources.offsets import Position, TopicOffsets
from sparklog.sources.options import LogLocation, SourceOptions, parse
from sparklog.storage.objects import open_store
from sparklog.storage.table import table_folder

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_RANGE: Final = frozenset(
    f"{side}{how}".lower()
    for side in ("starting", "ending")
    for how in ("Offsets", "OffsetsByTimestamp", "Timestamp", "OffsetsByTimestampStrategy")
) | {"group.id", "groupoffsetreset"}
"""Options that name the start or the end."""

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
    names = [topic] if isinstance(topic, str) else list(topic)
    given = {name: _text(value) for name, value in options.items()}
    spark_root = next((given.pop(name) for name in options if name.lower() == "sparkroot"), None)
    if root is not None:
        given["root"] = str(root)
    if any(name.lower() == "subscribe" for name in given):
        reason = "name the topics by the argument `topic`"
        raise errors.BadOption(option="subscribe", value=given["subscribe"], reason=reason)
    parsed = parse(given | {"subscribe": ",".join(names)})
    parsed.check_batch()
    if parsed.location.root is None:
        raise errors.BadOption(
            option="root", value=root, reason="Delta's scan needs the root, not a broker"
        )
    if parsed.value_format != "binary":
        reason = "use Spark's own from_json(CAST(value AS STRING), …) here"
        raise errors.BadOption(option="valueFormat", value=parsed.value_format, reason=reason)
    planner = planner_of(parsed)
    planner.refresh()
    start, end = range_of(planner, parsed)
    cut = offsets.clip(planner.published(), start, end)
    uri = _spark_uri(spark_root, parsed.location)
    frames = [_published(spark, uri, parsed, name, start[name], cut[name]) for name in sorted(end)]
    if not frames:
        raise errors.UnknownTopic(topic=", ".join(names))
    tails = [name for name in sorted(end) if cut[name] != end[name]]
    if tails:
        frames.append(_tail(spark, given, cut, end, tails))
    return reduce(lambda one, other: one.unionAll(other), frames)


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


def _published(
    spark: SparkSession,
    root_uri: str,
    options: SourceOptions,
    name: str,
    start: TopicOffsets,
    end: TopicOffsets,
) -> DataFrame:
    """Returns Delta's scan of the offsets from `start` to `end`."""
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions as f

    try:
        table = spark.read.format("delta").load(f"{root_uri}/{table_folder(name)}")
    except Exception as error:
        if isinstance(error, AnalysisException) and error.getCondition() == "DATA_SOURCE_NOT_FOUND":
            reason = (
                "the session has no Delta: build it with delta.configure_spark_with_delta_pip, or"
                ' read through format("sparklog")'
            )
            raise errors.BadRequest(reason=reason) from error
        if "No FileSystem for scheme" in str(error):
            reason = (
                f"Spark cannot open {root_uri}; give the root in Spark's notation, such as s3a://…"
            )
            raise errors.BadOption(option="sparkRoot", value=None, reason=reason) from error
        raise
    inside = table.where(_inside(start.offsets, end.offsets))
    nullable = f.when(f.col("offset").isNotNull(), f.lit(name))  # as the source has it
    return inside.withColumn("topic", nullable).select(*options.columns)


def _inside(start: Mapping[int, int], end: Mapping[int, int]) -> Column:
    """Returns whether a row is in its partition's range; the outermost bounds skip files.

    A partition that was added since has no range, and so no rows here.
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


def _tail(
    spark: SparkSession, given: Mapping[str, str], cut: Position, end: Position, names: list[str]
) -> DataFrame:
    """Returns the records that are not published yet, through the source."""
    where = {
        "assign": starting_offsets.encode_partitions(
            {name: list(cut[name].offsets) for name in names}
        ),
        "startingOffsets": starting_offsets.encode({name: cut[name].offsets for name in names}),
        "endingOffsets": starting_offsets.encode({name: end[name].offsets for name in names}),
    }
    kept = {name: value for name, value in given.items() if name.lower() not in _RANGE}
    return spark.read.format("sparklog").options(**kept, **where).load()
