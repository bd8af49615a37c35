"""SaslHandshake (17): rejected on a connection that does not log in, or has logged in (KIP-43).

A client that uses SASL sends this request only if ApiVersions lists it. Otherwise it closes the
connection silently, and the broker's log could not say why no client connects. The requests of a
login are handled before the connection is served (`sasl.py`), or between its other requests, if its
session ends (`reauthentication.py`).
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
    if request.listener.has_sasl:
        reason = "it has logged in already"
    else:
        with_sasl = [str(each) for each in context.listeners if each.has_sasl]
        elsewhere = f", or connect to {with_sasl[0]}" if with_sasl else ""
        reason = (
            f"this listener has no logins; set security.protocol={request.listener.protocol} in"
            f" that client{elsewhere}"
        )
    mechanism = request.body.mechanism[:_MECHANISM_SHOWN]
    context.log_refused(request.client, f"it asks for SASL {mechanism!r}: {reason}")
    return {"error_code": ErrorCode.illegal_sasl_state, "mechanisms": ()}
