"""The HTTP port for metrics: its responses, and its bounds against hostile clients."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import prometheus_client.parser
import pytest

import sparklog
from sparklog import errors, limits
from sparklog.broker import agent as agents
from sparklog.broker import listening
from sparklog.broker.agent import Agent
from sparklog.broker.audit_events import EQUALS_KEPT, QUEUE_BYTES
from sparklog.broker.authentication import PASSWORDS_REMEMBERED
from sparklog.broker.flight.grpc import call
from sparklog.broker.flight.grpc.admission import REFUSED_MAX, UNADMITTED_BYTES, UNADMITTED_CALLS
from sparklog.broker.flight.grpc.server import (
    CONNECTIONS,
    CONNECTIONS_PER_ADDRESS,
    UNADMITTED,
    UNADMITTED_SERVED,
    UNADMITTED_SERVED_PER_NETWORK,
    UNSERVED_CALLS,
)
from sparklog.broker.kafka.sasl_logins import FRAME_BYTES
from sparklog.broker.kafka.sessions import FETCH_SESSIONS
from sparklog.broker.kafka.slots import SLOTS
from sparklog.broker.login_failures import FAILURES_REMEMBERED
from sparklog.broker.metrics.http_connections import METRICS_CONNECTIONS
from sparklog.broker.metrics.server import MetricsServer
from sparklog.broker.oauth import TOKENS_REMEMBERED
from sparklog.clock import SystemClock
from sparklog.settings import load_settings
from sparklog.storage.objects import MemoryStore
from sparklog.storage.objects.faults import NoFaults, Operation
from sparklog.storage.table.removed_files import REMOVED_FILES, REMOVED_FILES_OF_TABLE
from tests.support.waiting import wait_until

ANYWHERE = "127.0.0.1:0"
ROOT = Path(__file__).resolve().parents[2]


def agent_on(root: Path, **settings: object) -> Agent:
    """A broker with a port for metrics."""
    given = {"root": str(root), "flight.listen": ANYWHERE, "kafka.listen": ANYWHERE}
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return Agent(load_settings(None, {}, {**given, "metrics.listen": ANYWHERE, **named}))


def get(address: str, path: str = "/metrics") -> tuple[int, str]:
    """The status and the body of a response."""
    connection = http.client.HTTPConnection(address, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()


def samples(text: str, name: str) -> list[float]:
    """The values of a metric."""
    return [
        sample.value
        for family in prometheus_client.parser.text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and "__" not in sample.labels.get("topic", "")
    ]


# ------------------------------------------------------------------------------ a broker's port


def test_a_broker_serves_its_metrics(tmp_path: Path) -> None:
    """Over HTTP, while it serves; records that were acked are counted in the next scrape."""
    with agent_on(tmp_path) as agent, sparklog.connect(agent.address) as log:
        address = agent.metrics_address
        assert get(address, "/healthz") == (200, "healthy\n")
        assert get(address, "/readyz") == (200, "ready\n")
        assert get(address, "/nothing")[0] == 404
        log.create_topic("t", partitions=3)
        with log.producer() as producer:
            for number in range(10):
                producer.send("t", value=f"{number}".encode())
        name = "kafka_server_brokertopicmetrics_messagesin_total"
        wait_until(lambda: sum(samples(get(address)[1], name)) >= 10, "the records are counted")
        text = get(address)[1]
        assert samples(text, "kafka_topic_partitions") == [3]
        assert sum(samples(text, "kafka_topic_partition_current_offset")) == 10
        assert samples(text, "kafka_server_kafkaserver_brokerstate") == [3]
        assert samples(text, "process_open_fds")[0] > 0
        found = log.figures()
        assert [each.records_in for each in found.topics if each.topic == "t"] == [10]
    with pytest.raises(ConnectionRefusedError):
        get(address)


def test_every_budget_is_documented_with_its_limit(tmp_path: Path) -> None:
    """The table has the budgets of a broker with both listeners, and bounds that are not memory."""
    page = (ROOT / "docs" / "brokers.md").read_text("utf-8")
    lines = page.partition("### Budgets")[2].partition("\n## ")[0].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    limit_of = {name: limit for name, _, limit, _, _ in rows[1:]}
    with agent_on(tmp_path) as agent, sparklog.connect(agent.address) as log:
        memory = log.figures().memory
    bounds = {
        "connections of Kafka": [limits.KAFKA_CONNECTIONS, limits.KAFKA_CONNECTIONS_PER_ADDRESS],
        "unadmitted connections of Kafka": [SLOTS],
        "requests before a login": [FRAME_BYTES // limits.KIB],
        "right passwords": [PASSWORDS_REMEMBERED],
        "accepted OAuth tokens": [TOKENS_REMEMBERED],
        "failed logins": [FAILURES_REMEMBERED],
        "lines of the audit": [QUEUE_BYTES // limits.MIB],
        "equal events of the audit": [EQUALS_KEPT],
        "connections of metrics": [METRICS_CONNECTIONS],
        "connections of Flight": [
            CONNECTIONS,
            CONNECTIONS_PER_ADDRESS,
        ],
        "unadmitted connections of Flight": [UNADMITTED],
        "unadmitted clients of Flight": [
            UNADMITTED_BYTES // limits.KIB,
            UNADMITTED_CALLS,
            REFUSED_MAX,
            call.UNADMITTED_MESSAGE_BYTES // limits.KIB,
        ],
        "unadmitted calls of Flight": [UNADMITTED_SERVED, UNADMITTED_SERVED_PER_NETWORK],
        "calls of a Flight connection": [limits.FLIGHT_CONNECTION_CALLS],
        "calls without a message": [UNSERVED_CALLS],
        "unread messages of a call": [call.UNREAD_MESSAGES],
        "removed files": [REMOVED_FILES, REMOVED_FILES_OF_TABLE],
        "streams of Flight": [limits.FLIGHT_STREAMS],
        "fetch sessions": [FETCH_SESSIONS],
    }
    bounds |= {f"`{each.budget}`": [each.limit_bytes // limits.MIB] for each in memory}
    assert limit_of.keys() == bounds.keys()
    for name, numbers in bounds.items():
        found = re.findall(r"\d+(?:,\d{3})*", limit_of[name])
        assert found == [f"{number:,}" for number in numbers], name


def test_no_port_is_open_unless_it_is_set(tmp_path: Path) -> None:
    """And no thread runs for it."""
    with agent_on(tmp_path, metrics__listen="") as agent:
        assert agent.metrics_address == ""
        names = [thread.name for thread in threading.enumerate()]
        assert not [name for name in names if "metrics" in name]


def test_threads_end_with_the_broker(tmp_path: Path) -> None:
    """Also those of the last scrape."""
    with agent_on(tmp_path) as agent:
        get(agent.metrics_address)
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if "metrics" in name]


def test_a_taken_port_is_refused_by_name(tmp_path: Path) -> None:
    """Before the root is touched."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(errors.BadOption, match=r"metrics\.listen.*another program listens"):
            agent_on(tmp_path / "root", metrics__listen=address).start()
    assert not (tmp_path / "root").exists()


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs them."""
    monkeypatch.setattr(listening, "METRICS_PACKAGES", ("no_such_package",))
    with pytest.raises(errors.NotInstalled, match=r"no_such_package.*sparklog\[broker\]"):
        agent_on(tmp_path).start()
    agent_on(tmp_path, metrics__listen="")  # which needs none of them


def test_a_broker_that_replaces_another_takes_its_port(tmp_path: Path) -> None:
    """As it takes the ports of the other listeners."""
    with agent_on(tmp_path) as old:
        address = old.metrics_address
        settings = load_settings(
            None,
            {},
            {
                "root": str(tmp_path),
                "flight.listen": ANYWHERE,
                "kafka.listen": ANYWHERE,
                "metrics.listen": address,
            },
        )
        with Agent(settings, take_over=True) as new:
            assert new.metrics_address == address
            build = 'sparklog_build_info{broker="0",epoch="2"'
            wait_until(lambda: build in get(address)[1], "the new broker has figures")


# ------------------------------------------------------------------------------ probes


class Outage(NoFaults):
    """A store that refuses every request while it is away."""

    def __init__(self) -> None:
        self.is_away = False

    def before(self, operation: Operation, path: str, /) -> None:
        if self.is_away:
            raise errors.StorageUnavailable(operation=operation, path=path, reason="away")


def test_a_store_that_is_away_does_not_fail_the_process(tmp_path: Path) -> None:
    """A supervisor has no reason to start the broker again, and it serves when the store is back.

    The outage is longer than the time after which a broker counts as dead.
    """
    outage = Outage()
    settings = load_settings(
        None,
        {},
        {
            "root": "memory://outage",
            "flight.listen": ANYWHERE,
            "kafka.listen": "",
            "metrics.listen": ANYWHERE,
            "liveness.heartbeat_seconds": 0.1,
            "liveness.dead_after_seconds": 0.5,
            "log.level": "error",
        },
    )
    store = MemoryStore(SystemClock()).view(outage)
    with Agent(settings, store=store) as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t")
        with log.producer() as producer:
            producer.send("t", value=b"before").result()
            outage.is_away = True
            refused = producer.send("t", value=b"during")
            until = time.monotonic() + 1.5
            while time.monotonic() < until:
                assert get(agent.metrics_address, "/healthz") == (200, "healthy\n")
                assert get(agent.metrics_address, "/readyz") == (200, "ready\n")
                time.sleep(0.1)
            outage.is_away = False
            refused.result(30.0)
        assert get(agent.metrics_address, "/healthz") == (200, "healthy\n")
        assert get(agent.metrics_address, "/readyz") == (200, "ready\n")
        assert agent.failure is None


def test_ready_while_all_listeners_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker is healthy but not ready before its Kafka listener serves, and while it drains."""
    compiles, goes_on = threading.Event(), threading.Event()
    states: list[int] = []

    def compile_loops() -> None:
        compiles.set()
        assert goes_on.wait(30.0)

    monkeypatch.setattr(agents, "compile_loops", compile_loops)
    agent = agent_on(tmp_path)
    monkeypatch.setattr(
        agent, "_drain", lambda _leaving: states.append(get(agent.metrics_address, "/readyz")[0])
    )
    starting = threading.Thread(target=agent.start)
    starting.start()
    try:
        assert compiles.wait(30.0)
        assert get(agent.metrics_address, "/healthz") == (200, "healthy\n")
        assert get(agent.metrics_address, "/readyz") == (503, "the broker does not serve\n")
        goes_on.set()
        starting.join()
        assert get(agent.metrics_address, "/readyz") == (200, "ready\n")
    finally:
        goes_on.set()
        starting.join()
        agent.stop()
    assert states == [503]


