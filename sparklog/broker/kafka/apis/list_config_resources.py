"""ListConfigResources (74): what has a configuration (KIP-1142; version 0 is KIP-714's)."""

from __future__ import annotations

from collections.abc import Iterable

from kio.schema.errors import ErrorCode

from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.resources import ResourceType
from sparklog.broker.kafka.times import NO_TIME


@serves(74, "list_config_resources", last=1)
async def _handle(door: Door, request: Request) -> Reply:
    # Version 0 asks for subscriptions to clients' metrics alone, and has no field for types.
    wanted = list(getattr(request.body, "resource_types", (ResourceType.CLIENT_METRICS,)))
    if any(kind not in list(ResourceType) for kind in wanted):
        return _answer([], code=ErrorCode.unsupported_version)
    brokers = [str(each.broker) for each in door.core.cluster().brokers]
    known = [
        *((ResourceType.TOPIC, name) for name in door.core.topics().topics),
        *((ResourceType.BROKER, name) for name in brokers),
    ]
    return _answer((kind, name) for kind, name in known if not wanted or kind in wanted)


def _answer(found: Iterable[tuple[ResourceType, str]], code: ErrorCode = ErrorCode.none) -> Reply:
    return {
        "throttle_time": NO_TIME,
        "error_code": code,
        "config_resources": [
            {"resource_name": name, "resource_type": int(kind)} for kind, name in found
        ],
    }
