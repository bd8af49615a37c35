"""Sweeping what Spark queries staged: `staging/<query>/<batch>/`.

A batch with a manifest is touched only once all of it is published. One without may still get its
manifest from a driver that is only slow; so before its files go, the sweeper wins the manifest's
place with a refusal, which a late driver then meets instead.
"""

from __future__ import annotations

from collections.abc import Callable

from sparklog.clock import Clock
from sparklog.storage import manifest
from sparklog.storage.objects import Store

IsPublished = Callable[[str, int, str, int], bool]
"""(topic, partition, query, batch) → whether the batch's records there are in the table."""


def sweep(
    store: Store, *, is_published: IsPublished, abandoned_seconds: float, clock: Clock
) -> int:
    """Removes the files of published and of abandoned batches; how many batches."""
    swept = 0
    for query in store.folders("staging"):
        for batch in store.folders(f"staging/{query}"):
            folder = f"staging/{query}/{batch}"
            if _is_done(
                store,
                folder,
                is_published=is_published,
                abandoned_seconds=abandoned_seconds,
                clock=clock,
            ):
                names = [stat.name for stat in store.list_after(folder)]
                store.delete(f"{folder}/{name}" for name in names if name != manifest.NAME)
                store.delete([f"{folder}/{manifest.NAME}"])
                swept += 1
    return swept


def _is_done(
    store: Store,
    folder: str,
    *,
    is_published: IsPublished,
    abandoned_seconds: float,
    clock: Clock,
) -> bool:
    stats = store.list_after(folder)
    horizon_us = clock.now_us() - round(abandoned_seconds * 1e6)
    is_old = all(stat.modified_us < horizon_us for stat in stats)
    if any(stat.name == manifest.NAME for stat in stats):
        found = manifest.load(store, f"{folder}/{manifest.NAME}")
        if found.refused:
            return is_old
        return all(
            is_published(each.topic, each.partition, found.query, found.batch)
            for each in found.sections
            if each.rows
        )
    if stats and is_old:
        # The refusal stays until it is old itself.
        manifest.refuse(store, folder, clock=clock)
    return False
