from __future__ import annotations

import base64
import datetime as dt
import decimal
import io
import itertools
import json
import os
import pkgutil
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import sparklog
from sparklog import errors, jobs, limits
from sparklog.cli import app, json_rows
from sparklog.cli.consume import _GroupBatches
from sparklog.cli.formats import InputFormat
from sparklog.cli.produce import _Acks, _Input, _meter
from sparklog.formats.topic_config import KEYS
from sparklog.jobs.produce import produce as produce_job
from sparklog.jobs.replay import replay
from sparklog.jobs.running import app_of, signals_deferred
from sparklog.settings import BrokerSettings
from sparklog.storage.objects import SyncFailed
from sparklog.terminal.commands import ExitCode
from tests.support.live import LiveBroker
from tests.support.waiting import time_with


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the variables that name a log from the environment."""
    for name in list(os.environ):
        if name.startswith("SPARKLOG_"):
            monkeypatch.delenv(name)


@pytest.fixture(name="broker")
def _broker(broker: LiveBroker) -> LiveBroker:
    """A broker with a topic of one partition and a topic of four."""
    broker.create("t1", 1)
    broker.create("t4", 4)
    return broker


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="leans on /dev/full and /proc")


JOBS = Path(__file__).resolve().parents[2] / "jobs"


def run(*arguments: str, stdin: bytes | str | None = None, **environment: str) -> Result:
    """The command line in this process; whatever is not an exit code is raised."""
    result = CliRunner().invoke(app, arguments, input=stdin, env=environment)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def ask(broker: LiveBroker, *arguments: str, stdin: bytes | str | None = None) -> Result:
    """As `run`, of that broker."""
    return run(*arguments, "--bootstrap", broker.address, stdin=stdin)


def fill(broker: LiveBroker, topic: str, *records: tuple[int, bytes | None, bytes | None]) -> None:
    """Appends (partition, key, value) each, as one batch, with the time 2023-11-14T22:13:20Z."""
    for partition, key, value in records:
        columns = {
            "timestamp": pa.array([1_700_000_000_000_000], pa.timestamp("us", "UTC")),
            "key": pa.array([key], pa.binary()),
            "value": pa.array([value], pa.binary()),
        }
        broker.append(topic, pa.RecordBatch.from_pydict(columns), partition)


def commit_offset(broker: LiveBroker) -> None:
    """Commits an offset of a group, for which the broker creates `__consumer_offsets`."""
    with sparklog.connect(broker.address) as log:
        log.commit_group_offsets("g", {("t1", 0): 0})


def starts(broker: LiveBroker, topic: str) -> list[int]:
    """The log start of each partition."""
    described = ask(broker, "topics", "describe", topic, "--json").stdout
    return [each.get("start", 0) for each in json.loads(described)["partitions"]]


def commands(group: typer.Typer = app, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words that name each command."""
    from typer.main import get_group

    for name, command in get_group(group).commands.items():
        if getattr(command, "invoke_without_command", False):
            yield (*path, name)
        if hasattr(command, "commands"):
            for inner in command.commands:
                yield (name, inner)
        else:
            yield (*path, name)


# ------------------------------------------------------------------------------ help, exit codes


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_help_shows_an_example(words: tuple[str, ...]) -> None:
    """The help of every command shows a line that may be typed, of that very command."""
    result = run(*words, "--help")
    assert result.exit_code == ExitCode.OK
    assert f"Example: sparklog {' '.join(words)}" in result.stdout


@pytest.mark.parametrize(
    "words", [(), *(each for each in commands() if each != ("bench",))], ids=" ".join
)
def test_help_fits_80_columns_without_types(words: tuple[str, ...]) -> None:
    """Help names values instead of types, and no line is longer than a terminal of 80 columns."""
    shown = run(*words, "--help", COLUMNS="80").stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert not re.search(r"<(str|int|float|Path|list|bool)|x>=|<=x|INTEGER|TEXT", shown)


@pytest.mark.parametrize(
    ("words", "nearest"),
    [(("topcs",), "topics"), (("topics", "lst"), "list"), (("topics", "list", "--jso"), "--json")],
)
def test_a_misspelt_word_is_corrected(words: tuple[str, ...], nearest: str) -> None:
    """A usage error names the most similar command or option."""
    result = run(*words)
    assert result.exit_code == ExitCode.USAGE
    assert nearest in result.stderr


def test_a_misspelt_topic_is_corrected(broker: LiveBroker) -> None:
    """An unknown topic is an error with the most similar name, and not an internal one."""
    broker.create("orders", 1)
    commit_offset(broker)
    for arguments in (("topics", "describe", "ordres"), ("consume", "ordres")):
        assert ask(broker, *arguments).stderr == (
            "sparklog: Topic 'ordres' does not exist. Create it, or correct the name."
            " Did you mean 'orders'?\n"
        )
    assert "Did you mean" not in ask(broker, "consume", "__consumer_offset").stderr


def test_internal_topics_are_listed_on_request(broker: LiveBroker) -> None:
    """`topics list` names the topics of brokers only with --internal."""
    commit_offset(broker)
    assert ask(broker, "topics", "list").stdout == "t1\nt4\n"
    listed = ask(broker, "topics", "list", "--internal", "--json").stdout
    assert json.loads(listed) == ["__consumer_offsets", "t1", "t4"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (b'{"carrier":"UA", "delay":11}', {"carrier": "UA", "delay": 11}),
        (b"[1,\n 2.50]\n", [1, 2.5]),
        (b"12", "12"),
        (b"null", "null"),
        (b'"text"', '"text"'),
        (b"{not json}", "{not json}"),
        (b'{"a":1} {"b":2}', '{"a":1} {"b":2}'),
        (b'{"base64":"AA=="}', '{"base64":"AA=="}'),
        (b'{"base64":"AA==","n":1}', {"base64": "AA==", "n": 1}),
        (b'{"a":"\xff"}', {"base64": "eyJhIjoi/yJ9"}),
        (b"", ""),
        (None, None),
    ],
)
def test_json_values_are_json(broker: LiveBroker, value: bytes | None, shown: object) -> None:
    """In jsonl a value that is a JSON object or array is JSON, and all others are as before."""
    fill(broker, "t1", (0, None, b"before"), (0, None, value), (0, None, b"{}"))
    lines = ask(broker, "consume", "t1", "--output", "jsonl").stdout.splitlines()
    assert [json.loads(line)["value"] for line in lines] == ["before", shown, {}]


def test_json_values_keep_their_digits(broker: LiveBroker) -> None:
    """The text of a JSON value is not changed: large numbers and zeros stay."""
    value = b'{"n":12345678901234567890123,"price":1.500,"n":2}'
    fill(broker, "t1", (0, None, value))
    shown = ask(broker, "consume", "t1", "--output", "jsonl").stdout
    assert shown == '{"value":' + value.decode() + "}\n"


@pytest.mark.parametrize("is_typed", [True, False])
def test_no_progress_bar_over_typed_input(monkeypatch: pytest.MonkeyPatch, is_typed: bool) -> None:
    """While a person types the records, a progress bar would overwrite the lines."""
    given = _Input(path=Path("-"), kind=InputFormat.TEXT, is_guessed=True)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: is_typed))
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True))
    assert (_meter([given]) is None) is is_typed


def test_a_command_that_makes_a_root_prints_it(tmp_path: Path) -> None:
    """On standard error, so that a misspelt path is noticed; an existing root has no line."""
    root = ("--root", str(tmp_path / "log"))
    made = run("topics", "create", "t", *root)
    assert (made.exit_code, made.stderr) == (0, f"sparklog: created a new log in {root[1]}\n")
    assert run("topics", "create", "u", *root).stderr == ""


def test_consume_in_a_group_continues_where_it_ended(tmp_path: Path) -> None:
    """A command with --group commits exactly the records that it has printed."""
    root = ("--root", str(tmp_path / "log"))
    assert run("topics", "create", "t", "--partitions", "2", *root).exit_code == ExitCode.OK
    given = [f"v{number}" for number in range(8)]
    sent = run("produce", "t", "--partition", "1", *root, stdin="\n".join(given))
    assert sent.exit_code == ExitCode.OK
    group = ("consume", "t", "--group", "g", *root)
    assert run(*group, "--max", "3").stdout.split() == given[:3]
    shown = [
        json.loads(line)
        for line in run(*group, "--output", "jsonl", "--metadata", "--max", "2").stdout.splitlines()
    ]
    assert [(each["offset"], each["value"]) for each in shown] == [(3, "v3"), (4, "v4")]
    assert run(*group).stdout.split() == given[5:]
    assert run(*group).stdout == ""
    told = json.loads(run("groups", "describe", "g", "--json", *root).stdout)
    committed = {each["partition"]: (each["committed"], each["lag"]) for each in told["partitions"]}
    assert committed[1] == (8, 0)
    assert told["members"] == []


