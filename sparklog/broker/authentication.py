"""Authentication of clients against the users of the root.

The broker follows the security state with one probe every tenth of a second (on an object store,
every second). While it cannot, it refuses logins once the last look is as old as the silence after
which a broker counts as dead: a user may have been removed meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from sparklog import errors, limits
from sparklog.broker.loops import Loops
from sparklog.broker.refused_work import RefusedWork, Work
from sparklog.clock import Clock, Moment
from sparklog.security.scram import DrawnVerifiers, Mechanism, Verifier, is_password
from sparklog.security.state import User
from sparklog.settings import BrokerSettings
from sparklog.storage.objects import Store
from sparklog.storage.security_store import SecurityStore, open_security

PASSWORDS_REMEMBERED = 10_000  # so that a client with PLAIN that reconnects costs no PBKDF2
_FOLLOW_REMOTE_SECONDS: Final = 1.0
_LOOKS_MISSED: Final = 3
"""The number of looks that may be late before logins are refused."""
_PASSWORD_MECHANISM: Final = Mechanism.SHA_256
"""The credential that passwords themselves are checked against."""


class Identity(NamedTuple):
    """A user that has logged in."""

    name: str
    id: str
    """Its `User.id`: a later user of the same name is another one."""
    epoch: int
    """Its `User.epoch` when it has logged in; the connection ends once that has risen."""

    @property
    def principal(self) -> str:
        """As Kafka writes it, "User:alice"."""
        return f"User:{self.name}"


class Credential(NamedTuple):
    """A credential that a login is checked against."""

    mechanism: Mechanism
    verifier: Verifier
    identity: Identity | None
    """The user; None if it does not exist or is disabled."""


class Authentication:
    """The users of a root, as one broker knows them. May be used by several threads."""

    def __init__(
        self,
        security: SecurityStore,
        *,
        clock: Clock,
        follow_seconds: float,
        stale_seconds: float,
        refused: RefusedWork,
    ) -> None:
        """Reads the state. Raises `CorruptObject` if it is missing, and the errors of the store.

        Args:
            security: the state.
            clock: for the age of the last look.
            follow_seconds: the time between two looks for changes.
            stale_seconds: the age of the last look from which on logins are refused.
            refused: notes that logins are refused.
        """
        self._security = security
        self._clock = clock
        self._follow_seconds = follow_seconds
        self._stale_seconds = stale_seconds
        self._refused = refused
        self._looked = Moment.now(clock)
        self._seen = security.look()
        self._drawn = DrawnVerifiers(self._seen.salt_key)
        self._lock = threading.Lock()
        self._remembered: OrderedDict[bytes, None] = OrderedDict()
        """Digests of passwords that were right."""
        self._process_key = secrets.token_bytes(32)
        self.on_change: Callable[[], None] = lambda: None
        """Called after the state has changed, in the thread that follows it."""

    def refresh(self) -> None:
        """Looks for changes. Raises `CorruptObject` and the errors of the store."""
        began = Moment.now(self._clock)
        newest = self._security.look()
        self._looked = began
        if newest is not self._seen:
            self._seen = newest
            self.on_change()

    def follow(self, loops: Loops) -> None:
        """Looks for changes, and starts a thread that continues to do so."""
        with contextlib.suppress(errors.SparklogError):  # the thread reports it
            self.refresh()
        repeat = functools.partial(
            loops.repeat, "reading the users", self._follow_seconds, self.refresh
        )
        loops.start("users", repeat)

    # -------------------------------------------------------------------------- state

    def note_if_stale(self) -> None:
        """Notes that logins are refused, if they are."""
        with contextlib.suppress(errors.SecurityNotRead):
            self.check_fresh()

    def check_fresh(self) -> None:
        """Raises `SecurityNotRead` if the state is too old for a login."""
        age_seconds = self._looked.age_seconds(self._clock)
        if age_seconds >= self._stale_seconds:
            stale = errors.SecurityNotRead(seconds=round(age_seconds))
            self._refused.note(Work.LOGINS, str(stale))
            raise stale

    def is_current(self, identity: Identity) -> bool:
        """Returns whether a user that has logged in still exists and is not disabled."""
        user = self._seen.users.get(identity.name)
        return user is not None and not user.disabled and _identity(identity.name, user) == identity

    # -------------------------------------------------------------------------- logins

    def credential(self, mechanism: Mechanism, name: str) -> Credential:
        """Returns the credential of a user, or of one that does not exist: nothing matches that.

        A disabled user keeps its salt, and looks like one that is logged in with a wrong password.
        """
        known = self._known(mechanism, name)
        drawn = self._drawn.of(mechanism, name)  # always, since the time would show who exists
        if known is None:
            return Credential(mechanism, drawn, None)
        if known.identity is None:
            keys = {"stored_key": drawn.stored_key, "server_key": drawn.server_key}
            return known._replace(verifier=msgspec.structs.replace(known.verifier, **keys))
        return known

    def _known(self, mechanism: Mechanism, name: str) -> Credential | None:
        """Returns the credential that a user has; without an identity if it is disabled."""
        user = self._seen.users.get(name)
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

    def _digest(self, credential: Credential, password: str) -> bytes:
        """Returns a digest that depends on the credential, and so changes with it."""
        user_id = credential.identity.id if credential.identity is not None else ""
        verifier = credential.verifier
        parts = (user_id.encode(), verifier.stored_key, verifier.salt, password.encode())
        framed = b"".join(len(each).to_bytes(4, "big") + each for each in parts)
        return hmac.digest(self._process_key, framed, "sha256")


def _identity(name: str, user: User) -> Identity:
    return Identity(name, user.id, user.epoch)


def open_authentication(
    settings: BrokerSettings, store: Store, *, clock: Clock, refused: RefusedWork
) -> Authentication | None:
    """Returns the users of the root; None if no listener asks for a login.

    Raises `BadOption` if one does and the root has no users, and `CorruptObject` if they are
    missing.
    """
    if not settings.kafka.has_sasl:
        return None
    security: SecurityStore | None = None
    with contextlib.suppress(errors.NotARoot):
        security = open_security(store, clock=clock)
    if security is None:
        raise errors.BadOption(
            option="kafka.listen",
            value=settings.kafka.listen,
            reason="clients of a listener with SASL log in, and the root has no users; create one:"
            f" sparklog users add NAME --root {settings.root}",
        )
    follow_seconds = limits.WATCH_SECONDS if store.is_local else _FOLLOW_REMOTE_SECONDS
    dead_after_seconds = settings.liveness.on(local=store.is_local).dead_after_seconds
    return Authentication(
        security,
        clock=clock,
        follow_seconds=follow_seconds,
        stale_seconds=max(dead_after_seconds, _LOOKS_MISSED * follow_seconds),
        refused=refused,
    )
