"""ApiVersions (18): what is registered, in which versions (KIP-511)."""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.registry import APIS, Door, Reply, serves
from sparklog.broker.kafka.times import NO_TIME


@serves(18, "api_versions", last=4)
async def _handle(_door: Door, _request: Request) -> Reply:
    return answer(ErrorCode.none)


def answer(code: ErrorCode) -> Reply:
    """Also of a request in a version that is not served: the client tries again with another."""
    return {
        "error_code": code,
        "api_keys": [
            {"api_key": each.key, "min_version": each.first, "max_version": each.last}
            for each in sorted(APIS.values(), key=lambda api: api.key)
        ],
        "throttle_time": NO_TIME,
    }
