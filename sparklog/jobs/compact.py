"""Compacts a topic's table: the janitor's work on one large table, done by Spark.

    spark-submit jobs/compact.py --root s3://bucket/log orders

The driver plans and commits with the code of a broker's janitor, and under its `txn`. Spark's tasks
only read files and write their replacements. A commit is made only if its inputs are in the version
right before it: if a broker and a job have rewritten the same file, one wins, and the other drops
its rewrite. Files that a killed job leaves behind are in no version, and a broker's janitor removes
them as orphans.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from sparklog import errors
from sparklog.clock import SystemClock
from sparklog.display import counted
from sparklog.formats.topic_names import unknown_topic
from sparklog.jobs.rewriting import PassSteps, Piece, rewrite
from sparklog.jobs.running import echo, parallelism, progress, run, spark_session
from sparklog.jobs.targets import last_line, root_for_spark
from sparklog.options import storage_options
from sparklog.storage.maintenance import file_compaction, key_compaction, retention
from sparklog.storage.maintenance.file_compaction import FileGroup, Merge
from sparklog.storage.maintenance.key_compaction import CompactionPass
from sparklog.storage.objects import ObjectMissing, open_store
from sparklog.storage.snapshot import TableFile, TableSnapshot
from sparklog.storage.table.encoding import APPEND_ONLY_REASON
from sparklog.storage.table.topic_table import TopicTable
from sparklog.terminal.options import RootOption, root_metadata

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ROUND_TASKS: Final = 4
"""Tasks per core in a round; their files are committed together."""
_ROUND_FILES: Final = 20_000
"""Maximum number of files in a round of several tasks, each of which is sent the full list."""
_ATTEMPTS: Final = 3
"""Maximum number of passes over a partition, if a pass cannot be committed."""
_YOUNG: Final = 4
"""Minimum age of the files that an attempt takes, as a multiple of the last one's duration.

