"""The Arrow Flight listener of a running broker: its replies, and the errors it survives."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hpack
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from sparklog import errors, limits
from sparklog.broker.agent import Agent
from sparklog.broker.broker import Broker
from sparklog.broker.flight import listener as flight_listener
from sparklog.broker.flight import protocol
from sparklog.broker.flight.grpc import http2
from sparklog.broker.flight.grpc import server as grpc_server
from sparklog.broker.flight.grpc import status as grpc_status
from sparklog.formats import flight_messages, group_messages
from sparklog.formats.record import ROW_SCHEMA
from sparklog.formats.schema_messages import TopicSchemas
from sparklog.settings import (
    BrokerSettings,
    FlightSettings,
    GroupSettings,
    KafkaSettings,
    LivenessSettings,
    PublisherSettings,
    WriterSettings,
)
from tests.support.brokers import payload
from tests.support.flights import BrokerClient, Stream
from tests.support.waiting import wait_until

MAX_RECORD_BYTES = 1_000
MAX_BATCH_BYTES = 20_000
FUZZ_SECONDS = 6.0

_names = itertools.count()


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """One broker for all tests here; at the end it must still be there."""
    settings = BrokerSettings(
        root=str(tmp_path_factory.mktemp("root")),
        id=1,
        flight=FlightSettings(listen="127.0.0.1:0"),
        kafka=KafkaSettings(listen=""),
        writer=WriterSettings(max_record_bytes=MAX_RECORD_BYTES, max_batch_bytes=MAX_BATCH_BYTES),
        publisher=PublisherSettings(interval_seconds=0.1),
        liveness=LivenessSettings(heartbeat_seconds=0.1),
        groups=GroupSettings(initial_rebalance_delay_ms=0),
    )
    with Agent(settings) as found:
        yield found
        assert found.failure is None


@pytest.fixture
def client(agent: Agent) -> Iterator[BrokerClient]:
    """Connects a client to the broker."""
    with BrokerClient(agent.address) as found:
        yield found


@pytest.fixture
def topic(client: BrokerClient) -> str:
    """Creates a topic of two partitions for one test, and returns its name."""
    name = f"t{next(_names)}"
    client.create(name, 2)
    return name


def header(partition: int = 0, **producer_sequence: int | bool) -> flight_messages.AppendHeader:
    """Returns the app metadata of a batch."""
    return flight_messages.AppendHeader(partition=partition, **producer_sequence)  # type: ignore[arg-type]


VALUES = payload(["a"]).schema

# ------------------------------------------------------------------------------ append


def test_each_batch_is_answered(client: BrokerClient, topic: str) -> None:
    """A batch that was sent alone is acked at once, with its place and the time of its arrival."""
    with Stream(client, topic, VALUES) as stream:
        before_us = time.time_ns() // 1_000
        replies = [stream.append(payload([f"{n}", "x"]), header(1)) for n in range(3)]
    assert [each.base_offset for each in replies] == [0, 2, 4]
    assert all(before_us <= each.timestamp_us <= time.time_ns() // 1_000 for each in replies)
    assert client.values(topic, 1) == [b"0", b"x", b"1", b"x", b"2", b"x"]


def test_a_batch_for_a_topic_that_is_just_created_comes_again(
    client: BrokerClient, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error would end the producer; it may know the topic from another broker already."""

    def append_too_early(*_: object) -> None:
        raise errors.UnknownTopic(topic=topic)

    with Stream(client, topic, VALUES) as stream:
        with monkeypatch.context() as patched:
            patched.setattr(Broker, "append", append_too_early)
            with pytest.raises(errors.MetadataChanged):
                stream.append(payload(["a"]), header())
        assert stream.append(payload(["a"]), header()).base_offset == 0


