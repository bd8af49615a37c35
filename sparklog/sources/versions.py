"""What differs between the Sparks that have Python sources: 4.0, 4.1 and 4.2.

Before 4.2 a stream has no limits and no say in what is available now; before 4.1 there are no
filters.
"""

from __future__ import annotations

import inspect
import sys
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
    "pushes_filters",
]

STREAMS_HAVE_LIMITS: Final = ReadLimit.__module__.startswith("pyspark.")


def pushes_filters() -> bool:
    """Whether the session hands filters on: a reader that takes them fails in any other."""
    return "pyspark.sql.worker.data_source_pushdown_filters" in sys.modules


def arrow_schema(schema: StructType) -> pa.Schema:
    """Of batches that Spark takes as they are: timestamps in UTC."""
    return _types.to_arrow_schema(schema, **_in_utc(_types.to_arrow_schema))


def arrow_type(kind: DataType) -> pa.DataType:
    """The same of one column."""
    return _types.to_arrow_type(kind, **_in_utc(_types.to_arrow_type))


def _in_utc(function: Callable[..., Any]) -> dict[str, Any]:
    """Since 4.2 the zone must be said."""
    return {"timezone": "UTC"} if "timezone" in inspect.signature(function).parameters else {}
