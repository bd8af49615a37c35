from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog import errors, limits
from sparklog.broker.walkeeper import KeeperLimits
from sparklog.broker.writer import Carry
from sparklog.clock import ManualClock
from sparklog.storage import wal
from sparklog.storage.follow import RootFollower
from sparklog.storage.meta import Epoch
from sparklog.storage.objects import Fault, MemoryStore, ScriptedFaults
from tests.support.brokers import (
    GRACE_SECONDS,
    Rig,
    RigOptions,
    Row,
    flip,
    paths,
    rows_followed,
    rows_of_root,
    rows_of_table,
)

CARRY_SECONDS = 300.0
EAGER = KeeperLimits(
    checkpoint_every_objects=1,
    checkpoint_every_seconds=1e9,
    trim_grace_seconds=GRACE_SECONDS,
    carry_after_seconds=CARRY_SECONDS,
)


@pytest.fixture
def clock() -> ManualClock:
    """A clock that stands still."""
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    """An empty root."""
    return MemoryStore(clock)


@pytest.fixture
def rig(store: MemoryStore, clock: ManualClock) -> Rig:
    """A broker with topic t of one partition, and nothing in memory."""
    found = Rig(store, clock, options=RigOptions(hot_bytes=0))
    found.create()
    return found


def objects(rig: Rig, epoch: int | None = None) -> list[str]:
    """What stands in the log of an epoch: ours, unless another is named."""
    names = paths(rig.store, wal.folder(rig.lease.broker, epoch or rig.lease.epoch))
    return [name.lstrip("0") or "0" for name in names if not name.startswith("checkpoint")]


def checkpoints(rig: Rig) -> int:
    """How many there are in our epoch."""
    names = paths(rig.store, wal.folder(rig.lease.broker, rig.lease.epoch))
    return len([name for name in names if name.startswith("checkpoint")])


def carry(rig: Rig) -> int:
    """How many entries were carried, durably."""
    ticket = rig.keeper.carry()
    if ticket is None:
        return 0
    rig.writer.wait(ticket)
    return len(ticket.appends)


# ------------------------------------------------------------------------------ checkpoints


def test_a_checkpoint_comes_after_so_many_objects(store: MemoryStore, clock: ManualClock) -> None:
    """As soon as so many objects stand since the last one, and not before."""
    keeper = KeeperLimits(checkpoint_every_objects=3, checkpoint_every_seconds=1e9)
    rig = Rig(store, clock, options=RigOptions(keeper=keeper))
    rig.create()
    for expected in (0, 1, 1, 1, 2):
        rig.append(["a"])
        rig.keeper.tick()
        assert checkpoints(rig) == expected


def test_a_checkpoint_comes_after_some_time(rig: Rig, clock: ManualClock) -> None:
    """Also where little is written, but not oftener than agreed, and none where nothing is."""
    for seconds, appends, sequence in ((9.9, 0, -1), (0.1, 0, 0), (99, 0, 0), (0, 1, 1), (9, 1, 1)):
        clock.advance(seconds)
        for _ in range(appends):
            rig.append(["a"])
        rig.keeper.tick()
        found = wal.newest_checkpoint(rig.store, 1, 1)
        newest = found.sequence if found is not None else -1
        assert newest == sequence
    assert rig.successor().read() == [(0, b"a"), (1, b"a")]


def test_the_log_stays_short(rig: Rig) -> None:
    """What is published goes a grace after the next checkpoint, all but the newest object."""
    for _ in range(5):
        rig.append(["a"])
    rig.publish()
    rig.keeper.checkpoint()
    rig.keeper.tick()
    assert objects(rig) == [str(number) for number in range(6)]
    rig.trim()
    assert objects(rig) == ["5"]
    rig.append(["b"])
    rig.trim()
    assert objects(rig) == ["6"]
    assert checkpoints(rig) == 1
    assert rig.successor().read() == rows_of_root(rig.store, rig.clock)