def test_a_group_assigns_partitions_itself(broker: LiveBroker) -> None:
    """--partition and --group are a usage error together."""
    result = ask(broker, "consume", "t4", "--group", "g", "--partition", "1")
    assert result.exit_code == ExitCode.USAGE
    assert "exclude each other" in " ".join(result.stderr.split())


def test_an_interrupted_member_commits_what_it_has_written() -> None:
    """The batch that was being written is not committed, and neither are lost partitions."""
    batches = [
        pa.record_batch({"partition": [number], "offset": [4], "value": [b"v"]})
        for number in range(3)
    ]
    member = mock.Mock(assignment=[("t", 1), ("t", 2)])
    member.batches.return_value = iter(batches)
    given = _GroupBatches(member, "t", ["value"], None)
    taken = iter(given)
    for _ in batches:
        assert next(taken).schema.names == ["value"]
    given.commit_written()
    member.commit.assert_called_once_with({("t", 1): 5})


def test_help_tells_exit_codes() -> None:
    """The first help that one sees says what the exit codes mean."""
    told = " ".join(run("--help").stdout.split())
    for code in ExitCode:
        assert str(int(code)) in told.partition("Exit codes: ")[2]


def test_help_loads_nothing_heavy() -> None:
    """The command line's help comes without Arrow, Delta or Spark."""
    program = (
        "import sys; from sparklog.cli import app;"
        "app(['produce', '--help'], standalone_mode=False);"
        "print({'pyarrow', 'deltalake', 'pyspark', 'obstore'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "set()"


def test_version() -> None:
    """`version`, also as an option, is the package's own."""
    for words in ("version", "--version"):
        assert run(words).stdout == f"sparklog {sparklog.__version__}\n"


@pytest.mark.parametrize("command", ["create", "alter"])
def test_help_tells_the_keys_of_topics(command: str) -> None:
    """The help lists every key of a topic's configuration, and which of them have an effect."""
    told = " ".join(run("topics", command, "--help").stdout.split())
    effective, idle = told.split("Kafka's other keys are stored but have no effect: ")
    for name, key in KEYS.items():
        if key.idle:
            assert name in idle
        else:
            assert f"{name} (default {key.default}): {key.about}" in effective


def test_unknown_topic_is_one_line(broker: LiveBroker) -> None:
    """An error of sparklog is one line on standard error and exit code 1, in every command."""
    for arguments in (
        ("topics", "describe", "nope"),
        ("topics", "delete", "nope", "--yes"),
        ("topics", "trim", "nope", "--before", "1", "--yes"),
        ("consume", "nope"),
        ("produce", "nope"),
    ):
        result = ask(broker, *arguments)
        assert result.exit_code == ExitCode.FAILED
        assert result.stderr == (
            "sparklog: Topic 'nope' does not exist. Create it, or correct the name.\n"
        )
        assert result.stdout == ""


def test_no_broker_is_one_line() -> None:
    """An unreachable broker is an error with its address."""
    result = run("topics", "list", "--bootstrap", "not-an-address")
    assert result.exit_code == ExitCode.FAILED
    assert result.stderr.startswith("sparklog: ")
    assert "not-an-address" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("host", "told"), [("127.0.0.1", "start a broker there"), ("no.invalid", "cannot be resolved")]
)
def test_closed_port_is_told_at_once(host: str, told: str) -> None:
    """A closed port or a misspelt host is one line, at once, with what to do."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"{host}:{server.getsockname()[1]}"
    began = time.monotonic()
    result = run("topics", "list", "--bootstrap", address)
    assert time.monotonic() - began < limits.ACTION_TIMEOUT_SECONDS
    assert result.exit_code == ExitCode.FAILED
    assert result.stderr.startswith(f"sparklog: No broker answers at {address}: ")
    assert told in result.stderr
    assert result.stderr.endswith(" To wait for it, pass --wait.\n")


def test_wait_waits_and_says_so(broker: LiveBroker) -> None:
    """With --wait, the command uses a broker that starts later, and prints that it waits."""
    broker.crash()
    waits = itertools.count()

    def sleep(_: float) -> None:
        if not next(waits):
            broker.restart()  # returns once it serves

    with mock.patch("sparklog.terminal.options.time", time_with(sleep=sleep)):
        result = run("topics", "list", "--wait", "--bootstrap", broker.address)
    assert result.stdout == "t1\nt4\n"
    told = f"sparklog: waiting up to 60 s for a broker at {broker.address} (Connection refused"
    assert result.stderr.startswith(told)
    assert len(result.stderr.splitlines()) == 1


def test_wait_ends(tmp_path: Path) -> None:
    """--wait SECONDS gives up after them; with a root there is nothing to wait for."""
    began = time.monotonic()
    result = run("topics", "list", "--wait", "0.3", "--bootstrap", "127.0.0.1:1")
    assert 0.3 <= time.monotonic() - began < 20.0
    assert result.exit_code == ExitCode.FAILED
    assert [line[:30] for line in result.stderr.splitlines()] == [
        "sparklog: waiting up to 0.3 s ",
        "sparklog: No broker answers at",
    ]
    refused = run("topics", "list", "--wait", "1", "--root", str(tmp_path))
    assert refused.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("words", [("topics", "create", "t"), ("topics", "list"), ("broker",)])
@pytest.mark.parametrize("root", ["localhost:9092", "localhost"])
def test_address_is_no_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], root: str
) -> None:
    """An address that is given as a root is refused with a hint, and does not become a folder."""
    monkeypatch.chdir(tmp_path)
    result = run(*words, "--root", root)
    assert result.exit_code == ExitCode.FAILED
    assert "looks like an address" in result.stderr
    hint = "kafka.listen and flight.listen" if words == ("broker",) else f"--bootstrap {root}?"
    assert hint in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_missing_root_is_not_made(tmp_path: Path) -> None:
    """Asking about a root that does not exist does not make one."""
    root = tmp_path / "typo"
    result = run("topics", "list", "--root", str(root))
    assert result.exit_code == ExitCode.FAILED
    assert "is not a sparklog root" in result.stderr
    assert not root.exists()


@pytest.mark.parametrize("address", ["a:1,b", "host", "host:"])
def test_bootstrap_that_is_no_address(address: str) -> None:
    """A bootstrap with a part that is not an address is refused."""
    for result in (
        run("topics", "list", "--bootstrap", address),
        run("topics", "list", SPARKLOG_BOOTSTRAP=address),
    ):
        assert result.exit_code == ExitCode.FAILED
        assert "expected host:port" in result.stderr


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (PermissionError(13, "Permission denied", "x.jsonl"), "Permission denied: 'x.jsonl'"),
        (SyncFailed("wal/0/1/2", "I/O error"), "SyncFailed: wal/0/1/2: I/O error"),
    ],
)
def test_trouble_outside_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    """An error of the operating system or the store is one line and exit code 1."""

    def fail(
        _settings: BrokerSettings, *, take_over: bool, allow_non_empty: bool, **_: object
    ) -> None:
        assert not take_over
        assert not allow_non_empty
        raise error

    monkeypatch.setattr("sparklog.broker.running.run_broker", fail)
    result = run("broker", "--root", "a")
    assert result.exit_code == ExitCode.FAILED
    assert result.stderr.endswith(f"{told}\n")
    assert len(result.stderr.splitlines()) == 1


def test_a_folder_needs_no_storage_options(tmp_path: Path) -> None:
    """Variables that are meant for a bucket are no matter to a root that is a folder."""
    root = ("--root", str(tmp_path))
    made = run("topics", "create", "t", *root, SPARKLOG_STORAGE_AWS_REGION="eu")
    assert made.exit_code == ExitCode.OK
    assert run("topics", "list", *root, SPARKLOG_STORAGE_AWS_REGION="eu").stdout == "t\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("topics", "list"), "no log is named"),
        (("topics", "list", "--root", "a", "--bootstrap", "b:1"), "not both"),
        (("topics", "create", "t", "--root", "a", "--config", "key"), "KEY=VALUE"),
        (("topics", "alter", "t", "--root", "a"), "nothing to change"),
        (("topics", "alter", "t", "--root", "a", "--set", "k=1", "--unset", "k"), "set and unset"),
        (("topics", "delete", "t", "--root", "a"), "cannot ask"),
        (("topics", "trim", "t", "--root", "a"), "pass --before or --before-time"),
        (("topics", "trim", "t", "--before", "1", "--root", "a"), "cannot ask"),
        (("topics", "trim", "t", "--before", "-1", "--root", "a"), "use an offset, or latest"),
        (("topics", "trim", "t", "--before-time", "9", "--root", "a"), "use a time in ISO 8601"),
        (("produce", "t", "no-such-file", "--root", "a"), "file 'no-such-file' does not exist"),
        (("produce", "t", "/", "--root", "a"), "'/' is a folder: name the files in it"),
        (
            ("produce", "t", "--from-line", "2", "--format", "csv"),
            "--from-line requires a line-based format",
        ),
        (("produce", "t", "-", "-", "--from-line", "2"), "--from-line allows a single file"),
        (("produce", "t", "--skip-bad", "bad"), "--skip-bad requires lines of JSON"),
        (("produce", "t", "--format", "xml"), "'--format': 'xml' is not one of 'jsonl', 'text'"),
        (
            ("produce", "t", "--format", "text", "--key-field", "k", "--root", "a"),
            "text has no fields",
        ),
        (
            ("produce", "t", "--format", "csv", "--key-field", "k", "--timestamp-field", "k"),
            "the same field",
        ),
        (("consume", "t", "--from", "yesterday", "--root", "a"), "yesterday"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], told: str) -> None:
    """A command line that makes no sense is exit code 2, before anything is asked or made."""
    result = run(*arguments)
    assert result.exit_code == ExitCode.USAGE
    assert told in " ".join(result.stderr.replace("│", "").split())


def test_environment_names_the_log(broker: LiveBroker) -> None:
    """Without an option the variables are asked, the address before the root."""
    found = run("topics", "list", SPARKLOG_BOOTSTRAP=broker.address, SPARKLOG_ROOT="/nowhere")
    assert found.stdout == "t1\nt4\n"


def test_option_goes_before_the_environment(broker: LiveBroker) -> None:
    """The command line overrides the environment."""
    found = run("topics", "list", "--bootstrap", broker.address, SPARKLOG_BOOTSTRAP="other:1")
    assert found.exit_code == ExitCode.OK
    found = run("topics", "list", "--root", "/nowhere", SPARKLOG_BOOTSTRAP=broker.address)
    assert "/nowhere" in found.stderr


# ------------------------------------------------------------------------------ topics


def test_topics_from_beginning_to_end(broker: LiveBroker) -> None:
    """A topic is made, described, changed, grown and deleted."""
    config = "message.timestamp.type=LogAppendTime"
    made = ask(broker, "topics", "create", "new", "--partitions", "2", "--config", config)
    assert made.stdout == "new: 2 partitions\n"
    assert json.loads(ask(broker, "topics", "list", "--json").stdout) == ["new", "t1", "t4"]

    described = ask(broker, "topics", "describe", "new").stdout
    assert config in described
    assert described.splitlines()[-1].split() == ["1", "0", "0", "0", "0"]

    key = config.partition("=")[0]
    assert ask(broker, "topics", "alter", "new", "--unset", key).stdout == "new: defaults\n"
    assert ask(broker, "topics", "add-partitions", "new", "3").stdout == "new: 3 partitions\n"
    info = json.loads(ask(broker, "topics", "describe", "new", "--json").stdout)
    assert [each["partition"] for each in info["partitions"]] == [0, 1, 2]
    assert ask(broker, "topics", "delete", "new", "--yes").exit_code == ExitCode.OK
    assert ask(broker, "topics", "list").stdout == "t1\nt4\n"


def test_a_topic_is_described_with_its_interval(broker: LiveBroker) -> None:
    """That of the broker, or its own, as far as retention permits."""
    assert "\npublish every 1 s\n" in ask(broker, "topics", "describe", "t1").stdout
    alter = ["topics", "alter", "t1"]
    altered = ask(broker, *alter, "--set", "publish.interval.ms=7200000")
    assert altered.stdout == "t1: publish.interval.ms=7200000\n"
    assert "\npublish every 7200 s\n" in ask(broker, "topics", "describe", "t1").stdout
    ask(broker, *alter, "--set", "retention.ms=3600000")
    assert "\npublish every 360 s\n" in ask(broker, "topics", "describe", "t1").stdout
    refused = ask(broker, *alter, "--set", "publish.interval.ms=86400001")
    assert refused.exit_code != ExitCode.OK
    assert "an integer from 0 to 86400000, or -1" in refused.stderr


def test_topic_that_exists(broker: LiveBroker) -> None:
    """A topic is made twice only if that is asked for."""
    assert ask(broker, "topics", "create", "t4").exit_code == ExitCode.FAILED
    again = ask(broker, "topics", "create", "t4", "--if-absent")
    assert again.stdout == "t4: 4 partitions\n"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("8", "with 4 partitions, not 8; to add some: sparklog topics add-partitions t4 8"),
        ("2", "with 4 partitions, not 2; partitions cannot be removed"),
    ],
)
def test_topic_that_exists_and_differs(broker: LiveBroker, asked: str, told: str) -> None:
    """--if-absent succeeds, and prints the differences from the request to standard error."""
    result = ask(broker, "topics", "create", "t4", "--if-absent", "--partitions", asked)
    assert (result.exit_code, result.stdout) == (ExitCode.OK, "t4: 4 partitions\n")
    assert result.stderr == f"sparklog: warning: topic 't4' already exists, {told}\n"
    config = ("--config", "retention.ms=7")
    result = ask(broker, "topics", "create", "t4", "--if-absent", "--partitions", "4", *config)
    assert "without retention.ms=7" in result.stderr
    assert ask(broker, "topics", "create", "t4", "--if-absent").stderr == ""


def test_compact_merges_the_files_of_a_table(tmp_path: Path) -> None:
    """`topics compact` merges small files at once, and says how many there are."""
    with sparklog.connect(tmp_path) as log:
        log.create_topic("t", 1)
        for number in range(3):
            with log.producer() as producer:
                producer.send("t", b"%d" % number).result()
            log.flush_to_table("t")
        before = log.describe("t").table_files
    found = run("topics", "compact", "t", "--root", str(tmp_path))
    assert before > 1
    assert (found.exit_code, found.stdout) == (ExitCode.OK, "t: 1 file\n")


def test_trim_by_offset(broker: LiveBroker) -> None:
    """`topics trim` shows what would go; it deletes what it has shown, and no more."""
    fill(broker, "t1", *[(0, None, b"%d" % number) for number in range(5)])
    shown = ask(broker, "topics", "trim", "t1", "--before", "2", "--dry-run")
    assert (shown.exit_code, shown.stdout.split()[-4:]) == (ExitCode.OK, ["0", "0", "2", "5"])
    assert starts(broker, "t1") == [0]
    done = ask(broker, "topics", "trim", "t1", "--before", "2", "--yes")
    assert done.stdout.splitlines()[-1] == "t1: 2 offsets deleted"
    assert starts(broker, "t1") == [2]
    again = ask(broker, "topics", "trim", "t1", "--before", "1", "--yes")
    assert (again.exit_code, again.stdout.split()[-4:]) == (ExitCode.OK, ["0", "2", "2", "5"])
    beyond = ask(broker, "topics", "trim", "t1", "--before", "6", "--yes")
    assert beyond.exit_code == ExitCode.FAILED
    assert "Offset 6 of t1-0 is outside the range 2 to 5" in beyond.stderr
    assert ask(broker, "topics", "trim", "t1", "--before", "latest", "--yes").exit_code == 0
    assert starts(broker, "t1") == [5]


def test_trim_of_some_partitions(broker: LiveBroker) -> None:
    """An offset is of the partitions that are named; a time may be of all."""
    fill(broker, "t4", *[(number % 4, None, b"x") for number in range(8)])
    unsaid = ask(broker, "topics", "trim", "t4", "--before", "1", "--yes")
    assert unsaid.exit_code == ExitCode.USAGE
    assert "'t4' has 4 partitions: pass --partition" in " ".join(unsaid.stderr.split())
    chosen = ("--partition", "1", "--partition", "3", "--yes")
    assert ask(broker, "topics", "trim", "t4", "--before", "1", *chosen).exit_code == ExitCode.OK
    assert starts(broker, "t4") == [0, 1, 0, 1]
    ancient = ask(broker, "topics", "trim", "t4", "--before-time", "1990-01-01", "--yes")
    assert ancient.exit_code == ExitCode.OK
    assert starts(broker, "t4") == [0, 1, 0, 1]
    done = ask(broker, "topics", "trim", "t4", "--before-time", "2999-01-01T10:00", "--yes")
    assert done.stdout.splitlines()[-1] == "t4: 6 offsets deleted"
    assert starts(broker, "t4") == [2, 2, 2, 2]
    missing = ask(broker, "topics", "trim", "t4", "--before", "1", "--partition", "9", "--yes")
    assert missing.exit_code == ExitCode.FAILED


# ------------------------------------------------------------------------------ produce


def test_produce_lines(broker: LiveBroker) -> None:
    """Each line of text is a value, byte for byte, empty ones and the last without its end too."""
    result = ask(broker, "produce", "t1", stdin=b"one\r\n\n\xfftwo\nlast")
    assert result.exit_code == ExitCode.OK
    assert broker.values("t1") == [b"one", b"", b"\xfftwo", b"last"]
    assert result.stderr.startswith("4 records acked")
    assert result.stdout == ""


def test_produce_jsonl(broker: LiveBroker, tmp_path: Path) -> None:
    """A line of JSON is the value unchanged; key and timestamp are copied from its fields."""
    lines = [
        '{"carrier": "UA", "at": "2013-01-01T10:00:00Z"}',
        '{"at": 1500, "x": [1, {"carrier": "no"}], "carrier": 7.50}',
        '{"carrier":null,"at":null}',
        '{"carrier":"caf\\u00e9","at":"2013-01-01 05:00"}',
    ]
    file = tmp_path / "flights.jsonl"
    file.write_text("\n".join([*lines[:2], "", *lines[2:]]) + "\n")
    fields = ("--key-field", "carrier", "--timestamp-field", "at")
    assert ask(broker, "produce", "t1", str(file), *fields).exit_code == ExitCode.OK

    rows = broker.rows("t1")
    assert [row["value"] for row in rows] == [line.encode() for line in lines]
    assert [row["key"] for row in rows] == [b"UA", b"7.50", None, "café".encode()]
    arrival = rows[2]["timestamp"]
    assert dt.timedelta() < dt.datetime.now(dt.UTC) - arrival < dt.timedelta(minutes=1)
    assert [row["timestamp"] for row in rows] == [
        dt.datetime(2013, 1, 1, 10, tzinfo=dt.UTC),
        dt.datetime(1970, 1, 1, 0, 0, 1, 500_000, tzinfo=dt.UTC),
        arrival,
        dt.datetime(2013, 1, 1, 5, tzinfo=dt.UTC),
    ]


def test_produce_from_a_pipe_with_fields(broker: LiveBroker) -> None:
    """Standard input is read as JSON if a field is named."""
    arguments = ("produce", "t1", "--key-field", "customer")
    assert ask(broker, *arguments, stdin=b'{"customer":"alice"}\n').exit_code == ExitCode.OK
    assert [row["key"] for row in broker.rows("t1")] == [b"alice"]


def test_produce_csv(broker: LiveBroker) -> None:
    """A row of CSV is a JSON object in which only what JSON calls a number is one."""
    table = 'zip,delay,name,at\n007,1.50,"says ""hi""\nand goes",2013-01-01\n10115,,x,2013-01-02\n'
    fields = ("--key-field", "zip", "--timestamp-field", "at")
    result = ask(broker, "produce", "t1", "-", "--format", "csv", *fields, stdin=table)
    assert result.exit_code == ExitCode.OK
    rows = broker.rows("t1")
    assert rows[0]["value"].startswith(b'{"zip":"007","delay":1.50,')
    assert [json.loads(row["value"]) for row in rows] == [
        {"zip": "007", "delay": 1.5, "name": 'says "hi"\nand goes', "at": "2013-01-01"},
        {"zip": 10115, "delay": None, "name": "x", "at": "2013-01-02"},
    ]
    assert [row["key"] for row in rows] == [b"007", b"10115"]
    assert rows[1]["timestamp"] == dt.datetime(2013, 1, 2, tzinfo=dt.UTC)


def test_produce_parquet(broker: LiveBroker, tmp_path: Path) -> None:
    """A row of Parquet is a JSON object; a column of times is the record's, to the microsecond."""
    at = dt.datetime(2013, 1, 1, 10, 0, 0, 123_456, tzinfo=dt.UTC)
    table = pa.table({"id": [1, 2], "at": pa.array([at, None]), "tags": [["a"], []]})
    pq.write_table(table, tmp_path / "t.parquet")
    fields = ("--key-field", "id", "--timestamp-field", "at")
    assert ask(broker, "produce", "t1", str(tmp_path / "t.parquet"), *fields).exit_code == 0
    rows = broker.rows("t1")
    assert json.loads(rows[0]["value"]) == {
        "id": 1,
        "at": "2013-01-01T10:00:00.123456Z",
        "tags": ["a"],
    }
    assert [row["key"] for row in rows] == [b"1", b"2"]
    assert rows[0]["timestamp"] == at


