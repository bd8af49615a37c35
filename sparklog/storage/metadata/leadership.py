"""Leadership changes: pure functions from one version of the metadata to the next.

Each function checks its precondition on the version passed to it, so a caller hands the function to
`MetadataStore.change`, which repeats it after a conflict. It returns None if nothing has to change,
and raises `BrokerFenced` if the caller has lost its own epoch, or `LeadersChanged` if the basis of
its decision has changed. Two rules make every order of these changes safe:

*The leader of a partition changes only once the old one can no longer write.* Either a fence exists
in the log of every open epoch of the old leader's id (`succeed`, `failover`), or the old leader
itself makes the change: once its log contains the partition's resignation (`resign`), or before it
starts to serve the partition (`pass_on`). The fences come first, because a leader that is fenced
later could ack a record that its successor never reads. Each change increments the leader epoch, so
every record belongs to one leader, and states saved by several leaders are ordered.

*An epoch stays in the metadata while a broker may need its log.* Its *heirs* are the ids of those
brokers. A broker becomes an heir when it receives a partition whose entries or state may be in the
log, from the leader that wrote the log or from another heir. It leaves once its own checkpoint
contains the state of all its partitions, and they no longer need any entry of the log. An epoch
that is fenced and has no heirs is removed, and its objects may be deleted. Nothing that a partition
needs is lost, because its leader is an heir to every epoch that contains some of it, or wrote that
epoch itself and is followed by heirs. A fenced broker may still put a checkpoint and leave an epoch
until the metadata records its fence. So a successor searches for checkpoints after the change that
makes it an heir, unless it has prevented the others from leaving since before its fences.

A broker is *up* if it may receive partitions: its registered epoch is open, and all its older ones
are fenced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from sparklog import errors
from sparklog.storage.metadata.model import (
    BrokerRegistration,
    ClusterMetadata,
    Epoch,
    Resignation,
    TopicMetadata,
)
from sparklog.storage.snapshot import WalKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """A partition that its leader hands over to another broker."""

    topic: str
    topic_id: str
    partition: int
    leader_epoch: int
    """The leader epoch in which the giver leads it."""
    target: int


# ------------------------------------------------------------------------------ questions


def check_lease(metadata: ClusterMetadata, broker: int, epoch: int) -> None:
    """Raises `BrokerFenced` unless that epoch is the broker's newest, and not fenced."""
    known = metadata.brokers.get(broker)
    if known is None or known.epoch != epoch or not is_open(metadata, (broker, epoch)):
        raise errors.BrokerFenced(broker=broker, epoch=epoch)


def is_up(metadata: ClusterMetadata, broker: int) -> bool:
    """Returns whether the broker may receive partitions: only its newest epoch may write."""
    known = metadata.brokers.get(broker)
    unfenced = [each.epoch for each in unfenced_epochs(metadata, broker)]
    return known is not None and unfenced == [known.epoch]


def other_members(metadata: ClusterMetadata) -> list[int]:
    """Returns the members other than the controller that may be alive."""
    up = {each.broker for each in metadata.open_epochs if not each.fenced}
    return sorted(
        broker for broker in up - {metadata.controller} if metadata.brokers[broker].is_member
    )


def unfenced_epochs(metadata: ClusterMetadata, broker: int) -> Iterator[Epoch]:
    """Returns the open epochs of the broker that are not marked as fenced, oldest first."""
    return (each for each in metadata.open_epochs if each.broker == broker and not each.fenced)


def is_open(metadata: ClusterMetadata, epoch: tuple[int, int] | None) -> bool:
    """Returns whether a broker may still write in this epoch, (broker, epoch)."""
    return any(each.id == epoch and not each.fenced for each in metadata.open_epochs)


def inherited_by(metadata: ClusterMetadata, broker: int) -> tuple[Epoch, ...]:
    """Returns the epochs that the broker is an heir to, in the order in which they were opened."""
    return tuple(each for each in metadata.open_epochs if broker in each.heirs)


