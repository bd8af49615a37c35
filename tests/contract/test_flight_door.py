"""The Arrow Flight door of a running broker: what it answers, and what it survives."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from sparklog import errors, wire
from sparklog.broker import flight as flight_door
from sparklog.broker.agent import Agent
from sparklog.record import ROW_SCHEMA
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
from tests.support.flights import Door, Stream

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
def door(agent: Agent) -> Iterator[Door]:
    """A channel to the broker."""
    with Door(agent.address) as found:
        yield found


@pytest.fixture
def topic(door: Door) -> str:
    """A topic of two partitions that nobody else has."""
    name = f"t{next(_names)}"
    door.create(name, 2)
    return name


def header(partition: int = 0, **stamp: int | bool) -> wire.AppendHeader:
    """What goes beside a batch."""
    return wire.AppendHeader(partition=partition, **stamp)  # type: ignore[arg-type]


VALUES = payload(["a"]).schema

# ------------------------------------------------------------------------------ append


def test_each_batch_is_answered(door: Door, topic: str) -> None:
    """A batch that was sent alone is acked at once, with its place and the time of its arrival."""
    with Stream(door, topic, VALUES) as stream:
        before_us = time.time_ns() // 1_000
        replies = [stream.append(payload([f"{n}", "x"]), header(1)) for n in range(3)]
    assert [each.base_offset for each in replies] == [0, 2, 4]
    assert all(before_us <= each.timestamp_us <= time.time_ns() // 1_000 for each in replies)
    assert door.values(topic, 1) == [b"0", b"x", b"1", b"x", b"2", b"x"]


def test_pipelined_batches_are_answered_in_order(door: Door, topic: str) -> None:
    """Many batches may be on their way; the answers come in the order of the batches."""
    with Stream(door, topic, VALUES) as stream:
        for number in range(50):
            stream.send(payload([f"{number}"]), header(number % 2, pipelined=True))
        replies = [stream.reply().base_offset for _ in range(50)]
    assert replies == [number // 2 for number in range(50)]


def test_what_was_queued_is_waited_for_when_the_peer_has_gone() -> None:
    """An append that came after a failed answer is seen through, and then the stream ends."""
    seen: list[int] = []

    def answer(number: int) -> None:
        seen.append(number)
        raise errors.BadRequest(reason="the peer has gone")

    def pour() -> None:
        with flight_door._Answers(answer) as answers:  # type: ignore[arg-type]
            for number in range(50):
                answers.add(number, pipelined=True)  # type: ignore[arg-type]
                time.sleep(0.01)

    with pytest.raises(errors.BadRequest):
        pour()
    assert seen == list(range(len(seen)))
    assert 2 <= len(seen) < 50


def test_a_system_without_threads_answers_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no second thread is to be had, the first one answers."""

    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    seen: list[int] = []
    with flight_door._Answers(seen.append) as answers:  # type: ignore[arg-type]
        for number in range(3):
            answers.add(number, pipelined=True)  # type: ignore[arg-type]
            assert seen[-1] == number


def test_a_refused_batch_does_not_end_its_stream(door: Door, topic: str) -> None:
    """It is answered in its turn with what is wrong, and the next one is taken."""
    bad: list[tuple[pa.RecordBatch, wire.AppendHeader, type[errors.SparklogError]]] = [
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
    with Stream(door, topic, VALUES) as stream:
        assert stream.append(payload(["first"]), known).base_offset == 0
        for batch, beside, error in bad:
            with pytest.raises(error):
                stream.append(batch, beside)
        assert stream.append(payload(["good"]), header()).base_offset == 1
        for batch, beside, _ in bad:
            stream.send(batch, wire.AppendHeader(partition=beside.partition, pipelined=True))
        stream.send(payload(["last"]), header())
        answers = []
        for _ in range(len(bad) + 1):
            with contextlib.suppress(errors.Invalid):
                answers.append(stream.reply().base_offset)
    assert answers == [2, 3, 4]
    assert door.values(topic) == [b"first", b"good", b"a", b"a", b"last"]


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
    door: Door, topic: str, batch: pa.RecordBatch
) -> None:
    """Whatever columns a stream was opened with, what is no payload is a wrong schema."""
    with Stream(door, topic, batch.schema) as stream, pytest.raises(errors.WrongSchema):
        stream.append(batch, header())


