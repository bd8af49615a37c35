"""Small Fetch messages: kio, which has the schemas of all versions, is the oracle."""

from __future__ import annotations

import datetime as dt
import io
import random
import uuid
from typing import Any, Final

import pytest
from kio.index import load_request_schema, load_response_schema
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader, entity_writer

from sparklog.broker.kafka import fetch_codec, messages
from sparklog.broker.kafka.times import duration
from sparklog.limits import KAFKA_LITTLE_ITEMS

VERSIONS: Final = range(4, 19)
WITH_LEADERS: Final = 16
NAMES: Final = ("t", "ümlaut", "x" * 249)


def frame(version: int, body: Any, client_id: str | None = "me") -> bytes:
    """A request of that version as a client would send it."""
    target = io.BytesIO()
    schema: Any = body.__header_schema__
    header = schema(
        request_api_key=1, request_api_version=version, correlation_id=7, client_id=client_id
    )
    entity_writer(schema)(target, header)
    entity_writer(type(body))(target, body)
    return target.getvalue()


def request(version: int, at: random.Random, *, partitions: int, topics: int = 1) -> Any:
    """kio's message with random fields, without forgotten topics and tags."""
    fields: dict[str, Any] = {
        "replica_id": -1,
        "max_wait": dt.timedelta(milliseconds=at.randrange(1 << 31)),
        "min_bytes": at.randrange(1 << 31),
        "max_bytes": at.randrange(1 << 31),
        "isolation_level": at.randrange(2),
        "session_id": at.randrange(1 << 31),
        "session_epoch": at.randrange(-1, 1 << 31),
        "topics": [
            {
                "topic": at.choice(NAMES),
                "topic_id": at.choice([None, uuid.UUID(int=at.getrandbits(128))]),
                "partitions": [
                    {
                        "partition": at.randrange(1 << 31),
                        "current_leader_epoch": at.randrange(-1, 1 << 31),
                        "fetch_offset": at.randrange(1 << 63),
                        "last_fetched_epoch": at.randrange(1 << 31),
                        "log_start_offset": at.randrange(1 << 63),
                        "partition_max_bytes": at.randrange(1 << 31),
                    }
                    for _ in range(partitions)
                ],
            }
            for _ in range(topics)
        ],
        "forgotten_topics_data": (),
        "rack_id": at.choice(["", "rack", "r" * 200]),
    }
    return messages._maker(load_request_schema(1, version))(fields)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_small_request_is_read_as_kio_reads_it(version: int) -> None:
    """Each field that is used has kio's value, in each version."""
    at = random.Random(version)
    for count in range(KAFKA_LITTLE_ITEMS):
        body = request(version, at, partitions=count)
        found = fetch_codec.read(frame(version, body), version)
        assert found is not None
        assert (found.items, found.client_id) == (1 + count, "me")
        for name in ("max_wait", "min_bytes", "max_bytes", "isolation_level"):
            assert getattr(found, name) == getattr(body, name)
        for name in ("session_id", "session_epoch"):
            if hasattr(body, name):
                assert getattr(found, name) == getattr(body, name)
        (mine,), (theirs,) = found.topics, body.topics
        name = "topic_id" if version >= 13 else "topic"
        assert getattr(mine, name) == getattr(theirs, name)
        assert not hasattr(mine, "topic" if version >= 13 else "topic_id")
        for one, other in zip(mine.partitions, theirs.partitions, strict=True):
            for field in one._fields:
                expected = -1 if field == "current_leader_epoch" and version < 9 else None
                assert getattr(one, field) == getattr(other, field, expected)


