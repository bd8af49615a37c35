"""Logins with tokens of an OAuth issuer, for Kafka and Flight clients.

A signature takes a tenth of a millisecond of processor time or more, so a token that was accepted
is remembered until it expires, or until the keys of its issuer change.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import OrderedDict
from concurrent.futures import Future

from sparklog import errors
from sparklog.broker.jwks import FETCH_SECONDS, JwksSource
from sparklog.broker.loops import Loops
from sparklog.broker.refused_work import RefusedWork, Work
from sparklog.clock import Clock, unix_seconds
from sparklog.security import jwt
from sparklog.security.jwt import Jwks, JwtRules, JwtSubject
from sparklog.settings import OAuthSettings

TOKENS_REMEMBERED = 10_000


class TokenVerifier:
    """Verifies the tokens of one issuer. Thread-safe."""

    def __init__(
        self, rules: JwtRules, source: JwksSource, *, clock: Clock, refused: RefusedWork
    ) -> None:
        """Creates a verifier.

        Args:
            rules: the claims that tokens need.
            source: the keys of their issuer.
            clock: for their expiry.
            refused: notes that logins are refused because the keys cannot be fetched.
        """
        self._rules = rules
        self._source = source
        self._clock = clock
        self._refused = refused
        self._lock = threading.Lock()
        self._keys: Jwks | None = None
        """The keys that verified the tokens in `_remembered`."""
        self._remembered: OrderedDict[bytes, JwtSubject] = OrderedDict()
        """The clients by the SHA-256 digests of their tokens, the longest unused first."""

    def remembered(self, token: str) -> JwtSubject | None:
        """Returns the client of a token that was accepted before. Takes microseconds.

        Raises `TokenKeysNotRead`.
        """
        keys, digest = self._current_keys(), _digest(token)
        with self._lock:
            if keys is not self._keys:
                return None
            found = self._remembered.get(digest)
            if found is None:
                return None
            if found.ends_at <= unix_seconds(self._clock):
                del self._remembered[digest]
                return None
            self._remembered.move_to_end(digest)
        return found

    def verify(self, token: str) -> JwtSubject:
        """Returns the client of a token. Takes a tenth of a millisecond, and up to one.

        Raises `JwtRejected`, `UnknownKey` and `TokenKeysNotRead`.
        """
        if (found := self.remembered(token)) is not None:
            return found
        keys = self._current_keys()
        found = jwt.verify(token, keys, self._rules, now_seconds=unix_seconds(self._clock))
        digest = _digest(token)
        with self._lock:
            if keys is not self._keys:
                self._keys = keys
                self._remembered.clear()
            self._remembered[digest] = found
            if len(self._remembered) > TOKENS_REMEMBERED:
                self._remembered.popitem(last=False)
        return found

    def newer_keys(self) -> Future[None]:
        """Returns a future that is done once the keys have been fetched for an unknown key.

        It is done at once if the last such fetch was less than a minute ago.
        """
        return self._source.refresh_for_unknown_key()

    def _current_keys(self) -> Jwks:
        try:
            return self._source.keys()
        except errors.TokenKeysNotRead as error:
            self._refused.note(Work.LOGINS, str(error))
            raise

    # -------------------------------------------------------------------------- keys

    def open(self) -> None:
        """Fetches the keys for the first time.

        Raises `BadOption` for a file that is not valid. A broker starts without keys that cannot be
        fetched over the network, and refuses tokens until they can.
        """
        if self._source.is_remote:
            with contextlib.suppress(TimeoutError):
                self._source.refresh_in_thread().result(FETCH_SECONDS)
            return
        try:
            self._source.refresh()
        except errors.TokenKeysNotRead:
            raise errors.BadOption(
                option="oauth.jwks", value=self._source.location, reason=self._source.failure
            ) from None

    def follow(self, loops: Loops) -> None:
        """Starts a thread that replaces the keys."""

        def repeat() -> None:
            source = self._source
            loops.repeat("fetching the OAuth keys", lambda: source.pause_seconds, source.refresh)

        loops.start("jwks", repeat)

    def note_if_refused(self) -> None:
        """Notes that logins are refused, if they are."""
        with contextlib.suppress(errors.TokenKeysNotRead):
            self._current_keys()


def open_verifier(
    settings: OAuthSettings, *, clock: Clock, refused: RefusedWork
) -> TokenVerifier | None:
    """Returns the verifier of a broker's settings; None if clients do not log in with tokens.

    Raises what `TokenVerifier.open` raises.
    """
    if not settings.is_configured:
        return None
    rules = JwtRules(
        issuer=settings.issuer,
        audiences=_names(settings.audience),
        scopes=_names(settings.scopes),
        scope_claim=settings.scope_claim,
        sub_claim=settings.sub_claim,
        clock_skew_seconds=settings.clock_skew_seconds,
    )
    source = JwksSource(settings.jwks, ca=settings.ca, clock=clock)
    verifier = TokenVerifier(rules, source, clock=clock, refused=refused)
    verifier.open()
    return verifier


def _names(text: str) -> frozenset[str]:
    return frozenset(name for each in text.split(",") if (name := each.strip()))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()
