"""The login of one Kafka client by SASL: a state machine over the frames that it sends.

    state      ApiVersions       SaslHandshake        SaslAuthenticate   another frame
    BEGIN      answer, -> ASKED  answer, -> ...       refuse             refuse
    ASKED      refuse            answer, -> ...       refuse             refuse
    TOKENS     the frame is a token of the mechanism (SaslHandshake version 0)
    REQUESTS   refuse, answer    refuse, answer       token              refuse
    OTHER      refuse            refuse               refuse             refuse

A handshake leads to TOKENS (version 0) or REQUESTS (version 1); an unknown mechanism is refused.
The last token of a mechanism ends the login. A refused client is answered only if its request has a
place for the error; its connection is closed.

A login may be a re-authentication on an open connection (KIP-368). Then the principal has to be the
same as before, and so has the mechanism: a handshake for another one leads to OTHER.

Source: `SaslServerAuthenticator` of Kafka 4.1, which allows ApiVersions once.
"""

from __future__ import annotations

import datetime as dt
import functools
import math
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Final, Protocol

from kio.schema.errors import ErrorCode

from sparklog.broker.authentication import Authentication, Identity, ScramLogin
from sparklog.broker.kafka import messages
from sparklog.broker.kafka.apis import api_versions
from sparklog.broker.kafka.messages import ConstantReply, Fields, Raw
from sparklog.broker.kafka.registry import APIS
from sparklog.clock import Clock, unix_seconds
from sparklog.security import oauth_bearer
from sparklog.security.jwt import JwtRejected
from sparklog.security.oauth_bearer import OAUTHBEARER
from sparklog.security.scram import PLAIN, WRONG, Mechanism, ScramError
from sparklog.security.users import NAME_BYTES_MAX

SASL_HANDSHAKE: Final = 17
SASL_AUTHENTICATE: Final = 36
_SHOWN: Final = 64
"""The maximum length of text from a client that has not logged in, in a log line."""
_VERSIONS_MAX: Final = 3
"""ApiVersions of one client: of an unsupported version, of a supported one, and one to spare."""
_TOKEN_FAILED: Final = "Authentication failed: Invalid username or password"
"""Kafka's text for PLAIN. The same for all reasons: which of them it was helps those who guess."""
_MALFORMED: Final = (
    f"Authentication failed due to invalid credentials with SASL mechanism {OAUTHBEARER}"
)
_LIFETIME_MAX_SECONDS: Final = 1e9
"""The longest lifetime of a session in a reply; some 30 years."""


class LoginRefused(Exception):
    """A login has failed; the message is for the broker's log.

    Args:
        reply: the frame that the client gets before its connection is closed.
        is_guess: True if the client has sent a token, which may be a guess.
        user: the user that the token names; empty if it names none.
        text: the message for the client, if its request has a place for it.
    """

    def __init__(
        self,
        reason: str,
        *,
        reply: Sequence[Raw] = (),
        is_guess: bool = False,
        user: str = "",
        text: str = _TOKEN_FAILED,
    ) -> None:
        super().__init__(reason)
        self.reply = reply
        self.is_guess = is_guess
        self.user = user
        self.text = text


class _State(Enum):
    BEGIN = "begin"
    ASKED = "asked"
    TOKENS = "tokens"
    REQUESTS = "requests"
    OTHER = "other"


class _Exchange(Protocol):
    """The tokens of one mechanism."""

    @property
    def identity(self) -> Identity | None:
        """Set once the client has proved who it is."""

    @property
    def refused(self) -> LoginRefused | None:
        """Set if the next token, whatever it is, will be refused for a reason that is known."""

    async def answer(self, token: bytes) -> bytes:
        """Raises `LoginRefused`."""


CheckPassword = Callable[[str, str], Awaitable[Identity | None]]
"""Returns the user with this name and password, checked in another thread."""
CheckToken = Callable[[str], Awaitable[Identity]]
"""Returns the client of an OAuth token, verified in another thread. Raises `JwtRejected`."""


