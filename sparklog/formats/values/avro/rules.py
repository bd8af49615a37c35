"""The rules by which an Avro value fills columns, one value at a time. They define the result.

- The lengths and numbers by which the end of a field is found are checked in every field, whether
  or not a column has it. A value is bad as a whole if it ends too early or has more bytes after
  its end, if a length or a block's size is wrong, a union has no such branch, a number has more
  than 64 bits, or records, arrays and maps are nested deeper than 128 levels.
- Anything else concerns a field's columns alone. A field whose value does not fit a column
  (`conversions`) is null in it.
- A field that the writer's schema does not have is null: not the default of a reader's schema. A
  field for which there is no column is ignored.
- The fields of a record fill those of a STRUCT by name. A union's value fills the STRUCT of a union
  in the field of its branch (`nodes.member_names`), and a column of another type as if it were
  not in a union. A value that is not in a union fills the STRUCT of a union too, so that a schema
  may change from one to the other.
- Of a map's entries with equal keys, the last one counts.
- A value is bad as a whole if its columns need far more memory than its bytes (`sizes`). In
  addition to the slots of elements, which may take no bytes, the texts of an enum's symbols count.

A value of a type that takes no bytes and fills nothing is never visited, so the time is in
proportion to the bytes. Results are what `arrow_columns` takes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa

from sparklog.formats.values.avro.conversions import Convert, converter_of, misfit, shown_bytes
from sparklog.formats.values.avro.nodes import Kind, Node, is_plain, member_names
from sparklog.formats.values.avro.schema import AvroSchema
from sparklog.formats.values.checks import MAX_DEPTH
from sparklog.formats.values.json_rules import ValueMismatch
from sparklog.formats.values.sizes import SLOT_BYTES_FACTOR, slot_limit, slot_width

FRAME_BYTES: Final = 5
"""Confluent's framing: a zero, and the schema's id as four bytes, big endian."""

CUT_OFF: Final = "ends before its last field"
TRAILING: Final = "has bytes after its last field"
BAD_LENGTH: Final = "has a length beyond its end"
BAD_NUMBER: Final = "has a number of more than 64 bits"
BAD_BRANCH: Final = "has a branch that its union does not have"
BAD_BLOCK: Final = "has a block of another size than it says"
TOO_DEEP: Final = f"nested deeper than {MAX_DEPTH} levels"
TOO_LARGE: Final = f"more than {SLOT_BYTES_FACTOR} times as large in columns"

MAP_SLOT: Final = 8
"""Bytes that a map's key counts."""


class BadValue(Exception):
    """A value is bad as a whole."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        """One of those that this module names."""


class Row(NamedTuple):
    """The columns of one value."""

    cells: list[Any]
    misfits: dict[int, ValueMismatch]
    """Why a column is null, by its number."""


class Decoder:
    """Decodes the values of one writer's schema."""

    def __init__(
        self, schema: AvroSchema, paths: Sequence[str], kinds: Sequence[pa.DataType]
    ) -> None:
        """Args:
        paths: the field that fills each column.
        kinds: each column's type, one that `ddl` has.
        """
        skips, self._columns = _Skips(), len(kinds)
        reads = _Reads(skips)
        self._fields: list[tuple[_Skip, list[tuple[int, _Read]]]] = []
        for name, node in schema.fields:
            wanted = [
                (number, reads.of(node, kinds[number]))
                for number, path in enumerate(paths)
                if path == name
            ]
            self._fields.append((skips.of(node), wanted))
        self._width = sum(map(slot_width, kinds))

    def decode(self, value: bytes) -> Row:
        """Returns the columns of a framed value. Raises `BadValue`."""
        cursor = _Cursor(value, slot_limit(len(value)) - self._width)
        cells: list[Any] = [None] * self._columns
        misfits: dict[int, ValueMismatch] = {}
        try:
            for skip, wanted in self._fields:
                start = cursor.at
                if not wanted:
                    skip(cursor)
                for number, read in wanted:
                    cursor.at, cursor.depth = start, 0
                    try:
                        cells[number] = read(cursor)
                    except ValueMismatch as mismatch:
                        misfits[number] = mismatch
                        cursor.at, cursor.depth = start, 0
                        skip(cursor)
        except IndexError:
            raise BadValue(CUT_OFF) from None
        if cursor.at != len(value):
            raise BadValue(TRAILING)
        return Row(cells, misfits)


