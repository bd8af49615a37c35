"""DescribeAcls (29): there are none, nor anything that would look at them.

Said as a Kafka without an authorizer says it: who copies a cluster, as MirrorMaker does, goes on
without them then.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.times import NO_TIME


@serves(29, "describe_acls", last=3)
async def _handle(_door: Door, _request: Request) -> Reply:
    return {
        "throttle_time": NO_TIME,
        "error_code": ErrorCode.security_disabled,
        "error_message": "No Authorizer is configured on the broker",
        "resources": (),
    }
