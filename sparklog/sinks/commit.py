"""The end of a batch: one manifest decides what it is, and a broker appends what that names.

Whoever commits a batch again, after any crash, comes to the same manifest and drives it once more;
the broker knows the batch by its id and skips what stands.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from sparklog import errors, limits, wire
from sparklog.clock import SystemClock
from sparklog.storage import manifest
from sparklog.storage.manifest import Manifest, Section
from sparklog.storage.objects import ObjectMissing, Store, open_store
from sparklog.storage.snapshot import BatchKind

if TYPE_CHECKING:
    from sparklog.client.log import Log

_log = logging.getLogger("sparklog.sinks")


def commit(
    root: str,
    storage: Mapping[str, str],
    *,
    query: str,
    batch: int,
    sections: Sequence[Section],
    kind: BatchKind = BatchKind.NUMBERED,
) -> None:
    """Makes the batch stand, whatever part of that an earlier run has done already.

    Raises `BadRequest` where the batch was given up, or stands in other topics; `Retriable` where
    no broker could be reached, and `OutcomeUnknown`: commit again after these two.
    """
    store = open_store(root, storage)
    attempt = _attempt(store, query, batch, sections)
    ours = Manifest(query=query, batch=batch, sections=tuple(sections), kind=kind, attempt=attempt)
    if not sections and not _stands(store, ours.path):
        return
    standing = _decide(store, ours)
    kept = {section.path for section in standing.sections} if standing else set()
    store.delete({section.path for section in sections} - kept)
    if standing is not None:
        _check_topics(ours, {section.topic for section in standing.sections})
    if standing is None or standing.sections:
        adopted: wire.Adopted = _connect(root, tuple(sorted(storage.items()))).connection.action(
            "batches.adopt",
            wire.Adopt(manifest=ours.path),
            timeout_seconds=limits.SPARK_PATIENCE_SECONDS,
        )
        if adopted.skipped:
            _check_topics(ours, adopted.ranges)
            _log.warning("batch %d of %s stands already, so it is not written again", batch, query)


def _attempt(store: Store, query: str, batch: int, sections: Sequence[Section]) -> int:
    """The attempt that the sections were staged for. Raises `BadRequest` where that is two."""
    attempts = {manifest.attempt_of(section.path) for section in sections}
    if len(attempts) > 1:
        raise errors.BadRequest(
            reason=f"batch {batch} of query {query} was given up while its tasks were staging it;"
            " start the query again"
        )
    return attempts.pop() if attempts else manifest.open_attempt(store, query, batch)


def _decide(store: Store, ours: Manifest) -> Manifest | None:
    """The manifest that stands; None where a sweeper's refusal does.

    The refusal may be of a rerun that came to nothing, long after the batch was appended and its
    manifest swept. Only the broker knows, so it is asked all the same, and refuses what is new.
    """
    try:
        return manifest.write(store, ours, SystemClock())
    except errors.BadRequest:
        if manifest.load(store, ours.path).refused:
            return None
        raise


def _check_topics(ours: Manifest, standing: Collection[str]) -> None:
    """Raises `BadRequest` where the batch stands, and in none of the topics that we write to.

    A rerun may deal its rows otherwise, but this is another query with a copy of the checkpoint.
    """
    wanted = {section.topic for section in ours.sections}
    if wanted and standing and wanted.isdisjoint(standing):
        raise errors.BadRequest(
            reason=f"batch {ours.batch} of query {ours.query} was written to {_named(standing)}"
            f" before, and now goes to {_named(wanted)}: nothing of it was written. Two queries"
            " seem to share a checkpoint, or two writes a name: give this one its own"
        )


def _named(topics: Iterable[str]) -> str:
    return ", ".join(sorted(topics))


def discard(root: str, storage: Mapping[str, str], sections: Iterable[Section]) -> None:
    """Removes what was staged for a batch that nobody has tried to commit."""
    open_store(root, storage).delete({section.path for section in sections})


def _stands(store: Store, path: str) -> bool:
    try:
        store.stat(path)
    except ObjectMissing:
        return False
    return True


@functools.lru_cache(maxsize=4)
def _connect(root: str, storage: tuple[tuple[str, str], ...]) -> Log:
    """Spark may use a worker process for many commits, or for one."""
    from sparklog.session import connect  # tasks, which only stage, do not pay for it

    return connect(root, detached=True, storage_options=dict(storage))
