"""`sparklog.jobs.to_table` as far as it needs no Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import DoubleType, IntegerType, StructType

import sparklog
from sparklog import Log, errors
from sparklog.jobs.ranges import Range, Source
from sparklog.jobs.to_table import Table, _Job, check_names
from sparklog.jobs.windows import Checkpoint
from tests.support.waiting import time_with

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
        job = _job(log, tmp_path / "root")
        job.run(kept, "name", plan, max_records=1, every_seconds=None)
    assert written == [plan]
    assert job._fields == _FIELDS


def test_a_topic_that_is_created_again_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first records are not those that this job has written, although they have their offsets.

    A read that was planned before finds it out, too.
    """
    kept = Checkpoint(str(tmp_path / "checkpoint"))
    with sparklog.connect(tmp_path / "root") as log:

        def create_again(_seconds: float) -> None:
            log.delete_topic("t")
            log.create_topic("t", partitions=1)
            with log.producer() as producer:
                producer.send("t", b"new", partition=0)

        monkeypatch.setattr("sparklog.jobs.to_table.time", time_with(sleep=create_again))
        log.create_topic("t", partitions=1)
        job = _job(log, tmp_path / "root")
        with pytest.raises(errors.TopicChanged):
            job.run(kept, "name", None, max_records=1, every_seconds=1.0)
    assert kept.last() == (None, True)


def test_a_job_that_continues_does_not_resolve_its_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `--start` that a new job could not have, because a partition was added, stops no other."""
    kept = Checkpoint(str(tmp_path / "checkpoint"))
    kept.open({})
    plan = kept.plan(0, Range(starts={0: 0}, ends={0: 1}), _FIELDS.json())
    monkeypatch.setattr(Table, "schema", lambda *_, **__: None)
    with sparklog.connect(tmp_path / "root") as log:
        log.create_topic("t", partitions=1)
        log.add_partitions("t", 2)
        job = _job(log, tmp_path / "root")
        job.prepare(None, plan, '{"0": 0}')
        assert job._at == {0: 1}
        with pytest.raises(errors.BadOption, match="an offset for each of the 2 partitions"):
            job.prepare(None, None, '{"0": 0}')


def _job(log: Log, root: Path) -> _Job:
    """A run without Spark, of topic t."""
    spark: Any = None
    source = Source(root=str(root), topic="t", topic_id=log.describe("t").topic_id)
    table = Table(path="/t", name=None)
    job = _Job(log, spark, source, table, None, upsert=None, has_origin=False, adds_fields=True)
    job._fields = StructType()
    return job


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
