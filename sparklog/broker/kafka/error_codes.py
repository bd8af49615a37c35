"""Kafka's error codes for sparklog's errors, in one complete table.

Some codes say that the client knows more than the broker (`broker/leader_metadata.py`). They are
counted when they are chosen, for the reply that the current task prepares, so that a connection
notices that its reply may contain one, no matter which code chose it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Final

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.groups.messages import GroupError

CODES: Final[Mapping[type[errors.SparklogError], ErrorCode]] = {
    errors.NotLeader: ErrorCode.not_leader_or_follower,
    errors.EarlierBatchMissing: ErrorCode.not_leader_or_follower,
    errors.StorageUnavailable: ErrorCode.kafka_storage_error,
    errors.StorageFull: ErrorCode.kafka_storage_error,
    errors.QueueFull: ErrorCode.request_timed_out,
    errors.MutationQuotaExceeded: ErrorCode.throttling_quota_exceeded,
    errors.TopicHeldBack: ErrorCode.kafka_storage_error,
    errors.BrokerUnavailable: ErrorCode.broker_not_available,
    errors.BrokerClosing: ErrorCode.not_leader_or_follower,
    errors.TimedOut: ErrorCode.request_timed_out,
    errors.DamagedBatch: ErrorCode.corrupt_message,
    # An idempotent producer resends the batch, and receives the offset of the stored one.
    errors.OutcomeUnknown: ErrorCode.request_timed_out,
    errors.UnknownTopic: ErrorCode.unknown_topic_or_partition,
    errors.UnknownPartition: ErrorCode.unknown_topic_or_partition,
    errors.TopicExists: ErrorCode.topic_already_exists,
    errors.TopicChanged: ErrorCode.unknown_topic_id,
    errors.BadTopicName: ErrorCode.invalid_topic_exception,
    errors.InternalTopic: ErrorCode.invalid_topic_exception,
    errors.BadPartitionCount: ErrorCode.invalid_partitions,
    errors.RecordTooLarge: ErrorCode.message_too_large,
    errors.BatchTooLarge: ErrorCode.message_too_large,
    errors.MessageTooLarge: ErrorCode.message_too_large,
    errors.BadReplicationFactor: ErrorCode.invalid_replication_factor,
    errors.BadAssignment: ErrorCode.invalid_replica_assignment,
    errors.UnknownLeaderEpoch: ErrorCode.unknown_leader_epoch,
    errors.FencedLeaderEpoch: ErrorCode.fenced_leader_epoch,
    errors.BadAcks: ErrorCode.invalid_required_acks,
    errors.BadBatch: ErrorCode.invalid_record,
    errors.KeylessRecord: ErrorCode.invalid_record,
    errors.BadTimestamp: ErrorCode.invalid_timestamp,
    errors.UnknownCodec: ErrorCode.unsupported_compression_type,
    errors.CodecTooNew: ErrorCode.unsupported_compression_type,
    errors.OffsetOutOfRange: ErrorCode.offset_out_of_range,
    errors.PolicyViolation: ErrorCode.policy_violation,
    errors.TopicIsMirror: ErrorCode.policy_violation,
    errors.TopicNotAuthorized: ErrorCode.topic_authorization_failed,
    errors.GroupNotAuthorized: ErrorCode.group_authorization_failed,
    errors.NotAuthorized: ErrorCode.cluster_authorization_failed,
    errors.UnknownCredential: ErrorCode.resource_not_found,
    errors.UnknownOption: ErrorCode.invalid_config,
    errors.BadOption: ErrorCode.invalid_config,
    errors.NeedsFeatureLevel: ErrorCode.unsupported_version,
    errors.GroupBusy: ErrorCode.coordinator_not_available,
    errors.GroupRefused: ErrorCode.invalid_request,
    errors.MemberFenced: ErrorCode.unknown_member_id,
    errors.OutOfOrderSequence: ErrorCode.out_of_order_sequence_number,
    errors.ProducerFenced: ErrorCode.invalid_producer_epoch,
    errors.BrokerFenced: ErrorCode.not_leader_or_follower,
    errors.PublisherFenced: ErrorCode.not_leader_or_follower,
    errors.Invalid: ErrorCode.invalid_request,
    errors.Retriable: ErrorCode.kafka_storage_error,
    errors.Fenced: ErrorCode.not_leader_or_follower,
    errors.Corrupt: ErrorCode.kafka_storage_error,
    errors.SparklogError: ErrorCode.unknown_server_error,
}


NEEDING_PROOF: Final = frozenset(
    {
        ErrorCode.fenced_instance_id,
        ErrorCode.group_id_not_found,
        ErrorCode.illegal_generation,
        ErrorCode.invalid_producer_epoch,
        ErrorCode.offset_out_of_range,
        ErrorCode.out_of_order_sequence_number,
        ErrorCode.topic_already_exists,
        ErrorCode.unknown_member_id,
        ErrorCode.unknown_topic_id,
        ErrorCode.unknown_topic_or_partition,
    }
)
"""Codes that make a client give up state that the broker does not know. They need a proof."""


class CodeCount:
    """Counts the codes of `NEEDING_PROOF` in a reply."""

    __slots__ = ("needing_proof",)

    def __init__(self) -> None:
        self.needing_proof = 0


ANYWHERE: Final = CodeCount()
"""Codes chosen outside a reply's task, such as in a thread: they may belong to any reply."""
_of_reply: ContextVar[CodeCount] = ContextVar("_of_reply", default=ANYWHERE)


def count_for(reply: CodeCount) -> None:
    """Counts for `reply` the codes that the current task chooses from now on."""
    _of_reply.set(reply)


def noted(code: ErrorCode) -> ErrorCode:
    """Counts and returns a code that a reply will contain."""
    if code in NEEDING_PROOF:
        _of_reply.get().needing_proof += 1
    return code


def group_code(error: GroupError | None) -> ErrorCode:
    """Returns the code of a group's error, whose name is Kafka's own."""
    return ErrorCode.none if error is None else noted(ErrorCode[error.name.lower()])


def code_of(error: BaseException) -> ErrorCode:
    """Returns the code of the error's class, or of its nearest base class."""
    for kind in type(error).__mro__:
        if kind in CODES:
            return noted(CODES[kind])
    return ErrorCode.unknown_server_error
