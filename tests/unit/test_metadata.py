from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from sparklog import errors, limits
from sparklog.clock import ManualClock
from sparklog.storage.metadata import (
    BrokerKind,
    BrokerRegistration,
    ClusterMetadata,
    Epoch,
    MetadataStore,
    PartitionMetadata,
    TopicMetadata,
)
from sparklog.storage.objects import (
    Fault,
    LocalStore,
    MemoryStore,
    NoFaults,
    PutUnresolved,
    ScriptedFaults,
    Stat,
)
from sparklog.storage.objects.memory import Operation
from sparklog.storage.processes import Process
from tests.support.brokers import paths


def opened(store: MemoryStore, clock: ManualClock) -> MetadataStore:
    """The metadata of a root, which is created if need be."""
    meta = MetadataStore(store, clock=clock)
    meta.open(create=True)
    return meta


def count_up(metadata: ClusterMetadata) -> ClusterMetadata:
    """A change that shows how often it was made."""
    return msgspec.structs.replace(metadata, next_producer_id=metadata.next_producer_id + 1)


# ------------------------------------------------------------------------------ a root


def test_a_root_is_made_once(store: MemoryStore, clock: ManualClock) -> None:
    """Every later opener of a root finds the identity that the first one created."""
    first = MetadataStore(store, clock=clock).open(create=True)
    assert MetadataStore(store, clock=clock).open(create=True) == first
    assert MetadataStore(store, clock=clock).open(create=False) == first
    assert first.format_version == limits.FORMAT_VERSION_OBJECTS


def test_an_empty_place_is_no_root(store: MemoryStore, clock: ManualClock) -> None:
    """A reader creates no root, and gets an error that there is none."""
    with pytest.raises(errors.NotARoot):
        MetadataStore(store, clock=clock).open(create=False)
    assert paths(store, "") == []


@pytest.mark.parametrize("create", [False, True])
def test_a_newer_format_is_refused(store: MemoryStore, clock: ManualClock, create: bool) -> None:
    """A root of a newer release is refused with its format, and not changed."""
    store.put("cluster.json", b'{"cluster_id":"c","format_version":99,"new":{}}')
    with pytest.raises(errors.FormatTooNew) as refused:
        MetadataStore(store, clock=clock).open(create=create)
    assert (refused.value.found, refused.value.known) == (99, limits.FORMAT_VERSION)
    assert paths(store, "") == ["cluster.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"no json",
        b"[1]",
        b'{"cluster_id":1}',
        b'{"cluster_id":"","format_version":1}',
        b'{"cluster_id":"c","format_version":0}',
        b'{"cluster_id":"\xff","format_version":1}',
        bytes(range(256)),
    ],
)
def test_a_damaged_root_is_named(store: MemoryStore, clock: ManualClock, content: bytes) -> None:
    """A damaged or foreign `cluster.json` is not replaced, and the error names root and file."""
    store.put("cluster.json", content)
    with pytest.raises(errors.CorruptObject, match=r"another program.*backup") as corrupt:
        MetadataStore(store, clock=clock).open(create=True)
    assert corrupt.value.path == f"{store.uri}/cluster.json"
    assert store.get("cluster.json").to_pybytes() == content


@pytest.mark.parametrize("is_local", [True, False])
def test_a_folder_of_another_program_is_no_root(clock: ManualClock, is_local: bool) -> None:
    """A root is created beside foreign files only on request, and is a root from then on."""
    store = MemoryStore(clock, is_local=is_local)
    for name in ("setup.cfg", "src/main.py", "src/util.py", "a/b/c", "topics/x"):
        store.put(name, b"theirs")
    before = paths(store, "")
    with pytest.raises(errors.RootNotEmpty, match="--allow-non-empty") as refused:
        MetadataStore(store, clock=clock).open(create=True)
    assert refused.value.found == "a, setup.cfg, src and 1 more"
    assert paths(store, "") == before
    created = MetadataStore(store, clock=clock).open(create=True, allow_non_empty=True)
    assert MetadataStore(store, clock=clock).open(create=True) == created


