"""Every failure that sparklog reports, grouped by what the caller should do about it.

Four kinds: `Retriable` (try again), `Invalid` (correct the request), `Fenced` (stop: a newer
broker, producer or member has taken over) and `Corrupt` (a person must look at the data). Each
failure is a class with a stable `code` and with the facts that explain it as fields. A listener
translates `code`, never a message. An error that may have taken effect is `OutcomeUnknown`.

A message says what happened, to what, and what to do.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar, dataclass_transform

__all__ = [
    "BadAcks",
    "BadAssignment",
    "BadBatch",
    "BadOption",
    "BadPartitionCount",
    "BadReplicationFactor",
    "BadRequest",
    "BadTimestamp",
    "BadTopicName",
    "BadValue",
    "BatchTooLarge",
    "BrokerAlive",
    "BrokerClosing",
    "BrokerFenced",
    "BrokerUnavailable",
    "CannotDrain",
    "CodecTooNew",
    "Corrupt",
    "CorruptObject",
    "CorruptRecord",
    "DamagedBatch",
    "DataLoss",
    "DeserializationFailed",
    "EarlierBatchMissing",
    "Fenced",
    "FencedLeaderEpoch",
    "ForeignTable",
    "FormatTooNew",
    "GroupBusy",
    "GroupRefused",
    "InternalTopic",
    "Invalid",
    "KeylessRecord",
    "LeadersChanged",
    "MemberFenced",
    "MessageTooLarge",
    "MetadataChanged",
    "MissingObject",
    "NotAMirror",
    "NotARoot",
    "NotCoordinator",
    "NotInstalled",
    "NotLeader",
    "OffsetOutOfRange",
    "OffsetsDoNotContinue",
    "OutOfOrderSequence",
    "OutcomeUnknown",
    "PolicyViolation",
    "ProducerFenced",
    "PublisherFenced",
    "QueueFull",
    "RecordTooLarge",
    "Retriable",
    "RootIsCopy",
    "RootNotEmpty",
    "RootNotWritable",
    "RootReadOnly",
    "SparklogError",
    "StillSending",
    "StorageFull",
    "StorageUnavailable",
    "TimedOut",
    "TooManyStreams",
    "TopicChanged",
    "TopicExists",
    "TopicGone",
    "TopicHeldBack",
    "TopicIsMirror",
    "UnexpectedError",
    "UnknownCodec",
    "UnknownLeaderEpoch",
    "UnknownOption",
    "UnknownPartition",
    "UnknownTopic",
    "WrongCluster",
    "WrongPort",
    "WrongSchema",
]

_FEW_OPTIONS: Final = 24
"""The largest number of options that an error lists."""

_EMPTY_ROOT_ADVICE: Final = (
    "Use an empty or a new folder as root. To keep a log beside these files, start it once with"
    " `sparklog broker --allow-non-empty`"
)

_ADVICE_WHEN_FULL: Final = {
    "space": "Free some space, or shorten the retention of topics",
    "inode": "Delete files or empty folders, or move the root to a file system with more inodes",
    "quota": (
        "Raise the quota of the broker's user, group or project, for bytes and for files, or free"
        " some of what it counts"
    ),
}
"""The remedy for each resource that a file system may lack."""

_DOUBLE_STOP: Final = re.compile(r"(?<![./])([.?…])\.(?= |$)")
"""The end of a reason that is a sentence itself, and the full stop of the message."""

_Error = TypeVar("_Error", bound="SparklogError")


@dataclass_transform(kw_only_default=True, eq_default=False)
class SparklogError(Exception):
    """Base of all failures.

    The annotated names of a class are its facts: the constructor's keyword arguments, and
    attributes. They are JSON values. A peer of another release may send others.
    """

    code: ClassVar[str] = ""
    template: ClassVar[str] = "{reason}"
    needs_proof: ClassVar[bool] = False
    """True if it says that the client knows more than the broker: a broker that has been replaced
    would say so wrongly, and proves first that it leads (`broker/leader_metadata.py`)."""

    if TYPE_CHECKING:  # the constructor is that of the annotated names

        @property
        def facts(self) -> dict[str, Any]:
            """All facts, by name."""

    else:

        def __init__(self, **facts: Any) -> None:
            self.facts = {**self._defaults, **facts}
            self.__dict__.update(self.facts)
            super().__init__(_DOUBLE_STOP.sub(r"\1", self.template.format(**self.facts)))

    _defaults: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        own = {name: vars(cls)[name] for name in inspect.get_annotations(cls) if name in vars(cls)}
        cls._defaults = {**cls._defaults, **own}

    def __reduce__(self) -> tuple[Any, ...]:
        return (revive, (self.code, self.facts))


class UnexpectedError(SparklogError):
    """Something failed in a way that has no class of its own, or one that this release lacks."""

    code = "error"
    reason: str


class Retriable(SparklogError):
    """The request had no effect, and may succeed later: send it again."""

    code = "retriable"


class Invalid(SparklogError, ValueError):
    """The request is wrong and had no effect: correct it, since repeating it does not help."""

    code = "invalid"


class Fenced(SparklogError):
    """A newer broker, producer or member has taken over: stop."""

    code = "fenced"


class Corrupt(SparklogError):
    """Stored data differs from the data that was written: a person must look at it."""

    code = "corrupt"


# ------------------------------------------------------------------------------ retriable


class NotLeader(Retriable):
    """This broker does not lead the partition: send the request to the leader."""

    code = "not_leader"
    template = (
        "This broker does not lead {topic}-{partition}; send the request to the leader, broker"
        " {leader}."
    )
    topic: str
    partition: int
    leader: int


class LeadersChanged(Retriable):
    """Leaders were to be changed as decided on older metadata: decide again on the newest."""

    code = "leaders_changed"
    template = "The leaders were not changed: {reason}. Decide again on the newest metadata."
    reason: str


class NotCoordinator(Retriable):
    """Another broker coordinates the group: ask for it by `groups.find`."""

    code = "not_coordinator"
    template = "This broker does not coordinate group {group!r}; ask which broker does."
    group: str


class MetadataChanged(Retriable):
    """A request was answered by what a broker knew before another broker changed the metadata."""

    code = "metadata_changed"
    template = "Another broker has changed topics or leaders meanwhile; send the request again."


class StorageUnavailable(Retriable):
    """The object store refused an operation: try again when the store answers."""

    code = "storage_unavailable"
    template = (
        "The store refused {operation} of {path}: {reason}. Try again, and check the store if it"
        " keeps failing."
    )
    operation: str
    path: str
    reason: str


class StorageFull(Retriable):
    """The root's disk has no space, inode or quota (`missing`) left for records: free some."""

    code = "storage_full"
    template = (
        "No {missing} is left for records under {root}: {free_bytes} bytes are free, and"
        " {reserve_bytes} are kept in reserve. {advice}."
    )
    root: str
    free_bytes: int
    reserve_bytes: int
    missing: str = "space"
    advice: str = ""
    """The remedy for the missing resource, unless given."""

    if not TYPE_CHECKING:

        def __init__(self, *, missing: str = "space", advice: str = "", **facts: Any) -> None:
            advice = advice or _ADVICE_WHEN_FULL[missing]
            super().__init__(missing=missing, advice=advice, **facts)


