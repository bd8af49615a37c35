from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import pytest

from sparklog import errors, limits
from sparklog.clock import ManualClock
from sparklog.storage.follow import TABLE_AGE_SECONDS, RootFollower
from sparklog.storage.objects import DelayedStore, MemoryStore, NoFaults, ObjectMissing
from sparklog.storage.objects.faults import Operation
from sparklog.storage.wal.base import object_path
from tests.support.brokers import Rig, RigOptions, flip, rows_followed, rows_of_slices

pytestmark = pytest.mark.rig(topics={"t": 1, "u": 1}, hot_bytes=0)

DOWN = errors.StorageUnavailable(operation="?", path="?", reason="down")


def test_a_place_without_a_root_is_refused(store: MemoryStore, clock: ManualClock) -> None:
    """A reader makes no root."""
    with pytest.raises(errors.NotARoot):
        RootFollower(store, clock=clock)


def test_every_acked_record_is_seen_at_once(rig: Rig) -> None:
    """Published or not, trimmed or not, under whatever broker."""
    follower = RootFollower(rig.store, clock=rig.clock)
    expected = []
    for number in range(12):
        rig.append([f"{number}"])
        expected.append((number, b"%d" % number))
        if number % 3 == 0:
            rig.publish()
        if number % 4 == 0:
            rig.trim()
        if number % 5 == 0:
            rig = rig.successor()
        assert rows_followed(follower, rig.store) == expected


@pytest.mark.parametrize("seed", range(10))
def test_a_table_that_was_read_earlier_lacks_nothing(
    rig: Rig, clock: ManualClock, seed: int
) -> None:
    """Promise: a reader that reads its tables rarely sees every acked record, and no other.

    Whatever was published, trimmed and taken over since, and however long the reader has paused. An
    object that is gone by then is in the table, which is then read again.
    """
    chance = random.Random(seed)
    follower = RootFollower(rig.store, clock=rig.clock)
    expected: dict[str, list[tuple[int, bytes]]] = {"t": [], "u": []}

    def append(topic: str) -> None:
        number = len(expected[topic])
        rig.append([f"{number}"], topic=topic)
        expected[topic].append((number, b"%d" % number))

    for _ in range(60):
        match chance.choice("aaapttrwwl"):
            case "a":
                append(chance.choice("tu"))
            case "p":
                rig.publish()
                rig.confirmer.confirm()
            case "t":
                rig.trim()
            case "r":
                rig = rig.successor()
            case "w":
                clock.advance(chance.choice([0.5, 4.0, 11.0]))
            case _:
                names = chance.choice([["t"], ["u"], ["t", "u"]])
                tables = follower.refresh(names, table_age_seconds=1e9)
                for name in names:
                    assert follower.ends(tables[name]) == (len(expected[name]),)
                    end = len(expected[name])
                    slices = follower.plan(name, tables[name], 0, 0, end)
                    assert [each.first for each in slices][:1] == [0][:end]
                    with contextlib.suppress(ObjectMissing):
                        assert rows_of_slices(rig.store, slices) == expected[name]
    for name, rows in expected.items():
        assert rows_followed(follower, rig.store, name) == rows


def test_tables_are_read_when_they_have_news(store: MemoryStore, clock: ManualClock) -> None:
    """A table of which nothing is new is read once a minute, and one with news after the age."""
    counting = DelayedStore(store, 0.0, clock)
    rig = Rig(store, clock)
    for topic in ("t", "u"):
        rig.create(topic)
        rig.append(["a"], topic=topic)
    rig.publish()
    follower = RootFollower(counting, clock=clock)

    def looks() -> int:
        """Returns the tables that a refresh has read: the second of two probes is a `stat`."""
        before = counting.requests["stat"]
        follower.refresh(["t", "u"], table_age_seconds=TABLE_AGE_SECONDS)
        return counting.requests["stat"] - before

    assert looks() == 2
    for _ in range(11):
        clock.advance(TABLE_AGE_SECONDS)
        assert looks() == 0
    clock.advance(TABLE_AGE_SECONDS)
    assert looks() == 2
    rig.append(["b"])
    clock.advance(TABLE_AGE_SECONDS - 1)
    assert looks() == 0
    clock.advance(1)
    assert looks() == 1


def test_a_topic_may_be_asked_for_later(rig: Rig) -> None:
    """Records appended before the first look are seen all the same."""
    follower = RootFollower(rig.store, clock=rig.clock)
    rig.append(["a"])
    rig.append(["x"], topic="u")
    assert rows_followed(follower, rig.store) == [(0, b"a")]
    rig.append(["y"], topic="u")
    assert rows_followed(follower, rig.store, "u") == [(0, b"x"), (1, b"y")]
    assert rows_followed(follower, rig.store) == [(0, b"a")]


def test_what_nobody_asks_for_is_not_kept(rig: Rig) -> None:
    """A reader of one topic does not pile up the others' entries, nor those that are published."""
    follower = RootFollower(rig.store, clock=rig.clock)
    for number in range(5):
        rig.append([f"{number}"])
        rig.append([f"{number}"], topic="u")
        follower.refresh(["t"])
    assert {key: len(entries) for key, entries in follower._entries.items()} == {
        (rig.led_partitions.topic("t").topic_id, 0): 5
    }
    rig.publish()
    follower.refresh(["t"])
    assert sum(map(len, follower._entries.values())) == 0


