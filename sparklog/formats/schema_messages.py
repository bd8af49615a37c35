"""Messages of Arrow Flight's actions about schemas of a registry."""

from __future__ import annotations

import msgspec


class WaitingRecords(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A topic with records in its table whose schemas are not known yet."""

    topic: str
    records: int


class RegistryInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The schema registry of a broker."""

    url: str
    down_since_us: int = 0
    """When it began to give no answer, in µs since the Unix epoch; 0 if it does."""
    reason: str = ""
    """Why it gives no answer."""
    waiting: list[WaitingRecords] = []
    """At most `limits.STATUS_TOPICS` topics."""
    conflicts: list[int] = []
    """Schemas of which it has another text than the root."""


class TopicSchemas(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Requests schemas that values of a topic refer to."""

    topic: str
    ids: list[int]


class SchemasReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    texts: dict[int, str]
    """The stored form of each schema that the root has (`formats.values.registered`)."""
