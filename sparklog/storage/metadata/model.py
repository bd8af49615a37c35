"""Values of the cluster metadata: brokers, epochs, topics and the leaders of their partitions.

Values are immutable. A change makes a new version, which shares everything unchanged with the
version before.
"""

from __future__ import annotations

import enum

import msgspec

from sparklog import errors, listeners
from sparklog.storage.metadata.processes import Process
from sparklog.storage.snapshot import WalKind


class BrokerKind(enum.StrEnum):
    """The way a broker was started; determines which broker gives way to which."""

    STANDING = "standing"
    """Started by `sparklog broker`; replaces the other kinds without being asked."""
    EMBEDDED = "embedded"
    """Started inside a program that opened the root; ends with the program."""
    DETACHED = "detached"
    """Started as a separate process by a program that needed a broker; stops when idle."""


class Membership(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Address and rack of a member of a cluster, for clients and for the other members."""

    kafka: str = ""
    """The `host:port` of the first Kafka listener; empty without one."""
    listeners: dict[str, str] = {}
    """The `host:port` of each Kafka listener by its name, from feature level 2 on."""
    flight: dict[str, str] = {}
    """The address of each Flight listener by its name, as clients write it, if there are several;
    from feature level 2 on."""
    rack: str = ""
    """Its failure domain, from `cluster.rack`; empty if that is unset."""


class BrokerRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """The newest epoch of a broker id, and its address. Kept forever, so epochs never repeat."""

    epoch: int
    flight: str = ""
    started_us: int = 0
    """Wall time of the broker's host; for messages only."""
    kind: str = BrokerKind.STANDING
    process: Process = Process()
    dead_after_seconds: float = 0.0
    """The longest silence before others consider it dead; 0 if it did not register any."""
    membership: Membership | msgspec.UnsetType = msgspec.UNSET
    """Unset if it leads the root alone, so that its encoding is that of earlier releases."""

    known_level: int | msgspec.UnsetType = msgspec.UNSET
    """The highest feature level it supports. Unset if that is 1, as in releases without levels."""

    @property
    def level(self) -> int:
        """The highest feature level that it supports."""
        return self.known_level if isinstance(self.known_level, int) else 1

    @property
    def is_member(self) -> bool:
        """True if it shares the root with other members."""
        return isinstance(self.membership, Membership)

    @property
    def kafka(self) -> str:
        """The `host:port` of a member's first Kafka listener; empty if it has none."""
        return self.membership.kafka if isinstance(self.membership, Membership) else ""

    def kafka_at(self, listener: str) -> str:
        """Returns the `host:port` of a member's Kafka listener of that name; empty without one.

        A member that registered at feature level 1 has one listener, whose name is unknown.
        """
        if not isinstance(self.membership, Membership):
            return ""
        listeners = self.membership.listeners
        return listeners.get(listener, "") if listeners else self.membership.kafka

    @property
    def flight_addresses(self) -> list[str]:
        """The addresses of all Flight listeners."""
        several = self.membership.flight if isinstance(self.membership, Membership) else {}
        return [self.flight, *several.values()]

    def flight_at(self, listener: str, *, has_tls: bool) -> str:
        """Returns the address of a Flight listener of that name; empty without one.

        A broker with one listener has registered no name for it: it is the address of that if it
        uses TLS, or not, as asked.
        """
        several = self.membership.flight if isinstance(self.membership, Membership) else {}
        if several:
            return several.get(listener, "")
        return self.flight if self.flight.startswith(listeners.TLS_SCHEME) is has_tls else ""

    @property
    def rack(self) -> str:
        """The failure domain of a member; empty if none is set."""
        return self.membership.rack if isinstance(self.membership, Membership) else ""


class Resignation(msgspec.Struct, frozen=True, array_like=True):
    """The flush in which a leader gave up a partition; it contains the partition's full state."""

    broker: int
    epoch: int
    sequence: int


class TopicMetadata(msgspec.Struct, frozen=True, kw_only=True):
    topic_id: str
    leaders: tuple[int, ...]
    """Broker id of the leader of each partition."""
    leader_epochs: tuple[int, ...]
    """Leader epoch of each partition; incremented each time the partition is assigned a leader."""
    config: dict[str, str] = {}
    resigned: dict[int, Resignation] = {}
    """For each partition whose state a leader gave up in an open epoch, the newest such flush."""

    @property
    def partition_count(self) -> int:
        return len(self.leaders)


class Epoch(msgspec.Struct, frozen=True, array_like=True, order=True):
    """An epoch of a broker whose WAL may still be needed: see `storage/metadata/leadership.py`."""

    broker: int
    epoch: int
    log: WalKind = WalKind.OBJECTS
    """Storage of its write-ahead log; a root migrates from one kind to another epoch by epoch."""
    fenced: bool = False
    """True once its fence exists: no flush follows."""
    heirs: tuple[int, ...] = ()
    """Sorted ids of the brokers that may need its entries or states."""

    @property
    def id(self) -> tuple[int, int]:
        """Broker id and epoch."""
        return self.broker, self.epoch


class ClusterMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """One version of the metadata. `change_id` distinguishes two writers of the same version."""

    version: int = 0
    change_id: str = ""
    brokers: dict[int, BrokerRegistration] = {}
    open_epochs: tuple[Epoch, ...] = ()
    controller: int = -1
    topics: dict[str, TopicMetadata] = {}
    next_producer_id: int = 0
    level: int = 1
    """The feature level: format additions up to this level may be written. It only rises."""
    groups: dict[str, dict[str, str]] = {}
    """Configurations of consumer groups that have one, from level 2 on."""
    security: str = ""
    """The id of the chain with the security state, from level 3 on; empty without users. Once it is
    set, it is never empty again."""

    def topic(self, name: str) -> TopicMetadata:
        """Raises `UnknownTopic`."""
        found = self.topics.get(name)
        if found is None:
            raise errors.UnknownTopic(topic=name)
        return found