# ------------------------------------------------------------------------------ hostile clients


@contextlib.contextmanager
def serving(
    collect: Callable[[], Sequence[bytes] | None], *, kept_seconds: float = 0.0
) -> Iterator[str]:
    """A server of these figures; yields its address."""
    listening = socket.create_server(("127.0.0.1", 0))
    host, port = listening.getsockname()
    server = MetricsServer(
        listening,
        collect=collect,
        is_healthy=lambda: False,
        is_ready=lambda: False,
        kept_seconds=kept_seconds,
    )
    server.start()
    try:
        yield f"{host}:{port}"
    finally:
        server.close()


def test_an_error_is_a_response() -> None:
    """The port continues: a scrape that works follows one that failed."""
    answers: list[Sequence[bytes] | None] = [None, [b"a 1\n", b"b 2\n"]]

    def collect() -> Sequence[bytes] | None:
        if not answers:
            raise RuntimeError("broken")
        return answers.pop(0)

    with serving(collect) as address:
        assert get(address) == (503, "the broker is starting\n")
        assert get(address) == (200, "a 1\nb 2\n")
        wait_until(lambda: get(address)[0] == 500, "an error is a response")
        assert "broken" in get(address)[1]
        answers.append([b"c 3\n"])
        assert get(address) == (200, "c 3\n")
        assert get(address, "/healthz") == (503, "the broker has failed\n")
        assert get(address, "/readyz") == (503, "the broker does not serve\n")


