"""Typed columns are those that Spark's `StructType.fromDDL` and `from_json` have.

Differences from `from_json` in PERMISSIVE mode, which the tests check too:

| value | `from_json` | typed columns |
|---|---|---|
| a STRUCT with a field that does not fit | the others, the record is corrupt | null, an error |
| no text, or white space | null | bad as a whole |
| strings in single quotes | read | bad as a whole |
| text after the object | ignored | bad as a whole |
| nested deeper than 128 levels | up to 1,000 levels are read | bad as a whole |
| a repeated field | any value that does not fit makes the record corrupt | the last one counts |
| a DATE that is a number in quotes | days since 1970 | does not fit |
| a TINYINT from 128 to 255 | less 256 | does not fit |
| a fraction in a STRING | as Java writes it | as the record has it |
| a BINARY that is not base64 | all columns may be null | does not fit |
| half of a surrogate pair | `?` | does not fit |
| a time in a zone with a name | that instant | does not fit, but for UTC and GMT |
| a time before the year 1 or after 9999 | that instant | does not fit |
| an offset of more than 18 hours | does not fit | that instant |
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from sparklog.formats.values import ddl
from sparklog.formats.values.derive import Deriver
from sparklog.spark_compat import arrow_type
from tests.spark.test_values import KINDS, LITERALS

pytestmark = pytest.mark.spark

_KINDS = {name: kind for name, kind in KINDS.items() if kind != "TIMESTAMP_NTZ"}
_NESTED = tuple(name for name, kind in _KINDS.items() if "<" in kind)
_DIFFERENT = frozenset(
    (
        *(each for each in LITERALS["TIMESTAMP"] if "/New_York" in each),
        *('"YWI"', '"no base64!"', '"_-8="'),
    )
)
"""Literals that the table describes."""
_DDL = ", ".join(f"{name} {kind}" for name, kind in _KINDS.items())
_OTHER_TEXTS = (
    *("{}", "null", "5", "[]", '[{"f0":"x"}]', '{"f0":"x"', '{"f0":01}', "{f0:1}"),
    *('{"f0":"a\tb"}', '{"f0":"\\x"}', '{"zz":NaN,"f5":1}', '\ufeff{"f0":"x"}', '{"f0":nul}'),
)


def by_spark(spark: SparkSession, texts: Sequence[str], columns: str) -> list[tuple[Any, ...]]:
    """The columns of each text by `from_json`, and whether it is corrupt."""
    rows = spark.createDataFrame(list(enumerate(texts)), "id INT, text STRING")
    value = f.from_json("text", f"{columns}, _corrupt_record STRING")
    found = rows.select("id", value.alias("v")).select("id", "v.*").orderBy("id").toArrow()
    corrupt = found.column("_corrupt_record").is_valid()
    cells = found.drop_columns(["id", "_corrupt_record"]).columns
    return list(zip(*(column.to_pylist() for column in (*cells, corrupt)), strict=True))


def by_us(texts: Sequence[str], columns: str) -> list[tuple[Any, ...]]:
    """The columns of each text, and its error."""
    values = pa.array([text.encode() for text in texts], pa.binary())
    found = Deriver(ddl.parse(columns)).derive(values)
    return list(zip(*(each.to_pylist() for each in (*found.columns, found.error)), strict=True))


class _Literals:
    """Literals that have no known difference."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)

    def record(self) -> str:
        dice = self._dice
        if dice.random() < 0.05:
            return dice.choice(_OTHER_TEXTS)
        names = dice.sample(list(_KINDS), dice.choice([1, 2, 3, 8]))
        fields = ", ".join(f'"{name}": {self._literal(name)}' for name in names)
        return f"{{{fields}}}"

    def _literal(self, name: str) -> str:
        dice, kind = self._dice, _KINDS[name]
        own = [each for each in LITERALS[kind] if each not in _DIFFERENT]
        makers = [lambda: dice.choice(own)] * 4
        if kind != "BINARY":
            makers.append(self._time)
            if not any(each in kind for each in ("STRING", "TINYINT", "DATE", "TIMESTAMP")):
                makers += [self._number, self._any]
        return dice.choice(makers)()

    def _any(self) -> str:
        literals = LITERALS[self._dice.choice(list(_KINDS.values()))]
        return self._dice.choice([each for each in literals if each not in _DIFFERENT])

    def _number(self) -> str:
        dice = self._dice
        whole = str(dice.randint(0, 10 ** dice.randint(1, 40)))
        part = dice.choice(["", "", f".{dice.randint(0, 10 ** dice.randint(1, 20))}"])
        power = dice.choice(["", "", "", f"e{dice.randint(-50, 50)}", f"E+{dice.randint(0, 9)}"])
        return f"{dice.choice(['', '-'])}{whole}{part}{power}"

    def _time(self) -> str:
        dice = self._dice
        day = f"{dice.randint(2, 9998):04}-{dice.randint(0, 13):02}-{dice.randint(0, 31):02}"
        clock = f"{dice.randint(0, 24):02}:{dice.randint(0, 60):02}:{dice.randint(0, 60):02}"
        part = dice.choice(["", "", ".", f".{dice.randint(0, 999_999_999)}"])
        zone = dice.choice(["", "Z", "+05:30", "-0800", " UTC", "+18:00", "+1:00", "-12", "+01:60"])
        return f'"{day}{dice.choice("T  t")}{clock}{part}{zone}"'


