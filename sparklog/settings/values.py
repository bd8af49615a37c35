"""The settings of a broker as values, with their types, bounds and defaults.

`conf/broker.toml` documents every key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from sparklog import limits, listeners
from sparklog.listeners import Listener
from sparklog.prices import OWN_PRICES, Prices, price_table, prices_of
from sparklog.security.oauth_bearer import OAUTHBEARER
from sparklog.security.scram import PLAIN

FLUSH_LINGER_REMOTE_MS = 10
_HEARTBEAT_SECONDS = 1.0
_HEARTBEAT_REMOTE_SECONDS = 2.0, 3.0  # the least and the most, between them
_HEARTBEAT_REMOTE_SHARE = 0.3  # of `dead_after_seconds`
_HEARTBEAT_ALONE_SHARE = 0.4  # the same for a broker that no other one watches, but at most
_HEARTBEAT_ALONE_MAX_SECONDS = 10.0
_DEAD_AFTER_REMOTE_SECONDS = 10.0
_PUTS_PER_SECOND = 20.0
_WARN_DOLLARS_PER_MONTH = 500.0
_PRICE_MAX = 1_000_000_000
_PUBLISH_INTERVAL_THRIFTY_SECONDS = 10.0
_LINGER_MAX_MS = 60_000
_PUTS_MAX_PER_SECOND = 100_000
_SPACE_MAX_BYTES = 1024 * limits.GIB
_INTERVAL_MAX_SECONDS = 24 * 3600
_GRACE_MAX_SECONDS = 366 * 24 * 3600
_COUNT_MAX = 1_000_000
_CLOCK_SKEW_MAX_SECONDS = 600
_REGISTRY_TIMEOUT_MAX_SECONDS = 60

NOT_ABOVE: Final = (
    ("writer.max_record_bytes", "writer.max_batch_bytes"),
    ("writer.max_batch_bytes", "writer.queue_bytes"),
    ("publisher.publish_bytes", "publisher.unpublished_bytes"),
    ("kafka.request_max_bytes", "kafka.memory_bytes"),
    ("groups.min_session_timeout_ms", "groups.max_session_timeout_ms"),
)
"""Pairs of settings of which the first must not be above the second."""
ANY_HOST: Final = {"", "0.0.0.0", "::"}
"""Hosts to listen on that no client can connect to."""

_SENT_OPENLY: Final = (PLAIN, OAUTHBEARER)
"""The SASL mechanisms whose messages an eavesdropper could log in with."""

_BufferBytes = Annotated[int, Meta(ge=1, le=limits.BUFFER_MAX_BYTES)]
_SpaceBytes = Annotated[int, Meta(ge=0, le=_SPACE_MAX_BYTES)]
_Count = Annotated[int, Meta(ge=1, le=_COUNT_MAX)]
_Milliseconds = Annotated[int, Meta(ge=1, le=limits.INT32_MAX)]
_Interval = Annotated[float, Meta(gt=0, le=_INTERVAL_MAX_SECONDS)]
DEFAULT = -1.0
_IntervalOrDefault = Annotated[float, Meta(ge=DEFAULT, le=_INTERVAL_MAX_SECONDS)]
_PutsPerSecond = Annotated[float, Meta(ge=0.1, le=_PUTS_MAX_PER_SECOND)]
_PriceOrDefault = Annotated[float, Meta(ge=DEFAULT, le=_PRICE_MAX)]
# Publishers assume the default, so a sweeper may wait longer but not shorter.
_OrphanGrace = Annotated[float, Meta(ge=limits.ORPHAN_GRACE_SECONDS, le=_GRACE_MAX_SECONDS)]
_Grace = Annotated[float, Meta(ge=0, le=_GRACE_MAX_SECONDS)]
# Readers rely on the minimum: with a shorter grace, objects would be removed before they retry.
_TrimGrace = Annotated[float, Meta(ge=limits.TRIM_GRACE_SECONDS, le=_GRACE_MAX_SECONDS)]


# ------------------------------------------------------------------------------ the tables


class ListenerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The listeners of one protocol, as `sparklog.listeners` parses them."""

    listen: str
    advertised: str = ""

    @property
    def listeners(self) -> tuple[Listener, ...]:
        """The listeners, with the addresses that they listen on."""
        return listeners.parse(self.listen)

    @property
    def has_tls(self) -> bool:
        """True if a listener uses TLS."""
        return any(each.has_tls for each in self.listeners)

    @property
    def has_sasl(self) -> bool:
        """True if the clients of a listener have to log in."""
        return any(each.has_sasl for each in self.listeners)

    def advertised_of(self, name: str) -> str:
        """Returns the address for a listener's clients; empty: the one that it listens on."""
        given = dict(listeners.parse_addresses(self.advertised))
        return given.get(name, "") or given.get("", "")