def test_what_is_not_published_stays(rig: Rig) -> None:
    """An object with one unpublished entry is needed, whatever else is in it."""
    rig.create("u")
    tickets = [rig.submit(["a"]), rig.submit(["x"], topic="u")]
    for ticket in tickets:
        rig.core.wait(ticket)
    rig.append(["b"])
    rig.publisher.publish(rig.ledger.topic("t"))
    rig.append(["c"])
    rig.trim()
    assert objects(rig) == ["1", "3"]
    assert rig.successor().read("u") == [(0, b"x")]


def test_a_trim_that_fails_is_made_up_for(rig: Rig) -> None:
    """A store that does not delete costs space until the next checkpoint, and nothing else."""
    assert isinstance(rig.store, MemoryStore)
    rig.append(["a"])
    rig.publish()
    down = errors.StorageUnavailable(operation="delete", path="?", reason="down")
    rig.keeper._store = rig.store.view(ScriptedFaults(Fault(operation="delete", error=down)))
    with pytest.raises(errors.StorageUnavailable):
        rig.trim()
    rig.append(["b"])
    rig.publish()
    rig.trim()
    assert objects(rig) == ["2"]


# ------------------------------------------------------------------------------ inherited epochs


def test_an_inherited_epoch_ends_when_it_is_published(rig: Rig) -> None:
    """It stays open while its records are nowhere else, and is closed after our own checkpoint."""
    rig.append(["a"])
    second = rig.successor()
    second.keeper.checkpoint()
    second.keeper.tick()
    assert Epoch(1, 1) in second.meta.reload().open_epochs
    second.publish()
    second.keeper.tick()
    assert Epoch(1, 1) in second.meta.reload().open_epochs
    second.confirmer.confirm()
    second.keeper.tick()
    assert second.meta.reload().open_epochs == (Epoch(1, 2),)
    assert objects(second, 1) == ["0", "1", "2"]
    second.trim()
    assert objects(second, 1) == ["2"]


def test_an_epoch_is_not_closed_before_our_checkpoint(rig: Rig) -> None:
    """Until then only the old epoch remembers the producers."""
    rig.append(["a"], stamp=(1, 0, 0))
    rig.publish()
    second = rig.successor()
    second.keeper._close_inherited()
    third = second.successor()
    assert third.append(["a"], stamp=(1, 0, 0)).duplicate


def test_a_replaced_broker_closes_nothing(rig: Rig) -> None:
    """An epoch that a successor has inherited is the successor's to close, and to clear away."""
    rig.append(["a"])
    second = rig.successor()
    second.publish()
    second.keeper.checkpoint()
    third = second.successor()
    with pytest.raises(errors.BrokerFenced):
        second.keeper.tick()
    assert Epoch(1, 1) in third.meta.reload().open_epochs


def test_leftovers_of_closed_epochs_go(rig: Rig, clock: ManualClock) -> None:
    """What a broker could not clear away, because it stopped too soon, its successor does."""
    rig.append(["a"])
    rig.publish()
    second = rig.successor()
    second.keeper.checkpoint()
    second.keeper.tick()
    third = second.successor()
    third.keeper.checkpoint()
    third.keeper.tick()
    assert third.meta.reload().open_epochs == (Epoch(1, 3),)
    assert objects(third, 1) == ["0", "1", "2"]
    clock.advance(GRACE_SECONDS)
    third.keeper.tick()
    assert (objects(third, 1), objects(third, 2)) == (["2"], ["1"])


# ------------------------------------------------------------------------------ carrying


