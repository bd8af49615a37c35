"""Plans how to read a range of offsets: a table snapshot and WAL entries in, slices out. Pure.

Below the table's end (its `txn`), records are read from the table, and an offset that it lacks is a
gap. From there on, the WAL continues: its entries are contiguous.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from sparklog import errors, limits
from sparklog.storage.snapshot import Located, ReadSource, Slice, TableFile, TableSnapshot


def join_tail(published: int, entries: Iterable[Located]) -> tuple[Located, ...]:
    """Returns the entries of a partition that continue its table from `published` without a hole.

    Entries may come in any order and from several epochs, and offsets may occur twice: in an entry
    and in its carried copy, which outlives it and is preferred. Entries after a hole are omitted,
    since their predecessor has not been read yet.
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


def join_head(begin: int, end: int, entries: Sequence[Located]) -> tuple[Located, ...]:
    """Returns the entries of a partition between `begin` and `end` that reach `end` without a hole.

    All their offsets are below `end`. Entries may come in any order, as for `join_tail`.
    """
    while begin < end:
        joined = join_tail(begin, entries)
        reached = joined[-1].entry.end if joined else begin
        if reached >= end:
            return tuple(each for each in joined if each.entry.end <= end)
        later = (each.entry.base_offset for each in entries if each.entry.base_offset > reached)
        begin = min(later, default=end)
    return ()


def high_watermark(snapshot: TableSnapshot, partition: int, tail: Sequence[Located]) -> int:
    """Returns the next offset to be written, according to `snapshot` and `tail`."""
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
    """Returns the result of `slices` as a list."""
    return list(
        slices(topic=topic, snapshot=snapshot, tail=tail, partition=partition, start=start, end=end)
    )


def slices(
    *,
    topic: str,
    snapshot: TableSnapshot,
    tail: Sequence[Located],
    partition: int,
    start: int,
    end: int,
) -> Iterator[Slice]:
    """Yields slices that cover every record with `start` <= offset < `end`, in order.

    Slices are computed lazily, so that the first ones are cheap. `tail` is the result of
    `join_tail`, or the part of it with offsets in the range. Raises, before the first slice,
    `OffsetOutOfRange` if part of the range is below the log start or beyond the high watermark,
    `UnknownPartition` and `UnknownTopic`.
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
    piece = partial(Slice, topic=topic, topic_id=snapshot.topic_id, partition=partition)
    in_table, in_log = (
        partial(piece, source=ReadSource.FILES),
        partial(piece, source=ReadSource.WAL),
    )
    published = snapshot.ends[partition]
    clusters = _clusters(snapshot.files[partition], start, min(end, published), published)
    entries = _entries(tail, max(start, published), end)
    return itertools.chain(
        (in_table(first=first, end=last, files=files) for files, first, last in clusters),
        (in_log(first=first, end=last, entry=located) for located, first, last in entries),
    )


def latest_timestamp_us(piece: Slice) -> int:
    """Returns an upper bound on the slice's timestamps; the far future if unknown."""
    if piece.entry is not None:
        return piece.entry.entry.max_timestamp_us
    bounds = [file.max_timestamp_us for file in piece.files]
    known = [bound for bound in bounds if bound is not None]
    return max(known) if known and len(known) == len(bounds) else limits.TIMESTAMP_MAX_US


def _clusters(
    files: Sequence[TableFile], start: int, end: int, published: int
) -> Iterator[tuple[tuple[TableFile, ...], int, int]]:
    """Yields files that may contain an offset in `start` … `end`, grouped if their offsets overlap.

    Each group comes with the part of the range that it covers. A file without statistics may
    contain any offset, so it joins all others into one group.
    """
    if start >= end:
        return
    later = bisect.bisect_right(files, start, key=_low)
    # Of the files that begin at or before `start`, usually only the last reaches it. Another
    # engine's may have any length, so each is checked. All that reach it overlap there.
    members = [
        file for file in itertools.islice(files, later) if file.last is None or file.last >= start
    ]
    ends = (published if file.last is None else file.last + 1 for file in members)
    first, last = start, max(ends, default=start)
    for index in range(later, len(files)):
        file = files[index]
        low, high = file.first, file.last
        assert low is not None, "files without statistics come first"
        assert high is not None
        if low >= end:
            break
        if low < last:
            members.append(file)
            last = max(last, high + 1)
        else:
            if members:
                yield tuple(members), first, last
            members, first, last = [file], low, high + 1
    if members:
        yield tuple(members), first, min(last, end)


def _low(file: TableFile) -> int:
    """The sort key of files: 0 without statistics, since such a file may contain any offset."""
    return 0 if file.first is None else file.first


def _entries(tail: Sequence[Located], start: int, end: int) -> Iterator[tuple[Located, int, int]]:
    """Yields entries with offsets in `start` … `end`, each with the part of the range it covers."""
    if start >= end:
        return
    for index in range(bisect.bisect_right(tail, start, key=_end), len(tail)):
        located = tail[index]
        first, last = located.entry.base_offset, located.entry.end
        if first >= end:
            break
        yield located, max(start, first), min(end, last)


def _end(located: Located) -> int:
    return located.entry.end
