"""Checks of requests to a consumer group: each returns the error for a rejection, or None.

The order of the checks is Kafka's: it decides which error a client receives.
"""

from __future__ import annotations

from sparklog import limits
from sparklog.broker.groups.group_data import GroupData
from sparklog.broker.groups.members import MEMBER_BYTES, Member
from sparklog.broker.groups.messages import GroupError, GroupState, JoinRequest, SyncRequest
from sparklog.settings import GroupSettings

GROUP_MEMBER_BYTES = 4 * limits.MIB  # of a member's subscriptions, for all assignors that it offers


def group_error(group: GroupData) -> GroupError | None:
    """Checks the group itself."""
    if not group.group_id:
        return GroupError.INVALID_GROUP_ID  # not for commits, which predate this rule
    return GroupError.COORDINATOR_NOT_AVAILABLE if group.state is GroupState.DEAD else None


def identity_error(group: GroupData, member_id: str, instance_id: str | None) -> GroupError | None:
    """Checks that the member exists and holds the instance id that it names."""
    if instance_id is not None:
        holder = group.members.holder(instance_id)
        if holder is not None and holder != member_id:
            return GroupError.FENCED_INSTANCE_ID
        if holder is None:
            return GroupError.UNKNOWN_MEMBER_ID
    return None if member_id in group.members else GroupError.UNKNOWN_MEMBER_ID


def member_error(
    group: GroupData, member_id: str, instance_id: str | None, generation: int
) -> GroupError | None:
    """Checks that a request comes from a member of the current generation."""
    error = group_error(group) or identity_error(group, member_id, instance_id)
    if error is None and generation != group.generation:
        return GroupError.ILLEGAL_GENERATION
    return error


def join_error(
    group: GroupData, settings: GroupSettings, request: JoinRequest, known_id: str
) -> GroupError | None:
    """Checks JoinGroup; `known_id` is the member that it names, by member id or instance id."""
    if not group.group_id:
        return GroupError.INVALID_GROUP_ID
    session_ms = request.session_timeout_ms
    if not settings.min_session_timeout_ms <= session_ms <= settings.max_session_timeout_ms:
        return GroupError.INVALID_SESSION_TIMEOUT
    if group.state is GroupState.DEAD:
        return GroupError.COORDINATOR_NOT_AVAILABLE
    known = group.members.get(known_id)
    if not _fits_size(group, settings, known):
        return GroupError.GROUP_MAX_SIZE_REACHED
    if not _fits_protocols(group, request):
        return GroupError.INCONSISTENT_GROUP_PROTOCOL
    size = request.subscribed_bytes
    if size > GROUP_MEMBER_BYTES:
        return GroupError.INVALID_REQUEST
    more_bytes = size - known.request.subscribed_bytes if known is not None else size + MEMBER_BYTES
    # A member that takes no more memory than before may always continue.
    if more_bytes > 0 and not group.members.has_memory(more_bytes):
        return GroupError.COORDINATOR_NOT_AVAILABLE
    return None


def sync_error(group: GroupData, request: SyncRequest) -> GroupError | None:
    """Checks SyncGroup."""
    error = member_error(group, request.member_id, request.instance_id, request.generation)
    if error is not None:
        return error
    for asked, ours in (
        (request.protocol_type, group.protocol_type),
        (request.protocol, group.protocol),
    ):
        if asked is not None and ours is not None and asked != ours:
            return GroupError.INCONSISTENT_GROUP_PROTOCOL
    if group.state is GroupState.PREPARING:
        return GroupError.REBALANCE_IN_PROGRESS
    if not group.members.has_memory(_assigned_bytes(group, request)):
        return GroupError.COORDINATOR_NOT_AVAILABLE
    return None


def commit_error(
    group: GroupData,
    *,
    member_id: str,
    instance_id: str | None,
    generation: int,
    transactional: bool,
) -> GroupError | None:
    """Checks OffsetCommit.

    An empty group accepts offsets without a generation from any client: a consumer that assigns
    partitions itself, or an administrator. A transaction may omit its member at any time, and a
    rebalance does not stop it (KIP-447).
    """
    if group.state is GroupState.DEAD:
        return GroupError.COORDINATOR_NOT_AVAILABLE
    if generation < 0 and group.state is GroupState.EMPTY:
        return None
    if generation < 0 and not member_id and instance_id is None:
        return None if transactional else GroupError.UNKNOWN_MEMBER_ID
    error = identity_error(group, member_id, instance_id)
    if error is not None:
        return error
    if generation != group.generation:
        return GroupError.ILLEGAL_GENERATION
    if group.state is GroupState.COMPLETING and not transactional:
        return GroupError.REBALANCE_IN_PROGRESS
    return None


def delete_error(group: GroupData) -> GroupError | None:
    """Checks DeleteGroups: only a group without members may be deleted."""
    if group.state is GroupState.DEAD:
        return GroupError.GROUP_ID_NOT_FOUND
    return None if group.state is GroupState.EMPTY else GroupError.NON_EMPTY_GROUP


def _fits_size(group: GroupData, settings: GroupSettings, known: Member | None) -> bool:
    """Checks the group's size; while members rejoin, the first to arrive stay in it."""
    if group.state is GroupState.EMPTY:
        return True
    if group.state is GroupState.PREPARING:
        return group.members.joining_count < settings.max_size or (
            known is not None and known.joining is not None
        )
    return known is not None or len(group.members) < settings.max_size


def _fits_protocols(group: GroupData, request: JoinRequest) -> bool:
    """Checks that the request has the group's protocol type, and a protocol that all offer."""
    if group.state is GroupState.EMPTY:
        return bool(request.protocol_type and request.protocols)
    return request.protocol_type == group.protocol_type and group.members.agrees(request)


def _assigned_bytes(group: GroupData, request: SyncRequest) -> int:
    """Returns the memory of the assignments in a request."""
    if request.member_id != group.leader or group.state is not GroupState.COMPLETING:
        return 0
    return sum(
        len(assignment)
        for member_id, assignment in request.assignments.items()
        if member_id in group.members
    )