def test_a_retry_is_answered_like_the_first(door: Door, topic: str) -> None:
    """A batch that stands already is acked with the same place and time."""
    stamp = {"producer_id": 7, "producer_epoch": 0, "base_sequence": 0}
    replies = []
    for _ in range(3):
        with Stream(door, topic, VALUES) as stream:
            replies.append(stream.append(payload(["a"]), header(**stamp)))
    assert replies[0] == replies[1] == replies[2]
    assert door.values(topic) == [b"a"]


def test_an_unknown_topic_is_told_per_batch(door: Door) -> None:
    """A stream for a topic that is not there refuses batches by the topic's name."""
    with Stream(door, "nowhere", VALUES) as stream:
        for _ in range(2):
            with pytest.raises(errors.UnknownTopic) as refused:
                stream.append(payload(["a"]), header())
            assert refused.value.topic == "nowhere"


# ------------------------------------------------------------------------------ read


def test_a_range_is_read(door: Door, topic: str) -> None:
    """Rows come with all columns or with those asked for, before and after they are published."""
    door.append(["a", "b", "c"], topic=topic)
    for _ in range(2):
        rows = door.read(1, 3, topic=topic)
        assert rows.schema == ROW_SCHEMA
        assert rows.select(["offset", "value"]).to_pydict() == {
            "offset": [1, 2],
            "value": [b"b", b"c"],
        }
        chosen = door.read(0, 3, topic=topic, columns=["value", "offset"])
        assert chosen.column_names == ["value", "offset"]
        door.action("publish.now", wire.PublishNow(topics=[topic]))
    assert door.read(3, 3, topic=topic).num_rows == 0


def test_a_range_that_is_refused(door: Door, topic: str) -> None:
    """The error names what exists, and comes instead of any row."""
    door.append(["a"], topic=topic)
    with pytest.raises(errors.OffsetOutOfRange) as refused:
        door.read(0, 2, topic=topic)
    assert refused.value.facts == {
        "topic": topic,
        "partition": 0,
        "offset": 2,
        "start": 0,
        "end": 1,
    }
    with pytest.raises(errors.UnknownTopic):
        door.read(0, 0, topic="nowhere")
    with pytest.raises(errors.UnknownPartition):
        door.read(0, 0, topic=topic, partition=9)
    with pytest.raises(errors.TopicChanged):
        door.read(0, 1, topic=topic, topic_id="another")
    for columns in ([], ["nothing"], ["value", "nothing"]):
        with pytest.raises(errors.BadRequest):
            door.read(0, 1, topic=topic, columns=columns)


def request_tail(topic: str, *offsets: int, **options: int) -> wire.TailRequest:
    """A tail of the first partitions of a topic."""
    positions = [
        wire.TailPosition(topic=topic, partition=number, offset=offset)
        for number, offset in enumerate(offsets)
    ]
    return wire.TailRequest(positions=positions, **options)  # type: ignore[arg-type]


def test_a_tail_follows(door: Door, topic: str) -> None:
    """What is there comes, then a sign of life, then what is new, of every partition."""
    door.append(["a", "b", "c"], topic=topic)
    tail = door.tail(request_tail(topic, 1, 0, heartbeat_ms=20, max_batch_rows=1))
    found = [next(tail) for _ in range(2)]
    assert [rows.column("value")[0].as_py() for rows, _ in found] == [b"b", b"c"]
    assert found[0][1] == wire.TailHeader(
        topic=topic, partition=0, first=1, end=2, high_watermark=3
    )
    rows, beside = next(tail)
    assert (rows.num_rows, beside.idle) == (0, True)
    door.append(["x"], topic=topic, partition=1)
    rows, beside = next((rows, beside) for rows, beside in tail if not beside.idle)
    assert (rows.column("value").to_pylist(), beside.partition) == ([b"x"], 1)
    tail.close()  # type: ignore[attr-defined]