class EarlierBatchMissing(Retriable):
    """An earlier batch was refused before the broker served the partition: send both again."""

    code = "earlier_batch_missing"
    template = (
        "A batch of producer {producer_id} came to {topic}-{partition} before an earlier one, which"
        " was refused before this broker served the partition. Send both again, in order."
    )
    producer_id: int
    topic: str
    partition: int


class QueueFull(Retriable):
    """A queue of the broker is full: send more slowly, or raise the setting."""

    code = "queue_full"
    template = (
        "The broker takes no more for now: {queue} is full ({bytes} bytes). Send more slowly, or"
        " raise {setting}."
    )
    queue: str
    bytes: int
    setting: str


class TooManyStreams(Retriable):
    """All clients together have as many streams open as the broker takes: close some."""

    code = "too_many_streams"
    template = (
        "The broker refuses a stream: {open} {what} are open, of all clients together. Close"
        " some, try again, or raise {setting}."
    )
    open: int
    what: str
    setting: str


class TopicHeldBack(Retriable):
    """The broker cannot write the topic's table, and takes no more records: mend the table."""

    code = "topic_held_back"
    template = (
        "Topic {topic!r} is held back and takes no records, because its table cannot be written:"
        " {reason}. Mend the table; the broker then continues by itself."
    )
    topic: str
    reason: str


