"""Cluster metadata: immutable snapshots, one per version, changed by compare-and-swap.

`meta/<version>.json` is created only if absent. Old versions are pruned. A process that was
suspended during the pruning may therefore succeed in putting a version v that existed before; its
put counts only if, afterwards, v-1 exists and no newer version does. `cluster.json` is created once
and identifies the root; only its format version changes. Fields that a newer release has added are
ignored.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import secrets
from collections.abc import Callable
from typing import Annotated, Final

import msgspec
import pyarrow as pa

from sparklog import errors, limits
from sparklog.clock import Clock
from sparklog.storage.objects import ObjectMissing, Store, claim
from sparklog.storage.processes import Process
from sparklog.storage.snapshot import WalKind

_CLUSTER: Final = "cluster.json"
_FOLDER: Final = "meta"
_PRUNE_EVERY: Final = 10
_OWN_FOLDERS: Final = (_FOLDER, "heartbeats", "wal", "topics", "staging")
_IGNORED: Final = ("doctor", "lost+found", "desktop.ini", "Thumbs.db")
_NAMES_SHOWN: Final = 3
_PAGE: Final = 1_000
_LOST: Final = (
    f"These belong to a log that has lost its {_CLUSTER}: restore that file from a backup. Without"
    " one, `sparklog broker --allow-non-empty` continues the log under a new cluster id"
)


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `cluster.json`. The format version rises with the first log in segments."""

    cluster_id: Annotated[str, msgspec.Meta(min_length=1)]
    format_version: Annotated[int, msgspec.Meta(ge=1)]


class BrokerKind(enum.StrEnum):
    """The way in which a broker was started; decides which broker gives way to which."""

    STANDING = "standing"
    """Started by `sparklog broker`; replaces the other kinds without being asked."""
    EMBEDDED = "embedded"
    """Started inside a program that opened the root; ends with the program."""
    DETACHED = "detached"
    """Started as a process of its own by a program that needed a broker; stops when idle."""


class BrokerRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """The newest epoch of a broker id, and its address. Kept for ever, so epochs never repeat."""

    epoch: int
    flight: str = ""
    started_us: int = 0
    """Wall time of the broker's host; for messages only."""
    kind: str = BrokerKind.STANDING
    process: Process = Process()
    dead_after_seconds: float = 0.0
    """The longest silence before others consider it dead; 0 if it registered none."""


class PartitionMetadata(msgspec.Struct, frozen=True, kw_only=True):
    leader: int
    leader_epoch: int


class TopicMetadata(msgspec.Struct, frozen=True, kw_only=True):
    topic_id: str
    partitions: tuple[PartitionMetadata, ...]
    config: dict[str, str] = {}


class Epoch(msgspec.Struct, frozen=True, array_like=True, order=True):
    """An epoch of a broker whose WAL may still have unpublished entries."""

    broker: int
    epoch: int
    log: WalKind = WalKind.OBJECTS
    """Storage of its write-ahead log; a root changes from one kind to another epoch by epoch."""


class ClusterMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """One version of the metadata. `change_id` distinguishes two writers of the same version."""

    version: int = 0
    change_id: str = ""
    brokers: dict[int, BrokerRegistration] = {}
    open_epochs: tuple[Epoch, ...] = ()
    controller: int = -1
    topics: dict[str, TopicMetadata] = {}
    next_producer_id: int = 0

    def topic(self, name: str) -> TopicMetadata:
        """Raises `UnknownTopic`."""
        found = self.topics.get(name)
        if found is None:
            raise errors.UnknownTopic(topic=name)
        return found


_decoder = msgspec.json.Decoder(ClusterMetadata)


def _name(version: int) -> str:
    return f"{version:020d}.json"


def _path(version: int) -> str:
    return f"{_FOLDER}/{_name(version)}"


