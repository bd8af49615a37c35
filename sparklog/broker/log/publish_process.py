"""The broker's side of the publishing process: starts it, sends it work, and copes without it.

Because of the GIL, publishing many topics would take the time that acks need. The data files and
commits of light topics are therefore encoded and put by a separate process, once many of them are
waiting, or once the broker leads so many partitions that this may happen at any time. All decisions
are made, and the known states of the tables kept, in the broker.

The process may exit or hang at any moment. The broker then kills it, rewrites the files under
different names, and claims the commits, as it does after any put that got no response: a commit
that lands late has the same bytes. Until another process has started, the broker does everything
itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import msgspec
import pyarrow as pa
import structlog

from sparklog import limits
from sparklog.broker.backoff import RetrySchedule
from sparklog.broker.log.hot_tail import HotTail
from sparklog.broker.log.publish_worker import (
    Answer,
    PutAll,
    WorkerLost,
    WriteTogether,
    decode_answer,
    encode,
    outcome_of,
    receive,
)
from sparklog.broker.log.run_writer import RunWriter, WrittenRun
from sparklog.clock import Clock
from sparklog.storage.objects import Payload, PutUnresolved, SyncFailed
from sparklog.storage.objects.base import pieces
from sparklog.version import VERSION

_WANTED_OBJECTS = 160  # waiting files and commits at which a process is started
_WANTED_PARTITIONS = 1_000  # led by the broker, at which it is started before any wait
_WANTED_AFTER_SECONDS = 5.0  # for which there must be this many of either before it is started
_START_SECONDS = 60.0
REQUEST_SECONDS = 20.0  # for one request
REQUEST_RUNS = 512  # written per request; each is one or more files
_REQUEST_BYTES = 16 * limits.MIB  # of Kafka batches in one request; the process reads the others
_END_SECONDS = 1.0  # in which it can exit on its own before it is killed
STDERR_BYTES = 64 * limits.KIB  # of its last output, for the log; the capacity of a pipe
RETRY_MAX_SECONDS = 600.0  # the longest pause before another process is started
_STEADY_SECONDS = (
    60.0  # of running, after which the loss of a process is again treated as the first
)

_log = structlog.get_logger("sparklog.publisher")
_MODULE: Final = "sparklog.broker.log.publish_worker"


class PublishingWorker(Protocol):
    """A worker in a separate process."""

    def is_ready(self) -> bool:
        """Returns whether it accepts requests; raises `WorkerLost` if it never will."""
        ...

    def ask(self, request: WriteTogether | PutAll) -> Answer:
        """Returns its answer. Raises `WorkerLost`."""
        ...

    def end(self) -> None:
        """Asks it to exit, kills it if it does not, and returns once it has exited."""
        ...


class WorkerProcess:
    """A worker in a child process."""

    def __init__(self, root: str) -> None:
        self._connection, theirs = socket.socketpair()
        stderr, their_stderr = os.pipe()
        for end in (stderr, their_stderr):
            os.set_blocking(end, False)  # neither process waits for the other
        self._stderr = os.fdopen(stderr, "rb", buffering=0)
        self._written = b""
        """The end of its output to standard error."""
        try:
            self._process = subprocess.Popen(
                # Modules are loaded from where ours are, not from the working directory (`-P`).
                [sys.executable, "-P", "-m", _MODULE, root, str(theirs.fileno()), VERSION],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=their_stderr,  # ours may be a log file, which is rotated
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))},
                # The terminal's signals are for the broker. In its own session, the process would
                # get as much CPU time as all brokers of a session together.
                process_group=0,
            )
        except OSError:
            self._connection.close()
            self._stderr.close()
            raise
        finally:
            theirs.close()
            os.close(their_stderr)
        self._readable = select.poll()  # `select.select` supports descriptors below 1,024 only
        self._readable.register(self._connection, select.POLLIN)
        self._is_ready = False
        self._ready_by = time.monotonic() + _START_SECONDS

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_ready(self) -> bool:
        if not self._is_ready and self._readable.poll(0):
            receive(self._connection, self._ready_by)
            self._is_ready = True
        if not self._is_ready and time.monotonic() > self._ready_by:
            raise WorkerLost("it does not start")
        return self._is_ready

    def ask(self, request: WriteTogether | PutAll) -> Answer:
        deadline = time.monotonic() + REQUEST_SECONDS
        self._read_stderr()
        try:
            self._connection.settimeout(REQUEST_SECONDS)
            self._connection.sendall(encode(request))
            return decode_answer(receive(self._connection, deadline))
        except (OSError, msgspec.MsgspecError) as error:
            raise WorkerLost(str(error) or repr(error)) from error

    def end(self) -> None:
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may be writing a traceback
            self._process.wait(_END_SECONDS)
        self._process.kill()
        try:
            self._process.wait(REQUEST_SECONDS)
        except subprocess.TimeoutExpired:  # it is waiting for a disk that does not respond
            _log.warning("the publishing process does not end", pid=self._process.pid)
        self._read_stderr()
        self._stderr.close()
        if self._written:
            text = self._written.decode("utf-8", "replace")
            _log.warning("the publishing process wrote to stderr", pid=self._process.pid, text=text)

    def _read_stderr(self) -> None:
        data = self._stderr.read(STDERR_BYTES) or b""
        self._written = (self._written + data)[-STDERR_BYTES:]


class PublishProcess:
    """Writes files and commits of several topics together, in a separate process if there is one.

    One caller at a time.
    """

    def __init__(
        self,
        hot: HotTail,
        start: Callable[[], PublishingWorker],
        *,
        clock: Clock,
        objects: int = _WANTED_OBJECTS,
        partitions: int = _WANTED_PARTITIONS,
        after_seconds: float = _WANTED_AFTER_SECONDS,
        interval_seconds: float = limits.PUBLISH_INTERVAL_SECONDS,
    ) -> None:
        """Starts a process once `objects` files and commits have been waiting for `after_seconds`.

        Also once the broker has led `partitions` for that long. Sooner if there are more of either:
        after half the time for twice as many.
        `interval_seconds` is the time between two publications of a topic, before it is stretched.
        """
        self._hot = hot
        self._start = start
        self._objects = objects
        self._partitions = partitions
        self._after_seconds = after_seconds
        self._again_seconds = max(after_seconds, 2 * limits.PUBLISH_STRETCH * interval_seconds)
        """The longest pause in sustained load: files wait for an interval before each check."""
        self._busy_since = self._busy_at = -float("inf")
        """When there were this many, first and last, in monotonic seconds."""
        self._worker: PublishingWorker | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        """Held to start or forbid a process: a failing broker calls `close` in another thread."""
        self._clock = clock
        self._started_at = 0.0
        """When the current process was started, in monotonic seconds."""
        self._backoff = RetrySchedule(clock, first_seconds=1.0, most_seconds=RETRY_MAX_SECONDS)
        self.starts = 0
        """The number of processes that have been started."""
        self._ended_cpu_seconds = self._cpu_seconds = 0.0
        """CPU time of the processes that have ended, and of the current one."""
        self.requests = Counter[str]()
        """Storage operations of all processes, by kind."""
        self.resident_bytes = 0
        """Memory of the current process after its last answer; 0 without one."""

    def look(self, waiting: int = 0, *, partitions: int = 0) -> None:
        """Starts the process once the load has justified it for long enough.

        `waiting`: the number of waiting files and commits; `partitions`: of led partitions.

        A start takes a second of CPU time. A broker that has just taken over partitions has many
        files to write for a moment, and clients that wait for it. One that leads very many has the
        process before they are busy.
        """
        worth = max(waiting / self._objects, partitions / self._partitions)
        if self._worker is not None or worth < 1 or self._backoff.is_waiting(""):
            return
        now = self._clock.monotonic()
        if now - self._busy_at > self._again_seconds:
            self._busy_since = now
        self._busy_at = now
        if now - self._busy_since < self._after_seconds / worth:
            return
        with self._lock:
            if self._is_closed:
                return
            self.starts += 1
            self._started_at = self._clock.monotonic()
            try:
                self._worker = self._start()
            except OSError as error:
                self._note_failure(str(error))

    @property
    def cpu_seconds(self) -> float:
        """The CPU time of all processes that have been started, as of their last answers."""
        return self._ended_cpu_seconds + self._cpu_seconds

    @property
    def is_started(self) -> bool:
        """True if the process accepts work, or soon will."""
        return self._worker is not None

    @property
    def is_ready(self) -> bool:
        """True if the process accepts work."""
        worker = self._worker
        try:
            return worker is not None and worker.is_ready()
        except WorkerLost as error:
            self._lose(str(error))
            return False

    def write_together(
        self, topics: Sequence[Sequence[WrittenRun]], alone: RunWriter
    ) -> list[Exception | None]:
        """See `RunWriter.write_together`; `alone` writes if there is no process."""
        outcomes: list[Exception | None] = []
        for some in _for_requests(topics):
            outcomes += self._write_some(some, alone)
        return outcomes

    def _write_some(
        self, topics: Sequence[Sequence[WrittenRun]], alone: RunWriter
    ) -> list[Exception | None]:
        request = WriteTogether(
            [[each.run for each in runs] for runs in topics], self._batches(topics)
        )
        answer = self._ask(request)
        if answer is None:
            return alone.write_together(topics)
        for runs, files in zip(topics, answer.files, strict=True):
            for each, of_run in zip(runs, files, strict=True):
                each.files.extend(of_run)
                each.count = len(each.run.entries)
        return [
            outcome_of(found, runs[0].run.topic)
            for runs, found in zip(topics, answer.outcomes, strict=True)
        ]

    def put_all_new(self, objects: Sequence[tuple[str, Payload]]) -> list[Exception | None]:
        """See `Store.put_all_new`. If the process is lost, each put's outcome counts as unknown."""
        answer = self._ask(PutAll([(path, b"".join(pieces(data))) for path, data in objects]))
        if answer is None:
            return [PutUnresolved(path, "the publishing process was lost") for path, _ in objects]
        return [
            outcome_of(found, path)
            for (path, _), found in zip(objects, answer.outcomes, strict=True)
        ]

    def _batches(self, topics: Sequence[Sequence[WrittenRun]]) -> list[bytes | None]:
        """Returns Kafka batches from the hot tail; the process reads the other entries."""
        found: list[bytes | None] = []
        left = _REQUEST_BYTES
        for located in (each for runs in topics for run in runs for each in run.run.entries):
            hot = self._hot.find(located.entry)
            if hot is None or isinstance(hot.records, pa.RecordBatch) or len(hot.records) > left:
                found.append(None)
            else:
                left -= len(hot.records)
                found.append(bytes(hot.records))
        return found

    def _ask(self, request: WriteTogether | PutAll) -> Answer | None:
        """Returns the answer; None if the process was lost. Raises `SyncFailed`."""
        worker = self._worker
        if worker is None:
            return None
        try:
            answer = worker.ask(request)
        except WorkerLost as error:
            self._lose(str(error))
            return None
        self._cpu_seconds, self.resident_bytes = answer.cpu_seconds, answer.resident_bytes
        self.requests.update(answer.requests)
        if answer.sync_failed is not None:
            # The system reports a failed flush only once, to the process that requested it.
            raise SyncFailed(*answer.sync_failed)
        return answer

    def _lose(self, reason: str) -> None:
        self._end()
        if not self._is_closed:
            self._note_failure(reason)

    def _note_failure(self, reason: str) -> None:
        if self._clock.monotonic() - self._started_at > _STEADY_SECONDS:
            self._backoff.succeeded("")
        self._backoff.failed("")
        _log.warning(
            "the publishing process is lost; the broker publishes by itself until another starts",
            reason=reason,
        )

    def close(self) -> None:
        """Ends the process, and starts no other. May be called from any thread."""
        with self._lock:
            self._is_closed = True
        self._end()

    def _end(self) -> None:
        worker, self._worker = self._worker, None
        self._ended_cpu_seconds += self._cpu_seconds
        self._cpu_seconds, self.resident_bytes = 0.0, 0
        if worker is not None:
            worker.end()


def _for_requests(
    topics: Sequence[Sequence[WrittenRun]],
) -> Iterator[Sequence[Sequence[WrittenRun]]]:
    """Divides topics into requests that even a slow disk answers in time, at least one in each."""
    some: list[Sequence[WrittenRun]] = []
    count = size = 0
    for runs in topics:
        count += len(runs)
        size += sum(each.run.memory_bytes for each in runs)
        if some and (count > REQUEST_RUNS or size > limits.PUBLISH_ENCODED_BYTES):
            yield some
            some, count = [], len(runs)
            size = sum(each.run.memory_bytes for each in runs)
        some.append(runs)
    if some:
        yield some
