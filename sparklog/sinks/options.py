"""Options of a write, validated before a task starts.

| option | default | meaning |
|---|---|---|
| `topic` | the column `topic` | the topic of all rows; takes precedence over the column |
| `valueFormat` | `binary` | `binary`: the column `value` as it is; `json`: one JSON object of all columns but `key`, `topic`, `partition`, `headers` and `timestamp` |
| `txnAppId` | none | batch only: a write with this name and `txnVersion` to a root, or to the topic, is applied once, for the lifetime of the topic |
| `txnVersion` | none | batch only: a whole number from 0 up; set both or neither |
| `failOnDifferentRerun` | stream: `true`; batch: `false` | whether a batch that is repeated with a different number of rows fails |
| `idempotencyKey` | none | batch only: a write with this name to a root, or to the topic, is applied once within 30 days; the newest 50,000 names of a topic are remembered |
| `offsets` | `assign` | `assign`: the broker assigns offsets; `keep`: batch only: rows keep those in the columns `partition` and `offset`, in a topic that is a mirror |
| `offsetRanges` | none | with `offsets` = `keep`: the offsets that the write covers, with or without rows, first and end of each partition: `{"orders": {"0": [0, 1000]}}` |
| `includeHeaders` | none | accepted from Spark's Kafka connector without effect: a column `headers` is always written |

Options `kafka.*` have no effect; one warning says so.
"""  # noqa: E501 (a table)

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from sparklog import errors
from sparklog.formats.topic_names import check_topic_name
from sparklog.options import ConnectorOptions
from sparklog.sinks.kept_offsets import OffsetRanges, parse_ranges
from sparklog.storage.snapshot import BatchKind

_WHERE: Final = 'the sink format("sparklog")'
ONCE: Final = ("txnAppId", "txnVersion", "idempotencyKey")
"""Options that identify a batch write."""

DIFFERENT_RERUN: Final = "failOnDifferentRerun"
_KNOWN: Final = (
    "topic",
    "valueFormat",
    *ONCE,
    DIFFERENT_RERUN,
    "offsets",
    "offsetRanges",
    "includeHeaders",
)
_OF_SPARK: Final = ("checkpointLocation", "queryName")
_NAME = re.compile(r"(?!\.)[a-zA-Z0-9._-]+")
_NAME_LENGTH: Final = 200
_QUERY_LENGTH: Final = 250
_VERSION_MAX: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """Validated options of one write."""

    root: str
    storage: Mapping[str, str] = field(repr=False)
    topic: str | None
    as_json: bool
    query: str | None
    """Identity of a batch write, together with `batch`, if the user has named it."""
    batch: int
    kind: BatchKind
    fails_on_different_rerun: bool
    """True if a batch that is repeated with different numbers of rows is an error."""
    ranges: OffsetRanges | None
    """The offsets that the write covers, if rows keep theirs."""
    notes: tuple[str, ...]
    """Warnings: options of Spark's Kafka sink without effect, secrets that Spark shows."""


def parse(given: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """Returns the validated options. Raises `UnknownOption`, `BadOption`, `BadTopicName`."""
    options = ConnectorOptions(_WHERE, given, _KNOWN + _OF_SPARK if streaming else _KNOWN)
    if streaming:
        for name in ONCE:
            options.refuse(name, "the checkpoint identifies a stream's batches; remove the option")
    topic = options.get("topic")
    query, batch = _identity(options, topic)
    return SinkOptions(
        root=options.root,
        storage=options.storage,
        topic=None if topic is None else check_topic_name(topic),
        as_json=options.one_of("valueFormat", ("binary", "json")) == "json",
        query=query,
        batch=batch,
        kind=_kind(options, streaming=streaming),
        fails_on_different_rerun=options.flag(DIFFERENT_RERUN, default=streaming),
        ranges=_ranges(options, topic, streaming=streaming),
        notes=options.notes,
    )


def _identity(options: ConnectorOptions, topic: str | None) -> tuple[str | None, int]:
    """Returns the query and batch that identify the write, separately for each topic."""
    app, version = options.get("txnAppId"), options.get("txnVersion")
    if app is None and version is None:
        return _query("idempotencyKey", options.get("idempotencyKey"), topic), 0
    options.refuse(
        "idempotencyKey", "txnAppId and txnVersion already identify the write; remove this option"
    )
    if app is None or version is None:
        missing = "txnAppId" if app is None else "txnVersion"
        raise errors.BadOption(
            option=missing, value=None, reason="set both txnAppId and txnVersion, or neither"
        )
    batch = options.whole("txnVersion")
    assert batch is not None
    if not 0 <= batch <= _VERSION_MAX:
        reason = f"expected a whole number from 0 to {_VERSION_MAX}"
        raise errors.BadOption(option="txnVersion", value=version, reason=reason)
    return _query("txnAppId", app, topic), batch


def _kind(options: ConnectorOptions, *, streaming: bool) -> BatchKind:
    if streaming or options.get("txnAppId") is not None:
        return BatchKind.NUMBERED
    return BatchKind.UNNAMED if options.get("idempotencyKey") is None else BatchKind.NAMED


def _ranges(
    options: ConnectorOptions, topic: str | None, *, streaming: bool
) -> OffsetRanges | None:
    if options.one_of("offsets", ("assign", "keep")) == "assign":
        options.refuse("offsetRanges", "it applies to offsets = keep only")
        return None
    if streaming:
        options.refuse(
            "offsets", "a stream cannot keep offsets; use foreachBatch with batch writes"
        )
    if options.one_of("valueFormat", ("binary", "json")) == "json":
        options.refuse("valueFormat", "with offsets = keep values are kept too; remove the option")
    return parse_ranges(options.get("offsetRanges"), topic)


def _query(option: str, name: str | None, topic: str | None) -> str | None:
    if name is None:
        return None
    check_name(option, name)
    return to_topic(name, topic)


def check_name(option: str, name: str, *, most: int = _NAME_LENGTH) -> None:
    """Raises `BadOption` for an invalid name of a query or a write."""
    if not _NAME.fullmatch(name) or len(name) > most:
        reason = f"use 1–{most} characters of letters, digits, '.', '_' and '-', not '.' first"
        raise errors.BadOption(option=option, value=name, reason=reason)


def to_topic(query: str, topic: str | None) -> str:
    """Returns the name of a query's batches for `topic`, or for the topics of the rows if None.

    Batches with the same number for two topics are two batches: if a checkpoint is copied for a
    query with another topic, its batches must not be mistaken for those of the first query.
    """
    if topic is None:
        return query
    name = f"{query}@{topic}"
    if len(name) <= _QUERY_LENGTH:
        return name
    return f"{query}@@{hashlib.sha256(topic.encode()).hexdigest()[:32]}"  # no topic has an @
