"""The present bill of a broker's object store: the requests of about the last minute, priced.

Counts of requests exist anyway; a thread notes them every few seconds, so that the first client
that asks gets a rate too. A local root has no bill.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from sparklog.clock import Clock
from sparklog.formats.store_bill import StoreBill, StoreRates
from sparklog.prices import SECONDS_PER_MONTH, Prices
from sparklog.storage.objects import Purpose, Usage

BILL_SAMPLE_SECONDS = 10.0
_SAMPLES: Final = 7
"""The oldest one is at least a minute old."""


class RecentBill:
    """Keeps earlier counts of requests. `at_present` may be called from any thread."""

    def __init__(
        self,
        usages: Callable[[], Mapping[Purpose, Usage]],
        prices: Prices,
        *,
        clock: Clock,
        warn_dollars_per_month: float,
    ) -> None:
        """`usages` returns a copy of the counts; the bill begins with the first one."""
        self._usages = usages
        self._prices = prices
        self._clock = clock
        self._warn_dollars_per_month = warn_dollars_per_month
        self._samples = deque([(clock.monotonic(), usages())], maxlen=_SAMPLES)

    def sample(self) -> None:
        """Notes the present counts; called every `BILL_SAMPLE_SECONDS`."""
        self._samples.append((self._clock.monotonic(), self._usages()))

    def at_present(self) -> StoreBill:
        """Returns the rates since the oldest counts, and their price."""
        then, before = self._samples[0]
        seconds = max(self._clock.monotonic() - then, 1.0)
        bill = bill_between(before, self._usages(), seconds, self._prices)
        return msgspec.structs.replace(bill, warn_dollars_per_month=self._warn_dollars_per_month)


def bill_between(
    before: Mapping[Purpose, Usage], now: Mapping[Purpose, Usage], seconds: float, prices: Prices
) -> StoreBill:
    """Returns the bill of the requests between two counts, `seconds` apart."""
    rates = [
        _rates(purpose, usage.since(before.get(purpose, Usage())), seconds, prices)
        for purpose, usage in now.items()
    ]
    return StoreBill(
        prices=prices.name,
        seconds=round(seconds, 1),
        rates=[each for each in rates if each.puts or each.lists or each.reads],
    )


def _rates(purpose: Purpose, usage: Usage, seconds: float, prices: Prices) -> StoreRates:
    dollars = prices.dollars(
        puts=usage.puts,
        lists=usage.lists,
        reads=usage.reads,
        written_bytes=usage.written_bytes,
        read_bytes=usage.read_bytes,
    )
    return StoreRates(
        purpose=purpose.value,
        puts=usage.puts / seconds,
        lists=usage.lists / seconds,
        reads=usage.reads / seconds,
        written_bytes=usage.written_bytes / seconds,
        read_bytes=usage.read_bytes / seconds,
        dollars_per_month=dollars / seconds * SECONDS_PER_MONTH,
    )
