"""AlterConfigs (33): a topic's whole configuration; what is not given goes back to its default."""

from __future__ import annotations

from typing import Any

from sparklog import errors
from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.resources import altered


@serves(33, "alter_configs", last=2)
async def _handle(door: Door, request: Request) -> Reply:
    body = request.body

    def change(resource: Any) -> None:
        config = {each.name: _value(each) for each in resource.configs}
        name = resource.resource_name
        door.core.replace_config(name, config, only_checks=body.validate_only)

    return await altered(door, body, change)


def _value(given: Any) -> str:
    if given.value is None:
        raise errors.BadRequest(reason=f"{given.name} needs a value")
    return str(given.value)
