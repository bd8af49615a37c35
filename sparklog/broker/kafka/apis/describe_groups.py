"""DescribeGroups (15): the members of groups, and what each reads (KIP-1043)."""

from __future__ import annotations

from functools import partial
from typing import Final

from sparklog.broker.groups import GroupError, GroupState, MemberRecord
from sparklog.broker.kafka.codes import group_code
from sparklog.broker.kafka.messages import Each, Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.times import NO_TIME

_FIRST_THAT_KNOWS_MISSING_GROUPS: Final = 6


@serves(15, "describe_groups", last=6)
async def _handle(door: Door, request: Request) -> Reply:
    return {
        "throttle_time": NO_TIME,
        "groups": Each(
            partial(_group, door, request.version), tuple(dict.fromkeys(request.body.groups))
        ),
    }


def _group(door: Door, version: int, group_id: str) -> Fields:
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
        "members": Each(_member, found.members),
    }


def _member(member: MemberRecord) -> Fields:
    return {
        "member_id": member.member_id,
        "group_instance_id": member.instance_id,
        "client_id": member.client_id,
        "client_host": member.client_host,
        "member_metadata": member.subscription,
        "member_assignment": member.assignment,
    }
