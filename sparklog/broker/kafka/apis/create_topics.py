"""CreateTopics (19): creates topics with their partitions and configuration (KIP-4, KIP-525).

The replication factor must be 1 or the default. A replica assignment sets the number of partitions
and has no further effect: the brokers agree on leaders among themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from functools import partial
from typing import Any, Final

from kio.schema.errors import ErrorCode

from sparklog import errors, limits
from sparklog.broker.kafka.access import NOTHING
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, WorkerPool, serves
from sparklog.broker.kafka.resources import config_fields
from sparklog.broker.kafka.throttle import Mutations
from sparklog.broker.kafka.topics import check_assignment, kafka_id
from sparklog.formats import flight_messages
from sparklog.security.acl import Operation, ResourceType

_FIRST_WITH_CONFIGS: Final = 5
"""The first version whose reply contains the topic's configuration."""
_FIRST_STRICT: Final = 6
"""The first version whose clients know THROTTLING_QUOTA_EXCEEDED (KIP-599)."""


@serves(19, "create_topics", max_version=7, follows=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    body, access = request.body, request.access
    counts = Counter(each.name for each in body.topics)
    only_checks = getattr(body, "validate_only", False)
    topics = {each.name: each for each in body.topics}  # a repeated topic is rejected once
    refused = await access.refused(
        Operation.CREATE,
        ResourceType.TOPIC,
        (name for name, count in counts.items() if count == 1),
        or_cluster=Operation.CREATE,
    )
    hidden: Collection[str] = NOTHING
    if request.version >= _FIRST_WITH_CONFIGS:
        others = (name for name, count in counts.items() if count == 1 and name not in refused)
        hidden = await access.refused(Operation.DESCRIBE_CONFIGS, ResourceType.TOPIC, others)
    found: dict[str, errors.SparklogError | tuple[int, dict[str, str], Any]] = {}
    wanted: list[flight_messages.CreateTopic] = []
    create_all = partial(context.broker.topics.create_all, client=request.client)
    async for each in context.scheduler.iterate(topics.values()):
        try:
            if each.name in refused:
                raise access.error(Operation.CREATE, ResourceType.TOPIC, each.name)
            creation = _parse(each, is_repeated=counts[each.name] > 1)
            context.broker.topics.check_replication(each.name, each.replication_factor)
            if only_checks:
                found[each.name] = (*context.broker.topics.check_new(creation), None)
            else:
                wanted.append(creation)
        except errors.SparklogError as error:
            found[each.name] = error
    mutations = request.mutations(first_strict=_FIRST_STRICT)
    if mutations.has_quotas:
        wanted = [
            each
            async for each in context.scheduler.iterate(wanted)
            if _is_in_quota(context, each, mutations, found)
        ]
    for first in range(0, len(wanted), limits.TOPICS_CREATED_TOGETHER):
        some = wanted[first : first + limits.TOPICS_CREATED_TOGETHER]
        now_refused = await access.still_refused(
            Operation.CREATE,
            ResourceType.TOPIC,
            (each.topic for each in some),
            or_cluster=Operation.CREATE,
        )
        for name in now_refused:
            found[name] = access.error(Operation.CREATE, ResourceType.TOPIC, name)
        some = [each for each in some if each.topic not in now_refused]
        created = await context.run_blocking(WorkerPool.CHANGE, create_all, some)
        for creation, info in zip(some, created, strict=True):
            if isinstance(info, errors.SparklogError):
                found[creation.topic] = info
            else:
                count, config = len(info.partitions), info.config
                found[creation.topic] = count, config, kafka_id(info.topic_id)
    return {
        "throttle_time": mutations.end(),
        "topics": [
            _fields(context, name, found[name], hides_config=name in hidden)
            async for name in context.scheduler.iterate(topics)
        ],
    }


def _is_in_quota(
    context: HandlerContext,
    creation: flight_messages.CreateTopic,
    mutations: Mutations,
    found: dict[str, errors.SparklogError | tuple[int, dict[str, str], Any]],
) -> bool:
    """Counts the partitions of a new topic. Returns False if it has an error, added to `found`."""
    try:
        count, _ = context.broker.topics.check_new(creation)
        mutations.check(count)
    except errors.SparklogError as error:
        found[creation.topic] = error
        return False
    return True


def _fields(
    context: HandlerContext,
    name: str,
    found: errors.SparklogError | tuple[int, dict[str, str], Any],
    *,
    hides_config: bool,
) -> Fields:
    if isinstance(found, errors.SparklogError):
        return {
            "name": name,
            "topic_id": None,
            "error_code": code_of(found),
            "error_message": str(found),
            "num_partitions": -1,
            "replication_factor": -1,
            "configs": (),
        }
    count, config, topic_id = found
    created = {
        "name": name,
        "topic_id": topic_id,
        "error_code": ErrorCode.none,
        "error_message": None,
    }
    if hides_config:
        return {
            **created,
            "topic_config_error_code": int(ErrorCode.topic_authorization_failed),
            "num_partitions": -1,
            "replication_factor": -1,
            "configs": (),
        }
    entries = context.broker.topics.configs_of_new(config)
    return {
        **created,
        "num_partitions": count,
        "replication_factor": 1,
        "configs": [
            config_fields(entry) for entry in sorted(entries, key=lambda entry: entry.name)
        ],
    }


def _parse(topic: Any, *, is_repeated: bool) -> flight_messages.CreateTopic:
    if is_repeated:
        raise errors.BadRequest(reason=f"topic {topic.name} is named twice")
    count = topic.num_partitions
    if topic.assignments:
        count = _assigned(topic)
    elif count == 0 or count < -1:
        raise errors.BadPartitionCount(topic=topic.name, requested=count, reason="use at least 1")
    config = {each.name: each.value for each in topic.configs}
    for key, value in config.items():
        if value is None:
            raise errors.BadOption(option=key, value=None, reason="it needs a value")
    return flight_messages.CreateTopic(topic=topic.name, partitions=count, config=config)


def _assigned(topic: Any) -> int:
    """Returns the number of assigned partitions. Raises `BadRequest` and `BadAssignment`."""
    if topic.num_partitions != -1 or topic.replication_factor != -1:
        reason = "an assignment sets partitions and replicas: set both counts to -1"
        raise errors.BadRequest(reason=reason)
    numbers = sorted(each.partition_index for each in topic.assignments)
    if numbers != list(range(len(numbers))):
        raise errors.BadAssignment(topic=topic.name, reason=f"it names the partitions {numbers}")
    check_assignment(topic.name, [each.broker_ids for each in topic.assignments])
    return len(numbers)
