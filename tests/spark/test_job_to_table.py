"""`sparklog.jobs.to_table`: JSON values of a topic become rows of a Delta table, each once."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from typer.testing import CliRunner, Result

import sparklog
from sparklog.client.log import Log
from sparklog.jobs.ranges import Range
from sparklog.jobs.running import app_of
from sparklog.jobs.table_writing import job
from sparklog.jobs.table_writing.table import Table
from sparklog.jobs.to_table import to_table
from sparklog.jobs.windows import Checkpoint
from tests.support.jobs import KILLS, failed, succeeded, survive

pytestmark = [pytest.mark.spark, pytest.mark.delta, pytest.mark.timeout(300)]

_APP = app_of(to_table)


def run(root: Path, *arguments: object) -> Result:
    """Runs the job in this process, with its session."""
    given = [f"--root={root}", "--topic=t", f"--checkpoint={root.parent / 'checkpoint'}"]
    return CliRunner().invoke(_APP, [*given, *map(str, arguments)])


def succeed(root: Path, *arguments: object) -> str:
    """Returns the job's last line."""
    return succeeded(run(root, *arguments))


def fail(root: Path, *arguments: object, code: int = 1) -> str:
    """Returns the job's error, in one line of words."""
    return failed(run(root, *arguments), code)


def send(log: Log, *values: object, key: bytes | None = None, partition: int | None = 0) -> None:
    """Sends values, as JSON unless they are bytes or None."""
    with log.producer() as producer:
        for value in values:
            text = (
                value if value is None or isinstance(value, bytes) else json.dumps(value).encode()
            )
            producer.send("t", text, key=key, partition=partition)


def rows(table: Path, by: str = "id") -> list[dict[str, Any]]:
    """The rows of the table without their nulls, as delta-rs reads them."""
    found = DeltaTable(table).to_pyarrow_table().to_pylist()
    found.sort(key=lambda row: row[by])
    return [{name: each for name, each in row.items() if each is not None} for row in found]


@pytest.fixture(name="table")
def _table(spark: SparkSession, tmp_path: Path) -> Path:
    return tmp_path / "table"


# ------------------------------------------------------------------------------ rows


def test_columns_follow_the_fields(root: Path, log: Log, table: Path) -> None:
    """New fields add columns; records that do not fit become dead letters; each run continues."""
    arguments = ["--dead-letters=dead", "--partitions=1", "--origin", table]
    send(log, {"id": 1, "a": "x"}, {"id": 2, "s": {"x": 1.5}})
    assert succeed(root, *arguments).startswith(f"{table}: 2 records in ")
    send(log, {"id": 3, "s": {"y": [7]}, "b": None}, {"id": "no number"}, None, b"{", partition=1)
    assert succeed(root, *arguments).endswith("; 3 dead letters")
    assert succeed(root, *arguments).startswith(f"{table}: 0 records in ")
    found = rows(table)
    at = log.read("t")["timestamp"].to_pylist()
    assert [row.pop("_timestamp") for row in found] == at[:3]
    assert found == [
        {"id": 1, "a": "x", "_partition": 0, "_offset": 0},
        {"id": 2, "s": {"x": 1.5, "y": None}, "_partition": 0, "_offset": 1},
        {"id": 3, "s": {"x": None, "y": [7]}, "_partition": 1, "_offset": 0},
    ]
    letters = log.read("dead").sort_by("offset").to_pylist()
    assert [each["value"] for each in letters] == [b'{"id": "no number"}', None, b"{"]
    headers = [{each["key"]: each["value"] for each in one["headers"]} for one in letters]
    assert [each.pop("sparklog.offset") for each in headers] == [b"1", b"2", b"3"]
    reasons = [each.pop("sparklog.reason") for each in headers]
    assert reasons == [
        b"id: no number is not a valid BIGINT",
        b"its value is null",
        b"{ is not valid JSON",
    ]
    assert headers == [{"sparklog.topic": b"t", "sparklog.partition": b"1"}] * 3
    assert [each["timestamp"] for each in letters] == at[3:]


def test_a_schema_is_kept(spark: SparkSession, root: Path, log: Log, table: Path) -> None:
    """Other fields are left out; a table's own columns and their types stay, and its NOT NULL."""
    spark.sql(f"create table delta.`{table}` (id int not null, other string) using delta")
    send(log, {"id": 1, "at": "2026-01-02T03:04:05Z", "more": 1})
    succeed(root, "--schema=id INT, at TIMESTAMP", table)
    send(log, {"id": 2, "other": "x", "d": 1})
    succeed(root, "--new-fields=add", table)
    kinds = dict(spark.read.format("delta").load(str(table)).dtypes)
    assert kinds == {"id": "int", "other": "string", "at": "timestamp", "d": "bigint"}
    assert [row["id"] for row in rows(table)] == [1, 2]
    assert rows(table)[1] == {"id": 2, "other": "x", "d": 1}
    send(log, {"other": "without an id"})
    assert "NOT NULL constraint violated for column: id" in fail(root, table)


