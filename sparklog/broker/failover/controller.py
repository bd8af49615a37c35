"""The controller of a cluster: the member that moves partitions away from dead brokers.

Any member can be the controller, and nothing depends on there being only one: each change checks
its precondition against the newest metadata. The others watch only the controller, until it falls
silent, and replace it once it is dead. Before partitions move, every epoch in which the dead broker
could still ack a record gets a fence (`storage/metadata/leadership.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

import structlog

from sparklog import errors
from sparklog.broker.backoff import ENDS_THE_BROKER, FailureLog, RetrySchedule
from sparklog.broker.leader_metadata import LeaderMetadata
from sparklog.broker.log.histories import Histories
from sparklog.broker.log.takeover import Leadership
from sparklog.clock import Clock
from sparklog.storage.metadata import leadership, placement
from sparklog.storage.metadata.liveness import Answers, AskReadiness, Readiness
from sparklog.storage.metadata.model import ClusterMetadata, Epoch
from sparklog.storage.metadata.observer import Observer
from sparklog.storage.objects import Store

_log = structlog.get_logger("sparklog.cluster")
_RANK_SECONDS: Final = 0.5
"""A member waits this long for each one that ranks before it as the next controller."""
_RETRY_SECONDS: Final = 0.5


class Controller:
    """One member's part in controlling its cluster. One caller at a time."""

    def __init__(
        self,
        store: Store,
        metadata: LeaderMetadata,
        own: Leadership,
        *,
        clock: Clock,
        dead_after_seconds: float,
        is_sound: Callable[[], bool],
        histories: Histories,
        readiness: AskReadiness,
        every_seconds: float = 0.0,
        answers: Answers | None = None,
    ) -> None:
        """`every_seconds`: the minimum time between two checks, each of which costs requests.

        `is_sound`: whether our own heartbeats reach the store; otherwise we judge no broker.
        `histories` cache the logs that are read before they are sealed. `answers`: see `Observer`.
        """
        self._store = store
        self._metadata = metadata
        self._own = own
        self._clock = clock
        self._is_sound = is_sound
        self._every_seconds = every_seconds
        self._histories = histories
        self._readiness = readiness
        self._prepare_seconds = dead_after_seconds / 10
        """The minimum time between two preparations, and the maximum time to read one log."""
        self._long: set[tuple[int, int]] = set()
        """Epochs whose logs took too long to read, and are left to the failover."""
        self._begun: set[tuple[int, int]] = set()
        """Epochs whose logs may have our fence, but which the metadata does not mark as fenced."""
        self._prepared_at = -float("inf")
        self._looked_at = -float("inf")
        self.dead: Mapping[int, int] = {}
        """The brokers that our last check as controller found dead, by id; for any thread.

        The values are the epochs that were judged. Each check replaces the whole mapping.
        """
        self._observer = Observer(
            store, clock=clock, dead_after_seconds=dead_after_seconds, answers=answers
        )
        self._judged: tuple[ClusterMetadata | None, list[int]] = (None, [])
        """The brokers that the controller watches, as of a version of the metadata."""
        self._vacant_since: float | None = None
        """When the controller was found to be dead, in monotonic seconds; None if it is not."""
        self._retries = RetrySchedule(clock, first_seconds=_RETRY_SECONDS)
        self._failures = FailureLog()

    def seconds_to_death(self) -> float:
        """Returns the time until the next silent broker counts as dead, or infinity."""
        left_seconds = self._observer.next_death - self._clock.monotonic()
        return left_seconds if left_seconds > 0 else float("inf")

    def tick(self) -> None:
        """Checks the others once. Raises `BrokerFenced` and the store's errors."""
        if not self._is_sound():
            self._observer.forget()
            return
        now = self._clock.monotonic()
        if now - self._looked_at < self._every_seconds and now < self._observer.next_death:
            return
        self._looked_at = now
        metadata = self._metadata.known
        if metadata.controller == self._own.broker:
            self._vacant_since = None
            self._control(metadata)
        else:
            self.dead = {}
            self._watch(metadata)
        if (silent := self._observer.silent) and now - self._prepared_at >= self._prepare_seconds:
            self._prepared_at = now
            self._prepare(metadata, silent)

    # -------------------------------------------------------------------------- electing

    def _watch(self, metadata: ClusterMetadata) -> None:
        """Becomes the controller once the current one is dead, unless another member does first."""
        present = metadata.controller
        # A failed host or network may affect others too: their silence also counts from now on.
        is_silent = present in self._observer.silent or self._vacant_since is not None
        others = self._others(metadata) if is_silent else []
        dead = self._observer.dead(metadata, {present, *others})
        is_vacant = present in dead or not leadership.is_up(metadata, present)
        if not is_vacant:
            self._vacant_since = None
            return
        now = self._clock.monotonic()
        if self._vacant_since is None:
            self._vacant_since = now
        if now - self._vacant_since < self._rank(metadata) * _RANK_SECONDS:
            return

        def decide(newest: ClusterMetadata) -> ClusterMetadata | None:
            is_same = newest.controller == present and (
                newest.brokers.get(present) == metadata.brokers.get(present)
            )
            if not is_same:
                return None
            return leadership.elect(newest, self._own.broker, self._own.epoch)

        changed = self._metadata.change(decide)
        if changed.controller == self._own.broker:
            _log.info("this broker is now the controller", before=present)
            # Its partitions have waited long enough: on a bucket the next check is 2 s away.
            self._control(changed)

    def _rank(self, metadata: ClusterMetadata) -> int:
        """Returns how many live members rank before this one; the order differs by controller."""
        present = metadata.brokers.get(metadata.controller)
        seed = f"{metadata.controller}/{present.epoch if present else 0}"
        ours = placement.order(seed, self._own.broker)
        return sum(
            placement.order(seed, broker) < ours
            for broker, known in metadata.brokers.items()
            if known.is_member
            and broker not in (metadata.controller, self._own.broker)
            and leadership.is_up(metadata, broker)
        )

    # -------------------------------------------------------------------------- failing over

    def _control(self, metadata: ClusterMetadata) -> None:
        """Assigns the partitions of dead brokers to live ones.

        A failover that has put a fence is completed even if its broker answers again: that broker
        can no longer write, and may only find out at its next write.
        """
        dead = self._observer.dead(metadata, self._others(metadata))
        self.dead = dead
        failing = {**self._unfinished(metadata), **dead}
        for broker, epoch in failing.items():
            name = f"{broker}/{epoch}"
            if self._retries.is_waiting(name):
                continue
            try:
                if broker in dead or self._is_fenced(metadata, broker):
                    self._fail_over(
                        metadata, broker, epoch, gone={*failing, *self._observer.silent}
                    )
            except ENDS_THE_BROKER:
                raise
            except Exception as error:
                self._retries.failed(name)
                reason = str(error) or repr(error)
                if self._failures.is_new(name, reason):
                    _log.error("cannot fail over", broker=broker, epoch=epoch, reason=reason)
            else:
                self._retries.succeeded(name)
                self._failures.recovered(name)

    def _unfinished(self, metadata: ClusterMetadata) -> dict[int, int]:
        """Returns the brokers whose failover has begun, with the epochs that were judged."""
        if self._begun:
            self._begun &= {each.id for each in metadata.open_epochs if not each.fenced}
        return {
            broker: known.epoch
            for broker in {broker for broker, _ in self._begun}
            if (broker, (known := metadata.brokers[broker]).epoch) in self._begun
        }

    def _is_fenced(self, metadata: ClusterMetadata, broker: int) -> bool:
        """Returns whether a fence ends a log to which the broker could write.

        Otherwise forgets the failover: it failed before its fence. Raises what `Histories.read`
        raises.
        """
        epochs = [*leadership.unfenced_epochs(metadata, broker)]
        if any(self._histories.is_fenced(each) for each in epochs):
            return True
        self._begun -= {each.id for each in epochs}
        return False

    def _others(self, metadata: ClusterMetadata) -> list[int]:
        """Returns the other brokers that lead a partition, or may write to a log."""
        known, found = self._judged
        if known is not metadata:
            leading = {leader for topic in metadata.topics.values() for leader in {*topic.leaders}}
            writing = {each.broker for each in metadata.open_epochs if not each.fenced}
            found = sorted((leading | writing) - {self._own.broker})
            self._judged = metadata, found
        return found

    def _fail_over(
        self, metadata: ClusterMetadata, dead: int, epoch: int, *, gone: Collection[int] = ()
    ) -> None:
        """Fences the logs that the dead broker may write to, and assigns its partitions to others.

        `gone`: brokers that are dead as well, or soon will be, and are assigned none.
        """
        began = self._clock.monotonic()
        sealed = self._seal(leadership.unfenced_epochs(metadata, dead))
        moved: dict[tuple[str, int], int] = {}
        unfit = self._unfit(metadata, dead, gone)

        def decide(newest: ClusterMetadata) -> ClusterMetadata | None:
            nonlocal moved
            moved = placement.successors_without(newest, dead, {*gone, *unfit})
            moved = moved or placement.successors_without(newest, dead, gone)
            return leadership.failover(newest, dead, epoch=epoch, sealed=sealed, successors=moved)

        try:
            changed = self._metadata.change(decide)
        except errors.LeadersChanged as error:  # it has restarted: nothing has to move
            _log.info("not failed over", broker=dead, epoch=epoch, reason=error.reason)
            return
        self._metadata.serve(changed)  # some of the partitions may be ours
        if not moved:  # it handed over all of them before it stopped
            _log.info("closed the log of a broker that leads nothing", broker=dead, epoch=epoch)
            return
        _log.warning(
            "failed over a dead broker",
            broker=dead,
            epoch=epoch,
            partitions=len(moved),
            to=sorted(set(moved.values())),
            took_seconds=round(self._clock.monotonic() - began, 3),
        )

    def _unfit(self, metadata: ClusterMetadata, dead: int, gone: Collection[int]) -> set[int]:
        """Returns brokers that would receive partitions of the dead one, but cannot serve them now.

        Asks only the would-be recipients: there may be many others. Raises the store's errors.
        """
        unfit: set[int] = set()
        while targets := {*placement.successors_without(metadata, dead, {*gone, *unfit}).values()}:
            states = self._readiness(metadata, targets)
            waiting = {each for each in targets if states[each] is not Readiness.SERVES}
            if not waiting:
                break
            unfit |= waiting
        return unfit

    def _prepare(self, metadata: ClusterMetadata, silent: Collection[int]) -> None:
        """Reads the logs of brokers that are likely to be dead, so that little is left to read.

        Errors are left to the failover. So is the rest, once it takes a long time: silence counts
        only while we check it, so reading a long log repeatedly would get in the way.
        """
        self._long &= {each.id for each in metadata.open_epochs}
        deadline = self._clock.monotonic() + self._prepare_seconds
        try:
            for each in leadership.epochs_behind(metadata, silent):
                began = self._clock.monotonic()
                if began >= deadline:
                    break
                if each.id in self._long:
                    continue
                try:
                    self._histories.read_ahead(each)
                finally:
                    if self._clock.monotonic() - began >= self._prepare_seconds:
                        self._long.add(each.id)
        except ENDS_THE_BROKER:
            raise
        except Exception as error:
            reason = str(error) or repr(error)
            _log.info("cannot prepare for a failover", brokers=sorted(silent), reason=reason)

    def _seal(self, epochs: Iterable[Epoch]) -> set[tuple[int, int]]:
        """Puts a fence in the log of each epoch, and returns their ids."""
        sealed = set()
        for each in epochs:
            self._begun.add(each.id)
            self._histories.seal(each)
            sealed.add(each.id)
        return sealed