def test_what_waits_too_long_is_carried(store: MemoryStore, clock: ManualClock) -> None:
    """A topic that cannot be published keeps its records, and lets the old objects go."""
    rig = Rig(store, clock, options=RigOptions(hot_bytes=0, keeper=EAGER))
    rig.create("t", 2)
    rig.append(["a"], stamp=(1, 0, 0))
    rig.append(["b"], partition=1)
    rig.adopt([(0, ["c"])], batch=1)
    assert carry(rig) == 0
    clock.advance(CARRY_SECONDS)
    rig.append(["d"])
    assert carry(rig) == 0
    rig.keeper.checkpoint()
    rig.append(["e"])
    rig.keeper.checkpoint()
    assert carry(rig) == 3
    assert carry(rig) == 0
    rig.trim()
    assert objects(rig) == ["4", "5", "6"]
    for reader in (rig, rig.successor(), rig.successor(broker=2)):
        assert reader.read() == [(0, b"a"), (1, b"c"), (2, b"d"), (3, b"e")]
    last = rig.successor()
    assert last.append(["a"], stamp=(1, 0, 0)).duplicate
    assert not last.append(["f"], stamp=(1, 0, 1)).duplicate
    assert last.adopt([(0, ["c"])], batch=1)[0].duplicate
    last.publish()
    found = rows_of_table(store, clock)
    assert found == [(0, b"a"), (1, b"c"), (2, b"d"), (3, b"e"), (4, b"f")]
    assert rows_of_table(store, clock, partition=1) == [(0, b"b")]


def test_an_inherited_epoch_is_carried_away(store: MemoryStore, clock: ManualClock) -> None:
    """So it can be closed, although its topic is held back."""
    first = Rig(store, clock, options=RigOptions(hot_bytes=0, keeper=EAGER))
    first.create()
    first.append(["a"])
    second = first.successor(broker=2)
    clock.advance(CARRY_SECONDS + 1)
    assert carry(second) == 1
    second.trim()
    assert second.meta.reload().open_epochs == (Epoch(2, 1),)
    second.trim()
    assert objects(second) == ["1"]
    assert paths(store, wal.folder(1, 1)) == [f"{2:020d}"]
    assert second.successor(broker=1).read() == [(0, b"a")]


def test_carrying_goes_in_portions(store: MemoryStore, clock: ManualClock) -> None:
    """No object gets larger than a flush because of what is carried."""
    keeper = KeeperLimits(
        checkpoint_every_objects=0, carry_after_seconds=CARRY_SECONDS, carry_bytes=500
    )
    rig = Rig(store, clock, options=RigOptions(hot_bytes=0, keeper=keeper))
    rig.create()
    for number in range(7):
        rig.append(["a"], stamp=(1, 0, number))
    assert carry(rig) == 0
    clock.advance(CARRY_SECONDS + 1)
    carried: list[int] = []
    while True:
        rig.keeper.checkpoint()
        count = carry(rig)
        carried.append(count)
        if sum(carried) >= 7:
            break
        # Nobody takes a copy for the newest batch of its producer.
        assert rig.append(["a"], stamp=(1, 0, 6)).duplicate
        assert not rig.append(["b"], stamp=(2, 0, len(carried) - 1)).duplicate
    assert max(carried) < 4
    successor = rig.successor()
    assert [value for _, value in successor.read()][:7] == [b"a"] * 7
    assert not successor.append(["a"], stamp=(1, 0, 7)).duplicate


def test_what_was_carried_rests(store: MemoryStore, clock: ManualClock) -> None:
    """However much is written meanwhile, an entry is copied once in each period."""
    rig = Rig(store, clock, options=RigOptions(hot_bytes=0, keeper=EAGER))
    rig.create("t", 2)
    rig.append(["a"])
    carried = []
    for _ in range(40):
        clock.advance(CARRY_SECONDS / 10)
        for _ in range(5):
            rig.append(["b"], partition=1)
        rig.keeper.checkpoint()
        ticket = rig.keeper.carry()
        if ticket is None:
            carried.append(0)
            continue
        rig.writer.wait(ticket)
        entries = [each.located.entry for each in ticket.appends if isinstance(each, Carry)]
        carried.append(sum(entry.partition == 0 for entry in entries))
    assert sum(carried) in (3, 4)
    assert max(carried) == 1


