"""Writes the rows of log entries to data files of a topic's table, for a later commit to add.

The write-ahead log determines the rows, so any process may write them. An entry in the hot tail is
taken from there; any other is read from the log, or from the files that Spark staged.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import pyarrow as pa

from sparklog import errors, limits
from sparklog.broker.decode_memory import DecodeMemory
from sparklog.broker.log.hot_tail import HotTail
from sparklog.clock import Clock
from sparklog.formats.record import LOG_APPEND_TIME, between, rows_of_run
from sparklog.formats.values.columns import Plan, waiting_of
from sparklog.storage import schema_texts, wal
from sparklog.storage.objects import ObjectExists, ObjectMissing, PutUnresolved, Store, SyncFailed
from sparklog.storage.reading.read_ahead import ReadAhead
from sparklog.storage.reading.shared_reads import SharedReads
from sparklog.storage.snapshot import Located, TableFile
from sparklog.storage.table.data_file import Encoded, encode, new_file, put_file
from sparklog.storage.table.names import data_path

PUBLISH_TOGETHER_BYTES = 1 * limits.MIB  # of Kafka's batches that are decoded together


class Run(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Entries of one partition for the next commit. `first`: the current end of its table."""

    topic: str
    topic_id: str
    partition: int
    first: int
    entries: tuple[Located, ...]
    plan: Plan | None = None
    """The typed columns of its files."""
    waits: bool = False
    """True if records whose schema is unknown are not written yet, but reported."""
    not_for: tuple[int, ...] = ()
    """Schemas that it does not wait for."""

    @property
    def end(self) -> int:
        return self.entries[-1].entry.end

    @property
    def memory_bytes(self) -> int:
        """The memory of its rows, according to its entries."""
        return sum(each.entry.memory_bytes for each in self.entries)

    @property
    def is_small(self) -> bool:
        """True if its rows make a small file."""
        return self.memory_bytes <= limits.PUBLISH_SMALL_BYTES


