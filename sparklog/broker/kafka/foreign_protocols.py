"""Clients of other protocols at a Kafka port, by the first bytes that they send."""

from __future__ import annotations

from typing import Final

from sparklog import errors
from sparklog.broker import http1
from sparklog.broker.kafka.socket_stream import SocketStream
from sparklog.broker.tls.engine import HANDSHAKE
from sparklog.formats.flight_messages import WRONG_PORT
from sparklog.listeners import Listener

BEGIN_BYTES: Final = http1.BEGIN_BYTES
_OUR_CLIENT: Final = b"PRI "
"""The first bytes of HTTP/2, from sparklog's clients. As a length they exceed any limit."""
_NO_HTTP: Final = b"this is a Kafka port: it does not serve HTTP\n"


async def refuse_foreign(
    stream: SocketStream, begin: bytes, listener: Listener, flight_address: str
) -> None:
    """Raises `BadRequest` for another protocol, after a reply to gRPC and HTTP clients.

    Args:
        stream: the connection.
        begin: the first `BEGIN_BYTES` that the client has sent.
        listener: the listener that it has connected to.
        flight_address: the address that Flight clients should use.
    """
    if begin == _OUR_CLIENT:
        await stream.write([f"{WRONG_PORT}{flight_address}\n".encode()])
        protocol = f"gRPC (HTTP/2); Flight clients connect to {flight_address}"
    elif refusal := http1.refusal(begin, _NO_HTTP):
        await stream.write([refusal])
        protocol = "HTTP"
    elif begin.startswith(HANDSHAKE):
        protocol = f"TLS; set security.protocol={listener.protocol} in that client"
    else:
        return
    raise errors.BadRequest(reason=f"not a Kafka client: it speaks {protocol}")
