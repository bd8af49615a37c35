"""Chooses the entries of a topic's partitions that go into its next commit. Pure.

A commit takes entries from each partition up to roughly its budget, and includes a Spark batch
entirely or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparklog.storage.snapshot import BatchId, Located


def cut(entries: Sequence[Located], budget_bytes: int) -> int:
    """Returns how many of `entries` fit into the budget, at least one.

    Counts decoded rows, because they take memory while they are written.
    """
    size = 0
    for index, each in enumerate(entries):
        size += each.entry.memory_bytes
        if size > budget_bytes and index:
            return index
    return len(entries)


def keep_batches_whole(
    batches: Sequence[Mapping[BatchId, tuple[int, int]]], ends: list[int]
) -> None:
    """Raises `ends` until every Spark batch with an included part is included entirely.

    `batches`: (first offset, end) of the unpublished batches, per partition.
    """
    spans = _spans(batches)
    changed = bool(spans)
    while changed:
        changed = False
        for span in spans.values():
            if any(first < ends[index] for index, first, _ in span):
                for index, _, end in span:
                    if ends[index] < end:
                        ends[index] = end
                        changed = True


def leave_out_cut_batches(
    batches: Sequence[Mapping[BatchId, tuple[int, int]]], ends: list[int]
) -> None:
    """Lowers `ends` until no Spark batch is included only in part; see `keep_batches_whole`."""
    spans = _spans(batches)
    changed = bool(spans)
    while changed:
        changed = False
        for span in spans.values():
            if any(ends[index] < end for index, _, end in span):
                for index, first, _ in span:
                    if ends[index] > first:
                        ends[index] = first
                        changed = True


def _spans(
    batches: Sequence[Mapping[BatchId, tuple[int, int]]],
) -> dict[BatchId, list[tuple[int, int, int]]]:
    """Returns (index of the partition, first offset, end) of the parts of each batch."""
    spans: dict[BatchId, list[tuple[int, int, int]]] = {}
    for index, of_partition in enumerate(batches):
        for batch_id, (first, end) in of_partition.items():
            spans.setdefault(batch_id, []).append((index, first, end))
    return spans