def test_produce_a_topics_own_file(broker: LiveBroker, tmp_path: Path) -> None:
    """A data file of a topic's table is taken for the records that it holds, headers included."""
    headers = [[{"key": "h", "value": b"1"}], None]
    table = pa.table(
        {
            "offset": [7, 8],
            "timestamp": pa.array([0, 1], pa.timestamp("us", "UTC")),
            "timestampType": pa.array([0, 0], pa.int32()),
            "key": pa.array([b"k", None], pa.binary()),
            "value": pa.array([b"{}", None], pa.binary()),
            "headers": pa.array(
                headers, pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
            ),
        }
    )
    pq.write_table(table, tmp_path / "data.parquet")
    assert ask(broker, "produce", "t1", str(tmp_path / "data.parquet")).exit_code == 0
    rows = broker.rows("t1")
    assert [(row["offset"], row["key"], row["value"]) for row in rows] == [
        (0, b"k", b"{}"),
        (1, None, None),
    ]
    assert [row["headers"] for row in rows] == headers


def test_produce_from_a_pipe_that_cannot_seek(broker: LiveBroker, tmp_path: Path) -> None:
    """Parquet comes through standard input as well."""
    pq.write_table(pa.table({"a": [1]}), tmp_path / "t.parquet")
    content = (tmp_path / "t.parquet").read_bytes()
    assert ask(broker, "produce", "t1", "--format", "parquet", stdin=content).exit_code == 0
    assert broker.values("t1") == [b'{"a":1}']


