"""A producer's statistics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerStatistics:
    """A producer's counts since it was opened; `in_flight` and `buffered_bytes` are as of now."""

    records: int = 0
    """Acked records."""
    bytes: int = 0
    """Bytes of acked records: keys, values and headers, or columns of a table. A batch for several
    partitions counts for each by its share of the rows."""
    batches: int = 0
    """Acked batches, each of one partition."""
    retries: int = 0
    """Batches that were resent."""
    errors: int = 0
    """Records that failed."""
    in_flight: int = 0
    """Batches that have been sent but not answered."""
    buffered_bytes: int = 0
    """Memory of records that are not yet acked."""

    @classmethod
    def total(cls, parts: Iterable[ProducerStatistics]) -> ProducerStatistics:
        parts = list(parts)
        sums = {
            field.name: sum(getattr(part, field.name) for part in parts) for field in fields(cls)
        }
        return cls(**sums)
