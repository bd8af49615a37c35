"""Clients for `KafkaWorld`: kafka-python's, sparklog's own, and those of Kafka for Java.

Each kind has an idempotent producer, a member of its own group, and a consumer without a group.
None of these may fail while brokers are killed, as long as one broker is alive.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import confluent_kafka
import kafka
from kafka.errors import KafkaError
from kafka.structs import OffsetAndMetadata as PythonOffset
from kafka.structs import TopicPartition as PythonPartition

import sparklog
from sparklog import errors
from sparklog.client.producer.producer import RecordMetadata
from tests.support import jvms
from tests.support.kafkakilling import (
    EAGER_CLIENT,
    PARTITIONS,
    TOPIC,
    Commits,
    Member,
    Reader,
    Served,
    Writer,
)
from tests.support.killing import PATIENCE_SECONDS

PROGRAM: Final = Path(__file__).parents[1] / "interop" / "java" / "Survivor.java"
_SOON_MS: Final = {
    "reconnect_backoff_ms": 20,
    "reconnect_backoff_max_ms": 200,
    "retry_backoff_ms": 20,
    "metadata_max_age_ms": 5_000,
}
_REQUEST_MS: Final = 5_000
_DELIVERY_SECONDS: Final = 600.0
_PAUSE_SECONDS: Final = 0.05
_PLACES: Final = tuple((TOPIC, number) for number in range(PARTITIONS))


class ConfluentReader(Reader):
    """librdkafka's consumer, which fails if a broker reports that an offset does not exist."""

    __slots__ = ()

    def run(self, served: Served, ended: threading.Event, chance: random.Random) -> None:
        consumer = confluent_kafka.Consumer(
            {
                **EAGER_CLIENT,
                "bootstrap.servers": served.kafka_address,
                "group.id": f"none-{self.name}",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
            }
        )
        try:
            consumer.assign([confluent_kafka.TopicPartition(*place, 0) for place in _PLACES])
            while not ended.is_set():
                for each in consumer.consume(chance.choice([1, 10, 200]), 0.1):
                    if (error := each.error()) is None:
                        self.take(each.partition() or 0, each.offset() or 0, each.value())
                    else:
                        # Of all errors, only this one is final: librdkafka retries after others.
                        is_reset = error.code() == confluent_kafka.KafkaError._AUTO_OFFSET_RESET
                        assert not is_reset, error.str()
        except BaseException as error:
            self.failures.append(error)
        finally:
            consumer.close()


# ------------------------------------------------------------------------------ kafka-python


class PythonWriter(Writer):
    """kafka-python's producer."""

    __slots__ = ()

    def run(self, served: Served, ended: threading.Event, chance: random.Random) -> None:
        try:
            producer = kafka.KafkaProducer(
                bootstrap_servers=served.kafka_address.split(","),
                enable_idempotence=True,
                acks="all",
                request_timeout_ms=_REQUEST_MS,
                delivery_timeout_ms=1_000 * _DELIVERY_SECONDS,
                **_SOON_MS,
            )
            while not ended.is_set():
                for partition, value in self.burst(chance):
                    future = producer.send(TOPIC, value, partition=partition)
                    future.add_callback(functools.partial(self._acked, value))
                    future.add_errback(self.failures.append)
                if chance.random() < 0.2:
                    producer.flush(PATIENCE_SECONDS)
                self.rest(ended, chance)
            producer.flush(2 * PATIENCE_SECONDS)
            producer.close()
        except BaseException as error:
            self.failures.append(error)

    def _acked(self, value: bytes, place: Any) -> None:
        self.acked.append((place.partition, place.offset, value))


def _python_consumer(served: Served, **more: Any) -> Any:
    return kafka.KafkaConsumer(
        bootstrap_servers=served.kafka_address.split(","),
        request_timeout_ms=_REQUEST_MS,
        enable_auto_commit=False,
        **_SOON_MS,
        **more,
    )


