"""What Spark asks of a Python source: a schema, a reader, a stream's reader."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from sparklog import errors
from sparklog.sources.batch import planner_of, reader_of
from sparklog.sources.options import parse
from sparklog.sources.scan import ddl, scan
from sparklog.sources.stream import RefusedReader, StreamReader

_log = logging.getLogger("sparklog.sources")


def schema(given: Mapping[str, str]) -> str:
    """The columns that the options ask for, as DDL; here a wrong option or topic is told first.

    Raises what `options.parse` raises, `NotARoot` and `UnknownTopic`.
    """
    options = parse(given)
    planner = planner_of(options)
    planner.refresh()
    planner.check_topics()
    return ddl(options)


def batch_reader(given: Mapping[str, str], wanted: StructType) -> DataSourceReader:
    """Raises what `options.parse` raises, and `BadOption`."""
    options = parse(given)
    options.check_batch()
    for note in options.batch_notes():
        _log.warning("%s", note)
    return reader_of(options, scan(options, wanted))


def stream_reader(given: Mapping[str, str], wanted: StructType) -> DataSourceStreamReader:
    """Raises nothing: a reader that refuses says why."""
    try:
        options = parse(given)
        options.check_stream()
        reader = StreamReader(options, scan(options, wanted))
    except errors.SparklogError as error:
        return RefusedReader(error)
    for note in options.stream_notes():
        _log.warning("%s", note)
    return reader