class SaslServer:
    """One login. `identity` is set once it has succeeded."""

    def __init__(
        self,
        authentication: Authentication,
        mechanisms: tuple[str, ...],
        *,
        protocol: str,
        check_password: CheckPassword,
        check_token: CheckToken,
        clock: Clock,
        session_max_seconds: float = math.inf,
        before: Identity | None = None,
    ) -> None:
        """Begins a login.

        Args:
            authentication: the users.
            mechanisms: those of the listener, by their SASL names.
            protocol: that of the listener, for messages.
            check_password: checks a password that PLAIN has sent.
            check_token: checks a token that OAUTHBEARER has sent.
            clock: for the lifetime of the session.
            session_max_seconds: the maximum of that.
            before: the client as it has logged in before, on the same connection.
        """
        self._authentication = authentication
        self._mechanisms = mechanisms
        self._protocol = protocol
        self._check_password = check_password
        self._check_token = check_token
        self._clock = clock
        self._session_max_seconds = session_max_seconds
        self._before = before
        self._state = _State.BEGIN
        self._versions_asked = 0
        self._mechanism = ""
        self._exchange: _Exchange | None = None
        self.identity: Identity | None = None
        """The user that has logged in."""

    @property
    def mechanism(self) -> str:
        """The mechanism that the client has chosen; empty before."""
        return self._mechanism

    @property
    def refused(self) -> LoginRefused | None:
        """The refusal of which the client knows already; its login fails with its next frame."""
        return self._exchange.refused if self._exchange is not None else None

    async def answer(self, frame: bytes) -> Sequence[Raw]:
        """Returns the reply to the next frame.

        Raises `LoginRefused`, `BadRequest` for a malformed frame, and `SecurityNotRead`.
        """
        assert self.identity is None, "the client has logged in"
        before = self._before
        if self._state is _State.OTHER and before is not None:
            raise LoginRefused(
                f"it logs in again with {self._mechanism}, and first did with {before.mechanism}"
            )
        if self._state is _State.TOKENS:
            token = await self._token(frame)
            return [len(token).to_bytes(messages.LENGTH_BYTES, "big"), token]
        api_key, version, _ = messages.read_header(frame)
        is_begin = self._state in (_State.BEGIN, _State.ASKED)
        if api_key == messages.API_VERSIONS and self._state is _State.BEGIN:
            return self._versions(frame)
        if _is_served(api_key, version):
            if api_key == SASL_AUTHENTICATE and self._state is _State.REQUESTS:
                return await self._authenticate(frame)
            if api_key == SASL_HANDSHAKE and is_begin:
                return self._handshake(frame)
        reply = _out_of_place(frame) if self._state is _State.REQUESTS else ()
        if (refused := self.refused) is not None:  # some clients do not notice that it was
            refused.reply = reply
            raise refused
        api = APIS.get(api_key)
        name = api.name if api is not None else f"the request {api_key}"
        raise LoginRefused(
            f"it sends {name} before it has logged in; it needs security.protocol={self._protocol}"
            f" and sasl.mechanism={self._mechanisms[0]}",
            reply=reply,
        )

    def _versions(self, frame: bytes) -> Sequence[Raw]:
        api_key, version, correlation_id = messages.read_header(frame)
        self._versions_asked += 1
        if self._versions_asked > _VERSIONS_MAX:
            raise LoginRefused(f"it asks for the versions of requests {_VERSIONS_MAX + 1} times")
        if not _is_served(api_key, version):
            fields = api_versions.answer(messages.UNSUPPORTED_VERSION)
            return messages.write_reply(api_key, 0, correlation_id, fields)
        fields = api_versions.reply_to(messages.read_request(frame).body)
        if fields["error_code"] == ErrorCode.none:
            self._state = _State.ASKED
        return messages.write_reply(api_key, version, correlation_id, fields)

    def _handshake(self, frame: bytes) -> Sequence[Raw]:
        request = messages.read_request(frame)
        mechanism = request.body.mechanism
        is_known = mechanism in self._mechanisms
        reply = _reply(request, _offer(self._mechanisms, is_known))
        if not is_known:
            raise LoginRefused(
                f"it asks for the SASL mechanism {mechanism[:_SHOWN]!r}; the listener has"
                f" {', '.join(self._mechanisms)}",
                reply=reply,
            )
        self._mechanism = mechanism
        self._state = _State.TOKENS if request.version == 0 else _State.REQUESTS
        if self._before is not None and self._before.mechanism != mechanism:
            self._state = _State.OTHER
        elif mechanism == PLAIN:
            self._exchange = _PlainExchange(self._authentication, self._check_password)
        elif mechanism == OAUTHBEARER:
            self._exchange = _OAuthExchange(self._check_token)
        else:
            self._exchange = _ScramExchange(self._authentication, Mechanism(mechanism))
        return reply

    async def _authenticate(self, frame: bytes) -> Sequence[Raw]:
        request = messages.read_request(frame)
        try:
            token = await self._token(request.body.auth_bytes)
        except LoginRefused as refused:
            fields = {
                "error_code": ErrorCode.sasl_authentication_failed,
                "error_message": refused.text,
                "auth_bytes": b"",
            }
            refused.reply = _reply(request, fields)
            raise
        fields = {
            "error_code": ErrorCode.none,
            "error_message": None,
            "auth_bytes": token,
            "session_lifetime": self._lifetime(),
        }
        return _reply(request, fields)

    async def _token(self, token: bytes) -> bytes:
        assert self._exchange is not None
        self._authentication.check_fresh()
        answer = await self._exchange.answer(token)
        if (identity := self._exchange.identity) is not None:
            self._check_unchanged(identity)
            ends_at = min(identity.ends_at, unix_seconds(self._clock) + self._session_max_seconds)
            self.identity = identity._replace(mechanism=self._mechanism, ends_at=ends_at)
        return answer

    def _check_unchanged(self, identity: Identity) -> None:
        """Raises `LoginRefused` for another client than before (KIP-368)."""
        before = self._before
        if before is not None and (before.name, before.id) != (identity.name, identity.id):
            raise LoginRefused(
                f"{identity.principal} logs in on a connection of {before.principal}",
                is_guess=True,
                user=identity.name,
                text="Cannot change principals during re-authentication",
            )

    def _lifetime(self) -> dt.timedelta:
        """Returns the time until the client has to log in again; 0: it need not (KIP-368)."""
        if self.identity is None or self.identity.ends_at == math.inf:
            return dt.timedelta()
        seconds = self.identity.ends_at - unix_seconds(self._clock)
        milliseconds = round(min(max(seconds, 0.0), _LIFETIME_MAX_SECONDS) * 1e3)
        return dt.timedelta(milliseconds=max(milliseconds, 1))


