"""Checks the records of topics: their tables, the write-ahead log, and that none is missing.

    spark-submit jobs/verify.py --root s3://bucket/log orders payments

The driver checks the metadata, the Delta logs and the write-ahead log against each other. Spark's
tasks read every file and every entry. Brokers can serve the root during the run.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import pyarrow as pa
import typer

from sparklog import errors, limits
from sparklog.clock import Clock, SystemClock
from sparklog.display import counted
from sparklog.doctor import CheckResult, CheckState
from sparklog.formats.topic_names import MIRROR_SOURCE, unknown_topic
from sparklog.jobs.running import parallelism, progress, run, spark_session
from sparklog.jobs.targets import last_line, root_for_spark
from sparklog.options import storage_options
from sparklog.sources import tasks
from sparklog.storage.follow import RootFollower
from sparklog.storage.metadata.liveness import Heartbeat, read_heartbeats
from sparklog.storage.objects import Store, open_store
from sparklog.storage.snapshot import GapCause, Slice, TableSnapshot
from sparklog.storage.verify import SliceReport, check_slice
from sparklog.terminal.commands import ExitCode
from sparklog.terminal.options import RootOption, root_metadata
from sparklog.terminal.printing import print_finding

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ATTEMPTS: Final = 3
"""Maximum number of plans for the same offsets, since a file may be compacted before it is read."""
_TASK_BYTES: Final = 128 * 2**20
_ENTRY_BYTES: Final = 2**20
"""The cost of opening a file or an entry, in bytes that could be read in that time."""
_report_decoder = msgspec.json.Decoder(SliceReport)


def check_slices(
    root: str,
    storage: Mapping[str, str],
    batches: Iterable[pa.RecordBatch],
    *,
    reads_all: bool,
) -> Iterator[pa.RecordBatch]:
    """Yields a report for each slice.

    `batches` contain the slice, the end of its partition in the table, and the offset below which
    gaps of the partition are explained.
    """
    store = open_store(root, storage)
    for batch in batches:
        reports = []
        for data, end, explained in zip(
            *(column.to_pylist() for column in batch.columns), strict=True
        ):
            (piece,) = tasks.decode(data).slices
            found = check_slice(store, piece, end=end, explained=explained, reads_all=reads_all)
            reports.append(msgspec.json.encode(found))
        yield pa.RecordBatch.from_arrays([pa.array(reports, pa.binary())], ["report"])


# ------------------------------------------------------------------------------ the job


def verify(
    topics: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TOPIC", help="The topics. Default: all of the root.", show_default=False
        ),
    ] = None,
    root: RootOption = None,
    values: Annotated[
        bool,
        typer.Option("--values", help="Also read keys, values and headers, with checksums."),
    ] = False,
    allow_gaps: Annotated[
        bool,
        typer.Option(
            "--allow-gaps",
            help="Accept missing offsets: a DELETE was run on the table, and no broker has noticed"
            " it.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check only what does not require reading records.")
    ] = False,
) -> None:
    """Checks that each record of a topic exists once, and that readers find it.

    Reads every file of the table, and the write-ahead log, and prints a line for each topic and
    for each fault. Nothing is written. Exits with 3 if there is a fault.

    Example: spark-submit jobs/verify.py --root ./data orders
    """
    uri = root_for_spark(root)
    known = {*root_metadata(uri).reload().topics}
    for name in topics or ():
        if name not in known:
            raise unknown_topic(name, known)
    began = time.perf_counter()
    options = storage_options(uri)
    job = _Verification(open_store(uri, options), SystemClock(), allow_gaps=allow_gaps)
    wanted = sorted({*topics} if topics else known)
    snapshots = job.look(wanted)
    if not dry_run:
        spark = spark_session("verify", with_delta=False)
        with progress(spark, "verify"):
            job.scan(spark, options, snapshots, reads_all=values)
    for finding in job.findings:
        print_finding(finding)
    failed = sum(each.state is CheckState.FAIL for each in job.findings)
    said = last_line(uri, job.rows, time.perf_counter() - began)
    typer.echo(f"{said}, {counted(failed, 'fault') if failed else 'no fault'}")
    if failed:
        raise typer.Exit(ExitCode.UNHEALTHY)


class _Verification:
    """One run."""

    def __init__(self, store: Store, clock: Clock, *, allow_gaps: bool) -> None:
        self._store = store
        self._follower = RootFollower(store, clock=clock)
        self._allow_gaps = allow_gaps
        self.findings: list[CheckResult] = []
        self.rows = 0

    # -------------------------------------------------------------------------- the driver

    def look(self, topics: Iterable[str]) -> dict[str, TableSnapshot]:
        """Returns the tables that can be read, after checking their metadata."""
        found: dict[str, TableSnapshot] = {}
        names = list(topics)
        heartbeats = read_heartbeats(self._store)  # first: the flushes that they name are durable
        try:
            found.update(self._follower.refresh(names))
        except errors.SparklogError:  # of one topic, or of the log shared by all
            for name in names:
                try:
                    found.update(self._follower.refresh([name]))
                except errors.SparklogError as error:
                    self._fail(name, str(error), "")
        for name, snapshot in found.items():
            self.check_snapshot(name, snapshot)
        self._check_log(heartbeats)
        return found

    def _check_log(self, heartbeats: Mapping[int, Heartbeat]) -> None:
        """Reports a log that ends before the newest flush that its broker has announced."""
        for (broker, epoch), following in self._follower.next_sequences().items():
            newest = heartbeats.get(broker)
            if newest and newest.epoch == epoch and newest.newest_sequence >= following:
                self._fail(
                    "write-ahead log",
                    f"flushes {following} to {newest.newest_sequence} of broker {broker}, epoch"
                    f" {epoch}, are missing: acked records of any topic may be lost",
                    "restore the log from a backup, before a broker starts on the root",
                )

    def check_snapshot(self, name: str, snapshot: TableSnapshot) -> None:
        wanted = self._follower.metadata.topic(name).partition_count
        if wanted != snapshot.partitions:
            count = counted(snapshot.partitions, "partition")
            said = f"its table has {count}, but the cluster {wanted}"
            self._fail(name, said, "start a broker, which adds partitions to the table")
        for partition, start in enumerate(snapshot.starts):
            place = f"{name}-{partition}"
            if start > snapshot.ends[partition]:
                said = f"{place}: the log start {start} is after the end {snapshot.ends[partition]}"
                self._fail(name, said, "restore the table to a version before it")
            below = [
                file
                for file in snapshot.files[partition]
                if file.last is not None and file.last < start
            ]
            if below:
                count = counted(len(below), "file is", "files are")
                said = f"{place}: {count} below the log start {start}"
                advice = "another engine restored them; the broker's janitor removes them"
                self._add(name, CheckState.WARN, said, advice)
            if (beyond := self._follower.beyond(snapshot, partition)) is not None:
                end = self._follower.ends(snapshot)[partition]
                said = f"{place}: offsets {end} to {beyond - 1} are in neither table nor log"
                advice = "restore the table to its newest version, or table and log from a backup"
                self._fail(name, said, advice)

    # -------------------------------------------------------------------------- Spark

    def scan(
        self,
        spark: SparkSession,
        options: Mapping[str, str],
        snapshots: Mapping[str, TableSnapshot],
        *,
        reads_all: bool,
    ) -> None:
        """Reads all records of the tables and of the log, and reports each topic.

        `options` are those of the store.
        """
        check = functools.partial(check_slices, self._store.uri, options, reads_all=reads_all)
        waiting = [
            (name, partition, start, end)
            for name, snapshot in snapshots.items()
            for partition, (start, end) in enumerate(
                zip(snapshot.starts, self._follower.ends(snapshot), strict=True)
            )
        ]
        ends = {(name, partition): end for name, partition, _, end in waiting}
        reports: dict[tuple[str, int], list[SliceReport]] = defaultdict(list)
        current = dict(snapshots)
        for attempt in range(_ATTEMPTS):
            slices = [
                (piece, current[name].ends[partition], self._explained(current[name], partition))
                for name, partition, start, end in waiting
                for piece in self._plan(current[name], name, partition, start, end)
            ]
            waiting = []
            for found in self._checked(spark, slices, check):
                if found.gone:
                    waiting.append((found.topic, found.partition, found.start, found.end))
                    if attempt == _ATTEMPTS - 1:
                        said = f"{found.gone} does not exist, but the table's log names it"
                        self._fail(found.topic, said, "restore it from a backup")
                else:
                    reports[found.topic, found.partition].append(found)
            for name in {name for name, *_ in waiting}:
                try:
                    current.update(self._follower.refresh([name]))
                except errors.UnknownTopic:
                    del current[name]
                    self._add(name, CheckState.OK, "it was deleted during the run", "")
                except errors.SparklogError as error:
                    del current[name]
                    self._fail(name, str(error), "")
            waiting = [each for each in waiting if each[0] in current]
            if not waiting:
                break
        lost = {(name, partition) for name, partition, *_ in waiting}
        for name, snapshot in current.items():
            self._report(name, snapshot, ends, reports, lost)

    def _plan(
        self, snapshot: TableSnapshot, name: str, partition: int, start: int, end: int
    ) -> list[Slice]:
        """Returns slices of the remaining offsets: retention may have moved the log start."""
        start = max(start, snapshot.starts[partition])
        if start >= end:
            return []
        return self._follower.plan(name, snapshot, partition, start, end)

    def _checked(
        self, spark: SparkSession, slices: list[tuple[Slice, int, int]], check: Any
    ) -> Iterator[SliceReport]:
        if not slices:
            return
        size = sum(
            _ENTRY_BYTES + sum(file.size_bytes for file in piece.files) for piece, *_ in slices
        )
        count = max(-(-size // _TASK_BYTES), min(len(slices), 2 * parallelism(spark)))
        rows = [(bytearray(tasks.encode([piece])), *bounds) for piece, *bounds in slices]
        columns = "slice BINARY, end BIGINT, explained BIGINT"
        frame = spark.createDataFrame(rows, columns).repartition(count)
        for row in frame.mapInArrow(check, "report BINARY").collect():
            yield _report_decoder.decode(row["report"])

    # -------------------------------------------------------------------------- findings

    def _report(
        self,
        name: str,
        snapshot: TableSnapshot,
        ends: Mapping[tuple[str, int], int],
        reports: Mapping[tuple[str, int], list[SliceReport]],
        lost: set[tuple[str, int]],
    ) -> None:
        count = missing = 0
        for partition, start in enumerate(snapshot.starts):
            found = sorted(reports.get((name, partition), ()), key=lambda each: each.start)
            count += sum(each.rows for each in found)
            for report in found:
                for fault in report.faults:
                    self._fail(name, fault.what, fault.advice)
            is_whole = (name, partition) not in lost and not any(each.faults for each in found)
            if is_whole:
                explained = self._explained(snapshot, partition)
                missing += self.check_gaps(
                    name, partition, (start, ends[name, partition]), found, explained=explained
                )
        self.rows += count
        said = f"{counted(snapshot.partitions, 'partition')}, {counted(count, 'record')}"
        state, advice = CheckState.OK, ""
        if missing:
            causes = ", ".join(sorted(_causes(snapshot)))
            said += f", {counted(missing, 'offset')} without a record"
            said += f" ({causes})" if causes else ""
            if any(cause is GapCause.ENGINE for _, cause in snapshot.gaps):
                state = CheckState.WARN
                advice = "DESCRIBE HISTORY shows the DELETE, or the RESTORE to an older version"
        self._add(name, state, said, advice)

    def check_gaps(
        self,
        name: str,
        partition: int,
        bounds: tuple[int, int],
        found: Iterable[SliceReport],
        *,
        explained: int,
    ) -> int:
        """Returns the number of offsets without a record; reports those that are not explained.

        `explained`: the offset below which all are.
        """
        at, end = bounds
        gaps: list[tuple[int, int]] = []
        missing = without = 0

        def add(first: int, until: int) -> None:
            """Adds a gap between slices."""
            nonlocal missing, without
            without += until - first
            first = max(first, explained)
            if first < until:
                gaps.append((first, until))
                missing += until - first

        for report in found:
            if report.rows and report.last >= at:  # others are below a log start that moved
                add(at, max(report.first, at))
                gaps += report.gaps
                missing += report.missing
                without += report.missing + report.explained
                at = report.last + 1
        add(at, max(end, at))
        if missing:
            first, last = gaps[0][0], gaps[0][1] - 1
            count = counted(missing, "offset has", "offsets have")
            self._fail(
                name,
                f"{name}-{partition}: {count} no record, first {first} to {last}",
                "restore the table; if a DELETE was run on it, which DESCRIBE HISTORY shows, and no"
                " broker knows of it, pass --allow-gaps",
            )
        return without

    def _explained(self, snapshot: TableSnapshot, partition: int) -> int:
        """Returns the offset below which gaps of the partition are explained."""
        if self._allow_gaps or _makes_gaps(snapshot.config):
            return limits.OFFSET_MAX
        return max(snapshot.gaps.get((partition, each), 0) for each in GapCause)

    def _fail(self, name: str, said: str, advice: str) -> None:
        self._add(name, CheckState.FAIL, said, advice)

    def _add(self, name: str, state: CheckState, said: str, advice: str) -> None:
        self.findings.append(CheckResult(check=name, state=state, found=said, advice=advice))


def _causes(snapshot: TableSnapshot) -> set[str]:
    """Returns the causes of gaps that the table records."""
    said = {
        GapCause.SOURCE: "mirrored",
        GapCause.COMPACTION: "removed by key compaction",
        GapCause.ENGINE: "removed by another engine",
    }
    return {said[cause] for _, cause in snapshot.gaps}


def _makes_gaps(config: Mapping[str, str]) -> bool:
    """Returns whether new gaps are legal: the topic is compacted, or mirrors a different one."""
    return "compact" in config.get("cleanup.policy", "").split(",") or bool(
        config.get(MIRROR_SOURCE)
    )


def main() -> None:
    """The program."""
    run(verify, "verify")


if __name__ == "__main__":
    main()
