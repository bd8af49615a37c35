"""Access control lists, judged as Kafka's `StandardAuthorizer` judges them.

An ACL allows or denies a principal an operation on the resources that its pattern matches. Of all
ACLs that match a request, one that denies takes precedence; else one that allows is needed. If no
ACL of anybody matches the resource, the policy decides (`allow.everyone.if.no.acl.found`).

Some operations imply others, but only in an ACL that allows: READ, WRITE, DELETE and ALTER include
DESCRIBE, and ALTER_CONFIGS includes DESCRIBE_CONFIGS. ALL includes every operation either way.

Source: `StandardAuthorizerData` and `Authorizer.authorizeByResourceType` of Kafka 4.1.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Final

import msgspec

ANONYMOUS: Final = "User:ANONYMOUS"
"""The principal of a client that has not logged in, as in Kafka."""
ANYONE: Final = "User:*"
WILDCARD: Final = "*"
"""The name of a literal pattern that matches every resource, and the host that matches every one.
"""


class ResourceType(IntEnum):
    """Kafka's `ResourceType`."""

    ANY = 1
    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5
    DELEGATION_TOKEN = 6
    USER = 7


class PatternType(IntEnum):
    """Kafka's `PatternType`. ACLs are LITERAL or PREFIXED; ANY and MATCH are for filters."""

    ANY = 1
    MATCH = 2
    LITERAL = 3
    PREFIXED = 4


class Operation(IntEnum):
    """Kafka's `AclOperation`."""

    ANY = 1
    ALL = 2
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12
    CREATE_TOKENS = 13
    DESCRIBE_TOKENS = 14
    TWO_PHASE_COMMIT = 15


class Permission(IntEnum):
    """Kafka's `AclPermissionType`."""

    ANY = 1
    DENY = 2
    ALLOW = 3


CLUSTER_NAME: Final = "kafka-cluster"
"""The name of the only resource of type CLUSTER."""

OPERATIONS: Final[Mapping[ResourceType, frozenset[Operation]]] = {
    ResourceType.TOPIC: frozenset(
        {
            Operation.READ,
            Operation.WRITE,
            Operation.CREATE,
            Operation.DELETE,
            Operation.ALTER,
            Operation.DESCRIBE,
            Operation.DESCRIBE_CONFIGS,
            Operation.ALTER_CONFIGS,
        }
    ),
    ResourceType.GROUP: frozenset(
        {
            Operation.READ,
            Operation.DELETE,
            Operation.DESCRIBE,
            Operation.DESCRIBE_CONFIGS,
            Operation.ALTER_CONFIGS,
        }
    ),
    ResourceType.CLUSTER: frozenset(
        {
            Operation.CREATE,
            Operation.ALTER,
            Operation.DESCRIBE,
            Operation.CLUSTER_ACTION,
            Operation.DESCRIBE_CONFIGS,
            Operation.ALTER_CONFIGS,
            Operation.IDEMPOTENT_WRITE,
        }
    ),
    ResourceType.TRANSACTIONAL_ID: frozenset(
        {Operation.WRITE, Operation.DESCRIBE, Operation.TWO_PHASE_COMMIT}
    ),
    ResourceType.DELEGATION_TOKEN: frozenset({Operation.DESCRIBE}),
    ResourceType.USER: frozenset({Operation.CREATE_TOKENS, Operation.DESCRIBE_TOKENS}),
}
"""The operations that a resource of each type supports, as Kafka's `AclEntry` lists them."""

_ALLOW: Final = Permission.ALLOW
_IMPLIED: Final = {
    Operation.READ: Operation.DESCRIBE,
    Operation.WRITE: Operation.DESCRIBE,
    Operation.DELETE: Operation.DESCRIBE,
    Operation.ALTER: Operation.DESCRIBE,
    Operation.ALTER_CONFIGS: Operation.DESCRIBE_CONFIGS,
}
_BITS: Final = {
    (permission, operation): sum(1 << each for each in Operation)
    if operation is Operation.ALL
    else 1 << operation
    | (1 << _IMPLIED[operation] if permission is _ALLOW and operation in _IMPLIED else 0)
    for permission in Permission
    for operation in Operation
}
"""The operations that an ACL allows or denies, as a bit mask."""


