"""The batches of one topic until they are complete and their callbacks have run.

Guarded by the sender's lock.
"""

from __future__ import annotations

from collections.abc import Iterable

from sparklog import errors
from sparklog.client.producer.batch import Callback, PartitionBatch, ProducerBatch
from sparklog.client.producer.buffer_pool import BufferPool
from sparklog.formats import flight_messages


class Deliveries:
    """Counts the open parts of each batch, wakes waiting threads, and releases memory."""

    def __init__(self, topic: str, pool: BufferPool) -> None:
        self._topic = topic
        self._pool = pool
        self._undecided: dict[ProducerBatch, None] = {}
        """In order of `add`; a dict serves as an ordered set."""
        self._sealed: list[ProducerBatch] = []
        """Batches that have not been split yet."""
        self._callbacks: list[tuple[ProducerBatch, list[Callback]]] = []
        self.acked_records = 0
        self.acked_bytes = 0
        self.acked_batches = 0
        self.failed_records = 0

    def __bool__(self) -> bool:
        return bool(self._undecided)

    def __len__(self) -> int:
        return len(self._undecided)

    @property
    def batches(self) -> list[ProducerBatch]:
        return list(self._undecided)

    @property
    def has_sealed(self) -> bool:
        return bool(self._sealed)

    @property
    def has_callbacks(self) -> bool:
        return bool(self._callbacks)

    def add(self, batch: ProducerBatch) -> None:
        self._undecided[batch] = None

    def seal(self, batch: ProducerBatch) -> None:
        """Closes a batch to further records, and queues it to be split."""
        batch.seal()
        self._pool.take(batch.cost_bytes)
        self._sealed.append(batch)

    def take_sealed(self) -> list[ProducerBatch]:
        """Returns the batches to split."""
        batches, self._sealed = self._sealed, []
        return batches

    def take_callbacks(self) -> list[tuple[ProducerBatch, list[Callback]]]:
        """Returns the callbacks to run; the caller then calls `called_back` for each batch."""
        callbacks, self._callbacks = self._callbacks, []
        return callbacks

    def called_back(self, batch: ProducerBatch) -> None:
        batch.open_calls -= 1
        self._finish(batch)

    def decide(
        self,
        decided: Iterable[tuple[PartitionBatch, errors.SparklogError | None]],
        reply: flight_messages.AppendReply | None = None,
    ) -> None:
        """Fails the parts that have a failure, and completes the others with `reply`."""
        for part, failure in decided:
            if failure is not None:
                self.fail(part, failure)
            elif reply is not None:
                self.succeed(part, reply)

    def succeed(self, part: PartitionBatch, reply: flight_messages.AppendReply) -> None:
        self.acked_records += part.count
        # By its share of the rows: summing up the buffers of a part would cost more than the ack.
        self.acked_bytes += part.batch.bytes * part.count // max(part.batch.count, 1)
        self.acked_batches += 1
        part.succeed(reply)
        self._decided(part)

    def fail(self, part: PartitionBatch, failure: errors.SparklogError) -> None:
        self.failed_records += part.count
        part.fail(failure)
        self._decided(part)

    def fail_unsplit(self, batch: ProducerBatch, failure: errors.SparklogError) -> None:
        """Fails a batch that has not been split into parts yet."""
        self.failed_records += batch.count
        self._decided(batch.fail_unsplit(failure))

    def fail_late_unsplit(self, now: float, failure: errors.SparklogError) -> None:
        """Fails the sealed batches that were not split by their deadline."""
        for batch in self.batches:
            if batch.deadline <= now and batch.is_sealed and batch.parts is None:
                self.fail_unsplit(batch, failure)
        self._sealed = [batch for batch in self._sealed if not batch.is_done()]

    def fail_all(self, reason: errors.SparklogError) -> None:
        """Fails every batch; the outcome of a part that was sent is unknown."""
        self._sealed.clear()
        for batch in self.batches:
            if batch.parts is None:
                self.fail_unsplit(batch, reason)
                continue
            for part in [each for each in batch.parts.values() if not each.done]:
                failure = reason
                if part.sequence >= 0:  # it was sent
                    what = f"{part.count} records to {self._topic}-{part.partition}"
                    failure = errors.OutcomeUnknown(what=what, reason=str(reason))
                self.fail(part, failure)

    def _decided(self, part: PartitionBatch) -> None:
        batch = part.batch
        batch.open_parts -= 1
        callbacks = batch.take_callbacks(part)
        if callbacks:
            batch.open_calls += 1
            self._callbacks.append((batch, callbacks))
        if batch.open_parts == 0:
            self._pool.give_back(batch.cost_bytes)
        self._finish(batch)

    def _finish(self, batch: ProducerBatch) -> None:
        if batch.is_finished():
            self._undecided.pop(batch, None)
        waiters, batch.waiters = batch.waiters, []
        for waiter in waiters:
            waiter.release()
