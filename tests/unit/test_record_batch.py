"""Kafka's record batches, against the builders and readers of two clients."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import cramjam
import crc32c
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog import errors, limits
from sparklog.formats import record_batch, record_kernels
from sparklog.formats.record import ROW_SCHEMA, rows
from sparklog.formats.record_batch import Codec
from tests.support.batches import Record, built, changed, read

CODECS = list(Codec)
SECOND_MS = 1_700_000_000_000


octets = st.none() | st.binary(max_size=40)
headers = st.lists(st.tuples(st.text(max_size=8), octets), max_size=3).map(tuple)
times_ms = st.integers(
    limits.TIMESTAMP_MIN_US // 1_000 + 1, limits.TIMESTAMP_MAX_US // 1_000
).filter(lambda ms: ms != -1)
"""To aiokafka's builder -1 means that the first record's time is yet to come."""
records = st.builds(Record, times_ms, octets, octets, headers)
batches = st.lists(records, min_size=1, max_size=30)


def told(payload: pa.RecordBatch) -> list[Record]:
    """A payload's rows."""
    count = payload.num_rows

    def column(name: str) -> list[Any]:
        known = payload.schema.get_field_index(name) >= 0
        return payload.column(name).to_pylist() if known else [None] * count

    stamps = payload.column("timestamp").view(pa.int64()).to_pylist()
    return [
        Record(us // 1_000, key, value, tuple((h["key"], h["value"]) for h in heads or ()))
        for us, key, value, heads in zip(
            stamps, column("key"), column("value"), column("headers"), strict=True
        )
    ]


# ------------------------------------------------------------------------------ there and back


@given(batches, st.sampled_from(CODECS))
def test_what_a_client_builds_is_decoded(given: list[Record], codec: Codec) -> None:
    """Keys, values, headers, nulls and times survive a round trip in every codec."""
    batch = built(given, codec)
    payload = record_batch.decode(batch)
    payload.validate(full=True)
    assert told(payload) == given
    checked = record_batch.check(batch)
    stamps = [each.timestamp_ms for each in given]
    assert (checked.min_timestamp_ms, checked.max_timestamp_ms) == (min(stamps), max(stamps))
    assert checked.keys == sum(each.key is not None for each in given)
    assert checked.header.record_count == len(given)


@given(batches, st.integers(1, 2_000), st.integers(0, 2**62), st.integers(0, 2**31 - 1))
def test_what_is_encoded_is_read_by_a_client(
    given: list[Record], limit_bytes: int, base_offset: int, leader_epoch: int
) -> None:
    """Returns the same records at the same offsets, in batches of this size."""
    payload = record_batch.decode(built(given))
    found = rows(payload, partition=0, base_offset=base_offset, timestamp_us=0, timestamp_type=0)
    encoded = list(record_batch.encode(found, leader_epoch=leader_epoch, limit_bytes=limit_bytes))
    read_back = [each for batch in encoded for each in read(batch)]
    assert read_back == list(enumerate(given, base_offset))
    for batch in encoded:
        checked = record_batch.check(batch)
        assert checked.header.leader_epoch == leader_epoch
        assert len(batch) <= limit_bytes + record_batch.HEADER_BYTES or (
            checked.header.record_count == 1
        )


@given(batches, st.data())
def test_rows_with_gaps_keep_their_offsets(given: list[Record], data: st.DataObject) -> None:
    """Compacted rows, also a slice of more; deltas beyond an int32 begin another batch."""
    steps = data.draw(st.lists(st.integers(1, 2**31), min_size=len(given), max_size=len(given)))
    offsets = np.cumsum(np.array(steps, np.int64))
    payload = record_batch.decode(built(given))
    found = rows(payload, partition=0, base_offset=0, timestamp_us=0, timestamp_type=0)
    at = ROW_SCHEMA.get_field_index("offset")
    found = found.set_column(at, "offset", pa.array(offsets))
    first = data.draw(st.integers(0, len(given) - 1))
    encoded = record_batch.encode(found.slice(first), leader_epoch=0, limit_bytes=1 << 20)
    read_back = [each for batch in encoded for each in read(batch)]
    assert read_back == list(zip(offsets.tolist(), given, strict=True))[first:]


def test_rows_of_append_time_are_grouped_by_it() -> None:
    """A batch has one such time, which counts for all of its records."""
    stamps_us = [5_000, 5_999, 6_000, 6_000, 7_000]
    payload = pa.record_batch(
        {
            "timestamp": pa.array(stamps_us, pa.timestamp("us", "UTC")),
            "value": pa.array([b"x"] * 5, pa.binary()),
        }
    )
    found = rows(payload, partition=0, base_offset=9, timestamp_us=0, timestamp_type=1)
    encoded = list(record_batch.encode(found, leader_epoch=0, limit_bytes=1 << 20))
    counts = [
        (header.max_timestamp_ms, header.record_count, header.has_append_time)
        for header in map(record_batch.read_header, encoded)
    ]
    assert counts == [(5, 2, True), (6, 2, True), (7, 1, True)]
    assert "timestamp" not in record_batch.decode(encoded[0]).schema.names


def test_a_place_is_set_without_a_new_checksum() -> None:
    """Base offset and leader epoch stand outside of what the CRC covers."""
    batch = built([Record(SECOND_MS, b"k", b"v")] * 3)
    found = b"".join(record_batch.placed(batch, base_offset=2**40, leader_epoch=7))
    checked = record_batch.check(found)
    assert (checked.header.base_offset, checked.header.leader_epoch) == (2**40, 7)
    assert checked.header.next_offset == 2**40 + 3
    assert found[21:] == batch[21:]
    assert [offset for offset, _ in read(found)] == [2**40, 2**40 + 1, 2**40 + 2]


def test_the_time_of_the_append_counts_for_all() -> None:
    """As a topic with LogAppendTime has it; the CRC follows."""
    batch = built([Record(SECOND_MS, None, b"v"), Record(SECOND_MS + 5, None, b"v")])
    found = record_batch.with_times(batch, max_timestamp_ms=SECOND_MS + 99, append_time=True)
    assert [each.timestamp_ms for _, each in read(found)] == [SECOND_MS + 99] * 2
    assert record_batch.check(found).header.has_append_time


# ------------------------------------------------------------------------------ refusals


PLAIN = built([Record(SECOND_MS, b"k", b"v", (("h", b"1"),)), Record(SECOND_MS, None, None)])


@pytest.mark.parametrize(
    ("batch", "error", "reason"),
    [
        (b"", errors.DamagedBatch, "fewer than its header"),
        (PLAIN[:60], errors.DamagedBatch, "fewer than its header"),
        (PLAIN[:-1], errors.DamagedBatch, "are not a batch"),
        (PLAIN + b"x", errors.BadBatch, "more follows"),
        (PLAIN + PLAIN, errors.BadBatch, "more follows"),
        (changed(PLAIN, 16, ">b", 1), errors.BadBatch, "message set of version 1"),
        (changed(PLAIN, 16, ">b", 3), errors.DamagedBatch, "are not a batch"),
        (changed(PLAIN, 8, ">i", 2), errors.DamagedBatch, "are not a batch"),
        (changed(PLAIN, 8, ">i", -1), errors.DamagedBatch, "are not a batch"),
        (changed(PLAIN, 30, ">b", 9, checksum=False), errors.DamagedBatch, "CRC32C"),
        (changed(PLAIN, 21, ">h", 0x20), errors.BadBatch, "control"),
        (changed(PLAIN, 21, ">h", 5), errors.UnknownCodec, "Compression 5"),
        (changed(PLAIN, 57, ">i", 0), errors.BadBatch, "0 records"),
        (changed(PLAIN, 57, ">i", -1), errors.BadBatch, "-1 records"),
        (changed(PLAIN, 57, ">i", 3), errors.BadBatch, "the last has offset 1"),
        (changed(PLAIN, 43, ">q", 5), errors.BadBatch, "an id, an epoch and a sequence"),
        (changed(PLAIN, 62, ">b", 1), errors.BadBatch, "attributes"),
        (changed(PLAIN, 64, ">b", 2), errors.BadBatch, "do not increase"),
        (changed(PLAIN, 61, ">b", -1), errors.BadBatch, "number|add up|middle"),
        (changed(PLAIN, 61, ">b", 126), errors.BadBatch, "middle of a record"),
        (changed(PLAIN, 65, ">b", 100), errors.BadBatch, "add up"),
        (changed(PLAIN, 65, ">b", 3), errors.BadBatch, "add up"),
        (changed(PLAIN, 21, ">h", 4), errors.DamagedBatch, "ZSTD does not decompress"),
        (changed(PLAIN, 21, ">h", 2), errors.DamagedBatch, "SNAPPY does not decompress"),
    ],
)
def test_what_is_wrong_is_named(
    batch: bytes, error: type[errors.SparklogError], reason: str
) -> None:
    """A damaged batch is refused with the cause."""
    with pytest.raises(error, match=reason):
        record_batch.check(batch)


@pytest.mark.parametrize("codec", CODECS[1:])
def test_a_bomb_is_refused(codec: Codec) -> None:
    """Output beyond the limit is not even written."""
    batch = built([Record(SECOND_MS, None, bytes(4_000_000))], codec)
    assert len(batch) < 400_000
    with pytest.raises(errors.BatchTooLarge):
        record_batch.check(batch, limit_bytes=1_000_000)
    record_batch.check(batch, limit_bytes=5_000_000)


@pytest.mark.parametrize("framed", [False, True])
def test_snappy_comes_raw_and_framed(framed: bool) -> None:
    """librdkafka sends a block, the Java client several, each with its length."""
    given = [Record(SECOND_MS, None, b"%d" % number) for number in range(2_000)]
    body = built(given)[record_batch.HEADER_BYTES :]
    if framed:
        blocks = [body[at : at + 1_000] for at in range(0, len(body), 1_000)]
        packed = b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1)
        for each in map(bytes, map(cramjam.snappy.compress_raw, blocks)):
            packed += struct.pack(">I", len(each)) + each
    else:
        packed = bytes(cramjam.snappy.compress_raw(body))
    batch = built(given)[: record_batch.HEADER_BYTES] + packed
    batch = changed(changed(batch, 8, ">i", len(batch) - 12), 21, ">h", 2)
    assert told(record_batch.decode(batch)) == given
    with pytest.raises(errors.DamagedBatch):
        record_batch.check(changed(batch[:-9], 8, ">i", len(batch) - 21))


