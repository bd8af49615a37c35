"""A Spark session that does a little of what tests do, so that it loads the same classes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession


def _unchanged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def main(folder: Path) -> None:
    """Writes and reads a few rows in a batch and in a stream; uses the empty folder for files."""
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    rows = spark.range(10).selectExpr("id % 2 as part", "cast(id as string) as text", "id")
    rows.mapInArrow(_unchanged, rows.schema).write.partitionBy("part").parquet(str(folder / "rows"))
    found = spark.read.parquet(str(folder / "rows"))
    found.groupBy("part").count().join(found, "part").orderBy("id").collect()
    query = (
        spark.readStream.schema(found.schema)
        .parquet(str(folder / "rows"))
        .writeStream.format("noop")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