class MetadataStore:
    """Reads and changes the metadata of one root."""

    def __init__(self, store: Store, *, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self.current = ClusterMetadata()

    def open(self, *, create: bool, allow_non_empty: bool = False) -> Cluster:
        """Checks the root's format; with `create`, turns an empty folder into a root.

        With `allow_non_empty`, also a folder with files of other programs. Raises `NotARoot`,
        `RootNotEmpty`, `FormatTooNew`, `RootNotWritable`, `CorruptObject`.
        """
        if create and not self._exists():
            if not allow_non_empty:
                self.check_empty()
            cluster = Cluster(
                cluster_id=secrets.token_urlsafe(16), format_version=limits.FORMAT_VERSION_OBJECTS
            )
            claim(self._store, _CLUSTER, msgspec.json.encode(cluster), clock=self._clock)
        try:
            data = self._store.get(_CLUSTER)
        except ObjectMissing:
            raise errors.NotARoot(root=self._store.uri, reason=f"it has no {_CLUSTER}") from None
        cluster = self._decode(data)
        if cluster.format_version > limits.FORMAT_VERSION:
            raise errors.FormatTooNew(
                root=self._store.uri, found=cluster.format_version, known=limits.FORMAT_VERSION
            )
        return cluster

    def raise_format(self) -> Cluster:
        """Makes releases that cannot read logs in segments refuse the root.

        Durable when this returns, so call it before the metadata names such a log. Several
        brokers may do so at once, because all of them write the same content. Raises as `open`.
        """
        cluster = self.open(create=False)
        if cluster.format_version < limits.FORMAT_VERSION:
            cluster = msgspec.structs.replace(cluster, format_version=limits.FORMAT_VERSION)
            self._store.put(_CLUSTER, msgspec.json.encode(cluster))
        return cluster

    def _decode(self, data: pa.Buffer) -> Cluster:
        try:
            return msgspec.json.decode(data, type=Cluster)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            check = (
                f"it does not describe a sparklog root ({error}); if another program made it, use"
                " another folder as root"
            )
            raise errors.CorruptObject(path=f"{self._store.uri}/{_CLUSTER}", check=check) from error

    def check_empty(self) -> None:
        """Raises `RootNotEmpty` if a folder that is no root contains files of other programs."""
        found = _foreign_names(self._store)
        # Another process may have created the root meanwhile.
        if not found or self._exists():
            return
        shown = ", ".join(found[:_NAMES_SHOWN])
        more = len(found) - _NAMES_SHOWN
        raise errors.RootNotEmpty(
            root=self._store.uri,
            found=f"{shown} and {more} more" if more > 0 else shown,
            **({"advice": _LOST} if {_FOLDER, "wal"} & set(found) else {}),
        )

    def _exists(self) -> bool:
        try:
            self._store.get(_CLUSTER)
        except ObjectMissing:
            return False
        return True

    def refresh(self) -> ClusterMetadata:
        """Returns the newest version; costs two probes if nothing has changed.

        Let v be the version that is known. Versions are pruned in order. So while v-1 exists,
        neither v nor v+1 was pruned: v is not a late put into the pruned past (see `_counts`), and
        v+1, which was absent before, was never put. If v-1 is gone, the versions are listed. A
        listing may be old, because the probes that follow it find the newer versions.
        """
        if self.current.version:
            self._advance()
            with contextlib.suppress(ObjectMissing):
                self._store.stat(_path(self.current.version - 1))
                return self.current
        return self.reload()

    def _advance(self) -> None:
        """Reads the versions that follow the known one."""
        while (found := self._read(self.current.version + 1)) is not None:
            self.current = found

    def reload(self) -> ClusterMetadata:
        """Returns the newest version by listing, whatever is known.

        A version never changes, so the known one is not read again.
        """
        while True:
            known = self.current.version
            versions = self._versions(known - 1) if known else []
            versions = versions or self._versions()
            if not versions or versions[-1] == known:
                return self.current
            found = self._read(versions[-1])
            if found is not None:
                self.current = found
                self._advance()
                return self.current

    def _versions(self, after: int = -1) -> list[int]:
        """Returns the existing versions above `after`, sorted."""
        listed = self._store.list_after(_FOLDER, _name(after) if after >= 0 else "")
        names = [stat.name.partition(".")[0] for stat in listed]
        return [int(name) for name in names if name.isdecimal()]

    def _read(self, version: int) -> ClusterMetadata | None:
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
            raise errors.CorruptObject(
                path=path, check=f"it says that it is version {found.version}"
            )
        return found

    def change(
        self, decide: Callable[[ClusterMetadata], ClusterMetadata | None]
    ) -> ClusterMetadata:
        """Puts the version that `decide` derives from the newest one; repeats it after a conflict.

        `decide` returns None to change nothing, and raises to refuse. Raises `OutcomeUnknown` if
        the change may have been made, and the errors of the store if it was not.
        """
        while True:
            before = self.refresh()
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
            except errors.SparklogError as error:  # even a refusal, because our put may count
                raise errors.OutcomeUnknown(what=f"put of {path}", reason=str(error)) from error
            if counts:
                self.current = after
                with contextlib.suppress(errors.SparklogError):  # a later change prunes as well
                    self._prune(version)
                return after
            self._store.delete([path])

    def _counts(self, version: int) -> bool:
        """Returns whether our put of `version` counts, or fell into the pruned past.

        Versions are pruned in order, so a pruned version has no predecessor any more. A newer
        version that was built on ours follows it directly. Version 1 has no predecessor: it is in
        the past once there are so many versions that pruning has begun.
        """
        versions = self._versions(version - 2)
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
                self._store.delete([_path(old)])  # one by one, because the order matters


# ------------------------------------------------------------------------------ a new root


def _foreign_names(store: Store) -> list[str]:
    """Returns the names in a folder that prevent it from becoming a root.

    Ignores hidden files (among them the temporary file of a killed first start), files that file
    systems and the doctor create, and empty folders of a root. Looks only at the first page of a
    bucket, which may hold any number of objects.
    """
    if store.is_local:
        names = {stat.name for stat in store.list_after("")}
        for folder in store.folders(""):
            if folder not in _OWN_FOLDERS or not _is_empty(store, folder):
                names.add(folder)
    else:
        page = itertools.islice(store.walk(""), _PAGE)
        names = {stat.name.partition("/")[0] for stat in page if stat.size_bytes}
    return sorted(name for name in names if name not in _IGNORED and not _is_hidden(name))


def _is_empty(store: Store, folder: str) -> bool:
    return all(_is_hidden(stat.name.rpartition("/")[2]) for stat in store.walk(folder))


def _is_hidden(name: str) -> bool:
    return name.startswith(".")
