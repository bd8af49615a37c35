"""`sparklog.jobs.to_table` as far as it needs no Spark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from pyspark.sql import functions
from pyspark.sql.types import (
    ArrayType,
    DoubleType,
    IntegerType,
    MapType,
    StringType,
    StructType,
)

import sparklog
from sparklog import Log, errors
from sparklog.jobs.ranges import Range, Source
from sparklog.jobs.table_writing.job import Job
from sparklog.jobs.table_writing.schemas import check_names, other_case
from sparklog.jobs.table_writing.table import Table
from sparklog.jobs.targets import Target
from sparklog.jobs.windows import Checkpoint, Window
from tests.support.waiting import time_with

_FIELDS = StructType().add("d", DoubleType())


@pytest.fixture(name="kept")
def _kept(tmp_path: Path) -> Checkpoint:
    """A checkpoint with an unfinished window, of the first three offsets."""
    kept = Checkpoint(str(tmp_path / "checkpoint"))
    kept.open({})
    kept.plan(0, Range(starts={0: 0}, ends={0: 3}), _FIELDS.json())
    return kept


@pytest.fixture(name="log")
def _log(tmp_path: Path) -> Iterator[Log]:
    """Topic t with five records, and the topic of dead letters."""
    with sparklog.connect(tmp_path / "root") as log:
        for name in ("t", "dead"):
            log.create_topic(name, partitions=1)
        with log.producer() as producer:
            for _ in range(5):
                producer.send("t", b"{}", partition=0)
        yield log


def run(job: Job, kept: Checkpoint) -> None:
    """Runs the job, whose checkpoint has a window that was not finished."""
    plan, is_done = kept.last()
    job.run(kept, "name", None if is_done else plan, max_records=10, every_seconds=None)


def test_a_window_that_is_not_in_the_table_gets_the_columns_of_this_run(
    kept: Checkpoint, log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schema that cannot be written does not stay. The offsets do, and the plan is durable."""
    written = []

    def write(_: Job, kept: Checkpoint, plan: Window, __: str) -> None:
        assert kept.last() == (plan, False)
        written.append(plan)
        kept.finish(plan.number)

    monkeypatch.setattr(Job, "_write", write)
    for check in ("_check_case", "_check_writable"):
        monkeypatch.setattr(Job, check, lambda *_: None)
    monkeypatch.setattr(Table, "is_written", lambda *_: False)
    job = _job(log, tmp_path / "root", adds_fields=False)
    job._number, job._at = 1, {0: 3}
    job._fields = StructType().add("d", StringType())
    run(job, kept)
    assert [each.schema for each in written] == [job._fields.json()] * 2
    assert [each.part for each in written] == [
        Range(starts={0: 0}, ends={0: 3}),
        Range(starts={0: 3}, ends={0: 5}),
    ]