class PythonMember(Member):
    """kafka-python's consumer in a group."""

    __slots__ = ()

    def run(self, served: Served, ended: threading.Event, chance: random.Random) -> None:
        try:
            consumer = _python_consumer(
                served,
                group_id=self.group,
                auto_offset_reset="earliest",
                session_timeout_ms=3_000,
                heartbeat_interval_ms=300,
            )
            consumer.subscribe([TOPIC])
            after: dict[Any, Any] = {}
            while not ended.is_set():
                for place, records in consumer.poll(100).items():
                    self.seen += [(each.partition, each.offset, each.value) for each in records]
                    after[place] = PythonOffset(records[-1].offset + 1, "", -1)
                after = {place: after[place] for place in consumer.assignment() & after.keys()}
                if after and self._commit(consumer, after):
                    after = {}
            consumer.close()
        except BaseException as error:
            self.failures.append(error)

    def _commit(self, consumer: Any, after: dict[Any, Any]) -> bool:
        """Returns true if acked; otherwise the outcome is unknown, and it commits again."""
        try:
            consumer.commit(after)
        except KafkaError:
            return False
        for place, found in after.items():
            self.commits.ack(place.partition, found.offset)
        return True


class PythonReader(Reader):
    """kafka-python's consumer, which fails if a broker reports that an offset does not exist."""

    __slots__ = ()

    def run(self, served: Served, ended: threading.Event, chance: random.Random) -> None:
        try:
            consumer = _python_consumer(served, group_id=None, auto_offset_reset="none")
            places = [PythonPartition(*place) for place in _PLACES]
            consumer.assign(places)
            for place in places:
                consumer.seek(place, 0)
            while not ended.is_set():
                for records in consumer.poll(100).values():
                    for each in records:
                        self.take(each.partition, each.offset, each.value)
            consumer.close()
        except BaseException as error:
            self.failures.append(error)


# ------------------------------------------------------------------------------ sparklog's own


class OwnWriter(Writer):
    """sparklog's producer."""

    __slots__ = ()

    def run(self, served: Served, ended: threading.Event, chance: random.Random) -> None:
        try:
            with (
                sparklog.connect(served.address) as log,
                log.producer(linger_ms=1, delivery_timeout_seconds=_DELIVERY_SECONDS) as producer,
            ):
                while not ended.is_set():
                    for partition, value in self.burst(chance):
                        acked = functools.partial(self._delivered, value)
                        producer.send(TOPIC, value, partition=partition, on_delivery=acked)
                    if chance.random() < 0.2:
                        producer.flush(PATIENCE_SECONDS)
                    self.rest(ended, chance)
                producer.flush(2 * PATIENCE_SECONDS)
        except BaseException as error:
            self.failures.append(error)

    def _delivered(
        self, value: bytes, error: errors.SparklogError | None, place: RecordMetadata | None
    ) -> None:
        if place is None:
            self.failures.append(error)
        else:
            self.acked.append((place.partition, place.offset, value))


class OwnMember(Member):
    """sparklog's consumer in a group."""

    __slots__ = ()

    def run(self, served: Served, ended: threading.Event, chance: random.Random) -> None:
        try:
            with (
                sparklog.connect(served.address) as log,
                log.consumer(
                    TOPIC,
                    group=self.group,
                    auto_commit=False,
                    session_timeout_seconds=3.0,
                    heartbeat_seconds=0.3,
                ) as consumer,
            ):
                while not ended.is_set():
                    records = consumer.poll(0.1)
                    self.seen += [(each.partition, each.offset, each.value) for each in records]
                    # A poll returns the records of one small append, and each commit is a put.
                    if not records or chance.random() < 0.05:
                        self._commit(consumer)
        except BaseException as error:
            self.failures.append(error)

    def _commit(self, consumer: sparklog.Consumer) -> None:
        """Commits its positions; without an ack, the outcome is unknown until the next commit."""
        wanted = {place: consumer.position(*place) for place in consumer.assignment}
        if not wanted:
            return
        busy = errors.MemberFenced, errors.GroupBusy, errors.Retriable, errors.OutcomeUnknown
        with contextlib.suppress(*busy):
            consumer.commit(wanted)
            for (_, partition), offset in wanted.items():
                self.commits.ack(partition, offset)


class OwnReader(Reader):
    """sparklog's."""

    __slots__ = ()

    def run(self, served: Served, ended: threading.Event, chance: random.Random) -> None:
        try:
            with sparklog.connect(served.address) as log, log.consumer(TOPIC) as consumer:
                while not ended.is_set():
                    for each in consumer.poll(0.1):
                        self.take(each.partition, each.offset, each.value)
        except BaseException as error:
            self.failures.append(error)


