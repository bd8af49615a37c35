"""IncrementalAlterConfigs (44): single keys of a topic's configuration (KIP-339)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sparklog import errors
from sparklog.broker.core import Edit
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.resources import check_alterable, doubles, outcome
from sparklog.broker.kafka.times import NO_TIME

_EDITS: Final[Mapping[int, Edit]] = {
    0: Edit.SET,
    1: Edit.DELETE,
    2: Edit.APPEND,
    3: Edit.SUBTRACT,
}
"""By Kafka's `AlterConfigOp.OpType`."""


@serves(44, "incremental_alter_configs", last=1)
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
        edits = [_edit(each) for each in resource.configs]
        await door.blocking(lambda: door.core.edit_config(name, edits, only_checks=only_checks))
    except errors.SparklogError as error:
        return outcome(resource, error)
    return outcome(resource, None)


def _edit(change: Any) -> tuple[Edit, str, str | None]:
    edit = _EDITS.get(change.config_operation)
    if edit is None:
        reason = f"operation {change.config_operation} on {change.name}: 0 to 3 are known"
        raise errors.BadRequest(reason=reason)
    if change.value is None and edit is not Edit.DELETE:
        raise errors.BadRequest(reason=f"{change.name} needs a value")
    return edit, change.name, change.value
