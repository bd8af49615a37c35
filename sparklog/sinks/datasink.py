"""The Python sink that Spark calls.

Pitfalls of Spark 4.2's Python sinks:

- `commit` and `abort` run in a different process from `write`, and for a stream on a new writer:
  all that they need is in the tasks' messages.
- A stream's query, run and batch are known only inside a task, from its local properties.
- `abort` is also called after a failed `commit`, which may have taken effect. So it removes staged
  files only if a task has failed, because then no commit was attempted; the sweeper removes the
  rest.
"""

from __future__ import annotations

import functools
import logging
import secrets
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from sparklog import errors
from sparklog.clock import SystemClock
from sparklog.formats.json_values import pack
from sparklog.formats.topic_names import unknown_topic
from sparklog.sinks import commit as commits
from sparklog.sinks.columns import ROLES, check_columns, columns_of_no_record
from sparklog.sinks.foreach import QUERY_ID
from sparklog.sinks.kept_offsets import OffsetRanges, check_partitions, covering
from sparklog.sinks.options import SinkOptions, parse, to_topic
from sparklog.sinks.rows import route
from sparklog.spark_compat import STREAMS_ARE_WRITTEN_IN_BATCHES, DataSourceStreamArrowWriter
from sparklog.spark_errors import sentence_first
from sparklog.storage.metadata.cluster_file import open_cluster
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import open_store
from sparklog.storage.snapshot import BatchKind
from sparklog.storage.staging import manifest
from sparklog.storage.staging.manifest import Destinations, Section, StagingWriter

_JOB_GROUP: Final = "spark.jobGroup.id"
_COMMITTER: Final = "pyspark.sql.worker.python_streaming_sink_runner"
_log = logging.getLogger("sparklog.sinks")


@sentence_first
def batch_writer(
    given: Mapping[str, str], schema: StructType, *, overwrite: bool
) -> DataSourceArrowWriter:
    """Returns the writer of a batch.

    Raises what `parse` raises, `BadOption`, `WrongSchema`, `NotARoot` and `UnknownTopic`.
    """
    if overwrite:
        reason = "a log is only appended to: use mode('append')"
        raise errors.BadOption(option="mode", value="overwrite", reason=reason)
    options = parse(given, streaming=False)
    target = _target(options, schema)
    query = options.query or str(uuid.uuid4())
    return BatchWriter(target, query, options.batch, options.kind)


@sentence_first
def stream_writer(given: Mapping[str, str], schema: StructType) -> DataSourceStreamArrowWriter:
    """Returns the writer of a stream.

    Raises what `parse` raises, `WrongSchema`, `NotARoot`, `UnknownTopic` and `BadRequest`.
    """
    if not STREAMS_ARE_WRITTEN_IN_BATCHES:
        reason = (
            "a Python sink takes a stream's Arrow batches only since pyspark 4.1; use foreachBatch"
        )
        raise errors.BadRequest(reason=reason)
    return StreamWriter(_target(parse(given, streaming=True), schema))


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteTarget:
    """Target and format of rows. `topics`: as they were when the write began.

    `ranges`: the offsets that the write covers, if rows keep theirs.
    """

    root: str
    storage: Mapping[str, str] = field(repr=False)
    topic: str | None
    topics: Destinations
    as_json: bool = False
    fails_on_different_rerun: bool = False
    ranges: OffsetRanges | None = None


def _target(options: SinkOptions, schema: StructType) -> WriteTarget:
    check_columns(
        schema,
        as_json=options.as_json,
        needs_topic=options.topic is None,
        keeps_offsets=options.ranges is not None,
    )
    store = open_store(options.root, options.storage)
    open_cluster(store, clock=SystemClock(), create=False)
    topics = MetadataStore(store, clock=SystemClock()).reload().topics
    if options.topic is not None and options.topic not in topics:
        raise unknown_topic(options.topic, topics)
    if options.topic is not None:
        topics = {options.topic: topics[options.topic]}
    found = manifest.destinations(topics)
    check_partitions(options.ranges or {}, _counts(found))
    for note in options.notes:
        _tell(note)
    if not options.as_json and (ignored := columns_of_no_record(schema)):
        _tell(
            f"columns of the data frame are not written: {', '.join(ignored)};"
            " valueFormat = json builds a value from them"
        )
    return WriteTarget(
        root=store.uri,  # an executor may have a different working folder
        storage=options.storage,
        topic=options.topic,
        topics=found,
        as_json=options.as_json,
        fails_on_different_rerun=options.fails_on_different_rerun,
        ranges=options.ranges,
    )


def _counts(topics: Destinations) -> Mapping[str, int]:
    return {name: each.partitions for name, each in topics.items()}


