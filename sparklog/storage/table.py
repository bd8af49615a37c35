"""The Delta table of a topic: its state at a version, and commits of further versions.

Rules:

- The log is replayed here from commits and checkpoints, with the same code for every store, in
  microseconds per commit. Commits of other engines count like ours. Features that sparklog does not
  support are an error with their name (`ForeignTable`), and the last valid snapshot remains.
- Version v is put only if absent, by a writer that has seen v-1, and all assumptions of a change
  are checked on the snapshot of exactly v-1. So two contradictory changes are never both made,
  whatever their writers.
- `delta.appendOnly` is another engine's to set. While it is true, a change that removes rows is
  refused (`PolicyViolation`), unless it ends the topic; all others are made.
- Old commits are removed, oldest first. Afterwards a put of an old version v succeeds although v
  existed before, so a commit counts only if its predecessor exists after it.
- A file is added only while it is younger than half the orphan grace, or if it was *prepared*: its
  name has the number of a preparation that is open in the version right before the commit.
  `maintenance` gives the reasons.
- Other engines do not flush: delta-rs writes data files and commits that a power cut may leave
  empty. All state that our next step depends on is made durable first (`sync`), data files before
  the commit that names them, so that a commit never exists without its rows.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import secrets
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple, ParamSpec, TypeAlias, TypeVar
from urllib.parse import unquote

import crc32c
import msgspec
import pyarrow as pa

from sparklog import errors, limits
from sparklog.clock import Clock
from sparklog.storage import delta_log, gaps, removed_files
from sparklog.storage.delta_log import Actions, Add, CommitInfo, Metadata, Protocol, Remove, Txn
from sparklog.storage.objects import (
    ObjectMissing,
    PutAllNew,
    PutUnresolved,
    Store,
    SyncFailed,
    claim,
    claim_all,
    in_parallel,
)
from sparklog.storage.removed_files import RemovedFileRetention
from sparklog.storage.snapshot import BatchId, BatchKind, GapCause, Gaps, TableFile, TableSnapshot
from sparklog.version import VERSION

_OLD_COMMITS = 100  # the newest ones of a table that are read to find which are old
TABLE_COMMIT_ATTEMPTS = 100
_TABLE_LOAD_ATTEMPTS = 5
TOMBSTONE_SECONDS = 3600.0  # beyond the grace of removed files

TOPIC_ID: Final = "sparklog.topicId"
PARTITIONS: Final = "sparklog.partitions"
CONFIG: Final = "sparklog.config"
CREATOR: Final = "sparklog.creator"

NO_TABLE: Final = TableSnapshot(version=-1, topic_id=None)

APPEND_ONLY_REASON: Final = (
    "its table is append-only (delta.appendOnly = true), so its records stay; set the property to"
    " false, or unset it, to allow retention, key compaction and deletion of records"
)

_SUFFIX: Final = re.compile(r"-([0-9a-f]{8})[0-9a-f]{8}\.parquet$")
# The names are given by `data_file.put` and `file_suffix`.
_OUR_FILE: Final = re.compile(r"partition=\d+/[^/]+-\d+-\d+-[0-9a-f]{16}\.parquet")
_BOUND: Final = re.compile(r"(\d{1,9})(?:/start)?")
"""The end of the `app_id` of a partition's end or start."""
_SURPLUS: Final = 2
"""The multiple of the files that may stay that is remembered, until a sweep removes the rest."""


def is_our_file(path: str) -> bool:
    """Returns whether a data file has a name of ours, by its path in the table's folder."""
    return _OUR_FILE.fullmatch(path) is not None


class Unsynced(NamedTuple):
    """Paths of a version of a table that may not be durable yet."""

    version: int
    files: list[str]
    log: list[str]


def file_suffix(preparation: int | None) -> str:
    """Returns the unique end of a data file's name: 16 hexadecimal digits."""
    if preparation is None:
        return secrets.token_hex(8)
    return f"{preparation:08x}{secrets.token_hex(4)}"


def _preparation_of(path: str) -> int | None:
    """Returns the preparation number in a data file's name; a random one if it was not prepared."""
    named = _SUFFIX.search(path)
    return int(named[1], 16) if named is not None else None


def _lost_preparation(topic: str) -> errors.TimedOut:
    what = f"preparing files for the table of topic {topic}, which another writer has ended,"
    return errors.TimedOut(what=what, timeout_seconds=limits.ORPHAN_GRACE_SECONDS)


def table_folder(topic: str) -> str:
    """Returns the path of the topic's table below a root."""
    return f"topics/{topic}"


def data_path(topic: str, file: TableFile) -> str:
    """Returns the path of `file` in the store, which the log percent-encodes."""
    return f"{table_folder(topic)}/{unquote(file.path)}"


def end_app_id(topic_id: str, partition: int) -> str:
    """The `txn` whose version is the partition's next offset."""
    return f"sparklog/{topic_id}/{partition}"


def start_app_id(topic_id: str, partition: int) -> str:
    """The `txn` whose version is the partition's log start offset."""
    return f"sparklog/{topic_id}/{partition}/start"


def compacted_app_id(topic_id: str, partition: int) -> str:
    """The `txn` whose version is the end offset of the last key compaction."""
    return f"sparklog/{topic_id}/{partition}/compacted"


def tombstones_app_id(topic_id: str, partition: int) -> str:
    """The `txn` below whose version tombstones wait since its `lastUpdated`."""
    return f"sparklog/{topic_id}/{partition}/tombstones"


def preparation_app_id(topic_id: str, broker: int) -> str:
    """The `txn` whose version numbers a broker's preparations; it is odd while one is open."""
    return f"{_preparations(topic_id)}/{broker}"


def _preparations(topic_id: str) -> str:
    """Begins the `app_id` of every preparation; alone, it is that of an older release."""
    return f"sparklog/{topic_id}/preparation"


def query_app_id(topic_id: str, query: str) -> str:
    """The `txn` whose version is the newest batch of a Spark query that is in the table."""
    return f"sparklog/{topic_id}/query/{query}"


def begun_app_id(topic_id: str, query: str) -> str:
    """The `txn` whose version is the newest batch of a query of which a part is in the table.

    Several leaders append the parts of such a batch, and commit them one after another.
    """
    return f"sparklog/{topic_id}/begun/{query}"


def key_app_id(topic_id: str, key: str) -> str:
    """The `txn` of a write with an idempotency key that is in the table; its version is 0."""
    return f"sparklog/{topic_id}/key/{key}"


def maintenance_app_id(topic_id: str) -> str:
    """The `txn` of compaction and retention, by which other engines detect conflicts."""
    return f"sparklog/{topic_id}/maintenance"


# ------------------------------------------------------------------------------ changes


