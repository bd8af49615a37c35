"""ApiVersions (18): the supported requests and their versions (KIP-511).

There are no supported or finalized features. Produce is listed from version 0, as in Kafka 4.1,
though its versions below 3 are rejected: librdkafka up to 2.8 compresses with gzip, snappy and lz4
only if the broker lists it (KAFKA-18659).
"""

from __future__ import annotations

import functools
import re
from typing import Any, Final

from kio.schema.errors import ErrorCode

from sparklog.broker.kafka.messages import API_VERSIONS, ConstantReply, Fields, Request
from sparklog.broker.kafka.registry import APIS, HandlerContext, Reply, serves
from sparklog.broker.kafka.times import NO_TIME

_NAME: Final = re.compile("[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?")
"""The form of a client's software name and version."""
_PRODUCE: Final = 0


@serves(18, "api_versions", max_version=4, is_blind=True, needs_no_acls=True)
async def _handle(_context: HandlerContext, request: Request) -> Reply:
    return reply_to(request.body)


def reply_to(body: Any) -> Fields:
    """Returns the reply to a request of a supported version; `body` is kio's message."""
    software = [getattr(body, f"client_software_{each}", None) for each in ("name", "version")]
    if any(each is not None and not _NAME.fullmatch(each) for each in software):
        return {**answer(ErrorCode.invalid_request), "api_keys": ()}
    return answer(ErrorCode.none)


@functools.cache
def answer(code: ErrorCode) -> Fields:
    """Returns the reply.

    For an unsupported version it lists only ApiVersions: the client then tries another version.
    """
    listed = sorted(APIS.values(), key=lambda api: api.key)
    if code == ErrorCode.unsupported_version:
        listed = [APIS[API_VERSIONS]]
    return ConstantReply(
        {
            "error_code": code,
            "api_keys": [
                {
                    "api_key": each.key,
                    "min_version": 0 if each.key == _PRODUCE else each.min_version,
                    "max_version": each.max_version,
                }
                for each in listed
            ],
            "throttle_time": NO_TIME,
        }
    )
