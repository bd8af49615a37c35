"""Authorization of the client of one Kafka connection; handlers judge by it, and by nothing else.

A handler judges before it looks whether a topic or a group exists, so that its reply reveals
nothing about those that the client may not see. A refusal is answered only after a look at the
security state that began after the request had arrived; if that fails, the connection is closed.
Entries that are left out of a list (`may`) need no such look: to the client they are like those
that are created a moment later.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from typing import Final

from sparklog import limits
from sparklog.broker.authentication import Identity
from sparklog.broker.authorization import Authorization, ClientRights, View
from sparklog.broker.security_admin import Administrator
from sparklog.security.acl import (
    ANONYMOUS,
    CLUSTER_NAME,
    OPERATIONS,
    Operation,
    ResourceType,
)
from sparklog.security.state import Mode

_CLUSTER: Final = ResourceType.CLUSTER
_EVERY_OPERATION: Final = {
    resource: sum(1 << each for each in operations) for resource, operations in OPERATIONS.items()
}
NOTHING: Final[frozenset[str]] = frozenset()
Steps = Callable[[Iterable[str]], AsyncIterator[str]]
"""Yields the same items, but lets other work of the event loop run between them."""


class Access(ClientRights):
    """Decides for the client of one connection. Used in the listener's event loop."""

    def __init__(
        self,
        authorization: Authorization | None,
        *,
        identity: Identity | None = None,
        host: str = "",
        look: Callable[[int], Awaitable[None]] | None = None,
        steps: Steps | None = None,
    ) -> None:
        """Creates the access of a client.

        Args:
            authorization: None: everything is allowed.
            identity: the user; None for a client that has not logged in.
            host: the client's address.
            look: waits for `SecurityWatch.refresh_after`.
            steps: for many items.
        """
        principal = identity.principal if identity is not None else ANONYMOUS
        super().__init__(authorization, principal, host)
        self.identity = identity
        """The user; it is replaced when it logs in again."""
        self._look = look
        self._steps = steps

    @property
    def is_evaluated(self) -> bool:
        """True unless the policy of the root is `off`, or there is none."""
        return self._view is not None

    @property
    def administrator(self) -> Administrator:
        """The client in the role of an administrator of ACLs, users and quotas."""
        return Administrator(*self._client, self.identity)

    def check_fresh(self, *, is_of_member: bool = False) -> None:
        """Raises `SecurityNotRead` if ACLs are enforced by a state that is too old.

        `is_of_member`: such a state suffices, by which the client was allowed to join its group.
        """
        if self._authorization is None:
            return
        watch = self._authorization.watch
        if watch.is_unread or (watch.is_enforced and not is_of_member):
            watch.check_fresh()

    # -------------------------------------------------------------------------- refusals

    async def refused(
        self,
        operation: Operation,
        resource: ResourceType,
        names: Iterable[str],
        *,
        or_cluster: Operation | None = None,
    ) -> Collection[str]:
        """Returns the names of the resources on which an operation is not allowed.

        `or_cluster`: an operation on the cluster that also allows it on each of them.

        Raises `SecurityNotRead` if that cannot be decided.
        """
        view = self._view
        if view is None:
            return NOTHING
        names = dict.fromkeys(names)
        looks = self._looks
        denied = await self._denied(view, operation, resource, names, or_cluster)
        if not denied:
            return NOTHING
        if view.mode is Mode.ENFORCE:
            view = await self._newer_view(looks)
            if view is None:
                return NOTHING
            denied = await self._denied(view, operation, resource, names, or_cluster)
        is_refused = view.mode is Mode.ENFORCE
        self._note(operation, resource, denied, is_refused=is_refused)
        return denied if is_refused else NOTHING

    async def still_refused(
        self,
        operation: Operation,
        resource: ResourceType,
        names: Iterable[str],
        *,
        or_cluster: Operation | None = None,
    ) -> Collection[str]:
        """Authorizes again, in a request that has waited; see `refused`.

        Raises `ConnectionResetError` if the user was removed or disabled meanwhile.
        """
        if self._authorization is None:
            return NOTHING
        state = self._authorization.watch.state
        if self.identity is not None and not self.identity.is_current(state):
            raise ConnectionResetError("the user was removed or disabled")
        self.check_fresh()
        return await self.refused(operation, resource, names, or_cluster=or_cluster)

    async def check(
        self, operation: Operation, resource: ResourceType = _CLUSTER, name: str = CLUSTER_NAME
    ) -> None:
        """Raises `NotAuthorized` if an operation is not allowed, and what `refused` raises."""
        if await self.refused(operation, resource, (name,)):
            raise self.error(operation, resource, name)

    async def check_security_change(self, operation: Operation = Operation.ALTER) -> None:
        """Raises what `check` raises for an operation on the cluster, also while ACLs are only
        observed.

        Otherwise any client could become an administrator before ACLs are enforced.
        """
        view = self._view
        if view is None or view.allows_administration(*self._client, operation):
            return
        view = await self._newer_view(self._looks)
        if view is None or view.allows_administration(*self._client, operation):
            return
        self._note(operation, _CLUSTER, (CLUSTER_NAME,), is_refused=True)
        raise self.error(operation, _CLUSTER, CLUSTER_NAME)

    async def check_idempotent_write(self) -> None:
        """Raises `ClusterNotAuthorized` unless the client may write to some topic (KIP-679)."""
        view = self._view
        if view is None or view.allows_idempotent_write(*self._client):
            return
        if view.mode is Mode.ENFORCE:
            view = await self._newer_view(self._looks)
            if view is None or view.allows_idempotent_write(*self._client):
                return
        is_refused = view.mode is Mode.ENFORCE
        self._note(Operation.IDEMPOTENT_WRITE, _CLUSTER, (CLUSTER_NAME,), is_refused=is_refused)
        if is_refused:
            raise self.error(Operation.IDEMPOTENT_WRITE, _CLUSTER, CLUSTER_NAME)

    # -------------------------------------------------------------------------- lists

    def authorized_operations(
        self, resource: ResourceType = _CLUSTER, name: str = CLUSTER_NAME
    ) -> int:
        """Returns the operations that are allowed on a resource, as a bit field (KIP-430)."""
        if not self.is_limited:
            return _EVERY_OPERATION[resource]
        return sum(1 << each for each in OPERATIONS[resource] if self.may(each, resource, name))

    # -------------------------------------------------------------------------- decisions

    @property
    def _looks(self) -> int:
        assert self._authorization is not None
        return self._authorization.watch.looks

    async def _newer_view(self, looks: int) -> View | None:
        """Returns the view after a look that is not one of the first `looks`."""
        assert self._look is not None
        await self._look(looks)
        return self._view

    async def _denied(
        self,
        view: View,
        operation: Operation,
        resource: ResourceType,
        names: Collection[str],
        or_cluster: Operation | None,
    ) -> Collection[str]:
        if or_cluster and view.allows(*self._client, or_cluster, _CLUSTER, CLUSTER_NAME):
            return NOTHING
        if len(names) <= limits.KAFKA_LITTLE_ITEMS or self._steps is None:
            return {
                name for name in names if not view.allows(*self._client, operation, resource, name)
            }
        return {
            name
            async for name in self._steps(names)
            if not view.allows(*self._client, operation, resource, name)
        }


OPEN: Final = Access(None)
"""Allows everything."""
