"""Description of a cluster: its brokers and their states, and what they lead. Changes nothing.

The metadata names the brokers and the leaders of partitions; heartbeats show which brokers are
alive, by the rules of `liveness`. A broker on another machine is watched until its heartbeat has
changed, or has not changed for so long that the broker is dead.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from sparklog import limits
from sparklog.clock import Clock
from sparklog.formats.flight_messages import (
    BrokerDescription,
    ClusterDescription,
    EpochDescription,
    LostPartition,
)
from sparklog.storage.metadata.liveness import (
    Answers,
    Leader,
    LeaderState,
    LeaderWatch,
    Phase,
    Sighting,
)
from sparklog.storage.metadata.model import ClusterMetadata
from sparklog.storage.metadata.placement import Loads
from sparklog.storage.metadata.processes import is_of_this_machine
from sparklog.storage.objects import Store, in_parallel

_ATTEMPTS: Final = 5
"""The maximum number of attempts, repeated if a broker registers meanwhile."""


class BrokerState(enum.StrEnum):
    """State of a broker, as an observer of the root sees it."""

    UP = "up"
    STARTING = "starting"
    """It is recovering, or an older epoch of it is not fenced yet: it serves no partition."""
    DRAINING = "draining"
    """It is handing over its partitions, and then stops."""
    STOPPED = "stopped"
    """It was shut down cleanly."""
    DEAD = "dead"
    """It ended in any other way, or is silent, or has been replaced."""


SERVING: Final = (BrokerState.UP, BrokerState.DRAINING)
"""States in which a broker serves the partitions that it leads."""
ENDED: Final = (BrokerState.STOPPED, BrokerState.DEAD)
"""States of a broker that no longer has a process, or none that counts."""


def look(
    store: Store,
    clock: Clock,
    *,
    newest: Callable[[], ClusterMetadata],
    waits: Callable[[Sequence[Leader], float], object],
    pause: Callable[[], object] | None = None,
    answers: Answers | None = None,
) -> tuple[ClusterMetadata, dict[int, Sighting]]:
    """Returns the metadata, and a sighting of each broker that it names.

    May take as long as it takes for a silent broker on another machine to count as dead. Raises the
    store's errors.

    Args:
        store: the store of the root.
        clock: the observer's clock.
        newest: returns the newest metadata.
        waits: called if it takes time to determine whether brokers are alive, with these brokers
            and the maximum wait in seconds.
        pause: waits between two polls, or raises; None: waits briefly, on the clock.
        answers: asks silent brokers; None: silence means death.
    """
    has_reported = False
    for attempt in range(_ATTEMPTS):
        metadata, found = newest(), dict[int, Sighting]()
        watches = {
            broker: LeaderWatch(
                store,
                clock=clock,
                dead_after_seconds=limits.DEAD_AFTER_SECONDS,
                broker=broker,
                answers=answers,
            )
            for broker in metadata.brokers
        }
        may_live = {each.id for each in metadata.open_epochs if not each.fenced}
        unknown = list(watches)
        while unknown:
            found.update(_poll(store, metadata, watches, unknown))
            if _is_old(metadata, found) and attempt < _ATTEMPTS - 1:
                break
            unknown = [
                broker
                for broker in unknown
                if found[broker].state is LeaderState.UNKNOWN
                and (broker, metadata.brokers[broker].epoch) in may_live
            ]
            if unknown and not has_reported:
                leaders = [found[broker].leader for broker in unknown]
                waits(leaders, max(watches[each.broker].patience_seconds(each) for each in leaders))
                has_reported = True
            if unknown:
                (pause or watches[unknown[0]].pause)()
        else:
            break
    return metadata, found


def _poll(
    store: Store,
    metadata: ClusterMetadata,
    watches: Mapping[int, LeaderWatch],
    brokers: Sequence[int],
) -> Iterator[tuple[int, Sighting]]:
    sightings = in_parallel(store, lambda each: watches[each].poll(metadata), brokers)
    for broker, sighting in zip(brokers, sightings, strict=True):
        assert sighting is not None, "a later version of the metadata lacks the broker"
        yield broker, sighting


def _is_old(metadata: ClusterMetadata, found: Mapping[int, Sighting]) -> bool:
    """Returns whether a broker has registered again since that version of the metadata."""
    return any(
        sighting.leader.epoch > metadata.brokers[broker].epoch for broker, sighting in found.items()
    )


# ------------------------------------------------------------------------------ description


def describe(
    metadata: ClusterMetadata,
    sightings: Mapping[int, Sighting],
    *,
    cluster_id: str,
    root: str,
    clock: Clock,
    with_topics: bool = False,
) -> ClusterDescription:
    """Describes a cluster from a version of its metadata and sightings of all its brokers."""
    states = states_of(metadata, sightings)
    loads = Loads.of(metadata.topics.values())
    serving = {broker for broker, state in states.items() if state in SERVING}
    lost = [
        LostPartition(topic=name, partition=number, leader=leader)
        for name, topic in sorted(metadata.topics.items())
        if not serving.issuperset(topic.leaders)
        for number, leader in enumerate(topic.leaders)
        if leader not in serving
    ]
    leaders = {name: list(topic.leaders) for name, topic in sorted(metadata.topics.items())}
    return ClusterDescription(
        cluster_id=cluster_id,
        root=root,
        controller=metadata.controller,
        level=metadata.level,
        brokers=[
            _describe_broker(sightings[broker], states[broker], loads[broker], clock)
            for broker in sorted(states)
        ],
        epochs=[
            EpochDescription(
                broker=each.broker,
                epoch=each.epoch,
                log=each.log,
                fenced=each.fenced,
                heirs=list(each.heirs),
            )
            for each in sorted(metadata.open_epochs, key=lambda each: each.id)
        ],
        topics=len(metadata.topics),
        partitions=loads.total(),
        lost_partitions=len(lost),
        lost=lost[: limits.STATUS_PARTITIONS],
        leaders=leaders if with_topics else None,
    )


def states_of(
    metadata: ClusterMetadata, sightings: Mapping[int, Sighting]
) -> dict[int, BrokerState]:
    """Returns the state of each broker."""
    unfenced = [each for each in metadata.open_epochs if not each.fenced]
    may_write, open_ids = Counter(each.broker for each in unfenced), {each.id for each in unfenced}
    found = {}
    for broker, known in metadata.brokers.items():
        sighting = sightings[broker]
        heartbeat = sighting.leader.heartbeat
        if (broker, known.epoch) not in open_ids or sighting.state is LeaderState.DEAD:
            found[broker] = BrokerState.STOPPED if sighting.leader.stopped else BrokerState.DEAD
        elif heartbeat is not None and heartbeat.phase == Phase.DRAINING:
            found[broker] = BrokerState.DRAINING
        elif may_write[broker] > 1 or heartbeat is None or heartbeat.phase == Phase.STARTING:
            found[broker] = BrokerState.STARTING
        else:
            found[broker] = BrokerState.UP
    return found


def _describe_broker(
    sighting: Sighting, state: BrokerState, partitions: int, clock: Clock
) -> BrokerDescription:
    leader, heartbeat = sighting.leader, sighting.leader.heartbeat
    return BrokerDescription(
        broker=leader.broker,
        epoch=leader.epoch,
        state=state,
        partitions=partitions,
        kind=leader.known.kind,
        address=leader.flight,
        kafka=leader.known.kafka or (heartbeat.kafka if heartbeat else ""),
        rack=leader.known.rack,
        host=leader.process.host,
        pid=leader.process.pid,
        version=heartbeat.version if heartbeat else "",
        level=leader.known.level,
        heartbeat_age_seconds=_heartbeat_age_seconds(leader, clock),
    )


def _heartbeat_age_seconds(leader: Leader, clock: Clock) -> float | None:
    heartbeat = leader.heartbeat
    if heartbeat is None:
        return None
    if is_of_this_machine(heartbeat.process) and heartbeat.monotonic_seconds <= clock.monotonic():
        return round(clock.monotonic() - heartbeat.monotonic_seconds, 3)
    return round(max(clock.now_us() - heartbeat.at_us, 0) / 1e6, 3)
