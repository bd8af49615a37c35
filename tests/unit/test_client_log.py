"""The log: administration, tables, the parameters of its clients, and closing."""

from __future__ import annotations

import asyncio
import html
import inspect
import pickle
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest

import sparklog
from sparklog import errors, testing
from sparklog.client.connection import Channel, Connection
from sparklog.client.consumer.consumer import Consumer
from sparklog.client.lag import PartitionLag
from sparklog.client.log import Log
from sparklog.client.producer.producer import Producer
from sparklog.formats import flight_messages, record
from tests.support.groups import join
from tests.support.live import SLICE_ROWS, LiveBroker

SECONDS = 20.0


@pytest.fixture(name="log")
def _log(broker: LiveBroker) -> Iterator[Log]:
    with Log(Connection.to(broker.address), root="memory:root") as log:
        yield log


# ------------------------------------------------------------------------------ admin


def test_topics(log: Log) -> None:
    """Topics are created, described, altered, enlarged and deleted."""
    config = {"retention.ms": 1000, "unclean.leader.election.enable": True}
    created = log.create_topic("b", partitions=2, config=config)
    assert len(created.partitions) == 2
    assert created.config == {"retention.ms": "1000", "unclean.leader.election.enable": "true"}
    log.create_topic("a")
    assert log.topics() == ["a", "b"]
    changed = log.alter("b", {"unclean.leader.election.enable": None, "retention.bytes": 1})
    assert changed.config == {"retention.ms": "1000", "retention.bytes": "1"}
    assert len(log.add_partitions("b", 5).partitions) == 5
    assert len(log.describe("b").partitions) == 5
    log.delete_topic("a")
    assert log.topics() == ["b"]


def test_deleted_records(broker: LiveBroker, log: Log) -> None:
    """Records go below an offset, or all of them; the answer says where the log starts."""
    log.create_topic("t", partitions=2)
    broker.fill("t", 5)
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
    """A refusal of the broker is raised as its own error."""
    log.create_topic("t", partitions=3)
    with pytest.raises(errors.TopicExists):
        log.create_topic("t")
    assert len(log.create_topic("t", if_absent=True).partitions) == 3
    with pytest.raises(errors.BadPartitionCount):
        log.add_partitions("t", 2)
    with pytest.raises(errors.UnknownTopic):
        log.delete_topic("u")


@pytest.mark.parametrize(
    "call",
    [
        lambda log: log.describe("ordres"),
        lambda log: log.alter("ordres", {}),
        lambda log: log.delete_topic("ordres"),
        lambda log: log.delete_records("ordres", {0: 0}),
        lambda log: log.read("ordres"),
        lambda log: log.flush_to_table("ordres"),
        lambda log: log.consumer("ordres"),
        lambda log: log.consumer().assign([("ordres", 0)]),
        lambda log: log.producer().send("ordres", b"x"),
    ],
)
def test_a_misspelt_topic_is_corrected(log: Log, call: Callable[[Log], object]) -> None:
    """An unknown topic is an error with the most similar name, whichever call it is given to."""
    log.create_topic("orders")
    with pytest.raises(errors.UnknownTopic, match=r"name\. Did you mean 'orders'\?$") as raised:
        call(log)
    assert raised.value.topic == "ordres"
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_a_misspelt_topic_without_a_similar_one(log: Log) -> None:
    """A topic of brokers is not proposed, and neither is one that is spelt quite differently."""
    log.create_topic("orders")
    log.commit_group_offsets("g", {("orders", 0): 0})
    assert "__consumer_offsets" in log.topics(internal=True)
    for topic in ("__consumer_offset", "flights"):
        with pytest.raises(errors.UnknownTopic, match=r"correct the name\.$"):
            log.describe(topic)


