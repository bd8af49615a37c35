"""Every failure that sparklog reports, by what the caller should do about it.

Four kinds: `Retriable` (try again), `Invalid` (fix the request), `Fenced` (stop, somebody newer
has taken over), `Corrupt` (a person must look). One class per failure, each with a stable `code`
and the facts that explain it as fields; a door translates `code`, never a message. Nothing here
says "failed" when the effect may have happened: that is `OutcomeUnknown`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, ClassVar, Final, TypeVar

_FEW_OPTIONS: Final = 24
"""As many as an error can list and still be read."""


_Error = TypeVar("_Error", bound="SparklogError")


class SparklogError(Exception):
    """Base of all failures; `facts` are JSON values, the constructor's keyword arguments."""

    code: ClassVar[str] = "error"
    template: ClassVar[str] = "{reason}"

    def __init__(self, **facts: Any) -> None:
        self.facts = facts
        super().__init__(self.template.format(**facts))

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["facts"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __reduce__(self) -> tuple[Any, ...]:
        return (revive, (self.code, self.facts))


class Retriable(SparklogError):
    """The same request may succeed later; it had no effect now."""

    code = "retriable"


class Invalid(SparklogError, ValueError):
    """The request is wrong and had no effect; sending it again will not help."""

    code = "invalid"


class Fenced(SparklogError):
    """Somebody newer has taken over; stop."""

    code = "fenced"


class Corrupt(SparklogError):
    """Stored bytes are not what was written; names the object and the check that failed."""

    code = "corrupt"


# ------------------------------------------------------------------------------ retriable


class NotLeader(Retriable):
    code = "not_leader"
    template = "broker {broker} does not lead {topic}-{partition}; the leader is {leader}"


class StorageUnavailable(Retriable):
    code = "storage_unavailable"
    template = "the store refused {operation} of {path}: {reason}"


class StorageFull(Retriable):
    code = "storage_full"
    template = (
        "no space for records under {root}: {free_bytes} bytes free,"
        " {reserve_bytes} kept in reserve"
    )


class QueueFull(Retriable):
    code = "queue_full"
    template = "{queue} is full ({bytes} bytes); slow down or raise {setting}"


class TooManyStreams(Retriable):
    code = "too_many_streams"
    template = (
        "{open} {what} are open at the broker, of all clients together, and no more are taken;"
        " close some, try again, or raise {setting}"
    )


class TopicHeldBack(Retriable):
    code = "topic_held_back"
    template = "topic {topic} refuses writes: its table cannot be written ({reason})"


class BrokerUnavailable(Retriable):
    code = "broker_unavailable"
    template = "no answer from the broker at {address}: {reason}"


class BrokerClosing(Retriable):
    code = "broker_closing"
    template = "broker {broker} is stopping; connect again"


class TimedOut(Retriable):
    code = "timed_out"
    template = "{what} did not finish within {timeout_seconds} s"


class DamagedBatch(Retriable):
    """What arrived is not what was sent, as far as its checksum and its structure tell."""

    code = "damaged_batch"
    template = "a record batch is damaged: {reason}"


class GroupBusy(Retriable):
    """The group's coordinator is not ready, or its members are being assigned anew."""

    code = "group_busy"
    template = "group {group!r}: {error}; try again"


class OutcomeUnknown(SparklogError):
    """The request may or may not have taken effect; look before you repeat it."""

    code = "outcome_unknown"
    template = "{what}: no answer, it may have taken effect ({reason})"


# ------------------------------------------------------------------------------ invalid


class UnknownTopic(Invalid):
    code = "unknown_topic"
    template = "no topic named {topic!r}; create it, or check the name"


class TopicExists(Invalid):
    code = "topic_exists"
    template = "topic {topic!r} exists already"


class TopicChanged(Invalid):
    code = "topic_changed"
    template = "topic {topic!r} was deleted and created again: id {expected} is now {found}"


class TopicGone(Invalid):
    """The topic that a query has read is not there any more; `at`: its offsets by partition."""

    code = "topic_gone"
    template = (
        "topic {topic!r} {reason}; the query was at offsets {at};"
        " failOnDataLoss=false goes on without them"
    )


class BadTopicName(Invalid):
    code = "bad_topic_name"
    template = "{topic!r} is no topic name: 1 to 249 of [a-zA-Z0-9._-], and not '.' or '..'"


class InternalTopic(Invalid):
    code = "internal_topic"
    template = "topic {topic!r} is the brokers' own; nobody else may {what} it"


class BadPartitionCount(Invalid):
    code = "bad_partition_count"
    template = "topic {topic!r}: {requested} partitions asked for, {reason}"


class UnknownPartition(Invalid):
    code = "unknown_partition"
    template = "topic {topic!r} has partitions 0 to {last}, not {partition}"


class RecordTooLarge(Invalid):
    code = "record_too_large"
    template = "a record of {bytes} bytes is over max_record_bytes = {limit_bytes}"


class BatchTooLarge(Invalid):
    code = "batch_too_large"
    template = "a batch of {bytes} bytes is over max_batch_bytes = {limit_bytes}; send smaller ones"


class MessageTooLarge(Invalid):
    """Over what the topic takes, where the broker would take it."""

    code = "message_too_large"
    template = "{what} of {bytes} bytes is over topic {topic!r}'s max.message.bytes = {limit_bytes}"


class KeylessRecord(Invalid):
    """Kafka's `INVALID_RECORD`, for this reason: without a key nothing ever supersedes a record."""

    code = "keyless_record"
    template = (
        "topic {topic!r} is compacted (cleanup.policy=compact), so each of its records needs a key;"
        " of those sent to partition {partition}, {count} have none"
    )


class WrongSchema(Invalid):
    code = "wrong_schema"
    template = "{reason}"


class BadValue(Invalid):
    """A record's value is not what the reader was told that it is."""

    code = "bad_value"
    template = "{topic}-{partition}, offset {offset}: {reason}"


class UnknownLeaderEpoch(Retriable):
    code = "unknown_leader_epoch"
    template = "{topic}-{partition}: leader epoch {found} is still to come; it is {current}"


class FencedLeaderEpoch(Retriable):
    code = "fenced_leader_epoch"
    template = "{topic}-{partition}: leader epoch {found} is over; it is {current}"


class BadAcks(Invalid):
    code = "bad_acks"
    template = "acks = {acks}: -1, 0 and 1 are known"


class BadBatch(Invalid):
    code = "bad_batch"
    template = "a record batch is refused: {reason}"


class BadReplicationFactor(Invalid):
    code = "bad_replication_factor"
    template = "topic {topic!r}: a replication factor of {requested} asked for, {reason}"


class BadAssignment(Invalid):
    code = "bad_assignment"
    template = "topic {topic!r}: the assignment of its partitions is refused: {reason}"


class BadTimestamp(Invalid):
    code = "bad_timestamp"
    template = "a record's timestamp is refused: {reason}"


class UnknownCodec(Invalid):
    code = "unknown_codec"
    template = "compression {codec} is unknown; 0 to 4 are none, gzip, snappy, lz4 and zstd"


class CodecTooNew(Invalid):
    code = "codec_too_new"
    template = "compression {codec} needs version {needed} of this request, not {version}"


class OffsetOutOfRange(Invalid):
    code = "offset_out_of_range"
    template = "{topic}-{partition}: offset {offset} is outside the range {start} to {end}"


class PolicyViolation(Invalid):
    code = "policy_violation"
    template = "topic {topic!r}: {reason}"


class UnknownOption(Invalid):
    code = "unknown_option"
    template = "{where} has no option {option!r}{hint}"

    @classmethod
    def among(cls, where: str, option: str, known: Iterable[str]) -> UnknownOption:
        """With the nearest of the options that `where` has; where none is near, all if few."""
        names = {name.lower(): name for name in sorted(known)}
        nearest = difflib.get_close_matches(option.lower(), names, n=1)
        if nearest:
            hint = f"; did you mean {names[nearest[0]]!r}?"
        elif len(names) <= _FEW_OPTIONS:
            hint = f"; it has {', '.join(names.values())}"
        else:
            hint = ""
        return cls(where=where, option=option, hint=hint)


class BadOption(Invalid):
    code = "bad_option"
    template = "{option} = {value!r}: {reason}"


class NotInstalled(Invalid):
    """Packages of an extra are missing in this installation; `hint` says how to get them."""

    code = "not_installed"
    template = "{what} needs packages that are not installed ({missing}): {hint}"


class BrokerAlive(Invalid):
    code = "broker_alive"
    template = (
        "root {root} is served already, by {leader}: use that one, stop it first, or replace it"
        " with --take-over"
    )


class RootNotWritable(Invalid):
    code = "root_not_writable"
    template = "root {root} is not writable: {reason}"


class FormatTooNew(Invalid):
    code = "format_too_new"
    template = (
        "root {root} is of format version {found}; this sparklog knows up to {known}: upgrade it"
    )


class NotARoot(Invalid):
    code = "not_a_root"
    template = "{root} is no sparklog root ({reason}); start a broker on it first"


class WrongCluster(Invalid):
    """What is heard at the address that a root's broker gave is a broker of another root."""

    code = "wrong_cluster"
    template = (
        "{root} is cluster {expected}, but the broker at {address} serves cluster {found}, {served}"
    )


class WrongPort(Invalid):
    code = "wrong_port"
    template = "{address} is not a Flight port: {reason}"


class BadRequest(Invalid):
    code = "bad_request"
    template = "{reason}"


class GroupRefused(Invalid):
    """`error` is Kafka's name for the reason."""

    code = "group_refused"
    template = "group {group!r}: {error}{hint}"


class OutOfOrderSequence(Invalid):
    code = "out_of_order_sequence"
    template = (
        "{topic}-{partition}: producer {producer_id} sent sequence {found}, expected {expected}"
    )


# ------------------------------------------------------------------------------ fenced


class BrokerFenced(Fenced):
    """`successor` describes the broker that took over, where that is known."""

    code = "broker_fenced"
    template = "broker {broker} (epoch {epoch}) was replaced by {successor}"

    def __init__(self, *, successor: str = "a newer broker", **facts: Any) -> None:
        super().__init__(successor=successor, **facts)


class PublisherFenced(Fenced):
    code = "publisher_fenced"
    template = (
        "the table of {topic}-{partition} ends at {found}, beyond {end}: a newer broker writes it"
    )


class ProducerFenced(Fenced):
    code = "producer_fenced"
    template = "producer {producer_id} epoch {epoch} was replaced by epoch {current}"


class MemberFenced(Fenced):
    """The group went on without this member, or another process has its place: join anew."""

    code = "member_fenced"
    template = "group {group!r} has gone on without member {member_id!r}: {error}"


# ------------------------------------------------------------------------------ corrupt


class CorruptObject(Corrupt):
    code = "corrupt_object"
    template = "{path}: {check}"


class MissingObject(Corrupt):
    code = "missing_object"
    template = "{path} should exist and does not; {reason}"


class ForeignTable(Corrupt):
    code = "foreign_table"
    template = "the table of topic {topic!r} was changed so that sparklog cannot use it: {reason}"


class CorruptRecord(Corrupt):
    code = "corrupt_record"
    template = "{what} is not encoded as it should be: {reason}"


class DataLoss(Corrupt):
    code = "data_loss"
    template = "{topic}-{partition}: offsets {start} to {end} are gone: {reason}"


def bare(error: _Error) -> _Error:
    """The error itself, without the frames that it came through.

    They keep all that was worked on in them, a refused batch and what came out of it, for as long
    as the error is kept; and where a frame keeps the error in turn, until Python looks for cycles.
    """
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def _all_codes(root: type[SparklogError]) -> dict[str, type[SparklogError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _all_codes(child)
    return found


def revive(code: str, facts: dict[str, Any]) -> SparklogError:
    """The error that a peer reported as `(code, facts)`; an unknown code keeps its facts."""
    known = _all_codes(SparklogError).get(code, SparklogError)
    try:
        return known(**facts)
    except (KeyError, IndexError):
        return SparklogError(reason=f"{code}: {facts}")
