"""Administration by Kafka's clients, and by frames where no client asks."""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import confluent_kafka
import kafka
import msgspec
import pytest
import structlog
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin import NewPartitions as AioPartitions
from aiokafka.admin.config_resource import ConfigResource as AioResource
from aiokafka.admin.config_resource import ConfigResourceType as AioType
from confluent_kafka import KafkaError
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)
from kafka import KafkaAdminClient
from kafka.admin import ConfigResource as PyResource
from kio.schema.errors import ErrorCode

import sparklog
from sparklog import errors, limits
from sparklog.broker import group_configs
from sparklog.broker.agent import Agent
from sparklog.broker.kafka.topics import kafka_id
from sparklog.broker.logging import configure
from sparklog.formats import record_batch
from sparklog.formats.topic_config import KEYS, OWN_KEYS
from sparklog.settings import LogSettings, TopicSettings, WriterSettings
from tests.support.batches import Record, built, read
from tests.support.kafkas import SECONDS, Frames, broker
from tests.support.kafkas import frames as frames_of
from tests.support.logs import logging_restored
from tests.support.waiting import wait_until

TOPIC, BROKER, LOGGER, METRICS, GROUP = 2, 4, 8, 16, 32
SESSION = "consumer.session.timeout.ms"
SET, DELETE, APPEND = 0, 1, 2
CLIENT = {"client_software_name": "frames", "client_software_version": "1"}
TIMEOUT = dt.timedelta(seconds=SECONDS)
KAFKAS = KEYS.keys() - OWN_KEYS


@pytest.fixture(name="admin")
def _admin(address: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": address})


@pytest.fixture(name="python")
def _python(address: str) -> Iterator[KafkaAdminClient]:
    client = KafkaAdminClient(bootstrap_servers=address)
    yield client
    client.close()


@pytest.fixture(name="frames")
def _frames(address: str) -> Iterator[Frames]:
    frames = Frames(address)
    yield frames
    frames.close()


def done(futures: dict[Any, Any]) -> list[Any]:
    """Returns the results of librdkafka's futures."""
    return [each.result(SECONDS) for each in futures.values()]


def refusal(call: Callable[[], object]) -> int:
    """The code of the error that confluent-kafka raises."""
    with pytest.raises(confluent_kafka.KafkaException) as refused:
        call()
    code: int = refused.value.args[0].code()
    return code


def described(admin: AdminClient, kind: Any, name: str) -> dict[str, Any]:
    """By librdkafka: the entries by their names."""
    (found,) = done(admin.describe_configs([ConfigResource(kind, name)]))
    return dict(found)


# ------------------------------------------------------------------------------ topics' configs


def test_a_topic_is_created_with_a_config_and_described(
    log: sparklog.Log, admin: AdminClient
) -> None:
    """By librdkafka: keys that were set are the topic's own, all others defaults, and every key
    is there.
    """
    config = {"retention.ms": "3600000", "cleanup.policy": "compact", "segment.bytes": "1048576"}
    done(admin.create_topics([NewTopic("t", 3, config=config)]))
    assert log.describe("t").config == config
    found = described(admin, ResourceType.TOPIC, "t")
    assert found.keys() == KAFKAS
    for name, entry in found.items():
        is_set = name in config
        assert entry.value == config.get(name, KEYS[name].default)
        assert (entry.source, entry.is_default) == (1 if is_set else 5, not is_set)
        assert not entry.is_read_only
        assert not entry.is_sensitive
    synonyms = found["retention.ms"].synonyms
    assert [(name, each.value) for name, each in synonyms.items()] == [
        ("retention.ms", "3600000"),
        ("log.retention.ms", "-1"),
    ]


def test_a_topics_config_is_described_to_all(
    log: sparklog.Log, python: KafkaAdminClient, address: str
) -> None:
    """kafka-python and aiokafka read the same."""
    log.create_topic("t", config={"compression.type": "zstd"})
    (found,) = python.describe_configs([PyResource("TOPIC", "t")], config_filter="all").values()
    assert found["t"]["compression.type"]["value"] == "zstd"
    assert found["t"].keys() == KAFKAS

    async def describe() -> dict[str, Any]:
        client = AIOKafkaAdminClient(bootstrap_servers=address)
        await client.start()
        try:
            (reply,) = await client.describe_configs([AioResource(AioType.TOPIC, "t")])
        finally:
            await client.close()
        ((code, _message, _kind, name, entries),) = reply.resources
        assert (code, name) == (0, "t")
        return {entry[0]: entry[1] for entry in entries}

    told = asyncio.run(describe())
    assert told.keys() == KAFKAS
    assert told["compression.type"] == "zstd"


@pytest.mark.parametrize(
    ("name", "value"),
    [("no.such.key", "1"), ("segment.bytes", "1"), ("cleanup.policy", "keep"), ("flush.ms", "")],
)
def test_a_bad_config_is_refused(admin: AdminClient, name: str, value: str) -> None:
    """At the creation of a topic and later; INVALID_CONFIG, and nothing is made or changed."""
    new = NewTopic("t", 1, config={name: value})
    assert refusal(lambda: done(admin.create_topics([new]))) == KafkaError.INVALID_CONFIG
    done(admin.create_topics([NewTopic("t", 1)]))
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, "t", incremental_configs=[entry])
    call = lambda: done(admin.incremental_alter_configs([resource]))  # noqa: E731
    assert refusal(call) == KafkaError.INVALID_CONFIG
    assert all(each.is_default for each in described(admin, ResourceType.TOPIC, "t").values())


def alter(admin: AdminClient, topic: str, *edits: tuple[Any, str, str | None], **how: Any) -> None:
    """By librdkafka: (operation, key, value) of each."""
    entries = [
        ConfigEntry(name, value, incremental_operation=operation)
        for operation, name, value in edits
    ]
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    done(admin.incremental_alter_configs([resource], **how))


