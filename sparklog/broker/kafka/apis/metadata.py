"""Metadata (3): the brokers, the topics and the leaders of their partitions.

Missing topics are created if the broker's settings and the request allow it, up to
`CREATED_TOPICS` per request; for the others, the client retries.

The entry of a topic that the client may not describe is the same whether the topic exists or not; a
request for all topics leaves it out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.broker import INTERNAL_TOPICS, Broker
from sparklog.broker.kafka.audited import note_created
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Fields, LazyArray, Request
from sparklog.broker.kafka.operations import NOT_REQUESTED, on_cluster, on_topic
from sparklog.broker.kafka.registry import HandlerContext, Reply, WorkerPool, serves
from sparklog.broker.kafka.throttle import Mutations
from sparklog.broker.kafka.topics import known_name, nodes, topic_fields, topic_name_of_id
from sparklog.formats.flight_messages import CreateTopic
from sparklog.formats.topic_names import check_topic_name
from sparklog.security.acl import Operation, ResourceType

CREATED_TOPICS = 16  # created by one Metadata request at most; repeated requests create more


@serves(3, "metadata", max_version=13, is_repeatable=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    topics = await _requested_topics(context, request)
    hidden = await request.access.refused(
        Operation.DESCRIBE, ResourceType.TOPIC, _requested_names(context.broker, topics)
    )
    mutations = request.mutations(first_strict=None)
    created = await _create(context, topics, request, hidden, mutations)
    cluster = context.broker.cluster()
    return {
        "throttle_time": mutations.end(),
        "brokers": [
            {"node_id": each.broker, "host": each.host, "port": each.port, "rack": each.rack}
            for each in nodes(context.broker, request.listener, with_gone=True)
        ],
        "cluster_id": cluster.cluster_id,
        # Any broker serves administrative requests, and this client can reach this one.
        # librdkafka does not ask for the controller again after losing the one it knows.
        "controller_id": context.broker.broker_id,
        "topics": LazyArray(partial(_topic, context, request, created), topics),
        "cluster_authorized_operations": on_cluster(request),
        "error_code": ErrorCode.none,
    }


async def _requested_topics(context: HandlerContext, request: Request) -> list[Any]:
    """Returns each requested topic once.

    Null, and an empty list in version 0, mean all topics, which are returned as their names.
    """
    topics, access = request.body.topics, request.access
    if topics is None or (request.version == 0 and not topics):
        names = context.broker.topics.names()
        if not access.is_limited:
            return names
        return [
            name
            async for name in context.scheduler.iterate(names)
            if access.may(Operation.DESCRIBE, ResourceType.TOPIC, name)
        ]
    once = {
        (each.name, getattr(each, "topic_id", None)): each
        async for each in context.scheduler.iterate(topics)
    }
    return list(once.values())


def _requested_names(broker: Broker, topics: Sequence[Any]) -> Iterator[str]:
    """Yields the names of topics that are requested by name, or by an id that a topic has."""
    for each in topics:
        if not isinstance(each, str):
            name = each.name if each.name is not None else known_name(broker, each.topic_id)
            if name is not None:
                yield name


class _Created(NamedTuple):
    """The result of creating missing topics."""

    not_authorized: Collection[str]
    """The topics that the client may not describe, or may not create."""
    refused: dict[str, ErrorCode]
    are_all: bool
    """False if some were left for the client's next request."""


async def _create(
    context: HandlerContext,
    topics: Sequence[Any],
    request: Request,
    hidden: Collection[str],
    mutations: Mutations,
) -> _Created:
    """Creates missing topics, if that is allowed, and at most `CREATED_TOPICS`."""
    refused: dict[str, ErrorCode] = {}
    attempts = 0
    allowed = getattr(request.body, "allow_auto_topic_creation", True)
    if not (context.broker.topics.creates_on_request and allowed):
        return _Created(hidden, refused, are_all=True)
    missing = [
        each.name
        async for each in context.scheduler.iterate(topics)
        if not isinstance(each, str)
        and each.name is not None
        and each.name not in hidden
        and not context.broker.topics.exists(each.name)
    ]
    uncreatable = await request.access.refused(
        Operation.CREATE, ResourceType.TOPIC, missing, or_cluster=Operation.CREATE
    )
    not_authorized = {*hidden, *uncreatable} if uncreatable else hidden
    async for name in context.scheduler.iterate(missing):
        if name in uncreatable or context.broker.topics.exists(name):
            continue
        try:
            check_topic_name(name)
        except errors.SparklogError:
            continue  # the topic's entry in the reply contains this error
        if attempts == CREATED_TOPICS:
            return _Created(not_authorized, refused, are_all=False)
        attempts += 1
        if await request.access.still_refused(
            Operation.CREATE, ResourceType.TOPIC, (name,), or_cluster=Operation.CREATE
        ):
            not_authorized = {*not_authorized, name}
            continue
        try:
            if mutations.has_quotas and name not in INTERNAL_TOPICS:
                mutations.check(context.broker.topics.check_new(CreateTopic(topic=name))[0])
            create = partial(context.broker.topics.create_on_request, client=request.client)
            await context.run_blocking(WorkerPool.CHANGE, create, name)
            if context.audit is not None:
                note_created(context.audit, request, name)
        except errors.SparklogError as error:
            refused[name] = code_of(error)
    return _Created(not_authorized, refused, are_all=True)


def _topic(context: HandlerContext, request: Request, created: _Created, topics: Any) -> Fields:
    name = topics if isinstance(topics, str) else getattr(topics, "name", None)
    topic_id = None if isinstance(topics, str) else getattr(topics, "topic_id", None)
    try:
        if name is None:
            found = topic_name_of_id(context.broker, topic_id)
            # The topic may have been created since its id was looked up to be judged.
            is_hidden = found in created.not_authorized or not request.access.may(
                Operation.DESCRIBE, ResourceType.TOPIC, found
            )
        else:
            found, is_hidden = str(name), name in created.not_authorized
        if is_hidden:
            raise request.access.error(Operation.DESCRIBE, ResourceType.TOPIC, found)
        return _known_topic_fields(context, request, check_topic_name(found))
    except errors.SparklogError as error:
        code, operations = code_of(error), NOT_REQUESTED
        if isinstance(error, errors.UnknownTopic):
            retry_code = ErrorCode.leader_not_available
            code = created.refused.get(str(name), code if created.are_all else retry_code)
            operations = on_topic(request, str(name))
        return {
            "error_code": code,
            "name": name,
            "topic_id": topic_id,
            "partitions": (),
            "topic_authorized_operations": operations,
        }


def _known_topic_fields(context: HandlerContext, request: Request, name: str) -> Fields:
    """Returns the topic's fields, and its authorized operations if they are requested."""
    statuses = context.broker.partitions.statuses(name)
    return {
        **topic_fields(context.broker, name, statuses, request.listener),
        "topic_authorized_operations": on_topic(request, name),
    }
