"""DDL of typed columns, such as `customer STRING, amount DECIMAL(10,2)`, and their Arrow types.

The syntax is Spark's (`colTypeList` of its SqlBaseParser), the Arrow types are those that Spark
exchanges, and every column and field is nullable.

| DDL | Arrow |
|---|---|
| BOOLEAN, TINYINT or BYTE, SMALLINT or SHORT | bool, int8, int16 |
| INT or INTEGER, BIGINT or LONG | int32, int64 |
| FLOAT or REAL, DOUBLE | float, double |
| DECIMAL, DEC or NUMERIC, with (p) or (p, s); otherwise (10, 0) | decimal128(p, s) |
| STRING, BINARY | string, binary |
| DATE, TIMESTAMP or TIMESTAMP_LTZ | date32[day], timestamp[us, tz=UTC] |
| ARRAY<t>, MAP<STRING, t>, STRUCT<name: t, ...> | list, map, struct |

Keywords are case-insensitive. A name with characters other than ASCII letters, digits and `_` is
written in backquotes; the colon after a name is optional.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import pyarrow as pa

MAX_LEAVES: Final = 500  # of all columns together
MAX_DEPTH: Final = 16  # of a column; of INT it is 1, of ARRAY<INT> 2

_REFUSED: Final = re.compile(r"[ ,;{}()\n\t=]")
"""Characters that Delta rejects in column names."""
_TOKEN: Final = re.compile(
    r"\s*(?:(?P<word>[A-Za-z_][A-Za-z0-9_]*)|(?P<number>[0-9]+)|`(?P<quoted>(?:[^`]|``)*)`"
    r"|(?P<sign>[<>(),:]))"
)
_END: Final = re.compile(r"\s*")

_LEAVES: Final = {
    "BOOLEAN": pa.bool_(),
    "TINYINT": pa.int8(),
    "SMALLINT": pa.int16(),
    "INT": pa.int32(),
    "BIGINT": pa.int64(),
    "FLOAT": pa.float32(),
    "DOUBLE": pa.float64(),
    "STRING": pa.string(),
    "BINARY": pa.binary(),
    "DATE": pa.date32(),
    "TIMESTAMP": pa.timestamp("us", "UTC"),
}
_NAMES: Final = {kind: name for name, kind in _LEAVES.items()}
_SYNONYMS: Final = {
    "BYTE": "TINYINT",
    "SHORT": "SMALLINT",
    "INTEGER": "INT",
    "LONG": "BIGINT",
    "REAL": "FLOAT",
    "DEC": "DECIMAL",
    "NUMERIC": "DECIMAL",
    "TIMESTAMP_LTZ": "TIMESTAMP",
}
_ALLOWED: Final = ", ".join((*_LEAVES, "DECIMAL(p,s)", "ARRAY<t>", "MAP<STRING, t>", "STRUCT<…>"))
_INSTEAD: Final = {
    "TIMESTAMP_NTZ": "it needs a table feature that older readers lack; use TIMESTAMP or STRING",
    "VARIANT": "few readers of Delta know it; use STRING and parse_json",
    "CHAR": "its length is not checked here; use STRING",
    "CHARACTER": "its length is not checked here; use STRING",
    "VARCHAR": "its length is not checked here; use STRING",
}
_CLAUSES: Final = {
    "NOT": "NOT NULL is not possible, because a record may lack any field",
    "COMMENT": "comments are not kept",
    "COLLATE": "collations need a table feature that older readers lack",
    "DEFAULT": "an absent field is null",
    "GENERATED": "every column is derived from the record",
}


class InvalidDdl(ValueError):
    """A text is not DDL of columns that a typed topic can have; its message says where and why."""


class _Token(NamedTuple):
    kind: str
    text: str
    at: int
    """The index of its first character."""


def parse(text: str) -> list[pa.Field]:
    """Returns the columns. Raises `InvalidDdl`."""
    return _Parser(text).columns()


def of_fields(fields: Sequence[pa.Field]) -> str:
    """Returns DDL of which `parse` returns these fields."""
    return ", ".join(f"{_identifier(field.name)} {ddl_of(field.type)}" for field in fields)


def ddl_of(kind: pa.DataType) -> str:
    """Returns the type as DDL, in capitals. Raises `InvalidDdl` for one that no DDL has."""
    if pa.types.is_struct(kind):
        inner = (f"{_identifier(field.name)}: {ddl_of(field.type)}" for field in kind)
        return f"STRUCT<{', '.join(inner)}>"
    if pa.types.is_map(kind):
        return f"MAP<{ddl_of(kind.key_type)}, {ddl_of(kind.item_type)}>"
    if pa.types.is_list(kind):
        return f"ARRAY<{ddl_of(kind.value_type)}>"
    if pa.types.is_decimal128(kind):
        return f"DECIMAL({kind.precision},{kind.scale})"
    if kind not in _NAMES:
        raise InvalidDdl(f"{kind} is not a type of a typed column. Allowed are {_ALLOWED}.")
    return _NAMES[kind]


def quoted(name: str) -> str:
    """Returns the name as a quoted SQL identifier."""
    return "`" + name.replace("`", "``") + "`"


def _identifier(name: str) -> str:
    found = _TOKEN.fullmatch(name)
    return name if found and found["word"] == name else quoted(name)


def is_usable(name: str) -> bool:
    """Returns whether Delta accepts the name for a new column."""
    return bool(name) and is_text(name) and not _REFUSED.search(name)


def is_text(name: str) -> bool:
    """Returns whether UTF-8 can encode the name, which may contain half of a surrogate pair."""
    try:
        return name.encode() is not None
    except UnicodeEncodeError:
        return False


def list_of(kind: pa.DataType) -> pa.ListType:
    """Returns the type of an ARRAY, its elements named as in Spark and Delta."""
    return pa.list_(pa.field("element", kind))


class _Parser:
    """A recursive descent over the tokens of one text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._leaves = 0
        self._token = self._scanned()

    def columns(self) -> list[pa.Field]:
        """Parses the whole text."""
        fields = self._fields("", 1)
        if self._token.kind != "end":
            raise self._error(self._token.at, "a comma or the end must follow a column")
        return fields

    # ------------------------------------------------------------------------------ tokens

    def _scanned(self) -> _Token:
        found = _TOKEN.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
            kind = found.lastgroup or ""
            # a quoted name begins with its quote
            at = found.start(kind) - (kind == "quoted")
            return _Token(kind, found[kind], at)
        blank = _END.match(self._text, self._at)
        assert blank is not None
        if blank.end() == len(self._text):
            return _Token("end", "", blank.end())
        shown = self._text[blank.end()]
        reason = f"{shown!r} is unexpected; write unusual names in backquotes"
        raise self._error(blank.end(), "the backquote is not closed" if shown == "`" else reason)

    def _next(self) -> _Token:
        token, self._token = self._token, self._scanned()
        return token

    def _takes(self, sign: str) -> bool:
        taken = self._token.kind == "sign" and self._token.text == sign
        if taken:
            self._next()
        return taken

    def _expect(self, sign: str, after: str) -> None:
        if not self._takes(sign):
            raise self._error(self._token.at, f"{sign!r} is missing after {after}")

    def _error(self, at: int, reason: str, path: str = "") -> InvalidDdl:
        where = f"{path}: " if path else ""
        return InvalidDdl(f"{where}{reason} (character {at + 1})")

    # ------------------------------------------------------------------------------ grammar

    def _fields(self, path: str, depth: int) -> list[pa.Field]:
        """Parses the columns, or the fields of a STRUCT, which has at least one."""
        known: set[str] = set()
        fields = []
        while True:
            name, inside = self._name(path, known)
            self._takes(":")
            fields.append(pa.field(name, self._type(inside, depth)))
            if self._token.kind == "word":
                clause = self._token.text.upper()
                reason = _CLAUSES.get(clause, f"{clause} is unexpected")
                raise self._error(self._token.at, reason, inside)
            if not self._takes(","):
                return fields

    def _name(self, path: str, known: set[str]) -> tuple[str, str]:
        token = self._next()
        if token.kind not in ("word", "quoted"):
            raise self._error(token.at, "the name of a column or field is missing", path)
        name = token.text.replace("``", "`") if token.kind == "quoted" else token.text
        inside = f"{path}.{name}" if path else name
        if not is_usable(name):
            raise self._error(token.at, f"Delta does not accept the name {name!r}", path)
        if name.lower() in known:
            raise self._error(token.at, "the name is used twice; its case does not matter", inside)
        known.add(name.lower())
        return name, inside

    def _type(self, path: str, depth: int) -> pa.DataType:
        token = self._next()
        if token.kind != "word":
            raise self._error(token.at, f"a type is missing. Allowed are {_ALLOWED}", path)
        if depth > MAX_DEPTH:
            raise self._error(token.at, f"types are nested deeper than {MAX_DEPTH} levels", path)
        written = token.text.upper()
        name = _SYNONYMS.get(written, written)
        if name in _NESTED:
            self._expect("<", name)
            kind = _NESTED[name](self, path, depth + 1)
            self._expect(">", f"the types of {name}")
            return kind
        self._leaves += 1
        if self._leaves > MAX_LEAVES:
            raise self._error(
                token.at, f"there are more than {MAX_LEAVES} columns and nested fields", path
            )
        if name == "DECIMAL":
            return self._decimal(path)
        if name not in _LEAVES:
            reason = _INSTEAD.get(name, f"allowed are {_ALLOWED}")
            raise self._error(token.at, f"{written} is not supported: {reason}", path)
        return _LEAVES[name]

    def _decimal(self, path: str) -> pa.DataType:
        at, digits = self._token.at, [10, 0]
        if self._takes("("):
            digits = [self._number(path), 0]
            if self._takes(","):
                digits[1] = self._number(path)
            self._expect(")", "the digits of DECIMAL")
        precision, scale = digits
        if not 1 <= precision <= 38 or scale > precision:
            raise self._error(
                at, "DECIMAL has 1 to 38 digits, and no more of them in the fraction", path
            )
        return pa.decimal128(precision, scale)

    def _number(self, path: str) -> int:
        token = self._next()
        if token.kind != "number" or len(token.text) > 4:
            raise self._error(token.at, "a number of digits is missing", path)
        return int(token.text)

    def _array(self, path: str, depth: int) -> pa.DataType:
        return list_of(self._type(f"{path}[]", depth))

    def _map(self, path: str, depth: int) -> pa.DataType:
        at = self._token.at
        if not pa.types.is_string(self._type(path, depth)):
            raise self._error(at, "the keys of a MAP are STRING, as in JSON", path)
        self._expect(",", "the key type of MAP")
        return pa.map_(pa.string(), self._type(f"{path}{{}}", depth))

    def _struct(self, path: str, depth: int) -> pa.DataType:
        return pa.struct(self._fields(path, depth))


_NESTED: Final[dict[str, Callable[[_Parser, str, int], pa.DataType]]] = {
    "ARRAY": _Parser._array,
    "MAP": _Parser._map,
    "STRUCT": _Parser._struct,
}
