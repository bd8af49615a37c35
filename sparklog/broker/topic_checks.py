"""Checks of topics that several parts of the broker share."""

from __future__ import annotations

from typing import Final

from sparklog import errors
from sparklog.broker.log.topic import Topic
from sparklog.formats import consumer_offsets
from sparklog.storage.snapshot import TableSnapshot

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
