"""Records as Arrow columns: as producers send, tables store, and readers receive them.

A *payload* is sent by a producer and stored in the write-ahead log: any columns of
`PAYLOAD_SCHEMA`, always with `value`. An absent column is null in every row (`timestamp`: the time
of arrival), and costs nothing. Offset, partition and timestamp type are stored once per batch,
alongside the payload. Only a payload with gaps between its offsets contains them in a column,
`OFFSET`.
*Rows* are returned to readers: all columns of `ROW_SCHEMA`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparklog import arrow, errors, limits

TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
HEADERS: Final = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))

PAYLOAD_SCHEMA: Final = pa.schema(
    [
        pa.field("timestamp", TIMESTAMP),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", HEADERS),
    ]
)

ROW_SCHEMA: Final = pa.schema(
    [
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", TIMESTAMP),
        pa.field("timestampType", pa.int32()),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", HEADERS),
    ]
)
"""The table's columns, as Spark's Kafka source names them. `partition` is the partition column."""

OFFSET: Final = ROW_SCHEMA.field("offset")
"""The column of a payload with gaps: the offset of each row, increasing."""

FILE_SCHEMA: Final = pa.schema([field for field in ROW_SCHEMA if field.name != "partition"])
"""Columns of a data file: Delta stores the partition column's value in the log, not in the file."""

CREATE_TIME: Final = 0
LOG_APPEND_TIME: Final = 1


def conform_payload(batch: pa.RecordBatch, *, limit_bytes: int | None = None) -> pa.RecordBatch:
    """Returns `batch` with the payload's exact types; free if they are already right.

    Accepts strings for `key` and `value` (as UTF-8), large, view and dictionary types in place of
    plain ones, and any timestamp type in place of microseconds UTC. Raises `WrongSchema` for a
    missing `value`, an unknown column, any other type, a timestamp outside the table's range, or a
    header without a key.

    Args:
        limit_bytes: the limit of one column. Dictionaries and views may refer to a large value a
            million times: `BatchTooLarge` is raised before that is expanded.
    """
    try:
        return _conform(batch, limit_bytes)
    except UnicodeDecodeError as error:  # a name that a peer sent is not validated yet
        raise errors.WrongSchema(reason=f"a column's name is not UTF-8: {error}") from error


def _conform(batch: pa.RecordBatch, limit_bytes: int | None) -> pa.RecordBatch:
    names = batch.schema.names
    if "value" not in names:
        raise errors.WrongSchema(reason="a batch of records needs a column 'value'")
    if len(set(names)) != len(names):
        raise errors.WrongSchema(reason=f"column names must be unique: {names}")
    columns, fields = [], []
    for name, column in zip(names, batch.columns, strict=True):
        index = PAYLOAD_SCHEMA.get_field_index(name)
        if index < 0:
            raise errors.WrongSchema(
                reason=f"a record has no column {name!r}; it has {PAYLOAD_SCHEMA.names}"
            )
        field = PAYLOAD_SCHEMA.field(index)
        if column.type != field.type:
            if limit_bytes is not None:
                size = _plain_bytes(column)
                if size > limit_bytes:
                    raise errors.BatchTooLarge(bytes=size, limit_bytes=limit_bytes)
            column = _convert(column, field)
        if name == "timestamp":
            _check_timestamps(column)
        elif name == "headers":
            _check_headers(column)
        columns.append(column)
        fields.append(field)
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def rows(
    payload: pa.RecordBatch,
    *,
    partition: int,
    base_offset: int,
    timestamp_us: int,
    timestamp_type: int,
) -> pa.RecordBatch:
    """Returns `payload` as `ROW_SCHEMA`, with its own offsets, or consecutive from `base_offset`.

    `timestamp_us` is the timestamp of rows that have none of their own.
    """
    count = payload.num_rows
    at = payload.schema.get_field_index(OFFSET.name)
    columns: dict[str, pa.Array] = {
        "partition": arrow.repeated(partition, count, pa.int32()),
        "offset": (
            arrow.numbers(np.arange(base_offset, base_offset + count), pa.int64())
            if at < 0
            else payload.column(at)
        ),
        "timestampType": arrow.repeated(timestamp_type, count, pa.int32()),
    }
    for field in PAYLOAD_SCHEMA:
        index = payload.schema.get_field_index(field.name)
        if index >= 0:
            columns[field.name] = payload.column(index)
        elif field.name != "timestamp":
            columns[field.name] = pa.nulls(count, field.type)
    stamped = columns.get("timestamp")
    if stamped is None:
        columns["timestamp"] = arrow.repeated(timestamp_us, count, TIMESTAMP)
    elif stamped.null_count:
        columns["timestamp"] = pc.fill_null(stamped, arrow.number(timestamp_us, TIMESTAMP))
    return pa.RecordBatch.from_arrays(
        [columns[name] for name in ROW_SCHEMA.names], schema=ROW_SCHEMA
    )


