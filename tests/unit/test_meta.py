from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from sparklog import errors, limits
from sparklog.clock import ManualClock
from sparklog.storage.meta import (
    Broker,
    BrokerKind,
    Epoch,
    Metadata,
    MetaStore,
    PartitionMeta,
    TopicMeta,
)
from sparklog.storage.objects import (
    Fault,
    MemoryStore,
    NoFaults,
    PutUnresolved,
    ScriptedFaults,
)
from sparklog.storage.objects.memory import Operation
from sparklog.storage.processes import Process
from tests.support.brokers import paths


@pytest.fixture
def clock() -> ManualClock:
    """A clock that stands still."""
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    """An empty place."""
    return MemoryStore(clock)


def opened(store: MemoryStore, clock: ManualClock) -> MetaStore:
    """The metadata of a root, which is made if need be."""
    meta = MetaStore(store, clock=clock)
    meta.open(create=True)
    return meta


def count_up(metadata: Metadata) -> Metadata:
    """A change that shows how often it was made."""
    return msgspec.structs.replace(metadata, next_producer_id=metadata.next_producer_id + 1)


# ------------------------------------------------------------------------------ a root


def test_a_root_is_made_once(store: MemoryStore, clock: ManualClock) -> None:
    """Whoever opens a root finds the identity that the first one gave it."""
    first = MetaStore(store, clock=clock).open(create=True)
    assert MetaStore(store, clock=clock).open(create=True) == first
    assert MetaStore(store, clock=clock).open(create=False) == first
    assert first.format_version == limits.FORMAT_VERSION


def test_an_empty_place_is_no_root(store: MemoryStore, clock: ManualClock) -> None:
    """Who only reads makes no root, and is told that there is none."""
    with pytest.raises(errors.NotARoot):
        MetaStore(store, clock=clock).open(create=False)
    assert paths(store, "") == []


@pytest.mark.parametrize("create", [False, True])
def test_a_newer_format_is_refused(store: MemoryStore, clock: ManualClock, create: bool) -> None:
    """A root of a later sparklog is named as that, and left as it is."""
    store.put("cluster.json", b'{"cluster_id":"c","format_version":99,"new":{}}')
    with pytest.raises(errors.FormatTooNew) as refused:
        MetaStore(store, clock=clock).open(create=create)
    assert (refused.value.found, refused.value.known) == (99, limits.FORMAT_VERSION)
    assert paths(store, "") == ["cluster.json"]


@pytest.mark.parametrize("content", [b"", b"{}", b"no json", b'{"cluster_id":1}'])
def test_a_damaged_root_is_named(store: MemoryStore, clock: ManualClock, content: bytes) -> None:
    """What is no `cluster.json` is not replaced by a new one."""
    store.put("cluster.json", content)
    with pytest.raises(errors.CorruptObject) as corrupt:
        MetaStore(store, clock=clock).open(create=True)
    assert corrupt.value.path == "cluster.json"


def test_metadata_comes_back_as_it_was(store: MemoryStore, clock: ManualClock) -> None:
    """Every part of the metadata survives its bytes."""
    topic = TopicMeta(
        topic_id="id", partitions=(PartitionMeta(leader=3, leader_epoch=7),), config={"k": "v"}
    )
    wanted = Metadata(
        brokers={
            3: Broker(
                epoch=7,
                flight="h:1",
                started_us=5,
                kind=BrokerKind.EMBEDDED,
                process=Process(host="h", pid=4, machine="m", started="9"),
                dead_after_seconds=6.0,
            )
        },
        open_epochs=(Epoch(3, 6), Epoch(3, 7)),
        controller=3,
        topics={"t": topic},
        next_producer_id=11,
    )
    after = opened(store, clock).change(lambda _: wanted)
    assert after == msgspec.structs.replace(wanted, version=1, change_id=after.change_id)
    assert MetaStore(store, clock=clock).reload() == after
    assert after.topic("t") == topic
    with pytest.raises(errors.UnknownTopic):
        after.topic("u")


@pytest.mark.parametrize("content", [b"", b"{}", b'{"version": 9}'])
def test_a_damaged_version_is_named(store: MemoryStore, clock: ManualClock, content: bytes) -> None:
    """A version that is none, or says that it is another, is refused by its path."""
    opened(store, clock).change(count_up)
    path = f"meta/{1:020d}.json"
    store.put(path, content)
    with pytest.raises(errors.CorruptObject) as corrupt:
        MetaStore(store, clock=clock).reload()
    assert corrupt.value.path == path


def test_strange_files_are_passed_over(store: MemoryStore, clock: ManualClock) -> None:
    """What somebody else left beside the versions is in nobody's way."""
    for name in ("notes.txt", ".DS_Store", "zzz"):
        store.put(f"meta/{name}", b"")
    meta = opened(store, clock)
    for _ in range(limits.META_VERSIONS_KEPT + 20):
        meta.change(count_up)
    assert MetaStore(store, clock=clock).reload().version == limits.META_VERSIONS_KEPT + 20


# ------------------------------------------------------------------------------ changing


