"""`sparklog acls` and `sparklog security`."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from sparklog.broker.log import takeover
from sparklog.cli import app
from sparklog.clock import SystemClock
from sparklog.security.state import Mode, SecurityState
from sparklog.storage.metadata.cluster_file import open_cluster
from sparklog.storage.metadata.liveness import Heartbeat, write_heartbeat
from sparklog.storage.metadata.model import BrokerRegistration
from sparklog.storage.metadata.processes import this_process
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import LocalStore, open_store
from sparklog.storage.security_store import open_security
from sparklog.terminal.commands import ExitCode

ALICE = "User:alice"
ADMIN = ("--super-user", "User:admin")


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    """A root without a security state."""
    open_cluster(LocalStore(str(tmp_path)), clock=SystemClock(), create=True)
    return tmp_path


def ask(root: Path | str, *arguments: str) -> Result:
    """The command line in this process; whatever is not an exit code is raised."""
    result = CliRunner().invoke(app, (*arguments, "--root", str(root)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def done(root: Path, *arguments: str) -> str:
    """The output of a command that succeeds."""
    result = ask(root, *arguments)
    assert result.exit_code == ExitCode.OK, result.output
    return result.stdout


def state(root: Path) -> SecurityState:
    """The security state of a root."""
    found = open_security(open_store(str(root), {}), clock=SystemClock())
    assert found is not None
    return found.look()


def shown(root: Path, *arguments: str) -> set[tuple[str, ...]]:
    """The ACLs that `list` prints, without the fields that have the usual value."""
    usual = {"LITERAL", ALICE, "ALLOW", "*"}
    found = json.loads(done(root, "acls", "list", "--json", *arguments))
    return {tuple(word for word in each.values() if word not in usual) for each in found}


def refusal(root: Path | str, *arguments: str) -> str:
    """The error of a command that fails, on one line."""
    result = ask(root, *arguments)
    assert result.exit_code
    return " ".join(result.output.replace("│", " ").split())


# ------------------------------------------------------------------------------ ACLs


def test_the_life_of_acls(root: Path) -> None:
    """Promise: ACLs that were added are listed, and those to remove are printed; others stay."""
    words = ("acls", "add", ALICE, "--operation", "read", "--topic", "orders")
    assert done(root, *words) == "ALLOW User:alice READ on topic orders\n1 ACL added\n"
    assert done(root, *words, "--operation", "DescribeConfigs") == (
        "ALLOW User:alice DESCRIBE_CONFIGS on topic orders\n1 ACL added, 1 existed\n"
    )
    version = state(root).version
    assert done(root, *words) == "0 ACLs added, 1 existed\n"
    assert state(root).version == version
    done(root, "acls", "add", "User:bob", "--deny", "--operation", "all", "--cluster")
    assert done(root, "acls", "list").splitlines()[1].split() == [
        "TOPIC",
        "orders",
        "LITERAL",
        ALICE,
        "ALLOW",
        "READ",
        "*",
    ]
    assert "pass --yes" in refusal(root, "acls", "remove", ALICE)
    removed = done(root, "acls", "remove", ALICE, "--operation", "read", "--yes")
    assert removed == "ALLOW User:alice READ on topic orders\n1 ACL removed\n"
    assert shown(root) == {
        ("TOPIC", "orders", "DESCRIBE_CONFIGS"),
        ("CLUSTER", "kafka-cluster", "User:bob", "DENY", "ALL"),
    }
    assert "no ACL matches" in refusal(root, "acls", "remove", "User:bob", "--yes")
    done(root, "acls", "remove", "User:bob", "--deny", "--yes")
    done(root, "acls", "remove", "--topic", "orders", "--yes")
    assert shown(root) == set()


def test_operations_of_producers_and_consumers(root: Path) -> None:
    """Promise: those that `kafka-acls.sh` adds, for each resource that is named."""
    both = ("acls", "add", ALICE, "--producer", "--consumer", "--topic", "a", "--topic", "b")
    done(root, *both, "--group", "g", "--transactional-id", "t", "--host", "10.0.0.7")
    operations = ("READ", "WRITE", "CREATE", "DESCRIBE")
    assert shown(root) == {
        *(("TOPIC", topic, each, "10.0.0.7") for topic in "ab" for each in operations),
        ("GROUP", "g", "READ", "10.0.0.7"),
        ("TRANSACTIONAL_ID", "t", "WRITE", "10.0.0.7"),
        ("TRANSACTIONAL_ID", "t", "DESCRIBE", "10.0.0.7"),
    }
    remove = ("acls", "remove", ALICE, "--producer", "--topic", "a", "--topic", "b")
    done(root, *remove, "--transactional-id", "t", "--yes")
    assert {each[:3] for each in shown(root)} == {
        ("TOPIC", "a", "READ"),
        ("TOPIC", "b", "READ"),
        ("GROUP", "g", "READ"),
    }


def test_lists_of_one_resource_have_what_concerns_it(root: Path) -> None:
    """Promise: its own ACLs, those of its prefixes and those of every name."""
    read = ("acls", "add", ALICE, "--operation", "read")
    done(root, *read, "--topic", "orders", "--topic", "other", "--topic", "*", "--group", "orders")
    done(root, *read, "--topic", "ord", "--prefixed")
    topic = {("TOPIC", "orders", "READ"), ("TOPIC", "READ"), ("TOPIC", "ord", "PREFIXED", "READ")}
    group = {("GROUP", "orders", "READ")}
    assert shown(root, "--topic", "orders") == topic
    assert shown(root, "--topic", "orders", "--group", "orders") == topic | group
    assert shown(root, "--principal", "User:bob") == set()
    assert len(shown(root, "--principal", ALICE)) == 5
    done(root, "acls", "remove", "--topic", "ord", "--prefixed", "--yes")
    assert len(shown(root)) == 4


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("add", ALICE, "--operation", "read"), "no resource is named"),
        (("add", ALICE, "--topic", "t"), "no operation is named"),
        (("add", ALICE, "--operation", "raed", "--topic", "t"), "the operations are all, read"),
        (("add", ALICE, "--operation", "any", "--topic", "t"), "there is no operation 'any'"),
        (("add", "alice", "--operation", "read", "--topic", "t"), "write User:alice"),
        (("add", ALICE, "--operation", "write", "--group", "g"), "operations on a group are"),
        (("add", ALICE, "--producer", "--group", "g"), "--producer needs --topic"),
        (("add", ALICE, "--consumer", "--topic", "t"), "--consumer needs --topic and --group"),
        (("add", ALICE, "--producer", "--topic", "t", "--cluster"), "need --operation"),
        (("add", ALICE, "--producer", "--topic", "t", "--group", "g"), "need --operation"),
        (("add", ALICE, "--producer", "--topic", "t", "--deny"), "without --operation and --deny"),
        (("add", ALICE, "--producer", "--topic", "*", "--prefixed"), "without --prefixed"),
        (("remove", "--yes"), "pass a principal or a resource"),
        (("remove", "alice", "--yes"), "write User:alice"),
        (("remove", ALICE, "--yes"), "no ACL matches"),
    ],
)
def test_mistakes(root: Path, arguments: tuple[str, ...], reason: str) -> None:
    """Promise: an error that says what to do; nothing is written."""
    assert reason in refusal(root, "acls", *arguments)
    assert open_security(LocalStore(str(root)), clock=SystemClock()) is None


def test_acls_without_an_effect_are_noticed(root: Path) -> None:
    """Promise: those of a user that does not exist, and all while they are not enforced."""
    words = ("acls", "add", "--operation", "read", "--topic", "orders")
    told = ask(root, *words, ALICE).stderr
    assert "no user alice yet" in told
    assert "not enforced yet" in told
    done(root, "security", "enforce", "--yes")
    assert ask(root, *words, "User:*").stderr == ""


def test_nothing_makes_a_root_of_a_misspelt_path(tmp_path: Path) -> None:
    """Promise: neither ACLs nor a policy; only the first user does."""
    for words in (
        ("acls", "add", ALICE, "--producer", "--topic", "t"),
        ("acls", "list"),
        ("security", "status"),
        ("security", "observe"),
    ):
        assert "not a" in refusal(tmp_path / "none", *words)
    assert not any(tmp_path.iterdir())


def test_the_first_state_of_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: its place is accepted with the first user, and by no other command."""
    monkeypatch.setenv("SPARKLOG_STORAGE_ALLOW_HTTP", "true")
    monkeypatch.setenv("SPARKLOG_STORAGE_ENDPOINT", "http://127.0.0.1:9")
    for module in ("acls", "security"):
        monkeypatch.setattr(f"sparklog.cli.{module}.known_state", lambda _: None)
    for words in (
        ("acls", "add", ALICE, "--producer", "--topic", "t"),
        ("security", "enforce", *ADMIN),
    ):
        assert "--beside-the-data" in refusal("s3://bucket/log", *words)