def test_a_tail_that_is_refused(door: Door, topic: str) -> None:
    """Positions that do not exist are named, before anything comes."""
    with pytest.raises(errors.OffsetOutOfRange):
        next(door.tail(request_tail(topic, 1)))
    with pytest.raises(errors.UnknownTopic):
        next(door.tail(request_tail("nowhere", 0)))


def test_a_tail_ends_with_its_topic(door: Door, topic: str) -> None:
    """A reader of a deleted topic is told so."""
    tail = door.tail(request_tail(topic, 0, heartbeat_ms=20))
    assert next(tail)[1].idle
    door.action("topics.delete", wire.TopicName(topic=topic))
    with pytest.raises(errors.UnknownTopic):
        for _ in tail:
            pass


# ------------------------------------------------------------------------------ admin


def test_every_action_is_answered(door: Door, agent: Agent) -> None:
    """Each request of the protocol gets the reply that the protocol names."""
    name = f"t{next(_names)}"
    requests: dict[str, object] = {
        "cluster": wire.Empty(),
        "status": wire.Empty(),
        "topics.create": wire.CreateTopic(topic=name, partitions=1),
        "topics.list": wire.Empty(),
        "topics.describe": wire.TopicName(topic=name),
        "topics.alter": wire.AlterTopic(topic=name, config={}),
        "topics.add_partitions": wire.AddPartitions(topic=name, partitions=2),
        "topics.compact": wire.TopicName(topic=name),
        "records.delete": wire.DeleteRecords(topic=name, offsets={0: -1, 1: 0}),
        "offsets.for_times": wire.OffsetsForTimes(topic=name, timestamps_us={0: 0, 1: 0}),
        "producers.new": wire.Empty(),
        "publish.now": wire.PublishNow(topics=[name]),
        "topics.delete": wire.TopicName(topic=name),
    }
    others = {each for each in wire.ACTIONS if not each.startswith("groups.")}
    assert set(requests) | {"batches.adopt"} == others
    for action, request in requests.items():
        reply = door.action(action, request)  # type: ignore[arg-type]
        assert isinstance(reply, wire.ACTIONS[action][1])
    with pytest.raises(errors.BadRequest):
        door.action("batches.adopt", wire.Adopt(manifest="staging/q/1/manifest.json"))
    cluster = door.action("cluster")
    assert [each.address for each in cluster.brokers] == [agent.address]
    assert {each.type for each in door.flight.list_actions()} == set(wire.ACTIONS)


def test_every_action_of_groups_is_answered(door: Door, topic: str) -> None:
    """Each request about a group gets its reply, from the first offset to the last member."""
    name = f"g{next(_names)}"
    offset = wire.GroupOffset(topic=topic, partition=0, offset=0)
    alone = wire.JoinGroup(
        group=name,
        client_id="c",
        client_host="h",
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        protocols=[wire.GroupProtocol(name="range", metadata=b"m")],
        member_id_required=True,
    )
    asked: set[str] = set()

    def ask(action: str, request: msgspec.Struct) -> Any:
        asked.add(action)
        reply = door.action(action, request)
        assert isinstance(reply, wire.ACTIONS[action][1])
        return reply

    ask("groups.commit", wire.CommitOffsets(group=name, offsets=[offset]))
    (found,) = ask("groups.offsets", wire.GroupName(group=name)).offsets
    assert (found.topic, found.partition, found.offset) == (topic, 0, 0)
    partitions = [wire.GroupPartition(topic=topic, partition=0)]
    ask("groups.forget", wire.ForgetOffsets(group=name, partitions=partitions))
    assert ask("groups.offsets", wire.GroupName(group=name)).offsets == []
    told = ask("groups.join", alone)
    assert (told.generation, told.members) == (-1, [])
    joined = ask("groups.join", msgspec.structs.replace(alone, member_id=told.member_id))
    assert joined.member_id == joined.leader == told.member_id
    who = {"group": name, "member_id": joined.member_id}
    synced = ask(
        "groups.sync",
        wire.SyncGroup(**who, generation=joined.generation, assignments={joined.member_id: b"all"}),
    )
    assert synced.assignment == b"all"
    beat = ask("groups.heartbeat", wire.GroupHeartbeat(**who, generation=joined.generation))
    assert not beat.rebalancing
    assert name in {each.group for each in ask("groups.list", wire.Empty()).groups}
    (member,) = ask("groups.describe", wire.GroupName(group=name)).members
    assert (member.client_id, member.client_host, member.metadata) == ("c", "h", b"m")
    ask("groups.leave", wire.LeaveGroup(**who))
    ask("groups.delete", wire.GroupName(group=name))
    with pytest.raises(errors.GroupRefused, match="GROUP_ID_NOT_FOUND"):
        door.action("groups.describe", wire.GroupName(group=name))
    assert asked == {each for each in wire.ACTIONS if each.startswith("groups.")}