class BrokerUnavailable(Retriable):
    """No broker answers at the address: start one, or correct the address."""

    code = "broker_unavailable"
    template = "No broker answers at {address}: {reason}."
    address: str
    reason: str


class BrokerClosing(Retriable):
    """The broker is shutting down: connect again."""

    code = "broker_closing"
    template = "Broker {broker} is stopping. Connect again."
    broker: int


class TimedOut(Retriable):
    """An operation took longer than its timeout: try again, or allow more time."""

    code = "timed_out"
    template = (
        "Timed out: {what} did not finish within {timeout_seconds} s. Try again, or allow more"
        " time."
    )
    what: str
    timeout_seconds: float


class DamagedBatch(Retriable):
    """A record batch was damaged on its way, by its checksum and its structure: send it again."""

    code = "damaged_batch"
    template = "A record batch arrived damaged: {reason}. Send it again."
    reason: str


class GroupBusy(Retriable):
    """The group's coordinator is not ready, or the group is rebalancing: try again."""

    code = "group_busy"
    template = "Group {group!r} is busy ({error}). Try again."
    group: str
    error: str


class OutcomeUnknown(SparklogError):
    """The request may or may not have taken effect: look before you repeat it."""

    code = "outcome_unknown"
    template = (
        "The outcome of {what} is unknown, because no answer came: {reason}. It may have taken"
        " effect; look before you repeat it."
    )
    what: str
    reason: str


class StillSending(OutcomeUnknown):
    """Records are not acked yet, and are still being sent: wait for the same future again."""

    code = "still_sending"
    template = (
        "Not acked within {timeout_seconds} s: {what}. The producer is still sending. Wait for the"
        " same future again, or flush again; sending the record again writes it twice."
    )
    timeout_seconds: float | None
    what: str
    reason: str = "no answer came yet"


# ------------------------------------------------------------------------------ invalid


class UnknownTopic(Invalid):
    """The topic does not exist: create it, or correct its name; `hint` has a similar one."""

    code = "unknown_topic"
    needs_proof = True
    template = "Topic {topic!r} does not exist. Create it, or correct the name.{hint}"
    topic: str
    hint: str = ""


class TopicExists(Invalid):
    """A topic of that name exists: use it, or choose another name."""

    code = "topic_exists"
    needs_proof = True  # another broker may have deleted it
    template = "Topic {topic!r} already exists. Use it, or choose another name."
    topic: str


class TopicChanged(Invalid):
    """The topic was deleted and created again, so its offsets mean other records: start over."""

    code = "topic_changed"
    needs_proof = True
    template = (
        "Topic {topic!r} was deleted and created again: its id was {expected} and is now {found}."
        " Start from its beginning or its end."
    )
    topic: str
    expected: str | None
    found: str | None


class TopicGone(Invalid):
    """The topic of a query no longer exists, or is no longer selected.

    `at`: the query's offsets by partition.
    """

    code = "topic_gone"
    template = (
        "Topic {topic!r} {reason}. The query had read it up to offsets {at}; set"
        " failOnDataLoss=false to continue without these records."
    )
    topic: str
    reason: str
    at: Any


class BadTopicName(Invalid):
    """The topic name breaks Kafka's rules: choose another."""

    code = "bad_topic_name"
    template = (
        "The topic name {topic!r} is invalid: use 1–249 characters of letters, digits, '.', '_' and"
        " '-', and not '.' or '..' alone."
    )
    topic: str | float | None


