"""Clients of brokers: producers that retry, queries that stage, consumers, administrators.

Rules:

- A client knows only the answers it received. Without an answer it repeats the request, to any
  broker it finds, and its first request may still arrive there, or elsewhere, later.
- A request that was refused because the topic was recreated is given up: the fate of its records
  is unknown then, and its sender's name is not used again.
- Every error that a broker may answer is expected somewhere here. Any other is a violation.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sparklog import errors
from sparklog.broker.broker import Broker
from sparklog.broker.log.appends import AppendResult
from sparklog.broker.log.producer_state import ProducerSequence
from sparklog.broker.log.tailing import ReadBatch
from sparklog.client.connection import Backoff, Retry
from sparklog.formats import flight_messages, record_batch
from sparklog.formats.record import LOG_APPEND_TIME, OFFSET, TIMESTAMP
from sparklog.sinks import commit as commits
from sparklog.sinks import options
from sparklog.sinks.kept_offsets import covering
from sparklog.storage.objects import SyncFailed
from sparklog.storage.staging import manifest
from sparklog.storage.staging.manifest import STAGED_SECTION_ROWS
from tests.simulation import puts, scales
from tests.simulation.brokers import Call, SimulatedBroker
from tests.simulation.history import SOURCE, Place, Row, Value, ensure, is_at_source, rows_of
from tests.simulation.scheduler import Process
from tests.support.batches import Record, built, read, split

if TYPE_CHECKING:
    from tests.simulation.world import Machine, World

_GZIP = 1
Answer = errors.SparklogError | SyncFailed


class Client:
    """One that sends requests, on a machine that never fails."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.chance = world.chance
        self.process = Process(world.scheduler, name)
        self.finished = False

    def start(self, body: Callable[[], None]) -> None:
        def run() -> None:
            body()
            self.finished = True

        self.world.scheduler.spawn(self.process, "client", run)

    def ask(self, what: str, body: Callable[[Broker], Any]) -> tuple[Any, Answer | None]:
        """One request and its answer; `OutcomeUnknown` where none came."""
        call = self.send(what, body)
        return self.receive(call)

    def send(
        self, what: str, body: Callable[[Broker], Any], place: Place | None = None
    ) -> Call | None:
        """Sends a request, mostly to the leader of `place` where that is given."""
        broker = self.world.find_broker(place)
        if broker is None:
            self.process.clock.sleep(0.1)
            return None
        late_seconds = self.chance.random() ** 8 if self.world.faults.active else 0.0
        return broker.call(f"{what} for {self.name}", body, delay_seconds=late_seconds)

    def receive(self, call: Call | None) -> tuple[Any, Answer | None]:
        if call is None:
            return None, errors.BrokerUnavailable(address="anywhere", reason="none serves")
        patience_seconds = self.chance.choice([0.2, 1.0, 5.0])
        self.world.scheduler.wait(lambda: call.done or not call.broker.alive, patience_seconds)
        is_lost = self.world.faults.active and self.chance.random() < 0.03
        if not call.done or is_lost:
            return None, errors.OutcomeUnknown(what="request", reason="no answer")
        error = call.error
        if error is None:
            return call.result, None
        if isinstance(error, errors.SparklogError | SyncFailed):
            self.world.disk.note("refused", repr(error))
            if isinstance(error, errors.Corrupt) and self.world.explains(error):
                return None, errors.OutcomeUnknown(what="request", reason=str(error))
            return None, error
        raise error


# ------------------------------------------------------------------------------ producers


@dataclass(slots=True, kw_only=True)
class _Batch:
    """Records for one partition, sent until the answer is known."""

    topic: str
    place: Place
    producer_sequence: ProducerSequence | None
    payload: pa.RecordBatch | bytes
    """In columns, or as a batch of Kafka's."""
    values: list[bytes | None]
    keys: list[bytes | None]
    times_us: list[int | None]

    def rows(self, appended: AppendResult) -> list[Row]:
        found = []
        for value, key, time_us in zip(self.values, self.keys, self.times_us, strict=True):
            stamped = time_us is not None and appended.timestamp_type != LOG_APPEND_TIME
            told_us = time_us if stamped else appended.arrival_us
            # The answer to a duplicate does not name the rule of its times.
            found.append(Row(value, key, None if appended.duplicate else told_us))
        return found

    def send(self, world: World, core: Broker) -> AppendResult:
        is_deleted = world.is_deleted(self.place[0])
        topic_id = core.topics.describe(self.topic).topic_id
        if topic_id != self.place[0]:
            raise errors.TopicChanged(topic=self.topic, expected=self.place[0], found=topic_id)
        if isinstance(self.payload, bytes):
            pending = core.submit(core.prepare_kafka(self.topic, self.place[1], self.payload))
        else:
            pending = core.append(self.topic, self.place[1], self.payload, self.producer_sequence)
        submitted_at = world.scheduler.now
        (appended,) = core.wait(pending)
        world.puts.check_ack(self.place, submitted_at)
        # A member of a cluster may not have seen the deletion yet.
        is_late = is_deleted and not world.profile.is_cluster
        ensure(not is_late, f"{self.place}: acked long after the topic was deleted")
        return appended


