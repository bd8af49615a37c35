"""Finds anomalies in a history. Pure; the cost is a few sorts of the operations.

The log is reconstructed from acks and reads: one value for each partition and offset. This reveals
lost, duplicate, moved and reordered records. The order of each consumer's reads reveals skipped and
repeated records; times reveal reads that came too early and offsets that moved backwards.

Most kinds come from Jepsen's `jepsen.tests.kafka`. A kind with the prefix `int-` occurs within one
poll, the kind without it between two polls of a consumer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from sparklog.check.history import (
    ACKED,
    FAILED,
    NO_GROUP,
    NO_OFFSET,
    NOT_SENT,
    SEQUENCE_BITS,
    UNKNOWN,
    Column,
    History,
)

Mask: TypeAlias = npt.NDArray[np.bool_]
Rows: TypeAlias = npt.NDArray[np.intp]

_EXAMPLES: Final = 5
_OFFSET_BITS: Final = 44
_PARTITIONS: Final = 1 << 12
"""Above the number of partitions of a check's topic."""

KINDS: Final[dict[str, str]] = {
    "lost-write": "acked but never read, although later records were",
    "unseen": "acked, but not read by the end",
    "vanished": "read, but missing for a consumer that read everything",
    "duplicate": "one value is in several places in the log",
    "inconsistent-offsets": "one offset has several values",
    "acked-elsewhere": "the record is not where its ack says",
    "wrong-partition": "the record is not in the partition that it was sent to",
    "failed-read": "definitively rejected, but read",
    "phantom": "read, but never sent",
    "changed-record": "key, value, header or time differ from those sent",
    "future-read": "read before it was sent",
    "nonmonotonic-send": "a producer's later record was acked at an earlier offset",
    "reordered": "a producer's records are not in the order in which they were sent",
    "gap": "offsets without a record, although nothing was deleted",
    "start-moved": "the log starts later, although nothing was deleted",
    "int-nonmonotonic-poll": "a poll returned an offset not above the one before it",
    "nonmonotonic-poll": "a poll began at an offset that the consumer had already received",
    "int-poll-skip": "a poll skipped records",
    "poll-skip": "records between two polls were skipped",
    "group-skip": "a group committed past records that none of its members received",
    "commit-went-back": "a committed offset is below one that was acked before",
    "phantom-commit": "a committed offset that no client has committed",
    "stale-end": "the reported log end is below a record that was acked before",
    "end-went-back": "the reported log end is below one reported before",
}
"""Kinds of anomalies, with their meanings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly:
    """One kind of anomaly, its number of occurrences, and the first few of them."""

    kind: str
    count: int
    examples: tuple[str, ...]

    @property
    def about(self) -> str:
        return KINDS[self.kind]


def analyse(history: History) -> list[Anomaly]:
    """All findings, in the order of `KINDS`."""
    log = _Log(history)
    found = {each.kind: each for check in _CHECKS for each in check(log)}
    return [found[kind] for kind in KINDS if kind in found]


def _finding(kind: str, wrong: Mask | Rows, describe: Callable[[int], str]) -> Iterator[Anomaly]:
    """A finding for the rows that are `wrong`, or none."""
    rows = np.flatnonzero(wrong) if wrong.dtype == np.bool_ else wrong
    if len(rows):
        examples = tuple(describe(int(row)) for row in rows[:_EXAMPLES])
        yield Anomaly(kind=kind, count=len(rows), examples=examples)


def place_of(partition: Column, offset: Column) -> Column:
    """One number for a partition and an offset, which sorts as they do."""
    return (partition << _OFFSET_BITS) + offset


def _partition(place: Column) -> Column:
    return place >> _OFFSET_BITS


def _shown_place(place: int) -> str:
    return f"{place >> _OFFSET_BITS}/{place & ((1 << _OFFSET_BITS) - 1)}"


def _shown(value: int) -> str:
    if value < 0:
        return "a foreign record"
    return f"record {value & ((1 << SEQUENCE_BITS) - 1)} of producer {value >> SEQUENCE_BITS}"


def _distinct(values: Column) -> Column:
    """Each value once, sorted; `np.unique`, which hashes, takes ten times as long."""
    ordered = np.sort(values)
    is_new = np.ones(len(ordered), np.bool_)
    is_new[1:] = ordered[1:] != ordered[:-1]
    found: Column = ordered[is_new]
    return found


def _is_in(values: Column, others: Column) -> Mask:
    """Returns, for each value, whether it is among the others."""
    if not len(others):
        return np.zeros(len(values), np.bool_)
    known = _distinct(others)
    at = np.minimum(np.searchsorted(known, values), len(known) - 1)
    found: Mask = known[at] == values
    return found


class _Log:
    """The log, as far as clients have observed it."""

    def __init__(self, history: History) -> None:
        self.history = history
        sends, reads = history.sends, history.reads
        is_placed = (sends.status == ACKED) & (sends.offset >= 0)
        self.ack_places = place_of(sends.acked_partition[is_placed], sends.offset[is_placed])
        self.ack_values = sends.value[is_placed]
        self.read_places = place_of(reads.partition, reads.offset)
        self.is_ours = _is_in(reads.value, sends.value) & (reads.value >= 0)
        final = history.consumers.consumer[history.consumers.is_final == 1]
        self.has_final = len(final) > 0
        everybody = np.ones(len(reads), np.bool_)
        self.final = _is_in(reads.consumer, final) if self.has_final else everybody
        """Reads by consumers that read everything, or by all consumers if none did."""
        self.places, self.values = _unique_pairs(
            np.concatenate([self.ack_places, self.read_places]),
            np.concatenate([self.ack_values, reads.value]),
        )
        """Every observed pair of offset and value, sorted by partition and offset."""
        self.known = _distinct(self.places)
        """All places that hold a record."""

    def known_between(self, after: Column, before: Column) -> Column:
        """Returns the number of known records between two offsets."""
        first = np.searchsorted(self.known, after, "right")
        return np.searchsorted(self.known, before, "left") - first


# ------------------------------------------------------------------------------ the log


def _lost(log: _Log) -> Iterator[Anomaly]:
    sends, reads = log.history.sends, log.history.reads
    missing = (sends.status == ACKED) & ~_is_in(sends.value, reads.value[log.final])
    last = _last_read(log)
    is_before = sends.offset < last[np.clip(sends.acked_partition, 0, len(last) - 1)]

    def describe(row: int) -> str:
        place = f"{sends.acked_partition[row]}/{sends.offset[row]}"
        return f"{_shown(int(sends.value[row]))}, acked at {place}"

    yield from _finding("lost-write", missing & is_before, describe)
    yield from _finding("unseen", missing & ~is_before, describe)
    is_first = np.zeros(len(reads), np.bool_)
    is_first[np.unique(reads.value, return_index=True)[1]] = True
    yield from _finding(
        "vanished",
        is_first & log.is_ours & ~_is_in(reads.value, reads.value[log.final]),
        lambda row: (
            f"{_shown(int(reads.value[row]))}, read at"
            f" {_shown_place(int(log.read_places[row]))} by consumer {reads.consumer[row]}"
        ),
    )


def _last_read(log: _Log) -> Column:
    """The last offset that was read, by partition; negative if none was."""
    partition = log.history.reads.partition[log.final]
    highest = np.concatenate([log.history.sends.acked_partition, partition]).max(initial=0)
    last = np.full(int(highest) + 1, NO_OFFSET, np.int64)
    np.maximum.at(last, partition, log.history.reads.offset[log.final])
    return last


def _places(log: _Log) -> Iterator[Anomaly]:
    same_place = log.places[1:] == log.places[:-1]
    places, values = log.places, log.values
    yield from _finding(
        "inconsistent-offsets",
        same_place,
        lambda row: (
            f"{_shown_place(int(places[row]))}: {_shown(int(values[row]))},"
            f" {_shown(int(values[row + 1]))}"
        ),
    )
    value, place = _unique_pairs(log.history.reads.value, log.read_places)
    value, place = value[value != NOT_SENT], place[value != NOT_SENT]
    yield from _finding(
        "duplicate",
        value[1:] == value[:-1],
        lambda row: (
            f"{_shown(int(value[row]))}, at {_shown_place(int(place[row]))} and"
            f" {_shown_place(int(place[row + 1]))}"
        ),
    )
    # A value read both where it was acked and elsewhere counts only as a duplicate.
    acked, at = log.ack_values, log.ack_places
    keys = _pair_keys(log, value, place)
    yield from _finding(
        "acked-elsewhere",
        _is_in(acked, value) & ~_is_in(_pair_keys(log, acked, at), keys),
        lambda row: (
            f"{_shown(int(acked[row]))}, acked at {_shown_place(int(at[row]))}, is not there"
        ),
    )


def _unique_pairs(first: Column, second: Column) -> tuple[Column, Column]:
    """Each pair once, in order."""
    order = np.lexsort((second, first))
    first, second = first[order], second[order]
    is_new = np.ones(len(first), np.bool_)
    is_new[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    return first[is_new], second[is_new]


def _pair_keys(log: _Log, values: Column, places: Column) -> Column:
    """One number for a value and a place, both of which occur in the log."""
    known: Column = _distinct(log.values)
    keys: Column = np.searchsorted(known, values) * len(log.known) + np.searchsorted(
        log.known, places
    )
    return keys


def _partitions(log: _Log) -> Iterator[Anomaly]:
    sends = log.history.sends
    order = np.argsort(sends.value, kind="stable")
    at = np.searchsorted(sends.value[order], log.values)
    is_ours = _is_in(log.values, sends.value)
    meant = np.full(len(log.values), NO_OFFSET, np.int64)
    meant[is_ours] = sends.partition[order][at[is_ours]]
    yield from _finding(
        "wrong-partition",
        is_ours & (meant != _partition(log.places)),
        lambda row: (
            f"{_shown(int(log.values[row]))}, sent to {meant[row]}, is at"
            f" {_shown_place(int(log.places[row]))}"
        ),
    )


def _records(log: _Log) -> Iterator[Anomaly]:
    sends, reads = log.history.sends, log.history.reads

    def describe(row: int) -> str:
        place = _shown_place(int(log.read_places[row]))
        return f"{_shown(int(reads.value[row]))} at {place}, by consumer {reads.consumer[row]}"

    failed = _is_in(reads.value, sends.value[sends.status == FAILED])
    yield from _finding("failed-read", failed, describe)
    yield from _finding("phantom", ~log.is_ours, describe)
    yield from _finding("changed-record", log.is_ours & (reads.intact == 0), describe)
    order = np.argsort(sends.value, kind="stable")
    started = np.full(len(reads), np.iinfo(np.int64).min)
    at = np.searchsorted(sends.value[order], reads.value[log.is_ours])
    started[log.is_ours] = sends.started_us[order][at]
    yield from _finding("future-read", log.is_ours & (reads.at_us < started), describe)


def _order(log: _Log) -> Iterator[Anomaly]:
    sends = log.history.sends
    is_placed = (sends.status == ACKED) & (sends.offset >= 0)
    value, partition, offset = (
        each[is_placed] for each in (sends.value, sends.acked_partition, sends.offset)
    )
    producer = value >> SEQUENCE_BITS
    order = np.lexsort((value, partition, producer))
    value, partition, offset, producer = (
        each[order] for each in (value, partition, offset, producer)
    )
    same = (producer[1:] == producer[:-1]) & (partition[1:] == partition[:-1])
    yield from _finding(
        "nonmonotonic-send",
        same & (offset[1:] <= offset[:-1]),
        lambda row: (
            f"{_shown(int(value[row + 1]))} at {partition[row]}/{offset[row + 1]}, after"
            f" {_shown(int(value[row]))} at {offset[row]}"
        ),
    )
    # By reads: records that were never acked are in order, too. Of duplicates, the first counts.
    reads = log.history.reads
    values, places = _unique_pairs(reads.value[log.is_ours], log.read_places[log.is_ours])
    is_first = np.ones(len(values), np.bool_)
    is_first[1:] = values[1:] != values[:-1]
    values, lowest = values[is_first], places[is_first]
    order = np.lexsort((lowest, values >> SEQUENCE_BITS))
    values, lowest = values[order], lowest[order]
    same = (values[1:] >> SEQUENCE_BITS == values[:-1] >> SEQUENCE_BITS) & (
        _partition(lowest[1:]) == _partition(lowest[:-1])
    )
    yield from _finding(
        "reordered",
        same & (values[1:] < values[:-1]),
        lambda row: (
            f"{_shown(int(values[row + 1]))} at {_shown_place(int(lowest[row + 1]))}, after"
            f" {_shown(int(values[row]))} at {_shown_place(int(lowest[row]))}"
        ),
    )


# ------------------------------------------------------------------------------ polls


def _polls(log: _Log) -> Iterator[Anomaly]:
    reads = log.history.reads
    order = np.argsort(reads.session, kind="stable")
    session, poll, place = reads.session[order], reads.poll[order], log.read_places[order]
    same = session[1:] == session[:-1]
    one_poll = poll[1:] == poll[:-1]
    back = same & (place[1:] <= place[:-1])
    skipped = same & (place[1:] > place[:-1] + 1)
    skipped[skipped] = log.known_between(place[:-1][skipped], place[1:][skipped]) > 0

    def describe(row: int) -> str:
        before, after = _shown_place(int(place[row])), _shown_place(int(place[row + 1]))
        return (
            f"consumer {reads.consumer[order[row]]}, poll {poll[row + 1]}: {after} after {before}"
        )

    yield from _finding("int-nonmonotonic-poll", back & one_poll, describe)
    yield from _finding("nonmonotonic-poll", back & ~one_poll, describe)
    yield from _finding("int-poll-skip", skipped & one_poll, describe)
    yield from _finding("poll-skip", skipped & ~one_poll, describe)


def _gaps(log: _Log) -> Iterator[Anomaly]:
    known = _distinct(log.read_places[log.final]) if log.has_final else log.known[:0]
    same = _partition(known[1:]) == _partition(known[:-1])
    yield from _finding(
        "gap",
        same & (known[1:] != known[:-1] + 1),
        lambda row: (
            f"between {_shown_place(int(known[row]))} and {_shown_place(int(known[row + 1]))}"
        ),
    )
    ends = log.history.ends
    yield from _finding(
        "start-moved", ends.start > 0, lambda row: f"{ends.partition[row]}/{ends.start[row]}"
    )


# ------------------------------------------------------------------------------ groups


def _groups(log: _Log) -> Iterator[Anomaly]:
    history = log.history
    commits, fetches, reads = history.commits, history.fetches, history.reads
    group_of = np.full(int(history.consumers.consumer.max(initial=0)) + 1, NO_GROUP, np.int64)
    group_of[history.consumers.consumer] = history.consumers.group
    group_of_reads = group_of[reads.consumer] if len(reads) else reads.consumer
    skipped: list[tuple[int, int]] = []
    count = 0
    for group in _distinct(commits.group):
        acked = (commits.group == group) & (commits.status == ACKED)
        given = _distinct(log.read_places[group_of_reads == group])
        for partition in _distinct(commits.partition[acked]):
            end = int(commits.offset[acked & (commits.partition == partition)].max())
            first, last = (int(partition) << _OFFSET_BITS), (int(partition) << _OFFSET_BITS) + end
            below = log.known[np.searchsorted(log.known, first) : np.searchsorted(log.known, last)]
            missing = below[~_is_in(below, given)]
            count += len(missing)
            skipped += [(int(group), int(place)) for place in missing[:_EXAMPLES]]
    if skipped:
        examples = tuple(f"group {group}: {_shown_place(place)}" for group, place in skipped)
        yield Anomaly(kind="group-skip", count=count, examples=examples[:_EXAMPLES])

    key = place_of(commits.group * _PARTITIONS + commits.partition, np.zeros(1, np.int64))
    wanted = place_of(fetches.group * _PARTITIONS + fetches.partition, np.zeros(1, np.int64))
    is_acked = commits.status == ACKED
    least = _highest_before(
        key[is_acked],
        commits.offset[is_acked],
        commits.ended_us[is_acked],
        wanted,
        fetches.started_us,
    )
    # A commit that got no response may have arrived late, after a later commit was acked.
    in_doubt = commits.status == UNKNOWN
    doubtful = _is_in(wanted + fetches.offset, (key + commits.offset)[in_doubt])

    def describe(row: int) -> str:
        place = f"partition {fetches.partition[row]}: {fetches.offset[row]}"
        return f"group {fetches.group[row]}, {place}, although {least[row]} was acked"

    yield from _finding("commit-went-back", (fetches.offset < least) & ~doubtful, describe)
    tried = _is_in(wanted + fetches.offset, key + commits.offset)
    yield from _finding(
        "phantom-commit",
        (fetches.offset >= 0) & ~tried,
        lambda row: (
            f"group {fetches.group[row]}, partition {fetches.partition[row]}: {fetches.offset[row]}"
        ),
    )


def _highest_before(
    keys: Column, values: Column, ended: Column, wanted: Column, started: Column
) -> Column:
    """The highest value of the same key that had ended before each time; `NO_OFFSET` if none."""
    found = np.full(len(wanted), NO_OFFSET, np.int64)
    for key in _distinct(wanted):
        mine = keys == key
        if not mine.any():
            continue
        order = np.argsort(ended[mine], kind="stable")
        highest = np.maximum.accumulate(values[mine][order])
        asked = wanted == key
        at = np.searchsorted(ended[mine][order], started[asked], "left") - 1
        found[asked] = np.where(at >= 0, highest[np.maximum(at, 0)], NO_OFFSET)
    return found


def _ends(log: _Log) -> Iterator[Anomaly]:
    sends, ends = log.history.sends, log.history.ends
    acked = (sends.status == ACKED) & (sends.offset >= 0)
    least = _highest_before(
        sends.acked_partition[acked],
        sends.offset[acked] + 1,
        sends.ended_us[acked],
        ends.partition,
        ends.started_us,
    )
    yield from _finding(
        "stale-end",
        ends.end < least,
        lambda row: f"{ends.partition[row]}/{ends.end[row]}, although {least[row] - 1} was acked",
    )
    before = _highest_before(
        ends.partition, ends.end, ends.ended_us, ends.partition, ends.started_us
    )
    yield from _finding(
        "end-went-back",
        ends.end < before,
        lambda row: f"{ends.partition[row]}/{ends.end[row]}, after {before[row]}",
    )


_CHECKS: Final = (_lost, _places, _partitions, _records, _order, _polls, _gaps, _groups, _ends)
