"""Slices to tasks: few, of like size, and small enough to be sent. Pure.

Every task costs Spark a tenth of a second of a core, so a micro-batch of many small entries is one
task; a large scan is cut so that every core has something to do until the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from sparklog import limits
from sparklog.storage.snapshot import Slice, Source

_ROW_BYTES = 64
"""What a row costs besides its bytes: seven columns on their way into Spark's rows."""


def pack(
    slices: Sequence[Slice],
    *,
    cores: int,
    least: int | None = None,
    most_records: int | None = None,
) -> list[list[Slice]]:
    """The slices in order, dealt out to tasks.

    Args:
        cores: how many run at the same time; a large read has at least `TASKS_PER_CORE` for each.
        least: as many tasks as the user asked for, where the slices can be cut that small.
        most_records: offsets of one task; slices are cut wherever that asks for it.
    """
    dealt = _deal(slices, cores, least)
    return dealt if most_records is None else _limit(dealt, most_records)


def _deal(slices: Sequence[Slice], cores: int, least: int | None) -> list[list[Slice]]:
    weights = [_weight(each) for each in slices]
    total = sum(weights)
    wanted = math.ceil(total / limits.TASK_MAX_BYTES)
    if wanted > cores:  # in full rounds: no core is idle in the last one
        wanted = math.ceil(wanted / cores) * cores
    wanted = max(wanted, min(limits.TASKS_PER_CORE * cores, total // limits.TASK_MIN_BYTES))
    wanted = max(wanted, least or 1)
    if wanted == 1:
        return [list(slices)] if slices else []
    share = total / wanted
    tasks: list[list[Slice]] = []
    room = 0.0
    for each, weight in zip(slices, weights, strict=True):
        pieces = [each] if weight < 2 * share else _cut(each, round(weight / share))
        for piece in pieces:
            size = weight * (piece.end - piece.first) / (each.end - each.first)
            if not tasks or room < size / 2:
                tasks.append([])
                room += share
            tasks[-1].append(piece)
            room -= size
    return tasks


def _limit(dealt: Sequence[Sequence[Slice]], most_records: int) -> list[list[Slice]]:
    tasks: list[list[Slice]] = []
    for task in dealt:
        room = 0
        for each in task:
            first = each.first
            while first < each.end:
                if not room:
                    tasks.append([])
                    room = most_records
                end = min(first + room, each.end)
                tasks[-1].append(msgspec.structs.replace(each, first=first, end=end))
                room -= end - first
                first = end
    return tasks


def _weight(each: Slice) -> int:
    """Estimated cost of reading the slice, in bytes."""
    rows = each.end - each.first
    if each.entry is not None:
        entry = each.entry.entry
        size = entry.staged.length if entry.staged is not None else entry.length
        whole = entry.count
    elif len(each.files) == 1:
        (file,) = each.files
        size, whole = file.size_bytes, _rows(file.rows, file.first, file.last, rows)
    else:
        size = sum(file.size_bytes for file in each.files)
        whole = sum(_rows(file.rows, file.first, file.last, rows) for file in each.files)
    return _ROW_BYTES * rows + size * min(rows, whole) // max(whole, 1)


def _rows(rows: int | None, first: int | None, last: int | None, otherwise: int) -> int:
    if first is not None and last is not None:
        return last - first + 1
    return otherwise if rows is None else rows


def _cut(each: Slice, parts: int) -> list[Slice]:
    """A part of a file in about so many, cut at its row groups as far as offsets tell.

    An entry of the log is read whole, and so are files whose offsets overlap.
    """
    if each.source is Source.WAL or len(each.files) > 1:
        return [each]
    found = []
    base, first = each.files[0].first or 0 if each.files else 0, each.first
    step = (each.end - each.first) / parts
    for number in range(1, parts):
        groups = round((each.first + number * step - base) / limits.ROW_GROUP_ROWS)
        at = base + groups * limits.ROW_GROUP_ROWS
        if first < at < each.end:
            found.append(msgspec.structs.replace(each, first=first, end=at))
            first = at
    return [*found, msgspec.structs.replace(each, first=first)]


# ------------------------------------------------------------------------------ bytes

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[Slice, ...])


def encode(slices: Sequence[Slice]) -> bytes:
    """The slices of one task, on their way from the planner to an executor of the same version."""
    return _encoder.encode(slices)


def decode(data: bytes) -> tuple[Slice, ...]:
    """What `encode` made the bytes of."""
    return _decoder.decode(data)
