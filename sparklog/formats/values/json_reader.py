"""Reads JSON objects into one Arrow column, by the rules of Spark's `from_json`.

- msgspec decodes each value straight to the fields of the schema. It accepts a subset of what
  Spark accepts.
- A value that msgspec rejects is decoded again by the complete rules (`json_rules`), which take
  about ten times as long: numbers in STRING fields, `NaN`, unusual times, and bad values.
- Each value is decoded separately, so no value affects another.

The case against Arrow's reader, with figures: docs/adr/0026-values-are-decoded-one-by-one.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from sparklog.formats.values.arrow_columns import to_column
from sparklog.formats.values.checks import Mask
from sparklog.formats.values.json_rules import (
    JsonNumber,
    ObjectDecoder,
    ValueMismatch,
    leaf_decoder,
)
from sparklog.formats.values.msgspec_types import leaf_type, python_type

_BLOCK_ROWS: Final = 4_096
_BLOCK_BYTES: Final = 32 * 1024 * 1024
"""Bounds of one block, which exists as Python objects before it becomes a column."""


class ObjectReader:
    """Reads JSON objects as rows of `kind`, whose types are Spark's own (`values.json_type`)."""

    def __init__(self, kind: pa.StructType) -> None:
        self._kind = kind
        self._decode_by_rules = ObjectDecoder(kind).decode
        self._decode = _decoder(kind, checks_times=False)
        self._decode_checking_times = _decoder(kind, checks_times=True)

    def read(self, texts: pa.StringArray) -> tuple[pa.StructArray, Mask]:
        """Returns the rows, null for texts that are null or bad, and a mask of the bad ones."""
        if len(texts) > 1 and (len(texts) > _BLOCK_ROWS or texts.nbytes > _BLOCK_BYTES):
            half = len(texts) // 2
            first, second = self.read(texts[:half]), self.read(texts[half:])
            return pa.concat_arrays([first[0], second[0]]), np.concatenate([first[1], second[1]])
        values = texts.to_pylist()
        rows, bad = self._decode_all(values, self._decode)
        try:
            return to_column(rows, self._kind), bad
        except pa.ArrowInvalid:  # a time that Arrow cannot parse, or that is bad
            rows, bad = self._decode_all(values, self._decode_checking_times)
            return to_column(rows, self._kind), bad

    def _decode_all(
        self, texts: Sequence[str | None], decode: Callable[[str], Any]
    ) -> tuple[list[Any], Mask]:
        rows: list[Any] = []
        bad = np.zeros(len(texts), np.bool_)
        for number, text in enumerate(texts):
            row = None
            if text is not None:
                try:
                    row = decode(text)
                except (msgspec.MsgspecError, ValueError, RecursionError, ValueMismatch):
                    row = self._decode_refused(text)
                    bad[number] = row is None
            rows.append(row)
        return rows, bad

    def _decode_refused(self, text: str) -> Any:
        """Returns the row of a text that msgspec rejected, or None if it is bad."""
        try:
            return self._decode_by_rules(text)
        except (ValueMismatch, RecursionError):
            return None

    def reason(self, text: str) -> str:
        """Returns the reason that `text`, which is bad, was rejected."""
        try:
            self._decode_by_rules(text)
        except ValueMismatch as mismatch:
            return str(mismatch)
        except RecursionError:
            return "it is nested too deeply"
        raise AssertionError(f"{text!r} is not bad")


@functools.lru_cache(maxsize=16)
def object_reader(kind: pa.StructType) -> ObjectReader:
    """Returns the process's reader for `kind`; creating one takes a millisecond."""
    return ObjectReader(kind)


def _decoder(kind: pa.StructType, *, checks_times: bool) -> Callable[[str], Any]:
    """Returns msgspec's decoder of `kind`.

    Args:
        checks_times: decodes each date and time by the rules, so that Arrow can parse all of them;
            costs two microseconds each.
    """
    rules: dict[type, Callable[[Any], Any]] = {}

    def leaf(kind: pa.DataType) -> Any:
        if pa.types.is_decimal(kind) or (checks_times and pa.types.is_temporal(kind)):
            base = int if pa.types.is_decimal(kind) else str
            wanted = type("Leaf", (base,), {"__slots__": ()})
            rules[wanted] = leaf_decoder(kind)
            return wanted
        return leaf_type(kind)

    def convert(wanted: type, value: Any) -> Any:
        number = JsonNumber(value) if type(value) is int else value
        return wanted(rules[wanted](number))

    decoder = msgspec.json.Decoder(python_type(kind, leaf), dec_hook=convert, float_hook=JsonNumber)
    return decoder.decode
