"""Configuration resources in Kafka's messages, and the requests that alter them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from enum import IntEnum
from typing import Any, Final, TypeAlias

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.broker import Broker, ConfigEntry, ConfigSource, ConfigType
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Fields
from sparklog.broker.kafka.registry import HandlerContext, WorkerPool
from sparklog.broker.kafka.times import NO_TIME


class ResourceType(IntEnum):
    """Kafka's `ConfigResource.Type`."""

    TOPIC = 2
    BROKER = 4
    BROKER_LOGGER = 8
    CLIENT_METRICS = 16
    GROUP = 32


Change: TypeAlias = Callable[[Any], object]
"""Alters one resource in a request, or raises a `SparklogError`; called in a thread."""
DELETE: Final = 1
"""Kafka's `AlterConfigOp.OpType` for removing a key."""
_SOURCES: Final[Mapping[ConfigSource, int]] = {
    ConfigSource.TOPIC: 1,
    ConfigSource.BROKER: 4,
    ConfigSource.DEFAULT: 5,
    ConfigSource.LOGGER: 6,
    ConfigSource.GROUP: 8,
}
_KINDS: Final[Mapping[ConfigType, int]] = {
    ConfigType.BOOLEAN: 1,
    ConfigType.STRING: 2,
    ConfigType.INT: 3,
    ConfigType.SHORT: 4,
    ConfigType.LONG: 5,
    ConfigType.DOUBLE: 6,
    ConfigType.LIST: 7,
    ConfigType.PASSWORD: 9,
}


def config_fields(entry: ConfigEntry, *, synonyms: bool = True, about: bool = True) -> Fields:
    """Returns the fields of a configuration key in DescribeConfigs and CreateTopics."""
    return {
        "name": entry.name,
        "value": entry.value,
        "read_only": entry.read_only,
        "config_source": _SOURCES[entry.source],
        "is_sensitive": entry.is_secret,
        "synonyms": [
            {"name": each.name, "value": each.value, "source": _SOURCES[each.source]}
            for each in entry.synonyms
        ]
        if synonyms
        else (),
        "config_type": _KINDS[entry.kind],
        "documentation": entry.about if about else None,
    }


def is_this_broker(broker: Broker, name: str) -> bool:
    """Returns True for this broker's id, False for "" (all brokers); else raises `BadRequest`."""
    own_id = str(broker.cluster().brokers[0].broker)
    if name not in ("", own_id):
        reason = f"broker {name!r} is unknown: this is broker {own_id}"
        raise errors.BadRequest(reason=reason)
    return name == own_id


def check_has_loggers(broker: Broker, name: str) -> None:
    """Raises `BadRequest` unless `name` is this broker, which knows only its own loggers."""
    if not is_this_broker(broker, name):
        raise errors.BadRequest(reason="loggers belong to a single broker: name it")


def _check_alterable(
    broker: Broker,
    resource: Any,
    changes: Mapping[ResourceType, Change],
    repeated: Collection[tuple[int, str]],
) -> None:
    """Raises `BadRequest` if the resource's configuration cannot be altered.

    Args:
        changes: the change for each resource type that the request can alter.
        repeated: (type, name) of the resources that the request names more than once.
    """
    kind, name = resource.resource_type, resource.resource_name
    if (kind, name) in repeated:
        raise errors.BadRequest(reason=f"the request names the resource {name!r} more than once")
    keys = [each.name for each in resource.configs]
    if len(set(keys)) < len(keys):
        raise errors.BadRequest(reason=f"the request names a key of {name!r} more than once")
    if kind == ResourceType.BROKER:
        is_this_broker(broker, name)
        # Kafka's tools delete replication throttles even if none are set.
        operations = {getattr(each, "config_operation", None) for each in resource.configs}
        if operations != {DELETE}:
            reason = f"a broker reads its settings when it starts; not changed: {', '.join(keys)}"
            raise errors.BadRequest(reason=reason)
        return
    if kind not in changes:
        reason = f"this request does not alter the configuration of resources of type {kind}"
        raise errors.BadRequest(reason=reason)
    if kind == ResourceType.BROKER_LOGGER:
        check_has_loggers(broker, name)
    elif not name:
        what = "groups: name a group" if kind == ResourceType.GROUP else "topics: name a topic"
        raise errors.BadRequest(reason=f"there is no configuration for all {what}")


async def alter_resources(
    context: HandlerContext, body: Any, changes: Mapping[ResourceType, Change]
) -> Fields:
    """Returns the reply to AlterConfigs or IncrementalAlterConfigs.

    Args:
        changes: the change for each resource type that the request can alter.
    """
    counts = Counter((each.resource_type, each.resource_name) for each in body.resources)
    repeated = {key for key, count in counts.items() if count > 1}
    return {
        "throttle_time": NO_TIME,
        "responses": [
            await _alter_resource(context, each, changes, repeated)
            async for each in context.scheduler.iterate(body.resources)
        ],
    }


async def _alter_resource(
    context: HandlerContext,
    resource: Any,
    changes: Mapping[ResourceType, Change],
    repeated: set[tuple[int, str]],
) -> Fields:
    code, message = ErrorCode.none, None
    try:
        _check_alterable(context.broker, resource, changes, repeated)
        change = changes.get(resource.resource_type)
        if change is not None:
            await context.run_blocking(WorkerPool.CHANGE, change, resource)
    except errors.SparklogError as error:
        code, message = code_of(error), str(error)
    return {
        "error_code": code,
        "error_message": message,
        "resource_type": resource.resource_type,
        "resource_name": resource.resource_name,
    }