def test_single_keys_are_changed(log: sparklog.Log, admin: AdminClient) -> None:
    """Set, deleted, appended to and subtracted from; others stay as they are."""
    log.create_topic("t", config={"flush.ms": "7"})
    op = AlterConfigOpType
    alter(admin, "t", (op.SET, "retention.ms", "60000"), (op.APPEND, "cleanup.policy", "compact"))
    expected = {"flush.ms": "7", "retention.ms": "60000", "cleanup.policy": "delete,compact"}
    assert log.describe("t").config == expected
    alter(admin, "t", (op.SET, "retention.ms", "1"), validate_only=True)
    assert log.describe("t").config == expected
    alter(admin, "t", (op.SUBTRACT, "cleanup.policy", "delete"), (op.DELETE, "flush.ms", None))
    assert log.describe("t").config == {"retention.ms": "60000", "cleanup.policy": "compact"}
    wrong = (op.APPEND, "retention.ms", "1")
    assert refusal(lambda: alter(admin, "t", wrong)) == KafkaError.INVALID_CONFIG
    unknown = (op.SET, "retention.ms", "1")
    assert refusal(lambda: alter(admin, "u", unknown)) == KafkaError.UNKNOWN_TOPIC_OR_PART


def alter_group(frames: Frames, group: str, value: str | None) -> Any:
    """Sets or deletes a key of a group, and returns the response."""
    operation = 0 if value is not None else 1
    change = {"name": SESSION, "config_operation": operation, "value": value}
    resource = {"resource_type": GROUP, "resource_name": group, "configs": [change]}
    (found,) = frames.ask(44, 1, {"resources": [resource], "validate_only": False}).responses
    return found


def session_of(frames: Frames, group: str) -> tuple[str, int]:
    """Returns the described value of that key, and its source."""
    resource = {"resource_type": GROUP, "resource_name": group, "configuration_keys": [SESSION]}
    fields = {"resources": [resource], "include_synonyms": False, "include_documentation": False}
    ((entry,),) = (each.configs for each in frames.ask(32, 4, fields).results)
    return entry.value, entry.config_source


def test_the_config_of_a_group_survives_a_restart(tmp_path: Path) -> None:
    """Promise: it is stored with the cluster's metadata, from feature level 2 on, and bounded."""
    with broker(tmp_path / "root") as agent, frames_of(agent) as frames:
        assert alter_group(frames, "g", "50000").error_code == ErrorCode.none
        assert session_of(frames, "g") == ("50000", 8)
    with broker(tmp_path / "root") as agent, frames_of(agent) as frames:
        assert session_of(frames, "g") == ("50000", 8)
        with mock.patch.object(group_configs, "GROUPS_WITH_CONFIG", 1):
            refused = alter_group(frames, "h", "50000")
            assert refused.error_code == ErrorCode.invalid_request
            assert "no more are accepted" in refused.error_message
            refused = alter_group(frames, "h" * 250, "50000")
            assert refused.error_code == ErrorCode.invalid_request
            assert "at most 249 bytes" in refused.error_message
            assert alter_group(frames, "g", "51000").error_code == ErrorCode.none
        assert alter_group(frames, "g", None).error_code == ErrorCode.none
        assert session_of(frames, "g") == ("45000", 5)
        assert agent.parts.broker.group_configs.names() == []


def test_the_config_of_a_group_needs_an_upgraded_root(tmp_path: Path) -> None:
    """At level 1 the response names the command, after which the change is accepted."""
    with mock.patch.object(limits, "LEVEL", 1), broker(tmp_path / "root"):
        pass
    with broker(tmp_path / "root") as agent, frames_of(agent) as frames:
        refused = alter_group(frames, "g", "50000")
        assert refused.error_code == ErrorCode.unsupported_version
        assert "sparklog cluster upgrade" in refused.error_message
        agent.parts.broker.cluster_admin.upgrade()
        assert alter_group(frames, "g", "50000").error_code == ErrorCode.none


def test_a_restart_keeps_the_config(tmp_path: Path) -> None:
    """It is the cluster's, and the table's."""
    config = {"max.message.bytes": "1000", "preallocate": "true"}
    with broker(tmp_path / "root") as agent:
        admin = AdminClient({"bootstrap.servers": agent.kafka_address})
        done(admin.create_topics([NewTopic("t", 1, config=config)]))
    with broker(tmp_path / "root") as agent:
        admin = AdminClient({"bootstrap.servers": agent.kafka_address})
        found = described(admin, ResourceType.TOPIC, "t")
        assert {name: each.value for name, each in found.items() if each.source == 1} == config


def test_the_whole_config_is_replaced(log: sparklog.Log, frames: Frames) -> None:
    """AlterConfigs: what it does not name goes back to its default, in every version."""
    for version in range(3):
        log.create_topic(f"t{version}", config={"flush.ms": "7", "segment.ms": "9"})
        fields = {
            "resources": [
                {
                    "resource_type": TOPIC,
                    "resource_name": f"t{version}",
                    "configs": [{"name": "flush.ms", "value": "8"}],
                }
            ],
            "validate_only": True,
        }
        (reply,) = frames.ask(33, version, fields).responses
        assert reply.error_code == ErrorCode.none
        assert log.describe(f"t{version}").config == {"flush.ms": "7", "segment.ms": "9"}
        (reply,) = frames.ask(33, version, fields | {"validate_only": False}).responses
        assert reply.error_code == ErrorCode.none
        assert log.describe(f"t{version}").config == {"flush.ms": "8"}


def one(key: str, value: str | None, operation: int = SET) -> list[dict[str, Any]]:
    """A change of one key, as it is sent."""
    return [{"name": key, "value": value, "config_operation": operation}]


