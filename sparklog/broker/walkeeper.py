"""The WAL's upkeep: checkpoints, trimming, carrying forward, and the end of inherited epochs.

The order is what makes it safe. An object is needed until the data files with its rows have been
seen after their commit, and on an object store the commit was read back. A checkpoint says which
objects are still needed, with everything that must be remembered of the others, and where each
partition begins and ends; only then, and a grace later, do the others go. An inherited epoch is
closed when all it holds is published and seen, or carried, and our own checkpoint remembers what it
told of producers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from sparklog import errors, limits
from sparklog.broker.lease import Lease, close_epochs
from sparklog.broker.partitions import Ledger, StateEncoder
from sparklog.broker.writer import Carry, Ticket, Writer
from sparklog.clock import Clock
from sparklog.storage import wal
from sparklog.storage.meta import MetaStore
from sparklog.storage.objects import ObjectMissing, Store
from sparklog.storage.snapshot import Kind, Located, WalPosition

_log = structlog.get_logger("sparklog.wal")
_OBJECTS_AT_ONCE = 256
"""Of our objects so many are gone through for what is to be carried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperLimits:
    checkpoint_every_objects: int = limits.CHECKPOINT_EVERY_OBJECTS
    checkpoint_every_seconds: float = limits.CHECKPOINT_EVERY_SECONDS
    trim_grace_seconds: float = limits.TRIM_GRACE_SECONDS
    carry_after_seconds: float = limits.CARRY_AFTER_SECONDS
    carry_bytes: int = limits.FLUSH_MAX_BYTES


