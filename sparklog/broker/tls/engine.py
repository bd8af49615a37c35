"""TLS in memory: ciphertext in, plaintext out, and the reverse. Owns no socket and no thread.

The Kafka and Flight listeners use it over their own sockets. The event loop's TLS retains up to 1.7
MiB for each connection, and two threads cannot use one `SSLSocket`. OpenSSL's memory buffers retain
their largest size too, so it gets one record at a time, and plaintext in steps of `STEP_BYTES`.

A record without data, such as a key update, costs processor time and may cause an answer. So a
client may send only a few of them in succession.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from sparklog.security.x500 import CertificatePrincipal

STEP_BYTES: Final = 64 * 1024
IDLE_RECORDS: Final = 32
"""The maximum number of records without data between two with data."""
HANDSHAKE_RECORDS: Final = 128
"""The maximum number of records in a handshake; a chain of certificates takes a few."""
_RECORD_TYPES: Final = range(20, 24)
_HEAD_BYTES: Final = 5
_RECORD_BYTES: Final = _HEAD_BYTES + 16_384 + 2_048
"""The maximum size of a record (RFC 5246, 6.2.3; RFC 8446 allows less)."""
HANDSHAKE: Final = b"\x16\x03"
"""The first bytes of a TLS client of any version (RFC 8446, 5.1)."""
NO_TLS: Final = "the client does not use TLS"
_CAUSES: Final = {
    "HTTP_REQUEST": NO_TLS,
    "WRONG_VERSION_NUMBER": NO_TLS,
    "UNSUPPORTED_PROTOCOL": "the client supports no TLS version that tls.min_version allows",
    "NO_SHARED_CIPHER": "the client supports no cipher with forward secrecy",
    "TLSV1_ALERT_UNKNOWN_CA": "the client does not trust the broker's certificate: it needs the CA",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the client rejects the broker's certificate: it needs the"
    " CA, or connects by a host name that the certificate lacks",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the client rejects the broker's certificate: it may connect by"
    " a host name that the certificate lacks",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the client finds the broker's certificate expired",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the client has no certificate, and the listener requires"
    " one",
}
"""The likely cause of a failed handshake, by OpenSSL's reason."""


class TlsFailed(ConnectionError):
    """A handshake or a record was not valid; the message names the likely cause."""


class TlsEngine:
    """The TLS of one connection. One caller at a time.

    Raises `TlsFailed` from every method that processes what the other side has sent.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        *,
        is_server: bool,
        host: str | None = None,
        principal_of: Callable[[bytes], CertificatePrincipal] | None = None,
    ) -> None:
        """Creates the TLS of a connection that has just begun.

        Args:
            context: is not changed while it is in use.
            is_server: False at a client.
            host: at a client, the name that the server's certificate must have.
            principal_of: returns the principal of the other side's certificate, in DER, or raises
                ValueError; None: a certificate names no principal.
        """
        self._principal_of = principal_of
        self.principal: CertificatePrincipal | None = None
        """That of the other side's certificate, once the handshake is complete."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=is_server, server_hostname=host
        )
        self._received, self._fed = b"", 0
        """Ciphertext, and how much of it OpenSSL has."""
        self._has_ended = False
        self._idle_records = 0
        """Records without data since the last one with data, or during the handshake."""
        self.is_over = False
        """True once the other side has ended its data."""

    def handshake(self, received: bytes = b"") -> bool:
        """Continues the handshake with the bytes received; returns whether it is complete.

        May take milliseconds of processor time: call it in a thread. `take_outgoing` afterwards
        returns the bytes that have to be sent, even if this has raised.
        """
        self.receive(received)
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                if not self._feed(HANDSHAKE_RECORDS):
                    return False
            except ssl.SSLError as error:
                raise TlsFailed(_cause(error)) from None
            else:
                self._idle_records = 0
                self._find_principal()
                return True

    def _find_principal(self) -> None:
        if self._principal_of is None or not (certificate := self._tls.getpeercert(True)):
            return
        try:
            self.principal = self._principal_of(certificate)
        except ValueError as error:
            raise TlsFailed(f"the client's certificate names no principal: {error}") from None

    def receive(self, ciphertext: bytes | bytearray | memoryview) -> None:
        """Accepts ciphertext; `read_into` must return all its plaintext before the next call."""
        self._received, self._fed = self._received[self._fed :] + ciphertext, 0

    def end(self) -> None:
        """Notes that the connection has ended: nothing more is received."""
        self._has_ended = True

    def read_into(self, plaintext: memoryview) -> int:
        """Decrypts into `plaintext`, and returns the number of bytes; 0 if more must be received.

        After that, `take_outgoing` may return bytes, such as an answer to a key update.
        """
        size = 0
        while len(plaintext) and not self.is_over and not size:
            if not self._tls.pending() and not self._feed(IDLE_RECORDS):
                self.is_over = self._has_ended
                break
            try:
                size = self._read(plaintext)
            except ssl.SSLWantReadError:
                continue  # a record without data
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                self.is_over = True
            except ssl.SSLError as error:
                raise TlsFailed(_cause(error)) from None
            else:
                self._idle_records = 0
        return size

    def _read(self, plaintext: memoryview) -> int:
        size = self._tls.read(len(plaintext), plaintext)
        assert isinstance(size, int)
        if not size:
            self.is_over = True
        return size

    def _feed(self, most_idle: int) -> bool:
        """Passes the next whole record to OpenSSL; returns False if there is none."""
        head = self._received[self._fed : self._fed + _HEAD_BYTES]
        if head and head[0] not in _RECORD_TYPES:
            raise TlsFailed(NO_TLS)
        size = _HEAD_BYTES + (int.from_bytes(head[3:], "big") if len(head) == _HEAD_BYTES else 0)
        if size > _RECORD_BYTES:
            raise TlsFailed(f"a record of {size} bytes is not TLS")
        end = self._fed + size
        if len(self._received) < end:
            self._received, self._fed = self._received[self._fed :], 0  # a part of a record
            return False
        self._idle_records += 1
        if self._idle_records > most_idle + 1:  # this one may have data
            raise TlsFailed("the client sends records without data")
        self._incoming.write(self._received[self._fed : end])
        self._fed = end
        return True

    def encrypt(self, chunks: Iterable[bytes | bytearray | memoryview]) -> Iterator[bytes]:
        """Yields the ciphertext of the chunks, at most about `STEP_BYTES` at a time."""
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            for first in range(0, len(view), STEP_BYTES):
                part = view[first : first + STEP_BYTES]
                try:
                    written = self._tls.write(part)
                except ssl.SSLError as error:  # after a record that was not valid
                    raise TlsFailed(_cause(error)) from None
                assert written == len(part), "memory has room for all of it"
                yield self._outgoing.read()

    def take_outgoing(self) -> bytes:
        """Returns the bytes that have to be sent now; empty if there are none."""
        return self._outgoing.read() if self._outgoing.pending else b""

    def close(self) -> bytes:
        """Returns the alert that ends our data."""
        # The other side has not ended its data yet, or the handshake is not complete.
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        return self.take_outgoing()


def _cause(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the client's certificate is refused: {error.verify_message}"
    reason = error.reason or ""
    shown = reason.replace("_", " ").lower() or str(error)
    return _CAUSES.get(reason, f"the TLS handshake failed: {shown}")
