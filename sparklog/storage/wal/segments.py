"""Write-ahead log in segments: one append per flush, to a file that several processes append to.

`frames` defines the format and the rule by which frames count. The protocol around it:

- A flush is one append, durable before it is acked. Its frame states the offset at which the
  writer expects it; if it landed elsewhere, it does not count, and the writer reads the bytes
  before it, which are a fence or just junk. Nothing is ever truncated or overwritten.
- A fencer reads to the end, appends a fence, syncs the segments, and reads again. The writer's next
  append lands after the fence, so exactly one of the two counts at each offset.
- The frame flagged *last* ends its segment. The next segment is durable before that frame is
  written.
- Segments that a hard-linked copy of the root shares with its original are replaced before the
  fence is appended, because it would fence the original's broker too.
- The first segment is created by the broker, or by a fencer with a fence in it. Put-if-absent of
  its name decides which.
- Before it returns the newest frame, a reader syncs it and reads it again from the disk. So neither
  a power cut nor a failed sync by the writer takes back records that were read.
- Segments are deleted whole, after a checkpoint that needs none of their frames. Checkpoints are
  objects; they record where reading continues.
- After a failed sync the appender stops, because lost pages may still be visible.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from sparklog import limits
from sparklog.clock import Clock
from sparklog.storage.objects import Store
from sparklog.storage.objects.files import LogFiles
from sparklog.storage.wal.base import NOTHING_KNOWN, WalObject
from sparklog.storage.wal.objects import ObjectWal
from sparklog.storage.wal.segment_appender import SegmentAppender
from sparklog.storage.wal.segment_files import EpochFiles
from sparklog.storage.wal.segment_follower import SegmentFollower

SEGMENT_BYTES = 64 * limits.MIB  # of a segment, and between two checkpoints


class SegmentWal:
    """Implements `Wal` on growing files."""

    def __init__(
        self,
        store: Store,
        files: LogFiles,
        clock: Clock,
        *,
        segment_bytes: int | None = None,
    ) -> None:
        self._store = store
        self._files = files
        self._clock = clock
        self._segment_bytes = segment_bytes or SEGMENT_BYTES

    def appender(
        self, broker: int, epoch: int, *, stopping: Callable[[], bool] = lambda: False
    ) -> SegmentAppender:
        return SegmentAppender(
            EpochFiles(self._store, self._files, self._clock, broker, epoch),
            stopping=stopping,
            segment_bytes=self._segment_bytes,
        )

    def follower(
        self, broker: int, epoch: int, *, known: Mapping[int, WalObject] = NOTHING_KNOWN
    ) -> SegmentFollower:
        files = EpochFiles(self._store, self._files, self._clock, broker, epoch)
        return SegmentFollower(files, known=known)

    def retired(self, open_epochs: Callable[[], Container[tuple[int, int]]]) -> list[str]:
        return ObjectWal(self._store, self._clock).retired(open_epochs)
