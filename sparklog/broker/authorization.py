"""Authorization: what a principal may do, by the policy and the ACLs of the root.

The decisions are those of `sparklog/security/acl.py`. A refusal needs care beyond that: the ACL
that allows the request may have been added at another broker a moment ago. So a listener that would
refuse a request looks at the security state once more (`SecurityWatch.refresh_after`), and judges
again.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Collection, Hashable
from typing import Final, TypeVar

import structlog

from sparklog import errors
from sparklog.broker.audit import Audit
from sparklog.broker.security_watch import SecurityWatch
from sparklog.clock import Clock
from sparklog.listeners import host_of
from sparklog.security.acl import (
    ANONYMOUS,
    ANYONE,
    CLUSTER_NAME,
    Acl,
    AclIndex,
    Operation,
    Permission,
    ResourceType,
    normal_host,
)
from sparklog.security.state import Mode, Policy, SecurityState
from sparklog.security.users import NAME_BYTES_MAX

_T = TypeVar("_T", bound=Hashable)
_REMEMBERED: Final = 65_536
"""Decisions that a view remembers; then it forgets them all."""
_NAME_SHOWN: Final = 249
_LOGGED_PER_SECOND: Final = 8
"""Refusals that are logged individually."""

_log = structlog.get_logger("sparklog.authorization")
_Question = tuple[str, str, Operation, ResourceType, str]

_REFUSALS: Final[dict[ResourceType, type[errors.NotAuthorized]]] = {
    ResourceType.TOPIC: errors.TopicNotAuthorized,
    ResourceType.GROUP: errors.GroupNotAuthorized,
    ResourceType.CLUSTER: errors.ClusterNotAuthorized,
}


class View:
    """The policy and the ACLs of one version of the security state. Thread-safe."""

    def __init__(
        self, policy: Policy, index: AclIndex, acls: Collection[Acl] = frozenset()
    ) -> None:
        """`acls`: those of the index."""
        self.mode = policy.mode
        self._policy = policy
        self._acls = acls
        self._index = index
        self._remembered: dict[_Question, bool] = {}
        self._remembered_on_any: dict[tuple[str, str, Operation, ResourceType], bool] = {}

    def allows(
        self, principal: str, host: str, operation: Operation, resource: ResourceType, name: str
    ) -> bool:
        """See `AclIndex.allows`. The mode is not considered."""
        question = principal, host, operation, resource, name
        known = self._remembered.get(question)
        if known is None:
            known = self._index.allows(*question)
            if len(name) <= NAME_BYTES_MAX:  # the client chooses it, and may name gigabytes
                self._remember(self._remembered, question, known)
        return known

    @functools.cached_property
    def allows_anonymous(self) -> bool:
        """True if something may be allowed to clients that have not logged in."""
        policy = self._policy
        return (
            policy.allow_everyone_if_no_acl_found
            or ANONYMOUS in policy.super_users
            or any(
                each.permission is Permission.ALLOW and each.principal in (ANONYMOUS, ANYONE)
                for each in self._acls
            )
        )

    def allows_administration(
        self, principal: str, host: str, operation: Operation = Operation.ALTER
    ) -> bool:
        """Returns whether an ACL allows a client to change ACLs, or it is a super user.

        `operation`: that of the change on the cluster; ALTER_CONFIGS for quotas.
        """
        what = operation, ResourceType.CLUSTER, CLUSTER_NAME
        return self._index.allows_listed(principal, host, *what)

    def allows_idempotent_write(self, principal: str, host: str) -> bool:
        """Returns whether a client may get a producer id: it may write to some topic (KIP-679)."""
        return self.allows(
            principal, host, Operation.IDEMPOTENT_WRITE, ResourceType.CLUSTER, CLUSTER_NAME
        ) or self.allows_on_any(principal, host, Operation.WRITE, ResourceType.TOPIC)

    def allows_on_any(
        self, principal: str, host: str, operation: Operation, resource: ResourceType
    ) -> bool:
        """See `AclIndex.allows_on_any`."""
        question = principal, host, operation, resource
        known = self._remembered_on_any.get(question)
        if known is None:
            known = self._index.allows_on_any(*question)
            self._remember(self._remembered_on_any, question, known)
        return known

    @staticmethod
    def _remember(remembered: dict[_T, bool], question: _T, answer: bool) -> None:
        if len(remembered) >= _REMEMBERED:
            remembered.clear()
        remembered[question] = answer


def _view_of(state: SecurityState) -> View:
    policy = state.policy
    index = AclIndex(
        state.acls,
        super_users=policy.super_users,
        allow_everyone_if_no_acl_found=policy.allow_everyone_if_no_acl_found,
    )
    return View(policy, index, state.acls)


class Authorization:
    """Decides what clients may do, as one broker knows it. Thread-safe."""

    def __init__(self, watch: SecurityWatch, *, clock: Clock) -> None:
        self.watch = watch
        self._clock = clock
        self._lock = threading.Lock()
        self._logged_second = 0
        self._logged = 0
        self.denied = 0
        """The number of operations that were not allowed, also while ACLs are only observed."""
        self.audit: Audit | None = None
        """Set by the owner, if there is one."""
        self._seen = watch.state
        self.view = _view_of(watch.state)
        watch.on_change.append(self._follow)

    def _follow(self) -> None:
        state = self.watch.state
        if (state.policy, state.acls) != (self._seen.policy, self._seen.acls):
            self.view = _view_of(state)
        self._seen = state  # only now: a view that could not be made is tried again

    @property
    def acl_count(self) -> int:
        """The number of ACLs of the root."""
        return len(self._seen.acls)

    @property
    def evaluates(self) -> bool:
        """True unless the policy is `off`."""
        return self.view.mode is not Mode.OFF

    def note_denied(
        self,
        principal: str,
        host: str,
        operation: Operation,
        resource: ResourceType,
        names: Collection[str],
        *,
        is_refused: bool,
    ) -> None:
        """Counts an operation that is not allowed on resources, and logs the first few.

        `is_refused`: False if it is served, because ACLs are only observed.
        """
        if self.audit is not None:
            self.audit.refused(
                principal, host, operation.name, resource.name, names, is_refused=is_refused
            )
        for name in itertools.islice(names, self._count(len(names))):
            self._log(
                is_refused,
                principal=principal,
                host=host,
                operation=operation.name,
                resource=resource.name,
                name=ascii(name[:_NAME_SHOWN]).strip("'"),  # without what a terminal obeys
            )

    def note_refused_call(self, peer: str, listener: str, reason: str) -> None:
        """Counts and logs a Flight call that was refused for its token, or for lack of one."""
        if self.audit is not None:
            self.audit.login_failed(
                listener=listener, mechanism="token", user="", host=host_of(peer), reason=reason
            )
        if self._count(1):
            self._log(is_refused=True, flight_client=peer, reason=reason)

    def _count(self, denied: int) -> int:
        """Counts operations, and returns how many of them may be logged now."""
        second = int(self._clock.monotonic())
        with self._lock:
            self.denied += denied
            if second != self._logged_second:
                self._logged_second, self._logged = second, 0
            logged = min(denied, _LOGGED_PER_SECOND - self._logged)
            self._logged += logged
            return logged

    @staticmethod
    def _log(is_refused: bool, **facts: str) -> None:
        _log.info("not authorized" if is_refused else "would not be authorized", **facts)


class ClientRights:
    """The rights of one client, by the ACLs; each listener judges its requests by them."""

    def __init__(self, authorization: Authorization | None, principal: str, host: str) -> None:
        """Creates the rights of a client.

        Args:
            authorization: None: everything is allowed.
            principal: as Kafka writes it, such as "User:alice".
            host: the client's address.
        """
        self._authorization = authorization
        self.principal = principal
        self._client = principal, normal_host(host)

    @property
    def host(self) -> str:
        """The client's address."""
        return self._client[1]

    @property
    def user(self) -> str:
        """The name of the user, as quotas have it."""
        return self.principal.partition(":")[2]

    @property
    def _view(self) -> View | None:
        """The view to judge by; None if ACLs are not evaluated."""
        if self._authorization is None:
            return None
        view = self._authorization.view
        return view if view.mode is not Mode.OFF else None

    @property
    def is_limited(self) -> bool:
        """True if something may be refused or left out."""
        view = self._view
        return view is not None and view.mode is Mode.ENFORCE

    def may(
        self,
        operation: Operation,
        resource: ResourceType = ResourceType.CLUSTER,
        name: str = CLUSTER_NAME,
    ) -> bool:
        """Returns whether an operation is allowed, as far as is known now."""
        view = self._view
        return (
            view is None
            or view.mode is not Mode.ENFORCE
            or view.allows(*self._client, operation, resource, name)
        )

    def error(
        self, operation: Operation, resource: ResourceType, name: str
    ) -> errors.NotAuthorized:
        """Returns the error for an operation that is not allowed."""
        return not_authorized(*self._client, operation, resource, name)

    def check_one(
        self,
        operation: Operation,
        resource: ResourceType = ResourceType.CLUSTER,
        name: str = CLUSTER_NAME,
    ) -> None:
        """Raises `NotAuthorized` unless an operation on a resource is allowed.

        Waits for the store before a refusal. Raises `SecurityNotRead` if that look fails.
        """

        def denied(view: View) -> str | None:
            return None if view.allows(*self._client, operation, resource, name) else name

        self._check(denied, operation, resource)

    def _check(
        self,
        denied: Callable[[View], str | None],
        operation: Operation,
        resource: ResourceType,
        *,
        also_observed: bool = False,
    ) -> None:
        """Raises `NotAuthorized` if `denied` returns the name of a resource, also after a look."""
        view = self._view
        if view is None or self._authorization is None:
            return
        looks = self._authorization.watch.looks
        if (name := denied(view)) is None:
            return
        if view.mode is Mode.ENFORCE or also_observed:
            self._authorization.watch.refresh_after(looks)
            view = self._view
            if view is None or (name := denied(view)) is None:
                return
        is_refused = view.mode is Mode.ENFORCE or also_observed
        self._note(operation, resource, (name,), is_refused=is_refused)
        if is_refused:
            raise self.error(operation, resource, name)

    def _note(
        self,
        operation: Operation,
        resource: ResourceType,
        names: Collection[str],
        *,
        is_refused: bool,
    ) -> None:
        """See `Authorization.note_denied`."""
        assert self._authorization is not None
        self._authorization.note_denied(
            *self._client, operation, resource, names, is_refused=is_refused
        )


def not_authorized(
    principal: str, host: str, operation: Operation, resource: ResourceType, name: str
) -> errors.NotAuthorized:
    """Returns the error for a request that is not allowed. See `AclIndex.allows`."""
    return _REFUSALS[resource](
        principal=principal,
        host=host or "an unknown address",
        operation=operation.name,
        resource=resource.name.lower(),
        name=name,
    )
