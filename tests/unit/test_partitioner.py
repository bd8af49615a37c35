"""Which partition a record goes to: Kafka's own vectors, and one by one against side by side."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparklog import errors
from sparklog.formats.partitioner import NO_KEY, murmur2, parted, partitions_of, spread, to_positive

# Kafka's UtilsTest.testMurmur2; the last, of no bytes, is what its Java client gives.
KAFKA_VECTORS = [
    (b"21", -973932308),
    (b"foobar", -790332482),
    (b"a-little-bit-long-string", -985981536),
    (b"a-little-bit-longer-string", -1486304829),
    (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
    (b"abc", 479470107),
    (b"", 275646681),
]
MOST_PARTITIONS = 2**31 - 1

keys_or_none = st.lists(st.none() | st.binary(max_size=70), max_size=100)


def expected(keys: list[bytes | None], count: int) -> list[int]:
    """The partitions by the scalar hash."""
    return [NO_KEY if key is None else to_positive(murmur2(key)) % count for key in keys]


@pytest.mark.parametrize(("key", "hashed"), KAFKA_VECTORS)
def test_murmur2_is_kafka_s(key: bytes, hashed: int) -> None:
    """One by one, the hash is what Kafka's Java client computes."""
    assert murmur2(key) == hashed


def test_vectorised_murmur2_is_kafka_s() -> None:
    """Side by side, the hash is what Kafka's Java client computes."""
    keys = pa.array([key for key, _ in KAFKA_VECTORS], pa.binary())
    positive = [hashed & 0x7FFF_FFFF for _, hashed in KAFKA_VECTORS]
    assert partitions_of(keys, MOST_PARTITIONS).tolist() == positive


def test_to_positive_clears_the_sign_and_is_not_absolute() -> None:
    """The smallest int becomes 0 and -1 the largest, as in Java."""
    assert to_positive(-(2**31)) == 0
    assert to_positive(-1) == 2**31 - 1
    assert to_positive(5) == 5


@given(keys=keys_or_none, count=st.integers(1, MOST_PARTITIONS))
@example(keys=[b"x" * n for n in range(70)], count=MOST_PARTITIONS)
@example(keys=[b"1234"] * 40 + [b"12345678"] * 40, count=MOST_PARTITIONS)
@example(keys=[b"", b"", None], count=1)
@settings(deadline=None)
def test_side_by_side_equals_one_by_one(keys: list[bytes | None], count: int) -> None:
    """For any keys, the vectorised partition equals the scalar one, with NO_KEY for a null."""
    found = partitions_of(pa.array(keys, pa.binary()), count)
    assert found.dtype == np.int32
    assert found.tolist() == expected(keys, count)


@given(keys=keys_or_none, data=st.data())
@settings(deadline=None)
def test_slice_is_partitioned_as_its_own_keys(
    keys: list[bytes | None], data: st.DataObject
) -> None:
    """A sliced array gives the partitions of the slice, of 32-bit and 64-bit offsets alike."""
    start = data.draw(st.integers(0, len(keys)))
    length = data.draw(st.integers(0, len(keys) - start))
    for kind in (pa.binary(), pa.large_binary()):
        part = pa.array(keys, kind).slice(start, length)
        assert partitions_of(part, 7).tolist() == expected(keys[start : start + length], 7)


def test_keys_beyond_one_block_are_hashed_alike() -> None:
    """Blocks join without a seam, and a few very long keys among short ones come out right."""
    keys: list[bytes | None] = [b"key-%d" % n for n in range(40_000)]
    keys[5], keys[20_000], keys[-1] = b"long" * 5_000, b"x" * 1_023, None
    assert partitions_of(pa.array(keys, pa.binary()), 10_000).tolist() == expected(keys, 10_000)


def test_bytes_under_a_null_are_never_read_as_a_key() -> None:
    """A null whose slot holds bytes, as Arrow allows, is still NO_KEY."""
    offsets = pa.py_buffer(np.array([0, 2, 8], np.int32).tobytes())
    validity = pa.py_buffer(b"\x01")
    keys = pa.Array.from_buffers(pa.binary(), 2, [validity, offsets, pa.py_buffer(b"21foobar")])
    assert partitions_of(keys, 50).tolist() == [to_positive(-973932308) % 50, NO_KEY]


def test_keys_of_another_type_are_refused() -> None:
    """Text is not a key until it is encoded."""
    with pytest.raises(errors.WrongSchema, match="keys must be binary, not string"):
        partitions_of(pa.array(["a"]), 4)


def test_keyless_batches_take_turns() -> None:
    """Successive batches without keys visit every partition in turn, from any first number."""
    assert [spread(batch, 3) for batch in range(7, 13)] == [1, 2, 0, 1, 2, 0]


@given(where=st.lists(st.sampled_from([0, 1, 2, 9_999, 2**15, 2**16 - 1]), max_size=40))
@settings(deadline=None)
def test_rows_are_parted_in_order(where: list[int]) -> None:
    """Each partition gets its rows in their order, with their positions in the input."""
    rows = pa.record_batch({"value": pa.array(range(len(where)), pa.int64())})
    found = list(parted(rows, np.array(where, np.int32)))
    for partition, places, piece in found:
        wanted = [row for row, each in enumerate(where) if each == partition]
        assert places.tolist() == piece.column("value").to_pylist() == wanted
    assert {partition for partition, *_ in found} == set(where)
    assert len(found) == len(set(where))
