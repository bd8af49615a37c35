"""Mutations of Python source: small mistakes of the kind that loses records.

A mutation replaces one or two spans of a file and leaves the rest of its text as it is. Everything
here is pure: source in, mutations out, in the order of the source.

Left out is what no test should look at: log lines, the text of errors, assertions, annotations,
and the order of assignments in `__init__`.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

_BOUNDARY: Final = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_OPPOSITE: Final = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
_OFFSETS: Final = re.compile(r"(base_|next_|start_|end_|last_|first_)?(offset|sequence)|end|ends")
"""Names of integers at which a mistake of one loses, repeats or hides a record."""
_SYNCS: Final = re.compile(r"_?(f?data|f)?sync(_\w+)?|_?settle\w*|confirm|flush")
_CHECKS: Final = re.compile(r"_?(check|ensure|validate|refuse)(_\w+)?")
_TIMES: Final = re.compile(rb"monotonic|seconds|deadline|_us\b|_ms\b|_at\b")
"""Comparisons of times have no boundary: no promise is about a moment that equals another."""
_THRESHOLDS: Final = re.compile(
    rb"_(BYTES|ROWS)\b|\b_(FEW|SMALL|WORTH|SHOWN)(_[A-Z_]+)?\b|\b_?(target|room|limit|section|file|commit|publish|flush_max)_bytes\b"
    rb"|\b_?(batch|section)_rows\b"
)
"""Nor have sizes at which work is cut into pieces: no promise is about a piece of exactly that
size. Where a size is refused there is one: users see the number."""
_IN_MEMORY: Final = re.compile(
    r"add|append|appendleft|clear|discard|extend|insert|notify|notify_all|pop|popleft|remove|set"
    r"|setdefault|update|move_to_end"
)
"""Methods that change something in memory, and cannot fail where the program is right."""
_COMPUTING: Final = ("np", "pa", "pc", "arrow", "msgspec", "time")
_COMPUTING_METHODS: Final = ("as_py", "astype", "is_null", "items", "keys", "slice", "to_batches")
_BUILTINS: Final = frozenset(dir(builtins))
_LOGS: Final = re.compile(r"_log|logger")


@dataclass(frozen=True, slots=True)
class Edit:
    """Replaces `source[start:end]`, in bytes of UTF-8."""

    start: int
    end: int
    text: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One mistake: where it is, and how it reads before and after."""

    operator: str
    line: int
    function: str
    """The qualified name of the function that contains it."""
    edits: tuple[Edit, ...]
    before: str
    after: str

    def apply(self, source: bytes) -> bytes:
        for edit in sorted(self.edits, key=lambda each: each.start, reverse=True):
            source = source[: edit.start] + edit.text + source[edit.end :]
        return source


_Located: TypeAlias = ast.expr | ast.stmt
_Found: TypeAlias = tuple[str, _Located, tuple[Edit, ...]]


def mutations_of(source: bytes) -> list[Mutation]:
    """Every mutation of a module's source."""
    finder = _Finder(source)
    finder.look(ast.parse(source), ())
    return sorted(finder.found, key=lambda each: (each.edits[0].start, each.operator, each.after))


