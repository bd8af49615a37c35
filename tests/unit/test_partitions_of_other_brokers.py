"""A topic of which a broker leads some partitions, and another broker the others."""

from __future__ import annotations

from typing import Any
from unittest import mock

import msgspec
import pytest
from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.log import takeover
from sparklog.broker.log.producer_state import ProducerSequence
from sparklog.clock import ManualClock
from sparklog.formats.flight_messages import AddPartitions, DeleteRecords
from sparklog.storage.follow import RootFollower
from sparklog.storage.metadata.leadership import register
from sparklog.storage.metadata.model import BrokerRegistration, ClusterMetadata
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import MemoryStore
from sparklog.storage.snapshot import NOT_LED, WalKind
from sparklog.storage.table.changes import TableChange
from sparklog.storage.table.names import end_app_id
from sparklog.storage.table.topic_table import TopicTable
from sparklog.storage.wal.objects import newest_checkpoint
from tests.support.brokers import Rig, payload

LEADERS = (7, 1, 7, 1)


def divided(rig: Rig) -> Rig:
    """The next broker 1, which leads partitions 1 and 3 of topic t; broker 7 leads the others."""
    take = takeover.take

    def take_some(*arguments: Any, **options: Any) -> takeover.Taken:
        taken = take(*arguments, **options)

        def divide(metadata: ClusterMetadata) -> ClusterMetadata:
            other = BrokerRegistration(epoch=0, flight="127.0.0.1:7")
            metadata = register(metadata, 7, other, WalKind.OBJECTS)
            topic = msgspec.structs.replace(metadata.topics["t"], leaders=LEADERS)
            open_epochs = tuple(
                msgspec.structs.replace(each, heirs=(1, 7)) if each.fenced else each
                for each in metadata.open_epochs
            )
            return msgspec.structs.replace(
                metadata, open_epochs=open_epochs, topics={**metadata.topics, "t": topic}
            )

        metadata = MetadataStore(rig.store, clock=rig.clock).change(divide)
        return takeover.Taken(
            leadership=taken.leadership, metadata=metadata, histories=taken.histories
        )

    with mock.patch.object(takeover, "take", take_some):
        return rig.successor()


@pytest.fixture(name="rig")
def _rig(store: MemoryStore, clock: ManualClock) -> Rig:
    """Each partition has a record in the table and one in the write-ahead log."""
    whole = Rig(store, clock)
    whole.create("t", 4)
    for sequence, value in enumerate("ab"):
        for number in range(4):
            ids = (9, 0, sequence)
            whole.append([f"{value}{number}"], partition=number, producer_sequence=ids)
        if not sequence:
            whole.publish()
    return divided(whole)


def test_it_appends_to_and_reads_its_own(rig: Rig) -> None:
    """Requests for the others name their leader, and change nothing."""
    assert rig.append(["c"], partition=3).base_offset == 2
    assert rig.read(partition=3) == [(0, b"a3"), (1, b"b3"), (2, b"c")]
    for request in (
        lambda: rig.append(["c"], partition=2),
        lambda: rig.read(partition=2),
        lambda: rig.broker.partitions.status("t", 2),
        lambda: rig.broker.partitions.epoch_end("t", 2, 0),
        lambda: rig.broker.partitions.check_leader_epoch("t", 2, 0),
        lambda: rig.broker.partitions.producers("t", 2),
        lambda: rig.broker.deletion.delete(
            DeleteRecords(topic="t", offsets={2: 1}, timeout_seconds=1.0)
        ),
        lambda: rig.broker.deletion.delete(
            DeleteRecords(topic="t", offsets={1: 1, 2: 1}, timeout_seconds=1.0)
        ),
    ):
        with pytest.raises(errors.NotLeader, match="t-2; send the request to the leader, broker 7"):
            request()
    assert code_of(errors.NotLeader(topic="t", partition=2, leader=7)) is (
        ErrorCode.not_leader_or_follower
    )
    with pytest.raises(errors.UnknownPartition, match="0 to 3"):
        rig.append(["c"], partition=4)
    assert rig.led_partitions.topic("t").partitions[1].start == 0