def test_an_unknown_topic_is_an_error_if_the_broker_lists_none(broker: LiveBroker) -> None:
    """A broker that fails to list its topics hides no error, and many topics are not compared."""
    failure = errors.BrokerUnavailable(address="a:1", reason="gone")
    ask = Channel.action
    for listed in (failure, flight_messages.TopicNames(topics=["ordres2"] * 10_001)):

        def answer(channel: Channel, name: str, *args: Any, listed: Any = listed, **kw: Any) -> Any:
            if name != "topics.list":
                return ask(channel, name, *args, **kw)
            if isinstance(listed, Exception):
                raise listed
            return listed

        with (
            mock.patch.object(Channel, "action", answer),
            Log(Connection.to(broker.address)) as log,
            pytest.raises(errors.UnknownTopic, match=r"correct the name\.$"),
        ):
            log.describe("ordres")


def test_cluster(broker: LiveBroker, log: Log) -> None:
    """The cluster names its brokers."""
    assert [each.address for each in log.cluster().brokers] == [broker.address]


def test_flush_to_table(broker: LiveBroker, log: Log) -> None:
    """Publishing can be asked for one topic, several, or all."""
    for topic in ("t", "u", "v"):
        broker.create(topic)

    def published(asked: str | list[str] | None) -> list[int]:
        for topic in ("t", "u", "v"):
            broker.fill(topic, 1)
        log.flush_to_table(asked)
        return [log.describe(topic).partitions[0].published for topic in ("t", "u", "v")]

    for asked, expected in (("t", [1, 0, 0]), (["t", "u"], [2, 2, 0]), (None, [3, 3, 3])):
        assert published(asked) == expected


# ------------------------------------------------------------------------------ round trip


def test_round_trip(log: Log) -> None:
    """A consumer of the log gets the records that a producer of the log sends."""
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


def test_read(broker: LiveBroker, log: Log) -> None:
    """A topic is read as a table in order of partition and offset, with the schema of rows."""
    broker.create("t", 3)
    for partition in range(3):
        broker.fill("t", 2 * SLICE_ROWS + 5, partition)
    table = log.read("t")
    assert table.schema == record.ROW_SCHEMA
    places = list(zip(table["partition"].to_pylist(), table["offset"].to_pylist(), strict=True))
    assert places == [(p, offset) for p in range(3) for offset in range(2 * SLICE_ROWS + 5)]


def test_read_columns(broker: LiveBroker, log: Log) -> None:
    """Columns come as they were asked for."""
    broker.create("t", 1)
    broker.fill("t", 3)
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
    broker: LiveBroker, log: Log, bounds: dict[str, Any], expected: dict[int, range]
) -> None:
    """A range is given by offsets, by offsets of partitions, or by times."""
    broker.create("t", 2)
    times = pa.array([100 * i for i in range(100)], pa.timestamp("ms", tz="UTC"))
    for partition in range(2):
        broker.fill("t", 100, partition, timestamp=times)
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
    broker: LiveBroker, log: Log, bounds: dict[str, Any], failure: type[Exception]
) -> None:
    """A range that does not exist is an error, never fewer rows."""
    broker.create("t", 1)
    broker.fill("t", 20)
    broker.trim("t", 0, 5)
    with pytest.raises(failure):
        log.read("t", **bounds)


def test_read_over_broken_connections(broker: LiveBroker, log: Log) -> None:
    """A connection that breaks while a table is read costs no row and doubles none."""
    broker.create("t", 1)
    broker.fill("t", 8 * SLICE_ROWS)
    reads = iter(range(100))

    def drop(request: testing.Request) -> None:
        if request.name == "read" and next(reads) % 3 == 2:
            raise testing.ConnectionCut

    broker.fault = drop
    table = log.read("t", columns=["offset"])
    assert table["offset"].to_pylist() == list(range(8 * SLICE_ROWS))
    assert next(reads) > 8


