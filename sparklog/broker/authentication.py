"""Authentication of clients against the users of the root.

While the broker cannot read the security state, it refuses logins once what it knows is too old
(`security_watch.py`): a user may have been removed meanwhile.
"""

from __future__ import annotations

import hmac
import math
import secrets
import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import Final, NamedTuple

import msgspec

from sparklog import errors
from sparklog.broker.oauth import TokenVerifier
from sparklog.broker.security_watch import SecurityWatch
from sparklog.security.jwt import JwtRejected, JwtSubject, NotPermitted
from sparklog.security.login_method import LoginMethod
from sparklog.security.scram import (
    WRONG,
    DrawnVerifiers,
    Mechanism,
    ScramError,
    ScramServer,
    Verifier,
    is_password,
)
from sparklog.security.state import SecurityState, User
from sparklog.security.users import NAME_BYTES_MAX, unusable
from sparklog.settings import BrokerSettings

PASSWORDS_REMEMBERED = 10_000  # so that a client with PLAIN that reconnects costs no PBKDF2
_SALT_KEY_BYTES: Final = 32
_PASSWORD_MECHANISM: Final = Mechanism.SHA_256
"""The credential that passwords themselves are checked against."""


class Identity(NamedTuple):
    """A client that has proved who it is: a user, or a principal that no user has the name of."""

    name: str
    id: str = ""
    """Its `User.id`: a later user of the same name is another one. Empty without a user."""
    epoch: int = 0
    """Its `User.epoch` when it has logged in; the connection ends once that has risen."""
    method: LoginMethod | None = None
    """None: by a password."""
    ends_at: float = math.inf
    """When its certificate or its token expires, in seconds since 1970."""
    mechanism: str = ""
    """The SASL mechanism of its login to a Kafka listener; empty for other logins."""

    @property
    def principal(self) -> str:
        """As Kafka writes it, "User:alice"."""
        return f"User:{self.name}"

    def is_current(self, state: SecurityState) -> bool:
        """Returns whether `state` still admits the client, and as the same user or principal.

        `ends_at` is not considered.
        """
        user = state.users.get(self.name)
        if user is None:
            return self.method is not None and not self.id
        is_allowed = self.method is None or self.method in user.methods
        return is_allowed and not user.disabled and (user.id, user.epoch) == (self.id, self.epoch)


def identity_of(
    state: SecurityState, name: str, method: LoginMethod, *, ends_at: float
) -> Identity:
    """Returns the client that a certificate or a token names.

    Raises ValueError with the reason if it may not be that one.
    """
    if reason := unusable(name):
        raise ValueError(f"the name {name[:NAME_BYTES_MAX]!r} cannot be used: {reason}")
    user = state.users.get(name)
    if user is None:
        return Identity(name, method=method, ends_at=ends_at)
    if method not in user.methods:
        raise ValueError(
            f"user {name!r} does not log in by {method}; `sparklog users set-methods` permits it"
        )
    if user.disabled:
        raise ValueError(f"user {name!r} is disabled")
    return Identity(name, user.id, user.epoch, method, ends_at)


class Credential(NamedTuple):
    """A credential that a login is checked against."""

    mechanism: Mechanism
    verifier: Verifier
    identity: Identity | None
    """The user; None if it does not exist or is disabled."""


