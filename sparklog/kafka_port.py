"""Checks whether a Kafka broker listens on a port, without a Kafka client.

Any program may accept a connection, and a broker's port does so before the broker serves. So the
request is one that every Kafka broker answers: ApiVersions in version 0.

The check asks whether a broker is there, not which one, so it accepts any certificate.
"""

from __future__ import annotations

import socket
import ssl
import struct
from typing import Final

from sparklog.listeners import Listener

_CORRELATION: Final = 0x5350_4C47
_ASK_VERSIONS: Final = struct.pack(">ihhih", 10, 18, 0, _CORRELATION, -1)
_VERSIONS_START: Final = struct.pack(">iih", 0, _CORRELATION, 0)
"""Start of the answer: its length, which varies, the correlation id, and no error."""


_WANTS_CERTIFICATE: Final = ("CERTIFICATE_REQUIRED", "HANDSHAKE_FAILURE")
"""Ends of OpenSSL's reasons when a listener requires a certificate, which the check has not."""


def answers(listener: Listener, *, timeout_seconds: float) -> bool:
    """Returns whether a Kafka broker answers there, with TLS if that is the listener's protocol.

    Raises OSError if no connection is accepted, and TimeoutError if the port is silent.
    """
    with socket.create_connection((listener.host, listener.port), timeout_seconds) as peer:
        if not listener.has_tls:
            return _answers(peer)
        try:
            with _trusting().wrap_socket(peer, server_hostname=listener.host) as encrypted:
                return _answers(encrypted)
        except ssl.SSLError as error:
            return (error.reason or "").endswith(_WANTS_CERTIFICATE)


def certificate(listener: Listener, *, timeout_seconds: float) -> bytes:
    """Returns the certificate of a listener with TLS, in DER, whether it is valid or not.

    Raises OSError if the connection or the handshake fails, and TimeoutError.
    """
    with (
        socket.create_connection((listener.host, listener.port), timeout_seconds) as peer,
        _trusting().wrap_socket(peer, server_hostname=listener.host) as encrypted,
    ):
        return encrypted.getpeercert(binary_form=True) or b""


def _trusting() -> ssl.SSLContext:
    """Returns the context of a client that accepts any certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _answers(peer: socket.socket) -> bool:
    peer.sendall(_ASK_VERSIONS)
    found = b""
    while len(found) < len(_VERSIONS_START):
        more = peer.recv(len(_VERSIONS_START) - len(found))
        if not more:
            return False
        found += more
    return found[4:] == _VERSIONS_START[4:]
