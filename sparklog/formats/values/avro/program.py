"""Programs by which the compiled loop (`kernel`) decodes values: writer schemas as numbers.

- A program has one sequence of instructions for each schema. An instruction is a row of numbers:
  operation, output, branch of null, another instruction, and three operands.
- If the branch of null is not negative, the value is in a union of null and one other type. The
  number of its branch is read first; for a null, the output and all outputs inside become null, and
  the program continues at the other instruction, which is the one after the value.
- Outputs are the columns and the types inside them, numbered in preorder.
- What the loop cannot do, such as a conversion that is rarely needed, is the operation `SLOW`: the
  rules decode that value, if it gets there.
- Records that are ignored are subroutines, once for each schema, because they may contain
  themselves, and may be used many times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparklog.formats.values.avro.conversions import INSTANTS, TO_MICROS
from sparklog.formats.values.avro.nodes import Kind, Logical, Node, is_plain, member_names
from sparklog.formats.values.avro.rules import MAP_SLOT, is_struct_of
from sparklog.formats.values.avro.schema import AvroSchema
from sparklog.formats.values.sizes import slot_width

# Columns of an instruction.
OPERATION, OUTPUT, NULL_BRANCH, NEXT, A, B, C = range(7)
WIDTH: Final = 8  # an eighth column is unused, so that an instruction has 32 bytes

# Operations. Those that write one cell to the output, from PUT_BOOLEAN to BEGIN_STRUCT:
PUT_NULL: Final = 0
PUT_BOOLEAN: Final = 1
PUT_WHOLE: Final = 2  # A: 1 for an int
PUT_TIME: Final = 3  # A: 1 for an int; B: a factor if positive, a divisor if negative; C: 1 checks
PUT_DATE: Final = 4
PUT_FLOAT: Final = 5
PUT_DOUBLE: Final = 6
PUT_WHOLE_AS_DOUBLE: Final = 7  # A: 1 for an int
PUT_TEXT: Final = 8
PUT_BYTES: Final = 9
PUT_FIXED: Final = 10  # A: its size
PUT_SYMBOL: Final = 11  # A: the first symbol; B: how many there are
PUT_DECIMAL: Final = 12  # A: the size of a fixed, or -1
BEGIN_STRUCT: Final = 13  # the cell; its fields follow
# The elements of a list, or those that are ignored, which end with `NEXT_ELEMENT`:
BEGIN_ELEMENTS: Final = 14  # A: bytes that an element counts; B: 1 for a map
# Those that ignore a value:
SKIP_NUMBER: Final = 15
SKIP_BYTES: Final = 16  # A: how many
SKIP_TEXT: Final = 17
SKIP_COUNTS: Final = 18  # of an array whose elements take no bytes
# Those that change the place in the program, or in the value:
NEXT_ELEMENT: Final = 19  # A: the instruction that began the elements
BRANCH: Final = 20  # A: the first entry in the table; B: how many there are
JUMP: Final = 21  # to the other instruction
CALL: Final = 22  # A: the subroutine
RETURN: Final = 23
REMEMBER: Final = 24
GO_BACK: Final = 25  # to the place that was remembered
END: Final = 26
SLOW: Final = 27

MAX_INSTRUCTIONS: Final = 20_000
"""For one schema; the values of a larger one are decoded by the rules."""

# Kinds of outputs.
BITS, NUMBERS, TEXTS, STRUCTS, LISTS = range(5)

Ints = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]
Longs = npt.NDArray[np.int64]


class Outputs(NamedTuple):
    """The columns and the types inside them, in preorder."""

    kinds: Ints
    ends: Ints
    """The number after the last one inside."""
    widths: Ints
    """Bytes of a value of `NUMBERS`."""


class Program(NamedTuple):
    """The instructions for some schemas."""

    code: Ints
    table: Ints
    """The instructions for the branches of unions."""
    symbol_ends: Longs
    """The place where each symbol of enums ends in `symbols`, after a zero."""
    symbols: Bytes
    starts: Mapping[AvroSchema, int]
    """The first instruction for each schema; `NO_PROGRAM` if it is too large."""


NO_SCHEMA: Final = -1
"""In place of a first instruction, for a value that is not to be decoded."""
NO_PROGRAM: Final = -2
"""In place of a first instruction, for a value that the rules decode."""


def outputs_of(kinds: Sequence[pa.DataType]) -> Outputs:
    """Returns the outputs of columns of these types."""
    found: list[tuple[int, int]] = []
    ends: list[int] = []

    def add(kind: pa.DataType) -> None:
        number = len(found)
        found.append(_output(kind))
        ends.append(0)
        for each in children_of(kind):
            add(each)
        ends[number] = len(found)

    for kind in kinds:
        add(kind)
    numbers = np.array(found, np.int32).reshape(-1, 2)
    return Outputs(numbers[:, 0].copy(), np.array(ends, np.int32), numbers[:, 1].copy())


def children_of(kind: pa.DataType) -> list[pa.DataType]:
    """Returns the types directly inside a column's type."""
    if pa.types.is_struct(kind):
        return [field.type for field in kind]
    if pa.types.is_map(kind):
        return [pa.struct([kind.key_field, kind.item_field])]
    return [kind.value_type] if pa.types.is_list(kind) else []


