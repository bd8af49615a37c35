"""Changes of the ACLs of a root; pure."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from sparklog import errors
from sparklog.security.acl import (
    CLUSTER_NAME,
    OPERATIONS,
    WILDCARD,
    Acl,
    AclFilter,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from sparklog.security.state import SecurityState
from sparklog.security.users import NAME_BYTES_MAX, Change

ACLS_MAX: Final = 100_000
ACLS_OF_PRINCIPAL_MAX: Final = 1_000
"""ACLs of one principal on one resource pattern."""
PRODUCER: Final[Mapping[ResourceType, tuple[Operation, ...]]] = {
    ResourceType.TOPIC: (Operation.WRITE, Operation.DESCRIBE, Operation.CREATE),
    ResourceType.TRANSACTIONAL_ID: (Operation.WRITE, Operation.DESCRIBE),
}
"""The operations of a producer, as `kafka-acls.sh --producer` has them."""
CONSUMER: Final[Mapping[ResourceType, tuple[Operation, ...]]] = {
    ResourceType.TOPIC: (Operation.READ, Operation.DESCRIBE),
    ResourceType.GROUP: (Operation.READ,),
}
"""The operations of a group's consumer, as `kafka-acls.sh --consumer` has them."""
_USER: Final = "User"
_ROOT: Final = "Root"


def added(acls: Iterable[Acl]) -> Change:
    """Adds ACLs. Those that exist stay, as in Kafka. Raises what `check_acl` raises."""
    given = list(acls)
    for acl in given:
        check_acl(acl)

    def change(state: SecurityState) -> SecurityState | None:
        new = frozenset(given) - state.acls
        if not new:
            return None
        after = state.acls | new
        _check_bounds(after, new)
        return msgspec.structs.replace(state, acls=after)

    return change


def removed(acls: Iterable[Acl]) -> Change:
    """Removes ACLs. Those that do not exist are ignored, as in Kafka.

    For a removal by filters, select the ACLs by `matching` in the version that the change extends.
    """
    given = frozenset(acls)

    def change(state: SecurityState) -> SecurityState | None:
        after = state.acls - given
        return msgspec.structs.replace(state, acls=after) if after != state.acls else None

    return change


def matching(state: SecurityState, *filters: AclFilter) -> frozenset[Acl]:
    """Returns the ACLs that at least one of the filters selects."""
    return frozenset(acl for acl in state.acls if any(each.matches(acl) for each in filters))


def described(acl: Acl) -> str:
    """Describes an ACL in one line, such as `ALLOW User:alice READ on topic orders`."""
    prefix = "prefix " if acl.pattern is PatternType.PREFIXED else ""
    host = "" if acl.host == WILDCARD else f" from {acl.host}"
    resource = f"{kind_of(acl.resource)} {prefix}{acl.name}"
    return f"{acl.permission.name} {acl.principal} {acl.operation.name} on {resource}{host}"


def kind_of(resource: ResourceType) -> str:
    """Returns the type of a resource in words, such as `transactional id`."""
    return resource.name.lower().replace("_", " ")


# ------------------------------------------------------------------------------ checks


def check_acl(acl: Acl) -> None:
    """Raises `BadOption` if an ACL cannot be created.

    The rules are those of CreateAcls and of `kafka-acls.sh`, and others that exclude ACLs that
    would never match: a client's principal is a user, and its host is an address.
    """
    supported = OPERATIONS.get(acl.resource)
    if supported is None:
        raise _bad("resource type", acl.resource.name, "an ACL needs a single type")
    if acl.pattern not in (PatternType.LITERAL, PatternType.PREFIXED):
        raise _bad("pattern type", acl.pattern.name, "an ACL needs LITERAL or PREFIXED")
    if acl.permission not in (Permission.ALLOW, Permission.DENY):
        raise _bad("permission", acl.permission.name, "an ACL needs ALLOW or DENY")
    if acl.operation not in (*supported, Operation.ALL):
        names = ", ".join(each.name for each in sorted(supported))
        reason = f"the operations on a {kind_of(acl.resource)} are ALL, {names}"
        raise _bad("operation", acl.operation.name, reason)
    if reason := _unusable(acl.name):
        raise _bad("resource name", acl.name, reason)
    if acl.resource is ResourceType.CLUSTER and acl.name != CLUSTER_NAME:
        raise _bad("resource name", acl.name, f"the only cluster is {CLUSTER_NAME}")
    check_principal(acl.principal)
    if not _is_host(acl.host):
        raise _bad("host", acl.host, "it is neither an IP address nor *, which is every host")


def check_principal(principal: str) -> None:
    """Raises `BadOption` if the principal of no client can be this one."""
    kind, colon, name = principal.partition(":")
    if not colon:
        reason = f"write {_USER}:{principal}"
    elif kind == _ROOT:
        reason = "everything is allowed to programs that can read the security state"
    elif kind != _USER:
        reason = f"the principal of a client begins with {_USER}:"
    else:
        reason = _unusable(name)
    if reason:
        raise _bad("principal", principal, reason)


def _unusable(name: str) -> str:
    """Returns why a name cannot be used; empty if it can."""
    if not name:
        return "the name is empty"
    if not name.isprintable():
        return "the name has characters that are not printable"
    if len(name.encode()) > NAME_BYTES_MAX:
        return f"the name has more than {NAME_BYTES_MAX} bytes"
    return ""


def _is_host(host: str) -> bool:
    if host == WILDCARD:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _check_bounds(after: frozenset[Acl], new: frozenset[Acl]) -> None:
    if len(after) > ACLS_MAX:
        reason = f"a root has at most {ACLS_MAX:,} ACLs: remove some first"
        raise _bad("ACL", described(min(new)), reason)
    changed = {_owner_of(acl): acl for acl in new}
    counts = Counter(owner for acl in after if (owner := _owner_of(acl)) in changed)
    owner, count = counts.most_common(1)[0]
    if count > ACLS_OF_PRINCIPAL_MAX:
        reason = (
            f"a principal has at most {ACLS_OF_PRINCIPAL_MAX:,} ACLs on one resource: allow the"
            " operation ALL, or every host"
        )
        raise _bad("ACL", described(changed[owner]), reason)


def _owner_of(acl: Acl) -> tuple[ResourceType, str, PatternType, str]:
    return acl.resource, acl.name, acl.pattern, acl.principal


def _bad(option: str, value: str, reason: str) -> errors.BadOption:
    return errors.BadOption(option=option, value=value, reason=reason)
