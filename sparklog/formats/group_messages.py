"""Consumer group messages between client and broker: part of `flight_messages`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sparklog.display import html_table

# JSON's integers are unbounded; the broker's are not.
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class GroupCoordinator(msgspec.Struct, frozen=True, kw_only=True):
    """The broker that coordinates a group."""

    broker: int


class GroupName(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    group: str


class GroupProtocol(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An assignment protocol, with a member's subscription in that protocol's format."""

    name: str
    metadata: bytes = b""


class JoinGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Joins a group or stays in it; the reply comes when the next generation begins."""

    group: str
    member_id: str = ""
    """Empty for a new member."""
    instance_id: str | None = None
    client_id: str = ""
    """For display."""
    session_timeout_ms: Int32
    rebalance_timeout_ms: Int32
    protocol_type: str = "consumer"
    protocols: list[GroupProtocol]
    member_id_required: bool = False
    """A new member first receives its id, without a generation, and joins again with it (KIP-394),
    so that a lost reply leaves no unknown member behind."""


class GroupMember(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A member, with `metadata` in the leader's `JoinedGroup`, and without it in `GroupInfo`."""

    member_id: str
    instance_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    metadata: bytes = b""
    assignment: bytes = b""


class JoinedGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A generation of a group; its leader receives the members, and assigns the partitions.

    Generation -1: not joined yet; join again with the member id.
    """

    member_id: str
    generation: int = -1
    protocol: str = ""
    leader: str = ""
    members: list[GroupMember] = []


class SyncGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Submits the assignments, as the leader, and requests the member's own."""

    group: str
    member_id: str
    instance_id: str | None = None
    generation: Int32
    assignments: dict[str, bytes] = {}


class SyncedGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    assignment: bytes = b""


class GroupHeartbeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    group: str
    member_id: str
    instance_id: str | None = None
    generation: Int32


class GroupHeartbeatReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`rebalancing`: finish, commit, and join again."""

    rebalancing: bool = False


class LeaveGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    group: str
    member_id: str = ""
    instance_id: str | None = None


class GroupOffset(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The next offset that a group will read from a partition."""

    topic: str
    partition: Int32
    offset: Int64
    leader_epoch: Int32 = -1
    metadata: str = ""
    commit_ms: int = -1
    """The commit time in ms since the Unix epoch; ignored in a commit."""
    topic_id: str = ""
    """The topic's id in a commit, which is rejected if the topic has been recreated since."""


class CommitOffsets(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Commits offsets; without a generation, for a group without members."""

    group: str
    member_id: str = ""
    instance_id: str | None = None
    generation: Int32 = -1
    offsets: list[GroupOffset]


class GroupPartition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    topic: str
    partition: Int32


class ForgetOffsets(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Deletes a group's committed offsets for topics that no member subscribes to."""

    group: str
    partitions: list[GroupPartition]


class GroupOffsets(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    offsets: list[GroupOffset] = []


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    group: str
    state: str
    """Kafka's name: Empty, PreparingRebalance, CompletingRebalance or Stable."""
    protocol_type: str = ""
    protocol: str = ""
    generation: int = 0
    members: list[GroupMember] = []

    def __repr__(self) -> str:
        return f"GroupInfo({self.group!r}, {self.state}, {len(self.members)} members)"

    def _repr_html_(self) -> str:
        heading = ("member", "instance", "client", "host")
        rows = [
            (each.member_id, each.instance_id, each.client_id, each.client_host)
            for each in self.members
        ]
        return html_table(f"{self.group}: {self.state}", heading, rows)


class GroupList(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The groups, without their members."""

    groups: list[GroupInfo] = []
