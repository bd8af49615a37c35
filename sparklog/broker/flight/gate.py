"""Admission of Flight calls: finds the client by the token in the header `authorization`.

At a listener with SASL, a call needs a token: that of a user who has logged in
(`security/user_token.py`), that of an OAuth issuer (`security/jwt.py`), or that of a program that
can read the root's keys (`security/root_token.py`), to which ACLs do not apply. Without SASL, a
call without a token is that of the principal in the client's certificate, or of an anonymous
client. A token that is not valid is refused at any listener, except at one without SASL while the
mode is `off`, where tokens are not read.

Open streams are checked again whenever the users or ACLs have changed: `check_streams` ends those
of users that were removed, and those that would be refused now. It also ends a stream when the
certificate or the token of its client expires.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from sparklog import errors
from sparklog.broker.authentication import Authentication, Identity, identity_of
from sparklog.broker.authorization import Authorization, View
from sparklog.broker.flight.caller import Caller
from sparklog.broker.flight.grpc.call import Call
from sparklog.clock import Clock, unix_seconds
from sparklog.listeners import SSL, host_of
from sparklog.options import is_loopback_ip
from sparklog.security import root_token, user_token
from sparklog.security.acl import Operation, ResourceType
from sparklog.security.jwt import JwtRejected, NotPermitted, UnknownKey
from sparklog.security.login_method import LoginMethod
from sparklog.security.oauth_bearer import OAUTHBEARER
from sparklog.security.root_token import ROOT_TOKENS
from sparklog.security.signed_token import BadToken
from sparklog.security.state import Mode, SecurityState
from sparklog.security.user_token import USER_TOKENS, VALID_SECONDS, UserClaims
from sparklog.security.x500 import CertificatePrincipal

NO_TOKEN: Final = (
    "the listener asks for a login: pass Security(user=…), the option user in Spark, or set"
    " SPARKLOG_CLIENT_USER"
)
_BEARER: Final = "bearer"
_VERIFIED_PER_SECOND: Final = 20
"""The maximum number of OAuth tokens that the thread that reads all connections verifies."""
_KEYS_SECONDS: Final = 6.0
"""The maximum time that a call waits for the keys of an OAuth issuer."""
_NO_ANONYMOUS: Final = (
    "ACLs are enforced, and allow nothing without a login: connect to a Flight listener with SASL,"
    " or by the root as a user that can read security/ in it"
)


class Gate:
    """Admits the calls of one broker. Thread-safe."""

    def __init__(
        self,
        authorization: Authorization,
        *,
        broker: int,
        epoch: int,
        clock: Clock,
        authentication: Authentication | None = None,
    ) -> None:
        """Creates a gate.

        Args:
            authorization: the ACLs.
            broker: the id of this broker, which tokens of programs with the root's keys name.
            epoch: its epoch, which they name too.
            clock: for the expiry of tokens.
            authentication: verifies OAuth tokens; None: they are not accepted.
        """
        self.authorization = authorization
        self._authentication = authentication
        self._second = self._verified = 0
        """The number of tokens that the reading thread has verified in this second."""
        self._broker = broker
        self._epoch = epoch
        self._clock = clock
        self._lock = threading.Lock()
        self._streams: set[AuthorizedStream] = set()
        self._checked: tuple[SecurityState, View] = authorization.watch.state, authorization.view
        """The state and the view by which all open streams have been checked."""

    # -------------------------------------------------------------------------- calls

    def recognises(self, call: Call) -> bool:
        """Returns whether a call that has just begun has a valid token, if it needs one.

        Takes microseconds, but for a few OAuth tokens, and looks at nothing new: `admit` decides.
        """
        if not call.listener.has_sasl:
            return True
        try:
            self._identify(call, is_quick=True)
        except (BadToken, errors.TokenKeysNotRead):
            return False
        return True

    def admit(self, call: Call, *, needs_fresh: bool = True) -> Caller:
        """Returns the client of a call.

        Raises `NotAuthenticated`, after a look at the security state that began after the call,
        `SecurityNotRead` if the state is too old, and `TokenKeysNotRead`.

        `needs_fresh`: False if it is served even while the security state cannot be read.
        """
        watch = self.authorization.watch
        names_client = call.listener.has_sasl or call.principal is not None
        if needs_fresh or watch.is_unread:
            self.check_fresh()
            if names_client:
                watch.check_fresh()  # a user that was removed could continue for an hour
        if not (names_client or self.authorization.evaluates):
            return self._caller(call)
        looks = watch.looks
        try:
            return self._identify(call)
        except BadToken as error:
            if isinstance(error, JwtRejected) and not isinstance(error, NotPermitted):
                raise self._refusal(call, error) from None  # whatever the users are
            watch.refresh_after(looks)
        try:
            return self._identify(call)
        except BadToken as error:
            raise self._refusal(call, error) from None

    def _refusal(self, call: Call, error: BadToken) -> errors.NotAuthenticated:
        """Notes that a call is refused, and returns the error for its client."""
        if not isinstance(error, JwtRejected):
            self.authorization.note_refused_call(call.peer, call.listener.name, str(error))
            return errors.NotAuthenticated(reason=str(error))
        reason = f"its OAuth token: {error}"
        self.authorization.note_refused_call(call.peer, call.listener.name, reason)
        return errors.NotAuthenticated(reason=f"its OAuth token is refused: {error.cause}")

    def check_fresh(self) -> None:
        """Raises `SecurityNotRead` if ACLs are enforced by a state that is too old."""
        watch = self.authorization.watch
        if watch.is_enforced:
            watch.check_fresh()

    def _identify(self, call: Call, *, is_quick: bool = False) -> Caller:
        """Returns the client that the call's token names. Raises `BadToken` and `TokenKeysNotRead`.

        `is_quick`: a token that has to be verified first, which takes longer, is not accepted.
        """
        header = call.authorization
        if not header:
            if call.listener.has_sasl:
                raise BadToken(NO_TOKEN)
            if call.principal is not None:
                return self._caller(call, identity=self._certified(call, call.principal))
            view = self.authorization.view
            if view.mode is Mode.ENFORCE and not view.allows_anonymous:
                raise BadToken(_NO_ANONYMOUS)
            return self._caller(call)
        if not (call.listener.has_tls or is_loopback_ip(call.peer)):
            # It can be read on the way, and sent again.
            raise BadToken("tokens are accepted over TLS, or from this machine")
        watch = self.authorization.watch
        state, now_seconds = watch.state, unix_seconds(self._clock)
        if ROOT_TOKENS.matches(header):
            root = root_token.verify(
                state.root_key,
                header,
                chain_id=watch.chain_id(),
                broker=self._broker,
                epoch=self._epoch,
                address=call.listener.client_address,
                now_seconds=now_seconds,
            )
            if self.authorization.audit is not None:
                self.authorization.audit.root_called(
                    listener=call.listener.name, principal=root.who, host=host_of(call.peer)
                )
            return self._caller(call, root=root.who)
        scheme, _, token = header.partition(" ")
        if scheme.lower() == _BEARER and not USER_TOKENS.matches(header):
            identity = self._by_oauth(call, token.strip(), is_quick=is_quick)
            return self._caller(call, identity=identity)
        claims = user_token.verify(
            state.root_key, header, chain_id=watch.chain_id(), now_seconds=now_seconds
        )
        ends_at = math.inf if claims.ends_at is None else claims.ends_at
        identity = Identity(claims.user, claims.user_id, claims.epoch, claims.method, ends_at)
        if not identity.is_current(state):
            raise BadToken(f"user {claims.user!r} was removed, disabled, or has to log in again")
        return self._caller(
            call, identity=identity, is_for_tasks=claims.is_for_tasks, topics=claims.topics
        )

    def _by_oauth(self, call: Call, token: str, *, is_quick: bool) -> Identity:
        """Returns the client that a token of an OAuth issuer names. See `_identify`."""
        authentication = self._authentication
        if authentication is None:
            raise BadToken("the header authorization has no token of a broker")
        if (found := authentication.remembered_token(token)) is not None:
            return found
        if is_quick and not self._may_verify_now(call):
            raise BadToken("its OAuth token has not been verified yet")
        try:
            identity = authentication.log_in_by_token(token)
        except UnknownKey:
            if is_quick:
                raise
            with contextlib.suppress(TimeoutError):
                authentication.newer_keys().result(_KEYS_SECONDS)
            identity = authentication.log_in_by_token(token)
        return self._noted(call, identity)

    def _noted(self, call: Call, identity: Identity, mechanism: str = OAUTHBEARER) -> Identity:
        """Returns the client, after its login was noted in the audit."""
        if self.authorization.audit is not None:
            self.authorization.audit.logged_in(
                listener=call.listener.name,
                mechanism=mechanism,
                principal=identity.principal,
                host=host_of(call.peer),
                is_repeated=True,
            )
        return identity

    def _may_verify_now(self, call: Call) -> bool:
        """Returns whether the thread that reads all connections may verify a token of this call.

        Otherwise the calls that a known client sends at the same moment, just after it has got
        another token, would be bounded like those of strangers.
        """
        second = int(self._clock.monotonic())
        if second != self._second:
            self._second, self._verified = second, 0
        self._verified += 1
        return call.is_of_known_client and self._verified <= _VERIFIED_PER_SECOND

    def _certified(self, call: Call, principal: CertificatePrincipal) -> Identity:
        """Returns the client that a certificate names. Raises `BadToken`."""
        state = self.authorization.watch.state
        method, ends_at = LoginMethod.CERTIFICATE, principal.ends_at
        if ends_at <= unix_seconds(self._clock):
            raise BadToken("its certificate has expired")
        try:
            identity = identity_of(state, principal.name, method, ends_at=ends_at)
        except ValueError as error:
            raise BadToken(str(error)) from None
        return self._noted(call, identity, SSL)

    def _caller(self, call: Call, **client: Any) -> Caller:
        """Returns the client of a call; `client`: see `Caller`."""
        return Caller(self.authorization, peer=call.peer, listener=call.listener.name, **client)

    # -------------------------------------------------------------------------- tokens

    def login_token(self, identity: Identity) -> str:
        """Returns the token of a user that has logged in.

        Raises `NotAuthenticated` without a key to sign it.
        """
        return USER_TOKENS.sign(self._key(), self._claims(identity, VALID_SECONDS))

    def task_token(self, identity: Identity, topics: Sequence[str] | None, *, seconds: int) -> str:
        """Returns a token that only reads records of topics; None: of all.

        Raises `NotAuthenticated` without a key to sign it.
        """
        claims = self._claims(identity, seconds)
        limited = msgspec.structs.replace(
            claims, is_for_tasks=True, topics=None if topics is None else (*topics,)
        )
        return USER_TOKENS.sign(self._key(), limited)

    def _claims(self, identity: Identity, seconds: int) -> UserClaims:
        """Returns the claims of a token, which ends with what the client has logged in with."""
        return UserClaims(
            chain_id=self.authorization.watch.chain_id(),
            user=identity.name,
            user_id=identity.id,
            epoch=identity.epoch,
            method=identity.method,
            ends_at=None if math.isinf(identity.ends_at) else int(identity.ends_at),
            expires_at=int(min(unix_seconds(self._clock) + seconds, identity.ends_at)),
        )

    def _key(self) -> bytes:
        key = self.authorization.watch.state.root_key
        if not key:
            reason = "the root has no key to sign tokens with yet; `sparklog users add` makes one"
            raise errors.NotAuthenticated(reason=reason)
        return key

    # -------------------------------------------------------------------------- streams

    @contextlib.contextmanager
    def watched(self, stream: AuthorizedStream) -> Iterator[None]:
        """Checks a stream now, and after each change while it is open.

        Raises what `AuthorizedStream.check` raises.
        """
        with self._lock:
            self._streams.add(stream)
        try:
            stream.check()  # after it was added: a change is seen here, or by `check_streams`
            yield
        finally:
            with self._lock:
                self._streams.discard(stream)

    def check_streams(self) -> None:
        """Ends the streams that may not continue. Called several times a second."""
        watch = self.authorization.watch
        state, view = watch.state, self.authorization.view
        is_stale = watch.is_enforced and watch.is_stale
        is_checked = state is self._checked[0] and view is self._checked[1]
        now_seconds = unix_seconds(self._clock)
        with self._lock:
            streams = [*self._streams]
        for each in streams:
            has_ended = is_stale or each.ends_at <= now_seconds
            if has_ended or not (is_checked or each.may_continue()):
                each.cut()
        self._checked = state, view


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AuthorizedStream:
    """An open stream of records of some topics."""

    caller: Caller
    operation: Operation
    topics: tuple[str, ...]
    cut: Callable[[], None]
    """Ends the stream; may be called from any thread."""

    @property
    def ends_at(self) -> float:
        """When the certificate or token of its client expires, in seconds since 1970."""
        identity = self.caller.identity
        return identity.ends_at if identity is not None else math.inf

    def check(self) -> None:
        """Raises `NotAuthenticated` and `NotAuthorized` if the stream may not continue."""
        if not self.caller.is_current():
            raise errors.NotAuthenticated(reason="the user was removed, disabled or cut")
        self.caller.check(self.operation, ResourceType.TOPIC, self.topics)

    def may_continue(self) -> bool:
        """Returns whether the stream may continue, as far as is known now."""
        return self.caller.is_current() and all(
            self.caller.may(self.operation, ResourceType.TOPIC, each) for each in self.topics
        )