class Acl(msgspec.Struct, frozen=True, array_like=True, order=True, forbid_unknown_fields=True):
    """One ACL, with the seven fields of Kafka's `AclBinding`."""

    resource: ResourceType
    name: str
    pattern: PatternType
    principal: str
    """As "User:alice"; "User:*" is anyone."""
    host: str
    """The address of the client, or "*"."""
    operation: Operation
    permission: Permission


class AclFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects ACLs, as Kafka's `AclBindingFilter`; the defaults select all."""

    resource: ResourceType = ResourceType.ANY
    name: str | None = None
    pattern: PatternType = PatternType.ANY
    """MATCH selects every pattern that a resource called `name` matches."""
    principal: str | None = None
    host: str | None = None
    operation: Operation = Operation.ANY
    permission: Permission = Permission.ANY

    def matches(self, acl: Acl) -> bool:
        return (
            self.resource in (ResourceType.ANY, acl.resource)
            and self._matches_pattern(acl)
            and self.principal in (None, acl.principal)
            and self.host in (None, acl.host)
            and self.operation in (Operation.ANY, acl.operation)
            and self.permission in (Permission.ANY, acl.permission)
        )

    def _matches_pattern(self, acl: Acl) -> bool:
        if self.pattern not in (PatternType.ANY, PatternType.MATCH, acl.pattern):
            return False
        if self.name is None or self.name == acl.name:
            return True
        if self.pattern is not PatternType.MATCH:
            return False
        if acl.pattern is PatternType.LITERAL:
            return acl.name == WILDCARD
        return self.name.startswith(acl.name)


