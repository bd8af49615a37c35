"""Faults and power cuts of the memory store, and the delayed store."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sparklog import errors
from sparklog.clock import ManualClock
from sparklog.storage.objects import (
    DelayedStore,
    DelayFaults,
    Fault,
    MemoryStore,
    NoFaults,
    ObjectExists,
    ObjectMissing,
    PutUnresolved,
    ScriptedFaults,
    claim,
)
from sparklog.storage.objects.faults import Moment, Operation


class Crash(BaseException):
    """Ends the simulated process."""


def crash_between() -> ScriptedFaults:
    """Faults that end the process when its object is visible but not durable."""
    return ScriptedFaults(Fault(operation="put_new", moment="between", error=Crash()))


@pytest.fixture
def store() -> MemoryStore:
    """The store that all views of a test share."""
    return MemoryStore(ManualClock(), is_local=True)


def names(store: MemoryStore, folder: str = "f") -> list[str]:
    """The names in a listing."""
    return [entry.name for entry in store.list_after(folder)]


class Recorder(NoFaults):
    """Records every moment, and the objects that are visible then."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.seen: list[tuple[Moment, Operation, str, list[str]]] = []

    def before(self, operation: Operation, path: str, /) -> None:
        self.seen.append(("before", operation, path, names(self.store)))

    def between(self, operation: Operation, path: str, /) -> None:
        self.seen.append(("between", operation, path, names(self.store)))

    def after(self, operation: Operation, path: str, /) -> None:
        self.seen.append(("after", operation, path, names(self.store)))


def test_moments_of_a_put(store: MemoryStore) -> None:
    """A put has a moment before it is visible, one while it is visible, and one after it."""
    recorder = Recorder(store)
    view = store.view(recorder)
    view.put_new("f/a", b"1")
    view.put("f/b", b"2")
    assert recorder.seen == [
        ("before", "put_new", "f/a", []),
        ("between", "put_new", "f/a", ["a"]),
        ("after", "put_new", "f/a", ["a"]),
        ("before", "put", "f/b", ["a"]),
        ("between", "put", "f/b", ["a", "b"]),
        ("after", "put", "f/b", ["a", "b"]),
    ]


def test_every_operation_has_its_moments(store: MemoryStore) -> None:
    """Every operation calls its hooks with the path or folder that it concerns."""
    store.put_new("f/a", b"1")
    recorder = Recorder(store)
    view = store.view(recorder)
    view.get("f/a")
    view.get_range("f/a", 0, 1)
    view.open("f/a")
    view.stat("f/a")
    view.list_after("f")
    view.folders("f")
    view.walk("f")
    view.sync_folder("f")
    view.delete(["f/a"])
    called = [(moment, operation, path) for moment, operation, path, _ in recorder.seen]
    about_objects: list[Operation] = ["get", "get_range", "open", "stat"]
    about_folders: list[Operation] = ["list_after", "folders", "walk", "sync_folder"]
    expected = [(operation, "f/a") for operation in about_objects]
    expected += [(operation, "f") for operation in about_folders]
    expected += [("delete", "f/a")]
    assert called == [(moment, *what) for what in expected for moment in ("before", "after")]


def test_views_share_objects_not_faults(store: MemoryStore) -> None:
    """All views see an object that one view put; a fault hits only its own view."""
    view = store.view(crash_between())
    with pytest.raises(Crash):
        view.put_new("f/a", b"1")
    assert names(store.view(NoFaults())) == ["a"]
    with pytest.raises(ObjectExists):
        store.put_new("f/a", b"2")


def test_a_power_cut_takes_what_was_chosen(store: MemoryStore) -> None:
    """A power cut removes the chosen objects that are not durable; the others become durable."""
    store.put_new("f/durable", b"")
    for name in ("taken", "spared"):
        with pytest.raises(Crash):
            store.view(crash_between()).put_new(f"f/{name}", b"")
    asked: list[str] = []

    def choose(path: str) -> bool:
        asked.append(path)
        return path == "f/taken"

    store.lose_unsynced(choose)
    assert asked == ["f/spared", "f/taken"]
    assert names(store) == ["durable", "spared"]
    store.lose_unsynced(lambda _: True)
    assert names(store) == ["durable", "spared"]


def test_unflushed_bytes_outlive_no_power_cut(store: MemoryStore) -> None:
    """Without flushed bytes a synced name is empty after a power cut; a synced file keeps both."""
    for name in ("gone", "empty", "kept"):
        store.put_unflushed(f"f/{name}", b"1")
    with pytest.raises(ObjectExists):
        store.put_unflushed("f/kept", b"2")
    store.sync_files(["f/kept", "f/none"])
    store.put_unflushed("f/later", b"1")
    store.lose_unsynced(lambda path: path in ("f/empty", "f/later"))
    assert {name: store.get(f"f/{name}").to_pybytes() for name in names(store)} == {
        "gone": b"1",
        "empty": b"",
        "kept": b"1",
    }


def test_a_put_makes_the_names_in_its_folder_durable(store: MemoryStore) -> None:
    """A disk flushes a folder as a whole, with names that a process left when it died."""
    for path in ("f/a", "f/deep/b"):
        with pytest.raises(Crash):
            store.view(crash_between()).put_new(path, b"")
    store.put_unflushed("f/c", b"1")
    store.put_new("f/d", b"")
    store.lose_unsynced(lambda _: True)
    assert names(store) == ["a", "c", "d"]
    assert bytes(store.get("f/c")) == b""


