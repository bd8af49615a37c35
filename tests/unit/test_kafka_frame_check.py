"""The look over a request's lengths agrees with kio, which reads it after that."""

from __future__ import annotations

import dataclasses
import datetime as dt
import io
import random
from typing import Any

import pytest
from kio.index import load_request_schema
from kio.schema.index import api_key_map, schema_name_map
from kio.serial import entity_reader, entity_writer
from kio.static.constants import EntityType

from sparklog import errors, limits
from sparklog.broker.kafka.frame_check import ManyItems, checked
from tests.support.kafkamessages import message

REQUESTS = [
    (key, version)
    for key, name in sorted(api_key_map.items())
    for version, kinds in schema_name_map[name].items()
    if EntityType.request in kinds
]


def written(entity: Any) -> bytes:
    """The message as kio writes it."""
    target = io.BytesIO()
    entity_writer(type(entity))(target, entity)
    return target.getvalue()


def header_of(schema: Any) -> tuple[Any, bytes]:
    """A request's header: its type, and one."""
    kind = schema.__header_schema__
    names = {field.name for field in dataclasses.fields(kind)}
    given = {
        "request_api_key": schema.__api_key__,
        "request_api_version": schema.__version__,
        "correlation_id": 7,
        "client_id": "me",
    }
    return kind, written(kind(**{name: given[name] for name in names}))


def items_in(value: Any) -> int:
    """Items of the arrays in a message, and its tagged fields, within others too."""
    if isinstance(value, tuple):
        return len(value) + sum(map(items_in, value))
    if not dataclasses.is_dataclass(value):
        return 0
    fields = dataclasses.fields(value)
    tagged = [each for each in fields if "tag" in each.metadata]
    told = sum(1 for each in tagged if getattr(value, each.name) != each.default)
    return told + sum(items_in(getattr(value, each.name)) for each in fields)


@pytest.mark.parametrize("seed", range(6))
def test_a_request_that_kio_writes_is_as_long_as_its_lengths_say(seed: int) -> None:
    """Each kind in each version, also of those that are not served; a byte less is too few."""
    for key, version in REQUESTS:
        schema: Any = load_request_schema(key, version)
        chance = random.Random(f"{seed} {key} {version}")
        request = message(schema, chance)
        kind, header = header_of(schema)
        data = header + written(request)
        items = items_in(request)
        assert checked(data, kind, schema) == (data, items), request
        assert checked(data, kind, schema, most_items=items) == (data, items)
        assert checked(data + b"more", kind, schema) == (data + b"more", items)
        with pytest.raises(errors.BadRequest):
            checked(data[:-1], kind, schema)
        if items:
            with pytest.raises(ManyItems):
                checked(data, kind, schema, most_items=items - 1)


@pytest.mark.parametrize("is_there", [0, 1, 2, 127, 128, 254])
def test_a_message_within_another_is_looked_over_wherever_kio_reads_one(is_there: int) -> None:
    """Kafka writes 1 before it and -1 in the place of none; kio reads one behind any other byte."""
    schema: Any = load_request_schema(75, 0)
    topics = schema(topics=(), response_partition_limit=5, cursor=None)
    kind, header = header_of(schema)
    before = header + written(topics)[:-2]
    cursor = b"\2t" + (7).to_bytes(4, "big") + b"\0"
    data = before + bytes([is_there]) + cursor + b"\0"
    found, size = entity_reader(schema)(data, len(header))
    assert (found.cursor.partition_index, size) == (7, len(data) - len(header))
    assert checked(data, kind, schema).data == data
    with pytest.raises(errors.BadRequest):
        checked(data[:-1], kind, schema)