def _output(kind: pa.DataType) -> tuple[int, int]:
    if pa.types.is_struct(kind):
        return STRUCTS, 0
    if pa.types.is_map(kind) or pa.types.is_list(kind):
        return LISTS, 0
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return TEXTS, 0
    if pa.types.is_boolean(kind):
        return BITS, 0
    return NUMBERS, kind.byte_width if pa.types.is_decimal(kind) else kind.bit_width // 8


class Compiler:
    """Writes programs for columns."""

    def __init__(self, paths: Sequence[str], kinds: Sequence[pa.DataType]) -> None:
        """Takes the field that fills each column, and the column's type."""
        self._columns: dict[str, list[tuple[int, pa.DataType]]] = {}
        ends, output = outputs_of(kinds).ends, 0
        for path, kind in zip(paths, kinds, strict=True):
            self._columns.setdefault(path, []).append((output, kind))
            output = int(ends[output])
        self.empty = Program(
            np.zeros((0, WIDTH), np.int32),
            np.zeros(0, np.int32),
            np.zeros(1, np.int64),
            np.zeros(0, np.uint8),
            {},
        )

    def extended(self, known: Program, schema: AvroSchema) -> Program:
        """Returns the program with one more schema."""
        writer = _Writer(len(known.code), len(known.table), known.symbol_ends)
        try:
            self._write(writer, schema)
        except _TooLarge:
            return known._replace(starts={**known.starts, schema: NO_PROGRAM})
        code = np.array(writer.code, np.int32).reshape(-1, WIDTH)
        symbols = np.frombuffer(b"".join(writer.symbols), np.uint8)
        return Program(
            np.concatenate([known.code, code]),
            np.concatenate([known.table, np.array(writer.table, np.int32)]),
            np.concatenate([known.symbol_ends, np.array(writer.symbol_ends, np.int64)]),
            np.concatenate([known.symbols, symbols]),
            {**known.starts, schema: len(known.code)},
        )

    def _write(self, writer: _Writer, schema: AvroSchema) -> None:
        for name, node in schema.fields:
            columns = self._columns.get(name, [])
            if not columns:
                writer.skip(node)
            if len(columns) > 1:
                writer.add(REMEMBER)
            for number, (output, kind) in enumerate(columns):
                if number:
                    writer.add(GO_BACK)
                writer.put(node, kind, output)
        missing = self._columns.keys() - {name for name, _ in schema.fields}
        for output in sorted(output for name in missing for output, _ in self._columns[name]):
            writer.add(PUT_NULL, output)
        writer.add(END)
        writer.finish()


class _TooLarge(Exception):
    """A schema's program has too many instructions."""


