"""A chain of versions of one state, which is changed by compare-and-swap.

Version v is put only if it is absent, so exactly one of two writers wins. It is a delta, which
names the version that it follows; some versions also have a snapshot of the whole state.

Old versions are pruned, in order, once they are ten minutes old and precede two snapshots. So

- a reader whose last look is less than half a minute old finds the next version with one probe: it
  cannot have been pruned in the meantime;
- any other reader lists the versions. It continues from the version that it knows only if the
  listed ones follow it without a gap, and otherwise starts from the newest snapshot;
- a suspended writer may succeed in putting a version that existed before and was pruned. After each
  put, the versions are listed: the put counts only if the newest version descends from it.

The state and its encoding are those of the chain's user (`ChainFormat`), such as the metadata of a
root (`storage/metadata/store.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar, cast

import msgspec
import pyarrow as pa

from sparklog import errors
from sparklog.clock import NEVER, Clock, Moment
from sparklog.storage import packed
from sparklog.storage.objects import (
    ObjectExists,
    ObjectMissing,
    PutUnresolved,
    Store,
    claim,
    in_parallel,
)

KEPT_SECONDS = 600.0  # minimum retention of a version; must exceed LOOK_SECONDS
LOOK_SECONDS = 30.0  # after this long without a look, the next one lists the versions
LIST_SECONDS = 60.0

_DELTA: Final = ".json"
_SNAPSHOT: Final = ".snapshot"
_LAST: Final = "~"
"""Suffix of a name that sorts after all names of a version."""
_PRUNE_EVERY: Final = 10
_PRUNED_AT_ONCE: Final = 50
_ATTEMPTS: Final = 5
_JITTER_SECONDS: Final = 0.01
_JITTER_MAX_SECONDS: Final = 1.0


class ChainState(Protocol):
    """One version of a state: an immutable `msgspec.Struct` with these fields among others."""

    @property
    def version(self) -> int:
        """0 for the state before the first version."""

    @property
    def change_id(self) -> str:
        """Drawn for each version, so that two writers of the same version differ."""


class ChainDelta(Protocol):
    """The changes of one version: a `msgspec.Struct` with these fields among others."""

    @property
    def version(self) -> int: ...

    @property
    def previous(self) -> str:
        """The change id of the version that it follows."""

    @property
    def snapshot_crc(self) -> int | None:
        """CRC-32 of the content of the version's snapshot; None if it has none."""


_State = TypeVar("_State", bound=ChainState)
_Delta = TypeVar("_Delta", bound=ChainDelta)


class ChainFormat(Protocol[_State, _Delta]):
    """The state of a chain, and how its versions are encoded. Decoders raise `ValueError` and
    `msgspec.MsgspecError`.
    """

    folder: str
    first: _State
    """The state before the first version."""

    def delta_of(self, before: _State, after: _State) -> _Delta:
        """Returns the delta between two versions, without a checksum of the snapshot."""

    def apply(self, before: _State, delta: _Delta) -> _State:
        """Returns the version that follows `before`. Raises `ValueError` if it does not fit."""

    def encode_delta(self, delta: _Delta) -> bytes: ...

    def decode_version(self, version: int, data: pa.Buffer) -> _Delta | _State:
        """Returns a delta, or a whole state as older releases wrote it."""

    def content_of(self, state: _State) -> bytes:
        """Returns the same bytes for the same state in every process."""

    def encode_snapshot(self, state: _State, content: bytes) -> bytes:
        """Returns a snapshot; `content` is the state's `content_of`."""

    def decode_snapshot(self, version: int, data: pa.Buffer) -> _State: ...

    def snapshot_every(self, state: _State, /) -> int:
        """Returns the number of versions between two snapshots."""


def _name(version: int, suffix: str = _DELTA) -> str:
    return f"{version:020d}{suffix}"


@dataclass(frozen=True, slots=True)
class _Listing:
    """The versions that exist, in order."""

    deltas: list[int]
    snapshots: list[int]
    modified_us: dict[str, int]
    """By name, on the store's clock."""


