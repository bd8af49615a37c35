"""`sparklog topics ddl`: the SQL that registers tables; tests/spark/test_catalog.py runs it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sparklog import errors
from sparklog.cli import app, catalog
from sparklog.terminal.commands import ExitCode


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


def test_the_view_of_a_typed_topic_has_no_bytes(tmp_path: Path) -> None:
    """Its columns that are filled take the place of the value, each name quoted as one."""
    root, names = tmp_path / "log", ("--root", str(tmp_path / "log"))
    schema = "`a.b` STRING, `c``d` STRUCT<e: INT>, timestamp STRING, gone INT"
    config = ("--config", "value.format=json", "--config", f"value.schema={schema}")
    assert run("topics", "create", "orders", *config, *names).exit_code == ExitCode.OK
    assert run("topics", "columns", "orders", "--drop", "gone", *names).exit_code == ExitCode.OK
    assert ddl(root, "orders", "--view").split(";\n")[1] == (
        "CREATE OR REPLACE VIEW `orders_text` AS\n"
        "SELECT CAST(`key` AS STRING) AS `key`,\n"
        "  `a.b`, `c``d`, `value_timestamp`, `_error`,\n"
        "  'orders' AS `topic`, `partition`, `offset`, `timestamp`, `timestampType`\n"
        "FROM `orders`"
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


ALONE = ("a", "pay", "pay-v1", "Ord_2", "text", "pay_texts")
MEETINGS = [
    ("a-b", "a_b", "table", "table"),
    ("a-b", "a.b", "table", "table"),
    ("a-b", "A-B", "table", "table"),
    ("ord", "Ord", "table", "table"),
    ("pay", "pay_text", "view", "table"),
    ("pay", "Pay.text", "view", "table"),
    ("a-b", "A_B_text", "view", "table"),
]
"""Two topics, and what of each would have one name."""


@pytest.mark.parametrize(("first", "second", "ours", "theirs"), MEETINGS)
def test_two_topics_never_have_one_name(first: str, second: str, ours: str, theirs: str) -> None:
    """Either is refused, whichever a call names, with both topics and the option for a name."""
    log = [*ALONE, first, second]
    for topics in ([first], [first, second], [*ALONE, first]):
        with pytest.raises(errors.BadOption, match=f"the {theirs} of '{second}'") as raised:
            catalog.table_names(topics, log)
        assert raised.value.value == first
        assert f"its {ours} " in str(raised.value)
        assert f"--name {first}=NAME or --name {second}=NAME" in str(raised.value)
    with pytest.raises(errors.BadOption, match=f"the {ours} of '{first}'") as raised:
        catalog.table_names([second], log)
    assert raised.value.value == second


@pytest.mark.parametrize(("first", "second", "_ours", "_theirs"), MEETINGS)
@pytest.mark.parametrize("renamed", [0, 1])
def test_a_chosen_name_parts_two_topics(
    first: str, second: str, _ours: str, _theirs: str, renamed: int
) -> None:
    """With a name for one of them, both are registered, and all names differ without case."""
    log = sorted({*ALONE, first, second})
    chosen = {(first, second)[renamed]: "other"}
    names = catalog.table_names(log, log, chosen)
    taken = [name.lower() for table in names.values() for name in (table, f"{table}_text")]
    assert len(taken) == len(set(taken)) == 2 * len(log)
    for topic in log:
        assert catalog.table_names([topic], log, chosen) == {topic: names[topic]}


@pytest.mark.parametrize("chosen", ["orders", "ORDERS", "orders_text", "pay_text"])
def test_a_chosen_name_is_not_that_of_another_topic(chosen: str) -> None:
    """Neither its table's nor its view's, also if the call names only one of the topics."""
    with pytest.raises(errors.BadOption, match="would be named"):
        catalog.table_names(["t"], ["orders", "pay", "t"], {"t": chosen})
    with pytest.raises(errors.BadOption, match="would be named"):
        catalog.table_names(["t", "u"], ["t", "u"], {"t": "orders", "u": "Orders"})


def test_the_name_of_a_topic_does_not_depend_on_others() -> None:
    """It is the same alone and among others, which may come and go."""
    for topic in ALONE:
        alone = catalog.table_names([topic], [topic])
        assert catalog.table_names([topic], ALONE) == alone
        assert catalog.table_names(ALONE, ALONE)[topic] == alone[topic]


def test_topics_that_meet_are_refused_until_one_has_a_name(root: Path) -> None:
    """Also if the call names one of them only, and nothing is printed then."""
    for topic in ("orders_text", "Page_Views.v1"):
        assert run("topics", "create", topic, "--root", str(root)).exit_code == ExitCode.OK
    for arguments in (("orders", "--view"), ("orders_text",), ("page-views.v1",), ("--all",)):
        refused = run("topics", "ddl", *arguments, "--root", str(root))
        assert (refused.exit_code, refused.stdout) == (ExitCode.FAILED, "")
        assert "--name" in refused.stderr
    names = ("--name", "orders_text=texts", "--name", "page-views.v1=views")
    assert "`orders`" in ddl(root, "orders", *names)
    found = ddl(root, "--all", "--view", *names)
    created = sorted(line.split("`")[1] for line in found.splitlines() if "CREATE" in line)
    tables = ["Page_Views_v1", "orders", "texts", "views"]
    assert created == sorted([*tables, *(f"{name}_text" for name in tables)])
    assert "`texts`" in ddl(root, "orders_text", "--name", "texts")
    unknown = run("topics", "ddl", "orders_text", "--name", "nope=n", "--root", str(root))
    assert "Topic 'nope' does not exist" in unknown.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "name some, or pass --all"),
        (("t", "--all"), "name some, or pass --all"),
        (("t", "--catalog", "main"), "--catalog requires --schema"),
        (("t", "u", "--name", "n"), "--name NAME allows a single topic"),
        (("--all", "--name", "n"), "--name NAME allows a single topic"),
        (("t", "--name", "t="), "expected [TOPIC=]NAME, not 't='"),
        (("t", "--name", "=n"), "expected [TOPIC=]NAME, not '=n'"),
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