class _Portion:
    """What is carried at once: no more than one object takes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self.carries: list[Carry] = []

    def has_room_for(self, located: Located) -> bool:
        size = self._bytes + _carried_bytes(located)
        is_full = len(self.carries) >= limits.FLUSH_MAX_ENTRIES or size > self._limit_bytes
        return not (self.carries and is_full)

    def add(self, carry: Carry) -> None:
        self.carries.append(carry)
        self._bytes += _carried_bytes(carry.located)


def _carried_bytes(located: Located) -> int:
    return located.entry.length if located.entry.staged is None else 0


class WalKeeper:
    """Keeps one epoch's WAL short. One caller at a time."""

    def __init__(
        self,
        store: Store,
        meta: MetaStore,
        lease: Lease,
        appender: wal.Appender,
        ledger: Ledger,
        writer: Writer,
        *,
        confirm: Callable[[], None],
        clock: Clock,
        bounds: KeeperLimits,
    ) -> None:
        """`confirm` has the ledger forget what the tables are seen to hold."""
        self._store = store
        self._meta = meta
        self._lease = lease
        self._appender = appender
        self._ledger = ledger
        self._writer = writer
        self._confirm = confirm
        self._clock = clock
        self._bounds = bounds
        self._inherited = list(lease.inherited)
        self._damaged: set[int] = set()
        """Objects of ours with an entry that cannot be carried: they stay, for a person to see."""
        self._queue = deque(sorted(ledger.inherited(), key=lambda each: each.entry.arrival_us))
        """What predecessors have left, oldest first."""
        self._under_way: tuple[Ticket, list[Located]] | None = None
        """What was handed to the writer last, and the inherited entries in it."""
        self._ages: deque[tuple[float, int]] = deque()
        """When which object was our newest (monotonic seconds); for as long as objects rest."""
        self._aged_sequence = -1
        """Our objects up to here have stood for `carry_after_seconds`."""
        self._began_at = clock.monotonic()
        # What closed epochs left behind goes after a grace, whoever closed them.
        self._retire_at: float | None = clock.monotonic() + bounds.trim_grace_seconds
        self._trimmable: deque[tuple[float, wal.Checkpoint]] = deque()
        self._newest: wal.Checkpoint | None = None
        self._encoder = StateEncoder()
        self._checkpoint_at = self._confirmed_at = clock.monotonic()

    def tick(self) -> None:
        """Does what is due. Raises `BrokerFenced` and what the store raises."""
        if self._checkpoint_is_due():
            self.checkpoint()
        elif self._confirmation_is_due():
            self._confirm_published()
        self._close_inherited()
        self._trim()
        self._retire()

    # -------------------------------------------------------------------------- checkpoints

    def _checkpoint_is_due(self) -> bool:
        done = self._newest.sequence if self._newest else -1
        objects = self._ledger.applied_sequence - done
        seconds = self._clock.monotonic() - self._checkpoint_at
        return objects >= self._bounds.checkpoint_every_objects or (
            objects > 0 and seconds >= self._bounds.checkpoint_every_seconds
        )

    def _confirmation_is_due(self) -> bool:
        """Whether somebody should look at what is published, although no checkpoint comes."""
        count = self._ledger.unconfirmed_count
        seconds = self._clock.monotonic() - self._confirmed_at
        return count >= limits.UNCONFIRMED_ENTRIES or (
            count > 0 and seconds >= self._bounds.checkpoint_every_seconds
        )

    def _confirm_published(self) -> None:
        self._confirmed_at = self._clock.monotonic()
        self._confirm()

    def checkpoint(self) -> None:
        """Puts a checkpoint of our WAL as it is now, without what the tables surely have."""
        self._confirm_published()
        with self._ledger.lock:
            sequence = self._ledger.applied_sequence
            if sequence < 0 or (self._newest is not None and self._newest.sequence == sequence):
                return
            needed = self._ledger.needed(self._lease.broker, self._lease.epoch)
            bounds = self._ledger.bounds()
            snapshot = self._ledger.snapshot_state(now_us=self._clock.now_us())
        state = self._encoder.encode(snapshot)  # takes long; appends go on meanwhile
        self._appender.checkpoint(sequence, needed, state, bounds)
        self._newest = wal.Checkpoint(sequence=sequence, needed=tuple(needed), state=b"")
        self._note_age()
        self._checkpoint_at = self._clock.monotonic()
        self._trimmable.append((self._checkpoint_at, self._newest))

    def _trim(self) -> None:
        horizon = self._clock.monotonic() - self._bounds.trim_grace_seconds
        checkpoint = None
        while self._trimmable and self._trimmable[0][0] <= horizon:
            checkpoint = self._trimmable.popleft()[1]
        if checkpoint is not None:
            paths = wal.removable(self._store, self._lease.broker, self._lease.epoch, checkpoint)
            self._store.delete(paths)

    def _retire(self) -> None:
        if self._retire_at is not None and self._clock.monotonic() >= self._retire_at:
            self._store.delete(wal.retired(self._store, self._open_epochs))
            self._retire_at = None

    def _open_epochs(self) -> set[tuple[int, int]]:
        return {(each.broker, each.epoch) for each in self._meta.reload().open_epochs}

    # -------------------------------------------------------------------------- inherited epochs

    def _close_inherited(self) -> None:
        """Closes what nothing depends on any more, once our own checkpoint stands for it."""
        if not self._inherited or self._newest is None:
            return
        done = tuple(
            each for each in self._inherited if not self._ledger.is_needed(each.broker, each.epoch)
        )
        if done:
            close_epochs(self._meta, self._lease, done)
            self._inherited = [each for each in self._inherited if each not in done]
            self._retire_at = self._clock.monotonic() + self._bounds.trim_grace_seconds

    # -------------------------------------------------------------------------- carrying

    def carry(self) -> Ticket | None:
        """Queues again what has waited too long for its table, so that its objects can go.

        Wait for the ticket. None where nothing has waited too long. Looks at no more entries than
        it carries; and what was carried rests in its new object for as long again.
        """
        if self._under_way is not None:
            ticket, entries = self._under_way
            if not ticket.done:
                return None
            if ticket.error is not None:
                self._queue.extendleft(reversed(entries))
            self._under_way = None
        self._note_age()
        portion = _Portion(self._bounds.carry_bytes)
        inherited = self._choose_inherited(portion)
        self._choose_own(portion)
        if not portion.carries:
            return None
        ticket = self._writer.submit(portion.carries)
        self._under_way = ticket, inherited
        return ticket

    def _choose_inherited(self, portion: _Portion) -> list[Located]:
        """Entries that keep an older epoch open. By their own time, or by the time that we know."""
        now_us = self._clock.now_us()
        waited_seconds = self._clock.monotonic() - self._began_at
        if waited_seconds < self._bounds.carry_after_seconds:
            horizon_us = now_us - round(self._bounds.carry_after_seconds * 1e6)
        else:
            horizon_us = limits.TIMESTAMP_MAX_US  # whatever clock our predecessor had
        taken: list[Located] = []
        while self._queue and self._queue[0].entry.arrival_us < horizon_us:
            each = self._queue[0]
            if self._ledger.is_waiting(each):
                if not portion.has_room_for(each):
                    break
                if self._take(portion, each):
                    taken.append(each)
            self._queue.popleft()
        return taken

    def _choose_own(self, portion: _Portion) -> None:
        """Entries of our objects that have stood for long, far below our newest checkpoint."""
        newest = self._newest.sequence if self._newest else -1
        last = min(newest - self._bounds.checkpoint_every_objects, self._aged_sequence)
        broker, epoch = self._lease.broker, self._lease.epoch
        count = len(self._damaged) + _OBJECTS_AT_ONCE
        for sequence in self._ledger.oldest_waiting(broker, epoch, count):
            if sequence > last:
                break
            if sequence in self._damaged:
                continue
            at = WalPosition(broker, epoch, sequence)
            try:
                found = wal.read_object(self._store, at)
            except (errors.CorruptObject, ObjectMissing) as error:
                _log.error("cannot carry an object", entry=repr(at), reason=str(error))
                self._damaged.add(sequence)
                continue
            for each in found.located:
                if each.entry.kind in (Kind.RECORDS, Kind.STAGED) and self._ledger.is_waiting(each):
                    if not portion.has_room_for(each):
                        return
                    if not self._take(portion, each):
                        self._damaged.add(sequence)

    def _take(self, portion: _Portion, located: Located) -> bool:
        """False for an entry that cannot be read: it stays, for a person to look at."""
        try:
            portion.add(Carry(located=located, payload=self._payload(located)))
        except (errors.CorruptObject, ObjectMissing) as error:
            _log.error("cannot carry an entry", entry=repr(located), reason=str(error))
            return False
        return True

    def _note_age(self) -> None:
        """Keeps track of how long our objects have stood."""
        now, sequence = self._clock.monotonic(), self._ledger.applied_sequence
        while self._ages and self._ages[0][0] <= now - self._bounds.carry_after_seconds:
            self._aged_sequence = self._ages.popleft()[1]
        if not self._ages or self._ages[-1][1] < sequence:
            self._ages.append((now, sequence))

    def _payload(self, located: Located) -> wal.Payload:
        if located.entry.staged is not None:
            return wal.EMPTY
        data = wal.read_payload(self._store, located)
        return wal.Payload((data,), data.size, located.entry.crc32c)
