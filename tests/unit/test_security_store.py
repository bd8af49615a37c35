"""The users of a root: their versions, their files, and changes that are interrupted."""

from __future__ import annotations

import itertools
import os
import stat
import zlib
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog import errors, limits
from sparklog.clock import ManualClock, SystemClock
from sparklog.security import acls, policies, scram, state, users
from sparklog.security.acl import Acl, PatternType, Permission, ResourceType
from sparklog.security.acl import Operation as AclOperation
from sparklog.security.scram import Mechanism
from sparklog.security.state import Author, Mode, Policy, SecurityState, User
from sparklog.storage import packed
from sparklog.storage.metadata.cluster_file import open_cluster
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import LocalStore, MemoryStore, NoFaults
from sparklog.storage.objects.faults import Operation
from sparklog.storage.security_store import (
    SECURITY_SNAPSHOT_EVERY,
    SecurityStore,
    change_security,
    open_security,
)

VERIFIER = scram.verifier_of(Mechanism.SHA_256, "planted-password", salt=b"salt" * 5)
CREDENTIALS = {Mechanism.SHA_256: VERIFIER}
ADMIN = Author(principal="Root:admin@host", at_us=1)
READ_ORDERS = Acl(
    resource=ResourceType.TOPIC,
    name="orders",
    pattern=PatternType.LITERAL,
    principal="User:alice",
    host="*",
    operation=AclOperation.READ,
    permission=Permission.ALLOW,
)
DENY_ALL = msgspec.structs.replace(
    READ_ORDERS, operation=AclOperation.ALL, permission=Permission.DENY
)


def put(known: SecurityStore, **changes: object) -> SecurityState:
    """Makes one version."""
    return known.change(lambda before: msgspec.structs.replace(before, author=ADMIN, **changes))


def change(store: MemoryStore | LocalStore, what: users.Change, *, create: bool = False) -> None:
    """Changes the users as a command does."""
    change_security(store, what, author=ADMIN, clock=SystemClock(), create=create)


def names(store: MemoryStore) -> set[str]:
    """The names of a root's users."""
    found = open_security(store, clock=SystemClock())
    assert found is not None
    return set(found.look().users)


USERS = st.dictionaries(
    st.sampled_from(["alice", "bob", "Ñandú,="]),
    st.builds(
        lambda number, is_disabled: User(
            id=f"u{number}", credentials=CREDENTIALS, disabled=is_disabled
        ),
        st.integers(0, 3),
        st.booleans(),
    ),
)


@settings(max_examples=40)
@given(st.lists(USERS, min_size=1, max_size=6))
def test_readers_see_what_was_put(versions: list[dict[str, User]]) -> None:
    """Promise: readers that follow each version, and that start from a snapshot, agree."""
    clock = ManualClock()
    store = MemoryStore(clock)
    writer, follower = (SecurityStore(store, "id", clock=clock) for _ in range(2))
    first = state.first_state()
    writer.change(lambda _: first)
    for known in itertools.islice(itertools.cycle(versions), SECURITY_SNAPSHOT_EVERY + 3):
        put(writer, users=known)
        assert follower.refresh() == writer.current
    late = SecurityStore(store, "id", clock=clock).refresh()
    assert late == writer.current
    assert (late.author, late.salt_key) == (ADMIN, first.salt_key)


