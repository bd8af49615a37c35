"""The logins of one listener: the frames of a client that has not logged in, or that does so again.

Such a client has one small frame in memory. A failed login is answered late, so that guesses are
slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

from sparklog import errors, limits
from sparklog.broker.audit import ListenerAudit
from sparklog.broker.authentication import Authentication, Identity
from sparklog.broker.kafka import messages
from sparklog.broker.kafka.foreign_protocols import refuse_foreign
from sparklog.broker.kafka.registry import WorkerPool
from sparklog.broker.kafka.sasl import LoginRefused, SaslServer
from sparklog.broker.kafka.socket_stream import SocketStream
from sparklog.broker.login_failures import FailureDelays
from sparklog.broker.peers import network_of
from sparklog.broker.tls.engine import TlsFailed
from sparklog.clock import Clock
from sparklog.listeners import Listener
from sparklog.security.jwt import UnknownKey

FRAME_BYTES = 32 * limits.KIB  # of a client that has not logged in, or that does so again
LINGER_SECONDS = 1.0  # for which a refused client may leave its connection open
LOGIN_FAILURES: Final = (
    LoginRefused,
    errors.BadRequest,
    errors.SecurityNotRead,
    errors.TokenKeysNotRead,
)
"""The errors of a login that end the connection."""
_T = TypeVar("_T")


class RunBlocking(Protocol):
    """Runs a call in a thread of a pool."""

    async def __call__(self, pool: WorkerPool, call: Callable[..., _T], *values: Any) -> _T:
        """See `HandlerContext.run_blocking`."""


class SaslLogins:
    """Logs clients in, in the listener's event loop."""

    def __init__(
        self,
        listener: Listener,
        authentication: Authentication,
        mechanisms: tuple[str, ...],
        *,
        delays: FailureDelays,
        run_blocking: RunBlocking,
        clock: Clock,
        session_max_seconds: float = math.inf,
        flight_address: Callable[[], str],
        audit: ListenerAudit,
    ) -> None:
        """Creates the logins of a listener.

        Args:
            listener: the listener.
            authentication: the users.
            mechanisms: those of the listener, by their SASL names.
            delays: those of failed logins.
            run_blocking: runs checks of passwords and tokens.
            clock: for the ends of sessions.
            session_max_seconds: the time until a client has to log in again.
            flight_address: returns the address that Flight clients should use.
            audit: notes logins.
        """
        self._audit = audit
        self._listener = listener
        self._authentication = authentication
        self._mechanisms = mechanisms
        self._delays = delays
        self._run_blocking = run_blocking
        self._clock = clock
        self._session_max_seconds = session_max_seconds
        self._flight_address = flight_address

    async def log_in(
        self, stream: SocketStream, *, first: bytes | None = None, before: Identity | None = None
    ) -> Identity:
        """Returns the client, once it has logged in.

        Raises one of `LOGIN_FAILURES`, after the client was answered.

        Args:
            stream: its connection.
            first: the first frame, if it was read already.
            before: the client as it has logged in before, on the same connection.
        """
        server = SaslServer(
            self._authentication,
            self._mechanisms,
            protocol=self._listener.protocol,
            check_password=self._check_password,
            check_token=self._check_token,
            clock=self._clock,
            session_max_seconds=self._session_max_seconds,
            before=before,
        )
        while (identity := server.identity) is None:
            try:
                frame = first if first is not None else await self._read_frame(stream)
            except ConnectionError:
                if server.refused is None:
                    raise
                self._delays.next_seconds(network_of(stream.peer), server.refused.user)
                raise server.refused from None  # some clients leave without the last frame
            first = None
            # One frame in a turn of the loop, as others may have sent requests meanwhile.
            await asyncio.sleep(0)
            try:
                reply = await server.answer(frame)
            except LoginRefused as refused:
                if refused is not server.refused:
                    self._note_failure(stream, server, refused)
                if refused.is_guess:
                    seconds = self._delays.next_seconds(network_of(stream.peer), refused.user)
                    await asyncio.sleep(seconds)
                if refused.reply:
                    await stream.write(refused.reply)
                    await _wait_for_end(stream)
                raise
            if server.refused is not None:  # now, as the client may never send the last frame
                self._note_failure(stream, server, server.refused)
            await stream.write(reply)
        self._audit.logged_in(server.mechanism, identity.principal, stream.peer)
        return identity

    def _note_failure(self, stream: SocketStream, server: SaslServer, reason: LoginRefused) -> None:
        self._audit.login_failed(server.mechanism, reason.user, stream.peer, str(reason))

    async def _read_frame(self, stream: SocketStream) -> bytes:
        length = bytes(await stream.read(messages.LENGTH_BYTES))
        if length[0]:
            await refuse_foreign(stream, length, self._listener, self._flight_address())
        size = int.from_bytes(length, "big", signed=True)
        if not 0 <= size <= FRAME_BYTES:
            raise LoginRefused(
                f"a request is {size} bytes long; at most {FRAME_BYTES} are allowed before a login"
            )
        return bytes(await stream.read(size))

    async def _check_password(self, user: str, password: str) -> Identity | None:
        log_in = self._authentication.log_in
        return await self._run_blocking(WorkerPool.PASSWORDS, log_in, user, password)

    async def _check_token(self, token: str) -> Identity:
        authentication = self._authentication
        if (found := authentication.remembered_token(token)) is not None:
            return found
        log_in = authentication.log_in_by_token
        try:
            return await self._run_blocking(WorkerPool.TOKENS, log_in, token)
        except UnknownKey:
            await asyncio.shield(asyncio.wrap_future(authentication.newer_keys()))
        return await self._run_blocking(WorkerPool.TOKENS, log_in, token)


async def _wait_for_end(stream: SocketStream) -> None:
    """Waits for a client that has been refused to close its connection, which most do.

    If the broker closed it first, some clients would report that instead of the refusal.
    """
    with contextlib.suppress(TimeoutError, ConnectionError, TlsFailed):
        async with asyncio.timeout(LINGER_SECONDS):
            await stream.read(1)
