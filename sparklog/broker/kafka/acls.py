"""ACLs and filters in Kafka's messages."""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.access import Access
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.registry import HandlerContext
from sparklog.broker.security_admin import CHANGED_ACLS, SecurityAdmin
from sparklog.security.acl import Acl, AclFilter, Operation, PatternType, Permission, ResourceType

DISABLED_MESSAGE: Final = "ACLs are off: sparklog security observe, or enforce, evaluates them"
"""Kafka's error without an authorizer is the same; its text is another."""


def admin_of(context: HandlerContext, access: Access) -> SecurityAdmin | None:
    """Returns the administration of the ACLs; None while they are off."""
    return context.security_admin if access.is_evaluated else None


def acl_of(creation: Any) -> Acl:
    """Returns the ACL of a CreateAcls request. Raises `BadRequest` for unknown elements."""
    try:
        return Acl(
            resource=ResourceType(creation.resource_type),
            name=creation.resource_name,
            pattern=PatternType(creation.resource_pattern_type),
            principal=creation.principal,
            host=creation.host,
            operation=Operation(creation.operation),
            permission=Permission(creation.permission_type),
        )
    except ValueError as error:
        raise errors.BadRequest(reason=f"an ACL with an unknown element: {error}") from None


def filter_of(wanted: Any) -> AclFilter:
    """Returns the filter of a DescribeAcls or DeleteAcls request. Raises `BadRequest`."""
    try:
        return AclFilter(
            resource=ResourceType(wanted.resource_type_filter),
            name=wanted.resource_name_filter,
            pattern=PatternType(wanted.pattern_type_filter),
            principal=wanted.principal_filter,
            host=wanted.host_filter,
            operation=Operation(wanted.operation),
            permission=Permission(wanted.permission_type),
        )
    except ValueError as error:
        raise errors.BadRequest(reason=f"a filter with an unknown element: {error}") from None


def entry_fields(acl: Acl) -> dict[str, Any]:
    """Returns the fields of an ACL, without its resource."""
    return {
        "principal": acl.principal,
        "host": acl.host,
        "operation": int(acl.operation),
        "permission_type": int(acl.permission),
    }


def resource_fields(acl: Acl) -> dict[str, Any]:
    """Returns the fields of the resource pattern of an ACL."""
    return {
        "resource_type": int(acl.resource),
        "resource_name": acl.name,
        "pattern_type": int(acl.pattern),
    }


def check_count(count: int) -> None:
    """Raises `BadRequest` for a request with too many ACLs or filters."""
    if count > CHANGED_ACLS:
        reason = f"{count:,} ACLs or filters; at most {CHANGED_ACLS:,} are changed by one request"
        raise errors.BadRequest(reason=reason)


def code_of_change(error: errors.SparklogError) -> ErrorCode:
    """Returns the code of an error in CreateAcls and DeleteAcls."""
    return ErrorCode.invalid_request if isinstance(error, errors.BadOption) else code_of(error)
