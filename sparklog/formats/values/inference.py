"""Infers types for fields of JSON objects that are not yet in a schema.

- A field is BOOLEAN, BIGINT, DOUBLE, STRING, an array, or a struct of fields. If values differ in
  type, whole numbers and fractions become DOUBLE, and everything else STRING, which accepts any
  value. The result does not depend on the order of the values.
- A field that is always null, or an empty array or object, has no type yet.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import pyarrow as pa

from sparklog import errors
from sparklog.formats.values.ddl import is_text
from sparklog.formats.values.json_rules import ObjectDecoder, ValueMismatch

INFERRED_FIELDS = 1_000  # maximum number of new ones in one window's objects, including nested ones
INFERRED_DEPTH = 16  # below it, arrays and objects become strings

Kind: TypeAlias = "str | list[Kind] | dict[str, Kind] | None"
"""The type of a field: None if it is unknown, a name of DDL, `[element]`, or `{field: type}`."""

_BIGINT: Final = 1 << 63
_REFUSALS: Final = (msgspec.MsgspecError, ValueError, RecursionError)


def kind_of(value: Any, depth: int = 0, of_text: Callable[[str], str] = lambda _: "STRING") -> Kind:
    """Returns the type of a value that `json.loads` returned.

    `of_text` returns the type of a string.
    """
    if value is None:
        return None
    if isinstance(value, bool):
        return "BOOLEAN"
    if isinstance(value, int):
        return "BIGINT" if -_BIGINT <= value < _BIGINT else "STRING"
    if isinstance(value, float):
        return "DOUBLE"
    if isinstance(value, str):
        return of_text(value)
    if depth == INFERRED_DEPTH:
        return "STRING"
    if isinstance(value, list):
        kinds = (kind_of(each, depth + 1, of_text) for each in value)
        return [functools.reduce(merged, kinds, None)]
    return {
        name: kind_of(each, depth + 1, of_text) for name, each in value.items() if is_text(name)
    }


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
