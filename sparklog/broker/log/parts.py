"""The parts of a broker's log that work on the same partitions."""

from __future__ import annotations

from dataclasses import dataclass

from sparklog.broker.log.hot_tail import HotTail
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.publisher import Publisher
from sparklog.broker.log.writer import Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class LogParts:
    """The log of one broker in one epoch."""

    led_partitions: LedPartitions
    hot: HotTail
    """The newest records, in memory."""
    writer: Writer
    publisher: Publisher
