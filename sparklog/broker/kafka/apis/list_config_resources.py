"""ListConfigResources (74): topics, brokers, their loggers, and groups that have a configuration.

There are no client metrics subscriptions. (KIP-1142; version 0 is KIP-714's.)
"""

from __future__ import annotations

from collections.abc import Iterable

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves
from sparklog.broker.kafka.resources import ResourceType
from sparklog.broker.kafka.times import NO_TIME
from sparklog.security.acl import Operation


@serves(74, "list_config_resources", max_version=1, is_repeatable=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    try:
        await request.access.check(Operation.DESCRIBE_CONFIGS)
    except errors.NotAuthorized as error:
        return _reply([], code=code_of(error))
    # Version 0 requests client metrics subscriptions only, and has no field for types.
    types = list(getattr(request.body, "resource_types", (ResourceType.CLIENT_METRICS,)))
    if any(kind not in list(ResourceType) for kind in types):
        return _reply([], code=ErrorCode.unsupported_version)
    brokers = [str(each.broker) for each in context.broker.cluster().brokers]
    all_resources = [
        *((ResourceType.TOPIC, name) for name in context.broker.topics.names()),
        *((ResourceType.BROKER, name) for name in brokers),
        *((ResourceType.BROKER_LOGGER, name) for name in brokers),
        *((ResourceType.GROUP, name) for name in context.broker.group_configs.names()),
    ]
    return _reply((kind, name) for kind, name in all_resources if not types or kind in types)


def _reply(
    resources: Iterable[tuple[ResourceType, str]], code: ErrorCode = ErrorCode.none
) -> Reply:
    return {
        "throttle_time": NO_TIME,
        "error_code": code,
        "config_resources": [
            {"resource_name": name, "resource_type": int(kind)} for kind, name in resources
        ],
    }
