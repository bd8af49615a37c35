"""Deletion of records below an offset: Kafka's DeleteRecords."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sparklog import errors
from sparklog.broker.leader_metadata import LeaderMetadata
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.partition import Partition
from sparklog.broker.log.topic import Topic
from sparklog.broker.publishing import Goal, PublishWaiter, publish_timed_out
from sparklog.broker.topic_checks import check_not_internal
from sparklog.formats import topic_config
from sparklog.formats.flight_messages import DeleteRecords, LogStarts
from sparklog.storage.maintenance import retention


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """Records of a topic to delete once they are published."""

    topic: Topic
    log_starts: Mapping[int, int]
    """The requested log start offset of each partition."""
    raised: Mapping[int, int]
    """Those beyond the partition's current log start offset."""

    @property
    def goal(self) -> Goal:
        """The offsets up to which the partitions must be published first."""
        return self.topic, self.raised


class RecordDeletion:
    """Raises log start offsets.

    A listener that must not block calls `begin`, then `is_published` until it is true, then `end`.
    """

    def __init__(
        self,
        metadata: LeaderMetadata,
        led_partitions: LedPartitions,
        publishing: PublishWaiter,
    ) -> None:
        self._metadata = metadata
        self._led_partitions = led_partitions
        self._publishing = publishing

    def delete(self, request: DeleteRecords) -> LogStarts:
        """Raises the log start offsets of the given partitions, and returns the resulting ones.

        Records below it can no longer be read and are gone from the topic's table; their files
        are removed after the grace period of replaced files. Repeating the call changes nothing.

        Raises, with no effect, `UnknownTopic`, `InternalTopic`, `UnknownPartition`,
        `PolicyViolation` if the topic's `cleanup.policy` does not include `delete`,
        `OffsetOutOfRange` beyond the high watermark, `TimedOut` if the records cannot be published
        in time; and what `retention.delete_records` raises.
        """
        deletion = self.begin(request)
        if deletion.raised:
            self._publishing.wait([deletion.goal], request.timeout_seconds)
        return self.end(deletion)

    def begin(self, request: DeleteRecords) -> Deletion:
        """Checks a request. Raises what `delete` raises before it publishes."""
        check_not_internal(request.topic, "delete records of")
        topic = self._led_partitions.topic(request.topic)
        if "delete" not in topic_config.value_of(topic.config, "cleanup.policy").split(","):
            reason = "its cleanup.policy is not delete, so only newer records replace its records"
            raise errors.PolicyViolation(topic=topic.name, reason=reason)
        log_starts = {
            number: _log_start(topic, topic.partition(number), offset)
            for number, offset in request.offsets.items()
        }
        raised = {
            number: offset
            for number, offset in log_starts.items()
            if offset > topic.partition(number).start
        }
        return Deletion(topic=topic, log_starts=log_starts, raised=raised)

    def is_published(self, deletion: Deletion) -> bool:
        """Returns true once the table contains all records to delete; else requests publication."""
        return not self._publishing.behind([deletion.goal])

    def timed_out(self, deletion: Deletion, timeout_seconds: float) -> errors.TimedOut:
        """Returns the error to raise if the records were not published in time."""
        return publish_timed_out([deletion.topic], timeout_seconds)

    def end(self, deletion: Deletion) -> LogStarts:
        """Raises the log start offsets. Raises what `retention.delete_records` raises."""
        topic, raised = deletion.topic, deletion.raised
        if raised:
            with self._metadata.stopping_on_sync_failure(
                f"deletion of records of topic {topic.name}"
            ):
                self._metadata.reload()
                deleted = retention.delete_records(topic.table, topic.topic_id, raised)
                self._led_partitions.advance_start(topic, deleted.starts)
        return LogStarts(
            starts={number: topic.partition(number).start for number in deletion.log_starts}
        )


def _log_start(topic: Topic, partition: Partition, offset: int) -> int:
    """Returns the requested log start; -1 means the high watermark. Raises `OffsetOutOfRange`."""
    end = partition.end
    if not -1 <= offset <= end:
        raise errors.OffsetOutOfRange(
            topic=topic.name,
            partition=partition.number,
            offset=offset,
            start=partition.start,
            end=end,
        )
    return end if offset == -1 else offset
