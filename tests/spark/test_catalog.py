"""The SQL of `sparklog topics ddl`, run by Spark: topics as tables of its catalog."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

import sparklog
from sparklog.cli import app
from sparklog.client.log import Log

pytestmark = [pytest.mark.spark, pytest.mark.delta]

SCHEMA = "ours"


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    return tmp_path / "it's 100% ours"


@pytest.fixture(name="log")
def _log(root: Path) -> Iterator[Log]:
    with sparklog.connect(root) as log:
        yield log


@pytest.fixture(autouse=True)
def schema(spark: SparkSession) -> Iterator[None]:
    """A schema of its own in the session's catalog, empty before and after."""
    spark.sql(f"CREATE SCHEMA {SCHEMA}")
    yield
    spark.sql(f"DROP SCHEMA {SCHEMA} CASCADE")


def register(spark: SparkSession, root: Path, *arguments: str) -> None:
    """Runs what `topics ddl` prints."""
    given = ["topics", "ddl", *arguments, "--schema", SCHEMA, "--root", str(root)]
    result = CliRunner().invoke(app, given, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    for statement in result.stdout.split(";\n")[:-1]:
        spark.sql(statement)


def send(log: Log, topic: str, *values: str) -> None:
    """Records, with what they are as a key too, and in the table."""
    with log.producer() as producer:
        for value in values:
            producer.send(topic, value.encode(), key=value.encode())
    log.flush_to_table()


def values(spark: SparkSession, table: str) -> list[str]:
    """Returns the values of a SELECT."""
    query = f"SELECT CAST(value AS STRING) AS value FROM {SCHEMA}.`{table}` ORDER BY `offset`"
    return [row.value for row in spark.sql(query).collect()]


def test_a_topic_is_a_table_of_the_catalog(spark: SparkSession, root: Path, log: Log) -> None:
    """It has the columns of the Delta table, and later records too; the table's log is untouched,
    also when the statement runs twice, and when the catalog forgets it."""
    log.create_topic("page-views.v1", partitions=1)
    send(log, "page-views.v1", "a", "b")
    version = log.describe("page-views.v1").table_version
    register(spark, root, "page-views.v1")
    register(spark, root, "page-views.v1")
    assert spark.table(f"{SCHEMA}.page_views_v1").columns == [
        *("partition", "offset", "timestamp", "timestampType", "key", "value", "headers")
    ]
    assert values(spark, "page_views_v1") == ["a", "b"]
    send(log, "page-views.v1", "c")
    assert values(spark, "page_views_v1") == ["a", "b", "c"]
    spark.sql(f"DROP TABLE {SCHEMA}.page_views_v1")
    assert log.describe("page-views.v1").table_version == version + 1
    assert log.read("page-views.v1").num_rows == 3


def test_a_topic_that_was_created_again(spark: SparkSession, root: Path, log: Log) -> None:
    """The catalog's table shows the records of the recreated topic, and only those."""
    log.create_topic("t", partitions=1)
    send(log, "t", "old")
    register(spark, root, "t")
    log.delete_topic("t")
    assert values(spark, "t") == []
    log.create_topic("t", partitions=1)
    send(log, "t", "new")
    assert values(spark, "t") == ["new"]
    register(spark, root, "t")
    assert values(spark, "t") == ["new"]


def test_a_typed_topic_with_a_view(spark: SparkSession, root: Path, log: Log) -> None:
    """The view has nested types and unusual names, and the reason where a value does not fit."""
    schema = "`a.b` STRING, `c``d` STRUCT<e: MAP<STRING, INT>>, `select` ARRAY<DECIMAL(4,1)>"
    log.create_topic("t", 1, {"value.format": "json", "value.schema": schema})
    good = '{"a.b": "x", "c`d": {"e": {"k": 1}}, "select": [1.5, null]}'
    send(log, "t", good, '{"a.b": "y", "select": {}}')
    register(spark, root, "t", "--view")
    view = spark.table(f"{SCHEMA}.t_text")
    assert "binary" not in str(view.dtypes)
    query = f"SELECT `a.b`, `c``d`.`e`['k'], `select`[0], _error, key FROM {SCHEMA}.t_text"
    rows = [tuple(row) for row in spark.sql(f"{query} ORDER BY offset").collect()]
    assert rows == [
        ("x", 1, Decimal("1.5"), None, good),
        ("y", None, None, "value: select: {…} is not a JSON array", '{"a.b": "y", "select": {}}'),
    ]


def test_all_topics_with_views(spark: SparkSession, root: Path, log: Log) -> None:
    """A topic may have the name of a keyword; a view has texts, and the topic's name."""
    for topic in ("select", "é".encode().hex()):
        log.create_topic(topic, partitions=1)
        send(log, topic, "é")
    register(spark, root, "--all", "--view")
    for name in ("select", "c3a9"):
        assert values(spark, name) == ["é"]
        (row,) = spark.table(f"{SCHEMA}.{name}_text").collect()
        assert (row.key, row.value, row.topic, row.offset) == ("é", "é", name, 0)
