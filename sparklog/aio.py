"""The asyncio client: `sparklog.aio.connect` opens a log whose calls are awaited.

    import asyncio
    import sparklog.aio

    async def main() -> None:
        async with sparklog.aio.connect("./data") as log:
            await log.create_topic("flights", partitions=4)
            async with log.producer() as producer:
                metadata = await producer.send("flights", b"UA 11", key=b"UA")
                print(metadata.partition, metadata.offset)
            async with log.consumer("flights", follow=False) as consumer:
                async for record in consumer:
                    print(record.offset, record.value)

    asyncio.run(main())

Design:

- It wraps the threaded client, and adds no protocol of its own. Parameters, results and errors are
  those of `sparklog.Log`, `sparklog.Producer` and `sparklog.Consumer`.
- No call blocks the event loop. Calls to a log run on a few threads of that log; each producer or
  consumer has its own thread, which runs its calls one at a time, in the order in which they were
  made. Acks arrive from the producer's threads through `loop.call_soon_threadsafe`.
- Cancellation loses no record. A thread cannot be interrupted, so a cancelled call runs to its end:
  a cancelled change to a topic, or a cancelled `send`, may take effect. Records of a cancelled
  `poll` are returned by the next one. `commit` and `close` count a record only once it has been
  returned to the caller.
- A consumer waits on its thread for at most 0.25 s at a time, so closing it never waits for new
  records. The rest of a close takes as long as that of the wrapped client: a last commit, or the
  timeout that was passed to the producer. A cancelled close continues in the background.
- The objects belong to the event loop in which they are first used. `on_delivery`, `on_assign`,
  `on_revoke` and `on_lost` are called on other threads, and must use `loop.call_soon_threadsafe` to
  reach it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from datetime import datetime
from os import PathLike
from types import TracebackType
from typing import Any, Concatenate, Final, Generic, ParamSpec, Protocol, Self, TypeVar

from sparklog import connecting, errors
from sparklog.client import arguments
from sparklog.client.consumer.consumer import Consumer as BlockingConsumer
from sparklog.client.consumer.reading import Record
from sparklog.client.consumer.statistics import ConsumerStatistics
from sparklog.client.log import Log as BlockingLog
from sparklog.client.offsets import OffsetAndMetadata, Point, Start, TopicPartition
from sparklog.client.producer.batch import AppendedRange, RecordFuture, RecordMetadata
from sparklog.client.producer.producer import Producer as BlockingProducer
from sparklog.client.producer.statistics import ProducerStatistics

__all__ = ["Consumer", "Log", "Producer", "connect"]

_LOG_THREADS: Final = 4
_POLL_SECONDS: Final = 0.25
"""Maximum wait on a consumer's thread."""

P = ParamSpec("P")
R = TypeVar("R")


class _Closable(Protocol):
    async def close(self) -> None: ...


Opened = TypeVar("Opened", bound=_Closable)


class Opening(Generic[Opened]):
    """An object to be opened with `await`, or with `async with`, which closes it at the end."""

    def __init__(self, open_it: Callable[[], Coroutine[Any, Any, Opened]]) -> None:
        self._open = open_it
        self._opened: Opened | None = None

    def __await__(self) -> Generator[Any, None, Opened]:
        return self._open().__await__()

    async def __aenter__(self) -> Opened:
        self._opened = await self._open()
        return self._opened

    async def __aexit__(self, *_: object) -> None:
        if self._opened is not None:
            await self._opened.close()


