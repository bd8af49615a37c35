"""Sweeps staged Spark batches below `staging/<query>/<batch>/`; `manifest` writes them.

A batch with a manifest is removed only once all of it has been published. A batch without one may
still get its manifest from a slow driver. So before its files are removed, the sweeper puts a
refusal at the manifest's path, which a late driver then finds. Files staged after a refusal belong
to the next attempt, and the refusal does not apply to them. A refusal is kept for 30 days: an even
later driver would commit files that no longer exist. A manifest whose topics were recreated also
ends its attempt, and is kept for as long.

If several brokers have appended a batch, its files are removed an hour after the receipt was put.
Manifest and receipt stay as long as a rerun may ask for the batch: for a query, until a later batch
is staged; for a write with a key, for 30 days.

The record of a query's newest run (`query_run`) is removed once it is 30 days old.

A sweep lists all staged objects together, and reads only manifests that may require work. It caches
those of batches that are done and kept for a rerun, and reads a few of these in each sweep until it
has all: there is one for each query that has ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from sparklog import errors, limits
from sparklog.clock import Clock
from sparklog.storage.objects import Stat, Store
from sparklog.storage.snapshot import BatchKind
from sparklog.storage.staging import manifest, query_run
from sparklog.storage.staging.manifest import Destinations, Manifest, Receipt

PARTS_KEPT_SECONDS = 3600.0  # for staged files of several leaders, once all have appended them

IsPublished = Callable[[Manifest, int, Receipt | None], bool]
"""Returns whether every record of the batch is in its table, or its topic no longer exists.