def test_a_change_is_seen_by_others(store: MemoryStore, clock: ManualClock) -> None:
    """Who refreshes sees every change of somebody else, and nothing where there was none."""
    ours, theirs = opened(store, clock), opened(store, clock)
    assert theirs.refresh().version == 0
    for expected in (1, 2, 3):
        ours.change(count_up)
        assert theirs.refresh() == ours.current
        assert theirs.refresh().version == expected


def test_a_decision_against_it_changes_nothing(store: MemoryStore, clock: ManualClock) -> None:
    """None leaves everything as it is, and a refusal reaches the caller."""
    meta = opened(store, clock)
    before = meta.change(count_up)
    assert meta.change(lambda _: None) == before

    def refuse(_: Metadata) -> Metadata:
        raise errors.BadRequest(reason="no")

    with pytest.raises(errors.BadRequest):
        meta.change(refuse)
    assert meta.reload() == before


def test_no_change_is_lost_in_a_race(store: MemoryStore, clock: ManualClock) -> None:
    """Eight who change the same number at once count as far as they have counted together."""
    opened(store, clock)

    def work(_: int) -> None:
        meta = opened(store, clock)
        for _ in range(20):
            meta.change(count_up)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    found = MetaStore(store, clock=clock).reload()
    assert (found.version, found.next_producer_id) == (160, 160)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_ambiguous_change_is_made_once(
    store: MemoryStore, clock: ManualClock, moment: str
) -> None:
    """A put without an answer counts once, whether or not the first try landed."""
    error = PutUnresolved("?", "no answer")
    fault = Fault(operation="put_new", error=error, moment=moment, prefix="meta")  # type: ignore[arg-type]
    after = opened(store.view(ScriptedFaults(fault)), clock).change(count_up)
    assert (after.version, after.next_producer_id) == (1, 1)
    assert MetaStore(store, clock=clock).reload() == after


def test_old_versions_are_pruned(store: MemoryStore, clock: ManualClock) -> None:
    """The newest hundred stay, some ten more at most, and a reader of any age catches up."""
    meta, old = opened(store, clock), opened(store, clock)
    meta.change(count_up)
    assert old.refresh().version == 1
    for _ in range(300):
        meta.change(count_up)
    names = paths(store, "meta")
    assert limits.META_VERSIONS_KEPT <= len(names) <= limits.META_VERSIONS_KEPT + 11
    assert int(names[-1].removesuffix(".json")) == 301
    assert old.reload().version == 301


class Sleeper(NoFaults):
    """While the first put of a version is on its way, others do something."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self.meanwhile = meanwhile
        self.slept = False

    def before(self, operation: Operation, path: str, /) -> None:
        if operation == "put_new" and path.startswith("meta/") and not self.slept:
            self.slept = True
            self.meanwhile()


@pytest.mark.parametrize("age", [0, 1, 2, 5, 30])
@pytest.mark.parametrize("slept", [1, 50, 109, 110, 111, 150, 400])
def test_who_slept_through_the_pruning_changes_the_newest(
    store: MemoryStore, clock: ManualClock, age: int, slept: int
) -> None:
    """A put where a pruned version once stood counts for nothing, and is made again at the end."""
    others = opened(store, clock)
    for _ in range(age):
        others.change(count_up)

    def meanwhile() -> None:
        for _ in range(slept):
            others.change(count_up)

    sleeper = opened(store.view(Sleeper(meanwhile)), clock)
    after = sleeper.change(count_up)
    assert (after.version, after.next_producer_id) == (age + slept + 1,) * 2
    assert MetaStore(store, clock=clock).reload() == after
    versions = [int(name.removesuffix(".json")) for name in paths(store, "meta")]
    assert versions == list(range(versions[0], after.version + 1))


def test_the_first_version_is_not_made_twice(store: MemoryStore, clock: ManualClock) -> None:
    """A sleeper that wakes amid the pruning does not take its put of version 1 for the first."""
    died = errors.StorageUnavailable(operation="delete", path="?", reason="died")
    fault = Fault(operation="delete", error=died, moment="after", prefix="meta")
    others = opened(store.view(ScriptedFaults(fault)), clock)

    def meanwhile() -> None:
        for _ in range(limits.META_VERSIONS_KEPT + 10):
            others.change(count_up)
        assert paths(store, "meta")[0] == f"{2:020d}.json"

    after = opened(store.view(Sleeper(meanwhile)), clock).change(count_up)
    assert (after.version, after.next_producer_id) == (limits.META_VERSIONS_KEPT + 11,) * 2
    assert MetaStore(store, clock=clock).reload() == after


def test_a_change_that_was_put_is_never_said_to_have_failed(
    store: MemoryStore, clock: ManualClock
) -> None:
    """Where it cannot be told whether the put counts, the outcome is unknown."""
    down = errors.StorageUnavailable(operation="list", path="meta", reason="down")
    # The first listing looks for the newest version, the second for what became of the put.
    fault = Fault(operation="list_after", error=down, count=2, prefix="meta")
    with pytest.raises(errors.OutcomeUnknown):
        opened(store.view(ScriptedFaults(fault)), clock).change(count_up)
    assert MetaStore(store, clock=clock).reload().version == 1
