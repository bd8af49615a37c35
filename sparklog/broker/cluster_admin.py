"""Requests from a cluster's operator to one of its brokers."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TypeAlias

from sparklog import errors, limits
from sparklog.broker import logging
from sparklog.broker.failover.handover import Handovers, Moves
from sparklog.broker.leader_metadata import LeaderMetadata
from sparklog.broker.log.takeover import Leadership
from sparklog.clock import Clock
from sparklog.formats import flight_messages
from sparklog.storage.metadata import leadership, overview, placement
from sparklog.storage.metadata.cluster_file import raise_format
from sparklog.storage.metadata.identity import Ask
from sparklog.storage.metadata.liveness import Answers
from sparklog.storage.metadata.model import ClusterMetadata
from sparklog.storage.objects import Store

_OVERVIEW_PAUSE_SECONDS = 0.25  # between checks of the heartbeat of a member that may be dead

Failures: TypeAlias = Mapping[tuple[str, int], errors.SparklogError]
"""The error that kept each (topic, partition) from moving."""


class ClusterAdmin:
    """Describes and changes the cluster, and stops this broker. May be called from any thread."""

    def __init__(
        self,
        store: Store,
        metadata: LeaderMetadata,
        own: Leadership,
        *,
        clock: Clock,
        check_open: Callable[[], None],
    ) -> None:
        """`check_open` raises `BrokerClosing` once the broker stops."""
        self._store = store
        self._metadata = metadata
        self._own = own
        self._clock = clock
        self._check_open = check_open
        self.stop: Callable[[str], None] | None = None
        """Begins to stop this broker, and logs the reason; None while it starts, and for a broker
        that ends with its program."""
        self.handovers: Handovers | None = None
        """Hands partitions over to other members; None while it starts, and for any other
        broker."""
        self.ask: Ask | None = None
        """Sends requests to other members; None while it starts, and for any other broker."""
        self.answers: Answers | None = None
        """Asks silent brokers; None: a silent broker counts as dead."""
        self._stopping = threading.Lock()
        """Acquired by the first request to stop, and never released."""

    def describe(
        self, request: flight_messages.DescribeCluster
    ) -> flight_messages.ClusterDescription:
        """Returns all brokers and their states, which takes time if one is silent.

        Raises `BrokerFenced`, `BrokerClosing` and the store's errors.
        """

        def pause() -> None:
            self._check_open()
            self._clock.sleep(_OVERVIEW_PAUSE_SECONDS)

        metadata, sightings = overview.look(
            self._store,
            self._clock,
            newest=self._metadata.reload,
            waits=lambda _leaders, _seconds: None,
            pause=pause,
            answers=self.answers,
        )
        return overview.describe(
            metadata,
            sightings,
            cluster_id=self._own.cluster.cluster_id,
            root=self._store.uri,
            clock=self._clock,
            with_topics=request.topics,
        )

    def balance(self, request: flight_messages.BalanceCluster) -> flight_messages.BalanceReply:
        """Hands partitions over to members that lead fewer; none if this broker leads alone.

        Raises `BrokerFenced`, the store's errors, and the error that ended the writer.
        """
        if self.handovers is None:
            return flight_messages.BalanceReply()
        if request.dry_run:
            return flight_messages.BalanceReply(moves=self.handovers.plan())
        return flight_messages.BalanceReply(moved=self.handovers.balance())

    def move(self, request: flight_messages.MovePartitions) -> flight_messages.BalanceReply:
        """Hands partitions that this broker leads over to the requested members.

        Raises `BadAssignment` if one of them currently accepts no partitions, and what `balance`
        raises.
        """
        if self.handovers is None:
            return flight_messages.BalanceReply()
        targets = {(each.topic, each.partition): each.target for each in request.moves}
        return flight_messages.BalanceReply(moved=self.handovers.place(targets))

    def reassign(self, targets: Moves, *, timeout_seconds: float) -> Failures:
        """Has the leaders of partitions hand them over to the requested members.

        Returns an error for each partition that has not moved. One leader's failure does not keep
        the others from moving theirs. Raises `BrokerFenced` and the store's errors.

        Args:
            timeout_seconds: for all leaders together, at most `limits.ACTION_TIMEOUT_SECONDS`.
        """
        timeout_seconds = min(max(timeout_seconds, 0.0), limits.ACTION_TIMEOUT_SECONDS)
        deadline = self._clock.monotonic() + timeout_seconds
        metadata = self._metadata.reload()
        of_leader: defaultdict[int, list[flight_messages.PartitionMove]] = defaultdict(list)
        for (topic, number), target in targets.items():
            leader = _leader(metadata, topic, number)
            if leader is not None and leader != target:
                of_leader[leader].append(
                    flight_messages.PartitionMove(
                        topic=topic, partition=number, leader=leader, target=target
                    )
                )
        failures: dict[tuple[str, int], errors.SparklogError] = {}
        for leader, moves in of_leader.items():
            request = flight_messages.MovePartitions(moves=moves)
            try:
                if leader == self._own.broker:
                    self.move(request)
                elif self.ask is not None and (left := deadline - self._clock.monotonic()) > 0:
                    address = metadata.brokers[leader].flight
                    self.ask(address, "cluster.move", request, timeout_seconds=left)
            except errors.SparklogError as error:
                failures |= {(each.topic, each.partition): error for each in moves}
        return {**self._left(targets, timeout_seconds), **failures} if of_leader else {}

    def _left(
        self, targets: Moves, timeout_seconds: float
    ) -> dict[tuple[str, int], errors.SparklogError]:
        """Returns an error for each partition whose leader is not the requested one."""
        metadata = self._metadata.reload()
        return {
            (topic, number): errors.TimedOut(
                what=f"the move of {topic}-{number} to broker {target}",
                timeout_seconds=timeout_seconds,
            )
            for (topic, number), target in targets.items()
            if _leader(metadata, topic, number) != target
        }

    def upgrade(self) -> flight_messages.UpgradeReply:
        """Raises the feature level to the highest that all brokers support.

        First the root's format version, so that releases that do not support the level no longer
        start. Raises `BrokerFenced`, `OutcomeUnknown` and the store's errors.
        """
        before = 0
        wanted = leadership.raise_level(self._metadata.reload())
        if wanted is not None:
            raise_format(self._store, wanted.level, clock=self._clock)

        def decide(metadata: ClusterMetadata) -> ClusterMetadata | None:
            nonlocal before
            before = metadata.level
            return leadership.raise_level(metadata)

        after = self._metadata.change(decide).level
        return flight_messages.UpgradeReply(before=before, after=after)

    def drain(self, request: flight_messages.DrainBroker) -> None:
        """Begins to hand over all partitions to other members, and to stop. Returns immediately.

        Raises `CannotDrain` if another broker is meant, if no other broker accepts the partitions,
        or if this one belongs to a program; also `BrokerFenced` and the store's errors.
        """
        own = self._own
        wanted = request.cluster_id, request.broker, request.epoch
        if wanted != (own.cluster.cluster_id, own.broker, own.epoch):
            reason = (
                f"broker {own.broker} (epoch {own.epoch}) of cluster {own.cluster.cluster_id} has"
                " its address now; describe the cluster again"
            )
            raise errors.CannotDrain(broker=request.broker, reason=reason)
        if self.stop is None:
            reason = "it is starting, or belongs to a program, with which it ends"
            raise errors.CannotDrain(broker=own.broker, reason=reason)
        others = {each.broker for each in placement.candidates(self._metadata.reload())} - {
            own.broker
        }
        if not ((others and own.is_member) or request.alone):
            raise errors.CannotDrain(broker=own.broker, reason=flight_messages.NO_OTHER_BROKER)
        if self._stopping.acquire(blocking=False):
            self.stop("an operator drains the broker")

    def log_level(
        self, request: flight_messages.LogLevel, *, client: str = ""
    ) -> flight_messages.LogLevel:
        """Returns this broker's log level, after setting it if a level is given.

        `client` identifies the caller in the log. Raises `BadRequest` if another broker is meant,
        or if a program has configured the level.
        """
        if request.broker != self._own.broker:
            reason = (
                f"broker {self._own.broker} has the address of broker {request.broker} now;"
                " describe the cluster again"
            )
            raise errors.BadRequest(reason=reason)
        if request.level:
            if logging.level() is None:
                raise errors.BadRequest(reason=logging.NOT_OURS)
            logging.set_level(request.level, client=client)
        return flight_messages.LogLevel(
            broker=request.broker,
            level=logging.level() or "",  # type: ignore[arg-type]
        )


def _leader(metadata: ClusterMetadata, topic: str, number: int) -> int | None:
    """Returns the leader of a partition; None if it does not exist."""
    known = metadata.topics.get(topic)
    return known.leaders[number] if known and number < len(known.leaders) else None
