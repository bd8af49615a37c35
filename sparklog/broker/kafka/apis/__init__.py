"""Every request that is served; importing this registers them all."""

from __future__ import annotations

from sparklog.broker.kafka.apis import (
    api_versions,
    create_topics,
    delete_topics,
    fetch,
    find_coordinator,
    init_producer_id,
    list_offsets,
    metadata,
    produce,
)

__all__ = [
    "api_versions",
    "create_topics",
    "delete_topics",
    "fetch",
    "find_coordinator",
    "init_producer_id",
    "list_offsets",
    "metadata",
    "produce",
]
