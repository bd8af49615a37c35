"""ApiVersions (18): the supported requests and their versions (KIP-511).

There are no supported or finalized features.
"""

from __future__ import annotations

import functools
import re
from typing import Final

from kio.schema.errors import ErrorCode

from sparklog.broker.kafka.messages import ConstantReply, Fields, Request
from sparklog.broker.kafka.registry import APIS, HandlerContext, Reply, serves
from sparklog.broker.kafka.times import NO_TIME

_NAME: Final = re.compile("[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?")
"""The form of a client's software name and version."""


@serves(18, "api_versions", max_version=4, is_blind=True)
async def _handle(_context: HandlerContext, request: Request) -> Reply:
    body = request.body
    software = [getattr(body, f"client_software_{each}", None) for each in ("name", "version")]
    if any(each is not None and not _NAME.fullmatch(each) for each in software):
        return {**answer(ErrorCode.invalid_request), "api_keys": ()}
    return answer(ErrorCode.none)


@functools.cache
def answer(code: ErrorCode) -> Fields:
    """Returns the reply, also to an unsupported version: the client then tries another one."""
    return ConstantReply(
        {
            "error_code": code,
            "api_keys": [
                {
                    "api_key": each.key,
                    "min_version": each.min_version,
                    "max_version": each.max_version,
                }
                for each in sorted(APIS.values(), key=lambda api: api.key)
            ],
            "throttle_time": NO_TIME,
        }
    )
