"""Every failure that sparklog reports, grouped by what the caller should do about it.

Four kinds: `Retriable` (try again), `Invalid` (correct the request), `Fenced` (stop: a newer
broker, producer or member has taken over) and `Corrupt` (a person must inspect the data). Each
failure is a class with a stable `code` and a field for each fact that explains it. A listener
translates `code`, never a message. A request that may have taken effect raises `OutcomeUnknown`.

A message says what happened, to what, and what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sparklog.errors.base import *
from sparklog.errors.base import SparklogError, all_codes
from sparklog.errors.corrupt import *
from sparklog.errors.fenced import *
from sparklog.errors.invalid_records import *
from sparklog.errors.invalid_requests import *
from sparklog.errors.invalid_roots import *
from sparklog.errors.invalid_topics import *
from sparklog.errors.retriable import *
from sparklog.errors.unknown import *

_NAMES: Final = sorted(each.__name__ for each in all_codes(SparklogError).values())

if not TYPE_CHECKING:  # type checkers see the names in the imports, and do not evaluate this
    __all__ = list(_NAMES)


def __dir__() -> list[str]:
    return _NAMES