@pytest.mark.parametrize("version", VERSIONS)
def test_other_requests_are_left_to_kio(version: int) -> None:
    """They have many items, forgotten topics or tags, or are cut off."""
    at = random.Random(version)
    assert fetch_codec.read(frame(version, request(version, at, partitions=8)), version) is None
    many = request(version, at, partitions=0, topics=9)
    assert fetch_codec.read(frame(version, many), version) is None
    whole = frame(version, request(version, at, partitions=2), None)
    assert fetch_codec.read(whole, version) is not None
    for end in range(len(whole)):
        assert fetch_codec.read(whole[:end], version) is None, end
    if version >= 12:
        assert fetch_codec.read(whole[:-1] + b"\1\0\0", version) is None


@pytest.mark.parametrize("version", VERSIONS)
def test_damaged_requests_are_read_as_kio_reads_them_or_left_to_it(version: int) -> None:
    """A byte that is changed never gives fields that kio does not see."""
    at = random.Random(version)
    whole = frame(version, request(version, at, partitions=2))
    taken = 0
    for place in range(8, len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << at.randrange(8)
        found = fetch_codec.read(bytes(changed), version)
        if found is not None:
            theirs = messages.read_request(bytes(changed)).body
            assert len(found.topics) == len(theirs.topics)
            assert found.min_bytes == theirs.min_bytes
            taken += 1
    assert taken


def _moved(at: random.Random, version: int) -> dict[str, Any]:
    """The fields of a partition that another broker leads, or none."""
    if version < WITH_LEADERS or at.random() < 0.5:
        return {}
    leader = {"leader_id": at.randrange(1 << 31), "leader_epoch": at.randrange(1 << 31)}
    return {"current_leader": leader}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_response_is_written_as_kio_writes_it(version: int) -> None:
    """Both write the same bytes, for records in small and large chunks, and for none."""
    at = random.Random(version)
    for count in (0, 1, 2, 3, 300):
        sizes = [at.choice([0, 1, 126, 127, 200, 5_000, 20_000]) for _ in range(3)]
        chunks = [at.randbytes(size) for size in sizes]
        fields: dict[str, Any] = {
            "throttle_time": duration(at.choice([0, 1, 600_000])),
            "error_code": ErrorCode.none,
            "session_id": at.randrange(1 << 31),
            "responses": [
                {
                    "topic": at.choice(NAMES),
                    "topic_id": at.choice([None, uuid.UUID(int=at.getrandbits(128))]),
                    "partitions": [
                        {
                            "partition_index": at.randrange(1 << 31),
                            "error_code": ErrorCode.none if at.random() < 0.5 else ErrorCode(3),
                            "high_watermark": at.randrange(-1, 1 << 63),
                            "last_stable_offset": at.randrange(-1, 1 << 63),
                            "log_start_offset": at.randrange(-1, 1 << 63),
                            "aborted_transactions": at.choice([None, ()]),
                            "records": messages.ChunkedBytes(chunks[: at.randrange(4)]),
                        }
                        | _moved(at, version)
                        for _ in range(count)
                    ],
                }
                for _ in range(min(count, 2))
            ],
        }
        if version >= WITH_LEADERS and count > 1:
            fields["node_endpoints"] = [
                {"node_id": n, "host": "h" * n, "port": 9_092, "rack": at.choice([None, "", "r"])}
                for n in (1, 130)
            ]
        reply = messages.FetchReply(fields, count)
        mine = messages.write_reply(1, version, 5, reply)
        theirs = messages.write_reply(1, version, 5, fields)
        assert b"".join(mine) == b"".join(theirs)
        steps = messages.reply_writer(1, version, 5, reply)
        assert isinstance(steps, fetch_codec.Writer)
        assert sum(1 for _ in steps) == count * min(count, 2)
        in_steps = steps.finish()
        assert b"".join(in_steps) == b"".join(theirs)
        large_bytes = sum(len(each) for each in in_steps if any(each is chunk for chunk in chunks))
        assert steps.written_bytes == len(b"".join(theirs)) - large_bytes
        data = b"".join(mine)[4:]
        schema: Any = load_response_schema(1, version)
        _, start = entity_reader(schema.__header_schema__)(data, 0)
        entity_reader(schema)(data, start)
