"""`sparklog.jobs.to_table` without Spark: windows of runs that follow one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import DoubleType, StructType

import sparklog
from sparklog.jobs.ranges import Range, Source
from sparklog.jobs.to_table import Table, _Job
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
    monkeypatch.setattr(_Job, "_write", lambda _, __, plan, ___: written.append(plan))
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
