"""Names of topics: the valid ones, and those reserved for the broker."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from sparklog import errors

_TOPIC_NAME_LENGTH = 249

_TOPIC_NAME: Final = re.compile(rf"[a-zA-Z0-9._-]{{1,{_TOPIC_NAME_LENGTH}}}")

INTERNAL_TOPICS: Final = frozenset({"__consumer_offsets", "__transaction_state"})
"""Topics that a broker writes for itself, under Kafka's names."""

MIRROR_SOURCE: Final = "mirror.source"
"""The topic configuration key that names the topic being mirrored; not a key of Kafka's."""

_COMPARED_TOPICS: Final = 10_000
"""With more topics than this, an unknown one is not compared: this many take up to 0.7 s."""


def check_topic_name(topic: object) -> str:
    """Returns the name. Raises `BadTopicName`; the rule is Kafka's (`Topic.validate`)."""
    if not isinstance(topic, str) or not _TOPIC_NAME.fullmatch(topic) or topic in (".", ".."):
        shown = topic if isinstance(topic, str | int | float | None) else repr(topic)
        raise errors.BadTopicName(topic=shown)
    return topic


def unknown_topic(topic: str, known: Collection[str]) -> errors.UnknownTopic:
    """Returns the error for a topic that does not exist, with the most similar one in `known`.

    For errors shown to users, but not for errors of brokers, of which clients can cause any number.
    """
    nearest = None
    if len(known) <= _COMPARED_TOPICS:
        nearest = errors.nearest_name(
            topic, (name for name in known if name not in INTERNAL_TOPICS)
        )
    if nearest in (None, topic):  # it may have been created since
        return errors.UnknownTopic(topic=topic)
    return errors.UnknownTopic(topic=topic, hint=f" Did you mean {nearest!r}?")
