"""`sparklog groups`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner, Result

import sparklog
from sparklog.cli import app
from sparklog.formats import record
from sparklog.terminal.commands import ExitCode
from tests.support.groups import join
from tests.support.live import LiveBroker

DAY_US = 24 * 3600 * 1_000_000
OLD_US = 1_700_000_000_000_000


@pytest.fixture(name="broker")
def _broker(broker: LiveBroker, monkeypatch: pytest.MonkeyPatch) -> LiveBroker:
    """Topic `t` with offsets 10 to 30 in each of two partitions, a second apart; and `u`.

    Group `g` has committed 25 and 30.
    """
    monkeypatch.delenv("SPARKLOG_ROOT", raising=False)
    broker.create("t", 2)
    broker.create("u", 1)
    times = [OLD_US + number * 1_000_000 for number in range(30)]
    for partition in (0, 1):
        timestamps = pa.array(times, pa.int64()).view(record.TIMESTAMP)
        broker.fill("t", 30, partition, timestamp=timestamps)
        broker.trim("t", partition, 10)
    commit(broker, "g", {("t", 0): 25, ("t", 1): 30})
    broker.requests.clear()
    return broker


def commit(broker: LiveBroker, group: str, offsets: Mapping[tuple[str, int], int]) -> None:
    """Commits offsets of a group."""
    with sparklog.connect(broker.address) as log:
        log.commit_group_offsets(group, offsets)


def committed(broker: LiveBroker, group: str = "g") -> dict[tuple[str, int], int]:
    """The committed offsets of a group."""
    with sparklog.connect(broker.address) as log:
        return log.group_offsets(group)


def ask(broker: LiveBroker, *arguments: str, stdin: str | None = None) -> Result:
    """The command line in this process; whatever is not an exit code is raised."""
    words = ("groups", *arguments, "--bootstrap", broker.address)
    result = CliRunner().invoke(app, words, input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def told(result: Result) -> str:
    """Standard error as one line of words."""
    return " ".join(result.stderr.replace("│", "").split())


def with_member(broker: LiveBroker) -> AbstractContextManager[str]:
    """Gives group `g` a member that has t-0, of which 25 is committed, and u-0; yields its id."""
    return join(
        broker,
        "g",
        [("t", 0), ("u", 0)],
        instance_id="one",
        client_id="app",
    )


# ------------------------------------------------------------------------------ looking


def test_list(broker: LiveBroker) -> None:
    """Groups are listed with their members, their topics, and their lag in all partitions."""
    commit(broker, "idle", {("u", 0): 0})
    with with_member(broker):
        heading, first, second = ask(broker, "list").stdout.splitlines()
        found = json.loads(ask(broker, "list", "--json").stdout)
    assert heading.split() == ["group", "state", "members", "protocol", "topics", "lag"]
    assert first.split() == ["g", "Stable", "1", "range", "t,u", "5"]
    assert second.split() == ["idle", "Empty", "0", "-", "u", "0"]
    assert [(each["group"], each["lag"]) for each in found] == [("g", 5), ("idle", 0)]


def test_describe(broker: LiveBroker) -> None:
    """Each partition has its lag in records and in time, and its member."""
    with with_member(broker) as member:
        found = ask(broker, "describe", "g").stdout.splitlines()
    assert found[1].split() == ["state", "Stable"]
    assert found[-4].split()[:6] == ["topic", "partition", "committed", "end", "lag", "behind"]
    first, second, third = (line.split() for line in found[-3:])
    assert first[:5] == ["t", "0", "25", "30", "5"]
    assert first[5].endswith("d")  # the records are of 2023
    assert first[-3:] == [member, "app", "/127.0.0.1"]
    assert second == ["t", "1", "30", "30", "0", "0s", "-", "-", "-"]
    assert third == ["u", "0", "-", "0", "-", "-", member, "app", "/127.0.0.1"]


def test_describe_tells_the_age_of_the_first_record_to_come(
    broker: LiveBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The age is that of the record at the committed offset, not of the last record."""
    monkeypatch.setattr("sparklog.clock.SystemClock.now_us", lambda _: OLD_US + DAY_US)
    found = json.loads(ask(broker, "describe", "g", "--json").stdout)
    first, second = found["partitions"]
    assert (first["lag"], first["behind_seconds"]) == (5, 24 * 3600 - 25)
    assert (second["lag"], second["behind_seconds"]) == (0, 0)
    commit(broker, "g", {("t", 0): 3})  # below the log start: 10 is the next that there is
    found = json.loads(ask(broker, "describe", "g", "--json").stdout)
    assert found["partitions"][0]["lag"] == 20
    assert found["partitions"][0]["behind_seconds"] == 24 * 3600 - 10


