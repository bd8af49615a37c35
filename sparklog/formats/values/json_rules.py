"""Rules of Spark's `from_json` for one JSON object.

- A field that is absent or null is null. Fields that the schema does not name are ignored. The
  last value of a repeated key counts.
- A STRING accepts any JSON value; one that is not a string becomes its JSON text, with the digits
  of its numbers unchanged.
- A number must be in the range of its type; a whole number has no fraction. A DECIMAL is rounded
  half up and may be written as a string.
- A TIMESTAMP is ISO 8601 as Spark casts it: UTC if it has no zone, and truncated to microseconds.
  It may also be a whole number of seconds since 1970. A DATE is the part before the time.
- A BINARY is base64.
- Nesting is limited by Python's recursion limit, about 1,000 levels, as in Spark (Jackson's
  `maxNestingDepth`).

Values are decoded to the Python types that `arrow_columns` expects. A value that does not fit
raises `ValueMismatch`.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import decimal
import functools
import json
import re
import zoneinfo
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import msgspec
import pyarrow as pa

_SHOWN: Final = 40
_WHITESPACE: Final = " \t\r\n"
"""RFC 8259, section 2."""

# In these expressions no two repeats match the same characters. If two did, refusing a long text
# would take quadratic time.
_UTC_TIME: Final = re.compile(
    r"\d{4}-\d\d-\d\d[T ]([01]\d|2[0-3]):\d\d:\d\d(\.\d{3}(\d{3})?)?Z?", re.ASCII
)
"""Times that Python and Arrow parse as Spark does."""
_ZONE: Final = r"Z|[+-]\d{1,2}(?::?\d\d)?(?::?\d\d)?|[A-Z][A-Za-z0-9_+/-]*"
_TIME: Final = re.compile(
    r"\s*(?P<year>\d{4})(?:-(?P<month>\d{1,2})(?:-(?P<day>\d{1,2})(?:"
    r"[T ](?P<hour>\d{1,2})(?::(?P<minute>\d{1,2})(?::(?P<second>\d{1,2})(?:\.(?P<part>\d*))?)?)?"
    rf"(?:\s*(?P<zone>{_ZONE}))?)?)?)?\s*",
    re.ASCII,
)
_UTC_NAMES: Final = frozenset(("Z", "UTC", "GMT"))
_OFFSET: Final = re.compile(r"([+-])(\d{1,2})(?::?(\d\d))?(?::?(\d\d))?")
_DATE: Final = re.compile(r"\s*(\d{4})(?:-(\d{1,2})(?:-(\d{1,2})(?:[T ].*+)?)?)?\s*", re.ASCII)
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_WHOLE: Final = re.compile(r"-?\d+")
_DECIMAL: Final = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_NOT_FINITE: Final = frozenset(("NaN", "Infinity", "+Infinity", "+INF", "-Infinity", "-INF"))
"""Strings that Spark reads as a DOUBLE."""

_DDL_NAMES: Final = {
    pa.int8(): "TINYINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
}

Decode: TypeAlias = Callable[[Any], Any]
"""Converts a value parsed by `json`, numbers as `JsonNumber`, to one of `arrow_columns`."""


class ValueMismatch(Exception):
    """A value does not fit its type; its message names the field, the value and the type."""

    def __init__(self, value: object, wanted: str) -> None:
        self.path: list[str] = []
        self.value = value
        """As `parse` returned it."""
        self.wanted = wanted

    def __str__(self) -> str:
        field = f"{'.'.join(self.path)}: " if self.path else ""
        return f"{field}{_shown(self.value)} is not {self.wanted}"


def _shown(value: object) -> str:
    """Returns the beginning of the value's JSON, for a message."""
    try:
        text = value if isinstance(value, str) else _text(value)
    except (ValueMismatch, RecursionError):
        text = repr(type(value))
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    return text.encode("utf-8", "backslashreplace").decode()


class JsonNumber(str):
    """The text of a JSON number, of NaN, or of an infinity."""

    __slots__ = ()


_scan: Final = json.JSONDecoder(
    parse_float=JsonNumber, parse_int=JsonNumber, parse_constant=JsonNumber
).raw_decode


class ObjectDecoder:
    """Decodes JSON objects of one type by the complete rules."""

    def __init__(self, kind: pa.StructType) -> None:
        self._decode = decoder_of(kind, leaf_decoder)

    def decode(self, text: str) -> Any:
        """Returns the values of the object's fields, a tuple.

        Raises `ValueMismatch` for text that does not fit, and `RecursionError` for text that is
        nested too deeply.
        """
        return self._decode(parse(text))


def parse(text: str) -> Any:
    """Returns the JSON value that the text consists of, numbers as `JsonNumber`.

    Raises `ValueMismatch` for other text, and `RecursionError` for text that is nested too deeply.
    """
    trimmed = text.strip(_WHITESPACE)
    try:
        value, end = _scan(trimmed)
    except ValueError:
        raise ValueMismatch(text, "valid JSON") from None
    if end < len(trimmed):
        raise ValueMismatch(text, "a single JSON value")
    return value


