"""Admission of Flight calls while ACLs are enforced: only programs that can read the root's keys.

Flight has no users of its own yet. A program that can read `security/` of the root could change the
ACLs too, and proves it with a token (`sparklog/security/root_token.py`); all others are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final

from sparklog import errors
from sparklog.broker.authorization import Authorization
from sparklog.broker.flight.grpc.call import Call
from sparklog.clock import Clock
from sparklog.options import is_loopback_ip
from sparklog.security.root_token import BadToken, verify
from sparklog.security.state import Mode

OPEN_ACTIONS: Final = frozenset({"root.prove"})
"""Actions that everybody may request: a program asks which root a broker serves before it trusts
the broker with a token."""


class Gate:
    """Admits the calls of one broker. Thread-safe."""

    def __init__(
        self, authorization: Authorization, *, broker: int, epoch: int, clock: Clock
    ) -> None:
        """`broker`, `epoch`: of this broker, which tokens have to name."""
        self._authorization = authorization
        self._broker = broker
        self._epoch = epoch
        self._clock = clock
        self._mode = authorization.view.mode
        self.on_enforced: Callable[[], None] = lambda: None
        """Called when ACLs begin to be enforced, to end the calls that were admitted before."""
        authorization.watch.on_change.append(self._follow)

    def _follow(self) -> None:
        before, self._mode = self._mode, self._authorization.view.mode
        if before is not self._mode and self._mode is Mode.ENFORCE:
            self.on_enforced()

    def check(
        self, call: Call, *, needs_fresh: bool = True, is_administrative: bool = False
    ) -> str:
        """Returns the client for the log: the name in its token, which it chooses, and its address.

        Raises `RootTokenNeeded` if the call is not served, and `SecurityNotRead` if that cannot be
        decided. A refusal follows a look at the security state that began after the call.

        Args:
            call: with its first message, or before.
            needs_fresh: False if it is served even while the security state cannot be read.
            is_administrative: True if it is refused while ACLs are only observed, too.
        """
        authorization = self._authorization
        if authorization.watch.is_unread or (authorization.watch.is_enforced and needs_fresh):
            authorization.watch.check_fresh()
        view = authorization.view
        if view.mode is Mode.OFF:
            return call.peer
        looks = authorization.watch.looks
        try:
            return self._verify(call)
        except BadToken as error:
            refusal = str(error)
        if view.mode is Mode.ENFORCE or is_administrative:
            authorization.watch.refresh_after(looks)
            view = authorization.view
            with contextlib.suppress(BadToken):
                return self._verify(call)
        is_refused = view.mode is Mode.ENFORCE or (is_administrative and view.mode is Mode.OBSERVE)
        if view.mode is not Mode.OFF:
            authorization.note_refused_call(call.peer, refusal, is_refused=is_refused)
        if is_refused:
            raise errors.RootTokenNeeded(reason=refusal)
        return call.peer

    def _verify(self, call: Call) -> str:
        """Returns the client for the log. Raises `BadToken`."""
        if not (call.listener.has_tls or is_loopback_ip(call.peer)):
            # It can be read on the way, and sent again.
            raise BadToken("tokens are accepted over TLS, or from this machine")
        watch = self._authorization.watch
        claims = verify(
            watch.state.root_key,
            call.authorization,
            chain_id=watch.chain_id(),
            broker=self._broker,
            epoch=self._epoch,
            now_seconds=self._clock.now_us() / 1e6,
        )
        return f"{claims.who} at {call.peer}"
