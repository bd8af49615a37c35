"""The settings of a broker: one frozen value, built at the start.

The command line overrides the environment, which overrides the file, which overrides the defaults.
A key is at the top level or in one table, and its name ends with its unit. In the environment,
`writer.linger_ms` is `SPARKLOG_WRITER_LINGER_MS`. An unknown name or a value out of bounds is an
error that shows the name as the user wrote it. `conf/broker.toml` documents every key.
"""

from sparklog.settings.loading import load_settings
from sparklog.settings.values import (
    ANY_HOST,
    FLUSH_LINGER_REMOTE_MS,
    NOT_ABOVE,
    BrokerSettings,
    ClusterSettings,
    FlightSettings,
    GroupSettings,
    HotTailSettings,
    JanitorSettings,
    KafkaSettings,
    LivenessSettings,
    LogSettings,
    MetricsSettings,
    OAuthSettings,
    PriceSettings,
    PublisherSettings,
    RegistrySettings,
    RequestSettings,
    SecuritySettings,
    TlsSettings,
    TopicSettings,
    WriterSettings,
)

__all__ = [
    "ANY_HOST",
    "FLUSH_LINGER_REMOTE_MS",
    "NOT_ABOVE",
    "BrokerSettings",
    "ClusterSettings",
    "FlightSettings",
    "GroupSettings",
    "HotTailSettings",
    "JanitorSettings",
    "KafkaSettings",
    "LivenessSettings",
    "LogSettings",
    "MetricsSettings",
    "OAuthSettings",
    "PriceSettings",
    "PublisherSettings",
    "RegistrySettings",
    "RequestSettings",
    "SecuritySettings",
    "TlsSettings",
    "TopicSettings",
    "WriterSettings",
    "load_settings",
]