@dataclass(frozen=True, slots=True)
class _Look(Generic[_State]):
    """The newest version, as one look at the store found it. Times are those of its start."""

    newest: _State
    listed: Moment = NEVER
    """The last listing that the look relies on."""
    at: Moment = NEVER

    def may_probe(self, clock: Clock) -> bool:
        """Returns whether no version that follows `newest` can have been pruned."""
        return (
            self.at.age_seconds(clock) < LOOK_SECONDS
            and self.listed.age_seconds(clock) < LIST_SECONDS
        )

    def precedes(self, other: _Look[_State]) -> bool:
        """Returns whether `other` is newer: a probe after an older listing may be misled."""
        return (self.listed.monotonic_seconds, self.at.monotonic_seconds) <= (
            other.listed.monotonic_seconds,
            other.at.monotonic_seconds,
        )


class VersionChain(Generic[_State, _Delta]):
    """Reads and changes the versions of one state. May be used by several threads."""

    def __init__(self, store: Store, form: ChainFormat[_State, _Delta], *, clock: Clock) -> None:
        self._store = store
        self._form = form
        self._clock = clock
        self._lock = threading.Lock()
        self._look: _Look[_State] = _Look(form.first)

    @property
    def current(self) -> _State:
        """The version that was last read or written; version 0 if there is none."""
        return self._look.newest

    @property
    def look_age_seconds(self) -> float:
        """The time since the last successful look at the store began, including while suspended."""
        return self._look.at.age_seconds(self._clock)

    def _check(self, state: _State) -> None:
        """Raises an error for a state that this program does not support; called before its use."""

    # -------------------------------------------------------------------------- reading

    def refresh(self) -> _State:
        """Returns the newest version; costs one probe if nothing has changed.

        Raises `CorruptObject` and the errors of the store.
        """
        began, look = Moment.now(self._clock), self._look
        if look.newest.version and look.may_probe(self._clock):
            newest = self._probe(look.newest)
            # If this process was suspended during the probe, the version may have been pruned.
            if newest is not None and look.may_probe(self._clock):
                return self._adopt(_Look(newest, look.listed, began))
        return self.reload()

    def reload(self) -> _State:
        """Returns the newest version by listing, whatever is known. Raises like `refresh`."""
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
            path=self._path(listing.deltas[-1]), check=f"it does not descend from {base}"
        )

    def _adopt(self, look: _Look[_State]) -> _State:
        """Stores the result of `look`, unless another thread's is newer.

        A probe that is misled finds too old a version, and none finds one that does not exist. So
        a later version counts, although a listing that has missed it may have begun later.
        """
        with self._lock:
            if self._look.precedes(look) or look.newest.version > self._look.newest.version:
                self._look = look
            return self._look.newest

    def _list(self, after: int = -1) -> _Listing:
        """Lists the versions above `after`."""
        listed = self._store.list_after(
            self._form.folder, _name(after, _LAST) if after >= 0 else ""
        )
        found: dict[str, list[int]] = {_DELTA: [], _SNAPSHOT: []}
        for stat in listed:
            number, dot, suffix = stat.name.partition(".")
            is_version = number.isdecimal() and dot + suffix in found
            if is_version and stat.name == _name(int(number), dot + suffix):
                found[dot + suffix].append(int(number))
        modified_us = {stat.name: stat.modified_us for stat in listed}
        return _Listing(found[_DELTA], found[_SNAPSHOT], modified_us)

    def _rebuild(self, listing: _Listing) -> _State | None:
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
                if isinstance(found, type(self._form.first)):
                    return self._follow(found, listing)
        return self._follow(self._form.first, listing)

    def _follow(self, base: _State, listing: _Listing) -> _State | None:
        """Returns the newest version; None if it does not descend from `base`.

        Raises `ObjectMissing` if a listed version has been pruned.
        """
        wanted = [version for version in listing.deltas if version > base.version]
        if wanted and len(wanted) != wanted[-1] - base.version:
            return None
        known: _State | None = base
        # Each is decoded after the one before has been checked: a newer release may have put it.
        for version, data in zip(wanted, in_parallel(self._store, self._get, wanted), strict=True):
            known = known and self._next(known, self._decoded(version, data))
        return known and self._probe(known)

    def _probe(self, known: _State) -> _State | None:
        """Returns the newest version; None if a later one does not descend from `known`."""
        found: _State | None = known
        while found is not None:
            known = found
            try:
                change = self._read(known.version + 1)
            except ObjectMissing:
                return known
            found = self._next(known, change)
        return None

    def _next(self, known: _State, change: _Delta | _State) -> _State | None:
        """Returns the version that follows `known`; None if `change` follows a different one."""
        if isinstance(change, type(self._form.first)):
            return change
        delta = cast(_Delta, change)
        if delta.previous != known.change_id:
            return None
        try:
            following = self._form.apply(known, delta)
        except ValueError as error:
            raise errors.CorruptObject(path=self._path(delta.version), check=str(error)) from error
        self._check(following)
        return following

    def _get(self, version: int) -> pa.Buffer:
        return self._store.get(self._path(version))

    def _read(self, version: int) -> _Delta | _State:
        return self._decoded(version, self._get(version))

    def _decoded(self, version: int, data: pa.Buffer) -> _Delta | _State:
        try:
            return self._form.decode_version(version, data)
        except (msgspec.MsgspecError, ValueError) as error:
            raise errors.CorruptObject(path=self._path(version), check=str(error)) from error

    def _read_snapshot(self, version: int) -> _State:
        path = self._path(version, _SNAPSHOT)
        data = self._store.get(path)
        try:
            found = self._form.decode_snapshot(version, data)
        except packed.NewerFormat as error:
            raise errors.CorruptObject(path=path, check=str(error)) from error
        except (msgspec.MsgspecError, ValueError) as error:
            check = f"{error}; if an older snapshot exists, delete this one"
            raise errors.CorruptObject(path=path, check=check) from error
        self._check(found)
        return found

    # -------------------------------------------------------------------------- changing

    def change(self, decide: Callable[[_State], _State | None]) -> _State:
        """Puts the version that `decide` derives from the newest one; retries after a conflict.

        `decide` returns None to change nothing, and raises to refuse. Raises `OutcomeUnknown` if
        the change may have been made, and the errors of the store if it was not.
        """
        before = self.refresh()
        for attempt in itertools.count(1):
            wanted = decide(before)
            if wanted is None:
                return before
            after: _State = msgspec.structs.replace(
                cast(Any, wanted), version=before.version + 1, change_id=secrets.token_hex(8)
            )
            if self._put(before, after):
                return after
            self._back_off(attempt)
            before = self.refresh()
        raise AssertionError  # the loop has no end

    def _put(self, before: _State, after: _State) -> bool:
        """Puts `after`. Returns whether it is the version that follows `before`."""
        delta, content = self._form.delta_of(before, after), None
        if after.version % self._form.snapshot_every(after) == 0:
            content = self._form.content_of(after)
            delta = msgspec.structs.replace(cast(Any, delta), snapshot_crc=zlib.crc32(content))
        path, data = self._path(after.version), self._form.encode_delta(delta)
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
                snapshot = self._form.encode_snapshot(after, content)
                self._store.put_new(self._path(after.version, _SNAPSHOT), snapshot)
            if after.version % _PRUNE_EVERY == 0:
                self._prune()
        return True

    def _counts(self, after: _State) -> bool:
        """Returns whether our put counts; False if it fell into the pruned past.

        Versions are pruned in order. So if ours exists although the next one has been pruned, ours
        was put after that. Raises `OutcomeUnknown` if ours is gone too, or if the look took so long
        that it proves nothing.
        """
        path = self._path(after.version)
        began, newest = Moment.now(self._clock), None
        with contextlib.suppress(ObjectMissing):
            newest = self._follow(after, self._list(after.version))
        if began.age_seconds(self._clock) >= LOOK_SECONDS:
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
        kept_since_us = newest_us - round(KEPT_SECONDS * 1e6)
        for version in sorted({*listing.deltas, *listing.snapshots})[:_PRUNED_AT_ONCE]:
            modified_us = listing.modified_us.get(_name(version), 0)
            if version >= kept_from or modified_us >= kept_since_us:
                break
            # One at a time, because the order matters.
            self._store.delete([self._path(version), self._path(version, _SNAPSHOT)])

    def _path(self, version: int, suffix: str = _DELTA) -> str:
        return f"{self._form.folder}/{_name(version, suffix)}"