class Authentication:
    """The users of a root, as one broker knows them. May be used by several threads."""

    def __init__(self, watch: SecurityWatch, verifier: TokenVerifier | None = None) -> None:
        """Creates the authentication.

        Args:
            watch: of the root. It has a security state, unless there is a verifier.
            verifier: verifies OAuth tokens; None: clients do not log in with them.
        """
        self.watch = watch
        watch.has_logins = True
        self._verifier = verifier
        self._salt_key = watch.state.salt_key or secrets.token_bytes(_SALT_KEY_BYTES)
        self._drawn = DrawnVerifiers(self._salt_key)
        self._lock = threading.Lock()
        self._remembered: OrderedDict[bytes, None] = OrderedDict()
        """Digests of passwords that were right."""
        self._process_key = secrets.token_bytes(32)

    # -------------------------------------------------------------------------- state

    def check_fresh(self) -> None:
        """Raises `SecurityNotRead` if the users are not known well enough for a login."""
        self.watch.check_fresh()

    def is_current(self, identity: Identity) -> bool:
        """Returns whether a user that has logged in still exists and is not disabled."""
        return identity.is_current(self.watch.state)

    # -------------------------------------------------------------------------- logins

    def credential(self, mechanism: Mechanism, name: str) -> Credential:
        """Returns the credential of a user, or of one that does not exist: nothing matches that.

        A disabled user keeps its salt, and looks like one that is logged in with a wrong password.
        """
        known = self._known(mechanism, name)
        drawn = self._drawn_verifiers().of(
            mechanism, name
        )  # always: the time would show who exists
        if known is None:
            return Credential(mechanism, drawn, None)
        if known.identity is None:
            keys = {"stored_key": drawn.stored_key, "server_key": drawn.server_key}
            return known._replace(verifier=msgspec.structs.replace(known.verifier, **keys))
        return known

    def _drawn_verifiers(self) -> DrawnVerifiers:
        """Returns the verifiers of users that do not exist: all brokers draw the same."""
        key = self.watch.state.salt_key
        if key and key != self._salt_key:  # the root has got its first user
            self._salt_key, self._drawn = key, DrawnVerifiers(key)
        return self._drawn

    def _known(self, mechanism: Mechanism, name: str) -> Credential | None:
        """Returns the credential that a user has; without an identity if it is disabled."""
        user = self.watch.state.users.get(name)
        verifier = user.credentials.get(mechanism) if user is not None else None
        if user is None or verifier is None:
            return None
        identity = _identity(name, user) if not user.disabled else None
        return Credential(mechanism, verifier, identity)

    def confirmed(self, credential: Credential) -> Identity | None:
        """Returns the user that has proved to know a password; None if it has changed meanwhile."""
        identity = credential.identity
        if identity is None or self._known(credential.mechanism, identity.name) != credential:
            return None
        return identity

    def remembered(self, name: str, password: str) -> Identity | None:
        """Returns the user if this password of it has been right before; takes microseconds."""
        credential = self.credential(_PASSWORD_MECHANISM, name)
        digest = self._digest(credential, password)
        with self._lock:
            if digest not in self._remembered:
                return None
            self._remembered.move_to_end(digest)
        return credential.identity

    def log_in(self, name: str, password: str) -> Identity | None:
        """Returns the user if the password is right. Takes milliseconds, whether it exists or not.

        The GIL is released.
        """
        credential = self.credential(_PASSWORD_MECHANISM, name)
        if not is_password(_PASSWORD_MECHANISM, credential.verifier, password):
            return None
        identity = self.confirmed(credential)
        if identity is not None:
            with self._lock:
                self._remembered[self._digest(credential, password)] = None
                if len(self._remembered) > PASSWORDS_REMEMBERED:
                    self._remembered.popitem(last=False)
        return identity

    # -------------------------------------------------------------------------- tokens

    def remembered_token(self, token: str) -> Identity | None:
        """Returns the client of a token that was accepted before; takes microseconds.

        Raises `NotPermitted` if its user may not log in with a token, and `TokenKeysNotRead`.
        """
        found = self._verifier.remembered(token) if self._verifier is not None else None
        return self._identity_of(found) if found is not None else None

    def log_in_by_token(self, token: str) -> Identity:
        """Returns the client of a token. Takes a tenth of a millisecond, and up to one.

        Raises `JwtRejected`, or `UnknownKey` or `NotPermitted` of these, and `TokenKeysNotRead`.
        """
        if self._verifier is None:
            raise JwtRejected("the broker accepts no tokens of issuers")
        return self._identity_of(self._verifier.verify(token))

    def newer_keys(self) -> Future[None]:
        """See `TokenVerifier.newer_keys`: for a token that raises `UnknownKey`."""
        assert self._verifier is not None
        return self._verifier.newer_keys()

    def _identity_of(self, subject: JwtSubject) -> Identity:
        try:
            return identity_of(
                self.watch.state, subject.name, LoginMethod.OAUTH, ends_at=subject.ends_at
            )
        except ValueError as error:
            raise NotPermitted("its client is not permitted", f": {error}") from None

    def _digest(self, credential: Credential, password: str) -> bytes:
        """Returns a digest that depends on the credential, and so changes with it."""
        user_id = credential.identity.id if credential.identity is not None else ""
        verifier = credential.verifier
        parts = (user_id.encode(), verifier.stored_key, verifier.salt, password.encode())
        framed = b"".join(len(each).to_bytes(4, "big") + each for each in parts)
        return hmac.digest(self._process_key, framed, "sha256")


class ScramLogin:
    """A SCRAM login of one client: messages in, messages out. Takes some 20 microseconds."""

    def __init__(self, authentication: Authentication, mechanism: Mechanism) -> None:
        self._authentication = authentication
        self._mechanism = mechanism
        self._server = ScramServer(mechanism, self._find)
        self._credential: Credential | None = None
        self.user = ""
        """The user that the client names; empty until then."""
        self.identity: Identity | None = None
        """Set once the client has proved that it knows the password."""

    def answer(self, message: bytes) -> bytes:
        """Returns the answer to the next message. Raises `ScramError`."""
        reply = self._server.step(message)
        if self._server.user is not None:
            assert self._credential is not None
            self.identity = self._authentication.confirmed(self._credential)
            if self.identity is None:
                raise ScramError(WRONG)
        return reply

    def _find(self, user: str) -> Verifier:
        if len(user.encode()) > NAME_BYTES_MAX:
            raise ScramError(f"the user name has more than {NAME_BYTES_MAX} bytes")
        self.user = user
        self._credential = self._authentication.credential(self._mechanism, user)
        return self._credential.verifier


def _identity(name: str, user: User) -> Identity:
    return Identity(name, user.id, user.epoch)


def open_authentication(
    settings: BrokerSettings, watch: SecurityWatch, verifier: TokenVerifier | None = None
) -> Authentication | None:
    """Returns the users of the root; None if no listener asks for a login.

    Raises `BadOption` if one does, the root has no users, and there is no verifier of tokens.
    """
    if not settings.has_sasl:
        return None
    if not (watch.has_state or verifier is not None):
        tables = ("kafka", "flight", "metrics")
        table = next(each for each in tables if getattr(settings, each).has_sasl)
        raise errors.BadOption(
            option=f"{table}.listen",
            value=getattr(settings, table).listen,
            reason="clients of a listener with SASL log in, and the root has no users; create one:"
            f" sparklog users add NAME --root {settings.root}",
        )
    return Authentication(watch, verifier)
