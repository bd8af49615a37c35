"""Choice of storage for a write-ahead log: segments on a local file system, otherwise objects.

First a probe checks that the store honours put-if-absent, on which everything rests: a store that
ignores `If-None-Match` would let two brokers overwrite each other's records.

Segments need a kernel that serializes the appends from all processes under one lock, and a sync
that reaches the disk. Network file systems, and those in user space, guarantee neither. The type is
that of the longest mount point above the root; a probe then tries the operations that the log will
use.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from dataclasses import dataclass
from typing import Final

from sparklog import errors
from sparklog.clock import Clock
from sparklog.storage.objects import (
    LocalStore,
    ObjectExists,
    ObjectMissing,
    PutUnresolved,
    Store,
    SyncFailed,
    claim,
)
from sparklog.storage.objects.files import BLOCK_BYTES, Access, LogFiles, files_of
from sparklog.storage.objects.mounts import SUITED, file_system, is_unsuited
from sparklog.storage.snapshot import WalKind
from sparklog.storage.wal.base import FOLDER
from sparklog.storage.wal.segment_files import FULL, storage_full

AUTO: Final = "auto"
_PROBE: Final = "probe-"
_ROUNDS: Final = 3
_CANNOT: Final = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
"""Errors of a file system that does not support this; others may be transient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The storage of a log, and the reason for it."""

    kind: WalKind
    reason: str


def choose(store: Store, setting: str, *, clock: Clock, folder: str = FOLDER) -> Choice:
    """Returns the storage for a new epoch's log. The root must exist.

    Args:
        store: the root's store.
        setting: `auto`, or the kind that must be used.
        clock: waits between attempts.
        folder: the folder for the probes' files.

    Raises `BadOption` if segments are required but cannot be used, what `check_exclusive` raises,
    and the store's errors.
    """
    check_exclusive(store, clock, folder)
    if setting == WalKind.OBJECTS:
        return Choice(kind=WalKind.OBJECTS, reason="writer.log says so")
    files = files_of(store)
    refused = "its store does not support appending to files" if files is None else ""
    found = ""
    if isinstance(store, LocalStore):
        found = file_system(store.root)
        refused = _why_unsuited(found, insists=setting == WalKind.SEGMENTS)
    if not refused and files is not None:
        refused = probe(store, files, folder)
    if not refused:
        reason = f"the file system is {found}" if found else "its store supports appending to files"
        return Choice(kind=WalKind.SEGMENTS, reason=reason)
    if setting == WalKind.SEGMENTS:
        raise errors.BadOption(option="writer.log", value=setting, reason=refused)
    return Choice(kind=WalKind.OBJECTS, reason=refused)


def _why_unsuited(found: str, *, insists: bool) -> str:
    """Returns why a file system is unsuited, or empty. `insists`: the setting requires segments."""
    if found in SUITED:
        return ""
    if is_unsuited(found):
        return f"the file system is {found}, where appends from two processes may overlap"
    return "" if insists else f"the file system is {found or 'unknown'}, which is untested"


# ------------------------------------------------------------------------------ the probe


def probe(store: Store, files: LogFiles, folder: str) -> str:
    """Appends to one file, alternately as broker and as fencer. Returns the fault; empty if none.

    Raises the store's errors.
    """
    path = f"{folder}/{_PROBE}{secrets.token_hex(8)}"
    store.put_new(path, bytes(BLOCK_BYTES))
    try:
        return _try_appends(files, path)
    except OSError as error:
        if error.errno in _CANNOT:
            return f"appending to a file failed: {error}"
        if error.errno in FULL:
            raise storage_full(store, error) from error
        raise errors.StorageUnavailable(operation="append", path=path, reason=str(error)) from error
    except SyncFailed as error:
        raise errors.StorageUnavailable(operation="sync", path=path, reason=str(error)) from error
    except ObjectMissing as error:
        return f"appending to a file failed: {error}"
    finally:
        store.delete([path])


def check_exclusive(store: Store, clock: Clock, folder: str = FOLDER) -> None:
    """Puts two objects at one path; the store has to reject the second.

    Raises `RootNotWritable` if it does not, and the store's errors.
    """
    path = f"{folder}/{_PROBE}{secrets.token_hex(8)}"
    first, second = secrets.token_bytes(16), secrets.token_bytes(16)
    refused = False
    try:
        claim(store, path, first, clock=clock)
        try:
            store.put_new(path, second)
        except ObjectExists:
            refused = True
        is_kept = bytes(store.get(path)) == first
    except (errors.OutcomeUnknown, ObjectExists, ObjectMissing, PutUnresolved) as error:
        raise errors.StorageUnavailable(
            operation="put", path=path, reason=f"a probe of put-if-absent failed: {error!r}"
        ) from error
    except SyncFailed as error:
        raise errors.StorageUnavailable(operation="sync", path=path, reason=str(error)) from error
    finally:
        with contextlib.suppress(errors.SparklogError):  # `sweep_probes` removes it
            store.delete([path])
    if not (refused and is_kept):
        reason = (
            "it does not honour put-if-absent: it accepted a second object under one name, so"
            " records could be overwritten. Use a store with conditional puts (If-None-Match)"
        )
        raise errors.RootNotWritable(root=store.uri, reason=reason)


def sweep_probes(store: Store, older_than_us: int) -> None:
    """Removes the files left by killed probes, if last written before `older_than_us`.

    Raises the store's errors.
    """
    found = [stat for stat in store.list_after(FOLDER) if stat.name.startswith(_PROBE)]
    store.delete([f"{FOLDER}/{each.name}" for each in found if each.modified_us < older_than_us])


def _try_appends(files: LogFiles, path: str) -> str:
    ours = files.open(path, Access.WRITE)
    theirs = files.open(path, Access.FENCE)
    try:
        end = BLOCK_BYTES
        for number in range(2 * _ROUNDS):
            writer = (ours, theirs)[number % 2]
            block = secrets.token_bytes(BLOCK_BYTES)
            done = writer.append([memoryview(block)])
            if done.written_bytes < len(block):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if done != (len(block), end + len(block)):
                return f"an append at {end} ended at {done.end}"
            reader = (theirs, ours)[number % 2]
            if reader.size_bytes() != done.end or reader.read(end, len(block)) != block:
                return "another descriptor does not see an append"
            end = done.end
        if not ours.sync():
            return "files cannot be synced"
        return ""
    finally:
        ours.close()
        theirs.close()
