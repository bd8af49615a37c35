"""WAL cleaner: checkpoints, trimming, carrying entries forward, and closing inherited epochs.

The order of the steps makes them safe. An object is needed until the data files with its rows have
been seen after their commit and, on an object store, the commit has been read back. A checkpoint
records which objects are still needed, the producer and batch states of all others, and where each
partition begins and ends. Only after the checkpoint and a grace period are the other objects
deleted. An inherited epoch is closed once all its entries are published and seen, or carried, and a
checkpoint of our own epoch contains its producer states.

A checkpoint has the sequence of our newest object, so each object has at most one checkpoint. If
the newest checkpoint was put before everything below it was published, and no more records arrive,
the writer appends an object without records; the checkpoint after it frees the older objects.

Brokers that live only for seconds never reach the time of a checkpoint or of a deletion. So one
that inherits several epochs puts its first checkpoint at once, and if there are many closed epochs,
the older ones are deleted at the start.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from sparklog import errors, limits
from sparklog.broker.backoff import run_each
from sparklog.broker.log.appends import CarriedEntry, EmptyObject, PendingAppend
from sparklog.broker.log.checkpoint_state import StateEncoder
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.takeover import Leadership, leave_epochs
from sparklog.broker.log.writer import Writer
from sparklog.clock import Clock
from sparklog.storage import wal
from sparklog.storage.metadata.model import Epoch
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import ObjectMissing, Store
from sparklog.storage.snapshot import EntryKind, Located, WalPosition

_CHECKPOINT_EVERY_OBJECTS = 1_000
INHERITED_EPOCHS = 4  # at which a new broker puts its first checkpoint at once
CLOSED_EPOCHS = 8  # retained for the grace period; older ones are deleted at the start
_CARRY_AFTER_SECONDS = 300.0
_CARRY_AFTER_BYTES = 2 * limits.PUBLISH_HELD_LOG_BYTES  # while topics wait for long intervals
_AGES = 1_024
"""The maximum number of samples of the age of our log."""

_log = structlog.get_logger("sparklog.wal")
_OBJECTS_AT_ONCE = 256
"""The maximum number of our oldest objects searched at a time for entries to carry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WalCleanerLimits:
    checkpoint_every_objects: int = _CHECKPOINT_EVERY_OBJECTS
    checkpoint_every_seconds: float = limits.CHECKPOINT_EVERY_SECONDS
    trim_grace_seconds: float = limits.TRIM_GRACE_SECONDS
    carry_after_seconds: float = _CARRY_AFTER_SECONDS
    carry_bytes: int = limits.FLUSH_MAX_BYTES