class Producer(Client):
    """Writes to partitions of all topics, idempotent or not, some of them at the same time."""

    def __init__(self, world: World, name: str, *, idempotent: bool) -> None:
        super().__init__(world, name)
        self._idempotent = idempotent
        self._producer_id = -1
        self._sender = ""
        self._senders = 0
        self._sequences: dict[Place, int] = {}
        self._pending: dict[Place, _Batch] = {}
        self._acked: list[tuple[_Batch, AppendResult]] = []
        self.start(self._run)

    def _run(self) -> None:
        while not self.world.closing or self._pending:
            if not self._sender and not self._become_somebody():
                continue
            if not self.world.closing and len(self._pending) < 3:
                self._prepare_some()
            self._send_pending()
            if self._acked and self.chance.random() < 0.15:
                self._repeat(*self.chance.choice(self._acked[-3:]))
            self.process.clock.sleep(self.chance.choice([0.0, 0.05, 0.2]))

    def _become_somebody(self) -> bool:
        """A new sender's name, and of an idempotent producer a new id."""
        if self._idempotent:
            found, error = self.ask("new producer", lambda core: core.producer_ids.new())
            if error is not None:
                return False
            ensure(found.producer_id not in self.world.producer_ids, f"{found} was given twice")
            self.world.producer_ids.add(found.producer_id)
            self._producer_id = found.producer_id
        self._senders += 1
        self._sender = f"{self.name}.{self._senders}"
        self._sequences.clear()
        self._acked.clear()
        return True

    def _prepare_some(self) -> None:
        name = self.chance.choice(self.world.topic_names)
        info, error = self.ask("describe", lambda core: core.topics.describe(name))
        if error is not None:
            return
        count = self.chance.randint(1, min(3, len(info.partitions)))
        for each in self.chance.sample(info.partitions, count):
            place = info.topic_id, each.partition
            if place not in self._pending:
                is_heavy = self.world.profile.is_heavy and self.chance.random() < 0.4
                make = self._heavy_batch if is_heavy else self._batch
                self._pending[place] = make(name, place)
                if is_heavy and self.chance.random() < 0.3:
                    self._send_too_much(self._pending[place])

    def _batch(self, topic: str, place: Place) -> _Batch:
        count = self.chance.choice([1, 1, 2, 5])
        first = self._sequences.get(place, 0)
        self._sequences[place] = first + count
        given = [
            Value(
                topic_id=place[0],
                sender=self._sender,
                partition=place[1],
                sequence=first + index,
                nonce=self.world.nonce(),
            )
            for index in range(count)
        ]
        values = [self.world.encode(topic, each) for each in given]
        keys: list[bytes | None] = [self.chance.choice([b"a", b"b", None]) for _ in values]
        for index, value in enumerate(values):
            if value is None:
                keys[index] = given[index].encode()
        moments = [None, self.world.scheduler.clock.now_us() - self.chance.randint(0, 10**9)]
        times_us = [self.chance.choice(moments) for _ in values]
        columns: dict[str, pa.Array] = {"value": pa.array(values, pa.binary())}
        if any(key is not None for key in keys):
            columns["key"] = pa.array(keys, pa.binary())
        if any(time is not None for time in times_us):
            columns["timestamp"] = pa.array(times_us, pa.int64()).cast(TIMESTAMP)
        producer_sequence = (
            ProducerSequence(self._producer_id, 0, first) if self._idempotent else None
        )
        return _Batch(
            topic=topic,
            place=place,
            producer_sequence=producer_sequence,
            payload=pa.record_batch(columns),
            values=values,
            keys=keys,
            times_us=times_us,
        )

    def _heavy_batch(self, topic: str, place: Place) -> _Batch:
        """A batch within the broker's limit: some hundred bytes that decode to many more."""
        batch = self._batch(topic, place)
        producer_sequence = batch.producer_sequence
        padding = b"|" + b"0" * self.chance.choice([1_000, 3_000, 7_000])
        time_ms = self.world.scheduler.clock.now_us() // 1_000 - self.chance.randint(0, 10**6)
        batch.values = [(value or b"") + padding for value in batch.values]
        batch.times_us = [time_ms * 1_000 for _ in batch.values]
        known = {}
        if producer_sequence is not None:
            known = {
                "producer_id": producer_sequence.producer_id,
                "producer_epoch": producer_sequence.epoch,
                "base_sequence": producer_sequence.base_sequence,
            }
        records = [
            Record(time_ms, key, value) for key, value in zip(batch.keys, batch.values, strict=True)
        ]
        batch.payload = built(records, codec=_GZIP, **known)
        return batch

    def _send_too_much(self, batch: _Batch) -> None:
        """One that is as small, and decodes to more than the broker may take."""
        (value, *_), (topic_id, partition) = batch.values, batch.place
        time_ms = (batch.times_us[0] or 0) // 1_000
        record = Record(time_ms, None, (value or b"") + b"0" * scales.MAX_BATCH_BYTES)
        data = built([record], codec=_GZIP)

        def send(core: Broker) -> list[AppendResult]:
            return core.wait(core.submit(core.prepare_kafka(batch.topic, partition, data)))

        _, error = self.ask("append too much", send)
        ensure(error is not None, f"{self.name}: {topic_id}-{partition} takes any size")

    def _append(self, batch: _Batch) -> Callable[[Broker], AppendResult]:
        return lambda core: batch.send(self.world, core)

    def _send_pending(self) -> None:
        batches = list(self._pending.values())
        calls = [self.send("append", self._append(batch), batch.place) for batch in batches]
        for batch, call in zip(batches, calls, strict=True):
            appended, error = self.receive(call)
            if error is None:
                self._accept(batch, appended)
                del self._pending[batch.place]
            elif call is not None and self._is_given_up(call.broker, batch, error):
                # Its outcome is unknown, so no later batch may continue its sequence.
                del self._pending[batch.place]
                self._sender = ""
        if not self._sender:
            self._pending.clear()

    def _accept(self, batch: _Batch, appended: AppendResult) -> None:
        rows = batch.rows(appended)
        self.world.disk.note("acked", *batch.place, appended.base_offset, len(rows))
        self.world.history.ack(self.name, batch.place, appended.base_offset, rows)
        if self._idempotent:
            self._acked.append((batch, appended))

    def _is_given_up(self, broker: SimulatedBroker, batch: _Batch, error: Answer) -> bool:
        # One that was replaced and does not know it yet finds out before it says so.
        refused = isinstance(error, errors.OutOfOrderSequence | errors.ProducerFenced)
        ensure(not refused, f"{self.name}: {error}")
        is_elsewhere = isinstance(error, errors.UnknownTopic | errors.UnknownPartition)
        if is_elsewhere and self.world.may_know_less(broker, batch.place[0]):
            return False
        expected = (errors.Retriable, errors.OutcomeUnknown, errors.Fenced, SyncFailed)
        if isinstance(error, expected):
            return not self._idempotent
        gone = errors.UnknownTopic | errors.TopicChanged
        if self.world.profile.is_cluster:
            # A member that is slow may hear of the topic's deletion before it hears of a partition.
            gone |= errors.UnknownPartition
        ensure(isinstance(error, gone), f"{self.name}: {batch.place}: {error!r}")
        return True

    def _repeat(self, batch: _Batch, before: AppendResult) -> None:
        """Sends a batch again that is already appended."""
        again, error = self.ask("append again", self._append(batch))
        if error is None:
            what = f"{self.name}: {batch.values[0]!r} is at {before.base_offset} and {again}"
            ensure(again.duplicate and again.base_offset == before.base_offset, what)


