"""AlterConfigs (33): a topic's whole configuration; what is not given goes back to its default."""

from __future__ import annotations

from typing import Any

from sparklog import errors
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.resources import check_alterable, doubles, outcome
from sparklog.broker.kafka.times import NO_TIME


@serves(33, "alter_configs", last=2)
async def _handle(door: Door, request: Request) -> Reply:
    body = request.body
    twice = doubles(body.resources)
    return {
        "throttle_time": NO_TIME,
        "responses": [
            await _alter(door, each, twice, only_checks=body.validate_only)
            for each in body.resources
        ],
    }


async def _alter(
    door: Door, resource: Any, twice: set[tuple[int, str]], *, only_checks: bool
) -> Fields:
    name = resource.resource_name
    try:
        check_alterable(door.core, resource, twice)
        config = {each.name: _value(each) for each in resource.configs}
        await door.blocking(lambda: door.core.replace_config(name, config, only_checks=only_checks))
    except errors.SparklogError as error:
        return outcome(resource, error)
    return outcome(resource, None)


def _value(given: Any) -> str:
    if given.value is None:
        raise errors.BadRequest(reason=f"{given.name} needs a value")
    return str(given.value)