def test_describe_members(broker: LiveBroker) -> None:
    """The view of members lists the partitions of each."""
    with with_member(broker) as member:
        found = ask(broker, "describe", "g", "--members").stdout.splitlines()
    assert found[-1].split() == [member, "one", "app", "/127.0.0.1", "t:0", "u:0"]


def test_topic_that_is_gone(broker: LiveBroker) -> None:
    """A member that still has a topic that was deleted does not spoil the view."""
    with with_member(broker):
        broker.delete("u")
        found = json.loads(ask(broker, "describe", "g", "--json").stdout)
        listed = ask(broker, "list").stdout.splitlines()
    assert [(each["topic"], each["partition"]) for each in found["partitions"]] == [
        ("t", 0),
        ("t", 1),
    ]
    assert listed[1].split()[-1] == "5"


def test_unknown_group(broker: LiveBroker) -> None:
    """An unknown group is an error of one line."""
    for arguments in (("describe", "nope"), ("delete", "nope", "--yes")):
        result = ask(broker, *arguments)
        assert result.exit_code == ExitCode.FAILED
        assert result.stderr.startswith(
            "sparklog: Group 'nope' refuses the request: GROUP_ID_NOT_FOUND"
        )
        assert "sparklog groups list" in result.stderr


# ------------------------------------------------------------------------------ resetting


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (("--to-earliest",), {0: 10, 1: 10}),
        (("--to-latest",), {0: 30, 1: 30}),
        (("--to-current",), {0: 25, 1: 30}),
        (("--to-offset", "12"), {0: 12, 1: 12}),
        (("--to-offset", "99"), {0: 30, 1: 30}),
        (("--to-time", "1700000015000"), {0: 15, 1: 15}),
        (("--to-time", "2023-11-14T22:13:36"), {0: 16, 1: 16}),
        (("--to-time", "2999-01-01"), {0: 30, 1: 30}),
        (("--shift-by", "-4"), {0: 21, 1: 26}),
        (("--shift-by", "-99"), {0: 10, 1: 10}),
        (("--shift-by", "3"), {0: 28, 1: 30}),
    ],
)
def test_reset(broker: LiveBroker, target: tuple[str, ...], expected: dict[int, int]) -> None:
    """A reset shows offsets within the log, and commits them with --execute."""
    before = {("t", 0): 25, ("t", 1): 30}
    shown = ask(broker, "reset", "g", "--topic", "t", *target)
    assert shown.exit_code == ExitCode.OK
    assert "--execute commits" in shown.stderr
    rows = [line.split() for line in shown.stdout.splitlines()[1:]]
    assert {int(row[1]): int(row[3]) for row in rows} == expected
    assert [int(row[2]) for row in rows] == [25, 30]
    assert committed(broker) == before
    assert ask(broker, "reset", "g", "--topic", "t", *target, "--execute").exit_code == ExitCode.OK
    assert committed(broker) == {("t", number): to for number, to in expected.items()}


def test_reset_says_what_it_clamps(broker: LiveBroker) -> None:
    """An offset outside the log is printed alongside its replacement."""
    below = ask(broker, "reset", "g", "--topic", "t:0", "--to-offset", "3").stdout
    assert below.splitlines()[1].split(maxsplit=4)[3:] == ["10", "3 is below the log start"]
    beyond = ask(broker, "reset", "g", "--topic", "t:0", "--to-offset", "31").stdout
    assert beyond.splitlines()[1].split(maxsplit=4)[3:] == ["30", "31 is beyond the end"]


