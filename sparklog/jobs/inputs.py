"""The rows that a job reads with Spark: files, a table, or a query; once, or as a stream.

A batch of files has an identity: the names, sizes and times of the files that Spark would read. A
job that is run again on the same files uses it to recognise that its work is done.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

import typer

from sparklog import errors
from sparklog.jobs.running import spark_error_kinds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, Row, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamReader

_GLOB: Final = re.compile(r"([\\{}\[\]*?,])")
_NOT_PARQUET: Final = "CANNOT_READ_FILE_FOOTER"
_WITH_SCHEMA: Final = ("delta", "text")
"""Formats whose streams have their own schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """The rows to read: those of exactly one of `paths`, `table` and `query`."""

    paths: Sequence[str]
    table: str | None
    query: str | None
    format: str
    schema: str | None
    options: Mapping[str, str]

    def __post_init__(self) -> None:
        if sum(map(bool, (self.paths, self.table, self.query))) != 1:
            raise typer.BadParameter("pass exactly one of paths, --table and --query")
        if self.query and self.options:
            raise typer.BadParameter("--option is for paths and tables, not --query")
        if self.schema and not self.paths:
            raise typer.BadParameter("--schema is for paths: a table or a query has its own")
        if "readChangeFeed" in self.options and not self.needs_delta:
            raise typer.BadParameter("--change-feed is for Delta: pass --format delta, or --table")

    @property
    def reading(self) -> tuple[object, ...]:
        """Everything that determines how files become rows, except their names."""
        return self.table, self.query, self.format, self.schema, sorted(self.options.items())

    @property
    def needs_delta(self) -> bool:
        """True if the rows may come from a Delta table."""
        return not self.paths or self.format == "delta"

    def __str__(self) -> str:
        if self.query:
            return f"the query {self.query!r}"
        if self.table:
            return f"table {self.table}"
        return f"{', '.join(self.paths)} ({self.format})"

    def read(self, spark: SparkSession) -> DataFrame:
        """Returns all rows that exist now."""
        if self.query:
            return spark.sql(self.query)
        reader: DataFrameReader = spark.read.options(**self.options)
        if self.table:
            return reader.table(self.table)
        if self.schema:
            reader = reader.schema(self.schema)
        try:
            return reader.format(self.format).load(list(self.paths))
        except spark_error_kinds() as error:  # Spark reads the schema of Parquet files here
            if _NOT_PARQUET not in str(error):
                raise
            raise errors.BadRequest(
                reason=f"{', '.join(self.paths)}: not all of these files are Parquet. Pass their"
                " format: --format csv, json, text, orc or delta."
            ) from None

    def read_stream(self, spark: SparkSession) -> DataFrame:
        """Returns the rows that exist now, and those that are added later.

        The schema of files is that of the existing ones, unless it is given.
        """
        if self.query:
            raise typer.BadParameter("a query is read once: leave out --checkpoint")
        reader: DataStreamReader = spark.readStream.options(**self.options)
        if self.table:
            return reader.table(self.table)
        if len(self.paths) > 1:
            raise typer.BadParameter("a stream reads one path: a folder, or a pattern in quotes")
        if self.schema:
            reader = reader.schema(self.schema)
        elif self.format not in _WITH_SCHEMA:
            reader = reader.schema(self.read(spark).schema)
        return reader.format(self.format).load(self.paths[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSet:
    """The files of a batch."""

    count: int
    bytes: int
    identity: str
    """A digest of their names, sizes and modification times."""


def files_of(spark: SparkSession, frame: DataFrame) -> FileSet | None:
    """Returns the files that the frame reads, without reading them; None if it reads none."""
    from pyspark.errors import AnalysisException

    paths = frame.inputFiles()
    if not paths:
        return None
    try:
        rows = _stat(spark, map(unquote, paths))
    except AnalysisException:  # some do not exist: Delta returns unquoted paths
        rows = _stat(spark, paths)
    digest = hashlib.sha256()
    for path, length, modified in sorted(map(tuple, rows)):
        digest.update(f"{path}\0{length}\0{modified.timestamp():.6f}\n".encode())
    return FileSet(
        count=len(rows), bytes=sum(row["length"] for row in rows), identity=digest.hexdigest()
    )


def _stat(spark: SparkSession, paths: Iterable[str]) -> list[Row]:
    """Returns path, size and time of each file. Raises `AnalysisException` if one is missing."""
    found = spark.read.format("binaryFile").load([*map(literal, paths)])
    return found.select("path", "length", "modificationTime").collect()


def literal(path: str) -> str:
    """Returns the pattern that matches only this path, for a Spark reader."""
    return _GLOB.sub(r"\\\1", path)


def identity_of(files: FileSet | None, *parts: object) -> str:
    """Returns the name of a run, derived from its files and all that turns rows into records.

    Raises `BadRequest` for rows of unknown origin.
    """
    if files is None:
        raise errors.BadRequest(
            reason="These rows do not come from files alone, so a rerun could not be recognised."
            " Name this run with --once-as NAME, or pass --again to write anyway."
        )
    return hashlib.sha256(repr((files.identity, *parts)).encode()).hexdigest()[:32]
