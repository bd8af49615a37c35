"""DeleteAcls (31): removes the ACLs that filters select, all together (KIP-140, KIP-290)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka import acls
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, WorkerPool, serves
from sparklog.broker.kafka.times import NO_TIME


@serves(31, "delete_acls", max_version=3)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    filters = request.body.filters
    admin = acls.admin_of(context, request.access)
    if admin is None:
        result = _result(ErrorCode.security_disabled, acls.DISABLED_MESSAGE)
        return _reply([result] * len(filters))
    try:
        await request.access.check_security_change()
        acls.check_count(len(filters))
        found = await context.run_blocking(
            WorkerPool.CHANGE,
            admin.delete,
            request.access.administrator,
            [acls.filter_of(each) for each in filters],
        )
    except errors.SecurityNotRead:
        raise
    except errors.SparklogError as error:
        return _reply([_result(acls.code_of_change(error), str(error))] * len(filters))
    return _reply(
        [
            _result(ErrorCode.none, None, [_deleted(acl) for acl in sorted(selected)])
            for selected in found
        ]
    )


def _reply(results: Sequence[Fields]) -> Reply:
    return {"throttle_time": NO_TIME, "filter_results": results}


def _result(code: ErrorCode, message: str | None, deleted: Sequence[Fields] = ()) -> dict[str, Any]:
    return {"error_code": code, "error_message": message, "matching_acls": deleted}


def _deleted(acl: Any) -> Fields:
    return {
        "error_code": ErrorCode.none,
        "error_message": None,
        **acls.resource_fields(acl),
        **acls.entry_fields(acl),
    }
