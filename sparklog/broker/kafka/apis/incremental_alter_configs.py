"""IncrementalAlterConfigs (44): alters single keys of the configuration of topics (KIP-339).

As with AlterConfigs, only topics can be altered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sparklog import errors
from sparklog.broker.broker import Edit
from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves
from sparklog.broker.kafka.resources import DELETE, alter_resources

_EDITS: Final[Mapping[int, Edit]] = {
    0: Edit.SET,
    DELETE: Edit.DELETE,
    2: Edit.APPEND,
    3: Edit.SUBTRACT,
}
"""By Kafka's `AlterConfigOp.OpType`."""


@serves(44, "incremental_alter_configs", max_version=1, follows=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    body = request.body

    def change(resource: Any) -> None:
        edits = [_edit(each) for each in resource.configs]
        name = resource.resource_name
        context.broker.topics.edit_config(
            name, edits, only_checks=body.validate_only, client=request.client
        )

    return await alter_resources(context, body, change)


def _edit(change: Any) -> tuple[Edit, str, str | None]:
    edit = _EDITS.get(change.config_operation)
    if edit is None:
        reason = f"operation {change.config_operation} on {change.name} is unknown: use 0 to 3"
        raise errors.BadRequest(reason=reason)
    if change.value is None and edit is not Edit.DELETE:
        raise errors.BadRequest(reason=f"{change.name} needs a value")
    return edit, change.name, change.value