def epochs_behind(metadata: ClusterMetadata, brokers: Collection[int]) -> list[Epoch]:
    """Returns the epochs whose logs a successor of these brokers may need, oldest first.

    They are those in which the brokers may still write, and those that the brokers are heirs to.
    """
    return [
        each
        for each in metadata.open_epochs
        if not set(brokers).isdisjoint(each.heirs if each.fenced else (each.broker,))
    ]


# ------------------------------------------------------------------------------ brokers


def register(
    metadata: ClusterMetadata, broker: int, registration: BrokerRegistration, log: WalKind
) -> ClusterMetadata:
    """Opens the next epoch of `broker`, whatever `registration.epoch` says. Never refused.

    It does not take over partitions: older epochs of the broker may still write.
    """
    known = metadata.brokers.get(broker)
    epoch = known.epoch + 1 if known else 1
    registered = msgspec.structs.replace(registration, epoch=epoch)
    return msgspec.structs.replace(
        metadata,
        brokers={**metadata.brokers, broker: registered},
        open_epochs=(*metadata.open_epochs, Epoch(broker, epoch, log)),
    )


def elect(metadata: ClusterMetadata, broker: int, epoch: int) -> ClusterMetadata | None:
    """Makes `broker` the controller. Nothing depends on there being only one."""
    check_lease(metadata, broker, epoch)
    if metadata.controller == broker:
        return None
    return msgspec.structs.replace(metadata, controller=broker)


def raise_level(metadata: ClusterMetadata) -> ClusterMetadata | None:
    """Raises the feature level to the highest supported by all brokers that may still write.

    A dead broker counts until its epoch is fenced, because it may only be suspended. The level of a
    broker's older epoch is not stored, so the level does not rise before that epoch is fenced.
    """
    known = (
        (metadata.brokers[each.broker], each.epoch)
        for each in metadata.open_epochs
        if not each.fenced
    )
    levels = (broker.level if broker.epoch == epoch else 1 for broker, epoch in known)
    level = min(levels, default=metadata.level)
    return msgspec.structs.replace(metadata, level=level) if level > metadata.level else None


# ------------------------------------------------------------------------------ fenced leaders


def succeed(
    metadata: ClusterMetadata, broker: int, epoch: int, *, sealed: Collection[tuple[int, int]]
) -> ClusterMetadata | None:
    """Continues the older epochs of the same broker, and takes over the partitions that they led.

    `sealed`: the epochs in whose logs the caller has put or seen a fence. Raises `LeadersChanged`
    if an older epoch is not among them: it may still write.
    """
    check_lease(metadata, broker, epoch)
    older = {each.id for each in unfenced_epochs(metadata, broker)} - {(broker, epoch)}
    if not older:
        return None
    _check_sealed(older, sealed)
    return msgspec.structs.replace(
        metadata,
        open_epochs=tuple(
            _fenced(each, {*each.heirs, broker}) if each.id in older else each
            for each in metadata.open_epochs
        ),
        topics=_with_successors(metadata.topics, broker, lambda _topic, _partition: broker),
    )


