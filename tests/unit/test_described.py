"""Configuration as administrators see it: values, their sources, and secrets."""

from __future__ import annotations

from sparklog import listeners
from sparklog.broker.described import ConfigSource, broker_entries, topic_entries
from sparklog.formats.config_rules import ConfigType
from sparklog.formats.topic_config import KEYS, OWN_KEYS
from sparklog.settings import BrokerSettings, TopicSettings, WriterSettings
from sparklog.settings.loading import _known_keys

LISTENER = "broker.example:9092"


def test_every_setting_is_told_and_no_secret() -> None:
    """Under its own name; of the store's options only that they are set."""
    settings = BrokerSettings(
        root="s3://bucket/log",
        topics=TopicSettings(default_partitions=9),
        storage={"aws_secret_access_key": "hush"},
    )
    entries = broker_entries(settings, listeners.parse(f"{LISTENER},OUT=SSL://h:1"))
    found = {entry.name: entry for entry in entries}
    assert len(found) == len(entries)
    assert found.keys() >= _known_keys().keys()
    secret = found["storage.aws_secret_access_key"]
    assert (secret.value, secret.kind, secret.is_secret) == (None, ConfigType.PASSWORD, True)
    assert "hush" not in repr(entries)
    assert all(entry.read_only for entry in entries)
    for name in ("num.partitions", "topics.default_partitions"):
        assert (found[name].value, found[name].source) == ("9", ConfigSource.BROKER)
    assert (found["topics.auto_create"].value, found["topics.auto_create"].kind) == (
        "true",
        ConfigType.BOOLEAN,
    )
    assert found["listeners"].value == f"PLAINTEXT://{LISTENER},OUT://h:1"
    assert found["listener.security.protocol.map"].value == "PLAINTEXT:PLAINTEXT,OUT:SSL"
    assert found["log.retention.ms"].source is ConfigSource.DEFAULT


def test_a_topic_follows_its_broker() -> None:
    """Its own word goes first, then the broker's, then the default; all are named."""
    settings = BrokerSettings(writer=WriterSettings(max_batch_bytes=17 << 20))
    usual = KEYS["max.message.bytes"].default
    config = {"max.message.bytes": "5"}
    for given, (value, source), count in (
        (config, ("5", ConfigSource.TOPIC), 3),
        ({}, (str(17 << 20), ConfigSource.BROKER), 2),
    ):
        found = {entry.name: entry for entry in topic_entries(given, settings)}
        entry = found["max.message.bytes"]
        assert (entry.value, entry.source) == (value, source)
        assert len(entry.synonyms) == count
        assert entry.synonyms[-1] == ("message.max.bytes", usual, ConfigSource.DEFAULT)
    found = {entry.name: entry for entry in topic_entries({}, BrokerSettings())}
    assert (found["max.message.bytes"].value, found["max.message.bytes"].source) == (
        usual,
        ConfigSource.DEFAULT,
    )
    assert found["remote.storage.enable"].synonyms == ()


def test_a_key_that_kafka_lacks_is_described_if_it_is_set() -> None:
    """Otherwise a program that copies all keys of a topic to a Kafka would be refused there."""
    usual = topic_entries({}, BrokerSettings())
    assert {entry.name for entry in usual} == KEYS.keys() - OWN_KEYS
    for name in OWN_KEYS:
        found = {entry.name: entry for entry in topic_entries({name: "1"}, BrokerSettings())}
        assert found.keys() == KEYS.keys() - OWN_KEYS | {name}
        assert (found[name].value, found[name].source) == ("1", ConfigSource.TOPIC)
