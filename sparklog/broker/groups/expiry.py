"""Expiry of offsets, of deserted groups, and of members that are gone.

Offsets expire by Kafka's rule (KIP-211). All offsets of a group expire once it has been empty for
the retention period. In an active group, offsets of topics that no member subscribes to expire that
long after their commit; in a group that never had members, all offsets do.
"""

from __future__ import annotations

from typing import Final

import structlog

from sparklog.broker.backoff import ENDS_THE_BROKER
from sparklog.broker.broker import Broker
from sparklog.broker.groups.committed_offsets import TopicPartition, flatten
from sparklog.broker.groups.descriptions import subscribed_topics
from sparklog.broker.groups.entries import GroupEntry, OffsetsSnapshot, TopicLookup
from sparklog.broker.groups.known_groups import KnownGroups
from sparklog.broker.groups.messages import GroupError, GroupState

OFFSETS_RETENTION_CHECK_SECONDS = 600.0

_log = structlog.get_logger("sparklog.groups")
_SWEEP_STEP_MS: Final = 50
"""The maximum time for which a sweep delays requests that wait for records being stored."""
_SWEEP_MS: Final = round(OFFSETS_RETENTION_CHECK_SECONDS * 1e3)
_REMOVE_GONE_MS: Final = 1_000
"""The minimum time between searches for members that are gone."""


class Expiry:
    """Handles deadlines and retention; one thread calls `tick`."""

    def __init__(self, known: KnownGroups, broker: Broker) -> None:
        self._known = known
        self._broker = broker
        self._is_short = False
        """True if a request found too little memory, so members that are gone must be removed."""
        self._remove_gone_ms = known.now_ms()
        """The earliest time of the next search for such members."""
        self._sweep_ms = known.now_ms() + _SWEEP_MS
        self._to_sweep: list[GroupEntry] = []
        """Groups whose offsets this sweep has not visited yet."""

    def note_memory(self, more_bytes: int) -> None:
        """Has members that are gone removed if memory is short. Requires `locked`."""
        if not self._is_short and not self._known.memory.has(more_bytes):
            self._is_short = True
            self._known.wake()

    def wait_seconds(self) -> float:
        """Returns the time until something is due."""
        if self._to_sweep:
            return 0.0
        with self._known.locked():
            due_ms = self._known.next_due_ms()
        next_ms = self._sweep_ms if due_ms is None else min(due_ms, self._sweep_ms)
        return max((next_ms - self._known.now_ms()) / 1e3, 0.0)

    def tick(self) -> None:
        """Handles the deadlines that have passed, and sweeps some groups."""
        known, now_ms = self._known, self._known.now_ms()
        with known.locked():
            known.expire_due(now_ms)
            if self._sweep_ms <= now_ms:
                self._sweep_ms = now_ms + _SWEEP_MS
                self._to_sweep = list(known.by_id.values())
        if self._is_short and self._remove_gone_ms <= now_ms:
            self._remove_gone(now_ms)
        until_ms = now_ms + _SWEEP_STEP_MS  # after that, requests that wait for records come first
        while self._to_sweep and known.now_ms() < until_ms:
            entry = self._to_sweep.pop()
            try:
                self._sweep(entry)
            except ENDS_THE_BROKER:
                raise
            except Exception:  # the offsets of other groups expire regardless
                _log.exception("cannot sweep a group", group=entry.group.group_id)

    def _remove_gone(self, now_ms: int) -> None:
        """Removes members whose connection is closed, without waiting for them to return."""
        known, memory = self._known, self._known.memory
        with known.locked():
            self._is_short, self._remove_gone_ms = False, now_ms + _REMOVE_GONE_MS
            entries = list(known.by_id.items())
            before_bytes = memory.held_bytes
        for group_id, entry in entries:
            with known.locked():
                if known.by_id.get(group_id) is entry:
                    known.apply(entry, entry.group.expire(now_ms, is_short=True))
        _log.warning(
            "memory for group members is short",
            held_bytes=memory.held_bytes,
            limit_bytes=memory.limit_bytes,
            freed_bytes=before_bytes - memory.held_bytes,
        )

    def _sweep(self, entry: GroupEntry) -> None:
        """Removes offsets that have expired or whose topic is gone, and the group if deserted.

        The offsets are judged by a snapshot, because there may be many; if the group has changed
        since, they remain until the next sweep.
        """
        known = self._known
        oldest_ms = known.wall_ms() - known.settings.offsets_retention_minutes * 60_000
        with known.locked():
            snapshot = OffsetsSnapshot(entry)
            group, subscribed = entry.group, subscribed_topics(entry.group)
            is_empty = group.state is GroupState.EMPTY
            left_ms = entry.changed_ms if is_empty and group.protocol_type is not None else -1
            is_over = group.is_deserted and not entry.committing
        topics = TopicLookup(self._broker)
        committing: set[TopicPartition] = set().union(*snapshot.committing)
        count = 0
        expired: list[TopicPartition] = []
        for topic_partition, value in flatten(snapshot.offsets):
            count += 1
            if topic_partition not in committing and (
                not topics.has(topic_partition, value)
                or (
                    subscribed is not None
                    and topic_partition[0] not in subscribed
                    and max(value.commit_ms, left_ms) <= oldest_ms
                )
            ):
                expired.append(topic_partition)
        if is_over and len(expired) == count:
            known.delete(snapshot, _ignore, if_deserted=True)
        elif expired:
            known.erase(snapshot, expired, subscribed, _ignore)


def _ignore(_error: GroupError | None) -> None:
    """Ignores a failure, because the next sweep retries."""