def leaf_decoder(kind: pa.DataType) -> Decode:
    """Returns the decoder of a type that is not a struct, array or map."""
    if pa.types.is_decimal(kind):
        return _unscaled_decoder(kind)
    if pa.types.is_integer(kind):
        top = 1 << (kind.bit_width - 1)
        return functools.partial(_decode_whole, range(-top, top), _DDL_NAMES[kind])
    return _LEAF_DECODERS[kind]


def typed_leaf_decoder(kind: pa.DataType) -> Decode:
    """Returns the decoder of a scalar type of a typed column. It differs from `leaf_decoder`:

    - A TIMESTAMP has no named zone other than UTC and GMT, so that the result does not depend on
      the time zone data of the machine.
    - A DECIMAL becomes a `decimal.Decimal`.
    """
    if pa.types.is_decimal(kind):
        return _decimal_decoder(kind)
    is_timestamp = kind == pa.timestamp("us", "UTC")
    return _decode_fixed_timestamp if is_timestamp else leaf_decoder(kind)


def decoder_of(kind: pa.DataType, leaf: Callable[[pa.DataType], Decode]) -> Decode:
    """Returns the decoder of a type, whose scalar types are decoded by `leaf`."""
    if pa.types.is_struct(kind):
        return _struct_decoder(kind, leaf)
    if pa.types.is_map(kind):
        return _map_decoder(kind, leaf)
    if pa.types.is_list(kind):
        return _list_decoder(kind, leaf)
    return leaf(kind)


# ------------------------------------------------------------------------------ nested