@pytest.mark.parametrize(
    ("kind", "name", "configs", "code"),
    [
        (TOPIC, "t", one("flush.ms", "1") * 2, ErrorCode.invalid_request),
        (TOPIC, "t", one("flush.ms", None), ErrorCode.invalid_request),
        (TOPIC, "t", one("flush.ms", "1", 4), ErrorCode.invalid_request),
        (TOPIC, "t", one("no.such.key", None, DELETE), ErrorCode.none),
        (TOPIC, "t", one("no.such.key", "1", APPEND), ErrorCode.invalid_config),
        (TOPIC, "", one("flush.ms", "1"), ErrorCode.invalid_request),
        (TOPIC, "no/name", one("flush.ms", "1"), ErrorCode.invalid_topic_exception),
        (TOPIC, "u", one("flush.ms", "1"), ErrorCode.unknown_topic_or_partition),
        (BROKER, "1", one("writer.linger_ms", "1"), ErrorCode.invalid_request),
        (BROKER, "", one("log.retention.ms", "1"), ErrorCode.invalid_request),
        (METRICS, "m", one("metrics", "1"), ErrorCode.invalid_request),
        (99, "t", one("flush.ms", "1"), ErrorCode.invalid_request),
    ],
)
def test_what_cannot_be_altered_is_refused(
    log: sparklog.Log,
    frames: Frames,
    kind: int,
    name: str,
    configs: list[dict[str, Any]],
    code: ErrorCode,
) -> None:
    """With Kafka's codes, in both requests where they have the same, and with no effect."""
    log.create_topic("t", config={"flush.ms": "7"})
    resource = {"resource_type": kind, "resource_name": name, "configs": configs}
    for version in range(2):
        fields = {"resources": [resource], "validate_only": False}
        (reply,) = frames.ask(44, version, fields).responses
        assert (reply.error_code, reply.resource_type, reply.resource_name) == (code, kind, name)
        assert (reply.error_message is None) is (code is ErrorCode.none)
    if all(each["config_operation"] == SET for each in configs):
        (reply,) = frames.ask(33, 1, {"resources": [resource], "validate_only": False}).responses
        assert reply.error_code == code
    assert log.describe("t").config == {"flush.ms": "7"}


def test_a_resource_stands_in_a_request_once(log: sparklog.Log, frames: Frames) -> None:
    """Duplicate names are refused, because either entry could be meant."""
    log.create_topic("t")
    one_of = {"resource_type": TOPIC, "resource_name": "t", "configs": one("flush.ms", "1")}
    for key in (33, 44):
        fields = {"resources": [one_of, one_of], "validate_only": False}
        replies = frames.ask(key, 1, fields).responses
        assert [each.error_code for each in replies] == [ErrorCode.invalid_request] * 2


def test_kafka_python_administers(log: sparklog.Log, python: KafkaAdminClient) -> None:
    """Sets and resets keys; lists topics' partitions, resources with a config, and producers."""
    log.create_topic("t", partitions=2, config={"flush.ms": "7"})
    python.alter_configs([PyResource("TOPIC", "t", configs={"retention.ms": "60000"})])
    assert log.describe("t").config == {"flush.ms": "7", "retention.ms": "60000"}
    python.reset_configs([PyResource("TOPIC", "t", configs={"flush.ms": None})])
    assert log.describe("t").config == {"retention.ms": "60000"}
    (topic,) = python.describe_topic_partitions(["t"])["topics"]
    assert [each["partition_index"] for each in topic["partitions"]] == [0, 1]
    listed = python.list_config_resources()
    assert listed["broker"] == ["1"]
    assert "t" in listed["topic"]
    place = kafka.TopicPartition("t", 1)
    assert python.describe_producers([place])[place].active_producers == []


# ------------------------------------------------------------------------------ brokers


def test_the_broker_is_described(tmp_path: Path) -> None:
    """A broker's settings are listed under Kafka's names, read-only and without secrets."""
    settings: dict[str, Any] = {
        "topics": TopicSettings(default_partitions=7, auto_create=False),
        "writer": WriterSettings(max_batch_bytes=32 << 20),
    }
    with broker(tmp_path / "root", **settings) as agent:
        admin = AdminClient({"bootstrap.servers": agent.kafka_address})
        found = described(admin, ResourceType.BROKER, "1")
        expected = {
            "auto.create.topics.enable": ("false", 4),
            "num.partitions": ("7", 4),
            "message.max.bytes": (str(32 << 20), 4),
            "offsets.retention.minutes": ("10080", 5),
            "log.retention.ms": ("-1", 5),
            "broker.id": ("1", 4),
            "advertised.listeners": (f"PLAINTEXT://{agent.kafka_address}", 4),
            "log.dirs": (str(tmp_path / "root"), 4),
            "topics.default_partitions": ("7", 4),
            "topics.refuse_replication": ("false", 5),
            "writer.linger_ms": ("-1", 5),
        }
        for name, told in expected.items():
            assert (found[name].value, found[name].source) == told, name
        assert all(each.is_read_only for each in found.values())
        done(admin.create_topics([NewTopic("t", 1)]))
        of_topic = described(admin, ResourceType.TOPIC, "t")["max.message.bytes"]
        assert (of_topic.value, of_topic.source) == (str(32 << 20), 4)


@pytest.fixture(name="own_logging")
def _own_logging() -> Iterator[None]:
    """The logging of a standing broker, in this process."""
    with logging_restored():
        configure(LogSettings(format="json", level="error"))
        yield


