"""A topic's Delta table: what it holds at a version, and how the next version is made.

Rules of this room:

- The log is replayed here, from commits and checkpoints: one code over every store, at microseconds
  a commit. Other engines' commits count like ours. What sparklog cannot work with is refused by
  name (`ForeignTable`), and the last good snapshot stays.
- Version v is put only if absent, by somebody who has seen v-1, and all that a change takes for
  granted is judged on the snapshot of exactly v-1. So two changes that contradict each other can
  never both stand, whoever makes them.
- Old commits are removed, oldest first. After that a put far in the past succeeds although v once
  stood there, so a commit counts only if its predecessor still stands after it.
- A file is added only while it is younger than half the orphan grace, or if it was *prepared*: its
  name has the number of a preparation that the version right before the commit has open. `upkeep`
  says why.
- Other engines flush nothing: delta-rs writes data files and commits that a power cut may leave
  empty. Whatever our next step builds on is made durable first (`settle`): the data files before
  the commit that names them, so that a commit never outlives its rows.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final
from urllib.parse import unquote

import crc32c
import msgspec
import pyarrow as pa

from sparklog import errors, limits
from sparklog.clock import Clock
from sparklog.storage import deltalog
from sparklog.storage.deltalog import Actions, Add, CommitInfo, Metadata, Protocol, Remove, Txn
from sparklog.storage.objects import ObjectMissing, PutUnresolved, Store, claim
from sparklog.storage.snapshot import BatchId, BatchKind, TableFile, TableSnapshot
from sparklog.version import VERSION

TOPIC_ID: Final = "sparklog.topicId"
PARTITIONS: Final = "sparklog.partitions"
CONFIG: Final = "sparklog.config"

NO_TABLE: Final = TableSnapshot(version=-1, topic_id=None)

_SUFFIX: Final = re.compile(r"-([0-9a-f]{8})[0-9a-f]{8}\.parquet$")
_OUR_FILE: Final = re.compile(r"partition=\d+/[^/]+-\d+-\d+-[0-9a-f]{16}\.parquet")


def is_our_file(path: str) -> bool:
    """Whether a data file, by its path in the table's folder, has our kind of name."""
    return _OUR_FILE.fullmatch(path) is not None


def file_suffix(preparation: int | None) -> str:
    """The end of a data file's name, which nobody else gives: 16 digits in base 16."""
    if preparation is None:
        return secrets.token_hex(8)
    return f"{preparation:08x}{secrets.token_hex(4)}"


def _preparation_of(path: str) -> int | None:
    """The preparation whose number a data file's name has; a random one where it has none."""
    named = _SUFFIX.search(path)
    return int(named[1], 16) if named is not None else None


def _lost_preparation(topic: str) -> errors.TimedOut:
    what = f"preparing files for the table of topic {topic}, which another writer has ended,"
    return errors.TimedOut(what=what, timeout_seconds=limits.ORPHAN_GRACE_SECONDS)


def table_folder(topic: str) -> str:
    """Where a root keeps the topic's table."""
    return f"topics/{topic}"


def data_path(topic: str, file: TableFile) -> str:
    """Where the store keeps `file`; the log percent-encodes what it names."""
    return f"{table_folder(topic)}/{unquote(file.path)}"


def end_app_id(topic_id: str, partition: int) -> str:
    """The `txn` whose version is the partition's next offset."""
    return f"sparklog/{topic_id}/{partition}"


def start_app_id(topic_id: str, partition: int) -> str:
    """The `txn` whose version is the partition's log start offset."""
    return f"sparklog/{topic_id}/{partition}/start"


def compacted_app_id(topic_id: str, partition: int) -> str:
    """The `txn` whose version is the offset that the last key compaction came to."""
    return f"sparklog/{topic_id}/{partition}/compacted"


def tombstones_app_id(topic_id: str, partition: int) -> str:
    """The `txn` below whose version tombstones have been waiting since its `lastUpdated`."""
    return f"sparklog/{topic_id}/{partition}/tombstones"


def preparation_app_id(topic_id: str) -> str:
    """The `txn` whose version numbers preparations; it is odd while one is open."""
    return f"sparklog/{topic_id}/preparation"


def query_app_id(topic_id: str, query: str) -> str:
    """The `txn` whose version is the newest batch of a Spark query that is in the table."""
    return f"sparklog/{topic_id}/query/{query}"


def key_app_id(topic_id: str, key: str) -> str:
    """The `txn` of a write with an idempotency key that is in the table; its version is 0."""
    return f"sparklog/{topic_id}/key/{key}"


def maintenance_app_id(topic_id: str) -> str:
    """The `txn` that compaction and retention share: other engines' conflict checks go by it."""
    return f"sparklog/{topic_id}/maintenance"


