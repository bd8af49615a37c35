"""Decides what the sender of one topic does next: which batches go where, and when to retry.

Pure: state and time are arguments, decisions are values; sockets, threads, locks and clocks belong
to the caller, which carries out a decision and reports the outcome as an event. `partition_queue`
has the rules for one partition; this module has those for the routes that partitions share:

- Partitions with the same leader share a stream and take turns on it, one batch at a time.
- A Flight stream has one schema. A batch that needs more columns ends the stream, and the next
  stream has all columns that any batch has needed so far.
- A partition changes its route only while none of its batches is in flight.
- After a stream has been refused, batches are sent one at a time until one is acked: any of those
  that were in flight may be the cause.
- Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

import pyarrow as pa

from sparklog import errors
from sparklog.client.producer.batch import PartitionBatch
from sparklog.client.producer.partition_queue import Failed, PartitionQueue
from sparklog.formats import flight_messages

STREAM_IDLE_SECONDS = 30.0

NEVER: Final = float("inf")
_GIVE_UP_CHECK_SECONDS: Final = 0.1
_MAX_WRITE_BATCHES: Final = 32

S = TypeVar("S", bound="StreamState")


class Backoff(Protocol):
    """Growing waits between attempts."""

    def next_seconds(self, error: errors.SparklogError) -> float: ...

    def reset(self) -> None: ...


class StreamState:
    """The state of an open stream that determines what may be written to it."""

    __slots__ = ("awaiting", "columns", "is_ending")

    def __init__(self, columns: frozenset[str]) -> None:
        self.columns = columns
        self.awaiting: deque[tuple[SendingPartition, PartitionBatch]] = deque()
        """Batches that have been sent but not answered; answers arrive in this order."""
        self.is_ending = False
        """True once no more batches are written."""

    def fits(self, part: PartitionBatch) -> bool:
        return self.columns.issuperset(part.payload.schema.names)


class SendingPartition:
    """A partition's queue, and its current route."""

    __slots__ = ("backoff", "is_ready", "queue", "retry_at", "route")

    def __init__(self, queue: PartitionQueue, route: Route[Any], backoff: Backoff) -> None:
        self.queue = queue
        self.route = route
        self.backoff = backoff
        self.retry_at = 0.0
        """Nothing is sent before this time; 0: no wait."""
        self.is_ready = False
        """True while it is in its route's `ready`."""

    @property
    def can_send(self) -> bool:
        has_work = self.queue.sendable is not None or self.queue.wants_identity
        return has_work and self.retry_at == 0.0


class Route(Generic[S]):
    """The stream to one broker, and the partitions that take turns on it."""

    __slots__ = ("backoff", "broker", "is_one_at_a_time", "ready", "retry_at", "stream")

    def __init__(self, broker: int, backoff: Backoff) -> None:
        self.broker = broker
        self.backoff = backoff
        self.retry_at = 0.0
        """The route is not used before this time."""
        self.stream: S | None = None
        self.ready: deque[SendingPartition] = deque()
        """Partitions that may have something to send, in turn."""
        self.is_one_at_a_time = False

    def can_write(self) -> bool:
        """Returns whether the first ready partition may send, regardless of `retry_at`."""
        while self.ready and not self.ready[0].can_send:
            self.ready.popleft().is_ready = False
        stream = self.stream
        if not self.ready or stream is None:
            return bool(self.ready)
        return not (stream.is_ending or (self.is_one_at_a_time and stream.awaiting))


# ------------------------------------------------------------------------------ decisions


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait for an event, at most until this time."""

    until: float


@dataclass(frozen=True, slots=True)
class Work:
    """Do a round: seal and refresh if set, run callbacks, split, retry and write."""

    seals: bool = False
    """True if the open batch has lingered long enough."""
    refreshes: bool = False
    """True if the topic's metadata is too old, or was wrong."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread."""


@dataclass(frozen=True, slots=True)
class GetProducerId:
    """Request a producer id for the partition, which cannot send without one."""

    partition: SendingPartition


@dataclass(frozen=True, slots=True)
class OpenStream(Generic[S]):
    """Open the route's stream with these columns."""

    route: Route[S]
    columns: frozenset[str]


