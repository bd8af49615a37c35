"""The producer, with every fault that it has to survive."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from sparklog import errors, limits, testing
from sparklog.client.connection import Connection
from sparklog.client.producer.batch import ProducerBatch, RecordFuture, RecordMetadata
from sparklog.client.producer.producer import Producer
from sparklog.client.producer.schedule import Route
from sparklog.client.producer.statistics import ProducerStatistics
from sparklog.client.producer.streams import ProducerStream, TopicStreams
from sparklog.client.serialize import json_serializer, string_serializer
from sparklog.clock import ManualClock, SystemClock
from sparklog.formats import flight_messages
from sparklog.formats.partitioner import murmur2, to_positive
from tests.support.forks import said_in_child
from tests.support.leaders import FIRST, OTHER, Leaders
from tests.support.live import LiveBroker
from tests.support.relay import Relay

MIB = limits.MIB
SECONDS = 20.0
"""Longer than anything here takes: a test that waits so long has failed."""


@pytest.fixture(autouse=True)
def _only_errors(caplog: pytest.LogCaptureFixture) -> None:
    """Logs only errors: broken connections are expected here."""
    caplog.set_level(logging.ERROR, logger="sparklog")


@pytest.fixture(name="broker")
def _broker(broker: LiveBroker) -> LiveBroker:
    broker.create("t", 1)
    broker.create("t4", 4)
    return broker


@pytest.fixture(name="connection")
def _connection(broker: LiveBroker) -> Iterator[Connection]:
    with Connection.to(broker.address) as connection:
        yield connection


@pytest.fixture(name="timed")
def _timed(broker: LiveBroker, clock: ManualClock) -> Iterator[Connection]:
    """A connection whose time passes only when the test says so."""
    with Connection.to(broker.address, clock=clock) as connection:
        yield connection


@pytest.fixture(name="producer")
def _producer(connection: Connection) -> Iterator[Producer]:
    with Producer(connection) as producer:
        yield producer


class Gate:
    """A fault that holds appends back until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.entered = threading.Event()

    def __call__(self, request: testing.Request) -> None:
        if request.name == "append":
            self.entered.set()
            self.opened.wait(SECONDS)


def _columns(broker: LiveBroker) -> list[list[str]]:
    """The columns of each batch, which are those of its stream."""
    return [each.rows.schema.names for each in broker.appended() if each.rows is not None]


def _sequence(request: testing.Request) -> tuple[int, int]:
    """The producer id and base sequence of an append."""
    header = request.message
    assert isinstance(header, flight_messages.AppendHeader)
    return header.producer_id, header.base_sequence


# ------------------------------------------------------------------------------ sending


