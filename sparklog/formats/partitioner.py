"""Assigns records to partitions. Pure: keys in, partition numbers and their rows out.

A keyed record goes to murmur2(key) mod count, as in Kafka's Java client (`Utils.murmur2` and
`BuiltInPartitioner.partitionForKey`), so that both kinds of producer send a key to the same
partition. A batch without keys goes to one partition as a whole, and the next batch to the next one
(following KIP-480: one large append is cheaper than many small ones).

All keys of a block are hashed side by side in numpy, directly from the Arrow buffers: no Python
object per record.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparklog import arrow, errors

NO_KEY: Final = -1

_SEED: Final = 0x9747B28C
_M: Final = 0x5BD1E995
_R: Final = 24
_MASK: Final = 0xFFFF_FFFF

# The number of keys hashed at a time: a block's arrays stay in a core's own cache.
_BLOCK_KEYS: Final = 16_384
# Up to this many keys are hashed faster individually than side by side: one very long key must not
# cost a numpy step for each of its words.
_FEW_KEYS: Final = 32

# By the number of bytes after the last whole word.
_TAIL_MASKS: Final = np.array([0, 0xFF, 0xFFFF, 0xFF_FFFF], np.uint32)

_Words = npt.NDArray[np.uint32]


def murmur2(key: bytes) -> int:
    """Returns Kafka's 32-bit murmur2 of one key, signed like a Java int."""
    words = len(key) // 4
    tail = int.from_bytes(key[4 * words :], "little")
    hashed = _SEED ^ len(key)
    for at in range(0, 4 * words, 4):
        word = int.from_bytes(key[at : at + 4], "little") * _M & _MASK
        word = (word ^ word >> _R) * _M & _MASK
        hashed = (hashed * _M & _MASK) ^ word
    if len(key) % 4:
        hashed = (hashed ^ tail) * _M & _MASK
    hashed = (hashed ^ hashed >> 13) * _M & _MASK
    hashed ^= hashed >> 15
    return hashed - (hashed >> 31 << 32)


def to_positive(hashed: int) -> int:
    """Clears the sign bit, like Kafka's `Utils.toPositive`; this is not the absolute value."""
    return hashed & 0x7FFF_FFFF


def partitions_of(keys: pa.Array, count: int) -> npt.NDArray[np.int32]:
    """Returns the partition of each key, by its murmur2; `NO_KEY` if the key is null.

    Args:
        keys: binary or large_binary, sliced or not.
        count: the topic's number of partitions, at least 1.

    Raises:
        errors.WrongSchema: the keys are of a different type.
    """
    assert count >= 1
    width: np.dtype[Any]
    if pa.types.is_binary(keys.type):
        width = np.dtype(np.int32)
    elif pa.types.is_large_binary(keys.type):
        width = np.dtype(np.int64)
    else:
        raise errors.WrongSchema(reason=f"keys must be binary, not {keys.type}")

    partitions = np.empty(len(keys), np.int32)
    if len(keys) == 0:
        return partitions
    _, offsets_buffer, data_buffer = keys.buffers()
    offsets = np.frombuffer(offsets_buffer, width)[keys.offset : keys.offset + len(keys) + 1]
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer else np.empty(0, np.uint8)
    for first in range(0, len(keys), _BLOCK_KEYS):
        hashes = _murmur2_block(data, offsets[first : first + _BLOCK_KEYS + 1])
        partitions[first : first + _BLOCK_KEYS] = (hashes & 0x7FFF_FFFF) % np.uint32(count)
    if keys.null_count:
        partitions[arrow.as_mask(keys.is_null())] = NO_KEY
    return partitions


def spread(batch: int, count: int) -> int:
    """Returns the partition of a batch without keys: round robin by the batch's number.

    A producer should start at a random number, so that many producers do not move in lockstep.
    """
    return batch % count


def parted(
    rows: pa.RecordBatch, partitions: npt.NDArray[np.int32]
) -> Iterator[tuple[int, npt.NDArray[np.intp], pa.RecordBatch]]:
    """Yields each partition with rows, by number: the partition, its rows' indices, and the rows.

    Args:
        partitions: the partition of each row; 0 or greater.
    """
    # numpy sorts 16-bit integers by radix, several times faster; a stable sort keeps their order.
    order = np.argsort(partitions.astype(np.int16), kind="stable")
    gathered, ordered = rows.take(arrow.numbers(order, pa.int64())), partitions[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1)).tolist()
    for start, end in pairwise([*starts, len(order)]):
        yield int(ordered[start]), order[start:end], gathered.slice(start, end - start)


def _murmur2_block(data: npt.NDArray[np.uint8], offsets: npt.NDArray[Any]) -> _Words:
    """Returns the unsigned murmur2 of each key `data[offsets[i]:offsets[i + 1]]`."""
    first, end = int(offsets[0]), int(offsets[-1])
    starts = offsets[:-1] - first
    lengths = np.diff(offsets)
    words, tails = lengths >> 2, lengths & 3

    # A word begins at every byte; four extra bytes allow a tail to be read as a word too.
    padded = np.zeros(end - first + 4, np.uint8)
    padded[:-4] = data[first:end]
    word_at: _Words = np.ndarray(len(padded) - 3, np.dtype("<u4"), padded, strides=(1,))

    hashes = lengths.astype(np.uint32) ^ np.uint32(_SEED)
    shared = int(words.min())
    for step in range(shared):
        hashes *= np.uint32(_M)
        hashes ^= _mixed(word_at[starts + 4 * step])
    alone = np.empty(0, np.intp)
    for step in range(shared, int(words.max())):
        longer = np.flatnonzero(words > step)
        if len(longer) <= _FEW_KEYS:
            alone = longer
            break
        mixed = _mixed(word_at[starts[longer] + 4 * step])
        hashes[longer] = hashes[longer] * np.uint32(_M) ^ mixed

    tail = word_at[starts + 4 * words] & _TAIL_MASKS[tails]
    hashes = np.where(tails > 0, (hashes ^ tail) * np.uint32(_M), hashes)
    hashes ^= hashes >> 13
    hashes *= np.uint32(_M)
    hashes ^= hashes >> 15
    for key in alone:
        hashes[key] = murmur2(padded[starts[key] :][: lengths[key]].tobytes()) & _MASK
    return hashes


def _mixed(words: _Words) -> _Words:
    words *= np.uint32(_M)
    words ^= words >> _R
    words *= np.uint32(_M)
    return words
