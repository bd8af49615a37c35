"""Topic configuration: every topic key of Kafka 4.1, under Kafka's names, and a few more.

Types, bounds and defaults are Kafka's (`LogConfig`), except for three defaults: `max.message.bytes`
is the broker's `writer.max_batch_bytes`; `retention.ms` is -1, because a topic is a table that
people keep; `message.timestamp.after.max.ms` has no bound, because a table's timestamps may lie in
the future. A key without effect here is accepted, checked and described like any other, so that
programs written for Kafka run unchanged; its description says why it has no effect.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sparklog import errors, limits
from sparklog.formats import config_rules
from sparklog.formats.config_rules import (
    ConfigType,
    Edit,
    Rule,
    int_rule,
    long_rule,
    one_of,
)
from sparklog.formats.topic_names import MIRROR_SOURCE

if TYPE_CHECKING:
    from sparklog.formats.values.columns import ColumnSet

VALUE_FORMAT: Final = "value.format"
VALUE_SCHEMA: Final = "value.schema"
BYTES: Final = "bytes"
VALUE_EVOLVE: Final = "value.evolve"
VALUE_WAIT: Final = "value.wait.ms"
JSON: Final = "json"
AVRO: Final = "avro"
ADD: Final = "add"
PROPOSE: Final = "propose"

PUBLISH_INTERVAL: Final = "publish.interval.ms"
_WHAT: Final = "a topic's configuration"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicKey:
    """One key: its default, its effect, and the rule that a value must satisfy."""

    default: str
    does: str
    rule: Rule
    idle: str = ""
    """The reason the key has no effect here; empty if it has one."""
    broker_key: str = ""
    """Kafka's name for the broker setting that this key overrides, if any."""
    is_kafkas: bool = True
    """False for a key that Kafka does not have.

    Such a key is described only if it is set: programs copy all keys of a topic to a Kafka cluster,
    which rejects unknown ones.
    """

    @property
    def about(self) -> str:
        """A description of the key, with the reason if it has no effect here."""
        return f"{self.does} (no effect here: {self.idle})" if self.idle else self.does


# ------------------------------------------------------------------------------ rules

_INT_MAX: Final = 2**31 - 1
_LONG_MIN: Final = -(2**63)
_LONG_MAX: Final = 2**63 - 1
_SOURCE_CHARACTERS: Final = 1_000
_SCHEMA_CHARACTERS: Final = 32_000
_WAIT_MAX_MS: Final = 60_000
_PUBLISH_INTERVAL_MAX_MS: Final = 24 * 3_600 * 1_000
"""A day: until a record is in the table, neither retention nor key compaction removes it."""
_REMOVAL_SHARE: Final = 0.1
"""The share of the time until records are removed that they may wait for their table."""
_DECIMAL: Final = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
_SUBJECT: Final = re.compile(r"subject(?::(.+))?")
_REPLICA: Final = re.compile(r"[0-9]{1,10}:[0-9]{1,10}")


def _read_source(value: str) -> str | None:
    return value if value.isprintable() and len(value) <= _SOURCE_CHARACTERS else None


def _read_share(value: str) -> str | None:
    return value if _DECIMAL.fullmatch(value) and 0.0 <= float(value) <= 1.0 else None


def _read_boolean(value: str) -> str | None:
    return value.lower() if value.lower() in ("true", "false") else None


def _read_policy(value: str) -> str | None:
    if not value.strip():
        return ""
    chosen = dict.fromkeys(part.strip() for part in value.split(","))
    return ",".join(chosen) if chosen.keys() <= {"delete", "compact"} else None


def _read_replicas(value: str) -> str | None:
    parts = [part.strip() for part in value.split(",")]
    if parts in (["*"], [""]) or all(map(_REPLICA.fullmatch, parts)):
        return ",".join(parts)
    return None