def test_only_the_user_of_the_brokers_can_read_it(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Promise: files 0600 in folders 0700, though the umask leaves more; the rest follows it."""
    store = LocalStore(str(tmp_path / "root"))
    known = SecurityStore(store, "id", clock=SystemClock())
    before = os.umask(0o022)
    request.addfinalizer(lambda: os.umask(before))
    for _ in range(SECURITY_SNAPSHOT_EVERY):
        put(known, salt_key=bytes(32))
    store.put_new("topics/t/file", b"x")
    assert store.put_all_new([("security/id/a", b"x"), ("security/id/b", b"x")]) == [None, None]

    def modes(path: Path) -> set[int]:
        return {stat.S_IMODE(each.stat().st_mode) for each in (path, *path.rglob("*"))}

    found = tmp_path / "root" / "security"
    assert {stat.S_IMODE(each.stat().st_mode) for each in (found, found / "id")} == {0o700}
    assert modes(found) == {0o700, 0o600}
    assert modes(tmp_path / "root" / "topics").isdisjoint({0o700, 0o600})


def test_acls_policy_and_root_key_are_part_of_it(clock: ManualClock) -> None:
    """Promise: a reader gets them from single versions and from a snapshot, as they were put."""
    store = MemoryStore(clock)
    writer, follower = (SecurityStore(store, "id", clock=clock) for _ in range(2))
    first = state.first_state()
    writer.change(lambda _: first)
    for change in (
        acls.added([READ_ORDERS, DENY_ALL]),
        policies.with_policy(mode=Mode.OBSERVE, add_super_users=["User:admin"]),
        acls.removed([READ_ORDERS]),
        policies.with_policy(mode=Mode.ENFORCE, allow_everyone=True),
    ):
        before = writer.current
        writer.change(change)
        assert follower.refresh() == writer.current != before
    found = writer.current
    assert found.acls == {DENY_ALL}
    assert found.root_key == first.root_key
    assert found.policy == Policy(
        mode=Mode.ENFORCE, super_users=("User:admin",), allow_everyone_if_no_acl_found=True
    )
    while writer.current.version < SECURITY_SNAPSHOT_EVERY:
        put(writer, salt_key=bytes([writer.current.version]))
    store.delete([f"security/id/{version:020d}.json" for version in range(1, 20)])
    assert SecurityStore(store, "id", clock=clock).refresh() == writer.current


@pytest.mark.parametrize("has_snapshot", [False, True])
def test_a_state_of_a_release_without_acls(has_snapshot: bool, clock: ManualClock) -> None:
    """Promise: it is read, and evaluates no ACLs."""
    store = MemoryStore(clock)
    version = SECURITY_SNAPSHOT_EVERY if has_snapshot else 1
    author = {"principal": ADMIN.principal, "at_us": ADMIN.at_us}
    alice = {"id": "u", "credentials": {}, "epoch": 1, "disabled": True}
    common = {"version": version, "change_id": "c", "salt_key": "c2FsdA==", "author": author}
    delta: dict[str, object] = {"previous": "", "users": {"alice": alice}, **common}
    if has_snapshot:
        content = msgspec.json.encode({"names": ["alice"], "users": [alice], **common})
        store.put_new(f"security/id/{version:020d}.snapshot", packed.pack(b"SLS1", content))
        delta["snapshot_crc"] = zlib.crc32(content)
    store.put_new(f"security/id/{version:020d}.json", msgspec.json.encode(delta))
    known = SecurityStore(store, "id", clock=clock)
    found = known.refresh()
    assert found == SecurityState(
        version=version,
        change_id="c",
        users={"alice": User(id="u", credentials={}, epoch=1, disabled=True)},
        salt_key=b"salt",
        author=ADMIN,
    )
    assert found.policy.mode is Mode.OFF
    assert known.change(policies.with_policy(mode=Mode.OBSERVE)).users == found.users


@pytest.mark.parametrize("suffix", [".json", ".snapshot"])
@pytest.mark.parametrize("damage", [b"", b"{}", b"SLS1", b"\xff" * 64])
def test_a_damaged_version_is_reported(suffix: str, damage: bytes, clock: ManualClock) -> None:
    """Promise: by its path; a broker does not continue with another state."""
    store = MemoryStore(clock)
    known = SecurityStore(store, "id", clock=clock)
    for _ in range(SECURITY_SNAPSHOT_EVERY):
        put(known, salt_key=bytes(32))
    path = f"security/id/{SECURITY_SNAPSHOT_EVERY:020d}{suffix}"
    store.put(path, damage)
    if suffix == ".json":  # a reader that starts from the snapshot does not read it
        store.delete([path.replace(".json", ".snapshot")])
    with pytest.raises(errors.CorruptObject, match=f"{SECURITY_SNAPSHOT_EVERY}{suffix}"):
        SecurityStore(store, "id", clock=clock).refresh()


def test_a_field_of_a_newer_release_is_not_ignored(clock: ManualClock) -> None:
    """Promise: it may exclude a user whom this release would admit."""
    store = MemoryStore(clock)
    put(SecurityStore(store, "id", clock=clock), salt_key=bytes(32))
    path = f"security/id/{1:020d}.json"
    known = msgspec.json.decode(store.get(path))
    store.put(path, msgspec.json.encode({**known, "banned": ["alice"]}))
    with pytest.raises(errors.CorruptObject, match=r"banned.*a newer release"):
        SecurityStore(store, "id", clock=clock).refresh()


def test_nothing_secret_is_printed() -> None:
    """Promise: neither the key nor a verifier, by a state, a user or a delta."""
    first = state.first_state()
    after = msgspec.structs.replace(
        first, version=1, users={"alice": User(id="u", credentials=CREDENTIALS)}
    )
    shown = repr((after, after.users, state.delta_of(SecurityState(), after)))
    assert VERIFIER.stored_key not in shown.encode("unicode_escape")
    secrets = [
        first.salt_key,
        first.root_key,
        VERIFIER.stored_key,
        VERIFIER.server_key,
        VERIFIER.salt,
    ]
    assert not any(repr(each) in shown for each in secrets)


# ------------------------------------------------------------------------------ changes


class Killed(BaseException):
    """Ends a program at an operation of the store."""


class Kill(NoFaults):
    """Kills the program at the n-th moment of the store's operations."""

    def __init__(self, after: int) -> None:
        self.left = after

    def _count(self, _operation: Operation, _path: str) -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed

    before = after = _count


def test_a_first_user_that_was_interrupted_is_added_again() -> None:
    """Promise: killed at any operation of the store, the command can be repeated, once.

    Either the repetition adds the user, or it finds it. The remains of a killed attempt count for
    nothing else.
    """
    outcomes = set()
    for moment in itertools.count(1):
        kill = Kill(moment)
        store = MemoryStore(SystemClock(), faults=kill)
        try:
            change(store, users.added("alice", CREDENTIALS), create=True)
        except Killed:
            pass
        else:
            break
        kill.left = 0
        try:
            change(store, users.added("alice", CREDENTIALS), create=True)
        except errors.BadOption:
            outcomes.add("found")
        else:
            outcomes.add("added")
        change(store, users.added("bob", CREDENTIALS))
        assert names(store) == {"alice", "bob"}
    assert outcomes == {"added", "found"}
    assert moment > 10


def test_other_users_lose_the_permissions_that_a_copy_gave_them(tmp_path: Path) -> None:
    """Promise: a root that was copied or restored is private again once it is opened."""
    store = LocalStore(str(tmp_path / "root"))
    change(store, users.added("alice", CREDENTIALS), create=True)
    folder = tmp_path / "root" / "security"
    for each in (folder, *folder.rglob("*")):
        each.chmod(0o755 if each.is_dir() else 0o644)
    assert open_security(store, clock=SystemClock()) is not None
    found = {stat.S_IMODE(each.stat().st_mode) for each in (folder, *folder.rglob("*"))}
    assert found == {0o700, 0o600}


def test_permissions_that_cannot_be_changed_stop_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: a file of another user, a link or one that vanishes does not keep a broker down."""
    store = LocalStore(str(tmp_path / "root"))
    change(store, users.added("alice", CREDENTIALS), create=True)
    folder = tmp_path / "root" / "security"
    outside = tmp_path / "outside"
    outside.touch(0o644)
    (folder / "link").symlink_to(outside)
    (folder / "broken").symlink_to(tmp_path / "none")
    folder.chmod(0o750)
    monkeypatch.setattr(os, "chmod", mock.Mock(side_effect=PermissionError))
    assert store.make_private("security") == [str(folder)]
    assert open_security(store, clock=SystemClock()) is not None
    monkeypatch.setattr(os, "lstat", mock.Mock(side_effect=FileNotFoundError))
    assert store.make_private("security") == []
    assert stat.S_IMODE(outside.stat().st_mode) & 0o044


def test_nothing_is_written_for_no_change(store: MemoryStore) -> None:
    """Promise: an init step that is repeated leaves no versions, and keeps the password."""
    change(store, users.added("alice", CREDENTIALS), create=True)
    for what in (
        users.added("alice", {}, may_exist=True),
        users.disabled("alice", False),
        users.with_credentials("alice", CREDENTIALS),
    ):
        change(store, what)
    found = open_security(store, clock=SystemClock())
    assert found is not None
    assert found.look().version == 1


def test_two_programs_that_add_the_first_user() -> None:
    """Promise: both users exist, whichever was first."""

    class Rival(NoFaults):
        """Adds another first user just before the metadata names ours."""

        def before(self, operation: Operation, path: str) -> None:
            if operation.startswith("put") and path.startswith("meta/") and not self.done:
                self.done = True
                change(store, users.added("rival", CREDENTIALS), create=True)

        done = False

    store = MemoryStore(SystemClock(), faults=Rival())
    change(store, users.added("alice", CREDENTIALS), create=True)
    assert names(store) == {"alice", "rival"}
    assert len({each.name.split("/")[0] for each in store.walk("security")}) == 1


def test_only_a_new_user_creates_a_root(store: MemoryStore) -> None:
    """Promise: a misspelt root does not become one."""
    with pytest.raises(errors.NotARoot):
        change(store, users.removed("alice"))
    open_cluster(store, clock=SystemClock(), create=True)
    with pytest.raises(errors.BadOption, match="no such user"):
        change(store, users.removed("alice"))
    assert open_security(store, clock=SystemClock()) is None


def test_users_need_their_feature_level(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: a root that older brokers may serve has no users, which those would not ask for."""
    monkeypatch.setattr(limits, "LEVEL", limits.SECURITY_LEVEL - 1)
    open_cluster(store, clock=SystemClock(), create=True)
    MetadataStore(store, clock=SystemClock()).change(
        lambda known: msgspec.structs.replace(known, level=limits.LEVEL)
    )
    monkeypatch.undo()
    with pytest.raises(errors.NeedsFeatureLevel, match="sparklog cluster upgrade"):
        change(store, users.added("alice", CREDENTIALS), create=True)
    assert not list(store.walk("security"))


def test_a_lost_chain_is_not_an_empty_one(store: MemoryStore) -> None:
    """Promise: a root whose security/ was deleted is reported; it does not begin again."""
    change(store, users.added("alice", CREDENTIALS), create=True)
    store.delete([f"security/{each.name}" for each in store.walk("security")])
    with pytest.raises(errors.CorruptObject, match="restore it from a backup"):
        change(store, users.added("bob", CREDENTIALS))


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (lambda: users.added("", CREDENTIALS), "is empty"),
        (lambda: users.added("a" * 256, CREDENTIALS), "more than 255 bytes"),
        (lambda: users.added("a\n", CREDENTIALS), "not printable"),
        (lambda: users.added("a\udc80", CREDENTIALS), "not printable"),
        (lambda: users.added(" alice", CREDENTIALS), "begins or ends with a space"),
        (lambda: users.added("*", CREDENTIALS), "reserved"),
        (lambda: users.added("__root", CREDENTIALS), "reserved"),
        (lambda: users.added("anonymous", CREDENTIALS), "reserved"),
        (lambda: users.credentials_of(""), "is empty"),
        (lambda: users.credentials_of("p" * 1_025), "more than 1024 bytes"),
        (lambda: users.credentials_of("planted\r"), "not printable"),
    ],
)
def test_names_and_passwords_that_are_refused(what: object, reason: str) -> None:
    """Promise: with a reason, and without the password."""
    assert callable(what)
    with pytest.raises(errors.BadOption, match=reason) as refused:
        what()
    assert "planted" not in str(refused.value)


def test_a_root_has_a_bounded_number_of_users() -> None:
    """Promise: what brokers are measured with."""
    full = {f"u{n}": User(id="x", credentials=CREDENTIALS) for n in range(users.USERS_MAX)}
    with pytest.raises(errors.BadOption, match="at most 10,000 users"):
        users.added("alice", CREDENTIALS)(SecurityState(users=full))
