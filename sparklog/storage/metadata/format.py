"""Encoding of the metadata: each version is a delta, and some versions also have a snapshot.

- `meta/<version>.json` contains the version's changes, and the change id of the version before it.
  So the deltas form a chain, and a delta that was put late, after its place had been pruned, is not
  part of it.
- `meta/<version>.snapshot` contains the whole version. The delta of such a version contains the
  checksum of the snapshot. Every reader compares it with its own state, so that a release that
  applies deltas differently stops, and does not continue with a diverging state.

Additions to the format are written from a feature level on (ADR 48). The version that raises the
level has a change that older releases reject, and from then on snapshots have another magic number.
So older releases stop, whether they follow the deltas or start from a snapshot.

Before format version 3, `meta/<version>.json` contains the whole version, with `topics` as an
object. In a delta it is a list, which those releases reject.
"""

from __future__ import annotations

import zlib
from typing import Annotated, Any, Final, TypeAlias, cast

import msgspec
import pyarrow as pa

from sparklog.storage import packed
from sparklog.storage.metadata.model import (
    BrokerRegistration,
    ClusterMetadata,
    Epoch,
    Resignation,
    TopicMetadata,
)
from sparklog.storage.snapshot import WalKind

_MAGIC: Final = b"SLM1"
"""Begins a snapshot at level 1."""
_MAGIC_2: Final = b"SLM2"
"""Begins a snapshot at a higher level."""

_PLAIN_FIELDS: Final = ("controller", "next_producer_id", "security")
"""Fields of the metadata that a delta contains whole or not at all."""

_Index: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]

# ------------------------------------------------------------------------------ deltas


class TopicSet(msgspec.Struct, frozen=True, array_like=True, tag="set"):
    """A topic that is new, or has changed in more than its leaders and their resignations."""

    name: str
    topic: TopicMetadata


class LeadersMoved(msgspec.Struct, frozen=True, array_like=True, tag="lead"):
    """New leaders of some partitions: (partition, leader, leader epoch) for each."""

    name: str
    partitions: tuple[tuple[_Index, int, int], ...]


class Resigned(msgspec.Struct, frozen=True, array_like=True, tag="resign"):
    """Resignations that changed, by partition; None if there no longer is one."""

    name: str
    partitions: dict[_Index, Resignation | None]


class TopicGone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    name: str


class LevelRaised(msgspec.Struct, frozen=True, array_like=True, tag="level"):
    """The feature level, which has risen.

    It is among the changes of topics because releases without it reject unknown changes, but would
    ignore an unknown field.
    """

    level: Annotated[int, msgspec.Meta(ge=2)]


_TopicChange: TypeAlias = TopicSet | LeadersMoved | Resigned | TopicGone
_Change: TypeAlias = _TopicChange | LevelRaised


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The changes in one version. Unchanged fields are omitted."""

    version: int
    change_id: str
    previous: str
    """The change id of the version before; empty for the first."""
    topics: tuple[_Change, ...]
    brokers: dict[int, BrokerRegistration] = {}
    """Those that have changed. None is ever removed."""
    epochs: tuple[Epoch, ...] = ()
    """Open epochs that have changed, followed by the new ones."""
    closed: tuple[tuple[int, int], ...] = ()
    """Broker id and epoch of those that are no longer open."""
    open_epochs: tuple[Epoch, ...] | msgspec.UnsetType = msgspec.UNSET
    """All open epochs, if listing the changed ones is not enough, as when the order differs."""
    controller: int | msgspec.UnsetType = msgspec.UNSET
    next_producer_id: int | msgspec.UnsetType = msgspec.UNSET
    security: str | msgspec.UnsetType = msgspec.UNSET
    groups: dict[str, dict[str, str]] = {}
    """Configurations of groups that have changed, from level 2 on; an empty one is removed."""
    snapshot_crc: int | None = None
    """CRC-32 of the content of the version's snapshot; None if it has no snapshot."""


