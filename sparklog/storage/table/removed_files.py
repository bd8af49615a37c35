"""Retention of the files that have left a table, for readers of its older versions.

Two kinds of readers need such a file: a query that has opened an older version, or asks for one
(time travel), and a stream of another engine that was paused, and continues with the commits that
it has not seen.

- Each file stays for a grace, within which a merge can be undone.
- After it, files stay while they are young, few and small: `RemovedFileRetention`. The oldest go
  first.
- A property of the table, `delta.deletedFileRetentionDuration`, replaces the age, and lifts the
  bounds on the bytes and the number of its files; that on the number in all tables holds.

The number is bounded because a broker has the remove actions of its tables in memory, about 600
bytes each, and writes them into every checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sparklog import limits
from sparklog.storage.table.delta_log import Remove

REMOVED_FILES = 100_000  # of all tables of a broker, beyond their grace,
REMOVED_FILES_OF_TABLE = 10_000
REMOVED_FILE_BYTES = 64 * limits.MIB  # of a table's removed files, or
_REMOVED_FILE_SHARE = 0.25  # of the table's bytes, if that is more

REMOVED_AT: Final = "sparklog.removedAt"
"""The tag with the time of removal in ms, of a file whose `deletionTimestamp` is later."""
_UNIT_SECONDS: Final = {
    "microsecond": 1e-6,
    "millisecond": 1e-3,
    "second": 1.0,
    "minute": 60.0,
    "hour": 3_600.0,
    "day": 86_400.0,
    "week": 7 * 86_400.0,
}
_PART: Final = re.compile(rf"(\d{{1,9}})\s+({'|'.join(_UNIT_SECONDS)})s?\b", re.IGNORECASE)
_INTERVAL: Final = re.compile(
    rf"(?:interval\s+)?{_PART.pattern}(?:\s+{_PART.pattern})*", re.IGNORECASE
)


@dataclass(slots=True)
class RemovedFileRetention:
    """The age and number up to which removed files stay beyond their grace.

    The tables of a broker share one, whose number its janitor adapts to how many there are.
    """

    kept_seconds: float
    files: int = REMOVED_FILES

    def seconds_of(self, property_seconds: float | None) -> float:
        """Returns how long files stay in a table, whose own retention is `property_seconds`."""
        return self.kept_seconds if property_seconds is None else property_seconds

    def files_of(self, property_seconds: float | None) -> int:
        """Returns how many files may stay in a table, whose own retention is `property_seconds`."""
        if property_seconds is not None:
            return self.files
        return min(self.files, REMOVED_FILES_OF_TABLE)


NO_RETENTION: Final = RemovedFileRetention(kept_seconds=0.0)
"""Files go when their grace is over."""


def removed_ms(remove: Remove) -> int | None:
    """Returns the time at which the file was removed, according to the log."""
    tagged = (remove.tags or {}).get(REMOVED_AT) or ""
    return int(tagged) if tagged.isdecimal() else remove.deletion_timestamp


def expired(
    removed: Mapping[str, Remove],
    retention: RemovedFileRetention,
    *,
    now_ms: int,
    grace_seconds: float,
    property_seconds: float | None,
    table_bytes: int,
) -> list[str]:
    """Returns the paths of the files to remove now, oldest first.

    Files without a time stay, which an engine may omit. `property_seconds` is the table's own
    retention, None without one; `table_bytes` the size of its newest version.
    """
    dated = [
        (at_ms, path, remove.size or 0)
        for path, remove in removed.items()
        if (at_ms := removed_ms(remove)) is not None
    ]
    dated.sort(reverse=True)
    kept_seconds = retention.seconds_of(property_seconds)
    most_files = retention.files_of(property_seconds)
    most_bytes = max(REMOVED_FILE_BYTES, round(table_bytes * _REMOVED_FILE_SHARE))
    grace_ms, kept_ms = (now_ms - round(each * 1e3) for each in (grace_seconds, kept_seconds))
    found, total_bytes = [], 0
    for number, (at_ms, path, size) in enumerate(dated):
        total_bytes += size
        are_many = number >= most_files
        are_large = property_seconds is None and total_bytes > most_bytes
        if at_ms < grace_ms and (at_ms < kept_ms or are_many or are_large):
            found.append(path)
    return found[::-1]


def fair_number(counts: Iterable[int]) -> int:
    """Returns how many removed files each table may keep, for `REMOVED_FILES` in all.

    `counts` are those that the tables have now: tables with few leave room to the others.
    """
    left, waiting = REMOVED_FILES, sorted(counts)
    for done, count in enumerate(waiting):
        share = left // (len(waiting) - done)
        if count > share:
            return share
        left -= count
    return REMOVED_FILES


def interval_seconds(text: str | None) -> float | None:
    """Returns the duration of a table property such as `interval 7 days`; None if it is none.

    The syntax is Spark's, of the units that Delta allows in its durations.
    """
    text = (text or "").strip()
    if _INTERVAL.fullmatch(text) is None:
        return None
    parts: Sequence[tuple[str, str]] = _PART.findall(text)
    return sum(int(number) * _UNIT_SECONDS[unit.lower()] for number, unit in parts)
