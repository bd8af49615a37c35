from __future__ import annotations

import zlib
from collections.abc import Callable

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog import errors, limits
from sparklog.clock import ManualClock
from sparklog.storage import packed
from sparklog.storage.metadata import format as metadata_format
from sparklog.storage.metadata.format import (
    Delta,
    LeadersMoved,
    Resigned,
    TopicGone,
    TopicSet,
    apply,
    content_of,
    decode_snapshot,
    decode_version,
    delta_of,
    encode_delta,
    encode_snapshot,
)
from sparklog.storage.metadata.model import (
    BrokerKind,
    BrokerRegistration,
    ClusterMetadata,
    Epoch,
    Resignation,
    TopicMetadata,
)
from sparklog.storage.metadata.processes import Process
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import MemoryStore
from sparklog.storage.snapshot import WalKind

_IDS = st.integers(0, 2**31 - 1)
_RESIGNATIONS = st.builds(Resignation, _IDS, _IDS, st.integers(0, 2**60))
_TOPICS = st.builds(
    lambda places, topic_id, config, resigned: TopicMetadata(
        topic_id=topic_id,
        leaders=tuple(leader for leader, _ in places),
        leader_epochs=tuple(epoch for _, epoch in places),
        config=config,
        resigned=resigned,
    ),
    st.lists(st.tuples(st.integers(-1, 2**31 - 1), _IDS), max_size=6),
    st.text("0123456789abcdef", min_size=1, max_size=16),
    st.dictionaries(st.sampled_from(["retention.ms", "cleanup.policy"]), st.text(max_size=9)),
    st.dictionaries(st.integers(0, 5), _RESIGNATIONS, max_size=3),
)
_BROKERS = st.builds(
    BrokerRegistration,
    epoch=_IDS,
    flight=st.text(max_size=9),
    started_us=st.integers(0, 2**60),
    kind=st.sampled_from([*BrokerKind]).map(str),
    process=st.builds(Process, host=st.text(max_size=5), pid=_IDS),
    dead_after_seconds=st.floats(0, 1e6),
    known_level=st.sampled_from([msgspec.UNSET, 2]),
)
_EPOCHS = st.builds(
    Epoch,
    _IDS,
    _IDS,
    st.sampled_from(WalKind),
    st.booleans(),
    st.lists(_IDS, max_size=3).map(tuple),
)
_CLUSTERS = st.builds(
    ClusterMetadata,
    version=st.integers(0, 2**40),
    change_id=st.text(max_size=16),
    brokers=st.dictionaries(_IDS, _BROKERS, max_size=4),
    open_epochs=st.lists(_EPOCHS, max_size=3, unique_by=lambda each: each.id).map(tuple),
    controller=st.integers(-1, 9),
    topics=st.dictionaries(st.sampled_from("abcdef"), _TOPICS),
    next_producer_id=st.integers(0, 2**60),
    level=st.integers(1, 3),
    groups=st.dictionaries(
        st.sampled_from("ghi"),
        st.dictionaries(st.text(max_size=3), st.text(max_size=3), min_size=1),
    ),
)


@st.composite
def _changes(draw: st.DrawFn) -> tuple[ClusterMetadata, ClusterMetadata]:
    """A version, and one that follows it: with new, changed, moved and deleted topics."""
    before, other = draw(_CLUSTERS), draw(_CLUSTERS)
    topics = {name: each for name, each in before.topics.items() if draw(st.booleans())}
    for name, topic in topics.items():
        if topic.partition_count and draw(st.booleans()):
            partition = draw(st.integers(0, topic.partition_count - 1))
            leaders = [*topic.leaders]
            leaders[partition] = draw(_IDS)
            topics[name] = msgspec.structs.replace(topic, leaders=tuple(leaders))
        if draw(st.booleans()):
            resigned = draw(st.dictionaries(st.integers(0, 5), _RESIGNATIONS, max_size=3))
            topics[name] = msgspec.structs.replace(topics[name], resigned=resigned)
    changes = {
        "topics": {**topics, **other.topics} if draw(st.booleans()) else topics,
        "brokers": {**before.brokers, **other.brokers},
        "open_epochs": other.open_epochs,
        "controller": other.controller,
        "next_producer_id": other.next_producer_id,
        "level": max(other.level, before.level),
        "groups": other.groups,
    }
    chosen = {name: value for name, value in changes.items() if draw(st.booleans())}
    after = msgspec.structs.replace(
        before, version=before.version + 1, change_id=draw(st.text(max_size=16)), **chosen
    )
    return before, after


