"""A whole broker: how it starts, serves, is replaced, fails and leaves; and embedded ones."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sparklog
from sparklog import errors, limits, wire
from sparklog.broker.agent import Agent
from sparklog.broker.coordinator import Coordinator
from sparklog.clock import SystemClock
from sparklog.settings import (
    BrokerSettings,
    FlightSettings,
    JanitorSettings,
    KafkaSettings,
    LivenessSettings,
    PublisherSettings,
    WriterSettings,
)
from sparklog.storage import wal
from sparklog.storage.liveness import Heartbeat, find_live_broker, read_heartbeat
from sparklog.storage.meta import MetaStore
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
from sparklog.storage.objects.memory import Operation
from sparklog.storage.snapshot import WalPosition
from tests.support.brokers import flip, payload, rows_of_table
from tests.support.flights import Door, Stream

CLOCK = SystemClock()
VALUES = payload(["a"]).schema
SECONDS = 30.0
"""Far more than anything here takes."""


def settings(root: object = "memory://x", broker: int = 1, **changed: Any) -> BrokerSettings:
    """A broker with little patience."""
    known: dict[str, Any] = {
        "flight": FlightSettings(listen="127.0.0.1:0"),
        "kafka": KafkaSettings(listen=""),
        "liveness": LivenessSettings(heartbeat_seconds=0.05, dead_after_seconds=5.0),
        "publisher": PublisherSettings(interval_seconds=0.05),
        "janitor": JanitorSettings(interval_seconds=0.1),
    }
    return BrokerSettings(root=str(root), id=broker, **(known | changed))


def until(holds: Callable[[], bool], what: str) -> None:
    """Waits for something that happens in another thread or process."""
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


@contextlib.contextmanager
def running(agent: Agent) -> Iterator[Door]:
    """A channel to a broker that runs meanwhile."""
    with agent, Door(agent.address) as door:
        yield door


def live_broker(store: Store) -> tuple[int, str] | None:
    """Whom a newcomer would find."""
    return find_live_broker(store, clock=CLOCK, dead_after_seconds=5.0)


def heartbeat(store: Store, broker: int = 1) -> Heartbeat:
    """What the broker has said last."""
    found = read_heartbeat(store, broker)
    assert found is not None
    return found


def refuses(address: str) -> bool:
    """Whether nobody listens there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 1.0).close()
    except OSError:
        return True
    return False


# ------------------------------------------------------------------------------ start and stop


def test_a_broker_that_leaves_has_published_all(tmp_path: Path) -> None:
    """After it the table is the log, and the next one finds nothing to make up for."""
    slow = PublisherSettings(interval_seconds=3_600)
    agent = Agent(settings(tmp_path, publisher=slow))
    with running(agent) as door:
        door.create("t", 2)
        for number in range(20):
            door.append([f"{number}"], partition=number % 2)
        assert [each.published for each in door.describe().partitions] == [0, 0]
    store = LocalStore(tmp_path)
    expected = [(n, b"%d" % (2 * n)) for n in range(10)]
    assert rows_of_table(store, CLOCK) == expected
    assert live_broker(store) is None
    follower = wal.Follower(store, 1, 1)
    assert [each.at.sequence for each in follower.poll()] == []
    with running(Agent(settings(tmp_path, publisher=slow))) as door:
        info = door.describe()
        assert [(each.end, each.published) for each in info.partitions] == [(10, 10), (10, 10)]
        assert door.append(["next"]).base_offset == 10
    assert rows_of_table(store, CLOCK) == [*expected, (10, b"next")]


def test_nothing_acked_is_left_behind_by_a_stop(tmp_path: Path) -> None:
    """Producers that write while the broker leaves find all that was acked in the table."""
    agent = Agent(settings(tmp_path))
    acked: dict[int, list[int]] = {0: [], 1: []}
    agent.start()
    with Door(agent.address) as door:
        door.create("t", 2)

    def produce(partition: int) -> None:
        with (
            Door(agent.address) as door,
            contextlib.suppress(errors.SparklogError),
            Stream(door, "t", VALUES) as stream,
        ):
            for number in range(1_000_000):
                header = wire.AppendHeader(partition=partition)
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
    """Whoever asks for it, and how often, the broker leaves once; one that never began is gone."""
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


