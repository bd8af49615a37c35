"""Deliberate mistakes in the log's segments. Each takes one rule of `wal.segments` away.

Mistakes that need a rarer moment are noticed by the tests of the segments alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

from sparklog.storage.objects.memory_files import MemoryFile
from sparklog.storage.wal import frames
from sparklog.storage.wal.base import Checkpoint
from sparklog.storage.wal.segment_appender import SegmentAppender
from sparklog.storage.wal.segment_files import EpochFiles, Segment
from sparklog.storage.wal.segment_follower import SegmentFollower
from tests.simulation.faults import Rates
from tests.simulation.mutation import Mutation


class _Anything(int):
    """Equals every number."""

    def __eq__(self, _other: object) -> bool:
        return True

    __hash__ = int.__hash__


def _write_anywhere(
    appender: SegmentAppender, segment: Segment, views: list[memoryview], total: int
) -> bool:
    """Appends without a look at the position."""
    segment.file.append(views)
    return True


def _header_after_any(window: Any, place: int, salt: bytes) -> frames.Header | None:
    """Takes a frame after any other."""
    found = _header(window, place, salt)
    return found and dataclasses.replace(found, previous=_Anything())


def _append_unsynced(file: MemoryFile, pieces: Sequence[memoryview]) -> Any:
    return file._append(pieces, durable=False)


def _look_for_no_fence(appender: SegmentAppender, segment: Segment) -> None:
    """Continues behind whatever is there."""
    appender._end = segment.file.size_bytes()


def _create_unflushed(
    epoch: EpochFiles, ordinal: int, content: Callable[[bytes], bytes], **_: Any
) -> bool:
    """Shows a segment before it is durable."""
    store: Any = epoch.store
    put_new = store.put_new
    store.put_new = store.put_unflushed
    try:
        return _create(epoch, ordinal, content, stopping=lambda: True)
    finally:
        store.put_new = put_new


def _trim_all(appender: SegmentAppender, _checkpoint: Checkpoint) -> None:
    """Trims the current segment too."""
    epoch = appender._epoch
    epoch.store.delete([epoch.path(each) for each in list(appender._first_sequences)])


def _from_cache(follower: SegmentFollower, segment: Segment, window: frames.Window) -> frames.Event:
    """Takes the newest frame as it is."""
    return segment.event(window, follower._place, follower.next_sequence)


def _synced_in_cache(
    follower: SegmentFollower, segment: Segment, window: frames.Window
) -> frames.Event:
    """Trusts a sync although another one may have failed before."""
    segment.file.sync()
    return segment.event(window, follower._place, follower.next_sequence)


_header: Final = frames.Window.header
_create: Final = EpochFiles.create
_LOCAL: Final = (("is_local", True), ("segment_blocks", 8), ("has_vacuum", False))
_RIVALS: Final = Rates(stall=0.02, freeze=0.02)
_POWER: Final = Rates(power_cut=0.004, crash=0.004)
_FULL: Final = Rates(full=0.05, stall=0.02, freeze=0.01)

MUTATIONS = (
    Mutation(
        name="segments: no look at the position",
        patches=((SegmentAppender, "_is_written", _write_anywhere),),
        rates=_RIVALS,
        aim="append",
        profile=(*_LOCAL, ("brokers", 3), ("steps", 1_500)),
    ),
    Mutation(
        name="segments: a frame counts after any other",
        patches=((frames.Window, "header", _header_after_any),),
        rates=_FULL,
        profile=(*_LOCAL, ("brokers", 3), ("steps", 1_500)),
    ),
    Mutation(
        name="segments: ack before the sync",
        patches=((MemoryFile, "append", _append_unsynced),),
        rates=_POWER,
        profile=_LOCAL,
    ),
    Mutation(
        name="segments: readers do not sync",
        patches=((SegmentFollower, "_from_disk", _from_cache),),
        rates=Rates(power_cut=0.01, sync_failed=0.01, stall=0.02),
        aim="append",
        profile=(*_LOCAL, ("readers", 3), ("brokers", 2), ("steps", 4_000)),
    ),
    Mutation(
        name="segments: readers do not read the disk",
        patches=((SegmentFollower, "_from_disk", _synced_in_cache),),
        rates=Rates(sync_failed=0.02, stall=0.02),
        aim="append",
        profile=(*_LOCAL, ("readers", 2), ("brokers", 2), ("steps", 4_000)),
    ),
    Mutation(
        name="segments: the next one is not durable in time",
        patches=((EpochFiles, "create", _create_unflushed),),
        rates=_POWER,
        profile=(*_LOCAL, ("segment_blocks", 4)),
    ),
    Mutation(
        name="segments: fences are overlooked",
        patches=((SegmentAppender, "_look", _look_for_no_fence),),
        rates=_RIVALS,
        aim="append",
        profile=(*_LOCAL, ("brokers", 3), ("steps", 1_500)),
    ),
    Mutation(
        name="segments: the current one is trimmed",
        patches=((SegmentAppender, "trim", _trim_all),),
        rates=Rates(crash=0.004),
        profile=_LOCAL,
    ),
)
