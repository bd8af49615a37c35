"""What a write was asked for, checked before a task starts.

| option | default | meaning |
|---|---|---|
| `topic` | the column `topic` | all rows go to this topic, whatever the column says |
| `idempotencyKey` | | a batch write of this name to a root, or to the topic, happens once, for as long as brokers remember it (30 days) |
"""  # noqa: E501 (a table)

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sparklog import errors
from sparklog.options import Options
from sparklog.record import check_topic_name

_WHERE: Final = 'the sink format("sparklog")'
_KNOWN: Final = ("topic", "idempotencyKey")
_OF_SPARK: Final = ("checkpointLocation", "queryName")
_KEY = re.compile(r"(?!\.)[a-zA-Z0-9._-]{1,200}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """The options of one write, checked."""

    root: str
    storage: Mapping[str, str]
    topic: str | None
    query: str | None
    """What the batch is known by, where the user has named it."""


def parse(given: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """Raises `UnknownOption`, `BadOption`, `BadTopicName`."""
    options = Options(_WHERE, given, _KNOWN + _OF_SPARK if streaming else _KNOWN)
    if streaming:
        options.refuse("idempotencyKey", "a stream's batches are known by its checkpoint")
    topic = options.get("topic")
    return SinkOptions(
        root=options.root,
        storage=options.storage,
        topic=None if topic is None else check_topic_name(topic),
        query=_query(options.get("idempotencyKey"), topic),
    )


def _query(key: str | None, topic: str | None) -> str | None:
    """The same key for two topics means two batches."""
    if key is None:
        return None
    query = key if topic is None else f"{key}@{topic}"
    if not _KEY.fullmatch(key) or len(query) > 250:
        reason = "expected up to 200 of [a-zA-Z0-9._-], no '.' first, and 250 with the topic"
        raise errors.BadOption(option="idempotencyKey", value=key, reason=reason)
    return query