@pytest.mark.parametrize("count", [1, 4_096])
def test_a_predecessors_clock_keeps_nothing_back(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Records from the future are carried after the time that we have waited ourselves."""
    monkeypatch.setattr(limits, "FLUSH_MAX_ENTRIES", count)
    ahead, ours = ManualClock(2_000_000_000_000_000), ManualClock(1_999_999_900_000_000)
    first = Rig(store, ahead, options=RigOptions(hot_bytes=0, keeper=EAGER))
    first.create()
    first.append(["a"])
    Rig(store, ours).append(["b"])
    rig = Rig(store, ours, options=RigOptions(hot_bytes=0, keeper=EAGER))
    assert carry(rig) == 0
    ours.advance(CARRY_SECONDS - 1)
    assert carry(rig) == 0
    ours.advance(2)
    assert sum(carry(rig) for _ in range(3)) == 2
    rig.keeper.checkpoint()
    rig.keeper.tick()
    assert rig.meta.reload().open_epochs == (Epoch(1, 3),)
    assert rig.successor().read() == [(0, b"a"), (1, b"b")]


def test_a_carry_that_fails_is_made_up_for(rig: Rig, clock: ManualClock) -> None:
    """What a full disk has refused is carried when there is space again."""
    assert isinstance(rig.store, MemoryStore)
    rig.append(["a"])
    second = rig.successor()
    clock.advance(CARRY_SECONDS + 1)
    full = errors.StorageFull(root="?", free_bytes=0, reserve_bytes=0)
    second.appender._store = rig.store.view(ScriptedFaults(Fault(operation="put_new", error=full)))
    with pytest.raises(errors.StorageFull):
        carry(second)
    assert carry(second) == 1
    assert carry(second) == 0


def test_what_is_published_meanwhile_is_not_brought_back(
    store: MemoryStore, clock: ManualClock
) -> None:
    """A copy that comes too late is needed by nobody."""
    rig = Rig(store, clock, options=RigOptions(hot_bytes=0, keeper=EAGER))
    rig.create()
    rig.append(["a"])
    rig.append(["b"])
    rig.keeper.checkpoint()
    clock.advance(CARRY_SECONDS + 1)
    ticket = rig.keeper.carry()
    assert ticket is not None
    rig.publish()
    rig.writer.wait(ticket)
    rig.confirmer.confirm()
    assert rig.ledger.needed(1, 1) == []
    assert rig.ledger.unpublished_bytes == 0
    assert rig.successor().read() == [(0, b"a"), (1, b"b")]


def test_a_damaged_entry_is_not_carried(store: MemoryStore, clock: ManualClock) -> None:
    """It stays where it is, for a person to look at, and the others go on."""
    rig = Rig(store, clock, options=RigOptions(hot_bytes=0, keeper=EAGER))
    rig.create()
    for value in ("a", "b", "c"):
        rig.append([value])
    rig.keeper.checkpoint()
    located = rig.ledger.topic("t").partition(0).unpublished[1]
    flip(store, wal.object_path(located.at), located.origin + located.entry.length - 20)
    clock.advance(CARRY_SECONDS + 1)
    assert carry(rig) == 1
    rig.keeper.checkpoint()
    assert carry(rig) == 1
    assert carry(rig) == 0
    rig.trim()
    assert "2" in objects(rig)


# ------------------------------------------------------------------------------ all together

steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 1), st.integers(1, 3)),
        st.tuples(st.just("retry"), st.integers(0, 1), st.integers(0, 4)),
        st.tuples(st.just("adopt"), st.integers(0, 2), st.integers(0, 1)),
        st.tuples(st.just("publish"), st.just(0), st.just(0)),
        st.tuples(st.just("checkpoint"), st.just(0), st.just(0)),
        st.tuples(st.just("tick"), st.sampled_from([0, 11, 301]), st.just(0)),
        st.tuples(st.just("carry"), st.just(0), st.just(0)),
        st.tuples(st.just("takeover"), st.integers(1, 2), st.just(0)),
        st.tuples(st.just("power cut"), st.just(0), st.just(0)),
    ),
    max_size=25,
)


class Model:
    """What the log must hold, and a broker that is told the same."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        keeper = KeeperLimits(
            checkpoint_every_objects=2,
            checkpoint_every_seconds=1e9,
            trim_grace_seconds=GRACE_SECONDS,
            carry_after_seconds=CARRY_SECONDS,
            carry_bytes=400,
        )
        options = RigOptions(hot_bytes=1_500, keeper=keeper, commit_bytes=500, file_bytes=300)
        self.rig = Rig(self.store, self.clock, options=options)
        self.rig.create("t", 2)
        self.follower = RootFollower(self.store, clock=self.clock)
        self.log: list[list[bytes]] = [[], []]
        self.sent: list[list[tuple[int, list[str], int]]] = [[], []]
        self.sequence = [0, 0]
        self.batches: list[list[tuple[int, list[str]]]] = []

    def step(self, what: str, first: int, second: int) -> None:
        match what:
            case "append":
                self.append(first, second)
            case "retry" if second < len(self.sent[first]):
                sequence, values, offset = self.sent[first][-1 - second]
                again = self.rig.append(values, partition=first, stamp=(1, 0, sequence))
                assert (again.base_offset, again.duplicate) == (offset, True)
            case "adopt":
                self.adopt(first, second)
            case "publish":
                self.rig.publisher.publish(self.rig.ledger.topic("t"))
            case "checkpoint":
                self.rig.keeper.checkpoint()
            case "tick":
                self.clock.advance(first)
                self.rig.keeper.tick()
            case "carry":
                self.clock.advance(CARRY_SECONDS + 1)
                self.rig.keeper.checkpoint()
                carry(self.rig)
            case "takeover":
                self.rig = self.rig.successor(broker=first)
            case "power cut":
                self.store.lose_unsynced(lambda _: True)
                self.rig = self.rig.successor()

    def append(self, partition: int, count: int) -> None:
        base = len(self.log[partition])
        values = [f"{partition}:{base + number}" for number in range(count)]
        sequence = self.sequence[partition]
        placed = self.rig.append(values, partition=partition, stamp=(1, 0, sequence))
        assert (placed.base_offset, placed.duplicate) == (base, False)
        self.sent[partition].append((sequence, values, base))
        self.sequence[partition] += count
        self.log[partition] += [value.encode() for value in values]

    def adopt(self, age: int, partition: int) -> None:
        """A new batch of a query, or, with an age, one that was adopted before."""
        if age and age <= len(self.batches):
            number = len(self.batches) - age
            assert all(
                each.duplicate for each in self.rig.adopt(self.batches[number], batch=number)
            )
            return
        number = len(self.batches)
        sections = [(partition, [f"batch {number}"]), (0, ["x", "y"]), (1, ["z"])]
        self.batches.append(sections)
        assert not any(each.duplicate for each in self.rig.adopt(sections, batch=number))
        for place, values in sections:
            self.log[place] += [value.encode() for value in values]

    def expected(self, partition: int) -> list[Row]:
        return list(enumerate(self.log[partition]))

    def check(self) -> None:
        for partition in (0, 1):
            expected = self.expected(partition)
            assert self.rig.read(partition=partition) == expected
            assert rows_of_root(self.store, self.clock, partition=partition) == expected
            assert rows_followed(self.follower, self.store, partition=partition) == expected


@settings(max_examples=60)
@given(steps)
def test_no_upkeep_changes_the_log(taken: list[tuple[str, int, int]]) -> None:
    """Through any appends, commits, checkpoints, trims and takeovers the log reads the same."""
    model = Model()
    for step in taken:
        model.step(*step)
        model.check()
    # And in the end there is nothing left but the tables.
    model.rig = rig = model.rig.successor()
    model.check()
    rig.publish()
    rig.trim()
    rig.trim()
    for partition in (0, 1):
        found = rows_of_table(model.store, model.clock, partition=partition)
        assert found == model.expected(partition)
    assert rig.meta.reload().open_epochs == (Epoch(rig.lease.broker, rig.lease.epoch),)
    assert len(objects(rig)) == 1
    for broker, epoch in {
        (int(name.split("/")[0]), int(name.split("/")[1])) for name in paths(model.store, "wal")
    } - {(rig.lease.broker, rig.lease.epoch)}:
        assert len(paths(model.store, wal.folder(broker, epoch))) == 1
