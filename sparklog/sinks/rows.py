"""Converts rows of a data frame to payloads of partitions. No Spark, no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparklog import arrow, errors, limits
from sparklog.formats.partitioner import NO_KEY, parted, partitions_of, spread
from sparklog.formats.record import PAYLOAD_SCHEMA, check_record_sizes, conform_payload
from sparklog.formats.topic_names import unknown_topic
from sparklog.sinks.kept_offsets import check_order, with_offsets


def route(
    rows: pa.RecordBatch,
    number: int,
    *,
    topic: str | None,
    counts: Mapping[str, int],
    keeps_offsets: bool = False,
) -> Iterator[tuple[str, int, pa.RecordBatch]]:
    """Yields the batch's rows as (topic, partition, payload), in order within each partition.

    A row goes to the partition in its column `partition`; without one, to that of its key; without
    a key, to the partition of the batch, which changes from batch to batch.

    Args:
        rows: columns of `PAYLOAD_SCHEMA`, `topic` string, `partition` int32 and `offset` int64.
        number: of the batch, for rows without a key.
        topic: takes precedence over the column.
        counts: the number of partitions of every existing topic.
        keeps_offsets: the payloads contain the offsets of their rows; every row names its
            partition.

    Raises:
        errors.WrongSchema: a row has no topic; if offsets are kept, a row has no partition, or an
            offset not above the one before it; or as raised by `conform_payload`.
        errors.UnknownTopic, errors.UnknownPartition: a row names one that does not exist.
        errors.RecordTooLarge: key, value and headers of a row exceed `MAX_RECORD_BYTES`.
    """
    names = rows.schema.names
    payload = conform_payload(rows.select([name for name in PAYLOAD_SCHEMA.names if name in names]))
    check_record_sizes(payload, limits.MAX_RECORD_BYTES)
    if keeps_offsets:
        payload = with_offsets(payload, rows)
    partitions = rows.column("partition").cast(pa.int32()) if "partition" in names else None
    for name, chosen in _topics(rows, topic):
        count = counts.get(name)
        if count is None:
            raise unknown_topic(name, counts)
        part = payload if chosen is None else payload.take(chosen)
        asked = partitions if partitions is None or chosen is None else partitions.take(chosen)
        places = _places(part, asked, number, count)
        _check_places(name, places, count)
        for partition, piece in _split(part, places):
            if keeps_offsets:
                check_order(name, partition, piece)
            yield name, partition, piece


def _topics(rows: pa.RecordBatch, topic: str | None) -> Iterator[tuple[str, pa.Array | None]]:
    """Yields each topic with the indices of its rows; None: all rows."""
    if topic is not None:
        yield topic, None
        return
    column = rows.column("topic")
    if column.null_count:
        raise errors.WrongSchema(reason="a row's topic is null; fill it, or set option 'topic'")
    encoded = column.dictionary_encode()
    names = encoded.dictionary.to_pylist()
    codes = arrow.as_numpy(encoded.indices)
    for code, name in enumerate(names):
        yield name, None if len(names) == 1 else _places_of(codes == code)


def _places_of(wanted: npt.NDArray[np.bool_]) -> pa.Array:
    found = np.flatnonzero(wanted)
    return arrow.numbers(found, pa.int64())


def _places(
    payload: pa.RecordBatch, asked: pa.Array | None, number: int, count: int
) -> npt.NDArray[np.int32]:
    """Returns the partition of each row."""
    if asked is not None and not asked.null_count:
        return arrow.as_numpy(asked).astype(np.int32, copy=False)
    if "key" in payload.schema.names:
        places = partitions_of(payload.column("key"), count)
        places[places == NO_KEY] = spread(number, count)
    else:
        places = np.full(payload.num_rows, spread(number, count), np.int32)
    if asked is not None:
        given = arrow.as_mask(asked.is_valid())
        places[given] = arrow.as_numpy(asked.drop_null())
    return places


def _check_places(topic: str, places: npt.NDArray[np.int32], count: int) -> None:
    for bound in (int(places.min(initial=0)), int(places.max(initial=0))):
        if not 0 <= bound < count:
            raise errors.UnknownPartition(topic=topic, partition=bound, last=count - 1)


def _split(
    payload: pa.RecordBatch, places: npt.NDArray[np.int32]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    if len(places) and (places == places[0]).all():
        yield int(places[0]), payload
        return
    for partition, _, piece in parted(payload, places):
        yield partition, piece