def test_a_refused_action_says_why(door: Door, topic: str) -> None:
    """An error crosses the wire with its code and facts."""
    with pytest.raises(errors.TopicExists) as refused:
        door.create(topic)
    assert refused.value.facts == {"topic": topic}
    with pytest.raises(errors.BadTopicName):
        door.create("no/name")


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
def test_an_action_that_makes_no_sense(door: Door, action: str, body: bytes) -> None:
    """It is a bad request, and no more."""
    with pytest.raises(errors.BadRequest):
        door.raw_action(action, body)


def test_a_ticket_that_makes_no_sense(door: Door) -> None:
    """It is a bad request, and no more."""
    for ticket in (
        b"",
        b"{",
        b"\0" * 50,
        b'{"topic": "t", "partition": 0, "start": 1e30, "end": 2}',
    ):
        with pytest.raises(errors.BadRequest):
            door.raw_read(ticket)


DESCRIPTORS = [
    flight.FlightDescriptor.for_path("a", "b"),
    flight.FlightDescriptor.for_path(),
    flight.FlightDescriptor.for_command(b""),
    flight.FlightDescriptor.for_command(b"[]"),
    flight.FlightDescriptor.for_command(b'{"positions": 3}'),
]


@pytest.mark.parametrize("descriptor", DESCRIPTORS, ids=str)
def test_a_descriptor_that_makes_no_sense(door: Door, descriptor: flight.FlightDescriptor) -> None:
    """It ends the call with a bad request, for putting and tailing alike."""
    writer, reader = door.flight.do_put(descriptor, VALUES)
    assert reader.read() is None
    with pytest.raises(flight.FlightServerError) as refused:
        writer.close()
    assert wire.decode(wire.ErrorReply, refused.value.extra_info).code == "bad_request"
    writer, reader = door.flight.do_exchange(descriptor)
    with pytest.raises(flight.FlightServerError) as refused:
        reader.read_chunk()
    assert wire.decode(wire.ErrorReply, refused.value.extra_info).code == "bad_request"
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
        lambda writer: writer.write_metadata(wire.encode(header())),
    ],
    ids=["no header", "no JSON", "no partition", "no producer", "no batch"],
)
def test_a_batch_that_makes_no_sense(
    door: Door, topic: str, send: Callable[[flight.FlightStreamWriter], None]
) -> None:
    """It ends its stream with a bad request; what was acked before stays, and nothing is added."""
    stream = Stream(door, topic, VALUES)
    stream.append(payload(["before"]), header())
    send(stream.writer)
    with pytest.raises(errors.BadRequest):
        stream.reply()
    with contextlib.suppress(pa.ArrowException):
        stream.writer.close()
    assert door.values(topic) == [b"before"]