def test_the_log_level_of_a_broker_that_runs_is_altered(
    own_logging: None, python: KafkaAdminClient, capsys: pytest.CaptureFixture[str]
) -> None:
    """By kafka-python: described, altered, in effect, and logged with the client that did it.

    At DEBUG each request has a line with its client, and at other levels none.
    """

    def level() -> str:
        (found,) = python.describe_configs([PyResource("BROKER_LOGGER", "1")], config_filter="all")[
            "broker_logger"
        ].values()
        (entry,) = found.items()
        assert entry[0] == "root"
        return str(entry[1] if isinstance(entry[1], str) else entry[1]["value"])

    def lines() -> list[dict[str, Any]]:
        return [*map(msgspec.json.decode, capsys.readouterr().err.splitlines())]

    def alter_level(value: str) -> None:
        python.alter_configs([PyResource("BROKER_LOGGER", "1", configs={"root": value})])

    assert level() == "ERROR"
    assert lines() == []
    alter_level("DEBUG")
    (line,) = [each for each in lines() if each["event"] == "altered the log level"]
    assert (line["before"], line["now"]) == ("error", "debug")
    assert line["client"].startswith("'kafka-python")
    assert level() == "DEBUG"
    seen: list[dict[str, Any]] = []

    def is_logged() -> bool:
        seen.extend(lines())
        return any(each.get("api") == "describe_configs" for each in seen)

    wait_until(is_logged, "the request has a line")
    request = next(each for each in seen if each.get("api") == "describe_configs")
    assert request.items() >= {"event": "answered a request", "level": "debug"}.items()
    assert request["client"] == line["client"]
    assert request["milliseconds"] >= 0
    alter_level("WARN")
    structlog.get_logger("sparklog.test").info("below the level")
    assert level() == "WARN"
    assert [each["event"] for each in lines()][-1:] == ["altered the log level"]


@pytest.mark.parametrize(
    ("key", "value", "operation", "code"),
    [
        ("root", "TRACE", SET, ErrorCode.none),
        ("root", "debug", SET, ErrorCode.invalid_config),
        ("kafka.server.KafkaApis", "DEBUG", SET, ErrorCode.invalid_config),
        ("root", None, SET, ErrorCode.invalid_request),
        ("root", None, DELETE, ErrorCode.invalid_request),
        ("root", "DEBUG", APPEND, ErrorCode.invalid_request),
        ("root", "DEBUG", 9, ErrorCode.invalid_request),
    ],
)
def test_the_level_of_a_logger_is_checked(
    own_logging: None,
    frames: Frames,
    key: str,
    value: str | None,
    operation: int,
    code: ErrorCode,
) -> None:
    """With Kafka's codes; a request that is refused or only checked alters nothing."""
    resource = {"resource_type": LOGGER, "resource_name": "1"}
    fields = {"resources": [{**resource, "configs": one(key, value, operation)}]}
    (reply,) = frames.ask(44, 1, {**fields, "validate_only": True}).responses
    assert reply.error_code == code
    about = {"include_synonyms": True, "include_documentation": True}
    asked = {"resources": [{**resource, "configuration_keys": None}], **about}
    (entry,) = frames.ask(32, 4, asked).results[0].configs
    assert (entry.name, entry.value, entry.config_source, entry.read_only) == (
        "root", "ERROR", 6, False
    )  # fmt: skip
    (reply,) = frames.ask(44, 1, {**fields, "validate_only": False}).responses
    assert reply.error_code == code
    (entry,) = frames.ask(32, 4, asked).results[0].configs
    assert entry.value == ("ERROR" if code else "DEBUG")


def test_other_loggers_are_not_altered(own_logging: None, frames: Frames) -> None:
    """Those of another broker, of all brokers, and by AlterConfigs."""
    for name in ("2", ""):
        resource = {"resource_type": LOGGER, "resource_name": name, "configs": one("root", "INFO")}
        fields = {"resources": [resource], "validate_only": False}
        (reply,) = frames.ask(44, 1, fields).responses
        assert reply.error_code == ErrorCode.invalid_request
    resource |= {"resource_name": "1", "configs": [{"name": "root", "value": "INFO"}]}
    (reply,) = frames.ask(33, 2, {"resources": [resource], "validate_only": False}).responses
    assert reply.error_code == ErrorCode.invalid_request


def test_loggers_of_a_program_are_not_altered(frames: Frames) -> None:
    """A broker in a program whose logging is the program's own describes no logger."""
    with logging_restored():
        structlog.configure()
        resource = {"resource_type": LOGGER, "resource_name": "1"}
        asked = {"resources": [{**resource, "configuration_keys": None}], "include_synonyms": True}
        (reply,) = frames.ask(32, 2, asked).results
        assert (reply.error_code, reply.configs) == (ErrorCode.none, ())
        fields = {"resources": [{**resource, "configs": one("root", "DEBUG")}]}
        (reply,) = frames.ask(44, 1, {**fields, "validate_only": False}).responses
        assert reply.error_code == ErrorCode.invalid_config


@pytest.mark.parametrize(
    ("kind", "name", "code"),
    [
        (TOPIC, "u", ErrorCode.unknown_topic_or_partition),
        (TOPIC, "no/name", ErrorCode.invalid_topic_exception),
        (BROKER, "2", ErrorCode.invalid_request),
        (BROKER, "one", ErrorCode.invalid_request),
        (BROKER, "", ErrorCode.none),
        (LOGGER, "2", ErrorCode.invalid_request),
        (LOGGER, "", ErrorCode.invalid_request),
        (99, "x", ErrorCode.invalid_request),
    ],
)
def test_what_cannot_be_described_is_refused(
    frames: Frames, kind: int, name: str, code: ErrorCode
) -> None:
    """Errors have Kafka's codes; changes of the default for all brokers are refused."""
    resource = {"resource_type": kind, "resource_name": name, "configuration_keys": None}
    for version in range(1, 5):
        fields = {"resources": [resource], "include_synonyms": True}
        fields |= {"include_documentation": True} if version >= 3 else {}
        (reply,) = frames.ask(32, version, fields).results
        assert (reply.error_code, reply.configs) == (code, ())


