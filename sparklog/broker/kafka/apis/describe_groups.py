"""DescribeGroups (15): the state of groups, their members and their assignments (KIP-1043)."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Final

from kio.schema.errors import ErrorCode

from sparklog.broker.groups.messages import GroupError, GroupState
from sparklog.broker.kafka.error_codes import code_of, group_code
from sparklog.broker.kafka.messages import Fields, LazyArray, Request
from sparklog.broker.kafka.operations import NOT_REQUESTED, on_group
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.formats.consumer_offsets import MemberRecord
from sparklog.security.acl import Operation, ResourceType

_FIRST_WITH_GROUP_NOT_FOUND: Final = 6


@serves(15, "describe_groups", max_version=6, is_repeatable=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    refused = await request.access.refused(
        Operation.DESCRIBE, ResourceType.GROUP, request.body.groups
    )
    return {
        "throttle_time": NO_TIME,
        "groups": LazyArray(
            partial(_group, context, request, refused),
            tuple(dict.fromkeys(request.body.groups)),
            is_slow=True,  # each may have a thousand members
        ),
    }


def _group(
    context: HandlerContext, request: Request, refused: Collection[str], group_id: str
) -> Fields:
    if group_id in refused:
        error = request.access.error(Operation.DESCRIBE, ResourceType.GROUP, group_id)
        return _no_group(group_id, code_of(error), str(error))
    group = context.groups.describe(group_id)
    if isinstance(group, GroupError):
        is_missing = group is GroupError.GROUP_ID_NOT_FOUND
        reports_missing = not is_missing or request.version >= _FIRST_WITH_GROUP_NOT_FOUND
        return _no_group(
            group_id,
            group_code(group if reports_missing else None),
            f"Group {group_id} not found." if is_missing else None,
            state=GroupState.DEAD.value if is_missing else "",
            operations=on_group(request, group_id) if is_missing else NOT_REQUESTED,
        )
    return {
        "error_code": group_code(None),
        "error_message": None,
        "group_id": group_id,
        "group_state": group.state.value,
        "protocol_type": group.protocol_type,
        "protocol_data": group.protocol,
        "members": LazyArray(_member, group.members),
        "authorized_operations": on_group(request, group_id),
    }


def _no_group(
    group_id: str,
    code: ErrorCode,
    message: str | None,
    *,
    state: str = "",
    operations: int = NOT_REQUESTED,
) -> Fields:
    return {
        "error_code": code,
        "error_message": message,
        "group_id": group_id,
        "group_state": state,
        "protocol_type": "",
        "protocol_data": "",
        "members": (),
        "authorized_operations": operations,
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
