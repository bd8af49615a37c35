"""Clients that do not use HTTP/2, non-gRPC requests, and the human-readable responses to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sparklog.broker import http1
from sparklog.broker.flight.grpc import http2
from sparklog.broker.flight.grpc.call import Call, Method, Refusal
from sparklog.broker.flight.grpc.status import UNIMPLEMENTED, GrpcError
from sparklog.broker.tls.engine import HANDSHAKE

GRPC: Final = b"application/grpc"
NOT_GRPC: Final = (
    b"This is sparklog's port for Arrow Flight. It serves gRPC calls only: use a client of"
    b" Arrow Flight, or sparklog.connect().\n"
)
FOREIGN: Final = Method(
    serve=lambda _: None,
    message_bytes=-1,
    too_large=lambda _size, _limit: GrpcError(UNIMPLEMENTED, "not a gRPC request"),
)
"""The method of non-gRPC requests, which have no messages."""


def refusal_of_protocol(data: memoryview) -> tuple[bytes, str]:
    """Returns the response to a client that does not use HTTP/2, and what it uses instead.

    `data`: its first bytes. Only HTTP/1 gets a response.
    """
    is_tls = bytes(data[: len(HANDSHAKE)]) == HANDSHAKE
    spoken = "it uses TLS, and this port does not" if is_tls else "not HTTP/2"
    return http1.refusal(data, NOT_GRPC), spoken


def refusal_of(headers: Mapping[bytes, bytes]) -> Refusal | None:
    """Returns the response to a non-gRPC request (gRPC over HTTP/2, "Requests"); None for gRPC."""
    method = headers[b":method"]
    text = b"" if method == b"HEAD" else NOT_GRPC
    if method != b"POST":
        return Refusal(405, [("content-type", b"text/plain"), ("allow", b"POST")], text)
    kind = headers.get(b"content-type", b"")
    if kind == GRPC or kind.startswith((GRPC + b"+", GRPC + b";")):
        return None
    return Refusal(415, [("content-type", b"text/plain")], text)


def end_of_text(call: Call) -> bytes:
    """Returns the frames that end the response to a non-gRPC request."""
    if not call.has_started or call.outgoing:
        return http2.reset(call.stream_id, http2.CANCEL)
    out = http2.frame(http2.DATA, http2.END_STREAM, call.stream_id, b"")
    return out if call.has_ended else out + http2.reset(call.stream_id, http2.NO_ERROR)
