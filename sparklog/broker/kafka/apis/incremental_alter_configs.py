"""IncrementalAlterConfigs (44): alters keys of topic and group configurations (KIP-339, KIP-848).

It also alters the log level of this broker, until the broker restarts (KIP-412). Other resources
cannot be altered, as with AlterConfigs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sparklog import errors
from sparklog.broker import logging
from sparklog.broker.broker import Edit
from sparklog.broker.described import LOG_LEVELS, ROOT_LOGGER
from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves
from sparklog.broker.kafka.resources import DELETE, ResourceType, alter_resources

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
        context.broker.topics.config_changes.edit(
            name, edits, only_checks=body.validate_only, client=request.client
        )

    def change_group(resource: Any) -> None:
        edits = [_edit(each) for each in resource.configs]
        name = resource.resource_name
        context.broker.group_configs.edit(
            name, edits, only_checks=body.validate_only, client=request.client
        )

    def change_levels(resource: Any) -> None:
        levels = [_level(*_edit(each)) for each in resource.configs]
        if not body.validate_only:
            for level in levels:
                logging.set_level(level, client=request.client)

    changes = {
        ResourceType.TOPIC: change,
        ResourceType.GROUP: change_group,
        ResourceType.BROKER_LOGGER: change_levels,
    }
    return await alter_resources(context, request, changes)


def _level(edit: Edit, logger: str, value: str | None) -> str:
    """Returns the requested log level. Raises the errors that Kafka returns for other edits."""
    if edit in (Edit.APPEND, Edit.SUBTRACT):
        raise errors.BadRequest(reason="the level of a logger is not a list: set it")
    if logging.level() is None:
        raise errors.BadOption(option=logger, value=value, reason=logging.NOT_OURS)
    if logger != ROOT_LOGGER:
        raise errors.UnknownOption.among("the loggers of a broker", logger, [ROOT_LOGGER])
    if edit is Edit.DELETE:
        raise errors.BadRequest(reason=f"the level of {ROOT_LOGGER} cannot be deleted: set another")
    if value not in LOG_LEVELS:
        reason = f"use one of {', '.join(LOG_LEVELS)}"
        raise errors.BadOption(option=logger, value=value, reason=reason)
    return LOG_LEVELS[value]


def _edit(change: Any) -> tuple[Edit, str, str | None]:
    edit = _EDITS.get(change.config_operation)
    if edit is None:
        reason = f"operation {change.config_operation} on {change.name} is unknown: use 0 to 3"
        raise errors.BadRequest(reason=reason)
    if change.value is None and edit is not Edit.DELETE:
        raise errors.BadRequest(reason=f"{change.name} needs a value")
    return edit, change.name, change.value
