"""A broker that does not know that it was replaced, or that has lost sight of the store."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import pytest
from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.agent import Agent
from sparklog.broker.kafka.error_codes import CODES, NEEDING_PROOF
from sparklog.broker.kafka.registry import APIS
from sparklog.broker.leader_metadata import LeaderMetadata
from sparklog.clock import ManualClock, SystemClock
from sparklog.formats import flight_messages, group_messages
from sparklog.settings import (
    BrokerSettings,
    FlightSettings,
    JanitorSettings,
    KafkaSettings,
    LivenessSettings,
    LogSettings,
    PublisherSettings,
    WriterSettings,
)
from sparklog.storage.metadata.model import ClusterMetadata
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import MemoryStore, NoFaults
from sparklog.storage.objects.faults import Operation
from tests.support.flights import BrokerClient
from tests.support.kafkarequests import (
    batch,
    commit_fields,
    create,
    fetch_fields,
    produce,
    produce_fields,
)
from tests.support.kafkas import frames
from tests.support.waiting import wait_until

CLOCK = SystemClock()
FETCH, LIST_OFFSETS, METADATA, OFFSET_FETCH = 1, 2, 3, 9
HEARTBEAT, EPOCH_END = 12, 23
PARTITION = {"partition_index": 0, "partition": 0, "timestamp": -1, "leader_epoch": 0}
REQUESTS: Mapping[str, tuple[int, int, Mapping[str, Any]]] = {
    "an offset beyond the end": (FETCH, 6, fetch_fields("t", 0, 9)),
    "an unknown topic": (FETCH, 6, fetch_fields("new", 0, 0)),
    "a sequence number after a gap": (
        0,
        9,
        produce_fields("t", 0, batch([b"x"], producer_id=7_000, producer_epoch=3, base_sequence=5)),
    ),
    "the metadata of an unknown topic": (
        METADATA,
        7,
        {"topics": [{"name": "new"}], "allow_auto_topic_creation": False},
    ),
    "the end of an unknown partition": (
        LIST_OFFSETS,
        1,
        {
            "replica_id": -1,
            "topics": [{"name": "t", "partitions": [PARTITION | {"partition_index": 9}]}],
        },
    ),
    "the end of a leader epoch": (
        EPOCH_END,
        3,
        {"replica_id": -1, "topics": [{"topic": "t", "partitions": [PARTITION]}]},
    ),
    "offsets of a group": (OFFSET_FETCH, 5, {"group_id": "g", "topics": None}),
    "the heartbeat of an unknown member": (
        HEARTBEAT,
        3,
        {"group_id": "g", "generation_id": 1, "member_id": "m", "group_instance_id": None},
    ),
}


def settings(**liveness: float) -> BrokerSettings:
    """A broker that does nothing by itself, except what `liveness` says."""
    return BrokerSettings(
        root="memory://x",
        id=1,
        flight=FlightSettings(listen="127.0.0.1:0"),
        kafka=KafkaSettings(listen="127.0.0.1:0"),
        liveness=LivenessSettings(**liveness),
        janitor=JanitorSettings(enabled=False),
        log=LogSettings(level="error"),
        publisher=PublisherSettings(interval_seconds=3_600.0),
        writer=WriterSettings(checkpoint_every_seconds=3_600.0),
    )


@contextlib.contextmanager
def unaware() -> Iterator[tuple[Agent, Agent]]:
    """Runs a broker with records that looks at the metadata once an hour, and its successor."""
    with mock.patch("sparklog.broker.serving_loops.FOLLOW_REMOTE_SECONDS", 3_600.0):
        store = MemoryStore(CLOCK)
        quiet = settings(heartbeat_seconds=3_600.0, dead_after_seconds=7_200.0)
        old = Agent(quiet, store=store)
        old.start()
        try:
            with frames(old) as client:
                create(client, "t")
                for sequence in range(3):
                    data = batch(
                        [b"a"], producer_id=7_000, producer_epoch=3, base_sequence=sequence
                    )
                    assert produce(client, "t", 0, data).error_code is ErrorCode.none
                client.ask(8, 7, commit_fields("g", "t", 0, 2))
            with Agent(quiet, store=store, take_over=True) as new:
                yield old, new
        finally:
            old._stopping.set()  # its heartbeat and its log are its successor's
            old.stop()


@contextlib.contextmanager
def cut() -> Iterator[None]:
    """Checks that the listener closes the connection instead of a reply."""
    with pytest.raises((ConnectionError, AssertionError), match=r"closed the connection|reset"):
        yield


@pytest.mark.parametrize("asked", REQUESTS)
def test_a_replaced_broker_contradicts_no_kafka_client(asked: str) -> None:
    """It closes the connection instead of denying what its successor may have."""
    key, version, fields = REQUESTS[asked]
    with unaware() as (old, new):
        with frames(old) as client:
            client.ask(FETCH, 6, fetch_fields("t", 0, 0))
            with cut():
                client.ask(key, version, fields)
        with frames(new) as client:
            client.ask(key, version, fields)


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.read(5, 9),
        lambda client: client.describe("new"),
        lambda client: client.append(["a"], partition=9),
        lambda client: client.action("groups.offsets", group_messages.GroupName(group="g")),
    ],
)
def test_a_replaced_broker_contradicts_no_native_client(
    ask: Callable[[BrokerClient], object],
) -> None:
    """It says that it was replaced, so that the client connects to its successor."""
    with unaware() as (old, _), BrokerClient(old.address) as client:
        assert client.values() == [b"a"] * 3
        with pytest.raises(errors.BrokerFenced):
            ask(client)


class Blind(NoFaults):
    """Fails every operation on a folder of the root while it is set."""

    def __init__(self, folder: str = "meta") -> None:
        self.is_set = threading.Event()
        self._folder = folder

    def before(self, operation: Operation, path: str, /) -> None:
        if self.is_set.is_set() and path.startswith(self._folder):
            raise errors.StorageUnavailable(operation=operation, path=path, reason="no network")


def test_a_broker_without_sight_of_the_metadata_serves_no_reads() -> None:
    """Readers wait until the store answers; appends and members of groups do not."""
    blind = Blind()
    quick = settings(heartbeat_seconds=0.05, dead_after_seconds=0.5)
    with Agent(quick, store=MemoryStore(CLOCK, faults=blind)) as agent:
        with frames(agent) as client, BrokerClient(agent.address) as native:
            create(client, "t")
            produced = produce(client, "t", 0, batch([b"a"]))
            assert produced.error_code is ErrorCode.none
            blind.is_set.set()
            broker = agent.parts.broker
            wait_until(lambda: not broker.metadata.has_sight, "the last look is old")
            client.ask(18, 3, {"client_software_name": "x", "client_software_version": "1"})
            with cut():
                client.ask(FETCH, 6, fetch_fields("t", 0, 0))
            with pytest.raises(errors.StorageUnavailable):
                native.read(0, 1)
            with pytest.raises(errors.StorageUnavailable):
                native.describe()
            start = flight_messages.TailPosition(topic="t", partition=0, offset=0)
            with pytest.raises(errors.StorageUnavailable):
                next(native.tail(flight_messages.TailRequest(positions=[start])))
            assert native.append(["b"]).base_offset == 1
            blind.is_set.clear()
            assert native.values() == [b"a", b"b"]
        with frames(agent) as client:
            client.ask(FETCH, 6, fetch_fields("t", 0, 0))


def test_a_broker_without_heartbeats_looks_before_each_request() -> None:
    """Others count its silence from its last heartbeat, however young its last look is."""
    mute = Blind("heartbeats")
    quick = settings(heartbeat_seconds=0.05, dead_after_seconds=0.5)
    with (
        Agent(quick, store=MemoryStore(CLOCK, faults=mute)) as agent,
        frames(agent) as client,
        BrokerClient(agent.address) as native,
    ):
        create(client, "t")
        produce(client, "t", 0, batch([b"a"]))
        broker = agent.parts.broker
        wait_until(lambda: broker.metadata.has_sight, "a heartbeat is young")
        mute.is_set.set()
        wait_until(lambda: not broker.metadata.has_sight, "the last heartbeat is old")
        looks = broker.metadata.looks
        client.ask(FETCH, 6, fetch_fields("t", 0, 0))
        assert broker.metadata.looks > looks
        looks = broker.metadata.looks
        native.read(0, 1)
        assert broker.metadata.looks > looks
        mute.is_set.clear()
        wait_until(lambda: broker.metadata.has_sight, "a heartbeat is young again")


class Step:
    """A part of serving the metadata, which waits until it may end."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, _: ClusterMetadata) -> bool:
        self.begun.set()
        return self.may_end.wait(30)