def test_produce_to_one_partition(broker: LiveBroker) -> None:
    """`--partition` goes before keys."""
    lines = "".join(f'{{"k":{number}}}\n' for number in range(20))
    arguments = ("--format", "jsonl", "--key-field", "k", "--partition", "2")
    assert ask(broker, "produce", "t4", *arguments, stdin=lines).exit_code == ExitCode.OK
    assert [len(broker.values("t4", number)) for number in range(4)] == [0, 0, 20, 0]


def test_produce_several_files(broker: LiveBroker, tmp_path: Path) -> None:
    """Files are sent one after the other, each by its own format."""
    (tmp_path / "a.txt").write_text("a\n")
    (tmp_path / "b.csv").write_text("b\n1\n")
    names = [str(tmp_path / name) for name in ("a.txt", "b.csv")]
    assert ask(broker, "produce", "t1", *names).exit_code == ExitCode.OK
    assert broker.values("t1") == [b"a", b'{"b":1}']


@pytest.mark.parametrize(
    ("kind", "content", "told"),
    [
        ("jsonl", b'{"k":1}\n\n{"k":', "line 3: "),
        ("jsonl", b'{"k":1}\n{"j":1}\n', "line 2: "),
        ("csv", b"k,b\n1,2\n3\n", "Expected 2 columns"),
        ("csv", b"j,b\n1,2\n", "no column 'k'"),
        ("parquet", b"PAR?", "Parquet"),
    ],
)
def test_produce_what_is_wrong(broker: LiveBroker, kind: str, content: bytes, told: str) -> None:
    """Input that is not what it is said to be is refused in one line that names the place."""
    arguments = ("--format", kind, "--key-field", "k")
    result = ask(broker, "produce", "t1", *arguments, stdin=content)
    assert result.exit_code == ExitCode.FAILED
    assert result.stderr.startswith("sparklog: standard input: ")
    assert told in result.stderr
    assert " acked" in result.stderr or " Nothing was sent." in result.stderr
    assert len(result.stderr.splitlines()) == 1


_BAD_LINES = (
    b'{"n":1,}',
    b"{'n':1}",
    b'{"n":1} {"n":2}',
    b'{"n":"\xff"}',
    b"not json",
    b'{"n":01}',
)