@arguments.suggests_keywords
def connect(
    target: str | PathLike[str] | Sequence[str] | None = None,
    *,
    detached: bool = False,
    kafka: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> Opening[Log]:
    """Opens a log: `log = await connect(…)`, or `async with connect(…) as log`.

    Parameters and errors are those of `sparklog.connect`. If the call is cancelled, the log is
    closed in the background once it is open.
    """

    async def open_log() -> Log:
        threads = ThreadPoolExecutor(_LOG_THREADS, "sparklog-aio")
        opening = threads.submit(
            connecting.connect,
            target,
            detached=detached,
            kafka=kafka,
            storage_options=storage_options,
        )
        try:
            return Log(await asyncio.shield(asyncio.wrap_future(opening)), threads)
        except asyncio.CancelledError:
            # Even if the event loop ends first: this callback needs no loop.
            opening.add_done_callback(lambda done: _close_unused(done, threads))
            raise
        except BaseException:
            threads.shutdown(wait=False)
            raise

    return Opening(open_log)


def _close_unused(opening: Future[BlockingLog], threads: ThreadPoolExecutor) -> None:
    if opening.exception() is None:
        threads.submit(opening.result().close)
    threads.shutdown(wait=False)


def _submit(threads: Executor, call: Callable[[], R]) -> asyncio.Future[R]:
    return asyncio.get_running_loop().run_in_executor(threads, call)


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Awaits `work`, which continues if the caller is cancelled."""
    task = asyncio.ensure_future(work)
    _running.add(task)
    task.add_done_callback(_running.discard)
    await asyncio.shield(task)


_running: set[asyncio.Task[None]] = set()
"""The event loop itself holds only weak references to tasks."""


# ------------------------------------------------------------------------------ the log


def _awaited(
    method: Callable[Concatenate[BlockingLog, P], R],
) -> Callable[Concatenate[Log, P], Coroutine[Any, Any, R]]:
    """The method of `BlockingLog`, run on a thread of the log."""

    @functools.wraps(method)
    async def call(self: Log, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._check_open()
        return await _submit(self._threads, functools.partial(method, self._log, *args, **kwargs))

    return call


def _opens_producer(
    method: Callable[Concatenate[BlockingLog, P], BlockingProducer],
) -> Callable[Concatenate[Log, P], Producer]:
    @functools.wraps(method)
    def call(self: Log, /, *args: P.args, **kwargs: P.kwargs) -> Producer:
        self._check_open()
        producer = Producer(method(self._log, *args, **kwargs))
        self._producers.add(producer)
        return producer

    return call


def _opens_consumer(
    method: Callable[Concatenate[BlockingLog, P], BlockingConsumer],
) -> Callable[Concatenate[Log, P], Consumer]:
    @functools.wraps(method)
    def call(self: Log, /, *args: P.args, **kwargs: P.kwargs) -> Consumer:
        self._check_open()
        consumer = Consumer(functools.partial(method, self._log, *args, **kwargs))
        self._consumers.add(consumer)
        return consumer

    return call


class Log:
    """A client for one cluster; `sparklog.aio.connect` opens it.

    Its methods are those of `sparklog.Log`, to be awaited. `producer` and `consumer` return
    immediately. A consumer connects on its first use, which raises any error from opening it. After
    `close` all of them raise `BadRequest`.
    """

    def __init__(self, log: BlockingLog, threads: ThreadPoolExecutor) -> None:
        self._log = log
        self._threads = threads
        self._producers: weakref.WeakSet[Producer] = weakref.WeakSet()
        self._consumers: weakref.WeakSet[Consumer] = weakref.WeakSet()
        self._is_closed = False

    @property
    def root(self) -> str:
        """The root or address that was given to `connect`."""
        return self._log.root

    producer = _opens_producer(BlockingLog.producer)
    consumer = _opens_consumer(BlockingLog.consumer)

    read = _awaited(BlockingLog.read)
    propose_columns = _awaited(BlockingLog.propose_columns)
    offsets_for_times = _awaited(BlockingLog.offsets_for_times)
    flush_to_table = _awaited(BlockingLog.flush_to_table)

    create_topic = _awaited(BlockingLog.create_topic)
    topics = _awaited(BlockingLog.topics)
    describe = _awaited(BlockingLog.describe)
    alter = _awaited(BlockingLog.alter)
    add_partitions = _awaited(BlockingLog.add_partitions)
    compact = _awaited(BlockingLog.compact)
    delete_records = _awaited(BlockingLog.delete_records)
    delete_topic = _awaited(BlockingLog.delete_topic)

    groups = _awaited(BlockingLog.groups)
    describe_group = _awaited(BlockingLog.describe_group)
    group_offsets = _awaited(BlockingLog.group_offsets)
    lag = _awaited(BlockingLog.lag)
    commit_group_offsets = _awaited(BlockingLog.commit_group_offsets)
    forget_group_offsets = _awaited(BlockingLog.forget_group_offsets)
    delete_group = _awaited(BlockingLog.delete_group)

    cluster = _awaited(BlockingLog.cluster)
    status = _awaited(BlockingLog.status)
    figures = _awaited(BlockingLog.figures)

    def _check_open(self) -> None:
        # Nothing would close a producer that is opened while the log closes.
        if self._is_closed:
            raise errors.BadRequest(reason="this connection is closed")

    async def close(self) -> None:
        """Closes the consumers, flushes and closes the producers, and closes the connection."""
        if not self._is_closed:
            self._is_closed = True
            await _to_its_end(self._close())

    async def _close(self) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                stack.push_async_callback(self._in_thread, self._log.close)
                # In reverse order: consumers, producers, and finally the log.
                for producer in list(self._producers):
                    stack.push_async_callback(producer.close)
                for consumer in list(self._consumers):
                    stack.push_async_callback(consumer.close)
        finally:
            self._threads.shutdown(wait=False)

    async def _in_thread(self, call: Callable[[], R]) -> R:
        return await _submit(self._threads, call)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"aio.Log({self._log.root!r})"


# ------------------------------------------------------------------------------ the producer


def _sends(
    method: Callable[Concatenate[BlockingProducer, P], RecordFuture],
) -> Callable[Concatenate[Producer, P], Coroutine[Any, Any, RecordMetadata]]:
    """Wraps `BlockingProducer.send`, and awaits its ack."""

    @functools.wraps(method)
    async def send(self: Producer, /, *args: P.args, **kwargs: P.kwargs) -> RecordMetadata:
        call = functools.partial(method, self._producer, *args, **kwargs)
        return await (await self._in_thread(call))

    return send


class Producer:
    """Sends records. Any number of tasks of one event loop may share it.

    `await producer.send(…)` returns the record's `RecordMetadata` once it is durable. Records sent
    by several tasks, for example with `asyncio.gather`, are batched, in the order of the calls.
    """

    def __init__(self, producer: BlockingProducer) -> None:
        self._producer = producer
        self._thread = ThreadPoolExecutor(1, "sparklog-aio-producer")
        self._is_closed = False

    send = _sends(BlockingProducer.send)

    async def send_table(
        self, topic: str, data: Any, *, as_json: bool = False, key: str | None = None
    ) -> list[AppendedRange]:
        """Sends the rows of a table, and returns their offsets once all are durable.

        Parameters and errors are those of `sparklog.Producer.send_table` and of its result.
        """
        send = functools.partial(self._producer.send_table, topic, data, as_json=as_json, key=key)
        future = await self._in_thread(send)
        return await asyncio.to_thread(future.result)  # the next record need not wait for it

    def statistics(self) -> ProducerStatistics:
        """Returns counts for all topics together, even after `close`."""
        return self._producer.statistics()

    async def flush(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Waits until all records sent so far are acked or have failed.

        Raises `StillSending` after `timeout` seconds; None: no limit.
        """
        await self._in_thread(functools.partial(self._producer.flush, timeout))

    async def close(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Flushes for up to `timeout` seconds, gives up remaining records, and stops the threads.

        Raises `OutcomeUnknown` if records were given up: some of them may be in the log.
        """
        if not self._is_closed:
            self._is_closed = True
            await _to_its_end(self._close(timeout))

    async def _close(self, timeout_seconds: float | None) -> None:
        try:
            await _submit(self._thread, functools.partial(self._producer.close, timeout_seconds))
        finally:
            self._thread.shutdown(wait=False)

    async def _in_thread(self, call: Callable[[], R]) -> R:
        if self._is_closed:
            raise errors.BadRequest(reason="the producer is closed")
        return await _submit(self._thread, call)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


# ------------------------------------------------------------------------------ the consumer


class Consumer:
    """Iterates over the records of topics: `async for record in consumer`.

    Only one task uses it at a time; calls from others wait their turn.
    """

    def __init__(self, open_consumer: Callable[[], BlockingConsumer]) -> None:
        self._open = open_consumer
        self._thread = ThreadPoolExecutor(1, "sparklog-aio-consumer")
        self._consumer: BlockingConsumer | None = None
        self._turn = asyncio.Lock()
        self._records: deque[Record] = deque()
        """Polled but not yet returned to the caller."""
        self._polling: asyncio.Future[tuple[list[Record], bool]] | None = None
        """A poll on the thread; after a cancellation its result goes to the next caller."""
        self._is_closed = False

    # -------------------------------------------------------------------------- reading

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Record:
        """Returns the next record; stops if `follow` is False and the end is reached."""
        async with self._turn:
            if not self._records:
                await self._fill(None)
            if not self._records:
                raise StopAsyncIteration
            return self._records.popleft()

    async def poll(self, timeout: float | None = None) -> list[Record]:  # noqa: ASYNC109
        """Returns up to `max_poll_rows` records, as soon as there are any.

        Args:
            timeout: seconds to wait for the first record; None: no limit.

        Returns:
            An empty list if no record arrived in time, or if the end was reached.

        Raises what `sparklog.Consumer.poll` raises.
        """
        seconds = arguments.timeout("timeout", timeout)
        deadline = None if seconds is None else time.monotonic() + seconds
        async with self._turn:
            if not self._records:
                await self._fill(deadline)
            records = list(self._records)
            self._records.clear()
            return records

    async def _fill(self, deadline: float | None) -> None:
        """Polls until there are records, the end is reached, or the deadline has passed."""
        while True:
            if self._is_closed:
                raise errors.BadRequest(reason="the consumer is closed")
            if self._polling is None:
                left_seconds = _POLL_SECONDS
                if deadline is not None:
                    left_seconds = min(max(deadline - time.monotonic(), 0), left_seconds)
                self._polling = self._call(functools.partial(_poll, seconds=left_seconds))
            records, is_at_end = await self._polled()
            self._records.extend(records)
            is_over = deadline is not None and time.monotonic() >= deadline
            if records or is_at_end or is_over:
                return

    async def _polled(self) -> tuple[list[Record], bool]:
        assert self._polling is not None
        try:
            result = await asyncio.shield(self._polling)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._polling = None
            raise
        self._polling = None
        return result

    # -------------------------------------------------------------------------- positions

    async def position(self, topic: str, partition: int = 0) -> int:
        """Returns the offset after the last record that was returned."""
        async with self._turn:
            await self._finish_polling()
            position = await self._call(lambda consumer: consumer.position(topic, partition))
            return self._first_waiting().get((topic, partition), position)

    async def seek(self, topic: str, partition: int, offset: Point) -> None:
        """Continues at `offset`. Raises what `sparklog.Consumer.seek` raises."""
        async with self._turn:
            await self._finish_polling()
            await self._call(lambda consumer: consumer.seek(topic, partition, offset))
            place = topic, partition
            self._records = deque(
                each for each in self._records if (each.topic, each.partition) != place
            )

    async def pause(self, topic: str, *partitions: int) -> None:
        """Stops returning records of these partitions, or of the whole topic."""
        async with self._turn:
            await self._finish_polling()

            def pause(consumer: BlockingConsumer) -> None:
                self._give_back(consumer)
                consumer.pause(topic, *partitions)

            await self._call(pause)

    async def resume(self, topic: str, *partitions: int) -> None:
        """Undoes `pause`."""
        await self._in_turn(lambda consumer: consumer.resume(topic, *partitions))

    async def beginning_offsets(self) -> dict[TopicPartition, int]:
        """Returns the log start offset of each partition."""
        return await self._in_turn(BlockingConsumer.beginning_offsets)

    async def end_offsets(self) -> dict[TopicPartition, int]:
        """Returns the high watermark of each partition."""
        return await self._in_turn(BlockingConsumer.end_offsets)

    async def offsets_for_times(self, when: datetime | str) -> dict[TopicPartition, int]:
        """Returns, by partition, the offset of the first record at `when` or later, or the end."""
        return await self._in_turn(lambda consumer: consumer.offsets_for_times(when))

    # -------------------------------------------------------------------------- the group

    async def assignment(self) -> list[TopicPartition]:
        """Returns the partitions that the consumer reads, sorted."""
        return await self._in_turn(lambda consumer: consumer.assignment)

    async def assign(
        self, partitions: Iterable[TopicPartition], start: Start | None = None
    ) -> None:
        """From now on reads only these partitions. Not for consumers in a group.

        Parameters and errors are those of `sparklog.Consumer.assign`.
        """
        async with self._turn:
            await self._finish_polling()

            def assign(consumer: BlockingConsumer) -> None:
                self._give_back(consumer)
                consumer.assign(partitions, start)

            await self._call(assign)

    async def commit(
        self,
        offsets: Mapping[TopicPartition, int | OffsetAndMetadata | tuple[int, str]] | None = None,
    ) -> None:
        """Commits offsets to the group.

        Args:
            offsets: by (topic, partition), the next offset to be read, optionally with a string;
                None: after the last record that was returned, for every partition.

        Raises what `sparklog.Consumer.commit` raises.
        """
        async with self._turn:
            await self._finish_polling()
            waiting = self._first_waiting()

            def commit(consumer: BlockingConsumer) -> None:
                if offsets is None and waiting:
                    positions = {each: consumer.position(*each) for each in consumer.assignment}
                    consumer.commit(positions | waiting)
                else:
                    consumer.commit(offsets)

            await self._call(commit)

    async def committed(self) -> dict[TopicPartition, int]:
        """Returns the offsets that the group has committed, by (topic, partition)."""
        return await self._in_turn(BlockingConsumer.committed)

    async def committed_metadata(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Returns the offsets that the group has committed, with their strings."""
        return await self._in_turn(BlockingConsumer.committed_metadata)

    async def statistics(self) -> ConsumerStatistics:
        """Returns its statistics. Records waiting for the next `poll` count as returned."""
        return await self._in_turn(BlockingConsumer.statistics)

    # -------------------------------------------------------------------------- closing

    async def close(self) -> None:
        """Commits, if `auto_commit` is set, leaves the group, and stops the thread."""
        await self.__aexit__(None, None, None)

    async def _close(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        def close() -> None:
            if self._consumer is not None:
                self._give_back(self._consumer)
                self._consumer.__exit__(kind, error, traceback)

        async with self._turn:
            try:
                with contextlib.suppress(Exception):  # of a poll whose caller was cancelled
                    await self._finish_polling()
                await _submit(self._thread, close)
            finally:
                self._thread.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        await self._in_turn(lambda _: None)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes; after an error the last records polled are not committed."""
        if not self._is_closed:
            self._is_closed = True
            await _to_its_end(self._close(kind, error, traceback))

    # -------------------------------------------------------------------------- the thread

    async def _in_turn(self, call: Callable[[BlockingConsumer], R]) -> R:
        async with self._turn:
            return await self._call(call)

    def _call(self, call: Callable[[BlockingConsumer], R]) -> asyncio.Future[R]:
        def run() -> R:
            if self._consumer is None:
                self._consumer = self._open()
            return call(self._consumer)

        try:
            return _submit(self._thread, run)
        except RuntimeError as error:  # the thread has ended
            raise errors.BadRequest(reason="the consumer is closed") from error

    async def _finish_polling(self) -> None:
        """Collects the records of a poll whose caller was cancelled."""
        if self._polling is not None:
            # The next poll raises it again; a seek past the record must not.
            with contextlib.suppress(errors.DeserializationFailed):
                records, _ = await self._polled()
                self._records.extend(records)

    def _first_waiting(self) -> dict[TopicPartition, int]:
        """The first offset of each partition that was polled but not returned."""
        found: dict[TopicPartition, int] = {}
        for each in self._records:
            found.setdefault((each.topic, each.partition), each.offset)
        return found

    def _give_back(self, consumer: BlockingConsumer) -> None:
        """Moves the positions back to the records not yet returned, and drops these records."""
        for (topic, partition), offset in self._first_waiting().items():
            with contextlib.suppress(errors.BadOption):  # it is no longer assigned
                consumer.seek(topic, partition, offset)
        self._records.clear()


def _poll(consumer: BlockingConsumer, *, seconds: float) -> tuple[list[Record], bool]:
    """Returns records, and True if the consumer has reached its end."""
    deadline = time.monotonic() + seconds
    records = consumer.poll(seconds)
    # A poll without records returns before its timeout only at the end.
    return records, not records and time.monotonic() < deadline


def __dir__() -> list[str]:
    return sorted(__all__)
