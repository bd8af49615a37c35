"""A broker in memory behind a real Flight port: all of `flight_messages`, with faults on demand.

It is as strict as a broker may be, so that no client depends on leniency: sequences are checked as
in Kafka (the first of a producer id is 0), only the last five batches are recognised, and each
batch is answered before the next one is read.

`FakeLog` survives restarts; a `FakeBroker` serves it, and several may share one log. Run
as a program, it prints its port and serves; with `--sink` it acks batches and keeps nothing.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from sparklog import errors, limits
from sparklog.formats import flight_messages, record
from tests.support.relay import Relay

SLICE_ROWS = 1_000
"""Rows of a batch on the way out, so that streams have several."""


class DropBefore(Exception):
    """The connection breaks, and the batch was not appended."""


class DropAfter(Exception):
    """The connection breaks, and the batch was appended."""


Fault = Callable[[str, flight_messages.AppendHeader], None]
"""Called before each append; raises a drop, or the error that refuses the batch, or waits."""


def _no_fault(*_: object) -> None:
    pass


# ------------------------------------------------------------------------------ what survives


@dataclass(slots=True)
class ProducerState:
    next_sequence: int = 0
    recent: deque[tuple[int, int, int]] = field(
        default_factory=lambda: deque(maxlen=limits.PRODUCER_WINDOW)
    )
    """(base sequence, count, base offset)."""


@dataclass(slots=True)
class FakePartition:
    leader: int
    batches: list[pa.RecordBatch] = field(default_factory=list)
    start: int = 0
    end: int = 0
    producers: dict[tuple[int, int], ProducerState] = field(default_factory=dict)

    def slice(self, start: int, end: int) -> Iterator[pa.RecordBatch]:
        for batch in self.batches:
            first = batch.column("offset")[0].as_py()
            low, high = max(start, first), min(end, first + batch.num_rows)
            while low < high:
                count = min(high - low, SLICE_ROWS)
                yield batch.slice(low - first, count)
                low += count


@dataclass(slots=True)
class FakeTopic:
    topic_id: str
    config: dict[str, str]
    partitions: list[FakePartition]
    max_record_bytes: int = limits.MAX_RECORD_BYTES


class FakeLog:
    """Topics and producer states; `changed` guards them and is notified of appends."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.topics: dict[str, FakeTopic] = {}
        self.brokers: dict[int, str] = {}
        self.now_us = 1_700_000_000_000_000
        self.published: list[list[str] | None] = []
        self.groups: dict[str, flight_messages.GroupInfo] = {}
        """Offsets committed for groups, as the test sets them."""
        self.group_offsets: dict[str, dict[tuple[str, int], int]] = {}
        self._producers = 0
        self._created = 0

    def create(self, topic: str, partitions: int = 1, **config: str) -> FakeTopic:
        self._created += 1
        self.topics[topic] = FakeTopic(
            topic_id=f"id-{self._created}",
            config=config,
            partitions=[FakePartition(leader=0) for _ in range(partitions)],
        )
        return self.topics[topic]

    def topic(self, name: str) -> FakeTopic:
        if name not in self.topics:
            raise errors.UnknownTopic(topic=name)
        return self.topics[name]

    def partition(self, name: str, number: int) -> FakePartition:
        partitions = self.topic(name).partitions
        if not 0 <= number < len(partitions):
            raise errors.UnknownPartition(topic=name, partition=number, last=len(partitions) - 1)
        return partitions[number]

    def check_id(self, topic: str, expected: str | None) -> None:
        found = self.topic(topic).topic_id
        if expected not in (None, found):
            raise errors.TopicChanged(topic=topic, expected=expected, found=found)

    def rows(self, topic: str, partition: int = 0) -> list[dict[str, Any]]:
        """All rows of a partition, in order."""
        batches = self.partition(topic, partition).batches
        return pa.Table.from_batches(batches, record.ROW_SCHEMA).to_pylist()

    def values(self, topic: str, partition: int = 0) -> list[bytes | None]:
        return [row["value"] for row in self.rows(topic, partition)]

    def append(
        self, topic: str, header: flight_messages.AppendHeader, payload: pa.RecordBatch
    ) -> int:
        """The base offset, of the first time if it was here before."""
        with self.changed:
            partition = self.partition(topic, header.partition)
            state = ProducerState()
            if header.producer_id >= 0:
                identity = (header.producer_id, header.producer_epoch)
                state = partition.producers.setdefault(identity, state)
                known = self.known(topic, header, payload.num_rows)
                if known is not None:
                    return known
                if header.base_sequence != state.next_sequence:
                    raise errors.OutOfOrderSequence(
                        topic=topic,
                        partition=header.partition,
                        producer_id=header.producer_id,
                        found=header.base_sequence,
                        expected=state.next_sequence,
                    )
            payload = record.conform_payload(payload)
            base_offset = partition.end
            partition.batches.append(
                record.rows(
                    payload,
                    partition=header.partition,
                    base_offset=base_offset,
                    timestamp_us=self.now_us,
                    timestamp_type=record.CREATE_TIME,
                )
            )
            partition.end += payload.num_rows
            state.recent.append((header.base_sequence, payload.num_rows, base_offset))
            state.next_sequence = (header.base_sequence + payload.num_rows) % 2**31
            self.changed.notify_all()
            return base_offset

    def known(self, topic: str, header: flight_messages.AppendHeader, rows: int) -> int | None:
        """The base offset of a batch that was appended before, if it is remembered."""
        identity = (header.producer_id, header.producer_epoch)
        state = self.partition(topic, header.partition).producers.get(identity, ProducerState())
        for sequence, count, base_offset in state.recent:
            if (sequence, count) == (header.base_sequence, rows):
                return base_offset
        return None

    def trim(self, topic: str, partition: int, start: int) -> None:
        """Retention: nothing below `start` is there any more."""
        with self.changed:
            self.partition(topic, partition).start = start

    def new_producer(self) -> flight_messages.ProducerIdentity:
        self._producers += 1
        return flight_messages.ProducerIdentity(producer_id=self._producers)