def test_columns_are_as_from_json_has_them(spark: SparkSession) -> None:
    """A field that fits has the same value, and a corrupt record has an error."""
    literals = _Literals(2013)
    texts = [literals.record() for _ in range(3_000)]
    for name, kind in _KINDS.items():
        texts += [f'{{"{name}":{each}}}' for each in LITERALS[kind] if each not in _DIFFERENT]
    rows = zip(texts, by_us(texts, _DDL), by_spark(spark, texts, _DDL), strict=True)
    for text, (*ours, error), (*theirs, is_corrupt) in rows:
        bad = "" if error is None else f"; {error}"
        for name, our, their in zip(_KINDS, ours, theirs, strict=True):
            is_partial = name in _NESTED and (f"; {name}" in bad or bad.endswith("…"))
            if not (is_partial and our is None):
                assert repr(our) == repr(their), (text, name)
        assert (error is not None) is is_corrupt, text


@pytest.mark.parametrize(
    ("kind", "text", "theirs", "is_corrupt", "ours", "error"),
    [
        ("STRUCT<b: INT, c: INT>", '{"a":{"b":"x","c":1}}', "{null, 1}", True, None,
         'a.b: "x" is not a valid INT'),
        ("INT", " ", None, False, None, "not a single JSON value"),
        ("INT", "{'a':1}", "1", False, None, "not a single JSON value"),
        ("INT", '{"a":1} {"a":2}', "1", False, None, "not a single JSON value"),
        ("INT", '{"a":1}}', "1", False, None, "not a single JSON value"),
        ("INT", f'{{"a":1,"b":{"[" * 200}{"]" * 200}}}', "1", False, None,
         "nested deeper than 128 levels"),
        ("INT", '{"a":"x","a":1}', "1", True, 1, None),
        ("INT", '{"a":1,"a":"x"}', "1", True, None, 'a: "x" is not a valid INT'),
        ("DATE", '{"a":"366"}', "1971-01-02", False, None, 'a: "366" is not a valid DATE'),
        ("TINYINT", '{"a":178}', "-78", False, None, "a: 178 is not a valid TINYINT"),
        ("INT, b BINARY", '{"a":1,"b":"+Infinity"}', None, True, 1,
         'b: "+Infinity" is not valid base64'),
        ("STRING", '{"a":"\\ud800"}', "?", False, None,
         'a: "\\ud800" is not valid Unicode text'),
        ("STRING", '{"a":[1.50,1e5]}', "[1.5,100000.0]", False, "[1.50,1e5]", None),
        ("TIMESTAMP", '{"a":"2013-07-01T05:15:00 America/New_York"}', "2013-07-01 09:15:00",
         False, None, 'a: "2013-07-01T05:15:00 America/New_York" is not a valid TIMESTAMP'),
        ("TIMESTAMP", '{"a":1700000000000}', "+55840-11-08 22:13:20", False, None,
         "a: 1700000000000 is not a valid TIMESTAMP"),
        ("TIMESTAMP", '{"a":"2013-01-01T00:00:00+18:01"}', None, True, "2012-12-31 05:59:00", None),
    ],
)  # fmt: skip
def test_known_differences(
    spark: SparkSession,
    kind: str,
    text: str,
    theirs: str | None,
    is_corrupt: bool,
    ours: Any,
    error: str | None,
) -> None:
    """The differences of the table exist."""
    rows = spark.createDataFrame([(text,)], "text STRING")
    value = f.from_json("text", f"a {kind}, _corrupt_record STRING")
    parts = "CAST(v.a AS STRING) AS a", "v._corrupt_record IS NOT NULL AS is_corrupt"
    whole = "CAST(v AS STRING)"  # so that Spark parses all columns
    (found,) = rows.select(value.alias("v")).selectExpr(*parts, whole).collect()
    assert (found.a, found.is_corrupt) == (theirs, is_corrupt)
    ((our, *_, our_error),) = by_us([text], f"a {kind}")
    assert (our if our is None or our == ours else str(our)[:19], our_error) == (ours, error)


def test_ddl_has_the_types_of_spark(spark: SparkSession) -> None:
    """Names, synonyms, and nested types as Spark parses them."""
    dice = random.Random(7)
    scalars = (
        *("BOOLEAN", "TINYINT", "byte", "SMALLINT", "Short", "INT", "INTEGER", "BIGINT", "LONG"),
        *("FLOAT", "real", "DOUBLE", "DECIMAL", "DEC(7)", "NUMERIC(38, 38)", "decimal(10,2)"),
        *("STRING", "BINARY", "DATE", "TIMESTAMP", "TIMESTAMP_LTZ"),
    )

    def name(number: int) -> str:
        return dice.choice(["a{}", "_b{}", "`c-{}`", "`d``{}`", "Date{}", "`é.{}`"]).format(number)

    def fields(depth: int, sign: str) -> str:
        count = dice.randint(1, 4)
        return dice.choice([", ", ",", " ,\n"]).join(
            f"{name(number)}{sign}{kind(depth)}" for number in range(count)
        )

    def kind(depth: int) -> str:
        way = dice.randrange(3 + depth)
        if depth == 4 or way > 2:
            return dice.choice(scalars)
        inner = fields(depth + 1, dice.choice([": ", " ", ":"])) if way == 0 else kind(depth + 1)
        return (f"STRUCT<{inner}>", f"array<{inner}>", f"Map< STRING , {inner} >")[way]

    for _ in range(150):
        text = fields(0, dice.choice([" ", "  ", ": "]))
        parsed = pa.struct(ddl.parse(text))
        wanted = StructType.fromDDL(text)
        assert parsed == arrow_type(wanted)
        assert str(parsed) == str(arrow_type(wanted))  # with the names of elements
        assert StructType.fromDDL(ddl.of_fields(list(parsed))) == wanted
