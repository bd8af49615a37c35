"""The metadata of a root, as a chain of versions.

Every twentieth version has a snapshot, or every hundredth one in a large cluster. `format.py`
encodes them.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from sparklog import errors, limits
from sparklog.clock import Clock
from sparklog.storage.metadata import format as metadata_format
from sparklog.storage.metadata.format import Delta, TopicSet
from sparklog.storage.metadata.model import ClusterMetadata
from sparklog.storage.objects import Store
from sparklog.storage.version_chain import VersionChain

META_SNAPSHOT_EVERY = 20  # versions of the metadata; in a large cluster five times as many
META_LARGE_TOPICS = 1_000
_LARGE_FACTOR: Final = 5


class _MetadataFormat:
    """See `ChainFormat`."""

    folder = "meta"
    first = ClusterMetadata()
    delta_of = staticmethod(metadata_format.delta_of)
    apply = staticmethod(metadata_format.apply)
    encode_delta = staticmethod(metadata_format.encode_delta)
    decode_version = staticmethod(metadata_format.decode_version)
    content_of = staticmethod(metadata_format.content_of)
    encode_snapshot = staticmethod(metadata_format.encode_snapshot)
    decode_snapshot = staticmethod(metadata_format.decode_snapshot)

    @staticmethod
    def snapshot_every(metadata: ClusterMetadata) -> int:
        """Returns the number of versions between two snapshots: more if they are large."""
        is_large = len(metadata.topics) > META_LARGE_TOPICS
        return META_SNAPSHOT_EVERY * (_LARGE_FACTOR if is_large else 1)


class MetadataStore(VersionChain[ClusterMetadata, Delta]):
    """Reads and changes the metadata of one root. May be used by several threads."""

    def __init__(self, store: Store, *, clock: Clock, notes_topics: bool = False) -> None:
        """`notes_topics`: remembers topics for `take_noted`."""
        super().__init__(store, _MetadataFormat(), clock=clock)
        self._noting = threading.Lock()
        self._noted: set[str] | None = set()
        """None if versions were skipped, which may have had any topics."""
        self._notes_topics = notes_topics

    def take_noted(self) -> set[str] | None:
        """Returns the names of topics that existed in any version since the last call.

        That includes topics that were created and deleted between two reads. None if versions were
        skipped, because only a later snapshot exists; may be called with `notes_topics` only.
        """
        assert self._notes_topics
        with self._noting:
            noted, self._noted = self._noted, set()
            return noted

    def _next(
        self, known: ClusterMetadata, change: Delta | ClusterMetadata
    ) -> ClusterMetadata | None:
        following = super()._next(known, change)
        if self._notes_topics and isinstance(change, Delta):
            with self._noting:
                if self._noted is not None:
                    self._noted.update(
                        each.name for each in change.topics if isinstance(each, TopicSet)
                    )
        return following

    def _rebuild(self, listing: Any) -> ClusterMetadata | None:
        with self._noting:
            self._noted = None
        return super()._rebuild(listing)

    def _check(self, state: ClusterMetadata) -> None:
        """Raises `FormatTooNew` for a feature level that this release does not support."""
        if state.level > limits.LEVEL:
            raise errors.FormatTooNew(
                root=self._store.uri, what="feature level", found=state.level, known=limits.LEVEL
            )
