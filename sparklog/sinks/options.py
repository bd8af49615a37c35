"""What a write was asked for, checked before a task starts.

| option | default | meaning |
|---|---|---|
| `topic` | the column `topic` | all rows go to this topic, whatever the column says |
| `valueFormat` | `binary` | `binary`: the column `value` as it is; `json`: one JSON object of all columns but `key`, `topic`, `partition`, `headers` and `timestamp` |
| `txnAppId` | none | batch only: a write of this name and of this `txnVersion` to a root, or to the topic, happens once, for as long as the topic lives |
| `txnVersion` | none | batch only: a whole number from 0 up; both are set, or neither |
| `idempotencyKey` | none | batch only: a write of this name to a root, or to the topic, happens once within 30 days; of a topic the newest 50,000 names are remembered |
| `includeHeaders` | none | of Spark's Kafka connector, and not needed: the column `headers` is written where there is one |

Options `kafka.*` have no meaning here; a query that brings them is told so, and goes on.
"""  # noqa: E501 (a table)

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sparklog import errors
from sparklog.options import Options
from sparklog.record import check_topic_name
from sparklog.storage.snapshot import BatchKind

_WHERE: Final = 'the sink format("sparklog")'
_ONCE: Final = ("txnAppId", "txnVersion", "idempotencyKey")
_KNOWN: Final = ("topic", "valueFormat", *_ONCE, "includeHeaders")
_OF_SPARK: Final = ("checkpointLocation", "queryName")
_NAME = re.compile(r"(?!\.)[a-zA-Z0-9._-]{1,200}")
_QUERY_LENGTH: Final = 250
_VERSION_MAX: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """The options of one write, checked."""

    root: str
    storage: Mapping[str, str]
    topic: str | None
    as_json: bool
    query: str | None
    """What a batch write is known by, with `batch`, where the user has named it."""
    batch: int
    kind: BatchKind
    moved: str | None
    """What to tell a query that came from Spark's Kafka sink."""


def parse(given: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """Raises `UnknownOption`, `BadOption`, `BadTopicName`."""
    options = Options(_WHERE, given, _KNOWN + _OF_SPARK if streaming else _KNOWN)
    if streaming:
        for name in _ONCE:
            options.refuse(name, "a stream's batches are known by its checkpoint")
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
        moved=options.moved,
    )


def _identity(options: Options, topic: str | None) -> tuple[str | None, int]:
    """Query and batch that the write is known by; the same for two topics means two batches."""
    app, version = options.get("txnAppId"), options.get("txnVersion")
    if app is None and version is None:
        return _query("idempotencyKey", options.get("idempotencyKey"), topic), 0
    options.refuse("idempotencyKey", "txnAppId and txnVersion say already what the write is")
    if app is None or version is None:
        missing = "txnAppId" if app is None else "txnVersion"
        raise errors.BadOption(
            option=missing, value=None, reason="set both, txnAppId and txnVersion, or neither"
        )
    batch = options.whole("txnVersion")
    assert batch is not None
    if not 0 <= batch <= _VERSION_MAX:
        reason = f"expected a whole number from 0 to {_VERSION_MAX}"
        raise errors.BadOption(option="txnVersion", value=version, reason=reason)
    return _query("txnAppId", app, topic), batch


def _kind(options: Options, *, streaming: bool) -> BatchKind:
    if streaming or options.get("txnAppId") is not None:
        return BatchKind.NUMBERED
    return BatchKind.UNNAMED if options.get("idempotencyKey") is None else BatchKind.NAMED


def _query(option: str, name: str | None, topic: str | None) -> str | None:
    if name is None:
        return None
    if not _NAME.fullmatch(name):
        reason = "expected up to 200 of [a-zA-Z0-9._-], no '.' first"
        raise errors.BadOption(option=option, value=name, reason=reason)
    return to_topic(name, topic)


def to_topic(query: str, topic: str | None) -> str:
    """The name of a query's batches that go to `topic`; None: each row says where it goes.

    Batches of one number for two topics are two batches: a checkpoint that was copied for a query
    with another target must not meet the batches of the first.
    """
    if topic is None:
        return query
    name = f"{query}@{topic}"
    if len(name) <= _QUERY_LENGTH:
        return name
    return f"{query}@@{hashlib.sha256(topic.encode()).hexdigest()[:32]}"  # no topic begins with @
