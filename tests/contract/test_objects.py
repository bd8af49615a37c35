"""One contract for every store: a folder, memory, and a bucket on moto's S3 server.

As long tests, the same contract runs on buckets of other servers, where they are installed
(`tests.support.object_servers`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparklog import errors
from sparklog.clock import ManualClock
from sparklog.storage.metadata.cluster_file import open_cluster
from sparklog.storage.objects import (
    DelayedStore,
    LocalStore,
    MemoryStore,
    ObjectExists,
    ObjectMissing,
    Purpose,
    PutUnresolved,
    Store,
    Usage,
    claim,
    claim_all,
    counted,
    open_store,
    usages,
)
from tests.support.object_servers import SERVERS, Served, running, s3_client
from tests.support.s3 import s3_server

BUCKET = "sparklog-contract"


_BUCKETS: Final = (
    "moto",
    *(
        pytest.param(name, marks=pytest.mark.soak(mode="stores"))
        for name, server in SERVERS.items()
        if server.is_exclusive
    ),
)


@pytest.fixture(scope="session")
def served() -> Iterator[Callable[[str], Served]]:
    """The bucket of a server, by its name. Starts the server at its first use."""
    with contextlib.ExitStack() as running_servers:

        @functools.cache
        def bucket(name: str) -> Served:
            if name == "moto":
                options = running_servers.enter_context(s3_server(BUCKET))
                return Served(uri=f"s3://{BUCKET}", options=options)
            return running_servers.enter_context(running(SERVERS[name], BUCKET))

        yield bucket


@pytest.fixture
def bucket(request: pytest.FixtureRequest, served: Callable[[str], Served]) -> Served:
    """An empty folder of a bucket. By default on moto's server."""
    found = served(getattr(request, "param", "moto"))
    return replace(found, uri=f"{found.uri}/{uuid.uuid4().hex}")


on_buckets = pytest.mark.parametrize("bucket", _BUCKETS, indirect=True)


@pytest.fixture(params=["local", "memory", *_BUCKETS])
def store(request: pytest.FixtureRequest, tmp_path: Path, served: Callable[[str], Served]) -> Store:
    """An empty store of each kind."""
    match request.param:
        case "local":
            return LocalStore(tmp_path / "root")
        case "memory":
            return MemoryStore(ManualClock())
        case name:
            found = served(name)
            return open_store(f"{found.uri}/{uuid.uuid4().hex}", found.options)


def names(store: Store, folder: str, after: str = "") -> list[str]:
    """The names in a listing."""
    return [entry.name for entry in store.list_after(folder, after)]


def content(store: Store, path: str) -> bytes:
    """The whole object."""
    return bytes(store.get(path))


# ------------------------------------------------------------------------------ putting


def test_put_new_creates(store: Store) -> None:
    """An object that was put is read back, in folders that did not exist."""
    store.put_new("a/b/c", b"first")
    assert content(store, "a/b/c") == b"first"


def test_put_new_refuses(store: Store) -> None:
    """A second put at the same path is refused and does not change the first object."""
    store.put_new("a/1", b"first")
    with pytest.raises(ObjectExists) as refused:
        store.put_new("a/1", b"second")
    assert refused.value.path == "a/1"
    assert content(store, "a/1") == b"first"
    assert names(store, "a") == ["1"]


def test_put_new_has_one_winner(store: Store) -> None:
    """Exactly one of 8 threads that put at one path succeeds, and its bytes remain."""
    threads, rounds = 8, 50
    together = threading.Barrier(threads)

    def race(thread: int) -> list[bool]:
        won = []
        for number in range(rounds):
            together.wait()
            try:
                store.put_new(f"race/{number}", b"%d" % thread)
                won.append(True)
            except ObjectExists:
                won.append(False)
        return won

    with ThreadPoolExecutor(threads) as pool:
        wins = list(pool.map(race, range(threads)))
    for number, won in enumerate(zip(*wins, strict=True)):
        assert sum(won) == 1
        assert content(store, f"race/{number}") == b"%d" % won.index(True)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", b""),
        (b"one", b"one"),
        (memoryview(b"one"), b"one"),
        (pa.py_buffer(b"one"), b"one"),
        (pa.array([1, 2], pa.int32()).buffers()[1].slice(0, 8), b"\1\0\0\0\2\0\0\0"),
        (memoryview(b"\1\0\2\0").cast("H"), b"\1\0\2\0"),
        ([], b""),
        ([b"", b""], b""),
        ([b"a", memoryview(b"bc"), pa.py_buffer(b"def"), b""], b"abcdef"),
        ((b"a", b"b"), b"ab"),
        (
            [b"%04d" % number for number in range(3_000)],
            b"".join(b"%04d" % n for n in range(3_000)),
        ),
    ],
    ids=lambda _: None,
)
def test_payloads(store: Store, data: Any, expected: bytes) -> None:
    """A payload is one buffer of any kind or several in a row, and is stored as their bytes."""
    store.put_new("new", data)
    store.put("over", data)
    assert content(store, "new") == expected
    assert content(store, "over") == expected
    assert store.stat("new").size_bytes == len(expected)