@functools.cache
def _tell(note: str) -> None:
    """Warns once: not for every micro-batch, nor in the process that creates a writer to commit."""
    if _COMMITTER not in sys.modules:
        _log.warning("%s", note)


# ------------------------------------------------------------------------------ tasks


_sections_decoder = msgspec.msgpack.Decoder(list[Section])


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedTask(WriterCommitMessage):
    """The staged sections of one task, and their batch."""

    query: str
    batch: int
    run: str
    encoded: bytes

    @property
    def sections(self) -> list[Section]:
        return _sections_decoder.decode(self.encoded)


def _stage(
    target: WriteTarget, query: str, batch: int, rows: Iterator[pa.RecordBatch]
) -> StagedTask:
    store = open_store(target.root, target.storage)
    staging = StagingWriter(
        store,
        query=query,
        batch=batch,
        clock=SystemClock(),
        attempt=manifest.open_attempt(store, query, batch, target.topics),
    )
    counts = _counts(target.topics)
    first = secrets.randbelow(1 << 16)
    try:
        for number, each in enumerate(rows, first):
            packed = pack(each, ROLES) if target.as_json else each
            for topic, partition, payload in route(
                packed,
                number,
                topic=target.topic,
                counts=counts,
                keeps_offsets=target.ranges is not None,
            ):
                staging.add(topic, partition, payload)
        sections = staging.finish()
    except BaseException:
        staging.discard()
        raise
    encoded = msgspec.msgpack.encode(sections)
    return StagedTask(query=query, batch=batch, run=_run(), encoded=encoded)


def _abort(target: WriteTarget, messages: Sequence[WriterCommitMessage | None]) -> None:
    staged = _staged(messages)
    if len(staged) < len(messages):
        commits.discard(target.root, target.storage, _sections(staged))


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[StagedTask]:
    return [each for each in messages if isinstance(each, StagedTask)]


def _sections(staged: Sequence[StagedTask]) -> list[Section]:
    return [section for each in staged for section in each.sections]


# ------------------------------------------------------------------------------ writers


class BatchWriter(DataSourceArrowWriter):
    """One batch, of a query of its own unless the user has named both."""

    def __init__(self, target: WriteTarget, query: str, batch: int, kind: BatchKind) -> None:
        self._target = target
        self._query = query
        self._batch = batch
        self._kind = kind

    @sentence_first
    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedTask:
        return _stage(self._target, self._query, self._batch, iterator)

    @sentence_first
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        target = self._target
        staged = _staged(messages)
        sections = _sections(staged)
        if target.ranges is not None:
            try:
                sections = covering(sections, target.ranges)
            except errors.BadRequest:
                commits.discard(target.root, target.storage, sections)
                raise
        commits.commit(
            target.root,
            target.storage,
            query=self._query,
            batch=self._batch,
            sections=sections,
            topics=target.topics,
            kind=self._kind,
            run=staged[0].run if staged and self._kind.is_numbered else "",
            fails_on_different_rerun=target.fails_on_different_rerun,
        )

    @sentence_first
    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        _abort(self._target, messages)


class StreamWriter(DataSourceStreamArrowWriter):
    """A micro-batch, identified by its query, topic and number, which all survive a restart."""

    def __init__(self, target: WriteTarget) -> None:
        self._target = target

    @sentence_first
    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedTask:
        query, batch = _micro_batch()
        return _stage(self._target, to_topic(query, self._target.topic), batch, iterator)

    @sentence_first
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        del batchId  # the tasks' messages contain it, and its query
        staged = _staged(messages)
        if staged:
            commits.commit(
                self._target.root,
                self._target.storage,
                query=staged[0].query,
                batch=staged[0].batch,
                sections=_sections(staged),
                topics=self._target.topics,
                run=staged[0].run,
                fails_on_different_rerun=self._target.fails_on_different_rerun,
            )

    @sentence_first
    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        del batchId
        _abort(self._target, messages)


def _micro_batch() -> tuple[str, int]:
    task = TaskContext.get()
    query = task.getLocalProperty(QUERY_ID) if task else None
    batch = task.getLocalProperty("streaming.sql.batchId") if task else None
    if query is None or batch is None:
        raise errors.BadRequest(reason="a task of a stream must know its query and its batch")
    return query, int(batch)


def _run() -> str:
    """Returns the run id of the task's streaming query; empty if it has none.

    Spark sets the job group of a run's jobs to the run's id. A function of `foreachBatch` may have
    set another group, which can be any string.
    """
    task = TaskContext.get()
    if task is None or task.getLocalProperty(QUERY_ID) is None:
        return ""
    try:
        return str(uuid.UUID(task.getLocalProperty(_JOB_GROUP)))
    except (TypeError, ValueError):
        return ""
