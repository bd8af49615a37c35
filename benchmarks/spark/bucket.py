"""The lag of a streaming query that reads a hundred topics from an object store, and its requests.

The query reads the root itself, as `format("sparklog")` does by default. The store is a process
that takes 20 ms per request and counts those of the broker and of the query. A producer of another
process stamps each record with this machine's clock. The age of a record is measured when its batch
is at the driver.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks import jars
from benchmarks.progress import doing
from benchmarks.spark.setup import needs_spark, session
from benchmarks.store_process import ROOT, StoreProcess
from benchmarks.wide.measures import create_topics, result_of, start_load
from sparklog.bench.broker import BrokerProcess, FreshRoot
from sparklog.bench.report import BenchOptions, Measurement
from sparklog.prices import HOURS_PER_MONTH, prices_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_TOPICS: Final = 100
_PARTITIONS: Final = 4
_RATE: Final = 1_000
"""Records/s over all topics."""
_STORE_MILLISECONDS: Final = 20
_MEASURED: Final = 6.0
"""The measured part, in multiples of a timed measure's seconds: a table is published twice."""
_WARM_SECONDS: Final = 15.0
_LAG_SECONDS: Final = 1.5
_PATIENCE_SECONDS: Final = 60.0
_READER: Final = "reader"


@needs_spark
def bucket(options: BenchOptions) -> Iterator[Measurement]:
    """Lag and requests of a query on 100 topics in a bucket, with the default budget of puts."""
    seconds = options.seconds * _MEASURED
    with (
        FreshRoot(options.folder) as folder,
        StoreProcess(_STORE_MILLISECONDS) as store,
        BrokerProcess(ROOT, store.environment("broker"), kafka="127.0.0.1:0") as broker,
        session(jars.find(), folder) as spark,
    ):
        with doing(f"{_TOPICS} topics"):
            names = [f"wide-{number}" for number in range(_TOPICS)]
            create_topics(broker, names, _PARTITIONS)
        load = start_load(
            broker.kafka_address,
            *(f"--topics={_TOPICS}", f"--partitions={_PARTITIONS}", f"--rate={_RATE}"),
            f"--seconds={_WARM_SECONDS + seconds}",
        )
        try:
            with doing(f"a query on {_TOPICS} topics at {_RATE:,} records/s in all"):
                yield from _measure(spark, store, load, str(folder / "checkpoint"), seconds)
        finally:
            load.kill()
            load.wait()


def _measure(
    spark: SparkSession,
    store: StoreProcess,
    load: subprocess.Popen[bytes],
    checkpoint: str,
    seconds: float,
) -> Iterator[Measurement]:
    ages = _Ages()
    frame = (
        spark.readStream.format("sparklog")
        .option("root", ROOT)
        .option("subscribePattern", "wide-.*")
        .option("startingOffsets", "earliest")
        .options(**{f"storage.{key}": value for key, value in store.options(_READER).items()})
        .load()
    )
    query = (
        frame.writeStream.foreachBatch(ages.note).option("checkpointLocation", checkpoint).start()
    )
    try:
        time.sleep(_WARM_SECONDS)
        ages.clear()
        before, began = store.requests(_READER), time.perf_counter()
        time.sleep(seconds)
        took, requests = time.perf_counter() - began, store.requests(_READER) - before
        measured = ages.clear()
        sent = result_of(load)
        ages.await_count(sent["acked"])
        failed = query.exception()
        if failed is not None:
            raise failed
    finally:
        query.stop()
    found = np.concatenate(measured)
    p50, p99 = np.percentile(found, [50, 99])
    yield Measurement(
        name=f"{_TOPICS} topics × {_PARTITIONS} partitions in a bucket of {_STORE_MILLISECONDS} ms,"
        f" {_RATE:,} records/s in all, one streaming query: age of a record when it is read",
        value=f"p50 {p50:.2f}, p99 {p99:.2f}, max {found.max():.2f} s",
        target=f"p99 ≤ {_LAG_SECONDS:g} s",
        met=bool(p99 <= _LAG_SECONDS),
        detail=f"{len(measured)} batches, {len(found):,} records, {sent['refused']} refused;"
        f" a load of {os.getloadavg()[0]:.1f}",
    )
    hours = took / 3600
    prices = prices_of(ROOT)
    dollars = prices.dollars(
        puts=requests["puts"], lists=requests["lists"], reads=requests["reads"]
    )
    kinds = ", ".join(f"{kind} {count / hours:,.0f}" for kind, count in requests.most_common())
    yield Measurement(
        name="the same: requests of the query per hour",
        value=f"{requests.total() / hours:,.0f}",
        target="printed",
        detail=f"{kinds}; {dollars / hours * HOURS_PER_MONTH:,.0f} dollars per month at the prices"
        f" of {prices.name}",
    )


class _Ages:
    """The age of each record in seconds when its batch was at the driver. Thread-safe."""

    def __init__(self) -> None:
        self._batches: list[Any] = []
        self._count = 0

    def note(self, batch: DataFrame, _batch_id: int) -> None:
        """The `foreachBatch` function."""
        stamps = batch.select("timestamp").toArrow().column(0).cast("int64").to_numpy()
        if len(stamps):
            self._batches.append(time.time() - stamps / 1e6)
            self._count += len(stamps)

    def clear(self) -> list[Any]:
        """Returns the ages by batch since the last call."""
        found, self._batches = self._batches, []
        return found

    def await_count(self, count: int) -> None:
        """Waits until so many records were read in all. Raises RuntimeError if some are missing.

        There may be more: the producer is not idempotent.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self._count < count and time.monotonic() < deadline:
            time.sleep(0.1)
        if self._count < count:
            raise RuntimeError(f"the query has read {self._count:,} of {count:,} records")
