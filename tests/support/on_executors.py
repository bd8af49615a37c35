"""A Spark program with separate executors: reads and writes topics while tasks fail and race.

Master and workers run in the driver's JVM, as in `local-cluster`, but with different host names:
Spark starts no second attempt of a task on the host that runs the first.

Arguments: the root, with topics `t`, `u`, `retried`, `raced`, `produced` and `replayed`; and a
folder for notes.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import SparkConf, SparkContext, TaskContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import DataFrame, SparkSession

from tests.support.jobs import run_jobs
from tests.support.jvms import SHORT_LIVED

ROWS = 120
RACING_ROWS = 800
_HOSTS = ("127.0.0.1", "localhost")
_VALUE_BYTES = 100_000  # enough for the first attempt to put a file before it is done
_LONG_SECONDS = 60.0
_SETTINGS = {
    "spark.driver.memory": "512m",
    "spark.executor.cores": "1",
    "spark.executor.extraJavaOptions": " ".join(SHORT_LIVED),
    "spark.executor.memory": "512m",
    "spark.log.level": "OFF",
    "spark.master.rest.enabled": "false",
    "spark.speculation": "true",
    "spark.speculation.interval": "50ms",
    "spark.speculation.minTaskRuntime": "2s",
    "spark.speculation.quantile": "0.5",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "50",
    "spark.sql.session.timeZone": "UTC",
}

Batches = Iterator[pa.RecordBatch]


def start(notes: Path) -> SparkSession:
    """Starts a master, a worker for each host, and a session on them."""
    conf = SparkConf().setAppName("on-executors").setAll(list(_SETTINGS.items()))
    gateway: Any = launch_gateway(conf)  # type: ignore[no-untyped-call]
    jvm = gateway.jvm
    SparkContext._ensure_initialized(gateway=gateway, conf=conf)
    java_conf = jvm.org.apache.spark.SparkConf(True)
    for name, value in conf.getAll():
        java_conf.set(name, value)
    deploy = jvm.org.apache.spark.deploy
    master = deploy.master.Master.startRpcEnvAndEndpoint(_HOSTS[0], 0, 0, java_conf)
    url = master._1().address().toSparkURL()
    masters = gateway.new_array(jvm.java.lang.String, 1)
    masters[0] = url
    none = getattr(getattr(jvm.scala, "None$"), "MODULE$")
    for number, host in enumerate(_HOSTS):
        deploy.worker.Worker.startRpcEnvAndEndpoint(
            host, 0, 0, 1, 512, masters, str(notes), jvm.scala.Some(number), java_conf, none
        )
    return SparkSession.builder.config(conf=conf).master(url).getOrCreate()


def write(frame: DataFrame, root: str, topic: str, **options: str) -> None:
    """Writes a batch."""
    given = {"root": root, "topic": topic, **options}
    frame.write.format("sparklog").options(**given).mode("append").save()


def rows(spark: SparkSession, count: int) -> DataFrame:
    """Values 0 … count - 1 in two tasks."""
    return spark.range(count, numPartitions=2).selectExpr("cast(id as string) as value")


def copy(spark: SparkSession, root: str, checkpoint: str) -> None:
    """Streams from `t` to `u`, in several micro-batches."""
    source = {"root": root, "subscribe": "t", "startingOffsets": "earliest"}
    frame = spark.readStream.format("sparklog").options(**source, maxOffsetsPerTrigger="50").load()
    query = (
        frame.select("key", "value")
        .writeStream.format("sparklog")
        .options(root=root, topic="u", checkpointLocation=checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)


def failing(notes: Path) -> Callable[[Batches], Batches]:
    """Makes the first attempt of the first task fail after some rows."""

    def work(batches: Batches) -> Batches:
        task = TaskContext.get()
        assert task is not None
        first = task.partitionId() == 0 and task.attemptNumber() == 0
        for batch in batches:
            yield batch
            if first:
                (notes / "failed").touch()
                raise RuntimeError("the first attempt fails")

    return work


def racing(root: str, notes: Path) -> Callable[[Batches], Batches]:
    """Makes the first task's first attempt stage a lot and stall; its second overtakes it."""

    def work(batches: Batches) -> Batches:
        task = TaskContext.get()
        assert task is not None
        yield from batches
        if task.partitionId() == 0:
            staged = Path(root) / "staging" / "race@raced" / "0"
            deadline = time.monotonic() + _LONG_SECONDS
            is_first = task.attemptNumber() == 0
            (notes / f"attempt {task.attemptNumber()}").touch()
            while time.monotonic() < deadline and (is_first or not list(staged.glob("*.arrow"))):
                time.sleep(0.05)

    return work


def main(root: str, notes: Path) -> dict[str, Any]:
    """Runs everything in turn. Returns what the root does not show afterwards."""
    spark = start(notes)
    context: Any = spark.sparkContext
    write(rows(spark, ROWS), root, "t")
    read = spark.read.format("sparklog").options(root=root, subscribe="t").load()
    found = [row.value for row in read.selectExpr("cast(value as string)").collect()]
    write(rows(spark, ROWS).mapInArrow(failing(notes), "value string"), root, "retried")
    large = f"if(id < {RACING_ROWS}, repeat('x', {_VALUE_BYTES}), '')"
    race = spark.range(2 * RACING_ROWS, numPartitions=2)
    race = race.selectExpr(f"concat(lpad(cast(id as string), 9, '0'), {large}) as value")
    race = race.mapInArrow(racing(root, notes), "value string")
    write(race, root, "raced", idempotencyKey="race")
    folder = Path(root) / "staging" / "race@raced" / "0"
    staged = sorted(path.name for path in folder.iterdir())
    shutil.copy(folder / "manifest.json", notes)  # before the janitor deletes it
    copy(spark, root, str(notes / "checkpoint"))
    jobs = run_jobs(root, notes)
    executors = context._jsc.sc().getExecutorMemoryStatus().size() - 1
    spark.stop()
    return {"executors": executors, "read": sorted(found), "staged": staged, "jobs": jobs}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], Path(sys.argv[2]))) + "\n")
