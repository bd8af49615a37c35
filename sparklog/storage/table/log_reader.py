"""Reads the Delta log of one table: its commits, its checkpoints, and their order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

import crc32c
import pyarrow as pa

from sparklog import errors
from sparklog.storage.objects import ObjectMissing, Store, in_parallel
from sparklog.storage.snapshot import TableSnapshot
from sparklog.storage.table import delta_log
from sparklog.storage.table.delta_log import Actions
from sparklog.storage.table.names import table_folder

_OLD_COMMITS = 100  # how many of the newest commits are read to find the old ones
_LOAD_ATTEMPTS: Final = 5


class LogReader:
    """Reads the log of a topic's table. Has no state."""

    def __init__(self, store: Store, topic: str, *, with_removes: bool) -> None:
        """`with_removes`: also read the removed files, which are most of an old checkpoint."""
        self.store = store
        self._topic = topic
        self._with_removes = with_removes
        self.folder = f"{table_folder(topic)}/{delta_log.LOG_FOLDER}"

    def commit_path(self, version: int) -> str:
        return f"{self.folder}/{delta_log.commit_name(version)}"

    def read_commits(self, first: int, count: int) -> list[pa.Buffer]:
        """Reads up to `count` commits from `first` on, stopping at the first missing one."""

        def read(version: int) -> pa.Buffer | None:
            try:
                return self.store.get(self.commit_path(version))
            except ObjectMissing:
                return None

        found = in_parallel(self.store, read, range(first, first + count))
        return list(itertools.takewhile(lambda data: data is not None, found))

    def checksum(self, version: int) -> int | None:
        """Returns the CRC32C of a commit; None if it was cleaned up after a checkpoint."""
        try:
            return crc32c.crc32c(self.store.get(self.commit_path(version)))
        except ObjectMissing:
            return None

    def exists(self, version: int) -> bool:
        """Returns whether the commit exists; if so, no later one has been cleaned up."""
        if version < 0:
            return True
        try:
            self.store.stat(self.commit_path(version))
        except ObjectMissing:
            return False
        return True

    def follows(self, version: int) -> bool:
        """Returns whether the new commit continues the log, and does not fill a removed version."""
        if version == 0:
            return len(self.store.list_after(self.folder)) == 1
        return self.exists(version - 1)

    def last_checkpoint(self) -> int | None:
        """Returns the version of the checkpoint that the hint names; None without a hint."""
        try:
            hint = self.store.get(f"{self.folder}/{delta_log.LAST_CHECKPOINT}")
        except ObjectMissing:
            return None
        return delta_log.decode_last_checkpoint(hint)

    def load(self, known_version: int) -> tuple[int, Actions, Sequence[str]]:
        """Reads the newest complete checkpoint that is followed by all commits up to the newest.

        Returns its version, its actions and the names of its parts; (-1, no actions, no names) if
        the log can be replayed from its start. `known_version`: one that the log is known to have
        reached.

        Raises `CorruptObject` if no checkpoint is complete, `MissingObject` for a commit that later
        versions need or that is gone, and `ForeignTable`.
        """
        failure: errors.Corrupt
        for _ in range(_LOAD_ATTEMPTS):
            for after in self._places_to_list_from():
                try:
                    found = self._newest_base(after, known_version)
                except ObjectMissing as error:
                    failure = errors.MissingObject(path=error.path, reason="it was just listed")
                except errors.Corrupt as error:
                    failure = error
                else:
                    return found
        raise failure

    def _places_to_list_from(self) -> Iterator[str]:
        """Yields the names to list from: the hinted checkpoint, then the start of the log."""
        hint = self.last_checkpoint()
        if hint is not None:
            yield f"{hint:020d}"
        yield ""

    def _newest_base(self, after: str, known_version: int) -> tuple[int, Actions, Sequence[str]]:
        """Finds the newest complete checkpoint with all commits after it; -1: the log's start."""
        stats = self.store.list_after(self.folder, after)
        listing = delta_log.read_names(stat.name for stat in stats)
        newest = max([*listing.commits, *listing.checkpoints], default=-1)
        if newest < known_version:
            lost = self.commit_path(known_version)
            raise errors.MissingObject(path=lost, reason=f"the log now ends at version {newest}")
        gap = newest
        while gap in listing.commits:
            gap -= 1
        damage: errors.Corrupt | None = None
        for version in reversed(listing.checkpoints):
            if version >= gap:
                try:
                    names = listing.checkpoints[version]
                    return version, self.read_checkpoint(names), names
                except errors.CorruptObject as error:
                    damage = damage or error
        if gap < 0 and not after:
            return -1, Actions(), ()
        if listing.v2_checkpoints:
            reason = f"{listing.v2_checkpoints[-1]} is a v2 checkpoint"
            damage = damage or errors.ForeignTable(topic=self._topic, reason=reason)
        raise damage or errors.MissingObject(
            path=self.commit_path(gap), reason=f"version {newest} is newer"
        )

    def read_checkpoint(self, names: Sequence[str]) -> Actions:
        """Reads a classic checkpoint from its parts. Raises `CorruptObject` and `ObjectMissing`."""
        parts = []
        for name in names:
            path = f"{self.folder}/{name}"
            data = self.store.get(path)
            parts.append(delta_log.decode_checkpoint(data, path, removes=self._with_removes))
        whole = delta_log.joined(parts)
        if not whole.protocol or not whole.metadata:
            path = f"{self.folder}/{names[0]}"
            raise errors.CorruptObject(path=path, check="it has no protocol or no metadata")
        return whole

    def ends_before(self, snapshot: TableSnapshot, horizon_us: int) -> dict[int, int]:
        """Returns partition ends that were committed before `horizon_us`, by the store's clock.

        They may be lower than the actual ends at that time. Empty if too many commits are newer, or
        if one of these is missing or cannot be used. Raises the store's errors.
        """
        version, ends = snapshot.version, dict(enumerate(snapshot.ends))
        first = max(version - _OLD_COMMITS, 0)
        stats = self.store.list_after(self.folder, delta_log.commit_name(first))
        names = {delta_log.commit_name(each): each for each in range(first, version + 1)}
        times = {names[stat.name]: stat.modified_us for stat in stats if stat.name in names}
        old = [each for each, modified_us in times.items() if modified_us < horizon_us]
        if not old:
            return {}
        for each in range(max(old) + 1, version + 1):
            try:
                data = self.store.get(self.commit_path(each))
                adds = delta_log.decode_commit(data, self.commit_path(each)).adds
                files = [delta_log.file_of(add) for add in adds]
            except (ObjectMissing, errors.Corrupt, ValueError):
                return {}
            for file in files:
                known = ends.get(file.partition, 0)
                ends[file.partition] = min(known, 0 if file.first is None else file.first)
        return ends
