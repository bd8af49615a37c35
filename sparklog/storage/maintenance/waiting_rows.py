"""Finds the files with rows that waited for a schema of a registry, once it is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sparklog import limits
from sparklog.formats.values.columns import waiting_of
from sparklog.storage import schema_texts
from sparklog.storage.maintenance import file_compaction
from sparklog.storage.maintenance.file_compaction import FileGroup
from sparklog.storage.snapshot import TableFile, TableSnapshot
from sparklog.storage.table.topic_table import TopicTable


def files_of(snapshot: TableSnapshot) -> list[TableFile]:
    """Returns the files with rows that wait."""
    return [file for files in snapshot.files for file in files if waiting_of(file.columns).rows]


def schemas_of(files: Sequence[TableFile]) -> set[int]:
    """Returns the schemas that rows of these files wait for."""
    return {each for file in files for each in waiting_of(file.columns).by_schema}


def fillable(
    table: TopicTable, snapshot: TableSnapshot, files: Sequence[TableFile], ready: Iterable[int]
) -> Iterator[list[FileGroup]]:
    """Yields the files that a rewrite fills, those to be committed together.

    `ready`: the schemas whose columns the table has. Raises what `SchemaTexts.find` raises.
    """
    known = schema_texts.of(table.store).find(ready).keys()
    groups = [
        FileGroup(
            topic_id=snapshot.topic_id or "",
            partition=file.partition,
            files=(file,),
            end=snapshot.ends[file.partition],
            is_last=2 * file.size_bytes > limits.COMPACT_TARGET_BYTES,
            columns=snapshot.columns,
        )
        for file in files
        if known & waiting_of(file.columns).by_schema.keys()
    ]
    yield from file_compaction.together(groups)
