"""For a Spark that knows no limits of streams, so that our code may speak of them all the same."""

from __future__ import annotations

from dataclasses import dataclass


class ReadLimit:
    pass


@dataclass
class ReadAllAvailable(ReadLimit):
    pass


@dataclass
class ReadMaxRows(ReadLimit):
    max_rows: int


@dataclass
class ReadMinRows(ReadLimit):
    min_rows: int


class SupportsTriggerAvailableNow:
    pass
