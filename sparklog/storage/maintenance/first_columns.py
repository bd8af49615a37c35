"""Finds the first typed columns of a topic whose configuration asks for some, but names none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sparklog.formats import topic_config
from sparklog.formats.topic_config import VALUE_FORMAT, VALUE_SCHEMA
from sparklog.formats.values.proposal import propose
from sparklog.storage.maintenance import file_compaction
from sparklog.storage.snapshot import TableFile, TableSnapshot
from sparklog.storage.table.names import data_path
from sparklog.storage.table.topic_table import TopicTable

ENOUGH_RECORDS: Final = 1_000
ENOUGH_SECONDS: Final = 10.0
_MOST_FILES: Final = 16


def are_wanted(snapshot: TableSnapshot) -> bool:
    """Returns whether the columns have yet to be found."""
    config = snapshot.config
    is_json = topic_config.value_of(config, VALUE_FORMAT) == topic_config.JSON
    return is_json and not topic_config.value_of(config, VALUE_SCHEMA)


def find(table: TopicTable) -> str:
    """Returns columns for the newest records of the table, as DDL; empty if there are too few.

    Fewer than `ENOUGH_RECORDS` suffice once the oldest of them is `ENOUGH_SECONDS` old. Raises what
    `file_compaction.read_rows` raises.
    """
    snapshot = table.snapshot
    files = sorted((file for each in snapshot.files for file in each), key=_age)[:_MOST_FILES]
    if not files:
        return ""
    seconds = (table.clock.now_us() - files[-1].modified_us) / 1e6
    if seconds < ENOUGH_SECONDS and sum(file.rows or 0 for file in files) < ENOUGH_RECORDS:
        return ""
    known = snapshot.columns.columns if snapshot.columns is not None else ()
    return propose(_values(table, snapshot, files), known).schema


def _age(file: TableFile) -> int:
    return -file.modified_us


def _values(
    table: TopicTable, snapshot: TableSnapshot, files: list[TableFile]
) -> Iterator[bytes | None]:
    left = ENOUGH_RECORDS
    for file in files:
        path, end = data_path(table.topic, file), snapshot.ends[file.partition]
        for batch in file_compaction.read_rows(
            table.store, path, file, end, columns=("offset", "value")
        ):
            yield from batch.column("value")[-left:].to_pylist()
            left -= batch.num_rows
            if left <= 0:
                return
