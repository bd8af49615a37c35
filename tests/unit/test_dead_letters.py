"""Copies of records that do not fit, computed by column."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog.client.dead_letters import dead_letters
from sparklog.formats.record import PAYLOAD_SCHEMA, ROW_SCHEMA
from sparklog.formats.values import columns, ddl
from sparklog.formats.values.typed import no_schemas, typed_columns

_header = st.fixed_dictionaries({"key": st.text(max_size=2), "value": st.none() | st.binary()})
_row = st.fixed_dictionaries(
    {
        "partition": st.just(3),
        "offset": st.integers(0, 2**63 - 1),
        "timestamp": st.integers(0, 10**15),
        "timestampType": st.just(0),
        "key": st.none() | st.binary(max_size=2),
        "value": st.sampled_from([None, b"{}", b'{"a": "x"}', b"\xff", b"[]"]),
        "headers": st.none() | st.lists(_header, max_size=3),
    }
)


@settings(max_examples=30)
@given(st.lists(_row, max_size=6), st.integers(0, 3))
def test_a_copy_is_its_record_with_more_headers(rows: list[dict[str, Any]], first: int) -> None:
    """Rows that do not fit are copied in their order, and no others."""
    found = columns.with_fields(None, ddl.parse("a INT"))
    plan = found.plan() if found is not None else None
    assert plan is not None
    batch = pa.RecordBatch.from_pylist(rows, ROW_SCHEMA).slice(first)
    reasons = typed_columns(plan, batch.column("value")).columns[0].to_pylist()
    copies = dead_letters(batch, plan, "t", no_schemas)
    copies.validate(full=True)
    assert copies.schema == PAYLOAD_SCHEMA
    assert copies.to_pylist() == [
        {name: row[name] for name in ("timestamp", "key", "value")}
        | {
            "headers": [
                *(row["headers"] or ()),
                {"key": "sparklog.reason", "value": reason.encode()},
                {"key": "sparklog.topic", "value": b"t"},
                {"key": "sparklog.partition", "value": b"3"},
                {"key": "sparklog.offset", "value": str(row["offset"]).encode()},
            ]
        }
        for row, reason in zip(batch.to_pylist(), reasons, strict=True)
        if reason is not None
    ]
