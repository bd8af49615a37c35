"""Makes the tokens of this process, if it can read the security state of a root.

A token is a credential like a password, and Flight is not encrypted, so it is only sent to
addresses of this machine.
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
from sparklog.clock import Clock
from sparklog.options import is_loopback_ip
from sparklog.security.root_token import VALID_SECONDS, RootClaims, TokenSource, sign
from sparklog.storage.metadata.model import ClusterMetadata
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import Store

if TYPE_CHECKING:
    from sparklog.storage.security_store import SecurityStore

_RENEWED_SECONDS: Final = 60.0
"""The age at which a token is replaced."""
assert _RENEWED_SECONDS < VALID_SECONDS / 2

_log = logging.getLogger(__name__)


class RootTokens:
    """Makes tokens for the brokers of one root (`Tokens`). Thread-safe."""

    def __init__(self, store: Store, known: Callable[[], ClusterMetadata], *, clock: Clock) -> None:
        """`known`: returns the metadata as the caller knows it, which may be old."""
        self._store = store
        self._known = known
        self._clock = clock
        self._lock = threading.Lock()
        self._metadata = MetadataStore(store, clock=clock)
        self._security: SecurityStore | None = None

    def of(self, address: str) -> TokenSource | None:
        """See `Tokens`. Reads nothing if the root had no security state as the caller knows it."""
        if not self._known().security or not is_loopback_ip(address):
            return None
        return self.renewed(address)

    def renewed(self, address: str) -> TokenSource | None:
        """See `Tokens`. Reads the metadata and the security state."""
        if not is_loopback_ip(address):
            return None
        try:
            metadata = self._metadata.refresh()
            root_key = self._root_key(metadata.security) if metadata.security else b""
        except errors.SparklogError as error:
            _log.debug("the security state cannot be read: %s", error)
            return None
        places = [
            (known.started_us, broker, known.epoch)
            for broker, known in metadata.brokers.items()
            if known.flight == address
        ]
        if not root_key or not places:
            return None
        _, broker, epoch = max(places)
        claims = RootClaims(
            chain_id=metadata.security, broker=broker, epoch=epoch, who=_name(), expires_at=0
        )
        return _Source(root_key, claims, self._clock)

    def _root_key(self, chain_id: str) -> bytes:
        """Returns the key to sign with; empty if ACLs are not evaluated."""
        # Slow to import, and not needed by roots without ACLs.
        from sparklog.security.state import Mode
        from sparklog.storage.security_store import SecurityStore, check_home

        with self._lock:
            if self._security is None or self._security.chain_id != chain_id:
                self._security = SecurityStore(self._store, chain_id, clock=self._clock)
            state = self._security.look()
            check_home(self._store, state)
        return state.root_key if state.policy.mode is not Mode.OFF else b""


class _Source:
    """Signs a token now and then."""

    def __init__(self, root_key: bytes, claims: RootClaims, clock: Clock) -> None:
        """`claims`: but for the time."""
        self._root_key = root_key
        self._claims = claims
        self._clock = clock
        self._signed_at = -_RENEWED_SECONDS
        self._token = ""

    def __call__(self) -> str:
        now_seconds = self._clock.now_us() / 1e6
        if abs(now_seconds - self._signed_at) >= _RENEWED_SECONDS:
            expires_at = int(now_seconds) + VALID_SECONDS
            claims = msgspec.structs.replace(self._claims, expires_at=expires_at)
            self._token, self._signed_at = sign(self._root_key, claims), now_seconds
        return self._token


def _name() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        user = str(os.geteuid())
    return f"Root:{user}@{socket.gethostname()}"