# ------------------------------------------------------------------------------ changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one commit does. Every removed file must be active, every added one new."""

    adds: tuple[TableFile, ...] = ()
    removes: tuple[TableFile, ...] = ()
    txns: Mapping[str, int] = field(default_factory=dict)
    """Versions by app id; none ever goes back."""
    properties: Mapping[str, str | None] | None = None
    """Table properties to be set, or, with None, to be removed."""
    data_change: bool = True
    """False where the same rows are only arranged anew."""
    drops_rows: bool = False
    """Some rows of the removed files are in no added one; the others are, whatever `data_change`.

    The protocol wants `dataChange` of an action to be true where its rows are nowhere else in the
    commit (https://github.com/delta-io/delta/blob/master/PROTOCOL.md, "Add File and Remove File").
    """
    operation: str = "WRITE"
    preparation: int | None = None
    """The number of the preparation whose files are added: it must be open, and this closes it."""
    create: bool = False
    """A topic begins: makes the table, or gives that of a deleted topic a new life."""


def create_change(topic_id: str, partitions: int, config: Mapping[str, str]) -> Change:
    """A new topic, all of whose partitions start and end at offset 0."""
    app_ids = [
        name(topic_id, partition)
        for partition in range(partitions)
        for name in (end_app_id, start_app_id)
    ]
    return Change(
        txns=dict.fromkeys(app_ids, 0),
        properties={
            TOPIC_ID: topic_id,
            PARTITIONS: str(partitions),
            CONFIG: msgspec.json.encode(dict(config)).decode(),
        },
        operation="CREATE TABLE",
        create=True,
    )


def describe_change(snapshot: TableSnapshot, partitions: int, config: Mapping[str, str]) -> Change:
    """The topic gets this configuration and this many partitions, as many as it has or more."""
    topic_id = snapshot.topic_id
    assert topic_id is not None
    assert partitions >= snapshot.partitions
    return Change(
        txns={
            name(topic_id, partition): 0
            for partition in range(snapshot.partitions, partitions)
            for name in (end_app_id, start_app_id)
        },
        properties={
            PARTITIONS: str(partitions),
            CONFIG: msgspec.json.encode(dict(config)).decode(),
        },
        operation="SET TBLPROPERTIES",
    )


def delete_change(snapshot: TableSnapshot) -> Change:
    """The topic ends: every file goes, and the topic id is cleared."""
    return Change(
        removes=tuple(file for files in snapshot.files for file in files),
        properties={TOPIC_ID: None, PARTITIONS: None, CONFIG: None},
        operation="DELETE",
    )


# ------------------------------------------------------------------------------ replay


@dataclass(frozen=True, slots=True, kw_only=True)
class _Topic:
    """What protocol, schema and properties say of the topic."""

    topic_id: str | None = None
    partitions: int = 0
    config: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    foreign: str | None = None
    """Why sparklog cannot work with this table."""


def _topic_of(protocol: Protocol | None, metadata: Metadata | None) -> _Topic:
    if protocol is None or metadata is None:
        return _Topic(foreign="its log has no protocol or no metadata")
    if reason := deltalog.foreign_reason(protocol, metadata):
        return _Topic(foreign=reason)
    properties = metadata.configuration
    if properties.get(TOPIC_ID) is None:
        return _Topic()
    try:
        config = msgspec.json.decode(properties.get(CONFIG) or "", type=dict[str, str])
        return _Topic(
            topic_id=properties[TOPIC_ID],
            partitions=int(properties.get(PARTITIONS) or ""),
            config=MappingProxyType(config),
        )
    except (ValueError, msgspec.MsgspecError) as error:
        return _Topic(foreign=f"its sparklog.* properties are damaged: {error}")


def _order(file: TableFile) -> tuple[int, int, str]:
    """Files without statistics first, then by first offset."""
    if file.first is None or file.last is None:
        return (-1, -1, file.path)
    return (file.first, file.last, file.path)


def _end(files: Iterable[TableFile]) -> int:
    """The offset after the greatest in `files`, as far as statistics tell."""
    return max((file.last + 1 for file in files if file.last is not None), default=0)


