"""DescribeConfigs (32): the configuration of topics and of this broker (KIP-133, KIP-226)."""

from __future__ import annotations

from functools import partial
from typing import Any

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.core import ConfigEntry
from sparklog.broker.kafka.codes import code_of
from sparklog.broker.kafka.messages import Each, Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.resources import ResourceType, entry_fields, is_this_broker
from sparklog.broker.kafka.times import NO_TIME
from sparklog.record import check_topic_name


@serves(32, "describe_configs", last=4)
async def _handle(door: Door, request: Request) -> Reply:
    """What is asked for more than once is told once."""
    body = request.body
    resources = {
        (each.resource_type, each.resource_name, each.configuration_keys): each
        async for each in door.turns.over(body.resources)
    }
    return {
        "throttle_time": NO_TIME,
        "results": Each(partial(_described, door, body), tuple(resources.values()), is_slow=True),
    }


def _described(door: Door, body: Any, resource: Any) -> Fields:
    code, message, entries = ErrorCode.none, None, []
    try:
        entries = _entries(door, resource.resource_type, resource.resource_name)
    except errors.SparklogError as error:
        code, message = code_of(error), str(error)
    wanted = resource.configuration_keys  # null and none mean all
    about = getattr(body, "include_documentation", False)
    return {
        "error_code": code,
        "error_message": message,
        "resource_type": resource.resource_type,
        "resource_name": resource.resource_name,
        "configs": [
            entry_fields(entry, synonyms=body.include_synonyms, about=about)
            for entry in sorted(entries, key=lambda entry: entry.name)
            if not wanted or entry.name in wanted
        ],
    }


def _entries(door: Door, kind: int, name: str) -> list[ConfigEntry]:
    match kind:
        case ResourceType.TOPIC:
            return door.core.topic_configs(check_topic_name(name))
        case ResourceType.BROKER:
            # What all brokers are told together is nothing: each has its own settings.
            is_this = is_this_broker(door.core, name)
            return door.core.broker_configs(f"{door.host}:{door.port}") if is_this else []
        case ResourceType.GROUP | ResourceType.CLIENT_METRICS if not name:
            raise errors.BadRequest(reason="a group, or a subscription to metrics, needs a name")
        case ResourceType.GROUP:
            return door.core.group_configs()
        case ResourceType.CLIENT_METRICS:
            return door.core.metrics_configs()
        case _:
            reason = f"resources of type {kind} have no configuration here"
            raise errors.BadRequest(reason=reason)