def test_an_address_with_any_port_is_told(tmp_path: Path) -> None:
    """Where port 0 is asked for, heartbeat and cluster tell the one that was taken."""
    agent = Agent(settings(tmp_path))
    with running(agent) as door:
        (broker,) = door.action("cluster").brokers
        assert broker.address == agent.address
        assert live_broker(LocalStore(tmp_path)) == (1, agent.address)
        assert not agent.address.endswith(":0")


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_an_address_may_be_of_version_6(tmp_path: Path) -> None:
    """Brackets stand around it, as in any URI."""
    agent = Agent(settings(tmp_path, flight=FlightSettings(listen="[::1]:0")))
    with running(agent) as door:
        assert door.action("topics.list").topics == []
        assert agent.address.startswith("[::1]:")


def test_an_idle_broker_leaves() -> None:
    """With an idle time it goes by itself, but not while somebody is connected to a stream."""
    liveness = LivenessSettings(heartbeat_seconds=0.02, idle_exit_seconds=0.2)
    store = MemoryStore(CLOCK)
    agent = Agent(settings(liveness=liveness), store=store)
    agent.start()
    with Door(agent.address) as door:
        door.create()
        with Stream(door, "t", VALUES) as stream:
            stream.append(payload(["a"]), wire.AppendHeader(partition=0))
            assert not agent.wait(0.6)
        assert agent.wait(SECONDS)
    assert live_broker(store) is None
    assert rows_of_table(store, CLOCK) == [(0, b"a")]


# ------------------------------------------------------------------------------ two on one root


def test_a_second_id_is_refused(tmp_path: Path) -> None:
    """While a broker lives another one is told where it is, and the first is not disturbed."""
    agent = Agent(settings(tmp_path))
    with running(agent) as door:
        with pytest.raises(errors.BrokerAlive) as refused:
            Agent(settings(tmp_path, broker=2)).start()
        assert (refused.value.broker, refused.value.address) == (1, agent.address)
        with pytest.raises(errors.BrokerAlive, match=f"pid {os.getpid()} on host"):
            Agent(settings(tmp_path, broker=1)).start()
        door.create()
        assert door.append(["a"]).base_offset == 0
    with running(Agent(settings(tmp_path, broker=2))) as door:
        assert door.values() == [b"a"]


def test_a_broker_that_was_told_to_takes_over(tmp_path: Path) -> None:
    """The older one stops with an error that names the newer one, which has everything."""
    older = Agent(settings(tmp_path))
    older.start()
    store = LocalStore(tmp_path)
    with Door(older.address) as door:
        door.create()
        door.append(["a"])
        newer = Agent(settings(tmp_path), take_over=True)
        with running(newer) as other:
            with pytest.raises(errors.BrokerFenced) as fenced:
                older.wait(SECONDS)
            assert (fenced.value.broker, fenced.value.epoch) == (1, 1)
            assert f"broker 1 (standing, epoch 2), pid {os.getpid()} on" in str(fenced.value)
            assert newer.address in str(fenced.value)
            until(lambda: refuses(older.address), "the older one listens still")
            with pytest.raises((errors.BrokerFenced, errors.BrokerUnavailable)):
                door.append(["lost"])
            older.stop()
            assert live_broker(store) == (1, newer.address)
            assert other.append(["b"]).base_offset == 1
            assert other.values() == [b"a", b"b"]


def test_a_fenced_append_has_no_effect(tmp_path: Path) -> None:
    """An append to the older broker, before it knows that it is replaced, is refused as fenced."""
    slow = LivenessSettings(heartbeat_seconds=60, dead_after_seconds=120)
    older = Agent(settings(tmp_path, liveness=slow))
    older.start()
    with Door(older.address) as door:
        door.create()
        door.append(["a"])
        with running(Agent(settings(tmp_path), take_over=True)) as other:
            with pytest.raises(errors.BrokerFenced):
                door.append(["b"])
            assert other.values() == [b"a"]
    older.stop()