class _Writer:
    """Writes the instructions for one schema."""

    def __init__(self, first: int, first_entry: int, symbol_ends: Longs) -> None:
        self.code: list[list[int]] = []
        self.table: list[int] = []
        self.symbol_ends: list[int] = []
        self.symbols: list[bytes] = []
        self._first = first
        self._first_entry = first_entry
        self._first_symbol = len(symbol_ends) - 1
        self._symbols_end = int(symbol_ends[-1])
        self._enums: dict[Node, int] = {}
        self._subroutines: dict[Node, int] = {}
        """The instruction where each one begins, once it is written."""
        self._calls: list[tuple[int, Node]] = []

    @property
    def here(self) -> int:
        """The number of the next instruction."""
        return self._first + len(self.code)

    def add(
        self, operation: int, output: int = -1, null: int = -1, a: int = 0, b: int = 0, c: int = 0
    ) -> int:
        """Adds an instruction, and returns its number."""
        if len(self.code) >= MAX_INSTRUCTIONS:
            raise _TooLarge
        number = self.here
        self.code.append([operation, output, null, number + 1, a, b, c, 0])
        return number

    def _change(self, number: int, column: int, value: int) -> None:
        self.code[number - self._first][column] = value

    def finish(self) -> None:
        """Writes the subroutines."""
        while self._calls:
            number, node = self._calls.pop()
            if node not in self._subroutines:
                self._subroutines[node] = self.here
                for _, inner in node.fields:
                    self.skip(inner)
                self.add(RETURN)
            self._change(number, A, self._subroutines[node])

    # ------------------------------------------------------------------------------ ignoring

    def skip(self, node: Node, null: int = -1) -> None:
        """Ignores a value."""
        if node.is_empty:
            if null >= 0:
                self.add(SKIP_BYTES, null=null)
        elif node.kind is Kind.RECORD:
            self._calls.append((self.add(CALL, null=null), node))
        elif node.kind is Kind.UNION:
            self._skip_union(node)
        elif node.kind is Kind.ARRAY and node.inner.is_empty:
            self.add(SKIP_COUNTS, null=null)
        elif node.kind in (Kind.ARRAY, Kind.MAP):
            begin = self.add(BEGIN_ELEMENTS, null=null)
            if node.kind is Kind.MAP:
                self.add(SKIP_TEXT)
            self.skip(node.inner)
            self.add(NEXT_ELEMENT, a=begin)
            self._change(begin, NEXT, self.here)
        elif node.kind in (Kind.STRING, Kind.BYTES):
            self.add(SKIP_TEXT, null=null)
        elif size := _SIZES.get(node.kind, node.size):
            self.add(SKIP_BYTES, null=null, a=size)
        else:
            self.add(SKIP_NUMBER, null=null)

    def _skip_union(self, node: Node) -> None:
        null, other = _nullable(node)
        if other is not None:
            self.skip(other, null)
        else:
            self._branches([lambda each=each: self.skip(each) for each in node.branches])

    def _branches(self, writers: Sequence[Any]) -> None:
        """Adds the instructions for each branch of a union."""
        entries = range(len(self.table), len(self.table) + len(writers))
        self.table += [0] * len(writers)
        self.add(BRANCH, a=self._first_entry + entries.start, b=len(writers))
        jumps = []
        for entry, write in zip(entries, writers, strict=True):
            self.table[entry] = self.here
            write()
            jumps.append(self.add(JUMP))
        for each in jumps:
            self._change(each, NEXT, self.here)

    # ------------------------------------------------------------------------------ columns

    def put(self, node: Node, kind: pa.DataType, output: int, null: int = -1) -> None:
        """Fills an output of a column's type, as `rules` does."""
        if node.kind is Kind.UNION:
            self._put_union(node, kind, output)
        elif node.kind is Kind.NULL:
            self.add(PUT_NULL, output, null)
        elif pa.types.is_struct(kind):
            self._put_struct(node, kind, output, null)
        elif node.kind is Kind.ARRAY and pa.types.is_list(kind):
            begin = self.add(BEGIN_ELEMENTS, output, null, slot_width(kind.value_type))
            self.put(node.inner, kind.value_type, output + 1)
            self.add(NEXT_ELEMENT, a=begin)
            self._change(begin, NEXT, self.here)
        elif node.kind is Kind.MAP and pa.types.is_map(kind):
            width = MAP_SLOT + slot_width(kind.item_type)
            begin = self.add(BEGIN_ELEMENTS, output, null, width, 1)
            self.add(BEGIN_STRUCT, output + 1)
            self.add(PUT_TEXT, output + 2)
            self.put(node.inner, kind.item_type, output + 3)
            self.add(NEXT_ELEMENT, a=begin)
            self._change(begin, NEXT, self.here)
        elif node.kind in (Kind.RECORD, Kind.ARRAY, Kind.MAP) or pa.types.is_nested(kind):
            self.add(SLOW, output, null)
        else:
            self._put_leaf(node, kind, output, null)

    def _put_union(self, node: Node, kind: pa.DataType, output: int) -> None:
        names = member_names(node.branches)
        null, other = _nullable(node)
        if other is not None:
            self.put(other, kind, output, null)
        elif not is_plain(node) and is_struct_of(kind, names):
            self._branches(
                [
                    lambda branch=branch, name=name: self._put_member(branch, name, kind, output)
                    for branch, name in zip(node.branches, names, strict=True)
                ]
            )
        else:
            self._branches(
                [lambda each=each: self.put(each, kind, output) for each in node.branches]
            )

    def _put_member(
        self, branch: Node, name: str, kind: pa.StructType, output: int, null: int = -1
    ) -> None:
        if branch.kind is Kind.NULL:
            self.add(PUT_NULL, output)
            return
        begin = self.add(BEGIN_STRUCT, output, null)
        filled = False
        for field, inner in zip(kind, _inner_outputs(kind, output), strict=True):
            if field.name == name:
                self.put(branch, field.type, inner)
                filled = True
            else:
                self.add(PUT_NULL, inner)
        if not filled:
            self.skip(branch)
        self._change(begin, NEXT, self.here)

    def _put_struct(self, node: Node, kind: pa.StructType, output: int, null: int) -> None:
        (name,) = member_names((node,))
        if is_struct_of(kind, [name]) and not is_struct_of(kind, [each for each, _ in node.fields]):
            self._put_member(node, name, kind, output, null)
            return
        if node.kind is not Kind.RECORD:
            self.add(SLOW, output, null)
            return
        begin = self.add(BEGIN_STRUCT, output, null)
        inner_outputs = _inner_outputs(kind, output)
        filled = set()
        for each, inner in node.fields:
            place = kind.get_field_index(each)
            if place < 0:
                self.skip(inner)
            else:
                filled.add(place)
                self.put(inner, kind[place].type, inner_outputs[place])
        for place in sorted(set(range(kind.num_fields)) - filled):
            self.add(PUT_NULL, inner_outputs[place])
        self._change(begin, NEXT, self.here)

    def _put_leaf(self, node: Node, kind: pa.DataType, output: int, null: int) -> None:
        is_int = int(node.kind is Kind.INT)
        if node.logical is Logical.DECIMAL:
            is_same = pa.types.is_decimal(kind) and (kind.precision, kind.scale) == (38, node.scale)
            size = node.size if node.kind is Kind.FIXED else -1
            self.add(PUT_DECIMAL if is_same else SLOW, output, null, size)
        elif node.logical is Logical.DATE:
            self.add(PUT_DATE if pa.types.is_date(kind) else SLOW, output, null)
        elif node.logical in TO_MICROS:
            self._put_time(node, kind, output, null)
        elif node.kind in (Kind.INT, Kind.LONG) and kind == pa.int64():
            self.add(PUT_WHOLE, output, null, is_int)
        elif node.kind in (Kind.INT, Kind.LONG) and kind == pa.float64():
            self.add(PUT_WHOLE_AS_DOUBLE, output, null, is_int)
        elif node.kind is Kind.ENUM and pa.types.is_string(kind):
            self.add(PUT_SYMBOL, output, null, self._symbols(node), len(node.symbols))
        elif node.kind is Kind.FIXED and node.logical is None and pa.types.is_binary(kind):
            self.add(PUT_FIXED, output, null, node.size)
        elif node.kind in (Kind.STRING, Kind.BYTES) and pa.types.is_string(kind):
            self.add(PUT_TEXT, output, null)
        elif (node.kind, kind) in _LEAVES:
            self.add(_LEAVES[node.kind, kind], output, null)
        else:
            self.add(SLOW, output, null)

    def _put_time(self, node: Node, kind: pa.DataType, output: int, null: int) -> None:
        factor, divisor = TO_MICROS[node.logical]
        is_instant = node.logical in INSTANTS
        if kind != (pa.timestamp("us", "UTC") if is_instant else pa.int64()):
            self.add(SLOW, output, null)
            return
        is_int, scale = int(node.kind is Kind.INT), factor if divisor == 1 else -divisor
        self.add(PUT_TIME, output, null, is_int, scale, int(is_instant))

    def _symbols(self, node: Node) -> int:
        """Returns the number of an enum's first symbol."""
        if node not in self._enums:
            self._enums[node] = self._first_symbol + len(self.symbols)
            for each in node.symbols:
                self.symbols.append(each.encode())
                self._symbols_end += len(self.symbols[-1])
                self.symbol_ends.append(self._symbols_end)
        return self._enums[node]


_SIZES: Final = {Kind.BOOLEAN: 1, Kind.FLOAT: 4, Kind.DOUBLE: 8}
_LEAVES: Final = {
    (Kind.BOOLEAN, pa.bool_()): PUT_BOOLEAN,
    (Kind.FLOAT, pa.float64()): PUT_FLOAT,
    (Kind.DOUBLE, pa.float64()): PUT_DOUBLE,
    (Kind.STRING, pa.binary()): PUT_TEXT,
    (Kind.BYTES, pa.binary()): PUT_BYTES,
}


def _nullable(union: Node) -> tuple[int, Node | None]:
    """Returns the branch of null and the other type, which is None if there is no such pair."""
    kinds = [each.kind is Kind.NULL for each in union.branches]
    if len(kinds) != 2 or sum(kinds) != 1:
        return -1, None
    null = kinds.index(True)
    return null, union.branches[1 - null]


def _inner_outputs(kind: pa.StructType, output: int) -> list[int]:
    """Returns the output of each field of a STRUCT's output."""
    found, ends = [], outputs_of([field.type for field in kind]).ends
    inner = 0
    for _ in range(kind.num_fields):
        found.append(output + 1 + inner)
        inner = int(ends[inner])
    return found
