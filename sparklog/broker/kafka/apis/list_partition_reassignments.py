"""ListPartitionReassignments (46): ongoing reassignments (KIP-455).

A partition moves while AlterPartitionReassignments is being handled, so none is ongoing afterwards.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves
from sparklog.broker.kafka.times import NO_TIME


@serves(46, "list_partition_reassignments", max_version=0, is_repeatable=True)
async def _handle(_context: HandlerContext, _request: Request) -> Reply:
    return {
        "throttle_time": NO_TIME,
        "error_code": ErrorCode.none,
        "error_message": None,
        "topics": (),
    }