def test_a_description_is_as_long_as_was_asked_for(log: sparklog.Log, frames: Frames) -> None:
    """Some keys or all, with synonyms and documentation or without; types are Kafka's."""
    log.create_topic("t", config={"preallocate": "true"})
    resource: dict[str, Any] = {"resource_type": TOPIC, "resource_name": "t"}
    some = {**resource, "configuration_keys": ["preallocate", "no.such.key"]}
    fields = {"resources": [some], "include_synonyms": False, "include_documentation": True}
    (reply,) = frames.ask(32, 4, fields).results
    (entry,) = reply.configs
    assert (entry.name, entry.value, entry.config_source) == ("preallocate", "true", 1)
    assert (entry.synonyms, entry.config_type) == ((), 1)
    assert entry.documentation == KEYS["preallocate"].about
    assert "no effect" in entry.documentation
    fields = {"resources": [{**resource, "configuration_keys": ()}], "include_synonyms": True}
    (reply,) = frames.ask(32, 3, fields).results
    types = {each.name: each.config_type for each in reply.configs}
    assert types.keys() == KAFKAS
    expected = {"cleanup.policy": 7, "retention.ms": 5, "segment.bytes": 3, "compression.type": 2}
    assert {name: types[name] for name in expected} == expected
    assert types["min.cleanable.dirty.ratio"] == 6
    assert all(each.documentation is None for each in reply.configs)


def test_what_has_a_config_is_listed(log: sparklog.Log, frames: Frames) -> None:
    """Topics and brokers; clients' metrics are what version 0 asks for, and there are none."""
    log.create_topic("a")
    log.create_topic("b")

    def listed(*kinds: int) -> set[tuple[int, str]]:
        reply = frames.ask(74, 1, {"resource_types": kinds})
        assert reply.error_code == ErrorCode.none
        return {(each.resource_type, each.resource_name) for each in reply.config_resources}

    topics = {(TOPIC, "a"), (TOPIC, "b")}
    assert listed(TOPIC) >= topics
    assert listed(BROKER) == {(BROKER, "1")}
    assert listed(LOGGER) == {(LOGGER, "1")}
    assert listed() == listed(TOPIC) | listed(BROKER) | listed(LOGGER)
    assert listed(METRICS) == set()
    assert frames.ask(74, 0, {}).config_resources == ()
    assert frames.ask(74, 1, {"resource_types": (99,)}).error_code == ErrorCode.unsupported_version


def test_what_is_not_there_is_not_offered(frames: Frames) -> None:
    """No transactions, no groups of KIP-848, no share groups, no delegation tokens: a client sees
    it. ACLs and users are offered, with an error while they are off.
    """
    offered = {each.api_key for each in frames.ask(18, 4, CLIENT).api_keys}
    transactions = {24, 25, 26, 27, 28, 65, 66}
    new_groups = {68, 69, 76, 77, 78, 79, 80, 88, 89, 90, 91, 92}
    delegation_tokens = {38, 39, 40, 41}
    assert not offered & (transactions | new_groups | delegation_tokens)
    assert {
        0,
        1,
        2,
        3,
        17,
        18,
        19,
        20,
        23,
        29,
        30,
        31,
        32,
        33,
        35,
        36,
        37,
        44,
        48,
        49,
        50,
        51,
        60,
        61,
        74,
        75,
    } <= offered


def test_the_cluster_is_described(
    agent: Agent, admin: AdminClient, python: KafkaAdminClient, frames: Frames
) -> None:
    """The cluster has an id and one broker, its controller; a wrong endpoint type is refused."""
    host, _, port = agent.kafka_address.rpartition(":")
    found = admin.describe_cluster().result(SECONDS)
    assert found.controller.id == 1
    assert [(node.id, node.host, node.port) for node in found.nodes] == [(1, host, int(port))]
    told = python.describe_cluster()
    assert (told["cluster_id"], told["controller_id"]) == (found.cluster_id, 1)
    for version in range(3):
        asked: dict[str, Any] = {"include_cluster_authorized_operations": True}
        asked |= {"endpoint_type": 1} if version >= 1 else {}
        asked |= {"include_fenced_brokers": True} if version >= 2 else {}
        reply = frames.ask(60, version, asked)
        assert (reply.error_code, reply.cluster_id) == (ErrorCode.none, found.cluster_id)
        assert [(each.broker_id, each.port) for each in reply.brokers] == [(1, int(port))]
        operations = {at for at in range(31) if reply.cluster_authorized_operations >> at & 1}
        assert operations == {5, 7, 8, 9, 10, 11, 12}
    for kind, code in ((2, ErrorCode.mismatched_endpoint_type), (3, ErrorCode(115))):
        asked = {"include_cluster_authorized_operations": False, "endpoint_type": kind}
        reply = frames.ask(60, 1, asked)
        assert (reply.error_code, reply.brokers) == (code, ())
        assert reply.cluster_authorized_operations == -(2**31)


# ------------------------------------------------------------------------------ partitions


def test_partitions_are_added(
    log: sparklog.Log, admin: AdminClient, python: KafkaAdminClient, address: str
) -> None:
    """By three clients; never fewer, never as many as there are, and only checked if so asked."""
    done(admin.create_topics([NewTopic("t", 2)]))
    done(admin.create_partitions([NewPartitions("t", 3)]))
    assert len(log.describe("t").partitions) == 3
    done(admin.create_partitions([NewPartitions("t", 4)], validate_only=True))
    assert len(log.describe("t").partitions) == 3
    python.create_partitions({"t": 5})
    assert len(log.describe("t").partitions) == 5

    async def widen() -> None:
        client = AIOKafkaAdminClient(bootstrap_servers=address)
        await client.start()
        try:
            await client.create_partitions({"t": AioPartitions(6)})
        finally:
            await client.close()

    asyncio.run(widen())
    assert len(log.describe("t").partitions) == 6
    for count in (5, 6):
        for only_checks in (True, False):
            call = lambda count=count, only=only_checks: done(  # noqa: E731
                admin.create_partitions([NewPartitions("t", count)], validate_only=only)
            )
            assert refusal(call) == KafkaError.INVALID_PARTITIONS
    wanted = NewPartitions("u", 3)
    assert refusal(lambda: done(admin.create_partitions([wanted]))) == (
        KafkaError.UNKNOWN_TOPIC_OR_PART
    )


