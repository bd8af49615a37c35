"""Compressed content under a checksum: the form of the snapshots in a chain of versions."""

from __future__ import annotations

import struct
import zlib
from typing import Final

import pyarrow as pa

_HEADER: Final = struct.Struct("<4sIQ")
"""Magic, CRC-32 and length of the content, which follows compressed with zstd."""
_LARGEST_BYTES: Final = 1 << 30
"""The maximum size of the content; the metadata of a million partitions needs about 10 MB."""


class NewerFormat(ValueError):
    """The content is of a newer release: nothing is damaged."""


def pack(magic: bytes, content: bytes) -> bytes:
    """Returns the content with a header that begins with `magic`, four bytes."""
    assert len(content) <= _LARGEST_BYTES, "no reader would accept it"
    packed: bytes = pa.compress(content, codec="zstd", asbytes=True)
    return _HEADER.pack(magic, zlib.crc32(content), len(content)) + packed


def unpack(magics: tuple[bytes, ...], data: pa.Buffer, *, what: str) -> bytes:
    """Returns the content. Raises `NewerFormat`, and ValueError for anything but `what`, whole."""
    if data.size < _HEADER.size:
        raise ValueError("it is truncated")
    found, crc, length = _HEADER.unpack(data[: _HEADER.size])
    if found not in magics and found[:3] == magics[0][:3]:
        raise NewerFormat("a newer release has put it: update this program, and leave the file")
    if found not in magics or length > _LARGEST_BYTES:
        raise ValueError(f"it is not {what}")
    try:
        content: bytes = pa.decompress(
            data[_HEADER.size :], decompressed_size=length, codec="zstd", asbytes=True
        )
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"it cannot be decompressed: {error}") from error
    if zlib.crc32(content) != crc:
        raise ValueError("its checksum does not match")
    return content
