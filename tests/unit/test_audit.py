"""The audit: the events that get a line, their bounds, and the file."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker import audit as audit_module
from sparklog.broker.audit import Audit, AuditFile
from sparklog.broker.audit_events import (
    EQUAL_SECONDS,
    ITEMS_NAMED,
    LINES_PER_SECOND,
    QUEUE_BYTES,
    STEADY_SECONDS,
    TEXT_LENGTH,
    AdminRequest,
    AuditLines,
    Login,
    RootCall,
    change_of,
    request_of,
)
from sparklog.broker.kafka.audited import note_request
from sparklog.broker.refused_work import RefusedWork, Work
from sparklog.clock import ManualClock
from sparklog.listeners import SASL_SSL, Listener
from sparklog.security import users
from sparklog.security.acl import Operation, ResourceType
from sparklog.security.login_method import LoginMethod
from sparklog.security.quota import QuotaEntity, QuotaKey
from sparklog.security.state import Author, Mode, Policy, SecurityState, StateDelta, delta_of
from tests.support.acls import acl
from tests.support.turns import in_turns
from tests.support.waiting import wait_until


class World:
    """Lines that a test takes, and their clock."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.lines = AuditLines(7, clock=self.clock)

    def take(self, **given: Any) -> list[dict[str, Any]]:
        return [json.loads(each) for each in self.lines.take(**given)]


@pytest.fixture(name="world")
def _world() -> World:
    return World()


def login(user: str, **more: Any) -> Login:
    """Returns a login of a user that has failed."""
    fields = {"outcome": "failure", "listener": "OUT", "mechanism": "PLAIN", "host": "10.0.0.1"}
    return Login(**{**fields, "principal": f"User:{user}", "reason": "wrong", **more})


def deletion(name: str) -> AdminRequest:
    """Returns the deletion of a topic by alice."""
    return request_of("DeleteTopics", "NONE", "User:alice", [name], resource="TOPIC")


# ------------------------------------------------------------------------------ lines


def test_lines_have_a_time_a_broker_and_the_event(world: World) -> None:
    """Promise: a line is one object of JSON, which begins with the time in UTC."""
    world.lines.note(login("alice"))
    (data,) = world.lines.take()
    assert data.decode() == (
        '{"time":"2023-11-14T22:13:20.000+00:00","broker":7,"event":"login","outcome":"failure",'
        '"listener":"OUT","mechanism":"PLAIN","principal":"User:alice","host":"10.0.0.1",'
        '"reason":"wrong"}\n'
    )


def test_equal_logins_are_counted(world: World) -> None:
    """Promise: the first of ten seconds has a line, and the others together one more."""
    for _ in range(1_000):
        world.lines.note(login("alice"))
    world.lines.note(login("bob"))
    assert [each["principal"] for each in world.take()] == ["User:alice", "User:bob"]
    assert world.take() == []
    world.clock.advance(EQUAL_SECONDS)
    (counted,) = world.take()
    assert (counted["principal"], counted["count"]) == ("User:alice", 999)
    world.lines.note(login("alice"))
    assert [each.get("count") for each in world.take()] == [None]


def test_a_count_precedes_the_next_equal_event(world: World) -> None:
    """Promise: no event is lost between two windows that no thread has looked at in time."""
    for _ in range(3):
        world.lines.note(login("alice"))
    world.clock.advance(2 * EQUAL_SECONDS)
    world.lines.note(login("alice"))
    assert [each.get("count") for each in world.take()] == [None, 2, None]


def test_the_last_lines_have_the_counts(world: World) -> None:
    """Promise: a broker that stops writes the numbers that could still have grown."""
    for _ in range(3):
        world.lines.note(login("alice"))
    world.take()
    assert [each["count"] for each in world.take(is_last=True)] == [2]


def test_a_flood_is_bounded_and_counted(world: World) -> None:
    """Promise: 100 lines in a second, and then one with the number of the others."""
    for number in range(1_000):
        world.lines.note(login(f"user-{number}"))
    *found, dropped = world.take()
    assert len(found) == LINES_PER_SECOND
    assert dropped["event"] == "dropped"
    assert (dropped["of"], dropped["count"]) == ("failed logins and refusals", 900)
    assert world.lines.dropped == 900
    world.clock.advance(1)
    assert world.lines.note(login("late"))


