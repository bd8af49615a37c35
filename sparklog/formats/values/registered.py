"""Schemas as a registry has them under an id: their stored form, and their reading.

A schema that refers to others (Confluent's `references`) is stored with the texts of all of them,
so that a reader needs nothing but the object. A reference defines a named type of Avro, which
replaces its first use in the schema.

Pure: no I/O. The encoding is part of the format: it is compared byte by byte, because an id has one
text forever.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from sparklog.formats.values.avro.schema import AvroSchema

AVRO: Final = "AVRO"
"""The type of a schema that names none."""
SCHEMA_BYTES_MAX: Final = 1 << 20
"""The size of a schema with all texts that it refers to."""
REFERENCES_MAX: Final = 100
_LEVELS_MAX: Final = 128
_NAMED: Final = ("record", "enum", "fixed", "error")


class Referenced(msgspec.Struct, frozen=True, array_like=True):
    """A schema that another one refers to."""

    name: str
    schema: str


class RegisteredSchema(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A schema with the texts that it refers to."""

    schema: str
    type: str = AVRO
    references: tuple[Referenced, ...] = ()
    """Each before those that refer to it."""

    def encode(self) -> bytes:
        """Returns the stored form."""
        return _encoder.encode(self)

    def parsed(self) -> AvroSchema | str:
        """Returns the schema, or why no value with its id can be decoded."""
        from sparklog.formats.values.avro import schema as avro_schema

        if self.type != AVRO:
            return f"a schema of type {self.type}"
        try:
            return avro_schema.parse(self._whole())
        except (avro_schema.InvalidSchema, ValueError, RecursionError) as error:
            return f"not a valid schema: {error}"

    def _whole(self) -> str:
        """Returns a text that refers to no other. Raises ValueError and RecursionError."""
        if not self.references:
            return self.schema
        known: dict[str, Any] = {}
        for each in self.references:
            known[each.name] = json.loads(each.schema)
        return json.dumps(_Inlining(known).of(json.loads(self.schema), "", 0))


_encoder: Final = msgspec.json.Encoder(order="deterministic")
_decoder: Final = msgspec.json.Decoder(RegisteredSchema)


def decode(data: bytes | memoryview) -> RegisteredSchema:
    """Decodes the stored form. Raises `msgspec.MsgspecError`."""
    return _decoder.decode(data)


def is_too_large(schema: str, references: Iterable[Referenced]) -> bool:
    """Returns whether the texts have more than `SCHEMA_BYTES_MAX`, or are too many."""
    texts = [each.schema for each in references]
    size = sum(len(each.encode(errors="replace")) for each in (schema, *texts))
    return len(texts) > REFERENCES_MAX or size > SCHEMA_BYTES_MAX


class _Inlining:
    """Replaces the first use of each referenced name by its definition, in the order of reading.

    Names resolve as in Avro's specification ("Names"): one without a dot belongs to the namespace
    that encloses it.
    """

    def __init__(self, definitions: dict[str, Any]) -> None:
        self._left = definitions

    def of(self, node: Any, namespace: str, level: int) -> Any:
        """Returns a schema without references. Raises ValueError for one that is too deep."""
        if level > _LEVELS_MAX:
            raise ValueError(f"nested deeper than {_LEVELS_MAX} levels")
        if isinstance(node, list):
            return [self.of(each, namespace, level + 1) for each in node]
        if isinstance(node, str):
            return self._named(node, namespace, level)
        if not isinstance(node, dict):
            return node
        found = dict(node)
        kind = node.get("type")
        if kind in _NAMED:
            namespace = _namespace(node, namespace)
        if kind in ("record", "error") and isinstance(node.get("fields"), list):
            found["fields"] = [
                {**each, "type": self.of(each.get("type"), namespace, level + 1)}
                if isinstance(each, dict)
                else each
                for each in node["fields"]
            ]
        elif kind == "array":
            found["items"] = self.of(node.get("items"), namespace, level + 1)
        elif kind == "map":
            found["values"] = self.of(node.get("values"), namespace, level + 1)
        elif kind not in _NAMED:
            found["type"] = self.of(kind, namespace, level + 1)
        return found

    def _named(self, name: str, namespace: str, level: int) -> Any:
        full = name if "." in name or not namespace else f"{namespace}.{name}"
        for each in (full, name):
            if each in self._left:
                definition = self._left.pop(each)
                if isinstance(definition, dict) and definition.get("type") in _NAMED:
                    # Otherwise it would inherit the namespace of its first use.
                    definition = {"namespace": "", **definition}
                return self.of(definition, "", level + 1)
        return name


def _namespace(node: dict[str, Any], enclosing: str) -> str:
    name, given = node.get("name"), node.get("namespace")
    if isinstance(name, str) and "." in name:
        return name.rpartition(".")[0]
    return given if isinstance(given, str) else enclosing