def test_a_commit_of_an_earlier_run_that_comes_late(
    kept: Checkpoint, log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows have the columns of that run, and so have the dead letters of the next one."""
    monkeypatch.setattr("sparklog.jobs.table_writing.job._observed", lambda _: None)
    monkeypatch.setattr("sparklog.jobs.table_writing.job._count_columns", list)
    for name in ("col", "lit", "when", "raise_error"):  # they need a session
        monkeypatch.setattr(functions, name, mock.MagicMock())
    earlier, _ = kept.last()
    assert earlier is not None
    job = _job(log, tmp_path / "root")
    job._earlier = earlier
    plan = kept.replan(earlier, StructType().add("d", StringType()).json())
    for name in ("has", "append"):
        monkeypatch.setattr(Table, name, lambda *_: True)
    with pytest.raises(errors.BadRequest, match="An earlier run has since written window 0"):
        job._append(kept, mock.MagicMock(), mock.MagicMock(), plan, "name")
    found, is_done = kept.last()
    assert found is not None
    assert (found.schema, is_done) == (earlier.schema, False)


def test_a_window_that_the_table_has_needs_its_records_no_more(
    kept: Checkpoint, log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between the commit and its note, and retention after it, stop no later run."""
    monkeypatch.setattr(Table, "is_written", lambda _, __, *window: window == ("name", 0))
    log.delete_records("t", {0: 5})
    run(_finished(_job(log, tmp_path / "root")), kept)
    assert kept.last()[1]


def test_dead_letters_that_are_lost_are_named_once(
    kept: Checkpoint, log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were deleted between the commit and their write. The run after that continues."""
    dead = Target(root=str(tmp_path / "root"), topic="dead", partitions=None)
    monkeypatch.setattr(Table, "is_written", lambda *_: True)
    log.delete_records("t", {0: 5})
    with pytest.raises(errors.DataLoss, match=r"Offsets 0 to 3 of t-0 .* are not in topic 'dead'"):
        run(_finished(_job(log, tmp_path / "root", dead)), kept)
    run(_finished(_job(log, tmp_path / "root", dead)), kept)


def test_a_window_whose_dead_letters_are_written_needs_no_records(
    kept: Checkpoint, log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The topic of dead letters knows the numbers that it has."""
    dead = Target(root=str(tmp_path / "root"), topic="dead", partitions=None)
    monkeypatch.setattr(Table, "is_written", lambda *_: True)
    monkeypatch.setattr(Target, "newest", lambda *_: 0)
    log.delete_records("t", {0: 5})
    run(_finished(_job(log, tmp_path / "root", dead)), kept)


def test_records_that_are_gone_before_their_window_is_written_are_named(
    kept: Checkpoint, log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the start of those that remain."""
    monkeypatch.setattr(Table, "is_written", lambda *_: False)
    log.delete_records("t", {0: 2})
    words = r"Offsets 0 to 2 of t-0 .* a new --checkpoint with --start '{\"0\":2}'"
    with pytest.raises(errors.DataLoss, match=words):
        run(_job(log, tmp_path / "root"), kept)


def test_the_first_columns_are_those_of_a_later_window(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compacted topic may begin with tombstones, and any topic with bad values."""
    written = []
    looked = []

    def add_fields(job: Job, part: Range) -> None:
        looked.append(part)
        if part.ends[0] > 3:
            job._fields = _FIELDS

    monkeypatch.setattr("sparklog.jobs.table_writing.job.WINDOW_RECORDS", 2)
    monkeypatch.setattr(Job, "_add_fields", add_fields)
    for check in ("_check_case", "_check_writable"):
        monkeypatch.setattr(Job, check, lambda *_: None)
    monkeypatch.setattr(Job, "_write", lambda _, __, plan, ___: written.append(plan))
    kept = Checkpoint(str(tmp_path / "new"))
    job = _job(log, tmp_path / "root")
    job.run(kept, "name", None, max_records=1, every_seconds=None)
    assert [each.schema for each in written] == [_FIELDS.json()] * 5
    assert [each.part.starts[0] for each in written] == [0, 1, 2, 3, 4]
    assert [each.starts[0] for each in looked] == [0, 2, 0, 1, 2, 3, 4]


def test_a_job_waits_for_the_first_object(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --every it looks at each record once; a run that ends names the option."""
    looked = []
    monkeypatch.setattr(Job, "_add_fields", lambda _, part: looked.append(part))
    kept = Checkpoint(str(tmp_path / "new"))
    with pytest.raises(errors.BadRequest, match="No field was found in 5 records"):
        _job(log, tmp_path / "root").run(kept, "name", None, max_records=1, every_seconds=None)
    looked.clear()
    stops = iter([None, None])

    def sleep(_: float) -> None:
        if next(stops, KeyboardInterrupt) is not None:
            raise KeyboardInterrupt

    monkeypatch.setattr("sparklog.jobs.table_writing.job.time", time_with(sleep=sleep))
    job = _job(log, tmp_path / "root")
    with pytest.raises(KeyboardInterrupt):
        job.run(kept, "name", None, max_records=1, every_seconds=1.0)
    assert looked == [Range(starts={0: 0}, ends={0: 5})]
    assert kept.last() == (None, True)


@pytest.mark.parametrize("start", ["latest", '{"0": 5}'])
def test_a_start_is_resolved_once(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    """A run that found no record has its start; records and partitions may come before the next."""
    monkeypatch.setattr(Table, "schema", lambda *_, **__: None)
    kept = Checkpoint(str(tmp_path / "new"))
    first = _job(log, tmp_path / "root")
    first.prepare(None, None, start, kept.check({}))
    kept.open({}, start=start, starts=first.starts)
    with log.producer() as producer:
        producer.send("t", b"{}", partition=0)
    log.add_partitions("t", 2)
    second = _job(log, tmp_path / "root")
    second.prepare(None, None, start, kept.check({}))
    waiting = second._waiting(log.describe("t"))
    assert waiting == Range(starts={0: 5, 1: 0}, ends={0: 6, 1: 0})
    third = _job(log, tmp_path / "root")
    third.prepare(None, None, '{"0": 1, "1": 0}', kept.check({}))  # no window has a start yet
    assert third._at == {0: 1, 1: 0}


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

        monkeypatch.setattr("sparklog.jobs.table_writing.job.time", time_with(sleep=create_again))
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


def _job(
    log: Log, root: Path, dead_letters: Target | None = None, *, adds_fields: bool = True
) -> Job:
    """A run without Spark, of topic t."""
    spark: Any = None
    source = Source(root=str(root), topic="t", topic_id=log.describe("t").topic_id)
    job = Job(
        log,
        spark,
        source,
        Table(path="/t", name=None),
        dead_letters,
        upsert=None,
        has_origin=False,
        adds_fields=adds_fields,
    )
    job._fields = StructType()
    return job


def _finished(job: Job) -> Job:
    """The run, with no window after the first."""
    job._number, job._at = 1, {0: 5}
    return job


def fields(*names: str) -> StructType:
    """A schema with these names."""
    found = StructType()
    for name in names:
        found.add(name, IntegerType())
    return found


@pytest.mark.parametrize("wanted", [("id", "ID"), ("a b",), ("",), ("new", "x,y")])
def test_a_name_that_delta_refuses_is_none_of_a_schema(wanted: tuple[str, ...]) -> None:
    """It is refused before a window is planned with it, in structs, arrays and maps too."""
    inner = fields(*wanted)
    deep = (ArrayType(inner), MapType(StringType(), ArrayType(inner)))
    for schema in (inner, *(StructType().add("s", each) for each in (inner, *deep))):
        with pytest.raises(errors.WrongSchema, match=f"field '{wanted[-1]}' of --schema|'id'"):
            check_names(schema, StructType())


def test_the_names_of_a_table_stay() -> None:
    """A table with column mapping has names with spaces."""
    check_names(fields("a b", "new"), fields("A B"))
    for deep in (fields("a b"), ArrayType(fields("a b")), MapType(StringType(), fields("a b"))):
        check_names(StructType().add("s", deep), StructType().add("s", deep))


@pytest.mark.parametrize(
    ("found", "other"),
    [
        ({"ID": "BIGINT"}, ("id", "ID")),
        ({"s": {"A": "BIGINT"}}, ("s.a", "s.A")),
        ({"l": [{"B": "BIGINT"}]}, ("l.b", "l.B")),
        ({"id": "BIGINT", "ID": "BIGINT", "new": "STRING"}, None),
        ({"s": "STRING", "l": None}, None),
        ({}, None),
    ],
)
def test_a_field_in_other_letters_is_found(
    found: dict[str, Any], other: tuple[str, str] | None
) -> None:
    """A field of the schema is null in each row where objects have it in another case only."""
    schema = fields("id").add("s", fields("a")).add("l", ArrayType(fields("b")))
    assert other_case(schema, found) == other


def test_both_cases_may_be_fields_of_a_schema() -> None:
    """Each of two names that differ in case only is a field of its own."""
    assert other_case(fields("id", "ID"), {"ID": "BIGINT"}) is None
