"""Finds the files with rows that waited for a schema of a registry, once it is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sparklog import limits
from sparklog.formats.values.columns import waiting_of
from sparklog.storage import schema_texts
from sparklog.storage.maintenance import file_compaction
from sparklog.storage.maintenance.file_compaction import FileGroup
from sparklog.storage.snapshot import TableFile, TableSnapshot
from sparklog.storage.table.topic_table import TopicTable


def schemas_of(snapshot: TableSnapshot) -> set[int]:
    """Returns the schemas that rows of the table wait for."""
    return {each for file in _files(snapshot) for each in waiting_of(file.columns).by_schema}


def fillable(table: TopicTable, ready: Iterable[int]) -> Iterator[list[FileGroup]]:
    """Yields the files that a rewrite fills, those to be committed together.

    `ready`: the schemas whose columns the table has. Raises what `SchemaTexts.find` raises.
    """
    known = schema_texts.of(table.store).find(ready).keys()
    snapshot = table.snapshot
    groups = [
        FileGroup(
            topic_id=snapshot.topic_id or "",
            partition=file.partition,
            files=(file,),
            end=snapshot.ends[file.partition],
            is_last=2 * file.size_bytes > limits.COMPACT_TARGET_BYTES,
            columns=snapshot.columns,
        )
        for file in _files(snapshot)
        if known & waiting_of(file.columns).by_schema.keys()
    ]
    yield from file_compaction.together(groups)


def _files(snapshot: TableSnapshot) -> list[TableFile]:
    """Returns the files that may have rows that wait: none of a table that never had schemas."""
    if snapshot.columns is None or not snapshot.columns.formats:
        return []
    return [file for files in snapshot.files for file in files]
