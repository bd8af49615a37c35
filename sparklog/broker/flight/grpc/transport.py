"""The bytes of one connection on its socket: with TLS or without, sent at once or later.

Nothing here blocks, and nothing takes a lock. Bytes that the system does not accept yet are kept,
as ciphertext with TLS, until the server's reading thread calls `flush`. A client that does not read
the answers to its control frames loses its connection.

All methods require the connection's lock: the engine of TLS serves both directions, one caller at a
time. The exception is `shake_hands`, during which nothing else uses the engine.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from sparklog import limits
from sparklog.broker import http1
from sparklog.broker.flight.grpc import http2
from sparklog.broker.flight.grpc.status import PeerGone
from sparklog.broker.tls.engine import STEP_BYTES, TlsEngine, TlsFailed
from sparklog.security.x500 import CertificatePrincipal

_UNREAD_BYTES: Final = 64 * limits.KIB
"""The maximum number of control-frame bytes left unread by a client before its connection ends."""
_WRITE_BYTES: Final = 1 * limits.MIB
"""The maximum number of bytes of a message that are written at once. With TLS it is `STEP_BYTES`:
what the system does not accept is kept as ciphertext."""
_JOINED_PARTS: Final = 512


class Transport:
    """The socket of one connection, and its TLS."""

    def __init__(
        self,
        sock: socket.socket,
        tls: TlsEngine | None,
        *,
        write_later: Callable[[], None],
        close_later: Callable[[], None],
    ) -> None:
        """Creates the transport of a connection that has just been accepted.

        Args:
            sock: its socket, which does not block.
            tls: encrypts the connection once the handshake is complete; None: no encryption.
            write_later: called when `flush` has to be called once the socket is writable.
            close_later: called when the connection has to be closed.
        """
        self.socket = sock
        self.is_closed = False
        self.wants_write = False
        """True from a call of `write_later` until all pending bytes have been sent."""
        self.is_shaking_hands = tls is not None
        """True until the TLS handshake is complete."""
        self.handshake: Future[bool] | None = None
        """The step of the TLS handshake in the other thread, until it is over."""
        self.write_bytes = _WRITE_BYTES if tls is None else STEP_BYTES
        """The maximum number of bytes of a message to pass to `write` at once."""
        self._tls = tls
        self._write_later = write_later
        self._close_later = close_later
        self._first = b""
        """The first bytes of a client that should use TLS."""
        self._pending: deque[memoryview] = deque()
        self._unread_bytes = 0
        """The bytes of control frames since all pending bytes were last sent."""

    @property
    def has_pending(self) -> bool:
        """True if the system has not accepted all bytes yet."""
        return bool(self._pending)

    # ---------------------------------------------------------------------- TLS

    @property
    def is_encrypted(self) -> bool:
        return self._tls is not None

    @property
    def principal(self) -> CertificatePrincipal | None:
        """The principal of the client's certificate."""
        return self._tls.principal if self._tls is not None else None

    @property
    def has_ended(self) -> bool:
        """True if the client has ended its data within TLS."""
        return self._tls is not None and self._tls.is_over

    def shake_hands(self, data: bytes) -> bool:
        """Continues the handshake with received bytes; returns whether it is complete.

        Raises `TlsFailed`. May take milliseconds of processor time, in any thread.
        """
        assert self._tls is not None
        self._first = self._first or data[: len(http2.PREFACE)]
        return self._tls.handshake(data)

    def answer_handshake(self, *, is_complete: bool) -> None:
        """Sends what TLS has to say after a step of the handshake."""
        self._send_outgoing()
        self.is_shaking_hands = not is_complete

    def refuse_without_tls(self, reason: str) -> None:
        """Sends the reason to a client that does not use TLS, in its own protocol."""
        if self._first == http2.PREFACE:
            refusal = http2.goaway(0, http2.INADEQUATE_SECURITY, reason)
        else:
            refusal = http1.refusal(self._first, f"{reason}\n".encode())
        with contextlib.suppress(PeerGone):
            self._write_raw([memoryview(refusal)])

    def receive(self, ciphertext: memoryview) -> None:
        """Accepts ciphertext; `read_into` must return all its plaintext before the next call."""
        assert self._tls is not None
        self._tls.receive(ciphertext)

    def read_into(self, plaintext: memoryview) -> int:
        """Decrypts, and returns the number of bytes; 0 if more must be received.

        Raises `TlsFailed`.
        """
        assert self._tls is not None
        size = 0
        while size < len(plaintext) and (count := self._tls.read_into(plaintext[size:])):
            size += count
        self._send_outgoing()
        return size

    def _send_outgoing(self) -> None:
        assert self._tls is not None
        if outgoing := self._tls.take_outgoing():
            with contextlib.suppress(PeerGone):
                self._write_raw([memoryview(outgoing)])
            if self._pending:
                self._count_unread(len(outgoing))

    def _encrypted(self, tls: TlsEngine, parts: list[memoryview]) -> list[memoryview]:
        whole = parts if len(parts) == 1 else [b"".join(parts)]  # one record, not one for each
        try:
            return [memoryview(each) for each in tls.encrypt(whole)]
        except TlsFailed:  # after a record that was not valid
            self._close_later()
            raise PeerGone from None

    # ---------------------------------------------------------------------- writing

    def control(self, data: bytes) -> None:
        """Sends a control frame; does nothing if the client has gone."""
        with contextlib.suppress(PeerGone):
            self.write([memoryview(data)])
        if self._pending:
            self._count_unread(len(data))

    def write(self, parts: list[memoryview], *, is_waited_for: bool = False) -> None:
        """Sends bytes, and keeps those that the system does not accept yet. Raises `PeerGone`.

        `is_waited_for`: the caller calls `flush` or `request_write` itself.
        """
        if self.is_closed:
            raise PeerGone
        if self._tls is not None:
            parts = self._encrypted(self._tls, parts)
        self._write_raw(parts, is_waited_for=is_waited_for)

    def _write_raw(self, parts: list[memoryview], *, is_waited_for: bool = False) -> None:
        if self.is_closed:
            raise PeerGone
        if not self._pending:
            try:
                sent = self.socket.send(parts[0]) if len(parts) == 1 else self.socket.sendmsg(parts)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                self._close_later()
                raise PeerGone from None
            done = 0
            while done < len(parts) and sent >= len(parts[done]):
                sent -= len(parts[done])
                done += 1
            if done == len(parts):
                return
            parts = parts[done:]
            parts[0] = parts[0][sent:]
        self._pending.extend(parts)
        if not is_waited_for:
            self.request_write()

    def request_write(self) -> None:
        """Has the reading thread call `flush` once the socket is writable."""
        if not self.wants_write:
            self.wants_write = True
            self._write_later()

    def flush(self) -> bool:
        """Sends pending bytes. Returns whether all were sent. Raises OSError."""
        while self._pending:
            parts = [self._pending[at] for at in range(min(len(self._pending), _JOINED_PARTS))]
            try:
                sent = self.socket.sendmsg(parts)
            except (BlockingIOError, InterruptedError):
                return False
            while sent:
                first = self._pending[0]
                if sent < len(first):
                    self._pending[0] = first[sent:]
                    break
                sent -= len(first)
                self._pending.popleft()
        self.wants_write = False
        self._unread_bytes = 0
        return True

    def _count_unread(self, size: int) -> None:
        self._unread_bytes += size
        if self._unread_bytes > _UNREAD_BYTES:
            self._close_later()

    def check_unread(self) -> None:
        """Raises `ProtocolError` if the client does not read the answers to its frames."""
        if self._unread_bytes > _UNREAD_BYTES:
            raise http2.ProtocolError(http2.ENHANCE_YOUR_CALM, "answers are not read")

    # ---------------------------------------------------------------------- closing

    def end(self) -> None:
        """Ends our data: nothing more is sent, and pending bytes are dropped."""
        if self._tls is not None and not self.is_shaking_hands and not self._pending:
            with contextlib.suppress(OSError):
                self.socket.send(self._tls.close())
        self.is_closed = True
        self._pending.clear()

    def close(self) -> None:
        """Closes the socket, after `end`; the lock is not needed."""
        if self.handshake is not None:
            self.handshake.cancel()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self._write_later = self._close_later = _nothing  # they refer to the connection


def _nothing() -> None:
    """Replaces what a closed connection has called."""