@pytest.mark.parametrize("bad", _BAD_LINES)
def test_produce_stops_at_a_bad_line(broker: LiveBroker, tmp_path: Path, bad: bytes) -> None:
    """All lines before an invalid one are sent, none after it, and continuing sends none twice."""
    good = [b'{"n":%d}' % number for number in range(6)]
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\n".join([good[0], b"", *good[1:3], bad, *good[3:]]) + b"\n")
    result = ask(broker, "produce", "t1", str(file))
    assert result.exit_code == ExitCode.FAILED
    assert result.stderr.startswith(f"sparklog: {file}: line 5: ")
    assert result.stderr.endswith(
        " 3 records were acked: all lines before 5; continue with --from-line 5 after correcting"
        " the line, or write invalid lines to a file with --skip-bad FILE.\n"
    )
    assert broker.values("t1") == good[:3]
    file.write_bytes(file.read_bytes().replace(bad, b'{"n":"good"}'))
    result = ask(broker, "produce", "t1", str(file), "--from-line", "5")
    assert result.exit_code == ExitCode.OK
    assert broker.values("t1") == [*good[:3], b'{"n":"good"}', *good[3:]]


def test_produce_stops_at_a_bad_first_line(broker: LiveBroker) -> None:
    """If nothing was sent, the message names no line to continue from."""
    result = ask(broker, "produce", "t1", "--format", "jsonl", stdin=b"{bad\n{}\n")
    assert result.exit_code == ExitCode.FAILED
    assert result.stderr.endswith(
        " Nothing was sent. Correct the line, or write invalid lines to a file with"
        " --skip-bad FILE.\n"
    )
    assert broker.values("t1") == []


def test_produce_leaves_bad_lines_out(broker: LiveBroker, tmp_path: Path) -> None:
    """--skip-bad sends all others, appends the bad ones to a file as they are, and counts them."""
    lines = [b'{"k":1}', *_BAD_LINES, b'{"j":1}', b'{"k":2}']
    left = tmp_path / "bad.jsonl"
    left.write_bytes(b"earlier\n")
    arguments = ("--key-field", "k", "--skip-bad", str(left))
    result = ask(broker, "produce", "t1", *arguments, stdin=b"\n".join(lines))
    assert result.exit_code == ExitCode.OK
    assert broker.values("t1") == [b'{"k":1}', b'{"k":2}']
    assert [row["key"] for row in broker.rows("t1")] == [b"1", b"2"]
    assert left.read_bytes().splitlines() == [b"earlier", *_BAD_LINES, b'{"j":1}']
    assert result.stderr.endswith(f"7 invalid lines skipped and written to {left}\n")


def test_a_bad_line_leaves_no_half_of_itself(broker: LiveBroker, tmp_path: Path) -> None:
    """A line whose time is right and whose key is wrong shifts no other's time."""
    fields = ("--key-field", "k", "--timestamp-field", "at", "--skip-bad", str(tmp_path / "bad"))
    lines = b'{"at":1,"k":"\\q"}\n{"at":2000,"k":"b"}\n'
    assert ask(broker, "produce", "t1", *fields, stdin=lines).exit_code == ExitCode.OK
    (row,) = broker.rows("t1")
    assert (row["key"], row["timestamp"].timestamp()) == (b"b", 2.0)


def test_produce_from_a_line_of_text(broker: LiveBroker, tmp_path: Path) -> None:
    """Text counts its empty lines, and lines are counted over blocks of reading."""
    big = b"x" * 700_000
    (tmp_path / "a.txt").write_bytes(b"\n".join([big, b"", big, b"three", big, b"five"]))
    run_on = ("produce", "t1", str(tmp_path / "a.txt"), "--from-line")
    assert ask(broker, *run_on, "4").exit_code == ExitCode.OK
    assert broker.values("t1") == [b"three", big, b"five"]
    assert ask(broker, *run_on, "6").exit_code == ExitCode.OK
    assert broker.values("t1")[3:] == [b"five"]


@pytest.mark.parametrize(
    ("content", "line", "code", "told"),
    [
        (b"one\ntwo\n", 3, ExitCode.OK, "ends with line 2: nothing is left to send"),
        (b"one\ntwo", 3, ExitCode.OK, "ends with line 2: nothing is left to send"),
        (b"one\ntwo\n", 4, ExitCode.FAILED, "ends with line 2, so --from-line 4 is beyond it"),
        (b"one\ntwo\n", 5_000, ExitCode.FAILED, "so --from-line 5,000 is beyond it. Nothing"),
        (b"", 2, ExitCode.FAILED, "is empty, so --from-line 2 is beyond it. Nothing was sent"),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "-"])
def test_produce_from_beyond_the_end(
    broker: LiveBroker, tmp_path: Path, name: str, content: bytes, line: int, code: int, told: str
) -> None:
    """A start beyond the input is an error with the number of lines, except right at its end."""
    file = tmp_path / name
    file.write_bytes(content)
    given = "-" if name == "-" else str(file)
    result = ask(broker, "produce", "t1", given, "--from-line", str(line), stdin=content)
    assert result.exit_code == code
    assert told in result.stderr
    assert result.stderr.count("\n") == (2 if code == ExitCode.OK else 1)
    assert broker.values("t1") == []


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", b'\xef\xbb\xbf{"n":1}\n', "begins with a byte order mark"),
        ("a.txt", b"\xef\xbb\xbfone\n", "begins with a byte order mark"),
        ("a.jsonl", '{"n":1}\n'.encode("utf-16"), "byte order mark of UTF-16"),
        ("a.csv", "n\n1\n".encode("utf-16"), "byte order mark of UTF-16"),
        ("a.jsonl.gz", b"\x1f\x8b\x08\x00abc", "compressed with gzip: send the output of zcat"),
        ("a.jsonl", b"\x28\xb5\x2f\xfdabc", "compressed with zstd"),
        ("a.log", b"PAR1\x15\x04", "Parquet file: pass --format parquet"),
        ("a.jsonl", b"\x7fELF\x00\x00", "a binary file, not lines of JSON"),
        ("a", b"\x7fELF\x00\x00\n", "a binary file, not lines of text; --format text"),
    ],
)
def test_produce_of_what_are_no_lines(
    broker: LiveBroker, tmp_path: Path, name: str, content: bytes, told: str
) -> None:
    """A byte order mark and a binary file are named as such, before anything is sent."""
    file = tmp_path / name
    file.write_bytes(content)
    result = ask(broker, "produce", "t1", str(file))
    assert result.exit_code == ExitCode.FAILED
    assert result.stderr.startswith(f"sparklog: {file}: it ")
    assert told in result.stderr
    assert result.stderr.endswith(" Nothing was sent.\n")
    assert "--skip-bad" not in result.stderr  # it takes lines, and this input has none
    assert broker.values("t1") == []


def test_produce_of_bytes_that_were_called_text(broker: LiveBroker) -> None:
    """With --format text, any bytes are sent unchanged."""
    lines = b"\xef\xbb\xbfa\x00\nb\n"
    assert ask(broker, "produce", "t1", "--format", "text", stdin=lines).exit_code == ExitCode.OK
    assert broker.values("t1") == [b"\xef\xbb\xbfa\x00", b"b"]


def test_produce_to_a_broker_that_refuses(broker: LiveBroker, tmp_path: Path) -> None:
    """After a failed batch, the advice names its first line, not the last line that was read."""
    policy = errors.PolicyViolation(topic="t1", reason="not this one")
    broker.fail_next("append", error=policy)
    (tmp_path / "a.jsonl").write_text("1\n2\n3\n")
    result = ask(broker, "produce", "t1", str(tmp_path / "a.jsonl"), "--from-line", "2")
    assert result.stderr.endswith(
        " 0 records were acked: all lines before 2, and perhaps later ones; --from-line 2"
        " resends those.\n"
    )
    broker.fail_next("append", error=policy)
    assert ask(broker, "produce", "t1", str(tmp_path / "a.jsonl")).stderr.endswith(
        " 0 records were acked, and some lines may have been written; the same command resends all"
        " of them.\n"
    )


def test_produce_tells_what_was_acked(broker: LiveBroker) -> None:
    """A refusal in the middle says how many records stand before it."""
    broker.fail_next("append", error=errors.RecordTooLarge(bytes=10, limit_bytes=1))
    result = ask(broker, "produce", "t1", stdin="one\n")
    assert result.exit_code == ExitCode.FAILED
    assert "max_record_bytes" in result.stderr
    assert " 0 records were acked, " in result.stderr


