"""The response to HTTP/1 clients at a port that does not serve HTTP/1."""

from __future__ import annotations

from typing import Final

BEGIN_BYTES: Final = 4
"""The number of leading bytes that identify an HTTP/1 client."""
_METHODS: Final = frozenset(
    method[:BEGIN_BYTES]
    for method in (
        b"GET ",
        b"HEAD",
        b"POST",
        b"PUT ",
        b"DELETE",
        b"OPTIONS",
        b"PATCH",
        b"CONNECT",
        b"TRACE",
    )
)


def refusal(begin: bytes | memoryview, text: bytes) -> bytes:
    """Returns a response with that text; empty if the leading bytes are not HTTP/1."""
    if bytes(begin[:BEGIN_BYTES]) not in _METHODS:
        return b""
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
    return head + text
