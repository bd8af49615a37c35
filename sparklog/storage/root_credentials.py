"""The credentials of a process that can read the security state of a root.

It makes tokens for brokers itself. A token is a credential like a password, so it is only sent over
TLS, or to addresses of this machine. The state has the CA to check brokers' certificates with, so
that such a process needs no settings of its own.
"""

from __future__ import annotations

import getpass
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from sparklog import errors
from sparklog.clock import Clock, unix_seconds
from sparklog.listeners import TLS_SCHEME
from sparklog.options import is_loopback_ip
from sparklog.security.credentials import Credentials, Security, TlsMaterial, TokenSource
from sparklog.security.root_token import ROOT_TOKENS, VALID_SECONDS, RootClaims
from sparklog.storage.metadata.model import BrokerRegistration, ClusterMetadata
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import Store

if TYPE_CHECKING:
    from sparklog.security.state import SecurityState
    from sparklog.storage.security_store import SecurityStore

_RENEWED_SECONDS: Final = 60.0
"""The age at which a token is replaced."""
assert _RENEWED_SECONDS < VALID_SECONDS / 2

_log = logging.getLogger(__name__)


class RootCredentials:
    """Credentials for the brokers of one root (`Credentials`). Thread-safe."""

    def __init__(self, store: Store, known: Callable[[], ClusterMetadata], *, clock: Clock) -> None:
        """`known`: returns the metadata as the caller knows it, which may be old."""
        self._store = store
        self._known = known
        self._clock = clock
        self.after_fork()
        self._metadata = MetadataStore(store, clock=clock)
        self._security: SecurityStore | None = None

    def after_fork(self) -> None:
        """See `Credentials`."""
        self._lock = threading.Lock()

    def tls(self) -> TlsMaterial:
        """See `Credentials`. The CA is that of the environment, or else that of the root."""
        own = Security.from_environment().tls()
        if own.ca is None and (state := self._state()) is not None and state.ca:
            return own._replace(ca=state.ca.encode())
        return own

    def token_source(self, address: str) -> TokenSource | None:
        """See `Credentials`. Reads nothing if the root had no state as the caller knows it."""
        return self.new_token_source(address) if self._known().security else None

    def new_token_source(self, address: str) -> TokenSource | None:
        """See `Credentials`. Reads the metadata and the security state."""
        state = self._state()
        metadata = self._metadata.current
        places = [
            (known.started_us, broker, known.epoch)
            for broker, known in metadata.brokers.items()
            if address in known.flight_addresses and _may_be_sent(address, known)
        ]
        if state is None or not state.root_key or not places:
            return None
        _, broker, epoch = max(places)
        claims = RootClaims(
            chain_id=metadata.security,
            broker=broker,
            epoch=epoch,
            address=address,
            who=_name(),
            expires_at=0,
        )
        return _Source(state.root_key, claims, self._clock)

    def without_tokens(self) -> Credentials:
        """Returns credentials for asking a broker which root it serves, before it is trusted."""
        return _WithoutTokens(self)

    def _state(self) -> SecurityState | None:
        """Returns the newest state; None if there is none, or it cannot be read."""
        # Slow to import, and not needed by roots without users and ACLs.
        from sparklog.storage.security_store import SecurityStore, check_home

        try:
            chain_id = self._metadata.refresh().security
            if not chain_id:
                return None
            with self._lock:
                if self._security is None or self._security.chain_id != chain_id:
                    self._security = SecurityStore(self._store, chain_id, clock=self._clock)
                state = self._security.look()
            check_home(self._store, state)
        except errors.SparklogError as error:
            _log.debug("the security state cannot be read: %s", error)
            return None
        return state


class _WithoutTokens:
    """See `Credentials`."""

    def __init__(self, credentials: Credentials) -> None:
        self.tls = credentials.tls
        self.after_fork = credentials.after_fork

    def token_source(self, _address: str) -> TokenSource | None:
        return None

    def new_token_source(self, _address: str) -> TokenSource | None:
        return None


class _Source:
    """Returns a token, and signs it again after `_RENEWED_SECONDS`."""

    def __init__(self, root_key: bytes, claims: RootClaims, clock: Clock) -> None:
        """`claims`: all but `expires_at`."""
        self._root_key = root_key
        self._claims = claims
        self._clock = clock
        self._signed_at = -_RENEWED_SECONDS
        self._token = ""

    def __call__(self) -> str:
        now_seconds = unix_seconds(self._clock)
        if abs(now_seconds - self._signed_at) >= _RENEWED_SECONDS:
            expires_at = int(now_seconds) + VALID_SECONDS
            claims = msgspec.structs.replace(self._claims, expires_at=expires_at)
            self._token, self._signed_at = ROOT_TOKENS.sign(self._root_key, claims), now_seconds
        return self._token


def _may_be_sent(address: str, known: BrokerRegistration) -> bool:
    """Returns whether a token can be sent to a broker, where no other program can read it.

    A loopback address of a broker of another machine is that of any program on this one.
    """
    return address.startswith(TLS_SCHEME) or (
        is_loopback_ip(address) and known.process.host in ("", socket.gethostname())
    )


def _name() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        user = str(os.geteuid())
    return f"Root:{user}@{socket.gethostname()}"
