"""Messages between client and broker over Arrow Flight: typed structs, as JSON bytes.

| call | carries |
|---|---|
| DoPut | descriptor `AppendStream`; batches with `AppendHeader`; an `AppendReply` to each |
| DoGet | ticket `ReadTicket`; row batches (`record.ROW_SCHEMA` or the requested columns) |
| DoExchange | descriptor `TailRequest`; row batches, each with a `TailHeader` |
| DoAction | the action's name and request struct of `ACTIONS`; one result, its reply struct |

Headers of batches are sent as app metadata. A batch to be appended is a payload: any columns of
`record.PAYLOAD_SCHEMA` with `value`; the replies come in the order of the batches. A failure is a
Flight error whose `extra_info` is an `ErrorReply`. Unknown fields are ignored, so that old and new
peers interoperate; a new field must have a default. Consumer group messages are in
`group_messages`, those about schemas in `schema_messages`, bills in `store_bill`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from sparklog import errors, limits
from sparklog.display import html_table
from sparklog.formats.group_messages import (
    CommitOffsets,
    ForgetOffsets,
    GroupCoordinator,
    GroupHeartbeat,
    GroupHeartbeatReply,
    GroupInfo,
    GroupList,
    GroupName,
    GroupOffsets,
    Int32,
    Int64,
    JoinedGroup,
    JoinGroup,
    LeaveGroup,
    SyncedGroup,
    SyncGroup,
)
from sparklog.formats.schema_messages import RegistryInfo, SchemasReply, TopicSchemas
from sparklog.formats.store_bill import StoreBill
from sparklog.formats.topic_names import MIRROR_SOURCE

if TYPE_CHECKING:
    from sparklog.formats.values.columns import Column, ColumnSet, Plan

Message = TypeVar("Message", bound=msgspec.Struct)

WRONG_PORT: Final = "sparklog: this is the Kafka port, Flight is at "
"""First bytes that the Kafka listener sends, before an address, to a client that speaks Flight."""

NO_OTHER_BROKER: Final = (
    "no other broker is up to take its partitions; start one first, or stop this one with --alone"
)
"""The reason for a `CannotDrain`."""

NO_ACTION: Final = "there is no action "
"""The prefix of the reason in the `BadRequest` for an action that a broker does not know."""


# ------------------------------------------------------------------------------ failures


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    code: str
    facts: dict[str, Any] = {}

    @classmethod
    def of(cls, error: errors.SparklogError) -> ErrorReply:
        return cls(code=error.code, facts=error.facts)

    def exception(self) -> errors.SparklogError:
        return errors.revive(self.code, self.facts)


# ------------------------------------------------------------------------------ append


class AppendStream(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Opens a stream of batches for one topic."""

    topic: str


class AppendHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Header of a batch to be appended. `producer_id` -1: not idempotent.

    `pipelined`: the producer has sent or will send others without waiting for this one's reply.
    """

    partition: Int32
    producer_id: Int64 = -1
    producer_epoch: Int32 = -1
    base_sequence: Int32 = -1
    pipelined: bool = False


class AppendReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Reply to a batch: it is durable at `base_offset`, or `error` says why it was rejected."""

    base_offset: int = -1
    timestamp_us: int = -1
    """Time of arrival: the timestamp of records that had none, or of all (LogAppendTime)."""
    timestamp_type: int = 0
    error: ErrorReply | None = None


# ------------------------------------------------------------------------------ read


