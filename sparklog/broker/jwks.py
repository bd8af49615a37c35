"""The keys of the OAuth issuer, as one broker knows them: fetched over HTTPS, or read from a file.

The address is a setting; nothing that a client sends leads to another one. A response is bounded in
size and in time, and redirects are not followed, so that an issuer's host can lead the broker to no
other. Keys that cannot be fetched again are used for a day, and no longer.
"""

from __future__ import annotations

import http
import http.client
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Final

import structlog

from sparklog import errors
from sparklog.broker import http_client
from sparklog.broker.http_client import ClientTls
from sparklog.clock import NEVER, Clock, Moment
from sparklog.security.jwt import JWKS_BYTES_MAX, Jwks

FETCH_SECONDS = 5.0  # for a whole response
FETCHED_EVERY_SECONDS: Final = 3_600.0
UNKNOWN_KEY_SECONDS: Final = 60.0
"""The minimum time between two fetches because of unknown keys: any client can name one."""
KEPT_SECONDS: Final = 24 * 3_600.0
"""The age at which keys are no longer used."""
_READ_EVERY_SECONDS: Final = 1.0
"""The interval at which a file is read."""
_RETRIED_SECONDS: Final = 5.0
"""The interval of attempts to fetch the keys while they fail."""
_log = structlog.get_logger("sparklog.broker")


class JwksSource:
    """The keys in use, and the means to replace them. Thread-safe."""

    def __init__(self, location: str, *, ca: str = "", clock: Clock) -> None:
        """Reads nothing yet.

        Args:
            location: `https://…`, `http://…` on a loopback address, or the path of a file.
            ca: a PEM file with the CAs of the host; empty: those that this machine trusts.
            clock: for the age of the keys.
        """
        self.location = location
        self._ca = ca
        self._clock = clock
        self.is_remote = location.startswith(("https://", "http://"))
        """True if they are fetched over the network."""
        self._lock = threading.Lock()
        """Held during a fetch."""
        self._asking = threading.Lock()
        """Guards the next two fields."""
        self._fetching: Future[None] | None = None
        self._asked = NEVER
        """The last fetch because of an unknown key."""
        self._fetched = NEVER
        """The last fetch that has succeeded."""
        self._content = b""
        self.failure = "they have not been fetched yet"
        """Why the last fetch has failed; empty if it has not."""
        self._keys: Jwks | None = None

    def keys(self) -> Jwks:
        """Returns the keys. Raises `TokenKeysNotRead` if there are none, or if they are too old."""
        age_seconds = self._fetched.age_seconds(self._clock)
        if self._keys is None or age_seconds >= KEPT_SECONDS:
            reason = f"oauth.jwks = {self.location!r} cannot be used: {self.failure}"
            raise errors.TokenKeysNotRead(reason=reason)
        return self._keys

    def refresh(self) -> None:
        """Fetches the keys now. Raises `TokenKeysNotRead`; the old ones stay."""
        with self._lock:
            try:
                content = self._read()
                if content != self._content:
                    keys = Jwks(content)
                    if self._keys is not None:
                        _log.info("the keys of the OAuth issuer have changed", keys=len(keys))
                    self._keys, self._content = keys, content
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.failure = getattr(error, "strerror", None) or str(error) or repr(error)
                reason = f"oauth.jwks = {self.location!r}: {self.failure}"
                raise errors.TokenKeysNotRead(reason=reason) from None
            self.failure, self._fetched = "", Moment.now(self._clock)

    @property
    def pause_seconds(self) -> float:
        """The time until the next `refresh`."""
        if not self.is_remote:
            return _READ_EVERY_SECONDS
        return _RETRIED_SECONDS if self.failure else FETCHED_EVERY_SECONDS

    def refresh_for_unknown_key(self) -> Future[None]:
        """Returns a future that is done once a fetch has ended, or now, if none may begin.

        At most one fetch begins in `UNKNOWN_KEY_SECONDS`. All calls during a fetch wait for it.
        """
        with self._asking:
            if self._fetching is None or self._fetching.done():
                if self._asked.age_seconds(self._clock) < UNKNOWN_KEY_SECONDS:
                    done: Future[None] = Future()
                    done.set_result(None)
                    return done
                self._asked = Moment.now(self._clock)
                self._fetching = self.refresh_in_thread()
            return self._fetching

    def refresh_in_thread(self) -> Future[None]:
        """Fetches the keys in a thread of its own, and returns a future that is done afterwards."""
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # others wait for it, too

        def run() -> None:
            try:
                self.refresh()
            except errors.TokenKeysNotRead as error:
                _log.error("the keys of the OAuth issuer cannot be fetched", reason=error.reason)
            finally:
                done.set_result(None)

        threading.Thread(target=run, name="sparklog-jwks", daemon=True).start()
        return done

    def _read(self) -> bytes:
        if self.is_remote:
            return fetch(self.location, ca=self._ca)
        with Path(self.location).open("rb") as file:
            return file.read(JWKS_BYTES_MAX + 1)


def fetch(url: str, *, ca: str = "") -> bytes:
    """Returns the body of a response, from one host, in `FETCH_SECONDS` at most.

    Raises OSError, `HTTPException`, and ValueError for a response that is not one of the server
    itself with a body of acceptable size.
    """
    response = http_client.get(
        url, most_bytes=JWKS_BYTES_MAX, seconds=FETCH_SECONDS, tls=ClientTls(ca)
    )
    if response.status != http.HTTPStatus.OK:
        raise ValueError(f"the server answers {response.status}; redirects are not followed")
    return response.body
