"""SaslAuthenticate (36): rejected outside a login (KIP-152).

It is listed for the clients that log in: their requests are handled before the connection is served
(`sasl.py`). So are those of clients that log in again (KIP-368, `reauthentication.py`).
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves


@serves(36, "sasl_authenticate", max_version=2)
async def _handle(_context: HandlerContext, _request: Request) -> Reply:
    return {
        "error_code": ErrorCode.illegal_sasl_state,
        "error_message": "SaslAuthenticate request received after successful authentication",
        "auth_bytes": b"",
    }