class ReadTicket(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Offsets `start` to `end` (excluded) of one partition."""

    topic: str
    partition: Int32
    start: Int64
    end: Int64
    columns: list[str] | None = None
    """Columns of `record.ROW_SCHEMA`, in the requested order; None: all."""
    topic_id: str | None = None
    """If given, the read is rejected if the topic has been recreated since."""


class TailPosition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    topic: str
    partition: Int32
    offset: Int64
    topic_id: str | None = None


class TailRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Requests batches of all `positions` as they arrive, as long as the client stays connected."""

    positions: list[TailPosition]
    columns: list[str] | None = None
    max_batch_rows: Annotated[int, Meta(ge=1, le=limits.MAX_BATCH_ROWS)] = 65_536
    heartbeat_ms: Annotated[int, Meta(ge=10, le=60_000)] = 500
    """An idle stream receives an empty batch with `TailHeader(idle=True)` this often."""


class TailHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    topic: str = ""
    partition: int = -1
    first: int = -1
    end: int = -1
    """The next offset to request: offsets may have gaps."""
    high_watermark: int = -1
    idle: bool = False


# ------------------------------------------------------------------------------ admin


class Empty(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    pass


class BrokerInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    broker: int
    epoch: int
    address: str
    """Address of the Flight listener that the client has connected to, or of the first one:
    `host:port`, or `tls://host:port`."""
    flight_listeners: str = ""
    """All Flight listeners with their advertised addresses, as `sparklog.listeners` writes them."""
    kafka: str = ""
    """Address of the first Kafka listener; empty while it is closed."""
    kafka_listeners: str = ""
    """All of them with their advertised addresses, as `sparklog.listeners` writes them."""
    metrics: str = ""
    """Address of the HTTP port for metrics, as `sparklog.listeners` writes it; empty while it is
    closed."""
    kind: str = ""
    """`standing`, `embedded` or `detached`."""
    version: str = ""
    host: str = ""
    pid: int = 0
    started_us: int = 0
    """Its start, by the wall clock of its host."""
    log: str = ""
    """The file that it logs to; empty: its standard error."""
    wal: str = ""
    """The storage of its write-ahead log and, while it serves, the reason; empty if unknown."""


class ClusterInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    cluster_id: str
    root: str
    version: str
    brokers: list[BrokerInfo] = []


class ProveRoot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Asks a broker whether it serves the root that the sender can read.

    See `storage/metadata/identity.py`.
    """

    nonce: Annotated[str, Meta(max_length=64)]
    """A random value; no heartbeat contained it before this request."""
    place: str = ""
    """The folder of the root on the sender's machine; empty if the root is not a folder."""


class RootProof(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The broker that answers, and the proof that it has left in its root."""

    cluster_id: str
    root: str
    broker: int
    epoch: int
    is_same_place: bool = False
    """The sender's folder is the broker's own; in that case no nonce was written."""
    is_writing: bool = True
    """The broker has written to its root within the time after which others consider it dead."""
    reason: str = ""
    """The reason the nonce is not in its heartbeat; empty if it is."""


class HeldBack(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A topic whose records wait in the write-ahead log, because its table cannot be written."""

    topic: str
    reason: str


class KeptRecords(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A topic whose records are kept longer than configured, because its table is append-only."""

    topic: str
    reason: str


class Refused(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Work that a broker currently refuses."""

    work: str
    """`writes`, `heartbeats`, `connections` or `streams`."""
    reason: str


class BrokerStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The broker that answers, and what it leads."""

    cluster_id: str
    root: str
    broker: BrokerInfo
    uptime_seconds: float = 0.0
    topics: int = 0
    partitions: int = 0
    unpublished_bytes: int = 0
    """Bytes of records that are durable but not yet in their tables."""
    held_back: list[HeldBack] = []
    """At most `limits.STATUS_TOPICS` of them."""
    refused: list[Refused] = []
    kept_records: list[KeptRecords] = []
    """At most `limits.STATUS_TOPICS` of them."""
    security_version: int = 0
    """The version of the users and ACLs that the broker goes by; 0 if it has none."""
    bill: StoreBill | None = None
    """None on a local root."""
    registry: RegistryInfo | None = None
    """None without a schema registry."""


class DescribeCluster(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    topics: bool = False
    """Also return the leaders of each topic."""


class BrokerDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A broker according to the metadata and its last heartbeat. Every field is sent."""

    broker: int
    epoch: int
    state: str
    """`up`, `starting`, `draining`, `stopped` or `dead`."""
    partitions: int = 0
    """The partitions that it leads."""
    kind: str = ""
    """`standing`, `embedded` or `detached`."""
    address: str = ""
    """Address of the Flight listener, `host:port`."""
    kafka: str = ""
    """Address of the Kafka listener; empty if it is closed or unknown."""
    rack: str = ""
    host: str = ""
    pid: int = 0
    version: str = ""
    """Empty if unknown."""
    level: int = 1
    """The highest feature level that it supports."""
    heartbeat_age_seconds: float | None = None
    """Age of the last heartbeat, for display only: the clocks of two hosts may differ. None if the
    epoch has no heartbeat."""


class EpochDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A write-ahead log that may still be needed. Every field is sent."""

    broker: int
    epoch: int
    log: str
    """The storage of the log: `objects` or `segments`."""
    fenced: bool
    """True if nothing more can be written to the log."""
    heirs: list[int]
    """Ids of the brokers that may need entries of the log."""


class LostPartition(msgspec.Struct, frozen=True, kw_only=True):
    """A partition whose leader serves no clients. Every field is sent."""

    topic: str
    partition: int
    leader: int


class ClusterDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The brokers of a root, and what they lead. Every field is sent."""

    cluster_id: str
    root: str
    controller: int
    """-1 if no broker has led the root yet."""
    level: int = 1
    """The feature level of the root."""
    brokers: list[BrokerDescription]
    """All that the metadata names, by id, including those that have stopped for good."""
    epochs: list[EpochDescription]
    """In the order in which they were opened."""
    topics: int
    partitions: int
    lost_partitions: int
    """The number of partitions whose leader is neither up nor draining."""
    lost: list[LostPartition]
    """At most `limits.STATUS_PARTITIONS` of them."""
    leaders: dict[str, list[int]] | None = None
    """The leader of each partition, by topic; None if not requested."""


class DrainBroker(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Stops the broker that answers, once the other members lead its partitions.

    The reply comes immediately. A broker other than the named one, which may have its address by
    now, rejects the request.
    """

    cluster_id: str
    broker: Int32
    epoch: Int64
    alone: bool = False
    """Also stop a broker whose partitions no other broker takes."""


class LogLevel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The lowest level that a broker logs. A request with a level sets it until it restarts."""

    broker: Int32
    """Another broker, which may have the address by now, rejects the request."""
    level: Literal["", "debug", "info", "warning", "error"] = ""
    """Empty in a reply: the broker's program has configured logging itself."""


class BalanceCluster(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Has the member that answers hand over partitions to those that lead fewer, if it should.

    To balance a cluster, ask all members repeatedly until none hands over any.
    """

    dry_run: bool = False
    """Move nothing, and return the moves among all members."""


class PartitionMove(msgspec.Struct, frozen=True, kw_only=True):
    """A partition that should get a different leader. Every field is sent."""

    topic: str
    partition: int
    leader: int
    target: int


class MovePartitions(msgspec.Struct, frozen=True, kw_only=True):
    """Has the member that answers hand over partitions to the given targets.

    It moves those that it leads, each to its `target`. Refused if a target currently accepts no
    partitions.
    """

    moves: list[PartitionMove]


class BalanceReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    moved: int = 0
    """The number of partitions that the member has handed over."""
    moves: list[PartitionMove] = []
    """Moves among all members, if it was a dry run."""


class UpgradeReply(msgspec.Struct, frozen=True, kw_only=True):
    """The feature level of a root before and after an upgrade. Every field is sent."""

    before: int
    after: int


class TopicFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A topic's counts since its leader began to serve it, and its state."""

    topic: str
    partitions: int
    records_in: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    lag_records: int = 0
    """Records that are not in the table yet."""
    lag_seconds: float = 0.0
    """Age of the oldest of them."""
    files: int = 0
    small_files: int = 0
    table_bytes: int = 0
    held_back: bool = False


class GroupLag(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A consumer group and its lag."""

    group: str
    state: str
    members: int = 0
    lag: int = 0
    lag_seconds: float | None = None
    """The maximum over its partitions; None if unknown."""
    is_whole: bool = True
    """False if the leader of one of the partitions did not answer: `lag` excludes it."""


class MemoryBudget(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    budget: str
    held_bytes: int = 0
    limit_bytes: int = 0


class BrokerFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A broker's metrics at one point in time. Counts start from zero when it starts."""

    at_us: int
    broker: BrokerInfo
    uptime_seconds: float = 0.0
    topic_count: int = 0
    partition_count: int = 0
    records_in: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    flushes: int = 0
    flush_p50_seconds: float = 0.0
    flush_p99_seconds: float = 0.0
    """Quantiles of about the last minute."""
    loop_delay_p99_seconds: float = 0.0
    connections: int = 0
    streams: int = 0
    unpublished_bytes: int = 0
    amplification: float = 1.0
    store_requests: dict[str, int] = {}
    bill: StoreBill | None = None
    """None on a local root."""
    memory: list[MemoryBudget] = []
    topics: list[TopicFigures] = []
    """At most `limits.FIGURES_TOPICS`: those with the most records."""
    groups: list[GroupLag] = []
    """At most `limits.FIGURES_GROUPS`: those with the most lag."""


class PartitionInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    partition: int
    leader: int = -1
    leader_epoch: int = -1
    start: int = 0
    """Log start offset."""
    end: int = 0
    """High watermark: the next offset to be written."""
    published: int = 0
    """Offsets below this are in the table."""


class ColumnInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A typed column of a topic's table."""

    name: str
    field: str
    """The field of the JSON object that fills it."""
    type: str
    """As in SQL."""
    is_filled: bool = True
    """False if new records no longer fill it."""


def columns_info(columns: ColumnSet | None) -> list[ColumnInfo]:
    """Returns the typed columns of a table, in its order."""
    known = columns.columns if columns is not None else ()
    return [
        ColumnInfo(name=each.name, field=each.field, type=each.type, is_filled=each.is_filled)
        for each in known
    ]


def formats_of(columns: ColumnSet | None) -> list[str]:
    """Returns the ways in which values of a table with typed columns are decoded."""
    return [] if columns is None or columns.plan() is None else list(columns.all_formats)


class TopicInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    topic: str
    topic_id: str
    config: dict[str, str] = {}
    partitions: list[PartitionInfo] = []
    table_uri: str = ""
    table_version: int = -1
    table_files: int = 0
    table_bytes: int = 0
    max_record_bytes: int = limits.MAX_RECORD_BYTES
    """Largest total of key, value and headers that the broker accepts, in bytes."""
    publish_interval_seconds: float = -1.0
    """The time for which records wait for the table, before it is stretched; -1: unknown."""
    columns: list[ColumnInfo] = []
    """The typed columns of the table."""
    misfits: int = 0
    """The number of records in the table that do not fit the typed columns."""
    unfilled_rows: int = 0
    """The number of records in files that were written without one of the columns now filled."""
    formats: list[str] = []
    """The ways in which values are decoded; empty without typed columns."""
    waiting_rows: int = 0
    """The number of records in the table whose schema is not known yet."""

    @property
    def known_columns(self) -> tuple[Column, ...]:
        """The typed columns; the times at which they were filled are not known."""
        from sparklog.formats.values.columns import Column  # it loads pyarrow.compute

        return tuple(
            Column(
                name=each.name,
                field=each.field,
                type=each.type,
                filled=(0,) if each.is_filled else (),
            )
            for each in self.columns
        )

    @property
    def plan(self) -> Plan | None:
        """The typed columns that new records fill; None if there are none."""
        from sparklog.formats.values.columns import Plan  # it loads pyarrow.compute

        found = tuple(each for each in self.known_columns if each.is_filled)
        return Plan(found, "", tuple(self.formats)) if found or "avro" in self.formats else None

    @property
    def is_mirror(self) -> bool:
        return bool(self.config.get(MIRROR_SOURCE))

    def check_id(self, expected: str) -> None:
        """Raises `TopicChanged` if the topic with that id was deleted, and this one created."""
        if self.topic_id != expected:
            raise errors.TopicChanged(topic=self.topic, expected=expected, found=self.topic_id)

    def __repr__(self) -> str:
        return f"TopicInfo({self.topic!r}, {len(self.partitions)} partitions, {self._range()})"

    def _repr_html_(self) -> str:
        heading = ("partition", "leader", "log start", "end", "in the table")
        rows = [
            (each.partition, each.leader, each.start, each.end, each.published)
            for each in self.partitions
        ]
        return html_table(f"{self.topic}: {self._range()}", heading, rows)

    def _range(self) -> str:
        return f"{sum(each.end - each.start for each in self.partitions):,} offsets"


class CreateTopic(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    topic: str
    partitions: Int32 = -1
    """-1: the broker's default."""
    config: dict[str, str] = {}
    if_absent: bool = False


class TopicName(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    topic: str


class TopicNames(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    topics: list[str]


class AlterTopic(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sets the keys that have a value, and resets those that are None to the default."""

    topic: str
    config: dict[str, str | None]


class AddPartitions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    topic: str
    partitions: Int32
    """The new total."""


class DeleteRecords(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Deletes the records below the given offset of each named partition.

    -1: all existing records. An offset below the log start changes nothing.
    """

    topic: str
    offsets: dict[Int32, Int64]
    timeout_seconds: float = 60.0
    """The time limit for publishing the records to be deleted, which comes first."""


class LogStarts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The log start offset of each partition."""

    starts: dict[int, int]


class OffsetsForTimes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    topic: str
    timestamps_us: dict[Int32, Int64]


class Offsets(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The offset for each partition; -1: no record is that late."""

    offsets: dict[int, int]


class GroupPosition(msgspec.Struct, frozen=True, array_like=True):
    """The next offset that a consumer group will read from a partition."""

    topic_id: str
    partition: Int32
    offset: Int64


class GroupPositions(msgspec.Struct, frozen=True, kw_only=True):
    """Positions in partitions that one broker leads."""

    positions: Annotated[list[GroupPosition], Meta(max_length=limits.LAG_POSITIONS)]
    ages: bool = True
    """False: only the ends are wanted, which are known immediately."""


class PositionLag(msgspec.Struct, frozen=True, array_like=True):
    """A position's distance from the end."""

    end: int
    """The end offset of the partition; -1 if the queried broker does not lead it."""
    made_us: int | None = None
    """The timestamp of the first record at or after the position; None if not read in time."""


class PositionLags(msgspec.Struct, frozen=True, kw_only=True):
    """In the order of the positions."""

    lags: list[PositionLag]


class ProducerIdentity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    producer_id: int
    producer_epoch: int = 0


class AppendStaged(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Appends the files named by a manifest: `staging/<query>/<batch>/manifest.json`."""

    manifest: str


class AppendStagedReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first offset and count, by topic and partition. `skipped`: it had already been appended.

    Other brokers have to be asked for the partitions in `elsewhere`, which names their leaders.
    """

    ranges: dict[str, dict[int, tuple[int, int]]]
    skipped: bool = False
    elsewhere: dict[str, dict[int, int]] = {}
    topic_ids: dict[str, str] = {}
    """The ids of all topics of the batch, if several brokers append it."""


class NewToken(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Requests a token that only reads records, for the tasks of a job."""

    topics: list[str] | None = None
    """The only topics that the token is for, of at most `limits.TOKEN_TOPIC_CHARACTERS` together;
    None: all that the user may read."""


class IssuedToken(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    authorization: str
    """The value of the header `authorization`. Empty if the client needs no token."""

    def __repr__(self) -> str:
        return "IssuedToken(…)"


class PublishNow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Publishes now; the reply comes once all records acked before are in the tables."""

    topics: list[str] | None = None
    timeout_seconds: float = 60.0


ACTIONS: Final[dict[str, tuple[type[msgspec.Struct], type[msgspec.Struct]]]] = {
    "cluster": (Empty, ClusterInfo),
    "cluster.balance": (BalanceCluster, BalanceReply),
    "cluster.move": (MovePartitions, BalanceReply),
    "cluster.describe": (DescribeCluster, ClusterDescription),
    "cluster.upgrade": (Empty, UpgradeReply),
    "broker.drain": (DrainBroker, Empty),
    "broker.log_level": (LogLevel, LogLevel),
    "root.prove": (ProveRoot, RootProof),
    "status": (Empty, BrokerStatus),
    "figures": (Empty, BrokerFigures),
    "topics.list": (Empty, TopicNames),
    "topics.create": (CreateTopic, TopicInfo),
    "topics.describe": (TopicName, TopicInfo),
    "topics.schemas": (TopicSchemas, SchemasReply),
    "topics.alter": (AlterTopic, TopicInfo),
    "topics.add_partitions": (AddPartitions, TopicInfo),
    "topics.delete": (TopicName, Empty),
    "topics.compact": (TopicName, TopicInfo),
    "records.delete": (DeleteRecords, LogStarts),
    "offsets.for_times": (OffsetsForTimes, Offsets),
    "offsets.lag": (GroupPositions, PositionLags),
    "producers.new": (Empty, ProducerIdentity),
    "batches.append_staged": (AppendStaged, AppendStagedReply),
    "publish.now": (PublishNow, Empty),
    "tokens.new": (NewToken, IssuedToken),
    "groups.join": (JoinGroup, JoinedGroup),
    "groups.sync": (SyncGroup, SyncedGroup),
    "groups.heartbeat": (GroupHeartbeat, GroupHeartbeatReply),
    "groups.leave": (LeaveGroup, Empty),
    "groups.commit": (CommitOffsets, Empty),
    "groups.forget": (ForgetOffsets, Empty),
    "groups.offsets": (GroupName, GroupOffsets),
    "groups.find": (GroupName, GroupCoordinator),
    "groups.list": (Empty, GroupList),
    "groups.describe": (GroupName, GroupInfo),
    "groups.delete": (GroupName, Empty),
}

# ------------------------------------------------------------------------------ bytes

_encoder = msgspec.json.Encoder()
_decoders: Final[dict[type[msgspec.Struct], msgspec.json.Decoder[Any]]] = {
    # All created at import: two threads that create a struct's first decoder crash the process.
    kind: msgspec.json.Decoder(kind)
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
}


def encode(message: msgspec.Struct) -> bytes:
    """Returns the message as it is sent over the wire."""
    return _encoder.encode(message)


def decode(kind: type[Message], data: bytes | memoryview | None) -> Message:
    """Decodes a message. Raises `BadRequest` if the bytes are missing or not such a message."""
    try:
        message: Message = _decoders[kind].decode(data or b"")
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise errors.BadRequest(reason=f"not a {kind.__name__}: {error}") from error
    return message
