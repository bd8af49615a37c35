"""The client of a Flight call, and what it may do; actions judge by it, and by nothing else.

A call is judged before it is known whether a topic or a group exists, so that an error reveals
nothing about those that the client may not see. A refusal follows a look at the security state that
began after the call. Entries that are left out of a list (`may`) need no such look: to the client
they are like those that are created a moment later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sparklog import errors
from sparklog.broker.authentication import Identity
from sparklog.broker.authorization import Authorization, ClientRights, View
from sparklog.listeners import host_of
from sparklog.security.acl import ANONYMOUS, CLUSTER_NAME, Operation, ResourceType

_CLUSTER: Final = ResourceType.CLUSTER
_OF_TASKS: Final = frozenset({Operation.READ, Operation.DESCRIBE})
"""The operations on topics that a token for tasks permits, if ACLs do too."""


class Caller(ClientRights):
    """The client of one call. `may` and `is_current` are also used by the thread that checks open
    streams.
    """

    def __init__(
        self,
        authorization: Authorization | None,
        *,
        peer: str,
        listener: str = "",
        identity: Identity | None = None,
        is_for_tasks: bool = False,
        topics: tuple[str, ...] | None = None,
        root: str = "",
    ) -> None:
        """Creates the client of a call.

        Args:
            authorization: None: everything is allowed.
            peer: its address, `host:port`.
            listener: the name of the listener that it has connected to.
            identity: the user; None for a client that has not logged in.
            is_for_tasks: its token only reads records.
            topics: the only topics of such a token; None: all.
            root: the name of a program that can read the root's keys, to which ACLs do not apply;
                empty for others.
        """
        principal = root or (identity.principal if identity is not None else ANONYMOUS)
        super().__init__(None if root else authorization, principal, host_of(peer))
        self.listener = listener
        self.identity = identity
        self.is_for_tasks = is_for_tasks
        self._topics = topics
        self.is_root = bool(root)
        self.name = f"{principal} at {peer}" if root or identity is not None else peer
        """For the log."""

    @property
    def is_limited(self) -> bool:
        """True if something may be refused or left out."""
        return self.is_for_tasks or super().is_limited

    def is_current(self) -> bool:
        """Returns whether the client is still the user that it has logged in as."""
        if self._authorization is None or self.identity is None:
            return True
        return self.identity.is_current(self._authorization.watch.state)

    def may(
        self, operation: Operation, resource: ResourceType = _CLUSTER, name: str = CLUSTER_NAME
    ) -> bool:
        """See `ClientRights.may`."""
        return self._is_in_scope(operation, resource, name) and super().may(
            operation, resource, name
        )

    def check(
        self,
        operation: Operation,
        resource: ResourceType = _CLUSTER,
        names: Iterable[str] = (CLUSTER_NAME,),
        *,
        or_cluster: Operation | None = None,
        also_observed: bool = False,
    ) -> None:
        """Raises `NotAuthorized` unless an operation is allowed on all of the resources.

        Raises `SecurityNotRead` if that cannot be decided.

        Args:
            operation: the operation.
            resource: the type of the resources.
            names: their names.
            or_cluster: an operation on the cluster that also allows it.
            also_observed: it is refused while ACLs are only observed, too.
        """
        names = (*dict.fromkeys(names),)
        for name in names:
            self._check_scope(operation, resource, name)

        def denied(view: View) -> str | None:
            if or_cluster and view.allows(*self._client, or_cluster, _CLUSTER, CLUSTER_NAME):
                return None
            return next(
                (
                    name
                    for name in names
                    if not view.allows(*self._client, operation, resource, name)
                ),
                None,
            )

        self._check(denied, operation, resource, also_observed=also_observed)

    def denied(
        self, operation: Operation, resource: ResourceType, names: Iterable[str]
    ) -> set[str]:
        """Returns the names on which an operation is not allowed, also after a look.

        Raises `SecurityNotRead` if that cannot be decided.
        """
        names = {*names}
        looks = self._authorization.watch.looks if self._authorization is not None else 0
        found = {each for each in names if not self.may(operation, resource, each)}
        if found and self._authorization is not None:
            self._authorization.watch.refresh_after(looks)
            found = {each for each in found if not self.may(operation, resource, each)}
        return found

    def check_idempotent_write(self) -> None:
        """Raises `ClusterNotAuthorized` unless the client may write to some topic (KIP-679)."""
        self._check_scope(Operation.IDEMPOTENT_WRITE, _CLUSTER, CLUSTER_NAME)

        def denied(view: View) -> str | None:
            return None if view.allows_idempotent_write(*self._client) else CLUSTER_NAME

        self._check(denied, Operation.IDEMPOTENT_WRITE, _CLUSTER)

    def _check_scope(self, operation: Operation, resource: ResourceType, name: str) -> None:
        """Raises `TokenOutOfScope` for work that a token for tasks is not for."""
        if self._is_in_scope(operation, resource, name):
            return
        if self._authorization is not None:
            self._note(operation, resource, (name,), is_refused=True)
        raise errors.TokenOutOfScope(
            principal=self.principal,
            host=self._client[1],
            operation=operation.name,
            resource=resource.name.lower(),
            name=name,
        )

    def _is_in_scope(self, operation: Operation, resource: ResourceType, name: str) -> bool:
        if not self.is_for_tasks:
            return True
        is_listed = self._topics is None or name in self._topics
        return resource is ResourceType.TOPIC and is_listed and operation in _OF_TASKS


OPEN: Final = Caller(None, peer="")
"""Allows everything."""
