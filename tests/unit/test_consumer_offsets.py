"""Records of `__consumer_offsets`: Kafka's formats, byte for byte, and back."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog import errors
from sparklog.formats import consumer_offsets
from sparklog.formats.consumer_offsets import (
    CommittedOffset,
    GroupKey,
    GroupRecord,
    MemberRecord,
    OffsetKey,
    committed,
    decode_group,
    decode_key,
    decode_offset,
    encode_group,
    encode_key,
    encode_offset,
)

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
TOPIC_IDS = st.just("") | st.binary(min_size=8, max_size=8).map(bytes.hex)
MEMBERS = st.builds(
    MemberRecord,
    member_id=TEXT,
    instance_id=st.none() | TEXT,
    client_id=TEXT,
    client_host=TEXT,
    rebalance_timeout_ms=INT32,
    session_timeout_ms=INT32,
    subscription=st.binary(max_size=50),
    assignment=st.binary(max_size=50),
)


@pytest.mark.parametrize(
    ("group", "hashed"),
    [
        ("", 0),
        ("abc", 96_354),
        ("my-group", 1_906_497_762),  # a negative one
        ("polygenelubricants", 0),  # Integer.MIN_VALUE, which has no absolute value
        ("\N{PILE OF POO}", 1_772_556),  # two of Java's chars
    ],
)
def test_a_group_has_the_partition_that_kafka_gives_it(group: str, hashed: int) -> None:
    """By `Utils.abs(String.hashCode())`; the numbers are Java's."""
    assert consumer_offsets.partition_of(group, 2**31) == hashed
    assert consumer_offsets.partition_of(group, 8) == hashed % 8


def test_names_fit_up_to_an_int16_of_bytes() -> None:
    """In UTF-8."""
    assert consumer_offsets.fits(None)
    assert consumer_offsets.fits("")
    for longest in ("x" * 32_767, "ä" * 16_383 + "x"):
        assert consumer_offsets.fits(longest)
        assert decode_key(encode_key(GroupKey(longest))) == GroupKey(longest)
        assert not consumer_offsets.fits(longest + "x")


def test_no_group_has_a_name_that_does_not_fit() -> None:
    """A batch without offsets has no records, which is not an error."""
    rows = pa.record_batch({"key": pa.array([encode_key(GroupKey("g"))], pa.binary())})
    assert consumer_offsets.of_group(rows, "g" * 32_768).num_rows == 0


@given(groups=st.lists(TEXT, max_size=8), wanted=TEXT)
def test_a_group_s_records_are_told_from_others(groups: list[str], wanted: str) -> None:
    """Also from those of a group whose name begins alike, and from no record of a group."""
    keys = [encode_key(OffsetKey(each, "t", 0)) for each in groups]
    keys += [encode_key(GroupKey(each)) for each in groups]
    given_keys = pa.array([*keys, b"", None, b"\0\3\0\1g"], pa.binary())
    found = consumer_offsets.of_group(pa.record_batch({"key": given_keys}), wanted)
    times = groups.count(wanted)
    expected = [encode_key(OffsetKey(wanted, "t", 0))] * times
    expected += [encode_key(GroupKey(wanted))] * times
    assert found.column("key").to_pylist() == expected


def test_bytes_are_those_of_kafka() -> None:
    """Written by hand from the message definitions of Kafka 4.1."""
    assert encode_key(OffsetKey("g", "to", 3)) == b"\0\1\0\1g\0\2to\0\0\0\3"
    assert encode_key(GroupKey("gr")) == b"\0\2\0\2gr"
    value = CommittedOffset(offset=5, leader_epoch=2, metadata="m", commit_ms=9)
    assert (
        encode_offset(value) == struct.pack(">hqi", 4, 5, 2) + b"\2m" + struct.pack(">q", 9) + b"\0"
    )
    member = MemberRecord(
        member_id="a",
        instance_id=None,
        client_id="c",
        client_host="/h",
        rebalance_timeout_ms=7,
        session_timeout_ms=6,
        subscription=b"s",
        assignment=b"",
    )
    record = GroupRecord(
        generation=4, protocol_type="consumer", protocol="range", leader="a", members=(member,)
    )
    assert encode_group(record, 11) == b"".join(
        (
            b"\0\3\0\x08consumer\0\0\0\4\0\5range\0\1a",
            struct.pack(">qi", 11, 1),
            b"\0\1a\xff\xff\0\1c\0\2/h\0\0\0\7\0\0\0\6\0\0\0\1s\0\0\0\0",
        )
    )


