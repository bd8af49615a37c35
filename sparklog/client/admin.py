"""Topics and the cluster: each method is one action of `wire`, with Python's types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from sparklog import errors, wire
from sparklog.client import arguments
from sparklog.client.connection import Connection
from sparklog.client.reading import TopicPartition, check_offsets

_ALL_RECORDS: Final = -1
"""As Kafka's DeleteRecords has it."""
_DELETION_SECONDS: Final = 60.0
"""For files that are rewritten."""


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
            topic=arguments.topic(topic),
            partitions=-1 if partitions is None else arguments.whole("partitions", partitions),
            config={
                name: _text(value)
                for name, value in _config({} if config is None else config).items()
            },
            if_absent=arguments.flag("if_absent", if_absent),
        )
        created: wire.TopicInfo = self.connection.action("topics.create", request)
        return created

    def status(self) -> wire.Status:
        """The broker that leads: its process, addresses and age, and how its topics are."""
        found: wire.Status = self.connection.action("status")
        return found

    def topics(self) -> list[str]:
        """The names of all topics, sorted."""
        names: wire.TopicNames = self.connection.action("topics.list")
        return sorted(names.topics)

    def describe(self, topic: str) -> wire.TopicInfo:
        """Partitions with their offsets and leaders, config and table. Raises `UnknownTopic`."""
        request = wire.TopicName(topic=arguments.topic(topic))
        info: wire.TopicInfo = self.connection.action("topics.describe", request)
        return info

    def alter(self, topic: str, config: Mapping[str, Any]) -> wire.TopicInfo:
        """Sets what has a value, and takes back to the default what is None.

        Raises `UnknownTopic`, `BadOption`.
        """
        changes = {
            name: None if value is None else _text(value) for name, value in _config(config).items()
        }
        request = wire.AlterTopic(topic=arguments.topic(topic), config=changes)
        info: wire.TopicInfo = self.connection.action("topics.alter", request)
        return info

    def add_partitions(self, topic: str, partitions: int) -> wire.TopicInfo:
        """Makes it `partitions` in total; records stay where they are.

        Raises `UnknownTopic`, `BadPartitionCount`.
        """
        request = wire.AddPartitions(
            topic=arguments.topic(topic), partitions=arguments.whole("partitions", partitions)
        )
        info: wire.TopicInfo = self.connection.action("topics.add_partitions", request)
        return info

    def compact(self, topic: str) -> wire.TopicInfo:
        """Merges the small files of the topic's table now; the janitor does so in time by itself.

        Where `cleanup.policy` is `compact`, records that a later one of their key supersedes go.
        Raises `UnknownTopic`.
        """
        name = wire.TopicName(topic=arguments.topic(topic))
        return self.connection.action("topics.compact", name, timeout_seconds=600.0)

    def delete_records(
        self, topic: str, offsets: Mapping[int, int], *, timeout_seconds: float = 60.0
    ) -> dict[int, int]:
        """Deletes, of each partition that is named, the records below its offset, for good.

        Args:
            topic: its `cleanup.policy` names `delete`, as it does unless it was told otherwise.
            offsets: by partition; -1: all records that there are. One below the log start changes
                nothing.
            timeout_seconds: what is to be deleted is published first; `TimedOut` is raised, and
                nothing deleted, where that takes longer.

        Returns:
            Of each partition that was named the log start offset.

        Raises:
            errors.UnknownTopic, errors.UnknownPartition: there is no such.
            errors.OffsetOutOfRange: an offset beyond the end; nothing was deleted anywhere.
            errors.PolicyViolation: the topic keeps the last record of each key.
            errors.BadOption: an argument of another type, or a negative offset that is not -1.
        """
        given = arguments.mapping("offsets", offsets, "{partition: offset}")
        timeout_seconds = arguments.number("timeout_seconds", timeout_seconds, least=0)
        request = wire.DeleteRecords(
            topic=arguments.topic(topic),
            offsets={
                arguments.partition("offsets", partition): arguments.whole(
                    f"offset of partition {partition}", offset, least=_ALL_RECORDS
                )
                for partition, offset in given.items()
            },
            timeout_seconds=timeout_seconds,
        )
        # The broker keeps the time of publishing; what is added is for the deletion itself.
        answer: wire.LogStarts = self.connection.action(
            "records.delete", request, timeout_seconds=timeout_seconds + _DELETION_SECONDS
        )
        return answer.starts

    def delete_topic(self, topic: str) -> None:
        """Raises `UnknownTopic`."""
        self.connection.action("topics.delete", wire.TopicName(topic=arguments.topic(topic)))

    def groups(self) -> list[wire.GroupInfo]:
        """All consumer groups, sorted by name, without their members."""
        found: wire.GroupList = self.connection.action("groups.list")
        return sorted(found.groups, key=lambda each: each.group)

    def describe_group(self, group: str) -> wire.GroupInfo:
        """State and members; `client.assign` reads what they want and have.

        Raises `GroupRefused` where there is no such group.
        """
        info: wire.GroupInfo = self.connection.action(
            "groups.describe", wire.GroupName(group=arguments.text("group", group))
        )
        return info

    def group_offsets(self, group: str) -> dict[TopicPartition, int]:
        """The next offset that a group wants of each partition that it has committed any of.

        Nothing of topics that are gone, or where there is no such group.
        """
        request = wire.GroupName(group=arguments.text("group", group))
        found: wire.GroupOffsets = self.connection.action("groups.offsets", request)
        return {(each.topic, each.partition): each.offset for each in found.offsets}

    def commit_group_offsets(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Sets where a group without members goes on; the group may be new.

        Args:
            group: its name.
            offsets: by (topic, partition), the next offset to be read.

        Raises:
            errors.GroupRefused: it has members, or a partition does not exist; the others stand.
            errors.BadOption: an argument of another type, or a negative offset; nothing was
                committed.
        """
        arguments.text("group", group)
        wanted = [
            wire.GroupOffset(topic=topic, partition=partition, offset=offset)
            for (topic, partition), offset in check_offsets(offsets).items()
        ]
        try:
            self.connection.action("groups.commit", wire.CommitOffsets(group=group, offsets=wanted))
        except errors.MemberFenced as error:
            hint = ": it has members; stop them first"
            raise errors.GroupRefused(group=group, error="NON_EMPTY_GROUP", hint=hint) from error

    def forget_group_offsets(self, group: str, partitions: Iterable[TopicPartition]) -> None:
        """Takes back what a group has committed of these partitions.

        Raises `GroupRefused` where there is no such group, or a member subscribes to the topic.
        """
        arguments.text("group", group)
        what = "a list of (topic, partition)"
        wanted = [
            wire.GroupPartition(topic=topic, partition=number)
            for topic, number in arguments.each(
                "partitions", partitions, arguments.topic_partition, what
            )
        ]
        self.connection.action("groups.forget", wire.ForgetOffsets(group=group, partitions=wanted))

    def delete_group(self, group: str) -> None:
        """With all that it has committed. Raises `GroupRefused`: it has members, or is none."""
        arguments.text("group", group)
        self.connection.action("groups.delete", wire.GroupName(group=group))

    def cluster(self) -> wire.ClusterInfo:
        """The cluster's id, root and brokers."""
        info: wire.ClusterInfo = self.connection.action("cluster")
        return info


def _config(given: Any) -> Mapping[str, Any]:
    config = arguments.mapping("config", given, "{key: value}")
    for name in config:
        arguments.text("config", name)
    return config


def _text(value: Any) -> str:
    """As Kafka writes a config value."""
    return str(value).lower() if isinstance(value, bool) else str(value)
