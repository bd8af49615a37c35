"""`sparklog.formats.values.avro`: typed columns of Avro, with fastavro as the oracle."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from hypothesis import given, settings

from sparklog.formats.values import ddl
from sparklog.formats.values.avro.derive import AvroDerived, AvroDeriver
from sparklog.formats.values.avro.schema import AvroSchema, fields_of, parse
from sparklog.formats.values.derive import ERROR_CHARACTERS
from tests.support.avro_values import Case, cases, decoded, encoded, expected, has_column

few = settings(max_examples=60, deadline=None)


def derived(
    values: Sequence[bytes | None],
    schemas: Mapping[int, AvroSchema | str],
    fields: Sequence[pa.Field] | str,
    paths: Sequence[str] | None = None,
) -> AvroDerived:
    """The columns of these values, checked for what holds for all columns."""
    columns: Sequence[pa.Field] = ddl.parse(fields) if isinstance(fields, str) else list(fields)
    names = [each.name for each in columns]
    deriver = AvroDeriver(columns, paths=names if paths is None else paths)
    found = deriver.derive(pa.array(values, pa.binary()), schemas)
    assert [column.type for column in found.columns] == [field.type for field in columns]
    for column in (*found.columns, found.error):
        column.validate(full=True)
        assert len(column) == len(values)
    texts = [text for text in found.error.to_pylist() if text is not None]
    assert len(texts) == found.bad_rows
    assert all(0 < len(text) <= ERROR_CHARACTERS for text in texts)
    return found


def rows_of(found: AvroDerived) -> list[tuple[Any, ...]]:
    """Each row: its columns, and its error."""
    columns = [column.to_pylist() for column in found.columns]
    return list(zip(*columns, found.error.to_pylist(), strict=True))


def shown(value: Any) -> str:
    """Values as text, so that NaN equals NaN, and -0.0 does not equal 0.0."""
    return repr(value).replace("zoneinfo.ZoneInfo(key='UTC')", repr(dt.UTC))


@few
@given(cases())
def test_values_are_those_that_fastavro_reads(case: Case) -> None:
    """In each column of the schema's own types, without an error."""
    schema = parse(case.text)
    values = [encoded(case.schema, each) for each in case.values]
    fields = fields_of(schema).fields
    found = derived(values, {1: schema}, fields)
    wanted = [
        (
            *(
                expected(each["type"], decoded(case.schema, value)[each["name"]])
                for each in case.schema["fields"]
                if has_column(each["type"])
            ),
            None,
        )
        for value in values
    ]
    assert shown(rows_of(found)) == shown(wanted)