def between(payload: pa.RecordBatch, first: int, end: int, *, base_offset: int) -> pa.RecordBatch:
    """Returns the rows of `payload` with offsets from `first` to `end`, `end` excluded.

    `base_offset` is that of the first row, unless the payload has its own offsets.
    """
    at = payload.schema.get_field_index(OFFSET.name)
    if at >= 0:
        first, end = np.searchsorted(arrow.as_numpy(payload.column(at)), (first, end)).tolist()
        base_offset = 0
    return payload.slice(first - base_offset, end - first)


def rows_of_run(
    run: Sequence[tuple[int, int, int, pa.RecordBatch]], *, partition: int
) -> list[pa.RecordBatch]:
    """Returns consecutive payloads as a few batches of `ROW_SCHEMA`.

    Each item of `run` is (base offset, arrival in µs, timestamp type, payload). Neighbours with the
    same columns are joined while they are small, so that a thousand records sent individually cost
    about as much as one batch of a thousand.
    """
    found: list[pa.RecordBatch] = []
    for group in _groups(run):
        base, arrival_us, timestamp_type, payload = group[0]
        if len(group) > 1:
            payload = pa.concat_batches([each[3] for each in group])
            if "timestamp" not in payload.schema.names:
                counts = [each[3].num_rows for each in group]
                arrivals = np.repeat(np.array([each[1] for each in group], np.int64), counts)
                payload = payload.append_column("timestamp", arrow.numbers(arrivals, TIMESTAMP))
        found.append(
            rows(
                payload,
                partition=partition,
                base_offset=base,
                timestamp_us=arrival_us,
                timestamp_type=timestamp_type,
            )
        )
    return found


_SMALL_ROWS = 4_096
_SMALL_BYTES = 1 * limits.MIB
"""Only small payloads are joined: joining copies, and a column holds at most 2 GiB."""


def _groups(
    run: Sequence[tuple[int, int, int, pa.RecordBatch]],
) -> Iterator[list[tuple[int, int, int, pa.RecordBatch]]]:
    group: list[tuple[int, int, int, pa.RecordBatch]] = []
    group_bytes = 0
    for each in run:
        size = each[3].get_total_buffer_size()  # an upper bound on `nbytes`, and much faster
        if group:
            base, _, timestamp_type, payload = group[-1]
            fits = (
                each[0] == base + payload.num_rows
                and each[2] == timestamp_type
                and each[3].num_rows < _SMALL_ROWS
                and payload.num_rows < _SMALL_ROWS
                and size < _SMALL_BYTES
                and group_bytes < limits.ROW_GROUP_BYTES
                and each[3].schema.names == payload.schema.names
                and not _lacks_timestamps(each[3])
            )
            if not fits:
                yield group
                group, group_bytes = [], 0
        group.append(each)
        group_bytes += size
    if group:
        yield group


def _lacks_timestamps(payload: pa.RecordBatch) -> bool:
    """Returns true if some rows have their own timestamp and others the time of arrival."""
    index = payload.schema.get_field_index("timestamp")
    return index >= 0 and payload.column(index).null_count > 0


def timestamp_range_us(payload: pa.RecordBatch, arrival_us: int) -> tuple[int, int]:
    """Returns the rows' minimum and maximum timestamp; `arrival_us` replaces missing ones."""
    index = payload.schema.get_field_index("timestamp")
    if index < 0:
        return arrival_us, arrival_us
    column = payload.column(index)
    if column.null_count == len(column):
        return arrival_us, arrival_us
    bounds = pc.min_max(column.view(pa.int64()))
    low, high = bounds["min"].as_py(), bounds["max"].as_py()
    if column.null_count:
        low, high = min(low, arrival_us), max(high, arrival_us)
    return low, high


def check_record_sizes(payload: pa.RecordBatch, limit_bytes: int) -> None:
    """Raises `RecordTooLarge` if a record's key, value and headers together exceed the limit.

    Args:
        payload: conforms to `PAYLOAD_SCHEMA`.
    """
    # The whole is rarely as large as one record may be, and its size is known without checking
    # each.
    if payload.nbytes > limit_bytes:
        largest = largest_record_bytes(payload)
        if largest > limit_bytes:
            raise errors.RecordTooLarge(bytes=largest, limit_bytes=limit_bytes)


def count_keyless(payload: pa.RecordBatch) -> int:
    """Returns the number of records without a key in a conforming payload."""
    index = payload.schema.get_field_index("key")
    return payload.num_rows if index < 0 else payload.column(index).null_count


