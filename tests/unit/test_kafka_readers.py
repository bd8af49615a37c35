"""Old records for Kafka consumers: how many batches are encoded, and how many are returned."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from sparklog import errors, limits
from sparklog.broker.log.kafka_readers import MADE_BYTES, Fetched, KafkaReader
from sparklog.clock import ManualClock
from sparklog.formats import flight_messages, record_batch
from sparklog.storage.objects import MemoryStore
from sparklog.storage.reading import read as reads
from sparklog.storage.table.changes import TableChange
from sparklog.storage.table.names import data_path
from sparklog.storage.table.topic_table import TopicTable
from tests.support.batches import Record, built, split
from tests.support.brokers import Rig, RigOptions

VALUE_BYTES = 100_000
RECORDS = 40
BATCH_RECORDS = 2
"""Values of this size in a batch of `BATCH_BYTES`."""


def rig_with_rows(clock: ManualClock) -> Rig:
    """Topic t with large records in its table, and an empty hot tail."""
    rig = Rig(MemoryStore(clock), clock, options=RigOptions(hot_bytes=0, commit_bytes=64 << 20))
    rig.create()
    rig.append([bytes(VALUE_BYTES)] * RECORDS)
    rig.publish()
    return rig


def reader_of(rig: Rig) -> KafkaReader:
    """A reader as the broker builds it."""
    return KafkaReader(rig.broker._reader, rig.led_partitions, rig.hot, clock=rig.clock)


@pytest.fixture(name="encoded")
def _encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of each batch that is encoded from rows."""
    found: list[int] = []
    encode = record_batch.encode

    def counted(*rows: Any, **options: Any) -> Iterator[bytearray]:
        for batch in encode(*rows, **options):
            found.append(len(batch))
            yield batch

    monkeypatch.setattr(record_batch, "encode", counted)
    return found


def offsets_in(found: Fetched | None) -> list[int]:
    """The offsets of the records that a consumer gets, in order."""
    assert found is not None
    offsets: list[int] = []
    data = b"".join(bytes(piece) for piece in found.pieces)
    for batch in split([data]):
        first = record_batch.read_header(batch).base_offset
        offsets += range(first, first + record_batch.read_header(batch).record_count)
    assert found.end == offsets[-1] + 1 if offsets else not found.pieces
    return offsets


@pytest.mark.parametrize("free_batches", [0, 5, 1_000])
def test_no_more_is_encoded_than_is_fetched_or_cached(
    clock: ManualClock, encoded: list[int], monkeypatch: pytest.MonkeyPatch, free_batches: int
) -> None:
    """Many rows are read at once, and the cache may have no space for most of their batches."""
    rig = rig_with_rows(clock)
    batch_bytes = BATCH_RECORDS * (VALUE_BYTES + 500)
    monkeypatch.setattr("sparklog.broker.log.kafka_readers.AHEAD_BYTES", free_batches * batch_bytes)
    found = reader_of(rig).fetch("t", 0, 0, limit_bytes=3 * batch_bytes)
    assert offsets_in(found) == list(range(3 * BATCH_RECORDS))
    assert sum(encoded) <= max(4, free_batches + 1) * batch_bytes
    assert len(encoded) <= 2 * MADE_BYTES // batch_bytes


@pytest.mark.parametrize("limit_bytes", [1, 600_000, 8_000_000])
def test_a_sequential_reader_has_each_row_read_once(clock: ManualClock, limit_bytes: int) -> None:
    """However little it fetches at a time, its place in the file is kept."""
    rig = rig_with_rows(clock)
    reader, offset, size = reader_of(rig), 0, 0
    while offset < RECORDS:
        found = reader.fetch("t", 0, offset, limit_bytes=limit_bytes)
        assert found is not None
        size += sum(map(len, found.pieces))
        offset = found.end
    assert 0.9 * size <= reader.read_bytes <= 1.3 * size
    rig.append([bytes(VALUE_BYTES)])
    rig.publish()
    assert offsets_in(reader.fetch("t", 0, RECORDS, limit_bytes=1)) == [RECORDS]