@given(_changes())
def test_a_delta_leads_to_the_version_it_was_made_of(
    versions: tuple[ClusterMetadata, ClusterMetadata],
) -> None:
    """A reader that applies the deltas has the state of the writer."""
    before, after = versions
    delta = decode_version(after.version, pa.py_buffer(encode_delta(delta_of(before, after))))
    assert isinstance(delta, Delta)
    assert apply(before, delta) == after


@given(_CLUSTERS)
def test_a_snapshot_comes_back_as_it_was(metadata: ClusterMetadata) -> None:
    """Every field survives; the order in which topics and brokers were made is not part of it."""
    content = content_of(metadata)
    found = decode_snapshot(metadata.version, pa.py_buffer(encode_snapshot(metadata, content)))
    assert found == metadata
    backwards = msgspec.structs.replace(
        metadata,
        topics=dict(reversed(metadata.topics.items())),
        brokers=dict(reversed(metadata.brokers.items())),
    )
    assert content_of(backwards) == content


# ------------------------------------------------------------------------------ deltas


def topic(*leaders: int, topic_id: str = "id", **config: str) -> TopicMetadata:
    """A topic whose partitions are in epoch 7 of their leaders."""
    return TopicMetadata(
        topic_id=topic_id, leaders=leaders, leader_epochs=(7,) * len(leaders), config=config
    )


BEFORE = ClusterMetadata(
    version=4,
    change_id="four",
    brokers={1: BrokerRegistration(epoch=3, flight="h:1")},
    controller=1,
    topics={"a": topic(1, 1, 1), "b": topic(1, topic_id="b")},
)


def test_a_delta_has_only_what_changes() -> None:
    """Leaders that move cost a few bytes each, whatever the topic has besides."""
    moved = msgspec.structs.replace(BEFORE.topics["a"], leaders=(1, 2, 1), leader_epochs=(7, 8, 7))
    after = msgspec.structs.replace(
        BEFORE, version=5, change_id="five", topics={**BEFORE.topics, "a": moved}
    )
    data = encode_delta(delta_of(BEFORE, after))
    assert msgspec.json.decode(data) == {
        "version": 5,
        "change_id": "five",
        "previous": "four",
        "topics": [["lead", "a", [[1, 2, 8]]]],
    }


def test_an_epoch_costs_a_few_bytes() -> None:
    """A delta has the epochs that changed, opened or closed, however many there are."""
    before = msgspec.structs.replace(BEFORE, open_epochs=(Epoch(1, 2), Epoch(1, 3), Epoch(2, 1)))
    changed = Epoch(1, 3, fenced=True, heirs=(2, 3)), Epoch(3, 1)
    after = msgspec.structs.replace(
        before, version=5, change_id="five", open_epochs=(changed[0], Epoch(2, 1), changed[1])
    )
    delta = delta_of(before, after)
    assert (delta.epochs, delta.closed) == (changed, ((1, 2),))
    assert delta.open_epochs is msgspec.UNSET
    assert apply(before, delta) == after
    backwards = msgspec.structs.replace(after, open_epochs=after.open_epochs[::-1])
    assert delta_of(before, backwards).open_epochs == backwards.open_epochs
    assert apply(before, delta_of(before, backwards)) == backwards


def test_a_resignation_costs_a_few_bytes() -> None:
    """A delta has the resignations that came and went, whatever others the topic has."""
    first, second = Resignation(1, 3, 9), Resignation(2, 1, 4)
    known = msgspec.structs.replace(BEFORE.topics["a"], resigned={0: first, 1: first})
    before = msgspec.structs.replace(BEFORE, topics={"a": known})
    moved = msgspec.structs.replace(
        known, leaders=(1, 1, 2), leader_epochs=(7, 7, 8), resigned={1: first, 2: second}
    )
    after = msgspec.structs.replace(before, version=5, change_id="five", topics={"a": moved})
    delta = delta_of(before, after)
    assert delta.topics == (LeadersMoved("a", ((2, 2, 8),)), Resigned("a", {0: None, 2: second}))
    decoded = decode_version(5, pa.py_buffer(encode_delta(delta)))
    assert isinstance(decoded, Delta)
    assert apply(before, decoded) == after


CONTENT = (
    b'{"version":4,"change_id":"four","broker_ids":[1],"brokers":[{"epoch":3,"flight":"h:1",'
    b'"started_us":0,"kind":"standing","process":{},"dead_after_seconds":0.0}],"open_epochs":'
    b'[[1,2,"objects"],[1,3,"objects"]],"controller":1,"next_producer_id":0,"names":["a"],'
    b'"topic_ids":["id"],"configs":[{}],"leaders":[[1,1]],"leader_epochs":[[7,7]]}'
)


