"""One JSON object, judged by itself: for the few that Arrow's reader does not take as they are.

Rules of this room, which are those of Spark's `from_json`:

- A field that is absent, or null, is null; fields that nobody asked for are passed over; of a key
  that stands twice the last one counts.
- A STRING takes any JSON: what is no string becomes its text. Numbers keep their digits.
- A number must be in its type's range, without a fraction for whole numbers; a DECIMAL is rounded
  half up, and may be a string.
- A TIMESTAMP is ISO 8601 as Spark casts it, UTC where it has no zone, digits after the microsecond
  cut off; or a whole number of seconds since 1970. A DATE is what stands before the time.
- A BINARY is base64.

What fits is written again, in words that Arrow's reader takes; what does not is `Unfit`.
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
from typing import Any, Final

import msgspec
import pyarrow as pa

DATE_PATTERN: Final = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}([T ].*)?$"
"""The dates, and the times, that Arrow reads by whole columns; all others come here."""
TIME_PATTERN: Final = (
    r"^[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}(:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?)?)?"
    r"(Z|[+-][0-9]{2}(:?[0-9]{2})?)?)?$"
)

_SHOWN: Final = 40
_PLAIN_TIME: Final = re.compile(TIME_PATTERN)
_ZONE: Final = r"Z|[+-]\d{1,2}(?::?\d\d)?(?::?\d\d)?|[A-Z][A-Za-z0-9_+/-]*"
_TIME: Final = re.compile(
    r"\s*(?P<year>\d{4})(?:-(?P<month>\d{1,2})(?:-(?P<day>\d{1,2})(?:"
    r"[T ](?P<hour>\d{1,2})(?::(?P<minute>\d{1,2})(?::(?P<second>\d{1,2})(?:\.(?P<part>\d*))?)?)?"
    rf"(?:\s*(?P<zone>{_ZONE}))?)?)?)?\s*",
    re.ASCII,
)
_OFFSET: Final = re.compile(r"([+-])(\d{1,2})(?::?(\d\d))?(?::?(\d\d))?")
_DATE: Final = re.compile(r"\s*(\d{4})(?:-(\d{1,2})(?:-(\d{1,2})(?:[T ].*)?)?)?\s*", re.ASCII)
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_WHOLE: Final = re.compile(r"-?\d+")
_DECIMAL: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_NO_NUMBERS: Final = {
    "NaN": "NaN",
    "Infinity": "Infinity",
    "+Infinity": "Infinity",
    "+INF": "Infinity",
    "-Infinity": "-Infinity",
    "-INF": "-Infinity",
}
"""What Spark takes for a DOUBLE as a string, and how it is written without quotes."""

_DDL_NAMES: Final = {
    pa.bool_(): "BOOLEAN",
    pa.int8(): "TINYINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.string(): "STRING",
    pa.binary(): "BINARY",
    pa.date32(): "DATE",
    pa.timestamp("us", "UTC"): "TIMESTAMP",
    pa.timestamp("us"): "TIMESTAMP_NTZ",
}

_Write = Callable[[Any], Any]
"""From what `json` reads to what `msgspec` writes; raises `Unfit`."""


class Unfit(Exception):
    """The value does not fit, and why."""

    def __init__(self, what: object, kind: str) -> None:
        self.path: list[str] = []
        self._what = what
        self._kind = kind

    def __str__(self) -> str:
        field = f"{'.'.join(self.path)}: " if self.path else ""
        shown = self._what if isinstance(self._what, str) else _text(self._what)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
        return f"{field}{shown} is no {self._kind}"


class _Number(str):
    """A JSON number, to the letter; also NaN and the infinities."""

    __slots__ = ()


_scan: Final = json.JSONDecoder(
    parse_float=_Number, parse_int=_Number, parse_constant=_Number
).raw_decode


def rewriter(kind: pa.StructType) -> Callable[[str], bytes]:
    """What writes a JSON text of `kind` anew, which has nothing but itself at both ends.

    It raises `Unfit` for what does not fit, and `RecursionError` for what is nested so deep that
    nobody knows.
    """
    write = _writer_of(kind)

    def rewrite(text: str) -> bytes:
        try:
            value, end = _scan(text)
        except ValueError:
            raise Unfit(text, "JSON") from None
        if end < len(text):
            raise Unfit(text, "single JSON value")
        try:
            return msgspec.json.encode(write(value))
        except UnicodeEncodeError:  # half of a surrogate pair
            raise Unfit(text, "text that UTF-8 has") from None

    return rewrite


def _writer_of(kind: pa.DataType) -> _Write:
    if pa.types.is_struct(kind):
        return _struct_writer(kind)
    if pa.types.is_map(kind):
        return _map_writer(kind)
    if pa.types.is_list(kind):
        return _list_writer(kind)
    if pa.types.is_decimal(kind):
        return functools.partial(_write_decimal, kind.precision, kind.scale)
    if pa.types.is_integer(kind):
        top = 1 << (kind.bit_width - 1)
        return functools.partial(_write_whole, range(-top, top), _DDL_NAMES[kind])
    return _WRITERS[kind]


# ------------------------------------------------------------------------------ nested


def _struct_writer(kind: pa.StructType) -> _Write:
    writers = [(field.name, _writer_of(field.type)) for field in kind]

    def write(value: Any) -> Any:
        if not isinstance(value, dict):
            raise Unfit(value, "JSON object")
        found = {}
        for name, inner in writers:
            if (given := value.get(name)) is not None:
                found[name] = _inside(name, inner, given)
        return found

    return write


def _list_writer(kind: pa.ListType) -> _Write:
    inner = _writer_of(kind.value_type)

    def write(value: Any) -> Any:
        if not isinstance(value, list):
            raise Unfit(value, "JSON array")
        return [
            None if each is None else _inside(str(index), inner, each)
            for index, each in enumerate(value)
        ]

    return write


def _map_writer(kind: pa.MapType) -> _Write:
    """Arrow's reader knows no maps; it gets the entries."""
    inner = _writer_of(kind.item_type)

    def write(value: Any) -> Any:
        if not isinstance(value, dict):
            raise Unfit(value, "JSON object")
        return [
            {"key": key, "value": None if each is None else _inside(key, inner, each)}
            for key, each in value.items()
        ]

    return write


