"""The command line of the jobs: help, errors in one line, and words in reports."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import typer
from pyspark.errors import PySparkException
from pyspark.sql.types import DayTimeIntervalType, StructType
from typer.testing import CliRunner

from sparklog import errors, jobs
from sparklog.cli import app
from sparklog.display import counted
from sparklog.formats.flight_messages import PartitionInfo, TopicInfo
from sparklog.jobs.inputs import Input
from sparklog.jobs.produce import produce
from sparklog.jobs.ranges import range_of
from sparklog.jobs.replay import replay
from sparklog.jobs.running import _quiet_start, app_of
from sparklog.jobs.table_writing.schemas import check_readable
from sparklog.jobs.targets import in_seconds
from sparklog.jobs.to_table import to_table
from sparklog.terminal.commands import ExitCode
from tests.support.waiting import wait_until

_WITHOUT_SPARK = """
import importlib, sys
from typer.testing import CliRunner

class Missing:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("pyspark", "py4j", "delta"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from sparklog.jobs.running import app_of
for name in sys.argv[1:]:
    job = getattr(importlib.import_module(f"sparklog.jobs.{name}"), name)
    result = CliRunner().invoke(app_of(job), ["--help"])
    assert result.exit_code == 0 and "Usage: " in result.stdout, (name, result.output)
"""


def test_help_needs_no_spark() -> None:
    """The options of a job are shown where pyspark is not installed."""
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_SPARK, *jobs.JOBS],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_job_is_run_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """All words after the name are the job's, and its process replaces the command's."""
    called: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(os, "execv", lambda *given: called.append(given))
    words = ["--root", "./data", "--help", "orders", "--", "-x"]
    result = CliRunner().invoke(app, ["jobs", "run", "compact", *words])
    assert result.exit_code == ExitCode.OK, result.output
    expected = [sys.executable, "-m", "sparklog.jobs.compact", *words]
    assert called == [(sys.executable, expected)]


def test_an_unknown_job_is_not_run() -> None:
    """It is a usage error that says where the names are."""
    result = CliRunner().invoke(app, ["jobs", "run", "produces", "--topic", "t"])
    assert result.exit_code == ExitCode.USAGE
    assert "sparklog jobs list" in result.stderr


@pytest.mark.parametrize("name", ["orders.csv", "landing"])
def test_another_format_than_parquet_is_named(name: str) -> None:
    """Files that are read as Parquet, and are not, end a job with the option to give."""

    def load(_: object) -> None:
        raise PySparkException("[FAILED_READ_FILE.CANNOT_READ_FILE_FOOTER] Could not read footer")

    reader: Any = SimpleNamespace(format=lambda _: SimpleNamespace(load=load))
    spark: Any = SimpleNamespace(read=SimpleNamespace(options=lambda **_: reader))
    source = Input(paths=[name], table=None, query=None, format="parquet", schema=None, options={})
    with pytest.raises(errors.BadRequest, match=rf"{name}: .*--format csv, json") as refused:
        source.read(spark)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("count", "seconds", "words"),
    [
        (0, 2.0, "0 records in 2.0 s"),
        (1, 4.0, "1 record in 4.0 s"),
        (1, 1.0, "1 record in 1.0 s (1 record/s)"),
        (3_000, 2.0, "3,000 records in 2.0 s (1,500 records/s)"),
    ],
)
def test_records_and_their_time_in_words(count: int, seconds: float, words: str) -> None:
    """One record is not a plural, and a rate below one is left out."""
    assert in_seconds(count, seconds) == words


def test_numbers_of_things() -> None:
    """The word that follows 1 differs from the one that follows all other numbers."""
    assert [counted(number, "file") for number in (0, 1, 2_000)] == [
        "0 files",
        "1 file",
        "2,000 files",
    ]
    assert counted(1, "file is", "files are") == "1 file is"
    assert counted(2, "file is", "files are") == "2 files are"


# ------------------------------------------------------------------------------ names of options

_OPTION = re.compile(r"--[a-z][a-z-]*")
_OF_OTHERS: Final = {
    "--packages": "spark-submit",
    "--kafka": "a broker, in the last step of a cutover",
}
_JOBS_OF: Final = {
    "inputs": {"produce"},
    "mirroring": {"mirror"},
    "ranges": {"replay", "to_table"},
    "table_writing": {"to_table"},
    "targets": {"load", "produce", "replay", "to_table"},
    "windows": {"to_table"},
}
"""The jobs of modules that several have, or that are a part of one."""


def _options_of(job: str) -> set[str]:
    found = getattr(importlib.import_module(f"{jobs.__name__}.{job}"), job)
    command = typer.main.get_command(app_of(found))
    return {name for each in command.params for name in each.opts}


def _named(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the options in the texts of a module, except in docstrings, with their lines."""
    tree = ast.parse(path.read_text("utf-8"))
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            for name in _OPTION.findall(node.value):
                yield node.lineno, name


_FOLDER: Final = Path(jobs.__file__).parent


@pytest.mark.parametrize(
    "path", sorted(_FOLDER.rglob("*.py")), ids=lambda each: str(each.relative_to(_FOLDER))
)
def test_options_in_messages_exist(path: Path) -> None:
    """A message names only options that the job has."""
    room = path.relative_to(_FOLDER).parts[0].removesuffix(".py")
    users = {room} if room in jobs.JOBS else _JOBS_OF.get(room, set())
    known = {option for job in users for option in _options_of(job)} | _OF_OTHERS.keys()
    if room in jobs.JOBS:
        known |= {"--help"}
    assert [each for each in _named(path) if each[1] not in known] == []


_NOWHERE: Final = ["--topic=t", "--checkpoint=c", "/tmp/none"]


@pytest.mark.parametrize(
    ("root", "environment", "words"),
    [
        (None, {}, "pass --root, or set SPARKLOG_ROOT"),
        (None, {"SPARKLOG_BOOTSTRAP": "a:1"}, "pass --root, not the address"),
        ("localhost:9092", {}, "not the address of a broker"),
    ],
)
def test_a_job_for_spark_asks_for_a_root(
    root: str | None, environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job without --bootstrap does not name this option."""
    for name in ("SPARKLOG_ROOT", "SPARKLOG_BOOTSTRAP"):
        monkeypatch.delenv(name, raising=False)
    given = _NOWHERE if root is None else [f"--root={root}", *_NOWHERE]
    result = CliRunner(env=environment).invoke(app_of(to_table), given)
    said = " ".join(result.stderr.replace("│", " ").split())
    assert words in said
    assert "--bootstrap" not in said


@pytest.mark.parametrize("name", ["a b", ".hidden", "", "x" * 181])
def test_a_name_of_a_run_is_checked_by_its_option(name: str) -> None:
    """A name that the sink would refuse ends the job before Spark starts."""
    for job, given in (
        (produce, ["--topic=t", "x.parquet"]),
        (replay, ["--from=t", "--to=u"]),
    ):
        result = CliRunner().invoke(app_of(job), ["--root=/tmp/none", f"--once-as={name}", *given])
        assert result.exit_code == ExitCode.FAILED
        assert "--once-as" in result.stderr


@pytest.mark.parametrize(
    ("start", "end", "option"),
    [
        ('{"0": 9}', "latest", "--start"),
        ("earliest", '{"0": 9}', "--end"),
        ("yesterday", "latest", "--start"),
        ("earliest", "tomorrow", "--end"),
        ("earliest", "{}", "--end"),
    ],
)
def test_the_point_that_is_wrong_is_named(start: str, end: str, option: str) -> None:
    """An offset that does not exist, or a text that is not a point, is an error of its option."""
    info = TopicInfo(topic="t", topic_id="i", partitions=[PartitionInfo(partition=0, end=5)])

    def refuse(_: str, when: str) -> None:
        raise errors.BadOption(option="when", value=when, reason="expected a time")

    log: Any = SimpleNamespace(offsets_for_times=refuse)
    with pytest.raises(errors.BadOption) as refused:
        range_of(log, info, start, end)
    assert refused.value.option == option


def test_a_type_that_json_does_not_have_is_one_of_the_schema() -> None:
    """The type is refused under the job's option, and not under that of Spark's source."""
    with pytest.raises(errors.BadOption) as refused:
        check_readable(StructType().add("i", DayTimeIntervalType()))
    assert refused.value.option == "--schema"


# ------------------------------------------------------------------------------ the start of Spark


def _start() -> subprocess.Popen[bytes]:
    """Starts a program that writes to its standard error, before and after a line of input."""
    script = "echo resolving >&2; echo ready; read line; echo later >&2"
    child = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    return child


def _end(child: subprocess.Popen[bytes]) -> None:
    child.communicate(b"go\n", timeout=30)


def test_only_the_start_of_spark_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    """Output of the start is dropped, and what the JVM writes later is shown."""
    with _quiet_start():
        child = _start()
    _end(child)
    shown: list[str] = []

    def is_shown() -> bool:
        shown.append(capfd.readouterr().err)
        return "later" in shown[-1]

    wait_until(is_shown, "the output after the start is shown")
    assert "".join(shown) == "later\n"


def test_a_start_that_fails_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    """The output of a failed start has its reason."""
    children = []

    def fail() -> None:
        with _quiet_start():
            children.append(_start())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert capfd.readouterr().err == "resolving\n"
    _end(children[0])


def test_jobs_are_programs(tmp_path: Path) -> None:
    """`sparklog jobs run` ends with the exit code of the job."""
    command = [sys.executable, "-m", "sparklog", "jobs", "run", "load", "--topic", "t"]
    done = subprocess.run(
        [*command, "--root", str(tmp_path / "none" / "root"), "--size", "0-0-0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == ExitCode.USAGE, done.stderr
    assert "expected a number of bytes" in " ".join(done.stderr.split())
