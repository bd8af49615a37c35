"""Logins of Flight clients: the call `Handshake`, which leads to a token for further calls.

- A header `authorization: Basic …`, as other Flight clients send it, has the password itself. The
  token is in the trailer `authorization`.
- A payload `SCRAM-SHA-256`, a line break and the first message of that mechanism begins an exchange
  in which the password does not leave the client. The last payload of the broker is its own last
  message, a line break and the token.

The users are those of the root. A client that has failed is answered with a delay. The gRPC server
bounds the calls of clients that are not admitted, for each network.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Final, NoReturn

from sparklog import errors
from sparklog.broker.authentication import Authentication, Identity, ScramLogin
from sparklog.broker.basic import credentials_in, is_basic
from sparklog.broker.flight import protocol
from sparklog.broker.flight.gate import Gate
from sparklog.broker.flight.grpc.call import Call
from sparklog.broker.login_failures import FailureDelays
from sparklog.broker.peers import network_of
from sparklog.clock import Clock
from sparklog.listeners import host_of
from sparklog.security.scram import PLAIN, WRONG, Mechanism, ScramError
from sparklog.security.users import NAME_BYTES_MAX

LOGIN_SECONDS = 10.0  # for all messages of a login
_CHECKED_AT_ONCE: Final = 2
"""Passwords that are checked at a time: each takes milliseconds of processor time."""
_SHOWN: Final = 64
"""The maximum length of a user's name in a log line."""
_WRONG: Final = "the user name or the password is wrong"
"""One text for all reasons: which of them it was helps those who guess."""


class Logins:
    """Serves the logins of one listener. Thread-safe."""

    def __init__(
        self,
        authentication: Authentication,
        gate: Gate,
        *,
        mechanisms: Collection[str],
        delays: FailureDelays,
        clock: Clock,
    ) -> None:
        """Creates the logins.

        Args:
            authentication: the users.
            gate: issues tokens.
            mechanisms: by their SASL names; PLAIN stands for the header `Basic`.
            delays: those of failed logins.
            clock: for the time that a login may take.
        """
        self._authentication = authentication
        self._gate = gate
        self._mechanisms = mechanisms
        self._delays = delays
        self._clock = clock
        self._checking = threading.BoundedSemaphore(_CHECKED_AT_ONCE)

    def serve(self, call: Call) -> None:
        """Logs a client in. Raises `NotAuthenticated` and `SecurityNotRead`."""
        call.deadline = self._clock.monotonic() + LOGIN_SECONDS
        self._authentication.check_fresh()
        if is_basic(call.authorization) and PLAIN in self._mechanisms:
            self._basic(call)
        else:
            self._scram(call)

    def _basic(self, call: Call) -> None:
        user, password = credentials_in(call.authorization)
        if not user or not password or len(user.encode()) > NAME_BYTES_MAX:
            self._refuse(call, PLAIN, user, "the header is malformed, or a part of it is missing")
        identity = self._authentication.remembered(user, password)
        if identity is None:
            with self._checking:
                identity = self._authentication.log_in(user, password)
        if identity is None:
            self._refuse(call, PLAIN, user, WRONG)
        call.trailers.append(("authorization", self._token(call, identity, PLAIN).encode()))

    def _scram(self, call: Call) -> None:
        mechanism, _, first = self._payload(call).partition(b"\n")
        name = mechanism.decode(errors="replace")
        if name not in self._mechanisms or name == PLAIN:
            basic = "a header `authorization: Basic …`, or one of "
            known = ", ".join(each for each in self._mechanisms if each != PLAIN)
            raise errors.NotAuthenticated(
                reason=f"a login needs {basic if PLAIN in self._mechanisms else ''}{known}"
            )
        login = ScramLogin(self._authentication, Mechanism(name))
        try:
            self._answer(call, login.answer(first))
            last = login.answer(self._payload(call))
        except ScramError as error:
            self._refuse(call, name, login.user, str(error))
        assert login.identity is not None
        self._answer(call, last + b"\n" + self._token(call, login.identity, name).encode())

    @staticmethod
    def _payload(call: Call) -> bytes:
        message = call.read()
        return bytes(protocol.field(message.data, 2)) if message is not None else b""

    @staticmethod
    def _answer(call: Call, payload: bytes) -> None:
        call.write([protocol.bytes_field(2, payload)])

    def _token(self, call: Call, identity: Identity, mechanism: str) -> str:
        token = self._gate.login_token(identity)
        call.admit()
        if (audit := self._gate.authorization.audit) is not None:
            audit.logged_in(
                listener=call.listener.name,
                mechanism=mechanism,
                principal=identity.principal,
                host=host_of(call.peer),
            )
        return token

    def _refuse(self, call: Call, mechanism: str, user: str, reason: str) -> NoReturn:
        """Logs a login that has failed, waits, and raises `NotAuthenticated`."""
        if (audit := self._gate.authorization.audit) is not None:
            audit.login_failed(
                listener=call.listener.name,
                mechanism=mechanism,
                user=user,
                host=host_of(call.peer),
                reason=reason,
            )
        call.count_unadmitted()
        shown = f"user {user[:_SHOWN]!a}: {reason}" if user else reason
        call.log_limited("a login has failed", peer=call.peer, reason=shown)
        self._clock.sleep(self._delays.next_seconds(network_of(host_of(call.peer)), user))
        raise errors.NotAuthenticated(reason=_WRONG)
