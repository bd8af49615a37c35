"""Names and conversions that differ between Spark 4.0, 4.1 and 4.2, for Python sources.

Behaviour that depends on them is in `stream` (`EarlierStreamReader`), in `datasource` and in
`options.check_stream`; the sink's one difference is in `sinks.datasink`.

- Before 4.2 a stream has neither read limits nor `prepareForTriggerAvailableNow`.
- Since 4.2 the conversion of a schema to Arrow requires a time zone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.pandas import types as _types
from pyspark.sql.types import DataType, StructType

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:
    # Stand-ins, so that other modules can name limits under every version of Spark.

    class ReadLimit:  # type: ignore[no-redef]
        pass

    @dataclass
    class ReadAllAvailable(ReadLimit):  # type: ignore[no-redef]
        pass

    @dataclass
    class ReadMaxRows(ReadLimit):  # type: ignore[no-redef]
        max_rows: int

    @dataclass
    class ReadMinRows(ReadLimit):  # type: ignore[no-redef]
        min_rows: int

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        pass


__all__ = [
    "STREAMS_HAVE_LIMITS",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxRows",
    "ReadMinRows",
    "SupportsTriggerAvailableNow",
    "arrow_schema",
    "arrow_type",
]

STREAMS_HAVE_LIMITS: Final = ReadLimit.__module__.startswith("pyspark.")


def arrow_schema(schema: StructType) -> pa.Schema:
    """Returns the schema of batches that Spark takes without a conversion: timestamps in UTC."""
    return _types.to_arrow_schema(schema, **_in_utc(_types.to_arrow_schema))


def arrow_type(kind: DataType) -> pa.DataType:
    """Returns the Arrow type of one column, as in `arrow_schema`."""
    return _types.to_arrow_type(kind, **_in_utc(_types.to_arrow_type))


def _in_utc(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the argument for the time zone, which is required since 4.2."""
    return {"timezone": "UTC"} if "timezone" in inspect.signature(function).parameters else {}
