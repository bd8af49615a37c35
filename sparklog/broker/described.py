"""Configuration as an administrator sees it: each key's value, its source, and its meaning.

A topic's keys are those of `topic_config`. A broker's keys are its settings, under their own names
and under Kafka's; all of them are read-only, because a broker reads them when it starts.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from sparklog import limits
from sparklog.formats import group_config
from sparklog.formats.config_rules import ConfigType
from sparklog.formats.topic_config import KEYS, TopicKey
from sparklog.listeners import Listener
from sparklog.settings import BrokerSettings


class ConfigSource(enum.Enum):
    """Source of a value; the first in this order that has a value takes precedence."""

    TOPIC = "topic"
    BROKER = "broker"
    DEFAULT = "default"
    LOGGER = "logger"
    """For loggers only."""
    GROUP = "group"
    """For groups only."""


class Synonym(NamedTuple):
    """A key that can supply the value."""

    name: str
    value: str | None
    source: ConfigSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigEntry:
    """One key of a topic, or of a broker."""

    name: str
    value: str | None
    """None if it is secret."""
    source: ConfigSource
    kind: ConfigType
    about: str
    read_only: bool
    is_secret: bool = False
    synonyms: tuple[Synonym, ...] = ()
    """All keys that supply a value; the first takes precedence."""


ROOT_LOGGER: Final = "root"
LOG_LEVELS: Final = {
    "TRACE": "debug",
    "DEBUG": "debug",
    "INFO": "info",
    "WARN": "warning",
    "ERROR": "error",
    "FATAL": "error",
}
"""The setting `log.level` for each level of Kafka's `LogLevelConfig`, which has two more."""


# ------------------------------------------------------------------------------ of a topic


def topic_entries(config: Mapping[str, str], settings: BrokerSettings) -> list[ConfigEntry]:
    """Returns every key of a topic with this configuration, on a broker with these settings.

    Keys that Kafka does not have are omitted unless set; see `TopicKey.is_kafkas`.
    """
    return [
        _topic_entry(name, key, config, settings)
        for name, key in KEYS.items()
        if key.is_kafkas or name in config
    ]


def _topic_entry(
    name: str, key: TopicKey, config: Mapping[str, str], settings: BrokerSettings
) -> ConfigEntry:
    synonyms = tuple(_synonyms(name, key, config, settings))
    return ConfigEntry(
        name=name,
        value=synonyms[0].value if synonyms else key.default,
        source=synonyms[0].source if synonyms else ConfigSource.DEFAULT,
        kind=key.rule.kind,
        about=key.about,
        read_only=False,
        synonyms=synonyms,
    )


def _synonyms(
    name: str, key: TopicKey, config: Mapping[str, str], settings: BrokerSettings
) -> Iterator[Synonym]:
    if name in config:
        yield Synonym(name, config[name], ConfigSource.TOPIC)
    if key.broker_key:
        of_broker = _OF_BROKER[name](settings) if name in _OF_BROKER else key.default
        if of_broker != key.default:
            yield Synonym(key.broker_key, of_broker, ConfigSource.BROKER)
        yield Synonym(key.broker_key, key.default, ConfigSource.DEFAULT)


_OF_BROKER: Final[Mapping[str, Callable[[BrokerSettings], str]]] = {
    "max.message.bytes": lambda settings: str(settings.writer.max_batch_bytes),
}
"""Topic defaults that a broker's settings override."""


# ------------------------------------------------------------------------------ of other resources

_METRICS_KEYS: Final[Mapping[str, tuple[str, ConfigType]]] = {
    "interval.ms": ("300000", ConfigType.INT),
    "match": ("", ConfigType.LIST),
    "metrics": ("", ConfigType.LIST),
}


def group_entries(config: Mapping[str, str]) -> list[ConfigEntry]:
    """Returns all keys of a consumer group.

    `config`: those that are set; the others have Kafka 4.1's defaults.
    """
    found = []
    for name, key in group_config.KEYS.items():
        source = ConfigSource.GROUP if name in config else ConfigSource.DEFAULT
        value = config.get(name, key.default)
        found.append(
            ConfigEntry(
                name=name,
                value=value,
                source=source,
                kind=key.rule.kind,
                about=group_config.IDLE,
                read_only=False,
                synonyms=(Synonym(name, value, source),),
            )
        )
    return found


def metrics_entries() -> list[ConfigEntry]:
    """Returns the configuration of every client metrics subscription (KIP-714), which is fixed."""
    return [
        ConfigEntry(
            name=name,
            value=value,
            source=ConfigSource.DEFAULT,
            kind=kind,
            about="no effect here: clients push no metrics",
            read_only=False,
        )
        for name, (value, kind) in _METRICS_KEYS.items()
    ]


def logger_entries(level: str | None) -> list[ConfigEntry]:
    """Returns the log level of a broker in Kafka's terms: a single logger writes all lines.

    `level`: sparklog's name for it; None: there is no logger whose level can be altered.
    """
    return [
        ConfigEntry(
            name=ROOT_LOGGER,
            value=name,
            source=ConfigSource.LOGGER,
            kind=ConfigType.STRING,
            about="the level of the broker's log lines, until it restarts",
            read_only=False,
        )
        for name, own in LOG_LEVELS.items()
        if own == level and name not in ("TRACE", "FATAL")
    ]


# ------------------------------------------------------------------------------ of a broker


class _Known(NamedTuple):
    """The value and meaning, in a sparklog broker, of one of Kafka's broker keys."""

    kind: ConfigType
    value: Callable[[BrokerSettings], object]
    about: str


