"""Segments and checkpoints of an epoch, as files and objects. `segments` defines the protocol."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from sparklog import errors
from sparklog.clock import Clock
from sparklog.storage.objects import ObjectMissing, Store, claim, shortage
from sparklog.storage.objects.files import Access, LogFile, LogFiles
from sparklog.storage.snapshot import Bounds, Located, WalPosition
from sparklog.storage.wal import frames
from sparklog.storage.wal.base import (
    CHECKPOINT,
    NOTHING_KNOWN,
    SEGMENT,
    WalObject,
    folder,
    segment_path,
)
from sparklog.storage.wal.indexed import read_index

CHECKPOINT_MAGIC: Final = b"SLWAL002"
FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN: Final = (errno.EROFS, errno.EACCES, errno.EPERM)


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A place at which reading continues."""

    ordinal: int
    offset: int
    previous: int
    """Offset of the frame before it in this segment, or `frames.NONE`."""


BEGINNING: Final = Place(0, frames.FIRST, frames.NONE)


class Needed(msgspec.Struct, frozen=True, array_like=True):
    sequence: int
    ordinal: int
    offset: int


class CheckpointIndex(msgspec.Struct, frozen=True, array_like=True):
    flush_id: bytes
    sequence: int
    place: Place
    """The place after the frame of `sequence`."""
    needed: tuple[Needed, ...]
    state: bytes
    bounds: dict[str, tuple[Bounds, ...]] | None = None


_encoder = msgspec.msgpack.Encoder()
_checkpoint_decoder = msgspec.msgpack.Decoder(CheckpointIndex)


class _ClusterId(msgspec.Struct, frozen=True):
    cluster_id: str = ""


_cluster_id_decoder = msgspec.json.Decoder(_ClusterId)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """An open segment."""

    path: str
    ordinal: int
    salt: bytes
    file: LogFile
    root: int
    """The inode of the root in which it was created; 0: unknown."""

    def window(self) -> frames.Window:
        """Returns the bytes that are currently visible."""
        return frames.Window(self.file.read, self.file.size_bytes())

    def event(self, window: frames.Window, place: Place, sequence: int) -> frames.Event:
        """Returns the next event at `place`."""
        return frames.next_event(
            self.path,
            window,
            salt=self.salt,
            offset=place.offset,
            sequence=sequence,
            previous=place.previous,
        )