@dataclass(frozen=True, slots=True, kw_only=True)
class TableChange:
    """The content of a commit. Removed files must be active, and added files new."""

    adds: tuple[TableFile, ...] = ()
    removes: tuple[TableFile, ...] = ()
    txns: Mapping[str, int] = field(default_factory=dict)
    """Versions by app id, which never decrease."""
    properties: Mapping[str, str | None] | None = None
    """Table properties to set, or to remove if None."""
    data_change: bool = True
    """False if the rows are the same in other files."""
    drops_rows: bool = False
    """Some rows of the removed files are in no added one; all others are, whatever `data_change`.

    The protocol requires `dataChange` of an action to be true if its rows are nowhere else in the
    commit (https://github.com/delta-io/delta/blob/master/PROTOCOL.md, "Add File and Remove File").
    """
    operation: str = "WRITE"
    preparation: int | None = None
    """The preparation whose files are added; it must be open, and the commit closes it."""
    restores: bool = False
    """The added files were in the table before, so they may be old."""
    create: bool = False
    """The commit creates a topic: a new table, or that of a deleted topic again."""


Decide: TypeAlias = Callable[[TableSnapshot], TableChange | None]
"""Chooses the change for the version after the given one; None abandons it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCommit:
    """A commit that is encoded and not put yet."""

    version: int
    change: TableChange
    actions: Actions
    path: str
    data: bytes


def create_change(
    topic_id: str,
    partitions: int,
    config: Mapping[str, str],
    *,
    creator: tuple[int, int] | None = None,
) -> TableChange:
    """Returns the change that creates a topic, with all partitions empty at offset 0.

    `creator`: the id and the epoch of the broker that will name the topic in the metadata.
    """
    app_ids = [
        name(topic_id, partition)
        for partition in range(partitions)
        for name in (end_app_id, start_app_id)
    ]
    return TableChange(
        txns=dict.fromkeys(app_ids, 0),
        properties={
            TOPIC_ID: topic_id,
            PARTITIONS: str(partitions),
            CONFIG: msgspec.json.encode(dict(config)).decode(),
        }
        | ({} if creator is None else {CREATOR: f"{creator[0]}/{creator[1]}"}),
        operation="CREATE TABLE",
        create=True,
    )


def describe_change(
    snapshot: TableSnapshot, partitions: int, config: Mapping[str, str]
) -> TableChange:
    """Returns the change to a configuration and a number of partitions, not below the present."""
    topic_id = snapshot.topic_id
    assert topic_id is not None
    assert partitions >= snapshot.partitions
    return TableChange(
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


def delete_change(snapshot: TableSnapshot) -> TableChange:
    """Returns the change that deletes the topic: removes every file, and clears the topic id.

    As a table may be dropped although it is append-only, this property ends with the topic.
    """
    ours = (TOPIC_ID, PARTITIONS, CONFIG, CREATOR)
    is_barred = snapshot.append_only
    return TableChange(
        removes=tuple(file for files in snapshot.files for file in files),
        properties=dict.fromkeys((*ours, delta_log.APPEND_ONLY) if is_barred else ours),
        operation="DELETE",
    )


# ------------------------------------------------------------------------------ replay


@dataclass(frozen=True, slots=True, kw_only=True)
class _Topic:
    """The topic according to protocol, schema and properties."""

    topic_id: str | None = None
    partitions: int = 0
    config: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    creator: tuple[int, int] | None = None
    append_only: bool = False
    file_retention_seconds: float | None = None
    log_retention_seconds: float | None = None
    foreign: str | None = None
    """The reason why sparklog does not support this table."""


def _topic_of(protocol: Protocol | None, metadata: Metadata | None) -> _Topic:
    if protocol is None or metadata is None:
        return _Topic(foreign="its log has no protocol or no metadata")
    if reason := delta_log.foreign_reason(protocol, metadata):
        return _Topic(foreign=reason)
    properties, append_only = metadata.configuration, delta_log.is_append_only(metadata)
    if properties.get(TOPIC_ID) is None:
        return _Topic(append_only=append_only)
    try:
        config = msgspec.json.decode(properties.get(CONFIG) or "", type=dict[str, str])
        partitions = int(properties.get(PARTITIONS) or "")
        if not 1 <= partitions <= limits.PARTITIONS_PER_TOPIC:  # each takes memory
            raise ValueError(f"{partitions} partitions")
        return _Topic(
            topic_id=properties[TOPIC_ID],
            partitions=partitions,
            config=MappingProxyType(config),
            creator=_creator(properties.get(CREATOR)),
            append_only=append_only,
            file_retention_seconds=removed_files.interval_seconds(
                properties.get(delta_log.FILE_RETENTION)
            ),
            log_retention_seconds=removed_files.interval_seconds(
                properties.get(delta_log.LOG_RETENTION)
            ),
        )
    except (ValueError, msgspec.MsgspecError) as error:
        return _Topic(foreign=f"its sparklog.* properties are damaged: {error}")


def _creator(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    broker, epoch = text.split("/")
    return int(broker), int(epoch)


def _order(file: TableFile) -> tuple[int, int, str]:
    """Files without statistics first, then by first offset."""
    if file.first is None or file.last is None:
        return (-1, -1, file.path)
    return (file.first, file.last, file.path)


def _end(files: Iterable[TableFile]) -> int:
    """Returns the offset after the greatest one in `files`, by their statistics."""
    return max((file.last + 1 for file in files if file.last is not None), default=0)


def _is_ours(txn: Txn) -> bool:
    return txn.app_id.startswith("sparklog/")


class _Replay:
    """The state of the log. Accepts every commit in turn; `snapshot` checks the result.

    Paths are compared percent-decoded, because engines may spell them differently.
    """

    def __init__(self, *, remembers_removed: bool) -> None:
        self._remembers_removed = remembers_removed
        self.version = -1
        self.protocol: Protocol | None = None
        self.metadata: Metadata | None = None
        self.txns: dict[str, Txn] = {}
        self.preparations: dict[str, int] = {}
        """The number of each broker's last preparation, by `app_id`; odd ones are open."""
        self.active: dict[str, Add] = {}
        self.removed: dict[str, Remove] = {}
        self._partition_values: dict[tuple[str, str | None], dict[str, str | None]] = {}
        self._topic = _Topic()
        self._files: dict[int, tuple[TableFile, ...]] = {}
        self._file_ends: dict[int, int] = {}
        """The offset after the last one in each partition's files, by their statistics."""
        self._changed: set[int] = set()
        """Partitions that differ from the three lists below, which `snapshot` brings up to date."""
        self._ends: list[int] = []
        self._starts: list[int] = []
        self._files_in_order: list[tuple[TableFile, ...]] = []
        self._foreign: dict[int, str] = {}
        """The reason why sparklog does not support a partition's files, by its number."""
        self._unusable: dict[str, str] = {}
        self._unknown: frozenset[str] = frozenset()
        self.gaps: Gaps = {}

    @property
    def topic_id(self) -> str | None:
        return self._topic.topic_id

    @property
    def append_only(self) -> bool:
        return self._topic.append_only

    @property
    def file_retention_seconds(self) -> float | None:
        return self._topic.file_retention_seconds

    def apply(self, version: int, actions: Actions) -> None:
        """Applies the actions of a commit or checkpoint, which lead to `version`."""
        self.version = version
        if actions.protocol or actions.metadata:
            self.protocol = actions.protocol or self.protocol
            self.metadata = actions.metadata or self.metadata
            self._set_topic(_topic_of(self.protocol, self.metadata))
        self._unknown |= actions.unknown
        self._apply_txns(actions.txns)
        gone: dict[int, set[str]] = {}
        come: dict[int, list[TableFile]] = {}
        for remove in actions.removes:
            path = unquote(remove.path)
            self._deactivate(path, gone)
            if self._remembers_removed:
                self.removed[path] = self._shared(remove)
        for add in actions.adds:
            path = unquote(add.path)
            self._deactivate(path, gone)
            self.removed.pop(path, None)
            self.active[path] = add
            try:
                file = delta_log.file_of(add)
            except ValueError as error:
                self._unusable[path] = str(error)
            else:
                come.setdefault(file.partition, []).append(file)
        if self.topic_id is not None and not any(map(_is_ours, actions.txns)):
            self._find_removed_rows(self.topic_id, gone, come)
        for partition in gone.keys() | come.keys():
            self._rearrange(partition, gone.get(partition), come.get(partition, []))

    def _shared(self, remove: Remove) -> Remove:
        """Returns the action with a mapping that all files of its partition have: many are kept."""
        values = remove.partition_values or {}
        if len(values) != 1:
            return remove
        shared = self._partition_values.setdefault(next(iter(values.items())), values)
        return msgspec.structs.replace(remove, partition_values=shared)

    def _apply_txns(self, txns: Collection[Txn]) -> None:
        topic_id = self.topic_id or ""
        preparations = _preparations(topic_id)
        for txn in txns:
            self.txns[txn.app_id] = txn
            if txn.app_id.startswith(preparations):
                self.preparations[txn.app_id] = txn.version
            if (number := self._partition_of(txn.app_id)) is not None:
                self._changed.add(number)
        self.add_gaps(gaps.of_txns(topic_id, txns))

    def _find_removed_rows(
        self,
        topic_id: str,
        gone: Mapping[int, set[str]],
        come: Mapping[int, list[TableFile]],
    ) -> None:
        """Notes gaps that another engine has made. Each commit of ours that does has a `txn`."""
        found: dict[tuple[int, GapCause], int] = {}
        for partition, paths in gone.items():
            files = [file for file in self._files.get(partition, ()) if file.path in paths]
            end = self._end_of(topic_id, partition)
            until = gaps.removed_below(files, come.get(partition, ()), end)
            if until:
                found[partition, GapCause.ENGINE] = until
        self.add_gaps(found)

    def add_gaps(self, more: Gaps) -> None:
        """Adds causes; offsets only rise."""
        risen = {each: until for each, until in more.items() if until > self.gaps.get(each, 0)}
        if risen:
            self.gaps = {**self.gaps, **risen}

    def unnoted_gaps(self) -> dict[str, int]:
        """Returns the `txn` of gaps that were found and that no commit names, by `app_id`."""
        found = {
            gaps.app_id(self.topic_id or "", *each): until
            for each, until in self.gaps.items()
            if each[1] is GapCause.ENGINE
        }
        return {app_id: until for app_id, until in found.items() if until > self.offset(app_id)}

    def _set_topic(self, topic: _Topic) -> None:
        if topic.topic_id != self.topic_id:
            preparations = _preparations(topic.topic_id or "")
            self.preparations = {
                app_id: txn.version
                for app_id, txn in self.txns.items()
                if app_id.startswith(preparations)
            }
            self.gaps = gaps.of_txns(topic.topic_id or "", self.txns.values())
        self._topic = topic
        self._ends = [0] * topic.partitions
        self._starts = [0] * topic.partitions
        self._files_in_order = [()] * topic.partitions
        self._foreign.clear()
        self._changed = {*range(topic.partitions), *self._files}

    def _partition_of(self, app_id: str) -> int | None:
        """Returns the partition whose end or start the `txn` is, if it is one."""
        named = _BOUND.fullmatch(app_id.removeprefix(f"sparklog/{self.topic_id}/"))
        return int(named[1]) if named is not None else None

    def _deactivate(self, path: str, gone: dict[int, set[str]]) -> None:
        add = self.active.pop(path, None)
        if add and self._unusable.pop(path, None) is None:
            gone.setdefault(delta_log.file_of(add).partition, set()).add(add.path)

    def _rearrange(self, partition: int, gone: set[str] | None, come: list[TableFile]) -> None:
        """Updates the ordered files of the partition; appending one copies the tuple."""
        files = self._files.get(partition, ())
        if gone:
            files = tuple(file for file in files if file.path not in gone)
            self._file_ends[partition] = _end(files)
        come.sort(key=_order)
        in_order = not files or not come or _order(files[-1]) < _order(come[0])
        files += tuple(come)
        self._files[partition] = files if in_order else tuple(sorted(files, key=_order))
        self._file_ends[partition] = max(self._file_ends.get(partition, 0), _end(come))
        self._changed.add(partition)

    def snapshot(self, topic: str) -> TableSnapshot:
        """Returns the state; looks at the partitions that changed since the last call only.

        Raises `ForeignTable`.
        """
        if self.version < 0:
            return NO_TABLE
        self._update_partitions()
        if reason := self._foreign_reason():
            raise errors.ForeignTable(topic=topic, reason=reason)
        return TableSnapshot(
            version=self.version,
            topic_id=self.topic_id,
            partitions=self._topic.partitions,
            config=self._topic.config,
            creator=self._topic.creator,
            ends=tuple(self._ends),
            starts=tuple(self._starts),
            files=tuple(self._files_in_order),
            gaps=self.gaps,
            append_only=self._topic.append_only,
            file_retention_seconds=self._topic.file_retention_seconds,
            log_retention_seconds=self._topic.log_retention_seconds,
        )

    def _update_partitions(self) -> None:
        topic_id, count = self.topic_id, self._topic.partitions
        if topic_id is None:
            return
        for number in self._changed:
            if number < count:
                self._ends[number] = self._end_of(topic_id, number)
                self._starts[number] = self.offset(start_app_id(topic_id, number))
                self._files_in_order[number] = self._files.get(number, ())
            if reason := self._foreign_files_reason(topic_id, number):
                self._foreign[number] = reason
            else:
                self._foreign.pop(number, None)
        self._changed.clear()

    def bounds(self, topic_id: str, numbers: range) -> TableSnapshot | None:
        """Returns the bounds of the partitions, which are valid even if the rest is not."""
        if any(end_app_id(topic_id, number) not in self.txns for number in numbers):
            return None
        return TableSnapshot(
            version=self.version,
            topic_id=topic_id,
            partitions=len(numbers),
            ends=tuple(self._end_of(topic_id, number) for number in numbers),
            starts=tuple(self.offset(start_app_id(topic_id, number)) for number in numbers),
            files=((),) * len(numbers),
        )

    def _end_of(self, topic_id: str, number: int) -> int:
        """Returns the end by `txn`, or by statistics if another engine has dropped it."""
        txn = self.txns.get(end_app_id(topic_id, number))
        return txn.version if txn else self._file_ends.get(number, 0)

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
        return next(iter(self._foreign.values()), None)

    def _foreign_files_reason(self, topic_id: str, partition: int) -> str | None:
        files, count = self._files.get(partition), self._topic.partitions
        if files and partition >= count:
            return f"{files[0].path} is of partition {partition}, and there are {count}"
        txn = self.txns.get(end_app_id(topic_id, partition))
        end = self._file_ends.get(partition, 0)
        if txn and end > txn.version:
            return (
                f"partition {partition} has rows up to offset {end - 1}, and ends at"
                f" {txn.version}: another writer has added rows that are not of the log"
            )
        return None

    def compacted(self) -> Actions:
        """Returns the whole state, without the `txn` of deleted topics."""
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
        """Drops idempotency keys that are too old or too many."""
        prefix = key_app_id(self.topic_id or "", "")
        keys = [txn for app_id, txn in self.txns.items() if app_id.startswith(prefix)]
        keys.sort(key=lambda txn: txn.last_updated or 0)
        before_ms = now_ms - round(limits.BATCH_MEMORY_SECONDS * 1e3)
        surplus = len(keys) - limits.KEYS_REMEMBERED
        for index, txn in enumerate(keys):
            if index >= surplus and (txn.last_updated or 0) >= before_ms:
                break
            del self.txns[txn.app_id]

    def forget_removed(self, before_ms: int, *, young_ms: int, most: int) -> None:
        """Drops tombstones from before that time, those without a time, and the oldest surplus.

        None that is not older than `young_ms` counts as surplus.
        """
        found = [
            (removed_files.removed_ms(remove) or 0, path)
            for path, remove in self.removed.items()
            if (remove.deletion_timestamp or 0) >= before_ms
        ]
        if len(found) > most:
            found.sort(reverse=True)
            found = [each for n, each in enumerate(found) if n < most or each[0] >= young_ms]
        self.removed = {path: self.removed[path] for _, path in found}


