"""Lines of JSON into a topic, by Spark: for data that lies where a cluster reads it.

    spark-submit jobs/produce_json.py --root s3://bucket/log --topic flights --key carrier \\
        --timestamp time_hour s3a://landing/flights/*.jsonl

Each line is a record's value, byte for byte; key and time are copied from fields of it (`a.b` for a
nested one; a time is ISO 8601, UTC without a zone). A line without the field has a null key, or the
time of arrival, and so has a line whose time is none.
A task that fails and runs again doubles nothing; with `--once-as NAME` the whole job may run again,
too, and the records stand once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import sparklog

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def records(lines: DataFrame, *, key: str | None, timestamp: str | None) -> DataFrame:
    """From lines, one column `value`, to records."""
    from pyspark.sql import functions as f

    columns = [f.col("value")]
    if key is not None:
        columns.append(f.get_json_object("value", f"$.{key}").alias("key"))
    if timestamp is not None:
        text = f.get_json_object("value", f"$.{timestamp}")
        columns.append(f.try_to_timestamp(text).alias("timestamp"))
    return lines.where(f.trim("value") != "").select(columns)


def produce(
    inputs: Sequence[str],
    *,
    root: str,
    topic: str,
    partitions: int | None,
    key: str | None,
    timestamp: str | None,
    once_as: str | None,
) -> None:
    """Writes the lines of all inputs to the topic, which is made if it is not there."""
    from pyspark.sql import SparkSession

    with sparklog.connect(root) as log:
        log.create_topic(topic, partitions, if_absent=True)
    builder = SparkSession.builder.appName(f"produce {topic}")
    spark = builder.config("spark.sql.session.timeZone", "UTC").getOrCreate()
    try:
        lines = spark.read.text(list(inputs))
        writer = (
            records(lines, key=key, timestamp=timestamp)
            .write.format("sparklog")
            .mode("append")
            .option("root", root)
            .option("topic", topic)
        )
        if once_as is not None:
            writer = writer.option("idempotencyKey", once_as)
        writer.save()
    finally:
        spark.stop()


def main(arguments: Sequence[str] | None = None) -> None:
    """Returns once every record is durable; raises the errors of Spark and sparklog."""
    parser = argparse.ArgumentParser(description="Lines of JSON into a topic, by Spark.")
    parser.add_argument("inputs", nargs="+", help="whatever spark.read.text takes")
    parser.add_argument("--root", required=True, help="a folder, or s3://, gs://, az://")
    parser.add_argument("--topic", required=True, help="made if it is not there")
    parser.add_argument("--partitions", type=int, help="of a topic that is made")
    parser.add_argument("--key", help="the field that is the key")
    parser.add_argument("--timestamp", help="the field that is the record's time")
    parser.add_argument("--once-as", help="a name for this job: under it, records stand once")
    options = vars(parser.parse_args(arguments))
    # Unset, Spark's workers would be whatever `python3` is on the PATH.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    produce(options.pop("inputs"), **options)


if __name__ == "__main__":
    main()
