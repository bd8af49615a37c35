"""Requests of Kafka's protocol as frames, and the few parts of their responses that are checked."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any, Final

from tests.support.batches import Record, built
from tests.support.kafkas import SECONDS, Frames

PRODUCE: Final = 0
CREATE_TOPICS: Final = 19
INIT_PRODUCER_ID: Final = 22
TIMEOUT: Final = dt.timedelta(seconds=SECONDS)
AT_MS: Final = 1_700_000_000_000


def batch(values: Sequence[bytes], codec: int = 0, **producer_sequence: int) -> bytes:
    """A batch of records without keys; `producer_sequence` is passed to `batches.built`."""
    return built([Record(AT_MS, None, value) for value in values], codec, **producer_sequence)


def produce_fields(topic: str, partition: int, records: bytes | None) -> dict[str, Any]:
    """Fields of Produce with acks=all, in the versions without topic ids."""
    data = {"index": partition, "records": records}
    return {
        "transactional_id": None,
        "acks": -1,
        "timeout": TIMEOUT,
        "topic_data": [{"name": topic, "partition_data": [data]}],
    }


def produce(frames: Frames, topic: str, partition: int, records: bytes | None) -> Any:
    """Produces, and returns the response for the only partition."""
    reply = frames.ask(PRODUCE, 9, produce_fields(topic, partition, records))
    ((found,),) = (each.partition_responses for each in reply.responses)
    return found


def fetch_fields(
    topic: str, partition: int, offset: int, max_bytes: int = 1 << 20
) -> dict[str, Any]:
    """Fields of Fetch from an offset on, in the versions without topic ids."""
    place = {"partition": partition, "fetch_offset": offset, "partition_max_bytes": max_bytes}
    return {
        "replica_id": -1,
        "max_wait": dt.timedelta(seconds=1),
        "min_bytes": 1,
        "max_bytes": max_bytes,
        "isolation_level": 0,
        "topics": [{"topic": topic, "partitions": [place]}],
    }


def new_producer(frames: Frames) -> Any:
    """Sends InitProducerId without a transactional id."""
    wanted = {"transactional_id": None, "transaction_timeout": TIMEOUT}
    return frames.ask(INIT_PRODUCER_ID, 4, wanted)


def create_fields(topic: str, partitions: int = 1, **more: Any) -> dict[str, Any]:
    """Fields of CreateTopics for one topic."""
    wanted = {
        "name": topic,
        "num_partitions": partitions,
        "replication_factor": 1,
        "assignments": (),
        "configs": (),
    }
    return {"topics": [wanted | more], "timeout": TIMEOUT, "validate_only": False}


def create(frames: Frames, topic: str, partitions: int = 1) -> None:
    """Creates a topic that does not exist."""
    (found,) = frames.ask(CREATE_TOPICS, 7, create_fields(topic, partitions)).topics
    assert found.error_code == 0, found.error_message


def commit_fields(group: str, topic: str, partition: int, offset: int) -> dict[str, Any]:
    """Fields of OffsetCommit for a group without members, in versions 7 and 8."""
    place = {
        "partition_index": partition,
        "committed_offset": offset,
        "committed_leader_epoch": -1,
        "committed_metadata": "",
    }
    return {
        "group_id": group,
        "generation_id_or_member_epoch": -1,
        "member_id": "",
        "group_instance_id": None,
        "topics": [{"name": topic, "partitions": [place]}],
    }
