"""Logins of Flight clients: the call `Handshake`, which leads to a token for further calls.

- A header `authorization: Basic …`, as other Flight clients send it, has the password itself. The
  token is in the trailer `authorization`.
- A payload `SCRAM-SHA-256`, a line break and the first message of that mechanism begins an exchange
  in which the password does not leave the client. The last payload of the broker is its own last
  message, a line break and the token.

The users are those of the Kafka listener. A client that has failed is answered with a delay.
"""

from __future__ import annotations

import base64
import binascii
import threading
from typing import Final

import structlog

from sparklog import errors
from sparklog.broker.authentication import Authentication, Credential, Identity
from sparklog.broker.flight import protocol
from sparklog.broker.flight.gate import Gate
from sparklog.broker.flight.grpc.call import Call
from sparklog.broker.login_failures import FailureDelays, network_of
from sparklog.clock import Clock
from sparklog.security.scram import WRONG, Mechanism, ScramError, ScramServer, Verifier
from sparklog.security.users import NAME_BYTES_MAX

LOGIN_SECONDS = 10.0  # for all messages of a login
LOGINS = 64  # at a time; further ones are refused
_CHECKED_AT_ONCE: Final = 2
"""Passwords that are checked at a time: each takes milliseconds of processor time."""
_SHOWN: Final = 64
"""The maximum length of a user's name in a log line."""
_BASIC: Final = "Basic "
_WRONG: Final = "the user name or the password is wrong"
"""One text for all reasons: which of them it was helps those who guess."""

_log = structlog.get_logger("sparklog.flight")


class Logins:
    """Serves the logins of one listener. Thread-safe."""

    def __init__(self, authentication: Authentication, gate: Gate, *, clock: Clock) -> None:
        self._authentication = authentication
        self._gate = gate
        self._clock = clock
        self._delays = FailureDelays(clock)
        self._checking = threading.BoundedSemaphore(_CHECKED_AT_ONCE)
        self._lock = threading.Lock()
        self._open = 0

    def serve(self, call: Call) -> None:
        """Logs a client in. Raises `NotAuthenticated`, `SecurityNotRead` and `TooManyStreams`."""
        if not (call.listener.has_tls or call.listener.is_loopback):
            raise errors.NotAuthenticated(reason="passwords are accepted over TLS only")
        with self._lock:
            if self._open >= LOGINS:
                raise errors.TooManyStreams(what="logins", open=self._open, setting="their pauses")
            self._open += 1
        try:
            call.deadline = self._clock.monotonic() + LOGIN_SECONDS
            self._authentication.check_fresh()
            if call.authorization.startswith(_BASIC):
                self._basic(call)
            else:
                self._scram(call)
        finally:
            with self._lock:
                self._open -= 1

    def _basic(self, call: Call) -> None:
        try:
            text = base64.b64decode(call.authorization.removeprefix(_BASIC), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            text = ""
        user, _, password = text.partition(":")
        if not user or not password or len(user.encode()) > NAME_BYTES_MAX:
            raise self._failed(call, user, "the header is malformed, or a part of it is missing")
        identity = self._authentication.remembered(user, password)
        if identity is None:
            with self._checking:
                identity = self._authentication.log_in(user, password)
        if identity is None:
            raise self._failed(call, user, WRONG)
        call.trailers.append(("authorization", self._token(call, identity).encode()))

    def _scram(self, call: Call) -> None:
        mechanism, _, first = self._payload(call).partition(b"\n")
        try:
            exchange = _Exchange(self._authentication, Mechanism(mechanism.decode()))
        except (ValueError, UnicodeDecodeError):
            known = ", ".join(Mechanism)
            raise errors.NotAuthenticated(
                reason=f"a login needs a header `authorization: Basic …`, or one of {known}"
            ) from None
        try:
            self._answer(call, exchange.server.step(first))
            last = exchange.server.step(self._payload(call))
            identity = exchange.identity()
        except ScramError as error:
            raise self._failed(call, exchange.user, str(error)) from None
        if identity is None:
            raise self._failed(call, exchange.user, WRONG)
        self._answer(call, last + b"\n" + self._token(call, identity).encode())

    @staticmethod
    def _payload(call: Call) -> bytes:
        message = call.read()
        return bytes(protocol.field(message.data, 2)) if message is not None else b""

    @staticmethod
    def _answer(call: Call, payload: bytes) -> None:
        call.write([protocol.bytes_field(2, payload)])

    def _token(self, call: Call, identity: Identity) -> str:
        token = self._gate.token_for(identity)
        call.admit()
        return token

    def _failed(self, call: Call, user: str, reason: str) -> errors.NotAuthenticated:
        """Waits, and returns the error for a login that has failed."""
        host = call.peer.rpartition(":")[0].strip("[]")
        self._clock.sleep(self._delays.next_seconds(network_of(host), user))
        shown = f"user {user[:_SHOWN]!a}: {reason}" if user else reason
        call.log_limited("a login has failed", peer=call.peer, reason=shown)
        return errors.NotAuthenticated(reason=_WRONG)


class _Exchange:
    """One SCRAM exchange, with the credential that it is checked against."""

    def __init__(self, authentication: Authentication, mechanism: Mechanism) -> None:
        self._authentication = authentication
        self._mechanism = mechanism
        self._credential: Credential | None = None
        self.server = ScramServer(mechanism, self._find)
        self.user = ""

    def _find(self, user: str) -> Verifier:
        if len(user.encode()) > NAME_BYTES_MAX:
            raise ScramError(f"the user name has more than {NAME_BYTES_MAX} bytes")
        self.user = user
        self._credential = self._authentication.credential(self._mechanism, user)
        return self._credential.verifier

    def identity(self) -> Identity | None:
        """Returns the user that has proved its password; None if it does not exist any more."""
        assert self._credential is not None
        return self._authentication.confirmed(self._credential)
