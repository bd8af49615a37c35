"""Readers that follow the root directly, as a Spark source does, without a broker.

They check the following, besides the checks of `History` on every row:

- a refresh shows at least everything that had been acked when it began;
- neither start nor end of a partition ever moves back, and offsets below the start are refused;
- rows come in order, without a gap, exactly in the range that was asked for;
- the table alone holds exactly the offsets below its ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparklog import errors
from sparklog.storage.follow import RootFollower
from sparklog.storage.objects import ObjectMissing, Store, SyncFailed
from sparklog.storage.reading.plan import plan
from sparklog.storage.reading.read import read_slice
from sparklog.storage.snapshot import Slice, TableSnapshot
from tests.simulation.history import History, Place, Row, ensure, rows_of

if TYPE_CHECKING:
    from tests.simulation.world import World


class Reader:
    """A process that reads until it dies; its watcher starts another."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name
        self._chance = world.chance
        self._machine = world.machine(name)
        self._starts: dict[Place, int] = {}
        self._ends: dict[Place, int] = {}
        self._positions: dict[Place, int] = {}
        self.process = self._machine.process
        world.scheduler.spawn(self.process, "reader", self._run)

    def _run(self) -> None:
        follower = None
        while True:
            self._machine.clock.sleep(self._chance.choice([0.02, 0.1, 0.4]))
            try:
                if follower is None:
                    follower = RootFollower(self._machine.store, clock=self._machine.clock)
                topic = self._chance.choice(self._world.read_names)
                self._follow(follower, topic)
            except (errors.Retriable, errors.UnknownTopic) as error:
                self._world.disk.note("reader waits", str(error))
            except SyncFailed as error:
                # It cannot know what is durable. Another reader takes its place.
                self._world.disk.note("reader ends", repr(error))
                self.process.alive = False
                return
            except errors.Corrupt as error:
                ensure(self._world.explains(error), f"{self._name}: {error}")
                follower = None

    def _follow(self, follower: RootFollower, topic: str) -> None:
        history = self._world.history
        acked, starts = dict(history.acked), dict(history.starts)
        snapshot = follower.refresh([topic])[topic]
        history.check_ends(self._name, snapshot.topic_id or "", snapshot.ends)
        ends = follower.ends(snapshot)
        for partition, end in enumerate(ends):
            place = snapshot.topic_id or "", partition
            start, least = snapshot.starts[partition], self._starts.get(place, 0)
            least = max(least, starts.get(place, 0))
            history.check_start(self._name, topic, place, start, least)
            self._starts[place] = start
            known = acked.get(place, 0)
            ensure(end >= known, f"{self._name}: {place} ends at {end}, acked to {known} before")
            before = self._ends.get(place, 0)
            ensure(end >= before, f"{self._name}: {place} ends at {end}, at {before} before")
            self._ends[place] = end
            self._read(follower, topic, snapshot, partition, end)

    def _read(
        self,
        follower: RootFollower,
        topic: str,
        snapshot: TableSnapshot,
        partition: int,
        end: int,
    ) -> None:
        """The next records of the partition, or some earlier ones again."""
        place = snapshot.topic_id or "", partition
        log_start = snapshot.starts[partition]
        start = max(self._positions.get(place, 0), log_start)
        if self._chance.random() < 0.2:
            start = self._chance.randint(log_start, start)
        if start >= end:
            return
        if log_start:
            self._refused(follower, topic, snapshot, partition, log_start)
        end = self._chance.choice([end, end, self._chance.randint(start + 1, end)])
        try:
            if self._chance.random() < 0.2:
                self._read_table(topic, snapshot, partition)
            pieces = follower.plan(topic, snapshot, partition, start, end)
            store, history = self._machine.store, self._world.history
            reached = read(store, history, self._name, place, pieces, start, end)
        except ObjectMissing as gone:
            self._world.disk.note("plans again", gone.path)
            return
        self._positions[place] = max(self._positions.get(place, 0), reached)

    def _refused(
        self,
        follower: RootFollower,
        topic: str,
        snapshot: TableSnapshot,
        partition: int,
        log_start: int,
    ) -> None:
        """Checks that offsets below the log start cannot be planned."""
        try:
            follower.plan(topic, snapshot, partition, log_start - 1, log_start)
        except errors.OffsetOutOfRange:
            return
        ensure(False, f"{self._name}: {topic}-{partition} is read below its start, {log_start}")

    def _read_table(self, topic: str, snapshot: TableSnapshot, partition: int) -> None:
        """Checks the table as another engine reads it: the whole partition and nothing else."""
        start, end = snapshot.starts[partition], snapshot.ends[partition]
        pieces = plan(
            topic=topic, snapshot=snapshot, tail=(), partition=partition, start=start, end=end
        )
        who = f"{self._name}, in the table"
        place = snapshot.topic_id or "", partition
        read(self._machine.store, self._world.history, who, place, pieces, start, end)


def read(
    store: Store,
    history: History,
    who: str,
    place: Place,
    pieces: list[Slice],
    start: int,
    end: int,
) -> int:
    """Checks and notes all rows from `start` to `end`; `end`. Raises `ObjectMissing`."""
    for piece in pieces:
        for batch in read_slice(store, piece):
            found: list[tuple[int, Row]] = list(rows_of(batch))
            offsets = [offset for offset, _ in found]
            expected = history.offsets(place, start, offsets[-1] + 1)
            ensure(offsets == expected, f"{who}: {place} gives {offsets} from {start} on")
            history.saw(who, place, found)
            start = offsets[-1] + 1
    rest = history.offsets(place, start, end)
    ensure(start <= end and not rest, f"{who}: {pieces} end at {start} instead of {end}")
    return end
