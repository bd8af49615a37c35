"""The settings of a broker: one frozen value, built at the start.

The command line overrides the environment, which overrides the file, which overrides the defaults.
A key is at the top level or in one table, and its name ends with its unit. In the environment,
`writer.linger_ms` is `SPARKLOG_WRITER_LINGER_MS`. An unknown name or a value out of bounds is an
error that shows the name as the user wrote it. `conf/broker.toml` documents every key.
"""

from __future__ import annotations

import difflib
import re
import socket
import tomllib
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin
from urllib.parse import SplitResult, urlsplit

import msgspec
from msgspec import Meta

from sparklog import errors, limits, listeners
from sparklog.listeners import PROTOCOLS, SASL_PLAINTEXT, SASL_SSL, SSL, Listener
from sparklog.options import (
    check_root,
    is_address,
    is_folder,
    is_service_link,
)
from sparklog.prices import OWN_PRICES, Prices, price_table, prices_of
from sparklog.security.oauth_bearer import OAUTHBEARER
from sparklog.security.scram import MECHANISMS, PLAIN

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

_PREFIX = "SPARKLOG_"
_AUTO_ID = "auto"
_ORDINAL = re.compile(r"-([0-9]+)$")
"""The end of a host name of a StatefulSet's pod, as Kubernetes numbers them."""

_SENT_OPENLY: Final = (PLAIN, OAUTHBEARER)
"""The SASL mechanisms whose messages an eavesdropper could log in with."""

NOT_ABOVE: Final = (
    ("writer.max_record_bytes", "writer.max_batch_bytes"),
    ("writer.max_batch_bytes", "writer.queue_bytes"),
    ("publisher.publish_bytes", "publisher.unpublished_bytes"),
    ("kafka.request_max_bytes", "kafka.memory_bytes"),
    ("groups.min_session_timeout_ms", "groups.max_session_timeout_ms"),
)

_BufferBytes = Annotated[int, Meta(ge=1, le=limits.BUFFER_MAX_BYTES)]
_SpaceBytes = Annotated[int, Meta(ge=0, le=_SPACE_MAX_BYTES)]
_Count = Annotated[int, Meta(ge=1, le=_COUNT_MAX)]
_Milliseconds = Annotated[int, Meta(ge=1, le=limits.INT32_MAX)]
_Interval = Annotated[float, Meta(gt=0, le=_INTERVAL_MAX_SECONDS)]
_DEFAULT = -1.0
_IntervalOrDefault = Annotated[float, Meta(ge=_DEFAULT, le=_INTERVAL_MAX_SECONDS)]
_PutsPerSecond = Annotated[float, Meta(ge=0.1, le=_PUTS_MAX_PER_SECOND)]
_PriceOrDefault = Annotated[float, Meta(ge=_DEFAULT, le=_PRICE_MAX)]
# Publishers assume the default, so a sweeper may wait longer but not shorter.
_OrphanGrace = Annotated[float, Meta(ge=limits.ORPHAN_GRACE_SECONDS, le=_GRACE_MAX_SECONDS)]
_Grace = Annotated[float, Meta(ge=0, le=_GRACE_MAX_SECONDS)]
# Readers rely on the minimum: with a shorter grace, objects would be removed before they retry.
_TrimGrace = Annotated[float, Meta(ge=limits.TRIM_GRACE_SECONDS, le=_GRACE_MAX_SECONDS)]


# ------------------------------------------------------------------------------ the tables


class _ListenerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


