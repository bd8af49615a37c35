"""Failures that only a folder has: a crash in the middle, a full disk, a broken disk."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparklog import errors
from sparklog.clock import ManualClock
from sparklog.storage.objects import LocalStore, ObjectExists, SyncFailed, claim
from tests.support import descriptors


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A store whose root does not exist yet."""
    return LocalStore(tmp_path / "root")


@pytest.fixture
def ready(store: LocalStore) -> LocalStore:
    """A store whose folder `f` is in use."""
    store.put_new("f/first", b"1")
    return store


def files(store: LocalStore) -> list[str]:
    """All files, including hidden ones."""
    root = Path(store.root)
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def failing(number: int) -> Callable[..., Any]:
    """A system call that fails with this errno."""

    def call(*args: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


# ------------------------------------------------------------------------------ durability


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The system calls that order a put, in order; files and folders by their paths."""
    recorded: list[tuple[str, ...]] = []

    def path_of(descriptor: int) -> str:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())

    def spy(name: str, describe: Callable[..., tuple[str, ...]]) -> None:
        real = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            recorded.append((name, *describe(*args, **options)))
            return real(*args, **options)

        monkeypatch.setattr(os, name, call)

    spy("fdatasync", lambda file: (path_of(file),))
    spy("fsync", lambda folder: (path_of(folder),))
    spy("mkdir", lambda path, *_: (path,))
    spy("link", lambda source, target, **_: (source, target))
    spy("rename", lambda source, target, **_: (source, target))
    return recorded


def test_order_of_a_put(ready: LocalStore, calls: list[tuple[str, ...]]) -> None:
    """A put flushes the bytes, then links them to their name, then flushes the folder."""
    ready.put_new("f/second", b"2")
    flush, link, last = calls
    temporary = link[1]
    assert flush == ("fdatasync", f"{ready.root}/f/{temporary}")
    assert link == ("link", temporary, "second")
    assert last == ("fsync", f"{ready.root}/f")


def test_order_of_a_joint_put(ready: LocalStore, calls: list[tuple[str, ...]]) -> None:
    """A joint put flushes the bytes of all, then links all, then flushes each folder once."""
    ready.put_new("g/first", b"1")
    del calls[:]
    paths = [f"{'fg'[number % 2]}/{number}" for number in range(40)]
    ready.put_all_new([(path, b"x") for path in paths])
    names = [call[0] for call in calls]
    assert names == ["fdatasync"] * 40 + ["link"] * 40 + ["fsync"] * 2
    assert {call[1] for call in calls[-2:]} == {f"{ready.root}/f", f"{ready.root}/g"}
    assert files(ready) == sorted(["f/first", "g/first", *paths])


def test_new_folders_of_a_joint_put_are_durable_first(
    ready: LocalStore, calls: list[tuple[str, ...]]
) -> None:
    """The entries of all new folders are flushed before anything is put into one of them."""
    ready.put_all_new([(f"t/{number}/log/x", b"x") for number in range(3)])
    root = ready.root
    before = calls[: [call[0] for call in calls].index("fdatasync")]
    made = {call[1] for call in before if call[0] == "mkdir"}
    assert made == {f"{root}/t", *(f"{root}/t/{n}{end}" for n in range(3) for end in ("", "/log"))}
    flushed = {call[1] for call in before if call[0] == "fsync"}
    assert flushed == {root, f"{root}/t", *(f"{root}/t/{n}" for n in range(3))}


@pytest.mark.parametrize("call", ["fdatasync", "fsync"])
def test_a_joint_put_that_cannot_be_flushed_ends_the_process(
    ready: LocalStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A disk that fails to flush one of many objects cannot be trusted with any."""
    monkeypatch.setattr(os, call, failing(errno.EIO))
    with pytest.raises(SyncFailed):
        ready.put_all_new([(f"f/{number}", b"x") for number in range(9)])
    assert [name for name in files(ready) if ".tmp-" in name] == []


def test_a_joint_put_without_space_is_refused_object_by_object(
    ready: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without space no object appears, and each has the refusal as its outcome."""
    monkeypatch.setattr(os, "fdatasync", failing(errno.ENOSPC))
    outcomes = ready.put_all_new([(f"f/{number}", b"x") for number in range(9)])
    assert [type(each) for each in outcomes] == [errors.StorageFull] * 9
    assert files(ready) == ["f/first"]


def test_a_joint_put_continues_where_a_folder_cannot_be_opened(
    ready: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many open files, for example, for a moment: each object is then put by itself."""
    opened, refused = os.open, list[str]()

    def refuse_once(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if path == ready.root and not refused:
            refused.append(path)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return opened(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse_once)
    assert ready.put_all_new([("a/x", b"1"), ("b/y", b"2")]) == [None, None]
    assert refused
    assert {"a/x", "b/y"} <= set(files(ready))


def test_new_folders_are_durable_first(
    store: LocalStore, tmp_path: Path, calls: list[tuple[str, ...]]
) -> None:
    """Each new folder's entry is flushed before anything is put into it, and only once."""
    store = LocalStore(tmp_path / "x" / "root")
    store.put_new("a/b/1", b"")
    root = store.root
    folders = [f"{tmp_path}/x", root, f"{root}/a", f"{root}/a/b"]
    expected = [
        call
        for folder in folders
        for call in (("mkdir", folder), ("fsync", str(Path(folder).parent)))
    ]
    assert calls[: len(expected)] == expected
    del calls[:]
    store.put_new("a/b/2", b"")
    assert [name for name, *_ in calls] == ["fdatasync", "link", "fsync"]


def test_folders_of_others_are_made_durable(
    store: LocalStore, calls: list[tuple[str, ...]]
) -> None:
    """A folder that another process created is flushed too, as its creator may have died."""
    Path(store.root, "a").mkdir(parents=True)
    del calls[:]
    store.put_new("a/1", b"")
    root = store.root
    assert calls[:2] == [("fsync", str(Path(root).parent)), ("fsync", root)]


def test_a_prepared_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An existing root may lie in an unreadable folder; a root that we create may not."""
    real = os.open

    def open_not_above(path: str, *args: Any, **options: Any) -> int:
        if path == str(tmp_path):
            raise PermissionError(errno.EACCES, "not yours")
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", open_not_above)
    (tmp_path / "prepared").mkdir()
    LocalStore(tmp_path / "prepared").put_new("f/first", b"1")
    with pytest.raises(errors.RootNotWritable):
        LocalStore(tmp_path / "made").put_new("f/first", b"1")


def test_hints_are_not_flushed(ready: LocalStore, calls: list[tuple[str, ...]]) -> None:
    """A plain put flushes file and folder only if it is to be durable."""
    ready.put("f/hint", b"", durable=False)
    assert [name for name, *_ in calls] == ["rename"]
    del calls[:]
    ready.put("f/hint", b"")
    assert [name for name, *_ in calls] == ["fdatasync", "rename", "fsync"]


def test_settle_flushes(ready: LocalStore, calls: list[tuple[str, ...]]) -> None:
    """Settling flushes the folder, and its entry in the folder above."""
    LocalStore(ready.root).sync_folder("f")
    assert ("fsync", f"{ready.root}/f") in calls
    assert ("fsync", ready.root) in calls
    assert ("fsync", str(Path(ready.root).parent)) in calls


def test_sync_files_flushes_bytes_and_names(
    ready: LocalStore, calls: list[tuple[str, ...]]
) -> None:
    """`sync_files` flushes each file's bytes, then each folder once, and ignores missing files."""
    for name in ("a", "b"):
        Path(ready.root, "f", name).write_bytes(b"by another program")
    LocalStore(ready.root).sync_files(["f/a", "f/none", "f/b", "g/none"])
    files = [("fdatasync", f"{ready.root}/f/a"), ("fdatasync", f"{ready.root}/f/b")]
    assert sorted(calls[:2]) == files  # they are flushed in parallel
    assert calls[2] == ("fsync", f"{ready.root}/f")
    assert calls.count(("fsync", f"{ready.root}/f")) == 1


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_failed_sync_of_files(
    ready: LocalStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Visible bytes that cannot be flushed are lost, even if only space is missing."""
    monkeypatch.setattr(os, "fdatasync", failing(number))
    with pytest.raises(SyncFailed):
        ready.sync_files(["f/first"])


def test_another_error_does_not_hide_a_failed_sync(ready: LocalStore) -> None:
    """Files are flushed in parallel, and the system reports a failed flush once."""

    def flush(number: int) -> None:
        raise SyncFailed("f/first", "lost") if number else MemoryError

    with pytest.raises(SyncFailed):
        ready._in_parallel(flush, [0, 1])


def test_a_lost_claim_syncs(ready: LocalStore, calls: list[tuple[str, ...]]) -> None:
    """A claim that lost flushes the folder, because the winner may have died before it did."""
    assert not claim(ready, "f/first", b"other", clock=ManualClock())
    assert ("fsync", f"{ready.root}/f") in calls


# ------------------------------------------------------------------------------ leftovers


def test_crash_leftovers_are_invisible(ready: LocalStore) -> None:
    """Unfinished files of a crash are in no listing, and do not disturb later puts."""
    Path(ready.root, "f", ".tmp-0123").write_bytes(b"half")
    assert [entry.name for entry in ready.list_after("f")] == ["first"]
    assert [entry.name for entry in ready.walk("")] == ["f/first"]
    ready.put_new("f/second", b"")
    assert files(ready) == ["f/.tmp-0123", "f/first", "f/second"]


def test_sweep_takes_the_old_ones(ready: LocalStore) -> None:
    """Sweeping removes old hidden files below the folder, and no other file."""
    now_us = time.time_ns() // 1_000
    old_us = now_us - 3_600_000_000
    for name, modified_us in ((".tmp-old", old_us), (".tmp-new", now_us), ("object", old_us)):
        path = Path(ready.root, "f", name)
        path.write_bytes(b"")
        os.utime(path, ns=(modified_us * 1_000, modified_us * 1_000))
    assert ready.sweep_temporaries("g", now_us) == 0
    assert ready.sweep_temporaries("", now_us - 60_000_000) == 1
    assert files(ready) == ["f/.tmp-new", "f/first", "f/object"]


def test_a_swept_put_is_done_again(ready: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A put whose hidden file is swept before it is linked still succeeds."""
    real = os.link

    def link(*args: Any, **options: Any) -> None:
        monkeypatch.setattr(os, "link", real)
        assert ready.sweep_temporaries("f", time.time_ns()) == 1
        real(*args, **options)

    monkeypatch.setattr(os, "link", link)
    ready.put_new("f/second", b"2")
    assert files(ready) == ["f/first", "f/second"]


def test_a_removed_folder_is_noticed(ready: LocalStore) -> None:
    """A folder that was removed with all folders above it is created again by the next put."""
    Path(ready.root, "f", "first").unlink()
    Path(ready.root, "f").rmdir()
    Path(ready.root).rmdir()
    ready.put_new("f/first", b"again")
    assert bytes(ready.get("f/first")) == b"again"


@pytest.mark.parametrize("step", ["open", "link", "fsync"])
def test_a_put_into_a_folder_that_is_swept(
    ready: LocalStore, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Sweeping empty folders loses nothing of a put, at whichever step it is."""
    sweeper, real = LocalStore(ready.root), getattr(os, step)
    tried = []

    def swept(*args: Any, **options: Any) -> Any:
        tried.append(args)
        if len(tried) < 20:
            monkeypatch.setattr(os, step, real)
            for folder in ("g/1", "g"):
                sweeper.remove_folder(folder)
            monkeypatch.setattr(os, step, swept)
        return real(*args, **options)

    Path(ready.root, "g", "1").mkdir(parents=True)
    monkeypatch.setattr("sparklog.storage.objects.local.LOCAL_PUT_ATTEMPTS", 30)
    monkeypatch.setattr(os, step, swept)
    ready.put_new("g/1/a", b"1")
    monkeypatch.undo()
    assert tried
    assert files(ready) == ["f/first", "g/1/a"]


def test_folders_of_another_process_are_removed_behind_us(ready: LocalStore) -> None:
    """A folder that another process removed and created again is made durable again."""
    sweeper = LocalStore(ready.root)
    for _ in range(3):
        ready.put_new("g/1/a", b"1")
        sweeper.delete(["g/1/a"])
        sweeper.remove_folder("g/1")
        sweeper.remove_folder("g")
        assert ready.folders("") == ["f"]
        sweeper.put_new("g/2", b"2")
        sweeper.delete(["g/2"])


def test_a_folder_that_keeps_vanishing(ready: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A put whose folder vanishes at each try ends with a retriable error."""
    monkeypatch.setattr(os, "link", failing(errno.ENOENT))
    with pytest.raises(errors.StorageUnavailable):
        ready.put_new("f/second", b"2")
    assert files(ready) == ["f/first"]


def test_many_folders(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """More folders than the store remembers work like few."""
    monkeypatch.setattr("sparklog.storage.objects.local.LOCAL_FOLDERS_REMEMBERED", 3)
    for number in range(10):
        store.put_new(f"{number}/deep/a", b"")
    assert len(store.folders("")) == 10


def test_first_puts_of_many_threads(store: LocalStore) -> None:
    """Threads that put first into the same new folders do not disturb one another."""
    together = threading.Barrier(8)
    failures: list[BaseException] = []

    def put(number: int) -> None:
        try:
            together.wait()
            for folder in range(10):
                store.put_new(f"{folder}/a/b/{number}", b"")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=put, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(files(store)) == 80


def test_no_descriptor_is_lost(ready: LocalStore, tmp_path: Path) -> None:
    """Puts, refused puts and reads leave no descriptor open."""
    before = descriptors.below(tmp_path)
    for number in range(20):
        ready.put_new(f"f/{number}", b"")
        with pytest.raises(ObjectExists):
            ready.put_new(f"f/{number}", b"")
        ready.get(f"f/{number}")
        ready.list_after("f")
    assert descriptors.below(tmp_path) == before


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("call", ["open", "writev", "fdatasync", "link"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk(
    ready: LocalStore, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """A put that meets a full disk, at whichever step, is refused and leaves no file."""
    real_open = os.open

    def open_no_more(path: str, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number))
        return real_open(path, flags, *args, **options)

    monkeypatch.setattr(os, call, open_no_more if call == "open" else failing(number))
    with pytest.raises(errors.StorageFull) as refused:
        ready.put_new("f/second", b"2")
    monkeypatch.undo()
    assert refused.value.root == ready.uri
    assert files(ready) == ["f/first"]
    ready.put_new("f/second", b"2")


FULL_VOLUME = [
    (errno.ENOSPC, 0, 0, "space"),
    (errno.ENOSPC, 0, 5_000, "space"),
    (errno.ENOSPC, 900_000, 5_000, "space"),
    (errno.ENOSPC, 900_000, 0, "inode"),
    (errno.ENOSPC, 900_000, 2, "inode"),
    (errno.EDQUOT, 900_000, 5_000, "quota"),
    (errno.EDQUOT, 0, 0, "quota"),
]
"""The system's error, the free blocks of 1 kB and the free inodes, and the missing resource."""


@pytest.mark.parametrize(("number", "blocks", "inodes", "missing"), FULL_VOLUME)
def test_a_full_disk_names_the_missing_resource(
    ready: LocalStore,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    blocks: int,
    inodes: int,
    missing: str,
) -> None:
    """Space, inodes or a quota, with what to do about it, also once it was sent to a client."""
    volume = SimpleNamespace(f_bavail=blocks, f_frsize=1_000, f_favail=inodes, f_files=10**6)
    monkeypatch.setattr(os, "statvfs", lambda _: volume)
    monkeypatch.setattr(os, "writev", failing(number))
    with pytest.raises(errors.StorageFull, match=f"^No {missing} is left") as refused:
        ready.put_new("f/second", b"2")
    assert (refused.value.missing, refused.value.free_bytes) == (missing, blocks * 1_000)
    assert ("Free some space" in str(refused.value)) == (missing == "space")
    sent = errors.revive(refused.value.code, refused.value.facts)
    assert str(sent) == str(refused.value)


def test_a_file_system_without_a_number_of_inodes(
    ready: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It creates them on demand, so it lacks space only."""
    volume = SimpleNamespace(f_bavail=900_000, f_frsize=1_000, f_favail=0, f_files=0)
    monkeypatch.setattr(os, "statvfs", lambda _: volume)
    monkeypatch.setattr(os, "writev", failing(errno.ENOSPC))
    assert ready.free_inodes() is None
    with pytest.raises(errors.StorageFull, match=r"^No space is left"):
        ready.put_new("f/second", b"2")


def test_a_full_disk_of_an_older_release() -> None:
    """Its error names no missing resource, and is readable as before."""
    facts = {"root": "file:///r", "free_bytes": 1, "reserve_bytes": 2}
    assert "No space is left for records under file:///r: 1 bytes are free" in str(
        errors.revive("storage_full", facts)
    )


def test_disk_fills_within_a_put(ready: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that runs out of space in the middle is refused as a whole."""
    real = os.writev
    written: list[int] = []

    def writev(file: int, views: list[memoryview]) -> int:
        if written:
            raise OSError(errno.ENOSPC, "full")
        written.append(real(file, [views[0][:3]]))
        return written[0]

    monkeypatch.setattr(os, "writev", writev)
    with pytest.raises(errors.StorageFull):
        ready.put_new("f/second", [b"12345", b"67890"])
    assert files(ready) == ["f/first"]


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_short_writes(ready: LocalStore, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Short writes lose no bytes, wherever they end."""
    real = os.writev

    def writev(file: int, views: list[memoryview]) -> int:
        return real(file, [memoryview(b"".join(views))[:step]])

    monkeypatch.setattr(os, "writev", writev)
    ready.put_new("f/second", [b"1", b"23", b"456", b"7890"])
    assert bytes(ready.get("f/second")) == b"1234567890"


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_forbidden(ready: LocalStore, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A root without write permission is named in the error, and no file is left."""
    monkeypatch.setattr(os, "link", failing(number))
    with pytest.raises(errors.RootNotWritable) as refused:
        ready.put_new("f/second", b"2")
    assert refused.value.root == ready.uri
    assert files(ready) == ["f/first"]


def test_a_root_below_a_file(tmp_path: Path) -> None:
    """A put below a file is refused with the file's name; a listing is empty."""
    (tmp_path / "file").write_bytes(b"")
    store = LocalStore(tmp_path / "file" / "root")
    with pytest.raises(errors.NotARoot, match="file is a file"):
        store.put_new("a", b"")
    assert store.list_after("") == []


@pytest.mark.parametrize("call", ["open", "writev"])
def test_bad_disk_before_anything_is_visible(
    ready: LocalStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """An I/O error before the link is a refusal: it surely had no effect."""
    monkeypatch.setattr(os, call, failing(errno.EIO))
    with pytest.raises(errors.StorageUnavailable):
        ready.put_new("f/second", b"2")
    monkeypatch.undo()
    assert files(ready) == ["f/first"]


# ------------------------------------------------------------------------------ a failed flush


@pytest.mark.parametrize("call", ["fdatasync", "link", "fsync", "unlink"])
def test_failed_flush(ready: LocalStore, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A disk that fails to flush, or to report a link, is not asked again."""
    monkeypatch.setattr(os, call, failing(errno.EIO))
    with pytest.raises(SyncFailed) as failed:
        ready.put_new("f/second", b"2")
    assert failed.value.path == "f/second"
    with pytest.raises(SyncFailed):
        claim(ready, "f/third", b"3", clock=ManualClock())
    monkeypatch.undo()
    assert all(Path(ready.root, path).read_bytes() for path in files(ready))


def test_failed_settle(ready: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be flushed cannot be synced."""
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(SyncFailed):
        ready.sync_folder("f")


def test_failed_flush_of_a_new_folder(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new folder whose entry cannot be flushed takes no object."""
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(SyncFailed):
        store.put_new("f/first", b"1")
    assert files(store) == []


# ------------------------------------------------------------------------------ without links


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP])
def test_without_hard_links(
    ready: LocalStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Without hard links, a rename that replaces nothing is used instead."""
    monkeypatch.setattr(os, "link", failing(number))
    for name in ("second", "third"):
        ready.put_new(f"f/{name}", b"2")
        with pytest.raises(ObjectExists):
            ready.put_new(f"f/{name}", b"other")
        assert bytes(ready.get(f"f/{name}")) == b"2"
    assert files(ready) == ["f/first", "f/second", "f/third"]


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.EINVAL, errors.RootNotWritable),
        (errno.ENOSYS, errors.RootNotWritable),
        (errno.ENOSPC, errors.StorageFull),
        (errno.EIO, SyncFailed),
    ],
)
def test_without_links_and_renames(
    ready: LocalStore,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    expected: type[Exception],
) -> None:
    """Without both, the put is refused with an error that says that it is impossible."""
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    monkeypatch.setattr("sparklog.storage.objects.local._rename_noreplace", lambda *_: number)
    with pytest.raises(expected) as refused:
        ready.put_new("f/second", b"2")
    assert files(ready) == ["f/first"]
    if expected is errors.RootNotWritable:
        assert "put-if-absent" in str(refused.value)
