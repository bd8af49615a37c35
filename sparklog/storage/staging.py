"""Sweeping what Spark queries staged: `staging/<query>/<batch>/`.

A batch with a manifest is touched only once all of it is published. One without may still get its
manifest from a driver that is only slow; so before its files go, the sweeper wins the manifest's
place with a refusal, which a late driver then meets instead. What is staged after a refusal is of
another attempt, and is not judged by it. A refusal stays for 30 days: a driver later than that
would decide for files that are gone.
"""

from __future__ import annotations

from collections.abc import Callable

from sparklog import errors, limits
from sparklog.clock import Clock
from sparklog.storage import manifest
from sparklog.storage.manifest import Manifest
from sparklog.storage.objects import Stat, Store

IsPublished = Callable[[Manifest, int], bool]
"""Whether every record of the batch is in its table, or has no place any more.

The number is when the manifest was put, in µs. It is asked after the manifest was read: a place
that was made for the batch is there by then.
"""


def sweep(
    store: Store, *, is_published: IsPublished, abandoned_seconds: float, clock: Clock
) -> int:
    """Removes the files of published and of abandoned batches, and empty folders; how many files.

    Where a batch cannot be judged the others are, before this raises `BadRequest`, or what the
    store has raised. A folder that no query made is left alone.
    """
    swept = 0
    failure: errors.SparklogError | None = None
    folders = [
        f"staging/{query}/{batch}"
        for query in store.folders("staging")
        for batch in store.folders(f"staging/{query}")
        if batch.isdecimal()
    ]
    for folder in folders:
        try:
            gone = _unneeded(
                store,
                folder,
                is_published=is_published,
                abandoned_seconds=abandoned_seconds,
                clock=clock,
            )
            # Manifests go last: without them the rest would seem to wait for one. And the last
            # attempt's first: a refusal behind one that is gone would go unseen.
            manifests = sorted(filter(manifest.is_manifest, gone), key=manifest.attempt_of)
            store.delete([f"{folder}/{name}" for name in gone if name not in manifests])
            for name in reversed(manifests):
                store.delete([f"{folder}/{name}"])
            swept += len(gone)
            store.remove_folder(folder)
        except errors.SparklogError as error:
            failure = failure or error
    for query in store.folders("staging"):
        store.remove_folder(f"staging/{query}")
    if failure is not None:
        raise failure
    return swept


def _unneeded(
    store: Store,
    folder: str,
    *,
    is_published: IsPublished,
    abandoned_seconds: float,
    clock: Clock,
) -> list[str]:
    """The names in the folder that may go now; an attempt that was abandoned is refused first."""
    stats = store.list_after(folder)
    manifests = {stat.name: stat for stat in stats if manifest.is_manifest(stat.name)}
    attempt = 0
    while (decided := manifests.get(manifest.name(attempt))) is not None:
        found = manifest.load(store, f"{folder}/{decided.name}")
        if not found.refused:
            names = [stat.name for stat in stats]
            return names if is_published(found, decided.modified_us) else []
        attempt += 1
    files = [stat for stat in stats if stat.name not in manifests]
    open_ones = [stat for stat in files if manifest.attempt_of(stat.name) >= attempt]
    if open_ones and _are_old(open_ones, abandoned_seconds, clock):
        manifest.refuse(store, folder, clock=clock, attempt=attempt)
    gone = [stat.name for stat in files if manifest.attempt_of(stat.name) < attempt]
    if not open_ones and _are_old(stats, limits.BATCH_MEMORY_SECONDS, clock):
        gone += manifests
    return gone


def _are_old(stats: list[Stat], age_seconds: float, clock: Clock) -> bool:
    horizon_us = clock.now_us() - round(age_seconds * 1e6)
    return all(stat.modified_us < horizon_us for stat in stats)