class InternalTopic(Invalid):
    """Clients may not change the brokers' own topics: use another topic."""

    code = "internal_topic"
    template = "Topic {topic!r} is internal: clients cannot {what} it. Use another topic."
    topic: str
    what: str


class TopicIsMirror(Invalid):
    """A mirror takes only the records of its source: write to the source, or end the mirror."""

    code = "topic_is_mirror"
    template = (
        "Topic {topic!r} is a mirror of {source}, and takes only its source's records, with their"
        " offsets. Write to the source; or end the mirror, by removing the topic's configuration"
        " mirror.source."
    )
    topic: str
    source: str


class NotAMirror(Invalid):
    """Only a mirror takes records with their offsets: let the broker assign offsets."""

    code = "not_a_mirror"
    template = (
        "Topic {topic!r} is no mirror, so the broker assigns the offsets of its records. Write"
        " without offsets=keep; or set mirror.source in its configuration, while it is empty."
    )
    topic: str


class OffsetsDoNotContinue(Invalid):
    """A write with offsets must begin where its partition ends: read the end again."""

    code = "offsets_do_not_continue"
    needs_proof = True
    template = (
        "A write with offsets begins at {first} in {topic}-{partition}, which ends at {end}."
        " Begin at its end: these records were written before, or others would be missing."
    )
    first: int
    topic: str
    partition: int
    end: int


class BadPartitionCount(Invalid):
    """The topic cannot have that many partitions: choose another number."""

    code = "bad_partition_count"
    template = "Topic {topic!r} cannot have {requested} partitions: {reason}."
    topic: str
    requested: int
    reason: str


class UnknownPartition(Invalid):
    """The topic has no such partition: use one that exists."""

    code = "unknown_partition"
    needs_proof = True
    template = "Topic {topic!r} has no partition {partition}: its partitions are 0 to {last}."
    topic: str
    partition: int
    last: int


class RecordTooLarge(Invalid):
    """A record exceeds the broker's limit: send smaller records, or raise the limit."""

    code = "record_too_large"
    template = (
        "A record of {bytes} bytes exceeds writer.max_record_bytes = {limit_bytes}. Send smaller"
        " records, or raise the setting."
    )
    bytes: int
    limit_bytes: int


class BatchTooLarge(Invalid):
    """A batch exceeds the broker's limit: send smaller batches, or raise the limit."""

    code = "batch_too_large"
    template = (
        "A batch of {bytes} bytes exceeds writer.max_batch_bytes = {limit_bytes}. Send smaller"
        " batches, or raise the setting."
    )
    bytes: int
    limit_bytes: int


class MessageTooLarge(Invalid):
    """A batch or record exceeds the topic's limit, though not the broker's: send smaller ones."""

    code = "message_too_large"
    template = (
        "Topic {topic!r} refuses {what} of {bytes} bytes: its max.message.bytes is {limit_bytes}."
        " Send less at a time, or raise it."
    )
    topic: str
    what: str
    bytes: int
    limit_bytes: int


class KeylessRecord(Invalid):
    """A record for a compacted topic has no key: set one.

    Kafka's `INVALID_RECORD`. No later record can supersede one without a key.
    """

    code = "keyless_record"
    template = (
        "Topic {topic!r} is compacted (cleanup.policy=compact), so each of its records needs a"
        " key; {count} of those sent to partition {partition} have none. Set a key."
    )
    topic: str
    count: int
    records: Sequence[tuple[int, str]] = ()
    """As of `BadTimestamp`."""
    partition: int


class WrongSchema(Invalid):
    """The columns of a batch or their types are wrong: correct the batch."""

    code = "wrong_schema"
    template = "{reason}"
    reason: str


class BadValue(Invalid):
    """The value of a record does not match the format that the reader expects."""

    code = "bad_value"
    template = "Cannot read the value at {topic}-{partition}, offset {offset}: {reason}."
    topic: str
    partition: int
    offset: int
    reason: str