A broker merges new files, and seldom files that it has left alone for that long.
"""


def compact(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.", show_default=False)],
    root: RootOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done, without doing it.")
    ] = False,
) -> None:
    """Compacts a topic's table with Spark, for a table that is too large for a broker.

    Removes the records that are past retention.ms or retention.bytes; then, with
    cleanup.policy=compact, all but the last record of each key; then merges small files. Brokers
    can serve the topic during the run. It can be stopped and run again at any time.

    Example: spark-submit jobs/compact.py --root ./data orders
    """
    uri = root_for_spark(root)
    topics = root_metadata(uri).reload().topics
    known = topics.get(topic)
    if known is None:
        raise unknown_topic(topic, topics)
    options = storage_options(uri)
    table = TopicTable(open_store(uri, options), topic, clock=SystemClock())
    if table.refresh().topic_id != known.topic_id:
        raise errors.UnknownTopic(topic=topic)
    job = _Compaction(table, options)
    if dry_run:
        job.show()
    else:
        job.run()


class _Compaction:
    """One run."""

    def __init__(self, table: TopicTable, options: Mapping[str, str]) -> None:
        """`options` are those of the table's store."""
        self._table = table
        self._options = options
        self._rows = self._superseded = self._files_before = self._files_after = 0
        self._left: list[str] = []
        """Work on files that others have since replaced, or that would have taken too long."""
        self._failures: list[errors.SparklogError] = []

    def show(self) -> None:
        """Prints the plan for the version of the table that was read."""
        self._note_append_only()
        cuts = retention.choose(self._table.snapshot, now_us=self._table.clock.now_us())
        passes = key_compaction.choose(self._table, everything=True)
        groups = self._groups(self._table.snapshot)
        _echo_plan("retention", "removed", [file for cut in cuts for file in cut.files])
        _echo_plan("keys", "read", [file for each in passes for file in each.files])
        _echo_plan("merges", "merged", [file for each in groups for file in each.files])
        typer.echo(f"{self._table.topic}: nothing was written")

    def run(self) -> None:
        """Does all the work there is. Raises the first failure, once everything else is done."""
        began = time.perf_counter()
        self._note_append_only()
        retained = retention.retain(self._table)
        self._compact_keys()
        self._merge()
        topic = self._table.topic
        said = last_line(topic, self._rows, time.perf_counter() - began)
        said += f", {counted(self._files_after, 'file')} in place of {self._files_before:,}"
        parts = [
            f", {counted(self._superseded, 'superseded record')} removed"
            if self._superseded
            else "",
            f", {counted(retained, 'file')} removed by retention" if retained else "",
            f"; left for another run: {', '.join(self._left)}" if self._left else "",
        ]
        is_idle = not (self._files_before or retained or self._left or self._failures)
        typer.echo(f"{topic}: nothing to compact" if is_idle else said + "".join(parts))
        for failure in self._failures:
            raise failure

    def _note_append_only(self) -> None:
        snapshot = self._table.snapshot
        if snapshot.append_only and retention.removes_records(snapshot.config):
            echo(f"the files of {self._table.topic} are only merged: {APPEND_ONLY_REASON}")

    @functools.cached_property
    def _spark(self) -> SparkSession:
        return spark_session("compact", with_delta=False)

    # -------------------------------------------------------------------------- keys

    def _compact_keys(self) -> None:
        """Removes superseded records, in a pass over each partition that has any."""
        table = self._table
        table.refresh()
        passes = key_compaction.choose(table, everything=True)
        lost: set[int] = set()
        for _ in range(_ATTEMPTS):
            if not passes:
                break
            began_us = table.clock.now_us()
            lost -= {each.partition for each in passes}
            lost.update(self._lost(passes))
            table.refresh()
            young_us = began_us - _YOUNG * (table.clock.now_us() - began_us)
            passes = key_compaction.choose(table, everything=True, before_us=young_us)
            passes = [each for each in passes if each.partition in lost]
        self._left += [f"partition {each}" for each in sorted(lost)]

    def _lost(self, passes: Sequence[CompactionPass]) -> Iterator[int]:
        """Runs the passes, and yields the partitions of those that must be repeated."""
        while passes:
            count = _round(passes, parallelism(self._spark))
            part, passes = passes[:count], passes[count:]
            for each, written in zip(part, self._written("keys", part), strict=True):
                if not self._is_committed(each, written):
                    yield each.partition

    def _is_committed(self, each: CompactionPass, written: PassSteps) -> bool:
        """Returns false if the pass must be repeated.

        Either others have since replaced its files, or its own files are too old to be added, since
        it has waited for a longer pass.
        """
        steps = iter(written)
        try:
            removed = key_compaction.commit(self._table, each, steps)
        except errors.Corrupt as error:
            self._failures.append(error)
            return True
        except errors.TimedOut:
            return False
        finally:
            with contextlib.suppress(errors.SparklogError, ObjectMissing):  # `written.failure`
                key_compaction.discard(self._table, steps)
        if removed is None:
            return False
        self._superseded += removed
        for step in written.steps:
            self._count(step.removes, step.adds)
        if not written.steps[-1].txns:
            self._left.append(f"the rest of partition {each.partition}")
        return True

    # -------------------------------------------------------------------------- merges

    def _merge(self) -> None:
        """Merges small files, and records the failures of files that cannot be merged."""
        table = self._table
        pieces = list(file_compaction.together(self._groups(table.refresh())))
        failed: list[Merge] = []
        lost = 0
        while pieces:
            count = _round(pieces, _ROUND_TASKS * parallelism(self._spark))
            part, pieces = pieces[:count], pieces[count:]
            found = [each for written in self._written("merges", part) for each in written]
            failed += [each for each in found if each.failure is not None]
            merges = [each for each in found if each.failure is None]
            try:
                done = file_compaction.commit(table, merges)
            except errors.Corrupt as error:
                self._failures.append(error)
                continue
            lost += len(merges) - len(done)
            for each in done:
                self._count(each.group.files, each.files)
            records = counted(self._rows, "record is", "records are")
            echo(f"{counted(self._files_before, 'file')} with {records} replaced")
        if lost:
            self._left.append(counted(lost, "group of files", "groups of files"))
        try:
            file_compaction.commit(table, failed)
        except errors.SparklogError as error:
            self._failures.append(error)

    def _groups(self, snapshot: TableSnapshot) -> list[FileGroup]:
        groups = file_compaction.choose(
            snapshot,
            everything=True,
            borders=key_compaction.borders(self._table, snapshot),
            span_us=retention.span_us(snapshot.config),
        )
        # A lone file would be encoded again by each run; one without statistics receives them.
        return [each for each in groups if len(each.files) > 1 or each.files[0].first is None]

    # -------------------------------------------------------------------------- Spark

    def _written(self, what: str, pieces: Sequence[Piece]) -> list[Any]:
        """Returns the results of one task per piece, in the order of the pieces."""
        table, count = self._table, len(pieces)
        work = functools.partial(
            rewrite,
            table.store.uri,
            self._options,
            table.topic,
            pieces,
            table.clock.now_us(),
        )
        frame = self._spark.range(0, count, 1, count).mapInArrow(work, "written BINARY")
        with progress(self._spark, what):
            rows = frame.collect()
        return [pickle.loads(row["written"]) for row in rows]

    def _count(self, before: Sequence[TableFile], after: Sequence[TableFile]) -> None:
        self._rows += sum(file.rows or 0 for file in before)
        self._files_before += len(before)
        self._files_after += len(after)


def _round(pieces: Sequence[Piece], most: int) -> int:
    """Returns how many of the first pieces form the next round: one, or more with few files."""
    files = itertools.accumulate(map(_count_files, pieces[:most]))
    return max(1, sum(count <= _ROUND_FILES for count in files))


def _count_files(piece: Piece) -> int:
    if isinstance(piece, CompactionPass):
        return len(piece.files)
    return sum(len(group.files) for group in piece)


def _echo_plan(what: str, done: str, files: Sequence[TableFile]) -> None:
    size = sum(file.size_bytes for file in files)
    rows = sum(file.rows or 0 for file in files)
    sizes = f"{counted(rows, 'record')}, {counted(size, 'byte')}"
    echo(f"{what}: {counted(len(files), 'file')} would be {done}, {sizes}")


def main() -> None:
    """The program."""
    run(compact, "compact")


if __name__ == "__main__":
    main()
