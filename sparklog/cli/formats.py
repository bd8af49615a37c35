"""Names of the formats that `produce` reads and `consume` writes; imports nothing heavy."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final


class InputFormat(enum.StrEnum):
    JSONL = "jsonl"
    TEXT = "text"
    CSV = "csv"
    PARQUET = "parquet"


class OutputFormat(enum.StrEnum):
    TEXT = "text"
    JSONL = "jsonl"
    ARROW = "arrow"


_ENDINGS: Final = {
    "jsonl": InputFormat.JSONL,
    "ndjson": InputFormat.JSONL,
    "json": InputFormat.JSONL,
    "csv": InputFormat.CSV,
    "parquet": InputFormat.PARQUET,
}


def format_of(name: str) -> InputFormat:
    """Returns the format for the suffix of a file's name; text for an unknown suffix."""
    return _ENDINGS.get(name.rpartition(".")[2].lower(), InputFormat.TEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """Names of the fields that hold a record's key and timestamp."""

    key: str | None = None
    timestamp: str | None = None
