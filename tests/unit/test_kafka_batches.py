"""Record batches of Kafka's on their way through the log: as they came, and in columns."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pyarrow as pa
import pytest

from sparklog import errors, limits
from sparklog.broker.broker import WouldBlock
from sparklog.broker.log.flush import WriterLimits
from sparklog.broker.log.kafka_readers import BATCH_BYTES
from sparklog.broker.log.preparing import KAFKA_QUICK_BYTES, KAFKA_QUICK_RECORDS_BYTES
from sparklog.clock import ManualClock
from sparklog.formats import flight_messages, record_batch
from sparklog.storage.objects import MemoryStore
from sparklog.storage.table.changes import TableChange
from sparklog.storage.table.topic_table import TopicTable
from tests.support.batches import Record, bomb, bomb_of_headers, built, changed, read, split
from tests.support.brokers import Rig, RigOptions, rows_of_root, rows_of_table

pytestmark = pytest.mark.rig(topics={"t": 2})

SECOND_MS = 1_700_000_000_000


def records(*values: bytes, key: bytes | None = b"k") -> list[Record]:
    """One a second."""
    return [Record(SECOND_MS + 1_000 * n, key, value) for n, value in enumerate(values)]


def append(rig: Rig, batch: bytes, partition: int = 0) -> int:
    """Its base offset, once it is durable."""
    (stands,) = rig.broker.wait(rig.broker.submit(rig.broker.prepare_kafka("t", partition, batch)))
    return stands.base_offset


def fetched(rig: Rig, offset: int, *, limit_bytes: int = 1 << 20) -> list[tuple[int, Record]]:
    """Returns the records from `offset` on, without those before it in its batch."""
    found = rig.broker.fetch_kafka("t", 0, offset, limit_bytes=limit_bytes)
    assert found is not None
    return [each for batch in split(found.pieces) for each in read(batch) if each[0] >= offset]


_PACKED = [each for each in record_batch.Codec if each != record_batch.Codec.NONE]


@pytest.mark.parametrize("codec", _PACKED)
def test_a_slow_check_is_left_to_a_thread(rig: Rig, codec: record_batch.Codec) -> None:
    """A large compressed batch, and a small one of many records, are not checked in the loop."""
    small = records(*[b"v" * 100] * 100)
    assert rig.broker.prepare_kafka("t", 0, built(small, codec), only_quick=True).count == 100
    large = built(records(random.Random(1).randbytes(KAFKA_QUICK_BYTES)), codec)
    bomb = built(records(bytes(KAFKA_QUICK_RECORDS_BYTES)), codec)
    assert len(bomb) < KAFKA_QUICK_BYTES < len(large) < KAFKA_QUICK_RECORDS_BYTES
    for batch in (large, bomb):
        with pytest.raises(WouldBlock):
            rig.broker.prepare_kafka("t", 0, batch, only_quick=True)
        assert rig.broker.prepare_kafka("t", 0, batch).count == 1


def test_a_plain_batch_is_quick_but_where_it_is_to_be_compressed(rig: Rig) -> None:
    """As much as fits in a request, which has been read there, too."""
    batch = built(records(bytes(2 * KAFKA_QUICK_RECORDS_BYTES)))
    assert rig.broker.prepare_kafka("t", 0, batch, only_quick=True).count == 1
    rig.create("gzip", compression_type="gzip")
    with pytest.raises(WouldBlock):
        rig.broker.prepare_kafka("gzip", 0, batch, only_quick=True)
    packed = built(records(b"v"), record_batch.Codec.GZIP)
    assert rig.broker.prepare_kafka("gzip", 0, packed, only_quick=True).count == 1


def test_a_quick_check_refuses_what_a_full_check_refuses(
    store: MemoryStore, clock: ManualClock
) -> None:
    """The quick check refuses batches beyond the size limit, and malformed bytes."""
    rig = Rig(store, clock, options=RigOptions(writer=WriterLimits(max_batch_bytes=1_000)))
    rig.create("t", 2)
    for batch, refusal in (
        (built(records(bytes(1_001))), errors.BatchTooLarge),
        (b"no batch", errors.DamagedBatch),
    ):
        with pytest.raises(refusal):
            rig.broker.prepare_kafka("t", 0, batch, only_quick=True)
    bomb = built(records(bytes(1_001)), record_batch.Codec.GZIP)
    with pytest.raises(WouldBlock):  # the full check reports the exact size
        rig.broker.prepare_kafka("t", 0, bomb, only_quick=True)
    with pytest.raises(errors.BatchTooLarge):
        rig.broker.prepare_kafka("t", 0, bomb)


@pytest.mark.parametrize("codec", list(record_batch.Codec))
def test_a_batch_goes_out_as_it_came(rig: Rig, codec: record_batch.Codec) -> None:
    """But for its place: base offset and leader epoch."""
    rig.append(["before"])
    batch = built(records(b"a", b"b"), codec)
    assert append(rig, batch) == 1
    found = rig.broker.fetch_kafka("t", 0, 1, limit_bytes=1, only_memory=True)
    assert found is not None
    assert [*found.pieces] == [*record_batch.placed(batch, base_offset=1, leader_epoch=0)]


def test_it_is_rows_for_everybody_else(rig: Rig, store: MemoryStore, clock: ManualClock) -> None:
    """Our consumers, readers of the root alone, and the table."""
    append(rig, built(records(b"a", b"b"), record_batch.Codec.ZSTD))
    rows = [(0, b"a"), (1, b"b")]
    assert rig.read() == rows
    assert rows_of_root(store, clock) == rows
    rig.publish()
    assert rows_of_table(store, clock) == rows


@pytest.mark.parametrize("published", [False, True])
def test_a_restart_changes_nothing(rig: Rig, published: bool) -> None:
    """From the WAL and from the table come the same records at the same offsets."""
    given = [*records(b"a", b"b", b"c"), Record(SECOND_MS, None, None, (("h", None), ("h", b"1")))]
    append(rig, built(given))
    if published:
        rig.publish()
    later = rig.successor()
    assert later.broker.fetch_kafka("t", 0, 0, limit_bytes=1, only_memory=True) is None
    assert fetched(later, 0) == list(enumerate(given))
    assert fetched(later, 2) == list(enumerate(given))[2:]
    assert fetched(later, 4) == []


def test_a_fetch_is_bounded_and_gives_one_batch_at_least(rig: Rig) -> None:
    """However small the limit, a consumer gets on."""
    values = [value * (BATCH_BYTES - 1_000) for value in (b"a", b"b", b"c")]
    for value in values:
        append(rig, built(records(value)))
    size = len(built(records(values[0])))
    assert [offset for offset, _ in fetched(rig, 0, limit_bytes=1)] == [0]
    assert [offset for offset, _ in fetched(rig, 0, limit_bytes=2 * size)] == [0, 1]
    rig.publish()
    later = rig.successor()
    assert [offset for offset, _ in fetched(later, 1, limit_bytes=1)] == [1]
    assert [offset for offset, _ in fetched(later, 0, limit_bytes=2 * size)] == [0, 1]
    assert [offset for offset, _ in fetched(later, 0)] == [0, 1, 2]
    for reader in (rig, later):
        assert reader.broker.fetch_kafka("t", 0, 0, limit_bytes=1, at_least_one=False) == ((), 0)


def test_a_duplicate_is_acked_with_its_first_offset(rig: Rig) -> None:
    """A retry of an idempotent producer is acked, also after a restart; a gap is refused."""
    producer_sequence = {"producer_id": 5, "producer_epoch": 0}
    batches = [
        built(records(b"x"), **producer_sequence, base_sequence=number) for number in range(3)
    ]
    assert [append(rig, each) for each in batches[:2]] == [0, 1]
    assert append(rig, batches[0]) == 0
    later = rig.successor()
    assert append(later, batches[1]) == 1
    with pytest.raises(errors.OutOfOrderSequence):
        append(later, built(records(b"x"), **producer_sequence, base_sequence=7))
    assert append(later, batches[2]) == 2
    newer = built(records(b"x"), producer_id=5, producer_epoch=1, base_sequence=0)
    assert append(later, newer) == 3
    with pytest.raises(errors.ProducerFenced):
        append(later, batches[2])


def test_the_topics_time_may_be_the_appends(rig: Rig, clock: ManualClock) -> None:
    """Then the batch says so, and table and consumers see the same millisecond."""
    config: dict[str, str | None] = {"message.timestamp.type": "LogAppendTime"}
    rig.broker.topics.alter(flight_messages.AlterTopic(topic="t", config=config))
    clock.advance(12.3456789)
    append(rig, built(records(b"a", b"b")))
    now_ms = clock.now_us() // 1_000
    assert [each.timestamp_ms for _, each in fetched(rig, 0)] == [now_ms] * 2
    rig.publish()
    assert [each.timestamp_ms for _, each in fetched(rig.successor(), 0)] == [now_ms] * 2


def test_a_wrong_greatest_time_is_put_right(rig: Rig) -> None:
    """As in Kafka, the maximum timestamp in the header becomes that of the records."""
    append(rig, changed(built(records(b"a", b"b")), 35, ">q", 5))
    found = rig.broker.fetch_kafka("t", 0, 0, limit_bytes=1, only_memory=True)
    assert found is not None
    assert record_batch.check(b"".join(found.pieces)).header.max_timestamp_ms == SECOND_MS + 1_000


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        (built(records(b"a"))[:-1], errors.DamagedBatch),
        (changed(built(records(b"a")), 21, ">h", 0x10), errors.BadBatch),
        (changed(built(records(b"a")), 21, ">h", 0x08), errors.BadTimestamp),
        (built([Record(limits.TIMESTAMP_MAX_US // 1_000 + 1, b"k", b"v")]), errors.BadTimestamp),
        (built(records(b"a" * 2_000)), errors.RecordTooLarge),
        (built(records(*[b"a" * 900] * 10)), errors.BatchTooLarge),
    ],
)
def test_a_refused_batch_leaves_no_trace(
    store: MemoryStore, clock: ManualClock, batch: bytes, error: type[Exception]
) -> None:
    """A batch is appended as a whole or not at all."""
    bounds = WriterLimits(max_record_bytes=1_000, max_batch_bytes=5_000)
    rig = Rig(store, clock, options=RigOptions(writer=bounds))
    rig.create("t", 2)
    with pytest.raises(error):
        append(rig, batch)
    assert rig.end() == 0
    assert append(rig, built(records(b"a"))) == 0


def test_a_record_may_be_as_large_as_the_bound(store: MemoryStore, clock: ManualClock) -> None:
    """Key, value and headers together; a byte more is refused."""
    batch = built([Record(SECOND_MS, b"k" * 5, b"v" * 80, (("h" * 5, b"w" * 10),))])
    exact = RigOptions(writer=WriterLimits(max_record_bytes=100))
    rig = Rig(store, clock, options=exact)
    rig.create()
    assert append(rig, batch) == 0
    less = rig.successor(writer=WriterLimits(max_record_bytes=99))
    with pytest.raises(errors.RecordTooLarge) as refused:
        append(less, batch)
    assert (refused.value.bytes, refused.value.limit_bytes) == (100, 99)


def test_a_compacted_topic_wants_keys(rig: Rig) -> None:
    """Kafka's rule: INVALID_RECORD otherwise."""
    config: dict[str, str | None] = {"cleanup.policy": "compact"}
    rig.broker.topics.alter(flight_messages.AlterTopic(topic="t", config=config))
    with pytest.raises(errors.KeylessRecord):
        append(rig, built(records(b"a", key=None)))
    assert append(rig, built(records(b"a"))) == 0