def test_large_object(store: Store) -> None:
    """An object of 9 MB, above what clients split into parts, is put and read back whole."""
    part = bytes(range(256)) * 12_000
    store.put_new("large", [part, part, part])
    store.put("large-over", [part, part, part])
    assert content(store, "large") == content(store, "large-over") == part * 3


@pytest.mark.parametrize("durable", [True, False])
def test_put_replaces(store: Store, durable: bool) -> None:
    """A plain put replaces an existing object."""
    store.put("heartbeats/1.json", b"first", durable=durable)
    store.put("heartbeats/1.json", b"2nd", durable=durable)
    assert content(store, "heartbeats/1.json") == b"2nd"
    assert names(store, "heartbeats") == ["1.json"]


def test_replacing_is_atomic(store: Store) -> None:
    """A reader alongside a plain put sees the old object or the new one, whole."""
    versions = [bytes([number]) * 50_000 for number in range(20)]
    store.put("hint", versions[0])
    seen: list[bytes] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(content(store, "hint"))

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        for version in versions:
            store.put("hint", version, durable=False)
        done.set()
        watching.result()
    assert set(seen) <= set(versions)


@pytest.mark.parametrize(
    "path", ["", "/etc/x", "a/../b", "..", "./a", "a//b", "a/", "a\0b", ".tmp-a", "a/.tmp-b"]
)
def test_paths_stay_inside(store: Store, path: str) -> None:
    """An absolute path, one that climbs, and any other irregular one is refused everywhere."""
    operations: list[Callable[[], object]] = [
        lambda: store.put_new(path, b""),
        lambda: store.put(path, b""),
        lambda: store.get(path),
        lambda: store.get_range(path, 0, 1),
        lambda: store.open(path),
        lambda: store.stat(path),
        lambda: store.delete([path]),
        lambda: store.sync_files([path]),
    ]
    if path:
        operations += [
            lambda: store.list_after(path),
            lambda: store.folders(path),
            lambda: list(store.walk(path)),
            lambda: store.sync_folder(path),
            lambda: store.sweep_temporaries(path, 0),
            lambda: store.remove_folder(path),
        ]
    for operation in operations:
        with pytest.raises(ValueError, match=r"not an object path|unfinished files"):
            operation()


# ------------------------------------------------------------------------------ reading


def test_missing(store: Store) -> None:
    """Reading a missing object, or a folder, raises `ObjectMissing` with the path."""
    store.put_new("folder/object", b"x")
    for path in ("none", "folder", "folder/none", "none/none"):
        for read in (store.get, store.stat, store.open):
            with pytest.raises(ObjectMissing) as missing:
                read(path)
            assert missing.value.path == path
        for length in (0, 1):
            with pytest.raises(ObjectMissing):
                store.get_range(path, 0, length)


@pytest.mark.parametrize(
    ("start", "length", "expected"),
    [
        (0, 10, b"0123456789"),
        (0, 3, b"012"),
        (4, 2, b"45"),
        (8, 2, b"89"),
        (8, 100, b"89"),
        (0, 1 << 40, b"0123456789"),
        (10, 1, b""),
        (11, 5, b""),
        (1 << 40, 1, b""),
        (3, 0, b""),
    ],
)
def test_ranges(store: Store, start: int, length: int, expected: bytes) -> None:
    """A range has the existing bytes, and none if it begins at the end or beyond."""
    store.put_new("digits", b"0123456789")
    assert bytes(store.get_range("digits", start, length)) == expected


