"""Authorization at a broker: its looks at the security state, refusals, modes, administration."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from sparklog import errors, limits
from sparklog.broker import authorization as authorization_module
from sparklog.broker.authentication import Identity
from sparklog.broker.authorization import Authorization
from sparklog.broker.kafka.access import Access
from sparklog.broker.refused_work import RefusedWork, Work
from sparklog.broker.security_admin import Administrator, SecurityAdmin
from sparklog.broker.security_watch import SecurityWatch
from sparklog.clock import ManualClock
from sparklog.security import users
from sparklog.security.acl import (
    ANONYMOUS,
    AclFilter,
    AclIndex,
    Operation,
    Permission,
    ResourceType,
)
from sparklog.security.state import Mode, SecurityState
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import MemoryStore
from sparklog.storage.security_store import SecurityStore
from tests.support.acls import acl, set_acls, watch_of
from tests.support.users import add_alice, change_users

TOPIC, GROUP, CLUSTER = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.CLUSTER
READ, WRITE, ALTER = Operation.READ, Operation.WRITE, Operation.ALTER
ALLOWED = acl(TOPIC, "t", READ)
ADMIN = acl(CLUSTER, "kafka-cluster", ALTER)


def chain_id_of(store: MemoryStore, clock: ManualClock) -> str:
    """Returns what the metadata of the root says of its security state."""
    return MetadataStore(store, clock=clock).refresh().security


class World:
    """A root whose ACLs a test changes, and a broker that has looked at them once."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        set_acls(self.store)
        self.refused = RefusedWork(self.clock)
        self.watch = watch_of(self.store, self.clock, self.refused)
        self.authorization = Authorization(self.watch, clock=self.clock)
        self.identity: Identity | None = None

    def access(self, host: str = "10.0.0.7", steps: Any = None) -> Access:
        async def look(looks: int) -> None:
            self.watch.refresh_after(looks)

        return Access(self.authorization, identity=self.identity, host=host, look=look, steps=steps)

    def refuses(self, operation: Operation = READ, topic: str = "t") -> bool:
        return bool(asyncio.run(self.access().refused(operation, TOPIC, [topic])))

    def fail(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Makes each further look fail."""

        def look() -> None:
            raise errors.StorageUnavailable(operation="get", path="security", reason="a test")

        monkeypatch.setattr(self.watch, "_read", look)


@pytest.fixture
def world() -> World:
    """ACLs are enforced, and there are none."""
    return World()


# ------------------------------------------------------------------------------ refusals


def test_a_refusal_follows_a_look(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: what another broker has allowed a moment ago is not refused by an older view."""
    assert world.refuses()
    set_acls(world.store, [ALLOWED])
    assert not world.refuses()
    set_acls(world.store)
    assert not world.refuses(), "an allowed request needs no look"
    world.watch.refresh()
    assert world.refuses()
    world.fail(monkeypatch)
    with pytest.raises(errors.SecurityNotRead):
        world.refuses()
    assert world.refused.states().keys() == {Work.REQUESTS}


def test_waiting_refusals_share_a_look(world: World) -> None:
    """Promise: a flood of refusals costs the store ten looks in the time of a regular one."""
    before = world.watch.looks
    world.watch.refresh_after(before)
    for _ in range(100):
        world.watch.refresh_after(before)
    assert world.watch.looks == before + 1
    began = world.clock.monotonic()
    for _ in range(10):
        world.watch.refresh_after(world.watch.looks)
    assert world.clock.monotonic() - began == pytest.approx(0.1)


def test_looks_that_fail_are_shared_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a store that refuses gets no more looks than one that answers."""
    asked = []

    def read() -> None:
        asked.append(world.clock.monotonic())
        raise errors.StorageUnavailable(operation="get", path="security", reason="a test")

    monkeypatch.setattr(world.watch, "_read", read)
    before = world.watch.looks
    for _ in range(100):
        with pytest.raises(errors.SecurityNotRead):
            world.watch.refresh_after(before)
    assert len(asked) == 1
    began = world.clock.monotonic()
    for _ in range(10):
        with pytest.raises(errors.SecurityNotRead):
            world.watch.refresh_after(world.watch.looks)
    assert world.clock.monotonic() - began == pytest.approx(0.1)


def test_refusals_are_logged_within_bounds(world: World) -> None:
    """Promise: with the principal, the operation and the resource; a flood is only counted."""
    with capture_logs() as logged:
        for number in range(100):
            world.refuses(topic=f"t{number % 2}\nforged")
    assert world.authorization.denied == 100
    assert {(each["principal"], each["operation"], each["resource"]) for each in logged} == {
        (ANONYMOUS, "READ", "TOPIC")
    }
    seconds = world.clock.monotonic()
    assert len(logged) <= 8 * (int(seconds) + 2)


def test_modes(world: World) -> None:
    """Promise: `off` looks at nothing, `observe` counts and serves, `enforce` refuses."""
    for mode, refused, denied in ((Mode.ENFORCE, True, 1), (Mode.OBSERVE, False, 2)):
        set_acls(world.store, mode=mode)
        world.watch.refresh()
        assert (world.refuses(), world.authorization.denied) == (refused, denied)
    set_acls(world.store, mode=Mode.OFF)
    world.watch.refresh()
    looks = world.watch.looks
    assert not world.refuses()
    assert (world.authorization.denied, world.watch.looks) == (2, looks)
    assert world.access().may(ALTER)


def test_a_view_that_grows_old(world: World) -> None:
    """Promise: without a look for long nothing is served, unless nothing would be refused."""
    world.clock.advance(5.0)
    with pytest.raises(errors.SecurityNotRead):
        world.access().check_fresh()
    world.watch.note_if_stale()
    assert world.refused.states().keys() == {Work.REQUESTS}
    set_acls(world.store, mode=Mode.OBSERVE)
    world.watch.refresh()
    world.clock.advance(5.0)
    world.access().check_fresh()


def test_the_first_acls_of_a_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a broker that serves an open root follows the first change that closes it."""
    clock = ManualClock()
    store = MemoryStore(clock)
    watch = watch_of(store, clock)
    authorization = Authorization(watch, clock=clock)
    assert not authorization.evaluates
    set_acls(store)
    watch.refresh()
    assert not authorization.evaluates, "the metadata as it is known does not name it yet"
    monkeypatch.setattr(watch, "chain_id", lambda: chain_id_of(store, clock))
    watch.refresh()
    assert authorization.evaluates


def test_rules_with_two_resources(world: World) -> None:
    """Promise: an operation on the cluster may stand for one on each topic (CREATE, DELETE)."""

    def refused() -> set[str]:
        found = world.access().refused(
            Operation.CREATE, TOPIC, ["a", "b"], or_cluster=Operation.CREATE
        )
        return set(asyncio.run(found))

    assert refused() == {"a", "b"}
    set_acls(world.store, [acl(TOPIC, "a", Operation.CREATE)])
    assert refused() == {"b"}
    set_acls(world.store, [acl(CLUSTER, "kafka-cluster", Operation.CREATE)])
    assert refused() == set()


def test_idempotent_producers(world: World) -> None:
    """Promise: writing to some topic suffices (KIP-679), or IDEMPOTENT_WRITE on the cluster."""

    def check() -> None:
        asyncio.run(world.access().check_idempotent_write())

    with pytest.raises(errors.ClusterNotAuthorized):
        check()
    for allowed in (
        acl(TOPIC, "t", WRITE),
        acl(CLUSTER, "kafka-cluster", Operation.IDEMPOTENT_WRITE),
    ):
        set_acls(world.store, [allowed])
        check()
    set_acls(world.store, [acl(TOPIC, "*", WRITE, permission=Permission.DENY), ALLOWED])
    world.watch.refresh()
    with pytest.raises(errors.ClusterNotAuthorized):
        check()


def test_many_names_are_judged_in_steps(world: World) -> None:
    """Promise: a request that names thousands of topics does not hold the event loop."""
    stepped: list[int] = []

    async def steps(names: Iterable[str]) -> AsyncIterator[str]:
        stepped.append(len(list(names)))
        for name in names:
            yield name

    names = [str(number) for number in range(limits.KAFKA_LITTLE_ITEMS + 1)]
    found = asyncio.run(world.access(steps=steps).refused(READ, TOPIC, names))
    assert len(found) == len(names)
    assert stepped == [len(names)] * 2, "before and after the look"


def test_hosts(world: World) -> None:
    """Promise: an address counts in whatever way it is written, as IPv4 or within IPv6."""
    set_acls(
        world.store,
        [acl(TOPIC, "t", READ, host="10.0.0.7"), acl(TOPIC, "u", READ, host="0:0:0:0:0:0:0:1")],
    )
    world.watch.refresh()
    for host, topic, allowed in (
        ("10.0.0.7", "t", True),
        ("::ffff:10.0.0.7", "t", True),
        ("10.0.0.8", "t", False),
        ("::1", "u", True),
    ):
        assert world.access(host).may(READ, TOPIC, topic) is allowed


def test_decisions_are_remembered_within_bounds(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: invented topics do not fill the memory, and a new view forgets decisions."""
    monkeypatch.setattr(authorization_module, "_REMEMBERED", 10)
    for number in range(25):
        assert not world.access().may(READ, TOPIC, str(number))
    assert len(world.authorization.view._remembered) <= 10
    set_acls(world.store, [acl(TOPIC, "24", READ)])
    world.watch.refresh()
    assert world.access().may(READ, TOPIC, "24")


def test_long_names_are_not_remembered(world: World) -> None:
    """Promise: a client that names megabytes leaves nothing behind."""
    world.access().may(READ, GROUP, "x" * 1_000_000)
    world.access().may(READ, GROUP, "x" * 255)
    assert [len(name) for *_, name in world.authorization.view._remembered] == [255]


def test_a_state_that_was_never_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: it may enforce anything, so nothing is served by it, not even to group members."""
    chain_id = chain_id_of(world.store, world.clock)
    watch = SecurityWatch(
        world.store,
        clock=world.clock,
        follow_seconds=0.1,
        stale_seconds=5.0,
        refused=world.refused,
    )
    watch.chain_id = lambda: chain_id
    monkeypatch.setattr(SecurityStore, "look", unreadable)
    with pytest.raises(errors.StorageUnavailable):
        watch.refresh()
    access = Access(Authorization(watch, clock=world.clock))
    with pytest.raises(errors.SecurityNotRead):
        access.check_fresh(is_of_member=True)


def test_a_view_that_cannot_be_made_is_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: a failure after the read leaves no older view that counts as fresh."""
    set_acls(world.store, [ALLOWED])
    world.watch.refresh()
    set_acls(world.store)
    with monkeypatch.context() as failing:
        failing.setattr(authorization_module, "AclIndex", unreadable_index)
        with pytest.raises(MemoryError):
            world.watch.refresh()
    world.clock.advance(4.0)
    world.watch.refresh()
    assert not world.access().may(READ, TOPIC, "t")


def unreadable(_: SecurityStore) -> SecurityState:
    """A look that fails."""
    raise errors.StorageUnavailable(operation="get", path="security", reason="a test")


def unreadable_index(*_: object, **__: object) -> AclIndex:
    """An index for which there is no memory."""
    raise MemoryError


def test_a_request_that_has_waited_is_authorized_again(world: World) -> None:
    """Promise: by the newest view, and by whether its user still exists."""
    add_alice(world.store)
    set_acls(world.store, super_users=["User:alice"])
    world.watch.refresh()
    alice = world.watch.state.users["alice"]
    world.identity = Identity("alice", alice.id, alice.epoch)
    access = world.access()

    def still_refused() -> set[str]:
        return set(asyncio.run(access.still_refused(READ, TOPIC, ["t"])))

    assert still_refused() == set()
    set_acls(world.store)
    world.watch.refresh()
    assert still_refused() == {"t"}
    change_users(world.store, users.removed("alice"))
    world.watch.refresh()
    with pytest.raises(ConnectionResetError):
        still_refused()


# ------------------------------------------------------------------------------ administration


def test_a_cluster_that_no_acl_mentions_has_no_administrators(world: World) -> None:
    """Promise: allow.everyone.if.no.acl.found does not let everybody change ACLs."""

    def allow_everyone(state: SecurityState) -> SecurityState:
        policy = msgspec.structs.replace(state.policy, allow_everyone_if_no_acl_found=True)
        return msgspec.structs.replace(state, policy=policy)

    change_users(world.store, allow_everyone)
    world.watch.refresh()
    assert not world.refuses()
    with pytest.raises(errors.ClusterNotAuthorized):
        asyncio.run(world.access().check_security_change())
    with pytest.raises(errors.ClusterNotAuthorized):
        admin(world).create(world.access().administrator, [ADMIN])


def admin(world: World) -> SecurityAdmin:
    """Returns the administration of the ACLs at the broker."""
    return SecurityAdmin(world.store, world.watch, clock=world.clock)


def test_acls_are_not_changed_while_they_are_only_observed(world: World) -> None:
    """Promise: an open root that is observed gets no administrator from an anonymous client."""
    set_acls(world.store, mode=Mode.OBSERVE)
    world.watch.refresh()
    with capture_logs() as logged, pytest.raises(errors.ClusterNotAuthorized):
        asyncio.run(world.access().check_security_change())
    assert [each["event"] for each in logged] == ["not authorized"]
    set_acls(world.store, [ADMIN], mode=Mode.OBSERVE)
    asyncio.run(world.access().check_security_change())  # it looks


def test_a_change_is_judged_on_the_version_that_it_extends(world: World) -> None:
    """Promise: an administrator that was removed elsewhere adds no ACL at a broker that lags."""
    set_acls(world.store, [ADMIN])
    world.watch.refresh()
    set_acls(world.store)
    stale = world.access()
    assert stale.may(ALTER), "as this broker knows"
    with pytest.raises(errors.ClusterNotAuthorized):
        admin(world).create(stale.administrator, [ALLOWED])
    set_acls(world.store, [ADMIN])
    assert admin(world).create(stale.administrator, [ALLOWED]) == [None]
    assert world.watch.state.acls == {ADMIN, ALLOWED}
    assert world.watch.state.author.principal == ANONYMOUS


def test_another_user_of_the_same_name_is_no_administrator(world: World) -> None:
    """Promise: the user is known by its id; one that was removed and made again is another one."""
    add_alice(world.store)
    set_acls(world.store, super_users=["User:alice"])
    world.watch.refresh()
    alice = world.watch.state.users["alice"]
    old = Administrator("User:alice", "::1", Identity("alice", alice.id, alice.epoch))
    admin(world).create(old, [ALLOWED])
    change_users(world.store, users.removed("alice"))
    add_alice(world.store)
    with pytest.raises(errors.ClusterNotAuthorized):
        admin(world).delete(old, [AclFilter()])


def test_acls_are_added_and_deleted_together(world: World) -> None:
    """Promise: invalid ACLs of a request are named, and those that filters select are returned."""
    set_acls(world.store, [ADMIN])
    world.watch.refresh()
    administrator = world.access().administrator
    wrong = acl(TOPIC, "", READ)
    first, second = admin(world).create(administrator, [ALLOWED, wrong])
    assert (first, type(second)) == (None, errors.BadOption)
    version = world.watch.state.version
    admin(world).create(administrator, [ALLOWED])
    assert world.watch.state.version == version, "what exists changes nothing"
    assert admin(world).matching(AclFilter(resource=TOPIC)) == [ALLOWED]
    found = admin(world).delete(
        administrator, [AclFilter(name="t"), AclFilter(name="other"), AclFilter(resource=TOPIC)]
    )
    assert found == [{ALLOWED}, frozenset(), {ALLOWED}]
    assert world.watch.state.acls == {ADMIN}
