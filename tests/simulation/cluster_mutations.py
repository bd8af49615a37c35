"""Deliberate mistakes in the work of a cluster's members, for worlds with several of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import msgspec

from sparklog.broker.failover.controller import Controller
from sparklog.broker.failover.handover import Handovers
from sparklog.broker.log import takeover
from sparklog.broker.log.histories import Histories
from sparklog.storage.metadata import leadership
from sparklog.storage.metadata.leadership import Handover
from sparklog.storage.metadata.liveness import Leader
from sparklog.storage.metadata.model import ClusterMetadata, Epoch
from sparklog.storage.metadata.observer import Observer
from sparklog.storage.staging.manifest import Manifest
from tests.simulation import column_mutations, put_mutations
from tests.simulation.faults import Rates
from tests.simulation.mutation import Mutation

_failover: Final = leadership.failover
_leave: Final = leadership.leave
_pass_on: Final = leadership.pass_on


def _seal_nothing(_controller: Controller, epochs: Iterable[Epoch]) -> set[tuple[int, int]]:
    return {each.id for each in epochs}


def _pass_on_no_heirs(
    metadata: ClusterMetadata, dead: int, **decided: Any
) -> ClusterMetadata | None:
    """Makes the successors heirs of the dead broker's own epochs alone."""
    after = _failover(metadata, dead, **decided)
    if after is None:
        return None
    before = {each.id: each for each in metadata.open_epochs}
    open_epochs = tuple(
        msgspec.structs.replace(each, heirs=tuple({*before[each.id].heirs} - {dead}))
        if each.broker != dead and each.id in before
        else each
        for each in after.open_epochs
    )
    return msgspec.structs.replace(after, open_epochs=leadership._needed(open_epochs))


def _pass_on_alone(
    metadata: ClusterMetadata, broker: int, epoch: int, moves: Iterable[Handover]
) -> ClusterMetadata | None:
    """Makes those who get the partitions heirs of no log."""
    after = _pass_on(metadata, broker, epoch, moves)
    return after and msgspec.structs.replace(after, open_epochs=metadata.open_epochs)


def _leave_uncovered(
    metadata: ClusterMetadata,
    broker: int,
    epoch: int,
    left: Collection[tuple[int, int]],
    *,
    covered: Mapping[str, Mapping[int, int]],
) -> ClusterMetadata | None:
    """Leaves epochs whose states no checkpoint of ours has."""
    covered = {
        topic.topic_id: dict(enumerate(topic.leader_epochs)) for topic in metadata.topics.values()
    }
    return _leave(metadata, broker, epoch, left, covered=covered)


def _all_dead(
    _observer: Observer, metadata: ClusterMetadata, brokers: Collection[int]
) -> dict[int, int]:
    """Judges without a look."""
    return {each: metadata.brokers[each].epoch for each in brokers if each in metadata.brokers}


def _answer_nothing(_observer: Observer, _asked: Collection[Leader]) -> set[int]:
    return set()


def _save_nothing(handovers: Handovers) -> int:
    return handovers._led_partitions.applied_sequence


def _keep_as_fenced(histories: Histories, epoch: Epoch) -> None:
    """Takes the part that was read ahead for the whole log, though its broker still writes."""
    histories._fenced[epoch.id] = histories.read(epoch)


_DEATHS: Final = Rates(crash=0.004, freeze=0.004)

CLUSTER_MUTATIONS = (
    Mutation(
        name="cluster: failed over without a fence",
        patches=((Controller, "_seal", _seal_nothing),),
        rates=_DEATHS,
    ),
    Mutation(
        name="cluster: heirs are not passed on",
        patches=((leadership, "failover", _pass_on_no_heirs),),
        rates=_DEATHS,
        profile=(("brokers", 3), ("steps", 3_000)),
    ),
    Mutation(
        name="cluster: an epoch is left before a checkpoint has its states",
        patches=((takeover, "leave", _leave_uncovered),),
        rates=Rates(crash=0.004, freeze=0.03),
        profile=(
            ("brokers", 2),
            ("steps", 2_500),
            ("is_local", True),
            ("is_one_machine", True),
            ("idempotent", 3),
            ("asks", False),
        ),
    ),
    Mutation(
        name="cluster: partitions are given while appends are under way",
        patches=((Handovers, "_finish_appends", lambda _handovers: None),),
        rates=Rates(stall=0.05),
        profile=(("brokers", 2), ("steps", 2_000), ("idempotent", 3)),
    ),
    Mutation(
        name="cluster: partitions are given before a checkpoint has their states",
        patches=((Handovers, "_save_states", _save_nothing),),
        rates=Rates(),
    ),
    Mutation(
        name="cluster: the part of a log that was read ahead is taken for all of it",
        patches=((Histories, "read_ahead", _keep_as_fenced),),
        rates=Rates(),
        profile=(("brokers", 2), ("is_local", True), ("steps", 2_000), ("idempotent", 3)),
    ),
    Mutation(
        name="cluster: partitions are passed on without the logs",
        patches=((leadership, "pass_on", _pass_on_alone),),
        rates=Rates(),
        profile=(("brokers", 4), ("stuck_rate", 0.7), ("steps", 2_000)),
    ),
    Mutation(
        name="cluster: a silent member is not asked",
        patches=((Observer, "_answering", _answer_nothing),),
        rates=Rates(mute=0.004),
        profile=(("brokers", 3), ("steps", 2_000), ("asks", True)),
    ),
    Mutation(
        name="cluster: a topic that was created again is taken for the one before",
        patches=((Manifest, "topics_gone", lambda *_: set[str]()),),
        rates=Rates(),
        profile=(
            ("brokers", 2),
            ("partitions", (2, 2)),
            ("queries", 1),
            ("is_rewritten", True),
            ("administrators", 2),
            ("steps", 2_000),
        ),
    ),
    Mutation(
        name="cluster: everybody is dead",
        patches=((Observer, "dead", _all_dead),),
        rates=Rates(),
    ),
    *put_mutations.CLUSTER_MUTATIONS,
    *column_mutations.CLUSTER_MUTATIONS,
)