def test_many_scrapes_share_one_collection() -> None:
    """However often clients ask, figures are collected once in a while."""
    collected = []

    def collect() -> Sequence[bytes]:
        collected.append(1)
        return [b"a 1\n"]

    with serving(collect, kept_seconds=60.0) as address:
        threads = [threading.Thread(target=get, args=(address,)) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(collected) == 1


def test_a_slow_collection_is_rare() -> None:
    """It takes a tenth of the time at most."""
    collected = []

    def collect() -> Sequence[bytes]:
        collected.append(1)
        time.sleep(0.1)
        return [b"a 1\n"]

    with serving(collect) as address:
        until = time.monotonic() + 0.9
        while time.monotonic() < until:
            get(address)
    assert len(collected) == 1


def test_connections_are_bounded_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that send nothing are closed, and further ones are, but scrapes work afterwards."""
    monkeypatch.setattr("sparklog.broker.metrics.http_connections.METRICS_CONNECTIONS", 5)
    monkeypatch.setattr("sparklog.broker.metrics.http_connections.METRICS_CONNECTION_SECONDS", 1.0)
    with serving(lambda: [b"a 1\n"]) as address, contextlib.ExitStack() as stack:
        host, _, port = address.rpartition(":")
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)), 10)) for _ in range(5)
        ]
        silent[0].sendall(b"GET /metrics HTTP/1.1\r\nhost: a\r\nx: ")  # and no more
        more = stack.enter_context(socket.create_connection((host, int(port)), 10))
        more.settimeout(0.5)
        assert _is_closed(more)
        for each in silent:
            each.settimeout(5)
            assert _is_closed(each)
        assert get(address) == (200, "a 1\n")


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_client_that_does_not_read_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are served meanwhile."""
    monkeypatch.setattr("sparklog.broker.metrics.http_connections.METRICS_CONNECTION_SECONDS", 1.0)
    portion = b"a 1\n" * 250_000
    with serving(lambda: [portion] * 40, kept_seconds=60.0) as address:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), 10) as slow:
            slow.sendall(b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n")
            assert get(address, "/healthz")[0] == 503
            time.sleep(1.5)
            received = 0
            with contextlib.suppress(ConnectionResetError):
                while data := slow.recv(1 << 20):
                    received += len(data)
            assert received < 40 * len(portion)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00" * 100_000,
        b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
        b"POST /metrics HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000000\r\n\r\n",
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03",
    ],
    ids=["zeros", "endless headers", "a body", "TLS"],
)
def test_bytes_that_are_no_scrape_are_refused(sent: bytes) -> None:
    """And the next scrape works."""
    with serving(lambda: [b"a 1\n"]) as address:
        host, _, port = address.rpartition(":")
        connecting = socket.create_connection((host, int(port)), 10)
        with connecting as connection, contextlib.suppress(OSError):
            connection.sendall(sent)
            if not sent.startswith(b"\x16"):
                connection.recv(1_000)
        assert get(address) == (200, "a 1\n")


def test_bytes_of_native_readers_are_counted(tmp_path: Path) -> None:
    """Those of a range of offsets, and those of consumers that follow the log."""
    with agent_on(tmp_path) as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t", partitions=1)
        with log.producer() as producer:
            producer.send("t", value=b"v" * 1_000)

        def sent() -> int:
            (topic,) = [each for each in log.figures().topics if each.topic == "t"]
            return topic.bytes_out

        assert log.read("t").num_rows == 1
        wait_until(lambda: sent() > 1_000, "the bytes of a read are counted")
        before = sent()
        for _ in range(2):  # the second one gets the bytes of the first
            with log.consumer("t", start="earliest") as consumer:
                next(iter(consumer))
        wait_until(lambda: sent() >= before + 2_000, "the bytes of consumers are counted")
