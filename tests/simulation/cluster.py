"""Runs in which two to four members lead a root together, and take over from each other."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import re
from collections.abc import Callable, Collection

from sparklog import errors
from sparklog.formats import flight_messages
from sparklog.storage import wal
from sparklog.storage.metadata import format as metadata_format
from sparklog.storage.metadata.leadership import is_open
from sparklog.storage.metadata.model import ClusterMetadata, Epoch, Resignation
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import ObjectMissing
from sparklog.storage.snapshot import NOT_LED
from sparklog.storage.staging import manifest
from sparklog.storage.staging.sweep import PARTS_KEPT_SECONDS
from tests.simulation.brokers import Call, SimulatedBroker
from tests.simulation.faults import LONGEST_SECONDS
from tests.simulation.history import Place, ensure
from tests.simulation.scheduler import Process
from tests.simulation.world import (
    BACKLOG_SECONDS,
    PATIENCE_SECONDS,
    QUIET_SECONDS,
    Outcome,
    Profile,
    World,
    create,
    run,
)


def run_cluster(seed: int, change: Callable[[Profile], Profile] = lambda drawn: drawn) -> Outcome:
    """The seed's run with several members."""
    return run(seed, lambda drawn: change(as_cluster(drawn)), kind=ClusterWorld)


def as_cluster(drawn: Profile) -> Profile:
    """Returns the seed's world with several members of a cluster, and without large batches."""
    return dataclasses.replace(
        drawn,
        is_cluster=True,
        brokers=2 + (drawn.steps + drawn.brokers) % 3,
        clone="",
        has_mirror=False,
        has_large_batches=False,
        stuck_rate=0.4 if drawn.steps % 3 == 0 else 0.0,
    )


