"""What values are: `valueFormat`, `valueSchema` and `badValues`, for a whole batch in Arrow.

| `valueFormat` | the column `value` | bad is |
|---|---|---|
| `binary` | the bytes | nothing |
| `string` | a string | what is no UTF-8 |
| `json` | a struct of the fields of `valueSchema` | what is no JSON object, or does not fit |

A null value, which is a tombstone, is null in every format, and is not bad. A bad value is bad as a
whole. What becomes of it says `badValues`: `null`, and no more is said; `column`, its bytes stand
in a column of their own; `error`, the read ends.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparklog import arrow, errors
from sparklog.sources.jsonlines import Mask, object_reader, pieces

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

Place: TypeAlias = Callable[[int], tuple[str, int, int]]
"""From the number of a row in its batch to topic, partition and offset."""

_FEW_ROWS: Final = 64
_SHOWN_BYTES: Final = 80

_KNOWN_TYPES: Final = (
    *("boolean", "byte", "short", "integer", "long", "float", "double", "decimal"),
    *("string", "binary", "date", "timestamp", "timestamp_ntz", "array", "struct", "map"),
)


class ValueFormat(enum.StrEnum):
    BINARY = "binary"
    STRING = "string"
    JSON = "json"


class BadValues(enum.StrEnum):
    NULL = "null"
    COLUMN = "column"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueParser:
    """Plain data, so that it travels to executors.

    `kind` is the type of the column that it makes: `binary`, `string`, or what `json_type` gave.
    """

    format: ValueFormat
    kind: pa.DataType
    bad: BadValues = BadValues.NULL

    def parse(self, values: pa.BinaryArray, place: Place) -> tuple[pa.Array, pa.Array | None]:
        """The values as `kind`; and, for `BadValues.COLUMN`, the bytes of bad ones, else null.

        Raises `BadValue` for `BadValues.ERROR`, naming the first one's place.
        """
        if self.format is ValueFormat.BINARY:
            found, bad = values, np.zeros(len(values), np.bool_)
        else:
            found, bad = _texts(values)
        if self.format is ValueFormat.JSON:
            found, unfit = object_reader(self.kind).read(found)
            bad |= unfit
        if self.bad is BadValues.ERROR and bad.any():
            raise self._refusal(values, bad, place)
        return found, _bytes_of(values, bad) if self.bad is BadValues.COLUMN else None

    def _refusal(self, values: pa.BinaryArray, bad: Mask, place: Place) -> errors.BadValue:
        count, row = int(np.count_nonzero(bad)), int(np.argmax(bad))
        value: bytes = values[row].as_py()
        shown = repr(value[:_SHOWN_BYTES]) + ("…" if len(value) > _SHOWN_BYTES else "")
        others = f"; {count} of {len(values)} values here are bad" if count > 1 else ""
        topic, partition, offset = place(row)
        reason = f"{self._reason(value)}: {shown}{others}"
        return errors.BadValue(topic=topic, partition=partition, offset=offset, reason=reason)

    def _reason(self, value: bytes) -> str:
        try:
            text = value.decode()
        except UnicodeDecodeError:
            return "it is no UTF-8"
        return object_reader(self.kind).reason(text)


# ------------------------------------------------------------------------------ schema


def json_type(schema: StructType) -> pa.StructType:
    """The Arrow type of objects with these fields, as Spark has it.

    Raises `BadOption`, naming the field, for a type that JSON objects are not read as, for a name
    that stands twice, and for NOT NULL, which nobody can promise of what others write.
    """
    from sparklog.sources.versions import arrow_type

    _check_struct(schema, "")
    return arrow_type(schema)


def _check_struct(schema: StructType, path: str) -> None:
    if not schema.fields:
        raise _refused(path, "has no fields")
    known: set[str] = set()
    for field in schema.fields:
        inside = f"{path}.{field.name}" if path else field.name
        if field.name in known:
            raise _refused(inside, "stands twice")
        known.add(field.name)
        if not field.nullable:
            raise _refused(inside, "is NOT NULL, but an object may lack it")
        _check_type(field.dataType, inside)


def _check_type(kind: DataType, path: str) -> None:
    from pyspark.sql.types import ArrayType, MapType, StringType, StructType

    if kind.typeName() not in _KNOWN_TYPES:
        raise _refused(path, f"is {kind.simpleString()}, which is not read from JSON")
    if isinstance(kind, StructType):
        _check_struct(kind, path)
    elif isinstance(kind, ArrayType):
        _check_type(kind.elementType, f"{path}[]")
    elif isinstance(kind, MapType):
        if not isinstance(kind.keyType, StringType):
            raise _refused(path, f"is {kind.simpleString()}, but keys of JSON are strings")
        _check_type(kind.valueType, f"{path}{{}}")


def _refused(path: str, reason: str) -> errors.BadOption:
    return errors.BadOption(option="valueSchema", value=path, reason=reason)


# ------------------------------------------------------------------------------ UTF-8


def _texts(values: pa.BinaryArray) -> tuple[pa.StringArray, Mask]:
    """The values as strings, null where they are no UTF-8; and where that is."""
    try:
        return values.cast(pa.string()), np.zeros(len(values), np.bool_)
    except pa.ArrowInvalid:
        bad = _not_utf8(values)
        return _where(~bad, values).cast(pa.string()), bad


def _not_utf8(values: pa.BinaryArray) -> Mask:
    if len(values) <= _FEW_ROWS:
        return np.fromiter((not _is_utf8(value) for value in values.to_pylist()), np.bool_)
    found = []
    for piece in pieces(values):
        try:
            piece.cast(pa.string())
            found.append(np.zeros(len(piece), np.bool_))
        except pa.ArrowInvalid:
            found.append(_not_utf8(piece))
    return np.concatenate(found)


def _is_utf8(value: bytes | None) -> bool:
    try:
        return value is None or value.decode() is not None
    except UnicodeDecodeError:
        return False


def _bytes_of(values: pa.BinaryArray, bad: Mask) -> pa.BinaryArray:
    return _where(bad, values) if bad.any() else pa.nulls(len(values), pa.binary())


def _where(wanted: Mask, values: pa.BinaryArray) -> pa.BinaryArray:
    return pc.if_else(arrow.booleans(wanted), values, pa.nulls(1, pa.binary())[0])
