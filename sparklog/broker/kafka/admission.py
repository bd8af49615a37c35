"""Admission of connections to a listener with TLS or SASL: a slot, the TLS handshake, the login.

A client that has not logged in costs little: it holds one of a few slots for at most ten seconds,
and has one small frame in memory. Clients without a slot wait, each address in its turn, without
work being done for them; so one address cannot keep the others out (`slots`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from sparklog.broker.audit import ListenerAudit
from sparklog.broker.authentication import Identity
from sparklog.broker.kafka.foreign_protocols import BEGIN_BYTES, refuse_foreign
from sparklog.broker.kafka.sasl_logins import LOGIN_FAILURES, SaslLogins
from sparklog.broker.kafka.slots import Slots, Turn, TurnEnded
from sparklog.broker.kafka.socket_stream import SocketStream
from sparklog.broker.tls.engine import HANDSHAKE, TlsFailed
from sparklog.broker.tls.handshakes import Handshakes
from sparklog.listeners import SSL, Listener
from sparklog.security.x500 import CertificatePrincipal

if TYPE_CHECKING:
    from sparklog.broker.tls.contexts import ServerTls

ADMISSION_SECONDS = 10  # for the handshake and the login, once the connection has a slot


class AdmissionRefused(Exception):
    """A connection is closed before its first request; the message is for the broker's log."""


class Admission:
    """Admits the connections of one listener that has TLS or SASL, in the listener's event loop."""

    def __init__(
        self,
        listener: Listener,
        *,
        connections: int,
        tls: ServerTls | None,
        logins: SaslLogins | None,
        handshakes: Handshakes,
        identify: Callable[[CertificatePrincipal], Identity] | None,
        flight_address: Callable[[], str],
        audit: ListenerAudit,
    ) -> None:
        """Creates the admission of a listener.

        Args:
            listener: the listener.
            connections: the maximum number of connections.
            tls: encrypts the connections; None: they are plaintext.
            logins: logs clients in; None if they do not log in.
            handshakes: the thread for TLS handshakes.
            identify: returns the client that a certificate names, where clients do not log in, or
                raises ValueError; None: certificates name no clients.
            flight_address: returns the address that Flight clients should use.
            audit: notes logins.
        """
        self.slots = Slots(connections=connections)
        self._listener = listener
        self._tls = tls
        self.logins = logins
        self._handshakes = handshakes
        self._identify = identify
        self._flight_address = flight_address
        self._audit = audit

    async def admit(self, stream: SocketStream, turn: Turn) -> Identity | None:
        """Returns the client that has logged in, or has a certificate; None if it is anonymous.

        Raises `AdmissionRefused`, and `ConnectionResetError` if the client has left.
        """
        is_admitted = False
        try:
            if stream.is_over:
                raise ConnectionResetError("the client has left")
            await self._wait(stream, turn)
            async with asyncio.timeout(ADMISSION_SECONDS):
                identity = await self._admit(stream)
            is_admitted = True
        except TimeoutError:
            what = "TLS handshake" if self.logins is None else "login"
            raise AdmissionRefused(f"no {what} within {ADMISSION_SECONDS} s") from None
        except (TlsFailed, *LOGIN_FAILURES) as error:
            raise AdmissionRefused(str(error)) from None
        finally:
            turn.end(is_admitted=is_admitted)
        return identity

    @staticmethod
    async def _wait(stream: SocketStream, turn: Turn) -> None:
        """Waits for a slot. The end of the wait is that of the connection."""
        stream.left = lambda: turn.refuse("the client has left")
        try:
            await turn.granted
        except TurnEnded as ended:
            if stream.is_over:
                raise ConnectionResetError(str(ended)) from None
            raise AdmissionRefused(str(ended)) from None
        finally:
            stream.left = None

    async def _admit(self, stream: SocketStream) -> Identity | None:
        principal = None
        if self._tls is not None:
            principal = await self._shake_hands(stream, self._tls)
        if self.logins is not None:
            return await self.logins.log_in(stream)
        if principal is None or self._identify is None:
            return None
        try:
            identity = self._identify(principal)
        except ValueError as error:
            self._audit.login_failed(SSL, principal.name, stream.peer, str(error))
            raise AdmissionRefused(f"the client's certificate: {error}") from None
        self._audit.logged_in(SSL, identity.principal, stream.peer)
        return identity

    async def _shake_hands(
        self, stream: SocketStream, tls: ServerTls
    ) -> CertificatePrincipal | None:
        def run(step: Callable[[bytes], bool], received: bytes) -> Awaitable[bool]:
            return asyncio.wrap_future(self._handshakes.submit(stream.peer, step, received))

        begin = await stream.peek(BEGIN_BYTES)
        if not begin.startswith(HANDSHAKE):
            await refuse_foreign(stream, begin, self._listener, self._flight_address())
            raise TlsFailed(
                f"the client does not use TLS: it needs security.protocol={self._listener.protocol}"
            )
        engine = tls.engine(names_clients=self._identify is not None)
        try:
            await stream.start_tls(engine, run)
        except TlsFailed as error:
            self._audit.login_failed(SSL, "", stream.peer, str(error))
            raise
        return engine.principal
