"""Structs that several threads decode for the first time at the same moment.

msgspec collects what it knows about a struct when the first decoder of it is made. Two threads that
both do so end the process by a segmentation fault, so decoders are made when modules are imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

import sparklog
from sparklog.formats import flight_messages

PACKAGE: Final = Path(sparklog.__file__).parent
_TYPES: Final = {"dict", "list", "tuple", "str", "int", "float", "bool", "bytes"}


def test_messages_have_decoders_from_the_start() -> None:
    """No request is the first of its kind to be decoded, in whatever thread it comes."""
    kinds = {
        each
        for each in vars(flight_messages).values()
        if isinstance(each, type) and issubclass(each, msgspec.Struct)
    }
    assert flight_messages.TailRequest in kinds
    assert flight_messages._decoders.keys() == kinds


def test_structs_are_decoded_by_decoders_of_their_modules() -> None:
    """No call names a struct to be decoded: such calls of several threads may be the first."""
    found = {
        f"{path.relative_to(PACKAGE)}:{call.lineno}"
        for path in PACKAGE.rglob("*.py")
        for call in _calls(ast.parse(path.read_text("utf-8")))
        if not _has_types_of_python(call)
    }
    assert found == set()


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yields the calls of msgspec that decode a type which they name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            is_of_a_type = any(each.arg == "type" for each in node.keywords)
            if called.startswith("msgspec.") and called.endswith(".decode") and is_of_a_type:
                yield node


def _has_types_of_python(call: ast.Call) -> bool:
    (kind,) = (each.value for each in call.keywords if each.arg == "type")
    return {each.id for each in ast.walk(kind) if isinstance(each, ast.Name)} <= _TYPES
