"""FindCoordinator (10): the coordinator of groups, which is this broker (KIP-699).

Transactions and share groups have no coordinator. The first request opens `__consumer_offsets`.
"""

from __future__ import annotations

from typing import Final

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Fields, LazyArray, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, WorkerPool, serves
from sparklog.broker.kafka.times import NO_TIME

_GROUP: Final = 0


@serves(10, "find_coordinator", max_version=6)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    body = request.body
    coordinator = await _coordinator_fields(context, getattr(body, "key_type", _GROUP))
    keys = getattr(body, "coordinator_keys", ())
    return {
        "throttle_time": NO_TIME,
        **coordinator,
        "coordinators": LazyArray(lambda key: {"key": key, **coordinator}, keys),
    }


async def _coordinator_fields(context: HandlerContext, key_type: int) -> Fields:
    try:
        if key_type != _GROUP:
            raise errors.BadRequest(reason="transactions and share groups are not supported")
        await context.run_blocking(WorkerPool.CONTROL, context.groups.open)
    except errors.SparklogError as error:
        code = code_of(error)
        if isinstance(error, errors.Retriable):
            code = ErrorCode.coordinator_not_available
        return {
            "error_code": code,
            "error_message": str(error),
            "node_id": -1,
            "host": "",
            "port": -1,
        }
    return {
        "error_code": ErrorCode.none,
        "error_message": None,
        "node_id": context.broker.broker_id,
        "host": context.host,
        "port": context.port,
    }