def test_a_broker_is_alive_while_it_recovers() -> None:
    """However long the start takes, others see it and stay away."""
    clock = SystemClock()
    store = MemoryStore(clock)
    with running(Agent(settings(), store=store)) as door:
        door.create()
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
        Agent(settings(broker=2), store=store).start()
    gate.set()
    starting.join(SECONDS)
    second.stop()


def test_a_start_that_is_overtaken_says_so() -> None:
    """Of two that start at once, the one that is too slow serves nobody and tells why."""
    store = MemoryStore(CLOCK)
    gate = threading.Event()

    class Slow(NoFaults):
        def before(self, operation: Operation, path: str, /) -> None:
            if operation == "put_new" and path.startswith("wal/"):
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
    with running(Agent(settings(), store=store, take_over=True)) as door:
        gate.set()
        starting.join(SECONDS)
        assert len(raised) == 1
        assert "was replaced by broker 1 (standing, epoch 2)" in str(raised[0])
        assert refuses(slow.address)
        door.create()
        assert door.append(["a"]).base_offset == 0


# ------------------------------------------------------------------------------ what is in the way


def test_a_root_that_cannot_be_written_is_named() -> None:
    """The first put's refusal is told by the root's name, and nothing is left running."""
    refusal = errors.RootNotWritable(root="memory://x", reason="read-only")
    store = MemoryStore(CLOCK)
    faulty = store.view(ScriptedFaults(Fault(operation="put_new", error=refusal)))
    with pytest.raises(errors.RootNotWritable):
        Agent(settings(), store=faulty).start()
    assert list(store.walk("")) == []


def test_a_newer_root_is_refused() -> None:
    """A format that this version does not know is not touched."""
    store = MemoryStore(CLOCK)
    store.put("cluster.json", b'{"cluster_id":"c","format_version":2}')
    with pytest.raises(errors.FormatTooNew):
        Agent(settings(), store=store).start()
    assert [stat.name for stat in store.walk("")] == ["cluster.json"]


@pytest.mark.parametrize("option", ["flight.listen", "kafka.listen"])
def test_a_port_that_is_taken_is_named(tmp_path: Path, option: str) -> None:
    """A taken port is refused within a second, by setting and address, and the root is untouched.

    However patient the broker is with others.
    """
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        given: dict[str, Any] = {"flight": FlightSettings(listen=listen)}
        if option == "kafka.listen":
            given = {"kafka": KafkaSettings(listen=listen)}
        began = time.monotonic()
        with pytest.raises(errors.BadOption, match="another program listens there") as refused:
            Agent(settings(tmp_path, **given)).start()
        assert time.monotonic() - began < 1.0
        assert (refused.value.option, refused.value.value) == (option, listen)
    assert not list(tmp_path.glob("meta/*"))
    with running(Agent(settings(tmp_path, broker=2))) as door:
        assert door.action("topics.list").topics == []


def test_a_port_of_a_broker_that_is_leaving_is_waited_for(tmp_path: Path) -> None:
    """A port that becomes free within the time that a broker takes to leave is no error."""
    taken = socket.create_server(("127.0.0.1", 0))
    listen = f"127.0.0.1:{taken.getsockname()[1]}"
    threading.Timer(0.2, taken.close).start()
    with running(Agent(settings(tmp_path, flight=FlightSettings(listen=listen)))) as door:
        assert door.action("topics.list").topics == []


def test_a_host_that_is_not_here_is_named(tmp_path: Path) -> None:
    """An address of another machine, or of none, is refused as that."""
    for host, told in (("192.0.2.1", "no address of this machine"), ("no.invalid", "not known")):
        flight = FlightSettings(listen=f"{host}:8815")
        with pytest.raises(errors.BadOption, match=told):
            Agent(settings(tmp_path, flight=flight)).start()
    assert not list(tmp_path.glob("meta/*"))


def test_the_ports_of_the_broker_that_is_replaced_are_taken_over(tmp_path: Path) -> None:
    """The successor at the same addresses waits until the older broker has left them."""
    given = settings(tmp_path, kafka=KafkaSettings(listen="127.0.0.1:0"))
    older = Agent(given)
    with running(older):
        flight = FlightSettings(listen=older.address)
        kafka = KafkaSettings(listen=older.kafka_address)
        newer = Agent(settings(tmp_path, flight=flight, kafka=kafka), take_over=True)
        with running(newer) as door:
            assert door.action("topics.list").topics == []
            assert (newer.address, newer.kafka_address) == (flight.listen, kafka.listen)


