"""DescribeAcls (29): replies that security is disabled, as a Kafka without an authorizer does.

Tools that copy a cluster, such as MirrorMaker, then continue without ACLs.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves
from sparklog.broker.kafka.times import NO_TIME


@serves(29, "describe_acls", max_version=3, is_repeatable=True)
async def _handle(_context: HandlerContext, _request: Request) -> Reply:
    return {
        "throttle_time": NO_TIME,
        "error_code": ErrorCode.security_disabled,
        "error_message": "No Authorizer is configured on the broker",
        "resources": (),
    }
