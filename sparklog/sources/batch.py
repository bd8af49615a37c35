"""Batch read of the records between two positions, which planning fixes."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from sparklog import errors
from sparklog.formats.values.columns import Plan
from sparklog.sources import tasks
from sparklog.sources.offsets import Position
from sparklog.sources.options import SourceOptions
from sparklog.sources.planner import Planner
from sparklog.sources.reader import task_credentials_for, view_of
from sparklog.sources.scan import Scan
from sparklog.sources.starting_offsets import EARLIEST, LATEST
from sparklog.spark_errors import rows_sentence_first, sentence_first


def planner_of(options: SourceOptions) -> Planner:
    """Returns a planner for the topics that the options select."""
    return Planner(
        view_of(options.location), options.selection, fail_on_data_loss=options.fail_on_data_loss
    )


def typed_columns(options: SourceOptions) -> Plan:
    """Returns the typed columns of the topic that the options name.

    Raises what `Planner.typed_columns` and `Planner.refresh` raise.
    """
    planner = planner_of(options)
    planner.refresh()
    return planner.typed_columns()


def range_of(planner: Planner, options: SourceOptions) -> tuple[Position, Position]:
    """Returns the start and the end of the batch, as of the planner's last refresh.

    Raises what `Planner.resolve` raises, and `BadOption` for an end before the start.
    """
    late_is_latest = options.late_start_is_latest
    start = planner.resolve(
        "startingOffsets", options.starting, otherwise=EARLIEST, late_is_latest=late_is_latest
    )
    end = planner.resolve("endingOffsets", options.ending, otherwise=LATEST, late_is_latest=True)
    for name, upto in end.items():
        for number, last in upto.offsets.items():
            first = start[name].offsets[number]
            if first > last:
                reason = f"it is before the start of {name}-{number}, offset {first}"
                raise errors.BadOption(option="endingOffsets", value=last, reason=reason)
    return start, end


class BatchReader(DataSourceReader):
    """Plans on the driver, reads on executors.

    Supports no filter pushdown: Spark 4.2 keeps one plan for all DataFrames of a `load()`, so rows
    that one of them filters out would be missing from the others (ADR 10).
    """

    def __init__(self, options: SourceOptions, scan: Scan) -> None:
        self._options = options
        self._scan = scan

    @sentence_first
    def partitions(self) -> list[InputPartition]:
        options = self._options
        planner = planner_of(options)
        planner.refresh()
        start, end = range_of(planner, options)
        slices = planner.slices(start, end)
        packed = tasks.pack(
            slices,
            parallelism=options.parallelism,
            row_groups=planner.row_groups,
            least=options.min_partitions,
            most_records=options.max_records_per_partition,
        )
        credentials = task_credentials_for(options.location, slices)
        return [InputPartition(tasks.encode(each, credentials)) for each in packed]

    @rows_sentence_first
    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        # If there is nothing to read, Spark still calls this once; before 4.2, without a partition.
        encoded = None if partition is None else partition.value
        return self._scan.batches(tasks.decode(encoded))
