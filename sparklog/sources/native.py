"""Topics as one DataFrame whose bulk Spark reads by itself.

What is published comes through Delta's own scan, with column pruning and filter pushdown; what is
not, through `format("sparklog")`. Both are cut at the same offsets, so each record comes once, and
the same rows come however often it is read and however far the table has moved on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Final

from sparklog import errors
from sparklog.sources import bounds, offsets
from sparklog.sources.batch import planner_of, range_of
from sparklog.sources.offsets import Position, TopicOffsets
from sparklog.sources.options import SourceOptions, parse
from sparklog.storage.objects import open_store
from sparklog.storage.table import table_folder

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_RANGE: Final = frozenset(
    f"{side}{how}".lower()
    for side in ("starting", "ending")
    for how in ("Offsets", "OffsetsByTimestamp", "Timestamp", "OffsetsByTimestampStrategy")
) | {"group.id", "groupoffsetreset"}
"""Options that say from where to where."""

_FEW_PARTITIONS: Final = 64
"""Spark compares with so many one after another in less time than it looks one up."""


def dataframe(
    spark: SparkSession, root: str | None, topic: str | Iterable[str], **options: object
) -> DataFrame:
    """The records that topics have now, in the columns of `format("sparklog")`.

    Args:
        spark: a session with Delta, which can open the root's URI by itself.
        root: a folder or URI; None: as `SPARKLOG_ROOT` says.
        topic: a name, or several.
        options: of a batch read through `format("sparklog")`, such as `startingOffsets`,
            `endingTimestamp`, `includeHeaders`, `columns`.

    The positions are those of the call. A topic that is deleted and created again needs another
    call: Delta's scan knows the table by its path alone. Nor does it tell of a loss: records that
    are deleted after the call are not in it.

    Raises what `format("sparklog")` raises, and `BadRequest` where the session has no Delta.
    """
    names = [topic] if isinstance(topic, str) else list(topic)
    given = {name: _text(value) for name, value in options.items()}
    if root is not None:
        given["root"] = str(root)
    if any(name.lower() == "subscribe" for name in given):
        reason = "topics are named by the argument"
        raise errors.BadOption(option="subscribe", value=given["subscribe"], reason=reason)
    parsed = parse(given | {"subscribe": ",".join(names)})
    parsed.check_batch()
    if parsed.place.root is None:
        raise errors.BadOption(option="root", value=root, reason="Delta's scan needs the root")
    if parsed.value_format != "binary":
        reason = "Spark does that by itself here: from_json(CAST(value AS STRING), …)"
        raise errors.BadOption(option="valueFormat", value=parsed.value_format, reason=reason)
    planner = planner_of(parsed)
    planner.refresh()
    start, end = range_of(planner, parsed)
    cut = offsets.clip(planner.published(), start, end)
    frames = [_published(spark, parsed, name, start[name], cut[name]) for name in sorted(end)]
    if not frames:
        raise errors.UnknownTopic(topic=", ".join(names))
    tails = [name for name in sorted(end) if cut[name] != end[name]]
    if tails:
        frames.append(_tail(spark, given, cut, end, tails))
    return reduce(lambda one, other: one.unionAll(other), frames)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _published(
    spark: SparkSession, options: SourceOptions, name: str, start: TopicOffsets, end: TopicOffsets
) -> DataFrame:
    """Delta's scan of the offsets from `start` to `end`."""
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions as f

    place = options.place
    assert place.root is not None
    uri = f"{open_store(place.root, dict(place.storage)).uri}/{table_folder(name)}"
    try:
        table = spark.read.format("delta").load(uri)
    except AnalysisException as error:
        if error.getCondition() != "DATA_SOURCE_NOT_FOUND":
            raise
        reason = (
            "this session has no Delta: build it with delta.configure_spark_with_delta_pip, or"
            ' read through format("sparklog")'
        )
        raise errors.BadRequest(reason=reason) from error
    inside = table.where(_inside(start.offsets, end.offsets))
    nullable = f.when(f.col("offset").isNotNull(), f.lit(name))  # as the source has it
    return inside.withColumn("topic", nullable).select(*options.columns)


def _inside(start: Mapping[int, int], end: Mapping[int, int]) -> Column:
    """Whether a row lies in its partition's range; the least and greatest bound skip files.

    A partition that was added since has no range, and so no rows here.
    """
    from pyspark.sql import functions as f

    offset, partition = f.col("offset"), f.col("partition")

    def of_partition(bounds_of: Mapping[int, int]) -> Column:
        if len(bounds_of) <= _FEW_PARTITIONS:
            cases = [(partition == number, _long(bounds_of[number])) for number in bounds_of]
            return reduce(lambda found, case: found.when(*case), cases[1:], f.when(*cases[0]))
        places = range(max(bounds_of) + 1)
        lookup = f.array(*(_long(bounds_of.get(number, 0)) for number in places))
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
    """What the table lacks, through the source."""
    where = {
        "assign": bounds.encode_partitions({name: list(cut[name].offsets) for name in names}),
        "startingOffsets": bounds.encode({name: cut[name].offsets for name in names}),
        "endingOffsets": bounds.encode({name: end[name].offsets for name in names}),
    }
    kept = {name: value for name, value in given.items() if name.lower() not in _RANGE}
    return spark.read.format("sparklog").options(**kept, **where).load()