class ClusterWorld(World):
    """A run in which several members lead the root together, and take over from each other.

    An oracle looks at each version of the metadata as it is put: the leader of a partition changes
    only when its old one can write no more, and leader epochs rise by one.
    """

    def __init__(self, chance: random.Random, profile: Profile) -> None:
        super().__init__(chance, profile)
        self._newest = MetadataStore(self.disk.base, clock=self.scheduler.clock)
        self._judged = ClusterMetadata()
        """The last version that was judged."""
        self._wrong: list[str] = []
        """Changes of the metadata that broke a rule; the real code would hide an exception."""
        self._logs: dict[tuple[int, int], wal.Follower] = {}
        """Readers that look for the fences of epochs."""
        self.disk.watchers.append(self._note_straggler)

    # -------------------------------------------------------------------------- for everybody

    def note_cut(self) -> None:
        super().note_cut()
        self._newest = MetadataStore(self.disk.base, clock=self.scheduler.clock)
        if self._judged.version > self._newest.refresh().version:
            self._judged = self._newest.current
        self._logs.clear()

    def find_broker(self, place: Place | None = None) -> SimulatedBroker | None:
        """Any member that serves: mostly the leader of `place`, if that is given."""
        serving = [each for each in self._brokers if each.alive and each.serving]
        if not serving:
            return None
        if place is not None and self.chance.random() < 0.9:
            leader = self._leader_of(place)
            for each in serving:
                if each.leadership is not None and each.leadership.broker == leader:
                    return each
        return self.chance.choice(serving)

    def _leader_of(self, place: Place) -> int | None:
        for known in self.metadata().topics.values():
            if known.topic_id == place[0] and place[1] < known.partition_count:
                return known.leaders[place[1]]
        return None

    def is_replaced(self, broker: SimulatedBroker) -> bool:
        """Returns true if the broker's epoch is over, or its successor has put a fence."""
        leadership = broker.leadership
        if leadership is None:
            return False
        own = leadership.broker, leadership.epoch
        metadata = self.metadata()
        is_newest = metadata.brokers[leadership.broker].epoch == leadership.epoch
        return not is_newest or not is_open(metadata, own) or self._is_fenced(own)

    def _is_fenced(self, epoch: tuple[int, int]) -> bool:
        """Returns whether the log of an epoch that the metadata has as open has a fence."""
        for each in self.metadata().open_epochs:
            if each.id == epoch:
                return self._is_sealed(each)
        return True

    def may_know_less(self, broker: SimulatedBroker, topic_id: str) -> bool:
        """Returns true also if the broker may not have seen that the topic was created."""
        return self.is_replaced(broker) or not self.is_deleted(topic_id)

    def judge(self, broker: SimulatedBroker, error: Exception) -> None:
        """A member may end, too, because another one could not reach it in time."""
        if isinstance(error, errors.Corrupt) and not broker.serving:
            return  # its successor tidied up while it started
        super().judge(broker, error)

    # -------------------------------------------------------------------------- the run

    def _begin(self) -> None:
        for _ in range(self.profile.brokers):
            self._start_broker(check_alive=True)
        self._until(lambda: all(each.serving for each in self._brokers), "the first members serve")
        first = self._brokers[0]
        for name, count in zip(self.topic_names, self.profile.partitions, strict=True):
            request = flight_messages.CreateTopic(
                topic=name, partitions=count, config=self.config_of(name), if_absent=True
            )
            if self.profile.config:
                self.history.keeps_nothing(name)
            while True:
                call = first.call(f"create {name}", functools.partial(create, request))
                self._wait_for(call)
                # Many versions at once may leave it open if one of them counts.
                if not isinstance(call.error, errors.OutcomeUnknown):
                    ensure(call.error is None, f"create {name}: {call.error!r}")
                    break

    def _start_broker(self, *, check_alive: bool) -> SimulatedBroker:
        """Starts a member: mostly of an id that no live one has."""
        ids = range(self.profile.brokers)
        taken = {each.settings.id for each in self._brokers if each.alive}
        free = [each for each in ids if each not in taken]
        broker_id = free[0] if free and check_alive else self.chance.choice(ids)
        broker = SimulatedBroker(
            self,
            name=f"broker{len(self._brokers)}",
            broker_id=broker_id,
            check_alive=check_alive,
        )
        self._brokers.append(broker)
        return broker

    def _spawn_operator(self) -> None:
        """Keeps as many members alive as there are ids, for most of the time."""
        operator = Process(self.scheduler, "operator")

        def body() -> None:
            while self._is_operated:
                self._replenish()
                if (self.torn or self.disk.damaged) and self.chance.random() < 0.1:
                    self._mend()
                alive = [each for each in self._brokers if each.alive]
                odds = self.chance.random()
                if not alive or (len(alive) < self.profile.brokers and odds < 0.15):
                    self._start_broker(check_alive=True)
                elif odds > 0.99:
                    self._start_broker(check_alive=False)
                elif odds > 0.97 and alive[0].serving:
                    chosen = self.chance.choice(alive)
                    if chosen.serving:  # a stop while it starts has no effect
                        chosen.stop()
                self.scheduler.sleep(self.chance.uniform(0.05, 0.6))

        self.scheduler.spawn(operator, "operator", body)

    # -------------------------------------------------------------------------- the oracle

    def note_metadata(self) -> None:
        newest = self._newest.refresh()
        kept = {each.id for each in newest.open_epochs}
        while self._judged.version < newest.version:
            after = self._next_version() or newest
            if self._judged.version:
                self._judge_version(self._judged, after, kept)
            self._judged = after

    def _next_version(self) -> ClusterMetadata | None:
        """Returns the version after the last one that was judged; None if it has been pruned."""
        version = self._judged.version + 1
        try:
            data = self.disk.base.get(f"meta/{version:020d}.json")
        except ObjectMissing:
            return None
        found = metadata_format.decode_version(version, data)
        if isinstance(found, ClusterMetadata):
            return found
        is_next = found.previous == self._judged.change_id
        return metadata_format.apply(self._judged, found) if is_next else None

    def _judge_version(
        self, before: ClusterMetadata, after: ClusterMetadata, kept: Collection[tuple[int, int]]
    ) -> None:
        """Judges a version. `kept`: the epochs that are open now, whose logs can be looked at."""
        for name, known in after.topics.items():
            was = before.topics.get(name)
            if was is None or was.topic_id != known.topic_id:
                continue
            for number, leader in enumerate(was.leaders):
                rise = known.leader_epochs[number] - was.leader_epochs[number]
                moved = known.leaders[number] != leader
                what = f"{name}-{number}: {was} becomes {known}"
                if rise < 0 or (moved and not rise):
                    self._wrong.append(f"the leader epoch is wrong: {what}")
                resigned = known.resigned.get(number)
                if resigned is not None and resigned != was.resigned.get(number):
                    if not self._has_resigned(resigned, known.topic_id, number):
                        self._wrong.append(f"{resigned} has no whole state: {what}")
                elif rise:
                    # The id's new epoch, which takes over from the older ones.
                    heir = None if moved else after.brokers[leader].epoch
                    for epoch in before.open_epochs:
                        is_old = epoch.broker == leader and epoch.epoch != heir
                        may_write = is_old and not epoch.fenced and epoch.id in kept
                        if may_write and not self._is_sealed(epoch):
                            served = was.leader_epochs[number]
                            if not moved or self._has_served(epoch, known.topic_id, number, served):
                                self._wrong.append(f"{epoch} can still write: {what}")

    def _has_resigned(self, resigned: Resignation, topic_id: str, number: int) -> bool:
        """Returns whether the log has a partition's last state, and no entry of it after that."""
        id_ = resigned.broker, resigned.epoch
        for epoch in self._newest.current.open_epochs:
            if epoch.id == id_:
                log = wal.of(self.disk.base, self.scheduler.clock, epoch.log).follower(*id_)
                flushes = log.poll(relist=True)
                checkpoint = log.checkpoint
                if checkpoint is None or checkpoint.sequence < resigned.sequence:
                    return False
                bounds = (checkpoint.bounds or {}).get(topic_id, ())[number]
                return bounds != NOT_LED and not any(
                    each.entry.topic_id == topic_id
                    and each.entry.partition == number
                    and each.entry.end > bounds.end
                    for flush in flushes
                    for each in flush.located
                )
        return True  # the epoch has ended since

    def _has_served(self, epoch: Epoch, topic_id: str, number: int, leader_epoch: int) -> bool:
        """Returns whether a broker has begun to serve a partition in a leader epoch."""
        for each in self._brokers:
            own = each.leadership
            if each.alive and each.serving and own and (own.broker, own.epoch) == epoch.id:
                topic = each.led_partitions.by_id(topic_id)
                if topic is not None and number in topic.partitions:
                    return True
        log = wal.of(self.disk.base, self.scheduler.clock, epoch.log).follower(*epoch.id)
        flushes = log.poll(relist=True)
        of_topic = (log.checkpoint.bounds or {}).get(topic_id, ()) if log.checkpoint else ()
        return any(
            each.leader_epoch == leader_epoch for each in of_topic[number : number + 1]
        ) or any(
            (each.entry.topic_id, each.entry.partition) == (topic_id, number)
            and each.entry.leader_epoch == leader_epoch
            for flush in flushes
            for each in flush.located
        )

    def _is_sealed(self, epoch: Epoch) -> bool:
        log = self._logs.get(epoch.id)
        if log is None:
            log = wal.of(self.disk.base, self.scheduler.clock, epoch.log).follower(*epoch.id)
            self._logs[epoch.id] = log
        with contextlib.suppress(errors.SparklogError, ObjectMissing):
            log.poll(relist=True)
        return log.fenced

    def _note_straggler(self, path: str) -> None:
        """Notes what a suspended member puts into the log of a closed epoch: it stays for long."""
        named = re.fullmatch(r"wal/(\d+)/(\d+)/.*", path)
        if named and not is_open(self._newest.refresh(), (int(named[1]), int(named[2]))):
            self.disk.zombies.add(path)

    def may_stay_staged(self, path: str) -> bool:
        """Returns true also for the decision of the newest batch of a query, and its receipt."""
        folder, _, name = path.rpartition("/")
        query, _, batch = folder.rpartition("/")
        is_newest = int(batch) == max(int(each) for each in self.disk.base.folders(query))
        names = {each.name for each in self.disk.base.list_after(folder)}
        is_done = any(manifest.is_receipt(each) for each in names)
        is_decision = manifest.is_receipt(name) or manifest.is_manifest(name)
        return (is_newest and is_done and is_decision) or super().may_stay_staged(path)

    # -------------------------------------------------------------------------- recovery

    def _check(self) -> None:
        ensure(not self._wrong, "; ".join(self._wrong))
        super()._check()

    def _until(
        self, is_reached: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS
    ) -> None:
        """Also starts a member where none is left: a controller may die after its last fence."""

        def is_reached_by_some() -> bool:
            if not self._is_operated and not any(each.alive for each in self._brokers):
                self._start_broker(check_alive=True)
            return is_reached()

        super()._until(is_reached_by_some, what, seconds)

    def _recover(self) -> None:
        if self.chance.random() < 0.5:
            for each in self._brokers:
                each.process.alive = self.chance.random() < 0.5 and each.process.alive
        for each in self._brokers:
            each.process.frozen_until = 0.0
        self._mend()
        self._until(
            lambda: all(each.serving or not each.alive for each in self._brokers),
            "members that have begun to start serve or end",
        )
        self._until(self._is_level, "every partition is served by its leader")
        self._check_turns(LONGEST_SECONDS)
        self.closing = True
        self._until(
            lambda: all(each.finished for each in self._clients), "every client gets its answers"
        )
        self._publish_all()
        for other in self._others:
            other.process.alive = False
        self._until(lambda: not self.disk.late_puts, "all late puts have landed")
        self._until(self._is_level, "members that were replaced notice it")
        alive = [each for each in self._brokers if each.alive and each.serving]
        self.last = self.chance.choice(alive)
        for each in alive:
            if each is self.last:
                continue
            if self.chance.random() < 0.5:
                each.stop()
            else:
                each.process.alive = False
        self._until(self._is_one_left, "members that are stopped end")
        for broker, worker in self.workers:
            worker.alive &= broker.alive
        self._until(self._is_alone, "the last member leads everything")
        self._ask(self.last, "one more", self._append_one)
        self._publish_all()
        for _ in range(2):
            self._pass(1.5)
            self.scheduler.clock.advance(
                self.profile.orphan_grace_seconds
                + 2 * self.profile.skew_seconds
                + PARTS_KEPT_SECONDS
            )
        self._backfill()
        self._rest(QUIET_SECONDS)

    def _is_one_left(self) -> bool:
        """Finds the last member: it is another one if the chosen one has ended as well."""
        left = [each for each in self._brokers if each.alive]
        if len(left) != 1 or not left[0].serving or left[0].is_leaving:
            return False
        (self.last,) = left
        return True

    def _publish_all(self) -> None:
        """Has every member publish, those again whose place another one takes meanwhile."""
        request = flight_messages.PublishNow(timeout_seconds=BACKLOG_SECONDS)
        done: set[SimulatedBroker] = set()
        while left := [each for each in self._brokers if each.alive and each not in done]:
            self._until(self._is_level, "every partition is served by its leader")
            member = left[0]
            call = member.call("publish all", lambda core: core.publishing.publish(request))
            self._wait_for(call)
            if isinstance(call.error, errors.MetadataChanged):
                self._pass(0.1)  # as a client that sends the request again
                continue
            is_over = isinstance(call.error, errors.BrokerClosing | errors.Fenced)
            ensure(call.error is None or is_over, f"publish all: {call.error!r}")
            done.add(member)

    def _wait_for(self, call: Call) -> None:
        self._until(lambda: call.done or not call.broker.alive, "an answer", BACKLOG_SECONDS)

    def _is_alone(self) -> bool:
        """Returns whether the last member leads everything, and no other one may write."""
        writing = {each.broker for each in self.metadata().open_epochs if not each.fenced}
        is_alone = self._is_one_left() and writing == {self.last.settings.id}
        return is_alone and self._is_level()

    def _is_level(self) -> bool:
        """Returns whether each partition has a live leader that serves it, and none is fenced."""
        metadata = self.metadata()
        serving = {
            each.leadership.broker: each
            for each in self._brokers
            if each.alive and each.serving and each.leadership is not None
        }
        for name, known in metadata.topics.items():
            for number, leader in enumerate(known.leaders):
                member = serving.get(leader)
                topic = member.led_partitions.by_id(known.topic_id) if member else None
                if topic is None or number not in topic.partitions:
                    return False
                if topic.name != name:
                    return False
        # Last, because it reads their logs, at every step of the simulation.
        return not any(self.is_replaced(each) for each in serving.values())
