"""Kafka's messages: frames, versions, and error codes."""

from __future__ import annotations

import dataclasses
import io
import random
import struct
import uuid
from types import SimpleNamespace
from typing import Any, get_args, get_origin
from unittest import mock

import pytest
from kio.index import load_request_schema, load_response_schema
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader, entity_writer

from sparklog import errors, limits
from sparklog.broker.kafka import apis, messages, topics
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.registry import APIS
from sparklog.broker.kafka.times import NO_TIME, moment

SERVED = [
    (api, version)
    for api in APIS.values()
    for version in range(api.min_version, api.max_version + 1)
]


def frame(api_key: int, version: int, body: Any) -> bytes:
    """A request as a client would send it."""
    target = io.BytesIO()
    schema: Any = body.__header_schema__
    known = {field.name for field in dataclasses.fields(schema)}
    given = {
        "request_api_key": api_key,
        "request_api_version": version,
        "correlation_id": 7,
        "client_id": "me",
    }
    header = schema(**{name: value for name, value in given.items() if name in known})
    entity_writer(schema)(target, header)
    entity_writer(type(body))(target, body)
    return target.getvalue()


@pytest.mark.parametrize("version", range(14))
def test_a_request_is_read_in_every_version(version: int) -> None:
    """Header and body, of the old encodings and of the flexible ones."""
    schema: Any = load_request_schema(3, version)
    kinds = {field.name for field in dataclasses.fields(schema)}
    rest = {"include_topic_authorized_operations": False} if version >= 8 else {}
    if version in (8, 9, 10):
        rest["include_cluster_authorized_operations"] = False
    body = schema(topics=(), **{name: value for name, value in rest.items() if name in kinds})
    found = messages.read_request(frame(3, version, body))
    assert (found.api_key, found.version, found.correlation_id) == (3, version, 7)
    assert (found.client_id, found.body) == ("me", body)
    # librdkafka sends some bytes more, now and then, and Kafka takes no offence.
    assert messages.read_request(frame(3, version, body) + b"more").body == body


def test_api_versions_returns_the_registered_apis() -> None:
    """kio reads the reply in every version."""
    for version in range(5):
        fields = apis.api_versions.answer(ErrorCode.none)
        assert fields is not None
        reply = b"".join(messages.write_reply(18, version, 5, fields))
        assert int.from_bytes(reply[:4], "big") == len(reply) - 4
        schema: Any = load_response_schema(18, version)
        _, size = entity_reader(schema.__header_schema__)(reply, 4)
        body: Any = entity_reader(schema)(reply, 4 + size)[0]
        told = {each.api_key: (each.min_version, each.max_version) for each in body.api_keys}
        served = {api.key: (api.min_version, api.max_version) for api in APIS.values()}
        assert told == served | {0: (0, served[0][1])}
    for api, version in SERVED:
        load_request_schema(api.key, version)
        load_response_schema(api.key, version)


def test_a_reply_takes_the_shape_of_its_version() -> None:
    """Fields that a version lacks are left out, nested ones too; a null stays null."""
    fields = {
        "throttle_time": NO_TIME,
        "brokers": [{"node_id": 1, "host": "h", "port": 9, "rack": None}],
        "cluster_id": None,
        "controller_id": 1,
        "topics": [
            {
                "error_code": ErrorCode.none,
                "name": "t",
                "topic_id": uuid.UUID(int=5),
                "is_internal": False,
                "partitions": (),
            }
        ],
        "error_code": ErrorCode.none,
    }
    for version in range(14):
        reply = b"".join(messages.write_reply(3, version, 5, fields))
        schema: Any = load_response_schema(3, version)
        _, size = entity_reader(schema.__header_schema__)(reply, 4)
        body: Any = entity_reader(schema)(reply, 4 + size)[0]
        assert body.topics[0].name == "t"
        assert hasattr(body.topics[0], "topic_id") is (version >= 10)


