"""The description of a cluster, from its metadata and heartbeats."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest

from sparklog import limits
from sparklog.broker.log import takeover
from sparklog.clock import ManualClock
from sparklog.formats.flight_messages import ClusterDescription, LostPartition
from sparklog.storage.metadata import leadership, overview
from sparklog.storage.metadata.liveness import Heartbeat, Leader, Phase, write_heartbeat
from sparklog.storage.metadata.model import (
    BrokerRegistration,
    ClusterMetadata,
    Epoch,
    Membership,
    TopicMetadata,
)
from sparklog.storage.metadata.overview import BrokerState
from sparklog.storage.metadata.processes import Process, this_process
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import MemoryStore
from sparklog.storage.snapshot import WalKind
from tests.support.brokers import registration

ELSEWHERE = Process(host="elsewhere", pid=7, machine="another boot", started="1")
ENDED = msgspec.structs.replace(this_process(), started="never")
"""A process of this machine whose number another one has got."""

Waited = list[tuple[list[int], float]]


class Root:
    """Metadata and heartbeats of brokers that exist in nothing else."""

    def __init__(self, store: MemoryStore, clock: ManualClock) -> None:
        self.store = store
        self.clock = clock
        self.meta = MetadataStore(store, clock=clock)
        self.waited: Waited = []

    def register(self, broker: int, process: Process = ELSEWHERE, rack: str = "") -> None:
        """Opens the next epoch of a member."""
        registration = BrokerRegistration(
            epoch=0,
            flight=f"h:{broker}",
            process=process,
            dead_after_seconds=5.0,
            membership=Membership(kafka=f"k:{broker}", rack=rack),
        )
        self.meta.change(
            lambda before: leadership.register(before, broker, registration, WalKind.OBJECTS)
        )

    def topics(self, **leaders: tuple[int, ...]) -> None:
        """Names the leaders of topics."""
        topics = {
            name: TopicMetadata(topic_id=name, leaders=led, leader_epochs=(0,) * len(led))
            for name, led in leaders.items()
        }
        self.meta.change(lambda before: msgspec.structs.replace(before, topics=topics))

    def beat(self, broker: int, **changed: object) -> None:
        """Writes a heartbeat of the newest epoch."""
        known = self.meta.current.brokers[broker]
        beat = Heartbeat(
            broker=broker,
            epoch=known.epoch,
            flight=known.flight,
            at_us=self.clock.now_us(),
            monotonic_seconds=self.clock.monotonic(),
            process=known.process,
            version="1.2",
        )
        write_heartbeat(self.store, msgspec.structs.replace(beat, **changed))

    def describe(
        self, between: Callable[[], object] = lambda: None, *, topics: bool = False
    ) -> ClusterDescription:
        """Describes the root; `between` happens between two looks."""

        def waits(leaders: Sequence[Leader], seconds: float) -> None:
            self.waited.append(([each.broker for each in leaders], seconds))

        def pause() -> None:
            self.clock.advance(1.0)
            between()

        metadata, sightings = overview.look(
            self.store, self.clock, newest=self.meta.reload, waits=waits, pause=pause
        )
        return overview.describe(
            metadata,
            sightings,
            cluster_id="c",
            root="r",
            clock=self.clock,
            with_topics=topics,
        )

    def states(self, between: Callable[[], object] = lambda: None) -> dict[int, str]:
        """The state of each broker."""
        return {each.broker: each.state for each in self.describe(between).brokers}


@pytest.fixture(name="root")
def _root(store: MemoryStore, clock: ManualClock) -> Root:
    return Root(store, clock)


def test_a_root_without_a_broker_has_none(root: Root) -> None:
    """Nothing is led, and no broker is invented."""
    found = root.describe()
    assert (found.controller, found.brokers, found.epochs) == (-1, [], [])
    assert (found.topics, found.partitions, found.lost_partitions) == (0, 0, 0)


def test_all_facts_of_a_broker(root: Root, clock: ManualClock) -> None:
    """They come from its registration and its heartbeat, and its partitions are counted."""
    root.register(1, this_process(), rack="a")
    root.topics(t=(1, 1, 1), u=(1,))
    root.beat(1, kafka="late:1")
    clock.advance(2.5)
    (found,) = root.describe().brokers
    assert (found.broker, found.epoch, found.state, found.partitions) == (1, 1, "up", 4)
    assert (found.address, found.kafka, found.rack) == ("h:1", "k:1", "a")
    assert (found.host, found.pid) == (this_process().host, this_process().pid)
    assert (found.kind, found.version) == ("standing", "1.2")
    assert found.heartbeat_age_seconds == 2.5
    assert root.waited == []


@pytest.mark.parametrize("skew_us", [-3_600_000_000, 3_600_000_000])
def test_a_wrong_clock_kills_nobody(root: Root, clock: ManualClock, skew_us: int) -> None:
    """A broker of another host is up once its heartbeat changes; its age is not negative."""
    root.register(1)
    root.beat(1, at_us=clock.now_us() + skew_us)
    found = root.describe(lambda: root.beat(1, at_us=clock.now_us() + skew_us))
    assert found.brokers[0].state == BrokerState.UP
    assert found.brokers[0].heartbeat_age_seconds == max(-skew_us / 1e6, 0.0)
    assert root.waited == [([1], 5.0)]


def test_a_silent_broker_is_dead(root: Root, clock: ManualClock) -> None:
    """It is watched for as long as it may be silent, while the others are not watched again."""
    root.register(1)
    root.register(2)
    root.topics(t=(1, 2, 1))
    root.beat(1)
    began = clock.monotonic()
    found = root.describe(lambda: root.beat(2) if clock.monotonic() < began + 3 else None)
    assert [each.state for each in found.brokers] == ["dead", "up"]
    assert 5.0 < clock.monotonic() - began < 10.0
    assert found.lost_partitions == 2
    assert found.lost == [
        LostPartition(topic="t", partition=0, leader=1),
        LostPartition(topic="t", partition=2, leader=1),
    ]


def test_a_process_that_has_ended_is_dead_at_once(root: Root) -> None:
    """Nothing is waited for on the machine of the broker."""
    root.register(1, ENDED)
    root.beat(1)
    assert root.states() == {1: "dead"}
    assert root.waited == []


def test_states_of_a_life(root: Root) -> None:
    """A broker starts, serves, gives its partitions away and stops."""
    root.register(1, this_process())
    root.topics(t=(1,))
    seen = []
    for changed in (
        {"phase": Phase.STARTING},
        {},
        {"phase": Phase.DRAINING},
        {"phase": Phase.DRAINING, "stopped": True},
    ):
        root.beat(1, **changed)
        found = root.describe()
        seen.append((found.brokers[0].state, found.lost_partitions))
    assert seen == [("starting", 1), ("up", 0), ("draining", 0), ("stopped", 1)]


def test_a_restart_begins_with_the_older_epoch(root: Root) -> None:
    """A broker is not up while an older epoch of it may still write."""
    root.register(1, this_process())
    root.register(1, this_process())
    root.beat(1)
    assert root.states() == {1: "starting"}
    older = {(1, 1)}
    root.meta.change(lambda before: leadership.succeed(before, 1, 2, sealed=older))
    assert root.states() == {1: "up"}


def test_a_broker_that_was_failed_over_is_dead_although_it_beats(root: Root) -> None:
    """Its epoch is fenced: whatever it writes, it leads nothing. Its log waits for its heir."""
    root.register(1, this_process())
    root.register(2, this_process())
    root.topics(t=(1, 2))
    root.beat(1)
    root.beat(2)
    root.meta.change(
        lambda before: leadership.failover(
            before, 1, epoch=1, sealed={(1, 1)}, successors={("t", 0): 2}
        )
    )
    found = root.describe(topics=True)
    assert {each.broker: each.state for each in found.brokers} == {1: "dead", 2: "up"}
    assert found.lost_partitions == 0
    assert found.leaders == {"t": [2, 2]}
    assert [(each.broker, each.fenced, each.heirs) for each in found.epochs] == [
        (1, True, [2]),
        (2, False, []),
    ]


def test_a_broker_that_ended_long_ago_is_not_waited_for(root: Root) -> None:
    """A closed epoch cannot be alive, wherever its process was."""
    root.register(1)
    root.beat(1)
    root.meta.change(lambda before: msgspec.structs.replace(before, open_epochs=()))
    assert root.states() == {1: "dead"}
    root.beat(1, stopped=True)
    assert root.states() == {1: "stopped"}
    assert root.waited == []


def test_a_broker_that_registers_meanwhile(root: Root) -> None:
    """The look begins again with the newest metadata."""
    root.register(1)
    root.beat(1)

    def restart() -> None:
        if root.meta.current.brokers[1].epoch == 1:
            root.register(1, this_process())
        root.beat(1)

    (found,) = root.describe(restart).brokers
    assert (found.epoch, found.state) == (2, "starting")


def test_a_heartbeat_that_the_metadata_do_not_know(root: Root) -> None:
    """A later epoch in a heartbeat is not a sign of life of the registered one; nothing hangs."""
    root.register(1)
    root.beat(1, epoch=9)
    (found,) = root.describe().brokers
    assert (found.state, found.heartbeat_age_seconds, found.version) == ("dead", None, "")


def test_many_lost_partitions(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are counted, and some are named; a leader that is not a broker serves nothing."""
    monkeypatch.setattr(limits, "STATUS_PARTITIONS", 3)
    root.register(1, this_process())
    root.beat(1)
    root.topics(t=(1, 7, -1, 7), u=(7, 1))
    found = root.describe()
    assert (found.partitions, found.lost_partitions) == (6, 4)
    assert [(each.topic, each.partition) for each in found.lost] == [("t", 1), ("t", 2), ("t", 3)]


