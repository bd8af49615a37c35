"""ApiVersions (18): what is registered, in which versions (KIP-511)."""

from __future__ import annotations

import re
from typing import Final

from kio.schema.errors import ErrorCode

from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import APIS, Door, Reply, serves
from sparklog.broker.kafka.times import NO_TIME

_NAME: Final = re.compile("[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?")
"""Of a client's software, and its version."""


@serves(18, "api_versions", last=4)
async def _handle(_door: Door, request: Request) -> Reply:
    body = request.body
    told = [getattr(body, f"client_software_{each}", None) for each in ("name", "version")]
    if any(each is not None and not _NAME.fullmatch(each) for each in told):
        return {**answer(ErrorCode.invalid_request), "api_keys": ()}
    return answer(ErrorCode.none)


def answer(code: ErrorCode) -> Fields:
    """Also of a request in a version that is not served: the client tries again with another."""
    return {
        "error_code": code,
        "api_keys": [
            {"api_key": each.key, "min_version": each.first, "max_version": each.last}
            for each in sorted(APIS.values(), key=lambda api: api.key)
        ],
        "throttle_time": NO_TIME,
    }
