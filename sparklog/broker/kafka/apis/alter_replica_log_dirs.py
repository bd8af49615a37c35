"""AlterReplicaLogDirs (34): moves partitions to another log directory (KIP-113).

The root is the only log directory, so a move there has already happened.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.broker import Broker
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.broker.kafka.topics import partition_status
from sparklog.security.acl import CLUSTER_NAME, Operation, ResourceType


@serves(34, "alter_replica_log_dirs", max_version=2, follows=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    broker, codes = context.broker, dict[str, dict[int, ErrorCode]]()
    root = broker.cluster().root
    is_refused = bool(
        await request.access.refused(Operation.ALTER, ResourceType.CLUSTER, (CLUSTER_NAME,))
    )
    async for each in context.scheduler.iterate(request.body.dirs):
        async for topic in context.scheduler.iterate(each.topics):
            of_topic = codes.setdefault(topic.name, {})
            async for number in context.scheduler.iterate(topic.partitions):
                if is_refused:
                    of_topic[number] = ErrorCode.cluster_authorization_failed
                elif each.path == root:
                    of_topic[number] = _code(broker, topic.name, number)
                else:
                    of_topic[number] = ErrorCode.log_dir_not_found
    return {
        "throttle_time": NO_TIME,
        "results": [
            {
                "topic_name": name,
                "partitions": [
                    {"partition_index": number, "error_code": code}
                    for number, code in of_topic.items()
                ],
            }
            for name, of_topic in codes.items()
        ],
    }


def _code(broker: Broker, name: str, number: int) -> ErrorCode:
    try:
        partition_status(broker, name, number)
    except errors.SparklogError as error:
        return code_of(error)
    return ErrorCode.none
