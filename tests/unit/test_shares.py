"""The settings of several brokers on one machine."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import msgspec
import pytest

from sparklog import errors, limits
from sparklog.broker import shares
from sparklog.broker.shares import settings_of_each
from sparklog.broker.supervisor import Assignment
from sparklog.cli.broker import BROKER_PROCESSES
from sparklog.settings import (
    NOT_ABOVE,
    BrokerSettings,
    HotTailSettings,
    KafkaSettings,
    load_settings,
)

MIB = 2**20


def settings(**given: Any) -> BrokerSettings:
    """Settings with these values; `__` stands for the dot. No listener asks for a login."""
    given = {"security__anonymous": "anywhere", **given}
    names = {name.replace("__", "."): value for name, value in given.items()}
    return load_settings(None, {}, {"root": "/data", **names})


def values(processes: int, name: str, **given: Any) -> list[Any]:
    """One setting of each process."""
    return [attrgetter(name)(each) for each in settings_of_each(settings(**given), processes)]


def test_ids_and_ports_count_up() -> None:
    """Each broker is a member with an id and ports of its own, counted up from the given ones."""
    given = {
        "id": 5,
        "flight__listen": "0.0.0.0:8815",
        "flight__advertised": "host:7000",
        "kafka__listen": "SSL://[::1]:9092",
        "tls__certificate": "c.pem",
        "tls__key": "c.key",
        "kafka__advertised": "host:9500",
        "metrics__listen": "127.0.0.1:9100",
    }
    assert values(3, "id", **given) == [5, 6, 7]
    assert values(3, "cluster.join", **given) == [True] * 3
    assert values(3, "flight.listen", **given) == [f"0.0.0.0:{8815 + n}" for n in range(3)]
    assert values(3, "flight.advertised", **given) == [f"host:{7000 + n}" for n in range(3)]
    assert values(3, "kafka.listen", **given) == [f"SSL://[::1]:{9092 + n}" for n in range(3)]
    assert values(3, "kafka.advertised", **given) == [f"host:{9500 + n}" for n in range(3)]
    assert values(3, "metrics.listen", **given) == [f"127.0.0.1:{9100 + n}" for n in range(3)]


def test_ports_of_named_listeners_count_up() -> None:
    """Each keeps its name and protocol, where it listens and where it is advertised."""
    given = {
        "flight__listen": "127.0.0.1:8815",
        "kafka__listen": "IN=PLAINTEXT://127.0.0.1:9092,OUT=PLAINTEXT://0.0.0.0:9192",
        "kafka__advertised": "OUT=host:9500",
    }
    assert values(2, "kafka.listen", **given) == [
        f"IN=PLAINTEXT://127.0.0.1:{9092 + n},OUT=PLAINTEXT://0.0.0.0:{9192 + n}" for n in range(2)
    ]
    assert values(2, "kafka.advertised", **given) == [f"OUT=host:{9500 + n}" for n in range(2)]


def test_any_port_and_no_listener_stay() -> None:
    """Port 0 stays, because each broker gets a free one; so does an address that is empty."""
    given = {
        "flight__listen": "0.0.0.0:0",
        "flight__advertised": "host:0",
        "kafka__listen": "",
    }
    assert values(2, "flight.listen", **given) == ["0.0.0.0:0"] * 2
    assert values(2, "flight.advertised", **given) == ["host:0"] * 2
    for name in ("kafka.listen", "kafka.advertised", "metrics.listen"):
        assert values(2, name, **given) == ["", ""]


def test_bounds_are_divided() -> None:
    """All processes together have at most what one broker has."""
    given = {
        "hot_tail__bytes": 100,
        "writer__queue_bytes": 1024 * MIB,
        "kafka__memory_bytes": 1000 * MIB,
        "publisher__unpublished_bytes": 3000 * MIB,
        "publisher__staged_bytes": 700,
        "kafka__max_connections": 100,
        "kafka__max_connections_per_address": 7,
        "flight__max_streams": 10,
    }
    assert {name.replace(".", "__") for name in shares._DIVIDED} == given.keys()
    for name, value in given.items():
        found = values(3, name.replace("__", "."), **given)
        assert found == [value // 3] * 3


@pytest.mark.parametrize("processes", [1, 2, 3, 8, BROKER_PROCESSES])
def test_the_defaults_suffice(processes: int) -> None:
    """With the defaults, each broker has a part, and takes the largest request that one takes."""
    whole = settings(flight__listen="127.0.0.1:18815")
    for each in settings_of_each(whole, processes):
        for low, high in NOT_ABOVE:
            assert attrgetter(low)(each) <= attrgetter(high)(each)
            assert attrgetter(low)(each) == attrgetter(low)(whole)
        assert each.hot_tail.bytes == HotTailSettings().bytes // processes
        assert each.kafka.memory_bytes >= KafkaSettings().memory_bytes // processes
        assert each.kafka.memory_bytes <= KafkaSettings().memory_bytes


def test_one_process_is_one_broker() -> None:
    """The only process of a supervisor differs from a broker by its membership alone."""
    whole = settings()
    (only,) = settings_of_each(whole, 1)
    assert only.cluster.join
    assert msgspec.structs.replace(only, cluster=whole.cluster) == whole


@pytest.mark.parametrize(
    ("processes", "given", "option", "told"),
    [
        (
            3,
            {"writer__queue_bytes": 100 * MIB},
            "writer.queue_bytes",
            f"needs writer.max_batch_bytes = {64 * MIB}; set it to at least {192 * MIB}",
        ),
        (
            2,
            {"kafka__memory_bytes": 150 * MIB},
            "kafka.memory_bytes",
            f"needs kafka.request_max_bytes = {100 * MIB}; set it to at least {200 * MIB}",
        ),
        (
            4,
            {"publisher__unpublished_bytes": 100 * MIB},
            "publisher.unpublished_bytes",
            f"needs publisher.publish_bytes = {32 * MIB}",
        ),
        (3, {"kafka__max_connections": 2}, "kafka.max_connections", "gets 0, and needs 1"),
        (2, {"flight__listen": "h:65535"}, "flight.listen", "to 65535 at most"),
        (2, {"kafka__advertised": "h:65535"}, "kafka.advertised", "to 65535 at most"),
        (2, {"id": limits.BROKER_ID_MAX}, "id", f"to {limits.BROKER_ID_MAX} at most"),
        (2, {"root": "memory://x"}, "root", "belongs to one process"),
        (2, {"liveness__idle_exit_seconds": 1}, "liveness.idle_exit_seconds", "set it to 0"),
    ],
)
def test_what_cannot_be_divided_is_named(
    processes: int, given: dict[str, Any], option: str, told: str
) -> None:
    """A setting that does not suffice for all processes is refused by its name, with a remedy."""
    with pytest.raises(errors.BadOption) as raised:
        settings_of_each(settings(**given), processes)
    assert raised.value.option == option
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("flight", "kafka", "overlap"),
    [
        ("h:9000", "h:9002", True),
        ("h:9002", "h:9000", True),
        ("0.0.0.0:9000", "h:9001", True),
        ("h:9000", "[::]:9002", True),
        ("h:9000", "SSL://h:9002", True),
        ("h:9000", "A=PLAINTEXT://h:8000,B=PLAINTEXT://h:9002", True),
        ("h:8000", "A=PLAINTEXT://h:9000,B=PLAINTEXT://h:9002", True),
        ("h:9000", "h:9003", False),
        ("h:9000", "other:9001", False),
        ("h:0", "h:0", False),
    ],
)
def test_ports_of_two_listeners_are_apart(flight: str, kafka: str, overlap: bool) -> None:
    """Three processes need three ports for each listener; an overlap is refused at the start."""
    tls = {"tls__certificate": "c", "tls__key": "k"} if kafka.startswith("SSL") else {}
    advertised = "" if "=" in kafka else "public:1"
    given = settings(
        flight__listen=flight, kafka__listen=kafka, kafka__advertised=advertised, **tls
    )
    if not overlap:
        settings_of_each(given, 3)
        return
    with pytest.raises(errors.BadOption, match=r"leave at least 3 between them") as raised:
        settings_of_each(given, 3)
    assert raised.value.option == "kafka.listen"


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("", ["", ""]),
        ("/var/log/broker.log", ["/var/log/broker-0.log", "/var/log/broker-1.log"]),
        ("log.d/broker", ["log.d/broker-0", "log.d/broker-1"]),
    ],
)
def test_log_files_are_apart(file: str, expected: list[str]) -> None:
    """Each broker has a log file of its own, so that none rotates that of another one."""
    assert values(2, "log.file", log__file=file) == expected


def test_an_assignment_is_read_as_it_was_written() -> None:
    """A process has exactly the settings that its supervisor has made, those of the store too."""
    whole = load_settings(
        None,
        {"SPARKLOG_STORAGE_AWS_REGION": "eu", "SPARKLOG_WRITER_LINGER_MS": "7"},
        {"root": "s3://bucket/log", "liveness.heartbeat_seconds": 0.25},
    )
    for each in settings_of_each(whole, 2):
        sent = Assignment(settings=each, stops_with=frozenset({1, 2}), take_over=True)
        assert msgspec.json.decode(msgspec.json.encode(sent), type=Assignment) == sent
        assert each.storage == {"aws_region": "eu"}