def test_a_late_heartbeat_calls_no_stopped_broker_alive(tmp_path: Path) -> None:
    """The heartbeat's thread may be between its look and its beat when the broker leaves."""
    agent = Agent(settings(tmp_path))
    agent.start()
    agent.stop()
    agent._beat()
    assert live_broker(LocalStore(tmp_path)) is None


def test_a_corrupt_log_is_named_at_the_start(tmp_path: Path) -> None:
    """The object is named every time, until it is mended; then everything is there."""
    store = LocalStore(tmp_path)
    agent = Agent(settings(tmp_path, publisher=PublisherSettings(interval_seconds=3_600)))
    agent.start()
    with Door(agent.address) as door:
        door.create()
        door.append(["a"])
        door.append(["b"])
    damaged = wal.object_path(WalPosition(1, 1, 2))
    agent._fail(errors.SparklogError(reason="killed"))
    with pytest.raises(errors.SparklogError):
        agent.wait(SECONDS)
    flip(store, damaged, 20)
    for _ in range(2):
        with pytest.raises(errors.CorruptObject) as corrupt:
            Agent(settings(tmp_path)).start()
        assert corrupt.value.path == damaged
        assert live_broker(store) is None
    flip(store, damaged, 20)
    with running(Agent(settings(tmp_path))) as door:
        assert door.values() == [b"a", b"b"]


# ------------------------------------------------------------------------------ trouble on the way


class SmallDisk(LocalStore):
    """A disk whose free space the test sets."""

    free: int | None = None

    def free_bytes(self) -> int | None:
        return super().free_bytes() if self.free is None else self.free


def test_a_full_disk_refuses_and_heals(tmp_path: Path) -> None:
    """Records are refused retriably, what was acked is published, and records go on with space."""
    disk = SmallDisk(tmp_path)
    writer = WriterSettings(free_space_reserve_bytes=1_000)
    agent = Agent(settings(tmp_path, writer=writer), store=disk)
    with running(agent) as door:
        door.create()
        door.append(["a"])
        disk.free = 500
        for _ in range(3):
            with pytest.raises(errors.StorageFull) as full:
                door.append(["b"])
            assert (full.value.free_bytes, full.value.reserve_bytes) == (500, 1_000)
        until(lambda: door.describe().partitions[0].published == 1, "nothing is published")
        assert door.values() == [b"a"]
        assert agent.failure is None
        disk.free = None
        assert door.append(["b"]).base_offset == 1


def test_a_failed_sync_stops_the_broker() -> None:
    """It hangs up with the reason, and what it had acked is there for the next one."""
    store = MemoryStore(CLOCK)
    faults = Switch()
    agent = Agent(settings(), store=store.view(faults))
    agent.start()
    with Door(agent.address) as door:
        door.create()
        door.append(["a"])
        faults.error = SyncFailed("?", "EIO")
        with pytest.raises((errors.OutcomeUnknown, errors.BrokerUnavailable)):
            door.append(["b"])
        with pytest.raises(SyncFailed):
            agent.wait(SECONDS)
    until(lambda: refuses(agent.address), "it listens still")
    with running(Agent(settings(), store=store)) as door:
        assert door.values()[0] == b"a"


