"""Follower of an epoch in segments, and its fence. `segments` defines the protocol."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from sparklog import errors
from sparklog.storage.objects import ObjectMissing, SyncFailed
from sparklog.storage.objects.base import pieces as views_of
from sparklog.storage.objects.files import Access
from sparklog.storage.snapshot import Entry, EntryKind, Located, WalPosition
from sparklog.storage.wal import frames
from sparklog.storage.wal.base import NOTHING_KNOWN, Checkpoint, WalObject
from sparklog.storage.wal.segment_files import BEGINNING, EpochFiles, Place, Segment

_FENCE_ATTEMPTS = 100  # each may fail because a live broker ends its segment


class SegmentFollower:
    """Implements `Follower`."""

    def __init__(
        self, epoch: EpochFiles, *, known: Mapping[int, WalObject] = NOTHING_KNOWN
    ) -> None:
        self._epoch = epoch
        self._known = known
        self.broker = epoch.broker
        self.epoch = epoch.epoch
        self.checkpoint: Checkpoint | None = None
        self.next_sequence = 0
        self.fenced = False
        self._started = False
        self._place = BEGINNING
        self._segment: Segment | None = None
        self._window: frames.Window | None = None
        """The bytes of the segment that were visible when this poll reached it."""
        self._ready: list[WalObject] = []
        """Flushes that have been read but not yet returned, so that a failing poll loses none."""
        self._cannot_sync = False
        """True if this process cannot sync the segments."""
        self._failure: SyncFailed | None = None
        """Set once: no later sync can be trusted."""

    def poll(self, *, relist: bool = False) -> list[WalObject]:
        if self._failure is not None:
            raise self._failure
        if not self.fenced:
            try:
                self._read_next(relist=relist)
            except errors.Corrupt:
                if not self._ready:
                    raise
        held = self._unconfirmed() if self._cannot_sync else 0
        found, self._ready = self._ready[: len(self._ready) - held], self._ready[-held:]
        if not held:
            self._ready = []
        return found

    def _unconfirmed(self) -> int:
        """Returns how many of the newest flushes are not confirmed by a heartbeat of the broker.

        Only the newest flush, and a fence after it, may not be durable: each flush is written only
        once the one before it is durable.
        """
        newest = self._ready[-1:] + self._ready[-2:-1] * self.fenced
        if not newest:
            return 0
        try:
            data = self._epoch.store.get(f"heartbeats/{self.broker}.json")
            beat = _beat_decoder.decode(data)
        except (ObjectMissing, msgspec.MsgspecError):
            return len(newest)
        is_confirmed = beat.epoch == self.epoch and beat.newest_sequence >= newest[-1].at.sequence
        return 0 if is_confirmed else len(newest)

    def _read_next(self, *, relist: bool) -> None:
        if not self._started:
            self._jump_to_checkpoint()
            self._started = True
        before = self.next_sequence
        self._window = None
        try:
            while not self.fenced and self._take_one():
                pass
        except OSError as error:
            raise self._epoch.refusal("read", self._path, error) from error
        if relist and self.next_sequence == before and not self.fenced:
            self._check_name()

    @property
    def _path(self) -> str:
        return self._epoch.path(self._place.ordinal)

    def _check_name(self) -> None:
        """Rereads the epoch from its newest checkpoint if the name is now that of another file."""
        segment = self._segment
        if segment is not None and (
            self._epoch.files.identity(segment.path) != segment.file.identity
        ):
            self._jump_to_checkpoint()

    def _take_one(self) -> bool:
        """Reads the next frame or the fence. Returns whether there is more to read."""
        if self._segment is None:
            try:
                self._segment = self._epoch.open(self._place.ordinal, Access.READ)
            except ObjectMissing as missing:
                if self._jump_to_checkpoint():
                    return True
                if self._place.ordinal == 0:
                    return False  # not created yet
                reason = "the segment before it has ended, and no checkpoint is after it"
                raise errors.MissingObject(path=missing.path, reason=reason) from None
        segment = self._segment
        if self._window is None:
            self._window = segment.window()
        event = segment.event(self._window, self._place, self.next_sequence)
        if isinstance(event, frames.Nothing) and event.unfinished is not None:
            event = self._vouched_by_next(segment, event.unfinished) or event
        if isinstance(event, frames.Fence) or (
            isinstance(event, frames.Frame) and not event.is_vouched
        ):
            event = self._from_disk(segment, self._window)
        if isinstance(event, frames.Nothing):
            return False
        if isinstance(event, frames.Fence):
            if self._jump_to_checkpoint():
                return True  # created by a fencer for an epoch whose first segments are gone
            self._add_fence(event)
            return False
        self._ready.append(self._epoch.wal_object(segment.ordinal, event))
        self.next_sequence += 1
        header = event.header
        if not header.is_last:
            self._place = Place(segment.ordinal, header.end, header.offset)
        else:
            self._place = Place(segment.ordinal + 1, frames.FIRST, frames.NONE)
            self._leave_segment()
        return True

    def _from_disk(self, segment: Segment, window: frames.Window) -> frames.Event:
        """Returns the event at the current place, once bytes that nothing vouches for are on disk.

        Their writer may have failed to sync them. The kernel then shows them until their pages
        leave the cache, syncs by other processes succeed, and a fencer will not find them.
        """
        try:
            if not segment.file.sync():
                self._cannot_sync = True
        except SyncFailed as error:
            self._failure = error
            raise
        if not self._cannot_sync:
            start = self._place.offset
            segment.file.drop_cached(start, window.size - start)
            self._window = window = frames.Window(segment.file.read, window.size)
        return segment.event(window, self._place, self.next_sequence)

    def _vouched_by_next(self, segment: Segment, header: frames.Header) -> frames.Event | None:
        """Returns the last frame of a segment, damaged or not, if the next segment continues it."""
        try:
            following = self._epoch.open(segment.ordinal + 1, Access.READ)
        except ObjectMissing:
            return None
        try:
            first = frames.first_header(following.file.read, following.salt)
        finally:
            following.file.close()
        if first is None or first.sequence != header.sequence + 1:
            return None
        # The frame was durable before that one, and is the last with its sequence: earlier ones
        # were cut short. It may be newer than the window.
        self._window = segment.window()
        event = segment.event(self._window, self._place, self.next_sequence)
        if isinstance(event, frames.Nothing) and event.unfinished is not None:
            return frames.vouched(segment.path, segment.file.read, event.unfinished)
        return event

    def _add_fence(self, fence: frames.Fence) -> None:
        at = WalPosition(self.broker, self.epoch, self.next_sequence)
        entry = Located(Entry(kind=EntryKind.FENCE), at, fence.offset, self._place.ordinal)
        self._ready.append(WalObject(at=at, written_us=0, located=(entry,)))
        self.next_sequence += 1
        self.fenced = True

    def _leave_segment(self) -> None:
        segment, self._segment, self._window = self._segment, None, None
        if segment is not None:
            segment.file.close()

    def _jump_to_checkpoint(self, *, reads_needed: bool = True) -> bool:
        """Continues after the newest checkpoint, if it is ahead, and reads the flushes it needs.

        Returns whether it was ahead. `reads_needed`: False if the caller does not want them.
        """
        while True:
            newest = self._epoch.newest_checkpoint()
            if newest is None or newest.sequence < self.next_sequence:
                return False
            wanted = [
                each
                for each in newest.needed
                if reads_needed and each.sequence >= self.next_sequence
            ]
            try:
                found = self._epoch.read(wanted, known=self._known)
            except ObjectMissing as missing:
                again = self._epoch.newest_checkpoint()
                if again is None or again.sequence <= newest.sequence:
                    reason = f"checkpoint {newest.sequence} needs it"
                    raise errors.MissingObject(path=missing.path, reason=reason) from None
                continue
            self._ready += found
            self._leave_segment()
            self.checkpoint = Checkpoint(
                sequence=newest.sequence,
                needed=tuple(each.sequence for each in newest.needed),
                state=newest.state,
                bounds=newest.bounds,
            )
            self.next_sequence, self._place = newest.sequence + 1, newest.place
            return True

    # -------------------------------------------------------------------------- fencing

    def fence(self) -> list[WalObject]:
        """Ends the epoch. Returns the flushes not returned before, and the fence.

        The log is read to its end; then a fence is appended, and every segment since the checkpoint
        is synced and read from the disk again. The frames before the fence are the epoch. If the
        segment has ended by then, the fence does not count, and the next segment is tried.
        """
        found: list[WalObject] = []
        self._epoch.unshare()
        self._leave_segment()  # it may be a different file now, with the same bytes
        for _ in range(_FENCE_ATTEMPTS):
            if not self.fenced:
                self._put_fence_at_end()
            found += self.poll(relist=True)
            if self.fenced and not self._ready:
                return found
        raise errors.StorageUnavailable(
            operation="fence", path=self._path, reason="the broker keeps appending to it"
        )

    def _put_fence_at_end(self) -> None:
        """Appends a fence, unless there is one, and makes all that counts before it durable."""
        probe = SegmentFollower(self._epoch, known=self._known)
        probe._place, probe.next_sequence = self._place, self.next_sequence
        first_ordinal = probe._seek_end()
        if not probe.fenced:
            probe._put_fence()
        for ordinal in range(first_ordinal, probe._place.ordinal + 1):
            self._sync_whole(ordinal)

    def _seek_end(self) -> int:
        """Reads to the end, discarding the flushes. Returns the ordinal that it started at."""
        self._jump_to_checkpoint(reads_needed=False)
        self._started = True
        first_ordinal = self._place.ordinal
        self._read_next(relist=False)
        self._ready.clear()
        return first_ordinal

    def _put_fence(self) -> None:
        """Appends a fence where reading ended; it may turn out not to count."""
        epoch = self._epoch
        nonce = int.from_bytes(os.urandom(8), "little")
        if self._segment is None:
            epoch.create(
                0, lambda salt: frames.encode_fence(salt=salt, nonce=nonce), stopping=lambda: True
            )
            return
        try:
            segment = epoch.open(self._segment.ordinal, Access.FENCE)
        except ObjectMissing:
            return  # trimmed since
        try:
            padding = frames.filler(segment.file.size_bytes())
            block = frames.encode_fence(salt=segment.salt, nonce=nonce)
            wanted_bytes = len(padding) + len(block)
            done = segment.file.append(views_of([padding, block]))
        except OSError as error:
            raise epoch.refusal("append", segment.path, error) from error
        finally:
            segment.file.close()
        if done.written_bytes < wanted_bytes:
            raise epoch.full()

    def _sync_whole(self, ordinal: int) -> None:
        """Makes a segment durable, and has later reads fetch it from the disk."""
        try:
            segment = self._epoch.open(ordinal, Access.READ)
        except ObjectMissing:
            return  # trimmed since
        try:
            if not segment.file.sync():
                raise SyncFailed(segment.path, "this process cannot flush its bytes")
            segment.file.drop_cached()
        finally:
            segment.file.close()


class _Beat(msgspec.Struct, frozen=True):
    """The part of a heartbeat that confirms a flush."""

    epoch: int = -1
    newest_sequence: int = -1


_beat_decoder = msgspec.json.Decoder(_Beat)
