"""The consumer of a broker that breaks, moves, grows and forgets."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from random import Random
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from sparklog import errors, testing
from sparklog.client.connection import Connection
from sparklog.client.consumer.consumer import Consumer, Record
from sparklog.client.consumer.fetcher import Fetcher
from sparklog.client.offsets import describe
from sparklog.client.serialize import json_deserializer, string_deserializer
from sparklog.formats import flight_messages, record
from tests.support.forks import said_in_child
from tests.support.leaders import FIRST, OTHER, Leaders
from tests.support.live import SLICE_ROWS, LiveBroker

SECONDS = 20.0
"""Longer than anything here takes: a test that waits so long has failed."""


@pytest.fixture(name="broker")
def _broker(broker: LiveBroker) -> LiveBroker:
    broker.create("t", 1)
    broker.create("t4", 4)
    return broker


@pytest.fixture(name="connection")
def _connection(broker: LiveBroker) -> Iterator[Connection]:
    with Connection.to(broker.address) as connection:
        yield connection


def _assigned(consumer: Consumer) -> dict[tuple[str, int], int]:
    return {each: consumer.position(*each) for each in consumer.assignment}


def _reading_threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "sparklog-read"}


def _values(records: list[Record]) -> list[int]:
    return [int(each.value) for each in records]


def _poll_all(consumer: Consumer, count: int) -> list[Record]:
    records: list[Record] = []
    while len(records) < count:
        polled = consumer.poll(SECONDS)
        assert polled, f"nothing after {len(records)} of {count}"
        records += polled
    return records


# ------------------------------------------------------------------------------ records


def test_record(broker: LiveBroker, connection: Connection) -> None:
    """A record has all columns of its row."""
    when = datetime(2024, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)
    broker.fill(
        "t",
        1,
        key=[b"k"],
        timestamp=pa.array([when], record.TIMESTAMP),
        headers=pa.array([[("h", b"1"), ("n", None)]], record.HEADERS),
    )
    broker.fill("t", 1)
    with Consumer(connection, "t", follow=False) as consumer:
        first, second = consumer
    assert first == Record(
        topic="t",
        partition=0,
        offset=0,
        timestamp_us=1_714_979_289_123_456,
        timestamp_type=record.CREATE_TIME,
        key=b"k",
        value=b"0",
        headers=(("h", b"1"), ("n", None)),
    )
    assert (first.timestamp, first.datetime) == (1_714_979_289_123, when)
    assert (second.key, second.headers) == (None, ())


def test_typed_columns(broker: LiveBroker, connection: Connection) -> None:
    """Batches have those that are asked for, also of records that have no file yet."""
    broker.create("typed", 1, value_format="json", value_schema="a BIGINT, b STRING")
    broker.append("typed", pa.RecordBatch.from_pydict({"value": [b'{"a": 1}', b"not JSON", None]}))
    names = ["b", "offset", "a", "_error"]
    with Consumer(connection, "typed", follow=False, columns=names) as consumer:
        (batch,) = consumer.batches()
        assert batch.schema.names == names
        assert batch.to_pydict() == {
            "b": [None] * 3,
            "offset": [0, 1, 2],
            "a": [1, None, None],
            "_error": [None, "value: not a single JSON value", None],
        }
        with pytest.raises(errors.BadOption, match="typed columns of typed"):
            consumer.assign([("t", 0)])
    for topics, columns in (("typed", ["c"]), (["typed", "t"], ["a"])):
        with pytest.raises(errors.WrongSchema, match=f"no column '{columns[0]}'"):
            Consumer(connection, topics, columns=columns)


def test_deserializers(broker: LiveBroker, connection: Connection) -> None:
    """Deserializers make keys and values, and are not called for null."""
    batch = pa.RecordBatch.from_pydict({"key": ["a", None], "value": [b'{"x":1}', None]})
    broker.append("t", batch)
    with Consumer(
        connection,
        "t",
        follow=False,
        key_deserializer=string_deserializer,
        value_deserializer=json_deserializer,
    ) as consumer:
        assert [(each.key, each.value) for each in consumer] == [("a", {"x": 1}), (None, None)]


@pytest.mark.parametrize("polling", [False, True])
@pytest.mark.parametrize("part", ["key", "value"])
def test_a_record_that_is_not_deserialized(
    broker: LiveBroker, connection: Connection, part: str, polling: bool
) -> None:
    """An error names such a record, after those before it, until a `seek` passes it."""
    stored = [b"1", b"2", b"not JSON", b"4"]
    broker.append("t", pa.RecordBatch.from_pydict({"value": stored, "key": stored}))
    deserializers: dict[str, Any] = {f"{part}_deserializer": json_deserializer}
    with Consumer(connection, "t", **deserializers) as consumer:

        def take() -> list[Any]:
            records = consumer.poll(SECONDS) if polling else [next(consumer)]
            return [getattr(each, part) for each in records]

        assert take() + ([] if polling else take()) == [1, 2]
        for _ in range(2):
            with pytest.raises(errors.DeserializationFailed, match="DecodeError: JSON") as raised:
                take()
            assert consumer.position("t") == 2
        error = raised.value
        assert (error.topic, error.partition, error.offset, error.part) == ("t", 0, 2, part)
        assert isinstance(error.__cause__, msgspec.DecodeError)
        consumer.seek(error.topic, error.partition, error.offset + 1)
        assert take() == [4]


def test_a_deserializer_may_raise_any_error(broker: LiveBroker, connection: Connection) -> None:
    """An error without a text, and one that would end an iterator, skip no record."""
    broker.fill("t", 3)
    failures: list[Exception] = [StopIteration(), KeyError("field")]

    def fail_twice(data: bytes) -> int:
        if data == b"1" and failures:
            raise failures.pop(0)
        return int(data)

    with Consumer(connection, "t", follow=False, value_deserializer=fail_twice) as consumer:
        assert _values(consumer.poll(SECONDS)) == [0]
        with pytest.raises(errors.DeserializationFailed, match="offset 1: KeyError: 'field'"):
            consumer.poll(SECONDS)
        assert _values(list(consumer)) == [1, 2]


@pytest.mark.parametrize("polling", [False, True])
def test_an_interrupted_deserializer_loses_no_record(
    broker: LiveBroker, connection: Connection, polling: bool
) -> None:
    """Ctrl-C in a deserializer, as in a notebook, skips neither its record nor later ones."""
    broker.fill("t", 4)
    interrupts: list[BaseException] = [KeyboardInterrupt()]

    def interrupt_once(data: bytes) -> int:
        if data == b"1" and interrupts:
            raise interrupts.pop()
        return int(data)

    records: list[Record] = []
    with Consumer(connection, "t", follow=False, value_deserializer=interrupt_once) as consumer:
        with pytest.raises(KeyboardInterrupt):
            records += consumer.poll(SECONDS) if polling else consumer
        while polled := consumer.poll(SECONDS):
            records += polled
    assert _values(records) == [0, 1, 2, 3]


def test_batches(broker: LiveBroker, connection: Connection) -> None:
    """Batches have the schema of rows, all rows in order, and the name of their topic."""
    broker.fill("t", 2 * SLICE_ROWS + 10)
    with Consumer(connection, "t", follow=False) as consumer:
        batches = list(consumer.batches())
    assert all(batch.schema.equals(record.ROW_SCHEMA) for batch in batches)
    assert {batch.schema.metadata[b"topic"] for batch in batches} == {b"t"}
    offsets = pa.Table.from_batches(batches).column("offset").to_pylist()
    assert offsets == list(range(2 * SLICE_ROWS + 10))


def test_records_and_batches_mixed(broker: LiveBroker, connection: Connection) -> None:
    """Records, polls and batches each continue after the records that the others returned."""
    broker.fill("t", 100)
    with Consumer(connection, "t", follow=False, max_poll_rows=10) as consumer:
        first = [each.offset for each in islice(consumer, 7)]
        second = [each.offset for each in consumer.poll(SECONDS)]
        assert consumer.position("t") == 17
        third = [each for batch in consumer.batches() for each in batch["offset"].to_pylist()]
        assert consumer.poll(SECONDS) == []
    assert [first, second, third] == [list(range(7)), list(range(7, 17)), list(range(17, 100))]


def test_columns(broker: LiveBroker, connection: Connection) -> None:
    """Only the columns asked for are fetched, in that order; records have None for the others."""
    broker.fill("t", 3, key=[b"a", b"b", b"c"])
    with Consumer(connection, "t", follow=False, columns=["value", "partition"]) as consumer:
        [batch] = consumer.batches()
        assert batch.schema.names == ["value", "partition"]
    for follow in (False, True):
        with Consumer(connection, "t", follow=follow, columns=["key"]) as consumer:
            found = [(each.key, each.value, each.offset) for each in islice(consumer, 3)]
            assert found == [(b"a", None, 0), (b"b", None, 1), (b"c", None, 2)]


def test_unknown_column(connection: Connection) -> None:
    """A column that rows do not have is refused by name."""
    with pytest.raises(errors.WrongSchema, match="vlaue"):
        Consumer(connection, "t", columns=["vlaue"])


def test_unknown_topic(connection: Connection) -> None:
    """A topic that does not exist is refused when the consumer is opened."""
    with pytest.raises(errors.UnknownTopic):
        Consumer(connection, ["t", "nope"])


# ------------------------------------------------------------------------------ where to begin


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize(
    ("start", "first"),
    [
        ("earliest", 0),
        (30, 30),
        (datetime.fromtimestamp(5, UTC), 50),
        (datetime.fromtimestamp(4.95, UTC), 50),
        ({("t", 0): 12}, 12),
        ({"t": {0: 12}}, 12),
        ({("t", 0): "earliest"}, 0),
        ({"t": {0: datetime.fromtimestamp(9, UTC)}}, 90),
        ({}, 0),
    ],
)
def test_start(
    broker: LiveBroker, connection: Connection, follow: bool, start: Any, first: int
) -> None:
    """A consumer begins at the given offset or time, and reads to the end."""
    times = pa.array([100 * i for i in range(100)], pa.timestamp("ms", tz="UTC"))
    broker.fill("t", 100, timestamp=times)
    with Consumer(connection, "t", start=start, follow=follow) as consumer:
        assert consumer.position("t") == first
        assert _values(_poll_all(consumer, 100 - first)) == list(range(first, 100))


def test_start_latest(broker: LiveBroker, connection: Connection) -> None:
    """With "latest" a consumer reads the records that are written after it was opened."""
    broker.fill("t", 10)
    with Consumer(connection, "t", start="latest") as consumer:
        assert consumer.poll(0) == []
        broker.fill("t", 5)
        assert _values(_poll_all(consumer, 5)) == list(range(10, 15))


def test_start_after_all_times(broker: LiveBroker, connection: Connection) -> None:
    """A time after all records means the end."""
    broker.fill("t", 10)
    late = datetime.now(UTC) + timedelta(days=9999)
    with Consumer(connection, "t", start=late, follow=False) as consumer:
        assert list(consumer) == []


@pytest.mark.parametrize(
    ("start", "failure"),
    [
        ("newest", errors.BadOption),
        (True, errors.BadOption),
        (1.5, errors.BadOption),
        (datetime(2024, 1, 1), errors.BadOption),  # noqa: DTZ001
        ({("other", 0): 1}, errors.BadOption),
        ({"t": 5}, errors.BadOption),
        ({("t", 1): 5}, errors.UnknownPartition),
    ],
)
def test_bad_start(connection: Connection, start: Any, failure: type[Exception]) -> None:
    """A start that is not valid is refused by name."""
    with pytest.raises(failure):
        Consumer(connection, "t", start=start)


@pytest.mark.parametrize(("offset", "follow"), [(4, False), (4, True), (99, True)])
def test_start_out_of_range(
    broker: LiveBroker, connection: Connection, offset: int, follow: bool
) -> None:
    """An offset that does not exist, or not any more, is an error that names the range."""
    broker.fill("t", 20)
    broker.trim("t", 0, 5)
    with Consumer(connection, "t", start=offset, follow=follow) as consumer:
        with pytest.raises(errors.OffsetOutOfRange) as raised:
            consumer.poll(SECONDS)
        assert (raised.value.offset, raised.value.start, raised.value.end) == (offset, 5, 20)
        consumer.seek("t", 0, "earliest")
        assert consumer.poll(SECONDS)[0].offset == 5


def test_start_beyond_the_end(broker: LiveBroker, connection: Connection) -> None:
    """A consumer that does not follow refuses a start beyond the end at once."""
    broker.fill("t", 20)
    with pytest.raises(errors.OffsetOutOfRange, match="0 to 20"):
        Consumer(connection, "t", start=21, follow=False)
    with Consumer(connection, "t", start=20, follow=False) as consumer:
        assert list(consumer) == []
        with pytest.raises(errors.OffsetOutOfRange, match="0 to 20"):
            consumer.seek("t", 0, 21)


def test_offsets(broker: LiveBroker, connection: Connection) -> None:
    """Start offsets, end offsets and offsets of a time are returned for each partition."""
    times = pa.array([100 * i for i in range(10)], pa.timestamp("ms", tz="UTC"))
    broker.fill("t4", 10, partition=2, timestamp=times)
    broker.trim("t4", 2, 3)
    with Consumer(connection, "t4") as consumer:
        assert consumer.beginning_offsets() == {("t4", i): 3 if i == 2 else 0 for i in range(4)}
        assert consumer.end_offsets() == {("t4", i): 10 if i == 2 else 0 for i in range(4)}
        found = consumer.offsets_for_times(datetime.fromtimestamp(0.7, UTC))
        assert found == {("t4", i): 7 if i == 2 else 0 for i in range(4)}


# ------------------------------------------------------------------------------ following


def test_stops_at_the_end(broker: LiveBroker, connection: Connection) -> None:
    """Without `follow` a consumer reads the records that exist when it is opened, and no others."""
    for partition in range(4):
        broker.fill("t4", 2_500, partition)
    with Consumer(connection, "t4", follow=False) as consumer:
        broker.fill("t4", 100)
        records = list(consumer)
        assert consumer.poll() == []
    for partition in range(4):
        mine = [each for each in records if each.partition == partition]
        assert _values(mine) == list(range(2_500))


def test_follows(broker: LiveBroker, connection: Connection) -> None:
    """With `follow` a consumer returns new records of all topics, each once."""
    with Consumer(connection, ["t", "t4"]) as consumer:
        for round_ in range(5):
            broker.fill("t", 10)
            broker.fill("t4", 10, partition=round_ % 4)
            records = _poll_all(consumer, 20)
            assert {each.topic for each in records} == {"t", "t4"}
        assert consumer.poll(0.01) == []
        assert consumer.position("t") == 50


def test_waits_no_longer_than_told(connection: Connection) -> None:
    """A poll returns nothing after its timeout."""
    with Consumer(connection, "t") as consumer:
        assert consumer.poll(0) == []
        assert consumer.poll(0.01) == []


def test_poll_is_bounded(broker: LiveBroker, connection: Connection) -> None:
    """A poll returns at most `max_poll_rows` records."""
    broker.fill("t", 95)
    with Consumer(connection, "t", max_poll_rows=10, follow=False) as consumer:
        sizes = [len(consumer.poll(SECONDS)) for _ in range(11)]
    assert sizes == [10] * 9 + [5, 0]


def test_buffer_is_bounded(broker: LiveBroker, connection: Connection) -> None:
    """Reading ahead stops when the buffer is full, and continues when it has space."""
    broker.fill("t", 50 * SLICE_ROWS)
    with Consumer(connection, "t", buffer_bytes=1) as consumer:
        records = _poll_all(consumer, SLICE_ROWS)
        found = consumer.statistics()
        assert found.buffered_bytes <= 2 * found.bytes
        records += _poll_all(consumer, 49 * SLICE_ROWS)
    assert _values(records) == list(range(50 * SLICE_ROWS))


def test_new_partitions(broker: LiveBroker, connection: Connection) -> None:
    """Partitions that are added are read from their first record, whatever the start was."""
    with Consumer(connection, "t", start="latest", metadata_age_seconds=0.02) as consumer:
        assert consumer.poll(0.01) == []
        connection.action(
            "topics.add_partitions", flight_messages.AddPartitions(topic="t", partitions=3)
        )
        broker.fill("t", 5, partition=2)
        broker.fill("t", 5, partition=0)
        records = _poll_all(consumer, 10)
    assert {each.partition for each in records} == {0, 2}


def test_topic_created_again(broker: LiveBroker, connection: Connection) -> None:
    """Reading on in a topic that was deleted and created again is an error."""
    broker.fill("t", 5)
    with Consumer(connection, "t") as consumer:
        _poll_all(consumer, 5)
        consumer.pause("t")
        broker.delete("t")
        broker.create("t")
        consumer.resume("t")
        with pytest.raises(errors.TopicChanged):
            consumer.poll(SECONDS)


# ------------------------------------------------------------------------------ moving about


def test_seek(broker: LiveBroker, connection: Connection) -> None:
    """After a seek the next record is the one at that offset, in both directions."""
    broker.fill("t", 5_000)
    with Consumer(connection, "t") as consumer:
        for offset in (4_000, 10, 2_345, 2_345):
            consumer.seek("t", 0, offset)
            assert consumer.position("t") == offset
            assert next(consumer).offset == offset
        consumer.seek("t", 0, "latest")
        assert consumer.position("t") == 5_000
        consumer.seek("t", 0, 4_999)
        assert [each.offset for each in consumer.poll(SECONDS)] == [4_999]


def test_batches_of_a_reading_that_is_over(broker: LiveBroker, connection: Connection) -> None:
    """Chunks that were on their way before a seek are dropped."""
    broker.fill("t", 10)
    with Consumer(connection, "t") as consumer:
        fetcher = consumer._fetcher
        before = fetcher._reading
        consumer.pause("t")
        rows = pa.RecordBatch.from_pylist(broker.rows("t"), record.ROW_SCHEMA)
        assert not fetcher._put(before, fetcher.positions["t", 0], rows, 0, 10)
        consumer.resume("t")
        assert _values(_poll_all(consumer, 10)) == list(range(10))


def test_seek_leaves_others_alone(broker: LiveBroker, connection: Connection) -> None:
    """A seek in one partition neither repeats nor skips records of another."""
    for partition in range(4):
        broker.fill("t4", 3_000, partition)
    with Consumer(connection, "t4", max_poll_rows=100) as consumer:
        records = _poll_all(consumer, 1_000)
        consumer.seek("t4", 1, 0)
        records = [each for each in records if each.partition != 1]
        records += _poll_all(consumer, 12_000 - len(records))
    for partition in range(4):
        mine = [each for each in records if each.partition == partition]
        assert _values(mine) == list(range(3_000))


def test_seek_elsewhere(connection: Connection) -> None:
    """A partition that is not consumed has no position."""
    with Consumer(connection, "t") as consumer:
        with pytest.raises(errors.BadOption, match="t-1"):
            consumer.seek("t", 1, 0)
        with pytest.raises(errors.BadOption, match="t4-0"):
            consumer.position("t4")


def test_pause_and_resume(broker: LiveBroker, connection: Connection) -> None:
    """Paused partitions return no records, and continue where they stopped."""
    for partition in range(4):
        broker.fill("t4", 2_000, partition)
    with Consumer(connection, "t4", max_poll_rows=50) as consumer:
        before = _poll_all(consumer, 500)
        consumer.pause("t4", 0, 2)
        during = _poll_all(consumer, 4_000 - sum(each.partition in (1, 3) for each in before))
        assert {each.partition for each in during} <= {1, 3}
        assert consumer.poll(0.02) == []
        consumer.resume("t4")
        after = _poll_all(consumer, 8_000 - len(before) - len(during))
    for partition in range(4):
        mine = [each for each in before + during + after if each.partition == partition]
        assert _values(mine) == list(range(2_000))


def test_pause_all(broker: LiveBroker, connection: Connection) -> None:
    """A whole topic can be paused, also in the middle of a batch."""
    broker.fill("t", 100)
    with Consumer(connection, "t") as consumer:
        assert next(consumer).offset == 0
        consumer.pause("t")
        assert consumer.poll(0.01) == []
        consumer.resume("t")
        assert next(consumer).offset == 1


# ------------------------------------------------------------------------------ faults


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_each_once_over_broken_connections(
    broker: LiveBroker, connection: Connection, follow: bool, seed: int
) -> None:
    """Each record comes once and in order, however often connections break."""
    random = Random(seed)

    def drop(request: testing.Request) -> None:
        if request.name in ("read", "tail") and random.random() < 0.3:
            drops.append(request)
            raise testing.ConnectionCut

    drops: list[testing.Request] = []
    broker.fault = drop
    for partition in range(4):
        broker.fill("t4", 5 * SLICE_ROWS, partition)
    with Consumer(connection, "t4", follow=follow) as consumer:
        records = _poll_all(consumer, 20 * SLICE_ROWS)
    for partition in range(4):
        mine = [each for each in records if each.partition == partition]
        assert _values(mine) == list(range(5 * SLICE_ROWS))
    assert drops


def test_broker_that_moves() -> None:
    """A consumer that follows finds the broker that took over."""
    with Leaders() as leaders:
        leaders.fill("t", 10)
        addresses = [leaders.addresses[FIRST]]
        with (
            Connection(lambda: addresses[0]) as connection,
            Consumer(connection, "t") as consumer,
        ):
            _poll_all(consumer, 10)
            addresses[0] = leaders.addresses[OTHER]
            leaders.led_by["t", 0] = OTHER
            leaders.stop(FIRST)
            leaders.fill("t", 10)
            assert _values(_poll_all(consumer, 10)) == list(range(10, 20))


def test_leaders() -> None:
    """Each partition is read from its leader, also after the leader has changed."""
    with Leaders() as leaders:
        for partition in range(4):
            leaders.fill("t4", 10, partition)
        leaders.led_by["t4", 1] = OTHER
        with (
            Connection.to(leaders.addresses[FIRST]) as connection,
            Consumer(connection, "t4", metadata_age_seconds=0.02) as consumer,
        ):
            _poll_all(consumer, 40)
            assert leaders.tailed(OTHER) == {1}
            leaders.led_by["t4", 1] = FIRST
            leaders.led_by["t4", 3] = OTHER
            for partition in range(4):
                leaders.fill("t4", 10, partition)
            records = _poll_all(consumer, 40)
            assert leaders.tailed(OTHER) == {1, 3}
    for partition in range(4):
        mine = [each for each in records if each.partition == partition]
        assert _values(mine) == list(range(10, 20))


def test_leader_that_dies() -> None:
    """When a leader dies, its partitions are read from their new leader."""
    with Leaders() as leaders:
        leaders.led_by["t", 0] = OTHER
        with (
            Connection.to(leaders.addresses[FIRST]) as connection,
            Consumer(connection, "t") as consumer,
        ):
            leaders.fill("t", 10)
            _poll_all(consumer, 10)
            leaders.stop(OTHER)
            leaders.led_by["t", 0] = FIRST
            leaders.fill("t", 10)
            assert _values(_poll_all(consumer, 10)) == list(range(10, 20))


@pytest.mark.parametrize(("follow", "step"), [(True, "_follow_chunk"), (False, "_read_range")])
def test_fault_of_ours(
    broker: LiveBroker,
    connection: Connection,
    monkeypatch: pytest.MonkeyPatch,
    follow: bool,
    step: str,
) -> None:
    """A fault in a reading thread is raised by the call that waits for records."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Fetcher, step, fail)
    broker.fill("t", 1)
    with (
        Consumer(connection, "t", follow=follow) as consumer,
        pytest.raises(errors.SparklogError, match="ZeroDivisionError"),
    ):
        consumer.poll(SECONDS)


