"""Many JSON objects to one Arrow column: by Arrow's own reader, a block of rows in one go.

Arrow's reader takes a text in which one object follows another, and gives up at the first that it
does not like. So, in this room:

- **A row stays a row.** Only what begins with `{` and ends with `}` comes to Arrow, a line each. No
  line can end within a string, where a line break is forbidden, and none elsewhere than at the end
  of an object that began it: so every line is one row at least, and as many rows as lines means
  that each has its own. Line breaks within a value become carriage returns, which JSON allows and
  forbids at the same places.
- **Nothing comes to Arrow that it cannot bear**: a `null` outside of all objects makes it read
  memory that is not its own, and a zero byte ends its block.
- **A few bad rows stay cheap.** When Arrow gives up, a second reader, which is quick to say yes or
  no and no more, picks out the rows that are odd; those are judged one by one, and written anew or
  left out. Where that does not help, the block is cut into pieces.
- **What becomes of a row depends on the row alone**, whatever its neighbours are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from sparklog import arrow
from sparklog.limits import TIMESTAMP_MAX_US, TIMESTAMP_MIN_US
from sparklog.sources.jsonobject import DATE_PATTERN, TIME_PATTERN, Unfit, rewriter

Mask: TypeAlias = npt.NDArray[np.bool_]

_BLOCK_ROWS: Final = 65_536
"""Arrow's reader takes 100,000 at most,"""
_BLOCK_BYTES: Final = 32 * 1024 * 1024
"""and as many bytes as an int32 can count."""
_SMALL_ROWS: Final = 1_024
"""From here on, reading rows one by one costs less than asking Arrow again."""
_PIECES: Final = 64

_WHITESPACE: Final = " \t\r\n"
"""RFC 8259, section 2."""
_UNBEARABLE: Final = "\x00|\\}[ \t\r\n]*null"
_ZONED: Final = r"[T ]\d\d.*(Z|[+-]\d\d(:?\d\d)?)$"
_DAY_MIN: Final = TIMESTAMP_MIN_US // 86_400_000_000
_DAY_MAX: Final = TIMESTAMP_MAX_US // 86_400_000_000