def test_the_message_has_every_field(root: Root) -> None:
    """Programs that read the JSON need not know defaults; it reads back as what it was."""
    root.register(1, this_process())
    root.beat(1)
    found = root.describe()
    data = msgspec.json.encode(found)
    assert msgspec.json.decode(data, type=ClusterDescription) == found
    plain = msgspec.json.decode(data)
    assert plain.keys() == set(ClusterDescription.__struct_fields__)
    assert plain["brokers"][0]["rack"] == ""


def test_it_is_a_member_of_what_a_start_registers(store: MemoryStore, clock: ManualClock) -> None:
    """A broker that leads the root alone is described by what its start has registered."""
    takeover.acquire(
        store,
        MetadataStore(store, clock=clock),
        0,
        registration(0, process=this_process()),
        clock=clock,
        check_alive=False,
    )
    root = Root(store, clock)
    root.meta.reload()
    root.beat(0, kafka="k:0")
    found = root.describe()
    assert found.controller == 0
    assert (found.brokers[0].state, found.brokers[0].kafka) == ("up", "k:0")


def test_every_epoch_is_named(root: Root) -> None:
    """In the order of the metadata, with the storage of the log."""
    epochs = (Epoch(1, 3, WalKind.SEGMENTS, True, (2, 3)), Epoch(2, 1))
    root.meta.change(lambda before: msgspec.structs.replace(before, open_epochs=epochs))
    found = [(e.broker, e.epoch, e.log, e.fenced, e.heirs) for e in root.describe().epochs]
    assert found == [(1, 3, "segments", True, [2, 3]), (2, 1, "objects", False, [])]


def test_metadata_without_sightings_are_refused() -> None:
    """A broker that was not looked at has no state: it would be guessed."""
    metadata = ClusterMetadata(brokers={1: BrokerRegistration(epoch=1)})
    with pytest.raises(KeyError):
        overview.states_of(metadata, {})
