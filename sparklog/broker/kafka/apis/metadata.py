"""Metadata (3): brokers, topics, and who leads each partition; creates topics on the way."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.codes import code_of
from sparklog.broker.kafka.messages import Each, Fields, Request
from sparklog.broker.kafka.operations import NOT_ASKED, ON_CLUSTER, ON_TOPIC
from sparklog.broker.kafka.registry import Door, Reply, Work, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.broker.kafka.topics import described, name_of_id
from sparklog.limits import KAFKA_CREATED_TOPICS
from sparklog.record import check_topic_name

_CLIENT_ID_SHOWN: Final = 100
"""Characters of it in a log line."""


@serves(3, "metadata", last=13)
async def _handle(door: Door, request: Request) -> Reply:
    body = request.body
    wanted = await _wanted(door, request)
    created = await _create(door, wanted, request)
    cluster = door.core.cluster()
    broker = cluster.brokers[0].broker
    return {
        "throttle_time": NO_TIME,
        "brokers": [{"node_id": broker, "host": door.host, "port": door.port, "rack": None}],
        "cluster_id": cluster.cluster_id,
        "controller_id": broker,
        "topics": Each(partial(_topic, door, body, created), wanted),
        "cluster_authorized_operations": (
            ON_CLUSTER
            if getattr(body, "include_cluster_authorized_operations", False)
            else NOT_ASKED
        ),
        "error_code": ErrorCode.none,
    }


async def _wanted(door: Door, request: Request) -> list[Any]:
    """What was asked for, once; all topics for null, and for none at all in version 0."""
    topics = request.body.topics
    if topics is None or (request.version == 0 and not topics):
        return list(door.core.topics().topics)
    once = {
        (each.name, getattr(each, "topic_id", None)): each async for each in door.turns.over(topics)
    }
    return list(once.values())


def _named(request: Request) -> str:
    """The client, for the log: its id, which it chooses, and its address."""
    return f"{request.client_id[:_CLIENT_ID_SHOWN]!r} at {request.client_host.lstrip('/')}"


class _Created(NamedTuple):
    """What has become of topics that were not there."""

    refused: dict[str, ErrorCode]
    are_all: bool
    """If not, the client is told to ask again."""


async def _create(door: Door, wanted: Sequence[Any], request: Request) -> _Created:
    """Creates topics that are not there, where that is asked for, and only so many at a time."""
    refused: dict[str, ErrorCode] = {}
    attempts = 0
    allowed = getattr(request.body, "allow_auto_topic_creation", True)
    if not (door.core.creates_topics and allowed):
        return _Created(refused, are_all=True)
    async for each in door.turns.over(wanted):
        name = each if isinstance(each, str) else each.name
        if name is None or door.core.has_topic(name):
            continue
        try:
            check_topic_name(name)
        except errors.SparklogError:
            continue  # told where it is described
        if attempts == KAFKA_CREATED_TOPICS:
            return _Created(refused, are_all=False)
        attempts += 1
        try:
            create = partial(door.core.auto_create, client=_named(request))
            await door.blocking(Work.CHANGE, create, name)
        except errors.SparklogError as error:
            refused[name] = code_of(error)
    return _Created(refused, are_all=True)


def _topic(door: Door, body: Any, created: _Created, wanted: Any) -> Fields:
    name = wanted if isinstance(wanted, str) else getattr(wanted, "name", None)
    topic_id = None if isinstance(wanted, str) else getattr(wanted, "topic_id", None)
    try:
        known = check_topic_name(str(name)) if name is not None else name_of_id(door.core, topic_id)
        tells = getattr(body, "include_topic_authorized_operations", False)
        return _described(door, known, tells=tells)
    except errors.SparklogError as error:
        code = code_of(error)
        if isinstance(error, errors.UnknownTopic):
            later = ErrorCode.leader_not_available
            code = created.refused.get(str(name), code if created.are_all else later)
        return {
            "error_code": code,
            "name": name,
            "topic_id": topic_id,
            "partitions": (),
        }


def _described(door: Door, name: str, *, tells: bool) -> Fields:
    """`tells`: also what may be done with it."""
    operations = {"topic_authorized_operations": ON_TOPIC if tells else NOT_ASKED}
    return {**described(door.core, name, door.core.places(name)), **operations}
