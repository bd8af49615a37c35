"""Hands over partitions while this broker is alive: to balance the members, and before it stops.

A partition that moves is not served for a moment, so that its new leader misses nothing:

1. It accepts no more requests. Appends that are being written become durable; queued ones are
   rejected, and clients send them to the new leader.
2. A checkpoint of our log captures its full state. This is the *resignation*: no later entry of the
   log belongs to the partition.
3. The metadata names the new leader, in the next leader epoch, and as heir to our log.
4. The new leader restores the partition from our checkpoint and log, as it would after our death.

Our checkpoints retain the state, and our log the entries, until the new leader is no longer our
heir. If the third step fails, or may have failed, the partition waits until the outcome is known.

Each member decides on its own which of its partitions to hand over: all of them reach the same
decision on the same metadata (`storage/metadata/placement.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final

import structlog

from sparklog import errors
from sparklog.broker.leader_metadata import LeaderMetadata
from sparklog.broker.log.appends import EmptyObject
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.partition_state import PartitionState
from sparklog.broker.log.takeover import Leadership
from sparklog.broker.log.topic import Topic
from sparklog.broker.log.wal_cleaner import WalCleaner
from sparklog.broker.log.writer import Writer
from sparklog.clock import Clock
from sparklog.formats.flight_messages import PartitionMove
from sparklog.storage.metadata import leadership, placement
from sparklog.storage.metadata.leadership import Handover
from sparklog.storage.metadata.liveness import AskReadiness, Readiness
from sparklog.storage.metadata.model import ClusterMetadata
from sparklog.storage.metadata.placement import Candidate, Loads

BALANCE_SECONDS = 30.0  # without a move before members balance their partitions again

_log = structlog.get_logger("sparklog.cluster")
_DRAIN_PAUSE_SECONDS: Final = 0.05

Moves = Mapping[tuple[str, int], int]
"""The new leader of each (topic, partition)."""


class Handovers:
    """Hands over partitions of one member to others. May be called from several threads."""

    def __init__(
        self,
        metadata: LeaderMetadata,
        own: Leadership,
        led_partitions: LedPartitions,
        writer: Writer,
        wal_cleaner: WalCleaner,
        *,
        clock: Clock,
        readiness: AskReadiness,
    ) -> None:
        self._metadata = metadata
        self._own = own
        self._led_partitions = led_partitions
        self._resignations = led_partitions.resignations
        self._writer = writer
        self._wal_cleaner = wal_cleaner
        self._clock = clock
        self._readiness = readiness
        self._moving = threading.Lock()
        """Held while partitions move."""
        self._seen = metadata.known
        """The metadata as of the last tick."""
        self._level_since = clock.monotonic()
        """When leaders last changed, or balancing was last attempted, in monotonic seconds."""

    def tick(self) -> None:
        """Runs each step that is due. Raises `BrokerFenced` and the store's errors."""
        self._settle()
        self._release()
        metadata = self._metadata.known
        now = self._clock.monotonic()
        if metadata is not self._seen:
            if _leaders(metadata) != _leaders(self._seen):
                self._level_since = now
            self._seen = metadata
        if now - self._level_since < BALANCE_SECONDS:
            return
        self._level_since = now
        moves = self._level(metadata)
        if moves and not self._moving.locked():  # other moves may wait for the store
            self.move(moves)

    def _level(self, metadata: ClusterMetadata) -> Moves:
        """Returns the moves among all members that would balance them."""
        loads = Loads.of(metadata.topics.values())
        found = placement.balance(metadata.topics, placement.candidates(metadata), loads)
        if found:  # otherwise the heartbeats need not be read
            found = placement.balance(metadata.topics, self._candidates(metadata), loads)
        return {(each.topic, each.partition): each.target for each in found}

    def balance(self) -> int:
        """Hands over partitions now if members are unbalanced. Returns how many have moved.

        The others hand over theirs when they are asked too. Raises what `move` raises.
        """
        return self.move(self._level(self._metadata.reload()))

    def place(self, moves: Moves) -> int:
        """Hands over partitions to members chosen by an operator. Returns how many have moved.

        Raises `BadAssignment` if one of those accepts no partitions now, and like `move`.
        """
        able = {each.broker for each in self._candidates(self._metadata.reload()) if each.takes}
        for (topic, number), target in moves.items():
            if target not in able:
                reason = f"broker {target} accepts no partitions now, so partition {number} stays"
                raise errors.BadAssignment(topic=topic, reason=reason)
        return self.move(moves)

    def plan(self) -> list[PartitionMove]:
        """Returns the moves that would balance all members.

        Raises `BrokerFenced` and the store's errors.
        """
        metadata = self._metadata.reload()
        return [
            PartitionMove(
                topic=each.topic,
                partition=each.partition,
                leader=metadata.topics[each.topic].leaders[each.partition],
                target=each.target,
            )
            for each in placement.plan(metadata.topics, self._candidates(metadata))
        ]

    def drain(self, deadline: float, *, leaving: Collection[int] = ()) -> int:
        """Hands over all partitions to other members, until `deadline` in monotonic seconds.

        Returns how many have moved. The remaining ones must wait until this broker has stopped.
        `leaving`: members that are stopping too, and receive none.
        """
        given = 0
        while self._clock.monotonic() < deadline:
            try:
                self._settle()
                moves = self._all_to_others(self._metadata.reload(), leaving)
                if not moves:
                    break
                if count := self.move(moves):
                    given += count
                    continue
            except (errors.Retriable, errors.OutcomeUnknown) as error:
                _log.warning("not all partitions have been handed over yet", reason=str(error))
            self._clock.sleep(_DRAIN_PAUSE_SECONDS)
        return given

    def _candidates(self, metadata: ClusterMetadata) -> list[Candidate]:
        """Returns the members that serve partitions. Those that are about to stop accept none."""
        found = placement.candidates(metadata)
        states = self._readiness(metadata, [each.broker for each in found])
        return [
            replace(each, takes=states[each.broker] is Readiness.SERVES)
            for each in found
            if states[each.broker] is not Readiness.WAITS
        ]

    def _all_to_others(self, metadata: ClusterMetadata, leaving: Collection[int]) -> Moves:
        gone = {self._own.broker, *leaving}
        others = {each.broker for each in placement.candidates(metadata)} - gone
        states = self._readiness(metadata, others)
        for wanted in (Readiness.SERVES, Readiness.WAITS):
            unfit = {*gone, *(broker for broker in others if states[broker] is not wanted)}
            if moves := placement.successors_without(metadata, self._own.broker, unfit):
                return moves
        return {}

    # -------------------------------------------------------------------------- moving

    def move(self, moves: Moves) -> int:
        """Hands over those of the partitions that this broker serves. Returns how many have moved.

        Raises `BrokerFenced`, the store's errors, and the error that ended the writer.
        """
        with self._moving:
            wanted = list(self._ours(moves))
            if not wanted:
                return 0
            self._wal_cleaner.checkpoint()  # so that little is left for the next one
            began = self._clock.monotonic()
            try:
                for topic, each in wanted:
                    self._resignations.begin(topic, each.partition)
                self._finish_appends()
            except BaseException:
                for topic, each in wanted:
                    self._resignations.abandon(topic, each.partition)
                raise
            moved = [
                each for topic, each in wanted if self._resignations.complete(topic, each.partition)
            ]
            resigned = dict.fromkeys(moved, self._save_states())
            changed = self._metadata.change(
                lambda newest: leadership.resign(
                    newest, self._own.broker, self._own.epoch, resigned
                )
            )
            self._metadata.serve(changed)  # requests that wait for this get the new leaders
        _log.info(
            "gave partitions to other brokers",
            partitions=len(moved),
            to=sorted({each.target for each in moved}),
            took_seconds=round(self._clock.monotonic() - began, 3),
        )
        return len(moved)

    def _finish_appends(self) -> None:
        """Waits until all appends are durable or rejected. Raises if our epoch has ended."""
        self._writer.wait(self._writer.submit([EmptyObject()], is_bounded=False))

    def _save_states(self) -> int:
        """Puts a checkpoint with the states of the resigned partitions. Returns its sequence."""
        return self._wal_cleaner.checkpoint(confirms=False)  # confirming may wait for tables

    def _ours(self, moves: Moves) -> Iterable[tuple[Topic, Handover]]:
        """Yields those of `moves` whose partitions this broker serves and can hand over."""
        if self._resignations.undecided():
            raise errors.MetadataChanged  # the outcome of the last moves is unknown
        for (name, number), target in moves.items():
            if not self._led_partitions.has_topic(name):
                continue
            topic = self._led_partitions.topic(name)
            partition = topic.partitions.get(number)
            if partition is None or partition.state is not PartitionState.SERVING:
                continue
            if topic.in_doubt is not None:
                continue
            yield (
                topic,
                Handover(
                    topic=name,
                    topic_id=topic.topic_id,
                    partition=number,
                    leader_epoch=partition.leader_epoch,
                    target=target,
                ),
            )

    def _settle(self) -> None:
        """Determines which of the last moves are in the metadata, and reverts the others.

        The change may still be under way, so another version is put, which excludes it.
        """
        if not self._resignations.undecided() or not self._moving.acquire(blocking=False):
            return  # a thread that moves partitions now may wait for the store, and settles them
        try:
            resigned = self._resignations.undecided()  # all, now that no thread is moving any
            metadata = self._metadata.change(lambda metadata: metadata)
            topics = {known.topic_id: known for known in metadata.topics.values()}
            for topic_id, partition in resigned:
                known = topics.get(topic_id)
                if known is None:
                    continue  # deleted
                at = known.leaders[partition.number], known.leader_epochs[partition.number]
                if at == (self._own.broker, partition.leader_epoch):
                    self._led_partitions.reinstate(topic_id, partition.number)
            self._metadata.serve(metadata)
        finally:
            self._moving.release()

    # -------------------------------------------------------------------------- afterwards

    def _release(self) -> None:
        """Forgets the partitions whose leaders no longer need our log."""
        # Read before the metadata, which then has the next leader of each of them.
        retained = self._resignations.retained()
        if not retained:
            return
        metadata = self._metadata.known
        heirs = self._heirs(metadata)
        leaders = {topic.topic_id: topic.leaders for topic in metadata.topics.values()}
        for topic_id, number in retained:
            of_topic = leaders.get(topic_id, ())
            if number >= len(of_topic) or of_topic[number] not in heirs:
                self._resignations.release(topic_id, number)

    def _heirs(self, metadata: ClusterMetadata) -> frozenset[int]:
        own = self._own.broker, self._own.epoch
        return frozenset(
            heir for each in metadata.open_epochs if each.id == own for heir in each.heirs
        )


def _leaders(metadata: ClusterMetadata) -> dict[str, tuple[int, ...]]:
    return {name: topic.leaders for name, topic in metadata.topics.items()}
