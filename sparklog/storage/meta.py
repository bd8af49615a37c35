"""The cluster's metadata: one whole immutable snapshot a version, changed by compare and swap.

`meta/<version>.json` is created only if absent. Old versions are pruned, so a put at v by somebody
who slept through the pruning may succeed where v once stood; it counts only if v-1 stands and
nothing newer, after it. `cluster.json` is created once and says what this root is. Fields that a
newer writer has added are ignored.
"""

from __future__ import annotations

import contextlib
import enum
import secrets
from collections.abc import Callable
from typing import Final

import msgspec

from sparklog import errors, limits
from sparklog.clock import Clock
from sparklog.storage.objects import ObjectMissing, Store, claim
from sparklog.storage.processes import Process

_CLUSTER: Final = "cluster.json"
_FOLDER: Final = "meta"
_PRUNE_EVERY: Final = 10


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """`cluster.json`."""

    cluster_id: str
    format_version: int


class BrokerKind(enum.StrEnum):
    """How a broker was started, which decides who gives way to whom."""

    STANDING = "standing"
    """By `sparklog broker`: takes over from the other kinds by itself."""
    EMBEDDED = "embedded"
    """Inside a program that opened the root, and ends with it."""
    DETACHED = "detached"
    """As a process of its own for a program that needed one; leaves when it is idle."""


class Broker(msgspec.Struct, frozen=True, kw_only=True):
    """The newest epoch of a broker id and where it serves. Kept for ever: epochs never repeat."""

    epoch: int
    flight: str = ""
    started_us: int = 0
    """Wall time of its host; for people."""
    kind: str = BrokerKind.STANDING
    process: Process = Process()
    dead_after_seconds: float = 0.0
    """For how long it may be silent before others take it for dead; 0: it did not say."""


class PartitionMeta(msgspec.Struct, frozen=True, kw_only=True):
    leader: int
    leader_epoch: int


class TopicMeta(msgspec.Struct, frozen=True, kw_only=True):
    topic_id: str
    partitions: tuple[PartitionMeta, ...]
    config: dict[str, str] = {}


class Epoch(msgspec.Struct, frozen=True, array_like=True, order=True):
    """An epoch of a broker whose WAL may still hold what is not published."""

    broker: int
    epoch: int


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """One version of the whole. `change_id` tells two writers of the same version apart."""

    version: int = 0
    change_id: str = ""
    brokers: dict[int, Broker] = {}
    open_epochs: tuple[Epoch, ...] = ()
    controller: int = -1
    topics: dict[str, TopicMeta] = {}
    next_producer_id: int = 0

    def topic(self, name: str) -> TopicMeta:
        """Raises `UnknownTopic`."""
        found = self.topics.get(name)
        if found is None:
            raise errors.UnknownTopic(topic=name)
        return found


_decoder = msgspec.json.Decoder(Metadata)


def _path(version: int) -> str:
    return f"{_FOLDER}/{version:020d}.json"


class MetaStore:
    """Reads and changes the metadata of one root."""

    def __init__(self, store: Store, *, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self.current = Metadata()

    def open(self, *, create: bool) -> Cluster:
        """Checks what the root is; with `create`, makes an empty one a root.

        Raises `NotARoot`, `FormatTooNew`, `RootNotWritable`, `CorruptObject`.
        """
        if create and not self._exists():
            cluster = Cluster(
                cluster_id=secrets.token_urlsafe(16), format_version=limits.FORMAT_VERSION
            )
            claim(self._store, _CLUSTER, msgspec.json.encode(cluster), clock=self._clock)
        try:
            data = self._store.get(_CLUSTER)
        except ObjectMissing:
            raise errors.NotARoot(root=self._store.uri, reason=f"it has no {_CLUSTER}") from None
        try:
            cluster = msgspec.json.decode(data, type=Cluster)
        except msgspec.MsgspecError as error:
            raise errors.CorruptObject(path=_CLUSTER, check=str(error)) from error
        if cluster.format_version > limits.FORMAT_VERSION:
            raise errors.FormatTooNew(
                root=self._store.uri, found=cluster.format_version, known=limits.FORMAT_VERSION
            )
        return cluster

    def _exists(self) -> bool:
        try:
            self._store.get(_CLUSTER)
        except ObjectMissing:
            return False
        return True

    def refresh(self) -> Metadata:
        """The newest version; costs one failed probe where nothing has changed."""
        if self.current.version == 0:
            return self.reload()
        while True:
            found = self._read(self.current.version + 1)
            if found is None:
                break
            self.current = found
        return self.current

    def reload(self) -> Metadata:
        """The newest version by listing: right even after so long that versions were pruned."""
        while True:
            versions = self._versions()
            if not versions:
                return self.current
            found = self._read(versions[-1])
            if found is not None:
                self.current = found
                return self.refresh()

    def _versions(self) -> list[int]:
        """The versions that stand, rising."""
        names = [stat.name.partition(".")[0] for stat in self._store.list_after(_FOLDER)]
        return [int(name) for name in names if name.isdecimal()]

    def _read(self, version: int) -> Metadata | None:
        path = _path(version)
        try:
            data = self._store.get(path)
        except ObjectMissing:
            return None
        try:
            found = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise errors.CorruptObject(path=path, check=str(error)) from error
        if found.version != version:
            raise errors.CorruptObject(path=path, check=f"says that it is version {found.version}")
        return found

    def change(self, decide: Callable[[Metadata], Metadata | None]) -> Metadata:
        """Puts what `decide` makes of the newest version; asks it again whenever another was first.

        `decide` returns None where nothing is to be changed, and raises to refuse. Raises
        `OutcomeUnknown` where the change may have been made, and what the store raises where not.
        """
        while True:
            before = self.reload()
            wanted = decide(before)
            if wanted is None:
                return before
            version = before.version + 1
            after = msgspec.structs.replace(wanted, version=version, change_id=secrets.token_hex(8))
            path = _path(version)
            if not claim(self._store, path, msgspec.json.encode(after), clock=self._clock):
                continue
            try:
                counts = self._counts(version)
            except errors.Retriable as error:
                raise errors.OutcomeUnknown(what=f"put of {path}", reason=str(error)) from error
            if counts:
                self.current = after
                with contextlib.suppress(errors.Retriable):  # the next time will do as well
                    self._prune(version)
                return after
            self._store.delete([path])

    def _counts(self, version: int) -> bool:
        """Whether our put at `version` stands at the end of the history, not in its pruned past.

        Versions are pruned in order, so one that was pruned has no predecessor any more; and a
        newer one that was built on ours follows it at once. The first has no predecessor at all:
        it is in the past once there are so many that pruning has begun.
        """
        versions = self._versions()
        newest = versions[-1]
        if version == 1 and newest > limits.META_VERSIONS_KEPT:
            return False
        follows = version == 1 or version - 1 in versions
        return follows and (newest == version or version + 1 in versions)

    def _prune(self, version: int) -> None:
        if version % _PRUNE_EVERY == 0:
            for old in self._versions():
                if old >= version - limits.META_VERSIONS_KEPT:
                    break
                self._store.delete([_path(old)])  # one by one: the order matters
