"""The state of a consumer group, by which requests are judged and which replies describe."""

from __future__ import annotations

from sparklog.broker.groups.members import MemberMemory, Members
from sparklog.broker.groups.messages import GroupState


class GroupData:
    """State, generation, protocol and members of a group, empty at first."""

    def __init__(self, group_id: str, memory: MemberMemory | None = None) -> None:
        """`memory` is shared with other groups; None for no limit."""
        self.group_id = group_id
        self.state = GroupState.EMPTY
        self.generation = 0
        self.protocol_type: str | None = None
        self.protocol: str | None = None
        self.members = Members(group_id, memory)

    @property
    def leader(self) -> str | None:
        """The id of the leading member; None if there is none."""
        return self.members.leader
