from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest

from sparklog import errors, limits
from sparklog.storage.objects import LocalStore, ObjectMissing
from sparklog.storage.objects.files import BLOCK_BYTES, Access, files_of
from sparklog.storage.objects.local_files import LocalFile, LocalFiles
from tests.support import descriptors

PATH = "wal/x.seg"
BLOCK = bytes(range(256)) * (BLOCK_BYTES // 256)


@pytest.fixture
def files(tmp_path: Path) -> LocalFiles:
    """The files of a root with one file of one block."""
    store = LocalStore(tmp_path)
    store.put_new(PATH, BLOCK)
    found = files_of(store)
    assert isinstance(found, LocalFiles)
    return found


def pieces(*parts: bytes) -> list[memoryview]:
    """These parts as an append takes them."""
    return [memoryview(part) for part in parts]


@pytest.mark.parametrize("access", [Access.FENCE, Access.WRITE])
def test_appends_of_two_descriptors_follow_each_other(files: LocalFiles, access: Access) -> None:
    """An append returns the end of its own bytes, also between those of another process."""
    ours, theirs = files.open(PATH, access), files.open(PATH, Access.FENCE)
    assert ours.append(pieces(b"one", b"two")) == (6, BLOCK_BYTES + 6)
    assert theirs.append(pieces(b"three")) == (5, BLOCK_BYTES + 11)
    assert ours.append(pieces(b"four")) == (4, BLOCK_BYTES + 15)
    assert ours.size_bytes() == BLOCK_BYTES + 15
    assert theirs.read(BLOCK_BYTES, 100) == b"onetwothreefour"
    assert ours.sync()
    ours.drop_cached()
    assert ours.read(BLOCK_BYTES - 1, 4) == BLOCK[-1:] + b"one"


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="its system takes no advice")
def test_whole_pages_are_dropped(files: LocalFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system drops no page of which only a part is named; pages may be larger than blocks."""
    advised: list[tuple[int, int]] = []
    monkeypatch.setattr(mmap, "PAGESIZE", 65_536)
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *where: advised.append(where[:2]))
    file = files.open(PATH, Access.READ)
    file.drop_cached(BLOCK_BYTES, BLOCK_BYTES)
    file.drop_cached(65_536 - BLOCK_BYTES, 2 * BLOCK_BYTES)
    file.drop_cached(65_536, 65_536)
    file.drop_cached(BLOCK_BYTES)
    assert advised == [(0, 65_536), (0, 131_072), (65_536, 65_536), (0, 0)]


def test_operations_are_counted_by_kind(tmp_path: Path) -> None:
    """Beside those on objects, so that a flush of the log is one operation of a local root."""
    store = LocalStore(tmp_path)
    store.put_new(PATH, BLOCK)
    assert store.files is not None
    file = store.files.open(PATH, Access.WRITE)
    file.append(pieces(BLOCK))
    file.append_part(pieces(BLOCK))
    file.sync()
    file.read(0, 1)
    assert store.requests == {"put_new": 1, "open": 1, "append": 2, "sync": 1, "read": 1}


def test_pieces_of_any_number_are_one_append(files: LocalFiles) -> None:
    """More pieces than the system takes in one call are joined."""
    file = files.open(PATH, Access.WRITE)
    count = os.sysconf("SC_IOV_MAX") + 1
    assert file.append(pieces(*[b"x"] * count)) == (count, BLOCK_BYTES + count)


def test_a_large_run_is_written_in_parts(files: LocalFiles) -> None:
    """Parts are whole blocks past the page cache, and their positions show other appends."""
    file, other = files.open(PATH, Access.WRITE), files.open(PATH, Access.FENCE)
    part = BLOCK * (limits.DIRECT_BUFFER_BYTES // BLOCK_BYTES)
    assert file.append_part(pieces(part[:-1], part[-1:])).end == BLOCK_BYTES + len(part)
    other.append(pieces(BLOCK))
    assert file.append_part(pieces(BLOCK)) == (BLOCK_BYTES, len(part) + 3 * BLOCK_BYTES)
    assert file.sync()
    assert file.read(BLOCK_BYTES, 2 * len(part)) == part + 2 * BLOCK


def test_a_file_system_without_direct_writes_takes_parts(
    files: LocalFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part goes through the page cache if the file system refuses direct writes."""
    file = files.open(PATH, Access.WRITE)
    monkeypatch.setattr(
        "sparklog.storage.objects.direct.os.write", _raising(OSError(errno.EINVAL, "no"))
    )
    assert file.append_part(pieces(BLOCK)) == (BLOCK_BYTES, 2 * BLOCK_BYTES)
    assert file.append_part(pieces(BLOCK)) == (BLOCK_BYTES, 3 * BLOCK_BYTES)


def _raising(error: Exception) -> object:
    def call(*_: object) -> None:
        raise error

    return call


def test_reserved_space_is_not_in_the_size(files: LocalFiles, tmp_path: Path) -> None:
    """Allocation keeps the size, so that the end of the file remains the end of the log."""
    file = files.open(PATH, Access.WRITE)
    file.allocate(1 << 20)
    found = (tmp_path / PATH).stat()
    assert file.size_bytes() == found.st_size == BLOCK_BYTES
    assert found.st_blocks * 512 >= 1 << 20
    assert file.append(pieces(BLOCK)).end == 2 * BLOCK_BYTES


def test_a_deleted_file_can_be_used(files: LocalFiles, tmp_path: Path) -> None:
    """An open file outlives its name; a new file of that name has another identity."""
    file = files.open(PATH, Access.WRITE)
    assert files.identity(PATH) == file.identity
    (tmp_path / PATH).rename(tmp_path / "moved")
    assert files.identity(PATH) is None
    LocalStore(tmp_path).put_new(PATH, b"")
    assert files.identity(PATH) not in (None, file.identity)
    assert file.append(pieces(BLOCK)).end == 2 * BLOCK_BYTES
    with pytest.raises(ObjectMissing):
        files.open("wal/other", Access.READ)


def test_a_file_of_another_user_is_refused_by_name(
    files: LocalFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a file that must not be written says which permission is needed."""
    opened = os.open

    def forbid(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_WRONLY:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opened(path, flags, *rest)

    monkeypatch.setattr("sparklog.storage.objects.local_files.os.open", forbid)
    with pytest.raises(errors.RootNotWritable, match="write permission"):
        files.open(PATH, Access.FENCE)


def test_a_mount_of_the_network_syncs_nothing(
    files: LocalFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader on another machine cannot make the bytes of a broker durable, and knows it."""
    name = "sparklog.storage.objects.local_files.file_system"
    monkeypatch.setattr(name, lambda _root: "nfs4")
    assert not files.open(PATH, Access.READ).sync()


def test_files_close_themselves(files: LocalFiles, tmp_path: Path) -> None:
    """A file that is no longer used gives its descriptors back."""
    before = descriptors.below(tmp_path)
    file: LocalFile | None = files.open(PATH, Access.WRITE)
    assert len(descriptors.below(tmp_path)) > len(before)
    del file
    assert descriptors.below(tmp_path) == before
