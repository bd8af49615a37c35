"""Metadata (3): brokers, topics, and who leads each partition; creates topics on the way."""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.codes import code_of
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.operations import NOT_ASKED, ON_CLUSTER, ON_TOPIC
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.broker.kafka.topics import described, name_of_id
from sparklog.record import check_topic_name


@serves(3, "metadata", last=13)
async def _handle(door: Door, request: Request) -> Reply:
    body = request.body
    cluster = door.core.cluster()
    broker = cluster.brokers[0].broker
    return {
        "throttle_time": NO_TIME,
        "brokers": [{"node_id": broker, "host": door.host, "port": door.port, "rack": None}],
        "cluster_id": cluster.cluster_id,
        "controller_id": broker,
        "topics": [await _topic(door, each, body) for each in _wanted(door, request)],
        "cluster_authorized_operations": (
            ON_CLUSTER
            if getattr(body, "include_cluster_authorized_operations", False)
            else NOT_ASKED
        ),
        "error_code": ErrorCode.none,
    }


def _wanted(door: Door, request: Request) -> list[Any]:
    """What was asked for, once; all topics for null, and for none at all in version 0."""
    topics = request.body.topics
    if topics is None or (request.version == 0 and not topics):
        return list(door.core.topics().topics)
    return list({(each.name, getattr(each, "topic_id", None)): each for each in topics}.values())


async def _topic(door: Door, wanted: Any, body: Any) -> Fields:
    name = wanted if isinstance(wanted, str) else getattr(wanted, "name", None)
    topic_id = None if isinstance(wanted, str) else getattr(wanted, "topic_id", None)
    try:
        known = check_topic_name(str(name)) if name is not None else name_of_id(door.core, topic_id)
        tells = getattr(body, "include_topic_authorized_operations", False)
        try:
            return _described(door, known, tells=tells)
        except errors.UnknownTopic:
            if not getattr(body, "allow_auto_topic_creation", True):
                raise
            await door.blocking(door.core.auto_create, known)
            return _described(door, known, tells=tells)
    except errors.SparklogError as error:
        return {
            "error_code": code_of(error),
            "name": name,
            "topic_id": topic_id,
            "partitions": (),
        }


def _described(door: Door, name: str, *, tells: bool) -> Fields:
    """`tells`: also what may be done with it."""
    operations = {"topic_authorized_operations": ON_TOPIC if tells else NOT_ASKED}
    return {**described(door.core, name, door.core.places(name)), **operations}
