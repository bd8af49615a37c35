"""Reads the partitions that a group assigns to a consumer, from the committed offsets.

Everything here runs on the consumer's thread. Before more records are handed out, `attend` does
what the membership requires: it commits positions, gives up partitions, and takes over others.

Records that were handed out count as processed once the consumer asks for more, and are committed
only then, so none is lost if its process dies in between.

With the eager protocol every rebalance first revokes all partitions. With the cooperative one
(KIP-429) the consumer keeps its partitions, and reads them while the group rebalances; it gives up
only those missing from the new assignment, and rejoins so that they are assigned to other members.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Final

from sparklog import errors, limits
from sparklog.client.connection import Connection
from sparklog.client.consumer.fetcher import Chunk, Fetcher, FetchPosition
from sparklog.client.consumer.membership import Assigned, Membership, Step
from sparklog.client.offsets import (
    Point,
    Start,
    TopicPartition,
    check_start,
    describe,
    offsets_of,
    points_by_partition,
)
from sparklog.formats import flight_messages

_log = logging.getLogger(__name__)

OnPartitions = Callable[[list[TopicPartition]], object]
"""Called on the consumer's thread, within `poll` or `close`."""

ERROR: Final = "error"
"""A start for groups only: without a committed offset, the consumer raises."""


class GroupFetcher:
    """Reads one consumer's share of a group's partitions.

    Args:
        connection: to the brokers.
        fetcher: without any partitions yet.
        membership: not joined yet.
        start: where to begin if no offset is committed, or the committed one does not exist.
        first_counts: the number of partitions of each topic when the consumer was opened; those
            added later begin at the earliest offset, so that none of their records is skipped.
        on_assign: called with the partitions that were taken over.
        on_revoke: called with the partitions that are given up, unless there are none.
        on_lost: called instead of `on_revoke` with partitions that the group may already have
            assigned to another member; None: `on_revoke` is called with these too.

    Raises:
        errors.BadOption: `start` is not valid.
    """

    def __init__(
        self,
        connection: Connection,
        fetcher: Fetcher,
        membership: Membership,
        *,
        start: Start,
        first_counts: Mapping[str, int],
        on_assign: OnPartitions | None,
        on_revoke: OnPartitions | None,
        on_lost: OnPartitions | None,
    ) -> None:
        start = check_start(start, others=(ERROR,))
        self.membership = membership
        self.handed: tuple[FetchPosition, int] | None = None
        """The last records handed out, maybe unprocessed: their position and first offset."""
        self.rebalances = 0
        """Assignments taken over so far."""
        self._is_committing = False
        """True once the positions of partitions to give up were handed over for a commit."""
        self._is_joining_again = False
        """True if the group can assign partitions given up here only once this member rejoins."""
        self._connection = connection
        self._clock = connection.clock
        self._fetcher = fetcher
        self._otherwise: Point = "earliest" if isinstance(start, Mapping) else start
        self._points = points_by_partition(start) if isinstance(start, Mapping) else {}
        self._first_counts = first_counts
        self._on_assign = on_assign
        self._on_revoke = on_revoke
        self._on_lost = on_revoke if on_lost is None else on_lost

    # -------------------------------------------------------------------------- reading

    def is_ready(self) -> bool:
        """Notes that the consumer asks for more, so all records handed out count as processed.

        Returns False if `attend` is due before anything else is handed out.
        """
        self.handed = None
        self.membership.polled_at = self._clock.monotonic()
        return not self.membership.calls

    def take(self, deadline: float | None) -> Chunk | None:
        """Takes a chunk like `Fetcher.take`, and follows changes to the assignment."""
        membership = self.membership
        membership.is_polled = True
        try:
            while not membership.calls or self.attend(deadline):
                try:
                    chunk = self._fetcher.take(deadline)
                except errors.OffsetOutOfRange as error:
                    self._begin_again(error)
                    continue
                if chunk is not None or self._fetcher.is_at_end:
                    return chunk
                if deadline is not None and deadline <= self._clock.monotonic():
                    return None
            return None
        finally:
            membership.is_polled = False
            membership.polled_at = self._clock.monotonic()

    def attend(self, deadline: float | None) -> bool:
        """Joins, commits, gives up and takes over as due; returns False if not done by `deadline`.

        Raises the failure that ended the membership, and any error from the callbacks.
        """
        while True:
            match self.membership.next_step():
                case Step.NOTHING:
                    return True
                case Step.WAIT:
                    if not self.membership.wait(deadline):
                        return False
                case Step.COMMIT:
                    self.membership.commit_soon(self._uncommitted())
                case Step.JOIN:
                    self.membership.join(self.assignment())
                case Step.GIVE_UP:
                    if not self._give_up_all(deadline):
                        return False
                case Step.TAKE_OVER:
                    if not self._take_over(self.membership.assigned, deadline):
                        return False

    def _give_up_all(self, deadline: float | None) -> bool:
        """Commits, gives up all partitions and joins; returns False if not done by `deadline`."""
        if not self._commit_before_revoking(deadline):
            return False
        try:
            self._call_revoked(self.assignment())
        finally:
            self._fetcher.assign([], {})
            self.membership.join()
        return True

    def _commit_before_revoking(self, deadline: float | None) -> bool:
        membership = self.membership
        if membership.options.auto_commit and not membership.is_lost:
            if not self._is_committing:  # or a failing commit would be repeated forever
                self._is_committing = True
                membership.commit_soon(self._uncommitted())
            if not membership.wait_for_commit(deadline):
                return False
        self._is_committing = False
        return True

    def _call_revoked(self, partitions: list[TopicPartition]) -> None:
        call = self._on_lost if self.membership.is_lost else self._on_revoke
        if partitions and call is not None:
            call(partitions)

    def _take_over(self, assigned: Assigned, deadline: float | None) -> bool:
        """Takes over an assignment; returns False if not done by `deadline`."""
        owned, wanted = set(self._fetcher.positions), set(assigned.partitions)
        kept, revoked = owned & wanted, sorted(owned - wanted)
        if revoked:
            if not self._commit_before_revoking(deadline):
                return False
            self._is_joining_again = True
            try:
                self._call_revoked(revoked)
            finally:
                self._fetcher.assign([], {}, keep=kept)
        added = sorted(wanted - owned)
        offsets = self._start_offsets(assigned, added)
        self._fetcher.assign(assigned.infos.values(), offsets, keep=kept)
        self.rebalances += 1
        self.membership.took_over()
        if self._is_joining_again:
            self._is_joining_again = False
            self.membership.join(self.assignment())
        if self._on_assign is not None:
            self._on_assign(added)
        return True

    def _start_offsets(
        self, assigned: Assigned, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, int]:
        offsets: dict[TopicPartition, int] = {}
        points: dict[str, dict[int, Point]] = defaultdict(dict)
        for key in partitions:
            topic, number = key
            known = assigned.infos[topic].partitions[number]
            committed = assigned.committed.get(key)
            if committed is not None and known.start <= committed <= known.end:
                offsets[key] = committed
            else:
                points[topic][number] = self._point_of(key, committed, known)
        for topic, of_topic in points.items():
            found = offsets_of(self._connection, assigned.infos[topic], of_topic)
            offsets |= {(topic, number): offset for number, offset in found.items()}
        return offsets

    def _begin_again(self, error: errors.OffsetOutOfRange) -> None:
        """Resets a position that no longer exists, for example after retention."""
        position = self._fetcher.positions[error.topic, error.partition]
        info = describe(self._connection, position.topic)
        known = info.partitions[position.partition]
        point = self._point_of((position.topic, position.partition), position.fetched, known)
        offset = offsets_of(self._connection, info, {position.partition: point})[position.partition]
        self._fetcher.seek(position, offset)

    def _point_of(
        self, key: TopicPartition, wanted: int | None, known: flight_messages.PartitionInfo
    ) -> Point:
        """Returns where to begin if `wanted` is None or outside the partition's offsets."""
        topic, number = key
        point = self._points.get(key, self._otherwise)
        if wanted is None:
            if point == ERROR:
                group = self.membership.options.group
                reason = f"group {group!r} has committed no offset for {topic}-{number}"
                raise errors.BadOption(option="start", value=ERROR, reason=reason)
        else:
            error = errors.OffsetOutOfRange(
                topic=topic, partition=number, offset=wanted, start=known.start, end=known.end
            )
            if point == ERROR or isinstance(point, int):
                raise error
            _log.warning("%s; reading from %s instead", error, point)
        is_later = number >= self._first_counts.get(topic, 0)
        return "earliest" if point == "latest" and is_later else point

    # -------------------------------------------------------------------------- positions

    def assignment(self) -> list[TopicPartition]:
        """Returns the partitions that are being read, sorted."""
        return sorted(self._fetcher.positions)

    def positions(self, *, only_processed: bool = False) -> dict[TopicPartition, int]:
        """Returns the offsets after all records handed out, or before the last unprocessed ones."""
        found = {key: position.next_offset for key, position in self._fetcher.positions.items()}
        if only_processed and self.handed is not None:
            position, offset = self.handed
            found[position.topic, position.partition] = offset
        return found

    def _uncommitted(self, *, only_processed: bool = False) -> dict[TopicPartition, int]:
        """Includes partitions that were never read: `start` may yield other offsets later."""
        committed = self.membership.committed
        return {
            key: position
            for key, position in self.positions(only_processed=only_processed).items()
            if committed.get(key) != position
        }

    # -------------------------------------------------------------------------- the end

    def close(self, *, is_processed: bool) -> None:
        """Commits (the last records only if `is_processed`), gives up partitions, and leaves."""
        membership = self.membership
        try:
            if membership.is_member:
                if membership.options.auto_commit and not membership.is_lost:
                    self._commit_last(self._uncommitted(only_processed=not is_processed))
                self._call_revoked(self.assignment())
        finally:
            membership.close()

    def _commit_last(self, offsets: dict[TopicPartition, int]) -> None:
        membership = self.membership
        deadline = self._clock.monotonic() + limits.GROUP_CLOSE_SECONDS
        try:
            if offsets:
                try:
                    membership.commit(offsets, timeout_seconds=limits.GROUP_CLOSE_SECONDS)
                except errors.GroupBusy:
                    # In the next generation it still owns the partitions until it gives them up.
                    if not membership.wait(deadline):
                        raise
                    left_seconds = max(deadline - self._clock.monotonic(), 0.0)
                    membership.commit(offsets, timeout_seconds=left_seconds)
        except errors.SparklogError as error:
            _log.warning("the last commit of %r failed: %s", membership.options.group, error)
