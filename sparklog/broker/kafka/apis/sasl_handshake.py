"""SaslHandshake (17): refused as by a PLAINTEXT listener of Kafka, and logged (KIP-43).

A client that wants SASL asks for it only where ApiVersions lists this request. Otherwise it closes
the connection without a word, and the broker's log could not say why no client comes.
"""

from __future__ import annotations

from typing import Final

from kio.schema.errors import ErrorCode

from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves

_MECHANISM_SHOWN: Final = 40
"""The number of characters of a mechanism in a log line: the longest of Kafka has 13."""


@serves(17, "sasl_handshake", max_version=1)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    context.log_refused(
        request.client,
        f"it asks for SASL {request.body.mechanism[:_MECHANISM_SHOWN]!r}, and this listener has no"
        " SASL yet; set security.protocol=PLAINTEXT in that client",
    )
    return {"error_code": ErrorCode.illegal_sasl_state, "mechanisms": ()}