# ------------------------------------------------------------------------------ a broker


class FakeBroker(flight.FlightServerBase):
    """One broker. Faults: `on_append`, `on_action`, `on_read` are called first, and may raise."""

    def __init__(self, log: FakeLog | None = None, *, broker: int = 0, port: int = 0) -> None:
        super().__init__(f"grpc://127.0.0.1:{port}")
        self.log = log or FakeLog()
        self.broker = broker
        self.on_append: Fault = _no_fault
        self.on_action: Callable[[str], None] = _no_fault
        self.on_read: Callable[[], None] = _no_fault
        self.ends_streams = False
        """A batch refused for good ends its stream with an error, instead of being answered so."""
        self.actions: list[str] = []
        self.appended: list[tuple[str, flight_messages.AppendHeader]] = []
        self.tails: list[flight_messages.TailRequest] = []
        self.streams: list[list[str]] = []
        """The columns of each stream that was opened."""
        self._stopping = False
        self.relay = Relay(self.port)
        self.address = self.relay.address
        with self.log.changed:
            self.log.brokers[broker] = self.address

    def stop(self) -> None:
        """Breaks all connections; the log stays."""
        with self.log.changed:
            self._stopping = True
            self.log.brokers.pop(self.broker, None)
            self.log.changed.notify_all()
        # Flight's own shutdown waits for streams to end, and those that are idle never would.
        self.relay.close()
        self.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -------------------------------------------------------------------------- append

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        topic = flight_messages.decode(flight_messages.AppendStream, descriptor.command).topic
        self.streams.append(reader.schema.names)
        while True:
            try:
                chunk = reader.read_chunk()
            except StopIteration:
                return
            header = flight_messages.decode(flight_messages.AppendHeader, chunk.app_metadata)
            try:
                reply = self._append(topic, header, chunk.data)
            except (DropBefore, DropAfter):
                self.relay.cut()
                return
            if self.ends_streams and reply.error is not None:
                with told():
                    raise reply.error.exception()
            writer.write(pa.py_buffer(flight_messages.encode(reply)))

    def _append(
        self, topic: str, header: flight_messages.AppendHeader, payload: pa.RecordBatch
    ) -> flight_messages.AppendReply:
        dropped: DropAfter | None = None
        try:
            try:
                self.on_append(topic, header)
            except DropAfter as drop:
                dropped = drop
            except errors.SparklogError:
                # As a broker must, it looks for a repetition before it judges.
                if self.log.known(topic, header, payload.num_rows) is None:
                    raise
            leader = self.log.partition(topic, header.partition).leader
            if leader != self.broker:
                raise errors.NotLeader(
                    broker=self.broker, topic=topic, partition=header.partition, leader=leader
                )
            base_offset = self.log.append(topic, header, payload)
        except errors.SparklogError as error:
            return flight_messages.AppendReply(error=flight_messages.ErrorReply.of(error))
        self.appended.append((topic, header))
        if dropped is not None:
            raise dropped
        return flight_messages.AppendReply(base_offset=base_offset, timestamp_us=self.log.now_us)

    # -------------------------------------------------------------------------- read

    def do_get(self, context: Any, ticket: Any) -> Any:
        wanted = flight_messages.decode(flight_messages.ReadTicket, ticket.ticket)
        with told():
            self.log.check_id(wanted.topic, wanted.topic_id)
            partition = self.log.partition(wanted.topic, wanted.partition)
            for offset in (wanted.start, wanted.end):
                _check_offset(wanted.topic, wanted.partition, partition, offset)
        schema = _schema(wanted.columns)

        def batches() -> Iterator[pa.RecordBatch]:
            for batch in partition.slice(wanted.start, wanted.end):
                self._read_fault()
                yield batch.select(schema.names)

        return flight.GeneratorStream(schema, batches())

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        request = flight_messages.decode(flight_messages.TailRequest, descriptor.command)
        self.tails.append(request)
        schema = _schema(request.columns)
        writer.begin(schema)
        nothing = pa.RecordBatch.from_pylist([], schema)
        offsets = {(each.topic, each.partition): each.offset for each in request.positions}
        while not context.is_cancelled():
            with self.log.changed:
                if self._stopping:
                    raise flight.FlightUnavailableError("the broker stops")
                with told():
                    for each in request.positions:
                        self.log.check_id(each.topic, each.topic_id)
                found = self._new_rows(offsets)
                if not found:
                    self.log.changed.wait(request.heartbeat_ms / 1000)
            for header, batch in found:
                self._read_fault()
                writer.write_with_metadata(
                    batch.select(schema.names), flight_messages.encode(header)
                )
                offsets[header.topic, header.partition] = header.end
            if not found:
                idle = flight_messages.encode(flight_messages.TailHeader(idle=True))
                writer.write_with_metadata(nothing, idle)

    def _read_fault(self) -> None:
        with told():
            try:
                self.on_read()
            except (DropBefore, DropAfter):
                self.relay.cut()
                raise flight.FlightUnavailableError("the connection was cut") from None

    def _new_rows(
        self, offsets: dict[tuple[str, int], int]
    ) -> list[tuple[flight_messages.TailHeader, pa.RecordBatch]]:
        found = []
        for (topic, number), offset in offsets.items():
            with told():
                partition = self.log.partition(topic, number)
                if partition.leader != self.broker:
                    raise errors.NotLeader(
                        broker=self.broker, topic=topic, partition=number, leader=partition.leader
                    )
                _check_offset(topic, number, partition, offset)
            for batch in partition.slice(offset, partition.end):
                first = batch.column("offset")[0].as_py()
                header = flight_messages.TailHeader(
                    topic=topic,
                    partition=number,
                    first=first,
                    end=first + batch.num_rows,
                    high_watermark=partition.end,
                )
                found.append((header, batch))
        return found

    # -------------------------------------------------------------------------- actions

    def do_action(self, context: Any, action: Any) -> Iterator[Any]:
        name = action.type
        request_type, _ = flight_messages.ACTIONS[name]
        self.actions.append(name)
        try:
            with told(), self.log.changed:
                self.on_action(name)
                request = flight_messages.decode(request_type, action.body)
                reply = getattr(self, "_" + name.replace(".", "_"))(request)
                self.log.changed.notify_all()
        except (DropBefore, DropAfter):
            self.relay.cut()
            return
        yield flight.Result(pa.py_buffer(flight_messages.encode(reply)))

    def _cluster(self, _: flight_messages.Empty) -> flight_messages.ClusterInfo:
        brokers = [
            flight_messages.BrokerInfo(broker=broker, epoch=1, address=address)
            for broker, address in self.log.brokers.items()
        ]
        return flight_messages.ClusterInfo(
            cluster_id="fake", root="memory:", version="0", brokers=brokers
        )

    def _topics_list(self, _: flight_messages.Empty) -> flight_messages.TopicNames:
        return flight_messages.TopicNames(topics=sorted(self.log.topics))

    def _topics_create(self, request: flight_messages.CreateTopic) -> flight_messages.TopicInfo:
        record.check_topic_name(request.topic)
        if request.topic not in self.log.topics:
            self.log.create(request.topic, max(request.partitions, 1), **request.config)
        elif not request.if_absent:
            raise errors.TopicExists(topic=request.topic)
        return self._topics_describe(flight_messages.TopicName(topic=request.topic))

    def _topics_describe(self, request: flight_messages.TopicName) -> flight_messages.TopicInfo:
        topic = self.log.topic(request.topic)
        return flight_messages.TopicInfo(
            topic=request.topic,
            topic_id=topic.topic_id,
            config=topic.config,
            partitions=[
                flight_messages.PartitionInfo(
                    partition=number,
                    leader=partition.leader,
                    start=partition.start,
                    end=partition.end,
                )
                for number, partition in enumerate(topic.partitions)
            ],
            max_record_bytes=topic.max_record_bytes,
        )

    def _topics_alter(self, request: flight_messages.AlterTopic) -> flight_messages.TopicInfo:
        config = self.log.topic(request.topic).config
        for name, value in request.config.items():
            if value is None:
                config.pop(name, None)
            else:
                config[name] = value
        return self._topics_describe(flight_messages.TopicName(topic=request.topic))

    def _topics_add_partitions(
        self, request: flight_messages.AddPartitions
    ) -> flight_messages.TopicInfo:
        partitions = self.log.topic(request.topic).partitions
        if request.partitions <= len(partitions):
            raise errors.BadPartitionCount(
                topic=request.topic,
                requested=request.partitions,
                reason=f"it has {len(partitions)} already",
            )
        while len(partitions) < request.partitions:
            partitions.append(FakePartition(leader=0))
        return self._topics_describe(flight_messages.TopicName(topic=request.topic))

    def _topics_delete(self, request: flight_messages.TopicName) -> flight_messages.Empty:
        self.log.topic(request.topic)
        del self.log.topics[request.topic]
        return flight_messages.Empty()

    def _records_delete(self, request: flight_messages.DeleteRecords) -> flight_messages.LogStarts:
        partitions = {each: self.log.partition(request.topic, each) for each in request.offsets}
        for number, offset in request.offsets.items():
            partition = partitions[number]
            wanted = partition.end if offset == -1 else offset
            _check_offset(request.topic, number, partition, max(wanted, partition.start))
            partition.start = max(wanted, partition.start)
        return flight_messages.LogStarts(
            starts={each: partitions[each].start for each in partitions}
        )

    def _offsets_for_times(
        self, request: flight_messages.OffsetsForTimes
    ) -> flight_messages.Offsets:
        found = {}
        for number, timestamp_us in request.timestamps_us.items():
            rows = pa.Table.from_batches(
                self.log.partition(request.topic, number).batches, record.ROW_SCHEMA
            )
            times = rows.column("timestamp").cast(pa.int64()).to_pylist()
            offsets = rows.column("offset").to_pylist()
            late = [at for at, when in zip(offsets, times, strict=True) if when >= timestamp_us]
            found[number] = late[0] if late else -1
        return flight_messages.Offsets(offsets=found)

    def _producers_new(self, _: flight_messages.Empty) -> flight_messages.ProducerIdentity:
        return self.log.new_producer()

    def _groups_list(self, _: flight_messages.Empty) -> flight_messages.GroupList:
        groups = [msgspec.structs.replace(each, members=[]) for each in self.log.groups.values()]
        return flight_messages.GroupList(groups=groups)

    def _groups_describe(self, request: flight_messages.GroupName) -> flight_messages.GroupInfo:
        if request.group not in self.log.groups:
            raise errors.GroupRefused(group=request.group, error="GROUP_ID_NOT_FOUND", hint="")
        return self.log.groups[request.group]

    def _groups_offsets(self, request: flight_messages.GroupName) -> flight_messages.GroupOffsets:
        found = self.log.group_offsets.get(request.group, {})
        return flight_messages.GroupOffsets(
            offsets=[
                flight_messages.GroupOffset(topic=topic, partition=partition, offset=offset)
                for (topic, partition), offset in sorted(found.items())
            ]
        )

    def _groups_commit(self, request: flight_messages.CommitOffsets) -> flight_messages.Empty:
        group = self.log.groups.setdefault(
            request.group, flight_messages.GroupInfo(group=request.group, state="Empty")
        )
        if group.members:
            raise errors.MemberFenced(
                group=request.group, member_id=request.member_id, error="UNKNOWN_MEMBER_ID"
            )
        offsets = self.log.group_offsets.setdefault(request.group, {})
        for each in request.offsets:
            self.log.partition(each.topic, each.partition)
            offsets[each.topic, each.partition] = each.offset
        return flight_messages.Empty()

    def _groups_forget(self, request: flight_messages.ForgetOffsets) -> flight_messages.Empty:
        self._groups_describe(flight_messages.GroupName(group=request.group))
        for each in request.partitions:
            self.log.group_offsets.get(request.group, {}).pop((each.topic, each.partition), None)
        return flight_messages.Empty()

    def _groups_delete(self, request: flight_messages.GroupName) -> flight_messages.Empty:
        if self._groups_describe(request).members:
            raise errors.GroupRefused(group=request.group, error="NON_EMPTY_GROUP", hint="")
        del self.log.groups[request.group]
        self.log.group_offsets.pop(request.group, None)
        return flight_messages.Empty()

    def _publish_now(self, request: flight_messages.PublishNow) -> flight_messages.Empty:
        self.log.published.append(request.topics)
        return flight_messages.Empty()


