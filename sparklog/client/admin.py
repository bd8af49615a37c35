"""Topics and the cluster: each method is one action of `wire`, with Python's types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparklog import wire
from sparklog.client.connection import Connection


class Admin:
    """What can be asked of a cluster besides records.

    Every method raises `BrokerUnavailable` if no broker answered in time, and `OutcomeUnknown` if
    an answer was lost and the change may have been made.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def create_topic(
        self,
        topic: str,
        partitions: int | None = None,
        config: Mapping[str, Any] | None = None,
        *,
        if_absent: bool = False,
    ) -> wire.TopicInfo:
        """Creates a topic, or describes the one that is there already `if_absent`.

        Args:
            topic: 1 to 249 of `[a-zA-Z0-9._-]`.
            partitions: None: the broker's default.
            config: Kafka's names for a topic, such as `message.timestamp.type`.
            if_absent: do not refuse a topic that exists.

        Raises:
            errors.TopicExists, errors.BadTopicName, errors.BadPartitionCount, errors.BadOption
        """
        request = wire.CreateTopic(
            topic=topic,
            partitions=-1 if partitions is None else partitions,
            config={name: _text(value) for name, value in (config or {}).items()},
            if_absent=if_absent,
        )
        created: wire.TopicInfo = self.connection.action("topics.create", request)
        return created

    def topics(self) -> list[str]:
        """The names of all topics, sorted."""
        names: wire.TopicNames = self.connection.action("topics.list")
        return sorted(names.topics)

    def describe(self, topic: str) -> wire.TopicInfo:
        """Partitions with their offsets and leaders, config and table. Raises `UnknownTopic`."""
        request = wire.TopicName(topic=topic)
        info: wire.TopicInfo = self.connection.action("topics.describe", request)
        return info

    def alter(self, topic: str, config: Mapping[str, Any]) -> wire.TopicInfo:
        """Sets what has a value, and takes back to the default what is None.

        Raises `UnknownTopic`, `BadOption`.
        """
        changes = {name: None if value is None else _text(value) for name, value in config.items()}
        request = wire.AlterTopic(topic=topic, config=changes)
        info: wire.TopicInfo = self.connection.action("topics.alter", request)
        return info

    def add_partitions(self, topic: str, partitions: int) -> wire.TopicInfo:
        """Makes it `partitions` in total; records stay where they are.

        Raises `UnknownTopic`, `BadPartitionCount`.
        """
        request = wire.AddPartitions(topic=topic, partitions=partitions)
        info: wire.TopicInfo = self.connection.action("topics.add_partitions", request)
        return info

    def compact(self, topic: str) -> wire.TopicInfo:
        """Merges the small files of the topic's table now; the janitor does so in time by itself.

        Where `cleanup.policy` is `compact`, records that a later one of their key supersedes go.
        Raises `UnknownTopic`.
        """
        name = wire.TopicName(topic=topic)
        return self.connection.action("topics.compact", name, timeout_seconds=600.0)

    def delete_topic(self, topic: str) -> None:
        """Raises `UnknownTopic`."""
        self.connection.action("topics.delete", wire.TopicName(topic=topic))

    def cluster(self) -> wire.ClusterInfo:
        """The cluster's id, root and brokers."""
        info: wire.ClusterInfo = self.connection.action("cluster")
        return info


def _text(value: Any) -> str:
    """As Kafka writes a config value."""
    return str(value).lower() if isinstance(value, bool) else str(value)
