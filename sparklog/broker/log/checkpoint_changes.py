"""Partitions whose bounds or states have changed since the last checkpoint.

The lock of the `LedPartitions` guards all of it.
"""

from __future__ import annotations

from collections.abc import Callable

from sparklog.broker.log.partition import Partition
from sparklog.broker.log.topic import Topic
from sparklog.storage.snapshot import NOT_LED, Bounds


class CheckpointChanges:
    """Collects changes, so that the cost of a checkpoint is proportional to them."""

    def __init__(self) -> None:
        self._bounds: dict[str, tuple[Bounds, ...]] = {}
        """Bounds of each partition, by topic id, as `bounds` last returned them."""
        self._bounds_changed: dict[Partition, Topic] = {}
        """Partitions whose bounds may differ from those in `_bounds`."""
        self._states_changed: dict[Partition, str] = {}
        """Partitions whose producers or Spark batches have changed, with their topic's id."""
        self._states_dropped: set[tuple[str, int]] = set()
        """Partitions whose states the next checkpoint drops."""

    def note_bounds(self, topic: Topic, partition: Partition) -> None:
        self._bounds_changed[partition] = topic

    def note_state(self, topic_id: str, partition: Partition) -> None:
        self._states_changed[partition] = topic_id

    def forget(self, partition: Partition) -> None:
        """Forgets a partition of a deleted topic."""
        self._states_changed.pop(partition, None)
        self._bounds_changed.pop(partition, None)

    def forget_topic(self, topic_id: str) -> None:
        self._bounds.pop(topic_id, None)

    def drop(self, topic_id: str, partition: Partition) -> None:
        """Omits a partition that another broker leads from the next checkpoint on."""
        self.forget(partition)
        self._states_dropped.add((topic_id, partition.number))
        known = self._bounds.get(topic_id, ())
        if partition.number < len(known):
            before, after = known[: partition.number], known[partition.number + 1 :]
            self._bounds[topic_id] = (*before, NOT_LED, *after)

    def bounds(self, is_alive: Callable[[Topic], bool]) -> dict[str, tuple[Bounds, ...]]:
        """Returns the bounds of each partition of each topic, by topic id.

        Recomputes only those of the partitions that have changed since the last call.
        """
        found: dict[str, list[Bounds]] = {}
        for partition, topic in self._bounds_changed.items():
            if not is_alive(topic):
                continue  # deleted since
            known = found.get(topic.topic_id)
            if known is None:
                known = found[topic.topic_id] = list(self._bounds.get(topic.topic_id, ()))
                known += [NOT_LED] * (topic.count - len(known))
            known[partition.number] = partition.bounds()
        self._bounds_changed.clear()
        self._bounds |= {topic_id: tuple(each) for topic_id, each in found.items()}
        return self._bounds.copy()

    def take_states(self) -> tuple[dict[Partition, str], frozenset[tuple[str, int]]]:
        """Returns the partitions whose states have changed, and those that were dropped."""
        changed, self._states_changed = self._states_changed, {}
        dropped, self._states_dropped = frozenset(self._states_dropped), set()
        return changed, dropped
