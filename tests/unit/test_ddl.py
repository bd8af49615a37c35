"""`sparklog.formats.values.ddl`: columns as DDL, and their Arrow types."""

from __future__ import annotations

import contextlib

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog.formats.values import ddl
from sparklog.formats.values.ddl import InvalidDdl

MICROS = pa.timestamp("us", "UTC")

_scalars = st.sampled_from(
    [
        *(pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()),
        *(pa.string(), pa.binary(), pa.date32(), MICROS),
    ]
) | st.integers(1, 38).flatmap(
    lambda digits: st.builds(pa.decimal128, st.just(digits), st.integers(0, digits))
)
_names = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters=" ,;{}()\n\t="),
    min_size=1,
    max_size=5,
)


def _fields(kinds: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[list[pa.Field]]:
    return st.lists(
        st.builds(pa.field, _names, kinds),
        min_size=1,
        max_size=3,
        unique_by=lambda field: field.name.lower(),
    )


_types = st.recursive(
    _scalars,
    lambda inner: (
        inner.map(ddl.list_of)
        | inner.map(lambda kind: pa.map_(pa.string(), kind))
        | _fields(inner).map(pa.struct)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (
            "customer STRING, amount DOUBLE",
            [("customer", pa.string()), ("amount", pa.float64())],
        ),
        ("a: int", [("a", pa.int32())]),
        ("\n a\tByte,b sHort ", [("a", pa.int8()), ("b", pa.int16())]),
        ("a integer, b long, c real", [("a", pa.int32()), ("b", pa.int64()), ("c", pa.float32())]),
        ("a DEC, b NUMERIC(3)", [("a", pa.decimal128(10, 0)), ("b", pa.decimal128(3, 0))]),
        ("a DECIMAL( 38 , 38 )", [("a", pa.decimal128(38, 38))]),
        (
            "a TIMESTAMP, b timestamp_ltz, c DATE",
            [("a", MICROS), ("b", MICROS), ("c", pa.date32())],
        ),
        ("date DATE, array ARRAY<INT>", [("date", pa.date32()), ("array", pa.list_(pa.int32()))]),
        (
            "m MAP<STRING,ARRAY<ARRAY<BINARY>>>",
            [("m", pa.map_(pa.string(), pa.list_(pa.list_(pa.binary()))))],
        ),
        (
            "s STRUCT<a INT, `b-``c`: STRUCT<a: BOOLEAN>>",
            [("s", pa.struct([("a", pa.int32()), ("b-`c", pa.struct([("a", pa.bool_())]))]))],
        ),
        ("`odd-name` TINYINT, _a9 SMALLINT", [("odd-name", pa.int8()), ("_a9", pa.int16())]),
        ("`ÄÖ.€` STRING", [("ÄÖ.€", pa.string())]),
    ],
)
def test_columns(text: str, fields: list[tuple[str, pa.DataType]]) -> None:
    """Keywords in any case, Spark's synonyms, and names in backquotes."""
    assert ddl.parse(text) == [pa.field(*each) for each in fields]


@given(_fields(_types))
@settings(max_examples=100)
def test_ddl_of_columns_is_parsed_as_the_same_columns(fields: list[pa.Field]) -> None:
    """Any names and types survive, and equal columns have equal DDL."""
    text = ddl.of_fields(fields)
    assert ddl.parse(text) == fields
    assert ddl.of_fields(ddl.parse(f" {text} ")) == text


def test_elements_are_named_as_in_delta() -> None:
    """Equality of Arrow types ignores these names, but files and Spark do not."""
    (column,) = ddl.parse("a MAP<STRING, ARRAY<STRUCT<b: INT>>>")
    assert str(column.type) == "map<string, list<element: struct<b: int32>>>"
    assert not column.type.key_field.nullable
    assert column.type.item_field.nullable


def test_columns_in_one_style() -> None:
    """The text is what a person would write."""
    text = "a INT, `b c-d` STRING, s STRUCT<a: DECIMAL(10,2), t: TIMESTAMP>, m MAP<STRING, DATE>"
    text = text.replace(" c-d", "c-d")
    assert ddl.of_fields(ddl.parse(text.lower().replace(", ", ","))) == text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "the name of a column or field is missing (character 1)"),
        ("a", "a: a type is missing. Allowed are BOOLEAN, TINYINT, "),
        ("a INT,", "the name of a column or field is missing (character 7)"),
        ("a INT b", "a: B is unexpected (character 7)"),
        ("a INT, 5", "the name of a column or field is missing (character 8)"),
        ("a INT 5", "a comma or the end must follow a column (character 7)"),
        ("a INT)", "a comma or the end must follow a column (character 6)"),
        ("2a INT", "the name of a column or field is missing (character 1)"),
        ("a-b INT", "'-' is unexpected; write unusual names in backquotes (character 2)"),
        ("é INT", "'é' is unexpected; write unusual names in backquotes (character 1)"),
        ("`a INT", "the backquote is not closed (character 1)"),
        ("`` INT", "Delta does not accept the name ''"),
        ("`a b` INT", "Delta does not accept the name 'a b' (character 1)"),
        ("a INT, s STRUCT<`x=`: INT>", "s: Delta does not accept the name 'x=' (character 17)"),
        ("`\ud800` INT", "Delta does not accept the name '\\ud800'"),
        ("a `INT`", "a: a type is missing"),
        ("a INT NOT NULL", "a: NOT NULL is not possible, because a record may lack any field"),
        ("s STRUCT<a: INT NOT NULL>", "s.a: NOT NULL is not possible"),
        ("a INT COMMENT 'x'", "a: comments are not kept (character 7)"),
        ("a 'INT'", '"\'" is unexpected'),
        ("a INT DEFAULT 5", "a: an absent field is null"),
        ("a STRING COLLATE UTF8_LCASE", "a: collations need a table feature"),
        ("a VARIANT", "a: VARIANT is not supported: few readers of Delta know it; use STRING"),
        ("a INTERVAL DAY TO SECOND", "a: INTERVAL is not supported: allowed are BOOLEAN"),
        ("a VARCHAR(5)", "a: VARCHAR is not supported: its length is not checked here; use STRING"),
        ("a char(5)", "a: CHAR is not supported"),
        ("a TIMESTAMP_NTZ", "a: TIMESTAMP_NTZ is not supported: it needs a table feature"),
        ("a VOID", "a: VOID is not supported"),
        ("a DECIMAL(39)", "a: DECIMAL has 1 to 38 digits"),
        ("a DECIMAL(0,0)", "a: DECIMAL has 1 to 38 digits"),
        ("a DECIMAL(5,6)", "a: DECIMAL has 1 to 38 digits, and no more of them in the fraction"),
        ("a DECIMAL(5,-1)", "'-' is unexpected"),
        ("a DECIMAL()", "a: a number of digits is missing"),
        ("a DECIMAL(99999999999)", "a: a number of digits is missing"),
        ("a DECIMAL(5", "')' is missing after the digits of DECIMAL"),
        ("a ARRAY", "'<' is missing after ARRAY (character 8)"),
        ("a ARRAY<INT", "'>' is missing after the types of ARRAY (character 12)"),
        ("a ARRAY<>", "a[]: a type is missing"),
        ("a ARRAY<VARIANT>", "a[]: VARIANT is not supported"),
        ("a MAP<INT, INT>", "a: the keys of a MAP are STRING, as in JSON"),
        ("a MAP<STRING>", "',' is missing after the key type of MAP"),
        ("a MAP<STRING, CHAR>", "a{}: CHAR is not supported"),
        ("a STRUCT<>", "a: the name of a column or field is missing"),
        ("a INT, A STRING", "A: the name is used twice; its case does not matter"),
        ("s STRUCT<Ab: INT, aB: INT>", "s.aB: the name is used twice"),
        (f"a {'ARRAY<' * 16}INT{'>' * 16}", "types are nested deeper than 16 levels"),
        (f"a {'STRUCT<a: ' * 5_000}", "types are nested deeper than 16 levels"),
        (
            ", ".join(f"c{number} INT" for number in range(501)),
            "c500: there are more than 500 columns and nested fields",
        ),
        (
            f"s ARRAY<STRUCT<{', '.join(f'c{number} INT' for number in range(501))}>>",
            "s[].c500: there are more than 500 columns and nested fields",
        ),
    ],
)
def test_refusals(text: str, told: str) -> None:
    """An error names the column, the place and the reason."""
    with pytest.raises(InvalidDdl) as raised:
        ddl.parse(text)
    assert told in str(raised.value)


