"""Reads the groups of the partitions of `__consumer_offsets` that a broker leads, and drops others.

Partitions are read one at a time and independently: one that cannot be read, or takes a long time,
delays the groups of the others no longer than its own read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import structlog

from sparklog.broker.backoff import ENDS_THE_BROKER, FailureLog, RetrySchedule
from sparklog.broker.broker import Broker
from sparklog.broker.groups.entries import GroupEntry
from sparklog.broker.groups.known_groups import KnownGroups
from sparklog.broker.groups.messages import GroupError
from sparklog.clock import Clock
from sparklog.formats.consumer_offsets import (
    GroupKey,
    Key,
    OffsetKey,
    decode_group,
    decode_offset,
)

_log = structlog.get_logger("sparklog.groups")
_LOAD_AGAIN_SECONDS: Final = 0.5
"""The pause before a failed read of a partition is retried."""


class Loading:
    """The partitions whose groups have been read, and the rejection of requests for others."""

    def __init__(self, known: KnownGroups, broker: Broker, *, clock: Clock) -> None:
        self._known = known
        self._broker = broker
        self.refusal: GroupError | None = GroupError.COORDINATOR_LOAD_IN_PROGRESS
        """The reply to all requests before the groups have been read, and after closing."""
        self._loaded: dict[int, int] = {}
        """The partitions whose groups have been read, with their leader epoch at that time."""
        self._retries = RetrySchedule(clock, first_seconds=_LOAD_AGAIN_SECONDS)
        self._failures = FailureLog()
        """Failures to read a partition, so that each is logged once."""

    def open(self) -> None:
        """Creates the topic if it is missing; its empty partitions need not be read.

        May wait for storage. Raises what `TopicAdmin.create` raises.
        """
        topic = self._known.topic
        topic.ensure()
        with self._known.locked():
            if self.refusal is None and topic.led() != self._loaded:
                self._loaded |= topic.empty()

    def refused_here(self, group_id: str) -> GroupError | None:
        """Returns why this broker does not coordinate the group now, or None. Requires `locked`."""
        if self.refusal is not None:
            return self.refusal
        partition = self._known.topic.find_partition(group_id)
        if partition is None:
            # Another broker may have just created the topic, and this one will soon see it. Clients
            # back off on this error, while they would retry immediately on any other.
            is_shared = len(self._broker.members.up()) > 1
            return GroupError.COORDINATOR_LOAD_IN_PROGRESS if is_shared else None
        leader_epoch = self._known.topic.led().get(partition)
        if leader_epoch is None:
            return GroupError.NOT_COORDINATOR
        if self._loaded.get(partition) == leader_epoch:
            return None
        self._known.wake_if_idle()  # the next tick reads it
        return GroupError.COORDINATOR_LOAD_IN_PROGRESS

    def is_behind(self) -> bool:
        """Returns whether led partitions have not been read yet. Requires `locked`."""
        return bool(self._due(self._known.topic.led()))

    def tick(self) -> bool:
        """Follows the leaders of partitions; returns whether more partitions must be read."""
        with self._known.locked():
            refusal = self.refusal
        is_new = refusal is GroupError.COORDINATOR_LOAD_IN_PROGRESS
        led = self._known.topic.led() if refusal is None or is_new else self._loaded
        self._unload(led)
        is_behind = self._load_next(led)
        if is_new:
            while is_behind:
                is_behind = self._load_next(led)
            with self._known.locked():
                self.refusal = None
        return is_behind

    def _unload(self, led: Mapping[int, int]) -> None:
        """Forgets the groups of partitions that have moved away, perhaps only for a time."""
        gone = [number for number, epoch in self._loaded.items() if led.get(number) != epoch]
        if not gone:
            return
        known = self._known
        with known.locked():
            for number in gone:
                del self._loaded[number]
            for group_id, entry in list(known.by_id.items()):
                if known.topic.find_partition(group_id) not in self._loaded:
                    known.apply(entry, entry.group.unload())
                    del known.by_id[group_id]

    def _load_next(self, led: Mapping[int, int]) -> bool:
        """Reads one of the partitions that are led but not loaded; returns whether more are due."""
        due = self._due(led)
        if due:
            self._load(due[0], led[due[0]])
        return len(due) > 1

    def _due(self, led: Mapping[int, int]) -> list[int]:
        """Returns the partitions that are led but not loaded, except those waiting for a retry."""
        missing = [number for number in led if number not in self._loaded]
        return [number for number in missing if not self._retries.is_waiting(str(number))]

    def _load(self, number: int, leader_epoch: int) -> None:
        """Reads the groups that other brokers recorded in a partition."""
        try:
            groups = self._restore(dict(self._known.topic.read(number)))
        except ENDS_THE_BROKER:
            raise
        except Exception as error:  # records of other programs may contain anything
            self._retries.failed(str(number))
            reason = str(error) or repr(error)
            if self._failures.is_new(str(number), reason):
                _log.error("cannot read groups", partition=number, reason=reason)
            return
        self._retries.succeeded(str(number))
        self._failures.recovered(str(number))
        with self._known.locked():
            if number in self._loaded:  # it had no records, so it is already in use
                for entry in groups.values():
                    entry.group.unload()
                return
            self._known.by_id |= groups
            for entry in groups.values():
                self._known.schedule(entry)
            self._loaded[number] = leader_epoch

    def _restore(self, records: Mapping[Key, bytes]) -> dict[str, GroupEntry]:
        # All are decoded before the first member uses memory.
        recorded = {
            key: decode_group(data) for key, data in records.items() if isinstance(key, GroupKey)
        }
        offsets = {
            key: decode_offset(data) for key, data in records.items() if isinstance(key, OffsetKey)
        }
        groups: dict[str, GroupEntry] = {}
        for of_group, (record, changed_ms) in recorded.items():
            with self._known.locked():
                groups[of_group.group] = self._known.restored(of_group.group, record, changed_ms)
        for key, offset in offsets.items():
            if key.group not in groups:
                groups[key.group] = self._known.new(key.group)
            groups[key.group].offsets.put((key.topic, key.partition), offset)
        return groups