def test_refused_reading(broker: LiveBroker, connection: Connection) -> None:
    """A refusal for good is raised after all records that were read before."""
    broker.fill("t", 10)
    with Consumer(connection, "t", metadata_age_seconds=1e6) as consumer:
        _poll_all(consumer, 10)
        broker.delete("t")
        broker.cut_connections()
        for _ in range(2):
            with pytest.raises(errors.UnknownTopic):
                consumer.poll(SECONDS)


# ------------------------------------------------------------------------------ the end


def test_closed(connection: Connection) -> None:
    """A closed consumer raises on each call, and has no threads."""
    before = _reading_threads()
    consumer = Consumer(connection, "t")
    threads = _reading_threads() - before
    assert threads
    consumer.close()
    with pytest.raises(errors.BadRequest, match="closed"):
        consumer.poll(0)
    assert not any(thread.is_alive() for thread in threads)


def test_closed_by_another_thread(connection: Connection) -> None:
    """Closing a consumer wakes a poll that waits."""
    consumer = Consumer(connection, "t")
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            consumer.poll()
        except errors.BadRequest as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    consumer.close()
    thread.join(SECONDS)
    assert len(raised) == 1


def test_dropped(connection: Connection) -> None:
    """A consumer that is dropped is collected, and its threads end."""
    before = _reading_threads()
    consumer = Consumer(connection, "t")
    threads = _reading_threads() - before
    assert threads
    gone = weakref.ref(consumer)
    del consumer
    gc.collect()
    assert gone() is None
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_dropped_when_the_interpreter_ends() -> None:
    """A consumer in a cycle, as an error's traceback makes one, is collected last of all."""
    program = """if True:
        import sparklog.testing

        with sparklog.testing.broker() as broker, broker.connect() as log:
            log.create_topic("t", partitions=1)
            cycle = [log.consumer("t")]
            cycle.append(cycle)
        """
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "Exception ignored" not in run.stderr


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked(broker: LiveBroker, connection: Connection) -> None:
    """A forked child refuses the consumer; the parent's continues."""
    broker.fill("t", 10)
    with Consumer(connection, "t") as consumer:
        assert "belongs to the parent" in said_in_child(lambda: consumer.poll(SECONDS))
        assert len(_poll_all(consumer, 10)) == 10


