"""The budget of a client until it is admitted: the bytes that it sends, and the calls it begins.

At a listener with logins, a client without one must cost little. A call with a valid login admits
its client, and from then on nothing is counted. The reading thread counts and checks; any thread
may admit the client, or count a refused call.
"""

from __future__ import annotations

from typing import Final

from sparklog import limits
from sparklog.broker.flight.grpc import http2

UNADMITTED_BYTES: Final = 128 * limits.KIB
"""The bytes that a client may send until it is admitted, without those of the TLS handshake."""
UNADMITTED_CALLS: Final = 16
"""The calls that a client may begin until it is admitted."""
REFUSED_MAX: Final = 3
"""The calls that may be refused for lack of a login, before the connection is closed."""


class Admission:
    """The admission of one connection's client."""

    __slots__ = ("_bytes", "_calls", "calls_without_login", "is_admitted")

    def __init__(self, *, is_needed: bool) -> None:
        """`is_needed`: False at a listener that admits everybody."""
        self.is_admitted = not is_needed
        """True once a call has been admitted, or if the listener admits everybody."""
        self.calls_without_login = 0
        """The number of calls that were refused for lack of a login."""
        self._bytes = self._calls = 0
        """The bytes received and the calls begun until the client is admitted."""

    def count_bytes(self, size: int) -> None:
        """Counts received bytes. Raises `ProtocolError` if the budget is exceeded."""
        if not self.is_admitted:
            self._bytes += size
            self._check()

    def count_call(self) -> None:
        """Counts a call that begins. Raises `ProtocolError` if the budget is exceeded."""
        if not self.is_admitted:
            self._calls += 1
            self._check()

    def count_refused(self) -> None:
        """Counts a call that is refused for lack of a login, or that may come without one.

        The budget is checked when the client next sends something, so that it learns the reason.
        """
        if not self.is_admitted:
            self.calls_without_login += 1

    def _check(self) -> None:
        reason = ""
        if self.calls_without_login >= REFUSED_MAX:
            reason = f"{self.calls_without_login} calls were sent without a login"
        elif self._calls > UNADMITTED_CALLS:
            reason = f"{self._calls} calls were begun without a login"
        elif self._bytes > UNADMITTED_BYTES:
            reason = f"{self._bytes} bytes were sent without a login"
        if reason:
            raise http2.ProtocolError(http2.ENHANCE_YOUR_CALM, reason)