def test_range_of_nothing(store: Store) -> None:
    """A range of an empty object is empty."""
    store.put_new("empty", b"")
    assert bytes(store.get_range("empty", 0, 10)) == b""


def test_open_reads_at_random(store: Store) -> None:
    """An opened object knows its size, seeks, and ends at its end."""
    store.put_new("object", bytes(range(256)) * 4_000)
    with store.open("object") as file:
        assert file.size() == 1_024_000
        assert file.read_at(3, 256_001) == b"\1\2\3"
        file.seek(-2, 2)
        assert file.read(10) == b"\xfe\xff"
        assert file.read(10) == b""
        file.seek(5)
        assert [file.read(2), file.read(2), file.tell()] == [b"\5\6", b"\7\x08", 9]


def test_open_reads_parquet(store: Store) -> None:
    """Parquet reads one row group of one column through `open`."""
    table = pa.table({"offset": range(20_000), "value": [f"v{n}" for n in range(20_000)]})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=5_000)
    store.put_new("topics/t/file.parquet", sink.getvalue())
    with store.open("topics/t/file.parquet") as file:
        group = pq.ParquetFile(file).read_row_group(2, columns=["offset"])
    assert group.equals(table.select(["offset"]).slice(10_000, 5_000))


@on_buckets
def test_open_by_ranges_asks_little(bucket: Served) -> None:
    """Over a bucket, a row group of a Parquet file takes few requests, and less than the file."""
    sink = pa.BufferOutputStream()
    table = pa.table({"a": pa.array(range(400_000), pa.int64()), "b": range(400_000)})
    pq.write_table(table, sink, row_group_size=20_000, use_dictionary=False, compression="none")
    store = DelayedStore(open_store(bucket.uri, bucket.options), 0.0)
    store.put_new("f", sink.getvalue())
    with store.open("f") as file:
        assert pq.ParquetFile(file).read_row_group(7, columns=["a"]).num_rows == 20_000
    assert store.requests == {"put_new": 1, "stat": 1, "get_range": 2}


def test_a_bucket_counts_what_it_bills(bucket: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page of a listing is a request, bytes count both ways, and each view counts its own."""
    monkeypatch.setattr("sparklog.storage.objects.remote._PAGE", 2)
    store = open_store(bucket.uri, bucket.options)
    log, reads = counted(store, Purpose.LOG), counted(store, Purpose.READS)
    for number in range(5):
        log.put_new(f"f/{number}", [b"ab", b"cde"])
    log.put("f/0", b"a")
    assert reads.get("f/1") == pa.py_buffer(b"abcde")
    assert reads.get_range("f/1", 3, 9) == pa.py_buffer(b"de")
    assert [len(reads.list_after("f")), len(reads.list_after("f", "1"))] == [5, 3]
    assert [len(list(reads.walk("f"))), len(list(reads.walk("none")))] == [5, 0]
    assert reads.folders("") == ["f"]
    found = usages(store)
    assert found[Purpose.LOG] == Usage(Counter(put_new=5, put=1), written_bytes=26)
    expected = Counter(get=1, get_range=1, list_after=3 + 2, walk=3 + 1, folders=1)
    assert found[Purpose.READS] == Usage(expected, read_bytes=7)
    assert found[Purpose.OTHER] == Usage()
    assert (found[Purpose.LOG].puts, found[Purpose.READS].lists) == (6, 10)


def test_stat(store: Store) -> None:
    """A stat has path and size, and the time that a listing has, or its whole second."""
    before_us = time.time_ns() // 1_000
    store.put_new("a/b", b"12345")
    after_us = time.time_ns() // 1_000
    found = store.stat("a/b")
    assert (found.name, found.size_bytes) == ("a/b", 5)
    listed_us = store.list_after("a")[0].modified_us
    assert found.modified_us in (listed_us, listed_us // 1_000_000 * 1_000_000)
    if not isinstance(store, MemoryStore):  # which has a clock of its own
        assert before_us - 1_100_000 <= found.modified_us <= after_us + 100_000


# ------------------------------------------------------------------------------ listing


@pytest.fixture
def tree(store: Store) -> Store:
    """A store with objects in folders, each of which holds its own path."""
    for path in ("top", "w/1/10", "w/1/9", "w/1/a b%é+", "w/1/deep/er/x", "w/1/2", "w/10/1"):
        store.put_new(path, path.encode())
    store.put_new("w2/1", b"")
    return store


def test_list_after(tree: Store) -> None:
    """A listing has the objects directly in the folder, in the order of their names' bytes."""
    assert names(tree, "w/1") == ["10", "2", "9", "a b%é+"]
    assert [entry.size_bytes for entry in tree.list_after("w/1")] == [6, 5, 5, 11]
    assert names(tree, "") == ["top"]
    assert names(tree, "w") == []


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ("10", ["2", "9", "a b%é+"]),
        ("1", ["10", "2", "9", "a b%é+"]),
        ("2", ["9", "a b%é+"]),
        ("5", ["9", "a b%é+"]),
        ("a b%é+", []),
        ("zz", []),
    ],
)
def test_list_after_a_name(tree: Store, after: str, expected: list[str]) -> None:
    """A listing after a name begins above it, whether or not an object of that name exists."""
    assert names(tree, "w/1", after) == expected