class DeserializationFailed(Invalid):
    """A consumer's deserializer refused a key or a value: correct it, or skip the record.

    `part` is "key" or "value", and the deserializer's own exception is the cause. The consumer
    stays at the record; `consumer.seek(error.topic, error.partition, error.offset + 1)` skips it.
    """

    code = "deserialization_failed"
    template = (
        "Cannot deserialize the {part} at {topic}-{partition}, offset {offset}: {reason}. Correct"
        " the deserializer, or seek to the next offset to skip the record."
    )
    part: str
    topic: str
    partition: int
    offset: int
    reason: str


class UnknownLeaderEpoch(Retriable):
    """The client's leader epoch is newer than the broker's: try again."""

    code = "unknown_leader_epoch"
    template = (
        "Leader epoch {found} of {topic}-{partition} is newer than the broker's, {current}. Try"
        " again."
    )
    found: int
    topic: str
    partition: int
    current: int


class FencedLeaderEpoch(Retriable):
    """The client's leader epoch is over: refresh the metadata and try again."""

    code = "fenced_leader_epoch"
    template = (
        "Leader epoch {found} of {topic}-{partition} is over: it is now {current}. Refresh the"
        " metadata and try again."
    )
    found: int
    topic: str
    partition: int
    current: int


class BadAcks(Invalid):
    """`acks` has an unknown value: use one that exists."""

    code = "bad_acks"
    template = "acks = {acks} is invalid: use -1, 0 or 1."
    acks: int


class BadBatch(Invalid):
    """A record batch breaks the format's rules: correct the client that encodes it."""

    code = "bad_batch"
    template = "The broker refuses a record batch: {reason}."
    reason: str


class BadReplicationFactor(Invalid):
    """The topic cannot have that replication factor: choose another."""

    code = "bad_replication_factor"
    template = "Topic {topic!r} cannot have a replication factor of {requested}: {reason}."
    topic: str
    requested: int
    reason: str


class BadAssignment(Invalid):
    """The brokers named for a topic's partitions are wrong: correct the assignment."""

    code = "bad_assignment"
    template = "The partition assignment of topic {topic!r} is invalid: {reason}."
    topic: str
    reason: str


class BadTimestamp(Invalid):
    """The topic does not accept the timestamp of a record: correct it."""

    code = "bad_timestamp"
    template = "The timestamp of a record is refused: {reason}."
    reason: str
    records: Sequence[tuple[int, str]] = ()
    """Each invalid record of the batch, by its index, and why; at most `KAFKA_RECORD_ERRORS`."""


class UnknownCodec(Invalid):
    """A record batch names a compression that does not exist: use one that does."""

    code = "unknown_codec"
    template = "Compression {codec} is unknown: use 0 to 4 (none, gzip, snappy, lz4, zstd)."
    codec: int


class CodecTooNew(Invalid):
    """The version of the request does not allow this compression: use a newer client."""

    code = "codec_too_new"
    template = (
        "Compression {codec} needs version {needed} of this request, not {version}. Use a newer"
        " client, or another compression."
    )
    codec: str
    needed: int
    version: int


class OffsetOutOfRange(Invalid):
    """The partition has no such offset: choose one within its range."""

    code = "offset_out_of_range"
    needs_proof = True
    template = "Offset {offset} of {topic}-{partition} is outside the range {start} to {end}."
    offset: int
    topic: str
    partition: int
    start: int
    end: int


class PolicyViolation(Invalid):
    """The topic's configuration forbids the request: change one of them."""

    code = "policy_violation"
    template = "Topic {topic!r} does not allow this: {reason}."
    topic: str
    reason: str


class UnknownOption(Invalid):
    """An option or a setting does not exist: correct its name."""

    code = "unknown_option"
    template = "There is no option {option!r} in {where}.{hint}"
    option: str
    where: str
    hint: str

    @classmethod
    def among(cls, where: str, option: str, known: Iterable[str]) -> UnknownOption:
        """Returns the error with the most similar option in `known`, else with all, if few."""
        names = sorted(known)
        nearest = nearest_name(option, names)
        if nearest is not None:
            hint = f" Did you mean {nearest!r}?"
        elif len(names) <= _FEW_OPTIONS:
            hint = f" Known options: {', '.join(names)}."
        else:
            hint = ""
        return cls(where=where, option=option, hint=hint)


