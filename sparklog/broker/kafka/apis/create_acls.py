"""CreateAcls (30): adds ACLs; those that exist stay (KIP-140, KIP-290).

All valid ones of a request are in force together, or none is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka import acls
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, WorkerPool, serves
from sparklog.broker.kafka.times import NO_TIME


@serves(30, "create_acls", max_version=3)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    creations = request.body.creations
    admin = acls.admin_of(context, request.access)
    if admin is None:
        result = _result(ErrorCode.security_disabled, acls.DISABLED_MESSAGE)
        return _reply([result] * len(creations))
    try:
        await request.access.check_security_change()
        acls.check_count(len(creations))
        outcomes = await context.run_blocking(
            WorkerPool.CHANGE,
            admin.create,
            request.access.administrator,
            [acls.acl_of(each) for each in creations],
        )
    except errors.SecurityNotRead:
        raise
    except errors.SparklogError as error:
        return _reply([_failed(error)] * len(creations))
    return _reply([_failed(each) for each in outcomes])


def _reply(results: Sequence[Fields]) -> Reply:
    return {"throttle_time": NO_TIME, "results": results}


def _failed(error: errors.SparklogError | None) -> dict[str, Any]:
    if error is None:
        return _result(ErrorCode.none, None)
    return _result(acls.code_of_change(error), str(error))


def _result(code: ErrorCode, message: str | None) -> dict[str, Any]:
    return {"error_code": code, "error_message": message}
