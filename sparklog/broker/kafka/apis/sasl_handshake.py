"""SaslHandshake (17): rejected as on Kafka's PLAINTEXT listeners, and logged (KIP-43).

A client that uses SASL sends this request only if ApiVersions lists it. Otherwise it closes the
connection silently, and the broker's log could not say why no client connects.
"""

from __future__ import annotations

from typing import Final

from kio.schema.errors import ErrorCode

from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves

_MECHANISM_SHOWN: Final = 40
"""The maximum length of a mechanism's name in a log line; Kafka's longest is 13 characters."""


@serves(17, "sasl_handshake", max_version=1)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    context.log_refused(
        request.client,
        f"it asks for SASL {request.body.mechanism[:_MECHANISM_SHOWN]!r}, which is not supported"
        " yet; set security.protocol=PLAINTEXT in that client",
    )
    return {"error_code": ErrorCode.illegal_sasl_state, "mechanisms": ()}
