"""Reads records of a topic into a table, its partitions in parallel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from sparklog import errors, limits
from sparklog.client import arguments
from sparklog.client.connection import Connection
from sparklog.client.consumer.reading import (
    check_columns,
    read_range,
    wire_columns,
    with_typed_columns,
)
from sparklog.client.json_frames import VALUE_FORMATS, ValueFormat, ValueReader
from sparklog.client.offsets import Point, Points, describe, offsets_of
from sparklog.client.schemas import BrokerSchemas
from sparklog.formats import flight_messages
from sparklog.formats.record import ROW_SCHEMA
from sparklog.formats.values.columns import Column, Plan
from sparklog.formats.values.proposal import Proposal
from sparklog.formats.values.typed import Schemas


def read_table(
    connection: Connection,
    topic: str,
    *,
    start: Points | None,
    end: Points | None,
    columns: Iterable[str] | None,
    partitions: Iterable[int] | None,
    values: ValueFormat,
) -> pa.Table:
    """Returns the records of a topic; arguments and errors are those of `Log.read`."""
    if values not in VALUE_FORMATS:
        reason = f"expected one of {', '.join(map(repr, VALUE_FORMATS))}"
        raise errors.BadOption(option="values", value=repr(values), reason=reason)
    if partitions is not None:
        what = "the numbers of partitions, as a list"
        partitions = arguments.each("partitions", partitions, arguments.partition, what)
    names = None if columns is None else arguments.texts("columns", columns)
    info = describe(connection, arguments.topic(topic))
    schema, plan = _schema(info, names)
    names = schema.names
    decodes = values != "bytes" and "value" in names
    reader = ValueReader(topic, values)
    needed = dict.fromkeys(name for name in names if name in ROW_SCHEMA.names)
    if plan is not None:
        needed["value"] = None
    fetched = wire_columns(needed)
    wanted = range(len(info.partitions)) if partitions is None else sorted(set(partitions))
    schemas = BrokerSchemas(connection, info.topic)
    starts = _bounds(connection, info, wanted, start, "earliest")
    ends = _bounds(connection, info, wanted, end, "latest")
    for partition in wanted:
        _check_range(info, partition, starts[partition], ends[partition])

    def read_partition(partition: int) -> tuple[list[pa.RecordBatch], list[Any]]:
        batches, decoded = [], []
        for batch in read_range(
            connection,
            info,
            partition,
            start=starts[partition],
            end=ends[partition],
            columns=fetched,
        ):
            if decodes:
                decoded += reader.decode(partition, batch)
            if plan is not None:
                batch = with_typed_columns(batch, plan, schemas)
            batches.append(batch.select(names))
        return batches, decoded

    with ThreadPoolExecutor(limits.READ_THREADS, "sparklog-read") as threads:
        read = list(threads.map(read_partition, wanted))
    table = pa.Table.from_batches([batch for part, _ in read for batch in part], schema)
    if not decodes:
        return table
    column = reader.column([value for _, part in read for value in part])
    return table.set_column(names.index("value"), "value", column)


def read_newest(connection: Connection, info: flight_messages.TopicInfo, count: int) -> pa.Table:
    """Returns the values of about `count` of a topic's newest records, as many of each partition.

    Raises what `Log.read` raises.
    """
    most = -(-count // len(info.partitions))
    return read_table(
        connection,
        info.topic,
        start={each.partition: max(each.start, each.end - most) for each in info.partitions},
        end={each.partition: each.end for each in info.partitions},
        columns=["value"],
        partitions=None,
        values="bytes",
    )


def propose_of_schemas(
    values: pa.ChunkedArray, schemas: Schemas, known: Sequence[Column]
) -> Proposal:
    """Proposes columns for the fields of the schemas that values refer to.

    Raises what `schemas` raises.
    """
    from sparklog.formats.values import evolution
    from sparklog.formats.values.avro.derive import schema_ids

    rows = Counter[int]()
    for chunk in values.chunks:
        rows.update(each for each in schema_ids(chunk).tolist() if each >= 0)
    found = schemas(rows)
    of_known = {each: found[each] for each in rows if each in found}
    return evolution.propose(rows, of_known, known, len(values) - values.null_count)


def _schema(
    info: flight_messages.TopicInfo, names: Sequence[str] | None
) -> tuple[pa.Schema, Plan | None]:
    """Returns the columns to return, and those to compute from values.

    Raises `WrongSchema` for a column that the topic does not have.
    """
    known = check_columns(info, names or ())
    schema = pa.schema([known[name] for name in (known if names is None else names)])
    is_typed = any(name not in ROW_SCHEMA.names for name in schema.names)
    return schema, info.plan if is_typed else None


def _bounds(
    connection: Connection,
    info: flight_messages.TopicInfo,
    partitions: Iterable[int],
    given: Points | None,
    otherwise: Point,
) -> dict[int, int]:
    point = otherwise if given is None else given
    points = point if isinstance(point, Mapping) else dict.fromkeys(partitions, point)
    return offsets_of(connection, info, dict.fromkeys(partitions, otherwise) | dict(points))


def _check_range(info: flight_messages.TopicInfo, partition: int, start: int, end: int) -> None:
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
            option="start", value=start, reason=f"it is after the end of {partition}, {end}"
        )
