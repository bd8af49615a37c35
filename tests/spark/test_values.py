"""Values that are parsed here are what Spark's own `from_json` and CAST make of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pyarrow as pa
import pytest
from chispa import assert_df_equality
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from sparklog.sources.values import BadValues, ValueFormat, ValueParser, json_type

pytestmark = pytest.mark.spark

LITERALS = {
    "STRING": ['"x"', '"é\\n"', "1", "-5", "true", "null", '{"k": [1, "x", null]}', "[]", '""'],
    "BOOLEAN": ["true", "false", "1", '"true"', "null", "[]"],
    "TINYINT": ["127", "-128", "-129", "1.0", "null"],
    "SMALLINT": ["32767", "32768", '"1"'],
    "INT": ["1", "-0", "1.0", "1e2", '"1"', "true", "2147483647", "2147483648", "NaN", "{}"],
    "BIGINT": ["9223372036854775807", "-9223372036854775808", "9223372036854775808"],
    "FLOAT": ["0.1", "16777217", "1e39", '"NaN"', "-1e-60", "true"],
    "DOUBLE": [
        *("-0", "-0.0"),
        *("1", "0.1", "1e400", "-1e400", "1e-400", "NaN", "Infinity", "-Infinity", '"NaN"'),
        *(
            '"-INF"',
            '"+Infinity"',
            '"inf"',
            '"1.5"',
            '""',
            "true",
            "123456789012345678901234567890",
        ),
    ],
    "DECIMAL(10,2)": [
        *("1", "1.5", '"1.5"', "1.555", "1.545", "-1.555", "1e2", "1e-1", "123456789", "-0.00"),
        *("99999999.99", "99999999.995", '"x"', '" 1.5"', '"1,000.5"', '"+1.5"', '""', "true"),
        *("2147483648", "1e400", "NaN"),
    ],
    "DECIMAL(38,0)": ["1e37", "1e38", "9" * 38, "9" * 39],
    "BINARY": [
        '"YWJj"',
        '"YWI="',
        '"YQ=="',
        '"YR=="',
        '""',
        '"YWI"',
        '"no base64!"',
        '"_-8="',
        "5",
    ],
    "DATE": [
        *('"2013-01-01"', '"2013-1-1"', '"2013-02"', '"2013"', '" 2013-01-01 "', '"2013-02-29"'),
        *('"2013-01-01T23:59:59-12:00"', '"2013-01-01 x"', '"01/02/2013"', '""', "15000"),
        *('"0001-01-01"', '"9999-12-31"', '"1582-10-10"'),
    ],
    "TIMESTAMP": [
        *('"2013-01-01T05:15:00Z"', '"2013-01-01T05:15:00"', '"2013-01-01 05:15:00"', "5", "-3"),
        *('"2013-01-01"', '"2013-01-01T05:15"', '"2013-01-01T05"', '"2013-1-1 5:1:2"', '"2013"'),
        *(
            '"2013-01-01T05:15:00.5+02:00"',
            '"2013-01-01T05:15:00-0530"',
            '"2013-01-01T05:15:00+02"',
        ),
        *('"2013-01-01T05:15:00.123456789Z"', '"1969-12-31T23:59:59.9999999"', '"2013-02-30"'),
        *('"2013-07-01T05:15:00 America/New_York"', '"2013-01-01T05:15:00 UTC"', '"n/a"', '""'),
        *('"2013-11-03 01:30:00 America/New_York"', '"2013-03-10 02:30:00 America/New_York"'),
        *('"0001-01-01T00:00:00"', '"9999-12-31T23:59:59.999999"', '"2013-01-01T24:00:00"', "1.5"),
        *('"1582-10-10T00:00:00"', '"2013-01-01T05:15:60"', '"2013-01-01T05:15:00."', "true"),
    ],
    "TIMESTAMP_NTZ": [
        *('"2013-01-01T05:15:00Z"', '"2013-01-01T05:15:00"', '"2013-01-01 05:15:00.1234567"', "5"),
        *('"2013-01-01T05:15:00+01:00"', '"2013-01-01"', '"n/a"', '"0001-01-01"'),
    ],
    "ARRAY<INT>": ["[1, null, 2]", "[]", '[1, "x"]', "1", "{}", "null"],
    "ARRAY<ARRAY<DATE>>": ['[["2013-01-01"], null, [null]]', '[["x"]]'],
    "STRUCT<b: INT, c: STRUCT<d: TIMESTAMP>>": [
        *('{"b":1}', '{"c":{"d":"2013-01-01"}}', '{"c":null}', "{}", "null", "[]", '{"b":"x"}'),
    ],
    "MAP<STRING, INT>": ['{"k": 1, "l": null}', "{}", '{"k": "x"}', "[1]", "null"],
    "MAP<STRING, ARRAY<STRUCT<b: DATE>>>": ['{"k": [{"b": "2013-01-01"}, null]}'],
}
TEXTS = [
    *('{"a":null}', "{}", '{"b":1}', "null", "5", '"x"', '{"a":', '{"a":1,}', '{"a":01}', "[]"),
    *(
        ' \n{ "b" : [ {} ] }\r\n',
        '{"b":"\t"}',
        '{"b":"\\x"}',
        '{"b":NaN}',
        '{"b":"\\ud83d\\ude00"}',
    ),
]


KINDS = {f"f{number}": kind for number, kind in enumerate(LITERALS)}
DDL = ", ".join(f"{name} {kind}" for name, kind in KINDS.items())


def by_spark(spark: SparkSession, texts: Sequence[str | None], ddl: str) -> DataFrame:
    """Returns the result of `from_json`, null for corrupt texts."""
    rows = spark.createDataFrame(list(enumerate(texts)), "id INT, text STRING")
    read = rows.withColumn("v", f.from_json("text", f"{ddl}, _corrupt_record STRING"))
    good = f.when(f.col("v._corrupt_record").isNull(), f.col("v"))
    return read.select("id", good.dropFields("_corrupt_record").alias("v"))


def by_us(spark: SparkSession, texts: Sequence[str | None], ddl: str) -> DataFrame:
    """Returns the result of sparklog's parser."""
    schema = spark.createDataFrame([], f"id INT, v STRUCT<{ddl}>").schema
    kind = schema["v"].dataType
    assert isinstance(kind, StructType)
    parser = ValueParser(format=ValueFormat.JSON, kind=json_type(kind), bad=BadValues.NULL)
    values = pa.array([None if text is None else text.encode() for text in texts], pa.binary())
    found, _ = parser.parse(values, lambda row: ("t", 0, row))
    ids = pa.array(range(len(texts)), pa.int32())
    return spark.createDataFrame(pa.table({"id": ids, "v": found}), schema)


