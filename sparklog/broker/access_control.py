"""Access to one broker: its users, their ACLs, and programs with access to the root."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog

from sparklog import limits
from sparklog.broker.audit import Audit
from sparklog.broker.authentication import Authentication, open_authentication
from sparklog.broker.authorization import Authorization
from sparklog.broker.flight.gate import Gate
from sparklog.broker.flight.logins import Logins
from sparklog.broker.log.takeover import Leadership
from sparklog.broker.login_failures import FailureDelays
from sparklog.broker.loops import Loops
from sparklog.broker.oauth import TokenVerifier, open_verifier
from sparklog.broker.quotas import Quotas
from sparklog.broker.refused_work import RefusedWork
from sparklog.broker.security_admin import SecurityAdmin
from sparklog.broker.security_watch import watch_security
from sparklog.clock import Clock
from sparklog.options import is_private
from sparklog.security.credentials import Credentials
from sparklog.security.oauth_bearer import OAUTHBEARER
from sparklog.settings import BrokerSettings
from sparklog.storage.metadata import identity
from sparklog.storage.metadata.identity import Ask
from sparklog.storage.metadata.liveness import Answers
from sparklog.storage.metadata.model import ClusterMetadata
from sparklog.storage.objects import Store
from sparklog.storage.root_credentials import RootCredentials

_log = structlog.get_logger("sparklog.broker")


class AskWithCredentials(Protocol):
    """Sends a request to a broker, as `Ask` does."""

    def __call__(
        self,
        address: str,
        action: str,
        request: msgspec.Struct,
        *,
        timeout_seconds: float,
        credentials: Credentials | None = None,
    ) -> Any:
        """See `Ask`."""


class AccessControl:
    """The parts of a broker that decide who may do what."""

    def __init__(
        self, settings: BrokerSettings, store: Store, *, clock: Clock, refused: RefusedWork
    ) -> None:
        """Reads nothing yet. `refused`: notes the work that is refused for lack of the state."""
        self._settings = settings
        self._store = store
        self._clock = clock
        self.watch = watch_security(settings, store, clock=clock, refused=refused)
        self._refused = refused
        self._verifier: TokenVerifier | None = None
        """Verifies OAuth tokens; set by `open`, if clients log in with them."""
        self.authentication: Authentication | None = None
        """The users of the root, if a listener asks for a login."""
        self.login_delays = FailureDelays(clock)
        """Shared by all listeners: a client that guesses has one budget."""
        self.authorization = Authorization(self.watch, clock=clock)
        self.audit: Audit | None = None
        """Set by `open`, if there is one."""
        self.quotas = Quotas(self.watch, clock=clock)
        self.security_admin = SecurityAdmin(store, self.watch, clock=clock)
        self._own_credentials = RootCredentials(store, self._known, clock=clock)
        """For requests to other members."""
        self._metadata: Callable[[], ClusterMetadata] = ClusterMetadata

    def _known(self) -> ClusterMetadata:
        return self._metadata()

    def open(self, known: ClusterMetadata) -> None:
        """Reads the users before the broker takes over, if they are needed.

        `known`: a version of the metadata, which may be old.

        Raises `BadOption` if clients log in and there are no users, if the file with the keys of
        OAuth tokens is not valid, or if the audit file cannot be written, and what
        `SecurityWatch.open` raises.
        """
        if path := self._settings.security.audit_file:
            self.audit = Audit(
                Path(path), self._settings.id, clock=self._clock, refused=self._refused
            )
            self.authorization.audit = self.audit
            self.watch.on_read = self.audit.changed
        if self._settings.has_sasl or known.security:
            self.watch.open()
        self._verifier = open_verifier(
            self._settings.oauth, clock=self._clock, refused=self._refused
        )
        self.authentication = open_authentication(self._settings, self.watch, self._verifier)

    def follow_metadata(self, metadata: Callable[[], ClusterMetadata]) -> None:
        """Reads the state that the metadata of the leader names. Raises what `refresh` raises."""
        self._metadata = metadata
        self.watch.chain_id = lambda: metadata().security
        self.watch.refresh()
        if self.audit is not None:
            self.audit.started(self.watch.state)

    def follow(self, loops: Loops) -> None:
        """Starts to follow the changes of the state, and of the keys of OAuth tokens."""
        self.watch.follow(loops)
        if self._verifier is not None:
            self._verifier.follow(loops)

    def note_if_stale(self) -> None:
        """Notes the work that is refused because the state, or the keys of OAuth tokens, cannot be
        read, and the loss of events.
        """
        self.watch.note_if_stale()
        if self._verifier is not None:
            self._verifier.note_if_refused()
        if self.audit is not None:
            self.audit.note_if_stuck()

    def close(self) -> None:
        """Writes the last lines of the audit."""
        if self.audit is not None:
            self.audit.close()

    def gate(self, leadership: Leadership, address: str) -> Gate:
        """Returns the gate for Flight calls to the broker, which listens at `address`."""
        if self.watch.is_enforced and not is_private(address):
            _log.warning(
                "ACLs are enforced, and the first Flight listener has no TLS: other brokers and"
                " programs that open the root are not recognised there, except on this machine;"
                " write SASL_SSL:// or SSL:// before the first address of flight.listen",
                flight=address,
            )
        return Gate(
            self.authorization,
            broker=leadership.broker,
            epoch=leadership.epoch,
            clock=self._clock,
            authentication=(
                self.authentication if OAUTHBEARER in self._settings.mechanisms else None
            ),
        )

    def logins(self, gate: Gate) -> Logins:
        """Returns the logins of the Flight listener, if clients have to log in there."""
        assert self.authentication is not None
        return Logins(
            self.authentication,
            gate,
            mechanisms=self._settings.mechanisms,
            delays=self.login_delays,
            clock=self._clock,
        )

    def asking(self, ask: AskWithCredentials) -> Ask:
        """Returns `ask` with the credentials of this broker, for members of the cluster."""
        return functools.partial(ask, credentials=self._own_credentials)

    def answers(self, ask: AskWithCredentials) -> Answers:
        """Returns a check of whether brokers answer, and serve this root.

        It sends no tokens: which root the asked broker serves is not known before.
        """
        return identity.answers(
            self._store,
            functools.partial(ask, credentials=self._own_credentials.without_tokens()),
            timeout_seconds=limits.PROBE_TIMEOUT_SECONDS,
        )