def test_list_after_at_the_root(tree: Store) -> None:
    """The root can be listed after a name like any folder."""
    assert names(tree, "", "a") == ["top"]
    assert names(tree, "", "top") == []


def test_folders(tree: Store) -> None:
    """Folders are the sorted names directly below, without objects."""
    assert tree.folders("") == ["w", "w2"]
    assert tree.folders("w") == ["1", "10"]
    assert tree.folders("w/1") == ["deep"]
    assert tree.folders("w/10") == []


def test_walk(tree: Store) -> None:
    """A walk finds every object below, with names relative to the folder."""
    found = {entry.name: entry.size_bytes for entry in tree.walk("w")}
    paths = ["1/10", "1/9", "1/a b%é+", "1/deep/er/x", "1/2", "10/1"]
    assert found == {path: len(f"w/{path}".encode()) for path in paths}
    assert len(list(tree.walk(""))) == 8


def test_missing_folder(store: Store) -> None:
    """A folder that does not exist lists as empty, and is synced without an error."""
    assert store.list_after("none") == []
    assert store.list_after("none", "5") == []
    assert store.folders("none/at/all") == []
    assert list(store.walk("")) == []
    store.sync_folder("none/at/all")
    store.sync_files(["none/at/all"])
    store.sync_folder("")