def test_timestamps_stay_timestamps_whatever_the_session_prefers(
    spark: SparkSession, root: Path, log: Log, table: Path
) -> None:
    """A column that was TIMESTAMP is TIMESTAMP in the next run, and so is that of the origin."""
    spark.sql(f"create table delta.`{table}` (id int, at timestamp) using delta")
    send(log, {"id": 1, "at": "2026-01-02T03:04:05Z"}, b"{")
    spark.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    try:
        arguments = ["--dead-letters=dead", "--partitions=1", "--origin", "--new-fields=add"]
        assert succeed(root, *arguments, table).endswith("; 1 dead letter")
        kinds = dict(spark.read.format("delta").load(str(table)).dtypes)
    finally:
        spark.conf.unset("spark.sql.timestampType")
    assert (kinds["at"], kinds["_timestamp"]) == ("timestamp", "timestamp")
    at = log.read("t")["timestamp"][0].as_py()
    assert [(row["at"].hour, row["_timestamp"]) for row in rows(table)] == [(3, at)]


def test_each_version_is_that_of_a_dictionary(root: Path, log: Log, table: Path) -> None:
    """With --upsert the newest record of a key counts, and a null value deletes its row."""
    chance = random.Random(5)
    history: list[tuple[bytes, Any]] = []
    with log.producer() as producer:
        for number in range(300):
            key = b"%d" % chance.randrange(20)
            value = None if chance.random() < 0.3 else {"n": number, "k": "of the value"}
            history.append((key, value))
            text = None if value is None else json.dumps(value).encode()
            producer.send("t", text, key=key, partition=0)
    arguments = ["--upsert=k", "--schema=k INT, n BIGINT", "--max-records=100", table]
    assert succeed(root, *arguments).startswith(f"{table}: 300 records in ")
    opened = DeltaTable(table)
    assert opened.version() == 3  # it is created empty
    for version in range(4):
        expected: dict[int, int] = {}
        for key, value in history[: 100 * version]:
            expected.pop(int(key), None)
            if value is not None:
                expected[int(key)] = value["n"]
        opened.load_as_version(version)
        found = opened.to_pyarrow_table()
        assert dict(zip(*(found[name].to_pylist() for name in ("k", "n")), strict=True)) == expected
        assert found.num_rows == len(expected)
    send(log, {"n": 1}, key=b"x")
    assert "its key is not a valid INT" in fail(root, *arguments)