class _CarryBatch:
    """Entries that are carried together: no more than fit into one object."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self.entries: list[CarriedEntry] = []

    def has_room_for(self, located: Located) -> bool:
        size = self._bytes + _carried_bytes(located)
        is_full = len(self.entries) >= limits.FLUSH_MAX_ENTRIES or size > self._limit_bytes
        return not (self.entries and is_full)

    def add(self, entry: CarriedEntry) -> None:
        self.entries.append(entry)
        self._bytes += _carried_bytes(entry.located)


def _carried_bytes(located: Located) -> int:
    return located.entry.length if located.entry.staged is None else 0


class WalCleaner:
    """Keeps one epoch's WAL short. One caller at a time, except for `checkpoint` and `inherit`."""

    def __init__(
        self,
        store: Store,
        meta: MetadataStore,
        leadership: Leadership,
        appender: wal.Appender,
        led_partitions: LedPartitions,
        writer: Writer,
        *,
        confirm: Callable[[], None],
        clock: Clock,
        bounds: WalCleanerLimits,
        is_controller: Callable[[], bool] = lambda: False,
    ) -> None:
        """`confirm` removes entries from the backlog once their data files have been seen.

        `is_controller`: whether this broker deletes the epochs that any broker has closed.
        """
        self._store = store
        self._meta = meta
        self._leadership = leadership
        self._wal = wal.of(store, clock, leadership.log)
        self._appender = appender
        self._led_partitions = led_partitions
        self._writer = writer
        self._confirm = confirm
        self._is_controller = is_controller
        self._clock = clock
        self._bounds = bounds
        self._inherited: Sequence[Epoch] = leadership.inherited
        self._covered: Mapping[str, Mapping[int, int]] = {}
        """The leader epoch of each partition in our newest checkpoint, by topic id and number."""
        self._damaged: set[int] = set()
        """Our objects with an unreadable entry; they are retained for an operator to inspect."""
        self._queue = deque(
            sorted(led_partitions.backlog.unpublished(), key=lambda each: each.entry.arrival_us)
        )
        """Entries of predecessors, oldest first."""
        self._handed: deque[tuple[Sequence[Epoch], Sequence[Located]]] = deque()
        """All inherited epochs, and entries of partitions that this broker has since received."""
        self._carrying: tuple[PendingAppend, list[Located]] | None = None
        """The last append that was submitted to the writer, and the inherited entries in it."""
        self._ages: deque[tuple[float, int, int]] = deque()
        """(monotonic seconds, bytes of our log, our newest sequence then), until they are aged."""
        self._aged_sequence = -1
        """Our objects up to this sequence are older than `carry_after_seconds`.

        While topics wait for long intervals, `_CARRY_AFTER_BYTES` follow them in addition: to carry
        their entries would cost more than to publish them, which happens before that.
        """
        self._began_at = clock.monotonic()
        # Closed epochs' objects are deleted after a grace period, whichever broker closed them.
        self._delete_closed_at: float | None = clock.monotonic() + bounds.trim_grace_seconds
        self._is_first_tick = True
        self._known_open: set[tuple[int, int]] | None = None
        """The open epochs at the last tick; None if this broker was not the controller then."""
        self._trimmable: deque[tuple[float, wal.Checkpoint]] = deque()
        self._newest: wal.Checkpoint | None = None
        self._encoder = StateEncoder()
        self._checkpointing = threading.Lock()
        self._checkpoint_at = self._confirmed_at = self._idle_checked_at = clock.monotonic()

    def inherit(self, epochs: Sequence[Epoch], located: Sequence[Located]) -> None:
        """Adds entries of predecessors whose partitions this broker has received. From any thread.

        `epochs`: all that this broker is now heir to.
        """
        self._handed.append((epochs, located))

    def tick(self) -> None:
        """Runs each step that is due, whether or not others fail.

        Raises `BrokerFenced` and the store's errors.
        """
        self._take_handed()
        run_each(
            (
                self._appender.tend,
                self._delete_crowd,  # before more epochs are closed
                self._checkpoint_or_confirm,
                self._close_inherited,
                self._trim,
                self._note_closed,
                self._delete_closed,
            )
        )

    def _checkpoint_or_confirm(self) -> None:
        if self._checkpoint_is_due():
            self.checkpoint()
        elif self._confirmation_is_due():
            self._confirm_published()

    # -------------------------------------------------------------------------- checkpoints

    def _checkpoint_is_due(self) -> bool:
        done = self._newest.sequence if self._newest else -1
        if self._led_partitions.applied_sequence <= done:
            return False
        if self._newest is None and len(self._inherited) >= INHERITED_EPOCHS:
            return True
        seconds = self._clock.monotonic() - self._checkpoint_at
        return seconds >= self._bounds.checkpoint_every_seconds or (
            self._appender.checkpoint_is_due(done, objects=self._bounds.checkpoint_every_objects)
        )

    def _confirmation_is_due(self) -> bool:
        """Returns whether published entries should be confirmed although no checkpoint is due."""
        count = self._led_partitions.backlog.unconfirmed_count
        seconds = self._clock.monotonic() - self._confirmed_at
        return count >= limits.UNCONFIRMED_ENTRIES or (
            count > 0 and seconds >= self._bounds.checkpoint_every_seconds
        )

    def _confirm_published(self) -> None:
        self._confirmed_at = self._clock.monotonic()
        self._confirm()

    def checkpoint(self, *, confirms: bool = True) -> int:
        """Puts a checkpoint of our WAL. Objects whose entries are all confirmed are not needed.

        Does nothing if no object follows the newest checkpoint. Returns the sequence of the newest.

        `confirms`: first check data files, as far as that is due.
        """
        with self._checkpointing:
            if confirms:
                self._confirm_published()
            self._put_checkpoint()
            return self._newest.sequence if self._newest is not None else -1

    def _put_checkpoint(self) -> None:
        content = self._led_partitions.checkpoint(
            after=self._newest.sequence if self._newest is not None else -1,
            broker=self._leadership.broker,
            epoch=self._leadership.epoch,
            now_us=self._clock.now_us(),
        )
        if content is None:
            return
        state = self._encoder.encode(content.states)  # slow; appends continue meanwhile
        sequence, needed = content.sequence, content.needed
        self._appender.checkpoint(sequence, needed, state, content.bounds)
        self._newest = wal.Checkpoint(sequence=sequence, needed=tuple(needed), state=b"")
        self._covered = content.led
        self._record_age()
        self._checkpoint_at = self._clock.monotonic()
        self._trimmable.append((self._checkpoint_at, self._newest))

    def _trim(self) -> None:
        horizon = self._clock.monotonic() - self._bounds.trim_grace_seconds
        checkpoint = None
        while self._trimmable and self._trimmable[0][0] <= horizon:
            checkpoint = self._trimmable.popleft()[1]
        if checkpoint is not None:
            self._appender.trim(checkpoint)

    def _note_closed(self) -> None:
        """As controller, schedules the deletion of objects of epochs that any broker has closed."""
        if not self._is_controller():
            self._known_open = None
            return
        now = {each.id for each in self._meta.current.open_epochs}
        if self._known_open is None or self._known_open - now:
            self._delete_closed_at = self._clock.monotonic() + self._bounds.trim_grace_seconds
        self._known_open = now

    def _delete_crowd(self) -> None:
        if self._is_first_tick:
            self._is_first_tick = False
            self._delete(keep_newest=CLOSED_EPOCHS)

    def _delete_closed(self) -> None:
        if self._delete_closed_at is not None and self._clock.monotonic() >= self._delete_closed_at:
            self._delete()
            self._delete_closed_at = None

    def _delete(self, *, keep_newest: int = 0) -> None:
        """Deletes the objects of closed epochs, except the `keep_newest` newest of each broker."""
        found: dict[str, dict[str, list[str]]] = {}
        for path in self._wal.retired(self._open_epochs):
            folder = path.rpartition("/")[0]
            of_broker = found.setdefault(folder.rpartition("/")[0], {})
            of_broker.setdefault(folder, []).append(path)
        for of_broker in found.values():
            folders = sorted(of_broker)  # the names sort like epochs
            for folder in folders[: max(len(folders) - keep_newest, 0)]:
                self._store.delete(of_broker[folder])
                self._store.remove_folder(folder)

    def _open_epochs(self) -> set[tuple[int, int]]:
        return {(each.broker, each.epoch) for each in self._meta.refresh().open_epochs}

    # -------------------------------------------------------------------------- inherited epochs

    def _close_inherited(self) -> None:
        """Leaves inherited epochs that no entry needs, once our checkpoint has their states."""
        if not self._inherited or self._newest is None:
            return
        done = tuple(
            each
            for each in self._inherited
            if not self._led_partitions.backlog.objects.is_needed(each.broker, each.epoch)
        )
        if done:
            self._inherited = leave_epochs(
                self._meta, self._leadership, done, covered=self._covered
            )
            if {each.id for each in done} - {each.id for each in self._inherited}:
                self._delete_closed_at = self._clock.monotonic() + self._bounds.trim_grace_seconds

    # -------------------------------------------------------------------------- carrying

    def carry(self) -> PendingAppend | None:
        """Resubmits entries that have waited long for their table, to free their old objects.

        Returns the append to wait for; None if no entry has waited too long. Reads no more entries
        than it carries. A carried entry then stays in its new object for the same time.
        """
        if self._carrying is not None:
            pending, entries = self._carrying
            if not pending.done:
                return None
            if pending.error is not None:
                self._queue.extendleft(reversed(entries))
            self._carrying = None
        self._record_age()
        batch = _CarryBatch(self._bounds.carry_bytes)
        inherited: list[Located] = []
        try:
            self._choose_inherited(batch, inherited)
            self._choose_own(batch)
            if not batch.entries and not self._needs_empty_object():
                return None
            # Unbounded: carrying frees space in a full log, and uses none.
            pending = self._writer.submit(batch.entries or [EmptyObject()], is_bounded=False)
        except BaseException:
            self._queue.extendleft(reversed(inherited))
            raise
        self._carrying = pending, inherited
        return pending

    def _take_handed(self) -> None:
        if not self._handed:
            return
        while self._handed:
            self._inherited, located = self._handed.popleft()
            self._queue.extend(located)
        self._queue = deque(sorted(self._queue, key=lambda each: each.entry.arrival_us))
        self._began_at = self._clock.monotonic()

    def _needs_empty_object(self) -> bool:
        """Returns whether no more records arrive, and the next checkpoint would free objects."""
        now, newest = self._clock.monotonic(), self._newest
        if newest is None or not newest.needed:
            return False
        idle_seconds = now - max(self._checkpoint_at, self._idle_checked_at)
        if newest.sequence != self._led_partitions.applied_sequence:
            return False
        if idle_seconds < self._bounds.checkpoint_every_seconds:
            return False
        self._idle_checked_at = now
        needed = self._led_partitions.backlog.objects.needed(
            self._leadership.broker, self._leadership.epoch
        )
        return len(needed) < len(newest.needed)

    def _choose_inherited(self, batch: _CarryBatch, taken: list[Located]) -> None:
        """Moves entries that keep an older epoch open from the queue to `batch` and `taken`.

        An entry has waited too long by its own arrival time, or by the time since entries were last
        inherited: at the start, or with partitions of another broker.
        """
        now_us = self._clock.now_us()
        waited_seconds = self._clock.monotonic() - self._began_at
        if waited_seconds < self._bounds.carry_after_seconds:
            horizon_us = now_us - round(self._bounds.carry_after_seconds * 1e6)
        else:
            horizon_us = limits.TIMESTAMP_MAX_US  # the predecessor's clock may have been wrong
        while self._queue and self._queue[0].entry.arrival_us < horizon_us:
            each = self._queue[0]
            if self._led_partitions.backlog.objects.is_unpublished(each):
                if not batch.has_room_for(each):
                    break
                if self._add(batch, each):
                    taken.append(each)
            self._queue.popleft()

    def _choose_own(self, batch: _CarryBatch) -> None:
        """Adds entries of our own old objects that are far below our newest checkpoint."""
        newest = self._newest.sequence if self._newest else -1
        old = self._appender.carried_up_to(newest, objects=self._bounds.checkpoint_every_objects)
        last = min(old, self._aged_sequence)
        broker, epoch = self._leadership.broker, self._leadership.epoch
        count = len(self._damaged) + _OBJECTS_AT_ONCE
        objects = self._led_partitions.backlog.objects
        for sequence in objects.oldest_unpublished(broker, epoch, count):
            if sequence > last:
                break
            if sequence in self._damaged:
                continue
            try:
                found = self._appender.read(sequence)
            except (errors.CorruptObject, ObjectMissing) as error:
                at = WalPosition(broker, epoch, sequence)
                _log.error("cannot carry a WAL object", entry=repr(at), reason=str(error))
                self._damaged.add(sequence)
                continue
            for each in found.located:
                if each.entry.kind in (
                    EntryKind.RECORDS,
                    EntryKind.STAGED,
                ) and self._led_partitions.backlog.objects.is_unpublished(each):
                    if not batch.has_room_for(each):
                        return
                    if not self._add(batch, each):
                        self._damaged.add(sequence)

    def _add(self, batch: _CarryBatch, located: Located) -> bool:
        """Adds an entry. Returns False if it is unreadable, and so retained for an operator."""
        try:
            batch.add(CarriedEntry(located=located, payload=self._payload(located)))
        except (errors.CorruptObject, ObjectMissing) as error:
            _log.error("cannot carry a WAL entry", entry=repr(located), reason=str(error))
            return False
        return True

    def _record_age(self) -> None:
        """Updates `_aged_sequence`."""
        now, backlog = self._clock.monotonic(), self._led_partitions.backlog
        log_bytes, sequence = backlog.log_bytes, self._led_partitions.applied_sequence
        until = now - self._bounds.carry_after_seconds
        up_to_bytes = log_bytes - _CARRY_AFTER_BYTES if backlog.has_long_waits else log_bytes
        while self._ages and self._ages[0][0] <= until and self._ages[0][1] <= up_to_bytes:
            self._aged_sequence = self._ages.popleft()[2]
        if not self._ages or self._ages[-1][2] < sequence:
            self._ages.append((now, log_bytes, sequence))
            if len(self._ages) > _AGES:
                self._ages = deque(itertools.islice(self._ages, 1, None, 2))

    def _payload(self, located: Located) -> wal.Payload:
        if located.entry.staged is not None:
            return wal.EMPTY
        data = wal.read_payload(self._store, located)
        return wal.Payload((data,), data.size, located.entry.crc32c)
