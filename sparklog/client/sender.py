"""What carries one topic's batches to the brokers: one thread that writes, one a stream that reads.

Callers fill the open batch under `lock` and do not wait for the network. The sender thread seals
what is due, splits it, and writes what the lanes let go; a stream's reading thread takes in the
answers. Who waits for the only record there is writes it himself, which spares waking a thread. A
thread of its own for each topic, because a write may block while a broker does not read, and the
other topics must not wait for that. Both threads are daemons, and end when the topic has been idle
for a while.

`lock` guards everything here but the streams' writers, and is never held over a call to the network
or to a user's function. The lanes decide what is sent and what a refusal means (`client.lane`).
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from sparklog import errors, limits, wire
from sparklog.client.batch import Batch, Callback, Part, RecordFuture
from sparklog.client.connection import (
    Channel,
    Connection,
    failure_of,
    is_of_the_broker,
)
from sparklog.client.lane import Lane
from sparklog.client.routes import Route, SendingPartition, Stream
from sparklog.client.shared import BufferPool, Identities
from sparklog.partitioner import spread

_log = logging.getLogger(__name__)

_NEVER: Final = float("inf")
_GIVE_UP_CHECK_SECONDS: Final = 0.1
_RUN_PARTS: Final = 32
_EASY_BYTES: Final = 16 * limits.KIB
_ASIDE_SECONDS: Final = 5.0
"""How long the sender thread lets itself be kept by a question beside the batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendingOptions:
    linger_seconds: float
    max_block_seconds: float
    delivery_timeout_seconds: float


