"""`sparklog users`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sparklog.cli import app
from sparklog.clock import SystemClock
from sparklog.security.scram import Mechanism, is_password
from sparklog.security.state import SecurityState
from sparklog.storage.objects import open_store
from sparklog.storage.security_store import open_security
from sparklog.terminal.commands import ExitCode

PASSWORD = "planted-password"


def ask(root: Path | str, *arguments: str, stdin: str | None = PASSWORD) -> Result:
    """The command line in this process; whatever is not an exit code is raised."""
    result = CliRunner().invoke(app, ("users", *arguments, "--root", str(root)), input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def state(root: Path) -> SecurityState:
    """The security state of a root."""
    found = open_security(open_store(str(root), {}), clock=SystemClock())
    assert found is not None
    return found.look()


def knows(root: Path, name: str, password: str) -> bool:
    """Returns whether the password of a user is right, by both credentials."""
    credentials = state(root).users[name].credentials
    assert credentials.keys() == {*Mechanism}
    found = {is_password(each, credentials[each], password) for each in Mechanism}
    assert len(found) == 1
    return found.pop()


def test_the_life_of_a_user(tmp_path: Path) -> None:
    """Promise: each command does what it says, and the chain names its author."""
    added = ask(tmp_path, "add", "alice", "--password-file", "-", stdin=f"{PASSWORD}\n")
    assert (added.exit_code, added.stdout) == (0, "user alice added\n")
    assert knows(tmp_path, "alice", PASSWORD)
    assert state(tmp_path).author.principal.startswith("Root:")
    file = tmp_path.parent / "password"
    file.write_text("another\r\n")
    ask(tmp_path, "set-password", "alice", "--password-file", str(file))
    assert knows(tmp_path, "alice", "another")
    assert ask(tmp_path, "disable", "alice").stdout == "user alice disabled\n"
    rows = [each.split() for each in ask(tmp_path, "list").stdout.splitlines()]
    assert rows == [["user", "methods", "state"], ["alice", "password", "disabled"]]
    found = json.loads(ask(tmp_path, "list", "--json").stdout)
    assert found == [{"name": "alice", "disabled": True, "methods": ["password"]}]
    ask(tmp_path, "enable", "alice")
    assert not state(tmp_path).users["alice"].disabled
    assert ask(tmp_path, "remove", "alice").exit_code == ExitCode.USAGE
    assert ask(tmp_path, "remove", "alice", "--yes").stdout == "user alice removed\n"
    assert json.loads(ask(tmp_path, "list", "--json").stdout) == []


def test_a_removal_names_what_it_does_not_end(tmp_path: Path) -> None:
    """Promise: an operator learns that a certificate or a token still logs in after a removal."""
    ask(tmp_path, "add", "app", "--method", "oauth")
    removed = ask(tmp_path, "remove", "app", "--yes")
    assert removed.stdout == "user app removed\n"
    assert "its oauth can log in again; add and disable it" in removed.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("add", "alice", "--password-file", "-"), "there is a user of this name"),
        (("add", "bob"), "--password-file FILE"),
        (("add", "bob", "--password-file", "/none"), "No such file"),
        (("remove", "bob", "--yes"), "no such user"),
        (("add", "*", "--password-file", "-"), "reserved"),
        (("set-methods", "alice", "kerberos"), "the methods are certificate, oauth"),
    ],
)
def test_mistakes(tmp_path: Path, arguments: tuple[str, ...], reason: str) -> None:
    """Promise: an error that says what to do, without the password."""
    ask(tmp_path, "add", "alice", "--password-file", "-")
    try:
        found = ask(tmp_path, *arguments)
    except Exception as error:
        told = str(error)
    else:
        assert found.exit_code
        told = " ".join(found.output.split())
    assert reason in told
    assert PASSWORD not in told


def test_users_without_a_password(tmp_path: Path) -> None:
    """Promise: a user may have other methods only, and gets or loses them by a command."""
    ask(tmp_path, "add", "CN=app,O=shop", "--method", "certificate", stdin=None)
    assert state(tmp_path).users["CN=app,O=shop"].credentials == {}
    ask(tmp_path, "set-methods", "CN=app,O=shop", "oauth,certificate")
    listed = json.loads(ask(tmp_path, "list", "--json").stdout)
    assert [each["methods"] for each in listed] == [["certificate", "oauth"]]
    ask(tmp_path, "set-methods", "CN=app,O=shop", "none")
    assert state(tmp_path).users["CN=app,O=shop"].methods == ()


def test_a_user_that_exists_may_stay(tmp_path: Path) -> None:
    """Promise: an init step can be repeated, and does not change the password."""
    ask(tmp_path, "add", "alice", "--password-file", "-")
    again = ask(tmp_path, "add", "alice", "--password-file", "-", "--if-not-exists", stdin="other")
    assert again.stdout == "user alice exists\n"
    assert knows(tmp_path, "alice", PASSWORD)


def test_a_root_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: files that its brokers could not read are not written, as by `sudo`."""
    ask(tmp_path, "add", "alice", "--password-file", "-")
    monkeypatch.setattr("os.geteuid", lambda: 12_345)
    refused = ask(tmp_path, "disable", "alice")
    assert refused.exit_code == ExitCode.USAGE
    assert "could not read a change by 12345" in " ".join(refused.output.replace("│", " ").split())
    assert not state(tmp_path).users["alice"].disabled
    new = tmp_path.parent / "new"
    new.mkdir()
    assert ask(new, "add", "alice", "--password-file", "-").exit_code == ExitCode.USAGE
    assert not any(new.iterdir())


def test_the_first_user_of_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: readers of the bucket do not find it by accident."""
    monkeypatch.setenv("SPARKLOG_STORAGE_ALLOW_HTTP", "true")
    monkeypatch.setenv("SPARKLOG_STORAGE_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("sparklog.cli.users.known_state", lambda *_, **__: None)
    refused = ask("s3://bucket/log", "add", "alice", "--password-file", "-")
    assert refused.exit_code == ExitCode.USAGE
    assert "--beside-the-data" in refused.output