def test_a_flood_does_not_hide_changes(world: World) -> None:
    """Promise: changes, requests and calls with the root's keys have budgets of their own."""
    for number in range(1_000):
        world.lines.note(login(f"user-{number}"))
    world.lines.note(deletion("orders"))
    world.lines.note(RootCall(listener="OUT", claimed_principal="Root:x", host="10.0.0.1"))
    found = Counter(each["event"] for each in world.take())
    assert found == {"login": LINES_PER_SECOND, "dropped": 1, "request": 1, "root": 1}


def test_a_flood_does_not_hide_a_login(world: World) -> None:
    """Promise: a client that has guessed a password cannot hide that by further guesses."""
    for number in range(1_000):
        world.lines.note(login(f"user-{number}"))
    world.lines.note(login("alice", outcome="success"))
    (found,) = [each for each in world.take() if each.get("outcome") == "success"]
    assert found["principal"] == "User:alice"


def test_requests_are_never_merged(world: World) -> None:
    """Promise: each request that changes something has a line, even if it equals another one."""
    for _ in range(3):
        world.lines.note(deletion("orders"))
    assert len(world.take()) == 3


def test_calls_of_a_program_are_counted_for_an_hour(world: World) -> None:
    """Promise: the other brokers, which call all the time, have two lines an hour."""
    call = RootCall(listener="OUT", claimed_principal="Root:x", host="10.0.0.1")
    for _ in range(int(STEADY_SECONDS)):
        world.lines.note(call)
        world.clock.advance(1)
    first, counted = world.take()
    assert "count" not in first
    assert counted["count"] == STEADY_SECONDS - 1
    assert first["claimed_principal"] == "Root:x"


def test_memory_is_bounded_while_nothing_is_written(world: World) -> None:
    """Promise: a second after second without a writer, lines of a megabyte wait at most."""
    for number in range(20_000):
        world.lines.note(login(f"{number}-{'x' * 200}"))
        world.clock.advance(0.02)
    assert world.lines.is_full
    *found, dropped = world.lines.take()
    assert QUEUE_BYTES <= sum(map(len, found)) < QUEUE_BYTES + 1_000
    assert json.loads(dropped)["count"] == 20_000 - len(found)
    assert not world.lines.is_full


def test_text_is_escaped_and_bounded(world: World) -> None:
    """Promise: control characters, other scripts and long names cannot spoil a line or a log."""
    name = "a\n\x1b[2J\x7f\u202e\u00e4" + "x" * 1_000_000
    world.lines.note(request_of("DeleteTopics", "NONE", f"User:{name}", [name, "t"]))
    (data,) = world.lines.take()
    assert data.isascii()
    assert data[:-1].decode().isprintable()
    assert len(data) < 2_000
    found = json.loads(data)
    assert found["names"] == [name[:TEXT_LENGTH] + "…", "t"]


def test_a_request_for_many_names_has_one_line(world: World) -> None:
    """Promise: it has the first hundred, and the number of the others."""
    names = [f"t{number}" for number in range(1_000)]
    world.lines.note(request_of("DeleteTopics", "NONE", "Root:x@host", names))
    (found,) = world.take()
    assert found["names"] == names[:ITEMS_NAMED]
    assert found["more_names"] == 1_000 - ITEMS_NAMED
    assert found["claimed_principal"] == "Root:x@host"
    assert "principal" not in found


# ------------------------------------------------------------------------------ changes


def test_a_request_for_many_topics_lets_others_continue(world: World) -> None:
    """Promise: a deletion of tens of thousands of topics is noted in turns, as it is handled."""
    code = ErrorCode.unknown_topic_or_partition
    reply = {"responses": [{"name": f"t-{each}", "error_code": code} for each in range(50_000)]}
    listener = Listener("OUT", SASL_SSL, "")
    access = mock.Mock(principal="User:mallory")
    request = mock.Mock(api_key=20, body=object(), access=access, listener=listener)
    request.client_host = "/10.0.0.1"
    audit = mock.Mock(note=world.lines.note)
    _, turns = in_turns(lambda scheduler: note_request(audit, request, reply, scheduler))
    (line,) = world.take()
    assert (line["action"], line["outcome"]) == ("DeleteTopics", code.name.upper())
    assert len(line["names"]) + line["more_names"] == 50_000
    assert turns > 10


def delta_between(before: SecurityState, after: SecurityState | None) -> StateDelta:
    """Returns the delta to the next version; None: nothing has changed."""
    made = Author(principal="User:admin", host="10.0.0.9", at_us=1_700_000_000_000_000)
    following = msgspec.structs.replace(
        after or before, version=before.version + 1, change_id="x", author=made
    )
    return delta_of(before, following)