class BadOption(Invalid):
    """The value of an option or a setting is invalid: correct it."""

    code = "bad_option"
    template = "Invalid option {option} = {value!r}: {reason}."
    option: str
    value: Any
    reason: str


class NotInstalled(Invalid):
    """Packages of an extra are not installed; `hint` says how to install them."""

    code = "not_installed"
    template = "Packages needed for {what} are not installed ({missing}): {hint}."
    what: str
    missing: str | None
    hint: str


class BrokerAlive(Invalid):
    """Another broker serves the root, or has the same id: use it, stop it, or replace it."""

    code = "broker_alive"
    template = (
        "Root {root} already has a broker: {leader}. Use that broker, stop it first, or replace"
        " it with --take-over. Brokers with different --id share a root{condition}."
    )
    root: str
    leader: str
    condition: str = ""
    broker: int | None = None
    address: str = ""


class CannotDrain(Invalid):
    """A broker cannot give its partitions away and stop: choose another, or stop it otherwise."""

    code = "cannot_drain"
    template = "Broker {broker} cannot be drained: {reason}."
    broker: int
    reason: str


class RootNotWritable(Invalid):
    """The process may not write below the root: grant it the rights, or use another root."""

    code = "root_not_writable"
    template = (
        "Root {root} is not writable: {reason}. Grant this process write access, or use another"
        " root."
    )
    root: str
    reason: str


class RootReadOnly(RootNotWritable):
    """A request needs a broker, none serves the root, and this process cannot start one there."""

    code = "root_read_only"
    template = (
        "Root {root} is read-only for this process ({reason}), and no broker serves it, so {what}"
        " was refused. Start a broker that can write to the root, or grant this process write"
        " access."
    )
    root: str
    what: str
    reason: str


class FormatTooNew(Invalid):
    """A newer sparklog wrote the root: upgrade this one."""

    code = "format_too_new"
    template = (
        "Root {root} has {what} {found}, and this sparklog knows {what}s up to {known}: upgrade"
        " sparklog."
    )
    root: str
    found: int
    known: int
    what: str = "format version"


class NotARoot(Invalid):
    """The folder or bucket is not a sparklog root; `advice` says what to do."""

    code = "not_a_root"
    template = "{root} is not a sparklog root ({reason}): {advice}."
    root: str
    reason: str
    advice: str = "correct it, or start a broker on it first"


class RootNotEmpty(Invalid):
    """A folder that is not yet a root holds files of another program; `found` names some."""

    code = "root_not_empty"
    template = "{root} is not a sparklog root and is not empty: it holds {found}. {advice}."
    root: str
    found: str
    advice: str = _EMPTY_ROOT_ADVICE


class WrongCluster(Invalid):
    """The broker at the address that a root names serves another root: correct the address."""

    code = "wrong_cluster"
    template = (
        "Root {root} is cluster {expected}, but the broker at {address} serves cluster {found},"
        " {served}. Correct flight.advertised of the root's broker."
    )
    root: str
    expected: str
    address: str
    found: str
    served: str


class RootIsCopy(Invalid):
    """The root is a copy of another one: connect to the original, or end its synchronization."""

    code = "root_is_copy"
    template = (
        "Root {root} is a copy of {served}, which the broker at {address} serves, and is still kept"
        " in step with it. Connect to {served} or {address}; or, to use the copy, end its"
        " synchronization first."
    )
    root: str
    served: str
    address: str


class WrongPort(Invalid):
    """The address is not a Flight port: use the broker's Flight address."""

    code = "wrong_port"
    template = "{address} is not a Flight port: {reason}."
    address: str
    reason: str


class BadRequest(Invalid):
    """The request is malformed: correct it."""

    code = "bad_request"
    template = "{reason}"
    reason: str


class GroupRefused(Invalid):
    """The group's coordinator refuses a request; `error` is Kafka's name for the reason."""

    code = "group_refused"
    needs_proof = True
    template = "Group {group!r} refuses the request: {error}{hint}."
    group: str
    error: str
    hint: str