def test_the_bounds_themselves_are_allowed() -> None:
    """500 leaves, and 16 levels."""
    assert len(ddl.parse(", ".join(f"c{number} INT" for number in range(500)))) == 500
    (column,) = ddl.parse(f"a {'ARRAY<' * 15}INT{'>' * 15}")
    assert str(column.type).count("list") == 15


@pytest.mark.parametrize("kind", [pa.uint8(), pa.timestamp("us"), pa.time64("us"), pa.null()])
def test_other_types_have_no_ddl(kind: pa.DataType) -> None:
    """A typed column cannot have them."""
    with pytest.raises(InvalidDdl, match="is not a type of a typed column"):
        ddl.of_fields([pa.field("a", kind)])


@given(
    st.text(max_size=30)
    | st.lists(
        st.sampled_from(
            [
                "a",
                "INT",
                "ARRAY",
                "MAP",
                "STRUCT",
                "DECIMAL",
                "STRING",
                "<",
                ">",
                "(",
                ")",
                ",",
                ":",
                "5",
                "`",
                " ",
                "NOT",
                "é",
            ]
        ),
        max_size=14,
    ).map(" ".join)
)
def test_any_text_is_parsed_or_refused(text: str) -> None:
    """No other error, and only columns that have DDL."""
    with contextlib.suppress(InvalidDdl):
        fields = ddl.parse(text)
        assert ddl.parse(ddl.of_fields(fields)) == fields
