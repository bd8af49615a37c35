"""Format of a segment, and the one rule by which it is read: bytes in, events out.

A segment is a file of 4,096-byte blocks that several processes append to. Block 0 describes it, and
contains a random salt. Frames follow, one per flush, each of whole blocks: a header, the index of
the entries, their payloads, zeros, and a trailer at the very end. A *fence* is a frame of one block
that ends the epoch.

A header states its own offset in the file. The kernel decides where an append lands, so a frame
counts only if it lies at that offset: this turns an append into a put-if-absent. Bytes that do not
count, from a frame that landed elsewhere, a full disk, or a killed process, remain where they are,
and the next append pads their last block.

The rule, at an offset where sequence n is expected after the frame at `previous`: a header counts
if its CRC, the salt, its own offset, n and `previous` match. Its frame is accepted if it is
*vouched*: the header of n+1, which is written only once n is durable, is at its end; or if it is
*whole*: its trailer is present and all checksums match. Otherwise the next block is examined in the
same way. The first fence, at any block, ends the epoch. So all readers of the same bytes accept the
same frames, and only the last frame must be read in full.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import crc32c
import msgspec

from sparklog import errors
from sparklog.storage.objects.files import BLOCK_BYTES
from sparklog.storage.snapshot import Entry

FIRST: Final = BLOCK_BYTES
"""Offset of the first frame of a segment."""
NONE: Final = -1
"""The `previous` of the first frame of a segment."""
SALT_BYTES: Final = 16

_SEGMENT_MAGIC: Final = b"SLSEG001"
_FRAME_MAGIC: Final = b"SLFR"
_VERSION: Final = 1
_LAST: Final = 1
_FENCE: Final = 2
_BLOCK_HEADER: Final = struct.Struct("<8sII")
"""Magic, length and CRC32C of the description."""
_HEADER: Final = struct.Struct("<4sI16sQQqQQII")
"""Magic, flags, salt, own offset, sequence, previous, frame length, nonce, index length and CRC."""
_CRC: Final = struct.Struct("<I")
_TRAILER: Final = struct.Struct("<QQ")
"""Nonce, sequence."""
HEADER_BYTES: Final = _HEADER.size + _CRC.size
"""A frame's index starts this many bytes in."""
_READ_BYTES: Final = 256 * 1024

Read: TypeAlias = Callable[[int, int], bytes]
"""Returns the bytes of a segment, given offset and length; fewer at the end of the file."""


class Description(msgspec.Struct, frozen=True, array_like=True):
    """Content of block 0."""

    version: int
    cluster_id: str
    broker: int
    epoch: int
    ordinal: int
    salt: bytes
    root: int = 0
    """The inode of the root in which the segment was created; 0: unknown."""


class Index(msgspec.Struct, frozen=True, array_like=True):
    """Index of a frame."""

    written_us: int
    entries: tuple[Entry, ...]


