"""Small Produce responses: kio, which has the schemas of all versions, is the oracle."""

from __future__ import annotations

import random
import uuid
from typing import Any, Final

import pytest
from kio.index import load_response_schema
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader

from sparklog.broker.kafka import messages
from sparklog.broker.kafka.times import duration, moment

VERSIONS: Final = range(3, 14)
NAMES: Final = ("t", "x" * 126, "x" * 127, "x" * 249)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_response_is_written_as_kio_writes_it(version: int) -> None:
    """Both write the same bytes, with and without times of the append and a throttle."""
    at = random.Random(version)
    for count in range(4):
        fields = {
            "throttle_time": duration(at.choice([0, 1, 600_000])),
            "responses": [
                {
                    "name": at.choice(NAMES),
                    "topic_id": at.choice([None, uuid.UUID(int=at.getrandbits(128))]),
                    "partition_responses": [
                        {
                            "index": at.randrange(1 << 31),
                            "error_code": ErrorCode.none,
                            "base_offset": at.randrange(1 << 63),
                            "log_append_time": at.choice([None, moment(at.randrange(1 << 40))]),
                            "log_start_offset": at.randrange(-1, 1 << 63),
                            "record_errors": (),
                            "error_message": None,
                        }
                        for _ in range(count)
                    ],
                }
                for _ in range(min(count, 2))
            ],
        }
        mine = messages.write_reply(0, version, 5, messages.PlainProduceReply(fields))
        theirs = messages.write_reply(0, version, 5, fields)
        assert b"".join(mine) == b"".join(theirs)
        data = b"".join(mine)[4:]
        schema: Any = load_response_schema(0, version)
        _, start = entity_reader(schema.__header_schema__)(data, 0)
        entity_reader(schema)(data, start)