_KAFKAS: Final[Mapping[str, _Known]] = {
    "node.id": _Known(ConfigType.INT, lambda s: s.id, "this broker: setting id"),
    "broker.id": _Known(ConfigType.INT, lambda s: s.id, "this broker: setting id"),
    "log.dirs": _Known(ConfigType.LIST, lambda s: s.root, "setting root"),
    "auto.create.topics.enable": _Known(
        ConfigType.BOOLEAN, lambda s: s.topics.auto_create, "setting topics.auto_create"
    ),
    "delete.topic.enable": _Known(
        ConfigType.BOOLEAN, lambda _: True, "topics can always be deleted"
    ),
    "num.partitions": _Known(
        ConfigType.INT, lambda s: s.topics.default_partitions, "setting topics.default_partitions"
    ),
    "default.replication.factor": _Known(
        ConfigType.INT, lambda _: 1, "the root's storage replicates"
    ),
    "socket.request.max.bytes": _Known(
        ConfigType.INT, lambda s: s.kafka.request_max_bytes, "setting kafka.request_max_bytes"
    ),
    "max.connections": _Known(
        ConfigType.INT, lambda s: s.kafka.max_connections, "setting kafka.max_connections"
    ),
    "max.connections.per.ip": _Known(
        ConfigType.INT,
        lambda s: s.kafka.max_connections_per_address,
        "setting kafka.max_connections_per_address",
    ),
    "group.min.session.timeout.ms": _Known(
        ConfigType.INT,
        lambda s: s.groups.min_session_timeout_ms,
        "setting groups.min_session_timeout_ms",
    ),
    "group.max.session.timeout.ms": _Known(
        ConfigType.INT,
        lambda s: s.groups.max_session_timeout_ms,
        "setting groups.max_session_timeout_ms",
    ),
    "group.initial.rebalance.delay.ms": _Known(
        ConfigType.INT,
        lambda s: s.groups.initial_rebalance_delay_ms,
        "setting groups.initial_rebalance_delay_ms",
    ),
    "group.max.size": _Known(
        ConfigType.INT, lambda s: s.groups.max_size, "setting groups.max_size"
    ),
    "offsets.retention.minutes": _Known(
        ConfigType.INT,
        lambda s: s.groups.offsets_retention_minutes,
        "setting groups.offsets_retention_minutes",
    ),
    "offsets.topic.num.partitions": _Known(
        ConfigType.INT,
        lambda _: limits.OFFSETS_PARTITIONS,
        "partitions of __consumer_offsets",
    ),
    "offsets.topic.replication.factor": _Known(
        ConfigType.SHORT, lambda _: 1, "the root's storage replicates"
    ),
}

_KINDS: Final = {bool: ConfigType.BOOLEAN, int: ConfigType.LONG, float: ConfigType.DOUBLE}
_DEFAULTS: Final = BrokerSettings()


def broker_entries(settings: BrokerSettings, advertised: Sequence[Listener]) -> list[ConfigEntry]:
    """Returns the keys of a broker with these settings, sorted by name.

    Args:
        settings: the broker's settings.
        advertised: the listeners, with the addresses advertised to Kafka clients.
    """
    found = [_broker_entry(name, each, settings) for name, each in _KAFKAS.items()]
    endpoints = ",".join(f"{each.name}://{each.address}" for each in advertised)
    protocols = ",".join(f"{each.name}:{each.protocol}" for each in advertised)
    found += [
        _fixed(name, ConfigType.STRING, value, ConfigSource.BROKER, f"setting {option}")
        for name, value, option in (
            ("listeners", endpoints, "kafka.listen"),
            ("advertised.listeners", endpoints, "kafka.advertised"),
            ("listener.security.protocol.map", protocols, "kafka.listen"),
        )
    ]
    found += [
        _of_topics(name, key, settings)
        for name, key in KEYS.items()
        if key.broker_key and key.broker_key not in _KAFKAS
    ]
    found += _settings(settings)
    return sorted(found, key=lambda entry: entry.name)


def _fixed(
    name: str, kind: ConfigType, value: str, source: ConfigSource, about: str
) -> ConfigEntry:
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
    value, default = known.value(settings), known.value(_DEFAULTS)
    source = ConfigSource.DEFAULT if value == default else ConfigSource.BROKER
    return _fixed(name, known.kind, _text(value), source, known.about)


def _of_topics(name: str, key: TopicKey, settings: BrokerSettings) -> ConfigEntry:
    """Returns the default of a topic's key, under the broker's name for it."""
    synonyms = tuple(_synonyms(name, key, {}, settings))
    about = f"default of a topic's {name}: {key.about}"
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
    """Yields all settings; store options come without values, because they may be secret."""
    defaults = dict(_flat(_DEFAULTS))
    for name, value in _flat(settings):
        source = ConfigSource.DEFAULT if defaults.get(name) == value else ConfigSource.BROKER
        about = "a setting of sparklog; conf/broker.toml describes it"
        yield _fixed(name, _KINDS.get(type(value), ConfigType.STRING), _text(value), source, about)
    for name in sorted(settings.storage):
        yield ConfigEntry(
            name=f"storage.{name}",
            value=None,
            source=ConfigSource.BROKER,
            kind=ConfigType.PASSWORD,
            about="an option of the object store",
            read_only=True,
            is_secret=True,
            synonyms=(Synonym(f"storage.{name}", None, ConfigSource.BROKER),),
        )


def _flat(settings: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    """Yields settings by their dotted names, except the options of the store."""
    for field in msgspec.structs.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, msgspec.Struct):
            yield from ((f"{field.name}.{inner}", found) for inner, found in _flat(value))
        elif field.name != "storage":
            yield field.name, value


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
