"""Names of topics: which are valid, and which are the broker's own."""

from __future__ import annotations

import re
from typing import Final

from sparklog import errors, limits

_TOPIC_NAME: Final = re.compile(rf"[a-zA-Z0-9._-]{{1,{limits.TOPIC_NAME_LENGTH}}}")

INTERNAL_TOPICS: Final = frozenset({"__consumer_offsets", "__transaction_state"})
"""Topics that a broker writes for itself, under Kafka's names."""


def check_topic_name(topic: object) -> str:
    """Returns the name. Raises `BadTopicName`; the rule is Kafka's (`Topic.validate`)."""
    if not isinstance(topic, str) or not _TOPIC_NAME.fullmatch(topic) or topic in (".", ".."):
        shown = topic if isinstance(topic, str | int | float | None) else repr(topic)
        raise errors.BadTopicName(topic=shown)
    return topic
