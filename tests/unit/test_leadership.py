from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
import pytest

from sparklog import errors
from sparklog.storage.metadata import leadership
from sparklog.storage.metadata.leadership import Handover
from sparklog.storage.metadata.model import (
    BrokerRegistration,
    ClusterMetadata,
    Epoch,
    Resignation,
    TopicMetadata,
)
from sparklog.storage.snapshot import WalKind

OBJECTS: Final = WalKind.OBJECTS


def cluster(*open_epochs: Epoch, leaders: tuple[int, ...] = (1, 2)) -> ClusterMetadata:
    """Brokers of those epochs; the partitions of topic t are in leader epoch 4."""
    brokers = {each.broker: BrokerRegistration(epoch=each.epoch) for each in open_epochs}
    topic = TopicMetadata(topic_id="id", leaders=leaders, leader_epochs=(4,) * len(leaders))
    return ClusterMetadata(brokers=brokers, open_epochs=open_epochs, topics={"t": topic})


TWO: Final = cluster(Epoch(1, 1), Epoch(2, 1))
"""Two brokers that lead a partition each."""


def move(
    target: int = 2, *, partition: int = 0, leader_epoch: int = 4, topic_id: str = "id"
) -> Handover:
    """A move of a partition of t."""
    return Handover(
        topic="t",
        topic_id=topic_id,
        partition=partition,
        leader_epoch=leader_epoch,
        target=target,
    )


def changed(metadata: ClusterMetadata | None) -> ClusterMetadata:
    """A change that is one."""
    assert metadata is not None
    return metadata


def led(metadata: ClusterMetadata) -> list[tuple[int, int]]:
    """Leader and leader epoch of each partition of t."""
    topic = metadata.topics["t"]
    return list(zip(topic.leaders, topic.leader_epochs, strict=True))


# ------------------------------------------------------------------------------ brokers


def test_a_registration_takes_nothing() -> None:
    """A broker gets its next epoch, at the end of the open ones, and leads what it led."""
    registration = BrokerRegistration(epoch=99, flight="h:1")
    after = leadership.register(TWO, 1, registration, WalKind.SEGMENTS)
    assert after.brokers[1] == BrokerRegistration(epoch=2, flight="h:1")
    assert after.open_epochs == (*TWO.open_epochs, Epoch(1, 2, WalKind.SEGMENTS))
    assert (led(after), after.controller) == (led(TWO), TWO.controller)
    assert not leadership.is_up(after, 1)
    assert leadership.is_up(leadership.register(TWO, 3, registration, OBJECTS), 3)


@pytest.mark.parametrize(
    "metadata",
    [
        ClusterMetadata(),
        cluster(Epoch(1, 1), Epoch(1, 2)),
        cluster(Epoch(1, 1, fenced=True, heirs=(2,)), Epoch(2, 1)),
        msgspec.structs.replace(TWO, open_epochs=(Epoch(2, 1),)),
    ],
    ids=["unknown", "newer", "fenced", "closed"],
)
def test_a_lease_ends(metadata: ClusterMetadata) -> None:
    """An epoch that is not the newest and unfenced one of its broker can change nothing."""
    leadership.check_lease(TWO, 1, 1)
    attempts: tuple[Callable[[], object], ...] = (
        lambda: leadership.check_lease(metadata, 1, 1),
        lambda: leadership.elect(metadata, 1, 1),
        lambda: leadership.succeed(metadata, 1, 1, sealed=()),
        lambda: leadership.resign(metadata, 1, 1, {move(): 7}),
        lambda: leadership.pass_on(metadata, 1, 1, [move()]),
        lambda: leadership.leave(metadata, 1, 1, (), covered={}),
    )
    for attempt in attempts:
        with pytest.raises(errors.BrokerFenced):
            attempt()


def test_an_election() -> None:
    """Any broker with a lease may become the controller."""
    after = changed(leadership.elect(TWO, 2, 1))
    assert after == msgspec.structs.replace(TWO, controller=2)
    assert leadership.elect(after, 2, 1) is None


# ------------------------------------------------------------------------------ fenced leaders