@contextmanager
def told() -> Iterator[None]:
    """Turns our errors into Flight's, with the reply beside."""
    try:
        yield
    except errors.SparklogError as error:
        reply = flight_messages.encode(flight_messages.ErrorReply.of(error))
        raise flight.FlightServerError(str(error), extra_info=reply) from None


def _check_offset(topic: str, number: int, partition: FakePartition, offset: int) -> None:
    if not partition.start <= offset <= partition.end:
        raise errors.OffsetOutOfRange(
            topic=topic,
            partition=number,
            offset=offset,
            start=partition.start,
            end=partition.end,
        )


def _schema(columns: list[str] | None) -> pa.Schema:
    if columns is None:
        return record.ROW_SCHEMA
    return pa.schema([record.ROW_SCHEMA.field(name) for name in columns])


# ------------------------------------------------------------------------------ as a program


class SinkBroker(FakeBroker):
    """Acks records and drops them, to measure the client alone."""

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        ends: dict[int, int] = defaultdict(int)
        while True:
            try:
                chunk = reader.read_chunk()
            except StopIteration:
                return
            header = flight_messages.decode(flight_messages.AppendHeader, chunk.app_metadata)
            reply = flight_messages.AppendReply(base_offset=ends[header.partition], timestamp_us=0)
            ends[header.partition] += chunk.data.num_rows
            writer.write(pa.py_buffer(flight_messages.encode(reply)))


def main(arguments: list[str]) -> None:
    """Serves topics `t1` and `t4`, of one and four partitions, until standard input ends."""
    broker = SinkBroker() if "--sink" in arguments else FakeBroker()
    broker.log.create("t1", 1)
    broker.log.create("t4", 4)
    sys.stdout.write(f"{broker.port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    broker.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
