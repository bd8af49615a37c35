"""Every interleaving of the changes of leadership: real decisions, over logs that are a model.

`Run` visits the states that can be reached from one broker that has created a topic. The decisions
are those of `storage/metadata/leadership.py`. A log is a set of entries, a fence and a checkpoint.
Its broker may take no further step at any time, so a crash needs no step of its own, and neither
does a suspended broker. Ids are given in the order of the first registrations, so states that
differ only in the names of brokers are one. `Violation` is raised where

- I2: a leader changes while the old one may still write;
- I3: two epochs lead a partition in one leader epoch, or a leader epoch falls;
- I4: a log has an entry of a partition after its resignation;
- I7: the next leader of a partition could not restore its end, the producers of all its records,
  and its unpublished records, from the logs that it would be an heir of.

A mistake replaces one decision, or one rule of its callers; `Run` must find a violation then.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Final, NamedTuple, TypeAlias

import msgspec

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

BROKERS: Final = (1, 2, 3)
EPOCHS: Final = 3
MISTAKES: Final = {
    "failover without a seal": "I2",
    "failover judged an older epoch": "I2",
    "resigned before the resignation exists": "I2",
    "passed on by a broker that is not up": "I2",
    "leader epoch not raised": "I3",
    "append after the resignation": "I4",
    "heirs not passed on": "I7",
    "resignation trimmed before the change": "I7",
    "left before the checkpoint": "I7",
    "state by the order of opening": "I7",
    "checkpoint read before the change": "I7",
}
"""The invariant that each breaks."""


class Violation(Exception):
    """An invariant is broken."""


class Record(NamedTuple):
    """A record in a log."""

    partition: int
    leader_epoch: int
    offset: int


class Resigned(NamedTuple):
    """A resignation in a log; it has the state of all records below `end`."""

    partition: int
    leader_epoch: int
    end: int


class Local(NamedTuple):
    """A partition as the broker of a log knows it."""

    leader_epoch: int = -1
    """The one that it began to serve last."""
    serves: bool = False


Saved: TypeAlias = tuple[int, int]
"""Leader epoch and end of a saved state."""
Id: TypeAlias = tuple[int, int]


class Log(NamedTuple):
    """The log of one epoch, and what its broker knows."""

    local: tuple[Local, ...]
    fenced: bool = False
    entries: frozenset[Record | Resigned] = frozenset()
    checkpoint: tuple[Saved | None, ...] = ()


class State(NamedTuple):
    """One state of the whole."""

    metadata: int
    """Its number in `Run.versions`."""
    logs: tuple[tuple[Id, Log], ...]
    """Logs of the open epochs."""
    records: tuple[tuple[int, ...], ...]
    """Leader epochs in which the records of each partition were acked."""
    published: tuple[int, ...]
    led: tuple[tuple[int, Id], ...]
    """Newest leader epoch of each partition that a broker began to serve, and that broker."""


Decide: TypeAlias = Callable[[ClusterMetadata], ClusterMetadata | None]


@dataclass(kw_only=True)
class Run:
    """All interleavings within some bounds."""

    partitions: int = 1
    mistake: str = ""
    brokers: int = len(BROKERS)
    registrations: int = 4
    leader_epochs: int = 3
    records: int = 2
    depth: int = 1_000
    splits_seals: bool = False
    versions: list[ClusterMetadata] = field(default_factory=list)
    _numbers: dict[object, int] = field(default_factory=dict)
    _decided: dict[object, int | None] = field(default_factory=dict)
    _failed_over: dict[object, list[tuple[int, frozenset[Id]]]] = field(default_factory=dict)

    def states(self) -> Iterator[State]:
        """Yields every state once. Raises `Violation`."""
        empty = ClusterMetadata()
        first = leadership.register(empty, 1, BrokerRegistration(epoch=0), WalKind.OBJECTS)
        topic = TopicMetadata(
            topic_id="t", leaders=(1,) * self.partitions, leader_epochs=(0,) * self.partitions
        )
        state = State(
            self._number(msgspec.structs.replace(first, topics={"t": topic})),
            (((1, 1), self._new_log),),
            ((),) * self.partitions,
            (0,) * self.partitions,
            ((-1, (0, 0)),) * self.partitions,
        )
        seen, waiting = {state}, deque([(state, 0)])
        while waiting:
            state, depth = waiting.popleft()
            yield state
            for following in self._successors(state) if depth < self.depth else ():
                if following not in seen:
                    self._check_restorable(following)
                    seen.add(following)
                    waiting.append((following, depth + 1))

    @cached_property
    def _new_log(self) -> Log:
        return Log((Local(),) * self.partitions)

    def _number(self, metadata: ClusterMetadata) -> int:
        """Returns the number of a version; equal versions have one."""
        topic = metadata.topics["t"]
        key = (
            tuple(each.epoch for each in metadata.brokers.values()),
            metadata.open_epochs,
            topic.leaders,
            topic.leader_epochs,
            tuple(sorted(topic.resigned.items())),
        )
        if key not in self._numbers:
            self._numbers[key] = len(self.versions)
            self.versions.append(metadata)
        return self._numbers[key]

    # ---------------------------------------------------------------------- steps

    def _successors(self, state: State) -> Iterator[State]:
        yield from self._registrations(state)
        for id_, log in state.logs:
            if not log.fenced and self.splits_seals:
                yield _with_log(state, id_, log._replace(fenced=True))
            yield from self._writes(state, id_, log)
            yield from self._changes(state, id_, log)
        yield from self._failovers(state)
        for n, published in enumerate(state.published):
            if published < len(state.records[n]):
                yield state._replace(published=_set(state.published, n, len(state.records[n])))

    def _registrations(self, state: State) -> Iterator[State]:
        metadata = self.versions[state.metadata]
        if sum(each.epoch for each in metadata.brokers.values()) == self.registrations:
            return
        for broker in BROKERS[: min(len(metadata.brokers) + 1, self.brokers)]:
            known = metadata.brokers.get(broker)
            if known is None or known.epoch < EPOCHS:
                yield from self._change(state, (broker, 0), "register", _register(broker))

    def _writes(self, state: State, id_: Id, log: Log) -> Iterator[State]:
        """Steps that change one log only: they need no look at the metadata."""
        saved = self._checkpointed(state, id_, log)
        is_unseen = log.fenced and self.mistake == "checkpoint read before the change"
        if saved != log and not is_unseen:
            yield _with_log(state, id_, saved)
        if log.fenced:
            return
        for n, local in enumerate(log.local):
            has_begun, may_append = self._lead(state, id_, log, n), local.serves
            if has_begun is not None:
                yield has_begun
            if self.mistake == "append after the resignation":
                may_append = local.leader_epoch >= 0
            if may_append and len(state.records[n]) < self.records:
                yield self._appended(state, id_, log, n)
            if local.serves:
                resigned = Resigned(n, local.leader_epoch, _end(state, n, local))
                yield _with_log(
                    state, id_, _with_entry(log, resigned, local._replace(serves=False))
                )

    def _lead(self, state: State, id_: Id, log: Log, n: int) -> State | None:
        """The broker reads what it inherits, and begins to serve."""
        metadata, (broker, epoch) = self.versions[state.metadata], id_
        topic = metadata.topics["t"]
        leader_epoch = topic.leader_epochs[n]
        if topic.leaders[n] != broker or log.local[n].leader_epoch >= leader_epoch:
            return None
        if any(each.epoch < epoch for each in leadership.unfenced_epochs(metadata, broker)):
            return None
        led, by = state.led[n]
        if led > leader_epoch or (led == leader_epoch and by != id_):
            raise Violation(f"I3: {by} and {id_} lead {n} in {leader_epoch}")
        inherited = leadership.inherited_by(metadata, broker)
        self._check_state(state, n, {each: each.fenced for each in inherited})
        log = log._replace(local=_set(log.local, n, Local(leader_epoch, True)))
        led_now = _set(state.led, n, (leader_epoch, id_))
        return _with_log(state, id_, log)._replace(led=led_now)

    def _appended(self, state: State, id_: Id, log: Log, n: int) -> State:
        local, known = log.local[n], state.records[n]
        leader_epoch = local.leader_epoch
        if any(
            isinstance(each, Resigned) and each[:2] == (n, leader_epoch) for each in log.entries
        ):
            raise Violation(f"I4: {id_} appends after its resignation")
        if state.led[n] != (leader_epoch, id_):
            raise Violation(f"I3: {id_} appends in {leader_epoch} after {state.led[n]}")
        log = _with_entry(log, Record(n, leader_epoch, len(known)), local)
        records = _set(state.records, n, (*known, leader_epoch))
        return _with_log(state, id_, log)._replace(records=records)

    def _checkpointed(self, state: State, id_: Id, log: Log) -> Log:
        """Saves the states of partitions that the broker serves, and trims entries.

        Of a partition that it gave up, everything is kept until its leader is an heir no more.
        """
        metadata = self.versions[state.metadata]
        topic = metadata.topics["t"]
        own = next(each for each in metadata.open_epochs if each.id == id_)
        entries = set()
        for each in log.entries:
            n = each.partition
            if log.local[n].serves:
                is_needed = isinstance(each, Record) and each.offset >= state.published[n]
            else:
                is_needed = topic.leaders[n] in own.heirs or (
                    topic.leader_epochs[n] == log.local[n].leader_epoch
                    and self.mistake != "resignation trimmed before the change"
                )
            if is_needed:
                entries.add(each)
        states = tuple(
            (local.leader_epoch, _end(state, n, local)) if local.serves else None
            for n, local in enumerate(log.local)
        )
        return log._replace(entries=frozenset(entries), checkpoint=states)

    def _changes(self, state: State, id_: Id, log: Log) -> Iterator[State]:
        """Changes of the metadata by the broker of a log."""
        metadata, (broker, epoch) = self.versions[state.metadata], id_
        if metadata.brokers[broker].epoch != epoch:
            return
        topic = metadata.topics["t"]
        sealed = self._sealed(state, broker, before=epoch)
        yield from self._change(
            state,
            id_,
            ("succeed", sealed),
            lambda m: leadership.succeed(m, broker, epoch, sealed=sealed),
            sealed,
        )
        for n, leader in enumerate(topic.leaders):
            if leader == broker and topic.leader_epochs[n] < self.leader_epochs:
                yield from self._hand_overs(state, id_, log.local[n], n)
        yield from self._leaves(state, id_, log)

    def _hand_overs(self, state: State, id_: Id, local: Local, n: int) -> Iterator[State]:
        metadata = self.versions[state.metadata]
        leader_epoch = metadata.topics["t"].leader_epochs[n]
        is_too_early = self.mistake == "resigned before the resignation exists"
        for target in metadata.brokers.keys() - {id_[0]}:
            move = Handover(
                topic="t", topic_id="t", partition=n, leader_epoch=leader_epoch, target=target
            )
            if local.leader_epoch == leader_epoch and (is_too_early or not local.serves):
                resign = partial(
                    leadership.resign,
                    broker=id_[0],
                    epoch=id_[1],
                    moves={move: leader_epoch},
                )
                yield from self._change(state, id_, ("resign", move), resign)
            elif local.leader_epoch < leader_epoch:
                pass_on = partial(self._pass_on, id_=id_, move=move)
                yield from self._change(state, id_, ("pass", move), pass_on)

    def _sealed(self, state: State, broker: int, *, before: int) -> frozenset[Id]:
        """Returns the epochs with a fence; if it is not a step of its own, those about to get one.

        A fence stops the writes of one log, and changes nothing else. So a step between it and the
        change that needs it could as well precede it.
        """
        if self.splits_seals:
            return frozenset(id_ for id_, log in state.logs if log.fenced)
        if self.mistake == "failover without a seal":
            return frozenset()
        return frozenset(id_ for id_, _ in state.logs if id_[0] == broker and id_[1] < before)

    def _pass_on(
        self, metadata: ClusterMetadata, id_: Id, move: Handover
    ) -> ClusterMetadata | None:
        if self.mistake != "passed on by a broker that is not up":
            return leadership.pass_on(metadata, *id_, [move])
        is_other = {each: each.broker != id_[0] or each.id == id_ for each in metadata.open_epochs}
        seen = tuple(each for each in metadata.open_epochs if is_other[each])
        hidden = tuple(each for each in metadata.open_epochs if not is_other[each])
        after = leadership.pass_on(
            msgspec.structs.replace(metadata, open_epochs=seen), *id_, [move]
        )
        return after and msgspec.structs.replace(after, open_epochs=hidden + after.open_epochs)

    def _leaves(self, state: State, id_: Id, log: Log) -> Iterator[State]:
        metadata, logs = self.versions[state.metadata], dict(state.logs)
        covered = tuple(saved[0] if saved else -1 for saved in log.checkpoint)
        is_unseen = log.fenced and self.mistake == "checkpoint read before the change"
        if self.mistake == "left before the checkpoint" or is_unseen:
            covered = tuple(each.leader_epoch for each in log.local)
        for each in leadership.inherited_by(metadata, id_[0]):
            is_needed = any(
                isinstance(entry, Record)
                and metadata.topics["t"].leaders[entry.partition] == id_[0]
                and entry.offset >= state.published[entry.partition]
                for entry in logs[each.id].entries
            )
            if not is_needed or each.id == id_:
                left = (each.id,)
                yield from self._change(
                    state,
                    id_,
                    ("leave", left, covered),
                    partial(
                        leadership.leave,
                        broker=id_[0],
                        epoch=id_[1],
                        left=left,
                        covered={"t": dict(enumerate(covered))},
                    ),
                )

    def _failovers(self, state: State) -> Iterator[State]:
        fences = frozenset(id_ for id_, log in state.logs if log.fenced and self.splits_seals)
        key = state.metadata, fences
        if key not in self._failed_over:
            self._failed_over[key] = list(self._possible_failovers(state))
        for number, sealed in self._failed_over[key]:
            yield self._after(state, number, (0, 0), sealed)

    def _possible_failovers(self, state: State) -> Iterator[tuple[int, frozenset[Id]]]:
        metadata = self.versions[state.metadata]
        topic = metadata.topics["t"]
        for dead in metadata.brokers:
            led = [n for n, leader in enumerate(topic.leaders) if leader == dead]
            if any(topic.leader_epochs[n] >= self.leader_epochs for n in led):
                continue
            epoch = metadata.brokers[dead].epoch
            is_old = self.mistake == "failover judged an older epoch" and epoch > 1
            sealed = self._sealed(state, dead, before=epoch + (not is_old))
            others = metadata.brokers.keys() - {dead}
            for chosen in itertools.product(sorted(others), repeat=len(led)):
                successors = {("t", n): each for n, each in zip(led, chosen, strict=True)}
                with contextlib.suppress(errors.LeadersChanged):
                    after = self._failover(metadata, dead, sealed, successors)
                    if after is not None:
                        yield self._number(after), sealed

    def _failover(
        self,
        metadata: ClusterMetadata,
        dead: int,
        sealed: frozenset[Id],
        successors: dict[tuple[str, int], int],
    ) -> ClusterMetadata | None:
        known, before = metadata.brokers[dead], metadata
        if self.mistake == "failover without a seal":
            sealed = frozenset(each.id for each in metadata.open_epochs)
        newest = [each for each in metadata.open_epochs if each.id == (dead, known.epoch)]
        hides = self.mistake == "failover judged an older epoch" and known.epoch > 1
        if hides:
            older = msgspec.structs.replace(known, epoch=known.epoch - 1)
            before = msgspec.structs.replace(
                metadata,
                brokers={**metadata.brokers, dead: older},
                open_epochs=tuple(each for each in metadata.open_epochs if each not in newest),
            )
        epoch = before.brokers[dead].epoch
        after = leadership.failover(before, dead, epoch=epoch, sealed=sealed, successors=successors)
        if after is None:
            return None
        changes: dict[str, object] = {}
        if hides:
            changes["brokers"] = metadata.brokers
            changes["open_epochs"] = (*after.open_epochs, *newest)
        if self.mistake == "heirs not passed on":
            heirs = {each.id: tuple(sorted({*each.heirs} - {dead})) for each in before.open_epochs}
            kept = tuple(
                each if each.broker == dead else msgspec.structs.replace(each, heirs=heirs[each.id])
                for each in after.open_epochs
            )
            changes["open_epochs"] = tuple(each for each in kept if each.heirs or not each.fenced)
        if self.mistake == "leader epoch not raised":
            topic = after.topics["t"]
            old = before.topics["t"].leader_epochs
            changes["topics"] = {"t": msgspec.structs.replace(topic, leader_epochs=old)}
        return msgspec.structs.replace(after, **changes)

    # ---------------------------------------------------------------------- invariants

    def _change(
        self,
        state: State,
        by: Id,
        what: object,
        decide: Decide,
        sealed: frozenset[Id] = frozenset(),
    ) -> Iterator[State]:
        """Yields the state after a change, if it is one. `what` identifies the decision.

        The logs of `sealed` get a fence before it.
        """
        key = state.metadata, by, what
        if key not in self._decided:
            try:
                after = decide(self.versions[state.metadata])
            except errors.SparklogError:
                after = None
            self._decided[key] = None if after is None else self._number(after)
        number = self._decided[key]
        if number is not None:
            yield self._after(state, number, by, sealed)

    def _after(self, state: State, number: int, by: Id, sealed: frozenset[Id]) -> State:
        known = {
            id_: log._replace(fenced=True) if id_ in sealed else log for id_, log in state.logs
        }
        self._check_leaders(state, known, self.versions[number], by)
        ids = sorted(each.id for each in self.versions[number].open_epochs)
        logs = tuple((each, known.get(each, self._new_log)) for each in ids)
        return state._replace(metadata=number, logs=logs)

    def _check_leaders(
        self, state: State, logs: dict[Id, Log], metadata: ClusterMetadata, by: Id
    ) -> None:
        """I2 and I3, of a change by the broker of epoch `by`; (0, 0) if it does not matter."""
        before, after = self.versions[state.metadata].topics["t"], metadata.topics["t"]
        for n, leader in enumerate(before.leaders):
            leader_epoch = before.leader_epochs[n]
            if (after.leaders[n], after.leader_epochs[n]) == (leader, leader_epoch):
                continue
            if after.leader_epochs[n] != leader_epoch + 1:
                raise Violation(f"I3: {n} changes from {before} to {after}")
            for id_, log in logs.items():
                if id_[0] != leader or log.fenced:
                    continue
                gave_up = any(
                    isinstance(each, Resigned) and each[:2] == (n, leader_epoch)
                    for each in log.entries
                )
                has_begun = log.local[n].leader_epoch >= leader_epoch
                if id_ != by or (has_begun and not gave_up):
                    raise Violation(f"I2: {n} has another leader, and {id_} may still write")

    def _check_restorable(self, state: State) -> None:
        """I7: if the leader of any partition died now, its successor could continue."""
        metadata = self.versions[state.metadata]
        for n, leader in enumerate(metadata.topics["t"].leaders):
            sources = {
                each: each.fenced or each.broker == leader
                for each in metadata.open_epochs
                if each.broker == leader or leader in each.heirs
            }
            self._check_state(state, n, sources)

    def _check_state(self, state: State, n: int, sources: dict[Epoch, bool]) -> None:
        """Checks that some logs have all of a partition; those of living brokers are not read.

        Of a living broker's log, a successor reads the resignation, and the records it points to.
        """
        resigned = self.versions[state.metadata].topics["t"].resigned.get(n)
        logs, found, offsets = dict(state.logs), list[Saved](), set[int]()
        for epoch, is_whole in sources.items():
            log, of_epoch = logs[epoch.id], list[Saved]()
            for each in log.entries:
                if each.partition == n and isinstance(each, Record):
                    if is_whole or each.offset >= state.published[n]:
                        offsets.add(each.offset)
                elif each.partition == n and (
                    is_whole or resigned == Resignation(*epoch.id, each.leader_epoch)
                ):
                    of_epoch.append(each[1:])
            saved = log.checkpoint[n] if is_whole and log.checkpoint else None
            of_epoch += [saved] if saved is not None else []
            if self.mistake == "state by the order of opening" and of_epoch:
                found = []
            found += of_epoch
        end = len(state.records[n])
        known = max(found, default=(0, 0))[1]
        if not offsets.issuperset(range(min(known, state.published[n]), end)):
            raise Violation(f"I7: {n} with {end} records is lost: {found}, {sorted(offsets)}")


# ------------------------------------------------------------------------------ parts


def _register(broker: int) -> Decide:
    registration = BrokerRegistration(epoch=0)
    return lambda m: leadership.register(m, broker, registration, WalKind.OBJECTS)


def _end(state: State, n: int, local: Local) -> int:
    """The end of a partition as a broker knows it that led it in that leader epoch."""
    return sum(each <= local.leader_epoch for each in state.records[n])


def _with_log(state: State, id_: Id, log: Log) -> State:
    return state._replace(
        logs=tuple((each, log if each == id_ else old) for each, old in state.logs)
    )


def _with_entry(log: Log, entry: Record | Resigned, local: Local) -> Log:
    local_now = _set(log.local, entry.partition, local)
    return log._replace(local=local_now, entries=log.entries | {entry})


def _set(values: tuple, at: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:at], value, *values[at + 1 :])
