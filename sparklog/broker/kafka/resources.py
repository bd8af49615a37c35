"""Configuration resources in Kafka's messages, and the requests that alter them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Any, Final, TypeAlias

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.broker import Broker, ConfigEntry, ConfigSource, ConfigType
from sparklog.broker.kafka.access import Access
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import HandlerContext, WorkerPool
from sparklog.broker.kafka.times import NO_TIME
from sparklog.security import acl


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
_JUDGED_AS: Final[Mapping[int, acl.ResourceType]] = {
    ResourceType.TOPIC: acl.ResourceType.TOPIC,
    ResourceType.BROKER: acl.ResourceType.CLUSTER,
    ResourceType.BROKER_LOGGER: acl.ResourceType.CLUSTER,
    ResourceType.CLIENT_METRICS: acl.ResourceType.CLUSTER,
    ResourceType.GROUP: acl.ResourceType.GROUP,
}
"""The resource whose ACLs decide about a configuration."""
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


CheckAllowed: TypeAlias = Callable[[int, str], None]
"""Raises `NotAuthorized` for a type and a name, if the client may not use that configuration."""


async def judge(access: Access, operation: acl.Operation, resources: Iterable[Any]) -> CheckAllowed:
    """Returns the check for all `resources` of a request. Raises `SecurityNotRead`."""
    refused = {
        kind: await access.refused(operation, kind, _judged_names(kind, resources))
        for kind in (acl.ResourceType.TOPIC, acl.ResourceType.GROUP, acl.ResourceType.CLUSTER)
    }

    def check(kind: int, name: str) -> None:
        judged_as = _JUDGED_AS.get(kind)
        if judged_as is None:  # no resource of that type has a configuration
            return
        judged_name = _judged_name(judged_as, name)
        if judged_name in refused[judged_as]:
            raise access.error(operation, judged_as, judged_name)

    return check


def _judged_names(kind: acl.ResourceType, resources: Iterable[Any]) -> Iterator[str]:
    for each in resources:
        if _JUDGED_AS.get(each.resource_type) is kind:
            yield _judged_name(kind, each.resource_name)


def _judged_name(kind: acl.ResourceType, name: str) -> str:
    return acl.CLUSTER_NAME if kind is acl.ResourceType.CLUSTER else name


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


async def _check_still_allowed(access: Access, resource: Any) -> None:
    """Raises `NotAuthorized` if the client has lost the right since the request was judged."""
    judged_as = _JUDGED_AS.get(resource.resource_type)
    if judged_as is None:
        return
    name = _judged_name(judged_as, resource.resource_name)
    if await access.still_refused(acl.Operation.ALTER_CONFIGS, judged_as, (name,)):
        raise access.error(acl.Operation.ALTER_CONFIGS, judged_as, name)


def _check_alterable(
    broker: Broker,
    resource: Any,
    changes: Mapping[ResourceType, Change],
    repeated: Collection[tuple[int, str]],
    check_allowed: CheckAllowed,
) -> None:
    """Raises `NotAuthorized`, or `BadRequest` if the resource's configuration cannot be altered.

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
    check_allowed(kind, name)
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
    context: HandlerContext, request: Request, changes: Mapping[ResourceType, Change]
) -> Fields:
    """Returns the reply to AlterConfigs or IncrementalAlterConfigs.

    Args:
        changes: the change for each resource type that the request can alter.
    """
    resources = request.body.resources
    counts = Counter((each.resource_type, each.resource_name) for each in resources)
    repeated = {key for key, count in counts.items() if count > 1}
    check_allowed = await judge(request.access, acl.Operation.ALTER_CONFIGS, resources)
    return {
        "throttle_time": NO_TIME,
        "responses": [
            await _alter_resource(context, request.access, each, changes, repeated, check_allowed)
            async for each in context.scheduler.iterate(resources)
        ],
    }


async def _alter_resource(
    context: HandlerContext,
    access: Access,
    resource: Any,
    changes: Mapping[ResourceType, Change],
    repeated: set[tuple[int, str]],
    check_allowed: CheckAllowed,
) -> Fields:
    code, message = ErrorCode.none, None
    try:
        _check_alterable(context.broker, resource, changes, repeated, check_allowed)
        change = changes.get(resource.resource_type)
        await _check_still_allowed(access, resource)
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
