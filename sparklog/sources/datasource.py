"""Entry points of the Python source: schema, batch reader and stream reader."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from sparklog import errors
from sparklog.sources import ranges
from sparklog.sources.batch import BatchReader, planner_of, typed_columns
from sparklog.sources.options import SourceOptions, parse
from sparklog.sources.scan import Scan, ddl, scan
from sparklog.sources.stream import EarlierStreamReader, RefusedReader, StreamReader
from sparklog.spark_compat import STREAMS_HAVE_LIMITS
from sparklog.spark_errors import sentence_first

_TABLE: Final = (
    "Spark does not pass the options of a table to a Python source when it is read: use CREATE"
    " TEMPORARY VIEW name USING sparklog OPTIONS (root '…', subscribe '…') instead, or"
    " `sparklog topics ddl` for a Delta table in the catalog"
)
_log = logging.getLogger("sparklog.sources")


@sentence_first
def schema(given: Mapping[str, str]) -> str:
    """Returns the columns that the options select, as DDL.

    Spark calls it first, so this is where invalid options and missing topics are reported.

    Raises what `options.parse` raises, `NotARoot` and `UnknownTopic`, and `BadRequest` for a table.
    """
    if {"provider", "owner"}.intersection(given):  # Spark's own properties of a table
        raise errors.BadRequest(reason=_TABLE)
    options = parse(given)
    if options.is_typed:
        return ddl(options, typed_columns(options))
    planner_of(options).check_names()
    return ranges.DDL if options.rows_are_ranges else ddl(options)


@sentence_first
def batch_reader(given: Mapping[str, str], wanted: StructType) -> DataSourceReader:
    """Returns the batch reader.

    Raises what `options.parse` raises, `BadOption`, and `BadRequest` for a table.
    """
    options = _parsed(given)
    options.check_batch()
    for note in options.batch_notes():
        _log.warning("%s", note)
    return BatchReader(options, _scan(options, wanted))


@sentence_first
def stream_reader(given: Mapping[str, str], wanted: StructType) -> DataSourceStreamReader:
    """Returns the stream reader, or one that raises the error for invalid options when used."""
    try:
        options = _parsed(given)
        options.check_stream(has_limits=STREAMS_HAVE_LIMITS)
        kind = StreamReader if STREAMS_HAVE_LIMITS else EarlierStreamReader
        rows = ranges.scan(wanted) if options.rows_are_ranges else _scan(options, wanted)
        reader = kind(options, rows)
    except errors.SparklogError as error:
        return RefusedReader(error)
    for note in options.stream_notes():
        _log.warning("%s", note)
    return reader


def _scan(options: SourceOptions, wanted: StructType) -> Scan:
    return scan(options, wanted, typed_columns(options) if options.is_typed else None)


def _parsed(given: Mapping[str, str]) -> SourceOptions:
    """Parses the options. Raises `BadRequest` for a table created with a list of columns.

    For such a table, Spark does not call the Python source before the first query.
    """
    if not given:
        raise errors.BadRequest(reason=_TABLE)
    return parse(given)