class FlightSettings(_ListenerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Arrow Flight listeners; brokers of the cluster use the first one."""

    listen: str = "127.0.0.1:8815"
    max_streams: Annotated[int, Meta(ge=1, le=_COUNT_MAX)] = limits.FLIGHT_STREAMS


class KafkaSettings(_ListenerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
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

    interval_seconds: _IntervalOrDefault = _DEFAULT
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
    dollars_per_million_puts: _PriceOrDefault = _DEFAULT
    dollars_per_million_lists: _PriceOrDefault = _DEFAULT
    dollars_per_million_reads: _PriceOrDefault = _DEFAULT
    dollars_per_written_gb: _PriceOrDefault = _DEFAULT
    dollars_per_read_gb: _PriceOrDefault = _DEFAULT
    warn_dollars_per_month: Annotated[float, Meta(ge=0, le=_PRICE_MAX)] = _WARN_DOLLARS_PER_MONTH

    def of(self, uri: str) -> Prices:
        """Returns the prices of the store of a root."""
        found = prices_of(uri) if self.store == "auto" else price_table()[self.store]
        own = {
            field: value
            for field in self.__struct_fields__
            if field.startswith("dollars_") and (value := getattr(self, field)) != _DEFAULT
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

    heartbeat_seconds: _IntervalOrDefault = _DEFAULT
    dead_after_seconds: _IntervalOrDefault = _DEFAULT
    idle_exit_seconds: _Grace = 0.0

    def on(self, *, local: bool) -> LivenessSettings:
        """Replaces -1 with defaults, which are longer on a store that charges per request."""
        dead_after_seconds = self.dead_after_seconds
        if dead_after_seconds == _DEFAULT:
            dead_after_seconds = limits.DEAD_AFTER_SECONDS if local else _DEAD_AFTER_REMOTE_SECONDS
        heartbeat_seconds = self.heartbeat_seconds
        if heartbeat_seconds == _DEFAULT:
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
        if local or self.heartbeat_seconds != _DEFAULT:
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
        if self.publisher.interval_seconds != _DEFAULT:
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


def _known_keys() -> dict[str, Any]:
    """Returns the type of every key by its dotted name; `storage` is free-form and has none."""
    keys: dict[str, Any] = {}
    for field in msgspec.structs.fields(BrokerSettings):
        if isinstance(field.default, msgspec.Struct):
            for inner in msgspec.structs.fields(type(field.default)):
                keys[f"{field.name}.{inner.name}"] = inner.type
        elif field.name != "storage":
            keys[field.name] = field.type
    return keys


# Before several threads convert settings: see `flight_messages`.
msgspec.json.Decoder(BrokerSettings)
_KEYS = _known_keys()
_TABLES = {name.partition(".")[0] for name in _KEYS if "." in name} | {"storage"}
_TOP = {name for name in _KEYS if "." not in name} | _TABLES
_VARIABLES = {_PREFIX + name.replace(".", "_").upper(): name for name in _KEYS}


# ------------------------------------------------------------------------------ the layers


def load_settings(
    file: Path | None,
    environment: Mapping[str, str],
    overrides: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any] | None = None,
    brokers: int = 1,
) -> BrokerSettings:
    """Returns the settings of a broker, merged from all sources.

    Args:
        file: a TOML file in the form of `conf/broker.toml`, or None.
        environment: variables; settings are read from those that begin with `SPARKLOG_`.
        overrides: the command line's values by dotted name (`"writer.linger_ms"`), as strings or
            typed; None means that the option was not given.
        defaults: values by dotted name that replace the built-in defaults.
        brokers: the number of brokers on each host. An id of "auto" becomes the id of the
            host's first broker.

    Raises:
        errors.UnknownOption: a name is not that of a setting; the error suggests a similar one.
        errors.BadOption: a file cannot be read, a value has the wrong type or is out of bounds,
            the root is missing, two values contradict each other, or the id is "auto" and this
            machine's host name has no ordinal.
    """
    values: dict[str, Any] = dict(defaults or {})
    if file is not None:
        values |= _from_file(file)
    values |= _from_environment(environment)
    values |= _from_overrides(overrides)
    if values.get("id") == _AUTO_ID:
        values["id"] = brokers * _id_of(socket.gethostname())

    tree: dict[str, Any] = {}
    for name, value in values.items():
        table, _, key = name.rpartition(".")
        (tree.setdefault(table, {}) if table else tree)[key] = value
    settings = msgspec.convert(tree, BrokerSettings)
    _check_together(settings)
    return settings


def _from_file(file: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise errors.BadOption(
            option="settings file", value=str(file), reason=str(error)
        ) from error

    values = {}
    for top, entry in document.items():
        if top not in _TOP:
            raise errors.UnknownOption.among(str(file), top, _TOP | _KEYS.keys())
        if top not in _TABLES:
            values[top] = _checked(top, top, entry, strict=True)
        elif not isinstance(entry, dict):
            raise errors.BadOption(option=top, value=entry, reason=f"write it as a table, [{top}]")
        else:
            for key, value in entry.items():
                name = f"{top}.{key}"
                if not _is_known(name):
                    raise errors.UnknownOption.among(str(file), name, _KEYS)
                values[name] = _checked(name, name, value, strict=True)
    return values


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for variable, value in environment.items():
        if not variable.startswith(_PREFIX) or is_service_link(variable, value):
            continue
        table, _, key = variable.removeprefix(_PREFIX).lower().partition("_")
        name = f"storage.{key}" if table == "storage" and key else _VARIABLES.get(variable)
        if name is not None:
            values[name] = _checked(variable, name, value, strict=False)
        elif _resembles_setting(variable):
            raise errors.UnknownOption.among("the environment", variable, _VARIABLES)
    return values


def _from_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for name, value in overrides.items():
        if not _is_known(name):
            raise errors.UnknownOption.among("the command line", name, _KEYS)
        if value is not None:
            values[name] = _checked(name, name, value, strict=False)
    return values


def _is_known(name: str) -> bool:
    return name in _KEYS or (name.startswith("storage.") and name != "storage.")


def _resembles_setting(variable: str) -> bool:
    # Other programs of the project also use the prefix: only names like a setting's are rejected.
    of_table = any(variable.startswith(f"{_PREFIX}{table.upper()}_") for table in _TABLES)
    bare = [known.removeprefix(_PREFIX) for known in _VARIABLES]
    slip = difflib.get_close_matches(variable.removeprefix(_PREFIX), bare, n=1, cutoff=0.8)
    return of_table or bool(slip)


# ------------------------------------------------------------------------------ the checks


def _checked(shown: str, name: str, value: Any, *, strict: bool) -> Any:
    """Converts `value` to the type of the key `name`; errors call it `shown`, as the user did."""
    kind = _KEYS.get(name, str)
    if name == "id" and value == _AUTO_ID:
        return value  # `load_settings` replaces it, unless another source has a number
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        # A storage option may be a secret, and errors are logged.
        seen = "…" if name.startswith("storage.") else value
        reason = f"expected {_expectation(kind)}" + (f", or {_AUTO_ID!r}" if name == "id" else "")
        raise errors.BadOption(option=shown, value=seen, reason=reason) from error


def _id_of(host: str) -> int:
    """Returns the ordinal at the end of a host name, or of its first label: 2 for `sparklog-2`."""
    found = _ORDINAL.search(host.partition(".")[0])
    if found is None or int(found[1]) > limits.BROKER_ID_MAX:
        raise errors.BadOption(
            option="id",
            value=_AUTO_ID,
            reason=f"the host name {host!r} does not end in an ordinal up to"
            f" {limits.BROKER_ID_MAX}, such as the 2 of sparklog-2; set id to a number, or name the"
            " host as a StatefulSet of Kubernetes does",
        )
    return int(found[1])


def _expectation(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(kind))
    if get_origin(kind) is Annotated:
        base, bounds = get_args(kind)
        noun = "an integer" if base is int else "a number"
        low = f"above {bounds.gt} and up" if bounds.gt is not None else f"from {bounds.ge}"
        return f"{noun} {low} to {bounds.le}"
    return "true or false" if kind is bool else "text"


_LISTENER_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
ANY_HOST: Final = {"", "0.0.0.0", "::"}
"""Hosts to listen on that no client can connect to."""


def _check_together(settings: BrokerSettings) -> None:
    if not settings.root:
        raise errors.BadOption(
            option="root",
            value="",
            reason="name a folder, or an s3://, gs:// or az:// address (--root, SPARKLOG_ROOT, or"
            " the key root of the settings file)",
        )
    check_root("root", settings.root, " Addresses to listen on are kafka.listen and flight.listen.")
    _check_listeners(settings)
    _check_advertised("flight", settings.flight, lowest_port=0)
    _check_advertised("kafka", settings.kafka, lowest_port=1)
    for each in settings.kafka.listeners:
        if each.host in ANY_HOST and not settings.kafka.advertised_of(each.name):
            raise errors.BadOption(
                option="kafka.listen",
                value=settings.kafka.listen,
                reason="clients cannot connect to this host; set kafka.advertised to one that they"
                " can",
            )
    _check_anonymous(settings)

    for low, high in NOT_ABOVE:
        value, bound = attrgetter(low, high)(settings)
        if value > bound:
            reason = f"must not be above {high} = {bound}"
            raise errors.BadOption(option=low, value=value, reason=reason)

    for name in (
        "liveness.heartbeat_seconds",
        "liveness.dead_after_seconds",
        "publisher.interval_seconds",
    ):
        value = attrgetter(name)(settings)
        if value <= 0 and value != _DEFAULT:
            raise errors.BadOption(option=name, value=value, reason="expected more than 0, or -1")
    liveness = settings.liveness.on(local=is_folder(settings.root))
    if liveness.dead_after_seconds < 2 * liveness.heartbeat_seconds:
        raise errors.BadOption(
            option="liveness.dead_after_seconds",
            value=liveness.dead_after_seconds,
            reason="must be at least twice liveness.heartbeat_seconds"
            f" = {liveness.heartbeat_seconds}, or one late heartbeat counts as a death",
        )


def _check_listeners(settings: BrokerSettings) -> None:
    _check_protocols("flight", settings.flight, settings.tls)
    _check_protocols("kafka", settings.kafka, settings.tls)
    _check_sasl(settings)
    _check_oauth(settings)
    _check_registry(settings.registry)
    for listener in settings.flight.listeners:
        if listener.protocol == SASL_PLAINTEXT and not listener.is_loopback:
            raise errors.BadOption(
                option="flight.listen",
                value=settings.flight.listen,
                reason=f"passwords and tokens could be read on the way: use {SASL_SSL}://, or a"
                " loopback address",
            )
    for key, value in msgspec.structs.asdict(settings.tls).items():
        # Without a Kafka listener, the broker may be one that a program has started for itself.
        is_unused = settings.kafka.listen and not settings.has_tls
        if is_unused and value != getattr(TlsSettings(), key):
            reason = (
                f"it has no effect: kafka.listen, flight.listen or metrics.listen needs {SSL}:// or"
                f" {SASL_SSL}:// before an address"
            )
            raise errors.BadOption(option=f"tls.{key}", value=value, reason=reason)
    listening = [("flight.listen", each.address) for each in settings.flight.listeners]
    if not listening:
        raise errors.BadOption(option="flight.listen", value="", reason="expected host:port")
    listening += [("kafka.listen", each.address) for each in settings.kafka.listeners]
    if settings.metrics.listener is not None:
        _check_metrics(settings)
        listening.append(("metrics.listen", settings.metrics.listener.address))
    found: dict[str, str] = {}
    for option, address in listening:
        _check_address(option, address, lowest_port=0)
        if address in found and not address.endswith(":0"):
            reason = f"{found[address]} has the same address; give each listener its own port"
            raise errors.BadOption(option=option, value=address, reason=reason)
        found[address] = option


def _check_anonymous(settings: BrokerSettings) -> None:
    """Raises `BadOption` for a listener that strangers can reach without proving who they are."""
    if settings.security.anonymous == "anywhere":
        return
    has_certificates = settings.tls.client_auth == "required"
    for table, of in (("flight", settings.flight), ("kafka", settings.kafka)):
        for each in of.listeners:
            if each.is_loopback or each.has_sasl or (each.has_tls and has_certificates):
                continue
            raise errors.BadOption(
                option=f"{table}.listen",
                value=of.listen,
                reason=f"every program that can reach {each.address} could read and write the log."
                f" Have clients log in: write {SASL_SSL}:// before the address (`sparklog security"
                " init` prepares users and certificates). Or, in a network where that is intended,"
                ' set security.anonymous = "anywhere" (SPARKLOG_SECURITY_ANONYMOUS)',
            )


def _check_protocols(table: str, settings: _ListenerSettings, tls: TlsSettings) -> None:
    """Raises `BadOption` for names, protocols and TLS that do not fit together."""

    def bad(reason: str) -> errors.BadOption:
        return errors.BadOption(option=f"{table}.listen", value=settings.listen, reason=reason)

    names: set[str] = set()
    for name, protocol, address in settings.listeners:
        if not address:
            raise bad("expected host:port; there is nothing after a comma, or before one")
        if protocol not in PROTOCOLS:
            raise bad(f"expected host:port or one of {', '.join(PROTOCOLS)} before ://")
        if _LISTENER_NAME.fullmatch(name) is None:
            raise bad(f"the name {name!r} has other characters than letters, digits, _ and -")
        if name in names:
            raise bad(f"two listeners are called {name}: write NAME={protocol}://host:port")
        names.add(name)
    if settings.has_tls and not (tls.certificate and tls.key):
        raise bad("a listener with TLS needs tls.certificate and tls.key, the paths of PEM files")


def _check_metrics(settings: BrokerSettings) -> None:
    """Raises `BadOption` for a port for metrics with several addresses, or without protection."""
    listen, listener = settings.metrics.listen, settings.metrics.listener
    assert listener is not None
    reason = ""
    if "," in listen or listener.name != listener.protocol:
        reason = "expected one address without a name: host:port, or PROTOCOL://host:port"
    elif listener.protocol not in PROTOCOLS:
        reason = f"expected host:port or one of {', '.join(PROTOCOLS)} before ://"
    elif listener.has_tls and not (settings.tls.certificate and settings.tls.key):
        reason = "TLS needs tls.certificate and tls.key, the paths of PEM files"
    elif listener.protocol == SASL_PLAINTEXT and not listener.is_loopback:
        reason = f"passwords could be read on the way: use {SASL_SSL}://, or a loopback address"
    elif listener.has_sasl and PLAIN not in settings.mechanisms:
        reason = f"its login sends passwords, and kafka.sasl_mechanisms does not have {PLAIN}"
    if reason:
        raise errors.BadOption(option="metrics.listen", value=listen, reason=reason)


def _check_sasl(settings: BrokerSettings) -> None:
    """Raises `BadOption` for unknown mechanisms, and for a listener that would have none."""

    def bad(reason: str) -> errors.BadOption:
        given = settings.kafka.sasl_mechanisms
        return errors.BadOption(option="kafka.sasl_mechanisms", value=given, reason=reason)

    known = (*MECHANISMS, OAUTHBEARER)
    for each in settings.kafka.sasl_mechanisms.split(","):
        if each.strip() not in known:
            raise bad(f"expected some of {', '.join(known)}, separated by commas")
    for listener in settings.kafka.listeners:
        if not listener.has_sasl or settings.mechanisms_of(listener):
            continue
        if not settings.mechanisms:
            raise bad(f"{OAUTHBEARER} needs the table [oauth]")
        raise bad(
            f"{' and '.join(settings.mechanisms)} can be read on the way: the listener {listener}"
            f" offers it only with {SASL_SSL}://, or on a loopback address"
        )


def _check_oauth(settings: BrokerSettings) -> None:
    """Raises `BadOption` for a table [oauth] that is not complete, or has no effect."""
    given = msgspec.structs.asdict(settings.oauth)

    def bad(key: str, reason: str) -> errors.BadOption:
        return errors.BadOption(option=f"oauth.{key}", value=given[key], reason=reason)

    if not settings.oauth.is_configured:
        for key, value in given.items():
            if value != getattr(OAuthSettings(), key):
                raise bad(key, "it has no effect without oauth.jwks")
        return
    for key in ("issuer", "audience", "scope_claim", "sub_claim"):
        if not given[key].strip():
            raise bad(key, "it is required with oauth.jwks")
    url = urlsplit(settings.oauth.jwks)
    if url.scheme in ("https", "http") and not _is_web_address(url):
        raise bad("jwks", "expected https://host/path, without a user")
    if url.scheme == "http" and not Listener("", "", f"{url.hostname}:0").is_loopback:
        raise bad("jwks", "keys that others could replace on the way prove nothing: use https://")
    if url.scheme not in ("https", "http") and "://" in settings.oauth.jwks:
        raise bad("jwks", "expected https://… or the path of a file")
    if settings.oauth.ca and url.scheme != "https":
        raise bad("ca", "it has no effect: oauth.jwks does not begin with https://")
    # Without a Kafka listener, the broker may be one that a program has started for itself.
    if settings.kafka.listen and not (settings.kafka.has_sasl or settings.flight.has_sasl):
        raise bad(
            "jwks",
            "it has no effect: kafka.listen or flight.listen needs"
            f" {SASL_SSL}:// before an address",
        )


def _check_registry(settings: RegistrySettings) -> None:
    """Raises `BadOption` for a table [registry] that is not complete, or has no effect."""
    given = msgspec.structs.asdict(settings)

    def bad(key: str, reason: str) -> errors.BadOption:
        return errors.BadOption(option=f"registry.{key}", value=given[key], reason=reason)

    url = urlsplit(settings.url)
    for key in ("user_file", "token_file", "ca", "certificate", "key"):
        if given[key] and not settings.is_configured:
            raise bad(key, "it has no effect without registry.url")
    if not settings.is_configured:
        return
    if url.scheme not in ("https", "http") or not _is_web_address(url) or url.query or url.fragment:
        raise bad("url", "expected https://host:port, without a user: it belongs to user_file")
    if settings.user_file and settings.token_file:
        raise bad("token_file", "registry.user_file is given too: use one of them")
    is_readable = url.scheme == "http" and not Listener("", "", f"{url.hostname}:0").is_loopback
    for key in ("user_file", "token_file"):
        if given[key] and is_readable:
            raise bad(key, "its content could be read on the way: use https:// in registry.url")
    for key in ("ca", "certificate", "key"):
        if given[key] and url.scheme != "https":
            raise bad(key, "it has no effect: registry.url does not begin with https://")
    if settings.key and not settings.certificate:
        raise bad("key", "it has no effect without registry.certificate")


def _is_web_address(url: SplitResult) -> bool:
    try:
        return bool(url.hostname) and url.port != 0 and "@" not in url.netloc
    except ValueError:  # of the port
        return False


def _check_advertised(table: str, settings: _ListenerSettings, *, lowest_port: int) -> None:
    """Raises `BadOption` unless the advertised addresses are those of listeners."""
    option = f"{table}.advertised"
    names = [each.name for each in settings.listeners]
    given = listeners.parse_addresses(settings.advertised)
    for name, address in given:
        _check_address(option, address, lowest_port=lowest_port)
        reason = ""
        if len(dict(given)) < len(given):
            reason = "it has several addresses for a listener: clients get one"
        elif not name and len(names) > 1:
            reason = f"there are several listeners: write NAME=host:port, of {', '.join(names)}"
        elif name and name not in names:
            reason = f"no listener is called {name}; there is {', '.join(names) or 'none'}"
        if reason:
            raise errors.BadOption(option=option, value=settings.advertised, reason=reason)


def _check_address(option: str, address: str, *, lowest_port: int) -> None:
    if not is_address(address, lowest_port=lowest_port):
        reason = f"expected host:port, the port from {lowest_port} to 65535"
        raise errors.BadOption(option=option, value=address, reason=reason)
