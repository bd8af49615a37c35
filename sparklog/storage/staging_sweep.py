"""Sweeping of staged Spark batches below `staging/<query>/<batch>/`; `manifest` writes them.

A batch with a manifest is removed only after all of it is published. A batch without one may still
get its manifest from a slow driver. So before its files are removed, the sweeper puts a refusal at
the manifest's path, which a late driver then finds. Files staged after a refusal belong to the next
attempt, and the refusal does not apply to them. A refusal is kept for 30 days: an even later driver
would commit files that no longer exist. A manifest whose topics are all gone ends its attempt, too.

Of a batch that several brokers have appended, the files are removed an hour after the receipt was
put. Manifest and receipt stay for as long as a rerun may ask for the batch: of a query, until a
later batch is staged; of a write with a key, for 30 days.
"""

from __future__ import annotations

from collections.abc import Callable

from sparklog import errors, limits
from sparklog.clock import Clock
from sparklog.storage import manifest
from sparklog.storage.manifest import Destinations, Manifest, Receipt
from sparklog.storage.objects import Stat, Store
from sparklog.storage.snapshot import BatchKind

IsPublished = Callable[[Manifest, int, Receipt | None], bool]
"""Returns whether every record of the batch is in its table, or its topic no longer exists.

Called after the manifest is read, with the time at which it was put, in µs: a partition that was
created for the batch exists by then. And with the receipt, if several brokers have appended it.
"""


def sweep(
    store: Store,
    *,
    topics: Callable[[], Destinations],
    is_published: IsPublished,
    abandoned_seconds: float,
    clock: Clock,
) -> int:
    """Removes the files of published and abandoned batches, and empty folders.

    `topics` returns those that exist when it is called. Returns the number of files. An error with
    one batch (`BadRequest` or of the store) is raised after all others are swept. Folders of other
    origin are ignored.
    """
    swept = 0
    failure: errors.SparklogError | None = None
    folders = [
        f"{manifest.FOLDER}/{query}/{batch}"
        for query in store.folders(manifest.FOLDER)
        for batch in store.folders(f"{manifest.FOLDER}/{query}")
        if batch.isdecimal()
    ]
    for folder in folders:
        try:
            gone = _unneeded(
                store,
                folder,
                topics=topics,
                is_published=is_published,
                abandoned_seconds=abandoned_seconds,
                clock=clock,
            )
            # Manifests are removed last: without one, the other files would seem to wait for it. Of
            # these the last attempt's is first: a refusal after a missing one is not found.
            manifests = sorted(filter(manifest.is_manifest, gone), key=manifest.attempt_of)
            store.delete([f"{folder}/{name}" for name in gone if name not in manifests])
            for name in reversed(manifests):
                store.delete([f"{folder}/{name}"])
            swept += len(gone)
            store.remove_folder(folder)
        except errors.SparklogError as error:
            failure = failure or error
    for query in store.folders(manifest.FOLDER):
        store.remove_folder(f"{manifest.FOLDER}/{query}")
    if failure is not None:
        raise failure
    return swept


def _unneeded(
    store: Store,
    folder: str,
    *,
    topics: Callable[[], Destinations],
    is_published: IsPublished,
    abandoned_seconds: float,
    clock: Clock,
) -> list[str]:
    """Returns the names in the folder to remove; refuses an abandoned attempt first."""
    stats = store.list_after(folder)
    manifests = {stat.name: stat for stat in stats if manifest.is_manifest(stat.name)}
    newest = max((manifest.attempt_of(stat.name) for stat in stats), default=0)
    attempt = 0
    while (decided := manifests.get(manifest.name(attempt))) is not None:
        found = manifest.load(store, f"{folder}/{decided.name}")
        is_void = not found.refused and found.is_void(topics())
        if not found.refused and not (is_void and newest > attempt):
            receipts = [stat for stat in stats if stat.name == manifest.receipt_name(attempt)]
            receipt = manifest.find_receipt(store, found) if receipts else None
            if receipts and not _are_old(receipts, limits.PARTS_KEPT_SECONDS, clock):
                return []  # a leader may have published rows that it has not confirmed
            if not is_published(found, decided.modified_us, receipt):
                return []
            names = {stat.name for stat in stats}
            if receipts and not is_void and _may_run_again(store, found, receipts, clock):
                # With earlier, refused attempts: without them their drivers could decide again.
                names -= {*manifests, *filter(manifest.is_receipt, names)}
            return sorted(names)
        attempt += 1
    files = [stat for stat in stats if stat.name not in manifests]
    open_ones = [stat for stat in files if manifest.attempt_of(stat.name) >= attempt]
    if open_ones and _are_old(open_ones, abandoned_seconds, clock):
        manifest.refuse(store, folder, clock=clock, attempt=attempt)
    gone = [stat.name for stat in files if manifest.attempt_of(stat.name) < attempt]
    if not open_ones and _are_old(stats, limits.BATCH_MEMORY_SECONDS, clock):
        gone += manifests
    return gone


def _may_run_again(store: Store, found: Manifest, receipts: list[Stat], clock: Clock) -> bool:
    """Returns whether a rerun would look for the decision of a batch that is done."""
    if found.kind is BatchKind.NUMBERED:
        batches = store.folders(f"{manifest.FOLDER}/{found.query}")
        return not any(each.isdecimal() and int(each) > found.batch for each in batches)
    is_named = found.kind is BatchKind.NAMED
    return is_named and not _are_old(receipts, limits.BATCH_MEMORY_SECONDS, clock)


def _are_old(stats: list[Stat], age_seconds: float, clock: Clock) -> bool:
    horizon_us = clock.now_us() - round(age_seconds * 1e6)
    return all(stat.modified_us < horizon_us for stat in stats)