# ------------------------------------------------------------------------------ assignment


@pytest.mark.parametrize("follow", [False, True])
def test_assign(broker: LiveBroker, connection: Connection, follow: bool) -> None:
    """A consumer reads the partitions that it is given, of several topics, and no others."""
    broker.fill("t", 3)
    for number in range(4):
        broker.fill("t4", 3, number)
    with Consumer(connection, follow=follow) as consumer:
        assert consumer.assignment == []
        consumer.assign([("t4", 2), ("t", 0)])
        records = _poll_all(consumer, 6)
        assert {(each.topic, each.partition) for each in records} == {("t", 0), ("t4", 2)}
        consumer.assign([("t4", 2), ("t4", 3)], start=1)
        assert _assigned(consumer) == {("t4", 2): 3, ("t4", 3): 1}
        assert _values(_poll_all(consumer, 2)) == [1, 2]
        assert consumer.end_offsets() == {("t4", number): 3 for number in range(4)}
        consumer.assign([])
        assert consumer.assignment == []
        assert consumer.poll(0.01) == []


def test_assign_drops_records_that_were_read_ahead(
    broker: LiveBroker, connection: Connection
) -> None:
    """Records of a partition that is not assigned any more are not returned."""
    broker.fill("t4", 10, 0)
    broker.fill("t4", 10, 1)
    with Consumer(connection, max_poll_rows=1) as consumer:
        consumer.assign([("t4", 0)])
        assert _values(_poll_all(consumer, 1)) == [0]
        consumer.assign([("t4", 1)])
        assert {each.partition for each in _poll_all(consumer, 10)} == {1}
        consumer.assign([("t4", 0)], start={("t4", 0): 7})
        assert _values(_poll_all(consumer, 3)) == [7, 8, 9]


