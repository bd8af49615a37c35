"""Flight's messages as bytes, alongside what Arrow itself makes of them."""

from __future__ import annotations

import contextlib
import struct

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog import errors
from sparklog.broker.flight import protocol
from sparklog.broker.flight.protocol import bytes_field

VALUES = pa.schema([("value", pa.binary())])


def batch(values: list[bytes | None]) -> pa.RecordBatch:
    """One column."""
    return pa.record_batch([pa.array(values, pa.binary())], schema=VALUES)


@given(
    values=st.lists(st.none() | st.binary(max_size=50), max_size=20),
    beside=st.binary(max_size=40),
    gap=st.integers(0, 100),
)
def test_a_batch_comes_back(values: list[bytes | None], beside: bytes, gap: int) -> None:
    """Wherever it is in a buffer, in place or copied."""
    data = b"".join(protocol.write_flight_data(batch(values).serialize(), beside))
    buffer = memoryview(bytearray(bytes(gap) + data))
    found = protocol.read_flight_data(buffer[gap:])
    assert found.app_metadata == (beside or None)
    assert found.command is None
    assert protocol.body_at(data) == found.body_at
    assert protocol.message_type(found.metadata or b"") == protocol.RECORD_BATCH
    copied = pa.ipc.read_record_batch(protocol.encapsulated(found), VALUES)
    in_place = pa.ipc.read_record_batch(protocol.in_place(buffer, gap, found), VALUES)
    assert copied == in_place == batch(values)


def test_fields_in_any_order_and_unknown_ones() -> None:
    """As protobuf allows; the last one of a number counts."""
    whole = memoryview(b"".join(protocol.write_flight_data(batch([b"a"]).serialize())))
    metadata, body = protocol.field(whole, 2), protocol.field(whole, 1000)
    data = bytearray(1)
    data += (
        bytes_field(1000, bytes(body)) + b"\x28\x96\x01" + b"\x31" + bytes(8) + b"\x3d" + bytes(4)
    )
    data += bytes_field(3, b"old") + bytes_field(77, b"unknown") + bytes_field(3, b"new")
    data += bytes_field(1, b"\x08\x02" + bytes_field(2, b"command")) + bytes_field(
        2, bytes(metadata)
    )
    found = protocol.read_flight_data(memoryview(data)[1:])
    assert (found.command, found.app_metadata) == (b"command", b"new")
    again = protocol.in_place(memoryview(data), 1, found)
    assert pa.ipc.read_record_batch(again, VALUES) == batch([b"a"])


@pytest.mark.parametrize(
    "data",
    [
        b"\x12",
        b"\x12\x05abc",
        b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x0b",
        b"\x80",
        b"\x12\x80\x80\x80\x80\x10",
        bytes_field(2, bytes(protocol.MAX_METADATA_BYTES + 1)),
    ],
    ids=["no length", "short", "a long number", "a group", "no tag", "2 GiB", "large metadata"],
)
def test_bytes_that_are_no_message(data: bytes) -> None:
    """They are a bad request."""
    with pytest.raises(errors.BadRequest):
        protocol.read_flight_data(memoryview(data))
    assert protocol.body_at(data) == 0


@given(st.binary(max_size=200))
def test_malformed_bytes_are_a_bad_request(data: bytes) -> None:
    """No other error is raised, and no more memory is taken than the message has."""
    for read in (
        lambda: protocol.read_flight_data(memoryview(data)),
        lambda: protocol.message_type(data),
    ):
        with contextlib.suppress(errors.BadRequest):
            read()
    assert 0 <= protocol.body_at(data) <= len(data)


def metadata_of(data: pa.Buffer) -> bytes:
    """An encapsulated message's."""
    (size,) = struct.unpack_from("<I", data, 4)
    return bytes(data)[8 : 8 + size]


def kind_of(metadata: bytes) -> int | str:
    """Its type, or that it is compressed."""
    try:
        return protocol.message_type(metadata)
    except errors.BadRequest as error:
        return "compressed" if "is compressed" in str(error) else str(error)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compression_is_detected(codec: str) -> None:
    """Batches and dictionaries may be compressed; schemas cannot."""
    options = pa.ipc.IpcWriteOptions(compression=codec)
    assert protocol.message_type(metadata_of(VALUES.serialize())) == protocol.SCHEMA
    plain = batch([bytes(1_000)]).serialize()
    assert protocol.message_type(metadata_of(plain)) == protocol.RECORD_BATCH
    column = pa.array([b"a" * 1_000] * 3).dictionary_encode()
    for chosen in (None, options):
        sink = pa.BufferOutputStream()
        table = pa.record_batch([column], ["value"])
        with pa.ipc.new_stream(
            sink, table.schema, options=chosen or pa.ipc.IpcWriteOptions()
        ) as out:
            out.write_batch(table)
        whole = sink.getvalue()
        messages = pa.ipc.MessageReader.open_stream(pa.BufferReader(whole))
        kinds = [kind_of(bytes(each.metadata)) for each in messages]
        dictionary: list[int | str] = [protocol.DICTIONARY_BATCH, protocol.RECORD_BATCH]
        assert kinds == [protocol.SCHEMA, *(["compressed"] * 2 if chosen else dictionary)]