def test_long_listing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing is complete beyond the number of names in one answer of a bucket."""
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "20")
    for number in range(50):
        store.put(f"many/{number:02}", b"", durable=False)
    assert names(store, "many") == [f"{number:02}" for number in range(50)]
    assert names(store, "many", "07") == [f"{number:02}" for number in range(8, 50)]
    assert sum(1 for _ in store.walk("many")) == 50


def test_long_delete(store: Store) -> None:
    """A delete takes more paths than fit into one request."""
    store.put_new("many/0500", b"")
    store.put_new("many/1500", b"")
    store.put_new("many/2500", b"")
    store.delete(f"many/{number:04}" for number in range(2_100))
    assert names(store, "many") == ["2500"]


def test_delete(tree: Store) -> None:
    """Deleting removes only the named objects, and ignores missing ones."""
    tree.delete(["w/1/10", "none", "w/1/none", "w/1/a b%é+", "top"])
    assert names(tree, "w/1") == ["2", "9"]
    assert names(tree, "w/10") == ["1"]
    tree.delete([])
    with pytest.raises(ObjectMissing):
        tree.get("top")


def test_a_folder_that_holds_something_stays(tree: Store) -> None:
    """Removing a folder removes no object, and objects can be put there again."""
    tree.remove_folder("w")
    tree.remove_folder("w/10")
    tree.remove_folder("none/at/all")
    tree.remove_folder("top")
    assert len(list(tree.walk(""))) == 8
    tree.delete(["w/10/1"])
    tree.remove_folder("w/10")
    assert tree.folders("w") == ["1"]
    tree.put_new("w/10/1", b"again")
    assert bytes(tree.get("w/10/1")) == b"again"


def test_nothing_is_left_to_sweep(tree: Store) -> None:
    """Finished puts leave nothing to sweep, and sweeping touches no object."""
    far_us = 1 << 62
    assert tree.sweep_temporaries("", far_us) == 0
    assert tree.sweep_temporaries("w/1", far_us) == 0
    assert tree.sweep_temporaries("none/at/all", far_us) == 0
    assert len(list(tree.walk(""))) == 8


def test_objects_are_put_together(store: Store) -> None:
    """Each of many objects is created, or refused by itself where its path is taken."""
    store.put_new("g/5/7", b"theirs")
    objects = [(f"g/{number % 7}/{number}", b"%d" % number) for number in range(20)]
    objects.append(("g/5/7", b"ours"))
    outcomes = store.put_all_new(objects)
    assert outcomes[:20] == [None] * 20
    assert isinstance(outcomes[20], ObjectExists)
    assert content(store, "g/5/7") == b"theirs"
    assert all(content(store, path) == data for path, data in objects[:20])
    assert store.put_all_new([]) == []


def test_a_deleted_name_is_free(store: Store) -> None:
    """After a delete the path can be put again, even if its whole folder was removed."""
    store.put_new("f/1", b"first")
    store.delete(["f/1"])
    store.put_new("f/1", b"second")
    assert content(store, "f/1") == b"second"


# ------------------------------------------------------------------------------ claim


class Flaky:
    """A store in which each call of `put_new` follows the next step of `script`.

    `landed` and `lost` give no answer, with and without an effect; `done` works as usual; an error
    is raised without an effect.
    """

    def __init__(self, inner: Store, *script: str | Exception) -> None:
        self.inner = inner
        self.script = list(script)

    def put_new(self, path: str, data: bytes) -> None:
        step = self.script.pop(0)
        if isinstance(step, Exception):
            raise step
        if step != "lost":
            self.inner.put_new(path, data)
        if step != "done":
            raise PutUnresolved(path, "no answer")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


FULL = errors.StorageFull(root="r", free_bytes=0, reserve_bytes=0)
AWAY = errors.StorageUnavailable(operation="put", path="a/1", reason="away")
CLOSED = errors.RootNotWritable(root="r", reason="closed")


def flaky_claim(store: Store, *script: str | Exception) -> tuple[bool, Flaky, ManualClock]:
    """Claims a/1 over a store that behaves like `script`; returns if "ours" won."""
    clock, flaky = ManualClock(), Flaky(store, *script)
    ours: Any = flaky
    return claim(ours, "a/1", [b"ou", b"rs"], clock=clock, attempts=4), flaky, clock


def test_claim_wins(store: Store) -> None:
    """If no object is there, a claim puts its bytes, without waiting."""
    won, _, clock = flaky_claim(store, "done")
    assert (won, content(store, "a/1"), clock.monotonic()) == (True, b"ours", 0.0)


@pytest.mark.parametrize("theirs", [b"theirs", b"ourz", b"our", b"oursandmore", b""])
def test_claim_loses(store: Store, theirs: bytes) -> None:
    """If other bytes are there, a claim is lost and changes nothing."""
    store.put_new("a/1", theirs)
    won, _, clock = flaky_claim(store, "done")
    assert (won, content(store, "a/1"), clock.monotonic()) == (False, theirs, 0.0)


def test_claim_is_ours_after_all(store: Store) -> None:
    """A claim whose put landed without an answer is won, with one put."""
    won, flaky, _ = flaky_claim(store, "landed")
    assert (won, content(store, "a/1"), flaky.script) == (True, b"ours", [])


def test_claim_finds_its_earlier_try(store: Store) -> None:
    """A claim is won if its own bytes are there already, from before a crash."""
    store.put_new("a/1", b"ours")
    assert flaky_claim(store, "done")[0] is True


def test_claim_tries_again(store: Store) -> None:
    """A claim whose put was lost puts the same bytes again, after growing pauses."""
    won, flaky, clock = flaky_claim(store, "lost", "lost", "done")
    assert (won, content(store, "a/1"), flaky.script) == (True, b"ours", [])
    assert clock.monotonic() == pytest.approx(0.1 + 0.2)


@pytest.mark.parametrize("step", ["lost", ObjectExists("a/1")])
def test_claim_stays_unknown(store: Store, step: str | Exception) -> None:
    """A claim that never learns the outcome of its puts raises `OutcomeUnknown`."""
    with pytest.raises(errors.OutcomeUnknown):
        flaky_claim(store, step, step, step, step)


@pytest.mark.parametrize("refusal", [FULL, AWAY, CLOSED], ids=lambda error: error.code)
def test_claim_passes_refusals_on(store: Store, refusal: errors.SparklogError) -> None:
    """A refusal without effect is raised at once, if no earlier try was ambiguous."""
    with pytest.raises(type(refusal)):
        flaky_claim(store, refusal)


@pytest.mark.parametrize("refusal", [FULL, AWAY, CLOSED], ids=lambda error: error.code)
def test_claim_continues_after_an_ambiguous_try(
    store: Store, refusal: errors.SparklogError
) -> None:
    """After an ambiguous try a refusal proves nothing, so the claim continues until it knows."""
    assert flaky_claim(store, "lost", refusal, "done")[0] is True
    store.delete(["a/1"])
    with pytest.raises(errors.OutcomeUnknown):
        flaky_claim(store, "lost", refusal, refusal, refusal)


@pytest.mark.parametrize("refusal", [AWAY, CLOSED], ids=lambda error: error.code)
def test_claim_is_not_refused_where_its_bytes_stand(
    store: Store, refusal: errors.SparklogError
) -> None:
    """If an object that was read back cannot be made durable, the outcome is unknown."""

    class Unsynced(Flaky):
        def sync_folder(self, folder: str) -> None:
            if len(self.script) > synced_after:
                raise refusal
            self.inner.sync_folder(folder)

    for synced_after in (1, -1):
        ours: Any = Unsynced(store, "landed", "done", "done")
        if synced_after > 0:
            assert claim(ours, "a/1", b"ours", clock=ManualClock(), attempts=3) is True
            assert ours.script == ["done"]
        else:
            with pytest.raises(errors.OutcomeUnknown):
                claim(ours, "a/1", b"ours", clock=ManualClock(), attempts=3)


def test_claims_of_many_objects_are_independent(store: Store) -> None:
    """Each claim has its own outcome, also where a put got no answer or was refused."""

    class Doubtful(Flaky):
        def put_all_new(self, objects: Sequence[tuple[str, bytes]]) -> list[Exception | None]:
            self.inner.put_all_new(objects[:2])
            unresolved = [PutUnresolved(path, "no answer") for path, _ in objects[1:4]]
            return [None, *unresolved, FULL]

    store.put_new("c/3", b"theirs")
    doubtful: Any = Doubtful(store, "done", "done", "done")
    objects = [(f"c/{number}", b"ours") for number in range(5)]
    found = claim_all(doubtful, objects, clock=ManualClock())
    assert found == [True, True, True, False, FULL]
    assert [content(store, f"c/{number}") for number in range(4)] == [b"ours"] * 3 + [b"theirs"]


def test_a_refused_claim_of_many_is_not_put_again(store: Store) -> None:
    """The object that another writer has put is read, and no bytes are written for nothing."""
    store.put_new("c/1", b"theirs")
    store.put_new("c/2", b"ours")  # an earlier try of ours, without an answer
    unable: Any = Flaky(store)
    objects = [(f"c/{number}", b"ours") for number in range(3)]
    assert claim_all(unable, objects, clock=ManualClock()) == [True, False, True]


def test_claim_is_lost_after_doubt(store: Store) -> None:
    """A claim whose first try was lost loses to another writer's object."""

    class Overtaken(Flaky):
        def put_new(self, path: str, data: bytes) -> None:
            if len(self.script) == 1:
                self.inner.put_new(path, b"theirs")
            super().put_new(path, data)

    ours: Any = Overtaken(store, "lost", "done")
    assert claim(ours, "a/1", b"ours", clock=ManualClock()) is False
    assert content(store, "a/1") == b"theirs"


