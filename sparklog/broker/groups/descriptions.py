"""Descriptions of a consumer group: for its members, for administrators and for its record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from sparklog import errors
from sparklog.broker.groups.group_data import GroupData
from sparklog.broker.groups.members import Member
from sparklog.broker.groups.messages import (
    Description,
    GroupState,
    JoinedMember,
    JoinReply,
    JoinRequest,
    MemberProtocol,
    SyncReply,
)
from sparklog.formats import consumer_offsets
from sparklog.formats.consumer_offsets import GroupRecord, MemberRecord

_CONSUMERS: Final = "consumer"
"""The protocol type of groups whose members subscribe to topics."""


def join_reply(group: GroupData, member: Member) -> JoinReply:
    """Returns the reply to a member of the current generation; its leader receives all members."""
    protocol = group.protocol
    assert protocol is not None
    return JoinReply(
        member_id=member.member_id,
        generation=group.generation,
        protocol_type=group.protocol_type,
        protocol=protocol,
        leader=group.leader or "",
        members=tuple(
            JoinedMember(
                member_id=each.member_id,
                instance_id=each.instance_id,
                metadata=each.metadata(protocol),
            )
            for each in (group.members if member.member_id == group.leader else ())
        ),
    )


def sync_reply(group: GroupData, member: Member) -> SyncReply:
    """Returns the reply to a member that has its assignment."""
    return SyncReply(
        protocol_type=group.protocol_type,
        protocol=group.protocol,
        assignment=member.assignment,
    )


def describe(group: GroupData, *, with_members: bool = True) -> Description:
    """Returns the description for DescribeGroups and ListGroups."""
    stable = group.state is GroupState.STABLE
    return Description(
        group_id=group.group_id,
        state=group.state,
        generation=group.generation,
        protocol_type=group.protocol_type or "",
        protocol=(group.protocol or "") if stable else "",
        members=tuple(
            _member_record(each, group.protocol if stable else None, each.assignment)
            for each in (group.members if with_members else ())
        ),
    )


def to_record(group: GroupData, assignments: Mapping[str, bytes]) -> GroupRecord:
    """Returns the record of the group's generation, with `assignments` by member id."""
    return GroupRecord(
        generation=group.generation,
        protocol_type=group.protocol_type,
        protocol=group.protocol,
        leader=group.leader,
        members=tuple(
            _member_record(each, group.protocol, assignments.get(each.member_id, b""))
            for each in group.members
        ),
    )


def members_of(record: GroupRecord) -> Iterable[Member]:
    """Yields the members that a record names, for a group that is being restored."""
    for each in record.members:
        assert record.protocol is not None
        request = JoinRequest(
            client_id=each.client_id,
            client_host=each.client_host,
            session_timeout_ms=each.session_timeout_ms,
            rebalance_timeout_ms=each.rebalance_timeout_ms,
            protocol_type=record.protocol_type or "",
            protocols=(MemberProtocol(record.protocol, each.subscription),),
        )
        yield Member(
            member_id=each.member_id,
            instance_id=each.instance_id,
            request=request,
            assignment=each.assignment,
        )


def subscribed_topics(group: GroupData) -> frozenset[str] | None:
    """Returns the topics that any member subscribes to, or None if they are unknown.

    They are known for an empty group, and for a stable group of consumers whose subscriptions can
    be decoded.
    """
    if group.state is GroupState.EMPTY:
        return frozenset()
    described = describe(group)
    if described.protocol_type != _CONSUMERS or described.state is not GroupState.STABLE:
        return None
    try:
        return frozenset(
            topic
            for member in described.members
            for topic in consumer_offsets.subscribed_topics(member.subscription)
        )
    except errors.CorruptRecord:
        return None


def _member_record(member: Member, protocol: str | None, assignment: bytes) -> MemberRecord:
    return MemberRecord(
        member_id=member.member_id,
        instance_id=member.instance_id,
        client_id=member.request.client_id,
        client_host=member.request.client_host,
        rebalance_timeout_ms=member.request.patience_ms,
        session_timeout_ms=member.request.session_timeout_ms,
        subscription=b"" if protocol is None else member.metadata(protocol),
        assignment=assignment,
    )
