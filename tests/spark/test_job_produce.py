"""`sparklog.jobs.produce`: rows of files, tables and queries become records, once."""

from __future__ import annotations

import json
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner, Result

import sparklog
from sparklog.client.log import Log
from sparklog.jobs.produce import produce
from sparklog.jobs.running import app_of
from tests.support.jobs import KILLS, failed, succeeded, survive

pytestmark = pytest.mark.spark

_APP = app_of(produce)
_AT = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)


def run(root: Path, *arguments: object) -> Result:
    """Runs the job in this process, with its session."""
    return CliRunner().invoke(_APP, ["--root", str(root), *map(str, arguments)])


def succeed(root: Path, *arguments: object) -> str:
    """Returns the job's last line."""
    return succeeded(run(root, *arguments))


def fail(root: Path, *arguments: object, code: int = 1) -> str:
    """Returns the job's error, in one line of words."""
    return failed(run(root, *arguments), code)


def records(log: Log, topic: str = "t") -> list[tuple[bytes | None, bytes | None]]:
    """Key and value of the topic's records, sorted by value."""
    table = log.read(topic)
    keys, values = (table[name].to_pylist() for name in ("key", "value"))
    return sorted(zip(keys, values, strict=True), key=lambda each: each[1] or b"")


@pytest.fixture(name="orders")
def _orders(spark: SparkSession, tmp_path: Path) -> Path:
    """Four rows of Parquet in two files, in a folder whose name a pattern would not match."""
    folder = tmp_path / "or ders [1]"
    frame = spark.range(4, numPartitions=2).selectExpr(
        "cast(id % 2 as string) as customer", "id", "timestamp '2026-01-02 03:04:05.000006Z' as at"
    )
    frame.write.parquet(str(folder))
    return folder


def path_of(folder: Path) -> str:
    """Returns the folder as a pattern that matches it alone."""
    return str(folder).replace("[", "\\[").replace("]", "\\]")


# ------------------------------------------------------------------------------ a batch


def test_a_row_is_a_json_object(root: Path, log: Log, orders: Path) -> None:
    """Key and time are expressions; the object has all columns."""
    said = succeed(root, "--topic=t", "--key=customer", "--timestamp=at", path_of(orders))
    assert said.startswith("t: 4 records in ")
    objects = [(key, json.loads(value or b"")) for key, value in records(log)]
    at = "2026-01-02T03:04:05.000006Z"
    assert objects == [
        (str(number % 2).encode(), {"customer": str(number % 2), "id": number, "at": at})
        for number in (0, 2, 1, 3)
    ]
    assert log.read("t")["timestamp"].to_pylist() == [_AT] * 4


def test_a_row_with_a_column_value_is_that_value(spark: SparkSession, root: Path, log: Log) -> None:
    """Columns with the names of a record's parts are those parts; another is left out."""
    spark.createDataFrame(
        [("k", "v", 1, "left out")], "key string, value string, partition int, more string"
    ).createOrReplaceTempView("whole")
    succeed(root, "--topic=t", "--query=select * from whole", "--once-as=one")
    assert records(log) == [(b"k", b"v")]
    assert log.read("t")["partition"].to_pylist() == [1]


def test_a_column_with_the_name_of_a_part_stays_in_the_object(root: Path, log: Log) -> None:
    """It is the record's part only if an option says so."""
    at = "2026-01-02 03:04:05.000006"
    query = f"select 'b' as key, 7 as n, timestamp '{at}Z' as timestamp, timestamp_ntz '{at}' as at"
    succeed(root, "--topic=t", f"--query={query}", "--key=n", "--once-as=one")
    [(key, value)] = records(log)
    assert key == b"7"
    assert json.loads(value or b"") == {
        "key": "b",
        "n": 7,
        "timestamp": "2026-01-02T03:04:05.000006Z",
        "at": "2026-01-02T03:04:05.000006",
    }


