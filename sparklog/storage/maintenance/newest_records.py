"""Finds the last record of each key among the rows of a compaction pass, in bounded memory.

A pass reads its rows once to count the keys, and again for each part of the keys that fits in
memory. Keys are assigned to parts by hash, and compared byte for byte within a part.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparklog import arrow, limits

COMPACT_KEYS_BYTES = 256 * limits.MIB  # of memory for keys that are compared together
COMPACT_KEYS_ROWS = 1_048_576  # rows that wait to be compared

_PARTS: Final = 256
"""The number of parts that keys are hashed into; as many are compared together as memory allows."""
_SLOTS: Final = 1 << 22
"""Hash slots; the number of empty ones yields an estimate of the number of distinct keys."""
_WORD: Final = 8
_MARGIN: Final = 32
_KEY_BYTES: Final = 160
"""Memory per key while it is compared, in addition to its bytes and a copy of them."""

_COMPARED: Final = np.uint8(1)
"""The record has a key and is below the end of the pass."""
_TOMBSTONE: Final = np.uint8(2)
_WAITED: Final = np.uint8(4)
"""The record is below the horizon."""
_SUPERSEDED: Final = np.uint8(8)
_SUPERSEDES: Final = np.uint8(16)
"""The record is the last of its key, but not the only one."""


class Records:
    """Flags and hash part of each row in the pass, in the order of its files."""

    def __init__(self, *, end: int, table_end: int, horizon: int) -> None:
        self._end, self._table_end, self._horizon = end, table_end, horizon
        self._noted: list[npt.NDArray[np.uint8]] = []
        self._dealt: list[npt.NDArray[np.uint8]] = []
        self._slots = np.zeros(_SLOTS, np.bool_)
        self._key_bytes = self._keys = 0
        self.file_rows: list[int] = []
        self.flags = np.zeros(0, np.uint8)
        self._part = np.zeros(0, np.uint8)

    def add(self, batch: pa.RecordBatch) -> None:
        """Adds rows with offset, key and value."""
        offsets, keys = arrow.as_numpy(batch.column("offset")), batch.column("key")
        compared = arrow.as_mask(keys.is_valid()) & (offsets < self._end)
        flags = np.where(compared, _COMPARED, np.uint8(0))
        is_last = offsets == self._table_end - 1
        is_tombstone = arrow.as_mask(batch.column("value").is_null()) & ~is_last
        flags[compared & is_tombstone] |= _TOMBSTONE
        flags[offsets < self._horizon] |= _WAITED
        hashes = hashes_of(keys)
        self._noted.append(flags)
        self._dealt.append((hashes >> np.uint64(56)).astype(np.uint8))
        self._slots[(hashes[compared] >> np.uint64(20)) % np.uint64(_SLOTS)] = True
        self._keys += int(np.count_nonzero(compared))
        self._key_bytes += keys.nbytes

    def close(self) -> None:
        """Finishes adding rows."""
        self.flags = np.concatenate([self.flags, *self._noted])
        self._part = np.concatenate([self._part, *self._dealt])
        self._noted, self._dealt = [], []

    def parts(self) -> list[tuple[int, int]]:
        """Returns ranges of hash parts whose keys fit in memory."""
        free = max(_SLOTS - int(np.count_nonzero(self._slots)), 1)
        distinct = min(self._keys, -_SLOTS * np.log(free / _SLOTS))
        self._slots = np.zeros(0, np.bool_)
        each_bytes = _KEY_BYTES + 2 * self._key_bytes // max(self._keys, 1)
        count = -(-int(distinct * each_bytes) // COMPACT_KEYS_BYTES)
        bounds = np.linspace(0, _PARTS, min(max(count, 1), _PARTS) + 1).astype(np.int64)
        return [(int(low), int(high)) for low, high in itertools.pairwise(bounds)]

    def is_in(self, part: tuple[int, int], position: int, count: int) -> npt.NDArray[np.bool_]:
        """Returns which of `count` rows have a key in that part."""
        dealt = self._part[position : position + count]
        here = (self.flags[position : position + count] & _COMPARED) != 0
        return here & (dealt >= part[0]) & (dealt < part[1])

    def verdict(self, *, tombstones_go: bool) -> tuple[npt.NDArray[np.bool_], bool]:
        """Returns the rows to keep, and whether tombstones are among them."""
        flags = self.flags
        stays = (flags & _SUPERSEDED) == 0
        if tombstones_go:
            alone = _TOMBSTONE | _WAITED
            stays &= (flags & (alone | _SUPERSEDES)) != alone
        return stays, bool(np.any(stays & ((flags & _TOMBSTONE) != 0)))


def hashes_of(keys: pa.BinaryArray) -> npt.NDArray[np.uint64]:
    """Returns a hash of each key, used only to distribute keys among parts.

    It covers the length, the first 16 bytes and the last 32. Keys that differ only in the middle
    fall into one part, which is then larger than intended.
    """
    _, bounds, data = keys.buffers()
    ends = np.frombuffer(bounds, np.int32, len(keys) + 1, 4 * keys.offset).astype(np.int64)
    first, lengths = int(ends[0]), np.diff(ends)
    held = np.zeros(_MARGIN + int(ends[-1]) - first + _WORD, np.uint8)
    if len(held) > _MARGIN + _WORD:
        held[_MARGIN:-_WORD] = np.frombuffer(data, np.uint8, int(ends[-1]) - first, first)
    words: npt.NDArray[np.uint64] = np.ndarray(
        (len(held) - _WORD,), np.dtype("<u8"), held.data, strides=(1,)
    )
    starts, stops = ends[:-1] - first + _MARGIN, ends[1:] - first + _MARGIN
    hashes = lengths.astype(np.uint64)
    for number in range(2):
        missing = np.clip(_WORD * (number + 1) - lengths, 0, _WORD)
        places = np.minimum(starts + _WORD * number, len(words) - 1)
        hashes = _mixed(hashes, _shifted(words[places], missing, np.left_shift))
    for number in range(_MARGIN // _WORD):
        missing = np.clip(_WORD * (number + 1) - lengths, 0, _WORD)
        places = stops - _WORD * (number + 1)
        hashes = _mixed(hashes, _shifted(words[places], missing, np.right_shift))
    return hashes


def _shifted(
    words: npt.NDArray[np.uint64], missing: npt.NDArray[np.int64], shift: np.ufunc
) -> npt.NDArray[np.uint64]:
    """Returns the words without the `missing` bytes, which do not belong to the key."""
    bits = (8 * np.minimum(missing, _WORD - 1)).astype(np.uint64)
    return np.where(missing < _WORD, shift(words, bits), np.uint64(0))


def _mixed(hashes: npt.NDArray[np.uint64], words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    mixed = (hashes ^ words) * np.uint64(0x9E3779B97F4A7C15)
    return mixed ^ (mixed >> np.uint64(29))


@dataclass(slots=True)
class Newest:
    """Finds the last record of each key among the added ones, and marks the others."""

    records: Records
    _keys: list[pa.BinaryArray] = field(default_factory=list)
    """The distinct keys among those compared so far, then the keys that wait to be compared."""
    _offsets: list[npt.NDArray[np.int64]] = field(default_factory=list)
    _positions: list[npt.NDArray[np.int64]] = field(default_factory=list)
    _waiting_rows: int = 0
    _waiting_bytes: int = 0

    def add(
        self,
        keys: pa.BinaryArray,
        offsets: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
    ) -> None:
        self._keys.append(keys)
        self._offsets.append(offsets)
        self._positions.append(positions)
        self._waiting_rows += len(keys)
        self._waiting_bytes += keys.nbytes
        # Wait for at least as many as are known, so that those are not compared too often.
        if (
            self._waiting_rows >= max(COMPACT_KEYS_ROWS, len(self._keys[0]))
            or self._waiting_bytes >= COMPACT_KEYS_BYTES // 2
        ):
            self.finish()

    def finish(self) -> None:
        """Compares all waiting keys."""
        if not self._waiting_rows:
            return
        offsets, positions = np.concatenate(self._offsets), np.concatenate(self._positions)
        keys, self._keys, self._offsets, self._positions = self._keys, [], [], []
        whole = pa.concat_arrays(keys)
        del keys
        encoded = whole.dictionary_encode()
        del whole
        numbers = arrow.as_numpy(encoded.indices)
        last = np.full(len(encoded.dictionary), -1, np.int64)
        np.maximum.at(last, numbers, offsets)
        is_last = offsets == last[numbers]
        flags = self.records.flags
        flags[positions[~is_last]] |= _SUPERSEDED
        places = np.empty(len(last), np.int64)
        places[numbers[is_last]] = positions[is_last]
        flags[places[np.bincount(numbers, minlength=len(last)) > 1]] |= _SUPERSEDES
        self._keys, self._offsets, self._positions = [encoded.dictionary], [last], [places]
        self._waiting_rows = self._waiting_bytes = 0
