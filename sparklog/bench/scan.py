"""A Spark batch scan of one topic into a sink that drops everything."""

from __future__ import annotations

import os
import sys
import time

from sparklog.bench.broker import BrokerProcess, FreshRoot
from sparklog.bench.report import Figure, Options
from sparklog.bench.writing import in_streams

_ROWS = 10_000_000


def scan(options: Options) -> list[Figure]:
    """All columns of 10 M rows through `format("sparklog")`, local[2]; the third run counts."""
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        return [Figure(name="Spark scan", value="pyspark is not installed")]
    rows = min(_ROWS, options.rows)
    with FreshRoot(options.folder) as root:
        with BrokerProcess(root) as broker, broker.connect() as log:
            log.create_topic("scan", partitions=4)
            rows, _ = in_streams(log, "scan", lambda sent: sent >= rows // 4)
            log.flush_to_table(timeout_seconds=300)
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        spark = (
            SparkSession.builder.master("local[2]")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .getOrCreate()
        )
        spark.sparkContext.setLogLevel("ERROR")
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            frame = spark.read.format("sparklog").option("root", str(root)).load(subscribe="scan")
            frame.write.format("noop").mode("overwrite").save()
            seconds.append(time.perf_counter() - began)
        spark.stop()
    rate = rows / seconds[-1]
    return [
        Figure(
            name=f'batch scan of {rows / 1e6:.0f} M rows through format("sparklog"), noop,'
            " local[2], third run",
            value=f"{rate / 1e6:.2f} M rows/s",
            target="3.5 M rows/s",
            met=rate >= 3.5e6,
            detail=", ".join(f"{each:.1f} s" for each in seconds),
        )
    ]