_SHARE: Final = Rule(kind=ConfigType.DOUBLE, expected="a number from 0 to 1", read=_read_share)
_BOOLEAN: Final = Rule(kind=ConfigType.BOOLEAN, expected="true or false", read=_read_boolean)
_ONLY_FALSE: Final = Rule(
    kind=ConfigType.BOOLEAN,
    expected="false; there is no tiered storage to turn on, topics are in the root's storage",
    read=lambda value: "false" if value.lower() == "false" else None,
)
_SOURCE: Final = Rule(
    kind=ConfigType.STRING,
    expected=f"up to {_SOURCE_CHARACTERS:,} printable characters that name the source",
    read=_read_source,
)
_SCHEMA: Final = Rule(
    kind=ConfigType.STRING,
    expected=f"columns as in SQL, of up to {_SCHEMA_CHARACTERS:,} characters",
    read=lambda value: value if len(value) <= _SCHEMA_CHARACTERS else None,
)
_POLICY: Final = Rule(
    kind=ConfigType.LIST,
    expected="delete, compact, both separated by a comma, or nothing",
    read=_read_policy,
)
_REPLICAS: Final = Rule(
    kind=ConfigType.LIST, expected="* or a list of partition:broker", read=_read_replicas
)

# ------------------------------------------------------------------------------ the keys

_SEGMENTS: Final = "a topic has no segments; the janitor merges the files of its table"
_SYNCED: Final = "every record is synced before its ack"
_ROOT: Final = "the root's storage replicates"
_TIERS: Final = "there is no tiered storage; topics are in the root's storage"