def test_claims_race(store: Store) -> None:
    """Exactly one of 8 claims at one path is won."""
    with ThreadPoolExecutor(8) as pool:
        for number in range(5):
            path = f"claims/{number}"
            won = list(
                pool.map(
                    lambda who, path=path: claim(store, path, b"%d" % who, clock=ManualClock()),
                    range(8),
                )
            )
            assert sum(won) == 1
            assert content(store, path) == b"%d" % won.index(True)


# ------------------------------------------------------------------------------ opening


def test_open_store_takes_its_own_uri(
    store: Store, request: pytest.FixtureRequest, served: Callable[[str], Served]
) -> None:
    """A store's URI opens the same root again."""
    store.put_new("a", b"here")
    options = None
    if not isinstance(store, LocalStore | MemoryStore):
        options = served(request.node.callspec.params["store"]).options
    again = open_store(store.uri, options)
    assert (again.uri, type(again), again.is_local) == (store.uri, type(store), store.is_local)
    if not isinstance(store, MemoryStore):  # one that was made by hand has no place
        assert content(again, "a") == b"here"


def test_open_store_spells_folders_one_way(tmp_path: Path) -> None:
    """A folder's path, its file URI in any form, and a link to it are one root."""
    folder = tmp_path / "a b%20é"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    spellings = [
        str(folder), f"{folder}/", folder.as_uri(), folder.as_uri().replace("file://", "file:"),
        folder.as_uri().replace("file://", "file://localhost"), str(tmp_path / "link"),
    ]  # fmt: skip
    assert {open_store(spelling).uri for spelling in spellings} == {folder.as_uri()}


