"""AlterPartitionReassignments (45): moves partitions to other brokers (KIP-455).

A partition has one replica. It moves to the first of the brokers named for it, and the reply is
sent once it is there. The cluster still rebalances itself: if a broker then leads more than its
share, partitions move on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.broker import Broker
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, WorkerPool, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.broker.kafka.topics import check_assignment, partition_status
from sparklog.security.acl import Operation


@serves(45, "alter_partition_reassignments", max_version=1, is_repeatable=True, follows=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    body, broker = request.body, context.broker
    refused: dict[tuple[str, int], errors.SparklogError] = {}
    targets: dict[tuple[str, int], int] = {}
    denied: errors.NotAuthorized | None = None
    code, message = ErrorCode.none, None
    try:
        await request.access.check(Operation.ALTER)
    except errors.NotAuthorized as error:
        denied, code, message = error, code_of(error), str(error)
    async for topic in context.scheduler.iterate(body.topics):
        async for each in context.scheduler.iterate(topic.partitions):
            key = topic.name, each.partition_index
            if denied is not None:
                refused[key] = denied
                continue
            try:
                _check(broker, topic.name, each)
            except errors.SparklogError as error:
                refused[key] = error
            else:
                if each.replicas is not None:
                    targets[key] = each.replicas[0]
    try:
        if targets:
            refused |= await context.run_blocking(
                WorkerPool.CHANGE, _reassign, broker, targets, body.timeout.total_seconds()
            )
    except errors.SparklogError as error:
        code, message = code_of(error), str(error)
    return {
        "throttle_time": NO_TIME,
        "allow_replication_factor_change": getattr(body, "allow_replication_factor_change", True),
        "error_code": code,
        "error_message": message,
        "responses": [
            {
                "name": topic.name,
                "partitions": [
                    _partition(topic.name, each, refused)
                    async for each in context.scheduler.iterate(topic.partitions)
                ],
            }
            async for topic in context.scheduler.iterate(body.topics)
        ],
    }


def _reassign(
    broker: Broker, targets: Mapping[tuple[str, int], int], timeout_seconds: float
) -> Mapping[tuple[str, int], errors.SparklogError]:
    return broker.cluster_admin.reassign(targets, timeout_seconds=timeout_seconds)


def _check(broker: Broker, name: str, partition: Any) -> None:
    """Raises `UnknownTopic`, `UnknownPartition` or `BadAssignment`."""
    partition_status(broker, name, partition.partition_index)
    if partition.replicas is None:
        return
    check_assignment(name, [partition.replicas])
    if unknown := {*partition.replicas} - broker.members.up_or_just_gone().keys():
        reason = f"brokers {sorted(unknown)} are not in the cluster"
        raise errors.BadAssignment(topic=name, reason=reason)


def _partition(
    name: str, partition: Any, refused: Mapping[tuple[str, int], errors.SparklogError]
) -> Fields:
    code, message = ErrorCode.none, None
    if (error := refused.get((name, partition.partition_index))) is not None:
        code, message = code_of(error), str(error)
    elif partition.replicas is None:
        code = ErrorCode.no_reassignment_in_progress
    return {
        "partition_index": partition.partition_index,
        "error_code": code,
        "error_message": message,
    }
