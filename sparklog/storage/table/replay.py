"""Replays a table's Delta log: its state after each commit, and unsupported features. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final
from urllib.parse import unquote

import msgspec

from sparklog import errors, limits
from sparklog.formats.values import columns
from sparklog.formats.values.columns import ColumnSet
from sparklog.storage.snapshot import GapCause, Gaps, TableFile, TableSnapshot
from sparklog.storage.table import delta_log, gaps, removed_files
from sparklog.storage.table.changes import COLUMNS, CONFIG, CREATOR, PARTITIONS, TOPIC_ID
from sparklog.storage.table.delta_log import Actions, Add, Metadata, Protocol, Remove, Txn
from sparklog.storage.table.names import (
    end_app_id,
    key_app_id,
    preparations_prefix,
    start_app_id,
)

NO_TABLE: Final = TableSnapshot(version=-1, topic_id=None)

_BOUND: Final = re.compile(r"(\d{1,9})(?:/start)?")
"""The suffix of the `app_id` of a partition's end or start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Topic:
    """The topic according to the table's protocol, schema and properties."""

    topic_id: str | None = None
    partitions: int = 0
    config: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    creator: tuple[int, int] | None = None
    append_only: bool = False
    file_retention_seconds: float | None = None
    log_retention_seconds: float | None = None
    columns: ColumnSet | None = None
    foreign: str | None = None
    """The reason sparklog does not support this table; None if it does."""