@pytest.mark.parametrize("version", range(4))
def test_an_assignment_fits_the_count(log: sparklog.Log, frames: Frames, version: int) -> None:
    """Brokers for each new partition, or none at all; a topic is named once."""
    log.create_topic("t", partitions=1)

    def widened(*topics: dict[str, Any]) -> list[ErrorCode]:
        fields = {"topics": topics, "timeout": TIMEOUT, "validate_only": False}
        return [each.error_code for each in frames.ask(37, version, fields).results]

    wrong = {"name": "t", "count": 3, "assignments": [{"broker_ids": (1,)}]}
    assert widened(wrong) == [ErrorCode.invalid_replica_assignment]
    assert widened(wrong, wrong) == [ErrorCode.invalid_request] * 2
    assert len(log.describe("t").partitions) == 1
    right = {"name": "t", "count": 2, "assignments": [{"broker_ids": (1,)}]}
    assert widened(right) == [ErrorCode.none]
    assert len(log.describe("t").partitions) == 2


def create(frames: Frames, version: int = 7, **topic: Any) -> Any:
    """Returns the usual answer to the creation of a topic, with these fields changed."""
    usual = {"name": "t", "num_partitions": 1, "replication_factor": 1}
    fields = {
        "topics": [{**usual, "assignments": (), "configs": (), **topic}],
        "timeout": TIMEOUT,
        "validate_only": False,
    }
    (found,) = frames.ask(19, version, fields).topics
    return found


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("factor", [-2, -1, 0, 1, 2, 3])
def test_any_replication_factor_is_met(tmp_path: Path, factor: int, refused: bool) -> None:
    """The root's storage replicates; only on demand is more than one replica refused."""
    topics = TopicSettings(refuse_replication=refused)
    with broker(tmp_path / "root", topics=topics) as agent:
        frames = Frames(agent.kafka_address)
        found = create(frames, replication_factor=factor)
        frames.close()
    is_bad = factor == 0 or factor < -1 or (refused and factor > 1)
    expected = ErrorCode.invalid_replication_factor if is_bad else ErrorCode.none
    assert found.error_code == expected
    assert found.replication_factor == (-1 if is_bad else 1)


@pytest.mark.parametrize(
    ("topic", "code"),
    [
        (
            {"assignments": [{"partition_index": 0, "broker_ids": (1,)}]},
            ErrorCode.invalid_request,
        ),
        (
            {
                "num_partitions": -1,
                "replication_factor": -1,
                "assignments": [{"partition_index": 1, "broker_ids": (1,)}],
            },
            ErrorCode.invalid_replica_assignment,
        ),
        ({"num_partitions": 0}, ErrorCode.invalid_partitions),
        ({"num_partitions": -2}, ErrorCode.invalid_partitions),
        ({"configs": [{"name": "flush.ms", "value": None}]}, ErrorCode.invalid_config),
    ],
)
def test_a_topic_that_makes_no_sense_is_refused(
    log: sparklog.Log, frames: Frames, topic: dict[str, Any], code: ErrorCode
) -> None:
    """With Kafka's codes."""
    assert create(frames, **topic).error_code == code
    assert "t" not in log.topics()


def test_a_creation_tells_the_config(log: sparklog.Log, frames: Frames) -> None:
    """As DescribeConfigs would; also where it is only checked."""
    configs = [{"name": "flush.ms", "value": " 7 "}]
    for only_checks in (True, False):
        usual = {"name": "t", "num_partitions": -1, "replication_factor": -1}
        fields = {
            "topics": [{**usual, "assignments": (), "configs": configs}],
            "timeout": TIMEOUT,
            "validate_only": only_checks,
        }
        (found,) = frames.ask(19, 7, fields).topics
        assert (found.error_code, found.num_partitions) == (ErrorCode.none, 4)
        told = {each.name: (each.value, each.config_source) for each in found.configs}
        assert told.keys() == KAFKAS
        assert told["flush.ms"] == ("7", 1)
        assert told["retention.ms"] == ("-1", 5)
        assert ("t" in log.topics()) is not only_checks
        topic_id = None if only_checks else kafka_id(log.describe("t").topic_id)
        assert found.topic_id == topic_id


def test_topics_partitions_are_described_in_portions(log: sparklog.Log, frames: Frames) -> None:
    """A cursor says where the next portion begins, across topics, to the last of them."""
    for name, count in (("a", 2), ("b", 3), ("c", 1)):
        log.create_topic(name, partitions=count)

    def ask(names: Sequence[str], limit: int, cursor: Any) -> Any:
        fields = {
            "topics": [{"name": name} for name in names],
            "response_partition_limit": limit,
            "cursor": cursor,
        }
        return frames.ask(75, 0, fields)

    wanted = [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2), ("c", 0)]
    for limit in range(1, 8):
        for names in ((), ("c", "a", "b")):
            found: list[tuple[str, int]] = []
            cursor: Any = None
            while True:
                reply = ask(names, limit, cursor)
                portion = [
                    (topic.name, each.partition_index)
                    for topic in reply.topics
                    if not topic.is_internal
                    for each in topic.partitions
                ]
                assert len(portion) <= limit
                found += portion
                if reply.next_cursor is None:
                    break
                cursor = {
                    "topic_name": reply.next_cursor.topic_name,
                    "partition_index": reply.next_cursor.partition_index,
                }
            assert found == wanted, (limit, names)
    reply = ask(("a", "no/name", "u"), 9, None)
    codes = {topic.name: topic.error_code for topic in reply.topics}
    assert codes == {
        "a": ErrorCode.none,
        "no/name": ErrorCode.invalid_topic_exception,
        "u": ErrorCode.unknown_topic_or_partition,
    }
    (partition, _) = reply.topics[0].partitions
    assert (partition.leader_id, partition.replica_nodes, partition.isr_nodes) == (1, (1,), (1,))
    assert reply.topics[0].topic_id == kafka_id(log.describe("a").topic_id)
    for cursor in (
        {"topic_name": "b", "partition_index": 0},
        {"topic_name": "a", "partition_index": -1},
    ):
        (refused,) = ask(("a",), 9, cursor).topics
        assert refused.error_code == ErrorCode.invalid_request


