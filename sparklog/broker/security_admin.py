"""Administration of the ACLs, users and quotas by clients of a broker, any of the root's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

import structlog

from sparklog import errors
from sparklog.broker.authentication import Identity
from sparklog.broker.authorization import not_authorized
from sparklog.broker.security_watch import SecurityWatch
from sparklog.clock import Clock
from sparklog.security.acl import (
    CLUSTER_NAME,
    Acl,
    AclFilter,
    AclIndex,
    Operation,
    ResourceType,
)
from sparklog.security.acls import added, check_acl, matching, removed
from sparklog.security.quota import QuotaEntity
from sparklog.security.state import Author, Mode, SecurityState
from sparklog.security.users import Change
from sparklog.storage.objects import Store
from sparklog.storage.security_store import change_security

_log = structlog.get_logger("sparklog.authorization")
_T = TypeVar("_T")
_COMPARED: Final = 10_000_000
"""Comparisons of a filter with an ACL by one request, which take seconds."""
CHANGED_ACLS = 2_000  # by one request at most
CHANGED_QUOTAS = 1_000  # entities by one request at most: each costs a copy of the table
CHANGED_USERS = 100  # by one request at most: each costs a copy of the table of users


class Administrator:
    """A client that changes ACLs, users or quotas.

    It is judged again on the version that its change extends.
    """

    def __init__(self, principal: str, host: str, identity: Identity | None) -> None:
        """`identity`: of a client that has logged in."""
        self._principal = principal
        self._host = host
        self._identity = identity

    def author(self, clock: Clock) -> Author:
        return Author(principal=self._principal, host=self._host, at_us=clock.now_us())

    def check(self, state: SecurityState, operation: Operation = Operation.ALTER) -> None:
        """Raises `ClusterNotAuthorized` if the client may not change `state`.

        This broker may know an older version, in which the client was still an administrator.

        `operation`: the one on the cluster that the change needs.
        """
        identity = self._identity
        index = AclIndex(
            (acl for acl in state.acls if acl.resource is ResourceType.CLUSTER),
            super_users=state.policy.super_users,
        )
        is_known = identity is None or identity.is_current(state)
        if not is_known or not index.allows_listed(
            self._principal, self._host, operation, ResourceType.CLUSTER, CLUSTER_NAME
        ):
            raise not_authorized(
                self._principal, self._host, operation, ResourceType.CLUSTER, CLUSTER_NAME
            )

    def check_quotas(self, state: SecurityState) -> None:
        """Raises `ClusterNotAuthorized` if the client may not change the quotas of `state`.

        Without ACLs everybody may, as in Kafka.
        """
        if state.policy.mode is not Mode.OFF:
            self.check(state, Operation.ALTER_CONFIGS)


class SecurityAdmin:
    """Reads and changes the ACLs, users and quotas of a root.

    Thread-safe; changes wait for the store.
    """

    def __init__(self, store: Store, watch: SecurityWatch, *, clock: Clock) -> None:
        self._store = store
        self._watch = watch
        self._clock = clock

    @property
    def state(self) -> SecurityState:
        """The newest state that this broker knows."""
        return self._watch.state

    def matching(self, wanted: AclFilter) -> list[Acl]:
        """Returns the ACLs that a filter selects, sorted."""
        return sorted(matching(self.state, wanted))

    def create(
        self, administrator: Administrator, acls: Sequence[Acl]
    ) -> list[errors.SparklogError | None]:
        """Adds ACLs, and returns the error of each that is invalid; the others are added.

        Raises `ClusterNotAuthorized`, `BadOption` if there would be too many, and what
        `change_security` raises.
        """
        outcomes: list[errors.SparklogError | None] = []
        valid = []
        for acl in acls:
            try:
                check_acl(acl)
            except errors.BadOption as error:
                outcomes.append(error)
            else:
                outcomes.append(None)
                valid.append(acl)
        if valid:
            self._change(administrator, added(valid))
        return outcomes

    def delete(
        self, administrator: Administrator, filters: Sequence[AclFilter]
    ) -> list[frozenset[Acl]]:
        """Removes the ACLs that filters select, and returns those of each filter.

        Raises `ClusterNotAuthorized`, and what `change_security` raises.
        """
        found: list[frozenset[Acl]] = []

        def change(state: SecurityState) -> SecurityState | None:
            if len(filters) * len(state.acls) > _COMPARED:
                reason = (
                    f"{len(filters):,} filters for {len(state.acls):,} ACLs: send fewer at once"
                )
                raise errors.BadRequest(reason=reason)
            found[:] = [matching(state, each) for each in filters]
            selected = sum(map(len, found))
            if selected > CHANGED_ACLS:
                reason = f"the filters select {selected:,} ACLs; at most {CHANGED_ACLS:,}"
                raise errors.BadRequest(reason=f"{reason} are deleted at once")
            return removed(frozenset[Acl]().union(*found))(state)

        self._change(administrator, change)
        return found

    def change_users(
        self, administrator: Administrator, changes: Mapping[str, Change]
    ) -> dict[str, errors.SparklogError | None]:
        """Changes users, and returns the error of each whose change is invalid, by name.

        The others are changed together.

        Raises `ClusterNotAuthorized`, and what `change_security` raises.
        """
        outcomes: dict[str, errors.SparklogError | None] = {}
        self._change(administrator, functools.partial(_all_valid, changes, outcomes))
        return outcomes

    def change_quotas(
        self,
        administrator: Administrator,
        changes: Mapping[QuotaEntity, Change],
        *,
        only_checks: bool,
    ) -> dict[QuotaEntity, errors.SparklogError | None]:
        """Changes quotas, and returns the error of each entity whose change is invalid.

        The others are changed together. With `only_checks`, nothing is.

        Raises `ClusterNotAuthorized`, `BadRequest` for a bucket that has no users, ACLs or quotas
        yet, and what `change_security` raises.
        """
        outcomes: dict[QuotaEntity, errors.SparklogError | None] = {}
        change = functools.partial(_all_valid, changes, outcomes)
        if only_checks:
            administrator.check_quotas(self._watch.state)
            change(self._watch.state)
            return outcomes
        if not (self._store.is_local or self._watch.has_state):
            reason = (
                "the quotas of a bucket are in security/ of it, and it has none yet: add the first"
                " user with `sparklog users add` (docs/security.md)"
            )
            raise errors.BadRequest(reason=reason)
        self._change(administrator, change, check=administrator.check_quotas)
        return outcomes

    def _change(
        self,
        administrator: Administrator,
        change: Change,
        *,
        check: Callable[[SecurityState], None] | None = None,
    ) -> None:
        """`check`: judges the client on the version that is changed; by default, as for ACLs."""
        author = administrator.author(self._clock)
        before = self._watch.state.version
        after = change_security(
            self._store,
            functools.partial(_checked, check or administrator.check, change),
            author=author,
            clock=self._clock,
        )
        if self._watch.has_state:
            self._watch.refresh()
        else:
            self._watch.open()  # the broker need not know yet that the root has a first state
        if after.author == author and after.version != before:
            _log.info(
                "changed ACLs, users or quotas",
                principal=author.principal,
                host=author.host,
                version=after.version,
                acls=len(after.acls),
                users=len(after.users),
                quotas=len(after.quotas),
            )


def _all_valid(
    changes: Mapping[_T, Change],
    outcomes: dict[_T, errors.SparklogError | None],
    state: SecurityState,
) -> SecurityState | None:
    """Makes all changes that are valid, and notes the error of each, or None, in `outcomes`."""
    outcomes.clear()
    after = state
    for name, each in changes.items():
        outcomes[name] = None
        try:
            after = each(after) or after
        except errors.Invalid as error:
            outcomes[name] = error
    return after if after is not state else None


def _checked(
    check: Callable[[SecurityState], None], change: Change, state: SecurityState
) -> SecurityState | None:
    check(state)
    return change(state)
