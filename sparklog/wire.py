"""What client and broker say to each other over Arrow Flight: typed messages, as JSON bytes.

| call | carries |
|---|---|
| DoPut | descriptor `AppendStream`; each batch is a payload (`record.PAYLOAD_SCHEMA`, any subset with `value`) with `AppendHeader` as app metadata; the answer to each, in order, is an `AppendReply` |
| DoGet | ticket `ReadTicket`; row batches (`record.ROW_SCHEMA` or the columns asked for) |
| DoExchange | descriptor `TailRequest`; row batches, each with a `TailHeader` as app metadata |
| DoAction | the action's name and request struct of `ACTIONS`; one result, its reply struct |

A failure is a Flight error whose `extra_info` is an `ErrorReply`. Unknown fields are ignored, so that
old and new peers understand each other; a field that is added has a default.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec

from sparklog import errors

Message = TypeVar("Message", bound=msgspec.Struct)


class _Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages."""


# ------------------------------------------------------------------------------ failures


class ErrorReply(_Message):
    code: str
    facts: dict[str, Any] = {}

    @classmethod
    def of(cls, error: errors.SparklogError) -> ErrorReply:
        return cls(code=error.code, facts=error.facts)

    def exception(self) -> errors.SparklogError:
        return errors.revive(self.code, self.facts)


# ------------------------------------------------------------------------------ append


class AppendStream(_Message):
    """Opens a stream of batches for one topic."""

    topic: str


class AppendHeader(_Message):
    """Stands beside a batch. `producer_id` -1: not idempotent.

    `more`: another batch follows at once, so the broker may read on before it acks this one.
    """

    partition: int
    producer_id: int = -1
    producer_epoch: int = -1
    base_sequence: int = -1
    more: bool = False


class AppendReply(_Message):
    """The batch stands durably at `base_offset`, or `error` tells why it was refused."""

    base_offset: int = -1
    timestamp_us: int = -1
    """Time of arrival: the timestamp of the records that had none, or of all (LogAppendTime)."""
    timestamp_type: int = 0
    error: ErrorReply | None = None


# ------------------------------------------------------------------------------ read


class ReadTicket(_Message):
    """Offsets `start` to `end` (excluded) of one partition."""

    topic: str
    partition: int
    start: int
    end: int
    columns: list[str] | None = None
    """Of `record.ROW_SCHEMA`, in the order wanted; None: all."""
    topic_id: str | None = None
    """Given: refuse if the topic was re-created since."""


class TailPosition(_Message):
    topic: str
    partition: int
    offset: int
    topic_id: str | None = None


class TailRequest(_Message):
    """Batches of all `positions` as they come, for as long as the client stays."""

    positions: list[TailPosition]
    columns: list[str] | None = None
    max_batch_rows: int = 65_536
    heartbeat_ms: int = 500
    """An idle stream gets an empty batch with `TailHeader(idle=True)` this often."""


class TailHeader(_Message):
    topic: str = ""
    partition: int = -1
    first: int = -1
    end: int = -1
    """The next offset to ask for: offsets may have gaps."""
    high_watermark: int = -1
    idle: bool = False


# ------------------------------------------------------------------------------ admin


class Empty(_Message):
    pass


class BrokerInfo(_Message):
    broker: int
    epoch: int
    address: str
    """Of the Flight door, `host:port`."""


class ClusterInfo(_Message):
    cluster_id: str
    root: str
    version: str
    brokers: list[BrokerInfo] = []


class PartitionInfo(_Message):
    partition: int
    leader: int = -1
    leader_epoch: int = -1
    start: int = 0
    """Log start offset."""
    end: int = 0
    """High watermark: the next offset to be written."""
    published: int = 0
    """Offsets below it are in the table."""


class TopicInfo(_Message):
    topic: str
    topic_id: str
    config: dict[str, str] = {}
    partitions: list[PartitionInfo] = []
    table_uri: str = ""
    table_version: int = -1
    table_files: int = 0
    table_bytes: int = 0


class CreateTopic(_Message):
    topic: str
    partitions: int = -1
    """-1: the broker's default."""
    config: dict[str, str] = {}
    if_absent: bool = False


class TopicName(_Message):
    topic: str


class TopicNames(_Message):
    topics: list[str]


class AlterTopic(_Message):
    """Sets what has a value, and takes back to the default what is None."""

    topic: str
    config: dict[str, str | None]


class AddPartitions(_Message):
    topic: str
    partitions: int
    """The new total."""


class OffsetsForTimes(_Message):
    topic: str
    timestamps_us: dict[int, int]


class Offsets(_Message):
    """Per partition; -1: no record that late."""

    offsets: dict[int, int]


class ProducerIdentity(_Message):
    producer_id: int
    producer_epoch: int = 0


class Adopt(_Message):
    """Append what a manifest names: `staging/<query>/<batch>/manifest.json`."""

    manifest: str


class Adopted(_Message):
    """Per topic, per partition: first offset and count. `skipped`: it had been appended before."""

    ranges: dict[str, dict[int, tuple[int, int]]]
    skipped: bool = False


class PublishNow(_Message):
    """Returns when all that was acked before is in the tables."""

    topics: list[str] | None = None
    timeout_seconds: float = 60.0


ACTIONS: Final[dict[str, tuple[type[msgspec.Struct], type[msgspec.Struct]]]] = {
    "cluster": (Empty, ClusterInfo),
    "topics.list": (Empty, TopicNames),
    "topics.create": (CreateTopic, TopicInfo),
    "topics.describe": (TopicName, TopicInfo),
    "topics.alter": (AlterTopic, TopicInfo),
    "topics.add_partitions": (AddPartitions, TopicInfo),
    "topics.delete": (TopicName, Empty),
    "topics.compact": (TopicName, TopicInfo),
    "offsets.for_times": (OffsetsForTimes, Offsets),
    "producers.new": (Empty, ProducerIdentity),
    "batches.adopt": (Adopt, Adopted),
    "publish.now": (PublishNow, Empty),
}

# ------------------------------------------------------------------------------ bytes

_encoder = msgspec.json.Encoder()
_decoders: dict[type[msgspec.Struct], msgspec.json.Decoder[Any]] = {}


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def decode(kind: type[Message], data: bytes | memoryview) -> Message:
    """Raises `BadRequest` where the bytes are no such message."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        message: Message = decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise errors.BadRequest(reason=f"not a {kind.__name__}: {error}") from error
    return message