def test_metadata(broker: LiveBroker, producer: Producer) -> None:
    """The metadata of a record have topic, partition, offset and the time of arrival."""
    producer.send("t", b"first")
    metadata = producer.send("t", b"second").result(SECONDS)
    arrival = broker.rows("t")[1]["timestamp"]
    assert timedelta() <= datetime.now(UTC) - arrival < timedelta(seconds=SECONDS)
    arrival_us = (arrival - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)
    assert metadata == RecordMetadata(topic="t", partition=0, offset=1, timestamp_us=arrival_us)
    assert (metadata.timestamp, metadata.datetime) == (arrival_us // 1000, arrival)


def test_all_fields_arrive(broker: LiveBroker, producer: Producer) -> None:
    """Key, value, headers and timestamp are in the log as they were sent, nulls included."""
    when = datetime(2024, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)
    producer.send("t", b"v", key=b"k", headers={"h": b"x", "none": None}, timestamp=when)
    producer.send("t", None, key=b"k", headers=[("twice", b"1"), ("twice", b"2")])
    producer.send("t", b"", timestamp=1_700_000_000_123)
    producer.flush(SECONDS)
    first, second, third = broker.rows("t")
    assert (first["key"], first["value"], first["timestamp"]) == (b"k", b"v", when)
    assert first["headers"] == [{"key": "h", "value": b"x"}, {"key": "none", "value": None}]
    assert (second["value"], [each["value"] for each in second["headers"]]) == (None, [b"1", b"2"])
    assert (third["key"], third["value"], third["headers"]) == (None, b"", None)
    assert third["timestamp"].timestamp() == 1_700_000_000.123


def test_own_timestamp_in_metadata(producer: Producer) -> None:
    """The metadata has the record's own timestamp, if it has one."""
    own = producer.send("t", b"v", timestamp=1_234)
    other = producer.send("t", b"v")
    assert own.result(SECONDS).timestamp == 1_234
    assert other.result(SECONDS).timestamp != 1_234


def test_order_of_a_key(broker: LiveBroker, producer: Producer) -> None:
    """Records go to the partition murmur2(key) mod count, in order, and their metadata names it."""
    sent = [(b"key-%d" % (i % 7), b"%d" % i) for i in range(25_000)]
    futures = [producer.send("t4", value, key) for key, value in sent]
    producer.flush(SECONDS)
    standing = [broker.rows("t4", number) for number in range(4)]
    found: dict[bytes, list[bytes]] = {}
    for number, rows in enumerate(standing):
        for row in rows:
            assert to_positive(murmur2(row["key"])) % 4 == number
            found.setdefault(row["key"], []).append(row["value"])
    for i in range(7):
        key = b"key-%d" % i
        assert found[key] == [value for each, value in sent if each == key]
    for i in range(0, len(sent), 99):
        metadata = futures[i].result()
        row = standing[metadata.partition][metadata.offset]
        assert (row["key"], row["value"]) == sent[i]


def test_batches_without_keys_take_turns(broker: LiveBroker, connection: Connection) -> None:
    """A batch without keys goes to one partition, and the next batch to another."""
    with Producer(connection, batch_rows=10, linger_ms=1000) as producer:
        for i in range(40):
            producer.send("t4", b"%d" % i)
    assert sorted(each.partition for each in broker.appended()) == [0, 1, 2, 3]
    for number in range(4):
        values = [int(value or b"") for value in broker.values("t4", number)]
        assert values == list(range(values[0], values[0] + 10))


def test_named_partition(broker: LiveBroker, producer: Producer) -> None:
    """A partition in `send` takes precedence over the key."""
    futures = [producer.send("t4", b"v", key=b"k", partition=number) for number in (3, 1, 3, 2)]
    assert [future.result(SECONDS).partition for future in futures] == [3, 1, 3, 2]
    assert [future.result().offset for future in futures] == [0, 0, 1, 0]


def test_own_partitioner(broker: LiveBroker, connection: Connection) -> None:
    """A partitioner is called for each record without a partition."""
    asked = []

    def partitioner(topic: str, key: bytes | None, count: int) -> int:
        asked.append((topic, key, count))
        return 2

    with Producer(connection, partitioner=partitioner) as producer:
        assert producer.send("t4", b"v", key=b"k").result(SECONDS).partition == 2
        assert producer.send("t4", b"v", partition=1).result(SECONDS).partition == 1
        table = pa.table({"value": [b"a", b"b"], "partition": pa.array([None, 3], pa.int64())})
        ranges = producer.send_table("t4", table).result(SECONDS)
    assert asked == [("t4", b"k", 4), ("t4", None, 4)]
    assert sorted(each.partition for each in ranges) == [2, 3]


def test_partitioner_out_of_range(connection: Connection) -> None:
    """`send` refuses a partition of a partitioner that the topic does not have."""
    with (
        Producer(connection, partitioner=lambda *_: 4) as producer,
        pytest.raises(errors.UnknownPartition),
    ):
        producer.send("t4", b"v")


def test_serializers(broker: LiveBroker, connection: Connection) -> None:
    """Serializers make the bytes of keys and values, and are not called for None."""
    with Producer(
        connection, key_serializer=string_serializer, value_serializer=json_serializer
    ) as producer:
        producer.send("t", {"a": [1, None]}, key="ключ")
        producer.send("t", None, key="ключ")
    first, second = broker.rows("t")
    assert (first["key"], first["value"]) == ("ключ".encode(), b'{"a":[1,null]}')
    assert second["value"] is None


def test_full_batch_is_sent_before_the_linger(broker: LiveBroker, connection: Connection) -> None:
    """A batch is sent when it is full, by rows or by bytes, before the linger is over."""
    with Producer(connection, linger_ms=1e6, batch_rows=3, batch_bytes=100) as producer:
        futures = [producer.send("t", b"x") for _ in range(3)]
        futures.append(producer.send("t", b"y" * 100))
        _wait_for(lambda: all(future.done() for future in futures))
    assert [broker.values("t")[i] for i in (0, 3)] == [b"x", b"y" * 100]
    assert len(broker.appended()) == 2


def test_linger(broker: LiveBroker, timed: Connection, clock: ManualClock) -> None:
    """A record that no caller waits for is sent when the linger is over."""
    delivered = threading.Event()
    with Producer(timed, linger_ms=60_000) as producer:
        producer.send("t", b"x", on_delivery=lambda *_: delivered.set())
        clock.advance(59.0)
        assert broker.appended() == []
        clock.advance(1.0)
        assert delivered.wait(SECONDS)


def test_waiting_expedites(connection: Connection) -> None:
    """Waiting for a record sends it before the linger is over."""
    with Producer(connection, linger_ms=1e6) as producer:
        for offset in range(3):
            assert producer.send("t", b"x").result(SECONDS).offset == offset


def test_flush_waits_for_all_topics(broker: LiveBroker, connection: Connection) -> None:
    """After `flush` every record sent before is decided, in every topic."""
    with Producer(connection, linger_ms=1e6) as producer:
        futures = [producer.send(topic, b"x") for topic in ("t", "t4", "t")]
        producer.flush(SECONDS)
        assert all(future.done() for future in futures)


def test_flush_times_out(broker: LiveBroker, connection: Connection) -> None:
    """`flush` and `result` stop waiting after their timeout, and the record is delivered later."""
    broker.fault = gate = Gate()
    with Producer(connection) as producer:
        future = producer.send("t", b"x")
        with pytest.raises(errors.StillSending, match="before the flush"):
            producer.flush(0.01)
        with pytest.raises(errors.StillSending, match="writes it twice") as waited:
            future.result(0.01)
        assert not isinstance(waited.value, errors.Retriable)
        gate.opened.set()
        assert future.result(SECONDS).offset == 0


def test_awaiting(connection: Connection) -> None:
    """A future can be awaited inside a running event loop, which is not blocked meanwhile."""

    async def send_some() -> list[RecordMetadata]:
        futures = [producer.send("t", b"x") for _ in range(3)]

        async def one(future: RecordFuture) -> RecordMetadata:
            return await future

        return await asyncio.gather(*(one(future) for future in futures), one(futures[0]))

    with Producer(connection, linger_ms=1e6) as producer:
        found = asyncio.run(send_some())
    assert [metadata.offset for metadata in found] == [0, 1, 2, 0]


def test_many_threads(broker: LiveBroker, connection: Connection) -> None:
    """Any number of threads may send; the records of each keep their order, and none is lost."""

    def send(name: int) -> None:
        for i in range(2_000):
            producer.send("t4", b"%d" % i, key=b"%d" % name)
            if i % 500 == 0:
                producer.flush(SECONDS)

    with Producer(connection, batch_rows=100) as producer:
        threads = [threading.Thread(target=send, args=(name,)) for name in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found: dict[bytes, list[int]] = {}
    for number in range(4):
        for row in broker.rows("t4", number):
            found.setdefault(row["key"], []).append(int(row["value"]))
    assert found == {b"%d" % name: list(range(2_000)) for name in range(6)}


def test_columns_widen(broker: LiveBroker, producer: Producer) -> None:
    """A stream has the columns in use; a wider batch opens another, and none is narrower."""
    details: list[dict[str, Any]] = [{}, {"key": b"k"}, {}, {"headers": {"h": b"1"}}]
    for each in (*details, {"timestamp": 1}, {}):
        producer.send("t", b"x", **each).result(SECONDS)
    assert _columns(broker) == [
        ["value"],
        ["key", "value"],
        ["key", "value"],
        ["key", "value", "headers"],
        ["timestamp", "key", "value", "headers"],
        ["timestamp", "key", "value", "headers"],
    ]
    rows = broker.rows("t")
    assert [row["key"] for row in rows] == [None, b"k", None, None, None, None]
    assert [row["headers"] is None for row in rows] == [True, True, True, False, True, True]


def test_widening_under_load(broker: LiveBroker, connection: Connection) -> None:
    """A wider batch waits for the acks of the batches in flight, and overtakes none."""
    with Producer(connection, batch_rows=5) as producer:
        producer.send("t", b"0").result(SECONDS)
        for i in range(1, 2_000):
            producer.send("t", b"%d" % i, headers={"h": b""} if i == 777 else None)
    assert broker.values("t") == [b"%d" % i for i in range(2_000)]
    assert len(set(map(tuple, _columns(broker)))) == 2


# ------------------------------------------------------------------------------ refused in send


@pytest.mark.parametrize(
    ("record", "failure"),
    [
        ({"value": "text"}, errors.WrongSchema),
        ({"value": 1}, errors.WrongSchema),
        ({"value": b"v", "key": "text"}, errors.WrongSchema),
        ({"value": b"v", "headers": {"h": "text"}}, errors.WrongSchema),
        ({"value": b"v", "headers": {1: b"x"}}, errors.WrongSchema),
        ({"value": b"v", "headers": [b"x"]}, errors.WrongSchema),
        ({"value": b"v", "timestamp": "today"}, errors.WrongSchema),
        ({"value": b"v", "timestamp": True}, errors.WrongSchema),
        ({"value": b"v", "timestamp": 2**60}, errors.WrongSchema),
        ({"value": b"v", "timestamp": datetime(2024, 1, 1)}, errors.BadOption),  # noqa: DTZ001
        ({"value": b"v", "partition": "0"}, errors.WrongSchema),
        ({"value": b"v", "partition": 4}, errors.UnknownPartition),
        ({"value": b"v", "partition": -1}, errors.UnknownPartition),
        ({"value": b"v" * 1_001}, errors.RecordTooLarge),
        ({"value": b"v" * 999, "key": b"kk"}, errors.RecordTooLarge),
        ({"value": b"v" * 999, "headers": {"h": b"x"}}, errors.RecordTooLarge),
        ({"value": b"v" * 999, "headers": {"é": None}}, errors.RecordTooLarge),
        ({"value": b"v", "headers": {"\ud800": b"x"}}, errors.WrongSchema),
        ({"value": b"v", "topic": "no such"}, errors.BadTopicName),
        ({"value": b"v", "topic": "unknown"}, errors.UnknownTopic),
        ({"value": b"v", "topic": 7}, errors.BadTopicName),
    ],
)
def test_refused_before_anything_is_buffered(
    broker: LiveBroker, connection: Connection, record: dict[str, Any], failure: type[Exception]
) -> None:
    """`send` raises for a wrong record, which has no effect."""
    broker.create("small", 4, max_message_bytes="1000")
    with Producer(connection) as producer:
        before = producer.send("small", b"before", partition=0)
        with pytest.raises(failure):
            producer.send(**({"topic": "small"} | record))
        after = producer.send("small", b"after", partition=0)
        assert (before.result(SECONDS).offset, after.result(SECONDS).offset) == (0, 1)
    assert broker.rows("small", 0)[1]["headers"] is None


def test_partition_that_was_just_added(broker: LiveBroker, producer: Producer) -> None:
    """A partition that is not known is looked for before it is refused."""
    producer.send("t", b"x").result(SECONDS)
    with Connection.to(broker.address) as admin:
        admin.action(
            "topics.add_partitions", flight_messages.AddPartitions(topic="t", partitions=3)
        )
    assert producer.send("t", b"x", partition=2).result(SECONDS).partition == 2


def test_topic_that_was_deleted(broker: LiveBroker, producer: Producer) -> None:
    """Records to a deleted topic fail, at last in `send`; a topic created again is used."""
    producer.send("t", b"x").result(SECONDS)
    broker.delete("t")
    assert isinstance(producer.send("t", b"x").exception(SECONDS), errors.UnknownTopic)
    with pytest.raises(errors.UnknownTopic):
        producer.send("t", b"x")
    broker.create("t", 2)
    assert producer.send("t", b"x", partition=1).result(SECONDS).offset == 0


def test_options_are_checked(connection: Connection) -> None:
    """An invalid option is refused by name."""
    with pytest.raises(errors.BadOption, match="batch_rows"):
        Producer(connection, batch_rows=0)


# ------------------------------------------------------------------------------ callbacks


def test_callbacks(connection: Connection) -> None:
    """Callbacks get error and metadata, in order, and have run when `flush` returns."""
    called: list[tuple[str, int]] = []

    def noting(who: str) -> Any:
        return lambda _, metadata: called.append((who, metadata.offset))

    with Producer(connection, on_delivery=noting("all")) as producer:
        for i in range(3):
            producer.send("t", b"%d" % i, on_delivery=noting("one"))
        producer.flush(SECONDS)
        assert called == [(who, offset) for offset in range(3) for who in ("all", "one")]


def test_callback_of_a_failure(broker: LiveBroker, connection: Connection) -> None:
    """A callback gets the failure of its record."""
    refusal = errors.WrongSchema(reason="no")
    broker.fail_next("append", error=refusal)
    called: list[Any] = []
    with Producer(connection) as producer:
        producer.send("t", b"x", on_delivery=lambda *given: called.append(given))
    [(error, metadata)] = called
    assert (error.facts, metadata) == (refusal.facts, None)


def test_callback_that_raises(connection: Connection, caplog: pytest.LogCaptureFixture) -> None:
    """An exception in a callback is logged, and the producer continues."""
    with Producer(connection) as producer:
        producer.send("t", b"x", on_delivery=lambda *_: 1 // 0)
        producer.flush(SECONDS)
        assert producer.send("t", b"y").result(SECONDS).offset == 1
    assert "ZeroDivisionError" in caplog.text


def test_callback_that_waits_for_itself(connection: Connection) -> None:
    """A callback that waits for records of its own topic gets an error instead of a deadlock."""
    raised: list[Exception] = []

    def wait(*_: object) -> None:
        try:
            producer.send("t", b"y").result()
        except errors.BadRequest as error:
            raised.append(error)

    with Producer(connection) as producer:
        producer.send("t", b"x", on_delivery=wait)
        producer.flush(SECONDS)
        assert len(raised) == 1


def test_done_callbacks(connection: Connection) -> None:
    """A done callback runs once, also if it is added after the record is decided."""
    called: list[int] = []
    with Producer(connection) as producer:
        future = producer.send("t", b"x")
        future.add_done_callback(lambda each: called.append(each.result().offset))
        producer.flush(SECONDS)
        future.add_done_callback(lambda each: called.append(each.result().offset))
    assert called == [0, 0]


# ------------------------------------------------------------------------------ the buffer


def test_full_buffer_blocks(broker: LiveBroker, timed: Connection, clock: ManualClock) -> None:
    """With a full buffer `send` waits, raises after `max_block_seconds`, and has no effect."""
    broker.fault = gate = Gate()
    with (
        Producer(timed, buffer_bytes=1_000, batch_bytes=100, max_block_seconds=5.0) as producer,
        ThreadPoolExecutor() as threads,
    ):
        for _ in range(7):
            producer.send("t", b"x" * 100)
        blocked = threads.submit(producer.send, "t", b"x" * 100)
        _pass_time(clock, blocked.done)
        with pytest.raises(errors.TimedOut, match="buffer"):
            blocked.result()
        gate.opened.set()
        producer.flush(SECONDS)
        assert producer.send("t", b"y").result(SECONDS).offset == 7


def test_full_buffer_lets_go_on(broker: LiveBroker, connection: Connection) -> None:
    """A caller that waits for memory continues as soon as there is some."""
    broker.fault = gate = Gate()

    def open_when_entered() -> None:
        gate.entered.wait(SECONDS)
        gate.opened.set()

    opener = threading.Thread(target=open_when_entered)
    opener.start()
    with Producer(connection, buffer_bytes=1_000, batch_bytes=100) as producer:
        for _ in range(200):
            producer.send("t", b"x" * 100)
        producer.send_table("t", pa.table({"value": [b"x" * 2_000]}))
    opener.join()
    assert len(broker.values("t")) == 201


# ------------------------------------------------------------------------------ tables


def test_table(broker: LiveBroker, producer: Producer) -> None:
    """Rows of a table go to the partitions of their keys, in order, after records sent before."""
    producer.send("t4", b"before", key=b"1")
    table = pa.table(
        {
            "key": [b"%d" % (i % 5) for i in range(1_000)],
            "value": [str(i) for i in range(1_000)],
            "timestamp": pa.array(range(1_000), pa.timestamp("ms", tz="UTC")),
        }
    )
    ranges = producer.send_table("t4", table).result(SECONDS)
    assert sum(each.rows for each in ranges) == 1_000
    found = [row for number in range(4) for row in broker.rows("t4", number)]
    of_one = [row["value"] for row in found if row["key"] == b"1"]
    assert of_one == [b"before", *(b"%d" % i for i in range(1, 1_000, 5))]
    for each in ranges:
        rows = broker.rows("t4", each.partition)[each.offset : each.offset + each.rows]
        assert [row["timestamp"].microsecond // 1000 for row in rows] == [
            int(row["value"]) for row in rows
        ]


@pytest.mark.parametrize(
    "make",
    [
        pa.table,
        lambda columns: pa.table(columns).to_batches()[0],
        lambda columns: pa.table(columns).to_reader(),
        pl.DataFrame,
        pd.DataFrame,
    ],
    ids=["table", "batch", "reader", "polars", "pandas"],
)
def test_kinds_of_tables(broker: LiveBroker, producer: Producer, make: Any) -> None:
    """Tables, batches and readers of Arrow and data frames of polars and pandas are accepted."""
    future = producer.send_table("t", make({"key": ["a", None], "value": [b"1", b"2"]}))
    assert [each.rows for each in future.result(SECONDS)] == [2]
    assert future.done()
    rows = [(row["key"], row["value"]) for row in broker.rows("t")]
    assert rows == [(b"a", b"1"), (None, b"2")]


def test_large_table_goes_in_pieces(broker: LiveBroker, producer: Producer) -> None:
    """A table larger than the largest batch is cut into pieces, and their ranges join."""
    rows = 3 * limits.TABLE_BATCH_ROWS
    ranges = producer.send_table("t", pa.table({"value": np.arange(rows).astype("S8")})).result(
        SECONDS
    )
    assert len(ranges) > 1
    assert all(each.rows <= limits.TABLE_BATCH_ROWS for each in ranges)
    ends = [each.offset + each.rows for each in ranges]
    assert [0, *ends] == [*(each.offset for each in ranges), rows]


def test_empty_table(producer: Producer) -> None:
    """An empty table is done at once, and has no range."""
    future = producer.send_table("t", pa.table({"value": pa.array([], pa.binary())}))
    assert future.result(0) == []


@pytest.mark.parametrize(
    ("columns", "failure"),
    [
        ({"key": [b"k"]}, errors.WrongSchema),
        ({"value": [1]}, errors.WrongSchema),
        ({"value": [b"v"], "extra": [1]}, errors.WrongSchema),
        ({"value": [b"v"], "partition": ["0"]}, errors.WrongSchema),
        ({"value": [b"v"], "partition": [-1]}, errors.WrongSchema),
        ({"value": [b"v"], "partition": [2**40]}, errors.WrongSchema),
        ({"value": [b"v"], "partition": [1]}, errors.UnknownPartition),
        ({"value": [b"v", b"v" * 1_001]}, errors.RecordTooLarge),
        (
            {"value": [b"v" * 600], "headers": [[{"key": "k", "value": b"h" * 400}]]},
            errors.RecordTooLarge,
        ),
    ],
)
def test_wrong_tables(
    broker: LiveBroker,
    connection: Connection,
    columns: dict[str, Any],
    failure: type[Exception],
) -> None:
    """`send_table` raises for a wrong table, and none of its rows is sent."""
    broker.create("small", max_message_bytes="1000")
    with Producer(connection) as producer, pytest.raises(failure):
        producer.send_table("small", pa.table(columns))
    assert broker.values("small") == []


def test_no_table(producer: Producer) -> None:
    """An object that is not a table is refused by its type."""
    with pytest.raises(errors.WrongSchema, match="list"):
        producer.send_table("t", [b"x"])


def test_failed_table(broker: LiveBroker, connection: Connection) -> None:
    """The future of a table raises the failure of its rows."""
    broker.fail_next("append", error=errors.WrongSchema(reason="no"))
    with Producer(connection) as producer:
        future = producer.send_table("t", pa.table({"value": [b"x"]}))
        with pytest.raises(errors.WrongSchema):
            future.result(SECONDS)


# ------------------------------------------------------------------------------ faults


@pytest.mark.parametrize("answer_only", [False, True])
def test_dropped_connection(broker: LiveBroker, producer: Producer, answer_only: bool) -> None:
    """A record is in the log once if its connection breaks, before or after the append."""
    broker.fail_next("append", count=3, answer_only=answer_only)
    assert producer.send("t", b"x").result(SECONDS).offset == 0
    assert broker.values("t") == [b"x"]


def test_retries_are_logged_seldom(
    broker: LiveBroker, producer: Producer, caplog: pytest.LogCaptureFixture
) -> None:
    """Several retries each second are one line in the log."""
    caplog.set_level(logging.WARNING, logger="sparklog")
    broker.fail_next("append", count=4)
    producer.send("t", b"x").result(SECONDS)
    assert sum("is retried" in each.message for each in caplog.records) == 1


def test_refusal_that_passes(broker: LiveBroker, producer: Producer) -> None:
    """A batch with a retriable failure is sent again, before the batches behind it."""
    full = errors.QueueFull(queue="q", bytes=1, setting="s")
    broker.fail_next("append", count=2, error=full)
    futures = [producer.send("t", b"%d" % i) for i in range(3)]
    assert [future.result(SECONDS).offset for future in futures] == [0, 1, 2]


def test_poisoned_batch_fails_alone(broker: LiveBroker, connection: Connection) -> None:
    """A batch refused for good fails its own records only; the batches behind it are delivered."""
    gate = Gate()

    def fault(request: testing.Request) -> None:
        gate(request)
        if request.rows is not None and request.rows["value"][0].as_py() == b"2":
            raise errors.WrongSchema(reason="poison")

    broker.fault = fault
    with Producer(connection, batch_rows=2, linger_ms=1e6) as producer:
        futures = [producer.send("t", b"%d" % i) for i in range(10)]
        gate.opened.set()
        producer.flush(SECONDS)
        failed = {i: str(each.exception()) for i, each in enumerate(futures) if each.exception()}
        assert failed == {2: "poison", 3: "poison"}
    assert broker.values("t") == [b"%d" % i for i in (0, 1, 4, 5, 6, 7, 8, 9)]


@pytest.fixture(name="small")
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveBroker]:
    """A broker that ends the stream of a batch of a MiB before it has read the batch."""
    monkeypatch.setattr("sparklog.broker.flight.listener.BESIDE_BYTES", 0)
    with LiveBroker({"writer.max_batch_bytes": MIB, "writer.max_record_bytes": MIB}) as broker:
        broker.create("t")
        yield broker


LARGE = b"x" * (MIB - 100)
"""The largest value, whose batch is larger than the largest batch."""


def test_poisoned_batch_that_ends_streams(small: LiveBroker) -> None:
    """After a refusal that ends the stream, its batches are sent one by one, to find the cause."""
    small.fault = gate = Gate()

    def are_together(seen: ProducerStatistics) -> bool:
        """The broker may refuse the stream before the last of them is sent."""
        return seen.in_flight == limits.PRODUCER_WINDOW or bool(seen.retries)

    with Connection.to(small.address) as connection, Producer(connection, batch_rows=1) as producer:
        futures = [producer.send("t", LARGE if i == 3 else b"%d" % i) for i in range(10)]
        assert gate.entered.wait(SECONDS)
        _wait_for(lambda: are_together(producer.statistics()))
        gate.opened.set()
        producer.flush(SECONDS)
        assert [i for i, each in enumerate(futures) if each.exception()] == [3]
        assert isinstance(futures[3].exception(), errors.BatchTooLarge)
    assert small.values("t") == [b"%d" % i for i in range(10) if i != 3]


def test_answer_that_cannot_be_sent(broker: LiveBroker) -> None:
    """A fault of the broker at one answer ends the stream: later answers do not take its place."""
    gate, answers = Gate(), itertools.count()

    def lose_first(request: testing.Request) -> None:
        if request.name == "append" and next(answers) == 0:
            raise MemoryError

    broker.fault, broker.on_answer = gate, lose_first
    with Connection.to(broker.address) as connection, Producer(connection, batch_rows=1) as sender:
        futures = [sender.send("t", b"%d" % i) for i in range(5)]
        assert gate.entered.wait(SECONDS)
        _wait_for(lambda: sender.statistics().in_flight == limits.PRODUCER_WINDOW)
        gate.opened.set()
        assert [each.result(SECONDS).offset for each in futures] == [0, 1, 2, 3, 4]
    assert broker.values("t") == [b"%d" % i for i in range(5)]


def test_refused_stream(small: LiveBroker) -> None:
    """After the refusal of a whole stream, the batch that was sent on it fails with that error."""
    with Connection.to(small.address) as connection, Producer(connection) as producer:
        assert isinstance(producer.send("t", LARGE).exception(SECONDS), errors.BatchTooLarge)


def test_broker_that_moves(broker: LiveBroker) -> None:
    """A producer finds the broker that took over, and no record is lost or duplicated."""
    addresses = [broker.address]
    with (
        Connection(lambda: addresses[0]) as connection,
        Producer(connection, batch_rows=10) as producer,
    ):
        for i in range(500):
            producer.send("t", b"%d" % i)
        broker.crash()
        broker.move()
        assert broker.address != addresses[0]
        addresses[0] = broker.address
        for i in range(500, 1_000):
            producer.send("t", b"%d" % i)
        producer.flush(SECONDS)
    assert broker.values("t") == [b"%d" % i for i in range(1_000)]


def test_leaders() -> None:
    """The batches of a partition go to its leader, also after the leader has changed."""
    with Leaders() as leaders, Connection.to(leaders.addresses[FIRST]) as connection:
        leaders.led_by["t4", 1] = OTHER
        with Producer(connection) as producer:
            for number in range(4):
                producer.send("t4", b"a", partition=number)
            producer.flush(SECONDS)
            assert leaders.appended(OTHER) == {1}
            leaders.led_by["t4", 1] = FIRST
            leaders.led_by["t4", 2] = OTHER
            for number in range(4):
                producer.send("t4", b"b", partition=number)
            producer.flush(SECONDS)
        assert leaders.appended(OTHER) == {1, 2}
        assert all(leaders.values("t4", number) == [b"a", b"b"] for number in range(4))


def test_leader_that_dies() -> None:
    """When a leader dies, the batches of its partitions go to their new leader."""
    with Leaders() as leaders:
        leaders.led_by["t", 0] = OTHER
        first = leaders.addresses[FIRST]
        with Connection.to(first) as connection, Producer(connection) as producer:
            producer.send("t", b"a").result(SECONDS)
            leaders.stop(OTHER)
            future = producer.send("t", b"b")
            leaders.led_by["t", 0] = FIRST
            assert future.result(SECONDS).offset == 1


def test_leader_that_is_new() -> None:
    """Batches that wait for their turn go to the new leader, which need not be known before."""
    with Leaders() as leaders, Connection.to(leaders.addresses[FIRST]) as connection:
        leaders.stop(OTHER)
        leaders.fault = gate = Gate()
        producer = Producer(connection)
        refused = producer.send("t4", b"a", partition=0)
        assert gate.entered.wait(SECONDS)
        in_line = producer.send("t4", b"b", key=b"needs a wider stream", partition=1)
        [route] = producer._senders["t4"]._schedule.routes
        _wait_for(lambda: route.stream is not None and route.stream.is_ending)
        leaders.start(OTHER)
        for number in range(2):
            leaders.led_by["t4", number] = OTHER
        gate.opened.set()
        assert [each.result(SECONDS).offset for each in (refused, in_line)] == [0, 0]
        assert leaders.appended(OTHER) == {0, 1}
        producer.close(SECONDS)


class DiskFailed(Exception):
    """An exception that is none of sparklog's errors."""


@pytest.mark.parametrize("failure", [OSError("no more files"), DiskFailed("EIO")])
def test_broker_that_is_not_found(broker: LiveBroker, failure: Exception) -> None:
    """A broker is looked for again after any failure to find it."""
    failures: list[Exception] = []
    asked = threading.Event()

    def resolve() -> str:
        if failures:
            asked.set()
            raise failures.pop()
        return broker.address

    with Connection(resolve) as connection, Producer(connection) as producer:
        producer.send("t", b"1").result(SECONDS)
        failures += [failure, failure]
        broker.cut_connections()
        assert producer.send("t", b"2").result(SECONDS).offset == 1
    assert asked.is_set()


def test_late_delivery_that_was_never_sent(
    broker: LiveBroker, timed: Connection, clock: ManualClock
) -> None:
    """A record that no broker takes in time fails as late, surely without effect."""
    producer = Producer(timed, delivery_timeout_seconds=30.0, linger_ms=0)
    producer.send("t", b"x").result(SECONDS)
    broker.crash()
    future = producer.send("t", b"y")
    _pass_time(clock, future.done)
    assert isinstance(future.exception(), errors.TimedOut | errors.OutcomeUnknown)
    future = producer.send("t", b"z")
    _pass_time(clock, future.done)
    assert isinstance(future.exception(), errors.TimedOut)
    producer.close()


def test_late_delivery_of_unknown_outcome(
    broker: LiveBroker, timed: Connection, clock: ManualClock
) -> None:
    """The outcome of a record that was sent and not answered in time is unknown; others follow."""
    broker.fault = gate = Gate()
    with Producer(timed, delivery_timeout_seconds=30.0, linger_ms=0) as producer:
        stuck = producer.send("t", b"stuck")
        assert gate.entered.wait(SECONDS)
        clock.advance(30.0)
        assert isinstance(stuck.exception(SECONDS), errors.OutcomeUnknown)
        gate.opened.set()
        assert producer.send("t", b"next").result(SECONDS).partition == 0
    assert broker.values("t").count(b"next") == 1


def test_stream_that_was_given_up(
    broker: LiveBroker, timed: Connection, clock: ManualClock
) -> None:
    """A stream that was given up ends as soon as its broker continues, also after `close`."""

    def reading() -> int:
        return [each.name for each in threading.enumerate()].count("sparklog-acks-given-up")

    broker.create("given-up")
    with Producer(timed, delivery_timeout_seconds=30.0, linger_ms=0) as producer:
        for _ in range(2):
            broker.fault = gate = Gate()
            stuck = producer.send("given-up", b"stuck")
            assert gate.entered.wait(SECONDS)
            clock.advance(30.0)
            assert isinstance(stuck.exception(SECONDS), errors.OutcomeUnknown)
            assert reading() >= 1
            gate.opened.set()
            _wait_for(lambda: reading() == 0)
        broker.fault = gate = Gate()
        producer.send("given-up", b"stuck")
        assert gate.entered.wait(SECONDS)
        with pytest.raises(errors.OutcomeUnknown):
            producer.close(0)
    assert reading() == 1
    gate.opened.set()
    _wait_for(lambda: reading() == 0)


def test_identity_that_the_broker_forgot(broker: LiveBroker, producer: Producer) -> None:
    """After a broker has lost the producer's state, new records are sent under a new identity."""
    producer.send("t", b"1").result(SECONDS)
    forgotten = errors.OutOfOrderSequence(
        topic="t", partition=0, producer_id=_sequence(broker.appended()[0])[0], found=1, expected=0
    )
    broker.fail_next("append", error=forgotten)
    assert producer.send("t", b"2").result(SECONDS).offset == 1
    first, _, last = map(_sequence, broker.appended())
    assert (last[0] > first[0], last[1]) == (True, 0)
    assert broker.values("t") == [b"1", b"2"]


@pytest.mark.parametrize("seed", range(12))
def test_exactly_once_over_faults(broker: LiveBroker, connection: Connection, seed: int) -> None:
    """A record is in the log once and in order after any faults, or its future has the failure."""
    random = Random(seed)
    busy = errors.StorageUnavailable(operation="put", path="p", reason="r")
    poison = errors.WrongSchema(reason="poison")
    faults = [testing.ConnectionCut(), busy, poison]
    met: set[tuple[int, int, int]] = set()

    def fault(request: testing.Request) -> None:
        if request.name != "append":
            return
        batch = (request.partition, *_sequence(request))
        # A broker refuses for good what it has not appended, and a first attempt surely is not.
        is_first = batch not in met
        met.add(batch)
        if random.random() < 0.02:
            raise random.choice(faults[: 3 if seed % 2 and is_first else 2])

    def lose_answer(request: testing.Request) -> None:
        if request.name == "append" and random.random() < 0.01:
            raise testing.ConnectionCut

    broker.fault, broker.on_answer = fault, lose_answer
    with Producer(connection, batch_rows=7, linger_ms=1) as producer:
        futures = [
            producer.send("t4", b"%d" % i, key=b"%d" % (i % 9), partition=i % 3)
            for i in range(1_500)
        ]
        producer.flush(SECONDS)
    standing = [[int(v or b"") for v in broker.values("t4", number)] for number in range(3)]
    for number, values in enumerate(standing):
        assert values == sorted(set(values))
        for i in range(number, 1_500, 3):
            failure = futures[i].exception(0)
            assert (i in values) == (failure is None), failure
            if failure is None:
                assert values[futures[i].result().offset] == i
    if seed % 2 == 0:
        assert sum(map(len, standing)) == 1_500


# ------------------------------------------------------------------------------ the end


def test_closed(connection: Connection) -> None:
    """A closed producer has delivered all records, and refuses new ones."""
    producer = Producer(connection, linger_ms=1e6)
    future = producer.send("t", b"x")
    producer.close()
    assert future.result(0).offset == 0
    with pytest.raises(errors.BadRequest, match="closed"):
        producer.send("t", b"y")
    producer.close()


def test_closed_with_something_left(broker: LiveBroker, connection: Connection) -> None:
    """`close` gives up after its timeout; the futures of the other records have the failure."""
    broker.fault = gate = Gate()
    producer = Producer(connection)
    future = producer.send("t", b"x")
    assert gate.entered.wait(SECONDS)
    with pytest.raises(errors.OutcomeUnknown, match=r"closed after 0\.01 s"):
        producer.close(0.01)
    assert isinstance(future.exception(0), errors.OutcomeUnknown)
    gate.opened.set()


def test_dropped_with_something_left(broker: LiveBroker, connection: Connection) -> None:
    """A producer that is dropped before its records are acked warns, and delivers them."""
    broker.fault = gate = Gate()
    producer = Producer(connection)
    future = producer.send("t", b"x")
    kept = [producer]
    del producer
    with pytest.warns(ResourceWarning, match="1 of its records"):
        kept.clear()
    gate.opened.set()
    assert future.result(SECONDS).offset == 0


def test_idle_producer_ends_its_threads(timed: Connection, clock: ManualClock) -> None:
    """After a while without records there are no threads; the next record starts them again."""

    def sending() -> list[str]:
        return [each.name for each in threading.enumerate() if each.name.endswith("-t")]

    with Producer(timed) as producer:
        for offset in range(3):
            assert producer.send("t", b"x").result(SECONDS).offset == offset
            _pass_time(clock, lambda: not sending())


def test_closed_connection(broker: LiveBroker, connection: Connection) -> None:
    """On a closed connection records fail at once, not after the delivery timeout."""
    with Producer(connection) as producer:
        producer.send("t", b"x").result(SECONDS)
        connection.close()
        broker.cut_connections()
        assert producer.send("t", b"y").exception(SECONDS) is not None


def test_closed_in_the_middle(
    connection: Connection, broker: LiveBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that is given up while it is split is not sent, nor counted twice."""
    entered, left = threading.Event(), threading.Event()
    split = ProducerBatch.split

    def slow_split(batch: ProducerBatch, *arguments: int) -> Any:
        entered.set()
        left.wait(SECONDS)
        return split(batch, *arguments)

    monkeypatch.setattr(ProducerBatch, "split", slow_split)
    producer = Producer(connection, linger_ms=0)
    future = producer.send("t", b"x")
    assert entered.wait(SECONDS)

    def close() -> None:
        with pytest.raises(errors.OutcomeUnknown):
            producer.close(0)

    closer = threading.Thread(target=close)
    closer.start()
    assert isinstance(future.exception(SECONDS), errors.BadRequest)
    left.set()
    closer.join()
    assert producer.statistics().buffered_bytes == 0
    assert "producers.new" not in broker.names()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked(broker: LiveBroker, connection: Connection) -> None:
    """A forked child refuses the producer; the parent sends the records."""
    broker.fault = gate = Gate()
    with Producer(connection) as producer:
        future = producer.send("t", b"x")
        assert "belongs to the parent" in said_in_child(lambda: producer.send("t", b"y"))
        assert "for the parent to send" in said_in_child(future.result)
        assert said_in_child(producer.close) == "None"
        gate.opened.set()
        assert future.result(SECONDS).offset == 0
    assert broker.values("t") == [b"x"]


class FailingClock(SystemClock):
    """A clock that raises in the threads that send, on request: a fault of our own there."""

    fails = False

    def monotonic(self) -> float:
        if self.fails and threading.current_thread().name.startswith("sparklog-send"):
            raise ZeroDivisionError
        return super().monotonic()


@pytest.fixture(name="failing")
def _failing(broker: LiveBroker) -> Iterator[tuple[FailingClock, Producer]]:
    clock = FailingClock()
    with Connection.to(broker.address, clock=clock) as connection, Producer(connection) as producer:
        yield clock, producer


def test_fault_of_ours(failing: tuple[FailingClock, Producer]) -> None:
    """A fault in the sender fails every record that waits, and stops the producer."""
    clock, producer = failing
    clock.fails = True
    with pytest.raises(errors.SparklogError, match="ZeroDivisionError"):
        producer.send("t", b"x").result(SECONDS)
    with pytest.raises(errors.SparklogError, match="ZeroDivisionError"):
        producer.send("t", b"y")


def test_fault_of_ours_calls_back(failing: tuple[FailingClock, Producer]) -> None:
    """Callbacks and coroutines get a fault of the sender."""
    clock, producer = failing
    clock.fails = True
    failures: list[Any] = []

    async def send() -> None:
        # One record: the sender may have failed before a second one is sent.
        sent = producer.send("t", b"x", on_delivery=on_delivery)
        failures.extend(await asyncio.gather(sent, return_exceptions=True))

    def on_delivery(error: errors.SparklogError | None, _: RecordMetadata | None) -> None:
        failures.append(error)

    asyncio.run(asyncio.wait_for(send(), SECONDS))
    producer.flush(SECONDS)
    assert [type(each) for each in failures] == [errors.UnexpectedError] * 2


def test_fault_of_ours_amid_the_answers(
    broker: LiveBroker, failing: tuple[FailingClock, Producer]
) -> None:
    """After a fault the outcome of records in flight is unknown; later answers change nothing."""
    clock, producer = failing
    broker.fault = gate = Gate()
    sent = producer.send("t", b"x")
    assert gate.entered.wait(SECONDS)
    clock.fails = True
    assert isinstance(sent.exception(SECONDS), errors.OutcomeUnknown)
    gate.opened.set()
    producer.flush(SECONDS)
    producer.close(SECONDS)
    assert producer.statistics().buffered_bytes == 0
    _wait_for(lambda: broker.values("t") == [b"x"])


def test_callback_that_exits(connection: Connection) -> None:
    """A callback cannot end the thread that delivers."""

    def leave(*_: object) -> None:
        raise SystemExit

    with Producer(connection) as producer:
        producer.send("t", b"x", on_delivery=leave)
        producer.flush(SECONDS)
        assert producer.send("t", b"y").result(SECONDS).offset == 1


def test_broker_that_hangs(broker: LiveBroker) -> None:
    """A broker that hangs blocks no call longer than its timeout; when it continues, so do all."""
    relay = Relay(int(broker.address.rpartition(":")[2]))
    with (
        Connection.to(relay.address) as connection,
        Producer(
            connection, batch_bytes=500, buffer_bytes=3_000, max_block_seconds=0.5
        ) as producer,
    ):
        producer.send("t", b"0").result(SECONDS)
        relay.hold()
        with pytest.raises(errors.StillSending):
            producer.send("t", b"1").result(0.01)
        for _ in range(6):
            producer.send("t", b"x" * 500)
        with pytest.raises(errors.TimedOut):
            producer.send("t", b"x" * 500)
        with pytest.raises(errors.StillSending):
            producer.flush(0.01)
        relay.let_flow()
        producer.flush(SECONDS)
    relay.close()
    assert broker.values("t")[:3] == [b"0", b"1", b"x" * 500]


def _wait_for(is_so: Callable[[], bool]) -> None:
    for _ in range(int(SECONDS * 200)):
        if is_so():
            return
        threading.Event().wait(0.005)
    raise AssertionError("it never came")


def _pass_time(clock: ManualClock, is_so: Callable[[], bool]) -> None:
    """Advances the clock, and lets other threads run, until `is_so`."""

    def is_so_a_second_later() -> bool:
        clock.advance(1.0)
        return is_so()

    _wait_for(is_so_a_second_later)


def test_close_waits_until_threads_have_ended(
    broker: LiveBroker, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that has done its work and has not ended yet is waited for: an interpreter that
    ends alongside it may abort."""
    read_answers = TopicStreams._read_answers

    def linger_after(
        streams: TopicStreams, route: Route[ProducerStream], stream: ProducerStream
    ) -> None:
        read_answers(streams, route, stream)
        threading.Event().wait(0.2)  # as one that the machine does not let run

    monkeypatch.setattr(TopicStreams, "_read_answers", linger_after)
    broker.create("ended")
    with Producer(connection) as producer:
        producer.send("ended", b"x").result(SECONDS)
    names = ("sparklog-acks-ended", "sparklog-send-ended")
    assert not [each.name for each in threading.enumerate() if each.name in names]


# ------------------------------------------------------------------------------ statistics


def test_statistics(broker: LiveBroker, connection: Connection) -> None:
    """Statistics count acked and failed records, retries, and the records without an ack."""
    broker.fault = gate = Gate()
    full = errors.QueueFull(queue="q", bytes=1, setting="s")
    broker.fail_next("append", error=full)
    broker.fail_next("append", error=errors.WrongSchema(reason="no"))
    with Producer(connection, batch_rows=3, linger_ms=1e6) as producer:
        futures = [producer.send("t", b"x" * 10) for _ in range(3)]
        assert gate.entered.wait(SECONDS)
        assert producer.statistics().in_flight == 1
        assert producer.statistics().buffered_bytes > 30
        gate.opened.set()
        assert futures[0].exception(SECONDS) is not None
        ranges = producer.send_table("t", pa.table({"value": [b"y" * 100] * 5})).result(SECONDS)
        assert [each.rows for each in ranges] == [5]
    found = producer.statistics()
    assert (found.records, found.batches, found.retries, found.errors) == (5, 1, 1, 3)
    assert found.bytes >= 500
    assert (found.in_flight, found.buffered_bytes) == (0, 0)


def test_reprs(broker: LiveBroker, connection: Connection) -> None:
    """Reprs are short, and say where a record is or why it failed."""
    broker.fault = gate = Gate()
    with Producer(connection) as producer:
        assert repr(producer) == "Producer(no topic yet; 0 records without an ack)"
        record = producer.send("t", b"x")
        rows = producer.send_table("t", pa.table({"value": [b"y", b"z"]}))
        assert repr(record) == "RecordFuture('t', pending)"
        assert repr(rows) == "TableFuture('t', 2 rows, pending)"
        assert repr(producer) == "Producer(t; 3 records without an ack)"
        assert "<td>buffered_bytes</td>" in producer._repr_html_()
        gate.opened.set()
        producer.flush(SECONDS)
        assert repr(record) == "RecordFuture('t', partition=0, offset=0)"
        assert record._repr_html_().startswith("<code>RecordFuture(")
        assert repr(rows) == "TableFuture('t', 2 rows, delivered)"
        assert rows._repr_html_().count("<tr>") == 2
        broker.fail_next("append", error=errors.WrongSchema(reason="<no>"))
        failed = producer.send("t", b"x")
        producer.flush(SECONDS)
        assert repr(failed) == "RecordFuture('t', WrongSchema: <no>)"
        assert "&lt;no&gt;" in failed._repr_html_()
    assert repr(producer) == "Producer(closed)"
