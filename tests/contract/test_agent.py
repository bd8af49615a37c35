"""A whole broker in tests: start, service, replacement, failure and stop; and embedded brokers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import sparklog
from sparklog import errors, limits
from sparklog.broker import agent as agents
from sparklog.broker import listening
from sparklog.broker.agent import Agent
from sparklog.broker.groups.expiry import Expiry
from sparklog.broker.kafka import listener as kafka_listener
from sparklog.broker.log import recovery, takeover
from sparklog.broker.topics import TopicAdmin
from sparklog.clock import SystemClock
from sparklog.connecting import EMBEDDED_BROKER_ID
from sparklog.formats import flight_messages
from sparklog.settings import (
    BrokerSettings,
    ClusterSettings,
    FlightSettings,
    JanitorSettings,
    KafkaSettings,
    LivenessSettings,
    PublisherSettings,
    WriterSettings,
)
from sparklog.storage import wal
from sparklog.storage.metadata.liveness import Heartbeat, find_live_broker, read_heartbeat
from sparklog.storage.metadata.model import BrokerKind
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import (
    Fault,
    LocalStore,
    MemoryStore,
    NoFaults,
    PutUnresolved,
    ScriptedFaults,
    Store,
    SyncFailed,
)
from sparklog.storage.objects.faults import Operation
from sparklog.storage.objects.files import BLOCK_BYTES
from sparklog.storage.snapshot import WalKind
from sparklog.storage.wal.base import object_path, segment_path
from tests.support import preloaded
from tests.support.brokers import flip, payload, rows_of_table
from tests.support.descriptors import sockets
from tests.support.flights import BrokerClient, Stream

CLOCK = SystemClock()
VALUES = payload(["a"]).schema
SECONDS = 30.0
"""A timeout far beyond the time that anything here takes."""


def settings(root: object = "memory://x", broker: int = 1, **changed: Any) -> BrokerSettings:
    """Returns settings of a broker with short timeouts."""
    known: dict[str, Any] = {
        "flight": FlightSettings(listen="127.0.0.1:0"),
        "kafka": KafkaSettings(listen=""),
        "liveness": LivenessSettings(heartbeat_seconds=0.05, dead_after_seconds=5.0),
        "publisher": PublisherSettings(interval_seconds=0.05),
        "janitor": JanitorSettings(interval_seconds=0.1),
    }
    return BrokerSettings(root=str(root), id=broker, **(known | changed))


def flush_at(store: Store, kind: WalKind, sequence: int) -> tuple[str, int]:
    """Returns the file of a flush of the first epoch, and the place where the flush begins."""
    found = wal.of(store, CLOCK, kind).follower(1, 1).poll()[sequence]
    located = found.located[0]
    if kind is WalKind.OBJECTS:
        return object_path(found.at), 0
    block = located.origin // BLOCK_BYTES * BLOCK_BYTES
    return segment_path(1, 1, located.ordinal), block


def until(holds: Callable[[], bool], what: str) -> None:
    """Waits for a condition that another thread or process fulfils."""
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


@contextlib.contextmanager
def running(agent: Agent) -> Iterator[BrokerClient]:
    """Runs a broker and yields a client of it."""
    with agent, BrokerClient(agent.address) as client:
        yield client


def live_broker(store: Store) -> tuple[int, str] | None:
    """Returns the broker that a new one would find."""
    return find_live_broker(store, clock=CLOCK, dead_after_seconds=5.0)


def heartbeat(store: Store, broker: int = 1) -> Heartbeat:
    """Returns the broker's last heartbeat."""
    found = read_heartbeat(store, broker)
    assert found is not None
    return found


def refuses(address: str) -> bool:
    """Returns true if no program listens at the address."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 1.0).close()
    except OSError:
        return True
    return False


# ------------------------------------------------------------------------------ start and stop


def test_a_broker_that_leaves_has_published_all(tmp_path: Path) -> None:
    """A stop publishes everything, so that the next broker has nothing to publish."""
    slow = PublisherSettings(interval_seconds=3_600)
    agent = Agent(settings(tmp_path, publisher=slow))
    with running(agent) as client:
        client.create("t", 2)
        for number in range(20):
            client.append([f"{number}"], partition=number % 2)
        assert [each.published for each in client.describe().partitions] == [0, 0]
    store = LocalStore(tmp_path)
    expected = [(n, b"%d" % (2 * n)) for n in range(10)]
    assert rows_of_table(store, CLOCK) == expected
    assert live_broker(store) is None
    with running(Agent(settings(tmp_path, publisher=slow))) as client:
        info = client.describe()
        assert [(each.end, each.published) for each in info.partitions] == [(10, 10), (10, 10)]
        assert client.append(["next"]).base_offset == 10
    assert rows_of_table(store, CLOCK) == [*expected, (10, b"next")]


def test_nothing_acked_is_left_behind_by_a_stop(tmp_path: Path) -> None:
    """Records that were acked while the broker stops are in the table."""
    agent = Agent(settings(tmp_path))
    acked: dict[int, list[int]] = {0: [], 1: []}
    agent.start()
    with BrokerClient(agent.address) as client:
        client.create("t", 2)

    def produce(partition: int) -> None:
        with (
            BrokerClient(agent.address) as client,
            contextlib.suppress(errors.SparklogError),
            Stream(client, "t", VALUES) as stream,
        ):
            for number in range(1_000_000):
                header = flight_messages.AppendHeader(partition=partition)
                reply = stream.append(payload([f"{number}"]), header)
                acked[partition].append(reply.base_offset)

    threads = [threading.Thread(target=produce, args=(partition,)) for partition in acked]
    for thread in threads:
        thread.start()
    until(lambda: all(len(each) > 50 for each in acked.values()), "nobody writes")
    agent.stop()
    for thread in threads:
        thread.join(SECONDS)
    for partition, offsets in acked.items():
        assert offsets == list(range(len(offsets)))
        found = rows_of_table(LocalStore(tmp_path), CLOCK, partition=partition)
        assert found[: len(offsets)] == [(n, b"%d" % n) for n in offsets]
        assert len(found) - len(offsets) <= 1


def test_stopping_is_done_once() -> None:
    """A broker stops once, however often it is asked to; one that never started is gone."""
    agent = Agent(settings(), store=MemoryStore(CLOCK))
    agent.stop()
    agent.start()
    threads = [threading.Thread(target=agent.stop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert agent.wait(0.0)
    agent.stop()
    assert refuses(agent.address)


def test_the_log_says_stopped_before_the_process_may_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line is written before `wait` returns, because the process may end then."""
    agent = Agent(settings(), store=MemoryStore(CLOCK))
    over: list[bool] = []

    class Log:
        def info(self, event: str, **_facts: object) -> None:
            if event == "stopped":
                over.append(agent.wait(0.0))

    monkeypatch.setattr(agents, "_log", Log())
    agent.start()
    agent.stop()
    assert over == [False]
    assert agent.wait(0.0)


