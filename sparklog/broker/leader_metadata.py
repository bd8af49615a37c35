"""The root's metadata, as the broker that leads the root reads and changes it.

A broker that was suspended, or that has lost its connection to the store, may have been replaced
without knowing it. Its successor may have records, topics, group members and committed offsets that
it lacks. Two rules keep it from misleading clients:

- a response implying that the client knows more than the broker is sent only after a *proof of
  leadership*: a read of the metadata that began after the request arrived. Such responses say that
  an offset is out of range, that a sequence number is out of order, or that a topic, a member or a
  committed offset does not exist. A consumer would reset its position, and a producer would fail;
- a broker that may have been replaced since it last read the metadata, because that read or its
  last heartbeat is too old (`LivenessSettings.sight_seconds`), serves no request before the next
  read. Exceptions are appends, because an ack is itself a proof, and requests from group members,
  whose sessions would expire during a store outage. A read counts only once the broker serves its
  result: other threads of a broker that has just woken up might answer before that.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import msgspec

from sparklog import errors
from sparklog.broker.log.takeover import Leadership, check_leadership
from sparklog.broker.log.writer import Writer
from sparklog.clock import NEVER, Clock, Moment
from sparklog.storage.metadata.model import ClusterMetadata, TopicMetadata
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import SyncFailed


class _SharedLook:
    """A metadata read whose result or failure is shared by all calls that wait for its lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held during a read."""
        self.succeeded = 0
        """The number of the newest read that succeeded."""
        self.failed: tuple[int, errors.SparklogError] | None = None
        """The number of the newest read that failed, and its error."""


class LeaderMetadata:
    """Metadata that is read and changed only while this broker leads the root.

    A broker that finds a newer leader stops its writer. All methods may be called from any thread.
    """

    def __init__(
        self,
        store: MetadataStore,
        leadership: Leadership,
        writer: Writer,
        *,
        clock: Clock,
        sight_seconds: float,
    ) -> None:
        """`sight_seconds`: the age up to which our last read of the metadata, and our last
        heartbeat, count as proof that we lead.
        """
        self._store = store
        self._leadership = leadership
        self._writer = writer
        self._clock = clock
        self._sight_seconds = sight_seconds
        self._seen = NEVER
        """The start of the newest read whose result is served."""
        self._looks = 0
        """The number of reads begun so far."""
        self._proof, self._sight = _SharedLook(), _SharedLook()
        """The reads of `prove` and of `regain_sight`."""
        self._changed = 0
        """The number of the newest read that found changed topics or leaders."""
        self.lead: Callable[[ClusterMetadata], bool] = lambda _metadata: False
        """Applies new leaders of known topics, and deletions, without I/O; set by the owner.

        Returns whether it has changed anything.
        """
        self.apply: Callable[[ClusterMetadata], bool] = lambda _metadata: False
        """Does all the work of `serve`, of which `lead` does a part."""
        self.heartbeat_age_seconds: Callable[[], float] = lambda: 0.0
        """Returns the time since our last heartbeat, from which other brokers count our silence."""
        self._leading = threading.Lock()
        self._serving = threading.Lock()
        """Held while `lead` and `apply` run, until their changes are counted."""
        self._counting = threading.Lock()
        self._changing = threading.Lock()
        """Held by administrative calls, even across I/O."""

    @property
    def known(self) -> ClusterMetadata:
        """The version last read or written."""
        return self._store.current

    def follow(self) -> None:
        """Applies the newest version. Raises what `reload` and `serve` raise."""
        self._apply(self._look())

    def serve(self, metadata: ClusterMetadata) -> None:
        """Applies this version or a newer one. Raises what `apply` raises.

        Afterwards, no request that was judged on the previous state can be proven.
        """
        self._lead(metadata)
        self._apply(metadata)

    def _look(self) -> ClusterMetadata:
        """Returns the newest version, after applying its leaders. Tables may remain to be read."""
        began = Moment.now(self._clock)
        metadata = self.reload()
        self._lead(metadata)
        with self._counting:
            self._seen = max(self._seen, began, key=lambda each: each.monotonic_seconds)
        return metadata

    def _lead(self, metadata: ClusterMetadata) -> None:
        with self._leading:
            if self.lead(metadata):
                self._note_change()

    def _apply(self, metadata: ClusterMetadata) -> None:
        with self._serving:
            if self.apply(metadata):
                self._note_change()

    def _note_change(self) -> None:
        with self._counting:
            self._looks += 1
            self._changed = self._looks

    def _next_look(self) -> int:
        with self._counting:
            self._looks += 1
            return self._looks

    def reload(self) -> ClusterMetadata:
        """Returns the newest version. Raises `BrokerFenced` if it names a newer leader."""
        metadata = self._store.refresh()
        self._check_leadership(metadata)
        return metadata

    @property
    def has_sight(self) -> bool:
        """True if our last read of the metadata and our last heartbeat are recent. Never blocks."""
        return max(self.look_age_seconds, self.heartbeat_age_seconds()) < self._sight_seconds

    @property
    def look_age_seconds(self) -> float:
        """The time since the start of the last read whose result is served."""
        return self._seen.age_seconds(self._clock)

    def regain_sight(self) -> None:
        """Reads the metadata before a request is judged; changes are not an error.

        Calls share reads, and the failure of a slow one, as in `prove`. Does not wait for tables
        that have to be read: a slow one does not concern the readers of other topics.

        Raises `BrokerFenced`, and the store's errors.
        """
        since = self._looks
        with self._sight.lock:
            if self._sight.succeeded <= since:
                self._make(self._sight, since, self._look)

    def _make(self, shared: _SharedLook, since: int, look: Callable[[], object]) -> None:
        """Performs a read, whose lock is held; raises the error of one that has failed since."""
        if shared.failed is not None and shared.failed[0] > since:
            raise errors.revive(shared.failed[1].code, shared.failed[1].facts)
        number = self._next_look()
        try:
            look()
        except errors.SparklogError as error:
            shared.failed = number, errors.bare(error)
            raise
        shared.succeeded = number

    @property
    def looks(self) -> int:
        """The number of reads begun so far: the current moment, as an argument of `prove`."""
        return self._looks

    def is_proven(self, since: int) -> bool:
        """Returns whether a read that began after the moment `since` has found us leading."""
        return self._proof.succeeded > since >= self._changed

    def prove(self, since: int) -> None:
        """Checks that we lead, with a read begun after the moment `since`; calls share reads.

        Raises `BrokerFenced`, and the store's errors, after which nothing is proven. A read that
        fails slowly fails for all waiting calls, which would otherwise wait for one read after
        another. Raises `MetadataChanged` if topics or leaders have changed, by another broker or by
        a change of our own whose outcome was unknown: the request was judged on the previous state.
        """

        def look() -> None:
            self.follow()
            self._check_unchanged(since)

        with self._proof.lock:
            if not self.is_proven(since):
                self._check_unchanged(since)
                self._make(self._proof, since, look)

    def _check_unchanged(self, since: int) -> None:
        if since < self._changed:
            raise errors.MetadataChanged

    def change(
        self, change: Callable[[ClusterMetadata], ClusterMetadata | None]
    ) -> ClusterMetadata:
        """Puts the next version, unless `change` returns None.

        Raises `BrokerFenced`, and what `MetadataStore.change` raises.
        """

        def decide(metadata: ClusterMetadata) -> ClusterMetadata | None:
            self._check_leadership(metadata)
            return change(metadata)

        return self._store.change(decide)

    def change_topics(
        self, change: Callable[[dict[str, TopicMetadata]], dict[str, TopicMetadata]]
    ) -> ClusterMetadata:
        """Puts a version with changed topics, and returns it. Raises what `change` raises."""
        return self.change(
            lambda metadata: msgspec.structs.replace(metadata, topics=change(metadata.topics))
        )

    @contextlib.contextmanager
    def changing(self, action: str) -> Iterator[None]:
        """Admits one change at a time; `action` names it in an error.

        A cluster member first applies the newest version, and raises what `follow` raises.
        """
        with self._changing, self.stopping_on_sync_failure(action):
            if self._leadership.is_member:
                self.follow()
            yield

    @contextlib.contextmanager
    def stopping_on_sync_failure(self, action: str) -> Iterator[None]:
        """Stops the writer and raises `OutcomeUnknown` if the disk fails to flush.

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
