"""What differs between the Sparks that have Python sources: 4.0, 4.1 and 4.2.

Before 4.2 a stream has no limits and no say in what is available now.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
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
    from sparklog.sources.stand_ins import (  # type: ignore[assignment]
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )

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
    """Of batches that Spark takes as they are: timestamps in UTC."""
    return _types.to_arrow_schema(schema, **_in_utc(_types.to_arrow_schema))


def arrow_type(kind: DataType) -> pa.DataType:
    """The same of one column."""
    return _types.to_arrow_type(kind, **_in_utc(_types.to_arrow_type))


def _in_utc(function: Callable[..., Any]) -> dict[str, Any]:
    """Since 4.2 the zone must be said."""
    return {"timezone": "UTC"} if "timezone" in inspect.signature(function).parameters else {}
