"""DescribeAcls (29): the ACLs that a filter selects (KIP-140, KIP-290).

While ACLs are off, it replies as a Kafka without an authorizer does. Tools that copy a cluster,
such as MirrorMaker, then continue without ACLs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka import acls
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Fields, LazyArray, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, WorkerPool, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.security.acl import Acl, AclFilter, Operation


@serves(29, "describe_acls", max_version=3, is_repeatable=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    admin = acls.admin_of(context, request.access)
    if admin is None:
        return _reply(code=ErrorCode.security_disabled, message=acls.DISABLED_MESSAGE)
    try:
        await request.access.check(Operation.DESCRIBE)
        wanted = acls.filter_of(request.body)
        found = await context.run_blocking(WorkerPool.READ, _resources, admin.matching, wanted)
    except errors.SecurityNotRead:
        raise
    except errors.SparklogError as error:
        return _reply(code=code_of(error), message=str(error))
    return _reply(found)


def _reply(
    found: Sequence[Sequence[Acl]] = (),
    *,
    code: ErrorCode = ErrorCode.none,
    message: str | None = None,
) -> Reply:
    return {
        "throttle_time": NO_TIME,
        "error_code": code,
        "error_message": message,
        "resources": LazyArray(_resource, found),
    }


def _resources(
    matching: Callable[[AclFilter], Iterable[Acl]], wanted: AclFilter
) -> list[list[Acl]]:
    """Returns the ACLs of each resource pattern."""
    pattern = attrgetter("resource", "name", "pattern")
    return [list(group) for _, group in itertools.groupby(matching(wanted), pattern)]


def _resource(same: Sequence[Acl]) -> Fields:
    return {**acls.resource_fields(same[0]), "acls": LazyArray(acls.entry_fields, same)}