def test_a_look_counts_once_its_result_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that wakes up after its replacement does not answer from what it served before."""
    clock = ManualClock()
    store = MetadataStore(MemoryStore(clock), clock=clock)
    monkeypatch.setattr(LeaderMetadata, "reload", lambda _: store.refresh())
    metadata = LeaderMetadata(store, None, None, clock=clock, sight_seconds=1.0)  # type: ignore[arg-type]
    leading, applying = Step(), Step()
    metadata.lead, metadata.apply = leading, applying
    thread = threading.Thread(target=metadata.follow)
    thread.start()
    assert leading.begun.wait(30)
    assert not metadata.has_sight
    leading.may_end.set()
    assert applying.begun.wait(30)  # it reads the table of a new topic
    assert metadata.has_sight
    clock.advance(1.0)
    assert not metadata.has_sight
    metadata.regain_sight()  # which does not wait for that table
    assert metadata.has_sight
    applying.may_end.set()
    thread.join()
    clock.advance(1.0)
    store.refresh()  # by a thread that serves nothing of it
    assert not metadata.has_sight


class Looks:
    """Looks at the metadata of a `LeaderMetadata` that wait until `may_end`, and may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.count = 0
        self.error = error
        self.begun, self.may_end = threading.Event(), threading.Event()
        monkeypatch.setattr(LeaderMetadata, "reload", lambda _: self._look())
        self.metadata = LeaderMetadata(None, None, None, clock=CLOCK, sight_seconds=1.0)  # type: ignore[arg-type]

    def _look(self) -> None:
        self.count += 1
        self.begun.set()
        assert self.may_end.wait(30)
        if self.error is not None:
            raise self.error

    def waiting(self, callers: int) -> list[Exception | None]:
        """Returns the outcomes of calls that are made while a look is under way."""
        outcomes: list[Exception | None] = []

        def prove(since: int) -> None:
            try:
                self.metadata.prove(since)
                outcomes.append(None)
            except errors.SparklogError as error:
                outcomes.append(error)

        first = threading.Thread(target=prove, args=(self.metadata.looks,))
        first.start()
        assert self.begun.wait(30)
        later = self.metadata.looks  # this look may have read the metadata already
        others = [threading.Thread(target=prove, args=(later,)) for _ in range(callers)]
        for each in others:
            each.start()
        self.may_end.set()
        for each in (first, *others):
            each.join(30)
        return outcomes


