"""Configuration as an administrator sees it: each key's value, where that is from, and why.

A topic's keys are those of `topicconfig`. A broker's are its settings, under their own names and
under those by which Kafka's clients look for them; all of them are read-only, because a broker is
told them when it starts.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from sparklog import limits
from sparklog.broker.topicconfig import KEYS, Kind, TopicKey
from sparklog.settings import BrokerSettings


class Source(enum.Enum):
    """Where a value is from; the first that says something decides."""

    TOPIC = "topic"
    BROKER = "broker"
    DEFAULT = "default"


class Synonym(NamedTuple):
    """A key that says something about the same thing."""

    name: str
    value: str | None
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigEntry:
    """One key of a topic, or of a broker."""

    name: str
    value: str | None
    """None where it is secret."""
    source: Source
    kind: Kind
    about: str
    read_only: bool
    is_secret: bool = False
    synonyms: tuple[Synonym, ...] = ()
    """All that say something, the one that decides first."""


# ------------------------------------------------------------------------------ of a topic


def topic_entries(config: Mapping[str, str], settings: BrokerSettings) -> list[ConfigEntry]:
    """Every key of a topic of that configuration, on a broker of those settings."""
    return [_topic_entry(name, key, config, settings) for name, key in KEYS.items()]


def _topic_entry(
    name: str, key: TopicKey, config: Mapping[str, str], settings: BrokerSettings
) -> ConfigEntry:
    synonyms = tuple(_synonyms(name, key, config, settings))
    return ConfigEntry(
        name=name,
        value=synonyms[0].value if synonyms else key.default,
        source=synonyms[0].source if synonyms else Source.DEFAULT,
        kind=key.rule.kind,
        about=key.about,
        read_only=False,
        synonyms=synonyms,
    )


def _synonyms(
    name: str, key: TopicKey, config: Mapping[str, str], settings: BrokerSettings
) -> Iterator[Synonym]:
    if name in config:
        yield Synonym(name, config[name], Source.TOPIC)
    if key.broker_key:
        of_broker = _OF_BROKER[name](settings) if name in _OF_BROKER else key.default
        if of_broker != key.default:
            yield Synonym(key.broker_key, of_broker, Source.BROKER)
        yield Synonym(key.broker_key, key.default, Source.DEFAULT)


_OF_BROKER: Final[Mapping[str, Callable[[BrokerSettings], str]]] = {
    "max.message.bytes": lambda settings: str(settings.writer.max_batch_bytes),
}
"""Defaults of topics that a broker's settings change."""


# ------------------------------------------------------------------------------ of other resources

_GROUP_KEYS: Final[Mapping[str, tuple[str, Kind]]] = {
    "consumer.heartbeat.interval.ms": ("5000", Kind.INT),
    "consumer.session.timeout.ms": ("45000", Kind.INT),
    "share.auto.offset.reset": ("latest", Kind.STRING),
    "share.heartbeat.interval.ms": ("5000", Kind.INT),
    "share.isolation.level": ("read_uncommitted", Kind.STRING),
    "share.record.lock.duration.ms": ("30000", Kind.INT),
    "share.session.timeout.ms": ("45000", Kind.INT),
    "streams.heartbeat.interval.ms": ("5000", Kind.INT),
    "streams.num.standby.replicas": ("0", Kind.INT),
    "streams.session.timeout.ms": ("45000", Kind.INT),
}
_METRICS_KEYS: Final[Mapping[str, tuple[str, Kind]]] = {
    "interval.ms": ("300000", Kind.INT),
    "match": ("", Kind.LIST),
    "metrics": ("", Kind.LIST),
}


def group_entries() -> list[ConfigEntry]:
    """The configuration of any consumer group: Kafka 4.1's defaults, which cannot be changed."""
    idle = "no effect here: only classic groups are served"
    return _defaults(_GROUP_KEYS, idle, with_synonyms=True)


def metrics_entries() -> list[ConfigEntry]:
    """The configuration of any subscription to clients' metrics (KIP-714), in the same way."""
    return _defaults(_METRICS_KEYS, "no effect here: clients push no metrics", with_synonyms=False)


def _defaults(
    keys: Mapping[str, tuple[str, Kind]], about: str, *, with_synonyms: bool
) -> list[ConfigEntry]:
    return [
        ConfigEntry(
            name=name,
            value=value,
            source=Source.DEFAULT,
            kind=kind,
            about=about,
            read_only=False,
            synonyms=(Synonym(name, value, Source.DEFAULT),) if with_synonyms else (),
        )
        for name, (value, kind) in keys.items()
    ]


# ------------------------------------------------------------------------------ of a broker


class _Known(NamedTuple):
    """A name of Kafka's for something that a broker has."""

    kind: Kind
    value: Callable[[BrokerSettings], object]
    about: str


