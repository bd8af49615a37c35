"""AlterConfigs (33): replaces the configuration of topics and groups.

Keys that the request omits revert to their defaults. Brokers cannot be altered: they read their
settings when they start, and log levels are altered with IncrementalAlterConfigs.
"""

from __future__ import annotations

from typing import Any

from sparklog import errors
from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves
from sparklog.broker.kafka.resources import ResourceType, alter_resources


@serves(33, "alter_configs", max_version=2, follows=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    body = request.body

    def change(resource: Any) -> None:
        config = {each.name: _value(each) for each in resource.configs}
        name = resource.resource_name
        context.broker.topics.config_changes.replace(
            name, config, only_checks=body.validate_only, client=request.client
        )

    def change_group(resource: Any) -> None:
        config = {each.name: _value(each) for each in resource.configs}
        name = resource.resource_name
        context.broker.group_configs.replace(
            name, config, only_checks=body.validate_only, client=request.client
        )

    changes = {ResourceType.TOPIC: change, ResourceType.GROUP: change_group}
    return await alter_resources(context, request, changes)


def _value(entry: Any) -> str:
    if entry.value is None:
        raise errors.BadRequest(reason=f"{entry.name} needs a value")
    return str(entry.value)
