"""The metadata of a root, as a chain of versions.

Every twentieth version has a snapshot, or every hundredth one in a large cluster. `format.py`
encodes them.
"""

from __future__ import annotations

from typing import Final

from sparklog import errors, limits
from sparklog.clock import Clock
from sparklog.storage.metadata import format as metadata_format
from sparklog.storage.metadata.format import Delta
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

    def __init__(self, store: Store, *, clock: Clock) -> None:
        super().__init__(store, _MetadataFormat(), clock=clock)

    def _check(self, state: ClusterMetadata) -> None:
        """Raises `FormatTooNew` for a feature level that this release does not support."""
        if state.level > limits.LEVEL:
            raise errors.FormatTooNew(
                root=self._store.uri, what="feature level", found=state.level, known=limits.LEVEL
            )
