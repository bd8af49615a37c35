"""Where a range of offsets lies: pure, from what is known of table and WAL to slices in order.

Below the table's end (its `txn`) the table answers, and an offset that it lacks is a gap. From
there on the WAL continues exactly: its entries follow one another without a hole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sparklog import errors, limits
from sparklog.storage.snapshot import Located, Slice, Source, TableFile, TableSnapshot


def join_tail(published: int, entries: Iterable[Located]) -> tuple[Located, ...]:
    """The entries of one partition that continue its table from `published`, without a hole.

    Entries may come in any order and from several epochs; the same offsets may be there twice (an
    entry and its carried copy, which outlives it and so counts). What does not connect yet is left
    out: its predecessor is not read yet.
    """
    latest: dict[int, Located] = {}
    for each in entries:
        known = latest.get(each.entry.base_offset)
        if known is None or (known.entry.carried, known.at) < (each.entry.carried, each.at):
            latest[each.entry.base_offset] = each
    tail = []
    end = published
    for base in sorted(latest):
        entry = latest[base].entry
        if entry.end <= end:
            continue
        if base > end:
            break
        tail.append(latest[base])
        end = entry.end
    return tuple(tail)


def high_watermark(snapshot: TableSnapshot, partition: int, tail: Sequence[Located]) -> int:
    """The next offset to be written, as far as `snapshot` and `tail` know."""
    return max(snapshot.ends[partition], tail[-1].entry.end if tail else 0)


def plan(
    *,
    topic: str,
    snapshot: TableSnapshot,
    tail: Sequence[Located],
    partition: int,
    start: int,
    end: int,
) -> list[Slice]:
    """Slices that together hold every record with `start` <= offset < `end`, in order.

    `tail` is `join_tail`'s. Raises `OffsetOutOfRange` where a part of the range is below the log
    start or beyond the high watermark, `UnknownPartition` and `UnknownTopic`.
    """
    if snapshot.topic_id is None:
        raise errors.UnknownTopic(topic=topic)
    if not 0 <= partition < snapshot.partitions:
        raise errors.UnknownPartition(
            topic=topic, partition=partition, last=snapshot.partitions - 1
        )
    log_start = snapshot.starts[partition]
    watermark = high_watermark(snapshot, partition, tail)
    for offset in (start, end):
        if not log_start <= offset <= watermark:
            raise errors.OffsetOutOfRange(
                topic=topic, partition=partition, offset=offset, start=log_start, end=watermark
            )

    def piece(first: int, last: int, source: Source, **where: object) -> Slice:
        return Slice(
            topic=topic,
            topic_id=snapshot.topic_id or "",
            partition=partition,
            first=first,
            end=last,
            source=source,
            **where,  # type: ignore[arg-type]
        )

    published = snapshot.ends[partition]
    slices = [
        piece(max(start, low), min(end, high), Source.FILES, files=files)
        for files, low, high in _clusters(
            snapshot.files[partition], start, min(end, published), published
        )
    ]
    for located in tail:
        entry = located.entry
        first, last = max(start, entry.base_offset, published), min(end, entry.end)
        if first < last:
            slices.append(piece(first, last, Source.WAL, entry=located))
    return slices


def latest_timestamp_us(piece: Slice) -> int:
    """No record of the slice is later; the far future where nothing is known."""
    if piece.entry is not None:
        return piece.entry.entry.max_timestamp_us
    bounds = [file.max_timestamp_us for file in piece.files]
    known = [bound for bound in bounds if bound is not None]
    return max(known) if len(known) == len(bounds) else limits.TIMESTAMP_MAX_US


def _clusters(
    files: Sequence[TableFile], start: int, end: int, published: int
) -> list[tuple[tuple[TableFile, ...], int, int]]:
    """Files that may hold an offset of `start` … `end`, grouped where their offsets overlap.

    Each group comes with the range that it covers. A file without statistics may hold anything,
    so it joins all others to one group.
    """
    if start >= end:
        return []
    spans = []
    for file in files:
        low = 0 if file.first is None else file.first
        high = published if file.last is None else file.last + 1
        if low < end and high > start:
            spans.append((low, high, file))
    spans.sort(key=lambda span: (span[0], span[1]))
    groups: list[tuple[list[TableFile], int, int]] = []
    for low, high, file in spans:
        if groups and low < groups[-1][2]:
            members, group_low, group_high = groups[-1]
            members.append(file)
            groups[-1] = (members, group_low, max(group_high, high))
        else:
            groups.append(([file], low, high))
    return [(tuple(members), low, high) for members, low, high in groups]
