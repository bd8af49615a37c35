"""Topics in Kafka's messages: their names, their ids and the descriptions of their partitions."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.broker import INTERNAL_TOPICS, Broker, PartitionStatus
from sparklog.broker.kafka.messages import Fields, LazyArray
from sparklog.listeners import Listener

_PREFIX: Final = b"sparklog"
"""The first half of each UUID. sparklog's topic ids, 8 bytes long, are the second half."""


def kafka_id(topic_id: str) -> uuid.UUID:
    """Returns a topic id as the UUID used in Kafka's messages."""
    return uuid.UUID(bytes=_PREFIX + bytes.fromhex(topic_id))


def topic_name(broker: Broker, topic: Any) -> str:
    """Returns the name of a topic in a message that has its name or, in newer versions, its id.

    Raises `TopicChanged` if no topic has that id.
    """
    for field in ("name", "topic"):
        if hasattr(topic, field):
            return str(getattr(topic, field))
    return topic_name_of_id(broker, topic.topic_id)


def topic_name_of_id(broker: Broker, topic_id: uuid.UUID | None) -> str:
    """Returns the name of the topic with that id. Raises `TopicChanged` if no topic has it."""
    name = known_name(broker, topic_id)
    if name is None:
        raise unknown_id(topic_id)
    return name


def known_name(broker: Broker, topic_id: uuid.UUID | None) -> str | None:
    """Returns the name of the topic with that id; None if no topic has it."""
    octets = _octets(topic_id)
    prefix, own_id = octets[: len(_PREFIX)], octets[len(_PREFIX) :]
    return broker.partitions.topic_of(own_id.hex()) if prefix == _PREFIX else None


def unknown_id(topic_id: uuid.UUID | None) -> errors.TopicChanged:
    """Returns the error for an id that no topic has."""
    octets = _octets(topic_id)
    return errors.TopicChanged(topic=str(topic_id), expected=octets.hex(), found=None)


def _octets(topic_id: uuid.UUID | None) -> bytes:
    return topic_id.bytes if topic_id is not None else bytes(16)


def check_assignment(name: str, assignments: Iterable[Sequence[int]]) -> None:
    """Raises `BadAssignment` if a partition is assigned no broker, or the same one twice.

    The brokers agree on leaders among themselves, so valid assignments have no further effect.
    """
    for each in assignments:
        if not each or len(set(each)) < len(each):
            raise errors.BadAssignment(topic=name, reason=f"brokers {list(each)} for a partition")


def partition_status(broker: Broker, name: str, number: int) -> PartitionStatus:
    """Returns the status of one partition. Raises `UnknownTopic` and `UnknownPartition`."""
    statuses = broker.partitions.statuses(name)
    if not 0 <= number < len(statuses):
        raise errors.UnknownPartition(topic=name, partition=number, last=len(statuses) - 1)
    return statuses[number]


def topic_fields(
    broker: Broker,
    name: str,
    statuses: Sequence[PartitionStatus],
    listener: Listener,
    *,
    first: int = 0,
) -> Fields:
    """Returns the fields of a topic in Metadata and DescribeTopicPartitions.

    Args:
        listener: the listener of the client: a leader without one of that name is not available.
        statuses: those of the partitions from `first` on.
    """

    members = broker.members.up()

    def partition(index: int) -> Fields:
        status = statuses[index]
        leader = members.get(status.leader)
        is_up = leader is not None
        if leader is None:
            code = ErrorCode.leader_not_available
        elif status.leader == broker.broker_id or leader.kafka_at(listener.name):
            code = ErrorCode.none
        else:
            code = ErrorCode.listener_not_found
        return {
            "error_code": code,
            "partition_index": first + index,
            "leader_id": status.leader if code is ErrorCode.none else -1,
            "leader_epoch": status.leader_epoch,
            "replica_nodes": (status.leader,),
            "isr_nodes": (status.leader,),
            "eligible_leader_replicas": (),
            "last_known_elr": (),
            "offline_replicas": () if is_up else (status.leader,),
        }

    return {
        "error_code": ErrorCode.none,
        "name": name,
        "topic_id": kafka_id(broker.partitions.id_of(name)),
        "is_internal": name in INTERNAL_TOPICS,
        "partitions": LazyArray(partition, range(len(statuses))),
    }


def identity_fields(topic: Any) -> dict[str, Any]:
    """Returns whichever of the fields name, topic and topic_id the request's topic has."""
    return {
        field: getattr(topic, field)
        for field in ("name", "topic", "topic_id")
        if hasattr(topic, field)
    }


class Node(NamedTuple):
    """A broker, as Kafka's clients see it."""

    broker: int
    host: str
    port: int
    rack: str | None


def nodes(broker: Broker, listener: Listener, *, with_gone: bool = False) -> list[Node]:
    """Returns the brokers that have a listener of that name, and its address.

    `listener`: the one that the client has connected to, at this broker. `with_gone` includes
    brokers that were up until a moment ago.
    """
    found = []
    members = broker.members.up_or_just_gone() if with_gone else broker.members.up()
    for number, known in members.items():
        rack = known.rack or None
        if number == broker.broker_id:
            found.append(Node(number, listener.host, listener.port, rack))
        elif address := known.kafka_at(listener.name):
            host, _, port = address.rpartition(":")
            found.append(Node(number, host.strip("[]"), int(port), rack))
    return found
