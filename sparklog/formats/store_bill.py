"""The requests of brokers to an object store and their cost, as brokers send them to clients."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class StoreRates(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Requests per second to an object store for one purpose, and their price."""

    purpose: str
    """See `storage.objects.Purpose`."""
    puts: float = 0.0
    lists: float = 0.0
    reads: float = 0.0
    written_bytes: float = 0.0
    read_bytes: float = 0.0
    dollars_per_month: float = 0.0


class StoreBill(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A broker's present requests to its object store, and what they cost in a month."""

    prices: str
    """The name of the store whose prices these are."""
    seconds: float
    """The time over which the requests were counted: about a minute."""
    warn_dollars_per_month: float = 0.0
    """The bill of a broker above which `sparklog doctor` warns."""
    rates: list[StoreRates] = []
    """Those with requests in that time."""

    @property
    def total(self) -> StoreRates:
        """The rates for all purposes together."""
        return _sum_rates("", self.rates)


def joint_bill(bills: Sequence[StoreBill]) -> StoreBill | None:
    """Returns the bill of several brokers of a root together; None if none has one."""
    if not bills:
        return None
    rates = [each for bill in bills for each in bill.rates]
    return StoreBill(
        prices=", ".join(dict.fromkeys(bill.prices for bill in bills)),
        seconds=min(bill.seconds for bill in bills),
        rates=[
            _sum_rates(purpose, [each for each in rates if each.purpose == purpose])
            for purpose in dict.fromkeys(each.purpose for each in rates)
        ],
    )


def _sum_rates(purpose: str, rates: Sequence[StoreRates]) -> StoreRates:
    return StoreRates(
        purpose=purpose,
        puts=sum(each.puts for each in rates),
        lists=sum(each.lists for each in rates),
        reads=sum(each.reads for each in rates),
        written_bytes=sum(each.written_bytes for each in rates),
        read_bytes=sum(each.read_bytes for each in rates),
        dollars_per_month=sum(each.dollars_per_month for each in rates),
    )
