"""Types by which msgspec decodes JSON straight to the fields of Arrow types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec
import pyarrow as pa


def python_type(kind: pa.DataType, leaf: Callable[[pa.DataType], Any]) -> Any:
    """Returns msgspec's type of a value, null excluded.

    Args:
        leaf: returns that of a scalar type, usually `leaf_type`.
    """
    if pa.types.is_struct(kind):
        return row_type([(field.name, python_type(field.type, leaf) | None) for field in kind])
    if pa.types.is_map(kind):
        return dict[str, python_type(kind.item_type, leaf) | None]  # type: ignore[misc]
    if pa.types.is_list(kind):
        return list[python_type(kind.value_type, leaf) | None]  # type: ignore[misc]
    return leaf(kind)


def row_type(fields: list[tuple[str, Any]]) -> type[msgspec.Struct]:
    """Returns a type with these fields, in this order, each null if it is absent.

    Args:
        fields: the name in JSON and the type of each, null included.
    """
    names = {f"f{number}": name for number, (name, _) in enumerate(fields)}
    types = [(key, kind, None) for key, (_, kind) in zip(names, fields, strict=True)]
    return msgspec.defstruct("Row", types, rename=names, gc=False)


def leaf_type(kind: pa.DataType) -> Any:
    """Returns msgspec's type of a scalar type other than DECIMAL; a date or a time is a str."""
    if pa.types.is_integer(kind):
        top = 1 << (kind.bit_width - 1)
        return Annotated[int, msgspec.Meta(ge=-top, le=top - 1)]
    return _PYTHON_TYPES[kind]


_PYTHON_TYPES: Final[dict[pa.DataType, Any]] = {
    pa.bool_(): bool,
    pa.float32(): float,
    pa.float64(): float,
    pa.string(): str,
    pa.binary(): bytes,
    pa.date32(): str,
    pa.timestamp("us", "UTC"): str,
    pa.timestamp("us"): str,
}