def _struct_decoder(kind: pa.StructType, leaf: Callable[[pa.DataType], Decode]) -> Decode:
    decoders = [(field.name, decoder_of(field.type, leaf)) for field in kind]

    def decode(value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueMismatch(value, "a JSON object")
        return tuple(_decode_inside(name, inner, value.get(name)) for name, inner in decoders)

    return decode


def _list_decoder(kind: pa.ListType, leaf: Callable[[pa.DataType], Decode]) -> Decode:
    inner = decoder_of(kind.value_type, leaf)

    def decode(value: Any) -> Any:
        if not isinstance(value, list):
            raise ValueMismatch(value, "a JSON array")
        return [_decode_inside(str(index), inner, each) for index, each in enumerate(value)]

    return decode


def _map_decoder(kind: pa.MapType, leaf: Callable[[pa.DataType], Decode]) -> Decode:
    inner = decoder_of(kind.item_type, leaf)

    def decode(value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueMismatch(value, "a JSON object")
        return {
            _decode_string(key): _decode_inside(key, inner, each) for key, each in value.items()
        }

    return decode


def _decode_inside(name: str, decode: Decode, value: Any) -> Any:
    if value is None:
        return None
    try:
        return decode(value)
    except ValueMismatch as mismatch:
        mismatch.path.insert(0, name)
        raise


# ------------------------------------------------------------------------------ numbers, strings


def _decode_whole(within: range, name: str, value: Any) -> int:
    # The length first: Python refuses to parse numbers with thousands of digits.
    if type(value) is JsonNumber and len(value) <= 20:
        try:
            found = int(value)
        except ValueError:  # a fraction or an exponent
            pass
        else:
            if found in within:
                return found
    raise ValueMismatch(value, f"a valid {name}")


def _decode_floating(name: str, value: Any) -> float:
    if value == "-0" and type(value) is JsonNumber:
        return 0.0  # a whole number, whose zero has no sign
    if type(value) is JsonNumber or (isinstance(value, str) and value in _NOT_FINITE):
        return float(value)
    raise ValueMismatch(value, f"a valid {name}")


def _decimal_decoder(kind: pa.Decimal128Type) -> Callable[[Any], decimal.Decimal]:
    """Returns the decoder of a number, rounded to the digits of its type."""
    rounded = decimal_rounder(kind)

    def decode(value: Any) -> decimal.Decimal:
        digits = value.replace(",", "") if isinstance(value, str) else ""
        try:
            if not _DECIMAL.fullmatch(digits):
                raise ValueError
            return rounded(decimal.Decimal(digits))
        except (ValueError, ArithmeticError):
            wanted = f"a valid DECIMAL({kind.precision},{kind.scale})"
            raise ValueMismatch(value, wanted) from None

    return decode


def decimal_rounder(kind: pa.Decimal128Type) -> Callable[[Any], decimal.Decimal]:
    """Returns a function that rounds an int or a Decimal to the fraction of the type.

    The function raises `decimal.InvalidOperation` for a number of more digits than the type has.
    """
    context = decimal.Context(prec=kind.precision, rounding=decimal.ROUND_HALF_UP)
    unit = decimal.Decimal(1).scaleb(-kind.scale, context)
    return lambda number: context.quantize(number, unit)


def _unscaled_decoder(kind: pa.Decimal128Type) -> Decode:
    """Returns the decoder of a number to an int: the number times 10 to the power of its scale."""
    rounded, context = _decimal_decoder(kind), decimal.Context(prec=kind.precision)
    return lambda value: int(rounded(value).scaleb(kind.scale, context=context))


def _decode_boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueMismatch(value, "a valid BOOLEAN")
    return value


def _decode_string(value: Any) -> str:
    text = str(value) if isinstance(value, str) else _text(value)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        raise ValueMismatch(text, "valid Unicode text") from None
    return text


def _text(value: Any) -> str:
    """Returns compact JSON, with numbers unchanged."""
    try:
        return msgspec.json.encode(_raw_numbers(value)).decode()
    except UnicodeEncodeError:  # half of a surrogate pair
        raise ValueMismatch("a string", "valid Unicode text") from None


def _raw_numbers(value: Any) -> Any:
    if type(value) is JsonNumber:
        return msgspec.Raw(value.encode())
    if isinstance(value, dict):
        return {key: _raw_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_raw_numbers(each) for each in value]
    return value


def _decode_binary(value: Any) -> bytes:
    try:
        if type(value) is not str:
            raise ValueError
        return base64.b64decode(value.strip(), validate=True)
    except (ValueError, binascii.Error):
        raise ValueMismatch(value, "valid base64") from None


# ------------------------------------------------------------------------------ times


def _decode_date(value: Any) -> str:
    found = _DATE.fullmatch(value) if type(value) is str else None
    try:
        if found is None:
            raise ValueError
        year, month, day = (int(each or 1) for each in found.groups())
        return dt.date(year, month, day).isoformat()
    except ValueError:
        raise ValueMismatch(value, "a valid DATE") from None


def _decode_timestamp(zone_of: Callable[[str], dt.tzinfo], value: Any) -> str:
    """Returns the time in UTC, with a `Z`."""
    try:
        if type(value) is str and _UTC_TIME.fullmatch(value):
            dt.datetime.fromisoformat(value)
            return value if value.endswith("Z") else f"{value}Z"
        if type(value) is JsonNumber and _WHOLE.fullmatch(value) and len(value) <= 20:
            at = _EPOCH + dt.timedelta(seconds=int(value))
        else:
            at, zone = _time(value)
            at = at.replace(tzinfo=zone_of(zone) if zone else dt.UTC).astimezone(dt.UTC)
        return f"{at.replace(tzinfo=None).isoformat()}Z"
    except (ValueError, OverflowError, LookupError, OSError):
        raise ValueMismatch(value, "a valid TIMESTAMP") from None


def _decode_timestamp_ntz(value: Any) -> str:
    try:
        at, zone = _time(value)
        if zone:
            raise ValueError
        return at.isoformat()
    except ValueError:
        raise ValueMismatch(value, "a valid TIMESTAMP_NTZ") from None


def _time(value: Any) -> tuple[dt.datetime, str | None]:
    """Returns the local time, and the zone as written, if any.

    Raises `ValueError` for a value that is not a time.
    """
    found = _TIME.fullmatch(value) if type(value) is str else None
    if found is None:
        raise ValueError
    year, month, day = (int(found[name] or 1) for name in ("year", "month", "day"))
    hour, minute, second = (int(found[name] or 0) for name in ("hour", "minute", "second"))
    micros = int((found["part"] or "")[:6].ljust(6, "0"))
    at = dt.datetime(year, month, day, hour, minute, second, micros)  # noqa: DTZ001 (a clock's)
    return at, found["zone"]


def _zone(name: str) -> dt.tzinfo:
    """Returns the zone. Raises `ValueError`, `LookupError` or `OSError` if there is none."""
    is_named = name != "Z" and _OFFSET.fullmatch(name) is None
    return zoneinfo.ZoneInfo(name) if is_named else _fixed_zone(name)


def _fixed_zone(name: str) -> dt.tzinfo:
    """Returns the zone of an offset. Raises `ValueError` for another one."""
    if name in _UTC_NAMES:
        return dt.UTC
    found = _OFFSET.fullmatch(name)
    if found is None:
        raise ValueError
    hours, minutes, seconds = (int(each or 0) for each in found.groups()[1:])
    offset = dt.timedelta(hours=hours, minutes=minutes, seconds=seconds)
    if minutes > 59 or seconds > 59:
        raise ValueError
    return dt.timezone(-offset if found[1] == "-" else offset)


_LEAF_DECODERS: Final[dict[pa.DataType, Decode]] = {
    pa.bool_(): _decode_boolean,
    pa.float32(): functools.partial(_decode_floating, "FLOAT"),
    pa.float64(): functools.partial(_decode_floating, "DOUBLE"),
    pa.string(): _decode_string,
    pa.binary(): _decode_binary,
    pa.date32(): _decode_date,
    pa.timestamp("us", "UTC"): functools.partial(_decode_timestamp, _zone),
    pa.timestamp("us"): _decode_timestamp_ntz,
}
_decode_fixed_timestamp: Final = functools.partial(_decode_timestamp, _fixed_zone)
