"""The Flight listener's actions on consumer groups, as calls to the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from sparklog import errors
from sparklog.broker.groups.coordinator import Commit, Coordinator, Errors
from sparklog.broker.groups.messages import (
    Description,
    GroupError,
    JoinReply,
    JoinRequest,
    Leaver,
    LeaveReply,
    MemberProtocol,
    SyncReply,
    SyncRequest,
)
from sparklog.formats import flight_messages, group_messages
from sparklog.formats.consumer_offsets import MAX_STRING_BYTES

_T = TypeVar("_T")
Answer: TypeAlias = msgspec.Struct | Future[Any]
"""A reply, or a future for one, which may hold an error instead."""

_BUSY: Final = {
    GroupError.COORDINATOR_LOAD_IN_PROGRESS,
    GroupError.COORDINATOR_NOT_AVAILABLE,
    GroupError.REBALANCE_IN_PROGRESS,
}
_FENCED: Final = {
    GroupError.FENCED_INSTANCE_ID,
    GroupError.ILLEGAL_GENERATION,
    GroupError.UNKNOWN_MEMBER_ID,
}
_NAME_LENGTH: Final = 250
"""The maximum length of a name in an error: trailers can hold a few thousand bytes."""
_HINTS: Final = {
    GroupError.NON_EMPTY_GROUP: ": it has members; stop them first",
    GroupError.GROUP_ID_NOT_FOUND: (
        ": there is no such group; correct the name (`sparklog groups list` shows the groups)"
    ),
    GroupError.GROUP_SUBSCRIBED_TO_TOPIC: ": a member subscribes to the topic; stop it first",
    GroupError.INVALID_GROUP_ID: f": it must be 1 to {MAX_STRING_BYTES:,} bytes long",
    GroupError.INVALID_REQUEST: f": a name or id is longer than {MAX_STRING_BYTES:,} bytes",
    GroupError.INCONSISTENT_GROUP_PROTOCOL: ": its members assign partitions in a different way",
    GroupError.INVALID_SESSION_TIMEOUT: (
        ": the broker's settings groups.min_session_timeout_ms and max_session_timeout_ms allow"
        " other session timeouts"
    ),
}


def actions(groups: Coordinator) -> Mapping[str, Callable[[Any], Answer]]:
    """Returns the function for each action on groups but `join`, by the action's name."""

    def opened(call: Callable[[Any], Answer]) -> Callable[[Any], Answer]:
        def first_open(request: Any) -> Answer:
            groups.open()
            return call(request)

        return first_open

    return {
        "groups.sync": lambda request: _sync(groups, request),
        "groups.heartbeat": lambda request: _heartbeat(groups, request),
        "groups.leave": lambda request: _leave(groups, request),
        "groups.commit": opened(lambda request: _commit(groups, request)),
        "groups.forget": lambda request: _forget(groups, request),
        "groups.offsets": lambda request: _offsets(groups, request),
        "groups.find": opened(
            lambda request: group_messages.GroupCoordinator(
                broker=groups.coordinator_of(request.group)
            )
        ),
        "groups.list": lambda _: _list(groups),
        "groups.describe": lambda request: _info(
            _checked(groups.describe(request.group), request.group)
        ),
        "groups.delete": lambda request: _chained(
            groups.delete(request.group), lambda error: _empty(error, request.group)
        ),
    }


def join(groups: Coordinator, request: group_messages.JoinGroup, *, host: str) -> Answer:
    """Joins a group. `host`: the client's address, as operators see it."""
    groups.open()
    group_request = JoinRequest(
        member_id=request.member_id,
        instance_id=request.instance_id,
        client_id=request.client_id,
        client_host=f"/{host}",  # as Kafka shows it
        session_timeout_ms=request.session_timeout_ms,
        rebalance_timeout_ms=request.rebalance_timeout_ms,
        protocol_type=request.protocol_type,
        protocols=tuple(MemberProtocol(each.name, each.metadata) for each in request.protocols),
        member_id_required=request.member_id_required,
    )

    def joined(reply: JoinReply) -> group_messages.JoinedGroup:
        if reply.error is GroupError.MEMBER_ID_REQUIRED:
            return group_messages.JoinedGroup(member_id=reply.member_id)
        _check(reply.error, request.group, request.member_id)
        return group_messages.JoinedGroup(
            member_id=reply.member_id,
            generation=reply.generation,
            protocol=reply.protocol or "",
            leader="" if reply.skip_assignment else reply.leader,
            members=[
                group_messages.GroupMember(
                    member_id=each.member_id,
                    instance_id=each.instance_id,
                    metadata=each.metadata,
                )
                for each in reply.members
            ],
        )

    return _chained(groups.join(request.group, group_request), joined)


def _sync(groups: Coordinator, request: group_messages.SyncGroup) -> Answer:
    group_request = SyncRequest(
        member_id=request.member_id,
        instance_id=request.instance_id,
        generation=request.generation,
        assignments=request.assignments,
    )

    def synced(reply: SyncReply) -> group_messages.SyncedGroup:
        _check(reply.error, request.group, request.member_id)
        return group_messages.SyncedGroup(assignment=reply.assignment)

    return _chained(groups.sync(request.group, group_request), synced)


