"""The log as a whole, which `sparklog.connect` gives: topics, producers, consumers, and tables.

Everything here blocks, in plain threads: it works in a notebook, where an event loop runs already.
"""

from __future__ import annotations

import contextlib
import html
import inspect
import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, Self

import pyarrow as pa

from sparklog import errors, limits, wire
from sparklog.client import arguments
from sparklog.client.admin import Admin
from sparklog.client.connection import Connection
from sparklog.client.consumer import Consumer
from sparklog.client.producer import Producer
from sparklog.client.reading import (
    Point,
    check_time,
    describe,
    offsets_of,
    read_range,
    wire_columns,
)
from sparklog.record import ROW_SCHEMA

Points = Point | Mapping[int, Point]
"""A point for all partitions, or one for each of some."""

_REPR_TIMEOUT_SECONDS = 1.0
_ANSWER_SECONDS = 5.0


class Log(Admin):
    """A cluster, as its client sees it.

    Args:
        connection: to the brokers; closed with the log.
        root: the URI that names the cluster, for people.
        on_close: called last by `close`, such as to stop an embedded broker.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        root: str = "",
        on_close: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(connection)
        self.root = root
        self._on_close = on_close
        self._made: weakref.WeakSet[Producer | Consumer] = weakref.WeakSet()

    # -------------------------------------------------------------------------- records

    def producer(self, **options: Any) -> Producer:
        """A producer with these options of `Producer`. Raises `UnknownOption`, `BadOption`."""
        _check_options("producer()", options, Producer)
        producer = Producer(self.connection, **options)
        self._made.add(producer)
        return producer

    def consumer(self, topics: str | Iterable[str] | re.Pattern[str], **options: Any) -> Consumer:
        """A consumer of one or several topics, with these options of `Consumer`.

        With `group` it shares them with all members of that group, Kafka's consumers too. Raises
        `UnknownOption`, and as `Consumer` does.
        """
        _check_options("consumer()", options, Consumer)
        consumer = Consumer(self.connection, topics, **options)
        self._made.add(consumer)
        return consumer

    def read(
        self,
        topic: str,
        start: Points | None = None,
        end: Points | None = None,
        columns: Iterable[str] | None = None,
        partitions: Iterable[int] | None = None,
    ) -> pa.Table:
        """The records of a topic as a table, in order of partition and offset.

        Args:
            topic: must exist.
            start: the first offset, or a time (a datetime with a zone, or ISO 8601), or one of
                these by partition; None: the earliest.
            end: as `start`, and not included; None: what stands when the call is made.
            columns: of `ROW_SCHEMA`, in the order wanted; None: all.
            partitions: None: all.

        Raises:
            errors.UnknownTopic, errors.UnknownPartition, errors.WrongSchema: there is no such.
            errors.OffsetOutOfRange: start or end is outside what exists in a partition.
            errors.BadOption: a start that is after the end.
        """
        names = ROW_SCHEMA.names if columns is None else arguments.texts("columns", columns)
        fetched = wire_columns(names)
        if partitions is not None:
            what = "the numbers of partitions, as a list"
            partitions = arguments.each("partitions", partitions, arguments.partition, what)
        info = describe(self.connection, arguments.topic(topic))
        wanted = range(len(info.partitions)) if partitions is None else sorted(set(partitions))
        starts = _bounds(self.connection, info, wanted, start, "earliest")
        ends = _bounds(self.connection, info, wanted, end, "latest")
        for partition in wanted:
            _check_range(info, partition, starts[partition], ends[partition])

        def read_partition(partition: int) -> list[pa.RecordBatch]:
            first, last = starts[partition], ends[partition]
            return list(
                read_range(self.connection, info, partition, start=first, end=last, columns=fetched)
            )

        with ThreadPoolExecutor(limits.READ_THREADS, "sparklog-read") as threads:
            read = [batch for part in threads.map(read_partition, wanted) for batch in part]
        schema = pa.schema([ROW_SCHEMA.field(name) for name in names])
        return pa.Table.from_batches([batch.select(names) for batch in read], schema)

    def offsets_for_times(self, topic: str, when: datetime | str) -> dict[int, int]:
        """Of each partition the first record that is not older than `when`, or the end.

        Raises `BadOption` where `when` is no datetime with a zone, nor a time in ISO 8601.
        """
        when = check_time("when", when)
        info = describe(self.connection, arguments.topic(topic))
        points = dict.fromkeys(range(len(info.partitions)), when)
        return offsets_of(self.connection, info, points)

    def flush_to_table(
        self, topics: str | Iterable[str] | None = None, *, timeout_seconds: float = 60.0
    ) -> None:
        """Returns when all that was acked before is in the topics' Delta tables.

        Args:
            topics: None: all.
            timeout_seconds: `TimedOut` is raised after it; publishing goes on by itself.
        """
        names = [topics] if isinstance(topics, str) else topics
        timeout_seconds = arguments.number("timeout_seconds", timeout_seconds, least=0)
        request = wire.PublishNow(
            topics=None if names is None else arguments.texts("topics", names),
            timeout_seconds=timeout_seconds,
        )
        # The broker keeps the time; what is added is for its answer.
        self.connection.action(
            "publish.now", request, timeout_seconds=timeout_seconds + _ANSWER_SECONDS
        )

    # -------------------------------------------------------------------------- the end

    def close(self) -> None:
        """Flushes and closes the producers, closes the consumers and the connection."""
        with contextlib.ExitStack() as stack:
            # In reverse, and each one whatever becomes of the others.
            if self._on_close is not None:
                stack.callback(self._on_close)
                self._on_close = None
            stack.callback(self.connection.close)
            for made in list(self._made):
                stack.callback(made.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -------------------------------------------------------------------------- for people

    def __repr__(self) -> str:
        return f"Log({self.root!r})"

    def _repr_html_(self) -> str:
        title = html.escape(repr(self))
        try:
            names = self.connection.action("topics.list", timeout_seconds=_REPR_TIMEOUT_SECONDS)
            infos = [self.describe(name) for name in names.topics]
        except errors.SparklogError as error:
            return f"<b>{title}</b> {html.escape(str(error))}"
        rows = "".join(
            f"<tr><td>{html.escape(info.topic)}</td><td>{len(info.partitions)}</td>"
            f"<td>{sum(each.end - each.start for each in info.partitions):,}</td></tr>"
            for info in infos
        )
        return (
            f"<b>{title}</b><table><tr><th>topic</th><th>partitions</th><th>records</th></tr>"
            f"{rows}</table>"
        )


def _check_options(where: str, given: Iterable[str], made: type) -> None:
    known = inspect.signature(made).parameters.keys() - {"connection", "topics"}
    for option in given:
        if option not in known:
            raise errors.UnknownOption.among(where, option, known)


def _bounds(
    connection: Connection,
    info: wire.TopicInfo,
    partitions: Iterable[int],
    given: Points | None,
    otherwise: Point,
) -> dict[int, int]:
    point = otherwise if given is None else given
    points = point if isinstance(point, Mapping) else dict.fromkeys(partitions, point)
    return offsets_of(connection, info, dict.fromkeys(partitions, otherwise) | dict(points))


def _check_range(info: wire.TopicInfo, partition: int, start: int, end: int) -> None:
    known = info.partitions[partition]
    for offset in (start, end):
        if not known.start <= offset <= known.end:
            raise errors.OffsetOutOfRange(
                topic=info.topic,
                partition=partition,
                offset=offset,
                start=known.start,
                end=known.end,
            )
    if start > end:
        raise errors.BadOption(
            option="start", value=start, reason=f"it is after the end, {end}, of {partition}"
        )