def test_reset_of_some(broker: LiveBroker) -> None:
    """Only the partitions that are named are reset; where nothing is committed, none is shifted."""
    chosen = ("--topic", "t:1", "--topic", "u")
    done = ask(broker, "reset", "g", *chosen, "--shift-by", "-1", "--execute")
    assert "no committed offset to shift from" in done.stdout
    assert committed(broker) == {("t", 0): 25, ("t", 1): 29}
    ask(broker, "reset", "g", "--all-topics", "--to-earliest", "--execute")
    assert committed(broker) == {("t", 0): 10, ("t", 1): 10}


def test_reset_from_a_file_that_was_exported(broker: LiveBroker, tmp_path: Path) -> None:
    """The output of --export is the input of --from-file, also for a group that does not exist."""
    exported = ask(broker, "reset", "g", "--all-topics", "--to-current", "--export")
    assert exported.stdout == "t,0,25\nt,1,30\n"
    file = tmp_path / "offsets.csv"
    file.write_text(exported.stdout)
    done = ask(broker, "reset", "new", "--from-file", str(file), "--execute")
    assert done.exit_code == ExitCode.OK
    assert committed(broker, "new") == committed(broker)
    assert ask(broker, "reset", "empty", "--all-topics", "--to-latest").exit_code == ExitCode.FAILED


def test_reset_says_that_a_group_does_not_exist_yet(broker: LiveBroker) -> None:
    """A misspelled name is noticed before --execute makes a group of it."""
    arguments = ("--topic", "t", "--to-earliest")
    assert "no group 'gg' yet" in ask(broker, "reset", "gg", *arguments).stderr
    assert "no group" not in ask(broker, "reset", "g", *arguments).stderr


def test_reset_of_what_is_not_there(broker: LiveBroker) -> None:
    """A partition or a topic that does not exist is refused, and nothing is set."""
    for scope in ("t:2", "nope"):
        result = ask(broker, "reset", "g", "--topic", scope, "--to-earliest", "--execute")
        assert result.exit_code == ExitCode.FAILED
        assert len(result.stderr.splitlines()) == 1
    assert committed(broker) == {("t", 0): 25, ("t", 1): 30}


def test_reset_while_it_has_members(broker: LiveBroker) -> None:
    """A group with members is not reset; the error names them and the remedy."""
    with with_member(broker):
        result = ask(broker, "reset", "g", "--topic", "t", "--to-earliest")
    assert result.exit_code == ExitCode.FAILED
    assert "it has 1 member (app at /127.0.0.1); stop them" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--topic", "t"), "pass exactly one of --to-earliest"),
        (("--topic", "t", "--to-earliest", "--to-latest"), "pass exactly one of --to-earliest"),
        (("--to-earliest",), "pass --topic or --all-topics"),
        (("--topic", "t", "--all-topics", "--to-latest"), "pass --topic or --all-topics"),
        (("--topic", "t:x", "--to-latest"), "use TOPIC or TOPIC:P,P"),
        (("--topic", "t", "--to-time", "noon"), "'noon' is invalid: use a time"),
        (("--from-file", "no-such-file"), "file 'no-such-file' does not exist"),
        (("--from-file", "/"), "cannot read file '/': Is a directory"),
        (("--topic", "t", "--from-file", "pyproject.toml"), "expected topic,partition,offset"),
    ],
)
def test_reset_usage(broker: LiveBroker, arguments: tuple[str, ...], expected: str) -> None:
    """A reset that makes no sense is exit code 2, before anything is asked."""
    result = ask(broker, "reset", "g", *arguments)
    assert result.exit_code == ExitCode.USAGE
    assert expected in told(result)
    assert broker.requests == []


# ------------------------------------------------------------------------------ deleting


def test_delete(broker: LiveBroker) -> None:
    """A group goes with all that it has committed, or what it has committed of one topic."""
    commit(broker, "g", {("u", 0): 0})
    done = ask(broker, "delete", "g", "--offsets-of", "t", "--yes")
    assert done.stdout == "g: 2 offsets of t deleted\n"
    assert committed(broker) == {("u", 0): 0}
    assert ask(broker, "delete", "g", "--yes").stdout == "g: deleted\n"
    assert json.loads(ask(broker, "list", "--json").stdout) == []


def test_delete_asks(broker: LiveBroker) -> None:
    """Without a terminal to ask on, nothing is deleted."""
    result = ask(broker, "delete", "g")
    assert result.exit_code == ExitCode.USAGE
    assert "cannot ask" in told(result)
    assert committed(broker)