def test_bytes_that_make_no_sense_are_refused() -> None:
    """Any prefix and any mutation of a request is refused by one error, or read as another."""
    schema: Any = load_request_schema(1, 12)
    topic: Any = schema.__dataclass_fields__["topics"].type.__args__[0]
    partition: Any = topic.__dataclass_fields__["partitions"].type.__args__[0]
    wanted = partition(partition=0, fetch_offset=5, partition_max_bytes=9)
    body = schema(
        max_wait=NO_TIME,
        min_bytes=1,
        topics=(topic(topic="t", partitions=(wanted,)),),
        forgotten_topics_data=(),
    )
    whole = frame(1, 12, body)
    chance = random.Random(1)
    for end in range(len(whole)):
        with pytest.raises(errors.BadRequest):
            messages.read_request(whole[:end])
    for _ in range(5_000):
        octets = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            octets[chance.randrange(8, len(octets))] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
        try:
            messages.read_request(bytes(octets))
        except errors.BadRequest:
            continue


def test_every_error_has_a_code() -> None:
    """Kafka's code for each error has the same meaning for a client: retry, fix or stop."""
    kinds = [errors.SparklogError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    for kind in set(kinds[1:]) - {errors.UnexpectedError}:
        error = kind.__new__(kind)
        code = code_of(error)
        assert code is not ErrorCode.unknown_server_error, kind
        if issubclass(kind, errors.Retriable):
            assert code.retriable or kind.code == errors.BrokerUnavailable.code, kind
    assert code_of(RuntimeError()) is ErrorCode.unknown_server_error


def test_topic_ids_go_there_and_back() -> None:
    """Ours are half of Kafka's."""
    known = {"00ff00ff00ff00ff": "t"}

    core: Any = SimpleNamespace(partitions=SimpleNamespace(topic_of=known.get))
    wanted = topics.kafka_id("00ff00ff00ff00ff")
    assert topics.topic_name_of_id(core, wanted) == "t"
    for stranger in (None, uuid.UUID(int=5), topics.kafka_id("00ff00ff00ff00fe")):
        with pytest.raises(errors.TopicChanged):
            topics.topic_name_of_id(core, stranger)


@pytest.mark.parametrize(
    ("version", "count"),
    [(2, b"\xff\xff\xff\xff\x0f"), (0, b"\x7f\xff\xff\xff"), (2, b"\xff\xff\xff\x0f")],
)
def test_an_array_that_says_it_is_huge_is_refused(version: int, count: bytes) -> None:
    """Before anybody makes room: for billions of items there is none, and kio would end us."""
    flexible = b"\0" if version == 2 else b""
    frame = struct.pack(">hhi", 42, version, 7) + b"\0\1c" + flexible + count + b"\2g\0"
    with pytest.raises(errors.BadRequest, match=r"items in \d+ bytes"):
        messages.read_request(frame)


def test_too_many_items_are_refused() -> None:
    """Each item would cost many times its one byte."""
    count = limits.KAFKA_ITEMS + 1
    names = b"\0\0" * count
    frame = struct.pack(">hhi", 42, 0, 7) + b"\0\1c" + struct.pack(">i", count) + names
    with pytest.raises(errors.BadRequest, match="the limit is"):
        messages.read_request(frame)
    frame = struct.pack(">hhi", 42, 0, 7) + b"\0\1c" + struct.pack(">i", count - 1) + names[2:]
    assert len(messages.read_request(frame).body.groups_names) == limits.KAFKA_ITEMS


def test_unknown_tags_are_skipped() -> None:
    """Newer clients may send tags that the schema does not have (KIP-482)."""
    start = struct.pack(">hhi", 18, 3, 7) + b"\0\1c"
    tags = b"\1\x63\2ab"
    frame = start + tags + b"\5name\4v.1" + tags
    found = messages.read_request(frame)
    assert (found.body.client_software_name, found.body.client_software_version) == ("name", "v.1")


# ------------------------------------------------------------------------------ large replies


def some(chance: random.Random, kind: Any, field: Any, *, is_item: bool = False) -> Any:
    """A value that a field of that type may have; for messages a mapping, for arrays some items."""
    inner = next((each for each in get_args(kind) if each is not type(None)), kind)
    if get_origin(kind) is not tuple and get_args(kind) and chance.random() < 0.3:
        return None
    if get_origin(kind) is tuple or get_origin(inner) is tuple:
        item = get_args(kind if get_origin(kind) is tuple else inner)[0]
        return [some(chance, item, field, is_item=True) for _ in range(chance.randrange(4))]
    if messages._is_schema(inner):
        return some_fields(chance, inner)
    match field.metadata["kafka_type"]:
        case "string":
            return "x" * chance.randrange(9)
        case "bytes" | "records":
            return b"x" * chance.randrange(9)
        case "uuid":
            return uuid.UUID(int=chance.getrandbits(128))
        case "bool":
            return chance.random() < 0.5
        case "error_code":
            return ErrorCode.none
        case "timedelta_i32" | "timedelta_i64":
            return NO_TIME
        case "datetime_i64":
            return moment(chance.randrange(1 << 40))
        case "float64":
            return 0.5
        case _:
            return chance.randrange(100)


def some_fields(chance: random.Random, schema: Any) -> dict[str, Any]:
    """Values for the fields of a message, and for some of its tagged fields."""
    found = {}
    for each in dataclasses.fields(schema):
        value = some(chance, each.type, each)
        if "tag" not in each.metadata or (value and chance.random() < 0.5):
            found[each.name] = value
    return found


def test_a_reply_in_steps_has_the_same_bytes() -> None:
    """This holds for each API in each version, with random fields."""
    chance, steps = random.Random(5), 0
    for api, version in SERVED:
        schema: Any = load_response_schema(api.key, version)
        for _ in range(3):
            fields = some_fields(chance, schema)
            writing = messages.ReplyWriter(api.key, version, 5, fields)
            steps += sum(1 for _ in writing)
            written = messages.write_reply(api.key, version, 5, fields)
            assert b"".join(writing.finish()) == b"".join(written), (api.name, version)
            assert writing.written_bytes == sum(map(len, written))
    assert steps > 1_000


def test_items_of_a_large_reply_are_made_one_by_one() -> None:
    """Also within others; and to find out that it is large, no more are made than that takes."""
    made = 0

    def item(number: int) -> dict[str, Any]:
        nonlocal made
        made += 1
        return {"name": f"{number}", "partitions": messages.LazyArray(lambda _: {}, range(1_000))}

    reply = {"topics": messages.LazyArray(item, range(100)), "throttle_time": NO_TIME}
    assert messages.is_large(reply, 500)
    assert made <= 1
    assert not messages.is_large({"topics": messages.LazyArray(dict, [()] * 500)}, 500)
    assert messages.is_large({"topics": [{"x": [1] * 400}, {"x": (1,) * 99}]}, 500)
    assert not messages.is_large({"topics": [{"x": [1] * 400}, {"x": (1,) * 98}]}, 500)
    # Items within the last allowed item count too.
    assert messages.is_large({"topics": messages.LazyArray(item, range(500))}, 500)
    assert messages.is_large({"topics": [{"x": [1] * 498}, {"x": [1]}]}, 500)
    assert messages.is_large({"some": [1] * 500, "more": [1]}, 500)


def test_of_slow_items_no_two_are_made_in_one_go() -> None:
    """Nor one to find out how much there is in it."""
    make = mock.Mock(return_value={"a": 1})
    assert messages.is_large({"items": messages.LazyArray(make, (1, 2), is_slow=True)}, 100)
    assert messages.is_large({"items": messages.LazyArray(make, (1,), is_slow=True)}, 100)
    make.assert_not_called()
    assert not messages.is_large({"items": messages.LazyArray(make, (), is_slow=True)}, 100)
    assert not messages.is_large({"items": messages.LazyArray(make, (1, 2))}, 100)