def test_the_content_without_heirs_has_the_bytes_of_before() -> None:
    """Deltas of format 3 have its checksum, and were put before there were heirs."""
    metadata = msgspec.structs.replace(
        BEFORE,
        open_epochs=(Epoch(1, 2), Epoch(1, 3)),
        topics={"a": topic(1, 1)},
    )
    assert content_of(metadata) == CONTENT
    decoded = decode_snapshot(4, pa.py_buffer(encode_snapshot(metadata, CONTENT)))
    assert decoded == metadata


def test_level_1_has_the_bytes_of_before() -> None:
    """Members of releases without levels check the same checksums, and ignore no field."""
    known = BrokerRegistration(epoch=1)
    later = msgspec.structs.replace(
        BEFORE, version=5, change_id="five", brokers={**BEFORE.brokers, 9: known}
    )
    data = encode_delta(delta_of(BEFORE, later)) + content_of(later)
    assert b"level" not in data
    assert b"groups" not in data
    assert encode_snapshot(later, content_of(later)).startswith(b"SLM1")


class _DeltaOfLevel1(msgspec.Struct, kw_only=True):
    """The part of a delta that decides whether releases without level 2 accept it."""

    version: int
    topics: tuple[TopicSet | LeadersMoved | Resigned | TopicGone, ...]


def test_older_releases_stop_at_level_2() -> None:
    """Promise: after an upgrade no older release continues, neither by deltas nor by snapshots."""
    old = msgspec.json.Decoder(_DeltaOfLevel1)
    later = msgspec.structs.replace(BEFORE, version=5, change_id="five")
    assert old.decode(encode_delta(delta_of(BEFORE, later))).version == 5
    risen = msgspec.structs.replace(later, version=6, change_id="six", level=2)
    delta = delta_of(later, risen)
    assert apply(later, delta) == risen
    with pytest.raises(msgspec.ValidationError):
        old.decode(encode_delta(delta))
    snapshot = pa.py_buffer(encode_snapshot(risen, content_of(risen)))
    assert decode_snapshot(6, snapshot) == risen
    assert snapshot.to_pybytes()[:4] == b"SLM2"  # which they do not know


def test_a_snapshot_of_a_newer_release_is_not_called_damaged() -> None:
    """This release in turn says that it is to be updated, and never to delete the file."""
    data = encode_snapshot(BEFORE, content_of(BEFORE)).replace(b"SLM1", b"SLM9", 1)
    with pytest.raises(packed.NewerFormat, match="update this program"):
        decode_snapshot(4, pa.py_buffer(data))


def test_a_newer_level_is_refused_by_every_reader() -> None:
    """Promise: this release in turn stops at a level that it does not know, running or starting."""
    store, clock = MemoryStore(ManualClock()), ManualClock()
    writer, reader = MetadataStore(store, clock=clock), MetadataStore(store, clock=clock)
    writer.change(lambda metadata: metadata)
    reader.refresh()
    writer.change(lambda metadata: msgspec.structs.replace(metadata, level=limits.LEVEL))
    assert reader.refresh().level == limits.LEVEL
    newer = msgspec.structs.replace(
        writer.current, version=3, change_id="three", level=limits.LEVEL + 1
    )
    store.put(f"meta/{3:020d}.json", encode_delta(delta_of(writer.current, newer)))
    # A later version has a change that this release does not know either.
    unknown = encode_delta(Delta(version=4, change_id="four", previous="three", topics=())).replace(
        b'"topics":[]', b'"topics":[["new",1]]'
    )
    store.put(f"meta/{4:020d}.json", unknown)
    for each in (reader, MetadataStore(store, clock=clock)):
        with pytest.raises(errors.FormatTooNew, match=f"feature level {limits.LEVEL + 1}"):
            each.refresh()
    assert reader.current.level == limits.LEVEL


def test_an_older_release_refuses_a_delta() -> None:
    """Before, `topics` was an object, so that no such release takes a delta for a whole version."""
    nothing = msgspec.structs.replace(BEFORE, version=5, change_id="five")
    data = encode_delta(delta_of(BEFORE, nothing))
    with pytest.raises(msgspec.ValidationError, match=r"Expected `object`, got `array`.*topics"):
        msgspec.json.decode(data, type=metadata_format._Whole)


def test_a_broker_that_vanishes_is_refused() -> None:
    """Its epochs would begin again, and with them the names of its logs."""
    with pytest.raises(AssertionError, match="epochs"):
        delta_of(BEFORE, msgspec.structs.replace(BEFORE, version=5, brokers={}))


