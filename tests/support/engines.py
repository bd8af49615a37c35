"""Another engine that writes to a topic's table: it supports Delta, but not sparklog.

Its files have their own naming scheme, are not in the order of offsets, can overlap, and come with
or without statistics.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Literal, TypeAlias
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sparklog.formats.record import FILE_SCHEMA
from sparklog.storage.snapshot import TableFile
from sparklog.storage.table import delta_log
from sparklog.storage.table.names import data_path
from sparklog.storage.table.topic_table import TopicTable

Statistics: TypeAlias = Literal["all", "count", "none"]
"""Statistics that the engine writes for a file: bounds and counts, counts only, or none."""

_names = itertools.count()


def rows_in(table: TopicTable, file: TableFile) -> pa.Table:
    """All rows of one file."""
    with table.store.open(data_path(table.topic, file)) as source:
        return pq.read_table(source, schema=FILE_SCHEMA)


def rewrite(
    table: TopicTable,
    files: Sequence[TableFile],
    *,
    into: int = 1,
    without: Collection[int] = (),
    statistics: Statistics = "all",
) -> None:
    """Rewrites `files`, all of one partition, as new files in one commit.

    Args:
        into: number of new files; rows are dealt to them in turn, so that they overlap.
        without: offsets of rows that are deleted in the process.
    """
    rows = pa.concat_tables([rows_in(table, file) for file in files])
    left = pc.invert(pc.is_in(rows["offset"], pa.array(sorted(without), pa.int64())))
    rows = rows.filter(left).sort_by([("offset", "descending")])
    places = np.arange(rows.num_rows)
    dealt = [rows.take(places[part::into]) for part in range(into)]
    partition = files[0].partition
    adds = [_add(table, partition, part, statistics, bool(without)) for part in dealt if len(part)]
    removes = [_remove(table, file, bool(without)) for file in files]
    _commit(table, delta_log.Actions(adds=adds, removes=removes), bool(without))


def vacuum(table: TopicTable) -> None:
    """VACUUM with zero retention: deletes each data file that the table no longer references.

    As with delta-spark and delta-rs, a file whose removal is dated in the future remains.
    """
    kept = kept_by_vacuum(table)
    table.store.delete(f"{table.folder}/{path}" for path in _data_files(table) if path not in kept)


def kept_by_vacuum(table: TopicTable) -> set[str]:
    """Files of the newest version, and those whose removal is dated now or later."""
    snapshot = table.refresh()
    now_ms = table.clock.now_us() // 1_000
    return {unquote(file.path) for files in snapshot.files for file in files} | {
        path
        for path, remove in table._replay.removed.items()
        if (remove.deletion_timestamp or 0) >= now_ms
    }


def _data_files(table: TopicTable) -> Iterator[str]:
    for stat in table.store.walk(table.folder):
        if not stat.name.startswith(delta_log.LOG_FOLDER):
            yield stat.name


def _add(
    table: TopicTable, partition: int, rows: pa.Table, statistics: Statistics, data_change: bool
) -> delta_log.Add:
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, row_group_size=5, write_statistics=statistics != "none")
    data = sink.getvalue()
    name = f"partition={partition}/part-{next(_names):05d}.parquet"
    table.store.put_new(f"{table.folder}/{name}", data)
    bounds = pc.min_max(rows["offset"])
    told = statistics == "all"
    file = TableFile(
        path=name,
        partition=partition,
        size_bytes=data.size,
        rows=rows.num_rows,
        first=bounds["min"].as_py() if told else None,
        last=bounds["max"].as_py() if told else None,
        modified_us=table.clock.now_us() // 1_000 * 1_000,
    )
    add = delta_log.add_of(file, data_change=data_change)
    if statistics != "none":
        return add
    return delta_log.Add(
        path=add.path,
        partition_values=add.partition_values,
        size=add.size,
        modification_time=add.modification_time,
        data_change=data_change,
    )


def _remove(table: TopicTable, file: TableFile, data_change: bool) -> delta_log.Remove:
    return delta_log.Remove(
        path=file.path,
        deletion_timestamp=table.clock.now_us() // 1_000,
        data_change=data_change,
        extended_file_metadata=True,
        partition_values={"partition": str(file.partition)},
        size=file.size_bytes,
    )


def _commit(table: TopicTable, actions: delta_log.Actions, is_delete: bool) -> None:
    version = table.refresh().version + 1
    info = delta_log.CommitInfo(
        timestamp=table.clock.now_us() // 1_000,
        operation="DELETE" if is_delete else "OPTIMIZE",
        operation_parameters={},
        is_blind_append=False,
        engine_info="another",
        txn_id=f"{version}",
    )
    path = f"{table.log_folder}/{delta_log.commit_name(version)}"
    table.store.put_new(path, delta_log.encode_commit(info, actions))
    table.refresh()
