"""Serves all tails: one thread sends records from memory, and a few others read from storage.

With a thread per tail, each flush would wake them all, and hundreds would spend a core on context
switches. Here a tail that has records waits in a queue for its step, in which it sends as much as
its client accepts. A batch that many tails read concurrently is encoded once. A tail whose client
does not read waits for the client, and a large batch waits for memory, without blocking a thread.
"""

from __future__ import annotations

import contextlib
import heapq
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import pyarrow as pa

from sparklog import limits
from sparklog.broker.broker import ReadBatch, Tail
from sparklog.broker.decode_memory import DecodeMemory
from sparklog.broker.flight import protocol
from sparklog.broker.flight.grpc.call import Bytes, Call
from sparklog.broker.flight.streams import OpenStream
from sparklog.clock import ThreadClock
from sparklog.formats import flight_messages

TAIL_READERS = 4  # threads that read from storage, for tails whose records are not in memory
TAIL_STEP_BYTES = 1 * limits.MIB  # that a tail sends before the next one gets its turn
TAILS_KEEPING = 8  # that keep the rows of later messages while waiting for their clients
TAIL_SECONDS = 0.0002  # between the steps of two tails, on average

_PAUSE_SECONDS: Final = 0.001
"""The shortest pause; steps follow each other directly until this much pause is due."""
_CACHED_MESSAGES: Final = 64
_CACHED_BYTES: Final = 64 * limits.KIB
"""The largest message that is cached for other tails."""


@dataclass(slots=True, kw_only=True, eq=False)
class ServedTail:
    """A tail, the call that it answers, and its place in the queue.

    Attributes:
        shape: the columns of `tail`'s rows, and the maximum number of rows per batch: tails of the
            same shape share messages.
        idle: the message to send if there have been no records for `idle_seconds`.
        ending: closed when the call has ended.
        finish: ends the call, with the given exception as its status; raises nothing.
        before: called with each batch before it is sent, and may block; None: no hook.
        throttle: called with 0 at the beginning, and with the size of each message with records
            that is sent; returns the milliseconds for which the tail sends no further ones.
    """

    call: Call
    stream: OpenStream
    shape: tuple[tuple[str, ...] | None, int | None]
    idle: Sequence[Bytes]
    idle_seconds: float
    finish: Callable[[BaseException | None], None]
    before: Callable[[ReadBatch], None] | None = None
    throttle: Callable[[int], int] = lambda _: 0
    tail: Tail = field(init=False)
    ending: contextlib.ExitStack = field(init=False)
    sent_at: float = 0.0
    """The time of the last message."""
    is_wanted: bool = False
    """True if it needs to take a step."""
    is_busy: bool = False
    """True while a thread executes its step."""
    is_sending: bool = False
    """True until its client has read its last message."""
    is_ready: bool = False
    """True while it is in the queue."""
    is_idle_due: bool = False
    throttled_until: float = 0.0
    """The end of its throttle; 0 if there is none."""
    is_waiting: bool = False
    """True while it waits for memory for its next batch."""
    held_bytes: int = 0
    """The memory of the message being sent, or of the next one."""
    is_granted: bool = False
    """True while `held_bytes` are for the next message."""