# ------------------------------------------------------------------------------ Java's


class JavaClients:
    """One JVM with a producer, a member of a group, and a consumer without a group."""

    def __init__(self, number: int, *, rest_seconds: float) -> None:
        """Skips the test if Kafka's jars are unavailable."""
        self._paths = jvms.class_path()
        self.writer = _JavaWriter(number, rest_seconds, clients=self)
        self.member = _JavaMember(0, Commits(), group="java", clients=self)
        self.reader = _JavaReader("java", clients=self)
        self._program: jvms.Program | None = None
        self._started = threading.Event()

    def start(self, served: Served, chance: random.Random) -> jvms.Program:
        """Starts the program, which writes until it reads a line."""
        given = [served.kafka_address, TOPIC, PARTITIONS, self.writer.number]
        given += [round(1e3 * self.writer.rest_seconds), chance.randrange(1 << 31)]
        self._program = jvms.Program(self._paths, [str(PROGRAM), *map(str, given)])
        self._started.set()
        return self._program

    def lines(self, ended: threading.Event) -> Iterator[list[str]]:
        """Yields the words of each line until it is stopped; fails if the program ends earlier."""
        while not self._started.wait(_PAUSE_SECONDS):
            if ended.is_set():
                return
        program = self._program
        assert program is not None
        at = 0
        while not ended.is_set():
            if at == len(program.lines):
                assert program.is_running, program.output[-6_000:]
                time.sleep(_PAUSE_SECONDS)
            found = program.lines[at:]
            at += len(found)
            yield from (line.split(" ") for line in found)

    def close(self) -> None:
        """Kills the program, whatever its state."""
        if self._program is not None:
            self._program.close()


class _JavaWriter(Writer):
    """Writes through the program until it is stopped."""

    __slots__ = ("_clients", "_has_ended")

    def __init__(self, number: int, rest_seconds: float, *, clients: JavaClients) -> None:
        super().__init__(number, rest_seconds)
        self._clients = clients
        self._has_ended = threading.Event()
        """Set once all acks have been noted."""

    def run(self, served: Served, ended: threading.Event, chance: random.Random) -> None:
        try:
            program = self._clients.start(served, chance)
            while not ended.wait(_PAUSE_SECONDS):
                assert program.is_running, program.output[-6_000:]
            program.tell("end")
            assert self._has_ended.wait(2 * PATIENCE_SECONDS), program.output[-6_000:]
        except BaseException as error:
            self.failures.append(error)

    def note(self, words: Sequence[str]) -> None:
        """Notes the records that the program has sent, and those acked."""
        match words:
            case "sent", partition, value:
                self.sent[int(partition)].append(value.encode())
            case "acked", partition, offset, value:
                self.acked.append((int(partition), int(offset), value.encode()))
            case ["ended"]:
                self._has_ended.set()
            case "failed", *_:
                self.failures.append(" ".join(words))
            case _:
                pass


class _JavaMember(Member):
    """Notes what the program's member has read and committed."""

    __slots__ = ("_clients",)

    def __init__(self, number: int, commits: Commits, group: str, *, clients: JavaClients) -> None:
        super().__init__(number, commits, group)
        self._clients = clients

    def run(self, served: Served, ended: threading.Event, chance: random.Random) -> None:
        try:
            for words in self._clients.lines(ended):
                match words:
                    case "got", partition, offset, value:
                        self.seen.append((int(partition), int(offset), value.encode()))
                    case "committed", partition, offset:
                        self.commits.ack(int(partition), int(offset))
                    case _:
                        self._clients.writer.note(words)
        except BaseException as error:
            self.failures.append(error)


class _JavaReader(Reader):
    """Notes what the program's consumer without a group has read."""

    __slots__ = ("_clients",)

    def __init__(self, name: str, *, clients: JavaClients) -> None:
        super().__init__(name)
        self._clients = clients

    def run(self, served: Served, ended: threading.Event, chance: random.Random) -> None:
        try:
            for words in self._clients.lines(ended):
                match words:
                    case "read", partition, offset, value:
                        self.take(int(partition), int(offset), value.encode())
                    case _:
                        pass
        except BaseException as error:
            self.failures.append(error)
