"""The members of the cluster that are up, as a broker reports them to its clients."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from sparklog.broker.leader_metadata import LeaderMetadata
from sparklog.broker.log.takeover import Leadership
from sparklog.clock import Clock
from sparklog.storage.metadata import placement
from sparklog.storage.metadata.model import BrokerRegistration, ClusterMetadata
from sparklog.storage.metadata.processes import Fate, fate_of

_FATE_SECONDS: Final = 0.01
"""The time for which the fates of other members' processes are cached."""
_FAREWELL_SECONDS: Final = 5.0
"""The time for which a member that has just gone is still reported to clients."""


class _Members(NamedTuple):
    """The members, as of a version of the metadata."""

    metadata: ClusterMetadata | None = None
    registered: Mapping[int, BrokerRegistration] = MappingProxyType({})
    up: Mapping[int, BrokerRegistration] = MappingProxyType({})
    """Excludes those whose process had ended."""
    gone: Mapping[int, tuple[BrokerRegistration, float]] = MappingProxyType({})
    """Those that have just left `up`, and the monotonic time until which clients hear of them."""
    until: float = 0.0
    """The monotonic time at which `up` expires."""


class LiveMembers:
    """Tracks the members that are up. Thread-safe."""

    def __init__(self, metadata: LeaderMetadata, own: Leadership, *, clock: Clock) -> None:
        self._metadata = metadata
        self._own = own
        self._clock = clock
        self._members = _Members()

    def up(self) -> Mapping[int, BrokerRegistration]:
        """Returns the brokers that are up, by id; only itself if this broker leads the root alone.

        Omits those whose process has ended on this machine: others will lead in their place, and
        clients will soon ask again.
        """
        known, now = self._members, self._clock.monotonic()
        if known.metadata is self._metadata.known and now < known.until:
            return known.up
        metadata, registered = self._metadata.known, known.registered
        if metadata is not known.metadata:
            ids = [self._own.broker]
            if self._own.is_member:
                ids = sorted({*ids, *(each.broker for each in placement.candidates(metadata))})
            registered = {each: metadata.brokers[each] for each in ids if each in metadata.brokers}
        up = {
            number: each
            for number, each in registered.items()
            if number == self._own.broker or fate_of(each.process) is not Fate.GONE
        }
        gone = {
            number: (each, until)
            for number, (each, until) in known.gone.items()
            if now < until and number not in up
        }
        if now < (until := known.until + _FAREWELL_SECONDS):
            gone |= {each: (known.up[each], until) for each in known.up.keys() - up.keys()}
        self._members = _Members(metadata, registered, up, gone, now + _FATE_SECONDS)
        return up

    def up_or_just_gone(self) -> Mapping[int, BrokerRegistration]:
        """Returns `up`, and those that were up until a moment ago.

        librdkafka closes its connection to a broker that the metadata no longer names. Partitions
        that are just moving from that broker then have no leader until librdkafka asks again, a
        second later.
        """
        up = self.up()
        return {**{number: each for number, (each, _) in self._members.gone.items()}, **up}
