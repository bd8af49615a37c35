"""Reads the metadata of a root, and changes it by compare-and-swap.

Version v is put only if it is absent, so exactly one of two writers wins. It is a delta, which
names the version that it follows; every twentieth version also has a snapshot, or every hundredth
one in a large cluster (`storage/metadata/format.py`).

Old versions are pruned, in order, once they are ten minutes old and precede two snapshots. So

- a reader whose last look is less than half a minute old finds the next version with one probe: it
  cannot have been pruned since;
- any other reader lists the versions. It continues from the version that it knows only if the
  listed ones follow it without a gap, and otherwise starts from the newest snapshot;
- a suspended writer may succeed in putting a version that existed before and was pruned. After each
  put, the versions are listed: the put counts only if the newest version descends from it.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from sparklog import errors
from sparklog.clock import NEVER, Clock, Moment
from sparklog.storage.metadata import format as metadata_format
from sparklog.storage.metadata.format import Delta
from sparklog.storage.metadata.model import ClusterMetadata
from sparklog.storage.objects import (
    ObjectExists,
    ObjectMissing,
    PutUnresolved,
    Store,
    claim,
    in_parallel,
)

META_SNAPSHOT_EVERY = 20  # versions of the metadata; in a large cluster five times as many
META_LARGE_TOPICS = 1_000
META_KEPT_SECONDS = 600.0  # minimum retention of a version; must exceed META_LOOK_SECONDS
META_LOOK_SECONDS = 30.0  # after this long without a look, the next one lists the versions
META_LIST_SECONDS = 60.0

_FOLDER: Final = "meta"
_DELTA: Final = ".json"
_SNAPSHOT: Final = ".snapshot"
_LAST: Final = "~"
"""Suffix of a name that sorts after all names of a version."""
_LARGE_FACTOR: Final = 5
_PRUNE_EVERY: Final = 10
_PRUNED_AT_ONCE: Final = 50
_ATTEMPTS: Final = 5
_JITTER_SECONDS: Final = 0.01
_JITTER_MAX_SECONDS: Final = 1.0


def _name(version: int, suffix: str = _DELTA) -> str:
    return f"{version:020d}{suffix}"


def _path(version: int, suffix: str = _DELTA) -> str:
    return f"{_FOLDER}/{_name(version, suffix)}"


@dataclass(frozen=True, slots=True)
class _Listing:
    """The versions that exist, in order."""

    deltas: list[int]
    snapshots: list[int]
    modified_us: dict[str, int]
    """By name, on the store's clock."""


@dataclass(frozen=True, slots=True)
class _Look:
    """The newest version, as one look at the store found it. Times are those of its start."""

    newest: ClusterMetadata
    listed: Moment = NEVER
    """The last listing that the look relies on."""
    at: Moment = NEVER

    def may_probe(self, clock: Clock) -> bool:
        """Returns whether no version that follows `newest` can have been pruned."""
        return (
            self.at.age_seconds(clock) < META_LOOK_SECONDS
            and self.listed.age_seconds(clock) < META_LIST_SECONDS
        )

    def precedes(self, other: _Look) -> bool:
        """Returns whether `other` is newer: a probe after an older listing may be misled."""
        return (self.listed.monotonic_seconds, self.at.monotonic_seconds) <= (
            other.listed.monotonic_seconds,
            other.at.monotonic_seconds,
        )


def _snapshot_every(metadata: ClusterMetadata) -> int:
    """Returns the number of versions from one snapshot to the next: more if they are large."""
    is_large = len(metadata.topics) > META_LARGE_TOPICS
    return META_SNAPSHOT_EVERY * (_LARGE_FACTOR if is_large else 1)


