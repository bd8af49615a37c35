"""Which columns a value of an Avro type fits, and what it becomes there.

| value | BOOLEAN | whole numbers | FLOAT, DOUBLE | DECIMAL | STRING | BINARY | DATE | TIMESTAMP |
|---|---|---|---|---|---|---|---|---|
| boolean | same | | | | `true` or `false` | | | |
| int, long, time, local timestamp | | in range | nearest | in range | digits | | | |
| float, double | | | nearest | rounded | shortest digits | | | |
| decimal | | without a fraction | nearest | rounded | digits | | | |
| string, enum, uuid | | | | a number | same | UTF-8 | ISO 8601 | ISO 8601 |
| bytes, fixed | | | | | if UTF-8 | same | | |
| date | | | | | ISO 8601 | | same | |
| timestamp | | | | | ISO 8601 | | | same |

- These are the types that a column may have had before the schema changed: what Avro's schema
  resolution promotes, and each scalar as text. Numbers and texts follow the rules of JSON
  (`json_rules`), but a whole number is never a time, because its unit is not known.
- A DECIMAL is rounded half up. Nanoseconds are rounded down to microseconds.
- A whole number that is outside the 32 bits of an int, a boolean that is neither 0 nor 1, a text
  that is not UTF-8, and an enum's symbol that the schema does not have, fit no column.

Results are what `arrow_columns` takes.
"""

from __future__ import annotations

import datetime as dt
import decimal
import functools
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from sparklog.formats.values.avro.nodes import Kind, Logical, Node
from sparklog.formats.values.ddl import ddl_of
from sparklog.formats.values.json_rules import (
    Decode,
    JsonNumber,
    ValueMismatch,
    leaf_decoder,
    typed_leaf_decoder,
)
from sparklog.limits import TIMESTAMP_MAX_US, TIMESTAMP_MIN_US

Convert: TypeAlias = Callable[[Any], Any]
"""Takes what the type's encoding has: bool, int, float or bytes. Raises `ValueMismatch`."""

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
DECIMAL_BOUND: Final = 10**38
"""No DECIMAL has as many digits."""
_DAY_US: Final = 86_400_000_000
_EPOCH: Final = dt.datetime(1970, 1, 1)  # noqa: DTZ001 (its text gets a Z)
_SHOWN_BYTES: Final = 16

TO_MICROS: Final[dict[Logical | None, tuple[int, int]]] = {
    Logical.TIME_MILLIS: (1_000, 1),
    Logical.TIME_MICROS: (1, 1),
    Logical.TIMESTAMP_MILLIS: (1_000, 1),
    Logical.TIMESTAMP_MICROS: (1, 1),
    Logical.TIMESTAMP_NANOS: (1, 1_000),
    Logical.LOCAL_TIMESTAMP_MILLIS: (1_000, 1),
    Logical.LOCAL_TIMESTAMP_MICROS: (1, 1),
    Logical.LOCAL_TIMESTAMP_NANOS: (1, 1_000),
}
"""A factor and a divisor."""
INSTANTS: Final = frozenset(
    (Logical.TIMESTAMP_MILLIS, Logical.TIMESTAMP_MICROS, Logical.TIMESTAMP_NANOS)
)


def converter_of(node: Node, kind: pa.DataType) -> Convert:
    """Returns the conversion of a type's values, one that contains no other type, to a column."""
    if node.kind is Kind.BOOLEAN:
        return _of_boolean(kind)
    if node.logical is Logical.DECIMAL:
        return _of_decimal(node.scale, kind)
    if node.kind in (Kind.INT, Kind.LONG):
        return _of_whole(node, kind)
    if node.kind in (Kind.FLOAT, Kind.DOUBLE):
        return _of_floating(node.kind, kind)
    if node.kind is Kind.ENUM:
        return _of_enum(node.symbols, _of_text(kind))
    if node.logical is Logical.UUID and node.kind is Kind.FIXED:
        to_column = _of_text(kind)
        return lambda value: to_column(uuid_text(value))
    if node.kind is Kind.STRING:
        to_column = _of_text(kind)
        return lambda value: to_column(_utf8(value))
    return _of_bytes(kind)


def shown_bytes(value: bytes) -> JsonNumber:
    """Returns the beginning of bytes, for a message."""
    text = value[:_SHOWN_BYTES].hex()
    return JsonNumber(f"0x{text}…" if len(value) > _SHOWN_BYTES else f"0x{text}")


def uuid_text(value: bytes) -> str:
    """Returns the text of a UUID's 16 bytes."""
    text = value.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def misfit(kind: pa.DataType) -> Convert:
    """Returns the conversion that accepts nothing."""
    wanted = f"a valid {ddl_of(kind)}"
    if pa.types.is_nested(kind):
        wanted = {"S": "a STRUCT", "M": "a MAP", "A": "an ARRAY"}[ddl_of(kind)[0]]

    def refuse(value: Any) -> Any:
        raise ValueMismatch(shown_bytes(value) if isinstance(value, bytes) else value, wanted)

    return refuse


# ------------------------------------------------------------------------------ each type


def _same(value: Any) -> Any:
    return value


