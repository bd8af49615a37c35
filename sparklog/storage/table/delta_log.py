"""Encodes and decodes the Delta log: commits and checkpoints to actions and back.

Rules:

- Pure: bytes in, values out. `replay` computes the state from the actions.
- Only the parts of an action that sparklog needs are kept. `add.stats` and `add.tags` are kept
  unchanged, so that our checkpoints lose nothing that another engine has written.
- Tables use protocol (1, 2), which every Delta reader supports. `foreign_reason` names features and
  columns of a table that sparklog does not support.

Source: https://github.com/delta-io/delta/blob/master/PROTOCOL.md
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from sparklog import errors
from sparklog.formats.record import ROW_SCHEMA
from sparklog.formats.values.columns import ERROR, ColumnSet
from sparklog.storage.snapshot import TableFile

READER_VERSION: Final = 1
WRITER_VERSION: Final = 2
LOG_FOLDER: Final = "_delta_log"
LAST_CHECKPOINT: Final = "_last_checkpoint"

# ------------------------------------------------------------------------------ actions


class Action(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, gc=False
):
    """Base class of the actions; names and units are those of the protocol."""


class Add(Action, frozen=True, kw_only=True):
    path: str
    partition_values: dict[str, str | None]
    size: int
    modification_time: int
    data_change: bool
    stats: str | None = None
    tags: dict[str, str | None] | None = None
    deletion_vector: dict[str, Any] | None = None


class Remove(Action, frozen=True, kw_only=True):
    path: str
    deletion_timestamp: int | None = None
    data_change: bool
    extended_file_metadata: bool | None = None
    partition_values: dict[str, str | None] | None = None
    size: int | None = None
    tags: dict[str, str | None] | None = None


class Txn(Action, frozen=True, kw_only=True):
    app_id: str
    version: int
    last_updated: int | None = None


class Protocol(Action, frozen=True, kw_only=True):
    min_reader_version: int
    min_writer_version: int
    reader_features: list[str] | None = None
    writer_features: list[str] | None = None


class Format(Action, frozen=True, kw_only=True, omit_defaults=False):
    provider: str
    options: dict[str, str] | None = {}


class Metadata(Action, frozen=True, kw_only=True):
    id: str
    name: str | None = None
    description: str | None = None
    format: Format
    schema_string: str
    partition_columns: list[str]
    configuration: dict[str, str | None]
    created_time: int | None = None


class CommitInfo(Action, frozen=True, kw_only=True):
    timestamp: int
    operation: str
    operation_parameters: dict[str, str]
    is_blind_append: bool
    engine_info: str
    txn_id: str


class _Line(Action, frozen=True, kw_only=True, forbid_unknown_fields=True):
    add: Add | None = None
    remove: Remove | None = None
    txn: Txn | None = None
    protocol: Protocol | None = None
    meta_data: Metadata | None = None
    commit_info: msgspec.Raw = msgspec.Raw()


class _InfoLine(Action, frozen=True, kw_only=True):
    commit_info: CommitInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """The actions of one commit or checkpoint."""

    adds: Sequence[Add] = ()
    removes: Sequence[Remove] = ()
    txns: Sequence[Txn] = ()
    protocol: Protocol | None = None
    metadata: Metadata | None = None
    unknown: frozenset[str] = field(default_factory=frozenset)
    """Names of actions that sparklog does not know; none is valid in a table at (1, 2)."""

    @property
    def count(self) -> int:
        singles = (self.protocol is not None) + (self.metadata is not None)
        return singles + len(self.txns) + len(self.removes) + len(self.adds)


# ------------------------------------------------------------------------------ names

_COMMIT = re.compile(r"(\d{20})\.json")
_CLASSIC = re.compile(r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10}))?\.parquet")
_V2 = re.compile(r"(\d{20})\.checkpoint\.[0-9a-fA-F-]{36}\.(?:json|parquet)")
_VERSIONED = re.compile(r"(\d{20})\..+")


def commit_name(version: int) -> str:
    """Returns the commit's name in the log folder."""
    return f"{version:020d}.json"


def checkpoint_name(version: int) -> str:
    """Returns the name of a single-part classic checkpoint."""
    return f"{version:020d}.checkpoint.parquet"