def test_assign_after_a_subscription(broker: LiveBroker, connection: Connection) -> None:
    """After `assign` the consumer does not take later partitions, unlike before."""
    with Consumer(connection, "t", metadata_age_seconds=0.0) as consumer:
        broker.fill("t", 1)
        _poll_all(consumer, 1)
        consumer.assign([("t", 0)])
        connection.action(
            "topics.add_partitions", flight_messages.AddPartitions(topic="t", partitions=2)
        )
        broker.fill("t", 1, 1)
        broker.fill("t", 1, 0)
        broker.fill("t", 1, 0)
        assert {each.partition for each in _poll_all(consumer, 2)} == {0}
        assert consumer.assignment == [("t", 0)]


@pytest.mark.parametrize(
    ("partitions", "failure"),
    [
        ([("t", 1)], errors.UnknownPartition),
        ([("unknown", 0)], errors.UnknownTopic),
        ([("t", -1)], errors.BadOption),
        (["t"], errors.BadOption),
        ("t", errors.BadOption),
    ],
)
def test_assign_refuses(connection: Connection, partitions: Any, failure: type[Exception]) -> None:
    """A partition that does not exist is refused, and the assignment stays."""
    with Consumer(connection, "t4") as consumer:
        with pytest.raises(failure):
            consumer.assign(partitions)
        assert len(consumer.assignment) == 4