def test_the_space_that_partitions_take(log: sparklog.Log, python: KafkaAdminClient) -> None:
    """Sizes include the WAL and the table; the root is the only log directory."""
    log.create_topic("t", partitions=2)
    ((_, before),) = sizes(python, "t").items()
    assert before == {0: 0, 1: 0}
    with log.producer() as producer:
        producer.send("t", b"v" * 10_000, partition=1)
    log.flush_to_table("t")
    ((folder, after),) = sizes(python, "t").items()
    assert folder == log.describe("t").table_uri.removesuffix("/topics/t")
    assert after == {0: 0, 1: log.describe("t").table_bytes}


def sizes(python: KafkaAdminClient, topic: str) -> dict[str, dict[int, int]]:
    """By folder and partition."""
    found = {}
    for reply in python.describe_log_dirs():
        for each in reply["log_dirs"]:
            assert each["error_code"] == 0
            found[each["log_dir"]] = {
                partition["partition_index"]: partition["partition_size"]
                for named in each["topics"]
                if named["name"] == topic
                for partition in named["partitions"]
            }
    return found


def test_the_space_of_some_partitions(log: sparklog.Log, frames: Frames) -> None:
    """Existing topics are described in every version when they are named."""
    log.create_topic("t", partitions=3)
    log.create_topic("u", partitions=1)
    for version in range(1, 5):
        asked = [{"topic": "t", "partitions": (2, 7)}, {"topic": "v", "partitions": (0,)}]
        (root,) = frames.ask(35, version, {"topics": asked}).results
        found = {
            each.name: [one.partition_index for one in each.partitions] for each in root.topics
        }
        assert found == {"t": [2]}
        assert version < 4 or root.usable_bytes > 0
        (root,) = frames.ask(35, version, {"topics": None}).results
        assert {"t", "u"} <= {each.name for each in root.topics}


# ------------------------------------------------------------------------------ producers, epochs


def test_the_producers_of_a_partition(log: sparklog.Log, address: str, frames: Frames) -> None:
    """Those that are idempotent, with the last sequence that each has written."""
    log.create_topic("t", partitions=1)
    given = {"bootstrap.servers": address, "enable.idempotence": True}
    producer = confluent_kafka.Producer(given)
    for number in range(5):
        producer.produce("t", b"%d" % number)
        producer.flush(SECONDS)
    fields = {"topics": [{"name": "t", "partition_indexes": (0, 1)}]}
    (topic,) = frames.ask(61, 0, fields).topics
    there, absent = topic.partitions
    (state,) = there.active_producers
    assert (there.error_code, state.producer_epoch, state.last_sequence) == (ErrorCode.none, 0, 4)
    assert state.last_timestamp > 1_700_000_000_000
    assert (absent.error_code, absent.active_producers) == (
        ErrorCode.unknown_topic_or_partition,
        (),
    )


def test_where_a_leader_epoch_has_ended(tmp_path: Path) -> None:
    """The current one at the end of the log, the one before it where that began, none to come."""

    def asked(agent: Agent, epoch: int, current: int = -1) -> tuple[ErrorCode, int, int]:
        frames = Frames(agent.kafka_address)
        answers = set()
        for version in range(2, 5):
            partition = {"partition": 0, "leader_epoch": epoch, "current_leader_epoch": current}
            topics = [{"topic": "t", "partitions": [partition]}]
            fields: dict[str, Any] = {"topics": topics}
            fields |= {"replica_id": -1} if version >= 3 else {}
            (topic,) = frames.ask(23, version, fields).topics
            (found,) = topic.partitions
            answers.add((found.error_code, found.leader_epoch, found.end_offset))
        frames.close()
        (answer,) = answers
        return answer

    root = tmp_path / "root"
    for epoch in range(3):
        with broker(root) as agent, sparklog.connect(agent.address) as log:
            log.create_topic("t", partitions=1, if_absent=True)
            with log.producer() as producer:
                for _ in range(epoch + 1):
                    producer.send("t", b"v")
            end = sum(range(epoch + 2))
            assert asked(agent, epoch) == (ErrorCode.none, epoch, end)
            assert asked(agent, epoch, epoch) == (ErrorCode.none, epoch, end)
            assert asked(agent, epoch + 1) == (ErrorCode.none, -1, -1)
            assert asked(agent, -1) == (ErrorCode.none, -1, -1)
            if epoch:
                assert asked(agent, epoch - 1) == (ErrorCode.none, epoch - 1, end - epoch - 1)
                assert asked(agent, 0, epoch - 1) == (ErrorCode.fenced_leader_epoch, -1, -1)
            assert asked(agent, 0, epoch + 1) == (ErrorCode.unknown_leader_epoch, -1, -1)


# ------------------------------------------------------------------------------ what configs do


def send(frames: Frames, topic: str, batch: bytes, version: int = 9) -> Any:
    """The answer of partition 0."""
    fields = {
        "transactional_id": None,
        "acks": -1,
        "timeout": TIMEOUT,
        "topic_data": [{"name": topic, "partition_data": [{"index": 0, "records": batch}]}],
    }
    (found,) = frames.ask(0, version, fields).responses
    return found.partition_responses[0]


def records(*times_ms: int, size: int = 10) -> list[Record]:
    """With keys, and values that compress well."""
    return [Record(each, b"k%d" % at, b"v" * size) for at, each in enumerate(times_ms)]


def now_ms() -> int:
    """As producers tell the time."""
    return time.time_ns() // 1_000_000


