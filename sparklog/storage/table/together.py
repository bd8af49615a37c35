"""Commits to several tables that are made durable together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from sparklog.clock import Clock
from sparklog.storage.objects import PutAllNew, Store, SyncFailed, claim_all, in_parallel
from sparklog.storage.snapshot import TableSnapshot
from sparklog.storage.table import topic_table
from sparklog.storage.table.changes import Decide
from sparklog.storage.table.encoding import PreparedCommit
from sparklog.storage.table.topic_table import TopicTable, overtaken

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def sync_all(store: Store, tables: Sequence[TopicTable]) -> None:
    """Makes the state of tables durable together, as `TopicTable.sync` does for one.

    Tables that another thread advances to a newer version in the meantime, or all of them if the
    joint sync fails, are left to their own `sync`. Raises `SyncFailed`.
    """
    unsynced = [table.unsynced() for table in tables]
    try:
        store.sync_files(path for each in unsynced for path in each.files)
        store.sync_files(path for each in unsynced for path in each.log)
    except SyncFailed:
        raise
    except Exception:  # each table then finds its own error, and only that
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
    """Commits to several tables, and makes the commits durable together.

    Returns, for each, what `TopicTable.commit` would have returned or raised. Those whose version
    another writer has taken are retried together, on the newest versions. Raises `SyncFailed`.

    Args:
        store: the store of the tables.
        commits: each table, with the function that decides on its change.
        clock: as for `claim_all`.
        stale: tables to which others have most likely committed. They are read first, because a
            read costs less than a lost race.
        put_all_new: makes the first attempt at the puts, as for `claim_all`.
    """
    # A table that cannot be read loses its race; the read after that reports the error.
    in_parallel(store, lambda table: _outcome(table.refresh), stale)
    found: dict[int, TableSnapshot | Exception] = {}
    for _ in range(topic_table.TABLE_COMMIT_ATTEMPTS):
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
        found[number] if number in found else overtaken(table)
        for number, (table, _) in enumerate(commits)
    ]


def _commit_once(
    store: Store,
    commits: Sequence[tuple[TopicTable, Decide]],
    *,
    clock: Clock,
    put_all_new: PutAllNew | None,
) -> list[TableSnapshot | Exception | None]:
    """Commits on top of the last read versions of the tables.

    Returns None for a table whose version another writer has taken: it was refreshed, and the
    commit has to be retried.
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

    None: another writer was faster, and the table has been refreshed.
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
