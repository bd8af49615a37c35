"""Limits of a topic's configuration: sizes and times of our own, Kafka's and staged batches."""

from __future__ import annotations

import pyarrow as pa
import pytest

from sparklog import errors
from sparklog.broker.log.flush import WriterLimits
from sparklog.broker.log.preparing import KAFKA_RECORD_ERRORS
from sparklog.clock import ManualClock
from sparklog.formats import flight_messages, record_batch
from sparklog.storage.objects import MemoryStore
from sparklog.storage.staging import manifest
from tests.support.batches import Record, built, changed, split
from tests.support.brokers import Rig, RigOptions, payload

pytestmark = pytest.mark.rig(topics={})

MINUTE_MS = 60_000
BOUNDS = {
    "message.timestamp.before.max.ms": str(2 * MINUTE_MS),
    "message.timestamp.after.max.ms": str(MINUTE_MS),
}


def create(rig: Rig, **config: str) -> None:
    """Topic t of one partition; underscores stand for dots."""
    rig.create("t", 1, **config)


def create_bounded(rig: Rig) -> None:
    """Topic t, which takes times from two minutes ago to one ahead."""
    rig.broker.topics.create(flight_messages.CreateTopic(topic="t", partitions=1, config=BOUNDS))


def append_kafka(rig: Rig, *given: Record, codec: int = 0) -> int:
    """The base offset."""
    pending = rig.broker.submit(rig.broker.prepare_kafka("t", 0, built(given, codec)))
    return rig.broker.wait(pending)[0].base_offset


# ------------------------------------------------------------------------------ times


@pytest.mark.parametrize("off_ms", [-2 * MINUTE_MS, 0, MINUTE_MS])
def test_a_time_within_the_bounds_is_taken(rig: Rig, clock: ManualClock, off_ms: int) -> None:
    """To the millisecond, whichever fraction of one the broker's clock shows."""
    create_bounded(rig)
    at_ms = clock.now_us() // 1_000 + off_ms
    append_kafka(rig, Record(at_ms, b"k", b"v"))
    rig.append(["v"], timestamp=[at_ms * 1_000])
    rig.append(["v"], timestamp=[None])
    assert rig.end() == 3


@pytest.mark.parametrize("off_ms", [-2 * MINUTE_MS - 1, MINUTE_MS + 1])
def test_a_time_beyond_the_bounds_is_refused(rig: Rig, clock: ManualClock, off_ms: int) -> None:
    """With its batch, of whichever client, and a staged one; unless the time is the broker's."""
    create_bounded(rig)
    now_ms = clock.now_us() // 1_000
    rows = payload(["a", "b"], timestamp=[now_ms * 1_000, (now_ms + off_ms) * 1_000])
    append_staged = stage(rig, rows)
    given = [Record(now_ms, b"k", b"v"), Record(now_ms + off_ms, b"k", b"v")]
    for call in (
        lambda: append_kafka(rig, *given),
        lambda: rig.broker.append("t", 0, rows),
        lambda: rig.broker.staged.append(append_staged),
    ):
        with pytest.raises(errors.BadTimestamp, match=str(now_ms + off_ms)):
            call()
    assert rig.end() == 0
    config: dict[str, str | None] = {"message.timestamp.type": "LogAppendTime"}
    rig.broker.topics.alter(flight_messages.AlterTopic(topic="t", config=config))
    append_kafka(rig, *given)
    rig.broker.wait(rig.broker.append("t", 0, rows))
    rig.broker.staged.append(append_staged)
    assert rig.end() == 6


def stage(rig: Rig, rows: pa.RecordBatch) -> flight_messages.AppendStaged:
    """A batch of a query with its manifest."""
    writer = manifest.StagingWriter(rig.store, query="q", batch=1, clock=rig.clock)
    writer.add("t", 0, rows)
    found = manifest.Manifest(query="q", batch=1, sections=tuple(writer.finish()))
    return flight_messages.AppendStaged(manifest=manifest.write(rig.store, found, rig.clock).path)


def test_a_record_without_a_time_is_not_too_early(rig: Rig, clock: ManualClock) -> None:
    """-1 ms is how Kafka's clients say that there is none; -2 is a time."""
    create_bounded(rig)
    now_ms = clock.now_us() // 1_000
    assert append_kafka(rig, Record(now_ms, b"k", b"v"), Record(-1, b"k", b"v")) == 0
    with pytest.raises(errors.BadTimestamp) as refused:
        append_kafka(rig, Record(now_ms, b"k", b"v"), Record(-1, b"k", b"v"), Record(-2, b"", b""))
    assert [index for index, _ in refused.value.records] == [2]