def _of_boolean(kind: pa.DataType) -> Convert:
    if pa.types.is_boolean(kind):
        to_column: Convert = _same
    elif pa.types.is_string(kind):
        to_column = {False: "false", True: "true"}.__getitem__
    else:
        to_column = misfit(kind)

    def convert(value: int) -> Any:
        if value > 1:
            raise ValueMismatch(JsonNumber(value), "a valid boolean")
        return to_column(bool(value))

    return convert


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def _of_digits(kind: pa.DataType) -> Decode:
    """Returns the conversion of a number's digits."""
    return leaf_decoder(kind) if _is_number(kind) or pa.types.is_string(kind) else misfit(kind)


def _of_whole(node: Node, kind: pa.DataType) -> Convert:
    to_column = _whole_column(node.logical, kind)
    if node.kind is Kind.LONG:
        return to_column

    def convert(value: int) -> Any:
        if not INT_MIN <= value <= INT_MAX:
            raise ValueMismatch(JsonNumber(value), "a valid int")
        return to_column(value)

    return convert


def _whole_column(logical: Logical | None, kind: pa.DataType) -> Convert:
    if logical is Logical.DATE:
        return _of_date(kind)
    if logical in INSTANTS:
        return _of_instant(*TO_MICROS[logical], kind)
    factor, divisor = TO_MICROS.get(logical, (1, 1))
    if pa.types.is_integer(kind):
        top = 1 << (kind.bit_width - 1)
        refuse = misfit(kind)

        def convert(value: int) -> int:
            number = value * factor // divisor
            if -top <= number < top:
                return number
            refuse(JsonNumber(number))
            raise AssertionError("unreachable")

        return convert
    digits = _of_digits(kind)
    return lambda value: digits(JsonNumber(value * factor // divisor))


def _of_floating(written: Kind, kind: pa.DataType) -> Convert:
    if pa.types.is_floating(kind):
        return _same
    if not (pa.types.is_decimal(kind) or pa.types.is_string(kind)):
        refuse = misfit(kind)
        return lambda value: refuse(_float_digits(written, value))
    digits = _of_digits(kind)
    return lambda value: digits(_float_digits(written, value))


def _float_digits(written: Kind, value: float) -> JsonNumber:
    """Returns the fewest digits that are nearest to this float or double."""
    if value != value:
        return JsonNumber("NaN")
    if value in (float("inf"), float("-inf")):
        return JsonNumber("Infinity" if value > 0 else "-Infinity")
    return JsonNumber(str(np.float32(value)) if written is Kind.FLOAT else repr(value))


def _of_decimal(scale: int, kind: pa.DataType) -> Convert:
    digits = _of_digits(kind)

    def convert(value: bytes) -> Any:
        unscaled = int.from_bytes(value, "big", signed=True)
        if not -DECIMAL_BOUND < unscaled < DECIMAL_BOUND:
            raise ValueMismatch(shown_bytes(value), "a decimal of at most 38 digits")
        return digits(JsonNumber(f"{decimal.Decimal(unscaled).scaleb(-scale, _CONTEXT):f}"))

    return convert


_CONTEXT: Final = decimal.Context(prec=38)


def _of_enum(symbols: tuple[str, ...], to_column: Convert) -> Convert:
    def convert(value: int) -> Any:
        if not 0 <= value < len(symbols):
            raise ValueMismatch(JsonNumber(value), "the number of a symbol")
        return to_column(symbols[value])

    return convert


def _utf8(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ValueMismatch(shown_bytes(value), "valid UTF-8") from None


def _of_text(kind: pa.DataType) -> Convert:
    if pa.types.is_string(kind):
        return _same
    if pa.types.is_binary(kind):
        return str.encode
    if pa.types.is_decimal(kind):
        return leaf_decoder(kind)
    return typed_leaf_decoder(kind) if pa.types.is_temporal(kind) else misfit(kind)


def _of_bytes(kind: pa.DataType) -> Convert:
    if pa.types.is_binary(kind):
        return bytes
    return _utf8 if pa.types.is_string(kind) else misfit(kind)


def _of_date(kind: pa.DataType) -> Convert:
    if not (pa.types.is_date(kind) or pa.types.is_string(kind)):
        return _refuse_time(kind, _DAY_US, 1)
    return functools.partial(_iso_date, "a valid DATE")


def _iso_date(wanted: str, days: int) -> str:
    if not TIMESTAMP_MIN_US // _DAY_US <= days <= TIMESTAMP_MAX_US // _DAY_US:
        raise ValueMismatch(JsonNumber(days), wanted)
    return (_EPOCH + dt.timedelta(days)).date().isoformat()


def _of_instant(factor: int, divisor: int, kind: pa.DataType) -> Convert:
    if not (pa.types.is_timestamp(kind) or pa.types.is_string(kind)):
        return _refuse_time(kind, factor, divisor)

    def convert(value: int) -> str:
        return _iso_time(value * factor // divisor)

    return convert


def _iso_time(micros: int) -> str:
    if not TIMESTAMP_MIN_US <= micros <= TIMESTAMP_MAX_US:
        raise ValueMismatch(JsonNumber(micros), "a valid TIMESTAMP")
    return f"{(_EPOCH + dt.timedelta(microseconds=micros)).isoformat()}Z"


def _refuse_time(kind: pa.DataType, factor: int, divisor: int) -> Convert:
    """Returns the conversion that refuses a time, which its message shows in ISO 8601."""
    refuse = misfit(kind)
    return lambda value: refuse(_iso_time(value * factor // divisor))