def test_a_header_is_text() -> None:
    """The table keeps a header's key as a string, so its bytes must be one."""
    batch = built([Record(SECOND_MS, None, b"v", (("hh", b""),))])
    with pytest.raises(errors.BadBatch, match="not UTF-8"):
        record_batch.check(changed(batch, batch.index(b"hh"), ">B", 0xFF))


def mutated(chance: random.Random, batch: bytes) -> bytes:
    """Some bytes are others, or gone, or more; the checksum is right, so it does not save us."""
    found = bytearray(batch)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(record_batch.HEADER_BYTES, len(found))
        match chance.randrange(4):
            case 0:
                found[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
            case 1:
                del found[at : at + chance.randint(1, 5)]
            case 2:
                found[at:at] = chance.randbytes(chance.randint(1, 5))
            case _:
                found[at] ^= 1 << chance.randrange(8)
        if len(found) <= record_batch.HEADER_BYTES:
            break
    struct.pack_into(">i", found, 8, len(found) - 12)
    struct.pack_into(">I", found, 17, crc32c.crc32c(bytes(found[21:])))
    return bytes(found)


@settings(max_examples=20, deadline=None)
@given(batches, st.sampled_from(CODECS), st.integers())
def test_mutations_are_refused_or_read(given: list[Record], codec: Codec, seed: int) -> None:
    """Any bytes give an error of ours or rows that Arrow finds valid."""
    chance = random.Random(seed)
    batch = built(given, codec)
    for _ in range(100):
        try:
            payload = record_batch.decode(mutated(chance, batch))
        except (errors.Invalid, errors.DamagedBatch):
            continue
        payload.validate(full=True)
        assert payload.num_rows == len(given)


# ------------------------------------------------------------------------------ another codec


LEVELS = {Codec.NONE: [-1], Codec.GZIP: [-1, 1, 9], Codec.SNAPPY: [-1], Codec.LZ4: [1, 9, 17]}
LEVELS |= {Codec.ZSTD: [-131_072, 3, 22]}
PACKINGS = [(codec, level) for codec, levels in LEVELS.items() for level in levels]


@given(batches, st.sampled_from(CODECS), st.sampled_from(PACKINGS))
def test_a_batch_in_another_codec_is_the_same_batch(
    given: list[Record], came: Codec, packing: tuple[Codec, int]
) -> None:
    """Read by a client: its records, and all that its header says but codec, length and CRC."""
    codec, level = packing
    producer_sequence = {"producer_id": 7, "producer_epoch": 1, "base_sequence": 5}
    before = built(given, came, **producer_sequence)
    found = record_batch.compressed(before, record_batch.check(before).records, codec, level)
    assert read(found) == read(before)
    header, old = record_batch.read_header(found), record_batch.read_header(before)
    assert (header.codec, header.size) == (codec, len(found))
    assert header._replace(crc=0, length=0, attributes=0) == old._replace(
        crc=0, length=0, attributes=0
    )
    assert record_batch.check(found).largest_bytes == record_batch.check(before).largest_bytes


@pytest.mark.parametrize("level", LEVELS[Codec.LZ4])
def test_lz4_is_as_the_java_client_reads_it(level: int) -> None:
    """Blocks that stand alone, of 64 KiB to 4 MiB, and no content size: nothing else is read."""
    batch = built([Record(1, None, b"v" * 300_000)])
    found = record_batch.compressed(batch, record_batch.check(batch).records, Codec.LZ4, level)
    magic, flags, blocks = struct.unpack_from("<IBB", found, record_batch.HEADER_BYTES)
    assert magic == 0x184D2204
    assert flags >> 6 == 1
    assert flags & 0x20
    assert not flags & 0x08
    assert 4 <= blocks >> 4 <= 7


def test_snappy_is_in_the_java_clients_framing() -> None:
    """Its magic and versions, then blocks of 32 KiB of records."""
    batch = built([Record(1, None, b"v" * 100_000)])
    found = record_batch.compressed(batch, record_batch.check(batch).records, Codec.SNAPPY, -1)
    assert found[61:77] == b"\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01"
    at, blocks = 77, []
    while at < len(found):
        (size,) = struct.unpack_from(">I", found, at)
        blocks.append(cramjam.snappy.decompress_raw_len(bytes(found[at + 4 : at + 4 + size])))
        at += 4 + size
    assert blocks[:-1] == [32 * 1_024] * 3


def test_a_level_counts() -> None:
    """A higher one takes less room, in each codec that has levels."""
    chance = random.Random(1)
    value = b" ".join(chance.choice((b"one", b"three", b"seventeen")) for _ in range(20_000))
    batch = built([Record(1, None, value)])
    taken = record_batch.check(batch).records
    for codec, levels in ((Codec.GZIP, (1, 9)), (Codec.LZ4, (1, 17)), (Codec.ZSTD, (-100, 22))):
        low, high = (len(record_batch.compressed(batch, taken, codec, level)) for level in levels)
        assert high < low


@given(batches, st.sampled_from(CODECS))
def test_the_size_in_columns_is_known_before_they_are_made(
    given: list[Record], codec: Codec
) -> None:
    """`check` returns the decoded size, or slightly more."""
    batch = built(given, codec)
    decoded_bytes = record_batch.decode(batch).nbytes
    assert (
        decoded_bytes <= record_batch.check(batch).decoded_bytes <= decoded_bytes + 8 * len(given)
    )


def test_headers_that_are_small_on_the_wire_only_are_refused() -> None:
    """Two bytes make an empty header, and ten times as many its place in the columns."""
    batch = built([Record(0, None, b"", (("", None),) * 100_000)], Codec.ZSTD)
    assert len(batch) < 1_000
    with pytest.raises(errors.BatchTooLarge):
        record_batch.check(batch, limit_bytes=500_000)
    assert record_batch.check(batch, limit_bytes=1_000_000).header.record_count == 1


def signatures() -> int:
    """For how many combinations of types loops are compiled."""
    loops = [each for each in vars(record_kernels).values() if hasattr(each, "signatures")]
    assert len(loops) > 10
    return sum(len(each.signatures) for each in loops)


def test_loops_are_compiled_for_all_that_comes() -> None:
    """No type of array is met later that they were not compiled for before."""
    assert record_batch.compile_loops() is None
    before = signatures()
    pair = (("name", b"value"), ("none", None))
    few = [Record(SECOND_MS, b"k", b"v", pair), Record(SECOND_MS, None, None)]
    large = [Record(SECOND_MS, bytes(100_000), bytes(100_000), pair)] * 3
    for some in (few, large, few[1:]):
        for codec in CODECS:
            batch = built(some, codec)
            record_batch.stamps_and_keys(record_batch.check(batch))
            record_batch.check(bytearray(batch))
            payload = record_batch.decode(batch, pa.py_buffer(batch), bytearray(batch))
            taken = rows(payload, partition=0, base_offset=7, timestamp_us=0, timestamp_type=0)
            for part in (taken, taken.slice(1), pa.concat_batches([taken, taken.slice(1, 1)])):
                assert list(record_batch.encode(part, leader_epoch=0, limit_bytes=1_000))
    assert signatures() == before


def test_loops_are_compiled_where_they_cannot_be_kept(tmp_path: Path) -> None:
    """A full disk costs the cache, and nothing else."""
    code = """
        import errno
        from numba.core.caching import IndexDataCacheFile
        def save(*_):
            raise OSError(errno.ENOSPC, "no space")
        IndexDataCacheFile.save = save
        from sparklog.formats import record_batch
        print(record_batch.compile_loops(), record_batch.compile_loops())
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "[Errno 28] no space None\n"