_SUSPENDED = """
import signal, sys
import structlog
from sparklog.broker.agent import Agent
from sparklog.clock import SystemClock
from sparklog.settings import BrokerSettings, FlightSettings, KafkaSettings
from sparklog.storage.objects import MemoryStore

structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
signal.signal(signal.SIGUSR1, lambda *_: None)
settings = BrokerSettings(
    root="memory://x",
    flight=FlightSettings(listen="127.0.0.1:0"),
    kafka=KafkaSettings(listen=""),
)
with Agent(settings, store=MemoryStore(SystemClock())):
    print("serving", flush=True)
    sys.stdin.readline()
print("left", flush=True)
"""


def test_a_broker_that_was_suspended_stops() -> None:
    """A signal that arrives as a timeout ends leaves no thread waiting forever."""
    broker = preloaded.start(
        ["-c", _SUSPENDED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert broker.stdout is not None
        assert broker.stdout.readline() == b"serving\n"
        for _ in range(12):
            broker.send_signal(signal.SIGSTOP)
            time.sleep(0.25)  # longer than its threads wait for work
            broker.send_signal(signal.SIGUSR1)
            broker.send_signal(signal.SIGCONT)
            broker.send_signal(signal.SIGUSR1)
            time.sleep(0.05)
        assert broker.communicate(timeout=SECONDS)[0] == b"left\n"
    finally:
        broker.kill()


def test_an_address_with_any_port_is_told(tmp_path: Path) -> None:
    """Heartbeat and cluster name the port that was bound where port 0 is requested."""
    agent = Agent(settings(tmp_path))
    with running(agent) as client:
        (broker,) = client.action("cluster").brokers
        assert broker.address == agent.address
        assert live_broker(LocalStore(tmp_path)) == (1, agent.address)
        assert not agent.address.endswith(":0")


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_an_address_may_be_of_version_6(tmp_path: Path) -> None:
    """An IPv6 address is in brackets, as in any URI."""
    agent = Agent(settings(tmp_path, flight=FlightSettings(listen="[::1]:0")))
    with running(agent) as client:
        assert client.action("topics.list").topics == []
        assert agent.address.startswith("[::1]:")


def test_an_idle_broker_leaves() -> None:
    """A broker with an idle time stops by itself, but not while a client has a stream open."""
    liveness = LivenessSettings(heartbeat_seconds=0.02, idle_exit_seconds=0.2)
    store = MemoryStore(CLOCK)
    agent = Agent(settings(liveness=liveness), store=store)
    agent.start()
    with BrokerClient(agent.address) as client:
        client.create()
        with Stream(client, "t", VALUES) as stream:
            stream.append(payload(["a"]), flight_messages.AppendHeader(partition=0))
            assert not agent.wait(0.6)
        assert agent.wait(SECONDS)
    assert live_broker(store) is None
    assert rows_of_table(store, CLOCK) == [(0, b"a")]


class SlowFiles(NoFaults):
    """A store that writes data files slowly."""

    def before(self, operation: Operation, path: str) -> None:
        if operation == "put_new" and path.endswith(".parquet"):
            time.sleep(0.1)


def test_an_idle_broker_publishes_all_before_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle broker publishes all records before it stops, except those of a topic held back."""
    monkeypatch.setattr("sparklog.broker.log.publisher.PUBLISH_MAX_ENTRIES", 1)
    monkeypatch.setattr(limits, "STOP_SECONDS", 0.0)
    liveness = LivenessSettings(heartbeat_seconds=0.02, idle_exit_seconds=0.2)
    store = MemoryStore(CLOCK)
    agent = Agent(settings(liveness=liveness), store=store.view(SlowFiles()))
    agent.start()
    with BrokerClient(agent.address) as client:
        client.create("held")
        store.put("topics/held/_delta_log/00000000000000000001.json", b"torn")
        client.append(["a"], topic="held")
        client.create()
        for number in range(20):
            client.append([f"{number}"])
    assert agent.wait(SECONDS)
    assert rows_of_table(store, CLOCK) == [(number, b"%d" % number) for number in range(20)]


# ------------------------------------------------------------------------------ two on one root


def test_a_second_broker_with_an_id_is_refused(tmp_path: Path) -> None:
    """It gets the address of the live one, which continues undisturbed."""
    agent = Agent(settings(tmp_path))
    with running(agent) as client:
        with pytest.raises(errors.BrokerAlive, match=f"pid {os.getpid()} on host") as refused:
            Agent(settings(tmp_path, broker=1)).start()
        assert (refused.value.broker, refused.value.address) == (1, agent.address)
        client.create()
        assert client.append(["a"]).base_offset == 0
    with running(Agent(settings(tmp_path))) as client:
        assert client.values() == [b"a"]


def test_a_broker_that_was_told_to_takes_over(tmp_path: Path) -> None:
    """The older broker stops with an error that names the newer one, which has all records."""
    older = Agent(settings(tmp_path))
    older.start()
    store = LocalStore(tmp_path)
    with BrokerClient(older.address) as client:
        client.create()
        client.append(["a"])
        newer = Agent(settings(tmp_path), take_over=True)
        with running(newer) as other:
            with pytest.raises(errors.BrokerFenced) as fenced:
                older.wait(SECONDS)
            assert (fenced.value.broker, fenced.value.epoch) == (1, 1)
            assert f"broker 1 (standing, epoch 2), pid {os.getpid()} on" in str(fenced.value)
            assert newer.address in str(fenced.value)
            until(lambda: refuses(older.address), "the older one listens still")
            with pytest.raises((errors.BrokerFenced, errors.BrokerUnavailable)):
                client.append(["lost"])
            older.stop()
            assert live_broker(store) == (1, newer.address)
            assert other.append(["b"]).base_offset == 1
            assert other.values() == [b"a", b"b"]


@pytest.mark.parametrize("join", [False, True])
def test_a_standing_broker_that_a_program_has_replaced_may_return(
    tmp_path: Path, join: bool
) -> None:
    """The program's broker gives way to it. Where another standing one leads, it stays away."""
    cluster = ClusterSettings(join=join)
    standing = Agent(settings(tmp_path, cluster=cluster))
    standing.start()
    program = Agent(settings(tmp_path, broker=2), kind=BrokerKind.EMBEDDED, take_over=True)
    program.start()
    with pytest.raises(errors.BrokerFenced):
        standing.wait(SECONDS)
    assert standing.may_return()
    with running(Agent(settings(tmp_path, cluster=cluster))):
        with pytest.raises(errors.BrokerFenced):
            program.wait(SECONDS)
        assert not program.may_return()
        assert not standing.may_return()


def test_a_fenced_append_has_no_effect(tmp_path: Path) -> None:
    """An append to the older broker, before it knows of its successor, is refused as fenced."""
    slow = LivenessSettings(heartbeat_seconds=60, dead_after_seconds=120)
    alone = ClusterSettings(join=False)  # a member follows the metadata, and would know at once
    older = Agent(settings(tmp_path, liveness=slow, cluster=alone))
    older.start()
    with BrokerClient(older.address) as client:
        client.create()
        client.append(["a"])
        with running(Agent(settings(tmp_path, cluster=alone), take_over=True)) as other:
            with pytest.raises(errors.BrokerFenced):
                client.append(["b"])
            assert other.values() == [b"a"]
    older.stop()


def test_a_broker_is_alive_while_it_recovers() -> None:
    """A broker that takes long to start sends heartbeats, and others stay away."""
    clock = SystemClock()
    store = MemoryStore(clock)
    with running(Agent(settings(), store=store)) as client:
        client.create()
    gate = threading.Event()

    class Slow(NoFaults):
        def before(self, operation: Operation, path: str, /) -> None:
            if path.startswith("topics/"):
                assert gate.wait(SECONDS)

    second = Agent(settings(), store=store.view(Slow()))
    starting = threading.Thread(target=second.start)
    starting.start()
    until(lambda: heartbeat(store).epoch == 2, "no sign of life")
    first_beat = heartbeat(store).at_us
    until(lambda: heartbeat(store).at_us > first_beat, "one sign of life only")
    with pytest.raises(errors.BrokerAlive):
        Agent(settings(), store=store).start()
    gate.set()
    starting.join(SECONDS)
    second.stop()


def test_a_start_that_is_overtaken_says_so() -> None:
    """The slower of two brokers that start at once serves no client and reports why."""
    store = MemoryStore(CLOCK)
    gate = threading.Event()

    class Slow(NoFaults):
        def before(self, operation: Operation, path: str, /) -> None:
            if operation == "put_new" and path.startswith("wal/1/"):
                assert gate.wait(SECONDS)

    slow = Agent(settings(), store=store.view(Slow()))
    raised: list[BaseException] = []

    def start() -> None:
        try:
            slow.start()
        except errors.BrokerFenced as error:
            raised.append(error)

    starting = threading.Thread(target=start)
    starting.start()
    until(lambda: read_heartbeat(store, 1) is not None, "no start")
    with running(Agent(settings(), store=store, take_over=True)) as client:
        gate.set()
        starting.join(SECONDS)
        assert len(raised) == 1
        assert "was replaced by broker 1 (standing, epoch 2)" in str(raised[0])
        assert refuses(slow.address)
        client.create()
        assert client.append(["a"]).base_offset == 0


# ------------------------------------------------------------------------------ refused starts


def test_a_root_that_cannot_be_written_is_named() -> None:
    """The refusal of the first put names the root, and no thread remains."""
    refusal = errors.RootNotWritable(root="memory://x", reason="read-only")
    store = MemoryStore(CLOCK)
    faulty = store.view(ScriptedFaults(Fault(operation="put_new", error=refusal)))
    with pytest.raises(errors.RootNotWritable):
        Agent(settings(), store=faulty).start()
    assert list(store.walk("")) == []


def test_a_newer_root_is_refused() -> None:
    """A root whose format this version does not know is left unchanged."""
    store = MemoryStore(CLOCK)
    store.put("cluster.json", b'{"cluster_id":"c","format_version":99}')
    with pytest.raises(errors.FormatTooNew):
        Agent(settings(), store=store).start()
    assert [stat.name for stat in store.walk("")] == ["cluster.json"]


@pytest.mark.parametrize("option", ["flight.listen", "kafka.listen"])
def test_a_port_that_is_taken_is_named(tmp_path: Path, option: str) -> None:
    """A taken port is refused at once, by setting and address, and the root is unchanged.

    The time after which other brokers count as dead does not delay it.
    """
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        given: dict[str, Any] = {"flight": FlightSettings(listen=listen)}
        if option == "kafka.listen":
            given = {"kafka": KafkaSettings(listen=listen)}
        began = time.monotonic()
        with pytest.raises(errors.BadOption, match="another program listens there") as refused:
            Agent(settings(tmp_path, **given)).start()
        assert time.monotonic() - began < limits.DEAD_AFTER_SECONDS
        assert (refused.value.option, refused.value.value) == (option, listen)
    assert not list(tmp_path.glob("meta/*"))
    with running(Agent(settings(tmp_path, broker=2))) as client:
        assert client.action("topics.list").topics == []


def test_listeners_need_a_port_each(tmp_path: Path) -> None:
    """One port under two names is refused before the root is changed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given: dict[str, Any] = {
        "flight": FlightSettings(listen=f"127.0.0.1:{port}"),
        "kafka": KafkaSettings(listen=f"localhost:{port}"),
    }
    with pytest.raises(errors.BadOption, match=r"flight\.listen has the same port") as refused:
        Agent(settings(tmp_path, **given)).start()
    assert refused.value.option == "kafka.listen"
    assert not list(tmp_path.glob("meta/*"))


def test_a_port_of_a_broker_that_is_leaving_is_waited_for(tmp_path: Path) -> None:
    """A port that becomes free within the time that a broker takes to stop is not an error."""
    taken = socket.create_server(("127.0.0.1", 0))
    listen = f"127.0.0.1:{taken.getsockname()[1]}"
    threading.Timer(0.2, taken.close).start()
    with running(Agent(settings(tmp_path, flight=FlightSettings(listen=listen)))) as client:
        assert client.action("topics.list").topics == []


def test_a_host_that_is_not_here_is_named(tmp_path: Path) -> None:
    """A host that is unknown, or not of this machine, is refused by that reason."""
    for host, reason in (
        ("192.0.2.1", "not an address of this machine"),
        ("no.invalid", "unknown on this machine"),
    ):
        for port in (8815, 0):
            flight = FlightSettings(listen=f"{host}:{port}")
            with pytest.raises(errors.BadOption, match=reason):
                Agent(settings(tmp_path, flight=flight)).start()
    assert not list(tmp_path.glob("meta/*"))


def test_a_host_that_is_not_here_takes_no_broker_down(tmp_path: Path) -> None:
    """A broker with an unknown host leaves the live one in place, though their ports are equal."""
    older = Agent(settings(tmp_path))
    with running(older) as client:
        client.create("t")
        flight = FlightSettings(listen=f"no.invalid:{older.address.rpartition(':')[2]}")
        with pytest.raises(errors.BadOption, match="unknown on this machine"):
            Agent(settings(tmp_path, flight=flight), take_over=True).start()
        assert client.append(["a"]).base_offset == 0


@contextlib.contextmanager
def before(owner: object, name: str, act: Callable[[], object]) -> Iterator[None]:
    """Runs a function before each call of another."""
    with pytest.MonkeyPatch.context() as patch:
        call = getattr(owner, name)

        def act_and_call(*args: Any, **kwargs: Any) -> Any:
            act()
            return call(*args, **kwargs)

        patch.setattr(owner, name, act_and_call)
        yield


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "[::1]"])
def test_a_port_of_the_system_is_kept(tmp_path: Path, host: str, shares: bool) -> None:
    """No other program can bind the port while the broker takes over its root and recovers."""
    if host == "[::1]" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    agent = Agent(settings(tmp_path, flight=FlightSettings(listen=f"{host}:0")))
    family = socket.AF_INET6 if host == "[::1]" else socket.AF_INET
    with contextlib.ExitStack() as stack:

        def take() -> None:
            """Listens at the port as another program does."""
            assert refuses(agent.address)
            other = stack.enter_context(socket.socket(family))
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, shares)
            with contextlib.suppress(OSError):
                other.bind((host.strip("[]"), int(agent.address.rpartition(":")[2])))
                other.listen()

        stack.enter_context(before(takeover, "acquire", take))
        stack.enter_context(before(recovery, "recover", take))
        with running(agent) as client:
            assert client.action("topics.list").topics == []


def test_of_brokers_that_start_at_a_time_one_has_the_port(tmp_path: Path) -> None:
    """One of two brokers that bound the port serves; the other names the setting and stops."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        flight = FlightSettings(listen=f"127.0.0.1:{free.getsockname()[1]}")
    together = threading.Barrier(2)
    liveness = LivenessSettings(heartbeat_seconds=0.05, dead_after_seconds=0.5)
    roots = [tmp_path / "a", tmp_path / "b"]
    brokers = [Agent(settings(root, flight=flight, liveness=liveness)) for root in roots]
    failed: list[tuple[Agent, BaseException]] = []

    def start(agent: Agent) -> None:
        try:
            agent.start()
        except errors.BadOption as error:
            failed.append((agent, error))

    with before(takeover, "acquire", together.wait):
        threads = [threading.Thread(target=start, args=(agent,)) for agent in brokers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    ((loser, error),) = failed
    assert "stop it, or listen at another address (--flight" in str(error)
    assert live_broker(LocalStore(roots[brokers.index(loser)])) is None
    winner = brokers[1 - brokers.index(loser)]
    with BrokerClient(winner.address) as client:
        assert client.action("topics.list").topics == []
    winner.stop()
    assert refuses(winner.address)


def raises() -> None:
    """Raises an error of any kind."""
    raise RuntimeError("surprise")


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (agents, "compile_loops"),
        (takeover, "acquire"),
        (recovery, "recover"),
        (agents, "Coordinator"),
        (kafka_listener, "KafkaListener"),
        (listening, "FlightListener"),
    ],
)
def test_a_start_that_fails_gives_its_ports_back(tmp_path: Path, owner: object, name: str) -> None:
    """A start that fails anywhere leaves no socket open, so the next one can bind at once."""
    kafka = KafkaSettings(listen="127.0.0.1:0")
    with running(Agent(settings(tmp_path, kafka=kafka))) as client:
        client.create("t")  # what a process opens once is open
    at_first = sockets()
    agent = Agent(settings(tmp_path, kafka=kafka))
    with before(owner, name, raises), pytest.raises(RuntimeError, match="surprise"):
        agent.start()
    assert sockets() == at_first
    with running(Agent(settings(tmp_path, flight=FlightSettings(listen=agent.address)))) as client:
        assert client.action("topics.list").topics == ["t"]
    assert sockets() == at_first


def test_native_clients_do_not_wait_for_the_loops_over_kafkas_records(tmp_path: Path) -> None:
    """They are served while the loops are loaded, which takes longest of a start."""
    kafka = KafkaSettings(listen="127.0.0.1:0")
    agent = Agent(settings(tmp_path, kafka=kafka))
    answers: list[str] = []

    def ask() -> None:
        with sparklog.connect(agent.address) as log, log.producer() as producer:
            log.create_topic("t", partitions=1)
            assert producer.send("t", b"v").result().offset == 0
        with BrokerClient(agent.address) as client:
            answers.append(client.action("cluster").brokers[0].kafka)

    with before(agents, "compile_loops", ask):
        agent.start()
    assert answers == [agent.kafka_address] != [""]
    agent.stop()


def test_a_failure_that_two_threads_meet_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeat and a flush meet the same successor before the broker has begun to stop."""
    monkeypatch.setattr(Agent, "_stop_after_failure", lambda _: None)
    agent = Agent(settings(tmp_path))
    with running(agent), capture_logs() as lines:
        for _ in range(2):
            agent._on_failure(errors.UnexpectedError(reason="killed"))
    assert [each["event"] for each in lines].count("the broker stops") == 1


def test_the_time_of_a_recovery_is_without_that_of_the_loops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first start on a machine the loops take many seconds, and the recovery does not."""

    class Clock(SystemClock):
        ahead_seconds = 0.0

        def monotonic(self) -> float:
            return super().monotonic() + self.ahead_seconds

    def load() -> None:
        clock.ahead_seconds = 1_000.0

    clock = Clock()
    agent = Agent(settings(tmp_path, kafka=KafkaSettings(listen="127.0.0.1:0")), clock=clock)
    monkeypatch.setattr(agents, "compile_loops", load)
    with capture_logs() as lines, running(agent):
        pass
    (serving,) = (each for each in lines if each["event"] == "serving")
    assert serving["took_seconds"] > 1_000.0 > serving["recovery_seconds"] >= 0.0


def test_a_broker_that_fails_while_the_loops_are_loaded_does_not_start(tmp_path: Path) -> None:
    """Its threads run already, and may meet a successor or a failed disk."""
    agent = Agent(settings(tmp_path, kafka=KafkaSettings(listen="127.0.0.1:0")))

    def fail() -> None:
        agent._on_failure(errors.UnexpectedError(reason="killed"))
        assert agent._stopped.wait(SECONDS)

    with (
        before(agents, "compile_loops", fail),
        pytest.raises(errors.SparklogError, match="killed"),
    ):
        agent.start()


def test_the_loops_are_loaded_before_a_living_broker_is_replaced(tmp_path: Path) -> None:
    """It serves its clients meanwhile."""
    kafka = KafkaSettings(listen="127.0.0.1:0")
    older = Agent(settings(tmp_path, kafka=kafka))
    newer = Agent(settings(tmp_path, kafka=kafka), take_over=True)
    order: list[str] = []
    with (
        running(older),
        before(agents, "compile_loops", lambda: order.append("compile")),
        before(takeover, "acquire", lambda: order.append("acquire")),
        running(newer),
    ):
        assert order[:2] == ["compile", "acquire"]


def test_a_topic_that_is_found_is_served_once_its_table_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: also the only broker of a root retries; its creation was of unknown outcome."""
    refusals: list[Exception] = [OSError("down"), OSError("down")]
    real = recovery.refusal_of

    def refusal_of(store: Store, use: Callable[[], object]) -> Exception | None:
        return refusals.pop() if refusals else real(store, use)

    def lose(*_: object) -> None:
        raise errors.OutcomeUnknown(what="creation of topic u", reason="no answer")

    agent = Agent(settings(tmp_path, cluster=ClusterSettings(join=False)))
    with running(agent) as client:
        monkeypatch.setattr(recovery, "refusal_of", refusal_of)
        monkeypatch.setattr(TopicAdmin, "_serve", lose)
        assert agent._parts is not None
        with pytest.raises(errors.OutcomeUnknown):
            agent._parts.broker.topics.create(flight_messages.CreateTopic(topic="u", partitions=1))

        def is_served() -> bool:
            try:
                client.append(["a"], topic="u")
            except (errors.UnknownTopic, errors.Retriable):
                return False
            return True

        until(is_served, "the topic is not served")
        assert not refusals


def test_objects_of_the_start_are_no_garbage(tmp_path: Path) -> None:
    """The collector looks at later objects only, and only once the broker serves."""
    program = """if True:
        import gc
        from sparklog.broker.agent import Agent
        from sparklog.cli import app

        def start(agent, run=Agent.start):
            print(gc.isenabled(), gc.get_freeze_count())
            run(agent)

        def wait(agent, _):
            print(gc.isenabled(), gc.get_freeze_count() > 10_000)
            agent.stop()
            return True

        Agent.start, Agent.wait = start, wait
        app(["broker", "--flight", "127.0.0.1:0", "--kafka", ""])
    """
    environment = {**os.environ, "SPARKLOG_ROOT": str(tmp_path), "SPARKLOG_LOG_LEVEL": "warning"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    first, served, last = done.stdout.splitlines()
    assert (first, last) == ("False 0", "True True")
    assert "serves" in served


def test_a_start_that_is_refused_gives_its_ports_back(tmp_path: Path) -> None:
    """A broker that cannot start keeps no port, whatever the reason."""
    with socket.create_server(("127.0.0.1", 0)) as taken, running(Agent(settings(tmp_path))):
        at_first = sockets()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(errors.BadOption, match="another program"):
            Agent(settings(tmp_path, kafka=KafkaSettings(listen=listen))).start()
        with pytest.raises(errors.BrokerAlive):
            Agent(settings(tmp_path, kafka=KafkaSettings(listen="127.0.0.1:0"))).start()
        assert sockets() == at_first


def test_the_ports_of_the_broker_that_is_replaced_are_taken_over(tmp_path: Path) -> None:
    """A successor at the same addresses waits until the older broker has closed them."""
    given = settings(tmp_path, kafka=KafkaSettings(listen="127.0.0.1:0"))
    older = Agent(given)
    with running(older):
        flight = FlightSettings(listen=older.address)
        kafka = KafkaSettings(listen=older.kafka_address)
        newer = Agent(settings(tmp_path, flight=flight, kafka=kafka), take_over=True)
        with running(newer) as client:
            assert client.action("topics.list").topics == []
            assert (newer.address, newer.kafka_address) == (flight.listen, kafka.listen)


def test_a_late_heartbeat_calls_no_stopped_broker_alive(tmp_path: Path) -> None:
    """A heartbeat that is written after the stop does not report the broker as alive."""
    agent = Agent(settings(tmp_path))
    agent.start()
    agent.stop()
    agent._heartbeats.write()
    assert live_broker(LocalStore(tmp_path)) is None


@pytest.mark.parametrize("kind", WalKind)
def test_a_corrupt_log_is_named_at_the_start(tmp_path: Path, kind: WalKind) -> None:
    """Every start names the corrupt object until it is mended; then all records are there."""
    store = LocalStore(tmp_path)
    log = WriterSettings(log=kind.value)
    slow = PublisherSettings(interval_seconds=3_600)
    agent = Agent(settings(tmp_path, publisher=slow, writer=log))
    agent.start()
    with BrokerClient(agent.address) as client:
        client.create()
        client.append(["a"])
        client.append(["b"])
    damaged, start = flush_at(store, kind, 1)
    agent._on_failure(errors.UnexpectedError(reason="killed"))
    with pytest.raises(errors.SparklogError):
        agent.wait(SECONDS)
    flip(store, damaged, start + 20)
    for _ in range(2):
        with pytest.raises(errors.CorruptObject) as corrupt:
            Agent(settings(tmp_path)).start()
        assert corrupt.value.path == damaged
        assert live_broker(store) is None
    flip(store, damaged, start + 20)
    with running(Agent(settings(tmp_path))) as client:
        assert client.values() == [b"a", b"b"]


# ------------------------------------------------------------------------------ trouble on the way


class SmallDisk(LocalStore):
    """A disk whose free space the test sets, in the class: a broker has several views of it."""

    free: int | None = None

    def free_bytes(self) -> int:
        return super().free_bytes() if self.free is None else self.free


def test_a_full_disk_refuses_and_heals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without free space, records are refused as retriable and acked ones are published."""
    writer = WriterSettings(free_space_reserve_bytes=1_000)
    monkeypatch.setattr(SmallDisk, "free", 1_500)
    agent = Agent(settings(tmp_path, writer=writer), store=SmallDisk(tmp_path))
    with running(agent) as client:
        client.create()
        client.append(["a"])
        monkeypatch.setattr(SmallDisk, "free", 500)
        for _ in range(3):
            with pytest.raises(errors.StorageFull) as full:
                client.append(["b"])
            assert (full.value.free_bytes, full.value.reserve_bytes) == (500, 1_000)
        until(lambda: client.describe().partitions[0].published == 1, "nothing is published")
        assert client.values() == [b"a"]
        assert agent.failure is None
        monkeypatch.setattr(SmallDisk, "free", None)
        assert client.append(["b"]).base_offset == 1


def test_a_failed_sync_stops_the_broker() -> None:
    """A broker whose disk fails stops with the reason, and the next one has all acked records."""
    store = MemoryStore(CLOCK)
    faults = Switch()
    agent = Agent(settings(), store=store.view(faults))
    agent.start()
    with BrokerClient(agent.address) as client:
        client.create()
        client.append(["a"])
        faults.error = SyncFailed("?", "EIO")
        with pytest.raises((errors.OutcomeUnknown, errors.BrokerUnavailable)):
            client.append(["b"])
        with pytest.raises(SyncFailed):
            agent.wait(SECONDS)
    until(lambda: refuses(agent.address), "it listens still")
    with running(Agent(settings(), store=store)) as client:
        assert client.values()[0] == b"a"


def test_a_failure_is_raised_once_the_broker_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then its process must not end: the interpreter would close the listeners' threads."""
    agent = Agent(settings(), store=MemoryStore(CLOCK))
    agent.start()
    may_close, close = threading.Event(), agent._close

    def close_later() -> None:
        assert may_close.wait(SECONDS)
        close()

    monkeypatch.setattr(agent, "_close", close_later)
    agent._on_failure(errors.UnexpectedError(reason="replaced"))
    try:
        assert not agent.wait(0.1)
        assert not refuses(agent.address)
    finally:
        may_close.set()
    with pytest.raises(errors.SparklogError, match="replaced"):
        agent.wait(SECONDS)
    assert refuses(agent.address)


class Switch(NoFaults):
    """A store whose puts fail while an error is set."""

    def __init__(self, moment: str = "between", prefix: str = "wal/") -> None:
        self.error: BaseException | None = None
        self.moment = moment
        self.prefix = prefix

    def _reach(self, moment: str, operation: Operation, path: str) -> None:
        is_put = operation in ("put", "put_new")
        if self.error and is_put and moment == self.moment and path.startswith(self.prefix):
            raise self.error

    def before(self, operation: Operation, path: str, /) -> None:
        self._reach("before", operation, path)

    def between(self, operation: Operation, path: str, /) -> None:
        self._reach("between", operation, path)

    def after(self, operation: Operation, path: str, /) -> None:
        self._reach("after", operation, path)


@pytest.mark.parametrize(
    "error",
    [
        PutUnresolved("?", "no answer"),
        errors.StorageUnavailable(operation="put", path="?", reason="down"),
        OSError("odd"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_heartbeat_that_fails_stops_nobody(error: Exception) -> None:
    """A heartbeat that cannot be written does not stop the broker."""
    store = MemoryStore(CLOCK)
    faults = Switch("before", "heartbeats")
    agent = Agent(settings(), store=store.view(faults))
    with running(agent) as client:
        faults.error = error
        client.create()
        newest = heartbeat(store).at_us
        time.sleep(0.2)
        assert client.append(["a"]).base_offset == 0
        faults.error = None
        until(lambda: heartbeat(store).at_us > newest, "no heartbeat any more")
    assert agent.failure is None


@pytest.mark.parametrize("prefix", ["topics/t/", "heartbeats/", "wal/", "meta/", "staging/"])
@pytest.mark.parametrize(
    "error",
    [errors.RootNotWritable(root="s3://b", reason="403"), AssertionError("a surprise")],
    ids=lambda error: type(error).__name__,
)
def test_a_surprise_in_one_place_stops_nobody_elsewhere(prefix: str, error: Exception) -> None:
    """A refused request, or a defect, affects the work that met it, and not the broker."""
    store = MemoryStore(CLOCK)
    faults = Everywhere("topics/t/")
    agent = Agent(settings(), store=store.view(faults))
    with running(agent) as client:
        client.create()
        client.create("u")
        client.append(["a"])
        is_unsure = prefix == "wal/" and isinstance(error, AssertionError)
        faults.prefix = f"{prefix}1/0000000001/checkpoint" if is_unsure else prefix
        faults.error = error
        if faults.prefix == "wal/":
            with pytest.raises(errors.StorageUnavailable):
                client.append(["b"])
        else:
            assert client.append(["b"]).base_offset == 1
            assert client.append(["x"], topic="u").base_offset == 0
            published = flight_messages.PublishNow(topics=["u"], timeout_seconds=SECONDS)
            client.action("publish.now", published)
        time.sleep(0.3)
        faults.error = None
        last = client.append(["c"]).base_offset
        assert last == (1 if faults.prefix == "wal/" else 2)
        client.action("publish.now", flight_messages.PublishNow(timeout_seconds=SECONDS))
    assert agent.failure is None
    assert rows_of_table(store, CLOCK)[-1] == (last, b"c")


class Everywhere(NoFaults):
    """A store whose operations below a prefix fail while an error is set."""

    def __init__(self, prefix: str) -> None:
        self.error: BaseException | None = None
        self.prefix = prefix

    def before(self, operation: Operation, path: str, /) -> None:
        if self.error and path.startswith(self.prefix):
            raise self.error


def test_a_surprise_in_a_group_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator continues with the other groups."""
    real, failures = Expiry.tick, [MemoryError(), AssertionError("a mistake")]

    def expire(expiry: Expiry) -> None:
        if failures:
            raise failures.pop()
        real(expiry)

    monkeypatch.setattr(Expiry, "tick", expire)
    agent = Agent(settings(), store=MemoryStore(CLOCK))
    with running(agent) as client:
        client.create()
        until(lambda: not failures, "the coordinator has stopped")
        assert client.append(["a"]).base_offset == 0
    assert agent.failure is None


def test_a_store_that_is_down_for_a_while_stops_nobody() -> None:
    """Requests are refused as retriable during an outage, and served after it."""
    store = MemoryStore(CLOCK)
    faults = Switch("before", "")
    agent = Agent(settings(), store=store.view(faults))
    with running(agent) as client:
        client.create()
        client.append(["a"])
        faults.error = errors.StorageUnavailable(operation="put", path="?", reason="down")
        for attempt in (
            lambda: client.append(["b"]),
            lambda: client.create("u"),
            lambda: client.action("producers.new"),
        ):
            with pytest.raises(errors.StorageUnavailable):
                attempt()
        time.sleep(0.2)
        faults.error = None
        assert client.append(["b"]).base_offset == 1
        client.action("publish.now", flight_messages.PublishNow(timeout_seconds=SECONDS))
        assert client.values() == [b"a", b"b"]
    assert agent.failure is None


def test_a_torn_table_is_held_back_and_mended(tmp_path: Path) -> None:
    """The topic continues in the log; publishing names the reason, and resumes after a repair."""
    store = LocalStore(tmp_path)
    with running(Agent(settings(tmp_path))) as client:
        client.create()
        client.append(["a"])
        client.action("publish.now", flight_messages.PublishNow(timeout_seconds=SECONDS))
        torn = f"topics/t/_delta_log/{2:020d}.json"
        store.put(torn, b'{"add": {"path": "parti')
        client.append(["b"])
        with pytest.raises(errors.TimedOut) as waited:
            client.action("publish.now", flight_messages.PublishNow(timeout_seconds=0.3))
        assert torn in waited.value.what
        assert client.append(["c"]).base_offset == 2
        assert client.values() == [b"a", b"b", b"c"]
        store.delete([torn])
        client.action("publish.now", flight_messages.PublishNow(timeout_seconds=SECONDS))
    assert rows_of_table(store, CLOCK) == [(0, b"a"), (1, b"b"), (2, b"c")]


@pytest.mark.parametrize("kind", WalKind)
def test_a_damaged_entry_keeps_its_partition_back_only(tmp_path: Path, kind: WalKind) -> None:
    """A read names the damaged entry, and other partitions are published meanwhile."""
    store = LocalStore(tmp_path)
    log = WriterSettings(log=kind.value)
    slow = PublisherSettings(interval_seconds=3_600)
    first = Agent(settings(tmp_path, publisher=slow, writer=log))
    first.start()
    with BrokerClient(first.address) as client:
        client.create("t", 2)
        for value in ("a", "b"):
            client.append([value])
        client.append(["x"], partition=1)
    (located,) = wal.of(store, CLOCK, kind).follower(1, 1).poll()[2].located
    path, _ = flush_at(store, kind, 2)
    first._on_failure(errors.UnexpectedError(reason="killed"))
    flip(store, path, located.origin + located.entry.length - 20)
    with running(Agent(settings(tmp_path))) as client:
        until(lambda: client.describe().partitions[1].published == 1, "nothing is published")
        until(lambda: client.describe().partitions[0].published == 1, "not up to the damage")
        assert client.values(partition=1) == [b"x"]
        with pytest.raises(errors.CorruptObject) as corrupt:
            client.values()
        assert corrupt.value.path == path
        assert client.append(["c"]).base_offset == 2
        flip(store, path, located.origin + located.entry.length - 20)
        client.action("publish.now", flight_messages.PublishNow(timeout_seconds=SECONDS))
        assert client.values() == [b"a", b"b", b"c"]


def test_the_log_is_trimmed_while_it_runs(tmp_path: Path) -> None:
    """Published records leave the log after the grace period."""
    writer = WriterSettings(checkpoint_every_seconds=0.1, trim_grace_seconds=0.0)
    with running(Agent(settings(tmp_path, writer=writer))) as client:
        client.create()
        for number in range(50):
            client.append([f"{number}"])
        folder = tmp_path / "wal" / "1" / "0000000001"
        until(lambda: len(list(folder.iterdir())) <= 2, "the log stays long")
        assert len(client.values()) == 50


# ------------------------------------------------------------------------------ embedded

JOIN = """
import sys, sparklog
with sparklog.connect(sys.argv[1]) as log:
    print(log.connection.address, flush=True)
    with log.producer() as producer:
        producer.send("t", value=b"from the other").result(30)
        print("joined", flush=True)
        sys.stdin.readline()
        producer.send("t", value=b"after the first had ended").result(30)
        print(log.connection.address, flush=True)
        sys.stdin.readline()
"""


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[preloaded.Process]:
    """A second process on the root."""
    process = preloaded.start(
        ["-c", JOIN, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_joins_and_takes_over(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Two programs on one root share the first one's broker; when it ends, the other continues."""
    with sparklog.connect(tmp_path) as log:
        log.create_topic("t", partitions=1)
        with log.producer() as producer:
            producer.send("t", value=b"from the first").result(SECONDS)
        address = log.connection.address
        other: preloaded.Process = request.getfixturevalue("joined")
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline().decode().strip() == address
        assert other.stdout.readline().decode().strip() == "joined"
    other.stdin.write(b"\n")
    other.stdin.flush()
    taken_over = other.stdout.readline().decode().strip()
    assert taken_over not in ("", address)
    with sparklog.connect(tmp_path) as log:
        assert log.connection.address == taken_over
        rows = log.read("t")
        assert rows.column("value").to_pylist() == [
            b"from the first",
            b"from the other",
            b"after the first had ended",
        ]
    other.stdin.write(b"\n")
    other.stdin.flush()
    assert other.wait(SECONDS) == 0
    assert len(rows_of_table(LocalStore(tmp_path), CLOCK)) == 3


FORGETFUL = """
import sys, sparklog
log = sparklog.connect(sys.argv[1])
log.create_topic("t", partitions=1)
producer = log.producer()
producer.send("t", value=b"a").result(30)
consumer = log.consumer("t")
consumer.poll(1)
"""


def test_a_program_that_closes_nothing_ends(tmp_path: Path) -> None:
    """A script that ends without closing its broker stops it at once, in order."""
    ended = subprocess.run([sys.executable, "-c", FORGETFUL, str(tmp_path)], timeout=20, check=True)
    assert ended.returncode == 0
    assert rows_of_table(LocalStore(tmp_path), CLOCK) == [(0, b"a")]
    assert live_broker(LocalStore(tmp_path)) is None


def test_programs_that_come_and_go_leave_no_trail(tmp_path: Path) -> None:
    """A root that is opened often has no more to read at the next start."""
    for _ in range(5):
        with sparklog.connect(tmp_path) as log:
            log.topics()
    metadata = MetadataStore(LocalStore(tmp_path), clock=CLOCK).reload()
    assert len(metadata.open_epochs) <= 2


def test_of_many_that_come_at_once_one_starts_a_broker(tmp_path: Path) -> None:
    """All programs that start at once are connected to one broker."""
    ready = threading.Barrier(4)
    addresses: list[str] = []
    logs = []

    def join() -> None:
        ready.wait(SECONDS)
        log = sparklog.connect(tmp_path)
        logs.append(log)
        log.create_topic("t", partitions=1, if_absent=True)
        addresses.append(log.connection.address)

    threads = [threading.Thread(target=join) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert len(addresses) == 4
    for log in logs:
        log.close()


def test_a_detached_broker_outlives_its_starter_and_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A detached broker serves from its own process, and stops once it is idle."""
    monkeypatch.setattr("sparklog.connecting.DETACHED_IDLE_SECONDS", 1.0)
    store = LocalStore(tmp_path)
    with sparklog.connect(tmp_path, detached=True) as log:
        log.create_topic("t", partitions=1)
        with log.producer() as producer:
            producer.send("t", value=b"a").result(SECONDS)
        address = log.connection.address
    left = heartbeat(store, EMBEDDED_BROKER_ID)
    assert left.flight == address
    assert left.process.pid not in (0, os.getpid())
    assert not refuses(address)
    until(lambda: refuses(address), "it stays")
    until(lambda: live_broker(store) is None, "it says no goodbye")
    assert rows_of_table(store, CLOCK) == [(0, b"a")]