KEYS: Final[Mapping[str, TopicKey]] = {
    "cleanup.policy": TopicKey(
        default="delete",
        does="delete: records are deleted by retention.ms and retention.bytes; compact: the last"
        " record of each key is kept, and every record needs a key; both, comma-separated; or"
        " nothing: all records are kept",
        rule=_POLICY,
        broker_key="log.cleanup.policy",
    ),
    "retention.ms": TopicKey(
        default="-1",
        does="how long records are kept; -1: no limit (Kafka: 7 days)",
        rule=long_rule(-1),
        broker_key="log.retention.ms",
    ),
    "retention.bytes": TopicKey(
        default="-1",
        does="the maximum size of a partition of the table; -1: no limit",
        rule=long_rule(_LONG_MIN),
        broker_key="log.retention.bytes",
    ),
    "min.cleanable.dirty.ratio": TopicKey(
        default=str(limits.MIN_CLEANABLE_DIRTY_RATIO),
        does="the share of dirty bytes above which a partition is compacted, from 0 to 1",
        rule=_SHARE,
        broker_key="log.cleaner.min.cleanable.ratio",
    ),
    "min.compaction.lag.ms": TopicKey(
        default=str(limits.MIN_COMPACTION_LAG_MS),
        does="the minimum time for which a record remains uncompacted",
        rule=long_rule(),
        broker_key="log.cleaner.min.compaction.lag.ms",
    ),
    "max.compaction.lag.ms": TopicKey(
        default=str(_LONG_MAX),
        does="the maximum time until a record is compacted, however few are dirty",
        rule=long_rule(1),
        broker_key="log.cleaner.max.compaction.lag.ms",
    ),
    "delete.retention.ms": TopicKey(
        default=str(limits.DELETE_RETENTION_MS),
        does="the minimum time for which a tombstone (a record without a value) is kept",
        rule=long_rule(),
        broker_key="log.cleaner.delete.retention.ms",
    ),
    "message.timestamp.type": TopicKey(
        default="CreateTime",
        does="CreateTime: the producer's time; LogAppendTime: the broker's, for every record",
        rule=one_of("CreateTime", "LogAppendTime"),
        broker_key="log.message.timestamp.type",
    ),
    "message.timestamp.before.max.ms": TopicKey(
        default=str(_LONG_MAX),
        does="how far a producer's time may lie before the broker's",
        rule=long_rule(),
        broker_key="log.message.timestamp.before.max.ms",
    ),
    "message.timestamp.after.max.ms": TopicKey(
        default=str(_LONG_MAX),
        does="how far a producer's time may lie after the broker's (Kafka: 1 hour)",
        rule=long_rule(),
        broker_key="log.message.timestamp.after.max.ms",
    ),
    "max.message.bytes": TopicKey(
        default=str(limits.MAX_BATCH_BYTES),
        does="the largest record batch from a Kafka client, or record from a client of sparklog's",
        rule=int_rule(),
        broker_key="message.max.bytes",
    ),
    "compression.type": TopicKey(
        default="producer",
        does="how record batches are compressed for Kafka consumers; producer: unchanged",
        rule=one_of("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer"),
        broker_key="compression.type",
    ),
    "compression.gzip.level": TopicKey(
        default="-1",
        does="the level if compression.type is gzip; -1: gzip's own default",
        rule=int_rule(1, 9, also=-1),
        broker_key="compression.gzip.level",
    ),
    "compression.lz4.level": TopicKey(
        default="9",
        does="the level if compression.type is lz4",
        rule=int_rule(1, 17),
        broker_key="compression.lz4.level",
    ),
    "compression.zstd.level": TopicKey(
        default="3",
        does="the level if compression.type is zstd",
        rule=int_rule(-131_072, 22),
        broker_key="compression.zstd.level",
    ),
    MIRROR_SOURCE: TopicKey(
        default="",
        does="the source whose records the topic mirrors with their offsets; while it is set, the"
        " topic accepts no other records; only an empty topic can become a mirror",
        rule=_SOURCE,
        is_kafkas=False,
    ),
    PUBLISH_INTERVAL: TopicKey(
        default="-1",
        does="the interval at which new records are written to the table, up to a day; -1: the"
        " broker's publisher.interval_seconds; a shorter one than the broker's takes puts in"
        " addition to requests.puts_per_second",
        rule=int_rule(0, _PUBLISH_INTERVAL_MAX_MS, also=-1),
        is_kafkas=False,
    ),
    VALUE_FORMAT: TopicKey(
        default=BYTES,
        does="json: the fields of JSON objects become columns of the topic's table; avro: those of"
        " Avro values with schemas of the registry; bytes: the table has values as they are",
        rule=one_of(BYTES, JSON, AVRO),
        is_kafkas=False,
    ),
    VALUE_SCHEMA: TopicKey(
        default="",
        does="the typed columns of the table, as in SQL: customer STRING, amount DOUBLE; empty: a"
        " broker finds them in the first records. With value.format=avro also subject:NAME, the"
        " subject of the registry whose fields become columns; empty: TOPIC-value",
        rule=_SCHEMA,
        is_kafkas=False,
    ),
    VALUE_EVOLVE: TopicKey(
        default=ADD,
        does="add: new fields of the subject become columns by themselves; propose: by the command"
        " `sparklog topics columns --accept`; only with value.format=avro",
        rule=one_of(ADD, PROPOSE),
        is_kafkas=False,
    ),
    VALUE_WAIT: TopicKey(
        default="1000",
        does="how long records wait for the table while the registry is asked for their schema;"
        " after that they are written without its fields, which are filled in later; only with"
        " value.format=avro",
        rule=int_rule(0, _WAIT_MAX_MS),
        is_kafkas=False,
    ),
    "segment.bytes": TopicKey(
        default=str(limits.GIB),
        does="the size of a segment",
        rule=int_rule(limits.MIB),
        idle=_SEGMENTS,
        broker_key="log.segment.bytes",
    ),
    "segment.ms": TopicKey(
        default=str(7 * 24 * 3600 * 1_000),
        does="the age at which a segment is rolled",
        rule=long_rule(1),
        idle=_SEGMENTS,
        broker_key="log.roll.ms",
    ),
    "segment.jitter.ms": TopicKey(
        default="0",
        does="the maximum random time by which a segment is rolled earlier",
        rule=long_rule(),
        idle=_SEGMENTS,
        broker_key="log.roll.jitter.ms",
    ),
    "segment.index.bytes": TopicKey(
        default=str(10 * limits.MIB),
        does="the size of a segment's index",
        rule=int_rule(4),
        idle=_SEGMENTS,
        broker_key="log.index.size.max.bytes",
    ),
    "index.interval.bytes": TopicKey(
        default="4096",
        does="the bytes between two entries of a segment's index",
        rule=int_rule(),
        idle=_SEGMENTS,
        broker_key="log.index.interval.bytes",
    ),
    "preallocate": TopicKey(
        default="false",
        does="whether a segment's file is created at its full size",
        rule=_BOOLEAN,
        idle=_SEGMENTS,
        broker_key="log.preallocate",
    ),
    "file.delete.delay.ms": TopicKey(
        default="60000",
        does="how long a file that is no longer needed is kept",
        rule=long_rule(),
        idle="the broker's janitor.removed_file_grace_seconds applies",
        broker_key="log.segment.delete.delay.ms",
    ),
    "flush.messages": TopicKey(
        default=str(_LONG_MAX),
        does="after how many records the log is synced",
        rule=long_rule(1),
        idle=_SYNCED,
        broker_key="log.flush.interval.messages",
    ),
    "flush.ms": TopicKey(
        default=str(_LONG_MAX),
        does="after how long the log is synced",
        rule=long_rule(),
        idle=_SYNCED,
        broker_key="log.flush.interval.ms",
    ),
    "min.insync.replicas": TopicKey(
        default="1",
        does="how many replicas must have a record before it is acked",
        rule=int_rule(1),
        idle=_ROOT,
        broker_key="min.insync.replicas",
    ),
    "unclean.leader.election.enable": TopicKey(
        default="false",
        does="whether a replica that lacks records may become the leader",
        rule=_BOOLEAN,
        idle=_ROOT,
        broker_key="unclean.leader.election.enable",
    ),
    "leader.replication.throttled.replicas": TopicKey(
        default="", does="the replicas throttled on the leader's side", rule=_REPLICAS, idle=_ROOT
    ),
    "follower.replication.throttled.replicas": TopicKey(
        default="", does="the replicas throttled on the follower's side", rule=_REPLICAS, idle=_ROOT
    ),
    "remote.storage.enable": TopicKey(
        default="false",
        does="whether old segments are moved to tiered storage",
        rule=_ONLY_FALSE,
        idle=_TIERS,
    ),
    "remote.log.copy.disable": TopicKey(
        default="false",
        does="whether segments are no longer copied to tiered storage",
        rule=_BOOLEAN,
        idle=_TIERS,
    ),
    "remote.log.delete.on.disable": TopicKey(
        default="false",
        does="whether segments in tiered storage are deleted once it is disabled",
        rule=_BOOLEAN,
        idle=_TIERS,
    ),
    "local.retention.ms": TopicKey(
        default="-2",
        does="how long segments are also kept locally; -2: as retention.ms says",
        rule=long_rule(-2),
        idle=_TIERS,
        broker_key="log.local.retention.ms",
    ),
    "local.retention.bytes": TopicKey(
        default="-2",
        does="how many bytes of segments are also kept locally; -2: as retention.bytes says",
        rule=long_rule(-2),
        idle=_TIERS,
        broker_key="log.local.retention.bytes",
    ),
}

