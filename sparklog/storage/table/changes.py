"""Changes to a topic's table: the content of commits, as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from sparklog.formats import topic_config
from sparklog.formats.values.columns import ColumnSet
from sparklog.storage.snapshot import TableFile, TableSnapshot
from sparklog.storage.table import delta_log
from sparklog.storage.table.names import end_app_id, start_app_id

TOPIC_ID: Final = "sparklog.topicId"
PARTITIONS: Final = "sparklog.partitions"
CONFIG: Final = "sparklog.config"
CREATOR: Final = "sparklog.creator"
COLUMNS: Final = "sparklog.columns"
"""The typed columns (`ColumnSet`); the schema follows this property."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableChange:
    """The content of a commit. Removed files must be active, and added files new."""

    adds: tuple[TableFile, ...] = ()
    removes: tuple[TableFile, ...] = ()
    txns: Mapping[str, int] = field(default_factory=dict)
    """Versions by app id, which never decrease."""
    properties: Mapping[str, str | None] | None = None
    """Table properties to set, or to remove if None."""
    data_change: bool = True
    """False if the same rows are only moved to other files."""
    drops_rows: bool = False
    """Some rows of the removed files are in no added file; all others are, whatever `data_change`.

    The protocol requires `dataChange` of an action to be true if its rows are nowhere else in the
    commit (https://github.com/delta-io/delta/blob/master/PROTOCOL.md, "Add File and Remove File").
    """
    operation: str = "WRITE"
    preparation: int | None = None
    """The preparation whose files are added; it must be open, and the commit closes it."""
    restores: bool = False
    """The added files were in the table before, so they may be old."""
    create: bool = False
    """The commit creates a topic, in a new table or in that of a deleted topic."""


Decide: TypeAlias = Callable[[TableSnapshot], TableChange | None]
"""Chooses the change to commit on top of the given version; None abandons the commit."""


def create_change(
    topic_id: str,
    partitions: int,
    config: Mapping[str, str],
    *,
    creator: tuple[int, int] | None = None,
) -> TableChange:
    """Returns the change that creates a topic, with all partitions empty at offset 0.

    `creator`: the id and epoch of the broker that will add the topic to the metadata. Raises
    `BadOption` for typed columns that cannot be added.
    """
    app_ids = [
        name(topic_id, partition)
        for partition in range(partitions)
        for name in (end_app_id, start_app_id)
    ]
    return TableChange(
        txns=dict.fromkeys(app_ids, 0),
        properties={
            TOPIC_ID: topic_id,
            PARTITIONS: str(partitions),
            CONFIG: msgspec.json.encode(dict(config)).decode(),
            COLUMNS: _encoded(topic_config.columns_of(config, None)),
        }
        | ({} if creator is None else {CREATOR: f"{creator[0]}/{creator[1]}"}),
        operation="CREATE TABLE",
        create=True,
    )


def describe_change(
    snapshot: TableSnapshot, partitions: int, config: Mapping[str, str]
) -> TableChange:
    """Returns the change that sets the configuration and partition count, which never shrinks.

    Raises `BadOption` for typed columns that cannot be added.
    """
    topic_id = snapshot.topic_id
    assert topic_id is not None
    assert partitions >= snapshot.partitions
    columns = topic_config.columns_of(config, snapshot.columns)
    return TableChange(
        txns={
            name(topic_id, partition): 0
            for partition in range(snapshot.partitions, partitions)
            for name in (end_app_id, start_app_id)
        },
        properties={
            PARTITIONS: str(partitions),
            CONFIG: msgspec.json.encode(dict(config)).decode(),
        }
        | ({} if columns == snapshot.columns else {COLUMNS: _encoded(columns)}),
        operation="SET TBLPROPERTIES",
    )


def columns_change(columns: ColumnSet) -> TableChange:
    """Returns the change that gives the table these typed columns."""
    return TableChange(properties={COLUMNS: columns.encode()}, operation="ADD COLUMNS")


def delete_change(snapshot: TableSnapshot) -> TableChange:
    """Returns the change that deletes the topic: removes every file, and clears the topic id.

    An append-only table may be dropped too, so this property is unset with the topic.
    """
    ours = (TOPIC_ID, PARTITIONS, CONFIG, CREATOR, COLUMNS)
    is_barred = snapshot.append_only
    return TableChange(
        removes=tuple(file for files in snapshot.files for file in files),
        properties=dict.fromkeys((*ours, delta_log.APPEND_ONLY) if is_barred else ours),
        operation="DELETE",
    )


def _encoded(columns: ColumnSet | None) -> str | None:
    return None if columns is None else columns.encode()