def delta_of(before: ClusterMetadata, after: ClusterMetadata) -> Delta:
    """Returns the delta that leads from `before` to `after`, without a snapshot's checksum."""
    assert after.version == before.version + 1, (before.version, after.version)
    assert before.brokers.keys() <= after.brokers.keys(), "a broker's epochs would begin again"
    plain: dict[str, Any] = {
        name: getattr(after, name)
        for name in _PLAIN_FIELDS
        if getattr(after, name) != getattr(before, name)
    }
    level = [LevelRaised(after.level)] if after.level != before.level else []
    return Delta(
        version=after.version,
        change_id=after.change_id,
        previous=before.change_id,
        topics=(*level, *_topic_changes(before.topics, after.topics)),
        groups={
            name: after.groups.get(name, {})
            for name in {**before.groups, **after.groups}
            if after.groups.get(name) != before.groups.get(name)
        },
        brokers={
            broker: known
            for broker, known in after.brokers.items()
            if known != before.brokers.get(broker)
        },
        **_epoch_changes(before.open_epochs, after.open_epochs),
        **plain,
    )


def _epoch_changes(before: tuple[Epoch, ...], after: tuple[Epoch, ...]) -> dict[str, Any]:
    """Returns the fields of a delta for the epochs: a large cluster has many, and few change."""
    known, left = {each.id: each for each in before}, {each.id for each in after}
    changed = tuple(each for each in after if known.get(each.id) != each)
    closed = tuple(each for each in known if each not in left)
    if _with_epochs(before, changed, closed) != after:
        return {"open_epochs": after}
    return {"epochs": changed, "closed": closed}


def _with_epochs(
    before: tuple[Epoch, ...], changed: tuple[Epoch, ...], closed: tuple[tuple[int, int], ...]
) -> tuple[Epoch, ...]:
    found = {each.id: each for each in (*before, *changed)}
    return tuple(each for each in found.values() if each.id not in closed)


def _topic_changes(
    before: dict[str, TopicMetadata], after: dict[str, TopicMetadata]
) -> list[_TopicChange]:
    changes: list[_TopicChange] = []
    changes.extend(TopicGone(name) for name in before if name not in after)
    for name, topic in after.items():
        old = before.get(name)
        if topic is old or topic == old:
            continue
        if old is None or not _has_only_other_leaders(old, topic):
            changes.append(TopicSet(name, topic))
            continue
        places = zip(
            zip(old.leaders, old.leader_epochs, strict=True),
            zip(topic.leaders, topic.leader_epochs, strict=True),
            strict=True,
        )
        moved = tuple((n, *new) for n, (known, new) in enumerate(places) if known != new)
        if moved:
            changes.append(LeadersMoved(name, moved))
        resigned = {
            n: topic.resigned.get(n)
            for n in sorted({*old.resigned, *topic.resigned})
            if topic.resigned.get(n) != old.resigned.get(n)
        }
        if resigned:
            changes.append(Resigned(name, resigned))
    return changes


def _has_only_other_leaders(old: TopicMetadata, new: TopicMetadata) -> bool:
    return old.partition_count == new.partition_count and old == msgspec.structs.replace(
        new, leaders=old.leaders, leader_epochs=old.leader_epochs, resigned=old.resigned
    )