def _topic_of(protocol: Protocol | None, metadata: Metadata | None) -> _Topic:
    if protocol is None or metadata is None:
        return _Topic(foreign="its log has no protocol or no metadata")
    properties, append_only = metadata.configuration, delta_log.is_append_only(metadata)
    try:
        encoded = properties.get(COLUMNS)
        typed = None if encoded is None else columns.decode(encoded)
    except (ValueError, msgspec.MsgspecError) as error:
        return _Topic(foreign=f"its property {COLUMNS} is damaged: {error}")
    if reason := delta_log.foreign_reason(protocol, metadata, typed):
        return _Topic(foreign=reason)
    if properties.get(TOPIC_ID) is None:
        return _Topic(append_only=append_only)
    try:
        config = msgspec.json.decode(properties.get(CONFIG) or "", type=dict[str, str])
        partitions = int(properties.get(PARTITIONS) or "")
        if not 1 <= partitions <= limits.PARTITIONS_PER_TOPIC:  # each one takes memory
            raise ValueError(f"{partitions} partitions")
        return _Topic(
            topic_id=properties[TOPIC_ID],
            partitions=partitions,
            config=MappingProxyType(config),
            creator=_creator(properties.get(CREATOR)),
            columns=typed,
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
    """Returns the sort key: files without statistics first, then by first offset."""
    if file.first is None or file.last is None:
        return (-1, -1, file.path)
    return (file.first, file.last, file.path)


def _end(files: Iterable[TableFile]) -> int:
    """Returns the offset after the highest one in `files`, according to their statistics."""
    return max((file.last + 1 for file in files if file.last is not None), default=0)


def _is_ours(txn: Txn) -> bool:
    return txn.app_id.startswith("sparklog/")


class Replay:
    """The state of the log. `apply` takes each commit in turn; `snapshot` checks the result.

    Paths are compared percent-decoded, because engines may encode them differently.
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
        """The offset after the highest one in each partition's files, per their statistics."""
        self._changed: set[int] = set()
        """Partitions for which `snapshot` still has to update the three lists below."""
        self._ends: list[int] = []
        self._starts: list[int] = []
        self._files_in_order: list[tuple[TableFile, ...]] = []
        self._foreign: dict[int, str] = {}
        """The reason sparklog does not support a partition's files, by partition number."""
        self._unusable: dict[str, str] = {}
        self._unknown: frozenset[str] = frozenset()
        self.gaps: Gaps = {}

    @property
    def topic_id(self) -> str | None:
        return self._topic.topic_id

    @property
    def open_preparations(self) -> dict[int, str]:
        """The `app_id` of each open preparation, by its number."""
        return {number: app_id for app_id, number in self.preparations.items() if number % 2}

    @property
    def append_only(self) -> bool:
        return self._topic.append_only

    @property
    def file_retention_seconds(self) -> float | None:
        return self._topic.file_retention_seconds

    def has_columns(self, file: TableFile) -> bool:
        """Returns whether the table has the typed columns of a file."""
        known = self._topic.columns
        return file.columns is None or (known is not None and known.is_known(file.columns))

    def apply(self, version: int, actions: Actions) -> None:
        """Applies the actions of a commit or checkpoint, which result in `version`."""
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
        """Returns the action with the mapping shared by its partition: many actions are kept."""
        values = remove.partition_values or {}
        if len(values) != 1:
            return remove
        shared = self._partition_values.setdefault(next(iter(values.items())), values)
        return msgspec.structs.replace(remove, partition_values=shared)

    def _apply_txns(self, txns: Collection[Txn]) -> None:
        topic_id = self.topic_id or ""
        preparations = preparations_prefix(topic_id)
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
        """Notes gaps made by another engine; a commit of ours that makes any has a `txn`."""
        found: dict[tuple[int, GapCause], int] = {}
        for partition, paths in gone.items():
            files = [file for file in self._files.get(partition, ()) if file.path in paths]
            end = self._end_of(topic_id, partition)
            until = gaps.removed_below(files, come.get(partition, ()), end)
            if until:
                found[partition, GapCause.ENGINE] = until
        self.add_gaps(found)

    def add_gaps(self, more: Gaps) -> None:
        """Adds causes; offsets only increase."""
        risen = {each: until for each, until in more.items() if until > self.gaps.get(each, 0)}
        if risen:
            self.gaps = {**self.gaps, **risen}

    def unnoted_gaps(self) -> dict[str, int]:
        """Returns the `txn` of gaps that were found but that no commit names, by `app_id`."""
        found = {
            gaps.app_id(self.topic_id or "", *each): until
            for each, until in self.gaps.items()
            if each[1] is GapCause.ENGINE
        }
        return {app_id: until for app_id, until in found.items() if until > self.offset(app_id)}

    def _set_topic(self, topic: _Topic) -> None:
        if topic.topic_id != self.topic_id:
            preparations = preparations_prefix(topic.topic_id or "")
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
        """Returns the partition whose end or start the `app_id` names; None for any other one."""
        named = _BOUND.fullmatch(app_id.removeprefix(f"sparklog/{self.topic_id}/"))
        return int(named[1]) if named is not None else None

    def _deactivate(self, path: str, gone: dict[int, set[str]]) -> None:
        add = self.active.pop(path, None)
        if add and self._unusable.pop(path, None) is None:
            gone.setdefault(delta_log.file_of(add).partition, set()).add(add.path)

    def _rearrange(self, partition: int, gone: set[str] | None, come: list[TableFile]) -> None:
        """Updates the ordered files of the partition; appending a file copies the tuple."""
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
        """Returns the state; updates only the partitions that have changed since the last call.

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
            columns=self._topic.columns,
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
        """Returns the partitions' bounds, which are valid even if the rest of the state is not."""
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
        """Returns the end from its `txn`, or from statistics if another engine dropped that."""
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
            return f"{files[0].path} belongs to partition {partition}, but there are only {count}"
        txn = self.txns.get(end_app_id(topic_id, partition))
        end = self._file_ends.get(partition, 0)
        if txn and end > txn.version:
            return (
                f"partition {partition} has rows up to offset {end - 1}, but ends at"
                f" {txn.version}: another writer has added rows that are not part of the log"
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
        """Drops idempotency keys that are too old, and the oldest ones in excess of the limit."""
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
        """Drops tombstones from before `before_ms`, those without a time, and the oldest surplus.

        Tombstones that are not older than `young_ms` never count as surplus.
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