def test_a_broker_succeeds_itself() -> None:
    """It keeps its partitions in the next leader epoch, once all its older epochs are fenced."""
    before = cluster(Epoch(1, 1), Epoch(2, 1), Epoch(1, 2))
    with pytest.raises(errors.LeadersChanged, match="epoch 1 of broker 1 is not fenced"):
        leadership.succeed(before, 1, 2, sealed={(2, 1)})
    after = changed(leadership.succeed(before, 1, 2, sealed={(1, 1)}))
    assert led(after) == [(1, 5), (2, 4)]
    assert after.open_epochs == (Epoch(1, 1, fenced=True, heirs=(1,)), Epoch(2, 1), Epoch(1, 2))
    assert leadership.inherited_by(after, 1) == after.open_epochs[:1]
    assert leadership.is_up(after, 1)
    assert leadership.succeed(after, 1, 2, sealed=()) is None


def test_a_failover() -> None:
    """Successors replace the dead broker as leaders, and as heirs of every epoch."""
    before = cluster(
        Epoch(1, 1, fenced=True, heirs=(2, 3)),
        Epoch(2, 1),
        Epoch(3, 1),
        Epoch(4, 1),
        leaders=(2, 3, 2),
    )
    resigned = msgspec.structs.replace(before.topics["t"], resigned={0: Resignation(1, 1, 7)})
    before = msgspec.structs.replace(before, topics={"t": resigned})
    successors = {("t", 0): 3, ("t", 2): 4}
    after = changed(leadership.failover(before, 2, epoch=1, sealed={(2, 1)}, successors=successors))
    assert led(after) == [(3, 5), (3, 4), (4, 5)]
    assert after.open_epochs == (
        Epoch(1, 1, fenced=True, heirs=(3, 4)),
        Epoch(2, 1, fenced=True, heirs=(3, 4)),
        Epoch(3, 1),
        Epoch(4, 1),
    )
    assert after.topics["t"].resigned == {0: Resignation(1, 1, 7)}
    assert leadership.failover(after, 2, epoch=1, sealed=(), successors={}) is None


@pytest.mark.parametrize(
    ("epoch", "sealed", "successors", "reason"),
    [
        (2, {(1, 1)}, {("t", 0): 2}, "registered"),
        (1, set(), {("t", 0): 2}, "epoch 1 of broker 1 is not fenced"),
        (1, {(1, 1)}, {}, "t-0 has no successor"),
        (1, {(1, 1)}, {("t", 0): 3}, "broker 3 cannot take"),
        (1, {(1, 1)}, {("t", 0): 1}, "broker 1 cannot take"),
    ],
)
def test_a_failover_that_is_refused(
    epoch: int, sealed: set[tuple[int, int]], successors: dict[tuple[str, int], int], reason: str
) -> None:
    """A failover is refused where the newest version differs from the one it was decided on."""
    with pytest.raises(errors.LeadersChanged, match=reason):
        leadership.failover(TWO, 1, epoch=epoch, sealed=sealed, successors=successors)


def test_a_failover_judges_the_newest_registration() -> None:
    """A broker that registered again since it was judged keeps its partitions."""
    again = leadership.register(TWO, 1, BrokerRegistration(epoch=0), OBJECTS)
    for epoch, reason in ((1, "registered"), (2, "epoch 2 of broker 1 is not fenced")):
        with pytest.raises(errors.LeadersChanged, match=reason):
            leadership.failover(again, 1, epoch=epoch, sealed={(1, 1)}, successors={("t", 0): 2})


def test_a_failover_of_a_broker_that_leads_nothing() -> None:
    """Its epochs have no heirs, and are closed."""
    before = cluster(Epoch(1, 1, fenced=True, heirs=(2,)), Epoch(2, 1), Epoch(3, 1), leaders=(3,))
    after = changed(leadership.failover(before, 2, epoch=1, sealed={(2, 1)}, successors={}))
    assert (after.open_epochs, led(after)) == ((Epoch(3, 1),), led(before))


# ------------------------------------------------------------------------------ live leaders