@pytest.mark.parametrize("base_ms", [2**63 - 1, -(2**63)])
def test_times_beyond_an_int64_are_refused(rig: Rig, base_ms: int) -> None:
    """A header's base with a record's delta may come to anything."""
    create(rig)
    batch = built(
        [Record(1_000, b"k", b"v"), Record(1_000 + (9 if base_ms > 0 else -9), b"k", b"v")]
    )
    with pytest.raises(errors.BadTimestamp):
        rig.broker.prepare_kafka("t", 0, changed(batch, 27, ">q", base_ms))
    assert rig.end() == 0


def test_so_many_refused_records_are_named(rig: Rig) -> None:
    """A batch may have a million, and an answer must not."""
    create(rig, message_timestamp_before_max_ms="1")
    given = [Record(1, b"k", b"v")] * (KAFKA_RECORD_ERRORS + 1)
    with pytest.raises(errors.BadTimestamp) as refused:
        append_kafka(rig, *given)
    assert len(refused.value.records) == KAFKA_RECORD_ERRORS


# ------------------------------------------------------------------------------ sizes


def test_a_topic_may_take_less_than_its_broker(rig: Rig) -> None:
    """Batches of Kafka's as they come, records of ours; clients learn it with the topic."""
    one = Record(1, b"k", b"v" * 50)
    size = len(built([one]))
    create(rig, max_message_bytes=str(size))
    assert rig.broker.topics.describe("t").max_record_bytes == size
    assert append_kafka(rig, one) == 0
    for call, what in (
        (lambda: append_kafka(rig, one, one), "a batch"),
        (lambda: rig.broker.append("t", 0, payload([b"v" * (size + 1)])), "a record"),
    ):
        with pytest.raises(errors.MessageTooLarge, match=what) as refused:
            call()
        assert refused.value.limit_bytes == size
    # In Kafka's encoding each of these would fit into a batch of its own.
    assert rig.append([b"v" * size] * 9).base_offset == 1


def test_the_brokers_bounds_stand_above_the_topics(clock: ManualClock) -> None:
    """They are of its memory, whatever a topic says."""
    bounds = WriterLimits(max_record_bytes=100, max_batch_bytes=500)
    rig = Rig(MemoryStore(clock), clock, options=RigOptions(writer=bounds))
    create(rig, max_message_bytes="100000")
    assert rig.broker.topics.describe("t").max_record_bytes == 100
    with pytest.raises(errors.RecordTooLarge):
        rig.broker.append("t", 0, payload([b"v" * 101]))
    with pytest.raises(errors.BatchTooLarge):
        append_kafka(rig, *[Record(1, b"k", b"v" * 90)] * 6)


def test_a_batch_that_outgrows_its_topic_is_refused(rig: Rig) -> None:
    """Compressed it would do, but the topic wants it otherwise."""
    one = Record(1, b"k", b"v" * 5_000)
    create(rig, max_message_bytes="1000", compression_type="uncompressed")
    with pytest.raises(errors.MessageTooLarge):
        append_kafka(rig, one, codec=1)
    rig.broker.topics.alter(
        flight_messages.AlterTopic(topic="t", config={"compression.type": "zstd"})
    )
    assert append_kafka(rig, one, codec=1) == 0


def test_a_batch_in_another_codec_keeps_its_producer(rig: Rig) -> None:
    """A retry of it is a duplicate in any codec."""
    create(rig, compression_type="lz4")
    producer_sequence = {"producer_id": 7, "producer_epoch": 0, "base_sequence": 0}
    batch = built([Record(1, b"k", b"v")], 1, **producer_sequence)
    for _ in range(2):
        (stands,) = rig.broker.wait(rig.broker.submit(rig.broker.prepare_kafka("t", 0, batch)))
        assert stands.base_offset == 0
    found = rig.broker.fetch_kafka("t", 0, 0, limit_bytes=1 << 20, only_memory=True)
    assert found is not None
    codecs = [record_batch.read_header(each).codec for each in split(found.pieces)]
    assert codecs == [record_batch.Codec.LZ4]
    (producer,) = rig.broker.partitions.producers("t", 0)
    assert (producer.producer_id, producer.last_sequence) == (7, 0)