class _Finder:
    def __init__(self, source: bytes) -> None:
        self._source = source
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self.found: list[Mutation] = []
        self._refusing: set[int] = set()
        """Comparisons on which something is refused."""

    def look(self, node: ast.AST, function: tuple[str, ...]) -> None:
        """Looks for mutations in `node` and below it."""
        if _is_beside_the_point(node):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            function = (*function, node.name)
        if isinstance(node, ast.If) and _refuses(node.body[-1]):
            self._refusing |= {id(each) for each in ast.walk(node.test)}
        if function:
            for operator, where, edits in self._mutate(node, function[-1]):
                self._add(operator, where, edits, function)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "args") and isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.AnnAssign | ast.ClassDef
            ):
                continue
            if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self.look(child, function)

    def _mutate(self, node: ast.AST, function: str) -> Iterator[_Found]:
        for operator in _OPERATORS:
            yield from operator(self, node)
        if function != "__init__":
            for body in _blocks(node):
                yield from self._swaps(body)

    # ---------------------------------------------------------------------- operators

    def _comparisons(self, node: ast.AST) -> Iterator[_Found]:
        if not isinstance(node, ast.Compare) or len(node.ops) != 1:
            return
        kind = type(node.ops[0])
        left, right = node.left, node.comparators[0]
        for operator, table in (("boundary", _BOUNDARY), ("comparison", _OPPOSITE)):
            if kind in table and not (operator == "boundary" and self._has_no_boundary(node)):
                between = Edit(self._end(left), self._start(right), f" {table[kind]} ".encode())
                # Brackets around an operand belong to it, not to the text between.
                if (
                    b"(" not in self._source[between.start : between.end]
                    and b")" not in (self._source[between.start : between.end])
                ):
                    yield operator, node, (between,)

    def _off_by_one(self, node: ast.AST) -> Iterator[_Found]:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            right = node.right
            if isinstance(right, ast.Constant) and right.value == 1 and type(right.value) is int:
                yield "off by one", node, (self._replace(right, b"0"),)
        if isinstance(node, ast.keyword) and _is_offset(node.value):
            yield "off by one", node.value, (self._append(node.value, b" + 1"),)
        if isinstance(node, ast.Return) and node.value is not None and _is_offset(node.value):
            yield "off by one", node.value, (self._append(node.value, b" + 1"),)
        if isinstance(node, ast.Assign) and _is_offset(node.value) and len(node.targets) == 1:
            yield "off by one", node.value, (self._append(node.value, b" + 1"),)
        if isinstance(node, ast.Slice):
            for bound in (node.lower, node.upper):
                if bound is not None and isinstance(bound, ast.Name | ast.Attribute):
                    yield "off by one", bound, (self._append(bound, b" + 1"),)

    def _dropped_checks(self, node: ast.AST) -> Iterator[_Found]:
        if (
            isinstance(node, ast.If)
            and not node.orelse
            and isinstance(node.body[-1], ast.Raise | ast.Return | ast.Continue)
            and not _is_type_checking(node.test)
        ):
            test = node.test
            edits = (
                Edit(self._start(test), self._start(test), b"False and ("),
                Edit(self._end(test), self._end(test), b")"),
            )
            yield "dropped check", test, edits
        if _is_call_of(node, _CHECKS):
            assert isinstance(node, ast.Expr)
            yield "dropped check", node, (self._replace(node, b"pass"),)

    def _missing_syncs(self, node: ast.AST) -> Iterator[_Found]:
        if _is_call_of(node, _SYNCS):
            assert isinstance(node, ast.Expr)
            yield "missing sync", node, (self._replace(node, b"pass"),)

    def _logic(self, node: ast.AST) -> Iterator[_Found]:
        if isinstance(node, ast.BoolOp) and len(node.values) == 2:
            left, right = node.values
            between = self._source[self._end(left) : self._start(right)]
            was, now = (b"and", b"or") if isinstance(node.op, ast.And) else (b"or", b"and")
            if between.split() == [was]:
                edit = Edit(self._end(left), self._start(right), between.replace(was, now))
                yield "logic", node, (edit,)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            # Brackets around the operand stay.
            start = after = self._start(node)
            after += len(b"not")
            while self._source[after : after + 1].isspace():
                after += 1
            yield "logic", node, (Edit(start, after, b""),)

    def _swaps(self, body: Sequence[ast.stmt]) -> Iterator[_Found]:
        """Swaps neighbouring steps that both have an effect beyond the local variables.

        Two changes of memory that have nothing in common have no order: a crash loses both.
        """
        for first, second in itertools.pairwise(body):
            if not (_is_step(first) and _is_step(second)) or _are_apart(first, second):
                continue
            if _is_call_of(first, _CHECKS) and _is_call_of(second, _CHECKS):
                continue  # no promise says which of two mistakes in a request is reported
            if _is_beside_the_point(first) or _is_beside_the_point(second):
                continue
            one, other = self._text(first), self._text(second)
            yield "swapped steps", first, (self._replace(first, other), self._replace(second, one))

    def _has_no_boundary(self, node: ast.Compare) -> bool:
        text = self._text(node)
        if _TIMES.search(text):
            return True
        is_threshold = _THRESHOLDS.search(text) and not isinstance(
            node.comparators[0], ast.Constant
        )
        return bool(is_threshold) and id(node) not in self._refusing

    # ---------------------------------------------------------------------- text

    def _start(self, node: _Located) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def _end(self, node: _Located) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: _Located) -> bytes:
        return self._source[self._start(node) : self._end(node)]

    def _replace(self, node: _Located, text: bytes) -> Edit:
        return Edit(self._start(node), self._end(node), text)

    def _append(self, node: _Located, text: bytes) -> Edit:
        return Edit(self._end(node), self._end(node), text)

    def _add(
        self, operator: str, where: _Located, edits: tuple[Edit, ...], function: tuple[str, ...]
    ) -> None:
        first = self._source.rfind(b"\n", 0, min(edit.start for edit in edits)) + 1
        last = self._source.find(b"\n", max(edit.end for edit in edits))
        shifted = Mutation(
            operator=operator,
            line=where.lineno,
            function=".".join(function),
            edits=tuple(Edit(each.start - first, each.end - first, each.text) for each in edits),
            before="",
            after="",
        )
        passage = self._source[first:last]
        self.found.append(
            Mutation(
                operator=operator,
                line=where.lineno,
                function=".".join(function),
                edits=edits,
                before=passage.decode().strip(),
                after=shifted.apply(passage).decode().strip(),
            )
        )


