"""Reports how far consumer groups' positions lag behind in the partitions led here.

A group's coordinator has its committed offsets; the partitions' leaders have the ends, and the
records whose age is the lag in seconds. So the coordinator asks the leaders for its figures.
"""

from __future__ import annotations

import threading
import time

from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.record_times import RecordTimes
from sparklog.formats.flight_messages import (
    GroupPosition,
    GroupPositions,
    PositionLag,
    PositionLags,
)

LAG_READ_SECONDS = 0.2  # in which a leader reads record timestamps for other brokers


class LagAnswers:
    """Answers other brokers. Thread-safe: only one caller at a time reads records."""

    def __init__(self, led_partitions: LedPartitions, times: RecordTimes) -> None:
        self._led_partitions = led_partitions
        self._times = times
        self._reading = threading.Lock()

    def answer(self, request: GroupPositions) -> PositionLags:
        """Returns the lag of each position; its age too, if requested and quickly available."""
        deadline = time.monotonic() + LAG_READ_SECONDS
        lags = [PositionLag(self._end(each)) for each in request.positions]
        if not request.ages:
            return PositionLags(lags=lags)
        behind = [
            number
            for number, each in enumerate(request.positions)
            if each.offset < lags[number].end
        ]
        if behind and self._reading.acquire(timeout=LAG_READ_SECONDS):
            try:
                for number in behind:
                    made_us = self._made_us(request.positions[number], deadline)
                    lags[number] = PositionLag(lags[number].end, made_us)
            finally:
                self._reading.release()
        return PositionLags(lags=lags)

    def _end(self, position: GroupPosition) -> int:
        topic = self._led_partitions.by_id(position.topic_id)
        partition = topic.partitions.get(position.partition) if topic is not None else None
        return partition.end if partition is not None else -1

    def _made_us(self, position: GroupPosition, deadline: float) -> int | None:
        topic = self._led_partitions.by_id(position.topic_id)
        if topic is None:
            return None
        key = topic.name, topic.topic_id, position.partition, position.offset
        made_us = self._times.known_us(key)
        if made_us is None and time.monotonic() < deadline:
            made_us = self._times.read_us(key)
        return made_us