class Switch(NoFaults):
    """While there is an error, every put fails with it."""

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
    """It is a hint and no more."""
    store = MemoryStore(CLOCK)
    faults = Switch("before", "heartbeats")
    agent = Agent(settings(), store=store.view(faults))
    with running(agent) as door:
        faults.error = error
        door.create()
        newest = heartbeat(store).at_us
        time.sleep(0.2)
        assert door.append(["a"]).base_offset == 0
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
    """A refused request, or a mistake of ours, costs what it happened to, and not the broker."""
    store = MemoryStore(CLOCK)
    faults = Everywhere("topics/t/")
    agent = Agent(settings(), store=store.view(faults))
    with running(agent) as door:
        door.create()
        door.create("u")
        door.append(["a"])
        is_unsure = prefix == "wal/" and isinstance(error, AssertionError)
        faults.prefix = f"{prefix}1/0000000001/checkpoint" if is_unsure else prefix
        faults.error = error
        if faults.prefix == "wal/":
            with pytest.raises(errors.StorageUnavailable):
                door.append(["b"])
        else:
            assert door.append(["b"]).base_offset == 1
            assert door.append(["x"], topic="u").base_offset == 0
            published = wire.PublishNow(topics=["u"], timeout_seconds=SECONDS)
            door.action("publish.now", published)
        time.sleep(0.3)
        faults.error = None
        last = door.append(["c"]).base_offset
        assert last == (1 if faults.prefix == "wal/" else 2)
        door.action("publish.now", wire.PublishNow(timeout_seconds=SECONDS))
    assert agent.failure is None
    assert rows_of_table(store, CLOCK)[-1] == (last, b"c")


class Everywhere(NoFaults):
    """While there is an error, everything that is asked of the prefix fails with it."""

    def __init__(self, prefix: str) -> None:
        self.error: BaseException | None = None
        self.prefix = prefix

    def before(self, operation: Operation, path: str, /) -> None:
        if self.error and path.startswith(self.prefix):
            raise self.error


