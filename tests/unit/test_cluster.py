from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sparklog import errors, limits
from sparklog.clock import ManualClock
from sparklog.storage.metadata.cluster_file import open_cluster, raise_format
from sparklog.storage.metadata.model import ClusterMetadata
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import LocalStore, MemoryStore, NoFaults
from sparklog.storage.objects.faults import Operation
from tests.support.brokers import paths


def count_up(metadata: ClusterMetadata) -> ClusterMetadata:
    """A change that shows how often it was made."""
    return msgspec.structs.replace(metadata, next_producer_id=metadata.next_producer_id + 1)


def test_a_root_is_made_once(store: MemoryStore, clock: ManualClock) -> None:
    """Every later opener of a root finds the identity that the first one created."""
    first = open_cluster(store, clock=clock, create=True)
    assert open_cluster(store, clock=clock, create=True) == first
    assert open_cluster(store, clock=clock, create=False) == first
    assert first.format_version == limits.FORMAT_VERSION


def test_an_empty_place_is_no_root(store: MemoryStore, clock: ManualClock) -> None:
    """A reader creates no root, and gets an error that there is none."""
    with pytest.raises(errors.NotARoot):
        open_cluster(store, clock=clock, create=False)
    assert paths(store, "") == []


@pytest.mark.parametrize("create", [False, True])
def test_a_newer_format_is_refused(store: MemoryStore, clock: ManualClock, create: bool) -> None:
    """A root of a newer release is refused with its format, and not changed."""
    store.put("cluster.json", b'{"cluster_id":"c","format_version":99,"new":{}}')
    with pytest.raises(errors.FormatTooNew) as refused:
        open_cluster(store, clock=clock, create=create)
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
        open_cluster(store, clock=clock, create=True)
    assert corrupt.value.path == f"{store.uri}/cluster.json"
    assert store.get("cluster.json").to_pybytes() == content


@pytest.mark.parametrize("is_local", [True, False])
def test_a_folder_of_another_program_is_no_root(clock: ManualClock, is_local: bool) -> None:
    """A root is created alongside foreign files only on request, and is a root from then on."""
    store = MemoryStore(clock, is_local=is_local)
    for name in ("setup.cfg", "src/main.py", "src/util.py", "a/b/c", "topics/x"):
        store.put(name, b"theirs")
    before = paths(store, "")
    with pytest.raises(errors.RootNotEmpty, match="--allow-non-empty") as refused:
        open_cluster(store, clock=clock, create=True)
    assert refused.value.found == "a, setup.cfg, src and 1 more"
    assert paths(store, "") == before
    created = open_cluster(store, clock=clock, create=True, allow_non_empty=True)
    assert open_cluster(store, clock=clock, create=True) == created


@pytest.mark.parametrize("is_local", [True, False])
def test_a_log_that_lost_its_identity_gets_no_other(clock: ManualClock, is_local: bool) -> None:
    """If a log exists without `cluster.json`, the error says so."""
    store = MemoryStore(clock, is_local=is_local)
    open_cluster(store, clock=clock, create=True)
    MetadataStore(store, clock=clock).change(count_up)
    store.delete(["cluster.json"])
    with pytest.raises(errors.RootNotEmpty, match=r"lost its cluster\.json.*backup"):
        open_cluster(store, clock=clock, create=True)
    open_cluster(store, clock=clock, create=True, allow_non_empty=True)
    assert MetadataStore(store, clock=clock).reload().next_producer_id == 1


@pytest.mark.parametrize("is_local", [True, False])
def test_system_files_in_a_folder_do_not_prevent_a_root(clock: ManualClock, is_local: bool) -> None:
    """Hidden files, those of file systems and of the doctor, and folder markers are ignored."""
    store = MemoryStore(clock, is_local=is_local)
    for name in (".DS_Store", ".git/HEAD", "lost+found/1", "doctor/0a/writable", "topics/.keep"):
        store.put(name, b"" if name == "topics/.keep" else b"x")
    open_cluster(store, clock=clock, create=True)


def test_a_root_that_another_process_makes_meanwhile_is_joined(clock: ManualClock) -> None:
    """Files that the other process puts alongside its `cluster.json` do not count as foreign."""
    store = MemoryStore(clock, is_local=True)

    class Overtaken(NoFaults):
        def before(self, operation: Operation, _path: str) -> None:
            if operation == "list_after" and not paths(store, ""):
                open_cluster(store, clock=clock, create=True)
                MetadataStore(store, clock=clock).change(count_up)

    cluster = open_cluster(store.view(Overtaken()), clock=clock, create=True)
    assert open_cluster(store, clock=clock, create=False) == cluster


@pytest.mark.parametrize("place", ["file", "file/below"])
@pytest.mark.parametrize("create", [True, False])
def test_a_file_is_no_root(tmp_path: Path, clock: ManualClock, place: str, create: bool) -> None:
    """A file as root, or above it, is named in an error that is not retriable."""
    (tmp_path / "file").write_text("theirs")
    with pytest.raises(errors.NotARoot, match=r"file is a file\): name a folder"):
        open_cluster(LocalStore(tmp_path / place), clock=clock, create=create)


def test_a_first_start_that_was_killed_begins_again(tmp_path: Path, clock: ManualClock) -> None:
    """The temporary file of an interrupted put does not count as another program's."""
    (tmp_path / ".tmp-0123456789abcdef").write_bytes(b'{"cluster')
    for folder in ("topics", "meta", "lost+found", "wal/0"):
        (tmp_path / folder).mkdir(parents=True)
    open_cluster(LocalStore(tmp_path), clock=clock, create=True)
    assert (tmp_path / "cluster.json").is_file()


def test_older_releases_refuse_a_root_that_this_one_has_written(
    store: MemoryStore, clock: ManualClock
) -> None:
    """The format version of an older root rises with its level, and its identity stays."""
    store.put("cluster.json", b'{"cluster_id":"c","format_version":1}')
    for level, version in ((1, 3), (2, 4), (3, 5), (1, 5)):
        raised = raise_format(store, level, clock=clock)
        assert (raised.cluster_id, raised.format_version) == ("c", version)
        assert open_cluster(store, clock=clock, create=False) == raised
    assert limits.FORMAT_VERSION == 6
