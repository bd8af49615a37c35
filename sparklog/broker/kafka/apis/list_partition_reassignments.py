"""ListPartitionReassignments (46): ongoing reassignments (KIP-455).

A partition moves while AlterPartitionReassignments is being handled, so none is ongoing afterwards.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.security.acl import Operation


@serves(46, "list_partition_reassignments", max_version=0, is_repeatable=True)
async def _handle(_context: HandlerContext, request: Request) -> Reply:
    code, message = ErrorCode.none, None
    try:
        await request.access.check(Operation.DESCRIBE)
    except errors.NotAuthorized as error:
        code, message = code_of(error), str(error)
    return {
        "throttle_time": NO_TIME,
        "error_code": code,
        "error_message": message,
        "topics": (),
    }
