"""Decides which fields of strings are proposed as TIMESTAMP or DATE.

A column never changes its type, so a field is one only if each of its values is, in the strict form
of ISO 8601, and there are `MIN_TIMES` of them. A time needs seconds and an offset: without
an offset it is a local time of an unknown zone.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Final

import pyarrow as pa

from sparklog.formats.values.inference import Kind, kind_of
from sparklog.formats.values.json_rules import ValueMismatch, typed_leaf_decoder

MIN_TIMES: Final = 100
"""If all of 100 values are times, at most 3 % of the field's values are not, with a confidence of
95 % (the rule of three). It is a tenth of the records that are examined by default."""

TIMES: Final = {"TIMESTAMP": pa.timestamp("us", "UTC"), "DATE": pa.date32()}
"""The types of fields that are times, by their names in DDL."""

_STRICT: Final = re.compile(
    r"\d{4}-\d\d-\d\d(T\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d))?", re.ASCII
)
_decoders: Final = {name: typed_leaf_decoder(kind) for name, kind in TIMES.items()}


def kind_of_text(text: str) -> str:
    """Returns TIMESTAMP, DATE or STRING."""
    found = _STRICT.fullmatch(text)
    if found is None:
        return "STRING"
    name = "DATE" if found[1] is None else "TIMESTAMP"
    try:
        _decoders[name](text)
    except ValueMismatch:
        return "STRING"
    return name


class TimeCounts:
    """Counts the records in which a field, or a field inside it, is a time."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str | None, ...]] = Counter()
        """By the names from the top; None stands for the elements of an array."""

    def kind_of(self, name: str, value: Any) -> Kind:
        """Returns the type of one record's value of a field, and counts its times."""
        kind = kind_of(value, depth=1, of_text=kind_of_text)
        self._add((name,), kind)
        return kind

    def _add(self, path: tuple[str | None, ...], kind: Kind) -> None:
        if isinstance(kind, dict):
            for name, inner in kind.items():
                self._add((*path, name), inner)
        elif isinstance(kind, list):
            self._add((*path, None), kind[0])
        elif kind in TIMES:
            self._counts[path] += 1

    def checked(self, name: str, kind: Kind) -> Kind:
        """Returns the type of a field in all records; a time that is too rare is a STRING."""
        return self._checked((name,), kind)

    def _checked(self, path: tuple[str | None, ...], kind: Kind) -> Kind:
        if isinstance(kind, dict):
            return {name: self._checked((*path, name), inner) for name, inner in kind.items()}
        if isinstance(kind, list):
            return [self._checked((*path, None), kind[0])]
        return "STRING" if kind in TIMES and self._counts[path] < MIN_TIMES else kind
