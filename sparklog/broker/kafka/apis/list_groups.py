"""ListGroups (16): all groups, or those in some states (KIP-518) or of some types (KIP-848)."""

from __future__ import annotations

from sparklog.broker.groups import Description, GroupError
from sparklog.broker.kafka.codes import group_code
from sparklog.broker.kafka.messages import Each, Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.times import NO_TIME

_TYPE = "classic"


@serves(16, "list_groups", last=5)
async def _handle(door: Door, request: Request) -> Reply:
    body = request.body
    states = {each.lower() for each in getattr(body, "states_filter", ())}
    types = {each.lower() for each in getattr(body, "types_filter", ())}
    found = door.groups.groups()
    if isinstance(found, GroupError):
        return {"throttle_time": NO_TIME, "error_code": group_code(found), "groups": ()}
    wanted = [
        each
        async for each in door.turns.over(found)
        if (not states or each.state.value.lower() in states) and (not types or _TYPE in types)
    ]
    return {
        "throttle_time": NO_TIME,
        "error_code": group_code(None),
        "groups": Each(_group, wanted),
    }


def _group(group: Description) -> Fields:
    return {
        "group_id": group.group_id,
        "protocol_type": group.protocol_type,
        "group_state": group.state.value,
        "group_type": _TYPE,
    }
