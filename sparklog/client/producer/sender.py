"""Sends the batches of one topic to the brokers: one thread writes, and one per stream reads.

Callers fill the open batch under `lock` and do not wait for the network. The sender thread seals
the batches that are due, splits them, and writes; the reading thread of a stream handles answers. A
caller that waits for the only pending batch writes it itself, which saves waking a thread. Each
topic has its own sender thread, because a write may block while a broker does not read, and other
topics must not wait for that. All threads are daemons, and end when the topic has been idle for a
while.

The threads decide nothing: `schedule` returns the next step and receives events, `partition_queue`
interprets rejections, `deliveries` accounts for the batches. `streams` handles the network.

`lock` guards everything here except the streams' writers, and is never held during a call to the
network or to a user's function.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from sparklog import errors, limits
from sparklog.client.connection import Connection
from sparklog.client.producer.batch import Callback, ProducerBatch, RecordFuture
from sparklog.client.producer.buffer_pool import BufferPool, ProducerIds
from sparklog.client.producer.deliveries import Deliveries
from sparklog.client.producer.schedule import NEVER, SendSchedule, Sleep, Stop, Work
from sparklog.client.producer.statistics import ProducerStatistics
from sparklog.client.producer.streams import REQUEST_SECONDS, ProducerStream, TopicStreams
from sparklog.client.producer.threads import SenderThreads
from sparklog.formats import flight_messages
from sparklog.formats.partitioner import spread

_log = logging.getLogger(__name__)
_DIRECT_WRITE_BYTES: Final = 16 * limits.KIB


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
        self.clock = connection.clock
        self.open: ProducerBatch | None = None
        """The batch that callers fill."""
        self.is_eager = options.linger_seconds == 0
        """True if a caller that adds a record must call `send_at_once`."""
        self._connection = connection
        self._pool = pool
        self._options = options
        self._now = connection.clock.monotonic
        self._schedule: SendSchedule[ProducerStream] = SendSchedule(info.topic, connection.backoff)
        self._deliveries = Deliveries(info.topic, pool)
        self._threads = SenderThreads(self._schedule, self._deliveries, connection.clock)
        self._streams = TopicStreams(
            info.topic, connection, producer_ids, self._schedule, self._deliveries, self._threads
        )
        self.lock = self._threads.lock
        self._apply_metadata(info)
        self._refusal: errors.SparklogError | None = None
        """Once set, every call raises it."""
        self._thread: threading.Thread | None = None
        self._thread_id = -1
        self._sending = threading.Lock()
        """Acquired before `lock` by a thread that splits and writes: the sender's or a caller."""
        self._batch_number = random.randrange(2**20)

    # -------------------------------------------------------------------------- for callers

    @property
    def partition_count(self) -> int:
        return len(self._info.partitions)

    def check_partition(self, partition: int) -> None:
        """Raises `UnknownPartition`, after checking for newly added partitions."""
        if partition >= self.partition_count:
            self._fetch_metadata(self._options.max_block_seconds)
        if not 0 <= partition < self.partition_count:
            raise errors.UnknownPartition(
                topic=self.topic, partition=partition, last=self.partition_count - 1
            )

    def open_batch(self) -> ProducerBatch:
        """Returns the open batch, or a new one. Requires `lock`, and releases it while waiting.

        Raises `TimedOut` if the buffer stays full for `max_block_seconds`, and `UnknownTopic` once
        the topic is gone.
        """
        if self.open is None:
            self._wait_for_buffer()
        if self.open is None:
            leaves_to_caller = self.is_eager and not self._deliveries
            self.open = self._new_batch()
            if not leaves_to_caller:
                # The thread may sleep past the time when this batch is due.
                self._threads.notify()
        return self.open

    def send_at_once(self, batch: ProducerBatch) -> None:
        """Sends `batch` without lingering; left to the thread if others are in flight."""
        with self.lock:
            if batch is not self.open or len(self._deliveries) > 1:
                return
            writes_here = self._can_write_directly(batch)
            self.seal(signal=not writes_here)
        if writes_here:
            self._write_directly()

    def seal(self, *, signal: bool = True) -> None:
        """Sends the open batch without waiting for more. Requires `lock`."""
        if self.open is not None:
            batch, self.open = self.open, None
            self._enqueue(batch, signal=signal)

    def add_table(self, payload: pa.RecordBatch, partitions: Any) -> ProducerBatch:
        """Sends rows, after everything already sent. Waits and raises as `open_batch` does.

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
        """Waits until all sends are complete and their callbacks have run; False at `deadline`."""
        with self.lock:
            batches = self._deliveries.batches
        return all(self.await_batch(each, each.is_finished, deadline) for each in batches)

    def statistics(self) -> ProducerStatistics:
        """Returns the counts for this topic, without the buffer, which all topics share."""
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
        """Read without the lock, so only approximate while others send."""
        return sum(batch.count or len(batch.values) for batch in self._deliveries.batches)

    def end(self) -> None:
        """Has the threads end after the last batch. Never blocks: a finalizer may call it."""
        self._threads.is_ending = True
        if self.lock.acquire(blocking=False):
            try:
                self._threads.signal()
            finally:
                self.lock.release()

    def close(self) -> None:
        """Gives up the outstanding batches, and stops the threads."""
        closed = errors.BadRequest(reason="the producer is closed")
        with self.lock:
            self._refusal = closed
            self.seal(signal=False)
            self._streams.give_up(NEVER, closed)
            self._threads.is_ending = True
            self._threads.signal()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(limits.KEEPALIVE_SECONDS + limits.KEEPALIVE_TIMEOUT_SECONDS)
        # An interpreter that exits while a thread is inside Arrow or gRPC aborts. The threads are
        # inside until their very end, when the last reference to a stream is dropped.
        self._threads.join(limits.KEEPALIVE_TIMEOUT_SECONDS)

    def after_fork(self) -> None:
        """Fails the batches in a child: it does not have the threads, and its parent sends them."""
        self.lock = threading.Lock()
        for batch in self._deliveries.batches:
            unknown = errors.OutcomeUnknown(what="a record", reason="it is for the parent to send")
            batch.fail_unsplit(unknown)
        self._deliveries = Deliveries(self.topic, self._pool)

    # -------------------------------------------------------------------------- filling

    def _wait_for_buffer(self) -> None:
        """Waits until one more batch is allowed. Requires `lock`, and releases it while waiting."""
        deadline = self._now() + self._options.max_block_seconds
        while self._refusal or self._schedule.topic_error or self._pool.is_full:
            if self._refusal is not None:
                raise self._refusal
            if self._schedule.topic_error is not None:
                self._unlocked(lambda: self._fetch_metadata(self._options.max_block_seconds))
            elif threading.get_ident() == self._thread_id:
                # A callback that sends must not wait for work that its own thread has to do.
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
            self._thread = self._threads.start(name, self._run)
        return batch

    def _enqueue(self, batch: ProducerBatch, *, signal: bool = True) -> None:
        self._deliveries.seal(batch)
        if signal:
            self._threads.signal()

    # -------------------------------------------------------------------------- metadata

    def _fetch_metadata(self, timeout_seconds: float) -> None:
        """Fetches the number of partitions, and the brokers that lead them."""
        request = flight_messages.TopicName(topic=self.topic)
        info: flight_messages.TopicInfo = self._connection.action(
            "topics.describe", request, timeout_seconds=timeout_seconds
        )
        self._connection.learn_leaders(info)
        with self.lock:
            self._apply_metadata(info)
            self._threads.signal_if_ready()

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
            self._fetch_metadata(REQUEST_SECONDS)
        except errors.SparklogError as error:
            # The old metadata remains in use; a broker that is no longer the leader rejects
            # requests.
            _log.warning("cannot describe topic %s: %s", self.topic, error)
            with self.lock:
                self._schedule.refresh_at = self._now() + REQUEST_SECONDS

    # -------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        self._thread_id = threading.get_ident()
        try:
            while (work := self._next_work()) is not None:
                self._do(work)
            with self.lock:
                # Another thread may already have started, for batches that have just arrived.
                if self._thread is None:
                    self._streams.leave_idle()
            self._streams.end_left()
        except Exception as error:
            # A bug in our code must not leave any caller waiting.
            _log.exception("the sender of topic %s failed", self.topic)
            self._fail(errors.UnexpectedError(reason=f"the producer failed: {error!r}"))

    def _fail(self, reason: errors.SparklogError) -> None:
        """Fails every batch, bypassing the schedule's rules, which may be what failed."""
        with self.lock:
            self._refusal = reason
            self.seal(signal=False)
            self._streams.leave_all()
            self._deliveries.fail_all(reason)
        self._run_callbacks()
        self._streams.end_left()
        with self.lock:
            self._thread, self._thread_id = None, -1

    def _next_work(self) -> Work | None:
        """Sleeps until there is work; None: the thread ends."""
        with self.lock:
            idle_since = self._now()
            while True:
                step = self._schedule.next_step(
                    self._now(),
                    is_signalled=self._threads.is_signalled,
                    is_ending=self._threads.is_ending,
                    has_undecided=bool(self._deliveries),
                    open_due=NEVER if self.open is None else self.open.due,
                    idle_since=idle_since,
                )
                match step:
                    case Sleep():
                        self._threads.wait_until(step.until)
                    case Work():
                        self._threads.is_signalled = False
                        if step.seals:
                            self.seal()
                        return step
                    case Stop():
                        self._threads.is_signalled = False
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
            self._streams.write_all()
        self._streams.end_left()

    def _attend_to_time(self) -> None:
        """Gives up expired batches, and lets partitions retry after their wait. Requires `lock`."""
        now = self._now()
        if self._schedule.is_give_up_check_due(now):
            seconds = self._options.delivery_timeout_seconds
            late = errors.TimedOut(what=f"delivery to topic {self.topic}", timeout_seconds=seconds)
            self._streams.give_up(now, late)
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
            self._threads.signal_if_ready()

    def _split_sealed(self) -> None:
        with self.lock:
            batches = self._deliveries.take_sealed()
        for batch in batches:
            self._split(batch)

    def _split(self, batch: ProducerBatch) -> None:
        self._batch_number += 1
        count = self.partition_count
        failure: errors.SparklogError | None = None
        try:
            split = batch.split(count, spread(self._batch_number, count))
        except (pa.ArrowException, ValueError) as error:
            failure = errors.WrongSchema(reason=f"the records do not fit into columns: {error}")
        with self.lock:
            if batch.is_done():
                return
            if failure is not None:
                self._deliveries.fail_unsplit(batch, failure)
            else:
                for part in batch.attach(split):
                    self._schedule.add(part)
            self._threads.signal_if_ready()

    # -------------------------------------------------------------------------- callers that write

    def _can_write_directly(self, batch: ProducerBatch) -> bool:
        """Returns whether a caller that waits for `batch` may write it, to save waking a thread.

        The write is certain not to block: no other batch is in flight, and this one fits into
        gRPC's buffer for bytes that the peer has not read yet.
        """
        is_alone = batch is self.open and len(self._deliveries) == 1
        return is_alone and batch.bytes <= _DIRECT_WRITE_BYTES and self._schedule.has_stream

    def _write_directly(self) -> None:
        if self._sending.acquire(blocking=False):
            try:
                self._split_sealed()
                self._streams.write_all(may_wait=False)
            finally:
                self._sending.release()
        with self.lock:
            if self._deliveries.has_sealed or self._schedule.has_ready:
                self._threads.signal()
