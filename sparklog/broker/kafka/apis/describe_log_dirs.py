"""DescribeLogDirs (35): the sizes of partitions in the root, the only log directory (KIP-113)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Fields, LazyArray, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, WorkerPool, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.security.acl import Operation


@serves(35, "describe_log_dirs", max_version=4, is_repeatable=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    try:
        await request.access.check(Operation.DESCRIBE)
    except errors.NotAuthorized as error:
        return {"throttle_time": NO_TIME, "error_code": code_of(error), "results": ()}
    sizes = await context.run_blocking(WorkerPool.READ, context.broker.partitions.log_bytes)
    requested = {name: set(partition_sizes) for name, partition_sizes in sizes.items()}
    if request.body.topics is not None:
        requested = {each.topic: set(each.partitions) for each in request.body.topics}
    free_bytes = await context.run_blocking(WorkerPool.READ, context.broker.free_bytes)
    root = {
        "error_code": ErrorCode.none,
        "log_dir": context.broker.cluster().root,
        "topics": LazyArray(
            lambda topic: _topic(topic[0], topic[1], requested[topic[0]]),
            [topic for topic in sorted(sizes.items()) if topic[0] in requested],
        ),
        "total_bytes": -1,  # unknown: object stores have no fixed size
        "usable_bytes": -1 if free_bytes is None else free_bytes,
    }
    return {"throttle_time": NO_TIME, "error_code": ErrorCode.none, "results": [root]}


def _topic(name: str, sizes: Mapping[int, int], requested: Collection[int]) -> Fields:
    return {
        "name": name,
        "partitions": [
            {
                "partition_index": number,
                "partition_size": size,
                "offset_lag": 0,
                "is_future_key": False,
            }
            for number, size in sizes.items()
            if number in requested
        ],
    }
