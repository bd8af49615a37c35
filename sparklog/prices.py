"""Prices of requests to object stores, as in `prices.toml`.

A bill is an estimate: it covers the requests of brokers, and of some stores the bytes in them, but
neither storage nor the requests of other programs, such as readers that open the tables.
"""

from __future__ import annotations

import functools
import importlib.resources
import tomllib
from collections.abc import Mapping
from typing import Final

import msgspec

HOURS_PER_MONTH: Final = 730
SECONDS_PER_MONTH: Final = HOURS_PER_MONTH * 3600
OWN_PRICES: Final = "your own prices"
"""The name of prices that a user has set."""
_GB: Final = 1e9
_MILLION: Final = 1e6
_OF_SCHEME: Final = {"s3": "s3-standard", "gs": "gcs-standard", "az": "azure-blob-hot"}
_OF_OTHERS: Final = "s3-standard"
_EXPRESS_BUCKET: Final = "--x-s3"
"""The end of the names of S3 Express buckets."""


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prices of a store, in dollars. Deletions cost nothing."""

    name: str
    region: str = ""
    month: str = ""
    """When these prices were valid, as in 2025-06."""
    source: str = ""
    """The page that the prices are from."""
    dollars_per_million_puts: float
    dollars_per_million_lists: float
    dollars_per_million_reads: float
    dollars_per_written_gb: float = 0.0
    dollars_per_read_gb: float = 0.0

    def dollars(
        self,
        *,
        puts: float,
        lists: float = 0.0,
        reads: float = 0.0,
        written_bytes: float = 0.0,
        read_bytes: float = 0.0,
    ) -> float:
        """Returns the price of so many requests, and of the bytes in them."""
        return (
            puts * self.dollars_per_million_puts / _MILLION
            + lists * self.dollars_per_million_lists / _MILLION
            + reads * self.dollars_per_million_reads / _MILLION
            + written_bytes * self.dollars_per_written_gb / _GB
            + read_bytes * self.dollars_per_read_gb / _GB
        )


@functools.cache
def price_table() -> Mapping[str, Prices]:
    """Returns the stores with known prices, by name."""
    file = importlib.resources.files("sparklog").joinpath("prices.toml")
    return msgspec.convert(tomllib.loads(file.read_text("utf-8")), dict[str, Prices])


def prices_of(uri: str) -> Prices:
    """Returns the prices of the store of a root: by its scheme, S3 Standard if it is another one.

    The name of a bucket shows that it is one of S3 Express.
    """
    scheme, _, place = uri.partition("://")
    name = _OF_SCHEME.get(scheme, _OF_OTHERS)
    if scheme == "s3" and place.partition("/")[0].endswith(_EXPRESS_BUCKET):
        name = "s3-express-one-zone"
    return price_table()[name]
