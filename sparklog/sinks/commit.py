"""The end of a batch: one manifest decides what it is, and a broker appends what that names.

Whoever commits a batch again, after any crash, comes to the same manifest and drives it once more;
the broker knows the batch by its id and skips what stands.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

from sparklog import limits, wire
from sparklog.client.log import Log
from sparklog.clock import SystemClock
from sparklog.session import connect
from sparklog.storage import manifest
from sparklog.storage.manifest import Manifest, Section
from sparklog.storage.objects import ObjectMissing, Store, open_store


def commit(
    root: str,
    storage: Mapping[str, str],
    *,
    query: str,
    batch: int,
    sections: Sequence[Section],
) -> None:
    """Makes the batch stand, whatever part of that an earlier run has done already.

    Raises `BadRequest` where the batch was given up, `Retriable` where no broker could be reached,
    and `OutcomeUnknown`; committing again is right after each of them.
    """
    store = open_store(root, storage)
    ours = Manifest(query=query, batch=batch, sections=tuple(sections))
    if not sections and not _stands(store, ours.path):
        return
    standing = manifest.write(store, ours, SystemClock())
    kept = {section.path for section in standing.sections}
    store.delete({section.path for section in sections} - kept)
    if standing.sections:
        _log(root, tuple(sorted(storage.items()))).connection.action(
            "batches.adopt",
            wire.Adopt(manifest=standing.path),
            timeout_seconds=limits.SPARK_PATIENCE_SECONDS,
        )


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
def _log(root: str, storage: tuple[tuple[str, str], ...]) -> Log:
    """Spark may use a worker process for many commits, or for one."""
    return connect(root, detached=True, storage_options=dict(storage))