def _inside(name: str, write: _Write, value: Any) -> Any:
    try:
        return write(value)
    except Unfit as unfit:
        unfit.path.insert(0, name)
        raise


# ------------------------------------------------------------------------------ numbers, texts


def _raw(number: str) -> msgspec.Raw:
    return msgspec.Raw(number.encode())


def _write_whole(within: range, name: str, value: Any) -> Any:
    # The length first: Python refuses to read numbers of thousands of digits.
    if not (
        type(value) is _Number
        and len(value) <= 20
        and _WHOLE.fullmatch(value)
        and int(value) in within
    ):
        raise Unfit(value, name)
    return _raw(value)


def _write_floating(name: str, value: Any) -> Any:
    if type(value) is _Number:
        if value in _NO_NUMBERS:
            return _raw(value)
        # Arrow's reader refuses what a double cannot hold, instead of calling it infinite.
        found = float(value)
        return _raw(value) if abs(found) != float("inf") else _raw(_infinity(value))
    if isinstance(value, str) and value in _NO_NUMBERS:
        return _raw(_NO_NUMBERS[value])
    raise Unfit(value, name)


def _infinity(number: str) -> str:
    return "-Infinity" if number.startswith("-") else "Infinity"


def _write_decimal(precision: int, scale: int, value: Any) -> Any:
    context = decimal.Context(prec=precision, rounding=decimal.ROUND_HALF_UP)
    digits = value.replace(",", "") if isinstance(value, str) else ""
    try:
        if not _DECIMAL.fullmatch(digits):
            raise ValueError
        unit = decimal.Decimal(1).scaleb(-scale)
        return format(decimal.Decimal(digits).quantize(unit, context=context), "f")
    except (ValueError, ArithmeticError):
        raise Unfit(value, f"DECIMAL({precision},{scale})") from None


