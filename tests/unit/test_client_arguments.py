"""Arguments of `connect`, logs, producers and consumers are checked, and errors name them."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import sparklog
from sparklog import errors
from sparklog.client.log import Log
from sparklog.client.times import moment
from tests.support.live import LiveBroker

STRANGE: dict[str, Any] = {
    "a word": "word",
    "None": None,
    "a negative number": -5,
    "a fraction": 1.5,
    "a bool": True,
    "an object": object(),
    "bytes": b"b",
    "NaN": math.nan,
    "infinity": math.inf,
    "a list": [],
    "a list of ints": [7],
    "a dict": {},
    "a set": {1},
    "a tuple": ("t", 0, 1),
}
_JSON = (str, int, float, bool, list, dict)


@pytest.fixture(scope="module")
def log() -> Iterator[Log]:
    """A log with a topic of two partitions."""
    with LiveBroker() as broker, sparklog.connect(broker.address) as log:
        broker.create("t", 2)
        yield log


def _with_producer(log: Log, **options: Any) -> None:
    log.producer(**options).close()


def _with_consumer(log: Log, *topics: Any, **options: Any) -> None:
    log.consumer(*(topics or ("t",)), **{"follow": False, **options}).close()


def _with_send(log: Log, topic: Any = "t", **details: Any) -> None:
    with log.producer() as producer:
        producer.send(topic, b"", **details)


def _seek(log: Log, topic: Any, partition: Any, offset: Any) -> None:
    with log.consumer("t", follow=False) as consumer:
        consumer.seek(topic, partition, offset)


def _on_consumer(log: Log, name: str, *given: Any) -> None:
    with log.consumer("t", follow=False) as consumer:
        getattr(consumer, name)(*given)


def _on_producer(log: Log, name: str, *given: Any) -> None:
    with log.producer() as producer:
        getattr(producer, name)(*given)


def _with_table(log: Log, **options: Any) -> None:
    with log.producer() as producer:
        producer.send_table("t", pa.table({"value": [b""]}), **options)


def _await(log: Log, timeout: Any) -> None:
    with log.producer() as producer:
        producer.send("t", b"").result(timeout)


_OF_PRODUCERS = [
    "linger_ms",
    "batch_rows",
    "batch_bytes",
    "buffer_bytes",
    "max_block_seconds",
    "delivery_timeout_seconds",
    "partitioner",
    "key_serializer",
    "value_serializer",
    "on_delivery",
]
_OF_CONSUMERS = [
    "start",
    "follow",
    "columns",
    "max_poll_rows",
    "buffer_bytes",
    "key_deserializer",
    "metadata_age_seconds",
    "auto_commit",
    "client_id",
    "on_assign",
    "on_revoke",
]
_OF_MEMBERS = [
    "start",
    "auto_commit_seconds",
    "assignors",
    "instance_id",
    "session_timeout_seconds",
    "heartbeat_seconds",
    "max_poll_interval_seconds",
]

Call = Callable[[Any, Any], object]


def _given(call: Callable[..., object], name: str, **others: Any) -> Call:
    """`call` with the strange argument as `name`."""
    return lambda log, value: call(log, **{name: value}, **others)


CALLS: dict[str, Call] = {
    **{f"producer({name})": _given(_with_producer, name) for name in _OF_PRODUCERS},
    **{f"consumer({name})": _given(_with_consumer, name) for name in _OF_CONSUMERS},
    **{f"member({name})": _given(_with_consumer, name, group="g") for name in _OF_MEMBERS},
    "connect": lambda _, value: sparklog.connect(value) if value not in (None, "word") else None,
    "connect(detached)": lambda _, value: (
        None if value is True else sparklog.connect("127.0.0.1:1", detached=value)
    ),
    "connect(storage_options)": lambda _, value: sparklog.connect(
        "127.0.0.1:1", storage_options=value
    ),
    "connect(storage_options: value)": lambda _, value: sparklog.connect(
        "127.0.0.1:1", storage_options={"aws_region": value}
    ),
    "consumer(topics)": _with_consumer,
    "consumer(topics: one)": lambda log, value: _with_consumer(log, [value]),
    "consumer(start: point)": lambda log, value: _with_consumer(log, start={"t": {0: value}}),
    "poll": lambda log, value: _on_consumer(log, "poll", 0 if value is None else value),
    "seek": lambda log, value: _seek(log, "t", 0, value),
    "seek(partition)": lambda log, value: _seek(log, "t", value, 0),
    "seek(topic)": lambda log, value: _seek(log, value, 0, 0),
    "pause": lambda log, value: _on_consumer(log, "pause", value),
    "pause(partition)": lambda log, value: _on_consumer(log, "pause", "t", value),
    "position": lambda log, value: _on_consumer(log, "position", "t", value),
    "Consumer.offsets_for_times": lambda log, value: _on_consumer(log, "offsets_for_times", value),
    "result": lambda log, value: _await(log, 30 if value in (None, -5) else value),
    "connect(kafka)": lambda _, value: sparklog.connect("127.0.0.1:1", kafka=value),
    "flush": lambda log, value: _on_producer(log, "flush", value),
    "send": _with_send,
    "send(partition)": lambda log, value: _with_send(log, partition=value),
    "send(timestamp)": lambda log, value: _with_send(log, timestamp=value),
    "send(headers)": lambda log, value: _with_send(log, headers=value),
    "send(on_delivery)": lambda log, value: _with_send(log, on_delivery=value),
    "read": lambda log, value: log.read(value),
    "read(start)": lambda log, value: log.read("t", start=value),
    "read(end)": lambda log, value: log.read("t", end=value),
    "read(columns)": lambda log, value: log.read("t", columns=value),
    "read(partitions)": lambda log, value: log.read("t", partitions=value),
    "read(values)": lambda log, value: log.read("t", values=value),
    "send_table": lambda log, value: _on_producer(log, "send_table", "t", value),
    "send_table(as_json)": lambda log, value: _with_table(log, as_json=value),
    "send_table(key)": lambda log, value: _with_table(log, as_json=True, key=value),
    "lag": lambda log, value: log.lag(value),
    "topics": lambda log, value: log.topics(internal=value),
    "offsets_for_times": lambda log, value: log.offsets_for_times("t", value),
    "flush_to_table": lambda log, value: log.flush_to_table(value),
    "flush_to_table(timeout)": lambda log, value: log.flush_to_table(timeout_seconds=value),
    "create_topic": lambda log, value: log.create_topic(value, if_absent=True),
    "create_topic(partitions)": lambda log, value: log.create_topic("t", value, if_absent=True),
    "create_topic(config)": lambda log, value: log.create_topic("t", None, value, if_absent=True),
    "create_topic(if_absent)": lambda log, value: log.create_topic("t", if_absent=value),
    "describe": lambda log, value: log.describe(value),
    "alter": lambda log, value: log.alter("t", value),
    "add_partitions": lambda log, value: log.add_partitions("t", value),
    "compact": lambda log, value: log.compact(value),
    "delete_topic": lambda log, value: log.delete_topic(value),
    "delete_records": lambda log, value: log.delete_records("t", value),
    "delete_records(topic)": lambda log, value: log.delete_records(value, {0: 0}),
    "delete_records(offset)": lambda log, value: log.delete_records("t", {0: value}),
    "delete_records(timeout)": lambda log, value: log.delete_records(
        "t", {0: 0}, timeout_seconds=value
    ),
    "describe_group": lambda log, value: log.describe_group(value),
    "group_offsets": lambda log, value: log.group_offsets(value),
    "delete_group": lambda log, value: log.delete_group(value),
    "commit_group_offsets": lambda log, value: log.commit_group_offsets("g", value),
    "commit_group_offsets(group)": lambda log, value: log.commit_group_offsets(value, {}),
    "commit_group_offsets(offset)": lambda log, value: log.commit_group_offsets(
        "g", {("t", 0): value}
    ),
    "forget_group_offsets": lambda log, value: log.forget_group_offsets("g", value),
    "forget_group_offsets(partition)": lambda log, value: log.forget_group_offsets("g", [value]),
}


@pytest.mark.parametrize("call", CALLS)
def test_strange_arguments_are_refused_by_name(log: Log, call: str) -> None:
    """A call accepts a strange argument, or raises a `SparklogError` whose facts are JSON."""
    for name, value in STRANGE.items():
        try:
            CALLS[call](log, value)
        except errors.SparklogError as error:
            for fact in error.facts.values():
                assert fact is None or isinstance(fact, _JSON), (name, fact)
        except Exception as error:
            error.add_note(f"the argument is {name}")
            raise


@pytest.mark.parametrize(
    ("call", "value", "told"),
    [
        ("producer(linger_ms)", "5", "linger_ms = '5': expected a number of at least 0"),
        ("producer(linger_ms)", math.nan, "linger_ms = 'nan': expected a number of at least 0"),
        ("producer(batch_rows)", 0, "batch_rows = 0: expected an int of at least 1"),
        ("producer(max_block_seconds)", -1, "block_seconds = -1: expected a number of at least 0"),
        ("producer(key_serializer)", "json", "key_serializer = 'json': expected a function"),
        ("consumer(follow)", "no", "follow = 'no': expected True or False"),
        ("consumer(columns)", "value", "columns = 'value': expected a list of str"),
        ("consumer(max_poll_rows)", 0, "max_poll_rows = 0: expected an int of at least 1"),
        ("consumer(start)", "earliset", "did you mean 'earliest'?"),
        ("consumer(start)", "12", "start = '12': expected an offset"),
        ("consumer(topics)", [], "expected the name of a topic, a list of names, or a compiled"),
        ("consumer(start: point)", "yesterday", "start = 'yesterday': expected an offset"),
        ("member(assignors)", "range", "assignors = 'range': expected a list of str"),
        ("member(heartbeat_seconds)", 0, "heartbeat_seconds = 0: expected a number above 0"),
        ("member(start)", "errors", "did you mean 'error'?"),
        ("seek", "lates", "did you mean 'latest'?"),
        ("delete_records", [3], "offsets = '[3]': expected a dict, {partition: offset}"),
        ("delete_records", {"0": 3}, "offsets = '0': expected an int of at least 0"),
        ("delete_records(offset)", "3", "partition 0 = '3': expected an int of at least -1"),
        ("delete_records(offset)", -2, "partition 0 = -2: expected an int of at least -1"),
        ("commit_group_offsets", {"t": 1}, "offsets = 't': expected (topic, partition), such as"),
        ("commit_group_offsets", {("t", "0"): 1}, "offsets = '0': expected an int of at least 0"),
        ("commit_group_offsets(offset)", -1, "offset of t-0 = -1: expected an int of at least 0"),
        ("commit_group_offsets(group)", "", "group = '': expected a non-empty str"),
        ("forget_group_offsets", "t", "partitions = 't': expected a list of (topic, partition)"),
        ("create_topic(config)", "a=b", "config = 'a=b': expected a dict, {key: value}"),
        ("describe", None, "The topic name None is invalid"),
        ("offsets_for_times", "soon", "when = 'soon': expected a datetime with a zone, or a time"),
        ("read(partitions)", 0, "partitions = 0: expected the numbers of partitions, as a list"),
        ("connect", 8815, "target = '8815': expected a folder, a URI, host:port or a list"),
        ("connect(storage_options: value)", 5, "storage_options['aws_region'] = '…': expected a"),
        ("poll", "1", "timeout = '1': expected a number of seconds, or None"),
        ("result", "1", "timeout = '1': expected a number of seconds, or None"),
    ],
)
def test_what_is_wrong_is_said(log: Log, call: str, value: Any, told: str) -> None:
    """An error names the argument, the value and the expected form."""
    with pytest.raises((errors.BadOption, errors.BadTopicName)) as refused:
        CALLS[call](log, value)
    assert told in str(refused.value)


def test_nothing_is_committed_where_one_offset_is_wrong(log: Log) -> None:
    """All offsets are looked at before any is sent."""
    with pytest.raises(errors.BadOption):
        log.commit_group_offsets("apart", {("t", 0): 1, ("t", 1): -1})
    assert log.group_offsets("apart") == {}


def test_numbers_of_numpy_are_numbers(log: Log) -> None:
    """Offsets that come out of an array or a data frame are taken as they are."""
    zero: Any = np.int64(0)
    one: Any = np.int16(1)
    linger_ms: Any = np.float32(1.0)
    batch_rows: Any = np.int32(5)
    log.create_topic("fresh", 2)
    log.commit_group_offsets("of-numpy", {("fresh", one): zero})
    assert log.group_offsets("of-numpy") == {("fresh", 1): 0}
    with log.producer(linger_ms=linger_ms, batch_rows=batch_rows) as producer:
        producer.send("fresh", b"", partition=one).result()
    assert log.read("fresh", start=zero, partitions=np.arange(2)).num_rows == 1


@pytest.mark.parametrize(
    "written",
    [
        "2013-06-01T12:00:00Z",
        "2013-06-01T14:00:00+02:00",
        "2013-06-01 12:00",
        "2013-06-01T12",
        dt.datetime(2013, 6, 1, 12, tzinfo=dt.UTC),
    ],
)
def test_times_are_taken_as_on_the_command_line(written: str | dt.datetime) -> None:
    """ISO 8601 is a time wherever a datetime is; without a zone it is UTC."""
    noon = dt.datetime(2013, 6, 1, 12, tzinfo=dt.UTC)
    with LiveBroker() as broker, sparklog.connect(broker.address) as log:
        broker.create("t")
        with log.producer() as producer:
            for minutes in (-1, 0, 1):
                at = noon + dt.timedelta(minutes=minutes)
                producer.send("t", b"%d" % minutes, timestamp=at).result()
            producer.send("t", b"written", timestamp=written).result()
        assert log.offsets_for_times("t", written) == {0: 1}
        assert log.read("t", start=written).num_rows == 3
        assert log.read("t", start={0: written}, end=2).num_rows == 1
        with log.consumer("t", start=written, follow=False) as consumer:
            records = list(consumer)
            assert [record.value for record in records] == [b"0", b"1", b"written"]
            assert records[-1].datetime == noon
            assert consumer.offsets_for_times(written) == {("t", 0): 1}
            consumer.seek("t", 0, written)
            assert consumer.position("t") == 1
        with log.consumer("t", start={"t": {0: written}}, follow=False) as consumer:
            assert consumer.position("t") == 1


@pytest.mark.parametrize("text", ["20130601", "1370088000000", "now", "", "2013-06-01T25:00"])
def test_what_is_no_time(text: str) -> None:
    """Digits alone are not a time: they may be an offset, or milliseconds."""
    with pytest.raises(ValueError):
        moment(text)