# ------------------------------------------------------------------------------ policy


def test_the_modes(root: Path) -> None:
    """Promise: each mode is in force; a change that opens the log, or was not observed, asks."""
    assert json.loads(done(root, "security", "status", "--json")) == {
        "mode": "off",
        "super_users": [],
        "allow_everyone_if_no_acl_found": False,
        "users": 0,
        "acls": 0,
        "version": 0,
        "author": None,
        "host": None,
        "changed_at": None,
    }
    assert done(root, "security", "off").startswith("nothing to change")
    assert "pass --yes" in refusal(root, "security", "enforce", *ADMIN)
    assert "there is no user admin yet" in ask(root, "security", "observe", *ADMIN).stderr
    done(root, "security", "enforce", *ADMIN, "--yes")
    assert done(root, "security", "enforce").startswith("nothing to change")
    found = json.loads(done(root, "security", "status", "--json"))
    assert (found["mode"], found["super_users"], found["version"]) == ("enforce", ["User:admin"], 2)
    assert found["author"].startswith("Root:")
    assert found["changed_at"].endswith("Z")
    for opened in ("observe", "off"):
        assert "pass --yes" in refusal(root, "security", opened)
    done(root, "security", "off", "--yes")
    assert state(root).policy.mode is Mode.OFF
    assert state(root).policy.super_users == ("User:admin",)