class TopicSender:
    """Sends the batches of one topic, in order in each partition."""

    def __init__(
        self,
        info: wire.TopicInfo,
        *,
        connection: Connection,
        identities: Identities,
        pool: BufferPool,
        options: SendingOptions,
    ) -> None:
        self.topic = info.topic
        self.lock = threading.Lock()
        self.open: Batch | None = None
        """What callers fill."""
        self.is_eager = options.linger_seconds == 0
        """Whoever sends a record is to call `send_at_once`."""
        self._connection = connection
        self._identities = identities
        self._pool = pool
        self._options = options

        self._take_in(info)
        self._gone: errors.SparklogError | None = None
        """The topic was not there when it was last used."""
        self._closed: errors.SparklogError | None = None

        self._changed = threading.Condition(self.lock)
        self._thread: threading.Thread | None = None
        self._threads: list[threading.Thread] = []
        """Those of sending and reading that may still run, also past the last line of ours."""
        self._thread_id = -1
        self._signalled = False
        self._ending = False
        self._sending = threading.Lock()
        """Taken before `lock` by whoever splits and writes: the sender thread, or a caller."""

        self._unfinished: dict[Batch, None] = {}
        """All batches not yet decided and called back, in order; a dict serves as ordered set."""
        self._sealed: list[Batch] = []
        self._calls: list[tuple[Batch, list[Callback]]] = []
        self._batch_number = random.randrange(2**20)
        self._columns: frozenset[str] = frozenset({"value"})
        self._partitions: dict[int, SendingPartition] = {}
        self._routes: dict[int, Route] = {}
        self._held: list[SendingPartition] = []
        """Wait for a moment before they try again."""
        self._abandoned: list[Stream] = []
        """Left without their answers; to be ended by the sender thread."""
        self._next_give_up_check = 0.0

    # -------------------------------------------------------------------------- for callers

    @property
    def partition_count(self) -> int:
        return len(self._info.partitions)

    def check_partition(self, partition: int) -> None:
        """Raises `UnknownPartition`, after a look whether it was just added."""
        if partition >= self.partition_count:
            self._look(self._options.max_block_seconds)
        if not 0 <= partition < self.partition_count:
            raise errors.UnknownPartition(
                topic=self.topic, partition=partition, last=self.partition_count - 1
            )

    def open_batch(self) -> Batch:
        """The open batch, made where there is none. `lock` is held, but not while it waits.

        Raises `TimedOut` if the buffer stays full for as long as a caller may be blocked, and
        `UnknownTopic` once the topic is gone.
        """
        if self.open is None:
            self._admit()
        if self.open is None:
            leaves_to_caller = self.is_eager and not self._unfinished
            self.open = self._new_batch()
            if not leaves_to_caller:
                # The thread may sleep past the time when this batch is due.
                self._changed.notify()
        return self.open

    def send_at_once(self, batch: Batch) -> None:
        """Sends `batch` without lingering if nothing else is on its way; else the thread does."""
        with self.lock:
            if batch is not self.open or len(self._unfinished) > 1:
                return
            mine = self._is_easy(batch)
            self.seal(signal=not mine)
        if mine:
            self._send_myself()

    def seal(self, *, signal: bool = True) -> None:
        """Sends the open batch without waiting for more. `lock` is held."""
        if self.open is not None:
            batch, self.open = self.open, None
            self._hand_over(batch, signal=signal)

    def add_table(self, payload: pa.RecordBatch, partitions: Any) -> Batch:
        """Sends rows, after all that was sent before. Waits and raises as `open_batch` does.

        Args:
            payload: conforms to `PAYLOAD_SCHEMA`.
            partitions: None, or numpy int32: the partition of each row, -1 for "by the key".
        """
        with self.lock:
            self._admit()
            self.seal()
            batch = self._new_batch()
            batch.table = payload
            batch.table_partitions = partitions
            batch.bytes = payload.nbytes
            self._hand_over(batch)
        return batch

    def await_batch(
        self, batch: Batch, is_done: Callable[[], bool], deadline: float | None
    ) -> bool:
        """Sends `batch` now; False if `deadline` (monotonic seconds) passed before it was done.

        Raises `BadRequest` on the thread that would have to do it.
        """
        if threading.get_ident() == self._thread_id:
            raise errors.BadRequest(
                reason="a delivery callback cannot wait for records of its topic: it runs on the"
                " thread that delivers them"
            )
        while True:
            bell = threading.Lock()
            bell.acquire()
            with self.lock:
                if is_done():
                    return True
                mine = self._is_easy(batch)
                if batch is self.open:
                    self.seal(signal=not mine)
                batch.waiters.append(bell)
            if mine:
                self._send_myself()
            left_seconds = -1.0 if deadline is None else max(deadline - time.monotonic(), 0.0)
            if not bell.acquire(timeout=left_seconds):
                return is_done()

    def expedite(self, batch: Batch) -> None:
        with self.lock:
            if batch is self.open:
                self.seal()

    def flush(self, deadline: float | None) -> bool:
        """Whether all that was sent before is decided, and called back, by `deadline`."""
        with self.lock:
            batches = list(self._unfinished)
        return all(self.await_batch(each, each.is_finished, deadline) for each in batches)

    @property
    def undecided_rows(self) -> int:
        """Without the lock, so only roughly right while others send."""
        return sum(batch.count or len(batch.values) for batch in list(self._unfinished))

    def end(self) -> None:
        """The threads end after what is there. Takes no lock: a finalizer may call it anywhere."""
        self._ending = True
        if self.lock.acquire(blocking=False):
            try:
                self._signal()
            finally:
                self.lock.release()

    def close(self) -> None:
        """Gives up what is undecided, and ends the threads."""
        closed = errors.BadRequest(reason="the producer is closed")
        with self.lock:
            self._closed = closed
            self.seal(signal=False)
            self._give_up(_NEVER, closed)
            self._ending = True
            self._signal()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(limits.KEEPALIVE_SECONDS + limits.KEEPALIVE_TIMEOUT_SECONDS)
        # An interpreter that ends while one of them is inside Arrow or gRPC would abort. They are
        # there until their very end, where the last reference to a stream goes.
        deadline = time.monotonic() + limits.KEEPALIVE_TIMEOUT_SECONDS
        with self.lock:
            threads = list(self._threads)
        for each in threads:
            if each is not threading.current_thread():
                each.join(max(deadline - time.monotonic(), 0.0))

    def after_fork(self) -> None:
        """In a child: it has no such threads, and its parent sends all that is here."""
        self.lock = threading.Lock()
        for batch in list(self._unfinished):
            unknown = errors.OutcomeUnknown(what="a record", reason="it is for the parent to send")
            batch.fail_unsplit(unknown)
        self._unfinished.clear()

    # -------------------------------------------------------------------------- filling

    def _admit(self) -> None:
        """Waits until there may be one more batch. `lock` is held, but not while it waits."""
        deadline = time.monotonic() + self._options.max_block_seconds
        while self._closed or self._gone or self._pool.is_full:
            if self._closed is not None:
                raise self._closed
            if self._gone is not None:
                self._unlocked(lambda: self._look(self._options.max_block_seconds))
            elif threading.get_ident() == self._thread_id:
                # A callback that sends must not wait for what its own thread has to do.
                return
            else:
                self._unlocked(lambda: self._wait_for_room(deadline))

    def _new_batch(self) -> Batch:
        now = time.monotonic()
        batch = Batch(
            self,
            due=now + self._options.linger_seconds,
            deadline=now + self._options.delivery_timeout_seconds,
        )
        self._unfinished[batch] = None
        if self._thread is None:
            name = f"sparklog-send-{self.topic}"
            self._thread = self._start(name, self._run)
        return batch

    def _start(
        self, name: str, target: Callable[..., None], *arguments: object
    ) -> threading.Thread:
        """Starts a thread that `close` waits for. `lock` is held."""
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        return thread

    def _hand_over(self, batch: Batch, *, signal: bool = True) -> None:
        batch.seal()
        self._pool.take(batch.cost_bytes)
        self._sealed.append(batch)
        if signal:
            self._signal()

    def _unlocked(self, wait: Callable[[], None]) -> None:
        self.lock.release()
        try:
            wait()
        finally:
            self.lock.acquire()

    def _wait_for_room(self, deadline: float) -> None:
        if not self._pool.wait_for_room(max(deadline - time.monotonic(), 0.0)):
            raise errors.TimedOut(
                what=f"making room in the producer's buffer of {self._pool.limit_bytes} bytes",
                timeout_seconds=self._options.max_block_seconds,
            )

    # -------------------------------------------------------------------------- metadata

    def _look(self, timeout_seconds: float) -> None:
        """Learns anew how many partitions there are, and who leads them."""
        request = wire.TopicName(topic=self.topic)
        info: wire.TopicInfo = self._connection.action(
            "topics.describe", request, timeout_seconds=timeout_seconds
        )
        self._connection.learn_leaders(info)
        self._take_in(info)
        self._gone = None

    def _take_in(self, info: wire.TopicInfo) -> None:
        self._info = info
        self._fresh_until = time.monotonic() + limits.METADATA_AGE_SECONDS
        self.max_record_bytes = info.max_record_bytes
        """Of key, value and headers together."""

    def _refresh(self) -> None:
        try:
            self._look(_ASIDE_SECONDS)
        except errors.SparklogError as error:
            # What is known serves on; a broker that refuses what it leads to says so.
            _log.warning("cannot look at topic %s: %s", self.topic, error)
            self._fresh_until = time.monotonic() + _ASIDE_SECONDS
            return
        with self.lock:
            waiting: list[SendingPartition] = []
            for route in self._routes.values():
                waiting += route.line
                route.line.clear()
            # Only now: a leader that is new makes a route of its own.
            for partition in waiting:
                partition.in_line = False
                self._line_up(partition)

    # -------------------------------------------------------------------------- the thread

    def _signal(self) -> None:
        self._signalled = True
        self._changed.notify()

    def _run(self) -> None:
        self._thread_id = threading.get_ident()
        try:
            while self._step():
                pass
            self._retire_streams()
            self._retire_abandoned()
        except Exception as error:
            # A fault of ours must not leave anybody waiting.
            _log.exception("the sender of topic %s failed", self.topic)
            self._fail(errors.SparklogError(reason=f"the producer failed: {error!r}"))

    def _fail(self, reason: errors.SparklogError) -> None:
        """Decides all that there is. The lanes are not asked: they may be what failed."""
        with self.lock:
            self._closed = reason
            self.seal(signal=False)
            self._sealed.clear()
            self._partitions.clear()
            for route in self._routes.values():
                self._leave_stream(route)
            for batch in list(self._unfinished):
                self._fail_batch(batch, reason)
        self._run_calls()
        self._retire_abandoned()
        with self.lock:
            self._thread, self._thread_id = None, -1

    def _fail_batch(self, batch: Batch, reason: errors.SparklogError) -> None:
        if batch.parts is None:
            self._fail_unsplit(batch, reason)
            return
        for part in [each for each in batch.parts.values() if not each.done]:
            failure = reason
            if part.sequence >= 0:  # it was sent
                what = f"{part.count} records to {self.topic}-{part.partition}"
                failure = errors.OutcomeUnknown(what=what, reason=str(reason))
            part.fail(failure)
            self._decided(part)

    def _retire_streams(self) -> None:
        with self.lock:
            # Another thread may have begun already, for batches that came just now.
            idle = [] if self._thread else [route.stream for route in self._routes.values()]
            streams = [stream for stream in idle if stream is not None]
            for stream in streams:
                stream.retiring = True
        for stream in streams:
            stream.retire()

    def _retire_abandoned(self) -> None:
        with self.lock:
            streams, self._abandoned = self._abandoned, []
        for stream in streams:
            stream.retire()

    def _step(self) -> bool:
        """One round; False: the thread ends."""
        with self.lock:
            if not self._sleep():
                self._thread, self._thread_id = None, -1
                return False
            if self.open is not None and self.open.due <= time.monotonic():
                self.seal()
        self._run_calls()
        if time.monotonic() >= self._fresh_until:
            self._refresh()
        with self._sending:
            self._split_sealed()
            with self.lock:
                self._attend_to_time()
            for route in list(self._routes.values()):
                self._write_all(route)
        self._retire_abandoned()
        return True

    def _sleep(self) -> bool:
        """Until there is something to do; False: it is time to end. `lock` is held."""
        idle_at = time.monotonic() + limits.STREAM_IDLE_SECONDS
        while not self._signalled:
            now = time.monotonic()
            wake_at = self._wake_at() if self._unfinished else idle_at
            if wake_at <= now:
                break
            self._changed.wait(wake_at - now)
        is_idle = not self._signalled and not self._unfinished
        self._signalled = False
        return bool(self._unfinished) or not (is_idle or self._ending)

    def _wake_at(self) -> float:
        times = [self._next_give_up_check]
        if self.open is not None:
            times.append(self.open.due)
        times += [partition.retry_at for partition in self._held]
        times += [route.retry_at for route in self._routes.values() if route.may_write]
        return min(times)

    def _run_calls(self) -> None:
        with self.lock:
            calls, self._calls = self._calls, []
        for batch, callbacks in calls:
            self._call_back(batch, callbacks)

    def _call_back(self, batch: Batch, callbacks: list[Callback]) -> None:
        for row, callback in callbacks:
            try:
                callback(RecordFuture(batch, row))
            except BaseException:
                # Even one that exits must not end the thread that all wait for.
                _log.exception("a delivery callback of topic %s failed", self.topic)
        with self.lock:
            batch.open_calls -= 1
            self._finish(batch)

    def _attend_to_time(self) -> None:
        """Gives up what is late, and lets those try again who have waited. `lock` is held."""
        now = time.monotonic()
        if now >= self._next_give_up_check:
            self._next_give_up_check = now + _GIVE_UP_CHECK_SECONDS
            seconds = self._options.delivery_timeout_seconds
            late = errors.TimedOut(what=f"delivery to topic {self.topic}", timeout_seconds=seconds)
            self._give_up(now, late)
        due = [partition for partition in self._held if partition.retry_at <= now]
        self._held = [partition for partition in self._held if partition.retry_at > now]
        for partition in due:
            partition.retry_at = 0.0
            self._line_up(partition)

    # -------------------------------------------------------------------------- lining up

    def _split_sealed(self) -> None:
        with self.lock:
            batches, self._sealed = self._sealed, []
        for batch in batches:
            self._split(batch)

    def _split(self, batch: Batch) -> None:
        self._batch_number += 1
        count = self.partition_count
        failure: errors.SparklogError | None = None
        try:
            split = batch.split(count, spread(self._batch_number, count))
        except (pa.ArrowException, ValueError) as error:
            failure = errors.WrongSchema(reason=f"the records do not become columns: {error}")
        with self.lock:
            if batch.is_done():
                return
            if failure is not None:
                self._fail_unsplit(batch, failure)
                return
            for part in batch.adopt(split):
                self._columns |= frozenset(part.payload.schema.names)
                partition = self._partition(part.partition)
                partition.lane.add(part)
                self._line_up(partition)

    def _partition(self, number: int) -> SendingPartition:
        partition = self._partitions.get(number)
        if partition is None:
            lane = Lane(self.topic, number)
            partition = SendingPartition(lane, self._route_to(number), self._connection.backoff())
            self._partitions[number] = partition
        return partition

    def _route_to(self, number: int) -> Route:
        known = number < self.partition_count
        broker = self._info.partitions[number].leader if known else -1
        route = self._routes.get(broker)
        if route is None:
            route = self._routes[broker] = Route(broker, self._connection.backoff())
        return route

    def _line_up(self, partition: SendingPartition) -> None:
        """Lets its route send for it, if it has something to send. `lock` is held."""
        if partition.in_line or not partition.may_send:
            return
        if not partition.lane.in_flight:
            partition.route = self._route_to(partition.lane.partition)
        partition.in_line = True
        partition.route.line.append(partition)
        self._signal()

    def _hold(self, partition: SendingPartition) -> None:
        if partition.retry_at == 0.0:
            partition.retry_at = time.monotonic() + partition.backoff.next_seconds()
            self._held.append(partition)

    # -------------------------------------------------------------------------- writing

    def _write_all(self, route: Route, *, prepares: bool = True) -> None:
        """Writes all that may be sent on `route` now.

        Only the sender thread prepares: asks for identities and opens streams, which takes time.
        """
        while True:
            with self.lock:
                if route.retry_at > time.monotonic() or not route.may_write:
                    return
                partition, stream = route.line[0], route.stream
                wants_identity = partition.lane.wants_identity
            if not prepares and (wants_identity or stream is None):
                return
            if wants_identity:
                self._identify(partition)
            elif stream is None:
                self._open_stream(route)
            else:
                self._write_run(route, stream)

    def _identify(self, partition: SendingPartition) -> None:
        lane = partition.lane
        failure: errors.SparklogError | None = None
        try:
            ask = self._identities.shared if lane.identity is None else self._identities.fresh
            identity = ask(timeout_seconds=_ASIDE_SECONDS)
        except errors.SparklogError as error:
            failure = error
        with self.lock:
            if failure is None:
                if lane.wants_identity:
                    lane.renew(identity)
            elif _is_final(failure):
                self._give_up(_NEVER, failure)
            else:
                _log.warning("no identity for a producer to %s: %s", self.topic, failure)
                self._hold(partition)

    def _open_stream(self, route: Route) -> None:
        try:
            channel = self._connection.channel(route.broker)
        except errors.SparklogError as error:
            self._lost_way(route, None, error)
            return
        try:
            stream = Stream(channel, self.topic, self._columns)
        except (pa.ArrowException, OSError) as error:
            self._lost_way(route, channel, failure_of(error, channel.address))
            return
        with self.lock:
            route.stream = stream
            self._start(f"sparklog-acks-{self.topic}", self._read_answers, route, stream)

    def _write_run(self, route: Route, stream: Stream) -> None:
        """Writes the next parts in one go.

        Where the next part has other columns, the stream is ended instead, for a wider one.
        """
        try:
            run = self._take_run(route, stream)
            pipelined = len(stream.awaiting) > 1
            for part, payload in run:
                stream.write(part, payload, pipelined=pipelined)
        except (pa.ArrowException, OSError) as error:
            _log.debug("a stream to %s broke: %s", stream.channel.address, error)
        except BaseException:
            # Somebody interrupted a caller who writes himself.
            stream.retire()
            raise
        else:
            if run or not self._needs_wider(route, stream):
                return
        # The reading thread sees the stream end, and learns what was not answered.
        stream.retire()

    def _needs_wider(self, route: Route, stream: Stream) -> bool:
        with self.lock:
            return route.stream is stream and route.may_write and not route.may_write_here

    def _take_run(self, route: Route, stream: Stream) -> list[tuple[Part, pa.RecordBatch]]:
        """The next parts that go onto `stream`, now in flight."""
        run: list[tuple[Part, pa.RecordBatch]] = []
        with self.lock:
            while len(run) < _RUN_PARTS and route.stream is stream and route.may_write_here:
                partition = route.line[0]
                part = partition.lane.send()
                stream.awaiting.append((partition, part))
                route.line.rotate(-1)
                # A part that is given up meanwhile lets its payload go.
                run.append((part, part.payload))
        return run

    # -------------------------------------------------------------------------- callers who wait

    def _is_easy(self, batch: Batch) -> bool:
        """Whether who waits for `batch` may as well write it, and spare waking a thread for that.

        It must surely not block: nothing else is on its way, and it fits where gRPC puts what the
        peer has not taken yet.
        """
        alone = batch is self.open and len(self._unfinished) == 1
        if not alone or batch.bytes > _EASY_BYTES:
            return False
        streams = [route.stream for route in self._routes.values()]
        return any(stream is not None and not stream.retiring for stream in streams)

    def _send_myself(self) -> None:
        if self._sending.acquire(blocking=False):
            try:
                self._split_sealed()
                for route in list(self._routes.values()):
                    self._write_all(route, prepares=False)
            finally:
                self._sending.release()
        with self.lock:
            if self._sealed or any(route.line for route in self._routes.values()):
                self._signal()

    # -------------------------------------------------------------------------- answers

    def _read_answers(self, route: Route, stream: Stream) -> None:
        failure: errors.SparklogError | None = None
        try:
            while (reply := stream.read()) is not None:
                self._answered(route, stream, reply)
        except (pa.ArrowException, OSError, errors.SparklogError) as error:
            failure = failure_of(error, stream.channel.address)
        failure = stream.close() or failure
        with self.lock:
            self._signal()
            if route.stream is not stream:
                return
            route.stream = None
            if failure is None and stream.awaiting:
                failure = errors.BrokerUnavailable(
                    address=stream.channel.address, reason="it ended the stream early"
                )
            if failure is not None:
                self._lose_answers(route, stream, failure)
        if failure is not None:
            self._lost_way(route, stream.channel, failure)

    def _answered(self, route: Route, stream: Stream, reply: wire.AppendReply) -> None:
        broke = False
        with self.lock:
            if route.stream is not stream:
                return
            partition, part = stream.awaiting.popleft()
            if reply.error is None:
                if partition.lane.acked(part):
                    part.succeed(reply)
                    self._decided(part)
                partition.backoff.reset()
                route.backoff.reset()
                route.careful = False
            else:
                error = reply.error.exception()
                self._refused(partition, part, error)
                broke = is_of_the_broker(error)
            self._line_up(partition)
            if route.line:
                self._signal()
        if broke:
            self._connection.broke(stream.channel)
            stream.retire()

    def _refused(
        self, partition: SendingPartition, part: Part, error: errors.SparklogError
    ) -> None:
        failure = partition.lane.refused(part, error)
        if failure is not None:
            part.fail(failure)
            self._decided(part)
        elif not part.done:
            _log.info("%d records to %s go again: %s", part.count, self.topic, error)
            self._hold(partition)
        if isinstance(error, errors.UnknownTopic | errors.TopicChanged):
            self._gone = error
        elif isinstance(error, errors.NotLeader | errors.UnknownPartition):
            self._fresh_until = 0.0

    def _lose_answers(self, route: Route, stream: Stream, error: errors.SparklogError) -> None:
        """Decides what was sent on a stream that broke. `lock` is held."""
        awaiting = list(stream.awaiting)
        stream.awaiting.clear()
        rejects = isinstance(error, errors.Invalid | errors.Corrupt)
        if rejects and len(awaiting) == 1:
            self._refused(*awaiting[0], error)
        else:
            # Of several, some may have been appended before the one that ended the stream.
            for partition, _ in awaiting:
                partition.lane.broke()
            route.careful = rejects
        for partition, _ in awaiting:
            self._line_up(partition)

    def _lost_way(self, route: Route, channel: Channel | None, error: errors.SparklogError) -> None:
        """Waits before `route` is tried again; what cannot be tried again is given up."""
        if channel is not None and not isinstance(error, errors.Invalid | errors.Corrupt):
            self._connection.broke(channel)
        with self.lock:
            if channel is None and _is_final(error):
                self._give_up(_NEVER, error)
            else:
                _log.warning("the way to topic %s broke: %s", self.topic, error)
                route.retry_at = time.monotonic() + route.backoff.next_seconds()

    # -------------------------------------------------------------------------- decided

    def _give_up(self, now: float, reason: errors.SparklogError) -> None:
        """Ends what is due by `now` without an ack. `lock` is held."""
        for partition in self._partitions.values():
            was_in_flight = set(partition.lane.in_flight)
            for part, failure in partition.lane.give_up(now, reason):
                if part in was_in_flight:
                    self._abandon(partition.route)
                part.fail(failure)
                self._decided(part)
            self._line_up(partition)
        for batch in [each for each in self._unfinished if each.deadline <= now]:
            if batch is not self.open and batch.parts is None:
                self._fail_unsplit(batch, reason)
        self._sealed = [batch for batch in self._sealed if not batch.is_done()]

    def _fail_unsplit(self, batch: Batch, failure: errors.SparklogError) -> None:
        self._decided(batch.fail_unsplit(failure))

    def _abandon(self, route: Route) -> None:
        """Leaves a stream that does not answer, and those go again that wait for it."""
        stream = self._leave_stream(route)
        if stream is not None:
            lost = {partition for partition, _ in stream.awaiting}
            stream.awaiting.clear()
            for partition in lost:
                partition.lane.broke()
                self._line_up(partition)
            self._connection.broke(stream.channel)

    def _leave_stream(self, route: Route) -> Stream | None:
        """Its reading thread ends after the peer was told, which takes time and thus no lock."""
        stream, route.stream = route.stream, None
        if stream is not None:
            self._abandoned.append(stream)
            self._signal()
        return stream

    def _decided(self, part: Part) -> None:
        batch = part.batch
        batch.open_parts -= 1
        callbacks = batch.take_callbacks(part)
        if callbacks:
            batch.open_calls += 1
            self._calls.append((batch, callbacks))
            self._signal()
        if batch.open_parts == 0:
            self._pool.give_back(batch.cost_bytes)
        self._finish(batch)

    def _finish(self, batch: Batch) -> None:
        if batch.is_finished():
            self._unfinished.pop(batch, None)
            if self._ending:
                self._signal()
        waiters, batch.waiters = batch.waiters, []
        for bell in waiters:
            bell.release()


def _is_final(error: errors.SparklogError) -> bool:
    """Whether a way to a broker will never be found; a wrong port may be right tomorrow."""
    return isinstance(error, errors.Invalid) and not isinstance(error, errors.WrongPort)
