"""The bill of an object store in words, for the commands that show it."""

from __future__ import annotations

from sparklog.display import counted
from sparklog.formats.store_bill import StoreBill
from sparklog.prices import OWN_PRICES

_UNNAMED_DOLLARS = 0.5
"""Purposes that cost less than this per month are not listed."""


def requests(bill: StoreBill) -> str:
    """Returns the rates of a bill: `4.1 puts/s, 0.3 listings/s, 2.2 reads/s`."""
    total = bill.total
    kinds = ((total.puts, "puts"), (total.lists, "listings"), (total.reads, "reads"))
    return ", ".join(f"{rate(number)} {kind}/s" for number, kind in kinds)


def monthly(bill: StoreBill) -> str:
    """Returns the estimate: `about 54 dollars a month at the prices of S3 Standard`."""
    dollars = bill.total.dollars_per_month
    amount = "less than a dollar"
    if dollars >= _UNNAMED_DOLLARS:
        amount = f"about {counted(round(dollars), 'dollar')}"
    return f"{amount} a month at {prices(bill.prices)}"


def prices(name: str) -> str:
    """Returns the name of prices in a sentence: `the prices of S3 Standard`."""
    return name if name == OWN_PRICES else f"the prices of {name}"


def purposes(bill: StoreBill) -> str:
    """Returns the shares of the estimate, the largest first: `log 31, tables 20, metadata 3`."""
    rates = sorted(bill.rates, key=lambda each: -each.dollars_per_month)
    named = [each for each in rates if each.dollars_per_month >= _UNNAMED_DOLLARS]
    return ", ".join(f"{each.purpose} {each.dollars_per_month:,.0f}" for each in named)


def rate(per_second: float) -> str:
    """Returns a number per second with about two digits: `0.03`, `4.1`, `120`."""
    if per_second >= 10:
        return f"{per_second:,.0f}"
    return f"{per_second:.1f}" if per_second >= 0.095 or not per_second else f"{per_second:.2f}"