OWN_KEYS: Final = frozenset(name for name, key in KEYS.items() if not key.is_kafkas)
"""The keys that Kafka does not have."""


def described() -> list[str]:
    """Returns a line for each key that has an effect, and one for all others."""
    lines = [
        f"{name} (default {key.default}): {key.about}" for name, key in KEYS.items() if not key.idle
    ]
    idle = ", ".join(name for name, key in KEYS.items() if key.idle)
    return [*lines, f"Kafka's other keys are stored but have no effect: {idle}"]


# ------------------------------------------------------------------------------ values


def value_of(config: Mapping[str, str], key: str) -> str:
    """Returns the value of a key in `config`, or its default."""
    return config.get(key, KEYS[key].default)


def number_of(config: Mapping[str, str], key: str) -> int:
    """Returns the value of a key whose values are integers."""
    return int(value_of(config, key))


def compression_of(config: Mapping[str, str]) -> tuple[str, int] | None:
    """Returns the (codec, level) of record batches for consumers, or None to keep the producer's.

    The codec is none, gzip, snappy, lz4 or zstd; the level is -1 if the codec has none.
    """
    codec = value_of(config, "compression.type")
    if codec == "producer":
        return None
    if codec == "uncompressed":
        return "none", -1
    key = f"compression.{codec}.level"
    return codec, number_of(config, key) if key in KEYS else -1


def is_compacted(config: Mapping[str, str]) -> bool:
    """Returns true if key compaction is enabled for the topic."""
    return "compact" in value_of(config, "cleanup.policy").split(",")


def publish_interval_seconds(config: Mapping[str, str], *, usual_seconds: float) -> float:
    """Returns the interval at which a topic is published, of a broker that has `usual_seconds`.

    A longer interval is bounded by a tenth of the time after which retention or key compaction
    removes records, because both see only the table. Merged files span the same share.
    """
    own_ms = number_of(config, PUBLISH_INTERVAL)
    if own_ms < 0:
        return usual_seconds
    policies = value_of(config, "cleanup.policy").split(",")
    removed_ms = [
        number_of(config, key)
        for policy, key in (("delete", "retention.ms"), ("compact", "max.compaction.lag.ms"))
        if policy in policies
    ]
    bounded_ms = min([own_ms, *(each * _REMOVAL_SHARE for each in removed_ms if each >= 0)])
    return max(bounded_ms / 1e3, min(own_ms / 1e3, usual_seconds))