def test_settle_saves_from_a_power_cut(store: MemoryStore) -> None:
    """Objects directly in a synced folder survive a power cut; deeper ones may not."""
    for path in ("f/a", "f/deep/b", "g/c"):
        with pytest.raises(Crash):
            store.view(crash_between()).put_new(path, b"")
    store.sync_folder("f")
    store.lose_unsynced(lambda _: True)
    assert [entry.name for entry in store.walk("")] == ["f/a"]


def test_a_power_cut_brings_the_old_object_back(store: MemoryStore) -> None:
    """A power cut restores a durable object, however often it was replaced since."""
    store.put("f/hint", b"old")
    store.put("f/hint", b"new", durable=False)
    store.put("f/hint", b"newer", durable=False)
    store.lose_unsynced(lambda _: True)
    assert bytes(store.get("f/hint")) == b"old"
    store.put("f/hint", b"newest")
    store.lose_unsynced(lambda _: True)
    assert bytes(store.get("f/hint")) == b"newest"


def test_claim_syncs_what_it_found(store: MemoryStore) -> None:
    """A claim that was resolved by reading back leaves the object durable."""
    landed = Fault(operation="put_new", moment="between", error=PutUnresolved("f/a", "timeout"))
    assert claim(store.view(ScriptedFaults(landed)), "f/a", b"ours", clock=ManualClock())
    with pytest.raises(Crash):
        store.view(crash_between()).put_new("f/b", b"theirs")
    assert not claim(store, "f/b", b"ours", clock=ManualClock())
    store.lose_unsynced(lambda _: True)
    assert names(store) == ["a", "b"]


def test_scripted_faults(store: MemoryStore) -> None:
    """A scripted fault is raised once, the n-th time that its operation reaches its moment."""
    gone = errors.StorageUnavailable(operation="get", path="f/a", reason="away")
    faults = ScriptedFaults(
        Fault(operation="get", error=gone, count=2, prefix="f/"),
        Fault(operation="put_new", error=PutUnresolved("f/b", "timeout"), moment="after"),
    )
    store.put_new("f/a", b"1")
    store.put_new("g/a", b"1")
    view = store.view(faults)
    view.get("f/a")
    view.get("g/a")
    view.stat("f/a")
    with pytest.raises(errors.StorageUnavailable):
        view.get("f/a")
    view.get("f/a")
    with pytest.raises(PutUnresolved):
        view.put_new("f/b", b"2")
    assert bytes(view.get("f/b")) == b"2"


def test_a_fault_before_prevents(store: MemoryStore) -> None:
    """An operation that failed before its effect has none."""
    full = errors.StorageFull(root="r", free_bytes=0, reserve_bytes=0)
    store.put_new("f/kept", b"")
    view = store.view(
        ScriptedFaults(
            Fault(operation="put_new", error=full),
            Fault(operation="put", error=full),
            Fault(operation="delete", error=full),
        )
    )
    operations: list[Callable[[], None]] = [
        lambda: view.put_new("f/a", b""),
        lambda: view.put("f/a", b""),
        lambda: view.delete(["f/kept"]),
    ]
    for operation in operations:
        with pytest.raises(errors.StorageFull):
            operation()
    assert names(store) == ["kept"]


def test_times_are_the_clocks() -> None:
    """An object has the clock's time of its put."""
    clock = ManualClock(1_000_000)
    store = MemoryStore(clock)
    store.put_new("f/a", b"")
    clock.advance(1.5)
    store.put_new("f/b", b"")
    assert [entry.modified_us for entry in store.list_after("f")] == [1_000_000, 2_500_000]


def test_delay_faults_take_time() -> None:
    """Each operation of a delayed view takes the clock's time."""
    clock = ManualClock()
    view = MemoryStore(clock).view(DelayFaults(clock, 0.02))
    view.put_new("f/a", b"")
    view.get("f/a")
    assert clock.monotonic() == pytest.approx(0.04)


def test_delayed_store_counts_and_waits(store: MemoryStore) -> None:
    """A delayed store behaves like the store inside, slower, and counts requests by operation."""
    clock = ManualClock()
    far = DelayedStore(store, 0.01, clock)
    far.put_new("f/a", b"123")
    far.put("f/b", b"4", durable=False)
    assert bytes(far.get("f/a")) == b"123"
    assert bytes(far.get_range("f/a", 1, 1)) == b"2"
    assert far.stat("f/a").size_bytes == 3
    assert [entry.name for entry in far.list_after("f", "a")] == ["b"]
    assert far.folders("") == ["f"]
    assert len(list(far.walk(""))) == 2
    with far.open("f/a") as file:
        assert file.read() == b"123"
    far.delete(["f/a", "f/b"])
    far.sync_folder("f")
    with pytest.raises(ObjectMissing):
        far.get("f/a")
    assert far.requests == {
        "put_new": 1, "put": 1, "get": 2, "get_range": 2, "stat": 2,
        "list_after": 1, "folders": 1, "walk": 1, "delete": 1,
    }  # fmt: skip
    assert clock.monotonic() == pytest.approx(0.01 * far.requests.total())
    assert (far.uri, far.is_local, far.free_bytes()) == (store.uri, True, None)