def test_a_batch_may_be_as_large_as_the_topic_says(
    log: sparklog.Log, frames: Frames, admin: AdminClient
) -> None:
    """As it comes, compressed: one byte more is MESSAGE_TOO_LARGE, to a record of ours as well."""
    plain, packed = built(records(now_ms(), size=5_000)), built(records(now_ms(), size=5_000), 1)
    assert len(packed) < 200
    log.create_topic("t", partitions=1, config={"max.message.bytes": str(len(plain))})
    assert send(frames, "t", plain).error_code == ErrorCode.none
    alter(admin, "t", (AlterConfigOpType.SET, "max.message.bytes", str(len(plain) - 1)))
    refused = send(frames, "t", plain)
    assert (refused.error_code, refused.base_offset) == (ErrorCode.message_too_large, -1)
    assert "max.message.bytes" in refused.error_message
    assert send(frames, "t", packed).error_code == ErrorCode.none
    limit = len(plain) - 1
    with log.producer() as producer:
        assert producer.send("t", b"v" * limit).result(SECONDS).offset == 2
        with pytest.raises(errors.Invalid, match=str(limit)):
            producer.send("t", b"v" * (limit + 1)).result(SECONDS)
    assert [len(row["value"]) for row in log.read("t").to_pylist()] == [5_000, 5_000, limit]


def test_times_may_be_as_far_off_as_the_topic_says(log: sparklog.Log, frames: Frames) -> None:
    """A batch with one that is not is refused whole, and each such record is named."""
    bounds = {"before": "60000", "after": "30000"}
    config = {f"message.timestamp.{side}.max.ms": value for side, value in bounds.items()}
    log.create_topic("t", partitions=1, config=config)
    now = now_ms()
    near = records(now - 50_000, now, now + 20_000)
    assert send(frames, "t", built(near)).error_code == ErrorCode.none
    refused = send(frames, "t", built(records(now, now - 70_000, now + 1, now + 40_000)))
    assert refused.error_code == ErrorCode.invalid_timestamp
    assert [each.batch_index for each in refused.record_errors] == [1, 3]
    for each, off in zip(refused.record_errors, (-70_000, 40_000), strict=True):
        assert str(now + off) in each.batch_index_error_message
    log.alter("t", {"message.timestamp.type": "LogAppendTime"})
    assert send(frames, "t", built(records(now - 70_000))).error_code == ErrorCode.none
    assert log.describe("t").partitions[0].end == 4


def test_each_record_without_a_key_is_named(log: sparklog.Log, frames: Frames) -> None:
    """To a topic that is compacted, also where old records are deleted from it."""
    log.create_topic("t", partitions=1, config={"cleanup.policy": "compact, delete"})
    given = [Record(1, key, b"v") for key in (b"a", None, b"b", None)]
    refused = send(frames, "t", built(given))
    assert refused.error_code == ErrorCode.invalid_record
    assert [each.batch_index for each in refused.record_errors] == [1, 3]


CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}


def fetched(frames: Frames, topic: str, offset: int) -> bytes:
    """The batches from there on, as they are on the wire."""
    partition = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 1 << 20}
    fields = {
        "max_wait": TIMEOUT,
        "min_bytes": 1,
        "max_bytes": 1 << 20,
        "isolation_level": 0,
        "session_id": 0,
        "session_epoch": -1,
        "topics": [{"topic": topic, "partitions": [partition]}],
        "forgotten_topics_data": (),
    }
    (found,) = frames.ask(1, 11, fields).responses
    return bytes(found.partitions[0].records)


@pytest.mark.parametrize("came", CODECS)
@pytest.mark.parametrize("wanted", [*CODECS, "producer"])
def test_batches_have_the_codec_that_the_topic_wants(
    log: sparklog.Log, frames: Frames, address: str, wanted: str, came: str
) -> None:
    """However they came, from a Kafka client or ours; read hot and from the table, by aiokafka and
    librdkafka."""
    chosen = "uncompressed" if wanted == "none" else wanted
    log.create_topic("t", partitions=1, config={"compression.type": chosen})
    given = records(*range(1_000, 1_060), size=1_000)
    sent = built(given, CODECS[came])
    assert send(frames, "t", sent).error_code == ErrorCode.none
    with log.producer() as producer:
        producer.send("t", b"w" * 1_000).result(SECONDS)
    expected = CODECS[came if wanted == "producer" else wanted]
    first = fetched(frames, "t", 0)
    header = record_batch.read_header(first)
    assert header.codec == expected
    kafkas, ours = first[: header.size], first[header.size :] or fetched(frames, "t", 60)
    assert [record for _, record in read(kafkas)] == given
    assert record_batch.read_header(ours).codec == (0 if wanted == "producer" else expected)
    if CODECS[came] == expected:
        assert kafkas[61:] == sent[61:]
    log.flush_to_table("t")
    given_to = {"bootstrap.servers": address, "group.id": "g", "enable.auto.commit": False}
    consumer = confluent_kafka.Consumer(given_to)
    consumer.assign([confluent_kafka.TopicPartition("t", 0, 0)])
    values: list[bytes | None] = []
    deadline = time.monotonic() + SECONDS
    while len(values) < 61 and time.monotonic() < deadline:
        values += [each.value() for each in consumer.consume(61, 0.5)]
    consumer.close()
    assert values == [each.value for each in given] + [b"w" * 1_000]


def test_old_batches_have_the_codec_too(tmp_path: Path) -> None:
    """After a restart nothing is hot, and batches are made of the table's rows."""
    with broker(tmp_path / "root") as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t", partitions=1, config={"compression.type": "lz4"})
        with log.producer() as producer:
            producer.send("t", b"w" * 1_000).result(SECONDS)
    with broker(tmp_path / "root") as agent:
        frames = Frames(agent.kafka_address)
        batch = fetched(frames, "t", 0)
        frames.close()
    assert record_batch.read_header(batch).codec == CODECS["lz4"]
    assert [record.value for _, record in read(batch)] == [b"w" * 1_000]
