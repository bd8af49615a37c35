"""Checks the columns of a data frame to be written, before a task starts."""

from __future__ import annotations

from collections import Counter
from typing import Final

from pyspark.sql import types
from pyspark.sql.types import DataType, StructType

from sparklog import errors

ROLES: Final[dict[str, tuple[str, ...]]] = {
    "key": ("binary", "string", "void"),
    "topic": ("string", "void"),
    "partition": ("int", "void"),
    "headers": ("array<struct<key:string,value:binary>>", "void"),
    "timestamp": ("timestamp", "void"),
}
"""Columns of a record other than its value: as in Spark's Kafka sink, and `timestamp`.

A column that is null in every row has the type `void`.
"""

_VALUE: Final[dict[str, tuple[str, ...]]] = {"value": ("binary", "string")}
_LEFT_BEHIND: Final[dict[str, tuple[str, ...]]] = {
    "offset": ("bigint",),
    "timestampType": ("int",),
}
"""Columns of a source that are ignored, because the log assigns its own.

`offset` is not ignored if the write keeps offsets.
"""
_KEPT: Final[dict[str, tuple[str, ...]]] = {"partition": ("int",), "offset": ("bigint",)}

_PLAIN_COLUMNS: Final = ROLES | _VALUE | _LEFT_BEHIND

_PLAIN: Final = (
    types.BinaryType,
    types.BooleanType,
    types.ByteType,
    types.DateType,
    types.DecimalType,
    types.DoubleType,
    types.FloatType,
    types.IntegerType,
    types.LongType,
    types.NullType,
    types.ShortType,
    types.StringType,
    types.TimestampNTZType,
    types.TimestampType,
)


def check_columns(
    schema: StructType, *, as_json: bool, needs_topic: bool, keeps_offsets: bool = False
) -> None:
    """Raises `WrongSchema`, which names the column, for a frame that cannot be written.

    Args:
        as_json: whether values are built from the columns that have no other role.
        needs_topic: whether only the column `topic` can name the topic of a row.
        keeps_offsets: whether rows keep the offsets in the columns `partition` and `offset`.
    """
    for name, times in Counter(schema.names).items():
        if times > 1:
            raise errors.WrongSchema(reason=f"column {name!r} occurs {times} times")
    (_check_packed if as_json else _check_plain)(schema)
    if needs_topic:
        _check_topic(schema)
    if keeps_offsets:
        for name, accepted in _KEPT.items():
            if name not in schema.names:
                raise errors.WrongSchema(reason=f"offsets = keep needs a column {name!r}")
            _check_kind(name, schema[name].dataType, accepted)


def columns_of_no_record(schema: StructType) -> list[str]:
    """Returns the columns that are not part of a record; they are ignored, as by the Kafka sink."""
    return [name for name in schema.names if name not in _PLAIN_COLUMNS]


def _check_plain(schema: StructType) -> None:
    for field in schema:
        if field.name in _PLAIN_COLUMNS:
            _check_kind(field.name, field.dataType, _PLAIN_COLUMNS[field.name])
    if "value" not in schema.names:
        reason = "a record needs a column 'value'; valueFormat = json builds it from other columns"
        raise errors.WrongSchema(reason=reason)


def _check_packed(schema: StructType) -> None:
    for field in schema:
        if field.name in ROLES:
            _check_kind(field.name, field.dataType, ROLES[field.name])
        else:
            _check_json(field.name, field.dataType)
    if all(name in ROLES for name in schema.names):
        reason = f"valueFormat = json needs a column besides {', '.join(ROLES)}"
        raise errors.WrongSchema(reason=reason)


def _check_kind(name: str, kind: DataType, accepted: tuple[str, ...]) -> None:
    found = kind.simpleString()
    if found not in accepted:
        wanted = " or ".join(each for each in accepted if each != "void")
        raise errors.WrongSchema(reason=f"column {name!r} is {found}, not {wanted}")


def _check_json(name: str, kind: DataType) -> None:
    if isinstance(kind, StructType):
        for field in kind:
            _check_json(f"{name}.{field.name}", field.dataType)
    elif isinstance(kind, types.ArrayType):
        _check_json(f"{name}[]", kind.elementType)
    elif isinstance(kind, types.MapType):
        if not isinstance(kind.keyType, types.StringType):
            reason = f"column {name!r} is {kind.simpleString()}; JSON keys can only be strings"
            raise errors.WrongSchema(reason=reason)
        _check_json(f"{name}[]", kind.valueType)
    elif not isinstance(kind, _PLAIN):
        reason = (
            f"column {name!r} is {kind.simpleString()}, which has no JSON representation;"
            " cast it to string"
        )
        raise errors.WrongSchema(reason=reason)


def _check_topic(schema: StructType) -> None:
    reason = "set option 'topic', or give each row a column 'topic'"
    if "topic" not in schema.names:
        raise errors.WrongSchema(reason=reason)
    if isinstance(schema["topic"].dataType, types.NullType):
        raise errors.WrongSchema(reason=f"column 'topic' is null in every row: {reason}")