def test_a_column_with_the_name_of_a_part_in_upper_case(
    root: Path, log: Log, tmp_path: Path
) -> None:
    """It stays in the object too."""
    (tmp_path / "a.csv").write_text("Key,Timestamp\n1,2026-01-02T03:04:05.000006Z\n")
    arguments = ["--format=csv", "--option=header=true", "--key=Key"]
    succeed(root, "--topic=t", *arguments, "--timestamp=to_timestamp(Timestamp)", tmp_path)
    value = b'{"Key":"1","Timestamp":"2026-01-02T03:04:05.000006Z"}'
    assert records(log) == [(b"1", value)]
    assert log.read("t")["timestamp"].to_pylist() == [_AT]


def test_the_time_of_a_record_is_a_timestamp_whatever_the_session_prefers(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """Its TIMESTAMP_NTZ is converted too, in the time zone of the session."""
    (tmp_path / "a.csv").write_text("id\n1\n")
    spark.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    time = "--timestamp=to_timestamp('2026-01-02T03:04:05.000006')"
    try:
        succeed(root, "--topic=t", "--format=csv", "--option=header=true", time, tmp_path)
        zone = spark.conf.get("spark.sql.session.timeZone")
    finally:
        spark.conf.unset("spark.sql.timestampType")
    assert zone is not None
    expected = _AT.replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)
    assert log.read("t")["timestamp"].to_pylist() == [expected]


def test_headers_are_a_map_or_an_array(root: Path, log: Log) -> None:
    """Both become the record's headers."""
    headers = ("map('a', 'b')", "array(named_struct('key', 'a', 'value', cast('b' as binary)))")
    for number, each in enumerate(headers):
        succeed(
            root,
            "--topic=t",
            "--query=select 'v' as value",
            f"--headers={each}",
            f"--once-as=run{number}",
        )
    assert log.read("t")["headers"].to_pylist() == [[{"key": "a", "value": b"b"}]] * 2


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("a.csv", "id,name\n1,x\n", ["--format=csv", "--option=header=true"]),
        ("a.json", '{"id": "1", "name": "x"}\n', ["--format=json"]),
        ("a.csv", "1,x\n", ["--format=csv", "--schema=id STRING, name STRING"]),
    ],
)
def test_files_of_text(
    root: Path, log: Log, tmp_path: Path, name: str, text: str, arguments: list[str]
) -> None:
    """Options of Spark's readers, and a schema, are passed on."""
    (tmp_path / name).write_text(text)
    succeed(root, "--topic=t", *arguments, tmp_path / name)
    assert records(log) == [(None, b'{"id":"1","name":"x"}')]


def test_lines_are_values(root: Path, log: Log, tmp_path: Path) -> None:
    """A key may be a field of a line of JSON; a condition leaves lines out."""
    (tmp_path / "a.jsonl").write_text('{"id": 1}\n\n{"id": 2}\n')
    key = "--key=get_json_object(value, '$.id')"
    where = "--where=value != ''"
    succeed(root, "--topic=t", "--format=text", key, where, tmp_path / "a.jsonl")
    assert records(log) == [(b"1", b'{"id": 1}'), (b"2", b'{"id": 2}')]


# ------------------------------------------------------------------------------ once


def test_a_run_that_is_repeated_writes_nothing(root: Path, log: Log, orders: Path) -> None:
    """A run is the same if files and options are; another key, or another file, makes another."""
    arguments = ["--topic=t", path_of(orders)]
    succeed(root, *arguments)
    assert "nothing to write" in succeed(root, *arguments)
    assert len(records(log)) == 4
    succeed(root, *arguments, "--key=customer")
    assert len(records(log)) == 8
    first = min(orders.glob("*.parquet"))
    shutil.copy(first, first.with_name("more.parquet"))
    succeed(root, *arguments)
    assert len(records(log)) == 14
    succeed(root, *arguments, "--again")
    assert len(records(log)) == 20