@pytest.mark.parametrize(
    ("version", "rest"),
    [
        (0, struct.pack(">q", 5) + b"\0\1m" + struct.pack(">q", 9)),
        (1, struct.pack(">q", 5) + b"\0\1m" + struct.pack(">qq", 9, 10)),
        (2, struct.pack(">q", 5) + b"\0\1m" + struct.pack(">q", 9)),
        (3, struct.pack(">qi", 5, 2) + b"\0\1m" + struct.pack(">q", 9)),
    ],
)
def test_older_versions_are_read(version: int, rest: bytes) -> None:
    """As far back as Kafka's own go: a topic may have been copied over."""
    found = decode_offset(struct.pack(">h", version) + rest)
    epoch = 2 if version == 3 else -1
    assert found == CommittedOffset(offset=5, leader_epoch=epoch, metadata="m", commit_ms=9)


@given(
    st.builds(
        CommittedOffset,
        offset=INT64,
        leader_epoch=INT32,
        metadata=st.text(st.characters(codec="utf-8"), max_size=300),
        commit_ms=INT64,
        topic_id=TOPIC_IDS,
    )
)
def test_an_offset_comes_back(value: CommittedOffset) -> None:
    """Any unknown version is refused."""
    assert decode_offset(encode_offset(value)) == value


def test_strange_tags_of_an_offset_are_passed_over() -> None:
    """Newer brokers may add some, which version 4 allows for."""
    value = CommittedOffset(offset=5, commit_ms=9, topic_id="00" * 7 + "07")
    data = encode_offset(value)
    tagged = data[: -(1 + 1 + 1 + 16)] + b"\2" + data[-18:] + b"\5\3abc"
    assert decode_offset(tagged) == value


@given(st.builds(OffsetKey, TEXT, TEXT, INT32) | st.builds(GroupKey, TEXT))
def test_a_key_comes_back(key: OffsetKey | GroupKey) -> None:
    """Any unknown key type is refused."""
    assert decode_key(encode_key(key)) == key


def test_a_key_of_another_kind_is_none_of_ours() -> None:
    """Kafka's newer groups keep some (KIP-848)."""
    assert decode_key(b"\0\3\0\1g") is None


@given(
    st.none() | TEXT.filter(bool),
    st.none() | TEXT,
    st.none() | TEXT,
    INT32,
    INT64,
    st.lists(MEMBERS, max_size=4).map(tuple),
)
def test_a_group_comes_back(
    protocol_type: str | None,
    protocol: str | None,
    leader: str | None,
    generation: int,
    state_ms: int,
    members: tuple[MemberRecord, ...],
) -> None:
    """With its members and their bytes."""
    record = GroupRecord(
        generation=generation,
        protocol_type=protocol_type,
        protocol=protocol,
        leader=leader,
        members=members,
    )
    found, at_ms = decode_group(encode_group(record, state_ms))
    assert at_ms == state_ms
    for name in record.__struct_fields__:
        assert getattr(found, name) == getattr(record, name)


@given(st.binary(max_size=40))
def test_other_bytes_are_refused_by_name(data: bytes) -> None:
    """Nothing else comes of them."""
    for decode in (decode_key, decode_offset, decode_group, consumer_offsets.subscribed_topics):
        with contextlib.suppress(errors.CorruptRecord):
            decode(data)


def test_topics_of_a_subscription() -> None:
    """Decodes a value of version 1, with more fields after them."""
    data = b"\0\1\0\0\0\2\0\1a\0\2bb\xff\xff\xff\xff\0\0\0\0"
    assert consumer_offsets.subscribed_topics(data) == ["a", "bb"]


def rows(*records: tuple[int, int, bytes, bytes | None]) -> pa.Table:
    """(partition, offset, key, value) each."""
    columns: list[Any] = list(zip(*records, strict=True)) or [[], [], [], []]
    types = {
        "partition": pa.int32(),
        "offset": pa.int64(),
        "key": pa.binary(),
        "value": pa.binary(),
    }
    return pa.table(
        {name: pa.array(column, types[name]) for name, column in zip(types, columns, strict=True)}
    )


def test_the_last_record_of_a_key_is_what_is_committed() -> None:
    """In whatever order the rows come; a key without a value is gone."""
    first, second = OffsetKey("g", "t", 0), OffsetKey("g", "t", 1)
    old, new = CommittedOffset(offset=1, commit_ms=1), CommittedOffset(offset=2, commit_ms=2)
    table = rows(
        (0, 8, encode_key(first), encode_offset(new)),
        (0, 7, encode_key(first), encode_offset(old)),
        (0, 3, encode_key(second), encode_offset(old)),
        (0, 9, encode_key(second), None),
        (0, 4, encode_key(GroupKey("g")), b"whatever"),
    )
    (found,) = committed(table).to_pylist()
    assert (found["group"], found["topic"], found["partition"], found["offset"]) == ("g", "t", 0, 2)
    assert committed(rows()).num_rows == 0
