"""The publishing of all topics: each when it is due, and none waits for one that cannot be.

Whatever goes wrong with a topic's table, its files or its records holds back that topic: its name
and the reason are in the log, and it is tried again, less and less often. Only the end of the
broker's epoch, and a disk that has failed to flush, end the broker.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from sparklog import errors
from sparklog.broker.partitions import Ledger, Topic
from sparklog.broker.publisher import Publisher
from sparklog.broker.retrying import ENDS_THE_BROKER, Backoff
from sparklog.clock import Clock
from sparklog.settings import PublisherSettings

_log = structlog.get_logger("sparklog.broker")


class Publishing:
    """One caller at a time."""

    def __init__(
        self,
        publisher: Publisher,
        ledger: Ledger,
        *,
        settings: PublisherSettings,
        check_lease: Callable[[], None],
        published_more: Callable[[], None],
        clock: Clock,
        retry_seconds: float,
    ) -> None:
        """`check_lease` raises `BrokerFenced` where a newer broker has taken over.

        `published_more` is told of every commit.
        """
        self._publisher = publisher
        self._ledger = ledger
        self._published_more = published_more
        self._settings = settings
        self._check_lease = check_lease
        self._backoff = Backoff(clock, first_seconds=retry_seconds)

    def tick(self) -> None:
        """One commit of every topic that is due. Raises `BrokerFenced` and `SyncFailed`."""
        due = self._publisher.due(
            interval_seconds=self._settings.interval_seconds,
            publish_bytes=self._settings.publish_bytes,
        )
        for topic in due:
            if self._backoff.is_waiting(topic.topic_id):
                continue
            if not self.publish(topic):
                self._backoff.failed(topic.topic_id)
                self._backoff.keep({each.topic_id for each in self._ledger.waiting()})

    def publish(self, topic: Topic) -> bool:
        """One commit; False where it failed, and should be tried again later."""
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
            _log.info("publishing again", topic=topic.name)
            topic.held_back = None
        self._published_more()
        return True

    def _publish(self, topic: Topic) -> None:
        try:
            self._publisher.publish(topic)
        except errors.PublisherFenced as ahead:
            # A newer broker is in the metadata before it writes a table. Where there is none,
            # somebody has moved the table's `txn`, and records from here on would be lost.
            self._check_lease()
            reason = (
                f"partition {ahead.partition} ends at {ahead.found} in the table, and at"
                f" {ahead.end} in the log: another engine has moved its txn"
            )
            moved = errors.ForeignTable(topic=topic.name, reason=reason)
            self._ledger.block(topic, topic.partition(ahead.partition), moved, end=ahead.end)
            raise moved from ahead
