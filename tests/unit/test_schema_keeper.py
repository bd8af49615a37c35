"""Schemas and columns of the topics of one broker, with an injected clock and registry."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from sparklog import errors
from sparklog.broker.http_client import Response
from sparklog.broker.log import schema_keeper
from sparklog.broker.log.schema_keeper import SchemaKeeper
from sparklog.broker.log.topic import Topic
from sparklog.broker.schema_registry import SchemaRegistry
from sparklog.clock import ManualClock
from sparklog.formats.values.columns import waiting_of
from sparklog.settings import RegistrySettings
from sparklog.storage.objects import MemoryStore, ScriptedFaults
from sparklog.storage.objects.faults import Fault
from sparklog.storage.schema_texts import SchemaTexts
from sparklog.storage.snapshot import TableFile
from tests.support.brokers import Rig
from tests.support.registry import FakeRegistry, framed, record, text


class World:
    """A broker with an Avro topic, and a registry that answers at once, or refuses."""

    def __init__(self, store: MemoryStore, clock: ManualClock) -> None:
        self.store, self.clock = store, clock
        self.known = FakeRegistry()
        self.is_down = False
        self.rig = Rig(store, clock)
        self.rig.create("t", 1, value_format="avro")
        self.keeper = self.started()

    def started(self) -> SchemaKeeper:
        """A keeper of a broker that has just started."""
        registry = SchemaRegistry(RegistrySettings(url="http://registry"), get=self._get)
        found = SchemaKeeper(
            registry, SchemaTexts(self.store), self.rig.led_partitions, clock=self.clock
        )
        self.rig.publisher.schemas = found
        return found

    def _get(self, url: str) -> Response:
        if self.is_down:
            raise ConnectionRefusedError("refused")
        return self.known.get(url)

    @property
    def topic(self) -> Topic:
        return self.rig.led_partitions.topic("t")

    @property
    def columns(self) -> list[str]:
        """The columns that new files have."""
        found = self.topic.table.snapshot.columns
        return [] if found is None else [each.name for each in found.filled]

    @property
    def files(self) -> list[TableFile]:
        return list(self.topic.table.snapshot.files[0])

    def publish(self, *values: bytes) -> None:
        """Sends records, and gives the topic a turn."""
        if values:
            self.rig.append(list(values))
        self.rig.publisher.publish(self.topic)


@pytest.fixture
def world(store: MemoryStore, clock: ManualClock) -> World:
    """A registry without schemas."""
    return World(store, clock)


def value(schema_id: int, *fields: str) -> bytes:
    """A value whose fields are strings."""
    return framed(schema_id, b"".join(map(text, fields)))


def waiting(file: TableFile) -> dict[int, int]:
    """The rows of a file that wait, by schema."""
    return dict(waiting_of(file.columns).by_schema)


def grow(world: World, number: int) -> bytes:
    """Registers a version with `number` fields, and returns a value of it."""
    fields = [f"f{each}" for each in range(number)]
    found = world.known.register("t-value", record("T", *(f"{each}:string" for each in fields)))
    return value(found, *fields)


def test_a_publication_waits_once_and_columns_come_first(world: World) -> None:
    """The first record of a schema is written with its columns, after one answer."""
    one = grow(world, 1)
    world.publish(one)
    assert world.files == []
    assert world.keeper.pauses(world.topic)
    world.keeper.work()
    assert world.columns == ["f0"]
    world.publish()
    (file,) = world.files
    assert waiting(file) == {}
    world.publish(one)
    assert len(world.files) == 2


def test_without_an_answer_it_waits_as_long_as_the_topic_says(world: World) -> None:
    """And then never again for that schema, until it is known."""
    world.publish(value(1, "a"))
    world.clock.advance(0.9)
    world.publish()
    assert world.files == []
    world.clock.advance(0.2)
    world.publish()
    assert [waiting(each) for each in world.files] == [{1: 1}]
    world.publish(value(1, "a"), value(1, "a"))
    assert [waiting(each) for each in world.files] == [{1: 1}, {1: 2}]
    assert world.topic.table.snapshot.waiting_rows == 3


def test_a_registry_that_is_down_is_not_waited_for(world: World) -> None:
    """Its outage begins and ends once, and unknown schemas are asked for again."""
    world.is_down = True
    world.publish(value(1, "a"))
    world.keeper.work()
    state = world.keeper.state()
    assert state.down_since_us == world.clock.now_us()
    assert "refused" in state.reason
    world.publish()
    world.publish(value(2, "a"))
    assert [waiting(each) for each in world.files] == [{1: 1}, {2: 1}]
    grow(world, 1)
    world.is_down = False
    world.clock.advance(60)
    world.keeper.work()
    assert world.keeper.state().down_since_us is None
    assert world.columns == ["f0"]
    assert world.keeper.state().unknown == [2]
    asked = len(world.known.requests)
    world.keeper.work()
    assert len(world.known.requests) == asked
    world.clock.advance(schema_keeper.UNKNOWN_SECONDS)
    world.keeper.work()
    assert world.known.requests[asked:] == ["/schemas/ids/2"]


def test_garbage_that_looks_framed_is_bounded(world: World) -> None:
    """Thousands of ids: no publication waits for any of them, and each set is bounded."""
    for first in range(0, 3_000, 500):
        world.publish(*(value(1_000_000 + first + each, "x") for each in range(500)))
        for _ in range(10):
            world.keeper.work()
            world.clock.advance(0.2)
        world.publish()
    assert world.topic.table.snapshot.waiting_rows == 3_000
    assert len(world.known.requests) < 6 * 10 * 60
    assert len(world.keeper.state().unknown) <= schema_keeper.IDS_MAX
    assert world.keeper.waits_for(world.topic) is None
    assert all(len(file.columns or "") < 1_000 for file in world.files)


def test_changes_of_columns_are_rare(world: World) -> None:
    """The first columns, then one change; further ones wait, for longer each time."""
    changed: list[float] = []
    for number in range(1, 200):
        before = world.columns
        world.publish(grow(world, number))
        world.keeper.work()
        world.publish()
        if world.columns != before:
            changed.append(world.clock.monotonic())
        world.clock.advance(5)
    pauses = [round(b - a) for a, b in itertools.pairwise(changed[1:])]
    assert changed[:2] == [changed[0], changed[0] + 5]
    assert pauses == sorted(pauses)
    assert pauses[0] >= schema_keeper.COMMIT_FIRST_SECONDS
    assert len(changed) < 10
    world.clock.advance(schema_keeper.COMMIT_MOST_SECONDS)
    world.keeper.work()
    assert len(world.columns) == 199


def test_a_broker_that_dies_between_text_and_columns(world: World) -> None:
    """The next one adds the columns when it meets the schema, which the root has already."""
    one = grow(world, 1)
    folder = world.topic.table.log_folder
    down = errors.StorageUnavailable(operation="put", path=folder, reason="killed")
    table = world.topic.table
    kept = table.store
    table.store = world.store.view(
        ScriptedFaults(*[Fault(operation="put_new", error=down, prefix=folder)])
    )
    world.publish(one)
    world.keeper.work()
    table.store = kept
    assert world.columns == []
    assert SchemaTexts(world.store).find([1]).keys() == {1}
    keeper = world.started()
    world.publish()
    keeper.work()
    assert world.columns == ["f0"]
    world.publish(one)
    assert waiting(world.files[-1]) == {}


def test_only_the_subject_adds_columns(world: World) -> None:
    """And the first schema that records have, if the registry does not have the subject."""
    first = world.known.register("com.acme.Order", record("Order", "a:string"))
    other = world.known.register("com.acme.Parcel", record("Parcel", "b:string"))
    world.publish(value(first, "a"), value(other, "b"))
    world.keeper.work()
    assert world.columns == ["a"]
    world.known.register("t-value", record("T", "c:string"))
    world.publish(value(3, "c"))
    world.keeper.work()
    assert world.columns == ["a", "c"]


def test_two_keepers_add_columns_to_one_table(world: World) -> None:
    """Each decides on the version that the other has left, so no column is lost."""
    other: Any = world.keeper
    grow(world, 1)
    mine = world.started()
    two = world.known.register("t-value", record("T", "g:string"))
    for keeper, each in ((other, 1), (mine, two)):
        keeper.ready(world.topic.topic_id, [each])
        keeper.work()
    assert sorted(world.columns) == ["f0", "g"]
