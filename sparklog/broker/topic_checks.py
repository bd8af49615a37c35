"""Checks of topics that several parts of the broker share, and the log lines of their changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import structlog

from sparklog import errors
from sparklog.broker.log.topic import Topic
from sparklog.formats import consumer_offsets
from sparklog.storage.metadata.model import TopicMetadata
from sparklog.storage.snapshot import TableSnapshot

_log = structlog.get_logger("sparklog.topics")

INTERNAL_TOPICS: Final = frozenset({consumer_offsets.TOPIC})
"""Topics that only the broker writes to and administers."""
_METADATA: Final = "__cluster_metadata"
RESERVED_TOPICS: Final = INTERNAL_TOPICS | {_METADATA, "__transaction_state"}
"""Names that no client may create: Kafka's clients take them for topics that Kafka makes itself."""


def check_not_internal(topic: str, action: str) -> None:
    """Raises `InternalTopic`: a client that changes such a topic damages groups, as in Kafka."""
    if topic in INTERNAL_TOPICS:
        raise errors.InternalTopic(topic=topic, what=action)


def check_not_reserved(topic: str) -> None:
    """Raises `InternalTopic`, and `BadRequest` for Kafka's own log of the metadata."""
    if topic == _METADATA:
        raise errors.BadRequest(
            reason=f"{topic} is Kafka's log of its metadata: choose another name"
        )
    if topic in RESERVED_TOPICS:
        raise errors.InternalTopic(topic=topic, what="create")


def check_current(snapshot: TableSnapshot, topic: Topic) -> TableSnapshot:
    """Returns `snapshot` if the table still is this topic's. Raises `UnknownTopic` otherwise."""
    if snapshot.topic_id != topic.topic_id:
        raise errors.UnknownTopic(topic=topic.name)
    return snapshot


def entry_of(topics: Mapping[str, TopicMetadata], topic: Topic) -> TopicMetadata:
    """Returns the topic's entry. Raises `UnknownTopic` if another broker has deleted the topic."""
    known = topics.get(topic.name)
    if known is None or known.topic_id != topic.topic_id:
        raise errors.UnknownTopic(topic=topic.name)
    return known


def log_change(event: str, topic: str, client: str, **facts: object) -> None:
    """Logs a change of a topic that a client has asked for; the broker's own are not logged."""
    if client:
        _log.info(event, topic=topic, **facts, client=client)
