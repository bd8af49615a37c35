"""The publishing process: `python -m sparklog.broker.log.publish_worker ROOT DESCRIPTOR VERSION`.

It serves one broker over a socket that it inherits: it writes the data files of topics, and puts
their commits. It has no state of the tables and decides nothing, so it can be lost at any time: the
broker can do the same work itself, and a job leaves nothing behind but objects under the root. It
exits when the broker closes the socket, or ends in any way.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from sparklog import errors, limits, pandas_import
from sparklog.broker.decode_memory import DecodeMemory
from sparklog.broker.log.hot_tail import HotTail
from sparklog.broker.log.run_writer import Run, RunWriter, WrittenRun
from sparklog.clock import Clock, SystemClock
from sparklog.storage.objects import (
    CountsRequests,
    ObjectExists,
    PutUnresolved,
    Store,
    SyncFailed,
    open_store,
)
from sparklog.storage.snapshot import TableFile
from sparklog.version import VERSION

_EXISTS: Final = "exists"
_UNRESOLVED: Final = "unresolved"
_LENGTH: Final = struct.Struct(">I")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

Described: TypeAlias = tuple[str, dict[str, Any]]
"""An error: its kind, and its facts."""


class WriteTogether(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request to write the data files of runs, by topic."""

    topics: Sequence[Sequence[Run]]
    batches: Sequence[bytes | None]
    """The Kafka batch of each entry of all runs; None: the entry must be read."""


