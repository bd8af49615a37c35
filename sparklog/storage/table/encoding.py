"""Encodes a change to a table as a commit, after checking that its version allows it. Pure."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

import msgspec

from sparklog import errors, limits
from sparklog.formats.values import columns
from sparklog.storage.table import delta_log, removed_files
from sparklog.storage.table.changes import COLUMNS, TableChange
from sparklog.storage.table.delta_log import Actions, Add, CommitInfo, Metadata, Remove, Txn
from sparklog.storage.table.names import preparation_of
from sparklog.storage.table.replay import Replay
from sparklog.version import VERSION

APPEND_ONLY_REASON: Final = (
    "its table is append-only (delta.appendOnly = true), so its records stay; set the property to"
    " false, or unset it, to allow retention, key compaction and deletion of records"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCommit:
    """A commit that has been encoded but not yet put."""

    version: int
    change: TableChange
    actions: Actions
    path: str
    data: bytes


def lost_preparation(topic: str) -> errors.TimedOut:
    """Returns the error for a preparation that is no longer open."""
    what = f"preparing files for the table of topic {topic}, which another writer has ended,"
    return errors.TimedOut(what=what, timeout_seconds=limits.ORPHAN_GRACE_SECONDS)


def check(
    change: TableChange,
    replay: Replay,
    *,
    topic: str,
    now_us: int,
    orphan_grace_seconds: float,
) -> None:
    """Checks that a change may follow the version of `replay`.

    Raises `PolicyViolation` for a removal of rows from an append-only table, `TimedOut` for a file
    that is too old to be added, or whose preparation is not open, and `ColumnsChanged`.
    """
    assert replay.topic_id is None or not change.create
    assert replay.topic_id is not None or not change.adds
    assert all(unquote(file.path) in replay.active for file in change.removes)
    assert not any(unquote(file.path) in replay.active for file in change.adds)
    assert all(version >= replay.offset(app_id) for app_id, version in change.txns.items())
    # A file that was in the table before may be of a set that another engine's RESTORE has undone.
    if not change.restores and not all(map(replay.has_columns, change.adds)):
        raise errors.ColumnsChanged(topic=topic)
    if replay.append_only and _removes_rows(change, replay):
        raise errors.PolicyViolation(topic=topic, reason=APPEND_ONLY_REASON)
    is_prepared = change.preparation is not None
    if is_prepared and change.preparation not in replay.open_preparations:
        raise lost_preparation(topic)
    limit_seconds = orphan_grace_seconds / 2
    for file in change.adds:
        if is_prepared and preparation_of(unquote(file.path)) in replay.open_preparations:
            continue
        if change.restores:
            continue  # not an orphan: the log names it
        if now_us - file.modified_us > limit_seconds * 1e6:
            what = f"writing {file.path} and adding it"
            raise errors.TimedOut(what=what, timeout_seconds=limit_seconds)


def _removes_rows(change: TableChange, replay: Replay) -> bool:
    """Returns whether the change removes rows from a table that stays append-only."""
    if delta_log.APPEND_ONLY in (change.properties or {}):
        return False
    if change.create and replay.active:
        return True
    return bool(change.removes) and (change.data_change or change.drops_rows)


def encode(
    change: TableChange, replay: Replay, version: int, path: str, *, now_us: int
) -> PreparedCommit:
    """Returns the commit of a checked change, as the version after `replay`."""
    actions = _actions(change, replay, now_us // 1_000)
    info = CommitInfo(
        timestamp=now_us // 1_000,
        operation=change.operation,
        operation_parameters={},
        # Other engines allow their own rewrites alongside appends that read nothing.
        is_blind_append=not change.removes and not change.properties,
        engine_info=f"sparklog/{VERSION}",
        txn_id=secrets.token_hex(16),
    )
    return PreparedCommit(
        version=version,
        change=change,
        actions=actions,
        path=path,
        data=delta_log.encode_commit(info, actions),
    )


def _actions(change: TableChange, replay: Replay, now_ms: int) -> Actions:
    txns = dict(change.txns)
    if change.preparation is not None:
        txns[replay.open_preparations[change.preparation]] = change.preparation + 1
    paths = [unquote(file.path) for file in change.removes]
    # No VACUUM may remove files with the same rows as an added one; see `restoring`.
    is_kept = bool(change.adds) and not change.data_change
    kept_ms = round(limits.REPLACED_KEPT_SECONDS * 1e3) if is_kept else 0
    if change.create:  # files that another engine added while there was no topic
        paths = list(replay.active)
    return Actions(
        protocol=None if replay.protocol else delta_log.PROTOCOL,
        metadata=_metadata(replay, change.properties, now_ms) if change.properties else None,
        txns=[
            Txn(app_id=app_id, version=version, last_updated=now_ms)
            for app_id, version in txns.items()
        ],
        removes=[
            Remove(
                path=replay.active[path].path,
                deletion_timestamp=now_ms + kept_ms,
                tags=_tags(replay.active[path], now_ms if is_kept else None),
                data_change=change.data_change or change.drops_rows,
                extended_file_metadata=True,
                partition_values=replay.active[path].partition_values,
                size=replay.active[path].size,
            )
            for path in paths
        ],
        adds=[delta_log.add_of(file, data_change=change.data_change) for file in change.adds],
    )


def _tags(add: Add, removed_ms: int | None) -> dict[str, str | None] | None:
    """Returns the tags of a removed file, which tell a later restoration about it."""
    found: dict[str, str | None] = {}
    if tag := delta_log.columns_tag(add):
        found[delta_log.COLUMNS_TAG] = tag
    if removed_ms is not None:
        found[removed_files.REMOVED_AT] = str(removed_ms)
    return found or None


def _metadata(replay: Replay, properties: Mapping[str, str | None], now_ms: int) -> Metadata:
    before = replay.metadata or delta_log.new_metadata(
        table_id=str(uuid.uuid4()), created_ms=now_ms
    )
    merged = {**before.configuration, **properties}
    kept = {name: value for name, value in merged.items() if value is not None}
    changed = msgspec.structs.replace(before, configuration=kept)
    if COLUMNS not in properties:
        return changed
    encoded = kept.get(COLUMNS)
    return delta_log.with_columns(changed, None if encoded is None else columns.decode(encoded))
