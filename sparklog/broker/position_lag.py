"""Answers how far positions of consumer groups are behind in the partitions that are led here.

A group's coordinator has its committed offsets; the ends of partitions, and the records whose age
is the lag in seconds, are with their leaders. So the coordinator asks them for its figures.
"""

from __future__ import annotations

import threading
import time

from sparklog import limits
from sparklog.broker.log.partitions import PartitionTable
from sparklog.broker.log.record_times import RecordTimes
from sparklog.formats.flight_messages import (
    GroupPosition,
    GroupPositions,
    PositionLag,
    PositionLags,
)


class LagAnswers:
    """Answers one request at a time. Thread-safe."""

    def __init__(self, partition_table: PartitionTable, times: RecordTimes) -> None:
        self._partition_table = partition_table
        self._times = times
        self._lock = threading.Lock()

    def answer(self, request: GroupPositions) -> PositionLags:
        """Returns the lag of each position. Reads timestamps for a bounded time."""
        with self._lock:
            deadline = time.monotonic() + limits.METRICS_LAG_SECONDS / 2
            return PositionLags(lags=[self._lag(each, deadline) for each in request.positions])

    def _lag(self, position: GroupPosition, deadline: float) -> PositionLag:
        topic = self._partition_table.by_id(position.topic_id)
        partition = topic.partitions.get(position.partition) if topic is not None else None
        if topic is None or partition is None:
            return PositionLag(-1)
        made_us = None
        if position.offset < partition.end:
            key = topic.name, topic.topic_id, position.partition, position.offset
            made_us = self._times.known_us(key)
            if made_us is None and time.monotonic() < deadline:
                made_us = self._times.read_us(key)
        return PositionLag(partition.end, made_us)