def version_of(name: str) -> int | None:
    """Returns the version in the name of a file in the log folder, or None if it has none."""
    found = _VERSIONED.fullmatch(name)
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The commits and checkpoints of a log folder."""

    commits: frozenset[int]
    checkpoints: dict[int, tuple[str, ...]]
    """The names of the parts of each complete classic checkpoint, by version."""
    v2_checkpoints: tuple[str, ...]


def read_names(names: Iterable[str]) -> Listing:
    """Finds commits and checkpoints among the names in a log folder, and ignores others."""
    commits: set[int] = set()
    parts: dict[tuple[int, int], set[str]] = {}
    v2: list[str] = []
    for name in names:
        if found := _COMMIT.fullmatch(name):
            commits.add(int(found[1]))
        elif found := _CLASSIC.fullmatch(name):
            parts.setdefault((int(found[1]), int(found[3] or 1)), set()).add(name)
        elif _V2.fullmatch(name):
            v2.append(name)
    whole = {
        version: tuple(sorted(members))
        for (version, count), members in sorted(parts.items())
        if len(members) >= count
    }
    return Listing(commits=frozenset(commits), checkpoints=whole, v2_checkpoints=tuple(sorted(v2)))


# ------------------------------------------------------------------------------ commits

_decoder = msgspec.json.Decoder(_Line)
_keys_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encoder = msgspec.json.Encoder()
_KNOWN: Final = frozenset(each.encode_name for each in msgspec.structs.fields(_Line))


def encode_commit(info: CommitInfo, actions: Actions) -> bytes:
    """Encodes a commit as JSON lines."""
    lines: list[Action] = [_InfoLine(commit_info=info)]
    if actions.protocol:
        lines.append(_Line(protocol=actions.protocol))
    if actions.metadata:
        lines.append(_Line(meta_data=actions.metadata))
    lines += [_Line(txn=each) for each in actions.txns]
    lines += [_Line(remove=each) for each in actions.removes]
    lines += [_Line(add=each) for each in actions.adds]
    return _encoder.encode_lines(lines)


def decode_commit(data: pa.Buffer | bytes, path: str) -> Actions:
    """Decodes a commit. Raises `CorruptObject` if `data` is empty, truncated, or not a commit."""
    unknown: frozenset[str] = frozenset()
    try:
        try:
            lines = _decoder.decode_lines(data)
        except msgspec.ValidationError:
            keyed = _keys_decoder.decode_lines(data)
            unknown = frozenset(key for line in keyed for key in line if key not in _KNOWN)
            if not unknown:
                raise
            known = ({k: v for k, v in line.items() if k in _KNOWN} for line in keyed)
            lines = _decoder.decode_lines(_encoder.encode_lines(known))
    except msgspec.MsgspecError as error:
        raise errors.CorruptObject(
            path=path, check=f"it is not a complete Delta commit: {error}"
        ) from error
    if not lines:
        raise errors.CorruptObject(path=path, check="it is empty")
    return Actions(
        adds=[line.add for line in lines if line.add],
        removes=[line.remove for line in lines if line.remove],
        txns=[line.txn for line in lines if line.txn],
        protocol=_last(line.protocol for line in lines),
        metadata=_last(line.meta_data for line in lines),
        unknown=unknown,
    )


_T = TypeVar("_T")


def _last(found: Iterable[_T | None]) -> _T | None:
    last = None
    for each in found:
        last = each or last
    return last


# ------------------------------------------------------------------------------ checkpoints

_MAP: Final = pa.map_(pa.string(), pa.string())
_CHECKPOINT_SCHEMA: Final = pa.schema(
    {
        "txn": pa.struct({"appId": pa.string(), "version": pa.int64(), "lastUpdated": pa.int64()}),
        "add": pa.struct(
            {
                "path": pa.string(),
                "partitionValues": _MAP,
                "size": pa.int64(),
                "modificationTime": pa.int64(),
                "dataChange": pa.bool_(),
                "tags": _MAP,
                "stats": pa.string(),
            }
        ),
        "remove": pa.struct(
            {
                "path": pa.string(),
                "deletionTimestamp": pa.int64(),
                "dataChange": pa.bool_(),
                "extendedFileMetadata": pa.bool_(),
                "partitionValues": _MAP,
                "size": pa.int64(),
                "tags": _MAP,
            }
        ),
        "metaData": pa.struct(
            {
                "id": pa.string(),
                "name": pa.string(),
                "description": pa.string(),
                "format": pa.struct({"provider": pa.string(), "options": _MAP}),
                "schemaString": pa.string(),
                "partitionColumns": pa.list_(pa.string()),
                "configuration": _MAP,
                "createdTime": pa.int64(),
            }
        ),
        # No table features: a protocol above (1, 2) is rejected, see `_protocol_reason`.
        "protocol": pa.struct({"minReaderVersion": pa.int32(), "minWriterVersion": pa.int32()}),
    }
)
_COLUMNS: Final[dict[str, type[Action]]] = {
    "txn": Txn,
    "add": Add,
    "remove": Remove,
    "metaData": Metadata,
    "protocol": Protocol,
}
_FIELDS: Final[dict[type[Action], tuple[msgspec.structs.FieldInfo, ...]]] = {
    Format: msgspec.structs.fields(Format),
    **{kind: msgspec.structs.fields(kind) for kind in _COLUMNS.values()},
}
_V2_COLUMNS: Final = ("checkpointMetadata", "sidecar")


def encode_checkpoint(actions: Actions) -> pa.Buffer:
    """Encodes a single-part classic checkpoint, with a row per action.

    Removed files get their own row groups, because an old table has many and readers skip them.
    """
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, _CHECKPOINT_SCHEMA) as writer:
        writer.write_table(_rows_of(replace(actions, removes=())))
        if actions.removes:
            writer.write_table(_rows_of(Actions(removes=actions.removes)))
    return sink.getvalue()


def _rows_of(actions: Actions) -> pa.Table:
    groups: dict[str, Sequence[Action]] = {
        "txn": actions.txns,
        "add": actions.adds,
        "remove": actions.removes,
        "metaData": [actions.metadata] if actions.metadata else [],
        "protocol": [actions.protocol] if actions.protocol else [],
    }
    columns, before = [], 0
    for name, group in groups.items():
        kind = _CHECKPOINT_SCHEMA.field(name).type
        after = actions.count - before - len(group)
        column = [pa.nulls(before, kind), _column(group, kind), pa.nulls(after, kind)]
        columns.append(pa.concat_arrays(column))
        before += len(group)
    return pa.Table.from_arrays(columns, schema=_CHECKPOINT_SCHEMA)


def _column(group: Sequence[Action], kind: pa.DataType) -> pa.Array:
    return pa.array([msgspec.to_builtins(each) for each in group], type=kind)


def decode_checkpoint(
    source: pa.NativeFile | pa.Buffer, path: str, *, removes: bool = True
) -> Actions:
    """Decodes a classic checkpoint or a part of it, with or without removed files.

    Raises `CorruptObject` if it is incomplete.
    """
    kinds = {name: kind for name, kind in _COLUMNS.items() if removes or kind is not Remove}
    try:
        parquet = pq.ParquetFile(source)
        names = parquet.schema_arrow.names
        wanted = [
            name if kind in (Metadata, Protocol) else f"{name}.{each.encode_name}"
            for name, kind in kinds.items()
            for each in _FIELDS[kind]
        ]
        groups = [
            number
            for number in range(parquet.num_row_groups)
            if removes or not _has_only_removes(parquet.metadata.row_group(number))
        ]
        table = parquet.read_row_groups(groups, columns=[*wanted, *_V2_COLUMNS], use_threads=False)
        found = {
            name: _actions(table[name], kind) if name in names else []
            for name, kind in kinds.items()
        }
    except (pa.ArrowException, OSError) as error:
        raise errors.CorruptObject(
            path=path, check=f"it is not a complete checkpoint: {error}"
        ) from error
    return Actions(
        adds=found["add"],
        removes=found.get("remove", ()),
        txns=found["txn"],
        protocol=_last(found["protocol"]),
        metadata=_last(found["metaData"]),
        unknown=frozenset(
            name for name in _V2_COLUMNS if name in names and table[name].null_count < len(table)
        ),
    )


def _has_only_removes(group: pq.RowGroupMetaData) -> bool:
    """Returns whether a row group contains only removes, that is, `remove.path` is never null."""
    columns = (group.column(number) for number in range(group.num_columns))
    return any(
        each.path_in_schema == "remove.path"
        and each.statistics is not None
        and each.statistics.has_null_count
        and each.statistics.null_count == 0
        for each in columns
    )


def _actions(column: pa.ChunkedArray, kind: type[Action]) -> list[Any]:
    array = column.combine_chunks()
    return _structs(array.filter(array.is_valid()), kind)


def _structs(array: pa.StructArray, kind: type[Action]) -> list[Any]:
    """Decodes column by column, since a table may have thousands of files."""
    columns: dict[str, list[Any]] = {}
    for each in _FIELDS[kind]:
        name = each.encode_name
        column = array.field(name) if array.type.get_field_index(name) >= 0 else None
        if each.required and (column is None or column.null_count):
            raise pa.ArrowInvalid(f"an action has no {name}")
        if column is None:
            continue
        columns[each.name] = _structs(column, Format) if each.type is Format else _values(column)
    return [
        kind(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)
    ]


def _values(column: pa.Array) -> list[Any]:
    if pa.types.is_map(column.type):  # 30 × as fast as pyarrow's own `maps_as_pydicts`
        return [None if pairs is None else dict(pairs) for pairs in column.to_pylist()]
    return column.to_pylist()


def joined(parts: Sequence[Actions]) -> Actions:
    """Joins the parts of a checkpoint."""
    return Actions(
        adds=[each for part in parts for each in part.adds],
        removes=[each for part in parts for each in part.removes],
        txns=[each for part in parts for each in part.txns],
        protocol=_last(part.protocol for part in parts),
        metadata=_last(part.metadata for part in parts),
        unknown=frozenset().union(*(part.unknown for part in parts)),
    )


class _LastCheckpoint(Action, frozen=True, kw_only=True):
    version: int
    size: int


_last_checkpoint_decoder = msgspec.json.Decoder(_LastCheckpoint)


def encode_last_checkpoint(version: int, count: int) -> bytes:
    """Encodes the hint that names the newest checkpoint, which has `count` actions."""
    return _encoder.encode(_LastCheckpoint(version=version, size=count))


def decode_last_checkpoint(data: pa.Buffer) -> int | None:
    """Returns the version of the hint, or None if the hint is torn, which is not an error."""
    try:
        return _last_checkpoint_decoder.decode(data).version
    except msgspec.MsgspecError:
        return None


# ------------------------------------------------------------------------------ data files

_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_TRUNCATION_US: Final = 1_000
COLUMNS_TAG: Final = "sparklog.columns"
"""The tag of a file, and of its removal, with `TableFile.columns`."""
_FINER_THAN_MS: Final = re.compile(r"\.\d{4}")


class _Bounds(Action, frozen=True, kw_only=True):
    offset: int | None = None
    timestamp: str | None = None


class _Statistics(Action, frozen=True, kw_only=True, omit_defaults=False):
    num_records: int | None = None
    min_values: _Bounds = _Bounds()
    max_values: _Bounds = _Bounds()
    null_count: dict[str, Any] = {}


_statistics_decoder = msgspec.json.Decoder(_Statistics)


class ColumnStatistics(Action, frozen=True, kw_only=True, omit_defaults=False):
    """The statistics of typed columns, nested as their structs are."""

    min_values: dict[str, Any] = {}
    max_values: dict[str, Any] = {}
    null_count: dict[str, Any] = {}

    def encode(self) -> str:
        """Returns `TableFile.statistics`."""
        return _encoder.encode(self).decode()


_column_statistics_decoder = msgspec.json.Decoder(dict[str, dict[str, msgspec.Raw]])
"""Leaves numbers as they are written: a DECIMAL must not become a float."""


def add_of(file: TableFile, *, data_change: bool) -> Add:
    """Returns the action that adds `file`, which must be ours and have all statistics."""
    statistics = _Statistics(
        num_records=file.rows,
        min_values=_Bounds(offset=file.first, timestamp=iso(file.min_timestamp_us)),
        max_values=_Bounds(offset=file.last, timestamp=iso(file.max_timestamp_us)),
        null_count={"offset": 0, "timestamp": 0},
    )
    if file.rows is not None and file.misfits is not None:
        statistics.null_count[ERROR] = file.rows - file.misfits
    stats: Any = statistics
    if file.statistics is not None:
        stats = msgspec.to_builtins(statistics)
        for name, values in _column_statistics_decoder.decode(file.statistics).items():
            stats[name] |= values
    return Add(
        path=file.path,
        partition_values={"partition": str(file.partition)},
        size=file.size_bytes,
        modification_time=file.modified_us // 1_000,
        data_change=data_change,
        stats=_encoder.encode(stats).decode(),
        tags=None if file.columns is None else {COLUMNS_TAG: file.columns},
    )


def file_of(add: Add) -> TableFile:
    """Returns the file of an `add`. Raises ValueError if sparklog cannot use it."""
    if add.deletion_vector is not None:
        raise ValueError(f"{add.path} has a deletion vector")
    if add.path.startswith("/") or ":" in add.path.partition("/")[0]:
        raise ValueError(f"{add.path} is outside the table's folder")
    partition = add.partition_values.get("partition") or ""
    if not partition.isdecimal():
        raise ValueError(f"{add.path} belongs to partition {partition or None}")
    try:
        statistics = _statistics_decoder.decode(add.stats or "{}")
    except msgspec.MsgspecError:
        statistics = _Statistics()
    low, high = statistics.min_values, statistics.max_values
    return TableFile(
        path=add.path,
        partition=int(partition),
        size_bytes=add.size,
        rows=statistics.num_records,
        first=low.offset if high.offset is not None else None,
        last=high.offset if low.offset is not None else None,
        min_timestamp_us=_microseconds(low.timestamp),
        max_timestamp_us=_microseconds(high.timestamp, is_upper=True),
        modified_us=add.modification_time * 1_000,
        columns=columns_tag(add),
        misfits=_misfits(statistics),
    )


def _misfits(statistics: _Statistics) -> int | None:
    nulls = statistics.null_count.get(ERROR)
    if isinstance(nulls, int) and statistics.num_records is not None:
        return statistics.num_records - nulls
    return None


def columns_tag(action: Add | Remove) -> str | None:
    """Returns the tag of the typed columns that a file has; None if it has none."""
    return (action.tags or {}).get(COLUMNS_TAG)


def iso(timestamp_us: int | None) -> str | None:
    """Returns a time as statistics have it."""
    if timestamp_us is None:
        return None
    moment = _EPOCH + dt.timedelta(microseconds=timestamp_us)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _microseconds(text: str | None, *, is_upper: bool = False) -> int | None:
    """Parses a timestamp statistic. Adds one millisecond to an upper bound in milliseconds."""
    if text is None:
        return None
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=dt.UTC)
    since = moment - _EPOCH
    found = (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    return found + _TRUNCATION_US if is_upper and not _FINER_THAN_MS.search(text) else found


# ------------------------------------------------------------------------------ our tables

_DELTA_NAMES: Final = {
    pa.bool_(): "boolean",
    pa.int8(): "byte",
    pa.int16(): "short",
    pa.int32(): "integer",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "binary",
    pa.date32(): "date",
}


def _delta_type(kind: pa.DataType) -> Any:
    if pa.types.is_struct(kind):
        return {"type": "struct", "fields": [_delta_field(child) for child in kind]}
    if pa.types.is_list(kind):
        element = _delta_type(kind.value_type)
        return {"type": "array", "elementType": element, "containsNull": True}
    if pa.types.is_map(kind):
        value = _delta_type(kind.item_type)
        return {"type": "map", "keyType": "string", "valueType": value, "valueContainsNull": True}
    if pa.types.is_timestamp(kind):
        return "timestamp"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    return _DELTA_NAMES[kind]


def _delta_field(each: pa.Field) -> dict[str, Any]:
    return {"name": each.name, "type": _delta_type(each.type), "nullable": True, "metadata": {}}


def _schema_string(fields: Iterable[dict[str, Any]]) -> str:
    return msgspec.json.encode({"type": "struct", "fields": list(fields)}).decode()


SCHEMA_STRING: Final = _schema_string(map(_delta_field, ROW_SCHEMA))
"""The schema of a table without typed columns."""
PARTITION_COLUMNS: Final = ["partition"]
PROTOCOL: Final = Protocol(min_reader_version=READER_VERSION, min_writer_version=WRITER_VERSION)


def new_metadata(*, table_id: str, created_ms: int) -> Metadata:
    """Returns the metadata of a new table of ours, without properties."""
    return Metadata(
        id=table_id,
        format=Format(provider="parquet"),
        schema_string=SCHEMA_STRING,
        partition_columns=PARTITION_COLUMNS,
        configuration={},
        created_time=created_ms,
    )


def with_columns(metadata: Metadata, columns: ColumnSet | None) -> Metadata:
    """Returns the metadata with the columns of every topic and these typed ones.

    Columns that it has already keep their comments.
    """
    known = {each["name"]: each for each in _fields(metadata.schema_string)}
    wanted = [*ROW_SCHEMA, *(columns.fields if columns is not None else ())]
    schema_string = _schema_string(known.get(each.name) or _delta_field(each) for each in wanted)
    return msgspec.structs.replace(metadata, schema_string=schema_string)


APPEND_ONLY: Final = "delta.appendOnly"
FILE_RETENTION: Final = "delta.deletedFileRetentionDuration"
LOG_RETENTION: Final = "delta.logRetentionDuration"

_WRITER_FEATURES: Final = {
    3: "check constraints",
    4: "change data feed or generated columns",
    5: "column mapping",
    6: "identity columns",
}


def foreign_reason(
    protocol: Protocol, metadata: Metadata, columns: ColumnSet | None = None
) -> str | None:
    """Names a feature, property or column that sparklog does not support; None if there is none.

    `columns`: the typed columns that the table should have.
    """
    return (
        _protocol_reason(protocol)
        or _property_reason(metadata)
        or _schema_reason(metadata, columns)
    )


def is_append_only(metadata: Metadata) -> bool:
    """Returns whether commits may only add and rearrange rows (`dataChange` false), not remove any.

    https://github.com/delta-io/delta/blob/master/PROTOCOL.md, "Append-only Tables".
    """
    return (metadata.configuration.get(APPEND_ONLY) or "").lower() == "true"


def _protocol_reason(protocol: Protocol) -> str | None:
    reader, writer = protocol.min_reader_version, protocol.min_writer_version
    if reader <= READER_VERSION and writer <= WRITER_VERSION:
        return None
    named = {*(protocol.reader_features or ()), *(protocol.writer_features or ())}
    features = ", ".join(sorted(named)) or _WRITER_FEATURES.get(writer, "unnamed features")
    return (
        f"its protocol is ({reader}, {writer}) for {features}, "
        f"but sparklog supports only ({READER_VERSION}, {WRITER_VERSION})"
    )


def _property_reason(metadata: Metadata) -> str | None:
    properties = metadata.configuration
    if properties.get("delta.columnMapping.mode", "none") != "none":
        return "column mapping is on"
    if properties.get("delta.setTransactionRetentionDuration") is not None:
        return "delta.setTransactionRetentionDuration is set, which drops the ends of partitions"
    return None


def _schema_reason(metadata: Metadata, columns: ColumnSet | None) -> str | None:
    if metadata.format.provider != "parquet":
        return f"its files are {metadata.format.provider}, not parquet"
    if metadata.partition_columns != PARTITION_COLUMNS:
        return f"it is partitioned by {metadata.partition_columns}, not by {PARTITION_COLUMNS}"
    found, ours = _shape(metadata.schema_string), _OWN_SHAPE
    if columns is not None:
        ours = ours | {each.name: _without_comments(_delta_field(each)) for each in columns.fields}
    for name in sorted(found.keys() | ours.keys()):
        if found.get(name) != ours.get(name):
            return f"column {name!r} is {found.get(name, 'missing')}, not {ours.get(name, 'there')}"
    return None


def _shape(schema_string: str) -> dict[str, Any]:
    """Returns the columns by name, without comments, which any engine may change."""
    return {each["name"]: _without_comments(each) for each in _fields(schema_string)}


def _fields(schema_string: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = msgspec.json.decode(schema_string)["fields"]
    return found


def _without_comments(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_comments(each) for each in node]
    if not isinstance(node, dict):
        return node
    kept = {key: _without_comments(value) for key, value in node.items() if key != "metadata"}
    rules = {k: v for k, v in node.get("metadata", {}).items() if k.startswith("delta.")}
    return kept | rules


_OWN_SHAPE: Final = _shape(SCHEMA_STRING)
