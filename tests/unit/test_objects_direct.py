from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparklog import limits
from sparklog.storage.objects import direct

BLOCK = 4_096
BUFFER = 4 * BLOCK

sizes = st.integers(0, 3 * BUFFER) | st.integers(0, 12).map(lambda blocks: blocks * BLOCK)
anywhere = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowers the limits: every object counts as large, and buffers are small."""
    monkeypatch.setattr(limits, "DIRECT_WRITE_BYTES", 1)
    monkeypatch.setattr(limits, "DIRECT_BUFFER_BYTES", BUFFER)
    monkeypatch.setattr(direct, "_idle", type(direct._idle)(maxlen=2))


def written(folder: Path, pieces: list[bytes]) -> bytes:
    """Writes `pieces` to a new file and returns its content."""
    path = folder / "file"
    path.unlink(missing_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        direct.write(file, [memoryview(piece) for piece in pieces])
    finally:
        os.close(file)
    return path.read_bytes()


def numbered(size: int) -> bytes:
    """Bytes in which each 8 bytes are a different number."""
    return b"".join(at.to_bytes(8) for at in range(size // 8 + 1))[:size]


def test_forks_do_not_share_buffers(tmp_path: Path) -> None:
    """A forked child does not write into its parent's buffers."""
    written(tmp_path, [numbered(BUFFER)])
    (buffer,) = direct._idle
    child = os.fork()
    if child == 0:
        buffer[:] = 0
        os._exit(0)
    os.waitpid(child, 0)
    assert bytes(buffer) == numbered(BUFFER)


@anywhere
@given(st.lists(sizes, max_size=4))
def test_a_file_holds_what_was_written(tmp_path: Path, lengths: list[int]) -> None:
    """Pieces of any length, whole blocks or not, follow one another without a gap."""
    pieces = [numbered(length) for length in lengths]
    assert written(tmp_path, pieces) == b"".join(pieces)


def test_whole_blocks_bypass_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the rest after the last whole block goes through the cache."""
    modes: list[tuple[bool, int]] = []
    real = os.write, os.writev

    def is_direct(file: int) -> bool:
        return bool(fcntl.fcntl(file, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))

    def write(file: int, data: Any) -> int:
        modes.append((is_direct(file), len(memoryview(data).cast("B"))))
        return real[0](file, data)

    def writev(file: int, views: list[memoryview]) -> int:
        modes.append((is_direct(file), sum(map(len, views))))
        return real[1](file, views)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "writev", writev)
    data = numbered(BUFFER + BLOCK + 7)
    assert written(tmp_path, [data]) == data
    if modes == [(False, len(data))]:
        pytest.skip("the file system of the test has no direct writing")
    assert modes == [(True, BUFFER), (True, BLOCK), (False, 7)]


def refuses(code: int, *, after: int) -> Callable[..., int]:
    """An `os.write` that fails from the `after`-th call on."""
    real, calls = os.write, 0

    def write(file: int, data: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(code, os.strerror(code))
        return real(file, data)

    return write


@pytest.mark.parametrize("after", [0, 1])
def test_a_device_with_larger_blocks_is_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """If a direct write is refused, its bytes go through the cache."""
    monkeypatch.setattr(os, "write", refuses(errno.EINVAL, after=after))
    data = numbered(3 * BUFFER + 100)
    assert written(tmp_path, [data]) == data


@pytest.mark.parametrize("count", [BLOCK, BLOCK + 100])
def test_a_short_write_continues_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """The rest of a short write may begin inside a block, so it goes through the cache."""
    real = os.write, os.writev
    past_the_cache = getattr(os, "O_DIRECT", 0)

    def write(file: int, data: Any) -> int:
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        fcntl.fcntl(file, fcntl.F_SETFL, flags & ~past_the_cache)
        written = real[0](file, bytes(memoryview(data)[:count]))
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return written

    def writev(file: int, views: list[memoryview]) -> int:
        assert not fcntl.fcntl(file, fcntl.F_GETFL) & past_the_cache
        return real[1](file, views)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "writev", writev)
    data = numbered(BUFFER)
    assert written(tmp_path, [data]) == data


def test_a_file_system_without_it_is_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system without direct I/O, all bytes go through the cache."""

    def refuse(file: int, command: int, argument: int = 0) -> int:
        del file, argument
        if command == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, "no")
        return 0

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    data = numbered(2 * BUFFER + 100)
    assert written(tmp_path, [data]) == data


def test_a_short_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a short write is written as well."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, memoryview(data)[:BLOCK]))
    data = numbered(2 * BUFFER + 100)
    assert written(tmp_path, [data]) == data


def test_a_full_disk_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is not about the block size is raised."""

    def full(file: int, views: Any) -> int:
        del file, views
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "write", full)
    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="full"):
        written(tmp_path, [numbered(BUFFER)])
