"""Typed columns in Spark: those of the source are those of the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chispa import assert_df_equality
from pyspark.sql import DataFrame, SparkSession

import sparklog
from sparklog.clock import SystemClock
from sparklog.formats.values.registered import RegisteredSchema
from sparklog.sources import dataframe
from sparklog.storage.objects import open_store
from sparklog.storage.schema_texts import SchemaTexts
from tests.support.registry import framed, record, text

pytestmark = [pytest.mark.spark, pytest.mark.delta]

SCHEMA = (
    "customer STRING, amount DECIMAL(10,2), at TIMESTAMP, timestamp BIGINT, day DATE,"
    " tags ARRAY<STRING>, prices MAP<STRING, DOUBLE>, s STRUCT<a: INT, b: STRUCT<c: BOOLEAN>>"
)
VALUES = (
    b'{"customer": "a", "amount": 1.005, "at": "2026-01-02T03:04:05.123456+01:00", "timestamp": 7}',
    b'{"day": "2026-01-02", "tags": ["x", null], "prices": {"p": 1.5}, "s": {"a": 1, "b": {}}}',
    b'{"amount": "n/a", "s": {"a": 1, "b": {"c": true}}}',
    b"no JSON",
    None,
)
TYPED = ["_error", "customer", "amount", "at", "value_timestamp", "day", "tags", "prices", "s"]


def send(log: sparklog.Log) -> None:
    """A record for each value."""
    with log.producer() as producer:
        for value in VALUES:
            producer.send("t", value)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log whose topic has each kind of column."""
    root = tmp_path_factory.mktemp("typed")
    with sparklog.connect(root) as log:
        log.create_topic("t", 1)
        log.create_topic("untyped", 1)
        log.create_topic("files", 1, {"value.format": "json", "value.schema": SCHEMA})
        for value in (*VALUES, b'{"customer": "%s", "amount": 7.25}' % (b"z" * 40)):
            with log.producer() as producer:
                producer.send("files", value)
            log.flush_to_table()
        send(log)
        log.flush_to_table()
        log.alter("t", {"value.format": "json", "value.schema": SCHEMA})
        log.compact("t")
        send(log)
        log.flush_to_table()
    return root


def source(spark: SparkSession, root: Path, **options: str) -> DataFrame:
    """The records, with the topic's own columns."""
    return (
        spark.read.format("sparklog")
        .options(root=str(root), valueFormat="typed", **{"subscribe": "t"} | options)
        .load()
    )


def in_order(frame: DataFrame) -> DataFrame:
    """The typed columns, comparable: Spark cannot sort maps."""
    return frame.select("offset", *TYPED).orderBy("offset")


def test_the_source_has_the_columns_of_the_table(spark: SparkSession, root: Path) -> None:
    """Computed from records that no table has yet, they would be the same."""
    found = source(spark, root)
    assert found.columns[-len(TYPED) :] == TYPED
    table = spark.read.format("delta").load(str(root / "topics" / "t"))
    assert_df_equality(in_order(found), in_order(table))
    assert found.where("_error IS NOT NULL").count() == 4
    assert table.where("customer = 'a' AND amount = 1.01").count() == 2


def test_a_frame_of_delta_has_the_columns(spark: SparkSession, tmp_path: Path) -> None:
    """Those of published records come from the table, and the others from the log."""
    with sparklog.connect(tmp_path) as log:
        log.create_topic("t", 1, {"value.format": "json", "value.schema": SCHEMA})
        send(log)
        log.flush_to_table()
        send(log)
        found = dataframe(spark, str(tmp_path), "t", valueFormat="typed")
        assert_df_equality(in_order(found), in_order(source(spark, tmp_path)))
    chosen = dataframe(spark, str(tmp_path), "t", valueFormat="typed", columns="offset, customer")
    assert sorted(map(tuple, chosen.where("customer IS NOT NULL").collect())) == [
        (0, "a"),
        (5, "a"),
    ]


@pytest.mark.parametrize(
    ("condition", "offsets", "files"),
    [
        (f"customer >= '{'z' * 40}'", [5], 1),
        ("amount = 7.25 OR at < '2026-01-02T02:04:05.123457Z'", [0, 5], 2),
        ("day <= '2026-01-02' AND s.a IS NOT NULL", [1], 1),
        ("s.b.c IS NULL AND day IS NOT NULL", [1], 1),
        ("_error > 'value: a'", [2, 3], 2),
    ],
)
def test_delta_skips_files(
    spark: SparkSession, root: Path, condition: str, offsets: list[int], files: int
) -> None:
    """By the statistics of typed columns, as by those of a table that Spark has written."""
    found = spark.read.format("delta").load(str(root / "topics" / "files")).where(condition)
    assert sorted(row.offset for row in found.select("offset").collect()) == offsets
    assert len(found.inputFiles()) == files


def test_columns_are_chosen(spark: SparkSession, root: Path) -> None:
    """Values need not be among them."""
    found = source(spark, root, columns="customer, offset")
    assert [tuple(row) for row in found.orderBy("offset").take(2)] == [("a", 0), (None, 1)]


def test_a_stream_has_the_columns(spark: SparkSession, root: Path, tmp_path: Path) -> None:
    """Those that the topic has when it is loaded."""
    stream = (
        spark.readStream.format("sparklog")
        .options(root=str(root), subscribe="t", valueFormat="typed", startingOffsets="earliest")
        .load()
    )
    query = (
        stream.select("offset", *TYPED)
        .writeStream.format("memory")
        .queryName("typed")
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert_df_equality(in_order(spark.table("typed")), in_order(source(spark, root)))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"subscribe": "untyped"}, "sparklog topics columns untyped --accept"),
        ({"subscribe": "t, untyped"}, "subscribe to one topic"),
        ({"columns": "nothing"}, "customer"),
        ({"badValues": "error"}, "_error"),
    ],
)
def test_refusals_say_what_to_do(
    spark: SparkSession, root: Path, options: dict[str, str], reason: str
) -> None:
    """Before anything is read."""
    with pytest.raises(Exception, match=reason):
        source(spark, root, **options)


def test_values_with_schemas_of_a_registry(spark: SparkSession, tmp_path: Path) -> None:
    """Executors read the schemas in the root; records whose schema is not known there wait."""
    schema = RegisteredSchema(schema=json.dumps(record("Order", "customer:string")))
    values = [framed(1, text("alice")), framed(2, b"x"), b"{}", None]
    with sparklog.connect(tmp_path) as log:
        log.create_topic("t", 1, {"value.format": "avro", "value.schema": "customer STRING"})
        with log.producer() as producer:
            for value in values:
                producer.send("t", value)
        SchemaTexts(open_store(str(tmp_path))).put(1, schema, clock=SystemClock())
        found = source(spark, tmp_path).orderBy("offset").select("customer", "_error").collect()
        assert [row.customer for row in found] == ["alice", None, None, None]
        assert [(row._error or "")[:14] for row in found] == [
            "",
            "value: waiting",
            "value: does no",
            "",
        ]
        assert log.read("t")["customer"].to_pylist() == ["alice", None, None, None]
