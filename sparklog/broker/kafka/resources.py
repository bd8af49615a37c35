"""What configuration belongs to, and how Kafka's wire numbers what it says of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from enum import IntEnum
from typing import Any, Final

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.core import ConfigEntry, Core, Kind, Source
from sparklog.broker.kafka.codes import code_of
from sparklog.broker.kafka.messages import Fields
from sparklog.broker.kafka.registry import Door, Work
from sparklog.broker.kafka.times import NO_TIME


class ResourceType(IntEnum):
    """Kafka's `ConfigResource.Type`."""

    TOPIC = 2
    BROKER = 4
    BROKER_LOGGER = 8
    CLIENT_METRICS = 16
    GROUP = 32


_SOURCES: Final[Mapping[Source, int]] = {Source.TOPIC: 1, Source.BROKER: 4, Source.DEFAULT: 5}
_KINDS: Final[Mapping[Kind, int]] = {
    Kind.BOOLEAN: 1,
    Kind.STRING: 2,
    Kind.INT: 3,
    Kind.SHORT: 4,
    Kind.LONG: 5,
    Kind.DOUBLE: 6,
    Kind.LIST: 7,
    Kind.PASSWORD: 9,
}


def entry_fields(entry: ConfigEntry, *, synonyms: bool = True, about: bool = True) -> Fields:
    """A key as DescribeConfigs and CreateTopics tell it."""
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


def is_this_broker(core: Core, name: str) -> bool:
    """Whether `name` is this broker's; an empty one means all brokers. Raises `BadRequest`."""
    broker = str(core.cluster().brokers[0].broker)
    if name not in ("", broker):
        reason = f"this is broker {broker}, and nothing is known here of broker {name!r}"
        raise errors.BadRequest(reason=reason)
    return name == broker


def _check_alterable(core: Core, resource: Any, twice: Collection[tuple[int, str]]) -> None:
    """Raises `BadRequest` where that resource's configuration cannot be changed as it says.

    Args:
        twice: (type, name) of the resources that stand in the request more than once.
    """
    kind, name = resource.resource_type, resource.resource_name
    if (kind, name) in twice:
        raise errors.BadRequest(reason="a resource may stand in a request once")
    keys = [each.name for each in resource.configs]
    if len(set(keys)) < len(keys):
        raise errors.BadRequest(reason="a key may stand in a resource once")
    if kind == ResourceType.BROKER:
        is_this_broker(core, name)
        reason = f"a broker is told its settings when it starts; not changed: {', '.join(keys)}"
        raise errors.BadRequest(reason=reason)
    if kind != ResourceType.TOPIC:
        raise errors.BadRequest(reason=f"resources of type {kind} have no configuration here")
    if not name:
        raise errors.BadRequest(reason="there is no configuration of all topics: name one")


async def altered(door: Door, body: Any, change: Callable[[Any], object]) -> Fields:
    """The answer to AlterConfigs or IncrementalAlterConfigs; `change` does it to one resource.

    It is called in a thread, and raises what is wrong.
    """
    counts = Counter((each.resource_type, each.resource_name) for each in body.resources)
    twice = {key for key, count in counts.items() if count > 1}
    return {
        "throttle_time": NO_TIME,
        "responses": [
            await _altered(door, each, twice, change)
            async for each in door.turns.over(body.resources)
        ],
    }


async def _altered(
    door: Door, resource: Any, twice: set[tuple[int, str]], change: Callable[[Any], object]
) -> Fields:
    code, message = ErrorCode.none, None
    try:
        _check_alterable(door.core, resource, twice)
        await door.blocking(Work.CHANGE, change, resource)
    except errors.SparklogError as error:
        code, message = code_of(error), str(error)
    return {
        "error_code": code,
        "error_message": message,
        "resource_type": resource.resource_type,
        "resource_name": resource.resource_name,
    }
