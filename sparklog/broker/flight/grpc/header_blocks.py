"""A connection's header blocks: received ones, and the table size change that begins one of ours.

RFC 9113, section 4.3, and RFC 7541 (HPACK). The server's own blocks use no dynamic table, so it
only has to acknowledge once that the client's table is smaller.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import hpack

from sparklog import limits
from sparklog.broker.flight.grpc import http2

MAX_BLOCK_BYTES: Final = 16 * limits.KIB
"""The largest header block of a request."""


class HeaderBlocks:
    """The reading thread assembles and decodes; the rest requires the connection's lock."""

    def __init__(self) -> None:
        self.received: bytearray | None = None
        """The unfinished block, which only a continuation may follow."""
        self._stream = 0
        self._flags = 0
        self._decoder = hpack.Decoder(max_header_list_size=MAX_BLOCK_BYTES)
        self._shrinks_table = self._has_shrunk_table = False

    def begin(self, stream: int, flags: int, payload: memoryview) -> None:
        self.received = bytearray(http2.unpadded(payload, flags))
        self._stream, self._flags = stream, flags

    def continue_with(self, stream: int, payload: memoryview) -> None:
        """Adds a continuation. Raises `ProtocolError`."""
        if self.received is None or stream != self._stream:
            raise http2.ProtocolError(http2.PROTOCOL_ERROR, "a continuation without a header block")
        self.received += payload
        if len(self.received) > MAX_BLOCK_BYTES:
            raise http2.ProtocolError(http2.ENHANCE_YOUR_CALM, "headers that are too large")

    def end(self) -> tuple[int, int, Iterable[tuple[bytes, bytes]]]:
        """Returns the block's stream, the flags of its first frame, and its headers.

        Raises `ProtocolError`.
        """
        block, self.received = self.received, None
        assert block is not None
        try:
            return self._stream, self._flags, self._decoder.decode(bytes(block), raw=True)
        except hpack.OversizedHeaderListError as error:
            raise http2.ProtocolError(http2.ENHANCE_YOUR_CALM, str(error)) from error
        except hpack.HPACKError as error:
            raise http2.ProtocolError(http2.COMPRESSION_ERROR, str(error)) from error

    def set_table_bytes(self, size: int) -> None:
        """Applies the client's setting for its decoder's table."""
        if size < http2.TABLE_BYTES:
            # A decoder accepts no block that does not begin with its table's smaller size.
            self._shrinks_table = not self._has_shrunk_table

    def answer(self, block: bytes) -> bytes:
        """Returns a block to send, with a table size change if one is due."""
        if not self._shrinks_table:
            return block
        self._shrinks_table, self._has_shrunk_table = False, True
        return http2.NO_TABLE + block