class PutAll(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request to put new objects, which are made durable together."""

    objects: Sequence[tuple[str, bytes]]


class Answer(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The answer to a request."""

    outcomes: Sequence[Described | None] = ()
    """Why a topic has no files, or an object was not put; None on success."""
    files: Sequence[Sequence[Sequence[TableFile]]] = ()
    """By topic and run."""
    sync_failed: tuple[str, str] | None = None
    """The path and the reason, if the disk failed to flush."""
    cpu_seconds: float = 0.0
    """The CPU time of the process since its start."""
    resident_bytes: int = 0
    requests: dict[str, int] = {}
    """Storage operations since the last answer, by kind."""


class WorkerLost(Exception):
    """The process has ended, or does not answer."""


# ------------------------------------------------------------------------------ work


class Worker:
    """Serves requests, both in a separate process and in tests."""

    def __init__(self, store: Store, *, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._memory = DecodeMemory(limits.PUBLISH_MAX_BYTES)

    def serve(self, request: WriteTogether | PutAll) -> Answer:
        """Returns the answer to a request. A failure affects only one topic, or one object."""
        try:
            if isinstance(request, PutAll):
                answer = Answer(outcomes=_described(self._store.put_all_new(request.objects)))
            else:
                answer = self._write(request)
        except SyncFailed as error:
            return Answer(sync_failed=(error.path, error.reason))
        return msgspec.structs.replace(answer, requests=self._take_requests())

    def _take_requests(self) -> dict[str, int]:
        if not isinstance(self._store, CountsRequests):
            return {}
        found = dict(self._store.requests)
        self._store.requests.clear()
        return found

    def _write(self, request: WriteTogether) -> Answer:
        hot = HotTail(limit_bytes=limits.BUFFER_MAX_BYTES)
        entries = [each for runs in request.topics for run in runs for each in run.entries]
        for located, batch in zip(entries, request.batches, strict=True):
            if batch is not None:
                hot.add(located.entry, batch)
        writer = RunWriter(
            self._store,
            hot,
            clock=self._clock,
            memory=self._memory,
            file_bytes=limits.PUBLISH_FILE_BYTES,
        )
        topics = [[WrittenRun(run) for run in runs] for runs in request.topics]
        outcomes = writer.write_together(topics)
        for number, runs in enumerate(topics):
            unreadable = next((each.error for each in runs if each.error is not None), None)
            if unreadable is not None and outcomes[number] is None:
                # The broker publishes the entries before the unreadable one, and reports that one.
                writer.discard(runs)
                outcomes[number] = PutUnresolved(runs[0].run.topic, str(unreadable))
        return Answer(
            outcomes=_described(outcomes),
            files=[[each.files for each in runs] for runs in topics],
        )


def _described(outcomes: Sequence[Exception | None]) -> list[Described | None]:
    found: list[Described | None] = []
    for each in outcomes:
        match each:
            case None:
                found.append(None)
            case ObjectExists():
                found.append((_EXISTS, {"path": each.path}))
            case errors.SparklogError():
                found.append((each.code, each.facts))
            case _:  # also `PutUnresolved`: the broker resolves it
                found.append((_UNRESOLVED, {"reason": str(each) or repr(each)}))
    return found


def outcome_of(described: Described | None, path: str) -> Exception | None:
    """Returns the error of a topic or an object, which `path` names; None if there is none.

    `PutUnresolved` covers everything that the broker is better able to find out itself.
    """
    if described is None:
        return None
    kind, facts = described
    if kind == _EXISTS:
        return ObjectExists(facts["path"])
    if kind == _UNRESOLVED:
        return PutUnresolved(path, facts["reason"])
    return errors.revive(kind, facts)


# ------------------------------------------------------------------------------ messages

_encoder = msgspec.msgpack.Encoder()
_request_decoder: Final = msgspec.msgpack.Decoder(WriteTogether | PutAll)
_answer_decoder: Final = msgspec.msgpack.Decoder(Answer)


def encode(message: WriteTogether | PutAll | Answer) -> bytes:
    """Encodes a message, preceded by its length."""
    data = _encoder.encode(message)
    return _LENGTH.pack(len(data)) + data


def decode_request(data: bytes | bytearray) -> WriteTogether | PutAll:
    """Decodes a request for work. Raises `msgspec.MsgspecError`."""
    return _request_decoder.decode(data)


def decode_answer(data: bytes | bytearray) -> Answer:
    """Decodes an answer. Raises `msgspec.MsgspecError`."""
    return _answer_decoder.decode(data)


def receive(connection: socket.socket, deadline: float | None = None) -> bytearray:
    """Returns the next message. Raises `WorkerLost` at the end of the stream, or at the deadline.

    `deadline` is in monotonic seconds; None: waits forever.
    """
    return _receive(connection, _LENGTH.unpack(_receive(connection, 4, deadline))[0], deadline)


def _receive(connection: socket.socket, length: int, deadline: float | None) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            count = connection.recv_into(view)
        except TimeoutError:
            raise WorkerLost("it does not answer") from None
        except OSError as error:
            raise WorkerLost(f"its connection failed: {error}") from error
        if not count:
            raise WorkerLost("it has ended")
        view = view[count:]
    return data


# ------------------------------------------------------------------------------ the process


def main() -> None:
    """Serves until the broker closes the socket."""
    # The terminal and systemd send these to the broker too, which still publishes before it exits.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pandas_import.block()
    if sys.argv[3] != VERSION:  # their messages, and the files that they write, may differ
        sys.exit(f"sparklog {VERSION} was installed while {sys.argv[3]} ran: restart the broker")
    with socket.socket(fileno=int(sys.argv[2])) as connection:
        try:
            _serve(sys.argv[1], connection)
        except WorkerLost:
            return


def _serve(root: str, connection: socket.socket) -> None:
    store = open_store(root)
    # The store then makes the folders of the first files durable together, not one at a time.
    store.sync_folder("topics")
    worker = Worker(store, clock=SystemClock())
    from sparklog.formats import record_batch

    record_batch.compile_loops()
    gc.collect()
    gc.freeze()
    answer = Answer()
    while True:
        _send(connection, answer)
        answer = worker.serve(decode_request(receive(connection)))


def _send(connection: socket.socket, answer: Answer) -> None:
    times = os.times()
    usage = msgspec.structs.replace(
        answer, cpu_seconds=times.user + times.system, resident_bytes=_resident_bytes()
    )
    try:
        connection.sendall(encode(usage))
    except OSError as error:
        raise WorkerLost(f"its broker has ended: {error}") from error


def _resident_bytes() -> int:
    """Returns the resident memory; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


if __name__ == "__main__":
    main()
