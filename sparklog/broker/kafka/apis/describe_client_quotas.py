"""DescribeClientQuotas (48): there are no quotas (KIP-546).

`kafka-configs.sh --entity-type users --describe` asks for them before it asks for credentials.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.security.acl import Operation


@serves(48, "describe_client_quotas", max_version=1, is_repeatable=True)
async def _handle(_: HandlerContext, request: Request) -> Reply:
    try:
        await request.access.check(Operation.DESCRIBE_CONFIGS)
    except errors.NotAuthorized as error:
        return {
            "throttle_time": NO_TIME,
            "error_code": code_of(error),
            "error_message": str(error),
            "entries": None,
        }
    return {
        "throttle_time": NO_TIME,
        "error_code": ErrorCode.none,
        "error_message": None,
        "entries": (),
    }