class MetadataStore:
    """Reads and changes the metadata of one root. May be used by several threads."""

    def __init__(self, store: Store, *, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._look = _Look(ClusterMetadata())

    @property
    def current(self) -> ClusterMetadata:
        """The version that was last read or written; version 0 if there is none."""
        return self._look.newest

    @property
    def look_age_seconds(self) -> float:
        """The time since the last successful look at the store began, including while suspended."""
        return self._look.at.age_seconds(self._clock)

    # -------------------------------------------------------------------------- reading

    def refresh(self) -> ClusterMetadata:
        """Returns the newest version; costs one probe if nothing has changed.

        Raises `CorruptObject` and the store's errors.
        """
        began, look = Moment.now(self._clock), self._look
        if look.newest.version and look.may_probe(self._clock):
            newest = self._probe(look.newest)
            # If this process was suspended during the probe, the version may have been pruned.
            if newest is not None and look.may_probe(self._clock):
                return self._adopt(_Look(newest, look.listed, began))
        return self.reload()

    def reload(self) -> ClusterMetadata:
        """Returns the newest version, always by listing. Raises what `refresh` raises."""
        for _ in range(_ATTEMPTS):
            began, known = Moment.now(self._clock), self.current
            listing = self._list()
            if not listing.deltas:
                return known
            newest = None
            with contextlib.suppress(ObjectMissing):  # pruned after it was listed
                if known.version in listing.deltas:
                    newest = self._follow(known, listing)
                newest = newest or self._rebuild(listing)
            if newest is not None:
                return self._adopt(_Look(newest, began, began))
        base = f"snapshot {listing.snapshots[-1]}" if listing.snapshots else "the first version"
        raise errors.CorruptObject(
            path=_path(listing.deltas[-1]), check=f"it does not descend from {base}"
        )

    def _adopt(self, look: _Look) -> ClusterMetadata:
        """Stores the result of `look`, unless another thread's is newer."""
        with self._lock:
            if self._look.precedes(look):
                self._look = look
            return self._look.newest

    def _list(self, after: int = -1) -> _Listing:
        """Lists the versions above `after`."""
        listed = self._store.list_after(_FOLDER, _name(after, _LAST) if after >= 0 else "")
        found: dict[str, list[int]] = {_DELTA: [], _SNAPSHOT: []}
        for stat in listed:
            number, dot, suffix = stat.name.partition(".")
            is_version = number.isdecimal() and dot + suffix in found
            if is_version and stat.name == _name(int(number), dot + suffix):
                found[dot + suffix].append(int(number))
        modified_us = {stat.name: stat.modified_us for stat in listed}
        return _Listing(found[_DELTA], found[_SNAPSHOT], modified_us)

    def _rebuild(self, listing: _Listing) -> ClusterMetadata | None:
        """Returns the newest version, derived from a snapshot, an older format or from scratch.

        Returns None if it does not descend from that. Raises `ObjectMissing` if a listed version
        has been pruned.
        """
        newest = listing.deltas[-1]
        for version in reversed(listing.snapshots):
            if version <= newest:
                return self._follow(self._read_snapshot(version), listing)
        if listing.deltas[0] > 1:  # of a release that put whole versions, and pruned them
            for version in reversed(listing.deltas):
                found = self._read(version)
                if isinstance(found, ClusterMetadata):
                    return self._follow(found, listing)
        return self._follow(ClusterMetadata(), listing)

    def _follow(self, base: ClusterMetadata, listing: _Listing) -> ClusterMetadata | None:
        """Returns the newest version; None if it does not descend from `base`.

        Raises `ObjectMissing` if a listed version has been pruned.
        """
        wanted = [version for version in listing.deltas if version > base.version]
        if wanted and len(wanted) != wanted[-1] - base.version:
            return None
        known: ClusterMetadata | None = base
        for change in in_parallel(self._store, self._read, wanted):
            known = known and self._next(known, change)
        return known and self._probe(known)

    def _probe(self, known: ClusterMetadata) -> ClusterMetadata | None:
        """Returns the newest version; None if a later one does not descend from `known`."""
        found: ClusterMetadata | None = known
        while found is not None:
            known = found
            try:
                change = self._read(known.version + 1)
            except ObjectMissing:
                return known
            found = self._next(known, change)
        return None

    def _next(
        self, known: ClusterMetadata, change: Delta | ClusterMetadata
    ) -> ClusterMetadata | None:
        """Returns the version that follows `known`; None if `change` follows a different one."""
        if isinstance(change, ClusterMetadata):
            return change
        if change.previous != known.change_id:
            return None
        try:
            return metadata_format.apply(known, change)
        except ValueError as error:
            raise errors.CorruptObject(path=_path(change.version), check=str(error)) from error

    def _read(self, version: int) -> Delta | ClusterMetadata:
        path = _path(version)
        data = self._store.get(path)
        try:
            return metadata_format.decode_version(version, data)
        except (msgspec.MsgspecError, ValueError) as error:
            raise errors.CorruptObject(path=path, check=str(error)) from error

    def _read_snapshot(self, version: int) -> ClusterMetadata:
        path = _path(version, _SNAPSHOT)
        data = self._store.get(path)
        try:
            return metadata_format.decode_snapshot(version, data)
        except (msgspec.MsgspecError, ValueError) as error:
            check = f"{error}; if an older snapshot exists, delete this one"
            raise errors.CorruptObject(path=path, check=check) from error

    # -------------------------------------------------------------------------- changing

    def change(
        self, decide: Callable[[ClusterMetadata], ClusterMetadata | None]
    ) -> ClusterMetadata:
        """Puts the version that `decide` derives from the newest one; retries after a conflict.

        `decide` returns None to change nothing, and raises to refuse. Raises `OutcomeUnknown` if
        the change may have been made, and the store's errors if it was not.
        """
        before = self.refresh()
        for attempt in itertools.count(1):
            wanted = decide(before)
            if wanted is None:
                return before
            after = msgspec.structs.replace(
                wanted, version=before.version + 1, change_id=secrets.token_hex(8)
            )
            if self._put(before, after):
                return after
            self._back_off(attempt)
            before = self.refresh()
        raise AssertionError  # the loop has no end

    def _put(self, before: ClusterMetadata, after: ClusterMetadata) -> bool:
        """Puts `after`. Returns whether it is the version that follows `before`."""
        delta, content = metadata_format.delta_of(before, after), None
        if after.version % _snapshot_every(after) == 0:
            content = metadata_format.content_of(after)
            delta = msgspec.structs.replace(delta, snapshot_crc=zlib.crc32(content))
        path, data = _path(after.version), metadata_format.encode_delta(delta)
        is_doubtful = False
        try:
            self._store.put_new(path, data)
        except (ObjectExists, PutUnresolved):
            is_doubtful = True
            if not claim(self._store, path, data, clock=self._clock, doubtful=True):
                return False
        try:
            counts = self._counts(after)
        except errors.OutcomeUnknown:
            raise
        except errors.SparklogError as error:  # even a refusal, because our put may count
            raise errors.OutcomeUnknown(what=f"put of {path}", reason=str(error)) from error
        if not counts:
            if is_doubtful:
                reason = "the first attempt may have counted, but been pruned before the second"
                raise errors.OutcomeUnknown(what=f"put of {path}", reason=reason)
            self._store.delete([path])
            self.reload()
            return False
        # Best effort: later versions also have snapshots, and also prune.
        with contextlib.suppress(errors.SparklogError, ObjectExists, PutUnresolved):
            if content is not None:
                snapshot = metadata_format.encode_snapshot(content)
                self._store.put_new(_path(after.version, _SNAPSHOT), snapshot)
            if after.version % _PRUNE_EVERY == 0:
                self._prune()
        return True

    def _counts(self, after: ClusterMetadata) -> bool:
        """Returns whether our put counts; False if it fell into the pruned past.

        Versions are pruned in order. So if ours exists although the next one has been pruned, ours
        was put after that. Raises `OutcomeUnknown` if ours is gone too, or if the look took so long
        that it proves nothing.
        """
        path = _path(after.version)
        began, newest = Moment.now(self._clock), None
        with contextlib.suppress(ObjectMissing):
            newest = self._follow(after, self._list(after.version))
        if began.age_seconds(self._clock) >= META_LOOK_SECONDS:
            reason = "the versions may have been pruned while they were listed"
            raise errors.OutcomeUnknown(what=f"put of {path}", reason=reason)
        if newest is not None:
            self._adopt(_Look(newest, began, began))
            return True
        try:
            self._store.stat(path)
        except ObjectMissing:
            reason = "so many versions followed that it has been pruned"
            raise errors.OutcomeUnknown(what=f"put of {path}", reason=reason) from None
        return False

    def _back_off(self, attempt: int) -> None:
        """Waits for a random time, so that writers do not all retry together."""
        most_seconds = min(_JITTER_SECONDS * 2.0 ** min(attempt, 16), _JITTER_MAX_SECONDS)
        self._clock.sleep(most_seconds * secrets.token_bytes(1)[0] / 256)

    def _prune(self) -> None:
        """Deletes the oldest versions: those that precede two snapshots, and are old enough."""
        listing = self._list()
        if len(listing.snapshots) < 2:
            return
        kept_from = listing.snapshots[-2]
        newest_us = listing.modified_us[_name(listing.deltas[-1])]
        kept_since_us = newest_us - round(META_KEPT_SECONDS * 1e6)
        for version in sorted({*listing.deltas, *listing.snapshots})[:_PRUNED_AT_ONCE]:
            modified_us = listing.modified_us.get(_name(version), 0)
            if version >= kept_from or modified_us >= kept_since_us:
                break
            # One at a time, because the order matters.
            self._store.delete([_path(version), _path(version, _SNAPSHOT)])
