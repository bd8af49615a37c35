"""Admission of connections to a listener with TLS or SASL: a slot, the TLS handshake, the login.

A client that has not logged in costs little: it holds one of a few slots for at most ten seconds,
and has one small frame in memory. Clients without a slot wait, each address in its turn, without
work being done for them; so one address cannot keep the others out (`slots`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from sparklog import errors, limits
from sparklog.broker.audit import Audit
from sparklog.broker.authentication import Authentication, Identity
from sparklog.broker.kafka import messages
from sparklog.broker.kafka.foreign_protocols import BEGIN_BYTES, refuse_foreign
from sparklog.broker.kafka.sasl import LoginRefused, SaslServer
from sparklog.broker.kafka.slots import Slots, Turn, TurnEnded
from sparklog.broker.kafka.socket_stream import SocketStream
from sparklog.broker.login_failures import FailureDelays
from sparklog.broker.peers import network_of
from sparklog.broker.tls.engine import HANDSHAKE, TlsFailed
from sparklog.broker.tls.handshakes import Handshakes
from sparklog.listeners import SSL, Listener
from sparklog.security.x500 import CertificatePrincipal

if TYPE_CHECKING:
    from sparklog.broker.tls.contexts import ServerTls

ADMISSION_SECONDS = 10  # for the handshake and the login, once the connection has a slot
FRAME_BYTES = 32 * limits.KIB  # of a client that has not logged in
LINGER_SECONDS = 1.0  # for which a refused client may leave its connection open


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
        authentication: Authentication | None,
        mechanisms: tuple[str, ...],
        handshakes: Handshakes,
        delays: FailureDelays,
        check_password: Callable[[str, str], Awaitable[Identity | None]],
        identify: Callable[[CertificatePrincipal], Identity] | None,
        flight_address: Callable[[], str],
        audit: Audit | None = None,
    ) -> None:
        """Creates the admission of a listener.

        Args:
            listener: the listener.
            connections: the maximum number of connections.
            tls: encrypts the connections; None: they are plaintext.
            authentication: the users; None if clients do not log in.
            mechanisms: the SASL mechanisms of the listener.
            handshakes: the thread for TLS handshakes.
            delays: those of failed logins.
            check_password: checks a password in another thread.
            identify: returns the client whom a certificate names, where clients do not log in, or
                raises ValueError; None: certificates name no clients.
            flight_address: returns the address that Flight clients should use.
            audit: notes the logins.
        """
        self.slots = Slots(connections=connections)
        self._listener = listener
        self._tls = tls
        self._authentication = authentication
        self._mechanisms = mechanisms
        self._handshakes = handshakes
        self._delays = delays
        self._check_password = check_password
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
            what = "TLS handshake" if self._authentication is None else "login"
            raise AdmissionRefused(f"no {what} within {ADMISSION_SECONDS} s") from None
        except (TlsFailed, LoginRefused, errors.BadRequest, errors.SecurityNotRead) as error:
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
        if self._authentication is not None:
            return await self._log_in(stream)
        if principal is None or self._identify is None:
            return None
        try:
            identity = self._identify(principal)
        except ValueError as error:
            self._note_failure(stream, SSL, principal.name, error)
            raise AdmissionRefused(f"the client's certificate: {error}") from None
        self._note_login(stream, SSL, identity)
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
            self._note_failure(stream, SSL, "", error)
            raise
        return engine.principal

    async def _log_in(self, stream: SocketStream) -> Identity:
        assert self._authentication is not None
        server = SaslServer(
            self._authentication,
            self._mechanisms,
            protocol=self._listener.protocol,
            check_password=self._check_password,
        )
        while (identity := server.identity) is None:
            frame = await self._read_frame(stream)
            # One frame in a turn of the loop, as others may have sent requests meanwhile.
            await asyncio.sleep(0)
            try:
                reply = await server.answer(frame)
            except LoginRefused as refused:
                self._note_failure(stream, server.mechanism, refused.user, refused)
                if refused.is_guess:
                    seconds = self._delays.next_seconds(network_of(stream.peer), refused.user)
                    await asyncio.sleep(seconds)
                if refused.reply:
                    await stream.write(refused.reply)
                    await _wait_for_end(stream)
                raise
            await stream.write(reply)
        self._note_login(stream, server.mechanism, identity)
        return identity

    def _note_login(self, stream: SocketStream, mechanism: str, identity: Identity) -> None:
        if self._audit is not None:
            self._audit.logged_in(
                listener=self._listener.name,
                mechanism=mechanism,
                principal=identity.principal,
                host=stream.peer,
            )

    def _note_failure(
        self, stream: SocketStream, mechanism: str, user: str, reason: Exception
    ) -> None:
        if self._audit is not None:
            self._audit.login_failed(
                listener=self._listener.name,
                mechanism=mechanism,
                user=user,
                host=stream.peer,
                reason=str(reason),
            )

    async def _read_frame(self, stream: SocketStream) -> bytes:
        length = bytes(await stream.read(messages.LENGTH_BYTES))
        if length[0]:
            await refuse_foreign(stream, length, self._listener, self._flight_address())
        size = int.from_bytes(length, "big", signed=True)
        if not 0 <= size <= FRAME_BYTES:
            raise AdmissionRefused(
                f"a request is {size} bytes long; at most {FRAME_BYTES} are allowed before a login"
            )
        return bytes(await stream.read(size))


async def _wait_for_end(stream: SocketStream) -> None:
    """Waits for a client that has been refused to close its connection, which most do.

    If the broker closed it first, some clients would report that instead of the refusal.
    """
    with contextlib.suppress(TimeoutError, ConnectionError, TlsFailed):
        async with asyncio.timeout(LINGER_SECONDS):
            await stream.read(1)