class _Replay:
    """What the log adds up to. Takes every commit as it comes; `snapshot` judges the result.

    Paths are compared percent-decoded, because engines may spell them differently.
    """

    def __init__(self, *, remembers_removed: bool) -> None:
        self._remembers_removed = remembers_removed
        self.version = -1
        self.protocol: Protocol | None = None
        self.metadata: Metadata | None = None
        self.txns: dict[str, Txn] = {}
        self.active: dict[str, Add] = {}
        self.removed: dict[str, Remove] = {}
        self._topic = _Topic()
        self._files: dict[int, tuple[TableFile, ...]] = {}
        self._ends: dict[int, int] = {}
        self._unusable: dict[str, str] = {}
        self._unknown: frozenset[str] = frozenset()

    @property
    def topic_id(self) -> str | None:
        return self._topic.topic_id

    def apply(self, version: int, actions: Actions) -> None:
        """Makes this the state at `version`; a checkpoint's actions count like a commit's."""
        self.version = version
        if actions.protocol or actions.metadata:
            self.protocol = actions.protocol or self.protocol
            self.metadata = actions.metadata or self.metadata
            self._topic = _topic_of(self.protocol, self.metadata)
        self._unknown |= actions.unknown
        self.txns.update((txn.app_id, txn) for txn in actions.txns)
        gone: dict[int, set[str]] = {}
        come: dict[int, list[TableFile]] = {}
        for remove in actions.removes:
            path = unquote(remove.path)
            self._deactivate(path, gone)
            if self._remembers_removed:
                self.removed[path] = remove
        for add in actions.adds:
            path = unquote(add.path)
            self._deactivate(path, gone)
            self.removed.pop(path, None)
            self.active[path] = add
            try:
                file = deltalog.file_of(add)
            except ValueError as error:
                self._unusable[path] = str(error)
            else:
                come.setdefault(file.partition, []).append(file)
        for partition in gone.keys() | come.keys():
            self._rearrange(partition, gone.get(partition), come.get(partition, []))

    def _deactivate(self, path: str, gone: dict[int, set[str]]) -> None:
        add = self.active.pop(path, None)
        if add and self._unusable.pop(path, None) is None:
            gone.setdefault(deltalog.file_of(add).partition, set()).add(add.path)

    def _rearrange(self, partition: int, gone: set[str] | None, come: list[TableFile]) -> None:
        """Keeps the partition's files in order; one more at the end costs a copy of the tuple."""
        files = self._files.get(partition, ())
        if gone:
            files = tuple(file for file in files if file.path not in gone)
            self._ends[partition] = _end(files)
        come.sort(key=_order)
        in_order = not files or not come or _order(files[-1]) < _order(come[0])
        files += tuple(come)
        self._files[partition] = files if in_order else tuple(sorted(files, key=_order))
        self._ends[partition] = max(self._ends.get(partition, 0), _end(come))

    def snapshot(self, topic: str) -> TableSnapshot:
        """Raises `ForeignTable`."""
        if self.version < 0:
            return NO_TABLE
        if reason := self._foreign_reason():
            raise errors.ForeignTable(topic=topic, reason=reason)
        topic_id, numbers = self.topic_id, range(self._topic.partitions)
        if topic_id is None:
            return TableSnapshot(version=self.version, topic_id=None)
        return TableSnapshot(
            version=self.version,
            topic_id=topic_id,
            partitions=self._topic.partitions,
            config=self._topic.config,
            ends=self._ends_of(topic_id, numbers),
            starts=self._starts_of(topic_id, numbers),
            files=tuple(self._files.get(number, ()) for number in numbers),
        )

    def bounds(self, topic_id: str, numbers: range) -> TableSnapshot | None:
        """What of the topic is sure even where the rest makes no sense."""
        if any(end_app_id(topic_id, number) not in self.txns for number in numbers):
            return None
        return TableSnapshot(
            version=self.version,
            topic_id=topic_id,
            partitions=len(numbers),
            ends=self._ends_of(topic_id, numbers),
            starts=self._starts_of(topic_id, numbers),
            files=((),) * len(numbers),
        )

    def _ends_of(self, topic_id: str, numbers: range) -> tuple[int, ...]:
        """By `txn`; by the statistics only where another engine has dropped it."""
        return tuple(
            txn.version if (txn := self._end_txn(topic_id, number)) else self._ends.get(number, 0)
            for number in numbers
        )

    def _end_txn(self, topic_id: str, number: int) -> Txn | None:
        return self.txns.get(end_app_id(topic_id, number))

    def _starts_of(self, topic_id: str, numbers: range) -> tuple[int, ...]:
        return tuple(self.offset(start_app_id(topic_id, number)) for number in numbers)

    def offset(self, app_id: str) -> int:
        txn = self.txns.get(app_id)
        return txn.version if txn else 0

    def _foreign_reason(self) -> str | None:
        if self._topic.foreign:
            return self._topic.foreign
        if self._unknown:
            return f"its log has actions that sparklog does not know: {sorted(self._unknown)}"
        if self._unusable:
            return next(iter(self._unusable.values()))
        if self.topic_id is not None:
            for partition, files in self._files.items():
                if files and partition >= self._topic.partitions:
                    count = self._topic.partitions
                    return f"{files[0].path} is of partition {partition}, and there are {count}"
                txn, end = self._end_txn(self.topic_id, partition), self._ends.get(partition, 0)
                if txn and end > txn.version:
                    return (
                        f"partition {partition} has rows up to offset {end - 1}, and ends at"
                        f" {txn.version}: somebody has added rows that are not of the log"
                    )
        return None

    def compacted(self) -> Actions:
        """All of the state, without the `txn` of dead topics, for which nobody will ask again."""
        alive = f"sparklog/{self.topic_id}/"
        return Actions(
            adds=[msgspec.structs.replace(add, data_change=False) for add in self.active.values()],
            removes=[
                msgspec.structs.replace(remove, data_change=False)
                for remove in self.removed.values()
            ],
            txns=[
                txn
                for txn in self.txns.values()
                if txn.app_id.startswith(alive) or not txn.app_id.startswith("sparklog/")
            ],
            protocol=self.protocol,
            metadata=self.metadata,
        )

    def forget_keys(self, now_ms: int) -> None:
        """Drops the idempotency keys that are too old or too many."""
        prefix = key_app_id(self.topic_id or "", "")
        keys = [txn for app_id, txn in self.txns.items() if app_id.startswith(prefix)]
        keys.sort(key=lambda txn: txn.last_updated or 0)
        before_ms = now_ms - round(limits.BATCH_MEMORY_SECONDS * 1e3)
        surplus = len(keys) - limits.KEYS_REMEMBERED
        for index, txn in enumerate(keys):
            if index >= surplus and (txn.last_updated or 0) >= before_ms:
                break
            del self.txns[txn.app_id]

    def forget_removed(self, before_ms: int) -> None:
        """Drops the tombstones from before that time, and those that have none."""
        self.removed = {
            path: remove
            for path, remove in self.removed.items()
            if (remove.deletion_timestamp or 0) >= before_ms
        }