def test_waiting_replies_share_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look counts for each request that arrived before it began, and for none after it."""
    looks = Looks(monkeypatch)
    assert looks.waiting(8) == [None] * 9
    assert looks.count == 2
    assert looks.metadata.is_proven(1)
    assert not looks.metadata.is_proven(looks.metadata.looks)


def test_waiting_replies_share_a_failed_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that fails slowly holds a client for two looks at most; then it is asked again."""
    failure = errors.StorageUnavailable(operation="get", path="meta/1.json", reason="no network")
    looks = Looks(monkeypatch, failure)
    assert [type(each) for each in looks.waiting(8)] == [errors.StorageUnavailable] * 9
    assert looks.count == 2
    assert not looks.metadata.is_proven(0)
    looks.error = None
    looks.metadata.prove(looks.metadata.looks)
    assert looks.count == 3


def test_both_tables_agree_on_what_needs_a_proof() -> None:
    """An error that needs a proof has a code that needs one, with two exceptions."""
    own = {errors.OffsetsDoNotContinue, errors.GroupRefused}  # not sent to Kafka clients
    for kind, code in CODES.items():
        if kind not in own:
            assert kind.needs_proof == (code in NEEDING_PROOF), kind
    assert {api.name for api in APIS.values() if api.is_blind} == {
        "api_versions",
        "heartbeat",
        "join_group",
        "leave_group",
        "produce",
        "sync_group",
    }