def edited(
    config: Mapping[str, str], edits: Iterable[tuple[Edit, str, str | None]]
) -> dict[str, str]:
    """Returns a topic's configuration after the edits; see `config_rules.edited`."""
    return config_rules.edited(_WHAT, KEYS, config, edits)


def check(config: Mapping[str, str]) -> dict[str, str]:
    """Returns the configuration with normalised values.

    Raises `UnknownOption` and `BadOption`, which name the key.
    """
    normalised = config_rules.normalised(_WHAT, KEYS, config)
    _check_together(normalised)
    return normalised


def check_key(key: str) -> None:
    """Raises `UnknownOption`, which suggests the nearest key."""
    config_rules.check_key(_WHAT, KEYS, key)


def _check_together(config: Mapping[str, str]) -> None:
    low, high = "min.compaction.lag.ms", "max.compaction.lag.ms"
    if number_of(config, low) > number_of(config, high):
        reason = f"it must not be above {high} = {value_of(config, high)}"
        raise errors.BadOption(option=low, value=value_of(config, low), reason=reason)
    for key in (VALUE_EVOLVE, VALUE_WAIT):
        if key in config and not is_avro(config):
            reason = f"it needs {VALUE_FORMAT}={AVRO}"
            raise errors.BadOption(option=key, value=config[key], reason=reason)
    columns_of(config, None)


# ------------------------------------------------------------------------------ typed columns


def is_typed(config: Mapping[str, str]) -> bool:
    """Returns true if the topic's table has typed columns."""
    return value_of(config, VALUE_FORMAT) != BYTES


def is_avro(config: Mapping[str, str]) -> bool:
    """Returns true if values are Avro with schemas of the registry."""
    return value_of(config, VALUE_FORMAT) == AVRO


def has_subject(config: Mapping[str, str]) -> bool:
    """Returns true if the fields of schemas become columns, not those that DDL names."""
    schema = value_of(config, VALUE_SCHEMA)
    return is_avro(config) and (not schema or _SUBJECT.fullmatch(schema) is not None)


def subject_of(config: Mapping[str, str], topic: str) -> str:
    """Returns the subject of the registry with the schemas of a topic's values.

    By default that of Confluent's `TopicNameStrategy`.
    """
    found = _SUBJECT.fullmatch(value_of(config, VALUE_SCHEMA))
    return (found is not None and found[1]) or f"{topic}-value"


def adds_columns(config: Mapping[str, str]) -> bool:
    """Returns true if new fields of the subject become columns by themselves."""
    return has_subject(config) and value_of(config, VALUE_EVOLVE) == ADD


def wait_seconds(config: Mapping[str, str]) -> float:
    """Returns how long records with an unknown schema wait for the table."""
    return number_of(config, VALUE_WAIT) / 1e3


def columns_of(config: Mapping[str, str], known: ColumnSet | None) -> ColumnSet | None:
    """Returns the typed columns of a table with this configuration, given those that it has.

    Raises `BadOption`.
    """
    schema = value_of(config, VALUE_SCHEMA)
    if schema and not is_typed(config):
        reason = f"it needs {VALUE_FORMAT}={JSON}"
        raise errors.BadOption(option=VALUE_SCHEMA, value=schema, reason=reason)
    if known is None and not schema and not is_avro(config):
        return None
    from sparklog.formats.values import columns, ddl  # pyarrow, which `--help` does without

    form, wanted = AVRO if is_avro(config) else JSON, []
    try:
        if has_subject(config):  # columns are added as schemas become known
            is_same = known is not None and known.format == AVRO
            wanted = [each.as_source_field for each in known.filled] if known and is_same else []
        elif schema:
            wanted = ddl.parse(schema)
        return columns.with_fields(known, wanted, form)
    except ddl.InvalidDdl as error:
        raise errors.BadOption(option=VALUE_SCHEMA, value=schema, reason=str(error)) from None
    except columns.ChangedType as error:
        reason = (
            f"the table has {error.column.name} {error.column.type}, and a column's type never"
            f" changes; {error.wanted} needs a field of another name"
        )
        raise errors.BadOption(option=VALUE_SCHEMA, value=schema, reason=reason) from None
