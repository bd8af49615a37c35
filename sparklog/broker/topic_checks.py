"""Topic checks shared by several parts of the broker, and the log lines for topic changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import structlog

from sparklog import errors, limits
from sparklog.broker.log.topic import Topic
from sparklog.formats import consumer_offsets, topic_config
from sparklog.storage.metadata.model import TopicMetadata
from sparklog.storage.snapshot import TableSnapshot

_log = structlog.get_logger("sparklog.topics")

INTERNAL_TOPICS: Final = frozenset({consumer_offsets.TOPIC})
"""Topics that only the broker writes to and administers."""
_METADATA: Final = "__cluster_metadata"
RESERVED_TOPICS: Final = INTERNAL_TOPICS | {_METADATA, "__transaction_state"}
"""Names that no client may create: Kafka's clients take them for Kafka's own."""


def check_not_internal(topic: str, action: str) -> None:
    """Raises `InternalTopic` for an internal topic: a change would damage groups, as in Kafka."""
    if topic in INTERNAL_TOPICS:
        raise errors.InternalTopic(topic=topic, what=action)


def check_not_reserved(topic: str) -> None:
    """Raises `InternalTopic`, or `BadRequest` for the name of Kafka's metadata log."""
    if topic == _METADATA:
        raise errors.BadRequest(reason=f"{topic} is Kafka's metadata log: choose another name")
    if topic in RESERVED_TOPICS:
        raise errors.InternalTopic(topic=topic, what="create")


def check_typed(config: Mapping[str, str], *, level: int) -> None:
    """Raises `NeedsFeatureLevel` for typed columns in a root that does not have them yet."""
    if topic_config.is_typed(config) and level < limits.TYPED_LEVEL:
        raise errors.NeedsFeatureLevel(
            what="a topic with typed columns", needed=limits.TYPED_LEVEL, level=level
        )


def check_current(snapshot: TableSnapshot, topic: Topic) -> TableSnapshot:
    """Returns `snapshot` if the table is still this topic's. Raises `UnknownTopic` otherwise."""
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
    """Logs a topic change requested by a client; the broker's own changes are not logged."""
    if client:
        _log.info(event, topic=topic, **facts, client=client)