class EpochFiles:
    """The segments and checkpoints of one epoch."""

    def __init__(
        self, store: Store, files: LogFiles, clock: Clock, broker: int, epoch: int
    ) -> None:
        self.store = store
        self.files = files
        self.clock = clock
        self.broker = broker
        self.epoch = epoch

    def path(self, ordinal: int) -> str:
        return segment_path(self.broker, self.epoch, ordinal)

    def cluster_id(self) -> str:
        """Returns the cluster id of the root; empty for a root made by hand."""
        try:
            return _cluster_id_decoder.decode(self.store.get("cluster.json")).cluster_id
        except ObjectMissing:
            return ""

    def create(
        self, ordinal: int, content: Callable[[bytes], bytes], *, stopping: Callable[[], bool]
    ) -> bool:
        """Creates a segment with `content(salt)` after block 0. Returns whether it is ours.

        It is complete and durable, including its name. Raises what `claim` raises.
        """
        salt = os.urandom(frames.SALT_BYTES)
        block = frames.describe(
            cluster_id=self.cluster_id(),
            broker=self.broker,
            epoch=self.epoch,
            ordinal=ordinal,
            salt=salt,
            root=self._root_inode(),
        )
        return claimed(self.store, self.clock, self.path(ordinal), block + content(salt), stopping)

    def open(self, ordinal: int, access: Access) -> Segment:
        """Opens a segment. Raises `ObjectMissing`, `CorruptObject` and the store's errors."""
        path = self.path(ordinal)
        try:
            file = self.files.open(path, access)
            found = frames.read_description(path, file.read(0, frames.FIRST))
        except OSError as error:
            raise self.refusal("open", path, error) from error
        if (found.broker, found.epoch, found.ordinal) != (self.broker, self.epoch, ordinal):
            said = segment_path(found.broker, found.epoch, found.ordinal)
            raise errors.CorruptObject(path=path, check=f"it says that it is {said}")
        return Segment(path=path, ordinal=ordinal, salt=found.salt, file=file, root=found.root)

    def unshare(self) -> None:
        """Replaces segments that a hard-linked copy of the root shares with its original.

        A fence in such a segment would fence the original's broker. No broker of the copy appends
        to it, so its bytes may be moved to a new file. In the original they may not: its broker
        could append to the old file, and would not find the fence. A segment names the root in
        which it was created, which distinguishes the two. Raises `CorruptObject` and the store's
        errors.
        """
        root = self._root_inode()
        for stat in self.store.list_after(folder(self.broker, self.epoch)):
            path = f"{folder(self.broker, self.epoch)}/{stat.name}"
            if not (stat.name.endswith(SEGMENT) and self.files.is_shared(path)):
                continue
            try:
                segment = self.open(int(stat.name.removesuffix(SEGMENT)), Access.READ)
            except (ObjectMissing, errors.CorruptObject):
                continue  # trimmed since, or damaged, which reading will report
            segment.file.close()
            if segment.root not in (0, root) and self.files.is_shared(path):
                self.store.put(path, self.store.get(path))

    def _root_inode(self) -> int:
        found = self.files.identity("")
        return found.inode if found is not None else 0

    def wal_object(self, ordinal: int, frame: frames.Frame) -> WalObject:
        """Returns the flush in a frame."""
        at = WalPosition(self.broker, self.epoch, frame.header.sequence)
        origin = frame.origin
        return WalObject(
            at=at,
            written_us=frame.index.written_us,
            located=tuple(Located(each, at, origin, ordinal) for each in frame.index.entries),
        )

    def read(
        self, needed: Sequence[Needed], *, known: Mapping[int, WalObject] = NOTHING_KNOWN
    ) -> list[WalObject]:
        """Returns the flushes of durable frames. Raises `ObjectMissing`, `CorruptObject`.

        `known`: flushes by sequence that need not be read.
        """
        found = {each.sequence: known[each.sequence] for each in needed if each.sequence in known}
        unknown = [each for each in needed if each.sequence not in found]
        for ordinal, group in itertools.groupby(unknown, lambda each: each.ordinal):
            segment = self.open(ordinal, Access.READ)
            try:
                for each in group:
                    frame = frames.frame_at(
                        segment.path,
                        segment.file.read,
                        salt=segment.salt,
                        offset=each.offset,
                        sequence=each.sequence,
                    )
                    found[each.sequence] = self.wal_object(ordinal, frame)
            except OSError as error:
                raise self.refusal("read", segment.path, error) from error
            finally:
                segment.file.close()
        return [found[each.sequence] for each in needed]

    def newest_checkpoint(self) -> CheckpointIndex | None:
        """Returns the checkpoint of the highest sequence, or None. Raises `CorruptObject`."""
        base = folder(self.broker, self.epoch)
        while True:
            names = [stat.name for stat in self.store.list_after(base, after=CHECKPOINT)]
            if not names:
                return None
            path = f"{base}/{names[-1]}"
            try:
                raw, _ = read_index(self.store, path, CHECKPOINT_MAGIC)
            except ObjectMissing:
                continue  # deleted since, after a newer checkpoint
            try:
                return _checkpoint_decoder.decode(raw)
            except msgspec.MsgspecError as error:
                raise errors.CorruptObject(path=path, check=f"it is unreadable: {error}") from error

    def refusal(self, operation: str, path: str, error: OSError) -> errors.SparklogError:
        """Returns the error to raise for a system call that certainly had no effect."""
        if error.errno in FULL:
            return self.full(error)
        if error.errno in _FORBIDDEN:
            reason = f"{operation} of {path}: {error}"
            return errors.RootNotWritable(root=self.store.uri, reason=reason)
        return errors.StorageUnavailable(operation=operation, path=path, reason=str(error))

    def full(self, error: OSError | None = None) -> errors.StorageFull:
        return storage_full(self.store, error)


def storage_full(store: Store, error: OSError | None = None) -> errors.StorageFull:
    """Returns the error to raise if an append exceeds the space or quota of the file system.

    An append needs no inode. `error` is the system's; None if an append was cut short.
    """
    return errors.StorageFull(
        root=store.uri,
        missing="space" if error is None else shortage(error),
        free_bytes=store.free_bytes() or 0,
        reserve_bytes=0,
    )


def claimed(
    store: Store, clock: Clock, path: str, data: bytes, stopping: Callable[[], bool]
) -> bool:
    """Puts `data` if the path is free; retries until the outcome is known or `stopping()`."""
    doubtful = False
    while True:
        try:
            return claim(store, path, data, clock=clock, doubtful=doubtful)
        except errors.OutcomeUnknown:
            if stopping():
                raise
            doubtful = True