def test_it_describes_all(rig: Rig) -> None:
    """All partitions have a leader; the offsets of the others are not known here."""
    described = rig.broker.topics.describe("t").partitions
    assert [(each.partition, each.leader, each.end) for each in described] == [
        (0, 7, -1),
        (1, 1, 2),
        (2, 7, -1),
        (3, 1, 2),
    ]
    statuses = rig.broker.partitions.statuses("t")
    assert [(each.leader, each.leader_epoch, each.end) for each in statuses] == [
        (7, 1, -1),
        (1, 1, 2),
        (7, 1, -1),
        (1, 1, 2),
    ]
    assert [each.leader for each in statuses[1:3]] == [1, 7]
    assert rig.broker.partitions.count("t") == 4
    assert rig.broker.status().partitions == 2
    assert rig.broker.partitions.log_bytes()["t"].keys() == {1, 3}


def test_it_publishes_its_own(rig: Rig) -> None:
    """The other broker commits to the same table before and after, and neither is in the way."""
    topic_id = rig.led_partitions.topic("t").topic_id
    other = TopicTable(rig.store, "t", clock=rig.clock)

    def commit(end: int) -> None:
        other.commit(lambda _: TableChange(txns={end_app_id(topic_id, 0): end}))

    commit(2)
    rig.append(["c"], partition=1)
    rig.publish()
    assert other.refresh().ends == (2, 3, 1, 2)
    commit(5)
    rig.append(["d"], partition=1)
    rig.publish()
    assert other.refresh().ends == (5, 4, 1, 2)
    rig.confirmer.confirm()
    rig.janitor.tick()
    assert not rig.led_partitions.backlog.waiting()


def test_its_checkpoint_has_its_own(rig: Rig) -> None:
    """A successor takes the state of each partition from the checkpoint of its last leader."""
    rig.append(["c"], partition=1, producer_sequence=(9, 0, 2))
    rig.publish()
    rig.wal_cleaner.checkpoint()
    topic = rig.led_partitions.topic("t")
    checkpoint = newest_checkpoint(rig.store, 1, rig.leadership.epoch)
    assert checkpoint is not None
    assert checkpoint.bounds is not None
    found = checkpoint.bounds[topic.topic_id]
    assert [each == NOT_LED for each in found] == [True, False, True, False]
    follower = RootFollower(rig.store, clock=rig.clock)
    (snapshot,) = follower.refresh(["t"]).values()
    assert [follower.beyond(snapshot, number) for number in range(4)] == [None] * 4

    whole = rig.successor()
    assert whole.broker.topics.describe("t").partitions[0].leader == 1
    for number, sequence in enumerate((1, 2, 1, 1)):
        again = whole.append(["again"], partition=number, producer_sequence=(9, 0, sequence))
        assert again.duplicate, number
    for number in range(4):
        expected = [(0, b"a%d" % number), (1, b"b%d" % number)]
        assert whole.read(partition=number) == expected + [(2, b"c")] * (number == 1)


def test_it_leaves_no_epoch_that_the_others_need(rig: Rig) -> None:
    """Its own entries of the older epoch are published; those of the others are not."""
    rig.publish()
    rig.wal_cleaner.checkpoint()
    rig.wal_cleaner.tick()
    (older, *_) = rig.meta.reload().open_epochs
    assert (older.id, older.heirs) == ((1, 1), (7,))


def test_partitions_are_added(rig: Rig) -> None:
    """The broker that adds partitions leads them, and the others keep their leaders."""
    described = rig.broker.topics.add_partitions(AddPartitions(topic="t", partitions=6))
    assert [each.leader for each in described.partitions] == [*LEADERS, 1, 1]
    assert rig.meta.reload().topics["t"].leaders == (*LEADERS, 1, 1)
    assert rig.append(["c"], partition=5).base_offset == 0
    with pytest.raises(errors.NotLeader):
        rig.broker.append("t", 0, payload(["c"]), ProducerSequence(1, 0, 0))


def test_a_deleted_topic_is_gone_whoever_led_it(rig: Rig) -> None:
    """Its entries count as published, and its table is empty."""
    rig.broker.topics.delete("t")
    assert rig.broker.topics.names() == []
    assert TopicTable(rig.store, "t", clock=rig.clock).refresh().topic_id is None
    assert not rig.led_partitions.backlog.waiting()