def test_offsets_for_times(broker: LiveBroker, log: Log) -> None:
    """A time is found in each partition, the end where all is older."""
    broker.create("t", 2)
    times = pa.array([0, 1_000, 2_000], pa.timestamp("ms", tz="UTC"))
    broker.fill("t", 3, 1, timestamp=times)
    assert log.offsets_for_times("t", datetime.fromtimestamp(1, UTC)) == {0: 0, 1: 1}
    assert log.offsets_for_times("t", datetime.fromtimestamp(3, UTC)) == {0: 0, 1: 3}


# ------------------------------------------------------------------------------ parameters, closing


@pytest.mark.parametrize(
    ("call", "keyword", "message"),
    [
        (Log.producer, "linger", r"Log.producer\(\) .* 'linger'; did you mean 'linger_ms'\?"),
        (Log.consumer, "begin", r"Log.consumer\(\) .* 'begin'; it has topics, start, follow"),
        (Log.producer, "connection", r"'connection'; it has linger_ms"),
        (sparklog.connect, "detach", r"connect\(\) .* 'detach'; did you mean 'detached'\?"),
    ],
)
def test_unknown_keywords(call: Callable[..., Any], keyword: str, message: str) -> None:
    """An unknown keyword raises a TypeError that names the nearest parameter, or all of them."""
    with pytest.raises(TypeError, match=message):
        call(**{keyword: 3})


@pytest.mark.parametrize(("method", "client"), [(Log.producer, Producer), (Log.consumer, Consumer)])
def test_parameters_of_clients(method: Callable[..., Any], client: type) -> None:
    """`Log.producer` and `Log.consumer` have the parameters of the classes, and document each."""
    described, opened = inspect.signature(method), inspect.signature(client)
    own = [each for name, each in described.parameters.items() if name != "self"]
    assert own == [each for name, each in opened.parameters.items() if name != "connection"]
    assert all(each.annotation is not each.empty for each in own)
    assert all(each.kind is each.KEYWORD_ONLY for each in own if each.name != "topics")
    text = inspect.getdoc(method) or ""
    assert [each.name for each in own if f"\n    {each.name}: " not in text] == []


def test_parameters_reach_clients(broker: LiveBroker, log: Log) -> None:
    """Each argument of `Log.producer` and `Log.consumer` is passed on under its name."""
    for method, client, name in (
        (log.producer, Producer, "sparklog.client.producer.producer.Producer"),
        (partial(log.consumer, "t"), Consumer, "sparklog.client.consumer.consumer.Consumer"),
    ):
        given: dict[str, Any] = {
            each.name: object()
            for each in inspect.signature(client).parameters.values()
            if each.name not in ("connection", "topics")
        }
        with mock.patch(name) as opened:
            method(**given)
        assert opened.call_args.kwargs == given


def test_close(broker: LiveBroker) -> None:
    """Closing the log delivers what its producers hold, and ends all that came from it."""
    closed: list[str] = []
    log = Log(Connection.to(broker.address), on_close=lambda: closed.append("once"))
    log.create_topic("t", 1)
    producer, consumer = log.producer(linger_ms=1e6), log.consumer("t")
    producer.send("t", b"x")
    log.close()
    log.close()
    assert broker.values("t") == [b"x"]
    for use in (lambda: producer.send("t", b"y"), lambda: consumer.poll(0), log.topics):
        with pytest.raises(errors.BadRequest, match="closed"):
            use()
    assert closed == ["once"]


@pytest.mark.parametrize(
    "call",
    [
        lambda log: log.producer(),
        lambda log: log.consumer(),
        lambda log: log.consumer("t"),
        lambda log: log.consumer("t", group="g"),
        lambda log: log.consumer(re.compile("t"), group="g"),
        lambda log: log.read("t"),
        lambda log: log.topics(),
    ],
)
def test_a_closed_log_opens_nothing(broker: LiveBroker, call: Callable[[Log], object]) -> None:
    """Producers, consumers and reads of a closed log are refused at once, as its other calls."""
    broker.create("t", 1)
    log = Log(Connection.to(broker.address))
    log.close()
    with pytest.raises(errors.BadRequest, match="this connection is closed"):
        call(log)


