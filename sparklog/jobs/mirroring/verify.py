"""A comparison of both sides: the number of records and a hash of them, by range of offsets.

Hashes are of offset, time, key, value and headers. A compacted topic is compared by the last record
of each key, because each side removes the others in its own time; keys that end with a tombstone
are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from sparklog.broker.config.topic_config import is_compacted
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
            f" {self.source.records:,} records with hash {self.source.hash:016x} at the source,"
            f" {self.target.records:,} with {self.target.hash:016x} in the target"
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
    """Compares a topic in ranges of `size` offsets."""
    parts = common_ranges(pair)
    if not parts:
        return Verified(records=0, ranges=0, differences=())
    config = {} if pair.target is None else pair.target.config
    ours, theirs = (
        _sums(side.frame(spark, {name: parts}), size, by_key=is_compacted(config))
        for side, name in ((target, pair.name), (source, pair.topic))
    )
    return Verified(
        records=sum(each.records for each in theirs.values()),
        ranges=sum(-(-each.until // size) - each.first // size for each in parts.values()),
        differences=tuple(_differences(theirs, ours, parts, size)),
    )


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


def _sums(records: DataFrame, size: int, *, by_key: bool) -> dict[tuple[int, int], Sum]:
    """Returns the sums by partition and number of the range."""
    from pyspark.sql import functions as f

    # A null changes no hash, so its place must be part of it.
    nulls = [f.col(name).isNull() for name in ("key", "value")]
    headers = f.to_json(f.coalesce("headers", f.array().cast(records.schema["headers"].dataType)))
    hashed = f.xxhash64("offset", "timestamp", "key", "value", *nulls, headers)
    rows = records.select(
        "partition", "offset", "key", hashed.alias("hash"), f.col("value").isNull().alias("ends")
    )
    if by_key:
        last = f.max_by(f.struct("offset", "hash", "ends"), "offset").alias("last")
        rows = rows.groupBy("partition", "key").agg(last).select("partition", "last.*")
        rows = rows.where("not ends")
    number = f.floor(f.col("offset") / size).alias("number")
    sums = rows.groupBy("partition", number).agg(
        f.count(f.lit(1)).alias("count"), f.bit_xor("hash").alias("hash")
    )
    return {
        (row.partition, row.number): Sum(row["count"], row.hash & (2**64 - 1))
        for row in sums.collect()
    }