def test_acks_are_counted_after_failures() -> None:
    """Acked records count, both before and after a failed batch."""
    acks = _Acks()
    place: Any = None
    for fails in (True, False, True, True, False):
        future: Any = _Answer(fails)
        acks.add(future, 10, place)
    with pytest.raises(errors.TopicHeldBack):
        acks.wait_for_all()
    acks.count_the_rest()
    assert acks.records == 20


class _Answer:
    """The answer of a broker to one batch."""

    def __init__(self, fails: bool) -> None:
        self._fails = fails

    def done(self) -> bool:
        return False

    def result(self) -> None:
        if self._fails:
            raise errors.TopicHeldBack(topic="t", reason="no")


@on_linux
def test_produce_of_an_unreadable_file(broker: LiveBroker, tmp_path: Path) -> None:
    """A file that fails among several is one line, with the number of records acked before it."""
    (tmp_path / "a.txt").write_text("a\n")
    (tmp_path / "b.txt").symlink_to("/proc/self/mem")  # opens, and cannot be read
    names = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    result = ask(broker, "produce", "t1", *names)
    assert result.exit_code == ExitCode.FAILED
    assert " 1 record was acked: all lines before 1 of" in result.stderr
    assert len(result.stderr.splitlines()) == 1


# ------------------------------------------------------------------------------ consume


def test_consume_text(broker: LiveBroker) -> None:
    """Values are printed as their bytes, one per line, after the requested columns."""
    fill(broker, "t1", (0, b"k", b"\xffone"), (0, None, None))
    assert ask(broker, "consume", "t1").stdout_bytes == b"\xffone\n\n"
    everything = ask(broker, "consume", "t1", "--keys", "--headers", "--metadata").stdout_bytes
    at = b"2023-11-14T22:13:20.000000Z"
    assert everything == b"0\t0\t%b\tk\t\t\xffone\n0\t1\t%b\t\t\t\n" % (at, at)


def test_consume_jsonl(broker: LiveBroker) -> None:
    """A line of JSON distinguishes null from empty, and binary data from text."""
    fill(broker, "t1", (0, b"", b"\xff"), (0, None, b'{"a":"\n"}'), (0, b"k", None))
    result = ask(broker, "consume", "t1", "--output", "jsonl", "--keys")
    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        {"key": "", "value": {"base64": base64.b64encode(b"\xff").decode()}},
        {"key": None, "value": '{"a":"\n"}'},
        {"key": "k", "value": None},
    ]


def test_consume_headers(broker: LiveBroker) -> None:
    """Headers are pairs in text and objects in JSON, in their order, doubles kept."""
    from sparklog.formats.record import HEADERS

    headers = [
        None,
        [{"key": "a", "value": b"1"}, {"key": "a", "value": None}],
        [],
        [{"key": "b", "value": b"\xff"}],
    ]
    batch = pa.RecordBatch.from_arrays(
        [pa.array([b"v"] * 4, pa.binary()), pa.array(headers, HEADERS)], names=["value", "headers"]
    )
    broker.append("t1", batch)
    text = ask(broker, "consume", "t1", "--headers").stdout_bytes
    assert text == b"\tv\na=1,a=\tv\n\tv\nb=\xff\tv\n"
    lines = ask(broker, "consume", "t1", "--headers", "--output", "jsonl").stdout.splitlines()
    assert [json.loads(line)["headers"] for line in lines] == [
        None,
        [{"key": "a", "value": "1"}, {"key": "a", "value": None}],
        [],
        [{"key": "b", "value": {"base64": "/w=="}}],
    ]


def test_consume_arrow(broker: LiveBroker) -> None:
    """The Arrow stream holds all columns, and a schema even where there is no record."""
    from sparklog.formats.record import ROW_SCHEMA

    fill(broker, "t4", (1, b"k", b"v"))
    for topic, count in (("t4", 1), ("t1", 0)):
        content = ask(broker, "consume", topic, "--output", "arrow").stdout_bytes
        table = pa.ipc.open_stream(io.BytesIO(content)).read_all()
        assert (table.schema, table.num_rows) == (ROW_SCHEMA, count)


TYPED = (
    b'{"at": "2026-01-02T03:04:05Z", "amount": 1.50, "items": ["a\\t"], "s": {"m": {"k": 1}}}',
    b'{"amount": "n/a"}',
    None,
)
SHOWN = (
    {
        "at": "2026-01-02T03:04:05.000000Z",
        "amount": 1.5,
        "items": ["a\t"],
        "s": {"m": {"k": 1}},
        "_error": None,
    },
    {
        **dict.fromkeys(("at", "amount", "items", "s")),
        "_error": 'value: amount: "n/a" is not a valid DECIMAL(5,2)',
    },
    dict.fromkeys(("at", "amount", "items", "s", "_error")),
)


def test_consume_typed(broker: LiveBroker) -> None:
    """Typed columns take the place of the value, alone and in a group; the error is the last."""
    schema = "at TIMESTAMP, amount DECIMAL(5,2), items ARRAY<STRING>, s STRUCT<m: MAP<STRING, INT>>"
    broker.create("typed", 1, value_format="json", value_schema=schema)
    fill(broker, "typed", *((0, b"k", value) for value in TYPED))
    for more in ((), ("--group", "g")):
        text = ask(broker, "consume", "typed", "--typed", "--keys", *more).stdout.splitlines()
        assert [line.split("\t")[0] for line in text] == ["k"] * 3
        assert [json.loads(line.split("\t")[1]) for line in text] == [*SHOWN]
    assert '"amount":1.50,' in text[0]
    lines = ask(broker, "consume", "typed", "--typed", "--output", "jsonl", "--metadata").stdout
    first, *_ = [json.loads(line) for line in lines.splitlines()]
    assert list(first) == ["partition", "offset", "timestamp", *SHOWN[0]]
    content = ask(broker, "consume", "typed", "--typed", "--output", "arrow").stdout_bytes
    table = pa.ipc.open_stream(io.BytesIO(content)).read_all()
    assert table.schema.names[-6:] == ["headers", "_error", "at", "amount", "items", "s"]
    assert table["value"].to_pylist() == [*TYPED]
    refused = ask(broker, "consume", "t1", "--typed")
    assert refused.exit_code == ExitCode.FAILED
    assert "sparklog topics columns t1 --accept" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), ["0", "1", "2"]),
        (("--from", "latest"), []),
        (("--from", "1"), ["1", "2"]),
        (("--from", "2023-11-14T22:13:20"), ["0", "1", "2"]),
        (("--from", "2023-11-14T22:13:21Z"), []),
        (("--max", "2"), ["0", "1"]),
        (("--max", "0"), []),
        (("--max", "9"), ["0", "1", "2"]),
        (("--follow", "--max", "3"), ["0", "1", "2"]),
    ],
)
def test_consume_from_and_to(
    broker: LiveBroker, arguments: tuple[str, ...], expected: list[str]
) -> None:
    """The command starts at the given point, and ends after --max records or at the present end."""
    fill(broker, "t1", *((0, None, b"%d" % number) for number in range(3)))
    assert ask(broker, "consume", "t1", *arguments).stdout.split() == expected


def test_consume_some_partitions(broker: LiveBroker) -> None:
    """Only the partitions that are named are read, and one that does not exist is refused."""
    fill(broker, "t4", *((number, None, b"%d" % number) for number in range(4)))
    arguments = ("--partition", "1", "--partition", "3")
    for more in ((), ("--follow", "--max", "2")):
        found = ask(broker, "consume", "t4", *arguments, *more)
        assert sorted(found.stdout.split()) == ["1", "3"]
    refused = ask(broker, "consume", "t4", "--partition", "4")
    assert refused.exit_code == ExitCode.FAILED
    assert "no partition 4: its partitions are 0 to 3" in refused.stderr


# ------------------------------------------------------------------------------ dead letters


class Killed(BaseException):
    """Nothing handles it, as nothing handles the end of a process."""


def kill(*_: object, **__: object) -> None:
    """Takes the place of a function that a process does not live to call."""
    raise Killed


@pytest.fixture(name="letters")
def _letters(broker: LiveBroker) -> LiveBroker:
    """A typed topic with four records, of which the second and the last do not fit."""
    broker.create("typed", 1, value_format="json", value_schema="a INT")
    values = (b'{"a": 1}', b'{"a": "n/a"}', None, b"\xff")
    fill(broker, "typed", *((0, b"k", each) for each in values))
    return broker


