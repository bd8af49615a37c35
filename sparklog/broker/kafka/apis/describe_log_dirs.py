"""DescribeLogDirs (35): what partitions take under the root, the one folder of logs (KIP-113)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kio.schema.errors import ErrorCode

from sparklog.broker.kafka.messages import Each, Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, Work, serves
from sparklog.broker.kafka.times import NO_TIME


@serves(35, "describe_log_dirs", last=4)
async def _handle(door: Door, request: Request) -> Reply:
    sizes = await door.blocking(Work.READ, door.core.log_bytes)
    wanted = {name: set(range(len(of_topic))) for name, of_topic in sizes.items()}
    if request.body.topics is not None:
        wanted = {each.topic: set(each.partitions) for each in request.body.topics}
    free_bytes = await door.blocking(Work.READ, door.core.free_bytes)
    root = {
        "error_code": ErrorCode.none,
        "log_dir": door.core.cluster().root,
        "topics": Each(
            lambda named: _topic(named[0], named[1], wanted[named[0]]),
            [named for named in sorted(sizes.items()) if named[0] in wanted],
        ),
        "total_bytes": -1,  # nobody knows how much a store has
        "usable_bytes": -1 if free_bytes is None else free_bytes,
    }
    return {"throttle_time": NO_TIME, "error_code": ErrorCode.none, "results": [root]}


def _topic(name: str, sizes: Sequence[int], wanted: Collection[int]) -> Fields:
    return {
        "name": name,
        "partitions": [
            {
                "partition_index": number,
                "partition_size": size,
                "offset_lag": 0,
                "is_future_key": False,
            }
            for number, size in enumerate(sizes)
            if number in wanted
        ],
    }