@pytest.mark.parametrize("is_local", [True, False])
def test_a_log_that_lost_its_identity_gets_no_other(clock: ManualClock, is_local: bool) -> None:
    """If a log exists without `cluster.json`, the error says so."""
    store = MemoryStore(clock, is_local=is_local)
    opened(store, clock).change(count_up)
    store.delete(["cluster.json"])
    with pytest.raises(errors.RootNotEmpty, match=r"lost its cluster\.json.*backup"):
        MetadataStore(store, clock=clock).open(create=True)
    again = MetadataStore(store, clock=clock)
    again.open(create=True, allow_non_empty=True)
    assert again.reload().next_producer_id == 1


@pytest.mark.parametrize("is_local", [True, False])
def test_system_files_in_a_folder_do_not_prevent_a_root(clock: ManualClock, is_local: bool) -> None:
    """Hidden files, those of file systems and of the doctor, and folder markers are ignored."""
    store = MemoryStore(clock, is_local=is_local)
    for name in (".DS_Store", ".git/HEAD", "lost+found/1", "doctor/0a/writable", "topics/.keep"):
        store.put(name, b"" if name == "topics/.keep" else b"x")
    MetadataStore(store, clock=clock).open(create=True)


def test_a_root_that_another_process_makes_meanwhile_is_joined(clock: ManualClock) -> None:
    """Files that the other process puts beside its `cluster.json` do not count as foreign."""
    store = MemoryStore(clock, is_local=True)

    class Overtaken(NoFaults):
        def before(self, operation: Operation, _path: str) -> None:
            if operation == "list_after" and not paths(store, ""):
                opened(store, clock).change(count_up)

    cluster = MetadataStore(store.view(Overtaken()), clock=clock).open(create=True)
    assert MetadataStore(store, clock=clock).open(create=False) == cluster


@pytest.mark.parametrize("place", ["file", "file/below"])
@pytest.mark.parametrize("create", [True, False])
def test_a_file_is_no_root(tmp_path: Path, clock: ManualClock, place: str, create: bool) -> None:
    """A file as root, or above it, is named in an error that is not retriable."""
    (tmp_path / "file").write_text("theirs")
    with pytest.raises(errors.NotARoot, match=r"file is a file\): name a folder"):
        MetadataStore(LocalStore(tmp_path / place), clock=clock).open(create=create)


def test_a_first_start_that_was_killed_begins_again(tmp_path: Path, clock: ManualClock) -> None:
    """The temporary file of an interrupted put does not count as another program's."""
    (tmp_path / ".tmp-0123456789abcdef").write_bytes(b'{"cluster')
    for folder in ("topics", "meta", "lost+found", "wal/0"):
        (tmp_path / folder).mkdir(parents=True)
    MetadataStore(LocalStore(tmp_path), clock=clock).open(create=True)
    assert (tmp_path / "cluster.json").is_file()