def test_buffers_that_point_nowhere(door: Door, topic: str) -> None:
    """A batch whose offsets lead outside its bytes is refused, and nothing is read there."""
    offsets = pa.py_buffer(np.array([0, 2**30, 8], np.int32))
    value = pa.Array.from_buffers(pa.binary(), 2, [None, offsets, pa.py_buffer(b"x" * 8)])
    batch = pa.RecordBatch.from_arrays([value], schema=VALUES)
    with Stream(door, topic, VALUES) as stream:
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
    """What a client sends that appends, reads and asks."""
    recorder = Recorder(agent.address)
    with Door(recorder.address) as door:
        batch = payload(["a", "b"], key=[b"k", None], headers=[[{"key": "h", "value": b"v"}], None])
        with Stream(door, topic, batch.schema) as stream:
            stream.append(batch, header(pipelined=False))
        door.read(0, 1, topic=topic)
        door.describe(topic)
    recorder.close()
    return [bytes(each) for each in recorder.sent]


def mutated(chance: random.Random, data: bytes) -> bytes:
    """The same bytes with some of them changed, missing, doubled or cut off."""
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
    """So many numbers, or as many as there is time for."""
    for number in range(cases):
        if time.monotonic() > deadline:
            return
        yield number


class Surprises:
    """Takes the place of the door's log: what it complains of is no peer's fault."""

    def __init__(self) -> None:
        self.found: list[object] = []

    def error(self, _event: str, *, exc_info: object) -> None:
        self.found.append(exc_info)


def test_noise_on_the_port_stops_nobody(
    door: Door, topic: str, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever bytes come over TCP, damaged conversations among them, the broker goes on."""
    surprises = Surprises()
    monkeypatch.setattr(flight_door, "_log", surprises)
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
    door.create(name)
    assert door.append(["alive"], topic=name).base_offset == 0
    assert set(door.values(topic)) >= {b"a", b"b"}


def test_damaged_messages_stop_nobody(door: Door, topic: str, agent: Agent) -> None:
    """Whatever stands in tickets, descriptors, headers and requests, the answer names a reason."""
    chance = random.Random(42)
    door.append(["a"] * 5, topic=topic)
    ticket = wire.encode(wire.ReadTicket(topic=topic, partition=0, start=0, end=5, columns=["key"]))
    beside = wire.encode(header(producer_id=5, producer_epoch=0, base_sequence=0, pipelined=True))
    bodies = {
        "topics.describe": wire.encode(wire.TopicName(topic=topic)),
        "topics.create": wire.encode(
            wire.CreateTopic(topic=topic, partitions=2, config={"a": "b"})
        ),
        "offsets.for_times": wire.encode(wire.OffsetsForTimes(topic=topic, timestamps_us={0: 1})),
        "batches.adopt": wire.encode(wire.Adopt(manifest="staging/q/1/manifest.json")),
        "topics.alter": wire.encode(wire.AlterTopic(topic=topic, config={"a": None})),
    }
    counted = 0
    surprises: list[Exception] = []
    for number in until(time.monotonic() + FUZZ_SECONDS, 3_000):
        counted += 1
        try:
            match number % 4:
                case 0:
                    action = chance.choice(list(bodies))
                    door.raw_action(action, mutated(chance, bodies[action]))
                case 1:
                    door.raw_read(mutated(chance, ticket))
                case 2:
                    stream = Stream(door, topic, VALUES)
                    stream.writer.write_with_metadata(payload(["x"]), mutated(chance, beside))
                    stream.writer.done_writing()
                    stream.reply()
                case _:
                    command = mutated(chance, wire.encode(request_tail(topic, 0, 0)))
                    descriptor = flight.FlightDescriptor.for_command(command)
                    writer, reader = door.flight.do_exchange(descriptor)
                    reader.read_chunk()
                    reader.cancel()
                    writer.close()
        except errors.SparklogError as error:
            if error.code == "error":
                surprises.append(error)
        except pa.ArrowException as error:
            reply = getattr(error, "extra_info", None)
            if reply and wire.decode(wire.ErrorReply, reply).code == "error":
                surprises.append(error)
    assert surprises == []
    assert counted > 300
    assert agent.failure is None
    name = f"t{next(_names)}"
    door.create(name)
    assert door.append(["alive"], topic=name).base_offset == 0


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
    with Door(agent.address) as door:
        door.create()
        stream = Stream(door, "t", VALUES)
        stream.append(payload(["a"]), header())
        tail = door.tail(request_tail("t", 0))
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
