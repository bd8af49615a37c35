"""The root's metadata, as the broker that leads the root reads and changes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from sparklog import errors
from sparklog.broker.log.takeover import Leadership, check_leadership
from sparklog.broker.log.writer import Writer
from sparklog.storage.metadata import ClusterMetadata, TopicMetadata
from sparklog.storage.metadata_store import MetadataStore
from sparklog.storage.objects import SyncFailed


class LeaderMetadata:
    """Metadata that is read and changed only while this broker leads the root.

    A broker that finds a newer leader stops its writer. All methods may be called from any thread.
    """

    def __init__(self, store: MetadataStore, leadership: Leadership, writer: Writer) -> None:
        self._store = store
        self._leadership = leadership
        self._writer = writer
        self._changing = threading.Lock()
        """The only lock that is held across I/O, by administrative calls."""

    @property
    def known(self) -> ClusterMetadata:
        """The version that was read or written last."""
        return self._store.current

    def reload(self) -> ClusterMetadata:
        """Returns the newest version. Raises `BrokerFenced` where it names a newer leader."""
        metadata = self._store.refresh()
        self._check_leadership(metadata)
        return metadata

    def change(self, change: Callable[[ClusterMetadata], ClusterMetadata]) -> ClusterMetadata:
        """Puts the next version. Raises `BrokerFenced`, and what `MetadataStore.change` raises."""

        def decide(metadata: ClusterMetadata) -> ClusterMetadata:
            self._check_leadership(metadata)
            return change(metadata)

        return self._store.change(decide)

    def change_topics(
        self, change: Callable[[dict[str, TopicMetadata]], dict[str, TopicMetadata]]
    ) -> ClusterMetadata:
        """Puts a version with other topics, and returns it. Raises what `change` raises."""
        return self.change(
            lambda metadata: msgspec.structs.replace(metadata, topics=change(metadata.topics))
        )

    @contextmanager
    def changing(self, action: str) -> Iterator[None]:
        """Admits one change at a time; `action` names it in an error."""
        with self._changing, self.stopping_on_sync_failure(action):
            yield

    @contextmanager
    def stopping_on_sync_failure(self, action: str) -> Iterator[None]:
        """Stops the writer and raises `OutcomeUnknown` where the disk fails to flush.

        A disk that has lost a table or the metadata cannot be trusted with records either.
        """
        try:
            yield
        except SyncFailed as error:
            self._writer.fail(error)
            raise errors.OutcomeUnknown(what=action, reason=str(error)) from error

    def _check_leadership(self, metadata: ClusterMetadata) -> None:
        try:
            check_leadership(metadata, self._leadership)
        except errors.BrokerFenced as error:
            self._writer.fail(error)
            raise