def test_open_store_creates_nothing(tmp_path: Path) -> None:
    """Opening a root leaves no trace; the first put creates it."""
    store = open_store(str(tmp_path / "x" / "root"))
    assert list(tmp_path.iterdir()) == []
    assert store.free_bytes()
    store.put_new("a", b"")
    assert (tmp_path / "x" / "root" / "a").exists()


def test_open_store_shares_memory() -> None:
    """A memory root is shared by all threads of a process that name it."""
    name = f"memory://{uuid.uuid4().hex}"
    open_store(name).put_new("a", b"1")
    assert content(open_store(name + "/"), "a") == b"1"
    assert open_store(name).uri == name


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3a://bucket//a/b/", "s3://bucket/a/b"),
        ("gs://bucket/a", "gs://bucket/a"),
        ("az://container/a", "az://container/a"),
    ],
)
def test_open_store_spells_buckets_one_way(
    uri: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket's URI has one canonical form, in whatever form it was given."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    assert open_store(uri).uri == expected


@pytest.mark.parametrize(
    ("uri", "options"),
    [
        ("hdfs://host/a", None),
        ("https://host/a", None),
        ("file://host/a", None),
        ("", None),
        ("file://", None),
        ("memory://", None),
        ("s3://", None),
        ("s3://key:secret@bucket/a", None),
        ("s3://key:sec/secret@bucket/a", None),
        ("s3://key:1/secret@bucket/a", None),
        ("s3://bucket/a?token=secret", None),
        ("s3://bucket/../a", None),
        ("s3://bucket", {"nonsense": "secret"}),
        ("s3://bucket", {"aws_access_key_id": "only half of secret"}),
        ("s3://bucket", {"allow_http": "perhaps"}),
        ("/tmp/a", {"aws_region": "secret"}),
        ("memory://a", {"aws_region": "secret"}),
    ],
)
def test_open_store_refuses(uri: str, options: dict[str, str] | None) -> None:
    """An invalid root is refused by an error that does not contain the credentials."""
    with pytest.raises(errors.BadOption) as refused:
        open_store(uri, options)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("option", ["allow_http", "AWS_ALLOW_HTTP", "aws_timeout", "timeout"])
def test_client_options(option: str) -> None:
    """Options of the HTTP client are accepted with and without the store's prefix."""
    value = "true" if "http" in option.lower() else "5s"
    assert open_store("s3://bucket", {option: value}).uri == "s3://bucket"


# ------------------------------------------------------------------------------ a new root


def test_a_location_with_foreign_objects_is_no_new_root(store: Store) -> None:
    """Every kind of store creates a root alongside other objects only on request."""
    store.put_new("src/main.py", b"theirs")
    clock = ManualClock()
    with pytest.raises(errors.RootNotEmpty, match="it holds src"):
        open_cluster(store, clock=clock, create=True)
    created = open_cluster(store, clock=clock, create=True, allow_non_empty=True)
    assert open_cluster(store, clock=clock, create=True) == created


def test_markers_and_neighbours_do_not_prevent_a_new_root(
    served: Callable[[str], Served],
) -> None:
    """Empty folder markers, and objects whose prefix only begins alike, are ignored."""
    found, prefix = served("moto"), uuid.uuid4().hex
    open_store(found.uri, found.options).put_new(f"{prefix}-of-others/x", b"theirs")
    client = s3_client(found.options)
    for marker in (f"{prefix}/", f"{prefix}/topics/"):
        client.put_object(Bucket=BUCKET, Key=marker, Body=b"")
    store = open_store(f"{found.uri}/{prefix}", found.options)
    open_cluster(store, clock=ManualClock(), create=True)