# ------------------------------------------------------------------------------ queries

_EVERY_LARGE = 4
_LARGE_ROWS = 25
"""Rows per partition in each of two tasks, each row a section: publishing them takes seconds."""

_Ranges = Mapping[str, Mapping[int, tuple[int, int]]]
"""First offset and count, by topic and partition."""


class Query(Client):
    """Stages one batch after another and has each appended, as Spark's sink does.

    A query with an `original` runs with a copy of its checkpoint, which may be slightly old. For
    another topic it is another query. For the same topic both write the same batches: each exists
    once, and the slower of two drivers is refused.
    """

    def __init__(
        self, world: World, name: str, topic: str, *, original: Query | None = None
    ) -> None:
        super().__init__(world, name)
        self._topic = topic
        self._checkpoint: str = original._checkpoint if original is not None else name
        self._query = options.to_topic(self._checkpoint, topic)
        self._sender = f"{self._checkpoint}@{topic}"
        self._batch = 0
        self._contents: dict[tuple[str, int], list[Row]] = {}
        """The rows of every section ever staged, by its place."""
        self._adopted: list[tuple[manifest.Manifest, flight_messages.AppendStagedReply]] = []
        self._staged_for = ""
        """Id of the topic that there was when the last batch was staged."""
        self._is_shared = False
        """Returns true if another driver writes the same batches."""
        self._may_be_copied = original is None and bool(world.profile.clone)
        self.is_refused = False
        if original is not None:
            self._batch = max(original._batch - self.chance.randint(0, 2), 0)
            self._contents = original._contents
            self._is_shared = original._is_shared = topic == original._topic
            world.disk.note("copied", self.name, topic, self._batch)
        self.start(self._run)

    def _run(self) -> None:
        decision = None
        # A batch that seems to have failed may be decided; the driver that decides completes it.
        while not self.is_refused and (not self.world.closing or decision is None):
            decision = self._decide(self._batch)
            if isinstance(decision, manifest.Manifest):
                if not self._write(decision):
                    decision = None
                    continue
                self._batch += 1
            elif self.world.closing and self._topic_id() is None:
                return  # no client creates the topic again
            if self._may_be_copied and self._adopted and self.chance.random() < 0.5:
                self._may_be_copied = False
                self.world.copy(self)
            if self._adopted and self.chance.random() < 0.2:
                self._run_again(*self.chance.choice(self._adopted[-3:]))
            self.process.clock.sleep(self.chance.choice([0.0, 0.3]))

    def _write(self, decision: manifest.Manifest) -> bool:
        """Has the batch appended; false if that is refused, or its topic is gone."""
        topic_id = self._staged_for
        adopted = self._drive(decision)
        if adopted is None:
            return False
        self._adopted.append((decision, adopted))
        rows = Counter[int]()
        for each in decision.sections:
            rows[each.partition] += each.rows
        self.world.written[topic_id, self._sender, decision.batch] = rows
        return True

    def _topic_id(self) -> str | None:
        known = self.world.metadata().topics.get(self._topic)
        return None if known is None else known.topic_id

    def _is_gone(self, decision: manifest.Manifest) -> bool:
        """Returns true if the topic that the batch was staged for was deleted."""
        return self._topic_id() != decision.topic_ids[self._topic]

    def _decide(self, batch: int) -> manifest.Manifest | errors.BadRequest | None:
        """Stages the batch. Returns the manifest that won, the refusal, or None after a fault."""
        machine = self.world.machine(f"{self.name}-{batch}")
        decided: list[manifest.Manifest | errors.BadRequest] = []

        def body() -> None:
            try:
                topics = manifest.destinations(self.world.metadata().topics)
                topic = topics.get(self._topic)
                if topic is None:
                    return
                self._staged_for = topic.topic_id
                attempt = manifest.open_attempt(machine.store, self._query, batch, topics)
                staging = self.world.nonce()
                sections = [
                    section
                    for task in (0, 1)
                    for section in self._stage(
                        machine, batch, task, attempt, staging, topic.partitions
                    )
                ]
                wanted = manifest.Manifest(
                    query=self._query,
                    batch=batch,
                    sections=tuple(sections),
                    attempt=attempt,
                    topic_ids={self._topic: topic.topic_id},
                )
                found = manifest.write(machine.store, wanted, machine.clock)
                commits._check_topics(wanted, {each.topic for each in found.sections})
                decided.append(found)
            except errors.BadRequest as error:
                decided.append(error)
            except (errors.Retriable, errors.OutcomeUnknown, SyncFailed) as error:
                self.world.disk.note("not staged", str(error))

        task = self.world.scheduler.spawn(machine.process, "stage", body)
        self.world.scheduler.wait(lambda: task.done or not machine.process.alive)
        return decided[0] if decided else None

    def _stage(
        self,
        machine: Machine,
        batch: int,
        task: int,
        attempt: int,
        staging: int,
        partitions: int,
    ) -> list[manifest.Section]:
        """One task's share: the same counts each time, in partitions that exist; new values."""
        shape = random.Random(f"{self._checkpoint} {batch} {task}")
        is_large = self.world.profile.has_large_batches and batch % _EVERY_LARGE == 1
        counts = [_LARGE_ROWS] if is_large else [0, 1, 3]
        writer = manifest.StagingWriter(
            machine.store,
            query=self._query,
            batch=batch,
            clock=machine.clock,
            attempt=attempt,
            section_rows=1 if is_large else STAGED_SECTION_ROWS,
        )
        rows: dict[int, list[Row]] = {}
        for partition in range(min(partitions, 2)):
            rows[partition] = [self._row(partition, batch) for _ in range(shape.choice(counts))]
            for row in rows[partition]:
                self.world.stagings[row.identity] = staging
            if rows[partition]:
                writer.add(self._topic, partition, _payload(rows[partition], shape))
        sections = writer.finish()
        taken = dict.fromkeys(rows, 0)
        for section in sections:
            first = taken[section.partition]
            taken[section.partition] = end = first + section.rows
            self._contents[section.path, section.start] = rows[section.partition][first:end]
        return sections

    def _row(self, partition: int, batch: int) -> Row:
        nonce = self.world.nonce()
        value = Value(
            topic_id="", sender=self._sender, partition=partition, sequence=nonce, nonce=batch
        )
        # The rule of its time is unknown.
        return Row(self.world.encode(self._topic, value) or value.encode(), None, None)

    def _drive(self, decision: manifest.Manifest) -> flight_messages.AppendStagedReply | None:
        """Has the staged batch appended, retrying as needed. Returns None if it is refused."""
        while (adopted := self._try_to_adopt(decision)) is None:
            if self.is_refused or self._is_gone(decision):
                return None
        topic_id = decision.topic_ids[self._topic]
        ranges = adopted.ranges.get(self._topic, {})
        if not self.world.profile.is_cluster:  # several leaders commit one after another
            self.world.history.adopted(f"{self._query} {decision.batch}", topic_id, ranges)
        if adopted.skipped and self._is_shared:
            return adopted  # the rows may be those of the other driver
        for partition, (first, count) in ranges.items():
            rows = [
                row
                for each in decision.sections
                if each.partition == partition
                for row in self._contents[each.path, each.start]
            ]
            ensure(len(rows) == count, f"{decision.path}: {count} rows of {len(rows)}")
            self.world.disk.note("adopted", topic_id, partition, first, count)
            self.world.history.ack(self.name, (topic_id, partition), first, rows)
        return adopted

    @property
    def sender(self) -> str:
        """Results of all drivers of the query, by batch."""
        return self._sender

    def _try_to_adopt(
        self, decision: manifest.Manifest, *, may_be_refused: bool = False
    ) -> flight_messages.AppendStagedReply | None:
        """The answer, or None where there was none. A batch without rows needs no append."""
        if not decision.sections:
            return flight_messages.AppendStagedReply(ranges={}, skipped=True)
        if self.world.profile.is_cluster:
            return self._adopt_everywhere(decision, may_be_refused=may_be_refused)
        call = self.send("adopt", lambda core: self._adopt(core, decision))
        answer, error = self.receive(call)
        if isinstance(error, errors.Invalid | errors.Corrupt):
            # A replaced broker does not know which batches its successor has appended and swept.
            is_old = call is not None and self.world.is_replaced(call.broker)
            is_late = self._is_shared and isinstance(error, errors.BadRequest)
            if is_late and not is_old and not may_be_refused:
                self.is_refused = True
            may_be_refused |= self._is_shared or self._is_gone(decision)
            ensure(is_old or may_be_refused, f"{decision.path} is refused: {error!r}")
            if is_old:  # it answers at once, and would forever if no time passed
                self.process.clock.sleep(0.05)
        return answer

    def _adopt(
        self, core: Broker, decision: manifest.Manifest
    ) -> flight_messages.AppendStagedReply:
        return core.staged.append(flight_messages.AppendStaged(manifest=decision.path))

    def _adopt_everywhere(
        self, decision: manifest.Manifest, *, may_be_refused: bool
    ) -> flight_messages.AppendStagedReply | None:
        """As `commit` does: asks all leaders, and puts a receipt."""
        machine = self.world.machine(f"{self.name}-{decision.batch} driver")
        done: list[flight_messages.AppendStagedReply] = []
        refusals: list[errors.BadRequest] = []

        def body() -> None:
            try:
                receipt = manifest.find_receipt(machine.store, decision)
                if receipt is not None:
                    skipped = flight_messages.AppendStagedReply(ranges=receipt.ranges, skipped=True)
                    done.append(skipped)
                    return
                reply = commits.append_everywhere(
                    _Leaders(self, machine),  # type: ignore[arg-type]
                    decision.path,
                )
                if reply.topic_ids:
                    receipt = manifest.Receipt(ranges=reply.ranges, topic_ids=reply.topic_ids)
                    receipt.put(machine.store, decision, machine.clock)
                done.append(reply)
            except (errors.Retriable, errors.OutcomeUnknown, errors.Fenced, SyncFailed) as error:
                self.world.disk.note("not appended", str(error))
            except errors.UnknownTopic as error:  # a member may not have seen that it was created
                self.world.disk.note("not appended", str(error))
            except errors.BadRequest as error:
                self.world.disk.note("refused", str(error))
                refusals.append(error)

        task = self.world.scheduler.spawn(machine.process, "append", body)
        self.world.scheduler.wait(lambda: task.done or not machine.process.alive)
        may_be_refused |= self._is_gone(decision)
        ensure(may_be_refused or not refusals, f"{decision.path} is refused: {refusals}")
        return done[0] if done else None

    def _run_again(
        self, earlier: manifest.Manifest, before: flight_messages.AppendStagedReply
    ) -> None:
        """A driver that died after the commit, or with an old checkpoint, runs the batch again.

        The newest batch of a query is always known, and where it is as long as that is remembered.
        """
        decision = self._decide(earlier.batch)
        if not isinstance(decision, manifest.Manifest):
            return
        is_newest = earlier.batch == self._adopted[-1][0].batch and not self._is_shared
        if self._staged_for != earlier.topic_ids[self._topic]:
            if is_newest:  # nothing of the query is in the topic that was created again
                self._write(decision)
            return
        again = self._try_to_adopt(decision, may_be_refused=not is_newest)
        if again is not None and not self._is_gone(earlier):
            what = f"{decision.path} was appended as {before} and again as {again}"
            is_skipped = again.skipped or not again.ranges
            ensure(is_skipped and _is_within(again.ranges, before.ranges), what)