# ------------------------------------------------------------------------------ the table


class TopicTable:
    """The table of a topic. Safe for several threads: a broker has one for each topic.

    Each method reads and changes the state under one lock, and the state only advances. So two
    calls may see different versions: a caller that needs one version for several questions keeps
    the `snapshot` that it has, or asks in `decide`, which runs under the lock on exactly the
    version that it is given. `snapshot` is replaced as a whole, after it was checked, and needs no
    lock: it stays the last valid one where another thread meets a log that cannot be read.

    The lock is held over the requests that find or put the next version: a thread that also wants
    to advance the table would have to read that version anyway. It is not held while files are
    checked, commits read back, or a checkpoint encoded and put. `decide` takes no lock for which a
    holder waits for a table. A broker's acks wait for no table.

    `only_reads`: do not remember removed files. Readers do not need them, and they are most of an
    old table's checkpoint. `orphan_grace_seconds` is that of writers; a sweeper may wait longer.
    `retention`: of removed files, beyond `removed_file_grace_seconds`.
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
        retention: RemovedFileRetention = removed_files.NO_RETENTION,
    ) -> None:
        self.store = store
        self.topic = topic
        self.clock = clock
        self._only_reads = only_reads
        self.orphan_grace_seconds = orphan_grace_seconds
        self.removed_file_grace_seconds = removed_file_grace_seconds
        self._retention = retention
        self.folder = table_folder(topic)
        self.log_folder = f"{self.folder}/{delta_log.LOG_FOLDER}"
        self.checkpoint_version = -1
        """The newest checkpoint that was loaded or written."""
        self._replay = self._beginning()
        self._is_synced = False
        self._synced_version = -1
        """The version up to which the replayed commits are durable."""
        self._unsynced_base: list[str] = []
        """The parts of the checkpoint from which the replay started."""
        self._unsynced_files: set[str] = set()
        """Data files that other engines have added, percent-decoded."""
        self._looked_at: dict[str, float | None] = {}
        """The monotonic time of the first check of each active file; None: no further check."""
        self._unconfirmed: dict[int, tuple[int, float]] = {}
        """Commits to read back: ours, and those that remove files.

        By version: the CRC32C, and the monotonic time at which the commit was put or read.
        """
        self._snapshot = NO_TABLE
        self._lock = threading.RLock()

    @property
    def snapshot(self) -> TableSnapshot:
        """The table as last read, without access to the store."""
        return self._snapshot

    def bounds(self, topic_id: str, partitions: int) -> TableSnapshot | None:
        """Returns starts and ends of the partitions, without files, of an unsupported table.

        The `txn` is valid whatever another engine did to schema or protocol; None if it is missing.
        """
        with self._lock:
            return self._replay.bounds(topic_id, range(partitions))

    def txn(self, app_id: str) -> Txn | None:
        """Returns the `txn` of `app_id` in the last read version."""
        return self._replay.txns.get(app_id)

    def unnoted_gaps(self) -> dict[str, int]:
        """Returns the `txn` to commit for rows that other engines have removed, by `app_id`."""
        with self._lock:
            return self._replay.unnoted_gaps()

    def batches(self, topic_id: str) -> list[tuple[BatchId, BatchKind, int]]:
        """Returns the newest batch of each Spark query, and all keys, in the last read version.

        Each has its kind and the time of publishing in µs, which is the order.
        """
        found = []
        with self._lock:
            for app_id, txn in self._replay.txns.items():
                for kind, prefix in (
                    (BatchKind.NUMBERED, query_app_id(topic_id, "")),
                    (BatchKind.NUMBERED_PART, begun_app_id(topic_id, "")),
                    (BatchKind.NAMED, key_app_id(topic_id, "")),
                ):
                    if app_id.startswith(prefix):
                        batch_id = BatchId(app_id.removeprefix(prefix), txn.version)
                        found.append((batch_id, kind, (txn.last_updated or 0) * 1_000))
        return sorted(found, key=lambda each: each[2])

    # -------------------------------------------------------------------------- reading

    def refresh(self) -> TableSnapshot:
        """Reads the newest version, and returns it.

        Raises `ForeignTable`; `CorruptObject` for an incomplete commit (`snapshot` is then the
        version before it) or if no checkpoint is complete; and `MissingObject` for a commit that
        later versions need.
        """
        with self._lock:
            try:
                self._advance()
            except errors.CorruptObject:
                self._observe()
                raise
            return self._observe()

    def sync(self) -> None:
        """Makes the state that was read durable, so that it survives a power cut.

        A commit is visible before it is durable, and its writer may die in between. Other engines
        flush neither their commits nor the data files that these add. So this precedes any step
        that cannot be undone and depends on that state. Raises `SyncFailed`.
        """
        with self._lock:
            if not self._is_synced:
                self._sync_files()

    def _sync_files(self) -> None:
        unsynced = self.unsynced()
        self.store.sync_files(unsynced.files)
        self.store.sync_files(unsynced.log)
        self.note_synced(unsynced.version)

    def unsynced(self) -> Unsynced:
        """Returns what `sync` makes durable: the files first, and then the log."""
        with self._lock:
            version = self._replay.version
            if self._is_synced:
                return Unsynced(version, [], [])
            active = self._unsynced_files & self._replay.active.keys()
            versions = range(self._synced_version + 1, self._replay.version + 1)
            log = [*self._unsynced_base, *map(self._commit_path, versions)]
            return Unsynced(version, [f"{self.folder}/{path}" for path in sorted(active)], log)

    def note_synced(self, version: int) -> None:
        """Records that what `unsynced` has returned for this version is durable.

        Ignores it if a later version has been read meanwhile.
        """
        with self._lock:
            if version != self._replay.version:
                return
            self._is_synced = True
            self._unsynced_files.clear()
            self._unsynced_base.clear()
            self._synced_version = version

    def confirm(self, until: float | None = None) -> None:
        """Reads back commits where another engine may overwrite one.

        These are our commits, and any that remove files, as far as they were put or read by
        `until` (monotonic seconds): the put of another engine may still be under way after ours.
        Each is read back once; without `until`, a young one is read back by a later call again.
        Raises `ForeignTable` if a version has another content now, so that the table lacks changes
        that were committed.
        """
        with self._lock:
            noted = {
                version: each
                for version, each in sorted(self._unconfirmed.items())
                if until is None or each[1] <= until
            }
            if until is None:
                until = self.clock.monotonic() - limits.CONFIRM_AFTER_SECONDS
        at_once = limits.TABLE_REQUESTS_AT_ONCE
        found = in_parallel(self.store, self._checksum, noted, at_once=at_once)
        for (version, (expected, _)), checksum in zip(noted.items(), found, strict=True):
            if checksum not in (None, expected):
                reason = (
                    f"another engine has overwritten commit {version}, because it does not"
                    " commit conditionally; restart the broker to publish it again"
                )
                raise errors.ForeignTable(topic=self.topic, reason=reason)
        with self._lock:
            for version, each in noted.items():
                if each[1] <= until and self._unconfirmed.get(version) == each:
                    del self._unconfirmed[version]  # not noted again meanwhile

    def ends_before(self, horizon_us: int) -> dict[int, int]:
        """Returns ends of partitions that were committed before that time, by the store's clock.

        They may be lower than the ends then; none if the newest commits are too many or are gone.
        Raises the errors of the store.
        """
        snapshot = self._snapshot
        version, ends = snapshot.version, dict(enumerate(snapshot.ends))
        first = max(version - _OLD_COMMITS, 0)
        stats = self.store.list_after(self.log_folder, delta_log.commit_name(first))
        names = {delta_log.commit_name(each): each for each in range(first, version + 1)}
        times = {names[stat.name]: stat.modified_us for stat in stats if stat.name in names}
        old = [each for each, modified_us in times.items() if modified_us < horizon_us]
        if not old:
            return {}
        for each in range(max(old) + 1, version + 1):
            try:
                data = self.store.get(self._commit_path(each))
                adds = delta_log.decode_commit(data, self._commit_path(each)).adds
                files = [delta_log.file_of(add) for add in adds]
            except (ObjectMissing, errors.Corrupt, ValueError):
                return {}
            for file in files:
                known = ends.get(file.partition, 0)
                ends[file.partition] = min(known, 0 if file.first is None else file.first)
        return ends

    def forget_read_backs(self) -> None:
        """Drops the commits that `confirm` would read back: for a broker that publishes none."""
        with self._lock:
            self._unconfirmed.clear()

    def _checksum(self, version: int) -> int | None:
        """Returns the CRC32C of a commit; None if it was cleaned up, and is in a checkpoint."""
        try:
            return crc32c.crc32c(self.store.get(self._commit_path(version)))
        except ObjectMissing:
            return None

    def lost_files(self, torn: Callable[[Mapping[str, int]], Collection[str]]) -> set[str]:
        """Checks the new files of the table, and returns the paths of the lost ones.

        Another engine may have begun to remove files before the table named them, and take a while.
        So every call checks each file, until a grace of removed files after its first check. `torn`
        returns the paths that do not exist, or have fewer bytes than the log says.
        """
        with self._lock:
            active, now = self._replay.active, self.clock.monotonic()
            for path in [path for path in self._looked_at if path not in active]:
                del self._looked_at[path]
            due = sorted(path for path in active if self._looked_at.get(path, now) is not None)
            sizes = {f"{self.folder}/{path}": active[path].size for path in due}
        missing = set(torn(sizes))
        with self._lock:
            active = self._replay.active  # a file may have left it, and its folder, meanwhile
            found = [path for path in due if path in active]
            lost = {path for path in found if f"{self.folder}/{path}" in missing}
            for path in found:
                began = self._looked_at.setdefault(path, now)
                assert began is not None
                is_over = now - began >= self.removed_file_grace_seconds
                self._looked_at[path] = None if is_over and path not in lost else began
            return lost

    def _observe(self) -> TableSnapshot:
        if self._snapshot.version != self._replay.version:
            self._snapshot = self._replay.snapshot(self.topic)
        return self._snapshot

    def _beginning(self) -> _Replay:
        return _Replay(remembers_removed=not self._only_reads)

    def _advance(self) -> None:
        """Replays the commits after the present version, by probing for the next ones.

        A probe needs no listing that already has the newest puts. The log ends before version v if
        commit v is absent and v-1 exists afterwards: commits are removed oldest first, so v was not
        removed. If v-1 is gone, the newest checkpoint is looked for.

        On an object store as many commits are read at once as this call has found before. A commit
        counts only if all before it were found, so their order of arrival does not matter.
        """
        if self._replay.version < 0:
            self._load()
        most = min(self.store.requests_at_once, limits.TABLE_REQUESTS_AT_ONCE)
        count = 0
        while True:
            first = self._replay.version + 1
            found = self._read_commits(first, max(min(count, most), 1))
            for version, data in enumerate(found, first):
                self._replay_commit(version, data)
            count += len(found)
            if not found and (self._exists(first - 1) or not self._load()):
                return

    def _read_commits(self, first: int, count: int) -> list[pa.Buffer]:
        """Reads up to `count` commits from `first` on, up to the first missing one."""

        def read(version: int) -> pa.Buffer | None:
            try:
                return self.store.get(self._commit_path(version))
            except ObjectMissing:
                return None

        found = in_parallel(self.store, read, range(first, first + count))
        return list(itertools.takewhile(lambda data: data is not None, found))

    def _replay_commit(self, version: int, data: pa.Buffer) -> None:
        actions = delta_log.decode_commit(data, self._commit_path(version))
        self._is_synced = False
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
            self._unsynced_files.update(path for path in paths if not is_our_file(path))

    def _commit_path(self, version: int) -> str:
        return f"{self.log_folder}/{delta_log.commit_name(version)}"

    def _exists(self, version: int) -> bool:
        """Returns whether the commit exists; if so, no later one is cleaned up."""
        if version < 0:
            return True
        try:
            self.store.stat(self._commit_path(version))
        except ObjectMissing:
            return False
        return True

    def _load(self) -> bool:
        """Loads the newest checkpoint. Returns False if it is not newer than the present state."""
        failure: errors.Corrupt
        for _ in range(_TABLE_LOAD_ATTEMPTS):
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
                    replay = self._beginning()
                    replay.apply(version, actions)
                    if replay.topic_id == self._replay.topic_id:
                        replay.add_gaps(self._replay.gaps)  # also those that are not noted yet
                    self._replay = replay
                    self._forget_old_tombstones()
                    self._is_synced = False
                    self._synced_version = version
                    self._unsynced_base = [f"{self.log_folder}/{name}" for name in names]
                    self._unsynced_files.clear()
                    self._note_foreign_files(actions)
                    return True
        raise failure

    def _places_to_list_from(self) -> list[str]:
        """Returns the names to list from: of the hinted checkpoint, and the start of the log."""
        hint = self._last_checkpoint()
        return [""] if hint is None else [f"{hint:020d}", ""]

    def _last_checkpoint(self) -> int | None:
        try:
            hint = self.store.get(f"{self.log_folder}/{delta_log.LAST_CHECKPOINT}")
        except ObjectMissing:
            return None
        return delta_log.decode_last_checkpoint(hint)

    def _newest_base(self, after: str) -> tuple[int, Actions, Sequence[str]]:
        """Finds the newest complete checkpoint with all commits after it; -1: the log's start.

        Returns it with the names of its parts.
        """
        stats = self.store.list_after(self.log_folder, after)
        listing = delta_log.read_names(stat.name for stat in stats)
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
            path=self._commit_path(gap), reason=f"version {newest} is newer"
        )

    def read_checkpoint(self, names: Sequence[str]) -> Actions:
        """Reads a classic checkpoint from its parts. Raises `CorruptObject` and `ObjectMissing`."""
        parts = []
        for name in names:
            path = f"{self.log_folder}/{name}"
            data = self.store.get(path)
            parts.append(delta_log.decode_checkpoint(data, path, removes=not self._only_reads))
        whole = delta_log.joined(parts)
        if not whole.protocol or not whole.metadata:
            path = f"{self.log_folder}/{names[0]}"
            raise errors.CorruptObject(path=path, check="it has no protocol or no metadata")
        return whole

    # -------------------------------------------------------------------------- writing

    def commit(self, decide: Decide) -> TableSnapshot:
        """Commits the change that `decide` returns, as the version after the one it was given.

        `decide` first gets the last read version, and a newer one each time that another writer was
        faster. It raises or returns None to abandon the change. Returns the snapshot with the
        change, or the one on which `decide` abandoned it.

        Raises like `refresh`. No effect: `StorageUnavailable` (also after too many lost
        races), `StorageFull`, `PolicyViolation` for a removal of rows from an append-only table,
        and `TimedOut` for a file that has become too old to be added: write it again. Perhaps an
        effect: `OutcomeUnknown`; look for your own files or `txn`.
        """
        assert not self._only_reads
        with self._lock:
            snapshot = self._newest()
            for _ in range(TABLE_COMMIT_ATTEMPTS):
                change = decide(snapshot)
                if change is None:
                    return snapshot
                self.sync()
                if self._put(snapshot.version + 1, change):
                    return self._observe()
                snapshot = self.refresh()
            raise _overtaken(self)

    def _newest(self) -> TableSnapshot:
        """Returns the last read version, or the newest one if none was read completely."""
        is_fresh = 0 <= self._snapshot.version == self._replay.version
        return self._snapshot if is_fresh else self.refresh()

    def prepare_commit(self, decide: Decide) -> PreparedCommit | TableSnapshot:
        """Returns the commit of the change that `decide` returns, which is still to be claimed.

        Returns the snapshot on which `decide` abandoned the change. Raises like `commit`. Other
        commits may come in between: then `finish_commit` finds that this one was too late.
        """
        assert not self._only_reads
        with self._lock:
            snapshot = self._newest()
            change = decide(snapshot)
            if change is None:
                return snapshot
            self.sync()
            return self._prepare(snapshot.version + 1, change)

    def finish_commit(self, prepared: PreparedCommit) -> TableSnapshot | None:
        """Returns the snapshot with a commit whose put has succeeded; None if it does not count.

        Raises `OutcomeUnknown`.
        """
        with self._lock:
            return self._observe() if self._finish(prepared) else None

    def _put(self, version: int, change: TableChange) -> bool:
        """Returns whether the change is committed as `version`; the replay then includes it."""
        prepared = self._prepare(version, change)
        if not claim(self.store, prepared.path, prepared.data, clock=self.clock):
            return False
        return self._finish(prepared)

    def _prepare(self, version: int, change: TableChange) -> PreparedCommit:
        self._check(change)
        actions = self._actions(change)
        info = CommitInfo(
            timestamp=self.clock.now_us() // 1_000,
            operation=change.operation,
            operation_parameters={},
            # Other engines allow a rewrite of theirs beside appends that read nothing.
            is_blind_append=not change.removes and not change.properties,
            engine_info=f"sparklog/{VERSION}",
            txn_id=secrets.token_hex(16),
        )
        return PreparedCommit(
            version=version,
            change=change,
            actions=actions,
            path=self._commit_path(version),
            data=delta_log.encode_commit(info, actions),
        )

    def _finish(self, prepared: PreparedCommit) -> bool:
        """Returns whether a commit that was put counts; the replay then includes it."""
        version = prepared.version
        self._expect(version, prepared.data)
        try:
            if self._replay.version >= version:
                # Another thread has read it meanwhile, unless it fell into the removed part.
                return self._names_any(prepared.change)
            if self._replay.version == version - 1 and self._follows(version):
                self._apply(version, prepared.actions)
                if self._is_synced:
                    self._synced_version = version  # `claim` has made ours durable
                return True
            self._load()
            if self._replay.version >= version:
                # A checkpoint may include our commit: then it names the files that we added.
                return self._names_any(prepared.change)
            self._advance()
        except errors.SparklogError as error:  # also after a refusal: the put may have succeeded
            path = prepared.path
            raise errors.OutcomeUnknown(what=f"commit of {path}", reason=str(error)) from error
        return True

    def _names_any(self, change: TableChange) -> bool:
        return any(self.is_named(unquote(file.path)) for file in change.adds)

    def _expect(self, version: int, data: pa.Buffer | bytes) -> None:
        """Notes the commit for `confirm`, if the store allows overwriting."""
        if not self.store.is_local:
            self._unconfirmed[version] = crc32c.crc32c(data), self.clock.monotonic()

    def _follows(self, version: int) -> bool:
        """Returns whether the new commit continues the log, and is not in its removed part."""
        if version == 0:
            return len(self.store.list_after(self.log_folder)) == 1
        return self._exists(version - 1)

    def _check(self, change: TableChange) -> None:
        replay = self._replay
        assert replay.topic_id is None or not change.create
        assert replay.topic_id is not None or not change.adds
        assert all(unquote(file.path) in replay.active for file in change.removes)
        assert not any(unquote(file.path) in replay.active for file in change.adds)
        assert all(version >= replay.offset(app_id) for app_id, version in change.txns.items())
        if replay.append_only and self._removes_rows(change):
            raise errors.PolicyViolation(topic=self.topic, reason=APPEND_ONLY_REASON)
        if change.preparation is not None and change.preparation not in self.preparations:
            raise _lost_preparation(self.topic)
        limit_seconds = self.orphan_grace_seconds / 2
        for file in change.adds:
            if change.preparation is not None and self.is_prepared(unquote(file.path)):
                continue
            if change.restores:
                continue  # no orphan: the log knows it
            if self.clock.now_us() - file.modified_us > limit_seconds * 1e6:
                what = f"writing {file.path} and adding it"
                raise errors.TimedOut(what=what, timeout_seconds=limit_seconds)

    def _removes_rows(self, change: TableChange) -> bool:
        """Returns whether rows would leave a table that stays append-only."""
        if delta_log.APPEND_ONLY in (change.properties or {}):
            return False
        if change.create and self._replay.active:
            return True
        return bool(change.removes) and (change.data_change or change.drops_rows)

    def _actions(self, change: TableChange) -> Actions:
        replay, now_ms = self._replay, self.clock.now_us() // 1_000
        txns = dict(change.txns)
        if change.preparation is not None:
            txns[self.preparations[change.preparation]] = change.preparation + 1
        paths = [unquote(file.path) for file in change.removes]
        # No VACUUM may remove files with the same rows as an added one; see `restoring`.
        is_kept = bool(change.adds) and not change.data_change
        kept_ms = round(limits.REPLACED_KEPT_SECONDS * 1e3) if is_kept else 0
        if change.create:  # files that another engine added while there was no topic
            paths = list(replay.active)
        return Actions(
            protocol=None if replay.protocol else delta_log.PROTOCOL,
            metadata=self._metadata(change.properties, now_ms) if change.properties else None,
            txns=[
                Txn(app_id=app_id, version=version, last_updated=now_ms)
                for app_id, version in txns.items()
            ],
            removes=[
                Remove(
                    path=replay.active[path].path,
                    deletion_timestamp=now_ms + kept_ms,
                    tags={removed_files.REMOVED_AT: str(now_ms)} if is_kept else None,
                    data_change=change.data_change or change.drops_rows,
                    extended_file_metadata=True,
                    partition_values=replay.active[path].partition_values,
                    size=replay.active[path].size,
                )
                for path in paths
            ],
            adds=[delta_log.add_of(file, data_change=change.data_change) for file in change.adds],
        )

    def _metadata(self, properties: Mapping[str, str | None], now_ms: int) -> Metadata:
        before = self._replay.metadata or delta_log.new_metadata(
            table_id=str(uuid.uuid4()), created_ms=now_ms
        )
        merged = {**before.configuration, **properties}
        kept = {name: value for name, value in merged.items() if value is not None}
        return msgspec.structs.replace(before, configuration=kept)

    # -------------------------------------------------------------------------- preparations

    @property
    def preparations(self) -> dict[int, str]:
        """The numbers of the open preparations in the last read version, with their `app_id`."""
        known = self._replay.preparations
        return {number: app_id for app_id, number in known.items() if number % 2}

    def is_prepared(self, path: str) -> bool:
        """Returns whether a commit may still add the file, because its preparation is open."""
        return _preparation_of(path) in self.preparations

    def prepare(self, topic_id: str, broker: int) -> int:
        """Opens a preparation of files for one later commit, and closes the broker's other one.

        Those of other brokers stay open: each leader prepares the files of its own partitions. A
        number is used once in a table, whichever broker has it. Returns it; the names of the files
        contain it. Raises like `commit`, and `TimedOut` if the topic no longer exists.
        """
        opened: int | None = None

        def decide(before: TableSnapshot) -> TableChange | None:
            nonlocal opened
            opened = None
            if before.topic_id != topic_id:
                return None
            last = max(self._replay.preparations.values(), default=0)
            opened = last + 1 + last % 2
            app_id = preparation_app_id(topic_id, broker)
            return TableChange(txns={app_id: opened}, operation="PREPARE")

        self.commit(decide)
        if opened is None:
            raise _lost_preparation(self.topic)
        return opened

    def renew(self, number: int) -> None:
        """Renews the preparation, so that no sweeper closes it.

        Raises like `commit`, and `TimedOut` if it is closed.
        """
        app_id: str | None = None

        def decide(_before: TableSnapshot) -> TableChange | None:
            nonlocal app_id
            app_id = self.preparations.get(number)
            if app_id is None:
                return None
            return TableChange(txns={app_id: number}, operation="PREPARE")

        self.commit(decide)
        if app_id is None:
            raise _lost_preparation(self.topic)

    def end_preparations(self, before_us: int) -> None:
        """Closes the open preparations that were not renewed since. Raises like `commit`."""

        def decide(_before: TableSnapshot) -> TableChange | None:
            old = {
                app_id: number + 1
                for number, app_id in self.preparations.items()
                if (self._replay.txns[app_id].last_updated or 0) * 1_000 < before_us
            }
            return TableChange(txns=old, operation="SWEEP") if old else None

        self.commit(decide)

    # -------------------------------------------------------------------------- keeping

    def checkpoint(self) -> None:
        """Writes a checkpoint of the last read version, and reads it back before naming it.

        Raises `ForeignTable`, `CorruptObject` if the stored checkpoint differs, `SyncFailed`, and
        `OutcomeUnknown`, after which the next version's checkpoint is as good.
        """
        assert not self._only_reads
        with self._lock:
            version = self._replay.version
            if version < 0:
                return
            self._replay.snapshot(self.topic)
            self.sync()  # a checkpoint must not exist without its files either
            self._forget_old_tombstones()
            self._replay.forget_keys(self.clock.now_us() // 1_000)
            whole = self._replay.compacted()
        name = delta_log.checkpoint_name(version)
        path = f"{self.log_folder}/{name}"
        data = delta_log.encode_checkpoint(whole)
        # Another writer's is as good, if it is complete.
        claim(self.store, path, data, clock=self.clock)
        found = self.read_checkpoint([name])
        if {unquote(add.path) for add in found.adds} != {unquote(add.path) for add in whole.adds}:
            count = len(whole.adds)
            check = f"it names {len(found.adds)} files, not the {count} of version {version}"
            raise errors.CorruptObject(path=path, check=check)
        with self._lock:
            self.checkpoint_version = max(self.checkpoint_version, version)
        if (self._last_checkpoint() or 0) <= version:
            with contextlib.suppress(PutUnresolved):  # a hint; a listing finds it as well
                self.store.put(
                    f"{self.log_folder}/{delta_log.LAST_CHECKPOINT}",
                    delta_log.encode_last_checkpoint(version, found.count),
                )

    def is_needed(self, path: str) -> bool:
        """Returns whether the last read version names the file, or a later commit may.

        `path` is relative to the table's folder and not percent-encoded, as in the three below.
        """
        with self._lock:  # one version, or a commit between the questions answers neither
            return self.is_named(path) or self.is_prepared(path)

    def is_named(self, path: str) -> bool:
        """Returns whether the last read version has the file, or its removal."""
        assert not self._only_reads
        with self._lock:
            return path in self._replay.active or path in self._replay.removed

    def expired(self, *, is_retained: bool = True) -> list[str]:
        """Returns removed files that are remembered and need not stay, oldest first.

        `is_retained`: false if they need to stay for their grace only.
        """
        assert not self._only_reads
        with self._lock:
            replay, removed = self._replay, dict(self._replay.removed)
            table_bytes = sum(add.size for add in replay.active.values())
        return removed_files.expired(
            removed,
            self._retention if is_retained else removed_files.NO_RETENTION,
            now_ms=self.clock.now_us() // 1_000,
            grace_seconds=self.removed_file_grace_seconds,
            property_seconds=replay.file_retention_seconds if is_retained else None,
            table_bytes=table_bytes,
        )

    @property
    def removed_count(self) -> int:
        """The number of removed files that are remembered."""
        return len(self._replay.removed)

    def forget_removed(self, paths: Iterable[str]) -> None:
        """Forgets files that no longer exist, so that checkpoints omit them."""
        with self._lock:
            for path in paths:
                self._replay.removed.pop(path, None)

    def _forget_old_tombstones(self) -> None:
        """Forgets tombstones long after their files should be gone, for a late sweeper.

        A file that still exists then is an orphan. Brokers that do not maintain the table never
        hear that it is gone.
        """
        own_seconds = self._replay.file_retention_seconds
        kept_seconds = max(self._retention.seconds_of(own_seconds), self.removed_file_grace_seconds)
        kept_seconds += TOMBSTONE_SECONDS
        now_ms = self.clock.now_us() // 1_000
        self._replay.forget_removed(
            now_ms - round(kept_seconds * 1_000),
            young_ms=now_ms - round(self.removed_file_grace_seconds * 1_000),
            most=self._retention.files_of(own_seconds) * _SURPLUS,
        )


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

OpenTable: TypeAlias = Callable[[str], TopicTable]
"""Returns the table of a topic, by its name, which is not read yet."""


def sync_all(store: Store, tables: Sequence[TopicTable]) -> None:
    """Makes the state of tables durable together, as `TopicTable.sync` does for one.

    Tables that other threads read on meanwhile, or all if that fails, are left to their own `sync`.
    Raises `SyncFailed`.
    """
    unsynced = [table.unsynced() for table in tables]
    try:
        store.sync_files(path for each in unsynced for path in each.files)
        store.sync_files(path for each in unsynced for path in each.log)
    except SyncFailed:
        raise
    except Exception:  # each finds out by itself, and no other table has its error
        return
    for table, each in zip(tables, unsynced, strict=True):
        table.note_synced(each.version)


def commit_all(
    store: Store,
    commits: Sequence[tuple[TopicTable, Decide]],
    *,
    clock: Clock,
    stale: Sequence[TopicTable] = (),
    put_all_new: PutAllNew | None = None,
) -> list[TableSnapshot | Exception]:
    """Commits to several tables, whose commits are made durable together.

    Returns for each what `TopicTable.commit` would have returned or raised. Those whose version
    another writer has taken are tried again together, on the newest versions. Raises `SyncFailed`.

    Args:
        store: the store of the tables.
        commits: each table, and what decides on its change.
        clock: as for `claim_all`, like `put_all_new`.
        stale: those to which others have most likely committed. They are read first, because a read
            costs less than a lost race.
        put_all_new: has the first try at the puts.
    """
    # One that cannot be read loses its race, and says why when it is read after it.
    in_parallel(store, lambda table: _outcome(table.refresh), stale)
    found: dict[int, TableSnapshot | Exception] = {}
    for _ in range(TABLE_COMMIT_ATTEMPTS):
        left = [number for number in range(len(commits)) if number not in found]
        some = [commits[number] for number in left]
        outcomes = _commit_once(store, some, clock=clock, put_all_new=put_all_new)
        found |= {
            number: outcome
            for number, outcome in zip(left, outcomes, strict=True)
            if outcome is not None
        }
        if len(found) == len(commits):
            break
    return [
        found[number] if number in found else _overtaken(table)
        for number, (table, _) in enumerate(commits)
    ]


def _commit_once(
    store: Store,
    commits: Sequence[tuple[TopicTable, Decide]],
    *,
    clock: Clock,
    put_all_new: PutAllNew | None,
) -> list[TableSnapshot | Exception | None]:
    """Commits to the tables as they were read last.

    Returns None for a table whose version was taken: it is read, to be committed to again.
    """
    sync_all(store, [table for table, _ in commits])
    found = [_outcome(table.prepare_commit, decide) for table, decide in commits]
    objects = [(each.path, each.data) for each in found if isinstance(each, PreparedCommit)]
    outcomes = iter(claim_all(store, objects, clock=clock, put_all_new=put_all_new))
    put = [
        (table, each, next(outcomes))
        for (table, _), each in zip(commits, found, strict=True)
        if isinstance(each, PreparedCommit)
    ]
    ended = iter(in_parallel(store, lambda item: _finished(*item), put))
    return [next(ended) if isinstance(each, PreparedCommit) else each for each in found]


def _finished(
    table: TopicTable, prepared: PreparedCommit, outcome: bool | Exception
) -> TableSnapshot | Exception | None:
    """Returns the outcome of a commit that was put: its snapshot, or an error.

    None: another writer was faster, and the table is now read up to its newest version.
    """
    if isinstance(outcome, Exception):
        return outcome
    if outcome and (ended := _outcome(table.finish_commit, prepared)) is not None:
        return ended
    refreshed = _outcome(table.refresh)
    return refreshed if isinstance(refreshed, Exception) else None


def _outcome(
    call: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
) -> _Result | Exception:
    """Returns the result of a call, or its error. Raises `SyncFailed`."""
    try:
        return call(*args, **kwargs)
    except SyncFailed:
        raise
    except Exception as error:
        return error


def _overtaken(table: TopicTable) -> errors.StorageUnavailable:
    return errors.StorageUnavailable(
        operation="commit",
        path=table.log_folder,
        reason=f"others were faster {TABLE_COMMIT_ATTEMPTS} times",
    )
