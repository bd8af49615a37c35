"""FindCoordinator (10): the coordinators of groups (KIP-699).

A group's coordinator is the leader of the partition of `__consumer_offsets` that holds its records.
The first request creates `__consumer_offsets`. There are no transactions and no share groups. For a
transactional id, the error is the one on which both the Java clients and librdkafka stop and report
the reason; on any other, librdkafka retries until its timeout.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.access import NOTHING
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Fields, LazyArray, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, WorkerPool, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.broker.kafka.topics import nodes
from sparklog.security.acl import Operation, ResourceType

_GROUP: Final = 0
_TRANSACTION: Final = 1


@serves(10, "find_coordinator", max_version=6, is_repeatable=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    body, access = request.body, request.access
    key_type = getattr(body, "key_type", _GROUP)
    keys = (body.key,) if hasattr(body, "key") else body.coordinator_keys
    refused: Collection[str] = NOTHING
    if key_type == _GROUP:
        refused = await access.refused(Operation.DESCRIBE, ResourceType.GROUP, keys)
    failure = None
    if any(key not in refused for key in keys):
        failure = await _failure(context, key_type)
    known = {each.broker: each for each in nodes(context.broker, request.listener)}

    def found(group: str) -> Fields:
        if group in refused:
            error = access.error(Operation.DESCRIBE, ResourceType.GROUP, group)
            return _refused(code_of(error), str(error))
        if failure is not None:
            return failure
        coordinator = context.groups.coordinator_of(group)
        node = known.get(coordinator)
        if node is None and coordinator in context.broker.members.up():
            name = request.listener.name
            reason = (
                f"broker {coordinator} coordinates group {group} and has no listener {name}: give"
                " all brokers the same listeners"
            )
            return _refused(ErrorCode.coordinator_not_available, reason)
        if node is None:
            reason = f"the coordinator of group {group} is down; another broker takes over"
            return _refused(ErrorCode.coordinator_not_available, reason)
        return {
            "error_code": ErrorCode.none,
            "error_message": None,
            "node_id": node.broker,
            "host": node.host,
            "port": node.port,
        }

    if hasattr(body, "key"):
        return {"throttle_time": NO_TIME, **found(body.key)}
    coordinators = LazyArray(lambda key: {"key": key, **found(key)}, keys)
    return {"throttle_time": NO_TIME, "coordinators": coordinators}


async def _failure(context: HandlerContext, key_type: int) -> Fields | None:
    """Returns the reply for all keys, if no coordinator can be found."""
    if key_type == _TRANSACTION:
        reason = "this broker has no transactions: use a producer without transactional.id"
        return _refused(ErrorCode.cluster_authorization_failed, reason)
    try:
        if key_type != _GROUP:
            raise errors.BadRequest(reason="share groups are not supported")
        await context.run_blocking(WorkerPool.CONTROL, context.groups.open)
    except errors.SparklogError as error:
        is_retriable = isinstance(error, errors.Retriable)
        code = ErrorCode.coordinator_not_available if is_retriable else code_of(error)
        return _refused(code, str(error))
    return None


def _refused(code: ErrorCode, reason: str) -> Fields:
    return {
        "error_code": code,
        "error_message": reason,
        "node_id": -1,
        "host": "",
        "port": -1,
    }
