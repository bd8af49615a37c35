"""Names and ids of topics on Kafka's wire."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any, Final

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.core import INTERNAL_TOPICS, Core, Place
from sparklog.broker.kafka.messages import Fields

_PREFIX: Final = b"sparklog"
"""Our ids have 8 bytes; Kafka's are UUIDs, of which these are the first half."""


def kafka_id(topic_id: str) -> uuid.UUID:
    """The id as Kafka has it."""
    return uuid.UUID(bytes=_PREFIX + bytes.fromhex(topic_id))


def name_of(core: Core, topic: Any) -> str:
    """The name of the topic that a message means, by name or, in newer versions, by id.

    Raises `TopicChanged` for an id that no living topic has.
    """
    for field in ("name", "topic"):
        if hasattr(topic, field):
            return str(getattr(topic, field))
    return name_of_id(core, topic.topic_id)


def name_of_id(core: Core, topic_id: uuid.UUID | None) -> str:
    """The same by the id alone."""
    octets = topic_id.bytes if topic_id is not None else bytes(16)
    prefix, ours = octets[: len(_PREFIX)], octets[len(_PREFIX) :]
    found = core.topic_of(ours.hex()) if prefix == _PREFIX else None
    if found is None:
        raise errors.TopicChanged(topic=str(topic_id), expected=octets.hex(), found=None)
    return found


def check_brokers(name: str, assignments: Iterable[Any]) -> None:
    """Raises `BadAssignment` where a partition has no brokers, or one twice.

    Who leads what is for the brokers to agree on; an assignment must make sense, though.
    """
    for each in assignments:
        brokers = list(each.broker_ids)
        if not brokers or len(set(brokers)) < len(brokers):
            raise errors.BadAssignment(topic=name, reason=f"brokers {brokers} for a partition")


def described(core: Core, name: str, places: Iterable[Place], *, first: int = 0) -> Fields:
    """What an answer says of a topic, and of its partitions from `first` on, which `places` are."""
    return {
        "error_code": ErrorCode.none,
        "name": name,
        "topic_id": kafka_id(core.id_of(name)),
        "is_internal": name in INTERNAL_TOPICS,
        "partitions": [
            {
                "error_code": ErrorCode.none,
                "partition_index": number,
                "leader_id": place.leader,
                "leader_epoch": place.leader_epoch,
                "replica_nodes": (place.leader,),
                "isr_nodes": (place.leader,),
                "eligible_leader_replicas": (),
                "last_known_elr": (),
                "offline_replicas": (),
            }
            for number, place in enumerate(places, first)
        ],
    }


def named(topic: Any) -> dict[str, Any]:
    """What an answer says of it, by as many names as the request did."""
    return {
        field: getattr(topic, field)
        for field in ("name", "topic", "topic_id")
        if hasattr(topic, field)
    }
