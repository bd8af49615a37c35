"""Members of a consumer group, the ids it has handed out, and the memory that both use.

Members and ids have separate limits. An id costs its client one small request, and is usually used
to join a moment later. Beyond the limit on ids, the oldest id of all groups is forgotten, and its
client then asks for a new one. So no number of such requests keeps members out.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from sparklog import limits
from sparklog.broker.groups.messages import JoinRequest, Token
from sparklog.formats.consumer_offsets import MAX_STRING_BYTES

GROUP_GONE_SECONDS = 10.0  # after which a silent, disconnected member may make room for others
_NEW_MEMBER_JOIN_TIMEOUT_MS = 5 * 60_000  # for a member that has never been in a generation

CANCELLED: Final = object()
"""Replaces the token of a request whose caller no longer waits for the reply."""
MEMBER_BYTES: Final = 1_000
"""Memory of a member in addition to its names, protocols and assignment."""
RESERVED_BYTES: Final = 2_000
"""Memory of an id beyond its characters, including that of a group with nothing else."""


class MemberMemory:
    """Memory that the members and ids of several groups share, in bytes."""

    __slots__ = ("_reserved", "held_bytes", "limit_bytes", "reserved_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        """The limit for the members."""
        self.held_bytes = 0
        self.reserved_bytes = 0
        self._reserved: OrderedDict[tuple[str, str], None] = OrderedDict()
        """(group, id) of the ids handed out, oldest first."""

    def has(self, more_bytes: int) -> bool:
        """Returns true if `more_bytes` of members fit."""
        return self.held_bytes + more_bytes <= self.limit_bytes

    def reserve(self, group_id: str, member_id: str) -> None:
        """Counts an id that a group has handed out."""
        self._reserved[group_id, member_id] = None
        self.reserved_bytes += _reserved_bytes(group_id, member_id)

    def release(self, group_id: str, member_id: str) -> None:
        """Stops counting an id."""
        del self._reserved[group_id, member_id]
        self.reserved_bytes -= _reserved_bytes(group_id, member_id)

    def excess(self) -> tuple[str, str] | None:
        """Returns the group and the id to forget if there are too many ids."""
        if self.reserved_bytes <= limits.GROUPS_RESERVED_BYTES:
            return None
        return next(iter(self._reserved))


class Member(msgspec.Struct, kw_only=True, eq=False):
    """One member; change its request and assignment through `Members`, which counts memory."""

    member_id: str
    instance_id: str | None
    request: JoinRequest
    """The last request that it joined with."""
    deadline_ms: int = 0
    heard_ms: int = 0
    """When it last sent a request."""
    assignment: bytes = b""
    is_new: bool = False
    """True if it has not been in a generation yet."""
    joining: Token | None = None
    syncing: Token | None = None

    @property
    def expires_ms(self) -> int | None:
        """When it expires; None while a reply to it is due.

        A new member expires regardless: its client may have vanished unnoticed.
        """
        awaits_reply = (self.joining is not None and self.joining is not CANCELLED) or (
            self.syncing is not None and self.syncing is not CANCELLED
        )
        return None if awaits_reply and not self.is_new else self.deadline_ms

    @property
    def held_bytes(self) -> int:
        """Memory of the member."""
        return (
            MEMBER_BYTES
            + len(self.member_id)
            + self.request.subscribed_bytes
            + len(self.assignment)
        )

    def is_gone(self, now_ms: int) -> bool:
        """Returns true if its connection is closed and it has been silent for some time."""
        return self.heard_ms + GROUP_GONE_SECONDS * 1e3 <= now_ms and self.request.is_gone()

    def offers(self, protocol: str) -> bool:
        """Returns true if the member supports the protocol."""
        return any(each.name == protocol for each in self.request.protocols)

    def metadata(self, protocol: str) -> bytes:
        """Returns the member's subscription in the protocol's format."""
        return next(each.metadata for each in self.request.protocols if each.name == protocol)


class Members:
    """The members of one group, in the order in which they joined, and their leader."""

    __slots__ = (
        "_by_id",
        "_group_id",
        "_held_bytes",
        "_instances",
        "_memory",
        "_offers",
        "earliest_ms",
        "joining_count",
        "leader",
        "reserved",
    )

    def __init__(self, group_id: str, memory: MemberMemory | None = None) -> None:
        self._group_id = group_id
        self._memory = memory or MemberMemory(2**63)
        self._held_bytes = 0
        """This group's share of the memory."""
        self._by_id: dict[str, Member] = {}
        self._instances: dict[str, str] = {}
        """Member ids of static members, by instance id."""
        self._offers: Counter[str] = Counter()
        """The number of members that offer each protocol."""
        self.reserved: dict[str, int] = {}
        """Ids that were handed out and have not joined yet, with their deadlines in ms."""
        self.leader: str | None = None
        """The leader's id; None if there is no member."""
        self.joining_count = 0
        """The number of members that wait for the next generation."""
        self.earliest_ms: int | None = None
        """A lower bound on the time when a member or a reserved id expires."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._by_id.values())

    def __contains__(self, member_id: str) -> bool:
        return member_id in self._by_id

    def __getitem__(self, member_id: str) -> Member:
        return self._by_id[member_id]

    def get(self, member_id: str) -> Member | None:
        """Returns the member with that id, or None."""
        return self._by_id.get(member_id)

    def ids(self) -> Iterable[str]:
        """Returns the ids of all members."""
        return self._by_id.keys()

    def holder(self, instance_id: str) -> str | None:
        """Returns the member id of the static member with that instance id, or None."""
        return self._instances.get(instance_id)

    # -------------------------------------------------------------------------- changing

    def add(self, member: Member) -> None:
        """Adds a member, as the leader if it is the first."""
        self._by_id[member.member_id] = member
        self._count(member, 1)
        if member.instance_id is not None:
            assert member.instance_id not in self._instances
            self._instances[member.instance_id] = member.member_id
        if self.leader is None:
            self.leader = member.member_id

    def remove(self, member: Member) -> None:
        """Removes a member; a leader is succeeded by the oldest remaining member."""
        del self._by_id[member.member_id]
        self._count(member, -1)
        if member.instance_id is not None:
            del self._instances[member.instance_id]
        if member.member_id == self.leader:
            self.leader = next(iter(self._by_id), None)

    def replace(self, old: Member, new: Member) -> None:
        """Replaces a static member with the one that its instance id now belongs to."""
        assert old.instance_id is not None
        assert old.instance_id == new.instance_id
        del self._by_id[old.member_id]
        self._by_id[new.member_id] = new
        self._count(old, -1)
        self._count(new, 1)
        self._instances[old.instance_id] = new.member_id
        if self.leader == old.member_id:
            self.leader = new.member_id

    def subscribe(self, member: Member, request: JoinRequest) -> None:
        """Replaces the request that a member joined with."""
        self._count(member, -1)
        member.request = request
        self._count(member, 1)

    def assign(self, member: Member, assignment: bytes) -> None:
        """Sets a member's assignment."""
        self._hold(len(assignment) - len(member.assignment))
        member.assignment = assignment

    def renew(self, member: Member, now_ms: int) -> None:
        """Restarts a member's session."""
        member.heard_ms = now_ms
        timeout_ms = member.request.session_timeout_ms
        self.expire_at(
            member, now_ms + (_NEW_MEMBER_JOIN_TIMEOUT_MS if member.is_new else timeout_ms)
        )

    def expire_at(self, member: Member, deadline_ms: int) -> None:
        """Sets when a member expires."""
        member.deadline_ms = deadline_ms
        self._note_deadline(deadline_ms)

    def reserve(self, member_id: str, deadline_ms: int) -> None:
        """Hands out an id with which a client may join until the deadline."""
        self.reserved[member_id] = deadline_ms
        self._note_deadline(deadline_ms)
        self._memory.reserve(self._group_id, member_id)

    def release(self, member_id: str) -> bool:
        """Withdraws an id; returns false if it was not handed out, or has joined."""
        if self.reserved.pop(member_id, None) is None:
            return False
        self._memory.release(self._group_id, member_id)
        return True

    def clear(self) -> None:
        """Forgets all members and ids."""
        for member_id in list(self.reserved):
            self.release(member_id)
        for each in (self._by_id, self._instances, self._offers):
            each.clear()
        self._hold(-self._held_bytes)
        self.leader = self.earliest_ms = None

    # -------------------------------------------------------------------------- queries

    def has_memory(self, more_bytes: int) -> bool:
        """Returns true if the shared memory has this many bytes left."""
        return self._memory.has(more_bytes)

    def patience_ms(self) -> int:
        """Returns how long a rebalance waits for the most patient member."""
        return max((each.request.patience_ms for each in self), default=0)

    def agrees(self, request: JoinRequest) -> bool:
        """Returns true if all members offer one of the request's protocols."""
        return any(self._offers[each.name] == len(self._by_id) for each in request.protocols)

    def vote(self) -> str:
        """Returns the protocol with the most votes; members vote for their first that all offer."""
        common = {name for name, count in self._offers.items() if count == len(self._by_id)}
        votes = Counter(
            next(each.name for each in member.request.protocols if each.name in common)
            for member in self
        )
        return min(common, key=lambda name: (-votes[name], name))

    def find_earliest(self) -> None:
        """Sets `earliest_ms` to the exact time."""
        self.earliest_ms = min(self._expiries_ms(), default=None)

    def check(self) -> None:
        """Asserts the invariants that hold between two events."""
        assert (self.leader is None) == (not self._by_id)
        assert self.leader is None or self.leader in self._by_id
        assert self._instances == {
            each.instance_id: each.member_id for each in self if each.instance_id is not None
        }
        assert not self.reserved.keys() & self._by_id.keys()
        assert self.joining_count == sum(each.joining is not None for each in self)
        assert self._offers == Counter(
            name for each in self for name in {each.name for each in each.request.protocols}
        )
        assert self._held_bytes == sum(each.held_bytes for each in self)
        expiries_ms = self._expiries_ms()
        assert not expiries_ms or (
            self.earliest_ms is not None and self.earliest_ms <= min(expiries_ms)
        )

    def _expiries_ms(self) -> list[int]:
        expiries = (each.expires_ms for each in self)
        return [*(each for each in expiries if each is not None), *self.reserved.values()]

    def _note_deadline(self, deadline_ms: int) -> None:
        if self.earliest_ms is None or deadline_ms < self.earliest_ms:
            self.earliest_ms = deadline_ms

    def _count(self, member: Member, step: int) -> None:
        self._hold(step * member.held_bytes)
        for name in {each.name for each in member.request.protocols}:
            self._offers[name] += step
            if not self._offers[name]:
                del self._offers[name]

    def _hold(self, more_bytes: int) -> None:
        self._held_bytes += more_bytes
        self._memory.held_bytes += more_bytes


def new_member_id(name: str, unique: str) -> str:
    """Returns `name`-`unique`; a name too long for a record is truncated."""
    name_bytes = MAX_STRING_BYTES - len(f"-{unique}".encode())
    return f"{name.encode()[:name_bytes].decode(errors='ignore')}-{unique}"


def _reserved_bytes(group_id: str, member_id: str) -> int:
    """Returns the memory of an id that was handed out."""
    return RESERVED_BYTES + 2 * len(group_id) + len(member_id)
