"""The credentials of a client without access to the root: its CA, and a password or a token.

The password does not leave the client (SCRAM), and the broker proves that it knows the user. The
token that it returns is sent with each call, and renewed by another login before it expires.

A token of an OAuth issuer is read from a file, and sent with each call itself.
"""

from __future__ import annotations

import contextlib
import math
import threading
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.flight as flight

from sparklog import errors, limits
from sparklog.client.flight_client import failure_of, open_client
from sparklog.clock import Clock, SystemClock
from sparklog.listeners import TLS_SCHEME
from sparklog.options import is_private
from sparklog.security.credentials import Security, TlsMaterial, TokenSource
from sparklog.security.scram import Mechanism, ScramClient, ScramError

_RENEWED_SECONDS: Final = 1_200.0
"""The age at which a token is replaced; it is valid for an hour."""
_RETRIED_SECONDS: Final = 60.0
"""The time between two attempts to replace it."""
_MECHANISM: Final = Mechanism.SHA_256


class ClientCredentials:
    """See `Credentials`. Thread-safe."""

    def __init__(self, security: Security | None = None, *, clock: Clock | None = None) -> None:
        """`security`: None: that of the environment, which is read when it is needed."""
        self._security = security
        self._clock = clock or SystemClock()
        self._token = ""
        self._renewed_at = self._tried_at = -math.inf
        self._file: _TokenFile | None = None
        """The file with the token of an OAuth issuer, if there is one."""
        self._is_encrypted = False
        """True once the client has logged in over TLS: its token is sent over TLS only."""
        self.after_fork()

    def after_fork(self) -> None:
        """See `Credentials`."""
        self._first_login = threading.Lock()
        self._lock = threading.Lock()

    def tls(self) -> TlsMaterial:
        return self._given_security().tls()

    def token_source(self, address: str) -> TokenSource | None:
        """See `Credentials`. Logs in, unless there is a token.

        Raises what `log_in` raises.
        """
        security = self._given_security()
        if not security.logs_in:
            return None
        if not is_private(address):
            reason = f"a login needs TLS: connect to {TLS_SCHEME}{address}"
            option = "user" if security.user is not None else "token_file"
            raise errors.BadOption(option=option, value=getattr(security, option), reason=reason)
        has_tls = address.startswith(TLS_SCHEME)
        if self._is_encrypted and not has_tls:
            reason = "it has no TLS, and this client has logged in over TLS"
            raise errors.BrokerNotTrusted(address=address, reason=reason)
        if security.token_file is not None:
            file = self._token_file(security)
            self._is_encrypted |= has_tls
            return file.header
        with self._first_login:
            if not self._token:
                self._log_in(address, security)
        self._is_encrypted |= has_tls
        return lambda: self._current(address, security)

    def new_token_source(self, address: str) -> TokenSource | None:
        """See `Credentials`. A file is tried again once: its token may have just been replaced."""
        security = self._given_security()
        if security.token_file is not None and not self._token_file(security).has_another():
            return None
        self._token = ""
        return self.token_source(address)

    def _token_file(self, security: Security) -> _TokenFile:
        """Returns the file with the token. Raises `BadOption` if it has none."""
        file = self._file
        if file is None or file.path != security.token_file:
            self._file = file = _TokenFile(security)
        return file

    def _given_security(self) -> Security:
        return self._security or Security.from_environment()

    def _current(self, address: str, security: Security) -> str:
        """Returns the token, and replaces an old one, at most once in `_RETRIED_SECONDS`."""
        now = self._clock.monotonic()
        with self._lock:
            is_due = (
                now - self._renewed_at >= _RENEWED_SECONDS
                and now - self._tried_at >= _RETRIED_SECONDS
            )
            if is_due:
                self._tried_at = now
        if is_due:
            # Otherwise the broker refuses the call, once the old token has expired.
            with contextlib.suppress(errors.SparklogError):
                self._log_in(address, security)
        return self._token

    def _log_in(self, address: str, security: Security) -> None:
        self._token = log_in(address, security)
        self._renewed_at = self._clock.monotonic()


class _TokenFile:
    """A file with a token, which is read again when it changes. May be used by several threads."""

    def __init__(self, security: Security) -> None:
        """Raises `BadOption` if there is none."""
        assert security.token_file is not None
        self.path = security.token_file
        self._security = security
        self._seen = self._signature()
        self._token = security.token()
        self._refused = ""
        """The token that the broker has refused, as far as is known."""

    def header(self) -> str:
        """Returns the value of the header `authorization` for the next call.

        The old token stays while the file cannot be read, such as while it is being replaced.
        """
        signature = self._signature()
        if signature != self._seen:
            with contextlib.suppress(errors.BadOption):
                self._token = self._security.token()
                self._seen = signature
        return f"Bearer {self._token}"

    def has_another(self) -> bool:
        """Returns whether the file has another token than at the last refusal.

        To be called at each refusal: it remembers the token that the file has now.
        """
        self.header()
        refused, self._refused = self._refused, self._token
        return refused != self._token

    def _signature(self) -> tuple[int, ...]:
        """Returns what changes with the file; a symbolic link is followed."""
        try:
            found = Path(self.path).stat()
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_ino, found.st_size


def log_in(address: str, security: Security) -> str:
    """Logs in at a broker; returns the value of the header `authorization` for further calls.

    Raises `NotAuthenticated`, `BrokerNotTrusted`, `BadOption` and `BrokerUnavailable`.
    """
    assert security.user is not None
    exchange = _Login(security.user, security.password())
    client = open_client(address, security.tls() if address.startswith(TLS_SCHEME) else None)
    try:
        client.authenticate(
            exchange, flight.FlightCallOptions(timeout=limits.PROBE_TIMEOUT_SECONDS)
        )
    except (ScramError, pa.ArrowException, OSError) as error:
        if exchange.failure is not None:  # the broker has not proved that it knows the user
            raise errors.BrokerNotTrusted(address=address, reason=str(exchange.failure)) from None
        failure = failure_of(error, address)
        if isinstance(failure, errors.UnexpectedError):  # the type of an error is lost in a login
            failure = errors.BrokerUnavailable(address=address, reason=failure.reason)
        raise failure from error
    finally:
        client.close()
    return exchange.token


class _Login(flight.ClientAuthHandler):
    """The exchange of one login."""

    def __init__(self, user: str, password: str) -> None:
        super().__init__()
        self._client = ScramClient(_MECHANISM, user, password)
        self.token = ""
        self.failure: ScramError | None = None

    def authenticate(self, outgoing: Any, incoming: Any) -> None:
        outgoing.write(f"{_MECHANISM}\n".encode() + self._client.first())
        try:
            outgoing.write(self._client.final(incoming.read()))
            last, _, token = incoming.read().partition(b"\n")
            self._client.check(last)
        except ScramError as error:
            self.failure = error
            raise
        self.token = token.decode()

    def get_token(self) -> bytes:
        return b""