@pytest.mark.parametrize(
    ("delta", "reason"),
    [
        (Delta(version=6, change_id="x", previous="four", topics=()), "follow version 4"),
        (Delta(version=5, change_id="x", previous="other", topics=()), "follow version 4"),
        (Delta(version=5, change_id="x", previous="four", topics=(TopicGone("c"),)), "topic c"),
        (
            Delta(
                version=5,
                change_id="x",
                previous="four",
                topics=(LeadersMoved("a", ((3, 1, 8),)),),
            ),
            "topic a",
        ),
        (
            Delta(version=5, change_id="x", previous="four", topics=(), snapshot_crc=1),
            "newer release",
        ),
    ],
)
def test_a_delta_that_does_not_fit_is_refused(delta: Delta, reason: str) -> None:
    """No reader continues with a state that differs from the writer's."""
    with pytest.raises(ValueError, match=reason):
        apply(BEFORE, delta)


def test_a_snapshots_checksum_is_that_of_the_state() -> None:
    """A reader that arrives at the writer's state accepts it."""
    set_topic = TopicSet("c", topic(1, 2, topic_id="c"))
    delta = Delta(version=5, change_id="x", previous="four", topics=(set_topic,))
    after = apply(BEFORE, delta)
    summed = msgspec.structs.replace(delta, snapshot_crc=zlib.crc32(content_of(after)))
    assert apply(BEFORE, summed) == after


# ------------------------------------------------------------------------------ damage


def _cut(data: bytes) -> bytes:
    return data[:-1]


def _flip(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


def _other_crc(data: bytes) -> bytes:
    return data[:4] + bytes([data[4] ^ 1]) + data[5:]


@pytest.mark.parametrize(
    "damage",
    [lambda _: b"", lambda _: bytes(16), lambda _: b"SLM1" + bytes(12), _cut, _flip, _other_crc],
    ids=["empty", "zeros", "header", "cut", "bit", "checksum"],
)
def test_a_damaged_snapshot_is_refused(damage: Callable[[bytes], bytes]) -> None:
    """Nothing but the whole snapshot of that version is taken for it."""
    data = encode_snapshot(BEFORE, content_of(BEFORE))
    assert decode_snapshot(4, pa.py_buffer(data)) == BEFORE
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        decode_snapshot(4, pa.py_buffer(damage(data)))
    with pytest.raises(ValueError, match="says that it is version 4"):
        decode_snapshot(5, pa.py_buffer(data))


def test_a_damaged_snapshot_is_named(store: MemoryStore, clock: ManualClock) -> None:
    """The error has the snapshot's path."""
    path = f"meta/{4:020d}.snapshot"
    store.put(path, b"damaged")
    store.put(f"meta/{4:020d}.json", b"{}")
    with pytest.raises(errors.CorruptObject, match="delete this one") as corrupt:
        MetadataStore(store, clock=clock).reload()
    assert corrupt.value.path == path


# ------------------------------------------------------------------------------ older formats

OLD = """{
  "version": %d, "change_id": "old-%d",
  "brokers": {"1": {"epoch": 2, "flight": "h:1", "kind": "standing"}},
  "open_epochs": [[1, 2, "objects"]], "controller": 1,
  "topics": {"t": {
    "topic_id": "id", "config": {"retention.ms": "1"},
    "partitions": [{"leader": 1, "leader_epoch": 4}, {"leader": 1, "leader_epoch": 5}]
  }},
  "next_producer_id": 7
}"""


def test_a_root_of_an_older_release_continues(store: MemoryStore, clock: ManualClock) -> None:
    """Whole versions are read, and deltas follow them, before there is any snapshot."""
    for version in (3, 4, 5):
        store.put(f"meta/{version:020d}.json", (OLD % (version, version)).encode())
    meta, watcher = MetadataStore(store, clock=clock), MetadataStore(store, clock=clock)
    found = meta.reload()
    assert (found.version, found.change_id, found.next_producer_id) == (5, "old-5", 7)
    assert found.topics["t"] == TopicMetadata(
        topic_id="id", leaders=(1, 1), leader_epochs=(4, 5), config={"retention.ms": "1"}
    )
    assert found.open_epochs == (Epoch(1, 2),)
    watcher.reload()
    store.put(f"meta/{6:020d}.json", (OLD % (6, 6)).encode())  # by a broker of that release
    assert watcher.refresh().change_id == "old-6"
    after = meta.change(lambda before: msgspec.structs.replace(before, next_producer_id=8))
    assert (after.version, after.topics) == (7, found.topics)
    assert watcher.refresh() == after
    assert MetadataStore(store, clock=clock).reload() == after


def test_an_older_releases_late_put_stops_no_reader(store: MemoryStore, clock: ManualClock) -> None:
    """A whole version below those that were kept is none that the newest one descends from."""
    for version in (3, 7, 8):
        store.put(f"meta/{version:020d}.json", (OLD % (version, version)).encode())
    after = MetadataStore(store, clock=clock).change(
        lambda before: msgspec.structs.replace(before, next_producer_id=8)
    )
    assert after.version == 9
    assert MetadataStore(store, clock=clock).reload() == after
