"""The log as a whole: admin, tables, options, and the end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from sparklog import errors, record, wire
from sparklog.client import Connection, Log
from tests.support.fake_broker import SLICE_ROWS, DropBefore, FakeBroker

SECONDS = 20.0


@pytest.fixture(name="broker")
def _broker() -> Iterator[FakeBroker]:
    with FakeBroker() as broker:
        yield broker


@pytest.fixture(name="log")
def _log(broker: FakeBroker) -> Iterator[Log]:
    with Log(Connection.to(broker.address), root="memory:root") as log:
        yield log


def _fill(broker: FakeBroker, topic: str, rows: int, partition: int = 0, **columns: Any) -> None:
    end = broker.log.partition(topic, partition).end
    values = [b"%d" % i for i in range(end, end + rows)]
    batch = pa.RecordBatch.from_pydict({"value": values} | columns)
    broker.log.append(topic, wire.AppendHeader(partition=partition), batch)


# ------------------------------------------------------------------------------ admin


def test_topics(log: Log) -> None:
    """Topics are created, described, altered, enlarged and deleted."""
    created = log.create_topic("b", partitions=2, config={"retention.ms": 1000, "x": True})
    assert (len(created.partitions), created.config) == (2, {"retention.ms": "1000", "x": "true"})
    log.create_topic("a")
    assert log.topics() == ["a", "b"]
    assert log.alter("b", {"x": None, "y": 1}).config == {"retention.ms": "1000", "y": "1"}
    assert len(log.add_partitions("b", 5).partitions) == 5
    assert len(log.describe("b").partitions) == 5
    log.delete_topic("a")
    assert log.topics() == ["b"]


def test_deleted_records(broker: FakeBroker, log: Log) -> None:
    """Records go below an offset, or all of them; the answer says where the log starts."""
    log.create_topic("t", partitions=2)
    _fill(broker, "t", 5)
    assert log.delete_records("t", {0: 2, 1: -1}) == {0: 2, 1: 0}
    assert log.delete_records("t", {0: 1}) == {0: 2}
    assert log.read("t")["value"].to_pylist() == [b"2", b"3", b"4"]
    assert log.delete_records("t", {0: -1}, timeout_seconds=5.0) == {0: 5}
    assert log.read("t").num_rows == 0
    with pytest.raises(errors.OffsetOutOfRange):
        log.delete_records("t", {0: 6})
    with pytest.raises(errors.UnknownPartition):
        log.delete_records("t", {2: 0})


def test_refused_topics(log: Log) -> None:
    """What the broker refuses is raised as such."""
    log.create_topic("t", partitions=3)
    with pytest.raises(errors.TopicExists):
        log.create_topic("t")
    assert len(log.create_topic("t", if_absent=True).partitions) == 3
    with pytest.raises(errors.BadPartitionCount):
        log.add_partitions("t", 2)
    with pytest.raises(errors.UnknownTopic):
        log.delete_topic("u")


def test_cluster(broker: FakeBroker, log: Log) -> None:
    """The cluster names its brokers."""
    assert [each.address for each in log.cluster().brokers] == [broker.address]


def test_flush_to_table(broker: FakeBroker, log: Log) -> None:
    """Publishing can be asked for one topic, several, or all."""
    for topics in ("t", ["t", "u"], None):
        log.flush_to_table(topics)
    assert broker.log.published == [["t"], ["t", "u"], None]


# ------------------------------------------------------------------------------ round trip


def test_round_trip(log: Log) -> None:
    """What a producer of the log sends, a consumer of the log gets."""
    log.create_topic("t", partitions=4)
    with log.producer(linger_ms=0) as producer:
        futures = [producer.send("t", b"%d" % i, key=b"%d" % (i % 10)) for i in range(500)]
    with log.consumer("t", follow=False) as consumer:
        found = {(each.partition, each.offset): each.value for each in consumer}
    assert found == {
        (future.result().partition, future.result().offset): b"%d" % i
        for i, future in enumerate(futures)
    }


def test_inside_a_running_loop(log: Log) -> None:
    """All works where an event loop runs already, as in a notebook."""

    async def work() -> int:
        log.create_topic("t")
        with log.producer() as producer:
            producer.send("t", b"x").result(SECONDS)
        return int(log.read("t").num_rows)

    assert asyncio.run(work()) == 1


# ------------------------------------------------------------------------------ tables


def test_read(broker: FakeBroker, log: Log) -> None:
    """A topic is read as a table in order of partition and offset, with the schema of rows."""
    broker.log.create("t", 3)
    for partition in range(3):
        _fill(broker, "t", 2 * SLICE_ROWS + 5, partition)
    table = log.read("t")
    assert table.schema == record.ROW_SCHEMA
    places = list(zip(table["partition"].to_pylist(), table["offset"].to_pylist(), strict=True))
    assert places == [(p, offset) for p in range(3) for offset in range(2 * SLICE_ROWS + 5)]


def test_read_columns(broker: FakeBroker, log: Log) -> None:
    """Columns come as they were asked for."""
    broker.log.create("t", 1)
    _fill(broker, "t", 3)
    assert log.read("t", columns=["value", "partition"]).to_pydict() == {
        "value": [b"0", b"1", b"2"],
        "partition": [0, 0, 0],
    }
    with pytest.raises(errors.WrongSchema, match="valeu"):
        log.read("t", columns=["valeu"])


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"start": 95}, {0: range(95, 100), 1: range(95, 100)}),
        ({"end": 2}, {0: range(2), 1: range(2)}),
        ({"start": 10, "end": 12, "partitions": [1]}, {1: range(10, 12)}),
        ({"start": {1: 98}, "partitions": [1]}, {1: range(98, 100)}),
        ({"start": {1: 98}, "end": {0: 1}}, {0: range(1), 1: range(98, 100)}),
        ({"start": datetime.fromtimestamp(9.75, UTC)}, {0: range(98, 100), 1: range(98, 100)}),
        ({"end": datetime.fromtimestamp(0.1, UTC)}, {0: range(1), 1: range(1)}),
        ({"start": "latest"}, {}),
        ({"start": 5, "end": 5}, {}),
        ({"partitions": []}, {}),
    ],
)
def test_read_ranges(
    broker: FakeBroker, log: Log, bounds: dict[str, Any], expected: dict[int, range]
) -> None:
    """A range is given by offsets, by offsets of partitions, or by times."""
    broker.log.create("t", 2)
    times = pa.array([100 * i for i in range(100)], pa.timestamp("ms", tz="UTC"))
    for partition in range(2):
        _fill(broker, "t", 100, partition, timestamp=times)
    table = log.read("t", **bounds)
    found: dict[int, list[int]] = {}
    for partition, offset in zip(
        table["partition"].to_pylist(), table["offset"].to_pylist(), strict=True
    ):
        found.setdefault(partition, []).append(offset)
    assert found == {partition: list(offsets) for partition, offsets in expected.items()}


@pytest.mark.parametrize(
    ("bounds", "failure"),
    [
        ({"start": 4}, errors.OffsetOutOfRange),
        ({"end": 21}, errors.OffsetOutOfRange),
        ({"start": 12, "end": 11}, errors.BadOption),
        ({"start": {7: 0}}, errors.UnknownPartition),
        ({"partitions": [7]}, errors.UnknownPartition),
        ({"start": "newest"}, errors.BadOption),
    ],
)
def test_read_wrong_ranges(
    broker: FakeBroker, log: Log, bounds: dict[str, Any], failure: type[Exception]
) -> None:
    """A range that does not exist is an error, never fewer rows."""
    broker.log.create("t", 1)
    _fill(broker, "t", 20)
    broker.log.trim("t", 0, 5)
    with pytest.raises(failure):
        log.read("t", **bounds)


def test_read_over_broken_connections(broker: FakeBroker, log: Log) -> None:
    """A connection that breaks while a table is read costs no row and doubles none."""
    broker.log.create("t", 1)
    _fill(broker, "t", 8 * SLICE_ROWS)
    reads = iter(range(100))

    def drop() -> None:
        if next(reads) % 3 == 2:
            raise DropBefore

    broker.on_read = drop
    table = log.read("t", columns=["offset"])
    assert table["offset"].to_pylist() == list(range(8 * SLICE_ROWS))


def test_offsets_for_times(broker: FakeBroker, log: Log) -> None:
    """A time is found in each partition, the end where all is older."""
    broker.log.create("t", 2)
    times = pa.array([0, 1_000, 2_000], pa.timestamp("ms", tz="UTC"))
    _fill(broker, "t", 3, 1, timestamp=times)
    assert log.offsets_for_times("t", datetime.fromtimestamp(1, UTC)) == {0: 0, 1: 1}
    assert log.offsets_for_times("t", datetime.fromtimestamp(3, UTC)) == {0: 0, 1: 3}


# ------------------------------------------------------------------------------ options, the end


def test_unknown_options(log: Log) -> None:
    """An option that nobody knows is refused by name, with the nearest that exists."""
    log.create_topic("t")
    with pytest.raises(errors.UnknownOption, match=r"producer\(\).*'linger'.*'linger_ms'"):
        log.producer(linger=3)
    with pytest.raises(errors.UnknownOption, match=r"consumer\(\).*'begin'.*start"):
        log.consumer("t", begin=3)
    with pytest.raises(errors.UnknownOption, match="connection"):
        log.producer(connection=3)


def test_close(broker: FakeBroker) -> None:
    """Closing the log delivers what its producers hold, and ends all that came from it."""
    closed: list[str] = []
    log = Log(Connection.to(broker.address), on_close=lambda: closed.append("once"))
    log.create_topic("t")
    producer, consumer = log.producer(linger_ms=1e6), log.consumer("t")
    producer.send("t", b"x")
    log.close()
    log.close()
    assert broker.log.values("t") == [b"x"]
    for use in (lambda: producer.send("t", b"y"), lambda: consumer.poll(0), log.topics):
        with pytest.raises(errors.BadRequest, match="closed"):
            use()
    assert closed == ["once"]


def test_shown_to_people(broker: FakeBroker, log: Log) -> None:
    """A notebook shows topics and counts, and a broker that is gone does not raise."""
    broker.log.create("<t>", 2)
    _fill(broker, "<t>", 1_234)
    assert repr(log) == "Log('memory:root')"
    shown = log._repr_html_()
    assert "<td>&lt;t&gt;</td><td>2</td><td>1,234</td>" in shown
    broker.relay.close()
    assert "no answer" in log._repr_html_()