def test_a_change_names_what_has_changed() -> None:
    """Promise: users, ACLs, policy and keys, with the author of the version, and no secret."""
    credentials = users.credentials_of("secret")
    before = SecurityState(version=4)
    for name in ("gone", "shut", "new-password", "same"):
        before = users.added(name, credentials)(before) or before
    read = acl(ResourceType.TOPIC, "orders", Operation.READ, principal="User:same")
    write = acl(ResourceType.TOPIC, "orders", Operation.WRITE)
    before = msgspec.structs.replace(before, acls=frozenset({read}))
    after = before
    for change in (
        users.removed("gone"),
        users.disabled("shut", True),
        users.with_methods("same", [LoginMethod.CERTIFICATE]),
        users.with_credentials("new-password", users.credentials_of("other"), cut=True),
        users.added("new", credentials),
    ):
        after = change(after) or after
    after = msgspec.structs.replace(
        after,
        acls=frozenset({write}),
        quotas={QuotaEntity(user="same"): {QuotaKey.PRODUCER_BYTE_RATE: 1e6}},
        policy=Policy(mode=Mode.ENFORCE, super_users=("User:admin",)),
        root_key=b"k",
    )
    event = change_of(before, delta_between(before, after))
    assert json.loads(msgspec.json.encode(event)) == {
        "event": "change",
        "version": 5,
        "made_at": "2023-11-14T22:13:20.000+00:00",
        "principal": "User:admin",
        "host": "10.0.0.9",
        "users": {
            "gone": "removed",
            "new": "added",
            "new-password": "password changed, cut",
            "same": "methods: certificate",
            "shut": "disabled",
        },
        "acls_added": ["ALLOW User:ANONYMOUS WRITE on LITERAL TOPIC orders from *"],
        "acls_removed": ["ALLOW User:same READ on LITERAL TOPIC orders from *"],
        "quotas": {"user same": {"producer_byte_rate": 1e6}},
        "policy": {"mode": "enforce", "super_users": ["User:admin"]},
        "others": ["root_key"],
    }


def test_every_field_of_a_delta_is_named() -> None:
    """Promise: a part of the state that a later release adds is named, even if it is not shown."""
    state = SecurityState(version=1)
    for field in ("salt_key", "root_key", "home", "ca"):
        value: Any = b"k" if field.endswith("key") else "k"
        changed = msgspec.structs.replace(state, **{field: value})
        assert [*change_of(state, delta_between(state, changed)).others] == [field]
    assert [*change_of(state, delta_between(state, None)).others] == []


def test_a_large_change_is_bounded() -> None:
    """Promise: a hundred users and ACLs are named, and the others counted."""
    state = SecurityState(version=1)
    many = {acl(ResourceType.TOPIC, f"t{number}", Operation.READ) for number in range(500)}
    event = change_of(state, delta_between(state, msgspec.structs.replace(state, acls=many)))
    assert len(event.acls_added) == ITEMS_NAMED
    assert event.more == 500 - ITEMS_NAMED


# ------------------------------------------------------------------------------ the file


