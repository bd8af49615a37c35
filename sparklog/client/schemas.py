"""Schemas of a registry, as a program that has no access to the root gets them: from a broker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from sparklog import limits
from sparklog.client.connection import Connection
from sparklog.formats.schema_messages import SchemasReply, TopicSchemas
from sparklog.formats.values import registered

if TYPE_CHECKING:
    from sparklog.formats.values.avro.schema import AvroSchema


class BrokerSchemas:
    """The schemas of one topic's values, each requested until it is known.

    `formats.values.typed.Schemas`. May be called from several threads.
    """

    def __init__(self, connection: Connection, topic: str) -> None:
        self._connection = connection
        self._topic = topic
        self._known: dict[int, AvroSchema | str] = {}

    def __call__(self, schema_ids: Iterable[int]) -> Mapping[int, AvroSchema | str]:
        """Returns the known ones. Raises what a request raises."""
        left = sorted(set(schema_ids) - self._known.keys())
        for first in range(0, len(left), limits.SCHEMAS_AT_ONCE):
            ids = left[first : first + limits.SCHEMAS_AT_ONCE]
            found: SchemasReply = self._connection.action(
                "topics.schemas", TopicSchemas(topic=self._topic, ids=ids)
            )
            for each, text in found.texts.items():
                self._known[each] = registered.decode(text.encode()).parsed()
        return self._known
