"""A client of a Spark Connect server: reads and writes topics, streaming included, without a JVM.

The root, with topics `t`, `u`, `v`, `produced` and `replayed`, is named in the environment of the
server, but not in ours; only the jobs receive it here.

Arguments: the server's address, a folder for checkpoints and files, and the root for the jobs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.errors import AnalysisException, PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from sparklog.sinks import foreach_batch, write_batch
from tests.support.jobs import run_jobs

ROWS = 60
START_ATTEMPTS = 5


def write(frame: DataFrame, topic: str, **options: str) -> None:
    """Writes a batch."""
    frame.write.format("sparklog").options(topic=topic, **options).mode("append").save()


def read(spark: SparkSession, topic: str) -> list[str]:
    """The topic's values, sorted."""
    frame = spark.read.format("sparklog").option("subscribe", topic).load()
    return sorted(row.value for row in frame.selectExpr("cast(value as string)").collect())


def stream(spark: SparkSession) -> DataFrame:
    """Key and value of `t`, in several micro-batches."""
    options = {"subscribe": "t", "startingOffsets": "earliest", "maxOffsetsPerTrigger": "30"}
    return spark.readStream.format("sparklog").options(**options).load().select("key", "value")


def copy(spark: SparkSession, checkpoint: str) -> None:
    """Streams from `t` to `u` through the sink."""
    writer = stream(spark).writeStream.format("sparklog").option("topic", "u")
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    assert query.awaitTermination(60)


def hand_over(
    spark: SparkSession,
    checkpoint: str,
    take: Callable[[DataFrame, int], None],
    name: str,
) -> str:
    """Passes new records of `t` to `take` in a query. Returns the error that ended it, or ""."""
    writer = stream(spark).writeStream.foreachBatch(take).queryName(name)
    query = start(writer.option("checkpointLocation", checkpoint).trigger(availableNow=True))
    try:
        assert query.awaitTermination(60)
    except StreamingQueryException as error:
        return str(error)
    return ""


def start(writer: DataStreamWriter) -> StreamingQuery:
    """Starts a query, with retries: Spark allows its Python only ten seconds to start."""
    for attempt in range(START_ATTEMPTS):
        try:
            return writer.start()
        except PySparkException as error:
            if "failed to connect back" not in str(error) or attempt == START_ATTEMPTS - 1:
                raise
    raise AssertionError


def dying(frame: DataFrame, batch_id: int) -> None:
    """Writes, but dies in the second micro-batch before Spark knows of the write."""
    write_batch(frame, batch_id, name="copy", topic="v")
    if batch_id == 1:
        raise RuntimeError("the driver dies")


def refusal(spark: SparkSession) -> str:
    """Returns the error of a write to a topic that does not exist."""
    try:
        write(spark.range(1).selectExpr("cast(id as string) as value"), "nowhere")
    except AnalysisException as error:
        return str(error)
    return ""


def main(address: str, checkpoints: str, root: str) -> dict[str, Any]:
    """Runs everything in turn, and returns what the client has seen."""
    os.environ["SPARK_REMOTE"] = address  # for the jobs
    spark = SparkSession.builder.getOrCreate()
    frame = spark.range(ROWS, numPartitions=2).selectExpr("cast(id as string) as value")
    for _ in range(2):
        write(frame, "t", txnAppId="fill", txnVersion="3")
    read_back = read(spark, "t")
    refused = refusal(spark)
    copy(spark, f"{checkpoints}/copy")
    died = hand_over(spark, f"{checkpoints}/v", dying, "copy")
    once = foreach_batch(name="copy", topic="v")
    ended = hand_over(spark, f"{checkpoints}/v", once, "copy")
    unnamed = hand_over(spark, f"{checkpoints}/unnamed", once, "another")
    found = {
        "session": type(spark).__module__,
        "read": read_back,
        "refused": refused,
        "copied": read(spark, "u"),
        "died": died,
        "ended": ended,
        "handed over": read(spark, "v"),
        "unnamed": unnamed,
        "jobs": run_jobs(root, Path(checkpoints)),
    }
    spark.stop()
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])) + "\n")
