from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog import errors, limits
from sparklog.broker.broker import Broker, ReadBatch, TopicDefaults
from sparklog.broker.log.flush import WriterLimits
from sparklog.broker.log.spark_batches import BATCHES_REMEMBERED, SINGLES_REMEMBERED
from sparklog.clock import ManualClock
from sparklog.formats import consumer_offsets, flight_messages
from sparklog.formats.record import ROW_SCHEMA
from sparklog.settings import JanitorSettings
from sparklog.storage.follow import RootFollower
from sparklog.storage.maintenance import retention
from sparklog.storage.metadata.leadership import register
from sparklog.storage.metadata.model import BrokerRegistration, TopicMetadata
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import (
    Fault,
    MemoryStore,
    NoFaults,
    PutUnresolved,
    ScriptedFaults,
    SyncFailed,
)
from sparklog.storage.objects.base import CLAIM_ATTEMPTS
from sparklog.storage.objects.faults import Faults, Operation
from sparklog.storage.snapshot import BatchKind, Located, Slice, TableFile, WalKind
from sparklog.storage.staging import manifest
from sparklog.storage.table.changes import PARTITIONS, TableChange, create_change
from sparklog.storage.table.data_file import encode, write_file
from sparklog.storage.table.names import table_folder
from sparklog.storage.table.topic_table import TopicTable
from tests.support.brokers import (
    Rig,
    RigOptions,
    flip,
    paths,
    payload,
    rows_followed,
    rows_of,
    rows_of_root,
    rows_of_table,
)

LOG = "topics/t/_delta_log"
COLD = RigOptions(hot_bytes=0)
DOWN = errors.StorageUnavailable(operation="?", path="?", reason="down")
FORBIDDEN = errors.RootNotWritable(root="s3://b", reason="403")


def create_request(
    topic: str, partitions: int = 1, **options: object
) -> flight_messages.CreateTopic:
    """A request for a topic."""
    return flight_messages.CreateTopic(topic=topic, partitions=partitions, **options)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------ topics


def test_a_topic_is_a_table_from_the_start(rig: Rig, store: MemoryStore) -> None:
    """Creating a topic returns its description, and its table exists then."""
    config = {"message.timestamp.type": "LogAppendTime"}
    info = rig.broker.topics.create(create_request("u", 3, config=config))
    assert (info.topic, info.config, len(info.partitions)) == ("u", config, 3)
    assert info.table_uri == f"{store.uri}/topics/u"
    assert all((each.start, each.end, each.leader) == (0, 0, 1) for each in info.partitions)
    snapshot = TopicTable(store, "u", clock=rig.clock).refresh()
    assert (snapshot.topic_id, snapshot.partitions) == (info.topic_id, 3)
    assert snapshot.config == config
    assert rig.broker.topics.names() == ["t", "u"]
    assert rig.broker.topics.describe("u") == info


def test_partitions_have_a_default(store: MemoryStore, clock: ManualClock) -> None:
    """Without a number of partitions, a topic gets the broker's default."""
    rig = Rig(store, clock, options=RigOptions(topics=TopicDefaults(partitions=6)))
    assert len(rig.broker.topics.create(create_request("t", -1)).partitions) == 6


def test_many_topics_are_created_by_few_versions_of_the_metadata(
    rig: Rig, store: MemoryStore
) -> None:
    """Each topic gets its own answer, and only the number of groups costs versions."""
    before = rig.meta.reload().version
    names = [f"u{number}" for number in range(limits.TOPICS_CREATED_TOGETHER + 1)]
    requests = [create_request(name, 2) for name in [*names, "t", "no/name"]]
    found = rig.broker.topics.create_all(requests)
    assert [
        each.topic for each in found[:-2] if isinstance(each, flight_messages.TopicInfo)
    ] == names
    assert isinstance(found[-2], errors.TopicExists)
    assert isinstance(found[-1], errors.BadTopicName)
    assert rig.meta.reload().version == before + 2
    assert rig.append(["a"], topic="u7", partition=1).base_offset == 0
    assert rig.successor().broker.topics.names() == sorted([*names, "t"])


def test_a_topic_is_created_once(rig: Rig, store: MemoryStore) -> None:
    """A second creation is refused, or skipped if that is asked for, and changes nothing."""
    before = paths(store, "")
    known = rig.broker.topics.describe("t")
    with pytest.raises(errors.TopicExists):
        rig.broker.topics.create(create_request("t", 5))
    assert rig.broker.topics.create(create_request("t", 5, if_absent=True)) == known
    assert paths(store, "") == before


BAD_TOPICS: dict[str, tuple[flight_messages.CreateTopic, type[errors.SparklogError]]] = {
    "name": (create_request("a/b"), errors.BadTopicName),
    "no partitions": (create_request("u", 0), errors.BadPartitionCount),
    "too many": (create_request("u", limits.PARTITIONS_PER_TOPIC + 1), errors.BadPartitionCount),
    "below the default": (create_request("u", -2), errors.BadPartitionCount),
    "unknown key": (create_request("u", config={"retention": "1"}), errors.UnknownOption),
    "bad value": (
        create_request("u", config={"message.timestamp.type": "Never"}),
        errors.BadOption,
    ),
    "policy": (create_request("u", config={"cleanup.policy": "shrink"}), errors.BadOption),
    "ratio": (create_request("u", config={"min.cleanable.dirty.ratio": "1.5"}), errors.BadOption),
    "no ratio": (
        create_request("u", config={"min.cleanable.dirty.ratio": "nan"}),
        errors.BadOption,
    ),
    "lag": (create_request("u", config={"min.compaction.lag.ms": "-1"}), errors.BadOption),
    "retention": (create_request("u", config={"delete.retention.ms": "9" * 19}), errors.BadOption),
}


@pytest.mark.parametrize("what", BAD_TOPICS)
def test_a_topic_that_cannot_be(rig: Rig, store: MemoryStore, what: str) -> None:
    """An invalid topic is refused with the reason, and leaves no trace."""
    request, error = BAD_TOPICS[what]
    before = paths(store, "")
    with pytest.raises(error):
        rig.broker.topics.create(request)
    assert paths(store, "") == before
    assert rig.broker.topics.names() == ["t"]


def test_a_topic_that_is_unknown(rig: Rig) -> None:
    """Any request for a topic that does not exist is refused with its name."""
    broker = rig.broker
    times = flight_messages.OffsetsForTimes(topic="u", timestamps_us={0: 0})
    attempts: list[Callable[[], object]] = [
        lambda: broker.append("u", 0, payload(["a"])),
        lambda: broker.read("u", 0, 0, 0),
        lambda: broker.tail([flight_messages.TailPosition(topic="u", partition=0, offset=0)]),
        lambda: broker.topics.describe("u"),
        lambda: broker.topics.delete("u"),
        lambda: broker.topics.compact("u"),
        lambda: broker.topics.alter(flight_messages.AlterTopic(topic="u", config={})),
        lambda: broker.topics.add_partitions(
            flight_messages.AddPartitions(topic="u", partitions=2)
        ),
        lambda: broker.offsets_for_times(times),
        lambda: broker.publishing.publish(flight_messages.PublishNow(topics=["t", "u"])),
    ]
    for attempt in attempts:
        with pytest.raises(errors.UnknownTopic) as refused:
            attempt()
        assert refused.value.topic == "u"


@pytest.mark.parametrize("allowed", [True, False])
def test_auto_creation_is_for_those_who_ask(
    store: MemoryStore, clock: ManualClock, allowed: bool
) -> None:
    """A topic comes into being by asking for it where that is allowed, never by writing to it."""
    options = RigOptions(topics=TopicDefaults(auto_create=allowed, partitions=2))
    rig = Rig(store, clock, options=options)
    with pytest.raises(errors.UnknownTopic):
        rig.append(["a"])
    if not allowed:
        with pytest.raises(errors.UnknownTopic):
            rig.broker.topics.create_on_request("t")
        return
    rig.broker.topics.create_on_request("t")
    rig.broker.topics.create_on_request("t")
    assert rig.append(["a"], partition=1).base_offset == 0
    with pytest.raises(errors.BadTopicName):
        rig.broker.topics.create_on_request("no/name")


def test_a_configuration_changes_by_key(rig: Rig) -> None:
    """A value is set, None resets it, and an unknown key is refused with a hint."""
    key = "message.timestamp.type"
    config = {key: "LogAppendTime"}
    assert (
        rig.broker.topics.alter(flight_messages.AlterTopic(topic="t", config=dict(config))).config
        == config
    )
    assert rig.successor().broker.topics.describe("t").config == config
    rig = rig.successor()
    for value in ("CreateTime", None):
        with pytest.raises(errors.UnknownOption) as refused:
            rig.broker.topics.alter(
                flight_messages.AlterTopic(topic="t", config={"message.timestamp.typ": value})
            )
        assert key in refused.value.hint
    with pytest.raises(errors.BadOption):
        rig.broker.topics.alter(flight_messages.AlterTopic(topic="t", config={key: "Sometimes"}))
    assert (
        rig.broker.topics.alter(flight_messages.AlterTopic(topic="t", config={key: None})).config
        == {}
    )


def test_partitions_are_only_added(rig: Rig, store: MemoryStore) -> None:
    """New partitions begin empty, and the old ones keep what they have."""
    rig.append(["a"])
    for count in (0, 1, limits.PARTITIONS_PER_TOPIC + 1):
        with pytest.raises(errors.BadPartitionCount):
            rig.broker.topics.add_partitions(
                flight_messages.AddPartitions(topic="t", partitions=count)
            )
    info = rig.broker.topics.add_partitions(flight_messages.AddPartitions(topic="t", partitions=3))
    assert [each.end for each in info.partitions] == [1, 0, 0]
    rig.append(["b"], partition=2)
    assert (rig.read(), rig.read(partition=2)) == ([(0, b"a")], [(0, b"b")])
    assert rows_of_root(store, rig.clock, partition=2) == [(0, b"b")]
    rig.publish()
    successor = rig.successor(hot_bytes=0)
    assert (successor.read(), successor.read(partition=2)) == ([(0, b"a")], [(0, b"b")])