@pytest.mark.parametrize("size", [0, 200, 0x7FFF])
@pytest.mark.parametrize("batch_bytes", [0, 200, 40_000, 9 << 20, 17 << 20])
def test_long_values_are_as_long_as_they_say(size: int, batch_bytes: int) -> None:
    """Names up to the longest that there can be, and batches of many megabytes."""
    schema: Any = load_request_schema(0, 7)
    topic: Any = schema.__dataclass_fields__["topic_data"].type.__args__[0]
    partition: Any = topic.__dataclass_fields__["partition_data"].type.__args__[0]
    data = partition(index=0, records=bytes(batch_bytes))
    request = schema(
        transactional_id="x" * size,
        acks=1,
        timeout=dt.timedelta(seconds=1),
        topic_data=(topic(name="t", partition_data=(data,)),),
    )
    kind, header = header_of(schema)
    frame = header + written(request)
    assert checked(frame, kind, schema) == (frame, 2)
    with pytest.raises(errors.BadRequest):
        checked(frame[:-1], kind, schema)


CLUSTER = b"\0\2" + b"\2c"
"""A tag that a Fetch may have: its number, the length of its value, and that."""
REPLICA = b"\1\x0d" + (5).to_bytes(4, "big") + (6).to_bytes(8, "big") + b"\0"
"""Another, which ends with tags of its own."""
UNKNOWN = b"\x63\2ab"


def fetch(*tags: bytes) -> tuple[bytes, Any, Any]:
    """Returns a Fetch request with those tags, its header and its schema."""
    schema: Any = load_request_schema(1, 17)
    usual = {
        field.name: field.default for field in dataclasses.fields(schema) if "tag" in field.metadata
    }
    request = dataclasses.replace(message(schema, random.Random(1)), **usual)
    kind, header = header_of(schema)
    data = header + written(request)
    assert data[-1] == 0
    return data[:-1] + bytes([len(tags)]) + b"".join(tags), kind, schema


@pytest.mark.parametrize(
    "tags",
    [
        (UNKNOWN,),
        (UNKNOWN, CLUSTER, REPLICA),
        (CLUSTER, UNKNOWN, REPLICA),
        (CLUSTER, REPLICA, UNKNOWN, UNKNOWN),
    ],
)
def test_unknown_tags_are_removed_and_known_ones_stay(tags: tuple[bytes, ...]) -> None:
    """kio reads the request as if a newer client had not sent the unknown tags."""
    known, kind, schema = fetch(*(tag for tag in tags if tag is not UNKNOWN))
    data, _, _ = fetch(*tags)
    assert checked(data, kind, schema).data == known
    assert checked(data + b"more", kind, schema).data == known + b"more"
    entity_reader(schema)(known, len(header_of(schema)[1]))


def test_unknown_tags_within_a_tag_are_refused() -> None:
    """They cannot be removed without changing the length of the tag around them."""
    longer = REPLICA[:1] + bytes([REPLICA[1] + len(UNKNOWN)]) + REPLICA[2:-1] + b"\1" + UNKNOWN
    data, kind, schema = fetch(CLUSTER, longer)
    with pytest.raises(errors.BadRequest, match="unknown tags within"):
        checked(data, kind, schema)


def test_more_tags_than_there_are_bytes_are_refused() -> None:
    """The count is checked before the tags are read."""
    data, kind, schema = fetch()
    with pytest.raises(errors.BadRequest, match=r"items in \d+ bytes"):
        checked(data[:-1] + b"\x09" + b"\x63\0" * 4, kind, schema)
    with pytest.raises(errors.BadRequest, match="does not begin a varint"):
        checked(data[:-1] + b"\x08" + b"\x63\0" * 4, kind, schema)


def test_as_many_tags_as_a_request_may_have_items_are_taken() -> None:
    """One more is refused."""
    data, kind, schema = fetch()
    for count, is_taken in ((limits.KAFKA_ITEMS, True), (limits.KAFKA_ITEMS + 1, False)):
        octets = [count & 0x7F | 0x80, count >> 7 & 0x7F | 0x80, count >> 14]
        tags = bytes(octets) + b"\x63\0" * count
        if is_taken:
            assert checked(data[:-1] + tags, kind, schema, most_items=count + 9).data[-1] == 0
        else:
            with pytest.raises(errors.BadRequest, match="the limit is"):
                checked(data[:-1] + tags, kind, schema, most_items=count + 9)
