"""Staged batches: sections that hold every row once, and the manifest that decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog import errors
from sparklog.clock import ManualClock
from sparklog.formats.record import PAYLOAD_SCHEMA
from sparklog.storage import wal
from sparklog.storage.objects import (
    Fault,
    MemoryStore,
    ObjectMissing,
    ScriptedFaults,
    SyncFailed,
)
from sparklog.storage.snapshot import Entry, EntryKind, Located, WalPosition
from sparklog.storage.staging import manifest
from sparklog.storage.staging.manifest import STAGED_SECTION_ROWS, Manifest, Section, StagingWriter

CLOCK = ManualClock()
QUERY = "0b7c2d4e-query"


def payload(values: Sequence[bytes | None], **columns: Any) -> pa.RecordBatch:
    """Rows of those values, with further columns of `PAYLOAD_SCHEMA` by name."""
    given = {"value": values, **columns}
    schema = pa.schema([field for field in PAYLOAD_SCHEMA if field.name in given])
    return pa.record_batch(
        [pa.array(given[field.name], field.type) for field in schema], schema=schema
    )


def stage(
    store: MemoryStore, batches: Sequence[tuple[str, int, pa.RecordBatch]], **bounds: int
) -> list[Section]:
    """Stages (topic, partition, rows) as one task."""
    writer = StagingWriter(store, query=QUERY, batch=3, clock=CLOCK, **bounds)
    for topic, partition, batch in batches:
        writer.add(topic, partition, batch)
    return writer.finish()


def values_of(store: MemoryStore, section: Section) -> list[bytes | None]:
    """The section's values, read as the broker and every reader of its log read them."""
    entry = Entry(kind=EntryKind.STAGED, count=section.rows, staged=section.ref())
    located = Located(entry, WalPosition(0, 0, 0), 0)
    rows = wal.decode_payload(entry, wal.read_payload(store, located))
    found: list[bytes | None] = rows["value"].to_pylist()
    return found


def section(path: str = f"staging/{QUERY}/3/a.arrow", **changes: Any) -> Section:
    """A section of ten bytes."""
    known = {"topic": "t", "partition": 0, "rows": 1, "start": 0, "length": 10, "crc32c": 7}
    return Section(path=path, **{**known, **changes})


# ------------------------------------------------------------------------------ staging


@settings(max_examples=60, deadline=None)
@given(
    batches=st.lists(
        st.tuples(
            st.sampled_from(["a", "b"]),
            st.integers(0, 2),
            st.lists(st.none() | st.binary(max_size=40), max_size=30),
            st.booleans(),
        ),
        max_size=12,
    ),
    file_bytes=st.integers(1, 4_000),
    section_rows=st.integers(1, 20),
    section_bytes=st.integers(1, 1_000),
)
def test_what_is_staged_comes_back_in_order(
    batches: list[tuple[str, int, list[bytes | None], bool]],
    file_bytes: int,
    section_rows: int,
    section_bytes: int,
) -> None:
    """With any bounds, each partition's sections hold its rows once, in order, and within them."""
    store = MemoryStore(clock=CLOCK)
    rows = [
        (topic, partition, payload(values, **({"key": values} if keyed else {})))
        for topic, partition, values, keyed in batches
    ]
    sections = stage(
        store, rows, file_bytes=file_bytes, section_rows=section_rows, section_bytes=section_bytes
    )
    for place in {(topic, partition) for topic, partition, _, _ in batches}:
        mine = [each for each in sections if (each.topic, each.partition) == place]
        assert [value for each in mine for value in values_of(store, each)] == [
            value for *at, values, _ in batches if tuple(at) == place for value in values
        ]
    assert all(1 <= each.rows <= section_rows for each in sections)


def test_a_section_stays_within_its_bytes() -> None:
    """Rows that are too many bytes together go into several sections."""
    store = MemoryStore(clock=CLOCK)
    sections = stage(store, [("t", 0, payload([b"x" * 1000] * 10))], section_bytes=3_000)
    assert max(each.rows for each in sections) == 2
    assert sum(each.rows for each in sections) == 10


