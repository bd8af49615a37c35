"""WAL writer: group commit over all topics of a broker.

Appends queue while a flush is under way. The next flush takes the queued appends, assigns offsets,
puts one WAL object, and only then answers. If no flush is under way, the thread that waits for an
append leads one itself, so a lone producer needs no hand-over between threads, and many share a
put.

- Offsets are assigned in the order of the queue.
- A flush is applied only once its object is durable. So a rejected flush has no effect, and its
  appends may be sent again.
- On an object store several flushes are under way concurrently. Broker threads lead them, as do
  those that wait, because a listener may have only one thread that waits for all its clients.
- Each of these flushes is validated against the state that those before it leave, and is applied
  and answered after them, in order. Once a flush has been planned, the one before it can no longer
  be rejected: its put is retried until it is durable or fenced. If it is fenced, so are all after
  it, whatever became of their objects.
- Where puts are billed, the next flush waits until the `PutBudget` allows it, or it is full.
- A fenced put, or a failed local fsync, ends the writer for good.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from sparklog import errors, limits
from sparklog.broker.counts import Budget
from sparklog.broker.log.appends import (
    Append,
    AppendResult,
    CarriedEntry,
    EmptyObject,
    PendingAppend,
)
from sparklog.broker.log.flush import Flush, WriterLimits
from sparklog.broker.log.flush_pace import FlushPace
from sparklog.broker.log.free_space import FreeSpace
from sparklog.broker.log.hot_tail import HotTail
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.preparing import AppendPreparer
from sparklog.broker.log.put_budget import PutBudget
from sparklog.broker.log.refused_appends import RefusedAppends
from sparklog.broker.refused_work import RefusedWork, Work
from sparklog.clock import Clock
from sparklog.storage import wal
from sparklog.storage.objects import Store
from sparklog.storage.snapshot import (
    Entry,
    EntryKind,
)

QUICK_FLUSH_BYTES = 64 * limits.KIB  # of a flush that the Kafka listener's event loop leads itself
_PACED_SLEEP_SECONDS = 0.001, 0.01  # after which a waiting flush may have become full


class Writer:
    """Appends to the WAL of one epoch. `submit` and `wait` may be called from any thread."""

    def __init__(
        self,
        store: Store,
        appender: wal.Appender,
        led_partitions: LedPartitions,
        hot: HotTail,
        *,
        clock: Clock,
        bounds: WriterLimits,
        on_flush: Callable[[wal.WalObject, float], None] = lambda _object, _seconds: None,
        refused: RefusedWork | None = None,
        budget: PutBudget | None = None,
    ) -> None:
        """`budget`: of the puts that flushes are; None: as many as they take."""
        self._store = store
        self._appender = appender
        self._led_partitions = led_partitions
        self._hot = hot
        self._clock = clock
        self._bounds = bounds
        self._on_flush = on_flush
        self._refused = refused or RefusedWork(clock)
        self._budget = budget
        self._mutex = threading.Lock()
        self._not_full = threading.Condition(self._mutex)
        self._queue: deque[PendingAppend] = deque()
        self._queued_bytes = 0
        self.preparer = AppendPreparer(
            clock=clock,
            max_record_bytes=bounds.max_record_bytes,
            max_batch_bytes=bounds.max_batch_bytes,
        )
        self._planner = appender if isinstance(appender, wal.PlanningAppender) else None
        self._at_once = bounds.flushes_at_once if self._planner is not None else 1
        self._landed = threading.Condition(self._mutex)
        """Notified when a flush is done, if several may be under way."""
        self._due = threading.Condition(self._mutex)
        """Notified when a flush may begin, for the threads in `lead_flushes`."""
        self._leading = False
        """True while a thread chooses the next flush."""
        self._planning = False
        self._under_way = 0
        self._last: Flush | None = None
        """The flush that was planned last, until it is done."""
        self._planned_at = -float("inf")
        self._pace = FlushPace()
        """Updated only by the leader of a flush, like the next field."""
        self.space = FreeSpace(store, clock, reserve_bytes=bounds.free_space_reserve_bytes)
        self._refusals = RefusedAppends(led_partitions, clock)
        self._closed: errors.SparklogError | None = None
        self.failure: BaseException | None = None
        """Set once, when the writer has ended for good."""

    @property
    def max_record_bytes(self) -> int:
        """Limit of a record's key, value and headers together."""
        return self._bounds.max_record_bytes

    def budgets(self) -> list[Budget]:
        """Returns the memory of records on their way to the log and to their tables."""
        bounds, backlog = self._bounds, self._led_partitions.backlog
        decoding = self.preparer.decoding
        return [
            Budget("writer_queue", self._queued_bytes, bounds.queue_bytes),
            Budget("unpublished", backlog.unpublished_bytes, bounds.unpublished_bytes),
            Budget("staged", backlog.staged_bytes, bounds.staged_bytes),
            Budget("write_decoding", decoding.held_bytes, decoding.limit_bytes),
        ]

    def open(self) -> None:
        """Puts the first object of the epoch; no append is accepted before that.

        Raises `BrokerFenced` if a successor has fenced the epoch, and the store's errors.
        """
        self._led_partitions.apply(self._appender.append([(Entry(kind=EntryKind.OPEN), wal.EMPTY)]))

    # -------------------------------------------------------------------------- appending

    def submit(
        self,
        appends: Sequence[Append | CarriedEntry | EmptyObject],
        *,
        timeout_seconds: float = 0.0,
        is_bounded: bool = True,
    ) -> PendingAppend:
        """Queues `appends` to become durable together; waits for space up to the timeout.

        With a timeout of 0 it does no I/O, and leaves the flush to the threads that wait.

        Args:
            appends: of any partitions; all are written, or none.
            timeout_seconds: how long to wait for space in the queue.
            is_bounded: False queues the appends even if there is no space.

        Raises `QueueFull`, and the error that ended the writer.
        """
        pending = PendingAppend(appends)
        deadline = self._clock.monotonic() + timeout_seconds
        while True:
            with self._not_full:
                self._check_accepting()
                full = self._why_full(pending) if is_bounded else None
                if full is None:
                    self._queue.append(pending)
                    self._queued_bytes += pending.bytes
                    self._notify_due()
                    return pending
                # If all callers with queued appends wait here too, one of them must lead a flush.
                leads = timeout_seconds > 0 and self._takes_lead()
                left_seconds = deadline - self._clock.monotonic()
                refused = not leads and (left_seconds <= 0 or not self._not_full.wait(left_seconds))
            if refused:
                assert full is not None
                if timeout_seconds > 0:  # a caller that does not wait here retries
                    self._refused.note(Work.WRITES, str(full))
                self._refusals.record(appends)
                raise full
            if leads:
                self._lead()

    def _why_full(self, pending: PendingAppend) -> errors.QueueFull | None:
        """Returns the error if `pending` cannot be queued at present."""
        if self._queued_bytes > self._bounds.queue_bytes:
            return errors.QueueFull(
                queue="the writer's queue", bytes=self._queued_bytes, setting="writer.queue_bytes"
            )
        if self._led_partitions.backlog.unpublished_bytes > self._bounds.unpublished_bytes:
            return errors.QueueFull(
                queue="the backlog of unpublished records",
                bytes=self._led_partitions.backlog.unpublished_bytes,
                setting="publisher.unpublished_bytes",
            )
        if (
            pending.is_staged
            and self._led_partitions.backlog.staged_bytes > self._bounds.staged_bytes
        ):
            return errors.QueueFull(
                queue="the backlog of staged records",
                bytes=self._led_partitions.backlog.staged_bytes,
                setting="publisher.staged_bytes",
            )
        return None

    def _takes_lead(self) -> bool:
        """Makes the caller, which holds the mutex, the leader of the next flush, if one is due."""
        if not self._is_due():
            return False
        self._leading = True
        return True

    def _is_due(self) -> bool:
        return not self._leading and self._under_way < self._at_once and bool(self._queue)

    def _notify_due(self) -> None:
        if self._closed is not None:
            self._due.notify_all()  # all of them end when the queue is empty
        elif self._at_once > 1 and self._is_due():
            self._due.notify()

    @property
    def leaders(self) -> int:
        """The number of threads to run `lead_flushes`; 0 if the waiting threads lead all flushes.

        With several flushes under way, a hand-over between threads costs little compared to a put.
        """
        return self._at_once if self._at_once > 1 else 0

    def lead_flushes(self) -> None:
        """Leads flushes whenever one may begin, until the writer has ended."""
        while True:
            with self._mutex:
                while not self._takes_lead():
                    if self.failure is not None or (self._closed is not None and not self._queue):
                        return
                    self._due.wait()
            self._lead()

    def notify_published(self) -> None:
        """Wakes the threads that wait for space, after the publisher has freed some."""
        with self._not_full:
            self._not_full.notify_all()

    def note_if_full(self) -> None:
        """Notes that appends would be refused because the root has too little free space."""
        try:
            self.space.check()
        except errors.SparklogError as error:
            self._refused.note(Work.WRITES, str(error))

    def wait(self, pending: PendingAppend) -> list[AppendResult]:
        """Returns when the appends are durable; leads flushes if no other thread does."""
        while True:
            with self._mutex:
                if pending.done:
                    break
                pending.waiting = True
                # Leading a later flush would delay the answer.
                leads = pending.is_queued and self._takes_lead()
            if leads:
                self._lead()
            else:
                pending.gate.acquire()
        return pending.outcome()

    def flush_if_quick(self) -> None:
        """Writes the queued appends if that delays the caller, an event loop, by very little.

        Does nothing if they are large, if flushes have been slow or linger, or while another thread
        leads a flush. Appends that are not done afterwards need a `wait`. Never raises.
        """
        with self._mutex:
            if (
                self._bounds.linger_seconds
                or self._under_way
                or self._queued_bytes > QUICK_FLUSH_BYTES
                or not self._pace.is_quick(self._clock.monotonic())
                or not self._takes_lead()
            ):
                return
        self._lead()

    def _lead(self) -> None:
        """Runs one flush, and wakes the next waiting thread once it may lead another."""
        is_leading = True
        try:
            wait_seconds = self._bounds.linger_seconds
            if self._under_way:
                since_seconds = self._clock.monotonic() - self._planned_at
                interval_seconds = self._bounds.flush_interval_seconds - since_seconds
                wait_seconds = max(wait_seconds, interval_seconds)
            if wait_seconds > 0:
                self._clock.sleep(wait_seconds)
            self._wait_for_budget()
            flush = self._plan()
            if flush is not None:
                if self._at_once > 1:
                    is_leading = False
                    self._end_lead(is_leading=True)
                self._finish(flush)
        finally:
            self._end_lead(is_leading=is_leading)

    def _wait_for_budget(self) -> None:
        """Waits until the budget allows the next flush, or its object is full."""
        if self._budget is None:
            return
        while not self._is_flush_full() and self._closed is None:
            left_seconds = self._budget.flush_wait_seconds(self._clock.monotonic())
            if left_seconds <= 0:
                break
            shortest, longest = _PACED_SLEEP_SECONDS
            self._clock.sleep(min(max(left_seconds, shortest), longest))
        self._budget.note_flush(self._clock.monotonic())

    def _is_flush_full(self) -> bool:
        bounds = self._bounds
        return (
            self._queued_bytes >= bounds.flush_max_bytes
            or len(self._queue) >= bounds.flush_max_entries
        )

    def _end_lead(self, *, is_leading: bool) -> None:
        """Has a thread that is waiting for an append lead the next flush, if one may begin."""
        with self._not_full:
            if is_leading:
                self._leading = False
            self._not_full.notify_all()
            self._notify_due()
            if self._under_way < self._at_once:
                for pending in self._queue:
                    if pending.waiting:
                        pending.wake()
                        break

    # -------------------------------------------------------------------------- flushing

    def flush(self) -> int:
        """Writes the queued appends, up to the bounds of one object, and answers them.

        Returns the number of entries. Never raises: errors become the outcome of the appends. One
        caller at a time.
        """
        flush = self._plan()
        if flush is None:
            return 0
        self._finish(flush)
        return len(flush.entries)

    def _plan(self) -> Flush | None:
        """Chooses the next flush. Returns None if nothing is queued, or if the flush failed."""
        pending_appends = self._take_queued()
        if not pending_appends:
            return None
        with self._mutex:
            self._planning = True
            previous = self._last
        flush = Flush(
            self._led_partitions,
            self._refusals.known,
            bounds=self._bounds,
            now_seconds=self._clock.monotonic(),
            pending_appends=pending_appends,
            previous=previous,
        )
        failure: BaseException | None = None
        try:
            self._check_running()
            self.space.check_lately()
            self._led_partitions.exclusively(flush.add, pending_appends)
            if flush.entries and self._planner is not None and self._at_once > 1:
                flush.planned = self._planner.plan(flush.entries)
        except BaseException as error:
            failure = self._failure_of(error)
        with self._mutex:
            self._planning = False
            if failure is None:
                self._last = flush
                self._under_way += 1
                self._planned_at = self._clock.monotonic()
        if failure is not None:
            self._conclude(flush, failure)
            return None
        return flush

    def _finish(self, flush: Flush) -> None:
        """Writes a flush, and applies and answers it after the earlier ones."""
        failure: BaseException | None = None
        try:
            began = self._clock.monotonic()
            written: wal.WalObject | None = None
            if flush.planned is not None:
                written = flush.planned.write(gives_up=lambda: self._gives_up(flush))
            elif flush.entries:
                written = self._appender.append(flush.entries)
            ended = self._clock.monotonic()
            failure = self._wait_for_previous(flush)
            if failure is not None:
                # Its appends, even rejected ones, were checked against a state that never existed.
                for pending in flush.pending_appends:
                    pending.error = failure
            elif written is not None:
                self._pace.record(ended - began, ended)
                self._apply(written, flush)
                self._on_flush(written, ended - began)
        except BaseException as error:
            failure = self._failure_of(error)
        finally:
            with self._mutex:
                flush.is_done, flush.failure, flush.previous = True, failure, None
                self._under_way -= 1
                if self._last is flush:
                    self._last = None
                self._landed.notify_all()
        self._conclude(flush, failure)

    def _wait_for_previous(self, flush: Flush) -> BaseException | None:
        """Waits until the flush before this one is done. Returns its error, if it has one."""
        previous = flush.previous
        if previous is None:
            return None
        with self._landed:
            self._landed.wait_for(lambda: previous.is_done)
        return previous.failure

    def _gives_up(self, flush: Flush) -> bool:
        """Returns whether a flush that was certainly not put may be rejected.

        It may not once another object has been planned on its state. If it may, its sequence is
        free again. Later flushes of only duplicates and rejected appends have no object; they fail
        with it.
        """
        with self._mutex:
            last = self._last
            while last is not None and last is not flush and not last.entries:
                last = last.previous
            if self._planning or last is not flush:
                return False
            assert self._planner is not None
            assert flush.planned is not None
            self._planner.take_back(flush.planned)
            previous = flush.previous
            self._last = None if previous is None or previous.is_done else previous
            for pending in flush.pending_appends:
                if pending.error is None:  # before the next flush is validated
                    self._refusals.record(pending.appends)
            return True

    def _failure_of(self, error: BaseException) -> BaseException:
        """Returns the outcome of a failed flush's appends; may end the writer."""
        if isinstance(error, errors.Retriable):
            return error
        if isinstance(error, errors.RootNotWritable):
            # It certainly had no effect, and may be temporary, as a store's 403 can be.
            return errors.StorageUnavailable(operation="append", path="wal", reason=str(error))
        self.fail(error)
        return error

    def _conclude(self, flush: Flush, failure: BaseException | None) -> None:
        if isinstance(failure, errors.Retriable) and self._closed is None:
            self._refused.note(Work.WRITES, str(failure))
        for pending in flush.pending_appends:
            refusal = pending.error or failure
            if refusal is not None:
                self._refusals.count(pending.appends)
            if isinstance(refusal, errors.Retriable):
                self._refusals.record(pending.appends)
        self._answer(flush.pending_appends, failure)

    def _take_queued(self) -> list[PendingAppend]:
        taken: list[PendingAppend] = []
        size = entries = 0
        with self._not_full:
            while self._queue:
                pending = self._queue[0]
                size += pending.bytes
                entries += len(pending.appends)
                if taken and (
                    size > self._bounds.flush_max_bytes or entries > self._bounds.flush_max_entries
                ):
                    break
                pending.is_queued = False
                taken.append(self._queue.popleft())
                self._queued_bytes -= pending.bytes
            self._not_full.notify_all()
        return taken

    def _apply(self, written: wal.WalObject, flush: Flush) -> None:
        for located, records in zip(written.located, flush.hot_records, strict=True):
            if records is not None:
                self._hot.add(located.entry, records)
        self._led_partitions.apply(written)

    def _answer(
        self, pending_appends: Sequence[PendingAppend], failure: BaseException | None
    ) -> None:
        with self._mutex:
            for pending in pending_appends:
                if failure is not None and pending.error is None:
                    pending.error = failure
                pending.done = True
                if pending.waiting:
                    pending.wake()

    # -------------------------------------------------------------------------- ending

    def close(self, error: errors.SparklogError) -> None:
        """Rejects new appends with `error`; returns when all queued ones are written."""
        with self._not_full:
            self._closed = self._closed or error
            self._not_full.notify_all()
            self._due.notify_all()
        while True:
            with self._not_full:
                leads = self._takes_lead()
                if not leads and not self._leading and not self._under_way:
                    return
                if not leads:
                    self._not_full.wait()
            if leads:
                self._lead()

    def fail(self, error: BaseException) -> None:
        """Ends the writer: rejects all queued and all future appends with `error`."""
        with self._not_full:
            if self.failure is None:
                self.failure = error
            pending_appends, self._queue = list(self._queue), deque()
            self._queued_bytes = 0
            self._not_full.notify_all()
            self._due.notify_all()
        self._answer(pending_appends, self.failure)

    def _check_running(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _check_accepting(self) -> None:
        failure = self.failure
        if isinstance(failure, errors.SparklogError):
            raise failure
        if failure is not None:
            raise errors.StorageUnavailable(
                operation="append", path="wal", reason=f"the broker is stopping: {failure!r}"
            ) from failure
        if self._closed is not None:
            raise self._closed
