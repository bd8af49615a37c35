"""ACLs of a root in tests, and what one broker knows of them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from sparklog.broker.authorization import Authorization
from sparklog.broker.refused_work import RefusedWork
from sparklog.broker.security_watch import SecurityWatch
from sparklog.clock import ThreadClock
from sparklog.security.acl import ANONYMOUS, Acl, Operation, PatternType, Permission, ResourceType
from sparklog.security.state import Mode, Policy, SecurityState
from sparklog.storage.objects import Store
from tests.support.users import change_users


def acl(
    resource: ResourceType,
    name: str,
    operation: Operation,
    *,
    principal: str = ANONYMOUS,
    permission: Permission = Permission.ALLOW,
    pattern: PatternType = PatternType.LITERAL,
    host: str = "*",
) -> Acl:
    """Returns an ACL; by default one that allows something to clients without a login."""
    return Acl(resource, name, pattern, principal, host, operation, permission)


def set_acls(
    store: Store,
    acls: Iterable[Acl] = (),
    *,
    mode: Mode = Mode.ENFORCE,
    super_users: Iterable[str] = (),
) -> None:
    """Replaces the ACLs and the policy of a root, which is created if necessary."""

    def change(state: SecurityState) -> SecurityState:
        return msgspec.structs.replace(
            state,
            acls=frozenset(acls),
            policy=Policy(mode=mode, super_users=tuple(super_users)),
        )

    change_users(store, change)


def watch_of(store: Store, clock: ThreadClock, refused: RefusedWork | None = None) -> SecurityWatch:
    """Returns what a broker has seen of the root: a look every 0.1 s, stale after 5 s."""
    watch = SecurityWatch(
        store,
        clock=clock,
        follow_seconds=0.1,
        stale_seconds=5.0,
        refused=refused or RefusedWork(clock),
    )
    watch.open()
    return watch


def without_acls(store: Store, clock: ThreadClock) -> Authorization:
    """Returns the authorization of a root that has no security state."""
    return Authorization(watch_of(store, clock), clock=clock)
