"""Metadata (3): the brokers, the topics and the leaders of their partitions.

Missing topics are created if the broker's settings and the request allow it, up to
`CREATED_TOPICS` per request; for the others, the client retries.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Fields, LazyArray, Request
from sparklog.broker.kafka.operations import NOT_REQUESTED, ON_CLUSTER, ON_TOPIC
from sparklog.broker.kafka.registry import HandlerContext, Reply, WorkerPool, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.broker.kafka.topics import nodes, topic_fields, topic_name_of_id
from sparklog.formats.topic_names import check_topic_name

CREATED_TOPICS = 16  # created by one Metadata request at most; repeated requests create more


@serves(3, "metadata", max_version=13, is_repeatable=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    body = request.body
    topics = await _requested_topics(context, request)
    created = await _create(context, topics, request)
    cluster = context.broker.cluster()
    return {
        "throttle_time": NO_TIME,
        "brokers": [
            {"node_id": each.broker, "host": each.host, "port": each.port, "rack": each.rack}
            for each in nodes(context.broker, request.listener, with_gone=True)
        ],
        "cluster_id": cluster.cluster_id,
        # Any broker serves administrative requests, and this client can reach this one.
        # librdkafka does not ask for the controller again after losing the one it knows.
        "controller_id": context.broker.broker_id,
        "topics": LazyArray(partial(_topic, context, request, created), topics),
        "cluster_authorized_operations": (
            ON_CLUSTER
            if getattr(body, "include_cluster_authorized_operations", False)
            else NOT_REQUESTED
        ),
        "error_code": ErrorCode.none,
    }


async def _requested_topics(context: HandlerContext, request: Request) -> list[Any]:
    """Returns each requested topic once. Null, and an empty list in version 0, mean all topics."""
    topics = request.body.topics
    if topics is None or (request.version == 0 and not topics):
        return context.broker.topics.names()
    once = {
        (each.name, getattr(each, "topic_id", None)): each
        async for each in context.scheduler.iterate(topics)
    }
    return list(once.values())


class _Created(NamedTuple):
    """The result of creating missing topics."""

    refused: dict[str, ErrorCode]
    are_all: bool
    """False if some were left for the client's next request."""


async def _create(context: HandlerContext, topics: Sequence[Any], request: Request) -> _Created:
    """Creates missing topics, if that is allowed, and at most `CREATED_TOPICS`."""
    refused: dict[str, ErrorCode] = {}
    attempts = 0
    allowed = getattr(request.body, "allow_auto_topic_creation", True)
    if not (context.broker.topics.creates_on_request and allowed):
        return _Created(refused, are_all=True)
    async for each in context.scheduler.iterate(topics):
        name = each if isinstance(each, str) else each.name
        if name is None or context.broker.topics.exists(name):
            continue
        try:
            check_topic_name(name)
        except errors.SparklogError:
            continue  # the topic's entry in the reply contains this error
        if attempts == CREATED_TOPICS:
            return _Created(refused, are_all=False)
        attempts += 1
        try:
            create = partial(context.broker.topics.create_on_request, client=request.client)
            await context.run_blocking(WorkerPool.CHANGE, create, name)
        except errors.SparklogError as error:
            refused[name] = code_of(error)
    return _Created(refused, are_all=True)


def _topic(context: HandlerContext, request: Request, created: _Created, topics: Any) -> Fields:
    name = topics if isinstance(topics, str) else getattr(topics, "name", None)
    topic_id = None if isinstance(topics, str) else getattr(topics, "topic_id", None)
    try:
        known_name = (
            check_topic_name(str(name))
            if name is not None
            else topic_name_of_id(context.broker, topic_id)
        )
        return _known_topic_fields(context, request, known_name)
    except errors.SparklogError as error:
        code = code_of(error)
        if isinstance(error, errors.UnknownTopic):
            retry_code = ErrorCode.leader_not_available
            code = created.refused.get(str(name), code if created.are_all else retry_code)
        return {
            "error_code": code,
            "name": name,
            "topic_id": topic_id,
            "partitions": (),
        }


def _known_topic_fields(context: HandlerContext, request: Request, name: str) -> Fields:
    """Returns the topic's fields, and its authorized operations if they are requested."""
    wanted = getattr(request.body, "include_topic_authorized_operations", False)
    statuses = context.broker.partitions.statuses(name)
    return {
        **topic_fields(context.broker, name, statuses, request.listener),
        "topic_authorized_operations": ON_TOPIC if wanted else NOT_REQUESTED,
    }