def test_an_unknown_topic_is_named(rig: Rig) -> None:
    """A topic that is not there, or no longer, is an error and no silence."""
    follower = RootFollower(rig.store, clock=rig.clock)
    with pytest.raises(errors.UnknownTopic):
        follower.refresh(["v"])
    rig.append(["a"])
    follower.refresh(["t"])
    rig.broker.topics.delete("t")
    with pytest.raises(errors.UnknownTopic) as refused:
        follower.refresh(["t", "u"])
    assert refused.value.topic == "t"


def test_a_topic_that_is_made_anew_is_another(rig: Rig) -> None:
    """A reader of the name sees the new topic's records, and none of the old one's."""
    follower = RootFollower(rig.store, clock=rig.clock)
    rig.append(["old", "old"])
    assert len(rows_followed(follower, rig.store)) == 2
    rig.broker.topics.delete("t")
    rig.create()
    assert rows_followed(follower, rig.store) == []
    rig.append(["new"])
    assert rows_followed(follower, rig.store) == [(0, b"new")]


class Flaky(NoFaults):
    """The n-th request fails."""

    def __init__(self) -> None:
        self.left = 0

    def before(self, operation: Operation, path: str, /) -> None:
        self.left -= 1
        if self.left == 0:
            raise DOWN


def test_a_failed_look_misses_nothing(store: MemoryStore, clock: ManualClock) -> None:
    """Whichever request fails, the next look sees all that there is."""
    failures = 0
    for count in range(1, 40):
        store = MemoryStore(clock)
        rig = Rig(store, clock, options=RigOptions(hot_bytes=0))
        rig.create()
        rig.append(["0"])
        flaky = Flaky()
        follower = RootFollower(store.view(flaky), clock=clock)
        follower.refresh(["t"])
        expected = [(0, b"0")]
        for number in range(1, 4):
            rig.append([f"{number}"])
            expected.append((number, b"%d" % number))
        rig.publish()
        rig = rig.successor()
        rig.append(["4"])
        flaky.left = count
        try:
            follower.refresh(["t"])
        except errors.StorageUnavailable:
            failures += 1
        flaky.left = 0
        assert rows_followed(follower, store) == [*expected, (4, b"4")]
    assert failures > 10


class Pausing(NoFaults):
    """Before the reader first looks into a log, something happens."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], None] = lambda: None
        self.armed = False

    def before(self, operation: Operation, path: str, /) -> None:
        if self.armed and path.startswith("wal"):
            self.armed = False
            self.meanwhile()


def test_a_reader_that_pauses_looks_again(store: MemoryStore, clock: ManualClock) -> None:
    """Records that are carried, published and trimmed during a slow look are not missed."""
    pausing = Pausing()
    rig = Rig(store, clock, options=RigOptions(hot_bytes=0))
    rig.create()
    rig.append(["a"])
    follower = RootFollower(store.view(pausing), clock=clock)
    rig.append(["b"])

    def hand_over() -> None:
        second = rig.successor()
        second.publish()
        second.trim()
        second.append(["c"])
        second.publish()
        second.trim()
        second.append(["d"])

    pausing.meanwhile, pausing.armed = hand_over, True
    expected = [(0, b"a"), (1, b"b"), (2, b"c"), (3, b"d")]
    assert rows_followed(follower, store) == expected


def test_a_reader_whose_machine_slept_sees_the_end(store: MemoryStore, clock: ManualClock) -> None:
    """The objects that it would look for next were trimmed meanwhile, which is not their end."""

    class Suspended(ManualClock):
        def monotonic(self) -> float:
            return 0.0

    rig = Rig(store, clock, options=RigOptions(hot_bytes=0))
    rig.create()
    rig.append(["a"])
    asleep = Suspended(clock.now_us())
    follower = RootFollower(store, clock=asleep)
    assert rows_followed(follower, store) == [(0, b"a")]
    for text in "bc":
        rig.append([text])
        rig.publish()
        rig.trim()
    rig.append(["d"])
    asleep.advance(limits.TRIM_GRACE_SECONDS)
    assert rows_followed(follower, store) == [(0, b"a"), (1, b"b"), (2, b"c"), (3, b"d")]


def test_brokers_that_come_and_go_end_no_look(store: MemoryStore, clock: ManualClock) -> None:
    """A look is repeated as long as epochs open and close, however often that is."""
    pausing = Pausing()
    rig = Rig(store, clock, options=RigOptions(hot_bytes=0))
    rig.create()
    rig.append(["0"])
    follower = RootFollower(store.view(pausing), clock=clock)
    follower.refresh(["t"])
    expected = [(0, b"0")]

    def hand_over() -> None:
        nonlocal rig
        rig = rig.successor()
        rig.publish()
        rig.append([f"{len(expected)}"])
        rig.publish()
        rig.trim()
        expected.append((len(expected), b"%d" % len(expected)))
        pausing.armed = len(expected) < 10

    pausing.meanwhile, pausing.armed = hand_over, True
    assert rows_followed(follower, store) == expected
    assert len(expected) == 10


def test_what_precedes_a_corrupt_object_is_seen(rig: Rig, store: MemoryStore) -> None:
    """A reader gets the sound part of the log, then an error that names the damage."""
    rig.append(["a"])
    rig.append(["b"])
    located = rig.led_partitions.topic("t").partition(0).unpublished[1]
    flip(store, object_path(located.at), 20)
    follower = RootFollower(store, clock=rig.clock)
    assert rows_followed(follower, store) == [(0, b"a")]
    with pytest.raises(errors.CorruptObject) as corrupt:
        follower.refresh(["t"])
    assert corrupt.value.path == object_path(located.at)
