"""IncrementalAlterConfigs (44): single keys of a topic's configuration (KIP-339)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sparklog import errors
from sparklog.broker.core import Edit
from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.resources import altered

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

    def change(resource: Any) -> None:
        edits = [_edit(each) for each in resource.configs]
        name = resource.resource_name
        door.core.edit_config(name, edits, only_checks=body.validate_only)

    return await altered(door, body, change)


def _edit(change: Any) -> tuple[Edit, str, str | None]:
    edit = _EDITS.get(change.config_operation)
    if edit is None:
        reason = f"operation {change.config_operation} on {change.name}: 0 to 3 are known"
        raise errors.BadRequest(reason=reason)
    if change.value is None and edit is not Edit.DELETE:
        raise errors.BadRequest(reason=f"{change.name} needs a value")
    return edit, change.name, change.value
