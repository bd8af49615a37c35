"""ListGroups (16): all groups, or those of given states (KIP-518) or types (KIP-848).

All groups are of the type "classic". A client that may not describe the cluster gets only the
groups that it may describe.
"""

from __future__ import annotations

from sparklog.broker.groups.messages import Description, GroupError
from sparklog.broker.kafka.error_codes import group_code
from sparklog.broker.kafka.messages import Fields, LazyArray, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.security.acl import Operation, ResourceType

_TYPE = "classic"


@serves(16, "list_groups", max_version=5, is_repeatable=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    body, access = request.body, request.access
    states = {each.lower() for each in getattr(body, "states_filter", ())}
    types = {each.lower() for each in getattr(body, "types_filter", ())}
    await context.scheduler.wait_turn()
    groups = context.groups.groups()
    if isinstance(groups, GroupError):
        return {"throttle_time": NO_TIME, "error_code": group_code(groups), "groups": ()}
    sees_all = access.may(Operation.DESCRIBE)
    selected = [
        each
        async for each in context.scheduler.iterate(groups)
        if (sees_all or access.may(Operation.DESCRIBE, ResourceType.GROUP, each.group_id))
        and (not states or each.state.value.lower() in states)
        and (not types or _TYPE in types)
    ]
    return {
        "throttle_time": NO_TIME,
        "error_code": group_code(None),
        "groups": LazyArray(_group, selected),
    }


def _group(group: Description) -> Fields:
    return {
        "group_id": group.group_id,
        "protocol_type": group.protocol_type,
        "group_state": group.state.value,
        "group_type": _TYPE,
    }
