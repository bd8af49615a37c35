"""TLS in memory: ciphertext in, plaintext out, and the reverse. Owns no socket and no thread.

Both listeners use it over their own sockets. The event loop's TLS retains up to 1.7 MiB for each
connection, and an `SSLSocket` that is read and written by two threads crashes CPython. OpenSSL's
memory buffers retain their largest size too, so ciphertext and plaintext pass through them in steps
of `STEP_BYTES`.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterable, Iterator
from typing import Final

STEP_BYTES: Final = 64 * 1024
NO_TLS: Final = "the client does not use TLS: it needs security.protocol=SSL"
_CAUSES: Final = {
    "HTTP_REQUEST": NO_TLS,
    "WRONG_VERSION_NUMBER": NO_TLS,
    "UNSUPPORTED_PROTOCOL": "the client only supports TLS versions below 1.2",
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
        self, context: ssl.SSLContext, *, is_server: bool, host: str | None = None
    ) -> None:
        """`host`: at a client, the name that the server's certificate must have."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=is_server, server_hostname=host
        )
        self.is_over = False
        """True once the other side has ended its data."""

    def handshake(self, received: bytes = b"") -> bool:
        """Continues the handshake with the bytes received; returns whether it is complete.

        May take milliseconds of processor time: call it in a thread. `take_outgoing` afterwards
        returns the bytes that have to be sent, even if this has raised.
        """
        self._incoming.write(received)
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise TlsFailed(_cause(error)) from None
        return True

    def receive(self, ciphertext: bytes | bytearray | memoryview) -> None:
        """Accepts at most `STEP_BYTES`; `read_into` must return all of it before the next call."""
        assert len(ciphertext) <= STEP_BYTES, "the buffer would retain this size"
        self._incoming.write(ciphertext)

    def end(self) -> None:
        """Notes that the connection has ended: nothing more is received."""
        self._incoming.write_eof()

    def read_into(self, plaintext: memoryview) -> int:
        """Decrypts into `plaintext`, and returns the number of bytes; 0 if more must be received.

        After that, `take_outgoing` may return bytes, such as an answer to a key update.
        """
        if not len(plaintext) or self.is_over:
            return 0
        try:
            size = self._tls.read(len(plaintext), plaintext)
        except ssl.SSLWantReadError:
            return 0
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            self.is_over = True
            return 0
        except ssl.SSLError as error:
            raise TlsFailed(_cause(error)) from None
        assert isinstance(size, int)
        if not size:
            self.is_over = True
        return size

    def encrypt(self, chunks: Iterable[bytes | bytearray | memoryview]) -> Iterator[bytes]:
        """Yields the ciphertext of the chunks, at most about `STEP_BYTES` at a time."""
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            for first in range(0, len(view), STEP_BYTES):
                part = view[first : first + STEP_BYTES]
                written = self._tls.write(part)
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

    @property
    def peer_certificate(self) -> bytes | None:
        """The certificate of the other side in DER; None if it has presented none."""
        return self._tls.getpeercert(binary_form=True)


def _cause(error: ssl.SSLError) -> str:
    reason = error.reason or ""
    shown = reason.replace("_", " ").lower() or str(error)
    return _CAUSES.get(reason, f"the TLS handshake failed: {shown}")