def test_partitions_are_added_after_a_restore_to_before_others_were(
    rig: Rig, store: MemoryStore
) -> None:
    """The RESTORE of another engine takes the number of partitions back, and no offset."""
    rig.broker.topics.add_partitions(flight_messages.AddPartitions(topic="t", partitions=2))
    rig.append(["a"], partition=1)
    rig.publish()
    table = TopicTable(store, "t", clock=rig.clock)
    table.commit(
        lambda before: TableChange(
            removes=before.files[1], properties={PARTITIONS: "1"}, operation="RESTORE"
        )
    )
    info = rig.broker.topics.add_partitions(flight_messages.AddPartitions(topic="t", partitions=3))
    assert [each.end for each in info.partitions] == [0, 1, 0]
    rig.append(["b"], partition=1)
    rig.append(["c"], partition=2)
    rig.publish()
    successor = rig.successor(hot_bytes=0)
    assert successor.read(partition=1, start=1) == [(1, b"b")]
    assert successor.read(partition=2) == [(0, b"c")]


def test_new_partitions_are_read_from_the_table(store: MemoryStore, clock: ManualClock) -> None:
    """A reader that knew the table before finds the partitions that were added since."""
    rig = Rig(store, clock, options=COLD)
    rig.create()
    rig.append(["a"])
    rig.publish()
    assert rig.read() == [(0, b"a")]
    rig.broker.topics.add_partitions(flight_messages.AddPartitions(topic="t", partitions=2))
    rig.append(["b"], partition=1)
    assert rig.read(partition=1) == [(0, b"b")]
    rig.publish()
    assert rig.read(partition=1) == [(0, b"b")]


@pytest.mark.parametrize("cut_at", ["put_new", "list_after"])
def test_an_addition_that_was_cut_short_is_repeated(
    rig: Rig, store: MemoryStore, cut_at: str
) -> None:
    """If only the table has the new partitions, repeating the request updates the metadata."""
    fault = Fault(operation=cut_at, error=DOWN, prefix="meta", count=1)  # type: ignore[arg-type]
    rig.broker.metadata._store = MetadataStore(store.view(ScriptedFaults(fault)), clock=rig.clock)
    request = flight_messages.AddPartitions(topic="t", partitions=4)
    with pytest.raises(errors.StorageUnavailable):
        rig.broker.topics.add_partitions(request)
    assert TopicTable(store, "t", clock=rig.clock).refresh().partitions == 4
    for _ in range(2):
        assert len(rig.broker.topics.describe("t").partitions) == 1
        rig.append(["a"])
        rig.publish()
        rig = rig.successor()
    rig.broker.topics.alter(flight_messages.AlterTopic(topic="t", config={}))
    with pytest.raises(errors.BadPartitionCount):
        rig.broker.topics.add_partitions(flight_messages.AddPartitions(topic="t", partitions=3))
    assert len(rig.broker.topics.add_partitions(request).partitions) == 4
    assert rig.append(["b"], partition=3).base_offset == 0


def test_a_deleted_topic_is_gone(rig: Rig, store: MemoryStore) -> None:
    """Its records, its table's rows and its place in the log go; the name is free."""
    rig.append(["a"])
    rig.publish()
    rig.append(["b"])
    rig.broker.topics.delete("t")
    assert rig.broker.topics.names() == []
    assert rig.led_partitions.backlog.unpublished_bytes == 0
    assert TopicTable(store, "t", clock=rig.clock).refresh().topic_id is None
    rig.create()
    assert rig.append(["c"]).base_offset == 0
    for broker in (rig, rig.successor(), rig.successor(hot_bytes=0)):
        assert broker.read() == [(0, b"c")]
    assert rows_of_root(store, rig.clock) == [(0, b"c")]


@pytest.mark.parametrize("operation", ["put_new", "get", "list_after"])
def test_a_creation_that_was_cut_short_is_repeated(operation: Operation) -> None:
    """Wherever it breaks off, there is either the topic or nothing that is in its way."""
    failures = 0
    for count in range(1, 12):
        clock = ManualClock()
        store = MemoryStore(clock)
        rig = Rig(store, clock)
        faulty = store.view(ScriptedFaults(Fault(operation=operation, error=DOWN, count=count)))
        rig.administer_on(faulty)
        rig.broker.metadata._store = MetadataStore(faulty, clock=clock)
        try:
            rig.broker.topics.create(create_request("t", 2))
        except (errors.StorageUnavailable, errors.OutcomeUnknown):
            failures += 1
            assert rig.broker.topics.names() == []
        rig = rig.successor()
        rig.broker.topics.create(create_request("t", 2, if_absent=True))
        assert rig.append(["a"], partition=1).base_offset == 0
        rig.publish()
        assert rig.successor().read(partition=1) == [(0, b"a")]
    assert 0 < failures < 11


def no_put_of_metadata_lands() -> ScriptedFaults:
    """The first put of a version, and each try of `claim` after it, has no answer and no effect."""
    silent = PutUnresolved("meta", "no answer")
    tries = range(1, CLAIM_ATTEMPTS + 2)
    return ScriptedFaults(
        *(Fault(operation="put_new", error=silent, prefix="meta", count=n) for n in tries)
    )


def unread_metadata(error: errors.SparklogError = DOWN) -> ScriptedFaults:
    """The put of a version lands, and the version cannot be read back."""
    return ScriptedFaults(Fault(operation="list_after", error=error, prefix="meta", count=2))


@contextlib.contextmanager
def metadata_with(rig: Rig, faults: Faults) -> Iterator[None]:
    """Has the broker's reads and puts of the metadata meet faults."""
    assert isinstance(rig.store, MemoryStore)
    sound = rig.broker.metadata._store
    rig.broker.metadata._store = MetadataStore(rig.store.view(faults), clock=rig.clock)
    yield
    rig.broker.metadata._store = sound


def create_in_doubt(rig: Rig, *, lands: bool) -> None:
    """Creates topic u with an unknown outcome: the metadata may name it or not."""
    faults = unread_metadata() if lands else no_put_of_metadata_lands()
    with metadata_with(rig, faults), pytest.raises(errors.OutcomeUnknown):
        rig.create("u", 2)
    assert rig.broker.topics.names() == ["t"]


@pytest.mark.parametrize("who", ["janitor", "repetition", "deletion"])
@pytest.mark.parametrize("lands", [True, False])
def test_a_creation_of_unknown_outcome_is_resolved(rig: Rig, who: str, *, lands: bool) -> None:
    """A topic that the metadata names is served, and its table is never cleared away."""
    create_in_doubt(rig, lands=lands)
    if who == "janitor":
        rig.broker.topics.finish_deletion("u")
    elif who == "repetition":
        rig.broker.topics.create(create_request("u", 2, if_absent=True))
    elif lands:
        rig.broker.topics.delete("u")
    else:
        with pytest.raises(errors.UnknownTopic):
            rig.broker.topics.delete("u")
    expected = ["t", "u"] if who == "repetition" or (lands and who == "janitor") else ["t"]
    assert rig.broker.topics.names() == expected
    assert sorted(MetadataStore(rig.store, clock=rig.clock).reload().topics) == expected
    if "u" in expected:
        assert rig.append(["a"], topic="u", partition=1).base_offset == 0
        rig.publish()
        assert rig.successor().read("u", partition=1) == [(0, b"a")]
    elif who == "janitor":
        assert TopicTable(rig.store, "u", clock=rig.clock).refresh().topic_id is None


def test_a_topic_that_cannot_be_settled_keeps_no_other_in_doubt(rig: Rig) -> None:
    """Each topic of unknown outcome is settled for itself; the first failure is raised."""
    topics = rig.broker.topics
    settled: list[str] = []

    def settle(name: str) -> None:
        if name == "a":
            raise errors.CorruptObject(path="topics/a", check="torn")
        settled.append(name)

    topics._in_doubt |= {"a", "b"}
    with mock.patch.object(topics, "_settle_doubt", settle), pytest.raises(errors.CorruptObject):
        topics.settle_doubts()
    assert settled == ["b"]


@pytest.mark.parametrize("how", ["bury", "create"])
def test_a_table_of_a_topic_that_the_metadata_names_is_not_cleared(rig: Rig, how: str) -> None:
    """A broker that does not know a topic leaves its table alone while the metadata names it."""
    rig.append(["a"])
    rig.publish()
    rig.led_partitions.remove_topic(rig.led_partitions.topic("t"))
    if how == "bury":
        rig.broker.topics.finish_deletion("t")
    else:
        with pytest.raises(errors.TopicExists):
            rig.broker.topics.create(create_request("t"))
    assert rows_of_table(rig.store, rig.clock) == [(0, b"a")]


@pytest.mark.parametrize("by", ["sweep", "creation"])
@pytest.mark.parametrize("is_alive", [True, False])
def test_a_table_that_another_broker_creates(rig: Rig, by: str, *, is_alive: bool) -> None:
    """It is left alone as long as that broker may still name its topic in the metadata."""
    other = BrokerRegistration(epoch=0, flight="h:7")
    metadata = rig.meta.change(lambda before: register(before, 7, other, WalKind.OBJECTS))
    if not is_alive:
        fenced = [
            msgspec.structs.replace(each, fenced=each.broker == 7, heirs=(1,))
            for each in metadata.open_epochs
        ]
        rig.meta.change(lambda before: msgspec.structs.replace(before, open_epochs=tuple(fenced)))
    table = TopicTable(rig.store, "u", clock=rig.clock)
    table.commit(lambda _: create_change("abcd", 2, {}, creator=(7, 1)))
    assert table.snapshot.creator == (7, 1)
    if by == "sweep":
        rig.broker.topics.finish_deletion("u")
    elif is_alive:
        with pytest.raises(errors.TopicExists):
            rig.create("u")
    else:
        rig.create("u")
        assert table.refresh().creator == (1, rig.leadership.epoch)
    survives = table.refresh().topic_id == "abcd"
    assert survives is is_alive
    if survives:
        known = TopicMetadata(topic_id="abcd", leaders=(7, 7), leader_epochs=(0, 0))
        rig.meta.change(
            lambda before: msgspec.structs.replace(before, topics={**before.topics, "u": known})
        )
        rig.janitor.tick()
        rig.broker.topics.finish_deletion("u")
        assert table.refresh().topic_id == "abcd"


