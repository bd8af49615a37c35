"""The bill that a broker's settings may lead to on an object store, without asking a broker.

It is the bill of a broker all of whose partitions receive records all the time, a few at a time:
larger flushes and files hold more records for the same price, up to their bounds. Reads by
consumers are not included. The rates follow from the settings as in `broker.log.put_budget`.

Pure, without I/O.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sparklog.broker.log.put_budget import LOG_SHARE, UPKEEP_SHARE
from sparklog.prices import SECONDS_PER_MONTH, Prices
from sparklog.settings import BrokerSettings

_PUTS_AT_ONCE_PER_SECOND: Final = 4 / 0.02
"""Four flushes are put at once, each in 20 ms; slower stores cost less."""
_LOOKS_PER_SECOND: Final = 1.0
"""Looks at the metadata of the root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedBill:
    """Requests per second, and the bill of a month."""

    flushes: float
    table_puts: float
    """Data files and commits."""
    upkeep_puts: float
    """Merged files, checkpoints and heartbeats."""
    reads: float
    dollars_per_month: float


def expected_bill(
    settings: BrokerSettings, prices: Prices, partitions: Sequence[int]
) -> ExpectedBill:
    """Returns the bill of a broker that leads these partitions; `partitions`: of each topic."""
    flushes = _flushes(settings)
    files, commits = _publications(settings, partitions, flushes)
    liveness = settings.liveness.on(local=False)
    janitor = settings.janitor
    upkeep = (
        1 / liveness.heartbeat_seconds
        + 1 / settings.writer.checkpoint_every_seconds
        + 2 * commits / janitor.table_checkpoint_every
        + 2 * files / janitor.compact_files  # a merged file, and its commit
    )
    # Each commit is preceded by a probe, and read back; each file is looked at, and read to merge.
    reads = 2 * commits + 3 * files + _LOOKS_PER_SECOND
    puts = flushes + files + commits + upkeep
    return ExpectedBill(
        flushes=flushes,
        table_puts=files + commits,
        upkeep_puts=upkeep,
        reads=reads,
        dollars_per_month=prices.dollars(puts=puts, reads=reads) * SECONDS_PER_MONTH,
    )


def _flushes(settings: BrokerSettings) -> float:
    """Returns the flushes per second of a busy log; full ones come in addition."""
    linger_seconds = settings.writer.linger_ms_on(local=False) / 1e3
    most = min(1 / max(linger_seconds, 1e-3), _PUTS_AT_ONCE_PER_SECOND)
    if not settings.is_thrifty_on(local=False):
        return most
    share = settings.requests.puts_per_second * LOG_SHARE
    longest_seconds = max(settings.writer.linger_max_ms / 1e3, 1 / share)
    # The wait is proportional to the rate: see `PutBudget.flush_wait_seconds`.
    return min(math.sqrt(share / longest_seconds), share, most)


def _publications(
    settings: BrokerSettings, partitions: Sequence[int], flushes: float
) -> tuple[float, float]:
    """Returns the data files and commits per second."""
    interval_seconds = settings.publish_interval_seconds_on(local=False)
    files, commits = sum(partitions) / interval_seconds, len(partitions) / interval_seconds
    if settings.is_thrifty_on(local=False) and files:
        most = settings.requests.puts_per_second * (1 - UPKEEP_SHARE) - flushes
        share = min(1.0, most / (files + commits))
        files, commits = files * share, commits * share
    return files, commits