@functools.cache
def _offer(mechanisms: tuple[str, ...], is_known: bool) -> Fields:
    """Returns the reply to a handshake; a broker has a few of them."""
    code = ErrorCode.none if is_known else ErrorCode.unsupported_sasl_mechanism
    return ConstantReply({"error_code": code, "mechanisms": mechanisms})


def _is_served(api_key: int, version: int) -> bool:
    api = APIS.get(api_key)
    return api is not None and api.min_version <= version <= api.max_version


def _out_of_place(frame: bytes) -> Sequence[Raw]:
    """Returns the reply to a request in the middle of a login, as far as its kind is known here."""
    api_key, version, correlation_id = messages.read_header(frame)
    if not _is_served(api_key, version):
        return ()
    if api_key == SASL_HANDSHAKE:
        fields: Fields = {"error_code": ErrorCode.illegal_sasl_state, "mechanisms": ()}
    elif api_key == messages.API_VERSIONS:
        fields = {**api_versions.answer(ErrorCode.illegal_sasl_state), "api_keys": ()}
    else:
        return ()
    return messages.write_reply(api_key, version, correlation_id, fields)


def _reply(request: messages.Request, fields: Fields) -> Sequence[Raw]:
    return messages.write_reply(request.api_key, request.version, request.correlation_id, fields)


# ------------------------------------------------------------------------------ mechanisms


class _ScramExchange:
    """See `_Exchange`. Takes some 20 microseconds of the event loop."""

    refused = None

    def __init__(self, authentication: Authentication, mechanism: Mechanism) -> None:
        self._login = ScramLogin(authentication, mechanism)

    @property
    def identity(self) -> Identity | None:
        return self._login.identity

    async def answer(self, token: bytes) -> bytes:
        try:
            return self._login.answer(token)
        except ScramError as error:
            user = self._login.user
            shown = f"user {user[:_SHOWN]!r}: " if user else ""
            raise LoginRefused(f"{shown}{error}", is_guess=True, user=user) from None


class _OAuthExchange:
    """See `_Exchange`. A token that is refused is answered, and the login fails one message later,
    with the same text (RFC 7628).
    """

    def __init__(self, check_token: CheckToken) -> None:
        self._check_token = check_token
        self.refused: LoginRefused | None = None
        self.identity: Identity | None = None

    async def answer(self, token: bytes) -> bytes:
        if self.refused is not None:  # whatever the client sends: a login has one token
            raise self.refused
        try:
            response = oauth_bearer.read_response(token)
        except ValueError as error:
            raise LoginRefused(str(error), is_guess=True, text=_MALFORMED) from None
        try:
            identity = await self._check_token(response.token)
        except JwtRejected as error:
            text = oauth_bearer.refusal(error.cause)
            self.refused = LoginRefused(f"the token is refused: {error}", is_guess=True, text=text)
            return text.encode()
        if response.authzid not in ("", identity.name):
            reason = f"user {identity.name[:_SHOWN]!r} asks to act as another one"
            raise LoginRefused(reason, is_guess=True, user=identity.name, text=_MALFORMED)
        self.identity = identity
        return b""


class _PlainExchange:
    """See `_Exchange`. The only token has the user's name and the password (RFC 4616)."""

    refused = None

    def __init__(self, authentication: Authentication, check_password: CheckPassword) -> None:
        self._authentication = authentication
        self._check_password = check_password
        self.identity: Identity | None = None

    async def answer(self, token: bytes) -> bytes:
        if len(token) > _PLAIN_BYTES_MAX:
            raise LoginRefused(f"the token has {len(token)} bytes", is_guess=True)
        try:
            authzid, user, password = token.decode().split("\0")
        except ValueError:
            raise LoginRefused("the token of PLAIN is malformed", is_guess=True) from None
        if not user or not password or len(user.encode()) > NAME_BYTES_MAX:
            raise LoginRefused("the user or the password is empty or too long", is_guess=True)
        if authzid not in ("", user):
            reason = f"user {user[:_SHOWN]!r} asks to act as another one"
            raise LoginRefused(reason, is_guess=True, user=user)
        found = self._authentication.remembered(user, password)
        self.identity = found or await self._check_password(user, password)
        if self.identity is None:
            raise _wrong(user)
        return b""


_PLAIN_BYTES_MAX: Final = 4_096


def _wrong(user: str) -> LoginRefused:
    return LoginRefused(f"user {user[:_SHOWN]!r}: {WRONG}", is_guess=True, user=user)
