"""Carries the batches of one topic to the brokers: one thread writes, and one per stream reads.

Callers fill the open batch under `lock` and do not wait for the network. The sender thread seals
the batches that are due, splits them, and writes; the reading thread of a stream takes the answers.
A caller that waits for the only batch there is writes it itself, which spares waking a thread. Each
topic has a thread of its own, because a write may block while a broker does not read, and the other
topics must not wait for that. Both threads are daemons, and end when the topic has been idle for a
while.

The threads decide nothing: `schedule` returns the next step and takes events, `partition_queue`
says what a refusal means, `deliveries` accounts for the batches.

`lock` guards everything here but the streams' writers, and is never held over a call to the network
or to a user's function.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from sparklog import errors, limits
from sparklog.client.connection import (
    Channel,
    Connection,
    RetryLog,
    failure_of,
    is_of_the_broker,
)
from sparklog.client.producer.batch import Callback, ProducerBatch, RecordFuture
from sparklog.client.producer.buffer_pool import BufferPool, ProducerIds
from sparklog.client.producer.deliveries import Deliveries
from sparklog.client.producer.schedule import (
    NEVER,
    Decided,
    EndStream,
    GetProducerId,
    GivenUp,
    OpenStream,
    Route,
    SendingPartition,
    SendSchedule,
    Sleep,
    Stop,
    Work,
    Write,
    is_final,
)
from sparklog.client.producer.statistics import ProducerStatistics
from sparklog.client.producer.streams import ProducerStream
from sparklog.formats import flight_messages
from sparklog.formats.partitioner import spread

_log = logging.getLogger(__name__)
_REFUSALS: Final = (
    errors.QueueFull,
    errors.StorageFull,
    errors.StorageUnavailable,
    errors.TopicHeldBack,
)
"""Errors that may last until an operator acts."""

_DIRECT_WRITE_BYTES: Final = 16 * limits.KIB
_REQUEST_SECONDS: Final = 5.0
"""The longest that the sender thread waits for metadata or a producer id."""

_Route = Route[ProducerStream]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendingOptions:
    linger_seconds: float
    max_block_seconds: float
    delivery_timeout_seconds: float


class TopicSender:
    """Sends the batches of one topic, in order within each partition."""

    def __init__(
        self,
        info: flight_messages.TopicInfo,
        *,
        connection: Connection,
        producer_ids: ProducerIds,
        pool: BufferPool,
        options: SendingOptions,
    ) -> None:
        self.topic = info.topic
        self.lock = threading.Lock()
        self.clock = connection.clock
        self.open: ProducerBatch | None = None
        """The batch that callers fill."""
        self.is_eager = options.linger_seconds == 0
        """A caller that adds a record calls `send_at_once`."""
        self._connection = connection
        self._producer_ids = producer_ids
        self._pool = pool
        self._options = options
        self._now = connection.clock.monotonic
        self._schedule: SendSchedule[ProducerStream] = SendSchedule(info.topic, connection.backoff)
        self._deliveries = Deliveries(info.topic, pool)
        self._sealed: list[ProducerBatch] = []
        """Batches that are not split yet."""
        self._apply_metadata(info)
        self._refusal: errors.SparklogError | None = None
        """Raised by every call from now on."""

        self._changed = threading.Condition(self.lock)
        self._thread: threading.Thread | None = None
        self._threads: list[threading.Thread] = []
        """Every thread that may still run, even after its last line of this module."""
        self._thread_id = -1
        self._is_signalled = False
        self._is_ending = False
        self._sending = threading.Lock()
        """Taken before `lock` by a thread that splits and writes: the sender thread or a caller."""
        self._batch_number = random.randrange(2**20)
        self._retry_log = RetryLog(connection.clock)
        self._abandoned: list[ProducerStream] = []
        """Streams left without their answers; the sender thread ends them."""

    # -------------------------------------------------------------------------- for callers

    @property
    def partition_count(self) -> int:
        return len(self._info.partitions)

    def check_partition(self, partition: int) -> None:
        """Raises `UnknownPartition`, after it has looked for partitions that were just added."""
        if partition >= self.partition_count:
            self._fetch_metadata(self._options.max_block_seconds)
        if not 0 <= partition < self.partition_count:
            raise errors.UnknownPartition(
                topic=self.topic, partition=partition, last=self.partition_count - 1
            )

    def open_batch(self) -> ProducerBatch:
        """Returns the open batch, a new one if there is none. `lock` is held, except in waits.

        Raises `TimedOut` if the buffer stays full for as long as a caller may be blocked, and
        `UnknownTopic` once the topic is gone.
        """
        if self.open is None:
            self._wait_for_buffer()
        if self.open is None:
            leaves_to_caller = self.is_eager and not self._deliveries
            self.open = self._new_batch()
            if not leaves_to_caller:
                # The thread may sleep past the time when this batch is due.
                self._changed.notify()
        return self.open

    def send_at_once(self, batch: ProducerBatch) -> None:
        """Sends `batch` without lingering, unless others are on their way: the thread does then."""
        with self.lock:
            if batch is not self.open or len(self._deliveries) > 1:
                return
            writes_here = self._can_write_directly(batch)
            self.seal(signal=not writes_here)
        if writes_here:
            self._write_directly()

    def seal(self, *, signal: bool = True) -> None:
        """Sends the open batch without waiting for more. `lock` is held."""
        if self.open is not None:
            batch, self.open = self.open, None
            self._enqueue(batch, signal=signal)

    def add_table(self, payload: pa.RecordBatch, partitions: Any) -> ProducerBatch:
        """Sends rows, after everything sent before. Waits and raises as `open_batch` does.

        Args:
            payload: conforms to `PAYLOAD_SCHEMA`.
            partitions: None, or numpy int32: the partition of each row, -1 for "by the key".
        """
        with self.lock:
            self._wait_for_buffer()
            self.seal()
            batch = self._new_batch()
            batch.table = payload
            batch.table_partitions = partitions
            batch.bytes = payload.nbytes
            self._enqueue(batch)
        return batch

    def await_batch(
        self, batch: ProducerBatch, is_done: Callable[[], bool], deadline: float | None
    ) -> bool:
        """Sends `batch` now; returns False if `deadline` (monotonic seconds) passes before it is
        done.

        Raises `BadRequest` on the thread that would have to deliver it.
        """
        if threading.get_ident() == self._thread_id:
            raise errors.BadRequest(
                reason="a delivery callback cannot wait for records of its topic: it runs on the"
                " thread that delivers them"
            )
        while True:
            waiter = threading.Lock()
            waiter.acquire()
            with self.lock:
                if is_done():
                    return True
                writes_here = self._can_write_directly(batch)
                if batch is self.open:
                    self.seal(signal=not writes_here)
                batch.waiters.append(waiter)
            if writes_here:
                self._write_directly()
            left_seconds = -1.0 if deadline is None else max(deadline - self._now(), 0.0)
            if not waiter.acquire(timeout=left_seconds):
                return is_done()

    def expedite(self, batch: ProducerBatch) -> None:
        with self.lock:
            if batch is self.open:
                self.seal()

    def flush(self, deadline: float | None) -> bool:
        """Returns whether everything sent before is decided, and called back, by `deadline`."""
        with self.lock:
            batches = self._deliveries.batches
        return all(self.await_batch(each, each.is_finished, deadline) for each in batches)

    def statistics(self) -> ProducerStatistics:
        """Returns the counts of this topic; the buffer is the producer's, and not counted here."""
        with self.lock:
            deliveries = self._deliveries
            return ProducerStatistics(
                records=deliveries.acked_records,
                bytes=deliveries.acked_bytes,
                batches=deliveries.acked_batches,
                retries=self._schedule.retries,
                errors=deliveries.failed_records,
                in_flight=self._schedule.in_flight,
            )

    @property
    def undecided_rows(self) -> int:
        """Reads without the lock, so it is only roughly right while others send."""
        return sum(batch.count or len(batch.values) for batch in self._deliveries.batches)

    def end(self) -> None:
        """Lets the threads end after the last batch. Takes no lock: a finalizer may call it."""
        self._is_ending = True
        if self.lock.acquire(blocking=False):
            try:
                self._signal()
            finally:
                self.lock.release()

    def close(self) -> None:
        """Gives up the undecided batches, and ends the threads."""
        closed = errors.BadRequest(reason="the producer is closed")
        with self.lock:
            self._refusal = closed
            self.seal(signal=False)
            self._give_up(NEVER, closed)
            self._is_ending = True
            self._signal()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(limits.KEEPALIVE_SECONDS + limits.KEEPALIVE_TIMEOUT_SECONDS)
        # An interpreter that ends while a thread is inside Arrow or gRPC would abort. They are
        # there until their very end, where the last reference to a stream is dropped.
        deadline = self._now() + limits.KEEPALIVE_TIMEOUT_SECONDS
        with self.lock:
            threads = list(self._threads)
        for each in threads:
            if each is not threading.current_thread():
                each.join(max(deadline - self._now(), 0.0))

    def after_fork(self) -> None:
        """Fails the batches in a child: it has no such threads, and its parent sends them."""
        self.lock = threading.Lock()
        for batch in self._deliveries.batches:
            unknown = errors.OutcomeUnknown(what="a record", reason="it is for the parent to send")
            batch.fail_unsplit(unknown)
        self._deliveries = Deliveries(self.topic, self._pool)

    # -------------------------------------------------------------------------- filling

    def _wait_for_buffer(self) -> None:
        """Waits until one more batch is allowed. `lock` is held, except in waits."""
        deadline = self._now() + self._options.max_block_seconds
        while self._refusal or self._schedule.topic_error or self._pool.is_full:
            if self._refusal is not None:
                raise self._refusal
            if self._schedule.topic_error is not None:
                self._unlocked(lambda: self._fetch_metadata(self._options.max_block_seconds))
            elif threading.get_ident() == self._thread_id:
                # A callback that sends must not wait for what its own thread has to do.
                return
            else:
                self._unlocked(lambda: self._wait_for_memory(deadline))

    def _wait_for_memory(self, deadline: float) -> None:
        if not self._pool.wait_for_memory(deadline):
            raise errors.TimedOut(
                what=f"waiting for space in the producer's buffer of {self._pool.limit_bytes}"
                " bytes",
                timeout_seconds=self._options.max_block_seconds,
            )

    def _unlocked(self, wait: Callable[[], None]) -> None:
        self.lock.release()
        try:
            wait()
        finally:
            self.lock.acquire()

    def _new_batch(self) -> ProducerBatch:
        now = self._now()
        batch = ProducerBatch(
            self,
            due=now + self._options.linger_seconds,
            deadline=now + self._options.delivery_timeout_seconds,
        )
        self._deliveries.add(batch)
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

    def _enqueue(self, batch: ProducerBatch, *, signal: bool = True) -> None:
        batch.seal()
        self._pool.take(batch.cost_bytes)
        self._sealed.append(batch)
        if signal:
            self._signal()

    # -------------------------------------------------------------------------- metadata

    def _fetch_metadata(self, timeout_seconds: float) -> None:
        """Asks how many partitions there are, and which brokers lead them."""
        request = flight_messages.TopicName(topic=self.topic)
        info: flight_messages.TopicInfo = self._connection.action(
            "topics.describe", request, timeout_seconds=timeout_seconds
        )
        self._connection.learn_leaders(info)
        with self.lock:
            self._apply_metadata(info)
            self._signal_if_ready()

    def _apply_metadata(self, info: flight_messages.TopicInfo) -> None:
        self._info = info
        self.max_record_bytes = info.max_record_bytes
        """For key, value and headers together."""
        self._schedule.set_leaders(
            [each.leader for each in info.partitions],
            refresh_at=self._now() + limits.METADATA_AGE_SECONDS,
        )

    def _refresh(self) -> None:
        try:
            self._fetch_metadata(_REQUEST_SECONDS)
        except errors.SparklogError as error:
            # The old metadata remains in use; a broker that is no leader any more refuses.
            _log.warning("cannot look at topic %s: %s", self.topic, error)
            with self.lock:
                self._schedule.refresh_at = self._now() + _REQUEST_SECONDS

    # -------------------------------------------------------------------------- the thread

    def _signal(self) -> None:
        self._is_signalled = True
        self._changed.notify()

    def _signal_if_ready(self) -> None:
        if self._schedule.has_ready or self._deliveries.has_callbacks or self._is_ending:
            self._signal()

    def _run(self) -> None:
        self._thread_id = threading.get_ident()
        try:
            while (work := self._next_work()) is not None:
                self._do(work)
            self._end_idle_streams()
            self._end_abandoned_streams()
        except Exception as error:
            # A fault of ours must not leave any caller waiting.
            _log.exception("the sender of topic %s failed", self.topic)
            self._fail(errors.UnexpectedError(reason=f"the producer failed: {error!r}"))

    def _next_work(self) -> Work | None:
        """Sleeps until there is work; None: the thread ends."""
        with self.lock:
            idle_since = self._now()
            while True:
                step = self._schedule.next_step(
                    self._now(),
                    is_signalled=self._is_signalled,
                    is_ending=self._is_ending,
                    has_undecided=bool(self._deliveries),
                    open_due=NEVER if self.open is None else self.open.due,
                    idle_since=idle_since,
                )
                match step:
                    case Sleep():
                        self.clock.wait_until(self._changed, step.until)
                    case Work():
                        self._is_signalled = False
                        if step.seals:
                            self.seal()
                        return step
                    case Stop():
                        self._is_signalled = False
                        self._thread, self._thread_id = None, -1
                        return None

    def _do(self, work: Work) -> None:
        """Does one round of the sender thread."""
        self._run_callbacks()
        if work.refreshes:
            self._refresh()
        with self._sending:
            self._split_sealed()
            with self.lock:
                self._attend_to_time()
            for route in self._schedule.routes:
                self._write_all(route)
        self._end_abandoned_streams()

    def _attend_to_time(self) -> None:
        """Gives up late batches, and lets partitions retry whose wait is over. `lock` is held."""
        now = self._now()
        if self._schedule.is_give_up_check_due(now):
            seconds = self._options.delivery_timeout_seconds
            late = errors.TimedOut(what=f"delivery to topic {self.topic}", timeout_seconds=seconds)
            self._give_up(now, late)
        self._schedule.retry_due(now)

    def _run_callbacks(self) -> None:
        with self.lock:
            callbacks = self._deliveries.take_callbacks()
        for batch, of_batch in callbacks:
            self._call_back(batch, of_batch)

    def _call_back(self, batch: ProducerBatch, callbacks: list[Callback]) -> None:
        for row, callback in callbacks:
            try:
                callback(RecordFuture(batch, row))
            except BaseException:
                # Even SystemExit must not end the thread that delivers.
                _log.exception("a delivery callback of topic %s failed", self.topic)
        with self.lock:
            self._deliveries.called_back(batch)
            self._signal_if_ready()

    def _split_sealed(self) -> None:
        with self.lock:
            batches, self._sealed = self._sealed, []
        for batch in batches:
            self._split(batch)

    def _split(self, batch: ProducerBatch) -> None:
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
                self._deliveries.fail_unsplit(batch, failure)
            else:
                for part in batch.attach(split):
                    self._schedule.add(part)
            self._signal_if_ready()

    # -------------------------------------------------------------------------- writing

    def _write_all(self, route: _Route, *, may_wait: bool = True) -> None:
        """Writes all that may be sent on `route` now.

        Only the sender thread may wait for a producer id or for a stream to open.
        """
        while True:
            with self.lock:
                step = self._schedule.next_write(route, self._now())
            match step:
                case Write():
                    self._write(step)
                case EndStream():
                    step.stream.end_writing()
                case GetProducerId() if may_wait:
                    self._get_producer_id(step.partition)
                case OpenStream() if may_wait:
                    self._open_stream(step)
                case _:
                    return

    def _write(self, step: Write[ProducerStream]) -> None:
        stream = step.stream
        try:
            for part, payload in step.batches:
                stream.write(part, payload, pipelined=step.is_pipelined)
        except (pa.ArrowException, OSError) as error:
            # The reading thread sees the stream end, and finds the batches without an answer.
            _log.debug("a stream to %s broke: %s", stream.channel.address, error)
            stream.end_writing()
        except BaseException:
            # A signal interrupted a caller that writes.
            stream.end_writing()
            raise

    def _get_producer_id(self, partition: SendingPartition) -> None:
        failure: errors.SparklogError | None = None
        try:
            is_first = partition.queue.identity is None
            ask = self._producer_ids.shared if is_first else self._producer_ids.fresh
            identity = ask(timeout_seconds=_REQUEST_SECONDS)
        except errors.SparklogError as error:
            failure = error
        with self.lock:
            if failure is None:
                self._schedule.producer_id_granted(partition, identity)
            elif is_final(failure):
                self._give_up(NEVER, failure)
            else:
                _log.warning("no producer id for topic %s: %s", self.topic, failure)
                self._schedule.producer_id_failed(partition, failure, self._now())

    def _open_stream(self, step: OpenStream[ProducerStream]) -> None:
        route = step.route
        try:
            channel = self._connection.channel(route.broker)
        except errors.SparklogError as error:
            self._route_failed(route, None, error)
            return
        try:
            stream = ProducerStream(channel, self.topic, step.columns)
        except (pa.ArrowException, OSError) as error:
            self._route_failed(route, channel, failure_of(error, channel.address))
            return
        with self.lock:
            self._schedule.stream_opened(route, stream)
            self._start(f"sparklog-acks-{self.topic}", self._read_answers, route, stream)

    def _route_failed(
        self, route: _Route, channel: Channel | None, error: errors.SparklogError
    ) -> None:
        """Waits before `route` is used again; gives up if no retry can help."""
        if channel is not None and not isinstance(error, errors.Invalid | errors.Corrupt):
            self._connection.broke(channel)
        with self.lock:
            if channel is None and is_final(error):
                self._give_up(NEVER, error)
            else:
                if self._retry_log.is_due():
                    _log.warning("sending to topic %s is tried again: %s", self.topic, error)
                self._schedule.route_failed(
                    route,
                    error,
                    self._now(),
                    may_have_moved=self._connection.may_have_moved(error),
                )

    # -------------------------------------------------------------------------- callers that write

    def _can_write_directly(self, batch: ProducerBatch) -> bool:
        """Returns whether a caller that waits for `batch` may write it, and spare waking a thread.

        It must surely not block: no other batch is on its way, and this one fits where gRPC keeps
        the bytes that the peer has not read yet.
        """
        is_alone = batch is self.open and len(self._deliveries) == 1
        return is_alone and batch.bytes <= _DIRECT_WRITE_BYTES and self._schedule.has_stream

    def _write_directly(self) -> None:
        if self._sending.acquire(blocking=False):
            try:
                self._split_sealed()
                for route in self._schedule.routes:
                    self._write_all(route, may_wait=False)
            finally:
                self._sending.release()
        with self.lock:
            if self._sealed or self._schedule.has_ready:
                self._signal()

    # -------------------------------------------------------------------------- answers

    def _read_answers(self, route: _Route, stream: ProducerStream) -> None:
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
            if failure is None and stream.awaiting:
                failure = errors.BrokerUnavailable(
                    address=stream.channel.address, reason="it ended the stream early"
                )
            self._decide(self._schedule.stream_ended(route, stream, failure, self._now()))
        if failure is not None:
            self._route_failed(route, stream.channel, failure)

    def _answered(
        self, route: _Route, stream: ProducerStream, reply: flight_messages.AppendReply
    ) -> None:
        error = None if reply.error is None else reply.error.exception()
        with self.lock:
            if route.stream is not stream:
                return
            decided = self._schedule.answered(route, stream, error, self._now())
            if error is not None and not decided and self._retry_log.is_due():
                level = logging.WARNING if isinstance(error, _REFUSALS) else logging.INFO
                _log.log(level, "records to %s are sent again: %s", self.topic, error)
            self._decide(decided, reply)
            self._signal_if_ready()
        if error is not None and is_of_the_broker(error):
            self._connection.broke(stream.channel)
            stream.end_writing()

    def _decide(
        self, decided: Iterable[Decided], reply: flight_messages.AppendReply | None = None
    ) -> None:
        for part, failure in decided:
            if failure is not None:
                self._deliveries.fail(part, failure)
            elif reply is not None:
                self._deliveries.succeed(part, reply)

    # -------------------------------------------------------------------------- giving up

    def _give_up(self, now: float, reason: errors.SparklogError) -> None:
        """Ends the batches that are due by `now` without an ack. `lock` is held."""
        given_up: GivenUp[ProducerStream] = self._schedule.give_up(now, reason)
        self._decide(given_up.failed)
        self._deliveries.fail_late_unsplit(now, reason)
        self._sealed = [batch for batch in self._sealed if not batch.is_done()]
        for stream in given_up.abandoned:
            self._connection.broke(stream.channel)
        self._abandoned += given_up.abandoned
        if self._abandoned:
            self._signal()
        self._signal_if_ready()

    def _fail(self, reason: errors.SparklogError) -> None:
        """Fails every batch, without the schedule's rules: they may be what failed."""
        with self.lock:
            self._refusal = reason
            self.seal(signal=False)
            self._sealed.clear()
            self._abandoned += self._schedule.clear()
            self._deliveries.fail_all(reason)
        self._run_callbacks()
        self._end_abandoned_streams()
        with self.lock:
            self._thread, self._thread_id = None, -1

    def _end_idle_streams(self) -> None:
        with self.lock:
            # Another thread may have begun already, for batches that came just now.
            streams = [] if self._thread else self._schedule.end_idle_streams()
        for stream in streams:
            stream.end_writing()

    def _end_abandoned_streams(self) -> None:
        """Closes streams that do not answer, which takes time and therefore no lock."""
        with self.lock:
            streams, self._abandoned = self._abandoned, []
        for stream in streams:
            stream.end_writing()