_OPERATORS: Final[tuple[Callable[[_Finder, ast.AST], Iterator[_Found]], ...]] = (
    _Finder._comparisons,
    _Finder._off_by_one,
    _Finder._dropped_checks,
    _Finder._missing_syncs,
    _Finder._logic,
)


def _blocks(node: ast.AST) -> Iterator[Sequence[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list) and not isinstance(node, ast.ClassDef):
            yield block


def _is_step(node: ast.stmt) -> bool:
    """A call for its effect, or an assignment that others see."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.AugAssign):
        return isinstance(node.target, ast.Attribute | ast.Subscript)
    if isinstance(node, ast.Assign):
        return all(isinstance(each, ast.Attribute | ast.Subscript) for each in node.targets)
    return False


def _refuses(step: ast.stmt) -> bool:
    """Returns true if a statement ends with an error, or with an error's code."""
    if isinstance(step, ast.Return):
        return isinstance(step.value, ast.Attribute)
    return isinstance(step, ast.Raise)


def _are_apart(one: ast.stmt, other: ast.stmt) -> bool:
    """Returns true if both change only memory, and neither touches the other's."""
    changed, also = _changed_in_memory(one), _changed_in_memory(other)
    if changed is None or also is None:
        return False
    return not (changed & _names_in(other) or also & _names_in(one))


def _changed_in_memory(step: ast.stmt) -> set[str] | None:
    """The variables and attributes that `step` changes; None where it may do more than that."""
    if isinstance(step, ast.Assign | ast.AugAssign):
        targets = step.targets if isinstance(step, ast.Assign) else [step.target]
        calls = [node for node in ast.walk(step.value) if isinstance(node, ast.Call)]
    else:
        call = step.value if isinstance(step, ast.Expr) else None
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            return None
        if not _IN_MEMORY.fullmatch(call.func.attr):
            return None
        targets = [call.func.value]
        calls = [node for node in ast.walk(call) if isinstance(node, ast.Call) and node is not call]
    if not all(_is_harmless(each.func) for each in calls):
        return None
    return {name for name in map(_last_name, targets) if name}


def _is_harmless(called: ast.expr) -> bool:
    """Returns true if a function only computes: a builtin, a class, or one of an array library."""
    if isinstance(called, ast.Attribute):
        root: ast.expr = called
        while isinstance(root, ast.Attribute):
            root = root.value
        library = root.id if isinstance(root, ast.Name) else ""
        return library in _COMPUTING or called.attr in _COMPUTING_METHODS
    return isinstance(called, ast.Name) and (called.id in _BUILTINS or called.id[0].isupper())


def _last_name(node: ast.expr) -> str:
    """The name of what changes: `rows` of `self.rows`, `self.rows[1]` and `rows`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _names_in(node: ast.AST) -> set[str]:
    names = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    return names | {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _is_offset(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
    return isinstance(name, str) and _OFFSETS.fullmatch(name) is not None


def _called(node: ast.AST) -> ast.expr | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return node.value.func
    return None


def _is_call_of(node: ast.AST, names: re.Pattern[str]) -> bool:
    called = _called(node)
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return names.fullmatch(name) is not None


def _is_beside_the_point(node: ast.AST) -> bool:
    """Returns true if `node` is a log line, a docstring, or for type checkers only."""
    called = _called(node)
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
        return _LOGS.fullmatch(called.value.id) is not None or called.attr in ("warn", "_warn")
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    return isinstance(node, ast.If) and _is_type_checking(node.test)


def _is_type_checking(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"