def test_small_sections_share_a_file_and_large_ones_do_not_wait_in_memory() -> None:
    """One file for little; a new file whenever the bound of memory is reached."""
    store = MemoryStore(clock=CLOCK)
    few = stage(store, [("t", partition, payload([b"x"])) for partition in range(5)])
    assert len({each.path for each in few}) == 1
    many = stage(store, [("t", 0, payload([b"x" * 100]))] * 50, file_bytes=1_000)
    assert len({each.path for each in many}) > 4


def test_a_section_knows_its_times() -> None:
    """The bounds are of the rows with a timestamp; without any there are none."""
    store = MemoryStore(clock=CLOCK)
    timed, untimed, bare = stage(
        store,
        [
            ("t", 0, payload([b"a", b"b", b"c"], timestamp=[9, None, 4])),
            ("t", 1, payload([b"a"], timestamp=[None])),
            ("t", 2, payload([b"a"])),
        ],
    )
    assert (timed.min_timestamp_us, timed.max_timestamp_us) == (4, 9)
    assert (untimed.min_timestamp_us, untimed.max_timestamp_us) == (None, None)
    assert (bare.min_timestamp_us, bare.max_timestamp_us) == (None, None)


def test_a_section_says_how_many_rows_have_no_key() -> None:
    """A compacted topic takes none of those."""
    sections = stage(
        MemoryStore(clock=CLOCK),
        [
            ("t", 0, payload([b"a", b"b", b"c"], key=[b"k", None, b""])),
            ("t", 1, payload([b"a", b"b"])),
            ("t", 2, payload([b"a"], key=[b"k"])),
        ],
    )
    assert [each.keyless for each in sections] == [1, 2, 0]


def test_discard_leaves_nothing() -> None:
    """A task that fails takes away the files that it had put."""
    store = MemoryStore(clock=CLOCK)
    writer = StagingWriter(store, query=QUERY, batch=0, clock=CLOCK, file_bytes=100)
    for _ in range(3):
        writer.add("t", 0, payload([b"x" * 200]))
    assert list(store.walk("staging"))
    writer.discard()
    assert not list(store.walk("staging"))


def test_discard_takes_a_file_whose_put_failed_after_it_landed() -> None:
    """A task does not know what became of its last put, and takes that away too."""
    store = MemoryStore(clock=CLOCK)
    died = SyncFailed("?", "it is not known whether the file exists")
    faulty = store.view(ScriptedFaults(Fault(operation="put_new", moment="between", error=died)))
    writer = StagingWriter(faulty, query=QUERY, batch=0, clock=CLOCK, file_bytes=100)
    with pytest.raises(SyncFailed):
        writer.add("t", 0, payload([b"x" * 200]))
    assert list(store.walk("staging"))
    writer.discard()
    assert not list(store.walk("staging"))


# ------------------------------------------------------------------------------ the decision


def test_the_first_manifest_stands() -> None:
    """A rerun is given the manifest of the first run, and its own does not count."""
    store = MemoryStore(clock=CLOCK)
    first = Manifest(query=QUERY, batch=3, sections=(section(),))
    rerun = Manifest(query=QUERY, batch=3, sections=(section(rows=2),))
    assert manifest.write(store, first, CLOCK) == first
    assert manifest.write(store, rerun, CLOCK) == first
    assert manifest.read(store, rerun.path) == first


def test_a_refused_batch_is_never_driven() -> None:
    """A driver that comes after the sweeper's refusal must write a new batch."""
    store = MemoryStore(clock=CLOCK)
    late = Manifest(query=QUERY, batch=3, sections=(section(),))
    assert manifest.refuse(store, f"staging/{QUERY}/3", clock=CLOCK)
    assert manifest.load(store, late.path).refused
    with pytest.raises(errors.BadRequest, match="abandoned"):
        manifest.write(store, late, CLOCK)
    with pytest.raises(errors.BadRequest, match="abandoned"):
        manifest.read(store, late.path)


