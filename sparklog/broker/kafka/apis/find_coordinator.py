"""FindCoordinator (10): nobody coordinates groups here yet, and a client asks again (KIP-699)."""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.times import NO_TIME

_NOBODY = {
    "error_code": ErrorCode.coordinator_not_available,
    "error_message": "this broker coordinates no groups",
    "node_id": -1,
    "host": "",
    "port": -1,
}


@serves(10, "find_coordinator", last=6)
async def _handle(_door: Door, request: Request) -> Reply:
    keys = getattr(request.body, "coordinator_keys", ())
    return {
        "throttle_time": NO_TIME,
        **_NOBODY,
        "coordinators": [{"key": key, **_NOBODY} for key in keys],
    }
