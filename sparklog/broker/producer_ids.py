"""Producer ids, allocated from the metadata in blocks as in Kafka (KIP-730)."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec

from sparklog.broker.leader_metadata import LeaderMetadata
from sparklog.formats.flight_messages import ProducerIdentity
from sparklog.storage.metadata.model import ClusterMetadata

_PRODUCER_IDS_TAKEN = 1_000  # per version of the metadata, as in Kafka


class ProducerIds:
    """Allocates ids that no producer has had before."""

    def __init__(self, metadata: LeaderMetadata) -> None:
        self._metadata = metadata
        self._taking_block = threading.Lock()
        """Held by the thread that allocates a block; the others wait for that block."""
        self._block: Iterator[int] = iter(())
        """Ids that have not been handed out; `next` on it is atomic."""

    def new(self) -> ProducerIdentity:
        """Returns a new id; waits for storage if the block is used up.

        The rest of a block is never used once its broker has stopped. Raises what
        `LeaderMetadata.change` raises.
        """
        while True:
            with self._taking_block:
                identity = self.new_if_at_hand()
                if identity is None:
                    self._take_block()
            if identity is not None:
                return identity

    def new_if_at_hand(self) -> ProducerIdentity | None:
        """Returns a new id without waiting, or None if the block is used up."""
        producer_id = next(self._block, None)
        return None if producer_id is None else ProducerIdentity(producer_id=producer_id)

    def _take_block(self) -> None:
        def take(metadata: ClusterMetadata) -> ClusterMetadata:
            following = metadata.next_producer_id + _PRODUCER_IDS_TAKEN
            return msgspec.structs.replace(metadata, next_producer_id=following)

        with self._metadata.changing("producer ids"):
            end = self._metadata.change(take).next_producer_id
        self._block = iter(range(end - _PRODUCER_IDS_TAKEN, end))
