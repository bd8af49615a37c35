"""DescribeGroups (15): the members of groups, and what each reads (KIP-1043)."""

from __future__ import annotations

from typing import Final

from sparklog.broker.groups import GroupError, GroupState
from sparklog.broker.kafka.codes import group_code
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.times import NO_TIME

_FIRST_THAT_KNOWS_MISSING_GROUPS: Final = 6


@serves(15, "describe_groups", last=6)
async def _handle(door: Door, request: Request) -> Reply:
    return {
        "throttle_time": NO_TIME,
        "groups": [_group(door, each, request.version) for each in request.body.groups],
    }


def _group(door: Door, group_id: str, version: int) -> Fields:
    found = door.groups.describe(group_id)
    if isinstance(found, GroupError):
        missing = found is GroupError.GROUP_ID_NOT_FOUND
        tells = not missing or version >= _FIRST_THAT_KNOWS_MISSING_GROUPS
        return {
            "error_code": group_code(found if tells else None),
            "error_message": f"Group {group_id} not found." if missing else None,
            "group_id": group_id,
            "group_state": GroupState.DEAD.value if missing else "",
            "protocol_type": "",
            "protocol_data": "",
            "members": (),
        }
    return {
        "error_code": group_code(None),
        "error_message": None,
        "group_id": group_id,
        "group_state": found.state.value,
        "protocol_type": found.protocol_type,
        "protocol_data": found.protocol,
        "members": [
            {
                "member_id": each.member_id,
                "group_instance_id": each.instance_id,
                "client_id": each.client_id,
                "client_host": each.client_host,
                "member_metadata": each.subscription,
                "member_assignment": each.assignment,
            }
            for each in found.members
        ],
    }
