"""Drives a broker with producers, consumers and groups through librdkafka, and records everything.

A run creates its own topic, and deletes it if nothing was found. Producers are idempotent and send
numbered records; some consumers read without a group, and seek; group members commit what they have
received, leave and rejoin. Once the time is up, every send is complete, the groups read to the end,
and one more consumer reads everything.

The broker may be killed and restarted during a run: clients retry for `patience_seconds`.
"""

from __future__ import annotations

import contextlib
import functools
import random
import secrets
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from sparklog import errors, kafka_port, listeners
from sparklog.check.history import (
    ACKED,
    FAILED,
    NO_GROUP,
    NO_OFFSET,
    NOT_SENT,
    SEQUENCE_BITS,
    UNKNOWN,
    History,
    Recorder,
    joined,
    value_of,
)
from sparklog.options import is_address

_VALUE: Final = struct.Struct(">8sq")
"""The run's id and the value; padding and a checksum follow."""
_SUM_BYTES: Final = 4
_HEADER: Final = "value"
_BASE_MS: Final = 1_700_000_000_000
_CONFIG: Final = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
"""The records have old timestamps, so a broker's default retention would soon delete them."""
_POLL_SECONDS: Final = 0.1
_LOOK_SECONDS: Final = 0.2
_REQUEST_SECONDS: Final = 10.0
_PROBE_SECONDS: Final = 3.0
_LEAVING_SECONDS: Final = 5.0
"""Time that an interrupted run waits for its clients, and again for the deletion of its topic."""
_BURST: Final = 50
_QUEUED: Final = 20_000
"""The maximum number of unacked records per producer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Client counts, and the duration of a run."""

    bootstrap: str
    seconds: float = 10.0
    producers: int = 3
    consumers: int = 2
    groups: int = 1
    members: int = 2
    partitions: int = 4
    value_bytes: int = 100
    rate: float = 5_000.0
    """The maximum rate of each producer, in records per second."""
    topic_prefix: str = "sparklog-check"
    patience_seconds: float = 60.0
    seed: int = 0
    keep_topic: bool = False
    """Even if the run is interrupted."""
    client: dict[str, Any] = field(default_factory=dict)
    """Further settings of librdkafka, for all clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The recorded history of a run."""

    topic: str
    history: History
    problems: tuple[str, ...]
    """Reasons that something was not seen: a client that failed, or a read that timed out."""


Tell = Callable[[str, float, int, int], None]
"""Called periodically with the activity, the elapsed share (0 to 1), and records acked and read."""


def drive(workload: Workload, tell: Tell, ended: threading.Event | None = None) -> RunResult:
    """Runs the workload until its time is up or `ended` is set.

    If interrupted, it deletes the topic (unless `keep_topic`), which takes a few seconds at most; a
    note of the exception says whether that succeeded. Raises `NotInstalled`, `BrokerUnavailable`,
    `BadOption`.
    """
    return _Run(workload, tell, ended or threading.Event()).run()


