"""Resources of a measurement: a Spark session, our broker, and a real Kafka if available."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from benchmarks import jars
from benchmarks.jars import Jars
from benchmarks.kafka_process import KafkaProcess
from benchmarks.progress import doing
from benchmarks.spark.sides import Kafka, Sparklog
from sparklog.bench.broker import BrokerProcess, FreshRoot
from sparklog.bench.report import BenchOptions, Measurement

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Measure: TypeAlias = Callable[[BenchOptions], Iterator[Measurement]]


def needs_spark(measure: Measure) -> Measure:
    """Makes a measure report that pyspark is not installed, instead of failing."""

    @functools.wraps(measure)
    def measured(options: BenchOptions) -> Iterator[Measurement]:
        if importlib.util.find_spec("pyspark") is None:
            yield Measurement(name=f"Spark: {measure.__name__}", value="pyspark is not installed")
        else:
            yield from measure(options)

    return measured


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkSetup:
    """A Spark session and the sides it compares; `kafka` is None if unavailable.

    `missing` names the unavailable resources, with the reasons.
    """

    spark: SparkSession
    folder: Path
    ours: Sparklog
    kafka: Kafka | None
    has_delta: bool
    missing: tuple[str, ...]

    def report_missing(self) -> Iterator[Measurement]:
        """Yields a line for each missing resource."""
        for each in self.missing:
            yield Measurement(name="not compared, because it could not be had", value=each)

    def create_topic(self, topic: str) -> None:
        """Creates the topic on both sides."""
        self.ours.create_topic(topic)
        if self.kafka is not None:
            self.kafka.create_topic(topic)

    def checkpoint(self) -> str:
        """Creates a checkpoint folder for a new query."""
        return tempfile.mkdtemp(prefix="checkpoint-", dir=self.folder)


@contextmanager
def start(options: BenchOptions) -> Iterator[SparkSetup]:
    """Yields a setup on a fresh folder, which is removed at the end."""
    found = jars.find()
    missing = list(found.missing)
    with ExitStack() as stack:
        folder = stack.enter_context(FreshRoot(options.folder)).resolve()
        with doing("starting Spark and the brokers"):
            spark = stack.enter_context(session(found, folder))
            broker = stack.enter_context(BrokerProcess(folder / "root"))
            log = stack.enter_context(broker.connect())
            kafka = None
            if found.connector and found.broker:
                try:
                    kafka = _kafka(stack, spark, found, folder)
                except RuntimeError as error:
                    missing.append(str(error))
        yield SparkSetup(
            spark=spark,
            folder=folder,
            ours=Sparklog(spark, str(folder / "root"), log),
            kafka=kafka,
            has_delta=bool(found.delta),
            missing=tuple(missing),
        )


def _kafka(stack: ExitStack, spark: SparkSession, found: Jars, folder: Path) -> Kafka:
    process = stack.enter_context(KafkaProcess(found.broker, folder / "kafka"))
    kafka = Kafka(spark, process.address)
    stack.callback(kafka.close)
    return kafka


@contextmanager
def session(found: Jars, folder: Path) -> Iterator[SparkSession]:
    """Yields a default Spark session on two cores, with the available jars of Delta and Kafka."""
    # If unset, Spark's workers would use whichever `python3` is on the PATH.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from pyspark.sql import SparkSession

    settings = {
        "spark.jars": ",".join(found.of_spark),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
    }
    if found.delta:
        settings["spark.sql.extensions"] = "io.delta.sql.DeltaSparkSessionExtension"
        settings["spark.sql.catalog.spark_catalog"] = (
            "org.apache.spark.sql.delta.catalog.DeltaCatalog"
        )
    builder = SparkSession.builder.master("local[2]").appName("sparklog-bench")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()