def test_a_leap_is_warned_about(root: Path) -> None:
    """Promise: the command shows what will hold, and that nothing was observed."""
    result = ask(root, "security", "enforce", "--allow-everyone-if-no-acl-found", "--yes")
    assert "a resource is open to everybody" in result.stdout
    assert "`sparklog security observe` would first log" in result.stderr
    assert "there is no super user" in result.stderr
    done(root, "security", "enforce", *ADMIN, "--no-allow-everyone-if-no-acl-found")
    done(root, "acls", "add", ALICE, "--producer", "--topic", "t")
    done(root, "security", "enforce", "--remove-super-user", "User:admin")
    status = done(root, "security", "status")
    assert "a resource is open to super users only" in status
    assert "super users    -" in status


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("enforce", "--yes"), "add ACLs, or a super user"),
        (("enforce", "--yes", "--super-user", "admin"), "write User:admin"),
        (("observe", "--remove-super-user", "User:admin"), "not a super user"),
    ],
)
def test_policies_that_are_refused(root: Path, arguments: tuple[str, ...], reason: str) -> None:
    """Promise: an error that says what to do; nothing is written."""
    assert reason in refusal(root, "security", *arguments)
    assert open_security(LocalStore(str(root)), clock=SystemClock()) is None


def test_a_broker_whose_flight_others_can_reach(root: Path) -> None:
    """Promise: ACLs are not enforced while it lives, as its clients could not use Flight."""
    store, clock = LocalStore(str(root)), SystemClock()
    registration = BrokerRegistration(epoch=0, flight="k1:8815", process=this_process())
    metadata = MetadataStore(store, clock=clock)
    leadership = takeover.acquire(store, metadata, 1, registration, clock=clock, check_alive=False)
    beat = Heartbeat(
        broker=1,
        epoch=leadership.epoch,
        flight="k1:8815",
        at_us=clock.now_us(),
        monotonic_seconds=clock.monotonic(),
        process=this_process(),
    )
    write_heartbeat(store, beat)
    told = refusal(root, "security", "enforce", *ADMIN, "--yes")
    assert "broker 1 has the Flight address k1:8815" in told
    write_heartbeat(store, msgspec.structs.replace(beat, stopped=True))
    done(root, "security", "enforce", *ADMIN, "--yes")