class Tails:
    """The tails of one listener. `add` and `wake` may be called from any thread."""

    def __init__(self, reply_memory: DecodeMemory, *, clock: ThreadClock) -> None:
        self._reply_memory = reply_memory
        self._clock = clock
        self._changed = threading.Condition()
        self._ready: deque[ServedTail] = deque()
        self._heartbeats: list[tuple[float, int, ServedTail]] = []
        """(time, number, tail), earliest first."""
        self._throttled: list[tuple[float, int, ServedTail]] = []
        """(end of the throttle, number, tail), earliest first."""
        self._numbers = count()
        self._tails: set[ServedTail] = set()
        self._keeping: set[ServedTail] = set()
        """Tails that keep the rows of later messages while their clients read the current one."""
        self._is_over = False
        self._cache: OrderedDict[Any, tuple[int, Sequence[Bytes]]] = OrderedDict()
        """Messages by their contents, each with the offset after it."""
        self._readers = ThreadPoolExecutor(TAIL_READERS, "sparklog-tail-read")
        self._thread: threading.Thread | None = None
        self.steps = 0
        """Steps taken by the sending thread, with and without records."""
        self.encoded = 0
        """Messages encoded so far."""

    def add(self, served: ServedTail) -> None:
        """Serves a tail until its call ends. Raises RuntimeError if no thread can be started."""
        throttle_ms = served.throttle(0)  # for what its client's earlier calls were sent
        with self._changed:
            is_over = self._is_over
            if not is_over:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="sparklog-tails", daemon=True)
                    thread.start()
                    self._thread = thread
                self._tails.add(served)
                served.sent_at = self._clock.monotonic()
                self._schedule_heartbeat(served)
                self._throttle(served, throttle_ms)
                self._want(served)
        if is_over:
            self._end(served, None)

    def wake(self, served: ServedTail) -> None:
        """Has the tail take a step: it may have records, or its client has read. Never blocks."""
        with self._changed:
            self._want(served)

    def progress(self, served: ServedTail) -> None:
        """Continues with a tail whose message is sent or whose call has ended. Never blocks."""
        with self._changed:
            served.is_sending = False
            self._keeping.discard(served)
            self._want(served)

    def close(self) -> None:
        """Ends all tails, and returns when their threads have ended."""
        with self._changed:
            self._is_over = True
            for each in self._tails:
                each.is_sending = False
                self._want(each)
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join()
        self._readers.shutdown()

    def _want(self, served: ServedTail) -> None:
        served.is_wanted = True
        self._offer(served)

    def _offer(self, served: ServedTail) -> None:
        """Queues a tail for its next step, if it needs one and may take it."""
        if not served.is_wanted or served not in self._tails:
            return
        is_throttled = served.throttled_until and not served.is_idle_due
        waits = served.is_sending or ((served.is_waiting or is_throttled) and self._is_open(served))
        if not (served.is_busy or waits or served.is_ready):
            served.is_ready = True
            self._ready.append(served)
            self._changed.notify()

    # -------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        next_step = self._clock.monotonic()
        while (served := self._next()) is not None:
            self.steps += 1
            self._step(served)
            now = self._clock.monotonic()
            next_step = max(next_step, now) + TAIL_SECONDS
            if next_step - now >= _PAUSE_SECONDS:
                self._clock.sleep(next_step - now)

    def _next(self) -> ServedTail | None:
        """Returns the next tail that is due; None when all have ended."""
        with self._changed:
            self._want_due()
            while not self._ready:
                if self._is_over and not self._tails:
                    return None
                due = [each[0][0] for each in (self._heartbeats, self._throttled) if each]
                self._clock.wait_until(self._changed, min(due, default=None))
                self._want_due()
            served = self._ready.popleft()
            served.is_ready = served.is_wanted = False
            served.is_busy = True
            return served

    def _want_due(self) -> None:
        now = self._clock.monotonic()
        while self._throttled and self._throttled[0][0] <= now:
            until, _, served = heapq.heappop(self._throttled)
            if served.throttled_until == until:
                served.throttled_until = 0.0
                self._want(served)
        while self._heartbeats and self._heartbeats[0][0] <= now:
            _, _, served = heapq.heappop(self._heartbeats)
            if served not in self._tails:
                continue
            if served.sent_at + served.idle_seconds <= now:
                served.is_idle_due = True
                served.sent_at = now
                self._want(served)
            self._schedule_heartbeat(served)

    def _schedule_heartbeat(self, served: ServedTail) -> None:
        due = served.sent_at + served.idle_seconds
        heapq.heappush(self._heartbeats, (due, next(self._numbers), served))

    def _step(self, served: ServedTail) -> None:
        """Sends what the tail has in memory, or has a reading thread send one batch.

        A tail with a lot in memory takes several steps, because the others wait for this thread.
        """
        sent_bytes = 0
        try:
            if not served.is_granted:
                self._release(served)
            served.stream.advance()
            while self._is_open(served):
                if served.throttled_until:
                    self._send_idle(served)
                    self._rest(served)
                    return
                message = self._known(served)
                if message is None and not self._is_quick(served):
                    self._readers.submit(self._slow_step, served)
                    return
                if message is None:
                    message = self._next_message(served, may_wait=False)
                if message is None and not self._is_quick(served):
                    continue  # the next partition in turn is on disk
                if message is None or not self._send(served, message):
                    self._rest(served)
                    return
                sent_bytes += sum(map(len, message))
                if sent_bytes >= TAIL_STEP_BYTES:
                    self.wake(served)
                    self._rest(served)
                    return
        except BaseException as error:
            self._end(served, error)
        else:
            self._end(served, None)

    def _send_idle(self, served: ServedTail) -> None:
        """Sends the message of an idle tail, if it is due, to a client that is throttled."""
        is_due, served.is_idle_due = served.is_idle_due, False
        if is_due:
            self._send(served, served.idle)

    def end_throttles(self) -> None:
        """Ends all throttles, as quotas have changed. Never blocks."""
        with self._changed:
            for _, _, served in self._throttled:
                served.throttled_until = 0.0
                self._want(served)
            self._throttled.clear()

    def _slow_step(self, served: ServedTail) -> None:
        try:
            message = self._next_message(served, may_wait=True)
            if message is not None and self._send(served, message):
                self.wake(served)
        except BaseException as error:
            self._end(served, error)
        else:
            self._rest(served)

    def _rest(self, served: ServedTail) -> None:
        with self._changed:
            served.is_busy = False
            self._offer(served)

    def _is_quick(self, served: ServedTail) -> bool:
        is_quick = served.tail.is_quick()
        return is_quick and (served.before is None or served.tail.place() is None)

    def _is_open(self, served: ServedTail) -> bool:
        return not (self._is_over or served.call.is_dead)

    def _end(self, served: ServedTail, failure: BaseException | None) -> None:
        served.ending.close()
        served.finish(failure)
        with self._changed:  # the thread ends after the last tail
            self._tails.discard(served)
            self._keeping.discard(served)
            if served.throttled_until:
                self._throttled = [each for each in self._throttled if each[2] is not served]
                heapq.heapify(self._throttled)
            self._changed.notify()
        self._release(served)  # after memory can last be granted to it

    # -------------------------------------------------------------------------- memory

    def _hold(self, served: ServedTail, size: int) -> bool:
        """Acquires memory for the next message. Returns False if the tail has to wait for it."""
        if size <= served.held_bytes:
            return True
        self._release(served)
        served.is_waiting = True
        if not self._reply_memory.request(size, lambda: self._granted(served, size)):
            return False
        served.is_waiting, served.held_bytes = False, size
        return True

    def _granted(self, served: ServedTail, size: int) -> bool:
        """Accepts the memory that a tail has waited for, unless it has ended. Never blocks."""
        with self._changed:
            is_served = served in self._tails
            if is_served:
                served.is_waiting, served.held_bytes, served.is_granted = False, size, True
                self._want(served)
        return is_served

    def _release(self, served: ServedTail) -> None:
        size, served.held_bytes, served.is_granted = served.held_bytes, 0, False
        if size:
            self._reply_memory.release(size)

    # -------------------------------------------------------------------------- messages

    def _send(self, served: ServedTail, message: Sequence[Bytes]) -> bool:
        """Sends as much of a message as the client accepts. Returns whether that was all of it."""
        served.sent_at = self._clock.monotonic()
        served.stream.waits(sum(map(len, message)))
        served.is_sending, served.is_granted = True, False
        if message is not served.idle:
            self._throttle(served, served.throttle(sum(map(len, message))))
        if not served.call.write_soon(message):
            if not self._keeps_rows(served):
                served.tail.rest()
            return False
        served.is_sending = False
        self._release(served)
        served.stream.advance()
        return True

    def _throttle(self, served: ServedTail, throttle_ms: int) -> None:
        if not throttle_ms:
            return
        with self._changed:
            served.throttled_until = self._clock.monotonic() + throttle_ms / 1e3
            entry = served.throttled_until, next(self._numbers), served
            heapq.heappush(self._throttled, entry)
            self._changed.notify()  # of an earlier deadline

    def _keeps_rows(self, served: ServedTail) -> bool:
        """Returns whether a tail that waits for its client keeps the rows of later messages.

        There may be many, and no memory was granted for them. Rereading them for each message takes
        several times as long, so a few tails keep them: those of clients that read continuously.
        """
        with self._changed:
            if served.is_sending and len(self._keeping) < TAILS_KEEPING:
                self._keeping.add(served)
            return not served.is_sending or served in self._keeping

    def _known(self, served: ServedTail) -> Sequence[Bytes] | None:
        """Returns the next message if another tail has just sent it too, and skips its rows."""
        place = served.tail.place()
        if place is None or served.before is not None:
            return None
        known = self._cache.get((place, served.shape))
        if known is None:
            return None
        served.tail.count(sum(map(len, known[1])))
        served.tail.skip(known[0])
        return known[1]

    def _next_message(self, served: ServedTail, *, may_wait: bool) -> Sequence[Bytes] | None:
        batch = served.tail.next(only_quick=not may_wait)
        if batch is None:
            if not served.tail.is_quick():
                return None
            is_due, served.is_idle_due = served.is_idle_due, False
            return served.idle if is_due else None
        rows, end = batch.rows, batch.end
        size = rows.nbytes
        if may_wait and size > limits.FLIGHT_FREE_ROWS_BYTES and not self._hold(served, size):
            served.tail.again()  # the batch is reread once there is memory
            return None
        if served.before is not None:
            served.before(batch)
        served.tail.count(size)
        header = flight_messages.TailHeader(
            topic=batch.topic,
            partition=batch.partition,
            first=batch.first,
            end=batch.end,
            high_watermark=batch.high_watermark,
        )
        del batch
        message = encoded(rows, header)
        self.encoded += 1
        if size <= _CACHED_BYTES and not may_wait:
            if len(self._cache) >= _CACHED_MESSAGES:
                self._cache.popitem(last=False)
            # The batch may be from a different partition than the one whose turn it was.
            self._cache[served.tail.read, served.shape] = end, message
        return message


def encoded(rows: pa.RecordBatch, header: flight_messages.TailHeader) -> Sequence[Bytes]:
    """Returns the message for a batch."""
    return protocol.write_flight_data(rows.serialize(), flight_messages.encode(header))
