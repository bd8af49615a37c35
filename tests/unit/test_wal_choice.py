from __future__ import annotations

import errno
from pathlib import Path

import pytest

from sparklog import errors
from sparklog.broker.agent import Agent
from sparklog.clock import ManualClock
from sparklog.settings import BrokerSettings, FlightSettings, KafkaSettings
from sparklog.storage.objects import (
    Fault,
    LocalStore,
    MemoryStore,
    Payload,
    PutUnresolved,
    ScriptedFaults,
    mounts,
)
from sparklog.storage.objects.faults import Operation
from sparklog.storage.snapshot import WalKind
from sparklog.storage.wal import choice

CLOCK = ManualClock()
MOUNTS = r"""22 1 0:20 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:21 / /srv rw - nfs4 server:/srv rw,vers=4.2
24 23 0:22 / /srv/with\040space rw shared:2 master:1 - xfs /dev/vdb rw
25 22 0:23 / /tmp rw - tmpfs tmpfs rw
26 25 0:24 / /tmp rw - fuse.sshfs host:/ rw
bad line
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", "ext4"),
        ("/home/logs", "ext4"),
        ("/srv", "nfs4"),
        ("/srv/logs", "nfs4"),
        ("/srv2", "ext4"),
        ("/srv/with space/logs", "xfs"),
        ("/tmp/logs", "fuse.sshfs"),
    ],
)
def test_the_longest_mount_point_counts(path: str, expected: str) -> None:
    """A root is on the file system of the deepest mount above it; a later mount hides another."""
    assert mounts.type_at(path, mounts.mounts_of_linux(MOUNTS)) == expected


def test_mounts_of_macos() -> None:
    """The output of mount(8) on macOS has the type first in the parentheses."""
    text = (
        "/dev/disk3s1s1 on / (apfs, sealed, local, read-only, journaled)\n"
        "/dev/disk3s5 on /System/Volumes/Data (apfs, local)\nmap auto on /home (autofs, x)\n"
    )
    found = mounts.mounts_of_macos(text)
    assert mounts.type_at("/System/Volumes/Data/x", found) == "apfs"
    assert mounts.type_at("/home/x", found) == "autofs"


@pytest.mark.parametrize(
    ("found", "auto", "forced"),
    [
        ("ext4", "segments", "segments"),
        ("fuse.sshfs", "objects", None),
        ("nfs4", "objects", None),
        ("9p", "objects", None),
        ("newfs", "objects", "segments"),
        ("", "objects", "segments"),
    ],
)
def test_the_file_system_decides(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    found: str,
    auto: str,
    forced: str | None,
) -> None:
    """Segments need a file system that was tried; the setting may insist, except on bad ones."""
    monkeypatch.setattr(choice, "file_system", lambda _root: found)
    store = LocalStore(tmp_path)
    assert choice.choose(store, "objects", clock=CLOCK).kind is WalKind.OBJECTS
    chosen = choice.choose(store, "auto", clock=CLOCK)
    assert (chosen.kind, found in chosen.reason) == (auto, True)
    if forced is None:
        with pytest.raises(errors.BadOption, match="file system"):
            choice.choose(store, "segments", clock=CLOCK)
    else:
        assert choice.choose(store, "segments", clock=CLOCK).kind == forced
    assert list(store.walk("")) == []


def test_this_machine_is_known(tmp_path: Path) -> None:
    """The type of a root that does not exist yet is that of the folder above it."""
    assert mounts.file_system(str(tmp_path / "a" / "b")) == mounts.file_system(str(tmp_path)) != ""


def test_stores_without_files_have_objects(clock: ManualClock) -> None:
    """Object stores keep one object per flush."""
    store = MemoryStore(clock)
    assert choice.choose(store, "auto", clock=CLOCK).kind is WalKind.OBJECTS
    with pytest.raises(errors.BadOption, match="does not support appending"):
        choice.choose(store, "segments", clock=CLOCK)


def test_a_failing_probe_means_objects(clock: ManualClock) -> None:
    """Files on which appends fail, or overlap, are not used."""
    base = MemoryStore(clock, is_local=True, has_files=True)
    assert choice.choose(base, "auto", clock=CLOCK).kind is WalKind.SEGMENTS
    faults = ScriptedFaults(
        Fault(operation="append", error=OSError(errno.EOPNOTSUPP, "injected"), count=3)
    )
    assert choice.choose(base.view(faults), "auto", clock=CLOCK).kind is WalKind.OBJECTS
    unsynced = base.view(ScriptedFaults())
    assert unsynced.files is not None
    unsynced.files.can_sync = False
    assert "synced" in choice.choose(unsynced, "auto", clock=CLOCK).reason
    assert list(base.walk("")) == []


@pytest.mark.parametrize(
    ("operation", "number", "error"),
    [
        ("append", errno.EIO, errors.StorageUnavailable),
        ("sync", errno.EIO, errors.StorageUnavailable),
        ("append", errno.ENOSPC, errors.StorageFull),
    ],
)
def test_a_fault_that_may_pass_refuses_the_start(
    clock: ManualClock, operation: Operation, number: int, error: type[errors.SparklogError]
) -> None:
    """It says nothing of the file system, and would choose objects for the whole epoch."""
    base = MemoryStore(clock, is_local=True, has_files=True)
    fault = Fault(operation=operation, error=OSError(number, "injected"))
    with pytest.raises(error):
        choice.choose(base.view(ScriptedFaults(fault)), "auto", clock=CLOCK)
    assert list(base.walk("")) == []


ANYWHERE = BrokerSettings(
    root="s3://b",
    flight=FlightSettings(listen="127.0.0.1:0"),
    kafka=KafkaSettings(listen=""),
)


class Overwriting(MemoryStore):
    """A store that ignores `If-None-Match`, as some S3-compatible ones do."""

    def put_new(self, path: str, data: Payload) -> None:
        self.put(path, data)


def test_a_store_that_overwrites_is_refused_by_a_start(clock: ManualClock) -> None:
    """Two brokers would overwrite each other's acked records: the start names the cause."""
    store = Overwriting(clock)
    with pytest.raises(errors.RootNotWritable, match="does not honour put-if-absent"):
        Agent(ANYWHERE, store=store).start()
    assert not [stat.name for stat in store.walk("wal")]


@pytest.mark.parametrize(
    "error",
    [
        PutUnresolved("?", "no answer"),
        errors.StorageUnavailable(operation="put", path="?", reason="503"),
    ],
)
def test_a_probe_without_an_answer_may_be_tried_again(clock: ManualClock, error: Exception) -> None:
    """A store that does not answer is not taken for one that overwrites."""
    for count in (1, 2):
        store = MemoryStore(clock)
        # The first put is tried again, as all puts of a start are.
        tries = range(1, 9) if count == 1 else (2,)
        faults = ScriptedFaults(
            *(Fault(operation="put_new", error=error, count=each) for each in tries)
        )
        with pytest.raises(errors.StorageUnavailable):
            choice.check_exclusive(store.view(faults), clock)