# ------------------------------------------------------------------------------ the table


class Table:
    """One topic's table. Safe to use from several threads, one of which works at a time.

    `only_reads`: does not remember which files were removed. Nothing is asked of those by a reader,
    and they are most of an old table's checkpoint.
    """

    def __init__(
        self,
        store: Store,
        topic: str,
        *,
        clock: Clock,
        only_reads: bool = False,
        orphan_grace_seconds: float = limits.ORPHAN_GRACE_SECONDS,
        removed_file_grace_seconds: float = limits.REMOVED_FILE_GRACE_SECONDS,
    ) -> None:
        self.store = store
        self.topic = topic
        self.clock = clock
        self._only_reads = only_reads
        self.orphan_grace_seconds = orphan_grace_seconds
        self.removed_file_grace_seconds = removed_file_grace_seconds
        self.folder = table_folder(topic)
        self.log_folder = f"{self.folder}/{deltalog.LOG_FOLDER}"
        self.checkpoint_version = -1
        """The newest checkpoint that this table has started from or written."""
        self._replay = self._beginning()
        self._is_settled = False
        self._hardened_version = -1
        """Commits up to here are durable, as far as `_replay` was built from them."""
        self._unhardened_base: list[str] = []
        """The parts of the checkpoint that `_replay` began with."""
        self._unhardened_files: set[str] = set()
        """Data files that other engines have added, percent-decoded."""
        self._seen_files: set[str] = set()
        """Active files that were seen to exist, by `check_files`."""
        self._unconfirmed: dict[int, int] = {}
        """CRC32C of commits that nobody has read back: of ours, and of those that remove files."""
        self._snapshot = NO_TABLE
        self._lock = threading.RLock()

    @property
    def snapshot(self) -> TableSnapshot:
        """The table as last seen; nothing is asked of the store."""
        return self._snapshot

    def bounds(self, topic_id: str, partitions: int) -> TableSnapshot | None:
        """Starts and ends of the partitions, and no files: of a table that `refresh` has refused.

        `txn` tells what we wrote, whatever schema or protocol became since; None where it does not.
        """
        with self._lock:
            return self._replay.bounds(topic_id, range(partitions))

    def txn(self, app_id: str) -> Txn | None:
        """What the version last seen says of `app_id`; `snapshot` has starts and ends already."""
        return self._replay.txns.get(app_id)

    def batches(self, topic_id: str) -> list[tuple[BatchId, BatchKind, int]]:
        """The newest batch of each Spark query, and all keys, of the version last seen.

        Each with its kind and when it was published, in µs; in the order of that time.
        """
        found = []
        with self._lock:
            for app_id, txn in self._replay.txns.items():
                for kind, prefix in (
                    (BatchKind.NUMBERED, query_app_id(topic_id, "")),
                    (BatchKind.NAMED, key_app_id(topic_id, "")),
                ):
                    if app_id.startswith(prefix):
                        batch_id = BatchId(app_id.removeprefix(prefix), txn.version)
                        found.append((batch_id, kind, (txn.last_updated or 0) * 1_000))
        return sorted(found, key=lambda each: each[2])

    # -------------------------------------------------------------------------- reading

    def refresh(self) -> TableSnapshot:
        """The newest version.

        Raises `ForeignTable`; `CorruptObject` for a commit that is not whole (`snapshot` is then
        the version before it) or where no checkpoint is; and `MissingObject` for a commit that the
        versions above it need.
        """
        with self._lock:
            try:
                self._advance()
            except errors.CorruptObject:
                self._observe()
                raise
            return self._observe()

    def settle(self) -> None:
        """What was read survives a power cut after this.

        Whoever put a commit may have died before it was durable, and it is seen by then; another
        engine flushes neither its commits nor the data files that they add. So this comes before
        anything that cannot be undone is built on it. Raises `SyncFailed`.
        """
        with self._lock:
            if not self._is_settled:
                if self.store.is_local:
                    self._harden()
                self.store.settle(self.log_folder)
                self._is_settled = True

    def _harden(self) -> None:
        active = self._unhardened_files & self._replay.active.keys()
        self.store.harden(f"{self.folder}/{path}" for path in sorted(active))
        versions = range(self._hardened_version + 1, self._replay.version + 1)
        self.store.harden([*self._unhardened_base, *map(self._commit_path, versions)])
        self._unhardened_files.clear()
        self._unhardened_base.clear()
        self._hardened_version = self._replay.version

    def confirm(self) -> None:
        """Reads back what something cannot be undone by: where a commit may be written over.

        That is each of ours, and any that removes files. Raises `ForeignTable`: the version holds
        something else now, and a new look at the table does not find what we took for committed.
        """
        with self._lock:
            for version, checksum in sorted(self._unconfirmed.items()):
                with contextlib.suppress(ObjectMissing):  # cleaned up: a checkpoint stands for it
                    if crc32c.crc32c(self.store.get(self._commit_path(version))) != checksum:
                        reason = (
                            f"another engine has written over commit {version}: it does not commit"
                            " conditionally; start the broker again to publish it anew"
                        )
                        raise errors.ForeignTable(topic=self.topic, reason=reason)
                del self._unconfirmed[version]

    def check_files(self, torn: Callable[[Mapping[str, int]], Collection[str]]) -> None:
        """Looks at the files that have come into the table since the last time.

        `torn` names those of the paths that do not exist, or have less bytes than the log says.
        Raises `CorruptObject`.
        """
        with self._lock:
            active = self._replay.active
            self._seen_files &= active.keys()
            new = sorted(active.keys() - self._seen_files)
            missing = set(torn({f"{self.folder}/{path}": active[path].size for path in new}))
            self._seen_files |= {path for path in new if f"{self.folder}/{path}" not in missing}
        if missing:
            check = "is missing, or shorter than the table says; what was replaced stays meanwhile"
            raise errors.CorruptObject(path=min(missing), check=check)

    def _observe(self) -> TableSnapshot:
        if self._snapshot.version != self._replay.version:
            self._snapshot = self._replay.snapshot(self.topic)
        return self._snapshot

    def _beginning(self) -> _Replay:
        return _Replay(remembers_removed=not self._only_reads)

    def _advance(self) -> None:
        if self._replay.version < 0:
            self._load()
        while True:
            version = self._replay.version + 1
            path = self._commit_path(version)
            try:
                data = self.store.get(path)
            except ObjectMissing:
                if self._stands(version - 1) or not self._load():
                    return
            else:
                actions = deltalog.decode_commit(data, path)
                self._is_settled = False
                self._apply(version, actions)
                self._note_foreign_files(actions)
                if actions.removes and not self._only_reads:
                    self._expect(version, data)

    def _apply(self, version: int, actions: Actions) -> None:
        self._replay.apply(version, actions)
        if version % limits.TABLE_CHECKPOINT_EVERY == 0:
            self._forget_old_tombstones()

    def _note_foreign_files(self, actions: Actions) -> None:
        if not self._only_reads and self.store.is_local:
            paths = (unquote(add.path) for add in actions.adds)
            self._unhardened_files.update(path for path in paths if not is_our_file(path))

    def _commit_path(self, version: int) -> str:
        return f"{self.log_folder}/{deltalog.commit_name(version)}"

    def _stands(self, version: int) -> bool:
        """Whether the commit is there; where it is, none above it has been cleaned up yet."""
        if version < 0:
            return True
        try:
            self.store.stat(self._commit_path(version))
        except ObjectMissing:
            return False
        return True

    def _load(self) -> bool:
        """Starts over from the newest checkpoint; False where that leads no further than we are."""
        failure: errors.Corrupt
        for _ in range(limits.TABLE_LOAD_ATTEMPTS):
            for after in self._places_to_list_from():
                try:
                    version, actions, names = self._newest_base(after)
                except ObjectMissing as error:
                    failure = errors.MissingObject(path=error.path, reason="it was listed just now")
                except errors.Corrupt as error:
                    failure = error
                else:
                    self.checkpoint_version = max(self.checkpoint_version, version)
                    if version <= self._replay.version:
                        return False
                    self._replay = self._beginning()
                    self._is_settled = False
                    self._hardened_version = version
                    self._unhardened_base = [f"{self.log_folder}/{name}" for name in names]
                    self._unhardened_files.clear()
                    self._apply(version, actions)
                    self._note_foreign_files(actions)
                    return True
        raise failure

    def _places_to_list_from(self) -> list[str]:
        """Where the hint says that the newest checkpoint is, and the log's beginning."""
        hint = self._last_checkpoint()
        return [""] if hint is None else [f"{hint:020d}", ""]

    def _last_checkpoint(self) -> int | None:
        try:
            hint = self.store.get(f"{self.log_folder}/{deltalog.LAST_CHECKPOINT}")
        except ObjectMissing:
            return None
        return deltalog.decode_last_checkpoint(hint)

    def _newest_base(self, after: str) -> tuple[int, Actions, Sequence[str]]:
        """The newest whole checkpoint after which no commit is missing; -1: the log's beginning.

        With it come the names of its parts.
        """
        stats = self.store.list_after(self.log_folder, after)
        listing = deltalog.read_names(stat.name for stat in stats)
        newest = max([*listing.commits, *listing.checkpoints], default=-1)
        if newest < self._replay.version:
            lost = self._commit_path(self._replay.version)
            raise errors.MissingObject(path=lost, reason=f"the log now ends at version {newest}")
        gap = newest
        while gap in listing.commits:
            gap -= 1
        damage: errors.Corrupt | None = None
        for version in reversed(listing.checkpoints):
            if version >= gap:
                try:
                    names = listing.checkpoints[version]
                    return version, self.read_checkpoint(names), names
                except errors.CorruptObject as error:
                    damage = damage or error
        if gap < 0 and not after:
            return -1, Actions(), ()
        if listing.v2_checkpoints:
            reason = f"{listing.v2_checkpoints[-1]} is a v2 checkpoint"
            damage = damage or errors.ForeignTable(topic=self.topic, reason=reason)
        raise damage or errors.MissingObject(
            path=self._commit_path(gap), reason=f"version {newest} stands above it"
        )

    def read_checkpoint(self, names: Sequence[str]) -> Actions:
        """A classic checkpoint from its parts. Raises `CorruptObject` and `ObjectMissing`."""
        parts = []
        for name in names:
            path = f"{self.log_folder}/{name}"
            data = self.store.get(path)
            parts.append(deltalog.decode_checkpoint(data, path, removes=not self._only_reads))
        whole = deltalog.joined(parts)
        if not whole.protocol or not whole.metadata:
            path = f"{self.log_folder}/{names[0]}"
            raise errors.CorruptObject(path=path, check="has no protocol or no metadata")
        return whole

    # -------------------------------------------------------------------------- writing

    def commit(self, decide: Callable[[TableSnapshot], Change | None]) -> TableSnapshot:
        """Makes the change that `decide` wants, as the version after the one that it was shown.

        `decide` is first shown the version last seen, and a newer one each time that another
        writer was faster. It raises, or returns None, to give up. Returns the snapshot with the
        change, or the one on which `decide` gave up.

        Raises what `refresh` does. No effect: `StorageUnavailable` (also after too many lost
        races), `StorageFull`, and `TimedOut` for a file that has become too old to be added: write
        it anew. Perhaps an effect: `OutcomeUnknown`; look for your own files or `txn`.
        """
        assert not self._only_reads
        with self._lock:
            is_fresh = 0 <= self._snapshot.version == self._replay.version
            snapshot = self._snapshot if is_fresh else self.refresh()
            for _ in range(limits.TABLE_COMMIT_ATTEMPTS):
                change = decide(snapshot)
                if change is None:
                    return snapshot
                self.settle()
                if self._put(snapshot.version + 1, change):
                    return self._observe()
                snapshot = self.refresh()
            raise errors.StorageUnavailable(
                operation="commit",
                path=self.log_folder,
                reason=f"others were faster {limits.TABLE_COMMIT_ATTEMPTS} times",
            )

    def _put(self, version: int, change: Change) -> bool:
        """Whether the change stands as `version`; the replay then includes it."""
        self._check(change)
        actions = self._actions(change)
        info = CommitInfo(
            timestamp=self.clock.now_us() // 1_000,
            operation=change.operation,
            operation_parameters={},
            # Other engines let a rewrite of theirs pass beside appends that read nothing.
            is_blind_append=not change.removes and not change.properties,
            engine_info=f"sparklog/{VERSION}",
            txn_id=secrets.token_hex(16),
        )
        path = self._commit_path(version)
        data = deltalog.encode_commit(info, actions)
        if not claim(self.store, path, data, clock=self.clock):
            return False
        self._expect(version, data)
        try:
            if self._follows(version):
                self._apply(version, actions)
                if self._is_settled:
                    self._hardened_version = version  # `claim` has made ours durable
                return True
            self._load()
            if self._replay.version >= version:
                # A checkpoint hides whether we stand below it, but names what we have added.
                return any(self.is_named(unquote(file.path)) for file in change.adds)
            self._advance()
        except (errors.Retriable, errors.Corrupt) as error:
            raise errors.OutcomeUnknown(what=f"commit of {path}", reason=str(error)) from error
        return True

    def _expect(self, version: int, data: pa.Buffer | bytes) -> None:
        """Has `confirm` look whether the commit still stands, where one may be written over."""
        if not self.store.is_local:
            self._unconfirmed[version] = crc32c.crc32c(data)

    def _follows(self, version: int) -> bool:
        """Whether the commit just put continues the log, and is not far in its cleaned-up past."""
        if version == 0:
            return len(self.store.list_after(self.log_folder)) == 1
        return self._stands(version - 1)

    def _check(self, change: Change) -> None:
        replay = self._replay
        assert replay.topic_id is None or not change.create
        assert replay.topic_id is not None or not change.adds
        assert all(unquote(file.path) in replay.active for file in change.removes)
        assert not any(unquote(file.path) in replay.active for file in change.adds)
        assert all(version >= replay.offset(app_id) for app_id, version in change.txns.items())
        if change.preparation is not None and change.preparation != self.preparation:
            raise _lost_preparation(self.topic)
        limit_seconds = self.orphan_grace_seconds / 2
        for file in change.adds:
            if change.preparation is not None and self.is_prepared(unquote(file.path)):
                continue
            if self.clock.now_us() - file.modified_us > limit_seconds * 1e6:
                what = f"writing {file.path} and adding it"
                raise errors.TimedOut(what=what, timeout_seconds=limit_seconds)

    def _actions(self, change: Change) -> Actions:
        replay, now_ms = self._replay, self.clock.now_us() // 1_000
        txns = dict(change.txns)
        if change.preparation is not None:
            txns[preparation_app_id(replay.topic_id or "")] = change.preparation + 1
        paths = [unquote(file.path) for file in change.removes]
        if change.create:  # what another engine put in while there was no topic
            paths = list(replay.active)
        return Actions(
            protocol=None if replay.protocol else deltalog.PROTOCOL,
            metadata=self._metadata(change.properties, now_ms) if change.properties else None,
            txns=[
                Txn(app_id=app_id, version=version, last_updated=now_ms)
                for app_id, version in txns.items()
            ],
            removes=[
                Remove(
                    path=replay.active[path].path,
                    deletion_timestamp=now_ms,
                    data_change=change.data_change or change.drops_rows,
                    extended_file_metadata=True,
                    partition_values=replay.active[path].partition_values,
                    size=replay.active[path].size,
                )
                for path in paths
            ],
            adds=[deltalog.add_of(file, data_change=change.data_change) for file in change.adds],
        )

    def _metadata(self, properties: Mapping[str, str | None], now_ms: int) -> Metadata:
        before = self._replay.metadata or deltalog.new_metadata(
            table_id=str(uuid.uuid4()), created_ms=now_ms
        )
        merged = {**before.configuration, **properties}
        kept = {name: value for name, value in merged.items() if value is not None}
        return msgspec.structs.replace(before, configuration=kept)

    # -------------------------------------------------------------------------- preparations

    @property
    def preparation(self) -> int | None:
        """The number of the preparation that the version last seen has open."""
        txn = self._preparation_txn()
        return txn.version if txn is not None and txn.version % 2 else None

    def _preparation_txn(self) -> Txn | None:
        topic_id = self._replay.topic_id
        return self.txn(preparation_app_id(topic_id)) if topic_id is not None else None

    def is_prepared(self, path: str) -> bool:
        """Whether a commit may still add the file, because its preparation is open."""
        number = self.preparation
        return number is not None and _preparation_of(path) == number

    def prepare(self, topic_id: str) -> int:
        """Opens a preparation of files that one later commit adds; ends any other.

        Returns its number, which the names of the files have. Raises what `commit` raises, and
        `TimedOut` where the topic is gone.
        """
        opened: int | None = None

        def decide(before: TableSnapshot) -> Change | None:
            nonlocal opened
            opened = None
            if before.topic_id != topic_id:
                return None
            txn = self._preparation_txn()
            number = txn.version + 1 if txn is not None else 1
            opened = number if number % 2 else number + 1
            return Change(txns={preparation_app_id(topic_id): opened}, operation="PREPARE")

        self.commit(decide)
        if opened is None:
            raise _lost_preparation(self.topic)
        return opened

    def renew(self, number: int) -> None:
        """Says that the preparation is still under way, so that no sweeper ends it.

        Raises what `commit` raises, and `TimedOut` where it has been ended.
        """
        stands = False

        def decide(before: TableSnapshot) -> Change | None:
            nonlocal stands
            stands = self.preparation == number
            if not stands or before.topic_id is None:
                return None
            app_id = preparation_app_id(before.topic_id)
            return Change(txns={app_id: number}, operation="PREPARE")

        self.commit(decide)
        if not stands:
            raise _lost_preparation(self.topic)

    def end_preparation(self, before_us: int) -> None:
        """Ends the open preparation if it was not renewed since. Raises what `commit` raises."""

        def decide(before: TableSnapshot) -> Change | None:
            txn = self._preparation_txn()
            if before.topic_id is None or txn is None or not txn.version % 2:
                return None
            if (txn.last_updated or 0) * 1_000 >= before_us:
                return None
            app_id = preparation_app_id(before.topic_id)
            return Change(txns={app_id: txn.version + 1}, operation="SWEEP")

        self.commit(decide)

    # -------------------------------------------------------------------------- keeping

    def checkpoint(self) -> None:
        """Writes a checkpoint of the version last seen, and reads it back before it is named.

        Raises `ForeignTable`, `CorruptObject` where what stands is not what was to be written, and
        `OutcomeUnknown`, after which the next version's checkpoint does as well.
        """
        assert not self._only_reads
        with self._lock:
            version = self._replay.version
            if version < 0:
                return
            self._replay.snapshot(self.topic)
            self._forget_old_tombstones()
            self._replay.forget_keys(self.clock.now_us() // 1_000)
            name = deltalog.checkpoint_name(version)
            path = f"{self.log_folder}/{name}"
            data = deltalog.encode_checkpoint(self._replay.compacted())
            claim(self.store, path, data, clock=self.clock)  # another's is as good, if it is whole
            found = self.read_checkpoint([name])
            if {unquote(add.path) for add in found.adds} != self._replay.active.keys():
                count = len(self._replay.active)
                check = f"names {len(found.adds)} files, not the {count} of version {version}"
                raise errors.CorruptObject(path=path, check=check)
            self.checkpoint_version = version
            if (self._last_checkpoint() or 0) <= version:
                with contextlib.suppress(PutUnresolved):  # a hint; a listing finds it as well
                    self.store.put(
                        f"{self.log_folder}/{deltalog.LAST_CHECKPOINT}",
                        deltalog.encode_last_checkpoint(version, found.count),
                    )

    def is_named(self, path: str) -> bool:
        """Whether the version last seen has the file, or remembers its removal.

        `path` is relative to the table's folder and not percent-encoded, as in the two below.
        """
        assert not self._only_reads
        return path in self._replay.active or path in self._replay.removed

    def removed_before(self, moment_us: int) -> list[str]:
        """The files whose removal is older and not forgotten."""
        assert not self._only_reads
        with self._lock:
            return [
                path
                for path, remove in self._replay.removed.items()
                if remove.deletion_timestamp is not None
                and remove.deletion_timestamp * 1_000 < moment_us
            ]

    def forget_removed(self, paths: Iterable[str]) -> None:
        """Says that the files are no more, so that checkpoints need not remember them."""
        with self._lock:
            for path in paths:
                self._replay.removed.pop(path, None)

    def _forget_old_tombstones(self) -> None:
        """A tombstone outlives its file's grace by far, for a sweeper that comes late."""
        kept_seconds = self.removed_file_grace_seconds + limits.TOMBSTONE_SECONDS
        self._replay.forget_removed(self.clock.now_us() // 1_000 - round(kept_seconds * 1_000))
