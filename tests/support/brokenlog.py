"""A simulated log with clients, which can misbehave in one chosen way.

`play` returns the history that the clients of such a log would have recorded; the same seed yields
the same history. With a fault, the history violates one promise a few times, and no other.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from sparklog.check.history import (
    ACKED,
    FAILED,
    NO_GROUP,
    NO_OFFSET,
    NOT_SENT,
    UNKNOWN,
    History,
    Recorder,
    joined,
    value_of,
)

PARTITIONS = 3
PRODUCERS = 4
LONERS = 2
MEMBERS = 2
GROUP = 0

FAULTS = {
    "lose an acked record": "lost-write",
    "lose the last record": "unseen",
    "lose a record after it was read": "vanished",
    "append a retry twice": "duplicate",
    "give an offset twice": "inconsistent-offsets",
    "ack with another offset": "acked-elsewhere",
    "append to another partition": "wrong-partition",
    "append a refused record": "failed-read",
    "make a record up": "phantom",
    "flip a bit": "changed-record",
    "give a record before it was sent": "future-read",
    "ack a producer out of order": "nonmonotonic-send",
    "swap two records of a producer": "reordered",
    "leave an offset empty": "gap",
    "move the log start": "start-moved",
    "go back within a poll": "int-nonmonotonic-poll",
    "go back between polls": "nonmonotonic-poll",
    "skip within a poll": "int-poll-skip",
    "skip between polls": "poll-skip",
    "give a group a later start": "group-skip",
    "forget a commit": "commit-went-back",
    "make a commit up": "phantom-commit",
    "tell an old end": "stale-end",
    "take the end back": "end-went-back",
}
"""Faults that can be planted, each with the anomaly that a checker must report."""


@dataclass(slots=True)
class _Partition:
    records: list[tuple[int, bool]] = field(default_factory=list)
    """Value and whether it is intact, by offset."""
    hidden: set[int] = field(default_factory=set)
    """Offsets that are no longer delivered."""
    told: int = 0
    """The highest end offset reported so far."""


@dataclass(slots=True)
class _Reader:
    number: int
    position: list[int] = field(default_factory=lambda: [0] * PARTITIONS)
    session: list[int] = field(default_factory=lambda: [0] * PARTITIONS)
    poll: int = 0


class _Play:
    def __init__(self, seed: int, fault: str | None) -> None:
        self.chance = random.Random(seed)
        self.fault = fault
        self.planted = 0
        self.seen = Recorder()
        self.now_us = 1_000_000
        self.log = [_Partition() for _ in range(PARTITIONS)]
        self.sequence = [0] * PRODUCERS
        self.sessions = 0
        self.committed: list[int] = [NO_OFFSET] * PARTITIONS
        self.loners = [_Reader(number) for number in range(LONERS)]
        self.members = [_Reader(LONERS + number) for number in range(MEMBERS)]
        self.owners = [0] * PARTITIONS
        for reader in (*self.loners, *self.members):
            group = GROUP if reader in self.members else NO_GROUP
            self.seen.consumers.add(reader.number, group, 0)
            for partition in range(PARTITIONS):
                self._new_session(reader, partition, 0)

    def plant(self, fault: str, likelihood: float = 0.05) -> bool:
        """Returns true if the fault is due now."""
        happens = self.fault == fault and self.chance.random() < likelihood
        self.planted += happens
        return happens

    def tick(self) -> int:
        self.now_us += self.chance.randint(1, 500)
        return self.now_us

    # ---------------------------------------------------------------------- sending

    def send(self, producer: int) -> None:
        """Sends a burst to one partition, answered at its end."""
        partition = self.chance.randrange(PARTITIONS)
        log = self.log[partition]
        burst = []
        for _ in range(self.chance.randint(2, 6)):
            value = value_of(producer, self.sequence[producer])
            self.sequence[producer] += 1
            burst.append((value, self.tick()))
        if self.chance.random() < 0.05:  # refused permanently
            appended = self.plant("append a refused record", 0.5)
            for value, started in burst:
                if appended:
                    log.records.append((value, True))
                self._answered(value, partition, FAILED, NO_OFFSET, NO_OFFSET, started)
            return
        status = UNKNOWN if self.chance.random() < 0.05 else ACKED
        if status == UNKNOWN and self.chance.random() < 0.5:  # it was never appended
            for value, started in burst:
                self._answered(value, partition, UNKNOWN, NO_OFFSET, NO_OFFSET, started)
            return
        values = [value for value, _ in burst]
        if self.plant("swap two records of a producer"):
            values[0], values[1] = values[1], values[0]
        at = {value: self._append(value, partition, status) for value in values}
        if status == ACKED and self.plant("ack a producer out of order"):
            first, second = values[0], values[1]
            at[first], at[second] = at[second], at[first]
        for value, started in burst:
            told = self._told(*at[value]) if status == ACKED else (NO_OFFSET, NO_OFFSET)
            self._answered(value, partition, status, *told, started)

    def _append(self, value: int, partition: int, status: int) -> tuple[int, int]:
        """Returns the partition and offset of the record."""
        if self.plant("append to another partition", 0.02):
            partition = (partition + 1) % PARTITIONS
        log = self.log[partition]
        if self.plant("leave an offset empty", 0.02):
            log.hidden.add(len(log.records))
            log.records.append((NOT_SENT, True))
        if self.plant("make a record up", 0.02):
            log.records.append((NOT_SENT, True))
        offset = len(log.records)
        log.records.append((value, not self.plant("flip a bit", 0.02)))
        if self.plant("append a retry twice", 0.02):
            log.records.append((value, True))
        if status == ACKED and self.plant("lose an acked record", 0.02):
            log.records.pop()
        return partition, offset

    def _told(self, partition: int, offset: int) -> tuple[int, int]:
        """Returns the partition and offset that the ack names."""
        if self.plant("ack with another offset", 0.02):
            offset += 1_000_000
        if offset and self.plant("give an offset twice", 0.02):
            offset -= 1
        return partition, offset

    def _answered(
        self, value: int, partition: int, status: int, where: int, offset: int, started: int
    ) -> None:
        self.seen.sends.add(value, partition, status, where, offset, started, self.tick())

    # ---------------------------------------------------------------------- reading

    def _new_session(self, reader: _Reader, partition: int, position: int) -> None:
        self.sessions += 1
        reader.session[partition] = self.sessions
        reader.position[partition] = position

    def read(self, reader: _Reader, partitions: list[int], most: int = 8) -> None:
        """Polls several partitions once."""
        reader.poll += 1
        for partition in partitions:
            log = self.log[partition]
            first = reader.position[partition]
            if self.plant("skip between polls") and first:
                first += 2
            if self.plant("go back between polls") and first >= 2:
                first -= 2
            offsets = list(range(first, min(first + most, len(log.records))))
            if self.plant("skip within a poll") and len(offsets) > 2:
                del offsets[1]
            if self.plant("go back within a poll") and len(offsets) > 2:
                offsets[1], offsets[0] = offsets[0], offsets[1]
            for offset in offsets:
                self._given(reader, partition, offset)
            reader.position[partition] = max(first, *offsets, -1) + 1 if offsets else first

    def _given(self, reader: _Reader, partition: int, offset: int) -> None:
        if offset in self.log[partition].hidden:
            return
        value, is_intact = self.log[partition].records[offset]
        at_us = self.tick()
        if self.plant("give a record before it was sent", 0.02):
            at_us = 0
        self.seen.reads.add(
            reader.number,
            reader.session[partition],
            reader.poll,
            partition,
            offset,
            value,
            int(is_intact),
            at_us,
        )
        if self.plant("lose a record after it was read", 0.01):
            self.log[partition].hidden.add(offset)

    def seek(self, reader: _Reader) -> None:
        """Seeks to a random offset, which begins a session."""
        partition = self.chance.randrange(PARTITIONS)
        end = len(self.log[partition].records)
        self._new_session(reader, partition, self.chance.randint(0, end))

    # ---------------------------------------------------------------------- the group

    def read_as_member(self, member: int) -> None:
        """Reads records of the partitions that the member owns, then possibly commits."""
        reader = self.members[member]
        mine = [number for number in range(PARTITIONS) if self.owners[number] == member]
        self.read(reader, mine)
        for partition in mine:
            position = reader.position[partition]
            if self.chance.random() < 0.7 and position > 0:
                self._commit(partition, position)

    def _commit(self, partition: int, position: int) -> None:
        started = self.tick()
        status = UNKNOWN if self.chance.random() < 0.05 else ACKED
        took_effect = status == ACKED or self.chance.random() < 0.5
        if took_effect:
            self.committed[partition] = position
        if status == ACKED and self.plant("forget a commit"):
            self.committed[partition] = NO_OFFSET
        self.seen.commits.add(GROUP, partition, position, status, started, self.tick())

    def rebalance(self) -> None:
        """Reassigns partitions to members, which fetch the committed offsets."""
        for partition in range(PARTITIONS):
            self.owners[partition] = owner = self.chance.randrange(MEMBERS)
            started = self.tick()
            found = self.committed[partition]
            if found >= 0 and self.plant("make a commit up", 0.1):
                found += 1_000_000
            self.seen.fetches.add(GROUP, partition, found, started, self.tick())
            begin = max(self.committed[partition], 0)
            end = len(self.log[partition].records)
            if self.plant("give a group a later start", 0.2) and begin + 2 < end:
                begin += 2
            self._new_session(self.members[owner], partition, begin)

    # ---------------------------------------------------------------------- ends

    def look(self) -> None:
        """Asks for the start and end of a partition."""
        partition = self.chance.randrange(PARTITIONS)
        log = self.log[partition]
        started = self.tick()
        end = len(log.records)
        if self.plant("tell an old end", 0.2) and end >= 8:
            end -= 8
        if self.plant("take the end back", 0.2) and log.told > 2:
            end = log.told - 2
        log.told = max(log.told, end)
        start = 5 if self.plant("move the log start", 0.1) else 0
        self.seen.ends.add(partition, start, end, started, self.tick())

    # ---------------------------------------------------------------------- the whole

    def step(self) -> None:
        """Runs one random action of a client."""
        match self.chance.randrange(12):
            case 0 | 1 | 2 | 3 | 4:
                self.send(self.chance.randrange(PRODUCERS))
            case 5 | 6:
                self.read(self.chance.choice(self.loners), list(range(PARTITIONS)))
            case 7 | 8:
                self.read_as_member(self.chance.randrange(MEMBERS))
            case 9:
                self.look()
            case 10 if self.chance.random() < 0.3:
                self.rebalance()
            case 11 if self.chance.random() < 0.3:
                self.seek(self.chance.choice(self.loners))

    def end(self) -> None:
        """All members read to the end, and a new consumer reads everything."""
        for member in range(MEMBERS):
            for _ in range(200):
                self.read_as_member(member)
        last = _Reader(LONERS + MEMBERS)
        self.seen.consumers.add(last.number, NO_GROUP, 1)
        for partition in range(PARTITIONS):
            self._new_session(last, partition, 0)
            if self.fault == "lose the last record":
                self.log[partition].records.pop()
                self.planted += 1
        for _ in range(2):
            self.read(last, list(range(PARTITIONS)), most=1_000_000)
        self.rebalance()


def play(seed: int, fault: str | None = None, steps: int = 1_500) -> tuple[History, int]:
    """Returns the history, and how many times the fault was planted."""
    played = _Play(seed, fault)
    for _ in range(steps):
        played.step()
    played.end()
    return joined([played.seen]), played.planted
