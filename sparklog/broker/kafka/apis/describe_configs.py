"""DescribeConfigs (32): the configuration of topics and of this broker (KIP-133, KIP-226).

There is one broker logger, with this broker's level (KIP-412). Client metrics have Kafka's
defaults.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker import described, logging
from sparklog.broker.broker import ConfigEntry
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Fields, LazyArray, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves
from sparklog.broker.kafka.resources import (
    CheckAllowed,
    ResourceType,
    check_has_loggers,
    config_fields,
    is_this_broker,
    judge,
)
from sparklog.broker.kafka.times import NO_TIME
from sparklog.formats.topic_names import check_topic_name
from sparklog.security.acl import Operation


@serves(32, "describe_configs", max_version=4, is_repeatable=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    body = request.body  # a resource that is requested twice is described once
    resources = {
        (each.resource_type, each.resource_name, each.configuration_keys): each
        async for each in context.scheduler.iterate(body.resources)
    }
    check_allowed = await judge(request.access, Operation.DESCRIBE_CONFIGS, resources.values())
    make = partial(_resource_fields, context, body, check_allowed)
    return {
        "throttle_time": NO_TIME,
        "results": LazyArray(make, tuple(resources.values()), is_slow=True),
    }


def _resource_fields(
    context: HandlerContext, body: Any, check_allowed: CheckAllowed, resource: Any
) -> Fields:
    code, message, entries = ErrorCode.none, None, []
    try:
        check_allowed(resource.resource_type, resource.resource_name)
        entries = _entries(context, resource.resource_type, resource.resource_name)
    except errors.SparklogError as error:
        code, message = code_of(error), str(error)
    keys = resource.configuration_keys  # null and an empty list mean all
    about = getattr(body, "include_documentation", False)
    return {
        "error_code": code,
        "error_message": message,
        "resource_type": resource.resource_type,
        "resource_name": resource.resource_name,
        "configs": [
            config_fields(entry, synonyms=body.include_synonyms, about=about)
            for entry in sorted(entries, key=lambda entry: entry.name)
            if not keys or entry.name in keys
        ],
    }


def _entries(context: HandlerContext, kind: int, name: str) -> list[ConfigEntry]:
    match kind:
        case ResourceType.TOPIC:
            return context.broker.topics.configs(check_topic_name(name))
        case ResourceType.BROKER:
            # There are no cluster-wide settings: the resource of all brokers is empty.
            is_this = is_this_broker(context.broker, name)
            return context.broker.configs(context.listeners) if is_this else []
        case ResourceType.BROKER_LOGGER:
            check_has_loggers(context.broker, name)
            return described.logger_entries(logging.level())
        case ResourceType.GROUP | ResourceType.CLIENT_METRICS if not name:
            raise errors.BadRequest(reason="a group or a client metrics subscription needs a name")
        case ResourceType.GROUP:
            return described.group_entries(context.broker.group_configs.config(name))
        case ResourceType.CLIENT_METRICS:
            return described.metrics_entries()
        case _:
            reason = f"resources of type {kind} have no configuration here"
            raise errors.BadRequest(reason=reason)
