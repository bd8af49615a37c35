"""Infers columns for JSON objects whose fields are not yet in a schema.

- A field is BOOLEAN, BIGINT, DOUBLE, STRING, an array, or a struct of fields. If values differ in
  type, whole numbers and fractions become DOUBLE, and everything else STRING, which accepts any
  value. The result does not depend on the order of the values.
- A field that is always null, or an empty array or object, has no column yet.
- Fields that cannot be added to a Delta table are left out: those whose names contain characters
  that Delta rejects, or differ from another name only in case.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec
import pyarrow as pa

from sparklog import errors
from sparklog.sources.json_object import ObjectDecoder, ValueMismatch

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

INFERRED_FIELDS = 1_000  # maximum number of new ones in one window's objects, including nested ones
INFERRED_DEPTH = 16  # below it, arrays and objects become strings

Kind: TypeAlias = "str | list[Kind] | dict[str, Kind] | None"
"""The type of a field: None if it is unknown, a name of DDL, `[element]`, or `{field: type}`."""

_BIGINT: Final = 1 << 63
_REFUSED: Final = re.compile(r"[ ,;{}()\n\t=]")
"""Characters that Delta rejects in column names."""
_REFUSALS: Final = (msgspec.MsgspecError, ValueError, RecursionError)


def kind_of(value: Any, depth: int = 0) -> Kind:
    """Returns the type of a value that `json.loads` returned."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "BOOLEAN"
    if isinstance(value, int):
        return "BIGINT" if -_BIGINT <= value < _BIGINT else "STRING"
    if isinstance(value, float):
        return "DOUBLE"
    if isinstance(value, str) or depth == INFERRED_DEPTH:
        return "STRING"
    if isinstance(value, list):
        return [functools.reduce(merged, (kind_of(each, depth + 1) for each in value), None)]
    return {name: kind_of(each, depth + 1) for name, each in value.items() if _is_text(name)}


def _is_text(name: str) -> bool:
    """Returns whether UTF-8 can encode the name, which may contain a lone surrogate."""
    try:
        return name.encode() is not None
    except UnicodeEncodeError:
        return False


def merged(one: Kind, other: Kind) -> Kind:
    """Returns the type that accepts the values of both."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: merged(one.get(name), other.get(name)) for name in sorted({*one, *other})}
    if isinstance(one, list) and isinstance(other, list):
        return [merged(one[0], other[0])]
    if one == other:
        return one
    return "DOUBLE" if {"BIGINT", "DOUBLE"} == {str(one), str(other)} else "STRING"


def merged_fields(kinds: Iterable[Mapping[str, Kind]]) -> dict[str, Kind]:
    """Returns the fields of several object types. Raises `BadRequest` if there are too many."""
    found: Kind = {}
    for kind in kinds:
        found = merged(found, dict(kind))
    assert isinstance(found, dict)
    _check_count(found)
    return found


def _check_count(kind: Kind) -> None:
    if _count(kind) > INFERRED_FIELDS:
        raise errors.BadRequest(
            reason=f"The objects have more than {INFERRED_FIELDS:,} new fields. Pass the"
            " columns as a schema."
        )


def _count(kind: Kind) -> int:
    if isinstance(kind, dict):
        return sum(1 + _count(each) for each in kind.values())
    return _count(kind[0]) if isinstance(kind, list) else 0


# ------------------------------------------------------------------------------ values


class FieldFinder:
    """Finds fields of JSON objects that are missing from a type."""

    def __init__(self, known: pa.StructType) -> None:
        self._known = known
        self._is_good = ObjectDecoder(known).decode
        self.found: dict[str, Kind] = {}
        """Types of the new fields, along with those of known ones."""
        self._decode = _decoder(known, self.found)

    def look(self, texts: Iterable[str | None]) -> None:
        """Scans values for new fields, ignoring values that do not fit the type.

        Raises `BadRequest` if there are too many new fields.
        """
        for text in texts:
            if text is not None:
                try:
                    self._decode(text)
                except _REFUSALS:
                    self._learn(text)

    def _learn(self, text: str) -> None:
        try:
            value = json.loads(text)
            self._is_good(text)
        except (*_REFUSALS, ValueMismatch):
            return
        found = merged(self.found, kind_of(value))
        assert isinstance(found, dict)
        if found != self.found:
            _check_count(found)
            self.found = found
            self._decode = _decoder(self._known, found)


def find_fields(
    known: pa.StructType, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yields one row: the fields found in the first column, a STRING, as JSON."""
    finder = FieldFinder(known)
    for batch in batches:
        finder.look(batch.column(0).to_pylist())
    found = json.dumps(finder.found).encode()
    column = pa.array([found], pa.binary()).cast(pa.string())
    yield pa.RecordBatch.from_arrays([column], ["found"])


