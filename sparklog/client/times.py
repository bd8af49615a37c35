"""Conversions of times between datetimes, strings, milliseconds, and microseconds since 1970."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from sparklog import errors, limits

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)

Timestamp = int | str | datetime
"""Milliseconds since 1970-01-01 UTC, as in Kafka's clients; a datetime with a zone; or a time in
ISO 8601, which is UTC if it names no zone."""

_DIGITS: Final = re.compile(r"[+-]?\d+", re.ASCII)


def moment(text: str) -> datetime:
    """Parses a time in ISO 8601; UTC if it has no zone.

    Raises ValueError for anything else, including bare digits, which may be meant as an offset.
    """
    if _DIGITS.fullmatch(text.strip()):
        raise ValueError("pass a number as an int")
    when = datetime.fromisoformat(text)
    return when if when.tzinfo else when.replace(tzinfo=UTC)


def datetime_us(when: datetime) -> int:
    """Returns microseconds since 1970-01-01 UTC. Raises `BadOption` if `when` has no zone."""
    if when.tzinfo is None:
        raise errors.BadOption(
            option="timestamp", value=str(when), reason="give it a time zone, such as datetime.UTC"
        )
    return (when - _EPOCH) // _MICROSECOND


def timestamp_us(when: Timestamp) -> int:
    """Returns microseconds since 1970-01-01 UTC.

    Raises `WrongSchema` for any other type, or outside the years 1 to 9999, the range of Spark's
    TIMESTAMP; `BadOption` for a datetime without a zone.
    """
    if isinstance(when, datetime):
        return datetime_us(when)
    if isinstance(when, str):
        try:
            return datetime_us(moment(when))
        except ValueError:
            pass
    if type(when) is not int:
        raise errors.WrongSchema(
            reason="a timestamp must be a datetime, a time in ISO 8601, or milliseconds as an int,"
            f" not {when!r}"
        )
    micros = when * 1000
    if not limits.TIMESTAMP_MIN_US <= micros <= limits.TIMESTAMP_MAX_US:
        raise errors.WrongSchema(reason=f"timestamp {when} ms is outside the years 1 to 9999")
    return micros


def utc(micros: int) -> datetime:
    """Returns the datetime of microseconds since 1970-01-01 UTC, exactly."""
    return _EPOCH + timedelta(microseconds=micros)
