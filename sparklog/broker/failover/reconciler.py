"""Brings the partitions of a broker in line with the metadata, which any broker may change.

The only broker of a root follows it too: it may not know the outcome of its own change.

Topics are added, changed and removed as in the metadata. A partition that has never had another
leader is served at once. One that this broker receives from another is served once its state has
been restored: from the logs of the epochs that the broker is heir to, and from its table. Until
then, requests for it are answered as if another broker led it, so that clients retry.

If such a log cannot be read, the received partitions wait, while those already served continue: a
damaged log would otherwise bring down one successor after another.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog

from sparklog import limits
from sparklog.broker.backoff import ENDS_THE_BROKER, FailureLog, RetrySchedule
from sparklog.broker.leader_metadata import LeaderMetadata
from sparklog.broker.log import recovery, takeover
from sparklog.broker.log.appends import EmptyObject
from sparklog.broker.log.histories import Histories
from sparklog.broker.log.partition_state import PartitionState
from sparklog.broker.log.parts import LogParts
from sparklog.broker.log.takeover import Leadership
from sparklog.broker.log.topic import Topic
from sparklog.clock import Clock
from sparklog.storage.metadata import leadership, placement
from sparklog.storage.metadata.leadership import Handover
from sparklog.storage.metadata.liveness import AskReadiness, Readiness
from sparklog.storage.metadata.model import ClusterMetadata, Epoch, TopicMetadata
from sparklog.storage.objects import Store, in_parallel
from sparklog.storage.snapshot import Located
from sparklog.storage.table.topic_table import OpenTable

STUCK_SECONDS = 60.0  # of failing to take over partitions, before they are passed on
UNFIT_SECONDS = 600.0  # after that, in which a broker receives no partitions

_log = structlog.get_logger("sparklog.cluster")
_RETRY_SECONDS: Final = 0.5
_TABLES_AT_ONCE: Final = 16
"""Tables that are read ahead of a takeover between two checks of the deadline."""
_TAKE: Final = "take"


class Reconciler:
    """Follows the metadata for one broker. `apply` may be called from any thread."""

    def __init__(
        self,
        store: Store,
        metadata: LeaderMetadata,
        leadership: Leadership,
        log: LogParts,
        *,
        inherit: Callable[[Sequence[Epoch], Sequence[Located]], None],
        open_table: OpenTable,
        clock: Clock,
        seen: ClusterMetadata,
        on_change: Callable[[], None],
        readiness: AskReadiness,
        histories: Histories,
    ) -> None:
        """Follows the metadata from `seen` on, the version that was recovered.

        `inherit` receives the epochs that this broker is heir to, and unpublished entries of
        partitions that it takes over. `on_change` is called when `take` has something to do.
        `histories` are those that the controller seals.
        """
        self._store = store
        self._metadata = metadata
        self._leadership = leadership
        self._led_partitions = log.led_partitions
        self._publisher = log.publisher
        self._writer = log.writer
        self._inherit = inherit
        self._open_table = open_table
        self._clock = clock
        self._seen = seen
        self._on_change = on_change
        self._readiness = readiness
        self._leading = threading.Lock()
        """Held by calls to `lead`."""
        self._applying = threading.Lock()
        """Held across I/O, by calls to `apply`."""
        self._compared = -1
        """`LedPartitions.topics_version` when it was last compared with the metadata."""
        self._whole_version = -1
        """The newest version for which this broker serves all partitions that it leads."""
        self._known_epochs = {each.id for each in leadership.inherited}
        """The inherited epochs that were passed to `inherit`."""
        self._must_write = False
        """True until an object follows the takeover, so that a checkpoint of ours can follow."""
        self._stuck_since: float | None = None
        """When this broker first failed to take over its partitions, in monotonic seconds."""
        self._unfit_until = -math.inf
        """Until when it should receive no partitions, because it had to pass some on."""
        self._retries = RetrySchedule(clock, first_seconds=_RETRY_SECONDS)
        self._failures = FailureLog()
        self._histories = histories
        self._looked_at = -math.inf
        """When this broker last checked for members that are leaving, in monotonic seconds."""
        self._prepared: set[tuple[int, int]] = set()
        """Epochs whose end this broker has prepared for."""

    def tick(self) -> None:
        """Follows the newest metadata. Raises `BrokerFenced` and the store's errors."""
        self._metadata.follow()
        self.take()

    # -------------------------------------------------------------------------- topics

    def lead(self, metadata: ClusterMetadata) -> bool:
        """Does the part of `apply` that reads no table, and so takes no time.

        Topics and partitions that are new to this broker are left to `apply`: it cannot mislead
        clients about these. Returns whether anything has changed for clients.
        """
        if not self._is_news(metadata):
            return False
        with self._leading:
            seen = self._seen
            metadata = max(metadata, seen, key=lambda each: each.version)
            are_removed = self._remove_topics(metadata)
            are_new = [
                self._led_partitions.lead_known(topic, known, version=metadata.version)
                for name, known in metadata.topics.items()
                if known is not seen.topics.get(name)
                and (topic := self._led_partitions.by_id(known.topic_id)) is not None
            ]
            return are_removed or any(are_new)

    def apply(self, metadata: ClusterMetadata) -> bool:
        """Adds, changes and removes topics to match `metadata`, or the newest version seen.

        Returns whether anything has changed for clients. Raises the store's errors; the next call
        then applies the rest.
        """
        if not self._is_news(metadata):
            return False
        with self._applying:
            if not self._is_news(metadata):
                return False
            seen = self._seen
            metadata = max(metadata, seen, key=lambda each: each.version)
            changed = [
                (name, known)
                for name, known in metadata.topics.items()
                if known is not seen.topics.get(name)
            ]
            are_removed = self._remove_topics(metadata)
            are_new = list(
                in_parallel(self._store, lambda each: self._bring(metadata, *each), changed)
            )
            self._seen = metadata
            if changed:
                self._on_change()
            return are_removed or any(are_new)

    def _is_news(self, metadata: ClusterMetadata) -> bool:
        """Returns whether a version is newer, or topics must be checked against it."""
        is_newer = metadata.version > self._seen.version
        return is_newer or self._compared != self._led_partitions.topics_version

    def _remove_topics(self, metadata: ClusterMetadata) -> bool:
        """Removes the topics that another broker has deleted, and returns whether there were any.

        They may be in no version that was applied: this broker may have just created them itself.
        """
        self._compared = self._led_partitions.topics_version
        ids = {known.topic_id for known in metadata.topics.values()}
        gone = [
            topic
            for topic in self._led_partitions.topics()
            if topic.topic_id not in ids and topic.version <= metadata.version
        ]
        for topic in gone:
            self._led_partitions.remove_topic(topic)
            self._publisher.remove_topic(topic)
        return bool(gone)

    def _bring(self, metadata: ClusterMetadata, name: str, known: TopicMetadata) -> bool:
        """Adds or changes a topic. Returns False if a change of our own has already done so."""
        table = self._led_partitions
        topic = table.by_id(known.topic_id)
        if topic is None:
            topic = Topic(name, known.topic_id, dict(known.config), self._open_table(name))
            self._add_partitions(topic, known, metadata)
            table.add_topic(topic)
            return True
        was = topic.leaders, topic.leader_epochs, topic.config
        if known.partition_count > topic.count:
            self._add_partitions(topic, known, metadata)
        else:
            table.lead(topic, known, version=metadata.version)
        before = self._seen.topics.get(name)
        # A change of our own that is under way is in neither version.
        if before is not None and before.config != known.config:
            table.set_config(topic, known.config)
        return (topic.leaders, topic.leader_epochs, topic.config) != was

    def _add_partitions(
        self, topic: Topic, known: TopicMetadata, metadata: ClusterMetadata
    ) -> None:
        """Adds new partitions. If the table cannot be read, they are restored like inherited ones.

        The topic is then held back, and the other topics continue.
        """
        if topic.table.snapshot.partitions < known.partition_count:
            table = topic.table.through(self._store)
            refusal = recovery.refusal_of(self._store, table.refresh)
            if refusal is not None and self._leadership.broker in known.leaders:
                self._led_partitions.backlog.hold_back(topic, str(refusal) or repr(refusal))
        snapshot = topic.table.snapshot
        if snapshot.topic_id == known.topic_id and snapshot.partitions >= known.partition_count:
            self._led_partitions.add_partitions(topic, snapshot, metadata)
        else:
            self._led_partitions.lead(topic, known, version=metadata.version)

    # -------------------------------------------------------------------------- partitions

    def _gained(self) -> dict[str, list[int]]:
        """Returns the partitions that this broker leads but does not yet serve, by topic."""
        found: dict[str, list[int]] = {}
        for name, known in self._seen.topics.items():
            if self._leadership.broker not in known.leaders:
                continue
            topic = self._led_partitions.by_id(known.topic_id)
            if topic is not None:
                missing = [
                    number
                    for number, leader in enumerate(known.leaders)
                    if leader == self._leadership.broker
                    and self._led_partitions.state(topic, number) is PartitionState.AWAITED
                ]
                if missing:
                    found[name] = missing
        return found

    def take(self) -> None:
        """Restores and serves the partitions that this broker was assigned.

        Raises what ends the broker; after other errors, a later call tries again.
        """
        if self._retries.is_waiting(_TAKE):
            return
        try:
            version = self._seen.version
            if version != self._whole_version:
                if gained := self._gained():
                    self._restore(gained)
                else:
                    self._inherit_without_partitions()
                self._histories.retain({each.id for each in self._seen.open_epochs})
                self._whole_version = version
            if self._must_write:
                # Our epoch may get no other object for a long time. A checkpoint of it lets us
                # leave the epochs of the predecessors.
                self._writer.wait(self._writer.submit([EmptyObject()], is_bounded=False))
                self._must_write = False
        except ENDS_THE_BROKER:
            raise
        except Exception as error:
            self._retries.failed(_TAKE)
            self._led_partitions.is_takeover_stuck = True
            reason = str(error) or repr(error)
            if self._failures.is_new(_TAKE, reason):
                _log.error("cannot take over partitions of another broker", reason=reason)
            now = self._clock.monotonic()
            if self._stuck_since is None:
                self._stuck_since = now
            elif now - self._stuck_since >= STUCK_SECONDS:
                self._pass_on()
        else:
            self._retries.succeeded(_TAKE)
            self._failures.recovered(_TAKE)
            self._stuck_since = None
            self._led_partitions.is_takeover_stuck = self._clock.monotonic() < self._unfit_until

    def _pass_on(self) -> None:
        """Passes the partitions that this broker cannot restore on to others that may be able to.

        This broker should receive no others for some time, so that partitions that no broker can
        restore do not circulate forever. Raises `BrokerFenced` and the store's errors.
        """
        metadata, own = self._seen, self._leadership
        states = self._states_of_others(metadata)
        unfit = {broker for broker, state in states.items() if state is not Readiness.SERVES}
        targets = placement.successors_without(metadata, own.broker, unfit)
        moves = [
            Handover(
                topic=name,
                topic_id=metadata.topics[name].topic_id,
                partition=number,
                leader_epoch=metadata.topics[name].leader_epochs[number],
                target=targets[name, number],
            )
            for name, numbers in self._gained().items()
            for number in numbers
            if (name, number) in targets
        ]
        if not moves:
            return
        self._unfit_until = self._clock.monotonic() + UNFIT_SECONDS
        # Only this thread begins to serve partitions that have been led before.
        changed = self._metadata.change(
            lambda newest: leadership.pass_on(newest, own.broker, own.epoch, moves)
        )
        _log.warning(
            "passed on partitions that could not be taken over",
            partitions=len(moves),
            to=sorted({each.target for each in moves}),
        )
        self._pass_to_cleaner(leadership.inherited_by(changed, own.broker))
        self._metadata.serve(changed)

    def _inherit_without_partitions(self) -> None:
        """Leaves epochs whose partitions were deleted, or moved on, before they arrived here."""
        inherited = leadership.inherited_by(self._seen, self._leadership.broker)
        if not self._known_epochs.issuperset(each.id for each in inherited):
            self._pass_to_cleaner(inherited)

    def _pass_to_cleaner(self, epochs: Sequence[Epoch], located: Sequence[Located] = ()) -> None:
        """Has the WAL cleaner leave these epochs as soon as no entry needs them.

        `located`: entries of theirs that have just come to this broker. An epoch can be left once a
        checkpoint of ours follows, which needs an object to follow.
        """
        self._known_epochs = {each.id for each in epochs}
        self._inherit(epochs, located)
        self._must_write = True

    def prepare(self) -> None:
        """Reads the logs and tables that are needed once leaving members' partitions arrive here.

        The takeover then has little left to read. Checks for such members ten times a second, and
        reads once for each epoch. Errors are left to the takeover, except one that ends this
        broker, which is raised.
        """
        now = self._clock.monotonic()
        if now - self._looked_at < limits.WATCH_SECONDS:
            return
        self._looked_at = now
        try:
            self._read_ahead(self._seen, deadline=now + limits.PREPARE_SECONDS)
        except ENDS_THE_BROKER:
            raise
        except Exception as error:
            _log.info("cannot prepare to take over partitions", reason=str(error) or repr(error))

    def _read_ahead(self, metadata: ClusterMetadata, *, deadline: float) -> None:
        """Reads for the members that are leaving now. Reads no more tables after the deadline."""
        states = self._states_of_others(metadata)
        leaving = {broker for broker, state in states.items() if state is Readiness.LEAVES}
        epochs = {
            each.id for each in metadata.open_epochs if each.broker in leaving and not each.fenced
        }
        new, self._prepared = epochs - self._prepared, epochs
        givers = {broker for broker, _ in new}
        if not givers:
            return
        unfit = {broker for broker, state in states.items() if state is not Readiness.SERVES}
        coming: dict[str, None] = {}  # in an order that is the same in every process
        for giver in sorted(givers):
            targets = placement.successors_without(metadata, giver, unfit)
            ours = (
                name for (name, _), target in targets.items() if target == self._leadership.broker
            )
            coming.update(dict.fromkeys(ours))
        if not coming:
            return
        for each in leadership.epochs_behind(metadata, givers):
            if each.fenced or each.id in new:
                self._histories.read_ahead(each)
        topics = [self._led_partitions.by_id(metadata.topics[name].topic_id) for name in coming]
        tables = [topic.table for topic in topics if topic is not None]
        for start in range(0, len(tables), _TABLES_AT_ONCE):
            if self._clock.monotonic() >= deadline:
                break
            recovery.refresh_all(self._store, tables[start : start + _TABLES_AT_ONCE])

    def _states_of_others(self, metadata: ClusterMetadata) -> Mapping[int, Readiness]:
        """Returns the readiness of the other members that are up. Raises the store's errors."""
        up = {each.broker for each in placement.candidates(metadata)}
        return self._readiness(metadata, up - {self._leadership.broker})

    def _restore(self, gained: dict[str, list[int]]) -> None:
        began, seen = self._clock.monotonic(), self._seen
        taken = takeover.read_inherited(self._histories, self._leadership, seen)
        located = recovery.restore(
            self._store,
            self._led_partitions,
            taken,
            gained,
            now_seconds=self._clock.monotonic(),
        )
        self._pass_to_cleaner(taken.leadership.inherited, located)
        _log.info(
            "took over partitions of another broker",
            partitions=sum(map(len, gained.values())),
            epochs=[each.id for each in taken.leadership.inherited],
            took_seconds=round(self._clock.monotonic() - began, 3),
        )
