"""Decodes values by `valueFormat`, `valueSchema` and `badValues`, a batch at a time.

| `valueFormat` | the column `value` | bad values |
|---|---|---|
| `binary` | the bytes | none |
| `string` | a string | those that are not UTF-8 |
| `json` | a struct of the fields of `valueSchema` | those that are not JSON objects that fit it |

A null value (a tombstone) is null in every format and not bad. A bad value is bad as a whole.
Depending on `badValues`, it becomes null (`null`), null with its bytes in a separate column
(`column`), or ends the read (`error`).

A JSON field type is handled in four places: `_KNOWN_TYPES` here, `msgspec_types._PYTHON_TYPES`,
`json_rules._LEAF_DECODERS` and `arrow_columns`, all of `formats.values`.
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
from sparklog.formats.values.checks import Mask, utf8_texts
from sparklog.formats.values.json_reader import object_reader

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

RowLocator: TypeAlias = Callable[[int], tuple[str, int, int]]
"""Returns topic, partition and offset of a row by its number in the batch."""

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
    """Decoder of values, picklable for executors.

    `kind` is the type of the decoded column: `binary`, `string`, or the result of `json_type`.
    """

    format: ValueFormat
    kind: pa.DataType
    bad: BadValues = BadValues.NULL

    def parse(self, values: pa.BinaryArray, locate: RowLocator) -> tuple[pa.Array, pa.Array | None]:
        """Returns the values as `kind` and, for `BadValues.COLUMN`, the bytes of bad ones.

        Raises `BadValue` for `BadValues.ERROR`, with the position of the first bad value.
        """
        found, bad = self._decoded(values)
        if self.bad is BadValues.ERROR and bad.any():
            raise self._refusal(values, bad, locate)
        return found, _bytes_of(values, bad) if self.bad is BadValues.COLUMN else None

    def reasons(self, values: pa.BinaryArray) -> list[str | None]:
        """Returns the reason each value is bad; None if it is not."""
        _, bad = self._decoded(values)
        return [
            self._reason(value.as_py()) if is_bad else None
            for value, is_bad in zip(values, bad.tolist(), strict=True)
        ]

    def _decoded(self, values: pa.BinaryArray) -> tuple[pa.Array, Mask]:
        if self.format is ValueFormat.BINARY:
            return values, np.zeros(len(values), np.bool_)
        found, bad = utf8_texts(values)
        if self.format is ValueFormat.JSON:
            found, unfit = object_reader(self.kind).read(found)
            bad |= unfit
        return found, bad

    def _refusal(self, values: pa.BinaryArray, bad: Mask, locate: RowLocator) -> errors.BadValue:
        count, row = int(np.count_nonzero(bad)), int(np.argmax(bad))
        value: bytes = values[row].as_py()
        shown = repr(value[:_SHOWN_BYTES]) + ("…" if len(value) > _SHOWN_BYTES else "")
        others = f"; {count} of {len(values)} values here are bad" if count > 1 else ""
        topic, partition, offset = locate(row)
        reason = f"{self._reason(value)}: {shown}{others}"
        return errors.BadValue(topic=topic, partition=partition, offset=offset, reason=reason)

    def _reason(self, value: bytes) -> str:
        try:
            text = value.decode()
        except UnicodeDecodeError:
            return "it is not UTF-8"
        return object_reader(self.kind).reason(text)


# ------------------------------------------------------------------------------ schema


def json_type(schema: StructType) -> pa.StructType:
    """Returns Spark's Arrow type of objects with these fields.

    Raises `BadOption`, which names the field, for a type that is not supported in JSON, a repeated
    name, and NOT NULL, which cannot be guaranteed for records of other programs.
    """
    from sparklog.spark_compat import arrow_type

    _check_struct(schema, "")
    return arrow_type(schema)


def _check_struct(schema: StructType, path: str) -> None:
    if not schema.fields:
        raise _refused(path, "it has no fields")
    known: set[str] = set()
    for field in schema.fields:
        inside = f"{path}.{field.name}" if path else field.name
        if field.name in known:
            raise _refused(inside, "the name is used twice")
        known.add(field.name)
        if not field.nullable:
            raise _refused(inside, "it is NOT NULL, but objects may lack it; remove NOT NULL")
        _check_type(field.dataType, inside)


def _check_type(kind: DataType, path: str) -> None:
    from pyspark.sql.types import ArrayType, MapType, StringType, StructType

    if kind.typeName() not in _KNOWN_TYPES:
        raise _refused(path, f"its type {kind.simpleString()} is not supported in JSON")
    if isinstance(kind, StructType):
        _check_struct(kind, path)
    elif isinstance(kind, ArrayType):
        _check_type(kind.elementType, f"{path}[]")
    elif isinstance(kind, MapType):
        if not isinstance(kind.keyType, StringType):
            raise _refused(path, f"its type is {kind.simpleString()}, but keys in JSON are strings")
        _check_type(kind.valueType, f"{path}{{}}")


def _refused(path: str, reason: str) -> errors.BadOption:
    return errors.BadOption(option="valueSchema", value=path, reason=reason)


def _bytes_of(values: pa.BinaryArray, bad: Mask) -> pa.BinaryArray:
    return _where(bad, values) if bad.any() else pa.nulls(len(values), pa.binary())


def _where(wanted: Mask, values: pa.BinaryArray) -> pa.BinaryArray:
    return pc.if_else(arrow.booleans(wanted), values, pa.nulls(1, pa.binary())[0])