def apply(before: ClusterMetadata, delta: Delta) -> ClusterMetadata:
    """Returns the version that follows `before`. Raises ValueError if the delta does not fit it."""
    if (delta.version, delta.previous) != (before.version + 1, before.change_id):
        raise ValueError(f"it does not follow version {before.version}, {before.change_id}")
    changes: dict[str, Any] = {
        name: value
        for name in _PLAIN_FIELDS
        if (value := getattr(delta, name)) is not msgspec.UNSET
    }
    if delta.open_epochs is not msgspec.UNSET:
        changes["open_epochs"] = delta.open_epochs
    elif delta.epochs or delta.closed:
        changes["open_epochs"] = _with_epochs(before.open_epochs, delta.epochs, delta.closed)
    if delta.groups:
        groups = {**before.groups, **delta.groups}
        changes["groups"] = {name: config for name, config in groups.items() if config}
    if delta.topics:
        topics = dict(before.topics)
        for change in delta.topics:
            if isinstance(change, LevelRaised):
                changes["level"] = change.level
                continue
            try:
                _apply_to_topic(topics, change)
            except (KeyError, IndexError):
                raise ValueError(f"it changes something that topic {change.name} lacks") from None
        changes["topics"] = topics
    if delta.brokers:
        changes["brokers"] = {**before.brokers, **delta.brokers}
    after = msgspec.structs.replace(
        before, version=delta.version, change_id=delta.change_id, **changes
    )
    if delta.snapshot_crc is not None and delta.snapshot_crc != zlib.crc32(content_of(after)):
        raise ValueError(
            "its checksum does not match the state that it leads to; if a broker on a newer release"
            " has put it, update this program"
        )
    return after


def _apply_to_topic(topics: dict[str, TopicMetadata], change: _TopicChange) -> None:
    match change:
        case TopicSet(name, topic):
            topics[name] = topic
        case TopicGone(name):
            del topics[name]
        case LeadersMoved(name, partitions):
            old = topics[name]
            leaders, leader_epochs = list(old.leaders), list(old.leader_epochs)
            for partition, leader, leader_epoch in partitions:
                leaders[partition], leader_epochs[partition] = leader, leader_epoch
            topics[name] = msgspec.structs.replace(
                old, leaders=tuple(leaders), leader_epochs=tuple(leader_epochs)
            )
        case Resigned(name, partitions):
            old = topics[name]
            merged = {**old.resigned, **partitions}
            resigned = {n: each for n, each in merged.items() if each is not None}
            topics[name] = msgspec.structs.replace(old, resigned=resigned)


def encode_delta(delta: Delta) -> bytes:
    """Returns the content of `meta/<version>.json`."""
    return msgspec.json.encode(delta)


def decode_version(version: int, data: bytes | pa.Buffer) -> Delta | ClusterMetadata:
    """Returns a delta, or the whole version if it is in an older format.

    Raises ValueError and `msgspec.MsgspecError` for anything else.
    """
    found: Delta | ClusterMetadata
    try:
        found = _delta_decoder.decode(data)
    except msgspec.ValidationError as error:
        try:
            found = _whole_decoder.decode(data).as_metadata()
        except msgspec.ValidationError:
            raise error from None
    if found.version != version:
        raise ValueError(f"it says that it is version {found.version}")
    return found


_delta_decoder = msgspec.json.Decoder(Delta)

# ------------------------------------------------------------------------------ snapshots


