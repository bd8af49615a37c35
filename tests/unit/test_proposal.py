"""Proposals of typed columns for fields of JSON objects."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sparklog.formats.values.columns import Column
from sparklog.formats.values.proposal import propose


def column(name: str, kind: str, *filled: int) -> Column:
    """A column of the field with the same name."""
    return Column(name=name, field=name, type=kind, filled=filled)


@pytest.mark.parametrize(
    ("known", "schema", "left_out"),
    [
        ([], "a BIGINT, b STRING", 0),
        ([column("a", "DOUBLE", 1)], "a DOUBLE, b STRING", 0),
        ([column("a", "STRING", 1, 2)], "a STRING, b STRING", 0),
        ([column("a", "STRING", 1, 2), column("b", "BINARY", 1)], "b BINARY", 1),
    ],
)
def test_columns_keep_their_types(known: Sequence[Column], schema: str, left_out: int) -> None:
    """A dropped column comes back only if its topic has no columns at all, with its only type."""
    found = propose([b'{"a": 1, "b": "x"}'], known)
    assert found.schema == schema
    assert [*map(str, found.left_out)] == [
        "a: its column was dropped; to fill it again, add it to value.schema"
    ][:left_out]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (r"\ud800", "Delta does not accept the name"),
        (r"a\nb", "Delta does not accept the name"),
        (r"\u001b[31m", "its name has characters that cannot be printed"),
    ],
)
def test_names_of_refused_fields_can_be_printed(name: str, reason: str) -> None:
    """Names are chosen by the senders of records, and none reaches a terminal as it is."""
    found = propose([b'{"%s": 1, "a": 1}' % name.encode()])
    assert found.schema == "a BIGINT"
    assert found.left_out == [f'"{name}": {reason}']


def test_columns_of_a_table_are_bounded_together() -> None:
    """Those that it has count too: a configuration with more would be refused."""
    known = [column(f"c{number}", "STRING", 1) for number in range(499)]
    found = propose([b'{"a": 1, "b": 1}'], known)
    assert [each.field.name for each in found.columns] == ["a"]
    assert found.left_out == ["b: a table has at most 500 columns and nested fields"]