_encoder = msgspec.msgpack.Encoder()
_description_decoder = msgspec.msgpack.Decoder(Description)
_index_decoder = msgspec.msgpack.Decoder(Index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Header of a frame. `offset` is the one that it states; a fence states none."""

    offset: int
    sequence: int
    previous: int
    length: int
    nonce: int
    index_length: int
    index_crc32c: int
    is_last: bool
    is_fence: bool

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A frame that counts; if `is_vouched`, it is durable. `origin`: the end of its index."""

    header: Header
    index: Index
    is_vouched: bool

    @property
    def origin(self) -> int:
        return self.header.offset + HEADER_BYTES + self.header.index_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """The end of the epoch; only the frames before it count."""

    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """Nothing more yet. `unfinished`: the segment's last frame, if neither vouched nor whole."""

    unfinished: Header | None = None


Event: TypeAlias = Frame | Fence | Nothing


# ------------------------------------------------------------------------------ writing


def describe(
    *, cluster_id: str, broker: int, epoch: int, ordinal: int, salt: bytes, root: int = 0
) -> bytes:
    """Returns block 0 of a segment."""
    assert len(salt) == SALT_BYTES
    raw = _encoder.encode(Description(_VERSION, cluster_id, broker, epoch, ordinal, salt, root))
    head = _BLOCK_HEADER.pack(_SEGMENT_MAGIC, len(raw), crc32c.crc32c(raw))
    assert len(head) + len(raw) <= BLOCK_BYTES
    return (head + raw).ljust(BLOCK_BYTES, b"\0")


def encode_index(written_us: int, entries: Sequence[Entry]) -> bytes:
    """Returns the index of a frame."""
    return _encoder.encode(Index(written_us, tuple(entries)))


def frame_bytes(index_bytes: int, payload_bytes: int) -> int:
    """Returns the length of a frame, rounded up to whole blocks."""
    return round_up(HEADER_BYTES + index_bytes + payload_bytes + _TRAILER.size)


def round_up(position: int) -> int:
    """Returns the first block boundary at or after a position."""
    return -(-position // BLOCK_BYTES) * BLOCK_BYTES


def filler(position: int) -> bytes:
    """Returns the padding from a position to the next block, which must not be zeros.

    A trailer ends with zeros, the upper bytes of its sequence. So zeros could complete a frame that
    was rejected because a full disk had cut off just those bytes.
    """
    return b"\xff" * (round_up(position) - position)


def encode_head(
    index: bytes,
    *,
    salt: bytes,
    offset: int,
    sequence: int,
    previous: int,
    length: int,
    nonce: int,
    is_last: bool,
) -> bytes:
    """Returns the header of a frame, with its index."""
    head = _HEADER.pack(
        _FRAME_MAGIC,
        _LAST if is_last else 0,
        salt,
        offset,
        sequence,
        previous,
        length,
        nonce,
        len(index),
        crc32c.crc32c(index),
    )
    return head + _CRC.pack(crc32c.crc32c(head)) + index


def encode_tail(*, unused_bytes: int, sequence: int, nonce: int) -> bytes:
    """Returns the end of a frame: `unused_bytes` in all, zeros followed by the trailer."""
    return bytes(unused_bytes - _TRAILER.size) + _TRAILER.pack(nonce, sequence)


def encode_fence(*, salt: bytes, nonce: int) -> bytes:
    """Returns a fence. It states no offset, because it counts at any block."""
    head = _HEADER.pack(_FRAME_MAGIC, _FENCE, salt, 0, 0, NONE, BLOCK_BYTES, nonce, 0, 0)
    return (head + _CRC.pack(crc32c.crc32c(head))).ljust(BLOCK_BYTES, b"\0")


# ------------------------------------------------------------------------------ reading


def read_description(path: str, block: bytes) -> Description:
    """Decodes block 0. Raises `CorruptObject`."""
    if len(block) < BLOCK_BYTES:
        raise errors.CorruptObject(
            path=path, check=f"it is {len(block)} bytes long, but no block 0"
        )
    magic, length, crc = _BLOCK_HEADER.unpack_from(block)
    if magic != _SEGMENT_MAGIC:
        check = f"it begins with {magic!r}, not {_SEGMENT_MAGIC!r}"
        raise errors.CorruptObject(path=path, check=check)
    raw = block[_BLOCK_HEADER.size : _BLOCK_HEADER.size + length]
    if len(raw) != length or crc32c.crc32c(raw) != crc:
        raise errors.CorruptObject(path=path, check="the CRC32C of its block 0 is wrong")
    try:
        found = _description_decoder.decode(raw)
    except msgspec.MsgspecError as error:
        check = f"its block 0 is unreadable: {error}"
        raise errors.CorruptObject(path=path, check=check) from error
    if found.version != _VERSION or len(found.salt) != SALT_BYTES:
        check = f"its version is {found.version}; this release reads {_VERSION}"
        raise errors.CorruptObject(path=path, check=check)
    return found


def next_event(
    path: str, window: Window, *, salt: bytes, offset: int, sequence: int, previous: int
) -> Event:
    """Applies the rule at `offset`, where `sequence` is expected after the frame at `previous`.

    Reads only the bytes of the window, which were visible when it was created, so a frame that is
    appended concurrently is seen whole or not at all. Raises `CorruptObject` for a durable frame
    that is damaged, or missing before a later one. `path` names the segment in errors.
    """
    unfinished: Header | None = None
    for place in range(round_up(offset), window.size, BLOCK_BYTES):
        header = window.header(place, salt)
        if header is None:
            continue
        if header.is_fence:
            return Fence(offset=place)
        if header.offset != place:
            continue
        if header.sequence == sequence and header.previous == previous:
            frame = _taken(path, window, header, salt)
            if frame is not None:
                return frame
            unfinished = header if header.is_last else None
        elif header.sequence > sequence:
            check = (
                f"a frame of sequence {header.sequence} is at {place}, and {sequence}, which was"
                f" durable before it, is not found from {offset} on"
            )
            raise errors.CorruptObject(path=path, check=check)
    return Nothing(unfinished=unfinished)


def vouched(path: str, read: Read, header: Header) -> Frame:
    """Returns the last frame of a segment, for which the next segment vouches.

    Raises `CorruptObject` if its index is damaged.
    """
    raw = read(header.offset + HEADER_BYTES, header.index_length)
    return Frame(header=header, index=_index(path, header, raw), is_vouched=True)


def frame_at(path: str, read: Read, *, salt: bytes, offset: int, sequence: int) -> Frame:
    """Returns the durable frame of `sequence` at `offset`. Raises `CorruptObject`."""
    header = _header(read(offset, HEADER_BYTES), salt)
    if header is None or header.is_fence or (header.offset, header.sequence) != (offset, sequence):
        check = f"the frame of sequence {sequence} is not at {offset}"
        raise errors.CorruptObject(path=path, check=check)
    return vouched(path, read, header)


def first_header(read: Read, salt: bytes) -> Header | None:
    """Returns the header of a segment's first frame; None if there is none, or it is a fence."""
    header = _header(read(FIRST, HEADER_BYTES), salt)
    is_frame = header is not None and not header.is_fence and header.offset == FIRST
    return header if is_frame else None


class Window:
    """The first `size` bytes of a segment, read in chunks that small neighbouring frames share."""

    def __init__(self, read: Read, size: int) -> None:
        self._read = read
        self.size = size
        self._start = 0
        self._data = b""

    def slice(self, start: int, length: int) -> bytes:
        """Returns these bytes; fewer at the end."""
        end = min(start + length, self.size)
        if start >= end:
            return b""
        if start < self._start or end > self._start + len(self._data):
            want = min(max(length, _READ_BYTES), self.size - start)
            self._start, self._data = start, self._read(start, want)
        begin = start - self._start
        return self._data[begin : begin + end - start]

    def header(self, place: int, salt: bytes) -> Header | None:
        return _header(self.slice(place, HEADER_BYTES), salt)


def _header(raw: bytes, salt: bytes) -> Header | None:
    if len(raw) < HEADER_BYTES or raw[:4] != _FRAME_MAGIC:
        return None
    if crc32c.crc32c(raw[: _HEADER.size]) != _CRC.unpack_from(raw, _HEADER.size)[0]:
        return None
    _, flags, salted, offset, sequence, previous, length, nonce, index_length, index_crc = (
        _HEADER.unpack_from(raw)
    )
    if salted != salt:
        return None
    return Header(
        offset=offset,
        sequence=sequence,
        previous=previous,
        length=length,
        nonce=nonce,
        index_length=index_length,
        index_crc32c=index_crc,
        is_last=bool(flags & _LAST),
        is_fence=bool(flags & _FENCE),
    )


def _taken(path: str, window: Window, header: Header, salt: bytes) -> Frame | None:
    """Returns the frame if it is vouched or whole."""
    after = window.header(header.end, salt)
    is_vouched = (
        after is not None
        and not after.is_fence
        and not header.is_last
        and after.offset == header.end
        and after.sequence == header.sequence + 1
        and after.previous == header.offset
    )
    raw = window.slice(header.offset + HEADER_BYTES, header.index_length)
    if is_vouched:
        return Frame(header=header, index=_index(path, header, raw), is_vouched=True)
    if header.end > window.size or not _is_index(header, raw):
        return None
    index = _index(path, header, raw)
    return (
        Frame(header=header, index=index, is_vouched=False)
        if _is_whole(window, header, index)
        else None
    )


def _is_index(header: Header, raw: bytes) -> bool:
    return len(raw) == header.index_length and crc32c.crc32c(raw) == header.index_crc32c


def _index(path: str, header: Header, raw: bytes) -> Index:
    if not _is_index(header, raw):
        check = f"the CRC32C of the index of sequence {header.sequence} at {header.offset} is wrong"
        raise errors.CorruptObject(path=path, check=check)
    try:
        return _index_decoder.decode(raw)
    except msgspec.MsgspecError as error:
        check = f"the index of sequence {header.sequence} at {header.offset} is unreadable: {error}"
        raise errors.CorruptObject(path=path, check=check) from error


def _is_whole(window: Window, header: Header, index: Index) -> bool:
    """Returns whether the trailer matches the header, and the payloads match the index."""
    tail = window.slice(header.end - _TRAILER.size, _TRAILER.size)
    if len(tail) < _TRAILER.size or _TRAILER.unpack(tail) != (header.nonce, header.sequence):
        return False
    origin = header.offset + HEADER_BYTES + header.index_length
    for entry in index.entries:
        if entry.staged is not None or not entry.length:
            continue
        data = window.slice(origin + entry.start, entry.length)
        if len(data) != entry.length or crc32c.crc32c(data) != entry.crc32c:
            return False
    return True
