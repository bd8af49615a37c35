"""The client of a Flight call, and what it may do; actions judge by it, and by nothing else.

A call is judged before it is known whether a topic or a group exists, so that an error reveals
nothing about those that the client may not see. A refusal follows a look at the security state that
began after the call. Entries that are left out of a list (`may`) need no such look: to the client
they are like those that are created a moment later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from sparklog import errors
from sparklog.broker.authentication import Identity
from sparklog.broker.authorization import Authorization, View, not_authorized
from sparklog.security.acl import ANONYMOUS, CLUSTER_NAME, Operation, ResourceType, normal_host
from sparklog.security.state import Mode

_CLUSTER: Final = ResourceType.CLUSTER
_OF_TASKS: Final = frozenset({Operation.READ, Operation.WRITE, Operation.DESCRIBE})
"""The operations on topics that a token for tasks permits, if ACLs do too."""


class Caller:
    """The client of one call. Used in the thread that serves the call, except `may_still`."""

    def __init__(
        self,
        authorization: Authorization | None,
        *,
        peer: str,
        listener: str = "",
        identity: Identity | None = None,
        is_of_task: bool = False,
        topics: tuple[str, ...] | None = None,
        root: str = "",
    ) -> None:
        """Creates the client of a call.

        Args:
            authorization: None: everything is allowed.
            peer: its address, `host:port`.
            listener: the name of the listener that it has connected to.
            identity: the user; None for a client that has not logged in.
            is_of_task: its token only reads and writes records.
            topics: the only topics of such a token; None: all.
            root: the name of a program that can read the root's keys; empty for others.
        """
        self._authorization = authorization
        self.listener = listener
        self.identity = identity
        self.is_of_task = is_of_task
        self._topics = topics
        self.is_root = bool(root)
        self.principal = root or (identity.principal if identity is not None else ANONYMOUS)
        """As Kafka writes it, such as "User:alice"; "Root:…" for a program with the root's keys."""
        self.name = f"{self.principal} at {peer}" if root or identity is not None else peer
        """For the log."""
        self._host = normal_host(peer.rpartition(":")[0].strip("[]"))

    @property
    def _view(self) -> View | None:
        """The view to judge by; None if everything is allowed."""
        if self._authorization is None or self.is_root:
            return None
        view = self._authorization.view
        return view if view.mode is not Mode.OFF else None

    @property
    def is_limited(self) -> bool:
        """True if something may be refused or left out."""
        view = self._view
        return self.is_of_task or (view is not None and view.mode is Mode.ENFORCE)

    # -------------------------------------------------------------------------- refusals

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
        self._check_scope(operation, resource, names)

        def denied(view: View) -> str | None:
            if or_cluster and self._allows(view, or_cluster, _CLUSTER, CLUSTER_NAME):
                return None
            return next(
                (each for each in names if not self._allows(view, operation, resource, each)), None
            )

        self._check(denied, operation, resource, also_observed=also_observed)

    def check_idempotent_write(self) -> None:
        """Raises `ClusterNotAuthorized` unless the client may write to some topic (KIP-679)."""

        def denied(view: View) -> str | None:
            client = self.principal, self._host
            is_allowed = self._allows(
                view, Operation.IDEMPOTENT_WRITE, _CLUSTER, CLUSTER_NAME
            ) or view.allows_on_any(*client, Operation.WRITE, ResourceType.TOPIC)
            return None if is_allowed else CLUSTER_NAME

        self._check(denied, Operation.IDEMPOTENT_WRITE, _CLUSTER)

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
        self._authorization.note_denied(
            self.principal, self._host, operation, resource, (name,), is_refused=is_refused
        )
        if is_refused:
            raise not_authorized(self.principal, self._host, operation, resource, name)

    def _check_scope(
        self, operation: Operation, resource: ResourceType, names: Collection[str]
    ) -> None:
        """Raises `NotAuthorized` for work that a token for tasks is not for, whatever ACLs say."""
        for name in names:
            if not self._is_in_scope(operation, resource, name):
                raise not_authorized(self.principal, self._host, operation, resource, name)

    def _is_in_scope(self, operation: Operation, resource: ResourceType, name: str) -> bool:
        if not self.is_of_task:
            return True
        is_listed = self._topics is None or name in self._topics
        return resource is ResourceType.TOPIC and is_listed and operation in _OF_TASKS

    # -------------------------------------------------------------------------- lists

    def may(
        self, operation: Operation, resource: ResourceType = _CLUSTER, name: str = CLUSTER_NAME
    ) -> bool:
        """Returns whether an operation is allowed, as far as is known now."""
        if not self._is_in_scope(operation, resource, name):
            return False
        view = self._view
        if view is None or view.mode is not Mode.ENFORCE:
            return True
        return self._allows(view, operation, resource, name)

    def is_current(self) -> bool:
        """Returns whether the client is still the user that it has logged in as."""
        if self._authorization is None or self.identity is None:
            return True
        return self.identity.is_current(self._authorization.watch.state)

    def _allows(self, view: View, operation: Operation, resource: ResourceType, name: str) -> bool:
        return view.allows(self.principal, self._host, operation, resource, name)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stream:
    """An open stream of records of some topics."""

    caller: Caller
    operation: Operation
    topics: tuple[str, ...]
    cut: Callable[[], None]
    """Ends the stream; may be called from any thread."""

    def check(self) -> None:
        """Raises `NotAuthenticated` and `NotAuthorized` if the stream may not continue."""
        if not self.caller.is_current():
            raise errors.NotAuthenticated(reason="the user was removed, disabled or cut")
        self.caller.check(self.operation, ResourceType.TOPIC, self.topics)

    def may_continue(self) -> bool:
        """Returns whether the stream may continue, as far as is known now."""
        return self.caller.is_current() and all(
            self.caller.may(self.operation, ResourceType.TOPIC, each) for each in self.topics
        )


OPEN: Final = Caller(None, peer="")
"""Allows everything."""
