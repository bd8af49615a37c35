"""Objects that begin with an index: `magic, index length, CRC32C of the index, index`."""

from __future__ import annotations

import struct
from typing import Final

import crc32c
import pyarrow as pa

from sparklog import errors
from sparklog.storage.objects import Store

_HEADER: Final = struct.Struct("<8sII")
_FIRST_READ_BYTES: Final = 64 * 1024  # with the index of some hundred entries


def frame(magic: bytes, index: bytes) -> bytes:
    """Returns the beginning of an object: the header and the index."""
    return _HEADER.pack(magic, len(index), crc32c.crc32c(index)) + index


def read_index(store: Store, path: str, magic: bytes) -> tuple[bytes, int]:
    """Returns the index of an object, and its end. Raises `ObjectMissing`, `CorruptObject`."""
    data = store.get_range(path, 0, _FIRST_READ_BYTES)
    index, end = _unframe(path, data, magic)
    if index is None:
        index, end = _unframe(path, store.get_range(path, 0, end), magic)
        if index is None:
            raise errors.CorruptObject(path=path, check="it is shorter than its index")
    return index, end


def _unframe(path: str, data: pa.Buffer, magic: bytes) -> tuple[bytes | None, int]:
    """Returns (index, its end); the index is None if `data` is too short to contain it."""
    if data.size < _HEADER.size:
        raise errors.CorruptObject(path=path, check=f"{data.size} bytes are too few for an object")
    found, length, crc = _HEADER.unpack_from(data)
    if found != magic:
        raise errors.CorruptObject(path=path, check=f"it begins with {found!r}, not {magic!r}")
    end = _HEADER.size + length
    if data.size < end:
        return None, end
    index = data.slice(_HEADER.size, length).to_pybytes()
    if crc32c.crc32c(index) != crc:
        raise errors.CorruptObject(path=path, check="the CRC32C of its index is wrong")
    return index, end