def _heartbeat(groups: Coordinator, request: group_messages.GroupHeartbeat) -> Answer:
    error = groups.heartbeat(
        request.group,
        member_id=request.member_id,
        instance_id=request.instance_id,
        generation=request.generation,
    )
    if error is GroupError.REBALANCE_IN_PROGRESS:
        return group_messages.GroupHeartbeatReply(rebalancing=True)
    _check(error, request.group, request.member_id)
    return group_messages.GroupHeartbeatReply()


def _leave(groups: Coordinator, request: group_messages.LeaveGroup) -> Answer:
    leaver = Leaver(member_id=request.member_id, instance_id=request.instance_id)

    def left(reply: LeaveReply) -> flight_messages.Empty:
        error = reply.error or next((each.error for each in reply.members), None)
        return _empty(error, request.group, request.member_id)

    return _chained(groups.leave(request.group, [leaver]), left)


def _commit(groups: Coordinator, request: group_messages.CommitOffsets) -> Answer:
    offsets = {
        (each.topic, each.partition): Commit(
            offset=each.offset,
            leader_epoch=each.leader_epoch,
            metadata=each.metadata,
            topic_id=each.topic_id,
        )
        for each in request.offsets
    }
    waiting = groups.commit(
        request.group,
        offsets,
        member_id=request.member_id,
        instance_id=request.instance_id,
        generation=request.generation,
    )
    return _chained(waiting, lambda results: _all(results, request.group, request.member_id))


def _forget(groups: Coordinator, request: group_messages.ForgetOffsets) -> Answer:
    partitions = [(each.topic, each.partition) for each in request.partitions]
    return _chained(
        groups.delete_offsets(request.group, partitions),
        lambda results: _all(results, request.group),
    )


def _offsets(groups: Coordinator, request: group_messages.GroupName) -> Answer:
    found = _checked(groups.committed(request.group), request.group)
    return group_messages.GroupOffsets(
        offsets=[
            group_messages.GroupOffset(
                topic=topic,
                partition=partition,
                offset=value.offset,
                leader_epoch=value.leader_epoch,
                metadata=value.metadata,
                commit_ms=value.commit_ms,
                topic_id=value.topic_id,
            )
            for (topic, partition), value in sorted(found.items())
        ]
    )


def _list(groups: Coordinator) -> Answer:
    found = _checked(groups.groups(), "")
    return group_messages.GroupList(
        groups=[
            msgspec.structs.replace(_info(each), members=[])
            for each in sorted(found, key=lambda each: each.group_id)
        ]
    )


def _info(found: Description) -> group_messages.GroupInfo:
    return group_messages.GroupInfo(
        group=found.group_id,
        state=found.state.value,
        protocol_type=found.protocol_type,
        protocol=found.protocol,
        generation=found.generation,
        members=[
            group_messages.GroupMember(
                member_id=each.member_id,
                instance_id=each.instance_id,
                client_id=each.client_id,
                client_host=each.client_host,
                metadata=each.subscription,
                assignment=each.assignment,
            )
            for each in found.members
        ],
    )


# ------------------------------------------------------------------------------ answers


def _chained(waiting: Future[_T], finish: Callable[[_T], msgspec.Struct]) -> Future[Any]:
    """Returns a future for `finish(value)`. Cancelling it cancels `waiting`."""
    answer: Future[Any] = Future()

    def settle(done: Future[_T]) -> None:
        if done.cancelled() or not answer.set_running_or_notify_cancel():
            return
        try:
            answer.set_result(finish(done.result()))
        except errors.SparklogError as error:
            answer.set_exception(error)

    answer.add_done_callback(lambda done: waiting.cancel() if done.cancelled() else None)
    waiting.add_done_callback(settle)
    return answer


def _all(found: Errors, group: str, member_id: str = "") -> flight_messages.Empty:
    """Raises the error for the first rejected partition; the offsets of the others are stored."""
    for (topic, partition), error in found.items():
        if error is GroupError.UNKNOWN_TOPIC_OR_PARTITION:
            raise errors.GroupRefused(
                group=_short(group),
                error=error.name,
                hint=f": there is no {_short(topic)}-{partition}",
            )
        _check(error, group, member_id)
    return flight_messages.Empty()


def _empty(error: GroupError | None, group: str, member_id: str = "") -> flight_messages.Empty:
    _check(error, group, member_id)
    return flight_messages.Empty()


def _checked(found: _T | GroupError, group: str) -> _T:
    if isinstance(found, GroupError):
        raise _error(found, group, "")
    return found


def _check(error: GroupError | None, group: str, member_id: str) -> None:
    if error is not None:
        raise _error(error, group, member_id)


def _error(error: GroupError, group: str, member_id: str) -> errors.SparklogError:
    name = _short(group)
    if error is GroupError.NOT_COORDINATOR:
        return errors.NotCoordinator(group=name)
    if error in _BUSY:
        return errors.GroupBusy(group=name, error=error.name)
    if error in _FENCED:
        return errors.MemberFenced(group=name, member_id=_short(member_id), error=error.name)
    return errors.GroupRefused(group=name, error=error.name, hint=_HINTS.get(error, ""))


def _short(name: str) -> str:
    return name if len(name) <= _NAME_LENGTH else f"{name[:_NAME_LENGTH]}…"