def pieces(array: pa.Array) -> Iterator[pa.Array]:
    """The array in some slices of about the same length."""
    step = max(-(-len(array) // _PIECES), 1)
    for first in range(0, len(array), step):
        yield array.slice(first, step)


_NOTHING: Final = arrow.string("")
_BREAK: Final = arrow.string("\n")
_EMPTY: Final = arrow.strings([b"{}"])


class ObjectReader:
    """Reads JSON objects as rows of `kind`, whose types are Spark's own (`values.json_type`)."""

    def __init__(self, kind: pa.StructType) -> None:
        self._kind = kind
        self._parse = pj.ParseOptions(
            explicit_schema=pa.schema([pa.field(f.name, _stored(f.type)) for f in kind]),
            unexpected_field_behavior="ignore",
        )
        self._rewrite = rewriter(kind)
        # The second one also looks at times, which doubles what it costs.
        self._sieves = [
            msgspec.json.Decoder(_python_type(kind, patterns=patterns))
            for patterns in (False, True)
        ]
        self._has_maps = _has_maps(kind)

    def read(self, texts: pa.StringArray) -> tuple[pa.StructArray, Mask]:
        """The rows, null where a text is null or bad; and which of them are bad."""
        if not len(texts):
            return pa.nulls(0, self._kind), np.zeros(0, np.bool_)
        lines = pc.ascii_trim(pc.coalesce(texts, _NOTHING), _WHITESPACE)
        is_object = pc.and_(pc.starts_with(lines, "{"), pc.ends_with(lines, "}"))
        shaped = arrow.as_mask(is_object)
        if not shaped.all():
            lines = pc.if_else(is_object, lines, _EMPTY[0])
        columns, bad = self._read_blocks(lines)
        is_null = arrow.as_mask(texts.is_null())
        bad |= ~shaped & ~is_null
        gone = bad | is_null
        mask = arrow.booleans(gone) if gone.any() else None
        return pa.StructArray.from_arrays(columns, fields=list(self._kind), mask=mask), bad

    def reason(self, text: str) -> str:
        """Why such a text is bad."""
        try:
            self._rewrite(text)
        except Unfit as unfit:
            return str(unfit)
        except RecursionError:
            return "it is nested too deep"
        return "it does not fit"

    # -------------------------------------------------------------------------- blocks

    def _read_blocks(self, lines: pa.StringArray) -> tuple[list[pa.Array], Mask]:
        if len(lines) > 1 and (len(lines) > _BLOCK_ROWS or lines.nbytes > _BLOCK_BYTES):
            half = len(lines) // 2
            return _joined([self._read_blocks(part) for part in (lines[:half], lines[half:])])
        odd = arrow.as_mask(pc.match_substring_regex(lines, _UNBEARABLE))
        bad = np.zeros(len(lines), np.bool_)
        if self._has_maps:
            lines = self._mend(lines, odd, bad, may_ask_arrow=False)
            lines = self._mend(lines, ~odd, bad, may_ask_arrow=True)
            odd[:] = True
        elif odd.any():
            lines = self._mend(lines, odd, bad, may_ask_arrow=False)
        return self._read_block(lines, bad, odd)

    def _read_block(
        self, lines: pa.StringArray, bad: Mask, mended: Mask
    ) -> tuple[list[pa.Array], Mask]:
        """Rows that Arrow may see; `bad` ones are empty, `mended` ones as good as they can be."""
        with contextlib.suppress(pa.ArrowException):
            return self._read_lines(lines), bad
        for sieve in self._sieves:
            odd = _odd(lines, sieve) & ~mended
            if odd.any():
                lines = self._mend(lines, odd, bad, may_ask_arrow=True)
                mended |= odd
                with contextlib.suppress(pa.ArrowException):
                    return self._read_lines(lines), bad
        return self._read_apart(lines, bad, mended)

    def _read_apart(
        self, lines: pa.StringArray, bad: Mask, mended: Mask
    ) -> tuple[list[pa.Array], Mask]:
        """Lines that Arrow does not take together."""
        if len(lines) <= _SMALL_ROWS and not mended.all():
            lines = self._mend(lines, ~mended, bad, may_ask_arrow=True)
            mended = np.ones(len(lines), np.bool_)
            with contextlib.suppress(pa.ArrowException):
                return self._read_lines(lines), bad
        if len(lines) == 1:
            return self._read_lines(_EMPTY), np.ones(1, np.bool_)
        parts, first = [], 0
        for piece in pieces(lines):
            here = slice(first, first + len(piece))
            try:
                parts.append((self._read_lines(piece), bad[here]))
            except pa.ArrowException:
                parts.append(self._read_apart(piece, bad[here], mended[here]))
            first = here.stop
        return _joined(parts)

    def _mend(
        self, lines: pa.StringArray, odd: Mask, bad: Mask, *, may_ask_arrow: bool
    ) -> pa.StringArray:
        """`lines`, the odd ones written anew, or empty; then they are marked as bad too."""
        if not odd.any():
            return lines
        rows = np.flatnonzero(odd)
        written = []
        for row, line in zip(rows, lines.filter(arrow.booleans(odd)).to_pylist(), strict=True):
            found = self._mended(line, may_ask_arrow=may_ask_arrow)
            if found is None:
                bad[row] = True
            written.append(found or b"{}")
        return pc.replace_with_mask(lines, arrow.booleans(odd), arrow.strings(written))

    def _mended(self, line: str, *, may_ask_arrow: bool) -> bytes | None:
        try:
            return self._rewrite(line)
        except (Unfit, RecursionError) as error:
            # Two things that Arrow takes and Python's reader does not. A row must not be bad only
            # because one beside it is.
            if may_ask_arrow and (isinstance(error, RecursionError) or "Inf" in line):
                return self._if_arrow_takes(line.encode())
            return None

    def _if_arrow_takes(self, line: bytes) -> bytes | None:
        try:
            self._read_lines(arrow.strings([line]))
        except pa.ArrowException:
            return None
        return line

    # -------------------------------------------------------------------------- Arrow

    def _read_lines(self, lines: pa.StringArray) -> list[pa.Array]:
        """A column for each field. Raises `pa.ArrowException` if any row does not fit."""
        data = _text_of(lines)
        table = pj.read_json(
            pa.BufferReader(data),
            # As one block: there is one core, and Arrow would cut blocks at carriage returns.
            read_options=pj.ReadOptions(use_threads=False, block_size=len(data) + 1),
            parse_options=self._parse,
        )
        if table.num_rows != len(lines):
            raise pa.ArrowInvalid(f"{len(lines)} lines hold {table.num_rows} objects")
        return [
            _converted(_whole(column), field.type)
            for column, field in zip(table.columns, self._kind, strict=True)
        ]


@functools.lru_cache(maxsize=16)
def object_reader(kind: pa.StructType) -> ObjectReader:
    """One for each kind in a process: making it takes a millisecond."""
    return ObjectReader(kind)


def _odd(lines: pa.StringArray, sieve: msgspec.json.Decoder[Any]) -> Mask:
    """Rows that another reader does not take either."""
    found = np.zeros(len(lines), np.bool_)
    decode = sieve.decode
    for row, line in enumerate(lines.to_pylist()):
        try:
            decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            found[row] = True
    return found


def _text_of(lines: pa.StringArray) -> pa.Buffer:
    """The lines, a line break after each, and none elsewhere."""
    joined = pc.binary_join_element_wise(lines, _NOTHING, _BREAK)
    ends = np.frombuffer(joined.buffers()[1], np.int32)[1 : len(lines) + 1]
    data = joined.buffers()[2].slice(0, int(ends[-1]))
    octets = np.frombuffer(data, np.uint8)
    is_break = octets == ord("\n")
    if np.count_nonzero(is_break) == len(lines):
        return data
    octets = octets.copy()
    octets[is_break] = ord("\r")
    octets[ends - 1] = ord("\n")
    return pa.py_buffer(octets)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _joined(parts: list[tuple[list[pa.Array], Mask]]) -> tuple[list[pa.Array], Mask]:
    columns = [pa.concat_arrays(each) for each in zip(*(part[0] for part in parts), strict=True)]
    return columns, np.concatenate([part[1] for part in parts])


# ------------------------------------------------------------------------------ types


def _stored(kind: pa.DataType) -> pa.DataType:
    """As what Arrow's reader is to read `kind`: times and bytes as strings, maps as entries."""
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(each.name, _stored(each.type)) for each in kind])
    if pa.types.is_map(kind):
        entry = [pa.field("key", pa.string()), pa.field("value", _stored(kind.item_type))]
        return pa.list_(pa.struct(entry))
    if pa.types.is_list(kind):
        return pa.list_(_stored(kind.value_type))
    if pa.types.is_temporal(kind) or pa.types.is_binary(kind):
        return pa.string()
    return kind