def failover(
    metadata: ClusterMetadata,
    dead: int,
    *,
    epoch: int,
    sealed: Collection[tuple[int, int]],
    successors: Mapping[tuple[str, int], int],
) -> ClusterMetadata | None:
    """Assigns the partitions of `dead` to other brokers, which replace it as heirs everywhere.

    Raises `LeadersChanged` if the broker has registered an epoch other than the judged `epoch`, if
    one of its epochs is neither fenced nor among `sealed`, if a partition that it leads has no
    successor, or if a successor is not up. Resignations are kept: one may still contain a
    partition's state, if its leader died before its own log contained it.

    `successors`: the broker id for each (topic, partition) that `dead` leads.
    """
    known = metadata.brokers.get(dead)
    if known is None or known.epoch != epoch:
        raise errors.LeadersChanged(
            reason=f"broker {dead} has registered again since epoch {epoch}"
        )
    _check_sealed((each.id for each in unfenced_epochs(metadata, dead)), sealed)
    found: set[int] = set()

    def successor_of(topic: str, partition: int) -> int:
        successor = successors.get((topic, partition))
        if successor is None:
            raise errors.LeadersChanged(reason=f"{topic}-{partition} has no successor")
        if successor not in found:
            _check_target(metadata, dead, successor)
            found.add(successor)
        return successor

    topics = _with_successors(metadata.topics, dead, successor_of)
    open_epochs = []
    for each in metadata.open_epochs:
        heirs = ({*each.heirs} - {dead}) | found
        if each.broker == dead and not each.fenced:
            open_epochs.append(_fenced(each, heirs))
        elif dead in each.heirs:
            open_epochs.append(_with_heirs(each, heirs))
        else:
            open_epochs.append(each)
    kept = _needed(open_epochs)
    if kept == metadata.open_epochs and topics is metadata.topics:
        return None
    return msgspec.structs.replace(metadata, open_epochs=kept, topics=topics)


def inherit(
    metadata: ClusterMetadata, broker: int, epochs: Collection[tuple[int, int]]
) -> ClusterMetadata:
    """Makes `broker` an heir to open epochs, including those that led nothing."""
    open_epochs = tuple(
        _with_heirs(each, {*each.heirs, broker}) if each.id in epochs else each
        for each in metadata.open_epochs
    )
    return msgspec.structs.replace(metadata, open_epochs=open_epochs)


# ------------------------------------------------------------------------------ live leaders


def resign(
    metadata: ClusterMetadata, broker: int, epoch: int, moves: Mapping[Handover, int]
) -> ClusterMetadata | None:
    """Hands partitions over to other brokers, once this epoch's log contains their resignations.

    `moves`: the sequence of the flush with each resignation. Raises `BrokerFenced`, and
    `LeadersChanged` if a partition is no longer led in that leader epoch, or a target is not up.
    """
    resigned = {each: Resignation(broker, epoch, at) for each, at in moves.items()}
    return _hand_over(metadata, broker, epoch, resigned)


def pass_on(
    metadata: ClusterMetadata, broker: int, epoch: int, moves: Iterable[Handover]
) -> ClusterMetadata | None:
    """Hands over to other brokers partitions that this one has never started to serve.

    An earlier resignation by another leader still contains their state. Raises what `resign`
    raises.
    """
    return _hand_over(metadata, broker, epoch, dict.fromkeys(moves))


def _hand_over(
    metadata: ClusterMetadata,
    broker: int,
    epoch: int,
    moves: Mapping[Handover, Resignation | None],
) -> ClusterMetadata | None:
    check_lease(metadata, broker, epoch)
    if not moves:
        return None
    if not is_up(metadata, broker):  # an older epoch of it may be serving them
        raise errors.LeadersChanged(reason=f"broker {broker} has an older epoch that is not fenced")
    topics = dict(metadata.topics)
    for move, resignation in moves.items():
        _check_target(metadata, broker, move.target)
        topic, at = topics.get(move.topic), move.partition
        if (
            topic is None
            or topic.topic_id != move.topic_id
            or (topic.leaders[at], topic.leader_epochs[at]) != (broker, move.leader_epoch)
        ):
            reason = (
                f"broker {broker} no longer leads {move.topic}-{at} in epoch {move.leader_epoch}"
            )
            raise errors.LeadersChanged(reason=reason)
        topics[move.topic] = msgspec.structs.replace(
            topic,
            leaders=_replaced(topic.leaders, at, move.target),
            leader_epochs=_replaced(topic.leader_epochs, at, move.leader_epoch + 1),
            resigned={**topic.resigned, at: resignation} if resignation else topic.resigned,
        )
    targets = {move.target for move in moves}
    open_epochs = tuple(
        _with_heirs(each, {*each.heirs} | targets)
        if each.id == (broker, epoch) or broker in each.heirs
        else each
        for each in metadata.open_epochs
    )
    return msgspec.structs.replace(metadata, open_epochs=open_epochs, topics=topics)