def test_assign_in_a_group(connection: Connection) -> None:
    """A group assigns the partitions of its members itself, and needs a subscription."""
    with (
        Consumer(connection, "t", group="g") as consumer,
        pytest.raises(errors.BadRequest, match="without a group"),
    ):
        consumer.assign([("t", 0)])
    with pytest.raises(errors.BadOption, match="topics"):
        Consumer(connection, group="g")


# ------------------------------------------------------------------------------ statistics


@pytest.mark.parametrize("way", ["records", "polls", "batches"])
def test_statistics(broker: LiveBroker, connection: Connection, way: str) -> None:
    """Statistics count the records that were handed out, and those that are left."""
    broker.fill("t", 2 * SLICE_ROWS)
    with Consumer(connection, "t", max_poll_rows=SLICE_ROWS) as consumer:
        before = consumer.statistics()
        assert (before.records, before.bytes, before.lag) == (0, 0, 2 * SLICE_ROWS)
        assert (before.rebalances, before.last_poll) == (0, None)
        if way == "records":
            for _ in islice(consumer, SLICE_ROWS):
                pass
        elif way == "polls":
            _poll_all(consumer, SLICE_ROWS)
        else:
            next(consumer.batches())
        found = consumer.statistics()
        assert (found.records, found.lag) == (SLICE_ROWS, SLICE_ROWS)
        assert found.bytes > SLICE_ROWS
        assert found.last_poll is not None
        assert datetime.now(UTC) - found.last_poll < timedelta(seconds=SECONDS)
        broker.fill("t", 5)
        _poll_all(consumer, SLICE_ROWS + 5)
        found = consumer.statistics()
        assert (found.records, found.lag) == (2 * SLICE_ROWS + 5, 0)
        consumer.seek("t", 0, 7)
        assert consumer.statistics().lag == 2 * SLICE_ROWS - 2


