"""What a consumer in a group reads: the partitions that it is assigned, from what is committed on.

Everything here happens in the consumer's thread. Before anything else is handed out, `attend` does
what the membership calls for: it commits positions, gives partitions up, and takes others over.

What was handed out counts as dealt with when the consumer asks for more, and is committed only
then, so that nothing is lost when its process dies in between.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Final

from sparklog import errors, limits, wire
from sparklog.client.connection import Connection
from sparklog.client.feed import Chunk, Feed, Place
from sparklog.client.membership import Assigned, Membership, Step
from sparklog.client.reading import (
    Point,
    Start,
    TopicPartition,
    check_start,
    describe,
    offsets_of,
    points_by_partition,
)

_log = logging.getLogger(__name__)

OnPartitions = Callable[[list[TopicPartition]], object]
"""Called in the consumer's thread, within `poll` or `close`."""

ERROR: Final = "error"
"""The start that is none: where nothing is committed, the consumer raises."""


class GroupFeed:
    """One consumer's part of what its group reads.

    Args:
        connection: to the brokers.
        feed: without any partitions yet.
        membership: not joined yet.
        start: where to begin where nothing is committed, or what is committed is not there.
        first_counts: the partitions that topics had when the consumer was made; those that are
            added later begin at the earliest, so that nothing of them is left out.
        on_assign: called with what was taken over.
        on_revoke: called with what is given up, unless it is nothing.

    Raises:
        errors.BadOption: a start that is none.
    """

    def __init__(
        self,
        connection: Connection,
        feed: Feed,
        membership: Membership,
        *,
        start: Start,
        first_counts: Mapping[str, int],
        on_assign: OnPartitions | None,
        on_revoke: OnPartitions | None,
    ) -> None:
        start = check_start(start, others=(ERROR,))
        self.membership = membership
        self.handed: tuple[Place, int] | None = None
        """What was handed out last, and may not be dealt with yet: of this place, from here on."""
        self._is_giving_up = False
        """And its positions were handed over to be committed."""
        self._connection = connection
        self._feed = feed
        self._otherwise: Point = "earliest" if isinstance(start, Mapping) else start
        self._points = points_by_partition(start) if isinstance(start, Mapping) else {}
        self._first_counts = first_counts
        self._on_assign = on_assign
        self._on_revoke = on_revoke

    # -------------------------------------------------------------------------- reading

    def is_ready(self) -> bool:
        """The consumer is asked for more, so all that was handed out is dealt with.

        False: `attend` before anything else is handed out.
        """
        self.handed = None
        self.membership.polled_at = time.monotonic()
        return not self.membership.calls

    def take(self, deadline: float | None) -> Chunk | None:
        """As `Feed.take`, of the partitions as they are assigned while it waits."""
        membership = self.membership
        membership.is_polled = True
        try:
            while not membership.calls or self.attend(deadline):
                try:
                    chunk = self._feed.take(deadline)
                except errors.OffsetOutOfRange as error:
                    self._begin_again(error)
                    continue
                if chunk is not None or self._feed.is_at_end:
                    return chunk
                if deadline is not None and deadline <= time.monotonic():
                    return None
            return None
        finally:
            membership.is_polled = False
            membership.polled_at = time.monotonic()

    def attend(self, deadline: float | None) -> bool:
        """Joins, commits, gives up and takes over as it is due; False: not ready by `deadline`.

        Raises what ended the membership, and what the callbacks raise.
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
                case Step.GIVE_UP:
                    if not self._give_up(deadline):
                        return False
                case Step.TAKE_OVER:
                    self._take_over(self.membership.assigned)

    def _give_up(self, deadline: float | None) -> bool:
        """What it has is committed and read no more, and the group goes on; False: not yet."""
        membership = self.membership
        if membership.options.auto_commit and not membership.is_lost:
            if not self._is_giving_up:  # or what fails would be handed over again and again
                self._is_giving_up = True
                membership.commit_soon(self._uncommitted())
            if not membership.wait_for_commit(deadline):
                return False
        self._is_giving_up = False
        try:
            self._tell_revoked()
        finally:
            self._feed.assign([], {})
            membership.join()
        return True

    def _tell_revoked(self) -> None:
        if self._feed.places and self._on_revoke is not None:
            self._on_revoke(self.assignment())

    def _take_over(self, assigned: Assigned) -> None:
        offsets: dict[TopicPartition, int] = {}
        points: dict[str, dict[int, Point]] = defaultdict(dict)
        for place in assigned.partitions:
            topic, number = place
            known = assigned.infos[topic].partitions[number]
            committed = assigned.committed.get(place)
            if committed is not None and known.start <= committed <= known.end:
                offsets[place] = committed
            else:
                points[topic][number] = self._point_of(place, committed, known)
        for topic, of_topic in points.items():
            found = offsets_of(self._connection, assigned.infos[topic], of_topic)
            offsets |= {(topic, number): offset for number, offset in found.items()}
        self._feed.assign(assigned.infos.values(), offsets)
        self.membership.took_over()
        if self._on_assign is not None:
            self._on_assign(self.assignment())

    def _begin_again(self, error: errors.OffsetOutOfRange) -> None:
        """What was to be read is not there any more, such as after retention."""
        place = self._feed.places[error.topic, error.partition]
        info = describe(self._connection, place.topic)
        known = info.partitions[place.partition]
        point = self._point_of((place.topic, place.partition), place.fetched, known)
        offset = offsets_of(self._connection, info, {place.partition: point})[place.partition]
        self._feed.seek(place, offset)

    def _point_of(
        self, place: TopicPartition, wanted: int | None, known: wire.PartitionInfo
    ) -> Point:
        """Where to begin, as `wanted` is None or outside of what exists."""
        topic, number = place
        point = self._points.get(place, self._otherwise)
        if wanted is None:
            if point == ERROR:
                group = self.membership.options.group
                reason = f"group {group!r} has committed no offset of {topic}-{number}"
                raise errors.BadOption(option="start", value=ERROR, reason=reason)
        else:
            error = errors.OffsetOutOfRange(
                topic=topic, partition=number, offset=wanted, start=known.start, end=known.end
            )
            if point == ERROR or isinstance(point, int):
                raise error
            _log.warning("%s; it is read from %s on", error, point)
        is_later = number >= self._first_counts.get(topic, 0)
        return "earliest" if point == "latest" and is_later else point

    # -------------------------------------------------------------------------- positions

    def assignment(self) -> list[TopicPartition]:
        """Sorted."""
        return sorted(self._feed.places)

    def positions(self, *, of_dealt_with: bool = False) -> dict[TopicPartition, int]:
        """The offsets after all that was handed out; `of_dealt_with`: without what was last."""
        found = {key: place.position for key, place in self._feed.places.items()}
        if of_dealt_with and self.handed is not None:
            place, offset = self.handed
            found[place.topic, place.partition] = offset
        return found

    def _uncommitted(self, *, of_dealt_with: bool = False) -> dict[TopicPartition, int]:
        """Also of what was never read: where it began counts, should it come back."""
        committed = self.membership.committed
        return {
            key: position
            for key, position in self.positions(of_dealt_with=of_dealt_with).items()
            if committed.get(key) != position
        }

    # -------------------------------------------------------------------------- the end

    def close(self, *, is_dealt_with: bool) -> None:
        """Commits, gives up, leaves. What was handed out last may not be dealt with."""
        membership = self.membership
        try:
            if membership.is_member:
                if membership.options.auto_commit and not membership.is_lost:
                    self._commit_last(self._uncommitted(of_dealt_with=not is_dealt_with))
                self._tell_revoked()
        finally:
            membership.close()

    def _commit_last(self, offsets: dict[TopicPartition, int]) -> None:
        try:
            if offsets:
                self.membership.commit(offsets, timeout_seconds=limits.GROUP_CLOSE_SECONDS)
        except errors.SparklogError as error:
            _log.warning("the last commit of %r failed: %s", self.membership.options.group, error)