def _decoder(known: pa.StructType, found: Mapping[str, Kind]) -> Callable[[str], Any]:
    """Returns a decoder that rejects objects with other fields, or other types of new ones."""

    def object_type(known: pa.DataType, found: Kind) -> Any:
        old = {field.name: field.type for field in known}
        new = found if isinstance(found, dict) else {}
        names = {f"f{number}": name for number, name in enumerate({**old, **new})}
        fields = [
            (
                key,
                known_type(old[name], new.get(name)) if name in old else new_type(new[name]),
                None,
            )
            for key, name in names.items()
        ]
        return msgspec.defstruct("Row", fields, rename=names, gc=False, forbid_unknown_fields=True)

    def known_type(kind: pa.DataType, found: Kind) -> Any:
        if pa.types.is_struct(kind):
            return object_type(kind, found) | None
        if pa.types.is_list(kind):
            element = found[0] if isinstance(found, list) else None
            return list[known_type(kind.value_type, element)] | None  # type: ignore[misc]
        return msgspec.Raw

    def new_type(kind: Kind) -> Any:
        if isinstance(kind, dict):
            return object_type(pa.struct([]), kind) | None
        if isinstance(kind, list):
            return list[new_type(kind[0])] | None  # type: ignore[misc]
        return None if kind is None else _PYTHON_TYPES[kind]

    return msgspec.json.Decoder(object_type(known, dict(found))).decode


_BIGINT_TYPE: Final = Annotated[int, msgspec.Meta(ge=-_BIGINT, le=_BIGINT - 1)]
_PYTHON_TYPES: Final[dict[str, Any]] = {
    "BOOLEAN": bool | None,
    "BIGINT": _BIGINT_TYPE | None,
    "DOUBLE": _BIGINT_TYPE | float | None,
    "STRING": msgspec.Raw,
}


# ------------------------------------------------------------------------------ schema


def ddl_of(schema: StructType) -> str:
    """Returns the fields of a schema as DDL that means the same in every session."""
    return ", ".join(f"{quoted(each.name)} {_ddl_type(each.dataType)}" for each in schema)


def _ddl_type(kind: DataType) -> str:
    from pyspark.sql.types import ArrayType, MapType, StructType, TimestampType

    if isinstance(kind, TimestampType):
        return "TIMESTAMP_LTZ"  # TIMESTAMP depends on `spark.sql.timestampType`
    if isinstance(kind, StructType):
        return f"STRUCT<{ddl_of(kind)}>"
    if isinstance(kind, ArrayType):
        return f"ARRAY<{_ddl_type(kind.elementType)}>"
    if isinstance(kind, MapType):
        return f"MAP<{_ddl_type(kind.keyType)}, {_ddl_type(kind.valueType)}>"
    return kind.simpleString()


def quoted(name: str) -> str:
    """Returns the name as a quoted SQL identifier."""
    return "`" + name.replace("`", "``") + "`"


def with_new_fields(
    schema: StructType, found: Mapping[str, Kind], reserved: Collection[str] = ()
) -> tuple[StructType, list[str]]:
    """Returns the schema with new fields appended to its structs, and the names left out.

    `reserved`: names of columns that are not fields.
    """
    left_out: list[str] = []
    return _extended(schema, found, "", {*map(str.lower, reserved)}, left_out), left_out


def _extended(
    schema: StructType, found: Mapping[str, Kind], path: str, taken: set[str], left_out: list[str]
) -> StructType:
    from pyspark.sql.types import StructField, StructType

    known = {field.name: field for field in schema}
    taken |= {name.lower() for name in known}
    fields = []
    for field in schema:
        kind = found.get(field.name)
        widened = _widened(field.dataType, kind, f"{path}{field.name}", left_out)
        fields.append(StructField(field.name, widened, field.nullable))
    for name in sorted(found.keys() - known.keys()):
        new = _spark_type(found[name], f"{path}{name}", left_out)
        if new is None:
            continue
        if name.lower() in taken or not is_usable(name):
            left_out.append(f"{path}{name}")
            continue
        taken.add(name.lower())
        fields.append(StructField(name, new))
    return StructType(fields)


def _widened(old: DataType, found: Kind, path: str, left_out: list[str]) -> DataType:
    """Returns a known type extended by the new fields of its objects."""
    from pyspark.sql.types import ArrayType, StructType

    if isinstance(old, StructType) and isinstance(found, dict):
        return _extended(old, found, f"{path}.", set(), left_out)
    if isinstance(old, ArrayType) and isinstance(found, list):
        return ArrayType(_widened(old.elementType, found[0], path, left_out), old.containsNull)
    return old


def _spark_type(kind: Kind, path: str, left_out: list[str]) -> DataType | None:
    """Returns the type of a new field; None if its values do not determine one."""
    from pyspark.sql.types import ArrayType, StructType

    if isinstance(kind, dict):
        found = _extended(StructType([]), kind, f"{path}.", set(), left_out)
        return found if found.fields else None
    if isinstance(kind, list):
        element = _spark_type(kind[0], path, left_out)
        return None if element is None else ArrayType(element)
    return None if kind is None else _spark_types()[kind]


def _spark_types() -> dict[str, DataType]:
    from pyspark.sql import types

    return {
        "BOOLEAN": types.BooleanType(),
        "BIGINT": types.LongType(),
        "DOUBLE": types.DoubleType(),
        "STRING": types.StringType(),
    }


def is_usable(name: str) -> bool:
    """Returns whether Delta accepts the name for a new column."""
    return bool(name) and not _REFUSED.search(name)