def test_a_resignation() -> None:
    """The target leads in the next leader epoch, and inherits what the giver has and inherits."""
    before = cluster(
        Epoch(1, 1, fenced=True, heirs=(1,)),
        Epoch(3, 1, fenced=True, heirs=(3,)),
        Epoch(2, 1),
        Epoch(1, 2),
    )
    after = changed(leadership.resign(before, 1, 2, {move(): 7}))
    assert led(after) == [(2, 5), (2, 4)]
    assert after.topics["t"].resigned == {0: Resignation(1, 2, 7)}
    assert after.open_epochs == (
        Epoch(1, 1, fenced=True, heirs=(1, 2)),
        Epoch(3, 1, fenced=True, heirs=(3,)),
        Epoch(2, 1),
        Epoch(1, 2, heirs=(2,)),
    )
    assert leadership.resign(before, 1, 2, {}) is None


def test_passing_on_keeps_the_resignation() -> None:
    """The last leader that served the partition still has its state."""
    before = changed(leadership.resign(TWO, 1, 1, {move(): 7}))
    third = leadership.register(before, 3, BrokerRegistration(epoch=0), OBJECTS)
    after = changed(leadership.pass_on(third, 2, 1, [move(3, leader_epoch=5)]))
    assert led(after) == [(3, 6), (2, 4)]
    assert after.topics["t"].resigned == {0: Resignation(1, 1, 7)}
    assert after.open_epochs == (Epoch(1, 1, heirs=(2, 3)), Epoch(2, 1, heirs=(3,)), Epoch(3, 1))


@pytest.mark.parametrize(
    ("before", "given"),
    [
        (TWO, move(leader_epoch=3)),
        (TWO, move(topic_id="other")),
        (TWO, move(partition=1)),
        (TWO, move(1)),
        (TWO, move(3)),
        (msgspec.structs.replace(TWO, topics={}), move()),
        (cluster(Epoch(1, 0), Epoch(2, 1), Epoch(1, 1)), move()),
        (cluster(Epoch(1, 1), Epoch(2, 0), Epoch(2, 1)), move()),
    ],
    ids=[
        "another leader epoch",
        "another topic",
        "not led",
        "to itself",
        "to an unknown broker",
        "topic is gone",
        "giver is not up",
        "target is not up",
    ],
)
def test_a_move_that_is_refused(before: ClusterMetadata, given: Handover) -> None:
    """A resignation is for one leader epoch of one topic, between two brokers that are up."""
    attempts: tuple[Callable[[], object], ...] = (
        lambda: leadership.resign(before, 1, 1, {given: 7}),
        lambda: leadership.pass_on(before, 1, 1, [given]),
    )
    for attempt in attempts:
        with pytest.raises(errors.LeadersChanged):
            attempt()


# ------------------------------------------------------------------------------ heirs


def test_leaving_closes_an_epoch_without_heirs() -> None:
    """The resignations in it go, except those to other heirs, and other epochs stay."""
    before = cluster(
        Epoch(1, 1, fenced=True, heirs=(1,)),
        Epoch(2, 1, fenced=True, heirs=(1, 3)),
        Epoch(3, 1, heirs=(1,)),
        Epoch(1, 2),
        leaders=(1, 3, 1),
    )
    resigned = {0: Resignation(2, 1, 7), 1: Resignation(2, 1, 7), 2: Resignation(3, 1, 8)}
    topic = msgspec.structs.replace(before.topics["t"], resigned=resigned)
    before = msgspec.structs.replace(before, topics={"t": topic})
    after = changed(leadership.leave(before, 1, 2, {(1, 1), (2, 1)}, covered={"id": {0: 4, 2: 4}}))
    assert after.open_epochs == (
        Epoch(2, 1, fenced=True, heirs=(3,)),
        Epoch(3, 1, heirs=(1,)),
        Epoch(1, 2),
    )
    assert after.topics["t"].resigned == {1: resigned[1], 2: resigned[2]}
    assert leadership.leave(after, 1, 2, {(2, 1)}, covered={"id": {0: 4, 2: 4}}) is None
    last = changed(leadership.leave(after, 1, 2, {(3, 1)}, covered={"id": {0: 4, 2: 4}}))
    assert last.open_epochs[1] == Epoch(3, 1), "it is not fenced, and stays open"