# ------------------------------------------------------------------------------ heirs


def leave(
    metadata: ClusterMetadata,
    broker: int,
    epoch: int,
    left: Collection[tuple[int, int]],
    *,
    covered: Mapping[str, Mapping[int, int]],
) -> ClusterMetadata | None:
    """Removes `broker` as an heir to epochs whose entries its partitions no longer need.

    Changes nothing while the broker leads a partition whose state its own newest checkpoint does
    not contain: the partition may have arrived since, from one of these epochs. A partition in
    leader epoch 0 is new and has no earlier state. Raises `BrokerFenced`.

    `covered`: the leader epoch of each partition in that checkpoint, by topic id and partition.
    """
    check_lease(metadata, broker, epoch)
    for topic in metadata.topics.values():
        of_topic = covered.get(topic.topic_id, {})
        for n, (leader, leader_epoch) in enumerate(
            zip(topic.leaders, topic.leader_epochs, strict=True)
        ):
            if leader == broker and leader_epoch and of_topic.get(n) != leader_epoch:
                return None
    open_epochs = tuple(
        _with_heirs(each, {*each.heirs} - {broker})
        if each.id in left and broker in each.heirs
        else each
        for each in metadata.open_epochs
    )
    if open_epochs == metadata.open_epochs:
        return None
    topics = {
        name: _without_resignations(topic, broker, left) if topic.resigned else topic
        for name, topic in metadata.topics.items()
    }
    return msgspec.structs.replace(metadata, open_epochs=_needed(open_epochs), topics=topics)


def _without_resignations(
    topic: TopicMetadata, broker: int, left: Collection[tuple[int, int]]
) -> TopicMetadata:
    """Removes resignations to `broker` in epochs of `left`: its checkpoint contains the states."""
    resigned = {
        n: each
        for n, each in topic.resigned.items()
        if topic.leaders[n] != broker or (each.broker, each.epoch) not in left
    }
    return msgspec.structs.replace(topic, resigned=resigned)


# ------------------------------------------------------------------------------ parts


def _check_sealed(needed: Iterable[tuple[int, int]], sealed: Collection[tuple[int, int]]) -> None:
    for broker, epoch in needed:
        if (broker, epoch) not in sealed:
            reason = f"epoch {epoch} of broker {broker} is not fenced"
            raise errors.LeadersChanged(reason=reason)


def _check_target(metadata: ClusterMetadata, giver: int, target: int) -> None:
    if target == giver or not is_up(metadata, target):
        raise errors.LeadersChanged(reason=f"broker {target} cannot take partitions of {giver}")


def _with_successors(
    topics: dict[str, TopicMetadata], leader: int, successor_of: Callable[[str, int], int]
) -> dict[str, TopicMetadata]:
    """Assigns each partition of `leader` a successor, in the next leader epoch."""
    changed = {
        name: msgspec.structs.replace(
            topic,
            leaders=tuple(
                successor_of(name, n) if each == leader else each
                for n, each in enumerate(topic.leaders)
            ),
            leader_epochs=tuple(
                leader_epoch + (each == leader)
                for each, leader_epoch in zip(topic.leaders, topic.leader_epochs, strict=True)
            ),
        )
        for name, topic in topics.items()
        if leader in topic.leaders
    }
    return {**topics, **changed} if changed else topics


def _fenced(epoch: Epoch, heirs: Iterable[int]) -> Epoch:
    return msgspec.structs.replace(_with_heirs(epoch, heirs), fenced=True)


def _with_heirs(epoch: Epoch, heirs: Iterable[int]) -> Epoch:
    return msgspec.structs.replace(epoch, heirs=tuple(sorted(heirs)))


def _needed(epochs: Iterable[Epoch]) -> tuple[Epoch, ...]:
    return tuple(each for each in epochs if each.heirs or not each.fenced)


def _replaced(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])