def test_a_batch_with_a_manifest_is_not_refused() -> None:
    """The sweeper that comes second loses."""
    store = MemoryStore(clock=CLOCK)
    stands = Manifest(query=QUERY, batch=3, sections=(section(),))
    manifest.write(store, stands, CLOCK)
    assert not manifest.refuse(store, f"staging/{QUERY}/3", clock=CLOCK)
    assert manifest.read(store, stands.path) == stands


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"path": "wal/1/0000000001/00000000000000000001"}, "outside its folder"),
        ({"path": f"staging/{QUERY}/3/../4/a.arrow"}, "outside its folder"),
        ({"path": f"staging/{QUERY}/30/a.arrow"}, "outside its folder"),
        ({"path": f"staging/{QUERY}/3/1-{'a' * 32}.arrow"}, "of another attempt"),
        ({"rows": 0}, "rows"),
        ({"rows": STAGED_SECTION_ROWS + 1}, "rows"),
        ({"start": -1}, "start"),
        ({"length": 0}, "length"),
        ({"partition": -1}, "partition"),
    ],
)
def test_a_malformed_section_is_refused(changes: dict[str, Any], why: str) -> None:
    """A manifest reaches nothing outside its own folder, and its numbers make sense."""
    store = MemoryStore(clock=CLOCK)
    path = f"staging/{QUERY}/3/{manifest.NAME}"
    bad = Manifest(query=QUERY, batch=3, sections=(section(**changes),))
    store.put_new(path, msgspec.json.encode(bad))
    with pytest.raises(errors.BadRequest, match=why):
        manifest.read(store, path)


@pytest.mark.parametrize(
    "path",
    [
        "cluster.json",
        "staging/q/3/other.json",
        "staging/q/-1/manifest.json",
        "staging/q/03/manifest.json",
        "staging/../3/manifest.json",
        "staging/a/b/3/manifest.json",
        "staging/q/3/manifest.json",
    ],
)
def test_only_a_manifest_that_stands_is_read(path: str) -> None:
    """A path outside of staging, or without a manifest, is a bad request."""
    with pytest.raises(errors.BadRequest):
        manifest.read(MemoryStore(clock=CLOCK), path)


def test_a_manifest_is_of_its_folder() -> None:
    """One that was copied to another batch's place is refused."""
    store = MemoryStore(clock=CLOCK)
    elsewhere = msgspec.json.encode(Manifest(query=QUERY, batch=3))
    store.put_new(f"staging/{QUERY}/4/{manifest.NAME}", elsewhere)
    with pytest.raises(errors.BadRequest, match="says that it is"):
        manifest.read(store, f"staging/{QUERY}/4/{manifest.NAME}")


@pytest.mark.parametrize("query", ["", ".", "..", ".hidden", "a/b", "a\0", "x" * 251, "ü"])
def test_a_query_must_make_a_folder_s_name(query: str) -> None:
    """Names that leave the folder, or that are not file names, are refused."""
    with pytest.raises(errors.BadRequest, match="The query name"):
        manifest.folder(query, 0)


def test_check_files_finds_what_is_whole() -> None:
    """Names that staging gives are accepted."""
    store = MemoryStore(clock=CLOCK)
    sections = stage(store, [("t", 0, payload([b"x"] * 9)), ("u", 1, payload([b"y"]))])
    Manifest(query=QUERY, batch=3, sections=tuple(sections)).check_files(store, sections)


def test_check_files_names_what_is_missing_or_short() -> None:
    """Missing and truncated files are named."""
    store = MemoryStore(clock=CLOCK)
    staged = Manifest(query=QUERY, batch=3, sections=(section(),))
    with pytest.raises(errors.MissingObject, match=r"a\.arrow"):
        staged.check_files(store, staged.sections)
    store.put_new(section().path, b"nine byte")
    with pytest.raises(errors.CorruptObject, match=r"a\.arrow .* it is 9 bytes long"):
        staged.check_files(store, staged.sections)


def test_a_section_that_rots_names_itself() -> None:
    """A changed byte is found when the section is read, by its file and range."""
    store = MemoryStore(clock=CLOCK)
    (staged,) = stage(store, [("t", 0, payload([b"x" * 100]))])
    data = bytearray(store.get(staged.path).to_pybytes())
    data[staged.length // 2] ^= 1
    store.delete([staged.path])
    store.put_new(staged.path, bytes(data))
    with pytest.raises(errors.CorruptObject, match=staged.path):
        values_of(store, staged)
    store.delete([staged.path])
    with pytest.raises(ObjectMissing):
        values_of(store, staged)
