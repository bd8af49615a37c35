"""The channel that reads a root itself, where no broker serves it."""

from __future__ import annotations

import threading
from typing import Any

import pyarrow as pa
import pytest

from sparklog import errors
from sparklog.clock import ManualClock
from sparklog.formats import flight_messages
from sparklog.root_channel import RootChannel
from sparklog.storage.objects import MemoryStore
from tests.support.roots import HandmadeRoot, payload

SECONDS = 30.0


@pytest.fixture
def made(store: MemoryStore, clock: ManualClock) -> HandmadeRoot:
    """A root whose topic `t` has 3 records in its table and 2 in the log, all in partition 0."""
    made = HandmadeRoot(store, clock=clock)
    made.create_topic("t")
    made.append(("t", 0, payload([b"a", b"b"])))
    made.append(("t", 0, payload([b"c"])))
    made.publish("t")
    made.append(("t", 0, payload([b"d", b"e"])))
    return made


@pytest.fixture
def channel(made: HandmadeRoot) -> RootChannel:
    """The channel of that root."""
    return RootChannel(made.store, clock=made.clock, reason="EROFS")


def described(channel: RootChannel) -> flight_messages.TopicInfo:
    """The topic, as a client describes it."""
    found: flight_messages.TopicInfo = channel.action(
        "topics.describe", flight_messages.TopicName(topic="t"), timeout_seconds=SECONDS
    )
    return found


def ticket(start: int, end: int, **options: Any) -> flight_messages.ReadTicket:
    """A range of partition 0."""
    return flight_messages.ReadTicket(topic="t", partition=0, start=start, end=end, **options)


def read(channel: RootChannel, wanted: flight_messages.ReadTicket) -> list[pa.RecordBatch]:
    """All batches of a range."""
    reader, found = channel.read(wanted), []
    while True:
        try:
            found.append(reader.read_chunk().data)
        except StopIteration:
            return found


def values(batches: list[pa.RecordBatch]) -> list[bytes]:
    """The values of all rows."""
    return [value for batch in batches for value in batch.column("value").to_pylist()]


def test_table_and_log_are_read(channel: RootChannel) -> None:
    """A read begins in the table and continues in the log, up to the last acked record."""
    (first, second) = described(channel).partitions
    assert (first.start, first.published, first.end, second.end) == (0, 3, 5, 0)
    assert values(read(channel, ticket(0, 5))) == [b"a", b"b", b"c", b"d", b"e"]
    batches = read(channel, ticket(2, 4, columns=["offset", "value"]))
    assert [name for batch in batches for name in batch.schema.names] == ["offset", "value"] * 2
    assert values(batches) == [b"c", b"d"]


def test_a_read_plans_again_where_an_object_is_gone(
    made: HandmadeRoot, channel: RootChannel
) -> None:
    """Records that are published and trimmed while they are read are found in the table."""
    reader = channel.read(ticket(0, 5))
    found = [reader.read_chunk().data]
    made.publish("t")
    made.trim()
    while (rows := sum(batch.num_rows for batch in found)) < 5:
        found.append(reader.read_chunk().data)
    assert rows == 5
    assert values(found) == [b"a", b"b", b"c", b"d", b"e"]


@pytest.mark.parametrize(
    ("wanted", "kind"),
    [
        (ticket(0, 6), errors.OffsetOutOfRange),
        (ticket(0, 5, topic_id="older"), errors.TopicChanged),
        (
            flight_messages.ReadTicket(topic="t", partition=7, start=0, end=1),
            errors.UnknownPartition,
        ),
        (flight_messages.ReadTicket(topic="u", partition=0, start=0, end=1), errors.UnknownTopic),
    ],
    ids=lambda each: getattr(each, "code", ""),
)
def test_a_read_that_is_impossible_is_refused(
    channel: RootChannel, wanted: flight_messages.ReadTicket, kind: type[errors.SparklogError]
) -> None:
    """A range, a partition or a topic that does not exist is refused as a broker does."""
    with pytest.raises(kind):
        read(channel, wanted)


def test_a_tail_yields_new_records(
    made: HandmadeRoot, channel: RootChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tail yields the records that there are, and after each look those that have come since."""
    monkeypatch.setattr("sparklog.limits.POLL_INTERVAL_REMOTE_SECONDS", 0.0)
    position = flight_messages.TailPosition(topic="t", partition=0, offset=4)
    _, reader = channel.tail(flight_messages.TailRequest(positions=[position]))
    assert headers(reader, 2) == [(4, 5, 5), None]
    made.append(("t", 0, payload([b"f"])))
    assert headers(reader, 3) == [(5, 6, 6), None, None]
    reader.cancel()
    with pytest.raises(StopIteration):
        reader.read_chunk()


def headers(reader: Any, count: int) -> list[tuple[int, int, int] | None]:
    """Returns first, end and high watermark of the next chunks; None for those without records."""
    found = []
    for _ in range(count):
        header = flight_messages.decode(
            flight_messages.TailHeader, reader.read_chunk().app_metadata
        )
        found.append(None if header.idle else (header.first, header.end, header.high_watermark))
    return found


def test_a_tail_beyond_the_end_is_refused(channel: RootChannel) -> None:
    """A position that does not exist is an error and no silence."""
    position = flight_messages.TailPosition(topic="t", partition=0, offset=9)
    _, reader = channel.tail(flight_messages.TailRequest(positions=[position]))
    with pytest.raises(errors.OffsetOutOfRange):
        reader.read_chunk()


def test_threads_share_a_channel(channel: RootChannel) -> None:
    """Reads of several threads at the same time return all records each."""
    found: list[list[bytes]] = []
    threads = [
        threading.Thread(target=lambda: found.append(values(read(channel, ticket(0, 5)))))
        for _ in range(8)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [[b"a", b"b", b"c", b"d", b"e"]] * 8