def check(ours: DataFrame, theirs: DataFrame) -> None:
    """Compares rows as texts, so that NaN equals NaN, with times to the microsecond."""
    assert ours.schema["v"].simpleString() == theirs.schema["v"].simpleString()
    assert_df_equality(
        ours.selectExpr("id", "CAST(v AS STRING) AS v"),
        theirs.selectExpr("id", "CAST(v AS STRING) AS v"),
        ignore_row_order=True,
        ignore_nullable=True,
    )


def test_fields_are_as_from_json_has_them(spark: SparkSession) -> None:
    """Fitting and unfitting values of every type give the same result."""
    texts = [
        f'{{"{name}":{literal}}}' for name, kind in KINDS.items() for literal in LITERALS[kind]
    ]
    check(by_us(spark, texts + TEXTS, DDL), by_spark(spark, texts + TEXTS, DDL))


def test_rows_are_as_from_json_has_them(spark: SparkSession) -> None:
    """Fields of all types in one row, good and bad, and with maps among them or without."""
    dice = random.Random(2013)

    def row(names: list[str]) -> str | None:
        chosen = dice.sample(names, dice.choice([0, 1, 2, 3, 10]))
        fields = ", ".join(f'"{name}": {dice.choice(LITERALS[KINDS[name]])}' for name in chosen)
        return dice.choice([f"{{{fields}}}"] * 20 + [*TEXTS, None])

    for names in (list(KINDS), [name for name in KINDS if "MAP" not in KINDS[name]]):
        ddl = ", ".join(f"{name} {KINDS[name]}" for name in names)
        texts = [row(names) for _ in range(2_000)]
        check(by_us(spark, texts, ddl), by_spark(spark, texts, ddl))


def test_what_spark_writes_is_read(spark: SparkSession) -> None:
    """Rows that `to_json` wrote come back as they were (it writes milliseconds)."""
    rows = spark.range(500).selectExpr(
        "CAST(id AS INT) AS id",
        "named_struct('i', id, 's', repeat('é', CAST(id % 3 AS INT)), 'd', id / 7,"
        " 't', timestamp_millis(id * 1234567891), 'n', CAST(id / 3 AS DECIMAL(12, 4)),"
        " 'b', CAST(CAST(id AS STRING) AS BINARY), 'l', sequence(0, id % 4), 'm', map('k', id),"
        " 'e', date_add(date'2013-01-01', CAST(id AS INT))) AS v",
    )
    kind = rows.schema["v"].dataType
    assert isinstance(kind, StructType)
    ddl = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in kind)
    texts = [row.text for row in rows.orderBy("id").selectExpr("to_json(v) AS text").collect()]
    check(by_us(spark, texts, ddl), rows)


def test_strings_are_as_a_cast_has_them(spark: SparkSession) -> None:
    """Values in UTF-8 equal CAST(value AS STRING)."""
    texts = ["", "x", "é", "\x00", "😀", None, "x" * 10_000]
    values = pa.array([None if text is None else text.encode() for text in texts], pa.binary())
    ids = pa.array(range(len(texts)), pa.int32())
    parser = ValueParser(format=ValueFormat.STRING, kind=pa.string())
    found, _ = parser.parse(values, lambda row: ("t", 0, row))
    cast = spark.createDataFrame(pa.table({"id": ids, "v": values}))
    assert_df_equality(
        spark.createDataFrame(pa.table({"id": ids, "v": found})),
        cast.withColumn("v", f.col("v").cast("string")),
        ignore_row_order=True,
    )