@pytest.mark.delta
def test_files_of_delta_whose_names_are_quoted(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """Spark quotes the names of a table's files, and Delta does not."""
    frame = spark.sql("select 1 as id, 'a:b c%' as day").write.partitionBy("day")
    for kind in ("delta", "parquet"):
        frame.format(kind).save(str(tmp_path / kind))
        arguments = ["--topic=t", f"--format={kind}", tmp_path / kind]
        assert succeed(root, *arguments).startswith("t: 1 record in ")
        assert "nothing to write" in succeed(root, *arguments)
    assert records(log) == [(None, b'{"id":1,"day":"a:b c%"}')] * 2


@pytest.mark.parametrize("name", ["--once-as=a", "--again"])
def test_a_run_with_a_name_does_not_look_for_files(
    root: Path, log: Log, orders: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A catalog may refuse to read them except as a table."""
    monkeypatch.setattr("sparklog.jobs.produce.files_of", None)
    succeed(root, "--topic=t", name, path_of(orders))
    assert len(records(log)) == 4


def test_a_query_needs_a_name(root: Path, log: Log, orders: Path) -> None:
    """It may depend on more than the files that it reads; a second run could not be recognised."""
    files = f"select * from parquet.`{path_of(orders)}`"
    assert "--once-as" in fail(root, "--topic=t", f"--query={files}")
    arguments = ["--topic=t", "--query=select 'v' as value"]
    assert "--once-as" in fail(root, *arguments)
    assert not records(log)
    succeed(root, *arguments, "--once-as=monday")
    succeed(root, *arguments, "--once-as=monday")
    assert records(log) == [(None, b"v")]


def test_a_run_is_written_to_a_topic_that_was_created_again(root: Path, log: Log) -> None:
    """The records of a run of that name in the deleted topic do not count."""
    for value in ("old", "new"):
        succeed(root, "--topic=t", "--once-as=a", f"--query=select '{value}' as value")
        assert records(log) == [(None, value.encode())]
        log.delete_topic("t")
        log.create_topic("t", partitions=2)


def test_a_dry_run_writes_nothing(root: Path, log: Log, orders: Path) -> None:
    """It shows what the records would be, and creates no topic."""
    result = run(root, "--topic=new", "--partitions=3", "--dry-run", "--key=id", path_of(orders))
    assert result.exit_code == 0
    assert "2 files" in result.stderr
    assert "to   new, to be created with 3 partitions" in result.stderr
    assert "key: string" in result.stderr
    assert "value: a JSON object of customer, id, at" in result.stderr
    assert result.stdout == "new: nothing was written, because of --dry-run\n"
    assert log.topics() == ["t"]


def test_a_topic_is_created_if_asked(root: Path, log: Log, orders: Path) -> None:
    """With as many partitions as said."""
    succeed(root, "--topic=new", "--partitions=3", path_of(orders))
    assert len(log.describe("new").partitions) == 3
    assert len(records(log, "new")) == 4


# ------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--topic=missing", "--once-as=a", "--query=select 1 as a"], 1, "pass --partitions N"),
        (["--topic=t", "--once-as=a", "--query=select 1 as a", "--key=b"], 1, "`b`"),
        (["--topic=t", "/no/such/file"], 1, "/no/such/file"),
        (["--topic=t"], 2, "exactly one"),
        (["--topic=t", "--query=select 1 as a", "a.csv"], 2, "exactly one"),
        (["--topic=t", "--query=select 1 as a", "--every=5"], 2, "--checkpoint"),
        (["--topic=t", "--query=select 1 as a", "--checkpoint=/tmp/c"], 2, "is read once"),
        (["--topic=t", "--once-as=a", "--query=select 1 as a", "--value=array(a)"], 1, "value"),
        (["--topic=t", "--schema=a INT", "--table=a"], 2, "--schema is for paths"),
        (["--topic=t", "--change-feed", "a"], 2, "pass --format delta"),
        (["--topic=t", "--once-as=a b", "--query=select 1 as a"], 1, "--once-as"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_written(
    root: Path, log: Log, arguments: list[str], code: int, words: str
) -> None:
    """With one sentence, which names it."""
    said = fail(root, *arguments, code=code)
    assert words in said
    assert "Traceback" not in said
    assert "stacktrace" not in said
    assert not records(log)


def test_an_error_of_the_jvm_is_one_sentence(root: Path, log: Log, tmp_path: Path) -> None:
    """PySpark has no exception for it; its last cause says the reason."""
    (tmp_path / "a.parquet").write_bytes(b"PAR1, and no more PAR1")
    said = fail(root, "--topic=t", "--schema=a INT", tmp_path)
    assert said.count("Encountered error while reading file") == 1
    assert "a.parquet" in said
    assert "corrupted file" in said
    assert "\tat " not in said
    assert not records(log)


# ------------------------------------------------------------------------------ a stream


@pytest.mark.since("4.1")
def test_a_stream_writes_what_is_new(
    spark: SparkSession, root: Path, log: Log, orders: Path, tmp_path: Path
) -> None:
    """Each run continues where the last one ended."""
    folder = tmp_path / "landing"
    shutil.copytree(orders, folder)
    arguments = ["--topic=t", f"--checkpoint={tmp_path / 'checkpoint'}", folder]
    assert succeed(root, *arguments).startswith("t: 4 records in ")
    assert succeed(root, *arguments).startswith("t: 0 records in ")
    spark.range(5).selectExpr("'9' as customer", "id", "current_timestamp() as at").write.mode(
        "append"
    ).parquet(str(folder))
    assert succeed(root, *arguments).startswith("t: 5 records in ")
    assert len(records(log)) == 9


@pytest.mark.since("4.1")
def test_a_checkpoint_belongs_to_a_topic(
    root: Path, log: Log, orders: Path, tmp_path: Path
) -> None:
    """A checkpoint notes its topic, and is refused with another or a later one.

    One of an older release has no note, and gets one.
    """
    checkpoint = tmp_path / "check [point]"
    arguments = [f"--checkpoint={checkpoint}", path_of(orders)]
    succeed(root, "--topic=t", *arguments)
    said = fail(root, "--topic=u", "--partitions=1", *arguments)
    assert "belongs to 't'" in said
    assert "'u' its own --checkpoint" in said
    assert log.topics() == ["t"]
    shutil.rmtree(checkpoint / "sparklog-topic")
    assert succeed(root, "--topic=t", *arguments).startswith("t: 0 records in ")
    assert (checkpoint / "sparklog-topic").is_dir()
    log.delete_topic("t")
    log.create_topic("t", partitions=1)
    assert "an earlier or another topic 't'" in fail(root, "--topic=t", *arguments)


@pytest.mark.since("4.1")
@pytest.mark.delta
def test_the_change_feed_of_a_table(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """Each change is a record."""
    table = f"delta.`{tmp_path / 'table'}`"
    spark.sql(
        f"create table {table} (id int) using delta"
        " tblproperties (delta.enableChangeDataFeed = true)"
    )
    spark.sql(f"insert into {table} values (1), (2)")
    spark.sql(f"delete from {table} where id = 1")
    arguments = ["--topic=t", "--format=delta", "--change-feed", "--option=startingVersion=0"]
    succeed(root, *arguments, f"--checkpoint={tmp_path / 'checkpoint'}", tmp_path / "table")
    found = [json.loads(value or b"") for _, value in records(log)]
    changes = sorted((each["id"], each["_change_type"]) for each in found)
    assert changes == [(1, "delete"), (1, "insert"), (2, "insert")]


# ------------------------------------------------------------------------------ killed


@pytest.mark.timeout(1_800)
@pytest.mark.spark_program
@pytest.mark.soak(mode="jobs")
def test_a_run_that_is_killed_is_run_again(tmp_path: Path) -> None:
    """Whenever it is killed, its records are in the topic once, after a run that was not."""
    root, folder = tmp_path / "root", tmp_path / "lines"
    folder.mkdir()
    for number in range(4):
        lines = (f"{number}-{line}\n" for line in range(50_000))
        (folder / f"{number}.txt").write_text("".join(lines))
    with sparklog.connect(root) as log:
        log.create_topic("t", partitions=2)
        command = [sys.executable, "-m", "sparklog.jobs.produce", f"--root={root}", "--topic=t"]
        command += ["--format=text", str(folder)]
        said = survive(command, kills=KILLS, pauses=(4.0, 16.0), seed=6)
        assert said.startswith(("t: 200,000 records in ", "t: nothing to write"))
        values = log.read("t")["value"]
        assert len(values) == 200_000
        assert len(set(values.to_pylist())) == 200_000