@pytest.mark.parametrize(
    ("covered", "leaves"),
    [
        ({"id": {0: 4}}, True),
        ({"id": {0: 4, 1: 0}}, True),
        ({"id": {0: 3}}, False),
        ({"id": {1: 4}}, False),
        ({"id": {}}, False),
        ({"other": {0: 4}}, False),
        ({}, False),
    ],
)
def test_nothing_is_left_before_the_checkpoint(
    covered: dict[str, dict[int, int]], leaves: bool
) -> None:
    """Every partition that the broker leads is in its checkpoint, in the same leader epoch."""
    before = cluster(Epoch(2, 1, fenced=True, heirs=(1,)), Epoch(1, 1), leaders=(1, 3))
    after = leadership.leave(before, 1, 1, {(2, 1)}, covered=covered)
    assert (after is not None) is leaves


def test_a_partition_in_leader_epoch_0_needs_no_checkpoint() -> None:
    """It was created where it is, so no other epoch has anything of it."""
    before = cluster(Epoch(2, 1, fenced=True, heirs=(1,)), Epoch(1, 1), leaders=(1,))
    created = msgspec.structs.replace(before.topics["t"], leader_epochs=(0,))
    before = msgspec.structs.replace(before, topics={"t": created})
    after = changed(leadership.leave(before, 1, 1, {(2, 1)}, covered={}))
    assert after.open_epochs == (Epoch(1, 1),)


def test_an_open_epoch() -> None:
    """A broker writes in an epoch until it has a fence."""
    metadata = cluster(Epoch(2, 1, fenced=True, heirs=(1,)), Epoch(1, 1))
    assert [leadership.is_open(metadata, each) for each in ((1, 1), (2, 1), (2, 2), None)] == [
        True,
        False,
        False,
        False,
    ]


def test_an_heir_of_everything() -> None:
    """An epoch keeps its other heirs."""
    before = cluster(Epoch(2, 1, heirs=(3,)), Epoch(1, 1))
    after = leadership.inherit(before, 1, {(2, 1)})
    assert after.open_epochs == (Epoch(2, 1, heirs=(1, 3)), Epoch(1, 1))


# ------------------------------------------------------------------------------ the feature level


def knowing(*levels: int | msgspec.UnsetType, level: int = 1) -> ClusterMetadata:
    """Brokers 1, 2, … that know these levels."""
    metadata = cluster(*(Epoch(number, 1) for number in range(1, len(levels) + 1)))
    brokers = {
        number: BrokerRegistration(epoch=1, known_level=known)
        for number, known in enumerate(levels, start=1)
    }
    return msgspec.structs.replace(metadata, brokers=brokers, level=level)


@pytest.mark.parametrize(
    ("metadata", "level"),
    [
        (knowing(3, 3), 3),
        (knowing(3, 2), 2),
        (knowing(3, msgspec.UNSET), None),  # a release without levels
        (knowing(3, 3, level=3), None),
        (knowing(2, 2, level=3), None),  # it never falls
        (ClusterMetadata(), None),
    ],
    ids=str,
)
def test_the_level_is_what_all_know(metadata: ClusterMetadata, level: int | None) -> None:
    """It rises to the highest one that every broker knows, and changes nothing else."""
    after = leadership.raise_level(metadata)
    assert (after and after.level) == level
    if after is not None:
        assert msgspec.structs.replace(after, level=metadata.level) == metadata


def test_a_dead_broker_holds_the_level_until_it_is_fenced() -> None:
    """It may only be suspended, and write by what it knows when it continues."""
    metadata = knowing(2, msgspec.UNSET)
    assert leadership.raise_level(metadata) is None
    fenced = msgspec.structs.replace(metadata, open_epochs=(Epoch(1, 1), Epoch(2, 1, fenced=True)))
    assert changed(leadership.raise_level(fenced)).level == 2


def test_an_older_epoch_holds_the_level() -> None:
    """A broker that was replaced by a newer release of itself may be suspended as well."""
    metadata = knowing(2)
    newer = BrokerRegistration(epoch=0, known_level=2)
    both = leadership.register(metadata, 1, newer, OBJECTS)
    assert leadership.raise_level(both) is None
    alone = changed(leadership.succeed(both, 1, 2, sealed={(1, 1)}))
    assert changed(leadership.raise_level(alone)).level == 2