class OutOfOrderSequence(Invalid):
    """A producer skipped or repeated a sequence number: create a new producer."""

    code = "out_of_order_sequence"
    needs_proof = True
    template = (
        "Producer {producer_id} sent sequence {found} to {topic}-{partition}, where {expected}"
        " comes next. Create a new producer."
    )
    producer_id: int
    found: int
    topic: str
    partition: int
    expected: int


# ------------------------------------------------------------------------------ fenced


class BrokerFenced(Fenced):
    """A newer broker has taken over: stop this one. `successor` describes it, if known."""

    code = "broker_fenced"
    template = "Broker {broker} (epoch {epoch}) was replaced by {successor}, and stops."
    broker: int
    epoch: int
    successor: str = "a newer broker"


class PublisherFenced(Fenced):
    """A newer broker publishes the table: stop."""

    code = "publisher_fenced"
    template = (
        "The table of {topic}-{partition} ends at offset {found}, beyond {end}: a newer broker"
        " writes it, and this one stops."
    )
    topic: str
    partition: int
    found: int
    end: int


class ProducerFenced(Fenced):
    """A newer instance of the producer has taken over: stop this one."""

    code = "producer_fenced"
    needs_proof = True
    template = (
        "Epoch {epoch} of producer {producer_id} was replaced by epoch {current}. Stop this"
        " producer."
    )
    epoch: int
    producer_id: int
    current: int


class MemberFenced(Fenced):
    """The group has removed this member, or another process has replaced it: join again."""

    code = "member_fenced"
    needs_proof = True
    template = "Group {group!r} no longer has member {member_id!r} ({error}). Join again."
    group: str
    member_id: str
    error: str


# ------------------------------------------------------------------------------ corrupt


class CorruptObject(Corrupt):
    """A stored object fails a check; `advice` says what to do."""

    code = "corrupt_object"
    template = "{path} is damaged: {check}. {advice}."
    path: str
    check: str
    advice: str = "Restore it from a backup"


class MissingObject(Corrupt):
    """A stored object that is referred to does not exist: restore it."""

    code = "missing_object"
    template = "{path} is missing: {reason}. Restore it from a backup."
    path: str
    reason: str


class ForeignTable(Corrupt):
    """Another engine changed a topic's table so that sparklog cannot use it: undo the change."""

    code = "foreign_table"
    needs_proof = True  # another broker may have deleted the topic
    template = (
        "The table of topic {topic!r} was changed so that sparklog cannot use it: {reason}. Undo"
        " the change."
    )
    topic: str
    reason: str


class CorruptRecord(Corrupt):
    """A stored record cannot be decoded."""

    code = "corrupt_record"
    template = "Cannot decode {what}: {reason}. It is damaged, or a newer version wrote it."
    what: str
    reason: str


class DataLoss(Corrupt):
    """Records that a reader has still to read no longer exist: start from an offset that does."""

    code = "data_loss"
    template = "Offsets {start} to {end} of {topic}-{partition} no longer exist: {reason}."
    start: int
    end: int
    topic: str
    partition: int
    reason: str


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Returns the name in `known` that is most similar to `name`, or None if none is."""
    names = {each.lower(): each for each in sorted(known)}
    nearest = difflib.get_close_matches(name.lower(), names, n=1)
    return names[nearest[0]] if nearest else None


def bare(error: _Error) -> _Error:
    """Returns the error without its traceback, cause and context.

    They refer to the frames that raised it, and these to a refused batch and its decoded form. A
    frame that refers to the error closes a cycle, which Python frees late.
    """
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def _all_codes(root: type[SparklogError]) -> dict[str, type[SparklogError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _all_codes(child)
    return found


def revive(code: str, facts: dict[str, Any]) -> SparklogError:
    """Returns the error that a peer reported; an unknown code keeps its facts as text."""
    known = _all_codes(SparklogError).get(code, UnexpectedError)
    try:
        return known(**facts)
    except (KeyError, IndexError):
        return UnexpectedError(reason=f"{code}: {facts}")


def __dir__() -> list[str]:
    return sorted(__all__)