def letters_of(broker: LiveBroker) -> list[tuple[bytes | None, int]]:
    """The value and the offset of each record that was copied; all have the same key."""
    with sparklog.connect(broker.address) as log:
        rows = log.read("dead").to_pylist()
    found = []
    for row in rows:
        headers = {each["key"]: each["value"] for each in row["headers"]}
        assert headers["sparklog.topic"] == b"typed"
        assert headers["sparklog.partition"] == b"0"
        assert row["key"] == b"k"
        assert row["timestamp"] == dt.datetime(2023, 11, 14, 22, 13, 20, tzinfo=dt.UTC)
        found.append((row["value"], int(headers["sparklog.offset"])))
    return found


DEAD = [(b'{"a": "n/a"}', 1), (b"\xff", 3)]
COPY = ("topics", "dead-letters", "typed", "--to", "dead")


def test_dead_letters_are_copied_once(letters: LiveBroker) -> None:
    """A later command continues, and records that fit are not copied."""
    first = ask(letters, *COPY)
    assert first.stderr.splitlines() == [
        "sparklog: created topic dead",
        "2 dead letters of 4 records copied to dead",
    ]
    fill(letters, "typed", (0, b"k", b"[]"), (0, b"k", b'{"a": 2}'))
    assert ask(letters, *COPY).stderr == "1 dead letter of 2 records copied to dead\n"
    assert letters_of(letters) == [*DEAD, (b"[]", 4)]
    again = ask(letters, *COPY, "--group", "other").stderr
    assert again == "3 dead letters of 6 records copied to dead\n"


@pytest.mark.parametrize(
    ("stop", "copies"),
    [
        ("sparklog.client.producer.producer.Producer.send_table", DEAD),
        ("sparklog.client.consumer.membership.Membership.commit", DEAD * 2),
    ],
)
def test_no_dead_letter_is_lost(
    letters: LiveBroker, stop: str, copies: list[tuple[bytes, int]]
) -> None:
    """A command that dies before the copy leaves it to the next; after it, the copy is repeated."""
    with mock.patch(stop, kill), pytest.raises(Killed):
        ask(letters, *COPY)
    ask(letters, *COPY)
    assert letters_of(letters) == copies


def test_dead_letters_follow_the_columns(
    letters: LiveBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that waits for records judges them by the columns that the topic has by then."""
    monkeypatch.setattr(limits, "METADATA_AGE_SECONDS", -1)
    from sparklog.cli.dead_letters import _Copier

    with sparklog.connect(letters.address) as log:
        log.create_topic("dead", 1)
        copier = _Copier(log, "typed", "dead")
        copier.check()
        log.alter("typed", {"value.schema": "a INT, b INT"})
        fill(letters, "typed", (0, b"k", b'{"b": "n/a"}'))
        with log.producer() as copier.producer:
            for batch in log.consumer("typed", follow=False).batches():
                copier.copy(batch)
    assert letters_of(letters) == [*DEAD, (b'{"b": "n/a"}', 4)]


def test_dead_letters_need_typed_columns(letters: LiveBroker) -> None:
    """Another topic has none, and a topic is not copied to itself."""
    refused = ask(letters, "topics", "dead-letters", "t1", "--to", "dead")
    assert refused.exit_code == ExitCode.FAILED
    assert "topic t1 has no typed columns" in refused.stderr
    assert "dead" not in ask(letters, "topics", "list").stdout
    assert ask(letters, *COPY[:-1], "typed").exit_code == ExitCode.USAGE


# ------------------------------------------------------------------------------ as a process


def start(*arguments: str, stdin: int | None = None) -> subprocess.Popen[bytes]:
    """The command line as a process of its own, its streams piped."""
    command = [sys.executable, "-m", "sparklog", *arguments]
    return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_closed_pipe_is_quiet(broker: LiveBroker) -> None:
    """A reader that goes ends the command without a word, as it ends any program of a pipe."""
    fill(broker, "t1", *((0, None, b"x" * 100_000) for _ in range(20)))
    with start("consume", "t1", "--bootstrap", broker.address) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(10) == b"x" * 10
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == ExitCode.PIPE_CLOSED


@on_linux
def test_full_disk_is_one_line(broker: LiveBroker) -> None:
    """Output that cannot be written is exit code 1 and one line, also where it was buffered."""
    fill(broker, "t1", (0, None, b"x"))
    for words in (("consume", "t1"), ("topics", "list")):
        command = [sys.executable, "-m", "sparklog", *words, "--bootstrap", broker.address]
        with Path("/dev/full").open("wb") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
        assert done.returncode == ExitCode.FAILED
        assert done.stderr == b"sparklog: [Errno 28] No space left on device\n"


def test_ctrl_c_is_quiet(broker: LiveBroker) -> None:
    """Ctrl-C ends a command that follows, without a word."""
    fill(broker, "t1", (0, None, b"first"))
    with start("consume", "t1", "--follow", "--bootstrap", broker.address) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"first\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == b""
        assert process.wait() == ExitCode.INTERRUPTED


def wait_for_values(broker: LiveBroker, count: int) -> list[bytes | None]:
    """Returns the values of t1 once there are so many."""
    deadline = time.monotonic() + 30.0
    while len(values := broker.values("t1")) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return values


def test_ctrl_c_tells_where_to_go_on(broker: LiveBroker) -> None:
    """An interrupted `produce` prints the number of acked records and the line to continue from."""
    command = [sys.executable, "-m", "sparklog", "produce", "t1", "--format", "jsonl"]
    command += ["--bootstrap", broker.address]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        process.stdin.write(b'{"n":1}\n\n{"n":2}\n{"n":')
        process.stdin.flush()
        wait_for_values(broker, 2)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=30)
    assert process.returncode == ExitCode.INTERRUPTED
    assert told.decode() == (
        "sparklog: 2 records were acked: all lines before 4; continue with --from-line 4.\n"
    )


def test_lines_go_out_as_they_come_in(broker: LiveBroker) -> None:
    """Typed lines are sent at once, while the input stays open."""
    arguments = ("produce", "t1", "--bootstrap", broker.address)
    with start(*arguments, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(b"typed\n")
        process.stdin.flush()
        assert wait_for_values(broker, 1) == [b"typed"]
        process.communicate(b"last\n")
        assert process.returncode == ExitCode.OK
    assert broker.values("t1") == [b"typed", b"last"]


def test_broker_serves_and_leaves(tmp_path: Path) -> None:
    """A broker says one line when it serves, and SIGTERM and Ctrl-C are both exit code 0."""
    for number in (signal.SIGTERM, signal.SIGINT):
        arguments = (
            "broker",
            "--root",
            str(tmp_path / "root"),
            "--flight",
            "127.0.0.1:0",
            "--kafka",
            "127.0.0.1:0",
        )
        with start(*arguments) as process:
            assert process.stdout is not None
            address = process.stdout.readline().decode().split()[-1]
            made = run("topics", "create", f"t{number.value}", "--bootstrap", address)
            assert made.exit_code == ExitCode.OK
            process.send_signal(number)
            assert process.stdout.read() == b""
            assert process.wait() == ExitCode.OK
    # And without a broker one is found in the command's own process, which says nothing of it.
    listed = run("topics", "list", "--root", str(tmp_path / "root"))
    assert listed.stdout.split() == ["t15", "t2"]
    assert listed.stderr == ""


# ------------------------------------------------------------------------------ other commands


def test_broker_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options go before the environment, and that before the file."""
    file = tmp_path / "broker.toml"
    file.write_text('root = "/from-file"\nid = 1\n[flight]\nlisten = "127.0.0.1:1"\n')
    taken: list[tuple[BrokerSettings, bool, bool]] = []

    def take(
        settings: BrokerSettings, *, take_over: bool, allow_non_empty: bool, **_: object
    ) -> None:
        taken.append((settings, take_over, allow_non_empty))

    monkeypatch.setattr("sparklog.broker.running.run_broker", take)
    options = ("--config", str(file), "--id", "3", "--take-over")
    result = run("broker", *options, SPARKLOG_FLIGHT_LISTEN="127.0.0.2:2")
    assert result.exit_code == ExitCode.OK
    ((settings, take_over, allow_non_empty),) = taken
    assert (take_over, allow_non_empty) == (True, False)
    assert (settings.root, settings.id, settings.flight.listen) == ("/from-file", 3, "127.0.0.2:2")


@pytest.mark.parametrize("code", [0, 7])
def test_several_brokers(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """`--processes` runs a supervisor, whose exit code is the command's; 0 means one broker."""
    taken: list[tuple[int, int, bool, bool]] = []

    def supervise(
        settings: BrokerSettings, processes: int, *, take_over: bool, allow_non_empty: bool
    ) -> int:
        taken.append((settings.id, processes, take_over, allow_non_empty))
        return code

    def take(
        settings: BrokerSettings, *, take_over: bool, allow_non_empty: bool, **_: object
    ) -> None:
        taken.append((settings.id, 0, take_over, allow_non_empty))

    monkeypatch.setattr("sparklog.broker.supervisor.supervise", supervise)
    monkeypatch.setattr("sparklog.broker.running.run_broker", take)
    options = ("--root", "a", "--id", "4", "--allow-non-empty")
    assert run("broker", *options, "--processes", "3").exit_code == code
    assert run("broker", *options, "--processes", "1").exit_code == code
    assert run("broker", *options).exit_code == ExitCode.OK
    assert taken == [(4, 3, False, True), (4, 1, False, True), (4, 0, False, True)]
    assert run("broker", *options, "--processes", "0").exit_code == ExitCode.USAGE


def test_broker_without_a_root() -> None:
    """A setting that is missing or wrong is one line and exit code 1."""
    result = run("broker")
    assert result.exit_code == ExitCode.FAILED
    assert result.stderr.startswith("sparklog: Invalid option root = ")


def test_doctor_of_a_sound_root(tmp_path: Path) -> None:
    """The doctor says a line for each check, and exits with 0 where none failed."""
    result = run("doctor", "--root", str(tmp_path))
    assert result.exit_code == ExitCode.OK
    lines = result.stdout.splitlines()
    assert {line.split()[0] for line in lines} <= {"ok", "warn"}
    assert any("put-if-absent" in line for line in lines)


def test_doctor_of_a_broken_root(tmp_path: Path) -> None:
    """A root that cannot be written is exit code 3."""
    (tmp_path / "file").write_text("no folder")
    result = run("doctor", "--root", str(tmp_path / "file"))
    assert result.exit_code == ExitCode.UNHEALTHY
    assert result.stdout.splitlines()[-1].startswith("fail  root")


def test_benchmarks_that_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without benchmarks says so in one line."""
    monkeypatch.setitem(sys.modules, "sparklog.bench", None)
    result = run("bench")
    assert result.exit_code == ExitCode.FAILED
    assert len(result.stderr.splitlines()) == 1


# ------------------------------------------------------------------------------ rows as JSON

_SCALARS: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.string(): st.text(),
    pa.large_string(): st.text(),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float64(): st.floats(allow_nan=False, allow_infinity=False),
    pa.bool_(): st.booleans(),
    pa.binary(): st.binary(),
    pa.list_(pa.int64()): st.lists(st.none() | st.integers(-9, 9)),
    pa.list_(pa.list_(pa.binary())): st.lists(st.none() | st.lists(st.binary(max_size=2))),
    pa.struct([("a", pa.float64()), ("b", pa.list_(pa.string()))]): st.fixed_dictionaries(
        {
            "a": st.none() | st.floats(allow_nan=False, allow_infinity=False),
            "b": st.none() | st.lists(st.text()),
        }
    ),
    pa.map_(pa.string(), pa.decimal128(20, 3)): st.dictionaries(
        st.text(),
        st.none() | st.integers(-9, 9).map(lambda n: decimal.Decimal(n).scaleb(-3)),
        min_size=1,  # an empty list of pairs is not known as a map
    ).map(lambda found: [*found.items()]),
    pa.decimal128(20, 3): st.integers(-(10**15), 10**15).map(
        lambda n: decimal.Decimal(n).scaleb(-3)
    ),
}


@given(
    st.sampled_from(sorted(_SCALARS, key=str)).flatmap(
        lambda kind: st.tuples(st.just(kind), st.lists(st.none() | _SCALARS[kind], max_size=5))
    )
)
def test_json_of_any_column(column: tuple[pa.DataType, list[Any]]) -> None:
    """The standard library reads the row's values from its JSON."""
    kind, values = column
    part = pa.array([None, *values, None], kind)[1:-1]
    found = json_rows.json_rows([json_rows.json_values(part)], ['a"b'])
    assert [json.loads(row)['a"b'] for row in found.to_pylist()] == [_plain(v) for v in values]


def _plain(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], tuple):  # a map
        return {key: _plain(each) for key, each in value}
    if isinstance(value, list):
        return [*map(_plain, value)]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, decimal.Decimal):
        return float(value)
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode()}
    return value


