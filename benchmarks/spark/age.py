"""The cost of a table's age to Spark: the same rows in many commits and in a few."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from benchmarks import jars
from benchmarks.compare import no_dearer
from benchmarks.progress import doing
from benchmarks.spark.setup import needs_spark, session
from benchmarks.spark.sides import PARTITIONS, Sparklog
from sparklog.bench.broker import BrokerProcess, FreshRoot
from sparklog.bench.report import BenchOptions, Measurement, Times
from sparklog.bench.writing import values

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Read = Callable[[Sparklog], "DataFrame"]

_YOUNG: Final = 50
_ROWS: Final = 1_000_000
_WARM_ROUNDS: Final = 3
_ROUNDS: Final = 9
_TOPIC: Final = "age"


@needs_spark
def age(options: BenchOptions) -> Iterator[Measurement]:
    """Plans and scans two tables with the same rows, one of 50 commits and one of `versions`."""
    unit = options.versions * _YOUNG
    rows = max(min(_ROWS, options.rows) // unit, 1) * unit
    found = jars.find()
    with ExitStack() as stack:
        folder = stack.enter_context(FreshRoot(options.folder)).resolve()
        with doing("starting Spark"):
            spark = stack.enter_context(session(found, folder))
        with doing(f"making tables of {_YOUNG} and of {options.versions:,} versions"):
            young = _aged(stack, spark, folder / "young", commits=_YOUNG, rows=rows)
            old = _aged(stack, spark, folder / "old", commits=options.versions, rows=rows)
        reads: dict[str, Read] = {'format("sparklog")': lambda side: side.read(_TOPIC)}
        if found.delta:
            reads["sources.dataframe"] = lambda side: side.dataframe(_TOPIC)
        for name, read in reads.items():
            with doing(f"asking both through {name}"):
                plans, scans = _in_turns(young, old, read)
            versions = f"through {name} at table version {options.versions:,} against {_YOUNG}"
            yield no_dearer(f"plan time {versions}", *plans, most=1.2)
            yield no_dearer(f"scan of {rows / 1e6:g} M rows {versions}", *scans, most=1.2)


def _aged(
    stack: ExitStack, spark: SparkSession, root: Path, *, commits: int, rows: int
) -> Sparklog:
    """Writes a table of `rows` rows in `commits` or more commits; its broker keeps running."""
    often = {"SPARKLOG_PUBLISHER_INTERVAL_SECONDS": "0.001"}
    with BrokerProcess(root, often) as broker, broker.connect() as log:
        log.create_topic(_TOPIC, partitions=PARTITIONS)
        count = rows // commits
        value = values(count)
        with log.producer(linger_ms=0) as producer:
            for number in range(commits):
                partition = pa.repeat(pa.scalar(number % PARTITIONS, pa.int32()), count)
                piece = pa.record_batch({"value": value, "partition": partition})
                producer.send_table(_TOPIC, piece).result()
                log.flush_to_table(_TOPIC)
    # A new broker: this measures the cost of age, not of one commit per millisecond.
    broker = stack.enter_context(BrokerProcess(root))
    side = Sparklog(spark, str(root), stack.enter_context(broker.connect()))
    side.wait_until_quiet(_TOPIC)
    return side


def _in_turns(
    young: Sparklog, old: Sparklog, read: Read
) -> tuple[tuple[Times, Times], tuple[Times, Times]]:
    """Returns (plans, scans), each as (young, old), without the warm-up rounds."""
    plans, scans = (Times(), Times()), (Times(), Times())
    for number in range(_WARM_ROUNDS + _ROUNDS):
        for place, side in enumerate((young, old)):
            began = time.perf_counter()
            # Asking a data frame's physical plan for its partitions runs nothing but the planning.
            read(side)._jdf.queryExecution().toRdd().getNumPartitions()
            planned = time.perf_counter()
            read(side).write.format("noop").mode("overwrite").save()
            if number >= _WARM_ROUNDS:
                plans[place].add(planned - began)
                scans[place].add(time.perf_counter() - planned)
    return plans, scans