_KAFKAS: Final[Mapping[str, _Known]] = {
    "node.id": _Known(Kind.INT, lambda s: s.id, "this broker: setting id"),
    "broker.id": _Known(Kind.INT, lambda s: s.id, "this broker: setting id"),
    "log.dirs": _Known(Kind.LIST, lambda s: s.root, "setting root"),
    "auto.create.topics.enable": _Known(
        Kind.BOOLEAN, lambda s: s.topics.auto_create, "setting topics.auto_create"
    ),
    "delete.topic.enable": _Known(Kind.BOOLEAN, lambda _: True, "topics can always be deleted"),
    "num.partitions": _Known(
        Kind.INT, lambda s: s.topics.default_partitions, "setting topics.default_partitions"
    ),
    "default.replication.factor": _Known(
        Kind.INT, lambda _: 1, "the root's storage is what replicates"
    ),
    "socket.request.max.bytes": _Known(
        Kind.INT, lambda s: s.kafka.request_max_bytes, "setting kafka.request_max_bytes"
    ),
    "max.connections": _Known(
        Kind.INT, lambda s: s.kafka.max_connections, "setting kafka.max_connections"
    ),
    "max.connections.per.ip": _Known(
        Kind.INT,
        lambda s: s.kafka.max_connections_per_address,
        "setting kafka.max_connections_per_address",
    ),
    "group.min.session.timeout.ms": _Known(
        Kind.INT, lambda s: s.groups.min_session_timeout_ms, "setting groups.min_session_timeout_ms"
    ),
    "group.max.session.timeout.ms": _Known(
        Kind.INT, lambda s: s.groups.max_session_timeout_ms, "setting groups.max_session_timeout_ms"
    ),
    "group.initial.rebalance.delay.ms": _Known(
        Kind.INT,
        lambda s: s.groups.initial_rebalance_delay_ms,
        "setting groups.initial_rebalance_delay_ms",
    ),
    "group.max.size": _Known(Kind.INT, lambda s: s.groups.max_size, "setting groups.max_size"),
    "offsets.retention.minutes": _Known(
        Kind.INT,
        lambda s: s.groups.offsets_retention_minutes,
        "setting groups.offsets_retention_minutes",
    ),
    "offsets.topic.num.partitions": _Known(
        Kind.INT, lambda _: limits.OFFSETS_PARTITIONS, "of the topic that keeps groups' offsets"
    ),
    "offsets.topic.replication.factor": _Known(
        Kind.SHORT, lambda _: 1, "the root's storage is what replicates"
    ),
}

_KINDS: Final = {bool: Kind.BOOLEAN, int: Kind.LONG, float: Kind.DOUBLE}
_USUAL: Final = BrokerSettings()


def broker_entries(settings: BrokerSettings, listener: str) -> list[ConfigEntry]:
    """What a broker of those settings has been told, sorted by name.

    Args:
        listener: where Kafka's clients are told to come, `host:port`.
    """
    found = [_broker_entry(name, each, settings) for name, each in _KAFKAS.items()]
    found += [
        _fixed(name, Kind.STRING, f"PLAINTEXT://{listener}", Source.BROKER, about)
        for name, about in (
            ("listeners", "setting kafka.listen"),
            ("advertised.listeners", "setting kafka.advertised"),
        )
    ]
    found += [
        _of_topics(name, key, settings)
        for name, key in KEYS.items()
        if key.broker_key and key.broker_key not in _KAFKAS
    ]
    found += _settings(settings)
    return sorted(found, key=lambda entry: entry.name)


def _fixed(name: str, kind: Kind, value: str, source: Source, about: str) -> ConfigEntry:
    return ConfigEntry(
        name=name,
        value=value,
        source=source,
        kind=kind,
        about=about,
        read_only=True,
        synonyms=(Synonym(name, value, source),),
    )


def _broker_entry(name: str, known: _Known, settings: BrokerSettings) -> ConfigEntry:
    value, usual = known.value(settings), known.value(_USUAL)
    source = Source.DEFAULT if value == usual else Source.BROKER
    return _fixed(name, known.kind, _text(value), source, known.about)


def _of_topics(name: str, key: TopicKey, settings: BrokerSettings) -> ConfigEntry:
    """What topics have that say nothing else, under the broker's name for it."""
    synonyms = tuple(_synonyms(name, key, {}, settings))
    about = f"of topics without a {name} of their own: {key.about}"
    return ConfigEntry(
        name=key.broker_key,
        value=synonyms[0].value,
        source=synonyms[0].source,
        kind=key.rule.kind,
        about=about,
        read_only=True,
        synonyms=synonyms,
    )


def _settings(settings: BrokerSettings) -> Iterator[ConfigEntry]:
    """All that stand in conf/broker.toml; options of the store may be secrets, and are not told."""
    usual = dict(_flat(_USUAL))
    for name, value in _flat(settings):
        source = Source.DEFAULT if usual.get(name) == value else Source.BROKER
        about = "a setting of this broker's own; conf/broker.toml says what it does"
        yield _fixed(name, _KINDS.get(type(value), Kind.STRING), _text(value), source, about)
    for name in sorted(settings.storage):
        yield ConfigEntry(
            name=f"storage.{name}",
            value=None,
            source=Source.BROKER,
            kind=Kind.PASSWORD,
            about="an option of the object store",
            read_only=True,
            is_secret=True,
            synonyms=(Synonym(f"storage.{name}", None, Source.BROKER),),
        )


def _flat(settings: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    """Settings by their dotted names, but for the options of the store."""
    for field in msgspec.structs.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, msgspec.Struct):
            yield from ((f"{field.name}.{inner}", found) for inner, found in _flat(value))
        elif field.name != "storage":
            yield field.name, value


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
