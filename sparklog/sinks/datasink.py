"""What Spark asks of a Python sink.

Traps of Spark 4.2 that this room knows:

- `commit` and `abort` run in another process than `write`, for a stream with a new writer: all that
  they need is in the tasks' messages.
- A stream's query and batch are known only inside a task, by its local properties.
- `abort` also follows a `commit` that failed, perhaps with an effect. So it removes staged files
  only where a task has failed, because then nobody has tried to commit; the rest is the sweeper's.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from sparklog import errors
from sparklog.clock import SystemClock
from sparklog.sinks import commit as commits
from sparklog.sinks.options import SinkOptions, parse
from sparklog.sinks.rows import route
from sparklog.storage.manifest import Section, StagingWriter
from sparklog.storage.meta import MetaStore
from sparklog.storage.objects import open_store

_TYPES: Mapping[str, tuple[str, ...]] = {
    "key": ("binary", "string", "void"),
    "value": ("binary", "string"),
    "topic": ("string",),
    "partition": ("int", "void"),
    "headers": ("array<struct<key:string,value:binary>>", "void"),
    "timestamp": ("timestamp", "void"),
}
"""As in Spark's Kafka sink, and `timestamp`; a column that is null in every row is `void`."""


def batch_writer(
    given: Mapping[str, str], schema: StructType, *, overwrite: bool
) -> DataSourceArrowWriter:
    """Raises what `parse` raises, `WrongSchema`, `NotARoot` and `UnknownTopic`."""
    options = parse(given, streaming=False)
    return BatchWriter(_target(options, schema, overwrite), options.query or str(uuid.uuid4()))


def stream_writer(
    given: Mapping[str, str], schema: StructType, *, overwrite: bool
) -> DataSourceStreamArrowWriter:
    """Raises what `parse` raises, `WrongSchema`, `NotARoot` and `UnknownTopic`."""
    return StreamWriter(_target(parse(given, streaming=True), schema, overwrite))


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where rows go. `counts`: how many partitions each topic had when the write began."""

    root: str
    storage: Mapping[str, str]
    topic: str | None
    counts: Mapping[str, int]


def _target(options: SinkOptions, schema: StructType, overwrite: bool) -> Target:
    if overwrite:
        reason = "a log is only appended to: use mode('append'), or outputMode 'append' or 'update'"
        raise errors.BadOption(option="mode", value="overwrite", reason=reason)
    _check_schema(schema, needs_topic=options.topic is None)
    store = open_store(options.root, options.storage)
    meta = MetaStore(store, clock=SystemClock())
    meta.open(create=False)
    topics = meta.reload().topics
    if options.topic is not None and options.topic not in topics:
        raise errors.UnknownTopic(topic=options.topic)
    wanted = topics if options.topic is None else (options.topic,)
    return Target(
        root=store.uri,  # an executor may have another working folder
        storage=options.storage,
        topic=options.topic,
        counts={name: len(topics[name].partitions) for name in wanted},
    )


def _check_schema(schema: StructType, *, needs_topic: bool) -> None:
    found = {field.name: field.dataType.simpleString() for field in schema}
    for name, kind in found.items():
        if name not in _TYPES:
            reason = f"a record has no column {name!r}; it has {', '.join(_TYPES)}"
            raise errors.WrongSchema(reason=reason)
        if kind not in _TYPES[name]:
            accepted = " or ".join(each for each in _TYPES[name] if each != "void")
            raise errors.WrongSchema(reason=f"column {name!r} is {kind}, not {accepted}")
    if "value" not in found:
        raise errors.WrongSchema(reason="a record needs a column 'value'")
    if needs_topic and "topic" not in found:
        raise errors.WrongSchema(reason="set option 'topic', or give each row a column 'topic'")


# ------------------------------------------------------------------------------ tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged(WriterCommitMessage):
    """What one task staged, and for which batch."""

    query: str
    batch: int
    encoded: bytes

    @property
    def sections(self) -> list[Section]:
        return msgspec.msgpack.decode(self.encoded, type=list[Section])


def _stage(target: Target, query: str, batch: int, rows: Iterator[pa.RecordBatch]) -> Staged:
    staging = StagingWriter(
        open_store(target.root, target.storage), query=query, batch=batch, clock=SystemClock()
    )
    first = secrets.randbelow(1 << 16)
    try:
        for number, each in enumerate(rows, first):
            for topic, partition, payload in route(
                each, number, topic=target.topic, counts=target.counts
            ):
                staging.add(topic, partition, payload)
        sections = staging.finish()
    except BaseException:
        staging.discard()
        raise
    return Staged(query=query, batch=batch, encoded=msgspec.msgpack.encode(sections))


def _commit(target: Target, messages: Sequence[WriterCommitMessage | None]) -> None:
    staged = _staged(messages)
    if staged:
        commits.commit(
            target.root,
            target.storage,
            query=staged[0].query,
            batch=staged[0].batch,
            sections=[section for each in staged for section in each.sections],
        )


def _abort(target: Target, messages: Sequence[WriterCommitMessage | None]) -> None:
    staged = _staged(messages)
    if len(staged) < len(messages):
        sections = [section for each in staged for section in each.sections]
        commits.discard(target.root, target.storage, sections)


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[Staged]:
    return [each for each in messages if isinstance(each, Staged)]


# ------------------------------------------------------------------------------ writers


class BatchWriter(DataSourceArrowWriter):
    """One batch: a query of its own with batch 0."""

    def __init__(self, target: Target, query: str) -> None:
        self._target = target
        self._query = query

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        return _stage(self._target, self._query, 0, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        _commit(self._target, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        _abort(self._target, messages)


class StreamWriter(DataSourceStreamArrowWriter):
    """A micro-batch, known by the query's id and its number; both survive a restart."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        query, batch = _micro_batch()
        return _stage(self._target, query, batch, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        del batchId  # the tasks knew it, and which query it is of
        _commit(self._target, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        del batchId
        _abort(self._target, messages)


def _micro_batch() -> tuple[str, int]:
    task = TaskContext.get()
    query = task.getLocalProperty("sql.streaming.queryId") if task else None
    batch = task.getLocalProperty("streaming.sql.batchId") if task else None
    if query is None or batch is None:
        raise errors.BadRequest(reason="a task of a stream must know its query and its batch")
    return query, int(batch)
