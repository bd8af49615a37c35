"""The share of a broker in maintenance, and the changes of topics that maintenance completes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sparklog.broker.log.topic import Topic


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedChanges:
    """The changes of topics that the janitor completes once their tables allow it."""

    finish_deletion: Callable[[str], None]
    """Clears the id of a deleted topic whose table is empty."""
    settle_doubts: Callable[[], None]
    """Determines whether the topics in doubt still exist."""
    settle_config: Callable[[str], None]
    """Applies the configuration in the metadata to a topic's table."""
    add_columns: Callable[[str, str], None] = lambda _topic, _schema: None
    """Makes DDL the typed columns of a topic."""
    ready_schemas: Callable[[str, Iterable[int]], Iterable[int]] = lambda _topic_id, ids: ids
    """Returns those of the schemas of a topic, by its id, whose fields have columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Duties:
    """The share of a broker. It does no harm if several have the same, or none for a while."""

    owns: Callable[[Topic], bool] = lambda _topic: True
    """Returns whether it maintains the topic's table."""
    is_controller: Callable[[], bool] = lambda: True
    """Returns whether it maintains the rest of the root."""