class _Content(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A whole version, in columns: of brokers sorted by id, and of topics sorted by name.

    Versions that use no new feature encode to the same bytes as before, because deltas contain
    their checksums.
    """

    version: int
    change_id: str
    broker_ids: list[int]
    brokers: list[BrokerRegistration]
    open_epochs: tuple[Epoch, ...]
    controller: int
    next_producer_id: int
    names: list[str]
    topic_ids: list[str]
    configs: list[dict[str, str]]
    leaders: list[tuple[int, ...]]
    leader_epochs: list[tuple[int, ...]]
    resigned: list[list[tuple[_Index, Resignation]]] = []
    """Resignations for each topic, by partition; empty if no topic has any."""
    level: int = 1
    groups: list[tuple[str, dict[str, str]]] = []
    """Configurations of groups, sorted by name."""
    security: str = ""


_content_encoder = msgspec.json.Encoder(order="deterministic")
_content_decoder = msgspec.json.Decoder(_Content)


def content_of(metadata: ClusterMetadata) -> bytes:
    """Encodes a whole version: the same bytes in every process, whatever the order of changes."""
    topics, brokers = sorted(metadata.topics.items()), sorted(metadata.brokers.items())
    resigned = [sorted(topic.resigned.items()) for _, topic in topics]
    return _content_encoder.encode(
        _Content(
            version=metadata.version,
            change_id=metadata.change_id,
            broker_ids=[broker for broker, _ in brokers],
            brokers=[known for _, known in brokers],
            open_epochs=cast(Any, tuple(map(_epoch_row, metadata.open_epochs))),
            controller=metadata.controller,
            next_producer_id=metadata.next_producer_id,
            names=[name for name, _ in topics],
            topic_ids=[topic.topic_id for _, topic in topics],
            configs=[topic.config for _, topic in topics],
            leaders=[topic.leaders for _, topic in topics],
            leader_epochs=[topic.leader_epochs for _, topic in topics],
            resigned=resigned if any(resigned) else [],
            level=metadata.level,
            groups=sorted(metadata.groups.items()),
            security=metadata.security,
        )
    )


def _epoch_row(epoch: Epoch) -> Epoch | tuple[int, int, WalKind]:
    """Returns the epoch without its last fields if they are empty: see `_Content`."""
    is_plain = not epoch.fenced and not epoch.heirs
    return (epoch.broker, epoch.epoch, epoch.log) if is_plain else epoch


def encode_snapshot(metadata: ClusterMetadata, content: bytes) -> bytes:
    """Returns a snapshot of the version; `content` is its `content_of`."""
    return packed.pack(_MAGIC if metadata.level == 1 else _MAGIC_2, content)


def decode_snapshot(version: int, data: pa.Buffer) -> ClusterMetadata:
    """Raises ValueError and `msgspec.MsgspecError` for anything but a snapshot of that version."""
    content = packed.unpack((_MAGIC, _MAGIC_2), data, what="a snapshot of metadata")
    found = _content_decoder.decode(content)
    if found.version != version:
        raise ValueError(f"it says that it is version {found.version}")
    columns = zip(
        found.names,
        found.topic_ids,
        found.configs,
        found.leaders,
        found.leader_epochs,
        found.resigned or [[]] * len(found.names),
        strict=True,
    )
    return ClusterMetadata(
        version=version,
        change_id=found.change_id,
        brokers=dict(zip(found.broker_ids, found.brokers, strict=True)),
        open_epochs=found.open_epochs,
        controller=found.controller,
        next_producer_id=found.next_producer_id,
        level=found.level,
        groups=dict(found.groups),
        security=found.security,
        topics={
            name: TopicMetadata(
                topic_id=topic_id,
                config=config,
                leaders=leaders,
                leader_epochs=leader_epochs,
                resigned=dict(resigned),
            )
            for name, topic_id, config, leaders, leader_epochs, resigned in columns
        },
    )


# ------------------------------------------------------------------------------ older formats


class _OldPartition(msgspec.Struct, frozen=True, kw_only=True):
    leader: int
    leader_epoch: int


class _OldTopic(msgspec.Struct, frozen=True, kw_only=True):
    topic_id: str
    partitions: tuple[_OldPartition, ...]
    config: dict[str, str] = {}


class _Whole(msgspec.Struct, frozen=True, kw_only=True):
    """A version before format version 3."""

    version: int
    change_id: str
    brokers: dict[int, BrokerRegistration] = {}
    open_epochs: tuple[Epoch, ...] = ()
    controller: int = -1
    topics: dict[str, _OldTopic] = {}
    next_producer_id: int = 0

    def as_metadata(self) -> ClusterMetadata:
        topics = {
            name: TopicMetadata(
                topic_id=topic.topic_id,
                leaders=tuple(each.leader for each in topic.partitions),
                leader_epochs=tuple(each.leader_epoch for each in topic.partitions),
                config=topic.config,
            )
            for name, topic in self.topics.items()
        }
        return ClusterMetadata(
            version=self.version,
            change_id=self.change_id,
            brokers=self.brokers,
            open_epochs=self.open_epochs,
            controller=self.controller,
            topics=topics,
            next_producer_id=self.next_producer_id,
        )


_whole_decoder = msgspec.json.Decoder(_Whole)
