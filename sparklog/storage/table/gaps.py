"""Offsets of a topic that have no record, and the reasons.

Each offset that a broker assigns has a record, and `verify` reports a missing one as lost. Three
causes explain gaps. For each partition and cause, the table records the offset below which the
cause explains them, as the version of a `txn`, which only increases. So it outlasts the
configuration: a mirror that was cut over, or a topic that is no longer compacted, keeps its gaps.
It also outlasts merges, retention, and RESTORE, which resets a table's properties but no `txn`.

A commit of ours that makes a gap names its cause. If another engine removes rows without adding as
many, the gap is found when its commit is replayed, and a broker records it soon after.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from sparklog.storage.snapshot import GapCause, Gaps, TableFile
from sparklog.storage.table.delta_log import Txn

_APP_ID: Final = re.compile(r"(\d{1,9})/(?:gaps/([a-z]+)|compacted)")


def app_id(topic_id: str, partition: int, cause: GapCause) -> str:
    """The `txn` whose version is the offset below which the cause explains gaps."""
    return f"sparklog/{topic_id}/{partition}/gaps/{cause}"


def of_app_id(topic_id: str, name: str) -> tuple[int, GapCause] | None:
    """Returns the partition and cause of a `txn` about gaps; None for any other `txn`.

    The end of the last key compaction is such a `txn` too: older releases wrote no other.
    """
    if not name.endswith("/compacted") and "/gaps/" not in name:
        return None
    named = _APP_ID.fullmatch(name.removeprefix(f"sparklog/{topic_id}/"))
    if named is None or named[2] not in (None, *GapCause):
        return None
    return int(named[1]), GapCause(named[2] or GapCause.COMPACTION)


def of_txns(topic_id: str, txns: Iterable[Txn]) -> Gaps:
    """Returns the causes of gaps named by the `txn` of a topic."""
    found: dict[tuple[int, GapCause], int] = {}
    for txn in txns:
        if (cause := of_app_id(topic_id, txn.app_id)) is not None:
            found[cause] = max(txn.version, found.get(cause, 0))
    return found


def removed_below(gone: Iterable[TableFile], come: Iterable[TableFile], end: int) -> int:
    """Returns the offset below which rows are missing after files were replaced; 0 if none are.

    `end`: the partition's end, for files whose offsets are unknown.
    """
    gone = list(gone)
    before, after = _rows(gone), _rows(come)
    if before is not None and after is not None and before <= after:
        return 0
    return max((end if each.last is None else each.last + 1 for each in gone), default=0)


def _rows(files: Iterable[TableFile]) -> int | None:
    """Returns the number of rows; None if a file lacks statistics."""
    count = 0
    for each in files:
        if each.rows is None:
            return None
        count += each.rows
    return count
