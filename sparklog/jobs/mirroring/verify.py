"""Compares both sides: the number of records and a hash of them, by range of offsets.

Hashes cover offset, time, key, value and headers. A compacted topic is compared by the last record
of each key, because each side removes the others at its own pace. Keys that end with a tombstone
are excluded, as are records without a key, which Kafka's cleaner removes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from sparklog.display import counted
from sparklog.formats.topic_config import is_compacted
from sparklog.jobs.mirroring.plan import Bounds, Pair, Range
from sparklog.jobs.mirroring.sides import LogSource, Source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Sum(NamedTuple):
    """Number and hash of the records in a range."""

    records: int
    hash: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A range of offsets, from `first` up to `until`, in which the sides differ."""

    partition: int
    first: int
    until: int
    source: Sum
    target: Sum

    def __str__(self) -> str:
        return (
            f"partition {self.partition}, offsets {self.first:,} up to {self.until:,}:"
            f" {counted(self.source.records, 'record')} with hash {self.source.hash:016x} at the"
            f" source, {self.target.records:,} with {self.target.hash:016x} in the target"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The outcome for a topic: `records` of `ranges` were compared."""

    records: int
    ranges: int
    differences: tuple[Difference, ...]


def common_ranges(pair: Pair) -> dict[int, Range]:
    """Returns the offsets that both sides have, by partition."""
    found = {}
    for number, source in pair.source.partitions.items():
        target = Bounds(0, 0) if pair.target is None else pair.target.partitions.get(number)
        if target is not None:
            first = max(source.start, target.start)
            until = min(source.end, target.end)
            if first < until:
                found[number] = Range(first=first, until=until, start=first)
    return found


def verify(
    spark: SparkSession, source: Source, target: LogSource, pair: Pair, size: int
) -> Verified:
    """Compares the offsets of a topic that both sides have, in ranges of `size` offsets."""
    parts = common_ranges(pair)
    if not parts:
        return Verified(records=0, ranges=0, differences=())
    by_key = is_compacted({} if pair.target is None else pair.target.config)
    sides = ((False, source, pair.topic), (True, target, pair.name))
    frames = []
    for is_ours, side, name in sides:
        read = _up_to_end(parts, pair, is_ours=is_ours) if by_key else parts
        frames.append(_rows(side.frame(spark, {name: read}), is_ours=is_ours))
    rows = frames[0].union(frames[1])
    if by_key:
        rows = _last_of_keys(rows, {number: each.until for number, each in parts.items()})
    theirs, ours = _sums(rows, size)
    return Verified(
        records=sum(each.records for each in theirs.values()),
        ranges=sum(-(-each.until // size) - each.first // size for each in parts.values()),
        differences=tuple(_differences(theirs, ours, parts, size)),
    )


def _up_to_end(parts: Mapping[int, Range], pair: Pair, *, is_ours: bool) -> dict[int, Range]:
    """Returns the ranges extended to the end of one side, whose later records supersede others."""
    side = pair.target if is_ours else pair.source
    assert side is not None
    return {n: each._replace(until=side.partitions[n].end) for n, each in parts.items()}


def _differences(
    theirs: Mapping[tuple[int, int], Sum],
    ours: Mapping[tuple[int, int], Sum],
    parts: Mapping[int, Range],
    size: int,
) -> Iterator[Difference]:
    nothing = Sum(0, 0)
    for partition, number in sorted(theirs.keys() | ours.keys()):
        here, there = (
            ours.get((partition, number), nothing),
            theirs.get((partition, number), nothing),
        )
        if here != there:
            whole = parts[partition]
            yield Difference(
                partition=partition,
                first=max(number * size, whole.first),
                until=min((number + 1) * size, whole.until),
                source=there,
                target=here,
            )


def _rows(records: DataFrame, *, is_ours: bool) -> DataFrame:
    """Returns place, key and hash of each record, and whether it is a tombstone."""
    from pyspark.sql import functions as f

    # Nulls do not change a hash, so it must also cover which columns are null.
    nulls = [f.col(name).isNull() for name in ("key", "value")]
    headers = f.to_json(f.coalesce("headers", f.array().cast(records.schema["headers"].dataType)))
    hashed = f.xxhash64("offset", "timestamp", "key", "value", *nulls, headers)
    return records.select(
        f.lit(is_ours).alias("is_ours"),
        "partition",
        "offset",
        "key",
        hashed.alias("hash"),
        f.col("value").isNull().alias("ends"),
    )


def _last_of_keys(rows: DataFrame, untils: Mapping[int, int]) -> DataFrame:
    """Returns the last record of each key and side, if it is not a tombstone.

    Keys with a record at or after `untils`, the end of the common offsets, are excluded: the side
    that has it may have removed those before it.
    """
    from pyspark.sql import functions as f

    until = f.create_map(*(f.lit(each) for item in untils.items() for each in item))
    record = f.struct("is_ours", "offset", "hash", "ends")
    lasts = [
        f.max_by(f.when(is_side, record), f.when(is_side, f.col("offset")))
        for is_side in (f.col("is_ours"), ~f.col("is_ours"))
    ]
    return (
        rows.where("key is not null")
        .groupBy("partition", "key")
        .agg(f.array(*lasts).alias("lasts"), f.max("offset").alias("newest"))
        .where(f.col("newest") < until[f.col("partition")])
        .select("partition", f.explode("lasts").alias("last"))
        .select("partition", "last.*")
        .where("not ends")
    )


def _sums(
    rows: DataFrame, size: int
) -> tuple[dict[tuple[int, int], Sum], dict[tuple[int, int], Sum]]:
    """Returns the source's and the target's sums, by partition and number of the range."""
    from pyspark.sql import functions as f

    number = f.floor(f.col("offset") / size).alias("number")
    sums = rows.groupBy("is_ours", "partition", number).agg(
        f.count(f.lit(1)).alias("count"), f.bit_xor("hash").alias("hash")
    )
    theirs: dict[tuple[int, int], Sum] = {}
    ours: dict[tuple[int, int], Sum] = {}
    for row in sums.collect():
        found = ours if row.is_ours else theirs
        found[row.partition, row.number] = Sum(row["count"], row.hash & (2**64 - 1))
    return theirs, ours