def test_a_deletion_whose_table_stands_says_so(rig: Rig, store: MemoryStore) -> None:
    """A deletion succeeds even if the deleted topic's table could not be ended."""
    rig.append(["a"])
    rig.administer_on(
        store.view(ScriptedFaults(Fault(operation="put_new", error=DOWN, prefix=LOG)))
    )
    with pytest.raises(errors.OutcomeUnknown):
        rig.broker.topics.delete("t")
    assert rig.broker.topics.names() == []
    rig.administer_on(store)
    rig.create()
    assert rig.append(["b"]).base_offset == 0
    assert rig.successor().read() == [(0, b"b")]


@pytest.mark.parametrize("lost", [DOWN, FORBIDDEN, None], ids=["down", "forbidden", "no put"])
@pytest.mark.parametrize("who", ["janitor", "deletion", "creation", "successor"])
def test_a_deletion_of_unknown_outcome_is_resolved(
    rig: Rig, who: str, lost: errors.SparklogError | None
) -> None:
    """Until the outcome is known, no record of the topic is acked; all other topics continue."""
    rig.create("u")
    rig.append(["a"])
    lands = lost is not None
    faults = unread_metadata(lost) if lost is not None else no_put_of_metadata_lands()
    with metadata_with(rig, faults), pytest.raises(errors.OutcomeUnknown):
        rig.broker.topics.delete("t")
    with pytest.raises(errors.TopicHeldBack, match="may have been deleted"):
        rig.append(["b"])
    assert [each.topic for each in rig.broker.status().held_back] == ["t"]
    assert rig.broker.failure is None
    assert rig.append(["x"], topic="u").base_offset == 0
    rig.publish()
    if who == "janitor":
        rig.janitor.tick()
    elif who == "successor":
        rig = rig.successor()
    elif who == "deletion" and lands:
        with pytest.raises(errors.UnknownTopic):
            rig.broker.topics.delete("t")
    elif who == "deletion":
        rig.broker.topics.delete("t")
    elif lands:
        rig.broker.topics.create(create_request("t"))
    else:
        with pytest.raises(errors.TopicExists):
            rig.broker.topics.create(create_request("t"))
    is_there = who == "creation" or (not lands and who != "deletion")
    assert rig.broker.topics.names() == (["t", "u"] if is_there else ["u"])
    assert rig.broker.status().held_back == []
    if is_there:
        assert rig.append(["b"]).base_offset == (0 if lands else 1)
        rig.publish()
    for broker in (rig, rig.successor()):
        assert broker.read("u") == [(0, b"x")]
        if is_there:
            assert broker.read() == ([(0, b"b")] if lands else [(0, b"a"), (1, b"b")])
    if not is_there and who != "successor":
        assert TopicTable(rig.store, "t", clock=rig.clock).refresh().topic_id is None


def test_a_doubt_that_cannot_be_settled_stops_no_janitor(rig: Rig) -> None:
    """It asks again with its next tick, and does what else is due."""
    with metadata_with(rig, unread_metadata()), pytest.raises(errors.OutcomeUnknown):
        rig.broker.topics.delete("t")
    fault = Fault(operation="list_after", error=DOWN, prefix="meta", count=1)
    with metadata_with(rig, ScriptedFaults(fault)):
        rig.janitor.tick()
        assert rig.broker.topics.names() == ["t"]
    rig.janitor.tick()
    assert rig.broker.topics.names() == []


def test_an_addition_of_partitions_of_unknown_outcome_is_resolved(rig: Rig) -> None:
    """A client that has read the metadata does not get the error that the partition is unknown."""
    wanted = flight_messages.AddPartitions(topic="t", partitions=3)
    with metadata_with(rig, unread_metadata()), pytest.raises(errors.OutcomeUnknown):
        rig.broker.topics.add_partitions(wanted)
    looks = rig.broker.metadata.looks
    with pytest.raises(errors.UnknownPartition):
        rig.append(["a"], partition=2)
    with pytest.raises(errors.MetadataChanged):  # the error that the client gets
        rig.broker.metadata.prove(looks)
    assert rig.append(["a"], partition=2).base_offset == 0


def test_a_creation_of_unknown_outcome_is_resolved_without_its_table(rig: Rig) -> None:
    """A topic whose table cannot be read when it is found in the metadata is served later."""
    assert isinstance(rig.store, MemoryStore)
    with metadata_with(rig, unread_metadata()), pytest.raises(errors.OutcomeUnknown):
        rig.broker.topics.create(create_request("u"))
    unread = rig.store.view(ScriptedFaults(Fault(operation="get", error=DOWN, prefix="topics/u")))
    with (
        mock.patch.object(
            rig.reconciler, "_open_table", lambda name: TopicTable(unread, name, clock=rig.clock)
        ),
        mock.patch.object(rig.reconciler, "_store", unread),
    ):
        rig.broker.metadata.follow()
    assert rig.broker.topics.names() == ["t", "u"]
    with pytest.raises(errors.NotLeader):
        rig.append(["a"], topic="u")
    rig.reconciler.take()
    assert rig.append(["a"], topic="u").base_offset == 0
    rig.publish()
    assert rig.read("u") == rig.successor().read("u") == [(0, b"a")]


class FailingDisk(NoFaults):
    """A disk that cannot flush new objects, from when a test says so."""

    fails = False

    def between(self, operation: Operation, path: str) -> None:
        if self.fails and operation == "put_new":
            raise SyncFailed(path, "EIO")


def test_a_disk_that_fails_an_administrator_stops_the_broker(rig: Rig, store: MemoryStore) -> None:
    """After a failed flush of any caller, no more records are taken."""
    changes: list[Callable[[Broker], object]] = [
        lambda broker: broker.topics.create(create_request("u")),
        lambda broker: broker.producer_ids.new(),
        lambda broker: broker.topics.delete("t"),
    ]
    for change in changes:
        disk = FailingDisk()
        each = rig.successor(store=store.view(disk))
        disk.fails = True
        with pytest.raises(errors.OutcomeUnknown):
            change(each.broker)
        assert isinstance(each.broker.failure, SyncFailed)


def test_producer_ids_are_given_once(rig: Rig) -> None:
    """Producer ids are unique across this broker, its successor and its predecessor."""
    found = [rig.broker.producer_ids.new().producer_id for _ in range(3)]
    second = rig.successor()
    found += [second.broker.producer_ids.new().producer_id for _ in range(1_001)]
    assert found == [0, 1, 2, *range(1_000, 2_001)]
    third = second.successor()
    found += [third.broker.producer_ids.new().producer_id for _ in range(3)]
    found += [
        each.broker.producer_ids.new().producer_id for each in (rig, second) for _ in range(997)
    ]
    assert len(set(found)) == len(found)
    with pytest.raises(errors.BrokerFenced):
        rig.broker.producer_ids.new()


def test_many_producer_ids_cost_few_versions(rig: Rig) -> None:
    """A block is taken once, however many threads want one of its ids."""
    before = rig.meta.current.version

    def take(_: int) -> list[int]:
        return [rig.broker.producer_ids.new().producer_id for _ in range(250)]

    with ThreadPoolExecutor(8) as pool:
        found = [each for ids in pool.map(take, range(10)) for each in ids]
    assert sorted(found) == list(range(2_500))
    assert rig.meta.current.version == before + 3


def test_internal_topics_are_made_by_the_broker_alone(store: MemoryStore) -> None:
    """Internal topics get their proper configuration, and those of an earlier version are
    corrected.
    """
    topics = TopicDefaults(auto_create=True, partitions=2)
    rig = Rig(store, ManualClock(), options=RigOptions(topics=topics))
    for name in (consumer_offsets.TOPIC, "__transaction_state"):
        request = flight_messages.CreateTopic(topic=name, if_absent=True)
        for create in (rig.broker.topics.create, rig.broker.topics.check_new):
            with pytest.raises(errors.InternalTopic):
                create(request)
    with pytest.raises(errors.UnknownTopic):
        rig.broker.topics.create_on_request("__transaction_state")
    assert rig.broker.topics.names() == []
    rig.broker.topics.create_on_request(consumer_offsets.TOPIC)
    made = rig.broker.topics.describe(consumer_offsets.TOPIC)
    assert len(made.partitions) == limits.OFFSETS_PARTITIONS
    assert made.config == {"cleanup.policy": "compact"}
    rig.broker.topics.config_changes.replace(consumer_offsets.TOPIC, {}, only_checks=False)
    rig.broker.topics.ensure_offsets_topic()
    assert rig.broker.topics.describe(consumer_offsets.TOPIC).config == {
        "cleanup.policy": "compact"
    }


def test_the_cluster_names_itself(rig: Rig, store: MemoryStore) -> None:
    """A client learns the root, its identity and where the broker is."""
    found = rig.broker.cluster()
    assert (found.root, found.cluster_id) == (store.uri, rig.leadership.cluster.cluster_id)
    assert [(each.broker, each.epoch, each.address) for each in found.brokers] == [
        (1, 1, "127.0.0.1:1")
    ]


# ------------------------------------------------------------------------------ reading


class Reading:
    """A topic whose records are in table, log and memory, depending on earlier steps."""

    def __init__(self, store: MemoryStore, clock: ManualClock, hot_bytes: int) -> None:
        self.rig = Rig(store, clock, options=RigOptions(hot_bytes=hot_bytes))
        self.rig.create()
        for number in range(8):
            self.rig.append([f"{number}:{index}" for index in range(3)], timestamp=[1, None, 3])
            if number == 2:
                self.rig.publish()
            if number == 4:
                self.rig.publish()
                self.rig.trim()
        self.expected = [
            (3 * number + index, f"{number}:{index}".encode())
            for number in range(8)
            for index in range(3)
        ]