class _Leaders:
    """The connection of a driver to the members of a cluster, as far as `commit` uses it."""

    def __init__(self, query: Query, machine: Machine) -> None:
        self._query = query
        self._machine = machine

    def retry(self, seconds: float) -> Retry:
        return Retry(self._machine.clock, min(seconds, 5.0), Backoff(jitter=lambda: 0.5))

    def attempt(
        self,
        _name: str,
        request: flight_messages.AppendStaged,
        *,
        timeout_seconds: float,
        broker: int = -1,
    ) -> flight_messages.AppendStagedReply:
        del timeout_seconds
        member = self._query.world.find_member(broker)
        call = None
        if member is not None:
            call = member.call("adopt", lambda core: core.staged.append(request))
        answer, error = self._query.receive(call)
        if error is not None:
            raise error
        assert isinstance(answer, flight_messages.AppendStagedReply)
        return answer

    action = attempt

    def brokers(self) -> list[int]:
        return []


class Mirror(Client):
    """Copies a source to a topic with its offsets, as the job does: the topic is its only state.

    After any failure it looks where the partitions end and continues there. A write that seemed to
    fail may have been appended meanwhile, or may be later; then one of the two is refused.
    """

    def __init__(self, world: World, name: str, topic: str) -> None:
        super().__init__(world, name)
        self._topic = topic
        self._batch = 0
        self.start(self._run)

    def _run(self) -> None:
        is_done = False
        while not self.world.closing or not is_done:
            is_done = self._copy()
            self._batch += 1
            self.process.clock.sleep(self.chance.choice([0.0, 0.3]))

    def _copy(self) -> bool:
        """Copies the next offsets of each partition. Returns whether the answer says so."""
        info, _ = self.ask("look", lambda core: core.topics.describe(self._topic))
        if info is None:
            return False
        ranges = {
            each.partition: (each.end, each.end + self.chance.choice([0, 1, 7, 40]))
            for each in info.partitions
        }
        ranges = {number: each for number, each in ranges.items() if each[0] < each[1]}
        decision = self._decide(ranges) if ranges else None
        if decision is None:
            return False
        request = flight_messages.AppendStaged(manifest=decision.path)
        call = self.send("mirror", lambda core: core.staged.append(request))
        answer, error = self.receive(call)
        if isinstance(error, errors.Invalid | errors.Corrupt):
            assert call is not None
            is_late = isinstance(error, errors.OffsetsDoNotContinue)
            is_old = self.world.is_replaced(call.broker)
            ensure(is_late or is_old, f"{decision.path} is refused: {error!r}")
        if answer is None:
            return False
        for number, (first, end) in ranges.items():
            place = info.topic_id, number
            rows = {at: self._row(number, at) for at in self._at_source(number, first, end)}
            self.world.disk.note("mirrored", *place, first, end)
            self.world.history.mirrored(self.name, place, rows, end)
        return True

    def _decide(self, ranges: Mapping[int, tuple[int, int]]) -> manifest.Manifest | None:
        """Stages the rows, a task for each partition or two, and puts the manifest."""
        machine = self.world.machine(f"{self.name}-{self._batch}")
        decided: list[manifest.Manifest] = []

        def body() -> None:
            try:
                sections = [
                    section
                    for number, (first, end) in ranges.items()
                    for half in (((first + end) // 2, end), (first, (first + end) // 2))
                    for section in self._stage(machine, number, *half)
                ]
                wanted = manifest.Manifest(
                    query=self.name,
                    batch=self._batch,
                    sections=tuple(covering(sections, {self._topic: ranges})),
                )
                decided.append(manifest.write(machine.store, wanted, machine.clock))
            except (errors.SparklogError, SyncFailed) as error:
                self.world.disk.note("not staged", str(error))

        task = self.world.scheduler.spawn(machine.process, "stage", body)
        self.world.scheduler.wait(lambda: task.done or not machine.process.alive)
        return decided[0] if decided else None

    def _stage(
        self, machine: Machine, partition: int, first: int, end: int
    ) -> list[manifest.Section]:
        offsets = self._at_source(partition, first, end)
        writer = manifest.StagingWriter(
            machine.store, query=self.name, batch=self._batch, clock=machine.clock, section_rows=8
        )
        if offsets:
            values = [self._row(partition, offset).value for offset in offsets]
            columns = {"value": pa.array(values, pa.binary())}
            rows = pa.record_batch(columns).append_column(OFFSET, pa.array(offsets, OFFSET.type))
            writer.add(self._topic, partition, rows)
        return writer.finish()

    def _at_source(self, partition: int, first: int, end: int) -> list[int]:
        return [offset for offset in range(first, end) if is_at_source(partition, offset)]

    def _row(self, partition: int, offset: int) -> Row:
        value = Value(topic_id="", sender=SOURCE, partition=partition, sequence=offset, nonce=0)
        return Row(value.encode(), None, None)


def _is_within(part: _Ranges, whole: _Ranges) -> bool:
    """Returns true if both answers agree on every partition that both name."""
    return all(
        whole.get(topic, {}).get(partition) == place
        for topic, places in part.items()
        for partition, place in places.items()
    )


def _payload(rows: list[Row], chance: random.Random) -> pa.RecordBatch:
    columns = {"value": pa.array([row.value for row in rows], pa.binary())}
    if chance.random() < 0.5:
        times_us = [chance.choice([None, 1_600_000_000_000_000]) for _ in rows]
        columns["timestamp"] = pa.array(times_us, pa.int64()).cast(TIMESTAMP)
    return pa.record_batch(columns)


# ------------------------------------------------------------------------------ consumers


class Consumer(Client):
    """Reads what brokers tell: from memory, log or table, by ranges or as it comes."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._positions: dict[Place, int] = {}
        self.start(self._run)

    def _run(self) -> None:
        while not self.world.closing:
            name = self.chance.choice(self.world.read_names)
            way = self.chance.choice([self._read, self._read, self._fetch, self._tail])
            call = self.send(f"read {name}", functools.partial(way, name))
            _, error = self.receive(call)
            if isinstance(error, errors.Corrupt) and call is not None:
                ensure(self.world.is_replaced(call.broker), repr(error))
            self.process.clock.sleep(self.chance.choice([0.02, 0.3]))

    def _read(self, name: str, core: Broker) -> None:
        """One partition, from where we are to its end."""
        info = self._describe(name, core)
        each = self.chance.choice(info.partitions)
        start = self._positions.get((info.topic_id, each.partition), each.start)
        if self.chance.random() < 0.2:
            start = each.start
        if start > each.end:
            return  # a broker that was replaced, and knows less than we
        position = start
        try:
            for batch in core.read(name, each.partition, start, each.end, topic_id=info.topic_id):
                position = self._take(info.topic_id, batch, position)
        except errors.OffsetOutOfRange as error:
            self._was_deleted(info, each.partition, position, error)
            return
        ensure(
            position == each.end and start >= each.start,
            f"{self.name}: {name} is read from {start} to {position}, of {each}",
        )

    def _describe(self, name: str, core: Broker) -> flight_messages.TopicInfo:
        """Members of the group as the broker describes it."""
        info = core.topics.describe(name)
        current = self.world.scheduler.current
        assert current is not None
        self.world.broker_of(current.process).check_starts(self.name, info)
        return info

    def _was_deleted(
        self,
        info: flight_messages.TopicInfo,
        partition: int,
        at: int,
        error: errors.OffsetOutOfRange,
    ) -> None:
        """Continues at the log start offset if it has moved past our position."""
        place = info.topic_id, partition
        ensure(error.partition == partition, f"{self.name}: {place}: {error}")
        ensure(at < error.start, f"{self.name}: {place} at {at} is refused: {error}")
        self._positions[place] = error.start

    def _tail(self, name: str, core: Broker) -> None:
        """All partitions, for some batches or some silence."""
        info = self._describe(name, core)
        led = [each for each in info.partitions if each.end >= 0]
        positions = {
            each.partition: self._positions.get((info.topic_id, each.partition), each.start)
            for each in led
        }
        if not led or any(positions[each.partition] > each.end for each in led):
            return
        asked = [
            flight_messages.TailPosition(
                topic=name, partition=number, offset=offset, topic_id=info.topic_id
            )
            for number, offset in positions.items()
        ]
        try:
            tail = core.tail(asked, batch_rows=3)
        except errors.OffsetOutOfRange as error:
            self._was_deleted(info, error.partition, positions[error.partition], error)
            return
        try:
            for batch in itertools.islice(tail, 4):
                if batch is None:
                    self.process.clock.sleep(0.2)
                else:
                    start = positions[batch.partition]
                    positions[batch.partition] = self._take(info.topic_id, batch, start)
        except errors.OffsetOutOfRange as error:
            self._was_deleted(info, error.partition, positions[error.partition], error)
        finally:
            tail.close()

    def _take(self, topic_id: str, batch: ReadBatch, start: int) -> int:
        """Checks a batch that is to begin at `start`; its end."""
        return self._saw((topic_id, batch.partition), list(rows_of(batch.rows)), start, batch.end)

    def _saw(self, place: Place, found: list[tuple[int, Row]], start: int, end: int) -> int:
        offsets = [offset for offset, _ in found]
        expected = self.world.history.offsets(place, start, end)
        ensure(offsets == expected, f"{self.name}: {place} gives {offsets} for {expected}")
        self.world.history.saw(self.name, place, found)
        self._positions[place] = max(self._positions.get(place, 0), end)
        return end

    def _fetch(self, name: str, core: Broker) -> None:
        """As Kafka's consumers do, some bytes at a time; they find what begins before, too."""
        info = self._describe(name, core)
        each = self.chance.choice(info.partitions)
        start = self._positions.get((info.topic_id, each.partition), each.start)
        while start < each.end:
            limit_bytes = self.chance.choice([1, 200, 2_000])
            try:
                found = core.fetch_kafka(name, each.partition, start, limit_bytes=limit_bytes)
            except errors.OffsetOutOfRange as error:
                self._was_deleted(info, each.partition, start, error)
                return
            if core.topics.describe(name).topic_id != info.topic_id:
                return  # the answer may be of the recreated topic
            ensure(
                found is not None and len(found.pieces) > 0,
                f"{self.name}: nothing of {each} is found at {start}",
            )
            assert found is not None
            rows = [row for batch in split(found.pieces) for row in _rows_of_kafka(batch)]
            wanted = [row for row in rows if row[0] >= start]
            start = self._saw((info.topic_id, each.partition), wanted, start, found.end)


def _rows_of_kafka(batch: bytes) -> list[tuple[int, Row]]:
    """Their times are cut to milliseconds, so they tell none."""
    header = record_batch.read_header(batch)
    if header.next_offset - header.base_offset != header.record_count:
        return [(offset, Row(each.value, each.key, None)) for offset, each in read(batch)]
    rows = record_batch.decode(batch)
    keys = rows["key"].to_pylist() if "key" in rows.schema.names else [None] * rows.num_rows
    offsets = itertools.count(header.base_offset)
    return [
        (offset, Row(value, key, None))
        for offset, value, key in zip(offsets, rows["value"].to_pylist(), keys, strict=False)
    ]


# ------------------------------------------------------------------------------ administrators


class Administrator(Client):
    """Creates, changes and deletes topics and records, and asks for tables to be compacted."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.start(self._run)

    def _run(self) -> None:
        while not self.world.closing:
            self.process.clock.sleep(self.chance.uniform(0.1, 1.5))
            name = self.chance.choice(self.world.topic_names)
            if name in self.world.mortal_topics and self.chance.random() < 0.3:
                call = self.send(f"delete {name}", self._delete(name))
                if call is not None:
                    self.world.deletions.append(call)
            elif self.chance.random() < 0.4:
                call = self.send(f"delete records of {name}", self._delete_records(name))
            else:
                call = self.send(f"change {name}", self._change(name))
            _, error = self.receive(call)
            ensure(not isinstance(error, errors.Corrupt), repr(error))

    def _delete(self, name: str) -> Callable[[Broker], Any]:
        return lambda core: core.topics.delete(name)

    def _delete_records(self, name: str) -> Callable[[Broker], Any]:
        """Deletes records of some partitions, up to a random existing offset."""

        def delete(core: Broker) -> None:
            history, info = self.world.history, core.topics.describe(name)
            acked = dict(history.acked)
            led = [each for each in info.partitions if each.end >= 0]
            if not led:
                return
            count = self.chance.randint(1, len(led))
            offsets = {}
            for each in self.chance.sample(led, count):
                any_offset = self.chance.randint(each.start, each.end)
                offsets[each.partition] = self.chance.choice([-1, 0, any_offset, any_offset])
                history.wish(name, each.partition, offsets[each.partition])
            try:
                request = flight_messages.DeleteRecords(
                    topic=name, offsets=offsets, timeout_seconds=2.0
                )
                starts = core.deletion.delete(request).starts
            except errors.OffsetOutOfRange as error:
                ensure(
                    core.topics.describe(name).topic_id != info.topic_id, f"{self.name}: {error}"
                )
                return
            if core.topics.describe(name).topic_id != info.topic_id:
                return  # another's records may have gone
            current = self.world.scheduler.current
            assert current is not None
            broker = self.world.broker_of(current.process)
            for partition, start in starts.items():
                place = info.topic_id, partition
                asked = offsets[partition]
                if asked == -1 and not self.world.is_replaced(broker):
                    asked = acked.get(place, 0)
                what = f"{place} starts at {start}, after deletion to {asked}"
                ensure(start >= asked, f"{self.name}: {what}")
                self.world.disk.note("deleted", *place, start)
                history.deleted(place, start)
                broker.starts[place] = max(broker.starts.get(place, 0), start)

        return delete

    def _change(self, name: str) -> Callable[[Broker], Any]:
        """Any change but the last."""
        few, more = self.chance.randint(1, 3), self.chance.randint(2, puts.MOST_PARTITIONS)
        config: dict[str, str | None] = {
            "message.timestamp.type": self.chance.choice([None, "CreateTime", "LogAppendTime"])
        }
        if self.chance.random() < 0.3:
            config["retention.ms"] = self.chance.choice([None, "300", "2000"])
            config["retention.bytes"] = self.chance.choice([None, "1", "3000"])
            if config["retention.ms"] or config["retention.bytes"]:
                self.world.history.keeps_nothing(name)
        columns = self.world.columns.draw_change(name)
        if columns is not None:
            return lambda core: core.topics.alter(
                flight_messages.AlterTopic(topic=name, config=columns)
            )
        typed = self.world.columns.config_of(name)
        changes: list[Callable[[Broker], Any]] = [
            lambda core: core.topics.create(
                flight_messages.CreateTopic(topic=name, partitions=few, config=typed)
            ),
            lambda core: core.topics.add_partitions(
                flight_messages.AddPartitions(topic=name, partitions=more)
            ),
            lambda core: core.topics.alter(flight_messages.AlterTopic(topic=name, config=config)),
            lambda core: core.topics.compact(name),
        ]
        return self.chance.choice(changes)
