"""`sparklog.jobs.to_table` as far as it needs no Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import DoubleType, IntegerType, StructType

import sparklog
from sparklog import errors
from sparklog.jobs.ranges import Range, Source
from sparklog.jobs.to_table import Table, _Job, check_names
from sparklog.jobs.windows import Checkpoint

_FIELDS = StructType().add("d", DoubleType())


def test_a_window_that_was_not_finished_gives_the_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next windows do not find other types for them, if the table did not have them yet."""
    kept = Checkpoint(str(tmp_path / "checkpoint"))
    kept.open({})
    plan = kept.plan(0, Range(starts={0: 0}, ends={0: 0}), _FIELDS.json())
    written = []
    monkeypatch.setattr(_Job, "_write", lambda _, __, plan, ___, **____: written.append(plan))
    with sparklog.connect(tmp_path / "root") as log:
        log.create_topic("t", partitions=1)
        spark: Any = None
        source = Source(root=str(tmp_path / "root"), topic="t")
        table = Table(path="/t", name=None)
        job = _Job(log, spark, source, table, None, upsert=None, has_origin=False, adds_fields=True)
        job._fields = StructType()
        job.run(kept, "name", plan, max_records=1, every_seconds=None)
    assert written == [plan]
    assert job._fields == _FIELDS


def fields(*names: str) -> StructType:
    """A schema with these names."""
    found = StructType()
    for name in names:
        found.add(name, IntegerType())
    return found


@pytest.mark.parametrize("wanted", [("id", "ID"), ("a b",), ("",), ("new", "x,y")])
def test_a_name_that_delta_refuses_is_none_of_a_schema(wanted: tuple[str, ...]) -> None:
    """It is refused before a window is planned with it, in structs too."""
    for schema in (fields(*wanted), StructType().add("s", fields(*wanted))):
        with pytest.raises(errors.WrongSchema, match=f"field '{wanted[-1]}' of --schema|'id'"):
            check_names(schema, StructType())


def test_the_names_of_a_table_stay() -> None:
    """A table with column mapping has names with spaces."""
    check_names(fields("a b", "new"), fields("A B"))
    check_names(StructType().add("s", fields("a b")), StructType().add("s", fields("a b")))