@dataclass(slots=True)
class WrittenRun:
    """Progress of a run: files with its rows, up to the first entry that cannot be read."""

    run: Run
    count: int = 0
    """The number of its entries that are in `files`."""
    files: list[TableFile] = field(default_factory=list)
    error: errors.SparklogError | None = None
    encoded: list[tuple[str, pa.Buffer]] | None = None
    """Paths and bytes of `files` that are put later, with those of other topics."""

    @property
    def readable_run(self) -> Run:
        """The entries that are in `files`."""
        return msgspec.structs.replace(self.run, entries=self.run.entries[: self.count])

    @property
    def first_unreadable(self) -> int:
        """The first offset of the entry with `error`."""
        return self.run.entries[self.count].entry.base_offset

    @property
    def unreadable(self) -> WrittenRun:
        """The entry with `error`, as a separate run."""
        assert self.error is not None
        entry = self.run.entries[self.count : self.count + 1]
        error = self.error.with_traceback(None)  # its frames keep other entries in memory
        return WrittenRun(msgspec.structs.replace(self.run, entries=entry), error=error)

    @property
    def is_complete(self) -> bool:
        """True if no more of the run can be written."""
        return self.error is not None or self.count == len(self.run.entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class _EncodedRun:
    """The next entries of a run, as a file yet to be put."""

    count: int
    encoded: Encoded | None
    """None if the entries have no rows."""


class RunWriter:
    """Writes runs of several topics. Thread-safe for different runs."""

    def __init__(
        self, store: Store, hot: HotTail, *, clock: Clock, memory: DecodeMemory, file_bytes: int
    ) -> None:
        """`memory`: for decoded rows. `file_bytes`: the size of rows at which a file ends."""
        self.putting = DecodeMemory(memory.limit_bytes)
        """For encoded files while they are put. Files put together have a separate bound."""
        self._store = store
        self._hot = hot
        self._clock = clock
        self._memory = memory
        self._file_bytes = file_bytes

    def write_together(self, topics: Sequence[Sequence[WrittenRun]]) -> list[Exception | None]:
        """Writes the runs of several topics, whose files are made durable together.

        Returns for each topic the error that left it without files, or None. `PutUnresolved`: a
        file's put was rejected, or its outcome is unknown. Raises `SyncFailed`.
        """
        outcomes: list[Exception | None] = []
        size = 0
        begun: list[Sequence[WrittenRun]] = []
        shared = self._shared_reads(each.run for runs in topics for each in runs)
        for runs in topics:
            outcomes.append(self._encode(runs, shared))
            begun.append(runs)
            size += sum(data.size for each in runs for _, data in each.encoded or ())
            if size >= limits.PUBLISH_ENCODED_BYTES:  # these take memory until they are put
                self._put(begun, outcomes)
                begun, size = [], 0
        self._put(begun, outcomes)
        return outcomes

    def _shared_reads(self, runs: Iterable[Run]) -> SharedReads:
        """Returns the reads of entries that are no longer in the hot tail."""
        wanted: Iterable[Located] = ()
        if self._store.requests_at_once > 1:
            entries = (each for run in runs for each in run.entries)
            wanted = (each for each in entries if self._hot.find(each.entry) is None)
        return SharedReads(self._store, wanted)

    def _encode(self, runs: Sequence[WrittenRun], shared: SharedReads) -> Exception | None:
        try:
            for each in runs:
                each.encoded = []
                self.write(each, shared=shared)
        except SyncFailed:
            raise
        except Exception as error:
            for each in runs:
                each.encoded = []
            return error
        return None

    def _put(
        self, topics: Sequence[Sequence[WrittenRun]], outcomes: list[Exception | None]
    ) -> None:
        """Puts the encoded files of several topics, those of the last `outcomes`."""
        objects = [each for runs in topics for run in runs for each in run.encoded or ()]
        put = iter(self._store.put_all_new(objects))
        for number, runs in enumerate(topics, len(outcomes) - len(topics)):
            failed = [
                each for run in runs for _ in run.encoded or () if (each := next(put)) is not None
            ]
            for run in runs:
                run.encoded = None
            if failed:
                # Reading back and retrying can take a long time, and the others would wait for it.
                error = failed[0]
                if isinstance(error, ObjectExists):
                    error = PutUnresolved(error.path, "an object exists there")
                self.discard(runs)
                outcomes[number] = error

    def discard(self, runs: Iterable[WrittenRun]) -> None:
        """Removes files that no commit contains or will contain."""
        with contextlib.suppress(Exception):  # the sweeper removes them as orphans
            self._store.delete(
                data_path(each.run.topic, file) for each in runs for file in each.files
            )

    def write(
        self,
        written: WrittenRun,
        preparation: int | None = None,
        *,
        shared: SharedReads | None = None,
    ) -> None:
        """Writes the rows of a run, up to the first entry that cannot be read.

        For a preparation, writes one file. `shared`: the reads of several runs. A put can take a
        minute, so no memory that others need to decode their rows is held during it.
        """
        entries = [each.entry for each in written.run.entries[written.count :]]
        sizes = [each.memory_bytes for each in entries]
        # Memory for one file at a time, which ends before an entry that would exceed it, and for
        # a second copy of the largest entry while it is decoded. Staged entries need no decoding.
        largest = max(sizes)
        decoded = max((each.memory_bytes for each in entries if each.staged is None), default=0)
        needed = decoded + max(largest, min(sum(sizes), self._file_bytes))
        if written.run.plan is not None:
            needed += min(sum(sizes), limits.ROW_GROUP_BYTES)  # of typed columns
        files = self._files(written, shared)
        while True:
            with self._memory.hold(needed):
                made = next(files, None)
            if made is None:
                break
            if made.encoded is not None:
                written.files.append(self._write_file(written, made.encoded, preparation))
            written.count += made.count
            if written.is_complete or (preparation is not None and made.encoded is not None):
                break
            del made  # frees its bytes before the next file is decoded
        if largest > limits.LARGE_BYTES:
            pa.default_memory_pool().release_unused()  # the pool retains memory per thread

    def read(self, written: WrittenRun) -> None:
        """Reads a run of one entry without writing anything."""
        (located,) = written.run.entries
        with self._memory.hold(2 * located.entry.memory_bytes), _noting_error(written):
            self._payload(located, ReadAhead(self._store, [located]))

    def _files(self, written: WrittenRun, shared: SharedReads | None) -> Iterator[_EncodedRun]:
        """Yields the files of a run, each decoded and encoded on demand.

        Nothing decoded is kept between two files.
        """
        run = written.run
        size = count = 0
        payloads: list[tuple[int, int, int, pa.RecordBatch]] = []

        def encoded() -> _EncodedRun:
            nonlocal size, count
            file = None
            if payloads:
                rows = rows_of_run(payloads, partition=run.partition)
                schemas = schema_texts.for_new_file(self._store, run.plan)
                file = encode(rows, plan=run.plan, schemas=schemas)
                payloads.clear()
                awaited = waiting_of(file.columns).by_schema.keys() - set(run.not_for)
                if run.waits and awaited:
                    raise errors.SchemasAwaited(ids=sorted(awaited))
            made = _EncodedRun(count=count, encoded=file)
            size = count = 0
            return made

        entries_left = run.entries[written.count :]
        ahead = ReadAhead(
            self._store,
            entries_left,
            is_wanted=lambda each: self._hot.find(each.entry) is None,
            shared=shared,
        )
        with _noting_error(written):
            for group, batches in self._groups(entries_left):
                if count and size + sum(each.entry.memory_bytes for each in group) > (
                    self._file_bytes
                ):
                    yield encoded()
                for entries, payload in self._decoded(group, batches, ahead):
                    first, start = entries[0].entry, entries[0].entry.base_offset
                    if run.first > start:
                        start = run.first
                        payload = between(
                            payload, start, entries[-1].entry.end, base_offset=first.base_offset
                        )
                    count += len(entries)
                    # The decoded size; the size in the entry may be an estimate.
                    size += payload.nbytes + payload.num_rows * limits.ROW_BYTES
                    if payload.num_rows:
                        payloads.append((start, first.arrival_us, first.timestamp_type, payload))
                    del payload  # so that it is freed before the next one is decoded
                    if size >= self._file_bytes:
                        yield encoded()
        if count:
            yield encoded()

    def _write_file(
        self, written: WrittenRun, encoded: Encoded, preparation: int | None
    ) -> TableFile:
        """Puts a file, or leaves that to `_put`."""
        run = written.run
        if written.encoded is None:
            with self.putting.hold(encoded.data.size):
                return put_file(
                    self._store,
                    encoded,
                    topic=run.topic,
                    topic_id=run.topic_id,
                    partition=run.partition,
                    clock=self._clock,
                    preparation=preparation,
                )
        file = new_file(encoded, topic_id=run.topic_id, partition=run.partition, clock=self._clock)
        written.encoded.append((data_path(run.topic, file), encoded.data))
        return file

    def _groups(
        self, entries: Sequence[Located]
    ) -> Iterator[tuple[Sequence[Located], Sequence[bytes | bytearray]]]:
        """Groups entries to be decoded together, with their batches.

        A group consists of small Kafka batches in the hot tail. Any other entry is yielded alone
        and without its batch.
        """
        at = 0
        while at < len(entries):
            batches = self._hot_from_kafka(itertools.islice(entries, at, None))
            count = max(len(batches), 1)
            yield entries[at : at + count], batches
            at += count

    def _hot_from_kafka(self, entries: Iterable[Located]) -> list[bytes | bytearray]:
        """Returns the batches of the first entries, as many as can be decoded together."""
        found: list[bytes | bytearray] = []
        size = 0
        for each in entries:
            batch = self._hot.find(each.entry)
            size += each.entry.memory_bytes
            if (
                batch is None
                or isinstance(batch.records, pa.RecordBatch)
                or each.entry.timestamp_type == LOG_APPEND_TIME
                or (found and size > PUBLISH_TOGETHER_BYTES)
            ):
                break
            found.append(batch.records)
        return found

    def _decoded(
        self, group: Sequence[Located], batches: Sequence[bytes | bytearray], ahead: ReadAhead
    ) -> Iterator[tuple[Sequence[Located], pa.RecordBatch]]:
        """Decodes a group together, or one entry at a time if a batch in it is corrupt."""
        if len(batches) > 1:
            with contextlib.suppress(errors.CorruptObject):
                yield group, wal.decode_kafka([each.entry for each in group], batches)
                return
        for each in group:
            yield [each], self._payload(each, ahead)

    def _payload(self, located: Located, ahead: ReadAhead) -> pa.RecordBatch:
        hot = self._hot.find(located.entry)
        if hot is not None:
            return hot.payload
        return wal.decode_payload(located.entry, ahead.payload(located))


@contextlib.contextmanager
def _noting_error(written: WrittenRun) -> Iterator[None]:
    """Records the error of an unreadable entry as that of its run."""
    try:
        yield
    except errors.CorruptObject as error:
        written.error = error
    except ObjectMissing as missing:
        reason = "it is not published yet"
        written.error = errors.MissingObject(path=missing.path, reason=reason)
