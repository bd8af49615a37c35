"""A program: copies topic `in` through a small transform to topic `out` until it is stopped.

    python -m tests.support.pipeline <root> <checkpoint> <report>

It runs a Structured Streaming query and restarts it after a failure, as a service would. At the end
of its standard input it processes the remaining records, writes the rows of `out`, as Spark reads
them, to `report` (JSON lines), and exits.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any, Final

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.support import killpoints

_log = logging.getLogger("pipeline")
_ATTEMPTS: Final = 20
_LOOK_SECONDS: Final = 1
_SETTINGS: Final = {
    "spark.driver.memory": "512m",
    "spark.log.level": "ERROR",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.showConsoleProgress": "false",
}


def main(root: str, checkpoint: str, report: str) -> None:
    """Runs until standard input ends."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    killpoints.be_driver()
    builder = SparkSession.builder.master("local[2, 4]").appName("pipeline")
    for name, value in _SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    told = threading.Event()
    threading.Thread(target=_listen, args=(told,), daemon=True).start()
    for _ in range(_ATTEMPTS):
        query = _begin(spark, root, checkpoint)
        try:
            while not told.is_set() and not query.awaitTermination(_LOOK_SECONDS):
                pass
            query.processAllAvailable()
        except StreamingQueryException as error:
            _log.warning("the query is started again: %s", error)
        else:
            query.stop()
            break
    else:
        sys.exit("the query does not run")
    _report(spark, root, Path(report))
    spark.stop()


def _listen(told: threading.Event) -> None:
    sys.stdin.read()
    told.set()


def _begin(spark: SparkSession, root: str, checkpoint: str) -> StreamingQuery:
    """Starts the query. Each task of a batch stages separately; the log keeps the tasks' order."""
    source = {
        "root": root,
        "subscribe": "in",
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": "1000",
        "maxRecordsPerPartition": "250",
    }
    value = "concat_ws('/', partition, offset, cast(value as string)) as value"
    return (
        spark.readStream.format("sparklog")
        .options(**source)
        .load()
        .selectExpr("key", value)
        .writeStream.format("sparklog")
        .options(root=root, topic="out", checkpointLocation=checkpoint)
        .start()
    )


def _report(spark: SparkSession, root: str, report: Path) -> None:
    found = spark.read.format("sparklog").options(root=root, subscribe="out").load()
    rows: list[Any] = found.selectExpr(
        "partition", "offset", "cast(key as string)", "cast(value as string)"
    ).collect()
    report.write_text("".join(json.dumps(list(row)) + "\n" for row in rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
