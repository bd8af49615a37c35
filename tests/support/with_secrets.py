"""A program for spark-submit: reads and writes topics with secret options.

The topics are in a bucket, and another one is read through a broker that asks for a login. Its
argument is a JSON file with the root and the options; no argument of a program may be a
secret, because Spark logs them. Its last line of output is JSON: the plans that a user sees.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

from pyspark.sql import SparkSession


def main() -> None:
    """Runs the queries, and captures what `explain` prints."""
    given = json.loads(Path(sys.argv[1]).read_text())
    options = {"root": given["root"], **given["options"]}
    spark = SparkSession.builder.getOrCreate()
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        frame = spark.read.format("sparklog").options(subscribe="t", **options).load()
        frame.explain(extended=True)
        frame.write.format("sparklog").mode("append").options(topic="u", **options).save()

        listed = ", ".join(f"'{name}' '{value}'" for name, value in options.items())
        view = f"TEMPORARY VIEW v USING sparklog OPTIONS (subscribe 't', {listed})"
        spark.sql(f"CREATE {view}")
        spark.sql(f"EXPLAIN EXTENDED CREATE OR REPLACE {view}").show(truncate=False)
        spark.sql("SELECT * FROM v").collect()

        source = spark.readStream.format("sparklog").options(subscribe="t", **options)
        stream = source.option("startingOffsets", "earliest").load()
        stream.explain(extended=True)
        shown.write(stream._jdf.queryExecution().toString())
        sink = stream.select("value").writeStream.format("sparklog").options(topic="u", **options)
        sink.option("checkpointLocation", given["checkpoint"])
        query = sink.trigger(availableNow=True).start()
        query.awaitTermination()
        query.explain(extended=True)
        shown.write(str(query.lastProgress))

        brokers = {"subscribe": "t", **given["brokers"]}
        frame = spark.read.format("sparklog").options(**brokers).load()
        frame.explain(extended=True)
        assert frame.count() == 1
        source = spark.readStream.format("sparklog").options(**brokers)
        rows = source.option("startingOffsets", "earliest").load().writeStream.format("noop")
        rows.option("checkpointLocation", given["checkpoint"] + "-brokers")
        rows.trigger(availableNow=True).start().awaitTermination()
    spark.stop()
    sys.stdout.write(f"{json.dumps(shown.getvalue())}\n")


if __name__ == "__main__":
    main()