def test_a_surprise_in_a_group_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator goes on with the others."""
    real, failures = Coordinator._expire, [MemoryError(), AssertionError("a mistake")]

    def expire(coordinator: Coordinator) -> None:
        if failures:
            raise failures.pop()
        real(coordinator)

    monkeypatch.setattr(Coordinator, "_expire", expire)
    agent = Agent(settings(), store=MemoryStore(CLOCK))
    with running(agent) as door:
        door.create()
        until(lambda: not failures, "the coordinator has stopped")
        assert door.append(["a"]).base_offset == 0
    assert agent.failure is None


def test_a_store_that_is_down_for_a_while_stops_nobody() -> None:
    """Everything is refused retriably meanwhile, and goes on afterwards."""
    store = MemoryStore(CLOCK)
    faults = Switch("before", "")
    agent = Agent(settings(), store=store.view(faults))
    with running(agent) as door:
        door.create()
        door.append(["a"])
        faults.error = errors.StorageUnavailable(operation="put", path="?", reason="down")
        for attempt in (
            lambda: door.append(["b"]),
            lambda: door.create("u"),
            lambda: door.action("producers.new"),
        ):
            with pytest.raises(errors.StorageUnavailable):
                attempt()
        time.sleep(0.2)
        faults.error = None
        assert door.append(["b"]).base_offset == 1
        door.action("publish.now", wire.PublishNow(timeout_seconds=SECONDS))
        assert door.values() == [b"a", b"b"]
    assert agent.failure is None


def test_a_torn_table_is_held_back_and_mended(tmp_path: Path) -> None:
    """The topic goes on in the log; publishing says why it waits, and goes on after the repair."""
    store = LocalStore(tmp_path)
    with running(Agent(settings(tmp_path))) as door:
        door.create()
        door.append(["a"])
        door.action("publish.now", wire.PublishNow(timeout_seconds=SECONDS))
        torn = f"topics/t/_delta_log/{2:020d}.json"
        store.put(torn, b'{"add": {"path": "parti')
        door.append(["b"])
        with pytest.raises(errors.TimedOut) as waited:
            door.action("publish.now", wire.PublishNow(timeout_seconds=0.3))
        assert torn in waited.value.what
        assert door.append(["c"]).base_offset == 2
        assert door.values() == [b"a", b"b", b"c"]
        store.delete([torn])
        door.action("publish.now", wire.PublishNow(timeout_seconds=SECONDS))
    assert rows_of_table(store, CLOCK) == [(0, b"a"), (1, b"b"), (2, b"c")]


def test_a_damaged_entry_keeps_its_partition_back_only(tmp_path: Path) -> None:
    """It is named where it is read, and other partitions are published meanwhile."""
    store = LocalStore(tmp_path)
    first = Agent(settings(tmp_path, publisher=PublisherSettings(interval_seconds=3_600)))
    first.start()
    with Door(first.address) as door:
        door.create("t", 2)
        for value in ("a", "b"):
            door.append([value])
        door.append(["x"], partition=1)
    (located,) = wal.read_object(store, WalPosition(1, 1, 2)).located
    path = wal.object_path(located.at)
    first._fail(errors.SparklogError(reason="killed"))
    flip(store, path, located.origin + located.entry.length - 20)
    with running(Agent(settings(tmp_path))) as door:
        until(lambda: door.describe().partitions[1].published == 1, "nothing is published")
        until(lambda: door.describe().partitions[0].published == 1, "not up to the damage")
        assert door.values(partition=1) == [b"x"]
        with pytest.raises(errors.CorruptObject) as corrupt:
            door.values()
        assert corrupt.value.path == path
        assert door.append(["c"]).base_offset == 2
        flip(store, path, located.origin + located.entry.length - 20)
        door.action("publish.now", wire.PublishNow(timeout_seconds=SECONDS))
        assert door.values() == [b"a", b"b", b"c"]


def test_the_log_is_trimmed_while_it_runs(tmp_path: Path) -> None:
    """What is published leaves the log after its grace."""
    writer = WriterSettings(checkpoint_every_seconds=0.1, trim_grace_seconds=0.0)
    with running(Agent(settings(tmp_path, writer=writer))) as door:
        door.create()
        for number in range(50):
            door.append([f"{number}"])
        folder = tmp_path / "wal" / "1" / "0000000001"
        until(lambda: len(list(folder.iterdir())) <= 2, "the log stays long")
        assert len(door.values()) == 50


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
def joined(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A second process on the root."""
    command = [sys.executable, "-c", JOIN, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def test_a_second_process_joins_and_takes_over(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Two programs on one root share the first one's broker; when it ends the other goes on."""
    with sparklog.connect(tmp_path) as log:
        log.create_topic("t", partitions=1)
        with log.producer() as producer:
            producer.send("t", value=b"from the first").result(SECONDS)
        address = log.connection.address
        other: subprocess.Popen[str] = request.getfixturevalue("joined")
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline().strip() == address
        assert other.stdout.readline().strip() == "joined"
    other.stdin.write("\n")
    other.stdin.flush()
    taken_over = other.stdout.readline().strip()
    assert taken_over not in ("", address)
    with sparklog.connect(tmp_path) as log:
        assert log.connection.address == taken_over
        rows = log.read("t")
        assert rows.column("value").to_pylist() == [
            b"from the first",
            b"from the other",
            b"after the first had ended",
        ]
    other.stdin.write("\n")
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
    """A script that just stops at its last line leaves at once, in good order."""
    ended = subprocess.run([sys.executable, "-c", FORGETFUL, str(tmp_path)], timeout=20, check=True)
    assert ended.returncode == 0
    assert rows_of_table(LocalStore(tmp_path), CLOCK) == [(0, b"a")]
    assert live_broker(LocalStore(tmp_path)) is None


def test_programs_that_come_and_go_leave_no_trail(tmp_path: Path) -> None:
    """However often a root is opened, the next one has not more to read for it."""
    for _ in range(5):
        with sparklog.connect(tmp_path) as log:
            log.topics()
    metadata = MetaStore(LocalStore(tmp_path), clock=CLOCK).reload()
    assert len(metadata.open_epochs) <= 2


def test_of_many_that_come_at_once_one_starts_a_broker(tmp_path: Path) -> None:
    """Everybody is connected, whoever was first."""
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
    """It serves from a process of its own, and goes when nobody has asked for a while."""
    monkeypatch.setattr(limits, "DETACHED_IDLE_SECONDS", 1.0)
    store = LocalStore(tmp_path)
    with sparklog.connect(tmp_path, detached=True) as log:
        log.create_topic("t", partitions=1)
        with log.producer() as producer:
            producer.send("t", value=b"a").result(SECONDS)
        address = log.connection.address
    left = heartbeat(store, limits.EMBEDDED_BROKER_ID)
    assert left.flight == address
    assert left.process.pid not in (0, os.getpid())
    assert not refuses(address)
    until(lambda: refuses(address), "it stays")
    until(lambda: live_broker(store) is None, "it says no goodbye")
    assert rows_of_table(store, CLOCK) == [(0, b"a")]