class Running:
    """An audit with its thread, and its file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = ManualClock()
        self.refused = RefusedWork(self.clock)
        self.audit = Audit(path, 7, clock=self.clock, refused=self.refused)

    def found(self, path: Path | None = None) -> list[dict[str, Any]]:
        path = path or self.path
        complete = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(each) for each in complete.splitlines()]

    def wait_for(self, count: int, path: Path | None = None) -> list[dict[str, Any]]:
        wait_until(lambda: len(self.found(path)) >= count, f"{count} lines")
        return self.found(path)


@pytest.fixture(name="running")
def _running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(audit_module, "CHECK_SECONDS", 0.01)
    found = Running(tmp_path / "logs" / "audit.json")
    yield found
    found.audit.close()


def test_only_the_broker_can_read_the_file(running: Running) -> None:
    """Promise: the mode of a new file is 0600, and its folder is created."""
    running.audit.note(deletion("t"))
    running.wait_for(1)
    assert running.path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    """Promise: the error names the setting."""
    with pytest.raises(errors.BadOption, match=r"security\.audit_file"):
        AuditFile(tmp_path)


@pytest.mark.parametrize("creates", [False, True])
def test_the_file_is_opened_again_when_it_was_renamed(running: Running, creates: bool) -> None:
    """Promise: programs that rotate logs need no signal, even if they create the new file."""
    running.audit.note(deletion("t1"))
    running.wait_for(1)
    old = running.path.with_suffix(".1")
    running.path.rename(old)
    if creates:
        running.path.touch()
    running.audit.note(deletion("t2"))
    (line,) = running.wait_for(1)
    assert line["names"] == ["t2"]
    assert [each["names"] for each in running.found(old)] == [["t1"]]


def test_a_full_disk_delays_lines(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: the state is visible while it lasts, and all lines are complete afterwards."""
    is_full = threading.Event()
    is_full.set()
    write, own = os.write, running.audit._file._file

    def fake(file: int, data: bytes) -> int:
        if file != own or not is_full.is_set():
            return write(file, data)
        if len(data) < 50:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[: len(data) // 2])  # as much as there is space for

    monkeypatch.setattr("sparklog.broker.audit.os.write", fake)
    for number in range(3):
        running.audit.note(deletion(f"t{number}"))
    wait_until(lambda: Work.AUDIT_LINES in running.refused.states(), "the state is visible")
    assert "No space left" in running.refused.states()[Work.AUDIT_LINES]
    is_full.clear()
    assert [each["names"] for each in running.wait_for(3)] == [["t0"], ["t1"], ["t2"]]
    running.clock.advance(6)
    wait_until(lambda: not running.refused.states(), "the state has ended")


def test_a_file_system_that_hangs_blocks_nobody(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: events are dropped and counted, and the broker's status says so."""
    goes_on, write, own = threading.Event(), os.write, running.audit._file._file

    def fake(file: int, data: bytes) -> int:
        if file == own:
            goes_on.wait()
        return write(file, data)

    monkeypatch.setattr("sparklog.broker.audit.os.write", fake)
    for number in range(10_000):
        running.audit.note(deletion(f"{number}-{'x' * 200}"))
        running.clock.advance(0.02)
    running.audit.note_if_stuck()
    assert Work.AUDIT_LINES in running.refused.states()
    assert running.audit.lines.dropped
    goes_on.set()
    wait_until(
        lambda: "dropped" in {each["event"] for each in running.found()}, "the number of lost lines"
    )


def test_a_torn_line_spoils_no_other(tmp_path: Path) -> None:
    """Promise: after a power cut in the middle of a line, the next one begins on its own."""
    path = tmp_path / "audit.json"
    path.write_text('{"event":"lo')
    running = Running(path)
    running.audit.note(deletion("t"))
    running.audit.close()
    assert json.loads(path.read_text().splitlines()[1])["names"] == ["t"]


def test_closing_writes_what_is_left(running: Running) -> None:
    """Promise: events that were noted before the broker stops are in the file."""
    for _ in range(5):
        running.audit.note(login("alice"))
    running.audit.close()
    assert [each.get("count") for each in running.found()] == [None, 4]


def test_versions_are_noted_once(running: Running) -> None:
    """Promise: a version that is read again, after a conflict or a failure, has no second line."""
    state = SecurityState(version=1)
    delta = delta_between(state, None)
    for _ in range(2):
        running.audit.changed(state, delta)
    running.audit.close()
    assert [each["version"] for each in running.found()] == [2]


def test_a_start_adds_what_was_changed_meanwhile(tmp_path: Path) -> None:
    """Promise: versions that are in the file already are not repeated; those of a root that was
    restored from a backup count from its own version on.
    """
    path = tmp_path / "audit.json"
    path.write_text('{"version":9}\n{"version":2}\n{"event":"login"}\n')
    states = [SecurityState(version=number, change_id="x") for number in range(1, 4)]
    running = Running(path)
    for state in states[:2]:  # to versions 2 and 3
        running.audit.changed(state, delta_between(state, None))
    running.audit.started(SecurityState(version=2))
    running.audit.changed(states[1], delta_between(states[1], None))
    running.audit.close()
    assert [(each["event"], each["version"]) for each in running.found()[3:]] == [
        ("change", 3),
        ("started", 2),
        ("change", 3),
    ]


def test_a_failure_of_the_audit_does_not_keep_the_broker_from_a_change(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: the broker goes by the new version, and logs that its line is missing."""

    def fail(*_: object) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(audit_module, "change_of", fail)
    state = SecurityState(version=1)
    running.audit.changed(state, delta_between(state, None))
    running.audit.close()
    assert running.found() == []
