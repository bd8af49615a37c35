"""Admission of Flight calls: finds the client by the token in the header `authorization`.

At a listener with SASL, a call needs a token: that of a user who has logged in
(`security/user_token.py`), or that of a program that can read the root's keys
(`security/root_token.py`), to which ACLs do not apply. Without SASL, a call without a token is that
of an anonymous client. A token that is not valid is refused at any listener.

Open streams are checked again whenever the users or ACLs have changed: `sweep` ends those of users
that were removed, and those that would be refused now.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from sparklog import errors
from sparklog.broker.authentication import Identity
from sparklog.broker.authorization import Authorization, View
from sparklog.broker.flight.caller import Caller, Stream
from sparklog.broker.flight.grpc.call import Call
from sparklog.clock import Clock
from sparklog.options import is_loopback_ip
from sparklog.security import root_token, user_token
from sparklog.security.root_token import ROOT_TOKENS
from sparklog.security.signed_token import BadToken
from sparklog.security.state import Mode, SecurityState
from sparklog.security.user_token import USER_TOKENS, VALID_SECONDS, UserClaims

_NO_TOKEN: Final = "the listener asks for a login: pass Security(user=…), or SPARKLOG_CLIENT_USER"
_NO_STRANGERS: Final = (
    "ACLs are enforced, and allow nothing without a login: connect to a Flight listener with SASL,"
    " or by the root as a user that can read security/ in it"
)


class Gate:
    """Admits the calls of one broker. Thread-safe."""

    def __init__(
        self, authorization: Authorization, *, broker: int, epoch: int, clock: Clock
    ) -> None:
        """`broker`, `epoch`: of this broker, which tokens of programs with the root's keys name."""
        self.authorization = authorization
        self._broker = broker
        self._epoch = epoch
        self._clock = clock
        self._lock = threading.Lock()
        self._streams: set[Stream] = set()
        self._swept: tuple[SecurityState, View] = (authorization.watch.state, authorization.view)
        """The state and the view by which all open streams have been checked."""

    # -------------------------------------------------------------------------- calls

    def knows(self, call: Call) -> bool:
        """Returns whether a call that has just begun is that of an admitted client.

        Takes microseconds, and looks at nothing new: `admit` decides.
        """
        if not call.listener.has_sasl:
            return True
        try:
            self._identify(call)
        except BadToken:
            return False
        return True

    def admit(self, call: Call, *, needs_fresh: bool = True) -> Caller:
        """Returns the client of a call.

        Raises `NotAuthenticated`, after a look at the security state that began after the call, and
        `SecurityNotRead` if the state is too old.

        `needs_fresh`: False if it is served even while the security state cannot be read.
        """
        watch = self.authorization.watch
        if needs_fresh or watch.is_unread:
            self.check_fresh()
        if not (call.listener.has_sasl or self.authorization.evaluates):
            return self._caller(call)
        looks = watch.looks
        try:
            return self._identify(call)
        except BadToken:
            watch.refresh_after(looks)
        try:
            return self._identify(call)
        except BadToken as error:
            self.authorization.note_refused_call(call.peer, str(error), is_refused=True)
            raise errors.NotAuthenticated(reason=str(error)) from None

    def check_fresh(self) -> None:
        """Raises `SecurityNotRead` if ACLs are enforced by a state that is too old."""
        watch = self.authorization.watch
        if watch.is_enforced and watch.is_stale:
            watch.check_fresh()

    def _identify(self, call: Call) -> Caller:
        """Returns the client that the call's token names. Raises `BadToken`."""
        header = call.authorization
        if not header:
            if call.listener.has_sasl:
                raise BadToken(_NO_TOKEN)
            view = self.authorization.view
            if view.mode is Mode.ENFORCE and not view.allows_strangers:
                raise BadToken(_NO_STRANGERS)
            return self._caller(call)
        if not (call.listener.has_tls or is_loopback_ip(call.peer)):
            # It can be read on the way, and sent again.
            raise BadToken("tokens are accepted over TLS, or from this machine")
        watch = self.authorization.watch
        state, now_seconds = watch.state, self._clock.now_us() / 1e6
        if ROOT_TOKENS.matches(header):
            root = root_token.verify(
                state.root_key,
                header,
                chain_id=watch.chain_id(),
                broker=self._broker,
                epoch=self._epoch,
                now_seconds=now_seconds,
            )
            return self._caller(call, root=root.who)
        if not USER_TOKENS.matches(header):
            raise BadToken("the header authorization has no token of a broker")
        claims = user_token.verify(
            state.root_key, header, chain_id=watch.chain_id(), now_seconds=now_seconds
        )
        identity = Identity(claims.user, claims.user_id, claims.epoch)
        if not identity.is_current(state):
            raise BadToken(f"user {claims.user!r} was removed, disabled, or has to log in again")
        return self._caller(call, identity=identity, claims=claims)

    def _caller(
        self,
        call: Call,
        *,
        identity: Identity | None = None,
        claims: UserClaims | None = None,
        root: str = "",
    ) -> Caller:
        return Caller(
            self.authorization,
            peer=call.peer,
            listener=call.listener.name,
            identity=identity,
            is_of_task=claims is not None and claims.is_for_tasks,
            topics=claims.topics if claims is not None else None,
            root=root,
        )

    # -------------------------------------------------------------------------- tokens

    def token_for(self, identity: Identity) -> str:
        """Returns the token of a user that has logged in; see `task_token`."""
        return USER_TOKENS.sign(self._key(), self._claims(identity, VALID_SECONDS))

    def task_token(self, identity: Identity, topics: Sequence[str] | None, *, seconds: int) -> str:
        """Returns a token that only reads and writes records of topics; None: of all.

        Raises `NotAuthenticated` without a key to sign it.
        """
        claims = self._claims(identity, seconds)
        limited = msgspec.structs.replace(
            claims, is_for_tasks=True, topics=None if topics is None else (*topics,)
        )
        return USER_TOKENS.sign(self._key(), limited)

    def _claims(self, identity: Identity, seconds: int) -> UserClaims:
        return UserClaims(
            chain_id=self.authorization.watch.chain_id(),
            user=identity.name,
            user_id=identity.id,
            epoch=identity.epoch,
            expires_at=int(self._clock.now_us() / 1e6) + seconds,
        )

    def _key(self) -> bytes:
        key = self.authorization.watch.state.root_key
        if not key:
            reason = "the root has no key to sign tokens with yet; `sparklog users add` makes one"
            raise errors.NotAuthenticated(reason=reason)
        return key

    # -------------------------------------------------------------------------- streams

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Has a stream checked again while it is open."""
        with self._lock:
            self._streams.add(stream)
        try:
            if (self.authorization.watch.state, self.authorization.view) != self._swept:
                stream.check()  # it may have changed before the stream was added
            yield
        finally:
            with self._lock:
                self._streams.discard(stream)

    def sweep(self) -> None:
        """Ends the streams that may not continue. Called several times a second."""
        watch = self.authorization.watch
        known = watch.state, self.authorization.view
        is_stale = watch.is_enforced and watch.is_stale
        if not is_stale and known[0] is self._swept[0] and known[1] is self._swept[1]:
            return
        with self._lock:
            streams = [*self._streams]
        for each in streams:
            if is_stale or not each.may_continue():
                each.cut()
        self._swept = known