def test_metadata_comes_back_as_it_was(store: MemoryStore, clock: ManualClock) -> None:
    """Every field of the metadata survives encoding and decoding."""
    topic = TopicMetadata(
        topic_id="id", partitions=(PartitionMetadata(leader=3, leader_epoch=7),), config={"k": "v"}
    )
    wanted = ClusterMetadata(
        brokers={
            3: BrokerRegistration(
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
    assert MetadataStore(store, clock=clock).reload() == after
    assert after.topic("t") == topic
    with pytest.raises(errors.UnknownTopic):
        after.topic("u")


@pytest.mark.parametrize("content", [b"", b"{}", b'{"version": 9}'])
def test_a_damaged_version_is_named(store: MemoryStore, clock: ManualClock, content: bytes) -> None:
    """An unreadable version, or one with another version's content, is refused by its path."""
    opened(store, clock).change(count_up)
    path = f"meta/{1:020d}.json"
    store.put(path, content)
    with pytest.raises(errors.CorruptObject) as corrupt:
        MetadataStore(store, clock=clock).reload()
    assert corrupt.value.path == path


def test_foreign_files_are_ignored(store: MemoryStore, clock: ManualClock) -> None:
    """Foreign files beside the versions are ignored."""
    for name in ("notes.txt", ".DS_Store", "zzz"):
        store.put(f"meta/{name}", b"")
    meta = opened(store, clock)
    for _ in range(limits.META_VERSIONS_KEPT + 20):
        meta.change(count_up)
    assert MetadataStore(store, clock=clock).reload().version == limits.META_VERSIONS_KEPT + 20


# ------------------------------------------------------------------------------ changing


def test_a_change_is_seen_by_others(store: MemoryStore, clock: ManualClock) -> None:
    """A refresh returns every change of other processes, and the same version without one."""
    ours, theirs = opened(store, clock), opened(store, clock)
    assert theirs.refresh().version == 0
    for expected in (1, 2, 3):
        ours.change(count_up)
        assert theirs.refresh() == ours.current
        assert theirs.refresh().version == expected


def test_a_decision_against_it_changes_nothing(store: MemoryStore, clock: ManualClock) -> None:
    """A decision of None changes nothing, and a refusal reaches the caller."""
    meta = opened(store, clock)
    before = meta.change(count_up)
    assert meta.change(lambda _: None) == before

    def refuse(_: ClusterMetadata) -> ClusterMetadata:
        raise errors.BadRequest(reason="no")

    with pytest.raises(errors.BadRequest):
        meta.change(refuse)
    assert meta.reload() == before


def test_no_change_is_lost_in_a_race(store: MemoryStore, clock: ManualClock) -> None:
    """Eight threads that increment one number at once lose no increment."""
    opened(store, clock)

    def work(_: int) -> None:
        meta = opened(store, clock)
        for _ in range(20):
            meta.change(count_up)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    found = MetadataStore(store, clock=clock).reload()
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
    assert MetadataStore(store, clock=clock).reload() == after


def test_old_versions_are_pruned(store: MemoryStore, clock: ManualClock) -> None:
    """The newest hundred versions remain, and ten more at most; every reader catches up."""
    meta, old = opened(store, clock), opened(store, clock)
    meta.change(count_up)
    assert old.refresh().version == 1
    for _ in range(300):
        meta.change(count_up)
    names = paths(store, "meta")
    assert limits.META_VERSIONS_KEPT <= len(names) <= limits.META_VERSIONS_KEPT + 11
    assert int(names[-1].removesuffix(".json")) == 301
    assert old.refresh().version == 301
    assert opened(store, clock).reload().version == 301


def test_a_late_put_misleads_no_reader(store: MemoryStore, clock: ManualClock) -> None:
    """A version that was put again after its pruning is not the newest for a suspended reader."""
    others, suspended = opened(store, clock), opened(store, clock)
    for _ in range(5):
        others.change(count_up)
    suspended.refresh()
    others.change(count_up)
    put_late = store.get(f"meta/{6:020d}.json")
    for _ in range(limits.META_VERSIONS_KEPT + 50):
        others.change(count_up)
    store.put_new(f"meta/{6:020d}.json", put_late)
    assert suspended.refresh() == others.current


def test_an_old_listing_is_no_loss(store: MemoryStore, clock: ManualClock) -> None:
    """A store whose listings lack the newest versions does not hide them."""

    class Late(MemoryStore):
        def list_after(self, folder: str, after: str = "") -> list[Stat]:
            return super().list_after(folder, after)[:-3]

    meta = opened(store, clock)
    for _ in range(8):
        meta.change(count_up)
    late = Late(clock)
    late._objects = store._objects
    assert MetadataStore(late, clock=clock).refresh() == meta.current


class Sleeper(NoFaults):
    """Runs an action while the first put of a version is under way."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self.meanwhile = meanwhile
        self.slept = False

    def before(self, operation: Operation, path: str, /) -> None:
        if operation == "put_new" and path.startswith("meta/") and not self.slept:
            self.slept = True
            self.meanwhile()


@pytest.mark.parametrize("age", [0, 1, 2, 5, 30])
@pytest.mark.parametrize("slept", [1, 50, 109, 110, 111, 150, 400])
def test_a_change_that_slept_through_the_pruning_is_repeated(
    store: MemoryStore, clock: ManualClock, age: int, slept: int
) -> None:
    """A put of a version that was pruned does not count, and is repeated at the end."""
    others = opened(store, clock)
    for _ in range(age):
        others.change(count_up)

    def meanwhile() -> None:
        for _ in range(slept):
            others.change(count_up)

    sleeper = opened(store.view(Sleeper(meanwhile)), clock)
    after = sleeper.change(count_up)
    assert (after.version, after.next_producer_id) == (age + slept + 1,) * 2
    assert MetadataStore(store, clock=clock).reload() == after
    versions = [int(name.removesuffix(".json")) for name in paths(store, "meta")]
    assert versions == list(range(versions[0], after.version + 1))


def test_a_sleeper_is_not_misled_by_another_one(store: MemoryStore, clock: ManualClock) -> None:
    """A put in the pruned past does not count, although another put restored its predecessor."""
    others = opened(store, clock)
    for _ in range(5):
        others.change(count_up)
    fifth = paths(store, "meta")[-1]
    put_late = store.get(f"meta/{fifth}")

    def meanwhile() -> None:
        for _ in range(limits.META_VERSIONS_KEPT + 50):
            others.change(count_up)
        store.put_new(f"meta/{fifth}", put_late)

    after = opened(store.view(Sleeper(meanwhile)), clock).change(count_up)
    assert (after.version, after.next_producer_id) == (limits.META_VERSIONS_KEPT + 56,) * 2
    assert MetadataStore(store, clock=clock).reload() == after


def test_the_first_version_is_not_made_twice(store: MemoryStore, clock: ManualClock) -> None:
    """A put of version 1 that wakes amid the pruning does not count as the first."""
    died = errors.StorageUnavailable(operation="delete", path="?", reason="died")
    fault = Fault(operation="delete", error=died, moment="after", prefix="meta")
    others = opened(store.view(ScriptedFaults(fault)), clock)

    def meanwhile() -> None:
        for _ in range(limits.META_VERSIONS_KEPT + 10):
            others.change(count_up)
        assert paths(store, "meta")[0] == f"{2:020d}.json"

    after = opened(store.view(Sleeper(meanwhile)), clock).change(count_up)
    assert (after.version, after.next_producer_id) == (limits.META_VERSIONS_KEPT + 11,) * 2
    assert MetadataStore(store, clock=clock).reload() == after


REFUSALS = (
    errors.StorageUnavailable(operation="list", path="meta", reason="down"),
    errors.RootNotWritable(root="s3://b", reason="403"),
)


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: error.code)
def test_a_change_that_was_put_is_never_reported_as_failed(
    store: MemoryStore, clock: ManualClock, refusal: errors.SparklogError
) -> None:
    """If it is unknown whether the put counts, the outcome is unknown."""
    # The first listing looks for the newest version, the second for what became of the put.
    fault = Fault(operation="list_after", error=refusal, count=2, prefix="meta")
    with pytest.raises(errors.OutcomeUnknown):
        opened(store.view(ScriptedFaults(fault)), clock).change(count_up)
    assert MetadataStore(store, clock=clock).reload().version == 1


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: error.code)
def test_a_change_counts_although_pruning_fails(
    store: MemoryStore, clock: ManualClock, refusal: errors.SparklogError
) -> None:
    """A store that refuses deletes costs space, and has no other effect."""
    faults = [Fault(operation="delete", error=refusal, count=n) for n in range(1, 99)]
    meta = opened(store.view(ScriptedFaults(*faults)), clock)
    for number in range(limits.META_VERSIONS_KEPT + 20):
        assert meta.change(count_up).next_producer_id == number + 1
    assert MetadataStore(store, clock=clock).reload() == meta.current