Called with the manifest, the time at which it was put, in µs, and the receipt, if several brokers
have appended the batch. The manifest has been read by then, so partitions created for the batch
exist.
"""


_LEARNT: Final = 10
"""The maximum number of manifests of kept batches that one sweep reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A batch that is done: only its manifest and its receipt are left, for a rerun."""

    names: frozenset[str]
    decided: Manifest
    """With only one section per topic."""


class StagingSweep:
    """Sweeps the staged batches of a root. One caller at a time."""

    def __init__(
        self,
        store: Store,
        *,
        topics: Callable[[], Destinations],
        is_published: IsPublished,
        abandoned_seconds: float,
        clock: Clock,
        sweeps_receipts: Callable[[], bool] = lambda: True,
    ) -> None:
        """`topics` returns those that exist when it is called. `sweeps_receipts`: whether this
        broker sweeps batches that several brokers have appended; one sweeper is enough.
        """
        self._store = store
        self._topics = topics
        self._is_published = is_published
        self._abandoned_seconds = abandoned_seconds
        self._clock = clock
        self._sweeps_receipts = sweeps_receipts
        self._kept: dict[str, _Kept] = {}
        """By folder."""
        self._left_to_learn = 0
        """The number of kept batches that this call may still read."""
        self._last = ""
        """The folder after which the next call resumes, because this one was stopped."""

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> int:
        """Removes the files of published and abandoned batches, and empty folders.

        Returns the number of files removed. An error with one batch (`BadRequest` or of the store)
        is raised once all others have been swept. Folders of other origin are ignored.
        """
        swept = 0
        failure: errors.SparklogError | None = None
        folders, runs = self._listed()
        newest = _newest(folders)
        topics = self._topics()
        self._left_to_learn = _LEARNT
        self._kept = {folder: each for folder, each in self._kept.items() if folder in folders}
        for folder in sorted(folders, key=lambda folder: (folder <= self._last, folder)):
            if should_stop():
                break
            self._last = folder
            query, _, number = folder.rpartition("/")
            is_newest = int(number) == newest[query]
            stats = folders[folder]
            has_receipt = any(manifest.is_receipt(stat.name) for stat in stats)
            if has_receipt and not self._sweeps_receipts():
                continue
            if self._stays(folder, stats, topics, is_newest=is_newest):
                continue
            try:
                swept += self._sweep(folder, stats, topics, is_newest=is_newest)
            except errors.SparklogError as error:
                failure = failure or error
        else:
            self._last = ""
        old = [each for each in runs if _are_old([each], limits.BATCH_MEMORY_SECONDS, self._clock)]
        self._store.delete([each.name for each in old])
        self._remove_empty_folders()
        if failure is not None:
            raise failure
        return swept + len(old)

    def _listed(self) -> tuple[dict[str, list[Stat]], list[Stat]]:
        """Returns the objects of each batch, by its folder and with their names in it.

        Also returns the records of runs, with their paths.
        """
        batches: dict[str, list[Stat]] = defaultdict(list)
        runs: list[Stat] = []
        for stat in self._store.walk(manifest.FOLDER):
            path = stat.name.split("/")
            if len(path) == 3 and path[1].isdecimal():
                folder = f"{manifest.FOLDER}/{path[0]}/{path[1]}"
                batches[folder].append(replace(stat, name=path[2]))
            elif len(path) == 2 and path[1] == query_run.NAME:
                runs.append(replace(stat, name=f"{manifest.FOLDER}/{stat.name}"))
        return batches, runs

    def _stays(
        self, folder: str, stats: list[Stat], topics: Destinations, *, is_newest: bool
    ) -> bool:
        """Returns whether nothing has changed about a batch that is done and kept for a rerun."""
        kept = self._kept.get(folder)
        if kept is None and is_newest and _is_done(stats):
            self._left_to_learn -= 1
            return self._left_to_learn < 0
        if kept is None or {stat.name for stat in stats} != kept.names:
            return False
        if kept.decided.is_void(topics):
            return False
        name = manifest.receipt_name(kept.decided.attempt)
        (receipt,) = (stat for stat in stats if stat.name == name)
        return _may_run_again(kept.decided, receipt, self._clock, is_newest=is_newest)

    def _sweep(
        self, folder: str, stats: list[Stat], topics: Destinations, *, is_newest: bool
    ) -> int:
        gone = self._unneeded(folder, stats, topics, is_newest=is_newest)
        # Manifests are removed last: without one, the other files would seem to wait for it. The
        # last attempt's goes first, because a refusal after a missing one is not found.
        manifests = sorted(filter(manifest.is_manifest, gone), key=manifest.attempt_of)
        self._store.delete([f"{folder}/{name}" for name in gone if name not in manifests])
        for name in reversed(manifests):
            self._store.delete([f"{folder}/{name}"])
        self._store.remove_folder(folder)
        return len(gone)

    def _unneeded(
        self, folder: str, stats: list[Stat], topics: Destinations, *, is_newest: bool
    ) -> list[str]:
        """Returns the names in the folder to remove; refuses an abandoned attempt first."""
        manifests = {stat.name: stat for stat in stats if manifest.is_manifest(stat.name)}
        attempt = 0
        while (decided := manifests.get(manifest.name(attempt))) is not None:
            found = manifest.load(self._store, f"{folder}/{decided.name}")
            is_void = False
            if not found.refused and found.is_void(topics):
                topics = self._topics()  # they may have changed since they were first read
                is_void = found.is_void(topics)
            # If a topic has been recreated, tasks may currently be staging for the next attempt.
            is_over = found.refused or (is_void and any(map(topics.get, found.topic_ids)))
            if not is_over:
                return self._published(folder, stats, found, is_void=is_void, is_newest=is_newest)
            attempt += 1
        files = [stat for stat in stats if stat.name not in manifests]
        open_ones = [stat for stat in files if manifest.attempt_of(stat.name) >= attempt]
        if open_ones and _are_old(open_ones, self._abandoned_seconds, self._clock):
            manifest.refuse(self._store, folder, clock=self._clock, attempt=attempt)
        gone = [stat.name for stat in files if manifest.attempt_of(stat.name) < attempt]
        if not open_ones and _are_old(stats, limits.BATCH_MEMORY_SECONDS, self._clock):
            gone += manifests
        return gone

    def _published(
        self, folder: str, stats: list[Stat], found: Manifest, *, is_void: bool, is_newest: bool
    ) -> list[str]:
        """Returns the names to remove from a decided batch: none until it has been published."""
        names = {stat.name: stat for stat in stats}
        decided_us = names[manifest.name(found.attempt)].modified_us
        put = names.get(manifest.receipt_name(found.attempt))
        if put is None:
            return sorted(names) if self._is_published(found, decided_us, None) else []
        if not _are_old([put], PARTS_KEPT_SECONDS, self._clock):
            return []  # a leader may have published rows that it has not confirmed
        if not _is_done(stats):
            receipt = manifest.find_receipt(self._store, found)
            if not self._is_published(found, decided_us, receipt):
                return []
        if is_void or not _may_run_again(found, put, self._clock, is_newest=is_newest):
            return sorted(names)
        # Including earlier, refused attempts: without these, their drivers could decide again.
        kept = {each for each in names if manifest.is_manifest(each) or manifest.is_receipt(each)}
        sections = {each.topic: each for each in found.sections}
        decided = msgspec.structs.replace(found, sections=tuple(sections.values()))
        self._kept[folder] = _Kept(names=frozenset(kept), decided=decided)
        return sorted(names.keys() - kept)

    def _remove_empty_folders(self) -> None:
        if self._store.is_local:
            for query in self._store.folders(manifest.FOLDER):
                for batch in self._store.folders(f"{manifest.FOLDER}/{query}"):
                    if batch.isdecimal():
                        self._store.remove_folder(f"{manifest.FOLDER}/{query}/{batch}")
                self._store.remove_folder(f"{manifest.FOLDER}/{query}")


def _is_done(stats: list[Stat]) -> bool:
    """Returns whether only manifests and a receipt are left, so the batch has been published."""
    names = [stat.name for stat in stats]
    return any(map(manifest.is_receipt, names)) and all(
        manifest.is_manifest(name) or manifest.is_receipt(name) for name in names
    )


def _newest(folders: Iterable[str]) -> dict[str, int]:
    """Returns the number of the newest batch of each query, by the query's folder."""
    found: dict[str, int] = {}
    for folder in folders:
        query, _, number = folder.rpartition("/")
        found[query] = max(found.get(query, 0), int(number))
    return found


def _may_run_again(found: Manifest, receipt: Stat, clock: Clock, *, is_newest: bool) -> bool:
    """Returns whether a rerun may need the decision about a batch that is done."""
    if found.kind is BatchKind.NUMBERED:
        return is_newest
    is_named = found.kind is BatchKind.NAMED
    return is_named and not _are_old([receipt], limits.BATCH_MEMORY_SECONDS, clock)


def _are_old(stats: list[Stat], age_seconds: float, clock: Clock) -> bool:
    horizon_us = clock.now_us() - round(age_seconds * 1e6)
    return all(stat.modified_us < horizon_us for stat in stats)