def test_upsert_takes_any_name_and_a_part_of_a_struct(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """A producer's field may have a backtick, and the table's struct more fields than the job's."""
    table = tmp_path / "a`b"
    columns = "k string, `a``b` struct<x: bigint, y: bigint>"
    spark.sql(f"create table delta.`{tmp_path}/a``b` ({columns}) using delta")
    arguments = ["--upsert=k", "--schema=`a``b` STRUCT<x BIGINT>", "--new-fields=ignore", table]
    for number in range(2):
        send(log, {"a`b": {"x": number, "y": 2}}, key=b"1")
        succeed(root, *arguments)
    assert rows(table, by="k") == [{"k": "1", "a`b": {"x": 1, "y": None}}]


def test_upsert_by_a_binary_column(root: Path, log: Log, table: Path) -> None:
    """The bytes of a key are a BINARY column, whether they are text or not; a null key is bad."""
    arguments = ["--upsert=k", "--schema=k BINARY, n BIGINT", table]
    for number in range(2):
        send(log, {"n": number}, key=b"\xff\x00")
        send(log, {"n": number}, key=b"text")
        succeed(root, *arguments)
    expected = [{"k": b"text", "n": 1}, {"k": b"\xff\x00", "n": 1}]
    assert rows(table, by="k") == expected
    send(log, {"n": 2})
    assert "its key is null" in fail(root, *arguments)


# ------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "exactly one of a path"),
        (["--table=a", "/tmp/b"], 2, "exactly one of a path"),
        (["--partitions=1", "TABLE"], 2, "--dead-letters names"),
        (["--dead-letters=t", "TABLE"], 2, "different topic"),
        (["--dead-letters=missing", "TABLE"], 1, "pass --partitions N"),
        (["--schema=id WHAT", "TABLE"], 1, "WHAT"),
        (["--schema=id INT NOT NULL", "TABLE"], 1, "NOT NULL"),
        (["--schema=_offset INT", "--origin", "TABLE"], 1, "_offset"),
        (["--schema=id BIGINT", "TABLE"], 1, "column id is INT"),
        (["--start=yesterday", "TABLE"], 1, "yesterday"),
        (["TOPIC"], 1, "table of a topic"),
        (["PARQUET"], 1, "not a Delta table"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_written(
    spark: SparkSession,
    root: Path,
    log: Log,
    table: Path,
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    """With one sentence, which names it."""
    log.flush_to_table("t")
    spark.sql(f"create table delta.`{table}` (id int) using delta")
    (table.parent / "parquet").mkdir()
    (table.parent / "parquet" / "a.parquet").write_bytes(b"PAR1")
    places = {"TABLE": table, "TOPIC": root / "topics" / "t", "PARQUET": table.parent / "parquet"}
    said = fail(root, *(places.get(each, each) for each in arguments), code=code)
    assert words in said
    assert "Traceback" not in said
    assert DeltaTable(table).version() == 0
    assert log.topics() == ["t"]
    assert not (root.parent / "checkpoint").exists()


def test_a_field_of_the_schema_in_other_letters_is_refused(
    root: Path, log: Log, table: Path
) -> None:
    """Its column would be null in each row, without a word."""
    send(log, {"id": 1, "userName": "ann"})
    said = fail(root, "--schema=id BIGINT, username STRING", table)
    assert "the field 'userName', and --schema names 'username'" in said
    assert not table.exists()
    succeed(root, "--schema=id BIGINT, userName STRING", table)
    assert rows(table) == [{"id": 1, "userName": "ann"}]


def test_a_bad_record_ends_a_run_without_dead_letters(root: Path, log: Log, table: Path) -> None:
    """It is named, nothing of its window is written; a run with dead letters continues."""
    send(log, {"id": 1}, b"{")
    said = fail(root, "--schema=id INT", table)
    assert "t-0, offset 1: { is not valid JSON" in said
    assert "--dead-letters" in said
    assert not table.exists()
    succeed(root, "--schema=id INT", "--dead-letters=dead", "--partitions=1", table)
    assert rows(table) == [{"id": 1}]
    assert log.read("dead")["value"].to_pylist() == [b"{"]


@pytest.mark.parametrize("is_new", [True, False])
def test_a_wrong_schema_does_not_stay(
    spark: SparkSession, root: Path, log: Log, table: Path, is_new: bool
) -> None:
    """The next run may have another one, whether a window was planned with the first or not."""
    if not is_new:
        spark.sql(f"create table delta.`{table}` (other string) using delta")
    send(log, {"id": 3_000_000_000})
    assert "3000000000 is not a valid INT" in fail(root, "--schema=id INT", table)
    refused = "--schema=a ARRAY<STRUCT<`x y`: INT>>"
    assert "The field 'x y' of --schema cannot be a column" in fail(root, refused, table)
    if not is_new:
        assert "timestampNtz" in fail(root, "--schema=at TIMESTAMP_NTZ", table)
    succeed(root, "--schema=id BIGINT", table)
    assert rows(table) == [{"id": 3_000_000_000}]


def test_a_topic_may_begin_without_an_object(root: Path, log: Log, table: Path) -> None:
    """The first windows have tombstones and bad values, and the columns of the first object."""
    send(log, None, b"{", {"id": 1}, key=b"k")
    arguments = ["--dead-letters=dead", "--partitions=1", "--max-records=2"]
    assert succeed(root, *arguments, table).endswith("; 2 dead letters")
    assert rows(table) == [{"id": 1}]
    table = table.parent / "by_key"
    upsert = ["--upsert=k", f"--checkpoint={table.parent / 'other'}"]
    assert succeed(root, *arguments, *upsert, table).endswith("; 1 dead letter")
    assert rows(table) == [{"k": "k", "id": 1}]


def test_another_job_needs_another_checkpoint(root: Path, log: Log, table: Path) -> None:
    """The one that there is knows its table; so does one whose records are gone."""
    send(log, {"id": 1}, {"id": 2})
    assert "to be created" in run(root, "--dry-run", table).stderr
    assert not table.exists()
    succeed(root, "--max-records=1", table)
    assert "belongs to a job with table" in fail(root, table.parent / "other")
    send(log, {"id": 3})
    log.flush_to_table("t")
    log.delete_records("t", {0: 3})
    assert "no longer exist" in fail(root, table)


def test_another_program_adds_a_column_of_another_type(
    spark: SparkSession,
    root: Path,
    log: Log,
    table: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run ends before it plans a window that would never fit, so the next one has its type."""
    find_fields = job.Job._find_fields

    def late(self: job.Job, *given: Any) -> bool:
        found = find_fields(self, *given)
        spark.sql(f"create table delta.`{table}` (id string) using delta")
        return found

    send(log, {"id": 1})
    with monkeypatch.context() as patch:
        patch.setattr(job.Job, "_find_fields", late)
        assert "column id is STRING" in fail(root, table)
    succeed(root, table)
    assert rows(table) == [{"id": "1"}]


def test_a_run_that_looked_before_another_one_wrote_is_refused(
    root: Path, log: Log, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not plan the same records under the next number."""
    prepare = job.Job.prepare

    def late(self: job.Job, *given: Any) -> None:
        prepare(self, *given)
        other = Checkpoint(str(root.parent / "checkpoint"))
        other.plan(0, Range(starts={0: 0, 1: 0}, ends={0: 1, 1: 0}), "{}")
        other.finish(0)

    send(log, {"id": 1})
    monkeypatch.setattr(job.Job, "prepare", late)
    assert "Another run uses the checkpoint" in fail(root, table)
    assert not table.exists()


# ------------------------------------------------------------------------------ killed


_STEPS = [(Table, "has"), (job, "dead_letters"), (Checkpoint, "finish")]


@pytest.mark.parametrize(("upsert", "steps"), [([], _STEPS), (["--upsert=k"], _STEPS[2:])])
def test_a_run_that_ends_between_two_steps(
    root: Path,
    log: Log,
    table: Path,
    monkeypatch: pytest.MonkeyPatch,
    upsert: list[str],
    steps: list[tuple[object, str]],
) -> None:
    """Before the table, after it, and after the dead letters: the next one completes the window."""
    log.create_topic("dead", partitions=1)
    arguments = ["--dead-letters=dead", *upsert, table]
    for number, (owner, name) in enumerate(steps):
        send(log, {"id": number}, b"%d bad" % number, key=b"%d" % number)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *_: sys.exit(9))
            assert run(root, *arguments).exit_code == 9
        send(log, {"id": 10 + number, "f": 1, "g": 1}, key=b"%d" % (10 + number))
        succeed(root, "--schema=g STRING", "--new-fields=add", *arguments)
    assert {row.get("g") for row in rows(table)} == {None, "1"}
    numbers = range(len(steps))
    ids = [*numbers, *(10 + number for number in numbers)]
    assert [row["id"] for row in rows(table)] == ids
    letters = sorted(log.read("dead")["value"].to_pylist())
    assert letters == [b"%d bad" % number for number in numbers]


@pytest.mark.parametrize("upsert", [[], ["--upsert=k"]])
def test_a_commit_without_its_note_and_retention(
    root: Path, log: Log, table: Path, monkeypatch: pytest.MonkeyPatch, upsert: list[str]
) -> None:
    """The window is in the table, so its offsets need not exist any more; partitions may come."""
    send(log, {"id": 1}, {"id": 2}, key=b"1")
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "finish", lambda *_: sys.exit(9))
        assert run(root, *upsert, table).exit_code == 9
    before = rows(table)
    log.flush_to_table("t")
    log.delete_records("t", {0: 2})
    log.add_partitions("t", 3)
    send(log, {"id": 3}, key=b"3", partition=2)
    succeed(root, *upsert, table)
    assert rows(table) == [*before, {"id": 3, **({"k": "3"} if upsert else {})}]


@pytest.mark.spark_program
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("kills", [1, pytest.param(KILLS, marks=pytest.mark.soak(mode="jobs"))])
def test_a_run_that_is_killed_is_run_again(tmp_path: Path, kills: int) -> None:
    """Whenever it is killed, each record is a row or a dead letter, once."""
    root, table = tmp_path / "root", tmp_path / "table"
    count = 15_000 * kills
    with sparklog.connect(root) as log:
        for name in ("t", "dead"):
            log.create_topic(name, partitions=2)
        with log.producer() as producer:
            for number in range(count):
                value = b'{"id": %d}' % number if number % 1_000 else b"%d bad" % number
                producer.send("t", value, partition=number % 2)
        command = [sys.executable, "-m", "sparklog.jobs.to_table", f"--root={root}", "--topic=t"]
        command += [f"--checkpoint={tmp_path / 'checkpoint'}", "--dead-letters=dead", str(table)]
        command += ["--max-records=5000"]
        survive(command, kills=kills, pauses=(6.0, 13.0), seed=6)
        ids = DeltaTable(table).to_pyarrow_table()["id"].to_pylist()
        assert sorted(ids) == [number for number in range(count) if number % 1_000]
        letters = sorted(int(value.split()[0]) for value in log.read("dead")["value"].to_pylist())
        assert letters == [*range(0, count, 1_000)]
