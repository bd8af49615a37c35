"""Requests to consumer groups, their replies, and the errors and states that these name."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Mapping
from typing import Final, TypeAlias

import msgspec

from sparklog.formats.consumer_offsets import GroupRecord, MemberRecord

Token: TypeAlias = Hashable
"""The caller's token for a request that waits for its reply."""

NO_GENERATION: Final = -1
PROTOCOL_BYTES: Final = 200
"""Memory of a protocol that a member offers, in addition to its name and metadata."""


class GroupError(enum.Enum):
    """Kafka's error names; a listener maps them to codes."""

    COORDINATOR_LOAD_IN_PROGRESS = enum.auto()
    COORDINATOR_NOT_AVAILABLE = enum.auto()
    FENCED_INSTANCE_ID = enum.auto()
    GROUP_ID_NOT_FOUND = enum.auto()
    GROUP_MAX_SIZE_REACHED = enum.auto()
    GROUP_SUBSCRIBED_TO_TOPIC = enum.auto()
    ILLEGAL_GENERATION = enum.auto()
    INCONSISTENT_GROUP_PROTOCOL = enum.auto()
    INVALID_GROUP_ID = enum.auto()
    INVALID_REQUEST = enum.auto()
    INVALID_SESSION_TIMEOUT = enum.auto()
    MEMBER_ID_REQUIRED = enum.auto()
    NON_EMPTY_GROUP = enum.auto()
    NOT_COORDINATOR = enum.auto()
    OFFSET_METADATA_TOO_LARGE = enum.auto()
    REBALANCE_IN_PROGRESS = enum.auto()
    UNKNOWN_MEMBER_ID = enum.auto()
    UNKNOWN_SERVER_ERROR = enum.auto()
    UNKNOWN_TOPIC_OR_PARTITION = enum.auto()


class GroupState(enum.Enum):
    """A group's state; the values are those of Kafka's DescribeGroups."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


class MemberProtocol(msgspec.Struct, frozen=True):
    """An assignment protocol that a member offers, with its subscription in that protocol."""

    name: str
    metadata: bytes


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """JoinGroup; protocols are in order of preference."""

    member_id: str = ""
    instance_id: str | None = None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int = -1
    """The session timeout applies unless this is positive: version 0 has none."""
    protocol_type: str
    protocols: tuple[MemberProtocol, ...]
    member_id_required: bool = True
    """The client understands MEMBER_ID_REQUIRED: version 4 and later."""
    skips_assignment: bool = True
    """The client understands `skip_assignment`: version 9 and later."""
    reason: str | None = None
    is_gone: Callable[[], bool] = lambda: False
    """Returns true once the connection of the request is closed."""

    @property
    def subscribed_bytes(self) -> int:
        """Memory of the member's names and protocols."""
        names = self.instance_id, self.client_id, self.client_host, self.protocol_type
        return sum(len(each or "") for each in names) + sum(
            len(each.name) + len(each.metadata) + PROTOCOL_BYTES for each in self.protocols
        )

    @property
    def patience_ms(self) -> int:
        """The longest time for which a rebalance waits for the member."""
        return (
            self.rebalance_timeout_ms if self.rebalance_timeout_ms > 0 else self.session_timeout_ms
        )


class JoinedMember(msgspec.Struct, frozen=True, kw_only=True):
    """A member of the new generation, as its leader sees it."""

    member_id: str
    instance_id: str | None
    metadata: bytes


class JoinReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to JoinGroup; `members` is for the leader only."""

    error: GroupError | None = None
    member_id: str
    generation: int = NO_GENERATION
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = ""
    members: tuple[JoinedMember, ...] = ()
    skip_assignment: bool = False


class SyncRequest(msgspec.Struct, frozen=True, kw_only=True):
    """SyncGroup; `assignments`, by member id, count only if they come from the leader."""

    member_id: str
    instance_id: str | None = None
    generation: int
    protocol_type: str | None = None
    protocol: str | None = None
    assignments: Mapping[str, bytes] = msgspec.field(default_factory=dict)


class SyncReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to SyncGroup."""

    error: GroupError | None = None
    protocol_type: str | None = None
    protocol: str | None = None
    assignment: bytes = b""


class Leaver(msgspec.Struct, frozen=True, kw_only=True):
    """A member to remove: by its id, or if it is empty, by the instance id it holds."""

    member_id: str = ""
    instance_id: str | None = None
    reason: str | None = None


class LeaverReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply for one leaver."""

    member_id: str
    instance_id: str | None
    error: GroupError | None = None


class LeaveReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to LeaveGroup: one of `members` for each leaver, in the same order.

    Up to version 2 of the request, the error of the only leaver is that of the whole reply.
    """

    error: GroupError | None = None
    members: tuple[LeaverReply, ...] = ()


Reply: TypeAlias = JoinReply | SyncReply | LeaveReply


class GroupResult(msgspec.Struct, frozen=True, kw_only=True):
    """Replies to send immediately, and a record to make durable."""

    replies: tuple[tuple[Token, Reply], ...] = ()
    record: GroupRecord | None = None


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """DescribeGroups; only a stable group has a protocol and subscriptions."""

    group_id: str
    state: GroupState
    generation: int
    protocol_type: str
    protocol: str
    members: tuple[MemberRecord, ...]
