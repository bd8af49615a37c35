"""Deliberate mistakes in the typed columns of tables, for worlds whose topics all have some."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from sparklog.broker import config_changes
from sparklog.formats.values import columns as column_sets
from sparklog.formats.values.columns import ColumnSet, Plan
from sparklog.storage.maintenance import file_compaction
from sparklog.storage.maintenance.file_compaction import FileGroup
from sparklog.storage.objects import Store
from sparklog.storage.snapshot import TableFile, TableSnapshot
from sparklog.storage.table import changes, data_file
from sparklog.storage.table.changes import TableChange
from sparklog.storage.table.data_file import Encoded
from sparklog.storage.table.names import data_path
from tests.simulation import typed
from tests.simulation.faults import Rates
from tests.simulation.mutation import Mutation

_CALM: Final = Rates()
_merge: Final = file_compaction._merge
_new_file: Final = data_file.new_file
_describe_change: Final = changes.describe_change
_with_fields: Final = column_sets.with_fields


def _merge_copies(store: Store, topic: str, group: FileGroup) -> Encoded | None:
    """Copies the typed columns of the merged files."""
    encoded = _merge(store, topic, group)
    plan = group.plan
    if encoded is None or plan is None:
        return encoded
    files = [_read(store, data_path(topic, file)) for file in group.files]
    copied = pa.concat_tables(files, promote_options="default").sort_by("offset")
    rows = pq.read_table(encoded.data, partitioning=None)
    for field in plan.fields:
        place = rows.schema.get_field_index(field.name)
        if place >= 0 and field.name in copied.schema.names:
            rows = rows.set_column(place, field, copied.column(field.name))
        elif place >= 0:
            rows = rows.drop_columns(field.name)
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink)
    return dataclasses.replace(encoded, data=sink.getvalue())


def _read(store: Store, path: str) -> pa.Table:
    return pq.read_table(store.open(path), partitioning=None)


def _new_file_untagged(encoded: Encoded, **named: Any) -> TableFile:
    return _new_file(dataclasses.replace(encoded, columns=None), **named)


def _describe_from_memory(
    snapshot: TableSnapshot, partitions: int, config: Mapping[str, str]
) -> TableChange:
    """Changes the first set of the topic that was ever seen."""
    first = _first_sets.setdefault(snapshot.topic_id, snapshot.columns)
    return _describe_change(dataclasses.replace(snapshot, columns=first), partitions, config)


_first_sets: Final[dict[str | None, ColumnSet | None]] = {}


def _generations_alone(columns: ColumnSet, tag: str | None) -> list[int | None]:
    """Compares no checksums."""
    known = {generation for generation, _ in columns.history}
    named = [int(each.partition(".")[0]) for each in (tag or "").split(",") if each]
    return [each if each in known else None for each in named]


def _plan_without_tags(columns: ColumnSet | None, _files: Iterable[TableFile]) -> Plan | None:
    """Fills the columns of new files alone."""
    return None if columns is None else columns.plan()


def _forget_dropped(known: ColumnSet | None, wanted: Sequence[pa.Field]) -> ColumnSet | None:
    """Forgets columns that are no longer filled, so that their names are free."""
    if known is not None:
        known = msgspec.structs.replace(known, columns=known.filled)
    return _with_fields(known, wanted)


def _mutation(
    name: str,
    owner: Any,
    attribute: str,
    mistake: Any,
    *,
    rates: Rates = _CALM,
    aim: str = "",
    **profile: Any,
) -> Mutation:
    required: dict[str, Any] = {
        "typed": (typed.SCHEMAS[0],) * 3,
        "is_heavy": False,
        "has_large_batches": False,
        "has_vacuum": False,
        "clone": "",
        "administrators": 2,
        **profile,
    }
    return Mutation(
        name=f"columns: {name}",
        patches=((owner, attribute, mistake),),
        rates=rates,
        aim=aim,
        profile=tuple(required.items()),
    )


MUTATIONS: Final = (
    _mutation("a merge copies them", file_compaction, "_merge", _merge_copies),
    _mutation("a file has no tag", data_file, "new_file", _new_file_untagged),
    _mutation(
        "the set is taken from memory", config_changes, "describe_change", _describe_from_memory
    ),
    _mutation(
        "checksums of the history are ignored",
        ColumnSet,
        "_generations",
        _generations_alone,
        rates=Rates(stall=0.06),
        aim="after put_new topics/t0/partition",
        engines=1,
        administrators=5,
        idempotent=3,
        has_worker=False,
        partitions=(2, 2),
        steps=3_000,
    ),
    _mutation("a rewrite ignores the tags of files", data_file, "plan_for", _plan_without_tags),
    _mutation("a dropped name is given again", column_sets, "with_fields", _forget_dropped),
)

CLUSTER_MUTATIONS: Final = (
    _mutation(
        "the set is taken from memory in a cluster",
        config_changes,
        "describe_change",
        _describe_from_memory,
    ),
    _mutation("a merge in a cluster copies them", file_compaction, "_merge", _merge_copies),
)
