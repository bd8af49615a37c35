"""`sparklog topics ddl`: the SQL that registers tables; tests/spark/test_catalog.py runs it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sparklog import errors
from sparklog.cli import app, catalog
from sparklog.cli.shared import ExitCode


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the variables that name a log from the environment."""
    for name in list(os.environ):
        if name.startswith("SPARKLOG_"):
            monkeypatch.delenv(name)


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    """A root in a folder of an awkward name, with two topics."""
    root = tmp_path / "it's 100% ours"
    for topic in ("orders", "page-views.v1"):
        assert run("topics", "create", topic, "--root", str(root)).exit_code == ExitCode.OK
    return root


def run(*arguments: str) -> Result:
    """The command line in this process."""
    return CliRunner().invoke(app, arguments)


def ddl(root: Path, *arguments: str) -> str:
    """Returns the output of `topics ddl`."""
    result = run("topics", "ddl", *arguments, "--root", str(root))
    assert result.exit_code == ExitCode.OK, result.output
    return result.stdout


def test_a_table_is_registered_where_it_stands(root: Path) -> None:
    """The location is absolute and to the letter, quotes escaped; the name is in backticks."""
    folder = str(root).replace("'", "\\'")
    assert ddl(root, "orders") == (
        "CREATE TABLE IF NOT EXISTS `orders`\n"
        "USING delta\n"
        f"LOCATION 'file://{folder}/topics/orders';\n"
    )


def test_tables_of_all_topics(root: Path) -> None:
    """A statement for each; names are such as every catalog takes."""
    found = ddl(root, "--all", "--catalog", "main", "--schema", "events")
    assert [line.split()[-1] for line in found.splitlines() if line.startswith("CREATE")] == [
        "`main`.`events`.`orders`",
        "`main`.`events`.`page_views_v1`",
    ]
    assert "/topics/page-views.v1';" in found


def test_a_table_may_have_a_name_of_its_own(root: Path) -> None:
    """Any text is quoted as one name."""
    found = ddl(root, "orders", "--schema", "s", "--name", "the `best` orders.v1")
    assert found.splitlines()[0] == "CREATE TABLE IF NOT EXISTS `s`.`the ``best`` orders.v1`"


def test_a_view_has_texts(root: Path) -> None:
    """Beside the table, with the topic's own name as a column."""
    found = ddl(root, "page-views.v1", "--schema", "s", "--view").split(";\n")
    assert found[1] == (
        "CREATE OR REPLACE VIEW `s`.`page_views_v1_text` AS\n"
        "SELECT CAST(`key` AS STRING) AS `key`, CAST(`value` AS STRING) AS `value`,\n"
        "  'page-views.v1' AS `topic`, `partition`, `offset`, `timestamp`, `timestampType`,"
        " `headers`\n"
        "FROM `s`.`page_views_v1`"
    )


def test_spark_may_name_the_root_otherwise(root: Path) -> None:
    """A bucket has one name here and another one there."""
    found = ddl(root, "orders", "--spark-root", "s3a://bucket/log/")
    assert "LOCATION 's3a://bucket/log/topics/orders';" in found


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("s3://bucket/log/topics/t", "s3://bucket/log/topics/t"),
        ("gs://bucket/topics/t", "gs://bucket/topics/t"),
        ("file:///a%20b/%25/topics/t", "file:///a b/%/topics/t"),
    ],
)
def test_locations(uri: str, expected: str) -> None:
    """Spark decodes nothing, so nothing is encoded."""
    assert catalog.location(uri) == expected


def test_spark_has_no_such_store() -> None:
    """A scheme with another notation in Spark is not guessed."""
    with pytest.raises(errors.BadOption, match="--spark-root"):
        catalog.location("az://container/log/topics/t")
    root = "abfss://c@a.dfs.core.windows.net/log"
    assert catalog.location("az://c/log/topics/t", root=root) == f"{root}/topics/t"


@pytest.mark.parametrize("other", ["a_b", "a.b", "A-B"])
def test_two_topics_never_have_one_table(other: str) -> None:
    """Names that most catalogs do not tell apart are refused, with both topics."""
    with pytest.raises(errors.BadOption, match="like that of 'a-b'") as raised:
        catalog.table_names(["a-b", "c", other])
    assert raised.value.value == other


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "name some, or give --all"),
        (("t", "--all"), "name some, or give --all"),
        (("t", "--catalog", "main"), "--catalog requires --schema"),
        (("t", "u", "--name", "n"), "--name allows a single topic"),
        (("--all", "--name", "n"), "--name allows a single topic"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], told: str) -> None:
    """A command line that makes no sense is exit code 2, before anything is asked."""
    result = run("topics", "ddl", *arguments, "--root", "nowhere")
    assert result.exit_code == ExitCode.USAGE
    assert told in " ".join(result.stderr.replace("│", "").split())


def test_a_topic_must_exist(root: Path) -> None:
    """One that does not is one line, and nothing is printed for the others."""
    result = run("topics", "ddl", "orders", "nope", "--root", str(root))
    assert result.exit_code == ExitCode.FAILED
    assert "Topic 'nope' does not exist" in result.stderr
    assert result.stdout == ""
