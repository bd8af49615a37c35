"""The history of a table's typed columns, and what a new file must have."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.formats.values import columns, ddl
from sparklog.formats.values.columns import ChangedType, ColumnSet

FIELDS = ("a STRING", "b BIGINT", "c DOUBLE", "d ARRAY<STRING>")
wishes = st.lists(st.sets(st.sampled_from(FIELDS)).map(sorted), min_size=1, max_size=8)


def changed(known: ColumnSet | None, *fields: str) -> ColumnSet | None:
    """The set after a change to these fields, as DDL."""
    return columns.with_fields(known, ddl.parse(", ".join(fields)) if fields else [])


def grown(*wanted: list[str]) -> ColumnSet | None:
    """The set after several changes, from none on."""
    known: ColumnSet | None = None
    for fields in wanted:
        known = changed(known, *fields)
    return known


def names(found: columns.Plan | None) -> set[str]:
    """The names of the columns to fill."""
    return {each.name for each in found.columns} if found is not None else set()


@given(wishes)
def test_columns_are_only_added(history: list[list[str]]) -> None:
    """A name keeps its type, the order stays, and exactly the wanted fields are filled."""
    known: ColumnSet | None = None
    for wanted in history:
        before: list[pa.Field] = known.fields if known is not None else []
        known = changed(known, *wanted)
        if known is None:
            assert not wanted
            continue
        assert known.fields[: len(before)] == before
        assert {each.name for each in known.filled} == {each.split()[0] for each in wanted}
        assert names(known.plan()) == {each.split()[0] for each in wanted}
        assert changed(known, *wanted) is known
        assert columns.decode(known.encode()) == known


@given(wishes, st.data())
def test_a_rewrite_removes_no_values(history: list[list[str]], data: st.DataObject) -> None:
    """Rows keep each column that any of their files had, through any number of merges."""
    tags: dict[str | None, set[str]] = {None: set()}
    known: ColumnSet | None = None
    for wanted in history:
        known = changed(known, *wanted)
        if known is None:
            continue
        plan = known.plan()
        if plan is not None:
            tags[plan.tag] = names(plan)
        assert known.is_known(None if plan is None else plan.tag)
        inputs = data.draw(st.lists(st.sampled_from(list(tags)), min_size=1, max_size=3))
        merged = known.plan(inputs)
        had = set().union(*(tags[each] for each in inputs))
        assert names(merged) >= had | {each.name for each in known.filled}
        if merged is not None:
            assert known.is_known(merged.tag)
            assert known.is_full(merged.tag)
            assert names(known.plan([merged.tag])) >= names(merged)
            tags[merged.tag] = names(merged)


def test_a_tag_names_no_more_sets_than_needed() -> None:
    """Tags of files that are merged again and again do not grow with the history."""
    known = grown(["a STRING"], ["a STRING", "b BIGINT"], ["b BIGINT", "c DOUBLE"])
    assert known is not None
    tags = [known._tag(generation) for generation, _ in known.history]
    merged = known.plan(tags)
    assert merged is not None
    assert names(merged) == {"a", "b", "c"}
    assert merged.tag == f"{tags[2]},{tags[1]}"


def test_a_tag_of_another_history_is_unknown() -> None:
    """After a RESTORE, the same generation may have other columns."""
    one, other = grown(["a STRING"]), grown(["b BIGINT"])
    assert one is not None
    assert other is not None
    tag = other.plan().tag  # type: ignore[union-attr]
    assert other.is_known(tag)
    assert not one.is_known(tag)
    assert not one.is_known("nonsense")
    assert not one.is_full(tag)
    assert names(one.plan([tag])) == {"a"}


def test_files_of_other_engines_may_have_every_column() -> None:
    """OPTIMIZE drops the tags of the files that it merges."""
    known = grown(["a STRING"], ["b BIGINT"], [])
    assert known is not None
    assert known.plan() is None
    assert names(known.plan_for_foreign()) == {"a", "b"}


def test_types_do_not_change() -> None:
    """Not even of a column that is no longer filled."""
    with pytest.raises(ChangedType) as refused:
        changed(grown(["a STRING"], []), "a BIGINT")
    assert (refused.value.column.type, refused.value.wanted) == ("STRING", "BIGINT")


@pytest.mark.parametrize(
    ("field", "taken", "name"),
    [
        ("amount", set(), "amount"),
        ("timestamp", set(), "value_timestamp"),
        ("Offset", set(), "value_Offset"),
        ("_error", set(), "value__error"),
        ("id", {"id"}, "id_2"),
        ("ID", {"id", "id_2"}, "ID_3"),
        ("key", {"value_key"}, "value_key_2"),
    ],
)
def test_names_fit_delta(field: str, taken: set[str], name: str) -> None:
    """Its names are case-insensitive."""
    assert columns.column_name(field, taken) == name


def test_the_error_comes_first() -> None:
    """Columns that are added later then follow all others."""
    known = grown(["a STRING", "s STRUCT<x: INT>"])
    assert known is not None
    assert known.fields == [
        pa.field("_error", pa.string()),
        pa.field("a", pa.string()),
        pa.field("s", pa.struct([("x", pa.int32())])),
    ]


def test_files_say_how_their_values_were_decoded() -> None:
    """A rewrite decodes values in each of the ways in which its files were written, and a set of
    Avro has a plan before its first column, so that schemas are found.
    """
    as_json = changed(None, "a STRING")
    assert as_json is not None
    assert as_json.formats == ()
    as_avro = columns.with_fields(as_json, [], columns.AVRO)
    assert as_avro is not None
    assert (as_avro.format, as_avro.all_formats) == ("avro", ("json", "avro"))
    first, second = as_json.plan(), as_avro.plan()
    assert first is not None
    assert second is not None
    assert (first.formats, second.formats, names(second)) == (("json",), ("avro",), set())
    merged = as_avro.plan([first.tag, second.tag])
    assert merged is not None
    assert (set(merged.formats), names(merged)) == ({"json", "avro"}, {"a"})
    again = as_avro.plan([merged.tag])
    assert again is not None
    assert set(again.formats) == {"json", "avro"}
    assert columns.decode(as_avro.encode()) == as_avro
    back = columns.with_fields(as_avro, [])
    assert back is not None
    assert back.plan() is None


@given(rows=st.dictionaries(st.integers(0, 2**32), st.integers(1, 10**9), max_size=50))
def test_a_tag_names_the_rows_that_wait(rows: dict[int, int]) -> None:
    """By schema, and those of further schemas together; the sets of columns stay readable."""
    known = changed(None, "a STRING")
    assert known is not None
    plan = known.plan()
    assert plan is not None
    tag = columns.with_waiting(plan.tag, rows)
    found = columns.waiting_of(tag)
    assert found.rows == sum(rows.values())
    assert found.by_schema == dict(sorted(rows.items())[: columns.WAITS_NAMED])
    assert known.is_known(tag)
    assert known.is_full(tag)
    assert columns.waiting_of(plan.tag).rows == columns.waiting_of(None).rows == 0