def _write_boolean(value: Any) -> Any:
    if not isinstance(value, bool):
        raise Unfit(value, "BOOLEAN")
    return value


def _write_string(value: Any) -> Any:
    return str(value) if isinstance(value, str) else _text(value)


def _text(value: Any) -> str:
    """As compact JSON, numbers to the letter."""
    return msgspec.json.encode(_plain(value)).decode()


def _plain(value: Any) -> Any:
    if type(value) is _Number:
        return _raw(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value


def _write_binary(value: Any) -> Any:
    try:
        if type(value) is not str:
            raise ValueError
        return base64.b64encode(base64.b64decode(value.strip(), validate=True)).decode()
    except (ValueError, binascii.Error):
        raise Unfit(value, "base64") from None


# ------------------------------------------------------------------------------ times


def _write_date(value: Any) -> Any:
    found = _DATE.fullmatch(value) if type(value) is str else None
    try:
        if found is None:
            raise ValueError
        year, month, day = (int(each or 1) for each in found.groups())
        return dt.date(year, month, day).isoformat()
    except ValueError:
        raise Unfit(value, "DATE") from None


def _write_timestamp(value: Any) -> Any:
    try:
        if type(value) is str and _PLAIN_TIME.match(value):
            dt.datetime.fromisoformat(value)
            return value
        if type(value) is _Number and _WHOLE.fullmatch(value) and len(value) <= 20:
            at = _EPOCH + dt.timedelta(seconds=int(value))
        else:
            at, zone = _time(value)
            at = at.replace(tzinfo=_zone(zone) if zone else dt.UTC).astimezone(dt.UTC)
        return at.replace(tzinfo=None).isoformat()
    except (ValueError, OverflowError, LookupError, OSError):
        raise Unfit(value, "TIMESTAMP") from None


def _write_timestamp_ntz(value: Any) -> Any:
    try:
        at, zone = _time(value)
        if zone:
            raise ValueError
        return at.isoformat()
    except ValueError:
        raise Unfit(value, "TIMESTAMP_NTZ") from None


def _time(value: Any) -> tuple[dt.datetime, str | None]:
    """The time on the clock, and the zone as it stands there. Raises `ValueError`."""
    found = _TIME.fullmatch(value) if type(value) is str else None
    if found is None:
        raise ValueError
    year, month, day = (int(found[name] or 1) for name in ("year", "month", "day"))
    hour, minute, second = (int(found[name] or 0) for name in ("hour", "minute", "second"))
    micros = int((found["part"] or "")[:6].ljust(6, "0"))
    at = dt.datetime(year, month, day, hour, minute, second, micros)  # noqa: DTZ001 (a clock's)
    return at, found["zone"]


def _zone(name: str) -> dt.tzinfo:
    """Raises `ValueError`, `LookupError` or `OSError` for what is no zone."""
    found = _OFFSET.fullmatch(name)
    if found is None:
        return dt.UTC if name == "Z" else zoneinfo.ZoneInfo(name)
    hours, minutes, seconds = (int(each or 0) for each in found.groups()[1:])
    offset = dt.timedelta(hours=hours, minutes=minutes, seconds=seconds)
    if minutes > 59 or seconds > 59:
        raise ValueError
    return dt.timezone(-offset if found[1] == "-" else offset)


_WRITERS: Final[dict[pa.DataType, _Write]] = {
    pa.bool_(): _write_boolean,
    pa.float32(): functools.partial(_write_floating, "FLOAT"),
    pa.float64(): functools.partial(_write_floating, "DOUBLE"),
    pa.string(): _write_string,
    pa.binary(): _write_binary,
    pa.date32(): _write_date,
    pa.timestamp("us", "UTC"): _write_timestamp,
    pa.timestamp("us"): _write_timestamp_ntz,
}