class _Run:
    def __init__(self, workload: Workload, tell: Tell, ended: threading.Event) -> None:
        self.workload = workload
        self._ended = ended
        self.kafka = _library()
        self.id = secrets.token_bytes(8)
        self.topic = f"{workload.topic_prefix}-{self.id.hex()}"
        self.is_abandoned = False
        """True once producers no longer wait for acks."""
        self._threads: list[threading.Thread] = []
        self.sending_ends = threading.Event()
        self.reading_ends = threading.Event()
        self.problems: list[str] = []
        self.acked = 0
        self.read = 0
        self.sessions = _Counter()
        self._tell = tell
        self._recorders: list[Recorder] = []
        self._progress: dict[int, dict[int, int]] = {}
        """Highest acked commits of each group, by partition."""
        self.ends: dict[int, int] = {}
        """End offsets of the partitions after the last send."""

    # ---------------------------------------------------------------------- what clients use

    def recorder(self) -> Recorder:
        recorder = Recorder()
        self._recorders.append(recorder)
        return recorder

    def settings(self, **more: Any) -> dict[str, Any]:
        return {
            "bootstrap.servers": self.workload.bootstrap,
            "log_level": 0,
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 500,
            "retry.backoff.ms": 20,
            **{
                name if name.endswith("_cb") else name.replace("_", "."): value
                for name, value in more.items()
            },
            **self.workload.client,
        }

    def payload(self, value: int) -> bytes:
        """The bytes of a value, which `value_in` decodes."""
        body = _VALUE.pack(self.id, value)
        body += b"." * max(self.workload.value_bytes - len(body) - _SUM_BYTES, 0)
        return body + zlib.crc32(body).to_bytes(_SUM_BYTES, "big")

    def value_in(self, payload: bytes | None) -> tuple[int, bool]:
        """(value, whether its bytes are intact)."""
        if payload is None or len(payload) < _VALUE.size + _SUM_BYTES:
            return NOT_SENT, False
        run, value = _VALUE.unpack_from(payload)
        if run != self.id:
            return NOT_SENT, False
        return value, zlib.crc32(payload[:-_SUM_BYTES]).to_bytes(4, "big") == payload[-_SUM_BYTES:]

    def guarded(self, name: str, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except Exception as error:
                self.problems.append(f"{name}: {error}")

        thread = threading.Thread(target=run, name=f"sparklog-check-{name}", daemon=True)
        thread.start()
        self._threads.append(thread)
        return thread

    def positions(self, group: int) -> dict[int, int]:
        return self._progress.setdefault(group, {})

    # ---------------------------------------------------------------------- the run

    def run(self) -> RunResult:
        _probe(self.workload.bootstrap)
        try:
            self._create_topic()
            return self._drive()
        except KeyboardInterrupt as interrupt:
            self._abandon()
            interrupt.add_note(remove_topic(self.workload, self.topic))
            raise

    def _abandon(self) -> None:
        """Stops all clients, and waits briefly for them."""
        self.is_abandoned = True
        self.sending_ends.set()
        self.reading_ends.set()
        deadline = time.monotonic() + _LEAVING_SECONDS
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _drive(self) -> RunResult:
        workload = self.workload
        chance = random.Random(workload.seed)
        senders = [
            _Sender(self, number, random.Random(chance.random()))
            for number in range(workload.producers)
        ]
        readers: list[_Loner | _Member] = [
            _Loner(self, number, random.Random(chance.random()))
            for number in range(workload.consumers)
        ]
        for group in range(workload.groups):
            for _ in range(workload.members):
                number = len(readers)
                readers.append(_Member(self, number, group, random.Random(chance.random())))
        sending = [self.guarded(f"producer {each.number}", each.run) for each in senders]
        reading = [self.guarded(f"consumer {each.number}", each.run) for each in readers]
        reading.append(self.guarded("watcher", self._watch))
        began = time.monotonic()
        while (over := time.monotonic() - began) < workload.seconds:
            self._tell("clients at work", over / workload.seconds, self.acked, self.read)
            if self._ended.wait(_LOOK_SECONDS):
                break
        self.sending_ends.set()
        self._tell("waiting for the last acks", 1.0, self.acked, self.read)
        for thread in sending:
            thread.join()
        try:
            self._finish()
        finally:
            self.reading_ends.set()
        for thread in reading:
            thread.join(workload.patience_seconds)
        last = _Loner(self, len(readers), chance, is_final=True)
        self._tell("reading everything once more", 1.0, self.acked, self.read)
        last.read_everything()
        history = joined(self._recorders)
        return RunResult(topic=self.topic, history=history, problems=tuple(self.problems))

    def _finish(self) -> None:
        """Waits until the groups have read and committed everything."""
        deadline = time.monotonic() + self.workload.patience_seconds
        self.ends = self._ends_now(deadline)
        while time.monotonic() < deadline:
            left = [
                group
                for group in range(self.workload.groups)
                if any(self.positions(group).get(at, 0) < end for at, end in self.ends.items())
            ]
            if not left:
                return
            self._tell("groups read to the end", 1.0, self.acked, self.read)
            time.sleep(_LOOK_SECONDS)
        self.problems.append(f"groups {left} did not read to the end")

    def _ends_now(self, deadline: float) -> dict[int, int]:
        consumer = self.kafka.Consumer(self.settings(group_id=f"{self.topic}-ends"))
        try:
            found = {}
            for partition in range(self.workload.partitions):
                ask = functools.partial(self._watermarks, consumer, partition)
                _, found[partition] = _patiently(self.kafka, deadline, ask)
            return found
        finally:
            consumer.close()

    def _watermarks(self, consumer: Any, partition: int) -> tuple[int, int]:
        place = self.kafka.TopicPartition(self.topic, partition)
        found = consumer.get_watermark_offsets(place, timeout=_REQUEST_SECONDS)
        if found is None:
            raise self.kafka.KafkaException("a partition's end was not returned")
        return int(found[0]), int(found[1])

    def _watch(self) -> None:
        """Observes the end offsets of partitions, as a lag monitor does."""
        recorder = self.recorder()
        consumer = self.kafka.Consumer(self.settings(group_id=f"{self.topic}-watch"))
        try:
            while not self.reading_ends.wait(_LOOK_SECONDS):
                for partition in range(self.workload.partitions):
                    started = _now_us()
                    with contextlib.suppress(self.kafka.KafkaException):
                        start, end = self._watermarks(consumer, partition)
                        recorder.ends.add(partition, start, end, started, _now_us())
        finally:
            consumer.close()

    # ---------------------------------------------------------------------- the topic

    def _create_topic(self) -> None:
        from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

        admin = AdminClient(self.settings())
        try:
            admin.list_topics(timeout=_REQUEST_SECONDS)
            topic = NewTopic(self.topic, self.workload.partitions, 1, config=_CONFIG)
            admin.create_topics([topic])[self.topic].result(_REQUEST_SECONDS)
        except self.kafka.KafkaException as error:
            reason = _reason(error)
            raise errors.BrokerUnavailable(
                address=self.workload.bootstrap, reason=f"{reason}; is it a Kafka broker's address?"
            ) from error


def remove_topic(workload: Workload, topic: str) -> str:
    """Deletes a run's topic and groups, unless the topic is kept. Returns the outcome as a line."""
    if workload.keep_topic:
        return f"topic {topic} is kept"
    kafka = _library()
    from confluent_kafka.admin import AdminClient

    admin = AdminClient(
        {"bootstrap.servers": workload.bootstrap, "log_level": 0, **workload.client}
    )
    try:
        admin.delete_topics([topic])[topic].result(_LEAVING_SECONDS)
    except (kafka.KafkaException, TimeoutError) as error:
        reason = _reason(error) or f"no response in {_LEAVING_SECONDS:g} s"
        return f"topic {topic} may still exist; delete it yourself: {reason}"
    groups = [_group_id(topic, group) for group in range(workload.groups)]
    for each in admin.delete_consumer_groups(groups, request_timeout=_LEAVING_SECONDS).values():
        with contextlib.suppress(kafka.KafkaException):  # it is empty, and will expire
            each.result()
    return f"topic {topic} is deleted"


def _group_id(topic: str, group: int) -> str:
    return f"{topic}-{group}"


# ------------------------------------------------------------------------------ producers


class _Sender:
    """An idempotent producer; after a fatal error, a new one with a new number replaces it."""

    def __init__(self, run: _Run, number: int, chance: random.Random) -> None:
        self.number = number
        self._run = run
        self._chance = chance
        self._recorder = run.recorder()
        self._producer: Any = None
        self._producer_number = number
        self._sequence = 0
        self._undecided: dict[int, tuple[int, int]] = {}
        """Partition and time of each unfinished send, by value."""
        self._is_fatal = False

    def run(self) -> None:
        workload = self._run.workload
        began, sent = time.monotonic(), 0
        self._open()
        while not self._run.sending_ends.is_set():
            if self._is_fatal:
                self._close()
                self._producer_number += workload.producers
                self._sequence = 0
                self._open()
            partition = self._chance.randrange(workload.partitions)
            for _ in range(self._chance.choice((1, 1, 2, 5, _BURST))):
                sent += self._send(
                    self._chance.randrange(workload.partitions)
                    if self._chance.random() < 0.2
                    else partition
                )
            self._producer.poll(0)
            ahead = sent / workload.rate - (time.monotonic() - began)
            while ahead > 0 or len(self._undecided) > _QUEUED:
                self._producer.poll(min(max(ahead, 0.001), _POLL_SECONDS))
                ahead = sent / workload.rate - (time.monotonic() - began)
                if self._run.sending_ends.is_set():
                    break
        self._close()

    def _open(self) -> None:
        patience_ms = round(self._run.workload.patience_seconds * 1000)
        self._is_fatal = False
        self._producer = self._run.kafka.Producer(
            self._run.settings(
                enable_idempotence=True,
                message_timeout_ms=patience_ms,
                linger_ms=self._chance.choice((0, 1, 5)),
                compression_type=self._chance.choice(("none", "lz4", "zstd", "gzip", "snappy")),
                error_cb=self._failed,
            )
        )

    def _send(self, partition: int) -> int:
        value = value_of(self._producer_number, self._sequence)
        started = _now_us()
        self._undecided[value] = partition, started
        try:
            self._producer.produce(
                self._run.topic,
                self._run.payload(value),
                key=b"%d" % value,
                partition=partition,
                timestamp=_BASE_MS + self._sequence,
                headers=[(_HEADER, b"%d" % value)],
                on_delivery=self._delivered,
            )
        except BufferError:
            del self._undecided[value]  # never sent, so its number is reused
            self._producer.poll(_POLL_SECONDS)
            return 0
        except self._run.kafka.KafkaException as error:
            del self._undecided[value]
            self._is_fatal = True
            self._run.problems.append(f"producer {self._producer_number}: {_reason(error)}")
            return 0
        self._sequence += 1
        return 1

    def _delivered(self, error: Any, message: Any) -> None:
        value, _ = self._run.value_in(message.value())
        partition, started = self._undecided.pop(value)
        ended = _now_us()
        if error is None:
            # There is no offset if the ack was lost and a later batch's ack implies it.
            offset = NO_OFFSET if message.offset() is None else message.offset()
            self._recorder.sends.add(
                value, partition, ACKED, message.partition(), offset, started, ended
            )
            self._run.acked += 1
            return
        status = FAILED if error.name() in _REFUSED else UNKNOWN
        self._recorder.sends.add(value, partition, status, NO_OFFSET, NO_OFFSET, started, ended)

    def _failed(self, error: Any) -> None:
        if error.fatal():
            self._is_fatal = True
            self._run.problems.append(f"producer {self._producer_number}: {error.str()}")

    def _close(self) -> None:
        """Waits until every send is complete: acked, rejected, or given up."""
        patience_seconds = self._run.workload.patience_seconds + _REQUEST_SECONDS
        deadline = time.monotonic() + patience_seconds
        while self._producer.flush(_LOOK_SECONDS) and time.monotonic() < deadline:
            if self._run.is_abandoned:
                self._producer.purge()
        for value, (partition, started) in self._undecided.items():
            self._recorder.sends.add(
                value, partition, UNKNOWN, NO_OFFSET, NO_OFFSET, started, _now_us()
            )
        self._undecided.clear()


_REFUSED: Final = (
    "MSG_SIZE_TOO_LARGE",
    "INVALID_RECORD",
    "INVALID_MSG",
    "POLICY_VIOLATION",
    "TOPIC_AUTHORIZATION_FAILED",
    "UNSUPPORTED_COMPRESSION_TYPE",
)


# ------------------------------------------------------------------------------ consumers


class _Reader:
    """A consumer, and the records that it received."""

    def __init__(self, run: _Run, number: int, chance: random.Random) -> None:
        self.number = number
        self.run_of = run
        self.chance = chance
        self.recorder = run.recorder()
        self.session: dict[int, int] = {}
        self.poll_number = 0

    def begin_session(self, partition: int) -> None:
        self.session[partition] = self.run_of.sessions.next()

    def poll(self, consumer: Any) -> dict[int, int]:
        """Records one poll's results. Returns the offset after each partition's last record."""
        run = self.run_of
        messages = consumer.consume(self.chance.choice((1, 10, 500)), _POLL_SECONDS)
        at_us = _now_us()
        self.poll_number += 1
        after: dict[int, int] = {}
        for message in messages:
            if message.error() is not None:
                continue
            partition, offset = message.partition(), message.offset()
            value, is_whole = run.value_in(message.value())
            self.recorder.reads.add(
                self.number,
                self.session.get(partition, 0),
                self.poll_number,
                partition,
                offset,
                value,
                int(is_whole and _is_as_sent(message, value)),
                at_us,
            )
            after[partition] = offset + 1
        run.read += len(messages)
        return after


def _is_as_sent(message: Any, value: int) -> bool:
    text = b"%d" % value
    sequence = value & ((1 << SEQUENCE_BITS) - 1)
    return bool(
        message.key() == text
        and message.headers() == [(_HEADER, text)]
        and message.timestamp()[1] == _BASE_MS + sequence
    )


class _Loner(_Reader):
    """A consumer without a group, which seeks occasionally."""

    def __init__(
        self, run: _Run, number: int, chance: random.Random, *, is_final: bool = False
    ) -> None:
        super().__init__(run, number, chance)
        self.recorder.consumers.add(number, NO_GROUP, int(is_final))

    def run(self) -> None:
        run = self.run_of
        with self._consumer() as consumer:
            position = dict.fromkeys(range(run.workload.partitions), 0)
            while not run.reading_ends.is_set():
                position |= self.poll(consumer)
                if self.chance.random() < 0.01:
                    partition = self.chance.randrange(run.workload.partitions)
                    offset = self.chance.randint(0, position[partition])
                    with contextlib.suppress(run.kafka.KafkaException):
                        consumer.seek(run.kafka.TopicPartition(run.topic, partition, offset))
                        self.begin_session(partition)

    def read_everything(self) -> None:
        """Reads from the start to the partitions' ends, as they were after the last send."""
        run = self.run_of
        deadline = time.monotonic() + run.workload.patience_seconds
        position = dict.fromkeys(range(run.workload.partitions), 0)
        with self._consumer() as consumer:
            quiet_since = time.monotonic()
            while any(position[at] < end for at, end in run.ends.items()):
                found = self.poll(consumer)
                position |= found
                if found:
                    quiet_since = time.monotonic()
                elif time.monotonic() > max(deadline, quiet_since + _REQUEST_SECONDS):
                    run.problems.append(f"not everything was read: at {position} of {run.ends}")
                    return

    @contextlib.contextmanager
    def _consumer(self) -> Iterator[Any]:
        run = self.run_of
        consumer = run.kafka.Consumer(
            run.settings(
                group_id=f"{run.topic}-alone-{self.number}",
                enable_auto_commit=False,
                # An out-of-range offset resets the consumer, which shows in its reads.
                auto_offset_reset="earliest",
                fetch_queue_backoff_ms=5,
            )
        )
        try:
            places = []
            for partition in range(run.workload.partitions):
                self.begin_session(partition)
                places.append(run.kafka.TopicPartition(run.topic, partition, 0))
            consumer.assign(places)
            yield consumer
        finally:
            consumer.close()


class _Member(_Reader):
    """A group member that commits what it received, and occasionally leaves and rejoins."""

    def __init__(self, run: _Run, number: int, group: int, chance: random.Random) -> None:
        super().__init__(run, number, chance)
        self.group = group
        self._after: dict[int, int] = {}
        self.recorder.consumers.add(number, group, 0)

    def run(self) -> None:
        run = self.run_of
        # One assignor per group, since its members must agree.
        strategy = ("range", "cooperative-sticky")[self.group % 2]
        while not run.reading_ends.is_set():
            consumer = run.kafka.Consumer(
                run.settings(
                    group_id=_group_id(run.topic, self.group),
                    enable_auto_commit=False,
                    auto_offset_reset="earliest",
                    session_timeout_ms=10_000,
                    heartbeat_interval_ms=500,
                    partition_assignment_strategy=strategy,
                )
            )
            try:
                self._be_a_member(consumer, self.chance.uniform(2.0, 15.0))
            finally:
                consumer.close()

    def _be_a_member(self, consumer: Any, seconds: float) -> None:
        run = self.run_of
        self._after = {}
        consumer.subscribe(
            [run.topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
        )
        leaves_at = time.monotonic() + seconds
        while not run.reading_ends.is_set():
            self._after |= self.poll(consumer)
            if self._after and self.chance.random() < 0.5:
                self._commit(consumer)
            if time.monotonic() > leaves_at and not run.sending_ends.is_set():
                return
        self._commit(consumer)

    def _commit(self, consumer: Any) -> None:
        run = self.run_of
        wanted, self._after = self._after, {}
        if not wanted:
            return
        offsets = [run.kafka.TopicPartition(run.topic, *each) for each in wanted.items()]
        started = _now_us()
        committed: dict[int, bool] = {}
        try:
            answer = consumer.commit(offsets=offsets, asynchronous=False)
            committed = {each.partition: each.error is None for each in answer}
        except run.kafka.KafkaException:
            pass  # it may have taken effect
        ended = _now_us()
        for partition, offset in wanted.items():
            status = ACKED if committed.get(partition) else UNKNOWN
            self.recorder.commits.add(self.group, partition, offset, status, started, ended)
            if status == ACKED:
                positions = run.positions(self.group)
                positions[partition] = max(positions.get(partition, 0), offset)
            else:
                self._after[partition] = offset  # retry: at the log's end no later commit follows

    def _assigned(self, consumer: Any, partitions: list[Any]) -> None:
        run = self.run_of
        for each in partitions:
            self.begin_session(each.partition)
        started = _now_us()
        with contextlib.suppress(run.kafka.KafkaException):
            for each in consumer.committed(partitions, _REQUEST_SECONDS):
                if each.error is None:
                    offset = each.offset if each.offset >= 0 else NO_OFFSET
                    self.recorder.fetches.add(
                        self.group, each.partition, offset, started, _now_us()
                    )

    def _revoked(self, consumer: Any, partitions: list[Any]) -> None:
        self._commit(consumer)
        for each in partitions:
            self._after.pop(each.partition, None)

    def _lost(self, _consumer: Any, partitions: list[Any]) -> None:
        for each in partitions:
            self._after.pop(each.partition, None)


# ------------------------------------------------------------------------------ helpers


def _probe(bootstrap: str) -> None:
    """Raises `BrokerUnavailable` at once; librdkafka would retry silently for a long time."""
    failure: errors.SparklogError | None = None
    for address in bootstrap.split(","):
        if not is_address(address):
            reason = "expected host:port of a Kafka broker, or several separated by commas"
            raise errors.BadOption(option="bootstrap", value=bootstrap, reason=reason)
        reason = "it does not answer like Kafka; is this another port, or a listener with TLS?"
        try:
            (listener,) = listeners.parse(address)
            if kafka_port.answers(listener, timeout_seconds=_PROBE_SECONDS):
                return
        except TimeoutError:
            reason = f"silent for {_PROBE_SECONDS:g} s; it hangs, or this is not its Kafka port"
        except OSError as error:
            reason = f"{error.strerror or error}; start the broker, or correct the address"
        failure = errors.BrokerUnavailable(address=address, reason=reason)
    assert failure is not None
    raise failure


class _Counter:
    """Numbers that are unique across all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0

    def next(self) -> int:
        with self._lock:
            self._number += 1
            return self._number


def _now_us() -> int:
    return time.monotonic_ns() // 1000


def _patiently(kafka: Any, deadline: float, ask: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    while True:
        try:
            return ask()
        except kafka.KafkaException:
            if time.monotonic() > deadline:
                raise
        time.sleep(_LOOK_SECONDS)


def _reason(error: Any) -> str:
    first = error.args[0] if error.args else error
    return str(first.str() if hasattr(first, "str") else first)


def _library() -> Any:
    try:
        import confluent_kafka
    except ModuleNotFoundError as error:
        raise errors.NotInstalled(
            what="sparklog check",
            missing=error.name or str(error),
            hint="pip install 'sparklog[check]'",
        ) from error
    return confluent_kafka
