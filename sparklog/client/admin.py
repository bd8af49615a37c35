"""Administration of topics, groups and the cluster, through the actions of `flight_messages`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

from sparklog import errors
from sparklog.client import arguments
from sparklog.client.connection import Connection
from sparklog.client.lag import GroupLag, group_lag, partitions_of
from sparklog.client.offsets import (
    OffsetAndMetadata,
    TopicPartition,
    ask,
    ask_leaders,
    check_offsets,
    describe,
    everywhere,
)
from sparklog.formats import flight_messages, group_messages
from sparklog.formats.topic_names import INTERNAL_TOPICS

_ALL_RECORDS: Final = -1
"""As in Kafka's DeleteRecords."""
_DELETION_SECONDS: Final = 60.0
"""Time for rewriting files."""


class Admin:
    """Administration of a cluster.

    Each method raises `BrokerUnavailable` if no broker answers in time, and `OutcomeUnknown` if an
    answer was lost and the change may have been made.
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
    ) -> flight_messages.TopicInfo:
        """Creates a topic, and returns its description.

        Args:
            topic: a name of 1 to 249 letters, digits, '.', '_' and '-'.
            partitions: their number; None: the broker's default.
            config: values by Kafka's topic configuration keys, such as `retention.ms`.
            if_absent: if the topic already exists, return its description and leave it unchanged.

        Raises:
            errors.TopicExists: the topic exists, and `if_absent` is False.
            errors.BadTopicName, errors.BadPartitionCount: the name or the number is invalid.
            errors.UnknownOption, errors.BadOption: a key or value of `config` is invalid.
        """
        request = flight_messages.CreateTopic(
            topic=arguments.topic(topic),
            partitions=-1 if partitions is None else arguments.whole("partitions", partitions),
            config={
                name: _text(value)
                for name, value in _config({} if config is None else config).items()
            },
            if_absent=arguments.flag("if_absent", if_absent),
        )
        created: flight_messages.TopicInfo = self.connection.action("topics.create", request)
        return created

    def figures(self) -> flight_messages.BrokerFigures:
        """Returns counts for the broker that answers, its topics and the groups."""
        found: flight_messages.BrokerFigures = self.connection.action("figures")
        return found

    def status(self) -> flight_messages.BrokerStatus:
        """Returns the broker's process, addresses, uptime and the topics that it holds back."""
        found: flight_messages.BrokerStatus = self.connection.action("status")
        return found

    def topics(self, *, internal: bool = False) -> list[str]:
        """Returns the names of all topics, sorted.

        Args:
            internal: include the topics that brokers write for themselves, such as
                `__consumer_offsets`.
        """
        arguments.flag("internal", internal)
        found: flight_messages.TopicNames = self.connection.action("topics.list")
        return sorted(name for name in found.topics if internal or name not in INTERNAL_TOPICS)

    def describe(self, topic: str) -> flight_messages.TopicInfo:
        """Returns a topic's partitions, configuration and table. Raises `UnknownTopic`."""
        return describe(self.connection, arguments.topic(topic))

    def alter(self, topic: str, config: Mapping[str, Any]) -> flight_messages.TopicInfo:
        """Sets configuration values of a topic; None restores a default.

        Raises `UnknownTopic`, `UnknownOption`, `BadOption`.
        """
        changes = {
            name: None if value is None else _text(value) for name, value in _config(config).items()
        }
        request = flight_messages.AlterTopic(topic=arguments.topic(topic), config=changes)
        info: flight_messages.TopicInfo = self.connection.action("topics.alter", request)
        return info

    def add_partitions(self, topic: str, partitions: int) -> flight_messages.TopicInfo:
        """Increases the number of partitions to `partitions`; existing records do not move.

        Raises `UnknownTopic`, `BadPartitionCount`.
        """
        request = flight_messages.AddPartitions(
            topic=arguments.topic(topic), partitions=arguments.whole("partitions", partitions)
        )
        info: flight_messages.TopicInfo = self.connection.action("topics.add_partitions", request)
        return info

    def compact(self, topic: str) -> flight_messages.TopicInfo:
        """Merges small files of the topic's table now; the janitor does so periodically.

        With `cleanup.policy=compact` it also removes records that are superseded by a later one
        with the same key. Raises `UnknownTopic`.
        """
        name = flight_messages.TopicName(topic=arguments.topic(topic))
        return self.connection.action("topics.compact", name, timeout_seconds=600.0)

    def delete_records(
        self, topic: str, offsets: Mapping[int, int], *, timeout_seconds: float = 60.0
    ) -> dict[int, int]:
        """Deletes the records below an offset in each of the given partitions.

        Args:
            topic: its `cleanup.policy` must include `delete`, the default.
            offsets: by partition, the first offset to keep; -1: delete all records. An offset below
                the log start has no effect.
            timeout_seconds: for publishing the records first. If that takes longer, `TimedOut` is
                raised and nothing is deleted.

        Returns:
            The log start offset of each of these partitions.

        Raises:
            errors.UnknownTopic, errors.UnknownPartition: the topic or partition does not exist.
            errors.OffsetOutOfRange: an offset beyond the end; nothing was deleted.
            errors.PolicyViolation: the topic's `cleanup.policy` is only `compact`.
            errors.BadOption: an argument of the wrong type, or a negative offset other than -1.
        """
        given = arguments.mapping("offsets", offsets, "{partition: offset}")
        timeout_seconds = arguments.number("timeout_seconds", timeout_seconds, least=0)
        name = arguments.topic(topic)
        wanted = {
            arguments.partition("offsets", partition): arguments.whole(
                f"offset of partition {partition}", offset, least=_ALL_RECORDS
            )
            for partition, offset in given.items()
        }
        starts: dict[int, int] = {}

        def delete(broker: int, partitions: list[int]) -> None:
            request = flight_messages.DeleteRecords(
                topic=name,
                offsets={each: wanted[each] for each in partitions},
                timeout_seconds=timeout_seconds,
            )
            # The broker applies the timeout to publishing; the extra time is for the deletion.
            answer: flight_messages.LogStarts = ask(
                self.connection,
                "records.delete",
                request,
                broker,
                timeout_seconds=timeout_seconds + _DELETION_SECONDS,
            )
            starts.update(answer.starts)

        ask_leaders(self.connection, name, wanted, delete)
        return starts

    def delete_topic(self, topic: str) -> None:
        """Deletes a topic and its table. Raises `UnknownTopic`."""
        self.connection.action(
            "topics.delete", flight_messages.TopicName(topic=arguments.topic(topic))
        )

    def groups(self) -> list[group_messages.GroupInfo]:
        """Returns all consumer groups, sorted by name, without their members."""
        found: dict[str, group_messages.GroupInfo] = {}
        for answer in everywhere(self.connection, "groups.list", flight_messages.Empty()):
            found |= {each.group: each for each in answer.groups}
        return sorted(found.values(), key=lambda each: each.group)

    def describe_group(self, group: str) -> group_messages.GroupInfo:
        """Returns a group's state and members. Raises `GroupRefused` if it does not exist."""
        info: group_messages.GroupInfo = self.connection.action(
            "groups.describe", group_messages.GroupName(group=arguments.text("group", group))
        )
        return info

    def group_offsets(self, group: str) -> dict[TopicPartition, int]:
        """Returns the committed offset, the next to be read, by (topic, partition).

        Deleted topics are omitted. The result is empty for a group that does not exist.
        """
        request = group_messages.GroupName(group=arguments.text("group", group))
        found: group_messages.GroupOffsets = self.connection.action("groups.offsets", request)
        return {(each.topic, each.partition): each.offset for each in found.offsets}

    def lag(self, group: str) -> GroupLag:
        """Returns how far a group is behind the end of each partition.

        Covers the partitions for which the group has committed an offset, and those assigned to
        its members. For a Spark query, `group` is the value of its option `commitToGroup`.

        Raises `GroupRefused` if the group does not exist.
        """
        info = self.describe_group(group)
        committed = self.group_offsets(group)
        topics: dict[str, flight_messages.TopicInfo] = {}
        for topic in {each[0] for each in partitions_of(info, committed)}:
            with contextlib.suppress(errors.UnknownTopic):
                topics[topic] = self.describe(topic)
        return group_lag(info, committed, topics)

    def commit_group_offsets(
        self, group: str, offsets: Mapping[TopicPartition, int | OffsetAndMetadata]
    ) -> None:
        """Commits offsets for a group without members; the group may be new.

        Args:
            group: its name.
            offsets: by (topic, partition), the next offset to be read, optionally with a string to
                store with it.

        Raises:
            errors.GroupRefused: the group has members; or a partition does not exist, in which case
                the offsets of the others are committed.
            errors.BadOption: an argument of the wrong type, or a negative offset; nothing was
                committed.
        """
        arguments.text("group", group)
        wanted = [
            group_messages.GroupOffset(
                topic=topic, partition=partition, offset=wanted.offset, metadata=wanted.metadata
            )
            for (topic, partition), wanted in check_offsets(offsets).items()
        ]
        try:
            self.connection.action(
                "groups.commit", group_messages.CommitOffsets(group=group, offsets=wanted)
            )
        except errors.MemberFenced as error:
            hint = ": it has members; stop them first"
            raise errors.GroupRefused(group=group, error="NON_EMPTY_GROUP", hint=hint) from error

    def forget_group_offsets(self, group: str, partitions: Iterable[TopicPartition]) -> None:
        """Deletes a group's committed offsets for these partitions.

        Raises `GroupRefused` if the group does not exist, or a member is subscribed to the topic.
        """
        arguments.text("group", group)
        what = "a list of (topic, partition)"
        wanted = [
            group_messages.GroupPartition(topic=topic, partition=number)
            for topic, number in arguments.each(
                "partitions", partitions, arguments.topic_partition, what
            )
        ]
        self.connection.action(
            "groups.forget", group_messages.ForgetOffsets(group=group, partitions=wanted)
        )

    def delete_group(self, group: str) -> None:
        """Deletes a group and its offsets.

        Raises `GroupRefused` if it has members or does not exist.
        """
        arguments.text("group", group)
        self.connection.action("groups.delete", group_messages.GroupName(group=group))

    def cluster(self) -> flight_messages.ClusterInfo:
        """Returns the cluster's id, root and brokers."""
        info: flight_messages.ClusterInfo = self.connection.action("cluster")
        return info


def _config(given: Any) -> Mapping[str, Any]:
    config = arguments.mapping("config", given, "{key: value}")
    for name in config:
        arguments.text("config", name)
    return config


def _text(value: Any) -> str:
    """Returns a value as Kafka writes it in a configuration."""
    return str(value).lower() if isinstance(value, bool) else str(value)
