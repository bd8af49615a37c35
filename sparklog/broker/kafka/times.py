"""Times as kio represents them: Python's `timedelta` and `datetime`."""

from __future__ import annotations

import datetime as dt
from typing import Final

_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
NO_TIME: Final = dt.timedelta(0)


def moment(ms: int) -> dt.datetime:
    """Returns the time `ms` milliseconds after the Unix epoch."""
    return _EPOCH + dt.timedelta(milliseconds=ms)


def duration(ms: int) -> dt.timedelta:
    """Returns a duration of `ms` milliseconds."""
    return dt.timedelta(milliseconds=ms)


def to_ms(duration: dt.timedelta) -> int:
    """Returns the whole milliseconds of a duration."""
    return duration // dt.timedelta(milliseconds=1)


def ms_of(time: dt.datetime) -> int:
    """Returns the whole milliseconds since the Unix epoch."""
    return to_ms(time - _EPOCH)