def largest_record_bytes(batch: pa.RecordBatch) -> int:
    """Returns the size of the largest record of a conforming payload: key, value and headers."""
    total = np.zeros(batch.num_rows, np.int64)
    for name in ("key", "value"):
        if name in batch.schema.names:
            total += _lengths(batch.column(name))
    if "headers" in batch.schema.names:
        headers = batch.column("headers")
        each = headers.flatten()
        sizes = _lengths(each.field("key")) + _lengths(each.field("value"))
        ends = np.cumsum(_or_0(pc.list_value_length(headers)))
        total += np.diff(np.concatenate(([0], np.cumsum(sizes)))[ends], prepend=0)
    return int(total.max(initial=0))


def _lengths(column: pa.Array) -> npt.NDArray[np.int64]:
    """Returns the length of each value in bytes; 0 for a null."""
    return _or_0(pc.binary_length(column)).astype(np.int64)


def _or_0(lengths: pa.Array) -> npt.NDArray[np.int32]:
    return arrow.as_numpy(pc.fill_null(lengths, arrow.number(0, lengths.type)))


def _plain_bytes(column: pa.Array) -> int:
    """Returns the approximate size of the column's values once they are expanded.

    Raises `WrongSchema` for run-end encoding, which no column of a record may have.
    """
    kind = column.type
    if pa.types.is_dictionary(kind):
        lengths = _plain_lengths(column.dictionary)
        return int(lengths[arrow.as_numpy(column.indices.drop_null())].sum())
    if _is_view(kind):
        return int(_plain_lengths(column).sum())
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _plain_bytes(column.flatten())
    if pa.types.is_struct(kind):
        return sum(map(_plain_bytes, column.flatten()))
    if pa.types.is_run_end_encoded(kind):
        raise errors.WrongSchema(reason=f"a column is {kind}; send its values one by one")
    return int(column.nbytes)


def _plain_lengths(values: pa.Array) -> npt.NDArray[np.int64]:
    """Returns the length of each value in bytes, or an upper bound if it cannot be known."""
    kind = values.type
    if _is_view(kind):
        # A view is four int32, of which the first is its length.
        found = np.frombuffer(values.buffers()[1], np.int32)[:: _VIEW_BYTES // 4]
        found = found[values.offset : values.offset + len(values)].astype(np.int64)
        return np.where(arrow.as_mask(values.is_valid()), found, 0)
    if any(is_kind(kind) for is_kind in _WITH_LENGTHS):
        return _or_0(pc.binary_length(values)).astype(np.int64)
    return np.full(len(values), _plain_bytes(values) if len(values) else 0, np.int64)


_VIEW_BYTES: Final = 16
_WITH_LENGTHS: Final = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
)


def _is_view(kind: pa.DataType) -> bool:
    return bool(kind in (pa.string_view(), pa.binary_view()))


def _convert(column: pa.Array, field: pa.Field) -> pa.Array:
    kind = column.type
    wanted = field.type
    if pa.types.is_dictionary(kind):
        try:
            column = column.dictionary_decode()
        except pa.ArrowException as error:
            reason = f"column {field.name!r} is {kind}, which does not become {wanted}: {error}"
            raise errors.WrongSchema(reason=reason) from error
        kind = column.type
    texts = pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view()
    blobs = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or kind == pa.binary_view()
    if field.name == "timestamp":
        fits = pa.types.is_timestamp(kind)
    elif field.name == "headers":
        fits = (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _is_header(
            kind.value_type
        )
    else:
        fits = texts or blobs
    if not fits and not pa.types.is_null(kind):
        raise errors.WrongSchema(reason=f"column {field.name!r} is {kind}, not {wanted}")
    try:
        if field.name == "timestamp" and pa.types.is_timestamp(kind):
            # Nanoseconds are truncated to microseconds, the finest unit that a Delta table
            # supports; seconds too large for microseconds must not wrap around.
            safe = kind.unit != "ns"
            return column.cast(pa.timestamp("us", tz=kind.tz), safe=safe).cast(wanted)
        return column.cast(wanted)
    except pa.ArrowException as error:
        raise errors.WrongSchema(
            reason=f"column {field.name!r} is {kind}, which does not become {wanted}: {error}"
        ) from error


def _is_header(kind: pa.DataType) -> bool:
    """Returns true if both fields exist: a cast would turn a differently named one into nulls."""
    return pa.types.is_struct(kind) and {field.name for field in kind} == {"key", "value"}


def _check_headers(column: pa.Array) -> None:
    found = column.flatten()
    if found.null_count or found.field("key").null_count:
        raise errors.WrongSchema(reason="a header without a key")


def _check_timestamps(column: pa.Array) -> None:
    if len(column) == column.null_count:
        return
    bounds = pc.min_max(column.view(pa.int64()))
    for bound in (bounds["min"].as_py(), bounds["max"].as_py()):
        if not limits.TIMESTAMP_MIN_US <= bound <= limits.TIMESTAMP_MAX_US:
            raise errors.WrongSchema(reason=f"timestamp {bound} µs is outside the years 1 to 9999")