@pytest.mark.parametrize("published", [False, True])
def test_the_greatest_time_is_found(rig: Rig, published: bool) -> None:
    """The first record with the greatest timestamp is found at any position (KIP-734)."""
    assert rig.broker.greatest_time("t", 0) == (-1, -1)
    for stamps in ((5, 9, 7), (3, 9), (8,)):
        append(rig, built([Record(SECOND_MS + each, b"k", b"v") for each in stamps]))
        if published:
            rig.publish()
    assert rig.broker.greatest_time("t", 0) == (SECOND_MS + 9, 1)


def test_old_records_are_encoded_once_for_all_consumers(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two consumers that read the table with small fetches cause one read of it."""
    value = b"v" * (BATCH_BYTES - 1_000)
    for _ in range(6):
        append(rig, built(records(value)))
    rig.publish()
    later = rig.successor()
    reads = 0
    encode = record_batch.encode

    def counted(rows: pa.RecordBatch, **more: int) -> Iterator[bytearray]:
        nonlocal reads
        reads += 1
        return encode(rows, leader_epoch=more["leader_epoch"], limit_bytes=more["limit_bytes"])

    monkeypatch.setattr(record_batch, "encode", counted)
    for _ in range(2):
        offset = 0
        seen: list[int] = []
        while offset < 6:
            found = fetched(later, offset, limit_bytes=1)
            seen += [at for at, _ in found]
            offset = seen[-1] + 1
        assert seen == list(range(6))
    assert reads <= 2, "a file's rows may come in parts"


def test_consumers_at_once_find_the_same_whatever_is_kept(rig: Rig) -> None:
    """Many more of them than there is room for, at the same offsets and at others."""
    given = records(*(b"%d" % number for number in range(500)))
    append(rig, built(given))
    rig.publish()
    later = rig.successor()

    def read_all(first: int) -> list[tuple[int, Record]]:
        return fetched(later, first)

    with ThreadPoolExecutor(8) as pool:
        for first, found in zip(
            range(0, 500, 5), pool.map(read_all, range(0, 500, 5)), strict=True
        ):
            assert found == list(enumerate(given))[first:]


def test_rows_in_memory_are_encoded_together_and_once(
    store: MemoryStore, clock: ManualClock
) -> None:
    """Which takes a while where there are many; the next consumer finds them made."""
    rig = Rig(store, clock, options=RigOptions(hot_bytes=1 << 24))
    rig.create("t", 1)
    for number in range(300):
        rig.append([str(number)])
    append(rig, built(records(b"k")))
    assert rig.broker.fetch_kafka("t", 0, 0, limit_bytes=1 << 20, only_memory=True) is None
    found = rig.broker.fetch_kafka("t", 0, 0, limit_bytes=1 << 20)
    assert found is not None
    batches = split(found.pieces)
    assert [at for at, _ in (row for each in batches for row in read(each))] == [*range(301)]
    assert len(batches) < 10
    assert rig.broker.fetch_kafka("t", 0, 0, limit_bytes=1 << 20, only_memory=True) == found


def test_a_consumer_passes_records_removed_at_the_end(rig: Rig, clock: ManualClock) -> None:
    """A batch that clients skip covers rows that another engine has deleted."""
    append(rig, built(records(b"a")))
    rig.publish()
    append(rig, built([*records(b"b"), *records(b"c")]))
    rig.publish()
    table = TopicTable(rig.store, "t", clock=clock)
    newest = table.refresh().files[0][-1:]
    table.commit(lambda _: TableChange(adds=(), removes=newest, operation="DELETE"))
    later = rig.successor()
    assert [offset for offset, _ in later.read()] == [0]
    for offset in (1, 2):
        found = later.broker.fetch_kafka("t", 0, offset, limit_bytes=1 << 20)
        assert found is not None
        assert found.end == 3
        header = record_batch.read_header(b"".join(found.pieces))
        assert (header.base_offset, header.record_count, header.next_offset) == (offset, 1, 3)
        assert header.attributes == 0x30  # a control batch, which consumers skip and count
    whole = later.broker.fetch_kafka("t", 0, 0, limit_bytes=1 << 20)
    assert whole is not None
    attributes = [record_batch.read_header(each).attributes for each in split(whole.pieces)]
    assert attributes == [0, 0x30]
    assert whole.end == 3


def test_where_ours_and_kafkas_alternate_each_is_made_once(
    store: MemoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer that begins at one of Kafka's gets that, and then all the others together."""
    rig = Rig(store, clock, options=RigOptions(hot_bytes=1 << 24))
    rig.create("t", 1)
    for number in range(100):
        append(rig, built(records(b"%d" % number)))
        rig.append([str(number)])
    encode = mock.Mock(side_effect=record_batch.encode)
    monkeypatch.setattr(record_batch, "encode", encode)
    offset, fetches = 0, 0
    while offset < 200:
        found = rig.broker.fetch_kafka("t", 0, offset, limit_bytes=1_000)
        assert found is not None
        assert found.end > offset
        offset, fetches = found.end, fetches + 1
    assert fetches < 30
    assert encode.call_count <= 200


# ------------------------------------------------------------------------------ large in memory

_LARGE = 40
_VALUE_BYTES = 1 << 20


@pytest.mark.parametrize("hot_bytes", [0, 1 << 20], ids=["from the log", "from memory"])
def test_records_that_are_large_when_decompressed_are_read_in_parts(
    store: MemoryStore, clock: ManualClock, hot_bytes: int
) -> None:
    """A reader never keeps all of them in memory, however slow it is."""
    rig = Rig(store, clock, options=RigOptions(hot_bytes=hot_bytes))
    rig.create()
    values = [bytes([number]) * _VALUE_BYTES for number in range(_LARGE)]
    append(rig, built(records(*values), record_batch.Codec.ZSTD))
    for start in (0, _LARGE - 3):
        found = []
        for batch in rig.broker.read("t", 0, start, _LARGE):
            assert batch.rows.get_total_buffer_size() <= limits.READ_RUN_BYTES + 100_000
            found += batch.rows.column("value").to_pylist()
        assert found == values[start:]


def test_neighbouring_batches_are_read_together_by_their_decoded_size(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred batches of a kilobyte may be a hundred megabytes in memory."""
    monkeypatch.setattr(limits, "READ_RUN_BYTES", 100_000)
    for _ in range(20):
        append(rig, built(records(bytes(40_000)), record_batch.Codec.ZSTD))
    for hot in (True, False):
        if not hot:
            rig = rig.successor(hot_bytes=0)
        sizes = [batch.rows.nbytes for batch in rig.broker.read("t", 0, 0, 20)]
        assert len(sizes) >= 10
        assert max(sizes) <= 100_000


def test_no_more_is_read_for_a_fetch_because_it_compresses_well(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A megabyte in the topic's codec may be a gigabyte of rows: those are counted, too."""
    monkeypatch.setattr(limits, "ROW_GROUP_BYTES", 1 << 20)
    rig.create("packed", 1, compression_type="zstd")
    for _ in range(16):
        rig.append([bytes(1 << 18)] * 2, topic="packed")
    found = rig.broker.fetch_kafka("packed", 0, 0, limit_bytes=1 << 20)
    assert found is not None
    assert 2 <= found.end <= 6


def test_errors_keep_nothing_of_refused_batches(rig: Rig) -> None:
    """An error that is kept refers to no batch, even before Python collects cycles."""
    refused = []
    gc.disable()
    tracemalloc.start()
    try:
        for batch in (
            bomb(100 << 20),
            bomb_of_headers(8_000_000),
            bomb(60 << 20, value_bytes=20 << 20),
        ):
            tracemalloc.reset_peak()
            with pytest.raises(errors.Invalid) as error:
                rig.broker.prepare_kafka("t", 0, batch)
            refused.append(error.value)
            assert tracemalloc.get_traced_memory()[0] < 4 << 20
    finally:
        tracemalloc.stop()
        gc.enable()