def test_display_of_a_log(broker: LiveBroker, log: Log) -> None:
    """A notebook shows topics and counts, and an error if the broker does not answer."""
    broker.create("t", 2)
    log.commit_group_offsets("g", {("t", 0): 0})
    broker.fill("t", 1_234)
    assert repr(log) == "Log('memory:root')"
    shown = log._repr_html_()
    cells = re.findall("<td[^>]*>([^<]*)</td>", shown)
    assert cells == ["t", "2", "1,234"]
    broker.crash()
    assert "No broker answers" in log._repr_html_()


def test_display_of_many_topics(broker: LiveBroker, log: Log) -> None:
    """The display of a log describes 50 topics, and counts the others."""
    for number in range(60):
        broker.create(f"t{number:02}")
    assert "<td>… and 10 more</td>" in log._repr_html_()
    assert broker.names().count("topics.describe") == 50


def test_display_of_a_topic_and_a_group(broker: LiveBroker, log: Log) -> None:
    """Topics and groups have a repr of one line, and tables of partitions and members."""
    topic = log.create_topic("t", partitions=2)
    assert repr(topic) == "TopicInfo('t', 2 partitions, 0 offsets)"
    assert topic._repr_html_().count("<tr>") == 3
    with join(broker, "g", client_id="<m>") as member_id:
        group = log.describe_group("g")
    assert repr(group) == "GroupInfo('g', Stable, 1 members)"
    shown = html.escape(member_id)
    assert f"<td>{shown}</td><td>–</td><td>&lt;m&gt;</td><td>/127.0.0.1</td>" in group._repr_html_()


def test_internal_topics(broker: LiveBroker, log: Log) -> None:
    """Topics that brokers write for themselves are listed only on request."""
    for name in ("t", "__mine"):
        broker.create(name)
    log.commit_group_offsets("g", {("t", 0): 0})
    assert log.topics() == ["__mine", "t"]
    assert log.topics(internal=True) == ["__consumer_offsets", "__mine", "t"]


# ------------------------------------------------------------------------------ lag


def test_lag(broker: LiveBroker, log: Log) -> None:
    """Lag is the distance from the committed offset, or the log start, to the end."""
    broker.create("t", 3)
    broker.create("gone")
    broker.fill("t", 10)
    broker.fill("t", 7, 1)
    log.commit_group_offsets("g", {("t", 0): 4, ("t", 1): 0, ("gone", 0): 0})
    broker.trim("t", 1, 5)
    log.delete_topic("gone")
    with join(broker, "g", [("t", 1), ("t", 2)]):
        lag = log.lag("g")
    assert lag.to_table().to_pydict() == {
        "topic": ["t", "t", "t"],
        "partition": [0, 1, 2],
        "committed": [4, 0, None],
        "end": [10, 7, 0],
        "lag": [6, 2, None],
    }
    assert (lag.group, lag.state, lag.total, len(lag)) == ("g", "Stable", 8, 3)
    assert lag[0] == PartitionLag(topic="t", partition=0, committed=4, end=10, lag=6)
    assert list(lag) == list(lag.partitions)
    assert repr(lag) == "GroupLag('g', 3 partitions, lag 8)"
    assert lag._repr_html_().count("<td>–</td>") == 2


def test_lag_without_members(broker: LiveBroker, log: Log) -> None:
    """A group that only has commits, as a Spark query's, has a lag; an unknown group is refused."""
    broker.create("t")
    broker.fill("t", 3)
    log.commit_group_offsets("query", {("t", 0): 1})
    assert repr(log.lag("query")) == "GroupLag('query', 1 partition, lag 2)"
    with pytest.raises(errors.GroupRefused):
        log.lag("nobody")