def test_pipelined_batches_are_answered_in_order(client: BrokerClient, topic: str) -> None:
    """Many batches may be on their way; the answers come in the order of the batches."""
    with Stream(client, topic, VALUES) as stream:
        for number in range(50):
            stream.send(payload([f"{number}"]), header(number % 2, pipelined=True))
        replies = [stream.reply().base_offset for _ in range(50)]
    assert replies == [number // 2 for number in range(50)]


def test_queued_appends_are_waited_for_after_a_disconnect() -> None:
    """An append after a failed reply is waited for, and then the stream ends."""
    seen: list[int] = []

    def answer(number: int) -> None:
        seen.append(number)
        raise errors.BadRequest(reason="the peer has gone")

    def pour() -> None:
        with flight_listener._Answers(answer, seen.append, lambda: None) as answers:  # type: ignore[arg-type]
            for number in range(50):
                answers.add(number, pipelined=True)  # type: ignore[arg-type]
                time.sleep(0.01)

    with pytest.raises(errors.BadRequest):
        pour()
    assert seen == list(range(len(seen)))
    assert 2 <= len(seen) < 50


def test_the_last_answer_that_fails_ends_the_stream() -> None:
    """Also where nothing follows by which that would be noticed."""

    ended: list[bool] = []

    def answer(_: object) -> None:
        raise errors.BadRequest(reason="the peer has gone")

    found = flight_listener._Answers(answer, lambda _: None, lambda: ended.append(True))
    with pytest.raises(errors.BadRequest), found as answers:
        answers.add(0, pipelined=True)  # type: ignore[arg-type]
    assert ended == [True]


def test_a_system_without_threads_replies_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no second thread can be started, the first one replies."""

    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    seen: list[int] = []
    found = flight_listener._Answers(seen.append, lambda _: None, lambda: None)  # type: ignore[arg-type]
    with found as answers:
        for number in range(3):
            answers.add(number, pipelined=True)  # type: ignore[arg-type]
            assert seen[-1] == number


def test_a_refused_batch_does_not_end_its_stream(client: BrokerClient, topic: str) -> None:
    """It gets an error reply in its turn, and the next batch is appended."""
    bad: list[tuple[pa.RecordBatch, flight_messages.AppendHeader, type[errors.SparklogError]]] = [
        (payload(["a"]), header(2), errors.UnknownPartition),
        (payload(["a"]), header(-1), errors.UnknownPartition),
        (payload([]), header(), errors.BadRequest),
        (payload(["x" * (MAX_RECORD_BYTES + 1)]), header(), errors.RecordTooLarge),
        (payload(["x" * 900] * 30), header(), errors.BatchTooLarge),
        (
            payload(["a"]),
            header(producer_id=1, producer_epoch=0, base_sequence=5),
            errors.OutOfOrderSequence,
        ),
        (payload(["a"]), header(producer_id=1), errors.BadRequest),
    ]
    known = header(producer_id=1, producer_epoch=0, base_sequence=0)
    with Stream(client, topic, VALUES) as stream:
        assert stream.append(payload(["first"]), known).base_offset == 0
        for batch, beside, error in bad:
            with pytest.raises(error):
                stream.append(batch, beside)
        assert stream.append(payload(["good"]), header()).base_offset == 1
        for batch, beside, _ in bad:
            stream.send(
                batch, flight_messages.AppendHeader(partition=beside.partition, pipelined=True)
            )
        stream.send(payload(["last"]), header())
        answers = []
        for _ in range(len(bad) + 1):
            with contextlib.suppress(errors.Invalid):
                answers.append(stream.reply().base_offset)
    assert answers == [2, 3, 4]
    assert client.values(topic) == [b"first", b"good", b"a", b"a", b"last"]


@pytest.mark.parametrize(
    "batch",
    [
        pa.record_batch({"key": pa.array([b"k"])}),
        pa.record_batch({"value": pa.array([1])}),
        pa.record_batch({"value": pa.array([b"v"]), "offset": pa.array([1])}),
        pa.record_batch({"value": pa.array([b"v"]), "timestamp": pa.array([2**62])}),
    ],
    ids=["no value", "a number", "an offset", "a number as time"],
)
def test_a_batch_of_another_schema_is_refused(
    client: BrokerClient, topic: str, batch: pa.RecordBatch
) -> None:
    """A stream with other columns than those of a payload is refused with a wrong schema."""
    with Stream(client, topic, batch.schema) as stream, pytest.raises(errors.WrongSchema):
        stream.append(batch, header())


def test_a_retry_is_answered_like_the_first(client: BrokerClient, topic: str) -> None:
    """A batch that was stored already is acked with the same offset and timestamp."""
    producer_sequence = {"producer_id": 7, "producer_epoch": 0, "base_sequence": 0}
    replies = []
    for _ in range(3):
        with Stream(client, topic, VALUES) as stream:
            replies.append(stream.append(payload(["a"]), header(**producer_sequence)))
    assert replies[0] == replies[1] == replies[2]
    assert client.values(topic) == [b"a"]


def test_an_unknown_topic_is_an_error_of_each_batch(client: BrokerClient) -> None:
    """A stream for a topic that does not exist refuses each batch by the topic's name."""
    with Stream(client, "nowhere", VALUES) as stream:
        for _ in range(2):
            with pytest.raises(errors.UnknownTopic) as refused:
                stream.append(payload(["a"]), header())
            assert refused.value.topic == "nowhere"


# ------------------------------------------------------------------------------ read


def test_a_range_is_read(client: BrokerClient, topic: str) -> None:
    """Rows come with all columns or with those asked for, before and after they are published."""
    client.append(["a", "b", "c"], topic=topic)
    for _ in range(2):
        rows = client.read(1, 3, topic=topic)
        assert rows.schema == ROW_SCHEMA
        assert rows.select(["offset", "value"]).to_pydict() == {
            "offset": [1, 2],
            "value": [b"b", b"c"],
        }
        chosen = client.read(0, 3, topic=topic, columns=["value", "offset"])
        assert chosen.column_names == ["value", "offset"]
        client.action("publish.now", flight_messages.PublishNow(topics=[topic]))
    assert client.read(3, 3, topic=topic).num_rows == 0


def test_a_range_that_is_refused(client: BrokerClient, topic: str) -> None:
    """The error names what exists, and comes instead of any row."""
    client.append(["a"], topic=topic)
    with pytest.raises(errors.OffsetOutOfRange) as refused:
        client.read(0, 2, topic=topic)
    assert refused.value.facts == {
        "topic": topic,
        "partition": 0,
        "offset": 2,
        "start": 0,
        "end": 1,
    }
    with pytest.raises(errors.UnknownTopic):
        client.read(0, 0, topic="nowhere")
    with pytest.raises(errors.UnknownPartition):
        client.read(0, 0, topic=topic, partition=9)
    with pytest.raises(errors.TopicChanged):
        client.read(0, 1, topic=topic, topic_id="another")
    for columns in ([], ["nothing"], ["value", "nothing"]):
        with pytest.raises(errors.BadRequest):
            client.read(0, 1, topic=topic, columns=columns)


def request_tail(topic: str, *offsets: int, **options: int) -> flight_messages.TailRequest:
    """A tail of the first partitions of a topic."""
    positions = [
        flight_messages.TailPosition(topic=topic, partition=number, offset=offset)
        for number, offset in enumerate(offsets)
    ]
    return flight_messages.TailRequest(positions=positions, **options)  # type: ignore[arg-type]


def test_a_tail_follows(client: BrokerClient, topic: str) -> None:
    """It returns existing records, a heartbeat, and then new records of every partition."""
    client.append(["a", "b", "c"], topic=topic)
    tail = client.tail(request_tail(topic, 1, 0, heartbeat_ms=20, max_batch_rows=1))
    found = [next(tail) for _ in range(2)]
    assert [rows.column("value")[0].as_py() for rows, _ in found] == [b"b", b"c"]
    assert found[0][1] == flight_messages.TailHeader(
        topic=topic, partition=0, first=1, end=2, high_watermark=3
    )
    rows, beside = next(tail)
    assert (rows.num_rows, beside.idle) == (0, True)
    client.append(["x"], topic=topic, partition=1)
    rows, beside = next((rows, beside) for rows, beside in tail if not beside.idle)
    assert (rows.column("value").to_pylist(), beside.partition) == ([b"x"], 1)
    tail.close()  # type: ignore[attr-defined]


def test_many_tails_have_no_threads_and_share_their_messages(
    client: BrokerClient, agent: Agent, topic: str
) -> None:
    """A batch is encoded once for all of them, and no other tail takes a step for it."""
    count = 24
    other = f"{topic}-other"
    client.create(other, 1)
    assert agent.listeners.flight is not None
    served = agent.listeners.flight._tails
    threads = {each.ident for each in threading.enumerate() if each.name == "sparklog-call"}
    tails = [client.tail(request_tail(topic, 0, heartbeat_ms=60_000)) for _ in range(count)]
    tails += [client.tail(request_tail(other, 0, heartbeat_ms=60_000)) for _ in range(count)]
    client.append(["a"], topic=topic)
    client.append(["b"], topic=other)
    for tail in tails:
        assert next(tail)[0].num_rows == 1
    more = {each.ident for each in threading.enumerate() if each.name == "sparklog-call"} - threads
    assert len(more) < count
    steps, encoded = served.steps, served.encoded
    client.append(["c"], topic=topic)
    for tail in tails[:count]:
        assert next(tail)[0].column("value").to_pylist() == [b"c"]
    assert served.encoded - encoded == 1
    assert served.steps - steps <= 2 * count  # those of the other topic take none
    for tail in tails:
        tail.close()  # type: ignore[attr-defined]


def test_tails_that_share_messages_keep_to_their_partitions(
    client: BrokerClient, topic: str
) -> None:
    """A batch that comes after the end of another partition is not taken for one of that."""
    for _ in range(10):
        client.append(["x" * 900] * 10, topic=topic)  # together more than a message that is shared
    client.append(["s"] * 7, topic=topic, partition=1)
    for offsets in ((0, 0), (0, 0), (0,), (100, 0), (1, 0), (0,)):
        wanted = [
            (number, each)
            for number, (first, end) in enumerate(zip(offsets, (100, 7), strict=False))
            for each in range(first, end)
        ]
        assert sorted(_tailed(client, topic, offsets)) == wanted


def _tailed(client: BrokerClient, topic: str, offsets: Sequence[int]) -> list[tuple[int, int]]:
    """Returns (partition, offset) of the records from there on, up to the first pause."""
    tail = client.tail(request_tail(topic, *offsets, heartbeat_ms=200))
    found: list[tuple[int, int]] = []
    for rows, beside in tail:
        if beside.idle or len(found) > 200:
            break
        assert rows.num_rows == beside.end - beside.first
        found += [(beside.partition, each) for each in range(beside.first, beside.end)]
    tail.close()  # type: ignore[attr-defined]
    return found


def test_a_tail_that_is_refused(client: BrokerClient, topic: str) -> None:
    """Positions that do not exist are named, before anything comes."""
    with pytest.raises(errors.OffsetOutOfRange):
        next(client.tail(request_tail(topic, 1)))
    with pytest.raises(errors.UnknownTopic):
        next(client.tail(request_tail("nowhere", 0)))


def test_a_tail_ends_with_its_topic(client: BrokerClient, topic: str) -> None:
    """A reader of a deleted topic gets an error, and a later one does not begin."""
    tail = client.tail(request_tail(topic, 0, heartbeat_ms=20))
    assert next(tail)[1].idle
    client.action("topics.delete", flight_messages.TopicName(topic=topic))
    # `MetadataChanged` if the thread that follows the metadata was first: it says to ask again.
    with pytest.raises((errors.UnknownTopic, errors.MetadataChanged)):
        for _ in tail:
            pass
    with pytest.raises(errors.UnknownTopic):
        next(client.tail(request_tail(topic, 0)))


# ------------------------------------------------------------------------------ admin


def test_every_action_is_answered(client: BrokerClient, agent: Agent) -> None:
    """Each request of the protocol gets the reply that the protocol names."""
    name = f"t{next(_names)}"
    requests: dict[str, object] = {
        "cluster": flight_messages.Empty(),
        "cluster.describe": flight_messages.DescribeCluster(topics=True),
        "cluster.balance": flight_messages.BalanceCluster(dry_run=True),
        "cluster.move": flight_messages.MovePartitions(moves=[]),
        "cluster.upgrade": flight_messages.Empty(),
        "broker.log_level": flight_messages.LogLevel(broker=agent.settings.id),
        "root.prove": flight_messages.ProveRoot(nonce="n"),
        "status": flight_messages.Empty(),
        "figures": flight_messages.Empty(),
        "topics.create": flight_messages.CreateTopic(topic=name, partitions=1),
        "topics.list": flight_messages.Empty(),
        "topics.describe": flight_messages.TopicName(topic=name),
        "topics.schemas": TopicSchemas(topic=name, ids=[1]),
        "topics.alter": flight_messages.AlterTopic(topic=name, config={}),
        "topics.add_partitions": flight_messages.AddPartitions(topic=name, partitions=2),
        "topics.compact": flight_messages.TopicName(topic=name),
        "records.delete": flight_messages.DeleteRecords(topic=name, offsets={0: -1, 1: 0}),
        "offsets.for_times": flight_messages.OffsetsForTimes(
            topic=name, timestamps_us={0: 0, 1: 0}
        ),
        "offsets.lag": flight_messages.GroupPositions(
            positions=[flight_messages.GroupPosition("no topic", 0, 0)]
        ),
        "producers.new": flight_messages.Empty(),
        "publish.now": flight_messages.PublishNow(topics=[name]),
        "tokens.new": flight_messages.NewToken(topics=[name]),
        "topics.delete": flight_messages.TopicName(topic=name),
    }
    others = {each for each in flight_messages.ACTIONS if not each.startswith("groups.")}
    assert set(requests) | {"batches.append_staged", "broker.drain"} == others
    for action, request in requests.items():
        reply = client.action(action, request)  # type: ignore[arg-type]
        assert isinstance(reply, flight_messages.ACTIONS[action][1])
    with pytest.raises(errors.BadRequest):
        client.action(
            "batches.append_staged",
            flight_messages.AppendStaged(manifest="staging/q/1/manifest.json"),
        )
    cluster = client.action("cluster")
    only = flight_messages.DrainBroker(cluster_id=cluster.cluster_id, broker=1, epoch=1)
    with pytest.raises(errors.CannotDrain, match="no other broker"):
        client.action("broker.drain", only)
    assert [each.address for each in cluster.brokers] == [agent.address]
    assert {each.type for each in client.flight.list_actions()} == set(flight_messages.ACTIONS)


def test_every_action_of_groups_is_answered(client: BrokerClient, topic: str) -> None:
    """Each request about a group gets its reply, from the first offset to the last member."""
    name = f"g{next(_names)}"
    offset = group_messages.GroupOffset(topic=topic, partition=0, offset=0)
    alone = group_messages.JoinGroup(
        group=name,
        client_id="c",
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        protocols=[group_messages.GroupProtocol(name="range", metadata=b"m")],
        member_id_required=True,
    )
    asked: set[str] = set()

    def ask(action: str, request: msgspec.Struct) -> Any:
        asked.add(action)
        reply = client.action(action, request)
        assert isinstance(reply, flight_messages.ACTIONS[action][1])
        return reply

    ask("groups.commit", group_messages.CommitOffsets(group=name, offsets=[offset]))
    (found,) = ask("groups.offsets", group_messages.GroupName(group=name)).offsets
    assert (found.topic, found.partition, found.offset) == (topic, 0, 0)
    partitions = [group_messages.GroupPartition(topic=topic, partition=0)]
    ask("groups.forget", group_messages.ForgetOffsets(group=name, partitions=partitions))
    assert ask("groups.offsets", group_messages.GroupName(group=name)).offsets == []
    told = ask("groups.join", alone)
    assert (told.generation, told.members) == (-1, [])
    joined = ask("groups.join", msgspec.structs.replace(alone, member_id=told.member_id))
    assert joined.member_id == joined.leader == told.member_id
    who = {"group": name, "member_id": joined.member_id}
    synced = ask(
        "groups.sync",
        group_messages.SyncGroup(
            **who, generation=joined.generation, assignments={joined.member_id: b"all"}
        ),
    )
    assert synced.assignment == b"all"
    beat = ask(
        "groups.heartbeat", group_messages.GroupHeartbeat(**who, generation=joined.generation)
    )
    assert not beat.rebalancing
    assert name in {each.group for each in ask("groups.list", flight_messages.Empty()).groups}
    found = ask("groups.find", group_messages.GroupName(group=name))
    assert found.broker == client.action("cluster").brokers[0].broker
    (member,) = ask("groups.describe", group_messages.GroupName(group=name)).members
    assert (member.client_id, member.client_host, member.metadata) == ("c", "/127.0.0.1", b"m")
    ask("groups.leave", group_messages.LeaveGroup(**who))
    ask("groups.delete", group_messages.GroupName(group=name))
    with pytest.raises(errors.GroupRefused, match="GROUP_ID_NOT_FOUND"):
        client.action("groups.describe", group_messages.GroupName(group=name))
    assert asked == {each for each in flight_messages.ACTIONS if each.startswith("groups.")}


def joining(name: str) -> group_messages.JoinGroup:
    """A member that comes to a group; it waits for those that are there to come again."""
    return group_messages.JoinGroup(
        group=name,
        client_id="c",
        session_timeout_ms=60_000,
        rebalance_timeout_ms=60_000,
        protocols=[group_messages.GroupProtocol(name="range", metadata=b"m")],
    )


def test_actions_that_wait_are_bounded_and_others_are_answered(
    client: BrokerClient, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds a thread: one too many is refused at once, what need not wait never."""
    monkeypatch.setattr(limits, "FLIGHT_WAITING_ACTIONS", 1)
    wanted = joining(f"g{next(_names)}")
    first = client.action("groups.join", wanted)
    with ThreadPoolExecutor(1) as pool, BrokerClient(agent.address) as others:
        second = pool.submit(others.action, "groups.join", wanted)

        def waits() -> bool:
            described = client.action(
                "groups.describe", group_messages.GroupName(group=wanted.group)
            )
            return len(described.members) == 2

        wait_until(waits, "the second member has come")
        began = time.monotonic()
        with pytest.raises(errors.TooManyStreams):
            client.action("groups.join", wanted)
        assert time.monotonic() - began < 30.0
        who = {"group": wanted.group, "member_id": first.member_id}
        beat = client.action("groups.heartbeat", group_messages.GroupHeartbeat(**who, generation=1))
        assert beat.rebalancing
        client.action("groups.leave", group_messages.LeaveGroup(**who))
        assert second.result(30.0).generation == 2


def statuses(address: str, calls: Mapping[str, bytes], timeout: bytes) -> list[int]:
    """Returns the statuses of calls that only the server ends: their client has no deadline."""
    host, _, port = address.rpartition(":")
    decoder = hpack.Decoder()
    found: list[int] = []
    with socket.create_connection((host, int(port)), 30.0) as peer, peer.makefile("rb") as coming:
        out = http2.PREFACE + http2.settings([])
        for stream, (name, message) in enumerate(calls.items()):
            # `:method: POST` and `:scheme: http` are entries 3 and 6 of the static table.
            block = b"\x83\x86" + http2.head_block(
                [
                    (":path", f"/arrow.flight.protocol.FlightService/{name}".encode()),
                    ("content-type", b"application/grpc"),
                    ("grpc-timeout", timeout),
                ],
                with_status=False,
            )
            out += http2.frame(http2.HEADERS, http2.END_HEADERS, 2 * stream + 1, block)
            framed = struct.pack(">BI", 0, len(message)) + message
            out += http2.frame(http2.DATA, 0, 2 * stream + 1, framed)
        peer.sendall(out)
        while len(found) < len(calls):
            size, kind, *_ = http2.read_header(coming.read(http2.HEADER_BYTES), 0)
            payload = coming.read(size)
            if kind == http2.HEADERS:
                named = dict(decoder.decode(payload, raw=True))
                if b"grpc-status" in named:
                    found.append(int(named[b"grpc-status"]))
    return found


def test_calls_end_at_their_deadlines(client: BrokerClient, agent: Agent, topic: str) -> None:
    """They end whatever they wait for, and their threads and places are free again."""
    wanted = joining(f"g{next(_names)}")
    client.action("groups.join", wanted)
    action = [(1, b"groups.join"), (2, flight_messages.encode(wanted))]
    tail = flight_messages.TailRequest(
        positions=[flight_messages.TailPosition(topic=topic, partition=0, offset=0)],
        heartbeat_ms=100,
    )
    put = flight_messages.encode(flight_messages.AppendStream(topic=topic))
    started = protocol.bytes_field(2, ROW_SCHEMA.serialize().to_pybytes()[8:])
    calls = {
        "DoAction": b"".join(protocol.bytes_field(*each) for each in action),
        "DoExchange": protocol.bytes_field(
            1, protocol.bytes_field(2, flight_messages.encode(tail))
        ),
        "DoPut": protocol.bytes_field(1, protocol.bytes_field(2, put)) + started,
    }
    began = time.monotonic()
    assert statuses(agent.address, calls, b"700m") == [grpc_status.DEADLINE_EXCEEDED] * 3
    assert 0.7 <= time.monotonic() - began < 20.0
    served = agent.listeners.flight
    assert served is not None
    wait_until(lambda: served.open_calls == 0, "their threads have ended")
    assert served._waiting_actions == 0


def test_an_action_is_given_up_when_its_client_has_gone(
    client: BrokerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before it would be answered another that waits has its place."""
    monkeypatch.setattr(limits, "FLIGHT_WAITING_ACTIONS", 1)
    wanted = joining(f"g{next(_names)}")
    client.action("groups.join", wanted)
    ask = flight.Action("groups.join", flight_messages.encode(wanted))
    gone = flight.FlightCallOptions(timeout=0.3)
    began = time.monotonic()
    with pytest.raises(flight.FlightTimedOutError):
        list(client.flight.do_action(ask, gone))

    def is_taken() -> bool:
        try:
            list(client.flight.do_action(ask, flight.FlightCallOptions(timeout=5.0)))
        except flight.FlightTimedOutError:
            return True
        except pa.ArrowException:  # there are too many still
            return False
        return False

    wait_until(is_taken, "there is room for another")
    assert time.monotonic() - began < 30.0


def test_a_refused_action_says_why(client: BrokerClient, topic: str) -> None:
    """An error crosses the wire with its code and facts."""
    with pytest.raises(errors.TopicExists) as refused:
        client.create(topic)
    assert refused.value.facts == {"topic": topic}
    with pytest.raises(errors.BadTopicName):
        client.create("no/name")


# ------------------------------------------------------------------------------ nonsense


@pytest.mark.parametrize(
    ("action", "body"),
    [
        ("nothing", b"{}"),
        ("", b""),
        ("topics.create", b""),
        ("topics.create", b"\xff\xfe"),
        ("topics.create", b'{"topic": 7}'),
        ("topics.create", b'{"topic": "t", "partitions": 1e99}'),
        ("topics.create", b'{"topic": "t", "partitions": 99999999999999999999999}'),
        ("topics.create", b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        ("topics.describe", b"null"),
        ("offsets.for_times", b'{"topic": "t", "timestamps_us": {"a": 1}}'),
        ("publish.now", b'{"timeout_seconds": "long"}'),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_action_that_makes_no_sense(client: BrokerClient, action: str, body: bytes) -> None:
    """It is a bad request, and no more."""
    with pytest.raises(errors.BadRequest):
        client.raw_action(action, body)


def test_a_ticket_that_makes_no_sense(client: BrokerClient) -> None:
    """It is a bad request, and no more."""
    for pending in (
        b"",
        b"{",
        b"\0" * 50,
        b'{"topic": "t", "partition": 0, "start": 1e30, "end": 2}',
    ):
        with pytest.raises(errors.BadRequest):
            client.raw_read(pending)


DESCRIPTORS = [
    flight.FlightDescriptor.for_path("a", "b"),
    flight.FlightDescriptor.for_path(),
    flight.FlightDescriptor.for_command(b""),
    flight.FlightDescriptor.for_command(b"[]"),
    flight.FlightDescriptor.for_command(b'{"positions": 3}'),
]


@pytest.mark.parametrize("descriptor", DESCRIPTORS, ids=str)
def test_a_descriptor_that_makes_no_sense(
    client: BrokerClient, descriptor: flight.FlightDescriptor
) -> None:
    """It ends the call with a bad request, for putting and tailing alike."""
    writer, reader = client.flight.do_put(descriptor, VALUES)
    assert reader.read() is None
    with pytest.raises(flight.FlightServerError) as refused:
        writer.close()
    assert (
        flight_messages.decode(flight_messages.ErrorReply, refused.value.extra_info).code
        == "bad_request"
    )
    writer, reader = client.flight.do_exchange(descriptor)
    with pytest.raises(flight.FlightServerError) as refused:
        reader.read_chunk()
    assert (
        flight_messages.decode(flight_messages.ErrorReply, refused.value.extra_info).code
        == "bad_request"
    )
    with contextlib.suppress(pa.ArrowException):
        writer.close()


@pytest.mark.parametrize(
    "send",
    [
        lambda writer: writer.write_batch(payload(["a"])),
        lambda writer: writer.write_with_metadata(payload(["a"]), b"nonsense"),
        lambda writer: writer.write_with_metadata(payload(["a"]), b'{"partition": 1e20}'),
        lambda writer: writer.write_with_metadata(
            payload(["a"]), b'{"partition": 0, "producer_id": 1180591620717411303424}'
        ),
        lambda writer: writer.write_metadata(flight_messages.encode(header())),
    ],
    ids=["no header", "no JSON", "no partition", "no producer", "no batch"],
)
def test_a_malformed_batch_ends_its_stream(
    client: BrokerClient, topic: str, send: Callable[[flight.FlightStreamWriter], None]
) -> None:
    """The error is a bad request; acked batches stay, and nothing is added."""
    stream = Stream(client, topic, VALUES)
    stream.append(payload(["before"]), header())
    send(stream.writer)
    with pytest.raises(errors.BadRequest):
        stream.reply()
    with contextlib.suppress(pa.ArrowException):
        stream.writer.close()
    assert client.values(topic) == [b"before"]


def test_columns_with_dictionaries_are_taken(client: BrokerClient, topic: str) -> None:
    """A foreign client may send its strings so, and change the dictionary on the way."""
    schema = pa.schema([("value", pa.dictionary(pa.int32(), pa.binary()))])
    with Stream(client, topic, schema) as stream:
        for values in ([b"a", b"b", b"a"], [b"b"], [b"c", b"c"]):
            column = pa.array(values, pa.binary()).dictionary_encode()
            stream.append(pa.record_batch([column], schema=schema), header())
    assert client.values(topic) == [b"a", b"b", b"a", b"b", b"c", b"c"]


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_compressed_batch_is_refused(client: BrokerClient, topic: str, codec: str) -> None:
    """Its decompressed size is unknown before it takes the memory."""
    options = flight.FlightCallOptions(write_options=pa.ipc.IpcWriteOptions(compression=codec))
    command = flight_messages.encode(flight_messages.AppendStream(topic=topic))
    descriptor = flight.FlightDescriptor.for_command(command)
    writer, reader = client.flight.do_put(descriptor, VALUES, options)
    writer.write_with_metadata(payload([bytes(1_000)]), flight_messages.encode(header()))
    assert reader.read() is None
    with pytest.raises(flight.FlightServerError, match="without compression"):
        writer.close()
    assert client.values(topic) == []


def test_a_message_that_is_too_large_is_named(client: BrokerClient, topic: str) -> None:
    """Before it has come; a stream ends with it, and the next one is taken."""
    with pytest.raises(errors.BatchTooLarge) as refused:
        client.append([bytes(3_000_000)], topic=topic)
    assert refused.value.facts["limit_bytes"] == MAX_BATCH_BYTES
    assert refused.value.facts["bytes"] > 3_000_000
    assert client.append(["a"], topic=topic).base_offset == 0
    with pytest.raises(errors.BadRequest, match="the limit is"):
        client.raw_action("topics.create", bytes(20_000_000))


def test_buffers_that_point_nowhere(client: BrokerClient, topic: str) -> None:
    """A batch whose offsets lead outside its bytes is refused, and nothing is read there."""
    offsets = pa.py_buffer(np.array([0, 2**30, 8], np.int32))
    value = pa.Array.from_buffers(pa.binary(), 2, [None, offsets, pa.py_buffer(b"x" * 8)])
    batch = pa.RecordBatch.from_arrays([value], schema=VALUES)
    with Stream(client, topic, VALUES) as stream:
        with pytest.raises(errors.WrongSchema):
            stream.append(batch, header())
        assert stream.append(payload(["a"]), header()).base_offset == 0


# ------------------------------------------------------------------------------ noise


def exchange(address: str, data: bytes) -> None:
    """Sends bytes to the port and waits for it to say something or hang up."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0) as peer:
        peer.settimeout(0.02)
        peer.sendall(data)
        peer.recv(1_000)


class Recorder:
    """A relay to the broker that keeps what the client has sent, connection by connection."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.sent: list[bytearray] = []
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                broker = socket.create_connection(self._target)
                self._sockets += [client, broker]
                sent = bytearray()
                self.sent.append(sent)
                for source, sink, kept in ((client, broker, sent), (broker, client, bytearray())):
                    threading.Thread(target=_relay, args=(source, sink, kept), daemon=True).start()

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def _relay(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            kept += data
            sink.sendall(data)


def recorded_conversation(agent: Agent, topic: str) -> list[bytes]:
    """Returns the bytes of a client that appends, reads and calls actions."""
    recorder = Recorder(agent.address)
    with BrokerClient(recorder.address) as client:
        batch = payload(["a", "b"], key=[b"k", None], headers=[[{"key": "h", "value": b"v"}], None])
        with Stream(client, topic, batch.schema) as stream:
            stream.append(batch, header(pipelined=False))
        client.read(0, 1, topic=topic)
        client.describe(topic)
    recorder.close()
    return [bytes(each) for each in recorder.sent]


def mutated(chance: random.Random, data: bytes) -> bytes:
    """Returns the bytes with some of them changed, missing, doubled or cut off."""
    found = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 5, 20])):
        if not found:
            break
        at = chance.randrange(len(found))
        match chance.randrange(5):
            case 0:
                found[at] ^= 1 << chance.randrange(8)
            case 1:
                found[at] = chance.choice([0, 1, 0x7F, 0x80, 0xFF])
            case 2:
                del found[at : at + chance.randrange(1, 9)]
            case 3:
                found[at:at] = chance.randbytes(chance.randrange(1, 9))
            case _:
                found = found[:at] if chance.random() < 0.2 else found
    return bytes(found)


def until(deadline: float, cases: int) -> Iterator[int]:
    """Yields numbers up to a count, or for as long as there is time."""
    for number in range(cases):
        if time.monotonic() > deadline:
            return
        yield number


class Surprises:
    """Replaces the listener's log, and collects the errors that no client has caused."""

    def __init__(self) -> None:
        self.found: list[object] = []

    def error(self, _event: str, *, exc_info: object, **_facts: object) -> None:
        self.found.append(exc_info)

    def warning(self, _event: str, **_facts: object) -> None:
        """A peer's fault."""


def test_random_bytes_do_not_stop_the_broker(
    client: BrokerClient, topic: str, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random TCP bytes, damaged conversations among them, end at most their own connection."""
    surprises = Surprises()
    monkeypatch.setattr(flight_listener, "_log", surprises)
    monkeypatch.setattr(grpc_server, "_log", surprises)
    (conversation, *_) = sorted(recorded_conversation(agent, topic), key=len, reverse=True)
    assert len(conversation) > 1_000
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

    def play(seed: int) -> int:
        chance = random.Random(seed)
        played = 0
        for number in until(time.monotonic() + FUZZ_SECONDS, 600):
            match number % 6:
                case 0:
                    data = chance.randbytes(chance.randrange(200))
                case 1:
                    data = preface + chance.randbytes(chance.randrange(200))
                case _:
                    data = mutated(chance, conversation)
            exchange(agent.address, data)
            played += 1
        return played

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(play, range(8))) > 300
    assert surprises.found == []
    assert agent.failure is None
    name = f"t{next(_names)}"
    client.create(name)
    assert client.append(["alive"], topic=name).base_offset == 0
    assert set(client.values(topic)) >= {b"a", b"b"}


def test_damaged_messages_do_not_stop_the_broker(
    client: BrokerClient, topic: str, agent: Agent
) -> None:
    """Damaged tickets, descriptors, headers and requests get an error with a reason."""
    chance = random.Random(42)
    client.append(["a"] * 5, topic=topic)
    pending = flight_messages.encode(
        flight_messages.ReadTicket(topic=topic, partition=0, start=0, end=5, columns=["key"])
    )
    beside = flight_messages.encode(
        header(producer_id=5, producer_epoch=0, base_sequence=0, pipelined=True)
    )
    bodies = {
        "topics.describe": flight_messages.encode(flight_messages.TopicName(topic=topic)),
        "topics.create": flight_messages.encode(
            flight_messages.CreateTopic(topic=topic, partitions=2, config={"a": "b"})
        ),
        "offsets.for_times": flight_messages.encode(
            flight_messages.OffsetsForTimes(topic=topic, timestamps_us={0: 1})
        ),
        "offsets.lag": flight_messages.encode(
            flight_messages.GroupPositions(positions=[flight_messages.GroupPosition("t", 0, 0)])
        ),
        "batches.append_staged": flight_messages.encode(
            flight_messages.AppendStaged(manifest="staging/q/1/manifest.json")
        ),
        "topics.alter": flight_messages.encode(
            flight_messages.AlterTopic(topic=topic, config={"a": None})
        ),
    }
    counted = 0
    surprises: list[Exception] = []
    for number in until(time.monotonic() + FUZZ_SECONDS, 3_000):
        counted += 1
        try:
            match number % 4:
                case 0:
                    action = chance.choice(list(bodies))
                    client.raw_action(action, mutated(chance, bodies[action]))
                case 1:
                    client.raw_read(mutated(chance, pending))
                case 2:
                    stream = Stream(client, topic, VALUES)
                    stream.writer.write_with_metadata(payload(["x"]), mutated(chance, beside))
                    stream.writer.done_writing()
                    stream.reply()
                case _:
                    command = mutated(chance, flight_messages.encode(request_tail(topic, 0, 0)))
                    descriptor = flight.FlightDescriptor.for_command(command)
                    writer, reader = client.flight.do_exchange(descriptor)
                    reader.read_chunk()
                    reader.cancel()
                    writer.close()
        except errors.SparklogError as error:
            if error.code == "error":
                surprises.append(error)
        except pa.ArrowException as error:
            reply = getattr(error, "extra_info", None)
            if reply and flight_messages.decode(flight_messages.ErrorReply, reply).code == "error":
                surprises.append(error)
    assert surprises == []
    assert counted > 300
    assert agent.failure is None
    name = f"t{next(_names)}"
    client.create(name)
    assert client.append(["alive"], topic=name).base_offset == 0


# ------------------------------------------------------------------------------ the end


def test_open_streams_do_not_keep_a_broker(tmp_path: Path) -> None:
    """A broker that stops ends idle streams of producers and consumers, and is soon gone."""
    settings = BrokerSettings(
        root=str(tmp_path),
        id=1,
        flight=FlightSettings(listen="127.0.0.1:0"),
        kafka=KafkaSettings(listen=""),
    )
    agent = Agent(settings)
    agent.start()
    with BrokerClient(agent.address) as client:
        client.create()
        stream = Stream(client, "t", VALUES)
        stream.append(payload(["a"]), header())
        tail = client.tail(request_tail("t", 0))
        assert next(tail)[0].num_rows == 1
        began = time.monotonic()
        agent.stop()
        assert time.monotonic() - began < 5.0
        with pytest.raises(errors.BrokerUnavailable):
            stream.append(payload(["b"]), header())
        with contextlib.suppress(errors.BrokerUnavailable):
            for _ in tail:
                pass
        with contextlib.suppress(pa.ArrowException):
            stream.writer.close()