class FlightSettings(ListenerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Arrow Flight listeners; brokers of the cluster use the first one."""

    listen: str = "127.0.0.1:8815"
    max_streams: Annotated[int, Meta(ge=1, le=_COUNT_MAX)] = limits.FLIGHT_STREAMS


class KafkaSettings(ListenerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Kafka listeners; an empty `listen` disables them."""

    listen: str = "127.0.0.1:9092"
    request_max_bytes: _BufferBytes = 100 * limits.MIB
    memory_bytes: _BufferBytes = 512 * limits.MIB
    max_connections: _Count = limits.KAFKA_CONNECTIONS
    max_connections_per_address: _Count = limits.KAFKA_CONNECTIONS_PER_ADDRESS
    sasl_mechanisms: str = "SCRAM-SHA-256,SCRAM-SHA-512,PLAIN,OAUTHBEARER"
    connections_max_reauth_ms: Annotated[int, Meta(ge=0, le=limits.INT32_MAX)] = 0


class TlsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The certificate of the listeners that use TLS; all are paths of PEM files."""

    certificate: str = ""
    key: str = ""
    key_password_file: str = ""
    ca: str = ""
    client_auth: Literal["none", "requested", "required"] = "none"
    min_version: Literal["TLSv1.2", "TLSv1.3"] = "TLSv1.2"
    principal: Literal["dn", "cn"] = "dn"


class OAuthSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tokens of an OAuth issuer; an empty `jwks` disables them."""

    jwks: str = ""
    issuer: str = ""
    audience: str = ""
    scopes: str = ""
    scope_claim: str = "scope"
    sub_claim: str = "sub"
    clock_skew_seconds: Annotated[int, Meta(ge=0, le=_CLOCK_SKEW_MAX_SECONDS)] = 30
    ca: str = ""

    @property
    def is_configured(self) -> bool:
        """True if clients may log in with tokens."""
        return bool(self.jwks)


class RegistrySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A schema registry with Confluent's API; an empty `url` disables it."""

    url: str = ""
    user_file: str = ""
    token_file: str = ""
    ca: str = ""
    certificate: str = ""
    key: str = ""
    timeout_seconds: Annotated[float, Meta(ge=0.1, le=_REGISTRY_TIMEOUT_MAX_SECONDS)] = 5.0

    @property
    def is_configured(self) -> bool:
        """True if schemas are read from a registry."""
        return bool(self.url)


class SecuritySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The addresses at which clients without a login are served, and the file of the audit."""

    anonymous: Literal["loopback", "anywhere"] = "loopback"
    audit_file: str = ""


class WriterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The write-ahead log: from the arrival of a record to its ack."""

    log: Literal["auto", "segments", "objects"] = "auto"
    flush_max_bytes: _BufferBytes = limits.FLUSH_MAX_BYTES
    linger_ms: Annotated[int, Meta(ge=-1, le=_LINGER_MAX_MS)] = -1
    linger_max_ms: Annotated[int, Meta(ge=0, le=_LINGER_MAX_MS)] = 250
    queue_bytes: _BufferBytes = limits.QUEUE_BYTES
    max_record_bytes: _BufferBytes = limits.MAX_RECORD_BYTES
    max_batch_bytes: _BufferBytes = limits.MAX_BATCH_BYTES
    free_space_reserve_bytes: _SpaceBytes = limits.FREE_SPACE_RESERVE_BYTES
    checkpoint_every_seconds: _Interval = limits.CHECKPOINT_EVERY_SECONDS
    trim_grace_seconds: _TrimGrace = limits.TRIM_GRACE_SECONDS

    def linger_ms_on(self, *, local: bool) -> int:
        """Returns the linger; -1 becomes 0 on a local root, and more if puts are expensive."""
        if self.linger_ms >= 0:
            return self.linger_ms
        return 0 if local else FLUSH_LINGER_REMOTE_MS


class PublisherSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Publishing to the topics' tables. Bounds apply to all topics together."""

    interval_seconds: _IntervalOrDefault = DEFAULT
    process: Literal["auto", "off"] = "auto"
    publish_bytes: _BufferBytes = limits.PUBLISH_BYTES
    unpublished_bytes: _SpaceBytes = limits.UNPUBLISHED_BYTES
    staged_bytes: _SpaceBytes = limits.STAGED_BYTES


class RequestSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The budget of requests to an object store, which bills them; a local root has none."""

    profile: Literal["thrifty", "fast"] = "thrifty"
    puts_per_second: _PutsPerSecond = _PUTS_PER_SECOND


class PriceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prices of the object store, for estimates of the bill; -1: those of `store`."""

    store: Literal[
        "auto", "s3-standard", "s3-express-one-zone", "gcs-standard", "azure-blob-hot"
    ] = "auto"
    dollars_per_million_puts: _PriceOrDefault = DEFAULT
    dollars_per_million_lists: _PriceOrDefault = DEFAULT
    dollars_per_million_reads: _PriceOrDefault = DEFAULT
    dollars_per_written_gb: _PriceOrDefault = DEFAULT
    dollars_per_read_gb: _PriceOrDefault = DEFAULT
    warn_dollars_per_month: Annotated[float, Meta(ge=0, le=_PRICE_MAX)] = _WARN_DOLLARS_PER_MONTH

    def of(self, uri: str) -> Prices:
        """Returns the prices of the store of a root."""
        found = prices_of(uri) if self.store == "auto" else price_table()[self.store]
        own = {
            field: value
            for field in self.__struct_fields__
            if field.startswith("dollars_") and (value := getattr(self, field)) != DEFAULT
        }
        if not own:
            return found
        return msgspec.structs.replace(found, name=OWN_PRICES, source="", month="", **own)


class HotTailSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The newest records, kept in memory for consumers that keep up."""

    bytes: _SpaceBytes = 192 * limits.MIB


class JanitorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Compaction, retention, table checkpoints and the removal of files."""

    enabled: bool = True
    interval_seconds: _Interval = 1.0
    compact_files: Annotated[int, Meta(ge=2, le=_COUNT_MAX)] = limits.COMPACT_FILES
    compact_target_bytes: _BufferBytes = limits.COMPACT_TARGET_BYTES
    removed_file_grace_seconds: _Grace = limits.REMOVED_FILE_GRACE_SECONDS
    removed_file_kept_seconds: _Grace = 24 * 3600.0
    orphan_grace_seconds: _OrphanGrace = limits.ORPHAN_GRACE_SECONDS
    staging_abandoned_seconds: _Grace = 7 * 24 * 3600.0
    table_checkpoint_every: Annotated[int, Meta(ge=1, le=_COUNT_MAX)] = (
        limits.TABLE_CHECKPOINT_EVERY
    )


class TopicSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Defaults for new topics."""

    auto_create: bool = True
    default_partitions: Annotated[int, Meta(ge=1, le=limits.PARTITIONS_PER_TOPIC)] = 4
    refuse_replication: bool = False


class GroupSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Consumer groups, under Kafka's names without their prefix `group.`.

    The defaults are Kafka's, except for the initial rebalance delay: it is 0, as in the
    configuration that Kafka ships for development.
    """

    min_session_timeout_ms: _Milliseconds = 6_000
    max_session_timeout_ms: _Milliseconds = 30 * 60_000
    initial_rebalance_delay_ms: Annotated[int, Meta(ge=0, le=limits.INT32_MAX)] = 0
    max_size: Annotated[int, Meta(ge=1, le=limits.INT32_MAX)] = 2**31 - 1
    offsets_retention_minutes: Annotated[int, Meta(ge=1, le=limits.INT32_MAX)] = 7 * 24 * 60


class LivenessSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Heartbeats, takeover and the exit of an idle broker (`idle_exit_seconds` 0: never)."""

    heartbeat_seconds: _IntervalOrDefault = DEFAULT
    dead_after_seconds: _IntervalOrDefault = DEFAULT
    idle_exit_seconds: _Grace = 0.0

    def on(self, *, local: bool) -> LivenessSettings:
        """Replaces -1 with defaults, which are longer on a store that charges per request."""
        dead_after_seconds = self.dead_after_seconds
        if dead_after_seconds == DEFAULT:
            dead_after_seconds = limits.DEAD_AFTER_SECONDS if local else _DEAD_AFTER_REMOTE_SECONDS
        heartbeat_seconds = self.heartbeat_seconds
        if heartbeat_seconds == DEFAULT:
            heartbeat_seconds = _HEARTBEAT_SECONDS
            if not local:
                least, most = _HEARTBEAT_REMOTE_SECONDS
                wanted = dead_after_seconds * _HEARTBEAT_REMOTE_SHARE
                heartbeat_seconds = max(least, min(wanted, most))
        return msgspec.structs.replace(
            self, heartbeat_seconds=heartbeat_seconds, dead_after_seconds=dead_after_seconds
        )

    def alone_seconds_on(self, *, local: bool) -> float:
        """Returns the interval of heartbeats while the broker is not watched by other members.

        On an object store, where each costs a request, it is longer by default. A program that
        starts to watch still sees two of them within `dead_after_seconds`.
        """
        liveness = self.on(local=local)
        if local or self.heartbeat_seconds != DEFAULT:
            return liveness.heartbeat_seconds
        wanted = liveness.dead_after_seconds * _HEARTBEAT_ALONE_SHARE
        return max(min(wanted, _HEARTBEAT_ALONE_MAX_SECONDS), liveness.heartbeat_seconds)

    @property
    def sound_seconds(self) -> float:
        """The age of a member's own last heartbeat at which it no longer judges other members."""
        return max(
            self.dead_after_seconds / 2, self.heartbeat_seconds + 0.3 * self.dead_after_seconds
        )

    @property
    def sight_seconds(self) -> float:
        """The maximum age of the last read of the metadata, and of the last heartbeat, at which a
        broker serves reads.

        Others may replace it `dead_after_seconds` after its last heartbeat.
        """
        return max(
            self.dead_after_seconds - 2 * self.heartbeat_seconds, self.dead_after_seconds / 2
        )


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sharing the root with other brokers (`join`), and the failure domain (`rack`)."""

    join: bool = True
    rack: str = ""


class MetricsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP port with metrics for Prometheus; an empty `listen` disables it."""

    listen: str = ""

    @property
    def listener(self) -> Listener | None:
        """The listener; its name is its protocol."""
        return next(iter(listeners.parse(self.listen)), None)

    @property
    def has_tls(self) -> bool:
        """True for HTTPS."""
        return self.listener is not None and self.listener.has_tls

    @property
    def has_sasl(self) -> bool:
        """True if programs that scrape the metrics have to log in."""
        return self.listener is not None and self.listener.has_sasl


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The broker's log lines: in `file`, or on standard error if it is empty."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"
    file: str = ""


class BrokerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a broker. `storage` is passed to the object store as is, with secrets."""

    root: str = ""
    id: Annotated[int, Meta(ge=0, le=limits.BROKER_ID_MAX)] = 0
    flight: FlightSettings = FlightSettings()
    kafka: KafkaSettings = KafkaSettings()
    tls: TlsSettings = TlsSettings()
    oauth: OAuthSettings = OAuthSettings()
    registry: RegistrySettings = RegistrySettings()
    security: SecuritySettings = SecuritySettings()
    writer: WriterSettings = WriterSettings()
    publisher: PublisherSettings = PublisherSettings()
    requests: RequestSettings = RequestSettings()
    prices: PriceSettings = PriceSettings()
    hot_tail: HotTailSettings = HotTailSettings()
    janitor: JanitorSettings = JanitorSettings()
    topics: TopicSettings = TopicSettings()
    groups: GroupSettings = GroupSettings()
    liveness: LivenessSettings = LivenessSettings()
    cluster: ClusterSettings = ClusterSettings()
    metrics: MetricsSettings = MetricsSettings()
    log: LogSettings = LogSettings()
    storage: Mapping[str, str] = {}

    @property
    def has_tls(self) -> bool:
        """True if a listener uses TLS."""
        return self.kafka.has_tls or self.flight.has_tls or self.metrics.has_tls

    @property
    def has_sasl(self) -> bool:
        """True if the clients of a listener have to log in."""
        return self.kafka.has_sasl or self.flight.has_sasl or self.metrics.has_sasl

    def is_thrifty_on(self, *, local: bool) -> bool:
        """Returns whether puts have a budget."""
        return not local and self.requests.profile == "thrifty"

    def publish_interval_seconds_on(self, *, local: bool) -> float:
        """Returns the interval of publishing; -1 becomes 1 second, and 10 if puts have a budget."""
        if self.publisher.interval_seconds != DEFAULT:
            return self.publisher.interval_seconds
        if self.is_thrifty_on(local=local):
            return _PUBLISH_INTERVAL_THRIFTY_SECONDS
        return limits.PUBLISH_INTERVAL_SECONDS

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """The SASL mechanisms that clients may log in with, in the order of `sasl_mechanisms`."""
        given = (each.strip() for each in self.kafka.sasl_mechanisms.split(","))
        return tuple(each for each in given if each != OAUTHBEARER or self.oauth.is_configured)

    def mechanisms_of(self, listener: Listener) -> tuple[str, ...]:
        """Returns the SASL mechanisms of a Kafka listener.

        Some send the password or the token itself: over TLS, or where it does not leave the
        machine.
        """
        is_private = listener.has_tls or listener.is_loopback
        return tuple(each for each in self.mechanisms if is_private or each not in _SENT_OPENLY)

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        shown["storage"] = dict.fromkeys(self.storage, "…")
        return f"BrokerSettings({', '.join(f'{name}={value!r}' for name, value in shown.items())})"
