"""Packs slices into tasks: few, similar in size, and not too large.

Each task costs Spark a tenth of a core-second, so the many small entries of a micro-batch share one
task; a large scan is split so that every core stays busy until the end.

Sizes are in rows and bytes, taken from file statistics and the log's index: after compaction or
deletion, a range of offsets says nothing about either.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import msgspec

from sparklog import limits
from sparklog.sources.task_credentials import TaskCredentials
from sparklog.storage.snapshot import ReadSource, RowGroup, Slice, TableFile

TASK_MIN_BYTES = 4 * limits.MIB
_TASK_MAX_BYTES = 512 * limits.MIB
_TASKS_PER_CORE = 2
TASKS_MOST = 100_000  # bounds the tasks for offsets without rows: a gap can be of any length

_ROW_BYTES = 64
"""Cost of a row in addition to its bytes: converting seven columns to Spark's rows."""
_SPARSE = 16
"""Slices are split into at most this many times the number of tasks that their rows need."""

RowGroups: TypeAlias = Callable[[Sequence[Slice]], Sequence[Sequence[RowGroup]]]
"""Returns the row groups of each slice's file; empty if unknown."""


def pack(
    slices: Sequence[Slice],
    *,
    parallelism: int,
    row_groups: RowGroups,
    least: int | None = None,
    most_records: int | None = None,
) -> list[list[Slice]]:
    """Returns each task's slices, in order; a large file may be split across tasks.

    Args:
        parallelism: number of tasks that run concurrently; a large read is split into at least
            `_TASKS_PER_CORE` times as many.
        row_groups: called only for files that will be split.
        least: minimum number of tasks set by the user, as far as slices can be split that finely.
        most_records: maximum number of records per task; slices are split to enforce it.
    """
    dealt = _deal(slices, parallelism, least, row_groups)
    return dealt if most_records is None else _limit(dealt, most_records)


def pack_in_order(
    slices: Sequence[Slice],
    *,
    parallelism: int,
    row_groups: RowGroups,
    least: int | None = None,
    most_records: int | None = None,
) -> list[list[Slice]]:
    """Returns each task's slices as `pack` does, but each partition in one task, in order.

    Several partitions may share a task. A partition is split only if the user asked for more tasks
    than there are partitions, or limited the records per task.
    """
    partitions = [list(found) for found in _by_partition(slices)]
    if least is not None and least > len(partitions):
        dealt = _deal(slices, parallelism, least, row_groups)
    else:
        dealt = _deal_whole(partitions, parallelism, least)
    return dealt if most_records is None else _limit(dealt, most_records)