@given(st.lists(st.none() | st.text() | st.from_regex(r"-?[0-9.eE+-]{1,8}", fullmatch=True)))
def test_json_of_loose_text(texts: list[str | None]) -> None:
    """A text becomes a number only if JSON reads it as one, and then to the letter."""
    found = json_rows.loose_values(pa.array(texts, pa.string())).to_pylist()
    for text, token in zip(texts, found, strict=True):
        read = json.loads(
            token, parse_int=lambda t: ("number", t), parse_float=lambda t: ("number", t)
        )
        assert read == (("number", text) if isinstance(read, tuple) else text)


def test_json_of_what_it_lacks() -> None:
    """NaN and the infinities are null, and times are ISO 8601 with a Z where the zone is known."""
    nothing = json_rows.json_values(pa.array([float("nan"), float("inf"), -1e-7]))
    assert nothing.to_pylist() == ["null", "null", "-1e-7"]
    at = dt.datetime(2013, 1, 1, 5, tzinfo=dt.UTC)
    zoned = pa.array([at], pa.timestamp("ms", "America/New_York"))
    assert json_rows.json_values(zoned).to_pylist() == ['"2013-01-01T05:00:00.000Z"']
    naive = pa.array([at.replace(tzinfo=None)], pa.timestamp("s"))
    assert json_rows.json_values(naive).to_pylist() == ['"2013-01-01T05:00:00"']
    assert json_rows.json_values(pa.array([at.date()])).to_pylist() == ['"2013-01-01"']
    assert json_rows.json_values(pa.nulls(1)).to_pylist() == ["null"]
    maps = pa.array([[], None, [(1, None)]], pa.map_(pa.int8(), pa.int8()))
    assert json_rows.json_values(maps).to_pylist() == ["{}", "null", '{"1":null}']
    words = pa.array(["a", None]).dictionary_encode()
    assert json_rows.json_values(words).to_pylist() == ['"a"', "null"]


# ------------------------------------------------------------------------------ jobs


def test_jobs_have_files_and_are_listed() -> None:
    """Each job is a module, has a file in jobs/ of its name, and a line in the list."""
    listed = run("jobs", "list").stdout.splitlines()[1:]
    modules = {each.name for each in pkgutil.iter_modules(jobs.__path__)} - {
        "inputs",
        "mirroring",
        "ranges",
        "rewriting",
        "running",
        "table_writing",
        "targets",
        "windows",
    }
    assert [line.split()[0] for line in listed] == sorted(modules)
    for name in modules:
        path = Path(run("jobs", "path", name).stdout.strip())
        assert path.read_text("utf-8").startswith('"""')
        assert f"from sparklog.jobs.{name} import main" in (JOBS / f"{name}.py").read_text("utf-8")


def test_path_of_an_unknown_job_is_refused() -> None:
    """With a usage error that says where the names are."""
    result = run("jobs", "path", "produces")
    assert result.exit_code == ExitCode.USAGE
    assert "sparklog jobs list" in result.stderr


def test_a_job_without_spark_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line."""
    monkeypatch.setitem(sys.modules, "pyspark", None)
    monkeypatch.setitem(sys.modules, "pyspark.errors", None)
    result = CliRunner().invoke(app_of(replay), ["--from=t", "--to=u", "--root=/tmp/none"])
    assert result.exit_code == ExitCode.FAILED
    assert "sparklog[spark,local-spark]" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("job", "arguments"),
    [
        (produce_job, ["--topic=t", "--query=select 1 as a", "--once-as=a"]),
        (replay, ["--from=t", "--to=u"]),
        (replay, ["--from=t", "--to=u", "--partitions=2", "--dry-run"]),
    ],
)
def test_a_job_makes_no_root_of_a_misspelt_path(
    tmp_path: Path, job: Callable[..., None], arguments: list[str]
) -> None:
    """It is an error, and no folder is made."""
    root = tmp_path / "misspelt"
    result = CliRunner().invoke(app_of(job), [f"--root={root}", *arguments])
    assert result.exit_code == ExitCode.FAILED
    assert "is not a sparklog root" in result.stderr
    assert not root.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_until_spark_has_started(number: signal.Signals) -> None:
    """It stops the job then, which ends the JVM with it."""
    handler = signal.getsignal(number)
    steps = []

    def start() -> None:
        with signals_deferred():
            signal.raise_signal(number)
            steps.append("started")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert steps == ["started"]
    assert signal.getsignal(number) is handler