def test_readers_without_a_kept_place_share_the_rows_that_are_read_at_once(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not drive each other's places out, and do not read rows for each fetch."""
    monkeypatch.setattr("sparklog.broker.log.kafka_readers.CURSORS_KEPT", 0)
    reader, offset = reader_of(rig_with_rows(clock)), 0
    while offset < RECORDS:
        found = reader.fetch("t", 0, offset, limit_bytes=1)
        assert found is not None
        offset = found.end
    assert reader.read_bytes < 1.1 * RECORDS * VALUE_BYTES


def test_small_files_are_joined_to_one_batch(clock: ManualClock, encoded: list[int]) -> None:
    """A batch for each file would cost a consumer of many partitions more than its records."""
    rig = Rig(MemoryStore(clock), clock, options=RigOptions(hot_bytes=0))
    rig.create()
    for number in range(5):
        rig.append([f"{number}", "more"])
        rig.publish()
    found = reader_of(rig).fetch("t", 0, 0, limit_bytes=1 << 20)
    assert offsets_in(found) == list(range(10))
    assert len(encoded) == 1


def test_records_before_a_damaged_file_are_read(clock: ManualClock) -> None:
    """Files that are read together fail one by one, for consumers of any kind."""
    rig = Rig(MemoryStore(clock), clock, options=RigOptions(hot_bytes=0))
    rig.create()
    for number in range(3):
        rig.append([f"{number}"])
        rig.publish()
    damaged = rig.led_partitions.topic("t").table.snapshot.files[0][2]
    rig.store.put(data_path("t", damaged), b"PAR1")
    found: list[int] = []
    offsets = (batch.rows.column("offset").to_pylist() for batch in rig.broker.read("t", 0, 0, 3))
    with pytest.raises(errors.CorruptObject):
        found.extend(offset for each in offsets for offset in each)
    assert found == [0, 1]
    reader = reader_of(rig)
    assert offsets_in(reader.fetch("t", 0, 0, limit_bytes=1 << 20)) == [0, 1]
    with pytest.raises(errors.CorruptObject):
        reader.fetch("t", 0, 2, limit_bytes=1 << 20)


def test_joined_files_are_light(
    clock: ManualClock, encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few bytes of a file may be many when they are decoded."""
    monkeypatch.setattr(limits, "READ_RUN_BYTES", 30_000)
    rig = Rig(MemoryStore(clock), clock, options=RigOptions(hot_bytes=0))
    rig.create()
    for _ in range(5):
        rig.append([bytes(10_000)])
        rig.publish()
    sizes = [batch.rows.nbytes for batch in rig.broker.read("t", 0, 0, 5)]
    assert sum(sizes) > 50_000
    assert max(sizes) <= 30_000
    assert offsets_in(reader_of(rig).fetch("t", 0, 0, limit_bytes=1 << 20)) == list(range(5))


def test_a_place_in_a_file_is_kept_for_some_seconds(clock: ManualClock) -> None:
    """Rows may leave the table, so a slow reader's place is looked up again."""
    reader = reader_of(rig_with_rows(clock))
    found = reader.fetch("t", 0, 0, limit_bytes=1)
    assert found is not None
    read_bytes, offset = reader.read_bytes, found.end
    clock.advance(11.0)
    assert reader.fetch("t", 0, offset, limit_bytes=1) is not None
    assert reader.read_bytes > read_bytes


def test_encoded_batches_serve_later_fetches(clock: ManualClock, encoded: list[int]) -> None:
    """A consumer that continues gets all records, in order, and each is encoded once."""
    reader, offset, turns = reader_of(rig_with_rows(clock)), 0, 0
    while offset < RECORDS:
        found = reader.fetch("t", 0, offset, limit_bytes=600_000)
        assert found is not None
        assert sum(map(len, found.pieces)) <= 600_000
        assert offsets_in(found) == list(range(offset, found.end))
        offset = found.end
        turns += 1
    assert len(encoded) == RECORDS // BATCH_RECORDS
    assert turns == -(-len(encoded) // 2)
    for only_memory in (False, True):  # no read is needed at the end of the log
        nothing = reader.fetch("t", 0, RECORDS, limit_bytes=1, only_memory=only_memory)
        assert nothing == Fetched((), RECORDS)
    with pytest.raises(errors.OffsetOutOfRange):
        reader.fetch("t", 0, RECORDS + 1, limit_bytes=1)


def test_a_fetch_of_exactly_some_batches_gets_them(clock: ManualClock) -> None:
    """The limit holds exactly, for new and for cached batches; a byte less is a batch less."""
    rig = rig_with_rows(clock)
    one = reader_of(rig).fetch("t", 0, 0, limit_bytes=1)
    assert one is not None
    size = sum(map(len, one.pieces))
    for limit_bytes, batches in ((2 * size, 2), (2 * size - 1, 1)):
        reader = reader_of(rig)
        for _ in range(2):
            found = reader.fetch("t", 0, 0, limit_bytes=limit_bytes)
            assert offsets_in(found) == list(range(batches * BATCH_RECORDS))


def test_rows_that_compress_to_nothing_are_read_within_bounds(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A megabyte of batches that compress well could take a gigabyte of rows."""
    rig = Rig(MemoryStore(clock), clock, options=RigOptions(hot_bytes=0))
    rig.create(compression_type="zstd")
    for _ in range(RECORDS):
        rig.append([bytes(VALUE_BYTES)])
    most = 5
    monkeypatch.setattr(limits, "ROW_GROUP_BYTES", most * VALUE_BYTES)
    read: list[int] = []
    encode = record_batch.encode

    def counted(rows: pa.RecordBatch, **options: Any) -> Iterator[bytearray]:
        read.append(rows.num_rows)
        return encode(rows, **options)

    monkeypatch.setattr(record_batch, "encode", counted)
    reader, offset = reader_of(rig), 0
    while offset < RECORDS:
        before = sum(read)
        found = reader.fetch("t", 0, offset, limit_bytes=1_000)
        assert found is not None
        assert offsets_in(found) == list(range(offset, found.end))
        offset = found.end
        assert sum(read) - before <= most + 1
    assert sum(read) == RECORDS


def test_a_consumer_skips_records_that_another_engine_deleted(clock: ManualClock) -> None:
    """If all records of a fetch are deleted, an empty batch leads to the next offset."""
    rig = rig_with_rows(clock)
    table = TopicTable(rig.store, "t", clock=clock)
    (file,) = table.refresh().files[0]
    table.commit(lambda _: TableChange(removes=(file,), operation="DELETE"))
    rig.append(["after"])
    rig.broker.partitions.status("t", 0)
    reader, offset, found = reader_of(rig), 0, None
    while offset < RECORDS:
        found = reader.fetch("t", 0, offset, limit_bytes=1 << 20)
        assert found is not None
        assert offset < found.end
        offset = found.end
    assert offsets_in(reader.fetch("t", 0, RECORDS, limit_bytes=1 << 20)) == [RECORDS]


@pytest.mark.parametrize("kind", ["as it came", "made of rows"])
def test_the_first_batch_is_returned_if_it_fits_or_must_be(clock: ManualClock, kind: str) -> None:
    """A first batch of exactly the limit is returned."""
    rig = Rig(MemoryStore(clock), clock)
    rig.create()
    if kind == "as it came":
        batch = built([Record(1, None, b"v" * 1_000)], 0)
        rig.broker.wait(rig.broker.submit(rig.broker.prepare_kafka("t", 0, batch)))
    else:
        rig.append([b"v" * 1_000])
    reader = reader_of(rig)
    first = reader.fetch("t", 0, 0, limit_bytes=1)
    assert offsets_in(first) == [0]
    assert first is not None
    size = sum(map(len, first.pieces))
    for limit_bytes, offsets in ((size - 1, []), (size, [0])):
        found = reader.fetch("t", 0, 0, limit_bytes=limit_bytes, at_least_one=False)
        assert offsets_in(found) == offsets
    # Kafka batches in the hot tail, and batches in the cache, are returned at once.
    assert offsets_in(reader.fetch("t", 0, 0, limit_bytes=1, only_memory=True)) == [0]
    fresh = reader_of(rig).fetch("t", 0, 0, limit_bytes=1, only_memory=True)
    assert (fresh is not None) is (kind == "as it came")


@pytest.mark.parametrize("kind", ["as it came", "made of rows"])
def test_deleted_records_are_not_returned_from_memory(clock: ManualClock, kind: str) -> None:
    """Records below the log start are not returned, although they are still in memory."""
    rig = Rig(MemoryStore(clock), clock)
    rig.create()
    for number in range(2):
        if kind == "as it came":
            batch = built([Record(1, None, b"%d" % number)], 0)
            rig.broker.wait(rig.broker.submit(rig.broker.prepare_kafka("t", 0, batch)))
        else:
            rig.append([f"{number}"])
    reader = reader_of(rig)
    assert offsets_in(reader.fetch("t", 0, 0, limit_bytes=1 << 20)) == [0, 1]
    rig.broker.deletion.delete(flight_messages.DeleteRecords(topic="t", offsets={0: 1}))
    with pytest.raises(errors.OffsetOutOfRange):
        reader.fetch("t", 0, 0, limit_bytes=1 << 20)
    assert offsets_in(reader.fetch("t", 0, 1, limit_bytes=1 << 20)) == [1]


def test_a_reader_continues_over_batches_and_rows(clock: ManualClock) -> None:
    """Kafka batches and rows may alternate in a partition."""
    rig = Rig(MemoryStore(clock), clock)
    rig.create()
    for number in range(6):
        if number % 2:
            rig.append([f"{number}"])
        else:
            batch = built([Record(1, None, b"%d" % number)], 0)
            rig.broker.wait(rig.broker.submit(rig.broker.prepare_kafka("t", 0, batch)))
    reader, offset = reader_of(rig), 0
    while offset < 6:
        found = reader.fetch("t", 0, offset, limit_bytes=1 << 20)
        assert found is not None
        assert offsets_in(found) == list(range(offset, found.end))
        offset = found.end


# ------------------------------------------------------------------------------ many partitions


def rig_with_small_files(clock: ManualClock, partitions: int = 4) -> Rig:
    """Topic t with two small files in each partition, and an empty hot tail."""
    rig = Rig(MemoryStore(clock), clock, options=RigOptions(hot_bytes=0))
    rig.create(partitions=partitions)
    for number in range(2):
        for partition in range(partitions):
            rig.append([f"{partition}-{number}", "x"], partition=partition)
        rig.publish()
    return rig


def in_memory(reader: KafkaReader, partition: int, offset: int = 0) -> list[int]:
    """The offsets that a fetch finds in memory."""
    found = reader.fetch("t", partition, offset, limit_bytes=1 << 20, only_memory=True)
    return offsets_in(found) if found is not None else []


def test_small_files_of_many_partitions_are_read_together(clock: ManualClock) -> None:
    """Fetches of these partitions then find in memory what they would have read."""
    rig = rig_with_small_files(clock)
    reader, other = reader_of(rig), reader_of(rig)
    reader.read_together([("t", number, 0) for number in range(3)] + [("t", 3, 1)])
    for number in range(4):
        offset = int(number == 3)
        assert in_memory(reader, number, offset) == list(range(offset, 4))
        found = [
            each.fetch("t", number, offset, limit_bytes=1 << 20, only_memory=each is reader)
            for each in (reader, other)
        ]
        assert found[0] == found[1]
    assert reader.read_bytes == other.read_bytes > 0
    assert not reader._encoding


def test_what_cannot_be_read_together_is_left_to_fetches(clock: ManualClock) -> None:
    """The others are read: an error, or a record that is in the log only, is one partition's."""
    rig = rig_with_small_files(clock, 6)
    rig.append(["in the log"], partition=4)
    missing = rig.led_partitions.topic("t").table.snapshot.files[5][1]
    rig.store.delete([data_path("t", missing)])
    reader = reader_of(rig)
    reader.read_together(
        [("u", 0, 0), ("t", 9, 0), ("t", 0, 9), ("t", 1, 4), ("t", 5, 0), ("t", 4, 4), ("t", 2, 0)]
    )
    assert [in_memory(reader, number) for number in range(6)] == [[], [], [0, 1, 2, 3], [], [], []]
    assert in_memory(reader, 4, 4) == []
    assert not reader._encoding


@pytest.mark.parametrize(
    ("name", "size", "read"),
    [
        ("sparklog.limits.SMALL_FILE_BYTES", 3_600, 2),
        ("sparklog.limits.READ_RUN_BYTES", 100, 0),
        ("sparklog.broker.log.kafka_readers.AHEAD_BYTES", 1 << 20, 0),
    ],
)
def test_what_is_read_together_is_bounded(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch, name: str, size: int, read: int
) -> None:
    """By the bytes of files, by their rows in memory, and by the space for encoded batches."""
    rig = rig_with_small_files(clock)
    (file, *_) = rig.led_partitions.topic("t").table.snapshot.files[0]
    assert 4 * file.size_bytes <= 3_600 < 6 * file.size_bytes
    monkeypatch.setattr(name, size)
    reader = reader_of(rig)
    reader.read_together([("t", number, 0) for number in range(4)])
    assert [bool(in_memory(reader, number)) for number in range(4)] == [
        number < read for number in range(4)
    ]


def test_what_another_reader_encodes_is_not_encoded_twice(
    clock: ManualClock, encoded: list[int]
) -> None:
    """Each of two readers leaves to the other what that has begun."""
    rig = rig_with_small_files(clock, 2)
    reader = reader_of(rig)
    topic_id = rig.led_partitions.topic("t").topic_id
    lock = reader._encoding[topic_id, 0, 0] = threading.Lock()
    with lock:
        reader.read_together([("t", 0, 0), ("t", 1, 0)])
    assert list(reader._encoding) == [(topic_id, 0, 0)]
    assert (in_memory(reader, 0), in_memory(reader, 1)) == ([], [0, 1, 2, 3])
    assert len(encoded) == 1


def test_records_that_are_deleted_while_they_are_read_are_not_returned(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of partitions that are read together."""
    rig = rig_with_small_files(clock, 2)
    reader = reader_of(rig)
    read_runs = reads.read_runs

    def reading(*runs: Any, **options: Any) -> Any:
        topic = rig.led_partitions.topic("t")
        rig.led_partitions.advance_start(topic, [2, 0])
        return read_runs(*runs, **options)

    monkeypatch.setattr("sparklog.broker.log.readers.read_runs", reading)
    reader.read_together([("t", 0, 0), ("t", 1, 0)])
    assert in_memory(reader, 1) == [0, 1, 2, 3]
    with pytest.raises(errors.OffsetOutOfRange):
        in_memory(reader, 0)
    assert in_memory(reader, 0, 2) == []


def test_records_of_a_topic_that_is_deleted_meanwhile_are_not_those_of_another(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The topic may be created again before its records are encoded."""
    rig = rig_with_small_files(clock, 1)
    reader = reader_of(rig)
    read_together = reader._reader.read_together

    def reading(*places: Any, **options: Any) -> Any:
        found = read_together(*places, **options)
        rig.broker.topics.delete("t")
        rig.create()
        rig.append(["1", "2", "3", "4"])
        return found

    monkeypatch.setattr(reader._reader, "read_together", reading)
    reader.read_together([("t", 0, 0)])
    assert in_memory(reader, 0) == []