def _wanted(total: int, parallelism: int, least: int | None) -> int:
    """Returns the number of tasks for this many bytes."""
    wanted = math.ceil(total / _TASK_MAX_BYTES)
    if wanted > parallelism:  # full rounds, so that no core idles in the last one
        wanted = math.ceil(wanted / parallelism) * parallelism
    wanted = min(wanted, TASKS_MOST)  # a broker's slice can be a gap of any length
    at_once = _TASKS_PER_CORE * parallelism
    return max(wanted, min(at_once, total // TASK_MIN_BYTES), least or 1)


def _deal_whole(
    partitions: Sequence[list[Slice]], parallelism: int, least: int | None
) -> list[list[Slice]]:
    """Assigns whole partitions to tasks: largest first, each to the smallest task so far."""
    weights = [sum(map(_weight, each)) for each in partitions]
    wanted = min(_wanted(sum(weights), parallelism, least), len(partitions))
    tasks: list[list[Slice]] = [[] for _ in range(wanted)]
    loads = [(0, number) for number in range(wanted)]
    for index in sorted(range(len(partitions)), key=lambda each: (-weights[each], each)):
        load, number = loads[0]
        tasks[number] += partitions[index]
        heapq.heapreplace(loads, (load + weights[index], number))
    return tasks


def _deal(
    slices: Sequence[Slice], parallelism: int, least: int | None, row_groups: RowGroups
) -> list[list[Slice]]:
    weights = [_weight(each) for each in slices]
    total = sum(weights)
    wanted = _wanted(total, parallelism, least)
    if wanted == 1:
        return [list(slices)] if slices else []
    share = total / wanted
    tasks: list[list[Slice]] = []
    room = 0.0
    parts = [round(weight / share) if weight >= 2 * share else 1 for weight in weights]
    for each, weight, pieces in zip(slices, weights, _cut(slices, parts, row_groups), strict=True):
        for piece in pieces:
            size = weight * (piece.end - piece.first) / (each.end - each.first)
            if not tasks or room < size / 2:
                tasks.append([])
                room += share
            tasks[-1].append(piece)
            room -= size
    return tasks


def _limit(dealt: Sequence[Sequence[Slice]], most_records: int) -> list[list[Slice]]:
    usual = TASKS_MOST // max(sum(map(len, dealt)), 1)
    tasks: list[list[Slice]] = []
    for task in dealt:
        room = 0
        for each in task:
            first = each.first
            known = sum(file.rows or 0 for file in each.files)
            is_known = bool(each.files) and all(file.rows is not None for file in each.files)
            if each.entry is not None:
                known, is_known = each.entry.entry.rows, True
            # Caps the tasks that a long gap produces; below the cap, the limit is exact.
            parts = max(usual, _SPARSE * known // most_records, 1)
            least = (each.end - first) // parts
            while first < each.end:
                if not room:
                    tasks.append([])
                    room = most_records
                if is_known and known <= room:
                    # No part has more rows than the files or the entry, however wide its range.
                    end, count = each.end, min(known, each.end - first)
                else:
                    end = min(first + max(room, least), each.end)
                    count = min(end - first, room)
                tasks[-1].append(msgspec.structs.replace(each, first=first, end=end))
                room -= count
                first = end
    return tasks


def _weight(each: Slice) -> int:
    """Estimated cost of reading the slice, in bytes."""
    if each.entry is not None:
        entry = each.entry.entry
        rows = each.end - each.first
        return entry.memory_bytes * min(rows, entry.count) // max(entry.count, 1)
    if not each.files:  # a slice that a broker serves, about which nothing else is known
        return _ROW_BYTES * (each.end - each.first)
    return round(sum(_weight_within(file, each, _ROW_BYTES) for file in each.files))


def stored_bytes(each: Slice) -> float:
    """Returns the slice's stored size in bytes; 0 for a broker's slice, whose size is unknown."""
    if each.entry is None:
        return sum(_weight_within(file, each, 0) for file in each.files)
    entry = each.entry.entry
    size_bytes = entry.length if entry.staged is None else entry.staged.length
    return size_bytes * (each.end - each.first) / max(entry.count, 1)


def _weight_within(file: TableFile, each: Slice, row_bytes: int) -> float:
    """Returns the weight of the part of a file that the slice covers."""
    if file.first is None or file.last is None:
        part, span = 1.0, each.end - each.first
    else:
        span = file.last - file.first + 1
        covered = min(each.end, file.last + 1) - max(each.first, file.first)
        part = min(max(covered, 0) / max(span, 1), 1.0)
    rows = span if file.rows is None else file.rows
    return part * (row_bytes * rows + file.size_bytes)


def ranges(slices: Iterable[Slice]) -> list[Slice]:
    """Returns one slice per partition, from its first offset to its end, without a location.

    Args:
        slices: grouped by partition, each in the order of offsets.
    """
    return [
        msgspec.structs.replace(found[0], end=found[-1].end, files=(), entry=None)
        for found in map(list, _by_partition(slices))
    ]


def _by_partition(slices: Iterable[Slice]) -> Iterator[Iterator[Slice]]:
    groups = itertools.groupby(slices, lambda each: (each.topic_id, each.partition))
    return (found for _, found in groups)


# ------------------------------------------------------------------------------ cutting


def _cut(
    slices: Sequence[Slice], parts: Sequence[int], row_groups: RowGroups
) -> Iterable[list[Slice]]:
    """Yields each slice in roughly the requested number of parts.

    A log entry is never split, nor are files whose offsets overlap.
    """
    in_files = [
        each
        for each, wanted in zip(slices, parts, strict=True)
        if wanted > 1 and len(each.files) == 1
    ]
    groups = iter(row_groups(in_files) if in_files else ())
    for each, wanted in zip(slices, parts, strict=True):
        if wanted > 1 and len(each.files) == 1:
            yield _cut_file(each, wanted, next(groups))
        elif wanted > 1 and each.source is ReadSource.BROKER:
            yield _cut_range(each, wanted)
        else:
            yield [each]


def _cut_file(each: Slice, parts: int, groups: Sequence[RowGroup]) -> list[Slice]:
    """Cuts between row groups, and only where none has offsets on both sides.

    So no row is decoded twice. A file that another engine wrote out of order stays whole.
    """
    borders: list[tuple[int, int]] = []  # an offset, and the number of rows below it
    rows, reach = 0, each.first
    for group in sorted(groups, key=lambda group: group.first):
        if reach < group.first < each.end:
            borders.append((group.first, rows))
        reach = max(reach, group.last)
        if each.first <= group.last and group.first < each.end:
            rows += group.rows
    cuts = set()
    for number in range(1, parts):
        if borders:
            wanted = number * rows / parts
            cuts.add(min(borders, key=lambda border: abs(border[1] - wanted))[0])
    return _pieces(each, sorted(cuts))


def _cut_range(each: Slice, parts: int) -> list[Slice]:
    """Cuts at offsets where our own files begin a row group, if no offset is missing."""
    step = (each.end - each.first) / parts
    unit = limits.ROW_GROUP_ROWS
    cuts = {round((each.first + number * step) / unit) * unit for number in range(1, parts)}
    return _pieces(each, sorted(at for at in cuts if each.first < at < each.end))


def _pieces(each: Slice, cuts: Sequence[int]) -> list[Slice]:
    bounds = [each.first, *cuts, each.end]
    return [
        msgspec.structs.replace(each, first=first, end=end)
        for first, end in itertools.pairwise(bounds)
    ]


# ------------------------------------------------------------------------------ bytes


class Task(msgspec.Struct, frozen=True, array_like=True):
    """The content of an input partition."""

    slices: tuple[Slice, ...] = ()
    credentials: TaskCredentials | None = None
    """None if the task reads the root, or its own environment suffices."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Task)


def encode(slices: Sequence[Slice], credentials: TaskCredentials | None = None) -> bytes:
    """Encodes one task, which the planner sends to an executor of the same version."""
    return _encoder.encode(Task((*slices,), credentials))


def decode(data: bytes | None) -> Task:
    """Decodes the bytes of `encode`; without any, returns a task that has nothing to read."""
    return _decoder.decode(data) if data else Task()