class _Cursor:
    """A place in a value. Reading a byte past the end raises `IndexError`."""

    __slots__ = ("at", "data", "depth", "slots")

    def __init__(self, data: bytes, slots: int) -> None:
        self.data = data
        self.at = FRAME_BYTES
        self.depth = 0
        self.slots = slots
        """The bytes that elements may still take."""

    def long(self) -> int:
        """Reads a zigzag varint."""
        data, at = self.data, self.at
        byte = data[at]
        raw, shift = byte & 0x7F, 7
        while byte & 0x80:
            at += 1
            byte = data[at]
            raw |= (byte & 0x7F) << shift
            shift += 7
            if shift == 70 and byte > 1:
                raise BadValue(BAD_NUMBER)
        self.at = at + 1
        return raw >> 1 ^ -(raw & 1)

    def taken(self, size: int) -> bytes:
        """Reads so many bytes."""
        start, end = self.at, self.at + size
        if end > len(self.data):
            raise BadValue(CUT_OFF)
        self.at = end
        return self.data[start:end]

    def length(self) -> int:
        """Reads the length of bytes that follow."""
        found = self.long()
        if not 0 <= found <= len(self.data) - self.at:
            raise BadValue(BAD_LENGTH)
        return found

    def enter(self) -> None:
        """Enters a record, array or map."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise BadValue(TOO_DEEP)

    def count(self, size: int) -> None:
        """Counts bytes in columns."""
        self.slots -= size
        if self.slots < 0:
            raise BadValue(TOO_LARGE)


_Skip: TypeAlias = Callable[[_Cursor], None]
_Read: TypeAlias = Callable[[_Cursor], Any]
"""Raises `ValueMismatch`, wherever the cursor is then."""


def _each_block(cursor: _Cursor, element: _Skip) -> None:
    """Calls `element` for each one of an array or map.

    A block is a count and as many elements; a count of zero is the end. After a negative count, the
    block's size in bytes follows.
    """
    cursor.enter()
    while count := cursor.long():
        end = None
        if count < 0:
            count, size = -count, cursor.long()
            end = cursor.at + size
        if element is not _skip_nothing:
            for _ in range(count):
                element(cursor)
        if end is not None and cursor.at != end:
            raise BadValue(BAD_BLOCK)
    cursor.depth -= 1


# ------------------------------------------------------------------------------ fields to ignore


class _Skips:
    """Functions that go past a value of each type of a schema.

    They call each other with at most three frames for each level of a value.
    """

    def __init__(self) -> None:
        self._known: dict[Node, _Skip] = {}
        """Those of records."""

    def of(self, node: Node) -> _Skip:
        """Returns the function."""
        if node.is_empty:
            return _skip_nothing
        if node.kind is Kind.RECORD:
            return self._record(node)
        if node.kind is Kind.UNION:
            skips = [self.of(each) for each in node.branches]
            return lambda cursor: skips[_branch(cursor, node)](cursor)
        if node.kind is Kind.ARRAY:
            element = self.of(node.inner)
            return lambda cursor: _each_block(cursor, element)
        if node.kind is Kind.MAP:
            return self._map(node)
        size = _SIZES.get(node.kind, node.size)
        if size:
            return lambda cursor: _skip_bytes(cursor, size)
        return _skip_text if node.kind in (Kind.STRING, Kind.BYTES) else _skip_long

    def _record(self, node: Node) -> _Skip:
        if node in self._known:
            return self._known[node]
        skips: list[_Skip] = []

        def skip(cursor: _Cursor) -> None:
            cursor.enter()
            for each in skips:
                each(cursor)
            cursor.depth -= 1

        self._known[node] = skip  # before its fields, which may contain it
        skips += [self.of(inner) for _, inner in node.fields if not inner.is_empty]
        return skip

    def _map(self, node: Node) -> _Skip:
        skip_item = self.of(node.inner)

        def skip(cursor: _Cursor) -> None:
            _skip_text(cursor)
            skip_item(cursor)

        return lambda cursor: _each_block(cursor, skip)


_SIZES: Final = {Kind.BOOLEAN: 1, Kind.FLOAT: 4, Kind.DOUBLE: 8}


def _skip_nothing(_cursor: _Cursor) -> None:
    pass


def _skip_long(cursor: _Cursor) -> None:
    cursor.long()


def _skip_bytes(cursor: _Cursor, size: int) -> None:
    cursor.at += size
    if cursor.at > len(cursor.data):
        raise BadValue(CUT_OFF)


def _skip_text(cursor: _Cursor) -> None:
    size = cursor.length()
    cursor.at += size


def _branch(cursor: _Cursor, union: Node) -> int:
    found = cursor.long()
    if not 0 <= found < len(union.branches):
        raise BadValue(BAD_BRANCH)
    return found


# ------------------------------------------------------------------------------ fields of columns


class _Reads:
    """Functions that read a value of a type for a column."""

    def __init__(self, skips: _Skips) -> None:
        self._skips = skips

    def of(self, node: Node, kind: pa.DataType) -> _Read:
        """Returns the function. It takes as many steps as the column has types, not the schema."""
        if node.kind is Kind.UNION:
            return self._union(node, kind)
        if node.kind is Kind.NULL:
            return _skip_nothing
        if pa.types.is_struct(kind):
            return self._struct(node, kind)
        if node.kind is Kind.ARRAY and pa.types.is_list(kind):
            return self._list(node, kind)
        if node.kind is Kind.MAP and pa.types.is_map(kind):
            return self._map(node, kind)
        return self._leaf_or_misfit(node, kind)

    def _leaf_or_misfit(self, node: Node, kind: pa.DataType) -> _Read:
        if node.kind not in (Kind.RECORD, Kind.ARRAY, Kind.MAP):
            return _leaf(node, converter_of(node, kind))
        refuse = misfit(kind)
        shown: Any = [] if node.kind is Kind.ARRAY else {}
        return lambda _cursor: refuse(shown)

    def _union(self, node: Node, kind: pa.DataType) -> _Read:
        names = member_names(node.branches)
        reads: list[_Read]
        if not is_plain(node) and is_struct_of(kind, names):
            reads = [
                _skip_nothing if branch.kind is Kind.NULL else self._member(branch, name, kind)
                for branch, name in zip(node.branches, names, strict=True)
            ]
        else:
            reads = [self.of(branch, kind) for branch in node.branches]
        return lambda cursor: reads[_branch(cursor, node)](cursor)

    def _member(self, branch: Node, name: str, kind: pa.StructType) -> _Read:
        """Returns the function for a branch of a union whose column is a STRUCT."""
        place = kind.get_field_index(name)
        if place < 0:
            skip, nothing = self._skips.of(branch), (None,) * kind.num_fields

            def ignore(cursor: _Cursor) -> Any:
                skip(cursor)
                return nothing

            return ignore
        inner = self.of(branch, kind[place].type)
        before, after = (None,) * place, (None,) * (kind.num_fields - place - 1)
        return lambda cursor: (*before, _read_inside(name, inner, cursor), *after)

    def _struct(self, node: Node, kind: pa.StructType) -> _Read:
        (name,) = member_names((node,))
        if is_struct_of(kind, [name]) and not is_struct_of(kind, [each for each, _ in node.fields]):
            return self._member(node, name, kind)
        if node.kind is Kind.RECORD:
            return self._record(node, kind)
        return self._leaf_or_misfit(node, kind)

    def _record(self, node: Node, kind: pa.StructType) -> _Read:
        steps: list[tuple[str, int, _Read]] = []
        for name, inner in node.fields:
            place = kind.get_field_index(name)
            if place >= 0:
                steps.append((name, place, self.of(inner, kind[place].type)))
            elif not inner.is_empty:
                steps.append((name, -1, self._skips.of(inner)))
        width = kind.num_fields

        def read(cursor: _Cursor) -> tuple[Any, ...]:
            cursor.enter()
            cells: list[Any] = [None] * width
            for name, place, each in steps:
                if place < 0:
                    each(cursor)
                else:
                    cells[place] = _read_inside(name, each, cursor)
            cursor.depth -= 1
            return tuple(cells)

        return read

    def _list(self, node: Node, kind: pa.ListType) -> _Read:
        inner, width = self.of(node.inner, kind.value_type), slot_width(kind.value_type)

        def read(cursor: _Cursor) -> list[Any]:
            found: list[Any] = []

            def element(cursor: _Cursor) -> None:
                cursor.count(width)
                found.append(_read_inside(str(len(found)), inner, cursor))

            _each_block(cursor, element)
            return found

        return read

    def _map(self, node: Node, kind: pa.MapType) -> _Read:
        inner, width = self.of(node.inner, kind.item_type), MAP_SLOT + slot_width(kind.item_type)

        def read(cursor: _Cursor) -> dict[str, Any]:
            found: dict[str, Any] = {}

            def element(cursor: _Cursor) -> None:
                cursor.count(width)
                encoded = cursor.taken(cursor.length())
                try:
                    key = encoded.decode()
                except UnicodeDecodeError:
                    raise ValueMismatch(shown_bytes(encoded), "valid UTF-8") from None
                found[key] = _read_inside(key, inner, cursor)

            _each_block(cursor, element)
            return found

        return read


def is_struct_of(kind: pa.DataType, names: Sequence[str]) -> bool:
    """Returns whether the type is a STRUCT with a field of one of these names."""
    return pa.types.is_struct(kind) and any(kind.get_field_index(each) >= 0 for each in names)


def _read_inside(name: str, read: _Read, cursor: _Cursor) -> Any:
    try:
        return read(cursor)
    except ValueMismatch as mismatch:
        mismatch.path.insert(0, name)
        raise


_FLOAT: Final = struct.Struct("<f")
_DOUBLE: Final = struct.Struct("<d")


def _leaf(node: Node, convert: Convert) -> _Read:
    """Returns the function for a type that contains no other one."""
    if node.kind in (Kind.INT, Kind.LONG):
        return lambda cursor: convert(cursor.long())
    if node.kind in (Kind.BYTES, Kind.STRING):
        return lambda cursor: convert(cursor.taken(cursor.length()))
    if node.kind is Kind.ENUM:
        return _enum(node.symbols, convert)
    if node.kind is Kind.BOOLEAN:
        return lambda cursor: convert(cursor.taken(1)[0])
    if node.kind is Kind.FIXED:
        size = node.size
        return lambda cursor: convert(cursor.taken(size))
    packed = _FLOAT if node.kind is Kind.FLOAT else _DOUBLE
    width = packed.size
    return lambda cursor: convert(packed.unpack(cursor.taken(width))[0])


def _enum(symbols: tuple[str, ...], convert: Convert) -> _Read:
    sizes = [len(each.encode()) for each in symbols]

    def read(cursor: _Cursor) -> Any:
        number = cursor.long()
        if 0 <= number < len(sizes):
            cursor.count(sizes[number])
        return convert(number)

    return read
