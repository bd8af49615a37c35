"""Stored data that differs from the data that was written."""

from __future__ import annotations

from sparklog.errors.base import Corrupt


class CorruptObject(Corrupt):
    """A stored object fails a check; `advice` says what to do."""

    code = "corrupt_object"
    template = "{path} is damaged: {check}. {advice}."
    path: str
    check: str
    advice: str = "Restore it from a backup"


class MissingObject(Corrupt):
    """A stored object that another one refers to does not exist: restore it."""

    code = "missing_object"
    template = "{path} is missing: {reason}. Restore it from a backup."
    path: str
    reason: str


class ForeignTable(Corrupt):
    """Another engine changed a topic's table so that sparklog cannot use it: undo the change."""

    code = "foreign_table"
    needs_proof = True  # another broker may have deleted the topic
    template = (
        "The table of topic {topic!r} was changed so that sparklog cannot use it: {reason}. Undo"
        " the change."
    )
    topic: str
    reason: str


class CorruptRecord(Corrupt):
    """A stored record cannot be decoded."""

    code = "corrupt_record"
    template = "Cannot decode {what}: {reason}. It is damaged, or a newer version wrote it."
    what: str
    reason: str


class DataLoss(Corrupt):
    """Records that a reader has yet to read no longer exist: start from an offset that does."""

    code = "data_loss"
    template = "Offsets {start} to {end} of {topic}-{partition} no longer exist: {reason}."
    start: int
    end: int
    topic: str
    partition: int
    reason: str


class SchemaLost(Corrupt):
    """A file cannot be rewritten: the schema that its columns come from is missing or in doubt."""

    code = "schema_lost"
    template = (
        "The file {file} is left as it is: the schema {schema}, which filled its columns, is no"
        " longer in the root, or the registry has another one under its id. `sparklog doctor` names"
        " such schemas."
    )
    schema: int
    file: str
