"""gRPC's status codes, and the exceptions that end a call."""

from __future__ import annotations

from collections.abc import Iterable

OK, CANCELLED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED = 0, 1, 2, 3, 4
PERMISSION_DENIED, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 7, 8, 12, 13, 14
UNAUTHENTICATED = 16
"""gRPC's codes."""


class PeerGone(Exception):
    """The client has ended the call or its connection, and will read nothing more."""


class GrpcError(Exception):
    """Ends a call with a status code, a human-readable message, and further trailers."""

    def __init__(self, code: int, message: str, trailers: Iterable[tuple[str, bytes]] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.trailers = list(trailers)
