"""Reads of many entries in one object: a request for all of them, within bounds."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pyarrow as pa
import pytest

from sparklog import errors
from sparklog.clock import ManualClock, SystemClock
from sparklog.formats import flight_messages
from sparklog.root_channel import RootChannel
from sparklog.storage import wal
from sparklog.storage.objects import DelayedStore, MemoryStore, ObjectMissing
from sparklog.storage.reading import shared_reads
from sparklog.storage.reading.shared_reads import SharedReads
from sparklog.storage.snapshot import Located
from tests.support.brokers import Rig, RigOptions, flip, rows_of_table

TOPICS = 20
FLUSHES = 3


@pytest.fixture
def store(clock: ManualClock) -> DelayedStore:
    """An object store that counts."""
    return DelayedStore(MemoryStore(clock), 0.0, clock)


@pytest.fixture
def rig(store: DelayedStore, clock: ManualClock) -> Rig:
    """A broker whose log has a few flushes, each with a batch for each of many topics."""
    rig = Rig(store, clock, options=RigOptions(hot_bytes=0))
    for number in range(TOPICS):
        rig.create(f"t{number}")
    for flush in range(FLUSHES):
        append(rig, f"{flush}")
    return rig


def append(rig: Rig, text: str) -> None:
    """Appends a batch to each topic, in one flush."""
    pending = [rig.submit([f"{text}/{number}"], topic=f"t{number}") for number in range(TOPICS)]
    for each in pending:
        rig.broker.wait(each)


def entries(rig: Rig) -> list[Located]:
    """All entries of the log, topic by topic, as a reader of all topics requests them."""
    topics = sorted(rig.led_partitions.topics(), key=lambda topic: topic.name)
    return [each for topic in topics for each in topic.partition(0).unpublished]


def payloads(reads: SharedReads, wanted: list[Located]) -> Iterator[bytes]:
    """Reads entries one after the other."""
    for each in wanted:
        yield reads.payload(each).to_pybytes()


def test_each_object_is_read_once(rig: Rig, store: DelayedStore) -> None:
    """Promise: a reader of many topics makes a request for each flush, not for each entry."""
    wanted = entries(rig)
    assert len(wanted) == TOPICS * FLUSHES
    expected = [wal.read_payload(store, each).to_pybytes() for each in wanted]
    store.requests.clear()
    reads = SharedReads(store, wanted)
    assert list(payloads(reads, wanted)) == expected
    assert store.requests == {"get_range": FLUSHES}
    assert all(span.data is None for span in reads._spans.values())  # nothing is kept
    assert list(payloads(reads, wanted[:1])) == expected[:1]  # again, at its own cost


def test_few_entries_are_read_on_their_own(rig: Rig, store: DelayedStore) -> None:
    """An entry that shares its object with no other wanted one brings no other bytes."""
    one_topic = entries(rig)[:FLUSHES]
    reads = SharedReads(store, one_topic)
    assert not reads._spans
    local = SharedReads(MemoryStore(ManualClock(), is_local=True), entries(rig))
    assert not local._spans


@pytest.mark.parametrize(("bound", "requests"), [("SPAN_BYTES", 30), ("HELD_BYTES", 41)])
def test_reads_are_bounded(
    rig: Rig, store: DelayedStore, monkeypatch: pytest.MonkeyPatch, bound: str, requests: int
) -> None:
    """A request has a bound, and so have the bytes in memory; other entries are read alone."""
    wanted = entries(rig)
    size = wanted[0].entry.length
    monkeypatch.setattr(shared_reads, bound, 2 * size + 8 if bound == "SPAN_BYTES" else 20 * size)
    expected = [wal.read_payload(store, each).to_pybytes() for each in wanted]
    store.requests.clear()
    assert list(payloads(SharedReads(store, wanted), wanted)) == expected
    assert store.requests["get_range"] == pytest.approx(requests, abs=3)


def test_a_gap_is_read_along_only_if_it_is_short(
    rig: Rig, store: DelayedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second entry of a flush is one request with short gaps, and many with long ones."""
    wanted = entries(rig)[::2]
    store.requests.clear()
    list(payloads(SharedReads(store, wanted), wanted))
    assert store.requests["get_range"] == FLUSHES
    monkeypatch.setattr(shared_reads, "_GAP_BYTES", 0)
    list(payloads(SharedReads(store, wanted), wanted))
    assert store.requests["get_range"] > 5 * FLUSHES


def test_damage_concerns_its_entry_only(rig: Rig, store: DelayedStore) -> None:
    """A flipped byte of one entry is named; the others in the same request are read."""
    wanted = entries(rig)
    path, first, length = wal.payload_place(wanted[0])
    flip(store, path, first + length // 2)
    reads = SharedReads(store, wanted)
    with pytest.raises(errors.CorruptObject, match="CRC32C"):
        reads.payload(wanted[0])
    assert len(list(payloads(reads, wanted[1:]))) == len(wanted) - 1
    store.delete([path])
    reads = SharedReads(store, wanted)
    for _ in range(2):
        with pytest.raises(ObjectMissing, match=path):
            reads.payload(wanted[0])


def test_threads_wait_for_one_request(rig: Rig, store: DelayedStore) -> None:
    """Threads that need the same object share its request."""
    inner = store._inner
    assert isinstance(inner, MemoryStore)
    slow = DelayedStore(inner, 0.02, SystemClock())
    wanted = [each for each in entries(rig) if each.at == entries(rig)[0].at]
    reads, found = SharedReads(slow, wanted), list[pa.Buffer]()
    threads = [
        threading.Thread(target=lambda each=each: found.append(reads.payload(each)))
        for each in wanted
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == TOPICS
    assert slow.requests == {"get_range": 1}


# ------------------------------------------------------------------------------ its users


def test_the_publisher_reads_each_flush_once(rig: Rig, store: DelayedStore) -> None:
    """Promise: topics that are published together, after a restart, share the requests."""
    topics = rig.led_partitions.topics()
    store.requests.clear()
    assert rig.publisher.publish_together(topics) == [None] * TOPICS
    assert store.requests["get_range"] == FLUSHES
    assert rows_of_table(store, rig.clock, "t7") == [(n, b"%d/7" % n) for n in range(FLUSHES)]


def test_a_tail_of_many_topics_reads_each_flush_once(
    rig: Rig, store: DelayedStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: without a broker, a look at 20 topics costs as little as at one: two probes.

    Their records cost two requests for each flush: for its index, and for the records.
    """
    monkeypatch.setattr("sparklog.limits.POLL_INTERVAL_REMOTE_SECONDS", 0.001)
    channel = RootChannel(store, clock=clock, reason="EROFS")
    positions = [
        flight_messages.TailPosition(topic=f"t{number}", partition=0, offset=0)
        for number in range(TOPICS)
    ]
    _, reader = channel.tail(flight_messages.TailRequest(positions=positions))

    def rest() -> int:
        """Reads up to the next idle chunk, and returns the number of rows."""
        rows = 0
        while chunk := reader.read_chunk():
            rows += chunk.data.num_rows
            if flight_messages.decode(flight_messages.TailHeader, chunk.app_metadata).idle:
                return rows
        raise AssertionError

    assert rest() == TOPICS * FLUSHES
    for _ in range(2):
        store.requests.clear()
        assert rest() == 0
        assert store.requests == {"get": 1, "get_range": 1}
    append(rig, "more")
    store.requests.clear()
    assert rest() == TOPICS
    assert store.requests == {"get": 1, "get_range": 3}
