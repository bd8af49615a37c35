"""Differences between Spark 4.0, 4.1 and 4.2 that the source and the sink hide.

- Before 4.2 a stream has neither read limits nor `prepareForTriggerAvailableNow`
  (SPARK-55304, https://github.com/apache/spark/pull/54085). `sources.stream.EarlierStreamReader`
  does without them, and `sources.options` rejects the options that need them.
- Since 4.2 the conversion of a schema to Arrow takes a time zone
  (SPARK-54903, https://github.com/apache/spark/pull/53678).
- Before 4.1 a stream is written row by row
  (SPARK-53030, https://github.com/apache/spark/pull/51757). `sinks.datasink` rejects streams there.
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
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
except ImportError:
    from pyspark.sql.datasource import (  # type: ignore[assignment]
        DataSourceStreamWriter as DataSourceStreamArrowWriter,
    )

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
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
    class ReadMaxBytes(ReadLimit):  # type: ignore[no-redef]
        max_bytes: int

    @dataclass
    class ReadMaxRows(ReadLimit):  # type: ignore[no-redef]
        max_rows: int

    @dataclass
    class ReadMinRows(ReadLimit):  # type: ignore[no-redef]
        min_rows: int

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        pass


__all__ = [
    "STREAMS_ARE_WRITTEN_IN_BATCHES",
    "STREAMS_HAVE_LIMITS",
    "DataSourceStreamArrowWriter",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxBytes",
    "ReadMaxRows",
    "ReadMinRows",
    "SupportsTriggerAvailableNow",
    "arrow_schema",
    "arrow_type",
]

STREAMS_HAVE_LIMITS: Final = ReadLimit.__module__.startswith("pyspark.")
STREAMS_ARE_WRITTEN_IN_BATCHES: Final = (
    DataSourceStreamArrowWriter.__name__ == "DataSourceStreamArrowWriter"
)


def arrow_schema(schema: StructType) -> pa.Schema:
    """Returns the schema of batches that Spark accepts without conversion: timestamps in UTC."""
    return _types.to_arrow_schema(schema, **_in_utc(_types.to_arrow_schema))


def arrow_type(kind: DataType) -> pa.DataType:
    """Returns the Arrow type of one column, as in `arrow_schema`."""
    return _types.to_arrow_type(kind, **_in_utc(_types.to_arrow_type))


def _in_utc(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the argument for the time zone, which was added in 4.2."""
    return {"timezone": "UTC"} if "timezone" in inspect.signature(function).parameters else {}