@functools.lru_cache(1_024)
def normal_host(host: str) -> str:
    """Returns the one spelling of an address, and IPv4 for an IPv4 address in IPv6.

    Java writes IPv6 addresses without "::", and operators with it.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    return str(getattr(address, "ipv4_mapped", None) or address)


class _Grants:
    """Operations that the ACLs of one pattern allow and deny, as bit masks by (principal, host)."""

    __slots__ = ("allowed", "denied")

    def __init__(self) -> None:
        self.allowed: dict[tuple[str, str], int] = {}
        self.denied: dict[tuple[str, str], int] = {}

    def add(self, acl: Acl) -> None:
        masks = self.allowed if acl.permission is _ALLOW else self.denied
        key = acl.principal, normal_host(acl.host)
        masks[key] = masks.get(key, 0) | _BITS[acl.permission, acl.operation]


class AclIndex:
    """Immutable ACLs, indexed so that a decision takes one lookup for each length of a prefix."""

    def __init__(
        self,
        acls: Iterable[Acl] = (),
        *,
        super_users: Iterable[str] = (),
        allow_everyone_if_no_acl_found: bool = False,
    ) -> None:
        self._super_users = frozenset(super_users)
        self._allows_unlisted = allow_everyone_if_no_acl_found
        self._literal: dict[ResourceType, dict[str, _Grants]] = {}
        self._prefixed: dict[ResourceType, dict[str, _Grants]] = {}
        self._acls = tuple(acls)
        for acl in self._acls:
            patterns = self._literal if acl.pattern is PatternType.LITERAL else self._prefixed
            names = patterns.setdefault(acl.resource, {})
            grants = names.get(acl.name)
            if grants is None:
                grants = names[acl.name] = _Grants()
            grants.add(acl)
        self._lengths = {
            resource: sorted({len(name) for name in names})
            for resource, names in self._prefixed.items()
        }

    @functools.cached_property
    def _by_principal(self) -> dict[tuple[str, ResourceType], list[Acl]]:
        """The ACLs of each principal, for requests that only idempotent producers make."""
        found: dict[tuple[str, ResourceType], list[Acl]] = {}
        for acl in self._acls:
            found.setdefault((acl.principal, acl.resource), []).append(acl)
        return found

    def allows(
        self, principal: str, host: str, operation: Operation, resource: ResourceType, name: str
    ) -> bool:
        """Returns whether `principal`, connected from `host`, may perform the operation.

        Args:
            principal: as "User:alice".
            host: the client's address as `normal_host` writes it, such as "10.0.0.7".
            operation: a single operation, neither ANY nor ALL.
            resource: the type of the resource.
            name: the name of the resource, whether it exists or not.
        """
        listed = self._decision(principal, host, operation, resource, name)
        return self._allows_unlisted if listed is None else listed

    def allows_listed(
        self, principal: str, host: str, operation: Operation, resource: ResourceType, name: str
    ) -> bool:
        """Returns the same, but never True only because no ACL mentions the resource."""
        return bool(self._decision(principal, host, operation, resource, name))

    def _decision(
        self, principal: str, host: str, operation: Operation, resource: ResourceType, name: str
    ) -> bool | None:
        """Returns None if no ACL mentions the resource."""
        if principal in self._super_users:
            return True
        bit = 1 << operation
        keys = (principal, host), (principal, WILDCARD), (ANYONE, host), (ANYONE, WILDCARD)
        is_listed = is_allowed = False
        for grants in self._matching(resource, name):
            is_listed = True
            for key in keys:
                if grants.denied and grants.denied.get(key, 0) & bit:
                    return False
                is_allowed = is_allowed or bool(grants.allowed.get(key, 0) & bit)
        return is_allowed if is_listed else None

    def allows_on_any(
        self, principal: str, host: str, operation: Operation, resource: ResourceType
    ) -> bool:
        """Returns whether the operation may be allowed on at least one resource of the type.

        As in Kafka, implied operations do not count here, and a prefix that is allowed counts
        unless the same or a shorter prefix is denied.
        """
        assert operation not in _IMPLIED.values(), "an implied operation does not count here"
        if self.allows(principal, host, operation, resource, "hardcode"):
            return True
        found: dict[tuple[Permission, PatternType], set[str]] = {
            (permission, pattern): set()
            for permission in (Permission.DENY, Permission.ALLOW)
            for pattern in (PatternType.LITERAL, PatternType.PREFIXED)
        }
        for who in (principal, ANYONE):
            for acl in self._by_principal.get((who, resource), ()):
                if normal_host(acl.host) in (host, WILDCARD) and acl.operation in (
                    operation,
                    Operation.ALL,
                ):
                    found[acl.permission, acl.pattern].add(acl.name)
        denied = found[Permission.DENY, PatternType.LITERAL]
        denied_prefixes = found[Permission.DENY, PatternType.PREFIXED]
        allowed = found[Permission.ALLOW, PatternType.LITERAL]
        if WILDCARD in denied or WILDCARD in allowed:
            return WILDCARD not in denied
        lengths = {len(each) for each in denied_prefixes}
        return any(
            denied_prefixes.isdisjoint(name[:length] for length in lengths if length <= len(name))
            for name in (allowed - denied) | found[Permission.ALLOW, PatternType.PREFIXED]
        )

    def _matching(self, resource: ResourceType, name: str) -> Iterator[_Grants]:
        literal = self._literal.get(resource)
        if literal is not None:
            if (found := literal.get(name)) is not None:
                yield found
            if name != WILDCARD and (found := literal.get(WILDCARD)) is not None:
                yield found
        prefixed = self._prefixed.get(resource)
        if prefixed is not None:
            for length in self._lengths[resource]:
                if length > len(name):
                    break
                if (found := prefixed.get(name[:length])) is not None:
                    yield found