@pytest.mark.parametrize("hot_bytes", [0, 5_000, 1 << 20])
def test_any_range_is_served(store: MemoryStore, clock: ManualClock, hot_bytes: int) -> None:
    """Wherever its records lie, a range comes whole, in order, and nothing else with it."""
    reading = Reading(store, clock, hot_bytes)
    broker = reading.rig.broker
    for start in range(25):
        for end in range(start, 25):
            assert rows_of(broker.read("t", 0, start, end)) == reading.expected[start:end]


@pytest.mark.parametrize("hot_bytes", [0, 1 << 20])
def test_chosen_columns_come_in_their_order(
    store: MemoryStore, clock: ManualClock, hot_bytes: int
) -> None:
    """Any columns may be asked for, with or without the offset, from table, log and memory."""
    broker = Reading(store, clock, hot_bytes).rig.broker
    for columns in (["value"], ["timestampType", "partition"], ["offset", "key"], ["headers"]):
        for batch in broker.read("t", 0, 0, 24, columns=columns):
            assert batch.rows.schema == pa.schema([ROW_SCHEMA.field(name) for name in columns])


def test_batches_have_a_bound(rig: Rig) -> None:
    """A tail's batches have no more rows than asked for, however many were sent at once."""
    rig.append([f"{number}" for number in range(10)])
    rig.publish()
    rig.append([f"{number}" for number in range(10, 20)])
    for each in (rig, rig.successor(hot_bytes=0)):
        tail = each.broker.tail(positions(0), batch_rows=4)
        batches = list(until_idle(tail))
        assert all(batch.rows.num_rows <= 4 for batch in batches)
        assert [offset for offset, _ in rows_of(batches)] == list(range(20))


@pytest.mark.parametrize("hot_bytes", [0, 1 << 20])
def test_batches_have_a_bound_in_bytes(
    store: MemoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, hot_bytes: int
) -> None:
    """Neighbours are one batch as long as they are small; a large one comes alone."""
    rig = Rig(store, clock, options=RigOptions(hot_bytes=hot_bytes))
    rig.create()
    sizes = [1_000] * 10 + [9_000] + [1_000] * 10
    for size in sizes:
        rig.append([b"x" * size])
    monkeypatch.setattr(limits, "READ_RUN_BYTES", 4_100)
    readers: list[Iterator[ReadBatch]] = [
        rig.broker.read("t", 0, 0, len(sizes)),
        until_idle(rig.broker.tail(positions(0))),
    ]
    for batches in readers:
        found = [batch.rows for batch in batches]
        assert [len(value.as_py()) for rows in found for value in rows.column("value")] == sizes
        assert all(rows.num_rows == 1 or rows.column("value").nbytes <= 4_100 for rows in found)
        assert len(found) < len(sizes)


@pytest.mark.parametrize("published", [0, 2])
def test_records_that_are_nowhere_are_refused_to_readers(
    store: MemoryStore, clock: ManualClock, published: int
) -> None:
    """A reader of a blocked partition gets the records in the table, and then the reason."""
    rig = Rig(store, clock)
    rig.create("t")
    if published:
        rig.append(["a", "b"])
        rig.publish()
    topic = rig.led_partitions.topic("t")
    hole = errors.MissingObject(path="t-0", reason="neither table nor log has it")
    rig.led_partitions.backlog.block(topic, topic.partition(0), hole, end=5)
    readers: list[Iterator[ReadBatch | None]] = [
        rig.broker.read("t", 0, 0, 5),
        rig.broker.tail(positions(0)),
    ]
    for reader in readers:
        found: list[int] = []
        with pytest.raises(errors.MissingObject, match="neither table nor log"):
            found.extend(batch.end for batch in filter(None, reader))
        assert found == ([published] if published else [])


def test_a_range_that_does_not_exist_is_refused_at_once(rig: Rig) -> None:
    """An invalid range is refused before the first batch, with the reason."""
    rig.append(["a", "b"])
    for start, end in ((-1, 1), (0, 3), (3, 3)):
        with pytest.raises(errors.OffsetOutOfRange) as refused:
            rig.broker.read("t", 0, start, end)
        assert (refused.value.start, refused.value.end) == (0, 2)
    with pytest.raises(errors.UnknownPartition):
        rig.broker.read("t", 1, 0, 0)
    with pytest.raises(errors.TopicChanged) as changed:
        rig.broker.read("t", 0, 0, 0, topic_id="another")
    assert changed.value.expected == "another"
    for offset in (-1, 3):
        with pytest.raises(errors.OffsetOutOfRange):
            rig.broker.tail(positions(offset))
    assert rows_of(rig.broker.read("t", 0, 2, 2)) == []


@pytest.mark.parametrize("bound", ["queue_bytes", "unpublished_bytes"])
def test_groups_records_are_taken_while_producers_are_held_back(
    store: MemoryStore, clock: ManualClock, bound: str
) -> None:
    """Consumers continue, whether the writer's queue is full or publishing is behind."""
    rig = Rig(store, clock, options=RigOptions(writer=WriterLimits(**{bound: 1})))
    rig.create()
    rig.broker.topics.ensure_offsets_topic()
    first = rig.submit(["a"])
    if bound == "unpublished_bytes":
        rig.broker.wait(first)
    with pytest.raises(errors.QueueFull):
        rig.submit(["b"])
    pending = rig.broker.submit_internal(
        rig.broker.prepare_internal(consumer_offsets.TOPIC, 0, payload(["c"], key=[b"k"]))
    )
    assert rig.broker.wait(pending)[0].base_offset == 0


def test_many_small_entries_are_read_together(store: MemoryStore, clock: ManualClock) -> None:
    """A cold log of single records is one batch, and planned once."""
    rig = Rig(store, clock, options=COLD)
    rig.create()
    pending_appends = [rig.submit([f"{number}"]) for number in range(500)]
    for pending in pending_appends:
        rig.broker.wait(pending)
    (batch,) = rig.broker.read("t", 0, 0, 500)
    assert batch.rows.num_rows == 500


