"""What `produce` reads and `consume` writes, by name only: `--help` is to load nothing heavy."""

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
    """What a file is by the ending of its name; text if that tells nothing."""
    return _ENDINGS.get(name.rpartition(".")[2].lower(), InputFormat.TEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """Which fields of a record are its key and its time."""

    key: str | None = None
    timestamp: str | None = None
