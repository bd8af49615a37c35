"""The session of a connection that ends, unless its client logs in again (KIP-368).

A session ends with its token or its certificate, or after `kafka.connections_max_reauth_ms`. A
client that knows its lifetime sends SaslHandshake on the open connection before that, and
SaslAuthenticate until it has logged in; other requests cannot come between. A request after the end
closes the connection. The listener cuts connections whose session has ended while they were idle.

Source: `KafkaChannel` and `SocketServer` of Kafka 4.1.
"""

from __future__ import annotations

import asyncio
import math
from typing import Final

from sparklog import errors
from sparklog.broker.authentication import Identity
from sparklog.broker.kafka.sasl import SASL_HANDSHAKE
from sparklog.broker.kafka.sasl_logins import LOGIN_FAILURES, SaslLogins
from sparklog.broker.kafka.socket_stream import SocketStream
from sparklog.clock import Clock, unix_seconds

REAUTHENTICATION_SECONDS = 10  # for all frames of a login
_INTERVAL_SECONDS: Final = 1.0
"""The minimum time between two of them. An earlier SaslHandshake is answered as an error."""

SESSION_ENDED: Final = "its session has ended, and it has not logged in again (KIP-368)"


class ExpiringSession:
    """The session of one connection."""

    def __init__(
        self, identity: Identity, stream: SocketStream, logins: SaslLogins | None, clock: Clock
    ) -> None:
        """Begins a session.

        Args:
            identity: the client, whose `ends_at` is in the future.
            stream: its connection.
            logins: logs it in again; None if it did not log in by SASL.
            clock: the clock of `ends_at`.
        """
        self._identity = identity
        self._stream = stream
        self._logins = logins
        self._clock = clock
        self._began = -math.inf
        """When the last re-authentication began, in monotonic seconds."""

    def begins_login(self, api_key: int) -> bool:
        """Returns whether a request begins a re-authentication.

        Raises `NotAuthenticated` for another one after the end of the session.
        """
        if api_key == SASL_HANDSHAKE and self._logins is not None:
            now = self._clock.monotonic()
            if now - self._began >= _INTERVAL_SECONDS:
                self._began = now
                return True
        if unix_seconds(self._clock) >= self._identity.ends_at:
            raise errors.NotAuthenticated(reason=SESSION_ENDED)
        return False

    async def log_in(self, handshake: bytes) -> Identity:
        """Returns the client, once it has logged in again; its session then ends later.

        Raises `NotAuthenticated` and `ConnectionError`, after the client was answered.
        """
        assert self._logins is not None
        try:
            async with asyncio.timeout(REAUTHENTICATION_SECONDS):
                self._identity = await self._logins.log_in(
                    self._stream, first=handshake, before=self._identity
                )
        except TimeoutError:
            reason = f"no re-authentication within {REAUTHENTICATION_SECONDS} s"
            raise errors.NotAuthenticated(reason=reason) from None
        except LOGIN_FAILURES as error:
            raise errors.NotAuthenticated(reason=f"re-authentication: {error}") from None
        return self._identity