@dataclass(frozen=True, slots=True)
class Write(Generic[S]):
    """Write these batches, which are in flight from now on."""

    stream: S
    batches: list[tuple[PartitionBatch, pa.RecordBatch]]
    """With their payloads, because a batch that is given up loses its own."""
    is_pipelined: bool
    """True if several batches are in flight on the stream."""


@dataclass(frozen=True, slots=True)
class EndStream(Generic[S]):
    """End the stream after its last answer: the next batch needs more columns."""

    stream: S


Step = Sleep | Work | Stop
WriteStep = GetProducerId | OpenStream[S] | Write[S] | EndStream[S]
Decided = tuple[PartitionBatch, errors.SparklogError | None]
"""A batch and its failure; None: it was acked."""


@dataclass(frozen=True, slots=True)
class GivenUp(Generic[S]):
    """Batches that failed, and streams to be closed without waiting for their answers."""

    failed: list[Failed]
    abandoned: list[S]


def is_final(error: errors.SparklogError) -> bool:
    """Returns whether searching for a broker again cannot help; a wrong port may be right later."""
    return isinstance(error, errors.Invalid) and not isinstance(error, errors.WrongPort)


# ------------------------------------------------------------------------------ the schedule


class SendSchedule(Generic[S]):
    """The partitions and routes of one topic.

    Args:
        topic: for messages.
        new_backoff: returns the waits for one partition or route.
    """

    def __init__(self, topic: str, new_backoff: Callable[[], Backoff]) -> None:
        self._topic = topic
        self._new_backoff = new_backoff
        self._leaders: Sequence[int] = ()
        self._partitions: dict[int, SendingPartition] = {}
        self._routes: dict[int, Route[S]] = {}
        self._delayed: list[SendingPartition] = []
        self._columns: frozenset[str] = frozenset({"value"})
        self._give_up_check_at = 0.0
        self.retries = 0
        """Batches that were resent."""
        self.refresh_at = 0.0
        """When metadata is fetched again."""
        self.topic_error: errors.SparklogError | None = None
        """Set if the topic did not exist when it was last used."""

    @property
    def routes(self) -> list[Route[S]]:
        return list(self._routes.values())

    @property
    def in_flight(self) -> int:
        """Batches that have been sent but not answered."""
        return sum(len(each.queue.in_flight) for each in self._partitions.values())

    @property
    def has_ready(self) -> bool:
        return any(route.ready for route in self._routes.values())

    @property
    def has_stream(self) -> bool:
        streams = [route.stream for route in self._routes.values()]
        return any(stream is not None and not stream.is_ending for stream in streams)

    # -------------------------------------------------------------------------- the thread

    def next_step(
        self,
        now: float,
        *,
        is_signalled: bool,
        is_ending: bool,
        has_undecided: bool,
        open_due: float,
        idle_since: float,
    ) -> Step:
        """Returns what the sender thread does next.

        Args:
            now: the time.
            is_signalled: something has happened since the last round.
            is_ending: the thread should end as soon as every batch is complete and its callbacks
                have run.
            has_undecided: some batch is not complete, or its callbacks have not run.
            open_due: when the open batch is sent even if not full; `NEVER`: there is none.
            idle_since: when the last round ended.
        """
        if not (is_signalled or has_undecided):
            idle_at = idle_since + STREAM_IDLE_SECONDS
            return Stop() if is_ending or idle_at <= now else Sleep(idle_at)
        if not is_signalled:
            wake_at = self._wake_at(open_due)
            if wake_at > now:
                return Sleep(wake_at)
        elif is_ending and not has_undecided:
            return Stop()
        return Work(seals=open_due <= now, refreshes=self.refresh_at <= now)

    def _wake_at(self, open_due: float) -> float:
        times = [self._give_up_check_at, open_due]
        times += [partition.retry_at for partition in self._delayed]
        times += [route.retry_at for route in self._routes.values() if route.can_write()]
        return min(times)

    def next_write(self, route: Route[S], now: float) -> WriteStep[S] | None:
        """Returns the next step on `route`; None: nothing until another event or `retry_at`.

        Requesting a producer id and opening a stream take time, so callers that must not wait leave
        these two to the sender thread; both stay due.
        """
        if route.retry_at > now or not route.can_write():
            return None
        if route.ready[0].queue.wants_identity:
            return GetProducerId(route.ready[0])
        stream = route.stream
        if stream is None:
            return OpenStream(route, self._columns)
        batches = self._take(route, stream)
        if batches:
            return Write(stream, batches, len(stream.awaiting) > 1)
        stream.is_ending = True
        return EndStream(stream)

    def _take(self, route: Route[S], stream: S) -> list[tuple[PartitionBatch, pa.RecordBatch]]:
        taken: list[tuple[PartitionBatch, pa.RecordBatch]] = []
        while len(taken) < _MAX_WRITE_BATCHES and route.can_write():
            partition = route.ready[0]
            part = partition.queue.sendable
            if part is None or not stream.fits(part):
                break
            partition.queue.send()
            self.retries += part.is_resent
            part.is_resent = True
            stream.awaiting.append((partition, part))
            route.ready.rotate(-1)
            taken.append((part, part.payload))
        return taken

    # -------------------------------------------------------------------------- events

    def add(self, part: PartitionBatch) -> None:
        """Queues a batch."""
        self._columns |= frozenset(part.payload.schema.names)
        partition = self._partition(part.partition)
        partition.queue.add(part)
        self._queue(partition)

    def set_leaders(self, leaders: Sequence[int], *, refresh_at: float) -> None:
        """Applies new metadata: the leader of each partition, -1 if it has none."""
        self._leaders = leaders
        self.refresh_at = refresh_at
        self.topic_error = None
        waiting: list[SendingPartition] = []
        for route in self._routes.values():
            waiting += route.ready
            route.ready.clear()
        # A new leader adds a route, so this comes after the loop over the routes.
        for partition in waiting:
            partition.is_ready = False
            self._queue(partition)

    def producer_id_granted(
        self, partition: SendingPartition, identity: flight_messages.ProducerIdentity
    ) -> None:
        if partition.queue.wants_identity:
            partition.queue.renew(identity)

    def producer_id_failed(
        self, partition: SendingPartition, error: errors.SparklogError, now: float
    ) -> None:
        self._delay(partition, error, now)

    def stream_opened(self, route: Route[S], stream: S) -> None:
        route.stream = stream

    def route_failed(
        self,
        route: Route[S],
        error: errors.SparklogError,
        now: float,
        *,
        may_have_moved: bool = False,
    ) -> None:
        """Delays the next use of `route`.

        `may_have_moved`: its partitions may have new leaders, so the metadata is fetched first.
        """
        route.retry_at = now + route.backoff.next_seconds(error)
        if may_have_moved:
            self.refresh_at = min(self.refresh_at, route.retry_at)

    def answered(
        self, route: Route[S], stream: S, error: errors.SparklogError | None, now: float
    ) -> list[Decided]:
        """Handles the next answer on `stream`; no `error`: an ack. Returns a completed batch."""
        if route.stream is not stream:
            return []
        partition, part = stream.awaiting.popleft()
        decided: list[Decided] = []
        if error is not None:
            decided += self._refused(partition, part, error, now)
        else:
            if partition.queue.acked(part):
                decided.append((part, None))
            partition.backoff.reset()
            route.backoff.reset()
            route.is_one_at_a_time = False
        self._queue(partition)
        return decided

    def stream_ended(
        self, route: Route[S], stream: S, error: errors.SparklogError | None, now: float
    ) -> list[Decided]:
        """Records that `stream` closed, and the reason. Returns the batches that this completes."""
        if route.stream is not stream:
            return []
        route.stream = None
        awaiting = list(stream.awaiting)
        stream.awaiting.clear()
        if error is None:
            return []
        decided: list[Decided] = []
        rejects = isinstance(error, errors.Invalid | errors.Corrupt)
        if rejects and len(awaiting) == 1:
            decided += self._refused(*awaiting[0], error, now)
        else:
            # With several, some may have been appended before the one that ended the stream.
            for partition, _ in awaiting:
                partition.queue.lose_answers()
            route.is_one_at_a_time = rejects
        for partition, _ in awaiting:
            self._queue(partition)
        return decided

    def retry_due(self, now: float) -> None:
        """Lets partitions send again once their wait is over."""
        due = [partition for partition in self._delayed if partition.retry_at <= now]
        if due:
            self._delayed = [each for each in self._delayed if each.retry_at > now]
            for partition in due:
                partition.retry_at = 0.0
                self._queue(partition)

    # -------------------------------------------------------------------------- giving up

    def is_give_up_check_due(self, now: float) -> bool:
        """Returns whether to check for expired batches; if so, schedules the next check."""
        if now < self._give_up_check_at:
            return False
        self._give_up_check_at = now + _GIVE_UP_CHECK_SECONDS
        return True

    def give_up(self, now: float, reason: errors.SparklogError) -> GivenUp[S]:
        """Fails the batches whose deadline has passed; with `NEVER`, all of them."""
        failed: list[Failed] = []
        abandoned: list[S] = []
        for partition in self._partitions.values():
            was_in_flight = set(partition.queue.in_flight)
            given_up = partition.queue.give_up(now, reason)
            if any(part in was_in_flight for part, _ in given_up):
                abandoned += self._abandon(partition.route)
            failed += given_up
            self._queue(partition)
        return GivenUp(failed, abandoned)

    def clear(self) -> list[S]:
        """Forgets all batches. Returns the streams, which have to be closed."""
        self._partitions.clear()
        self._delayed.clear()
        streams: list[S] = []
        for route in self._routes.values():
            streams += _streams([route])
            route.stream = None
            route.ready.clear()
        return streams

    def end_idle_streams(self) -> list[S]:
        """Returns the streams, to which nothing more is written."""
        streams = _streams(self._routes.values())
        for stream in streams:
            stream.is_ending = True
        return streams

    def _abandon(self, route: Route[S]) -> list[S]:
        """Abandons a stream that does not answer; the other batches on it are resent."""
        stream, route.stream = route.stream, None
        if stream is None:
            return []
        # In the order of sending: the order of turns on the routes must not depend on chance.
        lost = list(dict.fromkeys(partition for partition, _ in stream.awaiting))
        stream.awaiting.clear()
        for partition in lost:
            partition.queue.lose_answers()
            self._queue(partition)
        return [stream]

    # -------------------------------------------------------------------------- partitions

    def _partition(self, number: int) -> SendingPartition:
        partition = self._partitions.get(number)
        if partition is None:
            queue = PartitionQueue(self._topic, number)
            partition = SendingPartition(queue, self._route_to(number), self._new_backoff())
            self._partitions[number] = partition
        return partition

    def _route_to(self, number: int) -> Route[S]:
        broker = self._leaders[number] if number < len(self._leaders) else -1
        route = self._routes.get(broker)
        if route is None:
            route = self._routes[broker] = Route(broker, self._new_backoff())
        return route

    def _queue(self, partition: SendingPartition) -> None:
        """Queues a partition for its turn on its route, if it has something to send."""
        if partition.is_ready or not partition.can_send:
            return
        if not partition.queue.in_flight:
            partition.route = self._route_to(partition.queue.partition)
        partition.is_ready = True
        partition.route.ready.append(partition)

    def _delay(self, partition: SendingPartition, error: errors.SparklogError, now: float) -> None:
        if partition.retry_at == 0.0:
            partition.retry_at = now + partition.backoff.next_seconds(error)
            self._delayed.append(partition)

    def _refused(
        self,
        partition: SendingPartition,
        part: PartitionBatch,
        error: errors.SparklogError,
        now: float,
    ) -> list[Decided]:
        failure = partition.queue.refused(part, error)
        if failure is None and not part.done:
            self._delay(partition, error, now)
        if isinstance(error, errors.UnknownTopic | errors.TopicChanged):
            self.topic_error = error
        elif isinstance(error, errors.NotLeader | errors.UnknownPartition):
            self.refresh_at = 0.0
        return [] if failure is None else [(part, failure)]


def _streams(routes: Iterable[Route[S]]) -> list[S]:
    return [route.stream for route in routes if route.stream is not None]