def _has_maps(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        return True
    return any(_has_maps(kind.field(index).type) for index in range(kind.num_fields))


_PYTHON_TYPES: Final[dict[pa.DataType, Any]] = {
    pa.bool_(): bool,
    pa.float32(): float,
    pa.float64(): float,
    pa.string(): str,
    pa.binary(): str,
    pa.date32(): str,
    pa.timestamp("us", "UTC"): str,
    pa.timestamp("us"): str,
}
_PATTERNS: Final = {
    pa.date32(): DATE_PATTERN,
    pa.timestamp("us", "UTC"): TIME_PATTERN,
    pa.timestamp("us"): TIME_PATTERN,
}


def _python_type(kind: pa.DataType, *, patterns: bool) -> Any:
    """As what msgspec is to read `kind`: it must refuse most of what Arrow refuses."""
    if pa.types.is_struct(kind):
        names = {f"f{index}": field.name for index, field in enumerate(kind)}
        fields = [
            (name, _python_type(field.type, patterns=patterns) | None, None)
            for name, field in zip(names, kind, strict=True)
        ]
        return msgspec.defstruct("Row", fields, rename=names, gc=False)
    if pa.types.is_map(kind):
        return dict[str, _python_type(kind.item_type, patterns=patterns) | None]  # type: ignore[misc]
    if pa.types.is_list(kind):
        return list[_python_type(kind.value_type, patterns=patterns) | None]  # type: ignore[misc]
    if pa.types.is_decimal(kind):
        return int | float | str
    if pa.types.is_integer(kind):
        top = 1 << (kind.bit_width - 1)
        return Annotated[int, msgspec.Meta(ge=-top, le=top - 1)]
    if patterns and kind in _PATTERNS:
        return Annotated[str, msgspec.Meta(pattern=_PATTERNS[kind])]
    return _PYTHON_TYPES[kind]


# ------------------------------------------------------------------------------ columns


def _converted(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """From `_stored(kind)` to `kind`. Raises `pa.ArrowInvalid`."""
    if pa.types.is_struct(kind):
        inner = [_converted(column.field(index), each.type) for index, each in enumerate(kind)]
        return pa.StructArray.from_arrays(inner, fields=list(kind), mask=_nulls(column))
    if pa.types.is_map(kind):
        entries = column.values
        items = _converted(entries.field(1), kind.item_type)
        keys = entries.field(0)
        return pa.MapArray.from_arrays(column.offsets, keys, items, kind, mask=_nulls(column))
    if pa.types.is_list(kind):
        inner = _converted(column.values, kind.value_type)
        return pa.ListArray.from_arrays(column.offsets, inner, kind, mask=_nulls(column))
    if pa.types.is_timestamp(kind):
        times = _instants(column) if kind.tz is not None else _clock_times(column)
        _check_range(times.view(pa.int64()), TIMESTAMP_MIN_US, TIMESTAMP_MAX_US)
        return times.cast(kind)
    if pa.types.is_date(kind):
        dates = _dates(column)
        _check_range(dates.view(pa.int32()), _DAY_MIN, _DAY_MAX)
        return dates
    if pa.types.is_decimal(kind):  # Arrow's reader looks at the digits that stand there only
        most = Decimal((0, (9,) * kind.precision, -kind.scale))
        _check_range(column, -most, most)
        return column
    if pa.types.is_binary(kind):
        return _decoded(column)
    return column


def _nulls(column: pa.Array) -> pa.BooleanArray | None:
    return column.is_null() if column.null_count else None


def _check_range(column: pa.Array, low: int | Decimal, high: int | Decimal) -> None:
    bounds = pc.min_max(column)
    least, most = bounds["min"].as_py(), bounds["max"].as_py()
    if least is not None and not low <= least <= most <= high:
        raise pa.ArrowInvalid("out of range")


def _instants(texts: pa.StringArray) -> pa.TimestampArray:
    """Times with a zone, or without one and then UTC. Columns are mostly all of one sort."""
    zoned, plain = pa.timestamp("us", "UTC"), pa.timestamp("us")
    for kind in (zoned, plain):
        try:
            return texts.cast(kind).view(plain)
        except pa.ArrowInvalid:
            continue
    texts = _cut_to_micros(texts)
    has_zone = pc.match_substring_regex(texts, _ZONED)
    nothing = pa.nulls(1, pa.string())[0]
    with_zone = pc.if_else(has_zone, texts, nothing).cast(zoned).view(plain)
    return pc.coalesce(with_zone, pc.if_else(has_zone, nothing, texts).cast(plain))


def _clock_times(texts: pa.StringArray) -> pa.TimestampArray:
    try:
        return texts.cast(pa.timestamp("us"))
    except pa.ArrowInvalid:
        return _cut_to_micros(texts).cast(pa.timestamp("us"))


def _cut_to_micros(texts: pa.StringArray) -> pa.StringArray:
    return pc.replace_substring_regex(texts, r"(\.\d{6})\d+", r"\1")


def _dates(texts: pa.StringArray) -> pa.Date32Array:
    try:
        return texts.cast(pa.date32())
    except pa.ArrowInvalid:
        return pc.replace_substring_regex(texts, r"^(\d{4}-\d\d-\d\d)[T ].*$", r"\1").cast(
            pa.date32()
        )


_SYMBOLS: Final = np.full(256, 255, np.uint8)
"""What a symbol of base64 stands for (RFC 4648, section 4); 64: padding; 255: no symbol."""
_SYMBOLS[
    np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=", np.uint8)
] = np.arange(65, dtype=np.uint8)
_PADDING: Final = 64


def _decoded(texts: pa.StringArray) -> pa.BinaryArray:
    """Base64 to bytes, the whole column at once: four symbols are three bytes."""
    ends = np.frombuffer(texts.buffers()[1], np.int32)[: len(texts) + 1]
    if (np.diff(ends) % 4).any():
        raise pa.ArrowInvalid("base64 comes in fours")
    data = texts.buffers()[2]
    octets = np.frombuffer(data, np.uint8)[: ends[-1]] if data is not None else _SYMBOLS[:0]
    codes = _SYMBOLS[octets].reshape(-1, 4)
    padded = codes == _PADDING
    closes = np.zeros(len(codes) + 1, np.bool_)
    closes[ends // 4] = True  # the group after the last of each value
    if (
        (codes == 255).any()
        or padded[:, :2].any()
        or (padded[:, 2] & ~padded[:, 3]).any()
        or (padded[:, 3] & ~closes[1:]).any()
    ):
        raise pa.ArrowInvalid("no base64")
    first, second, third, fourth = (codes[:, place] & 63 for place in range(4))
    groups = np.empty((len(codes), 3), np.uint8)
    groups[:, 0] = first << 2 | second >> 4
    groups[:, 1] = second << 4 | third >> 2
    groups[:, 2] = third << 6 | fourth
    kept = np.ones(groups.shape, np.bool_)
    kept[:, 1:] = ~padded[:, 2:]
    sizes = np.concatenate(([0], np.cumsum(kept.sum(axis=1))))
    offsets = sizes[ends // 4].astype(np.int32)
    buffers = [texts.buffers()[0], pa.py_buffer(offsets), pa.py_buffer(groups[kept])]
    return pa.Array.from_buffers(pa.binary(), len(texts), buffers)
