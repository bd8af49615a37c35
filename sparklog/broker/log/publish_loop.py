"""Publish loop: publishes each topic when it is due, independently of failures in other topics.

Any error in a topic's table, files or records holds back that topic: its name and the reason are
logged, and it is tried again at growing intervals. Only the end of the broker's epoch, and a disk
that failed to flush, end the broker.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from sparklog import errors
from sparklog.broker.backoff import ENDS_THE_BROKER, RetrySchedule
from sparklog.broker.log.partitions import PartitionTable, Topic
from sparklog.broker.log.publisher import Publisher
from sparklog.clock import Clock
from sparklog.settings import PublisherSettings

_log = structlog.get_logger("sparklog.broker")


class PublishLoop:
    """Publishes the topics that are due. One caller at a time."""

    def __init__(
        self,
        publisher: Publisher,
        partition_table: PartitionTable,
        *,
        settings: PublisherSettings,
        check_leadership: Callable[[], None],
        on_published: Callable[[], None],
        clock: Clock,
        retry_seconds: float,
    ) -> None:
        """`check_leadership` raises `BrokerFenced` if a newer broker has taken over.

        `on_published` is called after every commit.
        """
        self._publisher = publisher
        self._partition_table = partition_table
        self._on_published = on_published
        self._settings = settings
        self._check_leadership = check_leadership
        self._backoff = RetrySchedule(clock, first_seconds=retry_seconds)

    def tick(self) -> None:
        """Makes one commit of every topic that is due. Raises `BrokerFenced` and `SyncFailed`."""
        due = self._publisher.due(
            interval_seconds=self._settings.interval_seconds,
            publish_bytes=self._settings.publish_bytes,
        )
        for topic in due:
            if self._backoff.is_waiting(topic.topic_id):
                continue
            if not self.publish(topic):
                self._backoff.failed(topic.topic_id)
                self._backoff.retain({each.topic_id for each in self._partition_table.waiting()})

    def publish(self, topic: Topic) -> bool:
        """Makes one commit. Returns False if it failed and should be tried again later."""
        try:
            self._publish(topic)
        except ENDS_THE_BROKER:
            raise
        except Exception as error:
            reason = str(error) or repr(error)
            if topic.held_back != reason:
                _log.error("cannot publish", topic=topic.name, reason=reason)
            topic.held_back = reason
            return False
        self._backoff.succeeded(topic.topic_id)
        if topic.held_back is not None:
            _log.info("the topic is published again", topic=topic.name)
            topic.held_back = None
        self._on_published()
        return True

    def _publish(self, topic: Topic) -> None:
        try:
            self._publisher.publish(topic)
        except errors.PublisherFenced as ahead:
            # A newer broker is in the metadata before it writes a table. If there is none, another
            # engine has moved the table's `txn`, and new records would be lost below it.
            self._check_leadership()
            reason = (
                f"partition {ahead.partition} ends at {ahead.found} in the table, and at"
                f" {ahead.end} in the log: another engine has moved its txn"
            )
            moved = errors.ForeignTable(topic=topic.name, reason=reason)
            self._partition_table.block(
                topic, topic.partition(ahead.partition), moved, end=ahead.end
            )
            raise moved from ahead