def test_a_long_table_is_planned_as_it_is_read(
    store: MemoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many files follow, each costs the reader of all of them the same."""
    rig = Rig(store, clock, options=COLD)
    rig.create()
    for number in range(20):
        rig.append([f"{number}"])
        rig.publish()
    made = 0

    def counting(**what: Any) -> Slice:
        nonlocal made
        made += 1
        return Slice(**what)

    monkeypatch.setattr("sparklog.storage.reading.plan.Slice", counting)
    monkeypatch.setattr(limits, "SMALL_FILE_BYTES", 0)  # joins no files
    assert len(list(rig.broker.read("t", 0, 0, 20))) == 20
    assert made <= 2 * 20


class Counted(list[Located]):
    """Counts the entries that are looked at."""

    looked_at = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.looked_at += len(found) if isinstance(at, slice) else 1
        return found

    def __iter__(self) -> Iterator[Located]:
        for each in super().__iter__():
            self.looked_at += 1
            yield each


def counted(rig: Rig, count: int) -> Counted:
    """Returns the entries of one record that wait for the table of t."""
    pending_appends = [rig.submit([f"{number}"]) for number in range(count)]
    for pending in pending_appends:
        rig.broker.wait(pending)
    partition = rig.led_partitions.topic("t").partition(0)
    partition.unpublished = found = Counted(partition.unpublished)
    return found


def test_a_reader_takes_no_more_of_a_backlog_than_it_reads(
    store: MemoryStore, clock: ManualClock
) -> None:
    """The cost of a few records does not grow with what waits before and behind them."""
    rig = Rig(store, clock, options=COLD)
    rig.create()
    backlog = counted(rig, 500)
    tail = rig.broker.tail(positions(300), batch_rows=10)
    assert rows_of([next(tail)]) == [(n, b"%d" % n) for n in range(300, 310)]
    assert backlog.looked_at < 50
    assert len(rig.read()) == 500


@pytest.mark.parametrize("moment", ["opened", "while reading"])
def test_files_that_are_compacted_meanwhile_are_planned_again(
    store: MemoryStore, clock: ManualClock, moment: str
) -> None:
    """A reader that began with files which have gone since gets every record once all the same."""
    options = RigOptions(
        hot_bytes=0,
        janitor=JanitorSettings(
            removed_file_grace_seconds=0.0, removed_file_kept_seconds=0.0, compact_files=2
        ),
    )
    rig = Rig(store, clock, options=options)
    rig.create()
    for number in range(6):
        rig.append([f"{number}"])
        rig.publish()
    batches = rig.broker.read("t", 0, 0, 6)
    found: list[ReadBatch] = []
    if moment == "while reading":
        found.append(next(batches))
    rig.broker.topics.compact("t")
    clock.advance(1.0)
    names = [name for name in paths(store, "topics/t") if name.endswith(".parquet")]
    snapshot = TopicTable(store, "t", clock=clock).refresh()
    active = {file.path for file in snapshot.files[0]}
    store.delete([f"topics/t/{name}" for name in names if name not in active])
    assert rows_of([*found, *batches]) == [(n, b"%d" % n) for n in range(6)]


def test_records_that_are_published_meanwhile_are_found(
    store: MemoryStore, clock: ManualClock
) -> None:
    """A reader whose log objects have been published and trimmed continues in the table."""
    rig = Rig(store, clock, options=COLD)
    rig.create()
    for number in range(6):
        rig.append([f"{number}"])
        if number == 2:
            rig.publish()
    batches = rig.broker.read("t", 0, 0, 6)
    found = [next(batches)]
    rig.publish()
    rig.trim()
    assert rows_of([*found, *batches]) == [(n, b"%d" % n) for n in range(6)]


def test_a_missing_file_is_named(store: MemoryStore, clock: ManualClock) -> None:
    """A data file that the table names and that is not there is no silence."""
    rig = Rig(store, clock, options=COLD)
    rig.create()
    rig.append(["a"])
    rig.publish()
    (file,) = TopicTable(store, "t", clock=clock).refresh().files[0]
    store.delete([f"topics/t/{file.path}"])
    with pytest.raises(errors.MissingObject) as missing:
        rig.read()
    assert missing.value.path == f"topics/t/{file.path}"


def test_a_damaged_file_is_named(store: MemoryStore, clock: ManualClock) -> None:
    """Whichever byte of a data file changes, its rows are right or the file is refused by name."""
    rig = Rig(store, clock, options=COLD)
    rig.create()
    rig.append(["some value", "another"], key=[b"k", b"l"])
    rig.publish()
    sound = rig.read()
    (file,) = TopicTable(store, "t", clock=clock).refresh().files[0]
    path = f"topics/t/{file.path}"
    refused = 0
    for position in range(file.size_bytes):
        flip(store, path, position)
        try:
            found = rig.read()
        except errors.CorruptObject as error:
            refused += error.path == path
        else:
            assert found == sound
        flip(store, path, position)
    assert refused > file.size_bytes / 3, (refused, file.size_bytes)


@pytest.mark.parametrize("kept", [[0, 2, 5], [3], [0], []], ids=str)
def test_what_somebody_has_deleted_is_a_gap(
    store: MemoryStore, clock: ManualClock, kept: list[int]
) -> None:
    """Rows that another engine has taken out of the table are missing, and all others are there."""
    rig = Rig(store, clock, options=COLD)
    rig.create()
    rig.append([f"{number}" for number in range(6)])
    rig.publish()
    rig.append(["6"])
    table = TopicTable(store, "t", clock=clock)
    topic_id = table.refresh().topic_id
    assert topic_id is not None
    adds: tuple[TableFile, ...] = ()
    if kept:
        (batch,) = rig.broker.read("t", 0, 0, 6)
        rows = batch.rows.take(pa.array(kept))
        adds = (
            write_file(
                store, topic="t", topic_id=topic_id, partition=0, batches=[rows], clock=clock
            ),
        )
    table.commit(lambda before: TableChange(adds=adds, removes=before.files[0], operation="DELETE"))
    expected = [(number, b"%d" % number) for number in [*kept, 6]]
    rig = rig.successor()
    for start in range(7):
        for end in range(start, 8):
            found = rows_of(rig.broker.read("t", 0, start, end))
            assert found == [row for row in expected if start <= row[0] < end]
    assert rows_of_root(store, clock) == expected
    tail = rig.broker.tail(positions(0))
    assert rows_of(until_idle(tail)) == expected


def test_a_file_of_other_rows_is_named(store: MemoryStore, clock: ManualClock) -> None:
    """A sound file that holds fewer rows than the table's log says is not a gap."""
    rig = Rig(store, clock, options=COLD)
    rig.create()
    rig.append(["a", "b"])
    rig.publish()
    (file,) = TopicTable(store, "t", clock=clock).refresh().files[0]
    (batch,) = rig.broker.read("t", 0, 0, 2)
    shorter = encode([batch.rows.slice(1)])
    store.put(f"topics/t/{file.path}", shorter.data)
    with pytest.raises(errors.CorruptObject) as corrupt:
        rig.read()
    assert corrupt.value.path == f"topics/t/{file.path}"


def test_a_table_torn_by_another_writer_is_read_as_far_as_it_goes(
    store: MemoryStore, clock: ManualClock
) -> None:
    """Old records from the table, new ones from the log, also for a reader that comes later."""
    rig = Rig(store, clock, options=COLD)
    rig.create()
    rig.append(["a"])
    rig.publish()
    rig.append(["b"])
    store.put(f"{LOG}/{2:020d}.json", b'{"add"')
    assert rig.read() == [(0, b"a"), (1, b"b")]
    times = flight_messages.OffsetsForTimes(topic="t", timestamps_us={0: 0})
    assert rig.broker.offsets_for_times(times).offsets == {0: 0}
    with pytest.raises(errors.CorruptObject):
        rig.publish()
    assert rig.read() == [(0, b"a"), (1, b"b")]


def test_a_table_that_was_set_back_is_refused(store: MemoryStore, clock: ManualClock) -> None:
    """Records that were published and are no longer in the table are not taken for a gap.

    They are served as long as their files exist, and nothing is published after them.
    """
    rig = Rig(store, clock, options=COLD)
    rig.create()
    rig.append(["a"])
    rig.publish()
    (file,) = TopicTable(store, "t", clock=clock).refresh().files[0]
    store.delete([f"{LOG}/{1:020d}.json"])
    assert rig.read() == [(0, b"a")]
    rig.append(["b"])
    with pytest.raises(errors.OutcomeUnknown):
        rig.publish()
    store.delete([f"topics/t/{file.path}"])
    with pytest.raises(errors.MissingObject):
        rig.read()


# ------------------------------------------------------------------------------ as it comes


def positions(*offsets: int, topic: str = "t") -> list[flight_messages.TailPosition]:
    """One for each partition."""
    return [
        flight_messages.TailPosition(topic=topic, partition=number, offset=offset)
        for number, offset in enumerate(offsets)
    ]


def until_idle(tail: Iterator[ReadBatch | None]) -> Iterator[ReadBatch]:
    """Returns the batches that exist now."""
    for batch in tail:
        if batch is None:
            return
        yield batch


@pytest.mark.parametrize("hot_bytes", [0, 1 << 20])
def test_a_tail_goes_on_through_everything(
    store: MemoryStore, clock: ManualClock, hot_bytes: int
) -> None:
    """Through commits, trims and compaction a tail gives each record of each partition once."""
    rig = Rig(store, clock, options=RigOptions(hot_bytes=hot_bytes))
    rig.create("t", 2)
    rig.append(["0"])
    tail = rig.broker.tail(positions(0, 0))
    found: dict[int, list[tuple[int, bytes | None]]] = {0: [], 1: []}
    for number in range(1, 13):
        rig.append([f"{number}"], partition=number % 2)
        if number % 3 == 0:
            rig.publish()
        if number % 4 == 0:
            rig.trim()
        if number % 6 == 0:
            rig.broker.topics.compact("t")
        if number % 5 == 0:
            for batch in until_idle(tail):
                found[batch.partition] += rows_of([batch])
                assert batch.high_watermark == rig.end(partition=batch.partition)
    for batch in until_idle(tail):
        found[batch.partition] += rows_of([batch])
    assert found[0] == [(n, b"%d" % (2 * n)) for n in range(7)]
    assert found[1] == [(n, b"%d" % (2 * n + 1)) for n in range(6)]


def test_a_tail_tells_when_nothing_comes(rig: Rig) -> None:
    """Without new records the reader gets an idle signal, and the tail continues afterwards."""
    tail = rig.broker.tail(positions(0))
    assert next(tail) is None
    rig.append(["a"])
    assert rows_of([next(tail)]) == [(0, b"a")]
    assert next(tail) is None


def test_a_tail_ends_with_its_topic(rig: Rig) -> None:
    """A reader gets an error when its topic is deleted or recreated."""
    rig.append(["a"])
    tail = rig.broker.tail(positions(0))
    assert next(tail) is not None
    rig.broker.topics.delete("t")
    rig.create()
    rig.append(["another"])
    with pytest.raises(errors.UnknownTopic):
        next(tail)


def test_a_read_ends_with_its_topic(store: MemoryStore, clock: ManualClock) -> None:
    """A reader whose topic is recreated meanwhile gets no record of the new one."""
    rig = Rig(store, clock, options=COLD)
    rig.create()
    rig.append(["a"])
    rig.publish()
    rig.append(["b"])
    batches = rig.broker.read("t", 0, 0, 2)
    first = next(batches)
    rig.broker.topics.delete("t")
    rig.create()
    rig.append(["other", "other"])
    rig.publish()
    assert rows_of([first]) == [(0, b"a")]
    found = []
    with contextlib.suppress(errors.UnknownTopic, errors.MissingObject):
        found += rows_of(batches)
    assert found in ([], [(1, b"b")])


def test_a_broker_that_stops_takes_nothing_more(rig: Rig) -> None:
    """Its listeners end the tails."""
    rig.broker.close()
    with pytest.raises(errors.BrokerClosing):
        rig.append(["a"])


# ------------------------------------------------------------------------------ by time

times = st.lists(
    st.lists(st.one_of(st.none(), st.integers(-5, 5)), min_size=1, max_size=3), max_size=6
)


@settings(max_examples=60)
@given(times, st.sets(st.integers(0, 5)), st.integers(-6, 6))
def test_the_first_offset_that_late(
    batches: list[list[int | None]], publish_after: set[int], wanted: int
) -> None:
    """It is the least offset whose time is at or after the one asked for, wherever it lies."""
    clock = ManualClock(now_us=0)
    rig = Rig(MemoryStore(clock), clock, options=COLD)
    rig.create()
    expected = []
    for number, stamps in enumerate(batches):
        clock.advance(0.000_001)
        rig.append(["v"] * len(stamps), timestamp=stamps)
        expected += [
            clock.now_us() if producer_sequence is None else producer_sequence
            for producer_sequence in stamps
        ]
        if number in publish_after:
            rig.publish()
    late = [
        offset for offset, producer_sequence in enumerate(expected) if producer_sequence >= wanted
    ]
    request = flight_messages.OffsetsForTimes(topic="t", timestamps_us={0: wanted})
    assert rig.broker.offsets_for_times(request).offsets == {0: late[0] if late else -1}


def test_times_of_an_unknown_partition(rig: Rig) -> None:
    """A partition that the topic does not have is named."""
    with pytest.raises(errors.UnknownPartition):
        rig.broker.offsets_for_times(
            flight_messages.OffsetsForTimes(topic="t", timestamps_us={1: 0})
        )


# ------------------------------------------------------------------------------ what waits


def test_a_backlog_is_not_gone_through(
    rig: Rig, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting entries are examined when they are carried, and not again before they are due."""
    backlog = counted(rig, 500)
    for _ in range(3):
        assert rig.wal_cleaner.carry() is None
        rig.wal_cleaner.checkpoint()
        clock.advance(200.0)
    assert backlog.looked_at < 30
    backlog.looked_at = 0
    monkeypatch.setattr("sparklog.broker.log.publisher.PUBLISH_MAX_ENTRIES", 10)
    (run,) = rig.publisher._choose(rig.led_partitions.topic("t"))
    assert len(run.entries) == 10
    assert backlog.looked_at < 60


def test_what_waits_is_counted_with_what_it_costs(rig: Rig) -> None:
    """Many tiny records do not outgrow the memory that the bounds of a backlog allow."""
    topic, led_partitions = rig.led_partitions.topic("t"), rig.led_partitions
    for _ in range(10):
        rig.append(["x"])
    assert led_partitions.backlog.unpublished_bytes == topic.unpublished_bytes
    assert (
        led_partitions.backlog.unpublished_bytes >= led_partitions.backlog.written_bytes + 10 * 500
    )
    rig.publish()
    assert (led_partitions.backlog.unpublished_bytes, topic.unpublished_bytes) == (0, 0)


# ------------------------------------------------------------------------------ publishing


def test_publishing_now_returns_when_it_is_done(rig: Rig, store: MemoryStore) -> None:
    """Records acked before the call are in the tables of the named topics when it returns."""
    rig.create("u")
    rig.append(["a"])
    rig.append(["b"], topic="u")
    asked = []

    def publish_t() -> None:
        asked.append(1)
        rig.publisher.publish(rig.led_partitions.topic("t"))

    rig.broker.publishing.publish_now = publish_t
    rig.broker.publishing.publish(flight_messages.PublishNow(topics=["t"]))
    assert asked == [1]
    assert rows_of_table(store, rig.clock) == [(0, b"a")]
    with pytest.raises(errors.TimedOut):
        rig.broker.publishing.publish(flight_messages.PublishNow(timeout_seconds=1.0))


def test_publishing_that_is_held_back_says_why(rig: Rig) -> None:
    """A caller that waits in vain gets the reason."""
    rig.append(["a"])
    rig.led_partitions.topic("t").held_back = "its table is torn"
    rig.broker.publishing.publish_now = lambda: None
    with pytest.raises(errors.TimedOut) as timed_out:
        rig.broker.publishing.publish(flight_messages.PublishNow(timeout_seconds=1.0))
    assert "t: its table is torn" in timed_out.value.what


def test_publishing_ends_with_the_broker(rig: Rig) -> None:
    """Callers that wait when the broker stops get an error that says to reconnect."""
    rig.append(["a"])
    rig.broker.publishing.publish_now = rig.broker.close
    with pytest.raises(errors.BrokerClosing):
        rig.broker.publishing.publish(flight_messages.PublishNow())


def test_compacting_merges_what_is_small(rig: Rig, store: MemoryStore) -> None:
    """Many small files become one, and the records stay what they are."""
    for number in range(5):
        rig.append([f"{number}"])
        rig.publish()
    assert rig.broker.topics.describe("t").table_files == 5
    assert rig.broker.topics.compact("t").table_files == 1
    assert rows_of_table(store, rig.clock) == [(n, b"%d" % n) for n in range(5)]


def test_compacting_a_compacted_topic_leaves_the_last_of_each_key(
    rig: Rig, store: MemoryStore
) -> None:
    """A publish request takes effect at once, for any amount, and when the topic's setting
    changes.
    """
    for number in range(5):
        rig.append([f"{number}"], key=[b"%d" % (number % 2)])
        rig.publish()
    rig.broker.topics.alter(
        flight_messages.AlterTopic(topic="t", config={"cleanup.policy": "compact"})
    )
    assert rig.broker.topics.compact("t").table_files == 1
    successor = rig.successor(hot_bytes=0)
    assert successor.read() == rows_of_table(store, rig.clock) == [(3, b"3"), (4, b"4")]
    assert successor.append(["5"], key=[b"k"]).base_offset == 5


# ------------------------------------------------------------------------------ staged batches

KEY, ONCE = BatchKind.NAMED, BatchKind.UNNAMED


def stage(
    rig: Rig,
    sections: list[tuple[str, int, pa.RecordBatch]],
    *,
    batch: int = 1,
    query: str = "q",
    kind: BatchKind = BatchKind.NUMBERED,
) -> flight_messages.AppendStaged:
    """A batch with its manifest, as tasks and driver leave it."""
    writer = manifest.StagingWriter(rig.store, query=query, batch=batch, clock=rig.clock)
    for topic, partition, rows in sections:
        writer.add(topic, partition, rows)
    ids = {name: each.topic_id for name, each in rig.meta.reload().topics.items()}
    found = manifest.Manifest(
        query=query, batch=batch, sections=tuple(writer.finish()), kind=kind, topic_ids=ids
    )
    return flight_messages.AppendStaged(manifest=manifest.write(rig.store, found, rig.clock).path)


def test_a_staged_batch_is_appended_by_reference(rig: Rig, store: MemoryStore) -> None:
    """Its records get offsets, are read at once, and are in the table after the next commit."""
    rig.create("u", 2)
    rig.append(["before"])
    request = stage(
        rig,
        [
            ("t", 0, payload(["a", "b"])),
            ("u", 1, payload(["c"])),
            ("t", 0, payload(["d"], key=[b"k"])),
        ],
    )
    adopted = rig.broker.staged.append(request)
    assert adopted == flight_messages.AppendStagedReply(ranges={"t": {0: (1, 3)}, "u": {1: (0, 1)}})
    expected = [(0, b"before"), (1, b"a"), (2, b"b"), (3, b"d")]
    assert rig.read() == rows_of_root(store, rig.clock) == expected
    rig.publish()
    assert rows_of_table(store, rig.clock) == expected
    assert rows_of_table(store, rig.clock, "u", 1) == [(0, b"c")]


def test_a_staged_batch_for_a_compacted_topic_wants_keys(rig: Rig) -> None:
    """A record without one refuses all of the batch, before anything of it is written."""
    rig.create("c", cleanup_policy="compact")
    request = stage(
        rig, [("t", 0, payload(["a"])), ("c", 0, payload(["b", "c"], key=[b"k", None]))]
    )
    with pytest.raises(errors.KeylessRecord) as refused:
        rig.broker.staged.append(request)
    assert (refused.value.topic, refused.value.count) == ("c", 1)
    assert (rig.end("t"), rig.end("c")) == (0, 0)
    request = stage(rig, [("c", 0, payload(["b"], key=[b"k"]))], batch=2)
    assert rig.broker.staged.append(request).ranges == {"c": {0: (0, 1)}}


def test_a_staged_batch_is_adopted_once(rig: Rig) -> None:
    """A second commit is skipped, and returns the offsets of the first, also from a successor."""
    request = stage(rig, [("t", 0, payload(["a"])), ("t", 0, payload(["b"], key=[b"k"]))])
    first = rig.broker.staged.append(request)
    for each in (rig, rig.successor()):
        again = each.broker.staged.append(request)
        assert (again.ranges, again.skipped) == (first.ranges, True)
    assert each.end() == 2


@pytest.mark.parametrize("operation", ["get", "list_after"])
def test_a_batch_that_is_adopted_and_swept_meanwhile_is_skipped(
    rig: Rig, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """A second commit that finds manifest or files gone looks again whether the first is done."""
    request = stage(rig, [("t", 0, payload(["a"]))])
    folder = request.manifest.rpartition("/")[0]
    call = getattr(store, operation)
    adopted: list[flight_messages.AppendStagedReply] = []

    def overtaken(path: str, *more: str) -> object:
        if path.startswith(folder) and not adopted:
            monkeypatch.undo()
            adopted.append(rig.broker.staged.append(request))
            rig.publish()
            store.delete([f"{folder}/{stat.name}" for stat in store.walk(folder)])
        return call(path, *more)

    monkeypatch.setattr(store, operation, overtaken)
    again = rig.broker.staged.append(request)
    assert (again.ranges, again.skipped) == (adopted[0].ranges, True)
    assert rig.end() == 1


def test_a_rerun_that_deals_its_rows_otherwise_is_skipped(rig: Rig, store: MemoryStore) -> None:
    """Rows without a key go anywhere, so a rerun after the sweep may name other partitions."""
    rig.broker.topics.add_partitions(flight_messages.AddPartitions(topic="t", partitions=2))
    first = rig.broker.staged.append(stage(rig, [("t", 0, payload(["a"]))]))
    rig.publish()
    store.delete([f"staging/{name}" for name in paths(store, "staging")])
    rerun = stage(rig, [("t", 1, payload(["a"]))])
    for each in (rig, rig.successor()):
        again = each.broker.staged.append(rerun)
        assert (again.ranges, again.skipped) == (first.ranges, True)
        assert (each.end(), each.end(partition=1)) == (1, 0)


def test_a_batch_from_before_all_that_is_remembered_is_refused(rig: Rig) -> None:
    """It may stand and be forgotten, so it is neither appended again nor passed over."""
    for batch in range(BATCHES_REMEMBERED + 2):
        rig.broker.staged.append(stage(rig, [("t", 0, payload(["a"]))], batch=batch))
    end = rig.end()
    request = stage(rig, [("t", 0, payload(["a"]))], batch=1)
    for each in (rig, rig.successor()):
        with pytest.raises(errors.BadRequest, match="batch 1 of q arrived after batch 17"):
            each.broker.staged.append(request)
    assert each.end() == end
    remembered = stage(rig, [("t", 0, payload(["a"]))], batch=2)
    assert each.broker.staged.append(remembered).skipped
    # Nor to another topic: a query has one order of batches.
    each.create("u")
    elsewhere = stage(each, [("u", 0, payload(["a"]))], batch=1)
    with pytest.raises(errors.BadRequest, match="it may have been written already"):
        each.broker.staged.append(elsewhere)


def grow_old(rig: Rig, clock: ManualClock, days: float) -> Rig:
    """Everything is published and trimmed, so much time passes, and another broker starts."""
    rig.publish()
    rig.trim()
    TopicTable(rig.store, "t", clock=clock).refresh()
    rig.led_partitions.topic("t").table.checkpoint()
    clock.advance(days * 86_400)
    rig.trim()
    found = rig.successor()
    found.trim()
    return found.successor()


def test_a_query_resumes_after_a_year(rig: Rig, clock: ManualClock) -> None:
    """Its newest batch is known as long as the topic lives: it is skipped, and the next one not."""
    row = payload(["a"])
    requests = [stage(rig, [("t", 0, row)], batch=batch) for batch in range(3)]
    for request in requests[:2]:
        rig.broker.staged.append(request)
    late = grow_old(rig, clock, 366)
    again = late.broker.staged.append(requests[1])
    assert (again.ranges, again.skipped) == ({"t": {}}, True)
    with pytest.raises(errors.BadRequest, match="batch 0 of q arrived after batch 1"):
        late.broker.staged.append(requests[0])
    assert late.broker.staged.append(requests[2]).ranges == {"t": {0: (2, 1)}}
    assert late.read() == [(n, b"a") for n in range(3)]


def test_a_table_that_cannot_be_read_is_asked_again(
    rig: Rig, store: MemoryStore, clock: ManualClock
) -> None:
    """If the batch cannot be looked up, that topic's batches wait, and others do not."""
    rig.create("u")
    row = payload(["a"])
    request = stage(rig, [("t", 0, row)], batch=7)
    rig.broker.staged.append(request)
    rig = grow_old(rig, clock, 31)

    class Unreadable(NoFaults):
        is_over = False

        def before(self, operation: Operation, path: str) -> None:
            if path.startswith("topics/t/_delta_log") and not self.is_over:
                raise errors.CorruptObject(path=path, check="a fault")

    fault = Unreadable()
    late = rig.successor(store=store.view(fault))
    again = stage(rig, [("t", 0, row)], batch=8)
    job = stage(rig, [("t", 0, row)], batch=0, query="job", kind=ONCE)
    for refused in (request, again):
        with pytest.raises(errors.TopicHeldBack, match="a fault"):
            late.broker.staged.append(refused)
    late.broker.staged.append(stage(rig, [("u", 0, row)], batch=0, query="other"))
    late.broker.staged.append(job)
    fault.is_over = True
    assert late.broker.staged.append(request).skipped
    assert late.broker.staged.append(again).ranges == {"t": {0: (2, 1)}}


def test_the_table_says_which_batches_it_has(rig: Rig, clock: ManualClock) -> None:
    """By a Delta `txn` of each query, in the commit that publishes; other engines read it."""
    for batch in (3, 4):
        rig.broker.staged.append(stage(rig, [("t", 0, payload(["a"]))], batch=batch))
    rig.broker.staged.append(stage(rig, [("t", 0, payload(["a"]))], batch=0, query="k", kind=KEY))
    rig.broker.staged.append(
        stage(rig, [("t", 0, payload(["a"]))], batch=0, query="once", kind=ONCE)
    )
    rig.publish()
    topic_id = rig.led_partitions.topic("t").topic_id
    table = TopicTable(rig.store, "t", clock=clock)
    table.refresh()
    (file,) = table.snapshot.files[0]
    query = table.txn(f"sparklog/{topic_id}/query/q")
    key = table.txn(f"sparklog/{topic_id}/key/k")
    assert query is not None
    assert key is not None
    assert (query.version, key.version, file.rows) == (4, 0, 4)
    assert query.last_updated == key.last_updated == clock.now_us() // 1_000
    assert len(table.batches(topic_id)) == 2


def test_a_key_is_known_for_thirty_days(rig: Rig, clock: ManualClock) -> None:
    """A write with an idempotency key is skipped so long, by any broker, and then forgotten."""
    first = stage(rig, [("t", 0, payload(["a"]))], batch=0, query="k", kind=KEY)
    rig.broker.staged.append(first)
    late = grow_old(rig, clock, 29)
    assert late.broker.staged.append(first).skipped
    later = grow_old(late, clock, 2)
    later.append(["x"])
    later.trim()
    with pytest.raises(errors.BadRequest, match="staged 31 d ago"):
        later.broker.staged.append(first)
    later.store.delete([f"staging/{name}" for name in paths(later.store, "staging")])
    again = stage(later, [("t", 0, payload(["b"]))], batch=0, query="k", kind=KEY)
    assert later.broker.staged.append(again).ranges == {"t": {0: (2, 1)}}
    later.publish()
    later.led_partitions.topic("t").table.checkpoint()
    assert later.broker.staged.append(again).skipped


def test_the_keys_of_a_table_are_bounded(
    rig: Rig, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest are kept, in memory and in the table's checkpoint; queries are not counted."""
    monkeypatch.setattr(limits, "KEYS_REMEMBERED", 3)
    row = payload(["a"])
    rig.broker.staged.append(stage(rig, [("t", 0, row)], batch=7))
    for number in range(5):
        rig.broker.staged.append(stage(rig, [("t", 0, row)], batch=0, query=f"k{number}", kind=KEY))
        rig.publish()
        clock.advance(1)
    late = grow_old(rig, clock, 1)
    topic_id = late.led_partitions.topic("t").topic_id
    assert [
        each.query for each, _, _ in late.led_partitions.topic("t").table.batches(topic_id)
    ] == ["q", "k2", "k3", "k4"]


def test_writes_without_a_name_fill_no_memory(rig: Rig, clock: ManualClock) -> None:
    """Some of a thousand unnamed writes are remembered, and none a day later; a query always is."""
    rig.broker.staged.append(stage(rig, [("t", 0, payload(["a"]))], batch=7))
    batches = rig.led_partitions.topic("t").partition(0).batches
    count = SINGLES_REMEMBERED + 100
    for number in range(count):
        name = f"job{number}"
        rig.broker.staged.append(
            stage(rig, [("t", 0, payload(["a"]))], batch=0, query=name, kind=ONCE)
        )
    # An unpublished batch could be committed again.
    assert len(list(batches)) == count + 1
    rig.publish()
    last = stage(rig, [("t", 0, payload(["a"]))], batch=0, query="last", kind=ONCE)
    rig.broker.staged.append(last)
    assert len(list(batches)) == SINGLES_REMEMBERED + 1
    assert rig.broker.staged.append(last).skipped
    assert rig.successor().broker.staged.append(last).skipped
    rig = rig.successor()
    late = grow_old(rig, clock, 1.05)
    assert [
        each.batch_id.query for each in late.led_partitions.topic("t").partition(0).batches
    ] == ["q"]
    assert late.broker.staged.append(stage(rig, [("t", 0, payload(["a"]))], batch=7)).skipped
    table = TopicTable(rig.store, "t", clock=clock)
    table.refresh()
    assert len(table.batches(rig.led_partitions.topic("t").topic_id)) == 1


def test_a_write_without_a_name_that_may_be_forgotten_is_refused(
    rig: Rig, clock: ManualClock
) -> None:
    """A driver that was suspended during its commit finds its rows once, or is asked to check."""
    request = stage(rig, [("t", 0, payload(["a"]))], batch=0, query="job", kind=ONCE)
    rig.broker.staged.append(request)
    rig.publish()
    for _ in range(2):
        clock.advance(11 * 3_600)
        rig.append(["b"])
        rig.wal_cleaner.checkpoint()
        rig = rig.successor()
        assert rig.broker.staged.append(request).skipped
    clock.advance(8 * 3_600)
    rig.append(["b"])
    rig.wal_cleaner.checkpoint()
    with pytest.raises(errors.BadRequest, match="was staged 30 h ago"):
        rig.broker.staged.append(request)
    assert [value for _, value in rig.read()].count(b"a") == 1


def test_a_batch_that_was_overtaken_is_refused(rig: Rig) -> None:
    """Two drivers of one query, whose commits cross in the writer's queue: the later one ends."""
    appends = [rig.stage([(0, ["a"])], batch=batch) for batch in (6, 5, 4)]
    pending_appends = [rig.writer.submit(each) for each in appends[:2]]
    assert rig.writer.wait(pending_appends[0])[0].base_offset == 0
    for pending in (pending_appends[1], rig.writer.submit(appends[2])):
        with pytest.raises(errors.BadRequest, match="arrived after batch 6"):
            rig.writer.wait(pending)
    assert rig.end() == 1


def test_the_times_of_staged_records_are_found(rig: Rig, clock: ManualClock) -> None:
    """The bounds of an entry hold the times that its rows brought, the epoch's first among them."""
    rig.broker.staged.append(stage(rig, [("t", 0, payload(["a", "b"], timestamp=[0, None]))]))
    (located,) = rig.led_partitions.topic("t").partition(0).unpublished
    entry = located.entry
    assert (entry.min_timestamp_us, entry.max_timestamp_us) == (0, clock.now_us())


def test_an_empty_batch_is_nothing(rig: Rig) -> None:
    """A batch without rows is appended without a trace."""
    assert rig.broker.staged.append(stage(rig, [])) == flight_messages.AppendStagedReply(ranges={})
    assert rig.end() == 0


STAGED_AT = "staging/q/1"


def test_a_batch_that_cannot_be_adopted(rig: Rig, store: MemoryStore) -> None:
    """An invalid batch is refused with the reason, and none of it is appended."""
    good = payload(["a"])
    cases: list[tuple[flight_messages.AppendStaged, type[errors.SparklogError]]] = [
        (flight_messages.AppendStaged(manifest=f"{STAGED_AT}/manifest.json"), errors.BadRequest),
        (flight_messages.AppendStaged(manifest="topics/t/_delta_log/0.json"), errors.BadRequest),
        (flight_messages.AppendStaged(manifest="../elsewhere/manifest.json"), errors.BadRequest),
        (stage(rig, [("t", 0, good), ("gone", 0, good)], batch=2), errors.UnknownTopic),
        (stage(rig, [("t", 0, good), ("t", 1, good)], batch=3), errors.UnknownPartition),
    ]
    lost = stage(rig, [("t", 0, good)], batch=4)
    name = next(name for name in paths(store, "staging/q/4") if name != "manifest.json")
    store.delete([f"staging/q/4/{name}"])
    cut = stage(rig, [("t", 0, good)], batch=5)
    name = next(name for name in paths(store, "staging/q/5") if name != "manifest.json")
    store.put(f"staging/q/5/{name}", b"short")
    cases += [(lost, errors.MissingObject), (cut, errors.CorruptObject)]
    for request, error in cases:
        with pytest.raises(error):
            rig.broker.staged.append(request)
    assert rig.end() == 0


# ------------------------------------------------------------------------------ a full disk


class SmallDisk(MemoryStore):
    """A disk whose free space the test sets."""

    free: int | None = None

    def free_bytes(self) -> int | None:
        return self.free


def test_a_full_disk_heals(clock: ManualClock) -> None:
    """Below the reserve all but records are accepted; records are again once there is space."""
    disk = SmallDisk(clock)
    options = RigOptions(writer=WriterLimits(free_space_reserve_bytes=1_000))
    rig = Rig(disk, clock, options=options)
    rig.create()
    rig.append(["a"])
    disk.free = 10
    request = stage(rig, [("t", 0, payload(["x"]))])
    for refused in (lambda: rig.append(["b"]), lambda: rig.broker.staged.append(request)):
        with pytest.raises(errors.StorageFull):
            refused()
    rig.broker.topics.create(create_request("u"))
    rig.broker.topics.compact("t")
    rig.broker.topics.delete("u")
    assert rig.read() == [(0, b"a")]
    rig.publish()
    disk.free = 1_000
    assert rig.append(["b"]).base_offset == 1
    rig.broker.staged.append(request)
    assert rig.read() == [(0, b"a"), (1, b"b"), (2, b"x")]


def test_the_folder_of_a_topic_is_its_name() -> None:
    """Anybody finds the table of a topic by its name alone."""
    assert table_folder("t") == "topics/t"


# ------------------------------------------------------------------------------ deletion


def delete(broker: Broker, *, topic: str = "t", **request: Any) -> dict[int, int]:
    """The log starts that are answered."""
    return broker.deletion.delete(flight_messages.DeleteRecords(topic=topic, **request)).starts


def numbered(first: int, end: int) -> list[tuple[int, bytes | None]]:
    """Records whose values are their offsets."""
    return [(number, b"%d" % number) for number in range(first, end)]


@pytest.mark.parametrize("hot_bytes", [0, 1 << 20])
@pytest.mark.parametrize("offset", [1, 3, 4, 5, 9, 12])
def test_deleted_records_are_out_of_reach(
    store: MemoryStore, clock: ManualClock, hot_bytes: int, offset: int
) -> None:
    """At once and for every reader, whether they were in memory, in the log or in the table."""
    rig = Rig(store, clock, options=RigOptions(hot_bytes=hot_bytes))
    rig.create()
    for first in range(0, 8, 4):
        rig.append([f"{number}" for number in range(first, first + 4)])
        rig.publish()
    rig.append([f"{number}" for number in range(8, 12)])
    broker, follower = rig.broker, RootFollower(store, clock=clock)
    assert rows_followed(follower, store) == rig.read() == numbered(0, 12)
    assert delete(broker, offsets={0: offset}) == {0: offset}
    (info,) = broker.topics.describe("t").partitions
    assert (info.start, broker.partitions.status("t", 0).start, info.end) == (offset, offset, 12)
    assert rows_of_table(store, clock) == numbered(offset, info.published)
    assert rows_of_root(store, clock) == rows_followed(follower, store) == numbered(offset, 12)
    assert rig.read(start=offset) == numbered(offset, 12)
    tail = broker.tail([flight_messages.TailPosition(topic="t", partition=0, offset=offset)])
    assert rows_of(itertools.islice(tail, 1))[0] == numbered(offset, 12)[0] if offset < 12 else True
    for refused in (0, offset - 1):
        with pytest.raises(errors.OffsetOutOfRange) as error:
            broker.read("t", 0, refused, 12)
        assert (error.value.start, error.value.end) == (offset, 12)
        with pytest.raises(errors.OffsetOutOfRange):
            broker.tail([flight_messages.TailPosition(topic="t", partition=0, offset=refused)])
        with pytest.raises(errors.OffsetOutOfRange):
            broker.fetch_kafka("t", 0, refused, limit_bytes=1_000)
        with pytest.raises(errors.OffsetOutOfRange):
            follower.plan("t", follower.refresh(["t"])["t"], 0, refused, 12)
    request = flight_messages.OffsetsForTimes(topic="t", timestamps_us={0: 0})
    assert broker.offsets_for_times(request).offsets == {0: offset if offset < 12 else -1}
    assert broker.greatest_time("t", 0)[1] == (offset if offset < 12 else -1)
    assert rig.append(["12"]).base_offset == 12
    assert rig.read(start=offset) == numbered(offset, 13)


def test_deletion_of_all_there_is(rig: Rig, store: MemoryStore) -> None:
    """Waiting records are published first; then the log starts at its end, in the table as well."""
    rig.append(["0", "1", "2"])
    assert delete(rig.broker, offsets={0: -1}) == {0: 3}
    snapshot = TopicTable(store, "t", clock=rig.clock).refresh()
    assert snapshot.starts == snapshot.ends == (3,)
    assert snapshot.files == ((),)
    assert rig.read(start=3) == []
    assert delete(rig.broker, offsets={0: -1}) == {0: 3}
    rig.append(["3"])
    rig.publish()
    assert rig.read(start=3) == rows_of_table(store, rig.clock) == [(3, b"3")]


def test_what_was_deleted_stays_so(rig: Rig, store: MemoryStore, clock: ManualClock) -> None:
    """For the next broker, and for the one after a power cut; a repetition changes nothing."""
    rig.append([f"{number}" for number in range(10)])
    assert delete(rig.broker, offsets={0: 6}) == {0: 6}
    version = TopicTable(store, "t", clock=clock).refresh().version
    store.lose_unsynced(lambda _: True)
    successor = rig.successor()
    assert successor.broker.partitions.status("t", 0).start == 6
    assert successor.read(start=6) == numbered(6, 10)
    for offset in (6, 5, 0):
        assert delete(successor.broker, offsets={0: offset}) == {0: 6}
    assert TopicTable(store, "t", clock=clock).refresh().version == version
    with pytest.raises(errors.BrokerFenced):
        delete(rig.broker, offsets={0: 8})
    assert successor.broker.partitions.status("t", 0).start == 6


def test_what_cannot_be_deleted(rig: Rig, store: MemoryStore) -> None:
    """It is refused before anything has happened in any partition."""
    rig.broker.topics.create(create_request("u", 3))
    rig.broker.topics.create(create_request("c", config={"cleanup.policy": "compact"}))
    rig.append(["0", "1"], topic="u")
    before = paths(store, "")
    with pytest.raises(errors.OffsetOutOfRange) as error:
        delete(rig.broker, topic="u", offsets={0: 1, 1: 1})
    assert (error.value.partition, error.value.start, error.value.end) == (1, 0, 0)
    with pytest.raises(errors.OffsetOutOfRange):
        delete(rig.broker, topic="u", offsets={0: -2})
    with pytest.raises(errors.UnknownPartition):
        delete(rig.broker, topic="u", offsets={0: 1, 3: 0})
    with pytest.raises(errors.UnknownTopic):
        delete(rig.broker, topic="x", offsets={0: 1})
    with pytest.raises(errors.PolicyViolation):
        delete(rig.broker, topic="c", offsets={0: 0})
    assert paths(store, "") == before
    rig.broker.topics.alter(
        flight_messages.AlterTopic(topic="c", config={"cleanup.policy": "compact,delete"})
    )
    assert delete(rig.broker, topic="c", offsets={0: 0}) == {0: 0}


def test_deletion_waits_for_the_table(rig: Rig, store: MemoryStore) -> None:
    """Records that cannot be published are not deleted either, and the error says why."""
    rig.append(["0", "1"])
    rig.broker.publishing.publish_now = lambda: None
    with pytest.raises(errors.TimedOut):
        delete(rig.broker, offsets={0: 1}, timeout_seconds=1.0)
    assert rig.broker.partitions.status("t", 0).start == 0
    assert rig.read() == numbered(0, 2)


def test_a_read_that_is_overtaken(
    store: MemoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of records that are deleted meanwhile gets the new log start offset."""
    monkeypatch.setattr(limits, "SMALL_FILE_BYTES", 0)  # joins no files
    rig = Rig(store, clock, options=COLD)
    rig.create()
    for number in range(6):
        rig.append([f"{number}"])
        rig.publish()
    reading = rig.broker.read("t", 0, 0, 6)
    assert rows_of([next(reading)]) == [(0, b"0")]
    delete(rig.broker, offsets={0: 4})
    with pytest.raises(errors.OffsetOutOfRange) as error:
        next(reading)
    assert error.value.start == 4


def test_a_start_that_somebody_else_has_moved(rig: Rig, store: MemoryStore) -> None:
    """A predecessor may delete still, just after it was replaced: noticed with the next look."""
    rig.append([f"{number}" for number in range(6)])
    rig.publish()
    topic_id = rig.led_partitions.topic("t").topic_id
    retention.delete_records(TopicTable(store, "t", clock=rig.clock), topic_id, {0: 4})
    assert rig.broker.partitions.status("t", 0).start == 0
    rig.append(["6"])
    rig.publish()
    assert rig.broker.partitions.status("t", 0).start == 4
    request = flight_messages.OffsetsForTimes(topic="t", timestamps_us={0: 0})
    assert rig.broker.offsets_for_times(request).offsets == {0: 4}
    assert rig.broker.greatest_time("t", 0)[1] == 4
    retention.delete_records(TopicTable(store, "t", clock=rig.clock), topic_id, {0: 5})
    rig.janitor.tick()
    assert rig.broker.partitions.status("t", 0).start == 5


def test_the_status_names_some_of_the_topics_that_are_held_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are, the answer stays small."""
    monkeypatch.setattr(limits, "STATUS_TOPICS", 2)
    for number in range(4):
        rig.create(f"held{number}")
        rig.led_partitions.topic(f"held{number}").held_back = "a reason"
        shown = rig.broker.status().held_back
        assert [each.reason for each in shown] == ["a reason"] * min(number + 1, 2)
