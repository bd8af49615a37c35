"""A consumer's statistics."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerStatistics:
    """A consumer's counts since it was opened; `lag` and `buffered_bytes` are as of now."""

    records: int
    """Records handed out; those read again after a seek count again."""
    bytes: int
    """Their bytes, as Arrow columns."""
    lag: int
    """Offsets between the positions and the ends of the partitions, as far as those are known."""
    rebalances: int
    """Number of assignments that it has taken over from its group."""
    buffered_bytes: int
    """Memory of records that are read ahead."""
    last_poll: datetime | None
    """The last time at which it was polled, or had to fetch more records for an iteration."""
