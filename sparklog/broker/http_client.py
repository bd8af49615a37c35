"""Single HTTP requests to servers that an operator has named in the settings.

Nothing that a client sends leads to another address, and redirects are not followed, so that a
server can lead the broker to no other host. A request has one deadline for connection, TLS and the
whole response, because a time-out of a socket restarts with each byte. The body is bounded.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Mapping
from typing import Final, NamedTuple
from urllib.parse import urlsplit

FAILURES: Final = (OSError, http.client.HTTPException, ValueError)
"""The errors of `get`; ValueError also for a certificate or an address that cannot be used."""


class Response(NamedTuple):
    """The response of a server."""

    status: int
    body: bytes
    """The first bytes, one more than were accepted if there are more."""


class ClientTls(NamedTuple):
    """The TLS of a client: paths of PEM files; empty for those that are not used."""

    ca: str = ""
    """The CAs of the server; empty: those that this machine trusts."""
    certificate: str = ""
    key: str = ""

    def context(self) -> ssl.SSLContext:
        """Returns the context of a connection. Raises OSError, also for files that are not PEM."""
        context = ssl.create_default_context(cafile=self.ca or None)
        if self.certificate:
            context.load_cert_chain(self.certificate, self.key or None, password="")
        return context


_PLAIN: Final = ClientTls()
_NO_HEADERS: Final[Mapping[str, str]] = {}


def get(
    url: str,
    *,
    most_bytes: int,
    seconds: float,
    tls: ClientTls = _PLAIN,
    headers: Mapping[str, str] = _NO_HEADERS,
) -> Response:
    """Returns the response to a GET request, whatever its status, from one host.

    Args:
        url: `https://…` or `http://…`.
        most_bytes: of the body that are accepted.
        seconds: for the whole request; after that, raises TimeoutError.
        tls: for `https://…`.
        headers: in addition to `Host` and `Accept`.

    Raises `FAILURES`.
    """
    parts = urlsplit(url)
    has_tls = parts.scheme == "https"
    host, port = parts.hostname or "", parts.port or (443 if has_tls else 80)
    connection = http.client.HTTPConnection(host, port, timeout=seconds)
    plain = socket.create_connection((host, port), seconds)
    guard = plain.dup()  # the other one is detached when TLS begins
    is_late, late = threading.Event(), f"no complete response within {seconds} s"
    timer = threading.Timer(seconds, _end, (guard, is_late))
    timer.daemon = True
    timer.start()
    try:
        connection.sock = plain
        if has_tls:
            connection.sock = tls.context().wrap_socket(plain, server_hostname=host)
        path = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
        given = {"Accept": "application/json", "Host": parts.netloc, **headers}
        connection.request("GET", path, headers=given)
        response = connection.getresponse()
        body = response.read(most_bytes + 1)
        if is_late.is_set():  # the end of the connection looks like that of the response
            raise TimeoutError(late)
        return Response(response.status, body)
    except (OSError, http.client.HTTPException) as error:
        raise TimeoutError(late) if is_late.is_set() else error from None
    finally:
        timer.cancel()
        guard.close()
        connection.close()


def _end(connection: socket.socket, is_late: threading.Event) -> None:
    """Ends a connection, so that a thread that reads from it continues."""
    is_late.set()
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