def test_repr(broker: LiveBroker, connection: Connection) -> None:
    """The repr names the assignment and the lag; the table has a row for each partition."""
    broker.fill("t4", 3, 1)
    with Consumer(connection, "t4", follow=False) as consumer:
        assert repr(consumer) == "Consumer(4 partitions, lag 3)"
        assert consumer._repr_html_().count("<tr>") == 5
    assert repr(consumer) == "Consumer(closed)"
    with Consumer(connection, "t", group="g") as consumer:
        assert repr(consumer) == "Consumer(group 'g', 0 partitions, lag 0)"


@pytest.mark.parametrize("step", ["_follow_stream", "_read_range"])
def test_assignment_that_changes_before_its_reading_begins(
    broker: LiveBroker,
    connection: Connection,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    step: str,
) -> None:
    """A thread that begins late, with a topic that is no longer assigned, ends without an error."""
    broker.fill("t", 1)
    is_late, may_begin = threading.Event(), threading.Event()
    begin = getattr(Fetcher, step)

    def begin_late(*given: Any) -> None:
        is_late.set()
        assert may_begin.wait(SECONDS)
        begin(*given)

    monkeypatch.setattr(Fetcher, step, begin_late)
    fetcher = Fetcher(
        connection,
        [describe(connection, "t")],
        {("t", 0): 0},
        follow=step == "_follow_stream",
        columns=None,
        buffer_bytes=1_000,
        metadata_age_seconds=SECONDS,
    )
    assert is_late.wait(SECONDS)
    threads = [*fetcher._reading.threads]
    fetcher.assign([], {})
    may_begin.set()
    for thread in threads:
        thread.join(SECONDS)
    fetcher.close()
    assert not caplog.records
