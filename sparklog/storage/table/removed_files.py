"""Retention of files removed from a table, for readers of its older versions.

Two kinds of readers need such files: a query that has opened or requests an older version (time
travel), and another engine's stream that was paused and resumes with the commits that it has not
seen.

- Each file is retained for a grace period, within which a merge can be undone.
- After that, files are retained while they are young, few and small (`RemovedFileRetention`). The
  oldest are removed first.
- The table property `delta.deletedFileRetentionDuration` replaces the maximum age, and lifts the
  bounds on the bytes and number of the table's removed files; the bound on the number in all tables
  still applies.

The number is bounded because a broker keeps the remove actions of its tables in memory, about 600
bytes each, and writes them to every checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sparklog import limits
from sparklog.storage.table.delta_log import Remove

REMOVED_FILES = 100_000  # in all tables of a broker, beyond their grace period
REMOVED_FILES_OF_TABLE = 10_000
REMOVED_FILE_BYTES = 64 * limits.MIB  # of a table's removed files,
_REMOVED_FILE_SHARE = 0.25  # or this share of the table's bytes, if that is more

REMOVED_AT: Final = "sparklog.removedAt"
"""The tag with the removal time in ms of a file whose `deletionTimestamp` is later than that."""
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
    """The age and number up to which removed files are retained beyond their grace period.

    The tables of a broker share one instance; the janitor adapts `files` to how many there are.
    """

    kept_seconds: float
    files: int = REMOVED_FILES

    def seconds_of(self, property_seconds: float | None) -> float:
        """Returns how long removed files are retained, given the table's own retention, if any."""
        return self.kept_seconds if property_seconds is None else property_seconds

    def files_of(self, property_seconds: float | None) -> int:
        """Returns how many removed files are retained, given the table's own retention, if any."""
        if property_seconds is not None:
            return self.files
        return min(self.files, REMOVED_FILES_OF_TABLE)


NO_RETENTION: Final = RemovedFileRetention(kept_seconds=0.0)
"""Files are removed once their grace period is over."""


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

    Files without a removal time, which an engine may omit, are retained. `property_seconds` is the
    table's own retention, None if not set; `table_bytes` is the size of its newest version.
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
    """Returns how many removed files each table may retain, for `REMOVED_FILES` in total.

    `counts` are the tables' current numbers: tables with few leave room for the others.
    """
    left, waiting = REMOVED_FILES, sorted(counts)
    for done, count in enumerate(waiting):
        share = left // (len(waiting) - done)
        if count > share:
            return share
        left -= count
    return REMOVED_FILES


def interval_seconds(text: str | None) -> float | None:
    """Returns the duration in a table property such as `interval 7 days`; None if it is not one.

    The syntax is Spark's, with the units that Delta allows in durations.
    """
    text = (text or "").strip()
    if _INTERVAL.fullmatch(text) is None:
        return None
    parts: Sequence[tuple[str, str]] = _PART.findall(text)
    return sum(int(number) * _UNIT_SECONDS[unit.lower()] for number, unit in parts)
